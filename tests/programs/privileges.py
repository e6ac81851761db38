"""Two ends of one connection, the server's process with children that give up what they have inherited, or their
user. What they gave up they have no more: neither in memory, nor by a descriptor. As root.

    privileges.py CASE serve HOST DIR        prints "port N"
    privileges.py CASE connect HOST PORT DIR

Conventions as in `edges.py`. The case says what the child does: WAY_ORDER, where the way is how the user changes
(`name`: by the C library's function, `number`: by number, `thread`: by a thread of two, `chroot`: in an empty
root directory, `none`: not at all), and the order is

    first   changes its user, closes everything, and looks
    last    closes everything, changes its user, and looks
    keeps   changes its user, and goes on with the connection, which its parent closes
    early   the same, but the parent closes only when the user is another
    with    changes its user, and both processes go on with the connection
    own     has made a connection of its own when it changes its user, and goes on with it
    listen  changes its user, and accepts connections on the inherited listener
    killed  again and again a child is killed while it changes its user
"""
import ctypes
import os
import random
import resource
import select
import signal
import socket
import struct
import sys
import tempfile
import threading
import time

from ends import await_mark, exactly, mark, marked

CASE, ROLE, HOST = sys.argv[1:4]
WAY, ORDER = CASE.split("_")
LIBC = ctypes.CDLL(None, use_errno=True)
NOBODY = 65534
SETGROUPS, SETRESGID, SETRESUID = 116, 119, 117
LIMIT = 60


def equal(got, expected, what=""):
    assert got == expected, f"{what}: {got}, not {expected}"


def ping(sock, last=False):
    sock.sendall(struct.pack("!?63x", last))
    equal(exactly(sock, 64)[0], last, "echo")


def echo(sock):
    message = exactly(sock, 64)
    sock.sendall(message)
    return message[0]


def warm_up(sock):
    last = False
    while not last:
        if ROLE == "connect":
            last = marked("warm")
            ping(sock, last)
        else:
            last = echo(sock)


# ---- the child ---------------------------------------------------------------------------------

def by_name():
    os.setgroups([])
    os.setgid(NOBODY)
    os.setuid(NOBODY)


def by_number():
    words = [ctypes.c_long(NOBODY)] * 3
    equal(LIBC.syscall(ctypes.c_long(SETGROUPS), ctypes.c_long(0), None), 0)
    equal(LIBC.syscall(ctypes.c_long(SETRESGID), *words), 0)
    equal(LIBC.syscall(ctypes.c_long(SETRESUID), *words), 0)


def change_user():
    """To nobody. Afterwards what worked works, and what failed fails as the kernel says."""
    if WAY == "none":
        return
    if WAY == "chroot":
        os.chroot(tempfile.mkdtemp(dir=sys.argv[-1]))
    if WAY == "number":
        by_number()
    elif WAY == "thread":
        t = threading.Thread(target=by_name)
        t.start()
        t.join()
    else:
        by_name()
    equal((os.getresuid(), os.getresgid()), ((NOBODY,) * 3,) * 2, "user")
    try:
        os.setuid(0)
        raise AssertionError("root again")
    except PermissionError:
        pass
    ctypes.set_errno(77)
    equal((LIBC.setfsuid(-1), ctypes.get_errno()), (NOBODY, 77), "setfsuid")


# Descriptors opened while there still is a /proc, and one of the parent's.
MAPS, FDS, READY = 3900, 3901, 3902


def shared_memory():
    """What this process has mapped together with others, and may read."""
    os.lseek(MAPS, 0, os.SEEK_SET)
    for line in open(MAPS, closefd=False).read().splitlines():
        place, rights, _, _, _, *name = line.split()
        if rights[0] == "r" and rights[3] == "s":
            start, end = (int(w, 16) for w in place.split("-"))
            yield " ".join(name), ctypes.string_at(start, end - start)


def finds(secret, port):
    """Where this process can see what its parent has got, or the entry of its connection."""
    entry = struct.pack("=II", socket.AF_INET, port)
    return [name for name, memory in shared_memory() if secret in memory or entry in memory]


def look(news, port):
    secret = bytes(b ^ 0xff for b in os.read(news, 64))
    found = finds(secret, port)
    found += [name for name, _ in shared_memory() if "underpass" in name]
    for fd in os.listdir(FDS):
        try:
            name = os.readlink(fd, dir_fd=FDS)
        except OSError:
            continue
        if "memfd" in name or "eventpoll" in name:
            found.append(name)
    assert not found, f"the child sees {found}"


def child(job):
    pid = os.fork()
    if pid == 0:
        code = 99
        try:
            os.dup2(os.open("/proc/self/maps", os.O_RDONLY), MAPS)
            os.dup2(os.open("/proc/self/fd", os.O_RDONLY), FDS)
            job()
            code = 0
        except BaseException as e:
            print(f"child: {e!r}", file=sys.stderr, flush=True)
        finally:
            os._exit(code)
    return pid


def ended(pid):
    equal(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), 0, "child")


# ---- servers -----------------------------------------------------------------------------------

