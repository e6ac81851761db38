"""What the calls of one end say after the other end did something to the connection: errors, ends, events.

    answers.py run CASES DIR    prints "CASE: answers" for each case, then "result ok"; the other end is a
                                process that this one starts (`answers.py peer`)

Nothing is judged here: the same cases run bare and under the shim, and the lines are compared. Before a case
the ends exchange small messages until DIR/warm-N exists (N: cases so far); a case that begins by going down
writes DIR/down-N and waits for DIR/went-N.
"""
import array
import ctypes
import errno
import fcntl
import os
import select
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import termios
import time

from ends import await_mark, exactly, mark, marked

LIBC = ctypes.CDLL(None, use_errno=True)
TCP_ESTABLISHED, TCP_CLOSE = 1, 7
SIOCOUTQ = 0x5411
LINGER_RESET = struct.pack("ii", 1, 0)
HALF = bytes(range(256)) * 4
EVENTS = {select.POLLIN: "in", select.POLLOUT: "out", select.POLLERR: "err", select.POLLHUP: "hup",
          select.POLLRDHUP: "rdhup", select.POLLPRI: "pri"}


def say(f):
    """A result as text, an error as its name."""
    try:
        return f()
    except OSError as e:
        return errno.errorcode[e.errno]


def state(sock):
    return sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 1)[0]


def await_state(sock, *states):
    """Until the kernel knows what the peer did. (The socket below a lane is the kernel's.)"""
    end = time.monotonic() + 2
    while state(sock) not in states:
        if time.monotonic() > end:
            return f"state {state(sock)}"
        time.sleep(0.001)
    time.sleep(0.02)
    return ""


def have(sock, n):
    """Until so many halves have arrived."""
    end = time.monotonic() + 2
    while unread(sock) < n * len(HALF):
        if time.monotonic() > end:
            return f"{unread(sock)}"
        time.sleep(0.001)
    return ""


CLOSE_WAIT, GONE = 8, TCP_CLOSE


# ---- calls -----------------------------------------------------------------------------------

def poll(sock, mask=select.POLLIN | select.POLLOUT | select.POLLRDHUP):
    p = select.poll()
    p.register(sock, mask)
    got = p.poll(0)
    return "+".join(v for k, v in EVENTS.items() if got and got[0][1] & k) or "none"


def epoll(sock):
    with select.epoll() as e:
        e.register(sock, select.EPOLLIN | select.EPOLLOUT | select.EPOLLRDHUP)
        got = e.poll(0)
    return "+".join(v for k, v in EVENTS.items() if got and got[0][1] & k) or "none"


def level_two(sock):
    """Two looks at one level-triggered registration, with a `poll` between them."""
    with select.epoll() as e:
        e.register(sock, select.EPOLLIN | select.EPOLLOUT | select.EPOLLRDHUP)
        return "/".join([awaited(e.poll(0)), poll(sock), awaited(e.poll(0))])


def selects(sock):
    r, w, x = select.select([sock], [sock], [sock], 0)
    return f"{len(r)}{len(w)}{len(x)}"


def recv(sock, n=1 << 20, flags=0):
    got = sock.recv(n, flags | socket.MSG_DONTWAIT)
    return f"{len(got)}:{sum(got) % 997}"


def rest(sock):
    """Everything up to the end or an error."""
    n = 0
    while True:
        got = sock.recv(1 << 16, socket.MSG_DONTWAIT)
        if not got:
            return f"{n} end"
        n += len(got)


def rest_said(sock):
    n = 0
    while True:
        try:
            got = sock.recv(1 << 16, socket.MSG_DONTWAIT)
        except OSError as e:
            return f"{n} {errno.errorcode[e.errno]}"
        if not got:
            return f"{n} end"
        n += len(got)


def send(sock, data=b"x", flags=socket.MSG_NOSIGNAL):
    return sock.send(data, flags | socket.MSG_DONTWAIT)


