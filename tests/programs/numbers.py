"""Two ends of one connection that are used by number: `syscall(2)` of the C library, or the instruction itself.

    numbers.py CASE serve HOST DIR           prints "port N"
    numbers.py CASE connect HOST PORT DIR

Conventions as in `edges.py`. A case whose name begins with `inline_` makes its calls with the processor's own
instruction, unseen by any library.
"""
import ctypes
import errno
import mmap
import os
import resource
import select
import signal
import socket
import struct
import sys
import tempfile
import time

from ends import await_mark, exactly, mark, marked

CASE, ROLE, HOST = sys.argv[1:4]
LIBC = ctypes.CDLL(None, use_errno=True)
LIBC.syscall.restype = ctypes.c_long
LIMIT = 40

NR = dict(read=0, write=1, close=3, dup2=33, dup3=292, socket=41, connect=42, accept=43, bind=49, listen=50, sendto=44,
          setsockopt=54, getsockopt=55, clone=56, fork=57, vfork=58, execve=59, exit=60, epoll_create=213,
          epoll_wait=232, epoll_ctl=233, close_range=436, clone3=435, execveat=322, fcntl=72, pidfd_getfd=438)

# long raw(long n, ...): as the C library's `syscall`, but the result is the kernel's own.
CODE = bytes.fromhex("4889f8 4889f7 4889d6 4889ca 4d89c2 4d89c8 4c8b4c2408 0f05 c3")
PAGE = mmap.mmap(-1, mmap.PAGESIZE, prot=mmap.PROT_READ | mmap.PROT_WRITE | mmap.PROT_EXEC)
PAGE.write(CODE)
RAW = ctypes.CFUNCTYPE(ctypes.c_long, *[ctypes.c_long] * 7)(ctypes.addressof(ctypes.c_char.from_buffer(PAGE)))


def word(a):
    if isinstance(a, (bytes, ctypes.Array, ctypes.Structure)):
        return ctypes.cast(ctypes.c_char_p(a) if isinstance(a, bytes) else ctypes.pointer(a), ctypes.c_void_p).value
    return 0 if a is None else int(a)


def call(name, *args):
    """A call by number; an errno as its name."""
    words = [ctypes.c_long(word(a)) for a in args] + [ctypes.c_long(0)] * (6 - len(args))
    if CASE.startswith("inline_"):
        r = RAW(ctypes.c_long(NR[name]), *words)
        return errno.errorcode[-r] if -4096 < r < 0 else r
    ctypes.set_errno(0)
    r = LIBC.syscall(ctypes.c_long(NR[name]), *words)
    return errno.errorcode[ctypes.get_errno()] if r == -1 else r


def equal(got, expected, what=""):
    assert got == expected, f"{what}: {got}, not {expected}"


def ping(sock, last=False):
    sock.sendall(struct.pack("!?63x", last))
    equal(exactly(sock, 64)[0], last, "echo")


def warm_up(sock, until="warm"):
    """Ping-pong until the test says that it is enough."""
    last = False
    while not last:
        if ROLE == "connect":
            last = marked(until)
            ping(sock, last)
        else:
            message = exactly(sock, 64)
            sock.sendall(message)
            last = message[0]


def silent_server(sock, meanwhile=lambda: None):
    """Nothing but the end may come, and nothing is read from a connection that is gone."""
    sock.sendall(b"for the connection, not for a file")
    mark("sent")
    meanwhile()
    try:
        got = sock.recv(1)
    except ConnectionResetError:
        got = b""  # what it had not read was unread at its close
    equal(got, b"", "bytes at the peer")
    await_mark("over")


# ---- numbers that mean something else afterwards -----------------------------------------------

def reuse(sock, take):
    """`take(number, file)` puts a file in the place of the connection."""
    await_mark("sent")
    fd = sock.detach()
    name = tempfile.mkstemp()[1]
    with open(name, "r+b", buffering=0) as f:
        take(fd, f.fileno())
        for k in range(100):
            equal(os.write(fd, b"for the file\n"), 13, "write")
        os.lseek(fd, 0, os.SEEK_SET)
        equal(os.read(fd, 13), b"for the file\n", "read")
    equal(os.stat(name).st_size, 1300, "size of the file")
    os.unlink(name)
    mark("over")


def lowest(file, fd):
    """The file is opened once more, until it has that number."""
    while (got := os.open(f"/proc/self/fd/{file}", os.O_RDWR)) != fd:
        assert got < fd, (got, fd)


def close_range_client(sock):
    """Closed by `close_range`; a file is opened, and gets the number."""
    def take(fd, file):
        equal(call("close_range", fd, fd, 0), 0)
        lowest(file, fd)
    reuse(sock, take)


def close_client(sock):
    def take(fd, file):
        equal(call("close", fd), 0)
        lowest(file, fd)
    reuse(sock, take)


