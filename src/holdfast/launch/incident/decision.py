"""From a failure to the one decision about it: what is waited for, decided, made durable and reported.

Guarantee: the decision is made once, by the leading agent, from what all nodes reported; it is durable before
anybody acts on it, and every node acts on the same one or ends with a documented code. The decision itself is
`policy.recovery`'s. Before it, the leader waits, within bounds, for storage that cannot be written, so that
it knows whether a restart could follow; if storage stays that way, the code is 34. After the decision, while
an operator has paused recovery, every agent waits on its own and sees the same records; the lease is kept, so
no other launch takes the run over.

Ends on which no decision follows are reported here as well. Nothing more is done then: if something cannot be
read or written, sentences are missing, but the end itself stands.
"""

from __future__ import annotations

import contextlib
import errno
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from holdfast.account import (
    account_of_failure,
    account_of_lost_launch,
    account_of_lost_lease,
    account_of_lost_store,
    headline,
    incident_line,
    incident_text,
)
from holdfast.base import PATIENCE, Bounded, Look, Waiting, duration
from holdfast.checkpoint.choose import highest_committed_step, situation_of, write_down
from holdfast.checkpoint.format import CheckpointName, CheckpointRoot, parse_name
from holdfast.config import Settings, parse_failure_causes
from holdfast.errors import ControlError, ExitCode, HoldfastError
from holdfast.health import SPACE_CRITICAL, Trouble, last_words, nearest, try_storage
from holdfast.journal import JournalReader, JournalWriter, events, last_step, unfinished_save
from holdfast.journal.events import Account, RunFinished, StopAsked, StopSaved, Warned
from holdfast.launch import EXCLUSION, INCIDENT, STOP, LaunchContext, live_line, say
from holdfast.launch.incident.hang import hangs_of
from holdfast.launch.nodes import Attempt, MeetingHandler, Notice, StopRun
from holdfast.policy import (
    AT_IMPORT,
    Action,
    Cause,
    Cluster,
    Decision,
    Diagnosis,
    Evidence,
    Hang,
    Loss,
    LostNode,
    PastAttempt,
    Situation,
    adapter_to_check,
    at_import,
    describe_end,
    diagnose,
    in_words,
    is_symptom,
    of_rejection,
    recover,
    root_cause,
)
from holdfast.record import (
    ACCOUNT,
    RECOVERY,
    AttemptRecord,
    Claim,
    ControlDirectory,
    EndRecord,
    FailureRecord,
    Fence,
    HeadRecord,
    OperatorRequest,
    attempt_numbers,
    create_record,
    current_epoch,
    decision_path,
    device_errors_of,
    end_attempt,
    ends_of,
    failed_attempt,
    failures_of,
    keep_account,
    list_names,
    past_attempts,
    paused,
    read_attempt,
    read_claim,
    read_record,
    record_failure,
    refused_launch,
    rejection_of,
    rung_of,
    tied_to_ranks,
)
from holdfast.restart import Faulted


@dataclass(kw_only=True)
class Circumstances:
    """What the deciding agent knows besides the attempt's records."""

    cluster: Cluster | None = None
    lost: list[LostNode] = field(default_factory=list)
    hangs: list[Hang] = field(default_factory=list)
    last_step: int | None = None
    """The last step that a rank is known to have completed."""
    facts: list[str] = field(default_factory=list)
    """What else was seen, in words."""
    stopping: str = ""
    """The request to stop the run that came before the failure, in words."""
    storage: Trouble | None = None
    """What keeps the run's storage from being written, even after waiting for it."""
    restarts_chosen: bool = False
    """Whether somebody gave launch.max_restarts."""
    in_place: Callable[[Decision], bool] = lambda _: False
    """Whether the present processes can do what is decided."""
    can_requeue: Callable[[], bool] = lambda: False
    """Whether a scheduler would start the job again; it may have to be asked."""


class DecidedIncident(msgspec.Struct, frozen=True, kw_only=True):
    """A failed attempt and what was decided about it."""

    attempt: int
    cause: str
    root: FailureRecord | None
    decision: Decision
    account: Account | None = None
    """The account of it; None on a node that only learned the decision."""