def pattern(n):
    return bytes(k * 7 % 251 for k in range(251)) * (n // 251 + 1)


def send_n(sock, n):
    return sock.send(pattern(int(n))[:int(n)], socket.MSG_NOSIGNAL | socket.MSG_DONTWAIT)


def sends(sock, n, size):
    """Messages of that size, so many bytes together: none is sent twice, none cut."""
    data, size = pattern(int(n)), int(size)
    said = {send(sock, data[at:at + size]) for at in range(0, int(n), size)}
    return sorted(said)


def with_timeout(sock, n):
    """As a program whose socket has a time-out (which waits for room before it sends, once)."""
    sock.settimeout(2)
    try:
        return sock.send(pattern(int(n))[:int(n)])
    finally:
        sock.settimeout(None)


def within(sock, n, us):
    """A blocking send that may wait for so many microseconds."""
    seconds, us = divmod(int(us), 1_000_000)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("qq", seconds, us))
    return sock.send(pattern(int(n))[:int(n)])


def writev(sock, n):
    data = pattern(int(n))[:int(n)]
    return os.writev(sock.fileno(), [data[:1000], data[1000:70_000], data[70_000:]])


def sendfile(sock, n):
    with tempfile.TemporaryFile() as f:
        f.write(pattern(int(n))[:int(n)])
        f.flush()
        return os.sendfile(sock.fileno(), f.fileno(), 0, int(n))


def unread(sock):
    n = array.array("i", [0])
    fcntl.ioctl(sock.fileno(), termios.FIONREAD, n)
    return n[0]


def outq(sock):
    n = array.array("i", [0])
    fcntl.ioctl(sock.fileno(), SIOCOUTQ, n)
    return n[0]


def so_error(sock):
    e = sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
    return errno.errorcode.get(e, e)


def awaited(got):
    return "+".join(v for k, v in EVENTS.items() if got and got[0][1] & k) or "none"


def await_poll(sock, mask=select.POLLIN | select.POLLRDHUP):
    p = select.poll()
    p.register(sock, mask)
    return awaited(p.poll(20000))


def await_epoll(sock, mode=0):
    with select.epoll() as e:
        e.register(sock, select.EPOLLIN | select.EPOLLRDHUP | mode)
        return awaited(e.poll(20))


def await_select(sock):
    r, w, x = select.select([sock], [], [sock], 20)
    return f"{len(r)}{len(w)}{len(x)}"


def await_recv(sock, n=1 << 16, flags=0):
    got = sock.recv(n, flags)
    return f"{len(got)}:{sum(got) % 997}"


def spin_recv(sock):
    end = time.monotonic() + 20
    while time.monotonic() < end:
        try:
            return recv(sock)
        except BlockingIOError:
            time.sleep(0.01)
    return "nothing"


def spin_poll(sock):
    end = time.monotonic() + 20
    while time.monotonic() < end and poll(sock, select.POLLIN | select.POLLRDHUP) == "none":
        time.sleep(0.01)
    return poll(sock, select.POLLIN | select.POLLRDHUP)


def sigpipe(sock):
    """Does a plain `write` raise SIGPIPE, and what does it say?"""
    got = []
    old = signal.signal(signal.SIGPIPE, lambda *_: got.append("sigpipe"))
    said = say(lambda: os.write(sock.fileno(), b"x"))
    signal.signal(signal.SIGPIPE, old)
    return "+".join(got + [str(said)])


def readv(sock):
    a, b = bytearray(100), bytearray(1 << 20)
    return os.readv(sock.fileno(), [a, b])


