"""Files of `torch.save` and of safetensors, and the items of DCP, read as data: nothing in them is executed.

Guarantee: reads only, needs no torch, and whatever is in a file comes out as plain values, `StoredTensor`s
that say where their bytes lie, and `Record`s for objects of any class. A record is never made into its
object; who needs the value refuses it by its class. What is no such file becomes an `ArchiveError` that says
what it is.

The form is torch's own since release 1.6: a zip whose records are stored as they are, with a pickle
(`data.pkl`) that refers to the tensors' bytes (`data/<key>`) by persistent ids. That of safetensors is eight
bytes of length, a JSON header and the raw values; that is less to read than a library is to depend on, and
it can be read without making a tensor. There too nothing is believed: every tensor's place is checked
against its shape, its type and the file's size, no two may overlap, and no byte may belong to none. What is
odd becomes a `TensorFileError` that says what.
"""

from __future__ import annotations

import contextlib
import io
import json
import math
import os
import stat
import struct
import zipfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from holdfast.base import OpenFile, escaped, read_regular
from holdfast.checkpoint.format import Name, PickleRefusedError, Record, Vocabulary, is_safe_path, read_pickle

ZIP = b"PK\x03\x04"
LEGACY = b"\x80\x02\x8a\nl\xfc\x9cF\xf9 j\xa8P\x19"
"""How a file of torch.save began before release 1.6, and still does without its zip form."""
SMALL = 64 * 1024
"""Bytes that are read at a time: a DCP directory can have very many small items."""
MAX_PICKLE_BYTES = 256 * 1024 * 1024
MAX_DIMENSIONS = 64
MAX_DEPTH = 200
"""Containers in containers."""
MAX_SPREAD = 16
"""How much larger than its bytes a pickle's tree may be where parts of it are shared, besides `ROOM`."""
ROOM = 4_000_000
MAX_REPEATED = 1 << 30
"""Bytes that the tensors of an archive may have beyond what is stored, as expanded ones have."""
NOT_AN_ARCHIVE = (
    zipfile.BadZipFile, NotImplementedError, RuntimeError, ValueError, EOFError, KeyError, struct.error,
)  # fmt: skip
"""What reading an archive raises that is none, or no whole one."""


WIDTHS = {
    "float64": 8, "float32": 4, "float16": 2, "bfloat16": 2, "complex128": 16, "complex64": 8, "complex32": 4,
    "float8_e5m2": 1, "float8_e4m3fn": 1, "int64": 8, "int32": 4, "int16": 2, "int8": 1, "uint8": 1,
    "bool": 1, "uint16": 2, "uint32": 4, "uint64": 8,
}  # fmt: skip
"""Bytes of one value, by torch's name of its type."""


class ArchiveError(Exception):
    """It is no file of torch.save that can be read as data; the message says why."""


class StoredTensor(NamedTuple):
    """Where a tensor's values lie."""

    file: Path
    dtype: str
    shape: tuple[int, ...]
    start: int
    """Byte of the file at which its first element lies."""
    stride: tuple[int, ...]
    key: str = ""
    """Its storage's, where several tensors can share one."""

    @property
    def bytes(self) -> int:
        """Of its values, were they put one after the other."""
        return math.prod(self.shape) * WIDTHS[self.dtype]


class _Storage(NamedTuple):
    dtype: str
    key: str
    elements: int


@dataclass
class Archive:
    """What one file holds."""

    file: Path
    tree: Any = None
    tensors: list[StoredTensor] = field(default_factory=list)
    """Every tensor in it, wherever it is in the tree."""


