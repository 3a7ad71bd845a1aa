"""DCP's `.metadata`, and any pickle, read as data: nothing in it is ever imported or executed.

`.metadata` is a pickle of `torch.distributed.checkpoint.metadata.Metadata`. It is read as data (see
below), every field is checked for its type and range, and the result is plain structs. Whatever is odd
becomes a `MetadataError` that says what; no other exception leaves this module for bad contents.

`completeness` then says whether the files beside it can hold what it promises. That is all that can be known
of a stock DCP directory, which has no digests.
"""

from __future__ import annotations

import io
import math
import pickle
import re
import struct
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import msgspec

from holdfast.base import escaped, read_regular
from holdfast.checkpoint.format.manifest import METADATA, Problem, Reason, is_safe_path

# Reads a pickle as data: nothing in it is ever called, imported or executed.
#
# This is a small interpreter for the opcodes that DCP's `.metadata` consists of (pickle protocols 4 and 5). A
# class or function is only ever a *name* on the caller's list; an object of it becomes a `Record` that holds
# what was stored. There is no callable anywhere for a hostile file to reach, and an unknown name, an opcode
# outside the list, a persistent id or an extension code is refused by name.
#
# Why not a subclass of the standard library's Unpickler with a `find_class` of our own: in CPython nine bytes
# make it reserve gigabytes (LONG_BINPUT with a large index), and a megabyte of nested tuples used as a
# dictionary key ends the process with a segmentation fault. Neither can be caught from Python.
#
# Bounded: what it takes in memory is a small multiple of the file's size. Bytes that only pile up values (a
# file of nothing but empty dictionaries) are refused after the first few thousand.


MAX_INT_BYTES = 9
"""Enough for every unsigned 64-bit number, so that arithmetic on what was read stays cheap."""
MAX_WIDE_INT_BYTES = 32
"""In other pickles than metadata: numpy's generators count with 128 bits and more."""


SLICE = 4096
"""Opcodes between two looks at what they have piled up."""
MAX_OPEN = 10_000
"""Values of one container that are not yet in it: picklers put them there a thousand at a time."""
MAX_NESTED = 1_000


class PickleRefusedError(Exception):
    """The bytes are not a pickle this reader accepts; the message says why."""


class Name:
    """A class or function that the pickle refers to. Only ever compared, never called."""

    __slots__ = ("name",)

    def __init__(self, name: str) -> None:
        self.name = name


class Record:
    """An object as it was stored: its class's name and its state."""

    __slots__ = ("arguments", "cls", "items", "state")

    def __init__(self, cls: str, arguments: tuple[Any, ...] = ()) -> None:
        self.cls = cls
        self.state: Any = None
        self.arguments = arguments
        """What it was made with. Like `items` only where a vocabulary lets every class be named."""
        self.items: list[Any] = []
        """What was put into it: members, or keys and values in turn."""


Reducer = Callable[[tuple[Any, ...]], Any]
"""Turns the arguments a pickle would call a function with into plain data."""


class Vocabulary:
    """The names a pickle may use.

    `objects`: classes whose instances become `Record`s. `calls`: functions replaced by a reducer of ours.
    `constant`: whether a name that is neither stands for itself, as torch's dtypes do.
    With `persistent`, which makes something of a persistent id, it is the vocabulary of what people have
    pickled themselves, in protocol 2 and up: every class may be named, and its objects become `Record`s too.
    """

    def __init__(
        self,
        objects: frozenset[str],
        calls: Mapping[str, Reducer],
        constant: Callable[[str], bool],
        persistent: Callable[[Any], Any] | None = None,
    ) -> None:
        self.objects = objects
        self.calls = calls
        self.constant = constant
        self.persistent = persistent
        self.wide = persistent is not None

    def name(self, module: Any, qualified: Any) -> Name:
        if type(module) is not str or type(qualified) is not str:
            raise PickleRefusedError("it names a class by something that is not text")
        full = f"{module[:200]}.{qualified[:200]}"
        if self.wide or full in self.objects or full in self.calls or self.constant(full):
            return Name(full)
        raise PickleRefusedError(f"it refers to {escaped(full)}, which metadata never does")


def read_pickle(data: bytes, vocabulary: Vocabulary) -> Any:
    """The value that `data` describes, made of plain containers, `Record`s and `Name`s."""
    try:
        return _run(data, vocabulary)
    except (IndexError, struct.error) as error:
        raise PickleRefusedError("it ends too early or is garbled") from error
    except UnicodeDecodeError as error:
        raise PickleRefusedError("it holds text that is not UTF-8") from error
    except MemoryError as error:
        raise PickleRefusedError("it describes more than fits into memory") from error


