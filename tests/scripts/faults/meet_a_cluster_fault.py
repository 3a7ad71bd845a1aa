"""Trains on every rank and meets what it is given the name of; a wait is over once the file `go` is there."""

import os
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import holdfast

FAULT = sys.argv[1]
AT, UNTIL = 25, 40
TIMED_OUT = (
    "NET/IB: Got completion from peer 10.0.0.7<54862> with status=12 opcode=0 len=0 vendor err 129 ({})"
)

torch.set_num_threads(1)
dist.init_process_group("gloo")
rank, first = dist.get_rank(), os.environ["TORCHELASTIC_RESTART_COUNT"] == "0"


def wait_for_the_test() -> None:
    """Until the test has done to this run what it does from outside; no longer than a minute."""
    Path("waits").touch()
    until = time.monotonic() + 60
    while not Path("go").exists() and time.monotonic() < until:
        time.sleep(0.02)


def meet() -> None:
    match FAULT:
        case "network error" if rank == 1:
            raise dist.DistBackendError(
                "NCCL error: remote process exited or there was a network error. "
                "Last error: " + TIMED_OUT.format("mlx5_3:1")
            )
        case "wait" | "wait global":
            wait_for_the_test()


torch.manual_seed(0)
model = nn.parallel.DistributedDataParallel(nn.Linear(8, 8))
optimizer = torch.optim.Adam(model.parameters())
run = holdfast.Run(checkpoint_interval=10)
run.track(model=model, optimizer=optimizer)


def forward_backward(batch: torch.Tensor) -> torch.Tensor:
    if FAULT == "straggler" and rank == 1:
        time.sleep(0.05)
    loss = model(batch).square().mean()
    loss.backward()
    return loss.detach()


if "global" in FAULT:
    data = holdfast.GlobalBatches(TensorDataset(torch.randn(4096, 8)), 12)
else:
    data = DataLoader(TensorDataset(torch.randn(4096, 8)), batch_size=8)
for step, (batch,) in run.steps(data, until=UNTIL):
    if step == AT and first:
        meet()
    loss = run.compute(forward_backward, batch)
    optimizer.step()
    optimizer.zero_grad()
    run.record(loss=loss)
    if FAULT == "slowly" and step >= AT:
        time.sleep(1)  # until the scheduler's end has come close
