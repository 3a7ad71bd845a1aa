"""Writing a staged shard from memory to its file.

The image in memory is the file, byte for byte, so the work can be shared out: each thread takes the next
run of items and, slice by slice while it is in the processor's cache, digests it, checks it against the
fingerprint that was taken on the tensor's device, and writes it where it belongs. One more thread digests
the whole. Nothing here imports torch: it runs in the writer process.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import xxhash

from holdfast.checkpoint import fingerprint as fingerprints
from holdfast.checkpoint.digesting import SLICE, WRITE_BACK, start_write_back
from holdfast.checkpoint.layout import Item, Layout, torn
from holdfast.checkpoint.manifest import Chunk, FileEntry
from holdfast.errors import TornSnapshotError

RUN = 16 * 1024 * 1024
"""Bytes of items that a thread takes at a time, at least one item."""


def write_image(
    path: Path, image: memoryview, layout: Layout, prints: Sequence[str], threads: int
) -> FileEntry:
    """Write, check, digest and fsync one shard. What an interrupted write left there is replaced."""
    path.unlink(missing_ok=True)
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
    try:
        with ThreadPoolExecutor(threads + 1, thread_name_prefix="holdfast-image") as pool:
            whole = pool.submit(_digest, image[: layout.size])
            pending = [
                pool.submit(_write_run, fd, image, items, expected)
                for items, expected in _runs(layout.items, prints)
            ]
            try:
                chunks = [chunk for done in pending for chunk in done.result()]
                digest = whole.result()
            except BaseException:
                pool.shutdown(wait=True, cancel_futures=True)
                raise
        os.fsync(fd)
    except OSError as error:
        error.filename = error.filename or str(path)
        raise
    finally:
        os.close(fd)
    return FileEntry(path=layout.path, size=layout.size, digest=digest, chunks=chunks)


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


def _digest(view: memoryview) -> str:
    digest = xxhash.xxh3_128()
    _in_slices(view, digest.update)
    return digest.hexdigest()


def _in_slices(view: memoryview, take: Callable[[memoryview], object]) -> None:
    for start in range(0, view.nbytes, SLICE):
        take(view[start : start + SLICE])


def _write_run(fd: int, image: memoryview, items: Sequence[Item], prints: Sequence[str]) -> list[Chunk]:
    chunks: list[Chunk] = []
    handed_over = items[0].offset
    for item, expected in zip(items, prints, strict=True):
        digest = xxhash.xxh3_128()
        check = fingerprints.Hasher(fingerprints.kind_of(expected))
        at = item.offset

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
        chunks.append(Chunk(item.offset, item.length, digest.hexdigest(), expected))
        if at - handed_over >= WRITE_BACK:
            start_write_back(fd, handed_over, at - handed_over)
            handed_over = at
    return chunks


def _write_all(fd: int, view: memoryview, at: int) -> None:
    while view:
        written = os.pwrite(fd, view, at)
        view, at = view[written:], at + written
