"""One rank's part in a report on stragglers: measured, sent, judged, reported, acted on.

Guarantee: a step costs a few readings of clocks, and no exchange. The ranks meet a few times in each interval
(`LOOKS`), at the same step on all of them: rank 0 says whether a report is due and after how many steps to
look again, and for a report each rank sends it one letter of fixed size. Both go over the group made for
saves, whose collectives never mix with those of training. If something goes wrong in a report, that is logged
and costs the report, never the run.
"""

from __future__ import annotations

import contextlib
import logging
import math
import sys
import time
import weakref
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from types import TracebackType
from typing import Any, ClassVar, Self, TypeVar

import msgspec
import torch
import torch.distributed as dist
from torch import nn

from holdfast.base import duration, is_taken, plural, say_as_rank
from holdfast.checkpoint.state import Tracked
from holdfast.cluster import node_name, own_place
from holdfast.config import Effective, Settings, StragglerSettings
from holdfast.errors import ConfigError, ControlError, UsageError
from holdfast.journal import Event
from holdfast.journal.events import StragglerFound, StragglersReported
from holdfast.policy import Kind, Place, Rejection
from holdfast.record import Group, LaunchInfo, join_group, leave_group, read_attempt, rejection_of
from holdfast.train import Membership
from holdfast.train.check import Rejecting, before_steps
from holdfast.train.stragglers.scores import (
    COMPUTE,
    ENOUGH_STEPS,
    INPUT,
    OTHER,
    Meets,
    Named,
    RankTimes,
    Score,
    ScoreKind,
    ScoreLimits,
    Span,
    StragglerFinding,
    StragglerJudge,
    average,
    is_pair,
    summarise,
)
from holdfast.train.stragglers.times import ASIDE, DeviceTimes, GradientMark, HostTimes, Section, Times
from holdfast.train.stragglers.waits import Waits

log = logging.getLogger("holdfast")

# A rank's part in a report on stragglers as it travels: a letter of the same length for everybody.


LETTER = 2048
"""Bytes of a letter."""
MOST_SECTIONS = 16
LONGEST_NAME = 48
LONGEST_PLACE = 160
MOST_GROUPS = 8
"""Groups in which a rank waits; it has a handful: of data, of tensors, of its pipeline, of experts."""


def letter_of(mine: RankTimes) -> torch.Tensor:
    """Its letter, with names of bounded length; with none if their bytes still make it too long."""
    shown = msgspec.structs.replace(
        mine,
        node=mine.node[:LONGEST_PLACE],
        device=mine.device[:LONGEST_PLACE],
        sections=_few(mine.sections),
        meets=_few_groups(mine.meets),
    )
    written = msgspec.json.encode(shown)
    if len(written) > LETTER:
        written = msgspec.json.encode(msgspec.structs.replace(shown, meets=_few_groups(shown.meets, 1)))
    if len(written) > LETTER:  # better figures without names than no figures
        whole = Span(mine.arrives, mine.waits, mine.busy)
        written = msgspec.json.encode(
            msgspec.structs.replace(mine, node="", device="", sections={OTHER: whole}, meets={})
        )
    return padded(written)


def read_letter(letter: torch.Tensor, rank: int) -> RankTimes:
    try:
        return msgspec.json.decode(letter.numpy().tobytes(), type=RankTimes)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return RankTimes(rank=rank)  # without steps it says nothing


def padded(written: bytes) -> torch.Tensor:
    """Padded to the same length for everybody; spaces after JSON mean nothing."""
    if len(written) > LETTER:
        raise ValueError(f"a letter of {len(written)} bytes is longer than {LETTER}, which all ranks expect")
    return torch.frombuffer(bytearray(written.ljust(LETTER)), dtype=torch.uint8)


def _few(sections: dict[str, Span]) -> dict[str, Span]:
    """At most MOST_SECTIONS sections, under names of bounded length; the smallest count as `other`."""
    shown: dict[str, Span] = {}
    order = sorted(sections, key=lambda name: (name in (INPUT, COMPUTE, OTHER), sections[name].own))
    for at, name in enumerate(reversed(order)):
        key = name[:LONGEST_NAME] if at < MOST_SECTIONS else OTHER
        shown[key] = _sum(shown[key], sections[name]) if key in shown else sections[name]
    return {name: _short(span) for name, span in shown.items()}