def is_starting(attempt: Attempt) -> bool:
    """Whether no rank has got as far as resuming, so that a script that fails now may fail at its start."""
    try:
        record = read_attempt(attempt.control, attempt.number)
        begun = (attempt.control.attempt(attempt.number) / "head.json").exists()
    except (ControlError, OSError):
        return False
    return not begun and time.time() - record.started < AT_IMPORT


def report(attempt: Attempt, failures: list[FailureRecord], sections: Mapping[int, str]) -> None:
    """Record this node's failures durably, then say that all are recorded."""
    record(attempt, failures, sections)
    attempt.count_in("reported")


def record(attempt: Attempt, failures: list[FailureRecord], sections: Mapping[int, str]) -> None:
    """Record failures durably; `sections`: rank → the section that it was in."""
    for failure in failures:
        record_failure(attempt.control, attempt.number, failure)
        ended = describe_end(failure.exit_code)
        attempt.journal.write(
            events.WorkerFailed(
                rank=failure.rank,
                node=failure.node,
                pid=failure.pid,
                exit_code=failure.exit_code,
                signal=ended.rpartition(" ")[2] if failure.exit_code < 0 else "",
                message=failure.message,
                error_file=failure.error_file,
                section=sections.get(failure.rank, ""),
                left=failure.left,
                at=failure.at,
            )
        )


def decide(
    attempt: Attempt, notice: Notice, settings: Settings, reported: int, known: Circumstances
) -> DecidedIncident:
    """The leader's part, after `reported` nodes have reported: decide, record it, and end the attempt."""
    control = attempt.control
    failures = failures_of(control, attempt.number)
    record = read_attempt(control, attempt.number)
    failed = _judge(control, record, failures, settings, known, notice)
    root = _root(failed, failures)
    facts = [*_facts(attempt, notice, root, failures, reported), *known.facts]
    facts += [
        f"the driver on {one.node} reported: {one.message}"
        for one in device_errors_of(control, attempt.number)
    ]
    history = past_attempts(control, before=attempt.number)
    facts += [known.storage.describe()] if known.storage is not None else []
    saved = _diagnostic(settings, failed)
    facts += [f"the state that this step began from is kept: {saved}"] if saved else []
    situation = _situation(control, failed, history, settings, known, facts)
    decision = attempt.decisions.decide(RECOVERY, Decision, lambda: recover(history, situation))
    write_down(control, attempt.fence, attempt.journal, failed, root, decision)
    if decision.exit_code == ExitCode.STOPPED_UNSAVED:
        attempt.end("stopped", exit_code=decision.exit_code, cause="", highest_step=failed.highest_step)
    else:
        cause = failed.cause
        attempt.end("failed", exit_code=failed.exit_code, cause=cause, highest_step=failed.highest_step)
    account = _tell(control, situation, root, decision, failures, known, saved)
    _keep(control, attempt.journal, account)
    return DecidedIncident(
        attempt=failed.number, cause=failed.cause, root=root, decision=decision, account=account
    )


def _root(failed: PastAttempt, failures: list[FailureRecord]) -> FailureRecord | None:
    """The worker's end that caused the failure; None if the cause was not a worker's own end."""
    root = next((failure for failure in failures if failure.rank == failed.root_rank), None)
    # The ranks agree on what they reject, and each ends with the same code: the first stands for all.
    if root is None and failed.rejection is not None and failures:
        root = root_cause(failures)
    return root if root is not None and root.exit_code == failed.exit_code else None


def _diagnostic(settings: Settings, failed: PastAttempt) -> str:
    """Where the diagnostic save of a rejected step is; empty if there is none."""
    told = failed.rejection.diagnostic if failed.rejection is not None else ""
    name = parse_name(told) if told else None
    place = CheckpointRoot(settings.checkpoint_root()).diagnostic()
    path = place.committed(name) if name is not None else None
    return str(path.absolute()) if path is not None and path.is_dir() else ""


def _unfinished(
    control: ControlDirectory, situation: Situation, *, background: bool
) -> CheckpointName | None:
    """The checkpoint whose save the attempt had begun but not ended. If its ranks were writing it, it is cut
    off, and nobody may use it; if it was written in the background, its writers may complete it."""
    journal, attempt = control.journal, situation.attempt.number
    name = parse_name(unfinished_save(journal, list_names(journal), attempt, background=background) or "")
    return None if name is None or str(name) in situation.rungs else name


