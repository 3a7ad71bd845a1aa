"""Where everything of one rank lies in its shard, and what all ranks together have promised to write.

A layout is fixed when a save is planned, before any byte is there. It is what the staging buffer, the file on
disk, DCP's `.metadata` and the check of declared against written all go by, so they cannot disagree.
"""

from __future__ import annotations

from collections.abc import Iterable

import msgspec
import xxhash

from holdfast.checkpoint.identity import CheckpointName

_PLACEHOLDER = b"step_000000000000-holdfast"
"""Stands in the planned `.metadata` for the name of the checkpoint that it will belong to."""


class Item(msgspec.Struct, frozen=True, array_like=True):
    """One stored item: an archive, and the tensor's own bytes within it."""

    name: str
    offset: int
    length: int
    raw_offset: int
    """From the start of the shard."""
    raw_length: int


class Layout(msgspec.Struct, frozen=True):
    """One rank's shard."""

    path: str
    size: int
    items: list[Item]

    def table(self) -> str:
        return table_digest((item.offset, item.length) for item in self.items)


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
    """Of (offset, length) pairs in the order in which they lie in the file."""
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
