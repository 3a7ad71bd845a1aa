"""DCP's `.metadata` as plain data, checked: what is stored, in which chunks, and where.

`.metadata` is a pickle of `torch.distributed.checkpoint.metadata.Metadata`. It is read as data (see
pickled.py), every field is checked for its type and range, and the result is plain structs, with millions of
chunks in arrays. Whatever is odd becomes a `MetadataError` that says what; no other exception leaves this
module for bad contents.

`completeness` then says whether the files beside it can hold what it promises. That is all that can be known
of a stock DCP directory, which has no digests.
"""

from __future__ import annotations

import contextlib
import math
import re
import secrets
from collections.abc import ItemsView, Iterable, Iterator, Mapping, Sequence, ValuesView
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast, overload

import msgspec

from holdfast.base import escaped, read_regular
from holdfast.checkpoint.format import manifest as manifests
from holdfast.checkpoint.format.manifest import METADATA, Problem, Reason, is_safe_path
from holdfast.checkpoint.format.pickled import (
    BYTES,
    CHUNK,
    INDEX,
    MEMORY_FORMATS,
    METADATA_CLASS,
    NAME_AT,
    PROPERTIES,
    REGULAR_DIMENSIONS,
    SIZE,
    STORAGE_INFO,
    STORAGE_META,
    TENSOR,
    Array,
    ChunkRun,
    IrregularError,
    Name,
    PickleRefusedError,
    Record,
    Regular,
    RegularEntry,
    StoredRun,
    Vocabulary,
    read_pickle,
)

if TYPE_CHECKING:
    from torch.distributed.checkpoint.metadata import Metadata

Offsets = tuple[int, ...]
StorageKey = tuple[str, Offsets | None]
"""A tensor's chunk by its offsets, or an object (None)."""


class MetadataError(Exception):
    """`.metadata` cannot be read or must not be trusted; the message says why."""


class TensorEntry(msgspec.Struct, frozen=True):
    shape: Offsets
    dtype: str
    chunks: Sequence[tuple[Offsets, Offsets]]
    """(offsets, sizes) of each."""


class StorageEntry(msgspec.Struct, frozen=True):
    path: str
    offset: int
    length: int


class StoredMetadata(msgspec.Struct, frozen=True):
    tensors: dict[str, TensorEntry]
    objects: list[str]
    storage: Mapping[StorageKey, StorageEntry]
    origin: str
    """Last part of the path it was written to; empty if it does not say."""
    paths: dict[str, tuple[str | int, ...]] = {}
    """How the entries were nested, as far as it says."""


class Chunks(Sequence[tuple[Offsets, Offsets]]):
    """(offsets, sizes) of a tensor's chunks, in two arrays with a row for each."""

    def __init__(self, offsets: Array, sizes: Array) -> None:
        self.offsets = offsets
        self.sizes = sizes

    def __len__(self) -> int:
        return len(self.offsets)

    @overload
    def __getitem__(self, at: int) -> tuple[Offsets, Offsets]: ...
    @overload
    def __getitem__(self, at: slice) -> Chunks: ...
    def __getitem__(self, at: int | slice) -> tuple[Offsets, Offsets] | Chunks:
        if isinstance(at, slice):
            return Chunks(self.offsets[at], self.sizes[at])
        return tuple(self.offsets[at].tolist()), tuple(self.sizes[at].tolist())

    def sizes_at(self, offsets: Offsets) -> Offsets | None:
        """Of the chunk that begins there."""
        import numpy as np

        rows = np.flatnonzero((self.offsets == np.array(offsets, "i8")).all(axis=1))
        return tuple(self.sizes[rows[0]].tolist()) if len(rows) else None

    def within(self, offsets: Offsets, sizes: Offsets) -> list[tuple[Offsets, Offsets]]:
        """Those that share something with this part of the tensor."""
        import numpy as np

        begin, end = np.array(offsets, "i8"), np.array(offsets, "i8") + np.array(sizes, "i8")
        shared = ((self.offsets < end) & (self.offsets + self.sizes > begin)).all(axis=1)
        return list(Chunks(self.offsets[shared], self.sizes[shared]))

    def __iter__(self) -> Iterator[tuple[Offsets, Offsets]]:
        return zip(map(tuple, self.offsets.tolist()), map(tuple, self.sizes.tolist()), strict=True)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Sequence) and list(self) == list(other)

    __hash__ = None  # type: ignore[assignment]


