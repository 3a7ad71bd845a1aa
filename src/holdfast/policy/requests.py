"""Stopping on request: after which step, by when, what follows, and whether to be queued again. Pure.

Guarantee: all ranks stop after the same step, without a collective. A rank that hears of the request
*promises* the step it is in (or will do next): it does not go past that step before it knows where all stop.
Once every rank has promised, the highest promise is that step. No rank can be past it, and a rank short of it
goes on until it is reached, so no rank waits in a collective for one that has left.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from collections.abc import Set as AbstractSet
from enum import StrEnum

import msgspec

from holdfast.errors import ExitCode
from holdfast.policy.budgets import MAX_REQUEUES

MARGIN = 10.0
"""How many seconds before the scheduler ends the job ranks must be gone, so that the end can be reported."""
MOST_MARGIN = 0.2
"""The margin as a share of what the scheduler leaves, at most: when that is little, the save needs it all."""
WORTH = 2.0
"""Seconds by which a deadline must come closer to be announced again: schedulers give whole seconds."""
REPEATED = 3.0
"""Seconds within which a second signal is the same request by another route: a scheduler signals every
process, and a batch script forwards what it gets. A later one means "now"."""


class Source(StrEnum):
    SIGNAL = "signal"
    STOP_FILE = "stop_file"
    OPERATOR = "operator"
    TIME_LIMIT = "time_limit"
    STRAGGLER = "straggler"


class StopRequest(msgspec.Struct, frozen=True, kw_only=True):
    """A request to stop, as it is passed around; the first one in an attempt of a run counts."""

    source: Source
    detail: str
    """In words: which signal, from whom, why."""
    signal: str = ""
    """`SIGTERM` and such; empty unless it was one."""
    sender: str = ""
    """Who sent the signal, in words; empty if not known."""
    node: str = ""
    rank: int | None = None
    at: float = 0.0
    """Seconds since 1970."""
    lead: float | None = None
    """Seconds that the scheduler leaves from then on; None if not known."""


class Deadline(msgspec.Struct, frozen=True):
    seconds: float | None
    """Counted from the request; None for no limit."""
    why: str


def deadline(shutdown_timeout: float, lead: float | None) -> Deadline:
    """By when ranks must have ended: the setting (0 means none), or the scheduler's lead less a margin.

    An end that has passed says nothing: the job is still there, so its scheduler leaves it more time.
    """
    limits: list[tuple[float, str]] = []
    if shutdown_timeout > 0:
        limits.append((shutdown_timeout, f"stop.shutdown_timeout_sec = {shutdown_timeout:g}"))
    if lead is not None and lead > 0:
        left = max(lead - MARGIN, lead * (1 - MOST_MARGIN))
        limits.append((left, f"the scheduler ends the job in {lead:.0f} s"))
    if not limits:
        return Deadline(None, "no limit is set")
    return Deadline(*min(limits))


def sooner(left: float | None, lead: float | None) -> Deadline | None:
    """The new deadline that follows from the scheduler's lead as it is known now, if it is closer; else None.

    `left`: how far away the present deadline is; None if there is none so far.
    """
    found = deadline(0.0, lead)
    if found.seconds is None:
        return None
    return found if left is None or found.seconds < left - WORTH else None


class Grace(msgspec.Struct, frozen=True):
    """What the scheduler leaves a job between SIGTERM and SIGKILL when it ends the job early."""

    seconds: float
    why: str
    """Which of the scheduler's settings that is."""


def grace_of(kill_wait: float | None, grace_time: float | None, partition: str) -> Grace | None:
    """A preempted job's grace time where its partition has one; else, and for `scancel`, only KillWait."""
    if grace_time:
        return Grace(grace_time, f"GraceTime of partition {partition}")
    return Grace(kill_wait, "KillWait") if kill_wait else None


def does_not_fit(grace: Grace, save: float | None) -> bool:
    """Whether a save that takes that long cannot be done in the time left after SIGTERM."""
    left = deadline(0.0, grace.seconds).seconds
    return save is not None and left is not None and save > left


