"""Whether tracked state survives being saved, asked at the first save rather than found out at a resume."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy
import torch

from holdfast.checkpoint.state import from_blob, to_blob
from holdfast.errors import IncompleteStateError

PLAIN = (bool, int, float, complex, str, bytes, type(None))
"""Types whose equality means what it says. Of anything else only the type is compared."""


def check_round_trip(parts: Mapping[str, Any]) -> list[str]:
    """What is wrong with the state of each part, in words; raises if one cannot be stored at all."""
    found: list[str] = []
    for name, state in parts.items():
        if isinstance(state, Mapping) and not state:
            found.append(f"{name}: it has no state at all; is the right object tracked?")
            continue
        try:
            back = from_blob(to_blob(state))
        except Exception as error:
            raise IncompleteStateError(
                f"track({name}=…): its state cannot be saved and read back: {type(error).__name__}: {error}. "
                "Give its state_dict plain values, containers and tensors"
            ) from error
        where = first_difference(state, back, name)
        if where:
            found.append(f"{where} comes back from a save as something else")
    return found


def first_difference(a: Any, b: Any, path: str, *, by_value: bool = False) -> str:
    """The place of the first difference between two states; empty if none is seen.

    `by_value`: 1 is the same as 1.0, a list as a tuple, and the order of keys does not matter.
    """
    if by_value:
        a, b = _by_value(a), _by_value(b)
    if type(a) is not type(b):
        return path
    if isinstance(a, torch.Tensor):
        same = a.dtype == b.dtype and torch.equal(_bits(a), _bits(b))
        return "" if same else path
    if isinstance(a, numpy.ndarray):
        return "" if a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes() else path
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


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    """Bytes, so that NaN equals NaN and -0 differs from 0."""
    return tensor.detach().resolve_conj().resolve_neg().cpu().contiguous().reshape(-1).view(torch.uint8)
