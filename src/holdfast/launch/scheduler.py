"""The scheduler as an agent speaks with it: which job this is, when it ends, and whether to queue it again.

Guarantee: without a scheduler everything here is silent and says no. It is asked to queue the job again at
most once a launch, by the leading agent alone, as the very last thing: a job that is queued again is ended.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from holdfast.base import duration, plural
from holdfast.cluster import (
    Asked,
    SlurmJob,
    TimeLimit,
    ask_on_record,
    job_found,
    may_requeue,
    requeue_after_stop,
    requeue_by_decision,
)
from holdfast.config import Settings
from holdfast.errors import ControlError, HoldfastError, StorageError
from holdfast.journal import JournalWriter
from holdfast.journal.events import Warned
from holdfast.policy import MAX_REQUEUES, Grace, StopRequest, does_not_fit, say_grace
from holdfast.record import ControlDirectory, requeues_without_progress
from holdfast.train import measured_before

NAME = "Slurm"
ANSWER = 1.0
"""Seconds that an attempt's start may wait to be able to say how much time is left."""


class Scheduler:
    """One for a launch."""

    def __init__(self, control: ControlDirectory, settings: Settings, job: SlurmJob | None) -> None:
        self.job = job
        self._lead = settings.slurm.preempt_time
        self._limit: TimeLimit | None = None
        self._control = control
        self._setting = settings.slurm.requeue
        self._last: Callable[[Callable[[str], None]], None] | None = None

    @property
    def ends_at(self) -> float | None:
        """When the job will be ended, as far as the scheduler was asked from here: the leading agent does.

        What the environment says alone is as old as the job: somebody may have extended its limit since.
        """
        return self._limit.ends_at if self._limit is not None else None

    @property
    def grace(self) -> Grace | None:
        """What the scheduler leaves between SIGTERM and SIGKILL, as far as it was asked from here."""
        return self._limit.grace if self._limit is not None else None

    def due(self) -> StopRequest | None:
        """The request to stop ahead of the time limit. For one agent: who calls it asks the scheduler."""
        return self._watch().due(time.time())

    def ask_again(self) -> None:
        """A stop was asked for, maybe by the scheduler, which then ends the job sooner. Returns at once."""
        if self.job is not None:
            self._watch().ask_again()

    def _watch(self) -> TimeLimit:
        if self._limit is None:
            self._limit = TimeLimit(self.job, self._lead)
        return self._limit

    def _first_answer(self) -> float | None:
        """When the job ends; the scheduler has a moment to say so, once a launch."""
        fresh = self._limit is None
        return self._watch().first_answer(ANSWER if fresh else 0.0)

    def found(self, journal: JournalWriter, attempt: int, launch: str, tell: Callable[[str], None]) -> None:
        """An attempt of this agent begins: journal the job it runs in, say so, and whether a save fits."""
        job = self.job
        if job is None:
            return
        ends_at = self._first_answer()
        self.job = job = self._watch().job or job
        journal.write(job_found(job, ends_at, self._setting))
        parts = [f"{NAME} job {job.label}"]
        parts += [f"restart {job.restarts}"] if job.restarts else []
        parts += [plural(len(job.nodes), "node")] if job.nodes else []
        parts += [f"{duration(max(0.0, ends_at - time.time()))} left"] if ends_at is not None else []
        tell(", ".join(parts))
        if (grace := self.grace) is not None:
            saves = measured_before(self._control, attempt, launch).saves
            took = saves[-1][1] if saves else None
            if does_not_fit(grace, took):
                journal.write(Warned(message=say_grace(grace, took)))
                tell(f"warning: {say_grace(grace, took)}")
            else:
                tell(say_grace(grace, took))

    def can_requeue(self, step: int) -> bool:
        """Whether the job would be started again, and has not been too often without progress."""
        return self.job is not None and may_requeue(self.job, self._setting, self._stalled(step))

    def after_stop(self, attempt: int, request: StopRequest, step: int, exclude: Sequence[str]) -> None:
        """The run stops on request: at the end of this launch it may be queued again."""
        stalled = self._stalled(step)
        self._at_last(
            attempt,
            step,
            lambda job: requeue_after_stop(
                job, self._setting, request, exclude=list(exclude), stalled=stalled
            ),
        )

    def by_decision(self, attempt: int, reason: str, step: int, exclude: Sequence[str]) -> None:
        """Recovery decided that the job is to be queued again."""
        self._at_last(
            attempt,
            step,
            lambda job: requeue_by_decision(job, self._setting, reason, exclude=list(exclude)),
        )

    def storage_failed(self, attempt: int, reason: str, step: int, exclude: Sequence[str]) -> None:
        """The run's storage cannot be written, not even to decide so: at the end of this launch the job may
        be queued again."""
        stalled = self._stalled(step)
        self._at_last(
            attempt,
            step,
            lambda job: requeue_by_decision(
                job, self._setting, reason, exclude=list(exclude), stalled=stalled
            ),
        )

    def part(self, tell: Callable[[str], None]) -> None:
        """The last thing of a launch, when nothing else is left to do."""
        if self._limit is not None:
            self._limit.close()
        last, self._last = self._last, None
        if last is None:
            return
        try:
            last(tell)
        except (HoldfastError, OSError) as error:  # how the run ended is settled, and must be what is told
            tell(f"warning: whether job {self.job.label if self.job else ''} is queued again: {error}")

    def _at_last(self, attempt: int, step: int, ask: Callable[[SlurmJob], Asked]) -> None:
        job = self.job
        if job is None:
            return

        def last(tell: Callable[[str], None]) -> None:
            done = ask_on_record(self._control, "launcher", job, attempt, step, lambda: ask(job))
            asked = "asked" if done.asked else "not asked"
            tell(f"{NAME} was {asked} to queue job {job.label} again: {done.reason}")

        self._last = last

    def _stalled(self, step: int) -> int:
        try:
            return requeues_without_progress(self._control, step)
        except StorageError:  # Slurm's own count takes its place, which is never lower
            return self.job.restarts if self.job is not None else 0
        except ControlError:
            return MAX_REQUEUES
