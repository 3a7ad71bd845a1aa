"""The losses of a run, one series an attempt. Pure: journal lines in, numbers out."""

from __future__ import annotations

from dataclasses import dataclass, field

from holdfast.account.steps import steps_done
from holdfast.journal.events import Line


@dataclass(frozen=True)
class LossPoint:
    step: int
    loss: float
    """May be NaN or infinite: then it was recorded so."""
    at: float


@dataclass(frozen=True)
class AttemptLosses:
    attempt: int
    points: list[LossPoint] = field(default_factory=list)
    kept: int | None = None
    """The last step that still counts; later ones were done again by a later attempt. None: all count."""


def losses(lines: list[Line]) -> list[AttemptLosses]:
    """Each attempt's losses in the order of its steps; attempts that recorded none are left out."""
    points: dict[int, list[LossPoint]] = {}
    first: dict[int, int] = {}
    for step in steps_done(lines):
        first.setdefault(step.attempt, step.step)
        if step.loss is not None:
            points.setdefault(step.attempt, []).append(LossPoint(step.step, step.loss, step.end))
    found = []
    for attempt in sorted(points):
        later = [step for number, step in first.items() if number > attempt]
        kept = min(later) - 1 if later and min(later) <= points[attempt][-1].step else None
        found.append(AttemptLosses(attempt, points[attempt], kept))
    return found
