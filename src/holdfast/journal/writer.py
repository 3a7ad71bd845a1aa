"""Writes one process's share of a run's journal.

Guarantee: each event is one `write(2)` of one whole line to a file that no other process writes, so
lines never interleave, a reader may follow at any time, and a crash can tear only the last line.

A journal that cannot be written must not end a healthy run: the first failure is logged, later events
are tried again, and the number of lost ones is written as soon as writing works.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from pathlib import Path

import msgspec

from holdfast.journal.events import JOURNAL_VERSION, Event, Warned

log = logging.getLogger("holdfast.journal")


class JournalWriter:
    """Appends events for one writer, `who`, of one attempt. Opens its file at the first event."""

    def __init__(self, directory: Path, who: str, attempt: int) -> None:
        self._path = directory / f"{attempt:06d}-{who}-{os.getpid()}.jsonl"
        self._who = who
        self._attempt = attempt
        self._encoder = msgspec.json.Encoder()
        self._lock = threading.Lock()
        self._fd: int | None = None
        self._seq = 0
        self._lost = 0

    @property
    def path(self) -> Path:
        return self._path

    def write(self, event: Event) -> None:
        """Append one event. Never raises for a file-system error (see the module's guarantee)."""
        with self._lock:
            try:
                if self._fd is None:
                    self._path.parent.mkdir(parents=True, exist_ok=True)
                    self._fd = os.open(
                        self._path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644
                    )
                if self._lost:
                    self._append(Warned(message=f"{self._lost} earlier events could not be written"))
                    self._lost = 0
                self._append(event)
            except OSError as error:
                if not self._lost:
                    log.error(
                        "holdfast: cannot write the journal %s: %s; training goes on", self._path, error
                    )
                self._lost += 1

    def _append(self, event: Event) -> None:
        frame = b'{"v":%d,"at":%.6f,"who":%b,"attempt":%d,"seq":%d,"body":%b}\n' % (
            JOURNAL_VERSION,
            time.time(),
            self._encoder.encode(self._who),
            self._attempt,
            self._seq,
            self._encoder.encode(event),
        )
        assert self._fd is not None
        written = os.write(self._fd, frame)
        if written != len(frame):
            # A short write (full disk) tears this line; end it, so that the next one stays whole.
            os.write(self._fd, b"\n")
            raise OSError(f"wrote {written} of {len(frame)} bytes")
        self._seq += 1

    def close(self) -> None:
        with self._lock:
            if self._fd is not None:
                os.close(self._fd)
                self._fd = None
