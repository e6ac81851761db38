"""raylets.py serve|load PORT DIR: two nodes of Ray on one machine; tasks, actors and objects between them."""
import hashlib
import os
import sys
import time

import ray
from ray.cluster_utils import Cluster

from common import Load, check

what, port, dir = sys.argv[1], int(sys.argv[2]), sys.argv[3]
if what == "serve":
    same = {"num_cpus": 2, "object_store_memory": 600 << 20, "include_dashboard": False}
    Cluster(
        initialize_head=True,
        head_node_args=dict(same, gcs_server_port=port, resources={"one": 100}, node_ip_address="127.0.0.1"),
    ).add_node(num_cpus=2, object_store_memory=600 << 20, resources={"two": 100}, node_ip_address="127.0.0.1")
    while True:
        time.sleep(60)


@ray.remote
def noise(size):
    data = os.urandom(size)
    return hashlib.sha256(data).digest() + data


@ray.remote
class Judge:
    def right(self, data):
        return hashlib.sha256(data[32:]).digest() == data[:32]


ray.init(address=f"127.0.0.1:{port}", log_to_driver=False)
judges = [Judge.options(resources={where: 1}).remote() for where in ("one", "two")]
load, moved, n = Load(dir), 0, 0
while not load.over():
    size = [1000, 200_000, 5_000_000, 100_000_000][n % 4]
    made = [noise.options(resources={where: 1}).remote(size) for where in ("two", "one")]
    check(all(ray.get([j.right.remote(m) for j, m in zip(judges, made)], timeout=60)))
    moved += 2 * size
    n += 1
load.done(moved / 1e6, "MB/s")
