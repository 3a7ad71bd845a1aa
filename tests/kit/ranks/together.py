"""A function on several ranks at once, as forks of the test's process with a gloo group between them."""

from __future__ import annotations

import json
import os
import sys
import traceback
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from kit.harness import await_child

LIMIT = 60


def together(place: Path, world: int, work: Callable[[int], Any]) -> list[Any]:
    """What `work(rank)` returned on each rank, as JSON has it; fails the test if one of them failed."""
    torch.set_num_threads(1)  # a fork has none of its parent's threads
    children = []
    for rank in range(world):
        sys.stdout.flush()
        pid = os.fork()
        if pid == 0:
            code = 70
            try:
                store = dist.FileStore(str(place / "store"), world)
                dist.init_process_group(
                    "gloo", store=store, rank=rank, world_size=world, timeout=timedelta(seconds=LIMIT)
                )
                (place / f"rank{rank}.json").write_text(json.dumps(work(rank)))
                dist.barrier()
                code = 0
            except BaseException:  # noqa: BLE001 - the child must end here, whatever happened
                traceback.print_exc()
            finally:
                sys.stderr.flush()
                os._exit(code)
        children.append(pid)
    codes = [await_child(pid, 2 * LIMIT) for pid in children]
    assert codes == [0] * world
    return [json.loads((place / f"rank{rank}.json").read_text()) for rank in range(world)]
