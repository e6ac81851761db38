"""What the kernel answers about times, options and queues of a connection: the same on a lane.

    limits.py CASE serve HOST DIR           prints "port N"
    limits.py CASE connect HOST PORT DIR

Prints "said ..." lines; they are compared with those of a bare run.
"""
import ctypes
import errno
import select
import socket
import struct
import sys
import time

from ends import await_mark, exactly, mark, marked

CASE, ROLE, HOST = sys.argv[1:4]
LIBC = ctypes.CDLL(None, use_errno=True)
SO_RCVTIMEO_NEW, SO_SNDTIMEO_NEW = 66, 67


def said(what, answer):
    print("said", what, answer, flush=True)


def say(f):
    """An error as its name. (Who waits for ever is ended by the test.)"""
    try:
        return f()
    except OSError as e:
        return errno.errorcode[e.errno]


def limit(sock, name, sec, usec):
    return say(lambda: sock.setsockopt(socket.SOL_SOCKET, name, struct.pack("qq", sec, usec)))


def recv(sock):
    return say(lambda: sock.recv(10))


def fill(sock):
    """Blocking sends until one says that it would wait."""
    while True:
        sock.send(bytes(1 << 16))


def times(sock):
    """SO_RCVTIMEO and SO_SNDTIMEO, in both forms."""
    for name in [socket.SO_RCVTIMEO, SO_RCVTIMEO_NEW]:
        for sec, usec in [(-1, 0), (-(1 << 40), 5), (0, 1), (0, 999), (0, 20_000), (0, -1), (0, 1_000_000), (-1, 0)]:
            said(("limit", name, sec, usec), limit(sock, name, sec, usec))
            # (A refused one leaves the one before.)
            said(("recv", sec, usec), recv(sock))
            said("shown", sock.getsockopt(socket.SOL_SOCKET, name, 16).hex())
            buf = ctypes.create_string_buffer(8)
            got = LIBC.recv(sock.fileno(), buf, ctypes.c_size_t(8), socket.MSG_PEEK)
            said("peek", (got, errno.errorcode[ctypes.get_errno()]))
    limit(sock, socket.SO_RCVTIMEO, 0, 0)
    said("short", say(lambda: LIBC.setsockopt(sock.fileno(), 1, socket.SO_RCVTIMEO, bytes(8), 8)))


def options(sock):
    """Options of the keepalive that nobody but the program sets."""
    names = [(socket.SOL_SOCKET, n) for n in ("SO_KEEPALIVE", "SO_RCVLOWAT", "SO_OOBINLINE")]
    names += [(socket.IPPROTO_TCP, n) for n in ("TCP_KEEPIDLE", "TCP_KEEPINTVL", "TCP_KEEPCNT", "TCP_USER_TIMEOUT")]
    for level, n in names:
        said(n, sock.getsockopt(level, getattr(socket, n)))
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for n, v in [("TCP_KEEPIDLE", 77), ("TCP_KEEPINTVL", 7), ("TCP_KEEPCNT", 5), ("TCP_USER_TIMEOUT", 12345)]:
        sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, n), v)
    for level, n in names:
        said(n, sock.getsockopt(level, getattr(socket, n)))


def client(sock):
    times(sock)
    options(sock)
    mark("stop")
    await_mark("stopped")
    # The other end has stopped reading.
    for name in [socket.SO_SNDTIMEO, SO_SNDTIMEO_NEW]:
        said(("limit", name), limit(sock, name, -1, 0))
        said("full", say(lambda: fill(sock)))
        said("full again", say(lambda: sock.send(bytes(1 << 20))) == "EAGAIN" or "a part")
    mark("over")


def server(sock):
    await_mark("stop")
    mark("stopped")
    await_mark("over")


def main():
    if ROLE == "serve":
        listener = socket.create_server((HOST, 0))
        # What is accepted has the listener's limits; so does the accept.
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, struct.pack("qq", -1, 0))
        print("port", listener.getsockname()[1], flush=True)
        select.select([listener], [], [])
        sock, _ = listener.accept()
        said("accept", say(listener.accept))
        said("inherited", recv(sock) in ("EAGAIN", b""))
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, struct.pack("qq", 0, 0))
        listener.close()
    else:
        sock = socket.create_connection((HOST, int(sys.argv[4])))
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        time.sleep(0.1)
    last = False
    while not last:
        if ROLE == "connect":
            last = marked("warm")
            sock.sendall(bytes([last]) * 64)
            exactly(sock, 64)
        else:
            got = exactly(sock, 64)
            sock.sendall(got)
            last = got[0]
    (server if ROLE == "serve" else client)(sock)
    sock.close()
    print("result ok", flush=True)


main()