def _tell(
    control: ControlDirectory,
    situation: Situation,
    root: FailureRecord | None,
    decision: Decision,
    failures: list[FailureRecord],
    known: Circumstances,
    saved: str,
) -> Account:
    """The account, with the worker that caused the failure, unless none did: then all only followed."""
    detail = "" if root is not None else situation.attempt.message
    if root is not None and root.left:
        detail = _left_first(root, failures)
    return account_of_failure(
        situation,
        decision,
        root,
        failures,
        hangs=known.hangs,
        lost=known.lost,
        seen=known.facts,
        detail=detail,
        saved=saved,
        cut_off=_unfinished(control, situation, background=False),
        coming=_unfinished(control, situation, background=True),
        storage=known.storage,
        in_place=known.in_place(decision),
    )


def _keep(control: ControlDirectory, journal: JournalWriter, account: Account) -> None:
    """Keep the account beside the decision, which stands: an account that cannot be kept is still printed."""
    journal.write(account)
    try:
        keep_account(control, account)
    except ControlError as error:
        journal.write(events.Warned(message=f"the account of attempt {account.attempt} is not kept: {error}"))


def decide_lost(
    control: ControlDirectory, held: Claim, earlier: list[str], settings: Settings, known: Circumstances
) -> DecidedIncident | None:
    """The new leader's part when the old one died: make the decision that was due about the last attempt.

    `earlier` are the launch's former ids. None if there is nothing to decide: the attempt has an end, or its
    whole launch is gone and somebody started a new one.
    """
    lost = next(
        (
            record
            for record, end in reversed(ends_of(control))
            if end is None and record.launch in (held.owner, *earlier)
        ),
        None,
    )
    if lost is None:
        return None
    failures = failures_of(control, lost.number)
    failed = _judge(control, lost, failures, settings, known, None)
    facts = ["the leading node was lost before it could decide", *known.facts]
    facts += [f"rank {one.rank} on {one.node} then failed: {describe_end(one.exit_code)}" for one in failures]
    history = past_attempts(control, before=lost.number)
    situation = _situation(control, failed, history, settings, known, facts)
    fence = Fence(control, held.epoch)
    path = decision_path(control, lost.number, RECOVERY)
    with fence.guard(f"decide about attempt {lost.number}"):
        decision = read_record(path, Decision)
        if decision is None:
            decision = recover(history, situation)
            create_record(path, decision)
    with contextlib.closing(JournalWriter(control.journal, f"agent-{held.owner}", lost.number)) as journal:
        write_down(control, fence, journal, failed, None, decision)
        steps = failed.highest_step
        end = EndRecord(outcome="failed", exit_code=0, cause=failed.cause, highest_step=steps, at=time.time())
        end_attempt(control, fence, lost.number, end)
        journal.write(events.AttemptEnded(outcome="lost", exit_code=0, last_step=steps))
        account = _tell(control, situation, None, decision, failures, known, _diagnostic(settings, failed))
        _keep(control, journal, account)
    return DecidedIncident(
        attempt=failed.number, cause=failed.cause, root=None, decision=decision, account=account
    )


def learn(attempt: Attempt, timeout: float) -> DecidedIncident:
    """The followers' part: the leader's decision, before the deadline."""
    decision = attempt.decisions.await_decision(RECOVERY, Decision, timeout, attempt.lost_leader)
    failures = failures_of(attempt.control, attempt.number)
    root = root_cause(failures) if failures else None
    cause = str(diagnose(Evidence(ends=[*failures])).cause) if failures else ""
    return DecidedIncident(attempt=attempt.number, cause=cause, root=root, decision=decision)


