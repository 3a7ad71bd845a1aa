"""What a rank measures of its steps and what a report comes to: the values `stragglers.py` judges. Pure."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from enum import StrEnum

import msgspec

INPUT, COMPUTE, OTHER = "input", "compute", "other"
"""Sections that every step has: getting the batch, forward and backward, and all that has no other name."""


class Span(msgspec.Struct, frozen=True):
    """One section of one rank in a report, in seconds of an average step."""

    own: float
    """Until it arrived: work, input, sleep, whatever it was."""
    wait: float = 0.0
    """Known to be waiting for others."""
    busy: float | None = None
    """That its thread had a core, which is never waiting; None where work runs on a device."""


class RankTimes(msgspec.Struct, frozen=True, kw_only=True):
    """What a rank measured since the last report."""

    rank: int
    node: str = ""
    device: str = ""
    steps: int = 0
    noise: float = 0.0
    """Standard error of the seconds until it arrives."""
    marked: bool = True
    """Whether it saw where its own work ended, so that waiting could be told from it."""
    sections: dict[str, Span] = {}

    @property
    def arrives(self) -> float:
        return math.fsum(span.own for span in self.sections.values())

    @property
    def waits(self) -> float:
        return math.fsum(span.wait for span in self.sections.values())

    @property
    def busy(self) -> float | None:
        found = [span.busy for span in self.sections.values()]
        return None if not found or None in found else math.fsum(value or 0.0 for value in found)


class Limits(msgspec.Struct, frozen=True, kw_only=True):
    relative: float | None = 0.7
    """Score below which a rank is slow against the others; None: it is not compared with them."""
    individual: float | None = 0.7
    """The same against its own past."""


class Kind(StrEnum):
    COMPUTE = "compute"
    INPUT = "input"
    SECTION = "section"
    """One that the script has named."""
    OTHER = "other"
    """What lies outside of all sections: the optimizer, logging."""
    NODE = "node"
    """All ranks of a node."""


class Score(msgspec.Struct, frozen=True, kw_only=True):
    """A rank's speed: 1 is as quick as the others (or as itself at its best), 0.5 takes twice as long."""

    rank: int
    relative: float | None = None
    individual: float | None = None
    waiting: float = 0.0
    """Part of a step that it is known to wait for others."""


class Named(msgspec.Struct, frozen=True, kw_only=True):
    """A rank, or a whole node, that the others wait for."""

    kind: Kind
    section: str
    """Where most of the time goes, also for a node."""
    rank: int | None
    """None for a node."""
    node: str = ""
    device: str = ""
    relative: float | None = None
    individual: float | None = None
    seconds: float = 0.0
    """A step, more than the others, or than itself before."""
    share: float = 0.0
    """The same as a part of a step."""

    @property
    def key(self) -> str:
        return f"node {self.node}" if self.rank is None else f"rank {self.rank}"

    def describe(self) -> str:
        """In words: who, where, by how much, against what."""
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
        )


class Finding(msgspec.Struct, frozen=True, kw_only=True):
    """What one report comes to."""

    scores: list[Score]
    named: list[Named] = []
    """Those that are late now, and were before."""
    fresh: list[Named] = []
    """Those of them that were not named in the report before."""
    group_slower: bool = False
    """Most ranks are slower than they were, at once: nobody can be named for that."""
    step: float = 0.0
    """Seconds of a step, the median of the ranks."""
    enough: bool = True
    """False: too few steps to say anything."""

    def best(self, count: int) -> list[Score]:
        return sorted(self.scores, key=_rank_by, reverse=True)[:count]

    def worst(self, count: int) -> list[Score]:
        return sorted(self.scores, key=_rank_by)[:count]


CAP = 4.0
"""A step counts at most as so many usual ones: a single pause must not speak for a whole report."""


def summarise(
    steps: Sequence[Mapping[str, Sequence[float]]], *, hides_waits: frozenset[str] = frozenset(), device: bool
) -> tuple[dict[str, Span], float]:
    """Steps of (own, wait, busy) seconds by section as their mean, and the standard error of the arrival.

    `hides_waits`: sections in which waiting could not be told from work; there only the time counts in which
    the thread had a core. With `device` nobody knows that time.
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


def alike(ranks: Sequence[RankTimes]) -> list[RankTimes]:
    """The ranks as they can be compared. Where some could tell waiting from work and others could not, nobody
    is taken to have: what counts in a section with waiting is the time on a core, or, where nobody knows
    that, all of it, which is the same for everybody."""
    if len({one.marked for one in ranks if one.steps}) < 2:
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


def _unmarked(span: Span, core: bool) -> Span:
    own = span.busy or 0.0 if core else span.own + span.wait
    return Span(own, span.own + span.wait - own, span.busy)


def _rank_by(score: Score) -> tuple[float, float, int]:
    known = [one for one in (score.relative, score.individual) if one is not None]
    return (min(known, default=1.0), score.waiting, score.rank)


def _seconds(value: float) -> str:
    return f"{value:.2f} s" if value >= 1 else f"{1000 * value:.3g} ms"
