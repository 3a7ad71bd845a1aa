"""Attempts: the numbered lives of a run, what each one left behind, and what it found out.

An attempt's directory is its memory: who it was, which checkpoint it came from (its head), what failed, what
was decided, how it ended. Together these are the history that recovery decides on.
"""

from __future__ import annotations

import contextlib
import logging
import re
import time
from collections.abc import Sequence
from pathlib import Path
from urllib.parse import quote

import msgspec

from holdfast.base import explain_os_error, replace_atomic
from holdfast.errors import ControlError
from holdfast.journal.events import Account
from holdfast.policy import DeviceError, MemoryKill, Place, Rejection, Settled, WorkerEnd
from holdfast.record.directory import (
    ControlDirectory,
    append,
    create_record,
    entries,
    list_names,
    read_record,
)
from holdfast.record.launches import told_progress
from holdfast.record.lease import Fence

log = logging.getLogger("holdfast")

MAX_MESSAGE = 64 * 1024
CRASHED = "crashed.json"
"""An end that replaces the one written first."""
_FAILURE_NAME = re.compile(r"rank_[0-9]{6,}\.json")


ACCOUNT = "account.json"
"""In an attempt's directory: the account of its end."""


def keep_account(control: ControlDirectory, account: Account) -> None:
    """Keep it with the attempt that it is about, once. Raises ControlError."""
    create_record(control.attempt(account.attempt) / ACCOUNT, account)


class AttemptRecord(msgspec.Struct, frozen=True, kw_only=True):
    number: int
    epoch: int
    launch: str
    """Launch id: all attempts of one `holdfast run`, or of one torchrun, share it."""
    started_with: str = ""
    """What the launch started, as a digest by `launches.digest_of`; empty if not known."""
    world_size: int
    started: float
    max_restarts: int | None = None
    """`launch.max_restarts` as it was for this attempt; None without a launcher, or from an older release."""
    nodes: list[str] = []
    """Its nodes in their plain order; empty without a launcher."""
    placement: str = ""
    """Which rank ran on which device, in the words of `policy.placement.describe_devices`."""
    rotation: int = 0
    """The shift by which ranks were moved from the plain order."""
    told: int = 0
    """The step that scripts without a Run had reported by its start (`launches.progress`)."""


class HeadRecord(msgspec.Struct, frozen=True, kw_only=True):
    """What an attempt came from: a checkpoint of this run, or nothing (a fresh start)."""

    attempt: int
    checkpoint: str | None
    step: int
    source: str = ""
    """Where it was read from, if it was requested by path."""


class FailureRecord(WorkerEnd, frozen=True, kw_only=True):
    """One worker's end, as its agent saw it, with details for people: the evidence that `policy.diagnose`
    reads."""

    node: str
    pid: int
    at: float
    memory: MemoryKill | None = None
    """What the kernel counted, if it killed this worker, or one of its processes, for lack of memory."""
    step: int | None = None
    """The last step that such a worker is known to have completed."""


class EndRecord(msgspec.Struct, frozen=True, kw_only=True):
    outcome: str
    """finished, failed, stopped or lost."""
    exit_code: int
    cause: str
    """What the diagnosis said; empty unless failed."""
    highest_step: int
    """The highest step that any attempt had committed by then."""
    at: float


def attempt_numbers(control: ControlDirectory) -> list[int]:
    """Every number ever given out, even to an attempt that died before it could write its record."""
    names = list_names(control.attempts)
    return sorted({int(name) for name in names if name.isascii() and name.isdigit()})


def begin_attempt(
    control: ControlDirectory,
    fence: Fence,
    launch: str,
    world_size: int,
    *,
    max_restarts: int | None = None,
    nodes: Sequence[str] = (),
    placement: str = "",
    rotation: int = 0,
    started_with: str = "",
) -> AttemptRecord:
    """Number the next attempt, durably, before any of its workers starts."""
    reported = told_progress(control.path)
    with fence.guard("begin an attempt"):
        number = max(attempt_numbers(control), default=0)
        while True:  # until a number is free: a network file system's listing may be old
            number += 1
            record = AttemptRecord(
                number=number,
                epoch=fence.epoch,
                launch=launch,
                world_size=world_size,
                started=time.time(),
                max_restarts=max_restarts,
                nodes=list(nodes),
                placement=placement,
                rotation=rotation,
                started_with=started_with,
                told=reported,
            )
            if create_record(control.attempt(number) / "attempt.json", record):
                return record


