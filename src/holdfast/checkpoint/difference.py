"""What differs between two checkpoints: in facts, in entries, and tensor by tensor.

Most of the answer is in the manifests and needs neither torch nor a shard: which entries there are, their
shapes and dtypes, and whether stored chunks have the same digest. Only tensors whose digests differ, or that
were cut into other chunks (another world size), are read, verified in reading, and compared bit by bit.

A checkpoint with anything wrong in it is not compared: a difference must mean that different state was
saved.
"""

from __future__ import annotations

import math
import pickle
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import msgspec

from holdfast.checkpoint.foreign import (
    Contents,
    ForeignError,
    ForeignTensor,
    Recognised,
    StoredTensor,
    entry_of,
    examine,
    rank_files,
    read_contents,
    recognise,
)
from holdfast.checkpoint.format import (
    METADATA,
    Manifest,
    MetadataError,
    Offsets,
    StoredMetadata,
    TensorEntry,
    verify,
)
from holdfast.checkpoint.format import metadata as metadatas
from holdfast.checkpoint.read_back import is_gone, no_such, reading
from holdfast.errors import CheckpointError, UsageError

if TYPE_CHECKING:
    import torch

    from holdfast.checkpoint.choose import VerifyingReader

AT_ONCE = 4 * 1024 * 1024
"""Elements compared at a time, which bounds the memory needed besides the two tensors themselves."""
_BLOB = re.compile(r"holdfast\.rank_\d+")


class Fact(msgspec.Struct, frozen=True):
    """Something on which the manifests differ. Facts are reported, but do not make the state different."""

    name: str
    a: Any
    b: Any


