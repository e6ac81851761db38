"""Traffic of every style between two processes, every byte compared: what runs while system calls of
the shim fail (inject.c). Prints "whole" and the number of bytes."""

import hashlib
import os
import select
import socket
import sys
import threading

CONNECTIONS = 6
ROUNDS = 40


def piece(number, round):
    size = (1, 700, 30_000, 5, 200_000, 64)[(number + round) % 6]
    return hashlib.sha256(b"%d %d" % (number, round)).digest() * (size // 32 + 1)


def exactly(s, n):
    got = bytearray()
    while len(got) < n:
        b = s.recv(n - len(got))
        assert b, "an end of file after %d of %d bytes" % (len(got), n)
        got += b
    return got


def blocking(s, number):
    for round in range(ROUNDS):
        p = piece(number, round)
        t = threading.Thread(target=s.sendall, args=(p,))
        t.start()
        assert exactly(s, len(p)) == p, "connection %d, round %d" % (number, round)
        t.join()
    s.shutdown(socket.SHUT_WR)
    assert s.recv(1) == b""


def polling(s, number):
    s.setblocking(False)
    poll = select.poll()
    for round in range(ROUNDS):
        p = piece(number, round)
        sent, got = 0, bytearray()
        while len(got) < len(p):
            poll.register(s, select.POLLIN | (select.POLLOUT if sent < len(p) else 0))
            for _, e in poll.poll():
                if e & select.POLLOUT and sent < len(p):
                    try:
                        sent += s.send(p[sent:])
                    except BlockingIOError:
                        pass
                if e & select.POLLIN:
                    try:
                        b = s.recv(1 << 16)
                    except BlockingIOError:
                        continue
                    assert b, "an end of file"
                    got += b
        assert got == p, "connection %d, round %d" % (number, round)
    s.shutdown(socket.SHUT_WR)
    s.setblocking(True)
    assert s.recv(1) == b""


def client(port):
    threads, failed = [], []
    threading.excepthook = lambda a: (failed.append(a), sys.__excepthook__(a.exc_type, a.exc_value, a.exc_traceback))
    for number in range(CONNECTIONS):
        s = socket.create_connection(("127.0.0.1", port))
        style = polling if number % 2 else blocking
        threads.append(threading.Thread(target=style, args=(s, number)))
    for t in threads:
        t.start()
    child = os.fork()
    if child == 0:
        os._exit(0)
    os.waitpid(child, 0)
    for t in threads:
        t.join()
    assert not failed
    print("whole", sum(len(piece(n, r)) for n in range(CONNECTIONS) for r in range(ROUNDS)), flush=True)


def server(listener):
    """An echo with one epoll set, edge-triggered."""
    listener.setblocking(False)
    ep = select.epoll()
    ep.register(listener, select.EPOLLIN)
    conns, ended = {}, 0
    while ended < CONNECTIONS:
        for fd, e in ep.poll():
            if fd == listener.fileno():
                c, _ = listener.accept()
                c.setblocking(False)
                conns[c.fileno()] = (c, bytearray(), [False])
                ep.register(c, select.EPOLLIN | select.EPOLLOUT | select.EPOLLET)
                continue
            c, out, eof = conns[fd]
            while True:
                try:
                    b = c.recv(1 << 17)
                except BlockingIOError:
                    break
                if not b:
                    eof[0] = True
                    break
                out += b
            while out:
                try:
                    del out[: c.send(out)]
                except BlockingIOError:
                    break
            if eof[0] and not out:
                ep.unregister(c)
                del conns[fd]
                c.close()
                ended += 1


def main():
    listener = socket.create_server(("127.0.0.1", 0))
    pid = os.fork()
    if pid == 0:
        server(listener)
        sys.exit(0)
    port = listener.getsockname()[1]
    listener.close()
    client(port)
    assert os.waitpid(pid, 0)[1] == 0


main()
