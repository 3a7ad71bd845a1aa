"""What is wrong with a checkpoint of another project's, as far as its form can show it.

Guarantee: reads only, unpickles nothing, needs no torch; whatever is wrong becomes a `Problem`, never an
exception. Such a checkpoint has no digests: sizes are held against what its metadata promises, archives are
read to their check sums, steps and counts that are written twice are compared, and values must be numbers.
That makes it complete and plausible; its bytes stay unverified until the first save after it.

Of values, what can be known is looked at: the check sums that torch.save puts into every record, that each
tensor has as many bytes as it should, and that its values are numbers. A NaN, or an infinity above zero, is
no value that training goes on from. One below zero is how masks are written, so it is told and no fault.
"""

from __future__ import annotations

import math
import os
import stat
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from holdfast.base import escaped
from holdfast.checkpoint.foreign.archive import (
    NOT_AN_ARCHIVE,
    WIDTHS,
    ZIP,
    ArchiveError,
    Slice,
    StoredTensor,
    open_file,
    read_archive,
)
from holdfast.checkpoint.foreign.contents import Contents, ForeignError, read_contents, weights_of
from holdfast.checkpoint.foreign.recognition import (
    WEIGHTS,
    ForeignLayout,
    Recognised,
    rank_files,
    read_json,
)
from holdfast.checkpoint.format import (
    METADATA,
    READ_SIZE,
    Inspection,
    MetadataError,
    Problem,
    Progress,
    Reason,
    Record,
    StorageEntry,
    StorageKey,
    StoredMetadata,
    check_structure,
    open_beneath,
    show_key,
)
from holdfast.checkpoint.format import metadata as metadatas

if TYPE_CHECKING:  # imported where values are looked at: a look at names alone must not wait for it
    import numpy as np
    import numpy.typing as npt

UNVERIFIED = "it has no digests: its bytes are unverified, and the first save after it makes them verified"
_DCP = (ForeignLayout.DCP, ForeignLayout.TORCHTITAN, ForeignLayout.KEMPNER_FORGE, ForeignLayout.MEGATRON)
_ASIDE = ("callbacks", "loops")
"""Where Lightning keeps numbers that are no state of training; a best score begins as infinity."""


def examine(
    recognised: Recognised, *, quick: bool = False, progress: Progress | None = None
) -> tuple[Inspection, list[str]]:
    """What is wrong with it, and what was looked at: all that can be, or (`quick`) only names and sizes."""
    inspection = Inspection(recognised.path, digests_missing=True)
    notes: list[str] = []
    if recognised.layout in _DCP:
        notes += _look_into_dcp(recognised, inspection, quick=quick, progress=progress)
    if inspection.sound:
        files = _Files(inspection, recognised.path, progress)
        if recognised.layout in (ForeignLayout.HF_MODEL, ForeignLayout.HF_TRAINER):
            _look_into_tensor_files(recognised, files, quick=quick)
        for path in _archives(recognised):
            files.archive(path, quick=quick)
        notes += files.notes()
    if inspection.sound:
        notes = [*_cross_check(recognised, inspection), *notes]
    what = "complete by its metadata" if recognised.layout in _DCP else "its files are whole"
    how = "no value was looked at" if quick else "its values are numbers"
    told = [f"{recognised.layout}: {what}; {how}; {UNVERIFIED}"]
    return inspection, [*told, *notes] if inspection.sound else []


def _archives(recognised: Recognised) -> list[Path]:
    """The files of torch.save that belong to it."""
    path = recognised.path
    if recognised.layout in (ForeignLayout.LIGHTNING, ForeignLayout.TORCH_FILE):
        return [path]
    if recognised.layout is ForeignLayout.MEGATRON_LOCAL:
        return list(rank_files(path).values())
    named = {
        ForeignLayout.MEGATRON: ["common.pt"],
        ForeignLayout.KEMPNER_FORGE: ["train_state.pt"],
        ForeignLayout.HF_TRAINER: ["optimizer.pt", "scheduler.pt", "scaler.pt", "rng_state.pth"],
    }.get(recognised.layout, [])
    found = [
        path / name for name in named if (path / name).exists() or name in ("common.pt", "train_state.pt")
    ]
    if recognised.layout is ForeignLayout.HF_TRAINER:
        found += sorted(path.glob("rng_state_*.pth"))
    if recognised.layout in (ForeignLayout.HF_TRAINER, ForeignLayout.HF_MODEL) and path.is_dir():
        first = next((name for name in WEIGHTS if (path / name).exists()), "")
        if first.startswith("pytorch_model.bin"):
            found += sorted(path.glob("pytorch_model*.bin"))
    return found


