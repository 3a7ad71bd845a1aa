"""Simulated sharded training on a mesh, from a seed: who waits for whom in which collective, and who is slow.

Every rank has a clock. A collective ends for all ranks of its group when the last has come, and what the
exchange takes later; a receive when what was sent has come. So waiting goes on from group to group, as in
real training. `tp` and `dp` (fully_shard) meet in every block, stages of `pp` send to each other.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence
from dataclasses import dataclass, field

from holdfast.train.stragglers.scores import (
    COMPUTE,
    OTHER,
    RankTimes,
    ScoreLimits,
    StragglerFinding,
    StragglerJudge,
    average,
    summarise,
)
from holdfast.train.stragglers.waits import group_key, pair_key

BLOCK = 0.005
"""Seconds of a block's forward; its backward takes twice as long."""
EXCHANGE = 0.0003
UPDATE = 0.002
MICRO = 4


@dataclass
class Mesh:
    seed: int
    pp: int = 1
    dp: int = 1
    tp: int = 1
    fault: str = ""
    """rank, two ranks; link, network (all links of a rank); and where no one is to blame: rotating (another
    rank in each step), imbalance (another one in each block), phases (two ranks are somewhat slower, one in
    the forward and one in the backward), uniform."""
    factor: float = 2.0
    """How many times as long work takes on a slow rank."""
    extra: float = 0.010
    """Seconds that each exchange over a slow link takes longer."""
    noise: float = 0.1
    uneven: Sequence[float] = ()
    """Work of each stage, as a part of the usual."""
    blocks: int = 2
    steps: int = 30
    reports: int = 6
    begins: int = 2
    """The report from which on the fault is there."""
    findings: list[StragglerFinding] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.random = random.Random(self.seed)
        self.size = self.pp * self.dp * self.tp
        self.speeds = [self.random.uniform(0.97, 1.03) for _ in range(self.size)]
        self.dps = [
            [self._at(p, d, t) for d in range(self.dp)] for p in range(self.pp) for t in range(self.tp)
        ]
        self.tps = [
            [self._at(p, d, t) for t in range(self.tp)] for p in range(self.pp) for d in range(self.dp)
        ]
        count = {"rank": 1, "two ranks": 2}.get(self.fault, 0)
        self.bad = set(self.random.sample(range(self.size), count))
        pairs = [
            pair
            for group in (*self.dps, *self.tps)
            if len(group) > 1
            for pair in itertools.combinations(group, 2)
        ]
        pairs += [
            (self._at(p, d, t), self._at(p + 1, d, t))
            for p in range(self.pp - 1)
            for d in range(self.dp)
            for t in range(self.tp)
        ]
        self.phases = self.random.sample(range(self.size), 2)
        self.link = self.random.choice(pairs) if self.fault == "link" else ()
        self.cut = self.random.randrange(self.size) if self.fault == "network" else -1

    def _at(self, p: int, d: int, t: int) -> int:
        return (p * self.dp + d) * self.tp + t

    # --- one step -------------------------------------------------------------------------------------------

    def _begin(self, report: int) -> None:
        self._report = report
        self._clock = [0.0] * self.size
        self._own = [0.0] * self.size
        self._met: list[dict[str, list[float]]] = [{} for _ in range(self.size)]

    def _slow(self, rank: int, step: int, backward: bool) -> float:
        if self._report < self.begins:
            return 1.0
        if self.fault == "phases":
            return 1 + (self.factor - 1) / (4 if backward else 2) if rank == self.phases[backward] else 1.0
        if self.fault == "imbalance":
            return 3.0 if self._turn == rank else 1.0
        if self.fault == "uniform":
            return self.factor
        if self.fault == "rotating":
            return self.factor * 2 if step % self.size == rank else 1.0
        return self.factor if rank in self.bad else 1.0

    def _work(self, rank: int, step: int, seconds: float, backward: bool) -> None:
        stage = rank // (self.dp * self.tp)
        seconds *= self.uneven[stage] if self.uneven else 1.0
        seconds *= (
            self.speeds[rank] * self._slow(rank, step, backward) * self.random.lognormvariate(0, self.noise)
        )
        if self.random.random() < 0.0005:
            seconds += self.random.uniform(0.02, 0.2)  # a pause
        self._clock[rank] += seconds
        self._own[rank] += seconds

    def _exchange(self, ranks: Sequence[int]) -> float:
        seconds = EXCHANGE * self.random.lognormvariate(0, self.noise)
        slow = set(self.link) <= set(ranks) if self.link else self.cut in ranks
        return seconds + (self.extra if slow and self._report >= self.begins else 0.0)

    def _wait(self, rank: int, name: str, until: float) -> None:
        met = self._met[rank].setdefault(name, [0.0, 0])
        met[0] += max(0.0, until - self._clock[rank])
        met[1] += 1
        self._clock[rank] = max(until, self._clock[rank])

    def _meet(self, groups: Sequence[Sequence[int]], stage: int) -> None:
        for group in groups:
            if len(group) > 1 and group[0] // (self.dp * self.tp) == stage:
                ends = max(self._clock[rank] for rank in group) + self._exchange(group)
                for rank in group:
                    self._wait(rank, group_key(group), ends)

    def _send(self, stage: int, to: int) -> None:
        for rank in self._of(stage):
            other = rank + (to - stage) * self.dp * self.tp
            self._wait(other, pair_key(rank, other), self._clock[rank] + self._exchange((rank, other)))

    def _of(self, stage: int) -> range:
        return range(stage * self.dp * self.tp, (stage + 1) * self.dp * self.tp)

    def _pass(self, stage: int, step: int, seconds: float, *, backward: bool = False) -> None:
        """A forward or backward of a micro-batch in one stage."""
        for _ in range(self.blocks):
            self._meet(self.dps, stage)
            self._turn = self.random.choice(self._of(stage))
            for rank in self._of(stage):
                self._work(rank, step, seconds, backward)
            self._meet(self.tps, stage)

    def _step(self, step: int) -> None:
        micro = MICRO if self.pp > 1 else 1
        for _ in range(micro):
            for stage in range(self.pp):
                self._pass(stage, step, BLOCK / micro)
                if stage + 1 < self.pp:
                    self._send(stage, stage + 1)
        for _ in range(micro):
            for stage in reversed(range(self.pp)):
                self._pass(stage, step, 2 * BLOCK / micro, backward=True)
                if stage:
                    self._send(stage, stage - 1)
        everybody = list(range(self.size))
        ends = max(self._clock) + EXCHANGE  # the norm of all gradients
        for rank in everybody:
            self._wait(rank, group_key(everybody), ends)

    # --- reports --------------------------------------------------------------------------------------------

    def report(self, number: int) -> list[RankTimes]:
        taken: list[list[dict[str, list[float]]]] = [[] for _ in range(self.size)]
        met: list[list[dict[str, list[float]]]] = [[] for _ in range(self.size)]
        for step in range(self.steps):
            self._begin(number)
            self._step(step)
            for rank in range(self.size):
                waited = self._clock[rank] - self._own[rank]
                taken[rank].append({COMPUTE: [self._own[rank], waited, 0.0], OTHER: [UPDATE, 0.0, 0.0]})
                met[rank].append(self._met[rank])
        found = []
        for rank in range(self.size):
            sections, noise = summarise(taken[rank], device=True)
            found.append(
                RankTimes(
                    rank=rank,
                    node=f"n{rank // 4}",
                    steps=self.steps,
                    noise=noise,
                    marked=False,
                    sections=sections,
                    meets=average(met[rank]),
                )
            )
        return found

    def run(self, limits: ScoreLimits | None = None) -> Mesh:
        judge = StragglerJudge(limits or ScoreLimits())
        self.findings = [judge.judge(self.report(number)) for number in range(self.reports)]
        return self

    @property
    def named(self) -> set[int]:
        """Ranks that were named, by themselves or with their node."""
        found: set[int] = set()
        for finding in self.findings:
            for one in finding.named:
                if one.ranks:
                    continue
                node = [rank for rank in range(self.size) if f"n{rank // 4}" == one.node]
                found.update(node if one.rank is None else [one.rank])
        return found

    @property
    def links(self) -> set[tuple[int, ...]]:
        """Between whom a link was named."""
        return {one.ranks for finding in self.findings for one in finding.named if one.ranks}
