"""Whether a run continues from where its checkpoint was taken: windows of values in, reasons out. Pure.

It looks for a shift of the level, not for a spike. A window shows three things: its level (the median of its
last values), its noise (from the differences between neighbours, which a trend does not affect), and how far
its level rose or fell by itself while it was recorded. A value counts as far off if it is beyond all three
and a floor; three of the last five must be far off, on the bad side. So a single honest spike proves nothing,
nor does noise with heavy tails, a trend, or a swing that the window has seen before. In doubt nothing is
reported.

A loss is compared as it is, a gradient norm by its logarithm. NaN is not judged here: a step that is not
finite is rejected for that, and is a gap in these series.
"""

from __future__ import annotations

import functools
import itertools
import math
import statistics
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import msgspec

ENOUGH = 8
"""How many values a window needs to say anything."""
LOOK_BACK = 5
FAR_OFF = 3
"""How many of the last LOOK_BACK steps must be far off."""
BLOCK = 8
"""How many values a level is the median of."""
NOISES = 3.6
"""A value this many times the noise away from the level is no longer noise, for a long window."""
SPREADS = 3.0
"""The same for the spread around the window's straight trend, which exceeds the noise if values wander."""
STRAYS = 1.2
"""A value this many times as far away as single values strayed in the window is no longer a stray value."""
SWINGS = 1.2
"""A swing this many times as large as the window's largest is no longer that swing again."""
LOSS_FLOOR = 0.1
"""The least shift of a loss, as a share of its size."""
NORM_HIGHER = math.log(4)
NORM_LOWER = math.log(100)
"""The least shifts of a gradient norm: four times as large, and a hundredth."""
IN_DOUBT = 0.5
"""A trial that comes this close to the thresholds itself does not condemn another checkpoint."""
SLOW = 2.0
"""A median step time this many times that of the window is low throughput."""
SLOWER_NODE = 0.7
"""A node below this share of the others' speed is the slower one."""
_SMALLEST = 1e-30


class Series(msgspec.Struct, frozen=True, kw_only=True):
    """Values step by step, None where one is missing."""

    loss: Sequence[float | None] = ()
    grad_norm: Sequence[float | None] = ()


def discontinuities(before: Series, since: Series, first: int, *, strictness: float = 1.0) -> list[str]:
    """Why `since`, which begins with step `first`, does not continue `before`; in doubt, nothing."""
    norms, now = _logs(before.grad_norm), _logs(since.grad_norm, least=_SMALLEST)
    found = [
        _shift("loss", before.loss, since.loss, first, strictness, logarithmic=False),
        _shift("gradient norm", norms, now, first, strictness, logarithmic=True),
    ]
    return [reason for reason in found if reason]


def mismatches(found: Mapping[str, int], expected: Mapping[str, int]) -> list[str]:
    """Where the counters of the loaded state differ from those of its manifest, if both have them."""
    return [
        f"the state that was loaded says {name} {found[name]}, its manifest {wanted}"
        for name, wanted in expected.items()
        if name in found and found[name] != wanted
    ]


def slowdown(before: Sequence[float], since: Sequence[float]) -> tuple[float, float] | None:
    """(median step time now, before) if it is much longer now. The first step is left out as a warm-up."""
    if len(before) < ENOUGH or len(since) < FAR_OFF + 1:
        return None
    now, then = statistics.median(since[1:]), statistics.median(before)
    return (now, then) if now > SLOW * then else None


def slower_node(speeds: Mapping[str, Sequence[float]]) -> str:
    """The one node whose ranks are clearly slower than those of all others; empty if there is none.

    Speeds are relative: 1 is that of a healthy rank. A node is as slow as its slowest rank.
    """
    worst = {node: min(values) for node, values in speeds.items() if values}
    if len(worst) < 2:
        return ""
    node = min(worst, key=lambda name: (worst[name], name))
    others = statistics.median(speed for name, speed in worst.items() if name != node)
    return node if worst[node] < SLOWER_NODE * others else ""


class _Bounds(NamedTuple):
    level: float
    low: float
    high: float
    values: int


