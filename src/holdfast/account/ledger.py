"""A run's journal sorted into attempts and steps, and where its time went. Pure.

Some lines are about an attempt that is over: a new launcher may record the end of one that it found lost, or
the decision about it, before its own attempt starts; after a restart in place the next attempt records what
ended the one before. Such lines belong to the attempt that they are about.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable
from dataclasses import dataclass, field, fields
from typing import NamedTuple

from holdfast.journal import REPORTER, AnyEvent, JournalLine, Unknown
from holdfast.journal.events import (
    Account,
    AttemptEnded,
    AttemptStarted,
    DecisionMade,
    OperatorActed,
    RestartFaulted,
    RestartPlanned,
    Resumed,
    RunFinished,
    RungRejected,
    SaveCommitted,
    StepsDone,
    WorkerFailed,
    decode_loss,
)

# When each step was done, from the batches that rank 0 journals.
#
# A batch says when it was written and how long each of its steps took. Steps are laid out backwards from the
# batch's time, around the times when a save held up training, and never into the previous batch; so no two
# steps of one attempt overlap. This is accurate to about the time between two batches.


CLOSE = 0.001
"""Times closer together than this count as the same moment: sums of many floats drift by less."""


class TimeSpan(NamedTuple):
    start: float
    end: float


class Step(NamedTuple):
    attempt: int
    step: int
    start: float
    end: float
    loss: float | None


def blocked_spans(lines: Iterable[JournalLine]) -> list[TimeSpan]:
    """The times when a save held up training, in order and without overlap."""
    spans: list[TimeSpan] = []
    for line in lines:
        if isinstance(line.body, SaveCommitted):
            called = line.at - max(0.0, line.body.seconds)
            spans.append(TimeSpan(called, min(line.at, called + max(0.0, line.body.blocked_seconds))))
    merged: list[TimeSpan] = []
    for span in sorted(spans):
        if merged and span.start <= merged[-1].end:
            merged[-1] = TimeSpan(merged[-1].start, max(merged[-1].end, span.end))
        elif span.end > span.start:
            merged.append(span)
    return merged


def steps_done(lines: Iterable[JournalLine]) -> list[Step]:
    """Every completed step, in the order of the journal."""
    lines = list(lines)
    blocked = blocked_spans(lines)
    ends = [span.end for span in blocked]
    floor: dict[int, float] = {}
    done: list[Step] = []
    for line in lines:
        if not isinstance(line.body, StepsDone) or line.who != REPORTER:
            continue
        lowest = floor.get(line.attempt, float("-inf"))
        cursor = max(line.at, lowest)
        floor[line.attempt] = cursor
        batch: list[Step] = []
        for offset in range(len(line.body.seconds) - 1, -1, -1):
            cursor = max(lowest, _before(cursor, blocked, ends))
            start = max(lowest, _back(cursor, line.body.seconds[offset], blocked, ends))
            loss = decode_loss(line.body.loss[offset]) if offset < len(line.body.loss) else None
            batch.append(Step(line.attempt, line.body.first + offset, start, cursor, loss))
            cursor = start
        done.extend(reversed(batch))
    return done


def _before(moment: float, blocked: list[TimeSpan], ends: list[float]) -> float:
    """`moment`, moved to the start of the save it falls into or that has just ended."""
    index = bisect_left(ends, moment - CLOSE)
    if index < len(blocked) and blocked[index].start < moment:
        return blocked[index].start
    return moment


def _back(moment: float, seconds: float, blocked: list[TimeSpan], ends: list[float]) -> float:
    """The moment `seconds` of training before `moment`."""
    index = bisect_right(ends, moment) - 1
    while index >= 0 and moment - seconds < ends[index]:
        seconds -= moment - ends[index]
        moment = blocked[index].start
        index -= 1
    return moment - max(0.0, seconds)


RECOVERY = "recovery"
RESUME = "resume"


@dataclass
class JournalledAttempt:
    """What the journal says about one attempt."""

    number: int
    first_at: float
    """When its first line was written."""
    last_at: float
    """When it last gave a sign of life."""
    started: AttemptStarted | None = None
    resumed: Resumed | None = None
    resumed_at: float | None = None
    ended: AttemptEnded | None = None
    ended_at: float | None = None
    finished_at: float | None = None
    """When the run finished, if it did in this attempt."""
    failures: list[tuple[float, WorkerFailed]] = field(default_factory=list)
    faults: list[tuple[float, RestartFaulted]] = field(default_factory=list)
    """What happened to processes while others went on in place."""
    planned: RestartPlanned | None = None
    """The restart in place that followed."""
    account: Account | None = None
    """The account of its end."""
    told_at: float | None = None
    """When that account was given."""
    recovery: DecisionMade | None = None
    recovery_at: float | None = None
    resume: DecisionMade | None = None
    rejected: dict[str, list[str]] = field(default_factory=dict)
    """Rungs that it could not use, with the reasons."""
    saves: list[tuple[float, SaveCommitted]] = field(default_factory=list)
    steps: list[Step] = field(default_factory=list)

    @property
    def failed_at(self) -> float | None:
        """When its first fault was seen; None if none was."""
        seen = [at for at, _ in self.failures] + [at for at, _ in self.faults]
        return min(seen, default=None)

    @property
    def reached(self) -> int | None:
        """The highest step it got to, by what it loaded or did. (What an agent records as the last step is
        the highest one ever committed, which may be another attempt's.)"""
        known = [step.step for step in self.steps[-1:]]
        if self.account is not None and self.account.step is not None:
            known.append(self.account.step)  # rank 0 may have ended before it could journal its last steps
        if self.resumed is not None:
            known.append(self.resumed.step)
        return max(known, default=None)


def attempts_of(lines: list[JournalLine]) -> list[JournalledAttempt]:
    """The run's attempts, in order."""
    found: dict[int, JournalledAttempt] = {}
    for line in lines:
        number = line.attempt
        if isinstance(line.body, RestartFaulted | RestartPlanned):
            number = line.body.ended or line.attempt
        elif isinstance(line.body, Account):
            number = line.body.attempt
        elif line.attempt not in found and found and _about_an_earlier_one(line.body):
            number = max(found)
        attempt = found.get(number)
        if attempt is None:
            attempt = found[number] = JournalledAttempt(number, line.at, line.at)
        _add(attempt, line)
    for step in steps_done(lines):
        found[step.attempt].steps.append(step)
    return [found[number] for number in sorted(found) if _lived(found[number])]


def _about_an_earlier_one(body: AnyEvent | Unknown) -> bool:
    """Whether this may be another writer's word about an attempt that is over."""
    return (
        isinstance(body, Account)
        or (isinstance(body, AttemptEnded) and body.outcome == "lost")
        or (isinstance(body, DecisionMade) and body.about == RECOVERY)
    )


def _lived(attempt: JournalledAttempt) -> bool:
    """Whether it is an attempt at all; a launcher's own lines before its first attempt do not make one."""
    return bool(attempt.started or attempt.resumed or attempt.steps or attempt.failures or attempt.ended)


def _add(attempt: JournalledAttempt, line: JournalLine) -> None:
    body = line.body
    match body:
        case AttemptStarted():
            attempt.started = attempt.started or body
        case Resumed() if attempt.resumed is None:
            attempt.resumed, attempt.resumed_at = body, line.at
        case AttemptEnded() if attempt.ended is None:
            attempt.ended, attempt.ended_at = body, line.at
            if body.outcome == "finished" and attempt.finished_at is None:
                attempt.finished_at = line.at
        case RunFinished():
            attempt.finished_at = line.at
        case WorkerFailed():
            attempt.failures.append((line.at, body))
        case RestartFaulted() if body.ended:
            attempt.faults.append((min(body.at or line.at, line.at), body))
        case RestartPlanned() if body.ended:
            attempt.planned = body
        case Account() if attempt.account is None or attempt.account.alone or not body.alone:
            attempt.account, attempt.told_at = body, line.at
        case DecisionMade(about=about) if about == RECOVERY:
            attempt.recovery, attempt.recovery_at = body, line.at
        case DecisionMade(about=about) if about == RESUME:
            attempt.resume = body
            for option in body.rejected:
                _reject(attempt, option.option, option.why)
        case RungRejected():
            _reject(attempt, body.checkpoint, body.reasons)
        case SaveCommitted():
            attempt.saves.append((line.at, body))
        case _:
            pass  # steps are placed in time afterwards, all at once
    if not _about_an_earlier_one(body) and not isinstance(body, OperatorActed):  # these are no sign of life
        attempt.last_at = max(attempt.last_at, line.at)


def _reject(attempt: JournalledAttempt, checkpoint: str, reasons: list[str]) -> None:
    known = attempt.rejected.setdefault(checkpoint, [])
    known.extend(reason for reason in reasons if reason not in known)


# Where a run's time went. Pure.
#
# Guarantee: every moment from the journal's first line to its last is in exactly one part, so the parts sum
# to the whole. Where two parts claim a moment, a save goes before a step, a step before starting, and
# starting before other.


@dataclass(frozen=True)
class Ledger:
    """Seconds, in parts that do not overlap."""

    productive: float = 0.0
    """Steps done for the first time."""
    recomputed: float = 0.0
    """Steps done again because they had been lost."""
    saving: float = 0.0
    """Training stood still for a save."""
    starting: float = 0.0
    """From an attempt's start to its first step."""
    down: float = 0.0
    """No attempt was running."""
    other: float = 0.0
    """An attempt ran, but no completed step covers the time: evaluation, a step cut off, the shutdown."""

    @property
    def whole(self) -> float:
        return sum(seconds for _, seconds in self.parts())

    @property
    def goodput(self) -> float:
        """The productive share, 0 to 1."""
        return self.productive / self.whole if self.whole else 0.0

    def parts(self) -> list[tuple[str, float]]:
        return [(part.name, getattr(self, part.name)) for part in fields(self)]


def ledger_of(lines: list[JournalLine]) -> Ledger:
    """Account for every second between the first line and the last."""
    if not lines:
        return Ledger()
    begin, end = min(line.at for line in lines), max(line.at for line in lines)
    claims: list[tuple[int, str, TimeSpan]] = []
    highest: int | None = None
    life = attempts_of(lines)
    if life:
        claims.append((2, "starting", TimeSpan(begin, life[0].first_at)))
    for attempt in life:
        over = end
        if attempt.failed_at is not None:
            over = attempt.failed_at
        elif attempt.ended is not None and attempt.ended.outcome != "lost":
            over = attempt.ended_at or attempt.last_at
        elif attempt.ended is not None or attempt is not life[-1]:
            over = attempt.last_at
        begun = attempt.first_at
        trained = attempt.steps[0].start if attempt.steps else over
        claims.append((1, "other", TimeSpan(begun, over)))
        claims.append((2, "starting", TimeSpan(begun, trained)))
        for step in attempt.steps:
            again = highest is not None and step.step <= highest
            claims.append((3, "recomputed" if again else "productive", TimeSpan(step.start, step.end)))
        if attempt.steps:
            highest = max(highest if highest is not None else 0, *(step.step for step in attempt.steps))
    claims.extend((4, "saving", span) for span in blocked_spans(lines))
    return Ledger(**_sweep(claims, begin, end))


def _sweep(claims: list[tuple[int, str, TimeSpan]], begin: float, end: float) -> dict[str, float]:
    """Cut [begin, end] at every claim's edge and give each piece to its strongest claim, else to `down`."""
    edges: list[tuple[float, int, int, str]] = []
    for rank, name, span in claims:
        start, stop = max(begin, span.start), min(end, span.end)
        if stop > start:
            edges.append((start, 1, rank, name))
            edges.append((stop, -1, rank, name))
    edges.sort(key=lambda edge: edge[0])
    seconds: dict[str, float] = {}
    standing: dict[tuple[int, str], int] = {}
    cursor = begin
    for moment, change, rank, name in [*edges, (end, 0, 0, "down")]:
        if moment > cursor:
            strongest = max((key for key, count in standing.items() if count), default=(0, "down"))
            seconds[strongest[1]] = seconds.get(strongest[1], 0.0) + moment - cursor
            cursor = moment
        if change:
            standing[rank, name] = standing.get((rank, name), 0) + change
    return seconds