def recvmmsg(sock):
    """Two messages of 8 bytes at once."""
    class Message(ctypes.Structure):
        _fields_ = [("name", ctypes.c_void_p), ("namelen", ctypes.c_uint32), ("iov", ctypes.c_void_p),
                    ("iovlen", ctypes.c_size_t), ("control", ctypes.c_void_p), ("controllen", ctypes.c_size_t),
                    ("flags", ctypes.c_int), ("_pad", ctypes.c_int), ("len", ctypes.c_uint32)]
    rooms = [ctypes.create_string_buffer(8) for _ in range(400)]
    iovs = [(ctypes.c_size_t * 2)(ctypes.addressof(r), 8) for r in rooms]
    ms = (Message * len(rooms))()
    for m, v in zip(ms, iovs):
        m.iov, m.iovlen = ctypes.addressof(v), 1
    ctypes.set_errno(0)
    n = LIBC.recvmmsg(sock.fileno(), ms, len(rooms), socket.MSG_DONTWAIT, None)
    return errno.errorcode[ctypes.get_errno()] if n < 0 else f"{n}:{sum(m.len for m in ms[:n])}"


CALLS = {"level_two": level_two, "poll": poll, "epoll": epoll, "select": selects, "recv": recv, "rest": rest_said, "send": send,
         "peek": lambda s: recv(s, flags=socket.MSG_PEEK), "so_error": so_error, "sigpipe": sigpipe,
         "unread": unread, "readv": readv, "recvmmsg": recvmmsg, "outq": outq,
         "pollout": lambda s: poll(s, select.POLLOUT), "pollnone": lambda s: poll(s, 0),
         "wait": lambda s: time.sleep(0.02) or "",
         "long": lambda s: time.sleep(0.6) or "",
         "have1": lambda s: have(s, 1), "have2": lambda s: have(s, 2), "have3": lambda s: have(s, 3),
         "gone": lambda s: await_state(s, GONE),
         "fin": lambda s: await_state(s, CLOSE_WAIT),
         # A process that dies with bytes unread on a ring leaves a FIN to its kernel.
         "died": lambda s: await_state(s, CLOSE_WAIT, GONE),
         "write": lambda s: send(s, HALF), "shut_wr": lambda s: s.shutdown(socket.SHUT_WR) or "",
         "shut_rd": lambda s: s.shutdown(socket.SHUT_RD) or "",
         "shut_rdwr": lambda s: s.shutdown(socket.SHUT_RDWR) or "",
         "waitall": lambda s: recv(s, 2000, socket.MSG_WAITALL),
         "send_n": send_n, "sends": sends, "timeout": with_timeout, "within": within, "writev": writev,
         "sendfile": sendfile,
         "await_recv": await_recv, "await_poll": await_poll, "await_epoll": await_epoll,
         "await_all": lambda s: await_recv(s, 1 << 16, socket.MSG_WAITALL),
         "await_peek": lambda s: await_recv(s, 1 << 16, socket.MSG_PEEK),
         "await_none": lambda s: await_poll(s, 0), "await_select": await_select,
         "await_edge": lambda s: await_epoll(s, select.EPOLLET),
         "await_once": lambda s: await_epoll(s, select.EPOLLONESHOT),
         "spin_recv": spin_recv, "spin_poll": spin_poll,
         "getpeer": lambda s: s.getpeername() and "named"}


# ---- the other end ---------------------------------------------------------------------------

