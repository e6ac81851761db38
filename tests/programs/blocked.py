"""Calls that sleep on a connection while another thread closes its descriptor and the number comes to mean
something else: they stay with their connection.

    blocked.py serve HOST DIR           prints "port N"
    blocked.py connect HOST PORT DIR    prints "connections N", then "result ok"

Each scenario has a connection of its own; all exchange small messages until the file DIR/warm exists. Then
the client's threads go to sleep in a call, one scenario after the other. A further connection is what the
numbers mean next; every byte of it is checked at the end.
"""
import ctypes
import errno
import os
import random
import select
import socket
import struct
import sys
import tempfile
import threading
import time

from ends import DIR, await_mark, exactly, mark, marked

ROLE, HOST = sys.argv[1:3]
LIBC = ctypes.CDLL(None, use_errno=True)
LIBC.syscall.restype = ctypes.c_long
for name in ("send", "write", "writev", "sendto", "sendmsg", "sendfile", "recv", "read", "readv", "recvfrom", "recvmsg"):
    getattr(LIBC, name).restype = ctypes.c_ssize_t
SYS_CLOSE = {"x86_64": 3, "aarch64": 57}[os.uname().machine]
BIG = 12 << 20  # more than rings and socket buffers hold
NOISE = random.Random(3).randbytes(BIG)
WAITALL = socket.MSG_WAITALL


class Iovec(ctypes.Structure):
    _fields_ = [("base", ctypes.c_void_p), ("len", ctypes.c_size_t)]


class Header(ctypes.Structure):
    """struct msghdr"""
    _fields_ = [("name", ctypes.c_void_p), ("namelen", ctypes.c_uint32), ("iov", ctypes.POINTER(Iovec)),
                ("iovlen", ctypes.c_size_t), ("control", ctypes.c_void_p), ("controllen", ctypes.c_size_t),
                ("flags", ctypes.c_int)]


