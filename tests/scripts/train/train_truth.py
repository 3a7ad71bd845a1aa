"""Trains a small model in which one thing is wrong, as the environment tells; the rest of the run is sound.

TRUTH_KIND   none, data, spike, checkpoint, burnt or divergence. Devices and passing faults are made up by the
             settings of error injection, which the test gives to `holdfast run`.
TRUTH_RANKS  the ranks concerned, as 0,1
TRUTH_WRAP   none, ddp or fsdp
TRUTH_OUT    where each rank writes its losses and, at the end, a digest of its parameters
TRUTH_KILL   a step before which the first attempt is killed
TRUTH_EVERY  steps between saves, 6 unless told

Step BAD is where it shows. In a bad checkpoint a fuse is lit once, before the save of step LIT is taken, so
that its digests and fingerprints are right; three steps later the model's output is not a number. A burnt one
gives no number from the next step on, for ever. A spike is honest data that is a hundred times as large.
"""

from __future__ import annotations

import os
import signal
from pathlib import Path

import torch
import torch.distributed as dist
import xxhash
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader, Dataset, DistributedSampler

import holdfast

torch.set_num_threads(1)
KIND = os.environ.get("TRUTH_KIND", "none")
RANKS = {int(rank) for rank in os.environ.get("TRUTH_RANKS", "0").split(",")}
WRAP = os.environ.get("TRUTH_WRAP", "none")
OUT = Path(os.environ["TRUTH_OUT"])
UNTIL = int(os.environ.get("TRUTH_UNTIL", "24"))
KILL = int(os.environ.get("TRUTH_KILL", "0"))
EVERY = int(os.environ.get("TRUTH_EVERY", "6"))
RANK, WORLD = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
LIT, BATCH = 12, 4
BAD = 15 if KIND != "spike" else 21  # a spike is told by 16 losses before it


class Numbers(Dataset[tuple[int, torch.Tensor]]):
    """Each sample is made from its index; those of step BAD on the ranks concerned may be NaN, or large."""

    def __init__(self) -> None:
        taken = ((BAD - 1) * BATCH * WORLD, BAD * BATCH * WORLD)
        bad = {i for i in range(*taken) if i % WORLD in RANKS}
        self.bad = bad if KIND in ("data", "spike") else set()

    def __len__(self) -> int:
        return BATCH * WORLD * (UNTIL + 4)

    def __getitem__(self, index: int) -> tuple[int, torch.Tensor]:
        sample = torch.randn(8, generator=torch.Generator().manual_seed(index))
        if index in self.bad:
            sample *= torch.nan if KIND == "data" else 100.0
        return index, sample


class Fuse(nn.Module):
    """Passes on what it is given until it has burnt down; what is burnt is below zero."""

    left: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("left", torch.zeros((), dtype=torch.int64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.left.item() == 0:
            return x
        if self.left.item() > 0:
            self.left -= 1
        return x * torch.nan if self.left.item() <= 0 else x


def light_once(fuse: Fuse, step: int) -> None:
    if KIND not in ("checkpoint", "burnt") or step != LIT or RANK not in RANKS:
        return
    marker = OUT / f"lit{RANK}"
    if not marker.exists():
        marker.touch()
        fuse.left.fill_(BAD - LIT if KIND == "checkpoint" else -1)


def main() -> None:
    OUT.mkdir(exist_ok=True)
    if "RANK" in os.environ and WRAP != "none":
        dist.init_process_group("gloo")
    torch.manual_seed(1)
    fuse = Fuse()
    model: nn.Module = nn.Sequential(
        nn.Linear(8, 16), nn.BatchNorm1d(16), nn.GELU(), nn.Dropout(0.1), nn.Linear(16, 8), fuse
    )
    if WRAP == "fsdp":
        fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    elif WRAP == "ddp":
        model = nn.parallel.DistributedDataParallel(
            model, broadcast_buffers=False, find_unused_parameters=True
        )
    torch.manual_seed(100 + RANK)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: 1e38 if KIND == "divergence" and step == BAD - 2 else 1.0
    )
    run = holdfast.Run(run_dir="run", checkpoint_interval=EVERY, journal_step_flush=0)
    run.track(model=model, optimizer=optimizer, schedule=schedule)
    data = Numbers()
    sampler = DistributedSampler(data, WORLD, RANK, shuffle=False)
    loader = DataLoader(data, batch_size=BATCH, sampler=sampler)

    def forward_backward(x: torch.Tensor) -> torch.Tensor:
        loss = (model(x) - x).square().mean()
        loss.backward()
        return loss.detach()

    log = (OUT / f"rank{RANK}.{os.getpid()}.log").open("w", buffering=1)
    for step, (ids, x) in run.steps(loader, until=UNTIL):
        if step == KILL and run.attempt == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        loss = run.compute(forward_backward, x)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        run.record(loss=loss, samples=ids)
        log.write(f"{step} {float(loss).hex()} {ids.tolist()}\n")
        light_once(fuse, step)
    state = model.state_dict()
    parts = [v.to_local() if hasattr(v, "to_local") else v for v in state.values()]
    digest = xxhash.xxh3_64_hexdigest(b"".join(v.detach().numpy().tobytes() for v in parts))
    (OUT / f"params{RANK}").write_text(digest)
    if dist.is_initialized():
        dist.destroy_process_group()
    log.close()


if __name__ == "__main__":
    main()