class Peer:
    """A process with the other end, which does what it is told."""

    def __init__(self, stays):
        role = ["peer", "stay" if stays else "down"]
        self.process = subprocess.Popen([sys.executable, "-u", os.path.abspath(__file__), *role, sys.argv[-1]],
                                        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self.port = int(self.process.stdout.readline())

    def do(self, what):
        self.process.stdin.write(what + "\n")
        self.process.stdin.flush()
        return self.process.stdout.readline().strip()

    def kill(self):
        self.process.kill()
        self.process.wait()

    def end(self):
        self.process.stdin.close()
        self.process.wait()


def peer():
    """Serves echoes until told otherwise; then commands, a line each."""
    listener = socket.create_server(("127.0.0.1", 0))
    print(listener.getsockname()[1], flush=True)
    sock, _ = listener.accept()
    listener.close()
    while exactly(sock, 64)[0] == 0:
        sock.sendall(bytes(64))
    sock.sendall(b"\1" * 64)
    if sys.argv[2] == "down":
        # Takes its direction down, for nobody has been seen to wait for it.
        sock.settimeout(10)
    for line in sys.stdin:
        what, *args = line.split()
        if what == "later":
            # Not before the other end is asleep, as a rule.
            print("done", flush=True)
            time.sleep(0.2)
            what, *args = args[0].split("_")
            {"close": sock.close, "shut": lambda: sock.shutdown(socket.SHUT_WR), "exit": lambda: os._exit(0)}[what]()
            continue
        if what == "close":
            sock.close()
        elif what == "reset":
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, LINGER_RESET)
            sock.close()
        elif what == "send":
            sock.sendall(HALF * int(args[0]))
        elif what == "echo":
            sock.sendall(exactly(sock, int(args[0])))
        elif what == "read":
            exactly(sock, int(args[0]))
        elif what == "sum":
            print(sum(exactly(sock, int(args[0]))) % 997, flush=True)
            continue
        elif what == "shut":
            sock.shutdown(getattr(socket, args[0]))
        elif what == "arrived":
            while unread(sock) < int(args[0]):
                time.sleep(0.001)
        elif what == "unread":
            time.sleep(0.02)
            print(unread(sock), flush=True)
            continue
        elif what == "call":
            print(say(lambda: CALLS[args[0]](sock)), flush=True)
            continue
        elif what == "exit":
            os._exit(0)
        print("done", flush=True)


# ---- cases -----------------------------------------------------------------------------------
# What the peer does first, and then our calls. `!` before a word: the peer does it.

