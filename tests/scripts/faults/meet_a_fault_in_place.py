"""Trains in a restartable function, on every rank, and meets the fault that it is given the name of, once.

exception   rank 1 raises
asked       rank 1 asks for a restart
every time  rank 1 raises whenever that step comes
"""

import sys
import time

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import holdfast
from holdfast.base.scope import Scope

FAULT = sys.argv[1]
AT, UNTIL = 25, 40
torch.set_num_threads(1)


def meet(scope: Scope) -> None:
    if dist.get_rank() != 1 or (scope.iteration and FAULT != "every time"):
        return
    if FAULT == "asked":
        assert scope.request is not None
        scope.request("the learning rate is to be another one")
        time.sleep(60)  # it is left from here
    raise ValueError("sample 7 has no label")


@holdfast.restartable(backend="gloo")
def train() -> None:
    scope = holdfast.restart_scope()
    assert scope is not None
    torch.manual_seed(0)
    model = nn.parallel.DistributedDataParallel(nn.Linear(8, 8))
    optimizer = torch.optim.Adam(model.parameters())
    run = holdfast.Run(run_dir="run", checkpoint_interval=10)
    run.track(model=model, optimizer=optimizer)
    data = TensorDataset(torch.randn(4096, 8))
    for step, (batch,) in run.steps(DataLoader(data, batch_size=8), until=UNTIL):
        if step == AT:
            meet(scope)
        loss = model(batch).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        run.record(loss=loss.detach())


train()