def _look_into_dcp(
    recognised: Recognised, inspection: Inspection, *, quick: bool, progress: Progress | None
) -> list[str]:
    path = recognised.path
    stages = [path]
    if recognised.layout is ForeignLayout.KEMPNER_FORGE and not (path / METADATA).exists():
        stages = sorted(one for one in path.glob("pp*") if one.is_dir()) or [path]
    notes: list[str] = []
    for stage in stages:
        found = check_structure(stage)
        if found.sound and not quick:
            values = check_values(found, progress)
            notes.append(f"the check sums of {values.items} items match")
            if values.unread:
                notes.append(f"{values.unread} items have no check sum that is known here")
            notes += values.notes
        where = "" if stage == path else f"{stage.name}/"
        inspection.problems += [Problem(p.reason, f"{where}{p.path}", p.detail) for p in found.problems]
        inspection.files += found.files
        inspection.size += found.size
    if len(stages) > 1:
        numbers = {int(one.name[2:]) for one in stages if one.name[2:].isdecimal()}
        for lost in sorted(set(range(max(numbers, default=-1) + 1)) - numbers):
            inspection.add(
                Reason.MISSING, f"pp{lost}", "a stage of the pipeline between others that are here"
            )
    return notes


class _Files:
    """Looks into the files of one checkpoint, and notes what is odd."""

    def __init__(self, inspection: Inspection, root: Path, progress: Progress | None) -> None:
        self._inspection = inspection
        self._root = root
        self._progress = progress
        self._odd: list[str] = []
        self._masks: list[str] = []

    def add(self, path: Path | str, why: str, reason: Reason = Reason.INCOMPLETE) -> None:
        self._inspection.add(reason, self.name(path), escaped(why, 1000))

    def name(self, path: Path | str) -> str:
        if isinstance(path, str):
            return path
        return path.name if path == self._root or self._root.is_file() else str(path.relative_to(self._root))

    def count(self, path: Path) -> None:
        self._inspection.files += 1
        self._inspection.size += path.stat().st_size

    def archive(self, path: Path, *, quick: bool) -> None:
        """A file of torch.save: its pickle, its records' check sums, and that its values are numbers."""
        try:
            self.count(path)
            found = read_archive(path)
            if quick:
                return
            kinds = {one.key: one.dtype for one in _weighty(found.tree)}
            with open_file(path) as opened:
                size = os.fstat(opened.number).st_size
                with zipfile.ZipFile(Slice(opened.number, 0, size)) as zipped:
                    for record in zipped.infolist():
                        key = record.filename.partition("/data/")[2]
                        self._values(
                            kinds.get(key, ""), blocks(zipped, record), f"{self.name(path)}: data/{key}"
                        )
        except FileNotFoundError:
            self.add(path, "expected a file, found none", Reason.MISSING)
        except ArchiveError as error:
            empty = path.exists() and path.stat().st_size == 0
            self.add(path, str(error), Reason.EMPTY if empty else Reason.UNREADABLE_METADATA)
        except NOT_AN_ARCHIVE as error:
            self.add(path, f"not what was written: {error}", Reason.ALTERED)
        except OSError as error:
            self.add(path, f"cannot be read: {error.strerror or error}", Reason.UNREADABLE)

    def tensors(self, path: Path, tensors: list[tuple[str, StoredTensor]]) -> None:
        """The values of a safetensors file, which has no check sums."""
        try:
            with open_file(path) as opened:
                for name, one in sorted(tensors, key=lambda item: item[1].start):
                    self._values(one.dtype, _stretch(opened.number, one.start, one.bytes), name)
        except (ArchiveError, OSError) as error:
            self.add(path, f"cannot be read: {getattr(error, 'strerror', None) or error}", Reason.UNREADABLE)

    def _values(self, dtype: str, boxes: Iterator[bytes], name: str) -> None:
        odd = masked = False
        for block in boxes:
            if self._progress is not None:
                self._progress(len(block))
            if dtype:
                found = not_finite(dtype, block)
                odd, masked = odd or found.odd, masked or found.masked
        if odd:
            self._odd.append(name)
        elif masked:
            self._masks.append(name)

    def notes(self) -> list[str]:
        if self._odd:
            detail = (
                f"there are values that are not numbers in {len(self._odd)} of its tensors: {few(self._odd)}"
            )
            self._inspection.add(Reason.NOT_FINITE, ".", detail)
        return [f"values of minus infinity, as masks have them, in {few(self._masks)}"] if self._masks else []


def _stretch(fd: int, start: int, length: int) -> Iterator[bytes]:
    end = start + length
    while start < end:
        block = os.pread(fd, min(READ_SIZE, end - start), start)
        if not block:
            return
        start += len(block)
        yield block


def _weighty(tree: Any, *, top: bool = True) -> Iterator[StoredTensor]:
    """The tensors in a tree that training goes on from."""
    if isinstance(tree, StoredTensor):
        yield tree
    elif isinstance(tree, dict):
        for key, value in tree.items():
            if not top or key not in _ASIDE:
                yield from _weighty(value, top=False)
    elif isinstance(tree, list | tuple):
        for value in tree:
            yield from _weighty(value, top=False)
    elif isinstance(tree, Record):
        for value in (tree.state, tree.arguments, tree.items):
            yield from _weighty(value, top=False)


