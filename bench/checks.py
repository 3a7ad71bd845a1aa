"""What checking results adds to a step of about 10 ms on the host, in one process; nothing is saved.

Half a million parameters under AdamW; the batch is chosen so that a step (forward, backward, update) takes
about 10 ms here. Between two models more than 3 % comes from where their memory lies, so there is one model,
tracked by two runs, with the checks as they are by default and with none; they take turns. What is added is
measured within the step, around the forward and backward pass, which is the same on both sides: the rest of
`Run.compute` and the update, which has something back because it reads the same gradients next. A whole step
lies in between, so nothing is found in a cache that would not be there otherwise. One thread, and the time
that it had a core.
"""

from __future__ import annotations

import shutil
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import nn

import holdfast

LAYERS, WIDTH = 8, 256
STEP = 0.010
STEPS = 60
PAIRS = 100
OFF = {
    "validation_check_for_nan_in_loss": False,
    "validation_check_for_nan_in_grad": False,
    "validation_probation_steps": 0,
}


class Side:
    """A run of a model that another may have as well."""

    def __init__(
        self, directory: Path, network: nn.Module, optimizer: torch.optim.Optimizer, **settings: object
    ) -> None:
        self.model = network
        self.optimizer = optimizer
        self.run = holdfast.Run(run_dir=directory, checkpoint_interval=0, **settings)
        self.run.track(model=network, optimizer=optimizer)
        self.run.start()
        self._passes = 0.0

    def step(self, batch: torch.Tensor) -> tuple[float, float]:
        """Seconds of one step's forward and backward pass, and of what comes around it."""
        self.model.zero_grad()
        self.run.begin_step()
        started = time.thread_time()
        self.run.compute(self._forward_backward, batch)
        self.optimizer.step()
        around = time.thread_time() - started - self._passes
        self.run.end_step()
        return self._passes, around

    def _forward_backward(self, batch: torch.Tensor) -> torch.Tensor:
        started = time.thread_time()
        loss = forward_backward(self.model, batch)
        self._passes = time.thread_time() - started
        return loss


def model() -> nn.Module:
    return nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU()) for _ in range(LAYERS)))


def forward_backward(network: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    loss = network(batch).square().mean()
    loss.backward()
    return loss.detach()


def rows_for(seconds: float) -> int:
    """How many rows a batch needs for the fastest of many steps, by which is compared, to take so long."""
    network, rows = model(), 32
    optimizer = torch.optim.AdamW(network.parameters(), lr=1e-5)

    def step(batch: torch.Tensor) -> None:
        forward_backward(network, batch)
        optimizer.step()

    while True:
        batch = torch.randn(rows, WIDTH)
        found = fastest(lambda batch=batch: step(batch))  # type: ignore[misc]
        if found >= seconds:
            return rows
        rows += max(16, int(rows * min(1.0, 0.8 * (seconds / found - 1))))


def fastest(work: Callable[[], object], times: int = STEPS) -> float:
    found = []
    for _ in range(times):
        started = time.thread_time()
        work()
        found.append(time.thread_time() - started)
    return min(found)


def checked(work: Path, repeat: int) -> tuple[list[float], list[float]]:
    """Milliseconds of a step with checks and without; each sample is the median of many pairs of steps."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        rows = rows_for(STEP)
        torch.manual_seed(0)
        network, batch = model(), torch.randn(rows, WIDTH)
        optimizer = torch.optim.AdamW(network.parameters(), lr=1e-5)
        sides = [Side(work / "on", network, optimizer), Side(work / "off", network, optimizer, **OFF)]
        samples: tuple[list[float], list[float]] = ([], [])
        for turn in range(repeat + 1):
            added, plain = [], []
            for number in range(PAIRS):
                # One after the other, and in turn first: a machine's speed changes within a second.
                order = (0, 1) if number % 2 else (1, 0)
                found = {which: sides[which].step(batch) for which in order}
                added.append(found[0][1] - found[1][1])
                plain.append(sum(found[1]))
            if turn:  # the first warms up
                step = statistics.median(plain)
                samples[0].append((step + statistics.median(added)) * 1e3)
                samples[1].append(step * 1e3)
        for side in sides:
            side.run.close()
        return samples
    finally:
        torch.set_num_threads(threads)
        for name in ("on", "off"):
            shutil.rmtree(work / name, ignore_errors=True)
