"""Whether an attempt that failed goes on in the processes that it has: the leading agent's consent.

Guarantee: the decision about a failed attempt is made once, by the same policy and on the same history as
without in-process restart, and it is durable before anybody acts on it. If it can be carried out in these
processes, the attempt is ended and the next one begun before the members are told; if not, the members end,
and what follows is what was decided here.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence

import msgspec
import torch

from holdfast.control.attempts import FailureRecord
from holdfast.control.operator import paused
from holdfast.exit_codes import ExitCode
from holdfast.inprocess.conductor import Denied, Granted, Restart
from holdfast.inprocess.journalled import faulted
from holdfast.inprocess.messages import Plan
from holdfast.inprocess.records import as_evidence
from holdfast.launch.attempt import Attempt, Notice, lead_on
from holdfast.launch.context import LaunchContext
from holdfast.launch.in_process import InProcess
from holdfast.launch.meeting import MeetingHandler
from holdfast.launch.recovering import Recovery
from holdfast.launch.stopping import Stopping
from holdfast.launch.workers import Workers
from holdfast.policy.faults import Fault
from holdfast.policy.inprocess import STAYS
from holdfast.policy.recovery import Decision
from holdfast.policy.rotation import device_of

Seen = Callable[[Sequence[int]], Mapping[int, FailureRecord]]


class Consent:
    """One for the workers of an attempt, on the leading node. For the agent's own thread."""

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
        told = attempt.told
        new = {"attempt": told.attempt, "epoch": told.epoch, "avoid": told.avoid}
        launch = new | {"rerun": told.rerun, "trial": told.trial, "restarts_left": told.restarts_left}
        return Granted(launch=msgspec.to_builtins(launch), reason=decision.reason)

    def hand_over(self, kept: InProcess) -> None:
        """The members have ended: what befell them is evidence, unless it was decided on already."""
        if kept.over is not None and not self._recovery.has_decided(self._attempt):
            plan = kept.plan or Plan(iteration=0, order=list(range(self._attempt.place.world_size)))
            self._take(kept.over.faults, plan.iteration, len(plan.order), {})

    def _take(
        self, faults: Sequence[Fault], iteration: int, world_size: int, pids: Mapping[int, int]
    ) -> None:
        """Keep what befell members as the attempt's evidence; `pids` of members, besides this node's own."""
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
        """Member → device, where ranks have devices of their own."""
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
        leadership.unguard()  # the claim of the next epoch is no loss of this one
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
        )
