"""DCP's `.metadata`, and any pickle, read as data: nothing in it is ever imported or executed.

`.metadata` is a pickle of `torch.distributed.checkpoint.metadata.Metadata`. It is read as data (see
below), every field is checked for its type and range, and the result is plain structs. Whatever is odd
becomes a `MetadataError` that says what; no other exception leaves this module for bad contents.

`completeness` then says whether the files beside it can hold what it promises. That is all that can be known
of a stock DCP directory, which has no digests.
"""

from __future__ import annotations

import contextlib
import io
import math
import pickle
import re
import secrets
import struct
from collections.abc import Callable, ItemsView, Iterable, Iterator, Mapping, Sequence, ValuesView
from pathlib import Path
from typing import Any, cast, overload

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

    __slots__ = ("cls", "state")

    def __init__(self, cls: str) -> None:
        self.cls = cls
        self.state: Any = None


Reducer = Callable[[tuple[Any, ...]], Any]
"""Turns the arguments a pickle would call a function with into plain data."""


class Vocabulary:
    """The names a pickle may use.

    `objects`: classes whose instances become `Record`s. `calls`: functions replaced by a reducer of ours.
    `constant`: whether a name that is neither stands for itself, as torch's dtypes do.
    """

    def __init__(
        self, objects: frozenset[str], calls: Mapping[str, Reducer], constant: Callable[[str], bool]
    ) -> None:
        self.objects = objects
        self.calls = calls
        self.constant = constant

    def name(self, module: Any, qualified: Any) -> Name:
        if type(module) is not str or type(qualified) is not str:
            raise PickleRefusedError("it names a class by something that is not text")
        full = f"{module[:200]}.{qualified[:200]}"
        if full in self.objects or full in self.calls or self.constant(full):
            return Name(full)
        raise PickleRefusedError(f"it refers to {escaped(full)}, which metadata never does")


def read_pickle(data: bytes, vocabulary: Vocabulary, regular: _Regular | None = None) -> Any:
    """The value that `data` describes, made of plain containers, `Record`s and `Name`s.

    With `regular`, of which more below, also of what stands for the stretches that it has recognised.
    """
    try:
        return _run(data, vocabulary, regular)
    except (LookupError, struct.error) as error:
        raise PickleRefusedError("it ends too early or is garbled") from error
    except UnicodeDecodeError as error:
        raise PickleRefusedError("it holds text that is not UTF-8") from error
    except MemoryError as error:
        raise PickleRefusedError("it describes more than fits into memory") from error


_U16 = struct.Struct("<H").unpack_from
_I32 = struct.Struct("<i").unpack_from
_U32 = struct.Struct("<I").unpack_from
_U64 = struct.Struct("<Q").unpack_from
_F64 = struct.Struct(">d").unpack_from


def _text(data: bytes, start: int, length: int) -> str:
    # A length beyond the end cuts the text short here and fails at the next opcode.
    return data[start : start + length].decode("utf-8")


def _put(target: Any, items: list[Any]) -> None:
    if type(target) is not dict or len(items) % 2:
        raise PickleRefusedError("it puts items into something that is not a dictionary")
    keys = items[::2]
    for key in keys:
        # Hashing a tuple is recursive in C; a deep one would end the process.
        if type(key) not in (str, int, Record, _StoredRun):
            raise PickleRefusedError(f"it uses a {type(key).__name__} as a dictionary key")
    target.update(zip(keys, items[1::2], strict=True))


def _extend(target: Any, items: list[Any]) -> None:
    if type(target) is not list:
        raise PickleRefusedError("it appends to something that is not a list")
    target.extend(items)


def _reduce(function: Any, arguments: Any, vocabulary: Vocabulary) -> Any:
    if type(function) is not Name or type(arguments) is not tuple:
        raise PickleRefusedError("it calls something that is not a function")
    reducer = vocabulary.calls.get(function.name)
    if reducer is None:
        raise PickleRefusedError(f"it calls {escaped(function.name)}, which metadata never does")
    return reducer(arguments)


def _new(cls: Any, arguments: Any, vocabulary: Vocabulary) -> Record:
    if type(cls) is not Name or cls.name not in vocabulary.objects:
        raise PickleRefusedError("it makes an object of something that is not a class")
    if type(arguments) is not tuple or arguments:
        raise PickleRefusedError(f"it makes a {escaped(cls.name)} with arguments")
    return Record(cls.name)


def _build(target: Any, state: Any) -> None:
    if type(target) is not Record or target.state is not None or type(state) not in (dict, tuple):
        raise PickleRefusedError("it sets the state of something that has none, or twice")
    target.state = state


