"""The weights of a checkpoint, whole, in one file, for everything that is not a training run.

Guarantee: what is written was verified as it was read, the destination appears complete or not at all, and a
checkpoint with anything wrong in it is refused. No process group is needed: DCP stores a sharded tensor as
plain chunks, so one process can put together what any number of ranks saved.

A safetensors file is written one tensor at a time, so that only the largest tensor has to fit into memory,
besides the reader's buffers. The format is a length, a JSON header and the raw bytes, which needs no
library. A torch file is a dictionary that `torch.load(..., weights_only=True)` reads; it is put together in
memory.
"""

from __future__ import annotations

import contextlib
import json
import os
import uuid
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

import msgspec
import torch
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load as dcp_load

from holdfast.base import check_output, fsync_dir
from holdfast.checkpoint.choose import VerifyingReader
from holdfast.checkpoint.format import METADATA, Manifest, verify
from holdfast.checkpoint.read_back import is_gone, no_such, reading
from holdfast.checkpoint.state import LOOSE, OWN
from holdfast.errors import CheckpointError, HoldfastError, UsageError

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
    """Size of the file."""
    step: int
    run: str
    checkpoint: str
    manifest: str
    """Digest of the manifest of what was exported."""


def export_weights(directory: Path, out: Path, *, part: str, form: str, overwrite: bool = False) -> Exported:
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
        problems = "\n".join(f"  {problem}" for problem in inspection.problems)
        raise CheckpointError(f"{directory} is not sound, nothing was exported:\n{problems}")
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
    """The part's tensors, by their names within the part."""
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
    """A file that gets its name only once it is complete and on disk; after a failure nothing is left."""
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
                f"{part}.{name} is {dtype}, for which safetensors has no name; use --format torch"
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
