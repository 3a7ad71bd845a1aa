"""A staged image becomes shards, or is digested where it lies, by several processes if it is large.

The image in memory equals the files, byte for byte, so the work can be shared out (`Claims`). A worker
with a run of items goes through it slice by slice and does everything with a slice while it is in the
processor's cache: both digests, the item's and, for the shard's leader, the whole file's; the check against
the fingerprint taken on the tensor's device; and the write to where it belongs. Memory is much slower than
any of these, so each byte is read from it once. An image that already is a local copy is not written; all
else is the same. Nothing here imports torch: it runs in the writer process.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import functools
import itertools
import mmap
import os
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from pathlib import Path
from typing import NamedTuple, Self

import msgspec
import xxhash

from holdfast.checkpoint.format import (
    WRITE_BACK,
    Chunk,
    FileEntry,
    Item,
    Layout,
    Shard,
    start_write_back,
    torn,
)
from holdfast.checkpoint.format import fingerprint as fingerprints
from holdfast.errors import SaveFailedError, TornSnapshotError

# Who does which part of the work on an image.
#
# A shard's own digest can only be taken from its first byte to its last, so each shard has a leader, which
# goes through its runs of items in order and takes both digests of what it has just brought into its cache.
# A worker that finds no shard left to lead helps: it takes runs from the far end of the shard with the most
# left to do. Once a leader meets its helpers, all that is left of the shard is its own digest.
#
# Guarantee: each run is given out once, whether to threads or to forks of one process, and a process that
# dies holds nobody up: the kernel releases its lock.


_WORD = 8


class ItemRun(NamedTuple):
    """The `at`-th run of items of a shard."""

    shard: int
    at: int


class Claims:
    """Which runs have been given out: those before `first` to a leader, those from `end` on to helpers."""

    def __init__(self, runs: Sequence[int], *, forks: bool) -> None:
        """`runs`: how many each shard has. `forks`: for processes forked from now on, instead of threads."""
        self._shards = len(runs)
        self._file = -1
        self._memory = mmap.mmap(-1, _WORD * (1 + 2 * self._shards))  # anonymous, and shared with forks
        self._words = memoryview(self._memory).cast("q")
        for shard, count in enumerate(runs):
            self._words[self._end(shard)] = count
        self._lock: AbstractContextManager[object] = threading.Lock()
        if forks:
            self._file = os.memfd_create("holdfast-claims", os.MFD_CLOEXEC)
            self._lock = _RecordLock(self._file)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._file >= 0:
            os.close(self._file)

    @staticmethod
    def _first(shard: int) -> int:
        return 1 + 2 * shard

    @staticmethod
    def _end(shard: int) -> int:
        return 2 + 2 * shard

    def _left(self, shard: int) -> int:
        return self._words[self._end(shard)] - self._words[self._first(shard)]

    def lead(self) -> int | None:
        """A shard that nobody leads yet."""
        with self._lock:
            shard = self._words[0]
            if shard >= self._shards:
                return None
            self._words[0] = shard + 1
            return shard

    def next_run(self, shard: int) -> bool:
        """For the shard's leader: whether the next run is its own to do. Once it is not, none will be."""
        with self._lock:
            if not self._left(shard):
                return False
            self._words[self._first(shard)] += 1
            return True

    def help(self) -> ItemRun | None:
        """From the shard with the most left, the run its leader would come to last; None if there is none."""
        with self._lock:
            shard = max(range(self._shards), key=self._left, default=0)
            if not self._shards or not self._left(shard):
                return None
            self._words[self._end(shard)] -= 1
            return ItemRun(shard, self._words[self._end(shard)])

    def stop(self) -> None:
        """Give out nothing more, because a worker has failed."""
        with self._lock:
            self._words[0] = self._shards
            for shard in range(self._shards):
                self._words[self._end(shard)] = self._words[self._first(shard)]


