"""Which checkpoints are kept, and why each one.

Guarantee: pure, and careful. Whatever the rules say, these are never chosen for deletion: the newest
checkpoint on the line, the newest proven and the newest verified one, what the attempt came from and its
parent, a suspect one (it is under investigation), one that is damaged or cannot be read (it is evidence), and
one that this run did not save. At least two sound ones on the line stay. Deciding again after the deletions
deletes nothing more.

Nothing whose bytes were read back and found right is deleted while everything newer is not: the newest such
one on the line stays. While read-backs go on, one that could be deleted waits until a newer one is known to
be right; but not without end: at most twice as many as asked for are kept for want of that, because a full
disk would end the run.

Only checkpoints that a resume could use count: on the line, of sound structure, neither suspect nor
condemned. A damaged newer one therefore never pushes out a sound older one.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from enum import StrEnum

import msgspec

LEAST = 2
"""One may turn out to be bad."""

PROVEN = "proven"
TRUSTED = frozenset({"verified", PROVEN, "acquitted"})
USABLE = frozenset({"committed", *TRUSTED})
WAITS = "no newer one was read back yet"
SUSPECT, CONDEMNED, ABANDONED = "suspect", "condemned", "abandoned"


class Condition(StrEnum):
    """What a look at its files says of a checkpoint."""

    SOUND = "sound"
    BROKEN = "broken"
    UNREADABLE = "unreadable"
    """The file system refused, or a newer release wrote it: nothing is known."""
    FOREIGN = "foreign"
    """Not what this run recorded under that name."""


class Candidate(msgspec.Struct, frozen=True, kw_only=True):
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
    """What is wrong, unless it is sound."""
    read_back: bool = False
    """After its commit all of its bytes were read from the storage, and were those that were saved."""

    @property
    def is_verified(self) -> bool:
        """Whether its bytes are known to have been right after they were stored."""
        return self.read_back or self.standing in TRUSTED

    @property
    def counts(self) -> bool:
        """Whether a resume could use it."""
        return self.on_line and self.condition is Condition.SOUND and self.standing in USABLE


class Rules(msgspec.Struct, frozen=True, kw_only=True):
    """How much to keep."""

    keep_last: int = 0
    """0 keeps everything; at least LEAST are kept in any case."""
    keep_every_steps: int = 0
    keep_every_hours: float = 0.0
    broken: bool = False
    """Delete damaged ones too; only a person asks for that."""
    await_read_back: bool = False
    """Checkpoints are being read back: what is older waits for that, within bounds."""


class Verdict(msgspec.Struct, frozen=True):
    id: str
    keep: bool
    reason: str


def retain(candidates: Iterable[Candidate], rules: Rules) -> list[Verdict]:
    """One verdict a checkpoint, newest step first."""
    every = sorted(candidates, key=lambda c: (c.step, c.id), reverse=True)
    line = [candidate for candidate in every if candidate.counts]
    last = max(LEAST, rules.keep_last)
    chosen = _chosen(line, rules, last)
    verdicts = []
    for candidate in every:
        keep, reason = _judge(candidate, rules, line, last, chosen.get(candidate.id, ""))
        verdicts.append(Verdict(candidate.id, keep, reason))
    return verdicts


def _judge(
    candidate: Candidate, rules: Rules, line: Sequence[Candidate], last: int, chosen: str
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


def _judge_unusable(candidate: Candidate, newer: Sequence[Candidate], last: int) -> tuple[bool, str]:
    """Sound, and yet no resume would take it: it goes as soon as the run is well past it."""
    if candidate.standing == CONDEMNED:
        why = "condemned"
    elif not candidate.on_line or candidate.standing == ABANDONED:
        why = "abandoned"
    else:
        return True, f"of a standing that is not known here: {candidate.standing}"
    if len(newer) < last:
        return True, f"{why}, but only {len(newer)} of {last} newer sound ones are on the line"
    if candidate.read_back and candidate.standing != CONDEMNED and not any(one.is_verified for one in newer):
        return True, f"{why}, but it was read back, and no newer one was"
    return False, f"{why}, and {len(newer)} newer sound ones are on the line"


def _chosen(line: Sequence[Candidate], rules: Rules, last: int) -> dict[str, str]:
    """Why each one of the line (newest first) that the rules keep is kept; the first reason counts."""
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


def _first_of_each(marked: Iterable[tuple[Hashable, Candidate]]) -> list[Candidate]:
    """Of each mark the candidate with the lowest step: later saves never take its place."""
    first: dict[Hashable, Candidate] = {}
    for mark, candidate in marked:
        if mark not in first or candidate.step < first[mark].step:
            first[mark] = candidate
    return list(first.values())