def _few_groups(meets: dict[str, Meets], most: int = MOST_GROUPS) -> dict[str, Meets]:
    """The neighbours in a pipeline, without which its stages would be compared; the groups met most often."""
    pairs = [name for name in meets if is_pair(name)]
    others = sorted(meets.keys() - set(pairs), key=lambda name: (-meets[name].count, name))
    order = sorted(pairs)[:MOST_GROUPS] + others[: max(most - len(pairs), 1)]
    return {name: Meets(round(meets[name].seconds, 7), round(meets[name].count, 3)) for name in order}


def _short(span: Span) -> Span:
    return Span(round(span.own, 7), round(span.wait, 7), None if span.busy is None else round(span.busy, 7))


def _sum(one: Span, other: Span) -> Span:
    busy = None if one.busy is None or other.busy is None else one.busy + other.busy
    return Span(one.own + other.own, one.wait + other.wait, busy)


# A report on stragglers as the journal and the log have it.


MOST_ROWS = 512
"""Most ranks that are listed one by one; if there are more, each node's slowest stands for the node."""


def event_of(
    ranks: Sequence[RankTimes], finding: StragglerFinding, step: int, seconds: float
) -> StragglersReported:
    rows, by_node = _rows(ranks)
    scores = {one.rank: one for one in finding.scores}
    mine = [scores.get(row.rank, Score(rank=row.rank)) for row in rows]
    names = dict.fromkeys(name for row in rows for name in row.sections)
    return StragglersReported(
        step=step,
        steps=min((one.steps for one in ranks), default=0),
        seconds=round(seconds, 3),
        step_seconds=round(finding.step, 6),
        ranks=[row.rank for row in rows],
        nodes=[row.node for row in rows],
        sections={name: _column(rows, name, lambda span: span.own) for name in names},
        waiting=[round(row.waits, 6) for row in rows],
        relative=[_rounded(one.relative) for one in mine],
        individual=[_rounded(one.individual) for one in mine],
        by_node=by_node,
        group_slower=finding.group_slower,
        unclear=finding.unclear,
        exchange={name: round(seconds, 6) for name, seconds in finding.floors.items()},
    )


def found_event(fate: Fate, step: int) -> StragglerFound:
    one = fate.named
    return StragglerFound(
        step=step,
        kind=str(one.kind),
        section=one.section,
        why=fate.why,
        rank=one.rank,
        node=one.node,
        device=one.device,
        relative=_rounded(one.relative),
        individual=_rounded(one.individual),
        seconds=round(one.seconds, 6),
        then=fate.then,
        ranks=list(one.ranks),
        waits=None if one.waits is None else round(one.waits, 6),
        others_wait=None if one.others_wait is None else round(one.others_wait, 6),
    )


class Tally:
    """What slow ranks have cost in this attempt, and when to say so again: after 3 more reports, then each
    time after 4 times as many as before, so that a run of a year says it a dozen times."""

    def __init__(self) -> None:
        self._waited: dict[str, float] = {}
        self._named: dict[str, Named] = {}
        self._reports: dict[str, int] = {}

    def count(self, event: StragglersReported, finding: StragglerFinding) -> None:
        for rank in event.ranks:
            self._add(f"rank {rank}", event.behind(rank, ""))
        for node in dict.fromkeys(event.nodes):
            self._add(f"node {node}", event.behind(None, node))
        self._named = {one.key: one for one in finding.named}
        fresh = {one.key for one in finding.fresh}
        self._reports = {key: 1 if key in fresh else self._reports.get(key, 0) + 1 for key in self._named}

    def so_far(self, named: Named) -> str:
        """The end of a sentence about it; empty if nothing was measured."""
        waited = self._waited.get(named.key, 0.0)
        return f"; the others have waited {duration(waited)} for it so far" if waited else ""

    def still_slow(self) -> list[str]:
        return [
            f"{named.describe().replace(' is slow ', ' is still slow ', 1)}{self.so_far(named)}"
            for key, named in self._named.items()
            if self._reports[key] in _AGAIN
        ]

    def _add(self, key: str, seconds: float) -> None:
        if seconds > 0:
            self._waited[key] = self._waited.get(key, 0.0) + seconds


_AGAIN = frozenset(4**power for power in range(1, 16))
"""After these numbers of reports in a row that find a rank slow, that is said again."""


