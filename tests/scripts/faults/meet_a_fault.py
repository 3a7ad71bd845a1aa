"""Trains on every rank and meets the fault that it is given the name of, in one step of the first attempt."""

import os
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
AT, UNTIL = (35, 50) if FAULT == "two corrupt" else (25, 40)
if FAULT == "import error":
    import a_module_that_nobody_has  # noqa: F401

torch.set_num_threads(1)
dist.init_process_group("gloo")
rank, first = dist.get_rank(), os.environ["TORCHELASTIC_RESTART_COUNT"] == "0"


def corrupt(newest: int) -> None:
    """Flip a bit in each of the newest checkpoints."""
    for path in sorted(Path("run/checkpoints").glob("step_*/__0_0.distcp"))[-newest:]:
        path.chmod(0o644)
        data = bytearray(path.read_bytes())
        data[len(data) // 2] ^= 1
        path.write_bytes(data)


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def meet(batch: torch.Tensor) -> torch.Tensor:
    match FAULT:
        case "killed rank" | "budget spent" if rank == 1:
            die()
        case "corrupt newest" if rank == 1:
            corrupt(1)
            die()
        case "two corrupt" | "all corrupt" if rank == 1:
            corrupt(2)
            die()
        case "exception on one rank" | "exception again and again" if rank == 1:
            raise ValueError("sample 7 has no label")
        case "NaN batch" if rank == 1:
            return batch * float("nan")
        case "stopped process" if rank == 1:
            os.kill(os.getpid(), signal.SIGSTOP)
        case "deadlock" if rank == 1:
            time.sleep(1000)
        case "operator's stop" if rank == 0:
            Path("run/stop").touch()
    return batch


torch.manual_seed(0)
model = nn.parallel.DistributedDataParallel(nn.Linear(8, 8))
optimizer = torch.optim.Adam(model.parameters())
run = holdfast.Run(checkpoint_interval=10)
run.track(model=model, optimizer=optimizer)


def forward_backward(batch: torch.Tensor) -> torch.Tensor:
    loss = model(batch).square().mean()
    loss.backward()
    return loss.detach()


for step, (batch,) in run.steps(DataLoader(TensorDataset(torch.randn(4096, 8)), batch_size=8), until=UNTIL):
    if step == AT and (first or FAULT in ("exception again and again", "budget spent")):
        batch = meet(batch)
    loss = run.compute(forward_backward, batch)
    optimizer.step()
    optimizer.zero_grad()
    run.record(loss=loss)
    if FAULT == "operator's stop" and step >= AT:
        time.sleep(0.1)  # until the file is seen
