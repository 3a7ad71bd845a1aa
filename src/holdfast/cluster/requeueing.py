"""Asking Slurm to queue this job again, with a reason in its comment and without excluded nodes.

Guarantee: asks at most once, and only what policy.requeue says. The order is comment, requeue, nodes to
exclude: from the second on, Slurm ends the job and everything in it. A node is excluded only if enough are
left for the job to start at all.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from holdfast.cluster import scontrol
from holdfast.cluster.scontrol import JobRecord
from holdfast.cluster.slurm import SlurmJob
from holdfast.policy.requeue import JobFacts, Verdict, after_stop, by_decision
from holdfast.policy.stopping import StopRequest

MARK = "holdfast: "
"""Where our part of a job's comment begins; what stands before it is the user's."""
_ENDING = ("COMPLET", "CANCEL", "FAILED", "TIMEOUT", "PREEMPTED", "DEADLINE", "OUT_OF_MEMORY", "NODE_FAIL")
"""How states begin in which the scheduler is ending a job, or has."""


SAME_MOMENT = 2.0
"""Seconds between two times that Slurm writes down for one event."""


class Asked(msgspec.Struct, frozen=True, kw_only=True):
    """What came of it."""

    asked: bool
    reason: str
    """Why it was asked, or why not; fit for a person."""
    exclude: list[str] = []
    refused: bool = False
    """Whether it was to be asked, and Slurm would not, or did not say that it would."""
    unsure: bool = False
    """Whether Slurm may have done it all the same."""


def may_requeue(job: SlurmJob, setting: str, stalled: int) -> bool:
    """Whether Slurm would start this job again (asks Slurm, bounded; False where that cannot be known).

    `stalled`: requeues in a row without progress.
    """
    if not by_decision(setting, "", JobFacts(allowed=True), stalled).ask:
        return False  # whatever Slurm would say
    return by_decision(setting, "", facts_of(job, scontrol.job_record(job.label)), stalled).ask


def requeue_after_stop(
    job: SlurmJob, setting: str, request: StopRequest, *, exclude: Sequence[str], stalled: int
) -> Asked:
    """After a stop on request: asks for a requeue if policy.requeue says so.

    `stalled`: requeues in a row without progress. Call it last: Slurm sends SIGTERM to the caller, too.
    """
    unseen = after_stop(setting, request, JobFacts(allowed=True, preempted=True), stalled)
    if not unseen.ask:
        return Asked(asked=False, reason=unseen.reason)  # whatever Slurm would say
    record = scontrol.job_record(job.label)
    return _ask(job, record, after_stop(setting, request, facts_of(job, record), stalled), exclude)


def requeue_by_decision(
    job: SlurmJob, setting: str, reason: str, *, exclude: Sequence[str], stalled: int = 0
) -> Asked:
    """After recovery decided on `requeue` (exit code 27); its own budget has counted already."""
    record = scontrol.job_record(job.label)
    return _ask(job, record, by_decision(setting, reason, facts_of(job, record), stalled), exclude)


def facts_of(job: SlurmJob, record: JobRecord | None) -> JobFacts | None:
    """What Slurm's record says of a job as this process knows it."""
    if record is None:
        return None
    # Slurm has counted the restart as soon as it queues a job again, long before it starts.
    again = record.restarts is not None and record.restarts > job.restarts
    return JobFacts(
        allowed=None if record.requeue is None else record.requeue and record.batch is not False,
        queued_again=again or record.state.startswith(("PENDING", "REQUEUE")),
        ending=record.state.startswith(_ENDING),
        preempted=_is_preempted(record),
        timed_out=record.reason == "TimeLimit" or record.state.startswith("TIMEOUT"),
    )


def _is_preempted(record: JobRecord) -> bool:
    """Whether preemption is what ends it.

    A job that is cancelled within its grace time keeps the time at which preemption began; one that outlives
    it gets the time of its end for both.
    """
    if record.preempted_at is None or not record.state.startswith(_ENDING):
        return record.preempted_at is not None
    return record.ends_at is not None and abs(record.ends_at - record.preempted_at) <= SAME_MOMENT


def _ask(job: SlurmJob, record: JobRecord | None, verdict: Verdict, exclude: Sequence[str]) -> Asked:
    if not verdict.ask or record is None:
        return Asked(asked=False, reason=verdict.reason)
    job = scontrol.as_named(job, record)
    named, left_out = nodes_to_exclude(job, record, exclude) if exclude else ([], "")
    reason = "; ".join(filter(None, (verdict.reason, left_out)))
    text = comment(record.comment, reason, named)
    # A job that is ending takes its comment only once it waits again.
    changes = {} if scontrol.set_comment(job.label, text).ok else {"Comment": text}
    if named:
        changes["ExcNodeList"] = ",".join([*record.exclude, *named])
    done = scontrol.requeue(job.label, changes)
    if not done.ok:
        said = "it is not known whether Slurm did" if done.late else "Slurm refused"
        return Asked(asked=False, reason=f"{reason}; {said}: {done.text}", refused=True, unsure=done.late)
    if named and done.text:
        return Asked(asked=True, reason=f"{reason}; {done.text}")
    return Asked(asked=True, reason=reason, exclude=named)


def nodes_to_exclude(job: SlurmJob, record: JobRecord, exclude: Sequence[str]) -> tuple[list[str], str]:
    """Those that Slurm may be told to do without, and what to say of the others."""
    known = scontrol.partition_nodes(record.partition) if record.partition else None
    there = set(known or job.nodes)
    fresh = sorted(there.intersection(exclude) - set(record.exclude))
    wanted = sorted(set(record.require).intersection(fresh))
    if wanted:
        return (
            [],
            f"Slurm was not told to do without {', '.join(fresh)}: --nodelist asks for {', '.join(wanted)}",
        )
    if known is not None and record.node_count is not None:
        left = len(there) - len(there.intersection([*record.exclude, *fresh]))
        if left < record.node_count:
            few = f"{left} of the {record.node_count} nodes that the job needs would be left"
            return [], f"Slurm was not told to do without {', '.join(fresh)}: {few}"
    return fresh, ""


def comment(before: str, reason: str, exclude: Sequence[str]) -> str:
    """The job's comment with our part of it replaced, the user's kept."""
    theirs = before.partition(MARK)[0].rstrip(" |")
    ours = f"{MARK}queued again: {reason}"
    if exclude:
        ours += f"; without {','.join(exclude)}"
    return f"{theirs} | {ours}" if theirs else ours
