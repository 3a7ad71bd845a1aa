"""How much two runs of one step differ, and what was measured of it."""

from __future__ import annotations

import math
from collections import deque

from holdfast.journal.events import DeterminismMeasured

KEPT = 10_000
"""Measurements that percentiles are taken of: the newest."""


def difference(one: float | None, other: float | None) -> float:
    """Relative to the larger of them. NaN equals NaN, an infinity equals only itself; else infinite."""
    if one is None or other is None:
        return 0.0 if one is other else math.inf
    if one == other or (math.isnan(one) and math.isnan(other)):
        return 0.0
    if not (math.isfinite(one) and math.isfinite(other)):
        return math.inf
    return abs(one - other) / max(abs(one), abs(other))


class Determinism:
    """Differences between two runs of every step, in one attempt: of each step that of its worst rank."""

    def __init__(self, ranks: int = 1) -> None:
        self._ranks = ranks
        self._kept: deque[float] = deque(maxlen=KEPT)
        self._told = 0
        self._rank = 0
        self.steps = 0
        self.largest = 0.0

    def measure(self, found: float, rank: int = 0) -> None:
        """The largest difference that any rank found in a step, and which rank; the same on all ranks."""
        self._kept.append(found)
        self.steps += 1
        if found > self.largest:
            self.largest, self._rank = found, rank

    def report(self) -> DeterminismMeasured | None:
        """What is known by now; None if nothing is new."""
        if self.steps == self._told:
            return None
        self._told = self.steps
        ordered = sorted(self._kept)

        def percentile(share: float) -> float:
            return _finite(ordered[min(len(ordered) - 1, math.ceil(share * len(ordered)) - 1)])

        return DeterminismMeasured(
            steps=self.steps,
            p50=percentile(0.5),
            p90=percentile(0.9),
            p99=percentile(0.99),
            p999=percentile(0.999),
            largest=_finite(self.largest),
            ranks=self._ranks,
            worst_rank=self._rank,
        )


def _finite(value: float) -> float:
    """JSON has no infinity: a result that was finite only once differs by more than any number."""
    return value if math.isfinite(value) else 1e308