class _RecordLock(AbstractContextManager[None]):
    """A lock between processes, which the kernel releases when its holder dies."""

    def __init__(self, descriptor: int) -> None:
        self._held = descriptor

    def __enter__(self) -> None:
        fcntl.lockf(self._held, fcntl.LOCK_EX)

    def __exit__(self, *_: object) -> None:
        fcntl.lockf(self._held, fcntl.LOCK_UN)


# Working on a large image in several processes.
#
# Threads share one interpreter, which each of them needs between two slices: on many cores they wait for it
# more than they work. Forks of the writer process do not, and see the same memory; forking it is cheap,
# because it is small. What each of them does is settled as they go (`Claims`).
#
# Guarantee: every child has ended when `in_children` returns or raises, and none outlives its parent. The
# wait for them is bounded by whatever bounds the parent: a trainer ends a writer that is late with a job
# (handoff.py), the launcher ends one that has outlived its trainer for too long, and the children end with
# it.


PR_SET_PDEATHSIG = 1


class Piece(msgspec.Struct, frozen=True, array_like=True):
    """A finished part of the work on an image: a run of a shard's items, or (`at` is -1) its whole digest."""

    shard: int
    at: int
    digest: str
    chunks: list[Chunk]


Task = Callable[[], Piece]

_libc = ctypes.CDLL(None)


class _ChildTold(msgspec.Struct, frozen=True, kw_only=True):
    """What a child reports at its end."""

    pieces: list[Piece] = []
    torn: str = ""
    errno: int = 0
    """That of an OSError, with its path below."""
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
                if os.getppid() == parent:  # else the parent died before that took effect
                    _say(writing, _do(tasks))
            finally:
                os._exit(0)
        os.close(writing)
        self._reading = reading

    def answer(self) -> list[Piece]:
        """Wait for its end; returns what it has done, or raises its error."""
        with os.fdopen(self._reading, "rb") as pipe:
            raw = pipe.read()
        _, status = os.waitpid(self.pid, 0)
        self.pid = 0
        if not raw:
            code = os.waitstatus_to_exitcode(status)
            raise SaveFailedError(f"a process that worked on the image ended without a word (code {code})")
        told = msgspec.json.decode(raw, type=_ChildTold)
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
    """Do each share of the tasks in a process of its own; returns all that they have done.

    A share may be an iterator: it is asked for its next task only when the previous one is done.
    """
    children: list[_Child] = []
    try:
        for tasks in shares:
            children.append(_Child(tasks))
        return [piece for child in children for piece in child.answer()]
    finally:
        for child in children:
            child.end()


def _do(tasks: Iterable[Task]) -> _ChildTold:
    try:
        return _ChildTold(pieces=[task() for task in tasks])
    except TornSnapshotError as error:
        return _ChildTold(torn=str(error))
    except OSError as error:
        return _ChildTold(errno=error.errno or errno.EIO, path=str(error.filename or ""))
    except BaseException:  # noqa: BLE001 - whatever it is, the parent must learn of it
        return _ChildTold(failed="".join(traceback.format_exception(sys.exc_info()[1])))


def _say(descriptor: int, told: _ChildTold) -> None:
    view = memoryview(msgspec.json.encode(told))
    while view:
        view = view[os.write(descriptor, view) :]


SLICE = 512 * 1024
"""Bytes handled at a time. Small enough for a core's cache, with what the check of a fingerprint needs beside
them; large enough that the calls themselves cost little, and that threads rarely wait for the interpreter."""
LARGE = 512 * 1024 * 1024
"""From this size up, an image is worked on by several processes instead of threads."""
RUN = 16 * 1024 * 1024
"""Bytes of items that are claimed at a time, at least one item."""


def write_image(
    directory: Path, image: memoryview, layout: Layout, prints: Sequence[str], threads: int
) -> list[FileEntry]:
    """Write, check, digest and fsync a rank's shards, replacing what an interrupted write left behind."""
    with contextlib.ExitStack() as files:
        writings = [
            _Writing(layout, shard, prints, _new_file(files, directory / shard.path))
            for shard in layout.shards
        ]
        return _work_through(writings, image, threads)


