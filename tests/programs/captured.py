"""Two ends of a connection for a capture. Every eight bytes of a stream say where in it they are.

    captured.py serve HOST GATE ROUNDS CHUNK REPLY
    captured.py connect HOST PORT GATE ROUNDS CHUNK REPLY PAUSE_MS

Rounds of 64 bytes each way until the client sees the file GATE (it tells the server by another file, or, if the last word
is `apart`, because they are on two machines, by another connection); then ROUNDS rounds of CHUNK bytes to the server and REPLY bytes
back. At the file GATE.dark, the server forbids everybody but root to look into it, and makes GATE.done. Both print the
SHA-256 of what they sent in the latter (`sent`), and the client the seconds that these took.
"""

import array
import ctypes
import hashlib
import os
import select
import socket
import sys
import time

SMALL = 64
PR_SET_DUMPABLE = 4


class Stream:
    def __init__(self):
        self.at = 0
        self.hash = hashlib.sha256()

    def take(self, n):
        assert n % 8 == 0
        first = self.at // 8
        b = array.array("Q", range(first, first + n // 8)).tobytes()
        self.at += n
        return b


def exact(s, n):
    view = memoryview(bytearray(n))
    done = 0
    while done < n:
        k = s.recv_into(view[done:])
        if k == 0:
            raise EOFError(f"{done} of {n} bytes")
        done += k
    return view


def main():
    what, host, *rest = sys.argv[1:]
    apart = rest[-1] == "apart"
    if apart:
        rest.pop()
    out, come = Stream(), Stream()
    family = socket.AF_INET6 if ":" in host else socket.AF_INET

    def send(s, n, counts=True):
        b = out.take(n)
        if counts:
            out.hash.update(b)
        s.sendall(b)

    def receive(s, n):
        assert exact(s, n) == come.take(n), "other bytes than were sent"

    if what == "serve":
        gate = rest[0]
        rounds, chunk, reply = map(int, rest[1:])
        listener = socket.create_server((host, 0), family=family)
        print("port", listener.getsockname()[1], flush=True)
        s, _ = listener.accept()
        receive(s, SMALL)

        def begun():
            if not apart:
                return os.path.exists(gate + ".begun")
            return select.select([listener], [], [], 0)[0] != []

        while not begun():
            send(s, SMALL, False)
            receive(s, SMALL)
            if os.path.exists(gate + ".dark") and not os.path.exists(gate + ".done"):
                assert ctypes.CDLL(None).prctl(PR_SET_DUMPABLE, 0, 0, 0, 0) == 0
                open(gate + ".done", "w").close()
        for n in range(rounds):
            receive(s, chunk if n else chunk - SMALL)
            if reply:
                send(s, reply)
        assert s.recv(1) == b"", "the end"
        print("sent", out.hash.hexdigest(), flush=True)
        return
    port, gate = int(rest[0]), rest[1]
    rounds, chunk, reply, pause = map(int, rest[2:])
    s = socket.create_connection((host, port))
    print("local", s.getsockname()[1], flush=True)
    while not os.path.exists(gate):
        send(s, SMALL, False)
        receive(s, SMALL)
        time.sleep(0.01)
    if apart:
        told = socket.create_connection((host, port))
        time.sleep(0.5)  # the first bytes may come by another way than this
    else:
        open(gate + ".begun", "w").close()
    began = time.monotonic()
    for _ in range(rounds):
        send(s, chunk)
        if reply:
            receive(s, reply)
        if pause:
            time.sleep(pause / 1000)
    s.close()
    if apart:
        told.close()
    print("took", time.monotonic() - began, flush=True)
    print("sent", out.hash.hexdigest(), flush=True)


main()