_MULTIPLIERS = [secrets.randbits(64) | 1 for _ in range(REGULAR_DIMENSIONS + 3)]
"""Of this process: nobody can prepare keys that fall together."""


def _joined(parts: Sequence[Sequence[tuple[Offsets, Offsets]]]) -> Sequence[tuple[Offsets, Offsets]]:
    """All chunks of a tensor, in arrays if some of them are."""
    import numpy as np

    if len(parts) == 1:
        return parts[0]
    if not any(isinstance(part, Chunks) for part in parts):
        return [chunk for part in parts for chunk in part]
    arrays = [
        (part.offsets, part.sizes) if isinstance(part, Chunks)
        else (np.array([offsets for offsets, _ in part], "i8"), np.array([sizes for _, sizes in part], "i8"))
        for part in parts
        if len(part)
    ]  # fmt: skip
    offsets, sizes = zip(*arrays, strict=True)
    return Chunks(np.concatenate(offsets), np.concatenate(sizes))


class StoredChunks(Mapping[StorageKey, StorageEntry]):
    """Where each chunk and object lies, in arrays with a row for each; `others` are those of other forms."""

    def __init__(
        self,
        names: list[str],
        paths: list[str],
        table: Mapping[str, Array],
        others: Mapping[StorageKey, StorageEntry],
    ) -> None:
        """The columns of `table`: `name`, `path` (numbers), `dims` (-1: none), `place`, `start`, `length`."""
        import numpy as np

        self.number, self._path_number = (
            {text: at for at, text in enumerate(all_of)} for all_of in (names, paths)
        )
        self.others: dict[StorageKey, StorageEntry] = {}
        rows: dict[str, list[Any]] = {name: [] for name in table}
        width = table["place"].shape[1]
        for key, entry in others.items():
            offsets = key[1] or ()
            if len(offsets) > width:
                self.others[key] = entry
                continue
            rows["name"].append(self.number.setdefault(key[0], len(self.number)))
            rows["path"].append(self._path_number.setdefault(entry.path, len(self._path_number)))
            rows["dims"].append(-1 if key[1] is None else len(offsets))
            rows["place"].append([*offsets, *[0] * (width - len(offsets))])
            rows["start"].append(entry.offset)
            rows["length"].append(entry.length)
        if rows["name"]:
            table = {
                name: np.concatenate([np.array(rows[name], column.dtype), column])
                for name, column in table.items()
            }
        self.names, self.paths = list(self.number), list(self._path_number)
        self.name, self.dims, self.path = table["name"], table["dims"], table["path"]
        self.start, self.length = table["start"], table["length"]
        self.place = table["place"]
        hashes = _hashes(self.name, self.dims, self.place)
        self._order = np.argsort(hashes)
        self._hashes = hashes[self._order]
        if (self._hashes[1:] == self._hashes[:-1]).any():
            raise IrregularError  # one is stored twice; or two fall together, once in many years

    def _row(self, key: StorageKey) -> int | None:
        import numpy as np

        name, offsets = key
        dims = -1 if offsets is None else len(offsets)
        if name not in self.number or dims > self.place.shape[1]:
            return None
        place = np.zeros((1, self.place.shape[1]), "i8")
        place[0, : max(0, dims)] = offsets or ()
        found = int(self.rows(np.array([self.number[name]]), np.array([dims], "i1"), place)[0])
        return None if found < 0 else found

    def rows(self, name: Array, dims: Array, place: Array) -> Array:
        """The row of each key, -1 where there is none."""
        import numpy as np

        at = np.searchsorted(self._hashes, _hashes(name, dims, place))
        row = self._order[np.minimum(at, len(self._order) - 1)]
        same = (self.name[row] == name) & (self.dims[row] == dims) & (self.place[row] == place).all(axis=1)
        return np.where(same, row, -1)

    def rows_of(self, name: str, offsets: Array) -> Array:
        """The same for chunks of one tensor."""
        import numpy as np

        place = np.zeros((len(offsets), self.place.shape[1]), "i8")
        dims = offsets.shape[1]
        if name not in self.number or dims > place.shape[1]:
            return np.full(len(offsets), -1)
        place[:, :dims] = offsets
        return self.rows(np.full(len(offsets), self.number[name]), np.full(len(offsets), dims, "i1"), place)

    def __getitem__(self, key: StorageKey) -> StorageEntry:
        if key in self.others:
            return self.others[key]
        row = self._row(key)
        if row is None:
            raise KeyError(key)
        return StorageEntry(self.paths[self.path[row]], int(self.start[row]), int(self.length[row]))

    def __len__(self) -> int:
        return len(self.others) + len(self.name)

    def __iter__(self) -> Iterator[StorageKey]:
        for key, _ in self._all():
            yield key

    def _all(self) -> Iterator[tuple[StorageKey, StorageEntry]]:
        yield from self.others.items()
        columns = (self.name, self.dims, self.place, self.path, self.start, self.length)
        for begin in range(0, len(self.name), 4096):
            lists = (column[begin : begin + 4096].tolist() for column in columns)
            for name, dims, place, path, start, length in zip(*lists, strict=True):
                offsets = None if dims < 0 else tuple(place[:dims])
                yield (self.names[name], offsets), StorageEntry(self.paths[path], start, length)

    def items(self) -> ItemsView[StorageKey, StorageEntry]:
        return _Items(self)

    def values(self) -> ValuesView[StorageEntry]:
        return _Values(self)

    def singles(self) -> dict[str, StorageEntry]:
        """Of what is stored in one place only, by name."""
        import numpy as np

        rows = np.flatnonzero(np.bincount(self.name, minlength=len(self.names))[self.name] == 1)
        lists = (column[rows].tolist() for column in (self.name, self.path, self.start, self.length))
        return {
            self.names[name]: StorageEntry(self.paths[path], start, length)
            for name, path, start, length in zip(*lists, strict=True)
        }

    def ends(self) -> dict[str, int]:
        """Up to where something lies in each file."""
        import numpy as np

        past = np.zeros(len(self.paths), "u8")
        np.maximum.at(past, self.path, self.start.astype("u8") + self.length.astype("u8"))
        return _ends(self.others.values(), dict(zip(self.paths, past.tolist(), strict=True)))


