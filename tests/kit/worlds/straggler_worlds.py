"""Simulated training with slow ranks, from a seed: what every rank would measure, and who is slow in truth.

Ranks train in step: each arrives when its own work is done, and waits for the last. Every rank has a speed of
its own, every step a size of its own, and both have noise with a tail of pauses. `hidden`: nobody can tell
waiting from work, as with collectives in the middle of a forward.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field

from holdfast.train.stragglers.scores import (
    COMPUTE,
    INPUT,
    OTHER,
    RankTimes,
    ScoreLimits,
    StragglerFinding,
    StragglerJudge,
    summarise,
)

USUAL = {INPUT: 0.004, COMPUTE: 0.040, "augment": 0.010, OTHER: 0.006}
FAULTS = ("compute", "input", "section", "intermittent", "drifting", "node")


@dataclass
class World:
    seed: int
    fault: str = ""
    nodes: int = 2
    per_node: int = 4
    steps: int = 60
    reports: int = 8
    begins: int = 2
    """The report from which on the fault is there."""
    noise: float = 0.15
    factor: float = 2.0
    """How much longer compute takes on the slow rank."""
    hidden: bool = False
    uniform: bool = False
    """The fault is on every rank alike."""
    findings: list[StragglerFinding] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.random = random.Random(self.seed)
        self.speeds = [self.random.uniform(0.95, 1.05) for _ in range(self.size)]
        self.bad = {self.random.randrange(self.size)}
        if self.fault == "node":
            node = self.random.randrange(self.nodes)
            self.bad = {rank for rank in range(self.size) if rank // self.per_node == node}
        if self.uniform:
            self.bad = set(range(self.size))
        if not self.fault:
            self.bad = set()

    @property
    def size(self) -> int:
        return self.nodes * self.per_node

    def work(self, rank: int, report: int, size: float) -> dict[str, float]:
        """One rank's own seconds of one step."""
        found = {}
        for name, usual in USUAL.items():
            seconds = usual * self.speeds[rank] * size * self.random.lognormvariate(0, self.noise)
            if self.random.random() < 0.002:
                seconds += self.random.uniform(0.05, 0.5)  # a pause
            found[name] = seconds
        if rank in self.bad and report >= self.begins:
            self._slow(found, report)
        return found

    def _slow(self, found: dict[str, float], report: int) -> None:
        if self.fault in ("compute", "node"):
            found[COMPUTE] *= self.factor
        elif self.fault == "input":
            found[INPUT] += 0.040
        elif self.fault == "section":
            found["augment"] *= 4.5
        elif self.fault == "intermittent" and self.random.random() < 0.4:
            found[COMPUTE] *= 4.0
        elif self.fault == "drifting":
            found[COMPUTE] *= 1 + 1.6 * (report - self.begins + 1) / (self.reports - self.begins)

    def report(self, number: int) -> list[RankTimes]:
        taken: list[list[dict[str, list[float]]]] = [[] for _ in range(self.size)]
        for _ in range(self.steps):
            size = self.random.lognormvariate(0, 0.1)
            works = [self.work(rank, number, size) for rank in range(self.size)]
            last = max(sum(work.values()) for work in works)
            for rank, work in enumerate(works):
                step = {name: [seconds, 0.0, seconds] for name, seconds in work.items()}
                step[COMPUTE][0 if self.hidden else 1] += last - sum(work.values())
                taken[rank].append(step)
        found = []
        for rank, steps in enumerate(taken):
            sections, noise = summarise(steps, device=True)
            node = f"n{rank // self.per_node}"
            found.append(RankTimes(rank=rank, node=node, steps=len(steps), noise=noise, sections=sections))
        return found

    def run(self, limits: ScoreLimits | None = None) -> World:
        judge = StragglerJudge(limits or ScoreLimits())
        self.findings = [judge.judge(self.report(number)) for number in range(self.reports)]
        return self

    @property
    def named(self) -> set[int]:
        """Ranks that were named in any report, by themselves or with their node."""
        found: set[int] = set()
        for finding in self.findings:
            for one in finding.named:
                of_node = [rank for rank in range(self.size) if f"n{rank // self.per_node}" == one.node]
                found.update(of_node if one.rank is None else [one.rank])
        return found

    @property
    def kinds(self) -> set[str]:
        return {str(one.kind) for finding in self.findings for one in finding.named}
