"""Two ends that both send without a pause, hash what they sent and what they received, and say so.

    transfer.py serve HOST            prints "port N", serves one connection
    transfer.py connect HOST PORT UNTIL
                                      sends until the file UNTIL exists

Each end prints "sent N" now and then. Plain blocking sockets and two threads: nothing here knows
about Underpass. The connecting end
finishes first (half-close); the serving end answers with its own end of stream.
"""
import hashlib
import json
import os
import random
import socket
import sys
import threading
import time


def stream(seed):
    """Noise in pieces of many sizes, the same for the same seed."""
    r = random.Random(seed)
    base = r.randbytes(1 << 20)
    while True:
        n = r.choice((1, 17, 512, 4096, 20000, 65536, 250000))
        at = r.randrange(len(base) - n)
        yield memoryview(base)[at:at + n]


class Sender(threading.Thread):
    def __init__(self, sock, seed, stop):
        super().__init__()
        self.sock, self.seed, self.stop, self.error = sock, seed, stop, None
        self.hash, self.bytes = hashlib.sha256(), 0

    def run(self):
        told = time.monotonic()
        try:
            for piece in stream(self.seed):
                if self.stop():
                    break
                if time.monotonic() - told > 0.1:
                    told = time.monotonic()
                    print("sent", self.bytes, flush=True)
                self.sock.sendall(piece)
                self.hash.update(piece)
                self.bytes += len(piece)
            self.sock.shutdown(socket.SHUT_WR)
        except OSError as e:
            self.error = repr(e)


def receive(sock):
    h, n = hashlib.sha256(), 0
    buf = bytearray(1 << 17)
    while True:
        got = sock.recv_into(buf)
        if got == 0:
            return h.hexdigest(), n
        h.update(memoryview(buf)[:got])
        n += got


def main():
    host = sys.argv[2]
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    peer_done = threading.Event()
    if sys.argv[1] == "serve":
        listener = socket.create_server((host, 0), family=family)
        print("port", listener.getsockname()[1], flush=True)
        sock, _ = listener.accept()
        listener.close()
        sender = Sender(sock, 2, peer_done.is_set)
    else:
        sock = socket.create_connection((host, int(sys.argv[3])))
        until = sys.argv[4]
        sender = Sender(sock, 1, lambda: os.path.exists(until))
    sender.start()
    error = None
    try:
        received, count = receive(sock)
    except OSError as e:
        error, received, count = repr(e), "", 0
    peer_done.set()
    sender.join()
    print("result", json.dumps({
        "sent": sender.hash.hexdigest(), "sent_bytes": sender.bytes,
        "received": received, "received_bytes": count,
        "error": error or sender.error,
    }), flush=True)
    sock.close()
    sys.exit(1 if error or sender.error else 0)


main()
