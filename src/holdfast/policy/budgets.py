"""How many restarts a run may still make.

Guarantee: restarts are counted over the run's whole durable history, across launches, and refunded only
when the highest-ever committed step rises. So neither a quick rejoin nor a new launch buys restarts, and a
run that makes progress is never stopped for the number of faults it survived.

What counts as progress is a *committed* step. Once checkpoints go through probation, a *proven* step takes
its place here.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import msgspec

MAX_REGROUPS = 10
"""Restarts for a change of membership that may happen without progress; further nodes have to wait."""


class PastAttempt(msgspec.Struct, frozen=True, kw_only=True):
    """One attempt as recovery sees it."""

    number: int
    launch: str
    outcome: str
    """finished, failed, stopped or lost (its launcher died before it could write an end)."""
    cause: str = ""
    exit_code: int = 0
    message: str = ""
    """Of the root cause."""
    highest_step: int = 0
    """Highest step committed by anyone when it ended; 0 if that is not known."""


def highest_step(history: Sequence[PastAttempt]) -> int:
    """The highest step ever committed."""
    return max((attempt.highest_step for attempt in history), default=0)


def since_progress(
    history: Sequence[PastAttempt], forgiven: int = 0
) -> list[tuple[PastAttempt | None, PastAttempt]]:
    """The attempts after the last one that raised the highest step, each with the one before it.

    Those up to number `forgiven` do not count: an operator reset the budget after them.
    """
    found: list[tuple[PastAttempt | None, PastAttempt]] = []
    best = 0
    for before, attempt in _pairs(history):
        found.append((before, attempt))
        if attempt.highest_step > best:
            best = attempt.highest_step
            found.clear()
    return [(before, attempt) for before, attempt in found if attempt.number > forgiven]


def _pairs(history: Sequence[PastAttempt]) -> Iterator[tuple[PastAttempt | None, PastAttempt]]:
    before: PastAttempt | None = None
    for attempt in sorted(history, key=lambda a: a.number):
        yield before, attempt
        before = attempt


def restarts_without_progress(history: Sequence[PastAttempt], forgiven: int = 0) -> int:
    """Restarts since the last progress. The first attempt of a launch is none: somebody asked for it."""
    return sum(
        before is not None and before.launch == attempt.launch and before.outcome != "stopped"
        for before, attempt in since_progress(history, forgiven)
    )


def restarts_left(history: Sequence[PastAttempt], max_restarts: int, forgiven: int = 0) -> int:
    return max(0, max_restarts - restarts_without_progress(history, forgiven))


def may_regroup(history: Sequence[PastAttempt]) -> bool:
    """Whether another restart for a change of membership is allowed. These are not failures, but bounded."""
    regroups = sum(
        before is not None and before.launch == attempt.launch and before.outcome == "stopped"
        for before, attempt in since_progress(history)
    )
    return regroups < MAX_REGROUPS