def _judge(
    control: ControlDirectory,
    record: AttemptRecord,
    failures: list[FailureRecord],
    settings: Settings,
    known: Circumstances,
    notice: Notice | None,
) -> PastAttempt:
    """How the attempt ended, as recovery and every later decision see it."""
    head = read_record(control.attempt(record.number) / "head.json", HeadRecord)
    known.last_step = _last_step(control, record.number, known.last_step)
    steps = known.last_step - head.step if head is not None and known.last_step is not None else None
    evidence = Evidence(
        ends=[*failures],
        hangs=known.hangs,
        lost=known.lost,
        devices=device_errors_of(control, record.number),
        world_size=record.world_size,
        rung=rung_of(head),
        steps=None if steps is None else max(0, steps),
        causes=parse_failure_causes(settings.launch.failure_causes),
    )
    found = diagnose(evidence)
    if found.cause == Cause.UNKNOWN and not (evidence.ends or evidence.hangs or evidence.lost):
        found = Diagnosis(cause=Cause.INFRASTRUCTURE if notice is None else Cause.HANG, rung=evidence.rung)
    rejection = rejection_of(control, record.number)
    found = of_rejection(found, rejection)
    if not found.message:
        told = [*known.facts, notice.detail if notice is not None else ""]
        found = msgspec.structs.replace(found, message=told[0])
    return failed_attempt(
        control,
        record,
        found,
        highest_step=highest_committed_step(settings.checkpoint_root(), control),
        began=head is not None,
        last_step=known.last_step or None,
        rejection=rejection if found.exit_code == ExitCode.RERUN_WANTED else None,
    )


def _last_step(control: ControlDirectory, attempt: int, told: int | None) -> int | None:
    """The last complete step: ranks tell their agent only now and then, but journal each step at its end."""
    journalled = last_step(control.journal, list_names(control.journal), attempt)
    return max((one for one in (told, journalled) if one is not None), default=None)


def _situation(
    control: ControlDirectory,
    failed: PastAttempt,
    history: list[PastAttempt],
    settings: Settings,
    known: Circumstances,
    facts: list[str],
) -> Situation:
    return situation_of(
        control,
        failed,
        history,
        settings,
        max_restarts=settings.launch.max_restarts,
        restarts_chosen=known.restarts_chosen,
        facts=facts,
        cluster=known.cluster,
        stopping=known.stopping,
        storage=known.storage.brief if known.storage is not None else "",
        can_requeue=not known.stopping and known.can_requeue(),
    )


def lost_nodes(notice: Notice) -> list[LostNode]:
    """The nodes that a notice says were lost."""
    if notice.kind == "left":
        return [LostNode(node=notice.node, how=Loss.LEFT, at=time.time(), detail=notice.detail)]
    if notice.kind not in ("node_lost", "leader_lost"):
        return []
    how = Loss.SILENT if "nothing was heard" in notice.detail else Loss.CLOSED
    return [LostNode(node=node, how=how, at=notice.at, detail=notice.detail) for node in notice.nodes]


def _facts(
    attempt: Attempt, notice: Notice, root: FailureRecord | None, failures: list[FailureRecord], reported: int
) -> list[str]:
    facts = []
    if root is not None:
        others = [failure for failure in failures if failure.rank != root.rank and not failure.left]
        if not root.left:
            what = f"rank {root.rank} on {root.node} (pid {root.pid}) failed: {describe_end(root.exit_code)}"
            facts.append(f"{what}: {root.message}" if root.message else what)
        else:
            facts.append(_left_first(root, failures))
        if root.exit_code > 0 and at_import(root.errors):
            too = sum(at_import(one.errors) for one in others)  # the rest may only have lost a peer
            facts.append(f"{1 + too} of {attempt.place.world_size} ranks failed in their first lines")
        lost = [str(failure.rank) for failure in others if is_symptom(failure.exit_code, failure.message)]
        rest = [str(failure.rank) for failure in others if not is_symptom(failure.exit_code, failure.message)]
        if lost:
            facts.append(f"{_ranks(lost)} then lost {'its peer' if len(lost) == 1 else 'their peers'}")
        if rest:
            facts.append(f"{_ranks(rest)} failed too")
    else:
        if notice.detail and notice.kind != "hang":  # about a hang, more is known by now
            facts.append(notice.detail)
        followed = [str(failure.rank) for failure in failures if not failure.left]
        if followed:
            facts.append(f"{_ranks(followed)} failed after that")
    facts += [
        f"rank {one.rank} on {one.node} had left with exit code 0"
        for one in failures
        if one.left and one is not root
    ]
    named = (adapter_to_check([one.message, *map(in_words, one.errors)], one.node) for one in failures)
    facts += dict.fromkeys(filter(None, named))
    if reported < attempt.place.nodes:
        facts.append(f"{attempt.place.nodes - reported} of {attempt.place.nodes} nodes did not report")
    return facts


