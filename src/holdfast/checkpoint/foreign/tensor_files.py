"""Files of safetensors, and the index of a set of them: what they hold and where, without a library.

Guarantee: reads only, needs no torch, and believes nothing: every tensor's place is checked against its
shape, its type and the file's size, no two may overlap, and no byte may belong to none. What is odd becomes a
`TensorFileError` that says what.

The format is eight bytes of length, a JSON header and the raw values; that is less to read than a library is
to depend on, and it can be read without making a tensor.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from holdfast.base import escaped, read_regular
from holdfast.checkpoint.foreign.archive import WIDTHS, ArchiveError, StoredTensor, open_file
from holdfast.checkpoint.format import is_safe_path

MAX_HEADER_BYTES = 100_000_000
"""As many as the library reads."""
MAX_INDEX_BYTES = 256 * 1024 * 1024
MAX_DIMENSIONS = 64
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
