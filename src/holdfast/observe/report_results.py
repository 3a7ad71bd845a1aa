"""The report's part about results: what was rejected, what it turned out to be, what became of checkpoints.

A run in which nothing was ever rejected, put on probation or measured has no such part.
"""

from __future__ import annotations

from holdfast.journal.events import (
    DataSkipped,
    DeterminismMeasured,
    Line,
    ProbationEnded,
    StandingChanged,
    StepRejected,
    ThroughputLow,
    Verdict,
)
from holdfast.journal.render import printable, render
from holdfast.observe.markup import table, text, when

BAD = ("suspect", "condemned", "abandoned")
"""Standings that matter more than that a checkpoint was once resumed from."""
_SHOWN = (StepRejected, Verdict, ProbationEnded, StandingChanged, ThroughputLow, DataSkipped)
MOST_ROWS = 500


def standings(lines: list[Line]) -> dict[str, StandingChanged]:
    """The newest known standing of each checkpoint, by name."""
    return {line.body.checkpoint: line.body for line in lines if isinstance(line.body, StandingChanged)}


def standing(known: StandingChanged) -> str:
    """What is known of a checkpoint, for its row."""
    bad = known.standing in BAD
    mark, style = ("✕", "bad") if bad else ("✓", "good")
    why = "; ".join(known.evidence)
    return f'<span class="tag {style}">{mark} {text(known.standing)}</span> {text(why)}'.rstrip()


def judged(lines: list[Line], began: float) -> str:
    """Rejected steps, verdicts, probations and what followed; how far results repeat, where measured."""
    return _events(lines, began) + _determinism(lines)


def _events(lines: list[Line], began: float) -> str:
    found = [line for line in lines if isinstance(line.body, _SHOWN)]
    if not found:
        return ""
    rows = []
    for line in found[-MOST_ROWS:]:
        shown = render(line.body)
        details = "".join(f"<li>{text(detail)}</li>" for detail in shown.details)
        rows.append(
            f'<tr><td data-label="When">{when(line.at, began)}</td>'
            f'<td data-label="Attempt">{line.attempt}</td>'
            f'<td data-label="What"><span class="{shown.style}-text">{text(shown.text)}</span></td>'
            f'<td data-label="Evidence">{f"<ul>{details}</ul>" if details else ""}</td></tr>'
        )
    left = len(found) - len(rows)
    caption = "Results that were not accepted, and checkpoints that were watched after a resume."
    caption += f" {left} earlier ones are left out." if left else ""
    heads = [("When", ""), ("Attempt", ""), ("What", ""), ("Evidence", "")]
    return "<h2>Results and verdicts</h2>\n" + table(caption, heads, rows)


def _determinism(lines: list[Line]) -> str:
    measured = [line.body for line in lines if isinstance(line.body, DeterminismMeasured)]
    if not measured:
        return ""
    last = measured[-1]
    values = [
        ("steps", str(last.steps)),
        ("p50", f"{last.p50:.3g}"),
        ("p90", f"{last.p90:.3g}"),
        ("p99", f"{last.p99:.3g}"),
        ("p99.9", f"{last.p999:.3g}"),
        ("largest", f"{last.largest:.3g}"),
    ]
    if last.ranks > 1:
        values += [("ranks", str(last.ranks)), ("largest on rank", str(last.worst_rank))]
    listed = "".join(f"<div><dt>{name}</dt><dd>{printable(value)}</dd></div>" for name, value in values)
    return (
        "<h2>How far results repeat</h2>\n<p class='soft'>Relative difference between two runs of the same "
        f'step, over the last attempt that measured it.</p><dl class="figures">{listed}</dl>'
    )
