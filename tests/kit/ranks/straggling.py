"""Ranks that train a small model together, one of which is slow in the way that `how` says.

sleep and burn: in the forward, off and on the CPU; input: its batches come late; section: in a section that
the script has named; other: outside of all sections; plain: sleeps in a loop that does not call run.compute;
inside: sleeps in a section in which the others wait for it, in a collective; hidden: the same, and nothing
sees that wait as one.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import holdfast
import holdfast.run  # here, and not in every fork


def burn(wanted: float) -> None:
    ends = time.thread_time() + wanted
    while time.thread_time() < ends:
        sum(range(500))


class Data:
    """Batches that take as long as they take."""

    def __init__(self, rank: int, delay: float) -> None:
        self._rank, self._delay = rank, delay

    def __iter__(self) -> Iterator[torch.Tensor]:
        generator = torch.Generator().manual_seed(self._rank)
        for _ in range(100_000):
            if self._delay:
                time.sleep(self._delay)
            yield torch.randn(4, 16, generator=generator)


class Model(nn.Module):
    def __init__(self, how: str, delay: float) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 16))
        self._how, self._delay = how, delay

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self._how in ("sleep", "plain"):
            time.sleep(self._delay)
        elif self._how == "burn":
            burn(self._delay)
        out: torch.Tensor = self.layers(x)
        return out


def train(
    rank: int,
    directory: Path,
    how: str,
    *,
    slow: int = 1,
    delay: float = 0.04,
    until: int = 50,
    ddp: bool = False,
    **given: Any,
) -> int:
    """Train to `until`; the step that was reached. Raises `Stopped` as a Run does."""
    torch.manual_seed(0)
    mine = how if rank == slow else ""
    model: nn.Module = Model(mine, delay)
    together = dist.is_initialized()
    trained = nn.parallel.DistributedDataParallel(model) if together and ddp else model
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    settings = {"straggler_enabled": True, "straggler_report_time_interval": 0.4, "checkpoint_interval": 0}
    run = holdfast.Run(run_dir=directory, **{**settings, **given})
    run.track(model=model, optimizer=optimizer)

    def forward_backward(x: torch.Tensor) -> torch.Tensor:
        loss = (trained(x) - x).square().mean()
        loss.backward()
        for parameter in model.parameters() if together and not ddp else ():
            dist.all_reduce(parameter.grad)
        return loss.detach()

    for _, batch in run.steps(Data(rank, delay if mine == "input" else 0.0), until=until):
        with run.section("augment"):
            if mine == "section":
                time.sleep(delay)
        if how in ("inside", "hidden"):
            with run.section("meets"):
                if mine:
                    time.sleep(delay)
                work = dist.all_reduce(torch.zeros(1), async_op=True)
                assert work is not None
                if how == "inside":
                    work.wait()
                else:
                    work.get_future().wait()
        loss = forward_backward(batch) if how == "plain" else run.compute(forward_backward, batch)
        if mine == "other":
            time.sleep(delay)
        optimizer.step()
        optimizer.zero_grad()
        run.record(loss=loss)
    return run.step
