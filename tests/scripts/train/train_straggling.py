"""A rank of `straggling.train`: train_straggling.py DIR HOW SLOW DELAY UNTIL [key=value …]

SLOW: a rank, or `device-1` for whoever runs on a device of that name.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from holdfast.cluster.devices import own_place
from kit.ranks.straggling import train

directory, how, slow, delay, until, *given = sys.argv[1:]
os.environ.update({f"HOLDFAST_{key}".upper(): value for key, value in (pair.split("=", 1) for pair in given)})
torch.set_num_threads(1)
dist.init_process_group("gloo")
rank = dist.get_rank()
device = own_place("").device
bad = slow in (str(rank), f"device-{device}")
reached = train(
    rank,
    Path(directory),
    how,
    slow=rank if bad else -1,
    delay=float(delay),
    until=int(until),
    ddp=True,
)
print(f"rank {rank} done at {reached}", flush=True)
dist.destroy_process_group()
