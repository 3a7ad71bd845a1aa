"""What differs between two checkpoints, and the weights of one, whole, in one file.

Most of the answer is in the manifests and needs neither torch nor a shard: which entries there are, their
shapes and dtypes, and whether stored chunks have the same digest. Only tensors whose digests differ, or that
were cut into other chunks (another world size), are read, verified as they are, and compared bit by bit.

A checkpoint with something wrong in it is not compared: a difference must mean that other state was saved.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import pickle
import re
import uuid
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

import msgspec
import torch
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load as dcp_load

from holdfast.base import check_output, fsync_dir
from holdfast.checkpoint.choose import VerifyingReader
from holdfast.checkpoint.format import METADATA, Manifest, MetadataError, Offsets, StoredMetadata, verify
from holdfast.checkpoint.format import metadata as metadatas
from holdfast.checkpoint.read_back import is_gone, no_such, reading
from holdfast.checkpoint.state import LOOSE, OWN
from holdfast.errors import CheckpointError, HoldfastError, UsageError

if TYPE_CHECKING:
    import torch

    from holdfast.checkpoint.choose import VerifyingReader


AT_ONCE = 4 * 1024 * 1024
"""Elements compared at a time: what bounds the memory beside the two tensors themselves."""
_BLOB = re.compile(r"holdfast\.rank_\d+")


class Fact(msgspec.Struct, frozen=True):
    """Something the manifests say differently. Facts are told, and do not make state different."""

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
    """Of a rank's blob: the parts that differ."""


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
            told = "\n".join(f"  {problem}" for problem in inspection.problems)
            raise UsageError(f"{directory} is not sound, so it is not compared:\n{told}")
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

    def load(self, name: str) -> torch.Tensor:
        from holdfast.checkpoint.choose import VerifyingReader

        if self._reader is None:
            self._reader = VerifyingReader(self.directory, self.manifest)
        try:
            return read_entry(self._reader, name)
        except CheckpointError as error:
            if is_gone(self.directory):
                raise UsageError(no_such(self.directory)) from error
            raise UsageError(f"{self.directory} is not sound, so it is not compared: {error}") from error


def compare(a: Path, b: Path, *, tolerance: float | None = None) -> Difference:
    """What differs. With a `tolerance`, values no further apart than that count as equal."""
    with reading(a), reading(b):
        return _compare(_Side(a), _Side(b), tolerance)


def _compare(one: _Side, other: _Side, tolerance: float | None) -> Difference:
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
        facts=_facts(one.manifest, other.manifest), entries=entries, compared=len(shared), read=read
    )


def _order(entry: EntryDifference) -> tuple[bool, float, int, str]:
    """What cannot be measured first, then the largest difference."""
    measured = entry.what == "values"
    return measured, -(entry.max_abs if entry.max_abs is not None else math.inf), -entry.differing, entry.name


def _facts(a: Manifest, b: Manifest) -> list[Fact]:
    left, right = _told(a), _told(b)
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


def _without_reading(one: _Side, other: _Side, name: str) -> tuple[bool, EntryDifference | None]:
    """(whether the answer is known, and it)."""
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


def _by_reading(one: _Side, other: _Side, name: str, tolerance: float | None) -> EntryDifference | None:
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
    """As numbers that every operation knows; exact but for integers beyond 2**53."""
    import torch

    return values.to(torch.complex128 if values.is_complex() else torch.float64)


def _parts(left: torch.Tensor, right: torch.Tensor) -> list[str]:
    """The parts of a rank's state that differ (see state.py); both blobs have matched their digests.

    Objects of a class of the script's are not opened: reading one may run anything.
    """
    from holdfast.checkpoint.state import UnreadObjectsError, from_blob

    try:
        a, b = (_named_parts(from_blob(blob, objects=False)) for blob in (left, right))
    except UnreadObjectsError as unread:
        return [f"all (not opened, for it holds objects of {unread})"]
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
    """Equal in every bit, through containers; what is neither number, text nor tensor is compared pickled."""
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


