"""What a checkpoint is: its identity, its manifest with digests taken at the source, its problems.

```
{"digest": "<xxh3-128 of the exact bytes of body>", "body": {"format": 1, "id": …, "files": […]}}
```
The digest covers the body's bytes as they stand in the file, so nothing in it can change unseen; it also
names the checkpoint's contents, so copies can be compared by it. Fields are only ever added with defaults:
older releases ignore what they do not know unless `needs` names it, and then they refuse, naming it.

Reading a manifest trusts nothing: size, encoding, types, ranges and every path are checked first.
"""

from __future__ import annotations

import contextlib
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from enum import StrEnum
from pathlib import Path, PurePosixPath
from typing import Annotated, Any, NamedTuple, TypeVar

import msgspec
import xxhash

from holdfast.base import read_regular

# What can be wrong with a checkpoint, in one closed list of words.
#
# Every fault has its own reason, so that a person, a policy and a test can tell a missing shard from a
# truncated one. Texts that come from a file system or from a file are made printable before they get here.


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
    """A file has bytes other than those written, or more of them."""
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
    """It holds values that are not numbers; looked for only where there are no digests."""
    UNREADABLE = "unreadable"
    """The file system refused to give the bytes."""


class Problem(msgspec.Struct, frozen=True):
    reason: Reason
    path: str
    """Relative to the checkpoint's directory; `.` is the directory itself."""
    detail: str

    def __str__(self) -> str:
        return f"{self.reason}: {self.path}: {self.detail}"


# A checkpoint's identity, its directory's name, and where things lie under a checkpoint root.
#
# A step number does not identify a checkpoint: after a rollback the run reaches the same step again with a
# different state. The id does, and every rank derives the same one without talking to the others. It has 64
# bits: of as many saves as a fleet makes in years, no two have the same. Ids of older releases have 32; they
# are read as they are, and no new one can be equal to one of them.


MANIFEST = "holdfast.json"
METADATA = ".metadata"
STAGING = ".staging"
TRASH = ".trash"
LATEST = "latest"
PARTS = "parts"
MARKER = ".holdfast-root"

ID = r"[0-9a-f]{8}(?:[0-9a-f]{8})?"
_NAME = re.compile(rf"step_(\d{{8,12}})-({ID})")
_SHARD = re.compile(r"__([0-9]+)_[0-9]+\.distcp")


def is_url(text: str | Path) -> bool:
    """Whether a text names something remote and not a path."""
    return "://" in str(text)


class CheckpointName(NamedTuple):
    step: int
    id: str

    def __str__(self) -> str:
        return f"step_{self.step:08d}-{self.id}"


def parse_name(name: str) -> CheckpointName | None:
    """The checkpoint a directory's name claims to be; only its manifest can prove it."""
    match = _NAME.fullmatch(name)
    return CheckpointName(int(match[1]), match[2]) if match else None


def saver_of(path: str) -> int | None:
    """The rank that saved a shard, by its name; None if the name is not a shard's."""
    match = _SHARD.fullmatch(path)
    return int(match[1]) if match else None


def derive_id(run: str, attempt: int, step: int, serial: int) -> str:
    """Sixteen hex digits, the same on every rank. `serial` counts the attempt's saves: ids never repeat."""
    return xxhash.xxh3_128_hexdigest(f"{run}/{attempt}/{step}/{serial}".encode())[:16]


