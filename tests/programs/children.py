"""An echo whose process forks and ends, and whose child goes on: what a program does that connects
before it becomes a daemon.

    children.py serve HOST FORK [idle|pidns|late]
                                      prints "port N", serves one connection; forks when the file FORK
                                      exists; idle: the child leaves the connection alone; pidns: it is in
                                      a pid namespace of its own; late: nobody of its user
                                      may look at it, and it does nothing for 5 s
    children.py connect HOST PORT UNTIL  sends until the file UNTIL exists, and compares what comes back;
                                      prints "result eof" or "result reset", and how many bytes came

Nothing here knows about Underpass.
"""
import ctypes
import os
import random
import socket
import sys
import threading
import time

NOISE = random.Random(7).randbytes(1 << 20)
#: Bytes per second.
RATE = 100_000


def noise(at, n):
    at %= len(NOISE)
    return (NOISE + NOISE[:n])[at:at + n] if at + n > len(NOISE) else NOISE[at:at + n]


CLONE_NEWPID = 0x20000000
PR_SET_DUMPABLE = 4


def serve(sock, fork, how):
    forked = False
    while piece := sock.recv(20_000):
        sock.sendall(piece)
        if not forked and os.path.exists(fork):
            forked = True
            if how == "pidns":
                assert ctypes.CDLL(None).unshare(CLONE_NEWPID) == 0
            if os.fork():
                os._exit(0)
            if how == "idle":
                time.sleep(3600)
            if how == "late":
                assert ctypes.CDLL(None).prctl(PR_SET_DUMPABLE, 0, 0, 0, 0) == 0
                time.sleep(5)  # two looks of the daemon, which rests a second after each
    sock.close()


def send(sock, until):
    r, at = random.Random(1), 0
    try:
        while not os.path.exists(until):
            n = r.choice((1, 100, 3000, 30_000))
            sock.sendall(noise(at, n))
            at += n
            time.sleep(n / RATE)
        sock.shutdown(socket.SHUT_WR)
    except OSError:
        pass  # the receiver says so


def main():
    host = sys.argv[2]
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    if sys.argv[1] == "serve":
        listener = socket.create_server((host, 0), family=family)
        print("port", listener.getsockname()[1], flush=True)
        sock, _ = listener.accept()
        listener.close()
        return serve(sock, sys.argv[3], *(sys.argv[4:] or [""]))
    sock = socket.create_connection((host, int(sys.argv[3])))
    threading.Thread(target=send, args=(sock, sys.argv[4]), daemon=True).start()
    at, end = 0, "eof"
    try:
        while piece := sock.recv(50_000):
            if piece != noise(at, len(piece)):
                end = f"wrong bytes after {at}"
                break
            at += len(piece)
            print("got", at, flush=True)
    except ConnectionResetError:
        end = "reset"
    print("result", end, at, flush=True)


main()
