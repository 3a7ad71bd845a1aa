"""Trains with GlobalBatches and FSDP2 at whatever world size it has; each attempt may be held before a step.

Started with `1:7,2:11` and a log: attempt 1 stays before step 7, attempt 2 before step 11, until it is ended;
all others train to step LOCAL_UNTIL. Who stays says so with `<attempt> <rank> <world> held`, and every step
leaves `<attempt> <rank> <world> <step> <loss> <ids>`. It is the training of `local_ranks.py`, bit by bit.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.utils.data import Dataset

import holdfast
from holdfast.record.launches import LaunchInfo

PATIENCE = 60.0


class Numbers(Dataset[tuple[int, torch.Tensor]]):
    def __len__(self) -> int:
        return 20

    def __getitem__(self, index: int) -> tuple[int, torch.Tensor]:
        return index, torch.randn(6, generator=torch.Generator().manual_seed(index))


def main(plan: str, log: str) -> None:
    torch.set_num_threads(1)
    launch = LaunchInfo.from_environment(os.environ)
    assert launch is not None
    held = dict(tuple(map(int, part.split(":"))) for part in plan.split(",") if part)
    dist.init_process_group("gloo")
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(6, 24), nn.GELU(), nn.Linear(24, 6))
    fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    run = holdfast.Run()
    run.track(model=model, optimizer=optimizer)
    who = f"{launch.attempt} {dist.get_rank()} {dist.get_world_size()}"
    with Path(log).open("a", buffering=1) as file:
        batches = holdfast.GlobalBatches(Numbers(), 12, seed=2)
        for step, (ids, x) in run.steps(batches, until=int(os.environ["LOCAL_UNTIL"])):
            if held.get(launch.attempt) == step:
                file.write(f"{who} held\n")
                time.sleep(PATIENCE)  # ended long before, or else the test is told
                raise TimeoutError(f"held before step {step} for {PATIENCE:g} s, and nobody came")
            loss = (model(x) - x).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            run.record(loss=loss, samples=ids)
            file.write(f"{who} {step} {loss.item().hex()} {ids.tolist()}\n")
    dist.destroy_process_group()
    # The model keeps its mesh's gloo group alive until the interpreter goes, and about once in a hundred
    # times on a busy machine a thread of that group then aborts the process, after all its work.
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    main(*sys.argv[1:3])
