"""Two ends of one connection with socket options that put something beside the bytes.

    options.py CASE serve HOST DIR           prints "port N"
    options.py CASE connect HOST PORT DIR

Conventions as in `edges.py`. Cases whose names end in `_before` set their options on the listener, and on
the client's socket before it is connected.
"""
import ctypes
import errno
import mmap
import os
import select
import signal
import socket
import struct
import sys
import tempfile
import termios
import threading
import time

from ends import DIR, await_mark, exactly, mark, marked

CASE, ROLE, HOST = sys.argv[1:4]
LIMIT = 20
TCP_INQ, SO_TIMESTAMP, SO_ZEROCOPY, MSG_ZEROCOPY = 36, 29, 60, 0x4000000


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


def readable(sock, events=select.POLLIN):
    p = select.poll()
    p.register(sock, events)
    assert p.poll(LIMIT * 500), "nothing comes"


def looked_at():
    """The test sees whether the connection is on its lane still."""
    mark("kept")
    await_mark("looked")


# ---- TCP_INQ ---------------------------------------------------------------------------------

def inq(sock):
    sock.setsockopt(socket.IPPROTO_TCP, TCP_INQ, 1)


def told(sock, n, room=64, flags=0):
    """What a receive says: bytes, hint (or the bytes of one that was cut off), flags."""
    data, control, flags, _ = sock.recvmsg(n, room, flags)
    hints = []
    for level, kind, value in control:
        equal((level, kind), (socket.IPPROTO_TCP, TCP_INQ), "kind of control data")
        hints.append(struct.unpack("i", value)[0] if len(value) == 4 else value)
    return data, hints, flags


def inq_server(sock):
    sock.sendall(b"0123456789")
    await_mark("first")
    sock.sendall(b"x" * 40_000)  # fits the ring, which otherwise goes down when nobody reads
    mark("second")
    await_mark("third")
    sock.sendall(b"ab")
    sock.shutdown(socket.SHUT_WR)
    mark("shut")
    equal(exactly(sock, 3), b"end")


def inq_client(sock):
    if not CASE.endswith("before"):
        inq(sock)
    equal(sock.getsockopt(socket.IPPROTO_TCP, TCP_INQ), 1)
    while len(sock.recv(10, socket.MSG_PEEK)) < 10:
        time.sleep(0.001)
    cut, cloexec = socket.MSG_CTRUNC, socket.MSG_CMSG_CLOEXEC
    equal(told(sock, 3), (b"012", [7], 0))
    equal(told(sock, 2, flags=socket.MSG_PEEK), (b"34", [7], 0), "peek")
    equal(told(sock, 1, 0), (b"3", [], cut), "no room")
    equal(told(sock, 1, 8), (b"4", [], cut), "no room for a header")
    equal(told(sock, 1, 16), (b"5", [b""], cut), "no room for the hint")
    equal(told(sock, 1, 20), (b"6", [3], 0), "just enough room")
    equal(told(sock, 1, 64, cloexec), (b"7", [2], cloexec))
    equal(told(sock, 100), (b"89", [0], 0), "all")
    try:
        told(sock, 1, flags=socket.MSG_DONTWAIT)
        raise AssertionError("something more")
    except BlockingIOError:
        pass
    mark("first")
    await_mark("second")
    got = 0
    while got < 40_000:  # the last part may be on its way yet: the hint is what is there
        data, [left], _ = told(sock, 4_000)
        got += len(data)
        assert 0 <= left <= 40_000 - got, left
    equal(left, 0)
    sock.setsockopt(socket.IPPROTO_TCP, TCP_INQ, 0)
    looked_at()
    mark("third")
    await_mark("shut")
    readable(sock, select.POLLRDHUP)
    equal(told(sock, 0), (b"", [], 0), "switched off")
    inq(sock)
    equal(told(sock, 1), (b"a", [2], 0), "a byte and the end")
    equal(told(sock, 1), (b"b", [1], 0), "the end")
    equal(told(sock, 1), (b"", [1], 0), "at the end")
    equal(told(sock, 1), (b"", [1], 0), "at the end again")
    sock.sendall(b"end")


