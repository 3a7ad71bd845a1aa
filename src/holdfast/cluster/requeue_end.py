"""Queueing a job again from its batch script, after the run has ended: for what nobody else could do.

The leading agent asks by itself. Without one (ranks started by srun), or if it was lost, the script does.
Guarantee: never twice for one attempt, and never against what the run decided.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from pathlib import Path

from holdfast.cluster.requeue_history import last_stop
from holdfast.cluster.requeueing import Asked, requeue_after_stop, requeue_by_decision
from holdfast.cluster.slurm import SlurmJob
from holdfast.control.directory import ControlDirectory
from holdfast.control.exclusions import excluded
from holdfast.errors import HoldfastError
from holdfast.exit_codes import ExitCode
from holdfast.journal.cluster_events import RequeueAsked
from holdfast.journal.reader import read_journal
from holdfast.journal.writer import JournalWriter
from holdfast.policy.budgets import MAX_REQUEUES

STOPPED = (ExitCode.STOPPED, ExitCode.STOPPED_UNSAVED)
WANTED = (ExitCode.REQUEUE_WANTED, ExitCode.STORE_LOST)
WHO = "batch-script"


def requeue_at_the_end(
    job: SlurmJob, setting: str, code: int, run_dir: Path | None, exclude: Sequence[str]
) -> Asked:
    """Ask if the run's end is a reason to come back, and nobody has decided that yet."""
    if code not in (*STOPPED, *WANTED):
        return Asked(asked=False, reason=f"exit code {code} is no reason to come back")
    try:
        control = ControlDirectory.open(run_dir) if run_dir is not None else None
        lines = read_journal(control.journal) if control is not None else []
        kept_out = (
            [one.node for one in excluded(control) if one.device is None] if control is not None else []
        )
    except HoldfastError as error:
        return Asked(asked=False, reason=f"the run cannot be read: {error}")
    last = last_stop(lines)
    if last.settled is not None:
        return Asked(asked=False, reason=f"that was decided before: {last.settled.reason}")
    without = [*exclude, *kept_out]
    asked: Asked | None
    if code in WANTED:
        if last.stalled >= MAX_REQUEUES:
            return Asked(asked=False, reason=f"it was queued again {last.stalled} times without progress")
        reason = f"the run ended with {ExitCode(code).name} ({code})"
        asked = requeue_by_decision(job, setting, reason, exclude=without)
    elif last.request is None:
        return Asked(asked=False, reason="the run's journal does not say who asked it to stop")
    else:
        asked = requeue_after_stop(job, setting, last.request, exclude=without, stalled=last.stalled)
    assert asked is not None
    if control is not None:
        event = RequeueAsked(job=job.label, asked=asked.asked, reason=asked.reason, exclude=asked.exclude)
        with contextlib.closing(JournalWriter(control.journal, WHO, last.attempt)) as journal:
            journal.write(event)
    return asked