class _Items(ItemsView[StorageKey, StorageEntry]):
    _mapping: StoredChunks

    def __iter__(self) -> Iterator[tuple[StorageKey, StorageEntry]]:
        return self._mapping._all()


class _Values(ValuesView[StorageEntry]):
    _mapping: StoredChunks

    def __iter__(self) -> Iterator[StorageEntry]:
        return (entry for _, entry in self._mapping._all())


def _hashes(name: Array, dims: Array, place: Array) -> Array:
    import numpy as np

    first, second, *rest = (np.uint64(number) for number in _MULTIPLIERS)
    total = name.astype("u8") * first + dims.astype("u8") * second
    for column, multiplier in zip(place.T, rest, strict=False):
        mixed = column.astype("u8") * multiplier
        total += (mixed ^ (mixed >> np.uint64(29))) * multiplier
    return total


REGULAR_FROM = 16 * 1024
"""Smaller files are read by the interpreter alone."""
MAX_METADATA_BYTES = 16 << 30
"""What 16,384 ranks of a model of 10^12 parameters need, twice: about 1,100 tensors and two moments of each,
of which every rank holds a part, are 54 million chunks of 145 bytes, 7.8 GB. So are 70,000 matrices of
experts with their moments, of which 256 ranks each hold a part."""
TIMES_REGULAR = 5
"""What reading takes in memory, as a multiple of the file's size, where nearly all of it is regular. Measured
with the file itself: 4.3."""
TIMES_INTERPRETED = 16
"""The same for the interpreter alone: measured 13.4."""
MAX_DIMENSIONS = 64
MAX_NUMBER = 2**63 - 1
LEAST_CHUNK = 8
"""Bytes of the file for each chunk, far fewer than any writer needs. Otherwise entries that share one list of
chunks would make of a small file the work of a very large one."""
MAX_OVERLAP_CHECKS = 200_000
"""Pairs of chunks compared for one tensor before the overlap check is given up as too dear."""