# The weights of a checkpoint, whole, in one file, for everything that is not a training run.
#
# Guarantee: what is written was verified as it was read, the destination appears complete or not at all, and
# a checkpoint with anything wrong in it is refused. No process group is needed: DCP stores a sharded tensor
# as plain chunks, so one process can put together what any number of ranks saved.
#
# A safetensors file is written one tensor at a time, so that no more than the largest tensor has to fit into
# memory beside the reader's buffers. The format is a length, a JSON header and the raw bytes, which needs no
# library. A torch file is a dictionary that `torch.load(..., weights_only=True)` reads; it is put together in
# memory.


FORMATS = ("safetensors", "torch")

_SAFETENSORS_NAMES = {
    torch.bool: "BOOL", torch.uint8: "U8", torch.int8: "I8", torch.int16: "I16", torch.uint16: "U16",
    torch.int32: "I32", torch.uint32: "U32", torch.int64: "I64", torch.uint64: "U64", torch.float16: "F16",
    torch.bfloat16: "BF16", torch.float32: "F32", torch.float64: "F64", torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
}  # fmt: skip
_ALIGNMENT = 8
"""The header is padded so that the tensors begin at a multiple of this."""


class Exported(msgspec.Struct, frozen=True, kw_only=True):
    path: str
    format: str
    part: str
    tensors: int
    bytes: int
    """Of the file."""
    step: int
    run: str
    checkpoint: str
    manifest: str
    """Digest of the manifest of what was exported."""


def export(directory: Path, out: Path, *, part: str, form: str, overwrite: bool = False) -> Exported:
    """Write the tensors of one part of a checkpoint to `out`, under the names they have in that part."""
    if form not in FORMATS:
        raise UsageError(f"there is no format {form!r}; choose {' or '.join(FORMATS)}")
    with reading(directory):
        return _export(directory, out, part, form, overwrite=overwrite)


def _export(directory: Path, out: Path, part: str, form: str, *, overwrite: bool) -> Exported:
    manifest, digest = _sound(directory)
    _check_destination(directory, out, overwrite=overwrite)
    reader = VerifyingReader(directory, manifest)
    entries = _entries(reader, manifest, part, directory)
    about = {
        "format": "pt",
        "step": str(manifest.step),
        "run": manifest.run,
        "checkpoint": manifest.id,
        "manifest": digest,
    }
    try:
        with _appearing(out) as file:
            if form == "safetensors":
                _write_safetensors(file, reader, part, entries, about)
            else:
                tensors = {name: read_entry(reader, f"{part}.{name}") for name in entries}
                torch.save(tensors, file)
            reader.verify_rest(reader.shard_paths())
    except CheckpointError as error:
        if is_gone(directory):
            raise UsageError(f"{no_such(directory)}; nothing was exported") from error
        raise CheckpointError(f"{directory} is not sound, nothing was exported: {error}") from error
    except OSError as error:
        raise HoldfastError(
            f"cannot write {out}: {error.strerror or error}; nothing was left there"
        ) from error
    return Exported(
        path=str(out),
        format=form,
        part=part,
        tensors=len(entries),
        bytes=out.stat().st_size,
        step=manifest.step,
        run=manifest.run,
        checkpoint=manifest.id,
        manifest=digest,
    )


def read_entry(reader: VerifyingReader, name: str) -> torch.Tensor:
    """One stored tensor, put together from its chunks and verified, on the CPU."""
    entry = reader.read_metadata().state_dict_metadata[name]
    assert isinstance(entry, TensorStorageMetadata)
    whole = torch.empty(entry.size, dtype=entry.properties.dtype)
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="torch.distributed is disabled", category=UserWarning)
            dcp_load({name: whole}, storage_reader=reader, planner=DefaultLoadPlanner(), no_dist=True)
    except CheckpointException as error:
        cause = next(iter(error.failures.values()))[0]
        raise cause from error
    return whole


