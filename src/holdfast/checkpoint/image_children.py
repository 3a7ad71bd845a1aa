"""Working on a large image in several processes.

Threads share one interpreter, which each of them needs between two slices: on many cores they wait for it
more than they work. Forks of the writer process do not, and see the same memory; a fork of it is cheap,
because it is small. What each of them does is settled as they go (image_claims.py).

Guarantee: every child has ended when `in_children` returns or raises, and none outlives its parent. Its wait
is bounded by whoever bounds its parent: a trainer ends a writer that is late with a job (writer_client.py),
the launcher one that has outlived its trainer for too long, and the children end with it.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import signal
import sys
import traceback
from collections.abc import Callable, Iterable, Sequence

import msgspec

from holdfast.checkpoint.manifest import Chunk
from holdfast.errors import SaveFailedError, TornSnapshotError

PR_SET_PDEATHSIG = 1


class Piece(msgspec.Struct, frozen=True, array_like=True):
    """Some of the work on an image, done: a run of a shard's items, or (`at` is -1) its whole digest."""

    shard: int
    at: int
    digest: str
    chunks: list[Chunk]


Task = Callable[[], Piece]

_libc = ctypes.CDLL(None)


class _Told(msgspec.Struct, frozen=True, kw_only=True):
    """What a child says at its end."""

    pieces: list[Piece] = []
    torn: str = ""
    errno: int = 0
    """Of an OSError, with its path."""
    path: str = ""
    failed: str = ""
    """Anything else, with its traceback."""


class _Child:
    def __init__(self, tasks: Iterable[Task]) -> None:
        reading, writing = os.pipe()
        parent = os.getpid()
        self.pid = os.fork()
        if self.pid == 0:
            try:
                _libc.prctl(PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)
                if os.getppid() == parent:  # else it died before that took effect
                    _say(writing, _do(tasks))
            finally:
                os._exit(0)
        os.close(writing)
        self._reading = reading

    def answer(self) -> list[Piece]:
        """Wait for its end; what it has done, or its error raised."""
        with os.fdopen(self._reading, "rb") as pipe:
            raw = pipe.read()
        _, status = os.waitpid(self.pid, 0)
        self.pid = 0
        if not raw:
            code = os.waitstatus_to_exitcode(status)
            raise SaveFailedError(f"a process that worked on the image ended without a word (code {code})")
        told = msgspec.json.decode(raw, type=_Told)
        if told.torn:
            raise TornSnapshotError(told.torn)
        if told.errno:
            raise OSError(told.errno, os.strerror(told.errno), told.path or None)
        if told.failed:
            raise SaveFailedError(f"a process that worked on the image failed:\n{told.failed}")
        return told.pieces

    def end(self) -> None:
        if self.pid:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGKILL)
            with contextlib.suppress(OSError):
                os.close(self._reading)
            os.waitpid(self.pid, 0)
            self.pid = 0


def in_children(shares: Sequence[Iterable[Task]]) -> list[Piece]:
    """Do each share of the tasks in a process of its own; all that they have done.

    A share may be an iterator: it is only asked for its next task when the one before is done.
    """
    children: list[_Child] = []
    try:
        for tasks in shares:
            children.append(_Child(tasks))
        return [piece for child in children for piece in child.answer()]
    finally:
        for child in children:
            child.end()


def _do(tasks: Iterable[Task]) -> _Told:
    try:
        return _Told(pieces=[task() for task in tasks])
    except TornSnapshotError as error:
        return _Told(torn=str(error))
    except OSError as error:
        return _Told(errno=error.errno or errno.EIO, path=str(error.filename or ""))
    except BaseException:  # noqa: BLE001 - whatever it is, the parent must learn of it
        return _Told(failed="".join(traceback.format_exception(sys.exc_info()[1])))


def _say(descriptor: int, told: _Told) -> None:
    view = memoryview(msgspec.json.encode(told))
    while view:
        view = view[os.write(descriptor, view) :]