CASES = {
    "reset_recv": "!reset gone recv recv send send",
    "reset_send": "!reset gone send send recv recv",
    "reset_poll": "!reset gone poll recv poll send",
    "reset_epoll": "!reset gone epoll recv epoll send",
    "reset_select": "!reset gone select so_error select recv send",
    "reset_so_error": "!reset gone so_error so_error recv send",
    "reset_sigpipe": "!reset gone sigpipe sigpipe recv",
    "reset_peek": "!reset gone peek peek recv poll",
    "reset_poll_send": "!reset gone poll send poll recv",
    "reset_pollnone": "!reset gone pollnone so_error pollnone",
    "reset_readv": "!reset gone readv readv",
    "half_then_reset": "!send_1 have1 !reset gone recv recv recv send",
    "half_then_reset_readv": "!send_1 have1 !reset gone readv readv readv",
    "half_then_reset_mmsg": "!send_1 have1 !reset gone recvmmsg recv recv",
    "half_then_reset_send": "!send_1 have1 !reset gone send send recv recv",
    "half_then_reset_waitall": "!send_1 have1 !reset gone waitall waitall recv",
    "half_then_reset_poll": "!send_1 have1 !reset gone poll unread peek recv poll recv",
    "written_then_reset": "write !reset gone recv recv send",
    "written_then_close": "write !arrived_1024 !close gone recv recv send",
    "written_then_close_send": "write !arrived_1024 !close gone send send recv",
    "written_then_close_poll": "write !arrived_1024 !close gone poll so_error poll recv",
    "both_then_close": "!send_2 have2 write !arrived_1024 !close gone rest recv send",
    "written_then_kill": "write !arrived_1024 !kill died recv recv send",
    "written_then_kill_send": "write !arrived_1024 !kill died send send recv",
    "written_then_kill_poll": "write !arrived_1024 !kill died poll send poll recv",
    "written_then_exit": "write !arrived_1024 !exit died so_error recv send",
    "both_then_kill": "!send_2 have2 write !arrived_1024 !kill died rest recv send",
    "close": "!close fin poll recv send wait send poll recv",
    "close_sends": "!close fin send wait send send poll so_error",
    "close_sigpipe": "!close fin sigpipe wait sigpipe sigpipe recv",
    "close_poll": "!close fin pollout send wait pollout pollnone recv",
    "close_epoll": "!close fin epoll send wait epoll recv send",
    "half_then_close": "!send_1 have1 !close fin poll send wait poll recv recv send",
    "half_then_close_recv": "!send_1 !close fin recv recv send wait send",
    "kill": "!kill fin poll recv send wait send poll recv",
    "kill_sends": "!kill fin send wait send send poll so_error",
    "half_then_kill": "!send_1 have1 !kill fin recv recv send wait send poll",
    "peer_shut": "!shut_SHUT_WR fin poll recv send !read_1 write !unread poll recv",
    "peer_shut_close": "!shut_SHUT_WR fin recv write !arrived_1024 !close gone send recv poll",
    "peer_shut_close_poll": "!shut_SHUT_WR fin recv write !arrived_1024 !close gone poll so_error poll send",
    "peer_shut_close_read": "!shut_SHUT_WR fin recv write !arrived_1024 !close gone recv recv so_error send",
    # (Those in which the other end stays on its lane.)
    "stay_written_then_kill": "write !arrived_1024 !kill died poll send poll recv",
    "stay_written_then_close": "write !arrived_1024 !close gone poll epoll recv poll epoll",
    "stay_reset_epoll": "!reset gone level_two so_error level_two recv",
    "stay_kill_poll_epoll": "write !arrived_1024 !kill died poll epoll pollnone epoll recv epoll",
    "stay_kill_two": "write !arrived_1024 !kill died level_two so_error level_two recv",
    "stay_shut_kill_epoll": "!shut_SHUT_WR fin recv write !arrived_1024 !kill died await_none poll epoll level_two so_error epoll",
    "stay_shut_reset_epoll": "!shut_SHUT_WR fin recv !reset gone poll epoll level_two so_error epoll",
    "stay_shut_close_epoll": "!shut_SHUT_WR fin recv write !arrived_1024 !close gone poll epoll level_two send epoll",
    "stay_shut_kill_unread": "!shut_SHUT_WR fin recv write !arrived_1024 !kill died await_none poll send send recv poll",
    "stay_shut_exit_unread": "!shut_SHUT_WR fin recv write !arrived_1024 !exit died await_none so_error poll recv send",
    "stay_reset_poll_epoll": "!reset gone poll epoll epoll pollnone recv epoll send",
    "stay_reset_poll_two": "!reset gone poll level_two recv epoll",
    "peer_shut_kill": "!shut_SHUT_WR fin recv write !arrived_1024 !kill died poll send recv",
    "peer_shut_unread": "write !arrived_1024 !shut_SHUT_WR fin poll recv send !unread poll recv",
    "peer_rd_close": "write !arrived_1024 !shut_SHUT_RD !close gone recv recv send",
    "peer_rd_close_send": "write !arrived_1024 !shut_SHUT_RD !close gone send send recv",
    "peer_rdwr_close": "write !arrived_1024 !shut_SHUT_RDWR fin recv !close gone send recv",
    "peer_rdwr_write": "!shut_SHUT_RDWR fin write gone send recv poll",
    "peer_rd_read": "write !arrived_1024 !shut_SHUT_RD !read_1024 !close fin recv send wait send",
    "peer_rd_later": "!shut_SHUT_RD write !unread !call_recv !call_recv send",
    "shut_wr": "shut_wr send poll sigpipe !send_1 have1 recv poll !call_recv",
    "shut_wr_close": "shut_wr !call_recv !close wait poll recv send",
    "shut_rd": "shut_rd recv poll send !read_1 !send_1 have1 recv recv poll",
    "shut_rd_unread": "!send_1 have1 shut_rd poll recv recv poll !call_send",
    "shut_rdwr": "shut_rdwr poll recv send !call_recv !call_poll !close wait poll recv",
    "shut_rdwr_unread": "!send_1 have1 shut_rdwr recv recv !call_recv",
    "outq_read": "write !read_1024 wait wait wait outq",
    "outq_unread": "write !arrived_1024 wait wait wait outq !read_1024",
    "unread_all": "!send_3 have3 unread peek recv unread",
    "fin_then_rst": "!send_1 !shut_SHUT_WR fin write !arrived_1024 !close gone poll recv recv send",
}
# What a send that may not wait takes while nobody reads: all that the kernel's buffer does.
SHORT = {
    "short_send": "send_n:5121 !sum_5121 !call_send",
    "short_send_large": "send_n:1000000 !sum_1000000 send_n:300000 !sum_300000 !call_send",
    "short_sends": "sends:1000000:100 !sum_1000000",
    "short_sends_mid": "sends:1200000:30000 !sum_1200000",
    "short_timeout": "timeout:200000 !sum_200000 timeout:6000 !sum_6000",
    "short_within": "within:1000000:5000 !sum_1000000",
    "short_at_once": "within:1000000:-1 !sum_1000000",
    "short_writev_now": "writev:600000 !sum_600000",
    "short_sendfile_now": "sendfile:900000 !sum_900000",
    "short_then_close": "send_n:1000000 shut_wr !sum_1000000 !call_recv",
}
# Cases in which our end sends until nothing more goes: the peer has stopped reading.
STUCK = {
    "stuck_reset_recv": "!reset gone recv recv send send",
    "stuck_reset_send": "!reset gone send send recv",
    "stuck_reset_poll": "!reset gone poll recv poll",
    "stuck_reset_so_error": "!reset gone so_error recv send",
    "stuck_half_reset": "!send_1 have1 !reset gone recv recv send",
    "stuck_half_reset_poll": "!send_1 have1 !reset gone poll poll rest recv send",
    "stuck_kill_recv": "!kill died recv recv send",
    "stuck_kill_poll": "!kill died poll epoll recv recv",
    "stuck_half_kill": "!send_1 have1 !kill died rest recv send",
    "stuck_close_send": "!close gone send send recv",
    "stuck_shut_reset": "!shut_SHUT_WR fin recv !reset gone poll recv send recv",
}


