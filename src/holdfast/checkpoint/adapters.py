"""State of things that have some, but not as `state_dict` and `load_state_dict`, or not as plain tensors."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol, runtime_checkable

import torch
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from holdfast.checkpoint.failures import FAILURES, about


@runtime_checkable
class Stateful(Protocol):
    """What can be tracked as it is."""

    def state_dict(self) -> Any: ...

    def load_state_dict(self, state_dict: Any, /) -> Any: ...


@runtime_checkable
class RngTracker(Protocol):
    """A named set of generators, as tensor-parallel code keeps for its regions."""

    def get_states(self) -> Any: ...

    def set_states(self, states: Any, /) -> Any: ...


class GeneratorState:
    """A torch.Generator as something with a state_dict."""

    def __init__(self, generator: torch.Generator) -> None:
        self._generator = generator

    def state_dict(self) -> dict[str, torch.Tensor]:
        return {"state": self._generator.get_state()}

    def load_state_dict(self, state: dict[str, torch.Tensor]) -> None:
        self._generator.set_state(state["state"])


class TrackerState:
    """An RNG tracker as something with a state_dict."""

    def __init__(self, tracker: RngTracker) -> None:
        self._tracker = tracker

    def state_dict(self) -> dict[str, Any]:
        return {"states": dict(self._tracker.get_states())}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._tracker.set_states(state["states"])


def as_stateful(thing: object) -> Stateful | None:
    """The thing itself, an adapter around it, or None if it has no state that is known how to take."""
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
    """A tensor that only wraps others, such as a quantized weight, has no bytes of its own: those have."""
    whole: Any = tensor
    if type(tensor) is torch.Tensor:  # first: there are very many of these
        return tensor
    if isinstance(tensor, DTensor) or not is_traceable_wrapper_subclass(whole):
        return tensor
    names, _ = whole.__tensor_flatten__()
    return Wrapped(tensor, {name: unwrapped(getattr(tensor, name)) for name in names})


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
    """The other way round: inner tensors were loaded in place, so what wraps them is up to date."""
    return {key: value.whole if isinstance(value, Wrapped) else value for key, value in entries.items()}


def split(state: Mapping[str, Any], prefix: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """(tensors, everything else); an error names the entry that it befell."""
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