def shutrd_server(sock):
    sock.sendall(b"hi")
    await_mark("over")


def shutrd_client(sock):
    inq(sock)
    while len(sock.recv(2, socket.MSG_PEEK)) < 2:
        time.sleep(0.001)
    looked_at()
    sock.shutdown(socket.SHUT_RD)
    equal(told(sock, 1), (b"h", [1], 0))
    equal(told(sock, 1), (b"i", [0], 0))
    equal(told(sock, 1), (b"", [0], 0))
    mark("over")


# ---- MSG_ZEROCOPY ------------------------------------------------------------------------------

def zerocopy(sock):
    sock.setsockopt(socket.SOL_SOCKET, SO_ZEROCOPY, 1)


def completion(sock, room=128, flags=0):
    """One notification: first and last number, what it says besides; `None`: there is none."""
    try:
        data, control, flags, address = sock.recvmsg(64, room, socket.MSG_ERRQUEUE | flags)
    except BlockingIOError:
        return None
    said = []
    for level, kind, value in control:
        error, origin, type_, code, _, first, last = struct.unpack("IBBBBII", value[:16])
        # (Over loopback the kernel copies as well.)
        said.append((level, kind, len(value), error, origin, type_, code, first, last, value[16:].strip(b"\0")))
    return data, said, flags, address


def completions(sock, first, n):
    """The numbers `first` to `first + n`, each once, in any ranges; as the kernel words them."""
    left = set(range(first, first + n))
    while left:
        readable(sock, 0)
        data, [said], flags, address = completion(sock)
        equal((data, flags, address), (b"", socket.MSG_ERRQUEUE, None))
        v6 = sock.family == socket.AF_INET6
        head = (socket.IPPROTO_IPV6, 25, 44) if v6 else (socket.IPPROTO_IP, 11, 32)
        equal(said[:7] + said[9:], (*head, 0, 5, 0, 1, b""))
        numbers = set(range(said[7], said[8] + 1))
        assert numbers and numbers <= left, (numbers, left)
        left -= numbers
    equal(completion(sock), None, "more")
    equal(poll_now(sock) & select.POLLERR, 0)


def poll_now(sock):
    p = select.poll()
    p.register(sock, select.POLLIN)
    return dict(p.poll(0)).get(sock.fileno(), 0)


def zerocopy_server(sock):
    for _ in range(2):
        received = 0
        while received < 40 * 900:
            received += len(exactly(sock, 900))
        sock.sendall(b"done")
    await_mark("over")


