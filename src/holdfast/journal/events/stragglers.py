"""Events of the straggler detector: what the ranks measured, and whom the others wait for."""

from __future__ import annotations

from statistics import median

import msgspec

from holdfast.base import Rendered, duration, plural, printable
from holdfast.journal import Event


class StragglersReported(Event, tag="stragglers_reported"):
    """What the ranks measured since the last report. The lists have one entry a row: a rank, or a node."""

    step: int
    """The last one measured."""
    steps: int
    """How many were, on the rank with the fewest."""
    seconds: float
    """Since the last report."""
    step_seconds: float
    """Of a step, the median of the ranks."""
    ranks: list[int]
    """The rank of each row; of a node its slowest."""
    nodes: list[str] = msgspec.field(default_factory=list)
    sections: dict[str, list[float]] = msgspec.field(default_factory=dict)
    """Seconds of an average step by section until the rank arrived."""
    waiting: list[float] = msgspec.field(default_factory=list)
    """Seconds of it that it is known to have waited for others."""
    relative: list[float | None] = msgspec.field(default_factory=list)
    """Speed against the other ranks: 1 is as quick as they are."""
    individual: list[float | None] = msgspec.field(default_factory=list)
    """Speed against its own best."""
    by_node: bool = False
    """Whether a row is a node: there are too many ranks to list."""
    group_slower: bool = False
    """Most ranks lost speed at once, so nobody could be named."""

    def behind(self, rank: int | None, node: str) -> float:
        """Seconds for which the others waited for that rank (or, without one, for the slowest of that node):
        how much later than most of them it arrived in an average step, times the steps."""
        arrived = [sum(column[row] for column in self.sections.values()) for row in range(len(self.ranks))]
        mine = {
            row
            for row in range(len(self.ranks))
            if (self.ranks[row] == rank if rank is not None else self.nodes[row] == node)
        }
        others = [value for row, value in enumerate(arrived) if row not in mine]
        if not mine or not others or not self.sections:
            return 0.0
        return max(0.0, max(arrived[row] for row in mine) - median(others)) * self.steps

    def render(self) -> Rendered:
        what = "node" if self.by_node else "rank"
        text = f"{plural(len(self.ranks), what)} compared over {plural(self.steps, 'step')}"
        text += f" of {duration(self.step_seconds)}"
        rows = zip(self.relative, self.ranks, strict=False)
        scored = [(score, rank) for score, rank in rows if score is not None]
        if scored:
            score, rank = min(scored)
            text += f"; the slowest is rank {rank} with a score of {score:.2f}"
        if self.group_slower:
            text += "; most ranks are slower than they were, so nobody can be named"
        return Rendered(text, "warning" if self.group_slower else "progress")


class StragglerFound(Event, tag="straggler_found"):
    """A rank, or a node, that the others wait for."""

    step: int
    kind: str
    """compute, input, section, other or node."""
    section: str
    """Where most of the time goes."""
    why: str
    """In words, with the figures."""
    rank: int | None = None
    """None for a whole node."""
    node: str = ""
    device: str = ""
    relative: float | None = None
    individual: float | None = None
    seconds: float = 0.0
    """That a step takes longer because of it."""
    then: str = "told"
    """told, stop (the run saves and stops) or exclude (it goes on without that device)."""

    def render(self) -> Rendered:
        then = {"stop": "; the run saves and stops", "exclude": "; the run goes on without it"}
        text = f"straggler: {printable(self.why)}{then.get(self.then, '')}"
        return Rendered(text, "fault" if self.then in then else "warning")
