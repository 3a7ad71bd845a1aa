"""What earlier attempts of a run measured: the cost of steps and saves, and how often the run failed.

Read once, by rank 0, at an attempt's start. It never fails: what cannot be read is said and left out, because
a run must not end for want of an estimate. Only the ends of the newest journals are read, so a long history
costs no more than a short one.
"""

from __future__ import annotations

import re
import time
from dataclasses import dataclass, field
from pathlib import Path

from holdfast.errors import ControlError
from holdfast.journal import REPORTER, Line, read_tail
from holdfast.journal.events import SaveCommitted, StepsDone
from holdfast.record import AttemptRecord, ControlDirectory, EndRecord, HeadRecord, ends_of, read_record

ATTEMPTS_READ = 3
TAIL_BYTES = 256 * 1024
RECENT_STEPS = 64
RECENT_SAVES = 9
_OTHER_RANK = re.compile(r"-rank-[1-9][0-9]*-[0-9]+\.jsonl$")


@dataclass
class Measured:
    """Of a run's earlier attempts; empty for a run that has none."""

    steps: list[float] = field(default_factory=list)
    """Seconds of recent steps."""
    saves: list[tuple[float, float]] = field(default_factory=list)
    """Recent saves to the root: seconds for which training was held up, and seconds to the commit."""
    running: float = 0.0
    """Seconds that all attempts ran together."""
    failures: int = 0
    restart: float = 0.0
    """Seconds from the last failure until now, if this launch restarted by itself; else 0."""
    problems: list[str] = field(default_factory=list)


def measured_before(control: ControlDirectory, attempt: int, launch: str) -> Measured:
    """What the attempts before this one left behind."""
    found = Measured()
    try:
        history = [
            (record, end)
            for record, end in ends_of(control)
            if record.number < attempt
            and read_record(control.attempt(record.number) / "head.json", HeadRecord) is not None
        ]  # an attempt without a head never trained: its end says nothing about training
    except ControlError as error:
        found.problems.append(f"the history of earlier attempts could not be read: {error}")
        return found
    for index, (record, end) in enumerate(reversed(history)):
        lines = _last_lines(control.journal, record.number) if index < ATTEMPTS_READ or end is None else []
        _count(found, record, end, lines)
        if index < ATTEMPTS_READ:
            _take(found, lines)
    if history:
        record, end = history[-1]
        if end is not None and end.outcome == "failed" and record.launch == launch:
            found.restart = max(0.0, time.time() - end.at)
    return found


def _count(found: Measured, record: AttemptRecord, end: EndRecord | None, lines: list[Line]) -> None:
    """Add one attempt's running time, and its end if that was a failure."""
    last = end.at if end is not None else max((line.at for line in lines), default=record.started)
    found.running += max(0.0, last - record.started)
    found.failures += end is None or end.outcome in ("failed", "lost")


def _take(found: Measured, lines: list[Line]) -> None:
    """Add an older attempt's steps and saves, before the newer ones that are there."""
    steps = [
        seconds
        for line in lines
        if isinstance(line.body, StepsDone) and line.who == REPORTER
        for seconds in line.body.seconds
    ]
    told = [line.body for line in lines if isinstance(line.body, SaveCommitted)]
    # A save to both tiers is told twice, and what it blocked only the first time.
    blocked = {save.checkpoint: save.blocked_seconds for save in told if save.tier == "local"}
    saves = [
        (max(save.blocked_seconds, blocked.get(save.checkpoint, 0.0)), save.seconds)
        for save in told
        if save.tier == "global"
    ]
    found.steps = [*steps, *found.steps][-RECENT_STEPS:]
    found.saves = [*saves, *found.saves][-RECENT_SAVES:]


def _last_lines(journal: Path, attempt: int) -> list[Line]:
    """The ends of an attempt's journals, without those of ranks other than 0."""
    lines: list[Line] = []
    for path in sorted(journal.glob(f"{attempt:06d}-*.jsonl")):
        if not _OTHER_RANK.search(path.name):
            lines.extend(read_tail(path, TAIL_BYTES))
    return sorted(lines, key=lambda line: line.at)
