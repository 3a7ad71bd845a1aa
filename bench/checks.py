"""What checking results adds to a step of about 10 ms on the host, in one process; nothing is saved.

Half a million parameters under AdamW; the batch is chosen so that a step (forward, backward, update) takes
about 10 ms here. Between two runs more than 3 % comes from where their memory lies, so what is added is
measured within the step: the time of `Run.compute` less that of the forward and backward pass inside of it,
with the checks as they are by default and with none. A whole step lies in between, so nothing is found in a
cache that would not be there otherwise. What the update has back of it, because it reads the same gradients
next, is not counted. One thread, and the time that it had a core.
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
TURN = 10
OFF = {
    "validation_check_for_nan_in_loss": False,
    "validation_check_for_nan_in_grad": False,
    "validation_probation_steps": 0,
}


class Side:
    """A run and its model."""

    def __init__(self, directory: Path, rows: int, **settings: object) -> None:
        torch.manual_seed(0)
        self.model = model()
        self.batch = torch.randn(rows, WIDTH)
        self.run = holdfast.Run(run_dir=directory, checkpoint_interval=0, **settings)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-5)
        self.run.track(model=self.model, optimizer=self.optimizer)
        self.run.start()
        self._passes = 0.0

    def step(self) -> tuple[float, float]:
        """Seconds of one step's forward, backward and update, and those that `compute` adds."""
        self.model.zero_grad()
        self.run.begin_step()
        started = time.thread_time()
        self.run.compute(self._forward_backward)
        computed = time.thread_time()
        self.optimizer.step()
        updated = time.thread_time()
        self.run.end_step()
        return self._passes + updated - computed, computed - started - self._passes

    def _forward_backward(self) -> torch.Tensor:
        started = time.thread_time()
        loss = forward_backward(self.model, self.batch)
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
    """Milliseconds of a step with checks and without; each sample is made of the medians of many steps."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        rows = rows_for(STEP)
        sides = [Side(work / "on", rows), Side(work / "off", rows, **OFF)]
        samples: tuple[list[float], list[float]] = ([], [])
        for turn in range(repeat + 1):
            found: list[list[tuple[float, float]]] = [[], []]
            for number in range(STEPS // TURN):
                for which in (0, 1) if number % 2 else (1, 0):
                    found[which] += [sides[which].step() for _ in range(TURN)]
            added = [statistics.median(extra for _, extra in one) for one in found]
            step = statistics.median(whole for whole, _ in found[1]) + added[1]
            if turn:
                samples[0].append((step + added[0] - added[1]) * 1e3)
                samples[1].append(step * 1e3)
        for side in sides:
            side.run.close()
        return samples
    finally:
        torch.set_num_threads(threads)
        for name in ("on", "off"):
            shutil.rmtree(work / name, ignore_errors=True)
