"""Random operations on descriptors of connections; what every call says, and every byte, goes to a file.

    table_model.py FIRST COUNT OUT     seeds FIRST to FIRST+COUNT-1, one transcript in OUT
    table_model.py remote              the other end of some connections: asleep in a read but for what it is told

Four connections have both ends here. Three more lead to other processes, one of them without the shim, all of
them asleep; now and then one is stopped for a while, or killed.

The same seed does the same bare and under the shim, so that the transcripts must be equal. An operation is
chosen only where the kernel's answer does not depend on time. Left out, by name:
  - send after the peer's last close, SHUT_RD: the kernel's answer depends on what has arrived (own tests)
  - spawn, SCM_RIGHTS, last close beside another process, of an end with unread bytes; exec in a forked child:
    leaving a lane needs the peer, which is asleep
  - the end of a connection whose last holder exits without close(), with unread bytes: end of file instead of
    a reset (deviation j)
  - the error of a connection that was reset and then leaves its lane: the frame meets it, and it is lost
  - the end of a connection that has left its lane and whose peer is killed in its sleep: it has not read the
    frame, so that its kernel answers with a reset
"""
import array
import ctypes
import errno
import os
import random
import select
import signal
import socket
import struct
import subprocess
import sys
import threading
import time

LIBC = ctypes.CDLL(None, use_errno=True)
LIBC.syscall.restype = ctypes.c_long
NR = {"x86_64": {"read": 0, "write": 1, "close": 3, "dup": 32, "dup2": 33, "dup3": 292, "fcntl": 72, "shutdown": 48,
                 "sendto": 44, "recvfrom": 45, "close_range": 436}}[os.uname().machine]
MOST = 20_000  # bytes under way to one end: less than any buffer holds
CAT = "/bin/cat"


def told(r):
    return r if r >= 0 else "-" + errno.errorcode[ctypes.get_errno()]


def call(name, number, *args):
    """A C function by name, or the system call by number."""
    ctypes.set_errno(0)
    if number and name in NR:
        return told(LIBC.syscall(ctypes.c_long(NR[name]), *[ctypes.c_long(a) if isinstance(a, int) else a for a in args]))
    return told(getattr(LIBC, name)(*args))


class End:
    def __init__(self, name, fd):
        self.name, self.fds, self.peer = name, [fd], None
        self.unread = bytearray()  # sent by the peer, not yet received
        self.elsewhere = 0         # processes that hold it besides us
        self.shut = self.gone = self.reset = self.vague = self.left = False

    def close_one(self, fd):
        self.fds.remove(fd)
        self.check()

    def check(self):
        if not self.fds and not self.elsewhere and not self.gone:
            self.gone = True
            self.peer.reset |= bool(self.unread)