_KEYS = frozenset({str, int, Record})
_SCALARS = frozenset({str, int, float, bool, bytes, type(None), Name})
_U16 = struct.Struct("<H").unpack_from
_I32 = struct.Struct("<i").unpack_from
_U32 = struct.Struct("<I").unpack_from
_U64 = struct.Struct("<Q").unpack_from
_F64 = struct.Struct(">d").unpack_from


def _text(data: bytes, start: int, length: int) -> str:
    # A length beyond the end cuts the text short here and fails at the next opcode.
    return data[start : start + length].decode("utf-8")


def _bytes(data: bytes, start: int, length: int) -> bytes:
    if start + length > len(data):
        raise IndexError
    return data[start : start + length]


def _line(data: bytes, start: int) -> tuple[str, int]:
    end = data.find(b"\n", start)
    if end < 0:
        raise IndexError
    return data[start:end].decode("utf-8"), end + 1


def _put(target: Any, items: list[Any], vocabulary: Vocabulary) -> None:
    if vocabulary.wide and type(target) is Record:
        target.items.extend(items)
        return
    if type(target) is not dict or len(items) % 2:
        raise PickleRefusedError("it puts items into something that is not a dictionary")
    keys = items[::2]
    for key in keys:
        # Hashing a tuple is recursive in C; a deep one would end the process.
        if type(key) not in _KEYS and not (vocabulary.wide and _is_shallow(key)):
            raise PickleRefusedError(f"it uses a {type(key).__name__} as a dictionary key")
    target.update(zip(keys, items[1::2], strict=True))


def _is_shallow(key: Any) -> bool:
    if type(key) is tuple:
        return all(type(one) in _SCALARS for one in key)
    return type(key) in _SCALARS


def _extend(target: Any, items: list[Any], vocabulary: Vocabulary) -> None:
    if vocabulary.wide and type(target) is Record:
        target.items.extend(items)
        return
    if type(target) is not list:
        raise PickleRefusedError("it appends to something that is not a list")
    target.extend(items)


def _reduce(function: Any, arguments: Any, vocabulary: Vocabulary) -> Any:
    if type(function) is not Name or type(arguments) is not tuple:
        raise PickleRefusedError("it calls something that is not a function")
    reducer = vocabulary.calls.get(function.name)
    if reducer is None and vocabulary.wide:
        return Record(function.name, arguments)
    if reducer is None:
        raise PickleRefusedError(f"it calls {escaped(function.name)}, which metadata never does")
    return reducer(arguments)


def _new(cls: Any, arguments: Any, vocabulary: Vocabulary) -> Any:
    if vocabulary.wide and type(cls) is Name and type(arguments) is tuple:
        return _reduce(cls, arguments, vocabulary)
    if type(cls) is not Name or cls.name not in vocabulary.objects:
        raise PickleRefusedError("it makes an object of something that is not a class")
    if type(arguments) is not tuple or arguments:
        raise PickleRefusedError(f"it makes a {escaped(cls.name)} with arguments")
    return Record(cls.name)


def _build(target: Any, state: Any, vocabulary: Vocabulary) -> None:
    if vocabulary.wide:
        if type(target) is Record:
            target.state = state
        return  # else attributes of what is plain data here, such as those of an OrderedDict
    if type(target) is not Record or target.state is not None or type(state) not in (dict, tuple):
        raise PickleRefusedError("it sets the state of something that has none, or twice")
    target.state = state


