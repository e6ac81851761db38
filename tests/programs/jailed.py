"""A server that gives up what it does not need, and clients for it.

    jailed.py serve DIR      prints "port N"; changes root to DIR, user to nobody, closes all descriptors
    jailed.py handed DIR     the same, by a program that has the listener from another, and no socket of its own
    jailed.py load PORT
"""
import os
import socket
import sys
import threading
import time

WORKERS, CLIENTS, SECONDS = 2, 4, 4
NOBODY = 65534


def answer(s):
    with s:
        while data := s.recv(4096):
            s.sendall(data)


def worker(listener):
    while True:
        s, _ = listener.accept()
        threading.Thread(target=answer, args=(s,), daemon=True).start()


def listen():
    listener = socket.create_server(("127.0.0.1", 0), backlog=64)
    print("port", listener.getsockname()[1], flush=True)
    return listener


def hand(jail):
    listener = listen()
    listener.set_inheritable(True)
    os.execv(sys.executable, [sys.executable, __file__, "serve", jail, str(listener.fileno())])


def serve(jail, handed=None):
    os.chmod(jail, 0o755)
    listener = socket.socket(fileno=int(handed)) if handed else listen()
    time.sleep(0.1)
    if os.fork():
        os.wait()
        return
    os.chroot(jail)
    os.chdir("/")
    os.setgroups([])
    os.setgid(NOBODY)
    os.setuid(NOBODY)
    keep = listener.fileno()
    os.closerange(0, keep)
    os.closerange(keep + 1, 1 << 20)
    for fd in list(range(keep)) + list(range(keep + 1, 70_000)):
        try:
            os.close(fd)
        except OSError:
            pass
    for _ in range(WORKERS):
        if not os.fork():
            worker(listener)
    os.wait()


def load(port):
    def one():
        with socket.create_connection(("127.0.0.1", port)) as s:
            end = time.monotonic() + SECONDS
            n = 0
            while time.monotonic() < end:
                data = b"%08d" % n * 100
                s.sendall(data)
                got = b""
                while len(got) < len(data):
                    got += s.recv(4096)
                assert got == data
                n += 1
    all_ = [threading.Thread(target=one) for _ in range(CLIENTS)]
    [t.start() for t in all_]
    [t.join() for t in all_]
    print("ok")


if sys.argv[1] == "serve":
    serve(*sys.argv[2:])
elif sys.argv[1] == "handed":
    hand(sys.argv[2])
else:
    load(int(sys.argv[2]))
