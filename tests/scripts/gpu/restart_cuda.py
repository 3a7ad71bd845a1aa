"""A training function on one GPU that starts again in place. Arguments: the run's directory, and what goes
wrong: nothing, an exception in the fifth step of the first and the seventh of the second call, or a device
that computes no more (assert).

Prints, for each call of the function: the process, the step it begins after, the seconds since the fault, and
the device memory that is allocated when it begins; at the end the last loss.
"""

import os
import sys
import time

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset

import holdfast

directory, wrong = sys.argv[1], sys.argv[2]
failed_at = 0.0


def go_wrong() -> None:
    global failed_at
    failed_at = time.monotonic()
    if wrong == "exception":
        raise ValueError(f"rehearsed {failed_at}")
    if wrong == "assert":
        torch.zeros(4, device="cuda")[torch.tensor([9], device="cuda")].sum().item()


@holdfast.restartable(backend="nccl", inprocess_enabled=True)
def train() -> float:
    scope = holdfast.restart_scope()
    assert scope is not None
    held = torch.cuda.memory_allocated()
    assert dist.get_backend() == "nccl"
    torch.manual_seed(1)
    model = DistributedDataParallel(nn.Sequential(nn.Linear(1024, 1024), nn.Linear(1024, 1)).cuda())
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    inputs = torch.randn(64, 1024)
    loader = DataLoader(TensorDataset(inputs, inputs.sum(dim=1, keepdim=True)), batch_size=8)
    run = holdfast.Run(run_dir=directory, checkpoint_interval=2)
    run.track(model=model, optimizer=optimizer)
    last = torch.zeros(())
    for step, (x, y) in run.steps(loader, until=8):
        if step in (1, 5, 7):
            since = time.monotonic() - failed_at if failed_at else 0.0
            print(f"call {scope.iteration} {os.getpid()} {step} {since:.3f} {held}", flush=True)
        last = nn.functional.mse_loss(model(x.cuda()), y.cuda())
        last.backward()
        optimizer.step()
        optimizer.zero_grad()
        run.record(loss=last)
        if (scope.iteration, step) in ((0, 5), (1, 7)):
            go_wrong()
    return last.item()


torch.cuda.set_device(0)
print(f"loss {train()}", flush=True)