def say_grace(grace: Grace, save: float | None) -> str:
    """For the start of an attempt: what a stop by the scheduler leaves, and whether a save fits."""
    rule = f"Slurm leaves {grace.seconds:g} s from SIGTERM to SIGKILL ({grace.why}) when it preempts the job"
    if save is None:
        return f"{rule}; no save was measured yet"
    if not does_not_fit(grace, save):
        return f"{rule}; the last save took {save:.1f} s and fits"
    return (
        f"{rule}, and the last save took {save:.1f} s: it does not fit, and such an end costs the steps "
        "since the save before. Ask for a GraceTime, save more often, or save to the local tier"
    )


def closer_by(grace: Grace | None, request: StopRequest, limit: Deadline) -> str:
    """What to add to a deadline while it is not known whether it was the scheduler that sent SIGTERM."""
    if grace is None or request.signal != "SIGTERM" or request.lead is not None:
        return ""
    left = deadline(0.0, grace.seconds).seconds
    if left is None or (limit.seconds is not None and limit.seconds <= left):
        return ""
    return f"; within {left:g} s if it is Slurm that ends the job ({grace.why} = {grace.seconds:g} s)"


def stop_step(promises: Iterable[int]) -> int:
    """The step after which all ranks stop, once every rank has promised."""
    return max(promises)


def is_repeated(first: float, now: float) -> bool:
    """Whether a second signal still belongs to the first request."""
    return now - first < REPEATED


# What follows from the promises: after which step all stop, or that no rank is left that could be asked; and
# whether it is the run that stops, or a node that leaves it. Each party to the agreement (stop/agreement.py),
# a rank or a node's agent for its ranks, gives its word once; what follows from the words of all is decided
# in one place.
#
# Guarantee: a rank that cannot be asked (its script does not use Run, or it has not got that far) never holds
# up a stop for longer than `HELLO`.


HELLO = 5.0
"""Seconds to wait for a rank that has not said hello while others are training already."""


class Promised(msgspec.Struct, frozen=True, kw_only=True):
    """The word of one party: what its ranks have promised together."""

    step: int | None = None
    """The highest promise; None if no rank could be asked."""
    mute: int = 0
    """How many ranks run and cannot be asked."""


class Agreed(msgspec.Struct, frozen=True, kw_only=True):
    """What all parties do."""

    step: int | None = None
    """The step after which the ranks stop; None if no rank can be told."""
    end: bool = False
    """Whether the workers are ended as they are."""
    code: int = int(ExitCode.STOPPED)
    """What the launcher ends with in that case."""


def leaves(*, leads: bool, elastic: bool) -> bool:
    """Whether a signal to a node's agent concerns that node alone, as one that the group can do without."""
    return elastic and not leads


def goes_on(nodes: int, leaving: int, *, without_leader: bool, min_nodes: int) -> bool:
    """Whether a group of this many nodes goes on when some leave."""
    return not without_leader and nodes - leaving >= min_nodes


def node_word(
    running: AbstractSet[int],
    there: AbstractSet[int],
    done: AbstractSet[int],
    promises: Mapping[int, int],
    waited: float,
) -> Promised | None:
    """The word of a node whose ranks `running` have not ended; None while it must wait for one of them.

    Ranks in `there` can be asked, ranks in `done` have finished their training; `waited` seconds have passed.
    """
    if any(rank not in promises for rank in running & there):
        return None
    mute = {rank for rank in running if rank not in there and rank not in done and rank not in promises}
    highest = max(promises.values(), default=None)
    if mute and highest and waited < HELLO:
        return None
    return Promised(step=highest, mute=len(mute))


def agree(words: Iterable[Promised]) -> Agreed:
    """What follows from the words of all."""
    given = list(words)
    promises = [word.step for word in given if word.step is not None]
    mute = sum(word.mute for word in given)
    if not promises:
        return Agreed(end=mute > 0, code=int(ExitCode.STOPPED_UNSAVED if mute else ExitCode.STOPPED))
    step = stop_step(promises)
    if mute and step == 0:
        return Agreed(end=True)  # nothing has been trained yet, so nothing can be lost
    return Agreed(step=step)


