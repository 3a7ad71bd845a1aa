"""Writing a staged image from memory to its shards, or digesting it where it lies.

The image in memory is the files, byte for byte, so the work can be shared out: each thread takes the next
run of items and, slice by slice while it is in the processor's cache, digests it, checks it against the
fingerprint that was taken on the tensor's device, and writes it where it belongs. The digests of whole files
are taken beside that. An image that is a local copy already is not written: all else is the same.
Nothing here imports torch: it runs in the writer process.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import xxhash

from holdfast.checkpoint import fingerprint as fingerprints
from holdfast.checkpoint.digesting import WRITE_BACK, start_write_back
from holdfast.checkpoint.image_children import Piece, in_children
from holdfast.checkpoint.layout import Item, Layout, Shard, torn
from holdfast.checkpoint.manifest import Chunk, FileEntry
from holdfast.errors import TornSnapshotError

SLICE = 1024 * 1024
"""Looked at at a time: small enough for a core's cache, large enough that many threads do not wait for the
interpreter, which each of them needs between two slices."""
LARGE = 512 * 1024 * 1024
"""From this size on an image is worked on by several processes instead of threads."""
WHOLE_COST = 0.3
"""What digesting a byte with its whole file costs beside digesting and checking it as part of an item."""
RUN = 16 * 1024 * 1024
"""Bytes of items that a thread takes at a time, at least one item."""


def write_image(
    directory: Path, image: memoryview, layout: Layout, prints: Sequence[str], threads: int
) -> list[FileEntry]:
    """Write, check, digest and fsync a rank's shards. What an interrupted write left is replaced."""
    with contextlib.ExitStack() as files:
        writings = [
            _Writing(layout, shard, prints, _new_file(files, directory / shard.path))
            for shard in layout.shards
        ]
        return _work_through(writings, image, threads)


def digest_image(
    image: memoryview, layout: Layout, prints: Sequence[str], threads: int, into: int | None = None
) -> list[FileEntry]:
    """Check and digest a rank's shards in memory; `into` is a file that gets the image too, not synced."""
    writings = [
        _Writing(layout, shard, prints, None if into is None else _Target(into, shard.start))
        for shard in layout.shards
    ]
    return _work_through(writings, image, threads)


def _work_through(writings: list[_Writing], image: memoryview, threads: int) -> list[FileEntry]:
    if threads > 1 and image.nbytes >= LARGE:
        return _in_processes(writings, image, threads)
    with ThreadPoolExecutor(threads + 1) as pool:
        try:
            # Each thread in a file of its own, as far as that goes: see layout.py.
            for turn in itertools.zip_longest(*[writing.work(image) for writing in writings]):
                for writing, task in zip(writings, turn, strict=True):
                    if task is not None:
                        writing.tasks.append(pool.submit(task))
            return [writing.finish() for writing in writings]
        except BaseException:
            pool.shutdown(wait=True, cancel_futures=True)
            raise


def _in_processes(writings: list[_Writing], image: memoryview, count: int) -> list[FileEntry]:
    """The same work in `count` forks, so divided that they end at about the same time."""
    work = [(cost, task) for at, writing in enumerate(writings) for cost, task in writing.pieces(at, image)]
    shares: list[list[Callable[[], Piece]]] = [[] for _ in range(min(count, len(work)))]
    loads = [0.0] * len(shares)
    for cost, task in sorted(work, key=lambda one: one[0], reverse=True):
        least = loads.index(min(loads))
        shares[least].append(task)
        loads[least] += cost
    for piece in in_children(shares):
        writings[piece.shard].take(piece)
    with ThreadPoolExecutor(count) as pool:  # making files durable waits for disks, not for the interpreter
        return list(pool.map(lambda writing: writing.finish(), writings))


class _Target(NamedTuple):
    """Where a shard is written."""

    descriptor: int
    start: int = 0
    path: str = ""
    """Of a file of its own, which is made durable; empty: it lies in an image among others."""


def _new_file(files: contextlib.ExitStack, path: Path) -> _Target:
    path.unlink(missing_ok=True)
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
    files.callback(os.close, descriptor)
    return _Target(descriptor, path=str(path))