class CheckpointRoot:
    """One tier's directory of checkpoints."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.staging = path / STAGING
        self.trash = path / TRASH
        self.latest = path / LATEST
        self.marker = path / MARKER
        """Made once, at a start; a root without it is not the directory that the run started with."""

    def diagnostic(self) -> CheckpointRoot:
        """Where diagnostic saves live: apart, so that no resume and no retention ever meets one."""
        beneath = CheckpointRoot(self.path / "diagnostic")
        beneath.marker = self.marker
        return beneath

    def committed(self, name: CheckpointName) -> Path:
        return self.path / str(name)

    def staged(self, name: CheckpointName) -> Path:
        return self.staging / str(name)

    def names(self) -> list[CheckpointName]:
        """Directories that look like checkpoints, newest step first. Looks prove nothing."""
        try:
            entries = [entry for entry in self.path.iterdir() if entry.is_dir() and not entry.is_symlink()]
        except FileNotFoundError:
            return []
        found = [name for name in (parse_name(entry.name) for entry in entries) if name is not None]
        return sorted(found, reverse=True)


FORMAT = 1
UNDERSTOOD: frozenset[str] = frozenset({"holdfast_absent", "holdfast_gradients", "holdfast_nested"})
"""Names a manifest may list in `needs` that this release understands."""
MAX_MANIFEST_BYTES = 16 << 30
"""As for `.metadata`: 54 million chunks of about 90 bytes, as saves write them, are 5 GB."""
MAX_REST_BYTES = 256 * 1024 * 1024
"""Of all but the list of files; it may hold values of any kind."""
TIMES_DECODED = 6
"""What decoding takes in memory, as a multiple of the size: measured 4.7, of the shortest chunks 5.3."""
ALWAYS_ROOM = 16 * 1024 * 1024
"""So much is read without a look at the memory."""


def lacks_room(size: int, times: int) -> str:
    """Why something of this size cannot be read here, if that takes `times` its memory; empty if it can."""
    if size <= ALWAYS_ROOM:
        return ""
    available = memory_to_spare()
    if size * times <= available:
        return ""
    return f"it has {size} bytes; reading it takes up to {size * times} of memory, {available} are available"


def memory_to_spare() -> int:
    """Bytes that this process may still take: of the machine's, and of its control group's."""
    from holdfast.health import cgroup_memory
    from holdfast.process import proc

    limit = cgroup_memory()
    spare = sys.maxsize if limit is None else max(0, limit.limit - limit.used)
    with contextlib.suppress(OSError):
        return min(spare, proc.memory_available())
    return spare


T = TypeVar("T")
Count = Annotated[int, msgspec.Meta(ge=0)]
Digest = Annotated[str, msgspec.Meta(pattern="^[0-9a-f]{32}$")]
Id = Annotated[str, msgspec.Meta(pattern=f"^{ID}$")]


class ManifestError(Exception):
    """The manifest cannot be read or must not be trusted; the message says why."""


class Chunk(msgspec.Struct, frozen=True, array_like=True):
    """One stored item within a file: a DCP write item."""

    offset: Count
    length: Count
    digest: Digest
    fingerprint: Annotated[str, msgspec.Meta(pattern="^[0-9a-z:]{0,80}$")] = ""
    """Of the tensor's own bytes, taken on its device before anything was copied (see fingerprint.py)."""


class FileEntry(msgspec.Struct, frozen=True, kw_only=True):
    path: str
    size: Count
    digest: Digest
    chunks: list[Chunk] = []


class PartEntry(msgspec.Struct, frozen=True, kw_only=True):
    """One tracked thing, or one of Holdfast's own parts."""

    kind: str
    """model, optimizer, object, or one of Holdfast's own: rng, data, counters, gradients."""
    entries: Count = 0
    """How many tensors of it the DCP metadata lists."""
    is_global: bool | None = None
    """For the data position: whether it is one for all ranks, so that another number of ranks can continue
    from it. None if that is not known, or there is no position."""


