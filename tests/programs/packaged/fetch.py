"""Fetches files from one lasting connection each until a file exists, and compares every byte.

    fetch.py http PORT DIR      DIR/www/small and DIR/www/big, by HTTP
    fetch.py redis PORT DIR     a value of the size of DIR/www/big is set and got back
    fetch.py memcached PORT DIR the same, and many of the size of DIR/www/small; leaves their number
                                in DIR/rounds
"""
import http.client
import itertools
import os
import socket
import sys
import threading
import time

what, port, dir = sys.argv[1], int(sys.argv[2]), sys.argv[3]
content = {name: open(f"{dir}/www/{name}", "rb").read() for name in ("small", "big")}
wrong, rounds = [], []


def http_rounds():
    c = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    while True:
        for name in content:
            c.request("GET", "/" + name)
            yield c.getresponse().read() == content[name]


def redis_rounds():
    s = socket.create_connection(("127.0.0.1", port), timeout=60)
    answers = s.makefile("rb")
    big = content["big"]
    while True:
        s.sendall(b"*3\r\n$3\r\nSET\r\n$5\r\nnoise\r\n$%d\r\n%s\r\n" % (len(big), big))
        yield answers.readline() == b"+OK\r\n"
        s.sendall(b"*2\r\n$3\r\nGET\r\n$5\r\nnoise\r\n")
        yield int(answers.readline()[1:]) == len(big) and answers.read(len(big) + 2) == big + b"\r\n"


def memcached_rounds():
    s = socket.create_connection(("127.0.0.1", port), timeout=60)
    answers = s.makefile("rb")
    key = b"%d" % s.fileno()
    for k in itertools.count():
        value = content["small"] if k % 500 else content["big"]
        s.sendall(b"set %s 0 0 %d\r\n%s\r\n" % (key, len(value), value))
        yield answers.readline() == b"STORED\r\n"
        s.sendall(b"get %s\r\n" % key)
        head = b"VALUE %s 0 %d\r\n" % (key, len(value))
        yield answers.readline() == head and answers.read(len(value) + 7) == value + b"\r\nEND\r\n"


def fetch():
    try:
        kinds = {"http": http_rounds, "redis": redis_rounds, "memcached": memcached_rounds}
        for k, right in enumerate(kinds[what]()):
            if not right:
                raise ValueError("BYTES DIFFER")
            if os.path.exists(dir + "/stop"):
                break
            if what != "memcached":
                time.sleep(0.02)
        rounds.append(k)
    except Exception as e:
        wrong.append(repr(e))


threads = [threading.Thread(target=fetch) for _ in range(4 if what == "memcached" else 2)]
[t.start() for t in threads]
[t.join() for t in threads]
if wrong:
    sys.exit(f"fetch.py: {wrong}")
with open(dir + "/rounds", "w") as f:
    f.write(str(sum(rounds)))
