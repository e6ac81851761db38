"""For suites that test readiness with socketpair(): the pairs are TCP connections instead.

Put this directory on PYTHONPATH. Bare and under the shim the suites then do the same over TCP.
"""
import os
import socket
import threading

_unix = socket.socketpair
_lock = threading.Lock()
_listener = None


def socketpair(family=None, type=socket.SOCK_STREAM, proto=0):
    if family not in (None, socket.AF_INET) or type != socket.SOCK_STREAM:
        return _unix(family, type, proto)
    global _listener
    with _lock:
        # One listener per process: the kernel looks for a free port among all that are taken, which
        # with thousands of pairs takes longer than everything else.
        if _listener is None or _listener[0] != os.getpid():
            _listener = os.getpid(), socket.create_server(("127.0.0.1", 0), backlog=1)
        a = socket.create_connection(_listener[1].getsockname())
        try:
            while True:
                b, peer = _listener[1].accept()
                if peer == a.getsockname():
                    return a, b
                b.close()  # of a pair that had no descriptor left for its second end
        except OSError:
            a.close()
            raise


socket.socketpair = socketpair
