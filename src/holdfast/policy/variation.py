"""What was tried against a failure already, so that it is not tried again. Pure.

A *cycle* is a failure (its signature), the placement and number of the ranks, and the checkpoint they came
from. Running the same cycle again can only help if something outside of it has changed; so each cause has a
small number of repetitions (`budgets.BUDGETS`), and then something must vary, to something that this failure
has not been seen with since the last progress.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence

from holdfast.policy.budgets import PastAttempt
from holdfast.policy.classify import Cause
from holdfast.policy.evidence import comparable
from holdfast.policy.plain_words import deed

MAX_ROTATIONS = 3
"""Rotations without progress. One shows whether a fault follows the device; more only help against several
bad devices, which exclusion is for."""
MAX_LOWER_RUNGS = 2
"""Rungs that one incident may go down. If three checkpoints in a row fail alike, they are not the cause."""
NEAR_RESUME = 10
"""Steps after a resume within which what was loaded may be the cause of a hang or of the job's error."""

Signature = tuple[str, int, str, str, str]
Setting = tuple[str, int, str]
Cycle = tuple[Signature, Setting]

_OWN_WORDS = frozenset({Cause.JOB, Cause.DATA, Cause.CHECKPOINT})
"""Causes whose message is the job's own and counts to the letter; elsewhere numbers in it are ports, times,
sequence numbers."""
_ACCUSING = frozenset({Cause.INFRASTRUCTURE, Cause.DEVICE, Cause.HANG, Cause.UNKNOWN})
_BY_LOADING = frozenset({Cause.CHECKPOINT})
"""Causes that may lie in what was loaded. What nothing is known of is none: a good checkpoint would pay."""
_SOON_AFTER_LOADING = frozenset({Cause.HANG, Cause.JOB})


def signature(attempt: PastAttempt) -> Signature:
    """What makes two failures the same one."""
    message = comparable(attempt.message)
    if attempt.cause == Cause.HANG:
        message = ""
    elif attempt.cause not in _OWN_WORDS:
        message = re.sub(r"\d+", "…", message)
    where = attempt.culprit_node if attempt.cause == Cause.INFRASTRUCTURE else ""
    return attempt.cause, attempt.exit_code, message, attempt.section, where


def setting(attempt: PastAttempt) -> Setting:
    return attempt.placement, attempt.world_size, attempt.rung


def cycle(attempt: PastAttempt) -> Cycle:
    return signature(attempt), setting(attempt)


class Tried:
    """What has been tried against the failure of the last of these attempts, since the last progress."""

    def __init__(self, attempts: Sequence[PastAttempt], failed: PastAttempt) -> None:
        self._failed = failed
        self._attempts = [a for a in attempts if a.number != failed.number]
        mine = signature(failed)
        self._same = [a for a in self._attempts if a.outcome == "failed" and signature(a) == mine] + [failed]

    @property
    def repeats(self) -> int:
        """How often this failure was met in a setting in which it had been met before."""
        return len(self._same) - len({setting(attempt) for attempt in self._same})

    @property
    def same_error(self) -> PastAttempt | None:
        """The latest earlier attempt that ended with the same error of the job's own, at the same step."""
        if not self._failed.message or self._failed.cause not in (Cause.JOB, Cause.DATA):
            return None
        return self._same[-2] if len(self._same) > 1 else None

    @property
    def accused(self) -> int:
        """How often the same place was the culprit, whatever the failure; 0 if there is no culprit."""
        place = _place(self._failed)
        if self._failed.cause not in _ACCUSING or not place[0]:
            return 0
        found = [a for a in self._attempts if a.cause in _ACCUSING and _place(a) == place]
        return 1 + len(found)

    def met_on(self, nodes: Sequence[str]) -> bool:
        """Whether this failure has been seen on just these nodes."""
        return any(set(attempt.nodes) == set(nodes) for attempt in self._same)

    def next_shift(self, arrangements: int) -> int | None:
        """A rotation that this failure has not been seen with; None if there is none, or enough was tried."""
        rotations = sum(attempt.action == "rotate" for attempt in self._attempts)
        if self._failed.cause not in _ACCUSING or rotations >= MAX_ROTATIONS:
            return None
        if self._failed.named:
            return None  # the device is known, and under another rank it is no better
        seen = {attempt.rotation % arrangements for attempt in self._same}
        here = self._failed.rotation
        shifts = ((here + more) % arrangements for more in range(1, min(arrangements, len(seen) + 2)))
        return next((shift for shift in shifts if shift not in seen), None)

    @property
    def avoid(self) -> list[str]:
        """Checkpoints that are not to be used before there is progress."""
        return sorted({name for attempt in self._attempts for name in attempt.avoid})

    def may_lower(self) -> bool:
        """Whether a lower rung may help: what was loaded can be the cause, and not all was tried."""
        failed = self._failed
        lowered = sum(attempt.action == "lower_rung" for attempt in self._attempts)
        if not failed.rung or lowered >= MAX_LOWER_RUNGS:
            return False
        if failed.cause == Cause.JOB and failed.exit_code == 0:
            return False  # a rank left of itself
        soon = failed.steps is not None and failed.steps <= NEAR_RESUME
        return failed.cause in _BY_LOADING or (failed.cause in _SOON_AFTER_LOADING and soon)

    @property
    def requeues(self) -> int:
        return sum(attempt.action == "requeue" for attempt in self._attempts)

    @property
    def told(self) -> str:
        """What was decided since the last progress, in words."""
        counts = Counter(attempt.action for attempt in self._attempts if attempt.action)
        return ", ".join(f"{deed(action)} {_times(count)}" for action, count in sorted(counts.items()))


def _times(count: int) -> str:
    return {1: "once", 2: "twice"}.get(count, f"{count} times")


def _place(attempt: PastAttempt) -> tuple[str, str]:
    """Where it went wrong. Only a device's own error accuses the device and not its whole node."""
    return attempt.culprit_node, attempt.culprit_device if attempt.cause == Cause.DEVICE else ""
