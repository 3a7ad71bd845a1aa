"""Pickles read as data, fast: nothing in one is ever called, imported or executed.

Guarantee: whatever the bytes are, the answer is plain data or a `PickleRefusedError`, in time and memory
proportional to their number. One interpreter, `_run`, is the judge of every byte. What a large `.metadata`
consists of nearly wholly is recognised beforehand with numpy, and the interpreter steps over it
(`Regular`); the answer is the same, only more compact.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Mapping
from typing import Any

from holdfast.base import escaped

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


def read_pickle(data: bytes, vocabulary: Vocabulary, regular: Regular | None = None) -> Any:
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
        if type(key) not in (str, int, Record, StoredRun) and not (vocabulary.wide and _is_shallow(key)):
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


def _run(data: bytes, vocabulary: Vocabulary, regular: Regular | None = None) -> Any:
    """The interpreter: one loop, because a metadata file can have tens of millions of opcodes."""
    if len(data) < 2 or data[0] != 0x80 or data[1] not in ((2, 3, 4, 5) if vocabulary.wide else (4, 5)):
        raise PickleRefusedError("it is not a pickle of protocol 4 or 5")
    at = 2
    stack: list[Any] = []
    marks: list[list[Any]] = []
    listed: list[Any] = []
    kept: dict[int, Any] = {}
    memo: list[Any] | dict[int, Any] = listed if regular is None else kept
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
                if regular is None:
                    listed.append(stack[-1])  # a list takes far less than a dictionary
                else:
                    kept[known] = stack[-1]
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
                if regular is not None and at in regular.begins:
                    at, known, stack = regular.take(at, known, stack, len(marks), kept)
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
                    items = regular.given_back(len(marks), items, StoredRun)
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
                if regular is not None and at in regular.begins:
                    at, known, stack = regular.take(at, known, stack, len(marks), kept)
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
                    items = regular.given_back(len(marks), items, ChunkRun)
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
                if regular is not None and at in regular.begins:
                    at, known, stack = regular.take(at, known, stack, len(marks), kept)
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
                if number > known:  # picklers count; a list of any length for one number is a trap
                    raise PickleRefusedError("it remembers values out of order")
                listed[number : number + 1] = [stack[-1]]
                known = len(listed)
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


# The stretches of `.metadata` that are always alike, recognised for the whole file at once with numpy.
#
# Nearly all of a large `.metadata` is one of three forms over and over: an entry's description up to its list
# of chunks, a chunk, and a storage index with its storage info. Picklers write each of them as the same
# opcodes in the same order, and only numbers, names and memo indices differ. So every place where one may
# begin is looked at together, a token at a time: what is there must be exactly the form, to its last byte.
# The interpreter then takes a whole run of them at one step, where it comes to stand at its beginning. It
# remains the judge of everything: of what stands around the runs, of what their references mean, and alone of
# the whole file wherever anything is not as expected (`IrregularError`).
#
# What else was tried, on 205,000 chunks, of which all of this takes 1.0 us each the interpreter 29: regular
# expressions that find the same forms take 1.3 us before a number is decoded, and an object for each group.
# A scan of the opcodes takes 0.7 us without following the stack, by which alone it could tell that no nested
# tuple becomes a key; CPython's unpickler after it takes 9.8, and leaves an object for each of the file's.


SIZE = "torch.Size"
CHECKPOINT = "torch.distributed.checkpoint.metadata"
_SHARDED = "torch.distributed._shard.sharded_tensor.metadata"  # where older releases kept two of the classes
METADATA_CLASS, TENSOR, BYTES, CHUNK, INDEX, STORAGE_META = (
    f"{CHECKPOINT}.{name}"
    for name in (
        "Metadata", "TensorStorageMetadata", "BytesStorageMetadata", "ChunkStorageMetadata",
        "MetadataIndex", "StorageMeta",
    )
)  # fmt: skip
PROPERTIES = (f"{CHECKPOINT}.TensorProperties", f"{_SHARDED}.TensorProperties")
STORAGE_INFO = "torch.distributed.checkpoint.filesystem._StorageInfo"
MEMORY_FORMATS = (f"{CHECKPOINT}._MEM_FORMAT_ENCODING", f"{_SHARDED}.MEM_FORMAT_ENCODING")


class IrregularError(Exception):
    """The stretches cannot be taken as they were recognised; the interpreter reads the file by itself."""


Array = Any
"""A numpy array. numpy is imported where it is needed: commands that read no metadata start without it."""

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

    def _tuple(self, at: Array, on: Array) -> tuple[Array, Array, Array, Array]:
        """(place after it, numbers, how many, whether it is one) of tuples of whole numbers, where `on`."""
        np = self._np
        mark = self._bytes[at] == 0x28
        at = at + mark
        dims = np.zeros(len(at), "i1")
        values = np.zeros((len(at), REGULAR_DIMENSIONS), "i8")
        on = on.copy()
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
        fits = (self._bytes[at] == ends[dims]) & (mark == (dims > 3))
        at += 1
        fits &= (dims == 0) | (self._bytes[at] == 0x94)  # the empty tuple is not memoized
        return at + (dims > 0), values, dims, fits

    def size(self, name: str, *, or_none: bool = False) -> None:
        """torch.Size, as a call with a tuple of numbers: `name` is the values, filled up with zeros."""
        np = self._np
        none = (self._bytes[self.at] == 0x4E) if or_none else np.zeros(len(self.at), bool)
        found = self._eight[self.at]
        op, short, long = found & 0xFF, (found >> 8) & 0xFF, (found >> 8) & 0xFFFFFFFF
        is_short = op == 0x68
        self.columns[f"{name}.class"] = np.where(is_short, short, long).astype("u4")
        called = ~none & (is_short | (op == 0x6A))
        at = np.minimum(self.at + np.where(is_short, 2, 5), self._last)
        at, self.columns[name], dims, fits = self._tuple(at, called)
        fits &= (self._eight[at] & np.uint64(0xFFFFFFFF)) == int.from_bytes(b"\x85\x94R\x94", "little")
        self.columns[f"{name}.dims"] = np.where(none, -1, dims).astype("i1")
        self.columns["memos"] = self.columns.get("memos", 0) + np.where(none, 0, 2 + (dims > 0)).astype("i4")
        self.at = np.where(none, self.at + 1, at + 4)
        self.keep(none | (called & fits))

    def strides(self) -> None:
        """What torch 2.15 adds to a tensor's properties: None or a tuple; nothing in earlier ones."""
        found = self._bytes[self.at]
        over, none = found == 0x74, found == 0x4E
        at, _, dims, fits = self._tuple(self.at, ~over & ~none)
        told = ~over & ~none
        self.columns["memos"] = self.columns["memos"] + (told & (dims > 0)).astype("i4")
        self.at = self._np.where(over, self.at, self._np.where(none, self.at + 1, at))
        self.keep(over | none | fits)

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
    at.strides()
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
    at.text("name", or_reference=True)
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


