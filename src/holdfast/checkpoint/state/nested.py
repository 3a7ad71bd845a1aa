"""State of tracked objects that are neither models nor optimizers of torch: its tensors, and their form.

An optimizer of somebody else's (Megatron's with its flat buffers, one that keeps lists of matrices) is an
object with a `state_dict` like any other, and its state may be most of a checkpoint. Its tensors, however
deep they lie, are stored like a model's: staged, digested, written beside training. What is left is a form,
the same containers with a mark in the place of each tensor, which goes into the rank's blob with the rest.

Containers are those of Python and whatever else pickle takes apart into plain data: dataclasses, classes
derived from containers, objects with attributes. What pickle would make of them again is what is made.

Guarantee: what `load_state_dict` is given after a load has the containers, types and bits of what
`state_dict` gave, with all tensors on the host, as a state that was read from a file has them. Tensors that
were the same memory (views of one buffer apart) are the same tensor again, and so are containers.

A state with little in tensors stays in the blob as a whole: generators, scalers, schedules. So does one that
contains itself. Tensors without strides of their own (sparse, nested, quantized) stay in the blob, too.
"""

from __future__ import annotations

import copyreg
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator, Mapping
from itertools import count
from typing import Any, NamedTuple

import numpy
import torch
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.tensor import DTensor

from holdfast.checkpoint.format import FAILURES
from holdfast.checkpoint.state.adapters import GeneratorState, TrackerState, Wrapped, is_storable, unwrapped

LEAST = 64 * 1024
"""Bytes of tensors in a state from which on they are stored by themselves."""
FORM = "holdfast.form"
"""The key of a form in place of a state."""
LONGEST_KEY = 200
"""Characters of a key in the name of a tensor; one that is longer is told by its place."""
NESTED = "holdfast_nested"
"""What a manifest needs whose blobs hold forms."""

Form = tuple[Any, ...]


def lift(thing: object, state: Any) -> tuple[dict[str, Any], Any]:
    """(the tensors of a state by their paths, what is left of it). No copies are made."""
    if isinstance(thing, GeneratorState | TrackerState) or isinstance(state, torch.Tensor):
        return {}, state
    lifting = _StateLifting()
    try:
        form = lifting.form(state, "")
    except (_ContainsItselfError, RecursionError):
        return {}, state
    return (lifting.tensors, {FORM: form}) if lifting.bytes >= LEAST else ({}, state)


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
            if facts.get("parameter"):
                tensor = torch.nn.Parameter(tensor, requires_grad=False)
            found[path] = tensor.requires_grad_() if facts.get("grad") else tensor
    return found


def whole(left: Mapping[str, Any], tensors: Mapping[str, Any]) -> Any:
    """The state again, around the tensors that were read."""
    return _StateMaking(tensors).of(left[FORM])


def _made(name: str, metadata: Metadata) -> torch.Tensor | None:
    """None: it is not there, which the strict check tells."""
    entry = metadata.state_dict_metadata.get(name)
    if not isinstance(entry, TensorStorageMetadata):
        return None
    return torch.empty(entry.size, dtype=entry.properties.dtype)


class Apart(NamedTuple):
    """An object as pickle takes it apart: what makes it again, with what, and what is put into it then."""

    maker: Callable[..., Any]
    arguments: tuple[Any, ...]
    state: Any
    items: list[Any]
    pairs: list[tuple[Any, Any]]


def taken_apart(value: Any) -> Apart | None:
    """None: pickle knows it by its name only, or in a way of its own (an array, for one)."""
    if isinstance(value, _WHOLE) or type(value) in copyreg.dispatch_table:
        return None
    try:
        reduced = value.__reduce_ex__(4)
        if isinstance(reduced, str):
            return None
        maker, arguments, state, items, pairs, setter = (*reduced, None, None, None, None)[:6]
        found = Apart(maker, arguments, state, list(items or ()), list(pairs or ()))
    except FAILURES:
        return None
    return found if setter is None else None


def _put_together(apart: Apart) -> Any:
    made = apart.maker(*apart.arguments)
    if apart.state is not None and hasattr(made, "__setstate__"):
        made.__setstate__(apart.state)
    elif apart.state is not None:
        has_slots = isinstance(apart.state, tuple) and len(apart.state) == 2
        attributes, slots = apart.state if has_slots else (apart.state, None)
        if attributes:
            made.__dict__.update(attributes)
        for name, value in (slots or {}).items():
            setattr(made, name, value)
    for item in apart.items:
        made.append(item)
    for key, value in apart.pairs:
        made[key] = value
    return made


_PLAIN = frozenset({bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device, torch.Size})
_WHOLE = (type, numpy.ndarray, numpy.generic, torch.UntypedStorage, torch.TypedStorage)
"""What is only bytes, or only a name: nothing is gained by taking it apart."""


class _ContainsItselfError(Exception):
    """A container is in itself; only pickle can make such a thing again."""


