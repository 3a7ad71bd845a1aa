"""One rank of the benchmark of in-process restart: trains a little, and fails once.

Arguments: a file to write to, and whether the function restarts in place (`in_place`) or the launcher starts
the processes again (`in_job`). Every line is what was reached, the life of the function (counted from 0), the
rank and the time. Rank 1 raises in its third step, in the first life only.
"""

import os
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

import holdfast

log, how = Path(sys.argv[1]), sys.argv[2]


def say(what: str, life: int) -> None:
    with log.open("a") as file:
        file.write(f"{what} {life} {dist.get_rank()} {time.time()}\n")


@holdfast.restartable(backend="gloo", inprocess_enabled=how == "in_place")
def train() -> None:
    scope = holdfast.restart_scope()
    life = scope.iteration if scope is not None else int(os.environ["TORCHELASTIC_RESTART_COUNT"])
    torch.manual_seed(0)
    model = nn.Linear(16, 16)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for step in range(1, 5):
        model(torch.ones(4, 16)).square().mean().backward()
        for parameter in model.parameters():
            dist.all_reduce(parameter.grad)
        optimizer.step()
        optimizer.zero_grad()
        if step == 1:
            say("stepped", life)
        if life == 0 and step == 3:
            time.sleep(0.5)  # the launch is over, and its traces are gone
            if dist.get_rank() == 1:
                say("fault", life)
                raise RuntimeError("a fault of rank 1")


train()
