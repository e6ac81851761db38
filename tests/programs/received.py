"""An echo server, for the client of echo.py, whose connections go from one process to another.

    received.py serve HOW     prints "port N"; serves until it is killed

HOW: rights     a program that was there before gets each by SCM_RIGHTS; this one closes its own (blocking calls)
     epoll      the same, with an event loop
     family     the same, in a forked child
     fork       the same, and the program forks a child that serves it
     exec       a program is executed with it as 0 and 1, as inetd does
     kept       as rights, but both go on with it, taking turns
     twice      as rights, but it is received twice, by a peek and for good, and both descriptors are used
     again      as rights, but the other program receives it by a peek, uses that until it is on a lane, then receives it
                for good, and uses both descriptors
     itself     this process sends it to itself, and uses both descriptors
     used-HOW   (rights exec popen spawn fork) it is served here first, until it is on a lane; then by the other program,
                which takes its time
     used-both  the same; but while this process closes it, a forked child sends it to the other program, uses it
                for a while, and then takes turns with that
"""
import array
import hashlib
import os
import selectors
import signal
import socket
import subprocess
import struct
import sys
import tempfile
import threading
import time

arguments = sys.argv
HERE = os.path.abspath(arguments[0])


def give(channel, conn):
    channel.sendmsg([b"x"], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [conn.fileno()]))])


def take(channel, flags=0):
    _, control, _, _ = channel.recvmsg(1, socket.CMSG_SPACE(4), flags)
    if not control:
        os._exit(0)
    fds = array.array("i")
    fds.frombytes(control[0][2][:4])
    return socket.socket(fileno=fds[0])


def on_tcp(conn):
    """What TCP has moved in each direction."""
    return struct.unpack_from("QQ", conn.getsockopt(socket.IPPROTO_TCP, 11, 256), 120)  # TCP_INFO


def used(conn):
    """Answers until the connection is on a lane (or for a while, without the shim). The name of a file with what came."""
    still, n = 0, 0
    with tempfile.NamedTemporaryFile(delete=False) as f:
        while still < 5 and (n < 20 or "LD_PRELOAD" in os.environ):
            before = on_tcp(conn)
            data = conn.recv(65536)
            conn.sendall(data)
            f.write(data)
            still = still + 1 if on_tcp(conn) == before else 0
            n += 1
    return f.name


def echo(recv, send, before=None):
    """Answers every byte, and at the end with the hash of all. `recv`, `send`: for each call others. `before`: a file
    with what came earlier."""
    h, n = hashlib.sha256(), 0
    if before:
        with open(before, "rb") as f:
            h.update(f.read())
        os.unlink(before)
        time.sleep(1.2)  # (longer than an end that TCP does not tell is waited for)
    while True:
        data = recv[n % len(recv)](65536)
        if not data:
            break
        h.update(data)
        view = memoryview(data)
        while view:
            view = view[send[n % len(send)](view):]
        n += 1
    end = memoryview(h.hexdigest().encode())
    while end:
        end = end[send[0](end):]


def blocking(*conns, before=None):
    echo([c.recv for c in conns], [c.send for c in conns], before)
    for c in conns:
        c.close()


def in_thread(f, *args):
    threading.Thread(target=f, args=args, daemon=True).start()


def worker(how, channel):
    if how == "epoll":
        return events(channel)
    while True:
        if how == "twice":
            peeked = take(channel, socket.MSG_PEEK)
            in_thread(blocking, peeked, take(channel))
            continue
        if how == "again":
            peeked = take(channel, socket.MSG_PEEK)
            name = used(peeked)
            threading.Thread(target=blocking, args=(peeked, take(channel)), kwargs={"before": name}, daemon=True).start()
            continue
        conn = take(channel)
        if how == "kept":
            # One turn for each byte of the channel; what was read goes back, for the hash.
            while channel.recv(1) == b"t":
                data = conn.recv(65536)
                conn.sendall(data)
                channel.sendall(len(data).to_bytes(4, "big") + data)
            conn.close()
        elif how == "used-rights":
            name = exactly(channel, ord(exactly(channel, 1))).decode()
            threading.Thread(target=blocking, args=(conn,), kwargs={"before": name}, daemon=True).start()
        elif how == "fork":
            if os.fork() == 0:
                blocking(conn)
                os._exit(0)
            conn.close()
        else:
            in_thread(blocking, conn)


