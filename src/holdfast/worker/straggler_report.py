"""A report on stragglers as the journal and the log have it."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from holdfast.journal.straggler_events import StragglerFound, StragglersReported
from holdfast.journal.text import duration, plural
from holdfast.policy.straggler_times import Finding, Named, RankTimes, Score, Span
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


class Tally:
    """What slow ranks have cost in this attempt, and when to say so again: after 3 more reports, then after 4
    times as many as before, so that a run of a year says it a dozen times."""

    def __init__(self) -> None:
        self._waited: dict[str, float] = {}
        self._named: dict[str, Named] = {}
        self._reports: dict[str, int] = {}

    def count(self, event: StragglersReported, finding: Finding) -> None:
        for rank in event.ranks:
            self._add(f"rank {rank}", event.behind(rank, ""))
        for node in dict.fromkeys(event.nodes):
            self._add(f"node {node}", event.behind(None, node))
        self._named = {one.key: one for one in finding.named}
        fresh = {one.key for one in finding.fresh}
        self._reports = {key: 1 if key in fresh else self._reports.get(key, 0) + 1 for key in self._named}

    def so_far(self, named: Named) -> str:
        """The end of a sentence about it; empty where nothing was measured."""
        waited = self._waited.get(named.key, 0.0)
        return f"; the others have waited {duration(waited)} for it so far" if waited else ""

    def still_slow(self) -> list[str]:
        return [
            f"{named.describe().replace(' is slow ', ' is still slow ', 1)}{self.so_far(named)}"
            for key, named in self._named.items()
            if self._reports[key] in _AGAIN
        ]

    def _add(self, key: str, seconds: float) -> None:
        if seconds > 0:
            self._waited[key] = self._waited.get(key, 0.0) + seconds


_AGAIN = frozenset(4**power for power in range(1, 16))
"""The reports in a row that find a rank slow after which that is said again."""


def lines_of(finding: Finding, count: int, step: int) -> list[str]:
    """The best and the worst scores, for the log and the terminal; each line begins alike."""
    if not count or not finding.scores:
        return []
    begin = f"straggler scores at step {step} (1.00 is full speed):"
    if not finding.enough:
        return [f"{begin} too few steps were measured for a report"]
    ranks = len(finding.scores)
    listed = [("best", finding.best(count)), ("worst", finding.worst(count))]
    if ranks <= 2 * count:  # the two would name the same ranks
        listed = [("slowest first", finding.worst(ranks))]
    lines = []
    for what, scores in listed:
        shown = ", ".join(_shown(one) for one in scores)
        lines.append(f"{begin} {what} of {plural(ranks, 'rank')}: {shown}")
    if finding.group_slower:
        told = "most ranks are slower than they were at their best, so no rank can be named for it"
        lines.append(f"{begin} {told}")
    return lines


def _shown(score: Score) -> str:
    parts = [
        f"{value:.2f} {against}"
        for value, against in (
            (score.relative, "against the others"),
            (score.individual, "against its own best"),
        )
        if value is not None
    ]
    if score.waiting >= 0.01:
        parts.append(f"waits {score.waiting:.0%} of a step")
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