def digest_image(
    image: memoryview, layout: Layout, prints: Sequence[str], threads: int, into: int | None = None
) -> list[FileEntry]:
    """Check and digest a rank's shards in memory; the file `into`, if any, gets the image too, unsynced."""
    writings = [
        _Writing(layout, shard, prints, None if into is None else _Target(into, shard.start))
        for shard in layout.shards
    ]
    return _work_through(writings, image, threads)


def _work_through(writings: list[_Writing], image: memoryview, threads: int) -> list[FileEntry]:
    runs = [len(writing.runs) for writing in writings]
    forks = threads > 1 and image.nbytes >= LARGE
    workers = max(1, min(threads if forks else threads + 1, sum(runs)))
    with Claims(runs, forks=forks) as claims:
        if forks and any(writing.needs_numpy() for writing in writings):
            fingerprints.prepare_host()  # once here, rather than in each of them
        shares = [_work(writings, image, claims) for _ in range(workers)]
        pieces = in_children(shares) if forks else _in_threads(shares)
    for piece in pieces:
        writings[piece.shard].take(piece)
    if len(writings) == 1:
        return [writings[0].finish()]
    with ThreadPoolExecutor(threads) as pool:  # making files durable means waiting for disks
        return list(pool.map(lambda writing: writing.finish(), writings))


def _in_threads(shares: Sequence[Iterator[Task]]) -> list[Piece]:
    if len(shares) == 1:
        return [task() for task in shares[0]]
    with ThreadPoolExecutor(len(shares)) as pool:
        done = pool.map(lambda share: [task() for task in share], shares)
        return [piece for pieces in done for piece in pieces]


def _work(writings: Sequence[_Writing], image: memoryview, claims: Claims) -> Iterator[Task]:
    """What one thread or process has to do, settled as it goes: a task is done before the next is taken."""
    while (shard := claims.lead()) is not None:
        for task in writings[shard].led(shard, image, claims):
            yield functools.partial(_or_stop, claims, task)
    while (run := claims.help()) is not None:
        task = functools.partial(writings[run.shard].do_run, run.shard, run.at, image)
        yield functools.partial(_or_stop, claims, task)


def _or_stop(claims: Claims, task: Task) -> Piece:
    try:
        return task()
    except BaseException:
        claims.stop()
        raise


class _Target(NamedTuple):
    """Where a shard is written."""

    descriptor: int
    start: int = 0
    path: str = ""
    """Path of the shard's own file, which is made durable; empty: the shard lies in an image among others."""


def _new_file(files: contextlib.ExitStack, path: Path) -> _Target:
    path.unlink(missing_ok=True)
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
    files.callback(os.close, descriptor)
    return _Target(descriptor, path=str(path))


class _Whole:
    """A shard's own digest, taken as the work on it advances."""

    def __init__(self, image: memoryview, start: int) -> None:
        self._image = image
        self._digest = xxhash.xxh3_128()
        self._reached = start

    def up_to(self, end: int) -> None:
        for start in range(self._reached, end, SLICE):
            self._digest.update(self._image[start : min(start + SLICE, end)])
        self._reached = end

    def done(self) -> str:
        return self._digest.hexdigest()