class _StateLifting:
    def __init__(self) -> None:
        self.tensors: dict[str, Any] = {}
        self.bytes = 0
        self._first: dict[object, str] = {}
        self._seen: dict[int, Form | None] = {}
        """By its id, what stands for a container from its second place on; None while it is looked into."""
        self._alive: list[Any] = []
        """What was made on the way, so that no id is given to something else."""
        self._containers = 0

    def form(self, value: Any, path: str) -> Form:
        if type(value) in _PLAIN:
            return ("value", value)
        if _is_lifted_tensor(value):
            return self._tensor(value, path)
        if isinstance(value, torch.Tensor):
            return ("value", value)
        if id(value) not in self._seen:
            self._seen[id(value)] = None
            form = self._container(value, path)
            # What holds no tensor stays as it is; pickle keeps what is the same in it the same.
            again: Form = ("value", value) if form[0] == "value" else ("again", self._containers)
            self._containers += form[0] != "value"
            self._seen[id(value)] = again
            return form
        known = self._seen[id(value)]
        if known is None:
            raise _ContainsItselfError
        return known

    def _container(self, value: Any, path: str) -> Form:
        if type(value) in (dict, OrderedDict):
            members = self._pairs(value.items(), path)
            if any(one[0] != "value" for _, one in members):
                return ("ordered" if type(value) is OrderedDict else "dict", members)
            return ("value", value)
        if type(value) in (list, tuple, deque) or (isinstance(value, tuple) and hasattr(value, "_fields")):
            forms = self._items(value, path)
            if all(one[0] == "value" for one in forms):
                return ("value", value)
            if type(value) in (list, tuple, deque):
                return (type(value).__name__, forms, getattr(value, "maxlen", None))
            return ("named", forms, type(value))
        apart = taken_apart(value)
        if apart is None:
            return ("value", value)
        self._alive.append(apart)
        arguments, items = self._items(apart.arguments, path), self._items(apart.items, path)
        state, pairs = self.form(apart.state, path), self._pairs(apart.pairs, path)
        if all(one[0] == "value" for one in (*arguments, state, *items, *(one for _, one in pairs))):
            return ("value", value)
        return ("apart", arguments, state, items, pairs, apart.maker)

    def _items(self, values: Any, path: str) -> list[Form]:
        return [self.form(one, _under(path, at)) for at, one in enumerate(values)]

    def _pairs(self, pairs: Any, path: str) -> list[tuple[Any, Form]]:
        return [
            (key, self.form(one, _under(path, key if _is_short(key) else f"[{at}]")))
            for at, (key, one) in enumerate(pairs)
        ]

    def _tensor(self, tensor: torch.Tensor, path: str) -> Form:
        same = self._first.get(_memory(tensor))
        if same is not None:
            return ("same", same)
        # A key with dots in it can look like levels.
        path = next(one for one in _spellings(path) if one not in self.tensors)
        self._first[_memory(tensor)] = path
        stored = unwrapped(tensor)
        self.tensors[path] = stored
        self.bytes += tensor.numel() * tensor.element_size()
        facts: dict[str, Any] = {"grad": True} if tensor.requires_grad else {}
        if type(tensor) is torch.nn.Parameter:
            facts["parameter"] = True
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
    if not isinstance(value, torch.Tensor) or isinstance(value, DTensor):
        return False
    return is_storable(value) and not value.is_nested and not value.is_meta


def _is_short(key: object) -> bool:
    """Whether a key can be a part of a name: a tensor, or an object, cannot."""
    if type(key) is tuple:
        return all(map(_is_short, key))
    return type(key) in _PLAIN and len(str(key)) <= LONGEST_KEY


def _under(path: str, key: object) -> str:
    return f"{path}.{key}" if path else str(key)


def _spellings(path: str) -> Iterator[str]:
    yield path
    for number in count(2):
        yield f"{path}~{number}"


def _memory(tensor: torch.Tensor) -> object:
    """The same for tensors that are one and the same memory, seen alike."""
    if type(tensor) is not torch.Tensor or not tensor.numel():
        return id(tensor)
    return (
        tensor.data_ptr(), tensor.dtype, tensor.size(), tensor.stride(), tensor.is_conj(), tensor.is_neg(),
        tensor.device,
    )  # fmt: skip


def _marks(form: Form) -> Iterator[tuple[str, dict[str, Any]]]:
    """The tensors that a form has a place for."""
    if form[0] == "tensor":
        yield form[1], form[2]
    elif form[0] in ("dict", "ordered"):
        for _, one in form[1]:
            yield from _marks(one)
    elif form[0] == "apart":
        _, arguments, state, items, pairs, _ = form
        for one in (*arguments, state, *items, *(one for _, one in pairs)):
            yield from _marks(one)
    elif form[0] not in ("value", "same", "again"):
        for one in form[1]:
            yield from _marks(one)


class _StateMaking:
    """Makes a state again, in the order in which it was taken apart."""

    def __init__(self, tensors: Mapping[str, Any]) -> None:
        self._tensors = tensors
        self._containers: list[Any] = []

    def of(self, form: Form) -> Any:
        kind = form[0]
        if kind == "value":
            return form[1]
        if kind == "again":
            return self._containers[form[1]]
        if kind in ("tensor", "same"):
            found = self._tensors[form[1]]
            return found.whole if isinstance(found, Wrapped) else found
        made = self._container(kind, form)
        self._containers.append(made)
        return made

    def _container(self, kind: str, form: Form) -> Any:
        if kind in ("dict", "ordered"):
            pairs = {key: self.of(one) for key, one in form[1]}
            return OrderedDict(pairs) if kind == "ordered" else pairs
        if kind == "apart":
            _, arguments, state, items, pairs, maker = form
            made = [self.of(one) for one in arguments], [self.of(one) for one in items]
            return _put_together(
                Apart(maker, tuple(made[0]), self.of(state), made[1], [(k, self.of(one)) for k, one in pairs])
            )
        values = [self.of(one) for one in form[1]]
        if kind == "named":
            return form[2](*values)
        if kind == "deque":
            return deque(values, form[2])
        return tuple(values) if kind == "tuple" else values
