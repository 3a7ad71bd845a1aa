"""Which rank the others wait for: takes what each rank measured, gives scores and names. Pure.

In synchronous training every rank's step takes as long as the slowest rank's, so step times say nothing. What
counts is how long a rank works *until it arrives* where the others wait for it: the sum of its sections' own
time, without its waiting. The late rank is the one that arrives later than the others, and waits least.

Waits in collectives that were seen (`waits.py`) are taken out of own time, whatever section they are in, so
under `fully_shard`, tensor parallelism and pipelines too the late rank is the one whose absence of waiting
explains the others'. They are also known by the ranks that they were with. That tells three more things:
ranks that send to each other are stages of a pipeline, each with its own work, so only ranks of one stage are
compared; ranks whose collectives do not match are not taken to have seen their waits; and a group has a slow
link if no rank in it is late and yet even the rank that waits least waits far longer than in similar groups.

Guarantee: a rank that waits for others is never named. Waiting that was recognised as such does not count
against it. Waiting that a rank could not tell from work (a collective that was not seen, in the middle of a
section) makes all ranks arrive at the same time, even the late one; then no rank is later than the others,
most are slower than they were, and nobody is named: the report only says that the group got slower. If only
some ranks could tell, none is assumed to have. A rank that is named was late in two of its last three
reports, by more than noise, and by a noteworthy part of a step.
"""

from __future__ import annotations

import bisect
import math
import statistics
from collections import deque
from collections.abc import Iterable, Mapping, Sequence, Set
from enum import StrEnum
from typing import NamedTuple

import msgspec

# What a rank measures of its steps, and what a report concludes: the values that are judged here. Pure.


INPUT, COMPUTE, OTHER = "input", "compute", "other"
"""Sections that every step has: getting the batch, forward and backward, and whatever has no other name."""


class Span(msgspec.Struct, frozen=True):
    """One section of one rank in a report, in seconds of an average step."""

    own: float
    """Until the rank arrived: work, input, sleep, whatever it was."""
    wait: float = 0.0
    """Known to be waiting for others."""
    busy: float | None = None
    """In which its thread had a core, which is never waiting; None if work runs on a device."""


class Meets(msgspec.Struct, frozen=True, array_like=True):
    """A rank's waits in the collectives of one group, or with one other rank, in an average step."""

    seconds: float
    count: float


class RankTimes(msgspec.Struct, frozen=True, kw_only=True):
    """What a rank measured since the last report."""

    rank: int
    node: str = ""
    device: str = ""
    steps: int = 0
    noise: float = 0.0
    """Standard error of the seconds until it arrives."""
    marked: bool = True
    """Whether it saw where its own work ended, so that it could tell waiting from work."""
    sections: dict[str, Span] = {}
    meets: dict[str, Meets] = {}
    """Its waits in collectives by whom they were with: `0,1,2` is a group, `0-1` two that send."""
    beside: float = 0.0
    """Seconds of a step in which collectives were on their way beside it, on a device; in no section."""

    @property
    def sees(self) -> bool:
        """Whether waits in the middle of its work were seen as such."""
        return bool(self.meets)

    @property
    def arrives(self) -> float:
        return math.fsum(span.own for span in self.sections.values())

    @property
    def waits(self) -> float:
        return math.fsum(span.wait for span in self.sections.values())

    @property
    def late(self) -> float:
        """To be compared with that of others. What waits beside a step takes nothing out of its sections,
        which are as long on all ranks: whoever is late has waited less."""
        return self.arrives - self.beside

    @property
    def busy(self) -> float | None:
        found = [span.busy for span in self.sections.values()]
        return None if not found or None in found else math.fsum(value or 0.0 for value in found)


class ScoreLimits(msgspec.Struct, frozen=True, kw_only=True):
    relative: float | None = 0.7
    """Score below which a rank is slow compared with the others; None: no such comparison."""
    individual: float | None = 0.7
    """The same compared with its own past."""


