"""The job's end: when the scheduler ends it, the request to stop ahead of that, and queueing it again.

Guarantee: never holds anybody up. A separate thread asks Slurm, rarely and with a deadline. Limits may be
changed while a job runs, so it asks again, and once more before the request is made. What cannot be learned
counts as no limit.

A job that is preempted without a grace time, or cancelled, is sent SIGTERM, and SIGKILL after KillWait. So if
a stop was asked for and Slurm then says that it is ending the job, the job's end is KillWait after the
request; a SIGTERM from somebody else leaves as much time as there was before.

Queueing the job again is first counted, then asked for, then reported. Guarantee: asks at most once, and
only for what policy.requeue says. The order is comment, requeue, nodes to exclude: from the second step on,
Slurm ends the job and everything in it. A node is excluded only if enough nodes remain for the job to start
at all.
"""

from __future__ import annotations

import contextlib
import logging
import re
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec

from holdfast.base import Bounded
from holdfast.cluster import slurm
from holdfast.cluster.slurm import JobRecord, SlurmJob
from holdfast.errors import ExitCode, HoldfastError, StorageError
from holdfast.journal import JournalLine, JournalWriter, read_journal
from holdfast.journal.events import JobFound, RequeueAsked, SaveCommitted, StopAsked
from holdfast.policy import (
    Grace,
    JobFacts,
    RequeueRuling,
    Source,
    StopRequest,
    after_stop,
    by_decision,
    grace_of,
    uncounted,
)
from holdfast.record import (
    ControlDirectory,
    excluded,
    record_requeue,
    requeues_without_progress,
    withdraw_requeue,
)

log = logging.getLogger("holdfast")

EVERY = 60.0
"""Most seconds between two questions; one process of a job asks."""
SOONEST = 5.0
"""Fewest seconds between two questions: the closer the end, the more it matters if somebody has moved it."""
TRIES = 6
"""How many questions come that soon while no end is known: Slurm does not say it in a job's first moments."""
PATIENCE = 5.0
"""Seconds that a request is held back for a fresh answer: somebody may have extended the limit."""
SHARE = 0.5
"""The most of the job's whole time that the lead may take: else a short job would stop before it did
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
        """`lead`: seconds before the end at which to stop (slurm.preempt_time); 0 for never.

        The thread calls each of these once: `on_grace` when it is known how long Slurm waits after SIGTERM,
        `on_ending` with the seconds left, when Slurm turns out to be ending the job now.
        """
        self.job = job
        """The job as the scheduler names it, once that has answered: it may be a task of an array."""
        self._wanted = lead
        self._ends_at = job.ends_at if job is not None else None
        self._starts_at: float | None = None
        self._answers = 0
        """Questions that were answered or given up so far."""
        self._due: tuple[float, int] | None = None
        self.grace: Grace | None = None
        """How long Slurm waits after SIGTERM when it preempts the job; None until that is known."""
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
        """The best estimate so far, in seconds since 1970."""
        return min((at for at in (self._ends_at, self._killed_at) if at is not None), default=None)

    @property
    def lead(self) -> float:
        """Seconds before the end at which the request will be due: as asked for, or less in a short job."""
        if self._starts_at is None or self._ends_at is None:
            return self._wanted
        return min(self._wanted, max(self._ends_at - self._starts_at, 0.0) * SHARE)

    def first_answer(self, timeout: float) -> float | None:
        """The end, after Slurm's first answer or `timeout` seconds: to be reported at a start."""
        if self.job is not None:
            self._answered.wait(timeout)
        return self._ends_at

    def ask_again(self) -> None:
        """Have Slurm asked soon: when a job is preempted, its end comes closer. Returns at once."""
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
        """Learn it once; if Slurm did not say, try again with a later question."""
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


# --- queueing the job again ---------------------------------------------------------------------------------

MARK = "holdfast: "
"""Begins our part of a job's comment; what stands before it is the user's."""
_ENDING = ("COMPLET", "CANCEL", "FAILED", "TIMEOUT", "PREEMPTED", "DEADLINE", "OUT_OF_MEMORY", "NODE_FAIL")
"""How the states begin in which the scheduler is ending a job or has ended it."""


SAME_MOMENT = 2.0
"""Seconds by which two times that Slurm writes down for one event may differ."""


class Asked(msgspec.Struct, frozen=True, kw_only=True):
    """What came of asking."""

    asked: bool
    reason: str
    """Why it was asked, or why not, in words for a person."""
    exclude: list[str] = []
    refused: bool = False
    """Whether we meant to ask and Slurm refused, or did not say that it agreed."""
    unsure: bool = False
    """Whether Slurm may have queued the job all the same."""


def may_requeue(job: SlurmJob, setting: str, stalled: int) -> bool:
    """Whether Slurm would start this job again (asks Slurm, bounded; False if that cannot be known).

    `stalled`: requeues in a row without progress.
    """
    if not by_decision(setting, "", JobFacts(allowed=True), stalled).ask:
        return False  # whatever Slurm would say
    return by_decision(setting, "", facts_of(job, slurm.job_record(job.label)), stalled).ask


def requeue_after_stop(
    job: SlurmJob, setting: str, request: StopRequest, *, exclude: Sequence[str], stalled: int
) -> Asked:
    """After a stop on request: ask for a requeue if policy.requeue says so.

    `stalled`: requeues in a row without progress. Call it last: Slurm sends SIGTERM to the caller, too.
    """
    unseen = after_stop(setting, request, JobFacts(allowed=True, preempted=True), stalled)
    if not unseen.ask:
        return Asked(asked=False, reason=unseen.reason)  # whatever Slurm would say
    record = slurm.job_record(job.label)
    return _ask(job, record, after_stop(setting, request, facts_of(job, record), stalled), exclude)