def dup2_client(sock):
    def take(fd, file):
        equal(call("dup2", file, fd), fd)
    reuse(sock, take)


def dup3_client(sock):
    def take(fd, file):
        equal(call("dup3", file, fd, os.O_CLOEXEC), fd)
    reuse(sock, take)


def duplicate_server(sock):
    equal(exactly(sock, 13), b"still the one", "by its other number")
    silent_server(sock)


def duplicate_client(sock):
    """The connection has two numbers, of which one becomes a file."""
    other = os.dup(sock.fileno())
    os.write(other, b"still the one")

    def take(fd, file):
        equal(call("dup2", file, fd), fd)
    reuse(sock, take)
    os.close(other)


def other_server(sock):
    """A second connection gets the number of the first."""
    def second():
        equal(exactly(OTHER[0], 6), b"second", "the second connection")
        equal(OTHER[0].recv(1), b"", "its end")

    silent_server(sock, second)


def other_client(sock):
    second = socket.create_connection((HOST, int(sys.argv[4])))

    def take(fd, file):
        equal(call("dup2", second.fileno(), fd), fd)
        equal(os.write(fd, b"second"), 6)
        equal(call("dup2", file, fd), fd)
        second.close()
    reuse(sock, take)


def pidfd_server(sock):
    equal(exactly(sock, 8), b"the copy")
    sock.sendall(b"answered")
    equal(sock.recv(1), b"")


def pidfd_client(sock):
    """A process takes a copy of its own descriptor, and goes on with that alone."""
    process = os.pidfd_open(os.getpid())
    copy = call("pidfd_getfd", process, sock.fileno(), 0)
    sock.close()
    os.write(copy, b"the copy")
    equal(os.read(copy, 8), b"answered")
    os.close(copy)
    os.close(process)


# ---- processes ---------------------------------------------------------------------------------

LINES = 3000


def child_server(sock):
    got = b""
    while len(got) < 2 * LINES * 8:
        part = sock.recv(1 << 16)
        assert part, f"end after {len(got)} bytes"
        got += part
    lines = got.split(b"\n")[:-1]
    equal([lines.count(b"a child"), lines.count(b"parents")], [LINES, LINES], "whole lines of each")
    sock.sendall(b"both")
    equal(sock.recv(1), b"")


def write_lines(sock, line):
    for _ in range(LINES):
        equal(os.write(sock.fileno(), line), 8, "write")


def born(sock, name, *args):
    """A child made by number and its parent write at once."""
    pid = call(name, *args)
    if pid == 0:
        try:
            write_lines(sock, b"a child\n")
        except BaseException as e:
            print("child:", e, flush=True)
            call("exit", 1)
        call("exit", 0)
    assert isinstance(pid, int) and pid > 0, pid
    both(sock, pid)


def both(sock, pid):
    write_lines(sock, b"parents\n")
    equal(os.waitpid(pid, 0), (pid, 0))
    equal(exactly(sock, 4), b"both")


def fork_client(sock):
    born(sock, "fork")


def vfork_client(sock):
    born(sock, "vfork")


def clone_client(sock):
    born(sock, "clone", signal.SIGCHLD)


def clone3_client(sock):
    born(sock, "clone3", (ctypes.c_ulong * 11)(0, 0, 0, 0, signal.SIGCHLD), 88)


def named_clone_client(sock):
    """`clone` of the C library without shared memory: the child begins in a function of its own."""
    function = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p)
    written = function(lambda p: write_lines(sock, b"a child\n") or 0)
    stack = ctypes.create_string_buffer(1 << 20)
    top = (ctypes.addressof(stack) + len(stack)) & ~15
    pid = LIBC.clone(written, ctypes.c_void_p(top), signal.SIGCHLD, None)
    assert pid > 0, ctypes.get_errno()
    both(sock, pid)


def program_server(sock):
    equal(exactly(sock, 11), b"the program")
    equal(sock.recv(1), b"")


def becomes(sock, name, before, after):
    """Becomes a program without the shim that writes to the connection."""
    os.set_inheritable(sock.fileno(), True)
    line = f"printf 'the program' >&{sock.fileno()}; echo result ok"
    argv = (ctypes.c_char_p * 4)(b"sh", b"-c", line.encode())
    env = (ctypes.c_char_p * 2)(b"PATH=/usr/bin:/bin")
    call(name, *before, b"/bin/sh", argv, env, *after)
    raise AssertionError("exec came back")


def execve_client(sock):
    becomes(sock, "execve", [], [])


def execveat_client(sock):
    becomes(sock, "execveat", [-100], [0])


# ---- sockets -----------------------------------------------------------------------------------

def option_server(sock):
    await_mark("set")
    sock.sendall(b"1")
    mark("one")
    await_mark("looked")
    sock.sendall(b"2345")
    equal(sock.recv(1), b"")


