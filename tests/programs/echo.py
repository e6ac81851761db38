"""An echo server and its client, with every payload compared and hashed.

    echo.py serve MODE HOST           MODE: threads fork vanish poll select epoll edge; prints
                                      "port N"
    echo.py client HOST PORT CONNS ROUNDS [UNTIL]
                                      one thread per connection; ROUNDS messages each, or, with
                                      UNTIL, until that file exists; prints "result JSON"

The client sends a message, reads it back and compares; the calls it uses change every round. At
its end it half-closes; the server then answers with the SHA-256 of all it received.
"""
import hashlib
import json
import os
import random
import select
import selectors
import socket
import sys
import threading

SIZES = (1, 2, 13, 64, 100, 1000, 4096, 4097, 20000, 70000, 200000)


# ---- server ---------------------------------------------------------------------------------

def blocking(conn):
    with conn:
        h = hashlib.sha256()
        while True:
            data = conn.recv(65536)
            if not data:
                break
            h.update(data)
            conn.sendall(data)
        conn.sendall(h.hexdigest().encode())


def serve_threads(listener):
    while True:
        conn, _ = listener.accept()
        threading.Thread(target=blocking, args=(conn,), daemon=True).start()


def serve_fork(listener, vanish=False):
    while True:
        conn, _ = listener.accept()
        if os.fork() == 0:
            listener.close()
            if vanish:
                os.dup(conn.fileno())  # never closed but by the kernel
            blocking(conn)
            os._exit(0)
        conn.close()


class State:
    def __init__(self):
        self.hash, self.out, self.eof = hashlib.sha256(), bytearray(), False


def step(conn, st, readable):
    """Non-blocking progress. Returns False when the connection is finished. A client that was
    killed is no concern of the others: its reset ends its own connection only."""
    try:
        return progress(conn, st, readable)
    except ConnectionError:
        return False


def progress(conn, st, readable):
    if readable and not st.eof:
        try:
            data = conn.recv(65536)
            if data:
                st.hash.update(data)
                st.out += data
            else:
                st.eof = True
                st.out += st.hash.hexdigest().encode()
        except BlockingIOError:
            pass
    if st.out:
        try:
            del st.out[:conn.send(st.out)]
        except BlockingIOError:
            pass
    return not (st.eof and not st.out)


def serve_selector(listener, selector):
    listener.setblocking(False)
    selector.register(listener, selectors.EVENT_READ, None)
    while True:
        for key, mask in selector.select():
            if key.data is None:
                conn, _ = listener.accept()
                conn.setblocking(False)
                selector.register(conn, selectors.EVENT_READ, State())
                continue
            conn, st = key.fileobj, key.data
            if not step(conn, st, mask & selectors.EVENT_READ):
                selector.unregister(conn)
                conn.close()
                continue
            # Stop reading while much is unsent, as servers do: the mask changes all the time.
            want = (selectors.EVENT_READ if not st.eof and len(st.out) < 1 << 20 else 0) | \
                   (selectors.EVENT_WRITE if st.out else 0)
            if want != key.events:
                selector.modify(conn, want, st)


def serve_edge(listener):
    """Edge-triggered epoll: an event must be followed until EAGAIN, and none may be lost."""
    ep = select.epoll()
    listener.setblocking(False)
    ep.register(listener, select.EPOLLIN)
    conns = {}
    while True:
        for fd, mask in ep.poll():
            if fd == listener.fileno():
                conn, _ = listener.accept()
                conn.setblocking(False)
                conns[conn.fileno()] = conn, State()
                ep.register(conn, select.EPOLLIN | select.EPOLLOUT | select.EPOLLRDHUP | select.EPOLLET)
                continue
            conn, st = conns[fd]
            while not st.eof:
                try:
                    data = conn.recv(65536)
                except BlockingIOError:
                    break
                if data:
                    st.hash.update(data)
                    st.out += data
                else:
                    st.eof = True
                    st.out += st.hash.hexdigest().encode()
            while st.out:
                try:
                    del st.out[:conn.send(st.out)]
                except BlockingIOError:
                    break
            if st.eof and not st.out:
                ep.unregister(conn)
                del conns[fd]
                conn.close()


