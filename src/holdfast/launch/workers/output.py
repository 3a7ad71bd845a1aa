"""What the workers of an attempt write: where it goes, what is shown of it here, and the last of it kept.

What torch lays out is kept: directories and files of logs by its own LogsSpecs, tailed by its own TailLog. A
standard error that goes to no such file is caught in memory and handed on from there, so that the last lines
are known of a rank that aborts without an error file. One that is a terminal is not caught: whoever sits
there sees it, and programs write otherwise to a terminal than to anything else.

Guarantees: a worker that writes is never held up and never fails by this, whatever becomes of this process
or of who reads its output, because what it writes to is a file in memory. What it wrote is handed on whole
and in order, standard output too where both go to the same place. Only what nobody takes for long is left
out, and that is said: no more than `MOST_WAITING` of a rank is kept. Memory of what was handed on is given
back.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import os
import resource
import select
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TextIO

from torch.distributed.elastic.multiprocessing.api import LogsDest
from torch.distributed.elastic.multiprocessing.tail_log import TailLog

LAST = 16 * 1024
"""Bytes of a rank's standard error that are kept: an abort writes its stack after what it has to say."""
MOST_WAITING = 64 * 1024 * 1024
"""Bytes of a rank that may wait for whoever reads our standard error."""
PAUSE = 0.05
"""Seconds between two looks at what was written."""
PARTING = 5.0
"""Seconds at the end for whoever reads our standard error to take some more of what is left."""
AT_ONCE = 4096
"""Bytes that a pipe takes without blocking if it takes any."""
FREED = 1024 * 1024
"""Bytes that are given back at a time."""
PUNCH_HOLE = 0x02 | 0x01  # FALLOC_FL_PUNCH_HOLE, which wants FALLOC_FL_KEEP_SIZE


