"""A file that digests what is written to it, in the same pass.

Each stored item (chunk) gets its own xxh3-128, so that a loader can verify just what it reads, and the file
gets one over everything, so that a copy can be judged without knowing its items. Large writes are digested
by a helper thread while the kernel copies the same memory; neither holds the GIL. The kernel is told early
to start writing back what it was given, so that the final fsync finds little left to do.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Self

import xxhash

from holdfast.checkpoint.manifest import Chunk, FileEntry

SMALL = 256 * 1024
"""torch.save makes about 40 tiny writes an item; those below this size are gathered first."""
SLICE = 512 * 1024
"""Digested at a time: the second digest finds the bytes of the first still in the processor's cache."""
WRITE_BACK = 8 * 1024 * 1024
"""Written since the kernel was last told to start writing back."""
_SYNC_FILE_RANGE_WRITE = 2


def _find_sync_file_range() -> Callable[[int, int, int, int], int] | None:
    """sync_file_range(2), which `os` lacks; None where the C library does not have it."""
    try:
        function = ctypes.CDLL(None).sync_file_range
    except (OSError, AttributeError):
        return None
    function.argtypes = [ctypes.c_int, ctypes.c_int64, ctypes.c_int64, ctypes.c_uint]
    function.restype = ctypes.c_int
    found: Callable[[int, int, int, int], int] = function
    return found


_sync_file_range = _find_sync_file_range()


def start_write_back(fd: int, offset: int, length: int) -> None:
    """Tell the kernel to start writing a range to disk; only a hint, so nobody looks at its result.

    fsync reports what the disk could not take, as always.
    """
    if _sync_file_range is not None:
        _sync_file_range(fd, offset, length, _SYNC_FILE_RANGE_WRITE)


class DigestingFile:
    """A new file, written once from start to end. `begin_chunk` … `end_chunk` bracket each item."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
        self._helper = ThreadPoolExecutor(1, thread_name_prefix="holdfast-digest")
        self._whole = xxhash.xxh3_128()
        self._chunk = xxhash.xxh3_128()
        self._small = bytearray()
        self._size = 0
        self._written_back = 0
        """Up to here the kernel was told to start writing back."""
        self._chunk_start = 0
        self._chunks: list[Chunk] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._helper.shutdown()
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def begin_chunk(self) -> None:
        self._flush_small()
        self._chunk.reset()
        self._chunk_start = self._size

    def end_chunk(self, fingerprint: str = "") -> Chunk:
        self._flush_small()
        length = self._size - self._chunk_start
        chunk = Chunk(self._chunk_start, length, self._chunk.hexdigest(), fingerprint)
        self._chunks.append(chunk)
        return chunk

    def write(self, data: bytes | memoryview) -> int:
        """What torch.save calls; `data` is only valid until this returns."""
        length = data.nbytes if isinstance(data, memoryview) else len(data)
        if length < SMALL:
            self._small += data
            if len(self._small) >= 4 * SMALL:
                self._flush_small()
        else:
            self._flush_small()
            self._emit(memoryview(data).cast("B"))
        return length

    def flush(self) -> None:
        """Part of the file protocol torch.save expects; durability comes from `finish`."""

    def _flush_small(self) -> None:
        if self._small:
            with memoryview(self._small) as view:
                self._emit(view)
            self._small.clear()

    def _emit(self, view: memoryview) -> None:
        if view.nbytes >= SMALL:
            digesting = self._helper.submit(self._digest, view)
            try:
                self._write_all(view)
            finally:
                digesting.result()
        else:
            self._digest(view)
            self._write_all(view)
        self._size += view.nbytes
        self._start_write_back()

    def _digest(self, view: memoryview) -> None:
        for start in range(0, view.nbytes, SLICE):
            piece = view[start : start + SLICE]
            self._whole.update(piece)
            self._chunk.update(piece)

    def _start_write_back(self) -> None:
        """By the helper, because handing pages to the disk takes as long as digesting them."""
        if self._size - self._written_back >= WRITE_BACK:
            length = self._size - self._written_back
            self._helper.submit(start_write_back, self._fd, self._written_back, length)
            self._written_back = self._size

    def _write_all(self, view: memoryview) -> None:
        rest = view
        while rest:
            rest = rest[os.write(self._fd, rest) :]

    def finish(self) -> FileEntry:
        """Make the contents durable and say what they are."""
        self._flush_small()
        os.fsync(self._fd)
        return FileEntry(
            path=self._path.name, size=self._size, digest=self._whole.hexdigest(), chunks=self._chunks
        )