def serve(mode, host):
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.create_server((host, 0), family=family, backlog=128)
    print("port", listener.getsockname()[1], flush=True)
    if mode == "threads":
        serve_threads(listener)
    elif mode in ("fork", "vanish"):
        import signal
        signal.signal(signal.SIGCHLD, signal.SIG_IGN)
        serve_fork(listener, mode == "vanish")
    elif mode == "edge":
        serve_edge(listener)
    else:
        kind = {"epoll": selectors.EpollSelector, "poll": selectors.PollSelector,
                "select": selectors.SelectSelector}[mode]
        serve_selector(listener, kind())


# ---- client ---------------------------------------------------------------------------------

def all_of(call, data):
    """Repeats a call that may send a part only."""
    view = memoryview(data)
    while view:
        view = view[call(view):]


def send(sock, data, how):
    fd = sock.fileno()
    how %= 6
    if how == 0:
        sock.sendall(data)
    elif how == 1:
        all_of(sock.send, data)
    elif how == 2:
        all_of(lambda v: os.write(fd, v), data)
    elif how == 3:
        half = len(data) // 2
        all_of(lambda v: os.writev(fd, [v[:half], v[half:]]), data)
    elif how == 4:
        all_of(lambda v: sock.sendmsg([v[:1], v[1:]]), data)
    else:
        # sendto() with an address is allowed on a connected socket.
        all_of(lambda v: sock.sendto(v, sock.getpeername()), data)


def receive(sock, n, how):
    fd = sock.fileno()
    how %= 7
    out = bytearray()
    while len(out) < n:
        want = n - len(out)
        if how == 0:
            got = sock.recv(want)
        elif how == 1:
            buf = bytearray(want)
            got = buf[:sock.recv_into(buf)]
        elif how == 2:
            got = os.read(fd, want)
        elif how == 3:
            a, b = bytearray(want // 2), bytearray(want - want // 2)
            k = os.readv(fd, [a, b])
            got = (a + b)[:k]
        elif how == 4:
            got = sock.recvmsg(want)[0]
        elif how == 5:
            got = sock.recvfrom(want)[0]
        else:
            peeked = sock.recv(min(want, 50), socket.MSG_PEEK)
            got = sock.recv(want, socket.MSG_WAITALL)
            if not got.startswith(peeked):
                raise AssertionError("peeked bytes differ from those read")
        if not got:
            raise EOFError(f"{len(out)} of {n}")
        out += got
    return out


class Client(threading.Thread):
    def __init__(self, host, port, seed, rounds, until):
        super().__init__()
        self.to, self.random, self.rounds, self.until = (host, port), random.Random(seed), rounds, until
        self.bytes, self.done, self.error = 0, 0, None

    def run(self):
        try:
            self.work()
        except (OSError, EOFError, AssertionError) as e:
            self.error = f"{e!r} in round {self.done} after {self.bytes} bytes"

    def work(self):
        h = hashlib.sha256()
        with socket.create_connection(self.to) as sock:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            while not os.path.exists(self.until) if self.until else self.done < self.rounds:
                data = self.random.randbytes(self.random.choice(SIZES))
                # Servers that answer before they read on need a reader: big messages in pieces.
                send(sock, data, self.done)
                back = receive(sock, len(data), self.random.randrange(100))
                if back != data:
                    raise AssertionError("payload differs")
                h.update(data)
                self.bytes += len(data)
                self.done += 1
            sock.shutdown(socket.SHUT_WR)
            theirs = receive(sock, 64, 0).decode()
            if theirs != h.hexdigest():
                raise AssertionError("hash differs")
            if sock.recv(1):
                raise AssertionError("bytes after the end")


def client(host, port, conns, rounds, until):
    threads = [Client(host, port, i, rounds, until) for i in range(conns)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    errors = [t.error for t in threads if t.error]
    print("result", json.dumps({"bytes": sum(t.bytes for t in threads),
                                "rounds": sum(t.done for t in threads), "errors": errors}), flush=True)
    sys.exit(1 if errors else 0)


a = sys.argv
if a[1] == "serve":
    serve(a[2], a[3])
else:
    client(a[2], int(a[3]), int(a[4]), int(a[5]), a[6] if len(a) > 6 else None)