_PLANNER, _MEGATRON = (
    "torch.distributed.checkpoint.planner",
    "megatron.core.dist_checkpointing.strategies.torch",
)
_WRITE_ITEM_TYPES = (f"{_PLANNER}.WriteItemType",)
_MEGATRONS_METADATA = f"{_MEGATRON}.MCoreMetadata"
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
    known = (*MEMORY_FORMATS, *_WRITE_ITEM_TYPES)
    if len(arguments) != 2 or type(arguments[0]) is not Name or arguments[0].name not in known:
        raise PickleRefusedError("it calls builtins.getattr, which metadata never does")


def _last_part(arguments: tuple[Any, ...]) -> Any:
    """A path, of which only its last name is of interest."""
    return arguments[-1] if arguments else ""


def _empty_dict(arguments: tuple[Any, ...]) -> Any:
    if arguments:
        raise PickleRefusedError("it makes an OrderedDict with arguments")
    return {}


VOCABULARY = Vocabulary(
    objects=frozenset({METADATA_CLASS, TENSOR, BYTES, CHUNK, INDEX, STORAGE_META, STORAGE_INFO, *PROPERTIES}),
    calls={
        SIZE: _size,
        "torch.serialization._get_layout": _ignored,
        "builtins.getattr": _member,
        "collections.OrderedDict": _empty_dict,
        **dict.fromkeys(MEMORY_FORMATS, _ignored),
        **{
            f"{module}.{kind}": _last_part
            for module in ("pathlib", "pathlib._local")  # the latter: Python 3.13
            for kind in ("Path", "PosixPath", "PurePosixPath", "WindowsPath", "PureWindowsPath")
        },
    },
    constant=lambda name: _DTYPE.fullmatch(name) is not None,
)
OF_ALL = Vocabulary(
    objects=VOCABULARY.objects
    | {f"{_PLANNER}.{name}" for name in ("SavePlan", "WriteItem", "TensorWriteData")}
    | {_MEGATRONS_METADATA, f"{_MEGATRON}.MCoreSavePlan"},
    calls={**VOCABULARY.calls, **dict.fromkeys(_WRITE_ITEM_TYPES, _ignored)},
    constant=VOCABULARY.constant,
)
"""Metadata of whoever writes DCP: Megatron keeps its plans in there too, which nothing reads."""


def as_torch(stored: StoredMetadata) -> Metadata:
    """torch's own `Metadata` with all that a load asks of it; chunks are made only as they are looked at."""
    import torch
    from torch.distributed.checkpoint.metadata import (
        BytesStorageMetadata,
        Metadata,
        TensorProperties,
        TensorStorageMetadata,
    )

    properties: dict[str, TensorProperties] = {}
    entries: dict[str, TensorStorageMetadata | BytesStorageMetadata] = {}
    for name, tensor in stored.tensors.items():
        if tensor.dtype not in properties:
            dtype = getattr(torch, tensor.dtype, None)
            if not isinstance(dtype, torch.dtype):
                raise MetadataError(f"entry {escaped(name)}: this torch has no dtype {tensor.dtype}")
            properties[tensor.dtype] = TensorProperties(dtype)
        chunks: Any = _TorchChunks(tensor.chunks)
        entries[name] = TensorStorageMetadata(properties[tensor.dtype], torch.Size(tensor.shape), chunks)
    entries |= {name: BytesStorageMetadata() for name in stored.objects}
    storage: Any = _TorchStorage(stored.storage)
    return Metadata(entries, stored.paths, storage)


class _TorchChunks(Sequence[Any]):
    """A tensor's chunks as torch describes them."""

    def __init__(self, chunks: Sequence[tuple[Offsets, Offsets]]) -> None:
        self.chunks = chunks

    def __len__(self) -> int:
        return len(self.chunks)

    def __getitem__(self, at: Any) -> Any:
        return list(self)[at] if isinstance(at, slice) else _torch_chunk(self.chunks[at])

    def __iter__(self) -> Iterator[Any]:
        return map(_torch_chunk, self.chunks)


def _torch_chunk(chunk: tuple[Offsets, Offsets]) -> Any:
    from torch import Size
    from torch.distributed.checkpoint.metadata import ChunkStorageMetadata

    return ChunkStorageMetadata(Size(chunk[0]), Size(chunk[1]))


