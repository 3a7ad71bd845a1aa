"""A run's journal sorted into attempts and steps, where its time went, and how it came back. Pure.

Some lines are about an attempt that is over: a new launcher may record the end of one that it found lost, or
the decision about it, before its own attempt starts; after a restart in place the next attempt records what
ended the one before. Such lines belong to the attempt that they are about.
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, fields
from typing import NamedTuple

from holdfast.journal import REPORTER, AnyEvent, JournalLine, Unknown
from holdfast.journal.events import (
    Account,
    AttemptEnded,
    AttemptStarted,
    DecisionMade,
    FunctionRestarted,
    OperatorActed,
    RankStarted,
    RestartFaulted,
    RestartPlanned,
    Resumed,
    RunFinished,
    RungRejected,
    SaveCommitted,
    StepsDone,
    WorkerFailed,
    WorkersStarted,
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
    started_at: float | None = None
    workers_at: float | None = None
    """When rank 0's node had started its workers."""
    again_at: float | None = None
    """When rank 0 learned its part in this attempt, if its process had a part in the one before."""
    left_at: float | None = None
    """When the last of these processes had left what it did before."""
    ready: RankStarted | None = None
    ready_at: float | None = None
    """When rank 0 was ready for its first step."""
    data_seconds: float = 0.0
    """How long that step waited for its batch."""
    resumed: Resumed | None = None
    resumed_at: float | None = None
    ended: AttemptEnded | None = None
    ended_at: float | None = None
    finished_at: float | None = None
    """When the run finished, if it did in this attempt."""
    failures: list[tuple[float, WorkerFailed]] = field(default_factory=list)
    reported_at: float | None = None
    """When the first of them was written down; its node's workers were gone by then."""
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
            attempt.started_at = line.at if attempt.started is body else attempt.started_at
        case WorkersStarted() if not body.kept and (attempt.workers_at is None or 0 in body.pids):
            attempt.workers_at = line.at
        case FunctionRestarted():
            at = min(body.at or line.at, line.at)
            attempt.left_at = max(attempt.left_at or 0.0, at - max(0.0, body.seconds))
            attempt.again_at = at if line.who == REPORTER else attempt.again_at
        case RankStarted() if attempt.ready is None:
            attempt.ready, attempt.ready_at = body, line.at
        case StepsDone() if line.who == REPORTER:
            attempt.data_seconds = attempt.data_seconds or body.data
        case Resumed() if attempt.resumed is None:
            attempt.resumed, attempt.resumed_at = body, line.at
        case AttemptEnded() if attempt.ended is None:
            attempt.ended, attempt.ended_at = body, line.at
            if body.outcome == "finished" and attempt.finished_at is None:
                attempt.finished_at = line.at
        case RunFinished():
            attempt.finished_at = line.at
        case WorkerFailed():
            # A rank that left in good order may have done so long before anything failed.
            known = bool(body.at) and not body.left
            at = min(max(body.at, attempt.first_at), line.at) if known else line.at
            attempt.failures.append((at, body))
            attempt.reported_at = min(attempt.reported_at or line.at, line.at)
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
    back: tuple[Phase, ...] = ()
    """On what the times from faults to the next steps were spent, in all; they lie in the parts above."""

    @property
    def whole(self) -> float:
        return sum(seconds for _, seconds in self.parts())

    @property
    def goodput(self) -> float:
        """The productive share, 0 to 1."""
        return self.productive / self.whole if self.whole else 0.0

    def parts(self) -> list[tuple[str, float]]:
        return [(part.name, getattr(self, part.name)) for part in fields(self) if part.name != "back"]


def ledger_of(lines: list[JournalLine], ways: Iterable[Sequence[Phase]] = ()) -> Ledger:
    """Account for every second between the first line and the last. `ways`: how the run came back each time
    that it failed."""
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
    return Ledger(**_sweep(claims, begin, end), back=together(ways))


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


# How a run came back: the time from a fault to the end of the first step after it, by phase. Pure.
#
# Guarantee: the phases add up exactly to that time and none is negative, whatever lines are missing and
# however far the clocks of nodes are apart: a moment that seems to lie before an earlier one, or beyond the
# end, counts as that one. Time whose begin or end nobody wrote down is in the phase "unknown".

