"""A job in the way of Ray's: a head that says what is to be done, and workers that make objects, fetch those of each other
over connections of their own, and hand them to the head.

job.py head PORT, job.py worker HEAD PORT. The head writes to /tmp/result: the hash of all that it was handed, how many
bytes went over connections, and in how many seconds. Then it goes on asking, so that the connections last.
"""

import hashlib
import os
import socket
import sys
import threading
import time
from multiprocessing.connection import Client, Listener

KEY = b"job"
WORKERS = 2
OBJECTS = 2  # of each worker
SIZE = 4 << 20
ROUNDS = 16


def made(number):
    return b"".join(hashlib.sha256(b"%d:%d" % (number, i)).digest() for i in range(SIZE // 32))


def head(port):
    with Listener(("0.0.0.0", port), authkey=KEY) as listener:
        workers = [listener.accept() for _ in range(WORKERS)]
    where = [w.recv() for w in workers]
    for n, w in enumerate(workers):
        w.send(("make", [n * OBJECTS + i for i in range(OBJECTS)], where[(n + 1) % WORKERS]))
    for w in workers:
        w.recv()
    took, size, whole = 0, 0, hashlib.sha256()
    for _ in range(ROUNDS):
        begin = time.monotonic()
        for n, w in enumerate(workers):
            w.send(("fetch", [(n + 1) % WORKERS * OBJECTS + i for i in range(OBJECTS)]))
        got = [w.recv_bytes() for w in workers for _ in range(OBJECTS)]
        took += time.monotonic() - begin
        for o in got:
            whole.update(o)
            # From a worker to the other, and from there to the head.
            size += 2 * len(o)
    with open("/tmp/new", "w") as f:
        print(whole.hexdigest(), size, took, file=f)
    os.rename("/tmp/new", "/tmp/result")
    while True:
        for w in workers:
            w.send(("fetch", []))
        time.sleep(0.1)


def serve(listener, objects):
    with listener.accept() as other:
        while True:
            other.send_bytes(objects[other.recv()])


def reached(at):
    while True:
        try:
            return Client(at, authkey=KEY)
        except (OSError, EOFError):
            time.sleep(0.1)


def worker(at):
    objects, other = {}, None
    here = socket.gethostbyname(socket.gethostname())
    listener = Listener((here, 0), authkey=KEY)
    threading.Thread(target=serve, args=(listener, objects), daemon=True).start()
    to_head = reached(at)
    to_head.send(listener.address)
    while True:
        what, numbers, *more = to_head.recv()
        if what == "make":
            objects.update((n, made(n)) for n in numbers)
            other = reached(more[0])
            to_head.send("made")
        else:
            for n in numbers:
                other.send(n)
                to_head.send_bytes(other.recv_bytes())


if sys.argv[1] == "head":
    head(int(sys.argv[2]))
else:
    worker((sys.argv[2], int(sys.argv[3])))
