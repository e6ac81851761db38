"""Two ends of one connection that use calls in ways that are rare and that the kernel has an exact answer to.

    edges.py CASE serve HOST DIR           prints "port N"
    edges.py CASE connect HOST PORT DIR

Conventions as in `cases.py`: small messages until the file DIR/warm exists, then the case; "result ok"
when everything was as the kernel does it. Calls that Python would check itself go to the C library.
"""
import array
import ctypes
import errno
import fcntl
import mmap
import os
import random
import resource
import select
import signal
import socket
import struct
import subprocess
import sys
import termios
import threading
import time

from ends import await_mark, exactly, mark, marked

CASE, ROLE, HOST = sys.argv[1:4]
LIBC = ctypes.CDLL(None, use_errno=True)
FIOASYNC, SIOCATMARK, TCP_ZEROCOPY_RECEIVE = 0x5452, 0x8905, 35
# Seconds: longer than any case takes, and less than the test waits. A call that hangs ends the program.
LIMIT = 20


class Iovec(ctypes.Structure):
    _fields_ = [("base", ctypes.c_void_p), ("len", ctypes.c_size_t)]


class Message(ctypes.Structure):
    """struct mmsghdr"""
    _fields_ = [("name", ctypes.c_void_p), ("namelen", ctypes.c_uint32), ("iov", ctypes.POINTER(Iovec)),
                ("iovlen", ctypes.c_size_t), ("control", ctypes.c_void_p), ("controllen", ctypes.c_size_t),
                ("flags", ctypes.c_int), ("_pad", ctypes.c_int), ("len", ctypes.c_uint32)]


class Time(ctypes.Structure):
    """struct timespec and struct timeval"""
    _fields_ = [("sec", ctypes.c_long), ("part", ctypes.c_long)]


def messages(*buffers):
    """An array of headers; each buffer is one message."""
    out = (Message * len(buffers))()
    for m, b in zip(out, buffers):
        m.iov = ctypes.pointer(Iovec(ctypes.cast(b, ctypes.c_void_p), len(b)))
        m.iovlen = 1
    return out


def buffer(data):
    return (ctypes.c_char * len(data)).from_buffer_copy(data)


def room(n):
    return (ctypes.c_char * n)()


def call(name, *args):
    """The result of a C function; an errno as its name."""
    ctypes.set_errno(0)
    r = getattr(LIBC, name)(*args)
    return errno.errorcode[ctypes.get_errno()] if r == -1 else r


def equal(got, expected, what=""):
    assert got == expected, f"{what}: {got}, not {expected}"


def await_bytes(sock, n):
    """Until so many bytes are there to be read."""
    unread = array.array("i", [0])
    while unread[0] < n:
        fcntl.ioctl(sock.fileno(), termios.FIONREAD, unread)
    equal(unread[0], n, "FIONREAD")


def warm_up(sock):
    """Ping-pong until the test says that it is enough."""
    last = False
    while not last:
        if ROLE == "connect":
            last = marked("warm")
            sock.sendall(struct.pack("!?63x", last))
            equal(exactly(sock, 64)[0], last, "echo")
        else:
            message = exactly(sock, 64)
            sock.sendall(message)
            last = message[0]


# ---- times -----------------------------------------------------------------------------------

def times_server(sock):
    await_mark("asked")
    sock.sendall(b"x")
    await_mark("over")


