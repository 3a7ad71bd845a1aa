"""When each step was done, from the batches that rank 0 journals.

A batch says when it was written and how long each of its steps took. Steps are laid out backwards from the
batch's time, around the moments for which a save held training up, and never into the batch before; so no
two steps of one attempt overlap. This is exact to about the time between two batches.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable
from typing import NamedTuple

from holdfast.journal.events import Line, SaveCommitted, StepsDone, decode_loss
from holdfast.journal.render import REPORTER

CLOSE = 0.001
"""Times nearer than this are taken as the same moment: sums of many floats drift by less."""


class Span(NamedTuple):
    start: float
    end: float


class Step(NamedTuple):
    attempt: int
    step: int
    start: float
    end: float
    loss: float | None


def blocked_spans(lines: Iterable[Line]) -> list[Span]:
    """The times for which a save held training up, in order and without overlap."""
    spans: list[Span] = []
    for line in lines:
        if isinstance(line.body, SaveCommitted):
            called = line.at - max(0.0, line.body.seconds)
            spans.append(Span(called, min(line.at, called + max(0.0, line.body.blocked_seconds))))
    merged: list[Span] = []
    for span in sorted(spans):
        if merged and span.start <= merged[-1].end:
            merged[-1] = Span(merged[-1].start, max(merged[-1].end, span.end))
        elif span.end > span.start:
            merged.append(span)
    return merged


def steps_done(lines: Iterable[Line]) -> list[Step]:
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


def _before(moment: float, blocked: list[Span], ends: list[float]) -> float:
    """`moment`, moved to the start of the save it falls into or that has just ended."""
    index = bisect_left(ends, moment - CLOSE)
    if index < len(blocked) and blocked[index].start < moment:
        return blocked[index].start
    return moment


def _back(moment: float, seconds: float, blocked: list[Span], ends: list[float]) -> float:
    """The moment that lies `seconds` of training before `moment`."""
    index = bisect_right(ends, moment) - 1
    while index >= 0 and moment - seconds < ends[index]:
        seconds -= moment - ends[index]
        moment = blocked[index].start
        index -= 1
    return moment - max(0.0, seconds)