def zerocopy_client(sock):
    if CASE == "zerocopy":
        sock.send(b"x" * 300, MSG_ZEROCOPY)  # not switched on: the flag means nothing
        sock.send(b"x" * 600)
        equal((poll_now(sock), completion(sock)), (0, None), "without the option")
        zerocopy(sock)
        n = 0
    else:
        sock.send(b"x" * 900)
        n = 3
    e = select.epoll()
    e.register(sock, select.EPOLLIN | select.EPOLLET)
    edges = select.epoll()
    edges.register(sock, 0)
    equal((e.poll(0), edges.poll(0)), ([], []))
    for _ in range(30):
        equal(sock.send(b"y" * 900, MSG_ZEROCOPY), 900)
    said = [(sock.fileno(), select.EPOLLERR)]
    equal(e.poll(LIMIT / 2), said, "edge")
    # A busy kernel completes them one by one, after the calls: an edge for each.
    late = [e.poll(0) for _ in range(30)] if "LD_PRELOAD" not in os.environ else []
    assert all(more in (said, []) for more in late), late
    equal(e.poll(0), [], "edges")
    equal(edges.poll(LIMIT / 2), [(sock.fileno(), select.EPOLLERR)], "level")
    equal(select.select([sock], [], [], 0), ([sock], [], []))
    completions(sock, n, 30)
    equal((e.poll(0), edges.poll(0)), ([], []))
    equal(sock.sendmsg([b"z" * 400, b"z" * 500], [], MSG_ZEROCOPY), 900)
    equal(sock.send(b"", MSG_ZEROCOPY), 0)
    readable(sock, 0)
    _, control, flags, _ = sock.recvmsg(1, 20, socket.MSG_ERRQUEUE)
    equal(([c[:2] for c in control], flags),
          ([(socket.IPPROTO_IP, 11)], socket.MSG_ERRQUEUE | socket.MSG_CTRUNC), "no room")
    sock.send(b"z" * 900, MSG_ZEROCOPY)
    readable(sock, 0)
    equal(sock.recv(1, socket.MSG_ERRQUEUE), b"", "without control data")
    for _ in range(7):
        sock.sendall(b"y" * 900, MSG_ZEROCOPY)
    completions(sock, n + 32, 7)
    equal(exactly(sock, 4), b"done")
    looked_at()
    # A thread that waits for nothing but an error hears of it.
    said = []
    t = threading.Thread(target=lambda: said.append(edges.poll(LIMIT / 2)))
    u = threading.Thread(target=lambda: said.append(readable(sock, 0)))
    t.start(), u.start()
    for _ in range(40):
        sock.send(b"y" * 900, MSG_ZEROCOPY)
    t.join(), u.join()
    completions(sock, n + 39, 40)
    equal(exactly(sock, 4), b"done")
    mark("over")


def zerocopy_sent_before(sock):
    """The kernel counts the first three."""
    zerocopy(sock)
    for _ in range(3):
        sock.send(b"w" * 100, MSG_ZEROCOPY)
    if CASE == "zerocopy_before":
        completions(sock, 0, 3)


zerocopy_before_server, zerocopy_before_client = zerocopy_server, zerocopy_client
zerocopy_late_server = zerocopy_server


def zerocopy_late_client(sock):
    """The notifications of the first three are fetched late: until then, POLLERR is no error."""
    completions(sock, 0, 3)
    zerocopy_client(sock)


def zerocopy_left_server(sock):
    exactly(sock, 4 * 900)
    await_mark("left")
    sock.sendall(b"more")
    exactly(sock, 900)
    await_mark("over")


def zerocopy_left_client(sock):
    """Notifications that were not fetched when the connection left its lane, and those of sends after that."""
    zerocopy(sock)
    fd, what = sock.fileno(), select.EPOLLERR
    edge, level, once = select.epoll(), select.epoll(), select.epoll()
    edge.register(sock, select.EPOLLIN | select.EPOLLET)
    level.register(sock, 0)
    once.register(sock, select.EPOLLIN | select.EPOLLONESHOT)
    for _ in range(3):
        sock.sendall(b"y" * 900, MSG_ZEROCOPY)
    readable(sock, 0)
    for on in [1, 0]:
        sock.setsockopt(socket.SOL_SOCKET, SO_TIMESTAMP, on)
    later = select.epoll()
    later.register(sock, select.EPOLLOUT)
    for _ in range(2):
        equal(level.poll(LIMIT / 2), [(fd, what)], "level")
        equal(later.poll(LIMIT / 2), [(fd, what | select.EPOLLOUT)], "registered later")
    equal((edge.poll(LIMIT / 2), edge.poll(0)), ([(fd, what)], []), "edge")
    equal((once.poll(LIMIT / 2), once.poll(0)), ([(fd, what)], []), "one-shot")
    completions(sock, 0, 3)
    equal((level.poll(0), edge.poll(0)), ([], []), "fetched")
    once.modify(sock, select.EPOLLIN | select.EPOLLONESHOT)
    equal((once.poll(0), later.poll(0)), ([], [(fd, select.EPOLLOUT)]), "fetched")
    # On TCP for good.
    said = []
    t = threading.Thread(target=lambda: said.append(level.poll(LIMIT / 2)))
    t.start()
    sock.sendall(b"y" * 900, MSG_ZEROCOPY)
    t.join()
    equal(said, [[(fd, what)]], "a thread that waits")
    equal((edge.poll(LIMIT / 2), edge.poll(0)), ([(fd, what)], []), "edge")
    equal(once.poll(LIMIT / 2), [(fd, what)], "one-shot")
    completions(sock, 3, 1)
    mark("left")
    equal((edge.poll(LIMIT / 2), edge.poll(0)), ([(fd, select.EPOLLIN)], []), "bytes")
    equal(later.poll(0), [(fd, select.EPOLLOUT)])
    later.modify(sock, select.EPOLLIN)
    equal(later.poll(LIMIT / 2), [(fd, select.EPOLLIN)])
    equal(exactly(sock, 4), b"more")
    equal((later.poll(0), level.poll(0)), ([], []))
    later.unregister(sock)
    sock.sendall(b"y" * 900, MSG_ZEROCOPY)
    equal(level.poll(LIMIT / 2), [(fd, what)])
    equal(later.poll(0), [])
    completions(sock, 4, 1)
    mark("over")