def _run(data: bytes, vocabulary: Vocabulary, regular: _Regular | None = None) -> Any:
    """The interpreter: one loop, because a metadata file can have tens of millions of opcodes."""
    if len(data) < 2 or data[0] != 0x80 or data[1] not in (4, 5):
        raise PickleRefusedError("it is not a pickle of protocol 4 or 5")
    at = 2
    stack: list[Any] = []
    marks: list[list[Any]] = []
    memo: dict[int, Any] = {}
    known = 0
    """Entries of the memo; what is inside a recognised stretch is counted and not kept."""
    made = 0
    while True:
        # Between two slices, and not at each opcode, so that the check costs nothing.
        if len(stack) > MAX_OPEN or len(marks) > MAX_NESTED or 2 * known > at or 4 * made > at + SLICE:
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
                memo[known] = stack[-1]
                known += 1
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
                if length > MAX_INT_BYTES:
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
                if regular is not None and at in regular.begins:
                    at, known, stack = regular.take(at, known, stack, len(marks), memo)
            elif op == 0x74:  # TUPLE
                items, stack = stack, marks.pop()
                if regular is not None and regular.held:
                    items = regular.given_back(len(marks), items, None)
                stack.append(tuple(items))
            elif op == 0x7D:  # EMPTY_DICT
                made += 1
                stack.append({})
            elif op == 0x75:  # SETITEMS
                items, stack = stack, marks.pop()
                if regular is not None and regular.held:
                    items = regular.given_back(len(marks), items, _StoredRun)
                _put(stack[-1], items)
            elif op == 0x73:  # SETITEM
                value, key = stack.pop(), stack.pop()
                _put(stack[-1], [key, value])
            elif op == 0x81:  # NEWOBJ
                made += 1
                arguments = stack.pop()
                stack[-1] = _new(stack[-1], arguments, vocabulary)
            elif op == 0x62:  # BUILD
                state = stack.pop()
                _build(stack[-1], state)
                if regular is not None and at in regular.begins:
                    at, known, stack = regular.take(at, known, stack, len(marks), memo)
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
                if regular is not None and regular.held:
                    items = regular.given_back(len(marks), items, _ChunkRun)
                _extend(stack[-1], items)
            elif op == 0x61:  # APPEND
                value = stack.pop()
                _extend(stack[-1], [value])
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
                if regular is not None and at in regular.begins:
                    at, known, stack = regular.take(at, known, stack, len(marks), memo)
            elif op == 0x2E:  # STOP
                if marks or len(stack) != 1:
                    raise PickleRefusedError("it ends in the middle of a value")
                if at != len(data):
                    raise PickleRefusedError(f"{len(data) - at} bytes follow its end")
                return stack[0]
            else:
                raise PickleRefusedError(f"it uses the opcode 0x{op:02x}, which metadata never does")


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


_SIZE = "torch.Size"
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


# The stretches of `.metadata` that are always alike, recognised for the whole file at once with numpy.
#
# Nearly all of a large `.metadata` is one of three forms over and over: an entry's description up to its list
# of chunks, a chunk, and a storage index with its storage info. Picklers write each of them as the same
# opcodes in the same order, and only numbers, names and memo indices differ. So every place where one may
# begin is looked at together, a token at a time: what is there must be exactly the form, to its last byte.
# The interpreter then takes a whole run of them at one step, where it comes to stand at its beginning. It
# remains the judge of everything: of what stands around the runs, of what their references mean, and alone of
# the whole file wherever anything is not as expected (`_IrregularError`).


class _IrregularError(Exception):
    """The stretches cannot be taken as they were recognised; the interpreter reads the file by itself."""


Array = Any
"""A numpy array. numpy is imported where it is needed: commands that read no metadata start without it."""

REGULAR_FROM = 16 * 1024
"""Smaller files are read by the interpreter alone."""
BLOCK = 4 * 1024 * 1024
"""Bytes whose candidates are looked at together."""
REGULAR_DIMENSIONS = 5
"""Of tensors with more, each chunk is read by the interpreter."""
MOST_HELD = MAX_OPEN // 2
"""Objects of one container; where there are more the interpreter refuses them, or not, by its own bound."""
_TAIL = 64
"""Bytes before the end in which nothing is recognised, so that no look reaches beyond it."""
_MADE = b")\x81\x94}\x94("  # EMPTY_TUPLE NEWOBJ MEMOIZE EMPTY_DICT MEMOIZE MARK


