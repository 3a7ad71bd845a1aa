"""What to do after an attempt failed: restart, or stop with a documented code.

Guarantee: pure, and it ends. Unless the highest committed step rises, a run is restarted at most
`max_restarts` times, however many launches it is given; after that every decision is a stop. Every decision
says what it rests on.

The richer actions (rotate devices, exclude a node, a lower rung, shrink, wait, requeue) belong here, as
further members of `Action` and further rules in `recover`; nobody else decides.
"""

from __future__ import annotations

import re
import signal
from collections.abc import Sequence
from enum import StrEnum

import msgspec

from holdfast.exit_codes import MEANINGS, ExitCode
from holdfast.policy.budgets import PastAttempt, highest_step, restarts_left
from holdfast.policy.classify import Cause


class Action(StrEnum):
    RESTART = "restart"
    STOP = "stop"


class Situation(msgspec.Struct, frozen=True, kw_only=True):
    """The incident to decide about."""

    attempt: PastAttempt
    """The attempt that just failed, with its root cause."""
    max_restarts: int
    facts: list[str] = []
    """What was seen, in words; goes into the decision's evidence as it is."""


class Decision(msgspec.Struct, frozen=True, kw_only=True):
    action: Action
    exit_code: int
    """What the launcher ends with; 0 for a restart."""
    reason: str
    evidence: list[str]
    restarts_left: int
    """After this decision."""


INCURABLE = frozenset(
    {
        ExitCode.VALIDATION_FAILED,
        ExitCode.NO_VALID_RUNG,
        ExitCode.LEASE_LOST,
        ExitCode.RUN_IS_LIVE,
        ExitCode.CONTROL_UNUSABLE,
        ExitCode.STATE_MISFIT,
    }
)
"""Codes by which a worker says that the same start would end the same way. 2 is none of them: scripts use
it for reasons of their own."""


def recover(history: Sequence[PastAttempt], situation: Situation) -> Decision:
    """Decide about one failed attempt. `history` holds the attempts before it, in any order."""
    failed = situation.attempt
    past = sorted((a for a in history if a.number < failed.number), key=lambda a: a.number)
    left = restarts_left([*past, failed], situation.max_restarts)
    evidence = [*situation.facts, f"cause: {failed.cause}", _progress(past, failed)]

    def stop(code: ExitCode, reason: str) -> Decision:
        return Decision(
            action=Action.STOP, exit_code=code, reason=reason, evidence=evidence, restarts_left=left
        )

    if failed.exit_code in INCURABLE:
        code = ExitCode(failed.exit_code)
        return stop(code, f"a restart cannot cure exit code {code.value}: {MEANINGS[code][0]}")
    if past and _same_error(past[-1], failed):
        evidence.append(f"attempt {past[-1].number} ended with the same error at the same step")
        return stop(ExitCode.FAILED, "the same error repeated without progress")
    if left == 0:
        return stop(
            ExitCode.BUDGET_SPENT,
            f"no restart is left: launch.max_restarts allows {situation.max_restarts} without progress",
        )
    return Decision(
        action=Action.RESTART,
        exit_code=0,
        reason=f"{describe_end(failed.exit_code)} ({failed.cause}) may not happen again",
        evidence=[*evidence, f"{left} of {situation.max_restarts} restarts without progress were left"],
        restarts_left=left - 1,
    )


def _progress(past: Sequence[PastAttempt], failed: PastAttempt) -> str:
    before = highest_step(past)
    if failed.highest_step > before:
        return f"progress: the highest committed step rose from {before} to {failed.highest_step}"
    return f"no progress: the highest committed step stayed at {max(before, failed.highest_step)}"


def _same_error(before: PastAttempt, failed: PastAttempt) -> bool:
    """Whether the job failed twice in a row in the same way. Without a message nothing is known to be so."""
    return (
        bool(failed.message)
        and failed.cause == before.cause == Cause.JOB
        and before.outcome == "failed"
        and _comparable(before.message) == _comparable(failed.message)
        and before.exit_code == failed.exit_code
        and before.highest_step == failed.highest_step
    )


def _comparable(message: str) -> str:
    """A message without what differs between two runs of the same thing: addresses of objects, pids."""
    return re.sub(r"0x[0-9a-fA-F]+|\bpid[ =:]*\d+", "…", message)


def describe_end(exit_code: int) -> str:
    """An exit code as from waitpid, in words."""
    if exit_code < 0:
        try:
            return f"death by {signal.Signals(-exit_code).name}"
        except ValueError:
            return f"death by signal {-exit_code}"
    return f"exit code {exit_code}"
