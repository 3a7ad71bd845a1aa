"""State that `state_dict` and `load_state_dict` do not cover, or only in part, or not as plain tensors."""

from __future__ import annotations

import copy
import functools
import math
import types
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple, Protocol, cast, runtime_checkable

import torch
from torch import nn
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType
from torch.distributed.tensor import DTensor
from torch.optim.lr_scheduler import LRScheduler

from holdfast.base import is_traceable_wrapper_subclass, local_part, wrapper_around
from holdfast.checkpoint.format import FAILURES, about
from holdfast.errors import IncompleteStateError


@runtime_checkable
class Stateful(Protocol):
    """What can be tracked as it is."""

    def state_dict(self) -> Any: ...

    def load_state_dict(self, state_dict: Any, /) -> Any: ...


@runtime_checkable
class RngTracker(Protocol):
    """A named set of generators, such as tensor-parallel code keeps for its regions."""

    def get_states(self) -> Any: ...

    def set_states(self, states: Any, /) -> Any: ...


class GeneratorState:
    """A torch.Generator as something with a state_dict."""

    def __init__(self, generator: torch.Generator) -> None:
        self._generator = generator

    def state_dict(self) -> dict[str, torch.Tensor]:
        return {"state": self._generator.get_state()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if "seed" in state:  # at another number of ranks
            self._generator.manual_seed(state["seed"])
        else:
            self._generator.set_state(state["state"])


class TrackerState:
    """An RNG tracker as something with a state_dict."""

    def __init__(self, tracker: RngTracker) -> None:
        self._tracker = tracker

    def state_dict(self) -> dict[str, Any]:
        return {"states": dict(self._tracker.get_states())}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if "seed" not in state:
            self._tracker.set_states(state["states"])
            return
        # At another number of ranks: with the states, by name, that all ranks had alike.
        now, alike = dict(self._tracker.get_states()), dict(state.get("states", {}))
        anew = {name: one for name, one in now.items() if name not in alike}
        seeded = {
            name: _seeded(one, state["seed"] + at) for at, (name, one) in enumerate(sorted(anew.items()))
        }
        self._tracker.set_states({**alike, **seeded})


def _seeded(state: Any, seed: int) -> Any:
    """A generator's state after another seed, of the kind that it has: of a CUDA device, or of the host."""
    if isinstance(state, torch.Generator):
        return state.manual_seed(seed)
    if not isinstance(state, torch.Tensor) or state.dtype != torch.uint8:
        raise IncompleteStateError(
            f"the tracker of random numbers keeps a {type(state).__name__}, which cannot be seeded anew for "
            "another number of ranks. Resume with as many ranks as saved it"
        )
    if state.numel() == _PHILOX_BYTES:
        words = torch.tensor([seed, 0], dtype=torch.int64)
        return words.view(torch.uint8).to(state.device)
    return torch.Generator().manual_seed(seed).get_state().to(state.device)


_PHILOX_BYTES = 16
"""Of a CUDA generator's state: its seed, and how far it has come."""


class ScheduleState:
    """A schedule with the data that its functions keep.

    torch leaves a schedule's functions out of its state, so a function that counts its calls in a variable
    it closes over, or a method that counts them in an attribute of its object, would begin anew after every
    resume. Plain data of that kind is state as soon as it has changed since the schedule was tracked, and
    only then: what the script sets itself, and may set differently at the next start, stays the script's.
    """

    KEY = "holdfast.functions"

    def __init__(self, schedule: LRScheduler) -> None:
        self._schedule = schedule
        self._variables = dict(_variables(schedule))
        self._at_first = {name: copy.deepcopy(variable.get()) for name, variable in self._variables.items()}

    def state_dict(self) -> dict[str, Any]:
        state = self._schedule.state_dict()
        now = {name: copy.deepcopy(variable.get()) for name, variable in self._variables.items()}
        changed = {name: value for name, value in now.items() if not _same(value, self._at_first[name])}
        return {**state, self.KEY: changed} if changed else state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        kept = state.get(self.KEY, {})
        self._schedule.load_state_dict({name: value for name, value in state.items() if name != self.KEY})
        if unknown := sorted(kept.keys() - self._variables.keys()):
            raise IncompleteStateError(
                f"the {type(self._schedule).__name__} was saved with data of its functions that they do not "
                f"keep here: {', '.join(unknown)}. Give it the functions that it had, or start afresh"
            )
        for name, variable in self._variables.items():
            variable.put(kept.get(name, self._at_first[name]))


class _Variable:
    """A place outside a schedule where one of its functions keeps plain data."""

    def __init__(self, holder: Any, attribute: str) -> None:
        self._holder, self._attribute = holder, attribute

    def get(self) -> Any:
        try:
            return getattr(self._holder, self._attribute)
        except (AttributeError, ValueError):  # an empty cell is a ValueError
            return None

    def put(self, value: Any) -> None:
        """Lists and dictionaries change in place, since others may hold the same object."""
        value, held = copy.deepcopy(value), self.get()
        if isinstance(held, list) and isinstance(value, list):
            held[:] = value
        elif isinstance(held, dict) and isinstance(value, dict):
            held.clear()
            held.update(value)
        elif not _same(held, value):
            setattr(self._holder, self._attribute, value)


def _variables(schedule: LRScheduler, prefix: str = "") -> Iterator[tuple[str, _Variable]]:
    """Where functions of a schedule, or of one within it, keep plain data, each under a telling name."""
    for attribute, held in vars(schedule).items():
        for index, one in enumerate(held if isinstance(held, list | tuple) else [held]):
            where = (
                f"{prefix}{attribute}[{index}]" if isinstance(held, list | tuple) else f"{prefix}{attribute}"
            )
            if isinstance(one, LRScheduler):
                yield from _variables(one, f"{where}.")
                continue
            function = one.func if isinstance(one, functools.partial) else one
            if isinstance(function, types.MethodType):
                # Only attributes that the method itself names: its object may be the whole trainer.
                code = getattr(function.__func__, "__code__", None)
                names = set(code.co_names) if code is not None else set()
                owner = function.__self__
                for name in sorted(names & getattr(owner, "__dict__", {}).keys()):
                    yield from _if_plain(f"{where}: self.{name}", _Variable(owner, name))
                function = function.__func__
            if isinstance(function, types.FunctionType):
                cells = zip(function.__code__.co_freevars, function.__closure__ or (), strict=True)
                for name, cell in cells:
                    yield from _if_plain(f"{where}: {name}", _Variable(cell, "cell_contents"))


def _if_plain(name: str, variable: _Variable) -> Iterator[tuple[str, _Variable]]:
    if _is_plain(variable.get()):
        yield name, variable


def _is_plain(value: Any, budget: int = 1000) -> bool:
    """Numbers and text, and not too much of it: no tensor, no object, nothing that may be alive."""
    if isinstance(value, list | tuple | dict) and type(value) in (list, tuple, dict):
        inner = [*value.keys(), *value.values()] if isinstance(value, dict) else list(value)
        return len(inner) <= budget and all(_is_plain(one, budget // 10) for one in inner)
    return value is None or type(value) in (bool, int, float, complex, str, bytes)


def _same(one: Any, other: Any) -> bool:
    """Bit for bit, as far as plain data goes: 1 is not 1.0, and a NaN equals itself."""
    return type(one) is type(other) and repr(one) == repr(other)


def as_stateful(thing: object) -> Stateful | None:
    """The thing itself, an adapter around it, or None if nothing here knows how to take its state."""
    if isinstance(thing, LRScheduler) and any(_variables(thing)):
        return ScheduleState(thing)
    if isinstance(thing, Stateful):
        return thing
    if isinstance(thing, torch.Generator):
        return GeneratorState(thing)
    if isinstance(thing, RngTracker):
        return TrackerState(thing)
    return None


class OwnEntry(TensorStorageMetadata):
    """A tensor that a rank has stored for itself: of a distributed one, no more than its share."""

    def size_as(self, tensor: torch.Tensor) -> torch.Size:
        """The size of the whole, as which this rank holds it now; that of the entry if it does not fit."""
        fits = isinstance(tensor, DTensor) and local_part(tensor).size() == self.size
        return tensor.size() if fits else self.size


class Wrapped(dict[str, Any]):
    """The tensors that a tensor subclass is made of, by name, and the subclass around them."""

    def __init__(self, whole: torch.Tensor, inner: dict[str, Any]) -> None:
        super().__init__(inner)
        self.whole = whole


class Cut(NamedTuple):
    """A box of a whole tensor, and where a rank has it within what it holds of that tensor."""

    offsets: tuple[int, ...]
    size: tuple[int, ...]
    at: tuple[int, ...] | int
    """The box's corner; or its first element, where a flat tensor holds stretches of the whole."""

    def of(self, local: torch.Tensor) -> torch.Tensor:
        """The box, as a view of what the rank holds."""
        if isinstance(self.at, int):
            return local[self.at : self.at + math.prod(self.size)].view(self.size)
        for dim, (start, length) in enumerate(zip(self.at, self.size, strict=True)):
            local = local.narrow(dim, start, length)
        return local


class SplitTensor(torch.Tensor):
    """What this rank holds of a tensor, and where in the whole that lies. Its size is that of the whole.

    It has what DCP asks of a tensor that is stored in parts, and nothing else can be done with it.
    """

    held: torch.Tensor
    """What the rank has, as it was given; and its memory here, which is less if that is a DTensor."""
    local: torch.Tensor
    cuts: tuple[Cut, ...]

    @staticmethod
    def __new__(cls, held: torch.Tensor, whole: torch.Size, cuts: Sequence[Cut]) -> SplitTensor:
        local = local_part(held) if isinstance(held, DTensor) else held
        made = wrapper_around(cls, local, whole)
        made.held, made.local, made.cuts = held, local, tuple(cuts)
        return made

    @classmethod
    def __torch_dispatch__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        if function is torch.ops.aten.detach.default:
            whole = args[0]
            return cls(whole.held.detach(), whole.size(), whole.cuts)
        raise NotImplementedError(f"{function} of a part of a tensor: use its `local`")

    def __repr__(self) -> str:  # type: ignore[override]
        boxes = ", ".join(f"{tuple(cut.size)} at {tuple(cut.offsets)}" for cut in self.cuts)
        return f"SplitTensor({boxes or 'nothing'} of {tuple(self.size())})"

    def __local_part__(self) -> torch.Tensor:
        return self.local

    def pieces(self) -> Iterator[tuple[Cut, torch.Tensor]]:
        """The boxes that this rank holds."""
        for cut in self.cuts:
            yield cut, cut.of(self.local)

    def __create_write_items__(self, fqn: str, object: Any) -> list[WriteItem]:
        del object
        properties = TensorProperties(self.dtype, self.local.layout, self.requires_grad)
        whole_is_empty = not self.numel()
        return [
            WriteItem(
                MetadataIndex(fqn, chunk.offsets),
                WriteItemType.SHARD,
                tensor_data=TensorWriteData(chunk=chunk, properties=properties, size=self.size()),
            )
            for chunk in self.__create_chunk_list__()
            if chunk.sizes.numel() or whole_is_empty  # not where there are fewer parts than ranks
        ]

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        return [ChunkStorageMetadata(torch.Size(cut.offsets), torch.Size(cut.size)) for cut in self.cuts]

    def __get_tensor_shard__(self, index: MetadataIndex) -> torch.Tensor:
        wanted = None if index.offset is None else tuple(index.offset)
        for cut, piece in self.pieces():
            if wanted in (None, tuple(cut.offsets)):
                return piece
        raise ValueError(f"this rank holds {self!r}, not what lies at {wanted}")


def unwrapped(tensor: torch.Tensor) -> torch.Tensor | Wrapped:
    """A tensor that only wraps others, such as a quantized weight, has no bytes of its own: those have.

    So has what a distributed tensor of that kind holds on this rank. Its inner tensors are parts of a whole,
    as it is, where they are cut as it is; of others nothing says of what they are a part.
    """
    whole: Any = tensor
    if type(tensor) is torch.Tensor:  # first: there are very many of these
        return tensor
    local: Any = local_part(tensor) if isinstance(tensor, DTensor) else whole
    if not is_traceable_wrapper_subclass(local):
        return tensor
    names, _ = local.__tensor_flatten__()
    inner = {name: unwrapped(getattr(local, name)) for name in names}
    if isinstance(tensor, DTensor):
        inner = {name: _part_of(tensor, local_part(tensor), one) for name, one in inner.items()}
    return Wrapped(tensor, inner)


def _part_of(whole: DTensor, local: torch.Tensor, one: torch.Tensor | Wrapped) -> torch.Tensor | Wrapped:
    """An inner tensor as the part that it is, if it reaches as far as its rank's share where that is cut.

    Should it do so by chance, its size will not fit at another number of ranks, and it is refused there.
    """
    cut = {dim for placement in whole.placements if (dim := getattr(placement, "dim", None)) is not None}
    if isinstance(one, Wrapped) or not cut or one.dim() <= max(cut):
        return one
    if any(one.size(dim) != local.size(dim) for dim in cut):
        return one
    share: Any = whole
    (chunk,) = share.__create_chunk_list__()
    size, offsets = list(one.size()), [0] * one.dim()
    for dim in cut:
        size[dim], offsets[dim] = whole.size(dim), chunk.offsets[dim]
    return SplitTensor(one, torch.Size(size), [Cut(tuple(offsets), tuple(one.size()), (0,) * one.dim())])


def is_storable(value: object) -> bool:
    """Whether it is a tensor that DCP stores as such. Others, such as sparse ones, stay in the blob."""
    return isinstance(value, torch.Tensor) and value.layout is torch.strided and not value.is_quantized


def flatten(tree: Mapping[str, Any], prefix: str = "") -> dict[str, torch.Tensor]:
    """DCP's own naming: path elements joined by dots."""
    flat: dict[str, torch.Tensor] = {}
    for key, value in tree.items():
        if isinstance(value, Mapping):
            flat.update(flatten(value, f"{prefix}{key}."))
        else:
            flat[f"{prefix}{key}"] = value
    return flat


def rewrapped(entries: Mapping[str, Any]) -> dict[str, Any]:
    """The reverse of `unwrapped`: inner tensors were loaded in place, so what wraps them is up to date."""
    return {key: _rewrapped(value) for key, value in entries.items()}


def _rewrapped(value: Any) -> Any:
    if isinstance(value, SplitTensor):
        return value.held
    return value.whole if isinstance(value, Wrapped) else value


def split(state: Mapping[str, Any], prefix: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """(tensors, everything else); an error names the entry that it concerns."""
    tensors: dict[str, Any] = {}
    others: dict[str, Any] = {}
    for key, value in state.items():
        if not isinstance(value, torch.Tensor):
            others[key] = value
            continue
        try:
            tensors[key] = unwrapped(value)
        except FAILURES as error:
            raise about(f"{prefix}.{key}", error) from error
    return tensors, others


def number_children(module: nn.ModuleList, numbers: Mapping[str, int]) -> None:
    """Say which of the whole model's modules of a kind these children are; see `child_names`."""
    module.__dict__[_NUMBERS] = {name: str(number) for name, number in numbers.items()}


_NUMBERS = "_holdfast_numbers"


def child_names(module: nn.Module) -> Mapping[str, str]:
    """By attribute, the names of children that go by another one in a checkpoint.

    A pipeline stage of Megatron-core's numbers its layers from 0 on, on every rank, and so do its experts.
    Each layer knows which one it is in the whole model; experts are numbered when the run begins.
    """
    if not isinstance(module, nn.ModuleList):
        return {}
    if (given := module.__dict__.get(_NUMBERS)) is not None:
        return cast("Mapping[str, str]", given)
    if not hasattr(next(iter(module), None), "layer_number"):
        return {}
    numbers = {
        name: getattr(child, "layer_number", None) if hasattr(child, "sharded_state_dict") else None
        for name, child in module._modules.items()
    }
    if any(not isinstance(number, int) or number < 1 for number in numbers.values()):
        return {}
    found = {name: str(cast("int", number) - 1) for name, number in numbers.items()}
    return found if len(set(found.values())) == len(found) else {}
