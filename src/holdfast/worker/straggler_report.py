"""A report on stragglers as the journal and the log have it."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from holdfast.journal.straggler_events import StragglerFound, StragglersReported
from holdfast.policy.straggler_times import Finding, RankTimes, Score, Span
from holdfast.worker.straggler_actions import Fate

MOST_ROWS = 512
"""Ranks that are listed one by one; of more, each node's slowest stands for it."""


def event_of(ranks: Sequence[RankTimes], finding: Finding, step: int, seconds: float) -> StragglersReported:
    rows, by_node = _rows(ranks)
    scores = {one.rank: one for one in finding.scores}
    mine = [scores.get(row.rank, Score(rank=row.rank)) for row in rows]
    names = dict.fromkeys(name for row in rows for name in row.sections)
    return StragglersReported(
        step=step,
        steps=min((one.steps for one in ranks), default=0),
        seconds=round(seconds, 3),
        step_seconds=round(finding.step, 6),
        ranks=[row.rank for row in rows],
        nodes=[row.node for row in rows],
        sections={name: _column(rows, name, lambda span: span.own) for name in names},
        waiting=[round(row.waits, 6) for row in rows],
        relative=[_rounded(one.relative) for one in mine],
        individual=[_rounded(one.individual) for one in mine],
        by_node=by_node,
        group_slower=finding.group_slower,
    )


def found_event(fate: Fate, step: int) -> StragglerFound:
    one = fate.named
    return StragglerFound(
        step=step,
        kind=str(one.kind),
        section=one.section,
        why=fate.why,
        rank=one.rank,
        node=one.node,
        device=one.device,
        relative=_rounded(one.relative),
        individual=_rounded(one.individual),
        seconds=round(one.seconds, 6),
        then=fate.then,
    )


def lines_of(finding: Finding, count: int, step: int) -> list[str]:
    """The best and the worst scores, for the log and the terminal; each line begins alike."""
    if not count or not finding.scores:
        return []
    begin = f"straggler scores at step {step} (1.00 is full speed):"
    if not finding.enough:
        return [f"{begin} too few steps were measured for a report"]
    lines = []
    for what, scores in (("best", finding.best(count)), ("worst", finding.worst(count))):
        shown = ", ".join(_shown(one) for one in scores)
        lines.append(f"{begin} {what} of {len(finding.scores)} ranks: {shown}")
    if finding.group_slower:
        told = "most ranks are slower than they were at their best, so no rank can be named for it"
        lines.append(f"{begin} {told}")
    return lines


def _shown(score: Score) -> str:
    parts = [
        f"{value:.2f} {against}"
        for value, against in ((score.relative, "relative"), (score.individual, "individual"))
        if value is not None
    ]
    if score.waiting >= 0.01:
        parts.append(f"waits {score.waiting:.0%}")
    return f"rank {score.rank} ({', '.join(parts) or 'no score yet'})"


def _rows(ranks: Sequence[RankTimes]) -> tuple[list[RankTimes], bool]:
    if len(ranks) <= MOST_ROWS:
        return list(ranks), False
    slowest: dict[str, RankTimes] = {}
    for one in ranks:
        if one.node not in slowest or one.arrives > slowest[one.node].arrives:
            slowest[one.node] = one
    return sorted(slowest.values(), key=lambda one: -one.arrives)[:MOST_ROWS], True


def _column(rows: Sequence[RankTimes], name: str, of: Callable[[Span], float]) -> list[float]:
    return [round(of(row.sections[name]), 6) if name in row.sections else 0.0 for row in rows]


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 4)