class EntryDifference(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    name: str
    what: str
    """only in A, only in B, shape, dtype, values, parts or object."""
    detail: str = ""
    elements: int = 0
    differing: int = 0
    """Elements whose bits differ."""
    max_abs: float | None = None
    """Largest absolute difference where both are numbers; None if there is no such place."""
    nans_a: int = 0
    nans_b: int = 0
    parts: list[str] = []
    """The parts of a rank's blob that differ."""


class Difference(msgspec.Struct, frozen=True, kw_only=True):
    facts: list[Fact]
    entries: list[EntryDifference]
    """Largest difference first."""
    compared: int
    """Entries that both have."""
    read: int
    """How many of these had to be read."""

    @property
    def equal(self) -> bool:
        return not self.entries


class _Side:
    """One checkpoint, looked at without reading a shard."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        if not directory.is_dir():
            raise UsageError(no_such(directory))
        inspection = verify(directory, files=[METADATA])
        if inspection.problems:
            if is_gone(directory):
                raise UsageError(no_such(directory))
            problems = "\n".join(f"  {problem}" for problem in inspection.problems)
            raise UsageError(f"{directory} is not sound, so it is not compared:\n{problems}")
        if inspection.manifest is None:
            raise UsageError(f"{directory} has no manifest (holdfast.json): there are no digests to compare")
        self.manifest: Manifest = inspection.manifest
        try:
            self.stored: StoredMetadata = metadatas.read(directory)
        except MetadataError as error:
            raise UsageError(f"{directory}/{METADATA}: {error}") from error
        self._digests = {
            (entry.path, chunk.offset, chunk.length): chunk.digest
            for entry in self.manifest.files
            for chunk in entry.chunks
        }
        self._reader: VerifyingReader | None = None

    def digest(self, name: str, offsets: Offsets | None) -> str:
        """Of one stored chunk or object; empty if nothing is stored for it (a chunk without elements)."""
        place = self.stored.storage.get((name, offsets))
        return self._digests.get((place.path, place.offset, place.length), "") if place is not None else ""

    def chunks(self, name: str) -> dict[Offsets, tuple[Offsets, str]]:
        return {
            offsets: (sizes, self.digest(name, offsets))
            for offsets, sizes in self.stored.tensors[name].chunks
        }

    def names(self) -> set[str]:
        return set(self.stored.tensors) | set(self.stored.objects)

    def told(self) -> dict[str, Any]:
        return _told(self.manifest)

    def load(self, name: str) -> torch.Tensor:
        from holdfast.checkpoint.choose import VerifyingReader
        from holdfast.checkpoint.export import read_entry

        if self._reader is None:
            self._reader = VerifyingReader(self.directory, self.manifest)
        try:
            return read_entry(self._reader, name)
        except CheckpointError as error:
            if is_gone(self.directory):
                raise UsageError(no_such(self.directory)) from error
            raise UsageError(f"{self.directory} is not sound, so it is not compared: {error}") from error


class _OtherSide:
    """A checkpoint of another project's: it has no digests, so whatever both have is read.

    Compared are tensors: weights under their part's name, an optimizer's under their parameter's.
    """

    def __init__(self, recognised: Recognised) -> None:
        inspection, _ = examine(recognised, quick=True)
        if inspection.problems:
            told = "\n".join(f"  {problem}" for problem in inspection.problems)
            raise UsageError(f"{recognised.path} is not sound, so it is not compared:\n{told}")
        self._found: dict[str, ForeignTensor] = {}
        first, *others = rank_files(recognised.path) or (0,)
        try:
            self._contents = read_contents(recognised, first)
            self._collect(self._contents, "")
            for rank in others:  # each has parts of its own
                self._collect(read_contents(recognised, rank), f"rank_{rank:05d}.")
        except ForeignError as error:
            raise UsageError(f"{recognised.path} is not sound, so it is not compared: {error}") from error
        self.stored = StoredMetadata(
            {name: TensorEntry(one.shape, one.dtype, []) for name, one in self._found.items()}, [], {}, ""
        )

    def _collect(self, contents: Contents, prefix: str) -> None:
        for part, held in contents.parts.items():
            mine = {f"{part}.{name}": one for name, one in (held.tensors | held.beside).items()}
            state = held.tree.get("state") if isinstance(held.tree, dict) else None
            for parameter, entries in state.items() if isinstance(state, dict) else ():
                for key, value in entries.items() if isinstance(entries, dict) else ():
                    one = entry_of(value) if isinstance(value, StoredTensor) else value
                    if isinstance(one, ForeignTensor):
                        mine[f"{part}.state.{parameter}.{key}"] = one
            self._found |= {f"{prefix}{name}": one for name, one in mine.items()}

    def digest(self, name: str, offsets: Offsets | None) -> str:
        return f"not known of {name} {offsets}"

    def chunks(self, name: str) -> dict[Offsets, tuple[Offsets, str]]:
        return {(): ((), self.digest(name, None) + str(id(self)))}

    def names(self) -> set[str]:
        return set(self._found)

    def told(self) -> dict[str, Any]:
        found = self._contents
        return {"step": found.step, "world": found.world, "project": str(found.recognised.layout)}

    def load(self, name: str) -> torch.Tensor:
        from holdfast.checkpoint.foreign import values_of

        try:
            return cast("torch.Tensor", values_of(self._found[name], name))
        except CheckpointError as error:
            raise UsageError(f"{name} cannot be read, so it is not compared: {error}") from error


def compare(a: Path, b: Path, *, tolerance: float | None = None) -> Difference:
    """What differs. With a `tolerance`, values no further apart than that count as equal."""
    with reading(a), reading(b):
        return _compare(_side(a), _side(b), tolerance)


def _side(path: Path) -> _Side | _OtherSide:
    recognised = recognise(path)
    return _OtherSide(recognised) if recognised is not None else _Side(path)


def _compare(one: _Side | _OtherSide, other: _Side | _OtherSide, tolerance: float | None) -> Difference:
    entries = [
        EntryDifference(name=name, what=f"only in {side}")
        for side, names in (("A", one.names() - other.names()), ("B", other.names() - one.names()))
        for name in names
    ]
    shared = sorted(one.names() & other.names())
    read = 0
    for name in shared:
        known, difference = _without_reading(one, other, name)
        if not known:
            read += 1
            difference = _by_reading(one, other, name, tolerance)
        if difference is not None:
            entries.append(difference)
    entries.sort(key=_order)
    return Difference(
        facts=_facts(one.told(), other.told()), entries=entries, compared=len(shared), read=read
    )


def _order(entry: EntryDifference) -> tuple[bool, float, int, str]:
    """What cannot be measured first, then the largest difference."""
    measured = entry.what == "values"
    return measured, -(entry.max_abs if entry.max_abs is not None else math.inf), -entry.differing, entry.name


def _facts(left: dict[str, Any], right: dict[str, Any]) -> list[Fact]:
    names = [*left, *(name for name in right if name not in left)]
    return [
        Fact(name, left.get(name), right.get(name)) for name in names if left.get(name) != right.get(name)
    ]


def _told(manifest: Manifest) -> dict[str, Any]:
    told: dict[str, Any] = {
        "step": manifest.step, "id": manifest.id, "parent": manifest.parent, "run": manifest.run,
        "attempt": manifest.attempt, "created": manifest.created, "reason": manifest.reason,
        "samples": manifest.samples, "tokens": manifest.tokens, "world": manifest.world.size,
        "backend": manifest.world.backend, "layout": manifest.world.layout,
    }  # fmt: skip
    told |= {f"part {name}": part.kind for name, part in manifest.parts.items()}
    told |= {f"version of {name}": text for name, text in msgspec.to_builtins(manifest.versions).items()}
    return told


def _without_reading(
    one: _Side | _OtherSide, other: _Side | _OtherSide, name: str
) -> tuple[bool, EntryDifference | None]:
    """(whether the answer is known, the answer)."""
    if name not in one.stored.tensors or name not in other.stored.tensors:
        same_kind = (name in one.stored.tensors) == (name in other.stored.tensors)
        if same_kind and one.digest(name, None) == other.digest(name, None):
            return True, None
        detail = "other bytes" if same_kind else "a tensor in one, an object in the other"
        return True, EntryDifference(name=name, what="object", detail=detail)
    left, right = one.stored.tensors[name], other.stored.tensors[name]
    if left.dtype != right.dtype:
        return True, EntryDifference(name=name, what="dtype", detail=f"{left.dtype} and {right.dtype}")
    if one.chunks(name) == other.chunks(name) and left.shape == right.shape:
        return True, None
    if left.shape != right.shape and not _BLOB.fullmatch(name):
        detail = f"{list(left.shape)} and {list(right.shape)}"
        return True, EntryDifference(name=name, what="shape", detail=detail)
    return False, None


def _by_reading(
    one: _Side | _OtherSide, other: _Side | _OtherSide, name: str, tolerance: float | None
) -> EntryDifference | None:
    left, right = one.load(name), other.load(name)
    if not _BLOB.fullmatch(name):
        return _values(name, left, right, tolerance)
    parts = _parts(left, right)
    return EntryDifference(name=name, what="parts", parts=parts) if parts else None


def _values(
    name: str, left: torch.Tensor, right: torch.Tensor, tolerance: float | None
) -> EntryDifference | None:
    left, right = left.reshape(-1), right.reshape(-1)
    differing = nans_a = nans_b = 0
    largest: float | None = None
    torn = False
    """Whether a NaN stands against a number somewhere: no tolerance covers that."""
    for start in range(0, left.numel(), AT_ONCE):
        a, b = left[start : start + AT_ONCE], right[start : start + AT_ONCE]
        differing += int((_bits(a) != _bits(b)).any(dim=1).sum())
        x, y = _numbers(a), _numbers(b)
        nan_x, nan_y = x.isnan(), y.isnan()
        nans_a += int(nan_x.sum())
        nans_b += int(nan_y.sum())
        torn = torn or bool((nan_x != nan_y).any())
        # Equal infinities have no difference, though subtracting them gives NaN.
        apart = (x - y).abs().masked_fill(x == y, 0.0)[~(nan_x | nan_y)]
        if apart.numel():
            largest = max(largest or 0.0, float(apart.max()))
    within = tolerance is not None and not torn and (largest or 0.0) <= tolerance
    if differing == 0 or within:
        return None
    return EntryDifference(
        name=name,
        what="values",
        elements=left.numel(),
        differing=differing,
        max_abs=largest,
        nans_a=nans_a,
        nans_b=nans_b,
    )


def _bits(values: torch.Tensor) -> torch.Tensor:
    """Each element's bytes, as a row."""
    import torch

    return values.contiguous().view(torch.uint8).view(values.numel(), values.element_size())


def _numbers(values: torch.Tensor) -> torch.Tensor:
    """In a dtype that every operation supports; exact except for integers beyond 2**53."""
    import torch

    return values.to(torch.complex128 if values.is_complex() else torch.float64)


def _parts(left: torch.Tensor, right: torch.Tensor) -> list[str]:
    """The parts of a rank's state that differ (see state/tracked.py); both blobs have matched their digests.

    Objects of the script's own classes are not opened: reading one may run any code.
    """
    from holdfast.checkpoint.state import UnreadObjectsError, from_blob

    try:
        a, b = (_named_parts(from_blob(blob, objects=False)) for blob in (left, right))
    except UnreadObjectsError as unread:
        return [f"all (not opened, because it holds objects of {unread})"]
    return sorted(
        name for name in a.keys() | b.keys() if not (name in a and name in b and _same(a[name], b[name]))
    )


def _named_parts(blob: Any) -> dict[str, Any]:
    """`tracked` and `own` opened up, one level: schedule, optimizer, rng, data, counters …"""
    if not isinstance(blob, dict):
        return {"all": blob}
    parts: dict[str, Any] = {}
    for key, value in blob.items():
        if isinstance(value, dict):
            parts |= {f"{key}.{name}": part for name, part in value.items()}
        else:
            parts[str(key)] = value
    return parts


def _same(a: Any, b: Any) -> bool:
    """Equal in every bit, through containers; what is not a number, text or tensor is compared as pickled."""
    import numpy
    import torch

    if type(a) is not type(b):
        return False
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(_same(a[key], b[key]) for key in a)
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(map(_same, a, b))
    if isinstance(a, torch.Tensor):
        if a.dtype != b.dtype or a.shape != b.shape:
            return False
        return bool((_bits(a.detach().cpu().reshape(-1)) == _bits(b.detach().cpu().reshape(-1))).all())
    if isinstance(a, numpy.ndarray) and a.dtype != object:
        return bool(a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes())
    if isinstance(a, bool | int | str | bytes | None):
        return bool(a == b)
    return pickle.dumps(a) == pickle.dumps(b)