class _TorchStorage(Mapping[Any, Any]):
    """Where each is stored, by torch's index."""

    def __init__(self, storage: Mapping[StorageKey, StorageEntry]) -> None:
        self._storage = storage

    def __getitem__(self, index: Any) -> Any:
        from holdfast.base import StorageInfo

        offsets = None if index.offset is None else tuple(index.offset)
        entry = self._storage[index.fqn, offsets]
        return StorageInfo(entry.path, entry.offset, entry.length)

    def __len__(self) -> int:
        return len(self._storage)

    def __iter__(self) -> Iterator[Any]:
        from torch import Size
        from torch.distributed.checkpoint.metadata import MetadataIndex

        for name, offsets in self._storage:
            yield MetadataIndex(name, None if offsets is None else Size(offsets))


def read(directory: Path, most: int = MAX_METADATA_BYTES) -> StoredMetadata:
    """Read `.metadata` of a checkpoint directory. `most`: its size, where the manifest says it."""
    try:
        size = (directory / METADATA).lstat().st_size
        if size <= most:
            _check_room(size, TIMES_REGULAR)
        data = read_regular(directory / METADATA, most)
    except FileNotFoundError as error:
        raise MetadataError("there is no .metadata") from error
    except (OSError, MemoryError) as error:
        raise MetadataError(f"it cannot be read: {getattr(error, 'strerror', None) or error}") from error
    return parse(data)


def parse(data: bytes) -> StoredMetadata:
    """Check the bytes of a `.metadata` file and give what they say."""
    check_within_limit(len(data))
    _check_room(len(data), TIMES_REGULAR)
    try:
        if len(data) >= REGULAR_FROM:
            # Whatever is wrong or odd, the interpreter alone says what it is.
            with contextlib.suppress(IrregularError, PickleRefusedError, MetadataError):
                regular = Regular(data)
                return _convert(read_pickle(data, OF_ALL, regular), len(data), regular)
            del regular
        _check_room(len(data), TIMES_INTERPRETED)
        return _convert(read_pickle(data, OF_ALL), len(data))
    except PickleRefusedError as error:
        raise MetadataError(str(error)) from error
    except MemoryError as error:
        raise MetadataError("it describes more than fits into memory") from error


def check_within_limit(size: int) -> None:
    """Whether a `.metadata` of this size would be read; asked before one is written, too."""
    if size > MAX_METADATA_BYTES:
        raise MetadataError(f"it has {size} bytes; at most {MAX_METADATA_BYTES} are read")


def _check_room(size: int, times: int) -> None:
    if why := manifests.lacks_room(size, times):
        raise MetadataError(f"{why}; at most {MAX_METADATA_BYTES} are read on any")


# What was read is now only dictionaries, lists, tuples, numbers, texts, Records and Names, in any wrong
# combination. Each function below takes anything and returns one checked thing.


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


def _convert(value: Any, size: int, regular: Regular | None = None) -> StoredMetadata:
    """`size`: how many bytes said all this."""
    top = (
        _MEGATRONS_METADATA if type(value) is Record and value.cls == _MEGATRONS_METADATA else METADATA_CLASS
    )
    fields = _fields(value, top, "the top")
    described, stored = fields.get("state_dict_metadata"), fields.get("storage_data")
    if type(described) is not dict or type(stored) is not dict:
        raise MetadataError("its list of entries or of storage is not a dictionary")
    tensors: dict[str, TensorEntry] = {}
    objects: list[str] = []
    regular_entries: Mapping[int, TensorEntry] = {}
    if regular is not None:
        regular_entries = _regular_tensors(
            regular, [one for one in described.values() if type(one) is RegularEntry]
        )
    chunks = 0
    for name, entry in described.items():
        if LEAST_CHUNK * chunks > size:
            raise MetadataError(f"its {size} bytes describe more chunks than they can: the first {chunks}")
        if type(name) is not str:
            raise MetadataError("an entry's name is not text")
        if type(entry) is Record and entry.cls == BYTES:
            objects.append(name)
        elif type(entry) is RegularEntry:
            tensors[name] = regular_entries[id(entry)]
        else:
            tensors[name] = _tensor(entry, f"entry {escaped(name)}", regular)
        if name in tensors:
            chunks += len(tensors[name].chunks)
    storage: dict[StorageKey, StorageEntry] = {}
    runs: list[StoredRun] = []
    for index, info in stored.items():
        if type(index) is StoredRun:
            runs.append(index)
            continue
        key = _key(index)
        if key in storage:
            raise MetadataError(f"{show_key(key)} is stored twice")
        storage[key] = _info(info, key)
    whole = storage if regular is None or not runs else _regular_storage(regular, runs, storage)
    return StoredMetadata(
        tensors, objects, whole, _origin(fields.get("storage_meta")), _paths(fields.get("planner_data"))
    )


