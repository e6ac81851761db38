"""One connection with both ends here, busy all the time; what its options say, and how it ends.

    probed.py DIR    prints "options …" before the first byte and when DIR/asked exists, then "said ERROR" when
                     a packet filter has cut it, with a user time-out that it sets at last
    probed.py asleep DIR    two connections, each of whose ends is waited for when DIR/asked exists, by recv, poll,
                     select and epoll_wait; prints "woken", and which, when DIR/back exists
"""
import errno
import select
import socket
import sys
import threading
import time

from ends import await_mark, mark, marked

OPTIONS = [(socket.SOL_SOCKET, socket.SO_KEEPALIVE)] + [(socket.IPPROTO_TCP, o) for o in (4, 5, 6, 18)]

listener = socket.create_server(("127.0.0.1", 0))
ends = []
for _ in range(2 if "asleep" in sys.argv else 1):
    ends += [socket.create_connection(listener.getsockname()), listener.accept()[0]]


def options():
    print("options", [[s.getsockopt(*o) for o in OPTIONS] for s in ends], flush=True)


def turn():
    """Each end sends, and takes what there is."""
    for s in ends:
        s.send(bytes(64), socket.MSG_DONTWAIT)
    for s in ends:
        if select.select([s], [], [], 0)[0]:
            s.recv(1 << 16, socket.MSG_DONTWAIT)
    time.sleep(0.001)


def by_recv(sock):
    sock.recv(1)


def by_select(sock):
    select.select([sock], [], [])


def by_poll(sock):
    p = select.poll()
    p.register(sock, select.POLLIN)
    p.poll()


def by_epoll(sock):
    with select.epoll() as p:
        p.register(sock, select.EPOLLIN)
        p.poll()


def asleep():
    """The last bytes are taken; then each end is waited for."""
    turn()
    turn()
    ways = {"recv": by_recv, "poll": by_poll, "select": by_select, "epoll": by_epoll}
    woken = []

    def waits(how, sock):
        ways[how](sock)
        woken.append(how)

    all_of_them = [threading.Thread(target=waits, args=way) for way in zip(ways, ends)]
    for t in all_of_them:
        t.start()
    mark("cut")
    await_mark("back")
    assert not woken, woken
    for s in ends:
        s.send(b"x")
    for t in all_of_them:
        t.join()
    print("woken", *sorted(woken), flush=True)
    sys.exit()


options()
while not marked("asked"):
    turn()
if "asleep" in sys.argv:
    asleep()
options()
for s in ends:
    s.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 3000)
for _ in range(300):
    turn()
mark("cut")
try:
    while True:
        turn()
except OSError as e:
    print("said", errno.errorcode[e.errno], flush=True)
