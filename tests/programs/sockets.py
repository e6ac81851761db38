"""sockets.py STYLE [ARGUMENTS]: comes to hold TCP sockets in one way or another, says "ready" (and
"port N" where it listens), and sleeps until it is killed.

  serve N          listens, accepts N connections, leaves all others in the queue
  connect PORT N   makes N connections and never uses them
  talk PORT N      makes N connections, each used for some round trips with an `echo`
  echo             listens; accepts, and answers in one thread per connection
  exec PORT        makes a connection and executes this program again, which holds it
  title PORT       listens, and forks a child that executes this program with a connection; both have
                   written over their environments, as programs do that show a title
  give PORT        makes a connection and gives it to another program by SCM_RIGHTS
  fork PORT        makes a connection, forks a child that has it too and makes one of its own
  split PORT       uses a connection with an `echo`; then it writes and a forked child reads, all the time
  leader PORT      makes a connection; its first thread ends, another one sleeps
  standard PORT    makes a connection, which becomes its standard input
  sink             listens; accepts one connection after the other, and reads
  pour PORT        makes a connection and writes all the time
  part FILE        uses both ends of a connection; when the file exists, gives one to another program
  churn            makes, accepts and closes connections all the time, also in short-lived children
  late PORT FILE   uses a connection; when the file exists, makes another one, and goes on using it
"""
import array
import collections
import ctypes
import os
import socket
import struct
import subprocess
import sys
import threading
import time

KEPT = []


def keep(sock):
    KEPT.append(sock)
    return sock


def connect(port):
    return keep(socket.create_connection(("127.0.0.1", int(port))))


def ready():
    print("ready", flush=True)
    while True:
        time.sleep(1000)


def listen():
    s = keep(socket.socket())
    s.bind(("127.0.0.1", 0))
    s.listen(64)
    print("port", s.getsockname()[1], flush=True)
    return s


def talk(sock):
    for i in range(40):
        # A daemon may take a moment for its greeting, and then for the lane.
        time.sleep(0.3 if i == 20 else 0.01 if i > 20 else 0)
        sock.sendall(b"x" * 100)
        got = 0
        while got < 100:
            got += len(sock.recv(100))


def serve(n):
    s = listen()
    for _ in range(int(n)):
        keep(s.accept()[0])
    ready()


def answer(sock):
    while data := sock.recv(65536):
        sock.sendall(data)


def echo():
    s = listen()
    print("ready", flush=True)
    while True:
        threading.Thread(target=answer, args=(keep(s.accept()[0]),), daemon=True).start()


def receiver():
    ours, theirs = socket.socketpair()
    receiver = subprocess.Popen([sys.executable, __file__, "take", str(theirs.fileno())], pass_fds=[theirs.fileno()])
    return ours, receiver.pid


def hand_over(s, ours, pid):
    ours.sendmsg([b"x"], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [s.fileno()]))])
    s.close()
    assert ours.recv(1) == b"y"
    print("child", pid, flush=True)
    ready()


def give(port):
    to = receiver()
    hand_over(connect(port), *to)


def part(file):
    to = receiver()
    listener = listen()
    a = connect(listener.getsockname()[1])
    b = listener.accept()[0]
    while not os.path.exists(file):
        for x, y in ((a, b), (b, a)):
            x.sendall(b"x" * 100)
            got = 0
            while got < 100:
                got += len(y.recv(100))
        time.sleep(0.002)
    hand_over(b, *to)


def leader(port):
    connect(port)
    first = threading.main_thread().native_id

    def wait():
        while open(f"/proc/self/task/{first}/stat").read().rpartition(")")[2].split()[0] != "Z":
            time.sleep(0.01)
        ready()

    threading.Thread(target=wait).start()
    ctypes.CDLL(None).syscall(60, 0)  # of this thread alone


def standard(port):
    s = connect(port)
    talk(s)
    os.dup2(s.fileno(), 0)
    ready()


def sink():
    s = listen()
    while True:
        c = keep(s.accept()[0])
        while c.recv(65536):
            pass


def pour(port):
    s = connect(port)
    print("ready", flush=True)
    while True:
        s.sendall(b"x" * 100)
        time.sleep(0.001)


def churn():
    listener = listen()

    def pairs(n):
        """Makes and closes them, the last `n` are open."""
        held = collections.deque()
        while True:
            s = socket.socket()
            s.connect(listener.getsockname())
            s.sendall(b"x")
            held.append((s, listener.accept()[0]))
            if len(held) > n:
                for s in held.popleft():
                    s.close()

    threading.Thread(target=pairs, args=[100], daemon=True).start()
    print("ready", flush=True)
    while True:
        pid = os.fork()
        if pid == 0:
            threading.Timer(0.05, os._exit, [0]).start()
            pairs(20)
        os.waitpid(pid, 0)


def take(fd):
    theirs = socket.socket(fileno=int(fd))
    _, control, _, _ = theirs.recvmsg(1, 100)
    keep(socket.socket(fileno=struct.unpack("i", control[0][2][:4])[0]))
    theirs.send(b"y")
    while True:
        time.sleep(1000)


def overwrite():
    """What setproctitle() does: the environment moves, and its old place is used for other things."""
    libc = ctypes.CDLL(None)
    kept = [ctypes.create_string_buffer(os.fsencode(f"{k}={v}")) for k, v in os.environ.items()]
    moved = (ctypes.c_void_p * (len(kept) + 1))(*map(ctypes.addressof, kept), None)
    ctypes.c_void_p.in_dll(libc, "environ").value = ctypes.addressof(moved)
    with open("/proc/self/stat") as f:
        fields = f.read().rpartition(")")[2].split()
    start, end = int(fields[47]), int(fields[48])
    ctypes.memset(start, 0, end - start)
    KEPT.append((kept, moved))


def title(port):
    overwrite()
    listen()  # as servers do: the daemon knows them from then on
    fd = connect(port).fileno()
    os.set_inheritable(fd, True)
    pid = os.fork()
    if pid == 0:
        os.execv(sys.executable, [sys.executable, __file__, "titled"])
    os.close(KEPT.pop().detach())
    print("child", pid, flush=True)
    connect(port)
    time.sleep(1000)


def fork(port):
    connect(port)
    r, w = os.pipe()
    pid = os.fork()
    if pid == 0:
        connect(port)
        os.write(w, b"x")
        while True:
            time.sleep(1000)
    os.read(r, 1)
    print("child", pid, flush=True)
    ready()


def split(port):
    s = connect(port)
    talk(s)
    pid = os.fork()
    if pid == 0:
        while s.recv(65536):
            pass
        os._exit(0)
    print("child", pid, flush=True)
    print("ready", flush=True)
    while True:
        s.sendall(b"x" * 1000)
        time.sleep(0.001)


def late(port, file):
    talk(connect(port))
    print("talked", flush=True)
    while not os.path.exists(file):
        time.sleep(0.02)
    second = connect(port)
    print("ready", flush=True)
    while True:
        talk(second)


style, arguments = sys.argv[1], sys.argv[2:]
if style == "connect":
    for _ in range(int(arguments[1])):
        connect(arguments[0])
    ready()
elif style == "talk":
    for _ in range(int(arguments[1])):
        talk(connect(arguments[0]))
    ready()
elif style == "exec":
    fd = connect(arguments[0]).fileno()
    os.set_inheritable(fd, True)
    os.execv(sys.executable, [sys.executable, __file__, "hold"])
elif style == "titled":
    overwrite()
    ready()
elif style == "hold":
    ready()
else:
    globals()[style](*arguments)
