"""A file that digests what is written to it, in the same pass.

Each stored item (chunk) gets its own xxh3-128, so that a loader can verify just what it reads, and the file
gets one over everything, so that a copy can be judged without knowing its items. Large writes are digested
by a helper thread while the kernel copies the same memory; neither holds the GIL.
"""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Self

import xxhash

from holdfast.checkpoint.manifest import Chunk, FileEntry

SMALL = 256 * 1024
"""torch.save makes about 40 tiny writes an item; those below this size are gathered first."""


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

    def end_chunk(self) -> Chunk:
        self._flush_small()
        chunk = Chunk(self._chunk_start, self._size - self._chunk_start, self._chunk.hexdigest())
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

    def _digest(self, view: memoryview) -> None:
        self._whole.update(view)
        self._chunk.update(view)

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