class ScoreKind(StrEnum):
    COMPUTE = "compute"
    INPUT = "input"
    SECTION = "section"
    """A section that the script has named."""
    OTHER = "other"
    """What lies outside all sections: the optimizer, logging."""
    NODE = "node"
    """All ranks of a node."""
    LINK = "link"
    """No rank at all, but the way between some."""


class Score(msgspec.Struct, frozen=True, kw_only=True):
    """A rank's speed: 1 is as fast as the others (or as itself at its best), 0.5 takes twice as long."""

    rank: int
    relative: float | None = None
    individual: float | None = None
    waiting: float = 0.0
    """The part of a step in which it is known to wait for others."""


class Named(msgspec.Struct, frozen=True, kw_only=True):
    """A rank, or a whole node, that the others wait for."""

    kind: ScoreKind
    section: str
    """Where most of the time goes, for a node as well."""
    rank: int | None
    """None for a node, and for a link."""
    node: str = ""
    device: str = ""
    relative: float | None = None
    individual: float | None = None
    seconds: float = 0.0
    """How much longer it takes in a step than the others, or than itself before."""
    share: float = 0.0
    """The same as a part of a step."""
    waits: float | None = None
    """Seconds of a step that it waits in collectives; None where that was not seen."""
    others_wait: float | None = None
    """The same of the others, their median."""
    ranks: tuple[int, ...] = ()
    """Of a link: between whom; one rank alone stands for all links that it has."""

    @property
    def key(self) -> str:
        if self.kind is ScoreKind.LINK:
            return f"link {','.join(map(str, self.ranks))}"
        return f"node {self.node}" if self.rank is None else f"rank {self.rank}"

    def describe(self) -> str:
        """In words: who, where, by how much, against what."""
        if self.kind is ScoreKind.LINK:
            return self._describe_link()
        who = f"node {self.node or '?'}"
        if self.rank is not None:
            place = ", ".join(
                part for part in (self.node, f"device {self.device}" if self.device else "") if part
            )
            who = f"rank {self.rank}{f' ({place})' if place else ''}"
        where = {
            COMPUTE: "in compute",
            INPUT: "in getting its input",
            OTHER: "outside of all sections",
        }.get(self.section, f"in section {self.section}")
        against = "the others" if self.relative is not None else "at its best before"
        score = self.relative if self.relative is not None else self.individual
        whose = "their speed" if self.relative is not None else "its own best speed"
        return (
            f"{who} is slow {where}: {_seconds(self.seconds)} a step more than {against} "
            f"({self.share:.0%} of a step; score {score or 0.0:.2f}, which is {score or 0.0:.0%} of {whose})"
            f"{self._waits_least()}"
        )

    def _waits_least(self) -> str:
        if self.waits is None or self.others_wait is None:
            return ""
        mine, theirs = _seconds(self.waits), _seconds(self.others_wait)
        return f"; a step it waits {mine} in collectives, and they wait {theirs}"

    def _describe_link(self) -> str:
        ranks = ", ".join(map(str, self.ranks))
        what = f"every link of rank {ranks}" if len(self.ranks) == 1 else f"the link between ranks {ranks}"
        if len(self.ranks) > 2:
            what = f"a link among ranks {ranks}"
        return (
            f"{what} is slow: even the rank that comes last waits {_seconds(self.seconds)} a step more there "
            f"than in other groups of that kind ({self.share:.0%} of a step; "
            f"score {self.relative or 0.0:.2f}), and no rank is late"
        )


class StragglerFinding(msgspec.Struct, frozen=True, kw_only=True):
    """What one report concludes."""

    scores: list[Score]
    named: list[Named] = []
    """Those that are late now, and were before."""
    fresh: list[Named] = []
    """Those of them that were not named in the previous report."""
    group_slower: bool = False
    """Most ranks became slower at once: nobody can be named for that."""
    step: float = 0.0
    """Seconds of a step, the median over the ranks."""
    enough: bool = True
    """False: too few steps to say anything."""
    unclear: list[int] = []
    """Ranks that work far longer than others, and no other rank has the same work: a stage of a pipeline
    with more to do, or a slow rank; that cannot be told."""
    floors: dict[str, float] = {}
    """Seconds of a step that even the rank that waits least waits in a group: the exchange itself."""

    def best(self, count: int) -> list[Score]:
        return sorted(self.scores, key=_rank_by, reverse=True)[:count]

    def worst(self, count: int) -> list[Score]:
        return sorted(self.scores, key=_rank_by)[:count]


