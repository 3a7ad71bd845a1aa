"""Reads a run's journal while it is being written: all of it, or only the ends of its files.

All writers' files are merged by time; the lines of one file always keep their order, even when the clock was
set back. A torn last line is left for the next look; a line that cannot be read is counted and skipped, never
fatal: the journal explains failures, so it must survive them.
"""

from __future__ import annotations

import errno
import os
import stat
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

from holdfast.base import printable
from holdfast.journal.events import (
    SaveCommitted,
    SaveFailed,
    SaveSkipped,
    SaveStarted,
    StepsDone,
    WorkersStarted,
    decode_loss,
    encode_loss,
)
from holdfast.journal.line import REPORTER, JournalLine, parse_line

MAX_LINE_BYTES = 16 * 1024 * 1024
BLOCK = 4 * MAX_LINE_BYTES
"""Bytes that are read at a time."""


class JournalReader:
    """Follows every file of one journal directory; each `poll` returns what is new, oldest first."""

    def __init__(self, directory: Path, *, since: int = 0, writers: frozenset[str] | None = None) -> None:
        """Skips attempts numbered below `since` and, if `writers` is given, the files of other writers."""
        self._directory = directory
        self._since = since
        self._writers = writers
        self._offsets: dict[Path, int] = {}
        self._newest: dict[Path, float] = {}
        self.unreadable = 0
        """How many lines so far were not journal lines."""
        self.unopened: dict[str, str] = {}
        """Files that could not be read at the last look, and why; an empty name is the directory itself."""

    def poll(self) -> list[JournalLine]:
        return [line for line, _ in self.poll_raw()]

    def poll_raw(self) -> list[tuple[JournalLine, bytes]]:
        """Like `poll`, with each line's bytes in the file (which may hold fields of a newer release)."""
        found: list[tuple[float, JournalLine, bytes]] = []
        for path in self._files():
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

    def _files(self) -> list[Path]:
        try:
            names = os.listdir(self._directory)
        except FileNotFoundError:
            names = []
        except OSError as error:
            self.unopened[""] = error.strerror or str(error)
            return []
        self.unopened.pop("", None)
        return [self._directory / name for name in sorted(names) if name.endswith(".jsonl")]

    def _poll_file(self, path: Path) -> Iterator[tuple[JournalLine, bytes]]:
        full = True
        while full:
            try:
                data = _read_from(path, self._offsets.get(path, 0))
            except OSError as error:
                self.unopened[path.name] = error.strerror or str(error)
                return
            self.unopened.pop(path.name, None)
            full = len(data) == BLOCK
            whole, newline, rest = data.rpartition(b"\n")
            if not newline and len(rest) < MAX_LINE_BYTES:
                return
            if not newline:
                whole = rest  # longer than any line: give up on it rather than read it again at every look
            self._offsets[path] = self._offsets.get(path, 0) + len(whole) + len(newline)
            for raw in whole.split(b"\n"):
                if not raw.strip():
                    continue
                line = parse_line(raw)
                if line is None:
                    self.unreadable += 1
                else:
                    yield line, raw

    def follow(self, *, interval: float = 0.2, deadline: float | None = None) -> Iterator[JournalLine]:
        """Yield lines as they come, until `deadline` (`time.monotonic()` seconds) or for ever."""
        while True:
            yield from self.poll()
            if deadline is not None and time.monotonic() >= deadline:
                return
            time.sleep(interval)


def writer_of(name: str) -> str:
    """The writer of a journal file, from its name `<attempt>-<who>-<pid>.jsonl`."""
    return name.partition("-")[2].rpartition("-")[0]