def events(channel):
    sel = selectors.EpollSelector()
    sel.register(channel, selectors.EVENT_READ, None)
    while True:
        for key, _ in sel.select():
            if key.data is None:
                conn = take(channel)
                conn.setblocking(False)
                sel.register(conn, selectors.EVENT_READ, [bytearray(), hashlib.sha256(), False])
                continue
            out, h, ended = key.data
            if not ended:
                try:
                    data = key.fileobj.recv(65536)
                    h.update(data)
                    out += data or h.hexdigest().encode()
                    key.data[2] = ended = not data
                except BlockingIOError:
                    pass
            try:
                del out[:key.fileobj.send(out)]
            except BlockingIOError:
                pass
            if ended and not out:
                sel.unregister(key.fileobj)
                key.fileobj.close()
            else:
                what = (0 if ended else selectors.EVENT_READ) | (selectors.EVENT_WRITE if out else 0)
                sel.modify(key.fileobj, what, key.data)


def start(how):
    ours, theirs = socket.socketpair()
    if how == "family":
        if os.fork() == 0:
            ours.close()
            worker(how, theirs)
    else:
        subprocess.Popen([sys.executable, HERE, "worker", how, str(theirs.fileno())], pass_fds=[theirs.fileno()])
    theirs.close()
    return ours


def exactly(channel, n):
    data = b""
    while len(data) < n:
        data += channel.recv(n - len(data))
    return data


def turns(channel, conn, before=b""):
    h = hashlib.sha256(before)
    mine = True
    while True:
        if mine:
            data = conn.recv(65536)
            conn.sendall(data)
        else:
            channel.sendall(b"t")
            data = exactly(channel, int.from_bytes(exactly(channel, 4), "big"))
        if not data:
            break
        h.update(data)
        mine = not mine
    channel.sendall(b"e")
    conn.sendall(h.hexdigest().encode())
    conn.close()


giving = threading.Lock()


def hand_on(how, channel, conn):
    if how == "used-both":
        return hand_on_and_close(start("kept"), conn)
    name = used(conn)
    program = [sys.executable, HERE, "standard", name]
    if how == "used-rights":
        with giving:
            give(channel, conn)
            channel.sendall(bytes([len(name)]) + name.encode())
    elif how == "used-popen":
        subprocess.Popen(program, stdin=conn, stdout=conn)
    elif how == "used-spawn":
        actions = [(os.POSIX_SPAWN_DUP2, conn.fileno(), n) for n in (0, 1)]
        os.posix_spawn(sys.executable, program, os.environ, file_actions=actions)
    elif os.fork() == 0:
        if how == "used-fork":
            os.closerange(3, conn.fileno())
            os.closerange(conn.fileno() + 1, 1024)
            blocking(conn, before=name)
            os._exit(0)
        os.dup2(conn.fileno(), 0)
        os.dup2(conn.fileno(), 1)
        os.execv(sys.executable, program)
    conn.close()


ALONE = 100  # far more than before a lane, and for longer


def hand_on_and_close(channel, conn):
    name = used(conn)
    closes, to_close = socket.socketpair()
    if os.fork() == 0:
        with open(name, "rb") as f:
            before = f.read()
        mine = (conn.fileno(), channel.fileno(), to_close.fileno())
        for fd in set(range(3, 1024)) - set(mine):
            try:
                os.close(fd)  # (other connections)
            except OSError:
                pass
        to_close.send(b"r")
        to_close.recv(1)
        give(channel, conn)
        for _ in range(ALONE):
            data = conn.recv(65536)
            conn.sendall(data)
            before += data
            time.sleep(0.01)
        turns(channel, conn, before)
        os._exit(0)
    closes.recv(1)
    closes.send(b"c")
    conn.close()
    channel.close()


def serve(how):
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    alone = ("exec", "itself", "used-exec", "used-popen", "used-spawn", "used-fork", "used-both")
    channel = start(how) if how not in alone else None
    listener = socket.create_server(("127.0.0.1", 0), backlog=64)
    print("port", listener.getsockname()[1], flush=True)
    while True:
        conn, _ = listener.accept()
        if how.startswith("used-"):
            in_thread(hand_on, how, channel, conn)
            continue
        elif how == "exec":
            if os.fork() == 0:
                listener.close()
                os.dup2(conn.fileno(), 0)
                os.dup2(conn.fileno(), 1)
                os.execv(sys.executable, [sys.executable, HERE, "standard"])
        elif how == "itself":
            ours, theirs = socket.socketpair()
            give(ours, conn)
            in_thread(blocking, conn, take(theirs))
            continue
        elif how == "kept":
            give(channel, conn)
            turns(channel, conn)
            continue
        else:
            give(channel, conn)
        conn.close()


if arguments[1] == "serve":
    serve(arguments[2])
elif arguments[1] == "worker":
    worker(arguments[2], socket.socket(fileno=int(arguments[3])))
else:
    echo([lambda n: os.read(0, n)], [lambda v: os.write(1, v)], *arguments[2:3])
