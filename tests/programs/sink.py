#!/usr/bin/env python3
# A server that answers PINGs as Redis does, and throws everything else away.
import socket
import sys
import threading


def serve(c):
    while data := c.recv(65536):
        if data.startswith(b"PING"):
            c.sendall(b"+PONG\r\n")


s = socket.create_server(("127.0.0.1", 0))
print("listening", s.getsockname()[1], flush=True)
while True:
    threading.Thread(target=serve, args=(s.accept()[0],), daemon=True).start()
