"""Writing a staged image from memory to its shards.

The image in memory is the files, byte for byte, so the work can be shared out: each thread takes the next
run of items and, slice by slice while it is in the processor's cache, digests it, checks it against the
fingerprint that was taken on the tensor's device, and writes it where it belongs. The digests of whole files
are taken beside that. Nothing here imports torch: it runs in the writer process.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import xxhash

from holdfast.checkpoint import fingerprint as fingerprints
from holdfast.checkpoint.digesting import SLICE, WRITE_BACK, start_write_back
from holdfast.checkpoint.layout import Item, Layout, Shard, torn
from holdfast.checkpoint.manifest import Chunk, FileEntry
from holdfast.errors import TornSnapshotError

RUN = 16 * 1024 * 1024
"""Bytes of items that a thread takes at a time, at least one item."""


def write_image(
    directory: Path, image: memoryview, layout: Layout, prints: Sequence[str], threads: int
) -> list[FileEntry]:
    """Write, check, digest and fsync a rank's shards. What an interrupted write left is replaced."""
    with contextlib.ExitStack() as files, ThreadPoolExecutor(threads + 1) as pool:
        try:
            writings = [_Writing(files, directory, layout, shard, prints) for shard in layout.shards]
            # Each thread in a file of its own, as far as that goes: see layout.py.
            for turn in itertools.zip_longest(*[writing.work(image) for writing in writings]):
                for writing, task in zip(writings, turn, strict=True):
                    if task is not None:
                        writing.tasks.append(pool.submit(task))
            return [writing.finish() for writing in writings]
        except BaseException:
            pool.shutdown(wait=True, cancel_futures=True)
            raise


class _Writing:
    """A shard that is being written."""

    def __init__(
        self,
        files: contextlib.ExitStack,
        directory: Path,
        layout: Layout,
        shard: Shard,
        prints: Sequence[str],
    ) -> None:
        self._path = directory / shard.path
        self._path.unlink(missing_ok=True)
        self._fd = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
        files.callback(os.close, self._fd)
        self._shard = shard
        self._runs = _runs(layout.items_of(shard), prints[shard.first : shard.first + shard.count])
        self._digest = ""
        self.tasks: list[Future[list[Chunk]]] = []

    def work(self, image: memoryview) -> Iterator[Callable[[], list[Chunk]]]:
        """What there is to do, in any order: the whole's digest, and each run of items."""
        yield lambda: self._digest_whole(image)
        for items, expected in self._runs:
            yield functools.partial(_write_run, self._fd, image, self._shard.start, items, expected)

    def _digest_whole(self, image: memoryview) -> list[Chunk]:
        digest = xxhash.xxh3_128()
        _in_slices(image[self._shard.start : self._shard.start + self._shard.size], digest.update)
        self._digest = digest.hexdigest()
        return []

    def finish(self) -> FileEntry:
        try:
            chunks = [chunk for task in self.tasks for chunk in task.result()]
            os.fsync(self._fd)
        except OSError as error:
            error.filename = error.filename or str(self._path)
            raise
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


def _write_run(
    fd: int, image: memoryview, start: int, items: Sequence[Item], prints: Sequence[str]
) -> list[Chunk]:
    """Write some items of the shard that begins at `start` of the image."""
    chunks: list[Chunk] = []
    handed_over = items[0].offset - start
    for item, expected in zip(items, prints, strict=True):
        digest = xxhash.xxh3_128()
        check = fingerprints.Hasher(fingerprints.kind_of(expected))
        at = item.offset - start

        def take(piece: memoryview, digest: xxhash.xxh3_128 = digest) -> None:
            nonlocal at
            digest.update(piece)
            _write_all(fd, piece, at)
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
        if at - handed_over >= WRITE_BACK:
            start_write_back(fd, handed_over, at - handed_over)
            handed_over = at
    return chunks


def _write_all(fd: int, view: memoryview, at: int) -> None:
    while view:
        written = os.pwrite(fd, view, at)
        view, at = view[written:], at + written
