"""Where a run's time went. Pure.

Guarantee: every moment from the journal's first line to its last is in exactly one part, so the parts sum to
the whole. Where two claim a moment, a save goes before a step, a step before starting, that before other.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

from holdfast.account.history import attempts
from holdfast.account.steps import Span, blocked_spans
from holdfast.journal.events import Line


@dataclass(frozen=True)
class Ledger:
    """Seconds, in parts that do not overlap."""

    productive: float = 0.0
    """Steps done for the first time."""
    recomputed: float = 0.0
    """Steps that had been done before and were lost."""
    saving: float = 0.0
    """Training stood still for a save."""
    starting: float = 0.0
    """From an attempt's start to its first step."""
    down: float = 0.0
    """No attempt was running."""
    other: float = 0.0
    """An attempt ran, and no completed step covers the time: evaluation, a step cut off, the shutdown."""

    @property
    def whole(self) -> float:
        return sum(seconds for _, seconds in self.parts())

    @property
    def goodput(self) -> float:
        """The productive share, 0 to 1."""
        return self.productive / self.whole if self.whole else 0.0

    def parts(self) -> list[tuple[str, float]]:
        return [(part.name, getattr(self, part.name)) for part in fields(self)]


def accounting(lines: list[Line]) -> Ledger:
    """Account for every second between the first line and the last."""
    if not lines:
        return Ledger()
    begin, end = min(line.at for line in lines), max(line.at for line in lines)
    claims: list[tuple[int, str, Span]] = []
    highest: int | None = None
    life = attempts(lines)
    if life:
        claims.append((2, "starting", Span(begin, life[0].first_at)))
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
        claims.append((1, "other", Span(begun, over)))
        claims.append((2, "starting", Span(begun, trained)))
        for step in attempt.steps:
            again = highest is not None and step.step <= highest
            claims.append((3, "recomputed" if again else "productive", Span(step.start, step.end)))
        if attempt.steps:
            highest = max(highest if highest is not None else 0, *(step.step for step in attempt.steps))
    claims.extend((4, "saving", span) for span in blocked_spans(lines))
    return Ledger(**_sweep(claims, begin, end))


def _sweep(claims: list[tuple[int, str, Span]], begin: float, end: float) -> dict[str, float]:
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