def _tensor(value: Any, what: str, regular: Regular | None) -> TensorEntry:
    fields = _fields(value, TENSOR, what)
    shape = _numbers(fields.get("size"), f"{what}: its size")
    properties = fields.get("properties")
    if type(properties) is not Record or properties.cls not in PROPERTIES:
        raise MetadataError(f"{what}: its properties are not TensorProperties")
    state = properties.state
    dtype = state.get("dtype") if type(state) is dict else state[0] if state else None
    if type(dtype) is not Name or _DTYPE.fullmatch(dtype.name) is None:
        raise MetadataError(f"{what}: its dtype is not a dtype")
    listed = fields.get("chunks")
    if type(listed) is not list:
        raise MetadataError(f"{what}: its chunks are not a list")
    parts: list[Sequence[tuple[Offsets, Offsets]]] = []
    chunks: list[tuple[Offsets, Offsets]] = []
    for chunk in listed:
        if type(chunk) is ChunkRun and regular is not None:
            parts += [chunks, _chunks_of(regular, chunk, len(shape))]
            chunks = []
            continue
        fields = _fields(chunk, CHUNK, f"{what}: a chunk")
        offsets = _numbers(fields.get("offsets"), f"{what}: a chunk's offsets")
        sizes = _numbers(fields.get("sizes"), f"{what}: a chunk's sizes")
        if len(offsets) != len(shape) or len(sizes) != len(shape):
            raise MetadataError(f"{what}: a chunk does not have the tensor's number of dimensions")
        chunks.append((offsets, sizes))
    return TensorEntry(
        shape, dtype.name.removeprefix("torch."), _joined([*parts, chunks]) if parts else chunks
    )


def _chunks_of(regular: Regular, run: ChunkRun, dims: int) -> Chunks:
    """Some chunks of a tensor of so many dimensions."""
    columns, rows = regular.chunks.columns, slice(run.first, run.past)
    if not regular.have_dimensions(run, dims):
        raise IrregularError  # the interpreter names it
    return Chunks(columns["offset"][rows, :dims], columns["extent"][rows, :dims])


def _regular_tensors(regular: Regular, entries: Sequence[RegularEntry]) -> dict[int, TensorEntry]:
    """The tensors that stand for regular entries, by the id of the entry."""
    dtypes: dict[int, str] = {}
    found: dict[int, TensorEntry] = {}
    if not entries:
        return found
    columns = regular.entries.columns
    rows = [entry.row for entry in entries]
    of, dims, shapes = (columns[name][rows].tolist() for name in ("dtype", "shape.dims", "shape"))
    for entry, reference, count, numbers in zip(entries, of, dims, shapes, strict=True):
        dtype = dtypes.get(reference)
        if dtype is None:
            named = regular.memo.get(reference)
            if type(named) is not Name or _DTYPE.fullmatch(named.name) is None:
                raise IrregularError
            dtype = dtypes[reference] = named.name.removeprefix("torch.")
        if reference >= entry.known:
            raise IrregularError
        chunks = _joined([_chunks_of(regular, run, count) for run in entry.runs])
        found[id(entry)] = TensorEntry(tuple(numbers[:count]), dtype, chunks)
    return found


def _regular_storage(
    regular: Regular, runs: Sequence[StoredRun], others: dict[StorageKey, StorageEntry]
) -> StoredChunks:
    """Where the chunks lie; `others` were read one by one."""
    import numpy as np

    columns = regular.stored.columns
    rows = np.r_[tuple(slice(run.first, run.past) for run in runs)]
    counts = [run.past - run.first for run in runs]
    known = np.repeat([run.known - int(regular.stored_memos[run.first]) for run in runs], counts)
    known += regular.stored_memos[rows]
    inline = columns["name"][rows] >= 0
    of = np.where(inline, known + NAME_AT, columns["name.ref"][rows])
    names, name = _texts(regular, of, np.where(inline, of + 1, known))
    inline = columns["path"][rows] >= 0
    of = np.where(inline, known + columns["memos"][rows] - 1, columns["path.ref"][rows])
    paths, path = _texts(regular, of, np.where(inline, of + 1, known))
    for one in paths:
        if len(one) > 4096 or not is_safe_path(one):
            raise IrregularError
    table = {
        "name": name, "dims": columns["place.dims"][rows], "place": columns["place"][rows], "path": path,
        "start": columns["start"][rows], "length": columns["bytes"][rows],
    }  # fmt: skip
    return StoredChunks(names, paths, table, others)


