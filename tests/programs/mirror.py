"""A connection with chosen addresses that ping-pongs until it is told to stop.

    mirror.py serve HOST PORT
    mirror.py connect HOST PORT LOCAL LOCALPORT UNTIL
"""
import os
import socket
import sys
import time

if sys.argv[1] == "serve":
    listener = socket.create_server((sys.argv[2], int(sys.argv[3])))
    print("listening", flush=True)
    sock, _ = listener.accept()
    while True:
        data = sock.recv(64)
        if not data:
            break
        sock.sendall(data)
else:
    host, port, local, localport, until = sys.argv[2:7]
    sock = socket.create_connection((host, int(port)), source_address=(local, int(localport)))
    n = 0
    while not os.path.exists(until):
        message = b"%064d" % n
        sock.sendall(message)
        assert sock.recv(64, socket.MSG_WAITALL) == message
        n += 1
        time.sleep(0.001)
