"""A server that forks for each connection and whose children exit without closing it.

usage: forking.py serve | forking.py client PORT CONNECTIONS
"""

import os
import signal
import socket
import sys


def serve():
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    listener = socket.create_server(("127.0.0.1", 0), backlog=128)
    print(f"port {listener.getsockname()[1]}", flush=True)
    while True:
        s, _ = listener.accept()
        if os.fork() == 0:
            listener.close()
            while data := s.recv(100):
                s.sendall(data)
            os._exit(0)
        s.close()


def client(port, connections):
    for _ in range(connections):
        with socket.create_connection(("127.0.0.1", port)) as s:
            for _ in range(400):
                s.sendall(b"x" * 50)
                got = b""
                while len(got) < 50:
                    part = s.recv(100)
                    if not part:
                        sys.exit("a short answer")
                    got += part
    print("done", flush=True)


if sys.argv[1] == "serve":
    serve()
else:
    client(int(sys.argv[2]), int(sys.argv[3]))
