"""How this node's agent takes part in recovery: what it knows goes into the decision, which is then told.

The decision itself is `policy.recovery`'s, and how it is fixed for all nodes `launch.incident`'s.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence

from holdfast.account.incidents import headline
from holdfast.account.wording import on_the_terminal, one_line
from holdfast.bounded import PATIENCE, Bounded
from holdfast.checkpoint.inventory import highest_committed_step
from holdfast.config import Settings
from holdfast.control.attempts import attempt_numbers, record_failure
from holdfast.control.history import refused_launch
from holdfast.control.lease import Claim
from holdfast.exit_codes import ExitCode
from holdfast.inprocess.records import Faulted
from holdfast.journal.events import Warned
from holdfast.journal.writer import JournalWriter
from holdfast.launch.alert import EXCLUSION, INCIDENT, STOP
from holdfast.launch.attempt import Attempt, Notice, StopRun
from holdfast.launch.context import LaunchContext
from holdfast.launch.hanging import hangs_of
from holdfast.launch.incident import (
    Circumstances,
    Incident,
    decide,
    decide_lost,
    learn,
    lost_nodes,
    record,
)
from holdfast.launch.meeting import MeetingHandler
from holdfast.launch.summary import say
from holdfast.launch.unforeseen import tell_launch_lost
from holdfast.policy.capacity import Cluster, Exclusion
from holdfast.policy.evidence import LostNode
from holdfast.policy.lost_storage import Trouble, last_words
from holdfast.policy.recovery import Action, Decision

REPORT_SLACK = 10.0
"""Seconds beyond the stop grace for the other nodes to report."""


def report_timeout(settings: Settings) -> float:
    """Seconds within which every node has ended its workers and reported."""
    return settings.launch.stop_grace + REPORT_SLACK


def by_storage(decision: Decision, storage: Trouble | None) -> bool:
    """Whether a launch ends because its storage takes nothing."""
    return storage is not None and decision.exit_code == ExitCode.STORAGE_FAILED


class Recovery:
    """Recovery as one agent sees it, across the attempts of a launch."""

    def __init__(self, context: LaunchContext, meeting: MeetingHandler | None, workers_per_node: int) -> None:
        self._context = context
        self._settings = context.settings
        self._meeting = meeting
        self._workers_per_node = workers_per_node
        self.last_step: int | None = None
        """The last step that a rank of this node completed in the attempt that ended."""
        self.storage: Trouble | None = None
        """What kept the storage from taking anything when the last attempt had ended, after a wait."""
        self.lost_leader: list[LostNode] = []
        """How the last attempt's leader was lost, for whoever decides about that."""
        self._faulted = Faulted()
        self._decided: Incident | None = None

    def settle(self, attempt: Attempt, notice: Notice, stopping: str = "") -> Incident:
        """The decision about a failed attempt: made here if this node leads, else learnt.

        `stopping`: the request to stop the run that it failed after; empty if there was none.
        """
        if not attempt.place.leads:
            return learn(attempt, self._settings.control.decision_timeout)
        reported = attempt.await_all("reported", report_timeout(self._settings))
        if self._decided is not None and self.has_decided(attempt):
            return self._decided  # it was to go on in its processes, and that could not be done
        return self._decide(attempt, notice, reported, stopping, notice.nodes)

    def has_decided(self, attempt: Attempt) -> bool:
        """Whether it was decided about this attempt while its workers lived."""
        return self._decided is not None and self._decided.attempt == attempt.number

    def take_faults(self, attempt: Attempt, faulted: Faulted, sections: Mapping[int, str]) -> None:
        """The leader records what befell members of the restart that is open, and keeps it as evidence."""
        record(attempt, faulted.ended, sections)
        for failure in faulted.raised:
            record_failure(attempt.control, attempt.number, failure)
        self._faulted = faulted

    def settle_in_process(
        self, attempt: Attempt, notice: Notice, stopping: str, in_place: Callable[[Decision], bool]
    ) -> Incident:
        """The decision about a failed attempt whose workers live. Who is lost is counted as there: whether
        the others suffice was looked at before. `in_place`: whether they can do what is decided."""
        self._decided = self._decide(attempt, notice, attempt.place.nodes, stopping, [], in_place)
        return self._decided

    def _decide(
        self,
        attempt: Attempt,
        notice: Notice,
        reported: int,
        stopping: str,
        without: Sequence[str],
        in_place: Callable[[Decision], bool] = lambda _: False,
    ) -> Incident:
        hangs, told = hangs_of(attempt)
        faulted = self._faulted if self._faulted.attempt == attempt.number else Faulted()
        known = Circumstances(
            cluster=self._cluster(without),
            lost=[*lost_nodes(notice), *faulted.lost],
            hangs=[*hangs, *faulted.hangs],
            last_step=self.last_step,
            facts=[*told, *faulted.facts],
            stopping=stopping,
            storage=self.storage,
            restarts_chosen=self._context.restarts_chosen,
            in_place=in_place,
            can_requeue=self._can_requeue,
        )
        return decide(attempt, notice, self._settings, reported, known)

    def settle_lost(self, held: Claim) -> None:
        """The last attempt's leader died with it: decide about that now, before another one begins."""
        context = self._context
        known = Circumstances(
            cluster=self._cluster([]),
            lost=self.lost_leader,
            restarts_chosen=context.restarts_chosen,
            can_requeue=self._can_requeue,
        )
        incident = decide_lost(context.control, held, context.earlier_launches, self._settings, known)
        self.lost_leader = []
        if incident is None:
            tell_launch_lost(context, held)
            return
        self.tell(incident)
        if incident.decision.action in (Action.STOP, Action.REQUEUE):
            raise StopRun(incident.decision.exit_code, incident.decision.reason)

    def admit(self) -> None:
        """Launches that nobody watches must end: one too many without progress is refused, before it starts
        anything."""
        context = self._context
        ids = [context.launch, *context.earlier_launches]
        why = refused_launch(context.control, context.started_with, ids)
        if not why:
            return
        newest = max(attempt_numbers(context.control), default=0)
        with contextlib.closing(JournalWriter(context.control.journal, "launcher", newest)) as journal:
            journal.write(Warned(message=f"a launch was refused with code {ExitCode.BUDGET_SPENT}: {why}"))
        code = int(ExitCode.BUDGET_SPENT)
        context.alerts.send(STOP, {"text": why, "attempt": newest, "cause": "", "exit_code": code})
        raise StopRun(ExitCode.BUDGET_SPENT, why)

    def tell(self, incident: Incident) -> None:
        """On the terminal, as an alert to those who asked for one, and as a last word to the scheduler."""
        control = self._context.control
        if incident.decision.action is Action.REQUEUE:
            nodes = {one.node for one in incident.decision.exclude if one.device is None}
            self._context.scheduler.by_decision(
                incident.attempt,
                incident.decision.reason,
                highest_committed_step(self._settings.checkpoint_root(), control),
                sorted({*self._context.excluded_nodes(), *nodes}),
            )
        account = incident.account
        if account is None:
            return  # learnt, and told by whoever decided
        self._context.saves.catch_up()
        if by_storage(incident.decision, self.storage):
            self._context.last_words = self.storage_words()
            say(headline(account), attempt=account.attempt, account=account)
            say(f"stopped: {self._context.last_words}", attempt=account.attempt)
        else:
            told = on_the_terminal(account, str(control.path))
            say(told, attempt=account.attempt, account=account)
        self._context.saves.fell(account)
        payload = {"text": one_line(account), "attempt": incident.attempt, "cause": incident.cause}
        stops = incident.decision.action in (Action.STOP, Action.REQUEUE)
        if stops:
            self._context.alerts.send(STOP, {**payload, "exit_code": int(incident.decision.exit_code)})
        else:
            self._context.alerts.send(INCIDENT, payload)
        for one in incident.decision.exclude:
            what = one.node if one.device is None else f"device {one.device} of {one.node}"
            self._context.alerts.send(EXCLUSION, {**payload, "text": f"{what} is excluded: {one.reason}"})

    def storage_words(self) -> str:
        """The end of a launch whose storage takes nothing, in one line."""
        assert self.storage is not None
        saved, scheduler = self._saved(), self._context.scheduler
        requeued = saved is not None and scheduler.can_requeue(saved)
        return last_words(self.storage, saved=saved, last=self.last_step or None, requeued=requeued)

    def _saved(self) -> int | None:
        """The highest step that is saved; None while the storage does not answer."""
        root, control = self._settings.checkpoint_root(), self._context.control
        look = Bounded(lambda: highest_committed_step(root, control), "saved-steps")
        return look.result() if look.ended(PATIENCE) else None

    def _can_requeue(self) -> bool:
        control = self._context.control
        return self._context.scheduler.can_requeue(
            highest_committed_step(self._settings.checkpoint_root(), control)
        )

    def _cluster(self, lost: Sequence[str]) -> Cluster | None:
        """What there is to go on with, as the leader sees it."""
        meeting = self._meeting
        if meeting is None:
            return None
        members, spares = meeting.members, meeting.spares()
        excluded = [Exclusion(one.node, one.device, one.reason) for one in self._context.exclusions()]
        return Cluster(
            nodes=[member.node for member in members if member.node not in lost],
            spares=[member.node for member in spares],
            devices={member.node: member.devices for member in [*members, *spares]},
            workers_per_node=self._workers_per_node,
            min_nodes=self._context.min_nodes,
            max_nodes=self._context.max_nodes,
            may_shrink=self._context.elastic,
            excluded=excluded,
        )