def lines_of(finding: StragglerFinding, count: int, step: int) -> list[str]:
    """The best and the worst scores, for the log and the terminal; all lines begin alike."""
    if not count or not finding.scores:
        return []
    begin = f"straggler scores at step {step} (1.00 is full speed):"
    if not finding.enough:
        return [f"{begin} too few steps were measured for a report"]
    ranks = len(finding.scores)
    listed = [("best", finding.best(count)), ("worst", finding.worst(count))]
    if ranks <= 2 * count:  # the two would name the same ranks
        listed = [("slowest first", finding.worst(ranks))]
    lines = []
    for what, scores in listed:
        shown = ", ".join(_shown(one) for one in scores)
        lines.append(f"{begin} {what} of {plural(ranks, 'rank')}: {shown}")
    if finding.unclear:
        who = "rank" if len(finding.unclear) == 1 else "ranks"
        listed_ranks = ", ".join(map(str, finding.unclear[:count]))
        lines.append(
            f"{begin} {who} {listed_ranks}: far more work than the others, as a stage of a pipeline may "
            "have, and no other rank has the same; whether by design or not cannot be told, only whether it "
            "grows"
        )
    if finding.group_slower:
        why = "most ranks are slower than they were at their best, so no rank can be named for it"
        lines.append(f"{begin} {why}")
    return lines


def _shown(score: Score) -> str:
    parts = [
        f"{value:.2f} {against}"
        for value, against in (
            (score.relative, "against the others"),
            (score.individual, "against its own best"),
        )
        if value is not None
    ]
    if score.waiting >= 0.01:
        parts.append(f"waits {score.waiting:.0%} of a step")
    return f"rank {score.rank} ({', '.join(parts) or 'no score yet'})"


def _rows(ranks: Sequence[RankTimes]) -> tuple[list[RankTimes], bool]:
    if len(ranks) <= MOST_ROWS:
        return list(ranks), False
    slowest: dict[str, RankTimes] = {}
    for one in ranks:
        if one.node not in slowest or one.arrives > slowest[one.node].arrives:
            slowest[one.node] = one
    return sorted(slowest.values(), key=lambda one: -one.arrives)[:MOST_ROWS], True


def _column(rows: Sequence[RankTimes], name: str, of: Callable[[Span], float]) -> list[float]:
    return [round(of(row.sections[name]), 6) if name in row.sections else 0.0 for row in rows]


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 4)


# What is done about ranks that are named: all are reported, and one of them may be acted on.


TOLD, STOP, EXCLUDE = "told", "stop", "exclude"


def to_the_log(line: str) -> None:
    log.info("holdfast: %s", line)


def to_the_terminal(line: str) -> None:
    """If nobody has set up logging, a line of level INFO would reach nobody: so print it."""
    if log.isEnabledFor(logging.INFO) and is_taken(log):
        to_the_log(line)
    else:
        say_as_rank(line)


class Fate(msgspec.Struct, frozen=True):
    """What comes of a rank or node that is named."""

    named: Named
    then: str
    """told, stop or exclude."""
    why: str


class Actions(msgspec.Struct, frozen=True, kw_only=True):
    """What a run does about a rank that is named. `exclude` is called on all ranks, the others on rank 0."""

    tell: Callable[[Event], None]
    say: Callable[[str], None] = to_the_log
    """Shows people a line that is not a warning."""
    stop: Callable[[str], None] | None = None
    exclude: Callable[[Named, int], None] | None = None
    why_not: Callable[[Named], str] | None = None
    """Why this one is not to be excluded; empty if it is."""

    def fates(self, fresh: Sequence[Named]) -> list[Fate]:
        """In the order given. The next attempt measures everything anew, so acting on one is enough."""
        then = EXCLUDE if self.exclude is not None else STOP if self.stop is not None else TOLD
        refused = [
            self.why_not(one) if then == EXCLUDE and self.why_not and one.kind is not ScoreKind.LINK else ""
            for one in fresh
        ]
        # A link is nobody's fault in particular: it is told, whatever is done about ranks.
        free = [
            one for one, why in zip(fresh, refused, strict=True) if not why and one.kind is not ScoreKind.LINK
        ]
        worst = max(free, key=lambda one: one.share, default=None)
        found = []
        for one, why in zip(fresh, refused, strict=True):
            if then == EXCLUDE and worst is not None and one is not worst and one.kind is not ScoreKind.LINK:
                why = why or f"one at a time is excluded, now {worst.key}"
            reason = f"{one.describe()}; {why}" if why else one.describe()
            found.append(Fate(one, then if one is worst else TOLD, reason))
        return found


