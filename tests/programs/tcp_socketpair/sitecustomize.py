"""For suites that test readiness with socketpair(): the pairs are TCP connections instead.

Put this directory on PYTHONPATH. Bare and under the shim the suites then do the same over TCP.
"""
import socket

_unix = socket.socketpair


def socketpair(family=None, type=socket.SOCK_STREAM, proto=0):
    if family not in (None, socket.AF_INET) or type != socket.SOCK_STREAM:
        return _unix(family, type, proto)
    with socket.create_server(("127.0.0.1", 0), backlog=1) as listener:
        a = socket.create_connection(listener.getsockname())
        b, _ = listener.accept()
    return a, b


socket.socketpair = socketpair