class Remote:
    """A process with one end. What it is told, it does; else it sleeps in a read that is no connection's."""

    def __init__(self, name, bare):
        self.name = name
        env = {k: v for k, v in os.environ.items() if not bare or k != "LD_PRELOAD"}
        self.process = subprocess.Popen([sys.executable, __file__, "remote"], env=env, text=True,
                                        stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        self.bare, self.killed = bare, False

    def connected(self, port):
        """A new connection; our end of it is to be accepted."""
        self.tell("connect", port)
        self.fds, self.peer = [], None
        self.unread, self.elsewhere = bytearray(), 0
        self.shut = self.gone = self.reset = self.vague = self.stopped = False

    def tell(self, *words):
        self.process.stdin.write(" ".join(map(str, words)) + "\n")
        self.process.stdin.flush()
        return self.process.stdout.readline().strip()

    def stop(self):
        self.process.send_signal(signal.SIGSTOP)
        os.waitid(os.P_PID, self.process.pid, os.WSTOPPED | os.WNOWAIT)
        self.stopped = True

    def go_on(self):
        if self.stopped:
            self.process.send_signal(signal.SIGCONT)
        self.stopped = False

    def kill(self):
        self.process.kill()
        self.process.wait()
        for pipe in (self.process.stdin, self.process.stdout):
            pipe.close()
        self.killed = self.gone = True


def remote():
    """The process of a Remote."""
    signal.signal(signal.SIGPIPE, signal.SIG_IGN)
    s = None
    for line in sys.stdin:
        what, *args = line.split()
        try:
            if what == "connect":
                s = socket.create_connection(("127.0.0.1", int(args[0])))
                s.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                got = "connected"
            elif what == "send":
                got = s.send(bytes.fromhex(args[0]), socket.MSG_NOSIGNAL)
            elif what == "receive":
                all_ = bytearray()
                while len(all_) < int(args[0]):
                    part = s.recv(int(args[0]) - len(all_))
                    if not part:
                        break
                    all_ += part
                got = all_.hex() or "end"
            elif what == "shutdown":
                got = s.shutdown(socket.SHUT_WR)
            else:
                got = s.close()
        except OSError as e:
            got = errno.errorcode[e.errno]
        print(got, flush=True)


class Model:
    def __init__(self, seed, out, remotes):
        self.r, self.out, self.n = random.Random(seed), out, 0
        self.files, self.holders = {}, []
        self.say(f"seed {seed}")
        listener = socket.create_server(("127.0.0.1", 0))
        self.ends = []
        for k in range(4):
            a = socket.create_connection(listener.getsockname())
            b, _ = listener.accept()
            for s in (a, b):
                s.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            pair = [End(f"{k}a", a.detach()), End(f"{k}b", b.detach())]
            pair[0].peer, pair[1].peer = pair[1], pair[0]
            self.ends += pair
        here = list(self.ends)
        self.remotes = remotes
        for r in remotes:
            r.connected(listener.getsockname()[1])
            s, _ = listener.accept()
            s.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            e = End("to " + r.name, s.detach())
            e.peer, r.peer = r, e
            self.ends.append(e)
        listener.close()
        for _ in range(12):
            for e in here:
                self.send(e, e.fds[0], 50, "send", False)
                self.receive(e.peer, e.peer.fds[0], 50, "recv", False)
            for r in remotes:
                self.remote_sends(r, 50)
                self.send(r.peer, r.peer.fds[0], 50, "send", False)
                self.receive(r.peer, r.peer.fds[0], 50, "recv", False)
                self.remote_receives(r, 50)
            time.sleep(0.001)
        # A handler of the system's own kind: Python's wait until the call they interrupt is over.
        self.in_handler, self.broken = None, None
        self.handler = ctypes.CFUNCTYPE(None, ctypes.c_int)(self.handle)
        LIBC.signal(signal.SIGUSR1, self.handler)

    def say(self, *words):
        print(*words, file=self.out)

    def noise(self, n):
        return self.r.randbytes(n)

    # ---- bytes ----

    def send(self, e, fd, n, how, number):
        data = self.noise(n)
        buf = (ctypes.c_char * max(n, 1)).from_buffer_copy(data or b"x")
        size = ctypes.c_size_t(n)
        if how == "write":
            got = call("write", number, fd, buf, size)
        elif number:
            got = call("sendto", True, fd, buf, size, socket.MSG_NOSIGNAL, None, 0)
        else:
            got = call("send", False, fd, buf, size, socket.MSG_NOSIGNAL)
        self.say(e.name, how, fd, n, got)
        if got == n:
            e.peer.unread += data

    def receive(self, e, fd, n, how, number):
        """Exactly min(n, what is under way) bytes; at the end, what the end is."""
        ending = e.peer.gone or e.peer.shut
        want = min(n, len(e.unread))
        if e.reset and not e.vague:  # the reset has arrived
            p = select.poll()
            p.register(fd, 0)
            p.poll(5000)
        got = bytearray()
        buf = (ctypes.c_char * max(want, 1))()
        last = None
        while len(got) < want:
            flags = 0
            size = ctypes.c_size_t(want - len(got))
            if how == "read":
                last = call("read", number, fd, buf, size)
            elif number:
                last = call("recvfrom", True, fd, buf, size, flags, None, None)
            else:
                last = call("recv", False, fd, buf, size, flags)
            if not isinstance(last, int) or last == 0:
                break
            got += buf.raw[:last]
        same = bytes(got) == bytes(e.unread[:len(got)])
        del e.unread[:len(got)]
        self.say(e.name, how, fd, n, "->", len(got), same, last if len(got) < want else "")
        if len(got) == want and n > want and not e.vague:
            flags = 0 if ending else socket.MSG_DONTWAIT
            self.say("  then", call("recv", False, fd, buf, ctypes.c_size_t(1), flags))

    # ---- operations ----

    def some(self, ends):
        ends = [e for e in ends if e.fds]
        return self.r.choice(ends) if ends else None

    def step(self):
        ops = [self.op_send] * 6 + [self.op_receive] * 6 + [self.op_dup] * 3 + [self.op_dup_onto] * 2 + \
              [self.op_close] * 2 + [self.op_range, self.op_shutdown, self.op_file, self.op_fork, self.op_holder_ends,
               self.op_rights, self.op_thread, self.op_hold, self.op_wrong] + [self.op_remote] * 4 + [self.op_handler] * 2
        self.r.choice(ops)()
        if self.broken:
            raise self.broken

    def by_number(self):
        return self.r.random() < 0.3

    def op_send(self):
        e = self.some([e for e in self.ends if not e.peer.gone and len(e.peer.unread) < MOST])
        if e:
            n = self.r.choice([0, 1, 7, 100, 3000])
            self.send(e, self.r.choice(e.fds), n, self.r.choice(["send", "write"]), self.by_number())

    def op_receive(self):
        e = self.some(self.ends)
        if e:
            n = self.r.choice([1, 10, 500, 30_000])
            self.receive(e, self.r.choice(e.fds), n, self.r.choice(["recv", "read"]), self.by_number())

    def op_thread(self):
        """The same from another thread."""
        op = self.r.choice([self.op_send, self.op_receive, self.op_dup, self.op_close])
        t = threading.Thread(target=op)
        t.start()
        t.join()

    def handle(self, _):
        try:
            self.in_handler()
        except BaseException as e:
            self.broken = e

    def op_handler(self):
        """The same from a signal handler, which interrupts a call that is none of a connection's, or a wait for
        one that has nothing to read. (It may close that very connection.)"""
        self.in_handler = self.r.choice([self.op_send, self.op_receive, self.op_dup, self.op_close, self.op_shutdown,
                                         self.op_range, self.op_dup_onto])
        quiet = [e for e in self.ends if not e.unread and not e.reset and not e.vague and not e.peer.gone
                 and not e.peer.shut and not e.shut]
        e = self.some(quiet)
        how = self.r.choice(["raise", "ppoll", "epoll_pwait"])
        if how == "raise" or not e:
            return self.say("handler in raise", getattr(LIBC, "raise")(signal.SIGUSR1))
        fd = self.r.choice(e.fds)
        none = (ctypes.c_char * 128)()  # an empty set of signals
        signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGUSR1])
        getattr(LIBC, "raise")(signal.SIGUSR1)
        if how == "ppoll":
            wanted = (ctypes.c_char * 8).from_buffer_copy(struct.pack("ihh", fd, select.POLLIN, 0))
            got = call("ppoll", False, wanted, ctypes.c_ulong(1), None, none)
        else:
            with select.epoll() as ep:
                ep.register(fd, select.EPOLLIN)
                events = (ctypes.c_char * 24)()
                got = call("epoll_pwait", False, ep.fileno(), events, 1, -1, none)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGUSR1])
        self.say("handler in", how, e.name, got)

    # ---- ends of other processes ----

    def remote_sends(self, r, n):
        data = self.noise(n)
        got = r.tell("send", data.hex())
        self.say(r.name, "sends", n, got)
        if got == str(n):
            r.peer.unread += data

    def remote_receives(self, r, n):
        want = min(n, len(r.unread))
        if want:
            got = r.tell("receive", want)
            self.say(r.name, "receives", want, got == r.unread[:want].hex() or got)
            del r.unread[:want]

    def op_remote(self):
        """It moves bytes, ends, is stopped or goes on. It is not told anything while it is stopped."""
        alive = [r for r in self.remotes if not r.gone]
        if not alive:
            return
        r = self.r.choice(alive)
        if r.stopped:
            r.go_on()
            return self.say(r.name, "goes on")
        what = self.r.choice(["send", "send", "receive", "receive", "stop", "stop", "shutdown", "close", "kill"])
        if what == "send" and not r.peer.gone and not r.shut and len(r.peer.unread) < MOST:
            self.remote_sends(r, self.r.choice([1, 100, 3000]))
        elif what == "receive":
            self.remote_receives(r, self.r.choice([1, 500, 30_000]))
        elif what == "stop":
            r.stop()
            self.say(r.name, "is stopped")
        elif what == "shutdown" and not r.peer.gone and not r.shut:
            self.say(r.name, "shutdown", r.tell("shutdown"))
            r.shut = True
        elif what == "close" and self.r.random() < 0.3:
            self.say(r.name, "close", r.tell("close"))
            r.gone = True
            r.peer.reset |= bool(r.unread)
        elif what == "kill" and self.r.random() < 0.3:
            r.kill()
            self.say(r.name, "is killed")
            r.peer.vague |= bool(r.unread) or r.peer.left

    def op_dup(self):
        e = self.some(self.ends)
        if not e or len(e.fds) > 4:
            return
        fd, number = self.r.choice(e.fds), self.by_number()
        if self.r.random() < 0.5:
            new = call("dup", number, fd)
        else:
            new = call("fcntl", number, fd, self.r.choice([0, 1030]), self.r.choice([0, 60, 150]))  # F_DUPFD*
        self.say(e.name, "dup", fd, new)
        if isinstance(new, int):
            e.fds.append(new)

    def owner(self, fd):
        return next((e for e in self.ends if fd in e.fds), None)

    def not_yet(self, fds):
        """Would an end with unread bytes be left to another process by closing these?"""
        return any(e.elsewhere and e.unread and e.fds and not set(e.fds) - set(fds) for e in self.ends)

    def close_means(self, fd):
        e = self.owner(fd)
        if e:
            e.close_one(fd)
        self.files.pop(fd, None)

    def op_dup_onto(self):
        """Over a free number, another descriptor, a file, or itself."""
        e = self.some(self.ends)
        if not e or len(e.fds) > 4:
            return
        fd = self.r.choice(e.fds)
        all_fds = [f for x in self.ends for f in x.fds] + list(self.files)
        to = self.r.choice([120, 121, self.r.choice(all_fds)])
        number = self.by_number()
        if self.not_yet([to]):
            return
        if self.r.random() < 0.5:
            got = call("dup2", number, fd, to)
        else:
            got = call("dup3", number, fd, to, self.r.choice([0, os.O_CLOEXEC]))
        self.say(e.name, "onto", fd, to, got)
        if isinstance(got, int) and fd != to:
            self.close_means(to)
            e.fds.append(to)

    def op_close(self):
        e = self.some(self.ends)
        if e:
            fd = self.r.choice(e.fds)
            if not self.not_yet([fd]):
                self.say(e.name, "close", fd, call("close", self.by_number(), fd))
                e.close_one(fd)

    def op_range(self):
        first = self.r.choice([60, 61, 120, 150])
        last = first + self.r.choice([0, 1, 3])
        if self.not_yet(range(first, last + 1)):
            return
        self.say("range", first, last, call("close_range", self.by_number(), first, last, 0))
        for fd in range(first, last + 1):
            self.close_means(fd)

    def op_shutdown(self):
        e = self.some([e for e in self.ends if not e.peer.gone])
        if e and self.r.random() < 0.5:
            self.say(e.name, "shutdown", call("shutdown", self.by_number(), self.r.choice(e.fds), socket.SHUT_WR))
            e.shut = True

    def op_file(self):
        """A file at the number of a descriptor, or anywhere; it is written to."""
        if len(self.files) < 4:
            fd = os.open("/tmp", os.O_TMPFILE | os.O_RDWR)
            e = self.some(self.ends)
            if e and self.r.random() < 0.5:
                to = self.r.choice(e.fds)
                if self.not_yet([to]):
                    return os.close(fd)
                self.say("file onto", fd, to, call("dup2", self.by_number(), fd, to))
                self.close_means(to)
                os.close(fd)
                fd = to
            self.files[fd] = b""
        fd = self.r.choice(list(self.files))
        data = self.noise(9)
        buf = (ctypes.c_char * 9).from_buffer_copy(data)
        self.say("file", fd, call("write", self.by_number(), fd, buf, ctypes.c_size_t(9)))
        self.files[fd] += data
        self.say("  has", os.pread(fd, 10_000, 0) == self.files[fd])

    def op_fork(self):
        """A child that holds everything for a while, and may close or use an end itself."""
        if len(self.holders) > 1:
            return
        what = self.r.choice(["hold", "hold", "send", "receive"])
        e = self.some([e for e in self.ends if not e.peer.gone and not e.shut and len(e.peer.unread) < MOST])
        data = self.noise(40)
        r, w = os.pipe()
        back, theirs = os.pipe()
        pid = os.fork()
        if pid == 0:
            got = "nothing"
            if what == "send" and e:
                buf = (ctypes.c_char * 40).from_buffer_copy(data)
                got = call("send", False, e.fds[0], buf, ctypes.c_size_t(40), 0)
            elif what == "receive" and e and e.unread:
                buf = (ctypes.c_char * 1)()
                got = call("recv", False, e.fds[0], buf, ctypes.c_size_t(1), 0)
                got = (got, buf.raw[:1] == e.unread[:1])
            os.write(theirs, repr(got).encode())
            for fd in [w] + [x for (_, x), _ in self.holders]:
                os.close(fd)
            os.read(r, 1)
            os._exit(0)
        os.close(r)
        os.close(theirs)
        got = os.read(back, 100).decode()
        os.close(back)
        self.say("fork", what, got)
        if what == "send" and e and got == "40":
            e.peer.unread += data
        elif what == "receive" and e and e.unread:
            del e.unread[:1]
        self.keep((pid, w), [x for x in self.ends if x.fds])

    def keep(self, child, ends):
        for e in ends:
            e.elsewhere += 1
        self.holders.append((child, ends))

    def leaves(self):
        for e in self.ends:
            e.vague |= e.reset
            e.left = True

    def op_hold(self):
        """Another program that has one end, by vfork and exec, or by posix_spawn."""
        if len(self.holders) > 1:
            return
        e = self.some([e for e in self.ends if not e.unread and not e.peer.unread])
        if not e:
            return
        left = [x for x in self.ends if any(os.get_inheritable(f) for f in x.fds)]
        if any(x.unread for x in left):
            return
        self.leaves()
        how = self.r.choice(["spawn", "vfork"])
        fd = self.r.choice(e.fds)
        r, w = os.pipe()
        if how == "spawn":
            actions = [(os.POSIX_SPAWN_DUP2, r, 0), (os.POSIX_SPAWN_DUP2, fd, 50), (os.POSIX_SPAWN_CLOSE, w)]
            pid = os.posix_spawn(CAT, [CAT], os.environ, file_actions=actions)
        else:
            pid = subprocess.Popen([CAT], stdin=r, stdout=fd).pid
        os.close(r)
        self.say("hold", how, e.name)
        # Whoever is not closed on exec is held, too.
        held = [x for x in self.ends if x is e or how == "spawn" and x in left]
        self.keep((pid, w), held)

    def op_holder_ends(self):
        if self.holders:
            (pid, w), ends = self.holders.pop(self.r.randrange(len(self.holders)))
            os.close(w)
            os.waitpid(pid, 0)
            self.say("holder ends")
            for e in ends:
                e.elsewhere -= 1
                e.check()
                e.peer.vague |= e.gone and bool(e.unread)

    def op_rights(self):
        """To ourselves: another number of the same connection, which the shim does not know."""
        e = self.some([e for e in self.ends if not e.unread and not e.peer.unread and len(e.fds) < 4])
        if not e:
            return
        self.leaves()
        a, b = socket.socketpair()
        with a, b:
            a.sendmsg([b"x"], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [e.fds[0]]))])
            _, control, _, _ = b.recvmsg(1, socket.CMSG_SPACE(4))
        fd = struct.unpack("i", control[0][2][:4])[0]
        self.say(e.name, "rights", fd)
        e.fds.append(fd)

    def op_wrong(self):
        """Numbers that nobody has, and calls that are refused."""
        buf = (ctypes.c_char * 1)()
        name = self.r.choice(["close", "dup", "shutdown", "recv", "dup3"])
        args = {"close": (199,), "dup": (199,), "shutdown": (199, 1),
                "recv": (199, buf, ctypes.c_size_t(1), 0), "dup3": (199, 198, 0)}[name]
        self.say("wrong", name, call(name, self.by_number(), *args))

    def finish(self):
        """Everything that is under way arrives, and then the end."""
        while self.holders:
            self.op_holder_ends()
        for e in self.ends:
            if e.fds and e.unread:
                self.receive(e, e.fds[0], len(e.unread), "recv", False)
        for e in self.ends:
            for fd in list(e.fds):
                self.say(e.name, "close", fd, call("close", False, fd))
                e.close_one(fd)
            if e.peer.fds and not e.peer.reset:
                self.receive(e.peer, e.peer.fds[0], 1, "recv", False)
        for fd in list(self.files):
            os.close(fd)
        for r in self.remotes:
            r.go_on()
            if not r.gone:
                if not r.reset:
                    self.remote_receives(r, len(r.unread))
                self.say(r.name, "close", r.tell("close"))


def main():
    if sys.argv[1:] == ["remote"]:
        return remote()
    first, count, out = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
    signal.signal(signal.SIGPIPE, signal.SIG_IGN)
    steps = int(os.environ.get("STEPS", "60"))
    names = [("remote", False), ("other", False), ("bare", True)]
    remotes = [Remote(*n) for n in names]
    with open(out, "w") as f:
        for seed in range(first, first + count):
            remotes = [Remote(r.name, r.bare) if r.killed else r for r in remotes]
            m = Model(seed, f, remotes)
            for _ in range(steps):
                m.step()
                f.flush()
            m.finish()
    for r in remotes:
        r.process.stdin.close()
        r.process.wait()
    print("result ok", flush=True)


main()