LOOKS = 4
"""How often in an interval the ranks meet, to see in time that steps now take longer than before."""
WARM_UP = 4
"""First steps of an attempt, which are not measured: they compile, allocate and fill caches."""
FIRST_LOOK = 4
"""Steps after those at which the ranks meet for the first time."""
WAIT_ON_HOST, WAIT_ON_DEVICE = 3e-6, 25e-6
"""Seconds that timing one wait in a collective takes of the host; on a device it records events."""
WAITS_COST = 5e-4
"""Part of the time of all steps that this may take; where there are so many that it would be more, only one
step in some is measured, the same on all ranks."""
MOST_BETWEEN = 64
"""Steps of which at least one is measured, whatever it costs."""

T = TypeVar("T")
_NOTHING = contextlib.nullcontext()


class Stragglers:
    """Measures this rank's steps. Every rank makes the same calls of `end_step`."""

    _active: ClassVar[weakref.ref[Stragglers] | None] = None

    def __init__(
        self,
        chosen: StragglerSettings,
        group: Group,
        *,
        models: Iterable[nn.Module] = (),
        optimizers: Iterable[torch.optim.Optimizer] = (),
        place: Place | None = None,
        device: torch.device | None = None,
        actions: Actions,
    ) -> None:
        refuse_another()
        Stragglers._active = weakref.ref(self)
        self._chosen = chosen
        self._group = group
        self._alone = group.process_group is None
        self._place = place or Place("")
        self._actions = actions
        self._times: Times = HostTimes()
        if device is not None and device.type == "cuda":
            self._times = DeviceTimes(device)
        self._waits = None if self._alone else Waits(self._times, group.process_group)
        self._every = chosen.profiling_interval
        self._measured = 0
        self._mark = GradientMark([] if self._alone else models, self._times.mark)
        self._judge = StragglerJudge(
            ScoreLimits(
                relative=chosen.gpu_relative_perf_threshold if chosen.calc_relative_gpu_perf else None,
                individual=chosen.gpu_individual_perf_threshold if chosen.calc_individual_gpu_perf else None,
            )
        )
        self._count = 0
        self._next_look = WARM_UP + FIRST_LOOK
        self._since = time.monotonic()
        self._counted = 0
        self._measuring = self._spoiled = False
        self._off = False
        self._failed: set[str] = set()
        self._hooks = before_steps(list(optimizers), self._ready)
        self._tally = Tally()
        self.finding: StragglerFinding | None = None
        """What the last report concluded; on rank 0."""

    # --- the loop -------------------------------------------------------------------------------------------

    def begin_step(self) -> None:
        """The step begins, with getting its batch, right after the previous step."""
        self._spoiled = False
        self._measuring = not self._off and self._count % self._every == 0
        if self._measuring:
            self._times.begin()
        if self._waits is not None:
            self._waits.begin_step(measured=self._measuring)

    def section(
        self, name: str, around: contextlib.AbstractContextManager[None] | None = None
    ) -> contextlib.AbstractContextManager[None]:
        """A named span of the step, within `around`, which is entered before it and left after it."""
        return Section(self._times, name, around) if self._measuring else around or _NOTHING

    def input(self) -> contextlib.AbstractContextManager[None]:
        return self.section(INPUT)

    def around(self, function: Callable[..., T]) -> Callable[..., T]:
        """The function, timed as section `compute`; what comes after it is waiting, until `arrived`."""
        if not self._measuring:
            return function
        times, waiting = self._times, not self._alone

        def timed(*args: Any, **kwargs: Any) -> T:
            times.enter(COMPUTE)
            try:
                return function(*args, **kwargs)
            finally:
                times.leave(waiting=waiting)

        return timed

    def arrived(self) -> None:
        """Whatever this rank waited for has come."""
        if self._measuring:
            self._times.arrived()

    def _ready(self, optimizer: torch.optim.Optimizer, *unused: object) -> None:
        """An optimizer that steps has all its gradients."""
        del optimizer, unused
        self.arrived()

    def spoil(self) -> None:
        """Something that is not part of training takes time in this step: do not count the step."""
        self._spoiled = True

    def end_step(self) -> None:
        """The step is complete: what follows is not part of it."""
        if self._off:
            return
        if self._waits is not None:
            self._waits.on = False
        if self._measuring:
            self._measuring = False
            self._measured += 1
            if not self._spoiled:
                self._times.end()
        self._mark.end_step()
        self._count += 1
        if self._count == WARM_UP:
            self._begin_report()

    def meet(self, step: int) -> StragglerFinding | None:
        """Call it after every step, on all ranks: makes a report if one is due; its result is on rank 0."""
        return self._look(step) if self._count >= self._next_look and not self._off else None

    def close(self) -> None:
        self._off = True
        self._measuring = False
        self._mark.close()
        if self._waits is not None:
            self._waits.close()
        for hook in self._hooks:
            hook.remove()
        if Stragglers._active is not None and Stragglers._active() is self:
            Stragglers._active = None

    # --- meeting --------------------------------------------------------------------------------------------

    def _begin_report(self) -> None:
        self._since, self._counted, self._mark.seen = time.monotonic(), self._count, 0
        self._measured = 0
        if self._waits is not None:
            self._waits.begin_report()
        self._times.take()
        self._times.take_met()

    def _safely(self, what: str, step: int, work: Callable[[], T], otherwise: T) -> T:
        """What `work` returns, or `otherwise`: a rank must not fail here and leave the others waiting for it
        in an exchange. If the same thing fails again, that is not logged again."""
        try:
            return work()
        except Exception:
            if what not in self._failed:
                self._failed.add(what)
                log.exception(
                    "holdfast: stragglers: %s failed on rank %d after step %d; this report does without it, "
                    "training goes on, and this is not logged again. The cause is below",
                    what,
                    self._group.rank,
                    step,
                )
            return otherwise

    def _look(self, step: int) -> StragglerFinding | None:
        wait = [0, ENOUGH_STEPS, 0, self._every]
        due, steps, off, every = self._told_by_rank_0(
            self._safely("planning a report", step, self._plan, wait)
        )
        self._next_look, self._every = self._count + steps, every
        if off:
            self.close()
            return None
        return self._report(step) if due else None

    def _plan(self) -> list[int]:
        """Rank 0's plan: whether a report is due, steps until the next look, whether to switch this off, and
        one of how many steps is measured from now on."""
        if not self._group.is_coordinator:
            return [0, 0, 0, 1]
        if other := other_detector():
            log.warning(
                "holdfast: %s was switched on during the run; two detectors of stragglers must not measure "
                "at once, so Holdfast's is off from here on",
                other,
            )
            return [0, 1, 1, 1]
        interval = self._chosen.report_time_interval
        elapsed = time.monotonic() - self._since
        steps = max(1, self._count - self._counted)
        enough = self._measured >= ENOUGH_STEPS
        due = enough and elapsed >= interval * (1 - 0.5 / LOOKS)
        left = interval if due else max(interval - elapsed, 0.0)
        wanted = min(left, interval / LOOKS) / max(elapsed / steps, 1e-6)
        least = 1 if enough and not due else ENOUGH_STEPS
        every = self._one_in(elapsed / steps)
        return [int(due), max(least, min(int(wanted), 10**9)), 0, every]

    def _one_in(self, step: float) -> int:
        """Of how many steps of so many seconds one is measured, so that timing its waits costs little."""
        least = self._chosen.profiling_interval
        if self._waits is None or not self._measured:
            return max(least, self._every)
        cost = WAIT_ON_DEVICE if self._times.on_device else WAIT_ON_HOST
        part = self._waits.count / self._measured * cost / max(step, 1e-6)
        return max(least, min(math.ceil(part / WAITS_COST), MOST_BETWEEN))

    def _told_by_rank_0(self, numbers: list[int]) -> list[int]:
        if self._group.process_group is None:
            return numbers
        word = torch.tensor(numbers, dtype=torch.int64)
        dist.broadcast(word, src=0, group=self._group.process_group)
        return [int(value) for value in word.tolist()]

    def _report(self, step: int) -> StragglerFinding | None:
        seconds = time.monotonic() - self._since
        silent = letter_of(RankTimes(rank=self._group.rank))
        letters = self._gather(
            self._safely("measuring", step, lambda: letter_of(self._own()), silent),
        )
        self._safely("measuring", step, self._begin_report, None)
        finding = None
        if letters is not None:
            found = [read_letter(letter, rank) for rank, letter in enumerate(letters)]
            finding = self._safely("judging the ranks", step, lambda: self._judge.judge(found), None)
        fates: list[Fate] = []
        if finding is not None:
            self.finding = judged = finding
            fates = [Fate(one, TOLD, one.describe()) for one in judged.fresh]
            fates = self._safely("choosing", step, lambda: self._actions.fates(judged.fresh), fates)
            self._safely("telling", step, lambda: self._tell(found, judged, fates, step, seconds), None)
        self._act(next((fate.named for fate in fates if fate.then != TOLD), None), step)
        return finding

    def _own(self) -> RankTimes:
        steps, met = self._times.take(), self._times.take_met()
        meets = average(met) if met else {}
        beside = meets.pop(ASIDE, Meets(0.0, 0.0)).seconds
        # Time on a core is never waiting where waiting sleeps, as it does in gloo; others may spin.
        no_core = self._times.on_device or not (self._alone or "gloo" in self._group.backend)
        hidden: frozenset[str] = frozenset()
        marked = self._alone or self._mark.seen > 0
        if not marked:
            self._mark.look_again()
            if not no_core and not meets:
                hidden = frozenset({COMPUTE if any(COMPUTE in one for one in steps) else OTHER})
        sections, noise = summarise(steps, hides_waits=hidden, device=no_core)
        return RankTimes(
            rank=self._group.rank,
            node=self._place.node,
            device=self._place.device,
            steps=len(steps),
            noise=noise,
            marked=marked,
            sections=sections,
            meets=meets,
            beside=round(beside, 7),
        )

    def _gather(self, letter: torch.Tensor) -> list[torch.Tensor] | None:
        """Every rank's letter, on rank 0."""
        if self._group.process_group is None:
            return [letter]
        letters = None
        if self._group.is_coordinator:
            letters = [torch.empty_like(letter) for _ in range(self._group.world_size)]
        dist.gather(letter, letters, dst=0, group=self._group.process_group)
        return letters

    # --- what comes of it -----------------------------------------------------------------------------------

    def _tell(
        self,
        ranks: Sequence[RankTimes],
        finding: StragglerFinding,
        fates: Sequence[Fate],
        step: int,
        seconds: float,
    ) -> None:
        event = event_of(ranks, finding, step, seconds)
        self._actions.tell(event)
        self._tally.count(event, finding)
        if self._chosen.enable_logging:
            for line in lines_of(finding, self._chosen.num_gpu_perf_scores_to_print, step):
                self._actions.say(line)
        for fate in fates:
            if self._chosen.enable_logging:
                log.warning("holdfast: straggler: %s%s", fate.why, self._tally.so_far(fate.named))
            self._actions.tell(found_event(fate, step))
        for line in self._tally.still_slow() if self._chosen.enable_logging else []:
            log.warning("holdfast: straggler: %s", line)

    def _act(self, named: Named | None, step: int) -> None:
        """Do what was chosen on rank 0; on the others `named` is None."""
        if self._actions.exclude is not None:
            written = self._safely(
                "saying whom to exclude", step, lambda: padded(msgspec.json.encode(named)), padded(b"null")
            )
            named = self._named_by_rank_0(written)
            if named is not None:
                self._actions.exclude(named, step)
        elif self._actions.stop is not None and named is not None:
            stop, why = self._actions.stop, named.describe()
            self._safely("asking for a stop", step, lambda: stop(why), None)

    def _named_by_rank_0(self, letter: torch.Tensor) -> Named | None:
        if self._group.process_group is not None:
            dist.broadcast(letter, src=0, group=self._group.process_group)
        return msgspec.json.decode(letter.numpy().tobytes(), type=Named | None)


