"""Reads a run's journal while it is being written.

All writers' files are merged by time; the lines of one file always keep their order, also when the clock
was set back. A torn last line is left for the next look; a line that cannot be read is counted and skipped,
never fatal: the journal explains failures, so it must survive them.
"""

from __future__ import annotations

import os
import stat
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec

from holdfast.journal.events import AnyEvent, Line, Unknown

MAX_LINE_BYTES = 16 * 1024 * 1024


class _Frame(msgspec.Struct):
    v: int
    at: float
    who: str
    attempt: int
    seq: int
    body: msgspec.Raw


_frame_decoder = msgspec.json.Decoder(_Frame)
_body_decoder: msgspec.json.Decoder[Any] = msgspec.json.Decoder(AnyEvent)
_loose_decoder = msgspec.json.Decoder(dict[str, Any])


def parse_line(raw: bytes) -> Line | None:
    """One line, or None if it is not a journal line."""
    try:
        frame = _frame_decoder.decode(raw)
        try:
            body = _body_decoder.decode(frame.body)
        except msgspec.ValidationError:
            fields = _loose_decoder.decode(frame.body)
            body = Unknown(event=str(fields.pop("event", "?")), fields=fields)
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError):
        return None
    return Line(v=frame.v, at=frame.at, who=frame.who, attempt=frame.attempt, seq=frame.seq, body=body)


class JournalReader:
    """Follows every file of one journal directory; each `poll` returns what is new, oldest first."""

    def __init__(self, directory: Path, *, since: int = 0, writers: frozenset[str] | None = None) -> None:
        """`since`: files of attempts with a lower number are not read. `writers`: nor those of others."""
        self._directory = directory
        self._since = since
        self._writers = writers
        self._offsets: dict[Path, int] = {}
        self._newest: dict[Path, float] = {}
        self.unreadable = 0
        """Lines met so far that are not journal lines."""

    def poll(self) -> list[Line]:
        return [line for line, _ in self.poll_raw()]

    def poll_raw(self) -> list[tuple[Line, bytes]]:
        """As `poll`, each line with its bytes in the file (which may hold fields of a newer release)."""
        found: list[tuple[float, Line, bytes]] = []
        for path in sorted(self._directory.glob("*.jsonl")):
            number = path.name.partition("-")[0]
            if self._since and number.isdecimal() and int(number) < self._since:
                continue
            if self._writers is not None and writer_of(path.name) not in self._writers:
                continue
            for line, raw in self._poll_file(path):
                newest = self._newest[path] = max(line.at, self._newest.get(path, line.at))
                found.append((newest, line, raw))
        found.sort(key=lambda item: (item[0], item[1].who, item[1].seq))
        return [(line, raw) for _, line, raw in found]

    def _poll_file(self, path: Path) -> Iterator[tuple[Line, bytes]]:
        data = _read_from(path, self._offsets.get(path, 0))
        whole, newline, rest = data.rpartition(b"\n")
        if not newline and len(rest) < MAX_LINE_BYTES:
            return
        if not newline:
            whole = rest  # longer than any line: give it up rather than read it again at every look
        self._offsets[path] = self._offsets.get(path, 0) + len(whole) + len(newline)
        for raw in whole.split(b"\n"):
            if not raw.strip():
                continue
            line = parse_line(raw)
            if line is None:
                self.unreadable += 1
            else:
                yield line, raw

    def follow(self, *, interval: float = 0.2, deadline: float | None = None) -> Iterator[Line]:
        """Yield lines as they come, until `deadline` (`time.monotonic()` seconds) or for ever."""
        while True:
            yield from self.poll()
            if deadline is not None and time.monotonic() >= deadline:
                return
            time.sleep(interval)


def writer_of(name: str) -> str:
    """Who writes a file of the journal, by its name `<attempt>-<who>-<pid>.jsonl`."""
    return name.partition("-")[2].rpartition("-")[0]


def _read_from(path: Path, offset: int) -> bytes:
    """A regular file's bytes from `offset`; nothing of what is none (a pipe would block for ever)."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        with os.fdopen(fd, "rb") as file:
            if not stat.S_ISREG(os.fstat(fd).st_mode):
                return b""
            file.seek(offset)
            return file.read()
    except OSError:
        return b""


def read_tail(path: Path, limit: int) -> list[Line]:
    """The lines in the last `limit` bytes of one file, however long it is; none if it cannot be read."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        with os.fdopen(fd, "rb") as file:
            info = os.fstat(fd)
            if not stat.S_ISREG(info.st_mode):
                return []
            file.seek(max(0, info.st_size - limit))
            parts = file.read(limit).split(b"\n")
    except OSError:
        return []
    if info.st_size > limit:
        del parts[0]  # cut by where we began
    return [line for raw in parts if (line := parse_line(raw)) is not None]


def read_journal(directory: Path) -> list[Line]:
    """Everything written so far, oldest first."""
    return JournalReader(directory).poll()