def option_client(sock):
    """SO_RCVLOWAT by number: fewer than five bytes are not worth a wake-up."""
    equal(call("setsockopt", sock.fileno(), socket.SOL_SOCKET, socket.SO_RCVLOWAT, (ctypes.c_int * 1)(5), 4), 0)
    size = (ctypes.c_int * 1)(4)
    value = (ctypes.c_int * 1)(0)
    equal(call("getsockopt", sock.fileno(), socket.SOL_SOCKET, socket.SO_RCVLOWAT, value, size), 0)
    equal((value[0], size[0]), (5, 4))
    mark("set")
    await_mark("one")
    p = select.poll()
    p.register(sock, select.POLLIN)
    equal(p.poll(300), [], "one byte of five")
    mark("looked")
    equal(call("setsockopt", sock.fileno(), socket.SOL_SOCKET, socket.SO_RCVLOWAT, (ctypes.c_int * 1)(1), 4), 0)
    equal(exactly(sock, 5), b"12345")


def whole_server(sock):
    equal(sock.recv(1), b"")


def whole_client(sock):
    pass


# ---- limits ------------------------------------------------------------------------------------

# Descriptors below 64 that the program was started with; one is the directory's own.
AT_START = sum(int(name) < 64 for name in os.listdir("/proc/self/fd")) - 1


def full_server(sock):
    """With all descriptors in use the connection works, and the limit is where it is without the shim."""
    for turn in range(2):
        mine = []
        try:
            while True:
                mine.append(os.open("/dev/null", os.O_RDONLY))
        except OSError as e:
            equal(e.errno, errno.EMFILE)
        equal(len(mine), 64 - AT_START - 2, "descriptors until EMFILE")  # listener and connection
        await_mark(f"dialled{turn}")
        for _ in range(3):
            try:
                OTHER[0].accept()
                raise AssertionError("accept with all descriptors in use")
            except OSError as e:
                equal(e.errno, errno.EMFILE, "accept")
        sock.sendall(b"full")
        equal(exactly(sock, 4), b"yes.")
        for fd in mine:
            os.close(fd)
        OTHER[0].accept()[0].close()
    equal(sock.recv(1), b"")


def full_client(sock):
    for turn in range(2):
        other = socket.create_connection((HOST, int(sys.argv[4])))
        mark(f"dialled{turn}")
        equal(exactly(sock, 4), b"full")
        sock.sendall(b"yes.")
        equal(other.recv(1), b"")


def hard_server(sock):
    """The hard limit is reached, so that the shim's own descriptors count, while the daemon is started anew: nothing
    that ends there gives the program a number."""
    sock.setblocking(False)
    while True:
        try:
            OTHER.append(os.open("/dev/null", os.O_RDONLY))
        except OSError as e:
            equal(e.errno, errno.EMFILE)
            break
    os.close(OTHER.pop())
    mark("full")
    OTHER.append(os.open("/dev/null", os.O_RDONLY))
    end = time.monotonic() + 4  # more than the shim's longest rest between two tries to reach a daemon
    while time.monotonic() < end:
        for ask in (lambda: sock.recv(1), OTHER[0].accept):
            try:
                raise AssertionError(ask())
            except OSError as e:
                equal(e.errno, errno.EAGAIN if ask != OTHER[0].accept else errno.EMFILE)
        equal(select.select([sock], [], [], 0.01)[0], [])
    for fd in OTHER[1:]:
        os.close(fd)
    OTHER[0].accept()[0].close()
    mark("room")
    sock.setblocking(True)
    warm_up(sock, "enough")
    equal(sock.recv(1), b"")


def hard_client(sock):
    with socket.create_connection((HOST, int(sys.argv[4]))) as other:
        equal(other.recv(1), b"")
        warm_up(sock, "enough")


def without_capabilities():
    """As any user: may not raise a hard limit."""
    head = (ctypes.c_uint32 * 2)(0x20080522, 0)
    need = LIBC.capset(head, (ctypes.c_uint32 * 6)())
    equal(need, 0, "capset")


def lowered_server(sock):
    for what in b"123":
        await_mark(f"at{what - 48}")
        time.sleep(1)
        sock.sendall(bytes([what]))
    equal(sock.recv(1), b"")