class _Cursors:
    """Places in the file that are read on together. `rows` are those that still fit, by their number."""

    def __init__(self, data: bytes, at: Array, same: Mapping[str, int]) -> None:
        import numpy as np

        self._np = np
        self._bytes = np.frombuffer(data, np.uint8)
        # The eight bytes from each place on, as one number.
        self._eight = np.ndarray((len(data) - 7,), "<u8", buffer=data, strides=(1,))
        self._last = len(data) - _TAIL
        self._same = same
        """References that are known to be the same in the whole file."""
        self.start = at
        self.at = at.copy()
        self.columns: dict[str, Array] = {}
        """What was read, by name; a value for each row."""

    def keep(self, fits: Array) -> None:
        fits = fits & (self.at < self._last)
        if not fits.all():
            self.start, self.at = self.start[fits], self.at[fits]
            self.columns = {name: column[fits] for name, column in self.columns.items()}

    def literal(self, text: bytes) -> None:
        fits = self._np.ones(len(self.at), bool)
        for begin in range(0, len(text), 8):
            piece = text[begin : begin + 8]
            found = self._eight[self.at + begin] & self._np.uint64((1 << 8 * len(piece)) - 1)
            fits &= found == self._np.uint64(int.from_bytes(piece, "little"))
        self.at += len(text)
        self.keep(fits)

    def reference(self, name: str) -> None:
        """BINGET or LONG_BINGET."""
        found = self._eight[self.at]
        op, short, long = found & 0xFF, (found >> 8) & 0xFF, (found >> 8) & 0xFFFFFFFF
        is_short = op == 0x68
        self.columns[name] = self._np.where(is_short, short, long).astype("u4")
        self.at += self._np.where(is_short, 2, 5)
        fits = is_short | (op == 0x6A)
        if name in self._same:
            fits &= self.columns[name] == self._same[name]
        self.keep(fits)

    def _whole(self, at: Array) -> tuple[Array, Array, Array]:
        """(value, length, whether there is one) of whole numbers from 0 up."""
        np = self._np
        found = self._eight[at]
        op, rest = found & 0xFF, found >> 8
        one, two, four, long = op == 0x4B, op == 0x4D, op == 0x4A, op == 0x8A
        value = np.where(one, rest & 0xFF, np.where(two, rest & 0xFFFF, rest & 0xFFFFFFFF))
        length = np.where(one, 2, np.where(two, 3, 5))
        fits = one | two | (four & (value < 1 << 31))
        if long.any():
            rows = np.flatnonzero(long)
            count = rest[rows] & 0xFF
            bits = 8 * np.clip(count, 1, 8)
            read = self._eight[at[rows] + 2] & (np.uint64(2**64 - 1) >> (64 - bits))
            value[rows], length[rows] = read, 2 + count
            fits[rows] = (count >= 1) & (count <= 8) & (read >> (bits - 1) == 0)
        return value.astype("i8"), length, fits

    def number(self, name: str) -> None:
        self.columns[name], length, fits = self._whole(self.at)
        self.at += length
        self.keep(fits)

    def number_or_none(self) -> None:
        none = self._bytes[self.at] == 0x4E
        _, length, fits = self._whole(self.at)
        self.at += self._np.where(none, 1, length)
        self.keep(none | fits)

    def size(self, name: str, *, or_none: bool = False) -> None:
        """torch.Size, as a call with a tuple of numbers: `name` is the values, filled up with zeros."""
        np = self._np
        count = len(self.at)
        none = (self._bytes[self.at] == 0x4E) if or_none else np.zeros(count, bool)
        found = self._eight[self.at]
        op, short, long = found & 0xFF, (found >> 8) & 0xFF, (found >> 8) & 0xFFFFFFFF
        is_short = op == 0x68
        self.columns[f"{name}.class"] = np.where(is_short, short, long).astype("u4")
        fits = none | is_short | (op == 0x6A)
        at = np.minimum(self.at + np.where(is_short, 2, 5), self._last)
        mark = self._bytes[at] == 0x28
        at = at + mark
        dims = np.zeros(count, "i1")
        values = np.zeros((count, REGULAR_DIMENSIONS), "i8")
        on = fits & ~none
        for dimension in range(REGULAR_DIMENSIONS):
            rows = np.flatnonzero(on)
            value, length, read = self._whole(at[rows])
            on[rows[~read]] = False
            rows = rows[read]
            if not len(rows):
                break
            values[rows, dimension] = value[read]
            at[rows] = np.minimum(at[rows] + length[read], self._last)
            dims[rows] += 1
        ends = np.frombuffer(b")\x85\x86\x87" + b"t" * REGULAR_DIMENSIONS, np.uint8)
        fits &= none | ((self._bytes[at] == ends[dims]) & (mark == (dims > 3)))
        at += 1
        fits &= none | (dims == 0) | (self._bytes[at] == 0x94)  # the empty tuple is not memoized
        at += dims > 0
        fits &= none | (
            (self._eight[at] & np.uint64(0xFFFFFFFF)) == int.from_bytes(b"\x85\x94R\x94", "little")
        )
        self.columns[name] = values
        self.columns[f"{name}.dims"] = np.where(none, -1, dims).astype("i1")
        self.columns["memos"] = self.columns.get("memos", 0) + np.where(none, 0, 2 + (dims > 0)).astype("i4")
        self.at = np.where(none, self.at + 1, at + 4)
        self.keep(fits)

    def flag(self) -> None:
        found = self._bytes[self.at]
        self.at += 1
        self.keep((found == 0x88) | (found == 0x89))

    def memos(self, count: int) -> None:
        """So many more MEMOIZE were in it."""
        self.columns["memos"] = self.columns["memos"] + self._np.int32(count)

    def text(self, name: str, *, or_reference: bool = False) -> None:
        """A short text with its MEMOIZE: `name` is where it begins, its length beside it."""
        np = self._np
        found = self._eight[self.at]
        op, short = found & 0xFF, (found >> 8) & 0xFF
        inline = op == 0x8C
        length = np.where(inline, short, 0).astype("i8")
        end = np.minimum(self.at + 2 + length, self._last)
        fits = inline & (self._bytes[end] == 0x94)
        after = end + 1
        if or_reference:
            is_short = op == 0x68
            fits |= is_short | (op == 0x6A)
            long = (found >> 8) & 0xFFFFFFFF
            self.columns[f"{name}.ref"] = np.where(is_short, short, long).astype("u4")
            after = np.where(inline, after, self.at + np.where(is_short, 2, 5))
        self.columns[name] = np.where(inline, self.at + 2, -1)
        self.columns[f"{name}.length"] = length
        self.columns["memos"] = self.columns.get("memos", 0) + inline.astype("i4")
        self.at = after
        self.keep(fits)


