"""How often to save: the interval that loses the least time to saving and to failures together. Pure.

Guarantee: for any costs, the chosen interval is finite, at least one step, at least as long as a save takes
(rounded up to whole steps), and otherwise at most half the MTBF and half a day. It never rises when saves get
cheaper or failures more frequent. Every choice says what it rests on.

The model: failures come at a constant rate, one in `M` seconds. Training is done in segments of `t` seconds,
each followed by a save that blocks for `d`; a failure anywhere in a segment costs the segment and a restart
`R`. Then a segment takes `M · exp(R/M) · (exp((t+d)/M) - 1)` seconds on average (Daly 2006), and the share of
all time that is not training done for good is one minus `t` over that. A save that goes on in the
background for `L` seconds protects nothing until it is committed, so a failure then costs `L` more: it adds
to `R`. Neither changes which `t` is best, only what it costs.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import msgspec

from holdfast.journal.render import duration, plural

AUTO = "auto"

DEFAULT_MTBF = 24 * 3600.0
"""What is assumed of a run about which nothing is known: one failure a day."""
BELIEVED = 3
"""Failures from which on the observed mean counts alone. With three, the interval is off by some 30 %, which
costs 4 % of a small overhead; with fewer it could be off by a factor."""
DEFAULT_RESTART = 120.0
"""Seconds from a failure to the first step after it, where none was seen. It does not move the optimum."""
PROBE_STEPS = 10
"""Steps before the first save of a run of which nothing was measured."""
GROWTH = 4
"""An interval grows at most this much from one save to the next, so that one odd measurement does not leave a
run unprotected for long."""
LONGEST_INTERVAL = 12 * 3600.0
BLOCKED_SHARE = 0.05
NOTABLE_CHANGE = 0.1
"""A change of the interval smaller than this is not worth a journal entry."""

_SHORTEST_STEP, _SHORTEST, _LONGEST = 1e-6, 1e-12, 1e12
"""Seconds beyond which a cost is taken as this much; keeps every result finite, and steps within 64 bits."""

_MANY_STEPS = 1000


class Costs(msgspec.Struct, frozen=True, kw_only=True):
    """What the choice rests on, in seconds."""

    step: float
    """One step of training, without saving."""
    blocked: float
    """For which a save holds training up."""
    commit: float
    """From the call of a save to its commit."""
    mtbf: float = DEFAULT_MTBF
    restart: float = DEFAULT_RESTART

    def sane(self) -> Costs:
        """The same, within what can be computed with; a save is committed no earlier than it lets go."""
        blocked = _sane(self.blocked)
        return Costs(
            step=max(_SHORTEST_STEP, _sane(self.step)),
            blocked=blocked,
            commit=max(blocked, _sane(self.commit)),
            mtbf=_sane(self.mtbf),
            restart=_sane(self.restart),
        )


class Mtbf(msgspec.Struct, frozen=True, kw_only=True):
    """Mean time between failures, and how it is known."""

    seconds: float
    source: str


class Cadence(msgspec.Struct, frozen=True, kw_only=True):
    """A choice, with everything it rests on."""

    interval_steps: int
    interval_seconds: float
    expected_overhead: float
    """Share of all time that goes into saves, lost work and restarts; at least 0 and below or at 1."""
    mtbf: float
    young: float
    """Seconds between saves by each of the three formulas, before any bound."""
    daly: float
    optimal: float
    evidence: list[str] = []
    warnings: list[str] = []
    """Of the interval that is aimed at, also while `at_most` keeps it shorter."""


def _sane(seconds: float) -> float:
    return min(max(seconds, _SHORTEST), _LONGEST)


def mtbf_of(running_seconds: float, failures: int, given: float = 0.0) -> Mtbf:
    """The MTBF to plan with: the given one, or the observed one, or what lies between that and a guess."""
    if given > 0:
        return Mtbf(seconds=given, source="given")
    if failures >= BELIEVED:
        return Mtbf(
            seconds=_sane(running_seconds / failures),
            source=f"observed: {failures} failures in {duration(running_seconds)} of running",
        )
    if failures == 0 and running_seconds <= 0:
        return Mtbf(seconds=DEFAULT_MTBF, source=f"assumed: {duration(DEFAULT_MTBF)}; nothing is known yet")
    seen = f"{plural(failures, 'failure')} in {duration(max(0.0, running_seconds))} of running"
    return Mtbf(
        seconds=(max(0.0, running_seconds) + DEFAULT_MTBF) / (failures + 1),
        source=f"observed: {seen}, taken together with an assumed one in {duration(DEFAULT_MTBF)}",
    )


def young(blocked: float, mtbf: float) -> float:
    """Young 1974: the first-order optimum, in seconds of training between saves."""
    return math.sqrt(2 * blocked * mtbf)


def daly(blocked: float, mtbf: float) -> float:
    """Daly 2006: the higher-order optimum, in seconds of training between saves."""
    if blocked >= 2 * mtbf:
        return mtbf
    ratio = blocked / (2 * mtbf)
    return math.sqrt(2 * blocked * mtbf) * (1 + math.sqrt(ratio) / 3 + ratio / 9) - blocked


def optimal(costs: Costs) -> float:
    """Seconds of training between saves for which `overhead` is least, without bounds.

    Golden section over the logarithm of the interval: the overhead falls, then rises, and is least below
    the MTBF.
    """
    costs = costs.sane()
    cost = _cost_function(costs)
    low, high = math.log(_SHORTEST / 1e6), math.log(costs.mtbf)
    shrink = (math.sqrt(5) - 1) / 2
    left, right = high - shrink * (high - low), low + shrink * (high - low)
    at_left, at_right = cost(math.exp(left), costs), cost(math.exp(right), costs)
    while high - low > 1e-9:
        if at_left <= at_right:
            high, right, at_right = right, left, at_left
            left = high - shrink * (high - low)
            at_left = cost(math.exp(left), costs)
        else:
            low, left, at_left = left, right, at_right
            right = low + shrink * (high - low)
            at_right = cost(math.exp(right), costs)
    return math.exp((low + high) / 2)


def overhead(seconds: float, costs: Costs) -> float:
    """Share of all time lost when `seconds` of training lie between saves; from 0 to 1."""
    return -math.expm1(-_log_stretch(_sane(seconds), costs.sane()))


def _log_stretch(seconds: float, costs: Costs) -> float:
    """Logarithm of how much longer everything takes; as a sum of positive parts, so that small ones count."""
    segment = (seconds + costs.blocked) / costs.mtbf
    extra = (costs.restart + costs.commit - costs.blocked) / costs.mtbf
    return extra + _log_growth(segment) + math.log1p(costs.blocked / seconds)


def _log_stretch_of_long_saves(seconds: float, costs: Costs) -> float:
    """The same less a constant that would drown it where a save takes longer than the MTBF."""
    share = seconds / costs.mtbf
    return share - math.log(share) + math.log(-math.expm1(-share - costs.blocked / costs.mtbf))


def _cost_function(costs: Costs) -> Callable[[float, Costs], float]:
    return _log_stretch if costs.blocked < costs.mtbf else _log_stretch_of_long_saves


def _whole_steps(best: float, costs: Costs) -> int:
    """The better of the two whole numbers of steps around the best interval.

    The cost is not symmetric around its least, so rounding can take the wrong one where an interval is a few
    steps; where it is many, the two differ by less than can be computed, and rounding decides.
    """
    below = math.floor(best / costs.step)
    if below < 1:
        return 1
    if below > _MANY_STEPS:
        return round(best / costs.step)
    cost = _cost_function(costs)
    return below if cost(below * costs.step, costs) <= cost((below + 1) * costs.step, costs) else below + 1


def _log_growth(x: float) -> float:
    """log((exp(x) - 1) / x) for x > 0, without overflow or cancellation."""
    if x < 1e-4:
        return x / 2 + x * x / 24
    return x + math.log(-math.expm1(-x)) - math.log(x)


def bounds(costs: Costs) -> tuple[int, int]:
    """Steps: at least those that a save takes, and 1; at most half the MTBF and half a day."""
    costs = costs.sane()
    lowest = max(1, math.ceil(costs.commit / costs.step * (1 - 1e-12)))
    highest = math.floor(min(costs.mtbf / 2, LONGEST_INTERVAL) / costs.step)
    return lowest, max(lowest, highest)


def choose(costs: Costs, mtbf_source: str = "given", *, at_most: int | None = None) -> Cadence:
    """The interval to save at. `at_most` limits it further (see GROWTH), but never below a save's time."""
    costs = costs.sane()
    best, by_young, by_daly = (
        optimal(costs),
        young(costs.blocked, costs.mtbf),
        daly(costs.blocked, costs.mtbf),
    )
    lowest, highest = bounds(costs)
    wanted = _whole_steps(best, costs)
    steps = min(max(wanted, lowest), highest)
    evidence = [
        f"a step takes {duration(costs.step)}; a save blocks for {duration(costs.blocked)} "
        f"and is committed after {duration(costs.commit)}",
        f"MTBF {duration(costs.mtbf)} ({mtbf_source})",
        f"least overhead at {duration(best)} between saves "
        f"(Young {duration(by_young)}, Daly {duration(by_daly)})",
    ]
    if steps > wanted:
        evidence.append(
            f"not below {plural(lowest, 'step')}: a save must be committed before the next is due"
        )
    elif steps < wanted:
        evidence.append(f"not above {plural(highest, 'step')}: half the MTBF, and at most 12 h")
    target = steps
    if at_most is not None and steps > max(lowest, at_most):
        steps = max(lowest, at_most)
        evidence.append(f"{plural(steps, 'step')} for now: an interval grows at most {GROWTH}-fold at a save")
    seconds = steps * costs.step
    return Cadence(
        interval_steps=steps,
        interval_seconds=seconds,
        expected_overhead=overhead(seconds, costs),
        mtbf=costs.mtbf,
        young=by_young,
        daly=by_daly,
        optimal=best,
        evidence=evidence,
        warnings=list(concerns(target, costs).values()),
    )


def concerns(steps: int, costs: Costs) -> dict[str, str]:
    """What is wrong with saving every so many steps, whoever chose that: a word for each, and the text."""
    costs = costs.sane()
    seconds = steps * costs.step
    every = f"the interval of {plural(steps, 'step')} ({duration(seconds)})"
    found = {}
    if seconds >= costs.mtbf:
        found["exposed"] = (
            f"{every} is not shorter than the MTBF of {duration(costs.mtbf)}: more often than not a failure "
            "comes before the next save. Lower checkpoint.interval, or set it to 'auto'"
        )
    if costs.commit - costs.blocked > seconds * (1 + 1e-9):  # while it blocks, the next does not come nearer
        found["slow"] = (
            f"a save takes {duration(costs.commit)}, longer than {every}: the next is due before it is "
            "committed. Raise checkpoint.interval, or use faster storage"
        )
    if costs.blocked > BLOCKED_SHARE * (seconds + costs.blocked):
        found["blocking"] = (
            f"saving holds training up: a usual save for {duration(costs.blocked)}, at {every}. "
            "Make saves cheaper, or raise checkpoint.interval"
        )
    return found
