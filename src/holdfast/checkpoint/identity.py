"""A checkpoint's identity, its directory's name, and where things lie under a checkpoint root.

A step number does not identify a checkpoint: after a rollback the run reaches the same step again with
other state. The id does, and every rank derives the same one without talking to the others. It has 64 bits:
of as many saves as a fleet makes in years, no two have the same. Ids of older releases have 32; they are read
as they are, and no new one can be equal to one of them.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import NamedTuple

import xxhash

MANIFEST = "holdfast.json"
METADATA = ".metadata"
STAGING = ".staging"
TRASH = ".trash"
LATEST = "latest"
PARTS = "parts"
MARKER = ".holdfast-root"

ID = r"[0-9a-f]{8}(?:[0-9a-f]{8})?"
_NAME = re.compile(rf"step_(\d{{8,12}})-({ID})")
_SHARD = re.compile(r"__([0-9]+)_[0-9]+\.distcp")


def is_url(text: str | Path) -> bool:
    """Whether a text names something remote and not a path."""
    return "://" in str(text)


class CheckpointName(NamedTuple):
    step: int
    id: str

    def __str__(self) -> str:
        return f"step_{self.step:08d}-{self.id}"


def parse_name(name: str) -> CheckpointName | None:
    """The checkpoint a directory's name claims to be; only its manifest can prove it."""
    match = _NAME.fullmatch(name)
    return CheckpointName(int(match[1]), match[2]) if match else None


def saver_of(path: str) -> int | None:
    """The rank that saved a shard, by its name; None if it is no shard's."""
    match = _SHARD.fullmatch(path)
    return int(match[1]) if match else None


def derive_id(run: str, attempt: int, step: int, serial: int) -> str:
    """Sixteen hex digits, the same on every rank. `serial` counts the attempt's saves: ids never repeat."""
    return xxhash.xxh3_128_hexdigest(f"{run}/{attempt}/{step}/{serial}".encode())[:16]


class CheckpointRoot:
    """One tier's directory of checkpoints."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.staging = path / STAGING
        self.trash = path / TRASH
        self.latest = path / LATEST
        self.marker = path / MARKER
        """Made once, at a start; a root without it is not the directory that the run started with."""

    def diagnostic(self) -> CheckpointRoot:
        """Where diagnostic saves live: apart, so that no resume and no retention ever meets one."""
        beneath = CheckpointRoot(self.path / "diagnostic")
        beneath.marker = self.marker
        return beneath

    def committed(self, name: CheckpointName) -> Path:
        return self.path / str(name)

    def staged(self, name: CheckpointName) -> Path:
        return self.staging / str(name)

    def names(self) -> list[CheckpointName]:
        """Directories that look like checkpoints, newest step first. Looks prove nothing."""
        try:
            entries = [entry for entry in self.path.iterdir() if entry.is_dir() and not entry.is_symlink()]
        except FileNotFoundError:
            return []
        found = [name for name in (parse_name(entry.name) for entry in entries) if name is not None]
        return sorted(found, reverse=True)
