"""A hang, from the rank that is overdue to what the decision is told of it.

Guarantee: an overdue rank counts as hung only by `policy.timeouts.hanging`, which is asked about the ranks of
all nodes. Whoever has an overdue rank raises a hand; the leading agent calls the roll, every agent answers
with what it knows of its ranks at that moment, and the leader judges. Where the leader does not call it, or a
node does not answer, for `PATIENCE` seconds, that is done without: no hang is held up by an agent that hangs.

Every node looks at all of its own ranks before it ends them, wherever the hang was noticed first: only all of
them together show who is missing from a collective.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Mapping, Sequence

import msgspec

from holdfast.launch.arrangement import Arrangement
from holdfast.launch.attempt import Attempt, Notice
from holdfast.launch.hang import collect, read_reports
from holdfast.launch.hang_report import merge
from holdfast.launch.monitor import Monitor
from holdfast.policy.evidence import Hang
from holdfast.policy.timeouts import EXITING, Standing, hanging

LOOKING = 10.0
"""Seconds for finding out what the ranks of a node do, and for writing it down."""
PATIENCE = 60.0
"""Seconds for the leading agent to call the roll, and for the others to answer it."""
ASK = 0.5
"""Seconds between two looks at whether the roll is called, or a hand is raised."""
CALL = 2.0
"""Seconds between two calls while somebody is overdue."""
NAMED = 3
"""Ranks that are named, of those that hang."""
HANDS, CALLED, ANSWERED = "roll/hands", "roll/called", "roll/answered"


class RollCall:
    """Whether the ranks of one attempt hang, as all of its nodes know it. One for an attempt."""

    def __init__(self, attempt: Attempt) -> None:
        self._attempt = attempt
        self._place = attempt.place
        self._until: dict[int, float] = {}
        """Up to when a rank that is late and was excused has time."""
        self._asked = 0.0
        self._raised: float | None = None
        """When this node raised its hand, and nobody has called the roll since."""
        self._answered = 0
        self._hands = 0
        """Of the leader: how many were raised before the last call."""
        self._call = 0
        """The number of the last call."""
        self._before = 0
        """Answers that had been given before it."""
        self._open: float | None = None
        """When it was made, while not all have answered."""
        self._next = 0.0
        """When the next one is due; 0 if nobody was overdue."""

    def look(self, mine: Standing) -> Notice | None:
        """To be called often: the notice that the group hangs, if it does. `mine`: this node's ranks."""
        now = time.monotonic()
        if self._place.nodes == 1:
            return self._judge([mine], now)
        if now - self._asked < ASK:
            return None
        self._asked = now
        return self._lead(mine, now) if self._place.leads else self._follow(mine, now)

    def _judge(self, standings: Sequence[Standing], now: float) -> Notice | None:
        found, self._until = hanging(standings, self._until, now)
        if not found:
            return None
        detail = "; ".join(late.told for _, late in found[:NAMED])
        return Notice(kind="hang", node=found[0][0], at=time.time(), detail=detail)

    # -- the others -----------------------------------------------------------------------------------------

    def _follow(self, mine: Standing, now: float) -> Notice | None:
        called = self._attempt.counted(CALLED)
        if called > self._answered:
            self._answered, self._raised = called, None
            self._attempt.say(f"roll/{self._place.group_rank}", msgspec.json.encode((called, mine)).decode())
            self._attempt.count(ANSWERED)
        elif not mine.late:
            self._raised = None
        elif self._raised is None:
            self._raised = now
            self._attempt.count(HANDS)
        elif now - self._raised > PATIENCE:
            return self._judge([mine], now)  # whoever leads does not look
        return None

    # -- the leader -----------------------------------------------------------------------------------------

    def _lead(self, mine: Standing, now: float) -> Notice | None:
        if self._open is None:
            self._begin(mine, now)
            return None
        lost = self._attempt.lost_nodes()
        others = [rank for rank in range(1, self._place.nodes) if rank not in lost]
        late = now - self._open > PATIENCE
        if self._attempt.counted(ANSWERED) - self._before < len(others) and not late:
            return None
        answers = self._attempt.read([f"roll/{rank}" for rank in others]).values()
        heard = [msgspec.json.decode(raw, type=tuple[int, Standing]) for raw in answers]
        standings = [mine, *(standing for call, standing in heard if call == self._call)]
        if len(standings) <= len(others) and not late:
            return None  # some of those counted were lost since, or had answered an earlier call
        self._open = None
        if not any(standing.late for standing in standings):
            self._next, self._until = 0.0, {}
            return None
        self._next = now + CALL
        return self._judge(standings, now)

    def _begin(self, mine: Standing, now: float) -> None:
        """Call the roll if a hand is up here or elsewhere, or somebody was overdue the last time."""
        if now < self._next:
            return
        hands = self._attempt.counted(HANDS)
        if hands == self._hands and not mine.late and not self._next:
            return
        self._before = self._attempt.counted(ANSWERED)
        self._call, self._hands, self._open = self._attempt.count(CALLED), hands, now


def look_at_hang(
    attempt: Attempt,
    pids: Mapping[int, int],
    monitor: Monitor,
    ranks: Mapping[int, int],
    ended: Collection[int] = (),
) -> None:
    """Keep what this node's ranks are doing, while they still do it.

    `ranks`: by what each worker was started with, its present rank; who has none does nothing. `ended`: those
    whose processes have.
    """
    started = {rank: first for first, rank in ranks.items()}
    collect(
        attempt.control.attempt(attempt.number),
        attempt.place.node,
        {rank: pids[first] for rank, first in started.items()},
        lambda rank, timeout: monitor.ask(started[rank], timeout),
        hung=[
            msgspec.structs.replace(one, rank=ranks.get(one.rank, one.rank)) for one in monitor.overdue(ended)
        ],
        deadline=time.monotonic() + LOOKING,
        stacks=monitor.path.parent,
    )


def hangs_of(attempt: Attempt) -> tuple[list[Hang], list[str]]:
    """What all nodes found, as evidence, and in words."""
    reports = read_reports(attempt.control.attempt(attempt.number))
    if not reports:
        return [], []
    found = merge(reports, world=attempt.place.world_size)
    nodes = attempt.nodes_of_ranks or _nodes_of_ranks(attempt.told.arrangement, attempt.place.world_size)
    hangs = [
        Hang(
            rank=one.rank,
            at=min(report.at for report in reports),
            node=one.node,
            section=one.section,
            seconds=one.seconds,
            limit=one.limit,
            missing=list(one.missing),
            missing_nodes=sorted({nodes[rank] for rank in one.missing if rank in nodes}),
            silent=list(one.silent),
            exiting=one.rule == EXITING,
        )
        for one in found.hung
    ]
    return hangs, found.told


def _nodes_of_ranks(arrangement: Arrangement, world_size: int) -> dict[int, str]:
    """Global rank → node, where all nodes have as many workers."""
    nodes = [one.node for one in arrangement.nodes]
    if not nodes or world_size % len(nodes):
        return {}
    each = world_size // len(nodes)
    return {rank: nodes[rank // each] for rank in range(world_size)}