def _look_into_tensor_files(recognised: Recognised, files: _Files, *, quick: bool) -> None:
    path = recognised.path
    if path.is_file():
        try:
            tensors = read_contents(recognised).parts["model"].tensors
        except ForeignError as error:
            files.add(path, error.why)
            return
        files.count(path)
        stored = [
            (name, StoredTensor(path, one.dtype, one.shape, one.boxes[0].start, one.boxes[0].stride or ()))
            for name, one in tensors.items()
        ]
        if not quick:
            files.tensors(path, stored)
        return
    found, problems = weights_of(path)
    for name, why in problems:
        missing = name != "." and not (path / name).exists()
        files.add(name, why, Reason.MISSING if missing else Reason.INCOMPLETE)
    by_file: dict[Path, list[tuple[str, StoredTensor]]] = {}
    for name, one in found.items():
        by_file.setdefault(one.file, []).append((name, one))
    for file, mine in sorted(by_file.items()):
        if file.suffix == ".safetensors":
            files.count(file)
            if not quick:
                files.tensors(file, mine)


def _cross_check(recognised: Recognised, inspection: Inspection) -> list[str]:
    """What is written in two places must be the same in both."""
    try:
        found = read_contents(recognised, _lowest(recognised), quick=True)
    except ForeignError as error:
        inspection.add(Reason.INCOMPLETE, error.path, escaped(error.why, 1000))
        return []
    named = recognised.step
    if named is not None and found.step != named and not recognised.path.is_dir():
        found.notes.append(f"it is of step {found.step}, whatever its name says")
    elif named is not None and found.step != named:
        detail = f"it is of step {found.step}, and is named {escaped(recognised.name)}"
        inspection.add(Reason.WRONG_NAME, ".", detail)
    if recognised.layout is ForeignLayout.MEGATRON:
        _check_megatron(recognised, found, inspection)
    if recognised.layout is ForeignLayout.HF_TRAINER:
        _check_trainer(recognised, found, inspection)
    told = [f"holds {', '.join(_words(found))}"]
    return told + [escaped(note, 500) for note in found.notes]


def _lowest(recognised: Recognised) -> int:
    return (
        min(rank_files(recognised.path), default=0)
        if recognised.layout is ForeignLayout.MEGATRON_LOCAL
        else 0
    )


def _words(found: Contents) -> Iterator[str]:
    for name, part in found.parts.items():
        count = f" ({len(part.tensors)} tensors)" if part.tensors else ""
        of = f" (of {part.of_ranks} rank{'s' * (part.of_ranks != 1)})" if part.of_ranks else ""
        yield f"{escaped(name, 80)}{count}{of}"


def _check_megatron(recognised: Recognised, found: Contents, inspection: Inspection) -> None:
    """`common.pt` against the tensors beside it, and against `metadata.json`."""
    about = read_json(recognised.path / "metadata.json")
    if not about:
        inspection.add(
            Reason.MISSING, "metadata.json", "Megatron writes it last: the save was cut off, or it is lost"
        )
    elif about.get("sharded_backend") != "torch_dist" or about.get("common_backend", "torch") != "torch":
        saved = f"{about.get('sharded_backend')} and {about.get('common_backend')}"
        inspection.add(Reason.INCOMPLETE, "metadata.json", f"saved with {escaped(saved)}; torch_dist is read")
    optimizer = found.parts.get("optimizer")
    if optimizer is not None:
        state, groups = optimizer.tree["state"], optimizer.tree["param_groups"]
        if (state or optimizer.beside) and groups is None and _has_common_optimizer(recognised):
            detail = "the tensors of an optimizer are here, and its parameter groups are not"
            inspection.add(Reason.INCOMPLETE, "common.pt", detail)


def _has_common_optimizer(recognised: Recognised) -> bool:
    try:
        tree = read_archive(recognised.path / "common.pt").tree
    except (ArchiveError, OSError):
        return False
    return isinstance(tree, dict) and isinstance(tree.get("optimizer"), dict) and not tree["optimizer"]


def _check_trainer(recognised: Recognised, found: Contents, inspection: Inspection) -> None:
    path = recognised.path
    if not read_json(path / "trainer_state.json"):
        there = (path / "trainer_state.json").exists()
        reason = Reason.UNREADABLE_METADATA if there else Reason.MISSING
        inspection.add(
            reason, "trainer_state.json", "the Trainer writes it last: without it the step is not known"
        )
    if (found.world or 0) > 1:
        for rank in range(found.world or 0):
            if not (path / f"rng_state_{rank}.pth").exists():
                inspection.add(Reason.MISSING, f"rng_state_{rank}.pth", "and those of higher ranks are here")


# --- values that no digest vouches for ----------------------------------------------------------------------


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
