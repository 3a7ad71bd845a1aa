"""What is known of each checkpoint, kept apart from its copies.

One file a record, `standing/<checkpoint id>/<number>-<standing>.json`, created whole and never changed. The
name alone already says the standing, so a condemnation whose contents cannot be read is still one; a name
that says nothing known counts as a condemnation too.
"""

from __future__ import annotations

import re
import time
from enum import StrEnum
from pathlib import Path

import msgspec

from holdfast.control.directory import ControlDirectory, create_record, list_names, read_record
from holdfast.control.lease import Fence
from holdfast.errors import ControlError


class Standing(StrEnum):
    COMMITTED = "committed"
    VERIFIED = "verified"
    PROVEN = "proven"
    SUSPECT = "suspect"
    CONDEMNED = "condemned"
    ACQUITTED = "acquitted"
    ABANDONED = "abandoned"


class StandingRecord(msgspec.Struct, frozen=True, kw_only=True):
    checkpoint: str
    standing: Standing
    evidence: list[str]
    epoch: int
    at: float


_SEVERITY = (
    Standing.CONDEMNED, Standing.SUSPECT, Standing.ABANDONED, Standing.COMMITTED,
    Standing.VERIFIED, Standing.ACQUITTED, Standing.PROVEN,
)  # fmt: skip
"""Most careful first: which one counts if two nodes gave two records the same number."""

_RECORD_NAME = re.compile(r"([0-9]{6,18})-(.*)\.json")
_CHECKPOINT = re.compile(r"[0-9A-Za-z_][0-9A-Za-z_.-]{0,99}")


class StandingBook:
    """Reads and appends the standing records of a run."""

    def __init__(self, control: ControlDirectory) -> None:
        self._directory = control.standing

    def append(self, fence: Fence, checkpoint: str, standing: Standing, evidence: list[str]) -> None:
        standing = Standing(standing)
        record = StandingRecord(
            checkpoint=checkpoint, standing=standing, evidence=evidence, epoch=fence.epoch, at=time.time()
        )
        folder = self._folder(checkpoint)
        with fence.guard(f"record checkpoint {checkpoint} as {standing}"):
            number = max((number for number, _ in self._entries(folder)), default=0) + 1
            while not create_record(folder / f"{number:06d}-{standing}.json", record):
                number += 1

    def of(self, checkpoint: str) -> Standing:
        """The newest standing; COMMITTED if nothing was recorded."""
        entries = self._entries(self._folder(checkpoint))
        if not entries:
            return Standing.COMMITTED
        if any(number == 0 for number, _ in entries):
            return Standing.CONDEMNED  # a record whose place in the order cannot be read may be the newest
        newest = max(number for number, _ in entries)
        return min((word for number, word in entries if number == newest), key=_SEVERITY.index)

    def evidence_of(self, checkpoint: str) -> list[str]:
        """What the newest standing rests on; says so if that cannot be read."""
        folder = self._folder(checkpoint)
        standing, entries = self.of(checkpoint), self._entries(folder)
        if not entries:
            return []
        number = max(number for number, _ in entries)
        try:
            record = read_record(folder / f"{number:06d}-{standing}.json", StandingRecord)
        except ControlError:
            record = None
        return record.evidence if record is not None else ["its record cannot be read"]

    def _folder(self, checkpoint: str) -> Path:
        if not _CHECKPOINT.fullmatch(checkpoint):
            raise ControlError(f"{checkpoint!r:.120} is not a checkpoint id; nothing was read or written")
        return self._directory / checkpoint

    @staticmethod
    def _entries(folder: Path) -> list[tuple[int, Standing]]:
        """(number, standing) by file name; an unknown word is CONDEMNED, an unreadable number is 0."""
        entries = []
        for name in list_names(folder):
            match = _RECORD_NAME.fullmatch(name)
            if match:
                known = match[2] in set(Standing)
                entries.append((int(match[1]), Standing(match[2]) if known else Standing.CONDEMNED))
            elif name.endswith(".json"):
                entries.append((0, Standing.CONDEMNED))
        return entries