def _candidates(data: bytes, begin: int, end: int) -> tuple[Array, Array]:
    """Where an object may begin, and where an entry with its name, by a byte or two that each of them has."""
    import numpy as np

    whole = np.frombuffer(data, np.uint8)
    block = whole[begin:end]
    made = np.flatnonzero(block == 0x81) + begin
    made = made[(made >= 8) & (made < len(data) - _TAIL)]
    made = made[whole[made - 1] == 0x29]
    long = whole[made - 6] == 0x6A
    objects = made[long | (whole[made - 3] == 0x68)]
    objects = objects - np.where(whole[objects - 6] == 0x6A, 6, 3)
    texts = np.flatnonzero(block == 0x8C) + begin
    texts = texts[(texts >= 8) & (texts < len(data) - _TAIL)]
    before = whole[texts - 1]
    return objects, texts[(before == 0x62) | (before == 0x28)]


def _as_entries(at: _Cursors) -> None:
    """A name and a TensorStorageMetadata, up to its list of chunks."""
    at.text("name")
    at.reference("class")
    at.literal(_MADE)
    at.reference("properties")
    at.reference("properties.class")
    at.literal(b")\x81\x94(")
    at.reference("dtype")
    at.reference("layout")
    at.flag()
    at.reference("format")
    at.flag()
    at.literal(b"t\x94b")
    at.reference("size")
    at.size("shape")
    at.reference("chunks")
    at.literal(b"]\x94")
    at.memos(5)


def _as_chunks(at: _Cursors) -> None:
    at.reference("class")
    at.literal(_MADE)
    at.reference("offsets")
    at.size("offset")
    at.reference("sizes")
    at.size("extent")
    at.literal(b"ub")
    at.memos(2)


def _as_stored(at: _Cursors) -> None:
    """A MetadataIndex and the _StorageInfo that belongs to it."""
    at.reference("class")
    at.literal(_MADE)
    at.reference("fqn")
    at.reference("name")
    at.reference("index")
    at.number_or_none()
    at.reference("offset")
    at.size("place", or_none=True)
    at.literal(b"ub")
    at.reference("info.class")
    at.literal(_MADE)
    at.reference("relative_path")
    at.text("path", or_reference=True)
    at.reference("info.offset")
    at.number("start")
    at.reference("length")
    at.number("bytes")
    at.literal(b"ub")
    at.memos(4)


