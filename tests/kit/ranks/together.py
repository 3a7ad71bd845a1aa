"""A function on several ranks at once, as forks of the test's process with a gloo group between them."""

from __future__ import annotations

import json
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from kit.harness import await_child
from kit.tiny import start_fork

LIMIT = 60


def together(place: Path, world: int, work: Callable[[int], Any]) -> list[Any]:
    """What `work(rank)` returned on each rank, as JSON has it; fails the test if one of them failed."""
    torch.set_num_threads(1)  # a fork has none of its parent's threads

    def grouped(rank: int) -> None:
        torch.set_num_threads(1)  # its own pool, before two threads make one at once and one gets none
        store = dist.FileStore(str(place / "store"), world)
        limit = timedelta(seconds=LIMIT)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=world, timeout=limit)
        (place / f"rank{rank}.json").write_text(json.dumps(work(rank)))
        dist.barrier()

    children = [start_fork(partial(grouped, rank)) for rank in range(world)]
    codes = [await_child(pid, 2 * LIMIT) for pid in children]
    assert codes == [0] * world
    return [json.loads((place / f"rank{rank}.json").read_text()) for rank in range(world)]
