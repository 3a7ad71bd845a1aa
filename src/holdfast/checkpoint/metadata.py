"""DCP's `.metadata`, read without torch and without running anything in it.

`.metadata` is a pickle of `torch.distributed.checkpoint.metadata.Metadata`. It is read as data (see
pickled.py), every field is checked for its type and range, and the result is plain structs. Whatever is odd
becomes a `MetadataError` that says what; no other exception leaves this module for bad contents.

`completeness` then says whether the files beside it can hold what it promises. That is all that can be known
of a stock DCP directory, which has no digests.
"""

from __future__ import annotations

import io
import math
import pickle
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import msgspec

from holdfast.checkpoint.identity import METADATA
from holdfast.checkpoint.manifest import is_safe_path
from holdfast.checkpoint.pickled import Name, PickleRefusedError, Record, Vocabulary, read_pickle
from holdfast.checkpoint.problems import Problem, Reason, printable
from holdfast.files import read_regular

MAX_METADATA_BYTES = 256 * 1024 * 1024
MAX_DIMENSIONS = 64
MAX_NUMBER = 2**63 - 1
MAX_OVERLAP_CHECKS = 200_000
"""Pairs of chunks compared for one tensor before the overlap check is given up as too dear."""

Offsets = tuple[int, ...]
StorageKey = tuple[str, Offsets | None]
"""A tensor's chunk by its offsets, or an object (None)."""


class MetadataError(Exception):
    """`.metadata` cannot be read or must not be trusted; the message says why."""


class TensorEntry(msgspec.Struct, frozen=True):
    shape: Offsets
    dtype: str
    chunks: list[tuple[Offsets, Offsets]]
    """(offsets, sizes) of each."""


class StorageEntry(msgspec.Struct, frozen=True):
    path: str
    offset: int
    length: int


class StoredMetadata(msgspec.Struct, frozen=True):
    tensors: dict[str, TensorEntry]
    objects: list[str]
    storage: dict[StorageKey, StorageEntry]
    origin: str
    """Last part of the path it was written to; empty if it does not say."""


_CHECKPOINT = "torch.distributed.checkpoint.metadata"
_SHARDED = "torch.distributed._shard.sharded_tensor.metadata"  # where older releases kept two of the classes
_METADATA, _TENSOR, _BYTES, _CHUNK, _INDEX, _STORAGE_META = (
    f"{_CHECKPOINT}.{name}"
    for name in (
        "Metadata", "TensorStorageMetadata", "BytesStorageMetadata", "ChunkStorageMetadata",
        "MetadataIndex", "StorageMeta",
    )
)  # fmt: skip
_PROPERTIES = (f"{_CHECKPOINT}.TensorProperties", f"{_SHARDED}.TensorProperties")
_STORAGE_INFO = "torch.distributed.checkpoint.filesystem._StorageInfo"
_MEMORY_FORMATS = (f"{_CHECKPOINT}._MEM_FORMAT_ENCODING", f"{_SHARDED}.MEM_FORMAT_ENCODING")
_DTYPE = re.compile(r"torch\.(bool|[a-z]{0,2}(float|int|complex|bits)\d[0-9a-z_]*)")


def _size(arguments: tuple[Any, ...]) -> Any:
    if len(arguments) != 1 or type(arguments[0]) is not tuple:
        raise PickleRefusedError("it makes a torch.Size of something that is not a tuple")
    return arguments[0]


def _ignored(arguments: tuple[Any, ...]) -> Any:
    """Layouts and memory formats: deprecated fields that nothing reads."""
    del arguments


def _member(arguments: tuple[Any, ...]) -> Any:
    """Some Python releases store a member of an enum as `getattr(the enum, name)`; no other use is known."""
    if len(arguments) != 2 or type(arguments[0]) is not Name or arguments[0].name not in _MEMORY_FORMATS:
        raise PickleRefusedError("it calls builtins.getattr, which metadata never does")


def _last_part(arguments: tuple[Any, ...]) -> Any:
    """A path, of which only its last name is of interest."""
    return arguments[-1] if arguments else ""


def _empty_dict(arguments: tuple[Any, ...]) -> Any:
    if arguments:
        raise PickleRefusedError("it makes an OrderedDict with arguments")
    return {}


VOCABULARY = Vocabulary(
    objects=frozenset(
        {_METADATA, _TENSOR, _BYTES, _CHUNK, _INDEX, _STORAGE_META, _STORAGE_INFO, *_PROPERTIES}
    ),
    calls={
        "torch.Size": _size,
        "torch.serialization._get_layout": _ignored,
        "builtins.getattr": _member,
        "collections.OrderedDict": _empty_dict,
        **dict.fromkeys(_MEMORY_FORMATS, _ignored),
        **{
            f"{module}.{kind}": _last_part
            for module in ("pathlib", "pathlib._local")  # the latter: Python 3.13
            for kind in ("Path", "PosixPath", "PurePosixPath", "WindowsPath", "PureWindowsPath")
        },
    },
    constant=lambda name: _DTYPE.fullmatch(name) is not None,
)