UNKNOWN = "unknown"
PHASES = {
    "detect": "until the fault was noticed",
    "stop": "until all workers were gone, or had left the function",
    "decide": "until the decision was durable",
    "queue": "until there was a launch again",
    "pause": "held up by an operator",
    "meet": "until the nodes had met and the attempt had begun",
    "start": "until its workers were running",
    "import": "importing torch and holdfast",
    "setup": "what the script does before its first step",
    "join": "until the ranks were part of the attempt",
    "load": "finding, verifying and loading the checkpoint",
    "prepare": "until the run was ready for a step",
    "data": "until the first batch was there, with what had to be replayed",
    "first step": "the rest of the first step",
    UNKNOWN: "not recorded",
}
"""Every phase, in order, and what it is."""
GRID = 2.0**22
"""Moments are multiples of 1/GRID seconds, as those of this century are anyway; sums of them are exact."""


class Phase(NamedTuple):
    name: str
    seconds: float
    parts: tuple[tuple[str, float], ...] = ()
    """What it consisted of, if that is known; adds up to `seconds`."""


class PhaseEnd(NamedTuple):
    """A moment at which a phase ended; None if nobody wrote it down."""

    phase: str
    at: float | None


def split(begin: float, end: float, marks: Iterable[PhaseEnd]) -> tuple[Phase, ...]:
    """The time from `begin` to `end`, by phase. `marks` are in the order in which they happen."""
    cursor = begin = _on_grid(begin)
    end = max(begin, _on_grid(end))
    seconds = dict.fromkeys(PHASES, 0.0)
    missing = False
    for phase, at in [*marks, PhaseEnd(UNKNOWN, end)]:
        if at is None:
            missing = True
            continue
        at = max(cursor, _on_grid(min(max(at, begin), end)))
        seconds[UNKNOWN if missing else phase] += at - cursor
        cursor, missing = at, False
    return tuple(Phase(name, spent) for name, spent in seconds.items() if spent)


def _on_grid(moment: float) -> float:
    return round(moment * GRID) / GRID


def way_back(
    failed: JournalledAttempt, following: Sequence[JournalledAttempt], begin: float, end: float
) -> tuple[Phase, ...]:
    """How the run came back from the end of `failed`, between these moments, through `following` attempts."""
    marks = _end_marks(failed, next(iter(following), None))
    before, ready = failed, None
    for nth, attempt in enumerate(following, 1):
        marks += _start_marks(attempt, before, begin)
        if attempt.steps:
            first = attempt.steps[0]
            ready = attempt.ready
            marks += [
                PhaseEnd("setup", first.start if ready is not None else None),
                PhaseEnd("data", first.start + attempt.data_seconds),
                PhaseEnd("first step", first.end),
            ]
            break
        marks += _end_marks(attempt, next(iter(following[nth:]), None))
        before = attempt
    return tuple(_with_parts(phase, ready) for phase in split(begin, end, marks))


def _end_marks(attempt: JournalledAttempt, after: JournalledAttempt | None) -> list[PhaseEnd]:
    """What happened between a fault and the decision about it."""
    ended = attempt.ended
    noticed, stopped = (ended.noticed or None, ended.stopped or None) if ended is not None else (None, None)
    if attempt.planned is not None:
        first = min((at for at, _ in attempt.faults), default=None)
        planned = first + attempt.planned.seconds if first is not None else None
        if stopped is None and after is not None:
            stopped = after.left_at
        return [
            PhaseEnd("detect", first),
            *([PhaseEnd("stop", stopped)] if stopped is not None else []),
            PhaseEnd("decide", attempt.recovery_at if attempt.recovery_at is not None else planned),
        ]
    if ended is None or ended.outcome == "lost" or _alone(attempt):
        return []  # nobody was left, or there, to write down more than the end
    reported = attempt.reported_at  # all there is of an older release
    return [
        PhaseEnd("detect", noticed if noticed is not None else reported),
        PhaseEnd("stop", stopped if stopped is not None else reported),
        PhaseEnd("decide", attempt.recovery_at if attempt.recovery_at is not None else attempt.ended_at),
    ]


