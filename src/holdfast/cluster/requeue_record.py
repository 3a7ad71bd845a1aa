"""Asking to be queued again, on the record of the run: counted first, then asked, then told.

The count of the records (control/requeues.py) is what bounds how often a job comes back, whoever asks: the
leading agent or the batch script.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable

from holdfast.cluster.requeueing import Asked
from holdfast.cluster.slurm import SlurmJob
from holdfast.control.directory import ControlDirectory
from holdfast.control.requeues import record_requeue, withdraw_requeue
from holdfast.journal.cluster_events import RequeueAsked
from holdfast.journal.writer import JournalWriter


def ask_on_record(
    control: ControlDirectory, who: str, job: SlurmJob, attempt: int, step: int, ask: Callable[[], Asked]
) -> Asked:
    """What came of it. `who` writes the journal; `step` is the highest one that is saved."""
    # Before it is asked: that may end this process before anything is written.
    number = record_requeue(control, attempt, step, job.label)
    done = ask()
    if not done.asked and not done.unsure:
        withdraw_requeue(control, number, attempt, step)
    with contextlib.closing(JournalWriter(control.journal, who, attempt)) as journal:
        journal.write(
            RequeueAsked(job=job.label, asked=done.asked, reason=done.reason, exclude=list(done.exclude))
        )
    return done