_SAME: dict[str, dict[str, str]] = {
    "entries": {
        "class": _TENSOR, "properties": "=properties", "properties.class": "", "layout": "*", "format": "*",
        "size": "=size", "shape.class": _SIZE, "chunks": "=chunks",
    },
    "chunks": {
        "class": _CHUNK, "offsets": "=offsets", "offset.class": _SIZE, "sizes": "=sizes",
        "extent.class": _SIZE,
    },
    "stored": {
        "class": _INDEX, "fqn": "=fqn", "index": "=index", "offset": "=offset", "place.class": _SIZE,
        "info.class": _STORAGE_INFO, "relative_path": "=relative_path", "info.offset": "=offset",
        "length": "=length",
    },
}  # fmt: skip
"""References that are the same in the whole file, and what they must stand for: a class, `=` a text,
TensorProperties (of either module), or `*` anything."""


class _Table:
    """All stretches of one form."""

    def __init__(self, form: str) -> None:
        self._form = form
        self._parts: list[dict[str, Array]] = []
        self.same: dict[str, int] = {}
        self.checked = False
        self.columns: dict[str, Array] = {}

    def add(self, cursors: _Cursors) -> None:
        import numpy as np

        columns = cursors.columns
        columns["begin"], columns["end"] = cursors.start, cursors.at
        if not len(cursors.at):
            return
        fits = np.ones(len(cursors.at), bool)
        for name in _SAME[self._form]:
            column = columns.pop(name)
            there = columns["place.dims"] >= 0 if name == "place.class" else np.ones(len(column), bool)
            if name not in self.same and there.any():
                self.same[name] = int(column[np.argmax(there)])
            fits &= ~there | (column == self.same.get(name, -1))
        self._parts.append({name: column[fits] for name, column in columns.items()})

    def seal(self) -> None:
        """All blocks are in it."""
        import numpy as np

        parts, self._parts = self._parts, []
        for name in list(parts[0]) if parts else []:
            self.columns[name] = np.concatenate([part.pop(name) for part in parts])

    def __len__(self) -> int:
        return len(self.columns["begin"]) if self.columns else 0

    def runs(self) -> dict[int, tuple[int, int]]:
        """Those that stand one right after the other, by where the first begins: (first, past the last)."""
        import numpy as np

        if not len(self):
            return {}
        begin, end = self.columns["begin"], self.columns["end"]
        first = np.flatnonzero(np.concatenate([[True], end[:-1] != begin[1:]]))
        past = np.append(first[1:], len(begin))
        return dict(zip(begin[first].tolist(), zip(first.tolist(), past.tolist(), strict=True), strict=True))

    def check(self, memo: Mapping[int, Any]) -> None:
        """Whether the references stand for what they must: once, as an entry of the memo never changes."""
        if self.checked:
            return
        for name, reference in self.same.items():
            wanted, found = _SAME[self._form][name], memo.get(reference, self)
            if wanted == "*":
                right = found is not self
            elif wanted.startswith("="):
                right = type(found) is str and found == wanted[1:]
            else:
                right = type(found) is Name and (
                    found.name == wanted or (not wanted and found.name in _PROPERTIES)
                )
            if not right:
                raise _IrregularError
        self.checked = True


class _Run:
    """Stretches `first` to `past` of a table, in the place of the objects that they describe."""

    __slots__ = ("first", "known", "past")

    def __init__(self, first: int, past: int, known: int) -> None:
        self.first = first
        self.past = past
        self.known = known
        """Entries of the memo at its beginning."""


class _ChunkRun(_Run):
    """In a list."""


class _StoredRun(_Run):
    """In a dictionary, as a key; its value is None."""


class _Held:
    """What lies on the stack up to the end of a run, out of the reach of every opcode but the one that takes
    all of it: no other finds a run where the interpreter alone would find an object."""

    __slots__ = ("count", "items")

    def __init__(self) -> None:
        self.items: list[Any] = []
        self.count = 0
        """Of the objects that it stands for."""


class _Entry:
    """A regular TensorStorageMetadata."""

    __slots__ = ("known", "row", "runs")

    def __init__(self, row: int, known: int, runs: list[_ChunkRun]) -> None:
        self.row = row
        self.known = known
        self.runs = runs


