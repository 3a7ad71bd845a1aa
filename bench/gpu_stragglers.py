"""What the straggler detector costs a GPU's step of 50 ms: `PYTHONPATH=src python3 bench/gpu_stragglers.py`.

Half a minute. Steps of one model take turns in blocks, with the detector (input, compute, one section, the
mark of the last gradient, the waits in collectives) and without; seconds are by the host's clock, with the
device idle before and after a block. A step has two small sums for every layer over an NCCL group of one, as
tensor parallelism has them; here all of them are timed in every step, and the line says in how many steps a
run would do so. The last lines are what it takes of the host, which runs ahead of the device.
"""

from __future__ import annotations

import json
import statistics
import time

import torch
import torch.distributed as dist
from gpu_workload import BLOCK, LAYERS, STEP, build
from stragglers import untold

from holdfast.config.sections import StragglerSettings
from holdfast.record.group import join_group
from holdfast.train.stragglers.reports import Actions, Stragglers
from holdfast.train.stragglers.times import GradientMark
from holdfast.train.stragglers.waits import Waits

BLOCKS = 16
TARGET = 0.1


class Training:
    def __init__(self) -> None:
        device = torch.device("cuda", 0)
        self.model, self.optimizer, self.batch = build(device)
        chosen = StragglerSettings(enabled=True, report_time_interval=10.0)
        self.found = Stragglers(chosen, join_group(60.0), device=device, actions=Actions(tell=untold))
        # A rank alone waits for nobody and has no mark; here it costs what it costs others.
        self.found._mark = GradientMark([self.model], self.found._times.mark)
        dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=1)
        self.sums = torch.ones(1024, device=device)
        dist.all_reduce(self.sums)  # makes the communicator
        self.found._waits = Waits(self.found._times)
        self.passes = 1
        self.steps = 0

    def calibrate(self) -> None:
        for _ in range(3):
            self.block(measured=False)
        self.passes = max(1, round(STEP / self.block(measured=False)))

    def block(self, *, measured: bool) -> float:
        """Seconds of a step, from a block of them."""
        torch.cuda.synchronize()
        started = time.perf_counter()
        for _ in range(BLOCK):
            self.step(measured=measured)
        torch.cuda.synchronize()
        return (time.perf_counter() - started) / BLOCK

    def step(self, *, measured: bool) -> None:
        self.steps += 1
        self.found._every = 1
        if not measured:
            self.work()
            self.update()
            return
        self.found.begin_step()
        with self.found.input():
            pass
        self.found.around(self.work)()
        self.found.arrived()
        with self.found.section("update"):
            self.update()
        self.found.end_step()
        self.found.meet(self.steps)

    def work(self) -> None:
        for _ in range(self.passes):
            self.model(self.batch).float().square().mean().backward()
        for _ in range(2 * LAYERS):
            dist.all_reduce(self.sums)

    def update(self) -> None:
        self.optimizer.step()
        self.optimizer.zero_grad()


def main() -> None:
    training = Training()
    training.calibrate()
    found: dict[bool, list[float]] = {True: [], False: []}
    for turn in range(BLOCKS + 1):
        for measured in (True, False) if turn % 2 else (False, True):
            seconds = training.block(measured=measured)
            if turn:
                found[measured].append(seconds)
    each = [ours / plain - 1 for ours, plain in zip(found[True], found[False], strict=True)]
    over = 100 * (statistics.median(found[True]) / statistics.median(found[False]) - 1)
    print(
        json.dumps(
            {
                "step ms without": round(statistics.median(found[False]) * 1e3, 3),
                "step ms with": round(statistics.median(found[True]) * 1e3, 3),
                "over %": round(over, 3),
                "target %": TARGET,
                "block by block %": [round(100 * value, 3) for value in sorted(each)],
            }
        )
    )
    times = training.found._times.take()
    compute = [step["compute"] for step in times if "compute" in step]
    print(
        json.dumps(
            {
                "steps read": len(compute),
                "compute ms": round(1e3 * statistics.median(own for own, _, _ in compute), 3),
                "after the mark ms": round(1e3 * statistics.median(wait for _, wait, _ in compute), 3),
            }
        )
    )
    waits = training.found._waits
    assert waits is not None
    waits.count, training.found._measured = 0, 0
    began = time.perf_counter()
    for _ in range(BLOCK):
        training.step(measured=True)
    torch.cuda.synchronize()
    step = (time.perf_counter() - began) / BLOCK
    host = sums(training, measured=True) - sums(training, measured=False)
    print(
        json.dumps(
            {
                "waits a step": waits.count / BLOCK,
                "host us a wait": round(host * 1e6, 2),
                "a run times them in one step of": training.found._one_in(step),
            }
        )
    )
    training.passes = 0
    training.work = lambda: None  # type: ignore[method-assign]
    training.update = lambda: None  # type: ignore[method-assign]
    torch.cuda.synchronize()
    began = time.perf_counter()
    for _ in range(200):
        training.step(measured=True)
    print(json.dumps({"host us a step": round((time.perf_counter() - began) / 200 * 1e6, 1)}))
    training.found.close()
    dist.destroy_process_group()


def sums(training: Training, *, measured: bool) -> float:
    """Seconds that the host takes for one small sum, fastest of some rounds."""
    rounds = []
    for _ in range(20):
        torch.cuda.synchronize()
        training.found.begin_step()
        assert training.found._waits is not None
        training.found._waits.on = measured
        began = time.perf_counter()
        for _ in range(50):
            dist.all_reduce(training.sums)
        rounds.append((time.perf_counter() - began) / 50)
        training.found._waits.on = False
    torch.cuda.synchronize()
    return min(rounds)


if __name__ == "__main__":
    main()