def vector(buf, n):
    """Two halves."""
    at = ctypes.addressof(buf)
    return (Iovec * 2)(Iovec(at, n // 2), Iovec(at + n // 2, n - n // 2))


def message(v):
    return Header(iov=ctypes.cast(v, ctypes.POINTER(Iovec)), iovlen=2)


def out(how, fd, data):
    """One blocking call that sends; its result, or the name of its error."""
    buf = (ctypes.c_char * len(data)).from_buffer_copy(data)
    n = ctypes.c_size_t(len(data))
    v = vector(buf, len(data))
    if how == "sendfile":
        with tempfile.TemporaryFile() as f:
            f.write(data)
            f.flush()
            copy = os.dup(f.fileno())
            at = ctypes.c_long(0)
            FILES.append(copy)
            return told(LIBC.sendfile(fd, copy, ctypes.byref(at), n))
    return told({
        "send": lambda: LIBC.send(fd, buf, n, 0),
        "write": lambda: LIBC.write(fd, buf, n),
        "writev": lambda: LIBC.writev(fd, v, 2),
        "sendto": lambda: LIBC.sendto(fd, buf, n, 0, None, 0),
        "sendmsg": lambda: LIBC.sendmsg(fd, ctypes.byref(message(v)), 0),
    }[how]())


def into(how, fd, n, flags=0):
    """One blocking call that receives; its bytes, or the name of its error."""
    buf = (ctypes.c_char * n)()
    size = ctypes.c_size_t(n)
    v = vector(buf, n)
    r = told({
        "recv": lambda: LIBC.recv(fd, buf, size, flags),
        "read": lambda: LIBC.read(fd, buf, size),
        "readv": lambda: LIBC.readv(fd, v, 2),
        "recvfrom": lambda: LIBC.recvfrom(fd, buf, size, flags, None, None),
        "recvmsg": lambda: LIBC.recvmsg(fd, ctypes.byref(message(v)), flags),
    }[how]())
    return buf.raw[:r] if isinstance(r, int) else r


def told(r):
    return errno.errorcode[ctypes.get_errno()] if r < 0 else r


FILES = []  # numbers of files that a sendfile reads


# ---- what becomes of the number ---------------------------------------------------------------

def replace(how, fd, other):
    """Closes `fd` and lets its number mean `other` (a file or a socket)."""
    if how == "dup2":
        os.dup2(other, fd)
        return
    if how == "close_range":
        os.closerange(fd, fd + 1)
    elif how == "number":
        LIBC.syscall(ctypes.c_long(SYS_CLOSE), ctypes.c_long(fd))
    else:
        os.close(fd)
    os.dup2(other, fd)


# ---- scenarios: name, the client's part, the server's part --------------------------------------

FUTEX = {"x86_64": "202", "aarch64": "98"}[os.uname().machine]


def asleep(thread):
    """Waits until the thread sleeps in its call, and not for another thread of the interpreter."""
    seen = 0
    while seen < 3:
        time.sleep(0.02)
        assert thread.is_alive(), "it does not sleep"
        with open(f"/proc/self/task/{thread.native_id}/syscall") as f:
            inside = f.read().split()[0]
        seen = 0 if inside in ("running", "-1", FUTEX) else seen + 1


def in_thread(f):
    got = []
    t = threading.Thread(target=lambda: got.append(f()))
    t.start()
    return t, got


def receives(how, close, other, flags=0, first=b"", rest=b"late", size=100):
    """A receive sleeps; its number is closed; what arrives later is still its own."""
    def client(name, sock):
        fd = sock.detach()
        t, got = in_thread(lambda: into(how, fd, size, flags))
        asleep(t)
        replace(close, fd, other())
        mark(name + "-closed")
        t.join()
        equal(got[0], first + rest, name)
        mark(name + "-over")
        leave_number(fd)

    def server(name, sock):
        sock.sendall(first)
        await_mark(name + "-closed")
        time.sleep(0.02)
        equal(select.select([sock], [], [], 0)[0], [], "an end, or bytes, while the call sleeps")
        if rest:
            sock.sendall(rest)
        else:
            sock.shutdown(socket.SHUT_WR)
        await_mark(name + "-over")
        equal(sock.recv(10), b"", "what follows the call")
    return client, server


def sends(how, close, other, also_file=False):
    """A send sleeps; its number is closed; all of it goes to its own peer."""
    def client(name, sock):
        fd = sock.detach()
        t, got = in_thread(lambda: out(how, fd, NOISE))
        asleep(t)
        replace(close, fd, other())
        if also_file:
            with open("/dev/zero", "rb") as zero:
                os.dup2(zero.fileno(), FILES[-1])
        mark(name + "-closed")
        t.join()
        equal(got[0], BIG, name)
        leave_number(fd)
        if also_file:
            os.close(FILES.pop())

    def server(name, sock):
        await_mark(name + "-closed")
        equal(read_all(sock) == NOISE, True, name + ": the bytes that were sent")
    return client, server


def copies(close, other):
    """The number of a call that sleeps is closed, but the connection has another."""
    def client(name, sock):
        second = os.dup(sock.fileno())
        fd = sock.detach()
        t, got = in_thread(lambda: into("recv", fd, 100))
        asleep(t)
        replace(close, fd, other())
        os.write(second, b"by the other")
        mark(name + "-closed")
        t.join()
        equal(got[0], b"late", name)
        os.write(second, b", and still")
        os.close(second)
        leave_number(fd)

    def server(name, sock):
        await_mark(name + "-closed")
        equal(exactly(sock, 12), b"by the other")
        sock.sendall(b"late")
        equal(read_all(sock), b", and still")
    return client, server


def both_ways(close, other):
    """Two calls sleep, one in each direction."""
    def client(name, sock):
        fd = sock.detach()
        r, got = in_thread(lambda: into("recv", fd, 100))
        s, sent = in_thread(lambda: out("send", fd, NOISE))
        asleep(r)
        asleep(s)
        replace(close, fd, other())
        mark(name + "-closed")
        r.join()
        equal(got[0], b"late", name)
        mark(name + "-received")
        s.join()
        equal(sent[0], BIG, name)
        leave_number(fd)

    def server(name, sock):
        await_mark(name + "-closed")
        sock.sendall(b"late")
        await_mark(name + "-received")
        equal(read_all(sock) == NOISE, True, name)
    return client, server


def read_all(sock):
    out = bytearray()
    while part := sock.recv(1 << 20):
        out += part
    return bytes(out)


def equal(got, expected, what=""):
    assert got == expected, f"{what}: {got!r:.200}, not {expected!r:.200}"


OTHER = []  # the further connection, and a file


def a_socket():
    return OTHER[0].fileno()


def a_file():
    return OTHER[1].fileno()


def leave_number(fd):
    """Nothing of the call may have gone to what the number means now; it works as it should."""
    os.write(fd, b"mine")
    WRITTEN[os.fstat(fd).st_ino] = WRITTEN.get(os.fstat(fd).st_ino, 0) + 4
    os.close(fd)


WRITTEN = {}

SCENARIOS = {
    "recv-socket": receives("recv", "close", a_socket),
    "recv-file": receives("recv", "close", a_file),
    "read-dup2": receives("read", "dup2", a_socket),
    "readv-number": receives("readv", "number", a_socket),
    "recvmsg-range": receives("recvmsg", "close_range", a_file),
    "recvfrom-end": receives("recvfrom", "close", a_socket, rest=b""),
    "recv-waitall": receives("recv", "close", a_socket, WAITALL, NOISE[:5000], NOISE[5000:9000], 9000),
    "send-socket": sends("send", "close", a_socket),
    "write-file": sends("write", "close", a_file),
    "writev-dup2": sends("writev", "dup2", a_socket),
    "sendmsg-number": sends("sendmsg", "number", a_socket),
    "sendto-range": sends("sendto", "close_range", a_file),
    "sendfile-socket": sends("sendfile", "close", a_socket, also_file=True),
    "copy-socket": copies("close", a_socket),
    "copy-dup2": copies("dup2", a_file),
    "both-ways": both_ways("close", a_socket),
}


# ---- main ------------------------------------------------------------------------------------

def pong(sock):
    """Echoes until the message that says that it is the last."""
    while True:
        m = exactly(sock, 64)
        sock.sendall(m)
        if m[0]:
            return


def serve():
    listener = socket.create_server((HOST, 0), backlog=64)
    print("port", listener.getsockname()[1], flush=True)
    wrong, threads = [], []

    def one(sock):
        try:
            name = exactly(sock, 20).strip().decode()
            pong(sock)
            if name == "other":
                got = read_all(sock)
                equal(got, b"mine" * (len(got) // 4), "the further connection")
                # (Under its name it is whole.)
                with open(os.path.join(DIR, "counting"), "w") as f:
                    f.write(str(len(got)))
                os.rename(f.name, os.path.join(DIR, "other"))
            else:
                SCENARIOS[name][1](name, sock)
        except BaseException as e:
            wrong.append(repr(e))
            print(name, repr(e), file=sys.stderr, flush=True)
            os._exit(1)

    for _ in range(len(SCENARIOS) + 1):
        t = threading.Thread(target=one, args=listener.accept()[:1])
        t.start()
        threads.append(t)
    for t in threads:
        t.join()
    assert not wrong, wrong


def connect():
    names = ["other", *SCENARIOS]
    socks = []
    for name in names:
        s = socket.create_connection((HOST, int(sys.argv[3])))
        s.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        s.sendall(name.ljust(20).encode())
        socks.append(s)
    print("connections", len(socks), flush=True)
    last = False
    while not last:
        last = marked("warm")
        for s in socks:
            m = struct.pack("!?", last) + NOISE[:63]
            s.sendall(m)
            equal(exactly(s, 64), m)
    OTHER.append(socks[0])
    with tempfile.TemporaryFile() as f:
        OTHER.append(f)
        for name, s in zip(names[1:], socks[1:]):
            print(name, file=sys.stderr, flush=True)
            SCENARIOS[name][0](name, s)
        f.flush()
        f.seek(0)
        got = f.read()
        equal(got, b"mine" * (WRITTEN[os.fstat(f.fileno()).st_ino] // 4), "the file")
    written = WRITTEN[os.fstat(socks[0].fileno()).st_ino]
    socks[0].close()
    await_mark("other")
    with open(os.path.join(DIR, "other")) as f:
        equal(int(f.read()), written, "bytes of the further connection")


threading.excepthook = lambda a: (sys.__excepthook__(*a[:3]), os._exit(1))
serve() if ROLE == "serve" else connect()
print("result ok", flush=True)