CAP = 4.0
"""A step counts as at most this many usual ones: a single pause must not speak for a whole report."""


def summarise(
    steps: Sequence[Mapping[str, Sequence[float]]], *, hides_waits: frozenset[str] = frozenset(), device: bool
) -> tuple[dict[str, Span], float]:
    """The mean of steps of (own, wait, busy) seconds by section, and the standard error of the arrival.

    `hides_waits`: sections in which waiting could not be told from work; in these, only the time in which the
    thread had a core counts. With `device`, nobody knows that time.
    """
    if not steps:
        return {}, 0.0
    own = [
        {name: times[2] if name in hides_waits else times[0] for name, times in step.items()}
        for step in steps
    ]
    arrivals = [math.fsum(step.values()) for step in own]
    most = CAP * statistics.median(arrivals)
    kept = [min(1.0, most / value) if value > 0 else 1.0 for value in arrivals]
    count = len(steps)
    sections: dict[str, Span] = {}
    for name in dict.fromkeys(name for step in steps for name in step):
        mine = wait = busy = 0.0
        for step, counted, part in zip(steps, own, kept, strict=True):
            times = step.get(name)
            if times is not None:
                mine += part * counted[name]
                wait += part * (times[0] + times[1] - counted[name])
                busy += part * times[2]
        sections[name] = Span(mine / count, wait / count, None if device else busy / count)
    arrived = [value * part for value, part in zip(arrivals, kept, strict=True)]
    noise = statistics.stdev(arrived) / math.sqrt(count) if count > 1 else 0.0
    return sections, noise


def average(met: Sequence[Mapping[str, Sequence[float]]]) -> dict[str, Meets]:
    """Steps of (seconds, how often) by whom it waited with, as their mean. Capped as steps are."""
    found: dict[str, Meets] = {}
    for name in dict.fromkeys(name for step in met for name in step):
        seconds = [step[name][0] for step in met if name in step]
        most = CAP * statistics.median(seconds)
        counts = math.fsum(step[name][1] for step in met if name in step)
        whole = math.fsum(min(value, most) for value in seconds)
        found[name] = Meets(whole / len(met), counts / len(met))
    return found


def alike(ranks: Sequence[RankTimes]) -> list[RankTimes]:
    """The ranks in a form that can be compared. If some could tell waiting from work and others could not,
    none is assumed to have: what counts in a section with waiting is the time on a core, or, if nobody knows
    that, all of it, which is the same for everybody."""
    measured = [one for one in ranks if one.steps]
    marked, sees = ({one.marked for one in measured}, {one.sees for one in measured})
    if (marked <= {True} or (marked <= {False} and len(sees) < 2)) and _meet_alike(ranks):
        return list(ranks)
    core = all(one.busy is not None for one in ranks if one.steps)
    waits = {name for one in ranks for name, span in one.sections.items() if span.wait > 0}
    return [
        msgspec.structs.replace(
            one,
            sections={
                name: _unmarked(span, core) if name in waits else span for name, span in one.sections.items()
            },
        )
        for one in ranks
    ]


def _meet_alike(ranks: Sequence[RankTimes]) -> bool:
    """Whether all ranks of a group saw as many of its collectives."""
    least: dict[str, float] = {}
    most: dict[str, float] = {}
    for one in ranks:
        for name, meets in one.meets.items():
            if not is_pair(name):
                least[name] = min(least.get(name, meets.count), meets.count)
                most[name] = max(most.get(name, meets.count), meets.count)
    return all(most[name] - least[name] <= max(MISSED, UNSEEN * most[name]) for name in most)


def is_pair(name: str) -> bool:
    return "-" in name


