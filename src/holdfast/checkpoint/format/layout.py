"""Where everything lies in a rank's shards, files that digest what is written to them, and reading them.

Each stored item (chunk) gets its own xxh3-128, so that a loader can verify just what it reads, and the file
gets one over everything, so that a copy can be judged without knowing its items. Large writes are digested
by a helper thread while the kernel copies the same memory; neither holds the GIL. The kernel is told early
to start writing back what it was given, so that the final fsync finds little left to do.
"""

from __future__ import annotations

import ctypes
import os
import stat
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Protocol, Self

import msgspec
import xxhash

from holdfast.base import OpenFile
from holdfast.checkpoint.format.manifest import CheckpointName, Chunk, FileEntry
from holdfast.errors import CheckpointError

# Where everything of one rank lies in its shards, and what all ranks together have promised to write.
#
# A layout is fixed when a save is planned, before any byte is there. It is what the staging buffer, the file
# on disk, DCP's `.metadata` and the check of declared against written all go by, so they cannot disagree.


_PLACEHOLDER = b"step_000000000000-holdfastholdfast"
"""Stands in the planned `.metadata` for the name of the checkpoint that it will belong to."""


SHARD_BYTES = 1 << 30
"""A shard is closed at this many bytes, or at more if MOST_SHARDS of them would not hold the rank's."""
MOST_SHARDS = 16


class Item(msgspec.Struct, frozen=True, array_like=True):
    """One stored item, an archive, and the tensor's own bytes in it. Offsets are from the image's start."""

    name: str
    offset: int
    length: int
    raw_offset: int
    raw_length: int


class Shard(msgspec.Struct, frozen=True, array_like=True):
    """One file: a run of items."""

    path: str
    start: int
    """Where it begins in the image."""
    size: int
    first: int
    """Position of its first item."""
    count: int


class Layout(msgspec.Struct, frozen=True):
    """One rank's image: its shards, one after the other.

    There are several if there is much to write, because a file system lets only one writer at a time into a
    file.
    """

    size: int
    items: list[Item]
    shards: list[Shard]

    def items_of(self, shard: Shard) -> list[Item]:
        return self.items[shard.first : shard.first + shard.count]

    def declared(self) -> list[DeclaredFile]:
        return [
            DeclaredFile(
                shard.path,
                shard.size,
                table_digest((item.offset - shard.start, item.length) for item in self.items_of(shard)),
            )
            for shard in self.shards
        ]