def refuse_another() -> None:
    """Raise if something else in this process looks for stragglers: the two would measure each other."""
    active = Stragglers._active() if Stragglers._active is not None else None
    other = "another Run or StragglerDetector of Holdfast" if active is not None else other_detector()
    if other:
        raise UsageError(
            f"two detectors of stragglers at once: {other} is at work in this process. Use one of them: set "
            "straggler.enabled = false, or shut the other one down before the run starts"
        )


def other_detector() -> str:
    """The name of another library's detector that is switched on in this process; empty if there is none."""
    for name in ("nvidia_resiliency_ext.attribution.straggler", "nvidia_resiliency_ext.straggler"):
        detector = getattr(sys.modules.get(name), "Detector", None)
        if getattr(detector, "initialized", False) is True:
            return f"{name}.Detector"
    megatron = getattr(sys.modules.get("megatron.core.utils"), "StragglerDetector", None)
    instance = getattr(megatron, "_instance", None)
    if getattr(megatron, "_configured", False) is True and getattr(instance, "_off", True) is False:
        return "megatron.core.utils.StragglerDetector"
    return ""


# --- from a run's settings, and without a Run ---------------------------------------------------------------

SAVED_FOR = "straggler"
"""The reason given for the save that is made before a device is left."""


def refuse_straggler_settings(effective: Effective, launched: LaunchInfo | None) -> None:
    """Raise all that is wrong with the detector's settings; raise, too, if another detector is at work."""
    chosen, sources = effective.settings.straggler, effective.sources
    problems: list[str] = []

    def problem(name: str, why: str) -> None:
        key = f"straggler.{name}"
        problems.append(f"{key} = {effective.settings.get(key)} ({sources[key]}): {why}")

    for name in ("stop_if_detected", "exclude_if_detected"):
        if getattr(chosen, name) and not chosen.enabled:
            problem(name, "nothing is detected; set straggler.enabled = true")
    if chosen.exclude_if_detected and chosen.stop_if_detected:
        problem("exclude_if_detected", "the run either stops or goes on; set one of the two")
    if chosen.exclude_if_detected and launched is None:
        problem("exclude_if_detected", "excluding needs the launcher; start the script with `holdfast run`")
    if chosen.exclude_if_detected and not effective.settings.launch.max_restarts:
        problem("exclude_if_detected", "it takes a restart, and launch.max_restarts = 0 allows none")
    if chosen.stop_if_detected and launched is not None and not effective.settings.stop.exit_signal_handler:
        problem(
            "stop_if_detected",
            "with stop.exit_signal_handler = false `holdfast run` cannot ask the ranks to save and would end "
            "them unsaved; set stop.exit_signal_handler = true",
        )
    if chosen.enabled and not (chosen.calc_relative_gpu_perf or chosen.calc_individual_gpu_perf):
        problem("enabled", "nothing is compared; set calc_relative_gpu_perf or calc_individual_gpu_perf")
    if problems:
        raise ConfigError(
            "\n  ".join(["stragglers cannot be found like this; nothing was started:", *problems])
        )
    if chosen.enabled:
        refuse_another()


