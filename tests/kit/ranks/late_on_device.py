"""Two ranks that share one CUDA device, over gloo; the second is late amid its forward. A process each."""

from __future__ import annotations

import time
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

import holdfast

LIMIT = 240.0
STEPS = 60


def named_by_rank_0(rank: int, place: str, late: float, device: str = "cuda:0") -> None:
    """Trains, and leaves in `place` whom rank 0 has named, a line each."""
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        store=dist.FileStore(f"{place}/store", 2),
        rank=rank,
        world_size=2,
        timeout=timedelta(seconds=LIMIT / 2),
    )
    where = torch.device(device)
    told: list[str] = []
    first, second = nn.Linear(64, 64).to(where), nn.Linear(64, 64).to(where)
    parameters = [*first.parameters(), *second.parameters()]
    optimizer = torch.optim.SGD(parameters, lr=0.01)
    batch = torch.ones(8, 64, device=where)
    detector = holdfast.StragglerDetector(
        optimizers=[optimizer],
        device=where,
        node="here",
        on_found=lambda named: told.append(named.describe()),
        report_time_interval=0.5,
    )
    for _ in range(STEPS):
        detector.begin_step()
        with detector.compute():
            middle = first(batch)
            if rank == 1:
                time.sleep(late)
            shared = middle.detach().clone()
            dist.all_reduce(shared)
            second(middle + shared).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        if where.type == "cuda":
            torch.cuda.synchronize(where)
        detector.end_step()
    detector.close()
    if rank == 0:
        (Path(place) / "named").write_text("".join(f"{one}\n" for one in told))
    dist.barrier()
    dist.destroy_process_group()