class _Restricted(pickle.Unpickler):
    """Python's own, with no name but those that metadata consists of."""

    def find_class(self, module: str, name: str) -> Any:
        from holdfast.torch_internals import tolerant

        named = VOCABULARY.name(module, name).name
        if named == "builtins.getattr":
            return _enum_member
        found = super().find_class(module, name)
        return tolerant(found) if named in _PROPERTIES else found


def _enum_member(kind: Any, name: str) -> Any:
    if f"{kind.__module__}.{kind.__qualname__}" not in _MEMORY_FORMATS:
        raise PickleRefusedError("it calls builtins.getattr, which metadata never does")
    return getattr(kind, name)


def unpickle(data: bytes) -> Any:
    """torch's own `Metadata`, for bytes that have matched their digest. No other class is ever made."""
    try:
        return _Restricted(io.BytesIO(data)).load()
    except (PickleRefusedError, pickle.UnpicklingError) as error:
        raise MetadataError(str(error)) from error


def read(directory: Path) -> StoredMetadata:
    """Read `.metadata` of a checkpoint directory."""
    try:
        data = read_regular(directory / METADATA, MAX_METADATA_BYTES)
    except FileNotFoundError as error:
        raise MetadataError("there is no .metadata") from error
    except (OSError, MemoryError) as error:
        raise MetadataError(f"it cannot be read: {getattr(error, 'strerror', None) or error}") from error
    return parse(data)


def parse(data: bytes) -> StoredMetadata:
    """Check the bytes of a `.metadata` file and give what they say."""
    if len(data) > MAX_METADATA_BYTES:
        raise MetadataError(f"it has {len(data)} bytes; at most {MAX_METADATA_BYTES} are read")
    try:
        return _convert(read_pickle(data, VOCABULARY))
    except PickleRefusedError as error:
        raise MetadataError(str(error)) from error
    except MemoryError as error:
        raise MetadataError("it describes more than fits into memory") from error


# What was read is now only dictionaries, lists, tuples, numbers, texts, Records and Names, in any wrong
# combination. Each function below takes anything and gives one checked thing.


def _fields(value: Any, cls: str, what: str) -> dict[Any, Any]:
    """The state of a Record of class `cls`."""
    if type(value) is not Record or value.cls != cls:
        raise MetadataError(f"{what} is not a {cls.rpartition('.')[2]}")
    if value.state is None:
        return {}
    if type(value.state) is not dict:
        raise MetadataError(f"{what} has fields without names")
    return value.state


def _number(value: Any, what: str) -> int:
    if type(value) is not int or not 0 <= value <= MAX_NUMBER:
        raise MetadataError(f"{what} is not a whole number from 0 up")
    return value


def _numbers(value: Any, what: str) -> Offsets:
    if type(value) is not tuple or len(value) > MAX_DIMENSIONS:
        raise MetadataError(f"{what} is not a tuple of at most {MAX_DIMENSIONS} numbers")
    for number in value:
        if type(number) is not int or not 0 <= number <= MAX_NUMBER:
            raise MetadataError(f"{what} holds something that is not a whole number from 0 up")
    return value


def _convert(value: Any) -> StoredMetadata:
    fields = _fields(value, _METADATA, "the top")
    described, stored = fields.get("state_dict_metadata"), fields.get("storage_data")
    if type(described) is not dict or type(stored) is not dict:
        raise MetadataError("its list of entries or of storage is not a dictionary")
    tensors: dict[str, TensorEntry] = {}
    objects: list[str] = []
    for name, entry in described.items():
        if type(name) is not str:
            raise MetadataError("an entry's name is not text")
        if type(entry) is Record and entry.cls == _BYTES:
            objects.append(name)
        else:
            tensors[name] = _tensor(entry, f"entry {printable(name)}")
    storage: dict[StorageKey, StorageEntry] = {}
    for index, info in stored.items():
        key = _key(index)
        if key in storage:
            raise MetadataError(f"{show_key(key)} is stored twice")
        storage[key] = _info(info, key)
    return StoredMetadata(tensors, objects, storage, _origin(fields.get("storage_meta")))


def _tensor(value: Any, what: str) -> TensorEntry:
    fields = _fields(value, _TENSOR, what)
    shape = _numbers(fields.get("size"), f"{what}: its size")
    properties = fields.get("properties")
    if type(properties) is not Record or properties.cls not in _PROPERTIES:
        raise MetadataError(f"{what}: its properties are not TensorProperties")
    state = properties.state
    dtype = state.get("dtype") if type(state) is dict else state[0] if state else None
    if type(dtype) is not Name or _DTYPE.fullmatch(dtype.name) is None:
        raise MetadataError(f"{what}: its dtype is not a dtype")
    listed = fields.get("chunks")
    if type(listed) is not list:
        raise MetadataError(f"{what}: its chunks are not a list")
    chunks: list[tuple[Offsets, Offsets]] = []
    for chunk in listed:
        parts = _fields(chunk, _CHUNK, f"{what}: a chunk")
        offsets = _numbers(parts.get("offsets"), f"{what}: a chunk's offsets")
        sizes = _numbers(parts.get("sizes"), f"{what}: a chunk's sizes")
        if len(offsets) != len(shape) or len(sizes) != len(shape):
            raise MetadataError(f"{what}: a chunk has another number of dimensions than the tensor")
        chunks.append((offsets, sizes))
    return TensorEntry(shape, dtype.name.removeprefix("torch."), chunks)


