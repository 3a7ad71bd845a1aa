"""One node's agent's part in in-process restarts, and the leading agent's consent to them.

There is one `InProcess` for the workers of an attempt, which serves all attempts in which they go on: it runs
the node's keeper and, on the leading node, the conductor, and takes up each plan, under the number and epoch
that the plan names.

Guarantees: the conductor's question whether to go on is answered in the agent's own thread, so nothing about
an attempt changes behind the back of whoever watches it. A worker that ends while a restart is open is not a
failure until the plan is there, but for no longer than barrier_timeout and some slack; after that, and if
there was no plan yet, its end means what it means without in-process restart.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import msgspec
import torch
from torch.distributed import PrefixStore

from holdfast.config import InProcessSettings
from holdfast.errors import ExitCode
from holdfast.journal.events import Warned, WorkersStarted
from holdfast.launch.context import LaunchContext
from holdfast.launch.incident import Recovery
from holdfast.launch.nodes import Attempt, AttemptAnnouncement, MeetingHandler, Notice, lead_on
from holdfast.launch.stops import FINE, Stopping
from holdfast.launch.terminal import say
from holdfast.launch.workers import Workers
from holdfast.policy import STAYS, Decision, Fault, Orders, Participant, device_of, first_barrier
from holdfast.record import FailureRecord, connect, paused, within
from holdfast.restart import (
    PREFIX,
    UNREADABLE,
    Conductor,
    Denied,
    End,
    EndKind,
    Granted,
    IterationPlan,
    Keeper,
    KeeperHandover,
    Next,
    Over,
    OverKind,
    Restart,
    as_evidence,
    end_key,
    faulted,
    handed_over,
    log_path,
    plan_key,
    planned,
    stamped,
)

if TYPE_CHECKING:
    from torch.distributed import Store


# The leading agent's consent: whether an attempt that failed goes on in the processes that it has.
#
# Guarantee: the decision about a failed attempt is made once, by the same policy and on the same history as
# without in-process restart, and it is durable before anybody acts on it. If it can be carried out in these
# processes, the attempt is ended and the next one begun before the members are told; if not, the members end,
# and what follows is what was decided here.


Seen = Callable[[Sequence[int]], Mapping[int, FailureRecord]]


class Consent:
    """One for the workers of an attempt, on the leading node. Used in the agent's own thread."""

    def __init__(
        self,
        attempt: Attempt,
        workers: Workers,
        context: LaunchContext,
        recovery: Recovery,
        meeting: MeetingHandler | None,
        stopping: Stopping,
        seen: Seen,
    ) -> None:
        """`seen`: what is known here of this node's members that have ended."""
        self._attempt = attempt
        self._workers = workers
        self._context = context
        self._recovery = recovery
        self._meeting = meeting
        self._stopping = stopping
        self._seen = seen
        self._nodes: dict[int, str] = {}

    def give(self, restart: Restart) -> Granted | Denied:
        """The conductor's `authorise`."""
        attempt, request = self._attempt, self._stopping.request
        self._nodes = restart.nodes
        if request is not None and self._stopping.asked_between:
            return Denied(reason=f"asked to stop: {request.detail}", exit_code=int(ExitCode.STOPPED))
        held_up = paused(attempt.control)
        if held_up is not None:
            return Denied(reason=f"recovery is paused by {held_up.describe()}")
        attempt.stopped_at = time.time()  # all that still live have left the function and met
        pids = {one.member: one.pid for one in restart.ready}
        self._take(restart.faults, restart.iteration, len(restart.order), pids)
        first = restart.faults[0] if restart.faults else None
        notice = Notice(
            kind="failure",
            node=first.node if first is not None else attempt.place.node,
            at=first.at if first is not None else time.time(),
            detail="; ".join(fault.describe() for fault in restart.faults),
        )
        stopping = request.detail if request is not None else ""
        incident = self._recovery.settle_in_process(attempt, notice, stopping, self._can_be_done)
        decision = incident.decision
        if not self._can_be_done(decision):
            return Denied(reason=f"{decision.action}: {decision.reason}")
        self._begin_next(len(restart.following))
        self._recovery.tell(incident)
        begun = attempt.told
        new = _Renewed(
            attempt=begun.attempt, epoch=begun.epoch, orders=begun.orders, restarts_left=begun.restarts_left
        )
        return Granted(launch=msgspec.to_builtins(new), reason=decision.reason)

    def hand_over(self, kept: InProcess) -> None:
        """The members have ended: what befell them is evidence, unless it has been decided on already."""
        if kept.over is not None and not self._recovery.has_decided(self._attempt):
            plan = kept.plan or IterationPlan(iteration=0, order=list(range(self._attempt.place.world_size)))
            self._take(kept.over.faults, plan.iteration, len(plan.order), {})

    def _take(
        self, faults: Sequence[Fault], iteration: int, world_size: int, pids: Mapping[int, int]
    ) -> None:
        """Keep what befell members as the attempt's evidence; `pids`: of members of other nodes too."""
        monitor, recovery = self._context.monitor, self._recovery
        steps = [*monitor.last_steps().values(), *(fault.step for fault in faults)]
        recovery.last_step = max(steps, default=None)
        found = as_evidence(
            self._attempt.number,
            faults,
            world_size=world_size,
            pids={**pids, **self._workers.pids},
            devices=self._devices(),
            ends=self._seen([fault.member for fault in faults]),
        )
        if found.ended or found.raised:
            self._context.gate.keep_device_errors(self._attempt.number)
        for fault in faults:
            self._attempt.journal.write(faulted(fault, iteration, ended=self._attempt.number))
        sections = monitor.sections()
        ranks = {fault.member: fault.rank for fault in faults}
        recovery.take_faults(self._attempt, found, {ranks.get(one, one): sections[one] for one in sections})

    def _devices(self) -> dict[int, str]:
        """Member → device, if ranks have devices of their own."""
        arrangement = self._attempt.told.arrangement
        found: dict[int, str] = {}
        for one in arrangement.nodes:
            here = sorted(member for member, node in self._nodes.items() if node == one.node)
            found |= {member: device_of(one.devices, local) for local, member in enumerate(here)}
        return found

    def _can_be_done(self, decision: Decision) -> bool:
        """Whether these processes can do what was decided: on the same nodes and devices."""
        attempt = self._attempt
        nodes = {one.node for one in attempt.told.arrangement.nodes}
        moves = bool(decision.nodes) and set(decision.nodes) != nodes
        turns = decision.rotate_by != attempt.told.arrangement.rotation
        return decision.action in STAYS and not (moves or turns or decision.exclude)

    def _begin_next(self, world_size: int) -> None:
        context, leadership = self._context, self._context.leadership
        leadership.unguard()  # claiming the next epoch does not mean losing this one
        try:
            held = leadership.claim(context.launch)
        finally:
            leadership.guard(self._workers.kill)
        lead_on(
            self._attempt,
            held,
            torch.__version__,
            members=self._meeting.members if self._meeting is not None else [],
            max_restarts=context.settings.launch.max_restarts,
            started_with=context.started_with,
            world_size=world_size,
            launched=context.began,
        )