# Cases in which no packet arrives any more, but (where they run bare) in the kernel's own way.
EATEN = {
    "eaten_close_recv": "!later_close await_recv await_recv poll",
    "eaten_close_all": "!later_close await_all await_recv",
    "eaten_close_peek": "!later_close await_peek await_recv",
    "eaten_close_poll": "!later_close await_poll await_recv await_poll",
    "eaten_close_select": "!later_close await_select await_recv await_select",
    "eaten_close_epoll": "!later_close await_epoll await_recv await_epoll",
    "eaten_close_edge": "!later_close await_edge await_recv",
    "eaten_close_once": "!later_close await_once await_recv await_once",
    "eaten_close_spin": "!close spin_recv spin_recv",
    "eaten_close_spin_poll": "!close spin_poll recv",
    "eaten_half_close": "!send_1 !close await_recv await_recv poll",
    "eaten_half_close_epoll": "!send_1 have1 !close await_recv await_epoll await_recv await_edge",
    "eaten_shut": "!later_shut await_recv await_poll write !read_1024",
    "eaten_shut_epoll": "!later_shut await_edge await_recv",
    "eaten_exit_recv": "!later_exit await_recv await_recv poll",
    "eaten_exit_edge": "!later_exit await_edge await_recv",
    "eaten_exit_late": "!later_exit long await_recv await_recv poll",
    "eaten_exit_late_all": "!later_exit long await_all await_recv",
    "eaten_exit_late_spin": "!later_exit long spin_recv spin_recv",
    "eaten_exit_late_peek": "!later_exit long await_peek await_recv",
    "eaten_exit_late_poll": "!later_exit long await_poll await_recv",
    "eaten_exit_late_epoll": "!later_exit long pollout await_epoll await_recv",
    "eaten_exit_late_once": "!later_exit long pollout await_once await_recv",
    "eaten_exit_late_edge": "!later_exit long pollout await_edge await_recv",
    "eaten_shut_exit_recv": "shut_wr !later_exit await_recv await_recv",
    "eaten_shut_exit_poll": "shut_wr !later_exit await_poll await_recv",
    "eaten_shut_exit_epoll": "shut_wr !later_exit await_epoll await_recv",
    "eaten_shut_exit_edge": "shut_wr !later_exit await_edge await_recv",
    "eaten_shut_exit_all": "shut_wr !send_1 have1 !later_exit await_all await_recv",
    "eaten_half_exit_late": "!send_1 have1 !later_exit long await_recv await_recv poll",
    "eaten_half_exit_poll": "!send_1 have1 !later_exit long await_recv await_poll await_recv",
    "eaten_kill_recv": "!kill await_recv await_recv poll",
    "eaten_kill_poll": "!kill await_poll await_recv await_poll",
    "eaten_kill_epoll": "!kill await_epoll await_recv await_epoll",
    "eaten_kill_spin": "!kill spin_recv spin_recv",
    "eaten_reset_recv": "!reset await_recv await_recv poll send",
    "eaten_reset_poll": "!reset await_poll await_recv poll so_error",
    "eaten_reset_none": "!reset await_none so_error poll recv",
    "eaten_reset_epoll": "!reset await_edge await_recv await_epoll",
    "eaten_reset_half": "!send_2 have2 !reset await_none rest recv send",
    "eaten_unread_close": "write !arrived_1024 !close await_recv await_recv send poll",
    "eaten_unread_close_epoll": "write !arrived_1024 !close await_edge so_error await_epoll recv",
    "eaten_unread_exit": "write !arrived_1024 !later_exit await_recv await_recv send poll",
    "eaten_unread_exit_late": "write !arrived_1024 !later_exit long await_recv await_recv send poll",
    "eaten_unread_kill": "write !arrived_1024 !kill await_recv await_recv send poll",
    "eaten_unread_kill_poll": "write !arrived_1024 !kill await_none so_error poll recv",
    "eaten_unread_kill_epoll": "write !arrived_1024 !kill await_once recv await_epoll recv",
    "eaten_unread_kill_half": "!send_1 have1 write !arrived_1024 !kill await_none rest recv send",
}


