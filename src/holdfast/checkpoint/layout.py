"""Where everything of one rank lies in its shards, and what all ranks together have promised to write.

A layout is fixed when a save is planned, before any byte is there. It is what the staging buffer, the file on
disk, DCP's `.metadata` and the check of declared against written all go by, so they cannot disagree.
"""

from __future__ import annotations

from collections.abc import Iterable

import msgspec
import xxhash

from holdfast.checkpoint.identity import CheckpointName

_PLACEHOLDER = b"step_000000000000-holdfastholdfast"
"""Stands in the planned `.metadata` for the name of the checkpoint that it will belong to."""


SHARD_BYTES = 1 << 30
"""A shard is closed once it has so many bytes, or MOST_SHARDS of them would not be enough for the rank."""
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

    There are several where there is much to write, because a file system lets one writer at a time into a
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