def times_client(sock):
    """Times that the kernel refuses; and a million microseconds, which `select` takes."""
    fd = sock.fileno()

    def bits():
        return (ctypes.c_ulong * 16)(*[(1 << fd % 64) if k == fd // 64 else 0 for k in range(16)])

    entries = buffer(struct.pack("ihh", fd, select.POLLIN, 0))
    ep = select.epoll()
    ep.register(fd, select.EPOLLIN)
    for bad in [(-1, 0), (0, -1), (0, 1_000_000_000), (-1, 999_999_999)]:
        t = ctypes.byref(Time(*bad))
        equal(call("ppoll", entries, ctypes.c_ulong(1), t, None), "EINVAL", ("ppoll", bad))
        equal(call("pselect", fd + 1, bits(), None, None, t, None), "EINVAL", ("pselect", bad))
        equal(call("epoll_pwait2", ep.fileno(), room(16), 1, t, None), "EINVAL", ("epoll_pwait2", bad))
    for bad in [(-1, 0), (0, -1), (-1, 999_999)]:
        t = ctypes.byref(Time(*bad))
        equal(call("select", fd + 1, bits(), None, None, t), "EINVAL", ("select", bad))
    started = time.monotonic()
    equal(call("select", fd + 1, bits(), None, None, ctypes.byref(Time(0, 1_200_000))), 0, "select")
    assert time.monotonic() - started >= 1.2
    mark("asked")
    equal(call("select", fd + 1, bits(), None, None, ctypes.byref(Time(0, 9_000_000))), 1, "select")
    equal(call("ppoll", entries, ctypes.c_ulong(1), ctypes.byref(Time(0, 999_999_999)), None), 1, "ppoll")
    equal(exactly(sock, 1), b"x")
    mark("over")


# ---- several messages ------------------------------------------------------------------------

def empty_server(sock):
    equal(exactly(sock, 2), b"ok")
    sock.sendall(b"after")
    await_mark("over")


def empty_client(sock):
    """Vectors of no length are read at once, whatever is there."""
    for vectors in [[], [bytearray()], [bytearray(), bytearray()]]:
        equal(os.readv(sock.fileno(), vectors), 0, vectors)
    sock.sendall(b"ok")
    await_bytes(sock, 5)
    equal(os.readv(sock.fileno(), [bytearray()]), 0)
    one, two = bytearray(2), bytearray(3)
    equal(os.readv(sock.fileno(), [bytearray(), one, two]), 5)
    equal(one + two, b"after")
    mark("over")


TOTAL, PIECE, PERIOD = 200_000_000, 40_000, 1_000_003
NOISE = random.Random(7).randbytes(PERIOD)
NOISE += NOISE[:2 * PIECE]


def run_of(at, n):
    """n bytes of a stream that shows where a piece is missing."""
    return NOISE[at % PERIOD:at % PERIOD + n]


def short_server(sock):
    """Reads in uneven steps, so that room comes while the other end sends."""
    at, steps = 0, random.Random(1)
    while got := sock.recv(steps.randint(1, 2 * PIECE)):
        assert got == run_of(at, len(got)), f"not the stream between {at} and {at + len(got)}"
        at += len(got)
    assert at >= TOTAL, at


def short_client(sock):
    """Nothing is sent after a part of a message."""
    sock.setblocking(False)
    at = 0
    while at < TOTAL:
        # More than there is room for, while the other end makes some.
        all_of_them = messages(*(buffer(run_of(at + k * PIECE, PIECE)) for k in range(100)))
        sent = call("sendmmsg", sock.fileno(), all_of_them, len(all_of_them), socket.MSG_NOSIGNAL)
        if sent == "EAGAIN":
            select.select([], [sock], [])
            continue
        lengths = [m.len for m in all_of_them[:sent]]
        equal(set(lengths[:-1]) - {PIECE}, set(), "lengths of messages before the last one sent")
        at += sum(lengths)
    sock.setblocking(True)
    sock.shutdown(socket.SHUT_WR)


def nothing_server(sock):
    equal(exactly(sock, 4), b"abcd")
    sock.sendall(b"1")
    await_mark("got")
    time.sleep(0.4)
    sock.sendall(b"2")
    await_mark("over")


def nothing_client(sock):
    """Messages of no bytes count like others; the time of a `recvmmsg` is looked at after each message."""
    fd = sock.fileno()
    out = messages(buffer(b"ab"), room(0), buffer(b"cd"))
    equal(call("sendmmsg", fd, out, 3, 0), 3, "sendmmsg")
    equal([m.len for m in out], [2, 0, 2])
    await_bytes(sock, 1)
    got = [room(8) for _ in range(3)]
    left = Time(0, 0)
    equal(call("recvmmsg", fd, messages(*got), 3, 0, ctypes.byref(left)), 1, "no time")
    equal((got[0].value, left.sec, left.part), (b"1", 0, 0))
    for bad in [(-1, 0), (0, -1), (0, 1_000_000_000)]:
        equal(call("recvmmsg", fd, messages(*got), 3, 0, ctypes.byref(Time(*bad))), "EINVAL", bad)
    mark("got")
    # It comes after the time, and is waited for; no other is.
    left = Time(0, 200_000_000)
    equal(call("recvmmsg", fd, messages(*got), 3, 0, ctypes.byref(left)), 1, "late")
    equal((got[0].value, left.sec, left.part), (b"2", 0, 0))
    left = Time(7, 0)
    equal(call("recvmmsg", fd, messages(*got), 3, socket.MSG_DONTWAIT, ctypes.byref(left)), "EAGAIN")
    equal((left.sec, left.part), (7, 0), "time without a message")
    mark("over")


def end_server(sock):
    sock.sendall(b"last")
    sock.shutdown(socket.SHUT_WR)
    equal(sock.recv(1), b"")


def end_client(sock):
    """The end of the stream is a message of no bytes, as often as one asks."""
    await_bytes(sock, 4)
    got = [room(8) for _ in range(3)]
    all_of_them = messages(*got)
    left = Time(9, 0)
    equal(call("recvmmsg", sock.fileno(), all_of_them, 3, 0, ctypes.byref(left)), 3, "recvmmsg")
    equal([m.len for m in all_of_them], [4, 0, 0])
    assert 0 < left.sec * 1_000_000_000 + left.part < 9_000_000_000, (left.sec, left.part)


def rights_server(sock):
    """Hands the connection to a process without the shim in the second of two messages."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    program = "import os, socket, sys\ns = socket.socket(fileno=int(sys.argv[1]))\n" \
        "assert s.recv(10) == b'first'\n" \
        "m, fds, _, _ = socket.recv_fds(s, 10, 1)\nassert m == b'take it'\n" \
        "c = socket.socket(fileno=fds[0])\nassert c.recv(5, socket.MSG_WAITALL) == b'hello'\nc.sendall(b'from afar')\n"
    bare = {k: v for k, v in os.environ.items() if not k.startswith(("LD_PRELOAD", "UNDERPASS"))}
    child = subprocess.Popen([sys.executable, "-c", program, str(theirs.fileno())], env=bare,
                             pass_fds=[theirs.fileno()])
    theirs.close()
    both = messages(buffer(b"first"), buffer(b"take it"))
    control = buffer(struct.pack("Niii4x", socket.CMSG_LEN(4), socket.SOL_SOCKET, socket.SCM_RIGHTS, sock.fileno()))
    both[1].control = ctypes.cast(control, ctypes.c_void_p)
    both[1].controllen = len(control)
    equal(call("sendmmsg", ours.fileno(), both, 2, 0), 2, "sendmmsg")
    mark("passed")
    sock.close()
    equal(child.wait(), 0, "the other program")


def rights_client(sock):
    await_mark("passed")
    sock.sendall(b"hello")
    equal(exactly(sock, 9), b"from afar")


def refused_server(sock):
    for _ in range(2):
        equal(exactly(sock, 5), b"still")
        sock.sendall(b"here")
    equal(sock.recv(1), b"")


def refused_client(sock):
    """Calls that would close the connection, if the kernel did not refuse them: nothing comes of it."""
    def goes_on():
        sock.sendall(b"still")
        equal(exactly(sock, 4), b"here")

    fd, null = sock.fileno(), os.open("/dev/null", os.O_RDWR)
    equal(call("close_range", fd, fd, 1), "EINVAL", "a flag that does not exist")
    equal(call("close_range", fd + 1, fd, 0), "EINVAL", "no range")
    equal(call("dup3", null, fd, os.O_NONBLOCK), "EINVAL", "dup3 with a flag that is none of its")
    equal(call("dup3", null, fd, -1), "EINVAL", "dup3")
    equal(call("dup3", fd, fd, 0), "EINVAL", "dup3 onto itself")
    equal(call("dup2", 999, fd), "EBADF", "dup2 of nothing")
    goes_on()
    high = fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, 200)
    sock.close()
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (150, limits[1]))
    equal(call("dup2", null, high), "EBADF", "dup2 above the limit")
    equal(call("dup3", null, high, 0), "EBADF", "dup3 above the limit")
    resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    sock = socket.socket(fileno=high)
    goes_on()


# ---- ioctls and options ----------------------------------------------------------------------

def sigio_server(sock):
    await_mark("asked")
    sock.sendall(b"x")
    await_mark("over")


def sigio_client(sock):
    """SIGIO is asked for with an ioctl."""
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGIO])
    fcntl.fcntl(sock.fileno(), fcntl.F_SETOWN, os.getpid())
    fcntl.ioctl(sock.fileno(), FIOASYNC, struct.pack("i", 1))
    assert fcntl.fcntl(sock.fileno(), fcntl.F_GETFL) & os.O_ASYNC
    while signal.sigtimedwait([signal.SIGIO], 0):
        pass  # of before
    mark("asked")
    assert signal.sigtimedwait([signal.SIGIO], LIMIT / 2), "no SIGIO"
    equal(exactly(sock, 1), b"x")
    mark("over")


def mark_server(sock):
    sock.sendall(b"before")
    await_mark("first")
    sock.sendall(b"before")
    sock.send(b"U", socket.MSG_OOB)
    sock.sendall(b"after")
    await_mark("over")


def mark_client(sock):
    """Discards byte by byte up to the urgent mark, as telnet and ftp do."""
    def at_mark():
        answer = array.array("i", [7])
        fcntl.ioctl(sock.fileno(), SIOCATMARK, answer)
        equal(call("sockatmark", sock.fileno()), answer[0], "sockatmark")
        return answer[0]

    equal(at_mark(), 0, "without urgent data")
    for _ in b"before":
        sock.recv(1, socket.MSG_PEEK)
        equal(at_mark(), 0, "before any urgent data")
        exactly(sock, 1)
    mark("first")
    p = select.poll()
    p.register(sock, select.POLLPRI)
    assert p.poll(LIMIT * 1000 / 2), "no urgent data"
    discarded = b""
    while not at_mark():
        assert len(discarded) < 6, "past the mark"
        discarded += exactly(sock, 1)
    equal(discarded, b"before")
    equal(sock.recv(1, socket.MSG_OOB), b"U")
    equal(exactly(sock, 5), b"after")
    equal(at_mark(), 0, "past the mark")
    mark("over")


def zerocopy_server(sock):
    sock.sendall(b"some bytes")
    equal(sock.recv(1), b"")  # the call in which it puts them back on TCP


def zerocopy_client(sock):
    """A receive that is a socket option."""
    await_bytes(sock, 10)
    size = 16 * mmap.PAGESIZE
    LIBC.mmap.restype = ctypes.c_void_p
    area = LIBC.mmap(None, ctypes.c_size_t(size), mmap.PROT_READ, mmap.MAP_SHARED, sock.fileno(), ctypes.c_long(0))
    assert area != ctypes.c_void_p(-1).value, os.strerror(ctypes.get_errno())
    # Address, length; what is to be read without it; unread, error; where small amounts are copied.
    copy = room(100)
    ask = buffer(struct.pack("QIIIiQiI", area, size, 0, 0, 0, ctypes.addressof(copy), len(copy), 0))
    n = ctypes.c_uint32(len(ask))
    equal(call("getsockopt", sock.fileno(), socket.IPPROTO_TCP, TCP_ZEROCOPY_RECEIVE, ask, ctypes.byref(n)), 0)
    _, length, hint, _, _, _, copied, _ = struct.unpack("QIIIiQiI", ask.raw)
    equal((length, hint + copied), (0, 10), "bytes found")
    equal(copy.raw[:copied] + exactly(sock, 10 - copied), b"some bytes")


# ---- made non-blocking while a call sleeps -----------------------------------------------------

BULK = 12 << 20  # more than ring and socket buffers hold
FUTEX = {"x86_64": "202"}.get(os.uname().machine, "98")


def asleep(thread):
    """Until it sleeps, and in no call of the interpreter's own."""
    seen = 0
    while seen < 3:
        time.sleep(0.01)
        assert thread.is_alive(), "it does not sleep"
        with open(f"/proc/self/task/{thread.native_id}/syscall") as f:
            inside = f.read().split()[0]
        seen = 0 if inside in ("running", "-1", FUTEX) else seen + 1


def unblock_server(sock):
    for k in range(6):
        await_mark(f"set{k}")
        time.sleep(0.1)
        sock.sendall(b"late")
    await_mark("filled")
    time.sleep(0.1)
    equal(len(exactly(sock, BULK)), BULK)
    await_mark("over")


def unblock_client(sock):
    """Who makes a description non-blocking does not end calls that sleep."""
    fd, got = sock.fileno(), []
    for k in range(6):
        into = room(8)
        vector = Iovec(ctypes.cast(into, ctypes.c_void_p), 8)
        calls = [lambda: call("recv", fd, into, ctypes.c_size_t(8), 0), lambda: call("readv", fd, ctypes.byref(vector), 1),
                 lambda: call("recv", fd, into, ctypes.c_size_t(4), socket.MSG_WAITALL)]
        t = threading.Thread(target=lambda: got.append(calls[k % 3]()))
        t.start()
        asleep(t)
        sock.setblocking(False)
        mark(f"set{k}")
        t.join()
        equal((got.pop(), into.value), (4, b"late"), k)
        equal(call("recv", fd, into, ctypes.c_size_t(8), 0), "EAGAIN", "the next call")
        if k % 2:
            select.select([sock], [], [], 0)
        sock.setblocking(True)
    data = buffer(bytes(BULK))
    t = threading.Thread(target=lambda: got.append(call("send", fd, data, ctypes.c_size_t(BULK), 0)))
    t.start()
    asleep(t)
    sock.setblocking(False)
    mark("filled")
    t.join()
    equal(got, [BULK], "send")
    mark("over")


# ---- main ------------------------------------------------------------------------------------

def main():
    signal.alarm(LIMIT * 2)  # generous: the warm-up is the test's
    if ROLE == "serve":
        listener = socket.create_server((HOST, 0))
        print("port", listener.getsockname()[1], flush=True)
        sock, _ = listener.accept()
        listener.close()
    else:
        sock = socket.create_connection((HOST, int(sys.argv[4])))
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    warm_up(sock)
    signal.alarm(LIMIT)
    globals()[f"{CASE}_{'server' if ROLE == 'serve' else 'client'}"](sock)
    sock.close()
    print("result ok", flush=True)


main()
