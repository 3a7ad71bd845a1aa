"""Nodes and devices that are kept out of the run, with the reason.

Guarantee: an exclusion stays, across attempts and launches, until somebody readmits the very thing that was
excluded. The newest record of each (node, device) counts; in doubt it is an exclusion: a record that cannot
be read, a word that is not known, two records of the same number.

```
exclusions/<node>/000001-excluded.json                   the whole node
exclusions/<node>/devices/<device>/000001-excluded.json  one of its devices
```
Anybody may write here, at any time: an operator beside a live run, the leading agent on a decision.
"""

from __future__ import annotations

import time
from pathlib import Path
from urllib.parse import quote, unquote

import msgspec

from holdfast.control.appended import append, contents, entries
from holdfast.control.directory import ControlDirectory, list_names
from holdfast.errors import UsageError

EXCLUDED = "excluded"
READMITTED = "readmitted"
DEVICES = "devices"
LONGEST_NAME = 200
"""Characters of a node's or device's name as a file's name; file systems take 255."""


class Exclusion(msgspec.Struct, frozen=True, kw_only=True):
    """Something that is kept out. Also what is written of a readmission."""

    node: str
    device: str | None = None
    """None: the whole node."""
    reason: str = ""
    by: str = ""
    """Who excluded it: an operator, or `recovery`."""
    attempt: int = 0
    """The newest attempt by then."""
    at: float = 0.0
    """0 if the record could not be read."""

    def describe(self) -> str:
        return self.node if self.device is None else f"{self.node}, device {self.device}"


def exclude(
    control: ControlDirectory, node: str, device: str | None, reason: str, by: str, attempt: int
) -> Exclusion:
    """Keep a node, or one device of it, out of every later attempt."""
    return _append(control, EXCLUDED, node, device, reason, by, attempt)


def readmit(
    control: ControlDirectory, node: str, device: str | None, reason: str, by: str, attempt: int = 0
) -> Exclusion:
    """Let it take part again. A device that was excluded by itself stays out when its node is readmitted."""
    return _append(control, READMITTED, node, device, reason, by, attempt)


def excluded(control: ControlDirectory) -> list[Exclusion]:
    """What is kept out now, in the order of the names; a node before its devices."""
    found: list[Exclusion] = []
    root = _root(control)
    for name in sorted(list_names(root)):
        if name.startswith("."):
            continue
        node = unquote(name)
        found.extend(_standing(root / name, node, None))
        devices = root / name / DEVICES
        for device in sorted(list_names(devices)):
            if not device.startswith("."):
                found.extend(_standing(devices / device, node, unquote(device)))
    return found


def _standing(folder: Path, node: str, device: str | None) -> list[Exclusion]:
    """The exclusion in force in a folder, as a list of none or one."""
    there = entries(folder)
    if not there:
        return []
    if there[0].number:  # else one has no place in the order, so it may be the newest
        there = [entry for entry in there if entry.number == there[-1].number]
        if all(entry.word == READMITTED for entry in there):
            return []
    entry = next(entry for entry in there if entry.number == 0 or entry.word != READMITTED)
    record = contents(entry, Exclusion)
    if record is None or (record.node, record.device) != (node, device):
        why = f"its record {entry.path.name} cannot be read, so it counts as an exclusion"
        return [Exclusion(node=node, device=device, reason=why)]
    return [record]


def _append(
    control: ControlDirectory, word: str, node: str, device: str | None, reason: str, by: str, attempt: int
) -> Exclusion:
    record = Exclusion(node=node, device=device, reason=reason, by=by, attempt=attempt, at=time.time())
    folder = _root(control) / _as_name(node, "node")
    if device is not None:
        folder = folder / DEVICES / _as_name(device, "device")
    append(folder, word, record)
    return record


def _root(control: ControlDirectory) -> Path:
    return control.path / "exclusions"


def _as_name(text: str, what: str) -> str:
    """Any text as a file's name, from which it can be told again."""
    try:
        name = quote(text, safe=" ")
    except UnicodeEncodeError:
        raise UsageError(f"{text!r:.120} is not a {what}'s name: it is not text") from None
    if name.startswith("."):
        name = f"%2E{name[1:]}"
    if not text.strip() or len(name) > LONGEST_NAME:
        raise UsageError(
            f"{text!r:.120} is not a {what}'s name: it must not be empty, nor longer than {LONGEST_NAME} "
            "characters. Give the name that `holdfast status` shows"
        )
    return name