log = logging.getLogger("holdfast.launch")

STORE_TIMEOUT = 60.0
"""Seconds for one answer of the store, which another node may host."""
SLACK = 15.0
"""Seconds beyond barrier_timeout for the plan to be decided and read."""
PARTING = 10.0
"""Seconds for the members to end by themselves when they do not go on."""

Consents = Callable[[Restart], Granted | Denied]


def nodes_of(members: Sequence[Participant]) -> dict[int, str]:
    """Global rank → node; `members` in rank order."""
    names = [member.node for member in members for _ in range(member.slots)]
    return dict(enumerate(names))


class Desk:
    """Where the conductor's thread leaves its question for the agent's thread."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._asked: Restart | None = None
        self._answer: Granted | Denied | None = None
        self._taken = self._closed = False
        self.woken = threading.Event()

    def ask(self, restart: Restart, timeout: float) -> Granted | Denied:
        """Called in the conductor's thread; there is always an answer.

        `timeout` is for taking up the question; the agent that has taken it up answers, or closes the desk.
        """
        with self._changed:
            self._asked, self._answer, self._taken = restart, None, False
            self.woken.set()
            self._changed.wait_for(lambda: self._taken or self._closed, timeout)
            if self._taken:
                self._changed.wait_for(lambda: self._answer is not None or self._closed)
            self._asked = None
            return self._answer or Denied(reason="the launcher ends this attempt")

    def take(self) -> Restart | None:
        """Called in the agent's thread: the question, if there is one, which must then be answered."""
        with self._changed:
            self.woken.clear()
            if self._asked is None or self._taken:
                return None
            self._taken = True
            self._changed.notify_all()
            return self._asked

    def answer(self, answer: Granted | Denied) -> None:
        with self._changed:
            self._answer = answer
            self._changed.notify_all()

    def close(self) -> None:
        with self._changed:
            self._closed = True
            self._changed.notify_all()