def stages(ranks: Sequence[RankTimes]) -> list[list[RankTimes]]:
    """The ranks by their work: those of a pipeline's stage, or all of them where nobody sends to anybody.

    Ranks that send to each other, directly or through others, are one pipeline. Those that have collectives
    with each other do the same work, unless the group has two of one pipeline: then it spans stages. And who
    does the same work has as many collectives, in whichever groups.
    """
    pipelines, same = _Parts(ranks), _Parts(ranks)
    groups: dict[str, list[int]] = {}
    for one in ranks:
        for name in one.meets:
            groups.setdefault(name, []).append(one.rank)
    pairs = [members for name, members in groups.items() if is_pair(name)]
    for members in pairs:
        pipelines.join(members)
    if not pairs:
        same.join([one.rank for one in ranks])
    for name, members in groups.items():
        if not is_pair(name) and len({pipelines.of(rank) for rank in members}) == len(members):
            same.join(members)
    found: dict[tuple[int, tuple[int, ...]], list[RankTimes]] = {}
    for one in ranks:
        counts = sorted(round(meets.count) for name, meets in one.meets.items() if not is_pair(name))
        found.setdefault((same.of(one.rank), tuple(counts)), []).append(one)
    return list(found.values())


class _Parts:
    """Ranks in parts that are joined, one by one at first."""

    def __init__(self, ranks: Iterable[RankTimes]) -> None:
        self._head = {one.rank: one.rank for one in ranks}

    def of(self, rank: int) -> int:
        head = self._head
        while head[rank] != rank:
            head[rank] = head[head[rank]]
            rank = head[rank]
        return rank

    def join(self, ranks: Sequence[int]) -> None:
        for rank in ranks[1:]:
            self._head[self.of(rank)] = self.of(ranks[0])


def _unmarked(span: Span, core: bool) -> Span:
    own = span.busy or 0.0 if core else span.own + span.wait
    return Span(own, span.own + span.wait - own, span.busy)


def _rank_by(score: Score) -> tuple[float, float, int]:
    known = [one for one in (score.relative, score.individual) if one is not None]
    return (min(known, default=1.0), score.waiting, score.rank)


def _seconds(value: float) -> str:
    return f"{value:.2f} s" if value >= 1 else f"{1000 * value:.3g} ms"


MATTERS = 0.1
"""Part of a step that a rank must cost the others before it is worth naming."""
LEAST = 1e-4
"""Seconds of a step below which there is nothing to see but clocks and schedulers."""
NOISES = 4.0
"""How many standard errors of a rank's own mean are more than noise."""
SPREADS = 4.0
"""The same in spreads of the ranks around their median, if there are enough ranks for a spread."""
ENOUGH_RANKS = 5
ENOUGH_STEPS = 8
"""How many steps it takes for a report to say anything."""
LOOK_BACK, LATE = 3, 2
"""LATE of a rank's last LOOK_BACK reports must find it late."""
LOWS = 20
"""How many of a rank's past reports, the best, are kept."""
NODE_SHARE = 0.8
"""Part of a node's ranks that must be slow for it to be the node."""
UNSEEN, MISSED = 0.1, 0.5
"""Part of a group's collectives that one of its ranks may have seen less of than another, and how many."""
EXPLAINS = 2.0
"""A slow link must cost so many times what late and uneven ranks could explain."""
MOST_FLOORS = 64
"""Groups that a report lists; those that cost most."""
CONTRADICTS = 0.02
"""Part of a step by which a rank that burns more CPU may arrive before the others and still be late."""