def read_archive(file: Path, *, start: int = 0, length: int | None = None) -> Archive:
    """Read what `torch.save` wrote to a file, or to a part of one; the values are left where they are."""
    with open_file(file) as opened:
        size = os.fstat(opened.number).st_size
        whole = size - start if length is None else length
        beginning = os.pread(opened.number, len(LEGACY), start)
        if not beginning:
            raise ArchiveError("it is empty")
        if beginning == LEGACY:
            raise ArchiveError(
                "it has the form that torch.save had before torch 1.6. Load it with torch where you trust "
                "it, and save it again"
            )
        if not beginning.startswith(ZIP):
            raise ArchiveError("it is no file of torch.save: it does not begin as one, or was cut off")
        part: io.RawIOBase | io.BytesIO = Slice(opened.number, start, whole)
        if whole <= SMALL:
            part = io.BytesIO(os.pread(opened.number, whole, start))
        try:
            with zipfile.ZipFile(part) as zipped:
                return _read(zipped, file, opened.number, start)
        except NOT_AN_ARCHIVE as error:
            raise ArchiveError(f"it is no whole archive: {escaped(str(error))}") from error
        except PickleRefusedError as error:
            raise ArchiveError(str(error)) from error


@contextlib.contextmanager
def open_file(file: Path) -> Iterator[OpenFile]:
    """A regular file, also behind a link: what people name is often one."""
    with OpenFile(file, os.O_RDONLY | os.O_NONBLOCK) as opened:
        if not stat.S_ISREG(os.fstat(opened.number).st_mode):
            raise ArchiveError("it is not a regular file")
        yield opened


def _read(zipped: zipfile.ZipFile, file: Path, fd: int, start: int) -> Archive:
    records = {info.filename.partition("/")[2]: info for info in zipped.infolist()}
    if "constants.pkl" in records:
        raise ArchiveError("it is a TorchScript program, which is code and no checkpoint")
    if "data.pkl" not in records:
        raise ArchiveError("it holds no data.pkl, which torch.save always writes")
    if any(info.compress_type != zipfile.ZIP_STORED for info in records.values()):
        raise ArchiveError("a record is compressed, which torch.save never does")
    if records["data.pkl"].file_size > MAX_PICKLE_BYTES:
        raise ArchiveError(
            f"its data.pkl has {records['data.pkl'].file_size} bytes, which is too much to read"
        )
    if "byteorder" in records and _is_other_order(zipped, records["byteorder"]):
        raise ArchiveError("its numbers are in another byte order than this machine's")
    archive = Archive(file)
    places = {name.removeprefix("data/"): info for name, info in records.items() if name.startswith("data/")}
    data = zipped.read(records["data.pkl"])
    archive.tree = read_pickle(data, _Calls(archive, places, fd, start).vocabulary())
    _check_tree(archive.tree, MAX_SPREAD * len(data) + ROOM)
    return archive


def _is_other_order(zipped: zipfile.ZipFile, info: zipfile.ZipInfo) -> bool:
    return info.file_size > SMALL or zipped.read(info) != b"little"


def _check_tree(tree: Any, most: int) -> None:
    """Refuse one that never ends, or that is out of all proportion once what is shared in it is spread out.

    Whoever goes through a tree later need not think of it.
    """
    sizes: dict[int, int] = {}
    """By its id, how many values are in a container; 0 while it is looked into."""

    def measure(value: Any, depth: int) -> int:
        if type(value) is Record:
            members: Any = (value.arguments, value.state, value.items)
        elif type(value) is dict:
            members = value.values()
        elif type(value) in (list, tuple):
            members = value
        else:
            return 1
        if (known := sizes.get(id(value))) is not None:
            if not known:
                raise ArchiveError("something in it contains itself")
            return known
        if depth > MAX_DEPTH:
            raise ArchiveError(f"it has more than {MAX_DEPTH} containers in each other")
        sizes[id(value)] = 0
        found = 1 + sum(measure(one, depth + 1) for one in members)
        if found > most:
            raise ArchiveError("what is shared in it would make far more than its bytes")
        sizes[id(value)] = found
        return found

    measure(tree, 0)