def _texts(regular: Regular, references: Array, known: Array) -> tuple[list[str], Array]:
    """The texts that entries of the memo are, each once, and which of them each row means."""
    import numpy as np

    if (references >= known).any():
        raise IrregularError
    used, which = np.unique(references, return_inverse=True)
    numbers: dict[str, int] = {}
    texts = [regular.memo.get(reference) for reference in used.tolist()]
    if not all(type(text) is str for text in texts):
        raise IrregularError
    order = [numbers.setdefault(str(text), len(numbers)) for text in texts]
    return list(numbers), np.array(order, "i4")[which]


def _key(value: Any) -> StorageKey:
    fields = _fields(value, INDEX, "a storage index")
    name, offsets = fields.get("fqn"), fields.get("offset")
    if type(name) is not str:
        raise MetadataError("a storage index has no name")
    return name, None if offsets is None else _numbers(offsets, f"storage index {escaped(name)}")


def _info(value: Any, key: StorageKey) -> StorageEntry:
    what = f"storage of {show_key(key)}"
    fields = _fields(value, STORAGE_INFO, what)
    path = fields.get("relative_path")
    if type(path) is not str or len(path) > 4096 or not is_safe_path(path):
        shown = escaped(path) if type(path) is str else type(path).__name__
        raise MetadataError(f"{what} lies in {shown!r}, which is not a path inside the directory")
    return StorageEntry(path, _number(fields.get("offset"), what), _number(fields.get("length"), what))


def _paths(value: Any) -> dict[str, tuple[str | int, ...]]:
    """Planners keep here what they like; what is no path is of no concern."""
    if type(value) is not dict:
        return {}
    return {name: path for name, path in value.items() if type(name) is str and _is_path(path)}


def _is_path(value: Any) -> bool:
    return type(value) is tuple and bool(value) and all(type(part) in (str, int) for part in value)


def _origin(value: Any) -> str:
    if value is None:
        return ""
    identity = _fields(value, STORAGE_META, "storage_meta").get("checkpoint_id")
    return escaped(identity.rstrip("/").rpartition("/")[2]) if type(identity) is str else ""


def show_key(key: StorageKey) -> str:
    """A chunk or object for a message: `model.w[0, 128]`, `step`."""
    name, offsets = key
    return escaped(name) if offsets is None else f"{escaped(name)}{list(offsets)}"


def completeness(meta: StoredMetadata, sizes: Mapping[str, int]) -> list[Problem]:
    """Whether files of these sizes (by path) can hold everything that the metadata promises.

    Sizes cannot show altered bytes. A tensor cut into very many chunks is not checked for overlaps.
    """
    problems: list[Problem] = []
    sound = _sound(meta)
    for name, tensor in meta.tensors.items():
        fault = _tensor_fault(name, tensor, meta.storage) if name not in sound else ""
        if fault:
            problems.append(Problem(Reason.INCOMPLETE, METADATA, fault))
    for name in meta.objects:
        if (name, None) not in meta.storage:
            problems.append(Problem(Reason.INCOMPLETE, METADATA, f"object {escaped(name)} is stored nowhere"))
    storage = meta.storage
    ends = storage.ends() if isinstance(storage, StoredChunks) else _ends(storage.values(), {})
    return problems + _file_problems(ends, sizes)


AT_ONCE = 1 << 18
"""Chunks that are looked at together."""


