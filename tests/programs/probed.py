"""One connection with both ends here, busy all the time; what its options say, and how it ends.

    probed.py DIR    prints "options …" before the first byte and when DIR/asked exists, then "said ERROR" when
                     a packet filter has cut it, with a user time-out that it sets at last
"""
import errno
import select
import socket
import time

from ends import mark, marked

OPTIONS = [(socket.SOL_SOCKET, socket.SO_KEEPALIVE)] + [(socket.IPPROTO_TCP, o) for o in (4, 5, 6, 18)]

listener = socket.create_server(("127.0.0.1", 0))
a = socket.create_connection(listener.getsockname())
b, _ = listener.accept()
ends = [a, b]


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


options()
while not marked("asked"):
    turn()
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
