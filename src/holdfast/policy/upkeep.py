"""When to save, how to take a snapshot, which checkpoints to keep, and when storage is slow. Pure.

Guarantee: for any costs, the chosen interval is finite, at least one step, at least as long as a save takes
(rounded up to whole steps), and otherwise at most half the MTBF and half a day. It never rises when saves get
cheaper or failures more frequent. Every choice says what it rests on.

The model: failures come at a constant rate, one in `M` seconds. Training is done in segments of `t` seconds,
each followed by a save that blocks for `d`; a failure anywhere in a segment costs the segment and a restart
`R`. Then a segment takes `M · exp(R/M) · (exp((t+d)/M) - 1)` seconds on average (Daly 2006), and the share of
all time that does not go into lasting training is one minus `t` over that. A save that continues in the
background for `L` seconds protects nothing until it is committed, so a failure during it costs `L` more,
which adds to `R`. Neither changes which `t` is best, only what it costs.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterable, Sequence
from enum import StrEnum
from statistics import median
from typing import Literal

import msgspec

from holdfast.base import duration, plural, size

AUTO = "auto"

DEFAULT_MTBF = 24 * 3600.0
"""What is assumed about a run of which nothing is known: one failure a day."""
BELIEVED = 3
"""How many failures it takes for the observed mean alone to count. With three, the interval is off by some
30 %, which costs 4 % of a small overhead; with fewer it could be off by a factor."""
DEFAULT_RESTART = 120.0
"""Seconds from a failure to the first step after it, if none was seen. It does not move the optimum."""
PROBE_STEPS = 10
"""Steps before the first save of a run in which nothing has been measured."""
GROWTH = 4
"""An interval grows at most by this factor from one save to the next, so that one odd measurement does not
leave a run unprotected for long."""
LONGEST_INTERVAL = 12 * 3600.0
BLOCKED_SHARE = 0.05
NOTABLE_CHANGE = 0.1
"""A change of the interval smaller than this is not worth a journal entry."""

_SHORTEST_STEP, _SHORTEST, _LONGEST = 1e-6, 1e-12, 1e12
"""Seconds that every cost is kept between, so that results stay finite, and steps within 64 bits."""

_MANY_STEPS = 1000


class Costs(msgspec.Struct, frozen=True, kw_only=True):
    """What the choice rests on, in seconds."""

    step: float
    """The time of one training step, without saving."""
    blocked: float
    """How long a save holds up training."""
    commit: float
    """From the call of a save to its commit."""
    mtbf: float = DEFAULT_MTBF
    restart: float = DEFAULT_RESTART

    def sane(self) -> Costs:
        """The same, within computable bounds; a save is never committed before it stops blocking."""
        blocked = _sane(self.blocked)
        return Costs(
            step=max(_SHORTEST_STEP, _sane(self.step)),
            blocked=blocked,
            commit=max(blocked, _sane(self.commit)),
            mtbf=_sane(self.mtbf),
            restart=_sane(self.restart),
        )


class Mtbf(msgspec.Struct, frozen=True, kw_only=True):
    """The mean time between failures, and how it is known."""

    seconds: float
    source: str


class Cadence(msgspec.Struct, frozen=True, kw_only=True):
    """A choice, with everything it rests on."""

    interval_steps: int
    interval_seconds: float
    expected_overhead: float
    """The share of all time that goes into saves, lost work and restarts; from 0 to 1."""
    mtbf: float
    young: float
    """Seconds between saves by each of the three formulas, before any bound."""
    daly: float
    optimal: float
    evidence: list[str] = []
    warnings: list[str] = []
    """About the interval that is aimed at, even while `at_most` keeps it shorter."""


def _sane(seconds: float) -> float:
    return min(max(seconds, _SHORTEST), _LONGEST)


def mtbf_of(running_seconds: float, failures: int, given: float = 0.0) -> Mtbf:
    """The MTBF to plan with: the given one, or the observed one, or a value between that and a guess."""
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
    """The seconds of training between saves for which `overhead` is least, before any bounds.

    A golden-section search over the logarithm of the interval: the overhead falls, then rises, and is least
    below the MTBF.
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
    """The share of all time that is lost with `seconds` of training between saves; from 0 to 1."""
    return -math.expm1(-_log_stretch(_sane(seconds), costs.sane()))