class _Regular:
    """The stretches of one file, by the place where the interpreter can take them."""

    def __init__(self, data: bytes) -> None:
        import numpy as np

        self._data = data
        self.entries, self.chunks, self.stored = _Table("entries"), _Table("chunks"), _Table("stored")
        for begin in range(0, len(data), BLOCK):
            objects, texts = _candidates(data, begin, begin + BLOCK)
            for table, places, read in (
                (self.entries, texts, _as_entries),
                (self.chunks, objects, _as_chunks),
                (self.stored, objects, _as_stored),
            ):
                cursors = _Cursors(data, places, table.same)
                read(cursors)
                table.add(cursors)
        for table in (self.entries, self.chunks, self.stored):
            table.seal()
        self._chunk_runs, self._stored_runs = self.chunks.runs(), self.stored.runs()
        begins = self.entries.columns["begin"].tolist() if len(self.entries) else []
        self.held: dict[int, _Held] = {}
        """By how many marks are open."""
        self._rows = dict(zip(begins, range(len(begins)), strict=True))
        self._entry_ends = self.entries.columns["end"].tolist() if begins else []
        self.begins = {*self._chunk_runs, *self._stored_runs, *self._rows}
        self.memo: Mapping[int, Any] = {}
        # Entries of the memo that are made before each chunk or storage index.
        self._chunk_memos, self._stored_memos = (
            np.concatenate([[0], np.cumsum(table.columns["memos"], dtype="i8")])
            if len(table)
            else np.zeros(1, "i8")
            for table in (self.chunks, self.stored)
        )
        self._inline = (
            np.flatnonzero(self.stored.columns["path"] >= 0) if len(self.stored) else np.zeros(0, "i8")
        )

    def take(
        self, at: int, known: int, stack: list[Any], depth: int, memo: dict[int, Any]
    ) -> tuple[int, int, list[Any]]:
        """What begins here: (place, size of the memo, stack) after it."""
        self.memo = memo
        if 2 * known > at or not depth:
            raise _IrregularError
        if (row := self._rows.get(at)) is not None:
            return self._take_entry(row, at, known, stack, memo)
        held = self.held.setdefault(depth, _Held())
        held.items += stack
        held.count += len(stack)
        taken = self._take_chunks(at, known)
        if taken is not None:
            self.chunks.check(memo)
            at, known, run = taken
            held.items.append(run)
            held.count += run.past - run.first
        else:
            first, past = self._stored_runs[at]
            self.stored.check(memo)
            self._remember_paths(first, past, known, memo)
            if len(held.items) % 2:
                raise _IrregularError
            held.items += [_StoredRun(first, past, known), None]
            held.count += 2 * (past - first)
            at = int(self.stored.columns["end"][past - 1])
            known += int(self._stored_memos[past] - self._stored_memos[first])
        if held.count > MOST_HELD:
            raise _IrregularError
        return at, known, []

    def given_back(self, depth: int, items: list[Any], kind: type[_Run] | None) -> list[Any]:
        """What is held there and these, for an opcode that takes all up to a mark, and `kind` of run."""
        held = self.held.pop(depth + 1, None)
        if held is None:
            return items
        whole = held.items + items
        places = whole if kind is _ChunkRun else whole[::2]
        if kind is None or sum(isinstance(one, _Run) for one in whole) != sum(
            type(one) is kind for one in places
        ):
            raise _IrregularError
        return whole

    def _take_chunks(self, at: int, known: int) -> tuple[int, int, _ChunkRun] | None:
        found = self._chunk_runs.get(at)
        if found is None:
            return None
        first, past = found
        memos = int(self._chunk_memos[past] - self._chunk_memos[first])
        return int(self.chunks.columns["end"][past - 1]), known + memos, _ChunkRun(first, past, known)

    def _take_entry(
        self, row: int, at: int, known: int, stack: list[Any], memo: dict[int, Any]
    ) -> tuple[int, int, list[Any]]:
        """An entry with all its chunks, to the BUILD at its end."""
        columns, data = self.entries.columns, self._data
        end, now = self._entry_ends[row], known + int(columns["memos"][row])
        runs: list[_ChunkRun] = []
        while data[end] == 0x28:  # MARK, some chunks, APPENDS
            taken = self._take_chunks(end + 1, now)
            if taken is None or data[taken[0]] != 0x65 or taken[2].past - taken[2].first > MOST_HELD:
                return at, known, stack
            end, now = taken[0] + 1, taken[1]
            runs.append(taken[2])
        if not runs and (taken := self._take_chunks(end, now)) is not None:  # one chunk, APPEND
            if data[taken[0]] != 0x61 or taken[2].past != taken[2].first + 1:
                return at, known, stack
            end, now = taken[0] + 1, taken[1]
            runs.append(taken[2])
        if data[end : end + 2] != b"ub":
            return at, known, stack
        self.entries.check(memo)
        if runs:
            self.chunks.check(memo)
        start = int(columns["name"][row])
        name = data[start : start + int(columns["name.length"][row])].decode("utf-8")
        memo[known] = name
        stack += [name, _Entry(row, known, runs)]
        return end + 2, now, stack

    def _remember_paths(self, first: int, past: int, known: int, memo: dict[int, Any]) -> None:
        """Paths that are spelled out in a run: later ones refer to them."""
        import numpy as np

        columns = self.stored.columns
        begin, end = np.searchsorted(self._inline, [first, past])
        for row in self._inline[begin:end].tolist():
            start = int(columns["path"][row])
            text = self._data[start : start + int(columns["path.length"][row])].decode("utf-8")
            memo[known + int(self._stored_memos[row + 1] - self._stored_memos[first]) - 1] = text

    def chunks_of(self, run: _ChunkRun, dims: int) -> Chunks:
        """Some chunks of a tensor of so many dimensions."""
        columns, rows = self.chunks.columns, slice(run.first, run.past)
        if (columns["offset.dims"][rows] != dims).any() or (columns["extent.dims"][rows] != dims).any():
            raise _IrregularError  # the interpreter names it
        return Chunks(columns["offset"][rows, :dims], columns["extent"][rows, :dims])

    def tensors(self, entries: Sequence[_Entry]) -> dict[int, TensorEntry]:
        """The tensors that stand for regular entries, by the id of the entry."""
        dtypes: dict[int, str] = {}
        found: dict[int, TensorEntry] = {}
        if not entries:
            return found
        columns = self.entries.columns
        rows = [entry.row for entry in entries]
        of, dims, shapes = (columns[name][rows].tolist() for name in ("dtype", "shape.dims", "shape"))
        for entry, reference, count, numbers in zip(entries, of, dims, shapes, strict=True):
            dtype = dtypes.get(reference)
            if dtype is None:
                named = self.memo.get(reference)
                if type(named) is not Name or _DTYPE.fullmatch(named.name) is None:
                    raise _IrregularError
                dtype = dtypes[reference] = named.name.removeprefix("torch.")
            if reference >= entry.known:
                raise _IrregularError
            chunks = joined([self.chunks_of(run, count) for run in entry.runs])
            found[id(entry)] = TensorEntry(tuple(numbers[:count]), dtype, chunks)
        return found

    def storage(self, runs: Sequence[_StoredRun], others: dict[StorageKey, StorageEntry]) -> StoredChunks:
        """Where the chunks lie; `others` were read one by one."""
        import numpy as np

        columns = self.stored.columns
        rows = np.r_[tuple(slice(run.first, run.past) for run in runs)]
        counts = [run.past - run.first for run in runs]
        known = np.repeat([run.known - int(self._stored_memos[run.first]) for run in runs], counts)
        known += self._stored_memos[rows]
        names, name = self._texts(columns["name"][rows], known)
        inline = columns["path"][rows] >= 0
        of = np.where(inline, known + columns["memos"][rows] - 1, columns["path.ref"][rows])
        paths, path = self._texts(of, np.where(inline, of + 1, known))
        for one in paths:
            if len(one) > 4096 or not is_safe_path(one):
                raise _IrregularError
        table = {
            "name": name, "dims": columns["place.dims"][rows], "place": columns["place"][rows], "path": path,
            "start": columns["start"][rows], "length": columns["bytes"][rows],
        }  # fmt: skip
        return StoredChunks(names, paths, table, others)

    def _texts(self, references: Array, known: Array) -> tuple[list[str], Array]:
        """The texts that entries of the memo are, each once, and which of them each row means."""
        import numpy as np

        if (references >= known).any():
            raise _IrregularError
        used, which = np.unique(references, return_inverse=True)
        numbers: dict[str, int] = {}
        texts = [self.memo.get(reference) for reference in used.tolist()]
        if not all(type(text) is str for text in texts):
            raise _IrregularError
        order = [numbers.setdefault(str(text), len(numbers)) for text in texts]
        return list(numbers), np.array(order, "i4")[which]


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

    def __iter__(self) -> Iterator[tuple[Offsets, Offsets]]:
        return zip(map(tuple, self.offsets.tolist()), map(tuple, self.sizes.tolist()), strict=True)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Sequence) and list(self) == list(other)

    __hash__ = None  # type: ignore[assignment]


