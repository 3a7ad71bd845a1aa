"""A directory of checkpoints that no run of ours keeps a record of: plain DCP, or what is left of a run.

Without a record there is no lineage, and no standing except what was written down beside a checkpoint;
without a manifest there are no digests. What can be checked is checked all the same: names, sizes and chunks
against `.metadata`; the check sums that torch.save puts into every item; that each tensor has as many bytes
as it should, and that its values are numbers.

Guarantee: reads only, follows no link, unpickles nothing, needs no torch.
"""

from __future__ import annotations

import io
import math
import os
import re
import stat
import struct
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from holdfast.base import escaped
from holdfast.checkpoint.format import (
    MANIFEST,
    MARKER,
    METADATA,
    READ_SIZE,
    Inspection,
    MetadataError,
    Progress,
    Reason,
    StorageEntry,
    StorageKey,
    StoredMetadata,
    check_structure,
    checkpoints_under,
    open_beneath,
    parse_name,
    show_key,
    verify,
)
from holdfast.checkpoint.format import metadata as metadatas
from holdfast.errors import UsageError

if TYPE_CHECKING:  # imported where values are looked at: a look at names alone must not wait for it
    import numpy as np
    import numpy.typing as npt

_STEP = re.compile(r"(?:[a-z_]*?(?:step|iter|iteration|checkpoint|ckpt|epoch))[-_]?(\d{1,12})(?:\D.*)?", re.I)
_ZIP = b"PK\x03\x04"
_CUT_SHORT = (
    zipfile.BadZipFile, NotImplementedError, RuntimeError, ValueError, EOFError, KeyError, struct.error,
)  # fmt: skip
"""What is raised by reading something that is not an archive, or only part of one."""
NAMED = 3
"""How many of the tensors with values that are not numbers are named."""


class Values(NamedTuple):
    """What the items of a checkpoint without digests hold."""

    items: int = 0
    unread: int = 0
    """Items in a format that has no check sum, or that is not known here."""
    notes: list[str] = []  # noqa: RUF012 - a default that nobody changes


def is_plain_root(directory: Path) -> bool:
    """Whether this holds checkpoints but no run: a directory of `step_*`, or itself one checkpoint."""
    if not directory.is_dir() or (directory / "run.json").exists():
        return False
    return is_checkpoint(directory) or (directory / MARKER).exists() or bool(directories(directory))


def is_checkpoint(directory: Path) -> bool:
    """Whether a directory is itself one checkpoint."""
    return any((directory / name).exists() for name in (MANIFEST, METADATA))


def directories(root: Path) -> list[Path]:
    """What is meant to be a checkpoint, the highest step first; a link does not count."""
    try:
        named = [
            entry
            for entry in root.iterdir()
            if _STEP.fullmatch(entry.name) and entry.is_dir() and not entry.is_symlink()
        ]
        found = {*named, *checkpoints_under(root)}
    except OSError as error:
        raise UsageError(
            f"the checkpoint root {root} cannot be read: {error.strerror or error}. "
            "Check its file system and your permissions, then try again"
        ) from error
    return sorted(found, key=lambda path: (step_of(path.name) or 0, path.name), reverse=True)


def step_of(name: str) -> int | None:
    """The step that a directory's name claims; None if it names none."""
    ours = parse_name(name)
    if ours is not None:
        return ours.step
    found = _STEP.fullmatch(name)
    return int(found[1]) if found else None


# --- one checkpoint ----------------------------------------------------------------------------------------


def inspect(
    path: Path, *, quick: bool = False, progress: Progress | None = None
) -> tuple[Inspection, list[str]]:
    """What is wrong with a checkpoint, and what was checked: all that can be, or only names and sizes."""
    inspection = check_structure(path)
    if inspection.problems:
        return inspection, []
    if inspection.manifest is not None:
        if quick:
            return inspection, ["names and sizes fit; digests were not read"]
        return verify(path, progress=progress), ["every digest matched"]
    if quick:
        return inspection, ["complete by its metadata; no value was looked at, and it has no digests"]
    values = check_values(inspection, progress)
    notes = [f"complete by its metadata; the check sums of {values.items} items match; it has no digests"]
    if values.unread:
        notes.append(f"{values.unread} items have no check sum that is known here, and were not read")
    return inspection, [*notes, *values.notes]


def check_values(inspection: Inspection, progress: Progress | None = None) -> Values:
    """Read every item of a plain DCP directory whose structure is sound; problems are added to it.

    Training cannot continue from a NaN or a positive infinity. A negative infinity is how masks are written,
    so it is reported but is not a fault.
    """
    try:
        meta = metadatas.read(inspection.directory)
    except MetadataError as error:
        inspection.add(Reason.UNREADABLE_METADATA, METADATA, escaped(str(error)))
        return Values()
    odd: list[str] = []
    masks: list[str] = []
    items = unread = 0
    by_path: dict[str, list[tuple[StorageKey, StorageEntry]]] = {}
    for key, entry in meta.storage.items():
        by_path.setdefault(entry.path, []).append((key, entry))
    for path, stored in sorted(by_path.items()):
        try:
            with open_beneath(inspection.directory, path) as file:
                if not stat.S_ISREG(os.fstat(file.number).st_mode):
                    inspection.add(Reason.NOT_A_FILE, path, "expected a regular file")
                    continue
                for key, entry in sorted(stored, key=lambda item: item[1].offset):
                    found = _Item(meta, key, entry, file.number).look(inspection)
                    items += found.checked
                    unread += not found.checked
                    odd += [show_key(key)] if found.odd else []
                    masks += [show_key(key)] if found.masked and not found.odd else []
                    if progress is not None:
                        progress(entry.length)
        except OSError as error:
            inspection.add(Reason.UNREADABLE, path, f"cannot be read: {error.strerror or error}")
    if odd:
        detail = f"{len(odd)} of its tensors: {_few(odd)}"
        inspection.add(Reason.NOT_FINITE, ".", f"there are values that are not numbers in {detail}")
    notes = [f"values of minus infinity, as masks have them, in {_few(masks)}"] if masks else []
    return Values(items, unread, notes)


