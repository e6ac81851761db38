"""How a connection is closed, and what the kernel knows of it then.

    closes.py serve HOST                  prints "port N", serves one connection, prints "got BYTES eof|reset"
    closes.py WAY HOST PORT GATE DONE     sends until the file GATE exists, then pauses until it is gone; sends once
                                          more and closes in this way; prints "connected", "paused" and
                                          "result {json}"; ends when the file DONE exists

Nothing here knows about Underpass.
"""
import ctypes
import json
import mmap
import os
import signal
import socket
import struct
import sys
import time

LAST = 30_000
#: What the other end's kernel has not acknowledged: ESTABLISHED, FIN_WAIT1, CLOSE_WAIT, LAST_ACK, CLOSING.
OUTSTANDING = {1, 4, 8, 9, 11}


def serve(host):
    listener = socket.create_server((host, 0))
    print("port", listener.getsockname()[1], flush=True)
    sock, _ = listener.accept()
    got, end = 0, "eof"
    try:
        while piece := sock.recv(50_000):
            got += len(piece)
    except ConnectionResetError:
        end = "reset"
    print("got", got, end, flush=True)


def state(port, peer):
    """Of the connection between these ports, as the kernel shows it; 0: there is none."""
    with open("/proc/net/tcp") as f:
        for line in list(f)[1:]:
            w = line.split()
            if [int(a.split(":")[1], 16) for a in w[1:3]] == [port, peer]:
                return int(w[3], 16)
    return 0


def raw_close(fd):
    """An inlined system call."""
    page = mmap.mmap(-1, mmap.PAGESIZE, prot=mmap.PROT_READ | mmap.PROT_WRITE | mmap.PROT_EXEC)
    page.write(bytes.fromhex("b803000000 0f05 c3"))  # mov eax, 3; syscall; ret
    code = ctypes.c_char.from_buffer(page)
    assert ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_int)(ctypes.addressof(code))(fd) == 0


def close(way, sock):
    fd = sock.detach()
    if way == "dup2":
        spare = os.open("/dev/null", os.O_RDONLY)
        os.dup2(spare, fd)
    elif way == "range":
        os.closerange(fd, fd + 10)
    elif way == "raw":
        raw_close(fd)
        os.open("/dev/null", os.O_RDONLY)  # keeps the number, which a hook could find again
    elif way == "exit":
        os._exit(0)
    elif way == "shut":
        # (Python's own object is gone.)
        assert ctypes.CDLL(None).shutdown(fd, socket.SHUT_WR) == 0
    else:
        if way == "nonblocking":
            os.set_blocking(fd, False)
        os.close(fd)


def run(way, host, port, gate, done):
    sock = socket.create_connection((host, port))
    seconds = {"timeout": 1, "raw": 0}.get(way, 600)
    if seconds:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, seconds))
    print("connected", flush=True)
    sent = 0
    while not os.path.exists(gate):
        sock.sendall(bytes(3000))
        sent += 3000
        time.sleep(0.02)
    own = sock.getsockname()[1]
    print("paused", flush=True)
    while os.path.exists(gate):
        time.sleep(0.02)
    sock.sendall(bytes(LAST))
    sent += LAST
    handled = []
    if way == "signal":
        signal.signal(signal.SIGALRM, lambda *_: handled.append(1))
        signal.siginterrupt(signal.SIGALRM, False)
        signal.setitimer(signal.ITIMER_REAL, 0.5, 0.5)  # (again: the first one may come before the close)
    begin = time.monotonic()
    close(way, sock)
    took, now = time.monotonic() - begin, state(own, port)
    signal.setitimer(signal.ITIMER_REAL, 0)
    print("result", json.dumps(dict(sent=sent, took=took, outstanding=now in OUTSTANDING, handled=len(handled))), flush=True)
    while not os.path.exists(done):
        time.sleep(0.02)
    os._exit(0)


if sys.argv[1] == "serve":
    serve(sys.argv[2])
else:
    run(sys.argv[1], sys.argv[2], int(sys.argv[3]), *sys.argv[4:])
