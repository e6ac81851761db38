"""Two ends of one connection that do something particular with it, byte for byte.

    cases.py CASE serve HOST DIR           prints "port N"
    cases.py CASE connect HOST PORT DIR

Both ends first exchange small messages until the file DIR/warm exists (the test creates it once it
has seen the promotion); then each case does its thing. Each end prints "result ok" when everything
was as it must be; any difference is an exception. DIR is where test and programs leave marks.
"""
import array
import errno
import fcntl
import os
import random
import select
import socket
import struct
import subprocess
import sys
import termios
import threading
import time

from ends import DIR, await_mark, exactly, mark, marked

CASE, ROLE, HOST = sys.argv[1:4]
HERE = os.path.dirname(os.path.abspath(__file__))
NOISE = random.Random(7).randbytes(4 << 20)


def same(a, b):
    if a != b:
        at = next((i for i, (x, y) in enumerate(zip(a, b)) if x != y), min(len(a), len(b)))
        raise AssertionError(f"differs at {at}: {len(a)} and {len(b)} bytes")


def to_end(sock):
    out = bytearray()
    while True:
        got = sock.recv(65536)
        if not got:
            return bytes(out)
        out += got


def warm_up(sock):
    """Ping-pong until the test says that it is enough."""
    if ROLE == "connect":
        n = 0
        while True:
            last = marked("warm")
            message = struct.pack("!?I", last, n) + NOISE[n % 1000:n % 1000 + 59]
            sock.sendall(message)
            same(exactly(sock, 64), message)
            n += 1
            if last:
                return
    while True:
        message = exactly(sock, 64)
        sock.sendall(message)
        if message[0]:
            return


def echo(sock, n):
    """Serves n bytes of echo."""
    while n:
        got = sock.recv(min(n, 65536))
        if not got:
            raise EOFError
        sock.sendall(got)
        n -= len(got)


def ask(sock, data):
    """Sends and expects the same back; reads in a thread, so that any size will do."""
    back = []
    t = threading.Thread(target=lambda: back.append(exactly(sock, len(data))))
    t.start()
    sock.sendall(data)
    t.join()
    same(back[0], data)


# ---- descriptors ------------------------------------------------------------------------------

def dup_server(sock):
    echo(sock, 400_000)


def dup_client(sock):
    """Every copy of the descriptor is the same connection; the last one closes it."""
    other = sock.dup()
    ask(other, NOISE[:100_000])
    ask(sock, NOISE[5:100_005])
    spare = os.open("/dev/null", os.O_RDONLY)
    os.dup2(sock.fileno(), spare)
    third = socket.socket(fileno=spare)
    sock.close()
    ask(third, NOISE[9:100_009])
    other.close()
    fourth = socket.socket(fileno=fcntl.fcntl(third.fileno(), fcntl.F_DUPFD_CLOEXEC, 100))
    assert fourth.fileno() >= 100
    third.close()
    # The old numbers may be used again for something else.
    pipes = [os.pipe() for _ in range(4)]
    for r, w in pipes:
        os.write(w, b"pipe")
        assert os.read(r, 10) == b"pipe"
    ask(fourth, NOISE[11:100_011])
    return fourth


def over_server(sock):
    echo(sock, 50_000)
    same(to_end(sock), b"")


def over_client(sock):
    """dup2() of something else over the last descriptor closes the connection."""
    ask(sock, NOISE[:50_000])
    null = os.open("/dev/null", os.O_RDWR)
    os.dup2(null, sock.fileno())
    assert os.write(sock.fileno(), b"into the void") == 13


def flags_server(sock):
    echo(sock, 1000)
    await_mark("quiet")
    sock.sendall(NOISE[:3000])
    await_mark("seen")
    echo(sock, 1000)