class StragglerJudge:
    """Judges the reports of one attempt in order. Keeps their past, and nothing else."""

    def __init__(self, limits: ScoreLimits) -> None:
        self._limits = limits
        self._pasts: dict[frozenset[tuple[bool, bool]], dict[int, _Past]] = {}
        self._past: dict[int, _Past] = {}
        self._others_wait = _Others([])
        self._late: dict[str, deque[bool]] = {}
        self._named: set[str] = set()

    def judge(self, report: Sequence[RankTimes]) -> StragglerFinding:
        ranks = sorted(alike(report), key=lambda one: one.rank)
        # What counts as arriving depends on who could tell waiting from work: best is best of its like.
        told = frozenset((one.marked, one.sees) for one in ranks if one.steps)
        self._past = self._pasts.setdefault(told, {})
        step = _median([one.arrives + one.waits for one in ranks])
        self._others_wait = _Others([one.waits for one in ranks])
        individual = {one.rank: self._individual(one) for one in ranks}
        parts = stages(ranks)
        relative = {rank: score for part in parts for rank, score in self._relative(part, step).items()}
        scores = [
            Score(
                rank=one.rank,
                relative=relative[one.rank],
                individual=individual[one.rank],
                waiting=one.waits / whole if (whole := one.arrives + one.waits) else 0.0,
            )
            for one in ranks
        ]
        if not ranks or min(one.steps for one in ranks) < ENOUGH_STEPS or step <= 0:
            return StragglerFinding(scores=scores, step=step, enough=False)
        slower = self._group_slower(individual.values())
        late: list[Named] = []
        for part in parts:
            late += self._late_of(part, step, individual, slower)
        late = list({one.key: one for one in sorted(late, key=lambda one: one.share)}.values())
        links = _Links(ranks, parts)
        if not late and self._limits.relative is not None:
            late = links.slow(step, self._limits.relative)
        for one in ranks:
            self._past.setdefault(one.rank, _Past()).add(one.arrives, one.arrives + one.waits)
        named = self._persistent(late)
        fresh = [one for one in named if one.key not in self._named]
        self._named = {one.key for one in named}
        return StragglerFinding(
            scores=scores,
            named=named,
            fresh=fresh,
            group_slower=slower,
            step=step,
            unclear=self._unclear(ranks, parts, step, {one.rank for one in named}),
            floors=links.largest(),
        )

    def _late_of(
        self,
        ranks: Sequence[RankTimes],
        step: float,
        individual: Mapping[int, float | None],
        slower: bool,
    ) -> list[Named]:
        """Those of one stage."""
        late = self._late_nodes(ranks, step)
        of_nodes = {one.node for one in late}
        left = [one for one in ranks if one.node not in of_nodes] if of_nodes else ranks
        return late + self._late_ranks(left, step, individual, slower)

    def _unclear(
        self,
        ranks: Sequence[RankTimes],
        parts: Sequence[Sequence[RankTimes]],
        step: float,
        named: Set[int | None],
    ) -> list[int]:
        """Stages of one rank that work far longer than ranks of others, and were not faster before."""
        alone = [part[0] for part in parts if len(part) == 1 and part[0].rank not in named]
        if len(ranks) < 2 or self._limits.relative is None or not alone:
            return []
        arrivals = _Others([one.arrives for one in ranks])
        found = []
        for one in alone:
            others = arrivals.median(one.arrives)
            if _score(others, one.arrives) < self._limits.relative and one.arrives - others >= MATTERS * step:
                found.append(one.rank)
        return found

    # --- scores ---------------------------------------------------------------------------------------------

    def _relative(self, ranks: Sequence[RankTimes], step: float) -> dict[int, float | None]:
        if len(ranks) < 2 or self._limits.relative is None:
            return dict.fromkeys((one.rank for one in ranks), None)
        compared = _Compared(ranks)
        return {one.rank: compared.speed(one, step) for one in ranks}

    def _individual(self, one: RankTimes) -> float | None:
        best = self._best(one.rank)
        if best is None or self._limits.individual is None:
            return None
        return _score(best.arrives, one.arrives)

    def _best(self, rank: int) -> _Report | None:
        past = self._past.get(rank)
        return past.best if past is not None else None

    def _group_slower(self, scores: Iterable[float | None]) -> bool:
        """Whether most ranks lost speed at once. Halfway to the threshold is enough for that."""
        known = [score for score in scores if score is not None]
        if len(known) < 2 or self._limits.individual is None:
            return False
        limit = (1 + self._limits.individual) / 2
        return sum(score < limit for score in known) > len(known) / 2

    # --- who is late ----------------------------------------------------------------------------------------

    def _late_ranks(
        self,
        ranks: Sequence[RankTimes],
        step: float,
        individual: Mapping[int, float | None],
        group_slower: bool,
    ) -> list[Named]:
        compared = _Compared(ranks)
        found: list[Named] = []
        for one in ranks:
            named = compared.late(one, step, self._limits.relative) if self._limits.relative else None
            if named is None and not group_slower:
                named = self._slower_than_before(one, step, individual[one.rank], compared)
            if named is not None:
                found.append(named)
        return found

    def _slower_than_before(
        self, one: RankTimes, step: float, score: float | None, compared: _Compared
    ) -> Named | None:
        """Compares with its own best, unless it is not behind the others: then it holds nobody up."""
        limit, best = self._limits.individual, self._best(one.rank)
        if limit is None or best is None or score is None or score >= limit:
            return None
        more = one.arrives - best.arrives
        if more < max(MATTERS * step, LEAST, NOISES * one.noise):
            return None
        if compared.alone:
            if one.sees:  # the only one of its stage: what it now does in its bubble holds nobody up
                more = min(more, one.arrives + one.waits - best.step)
                if more < MATTERS * step or one.waits > self._others_wait.median(one.waits):
                    return None
            section = max(one.sections, key=lambda name: one.sections[name].own, default=OTHER)
        elif compared.behind(one) <= max(MATTERS * more, NOISES * one.noise):
            return None
        else:
            section = compared.where(one)
        return _named(one, section, more, step, individual=score)

    def _late_nodes(self, ranks: Sequence[RankTimes], step: float) -> list[Named]:
        """Nodes on which (nearly) all ranks are late, compared with the other nodes."""
        limit = self._limits.relative
        by_node: dict[str, list[RankTimes]] = {}
        for one in ranks:
            by_node.setdefault(one.node, []).append(one)
        if limit is None or len(by_node) < 2:
            return []
        typical = {node: _typical(node, members) for node, members in by_node.items()}
        compared = _Compared(list(typical.values()))
        found: list[Named] = []
        for node, members in by_node.items():
            if len(members) < 2:
                continue
            named = compared.late(typical[node], step, limit)
            if named is None:
                continue
            others = typical[node].late - compared.behind(typical[node])
            behind = [member.late - others >= named.seconds / 2 for member in members]
            if sum(behind) >= NODE_SHARE * len(members):
                found.append(
                    msgspec.structs.replace(named, kind=ScoreKind.NODE, rank=None, node=node, device="")
                )
        return found

    def _persistent(self, late: Sequence[Named]) -> list[Named]:
        now = {one.key: one for one in late}
        for key in {*self._late, *now}:
            self._late.setdefault(key, deque(maxlen=LOOK_BACK)).append(key in now)
        named = [one for key, one in now.items() if sum(self._late[key]) >= LATE]
        for key in [key for key, seen in self._late.items() if not any(seen)]:
            del self._late[key]
        return named