def _log_stretch(seconds: float, costs: Costs) -> float:
    """Logarithm of how much longer everything takes, as a sum of positive parts so that small ones count."""
    segment = (seconds + costs.blocked) / costs.mtbf
    extra = (costs.restart + costs.commit - costs.blocked) / costs.mtbf
    return extra + _log_growth(segment) + math.log1p(costs.blocked / seconds)


def _log_stretch_of_long_saves(seconds: float, costs: Costs) -> float:
    """The same, less a constant that would drown it where a save takes longer than the MTBF."""
    share = seconds / costs.mtbf
    return share - math.log(share) + math.log(-math.expm1(-share - costs.blocked / costs.mtbf))


def _cost_function(costs: Costs) -> Callable[[float, Costs], float]:
    return _log_stretch if costs.blocked < costs.mtbf else _log_stretch_of_long_saves


def _whole_steps(best: float, costs: Costs) -> int:
    """The better of the two whole numbers of steps around the best interval.

    The cost is not symmetric around its minimum, so rounding can pick the wrong one when an interval is only
    a few steps; when it is many, the two differ by less than can be computed, and rounding decides.
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
    """In steps: at least as long as a save takes, and 1; at most half the MTBF and half a day."""
    costs = costs.sane()
    lowest = max(1, math.ceil(costs.commit / costs.step * (1 - 1e-12)))
    highest = math.floor(min(costs.mtbf / 2, LONGEST_INTERVAL) / costs.step)
    return lowest, max(lowest, highest)


def choose_interval(costs: Costs, mtbf_source: str = "given", *, at_most: int | None = None) -> Cadence:
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
    """What is wrong with saving every `steps` steps, whoever chose that: a keyword and a text for each."""
    costs = costs.sane()
    seconds = steps * costs.step
    every = f"the interval of {plural(steps, 'step')} ({duration(seconds)})"
    found = {}
    if seconds >= costs.mtbf:
        found["exposed"] = (
            f"{every} is not shorter than the MTBF of {duration(costs.mtbf)}: more often than not a failure "
            "comes before the next save. Lower checkpoint.interval, or set it to 'auto'"
        )
    if costs.commit - costs.blocked > seconds * (1 + 1e-9):  # while it blocks, the next comes no nearer
        found["slow"] = (
            f"a save takes {duration(costs.commit)}, longer than {every}: the next is due before it is "
            "committed. Raise checkpoint.interval, or use faster storage"
        )
    if costs.blocked > BLOCKED_SHARE * (seconds + costs.blocked):
        found["blocking"] = (
            f"saving holds training up: typically for {duration(costs.blocked)}, at {every}. "
            "Make saves cheaper, or raise checkpoint.interval"
        )
    return found


# How often to save to the local tier.
#
# Guarantee: pure. The interval is at least one step and at least as long as a commit takes, so there is never
# more than one local save under way for long; otherwise it is the shortest at which the saves cost at most
# the given share of the time. It follows lasting changes and does not oscillate: between the cost at which it
# is raised and the one at which it is lowered lies a band, and every lowering that had to be taken back
# doubles how often the next one must have been wanted in a row. So with costs that only scatter, n decisions
# change the interval O(log n) times.
#
# A local save costs the time for which it holds training up, and whatever the steps beside it take longer:
# the copy, the digests and the commit use memory and processors that training uses too. Steps scatter anyway;
# of a difference only what is beyond twice its standard error counts.

LOCAL_SHARE = 0.01
LOCAL_PROBE_STEPS = 5
"""Steps before the first local save, and between the first ones, until their cost is known."""
RAISED_TO, LOWERED_TO = 0.9, 0.8
"""Where saves cost more than the share, the interval is raised until they cost this part of it; it is lowered
only to one at which they cost less than the other."""
COMMIT_PART = 0.9
"""The interval is lowered only if a commit takes no more than this part of it."""
PATIENCE_AT_FIRST, MOST_PATIENCE = 2, 256
"""How many decisions in a row must want a shorter interval."""
SETTLE = 3
"""How many decisions after a change the steps beside saves are not held against them: they are still those
of the interval before."""
ENOUGH_TO_COMPARE = 5
"""How many steps of each kind it takes to compare them."""


class LocalCosts(msgspec.Struct, frozen=True, kw_only=True):
    """What local saves cost, in seconds."""

    step: float
    """A step with no local save beside it."""
    blocked: float
    """How long a save holds up training."""
    slowdown: float = 0.0
    """By how much a step is longer while a save is under way."""
    commit: float
    """From the call of a save to its commit in the local tier."""
    nbytes: int = 0
    """What one rank stores."""

    def sane(self) -> LocalCosts:
        """The same, within computable bounds."""
        return msgspec.structs.replace(
            self,
            step=max(_SHORTEST_STEP, _sane(self.step)),
            blocked=min(max(0.0, self.blocked), _LONGEST),
            slowdown=min(max(0.0, self.slowdown), _LONGEST),
            commit=_sane(self.commit),
        )

    def of_a_save(self) -> float:
        """Seconds that one save costs training."""
        beside = max(1, math.ceil(self.commit / self.step * (1 - 1e-12)))
        return self.blocked + self.slowdown * beside

    def share(self, interval: int) -> float:
        """The share of all time that saves cost, one every `interval` steps."""
        cost = self.of_a_save()
        return cost / (interval * self.step + cost)


class LocalPace(msgspec.Struct, frozen=True, kw_only=True):
    """The interval, and what the next decision must remember."""

    interval: int
    wanted: int = 0
    """How many decisions in a row wanted a shorter one."""
    patience: int = PATIENCE_AT_FIRST
    lowered: bool = False
    """Whether the last change made it shorter."""
    settled: int = SETTLE
    """How many decisions have passed since the last change."""


class LocalCadence(msgspec.Struct, frozen=True, kw_only=True):
    """A choice, with what it rests on."""

    pace: LocalPace
    share: float
    """The share of all time that local saves are expected to cost."""
    evidence: list[str]


def slowdown_of(beside: Sequence[float], clear: Sequence[float]) -> float:
    """By how much the steps beside a save are longer than those without; 0 where that cannot be told."""
    if min(len(beside), len(clear)) < ENOUGH_TO_COMPARE:
        return 0.0
    error = math.hypot(_error_of_median(beside), _error_of_median(clear))
    return max(0.0, median(beside) - median(clear) - 2 * error)


def _error_of_median(values: Sequence[float]) -> float:
    """Its standard error, from the median deviation: outliers (an evaluation between steps) do not count."""
    middle = median(values)
    return 1.2533 * 1.4826 * median(abs(value - middle) for value in values) / math.sqrt(len(values))


def least_local_interval(costs: LocalCosts, share: float, *, commits: float = 1.0) -> int:
    """The shortest interval within the share; `commits`: the part of it that a commit may take."""
    costs = costs.sane()
    share = min(max(share, 1e-6), 1.0)
    for_commit = costs.commit / commits / costs.step
    for_share = costs.of_a_save() * (1 - share) / share / costs.step
    return max(1, math.ceil(max(for_commit, for_share) * (1 - 1e-12)))


def choose_local(costs: LocalCosts, share: float, pace: LocalPace) -> LocalCadence:
    """Decide anew, at a save, how long the interval is from now on."""
    costs = costs.sane()
    present, settled = pace.interval, pace.settled >= SETTLE
    judged = costs if settled else msgspec.structs.replace(costs, slowdown=0.0)
    too_slow = costs.commit > present * costs.step * (1 + 1e-9)
    shorter = least_local_interval(costs, share * LOWERED_TO, commits=COMMIT_PART)
    if too_slow or judged.share(present) > share:
        lowest = least_local_interval(costs, 1.0)
        wanted = max(least_local_interval(judged, share * RAISED_TO), present + 1)
        interval = max(lowest, min(wanted, GROWTH * present))
        patience = min(MOST_PATIENCE, pace.patience * 2) if pace.lowered else pace.patience
        pace = LocalPace(interval=interval, patience=patience, settled=0)
    elif shorter < present and pace.wanted + 1 >= pace.patience:
        pace = LocalPace(interval=shorter, patience=pace.patience, lowered=True, settled=0)
    else:
        again = pace.wanted + 1 if shorter < present else 0
        pace = msgspec.structs.replace(pace, wanted=again, settled=min(SETTLE, pace.settled + 1))
    every = plural(pace.interval, "step")
    beside = (
        f"a step beside it takes {duration(costs.slowdown)} longer"
        if costs.slowdown
        else "steps beside it take no longer"
    )
    evidence = [
        f"a step takes {duration(costs.step)}; a local save blocks for {duration(costs.blocked)}, {beside}, "
        f"and it is committed after {duration(costs.commit)}",
        f"at most {share:.2%} of the time may go into local saves; every {every} they cost "
        f"{costs.share(pace.interval):.2%}",
    ]
    if pace.interval > 1 and costs.commit > (pace.interval - 1) * costs.step:
        evidence.append(f"not below {every}: a local save must be committed before the next is due")
    if costs.nbytes:
        rate = costs.nbytes / (pace.interval * costs.step)
        evidence.append(f"each rank copies {size(costs.nbytes)} a save, {size(round(rate))} a second")
    return LocalCadence(pace=pace, share=costs.share(pace.interval), evidence=evidence)


# Which checkpoints are kept, and why.
#
# Guarantee: pure, and careful. Whatever the rules say, these are never chosen for deletion: the newest
# checkpoint on the line, the newest proven and the newest verified one, the one that the attempt came from
# and its parent, a suspect one (it is under investigation), one that is damaged or cannot be read (it is
# evidence), and one that this run did not save. At least two sound ones on the line stay. Deciding again
# after the deletions deletes nothing more.
#
# A checkpoint whose bytes were read back and found right is not deleted while no newer one was: the newest
# such one on the line stays. While read-backs go on, one that could be deleted waits until a newer one is
# known to be right; but not for ever: at most twice as many as asked for are kept for lack of that, because a
# full disk would end the run.
#
# Only checkpoints that a resume could use count: on the line, of sound structure, neither suspect nor
# condemned. So a damaged newer one never pushes out a sound older one.


LEAST = 2
"""How many to keep at least, because one may turn out to be bad."""

PROVEN = "proven"
TRUSTED = frozenset({"verified", PROVEN, "acquitted"})
USABLE = frozenset({"committed", *TRUSTED})
WAITS = "no newer one was read back yet"
SUSPECT, CONDEMNED, ABANDONED = "suspect", "condemned", "abandoned"


class Condition(StrEnum):
    """What a look at its files says about a checkpoint."""

    SOUND = "sound"
    BROKEN = "broken"
    UNREADABLE = "unreadable"
    """The file system refused, or a newer release wrote it: nothing is known."""
    FOREIGN = "foreign"
    """It is not what this run recorded under that name."""


class Stored(msgspec.Struct, frozen=True, kw_only=True):
    """A checkpoint that exists."""

    id: str
    step: int
    created: float
    """Seconds since 1970; 0 if not known."""
    standing: str
    condition: Condition
    on_line: bool
    pinned: str = ""
    """Why the run still needs it, if it does: it is the head, or the head's parent."""
    problem: str = ""
    """What is wrong with it, unless it is sound."""
    read_back: bool = False
    """Whether all of its bytes were read from storage after its commit, and were those that were saved."""

    @property
    def is_verified(self) -> bool:
        """Whether its bytes are known to have been right after they were stored."""
        return self.read_back or self.standing in TRUSTED

    @property
    def counts(self) -> bool:
        """Whether a resume could use it."""
        return self.on_line and self.condition is Condition.SOUND and self.standing in USABLE