class Logs:
    """Where the output of an attempt's workers goes, and what is shown of it here."""

    def __init__(
        self,
        name: str,
        destinations: LogsDest,
        prefixes: dict[int, str] | None,
        stdout_filters: Sequence[str] | None,
        stderr_filters: Sequence[str] | None,
    ) -> None:
        self.destinations = destinations
        self._tails = [
            TailLog(name, destinations.tee_stdouts, sys.stdout, prefixes),
            TailLog(name, destinations.tee_stderrs, sys.stderr, prefixes),
        ]
        self._files: list[TextIO] = []
        self._handed: list[TextIO] = []
        self._streams: dict[int, dict[int, int]] = {}
        self._caught: dict[int, _Caught] = {}
        self._closing = threading.Event()
        self._thread: threading.Thread | None = None
        for filters, tees, path in (
            (stdout_filters, destinations.tee_stdouts, getattr(destinations, "filtered_stdout", "")),
            (stderr_filters, destinations.tee_stderrs, getattr(destinations, "filtered_stderr", "")),
        ):
            if filters:
                file = Path(path).open("w", errors="replace", buffering=1)  # noqa: SIM115 - closed in close()
                self._files.append(file)
                self._tails.append(TailLog(name, tees, file, prefixes, log_line_filter=_any_of(filters)))

    def streams(self, local_rank: int) -> dict[int, int]:
        """The descriptors that a worker's standard streams become, by number; the others are inherited."""
        if local_rank not in self._streams:
            self._streams[local_rank] = self._open(local_rank)
        return self._streams[local_rank]

    def _open(self, local_rank: int) -> dict[int, int]:
        paths = {1: self.destinations.stdouts[local_rank], 2: self.destinations.stderrs[local_rank]}
        found = {}
        for number, path in paths.items():
            if path and not (number == 2 and path == os.devnull):
                file = Path(path).open("w")  # noqa: SIM115 - closed when the workers have it
                self._handed.append(file)
                found[number] = file.fileno()
        if 2 not in found:
            caught = _catch(local_rank, show=paths[2] != os.devnull)
            if caught is None and paths[2]:
                file = Path(paths[2]).open("w")  # noqa: SIM115 - as above
                self._handed.append(file)
                found[2] = file.fileno()
            elif caught is not None:
                self._caught[local_rank] = caught
                found[2] = caught.fd
                if 1 not in found and caught.shown and _same_place(1, 2):
                    found[1] = caught.fd  # in one order with the other
        return found

    def last_lines(self, local_rank: int) -> str:
        """The end of what a worker wrote to its standard error, as far as that is known here."""
        caught = self._caught.get(local_rank)
        if caught is not None:
            return caught.last().decode(errors="replace")
        path = self.destinations.stderrs[local_rank]
        if not path:
            return ""
        with contextlib.suppress(OSError), Path(path).open("rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - LAST))
            return file.read(LAST).decode(errors="replace")
        return ""

    def show(self) -> None:
        """The workers have their streams: show what they write, from now on until `close`."""
        for file in self._handed:
            file.close()
        for tail in self._tails:
            tail.start()
        self._begin()

    def _begin(self) -> None:
        if self._caught:
            self._closing.clear()
            thread = threading.Thread(target=self._hand_on, name="holdfast-output", daemon=True)
            thread.start()
            self._thread = thread  # not before: what did not start cannot be waited for

    def _hand_on(self) -> None:
        while not self._closing.wait(PAUSE):
            while self._hand_on_all() and not self._closing.is_set():
                self._await_reader()

    def _hand_on_all(self) -> bool:
        """Whether some is left of any of them."""
        left = [caught.hand_on() for caught in self._caught.values()]
        return any(left)

    def _await_reader(self) -> None:
        """Until whoever reads our standard error takes more, for a moment at most."""
        next(caught for caught in self._caught.values() if caught.shown).await_reader(PAUSE)

    def _pause(self) -> None:
        self._closing.set()
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    def close(self) -> None:
        """The workers are gone: show what is left of theirs, as long as somebody takes it.

        What they left running (a writer that finishes a save) is shown further, until `finish`.
        """
        for tail in self._tails:
            tail.stop()
        for file in [*self._files, *self._handed]:
            file.close()
        self._pause()
        before, deadline = -1, time.monotonic() + PARTING
        while self._hand_on_all() and time.monotonic() < deadline:
            done = sum(caught.done for caught in self._caught.values())
            if done != before:
                before, deadline = done, time.monotonic() + PARTING
            self._await_reader()
        with contextlib.suppress(RuntimeError):  # no room for a thread: what they left is shown at the end
            self._begin()

    def finish(self) -> None:
        """Nothing more is shown. Again: nothing."""
        self._pause()
        for caught in self._caught.values():
            caught.hand_on()
            caught.close()
        self._caught = {}


def _any_of(needles: Sequence[str]) -> Callable[[str], bool]:
    return lambda line: any(needle in line for needle in needles)


class _Caught:
    """What one worker writes, in memory, on its way to our own standard error."""

    def __init__(self, local_rank: int, fd: int, sink: int | None) -> None:
        """`sink`: where it is handed on to; None for nowhere."""
        self.fd = fd
        self.shown = sink is not None
        self._rank = local_rank
        self._sink = sink
        self.done = 0
        """Bytes that were handed on, or left out."""
        self._freed = self._omitted = 0
        self._last = b""

    def hand_on(self) -> bool:
        """Write on what can be written without waiting. True if some is left."""
        if self.fd < 0:
            return False
        size = os.fstat(self.fd).st_size
        if size < self.done:
            self.done = self._freed = 0  # somebody opened it anew, to begin with nothing
        if self._sink is None:
            self.done = size
        while self.done < size and _takes(self._sink):
            self._tell_omitted()
            data = os.pread(self.fd, min(AT_ONCE, size - self.done), self.done)
            if not data:
                break
            written = self._write(data)
            self.done += written
            if not written:
                break
        if size - self.done > MOST_WAITING:
            self._leave_out(size - self.done - MOST_WAITING // 2)
        self._free()
        return self.done < size

    def await_reader(self, timeout: float) -> None:
        _takes(self._sink, timeout)

    def _write(self, data: bytes) -> int:
        """How much of it is dealt with: all, if nobody will ever take it."""
        try:
            return os.write(self._sink, data) if self._sink is not None else len(data)
        except BlockingIOError:
            return 0
        except OSError:  # a full disk, a reader that is gone: not the worker's affair
            return len(data)

    def _leave_out(self, count: int) -> None:
        self.done += count
        self._omitted += count

    def _tell_omitted(self) -> None:
        """As soon as somebody takes something again, and where it is missing."""
        if self._omitted:
            count, self._omitted = self._omitted, 0
            told = f"{count} bytes that local rank {self._rank} wrote are left out: nobody took them"
            self._write(f"\nholdfast: {told}\n".encode())

    def _free(self) -> None:
        """Give back what was handed on, but for the last of it."""
        end = (self.done - LAST) // FREED * FREED
        if end > self._freed:
            libc = ctypes.CDLL(None, use_errno=True)
            begin, length = ctypes.c_int64(self._freed), ctypes.c_int64(end - self._freed)
            libc.fallocate(self.fd, PUNCH_HOLE, begin, length)
            self._freed = end

    def last(self) -> bytes:
        if self.fd < 0:
            return self._last
        size = os.fstat(self.fd).st_size
        return os.pread(self.fd, LAST, max(0, size - LAST))

    def close(self) -> None:
        """Workers that were left keep the file itself. Again: nothing."""
        if self.fd < 0:
            return
        self._last = self.last()
        os.close(self.fd)
        self.fd = -1
        if self._sink is not None:
            os.close(self._sink)


def _catch(local_rank: int, *, show: bool) -> _Caught | None:
    """None where it would do harm, or cannot be done."""
    try:
        limited = resource.getrlimit(resource.RLIMIT_FSIZE)[0] != resource.RLIM_INFINITY
        if (show and os.isatty(2)) or limited:  # the file grows, though what was handed on takes no memory
            return None
        sink = os.dup(2) if show else None
    except OSError:  # there is no standard error
        return None
    try:
        fd = os.memfd_create(f"holdfast-stderr-{local_rank}")
        fcntl.fcntl(fd, fcntl.F_SETFL, os.O_APPEND)
    except OSError:
        if sink is not None:
            os.close(sink)
        return None
    return _Caught(local_rank, fd, sink)


def _same_place(one: int, other: int) -> bool:
    try:
        return os.path.sameopenfile(one, other)
    except OSError:
        return False


def _takes(sink: int | None, timeout: float = 0.0) -> bool:
    """Whether some bytes may be written without waiting, within so long; also if that would fail at once."""
    if sink is None:
        return False
    poll = select.poll()
    poll.register(sink, select.POLLOUT)
    return bool(poll.poll(1000 * timeout))