_MULTIPLIERS = [secrets.randbits(64) | 1 for _ in range(REGULAR_DIMENSIONS + 3)]
"""Of this process: nobody can prepare keys that fall together."""


def joined(parts: Sequence[Sequence[tuple[Offsets, Offsets]]]) -> Sequence[tuple[Offsets, Offsets]]:
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
        """`table` has columns `name` and `path` (numbers), `dims` (-1 for none), `place`, `start`, `length`."""
        import numpy as np

        self.number, self._path_number = (
            {text: at for at, text in enumerate(all_of)} for all_of in (names, paths)
        )
        self.others: dict[StorageKey, StorageEntry] = {}
        rows: dict[str, list[Any]] = {name: [] for name in table}
        for key, entry in others.items():
            offsets = key[1] or ()
            if len(offsets) > REGULAR_DIMENSIONS:
                self.others[key] = entry
                continue
            rows["name"].append(self.number.setdefault(key[0], len(self.number)))
            rows["path"].append(self._path_number.setdefault(entry.path, len(self._path_number)))
            rows["dims"].append(-1 if key[1] is None else len(offsets))
            rows["place"].append([*offsets, *[0] * (REGULAR_DIMENSIONS - len(offsets))])
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
        width = max(1, int(self.dims.max(initial=0)))
        self.place = np.ascontiguousarray(table["place"][:, :width])
        hashes = _hashes(self.name, self.dims, self.place)
        self._order = np.argsort(hashes)
        self._hashes = hashes[self._order]
        if (self._hashes[1:] == self._hashes[:-1]).any():
            raise _IrregularError  # one is stored twice; or two fall together, once in many years

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


