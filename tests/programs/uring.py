"""Two ends of one connection, one of which uses io_uring, by libc's `syscall`.

    uring.py CASE serve HOST DIR           prints "port N"
    uring.py CASE connect HOST PORT DIR

Conventions as in `edges.py`.
"""
import ctypes
import errno
import mmap
import os
import select
import signal
import socket
import struct
import subprocess
import sys

from ends import await_mark, exactly, mark, marked

CASE, ROLE, HOST = sys.argv[1:4]
LIMIT = 20
LIBC = ctypes.CDLL(None, use_errno=True)
LIBC.syscall.restype = ctypes.c_long
NOP, POLL_ADD, SENDMSG, CLOSE, READ, WRITE, SEND, RECV, EPOLL_CTL = 0, 6, 9, 19, 22, 23, 26, 27, 29
AIO_READ, AIO_WRITE, AIO_POLL = 0, 1, 5
IO_SETUP, IO_GETEVENTS, IO_SUBMIT = {"x86_64": (206, 208, 209), "aarch64": (0, 4, 2)}[os.uname().machine]
ADD, DEL, MOD = 1, 2, 3
LINK = 4
IN = select.EPOLLIN


def equal(found, wanted, what=""):
    assert found == wanted, f"{what}: {found!r}, not {wanted!r}"


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


def syscall(*args):
    r = LIBC.syscall(*[ctypes.c_long(a) for a in args])
    if r < 0:
        raise OSError(ctypes.get_errno(), "syscall")
    return r


class Ring:
    """Requests are queued with `add`; `run` submits them and returns their results in order."""

    def __init__(self, entries=8):
        p = (ctypes.c_uint32 * 30)()
        self.fd = syscall(425, entries, ctypes.addressof(p))
        self.entries, features = p[0], p[5]
        assert features & 1, "two mappings"
        self.head, self.tail, array = p[10], p[11], p[16]
        self.chead, self.ctail, self.cqes, self.cmask = p[20], p[21], p[25], p[1] - 1
        size = max(array + 4 * p[0], self.cqes + 16 * p[1])
        self.ring = mmap.mmap(self.fd, size, offset=0)
        self.sqes = mmap.mmap(self.fd, 64 * p[0], offset=0x10000000)
        for k in range(p[0]):
            self.put(array + 4 * k, k)
        self.keep, self.queued = [], 0

    def get(self, at):
        return struct.unpack_from("I", self.ring, at)[0]

    def put(self, at, value):
        struct.pack_into("I", self.ring, at, value & 0xffffffff)

    def add(self, op, fd=-1, off=0, addr=0, length=0, more=0, flags=0, user=0):
        tail = self.get(self.tail)
        slot = tail & (self.entries - 1)
        struct.pack_into("BBHiQQIIQQQQ", self.sqes, 64 * slot, op, flags, 0, fd, off & (1 << 64) - 1, addr, length,
                         more, user, 0, 0, 0)
        self.put(self.tail, tail + 1)
        self.queued += 1

    def ctl(self, ep, op, fd, events=0, data=0, flags=0, user=0):
        event = ctypes.create_string_buffer(struct.pack("=IQ", events, data), 12)
        self.keep.append(event)
        self.add(EPOLL_CTL, ep, fd, ctypes.addressof(event), op, flags=flags, user=user)

    def run(self):
        n, self.queued = self.queued, 0
        equal(syscall(426, self.fd, n, n, 1, 0, 0), n, "submitted")
        out = {}
        head = self.get(self.chead)
        for k in range(n):
            assert head != self.get(self.ctail), f"{k} of {n} completions"
            user, res, _ = struct.unpack_from("QiI", self.ring, self.cqes + 16 * (head & self.cmask))
            out.setdefault(user, []).append(res)
            head += 1
        self.put(self.chead, head)
        return out

    def one(self, *args, **more):
        self.ctl(*args, **more)
        (result,), = self.run().values()
        return result

    def close(self):
        self.ring.close()
        self.sqes.close()
        os.close(self.fd)


def comes(ep, data, events=IN):
    """The one event of the set."""
    equal(ep.poll(LIMIT / 2), [(data, events)], "events")


# ---- registrations ---------------------------------------------------------------------------

def ctl_server(sock):
    for k in range(3):
        await_mark(f"watching{k}")
        sock.sendall(b"x" * (k + 1))
    equal(exactly(sock, 3), b"end")