def _run(data: bytes, vocabulary: Vocabulary) -> Any:
    """The interpreter: one loop, because a metadata file can have tens of millions of opcodes."""
    if len(data) < 2 or data[0] != 0x80 or data[1] not in ((2, 3, 4, 5) if vocabulary.wide else (4, 5)):
        raise PickleRefusedError("it is not a pickle of protocol 4 or 5")
    at = 2
    stack: list[Any] = []
    marks: list[list[Any]] = []
    memo: list[Any] = []
    made = 0
    while True:
        # Between two slices, and not at each opcode, so that the check costs nothing.
        if len(stack) > MAX_OPEN or len(marks) > MAX_NESTED or 2 * len(memo) > at or 4 * made > at + SLICE:
            raise PickleRefusedError(f"it piles up values that nothing uses, {at} bytes into it")
        for _ in range(SLICE):
            op = data[at]
            at += 1
            if op == 0x68:  # BINGET
                stack.append(memo[data[at]])
                at += 1
            elif op == 0x6A:  # LONG_BINGET
                stack.append(memo[_U32(data, at)[0]])
                at += 4
            elif op == 0x94:  # MEMOIZE
                memo.append(stack[-1])
            elif op == 0x4B:  # BININT1
                stack.append(data[at])
                at += 1
            elif op == 0x4D:  # BININT2
                stack.append(_U16(data, at)[0])
                at += 2
            elif op == 0x4A:  # BININT
                stack.append(_I32(data, at)[0])
                at += 4
            elif op == 0x8A:  # LONG1
                length = data[at]
                if length > (MAX_WIDE_INT_BYTES if vocabulary.wide else MAX_INT_BYTES):
                    raise PickleRefusedError(f"it holds a whole number of {length} bytes")
                stack.append(int.from_bytes(data[at + 1 : at + 1 + length], "little", signed=True))
                at += 1 + length
            elif op == 0x8C:  # SHORT_BINUNICODE
                length = data[at]
                stack.append(_text(data, at + 1, length))
                at += 1 + length
            elif op == 0x58:  # BINUNICODE
                length = _U32(data, at)[0]
                stack.append(_text(data, at + 4, length))
                at += 4 + length
            elif op == 0x8D:  # BINUNICODE8
                length = _U64(data, at)[0]
                stack.append(_text(data, at + 8, length))
                at += 8 + length
            elif op == 0x29:  # EMPTY_TUPLE
                stack.append(())
            elif op == 0x85:  # TUPLE1
                made += 1
                stack[-1] = (stack[-1],)
            elif op == 0x86:  # TUPLE2
                stack[-2:] = [(stack[-2], stack[-1])]
            elif op == 0x87:  # TUPLE3
                stack[-3:] = [(stack[-3], stack[-2], stack[-1])]
            elif op == 0x28:  # MARK
                marks.append(stack)
                stack = []
            elif op == 0x74:  # TUPLE
                items, stack = stack, marks.pop()
                stack.append(tuple(items))
            elif op == 0x7D:  # EMPTY_DICT
                made += 1
                stack.append({})
            elif op == 0x75:  # SETITEMS
                items, stack = stack, marks.pop()
                _put(stack[-1], items, vocabulary)
            elif op == 0x73:  # SETITEM
                value, key = stack.pop(), stack.pop()
                _put(stack[-1], [key, value], vocabulary)
            elif op == 0x81:  # NEWOBJ
                made += 1
                arguments = stack.pop()
                stack[-1] = _new(stack[-1], arguments, vocabulary)
            elif op == 0x62:  # BUILD
                state = stack.pop()
                _build(stack[-1], state, vocabulary)
            elif op == 0x52:  # REDUCE
                arguments = stack.pop()
                stack[-1] = _reduce(stack[-1], arguments, vocabulary)
            elif op == 0x93:  # STACK_GLOBAL
                qualified = stack.pop()
                stack[-1] = vocabulary.name(stack[-1], qualified)
            elif op == 0x5D:  # EMPTY_LIST
                made += 1
                stack.append([])
            elif op == 0x65:  # APPENDS
                items, stack = stack, marks.pop()
                _extend(stack[-1], items, vocabulary)
            elif op == 0x61:  # APPEND
                value = stack.pop()
                _extend(stack[-1], [value], vocabulary)
            elif op == 0x4E:  # NONE
                stack.append(None)
            elif op == 0x88:  # NEWTRUE
                stack.append(True)
            elif op == 0x89:  # NEWFALSE
                stack.append(False)
            elif op == 0x47:  # BINFLOAT
                stack.append(_F64(data, at)[0])
                at += 8
            elif op == 0x95:  # FRAME: only a hint for readers of streams
                _U64(data, at)
                at += 8
            elif op == 0x2E:  # STOP
                if marks or len(stack) != 1:
                    raise PickleRefusedError("it ends in the middle of a value")
                if at != len(data):
                    raise PickleRefusedError(f"{len(data) - at} bytes follow its end")
                return stack[0]
            elif not vocabulary.wide:
                raise PickleRefusedError(f"it uses the opcode 0x{op:02x}, which metadata never does")
            # From here on only what people have pickled themselves, with torch.save.
            elif op in (0x71, 0x72):  # BINPUT, LONG_BINPUT
                number = data[at] if op == 0x71 else _U32(data, at)[0]
                at += 1 if op == 0x71 else 4
                if number > len(memo):  # picklers count; a list of any length for one number is a trap
                    raise PickleRefusedError("it remembers values out of order")
                memo[number : number + 1] = [stack[-1]]
            elif op == 0x63:  # GLOBAL
                module, at = _line(data, at)
                qualified, at = _line(data, at)
                stack.append(vocabulary.name(module, qualified))
            elif op == 0x51:  # BINPERSID
                assert vocabulary.persistent is not None
                stack[-1] = vocabulary.persistent(stack[-1])
            elif op in (0x43, 0x55):  # SHORT_BINBYTES, SHORT_BINSTRING
                length = data[at]
                stack.append(_bytes(data, at + 1, length))
                at += 1 + length
            elif op == 0x42:  # BINBYTES
                length = _U32(data, at)[0]
                stack.append(_bytes(data, at + 4, length))
                at += 4 + length
            elif op in (0x8E, 0x96):  # BINBYTES8, BYTEARRAY8
                length = _U64(data, at)[0]
                stack.append(_bytes(data, at + 8, length))
                at += 8 + length
            elif op == 0x8F:  # EMPTY_SET
                made += 1
                stack.append(Record("builtins.set"))
            elif op == 0x90:  # ADDITEMS
                items, stack = stack, marks.pop()
                _extend(stack[-1], items, vocabulary)
            elif op == 0x91:  # FROZENSET
                items, stack = stack, marks.pop()
                stack.append(Record("builtins.frozenset", (items,)))
            elif op == 0x92:  # NEWOBJ_EX
                made += 1
                keywords, arguments = stack.pop(), stack.pop()
                stack[-1] = _new(stack[-1], (*arguments, keywords), vocabulary)
            else:
                raise PickleRefusedError(f"it uses the opcode 0x{op:02x}, which no torch.save does")


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
    if (
        len(arguments) != 2
        or type(arguments[0]) is not Name
        or arguments[0].name
        not in (
            *_MEMORY_FORMATS,
            *_WRITE_ITEM_TYPES,
        )
    ):
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


