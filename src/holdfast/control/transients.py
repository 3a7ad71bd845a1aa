"""Transient faults, counted by the device on which they appeared, across attempts and launches.

`transients/<node>/<device>/000001-step_<step>.json`; append-only, and not fenced: it is evidence. A record
that cannot be read counts as what its name says.
"""

from __future__ import annotations

import time
from pathlib import Path
from urllib.parse import quote

import msgspec

from holdfast.control.appended import append, entries
from holdfast.control.directory import ControlDirectory
from holdfast.policy.rejection import Place

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