def requeue_by_decision(
    job: SlurmJob, setting: str, reason: str, *, exclude: Sequence[str], stalled: int = 0
) -> Asked:
    """After recovery has decided on `requeue` (exit code 27); its own budget has already counted this one."""
    record = slurm.job_record(job.label)
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
    """Whether the job is ending because it was preempted.

    A job that is cancelled within its grace time keeps the time at which preemption began; for a job that
    outlives it, Slurm writes the time of its end for both.
    """
    if record.preempted_at is None or not record.state.startswith(_ENDING):
        return record.preempted_at is not None
    return record.ends_at is not None and abs(record.ends_at - record.preempted_at) <= SAME_MOMENT


def _ask(job: SlurmJob, record: JobRecord | None, verdict: RequeueRuling, exclude: Sequence[str]) -> Asked:
    if not verdict.ask or record is None:
        return Asked(asked=False, reason=verdict.reason)
    job = slurm.as_named(job, record)
    named, left_out = nodes_to_exclude(job, record, exclude) if exclude else ([], "")
    reason = "; ".join(filter(None, (verdict.reason, left_out)))
    text = comment(record.comment, reason, named)
    # A job that is ending accepts a comment only once it waits again.
    changes = {} if slurm.set_comment(job.label, text).ok else {"Comment": text}
    if named:
        changes["ExcNodeList"] = ",".join([*record.exclude, *named])
    done = slurm.requeue(job.label, changes)
    if not done.ok:
        said = "it is not known whether Slurm did" if done.late else "Slurm refused"
        return Asked(asked=False, reason=f"{reason}; {said}: {done.text}", refused=True, unsure=done.late)
    if named and done.text:
        return Asked(asked=True, reason=f"{reason}; {done.text}")
    return Asked(asked=True, reason=reason, exclude=named)


def nodes_to_exclude(job: SlurmJob, record: JobRecord, exclude: Sequence[str]) -> tuple[list[str], str]:
    """The nodes that Slurm may be told to do without, and what to say about the others."""
    known = slurm.partition_nodes(record.partition) if record.partition else None
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


# Asking to be queued again, on the run's record: first counted, then asked for, then reported.
#
# The count in the records (record/operator.py) bounds how often a job comes back, whoever asks: the leading
# agent or the batch script. If the run's storage cannot be written, nothing can be counted there: then the
# scheduler's own count of the job's restarts, which is never lower, takes its place.


RECORD_WAIT = 30.0
"""Seconds for the count to be written."""


def ask_on_record(
    control: ControlDirectory, who: str, job: SlurmJob, attempt: int, step: int, ask: Callable[[], Asked]
) -> Asked:
    """Ask, and return what came of it. `who` writes the journal; `step` is the highest saved step."""
    # Counted before asking: asking may end this process before anything is written.
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


# What a run's journal says of its stops and requeues: who asked for the last stop, and what came of it.


_SIGNAL = re.compile(r"\bSIG[A-Z0-9]+\b")


class LastStop(msgspec.Struct, frozen=True, kw_only=True):
    """The last stop of the newest attempt."""

    attempt: int = 0
    request: StopRequest | None = None
    """None if nobody asked for a stop."""
    settled: RequeueAsked | None = None
    """What was decided about queueing again, if anything was."""
    step: int = 0
    """The highest step saved by any attempt."""
    requeue: str = ""
    """The run's slurm.requeue, if its job is known."""


def last_stop(lines: Sequence[JournalLine]) -> LastStop:
    newest = max((line.attempt for line in lines), default=0)
    request: StopRequest | None = None
    settled: RequeueAsked | None = None
    for line in lines:
        body = line.body
        if line.attempt != newest:
            continue
        if isinstance(body, StopAsked) and request is None:
            request = _request(body, line.at)
        elif isinstance(body, RequeueAsked):
            settled = body
    bodies = [line.body for line in lines]
    saved = (one.step for one in bodies if isinstance(one, SaveCommitted) and one.tier == "global")
    found = [one.requeue for one in bodies if isinstance(one, JobFound)]
    return LastStop(
        attempt=newest,
        request=request,
        settled=settled,
        step=max(saved, default=0),
        requeue=found[-1] if found else "",
    )


def _request(asked: StopAsked, at: float) -> StopRequest:
    named = _SIGNAL.search(asked.detail) if asked.source == Source.SIGNAL else None
    try:
        source = Source(asked.source)
    except ValueError:
        source = Source.OPERATOR  # from a newer release: in doubt a person asked, and the job stays away
    return StopRequest(
        source=source,
        detail=asked.detail,
        signal=named[0] if named else "",
        sender=asked.sender,
        node=asked.node,
        rank=asked.rank,
        at=at,
    )


# Queueing a job again from its batch script, after the run has ended: for when nobody else could.
#
# The leading agent asks by itself. Without one (ranks started by srun), or if it was lost, the script does.
# Guarantee: never twice for one attempt, and never against what the run decided.


STOPPED = (ExitCode.STOPPED, ExitCode.STOPPED_UNSAVED)
WANTED = (ExitCode.REQUEUE_WANTED, ExitCode.STORE_LOST, ExitCode.STORAGE_FAILED)
WHO = "batch-script"


def requeue_at_the_end(
    job: SlurmJob, setting: str, code: int, run_dir: Path | None, exclude: Sequence[str]
) -> Asked:
    """Ask if the run's end is a reason to come back and nobody has decided about that yet."""
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