# ---- bad pointers ------------------------------------------------------------------------------

LIBC = ctypes.CDLL(None, use_errno=True)
PAGE = 4096


def fails(wanted, name, *args):
    ctypes.set_errno(0)
    f = getattr(LIBC, name)
    f.restype = ctypes.c_ssize_t
    words = [a if hasattr(a, "contents") or a is None else ctypes.c_size_t(a & (1 << 64) - 1) for a in args]
    r = f(*words)
    r = r - (1 << 32) if r == 0xffffffff else r
    said = errno.errorcode.get(ctypes.get_errno()) if r == -1 else r
    equal(said, wanted, f"{name}{args}")


def memory(prot):
    LIBC.mmap.restype = ctypes.c_size_t
    at = LIBC.mmap(None, ctypes.c_size_t(2 * PAGE), prot, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, -1, 0)
    assert at % PAGE == 0
    return at


def protect(at, prot, n=PAGE):
    equal(LIBC.mprotect(ctypes.c_size_t(at), ctypes.c_size_t(n), prot), 0)


def vector(*runs):
    words = (ctypes.c_size_t * (2 * len(runs)))(*[w for r in runs for w in r])
    header = (ctypes.c_size_t * 7)(0, 0, ctypes.addressof(words), len(runs), 0, 0, 0)
    return words, ctypes.addressof(words), header, ctypes.addressof(header)


def fault_server(sock):
    sock.sendall(b"0123456789" * 30)
    await_mark("faults")
    equal(exactly(sock, 700), b"x" * 100 + b"a" * 100 + b"b" * 100 + b"e" * 300 + b"f" * 100)
    mark("over")


