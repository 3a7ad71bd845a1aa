"""Ranks that train a small sharded model together on gloo, one or more of them slow; what the detector said.

A layout is a mesh: `fsdp` (fully_shard), `tp` (tensor parallelism) and `pp` (a pipeline of stages), in any
mixture, as in {"pp": 2, "fsdp": 2}; ranks count up along the last dimension first. The work of a block is a
sleep, as the host has it while a device works, so that ranks do not fight over the cores of this machine.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import holdfast

WIDTH, BATCH, BLOCKS, MICRO = 16, 4, 2, 2
USUAL = 0.005
"""Seconds of a block's forward."""


@dataclass
class Slow:
    """Who is slow, from which step on, by how much."""

    seconds: Mapping[int, float] = field(default_factory=dict)
    """More for each block's forward, by rank."""
    begins: int = 0
    rotates: bool = False
    """Every step another rank, in turn."""
    jitter: float = 0.0
    """Parts of a block's time by which it varies."""
    link: tuple[int, ...] = ()
    """Ranks whose exchanges of tensor parallelism take `slower` seconds longer; no wire here is slow."""
    slower: float = 0.02

    def of(self, rank: int, step: int, world: int) -> float:
        if step < self.begins:
            return 0.0
        if self.rotates:
            return max(self.seconds.values()) if step % world == rank else 0.0
        return self.seconds.get(rank, 0.0)


class Block(nn.Module):
    def __init__(self, seconds: Callable[[], float]) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)
        self._seconds = seconds

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        time.sleep(self._seconds())
        return x + self.down(torch.tanh(self.up(x)))  # type: ignore[no-any-return]


class Trainer:
    """One rank's model and step, by its place in the mesh."""

    def __init__(
        self, rank: int, layout: Mapping[str, int], slow: Slow, seed: int, usual: Sequence[float]
    ) -> None:
        """`usual`: seconds of a block in each stage."""
        self._rank, self._slow = rank, slow
        self._chance = random.Random(1000 * seed + rank)
        self.step_number = 0
        mesh = init_device_mesh("cpu", tuple(layout.values()), mesh_dim_names=tuple(layout))
        stages = layout.get("pp", 1)
        at = mesh.get_local_rank("pp") if stages > 1 else 0
        self._usual = usual[at]
        torch.manual_seed(seed)
        self.model = nn.Sequential(*[Block(self._seconds) for _ in range(BLOCKS)])
        if "tp" in layout:
            for block in self.model:
                parallelize_module(block, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
        if rank in slow.link:
            self._lengthen(slow.slower)
        if "fsdp" in layout:
            for block in self.model:
                fully_shard(block, mesh=mesh["fsdp"])
            fully_shard(self.model, mesh=mesh["fsdp"])
        self._pipeline: ScheduleGPipe | None = None
        if stages > 1:
            stage = PipelineStage(self.model, at, stages, torch.device("cpu"), group=mesh.get_group("pp"))
            self._pipeline = ScheduleGPipe(stage, MICRO, loss_fn=nn.functional.mse_loss)
        self._first, self._last = at == 0, at == stages - 1
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.01)

    def _lengthen(self, seconds: float) -> None:
        exchanged = functional.wait_tensor

        def exchange(tensor: torch.Tensor) -> torch.Tensor:
            result: torch.Tensor = exchanged(tensor)
            if self.step_number >= self._slow.begins:
                time.sleep(seconds)
            return result

        functional.wait_tensor = exchange

    def _seconds(self) -> float:
        usual = self._usual * (1 + self._slow.jitter * self._chance.uniform(-1, 1))
        return usual + self._slow.of(self._rank, self.step_number, dist.get_world_size())

    def forward_backward(self) -> None:
        batch = torch.ones(BATCH * (MICRO if self._pipeline else 1), WIDTH)
        if self._pipeline is None:
            self.model(batch).square().mean().backward()
        else:
            given = (batch,) if self._first else ()
            self._pipeline.step(*given, **({"target": batch} if self._last else {}))

    def update(self) -> None:
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.step_number += 1


def train(
    rank: int,
    layout: Mapping[str, int],
    slow: Slow,
    *,
    steps: int,
    seed: int = 0,
    usual: Sequence[float] = (USUAL, USUAL, USUAL, USUAL),
    **settings: Any,
) -> list[dict[str, Any]]:
    """Train with a detector of its own; every report as rank 0 had it, `step` included."""
    trainer = Trainer(rank, layout, slow, seed, usual)
    reports: list[dict[str, Any]] = []
    settings = {"report_time_interval": 1e-9, **settings}
    with holdfast.StragglerDetector(
        models=[trainer.model], optimizers=[trainer.optimizer], node="here", **settings
    ) as detector:
        for step in range(steps):
            detector.begin_step()
            with detector.compute():
                trainer.forward_backward()
            trainer.update()
            finding = detector.end_step()
            if finding is not None:
                reports.append(
                    {
                        "step": step,
                        "named": [one.key for one in finding.named],
                        "why": [one.describe() for one in finding.named],
                        "relative": [one.relative for one in finding.scores],
                        "individual": [one.individual for one in finding.scores],
                        "waiting": [round(one.waiting, 3) for one in finding.scores],
                        "seconds": round(finding.step, 4),
                        "unclear": finding.unclear,
                        "exchange": {name: round(value, 4) for name, value in finding.floors.items()},
                    }
                )
    return reports


def named(reports: Sequence[Mapping[str, Any]]) -> set[str]:
    return {key for report in reports for key in report["named"]}
