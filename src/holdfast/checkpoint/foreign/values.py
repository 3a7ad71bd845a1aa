"""Values that no digest vouches for: whether they are whole, and whether they are numbers.

Guarantee: reads only, follows no link out of a checkpoint, unpickles nothing, needs no torch. What can be
known is looked at: the check sums that torch.save puts into every record, that each tensor has as many bytes
as it should, and that its values are numbers. A NaN, or an infinity above zero, is no value that training
goes on from. One below zero is how masks are written, so it is told and no fault.
"""

from __future__ import annotations

import math
import os
import stat
import zipfile
from collections.abc import Iterator
from typing import TYPE_CHECKING, NamedTuple

from holdfast.base import escaped
from holdfast.checkpoint.foreign.archive import NOT_AN_ARCHIVE, WIDTHS, ZIP, Slice
from holdfast.checkpoint.format import (
    METADATA,
    READ_SIZE,
    Inspection,
    MetadataError,
    Progress,
    Reason,
    StorageEntry,
    StorageKey,
    StoredMetadata,
    open_beneath,
    show_key,
)
from holdfast.checkpoint.format import metadata as metadatas

if TYPE_CHECKING:  # imported where values are looked at: a look at names alone must not wait for it
    import numpy as np
    import numpy.typing as npt

NAMED = 3
"""Tensors with values that are no numbers that are named one by one."""


class Values(NamedTuple):
    """What the items of a checkpoint without digests hold."""

    items: int = 0
    unread: int = 0
    """Items of a form that carries no check sum, or that is not known here."""
    notes: list[str] = []  # noqa: RUF012 - a default that nobody changes


def check_values(inspection: Inspection, progress: Progress | None = None) -> Values:
    """Read every item of a plain DCP directory whose structure is sound; problems are added to it.

    A NaN, or an infinity above zero, is no value that training goes on from. One below zero is how masks are
    written, so it is told and no fault.
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
                for key, entry in sorted(stored, key=lambda one: one[1].offset):
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
        detail = f"{len(odd)} of its tensors: {few(odd)}"
        inspection.add(Reason.NOT_FINITE, ".", f"there are values that are not numbers in {detail}")
    told = [f"values of minus infinity, as masks have them, in {few(masks)}"] if masks else []
    return Values(items, unread, told)


def few(names: list[str]) -> str:
    shown = ", ".join(escaped(name, 120) for name in names[:NAMED])
    return f"{shown} and {len(names) - NAMED} more" if len(names) > NAMED else shown


class ValueLook(NamedTuple):
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

    def look(self, inspection: Inspection) -> ValueLook:
        entry = self._entry
        where = f"{show_key(self._key)} at bytes {entry.offset}–{entry.offset + entry.length}"
        if os.pread(self._fd, len(ZIP), entry.offset) != ZIP:
            return ValueLook()
        odd = masked = False
        held = 0
        try:
            with zipfile.ZipFile(Slice(self._fd, entry.offset, entry.length)) as archive:
                for record in archive.infolist():
                    if record.compress_type != zipfile.ZIP_STORED:
                        raise zipfile.BadZipFile("a record is compressed, which torch.save never does")
                    values = "/data/" in f"/{record.filename}"
                    for block in blocks(archive, record):
                        held += len(block) if values else 0
                        if values and self._dtype:
                            found = not_finite(self._dtype, block)
                            odd, masked = odd or found.odd, masked or found.masked
        except NOT_AN_ARCHIVE as error:
            inspection.add(
                Reason.ALTERED, entry.path, f"{where} is not what was written: {escaped(str(error))}"
            )
            return ValueLook(checked=True)
        width = WIDTHS.get(self._dtype)
        if self._elements is not None and width is not None and held != self._elements * width:
            expected = f"expected {self._elements * width} bytes of values, found {held}"
            inspection.add(Reason.INCOMPLETE, entry.path, f"{where}: {expected}")
        return ValueLook(checked=True, odd=odd, masked=masked)


def blocks(archive: zipfile.ZipFile, record: zipfile.ZipInfo) -> Iterator[bytes]:
    """A record in pieces; its check sum is compared by the library when the last one was read."""
    with archive.open(record) as stream:
        while block := stream.read(READ_SIZE):
            yield block


# --- numbers -----------------------------------------------------------------------------------------------

_FLOATS = {
    "float64": ("<u8", 0x7FF0_0000_0000_0000), "complex128": ("<u8", 0x7FF0_0000_0000_0000),
    "float32": ("<u4", 0x7F80_0000), "complex64": ("<u4", 0x7F80_0000),
    "float16": ("<u2", 0x7C00), "complex32": ("<u2", 0x7C00), "bfloat16": ("<u2", 0x7F80),
    "float8_e5m2": ("u1", 0x7C),
}  # fmt: skip
"""How a value is stored, and the exponent that only NaN and the infinities have."""


def not_finite(dtype: str, block: bytes) -> ValueLook:
    """Whether there is a NaN or an infinity above zero (`odd`), or one below (`masked`)."""
    import numpy as np

    if dtype == "float8_e4m3fn":  # it has no infinities, and one NaN
        return ValueLook(odd=bool(((np.frombuffer(block, "u1") & 0x7F) == 0x7F).any()))
    if dtype not in _FLOATS:
        return ValueLook()
    form, exponent = _FLOATS[dtype]
    width = np.dtype(form).itemsize
    bits: npt.NDArray[np.unsignedinteger] = np.frombuffer(block[: len(block) // width * width], form)
    special = bits[(bits & exponent) == exponent]
    if not special.size:
        return ValueLook()
    below = special == ((1 << (8 * width - 1)) | exponent)
    return ValueLook(odd=not bool(below.all()), masked=bool(below.any()))
