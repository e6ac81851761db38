"""One large call per connection: sends, receives and files of megabytes that one blocking call moves.

    large.py CASE serve HOST            prints "port N"
    large.py CASE connect HOST PORT

Both ends print "result ..." with what their calls returned, which must be what the kernel returns.
"""
import errno
import hashlib
import os
import signal
import socket
import struct
import sys
import tempfile
import threading
import time

CASE, ROLE, HOST = sys.argv[1:4]
MB = 1 << 20
BULK = 128 * MB
REQUEST, ANSWER, TURNS = 100_000, 300_000, 60
SIGNAL_S = 0.3
PAUSE_S, TURN_S = 0.001, 0.02  # a busy machine's daemon has its turn meanwhile
WAITED = 600_000  # what a receive waits for; it gets half of that, and then the rest
REST = b"rest"


def noise(n):
    """Bytes in which no place looks like another."""
    block = b"".join(struct.pack("<Q", i * 0x9E3779B97F4A7C15 % (1 << 64)) for i in range(MB // 8 + 1))
    return b"".join(block[i % 8:][: MB - 1] for i in range(n // (MB - 1) + 1))[:n]


def said(*what):
    print("result", *what, flush=True)


def digest(data):
    return hashlib.sha256(data).hexdigest()[:16]


def read_all(s, size=65536, upto=None):
    """Everything up to the end, or `upto` bytes, in a sequence of reads."""
    h, n, buf = hashlib.sha256(), 0, bytearray(size)
    while upto is None or n < upto:
        k = s.recv_into(buf, 0 if upto is None else min(size, upto - n))
        if k == 0:
            break
        h.update(memoryview(buf)[:k])
        n += k
    return n, h.hexdigest()[:16]


def whole(s, n):
    """One receive that waits for all."""
    buf = bytearray(n)
    return s.recv_into(buf, n, socket.MSG_WAITALL), buf


def attempt(call):
    """What a call says: a count as 'all', 'part' or 'none', or the error's name."""
    try:
        return call()
    except OSError as e:
        return errno.errorcode[e.errno]


def share(got, of):
    return got if isinstance(got, str) else "all" if got == of else "part" if got else "none"


def option(s, name, seconds):
    s.setsockopt(socket.SOL_SOCKET, name, struct.pack("ll", int(seconds), int(seconds % 1 * 1e6)))


def handler(restart):
    signal.signal(signal.SIGALRM, lambda *_: None)
    signal.siginterrupt(signal.SIGALRM, not restart)


def alarmed(restart, call):
    """A call, and signals: not only one, which may come before the call has moved anything."""
    handler(restart)
    signal.setitimer(signal.ITIMER_REAL, SIGNAL_S, SIGNAL_S)
    got = attempt(call)
    signal.setitimer(signal.ITIMER_REAL, 0)
    return got


# Each case: what the server does with the connection, and what the client does.

def send_serve(s):
    said(*read_all(s))


def send_connect(s):
    for i in range(4):
        s.sendall(b"small %d" % i)
    said(s.send(noise(BULK)))


def late_serve(s):
    time.sleep(1)  # the send is asleep in the meantime
    said(*read_all(s))


late_connect = send_connect


def handed_serve(s):
    """Slowly: who else holds a connection from another process is looked for meanwhile."""
    h, n = hashlib.sha256(), 0
    while True:
        data = s.recv(200_000)
        if not data:
            break
        h.update(data)
        n += len(data)
        time.sleep(0.005)
    said(n, h.hexdigest()[:16])


def handed_connect(s):
    ours, theirs = socket.socketpair()
    if os.fork() == 0:
        s.close()
        _, (fd,), _, _ = socket.recv_fds(theirs, 1, 1)
        with socket.create_server((HOST, 0)):  # (greets the daemon: see `main`)
            time.sleep(0.1)
            send_connect(socket.socket(fileno=fd))
        os._exit(0)
    socket.send_fds(ours, [b"x"], [s.fileno()])
    s.close()
    assert os.wait()[1] == 0


def vector_connect(s):
    data = memoryview(noise(BULK))
    step = BULK // 1000 + 1
    said(s.sendmsg([data[i:i + step] for i in range(0, BULK, step)]))


vector_serve = send_serve


def file_connect(s):
    with tempfile.TemporaryFile() as f:
        f.write(b"head" + noise(BULK))
        f.flush()
        n = os.sendfile(s.fileno(), f.fileno(), 4, BULK)
        f.seek(4)
        said(n, f.tell())


file_serve = send_serve


def waitall_serve(s):
    n, buf = whole(s, BULK)
    said(n, digest(buf))


def waitall_connect(s):
    data = memoryview(noise(BULK))
    for i in range(0, BULK, REQUEST):
        time.sleep(PAUSE_S)
        s.sendall(data[i:i + REQUEST])
    said("sent")


def turns_serve(s):
    for i in range(TURNS):
        n, buf = whole(s, REQUEST)
        assert n == REQUEST, n
        assert s.send(noise(ANSWER)[i:] + buf[:i]) == ANSWER
    said("served")


def turns_connect(s):
    data, answer = noise(REQUEST), noise(ANSWER)
    for i in range(TURNS):
        time.sleep(TURN_S)
        assert s.send(data) == REQUEST
        n, buf = whole(s, ANSWER)
        assert n == ANSWER and buf == answer[i:] + data[:i], (i, n)
    said("ok")


def stuck_serve(s):
    """A peer that reads nothing before the client says that it is through, on another connection."""
    other, _ = LISTENER.accept()
    other.recv(1)
    read_all(s)
    said("read")


def through():
    socket.create_connection((HOST, int(sys.argv[4]))).close()


def until_full(call):
    """The first answer, and the one that ends with it: the kernel may find room for some more in between."""
    first = last = call()
    while last == "part":
        last = call()
    return first, last


def timeout_connect(s):
    option(s, socket.SO_SNDTIMEO, SIGNAL_S)
    data = noise(32 * MB)
    before = time.monotonic()
    got = until_full(lambda: share(attempt(lambda: s.send(data)), len(data)))
    took = time.monotonic() - before
    through()
    said(*got, "early" if took < SIGNAL_S else "in time")


timeout_serve = stuck_serve


def signal_connect(s):
    data = noise(32 * MB)
    got = alarmed(False, lambda: s.send(data))
    through()
    said(share(got, len(data)))


signal_serve = stuck_serve


def restart_connect(s):
    data = noise(32 * MB)
    got = alarmed(True, lambda: s.send(data))
    through()
    said(share(got, len(data)))


restart_serve = stuck_serve


def reset_serve(s):
    read_all(s, upto=3 * MB)
    s.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    s.close()
    said("closed")


def reset_connect(s):
    data = noise(32 * MB)
    said(*[share(attempt(lambda: s.send(data)), len(data)) for _ in range(3)])


def gone_connect(s):
    """The default action of SIGPIPE comes with the second send, not with the first."""
    signal.signal(signal.SIGPIPE, lambda *_: said("SIGPIPE"))
    data = noise(32 * MB)
    for _ in range(3):
        said(share(attempt(lambda: s.send(data)), len(data)))


gone_serve = reset_serve


def some_serve(s):
    """Half of what the other end waits for, then, when it says so on another connection, the rest and the end."""
    s.sendall(noise(WAITED // 2))
    other, _ = LISTENER.accept()
    other.recv(1)
    s.sendall(REST)
    s.close()
    said("sent")


def half_of(s, then):
    """A receive that waits for all, and what to do when it has half."""
    buf, half = bytearray(WAITED), noise(WAITED // 2)

    def watch():
        while buf[len(half) - 8:len(half)] != half[-8:]:
            time.sleep(0.01)
        then()
    threading.Thread(target=watch, daemon=True).start()
    return attempt(lambda: s.recv_into(buf, WAITED, socket.MSG_WAITALL))


def received(s):
    return attempt(lambda: whole(s, WAITED)[0])


def part_connect(s):
    said(half_of(s, through), received(s))


def interrupted(s, restart):
    handler(restart)
    main = threading.main_thread().ident
    first = half_of(s, lambda: signal.pthread_kill(main, signal.SIGALRM))
    through()
    said(first, received(s))


def part_signal_connect(s):
    interrupted(s, restart=False)


def part_restart_connect(s):
    interrupted(s, restart=True)


def part_timeout_connect(s):
    """(On a busy machine nothing may have come in time.)"""
    option(s, socket.SO_RCVTIMEO, SIGNAL_S)

    def some():
        while (got := received(s)) == "EAGAIN":
            pass
        return got
    n = 0
    while n < WAITED // 2:
        n += some()
    late = received(s)
    through()
    said(n, late, some(), some())


part_serve = part_signal_serve = part_restart_serve = part_timeout_serve = some_serve


def mark_serve(s):
    s.sendall(noise(200_000))
    time.sleep(0.2)
    s.send(b"!", socket.MSG_OOB)
    s.sendall(noise(200_000))
    time.sleep(0.2)
    s.close()
    said("sent")


def mark_connect(s):
    time.sleep(0.5)
    said(*[attempt(lambda: whole(s, 500_000)[0]) for _ in range(3)])


def nonblock_connect(s):
    """Made non-blocking where nobody sees it: by a number that is no hook's."""
    import fcntl
    fcntl.fcntl(s.fileno(), fcntl.F_SETFL, os.O_NONBLOCK)
    data = noise(32 * MB)
    got = until_full(lambda: share(attempt(lambda: s.send(data)), len(data)))
    through()
    said(*got)


nonblock_serve = stuck_serve


def main():
    # Bounded: a call that hangs ends the program.
    import faulthandler
    faulthandler.dump_traceback_later(50, exit=True)
    if ROLE == "serve":
        global LISTENER
        LISTENER = socket.create_server((HOST, 0))
        print("port", LISTENER.getsockname()[1], flush=True)
        s, _ = LISTENER.accept()
    else:
        idle = socket.create_server((HOST, 0))  # under the shim this greets the daemon
        time.sleep(0.1)
        s = socket.create_connection((HOST, int(sys.argv[4])))
        idle.close()
    globals()[f"{CASE}_{ROLE}"](s)


main()