NAME_AT = 2
"""Entries of the memo that a storage index makes before its name, if that is spelled out."""
_SAME: dict[str, dict[str, str]] = {
    "entries": {
        "class": TENSOR, "properties": "=properties", "properties.class": "", "layout": "*", "format": "*",
        "size": "=size", "shape.class": SIZE, "chunks": "=chunks",
    },
    "chunks": {
        "class": CHUNK, "offsets": "=offsets", "offset.class": SIZE, "sizes": "=sizes",
        "extent.class": SIZE,
    },
    "stored": {
        "class": INDEX, "fqn": "=fqn", "index": "=index", "offset": "=offset", "place.class": SIZE,
        "info.class": STORAGE_INFO, "relative_path": "=relative_path", "info.offset": "=offset",
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
        for name in sorted(parts[0], key=lambda one: parts[0][one].ndim, reverse=True) if parts else []:
            pieces = [part.pop(name) for part in parts]
            if pieces[0].ndim == 2:  # numbers of so many dimensions as any of them has
                width = max(int(part[f"{name}.dims"].max(initial=0)) for part in parts)
                pieces = [piece[:, : max(1, width)] for piece in pieces]
            self.columns[name] = np.concatenate(pieces)

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
                    found.name == wanted or (not wanted and found.name in PROPERTIES)
                )
            if not right:
                raise IrregularError
        self.checked = True


class _Run:
    """Stretches `first` to `past` of a table, in the place of the objects that they describe."""

    __slots__ = ("first", "known", "past")

    def __init__(self, first: int, past: int, known: int) -> None:
        self.first = first
        self.past = past
        self.known = known
        """Entries of the memo at its beginning."""


class ChunkRun(_Run):
    """In a list."""


class StoredRun(_Run):
    """In a dictionary, as a key; its value is None."""


class _Held:
    """What lies on the stack up to the end of a run, out of the reach of every opcode but the one that takes
    all of it: no other finds a run where the interpreter alone would find an object."""

    __slots__ = ("count", "items")

    def __init__(self) -> None:
        self.items: list[Any] = []
        self.count = 0
        """Of the objects that it stands for."""


_OF_ENTRY = ("end", "memos", "name", "name.length")


class RegularEntry:
    """A regular TensorStorageMetadata."""

    __slots__ = ("known", "row", "runs")

    def __init__(self, row: int, known: int, runs: list[ChunkRun]) -> None:
        self.row = row
        self.known = known
        self.runs = runs


class Regular:
    """The stretches of one file, by the place where the interpreter can take them."""

    def __init__(self, data: bytes) -> None:
        import numpy as np

        if len(data) < 2 * _TAIL:
            raise IrregularError
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
        # As bytes, so that those of a run are compared at once.
        self._dims = [
            self.chunks.columns[f"{name}.dims"].tobytes() if len(self.chunks) else b""
            for name in ("offset", "extent")
        ]
        self._chunk_runs, self._stored_runs = self.chunks.runs(), self.stored.runs()
        begins = self.entries.columns["begin"].tolist() if len(self.entries) else []
        self.held: dict[int, _Held] = {}
        """By how many marks are open."""
        self._rows = dict(zip(begins, range(len(begins)), strict=True))
        lists = [self.entries.columns[name].tolist() if begins else [] for name in _OF_ENTRY]
        self._entry_rows = list(zip(*lists, strict=True))
        self.begins = {*self._chunk_runs, *self._stored_runs, *self._rows}
        self.memo: Mapping[int, Any] = {}
        # Entries of the memo that are made before each chunk or storage index.
        self.chunk_memos, self.stored_memos = (
            np.concatenate([[0], np.cumsum(table.columns["memos"], dtype="i8")])
            if len(table)
            else np.zeros(1, "i8")
            for table in (self.chunks, self.stored)
        )
        # Where texts are spelled out, in order: (row, entries of the memo made in the row before it).
        self._spelled = self._spelled_out()

    def take(
        self, at: int, known: int, stack: list[Any], depth: int, memo: dict[int, Any]
    ) -> tuple[int, int, list[Any]]:
        """What begins here: (place, size of the memo, stack) after it."""
        self.memo = memo
        if 2 * known > at or not depth:
            raise IrregularError
        if at in self._rows:
            before = -1
            while at != before and (row := self._rows.get(at)) is not None:
                before = at
                at, known, stack = self._take_entry(row, at, known, stack, memo)
            if len(stack) > MOST_HELD:
                raise IrregularError
            return at, known, stack
        if self._is_put_alone(at):
            return at, known, stack
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
            self._remember_texts(first, past, known, memo)
            held.items += [StoredRun(first, past, known), None]
            held.count += 2 * (past - first)
            at = int(self.stored.columns["end"][past - 1])
            known += int(self.stored_memos[past] - self.stored_memos[first])
        if held.count > MOST_HELD:
            raise IrregularError
        return at, known, []

    def _is_put_alone(self, at: int) -> bool:
        """Whether APPEND or SETITEM follows: one object, for which the interpreter has no mark."""
        runs, table = self._chunk_runs, self.chunks
        if at not in runs:
            runs, table = self._stored_runs, self.stored
        first, past = runs[at]
        return past == first + 1 and self._data[int(table.columns["end"][first])] in b"as"

    def given_back(self, depth: int, items: list[Any], kind: type[_Run] | None) -> list[Any]:
        """What is held there and these, for an opcode that takes all up to a mark, and `kind` of run."""
        held = self.held.pop(depth + 1, None)
        if held is None:
            return items
        whole = held.items + items
        places = whole if kind is ChunkRun else whole[::2]
        if kind is None or sum(isinstance(one, _Run) for one in whole) != sum(
            type(one) is kind for one in places
        ):
            raise IrregularError
        return whole

    def have_dimensions(self, run: ChunkRun, dims: int) -> bool:
        """Whether all chunks of a run have so many."""
        expected = bytes([dims]) * (run.past - run.first)
        return all(found[run.first : run.past] == expected for found in self._dims)

    def _take_chunks(self, at: int, known: int) -> tuple[int, int, ChunkRun] | None:
        found = self._chunk_runs.get(at)
        if found is None:
            return None
        first, past = found
        memos = int(self.chunk_memos[past] - self.chunk_memos[first])
        return int(self.chunks.columns["end"][past - 1]), known + memos, ChunkRun(first, past, known)

    def _take_entry(
        self, row: int, at: int, known: int, stack: list[Any], memo: dict[int, Any]
    ) -> tuple[int, int, list[Any]]:
        """An entry with all its chunks, to the BUILD at its end."""
        data = self._data
        end, memos, start, length = self._entry_rows[row]
        now = known + memos
        runs: list[ChunkRun] = []
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
        name = data[start : start + length].decode("utf-8")
        memo[known] = name
        stack += [name, RegularEntry(row, known, runs)]
        return end + 2, now, stack

    def _spelled_out(self) -> Array:
        import numpy as np

        columns = self.stored.columns
        if not len(self.stored):
            return np.zeros((0, 4), "i8")
        found = []
        for name, before in (("name", np.int64(NAME_AT)), ("path", columns["memos"] - 1)):
            rows = np.flatnonzero(columns[name] >= 0)
            place = np.broadcast_to(before, len(self.stored))[rows]
            found.append(
                np.stack([rows, place, columns[name][rows], columns[f"{name}.length"][rows]], axis=1)
            )
        both = np.concatenate(found)
        return both[np.argsort(both[:, 0], kind="stable")]

    def _remember_texts(self, first: int, past: int, known: int, memo: dict[int, Any]) -> None:
        """What is spelled out in a run: later ones refer to it."""
        import numpy as np

        begin, end = np.searchsorted(self._spelled[:, 0], [first, past])
        since = known - int(self.stored_memos[first])
        for row, place, start, length in self._spelled[begin:end].tolist():
            memo[since + int(self.stored_memos[row]) + place] = self._data[start : start + length].decode(
                "utf-8"
            )
