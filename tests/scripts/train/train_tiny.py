"""A small training script that leaves an exact record of what it did, for tests that compare runs.

Each rank appends `step loss sample-ids` to <out>/rank<r>.<pid>.log, with the loss as a hex float, and writes
a digest of its parameters at the end. Environment variables control it, so that one script serves many tests.
"""

from __future__ import annotations

import os
import random
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
import xxhash
from torch import nn
from torch.utils.data import DataLoader, Dataset, DistributedSampler

import holdfast

torch.set_num_threads(1)
OUT = Path(os.environ["TINY_OUT"])
UNTIL = int(os.environ.get("TINY_UNTIL", "12"))
WRAP = os.environ.get("TINY_WRAP", "none")
RANK = int(os.environ.get("RANK", "0"))
WORLD = int(os.environ.get("WORLD_SIZE", "1"))
DIE = os.environ.get("TINY_DIE", "")
"""rank:step:how, comma-separated; each is done once, which a marker file remembers."""
GATE = int(os.environ.get("TINY_GATE", "0"))
"""Step at which every rank waits until <out>/go exists."""
KILL_SAVE = os.environ.get("TINY_KILL_SAVE", "")
"""rank:number: SIGKILL this rank at that file operation of the save of step 6, once."""


class Numbers(Dataset):
    def __len__(self) -> int:
        return 40

    def __getitem__(self, index: int) -> tuple[int, torch.Tensor]:
        generator = torch.Generator().manual_seed(index)
        return index, torch.randn(8, generator=generator)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Dropout(0.2), nn.Linear(16, 8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.body(x)


def maybe_die(step: int) -> None:
    """Die once: the marker survives the restart."""
    for number, plan in enumerate(filter(None, DIE.split(","))):
        rank, at, how = plan.split(":")
        marker = OUT / f"died-{number}"
        if int(rank) == RANK and int(at) == step and not marker.exists():
            marker.touch()
            if how == "raise":
                raise ValueError("told to fail")
            os.kill(os.getpid(), getattr(__import__("signal"), how))


def wait_at_gate(step: int) -> None:
    if step == GATE:
        (OUT / f"waiting{RANK}").touch()
        deadline = time.monotonic() + 60
        while not (OUT / "go").exists():
            if time.monotonic() > deadline:
                raise TimeoutError("nobody opened the gate")
            time.sleep(0.01)


def arm_save(run: holdfast.Run) -> None:
    """Replace the save of step 6 by one that is killed on the way."""
    if not KILL_SAVE or int(KILL_SAVE.split(":")[0]) != RANK or (OUT / "killed-in-save").exists():
        return
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
    from kit.tiny import counting_file_operations, die

    start, point = run.start, int(KILL_SAVE.split(":")[1])

    def on_operation(number: int, name: str, args: object) -> None:
        if number == point:
            (OUT / "killed-in-save").write_text(name)
            die()

    def start_and_arm() -> int:
        done = start()
        saving = run._session.saving
        scheduled = saving.scheduled

        def killed_save() -> None:
            if run.step != 6:
                return scheduled()
            with counting_file_operations(on_operation):
                return scheduled()

        saving.scheduled = killed_save
        return done

    run.start = start_and_arm


def main() -> None:
    OUT.mkdir(exist_ok=True)
    if WORLD > 1:
        dist.init_process_group("gloo")
    torch.manual_seed(1234)
    random.seed(99)
    model: nn.Module = Net()
    if WRAP == "ddp":
        model = nn.parallel.DistributedDataParallel(model)
    elif WRAP == "fsdp":
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    torch.manual_seed(1234 + RANK)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 3, 0.9)
    numbers = Numbers()
    sampler = DistributedSampler(numbers, WORLD, RANK, shuffle=True, seed=5) if WORLD > 1 else None
    loader = DataLoader(numbers, batch_size=4, shuffle=sampler is None, sampler=sampler)
    run = holdfast.Run(run_dir=os.environ.get("TINY_RUN", "run"), checkpoint_interval=3)
    run.track(model=model, optimizer=optimizer, schedule=schedule)
    arm_save(run)

    def forward_backward(x: torch.Tensor) -> torch.Tensor:
        noisy = x + 0.01 * torch.randn_like(x) + random.random() * 0.01
        loss = (model(noisy) - x).square().mean()
        loss.backward()
        return loss.detach()

    log = (OUT / f"rank{RANK}.{os.getpid()}.log").open("w", buffering=1)
    groups = len(dist.distributed_c10d._world.pg_map)
    for step, (ids, x) in run.steps(loader, until=UNTIL):
        maybe_die(step)
        wait_at_gate(step)
        loss = run.compute(forward_backward, x)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        run.record(loss=loss, samples=ids, tokens=x.numel())
        log.write(f"{step} {float(loss).hex()} {ids.tolist()}\n")
    assert len(dist.distributed_c10d._world.pg_map) == groups, "the group made for saves outlived the run"
    digest = xxhash.xxh3_128()
    for name, tensor in sorted(model.state_dict().items()):
        local = tensor.to_local() if hasattr(tensor, "to_local") else tensor
        digest.update(name.removeprefix("module.").encode() + local.numpy().tobytes())
    (OUT / f"params{RANK}").write_text(digest.hexdigest())
    if WORLD > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    sys.exit(main())
