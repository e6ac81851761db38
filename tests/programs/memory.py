"""A server that sends a lot on each of its connections, and its clients.

    memory.py serve PORT N      prints "hash NUMBER SHA256" of what it is going to send on each of the first N connections,
                                "ready", and "have N" when it has these; waits for no connection, and makes no memory of
                                its own from then on
    memory.py ask PORT NUMBER GO READ
                                is connection NUMBER: asks and is answered now and then until the file GO exists; then it
                                is sent what it is to be sent, reads it slowly, the second half when the file READ exists, and
                                prints "hash NUMBER SHA256"
"""
import hashlib
import os
import selectors
import socket
import sys
import time

SIZE = 8 << 20
STEP = 4096
PAUSE = 0.02
SLOW = 0.005  # rings are full, and it gets out of each in the end


class Connection:
    def __init__(self, sock):
        self.sock, self.number, self.rest = sock, None, None


def serve(port, n):
    noise = memoryview(os.urandom(SIZE + n * STEP))
    texts = [noise[i * STEP : i * STEP + SIZE] for i in range(n)]
    for i, text in enumerate(texts):
        print("hash", i, hashlib.sha256(text).hexdigest())
    selector = selectors.DefaultSelector()
    listener = socket.create_server(("127.0.0.1", port), backlog=256)
    listener.setblocking(False)
    selector.register(listener, selectors.EVENT_READ)
    print("ready", flush=True)
    known = 0
    while True:
        for key, events in selector.select():
            if key.fileobj is listener:
                sock = listener.accept()[0]
                sock.setblocking(False)
                selector.register(sock, selectors.EVENT_READ, Connection(sock))
                continue
            c = key.data
            if events & selectors.EVENT_READ:
                was = c.number
                if not heard(c, texts):
                    selector.unregister(c.sock)
                    c.sock.close()
                    continue
                if was is None and c.number is not None:
                    known += 1
                    if known == n:
                        print("have", known, flush=True)
            if c.rest is not None:
                wanted = selectors.EVENT_READ | selectors.EVENT_WRITE
                if not told(c):
                    c.sock.shutdown(socket.SHUT_WR)
                    c.rest, wanted = None, selectors.EVENT_READ
                if selector.get_key(c.sock).events != wanted:
                    selector.modify(c.sock, wanted, c)


def heard(c, texts):
    """What a client says: its number, then a byte each time that it wants an answer, and G."""
    said = c.sock.recv(64)
    for byte in said:
        if c.number is None:
            c.number = byte
        elif byte == ord("G"):
            c.rest = texts[c.number]
        else:
            c.sock.send(b"p")
    return bool(said)


def told(c):
    """Sends as much as it is let; is there more?"""
    try:
        while c.rest:
            c.rest = c.rest[c.sock.send(c.rest) :]
    except BlockingIOError:
        pass
    return len(c.rest) > 0


def ask(port, number, go, read):
    c = socket.create_connection(("127.0.0.1", port))
    c.sendall(bytes([number]))
    while not os.path.exists(go):
        c.sendall(b"p")
        assert c.recv(1) == b"p"
        time.sleep(PAUSE)
    c.sendall(b"G")
    all, n = hashlib.sha256(), 0
    while got := c.recv(64 << 10):
        all.update(got)
        n += len(got)
        while n >= SIZE // 2 and not os.path.exists(read):
            time.sleep(PAUSE)
        time.sleep(SLOW)
    print("hash", number, all.hexdigest(), flush=True)


if sys.argv[1] == "serve":
    serve(*map(int, sys.argv[2:]))
else:
    ask(int(sys.argv[2]), int(sys.argv[3]), *sys.argv[4:])