class _Writing:
    """A shard that is being worked on; without a target, only digested."""

    def __init__(self, layout: Layout, shard: Shard, prints: Sequence[str], target: _Target | None) -> None:
        self._target = target
        self._shard = shard
        self.runs = _runs(layout.items_of(shard), prints[shard.first : shard.first + shard.count])
        self._digest = ""
        self._done: dict[int, list[Chunk]] = {}
        """Chunks of the runs that are done, by the run's position."""

    def needs_numpy(self) -> bool:
        """Whether any fingerprint to be checked was taken on a device."""
        return any(
            fingerprints.kind_of(taken) == fingerprints.DEVICE
            for _, expected in self.runs
            for taken in expected
        )

    def led(self, shard: int, image: memoryview, claims: Claims) -> Iterator[Task]:
        """What the shard's leader has to do; it is the `shard`-th of several."""
        whole = _Whole(image, self._shard.start)
        for at in range(len(self.runs)):
            if not claims.next_run(shard):
                break
            yield functools.partial(self.do_run, shard, at, image, whole)

        def rest() -> Piece:
            whole.up_to(self._shard.start + self._shard.size)
            return Piece(shard, -1, whole.done(), [])

        yield rest

    def do_run(self, shard: int, at: int, image: memoryview, whole: _Whole | None = None) -> Piece:
        with self._named():
            return Piece(
                shard, at, "", _do_run(self._target, image, self._shard.start, *self.runs[at], whole)
            )

    def take(self, piece: Piece) -> None:
        """Take in a part of it that some worker has done."""
        if piece.at < 0:
            self._digest = piece.digest
        else:
            self._done[piece.at] = piece.chunks

    @contextlib.contextmanager
    def _named(self) -> Iterator[None]:
        """Make an error of the disk say which file it concerns."""
        try:
            yield
        except OSError as error:
            error.filename = error.filename or (self._target.path if self._target is not None else None)
            raise

    def finish(self) -> FileEntry:
        with self._named():
            chunks = [chunk for at in sorted(self._done) for chunk in self._done[at]]
            if self._target is not None and self._target.path:
                os.fsync(self._target.descriptor)
        return FileEntry(path=self._shard.path, size=self._shard.size, digest=self._digest, chunks=chunks)


def _runs(items: Sequence[Item], prints: Sequence[str]) -> list[tuple[list[Item], list[str]]]:
    runs: list[tuple[list[Item], list[str]]] = []
    size = RUN
    for item, expected in zip(items, prints, strict=True):
        if size >= RUN:
            runs.append(([], []))
            size = 0
        runs[-1][0].append(item)
        runs[-1][1].append(expected)
        size += item.length
    return runs


def _do_run(
    target: _Target | None,
    image: memoryview,
    start: int,
    items: Sequence[Item],
    prints: Sequence[str],
    whole: _Whole | None,
) -> list[Chunk]:
    """Digest, check and write some items of the shard that begins at `start` in the image."""
    chunks: list[Chunk] = []
    handed_over = items[0].offset
    for item, expected in zip(items, prints, strict=True):
        digest = xxhash.xxh3_128()
        check = fingerprints.Hasher(fingerprints.kind_of(expected))
        raw_end, end = item.raw_offset + item.raw_length, item.offset + item.length
        for at, to in _slices(item.offset, item.raw_offset, raw_end, end):
            piece = image[at:to]
            digest.update(piece)
            if whole is not None:
                whole.up_to(to)
            if item.raw_offset <= at < raw_end:
                check.update(piece)
            if target is not None:
                _write_all(target.descriptor, piece, target.start + at - start)
        if check.done() != expected:
            raise TornSnapshotError(torn(item.name))
        chunks.append(Chunk(item.offset - start, item.length, digest.hexdigest(), expected))
        if target is not None and target.path and end - handed_over >= WRITE_BACK:
            start_write_back(target.descriptor, handed_over - start, end - handed_over)
            handed_over = end
    return chunks


def _slices(*bounds: int) -> Iterator[tuple[int, int]]:
    """Slices from the first bound to the last, none of them across a bound in between."""
    for start, end in itertools.pairwise(bounds):
        for at in range(start, end, SLICE):
            yield at, min(at + SLICE, end)


def _write_all(fd: int, view: memoryview, at: int) -> None:
    while view:
        written = os.pwrite(fd, view, at)
        view, at = view[written:], at + written