class RetentionRules(msgspec.Struct, frozen=True, kw_only=True):
    """How much to keep."""

    keep_last: int = 0
    """How many of the last to keep; 0 keeps everything, and at least LEAST are kept in any case."""
    keep_every_steps: int = 0
    keep_every_hours: float = 0.0
    broken: bool = False
    """Whether to delete damaged ones too; only a person asks for that."""
    await_read_back: bool = False
    """Whether checkpoints are being read back: then older ones wait for that, within bounds."""


class RetentionRuling(msgspec.Struct, frozen=True):
    id: str
    keep: bool
    reason: str


def retain(candidates: Iterable[Stored], rules: RetentionRules) -> list[RetentionRuling]:
    """One verdict per checkpoint, newest step first."""
    every = sorted(candidates, key=lambda c: (c.step, c.id), reverse=True)
    line = [candidate for candidate in every if candidate.counts]
    last = max(LEAST, rules.keep_last)
    chosen = _chosen(line, rules, last)
    verdicts = []
    for candidate in every:
        keep, reason = _judge(candidate, rules, line, last, chosen.get(candidate.id, ""))
        verdicts.append(RetentionRuling(candidate.id, keep, reason))
    return verdicts


def _judge(
    candidate: Stored, rules: RetentionRules, line: Sequence[Stored], last: int, chosen: str
) -> tuple[bool, str]:
    match candidate.condition:
        case Condition.FOREIGN:
            return True, f"not this run's: {candidate.problem}"
        case Condition.UNREADABLE:
            return True, f"cannot be judged: {candidate.problem}"
    if candidate.standing == SUSPECT:
        return True, "suspect: under investigation"
    if candidate.condition is Condition.BROKEN:
        if not rules.broken:
            return True, f"damaged, kept as evidence: {candidate.problem}"
        if not line:
            return True, f"damaged, but the run has no sound one: {candidate.problem}"
        return False, f"damaged: {candidate.problem}"
    if candidate.pinned:
        return True, candidate.pinned
    if rules.keep_last == 0:
        return True, "not damaged" if rules.broken else "keep_last is 0: nothing is deleted"
    if chosen:
        return True, chosen
    newer = [other for other in line if other.step > candidate.step]
    if candidate.counts:
        if rules.await_read_back and len(newer) < 2 * last and not any(one.is_verified for one in newer):
            return True, WAITS
        return False, f"older than the last {last}"
    return _judge_unusable(candidate, newer, last)


