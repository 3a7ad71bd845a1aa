"""Trains a little in a restartable function, and leaves an exact record of it, for tests that compare runs.

Each rank appends `step loss sample-ids` to <out>/rank<r>.<pid>.log, with the loss as a hex float, and writes
a digest of its parameters at the end. RESTARTING_DO tells what happens: member:step:what, comma-separated,
each once, which a marker file remembers. `what` is raise, a signal's name, exit (with code 3), or wait (until
<out>/go exists); with a + after it, it happens whenever that step comes. RESTARTING_HOLD keeps every member
between two calls of the function, until <out>/go exists. RESTARTING_INTERVAL: steps between two saves.
"""

from __future__ import annotations

import os
import signal
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
OUT = Path("out")
MEMBER = int(os.environ["RANK"])
UNTIL = int(os.environ.get("RESTARTING_UNTIL", "9"))
INTERVAL = int(os.environ.get("RESTARTING_INTERVAL", "3"))
DO = os.environ.get("RESTARTING_DO", "")
HOLD = os.environ.get("RESTARTING_HOLD", "")


class Numbers(Dataset[tuple[int, torch.Tensor]]):
    def __len__(self) -> int:
        return 40

    def __getitem__(self, index: int) -> tuple[int, torch.Tensor]:
        return index, torch.randn(8, generator=torch.Generator().manual_seed(index))


def act(step: int) -> None:
    for number, order in enumerate(filter(None, DO.split(","))):
        member, at, what = order.split(":")
        marker = OUT / f"done-{number}"
        if int(member) != MEMBER or int(at) != step or (marker.exists() and not what.endswith("+")):
            continue
        marker.touch()
        match what.removesuffix("+"):
            case "raise":
                raise ValueError("told to fail")
            case "exit":
                os._exit(3)
            case "wait":
                (OUT / f"waits{MEMBER}").touch()
                wait_for_go()
            case name:
                os.kill(os.getpid(), getattr(signal, name))


def wait_for_go() -> None:
    deadline = time.monotonic() + 60
    while not (OUT / "go").exists():
        if time.monotonic() > deadline:
            raise TimeoutError("nobody let it go on")
        time.sleep(0.01)


def hold(iteration: object) -> None:
    del iteration
    if HOLD:
        (OUT / f"held{MEMBER}").touch()
        wait_for_go()


@holdfast.restartable(backend="gloo", finalize=hold)
def train() -> None:
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(1234)
    model: nn.Module = nn.parallel.DistributedDataParallel(nn.Sequential(nn.Linear(8, 16), nn.Linear(16, 8)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    numbers = Numbers()
    loader = DataLoader(
        numbers, batch_size=4, sampler=DistributedSampler(numbers, world, rank, shuffle=True, seed=5)
    )
    run = holdfast.Run(run_dir="run", checkpoint_interval=INTERVAL)
    run.track(model=model, optimizer=optimizer)
    with (OUT / f"rank{rank}.{os.getpid()}.log").open("a", buffering=1) as log:
        for step, (ids, x) in run.steps(loader, until=UNTIL):
            act(step)
            loss = (model(x) - x).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            run.record(loss=loss, samples=ids, tokens=x.numel())
            log.write(f"{step} {float(loss.detach()).hex()} {ids.tolist()}\n")
    digest = xxhash.xxh3_128()
    for name, tensor in sorted(model.state_dict().items()):
        digest.update(name.encode() + tensor.numpy().tobytes())
    (OUT / f"params{rank}").write_text(digest.hexdigest())


if __name__ == "__main__":
    OUT.mkdir(exist_ok=True)
    sys.exit(train())
