"""When the scheduler ends the job, and the request to stop ahead of that.

Guarantee: never holds anybody up. Slurm is asked by a thread of its own, with a deadline and rarely; limits
may be changed while a job runs, so it is asked again, and once more before the request is made. What cannot
be learnt is no limit.

A job that is preempted without a grace time, or cancelled, is sent SIGTERM, and SIGKILL after KillWait. So
when a stop was asked for and Slurm then says that it is ending the job, its end is KillWait after the
request; a SIGTERM that somebody else sent leaves as much time as there was before.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable

from holdfast.cluster import slurm
from holdfast.cluster.requeue import facts_of
from holdfast.cluster.slurm import JobRecord, SlurmJob
from holdfast.policy import Grace, Source, StopRequest, grace_of

log = logging.getLogger("holdfast")

EVERY = 60.0
"""Seconds between two questions at most; one process of a job asks."""
SOONEST = 5.0
"""And at least: the closer the end, the more it matters that somebody moved it."""
TRIES = 6
"""Questions that soon while no end is known: Slurm does not tell it in the first moments of a job."""
PATIENCE = 5.0
"""Seconds that a request is held back for a fresh answer: somebody may have extended the limit."""
SHARE = 0.5
"""Of the job's whole time, at most, that the lead may take: else a short job would stop before it did
anything, and be queued again for ever."""


class TimeLimit:
    """Watches the end of one job."""

    def __init__(
        self,
        job: SlurmJob | None,
        lead: float,
        *,
        on_grace: Callable[[Grace], None] | None = None,
        on_ending: Callable[[float], None] | None = None,
    ) -> None:
        """`lead`: seconds before the end at which to stop (slurm.preempt_time); 0 never.

        Both are called by the thread, once: `on_grace` when it is known what Slurm leaves after SIGTERM,
        `on_ending` with the seconds that are left, when Slurm turns out to be ending the job now.
        """
        self.job = job
        """As the scheduler names it, once it has answered: it may be a task of an array."""
        self._wanted = lead
        self._ends_at = job.ends_at if job is not None else None
        self._starts_at: float | None = None
        self._answers = 0
        """Questions that were answered or given up so far."""
        self._due: tuple[float, int] | None = None
        self.grace: Grace | None = None
        """What Slurm leaves after SIGTERM when it preempts the job; None until that is known."""
        self._kill_wait: float | None = None
        self._on_grace, self._on_ending = on_grace, on_ending
        self._asked_at: float | None = None
        self._killed_at: float | None = None
        """When SIGKILL comes, once Slurm is ending the job."""
        self._ask = threading.Event()
        self._answered = threading.Event()
        self._closed = threading.Event()
        self._thread: threading.Thread | None = None
        if job is not None:
            self._ask.set()
            self._thread = threading.Thread(target=self._watch, name="holdfast-time-limit", daemon=True)
            self._thread.start()

    def due(self, now: float) -> StopRequest | None:
        """The request, once it is time; cheap enough to be called many times a second."""
        ends_at, lead = self._ends_at, self.lead
        if self.job is None or lead <= 0 or ends_at is None or now < ends_at - lead:
            self._due = None
            return None
        if self._due is None:
            # What is known may be a minute old.
            self._due = (now, self._answers)
            self.ask_again()
        since, answers = self._due
        if self._answers == answers and now - since < min(PATIENCE, lead / 4):
            return None
        left = max(ends_at - now, 0.0)
        ends = time.strftime("%H:%M:%S", time.localtime(ends_at))
        return StopRequest(
            source=Source.TIME_LIMIT,
            detail=f"Slurm ends job {self.job.label} in {left:.0f} s, at {ends}",
            node=self.job.node,
            at=now,
            lead=left,
        )

    @property
    def ends_at(self) -> float | None:
        """As known best so far, in seconds since 1970."""
        return min((at for at in (self._ends_at, self._killed_at) if at is not None), default=None)

    @property
    def lead(self) -> float:
        """Seconds before the end at which it will be due: what was asked for, or less in a short job."""
        if self._starts_at is None or self._ends_at is None:
            return self._wanted
        return min(self._wanted, max(self._ends_at - self._starts_at, 0.0) * SHARE)

    def first_answer(self, timeout: float) -> float | None:
        """The end, after Slurm's first answer or so many seconds: for whoever wants to tell it at a start."""
        if self.job is not None:
            self._answered.wait(timeout)
        return self._ends_at

    def ask_again(self) -> None:
        """Have Slurm asked soon: a preempted job's end has come closer. Returns at once."""
        self._asked_at = self._asked_at or time.time()
        self._ask.set()

    def close(self) -> None:
        self._closed.set()
        self._ask.set()
        if self._thread is not None:
            self._thread.join(1.0)  # a question under way has its own deadline, and dies with us

    def _pause(self) -> float | None:
        """Seconds to the next question: a tenth of what is left. None: not before somebody asks."""
        if not self._wanted and self._answers:
            return None
        if self._ends_at is None:
            return SOONEST if self._answers < TRIES else EVERY
        return min(EVERY, max(SOONEST, (self._ends_at - time.time()) / 10))

    def _watch(self) -> None:
        assert self.job is not None
        while not self._closed.is_set():
            self._ask.wait(self._pause())
            self._ask.clear()
            if self._closed.is_set():
                return
            asked_at = self._asked_at
            record = slurm.job_record(self.job.label)
            # A job that is queued again already shows its next life's times.
            if record is not None and record.state.startswith("RUNNING"):
                self.job = slurm.as_named(self.job, record)
                known = None if record.endless else self._ends_at
                self._starts_at, self._ends_at = record.starts_at, record.ends_at or known
                if self._asked_at == asked_at:
                    self._asked_at = None
                self._learn_grace(record)
            elif record is not None:
                self._see_end(record, asked_at or time.time())
            self._answers += 1
            self._answered.set()

    def _learn_grace(self, record: JobRecord) -> None:
        """Once, and again with a later question where Slurm did not say."""
        if self._kill_wait is not None or self._answers >= TRIES:
            return
        self._kill_wait = slurm.kill_wait()
        grace_time = slurm.grace_time(record.partition) if record.partition else None
        self.grace = grace_of(self._kill_wait, grace_time, record.partition)
        if self.grace is not None and self._on_grace is not None:
            try:
                self._on_grace(self.grace)
            except Exception:
                log.exception("holdfast: what Slurm leaves after SIGTERM could not be told")

    def _see_end(self, record: JobRecord, since: float) -> None:
        """Slurm may be ending the job: SIGKILL comes KillWait after SIGTERM."""
        assert self.job is not None
        facts = facts_of(self.job, record)
        if self._killed_at is not None or facts is None or not (facts.ending or facts.queued_again):
            return
        if self._kill_wait is None:
            self._kill_wait = slurm.kill_wait()
        if self._kill_wait is not None:
            self._killed_at = since + self._kill_wait
            if self._on_ending is not None:
                self._on_ending(self._killed_at - time.time())
