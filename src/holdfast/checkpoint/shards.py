"""Where a reader gets a shard's bytes from: a file in the checkpoint's directory, or another that has it.

Nothing here is believed: a reader compares every chunk with its digest, and asks for `another` source of the
same shard when they differ.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Protocol, Self

from holdfast.checkpoint.manifest import FileEntry
from holdfast.errors import CheckpointError
from holdfast.files import OpenFile

SLICE = 256 * 1024
"""Read at a time, and digested while still in the processor's cache."""


class Shard(Protocol):
    """An open shard."""

    @property
    def at_once(self) -> int:
        """Bytes to ask for at a time: few enough to be digested while in the cache, unless asking is slow."""

    def read_into(self, view: memoryview, offset: int, *, until: int = 0) -> None:
        """Fill `view` from there; CheckpointError if that cannot be done.

        `until`: up to where the next reads will go on, so that what is far away can be asked for ahead.
        """

    def in_place(self, offset: int, length: int) -> memoryview | None:
        """The bytes where they lie, if they can be used there and stay as they are; None: read them."""

    def another(self, why: str) -> bool:
        """What was read is no good, and why: whether there is another source, which is read from now on."""


OpenShard = Callable[[FileEntry], AbstractContextManager[Shard]]


class ShardFile:
    """A shard in a directory: a regular file of exactly the listed size, never reached through a link."""

    at_once = SLICE

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

    def another(self, why: str) -> bool:
        del why
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