def _key(value: Any) -> StorageKey:
    fields = _fields(value, _INDEX, "a storage index")
    name, offsets = fields.get("fqn"), fields.get("offset")
    if type(name) is not str:
        raise MetadataError("a storage index has no name")
    return name, None if offsets is None else _numbers(offsets, f"storage index {printable(name)}")


def _info(value: Any, key: StorageKey) -> StorageEntry:
    what = f"storage of {show_key(key)}"
    fields = _fields(value, _STORAGE_INFO, what)
    path = fields.get("relative_path")
    if type(path) is not str or len(path) > 4096 or not is_safe_path(path):
        shown = printable(path) if type(path) is str else type(path).__name__
        raise MetadataError(f"{what} lies in {shown!r}, which is not a path inside the directory")
    return StorageEntry(path, _number(fields.get("offset"), what), _number(fields.get("length"), what))


def _origin(value: Any) -> str:
    if value is None:
        return ""
    identity = _fields(value, _STORAGE_META, "storage_meta").get("checkpoint_id")
    return printable(identity.rstrip("/").rpartition("/")[2]) if type(identity) is str else ""


def show_key(key: StorageKey) -> str:
    """A chunk or object for a message: `model.w[0, 128]`, `step`."""
    name, offsets = key
    return printable(name) if offsets is None else f"{printable(name)}{list(offsets)}"


def completeness(meta: StoredMetadata, sizes: Mapping[str, int]) -> list[Problem]:
    """Whether files of these sizes (by path) can hold everything that the metadata promises.

    Sizes cannot show altered bytes. A tensor cut into very many chunks is not checked for overlaps.
    """
    problems: list[Problem] = []
    for name, tensor in meta.tensors.items():
        fault = _tensor_fault(name, tensor, meta.storage)
        if fault:
            problems.append(Problem(Reason.INCOMPLETE, METADATA, fault))
    for name in meta.objects:
        if (name, None) not in meta.storage:
            problems.append(
                Problem(Reason.INCOMPLETE, METADATA, f"object {printable(name)} is stored nowhere")
            )
    return problems + _file_problems(meta.storage.values(), sizes)


def _tensor_fault(name: str, tensor: TensorEntry, storage: Mapping[StorageKey, StorageEntry]) -> str:
    held = 0
    for offsets, sizes in tensor.chunks:
        volume = math.prod(sizes)
        held += volume
        if any(o + s > whole for o, s, whole in zip(offsets, sizes, tensor.shape, strict=True)):
            return f"a chunk {show_key((name, offsets))} reaches outside the tensor's {list(tensor.shape)}"
        if volume and (name, offsets) not in storage:
            return f"chunk {show_key((name, offsets))} is stored nowhere"
    wanted = math.prod(tensor.shape)
    if held != wanted:
        return f"tensor {printable(name)} has {wanted} elements, its chunks {held}"
    if len(tensor.chunks) > 1 and _overlap(tensor.chunks):
        return f"chunks of tensor {printable(name)} overlap, so a part of it is missing"
    return ""


def _overlap(chunks: list[tuple[Offsets, Offsets]]) -> bool:
    """Sweep along the first dimension, so that the usual row-wise shards cost one comparison each."""
    boxes = sorted(chunk for chunk in chunks if math.prod(chunk[1]))
    compared = 0
    for i, (offsets, sizes) in enumerate(boxes):
        for j in range(i + 1, len(boxes)):
            other, extent = boxes[j]
            compared += 1
            if other[0] >= offsets[0] + sizes[0] or compared > MAX_OVERLAP_CHECKS:
                break
            if all(a < c + d and c < a + b for a, b, c, d in zip(offsets, sizes, other, extent, strict=True)):
                return True
    return False


def _file_problems(entries: Iterable[StorageEntry], sizes: Mapping[str, int]) -> list[Problem]:
    ends: dict[str, int] = {}
    for entry in entries:
        ends[entry.path] = max(ends.get(entry.path, 0), entry.offset + entry.length)
    problems: list[Problem] = []
    for path, end in sorted(ends.items()):
        size = sizes.get(path)
        detail = f"the metadata places data up to byte {end}, the file has {size}"
        if size is None:
            problems.append(Problem(Reason.MISSING, path, f"the metadata places {end} bytes in it"))
        elif size == 0 and end:
            problems.append(Problem(Reason.EMPTY, path, detail))
        elif size < end:
            problems.append(Problem(Reason.TRUNCATED, path, detail))
        elif size > end:
            problems.append(Problem(Reason.ALTERED, path, detail))
    problems.extend(
        Problem(Reason.UNLISTED, path, "the metadata places nothing in it")
        for path in sorted(sizes)
        if path.endswith(".distcp") and path not in ends
    )
    return problems
