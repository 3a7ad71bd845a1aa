"""Reads a pickle as data: nothing in it is ever called, imported or executed.

This is a small interpreter for the opcodes that DCP's `.metadata` consists of (pickle protocols 4 and 5).
A class or function is only ever a *name* on the caller's list; an object of it becomes a `Record` that holds
what was stored. There is no callable anywhere for a hostile file to reach, and an unknown name, an opcode
outside the list, a persistent id or an extension code is refused by name.

Why not a subclass of the standard library's Unpickler with a `find_class` of our own: in CPython nine bytes
make it reserve gigabytes (LONG_BINPUT with a large index), and a megabyte of nested tuples used as a
dictionary key ends the process with a segmentation fault. Neither can be caught from Python.

Bounded: what it takes in memory is a small multiple of the file's size. Bytes that only pile up values (a
file of nothing but empty dictionaries) are refused after the first few thousand.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Mapping
from typing import Any

from holdfast.checkpoint.problems import printable

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
        raise PickleRefusedError(f"it refers to {printable(full)}, which metadata never does")


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
        if type(key) not in _KEYS:
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
        raise PickleRefusedError(f"it calls {printable(function.name)}, which metadata never does")
    return reducer(arguments)


def _new(cls: Any, arguments: Any, vocabulary: Vocabulary) -> Record:
    if type(cls) is not Name or cls.name not in vocabulary.objects:
        raise PickleRefusedError("it makes an object of something that is not a class")
    if type(arguments) is not tuple or arguments:
        raise PickleRefusedError(f"it makes a {printable(cls.name)} with arguments")
    return Record(cls.name)


def _build(target: Any, state: Any) -> None:
    if type(target) is not Record or target.state is not None or type(state) not in (dict, tuple):
        raise PickleRefusedError("it sets the state of something that has none, or twice")
    target.state = state


def _run(data: bytes, vocabulary: Vocabulary) -> Any:
    """The interpreter: one loop, because a metadata file can have tens of millions of opcodes."""
    if len(data) < 2 or data[0] != 0x80 or data[1] not in (4, 5):
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
            elif op == 0x74:  # TUPLE
                items, stack = stack, marks.pop()
                stack.append(tuple(items))
            elif op == 0x7D:  # EMPTY_DICT
                made += 1
                stack.append({})
            elif op == 0x75:  # SETITEMS
                items, stack = stack, marks.pop()
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
            elif op == 0x2E:  # STOP
                if marks or len(stack) != 1:
                    raise PickleRefusedError("it ends in the middle of a value")
                if at != len(data):
                    raise PickleRefusedError(f"{len(data) - at} bytes follow its end")
                return stack[0]
            else:
                raise PickleRefusedError(f"it uses the opcode 0x{op:02x}, which metadata never does")