def stick(sock):
    """Sends until nothing has gone for a while."""
    since = time.monotonic()
    while time.monotonic() - since < 0.12:
        try:
            sock.send(bytes(1 << 16), socket.MSG_DONTWAIT)
            since = time.monotonic()
        except BlockingIOError:
            time.sleep(0.005)


def run(names, down):
    for number, name in enumerate(names):
        other = Peer(name.startswith(("stay_", "eaten_")))
        sock = socket.create_connection(("127.0.0.1", other.port))
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        rounds, last = 0, False
        while not last:
            rounds += 1
            last = rounds > 40 and marked(f"warm-{number}")
            sock.sendall(bytes([last]) * 64)
            assert exactly(sock, 64)[0] == last
        answers = []
        other.do("ready")
        if down:
            mark(f"down-{number}")
            await_mark(f"went-{number}")
        for _ in range(3):  # frames of what came before are taken in: who is killed with one unread resets
            sock.sendall(bytes(64))
            other.do("echo 64")
            exactly(sock, 64)
        if name in STUCK:
            stick(sock)
        if name in SHORT and not down:
            sock.setblocking("now" not in name)
            poll(sock)
            for _ in range(80):  # onto the lane again, after `settimeout`
                sock.sendall(bytes(64))
                other.do("read 64")
        for word in (CASES | SHORT | STUCK | EATEN)[name].split():
            if word == "!kill":
                other.kill()
            elif word.startswith("!"):
                answer = other.do(word[1:].replace("_", " ", 1))
                if answer != "done":
                    answers.append(f"({answer})")
            else:
                call, *args = word.split(":")
                answer = say(lambda: CALLS[call](sock, *args))
                if answer != "":
                    answers.append(f"{word}={answer}")
        print(f"{name}: {' '.join(answers)}", flush=True)
        sock.close()
        other.end()
    print("result ok", flush=True)


def main():
    signal.alarm(300)
    if sys.argv[1] == "peer":
        return peer()
    if sys.argv[1] == "list":
        return print(*(EATEN if sys.argv[2] == "eaten" else CASES | SHORT | STUCK))
    run(sys.argv[2].split(","), sys.argv[3] == "down")


main()
