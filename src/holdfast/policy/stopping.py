"""Stopping on request: after which step, by when, and what comes of it.

Guarantee: all ranks stop after the same step, without a collective. A rank that is told of the request
*promises* the step it is in (or will do next): it does not go past it before it knows where all stop. Once
every rank has promised, the highest promise is that step. Nobody can be past it, and who is short of it goes
on until it is reached, so no rank waits in a collective for one that has left.
"""

from __future__ import annotations

from collections.abc import Iterable
from enum import StrEnum

import msgspec

MARGIN = 10.0
"""Seconds before the scheduler's own end at which ranks must be gone, so that what they leave can be told."""
MOST_MARGIN = 0.2
"""Of what the scheduler leaves, at most: where that is little, all of it counts for the save."""
WORTH = 2.0
"""Seconds by which a deadline must have come closer to be told again: schedulers name whole ones."""
REPEATED = 3.0
"""Seconds within which a second signal is the same request on another way: a scheduler signals every process,
and a batch script forwards what it gets. Later, it means now."""


class Source(StrEnum):
    SIGNAL = "signal"
    STOP_FILE = "stop_file"
    OPERATOR = "operator"
    TIME_LIMIT = "time_limit"
    STRAGGLER = "straggler"


class StopRequest(msgspec.Struct, frozen=True, kw_only=True):
    """A request to stop, as it is handed round; the first of a run's attempt counts."""

    source: Source
    detail: str
    """In words: which signal, from whom, why."""
    signal: str = ""
    """`SIGTERM` and such; empty unless it was one."""
    sender: str = ""
    """Of a signal, in words; empty if that is not known."""
    node: str = ""
    rank: int | None = None
    at: float = 0.0
    """Seconds since 1970."""
    lead: float | None = None
    """Seconds that the scheduler leaves from then on; None if that is not known."""


class Deadline(msgspec.Struct, frozen=True):
    seconds: float | None
    """From the request on; None for no limit."""
    why: str


def deadline(shutdown_timeout: float, lead: float | None) -> Deadline:
    """By when ranks must have ended: the setting (0 is none), or the scheduler's lead less a margin.

    An end that has passed says nothing: the job is there, so its scheduler leaves it more time than that.
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
    """The deadline that the scheduler's lead, as it is known now, makes of one that is `left` away.

    None if that is no closer; None for `left` is no limit so far.
    """
    found = deadline(0.0, lead)
    if found.seconds is None:
        return None
    return found if left is None or found.seconds < left - WORTH else None


class Grace(msgspec.Struct, frozen=True):
    """What the scheduler leaves a job between SIGTERM and SIGKILL when it ends it before its time."""

    seconds: float
    why: str
    """Which of the scheduler's numbers that is."""


def grace_of(kill_wait: float | None, grace_time: float | None, partition: str) -> Grace | None:
    """A preempted job's grace time where its partition has one; else, and for `scancel`, only KillWait."""
    if grace_time:
        return Grace(grace_time, f"GraceTime of partition {partition}")
    return Grace(kill_wait, "KillWait") if kill_wait else None


def does_not_fit(grace: Grace, save: float | None) -> bool:
    """Whether a save that takes so long cannot be done in the time that is left after SIGTERM."""
    left = deadline(0.0, grace.seconds).seconds
    return save is not None and left is not None and save > left


def say_grace(grace: Grace, save: float | None) -> str:
    """For the start of an attempt: what a stop by the scheduler leaves, and whether a save fits."""
    told = f"Slurm leaves {grace.seconds:g} s from SIGTERM to SIGKILL ({grace.why}) when it preempts the job"
    if save is None:
        return f"{told}; no save was measured yet"
    if not does_not_fit(grace, save):
        return f"{told}; the last save took {save:.1f} s and fits"
    return (
        f"{told}, and the last save took {save:.1f} s: it does not fit, and such an end costs the steps "
        "since the save before. Ask for a GraceTime, save more often, or save to the local tier"
    )


def closer_by(grace: Grace | None, request: StopRequest, limit: Deadline) -> str:
    """What is said of a deadline while it is not known whether it was the scheduler that sent SIGTERM."""
    if grace is None or request.signal != "SIGTERM" or request.lead is not None:
        return ""
    left = deadline(0.0, grace.seconds).seconds
    if left is None or (limit.seconds is not None and limit.seconds <= left):
        return ""
    return f"; within {left:g} s if it is Slurm that ends the job ({grace.why} = {grace.seconds:g} s)"


def stop_step(promises: Iterable[int]) -> int:
    """After which step all ranks stop, once every one has promised."""
    return max(promises)


def is_repeated(first: float, now: float) -> bool:
    """Whether a second signal still belongs to the first request."""
    return now - first < REPEATED