class _Writing:
    """A shard that is being worked on; without a target, only digested."""

    def __init__(self, layout: Layout, shard: Shard, prints: Sequence[str], target: _Target | None) -> None:
        self._target = target
        self._shard = shard
        self._runs = _runs(layout.items_of(shard), prints[shard.first : shard.first + shard.count])
        self._digest = ""
        self._done: dict[int, list[Chunk]] = {}
        """Chunks of the runs that forks have done, by their order."""
        self.tasks: list[Future[list[Chunk]]] = []

    def work(self, image: memoryview) -> Iterator[Callable[[], list[Chunk]]]:
        """What there is to do, in any order: the whole's digest, and each run of items."""
        yield lambda: self._digest_whole(image)
        for items, expected in self._runs:
            yield functools.partial(_do_run, self._target, image, self._shard.start, items, expected)

    def _whole(self, image: memoryview) -> str:
        digest = xxhash.xxh3_128()
        _in_slices(image[self._shard.start : self._shard.start + self._shard.size], digest.update)
        return digest.hexdigest()

    def _digest_whole(self, image: memoryview) -> list[Chunk]:
        self._digest = self._whole(image)
        return []

    def pieces(self, shard: int, image: memoryview) -> Iterator[tuple[float, Callable[[], Piece]]]:
        """The same, each with what it costs, as a fork does it for the `shard`-th of several."""
        yield self._shard.size * WHOLE_COST, lambda: Piece(shard, -1, self._whole(image), [])
        for at, (items, expected) in enumerate(self._runs):

            def run(at: int = at, items: list[Item] = items, expected: list[str] = expected) -> Piece:
                with self._named():
                    done = _do_run(self._target, image, self._shard.start, items, expected)
                return Piece(shard, at, "", done)

            yield float(sum(item.length for item in items)), run

    def take(self, piece: Piece) -> None:
        """What a fork has done."""
        if piece.at < 0:
            self._digest = piece.digest
        else:
            self._done[piece.at] = piece.chunks

    @contextlib.contextmanager
    def _named(self) -> Iterator[None]:
        """An error of the disk says in which file."""
        try:
            yield
        except OSError as error:
            error.filename = error.filename or (self._target.path if self._target is not None else None)
            raise

    def finish(self) -> FileEntry:
        with self._named():
            chunks = [chunk for at in sorted(self._done) for chunk in self._done[at]]
            chunks += [chunk for task in self.tasks for chunk in task.result()]
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


def _in_slices(view: memoryview, take: Callable[[memoryview], object]) -> None:
    for start in range(0, view.nbytes, SLICE):
        take(view[start : start + SLICE])


def _do_run(
    target: _Target | None,
    image: memoryview,
    start: int,
    items: Sequence[Item],
    prints: Sequence[str],
) -> list[Chunk]:
    """Digest, check and write some items of the shard that begins at `start` of the image."""
    chunks: list[Chunk] = []
    handed_over = items[0].offset - start
    for item, expected in zip(items, prints, strict=True):
        digest = xxhash.xxh3_128()
        check = fingerprints.Hasher(fingerprints.kind_of(expected))
        at = item.offset - start

        def take(piece: memoryview, digest: xxhash.xxh3_128 = digest) -> None:
            nonlocal at
            digest.update(piece)
            if target is not None:
                _write_all(target.descriptor, piece, target.start + at)
            at += piece.nbytes

        def take_raw(piece: memoryview, check: fingerprints.Hasher = check) -> None:
            check.update(piece)
            take(piece)

        raw_end = item.raw_offset + item.raw_length
        take(image[item.offset : item.raw_offset])
        _in_slices(image[item.raw_offset : raw_end], take_raw)
        take(image[raw_end : item.offset + item.length])
        if check.done() != expected:
            raise TornSnapshotError(torn(item.name))
        chunks.append(Chunk(item.offset - start, item.length, digest.hexdigest(), expected))
        if target is not None and target.path and at - handed_over >= WRITE_BACK:
            start_write_back(target.descriptor, handed_over, at - handed_over)
            handed_over = at
    return chunks


def _write_all(fd: int, view: memoryview, at: int) -> None:
    while view:
        written = os.pwrite(fd, view, at)
        view, at = view[written:], at + written