class _Report(NamedTuple):
    """What is kept of one rank's report."""

    arrives: float
    step: float


class _Past:
    """One rank's earlier reports, as far as they are needed."""

    __slots__ = ("_count", "_lows")

    def __init__(self) -> None:
        self._count = 0
        self._lows: list[_Report] = []

    def add(self, arrives: float, step: float) -> None:
        self._count += 1
        bisect.insort(self._lows, _Report(arrives, step))
        del self._lows[LOWS:]

    @property
    def best(self) -> _Report:
        """Of many reports not the very best, which was luck."""
        return self._lows[min(self._count // 10, len(self._lows) - 1)]


class _Others:
    """The median of all values but one, without sorting them anew for each."""

    def __init__(self, values: Sequence[float]) -> None:
        self._sorted = sorted(values)

    def median(self, without: float) -> float:
        values = self._sorted
        at = bisect.bisect_left(values, without)
        count = len(values) - 1
        if count <= 0:
            return 0.0

        def value(index: int) -> float:
            return values[index + (index >= at)]

        return (value((count - 1) // 2) + value(count // 2)) / 2


class _Compared:
    """Ranks (or nodes, as if each were one) against each other."""

    def __init__(self, ranks: Sequence[RankTimes]) -> None:
        self.alone = len(ranks) < 2
        self._arrivals = _Others([one.arrives for one in ranks])
        names = {name for one in ranks for name in one.sections}
        self._sections = {name: _Others([_own(one, name) for one in ranks]) for name in sorted(names)}
        busy = [one.busy for one in ranks]
        self._busy = None if None in busy else _Others([value or 0.0 for value in busy])
        self._waits = _Others([one.waits + one.beside for one in ranks]) if _all_see(ranks) else None
        self._beside = any(one.beside for one in ranks)
        self._lates = _Others([one.late for one in ranks]) if self._beside else self._arrivals
        middle = _median([one.arrives for one in ranks])
        self._spread = 0.0
        if len(ranks) >= ENOUGH_RANKS:
            self._spread = 1.4826 * _median([abs(one.arrives - middle) for one in ranks])

    def others(self, one: RankTimes) -> float:
        return self._arrivals.median(one.arrives)

    def behind(self, one: RankTimes) -> float:
        """Seconds by which it arrives after the others."""
        return one.late - self._lates.median(one.late)

    def speed(self, one: RankTimes, step: float) -> float:
        if self._beside:
            return _score(step - max(self.behind(one), 0.0), step)
        return _score(self.others(one), one.arrives)

    def where(self, one: RankTimes) -> str:
        """The section in which it loses most compared with the others."""
        return max(self._sections, key=lambda name: self._excess(one, name), default=OTHER)

    def late(self, one: RankTimes, step: float, limit: float) -> Named | None:
        if self.alone:
            return None
        noise = max(NOISES * one.noise, SPREADS * self._spread)
        worth = max(MATTERS * step, LEAST)
        behind, score = self.behind(one), self.speed(one, step)
        section = self.where(one)
        if score < limit and behind >= max(worth, noise):
            return self._with_waits(_named(one, section, behind, step, relative=score), one)
        if self._beside:
            return None
        excess = self._excess(one, section)
        part = _score(_own(one, section) - excess, _own(one, section))
        if part < limit and min(excess, 2 * behind) >= max(worth, noise):
            return self._with_waits(_named(one, section, behind, step, relative=part), one)
        return self._burns(one, step, limit, behind, max(worth, noise))

    def _burns(self, one: RankTimes, step: float, limit: float, behind: float, least: float) -> Named | None:
        """A rank that works more than the others, although waiting could not be told from work."""
        if self._busy is None or one.busy is None or behind < -CONTRADICTS * step:
            return None
        others = self._busy.median(one.busy)
        score, more = _score(others, one.busy), one.busy - others
        if score >= limit or more < least:
            return None
        section = max(one.sections, key=lambda name: one.sections[name].busy or 0.0)
        return _named(one, section, more, step, relative=score)

    def _with_waits(self, named: Named, one: RankTimes) -> Named:
        if self._waits is None:
            return named
        mine = one.waits + one.beside
        return msgspec.structs.replace(named, waits=mine, others_wait=self._waits.median(mine))

    def _excess(self, one: RankTimes, name: str) -> float:
        own = _own(one, name)
        return own - self._sections[name].median(own)


def _all_see(ranks: Sequence[RankTimes]) -> bool:
    return all(one.sees for one in ranks)


class _Group(NamedTuple):
    """Ranks that wait in collectives with each other."""

    name: str
    members: tuple[int, ...]
    floor: float
    """Seconds of a step that even the one that waits least waits: it comes last, and the rest is the way."""
    like: tuple[object, ...]
    """What it has in common with groups that it can be compared with."""


class _Links:
    """Groups against their like. A slow rank makes the others of its groups wait, and itself waits least; a
    slow link makes all wait that meet over it, whoever else they meet, and no one of them is late."""

    def __init__(self, ranks: Sequence[RankTimes], parts: Sequence[Sequence[RankTimes]]) -> None:
        self._ranks = {one.rank: one for one in ranks}
        self._parts = parts
        stage = {one.rank: at for at, part in enumerate(parts) for one in part}
        members: dict[str, list[RankTimes]] = {}
        for one in ranks:
            for name in one.meets:
                members.setdefault(name, []).append(one)
        self.groups: list[_Group] = []
        for name, those in members.items():
            if len(those) < 2:
                continue
            found = [one.meets[name] for one in those]
            like = (
                is_pair(name),
                len(those),
                round(_median([meets.count for meets in found])),
                tuple(sorted(stage[one.rank] for one in those)),
            )
            floor = min(meets.seconds for meets in found)
            self.groups.append(_Group(name, tuple(one.rank for one in those), floor, like))

    def largest(self) -> dict[str, float]:
        shown = sorted(self.groups, key=lambda group: (-group.floor, group.name))[:MOST_FLOORS]
        return {group.name: group.floor for group in shown}

    def slow(self, step: float, limit: float) -> list[Named]:
        late = sorted((value for part in self._parts for value in _lateness(part)), reverse=True)
        by_like: dict[tuple[object, ...], list[_Group]] = {}
        for group in self.groups:
            by_like.setdefault(group.like, []).append(group)
        found: list[tuple[_Group, float, float]] = []
        for groups in by_like.values():
            floors = _Others([group.floor for group in groups])
            for group in groups if len(groups) > 1 else []:
                others = floors.median(group.floor)
                more, score = group.floor - others, _score(others, group.floor)
                explained = math.fsum(late[:2]) + self._uneven(group)
                if score < limit and more >= max(MATTERS * step, LEAST, EXPLAINS * explained):
                    found.append((group, more, score))
        shared = set.intersection(*(set(group.members) for group, _, _ in found)) if len(found) > 1 else set()
        if len(shared) == 1:  # not the ways to one rank, but that rank's
            group, more, score = max(found, key=lambda one: one[1])
            found = [(group._replace(members=tuple(shared)), more, score)]
        return [
            Named(
                kind=ScoreKind.LINK,
                section=group.name,
                rank=None,
                relative=score,
                seconds=more,
                share=more / step,
                ranks=group.members,
            )
            for group, more, score in found
        ]

    def _uneven(self, group: _Group) -> float:
        """How much a group's ranks may wait for each other in turn: how uneven the steps of all are."""
        spreads = [self._ranks[rank].noise ** 2 * self._ranks[rank].steps for rank in group.members]
        return math.sqrt(math.fsum(spreads))


def _lateness(part: Sequence[RankTimes]) -> list[float]:
    middle = _median([one.arrives for one in part])
    return [one.arrives - middle for one in part if one.arrives > middle]


def _typical(node: str, members: Sequence[RankTimes]) -> RankTimes:
    """A node as if it were one rank: the median of its ranks, section by section."""
    names = {name for one in members for name in one.sections}
    busy = all(one.busy is not None for one in members)
    sections = {
        name: Span(
            own=_median([_own(one, name) for one in members]),
            busy=_median([one.sections[name].busy or 0.0 for one in members if name in one.sections])
            if busy
            else None,
        )
        for name in sorted(names)
    }
    return RankTimes(
        rank=members[0].rank,
        node=node,
        steps=members[0].steps,
        noise=_median([one.noise for one in members]),
        sections=sections,
        beside=_median([one.beside for one in members]),
    )


def _named(
    one: RankTimes,
    section: str,
    seconds: float,
    step: float,
    *,
    relative: float | None = None,
    individual: float | None = None,
) -> Named:
    kind = ScoreKind(section) if section in (INPUT, COMPUTE, OTHER) else ScoreKind.SECTION
    return Named(
        kind=kind,
        section=section,
        rank=one.rank,
        node=one.node,
        device=one.device,
        relative=relative,
        individual=individual,
        seconds=seconds,
        share=seconds / step if step else 0.0,
    )


def _own(one: RankTimes, section: str) -> float:
    span = one.sections.get(section)
    return span.own if span is not None else 0.0


def _score(reference: float, own: float) -> float:
    if own <= 0 or reference >= own:
        return 1.0
    return max(reference, 0.0) / own


def _median(values: Sequence[float]) -> float:
    return statistics.median(values) if values else 0.0