class _Calls:
    """Makes of a pickle's calls what they stand for, for the few that are data."""

    def __init__(self, archive: Archive, places: Mapping[str, zipfile.ZipInfo], fd: int, start: int) -> None:
        self._archive = archive
        self._places = places
        self._fd = fd
        self._start = start
        self._repeated = 0

    def vocabulary(self) -> Vocabulary:
        calls = {
            "torch._utils._rebuild_tensor": self._tensor,
            "torch._utils._rebuild_tensor_v2": self._tensor,
            "torch._utils._rebuild_tensor_v3": self._typed,
            "torch._utils._rebuild_parameter": _first,
            "torch._utils._rebuild_parameter_with_state": _first,
            "torch._tensor._rebuild_from_type_v2": self._of_type,
            "torch.Size": _size,
            "torch.device": lambda arguments: ":".join(map(str, arguments)),
            "_codecs.encode": _encoded,
            "collections.OrderedDict": _ordered,
            "collections.defaultdict": lambda _: {},
        }
        return Vocabulary(frozenset(), calls, lambda _: True, self._storage)

    def _storage(self, named: Any) -> _Storage:
        if type(named) is not tuple or len(named) < 5 or named[0] != "storage" or type(named[1]) is not Name:
            raise PickleRefusedError("it refers to something outside of it that is not a tensor's storage")
        _, kind, key, _, elements = named[:5]
        if type(key) is not str or type(elements) is not int or elements < 0:
            raise PickleRefusedError("it refers to a tensor's storage without its name or size")
        word = kind.name.rpartition(".")[2].removesuffix("Storage")
        dtype = _STORAGES.get(word, "")
        if not dtype:
            raise PickleRefusedError(
                f"it holds a tensor of a kind that is not known here: {escaped(kind.name)}"
            )
        return _Storage(dtype, key, elements)

    def _tensor(self, arguments: tuple[Any, ...], dtype: str = "") -> StoredTensor:
        storage, offset, shape, stride = arguments[:4] if len(arguments) >= 4 else (None,) * 4
        if type(storage) is not _Storage or type(offset) is not int or offset < 0:
            raise PickleRefusedError("it makes a tensor of something that is not a storage")
        if not _is_shape(shape) or not _is_shape(stride) or len(shape) != len(stride):
            raise PickleRefusedError("it makes a tensor without a shape")
        dtype = dtype or storage.dtype
        if (info := self._places.get(storage.key)) is None:
            raise PickleRefusedError(f"the values of a tensor, data/{escaped(storage.key)}, are not in it")
        width = WIDTHS[dtype]
        last = offset + sum((size - 1) * step for size, step in zip(shape, stride, strict=True))
        if math.prod(shape) and (last + 1) * width > info.file_size:
            raise PickleRefusedError(
                f"a tensor of shape {list(shape)} reaches beyond the {info.file_size} bytes of "
                f"data/{escaped(storage.key)}"
            )
        self._repeated += max(0, math.prod(shape) * width - info.file_size)
        if self._repeated > MAX_REPEATED:
            raise PickleRefusedError(
                f"a tensor of shape {list(shape)} repeats the {info.file_size} bytes of "
                f"data/{escaped(storage.key)} far too often"
            )
        at = self._start + _data_of(self._fd, self._start, info) + offset * width
        made = StoredTensor(self._archive.file, dtype, shape, at, stride, storage.key)
        self._archive.tensors.append(made)
        return made

    def _typed(self, arguments: tuple[Any, ...]) -> StoredTensor:
        named = arguments[6] if len(arguments) > 6 else None
        dtype = named.name.removeprefix("torch.") if type(named) is Name else ""
        if dtype not in WIDTHS:
            raise PickleRefusedError("it makes a tensor of a type that is not known here")
        return self._tensor(arguments, dtype)

    def _of_type(self, arguments: tuple[Any, ...]) -> Any:
        """A tensor with attributes of its own; one of a class that is more than a tensor stays a record."""
        function, kind, inner = arguments[:3] if len(arguments) >= 3 else (None,) * 3
        plain = ("torch.Tensor", "torch.nn.parameter.Parameter", "torch.nn.parameter.Buffer")
        if type(function) is Name and type(kind) is Name and kind.name in plain and type(inner) is tuple:
            if function.name in ("torch._utils._rebuild_tensor_v2", "torch._utils._rebuild_tensor"):
                return self._tensor(inner)
            if function.name.startswith("torch._utils._rebuild_parameter"):
                return _first(inner)
        return Record(kind.name if type(kind) is Name else "a tensor of an unknown class", arguments)