def flags_client(sock):
    """O_NONBLOCK by fcntl and ioctl, FIONREAD, MSG_DONTWAIT, MSG_PEEK, timeouts, socket options."""
    ask(sock, NOISE[:1000])
    fd = sock.fileno()
    fcntl.fcntl(fd, fcntl.F_SETFL, fcntl.fcntl(fd, fcntl.F_GETFL) | os.O_NONBLOCK)
    try:
        os.read(fd, 10)
        raise AssertionError("read something")
    except BlockingIOError:
        pass
    fcntl.ioctl(fd, 0x5421, struct.pack("i", 0))  # FIONBIO
    assert not fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_NONBLOCK
    try:
        sock.recv(10, socket.MSG_DONTWAIT)
        raise AssertionError("read something")
    except BlockingIOError:
        pass
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, struct.pack("ll", 0, 50_000))
    try:
        os.read(fd, 10)
        raise AssertionError("read something")
    except BlockingIOError:
        pass
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, struct.pack("ll", 0, 0))
    mark("quiet")
    waiting = array.array("i", [0])
    while waiting[0] < 3000:
        fcntl.ioctl(fd, termios.FIONREAD, waiting)
    assert waiting[0] == 3000
    same(sock.recv(100, socket.MSG_PEEK), NOISE[:100])
    same(sock.recv(3000, socket.MSG_WAITALL), NOISE[:3000])
    fcntl.ioctl(fd, termios.FIONREAD, waiting)
    assert waiting[0] == 0
    assert sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR) == 0
    assert sock.getsockopt(socket.SOL_SOCKET, socket.SO_TYPE) == socket.SOCK_STREAM
    mark("seen")
    ask(sock, NOISE[:1000])


# ---- ends -------------------------------------------------------------------------------------

def halfclose_server(sock):
    data = to_end(sock)
    same(data, NOISE[:1_000_000])
    # The other direction still works, for as long as it likes.
    sock.sendall(NOISE[100:2_000_100])
    sock.shutdown(socket.SHUT_WR)
    try:
        sock.send(b"x")
        raise AssertionError("sent after shutdown")
    except BrokenPipeError:
        pass


def halfclose_client(sock):
    sock.sendall(NOISE[:1_000_000])
    sock.shutdown(socket.SHUT_WR)
    same(to_end(sock), NOISE[100:2_000_100])
    assert sock.recv(10) == b""


def bigwrites_server(sock):
    """Both ends write before either reads: the kernel's buffers take it, and so must we."""
    sock.sendall(NOISE[:BIG])
    same(exactly(sock, BIG), NOISE[1:BIG + 1])


def bigwrites_client(sock):
    sock.sendall(NOISE[1:BIG + 1])
    same(exactly(sock, BIG), NOISE[:BIG])


BIG = 2_500_000


def sendfile_server(sock):
    same(exactly(sock, 3_000_000), NOISE[1000:3_001_000])
    same(exactly(sock, 500_000), NOISE[:500_000])
    sock.sendall(b"fine")


def sendfile_client(sock):
    path = os.path.join(DIR, "file")
    with open(path, "wb") as f:
        f.write(NOISE)
    with open(path, "rb") as f:
        at, end = 1000, 3_001_000
        while at < end:
            at += os.sendfile(sock.fileno(), f.fileno(), at, end - at)
        # Without an offset it is the file's own position that moves.
        sent = 0
        while sent < 500_000:
            sent += os.sendfile(sock.fileno(), f.fileno(), None, 500_000 - sent)
        assert os.lseek(f.fileno(), 0, os.SEEK_CUR) == 500_000
    same(exactly(sock, 4), b"fine")


def reset_server(sock):
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    sock.close()
    mark("reset")


def reset_client(sock):
    """An abortive close is a reset here, and then a broken pipe."""
    await_mark("reset")
    try:
        sock.recv(10)
        raise AssertionError("no reset")
    except ConnectionResetError:
        pass
    try:
        for _ in range(3):
            sock.send(b"x")
        raise AssertionError("sent after a reset")
    except (BrokenPipeError, ConnectionResetError):
        pass


def killed_server(sock):
    """Sends, and is killed by the test; not one of these bytes may be lost."""
    sock.sendall(NOISE[:30_000])
    mark("sent")
    time.sleep(1000)


def killed_client(sock):
    await_mark("sent")
    await_mark("killed")
    check_end(sock, NOISE[:30_000])


