"""redis_values.py PORT COUNT: reads the values k000… back over one connection; prints SHA-256 each."""
import hashlib
import socket
import sys

sock = socket.create_connection(("127.0.0.1", int(sys.argv[1])))
buf = bytearray()


def fill():
    got = sock.recv(65536)
    if not got:
        raise EOFError
    buf.extend(got)


for i in range(int(sys.argv[2])):
    sock.sendall(b"*2\r\n$3\r\nGET\r\n$4\r\nk%03d\r\n" % i)
    while b"\r\n" not in buf:
        fill()
    head, _, _ = bytes(buf).partition(b"\r\n")
    n = int(head[1:])
    del buf[:len(head) + 2]
    while len(buf) < n + 2:
        fill()
    print(hashlib.sha256(buf[:n]).hexdigest())
    del buf[:n + 2]
