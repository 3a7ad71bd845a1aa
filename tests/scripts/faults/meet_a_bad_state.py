"""Trains on every rank and meets the fault that it is given the name of: of memory, state, device or storage.

OOM kill         rank 1 eats memory until the kernel ends it; SCREEN_CGROUP is the group to limit
blocked in C     rank 1 waits for a lock that is never given back, inside a C call that holds the GIL
bad local copy   a bit flips in the newest copy that the local tier holds, then rank 1 dies
NaN from state   the model is spoilt before a save, and shows it only some steps later
exception on all every rank raises, again and again
torn save        rank 0 dies while it saves
drain failed     the remote root is gone from one step on
nothing left     rank 1 ends without a word, again and again
full disk        something else fills the disk
"""

import ctypes
import os
import shutil
import signal
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import holdfast

FAULT = sys.argv[1]
AT, UNTIL, EVERY = 25, 40, 10
ALWAYS = ("exception on all", "nothing left", "full disk")
"""Those that come back with every attempt."""

torch.set_num_threads(1)
dist.init_process_group("gloo")
rank, first = dist.get_rank(), os.environ["TORCHELASTIC_RESTART_COUNT"] == "0"


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def eat_memory() -> None:
    """More than the group may have: it has what it uses now and a little."""
    group = Path(os.environ["SCREEN_CGROUP"])
    limit, used = "memory.limit_in_bytes", "memory.usage_in_bytes"
    if not (group / limit).exists():
        limit, used = "memory.max", "memory.current"
    (group / limit).write_text(str(int((group / used).read_text()) + (256 << 20)))
    eaten = []
    while True:
        eaten.append(bytes([1]) * (16 << 20))


def lock_up() -> None:
    libc, mutex = ctypes.PyDLL(None), ctypes.create_string_buffer(64)
    libc.pthread_mutex_lock(mutex)
    libc.pthread_mutex_lock(mutex)


def spoil_the_newest_local_copy() -> None:
    images = sorted(Path("memory").glob("**/images/*"), key=lambda path: path.stat().st_mtime)
    with images[-1].open("r+b") as image:
        middle = images[-1].stat().st_size // 2
        image.seek(middle)
        byte = image.read(1)[0]
        image.seek(middle)
        image.write(bytes([byte ^ 1]))


def await_copy(place: str) -> None:
    """Until the newest checkpoint that goes there is there: copies are made beside training."""
    deadline = time.monotonic() + 60
    while not any((found / "holdfast.json").exists() for found in Path(place).glob("step_00000020-*")):
        if time.monotonic() > deadline:
            raise TimeoutError(f"nothing came to {place}")
        time.sleep(0.02)


def die_in_the_save() -> None:
    """At the first write that is to last."""

    def fsync(_: int) -> None:
        if list(Path("run/checkpoints/.staging").glob("step_00000020-*")):
            die()

    os.fsync = fsync


def fill_the_disk() -> None:
    with Path("run/filler").open("wb", buffering=0) as filler:
        left = shutil.disk_usage("run").free - (4 << 20)
        while left > 0:
            left -= filler.write(bytes(min(left, 1 << 20)))


def meet() -> None:
    match FAULT:
        case "OOM kill" if rank == 1:
            eat_memory()
        case "blocked in C" if rank == 1:
            lock_up()
        case "bad local copy" if rank == 1:
            await_copy("run/checkpoints")
            spoil_the_newest_local_copy()
            die()
        case "exception on all":
            raise ValueError("the schedule has no entry for this step")
        case "drain failed" if rank == 0:
            await_copy("remote")
            shutil.rmtree("remote")
            Path("remote").touch()
        case "nothing left" if rank == 1:
            os._exit(3)
        case "full disk" if rank == 0:
            fill_the_disk()


class Fuse(nn.Module):
    """Passes on what it is given, until it has burnt down."""

    left: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("left", torch.zeros((), dtype=torch.int64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.left.item() == 0:
            return x
        self.left -= 1
        return x * torch.nan if self.left.item() <= 0 else x


torch.manual_seed(0)
fuse, linear = Fuse(), nn.Linear(512, 1024) if FAULT in ("full disk", "slow disk") else nn.Linear(8, 8)
model = nn.parallel.DistributedDataParallel(nn.Sequential(linear, fuse), broadcast_buffers=False)
optimizer = torch.optim.Adam(model.parameters())
run = holdfast.Run(checkpoint_interval=EVERY)
run.track(model=model, optimizer=optimizer)
data = TensorDataset(torch.randn(4096, linear.in_features))


def forward_backward(batch: torch.Tensor) -> torch.Tensor:
    loss = model(batch).square().mean()
    loss.backward()
    return loss.detach()


for step, (batch,) in run.steps(DataLoader(data, batch_size=8), until=UNTIL):
    if FAULT == "torn save" and step == 20 and first and rank == 0:
        die_in_the_save()
    if step == AT and (first or FAULT in ALWAYS):
        meet()
    loss = run.compute(forward_backward, batch)
    optimizer.step()
    optimizer.zero_grad()
    run.record(loss=loss)
    if FAULT == "NaN from state" and step == 20 and first:
        fuse.left.fill_(5)
    if FAULT == "slow disk":
        time.sleep(0.02)