def write_head(control: ControlDirectory, fence: Fence, head: HeadRecord) -> None:
    """Fix what this attempt came from, before it trains."""
    with fence.guard(f"write the head of attempt {head.attempt}"):
        path = control.attempt(head.attempt) / "head.json"
        if not create_record(path, head) and read_record(path, HeadRecord) != head:
            raise ControlError(
                f"{path} exists and does not name checkpoint {head.checkpoint} at step {head.step}; "
                "a head is written once. Nothing was changed; start another attempt"
            )


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
    """Keep a worker's end as evidence; a rank's first one stays. Not fenced: evidence harms nobody."""
    readable = failure.message.encode(errors="replace").decode()  # exception texts may hold stray bytes
    failure = msgspec.structs.replace(failure, message=readable[:MAX_MESSAGE])
    create_record(control.attempt(attempt) / "failures" / f"rank_{failure.rank:06d}.json", failure)


def failures_of(control: ControlDirectory, attempt: int) -> list[FailureRecord]:
    """What is known about the ends of an attempt's workers. A damaged record is reported and left out: a run
    whose disk has lost one rank's last words must still be decided on."""
    folder = control.attempt(attempt) / "failures"
    found = []
    for name in sorted(name for name in list_names(folder) if _FAILURE_NAME.fullmatch(name)):
        try:
            failure = read_record(folder / name, FailureRecord)
        except ControlError as error:
            log.warning("holdfast: evidence of attempt %d is left out: %s", attempt, error)
            continue
        if failure is not None:
            found.append(failure)
    return found


def end_attempt(control: ControlDirectory, fence: Fence, number: int, end: EndRecord) -> bool:
    with fence.guard(f"end attempt {number}"):
        return create_record(control.attempt(number) / "end.json", end)


def record_crash(control: ControlDirectory, number: int, end: EndRecord, failure: FailureRecord) -> None:
    """Correct an end that was written before anyone could see the error that ended the attempt.

    Not fenced, like all evidence.
    """
    record_failure(control, number, failure)
    create_record(control.attempt(number) / CRASHED, end)


def end_of(control: ControlDirectory, number: int) -> EndRecord | None:
    """How an attempt ended; None if nobody has written that."""
    folder = control.attempt(number)
    return read_record(folder / CRASHED, EndRecord) or read_record(folder / "end.json", EndRecord)


def ends_of(control: ControlDirectory) -> list[tuple[AttemptRecord, EndRecord | None]]:
    """The run's history, oldest first. An attempt without an end was lost with its launcher."""
    history = []
    for number in attempt_numbers(control):
        record = read_record(control.attempt(number) / "attempt.json", AttemptRecord)
        if record is not None:
            history.append((record, end_of(control, number)))
    return history


def read_attempt(control: ControlDirectory, number: int) -> AttemptRecord:
    record = read_record(control.attempt(number) / "attempt.json", AttemptRecord)
    if record is None:
        raise ControlError(f"{control.attempt(number)} has no attempt.json")
    return record


# What the ranks of an attempt rejected, and what was settled about steps of the run's timeline.
#
# `attempts/<n>/rejection.json`: what they agreed to reject, written by rank 0 before it ends. The first one
# stays.
#
# `attempts/<n>/settled.json`: verdicts on steps, by the ranks of that attempt and by whoever decided about
# it. Every later attempt reads those of all attempts. Neither is fenced: both are evidence, and evidence
# harms nobody. What cannot be read is left out: then a step is judged once more, which costs time but no
# checkpoint.


NAME = "rejection.json"
SETTLED = "settled.json"
MOST_SETTLED = 256
"""How many steps an attempt keeps, the latest ones: the file stays small, however many are dropped."""
MOST_READ = 4 * MOST_SETTLED


class SettledRecord(msgspec.Struct, frozen=True, kw_only=True):
    """`settled.json`."""

    settled: list[Settled]


def record_rejection(control: ControlDirectory, attempt: int, rejection: Rejection) -> bool:
    """Keep it, durably; False if the attempt had one already."""
    return create_record(control.attempt(attempt) / NAME, rejection)


def rejection_of(control: ControlDirectory, attempt: int) -> Rejection | None:
    return read_record(control.attempt(attempt) / NAME, Rejection)


