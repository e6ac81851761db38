"""group.py RANK PORT DIR: two ranks reduce and broadcast tensors until a file exists; rank 1 is the load."""
import datetime
import sys

import torch
import torch.distributed as dist

from common import Load, check

rank, port, dir = int(sys.argv[1]), sys.argv[2], sys.argv[3]
dist.init_process_group(
    "gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=2, timeout=datetime.timedelta(seconds=120)
)
load = Load(dir) if rank else None
go, moved = torch.ones(1), 0
while True:
    if load and load.over():
        go[0] = 0
    dist.broadcast(go, 1)
    if not go[0]:
        break
    for size in (100, 10_000, 1_000_000):
        t = torch.arange(size, dtype=torch.float64) + rank
        dist.all_reduce(t)
        check(torch.equal(t, 2 * torch.arange(size, dtype=torch.float64) + 1))
        moved += 16 * size
        noise = torch.randint(0, 1 << 30, (size,), generator=torch.Generator().manual_seed(size))
        got = noise.clone() if rank == 0 else torch.zeros_like(noise)
        dist.broadcast(got, 0)
        check(torch.equal(got, noise))
        moved += 8 * size
if load:
    load.done(moved / 1e6, "MB/s")
