"""Many connections on one level-triggered epoll set, promoted while they are busy.

Every event must be true: a socket reported readable must have something to read. Each connection
sends a request, waits for its answer, and is replaced by a new one after ROUNDS of them.

usage: busy_epoll.py serve | busy_epoll.py client PORT CONNECTIONS
"""

import select
import socket
import sys

SIZE = 100
ROUNDS = 40


def fail(what):
    print(what, file=sys.stderr, flush=True)
    sys.exit(1)


def take(s):
    try:
        return s.recv(SIZE)
    except BlockingIOError:
        fail("an event without anything to read")


def serve():
    listener = socket.create_server(("127.0.0.1", 0), backlog=512)
    listener.setblocking(False)
    ep = select.epoll()
    ep.register(listener, select.EPOLLIN)
    print(f"port {listener.getsockname()[1]}", flush=True)
    socks = {}
    seen = False
    while socks or not seen:
        for fd, _ in ep.poll():
            if fd == listener.fileno():
                s, _ = listener.accept()
                s.setblocking(False)
                socks[s.fileno()] = s
                ep.register(s, select.EPOLLIN)
                seen = True
                continue
            s = socks[fd]
            data = take(s)
            if data:
                s.send(data)
            else:
                ep.unregister(fd)
                del socks[fd]
                s.close()


def client(port, connections):
    ep = select.epoll()
    socks = {}
    count = {}

    def begin():
        s = socket.create_connection(("127.0.0.1", port))
        s.setblocking(False)
        socks[s.fileno()] = s
        count[s.fileno()] = 0
        ep.register(s, select.EPOLLIN)
        s.send(b"x" * SIZE)

    left = connections
    for _ in range(32):
        begin()
        left -= 1
    while socks:
        for fd, _ in ep.poll():
            s = socks[fd]
            if len(take(s)) != SIZE:
                fail("a short answer")
            count[fd] += 1
            if count[fd] < ROUNDS:
                s.send(b"x" * SIZE)
                continue
            ep.unregister(fd)
            del socks[fd], count[fd]
            s.close()
            if left > 0:
                begin()
                left -= 1
    print("done", flush=True)


if sys.argv[1] == "serve":
    serve()
else:
    client(int(sys.argv[2]), int(sys.argv[3]))
