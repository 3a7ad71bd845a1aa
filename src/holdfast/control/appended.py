"""Append-only records that any process may add to, without a lease: `<folder>/<number>-<word>.json`.

Guarantee: a record is created once, whole and durably, and never changed or removed. The file's name alone
says what the record is (its word), so one whose contents are damaged still counts for what it is. Writers on
several nodes need not know of each other: two that take the same number with different words both stand, and
the reader says which of them counts.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import NamedTuple, TypeVar

import msgspec

from holdfast.control.directory import create_record, list_names, read_record
from holdfast.errors import ControlError

R = TypeVar("R", bound=msgspec.Struct)

_NAME = re.compile(r"([0-9]{6,18})-(.*)\.json")


class Entry(NamedTuple):
    number: int
    """0 if the name does not tell: such a one may be the newest."""
    word: str
    path: Path


def append(folder: Path, word: str, record: msgspec.Struct) -> int:
    """Add a record after all that are there; its number."""
    number = max((entry.number for entry in entries(folder)), default=0) + 1
    while not create_record(folder / f"{number:06d}-{word}.json", record):
        number += 1  # somebody else has just taken it; a network file system's listing may also be old
    return number


def entries(folder: Path) -> list[Entry]:
    """What is there, in the order of the numbers."""
    found: list[Entry] = []
    for name in list_names(folder):
        if match := _NAME.fullmatch(name):
            found.append(Entry(int(match[1]), match[2], folder / name))
        elif name.endswith(".json") and not name.startswith("."):
            found.append(Entry(0, "", folder / name))
    return sorted(found)


def contents(entry: Entry, kind: type[R]) -> R | None:
    """What a record says; None if that cannot be read, which must not make its name worth less."""
    try:
        return read_record(entry.path, kind)
    except ControlError:
        return None
