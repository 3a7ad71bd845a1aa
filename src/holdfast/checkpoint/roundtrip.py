"""Where two states differ."""

from __future__ import annotations

import collections
import contextlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy
import torch
from torch.distributed.tensor import DTensor

from holdfast.torch_internals import local_part

PLAIN = (bool, int, float, complex, str, bytes, type(None))
"""Types whose equality means what it says. Of anything else only the type is compared."""


def first_difference(a: Any, b: Any, path: str, *, by_value: bool = False) -> str:
    """The place of the first difference between two states; empty if none is seen.

    `by_value`: 1 is the same as 1.0, a list as a tuple, and the order of keys does not matter.
    """
    if by_value:
        a, b = _by_value(a), _by_value(b)
    if type(a) is not type(b):
        return path
    if isinstance(a, torch.Tensor | numpy.ndarray):
        return "" if same_bits(a, b) else path
    if isinstance(a, Mapping):
        if list(a) != list(b):
            return path
        each = (first_difference(a[k], b[k], f"{path}.{k}", by_value=by_value) for k in a)
        return next(filter(None, each), "")
    if isinstance(a, (list, tuple)):
        if len(a) != len(b):
            return path
        pairs = enumerate(zip(a, b, strict=True))
        each = (first_difference(x, y, f"{path}[{i}]", by_value=by_value) for i, (x, y) in pairs)
        return next(filter(None, each), "")
    if isinstance(a, PLAIN):
        return "" if a == b or (a != a and b != b) else path
    return ""


def _by_value(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.detach().as_subclass(torch.Tensor)
    if isinstance(value, Mapping):
        return {key: value[key] for key in sorted(value, key=lambda key: (type(key).__name__, str(key)))}
    if isinstance(value, (list, tuple)):
        return list(value)
    return float(value) if isinstance(value, (bool, int)) and abs(value) < 1 << 53 else value


def same_bits(a: Any, b: Any) -> bool:
    """Of two tensors, or two arrays: the same type, shape and bytes, so that NaN equals NaN and -0 not 0."""
    if isinstance(a, DTensor):  # each rank compares what it holds: nobody else may be comparing
        same = isinstance(b, DTensor) and a.placements == b.placements
        return same and same_bits(local_part(a), local_part(b))
    if isinstance(a, torch.Tensor):
        return a.dtype == b.dtype and a.shape == b.shape and torch.equal(_bits(a), _bits(b))
    return bool(a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes())


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().resolve_conj().resolve_neg().cpu().contiguous().reshape(-1).view(torch.uint8)


def scramble(tensor: torch.Tensor) -> None:
    """Other bits, whatever it is; so that a load which does not write here is seen."""
    if tensor.is_contiguous():
        flat = tensor.reshape(-1).view(torch.uint8)
        torch.bitwise_not(flat, out=flat)
    else:
        tensor.copy_(torch.where(tensor == 0, torch.ones_like(tensor), torch.zeros_like(tensor)))


def same_memory(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.data_ptr() == b.data_ptr() and a.stride() == b.stride()


# --- what came back of what was saved -----------------------------------------------------------------------


class Change(NamedTuple):
    path: tuple[Any, ...]
    saved: Any
    found: Any


MISSING = object()


def changes(saved: Any, found: Any, path: tuple[Any, ...] = ()) -> Iterator[Change]:
    """Every place at which `found` is not what was saved. An equal value of another type is no difference."""
    if isinstance(saved, torch.Tensor | numpy.ndarray):
        same = isinstance(found, type(saved)) or (
            isinstance(saved, torch.Tensor) and isinstance(found, torch.Tensor)
        )
        if not (same and same_bits(saved, found)):
            yield Change(path, saved, found)
    elif isinstance(saved, Mapping) and isinstance(found, Mapping):
        for key, value in saved.items():
            if key in found:
                yield from changes(value, found[key], (*path, key))
            else:
                yield Change((*path, key), value, MISSING)
    elif isinstance(saved, list | tuple | collections.deque) and isinstance(
        found, list | tuple | collections.deque
    ):
        if len(saved) != len(found):
            yield Change(path, saved, found)
        else:
            for at, (one, other) in enumerate(zip(saved, found, strict=True)):
                yield from changes(one, other, (*path, at))
    elif (isinstance(saved, PLAIN) or type(saved) is not type(found)) and not _equal(saved, found):
        yield Change(path, saved, found)


def _equal(a: Any, b: Any) -> bool:
    with contextlib.suppress(Exception):
        return bool(a == b) or (a != a and b != b)
    return False


def at_path(tree: Any, path: Sequence[Any]) -> Any:
    for key in path:
        try:
            tree = tree[key]
        except (KeyError, IndexError, TypeError):
            return MISSING
    return tree


def named(path: Sequence[Any]) -> str:
    return "".join(f"[{key}]" if isinstance(key, int) else f".{key}" for key in path).lstrip(".")


def shown(value: Any) -> str:
    if value is MISSING:
        return "nothing"
    if isinstance(value, torch.Tensor) and value.numel() > 8:
        return f"other values in a tensor of {tuple(value.shape)}"
    try:
        text = repr(value)
    except Exception:  # noqa: BLE001 - the user's code
        text = f"a {type(value).__name__}"
    return text if len(text) <= 80 else f"{text[:77]}…"