def lowered_client(sock):
    """Waits under a limit below what the shim's own would take: neither refused nor busy, and asleep until the
    byte comes. A poll of more descriptors than the limit is refused, a select is not."""
    for limit, what in (3, b"1"), (1, b"2"), (0, b"3"):
        mark(f"at{what.decode()}")
        resource.setrlimit(resource.RLIMIT_NOFILE, (limit, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
        before = time.process_time()
        slept = resource.getrusage(resource.RUSAGE_SELF).ru_nvcsw
        if limit == 3:
            p = select.poll()
            p.register(sock, select.POLLIN)
            equal(p.poll(20_000), [(sock.fileno(), select.POLLIN)])
        if limit == 0:
            equal(select.select([sock], [], [], 20), ([sock], [], []))
            p = select.poll()
            p.register(sock, select.POLLIN)
            try:
                raise AssertionError(p.poll(20_000))
            except OSError as e:
                equal(e.errno, errno.EINVAL)
        equal(sock.recv(1), what)
        spent = time.process_time() - before
        assert spent < 0.6, f"busy for {spent} s"
        slept = resource.getrusage(resource.RUSAGE_SELF).ru_nvcsw - slept
        assert slept < 60, f"woken {slept} times"
        resource.setrlimit(resource.RLIMIT_NOFILE, (100, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))


# ---- who closes has no more access -------------------------------------------------------------

def shared_memory():
    """What this process has mapped together with others, and may read."""
    for line in open("/proc/self/maps").read().splitlines():
        place, rights, *_ = line.split()
        if rights[0] == "r" and rights[3] == "s":
            start, end = (int(w, 16) for w in place.split("-"))
            yield ctypes.string_at(start, end - start)


def child_looks(news):
    """Closes all connections, and reads what its parent gets afterwards, if it can."""
    os.closerange(3, news)
    os.closerange(news + 1, 256)
    mark("closed")
    secret = bytes(b ^ 0xff for b in os.read(news, 64))
    return sum(secret in memory for memory in shared_memory())


def mappings_server(sock):
    news, tell = os.pipe()
    pid = os.fork()
    if pid == 0:
        found = 99
        try:
            found = child_looks(news)
        finally:
            os._exit(found)
    await_mark("closed")
    secret = exactly(sock, 48)
    equal(exactly(sock, 1), b".")
    os.write(tell, bytes(b ^ 0xff for b in secret))
    equal(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), 0, "places where the child found it")
    ping(sock)
    equal(sock.recv(1), b"")


def mappings_client(sock):
    """What is sent after a child of the peer has closed its copy is not for that child."""
    await_mark("closed")
    sock.sendall(os.urandom(48))
    sock.sendall(b".")
    message = exactly(sock, 64)
    sock.sendall(message)


OTHER = []


def by_number(port):
    """A socket made, and connected or accepted from, by number only."""
    address = struct.pack("=HHI8x", socket.AF_INET, socket.htons(port), struct.unpack("=I", socket.inet_aton(HOST))[0])
    fd = call("socket", socket.AF_INET, socket.SOCK_STREAM, 0)
    if port:
        equal(call("connect", fd, address, 16), 0)
        return socket.socket(fileno=fd)
    equal(call("bind", fd, address, 16), 0)
    equal(call("listen", fd, 5), 0)
    listener = socket.socket(fileno=os.dup(fd))
    print("port", listener.getsockname()[1], flush=True)
    listener.close()
    ep = call("epoll_create", 1)
    event = ctypes.create_string_buffer(struct.pack("=IQ", 1, 7))
    equal(call("epoll_ctl", ep, 1, fd, event), 0)
    equal(call("epoll_wait", ep, event, 1, -1), 1)
    equal(struct.unpack("=IQ", event.raw[:12]), (1, 7))
    new = call("accept", fd, None, None)
    equal(call("close", ep), 0)
    return socket.socket(fileno=new), fd


SERVERS = dict(duplicate=duplicate_server, other=other_server, fork=child_server, vfork=child_server,
               clone=child_server, clone3=child_server, named_clone=child_server, execve=program_server,
               execveat=program_server, option=option_server, full=full_server, hard=hard_server, mappings=mappings_server, lowered=lowered_server,
               whole=whole_server, pidfd=pidfd_server)


def main():
    signal.alarm(LIMIT)
    if CASE == "full":
        resource.setrlimit(resource.RLIMIT_NOFILE, (64, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
    if CASE == "hard" and ROLE == "serve":
        without_capabilities()
        resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))
    name = CASE.removeprefix("inline_")
    listener = None
    if ROLE == "serve":
        if name == "whole":
            sock, listener = by_number(0)
        else:
            listener = socket.create_server((HOST, 0))
            print("port", listener.getsockname()[1], flush=True)
            sock, _ = listener.accept()
        warm_up(sock)
        if name in ("full", "hard"):
            OTHER.append(listener)
        if name == "other":
            OTHER.append(listener.accept()[0])
        SERVERS.get(name, silent_server)(sock)
    else:
        port = int(sys.argv[4])
        sock = by_number(port) if name == "whole" else socket.create_connection((HOST, port))
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        warm_up(sock)
        globals()[name + "_client"](sock)
    sock.close()
    print("result ok", flush=True)


main()
