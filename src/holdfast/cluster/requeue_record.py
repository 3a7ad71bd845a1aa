"""Asking to be queued again, on the record of the run: counted first, then asked, then told.

The count of the records (control/requeues.py) is what bounds how often a job comes back, whoever asks: the
leading agent or the batch script. Where the run's storage cannot be written, nothing can be counted there:
then the scheduler's own count of the job's restarts, which is never lower, takes its place.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable

from holdfast.bounded import Bounded
from holdfast.cluster.requeueing import Asked
from holdfast.cluster.slurm import SlurmJob
from holdfast.control.directory import ControlDirectory
from holdfast.control.requeues import record_requeue, withdraw_requeue
from holdfast.errors import StorageError
from holdfast.journal.cluster_events import RequeueAsked
from holdfast.journal.writer import JournalWriter
from holdfast.policy.requeue import uncounted

RECORD_WAIT = 30.0
"""Seconds for the count to be written."""


def ask_on_record(
    control: ControlDirectory, who: str, job: SlurmJob, attempt: int, step: int, ask: Callable[[], Asked]
) -> Asked:
    """What came of it. `who` writes the journal; `step` is the highest one that is saved."""
    # Before it is asked: that may end this process before anything is written.
    recording = Bounded(lambda: record_requeue(control, attempt, step, job.label), "requeue")
    number, why = 0, f"the file system did not answer for {RECORD_WAIT:g} s"
    if recording.ended(RECORD_WAIT):
        try:
            number, why = recording.result(), ""
        except StorageError as error:
            why = str(error)
    if why and (often := uncounted(job.restarts, why)) is not None:
        return Asked(asked=False, reason=often.reason)
    done = ask()
    if number and not done.asked and not done.unsure:
        withdraw_requeue(control, number, attempt, step)
    with contextlib.closing(JournalWriter(control.journal, who, attempt)) as journal:
        journal.write(
            RequeueAsked(job=job.label, asked=done.asked, reason=done.reason, exclude=list(done.exclude))
        )
    return done