def check_end(sock, expected):
    got, end = bytearray(), None
    while end is None:
        try:
            data = sock.recv(65536)
            if data:
                got += data
            else:
                end = "EOF"
        except ConnectionResetError:
            end = "RESET"
    same(bytes(got), expected)


def killedwaiting_server(sock):
    mark("sent")
    time.sleep(1000)


def heirkilled_server(sock):
    """A child inherits the connection, leaves it alone, and is killed by the test."""
    await_mark("waiting")
    if os.fork():
        os._exit(0)
    time.sleep(1000)


def killedwaiting_client(sock):
    """Blocked in three different ways when the peer is killed."""
    os.set_blocking(sock.fileno(), True)
    ep = select.epoll()
    ep.register(sock, select.EPOLLIN | select.EPOLLRDHUP)
    seen = []

    def wait_epoll():
        seen.append(ep.poll())

    def wait_poll():
        p = select.poll()
        p.register(sock, select.POLLIN)
        seen.append(p.poll())

    threads = [threading.Thread(target=f) for f in (wait_epoll, wait_poll)]
    for t in threads:
        t.start()
    mark("waiting")
    check_end(sock, b"")
    for t in threads:
        t.join()
    assert all(seen) and len(seen) == 2, seen


heirkilled_client = killedwaiting_client


# ---- hand-over --------------------------------------------------------------------------------

def bare_environment():
    return {k: v for k, v in os.environ.items() if not k.startswith(("LD_PRELOAD", "UNDERPASS"))}


STRANGER = "import os\nfd, n = int(os.sys.argv[1]), int(os.sys.argv[2])\n" \
    "while n:\n    b = os.read(fd, min(n, 65536))\n    assert b, n\n    n -= len(b)\n" \
    "    while b: b = b[os.write(fd, b):]\n"


def stranger(fd, n):
    return [sys.executable, "-c", STRANGER, str(fd), str(n)]


def exec_server(sock):
    """Becomes another program, which does not have the shim, on the same connection, with bytes
    unread."""
    same(exactly(sock, 10), NOISE[:10])
    os.set_inheritable(sock.fileno(), True)
    print("result ok", flush=True)
    args = stranger(sock.fileno(), 600_000)
    os.execve(args[0], args, bare_environment())


def spawn_server(sock):
    """Starts a program that inherits the connection."""
    same(exactly(sock, 10), NOISE[:10])
    child = subprocess.Popen(stranger(sock.fileno(), 600_000), env=bare_environment(), pass_fds=[sock.fileno()])
    sock.close()
    assert child.wait() == 0


def inetd_server(sock):
    """As inetd does: the connection becomes standard input and output of a program."""
    same(exactly(sock, 10), NOISE[:10])
    child = subprocess.Popen(["/usr/bin/cat"], env=bare_environment(), stdin=sock, stdout=sock)
    sock.close()
    assert child.wait() == 0


def rights_server(sock):
    """Hands the connection to a process without the shim over a Unix socket."""
    same(exactly(sock, 10), NOISE[:10])
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
    program = "import array, os, socket\ns = socket.socket(fileno=int(os.sys.argv[1]))\n" \
        "m, fds, _, _ = socket.recv_fds(s, 10, 1)\nos.sys.argv[1] = str(fds[0])\n" + STRANGER
    child = subprocess.Popen([sys.executable, "-c", program, str(theirs.fileno()), "600000"],
                             env=bare_environment(), pass_fds=[theirs.fileno()])
    theirs.close()
    socket.send_fds(ours, [b"take it"], [sock.fileno()])
    sock.close()
    assert child.wait() == 0


def handover_client(sock):
    # The first bytes after the ten lie unread when the server lets go.
    sock.sendall(NOISE[:10] + NOISE[20:20_020])
    same(exactly(sock, 20_000), NOISE[20:20_020])
    for i in range(58):
        ask(sock, NOISE[i:i + 10_000])


exec_client = spawn_client = inetd_client = rights_client = handover_client


