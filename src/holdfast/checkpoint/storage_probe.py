"""Trying a file system before more of what lies on it is believed.

Two checkpoints in a row that cannot be used, whatever is wrong with them (wrong bytes, missing shards,
nothing to read), are a sign that not they are bad but what they lie on. So something is written there, made
durable, moved, read back from the disk and not from memory, and compared (`health.storage`).
"""

from __future__ import annotations

import logging
from pathlib import Path

from holdfast.bounded import Bounded
from holdfast.health.storage import try_storage
from holdfast.journal.events import StorageAlarm
from holdfast.journal.writer import JournalWriter

log = logging.getLogger("holdfast.checkpoint")

SIZE = 8 * 1024 * 1024
ALARM = 2
"""Rungs in a row that cannot be used before the storage is tried."""
PATIENCE = 60.0
"""Seconds that storage has to take and give back so little."""


class StorageWatch:
    """Counts the rungs of one resume that could not be used: each one that is refused follows another."""

    def __init__(self, journal: JournalWriter) -> None:
        self._journal = journal
        self._bad: list[str] = []

    def after(self, checkpoint: str, directory: Path) -> str:
        """A rung was refused; why no other may be tried, empty if one may."""
        self._bad.append(checkpoint)
        if len(self._bad) != ALARM:
            return ""
        found = probe(directory)
        self._journal.write(StorageAlarm(checkpoints=self._bad[:], place=str(directory), probe=found))
        told = f"{' and '.join(self._bad)}, one after the other, cannot be used, so {directory} was tried"
        if not found:
            log.warning("holdfast: storage alarm: %s; it works, and the next older checkpoint is tried", told)
            return ""
        return (
            f"storage alarm: {told}: {found}. Nothing more that lies there is believed, and nothing was "
            "changed. Repair the storage, or set checkpoint.root to another copy, then start again"
        )


def probe(directory: Path) -> str:
    """What is wrong with the storage of a directory; empty if it takes and gives back what is written."""
    trying = Bounded(lambda: try_storage(directory, SIZE), "probe")
    if not trying.ended(PATIENCE):
        return f"{directory} did not answer within {PATIENCE:g} s"
    return trying.result().problem