def diagnosed(control: ControlDirectory, *, since: int, before: int) -> set[str]:
    """The names of the diagnostic saves that rejections were recorded with, in attempts from `since` on."""
    numbers = [one for one in attempt_numbers(control) if since <= one < before]
    found = (rejection_of(control, number) for number in numbers)
    return {one.diagnostic for one in found if one is not None and one.diagnostic}


def record_settled(control: ControlDirectory, attempt: int, settled: Settled) -> None:
    """Keep a verdict on a step, durably; one that is already kept is not added again."""
    path = control.attempt(attempt) / SETTLED
    before = settled_in(control, attempt)
    if settled in before:
        return
    record = SettledRecord(settled=[*before, settled][-MOST_SETTLED:])
    try:
        replace_atomic(path, msgspec.json.encode(record) + b"\n")
    except OSError as error:
        raise explain_os_error(error, "write", path) from error


def settled_steps(control: ControlDirectory) -> list[Settled]:
    """All that was settled about steps, in order; if there is very much of it, the latest."""
    found: list[Settled] = []
    for number in reversed(attempt_numbers(control)):
        found = [*settled_in(control, number), *found]
        if len(found) >= MOST_READ:
            break
    return found


def settled_in(control: ControlDirectory, attempt: int) -> list[Settled]:
    """What one attempt settled."""
    try:
        record = read_record(control.attempt(attempt) / SETTLED, SettledRecord)
    except ControlError as error:
        log.warning("holdfast: what attempt %d settled about steps is left out: %s", attempt, error)
        return []
    return record.settled if record is not None else []


# Transient faults, counted by the device on which they appeared, across attempts and launches.
#
# `transients/<node>/<device>/000001-step_<step>.json`; append-only, and not fenced, as they are evidence. A
# record that cannot be read counts for what its name says.


NO_DEVICE = "none"
LONGEST_NAME = 200


class TransientRecord(msgspec.Struct, frozen=True, kw_only=True):
    node: str
    device: str
    attempt: int
    step: int
    evidence: list[str]
    at: float


def count_transient(
    control: ControlDirectory, place: Place, *, attempt: int, step: int, evidence: list[str]
) -> int:
    """Keep a transient fault, durably; how many this device has had by now."""
    record = TransientRecord(
        node=place.node, device=place.device, attempt=attempt, step=step, evidence=evidence, at=time.time()
    )
    append(_folder(control, place), f"step_{step}", record)
    return transients_of(control, place)


def transients_of(control: ControlDirectory, place: Place) -> int:
    """How many transient faults were counted for this device, in all attempts."""
    return len(entries(_folder(control, place)))


def _folder(control: ControlDirectory, place: Place) -> Path:
    return control.path / "transients" / _as_name(place.node) / _as_name(place.device)


def _as_name(text: str) -> str:
    """Any text as a file name; two texts can share one only if they are very long."""
    name = quote(text, safe=" ")[:LONGEST_NAME] or NO_DEVICE
    return f"%2E{name[1:]}" if name.startswith(".") else name


# What a node's driver said about its devices during an attempt: evidence for the decision about its end.


FOLDER = "devices"
MOST = 50
"""How many errors are kept per node: a broken device may report thousands."""


class DeviceErrors(msgspec.Struct, frozen=True, kw_only=True):
    node: str
    errors: list[DeviceError] = []
    more: int = 0
    """How many were left out."""


def record_device_errors(
    control: ControlDirectory, attempt: int, node: str, errors: Sequence[DeviceError]
) -> None:
    """Keep them; the first word of a node counts. Not fenced: evidence harms nobody."""
    if not errors:
        return
    record = DeviceErrors(node=node, errors=list(errors[:MOST]), more=max(0, len(errors) - MOST))
    create_record(control.attempt(attempt) / FOLDER / f"{quote(node, safe='')[:200]}.json", record)


def device_errors_of(control: ControlDirectory, attempt: int) -> list[DeviceError]:
    """What was kept. A record that cannot be read is left out: a decision must be made even without it."""
    folder = control.attempt(attempt) / FOLDER
    found: list[DeviceError] = []
    for name in sorted(name for name in list_names(folder) if name.endswith(".json") and name[0] != "."):
        with contextlib.suppress(ControlError):
            record = read_record(folder / name, DeviceErrors)
            found += record.errors if record is not None else []
    return found
