"""A peer daemon that says whatever it is told to: the remote end of a control channel.

    peer.py dial HOST SERVER CA CERT KEY MESSAGE...
    peer.py serve HOST CA CERT KEY MESSAGE...
    peer.py silent HOST NUMBER

The last one keeps so many connections that say nothing, and makes a new one for each that ends: a
hundred a second at most (whoever makes more keeps those from its own address from coming in time).

Each MESSAGE is sent as it is (JSON, or `raw:HEX` for bytes without a length; `plain:HEX` before
TLS, with nothing after it). What comes back is printed, one line each, then `end` and why.
"""

import select
import socket
import ssl
import struct
import sys
import time

PORT = 7471
PAUSE = 0.01


def context(purpose, ca, cert, key):
    c = ssl.SSLContext(purpose)
    c.minimum_version = ssl.TLSVersion.TLSv1_3
    c.load_verify_locations(ca)
    c.load_cert_chain(cert, key)
    c.verify_mode = ssl.CERT_REQUIRED
    return c


def exact(s, n):
    got = b""
    while len(got) < n:
        part = s.recv(n - len(got))
        if not part:
            raise EOFError("closed")
        got += part
    return got


def talk(s, messages):
    try:
        for m in messages:
            if m.startswith("raw:"):
                s.sendall(bytes.fromhex(m[4:]))
            else:
                s.sendall(struct.pack(">I", len(m.encode())) + m.encode())
        while True:
            (n,) = struct.unpack(">I", exact(s, 4))
            print("got", exact(s, n).decode(), flush=True)
    except (OSError, EOFError) as e:
        print("end", e, flush=True)


def silent(host, number):
    poll = select.poll()
    kept = {}
    made = 0
    while True:
        while len(kept) < number:
            time.sleep(PAUSE)
            s = socket.create_connection((host, PORT), 10)
            poll.register(s, select.POLLIN | select.POLLHUP)
            kept[s.fileno()] = s
            made += 1
            if made == 2 * number:
                print("full", flush=True)
        for fd, _ in poll.poll(1000):
            poll.unregister(fd)
            kept.pop(fd).close()


def main():
    what, host, *rest = sys.argv[1:]
    if what == "plain":
        s = socket.create_connection((host, PORT), 10)
        s.settimeout(15)
        s.sendall(bytes.fromhex(rest[0]))
        try:
            while s.recv(4096):
                pass
            print("end closed", flush=True)
        except OSError as e:
            print("end", e, flush=True)
        return
    if what == "silent":
        silent(host, int(rest[0]))
    if what == "dial":
        server, ca, cert, key, *messages = rest
        c = context(ssl.PROTOCOL_TLS_CLIENT, ca, cert, key)
        raw = socket.create_connection((host, PORT), 10)
        raw.settimeout(30)
        try:
            s = c.wrap_socket(raw, server_hostname=server)
        except OSError as e:
            print("end", e, flush=True)
            return
        print("connected", flush=True)
        talk(s, messages)
        return
    ca, cert, key, *messages = rest
    c = context(ssl.PROTOCOL_TLS_SERVER, ca, cert, key)
    listener = socket.create_server((host, PORT))
    print("listening", flush=True)
    while True:
        raw, _ = listener.accept()
        raw.settimeout(30)
        try:
            talk(c.wrap_socket(raw, server_side=True), messages)
        except OSError as e:
            print("end", e, flush=True)


main()