def _sound(meta: StoredMetadata) -> set[str]:
    """Tensors of which it is seen at once that nothing is wrong with them; `_tensor_fault` knows the others.

    Those of so many elements that they cannot be counted in 63 bits are among the others.
    """
    storage = meta.storage
    sound: set[str] = set()
    if not isinstance(storage, StoredChunks):
        return sound
    by_dims: dict[int, list[str]] = {}
    for name, tensor in meta.tensors.items():
        if (
            isinstance(tensor.chunks, Chunks)
            and name in storage.number
            and math.prod(tensor.shape) <= MAX_NUMBER
        ):
            by_dims.setdefault(len(tensor.shape), []).append(name)
    for dims, names in by_dims.items():
        group: list[str] = []
        count = 0
        for name in names:
            group.append(name)
            count += len(meta.tensors[name].chunks)
            if count >= AT_ONCE or name is names[-1]:
                sound.update(_sound_among(group, dims, meta, storage))
                group, count = [], 0
    return sound


def _sound_among(names: list[str], dims: int, meta: StoredMetadata, storage: StoredChunks) -> Iterator[str]:
    """Those of these tensors, all of so many dimensions, with which nothing is wrong."""
    import numpy as np

    chunks = [cast("Chunks", meta.tensors[name].chunks) for name in names]
    counts = [len(one) for one in chunks]
    offsets, sizes = (
        np.concatenate(all_of) for all_of in zip(*((c.offsets, c.sizes) for c in chunks), strict=True)
    )
    shapes = np.array([meta.tensors[name].shape for name in names], "i8").reshape(len(names), dims)
    shape = np.repeat(shapes, counts, axis=0)
    inside = ((offsets <= shape) & (sizes <= shape - np.minimum(offsets, shape))).all(axis=1)
    volume = np.where(inside, np.where(inside[:, None], sizes, 0).prod(axis=1), 0)
    number = np.repeat([storage.number[name] for name in names], counts)
    place = np.zeros((len(offsets), max(dims, storage.place.shape[1])), "i8")
    place[:, :dims] = offsets
    stored = np.zeros(len(offsets), bool)
    if dims <= storage.place.shape[1]:
        stored = storage.rows(number, np.full(len(offsets), dims, "i1"), place) >= 0
    fits = inside & (stored | (volume == 0))
    begin = np.concatenate([[0], np.cumsum(counts[:-1])]).astype(np.intp)
    wanted = np.array([math.prod(meta.tensors[name].shape) for name in names], "i8")
    held, about = np.add.reduceat(volume, begin), np.add.reduceat(volume.astype("f8"), begin)
    fits = np.logical_and.reduceat(fits, begin) & (held == wanted) & (about < 2.0**62)
    for name, count, box, fit in zip(names, counts, chunks, fits.tolist(), strict=True):
        if fit and (count == 1 or not _may_overlap(box)):
            yield name


def _may_overlap(chunks: Chunks) -> bool:
    """False if the chunks surely do not overlap: the sweep of `_overlap`, one distance at a time."""
    import numpy as np

    held = chunks.sizes.prod(axis=1) > 0
    offsets, sizes = chunks.offsets[held], chunks.sizes[held]
    order = np.lexsort(offsets.T[::-1]) if offsets.shape[1] else np.arange(len(offsets))
    offsets, ends = offsets[order], (offsets + sizes)[order]
    left = np.arange(len(offsets))
    compared = 0
    for distance in range(1, len(offsets)):
        left = left[: np.searchsorted(left, len(offsets) - distance)]
        left = left[offsets[left + distance, 0] < ends[left, 0]]
        compared += len(left)
        if not len(left):
            return False
        if compared > MAX_OVERLAP_CHECKS:
            return True
        apart = (offsets[left + distance] >= ends[left]) | (offsets[left] >= ends[left + distance])
        if not apart.any(axis=1).all():
            return True
    return False


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
        return f"tensor {escaped(name)} has {wanted} elements, its chunks {held}"
    if len(tensor.chunks) > 1 and _overlap(tensor.chunks):
        return f"chunks of tensor {escaped(name)} overlap, so a part of it is missing"
    return ""


def _overlap(chunks: Sequence[tuple[Offsets, Offsets]]) -> bool:
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


def _ends(entries: Iterable[StorageEntry], ends: dict[str, int]) -> dict[str, int]:
    """Up to where something lies in each file."""
    for entry in entries:
        ends[entry.path] = max(ends.get(entry.path, 0), entry.offset + entry.length)
    return ends


def _file_problems(ends: Mapping[str, int], sizes: Mapping[str, int]) -> list[Problem]:
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
