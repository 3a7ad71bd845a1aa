"""Attempts: the numbered lives of a run, and what each one left behind.

The attempt's directory is its memory: who it was, which checkpoint it came from (its head), what failed,
what was decided, how it ended. Together these are the history that recovery decides on.
"""

from __future__ import annotations

import time
from pathlib import Path

import msgspec

from holdfast.control.directory import ControlDirectory, create_record, read_record
from holdfast.control.lease import Fence
from holdfast.errors import ControlError


class AttemptRecord(msgspec.Struct, frozen=True, kw_only=True):
    number: int
    epoch: int
    launch: str
    """Launch id: all attempts of one `holdfast run` share it."""
    world_size: int
    started: float


class HeadRecord(msgspec.Struct, frozen=True, kw_only=True):
    """What an attempt came from: a checkpoint of this run, or nothing (a fresh start)."""

    attempt: int
    checkpoint: str | None
    step: int


class FailureRecord(msgspec.Struct, frozen=True, kw_only=True):
    """One worker's end, as its agent saw it: the evidence that `policy.classify` reads."""

    rank: int
    node: str
    pid: int
    exit_code: int
    """As from waitpid: negative for a signal."""
    at: float
    message: str = ""
    """Last line of the exception, if the worker left one."""
    error_file: str = ""


class EndRecord(msgspec.Struct, frozen=True, kw_only=True):
    outcome: str
    """finished, failed, stopped or lost."""
    exit_code: int
    cause: str
    """What `classify` said; empty unless failed."""
    highest_step: int
    """Highest step committed by anyone up to now."""
    at: float


def attempt_numbers(control: ControlDirectory) -> list[int]:
    try:
        found = [path.name for path in control.attempts.iterdir()]
    except FileNotFoundError:
        return []
    except OSError as error:
        raise ControlError(f"cannot read {control.attempts}: {error}") from error
    return sorted(int(name) for name in found if name.isdigit())


def begin_attempt(control: ControlDirectory, fence: Fence, launch: str, world_size: int) -> AttemptRecord:
    """Number the next attempt, durably, before any worker of it starts."""
    with fence.guard("begin an attempt"):
        number = (attempt_numbers(control) or [0])[-1] + 1
        record = AttemptRecord(
            number=number, epoch=fence.epoch, launch=launch, world_size=world_size, started=time.time()
        )
        if not create_record(control.attempt(number) / "attempt.json", record):
            raise ControlError(f"{control.attempt(number)} appeared while it was being created")
    return record


def write_head(control: ControlDirectory, fence: Fence, head: HeadRecord) -> None:
    """Fix what this attempt came from, before it trains."""
    with fence.guard(f"write the head of attempt {head.attempt}"):
        path = control.attempt(head.attempt) / "head.json"
        if not create_record(path, head) and read_record(path, HeadRecord) != head:
            raise ControlError(f"{path} exists and names another checkpoint; a head is written once")


def latest_head(control: ControlDirectory, *, before: int | None = None) -> HeadRecord | None:
    """The head of the newest attempt that wrote one; None if the run never got that far."""
    for number in reversed(attempt_numbers(control)):
        if before is not None and number >= before:
            continue
        head = read_record(control.attempt(number) / "head.json", HeadRecord)
        if head is not None:
            return head
    return None


def record_failure(control: ControlDirectory, attempt: int, failure: FailureRecord) -> None:
    create_record(control.attempt(attempt) / "failures" / f"rank_{failure.rank:06d}.json", failure)


def failures_of(control: ControlDirectory, attempt: int) -> list[FailureRecord]:
    folder: Path = control.attempt(attempt) / "failures"
    found = [read_record(path, FailureRecord) for path in sorted(folder.glob("rank_*.json"))]
    return [failure for failure in found if failure is not None]


def end_attempt(control: ControlDirectory, fence: Fence, number: int, end: EndRecord) -> bool:
    with fence.guard(f"end attempt {number}"):
        return create_record(control.attempt(number) / "end.json", end)


def ends_of(control: ControlDirectory) -> list[tuple[AttemptRecord, EndRecord | None]]:
    """The run's history, oldest first. An attempt without an end was lost with its launcher."""
    history = []
    for number in attempt_numbers(control):
        record = read_record(control.attempt(number) / "attempt.json", AttemptRecord)
        if record is not None:
            history.append((record, read_record(control.attempt(number) / "end.json", EndRecord)))
    return history