def _left_first(root: FailureRecord, failures: list[FailureRecord]) -> str:
    """Which rank left with exit code 0, when, where in the run, and how long before its peers lost it."""
    clock = time.strftime("%H:%M:%S", time.gmtime(root.at))
    text = f"rank {root.rank} on {root.node} (pid {root.pid}) left with exit code 0 at {clock} UTC"
    if root.step:
        text += f", after step {root.step}"
    lost = [one.at for one in failures if not one.left]
    if lost:
        text += f", {max(0.0, min(lost) - root.at):.1f} s before its peers lost it"
    return text


def _ranks(ranks: list[str]) -> str:
    return f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {', '.join(ranks)}"


REPORT_SLACK = 10.0
"""Seconds, beyond the stop grace, for the other nodes to report."""


def report_timeout(settings: Settings) -> float:
    """Seconds within which every node has ended its workers and reported."""
    return settings.launch.stop_grace + REPORT_SLACK


def by_storage(decision: Decision, storage: Trouble | None) -> bool:
    """Whether a launch ends because its storage cannot be written."""
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
        """What kept the storage from being written after the last attempt had ended, and after a wait."""
        self.lost_leader: list[LostNode] = []
        """How the last attempt's leader was lost, for the agent that decides about it."""
        self._faulted = Faulted()
        self._decided: DecidedIncident | None = None

    def settle(self, attempt: Attempt, notice: Notice, stopping: str = "") -> DecidedIncident:
        """The decision about a failed attempt: made here if this node leads, otherwise learned.

        `stopping`: the request to stop the run after which it failed; empty if there was none.
        """
        if not attempt.place.leads:
            return learn(attempt, self._settings.control.decision_timeout)
        reported = attempt.await_all("reported", report_timeout(self._settings))
        if attempt.place.nodes > 1:
            attempt.stopped_at = time.time()
        if self._decided is not None and self.has_decided(attempt):
            return self._decided  # it was to go on in its processes, but that could not be done
        return self._decide(attempt, notice, reported, stopping, notice.nodes)

    def has_decided(self, attempt: Attempt) -> bool:
        """Whether there was a decision about this attempt while its workers were alive."""
        return self._decided is not None and self._decided.attempt == attempt.number

    def take_faults(self, attempt: Attempt, faulted: Faulted, sections: Mapping[int, str]) -> None:
        """The leader records what befell the members during the open restart, and keeps it as evidence."""
        record(attempt, faulted.ended, sections)
        for failure in faulted.raised:
            record_failure(attempt.control, attempt.number, failure)
        self._faulted = faulted

    def settle_in_process(
        self, attempt: Attempt, notice: Notice, stopping: str, in_place: Callable[[Decision], bool]
    ) -> DecidedIncident:
        """The decision about a failed attempt whose workers are alive. Lost nodes are counted as present:
        that the others suffice was checked before. `in_place`: whether they can do what is decided."""
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
    ) -> DecidedIncident:
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
        """The last attempt's leader died with it: decide about it now, before another attempt begins."""
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
        """Unwatched launches must come to an end: one too many without progress is refused, before it starts
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

    def tell(self, incident: DecidedIncident) -> None:
        """Report it on the terminal, as an alert if somebody wants one, and at the end to the scheduler."""
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
            return  # learned only: the agent that decided reports it
        self._context.saves.catch_up()
        if by_storage(incident.decision, self.storage):
            self._context.last_words = self.storage_words()
            say(headline(account), attempt=account.attempt, account=account)
            say(f"stopped: {self._context.last_words}", attempt=account.attempt)
        else:
            told = incident_text(account, str(control.path))
            say(told, attempt=account.attempt, account=account)
        self._context.saves.fell(account)
        payload = {"text": incident_line(account), "attempt": incident.attempt, "cause": incident.cause}
        stops = incident.decision.action in (Action.STOP, Action.REQUEUE)
        if stops:
            self._context.alerts.send(STOP, {**payload, "exit_code": int(incident.decision.exit_code)})
        else:
            self._context.alerts.send(INCIDENT, payload)
        for one in incident.decision.exclude:
            what = one.node if one.device is None else f"device {one.device} of {one.node}"
            self._context.alerts.send(EXCLUSION, {**payload, "text": f"{what} is excluded: {one.reason}"})

    def storage_words(self) -> str:
        """The end of a launch whose storage cannot be written, in one line."""
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
        """What the run can go on with, as the leader sees it."""
        meeting = self._meeting
        if meeting is None:
            return None
        members, spares = meeting.members, meeting.spares()
        return Cluster(
            nodes=[member.node for member in members if member.node not in lost],
            spares=[member.node for member in spares],
            devices={member.node: member.devices for member in [*members, *spares]},
            workers_per_node=self._workers_per_node,
            min_nodes=self._context.min_nodes,
            max_nodes=self._context.max_nodes,
            may_shrink=self._context.elastic,
            excluded=self._context.exclusions(),
            tied=self._tied() if self._context.elastic else "",
        )

    def _tied(self) -> str:
        """What ties the run to its number of ranks; nothing is known while the storage does not answer."""
        look = Bounded(lambda: tied_to_ranks(self._context.control), "tied-to-ranks")
        with contextlib.suppress(HoldfastError, OSError):
            return look.result() if look.ended(PATIENCE) else ""
        return ""

    def keep_size(self, nodes: int) -> None:
        """Before this node meets the others again: no other number of them, where that could not go on."""
        if self._meeting is not None and self._context.elastic and self._tied():
            self._meeting.keep_size(nodes)


def tell_store_lost(context: LaunchContext, attempt: int, node: str, error: str, step: int | None) -> bool:
    """Report that nobody is left to meet; returns whether that worked."""
    return _tell_end(
        context, node, lambda: account_of_lost_store(attempt, node, error, step, _saved(context))
    )


def tell_lease_taken(
    context: LaunchContext, attempt: int, node: str, evidence: str, step: int | None
) -> bool:
    """Report that another launch has the run now; returns whether that worked."""

    def account() -> Account:
        newest = read_claim(context.control, current_epoch(context.control))
        by = newest.holder.describe() if newest is not None else ""
        found = newest.evidence if newest is not None else ""
        return account_of_lost_lease(attempt, evidence, by, found, step, _saved(context))

    return _tell_end(context, node, account)


def tell_launch_lost(context: LaunchContext, held: Claim) -> None:
    """Report, once, an earlier launch whose last attempt has no end, as nobody was left to report it."""

    def account() -> Account | None:
        return _of_lost_launch(context.control, held, _saved(context))

    made = Bounded(account, "lost-launch")
    found = None
    with contextlib.suppress(HoldfastError, OSError):
        found = made.result() if made.ended(PATIENCE) else None
    if found is None:
        return
    with contextlib.closing(
        JournalWriter(context.control.journal, f"agent-{held.owner}", found.attempt)
    ) as journal:
        journal.write(found)
    say(incident_text(found, str(context.control.path)))
    context.saves.fell(found)


def _of_lost_launch(control: ControlDirectory, held: Claim, saved: int | None) -> Account | None:
    newest = next(reversed(ends_of(control)), None)
    if newest is None or newest[1] is not None:
        return None
    number = newest[0].number
    lines = [line for line in JournalReader(control.journal, since=number).poll() if line.attempt == number]
    if any(isinstance(line.body, RunFinished) for line in lines):
        return None
    asked = next((line.body for line in lines if isinstance(line.body, StopAsked)), None)
    if any(isinstance(line.body, StopSaved) for line in lines):
        asked = None
    before = read_claim(control, newest[0].epoch)
    holder = before.holder.describe() if before is not None else ""
    step = last_step(control.journal, list_names(control.journal), number)
    account = account_of_lost_launch(number, holder, held.evidence, asked, step, saved)
    return account if create_record(control.attempt(number) / ACCOUNT, account) else None


def _saved(context: LaunchContext) -> int | None:
    return highest_committed_step(context.settings.checkpoint_root(), context.control) or None


def _tell_end(context: LaunchContext, node: str, make: Callable[[], Account]) -> bool:
    made = Bounded(make, "unforeseen-end")
    try:
        account = made.result() if made.ended(PATIENCE) else None
    except (HoldfastError, OSError):
        account = None
    if account is None:
        return False
    context.last_words = incident_line(account)
    context.saves.catch_up()
    say(incident_text(account, str(context.control.path)))
    writer = JournalWriter(context.control.journal, f"agent-{node}", account.attempt)
    written = Bounded(lambda: _write(writer, account), "unforeseen-end-journal")
    written.ended(PATIENCE)
    return True


def _write(writer: JournalWriter, account: Account) -> None:
    with contextlib.closing(writer) as journal:
        journal.write(account)


STORAGE_PATIENCE = 30.0
"""Seconds for which a failed attempt waits until its storage can take what must be recorded: a disk that was
full for a moment is no reason to give the job back."""
STORAGE_LOOK = 1.0
_NO_ROOM = frozenset({errno.ENOSPC, errno.EDQUOT})


def shared_places(settings: Settings) -> list[Path]:
    """Where every attempt writes, on whichever node; the run directory first."""
    return list(dict.fromkeys([Path(settings.run.dir).absolute(), settings.checkpoint_root().absolute()]))


def least_space(settings: Settings) -> int:
    """Bytes below which no node may take part in another attempt."""
    return SPACE_CRITICAL if settings.health.gate == "refuse" else 0


def find_trouble(places: Sequence[Path], least: int = 0) -> Trouble | None:
    """What keeps these places from being written; None if nothing does."""
    for place in places:
        if place != places[0] and not place.is_dir():
            continue  # it will be made when something is saved there
        tried = try_storage(place)
        free = None
        with contextlib.suppress(OSError):
            info = os.statvfs(nearest(place))
            free = info.f_bavail * info.f_frsize
        if tried.problem:
            return Trouble(path=str(place), problem=tried.problem, full=tried.errno in _NO_ROOM, free=free)
        if free is not None and free < least:
            return Trouble(path=str(place), full=True, free=free)
    return None


def await_storage(
    places: Sequence[Path],
    *,
    check: Callable[[], None],
    tell: Callable[[str], None],
    least: int = 0,
    patience: float = STORAGE_PATIENCE,
) -> Trouble | None:
    """Wait until these places can be written, at most `patience` seconds; returns what still prevents it.

    `check` is called at every look, and raises if the launcher was told to stop. `least`: bytes that must
    also be free.
    """
    look = Look(lambda: find_trouble(places, least), "storage", patience=STORAGE_LOOK)
    began, told, line = time.monotonic(), "", live_line()
    while True:
        looked = look.take()
        hangs = Trouble(path=str(places[0]), problem="it does not answer")
        found = hangs if looked is None else looked.result()
        if found is None or time.monotonic() - began > patience:
            break
        if not told:
            told = found.path
            what = found.problem and f"the storage of {told} takes nothing: {found.problem}"
            tell(f"{what or found.describe()}. Waiting for it, up to {patience:g} s")
        line(Waiting(f"the storage of {told}", time.monotonic() - began, patience))
        check()
        time.sleep(min(STORAGE_LOOK, patience))
    line.over()
    waited = time.monotonic() - began
    if found is not None:
        return msgspec.structs.replace(found, waited=waited)
    if told:
        tell(f"the storage of {told} works again, after {waited:.0f} s")
    return None


PAUSE_POLL = 0.5


def wait_while_paused(
    control: ControlDirectory, maximum: float, *, check: Callable[[], None], tell: Callable[[str], None]
) -> bool:
    """Return at once unless recovery is paused; otherwise wait until it is not. False if `maximum` passes.

    `check` is called at every look, and raises if the launcher was told to stop. `tell` gets a line when the
    wait begins and ends. A record that cannot be read for a while is not a reason to go on.
    """
    request = paused(control)
    if request is None:
        return True
    started = time.monotonic()
    tell(
        f"recovery is paused by {request.describe()}. Nothing is restarted until "
        f"`holdfast control unpause {control.path}`; after {duration(maximum)} the run stops"
    )
    line = live_line()
    while request is not None:
        if time.monotonic() - started >= maximum:
            tell(f"recovery stayed paused for {duration(maximum)} (launch.max_pause)")
            return False
        line(Waiting("`holdfast control unpause`", time.monotonic() - started, maximum))
        check()
        time.sleep(min(PAUSE_POLL, maximum))
        request = _still(control, request)
    line.over()
    tell(f"recovery goes on, after a pause of {duration(time.monotonic() - started)}")
    return True


def _still(control: ControlDirectory, request: OperatorRequest) -> OperatorRequest | None:
    try:
        return paused(control)
    except ControlError:
        return request
