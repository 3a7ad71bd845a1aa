"""State that `state_dict` and `load_state_dict` do not cover, or only in part, or not as plain tensors."""

from __future__ import annotations

import copy
import functools
import types
from collections.abc import Iterator, Mapping
from typing import Any, Protocol, runtime_checkable

import torch
from torch.distributed.tensor import DTensor
from torch.optim.lr_scheduler import LRScheduler

from holdfast.base import is_traceable_wrapper_subclass
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
        now = dict(self._tracker.get_states())  # at another number of ranks
        self._tracker.set_states(
            {name: _seeded(one, state["seed"] + at) for at, (name, one) in enumerate(sorted(now.items()))}
        )


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


class Wrapped(dict[str, Any]):
    """The tensors that a tensor subclass is made of, by name, and the subclass around them."""

    def __init__(self, whole: torch.Tensor, inner: dict[str, Any]) -> None:
        super().__init__(inner)
        self.whole = whole


def unwrapped(tensor: torch.Tensor) -> torch.Tensor | Wrapped:
    """The inner tensors of one that only wraps others, such as a quantized weight: they hold its bytes."""
    whole: Any = tensor
    if type(tensor) is torch.Tensor:  # first, because there are very many of these
        return tensor
    if isinstance(tensor, DTensor) or not is_traceable_wrapper_subclass(whole):
        return tensor
    names, _ = whole.__tensor_flatten__()
    return Wrapped(tensor, {name: unwrapped(getattr(tensor, name)) for name in names})


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
    return {key: value.whole if isinstance(value, Wrapped) else value for key, value in entries.items()}


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