def bothfork_server(sock):
    """After a fork parent and child both use the connection, one after the other."""
    pid = os.fork()
    if pid == 0:
        echo(sock, 50_000)
        os._exit(0)
    assert os.waitpid(pid, 0)[1] == 0
    echo(sock, 50_000)


def bothfork_client(sock):
    for i in range(10):
        ask(sock, NOISE[i:i + 10_000])


def daemonize_server(sock):
    """The parent ends at once, and the child goes on."""
    if os.fork():
        print("result ok", flush=True)  # the client judges the child
        os._exit(0)
    echo(sock, 100_000)


daemonize_client = bothfork_client


def reinit_server(sock):
    """A child makes its own epoll set of what it has inherited (libevent's event_reinit does), and only
    looks on; the parent goes on with its own."""
    def watch():
        ep = select.epoll()
        ep.register(sock.fileno(), select.EPOLLIN | select.EPOLLET)
        return ep

    ours = watch()
    pid = os.fork()
    if pid == 0:
        theirs = watch()
        mark("watching")
        while not marked("over"):
            theirs.poll(0.01)
        os._exit(0)
    await_mark("watching")
    for _ in range(2000):
        while not ours.poll(10):
            raise TimeoutError("nobody woke us")
        sock.sendall(exactly(sock, 100))
    mark("over")
    assert os.waitpid(pid, 0)[1] == 0


def reinit_client(sock):
    await_mark("watching")
    for i in range(2000):
        sock.sendall(NOISE[i:i + 100])
        same(exactly(sock, 100), NOISE[i:i + 100])
        time.sleep(0.001)  # both are asleep when the next one comes


# ---- calls that Python makes otherwise ----------------------------------------------------------

def libc():
    import ctypes
    return ctypes.CDLL(None, use_errno=True)


SHORT = 2_000_000  # more than any ring holds


def etshort_server(sock):
    """An edge-triggered reader that takes a short count for "nothing more": tokio, nginx, Asio."""
    sock.setblocking(False)
    ep = select.epoll()
    ep.register(sock.fileno(), select.EPOLLIN | select.EPOLLET)
    mark("watching")
    got = 0
    while got < 5 * SHORT:
        assert ep.poll(10), f"no news after {got} bytes"
        # Busy with something else: the ring is full, and more than it holds comes on TCP. The news of
        # both are told before anything is read.
        time.sleep(0.05)
        ep.poll(0)
        while True:
            try:
                n = len(sock.recv(5000))
            except BlockingIOError:
                break
            got += n
            if n < 5000:
                break
        if got % SHORT == 0:
            sock.setblocking(True)
            sock.sendall(b"n")
            sock.setblocking(False)


def etshort_client(sock):
    await_mark("watching")
    for _ in range(5):
        sock.sendall(NOISE[:SHORT])
        same(exactly(sock, 1), b"n")


def resetseen_server(sock):
    sock.sendall(b"here")
    await_mark("asked")
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    sock.close()
    mark("reset")
    return socket.socket()


def resetseen_client(sock):
    """Whoever polls sees the error, and the next send tells it, without a signal."""
    import ctypes
    import signal
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)
    same(exactly(sock, 4), b"here")
    mark("asked")
    await_mark("reset")
    p = select.poll()
    p.register(sock, select.POLLIN | select.POLLOUT)
    ((_, seen),) = p.poll(5000)
    while not seen & select.POLLERR:
        assert seen & (select.POLLIN | select.POLLHUP) == 0, seen
        ((_, seen),) = p.poll(5000)
    c = libc()
    assert c.send(sock.fileno(), b"x", 1, 0) == -1
    assert ctypes.get_errno() == errno.ECONNRESET, ctypes.get_errno()


def resetafter_server(sock):
    """Bytes and a reset that epoll tells together: first the bytes, then the error, no end of file."""
    ep = select.epoll()
    ep.register(sock.fileno(), select.EPOLLIN)
    await_mark("reset")
    assert ep.poll(5)
    same(sock.recv(65536), NOISE[:10])
    try:
        raise AssertionError(f"no error, but {sock.recv(65536)}")
    except ConnectionResetError:
        pass


def resetafter_client(sock):
    sock.sendall(NOISE[:10])
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    sock.close()
    mark("reset")
    return socket.socket()