def fault_client(sock):
    fd = sock.fileno()
    while len(sock.recv(300, socket.MSG_PEEK)) < 300:
        time.sleep(0.001)
    good = memory(mmap.PROT_READ | mmap.PROT_WRITE)
    half = memory(mmap.PROT_READ | mmap.PROT_WRITE)
    constant = memory(mmap.PROT_READ)
    nothing = memory(0)
    protect(half + PAGE, 0)
    edge = half + PAGE - 100
    ctypes.memset(good, ord("a"), PAGE)
    ctypes.memset(half, ord("b"), PAGE)
    for at in (0, 8, PAGE - 1, nothing, nothing + 77, -1, -PAGE, 1 << 62, edge + 50):
        fails("EFAULT", "send", fd, at, 100, 0)
        fails("EFAULT", "write", fd, at, 100)
        fails("EFAULT", "recv", fd, at, 100, 0)
        fails("EFAULT", "read", fd, at, 100)
        fails("EFAULT", "recv", fd, at, 100, socket.MSG_PEEK)
        fails("EFAULT", "recvfrom", fd, at, 100, socket.MSG_DONTWAIT, 0, 0)
        keep, v, header, m = vector((good, 10), (at, 100))
        fails("EFAULT", "writev", fd, v, 2)
        fails("EFAULT", "readv", fd, v, 2)
        fails("EFAULT", "sendmsg", fd, m, 0)
        fails("EFAULT", "recvmsg", fd, m, 0)
    for at in (0, 8, nothing, -PAGE):
        fails("EFAULT", "writev", fd, at, 1)
        fails("EFAULT", "readv", fd, at, 1)
        fails("EFAULT", "sendmsg", fd, at, 0)
        fails("EFAULT", "recvmsg", fd, at, 0)
        fails("EFAULT", "ioctl", fd, termios.FIONREAD, at)
    for at in (constant, constant + PAGE + 9):
        fails("EFAULT", "recv", fd, at, 100, 0)
    # Only what there is to read is written.
    fails(100, "recv", fd, edge, 100, 0)
    equal(ctypes.string_at(edge, 100), b"0123456789" * 10)
    fails(190, "recv", fd, good, 190, 0)
    fails(10, "recv", fd, edge + 90, 1000, 0)
    equal(ctypes.string_at(edge + 90, 10), b"0123456789")
    ctypes.memset(half, ord("b"), PAGE)
    ctypes.memset(good, ord("a"), PAGE)
    with tempfile.TemporaryFile() as f:
        f.write(b"x" * 1000)
        f.flush()
        for at in (8, nothing, constant):
            fails("EFAULT", "sendfile", fd, f.fileno(), at, 100)
    fails(100, "send", fd, good, 100, 0)
    fails(100, "send", fd, edge, 100, 0)
    # Memory that was good once.
    protect(good, 0)
    fails("EFAULT", "send", fd, good, 100, 0)
    protect(good, mmap.PROT_READ | mmap.PROT_WRITE)
    ctypes.memset(good, ord("e"), PAGE)
    fails(300, "send", fd, good, 300, 0)
    LIBC.munmap(ctypes.c_size_t(good), ctypes.c_size_t(2 * PAGE))
    fails("EFAULT", "send", fd, good, 100, 0)
    keep, v, header, m = vector((half, 10), (good, 100))
    fails("EFAULT", "writev", fd, v, 2)
    sock.sendall(b"f" * 100)
    looked_at()
    mark("faults")
    await_mark("over")


# The same of the arrays in which waits have their answers, of their times and masks. By number, too: there
# the C library reads nothing.
READ, WRITE, POLL, SELECT, MUNMAP, PSELECT6, PPOLL, EPOLL_WAIT, EPOLL_CTL, EPOLL_PWAIT, EPOLL_PWAIT2, RECVMMSG = (
    0, 1, 7, 23, 11, 270, 271, 232, 233, 281, 441, 299)


def arrays_server(sock):
    sock.sendall(b"0123456789" * 30)
    await_mark("arrays")
    sock.sendall(b"x")
    mark("more")
    await_mark("over")


