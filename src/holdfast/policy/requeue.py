"""Whether a job that was stopped asks its scheduler to be queued again.

Guarantee: a job comes back only if the scheduler's own needs stopped it, it may come back, nobody cancelled
it, and it gets on: at most MAX_REQUEUES times in a row without progress. What is not known speaks against it,
because a job that comes back unasked can hold nodes for ever. Storage that fails (exit code 34) is a reason
to come back; where it keeps requeues from being counted, the scheduler's own count of restarts bounds them.
"""

from __future__ import annotations

import msgspec

from holdfast.policy.budgets import MAX_REQUEUES
from holdfast.policy.stopping import Source, StopRequest

FOR_THE_SCHEDULER = frozenset({"SIGUSR1", "SIGUSR2"})
"""Signals that mean nothing but what the batch script asked the scheduler to send them for: time is up."""


class JobFacts(msgspec.Struct, frozen=True, kw_only=True):
    """What the scheduler says of the job, just before it is asked."""

    allowed: bool | None = None
    """Whether the job may be queued again; None if that is not known."""
    queued_again: bool = False
    """Whether the scheduler has done so by itself."""
    ending: bool = False
    """Whether the scheduler is ending it already, or has."""
    preempted: bool = False
    timed_out: bool = False
    """Whether its time limit is what ended it."""


class Verdict(msgspec.Struct, frozen=True):
    ask: bool
    reason: str


def after_stop(setting: str, request: StopRequest, facts: JobFacts | None, stalled: int) -> Verdict:
    """After a stop on request.

    `facts`: None if the scheduler did not say; `stalled`: requeues in a row without progress.
    """
    if request.source in (Source.STOP_FILE, Source.OPERATOR):
        return Verdict(False, f"a person asked for the stop: {request.detail}")
    if request.source is Source.STRAGGLER:
        return Verdict(False, f"on the same nodes it would be as slow again: {request.detail}")
    against = _against(setting, facts)
    if against is not None or facts is None:
        return against or Verdict(False, "")
    if request.source is Source.SIGNAL and request.signal not in FOR_THE_SCHEDULER:
        name = request.signal or "a signal"
        if request.signal in ("SIGINT", "SIGHUP"):
            return Verdict(False, f"{name} comes from a person")
        if not facts.preempted and not facts.timed_out:
            return Verdict(False, f"{name}, and Slurm does not say that the job is being preempted")
    if too_often := _too_often(stalled):
        return too_often
    if request.source is Source.TIME_LIMIT or (facts.timed_out and not facts.preempted):
        return Verdict(True, f"the time limit: {request.detail}")
    if facts.preempted:
        return Verdict(True, f"it is being preempted: {request.detail}")
    return Verdict(True, f"the scheduler's signal: {request.detail}")


def by_decision(setting: str, reason: str, facts: JobFacts | None, stalled: int) -> Verdict:
    """After a decision that the nodes it has cannot do it.

    `stalled`: as above; 0 where recovery decided, whose own budget has counted already.
    """
    return _against(setting, facts) or _too_often(stalled) or Verdict(True, reason)


def uncounted(restarts: int, why: str) -> Verdict | None:
    """Where requeues cannot be counted, for a reason: what speaks against one more, if anything does.

    `restarts`: how often the scheduler itself says that it has started the job again, progress or not.
    """
    if restarts < MAX_REQUEUES:
        return None
    times = f"the job was started again {restarts} times already"
    return Verdict(False, f"this requeue cannot be counted ({why}), and {times}; look at it first")


def _too_often(stalled: int) -> Verdict | None:
    if stalled < MAX_REQUEUES:
        return None
    return Verdict(False, f"it was queued again {stalled} times without progress; look at it first")


def _against(setting: str, facts: JobFacts | None) -> Verdict | None:
    if setting == "never":
        return Verdict(False, "slurm.requeue = never")
    if facts is None:
        return Verdict(False, "Slurm did not say whether the job may be queued again")
    if facts.queued_again:
        return Verdict(False, "Slurm queues it again by itself")
    if facts.ending and not facts.preempted and not facts.timed_out:
        return Verdict(False, "the job was cancelled, or has ended")
    if facts.allowed is None:
        return Verdict(False, "Slurm did not say whether the job may be queued again")
    if not facts.allowed:
        return Verdict(False, "the job may not be queued again: submit it as a batch job with --requeue")
    return None
