"""What is known of each checkpoint, kept apart from its copies.

One file a record, `standing/<checkpoint id>/<number>-<standing>.json`, created whole and never changed. The
name alone already says the standing, so a condemnation whose contents cannot be read is still one; a name
that says nothing known counts as a condemnation too.
"""

from __future__ import annotations

import time
from enum import StrEnum

import msgspec

from holdfast.control.directory import ControlDirectory, create_record
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


class StandingBook:
    """Reads and appends the standing records of a run."""

    def __init__(self, control: ControlDirectory) -> None:
        self._directory = control.standing

    def append(self, fence: Fence, checkpoint: str, standing: Standing, evidence: list[str]) -> None:
        record = StandingRecord(
            checkpoint=checkpoint, standing=standing, evidence=evidence, epoch=fence.epoch, at=time.time()
        )
        with fence.guard(f"record checkpoint {checkpoint} as {standing}"):
            folder = self._directory / checkpoint
            number = len(list(folder.glob("*.json"))) + 1
            while not create_record(folder / f"{number:06d}-{standing}.json", record):
                number += 1

    def of(self, checkpoint: str) -> Standing:
        """The newest standing; COMMITTED if nothing was recorded."""
        try:
            names = sorted(path.name for path in (self._directory / checkpoint).glob("*.json"))
        except OSError as error:
            raise ControlError(f"cannot read the standing of checkpoint {checkpoint}: {error}") from error
        if not names:
            return Standing.COMMITTED
        word = names[-1].removesuffix(".json").partition("-")[2]
        return Standing(word) if word in set(Standing) else Standing.CONDEMNED
