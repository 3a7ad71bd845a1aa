"""What checks cost a step of 50 ms on a GPU: `PYTHONPATH=src python3 bench/gpu_checks.py`, half a minute.

One JSON line a way: no checks, checks at once (the host waits for every step), deferred ones. Steps of one
model take turns in blocks; seconds are by the host's clock, with the device idle before and after a block.
"""

from __future__ import annotations

import json
import statistics
import time
from typing import Any

import torch
from gpu_workload import BLOCK, STEP, build

from holdfast.checkpoint.state.tracked import Tracked
from holdfast.config.sections import ValidationSettings
from holdfast.train.check.checks import Checks, Deferred

BLOCKS = 12


class Training:
    def __init__(self) -> None:
        device = torch.device("cuda", 0)
        self.model, self.optimizer, self.batch = build(device)
        tracked = Tracked()
        tracked.add("model", self.model)
        self.checks = Checks(ValidationSettings(), tracked)
        self.deferred = Deferred(self.checks)
        self.passes = 1
        self.steps = 0

    def calibrate(self) -> None:
        self.block("none")
        self.passes = max(1, round(STEP / self.block("none")))

    def block(self, way: str) -> float:
        """Seconds of a step, from a block of them."""
        torch.cuda.synchronize()
        started = time.perf_counter()
        for _ in range(BLOCK):
            self.step(way)
        if way == "deferred":
            assert self.deferred.settle() == []
        torch.cuda.synchronize()
        return (time.perf_counter() - started) / BLOCK

    def step(self, way: str) -> None:
        self.steps += 1
        loss: Any = None
        for _ in range(self.passes):
            loss = self.model(self.batch).float().square().mean()
            loss.backward()
        if way == "at once":
            assert self.checks.look(loss).reasons == []
        elif way == "deferred":
            self.deferred.note(self.steps, loss)
            assert self.deferred.bad() == []
        self.optimizer.step()
        self.optimizer.zero_grad()


def main() -> None:
    training = Training()
    training.calibrate()
    ways = ["none", "at once", "deferred"]
    found: dict[str, list[float]] = {way: [] for way in ways}
    for turn in range(BLOCKS + 1):
        for way in ways if turn % 2 else reversed(ways):
            seconds = training.block(way)
            if turn:
                found[way].append(seconds)
    plain = statistics.median(found["none"])
    gradients = sum(parameter.nbytes for parameter in training.model.parameters())
    for way in ways:
        each = [seconds / base - 1 for seconds, base in zip(found[way], found["none"], strict=True)]
        line = {
            "checks": way,
            "step ms": round(statistics.median(found[way]) * 1e3, 3),
            "over none %": round(100 * (statistics.median(found[way]) / plain - 1), 3),
            "block by block %": [round(100 * value, 2) for value in sorted(each)],
            "gradients MB": round(gradients / 1e6),
        }
        print(json.dumps(line), flush=True)
    began = time.perf_counter()
    for _ in range(50):
        training.deferred.note(0, torch.ones((), device="cuda"))
        training.deferred.bad()
    print(json.dumps({"host us a step": round((time.perf_counter() - began) / 50 * 1e6, 1)}))


if __name__ == "__main__":
    main()
