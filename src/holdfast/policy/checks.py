"""Which losses are rejected, and why. Pure.

Guarantee: NaN and the infinities are always told from numbers. A spike or an outlier is told only upwards,
only of a finite loss, and only after `ENOUGH` accepted ones; what is rejected never moves what the next loss
is compared with.

spike     the loss is above `spike` times the largest that was ever accepted. A loss that was negative once
          has no such scale, and no spikes.
outlier   the loss is above the window's median by `outlier` times its spread. The spread is the median
          distance from the median, or that of the window's highest tenth if it is larger, each scaled so that
          it is one standard deviation of Gaussian noise, and never below `FLOOR` of the median. While all
          losses are positive, logarithms are taken first: the noise of a loss grows and shrinks with it, and
          single batches of a healthy run may be many times the median. Few values estimate a spread badly, so
          the bar is higher while the window is short. Data of a harder kind may come only now and then, so
          the bar is at least `REACH` times as far from the median as anything of the last `MEMORY` losses.
"""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Iterable, Mapping
from typing import Any

import msgspec

WINDOW = 64
"""Accepted losses of which the outlier test takes median and spread."""
MEMORY = 256
"""Accepted losses of which it takes the largest."""
ENOUGH = 16
"""Accepted losses from which on there are spikes and outliers."""
SCALE = 1.4826
"""Median distance from the median × this = standard deviation, for Gaussian noise."""
TENTH = 1.2816
"""The highest tenth of Gaussian noise begins at so many standard deviations above its median."""
FLOOR = 0.02
"""Smallest spread, as a share of the median: a loss that hardly moves is not all outliers when it does."""
SHORT = 32
"""The bar is (1 + SHORT / values) times as far away as for a window without end."""
REACH = 1.5


class Rules(msgspec.Struct, frozen=True, kw_only=True):
    """What to look for; a factor of 0 is off."""

    nan: bool = True
    spike: float = 0.0
    outlier: float = 0.0

    @property
    def any(self) -> bool:
        return self.nan or self.compares

    @property
    def compares(self) -> bool:
        """Whether a loss is compared with earlier ones."""
        return bool(self.spike or self.outlier)


class Seen:
    """The accepted losses of one rank, as far as they are needed."""

    def __init__(self) -> None:
        self.largest = -math.inf
        self.smallest = math.inf
        self.count = 0
        self.recent: deque[float] = deque(maxlen=MEMORY)

    def add(self, loss: float) -> None:
        if math.isfinite(loss):
            self.largest = max(self.largest, loss)
            self.smallest = min(self.smallest, loss)
            self.count += 1
            self.recent.append(loss)

    def add_all(self, losses: Iterable[float | None]) -> None:
        for loss in losses:
            if loss is not None:
                self.add(loss)

    def state_dict(self) -> dict[str, Any]:
        if not self.count:
            return {}
        return {
            "largest": self.largest,
            "smallest": self.smallest,
            "count": self.count,
            "recent": list(self.recent),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.recent = deque((float(value) for value in state.get("recent", ())), maxlen=MEMORY)
        self.largest = float(state.get("largest", -math.inf))
        self.smallest = float(state.get("smallest", math.inf))
        self.count = int(state.get("count", 0))


def not_finite(value: float) -> str:
    """What kind of a non-number it is; empty for a number."""
    if math.isfinite(value):
        return ""
    return "NaN" if math.isnan(value) else "+Inf" if value > 0 else "-Inf"


def judge(loss: float, rules: Rules, seen: Seen) -> list[str]:
    """Why a loss is rejected; nothing if it is not."""
    if kind := not_finite(loss):
        return [f"the loss is {kind}"] if rules.nan else []
    if not rules.compares or seen.count < ENOUGH or loss <= seen.recent[-1] or loss <= max(seen.recent):
        return []
    reasons = []
    if rules.spike and seen.smallest >= 0 and 0 < seen.largest < loss / rules.spike:
        reasons.append(
            f"the loss {loss:.6g} is a spike: more than {rules.spike:g} times the largest seen, "
            f"{seen.largest:.6g}"
        )
    if rules.outlier and loss > (bar := outlier_bar(seen.recent, rules.outlier)):
        reasons.append(
            f"the loss {loss:.6g} is an outlier: the last ones have the median "
            f"{statistics.median(list(seen.recent)[-WINDOW:]):.6g} and allow up to {bar:.6g}"
        )
    return reasons


def outlier_bar(recent: Iterable[float], factor: float) -> float:
    """The loss above which it counts as an outlier, after these."""
    values = list(recent)
    if min(values) > 0:
        exponent = _bar([math.log(value) for value in values], factor, FLOOR)
        return math.exp(exponent) if exponent < 700 else math.inf
    return _bar(values, factor, FLOOR * abs(statistics.median(values[-WINDOW:])))


def _bar(values: list[float], factor: float, floor: float) -> float:
    window = sorted(values[-WINDOW:])
    middle = statistics.median(window)
    typical = SCALE * statistics.median(abs(value - middle) for value in window)
    upper = (window[len(window) * 9 // 10] - middle) / TENTH
    far = factor * (1 + SHORT / len(window)) * max(typical, upper, floor)
    return middle + max(far, REACH * (max(values) - middle))