def arrays_client(sock):
    fd = sock.fileno()
    while len(sock.recv(300, socket.MSG_PEEK)) < 300:
        time.sleep(0.001)
    good = memory(mmap.PROT_READ | mmap.PROT_WRITE)
    half = memory(mmap.PROT_READ | mmap.PROT_WRITE)
    constant = memory(mmap.PROT_READ | mmap.PROT_WRITE)
    nothing = memory(0)
    protect(half + PAGE, 0)
    asks = struct.pack("ihh", fd, select.POLLIN, 0)
    bits = bytes(fd // 8) + bytes([1 << fd % 8]) + bytes(1024)
    long = struct.pack("qq", 5, 0)
    event = struct.pack("=IQ", select.EPOLLIN, 77)

    def put(what, to=good):
        ctypes.memmove(to, what, len(what))
        return to

    put(asks, constant)
    put(bits, constant + 64)
    put(long, constant + 2048)
    protect(constant, mmap.PROT_READ)
    sets, n, later = good + 256, fd + 1, put(long, good + 2048)
    bad = (8, nothing, nothing + 77, -1, -PAGE, 1 << 62, half + PAGE - 4)
    for at in (0, *bad, constant):
        for time_out in (0, -1):
            fails("EFAULT", "poll", at, 1, time_out)
            fails("EFAULT", "syscall", POLL, at, 1, time_out)
        fails("EFAULT", "ppoll", at, 1, 0, 0)
        fails("EFAULT", "syscall", PPOLL, at, 1, later, 0, 8)
    for at in (*bad, constant + 64):
        for order in (0, 1, 2):
            three = [0, 0, 0]
            three[order] = at
            if at == constant + 64 and order:
                three[0] = put(bits, sets)  # or nothing comes
            fails("EFAULT", "select", n, *three, 0)
            fails("EFAULT", "syscall", SELECT, n, *three, later)
            fails("EFAULT", "pselect", n, *three, 0, 0)
            fails("EFAULT", "syscall", PSELECT6, n, *three, later, 0)
    for at in bad:
        put(asks), put(bits, sets)
        fails("EFAULT", "syscall", PPOLL, good, 1, at, 0, 8)
        fails("EFAULT", "syscall", SELECT, n, sets, 0, 0, at)
        fails("EFAULT", "syscall", PSELECT6, n, sets, 0, 0, at, 0)
        fails("EFAULT", "syscall", PSELECT6, n, sets, 0, 0, later, at)
        fails("EFAULT", "ppoll", good, 1, 0, at)
        fails("EFAULT", "pselect", n, sets, 0, 0, 0, at)
    # A time that cannot be written is no error.
    fails(1, "syscall", PPOLL, put(asks), 1, constant + 2048, 0, 8)
    fails(1, "syscall", SELECT, n, put(bits, sets), 0, 0, constant + 2048)
    fails(1, "syscall", PSELECT6, n, put(bits, sets), 0, 0, constant + 2048, 0)
    # Just room enough, and nothing is looked at behind the process's descriptors.
    fails(1, "poll", put(asks, half + PAGE - 8), 1, -1)
    equal(ctypes.string_at(half + PAGE - 2, 2), struct.pack("h", select.POLLIN))
    words = -(-n // 64) * 8
    fails(1, "select", n, put(bits[:words], half + PAGE - words), 0, 0, 0)
    put(bits[:words] + bytes(128 - words), half + PAGE - 128)
    fails(1, "select", 1 << 20, half + PAGE - 128, 0, 0, 0)
    ctypes.memset(half, 255, PAGE)
    put(bits[:words] + bytes(128 - words), half + 256)
    fails(1, "select", 1 << 20, half + 256, 0, 0, 0)
    fails(1, "pselect", 1 << 20, half + 256, 0, 0, 0, 0)

    ours, theirs = os.pipe()
    for kind in (0, select.EPOLLET, select.EPOLLONESHOT):
        ep = LIBC.epoll_create1(0)
        for at in bad:
            fails("EFAULT", "epoll_ctl", ep, 1, fd, at)
        event = struct.pack("=IQ", select.EPOLLIN | kind, 77)
        fails(0, "epoll_ctl", ep, 1, fd, put(event))
        for at in bad:
            fails("EFAULT", "epoll_ctl", ep, 3, fd, at)
        for at in (0, *bad, constant):
            for most in (1, 1000):
                fails("EFAULT", "epoll_wait", ep, at, most, -1)
                fails("EFAULT", "epoll_wait", ep, at, most, 0)
                fails("EFAULT", "epoll_pwait", ep, at, most, -1, 0)
                fails("EFAULT", "epoll_pwait2", ep, at, most, later, 0)
                fails("EFAULT", "syscall", EPOLL_WAIT, ep, at, most, 1000)
                fails("EFAULT", "syscall", EPOLL_PWAIT, ep, at, most, 1000, 0, 8)
                fails("EFAULT", "syscall", EPOLL_PWAIT2, ep, at, most, 0, 0, 8)
        for most in (0, -1, (1 << 31) - 1):
            fails("EINVAL", "epoll_wait", ep, good, most, 0)
        for at in bad:
            fails("EFAULT", "epoll_pwait", ep, good, 1, -1, at)
            fails("EFAULT", "epoll_pwait2", ep, good, 1, at, 0)
            fails("EFAULT", "epoll_pwait2", ep, good, 1, 0, at)
        # Whom nobody could be told of is still there, and what there is room for is told.
        os.write(theirs, b"y")
        fails(0, "epoll_ctl", ep, 1, ours, put(struct.pack("=IQ", select.EPOLLIN | kind, 78)))
        fails("EFAULT", "epoll_wait", ep, nothing, 2, -1)
        fails(1, "epoll_wait", ep, half + PAGE - 16, 2, -1)
        both, told = {(select.EPOLLIN, 77), (select.EPOLLIN, 78)}, set()
        told.add(struct.unpack("=IQ", ctypes.string_at(half + PAGE - 16, 12)))
        while told != both:
            count = LIBC.epoll_wait(ep, ctypes.c_size_t(good), 2, LIMIT * 500)
            assert count > 0, f"no event but {told}"
            told.update(struct.iter_unpack("=IQ", ctypes.string_at(good, 12 * count)))
        os.read(ours, 1)
        # The event of what is removed is not read.
        fails(0, "epoll_ctl", ep, 2, fd, nothing)
        fails(0, "epoll_ctl", ep, 1, fd, put(event))
        fails(0, "syscall", EPOLL_CTL, ep, 2, fd, 8)
        os.close(ep)
    # Without an event only what can be no program's memory is refused.
    ep = LIBC.epoll_create1(0)
    fails(0, "epoll_ctl", ep, 1, fd, put(struct.pack("=IQ", select.EPOLLIN, 1)))
    for at in bad:
        fails("EFAULT", "recvmmsg", fd, at, 1, 0, 0)
        fails("EFAULT", "syscall", RECVMMSG, fd, good, 1, 0, at)
    equal(exactly(sock, 300), b"0123456789" * 30)
    for at in (8, nothing, constant):
        fails(0, "epoll_wait", ep, at, 1, 0)
    fails("EFAULT", "epoll_wait", ep, -1, 1, 0)
    mark("arrays")
    await_mark("more")
    for at in (8, nothing, constant):
        fails("EFAULT", "epoll_wait", ep, at, 1, -1)
    equal(exactly(sock, 1), b"x")
    looked_at()
    mark("over")


# ---- Java's helper ----------------------------------------------------------------------------

def helper_server(sock):
    for _ in range(5):
        sock.sendall(exactly(sock, 1000))
    await_mark("looked")


def helper_client(sock):
    """Programs started as Java does it, from a process whose sockets are not closed on exec."""
    os.set_inheritable(sock.fileno(), True)
    path = os.path.join(DIR, "lib")
    os.mkdir(path)
    path = os.path.join(path, "jspawnhelper")
    os.symlink("/bin/true", path)  # the real one closes what it inherits
    for _ in range(5):
        equal(os.waitpid(os.posix_spawn(path, [path], os.environ), 0)[1], 0)
        noise = os.urandom(1000)
        sock.sendall(noise)
        equal(exactly(sock, 1000), noise)
    looked_at()


inq_before_server, inq_before_client = inq_server, inq_client


# ---- main ------------------------------------------------------------------------------------

def main():
    signal.alarm(LIMIT * 2)  # generous: the warm-up is the test's
    before = {"inq_before": inq}.get(CASE, lambda sock: None)
    if ROLE == "serve":
        listener = socket.create_server((HOST, 0))
        before(listener)
        print("port", listener.getsockname()[1], flush=True)
        sock, _ = listener.accept()
        listener.close()
    else:
        sock = socket.socket()
        before(sock)
        sock.connect((HOST, int(sys.argv[4])))
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    if CASE in ("zerocopy_before", "zerocopy_late"):
        if ROLE == "serve":
            exactly(sock, 300)
        else:
            zerocopy_sent_before(sock)
    warm_up(sock)
    signal.alarm(LIMIT)
    globals()[f"{CASE}_{'server' if ROLE == 'serve' else 'client'}"](sock)
    sock.close()
    print("result ok", flush=True)


main()