def _start_marks(attempt: JournalledAttempt, before: JournalledAttempt, begin: float) -> list[PhaseEnd]:
    """What happened from there until the attempt was ready for a step."""
    ready, started = attempt.ready, attempt.started
    marks: list[PhaseEnd] = []
    if before.planned is not None:
        marks.append(PhaseEnd("meet", attempt.again_at))
    elif _alone(attempt):
        marks.append(PhaseEnd("queue", ready.process if ready is not None and _nobody(attempt) else None))
        marks.append(PhaseEnd(UNKNOWN, ready.process if ready is not None else None))
        marks.append(PhaseEnd("import", (ready.torch or None) if ready is not None else None))
    else:
        launched = started.launched if started is not None else 0.0
        marks += [PhaseEnd("queue", launched)] if launched else []
        if (before.ended is None or before.ended.outcome == "lost") and before.recovery_at is not None:
            # By the next leader: of the same launch, which had to notice and to meet first, or of another.
            marks += [PhaseEnd("meet", None if launched <= begin else before.recovery_at)]
            marks += [PhaseEnd("decide", before.recovery_at)]
        if started is not None and started.paused and before.recovery_at is not None:
            marks.append(PhaseEnd("pause", before.recovery_at + started.paused))
        marks += [
            PhaseEnd("meet", attempt.started_at),
            PhaseEnd("start", attempt.workers_at),
            PhaseEnd("import", (ready.torch or None) if ready is not None else None),
        ]
    if ready is not None:
        if ready.imported:  # Holdfast's own modules may come first, or long after torch
            marks += [PhaseEnd("setup", ready.importing or None), PhaseEnd("import", ready.imported)]
        return [
            *marks,
            PhaseEnd("setup", ready.start),
            PhaseEnd("join", ready.search),
            PhaseEnd("load", ready.loaded),
            PhaseEnd("prepare", attempt.ready_at),
        ]
    search = None
    if attempt.resumed is not None and attempt.resumed_at is not None:
        search = attempt.resumed_at - max(0.0, attempt.resumed.seconds)
    return [*marks, PhaseEnd("setup", None), PhaseEnd("join", search), PhaseEnd("load", attempt.resumed_at)]


def _alone(attempt: JournalledAttempt) -> bool:
    """Whether it had no launcher of ours, which would have recorded its end and its start."""
    return attempt.started is not None and attempt.started.launcher != "holdfast run"


def _nobody(attempt: JournalledAttempt) -> bool:
    """Whether it had no launcher at all: until its first process began, nothing of the run was running."""
    return attempt.started is not None and attempt.started.launcher == "none"


def _with_parts(phase: Phase, ready: RankStarted | None) -> Phase:
    """A load, or what the script does, in its parts. What ran side by side is shown by its share."""
    told: dict[str, float] = {}
    if ready is not None and phase.name == "load" and ready.load is not None:
        load = ready.load
        told = {"read": load.read, "digest": load.digest, "copy": load.copy, "check": load.check}
    elif ready is not None and phase.name == "setup":
        told = {f"import of {name}": seconds for name, seconds in ready.imports.items()}
    whole = sum(seconds for seconds in told.values() if seconds > 0)
    if whole <= 0:
        return phase
    share = min(1.0, phase.seconds / whole)
    parts = {name: _on_grid_below(seconds * share) for name, seconds in told.items() if seconds > 0}
    parts["the rest"] = phase.seconds - sum(parts.values())
    return phase._replace(parts=tuple((name, seconds) for name, seconds in parts.items() if seconds > 0))


def _on_grid_below(seconds: float) -> float:
    return math.floor(seconds * GRID) / GRID


def together(several: Iterable[Sequence[Phase]]) -> tuple[Phase, ...]:
    """Several ways back in all, by phase."""
    seconds = dict.fromkeys(PHASES, 0.0)
    for phases in several:
        for phase in phases:
            seconds[phase.name] += phase.seconds
    return tuple(Phase(name, spent) for name, spent in seconds.items() if spent)


def largest(phases: Sequence[Phase], most: int = 3) -> list[Phase]:
    """Those that took the longest, the longest first; none that hardly counts."""
    whole = sum(phase.seconds for phase in phases)
    ordered = sorted(phases, key=lambda phase: phase.seconds, reverse=True)
    return [phase for phase in ordered[:most] if phase.seconds >= HARDLY * whole]


HARDLY = 0.02
"""A share of the whole that is not worth naming."""