class InProcess:
    """The members of one node. Every method is for the agent's own thread."""

    def __init__(
        self,
        attempt: Attempt,
        context: LaunchContext,
        members: Sequence[int],
        nodes: Sequence[Participant],
        in_all: int,
    ) -> None:
        """`members`: this node's, of `in_all`; `nodes`: the nodes in rank order, if they are known."""
        self.plan: IterationPlan | None = None
        """What the members do now."""
        self.over: Over | None = None
        """Why they do not go on."""
        self._attempt, self._number = attempt, attempt.number
        self._context = context
        self._mine = frozenset(members)
        self._workers: Workers | None = None
        self._begin_evidence: Callable[[], None] = lambda: None
        self._consent: Consents | None = None
        self._warned = False
        self._since: float | None = None
        """When it was noticed that a restart is open, or that everything is over."""
        self._ended_by: EndKind | None = None
        """How the iteration of the plan ended, once that is known."""
        self._lost: set[str] = set()
        self._closed = False
        self._desk = Desk()
        told, place = attempt.told, attempt.place
        self._chosen = chosen = context.settings.inprocess
        self._nodes = dict.fromkeys(members, place.node) | nodes_of(nodes)
        self._store = _connect(told)
        mine: dict[int, int | None] = dict.fromkeys(members)  # they say their process ids themselves
        directory = context.monitor.path.parent / f"restart-{attempt.number}"
        tell = _teller(chosen, place.node)
        self._keeper = Keeper(_connect(told), place.node, mine, chosen, directory, tell=tell)
        self._conductor: Conductor | None = None
        if place.leads:
            initial = context.settings.monitor.initial_rank_heartbeat_timeout
            self._conductor = Conductor(
                _connect(told),
                self._nodes,
                in_all,
                chosen,
                self._ask,
                tell,
                first_barrier=first_barrier(initial, chosen.barrier_timeout),
            )
        self._handed = KeeperHandover(
            host=told.master_addr,
            port=told.master_port,
            keeper=self._keeper.path,
            members=in_all,
            node=place.node,
        )

    def environment(self) -> dict[str, str]:
        """What a worker is handed."""
        return self._handed.to_environment()

    def started(self, workers: Workers, begin_evidence: Callable[[], None]) -> None:
        """The members are running. `begin_evidence` is called whenever they have become another attempt."""
        self._workers, self._begin_evidence = workers, begin_evidence

    def consult(self, consent: Consents) -> None:
        """Set who says whether a restart may be in process."""
        self._consent = consent

    def _ask(self, restart: Restart) -> Granted | Denied:
        return self._desk.ask(restart, self._chosen.barrier_timeout)

    # --- while they run -------------------------------------------------------------------------------------

    def pause(self, seconds: float) -> None:
        """Wait until the next look, which comes sooner if the conductor asks."""
        self._desk.woken.wait(seconds)

    def look(self) -> None:
        """Answer what the conductor asks, and take up what was planned."""
        restart = self._desk.take() if self._consent is not None else None
        if restart is not None and self._consent is not None:
            self._desk.answer(self._consent(restart))
        if self.over is None:
            self._learn()

    def _learn(self) -> None:
        number = self.plan.iteration + 1 if self.plan is not None else 0
        found = self._read(plan_key(number), Next)
        if found is not None:
            if isinstance(found, IterationPlan):
                self._take_up(found)
            else:
                self._end(found)
        elif self.plan is not None and self._ended_by is None:
            ended = self._read(end_key(self.plan.iteration), End)
            self._ended_by = ended.kind if ended is not None else None
            if self._ended_by is EndKind.FAULT:
                self._since = self._since or time.monotonic()

    def _end(self, over: Over) -> None:
        self.over = over
        if self.plan is not None:
            self._since = time.monotonic()
            if self._attempt.place.leads and over.kind is OverKind.HANDED_OVER:
                self._attempt.journal.write(handed_over(over, self.plan.iteration))

    def _take_up(self, plan: IterationPlan) -> None:
        before, self.plan = self.plan, plan
        self._since = self._ended_by = None
        attempt, number = self._attempt, plan.launch.get("attempt")
        if number is not None and number != attempt.number:  # the leading agent is there already
            new = msgspec.convert(plan.launch, type=_Renewed)
            told = msgspec.structs.replace(attempt.told, **msgspec.structs.asdict(new))
            attempt.go_on(told, len(plan.order))
        attempt.nodes_of_ranks = {
            rank: self._nodes[member] for rank, member in enumerate(plan.order) if member in self._nodes
        }
        context, workers = self._context, self._workers
        assert workers is not None
        learned = context.learner.go_on(context.monitor, attempt.number)
        context.monitor.go_on(self._mine - self.left_out(), plan.reserves, learned)
        if before is not None:
            if attempt.place.leads:
                attempt.journal.write(planned(plan, before.order, time.time(), ended=self._number))
            self._begin_evidence()
            pids = {rank: workers.pids[member] for member, rank in self.ranks().items()}
            attempt.journal.write(WorkersStarted(node=attempt.place.node, pids=pids, kept=True))
        self._number = attempt.number

    def _read(self, key: str, kind: Any) -> Any:
        """None if there is nothing yet, or something that members do not write: that is ignored, with one
        warning.
        """
        store = self._store
        raw = within(
            lambda: store.get(key) if store.check([key]) else None,
            STORE_TIMEOUT,
            "the plan of an in-process restart",
        )
        try:
            return msgspec.json.decode(raw, type=kind) if raw is not None else None
        except UNREADABLE as error:
            if not self._warned:
                self._warned = True
                text = f"{key} in the attempt's store is ignored, because somebody else wrote it: {error}"
                say(f"warning: {text}")
                self._attempt.journal.write(Warned(message=text))
            return None

    # --- what the ends of workers mean ----------------------------------------------------------------------

    @property
    def between(self) -> bool:
        """Whether the members are between two iterations, or about to end: nobody trains."""
        if self._since is None:
            return False
        longest = PARTING if self.over is not None else self._chosen.barrier_timeout + SLACK
        return time.monotonic() - self._since < longest

    def counted(self, ended: Mapping[int, int]) -> dict[int, int]:
        """The workers that have ended and whose end counts, with their codes.

        A worker that no longer takes part counts as done; one that ended badly while a restart is open does
        not count yet.
        """
        if self.plan is None:
            return dict(ended)
        found = {**ended, **dict.fromkeys(self.left_out(), 0)}
        for member in self.plan.reserves:
            if member in ended:
                found[member] = 0
        if self.over is not None and self.over.kind is OverKind.STOPPED:
            lost = {fault.member for fault in self.over.faults if ended.get(fault.member)}
            found |= {member: 0 for member in lost if ended[member] != self.over.exit_code}
        if self._ended_by is EndKind.COMPLETED:
            return found  # what happens after the function is the script's own affair
        bad = [member for member, code in found.items() if code not in FINE]
        if bad and self._since is None:
            self._since = time.monotonic()
        all_ended = len(found) == len(self._mine)
        if self.between and not (all_ended and self.over is not None):
            return {member: code for member, code in found.items() if member not in bad}
        return found

    def left_out(self) -> set[int]:
        """The members of this node that no longer take part."""
        if self.plan is None:
            return set()
        return set(self._mine) - set(self.plan.order) - set(self.plan.reserves)

    def lose(self, nodes: Mapping[str, str]) -> bool:
        """Take note of lost nodes, and how each was lost. True if the others go on without them, or may."""
        if self._conductor is None or self.plan is None or self.over is not None:
            return False
        for node in nodes.keys() - self._lost:
            self._lost.add(node)
            self._conductor.lose(node, nodes[node])
            self._since = self._since or time.monotonic()
        return self.between or not any(self._nodes.get(member) in nodes for member in self.plan.order)

    def explains(self, member: int, code: int) -> bool:
        """Whether a worker's end is no failure of its own: it was already reported as a fault, or wanted."""
        if self.over is None:
            return member in self.left_out()
        faults = {fault.member for fault in self.over.faults}
        return code == self.over.exit_code or member in self.left_out() | faults

    def ranks(self) -> dict[int, int]:
        """The rank of each of this node's members that train, by the rank that it was started with."""
        order = self.plan.order if self.plan is not None else sorted(self._mine)
        first = 0 if self.plan is not None else min(self._mine)
        return {member: rank for rank, member in enumerate(order, first) if member in self._mine}

    def close(self) -> None:
        """Stop keeping and conducting. A second call does nothing."""
        if self._closed:
            return
        self._closed = True
        self._desk.close()
        if self._conductor is not None:
            self._conductor.close()
        self._keeper.close()


class _Renewed(msgspec.Struct, frozen=True, kw_only=True):
    """The fields of an announcement, and of the workers' hand-over, that a plan renews."""

    attempt: int
    epoch: int
    orders: Orders = Orders()
    restarts_left: int | None = None


def _teller(chosen: InProcessSettings, node: str) -> Callable[[str], None]:
    """Logs what this node's keeper and conductor see, also in the file that the settings ask for."""
    try:
        path = log_path(chosen, node)
    except OSError as error:
        path = None
        say(f"warning: inprocess.monitor_process_logdir = {chosen.monitor_process_logdir}: {error}")

    def tell(message: str) -> None:
        log.info(message)
        if path is not None:
            with contextlib.suppress(OSError), path.open("a") as file:
                file.write(f"{stamped(message)}\n")

    return tell


def _connect(told: AttemptAnnouncement) -> Store:
    """A new client: one that waits would hold up whoever shares it."""
    return PrefixStore(PREFIX, connect(told.master_addr, told.master_port))