def _judge_unusable(candidate: Stored, newer: Sequence[Stored], last: int) -> tuple[bool, str]:
    """It is sound, and yet no resume would use it: it goes as soon as the run is well past it."""
    if candidate.standing == CONDEMNED:
        why = "condemned"
    elif not candidate.on_line or candidate.standing == ABANDONED:
        why = "abandoned"
    else:
        return True, f"its standing is not known here: {candidate.standing}"
    if len(newer) < last:
        return True, f"{why}, but only {len(newer)} of {last} newer sound ones are on the line"
    if candidate.read_back and candidate.standing != CONDEMNED and not any(one.is_verified for one in newer):
        return True, f"{why}, but it was read back, and no newer one was"
    return False, f"{why}, and {len(newer)} newer sound ones are on the line"


def _chosen(line: Sequence[Stored], rules: RetentionRules, last: int) -> dict[str, str]:
    """Why each checkpoint of the line (newest first) that the rules keep is kept; the first reason counts."""
    reasons: dict[str, str] = {}
    for place, candidate in enumerate(line[:last], start=1):
        reasons[candidate.id] = f"one of the last {last}" if place > 1 else "the newest on the line"
    if proven := [candidate for candidate in line if candidate.standing == PROVEN]:
        reasons.setdefault(proven[0].id, "the newest proven one")
    if trusted := [candidate for candidate in line if candidate.standing in TRUSTED]:
        reasons.setdefault(trusted[0].id, "the newest verified one")
    if read := [candidate for candidate in line if candidate.read_back]:
        reasons.setdefault(read[0].id, "the newest one that was read back")
    if every := rules.keep_every_steps:
        for candidate in _first_of_each((c.step // every, c) for c in line if c.step >= every):
            multiple = candidate.step // every * every
            reasons.setdefault(candidate.id, f"the first at or after step {multiple} (every {every} steps)")
    if hours := rules.keep_every_hours:
        seconds = hours * 3600
        for candidate in _first_of_each((c.created // seconds, c) for c in line):
            reasons.setdefault(candidate.id, f"the first of its {hours:g} hours")
    return reasons


def _first_of_each(marked: Iterable[tuple[Hashable, Stored]]) -> list[Stored]:
    """For each mark the candidate with the lowest step, so that later saves never take its place."""
    first: dict[Hashable, Stored] = {}
    for mark, candidate in marked:
        if mark not in first or candidate.step < first[mark].step:
            first[mark] = candidate
    return list(first.values())


# How a snapshot is taken from a device: by clone, overlap or block. Pure.
#
# Guarantee: the same inputs give the same choice, and every choice says what it rests on. `clone` is chosen
# only where the device keeps a reserve beside the clone, `overlap` only where something is known to wait for
# it and no snapshot taken that way was ever torn. What is asked for by name is done unless it cannot be;
# `warning` then says so.
#
# clone    everything is copied within the device, then to the host while training goes on. Costs memory.
# overlap  what torch optimizers own is copied to the host during the next forward and backward; their steps
#          wait for it on the device. Costs time only if the copy outlasts forward and backward.
# block    training waits for the copy to the host. Always possible.


Way = Literal["clone", "overlap", "block"]
Setting = Literal["auto", "clone", "overlap", "block"]

COPY_BYTES_PER_SECOND = 50e9
"""The speed of a page-locked copy over PCIe 5; used until one has been measured."""
CLONE_SLACK = 1.05
"""A clone takes this many times the bytes it copies: tensors are aligned, and allocations are rounded up."""
RESERVE_SHARE = 0.02
LEAST_RESERVE = 512 * 1024**2
"""How much device memory a clone must leave: the larger of this share of it and this many bytes."""
OUTLASTS = 1.2
"""A step must be this many times as long as the copy for the copy to be hidden behind it."""
ENOUGH_OWNED = 0.8
"""The share of a snapshot's bytes that torch optimizers must own for overlapping to be worthwhile."""


class Choice(msgspec.Struct, frozen=True, kw_only=True):
    """A way to take a snapshot, with what the choice rests on."""

    way: Way
    evidence: list[str]
    warning: str = ""
    """Why a way that was asked for by name is not taken, or what it will cost; empty if neither applies."""


def reserve(device_bytes: int) -> int:
    """The bytes of a device that a clone must leave free."""
    return max(LEAST_RESERVE, math.ceil(max(0, device_bytes) * RESERVE_SHARE))


def clone_bytes(needed_bytes: int, device_bytes: int) -> int:
    """How many bytes must be free for a clone to be taken."""
    return math.ceil(max(0, needed_bytes) * CLONE_SLACK) + reserve(device_bytes)


def owned_enough(owned_bytes: int, needed_bytes: int) -> bool:
    """Whether torch optimizers own enough of a snapshot for overlapping it to be worthwhile."""
    return owned_bytes > 0 and owned_bytes >= ENOUGH_OWNED * needed_bytes


def estimated_copy(needed_bytes: int) -> float:
    """How many seconds the copy to the host will take, if none has been measured yet."""
    return max(0, needed_bytes) / COPY_BYTES_PER_SECOND


def choose_snapshot(
    setting: Setting,
    *,
    free_bytes: int,
    needed_bytes: int,
    device_bytes: int = 0,
    copy_seconds: float | None = None,
    step_seconds: float | None = None,
    has_owned: bool = False,
    torn_before: bool = False,
) -> Choice:
    """The way to take the next snapshot.

    `free_bytes`: what could be allocated on the device (including its caching allocator's unused memory);
    `needed_bytes`: what the snapshot holds on it; with several devices, those of the tightest one.
    `copy_seconds`: the last measured copy to the host; `step_seconds`: the median step; None if unknown.
    `has_owned`: see `owned_enough`. `torn_before`: an overlapped snapshot was changed during its copy.
    """
    room, room_why = _room(free_bytes, needed_bytes, device_bytes)
    usable, usable_why = _usable(has_owned, torn_before)
    hidden, hidden_why = _hides(copy_seconds, step_seconds, estimated_copy(needed_bytes))

    if setting == "block":
        return Choice(way="block", evidence=["block was asked for"])
    if setting == "overlap":
        if not usable:
            return Choice(
                way="block",
                evidence=["overlap was asked for", *usable_why],
                warning=f"overlap was asked for, but cannot be: {'; '.join(usable_why)}; blocking instead",
            )
        cost = "" if hidden else f"overlap was asked for, and steps may wait for the copy: {hidden_why}"
        return Choice(
            way="overlap", evidence=["overlap was asked for", *usable_why, hidden_why], warning=cost
        )
    if room:
        asked = ["clone was asked for"] if setting == "clone" else []
        return Choice(way="clone", evidence=[*asked, room_why])

    way: Way = "overlap" if usable and hidden else "block"
    refused = f"clone was asked for, but does not fit: {room_why}; {way} instead"
    return Choice(
        way=way,
        evidence=[room_why, *usable_why, *([hidden_why] if usable else [])],
        warning=refused if setting == "clone" else "",
    )


def _known(seconds: float | None) -> bool:
    return seconds is not None and math.isfinite(seconds) and seconds >= 0


def _room(free_bytes: int, needed_bytes: int, device_bytes: int) -> tuple[bool, str]:
    wanted = clone_bytes(needed_bytes, device_bytes)
    need, free = f"a clone needs {size(wanted)} with its reserve", size(max(0, free_bytes))
    if free_bytes >= wanted:
        return True, f"{need}, {free} are free on the device"
    return False, f"{need}, only {free} are free on the device"


def _usable(has_owned: bool, torn_before: bool) -> tuple[bool, list[str]]:
    if torn_before:
        return False, ["an overlapped snapshot of this run was changed while it was copied"]
    if not has_owned:
        return False, ["torch optimizers own too little of the state to wait for its copy"]
    return True, ["torch optimizers own the state and wait for its copy"]


def _hides(copy: float | None, step: float | None, estimate: float) -> tuple[bool, str]:
    """Whether a step outlasts the copy (`estimate` if none was measured), and what that rests on."""
    measured = copy if _known(copy) else None
    seconds = estimate if measured is None else measured
    takes = f"the copy takes {duration(seconds)} ({'estimated' if measured is None else 'measured'})"
    if step is None or not _known(step):
        return False, f"{takes}, how long a step takes is not known yet"
    if step >= OUTLASTS * seconds:
        return True, f"{takes}, a step {duration(step)}: at least {OUTLASTS} times as long"
    return False, f"{takes}, a step only {duration(step)}: less than {OUTLASTS} times as long"


# When storage is so slow that its users should know. Pure.


PATIENCE = 3.0
"""Seconds that any save may take, for small writes and commits on a file system that many nodes share."""
RATE = 50 * 2**20
"""Bytes a second, over all ranks together: a single disk of a desktop computer is faster."""


def is_slow(stored: int, seconds: float) -> bool:
    """Whether writing and committing that many bytes took longer than usable storage needs."""
    return seconds > PATIENCE + stored / RATE
