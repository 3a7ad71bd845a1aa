"""From a failure to the one decision about it.

Guarantee: the decision is made once, by the leading agent, on what all nodes reported; it is durable before
anybody acts on it, and every node acts on the same one or ends with a documented code.
"""

from __future__ import annotations

import contextlib
import time

import msgspec

from holdfast.config import Settings
from holdfast.control.attempts import (
    EndRecord,
    FailureRecord,
    end_attempt,
    ends_of,
    failures_of,
    record_failure,
)
from holdfast.control.directory import ControlDirectory, create_record, read_record
from holdfast.control.lease import Claim, Fence
from holdfast.journal import events
from holdfast.journal.writer import JournalWriter
from holdfast.launch.attempt import Attempt, Notice
from holdfast.launch.evidence import highest_committed_step, past_attempts
from holdfast.policy.budgets import PastAttempt
from holdfast.policy.classify import Cause, classify, evidence_of, is_symptom, root_cause
from holdfast.policy.recovery import Decision, Situation, describe_end, recover

WITHOUT_FAILURE = {"left": Cause.PREEMPTION, "node_lost": Cause.INFRASTRUCTURE}
"""The cause when no worker is known to have failed by itself, by the kind of the notice."""


class Incident(msgspec.Struct, frozen=True, kw_only=True):
    """A failed attempt and what was decided about it."""

    attempt: int
    cause: str
    root: FailureRecord | None
    decision: Decision


def report(attempt: Attempt, failures: list[FailureRecord]) -> None:
    """Record this node's failures durably, then say that they are all there."""
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
            )
        )
    attempt.count_in("reported")


def decide(attempt: Attempt, notice: Notice, settings: Settings, reported: int) -> Incident:
    """The leader's part, after `reported` nodes did: choose, fix it, write it down, end the attempt."""
    failures = failures_of(attempt.control, attempt.number)
    root = root_cause(failures) if failures else None
    cause = classify(evidence_of(root)) if root else WITHOUT_FAILURE.get(notice.kind, Cause.HANG)
    steps = highest_committed_step(settings.checkpoint_root())
    failed = PastAttempt(
        number=attempt.number,
        launch=attempt.launch,
        outcome="failed",
        cause=cause,
        exit_code=root.exit_code if root else notice.exit_code,
        message=root.message if root else "",
        highest_step=steps,
    )
    situation = Situation(
        attempt=failed,
        max_restarts=settings.launch.max_restarts,
        facts=_facts(attempt, notice, root, failures, reported),
    )
    history = past_attempts(attempt.control, before=attempt.number)
    decision = attempt.decisions.decide("recovery", Decision, lambda: recover(history, situation))
    attempt.journal.write(
        events.Decision(
            about="recovery",
            chosen=decision.action,
            evidence=[*decision.evidence, decision.reason],
            details={
                "cause": str(cause),
                "root_rank": root.rank if root else None,
                "exit_code": failed.exit_code,
                "restarts_left": decision.restarts_left,
            },
        )
    )
    attempt.end("failed", exit_code=failed.exit_code, cause=cause, highest_step=steps)
    return Incident(attempt=attempt.number, cause=cause, root=root, decision=decision)


def decide_lost(
    control: ControlDirectory, held: Claim, earlier: list[str], settings: Settings
) -> Incident | None:
    """The new leader's part when the old one died: what it would have decided about its last attempt.

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
    steps = highest_committed_step(settings.checkpoint_root())
    failed = PastAttempt(
        number=lost.number,
        launch=lost.launch,
        outcome="failed",
        cause=Cause.INFRASTRUCTURE,
        highest_step=steps,
    )
    facts = ["the leading node was lost before it could decide"]
    facts += [f"rank {one.rank} on {one.node} then failed: {describe_end(one.exit_code)}" for one in failures]
    situation = Situation(attempt=failed, max_restarts=settings.launch.max_restarts, facts=facts)
    fence = Fence(control, held.epoch)
    path = control.attempt(lost.number) / "decisions" / "recovery.json"
    with fence.guard(f"decide about attempt {lost.number}"):
        decision = read_record(path, Decision)
        if decision is None:
            decision = recover(past_attempts(control, before=lost.number), situation)
            create_record(path, decision)
    with contextlib.closing(JournalWriter(control.journal, f"agent-{held.owner}", lost.number)) as journal:
        journal.write(
            events.Decision(
                about="recovery",
                chosen=decision.action,
                evidence=[*decision.evidence, decision.reason],
                details={"cause": str(failed.cause), "restarts_left": decision.restarts_left},
            )
        )
        end = EndRecord(outcome="failed", exit_code=0, cause=failed.cause, highest_step=steps, at=time.time())
        end_attempt(control, fence, lost.number, end)
        journal.write(events.AttemptEnded(outcome="lost", exit_code=0, last_step=steps))
    return Incident(attempt=lost.number, cause=failed.cause, root=None, decision=decision)


def learn(attempt: Attempt, timeout: float) -> Incident:
    """The followers' part: the leader's decision, before the deadline."""
    decision = attempt.decisions.await_decision("recovery", Decision, timeout, attempt.lost_leader)
    failures = failures_of(attempt.control, attempt.number)
    root = root_cause(failures) if failures else None
    cause = str(classify(evidence_of(root))) if root else ""
    return Incident(attempt=attempt.number, cause=cause, root=root, decision=decision)


def _facts(
    attempt: Attempt, notice: Notice, root: FailureRecord | None, failures: list[FailureRecord], reported: int
) -> list[str]:
    facts = []
    if root is not None:
        what = f"rank {root.rank} on {root.node} (pid {root.pid}) failed: {describe_end(root.exit_code)}"
        facts.append(f"{what}: {root.message}" if root.message else what)
        others = [failure for failure in failures if failure.rank != root.rank]
        lost = [str(failure.rank) for failure in others if is_symptom(failure.exit_code, failure.message)]
        rest = [str(failure.rank) for failure in others if not is_symptom(failure.exit_code, failure.message)]
        if lost:
            facts.append(f"{_ranks(lost)} then lost {'its peer' if len(lost) == 1 else 'their peers'}")
        if rest:
            facts.append(f"{_ranks(rest)} failed too")
    elif notice.detail:
        facts.append(notice.detail)
    if reported < attempt.place.nodes:
        facts.append(f"{attempt.place.nodes - reported} of {attempt.place.nodes} nodes did not report")
    return facts


def _ranks(ranks: list[str]) -> str:
    return f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {', '.join(ranks)}"
