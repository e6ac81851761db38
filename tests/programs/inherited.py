"""Connections whose server hands them to another program and closes its own descriptor, as inetd does.

    inherited.py serve HOW            prints "port N"; serves until it is killed
    inherited.py client PORT N LINES  N clients, one after the other; prints "result {...}"

HOW: popen (vfork and exec), shell (the same with a shell between), spawn (posix_spawn), fork (fork and
exec), rights (SCM_RIGHTS to a process that was there before), early (posix_spawn, with actions that were made
before there was a connection), end (nobody gets it: the close ends it), stream
(the same, by the C library's stdio).
A client sends LINES short lines, which the server reads byte by byte, then noise, which the other program
sends back.
"""
import array
import ctypes
import json
import os
import random
import socket
import subprocess
import sys
import threading

NOISE = random.Random(11).randbytes(200_000)
if sys.argv[5:] == ["large"]:  # more than rings and buffers hold: the client has not ended when it is handed on
    NOISE *= 50
CAT = "/bin/cat"
EARLY = 150  # a number that is known before
LIBC = ctypes.CDLL(None)
FDOPEN = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_int, ctypes.c_char_p)(("fdopen", LIBC))
LIBC.fputs.argtypes = [ctypes.c_char_p, ctypes.c_void_p]
LIBC.fclose.argtypes = [ctypes.c_void_p]


def holder(channel):
    """Gets connections by SCM_RIGHTS and serves them."""
    while True:
        _, control, _, _ = channel.recvmsg(1, socket.CMSG_SPACE(4))
        if not control:
            return
        fds = array.array("i")
        fds.frombytes(control[0][2][:4])
        pid = os.fork()
        if pid == 0:
            os.dup2(fds[0], 0)
            os.dup2(fds[0], 1)
            os.execv(CAT, [CAT])
        os.close(fds[0])


def serve(how):
    channel = None
    if how == "rights":
        channel, theirs = socket.socketpair()
        if os.fork() == 0:
            channel.close()
            holder(theirs)
            os._exit(0)
        theirs.close()
    listener = socket.create_server(("127.0.0.1", 0), backlog=64)
    print(f"port {listener.getsockname()[1]}", flush=True)
    children = []
    if how == "early":
        actions = ctypes.create_string_buffer(256)
        LIBC.posix_spawn_file_actions_init(actions)
        for to in (0, 1):
            LIBC.posix_spawn_file_actions_adddup2(actions, EARLY, to)
    while True:
        s, _ = listener.accept()
        if how == "early":
            with s:
                s = socket.socket(fileno=os.dup2(s.fileno(), EARLY, inheritable=False))
        line = b""
        while not line.endswith(b"end\n"):
            byte = s.recv(1)
            if not byte:
                break
            line += byte
        if how == "popen":
            children.append(subprocess.Popen([CAT], stdin=s, stdout=s))
        elif how == "shell":
            children.append(subprocess.Popen("cat; true", shell=True, stdin=s, stdout=s))
        elif how == "spawn":
            fd = s.fileno()
            actions = [(os.POSIX_SPAWN_DUP2, fd, 0), (os.POSIX_SPAWN_DUP2, fd, 1)]
            os.posix_spawn(CAT, [CAT], os.environ, file_actions=actions)
        elif how == "early":
            words = (ctypes.c_char_p * 2)(CAT.encode(), None)
            environment = ctypes.c_void_p.in_dll(LIBC, "environ")
            LIBC.posix_spawn(ctypes.byref(ctypes.c_int()), CAT.encode(), actions, None, words, environment)
        elif how == "fork":
            if os.fork() == 0:
                os.dup2(s.fileno(), 0)
                os.dup2(s.fileno(), 1)
                os.execv(CAT, [CAT])
        elif how == "rights":
            channel.sendmsg([b"x"], [(socket.SOL_SOCKET, socket.SCM_RIGHTS,
                                      array.array("i", [s.fileno()]))])
        elif how == "end":
            s.sendall(b"that is all")
        elif how == "stream":
            stream = FDOPEN(s.detach(), b"r+")
            LIBC.fputs(b"that is all", stream)
            LIBC.fclose(stream)
        s.close()
        for c in children[:]:
            if c.poll() is not None:
                children.remove(c)


def client(port, n, lines):
    served, wrong = 0, []
    for k in range(n):
        try:
            with socket.create_connection(("127.0.0.1", port)) as s:
                s.settimeout(60)
                for i in range(lines):
                    s.sendall(b"line\n" if i + 1 < lines else b"end\n")
                if sys.argv[5:] == ["end"]:
                    got = b""
                    while part := s.recv(65536):
                        got += part
                    assert got == b"that is all", got
                else:
                    t = threading.Thread(target=send, args=(s,))
                    t.start()
                    got = bytearray()
                    while part := s.recv(65536):
                        got += part
                    t.join()
                    assert bytes(got) == NOISE, f"{len(got)} bytes"
            served += 1
        except (OSError, AssertionError) as e:
            wrong.append(f"{k}: {e!r}")
    print("result", json.dumps({"served": served, "wrong": wrong}), flush=True)


def send(s):
    try:
        s.sendall(NOISE)
        s.shutdown(socket.SHUT_WR)
    except OSError:
        pass


if sys.argv[1] == "serve":
    serve(sys.argv[2])
else:
    client(int(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4]))
