"""The servers of handovers.py that are in Python: they hand connections to each other."""
import multiprocessing
import os
import socket
import threading
import time


def seconds(n):
    end = time.monotonic() + n
    while time.monotonic() < end:
        yield


def in_thread(f, *args):
    threading.Thread(target=f, args=args, daemon=True).start()


def answer(conn, times=iter(bool, True)):
    """Echoes; True if it was left before the end."""
    conn.settimeout(None)
    for _ in times:
        b = conn.recv(65536)
        if not b:
            conn.close()
            return False
        conn.sendall(b)
    return True


def answers(come):
    while conn := come():
        in_thread(answer, conn)


def received(unix):
    fds = socket.recv_fds(unix, 1, 1)[1]
    return socket.socket(fileno=fds[0]) if fds else None


def give(unix, conn, how_long, kept=0):
    if answer(conn, seconds(how_long)):
        socket.send_fds(unix, [b"x"], [conn.fileno()])
        time.sleep(kept)
        conn.close()


def turns(unix):
    """Gets connections, and hands each back after a while."""
    while conn := received(unix):
        in_thread(give, unix, conn, 0.4)


def hand(port, how):
    """Accepts, and hands on to a worker that is there already."""
    ours, theirs = socket.socketpair()
    if os.fork() == 0:
        ours.close()
        turns(theirs) if how == "back" else answers(lambda: received(theirs))
        os._exit(0)
    theirs.close()
    if how == "back":
        in_thread(turns, ours)
    with socket.create_server(("127.0.0.1", port)) as s:
        while True:
            in_thread(give, ours, s.accept()[0], 0 if how == "at-once" else 1, how == "kept")


def hand_by_multiprocessing(port, how):
    context = multiprocessing.get_context("fork" if how == "pipe" else how)
    ours, theirs = context.Pipe()
    if how == "pipe":
        context.Process(target=answers, args=(theirs.recv,), daemon=True).start()
    with socket.create_server(("127.0.0.1", port)) as s:
        while True:
            with s.accept()[0] as conn:
                if how == "pipe":
                    ours.send(conn)
                else:
                    context.Process(target=answer, args=(conn,), daemon=True).start()