class Proof(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What was proven of this state at the first save of its structure by its attempt (see proof.py)."""

    step: int | None = None
    """That save's step; None if nobody tried to prove anything."""
    parts: dict[str, str] = {}
    """By part: `values`, `structure`, or `not proven: …`."""
    why_not: str = ""
    """Why there was no proof of any part."""


class Windows(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The last values before the save, for probation to compare with."""

    loss: list[float | None] = []
    grad_norm: list[float | None] = []
    step_seconds: list[float] = []


class Versions(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    holdfast: str
    torch: str
    python: str
    code: str = ""
    """Digest of the main script."""
    config: str = ""
    """Digest of the effective settings."""


class World(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    size: Annotated[int, msgspec.Meta(ge=1)]
    backend: str = ""
    layout: dict[str, Any] = {}
    """Of the device meshes, where there are any: the `sizes` of their dimensions by name, and by name the
    `coordinates` of each rank."""
    tied: list[str] = []
    """Names of tensors that differ between ranks, so that no other number of ranks can take them up."""


def what_ties(manifest: Manifest) -> str:
    """What ties a checkpoint to its number of ranks, as a launcher asks that may change it; else empty."""
    position = manifest.parts.get("data")
    of_ranks = position is not None and position.is_global is False and manifest.world.size > 1
    if not manifest.world.tied and of_ranks:
        return "the data position is one for each rank"
    return tied_words(manifest.world.tied)


def tied_words(tied: list[str]) -> str:
    """What ties a checkpoint to its number of ranks, in short; empty if nothing does."""
    more = f" and {len(tied) - 1} more" if len(tied) > 1 else ""
    return (
        f"{tied[0]}{more} differ between ranks"
        if more
        else f"{tied[0]} differs between ranks"
        if tied
        else ""
    )


OF_THE_JOB = "job"
"""Says of counts that they are all ranks' together."""


class Manifest(msgspec.Struct, frozen=True, kw_only=True):
    format: int
    id: Id
    step: Count
    parent: Id | None
    run: str
    attempt: Count
    epoch: Count
    created: float
    world: World
    parts: dict[str, PartEntry]
    files: list[FileEntry]
    versions: Versions
    samples: Count = 0
    tokens: Count = 0
    counts: str = ""
    """Whose `samples` and `tokens` are: `job` for all ranks' together; empty, in older ones, for rank 0's."""
    reason: str = "scheduled"
    """scheduled, final, asked, …"""
    windows: Windows = msgspec.field(default_factory=Windows)
    needs: list[str] = []
    """Features without which this checkpoint cannot be read correctly."""
    proof: Proof = msgspec.field(default_factory=Proof)


class _Envelope(msgspec.Struct, frozen=True):
    digest: Digest
    body: msgspec.Raw


class _Header(msgspec.Struct, frozen=True):
    """The only fields read before the format is known to be understood."""

    format: int
    files: msgspec.Raw = msgspec.Raw(b"[]")
    needs: list[str] = []


def digest_bytes(data: bytes | memoryview) -> str:
    return xxhash.xxh3_128_hexdigest(data)


def encode(manifest: Manifest) -> tuple[bytes, str]:
    """The file's bytes, and the manifest digest."""
    body = msgspec.json.encode(manifest)
    digest = digest_bytes(body)
    data = b'{"digest":"%b","body":%b}\n' % (digest.encode(), body)
    check_within_limit(len(data))
    return data, digest


def check_within_limit(size: int) -> None:
    """Whether a manifest of this size could be read back; asked when a save is planned, too."""
    if size > MAX_MANIFEST_BYTES:
        raise ManifestError(
            f"the manifest would be {size} bytes; at most {MAX_MANIFEST_BYTES} can be read back"
        )


CHUNK_ROOM = 2 * 14 + 32 + 80 + 12
"""Bytes that a chunk takes in a manifest, at most: two numbers, digest, fingerprint, what is around them."""
FILE_ROOM = 512


def check_planned(chunks: int, files: int) -> None:
    """Whether the manifest of so many chunks in so many files could be read back."""
    check_within_limit(chunks * CHUNK_ROOM + files * FILE_ROOM + MAX_REST_BYTES)


def decode(data: bytes) -> tuple[Manifest, str]:
    """Parse and check a manifest; returns it and its digest."""
    body, digest = _opened(data)
    manifest = _parsed(body, Manifest)
    _check_paths(manifest.files)
    for entry in manifest.files:
        _check_chunks(entry.path, entry.size, entry.chunks)
    return manifest, digest


def _opened(data: bytes) -> tuple[memoryview, str]:
    """The body, which is what its digest says, and of a format that this release understands."""
    if not data.endswith(b"}\n"):
        raise ManifestError("it ends too early or is garbled")
    envelope = _parsed(data, _Envelope)
    body = memoryview(envelope.body)
    if digest_bytes(body) != envelope.digest:
        raise ManifestError("its contents do not match its own digest")
    header = _parsed(body, _Header)
    if header.format > FORMAT:
        raise ManifestError(f"it has format {header.format}; this release reads up to {FORMAT}")
    unknown = sorted(set(header.needs) - UNDERSTOOD)
    if unknown:
        raise ManifestError(f"it needs {', '.join(unknown)}, which this release does not have")
    if len(body) - len(memoryview(header.files)) > MAX_REST_BYTES:
        raise ManifestError(f"it has more than {MAX_REST_BYTES} bytes beside its list of files")
    return body, envelope.digest


def _parsed(data: bytes | memoryview, kind: type[T]) -> T:
    try:
        return msgspec.json.decode(data, type=kind)
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
        raise ManifestError(f"it cannot be parsed: {error}") from error


def read(directory: Path) -> tuple[Manifest, str]:
    """Read `holdfast.json` of a checkpoint directory."""
    return decode(_read(directory))


def read_lazily(directory: Path, data: bytes | None = None) -> tuple[Manifest, str, ChunkTables]:
    """The same for who needs the chunks of few files: they are not in the manifest but in the tables.

    `data`: what is in the file, if somebody else has read it.
    """
    body, digest = _opened(_read(directory) if data is None else data)
    found = _parsed(body, _Undecoded)
    _check_paths(found.files)
    files = [FileEntry(path=entry.path, size=entry.size, digest=entry.digest) for entry in found.files]
    fields = {name: getattr(found, name) for name in Manifest.__struct_fields__}
    return Manifest(**{**fields, "files": files}), digest, ChunkTables(found.files)


def _read(directory: Path) -> bytes:
    path = directory / MANIFEST
    try:
        if why := lacks_room(min(path.lstat().st_size, MAX_MANIFEST_BYTES), TIMES_DECODED):
            raise ManifestError(f"{why}; at most {MAX_MANIFEST_BYTES} are read on any")
        return read_regular(path, MAX_MANIFEST_BYTES)
    except FileNotFoundError as error:
        raise ManifestError("there is no holdfast.json") from error
    except OSError as error:
        raise ManifestError(f"it cannot be read: {error.strerror or error}") from error


class _UndecodedFile(FileEntry, frozen=True, kw_only=True):
    chunks: msgspec.Raw = msgspec.Raw(b"[]")  # type: ignore[assignment]


class _Undecoded(Manifest, frozen=True, kw_only=True):
    files: list[_UndecodedFile]  # type: ignore[assignment]


class ChunkTables(Mapping[str, list[Chunk]]):
    """The chunks of a manifest's files; each file's are decoded and checked when they are asked for."""

    def __init__(self, files: list[_UndecodedFile]) -> None:
        self._files = {entry.path: entry for entry in files}

    def __getitem__(self, path: str) -> list[Chunk]:
        entry = self._files[path]
        chunks = _parsed(memoryview(entry.chunks), list[Chunk])
        _check_chunks(path, entry.size, chunks)
        return chunks

    def __iter__(self) -> Iterator[str]:
        return iter(self._files)

    def __len__(self) -> int:
        return len(self._files)


_SAFE_NAME = re.compile(r"[A-Za-z0-9_.][A-Za-z0-9_.\-]*")


def is_safe_path(path: str) -> bool:
    """Whether a listed path stays inside its directory: relative, plain names, no way up."""
    pure = PurePosixPath(path)
    return (
        bool(path)
        and not pure.is_absolute()
        and str(pure) == path
        and all(part not in ("..", ".") and _SAFE_NAME.fullmatch(part) for part in pure.parts)
    )


def _check_paths(files: Sequence[FileEntry]) -> None:
    seen: set[str] = set()
    for entry in files:
        if not is_safe_path(entry.path) or entry.path == MANIFEST:
            raise ManifestError(f"it lists the path {entry.path[:200]!r}, which is not allowed")
        if entry.path in seen:
            raise ManifestError(f"it lists {entry.path!r} twice")
        seen.add(entry.path)
    if METADATA not in seen:
        raise ManifestError("it does not list .metadata")


def _check_chunks(path: str, size: int, chunks: Sequence[Chunk]) -> None:
    end = 0
    for chunk in chunks:
        if chunk.offset < end or chunk.offset + chunk.length > size:
            raise ManifestError(f"a chunk of {path!r} lies outside the file or over another chunk")
        end = chunk.offset + chunk.length
