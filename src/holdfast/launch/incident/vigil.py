"""Watches over one running attempt until something ends it.

Guarantee: returns a notice, the same one on every node that can still be reached, or raises: StoreLostError
when the other nodes cannot be reached any more. An attempt that is asked to stop (launch/stops.py) is looked
at more often, until its ranks have ended or its deadline is over. Nothing is ended in here, and nothing here
waits for the run's storage: where that does not answer, what lies on it is not known for a while.

A node whose workers are through waits for the others, for as long as their agents live and no rank of theirs
hangs: how long they train is their script's affair, and no time limit ends that wait.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping

from holdfast.base import Look
from holdfast.errors import ControlError
from holdfast.health import nearest, try_storage
from holdfast.journal.events import Warned
from holdfast.launch import InProcess, LaunchContext, Overdue, Stopping, say
from holdfast.launch.incident.hang import RollCall
from holdfast.launch.nodes import Attempt, MeetingHandler, Notice, StoreLostError
from holdfast.launch.workers import Workers
from holdfast.policy import CHECKPOINTING, LOADING, Standing, may_regroup
from holdfast.record import past_attempts

STORAGE_PATIENCE = 5.0
"""Seconds that storage has to take a few bytes, when a rank is late with a save or a load."""
TENDING = 5.0
"""Seconds between two looks at all processes of the node."""


class StorageDoubt:
    """Whether a rank that saves or loads is late because the checkpoints' storage does not answer.

    It does not hang by itself then, and a new attempt would wait there as well. Once the storage answers, the
    rank has its limit again. Bounded by checkpoint.timeout, which ends a save that takes longer.

    Guarantee: an answer counts until it is old, not only in the look that brought it. Every node is asked
    about its ranks at moments of its own, and has to say the same at each of them.
    """

    def __init__(self, ask: Callable[[], object], longest: float, tell: Callable[[str], None]) -> None:
        self._look = Look(ask, "storage", patience=0.0)
        self._longest = longest
        self._tell = tell
        self._asked = self._answered = self._stalled = -math.inf
        """When it was asked for what it has not answered yet; when it last answered; when it last should
        have, and had not."""

    def __call__(self, one: Overdue) -> bool:
        if one.section not in (CHECKPOINTING, LOADING) or one.stopped:
            return False
        if one.seconds > self._longest + one.limit:
            return False
        now = time.monotonic()
        if self._look.take() is not None:
            self._asked, self._answered = -math.inf, now
        elif self._asked == -math.inf:
            self._asked = now
        if now - self._answered > STORAGE_PATIENCE:
            if now - self._asked < STORAGE_PATIENCE:
                return True  # it may answer yet
            if self._stalled == -math.inf:
                self._tell(f"{one}; but the storage that it needs does not answer, so it is waited for")
            self._stalled = now
        return now - self._stalled < one.limit


class Vigil:
    """One attempt as its node's agent watches it."""

    def __init__(
        self,
        attempt: Attempt,
        workers: Workers,
        context: LaunchContext,
        meeting: MeetingHandler | None,
        stopping: Stopping,
        *,
        interval: float,
        newcomers: Callable[[], int],
        in_process: InProcess | None = None,
    ) -> None:
        """`newcomers` says how many nodes wait that the group has room for."""
        self._attempt = attempt
        self._workers = workers
        self._context = context
        self._meeting = meeting
        self._stopping = stopping
        self._interval = interval
        self._newcomers = newcomers
        self._in_process = in_process
        self._roll_call = RollCall(attempt)
        self._tended = time.monotonic()
        self._history = Look(self._may_regroup, "history")
        root = context.settings.checkpoint_root()
        self._waits_for_storage = StorageDoubt(
            lambda: try_storage(nearest(root)), context.settings.checkpoint.timeout, self._tell
        )

    def watch(self) -> Notice:
        """Until something ends the attempt: the notice that all nodes act on."""
        while True:
            self._pause(min(self._interval, self._stopping.pause or self._interval))
            self._tend()
            self._context.tend_starter()
            found = self._look()
            if found is not None:
                return found

    def _pause(self, seconds: float) -> None:
        if self._in_process is not None:
            self._in_process.pause(seconds)
        else:
            time.sleep(seconds)

    def _tend(self) -> None:
        """Reap what was left behind, and see that the keeper lives, every now and then."""
        if time.monotonic() - self._tended < TENDING:
            return
        self._tended = time.monotonic()
        self._context.orphans.tend()
        self._context.learner.poll(self._context.monitor)
        keeper, told = self._context.keeper.check()
        if keeper is not None:
            self._context.orphans.own(keeper)
        if told:
            self._attempt.journal.write(Warned(message=told))

    def _look(self) -> Notice | None:
        attempt, node = self._attempt, self._attempt.place.node
        lost = self._context.leadership.lost
        if lost:
            return attempt.give(Notice(kind="lease_lost", node=node, detail=lost))
        if self._meeting is not None and self._meeting.lost:
            raise StoreLostError(f"the store through which the nodes meet is lost: {self._meeting.lost}")
        ended, between = self._workers.ended(), False
        if self._in_process is not None:
            self._in_process.look()
            ended = self._in_process.counted(ended)
            between = self._in_process.between
        stopped = self._stopping.poll(ended, between=between)
        if stopped is not None:
            return stopped
        if self._stopping.failed(ended):
            return attempt.give(Notice(kind="failure", node=node, at=time.time()))
        seen = self._lost()
        if seen is not None:
            return attempt.give(seen)
        given = attempt.notice()
        if given is not None:
            return given
        hang = self._roll_call.look(self._standing(ended, between=between))
        if hang is not None:
            return attempt.give(hang)
        if between:
            return None
        if self._stopping.request is not None:
            return None
        if len(ended) == len(self._workers.pids):
            return self._finish()
        if self._may_grow():
            return attempt.give(Notice(kind="regroup", node=node))
        return None

    def _standing(self, ended: Mapping[int, int], *, between: bool) -> Standing:
        """What this node has to say of its ranks."""
        node, kept = self._attempt.place.node, self._in_process
        if between:  # who has to be where by when is the conductor's affair
            return Standing(node=node, in_time=0)
        ranks = kept.ranks() if kept is not None else None
        return self._context.monitor.standing(node, ended, ranks, excused=self._waits_for_storage)

    def _tell(self, told: str) -> None:
        self._attempt.journal.write(Warned(message=told))
        say(f"warning: {told}")

    def _finish(self) -> Notice | None:
        """This node's workers are done: so is the attempt when all nodes' are."""
        attempt, node = self._attempt, self._attempt.place.node
        attempt.count_in("finished")
        lost = len(attempt.lost_nodes())  # those that the others went on without
        if attempt.counted("finished") >= attempt.place.nodes - lost:
            # Given, so that a node which is asked to stop at this very moment learns of it too.
            return attempt.give(Notice(kind="finished", node=node))
        return None

    def _lost(self) -> Notice | None:
        """A notice of the nodes that this agent has just lost sight of."""
        attempt = self._attempt
        lost = attempt.lost_nodes()
        if lost:
            names = {rank: self._name_of(rank) for rank in sorted(lost)}
            if self._in_process is not None and self._in_process.lose({names[r]: lost[r] for r in names}):
                return None
            detail = "; ".join(f"node {name} was lost: {lost[rank]}" for rank, name in names.items())
            nodes = list(names.values())
            return Notice(kind="node_lost", node=nodes[0], nodes=nodes, at=time.time(), detail=detail)
        why = attempt.lost_leader()
        if why:
            name = self._name_of(0)
            detail = f"the leading node {name} was lost: {why} (seen by {attempt.place.node})"
            return Notice(kind="leader_lost", node=name, nodes=[name], at=time.time(), detail=detail)
        return None

    def _name_of(self, group_rank: int) -> str:
        members = self._meeting.members if self._meeting is not None else []
        return members[group_rank].node if group_rank < len(members) else f"of group rank {group_rank}"

    def _may_grow(self) -> bool:
        """Whether nodes wait that the group has room for, and another regrouping is allowed.

        A full group never looks: it has no room, whoever waits.
        """
        attempt = self._attempt
        if attempt.place.nodes >= self._context.max_nodes or self._newcomers() == 0:
            return False
        looked = self._history.take()
        return looked is not None and looked.result()

    def _may_regroup(self) -> bool:
        attempt = self._attempt
        try:
            return may_regroup(past_attempts(attempt.control, before=attempt.number + 1))
        except ControlError:  # it is looked at again; nobody ends a group that trains to let others join
            return False