def _shift(
    what: str,
    before: Sequence[float | None],
    since: Sequence[float | None],
    first: int,
    strictness: float,
    *,
    logarithmic: bool,
) -> str:
    window = tuple(value for value in before if value is not None and math.isfinite(value))
    recent = [(first + at, value) for at, value in enumerate(since) if value is not None][-LOOK_BACK:]
    if len(window) < ENOUGH or len(recent) < FAR_OFF:
        return ""
    bounds = _bounds(window, strictness, logarithmic=logarithmic)
    above = [(step, value) for step, value in recent if value > bounds.high]
    below = [(step, value) for step, value in recent if value < bounds.low]
    for off, side, limit in ((above, "above", bounds.high), (below, "below", bounds.low)):
        if len(off) >= FAR_OFF:
            return _told(what, off, f"{side} {_shown(limit, logarithmic)}", bounds, logarithmic)
    return ""


@functools.lru_cache(maxsize=16)  # the same window is used at every step of a probation
def _bounds(window: tuple[float, ...], strictness: float, *, logarithmic: bool) -> _Bounds:
    """The bounds between which a series looks as this window did; a lower loss is never bad."""
    level = statistics.median(window[-BLOCK:])
    stretch = strictness * (1 + 3 * ENOUGH / len(window))  # few values say less
    floor = NORM_HIGHER if logarithmic else LOSS_FLOOR * statistics.median(map(abs, window))
    high = level + stretch * max(_reach(window), floor)
    low = -math.inf
    if logarithmic:
        low = level - stretch * max(_reach([-value for value in window]), NORM_LOWER)
    return _Bounds(level, low, high, len(window))


def _reach(window: Sequence[float]) -> float:
    """How far above its level the window could get by itself."""
    noise = _noise(window)
    single = max(NOISES * noise, SPREADS * _spread(window), STRAYS * _stray(window))
    return single + SWINGS * max(0.0, _rise(window) - noise)  # levels differ by noise alone, too


def _noise(window: Sequence[float]) -> float:
    """The spread around a moving level, as a standard deviation: two neighbours share their level."""
    steps = [abs(after - value) for value, after in itertools.pairwise(window)]
    return 1.4826 * statistics.median(steps) / math.sqrt(2)


def _spread(window: Sequence[float]) -> float:
    """Around a straight line through the medians of both halves, as a standard deviation."""
    half = len(window) // 2
    early, late = statistics.median(window[:half]), statistics.median(window[-half:])
    slope = (late - early) / (len(window) - half)
    return 1.4826 * statistics.median(
        abs(value - early - slope * (at - (half - 1) / 2)) for at, value in enumerate(window)
    )


def _stray(window: Sequence[float]) -> float:
    """How far the second-farthest single value was above the level around it."""
    half = BLOCK // 2
    off = [
        value - statistics.median(window[max(0, at - half) : at + half + 1])
        for at, value in enumerate(window)
    ]
    return max(0.0, sorted(off)[-2])


def _rise(window: Sequence[float]) -> float:
    """The largest rise from one level of the window to a later one."""
    starts = range(0, len(window) - BLOCK + 1, BLOCK // 2)
    levels = [statistics.median(window[at : at + BLOCK]) for at in starts]
    lowest, largest = math.inf, 0.0
    for value in levels:
        lowest = min(lowest, value)
        largest = max(largest, value - lowest)
    return largest


def _told(what: str, off: Sequence[tuple[int, float]], where: str, bounds: _Bounds, logarithmic: bool) -> str:
    values = ", ".join(f"{_shown(value, logarithmic)} at step {step}" for step, value in off)
    return (
        f"the {what} is {where} in {len(off)} of the last {LOOK_BACK} steps ({values}); "
        f"in {bounds.values} steps before the save its level was {_shown(bounds.level, logarithmic)}"
    )


def _shown(value: float, logarithmic: bool) -> str:
    return f"{math.exp(min(value, 700.0)) if logarithmic else value:.4g}"


def _logs(values: Sequence[float | None], least: float = 0.0) -> list[float | None]:
    """Logarithms; for a value that has none, that of `least`, or a gap."""
    found: list[float | None] = []
    for value in values:
        if value is None or not math.isfinite(value):
            found.append(None)
        elif value > least:
            found.append(math.log(value))
        else:
            found.append(math.log(least) if least else None)
    return found