_STORAGES = {
    "Double": "float64", "Float": "float32", "Half": "float16", "BFloat16": "bfloat16", "Long": "int64",
    "Int": "int32", "Short": "int16", "Char": "int8", "Byte": "uint8", "Bool": "bool",
    "ComplexDouble": "complex128", "ComplexFloat": "complex64", "Untyped": "uint8",
}  # fmt: skip


def _data_of(fd: int, start: int, info: zipfile.ZipInfo) -> int:
    """Where a record's bytes begin: behind its own header, whose length the directory does not tell."""
    header = os.pread(fd, 30, start + info.header_offset)
    if len(header) < 30 or not header.startswith(ZIP):
        raise PickleRefusedError(f"the record {escaped(info.filename)} is not where the archive says")
    name, extra = struct.unpack_from("<HH", header, 26)
    return int(info.header_offset + 30 + name + extra)


def _is_shape(value: Any) -> bool:
    return (
        type(value) is tuple
        and len(value) <= MAX_DIMENSIONS
        and all(type(one) is int and 0 <= one < 2**62 for one in value)
    )


def _first(arguments: tuple[Any, ...]) -> Any:
    return arguments[0] if arguments else None


def _size(arguments: tuple[Any, ...]) -> Any:
    if len(arguments) != 1 or type(arguments[0]) not in (tuple, list):
        raise PickleRefusedError("it makes a torch.Size of something that is not a tuple")
    return tuple(arguments[0])


def _encoded(arguments: tuple[Any, ...]) -> Any:
    """How bytes are written in protocol 2."""
    if len(arguments) != 2 or type(arguments[0]) is not str or arguments[1] != "latin1":
        raise PickleRefusedError("it encodes something that is not bytes")
    try:
        return arguments[0].encode("latin1")
    except UnicodeEncodeError as error:
        raise PickleRefusedError("it encodes something that is not bytes") from error


def _ordered(arguments: tuple[Any, ...]) -> Any:
    pairs = arguments[0] if arguments else []
    made: dict[Any, Any] = {}
    if type(pairs) is not list or len(arguments) > 1:
        raise PickleRefusedError("it makes an OrderedDict of something that is not a list of pairs")
    for pair in pairs:
        if type(pair) not in (list, tuple) or len(pair) != 2 or type(pair[0]) not in (str, int):
            raise PickleRefusedError("it makes an OrderedDict of something that is not a list of pairs")
        made[pair[0]] = pair[1]
    return made


class Slice(io.RawIOBase):
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

    def read(self, size: int | None = -1) -> bytes:
        left = max(0, self._length - self._at)
        wanted = left if size is None or size < 0 else min(size, left)
        data = os.pread(self._fd, wanted, self._offset + self._at) if wanted else b""
        self._at += len(data)
        return data


# --- safetensors, and the index of a set of such files ------------------------------------------------------


MAX_HEADER_BYTES = 100_000_000
"""As many as the library reads."""
MAX_INDEX_BYTES = 256 * 1024 * 1024
SAFETENSORS_TYPES = {
    "BOOL": "bool", "U8": "uint8", "I8": "int8", "I16": "int16", "U16": "uint16", "I32": "int32",
    "U32": "uint32", "I64": "int64", "U64": "uint64", "F16": "float16", "BF16": "bfloat16",
    "F32": "float32", "F64": "float64", "F8_E4M3": "float8_e4m3fn", "F8_E5M2": "float8_e5m2",
}  # fmt: skip
"""torch's names for the types of safetensors."""


class TensorFileError(Exception):
    """It is no safetensors file, or no index, that can be believed; the message says why."""


