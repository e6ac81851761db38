"""A stream of which every byte is compared, as fast as it should be and no faster.

flow.py serve PORT sends back what it is sent. flow.py ask HOST PORT sends blocks, no two alike, while it compares what
comes back, and writes to /tmp/flowed how many blocks were right. It ends at the first byte that is wrong, and at an end.
"""

import hashlib
import os
import socket
import sys
import threading
import time

BLOCK = 64 << 10
NOISE = b"".join(hashlib.sha256(b"flow %d" % i).digest() for i in range((1 << 20) // 32))
PAUSE = 0.008  # between two blocks: 8 MB/s each way


def block(n):
    at = n * 4099 % (len(NOISE) - BLOCK)
    return n.to_bytes(8, "big") + NOISE[at : at + BLOCK - 8]


def serve(port):
    with socket.create_server(("0.0.0.0", port)) as listener:
        while True:
            threading.Thread(target=echo, args=(listener.accept()[0],), daemon=True).start()


def echo(connection):
    with connection:
        while got := connection.recv(BLOCK):
            connection.sendall(got)


def reached(at):
    while True:
        try:
            return socket.create_connection(at, timeout=30)
        except OSError:
            time.sleep(0.1)


def send(connection):
    n = 0
    while True:
        connection.sendall(block(n))
        n += 1
        time.sleep(PAUSE)


def ask(at):
    connection = reached(at)
    connection.settimeout(None)
    threading.Thread(target=send, args=(connection,), daemon=True).start()
    got, n = bytearray(), 0
    while True:
        got += connection.recv(BLOCK) or sys.exit(f"the end, after {n} blocks")
        while len(got) >= BLOCK:
            if got[:BLOCK] != block(n):
                sys.exit(f"block {n} is wrong")
            del got[:BLOCK]
            n += 1
            with open("/tmp/new", "w") as f:
                print(n, file=f)
            os.rename("/tmp/new", "/tmp/flowed")


if sys.argv[1] == "serve":
    serve(int(sys.argv[2]))
else:
    ask((sys.argv[2], int(sys.argv[3])))