def make_stragglers(
    settings: Settings,
    group: Group,
    member: Membership,
    launched: LaunchInfo | None,
    tracked: Tracked,
    *,
    stop: Callable[[str], None],
    save: Callable[[str], object],
) -> Stragglers:
    """The detector of this rank. `stop` asks for a graceful stop; `save` saves, on all ranks together."""
    chosen = settings.straggler
    place = own_place(launched.node if launched else settings.launch.node_name)
    rejecting = Rejecting(group, member, launched=launched is not None, max_transients=1)

    def exclude(named: Named, step: int) -> None:
        save(SAVED_FOR)
        rejecting.reject(
            Rejection(
                kind=Kind.DEVICE,
                step=step,
                reasons=[named.describe()],
                accused=_accused(named),
                optional=True,
            )
        )

    def why_not(named: Named) -> str:
        if not named.node:
            return "its node has no name, so it cannot be excluded"
        asked = _asked_before(member, named)
        if asked is None:
            return ""
        return (
            f"attempt {asked} of this launch asked to exclude it, but it is still in use; when a "
            "spare can take its place, start the run again"
        )

    return Stragglers(
        chosen,
        group,
        models=[model for _, model in tracked.models()],
        optimizers=tracked.optimizers(),
        place=place,
        device=next((one for one in sorted(tracked.devices(), key=str) if one.type == "cuda"), None),
        actions=Actions(
            tell=member.journal.write,
            say=to_the_terminal if launched is not None else to_the_log,
            stop=stop if chosen.stop_if_detected else None,
            exclude=exclude if chosen.exclude_if_detected else None,
            why_not=why_not,
        ),
    )


