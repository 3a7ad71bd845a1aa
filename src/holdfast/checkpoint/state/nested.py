"""State of tracked objects that are neither models nor optimizers of torch: its tensors, and their form.

An optimizer of somebody else's (Megatron's with its flat buffers, one that keeps lists of matrices) is an
object with a `state_dict` like any other, and its state may be most of a checkpoint. Its tensors, however
deep they lie, are stored like a model's: staged, digested, written beside training. What is left is a form,
the same containers with a mark in the place of each tensor, which goes into the rank's blob with the rest.

Guarantee: what `load_state_dict` is given after a load has the containers, types and bits of what
`state_dict` gave, with all tensors on the host, as a state that was read from a file has them. Tensors that
were the same memory (views of one buffer apart) are the same tensor again.

A state with little in tensors stays in the blob as a whole: generators, scalers, schedules.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.tensor import DTensor

from holdfast.checkpoint.state.adapters import GeneratorState, TrackerState, Wrapped, is_storable, unwrapped

LEAST = 64 * 1024
"""Bytes of tensors in a state from which on they are stored by themselves."""
FORM = "holdfast.form"
"""The key of a form in place of a state."""
NESTED = "holdfast_nested"
"""What a manifest needs whose blobs hold forms."""

Form = tuple[Any, ...]


def lift(thing: object, state: Any) -> tuple[dict[str, Any], Any]:
    """(the tensors of a state by their paths, what is left of it). No copies are made."""
    kept = isinstance(thing, GeneratorState | TrackerState) or isinstance(state, torch.Tensor)
    if kept or _bytes_of(state) < LEAST:
        return {}, state
    lifting = _StateLifting()
    try:
        form = lifting.form(state, "")
    except _AmbiguousPathError:
        return {}, state
    return lifting.tensors, {FORM: form}


def is_lifted(state: Any) -> bool:
    """Whether this is what `lift` has left."""
    return isinstance(state, Mapping) and state.keys() == {FORM}


def targets(part: str, left: Mapping[str, Any], metadata: Metadata) -> dict[str, Any]:
    """The tensors that a load of such a state reads into: memory of its own, on the host."""
    found: dict[str, Any] = {}
    for path, facts in _marks(left[FORM]):
        name = f"{part}.{path}"
        if "wraps" in facts:
            kind, context, size, stride = facts["wraps"]
            inner = {key: _made(f"{name}.{key}", metadata) for key in facts["inner"]}
            if None not in inner.values():
                whole = kind.__tensor_unflatten__(inner, context, torch.Size(size), stride)
                found[path] = Wrapped(whole, inner)
            continue
        tensor = _made(name, metadata)
        if tensor is not None:
            found[path] = tensor.requires_grad_() if facts.get("grad") else tensor
    return found


def whole(left: Mapping[str, Any], tensors: Mapping[str, Any]) -> Any:
    """The state again, around the tensors that were read."""
    return _whole(left[FORM], tensors)


def _made(name: str, metadata: Metadata) -> torch.Tensor | None:
    """None: it is not there, which the strict check tells."""
    entry = metadata.state_dict_metadata.get(name)
    if not isinstance(entry, TensorStorageMetadata):
        return None
    return torch.empty(entry.size, dtype=entry.properties.dtype)


class _AmbiguousPathError(Exception):
    """Two entries have one path: a key has dots in it that look like levels."""


class _StateLifting:
    def __init__(self) -> None:
        self.tensors: dict[str, Any] = {}
        self._first: dict[object, str] = {}

    def form(self, value: Any, path: str) -> Form:
        if _is_lifted_tensor(value):
            return self._tensor(value, path)
        if type(value) in (dict, OrderedDict):
            members = [(key, self.form(one, _under(path, key))) for key, one in value.items()]
            return ("ordered" if type(value) is OrderedDict else "dict", members)
        if type(value) in (list, tuple, deque):
            forms = [self.form(one, _under(path, at)) for at, one in enumerate(value)]
            return (type(value).__name__, forms, getattr(value, "maxlen", None))
        if isinstance(value, tuple) and hasattr(value, "_fields"):
            return ("named", [self.form(one, _under(path, at)) for at, one in enumerate(value)], type(value))
        return ("value", value)

    def _tensor(self, tensor: torch.Tensor, path: str) -> Form:
        same = self._first.setdefault(_memory(tensor), path)
        if same != path:
            return ("same", same)
        if path in self.tensors:
            raise _AmbiguousPathError(path)
        stored = unwrapped(tensor)
        self.tensors[path] = stored
        facts: dict[str, Any] = {"grad": True} if tensor.requires_grad else {}
        if isinstance(stored, Wrapped):
            flat: Any = tensor
            facts["wraps"] = (
                type(tensor),
                flat.__tensor_flatten__()[1],
                tuple(tensor.size()),
                tuple(tensor.stride()),
            )
            facts["inner"] = list(stored)
        return ("tensor", path, facts)


def _is_lifted_tensor(value: object) -> bool:
    """A distributed one stays: nobody could say what it is distributed over when it is read."""
    return is_storable(value) and not isinstance(value, DTensor)


def _under(path: str, key: object) -> str:
    return f"{path}.{key}" if path else str(key)


def _memory(tensor: torch.Tensor) -> object:
    """The same for tensors that are one and the same memory, seen alike."""
    if type(tensor) is not torch.Tensor or not tensor.numel():
        return id(tensor)
    return (tensor.data_ptr(), tensor.dtype, tensor.size(), tensor.stride())


def _bytes_of(value: Any) -> int:
    """How much of a state tensors are, counted until it is enough."""
    total = 0
    for tensor in _tensors(value):
        total += tensor.numel() * tensor.element_size()
        if total >= LEAST:
            break
    return total


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    if _is_lifted_tensor(value):
        yield value
    elif type(value) in (dict, OrderedDict):
        for one in value.values():
            yield from _tensors(one)
    elif type(value) in (list, tuple, deque) or (isinstance(value, tuple) and hasattr(value, "_fields")):
        for one in value:
            yield from _tensors(one)


def _marks(form: Form) -> Iterator[tuple[str, dict[str, Any]]]:
    """The tensors that a form has a place for."""
    if form[0] == "tensor":
        yield form[1], form[2]
    elif form[0] in ("dict", "ordered"):
        for _, one in form[1]:
            yield from _marks(one)
    elif form[0] not in ("value", "same"):
        for one in form[1]:
            yield from _marks(one)


def _whole(form: Form, tensors: Mapping[str, Any]) -> Any:
    kind = form[0]
    if kind == "value":
        return form[1]
    if kind in ("tensor", "same"):
        found = tensors[form[1]]
        return found.whole if isinstance(found, Wrapped) else found
    if kind in ("dict", "ordered"):
        made = {key: _whole(one, tensors) for key, one in form[1]}
        return OrderedDict(made) if kind == "ordered" else made
    values = [_whole(one, tensors) for one in form[1]]
    if kind == "named":
        return form[2](*values)
    if kind == "deque":
        return deque(values, form[2])
    return tuple(values) if kind == "tuple" else values
