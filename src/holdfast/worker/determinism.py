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
    """Differences between two runs of every step, in one attempt and on one rank."""

    def __init__(self) -> None:
        self._kept: deque[float] = deque(maxlen=KEPT)
        self._told = 0
        self.steps = 0
        self.largest = 0.0

    def measure(self, one: float | None, other: float | None) -> None:
        found = difference(one, other)
        self._kept.append(found)
        self.steps += 1
        self.largest = max(self.largest, found)

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
        )


def _finite(value: float) -> float:
    """JSON has no infinity: a result that was finite only once differs by more than any number."""
    return value if math.isfinite(value) else 1e308
