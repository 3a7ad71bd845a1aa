"""The history of a job without the launcher: in memory, iteration by iteration.

With `holdfast run` the run's durable history takes this place; the policy is the same.
"""

from __future__ import annotations

import time
import uuid

from holdfast.exit_codes import ExitCode
from holdfast.inprocess.conductor import Denied, Granted, Restart
from holdfast.policy.actions import Action
from holdfast.policy.budgets import PastAttempt, highest_step
from holdfast.policy.inprocess import STAYS, after, decide, failed_iteration


class Memory:
    """Authorises restarts by what it remembers of those before."""

    def __init__(self, max_restarts: int) -> None:
        self._max_restarts = max_restarts
        self._launch = uuid.uuid4().hex
        self._history: list[PastAttempt] = []
        self._began = time.monotonic()

    def authorise(self, asked: Restart) -> Granted | Denied:
        now = time.monotonic()
        failed = failed_iteration(
            asked.iteration,
            asked.faults,
            launch=self._launch,
            order=asked.order,
            nodes=sorted({asked.nodes[member] for member in asked.order if member in asked.nodes}),
            committed=max(asked.committed, highest_step(self._history)),
            seconds=now - self._began,
            at=time.time(),
        )
        decision = decide(self._history, failed, asked.faults, self._max_restarts)
        self._history.append(after(failed, decision))
        self._began = now
        if decision.action in STAYS:
            return Granted(reason=decision.reason, decision=decision)
        stops = decision.action is Action.STOP
        return Denied(
            reason=decision.reason if stops else f"{decision.action}: {decision.reason}",
            exit_code=decision.exit_code if stops else int(ExitCode.HANDED_OVER),
            decision=decision,
        )
