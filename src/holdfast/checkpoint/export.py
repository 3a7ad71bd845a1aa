"""The weights of a checkpoint, whole, in one file or a few, for everything that is not a training run.

Guarantee: what is written was verified as it was read, the destination appears complete or not at all, and a
checkpoint with anything wrong in it is refused. No process group is needed: DCP stores a sharded tensor as
plain chunks, so one process can put together what any number of ranks saved.

A safetensors file is written one tensor at a time, so that only the largest tensor has to fit into memory,
besides the reader's buffers. The format is a length, a JSON header and the raw bytes, which needs no
library. Several of them have an index, as Hugging Face's libraries expect of large models. A torch file is a
dictionary that `torch.load(..., weights_only=True)` reads; it is put together in memory.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import shutil
import uuid
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import BinaryIO, NamedTuple, cast

import msgspec
import torch
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load as dcp_load

from holdfast.base import check_output, fsync_dir, write_durable
from holdfast.checkpoint.choose import VerifyingReader
from holdfast.checkpoint.foreign import (
    ForeignError,
    Recognised,
    examine,
    read_contents,
    recognise,
    values_of,
)
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


def export_weights(
    directory: Path,
    out: Path,
    *,
    part: str,
    form: str,
    overwrite: bool = False,
    shard_bytes: int | None = None,
) -> Exported:
    """Write the tensors of one part of a checkpoint to `out`, under the names they have in that part.

    With `shard_bytes`, `out` is a new directory with safetensors files of at most that size (a tensor that is
    larger has one of its own) and the index that Hugging Face's libraries read.
    """
    if form not in FORMATS:
        raise UsageError(f"there is no format {form!r}; choose {' or '.join(FORMATS)}")
    if shard_bytes is not None and form != "safetensors":
        raise UsageError("only safetensors have an index of several files; leave out the shard size")
    with reading(directory):
        return _export(directory, out, part, form, overwrite=overwrite, shard_bytes=shard_bytes)


def _export(
    directory: Path, out: Path, part: str, form: str, *, overwrite: bool, shard_bytes: int | None
) -> Exported:
    source = _source(directory, part)
    _check_destination(directory, out, overwrite=overwrite, as_directory=shard_bytes is not None)
    try:
        if shard_bytes is not None:
            _write_sharded(out, source, shard_bytes)
        else:
            with _appearing(out) as file:
                if form == "safetensors":
                    _write_safetensors(file, source, list(source.tensors))
                else:
                    torch.save({name: source.read(name) for name in source.tensors}, file)
                source.finish()
    except CheckpointError as error:
        if is_gone(directory):
            raise UsageError(f"{no_such(directory)}; nothing was exported") from error
        raise CheckpointError(f"{directory} is not sound, nothing was exported: {error}") from error
    except OSError as error:
        raise HoldfastError(
            f"cannot write {out}: {error.strerror or error}; nothing was left there"
        ) from error
    written = [out] if out.is_file() else sorted(out.iterdir())
    about = source.about
    return Exported(
        path=str(out),
        format=form,
        part=part,
        tensors=len(source.tensors),
        bytes=sum(path.stat().st_size for path in written),
        step=int(about["step"]),
        run=about.get("run", ""),
        checkpoint=about.get("checkpoint", directory.name),
        manifest=about.get("manifest", ""),
    )


class _Weights(NamedTuple):
    """What is exported: a part's tensors, by the names that they have in it."""

    tensors: dict[str, tuple[torch.dtype, tuple[int, ...]]]
    read: Callable[[str], torch.Tensor]
    finish: Callable[[], object]
    """Checks what was not read yet; nothing is left behind if it raises."""
    about: dict[str, str]


def _source(directory: Path, part: str) -> _Weights:
    foreign = recognise(directory)
    if foreign is not None:
        return _foreign_source(foreign, part)
    manifest, digest = _sound(directory)
    reader = VerifyingReader(directory, manifest)
    entries = _entries(reader, manifest, part, directory)
    return _Weights(
        {name: (entry.properties.dtype, tuple(entry.size)) for name, entry in entries.items()},
        lambda name: read_entry(reader, f"{part}.{name}"),
        lambda: reader.verify_rest(reader.shard_paths()),
        {
            "format": "pt",
            "step": str(manifest.step),
            "run": manifest.run,
            "checkpoint": manifest.id,
            "manifest": digest,
        },
    )


