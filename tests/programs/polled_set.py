"""A server that polls its epoll set, as EventMachine does, and then asks it without waiting.

    polled_set.py

Talks to a child of its own until it is killed.
"""
import os
import select
import socket

listener = socket.create_server(("127.0.0.1", 0))
if os.fork() == 0:
    client = socket.create_connection(listener.getsockname())
    while True:
        client.sendall(b"x" * 100)
        if not client.recv(100):
            os._exit(0)
poll = select.poll()
events = select.epoll()
poll.register(events, select.POLLIN)
events.register(listener, select.EPOLLIN)
while True:
    poll.poll()
    for fd, _ in events.poll(0):
        if fd == listener.fileno():
            connection, _ = listener.accept()
            connection.setblocking(False)
            events.register(connection, select.EPOLLIN)
        else:
            connection.send(connection.recv(4096))
