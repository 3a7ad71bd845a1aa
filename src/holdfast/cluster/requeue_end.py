"""Queueing a job again from its batch script, after the run has ended: for what nobody else could do.

The leading agent asks by itself. Without one (ranks started by srun), or if it was lost, the script does.
Guarantee: never twice for one attempt, and never against what the run decided.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from holdfast.cluster.requeue_history import LastStop, last_stop
from holdfast.cluster.requeue_record import ask_on_record
from holdfast.cluster.requeueing import Asked, requeue_after_stop, requeue_by_decision
from holdfast.cluster.slurm import SlurmJob
from holdfast.control.directory import ControlDirectory
from holdfast.control.exclusions import excluded
from holdfast.control.requeues import requeues_without_progress
from holdfast.errors import HoldfastError, StorageError
from holdfast.exit_codes import ExitCode
from holdfast.journal.reader import read_journal
from holdfast.policy.requeue import uncounted

STOPPED = (ExitCode.STOPPED, ExitCode.STOPPED_UNSAVED)
WANTED = (ExitCode.REQUEUE_WANTED, ExitCode.STORE_LOST, ExitCode.STORAGE_FAILED)
WHO = "batch-script"


def requeue_at_the_end(
    job: SlurmJob, setting: str, code: int, run_dir: Path | None, exclude: Sequence[str]
) -> Asked:
    """Ask if the run's end is a reason to come back, and nobody has decided that yet."""
    if code not in (*STOPPED, *WANTED):
        return Asked(asked=False, reason=f"exit code {code} is no reason to come back")
    control, last, stalled, kept_out = None, LastStop(), 0, list[str]()
    try:
        if run_dir is not None:
            control = ControlDirectory.open(run_dir)
            last = last_stop(read_journal(control.journal))
            stalled = requeues_without_progress(control, last.step)
            kept_out = [one.node for one in excluded(control) if one.device is None]
    except HoldfastError as error:
        trouble = isinstance(error, StorageError) and code == ExitCode.STORAGE_FAILED
        if not trouble or (often := uncounted(job.restarts, str(error))) is not None:
            why = often.reason if trouble and often is not None else f"the run cannot be read: {error}"
            return Asked(asked=False, reason=why)
        control = None
    if last.settled is not None:
        return Asked(asked=False, reason=f"that was decided before: {last.settled.reason}")
    chosen = "never" if last.requeue == "never" else setting
    without = [*exclude, *kept_out]

    def ask() -> Asked:
        asked_for = code == ExitCode.STORAGE_FAILED and last.request is not None
        if code in WANTED and not asked_for:
            reason = f"the run ended with {ExitCode(code).name} ({code})"
            return requeue_by_decision(job, chosen, reason, exclude=without, stalled=stalled)
        if last.request is None:
            return Asked(asked=False, reason="the run's journal does not say who asked it to stop")
        return requeue_after_stop(job, chosen, last.request, exclude=without, stalled=stalled)

    return ask_on_record(control, WHO, job, last.attempt, last.step, ask) if control is not None else ask()
