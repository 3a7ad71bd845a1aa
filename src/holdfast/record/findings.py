"""What attempts found out: rejected results and what was settled, transient faults, errors of devices.

`attempts/<n>/rejection.json`: what they agreed to reject, written by rank 0 before it ends. The first one
stays.

`attempts/<n>/settled.json`: verdicts on steps, by the ranks of that attempt and by whoever decided about it.
Every later attempt reads those of all attempts. Neither is fenced: it is evidence, and evidence harms nobody.
What cannot be read is left out: then a step is judged once more, which costs time and no checkpoint.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Sequence
from pathlib import Path
from urllib.parse import quote

import msgspec

from holdfast.base import explain_os_error, replace_atomic
from holdfast.errors import ControlError
from holdfast.policy import DeviceError, Place, Rejection, Settled
from holdfast.record.attempts import attempt_numbers
from holdfast.record.directory import (
    ControlDirectory,
    append,
    create_record,
    entries,
    list_names,
    read_record,
)

log = logging.getLogger("holdfast")

NAME = "rejection.json"
SETTLED = "settled.json"
MOST_SETTLED = 256
"""Steps that one attempt keeps, the latest ones: it never grows beyond that, however many are dropped."""
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
    """The diagnostic saves that rejections have been recorded with, by name; of attempts from `since` on."""
    numbers = [one for one in attempt_numbers(control) if since <= one < before]
    found = (rejection_of(control, number) for number in numbers)
    return {one.diagnostic for one in found if one is not None and one.diagnostic}


def record_settled(control: ControlDirectory, attempt: int, settled: Settled) -> None:
    """Keep a verdict on a step, durably; what is kept already is not added again."""
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
    """All that was settled about steps, in the order in which it was; of very many the latest."""
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
# `transients/<node>/<device>/000001-step_<step>.json`; append-only, and not fenced: it is evidence. A record
# that cannot be read counts as what its name says.


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
    """Keep it, durably; how many this device has by now."""
    record = TransientRecord(
        node=place.node, device=place.device, attempt=attempt, step=step, evidence=evidence, at=time.time()
    )
    append(_folder(control, place), f"step_{step}", record)
    return transients_of(control, place)


def transients_of(control: ControlDirectory, place: Place) -> int:
    """How many were counted for this device, in all attempts."""
    return len(entries(_folder(control, place)))


def _folder(control: ControlDirectory, place: Place) -> Path:
    return control.path / "transients" / _as_name(place.node) / _as_name(place.device)


def _as_name(text: str) -> str:
    """As a file's name; two names may share one only if they are very long."""
    name = quote(text, safe=" ")[:LONGEST_NAME] or NO_DEVICE
    return f"%2E{name[1:]}" if name.startswith(".") else name


# What a node's driver said about its devices during an attempt: evidence for the decision about its end.


FOLDER = "devices"
MOST = 50
"""Errors that are kept of one node: a broken device may report thousands."""


class DeviceErrors(msgspec.Struct, frozen=True, kw_only=True):
    node: str
    errors: list[DeviceError] = []
    more: int = 0
    """How many were left out."""


def record_device_errors(
    control: ControlDirectory, attempt: int, node: str, errors: Sequence[DeviceError]
) -> None:
    """Keep them, the first word of a node counting. Not fenced: evidence harms nobody."""
    if not errors:
        return
    record = DeviceErrors(node=node, errors=list(errors[:MOST]), more=max(0, len(errors) - MOST))
    create_record(control.attempt(attempt) / FOLDER / f"{quote(node, safe='')[:200]}.json", record)


def device_errors_of(control: ControlDirectory, attempt: int) -> list[DeviceError]:
    """What was kept. A record that cannot be read is left out: without it, too, a decision must be made."""
    folder = control.attempt(attempt) / FOLDER
    found: list[DeviceError] = []
    for name in sorted(name for name in list_names(folder) if name.endswith(".json") and name[0] != "."):
        with contextlib.suppress(ControlError):
            record = read_record(folder / name, DeviceErrors)
            found += record.errors if record is not None else []
    return found