def _foreign_source(foreign: Recognised, part: str) -> _Weights:
    """Of another project's checkpoint: it is read to its check sums and its values are looked at, no more."""
    inspection, _ = examine(foreign)
    if inspection.problems:
        told = "\n".join(f"  {problem}" for problem in inspection.problems)
        raise CheckpointError(f"{foreign.path} is not sound, nothing was exported:\n{told}")
    try:
        contents = read_contents(foreign)
    except ForeignError as error:
        raise CheckpointError(f"{foreign.path} is not sound, nothing was exported: {error}") from error
    found = contents.parts.get(part)
    if found is None or not found.tensors:
        choice = ", ".join(name for name, one in contents.parts.items() if one.tensors) or "none"
        raise UsageError(f"{foreign.path}: cannot export {part!r}. Parts with weights: {choice}")
    if found.of_ranks > 1:
        raise UsageError(
            f"{foreign.path}: each of {found.of_ranks} ranks keeps {part} for itself, so one rank's may be a "
            f"part of the whole. Begin a run of {found.of_ranks} ranks with checkpoint.resume_from, and "
            "export what it saves"
        )
    tensors = found.tensors
    return _Weights(
        {name: (getattr(torch, one.dtype), one.shape) for name, one in tensors.items()},
        lambda name: cast(torch.Tensor, values_of(tensors[name], name)),
        lambda: None,
        {"format": "pt", "step": str(contents.step)},
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


def _check_destination(directory: Path, out: Path, *, overwrite: bool, as_directory: bool = False) -> None:
    if as_directory and (out.exists() or out.is_symlink()):
        raise UsageError(
            f"{out} exists; give a directory that does not, which is made when all of it is written"
        )
    if as_directory and not out.parent.is_dir():
        raise UsageError(f"{out.parent} is no directory; make it first")
    if not as_directory:
        check_output(out, overwrite=overwrite)
    if directory.is_dir() and out.parent.resolve().is_relative_to(directory.resolve()):
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


def _write_sharded(out: Path, source: _Weights, most: int) -> None:
    """Files of at most `most` bytes of values, and their index, in a directory that appears whole."""
    files: list[list[str]] = [[]]
    held = 0
    for name, (dtype, shape) in source.tensors.items():
        size = math.prod(shape) * dtype.itemsize
        if files[-1] and held + size > most:
            files.append([])
            held = 0
        files[-1].append(name)
        held += size
    temporary = out.with_name(f".{out.name}.{uuid.uuid4().hex[:12]}.tmp")
    temporary.mkdir()
    try:
        placed: dict[str, str] = {}
        for number, names in enumerate(files, 1):
            alone = len(files) == 1
            path = "model.safetensors" if alone else f"model-{number:05}-of-{len(files):05}.safetensors"
            with (temporary / path).open("xb") as file:
                _write_safetensors(file, source, names)
                file.flush()
                os.fsync(file.fileno())
            placed |= dict.fromkeys(names, path)
        source.finish()
        if len(files) > 1:
            total = sum(math.prod(shape) * dtype.itemsize for dtype, shape in source.tensors.values())
            index = {"metadata": {"total_size": total}, "weight_map": placed}
            text = json.dumps(index, indent=2).encode()
            write_durable(temporary / "model.safetensors.index.json", text)
        fsync_dir(temporary)
        os.rename(temporary, out)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise
    fsync_dir(out.parent)


def _write_safetensors(file: BinaryIO, source: _Weights, names: list[str]) -> None:
    entries = {name: source.tensors[name] for name in names}
    for name, (dtype, _) in entries.items():
        if dtype not in _SAFETENSORS_NAMES:
            raise UsageError(f"{name} is {dtype}, for which safetensors has no name; use --format torch")
    # Widest dtype first, so that every tensor is aligned to its own width without gaps, which are forbidden.
    order = sorted(entries, key=lambda name: (-entries[name][0].itemsize, name))
    header: dict[str, object] = {"__metadata__": source.about}
    at = 0
    for name in order:
        dtype, shape = entries[name]
        end = at + math.prod(shape) * dtype.itemsize
        header[name] = {
            "dtype": _SAFETENSORS_NAMES[dtype],
            "shape": list(shape),
            "data_offsets": [at, end],
        }
        at = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % _ALIGNMENT)
    file.write(len(text).to_bytes(8, "little") + text)
    for name in order:
        tensor = source.read(name).reshape(-1)
        if tensor.numel():
            file.write(tensor.contiguous().view(torch.uint8).numpy().data)
