"""cluster.py PORT DIR: a client of Dask: tasks whose arguments are on the other worker, and large results."""
import os
import sys

from distributed import Client

from common import Load, check, digest

port, dir = sys.argv[1], sys.argv[2]


def made(n, size):
    data = os.urandom(size)
    return digest(data) + data


def both(a, b):
    from hashlib import sha256

    return all(sha256(x[32:]).digest() == x[:32] for x in (a, b)) and a[32:] + b[32:]


made.__globals__["digest"] = digest
client = Client(f"tcp://127.0.0.1:{port}", timeout=60)
client.wait_for_workers(2)
client.upload_file(os.path.join(os.path.dirname(os.path.abspath(__file__)), "common.py"))
one, two = client.scheduler_info()["workers"]
load, moved, n = Load(dir), 0, 0
while not load.over():
    size = [1000, 200_000, 5_000_000, 30_000_000][n % 4]
    a = client.submit(made, n, size, workers=one, pure=False)
    b = client.submit(made, n, size, workers=two, pure=False)
    got = client.submit(both, a, b, workers=[one, two][n % 2], pure=False).result(60)
    check(got and len(got) == 2 * size)
    moved += 3 * size
    n += 1
load.done(moved / 1e6, "MB/s")
client.close()
