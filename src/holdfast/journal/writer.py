"""Writes one process's share of a run's journal.

Guarantee: each event is one `write(2)` of one whole line to a file that no other process writes, so
lines never interleave, a reader may follow at any time, and a crash can tear only the last line.

A journal that cannot be written must not end a healthy run: the first failure is logged, the file is opened
afresh for each later event, and the number of lost events is written as soon as writing works. Nor must it
hold up a run: where the file system does not answer, a thread does the writing, a bounded number of events
wait for it, and those that do not fit count as lost. A value that JSON cannot carry is written as its text.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import time
from pathlib import Path
from typing import Any

import msgspec

from holdfast.base import Aside
from holdfast.journal.event import Event
from holdfast.journal.events import (
    Warned,
)
from holdfast.journal.line import JOURNAL_VERSION

log = logging.getLogger("holdfast.journal")

MOST_WAITING = 1000
"""Events that are kept while the file system does not answer."""


def _encodable(value: Any) -> Any:
    """The same value without lone surrogates (undecodable bytes in a message), which JSON refuses."""
    if isinstance(value, str):
        return value.encode("utf-8", "backslashreplace").decode()
    if isinstance(value, list):
        return [_encodable(item) for item in value]
    if isinstance(value, dict):
        return {_encodable(key): _encodable(item) for key, item in value.items()}
    return value


class JournalWriter:
    """Appends events for one writer, `who`, of one attempt. Opens its file at the first event."""

    def __init__(self, directory: Path, who: str, attempt: int) -> None:
        self._path = directory / f"{attempt:06d}-{who}-{os.getpid()}.jsonl"
        self._who = who
        self._attempt = attempt
        self._encoder = msgspec.json.Encoder(enc_hook=str)
        self._aside = Aside("journal", MOST_WAITING)
        self._stalled = False
        self._lock = threading.Lock()
        """Guards the count of lost events; the file belongs to the thread of `_aside` alone."""
        self._fd: int | None = None
        self._prefix = b""
        self._seq = 0
        self._lost = 0

    @property
    def path(self) -> Path:
        return self._path

    @property
    def lost(self) -> int:
        """Events that could not be written and that the journal does not mention yet."""
        return self._lost

    def write(self, event: Event) -> None:
        """Append one event. Never raises for a file-system error, and never waits long (see above)."""
        try:
            body, at = self._encode(event), time.time()
        except (TypeError, ValueError, RecursionError) as error:
            self._lose(error)
            return
        if not self._aside.do(lambda: self._write(body, at)):
            self._lose(OSError(f"the file system does not answer, and {MOST_WAITING} events are waiting"))
        self._tell_stall()

    def _tell_stall(self) -> None:
        hangs = self._aside.hangs
        if hangs and not self._stalled:
            log.error(
                "holdfast: the journal %s cannot be written now: the file system does not answer; training "
                "goes on, and up to %d events are kept until it does",
                self._path,
                MOST_WAITING,
            )
        self._stalled = hangs

    def _write(self, body: bytes, at: float) -> None:
        try:
            self._open()
            with self._lock:
                lost = self._lost
            if lost:
                self._append(self._encode(Warned(message=f"{lost} earlier events could not be written")), at)
                with self._lock:
                    self._lost -= lost
            self._append(body, at)
        except OSError as error:
            self._lose(error)
            self._close()

    def _lose(self, error: Exception) -> None:
        with self._lock:
            self._lost += 1
            first = self._lost == 1
        if first:
            log.error(
                "holdfast: cannot write the journal %s: %s; the run goes on without it", self._path, error
            )

    def _open(self) -> None:
        if self._fd is not None:
            return
        self._path.parent.mkdir(parents=True, exist_ok=True)
        self._fd = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
        # The file may end in a torn line (cut by a full disk): end that line, so that the next stays whole.
        self._prefix = b"\n" if os.fstat(self._fd).st_size else b""

    def _append(self, body: bytes, at: float) -> None:
        frame = self._prefix + b'{"v":%d,"at":%.6f,"who":%b,"attempt":%d,"seq":%d,"body":%b}\n' % (
            JOURNAL_VERSION,
            at,
            self._encode(self._who),
            self._attempt,
            self._seq,
            body,
        )
        assert self._fd is not None
        written = os.write(self._fd, frame)
        if written != len(frame):
            raise OSError(f"wrote {written} of {len(frame)} bytes")
        self._prefix = b""
        self._seq += 1

    def _encode(self, value: Any) -> bytes:
        try:
            return self._encoder.encode(value)
        except UnicodeEncodeError:
            return self._encoder.encode(_encodable(msgspec.to_builtins(value, enc_hook=str)))

    def close(self) -> None:
        self._aside.do(self._close, last=True)

    def _close(self) -> None:
        if self._fd is not None:
            fd, self._fd = self._fd, None
            with contextlib.suppress(OSError):  # NFS reports a late write error here; it was handled above
                os.close(fd)