def read_tensor_file(file: Path) -> dict[str, StoredTensor]:
    """The tensors in a safetensors file, by name."""
    try:
        with open_file(file) as opened:
            size = os.fstat(opened.number).st_size
            length = int.from_bytes(os.pread(opened.number, 8, 0), "little")
            if size < 8 or length > min(size - 8, MAX_HEADER_BYTES):
                raise TensorFileError(
                    f"it has {size} bytes, its header alone should have {length}: cut off, or no safetensors"
                )
            header = _json(os.pread(opened.number, length, 8), "its header")
    except ArchiveError as error:
        raise TensorFileError(str(error)) from error
    header.pop("__metadata__", None)
    data = size - 8 - length
    found = {name: _tensor(name, entry, file, 8 + length, data) for name, entry in header.items()}
    at = 8 + length
    for name, tensor in sorted(found.items(), key=lambda item: (item[1].start, item[1].bytes)):
        if tensor.start != at:
            what = "overlaps another" if tensor.start < at else "lies behind bytes that belong to none"
            raise TensorFileError(f"tensor {escaped(name)} {what}")
        at += tensor.bytes
    if at != size:
        raise TensorFileError(f"its tensors end at byte {at}, the file has {size}")
    return found


def _tensor(name: str, entry: Any, file: Path, begin: int, data: int) -> StoredTensor:
    told = f"tensor {escaped(name)}"
    if not isinstance(entry, dict):
        raise TensorFileError(f"{told} is not described")
    dtype = entry.get("dtype")
    if not isinstance(dtype, str) or dtype not in SAFETENSORS_TYPES:
        raise TensorFileError(f"{told} is of the type {escaped(str(dtype))}, which is not known here")
    shape, places = _numbers(entry.get("shape")), _numbers(entry.get("data_offsets"))
    if shape is None or places is None or len(shape) > MAX_DIMENSIONS or len(places) != 2:
        raise TensorFileError(f"{told} has no shape, or no place")
    kind = SAFETENSORS_TYPES[dtype]
    start, end = places
    if end - start != math.prod(shape) * WIDTHS[kind]:
        raise TensorFileError(f"{told} of shape {shape} and type {dtype} has {end - start} bytes")
    if not 0 <= start <= end <= data:
        raise TensorFileError(f"{told} ends at byte {end} of {data}: the file was cut off")
    stride = tuple(math.prod(shape[at + 1 :]) for at in range(len(shape)))
    return StoredTensor(file, kind, tuple(shape), begin + start, stride, name)


def _numbers(value: Any) -> list[int] | None:
    if not isinstance(value, list) or not all(type(one) is int and 0 <= one < 2**62 for one in value):
        return None
    return value


def _json(data: bytes, what: str) -> dict[str, Any]:
    try:
        found = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise TensorFileError(f"{what} is not JSON: {escaped(str(error))}") from error
    if not isinstance(found, dict):
        raise TensorFileError(f"{what} is not a JSON object")
    return found


def read_index(file: Path) -> dict[str, str]:
    """In which file beside it each tensor lies, by the index of a sharded model."""
    try:
        listed = _json(read_regular(file.resolve(), MAX_INDEX_BYTES), "the index").get("weight_map")
    except OSError as error:
        raise TensorFileError(f"it cannot be read: {error.strerror or error}") from error
    if not isinstance(listed, dict) or not listed:
        raise TensorFileError("it holds no weight_map")
    for name, path in listed.items():
        if not isinstance(path, str) or not is_safe_path(path):
            raise TensorFileError(
                f"it places {escaped(name)} in {escaped(str(path))!r}, outside the directory"
            )
    return listed


def merged(
    directory: Path, index: Mapping[str, str]
) -> tuple[dict[str, StoredTensor], list[tuple[str, str]]]:
    """The tensors of all files that an index names, and (file, what is wrong) where they differ from it."""
    found: dict[str, StoredTensor] = {}
    problems: list[tuple[str, str]] = []
    for path in sorted(set(index.values())):
        promised = {name for name, place in index.items() if place == path}
        try:
            there = read_tensor_file(directory / path)
        except TensorFileError as error:
            problems.append((path, str(error)))
            continue
        except OSError as error:
            problems.append((path, f"cannot be read: {error.strerror or error}"))
            continue
        for name in sorted(promised - there.keys())[:3]:
            problems.append((path, f"the index places {escaped(name)} in it, and it is not there"))
        found |= {name: tensor for name, tensor in there.items() if name in promised}
    return found, problems