def ctl_client(sock):
    """Blocking and polled before, then watched by what io_uring registers, as with `uv_poll`."""
    p = select.poll()
    p.register(sock, select.POLLIN)
    equal(p.poll(0), [])
    sock.setblocking(False)
    fd, ep, ring = sock.fileno(), select.epoll(), Ring()
    e = ep.fileno()
    equal(ring.one(e, MOD, fd, IN), -errno.ENOENT, "change before")
    equal(ring.one(e, DEL, fd), -errno.ENOENT, "remove before")
    equal(ring.one(e, ADD, fd, IN, fd), 0, "add")
    equal(ring.one(e, ADD, fd, IN, fd), -errno.EEXIST, "add twice")
    equal(ep.poll(0), [])
    mark("watching0")
    comes(ep, fd)
    equal(sock.recv(10), b"x")
    equal(ring.one(e, MOD, fd, select.EPOLLOUT, 1 << 30), 0, "change")
    comes(ep, 1 << 30, select.EPOLLOUT)
    mark("watching1")
    comes(ep, 1 << 30, select.EPOLLOUT)
    # A batch: what is ours beside what is not, each with its own result.
    r, w = os.pipe()
    word = ctypes.create_string_buffer(b"word", 4)
    ring.ctl(e, DEL, fd, user=1)
    ring.add(WRITE, w, (1 << 64) - 1, ctypes.addressof(word), 4, user=2)
    ring.ctl(e, DEL, fd, user=3)
    ring.ctl(e, ADD, fd, IN, fd, user=4)
    ring.ctl(e, ADD, fd, IN, fd, user=5)
    ring.ctl(e, ADD, r, IN, r, user=6)
    ring.ctl(e, 7, fd, IN, fd, user=7)
    ring.ctl(e, ADD, 1_000_000, IN, 0, user=8)
    equal(ring.run(), {1: [0], 2: [4], 3: [-errno.ENOENT], 4: [0], 5: [-errno.EEXIST], 6: [0], 7: [-errno.EINVAL],
                       8: [-errno.EBADF]})
    equal(os.read(r, 10), b"word")
    comes(ep, fd)
    equal(sock.recv(10), b"xx")
    ring.add(EPOLL_CTL, e, fd, 0, MOD)
    equal(ring.run(), {0: [-errno.EFAULT]}, "no event")
    # Many at once, by turns: more than the ring has room for.
    for _ in range(50):
        for k in range(4):
            ring.ctl(e, DEL, fd, user=2 * k)
            ring.ctl(e, ADD, fd, IN, fd, user=2 * k + 1)
        equal(set(map(tuple, ring.run().values())), {(0,)})
    mark("watching2")
    comes(ep, fd)
    equal(sock.recv(10), b"xxx")
    ep.unregister(fd)
    equal(ring.one(e, DEL, fd), -errno.ENOENT, "removed otherwise")
    copy = os.dup(ring.fd)
    os.close(ring.fd)
    ring.fd = copy
    equal(ring.one(e, ADD, fd, select.EPOLLOUT, 5), 0, "through a copy of the ring")
    comes(ep, 5, select.EPOLLOUT)
    ring.close()
    with open("/proc/self/maps") as maps:
        equal([m for m in maps if "io_uring" in m], [], "mappings after the ring")
    mark("kept")
    await_mark("looked")  # the test sees whether the connection is on its lane still
    sock.sendall(b"end")


# ---- bytes -----------------------------------------------------------------------------------

def bytes_server(sock):
    await_mark("first")
    sock.sendall(b"by the ring")
    equal(exactly(sock, 5), b"hello")
    await_mark("second")
    sock.sendall(b"again")
    equal(sock.recv(1), b"")


def bytes_client(sock):
    """Receives, sends and waits of the ring on the connection itself: what was sent before comes first."""
    ring, fd = Ring(), sock.fileno()
    room = ctypes.create_string_buffer(b"hello", 100)
    mark("first")
    while sock.recv(1, socket.MSG_PEEK) != b"b":
        pass
    ring.add(SEND, fd, 0, ctypes.addressof(room), 5, user=1)
    equal(ring.run(), {1: [5]})
    got = b""
    while len(got) < 11:
        ring.add(RECV, fd, 0, ctypes.addressof(room), 100, user=2)
        (n,), = ring.run().values()
        assert n > 0, n
        got += room.raw[:n]
    equal(got, b"by the ring")
    mark("second")
    ring.add(POLL_ADD, fd, 0, 0, 0, select.POLLIN, user=3)
    equal(ring.run(), {3: [select.POLLIN]})
    equal(exactly(sock, 5), b"again")
    ring.add(CLOSE, sock.detach(), user=4)
    equal(ring.run(), {4: [0]})
    ring.close()


