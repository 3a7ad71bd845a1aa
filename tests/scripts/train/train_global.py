"""Trains with GlobalBatches and FSDP2 at whatever world size it is started with, without dropout."""

from __future__ import annotations

import os
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.utils.data import Dataset

import holdfast


class Numbers(Dataset[tuple[int, torch.Tensor]]):
    def __len__(self) -> int:
        return 40

    def __getitem__(self, index: int) -> tuple[int, torch.Tensor]:
        return index, torch.randn(8, generator=torch.Generator().manual_seed(index))


def main() -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    out = Path(os.environ["GLOBAL_OUT"])
    out.mkdir(exist_ok=True)
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(8, 24), nn.GELU(), nn.Linear(24, 8))
    fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.9)
    run = holdfast.Run(run_dir="run", checkpoint_interval=0)
    run.track(model=model, optimizer=optimizer, schedule=schedule)
    log = (out / f"rank{dist.get_rank()}.log").open("w", buffering=1)
    batches = holdfast.GlobalBatches(Numbers(), 12, seed=2)
    for step, (ids, x) in run.steps(batches, until=int(os.environ["GLOBAL_UNTIL"])):
        loss = (model(x) - x).square().mean()
        loss.backward()
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        run.record(loss=loss, samples=ids)
        log.write(f"{step} {loss.item()} {ids.tolist()}\n")
    dist.destroy_process_group()
    log.close()
    # The model keeps its mesh's gloo group alive until the interpreter goes, and about once in a hundred
    # times on a busy machine a thread of that group then aborts the process, after all its work.
    os._exit(0)


if __name__ == "__main__":
    main()
