"""What a node's driver said about its devices during an attempt: evidence for the decision about its end."""

from __future__ import annotations

from collections.abc import Sequence
from urllib.parse import quote

import msgspec

from holdfast.control.directory import ControlDirectory, create_record, list_names, read_record
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
    folder = control.attempt(attempt) / FOLDER
    names = sorted(name for name in list_names(folder) if name.endswith(".json") and name[0] != ".")
    found = [read_record(folder / name, DeviceErrors) for name in names]
    return [error for one in found if one is not None for error in one.errors]
