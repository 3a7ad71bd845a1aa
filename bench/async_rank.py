"""One of two ranks that save side by side, by Holdfast, by dcp.async_save, and by a bare copy.

`async_rank.py RANK WORLD PORT DIRECTORY MIB REPEAT [LOCAL]`. Rank 0 prints JSON: for every turn the seconds
for which each held training up (the slower rank's), and those until the checkpoint was complete. With LOCAL,
a directory in memory, Holdfast saves to a local tier there and nowhere else, and dcp.async_save is left out.

With a REPEAT of 0, the first saves of the process instead, after some steps and when all that is got ready
beside them is there: the first, and all others after it, in order.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

import holdfast

Timed = tuple[float, float]
PIECE_MIB = 64
"""Of a tensor, as of Linear(4096, 4096), which the benchmarks on a GPU have too. Smaller ones than 32 MiB the
C library may keep when they are freed, and then `dcp.async_save` is as fast as it finds them."""
STEPS = 4
"""Before the first save, where that is measured; the plan is made after two."""
READY = 120.0
"""Seconds within which all is ready then."""
LATER = 6
"""Saves after the first."""
WARM = 4
"""Saves that are not counted: two for the staging buffers, four for the slots of a local tier."""


class Sharded(nn.Module):
    """`size_mib` MiB a rank, sharded over all ranks."""

    def __init__(self, size_mib: int, rank: int, world: int) -> None:
        super().__init__()
        mesh = init_device_mesh("cpu", (world,))
        for number in range(max(1, size_mib // PIECE_MIB)):
            generator = torch.Generator().manual_seed(7 + 1000 * rank + number)
            local = torch.empty(PIECE_MIB * 256, 1024).uniform_(-1, 1, generator=generator)
            whole = DTensor.from_local(local, mesh, [Shard(0)])
            self.register_parameter(f"large_{number:03d}", nn.Parameter(whole, requires_grad=False))


def slowest(seconds: float) -> float:
    value = torch.tensor([seconds], dtype=torch.float64)
    dist.all_reduce(value, dist.ReduceOp.MAX)
    return float(value)


def timed(begin: Callable[[], object], end: Callable[[], object]) -> Timed:
    if dist.get_rank() == 0:
        os.sync()  # nobody pays for what was left to write back before
    dist.barrier()
    started = time.perf_counter()
    begin()
    blocked = time.perf_counter() - started
    end()
    return slowest(blocked), slowest(time.perf_counter() - started)


def local_tier(directory: str, *, every: int) -> dict[str, object]:
    """Settings for local saves at the end of every so many steps; 0: only when they are called for."""
    return {
        "checkpoint_non_persistent_ckpt_type": "local",
        "checkpoint_non_persistent_local_ckpt_dir": directory,
        "checkpoint_non_persistent_save_interval": every,
    }


def main(
    rank: int, world: int, port: int, directory: Path, size_mib: int, repeat: int, local: str = ""
) -> None:
    torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // world))  # a rank's share of the cores
    warnings.filterwarnings("ignore")
    address = f"tcp://127.0.0.1:{port}"
    dist.init_process_group("gloo", init_method=address, rank=rank, world_size=world)
    model = Sharded(size_mib, rank, world)
    # Into shared memory, as staging memory is.
    pairs = [(p.to_local(), torch.zeros_like(p.to_local()).share_memory_()) for p in model.parameters()]  # type: ignore[attr-defined]
    run = holdfast.Run(
        run_dir=str(directory / "run"),
        checkpoint_interval=0,
        checkpoint_save_at_end=False,
        checkpoint_async_save=True,
        checkpoint_keep_last=2,
        **(local_tier(local, every=1 if repeat else 0) if local else {}),
    )
    run.track(model=model)
    run.start()
    group = dist.new_group(backend="gloo")

    def save() -> None:
        if local and repeat == 0:
            run._session.saving.scheduled_locally()
        elif local:
            run.begin_step()
            run.end_step()
        else:
            run.save(wait=False)

    def ours() -> Timed:
        return timed(save, run.wait_for_saves)

    def theirs() -> Timed:
        target = directory / "dcp"
        pending = []

        def begin() -> None:
            state = {"model": model.state_dict()}
            pending.append(dcp.async_save(state, checkpoint_id=target, process_group=group))

        try:
            return timed(begin, lambda: pending[0].result())
        finally:
            dist.barrier()
            if rank == 0:
                shutil.rmtree(target)

    def bare() -> Timed:
        def copy() -> None:
            for source, target in pairs:
                target.copy_(source)

        return timed(copy, lambda: None)

    if repeat == 0:
        steps = []
        for _ in range(STEPS):
            started = time.perf_counter()
            run.begin_step()
            run.end_step()
            steps.append(slowest(time.perf_counter() - started))
        started = time.perf_counter()
        while not run._session.saving.ready:
            if time.perf_counter() - started > READY:
                raise RuntimeError(f"staging memory was not there after {READY:g} s")
            time.sleep(0.01)
        taken = slowest(time.perf_counter() - started)
        first = [(max(steps), taken), *(ours() for _ in range(1 + LATER))]
        run.close()
        dist.destroy_process_group()
        if rank == 0:
            print(json.dumps({"ours": first}))
        return
    found: dict[str, list[Timed]] = {"ours": [], "dcp": [], "copy": []}
    for turn in range(repeat + WARM):
        for name, measure in (("ours", ours), ("dcp", theirs), ("copy", bare)):
            if name == "dcp" and local:
                continue
            value = measure()
            if turn >= WARM:  # all staging memory is in use by then: the steady state
                found[name].append(value)
    run.close()
    dist.destroy_process_group()
    if rank == 0:
        print(json.dumps(found))


if __name__ == "__main__":
    number, world, port, directory, size, repeat, *local = sys.argv[1:]
    main(int(number), int(world), int(port), Path(directory), int(size), int(repeat), *local)