def _read_from(path: Path, offset: int) -> bytes:
    """The next bytes of a regular file; anything else is refused (a pipe would block for ever)."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except FileNotFoundError:  # gone since it was listed
        return b""
    with os.fdopen(fd, "rb") as file:
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            raise OSError(errno.EINVAL, "not a regular file", str(path))
        file.seek(offset)
        return file.read(BLOCK)


def read_tail(path: Path, limit: int) -> list[JournalLine]:
    """The lines in the last `limit` bytes of one file, however long it is; none if it cannot be read."""
    return _read_end(path, limit, last=True)


def read_head(path: Path, limit: int) -> list[JournalLine]:
    """The lines in the first `limit` bytes of one file, likewise."""
    return _read_end(path, limit, last=False)


def _read_end(path: Path, limit: int, *, last: bool) -> list[JournalLine]:
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        with os.fdopen(fd, "rb") as file:
            info = os.fstat(fd)
            if not stat.S_ISREG(info.st_mode):
                return []
            file.seek(max(0, info.st_size - limit) if last else 0)
            parts = file.read(limit).split(b"\n")
    except OSError:
        return []
    if info.st_size > limit:
        del parts[0 if last else -1]  # cut off where we began, or stopped
    return [line for raw in parts if (line := parse_line(raw)) is not None]


def read_journal(directory: Path) -> list[JournalLine]:
    """Everything written so far, oldest first."""
    return JournalReader(directory).poll()


# What the ends of one attempt's journal files say. The cost does not depend on how long the files are.


TAIL_BYTES = 256 * 1024
RATE_WINDOW = 60.0
"""Seconds before the newest step over which the rate is taken."""


class Batch(NamedTuple):
    """Steps that rank 0 journalled together."""

    at: float
    last: int
    seconds: list[float]
    loss: list[float | str | None]


def tails(journal: Path, files: list[str], attempt: int, who: str) -> list[JournalLine]:
    """The last lines of an attempt by writers whose name begins with `who`, oldest first."""
    return _ends(journal, files, attempt, who, read_tail)


def _ends(
    journal: Path,
    files: list[str],
    attempt: int,
    who: str,
    read: Callable[[Path, int], list[JournalLine]],
) -> list[JournalLine]:
    start = f"{attempt:06d}-{who}-"
    lines = [
        line
        for name in sorted(files)
        if name.startswith(start) and name.endswith(".jsonl")
        for line in read(journal / name, TAIL_BYTES)
    ]
    return sorted(lines, key=lambda line: line.at)


def heads(journal: Path, files: list[str], attempt: int, who: str) -> list[JournalLine]:
    """The first lines of an attempt by writers whose name begins with `who`, oldest first."""
    return _ends(journal, files, attempt, who, read_head)


def batches(journal: Path, files: list[str], attempt: int) -> list[Batch]:
    """The newest batches of an attempt, oldest first. `files`: the names in the journal's directory."""
    return [
        Batch(line.at, body.first + len(body.seconds) - 1, body.seconds, body.loss)
        for line in tails(journal, files, attempt, REPORTER)
        if isinstance(body := line.body, StepsDone) and body.seconds
    ]


def last_step(journal: Path, files: list[str], attempt: int) -> int | None:
    """The last step that an attempt is known to have completed."""
    found = batches(journal, files, attempt)
    return found[-1].last if found else None


def unfinished_save(journal: Path, files: list[str], attempt: int, *, background: bool = False) -> str | None:
    """The checkpoint of the last save that the ranks of an attempt began, if they did not finish it.

    A save in the background counts only if `background` is set: its writer may still commit it after its rank
    has ended.
    """
    newest: SaveStarted | None = None
    for line in tails(journal, files, attempt, REPORTER):
        body = line.body
        if isinstance(body, SaveStarted):
            newest = body if body.background is background else None
        elif newest is None:
            continue
        # A failed save may have failed before it had an id.
        elif (isinstance(body, SaveCommitted | SaveSkipped) and body.checkpoint == newest.checkpoint) or (
            isinstance(body, SaveFailed) and body.step == newest.step
        ):
            newest = None
    return newest.checkpoint if newest is not None else None


def last_loss(found: list[Batch]) -> float | str | None:
    """The newest recorded loss, in a form that JSON can carry."""
    recorded = (loss for batch in reversed(found) for loss in reversed(batch.loss) if loss is not None)
    return encode_loss(decode_loss(next(recorded, None)))


def rate(found: list[Batch]) -> float | None:
    """Steps per second, including saves and other work between them; None with fewer than two batches."""
    recent = [batch for batch in found if found[-1].at - batch.at <= RATE_WINDOW]
    done, elapsed = sum(len(batch.seconds) for batch in recent[1:]), recent[-1].at - recent[0].at
    if not done or elapsed <= 0:
        done, elapsed = len(recent[-1].seconds), sum(recent[-1].seconds)
    return done / elapsed if elapsed > 0 else None


def nodes_started(journal: Path, files: list[str], attempt: int) -> dict[str, list[int]]:
    """Node → its ranks, as the agents journalled them."""
    lines = tails(journal, files, attempt, "agent")
    started = [line.body for line in lines if isinstance(line.body, WorkersStarted)]
    return {printable(body.node): sorted(body.pids) for body in sorted(started, key=lambda body: body.node)}
