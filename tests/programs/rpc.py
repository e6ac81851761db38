"""gRPC without generated code: unary calls and streams of noise, each answer checked by its hash.

    rpc.py serve HOST [PORT]        prints "port N"
    rpc.py call HOST PORT SECONDS FILE
                                    prints "result {...}", and ends when FILE exists
    rpc.py load HOST PORT DIR       as `packaged.sh`
"""
import hashlib
import json
import os
import random
import sys
import time
from concurrent import futures

import grpc

BIG = [("grpc.max_receive_message_length", -1), ("grpc.max_send_message_length", -1)]


def digest(data):
    return hashlib.sha256(data).digest()


class Service(grpc.GenericRpcHandler):
    def service(self, call):
        return {
            "/s/echo": grpc.unary_unary_rpc_method_handler(lambda data, _: digest(data) + data),
            "/s/up": grpc.stream_unary_rpc_method_handler(self.up),
            "/s/down": grpc.unary_stream_rpc_method_handler(self.down),
            "/s/both": grpc.stream_stream_rpc_method_handler(lambda parts, _: (digest(p) + p for p in parts)),
        }.get(call.method)

    def up(self, parts, _):
        whole = hashlib.sha256()
        for p in parts:
            whole.update(p)
        return whole.digest()

    def down(self, ask, _):
        n, size = map(int, ask.split())
        for _ in range(n):
            p = os.urandom(size)
            yield digest(p) + p


def serve(host, port=0):
    server = grpc.server(futures.ThreadPoolExecutor(8), options=BIG)
    server.add_generic_rpc_handlers((Service(),))
    port = server.add_insecure_port(f"{host}:{port}")
    server.start()
    print("port", port, flush=True)
    server.wait_for_termination()


def checked(answer):
    assert answer[:32] == digest(answer[32:]), "BYTES DIFFER"
    return answer[32:]


def rounds(channel, rng):
    """One of each kind; bytes moved."""
    size = rng.choice([0, 1, 100, 1000, 10_000, 100_000, 4_000_000])
    noise = os.urandom(size)
    assert checked(channel.unary_unary("/s/echo")(noise, timeout=60)) == noise
    parts = [os.urandom(rng.randrange(1, 60_000)) for _ in range(20)]
    assert channel.stream_unary("/s/up")(iter(parts), timeout=60) == digest(b"".join(parts))
    back = [checked(p) for p in channel.stream_stream("/s/both")(iter(parts), timeout=60)]
    assert back == parts, "BYTES DIFFER"
    n, size = rng.randrange(1, 20), rng.randrange(1, 100_000)
    got = [checked(p) for p in channel.unary_stream("/s/down")(f"{n} {size}".encode(), timeout=60)]
    assert [len(p) for p in got] == [size] * n
    return 2 * len(noise) + 3 * sum(map(len, parts)) + n * size


def call(host, port, seconds, file):
    rng = random.Random(7)
    moved = calls = 0
    end = time.monotonic() + float(seconds)
    with grpc.insecure_channel(f"{host}:{port}", options=BIG) as channel:
        grpc.channel_ready_future(channel).result(20)
        while time.monotonic() < end:
            moved += rounds(channel, rng)
            calls += 4
        print("result", json.dumps({"bytes": moved, "calls": calls, "version": grpc.__version__}), flush=True)
        while not os.path.exists(file):  # the test looks at the rows before the end
            time.sleep(0.01)


def load(host, port, dir):
    rng = random.Random(7)
    moved, begin = 0, time.monotonic()
    with grpc.insecure_channel(f"{host}:{port}", options=BIG) as channel:
        grpc.channel_ready_future(channel).result(20)
        open(dir + "/begun", "w").close()
        while not os.path.exists(dir + "/stop"):
            moved += rounds(channel, rng)
    print("rate", round(moved / (time.monotonic() - begin) / 1e6, 1), "MB/s")
    print("ok")


if __name__ == "__main__":
    {"serve": serve, "call": call, "load": load}[sys.argv[1]](*sys.argv[2:])