def _sound(directory: Path) -> tuple[Manifest, str]:
    """The manifest, after the cheap checks; every byte is checked later, as it is read."""
    inspection = verify(directory, files=[METADATA])
    if inspection.problems and is_gone(directory):
        raise UsageError(f"{no_such(directory)}; nothing was exported")
    if inspection.problems:
        told = "\n".join(f"  {problem}" for problem in inspection.problems)
        raise CheckpointError(f"{directory} is not sound, nothing was exported:\n{told}")
    if inspection.manifest is None:
        raise UsageError(
            f"{directory} has no manifest (holdfast.json), so its bytes cannot be verified; "
            "read a plain DCP directory with torch.distributed.checkpoint"
        )
    return inspection.manifest, inspection.manifest_digest


def _check_destination(directory: Path, out: Path, *, overwrite: bool) -> None:
    check_output(out, overwrite=overwrite)
    if out.parent.resolve().is_relative_to(directory.resolve()):
        raise UsageError(
            f"{out} lies inside the checkpoint, which must never be changed; choose another place"
        )


def _entries(
    reader: VerifyingReader, manifest: Manifest, part: str, directory: Path
) -> dict[str, TensorStorageMetadata]:
    """The part's tensors by their names within it."""
    stored = reader.read_metadata().state_dict_metadata
    prefix = f"{part}."
    found = {
        name.removeprefix(prefix): entry
        for name, entry in stored.items()
        if name.startswith(prefix)
        and part != OWN
        and isinstance(entry, TensorStorageMetadata)
        and not name.startswith(prefix + LOOSE)
    }
    if found:
        return found
    with_tensors = sorted(
        name for name in manifest.parts if any(key.startswith(f"{name}.") for key in stored)
    )
    why = "it holds no tensors of its own" if part in manifest.parts else "there is no such part"
    choice = ", ".join(with_tensors) or "none"
    raise UsageError(f"{directory}: cannot export {part!r}: {why}. Parts with tensors: {choice}")


@contextlib.contextmanager
def _appearing(out: Path) -> Iterator[BinaryIO]:
    """A file that takes its name once it is complete and on disk; after a failure there is nothing."""
    temporary = out.with_name(f".{out.name}.{uuid.uuid4().hex[:12]}.tmp")
    try:
        with temporary.open("xb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, out)
    except BaseException:
        with contextlib.suppress(OSError):
            temporary.unlink()
        raise
    fsync_dir(out.parent)


def _write_safetensors(
    file: BinaryIO,
    reader: VerifyingReader,
    part: str,
    entries: dict[str, TensorStorageMetadata],
    about: dict[str, str],
) -> None:
    for name, entry in entries.items():
        dtype = entry.properties.dtype
        if dtype not in _SAFETENSORS_NAMES:
            raise UsageError(
                f"{part}.{name} is {dtype}, which safetensors has no word for; use --format torch"
            )
    # Widest dtype first, so that every tensor is aligned to its own width without gaps, which are forbidden.
    order = sorted(entries, key=lambda name: (-entries[name].properties.dtype.itemsize, name))
    header: dict[str, object] = {"__metadata__": about}
    at = 0
    for name in order:
        entry = entries[name]
        end = at + entry.size.numel() * entry.properties.dtype.itemsize
        header[name] = {
            "dtype": _SAFETENSORS_NAMES[entry.properties.dtype],
            "shape": list(entry.size),
            "data_offsets": [at, end],
        }
        at = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % _ALIGNMENT)
    file.write(len(text).to_bytes(8, "little") + text)
    for name in order:
        tensor = read_entry(reader, f"{part}.{name}").reshape(-1)
        if tensor.numel():
            file.write(tensor.view(torch.uint8).numpy().data)
