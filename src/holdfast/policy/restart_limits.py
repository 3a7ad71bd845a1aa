"""Whether the limits of in-process restart fit each other and all that may end a rank beside them. Pure.

The right order, from what is gentle to what is not: a rank that stands still is asked to restart (soft),
then it alone is ended (hard), then the others go on without it (barrier). Whatever ends more than that rank
(the launcher's watch, NCCL's watchdog, the deadline of a stop) comes later. From the making of a `Run` until
every rank has done its first step, soft and hard are longer: by as much as the first step's own limit.
"""

from __future__ import annotations

import math

import msgspec

from holdfast.policy.timeouts import STEP, Value, hides
from holdfast.settings_fields import LONGEST_WAIT


class RestartTimeouts(msgspec.Struct, frozen=True, kw_only=True):
    """All timeouts that matter, in seconds; None is one that does not hold here."""

    soft: Value
    hard: Value
    barrier: Value
    interval: Value
    """inprocess.heartbeat_interval."""
    silence: Value
    """inprocess.heartbeat_timeout."""
    shutdown: Value
    """stop.shutdown_timeout_sec; 0 is no deadline."""
    step: Value | None = None
    heartbeat: Value | None = None
    """Of the launcher's watch over ranks, where there is one."""
    watchdog: Value | None = None
    """After which NCCL's watchdog ends a process in which it is stuck itself."""
    collective: Value | None = None
    """After which NCCL's watchdog ends a process whose collective is not done."""


class Sizes(msgspec.Struct, frozen=True, kw_only=True):
    """Numbers of ranks, each with how a message names it."""

    started: int | None
    """None if that is not known here."""
    active: int | None
    """None: all that were started."""
    active_shown: str
    least: int | None
    """None: as many as are active."""
    least_shown: str


def collective_limit(soft: float, hard: float) -> float:
    """After how many seconds a collective is given up, where its backend says so in the waiting rank.

    Later than `soft`: or the rank that waits would fail, and be told of, in place of the one that stands
    still. Well before `hard`: what nothing else can free has to be free before its keeper ends it.
    """
    return soft + (hard - soft) / 4


def first_step_limit(initial: float, soft: float, hard: float) -> float:
    """After how many seconds without progress a rank is asked to restart while a first step is not done.

    `initial`: the launcher's limit for that. It ends all ranks, so it comes after this one, and after what
    comes of it; 0 switches both off.
    """
    return max(soft, initial - 2 * (hard - soft)) if initial else math.inf


def first_barrier(initial: float, barrier: float) -> float:
    """How many seconds the first rank that calls the function waits for the last one to do so.

    What a script does before that is part of its start, which the launcher, too, allows `initial` for.
    """
    return max(barrier, initial or LONGEST_WAIT)


def out_of_order(all_of: RestartTimeouts) -> list[str]:
    """Pairs in which one timeout would hide the other, with the order that is right. [] if all is well."""
    found: list[str] = []

    def judge(first: Value, then: Value | None, why: str, order: str) -> None:
        if then is not None and hides(then, first):
            found.append(f"{first.shown} with {then.shown}: {why}; the right order is {order}")

    judge(
        all_of.soft,
        all_of.hard,
        "a rank that stands still would be ended before it is asked to restart, and so be lost",
        "inprocess.soft_timeout < inprocess.hard_timeout",
    )
    judge(
        all_of.hard,
        all_of.barrier,
        "the others would go on without a rank while it may still run, before its keeper ends it",
        "inprocess.hard_timeout < inprocess.barrier_timeout",
    )
    judge(
        all_of.interval,
        all_of.silence,
        "a node would count as lost between two signs of life of its keeper",
        "inprocess.heartbeat_interval < inprocess.heartbeat_timeout",
    )
    judge(
        all_of.barrier,
        all_of.shutdown,
        "a stop that is asked for during a restart is answered when the ranks have come together, and would "
        "run out of time before",
        "inprocess.barrier_timeout < stop.shutdown_timeout_sec",
    )
    for watched in (all_of.step, all_of.heartbeat):
        judge(
            all_of.hard,
            watched,
            "the launcher would end all ranks of a hung group before the hung one alone is ended",
            f"inprocess.hard_timeout < monitor.rank_heartbeat_timeout and the limit of {STEP}",
        )
    for ends in (all_of.watchdog, all_of.collective):
        judge(
            all_of.hard,
            ends,
            "NCCL's watchdog would end the healthy ranks of a hung group before the hung one is ended, and "
            "there would be nothing left to restart in",
            "inprocess.hard_timeout < NCCL's watchdog",
        )
    return found


def impossible(sizes: Sizes) -> list[str]:
    """Numbers of ranks that cannot be. [] if all is well."""
    found: list[str] = []
    if sizes.active is not None and sizes.started is not None and sizes.active > sizes.started:
        found.append(
            f"{sizes.active_shown}: only {sizes.started} ranks were started; start more, or lower "
            "inprocess.active_world_size"
        )
    active = sizes.active if sizes.active is not None else sizes.started
    if sizes.least is not None and active is not None and sizes.least > active:
        found.append(
            f"{sizes.least_shown}: only {active} ranks train; the right order is inprocess.min_world_size ≤ "
            "inprocess.active_world_size ≤ started ranks"
        )
    return found