OF_ALL = Vocabulary(
    objects=VOCABULARY.objects
    | {f"{_PLANNER}.{name}" for name in ("SavePlan", "WriteItem", "TensorWriteData")}
    | {_MEGATRONS_METADATA, f"{_MEGATRON}.MCoreSavePlan"},
    calls={**VOCABULARY.calls, **dict.fromkeys(_WRITE_ITEM_TYPES, _ignored)},
    constant=VOCABULARY.constant,
)
"""Metadata of whoever writes DCP: Megatron keeps its plans in there too, which nothing reads."""


class _Restricted(pickle.Unpickler):
    """Python's own, with no name but those that metadata consists of."""

    def find_class(self, module: str, name: str) -> Any:
        from holdfast.base import tolerant

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
        return _convert(read_pickle(data, OF_ALL))
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
    top = _MEGATRONS_METADATA if type(value) is Record and value.cls == _MEGATRONS_METADATA else _METADATA
    fields = _fields(value, top, "the top")
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
            tensors[name] = _tensor(entry, f"entry {escaped(name)}")
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
    return name, None if offsets is None else _numbers(offsets, f"storage index {escaped(name)}")


def _info(value: Any, key: StorageKey) -> StorageEntry:
    what = f"storage of {show_key(key)}"
    fields = _fields(value, _STORAGE_INFO, what)
    path = fields.get("relative_path")
    if type(path) is not str or len(path) > 4096 or not is_safe_path(path):
        shown = escaped(path) if type(path) is str else type(path).__name__
        raise MetadataError(f"{what} lies in {shown!r}, which is not a path inside the directory")
    return StorageEntry(path, _number(fields.get("offset"), what), _number(fields.get("length"), what))


def _origin(value: Any) -> str:
    if value is None:
        return ""
    identity = _fields(value, _STORAGE_META, "storage_meta").get("checkpoint_id")
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
    for name, tensor in meta.tensors.items():
        fault = _tensor_fault(name, tensor, meta.storage)
        if fault:
            problems.append(Problem(Reason.INCOMPLETE, METADATA, fault))
    for name in meta.objects:
        if (name, None) not in meta.storage:
            problems.append(Problem(Reason.INCOMPLETE, METADATA, f"object {escaped(name)} is stored nowhere"))
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
        return f"tensor {escaped(name)} has {wanted} elements, its chunks {held}"
    if len(tensor.chunks) > 1 and _overlap(tensor.chunks):
        return f"chunks of tensor {escaped(name)} overlap, so a part of it is missing"
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