MAX_METADATA_BYTES = 256 * 1024 * 1024
MAX_DIMENSIONS = 64
MAX_NUMBER = 2**63 - 1
MAX_OVERLAP_CHECKS = 200_000
"""Pairs of chunks compared for one tensor before the overlap check is given up as too dear."""


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
        _SIZE: _size,
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
    if len(data) >= REGULAR_FROM:
        # Whatever is wrong or odd, the interpreter alone says what it is.
        with contextlib.suppress(_IrregularError, PickleRefusedError, MetadataError):
            regular = _Regular(data)
            return _convert(read_pickle(data, VOCABULARY, regular), regular)
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


def _convert(value: Any, regular: _Regular | None = None) -> StoredMetadata:
    fields = _fields(value, _METADATA, "the top")
    described, stored = fields.get("state_dict_metadata"), fields.get("storage_data")
    if type(described) is not dict or type(stored) is not dict:
        raise MetadataError("its list of entries or of storage is not a dictionary")
    tensors: dict[str, TensorEntry] = {}
    objects: list[str] = []
    regular_entries: Mapping[int, TensorEntry] = {}
    if regular is not None:
        regular_entries = regular.tensors([one for one in described.values() if type(one) is _Entry])
    for name, entry in described.items():
        if type(name) is not str:
            raise MetadataError("an entry's name is not text")
        if type(entry) is Record and entry.cls == _BYTES:
            objects.append(name)
        elif type(entry) is _Entry:
            tensors[name] = regular_entries[id(entry)]
        else:
            tensors[name] = _tensor(entry, f"entry {escaped(name)}", regular)
    storage: dict[StorageKey, StorageEntry] = {}
    runs: list[_StoredRun] = []
    for index, info in stored.items():
        if type(index) is _StoredRun:
            runs.append(index)
            continue
        key = _key(index)
        if key in storage:
            raise MetadataError(f"{show_key(key)} is stored twice")
        storage[key] = _info(info, key)
    whole = storage if regular is None or not runs else regular.storage(runs, storage)
    return StoredMetadata(tensors, objects, whole, _origin(fields.get("storage_meta")))


def _tensor(value: Any, what: str, regular: _Regular | None) -> TensorEntry:
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
    parts: list[Sequence[tuple[Offsets, Offsets]]] = []
    chunks: list[tuple[Offsets, Offsets]] = []
    for chunk in listed:
        if type(chunk) is _ChunkRun and regular is not None:
            parts += [chunks, regular.chunks_of(chunk, len(shape))]
            chunks = []
            continue
        fields = _fields(chunk, _CHUNK, f"{what}: a chunk")
        offsets = _numbers(fields.get("offsets"), f"{what}: a chunk's offsets")
        sizes = _numbers(fields.get("sizes"), f"{what}: a chunk's sizes")
        if len(offsets) != len(shape) or len(sizes) != len(shape):
            raise MetadataError(f"{what}: a chunk has another number of dimensions than the tensor")
        chunks.append((offsets, sizes))
    return TensorEntry(
        shape, dtype.name.removeprefix("torch."), joined([*parts, chunks]) if parts else chunks
    )


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
    begin = 0
    for name, count, box in zip(names, counts, chunks, strict=True):
        end = begin + count
        if fits[begin:end].all():
            wanted = math.prod(meta.tensors[name].shape)
            held = volume[begin:end]
            exact = int(held[0]) if count == 1 else sum(held.tolist())
            if exact == wanted and (count == 1 or not _may_overlap(box)):
                yield name
        begin = end


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