# Whether a job that was stopped asks its scheduler to be queued again.
#
# Guarantee: a job comes back only if the scheduler's own needs stopped it, it may come back, nobody cancelled
# it, and it makes progress: at most MAX_REQUEUES times in a row without. Whatever is not known counts against
# it, because a job that comes back unasked can hold nodes for ever. Storage that fails (exit code 34) is a
# reason to come back; where it keeps requeues from being counted, the scheduler's own count of restarts
# bounds them.


FOR_THE_SCHEDULER = frozenset({"SIGUSR1", "SIGUSR2"})
"""Signals with only one meaning, the one for which the batch script asked the scheduler: time is up."""


class JobFacts(msgspec.Struct, frozen=True, kw_only=True):
    """What the scheduler says about the job, just before it is asked to queue it again."""

    allowed: bool | None = None
    """Whether the job may be queued again; None if not known."""
    queued_again: bool = False
    """Whether the scheduler has done so by itself."""
    ending: bool = False
    """Whether the scheduler is already ending it, or has ended it."""
    preempted: bool = False
    timed_out: bool = False
    """Whether it was ended by its time limit."""


class RequeueRuling(msgspec.Struct, frozen=True):
    ask: bool
    reason: str


def after_stop(setting: str, request: StopRequest, facts: JobFacts | None, stalled: int) -> RequeueRuling:
    """Whether to ask after a stop on request.

    `facts`: None if the scheduler did not say; `stalled`: requeues in a row without progress.
    """
    if request.source in (Source.STOP_FILE, Source.OPERATOR):
        return RequeueRuling(False, f"a person asked for the stop: {request.detail}")
    if request.source is Source.STRAGGLER:
        return RequeueRuling(False, f"it would be just as slow on the same nodes: {request.detail}")
    against = _against(setting, facts)
    if against is not None or facts is None:
        return against or RequeueRuling(False, "")
    if request.source is Source.SIGNAL and request.signal not in FOR_THE_SCHEDULER:
        name = request.signal or "a signal"
        if request.signal in ("SIGINT", "SIGHUP"):
            return RequeueRuling(False, f"{name} comes from a person")
        if not facts.preempted and not facts.timed_out:
            return RequeueRuling(False, f"{name}, and Slurm does not say that the job is being preempted")
    if too_often := _too_often(stalled):
        return too_often
    if request.source is Source.TIME_LIMIT or (facts.timed_out and not facts.preempted):
        return RequeueRuling(True, f"the time limit: {request.detail}")
    if facts.preempted:
        return RequeueRuling(True, f"it is being preempted: {request.detail}")
    return RequeueRuling(True, f"the scheduler's signal: {request.detail}")


def by_decision(setting: str, reason: str, facts: JobFacts | None, stalled: int) -> RequeueRuling:
    """Whether to ask after a decision that the run cannot go on with the nodes it has.

    `stalled`: as above; 0 where recovery decided, because its own budget has already counted.
    """
    return _against(setting, facts) or _too_often(stalled) or RequeueRuling(True, reason)


def uncounted(restarts: int, why: str) -> RequeueRuling | None:
    """What speaks against one more requeue, if anything, where requeues cannot be counted (`why`).

    `restarts`: how often the scheduler says that it has started the job again, with or without progress.
    """
    if restarts < MAX_REQUEUES:
        return None
    times = f"the job was started again {restarts} times already"
    return RequeueRuling(False, f"this requeue cannot be counted ({why}), and {times}; look at it first")


def _too_often(stalled: int) -> RequeueRuling | None:
    if stalled < MAX_REQUEUES:
        return None
    return RequeueRuling(False, f"it was queued again {stalled} times without progress; look at it first")


def _against(setting: str, facts: JobFacts | None) -> RequeueRuling | None:
    if setting == "never":
        return RequeueRuling(False, "slurm.requeue = never")
    if facts is None:
        return RequeueRuling(False, "Slurm did not say whether the job may be queued again")
    if facts.queued_again:
        return RequeueRuling(False, "Slurm queues it again by itself")
    if facts.ending and not facts.preempted and not facts.timed_out:
        return RequeueRuling(False, "the job was cancelled, or has ended")
    if facts.allowed is None:
        return RequeueRuling(False, "Slurm did not say whether the job may be queued again")
    if not facts.allowed:
        return RequeueRuling(
            False, "the job may not be queued again: submit it as a batch job with --requeue"
        )
    return None
