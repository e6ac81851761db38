"""messages.py serve|load PORT DIR: a router that answers, and four dealers that have several on the way."""
import os
import sys
import threading

import zmq

from common import Load, check, digest

what, port, dir = sys.argv[1], sys.argv[2], sys.argv[3]
context = zmq.Context()
where = f"tcp://127.0.0.1:{port}"


def serve():
    s = context.socket(zmq.ROUTER)
    s.bind(where)
    while True:
        who, data = s.recv_multipart()
        s.send_multipart([who, digest(data), data])


counts = []


def deal(load):
    s = context.socket(zmq.DEALER)
    s.connect(where)
    sizes = [10, 1000, 100_000, 20, 500, 1_000_000, 100]
    noise = [os.urandom(n) for n in sizes]
    sent = received = 0
    while True:
        while sent - received < 8 and not load.over():
            s.send(noise[sent % len(noise)])
            sent += 1
        if sent == received:
            break
        hash, data = s.recv_multipart()
        check(data == noise[received % len(noise)] and hash == digest(data))
        received += 1
    counts.append(received)


if what == "serve":
    serve()
load = Load(dir)
threads = [threading.Thread(target=deal, args=(load,)) for _ in range(4)]
[t.start() for t in threads]
[t.join() for t in threads]
check(len(counts) == 4)
load.done(sum(counts), "messages/s")
