"""A client of echo.py whose program starts others, which get its connections as well.

    lent.py HOST PORT CONNS UNTIL HOW...

Sends and compares on all connections, one thread each, until the file UNTIL exists; then prints "result JSON". As soon
as the file UNTIL.N exists (N from 0), it starts another program in the next way:

    system popen spawn dup fork    libc's system, popen, posix_spawn, the same with a connection as the program's 7, and
                                   fork with exec: a program that ends at once; prints "ended"
    stays                          posix_spawn of a program that goes on until UNTIL.child exists; prints "began"
"""
import ctypes
import hashlib
import json
import os
import socket
import sys
import threading
import time

host, port, conns, until = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4]
libc = ctypes.CDLL(None)
rounds = [0] * conns
wrong = []


def talk(n, conn):
    h = hashlib.sha256()
    while not os.path.exists(until):
        data = b"%d %d " % (n, rounds[n]) * (1 + rounds[n] % 50)
        conn.sendall(data)
        h.update(data)
        back = b""
        while len(back) < len(data):
            more = conn.recv(65536)
            if not more:
                wrong.append("%d ended after %d" % (n, rounds[n]))
                return
            back += more
        if back != data:
            wrong.append("%d differs in %d" % (n, rounds[n]))
        rounds[n] += 1
    conn.shutdown(socket.SHUT_WR)
    if conn.recv(65536).decode() != h.hexdigest():
        wrong.append("%d: the hash" % n)


def guarded(n, conn):
    try:
        talk(n, conn)
    except OSError as e:
        wrong.append("%d: %s after %d" % (n, e, rounds[n]))


def start(how):
    if how == "system":
        assert libc.system(b"true") == 0
    elif how == "popen":
        f = libc.popen
        f.restype = ctypes.c_void_p
        assert libc.pclose(ctypes.c_void_p(f(b"true", b"r"))) == 0
    elif how in ("spawn", "dup", "stays"):
        actions = [(os.POSIX_SPAWN_DUP2, sockets[0].fileno(), 7)] if how == "dup" else []
        what = "until [ -e %s.child ]; do sleep 0.1; done" % until if how == "stays" else "true"
        pid = os.posix_spawn("/bin/sh", ["sh", "-c", what], os.environ, file_actions=actions)
        if how == "stays":
            return "began"
        assert os.waitpid(pid, 0)[1] == 0
    else:
        pid = os.fork()
        if pid == 0:
            os.execv("/bin/true", ["true"])
        assert os.waitpid(pid, 0)[1] == 0
    return "ended"


sockets = []
for i in range(conns):
    s = socket.create_connection((host, port))
    os.set_inheritable(s.fileno(), True)
    sockets.append(s)
threads = [threading.Thread(target=guarded, args=(n, s)) for n, s in enumerate(sockets)]
for t in threads:
    t.start()
for n, how in enumerate(sys.argv[5:]):
    while not os.path.exists("%s.%d" % (until, n)):
        time.sleep(0.02)
    print(start(how), flush=True)
for t in threads:
    t.join()
print("result " + json.dumps({"rounds": sum(rounds), "wrong": wrong}), flush=True)
