"""What can be wrong with a checkpoint, in one closed list of words.

Every fault has its own reason, so that a person, a policy and a test can tell a missing shard from a
truncated one. Texts that come from a file system or from a file are made printable before they get here.
"""

from __future__ import annotations

from enum import StrEnum

import msgspec


class Reason(StrEnum):
    MISSING = "missing"
    """A listed file is not there."""
    MISSING_METADATA = "missing-metadata"
    """`.metadata` is not there: no shard can be found without it."""
    EMPTY = "empty"
    """A file that should hold something has no bytes, as a power cut without fsync leaves it."""
    TRUNCATED = "truncated"
    """A file is shorter than listed."""
    ALTERED = "altered"
    """A file has other bytes than were written, or more of them."""
    NOT_A_FILE = "not-a-file"
    """A symlink, directory or device stands where a regular file should."""
    UNLISTED = "unlisted"
    """Something is there that the manifest (or the metadata) does not know."""
    STALE_METADATA = "stale-metadata"
    """`.metadata` is valid but belongs to other shards than those beside it."""
    UNREADABLE_METADATA = "unreadable-metadata"
    """`.metadata` cannot be parsed, or holds something that metadata never holds."""
    WRONG_RUN = "wrong-run"
    WRONG_WORLD = "wrong-world"
    WRONG_NAME = "wrong-name"
    """The directory's name claims another step or id than the manifest."""
    UNREADABLE_MANIFEST = "unreadable-manifest"
    NO_MANIFEST = "no-manifest"
    INCOMPLETE = "incomplete"
    """The metadata promises data that is stored nowhere, or that the manifest does not account for."""
    NOT_FINITE = "not-finite"
    """It holds values that are no numbers; looked for only where there are no digests."""
    UNREADABLE = "unreadable"
    """The file system refused to give the bytes."""


class Problem(msgspec.Struct, frozen=True):
    reason: Reason
    path: str
    """Relative to the checkpoint's directory; `.` is the directory itself."""
    detail: str

    def __str__(self) -> str:
        return f"{self.reason}: {self.path}: {self.detail}"


def printable(text: str, limit: int = 200) -> str:
    """`text` without control characters or lone surrogates, cut to `limit`: safe to print and to encode."""
    cut = text if len(text) <= limit else text[:limit] + "…"
    if cut.isprintable():
        return cut
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode("ascii") for c in cut)