def _few(names: list[str]) -> str:
    shown = ", ".join(escaped(name, 120) for name in names[:NAMED])
    return f"{shown} and {len(names) - NAMED} more" if len(names) > NAMED else shown


class _Look(NamedTuple):
    checked: bool = False
    odd: bool = False
    masked: bool = False


class _Item:
    """One tensor's chunk, or an object, as torch.save wrote it: an archive, each record with a check sum."""

    def __init__(self, meta: StoredMetadata, key: StorageKey, entry: StorageEntry, fd: int) -> None:
        self._key = key
        self._entry = entry
        self._fd = fd
        name, offsets = key
        tensor = meta.tensors.get(name) if offsets is not None else None
        self._dtype = tensor.dtype.removeprefix("torch.") if tensor is not None else ""
        sizes = dict(tensor.chunks).get(offsets or ()) if tensor is not None else None
        self._elements = math.prod(sizes) if sizes is not None else None

    def look(self, inspection: Inspection) -> _Look:
        entry = self._entry
        where = f"{show_key(self._key)} at bytes {entry.offset}–{entry.offset + entry.length}"
        if os.pread(self._fd, len(_ZIP), entry.offset) != _ZIP:
            return _Look()
        odd = masked = False
        held = 0
        try:
            with zipfile.ZipFile(_Slice(self._fd, entry.offset, entry.length)) as archive:
                for record in archive.infolist():
                    if record.compress_type != zipfile.ZIP_STORED:
                        raise zipfile.BadZipFile("a record is compressed, which torch.save never does")
                    values = "/data/" in f"/{record.filename}"
                    for block in _blocks(archive, record):
                        held += len(block) if values else 0
                        if values and self._dtype:
                            found = _not_finite(self._dtype, block)
                            odd, masked = odd or found.odd, masked or found.masked
        except _CUT_SHORT as error:
            inspection.add(
                Reason.ALTERED, entry.path, f"{where} is not what was written: {escaped(str(error))}"
            )
            return _Look(checked=True)
        width = _WIDTHS.get(self._dtype)
        if self._elements is not None and width is not None and held != self._elements * width:
            expected = f"expected {self._elements * width} bytes of values, found {held}"
            inspection.add(Reason.INCOMPLETE, entry.path, f"{where}: {expected}")
        return _Look(checked=True, odd=odd, masked=masked)


def _blocks(archive: zipfile.ZipFile, record: zipfile.ZipInfo) -> Iterator[bytes]:
    """A record in pieces; the library compares its check sum once the last piece was read."""
    with archive.open(record) as stream:
        while block := stream.read(READ_SIZE):
            yield block


class _Slice(io.RawIOBase):
    """A part of an open file, as a file of its own."""

    def __init__(self, fd: int, offset: int, length: int) -> None:
        self._fd = fd
        self._offset = offset
        self._length = length
        self._at = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._length}[whence]
        if base + offset < 0:
            raise ValueError("a place before the beginning")
        self._at = base + offset
        return self._at

    def read(self, size: int = -1) -> bytes:
        left = max(0, self._length - self._at)
        wanted = left if size < 0 else min(size, left)
        data = os.pread(self._fd, wanted, self._offset + self._at) if wanted else b""
        self._at += len(data)
        return data


# --- numbers -----------------------------------------------------------------------------------------------

_WIDTHS = {
    "float64": 8, "float32": 4, "float16": 2, "bfloat16": 2, "complex128": 16, "complex64": 8, "complex32": 4,
    "float8_e5m2": 1, "float8_e4m3fn": 1, "int64": 8, "int32": 4, "int16": 2, "int8": 1, "uint8": 1,
    "bool": 1, "uint16": 2, "uint32": 4, "uint64": 8,
}  # fmt: skip
_FLOATS = {
    "float64": ("<u8", 0x7FF0_0000_0000_0000), "complex128": ("<u8", 0x7FF0_0000_0000_0000),
    "float32": ("<u4", 0x7F80_0000), "complex64": ("<u4", 0x7F80_0000),
    "float16": ("<u2", 0x7C00), "complex32": ("<u2", 0x7C00), "bfloat16": ("<u2", 0x7F80),
    "float8_e5m2": ("u1", 0x7C),
}  # fmt: skip
"""How a value is stored, and the exponent that only NaN and the infinities have."""


def _not_finite(dtype: str, block: bytes) -> _Look:
    """Whether there is a NaN or a positive infinity (`odd`), or a negative one (`masked`)."""
    import numpy as np

    if dtype == "float8_e4m3fn":  # it has no infinities, and one NaN
        return _Look(odd=bool(((np.frombuffer(block, "u1") & 0x7F) == 0x7F).any()))
    if dtype not in _FLOATS:
        return _Look()
    form, exponent = _FLOATS[dtype]
    width = np.dtype(form).itemsize
    bits: npt.NDArray[np.unsignedinteger] = np.frombuffer(block[: len(block) // width * width], form)
    special = bits[(bits & exponent) == exponent]
    if not special.size:
        return _Look()
    below = special == ((1 << (8 * width - 1)) | exponent)
    return _Look(odd=not bool(below.all()), masked=bool(below.any()))
