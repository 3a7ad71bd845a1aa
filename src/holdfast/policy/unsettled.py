"""What earlier rejections have left open, read from the run's history. Pure.

Nothing of it is kept in the memory of a process: an attempt that ends for another reason, a leader that dies
and a new launch of the same run all find it again.
"""

from __future__ import annotations

from collections.abc import Iterable

from holdfast.policy.budgets import PastAttempt
from holdfast.policy.probation import LOOK_BACK
from holdfast.policy.rejection import Kind, Rerun, Trial

DEVICE, REPRODUCIBLE = "device", "reproducible"
"""Verdicts on a rejected step; the third one, transient, is given by the ranks themselves."""


def open_trial(attempts: Iterable[PastAttempt]) -> Trial | None:
    """Checkpoints that became suspect and are neither acquitted nor, as far as this tells, condemned.

    Ranks condemn them, and operators may acquit them: who knows their standing leaves out what is suspect no
    more.
    """
    suspects: set[str] = set()
    until = 0
    for attempt in _in_order(attempts):
        if attempt.suspect:
            suspects |= set(attempt.suspect)
            told = attempt.trial.until if attempt.trial is not None else 0
            rejected = attempt.rejection.step if attempt.rejection is not None else 0
            until = max(until, told or rejected)
        suspects -= set(attempt.acquit)
        until = until if suspects else 0
    return Trial(suspects=sorted(suspects), until=until) if suspects else None


def open_rerun(attempts: Iterable[PastAttempt]) -> Rerun | None:
    """The step that an attempt was to repeat, as long as none is known to have got past it."""
    found: Rerun | None = None
    for attempt in _in_order(attempts):
        if found is not None and _done(attempt) >= found.step + (LOOK_BACK if found.breach else 0):
            found = None
        if attempt.rejection is not None and attempt.action:
            found = attempt.rerun
    return found


def open_rejections(attempts: Iterable[PastAttempt], *, forgiven: int = 0) -> list[PastAttempt]:
    """The attempts whose rejected step no later one is known to have got past, oldest first.

    A device that was found out, data that are left out, or an end that was reached settle all before them.
    """
    found: list[PastAttempt] = []
    for attempt in _in_order(attempts):
        if attempt.number <= forgiven:
            continue
        found = [one for one in found if _step(one) > _done(attempt)]
        if attempt.rejection is not None and attempt.rejection.kind is Kind.STEP:
            found.append(attempt)
        if attempt.verdict == DEVICE or attempt.skip is not None or attempt.outcome == "finished":
            found.clear()
    return found


def failed_in_probation(
    attempts: Iterable[PastAttempt], rung: str, *, forgiven: int = 0
) -> list[PastAttempt]:
    """The attempts that failed inside the probation of this checkpoint, oldest first, as far as no later one
    that came from it is known to have got past that: what passes the second time is not held against it."""
    found: list[PastAttempt] = []
    for attempt in _in_order(attempts):
        if attempt.number <= forgiven or attempt.rung != rung:
            continue
        found = [one for one in found if _done(attempt) < _step(one) + _slack(one)]
        told = attempt.rejection
        if told is None or told.finite or not told.in_probation:
            continue
        if told.kind in (Kind.STEP, Kind.PROBATION):
            found.append(attempt)
    return found


def _slack(attempt: PastAttempt) -> int:
    """A discontinuity has no one step: it may show a little later the next time."""
    breach = attempt.rejection is not None and attempt.rejection.kind is Kind.PROBATION
    return LOOK_BACK if breach else 0


def lowered_for(attempts: Iterable[PastAttempt], trial: Trial | None) -> int:
    """How many rungs were left behind for these suspects."""
    suspects = set(trial.suspects) if trial is not None else set()
    return sum(bool(suspects & set(attempt.suspect)) for attempt in attempts)


def _done(attempt: PastAttempt) -> int:
    """The last step that it is known to have completed: whoever rejects one has completed those before it."""
    return max(attempt.last_step or 0, _step(attempt) - 1)


def _step(attempt: PastAttempt) -> int:
    return attempt.rejection.step if attempt.rejection is not None else 0


def _in_order(attempts: Iterable[PastAttempt]) -> list[PastAttempt]:
    return sorted(attempts, key=lambda attempt: attempt.number)