def looks(sock, listener):
    """The child gives up everything, and looks for what its parent gets afterwards."""
    news, tell = os.pipe()
    ready, closed = os.pipe()
    port = sock.getpeername()[1]

    def job():
        if ORDER == "first":
            change_user()
        os.dup2(closed, READY)
        os.closerange(3, news)
        os.closerange(news + 1, MAPS)
        os.closerange(READY + 1, 8192)
        if ORDER == "last":
            change_user()
        os.write(READY, b".")
        look(news, port)

    pid = child(job)
    os.close(closed)
    equal(os.read(ready, 1), b".", "word of the child")
    mark("go")
    secret = exactly(sock, 48)
    equal(exactly(sock, 1), b".")
    os.write(tell, bytes(b ^ 0xff for b in secret))
    ended(pid)
    while not echo(sock):
        pass
    mark("over")


def first_client(sock):
    await_mark("go")
    sock.sendall(os.urandom(48))
    sock.sendall(b".")
    for k in range(200):
        ping(sock, k == 199)
    await_mark("over")  # a send that is still under way would meet the close, and count as one that came down


last_client = first_client


def keeps_server(sock, listener):
    """The connection goes on in a child that has another user; its parent closes it."""
    changed, tell = os.pipe()
    closed, told = os.pipe()

    def job():
        if ORDER == "keeps":
            os.read(closed, 1)
        change_user()
        os.write(tell, b".")
        if ORDER == "early":
            os.read(closed, 1)
        while not echo(sock):
            pass
        equal(sock.recv(1), b"")

    pid = child(job)
    if ORDER == "early":
        os.read(changed, 1)
    sock.close()
    os.write(told, b".")
    ended(pid)


def keeps_client(sock):
    for k in range(3000):
        ping(sock, k == 2999)


early_client = keeps_client


def with_server(sock, listener):
    """Both processes use it, in turn."""
    here, there = os.pipe(), os.pipe()

    def turn(wait, go_on):
        last = False
        while not last:
            os.read(wait, 1)
            last = echo(sock)
            os.write(go_on, b".")

    def job():
        change_user()
        turn(there[0], here[1])

    pid = child(job)
    os.write(here[1], b".")
    last = False
    while not last:
        os.read(here[0], 1)
        last = echo(sock)
        os.write(there[1], b".")
    # The last one was for the parent: the client sends one more for the child.
    ended(pid)


def with_client(sock):
    for k in range(1000):
        ping(sock, k >= 998)


def own_server(sock, listener):
    """What a child has made itself goes on when its user changes: the same bytes, on the same lane."""
    def job():
        own, _ = listener.accept()
        for _ in range(1000):
            equal(echo(own), 0)
        mark("before")
        await_mark("on")
        sock.close()
        if WAY == "none":
            listener.close()  # the last that it has inherited
        change_user()
        while not echo(own):
            pass
        equal(own.recv(1), b"")

    pid = child(job)
    sock.close()
    ended(pid)


def own_client(sock):
    own = socket.create_connection((HOST, int(sys.argv[4])))
    own.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    for _ in range(1000):
        ping(own)
    await_mark("before")
    sock.close()
    mark("on")
    for k in range(3000):
        ping(own)
    mark("kept")
    await_mark("looked")
    ping(own, True)


def listen_server(sock, listener):
    """Workers as those of web servers: they inherit the listener, change the user, and accept."""
    def job():
        sock.close()
        change_user()
        for _ in range(8):
            own, _ = listener.accept()
            while not echo(own):
                pass
            equal(own.recv(1), b"")
            own.close()

    pids = [child(job) for _ in range(2)]
    while not echo(sock):
        pass
    for pid in pids:
        ended(pid)


def listen_client(sock):
    for _ in range(16):
        own = socket.create_connection((HOST, int(sys.argv[4])))
        for k in range(1500):
            ping(own, k == 1499)
        ping(sock)
        own.close()
    ping(sock, True)


def killed_server(sock, listener):
    """Wherever a child is killed on its way out, its parent goes on."""
    random.seed(1)
    for k in range(60):
        def job():
            change_user()
            sock.close()
            time.sleep(10)

        pid = child(job)
        end = time.perf_counter() + random.random() * 0.02
        while time.perf_counter() < end:
            select.select([], [], [], 0.0005)
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        equal(echo(sock), k == 59)
    while not echo(sock):
        pass


def killed_client(sock):
    for k in range(60):
        ping(sock, k == 59)
    for k in range(500):
        ping(sock, k == 499)


SERVERS = dict(first=looks, last=looks, keeps=keeps_server, early=keeps_server)
SERVERS["with"] = with_server


def main():
    signal.alarm(LIMIT)
    resource.setrlimit(resource.RLIMIT_NOFILE, (8192, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
    if ROLE == "serve":
        listener = socket.create_server((HOST, 0))
        print("port", listener.getsockname()[1], flush=True)
        sock, _ = listener.accept()
        warm_up(sock)
        (SERVERS.get(ORDER) or globals()[ORDER + "_server"])(sock, listener)
    else:
        sock = socket.create_connection((HOST, int(sys.argv[4])))
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        warm_up(sock)
        globals()[ORDER + "_client"](sock)
    sock.close()
    print("result ok", flush=True)


main()
