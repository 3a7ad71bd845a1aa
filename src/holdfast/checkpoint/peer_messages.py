"""What places say to each other once both have proven that they belong to the same run.

```
client              server
Offer          →    GoOn(offset), and the client sends the image from there on; then Held, or Refused
                    Held: it has the copy, verified, already        Refused: why not
Read           →    Data(length) and the bytes, or Gone
ListCopies     →    Copies
```
One connection takes many requests, one after the other.
"""

from __future__ import annotations

from typing import Annotated

import msgspec

from holdfast.checkpoint.identity import MANIFEST, parse_name
from holdfast.checkpoint.local_tier import CopyRecord
from holdfast.checkpoint.manifest import Count, Digest, is_safe_path

MOST_READ = 64 * 1024 * 1024
"""Bytes of one read."""
LARGEST_RANK = 10**9 - 1
LARGEST_IMAGE = 1 << 50

Seconds = Annotated[float, msgspec.Meta(gt=0, le=7 * 24 * 3600.0)]


class AnnouncedChunk(msgspec.Struct, frozen=True, array_like=True):
    """An item of a file; offsets are from the file's start."""

    offset: Count
    length: Count
    digest: Digest


class AnnouncedFile(msgspec.Struct, frozen=True, array_like=True):
    """A shard, where it lies in the image, and what it must be."""

    path: str
    start: Count
    size: Count
    digest: Digest
    chunks: list[AnnouncedChunk]


class Announcement(msgspec.Struct, frozen=True, kw_only=True):
    """What a replica is, in the digests that were taken at its source. The same replica, the same words."""

    checkpoint: str
    manifest: Digest
    rank: Count
    files: list[AnnouncedFile]

    @property
    def size(self) -> int:
        """Bytes of the image."""
        return self.files[-1].start + self.files[-1].size if self.files else 0

    def __str__(self) -> str:
        return f"{self.checkpoint}, rank {self.rank}"


class Offer(msgspec.Struct, frozen=True, kw_only=True, tag="offer"):
    replica: Announcement
    seconds: Seconds
    """How long the sender will be at it."""


class Read(msgspec.Struct, frozen=True, kw_only=True, tag="read"):
    checkpoint: str
    path: str
    offset: Count
    length: Annotated[int, msgspec.Meta(ge=1, le=MOST_READ)]


class ListCopies(msgspec.Struct, frozen=True, tag="list"):
    pass


Request = Offer | Read | ListCopies


class GoOn(msgspec.Struct, frozen=True, tag="go on"):
    offset: Count
    """The image up to here is there already, and was verified."""


class Held(msgspec.Struct, frozen=True, tag="held"):
    place: str


class Refused(msgspec.Struct, frozen=True, kw_only=True, tag="refused"):
    why: str
    altered: str = ""
    """The file whose bytes arrived wrong; empty if that is not the reason."""


class Data(msgspec.Struct, frozen=True, tag="data"):
    length: Count


class Gone(msgspec.Struct, frozen=True, tag="gone"):
    why: str


class Copies(msgspec.Struct, frozen=True, tag="copies"):
    records: list[CopyRecord]


def objection(replica: Announcement) -> str:
    """Why an announcement cannot be accepted, whatever is free; empty if it can. Pure."""
    name = parse_name(replica.checkpoint)
    if name is None or str(name) != replica.checkpoint:
        return f"{replica.checkpoint[:200]!r} is not a checkpoint's name"
    if replica.rank > LARGEST_RANK:
        return f"rank {replica.rank} is more than {LARGEST_RANK}"
    if not replica.files or replica.size == 0:
        return "there is nothing in it"
    if replica.size > LARGEST_IMAGE:
        return f"an image of {replica.size} bytes is more than the {LARGEST_IMAGE} allowed"
    seen: set[str] = set()
    end = 0
    for file in replica.files:
        if not is_safe_path(file.path) or file.path == MANIFEST:
            return f"the path {file.path[:200]!r} is not allowed"
        if file.path in seen:
            return f"{file.path!r} is there twice"
        if file.start < end:
            return f"{file.path!r} lies over the file before it"
        seen.add(file.path)
        end = file.start + file.size
        inner = 0
        for chunk in file.chunks:
            if chunk.offset < inner or chunk.offset + chunk.length > file.size:
                return f"a chunk of {file.path!r} lies outside the file or over another chunk"
            inner = chunk.offset + chunk.length
    return ""