def cut(rank: int, items: list[Item]) -> Layout:
    """Pure: the items of a rank, in their order, in as few shards as can be written at speed."""
    size = items[-1].offset + items[-1].length if items else 0
    enough = max(SHARD_BYTES, -(-size // MOST_SHARDS))
    shards: list[Shard] = []
    first, start = 0, 0
    for position, item in enumerate(items):
        end = item.offset + item.length
        if end - start >= enough or position == len(items) - 1:
            path = f"__{rank}_{len(shards)}.distcp"
            shards.append(Shard(path, start, end - start, first, position + 1 - first))
            first, start = position + 1, end
    return Layout(size, items, shards)


class DeclaredFile(msgspec.Struct, frozen=True, array_like=True):
    """What a rank promised: its shard's size, and a digest of where its items lie."""

    path: str
    size: int
    table: str


class Declared(msgspec.Struct, frozen=True):
    """What all ranks together promised, and the `.metadata` that says so to DCP. Only rank 0 holds it."""

    ranks: list[list[DeclaredFile]]
    """By rank; a rank without anything to store has none."""
    metadata: bytes

    def metadata_for(self, name: CheckpointName) -> bytes:
        """`.metadata` as it belongs to this checkpoint; its length does not depend on the name."""
        return self.metadata.replace(_PLACEHOLDER, origin_of(name).encode())


def table_digest(places: Iterable[tuple[int, int]]) -> str:
    """The digest of (offset, length) pairs in the order in which they lie in the file."""
    packed = b"".join(
        offset.to_bytes(8, "little") + length.to_bytes(8, "little") for offset, length in places
    )
    return xxhash.xxh3_64_hexdigest(packed)


def origin_of(name: CheckpointName) -> str:
    """A checkpoint's name as `.metadata` carries it: always of the same length."""
    return f"step_{name.step:012d}-{name.id}"


def placeholder() -> str:
    return _PLACEHOLDER.decode()


def check_placeholder(metadata: bytes) -> None:
    if metadata.count(_PLACEHOLDER) != 1:
        raise ValueError(f"a tracked name contains {_PLACEHOLDER.decode()!r}; rename it")


def torn(name: str) -> str:
    return (
        f"{name}: its bytes do not match the fingerprint that was taken on its device. It changed while it "
        "was copied, or the copy went wrong; the snapshot was thrown away"
    )


SMALL = 256 * 1024
"""torch.save makes about 40 tiny writes per item; those below this size are gathered first."""
SLICE = 512 * 1024
"""Bytes digested at a time: the second digest finds the bytes of the first still in the processor's cache."""
WRITE_BACK = 8 * 1024 * 1024
"""Bytes written before the kernel is told again to start writing back."""
_SYNC_FILE_RANGE_WRITE = 2


def _find_sync_file_range() -> Callable[[int, int, int, int], int] | None:
    """sync_file_range(2), which `os` lacks; None if the C library does not have it."""
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
    """Tell the kernel to start writing a range to disk; only a hint, so its result is ignored.

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
        """The helper does it, because handing pages to the disk takes as long as digesting them."""
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


# Where a reader gets a shard's bytes from: a file in the checkpoint's directory, or wherever else it lies.
#
# Nothing here is trusted: a reader compares every chunk with its digest, and asks for `another` source of
# the same shard when they differ.


READ_SLICE = 256 * 1024
"""Bytes read at a time, and digested while still in the processor's cache."""


class ShardSource(Protocol):
    """An open shard. Several threads may use it at once."""

    @property
    def turn(self) -> int:
        """Which of its sources is in use: a number that rises with each one that is given up."""

    @property
    def concurrent(self) -> bool:
        """Whether several reads at once are faster than one after another."""

    @property
    def at_once(self) -> int:
        """Bytes to ask for at a time: few enough to be digested while in the cache, unless asking is slow."""

    def read_into(self, view: memoryview, offset: int, *, until: int = 0) -> None:
        """Fill `view` from there; CheckpointError if that cannot be done.

        `until`: where the next reads will end, so that what is far away can be asked for ahead.
        """

    def in_place(self, offset: int, length: int) -> memoryview | None:
        """The bytes where they lie, if they can be used there and stay unchanged; None: read them."""

    def another(self, why: str, turn: int | None = None) -> bool:
        """What was read cannot be used, and why. Whether there is another source, to be read from now on.

        `turn`: as it was before reading. If that source was given up meanwhile, nothing more is done.
        """


OpenShard = Callable[[FileEntry], AbstractContextManager[ShardSource]]


class ShardFile:
    """A shard in a directory: a regular file of exactly the listed size, never reached through a link."""

    at_once = READ_SLICE
    turn = 0
    concurrent = True

    def __init__(self, directory: Path, entry: FileEntry) -> None:
        self._path = entry.path
        try:
            self._file = OpenFile(directory / entry.path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
        except FileNotFoundError:
            raise CheckpointError(f"missing {entry.path}") from None
        except OSError as error:
            raise CheckpointError(f"unreadable {entry.path}: {error.strerror}") from error
        info = os.fstat(self._file.number)
        if not stat.S_ISREG(info.st_mode) or info.st_size != entry.size:
            self._file.close()
            reason = "truncated" if info.st_size < entry.size else "altered"
            raise CheckpointError(f"{reason} {entry.path}: expected {entry.size} bytes, found {info.st_size}")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def read_into(self, view: memoryview, offset: int, *, until: int = 0) -> None:
        del until
        read_at(self._file.number, view, offset, self._path)

    def in_place(self, offset: int, length: int) -> memoryview | None:
        del offset, length
        return None

    def another(self, why: str, turn: int | None = None) -> bool:
        del why, turn
        return False


def read_at(descriptor: int, view: memoryview, offset: int, what: str) -> None:
    """Fill `view` from a file; CheckpointError if it ends too early or cannot be read."""
    done = 0
    while done < view.nbytes:
        try:
            count = os.preadv(descriptor, [view[done:]], offset + done)
        except OSError as error:
            raise CheckpointError(f"unreadable {what} at {offset + done}: {error.strerror}") from error
        if count == 0:
            raise CheckpointError(f"truncated {what}: ends at {offset + done}")
        done += count