def _accused(named: Named) -> Place:
    return Place(named.node, named.device if named.rank is not None else "")


def _asked_before(member: Membership, named: Named) -> int | None:
    """The attempt of this launch that asked to exclude a place still in use: asking once is enough."""
    for number in range(member.attempt - 1, 0, -1):
        try:
            if read_attempt(member.control, number).launch != member.launch:
                continue
            before = rejection_of(member.control, number)
        except (ControlError, OSError):
            continue
        if before is not None and before.optional and before.accused == _accused(named):
            return number
    return None


# StragglerDetector: finds the rank that the others wait for, without a Run.
#
# ```python
# detector = holdfast.StragglerDetector(models=[model], optimizers=[optimizer], report_time_interval=60)
# for step in range(steps):
#     detector.begin_step()
#     with detector.section("input"):
#         batch = next(batches)
#     with detector.compute():
#         model(batch).sum().backward()
#     optimizer.step()
#     finding = detector.end_step()
# detector.close()
# ```
# Every rank makes the same calls. `end_step` returns what a report concluded, on rank 0 and only if one was
# made; the ranks it names are those that are late, never those that wait.


EXCHANGE = 600.0
"""Seconds that ranks wait for each other in an exchange."""


class StragglerDetector:
    """The straggler detector by itself. The settings are those of section `straggler`, without `enabled`,
    `stop_if_detected` and `exclude_if_detected`: the script decides what is done about a rank."""

    def __init__(
        self,
        *,
        models: Iterable[nn.Module] = (),
        optimizers: Iterable[torch.optim.Optimizer] = (),
        device: torch.device | None = None,
        on_found: Callable[[Named], object] | None = None,
        node: str = "",
        **settings: object,
    ) -> None:
        """`models`: their gradients show when a rank's own work is done; `optimizers`: their step ends the
        waiting for them. `device`: a CUDA device, to measure by its clock. `on_found` is called on rank 0."""
        refuse_another()
        self._chosen = _settings(settings)
        self._on_found = on_found
        self._group: Group | None = join_group(EXCHANGE)
        self._stragglers = Stragglers(
            self._chosen,
            self._group,
            models=models,
            optimizers=optimizers,
            place=own_place(node_name(node)),
            device=device,
            actions=Actions(tell=_untold),
        )
        self._step = 0

    def begin_step(self) -> None:
        self._stragglers.begin_step()

    def section(self, name: str) -> AbstractContextManager[None]:
        """A named span of the step. `input` and `compute` have their usual meaning. It may wait for others in
        collectives only, except that `compute` may at its end, after its last gradient."""
        return self._stragglers.section(name)

    def compute(self) -> AbstractContextManager[None]:
        return self._stragglers.section(COMPUTE)

    def end_step(self) -> StragglerFinding | None:
        """The step is complete. Returns what a report concluded, on rank 0, if one was due."""
        self._step += 1
        self._stragglers.end_step()
        finding = self._stragglers.meet(self._step)
        if finding is not None and self._on_found is not None:
            for named in finding.fresh:
                self._on_found(named)
        return finding

    @property
    def finding(self) -> StragglerFinding | None:
        """What the last report concluded, on rank 0."""
        return self._stragglers.finding

    def close(self) -> None:
        """Give everything back, on all ranks together."""
        self._stragglers.close()
        if self._group is not None:
            leave_group(self._group)
            self._group = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        del error, trace
        if kind is None:
            self.close()
        else:
            self._stragglers.close()


def _settings(given: dict[str, object]) -> StragglerSettings:
    allowed = {field.name for field in msgspec.structs.fields(StragglerSettings)}
    allowed -= {"enabled", "stop_if_detected", "exclude_if_detected"}
    if unknown := sorted(set(given) - allowed):
        raise UsageError(
            f"StragglerDetector({', '.join(unknown)}=…): there is no such setting; there are "
            f"{', '.join(sorted(allowed))}"
        )
    try:
        return msgspec.convert({**given, "enabled": True}, StragglerSettings)
    except msgspec.ValidationError as error:
        raise UsageError(f"StragglerDetector: {error}") from error


def _untold(event: Event) -> None:
    """Drops the event: without a run there is no journal."""
    del event