def chain_server(sock):
    await_mark("watching")
    sock.sendall(b"x")
    equal(sock.recv(1), b"")


def chain_client(sock):
    """A registration whose turn comes after another request."""
    sock.setblocking(False)
    fd, ep, ring = sock.fileno(), select.epoll(), Ring()
    ring.add(NOP, flags=LINK, user=1)
    ring.ctl(ep.fileno(), ADD, fd, IN, fd, user=2)
    equal(ring.run(), {1: [0], 2: [0]})
    mark("watching")
    comes(ep, fd)
    equal(sock.recv(10), b"x")
    ring.close()


# ---- handed on ------------------------------------------------------------------------------

def rights_server(sock):
    await_mark("passed")
    sock.sendall(b"hello")
    equal(exactly(sock, 9), b"from afar")


def rights_client(sock):
    """A message of the ring hands the connection to a process without the shim."""
    ring = Ring()
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    program = "import socket, sys\ns = socket.socket(fileno=int(sys.argv[1]))\n" \
        "m, fds, _, _ = socket.recv_fds(s, 10, 1)\nc = socket.socket(fileno=fds[0])\nc.settimeout(10)\n" \
        "assert c.recv(5, socket.MSG_WAITALL) == b'hello'\nc.sendall(b'from afar')\n"
    bare = {k: v for k, v in os.environ.items() if not k.startswith(("LD_PRELOAD", "UNDERPASS"))}
    child = subprocess.Popen([sys.executable, "-c", program, str(theirs.fileno())], env=bare,
                             pass_fds=[theirs.fileno()])
    word = ctypes.create_string_buffer(b"take it", 7)
    vector = struct.pack("QQ", ctypes.addressof(word), 7)
    control = struct.pack("Niii4x", socket.CMSG_LEN(4), socket.SOL_SOCKET, socket.SCM_RIGHTS, sock.fileno())
    vector, control = (ctypes.create_string_buffer(b, len(b)) for b in (vector, control))
    header = struct.pack("QI4xQQQQi4x", 0, 0, ctypes.addressof(vector), 1, ctypes.addressof(control), len(control), 0)
    header = ctypes.create_string_buffer(header, len(header))
    ring.add(SENDMSG, ours.fileno(), 0, ctypes.addressof(header), 1, user=1)
    equal(ring.run(), {1: [7]})
    mark("passed")
    sock.close()
    equal(child.wait(), 0, "the other program")
    ring.close()


# ---- the kernel's older interface, which libaio uses -------------------------------------------

def aio_server(sock):
    await_mark("first")
    sock.sendall(b"polled")
    equal(exactly(sock, 5), b"hello")
    await_mark("second")
    sock.sendall(b"received")
    equal(sock.recv(1), b"")


def aio_client(sock):
    """It waits, receives and sends by itself."""
    fd, context, room = sock.fileno(), ctypes.c_ulong(0), ctypes.create_string_buffer(b"hello", 100)
    syscall(IO_SETUP, 4, ctypes.addressof(context))

    def submit(op, at, n):
        block = ctypes.create_string_buffer(struct.pack("QIIHhIQQqQII", 7, 0, 0, op, 0, fd, at, n, 0, 0, 0, 0), 64)
        blocks = ctypes.c_void_p(ctypes.addressof(block))
        equal(syscall(IO_SUBMIT, context.value, 1, ctypes.addressof(blocks)), 1)
        return block

    def done():
        event, limit = ctypes.create_string_buffer(32), ctypes.create_string_buffer(struct.pack("qq", LIMIT // 2, 0), 16)
        n = syscall(IO_GETEVENTS, context.value, 1, 1, ctypes.addressof(event), ctypes.addressof(limit))
        equal(n, 1, "an event")
        return struct.unpack("QQqq", event.raw)[2]

    kept = submit(AIO_POLL, IN, 0)
    mark("first")
    equal(done() & IN, IN, "poll")
    equal(exactly(sock, 6), b"polled")
    kept = submit(AIO_WRITE, ctypes.addressof(room), 5)
    equal(done(), 5, "write")
    mark("second")
    readable = select.poll()
    readable.register(sock, IN)
    readable.poll()
    kept = submit(AIO_READ, ctypes.addressof(room), 100)
    equal((done(), room.value[:8]), (8, b"received"), "read")
    assert kept


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