def peeks_server(sock):
    """Peeks grow with what comes, across the switch and with MSG_WAITALL."""
    sock.sendall(b"go")
    for n in range(1, 9):
        while len(sock.recv(8, socket.MSG_PEEK)) < n:
            time.sleep(0.001)
        mark(f"peeked{n}")
    same(exactly(sock, 8), NOISE[:8])
    mark("all")
    same(sock.recv(8, socket.MSG_PEEK | socket.MSG_WAITALL), NOISE[8:16])
    same(exactly(sock, 8), NOISE[8:16])


def peeks_client(sock):
    same(exactly(sock, 2), b"go")
    for n in range(1, 9):
        sock.sendall(NOISE[n - 1:n])
        await_mark(f"peeked{n}")
    await_mark("all")
    sock.sendall(NOISE[8:11])
    time.sleep(0.1)  # the peek has found a part; right without
    sock.sendall(NOISE[11:16])


def atfork_server(sock):
    """A handler of pthread_atfork closes the connection in the child, whose next file gets its number."""
    import ctypes
    fd = sock.fileno()
    handler = ctypes.CFUNCTYPE(None)(lambda: os.close(fd) and None)
    libc().__register_atfork(None, None, handler, None)
    pid = os.fork()
    if pid == 0:
        name = os.path.join(DIR, "file")
        f = 0
        while f < fd:
            f = os.open(name, os.O_CREAT | os.O_RDWR)
        assert f == fd, (f, fd)
        assert os.write(f, b"a file") == 6 and os.pread(f, 10, 0) == b"a file"
        os._exit(0)
    assert os.waitpid(pid, 0)[1] == 0
    echo(sock, 100_000)


atfork_client = bothfork_client


def restart_server(sock):
    await_mark("sent")
    while len(sock.recv(65536)):
        pass


def restart_client(sock):
    """A blocked send goes on after signals whose handlers want that (SA_RESTART)."""
    import ctypes
    import signal
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # Python's own does not want it
    signal.signal(signal.SIGALRM, lambda *_: None)
    signal.siginterrupt(signal.SIGALRM, False)
    threading.Thread(target=lambda: (time.sleep(0.5), mark("sent"))).start()
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGALRM])
    signal.setitimer(signal.ITIMER_REAL, 0.002, 0.002)
    c, sent = libc(), 0
    while sent < 16 << 20:
        n = c.send(sock.fileno(), NOISE[:1 << 16], 1 << 16, 0)
        # The kernel restarts, or ends with what it has; it does not say EINTR.
        assert n > 0, os.strerror(ctypes.get_errno())
        sent += n
    signal.setitimer(signal.ITIMER_REAL, 0)


def stdio_server(sock):
    """The C library's streams on a connection that has become descriptor 0."""
    import ctypes
    os.dup2(sock.fileno(), 0)
    mark("stdio")
    c = libc()
    c.fgets.restype = ctypes.c_void_p
    stdin = ctypes.c_void_p.in_dll(c, "stdin")
    buf = ctypes.create_string_buffer(100)
    for i in range(50):
        assert c.fgets(buf, 100, stdin) and buf.value == b"line %d\n" % i, buf.value
        sock.sendall(buf.value)


def stdio_client(sock):
    await_mark("stdio")
    for i in range(50):
        line = b"line %d\n" % i
        sock.sendall(line)
        same(exactly(sock, len(line)), line)


# ---- main -------------------------------------------------------------------------------------

def main():
    family = socket.AF_INET6 if ":" in HOST else socket.AF_INET
    if ROLE == "serve":
        listener = socket.create_server((HOST, 0), family=family)
        print("port", listener.getsockname()[1], flush=True)
        sock, _ = listener.accept()
        listener.close()
        warm_up(sock)
        sock = globals()[CASE + "_server"](sock) or sock
    else:
        sock = socket.create_connection((HOST, int(sys.argv[4])))
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        warm_up(sock)
        sock = globals()[CASE + "_client"](sock) or sock
    sock.close()
    print("result ok", flush=True)


main()
