"""What a node's driver said about its devices during an attempt: evidence for the decision about its end."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from urllib.parse import quote

import msgspec

from holdfast.control.directory import ControlDirectory, create_record, list_names, read_record
from holdfast.errors import ControlError
from holdfast.policy.evidence import DeviceError

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
