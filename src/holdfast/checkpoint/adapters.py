"""State of things that have some, but not under the names `state_dict` and `load_state_dict`."""

from __future__ import annotations

from typing import Any, Protocol, runtime_checkable

import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.tensor import DTensor


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


class Spelling:
    """How torch spells the entries of one model's state_dict in a checkpoint.

    `get_model_state_dict` finds that out anew, entry by entry, in ten times a state_dict's own time.
    As long as the model's keys are the same as then, so are the names.
    """

    def __init__(self) -> None:
        self._keys: list[str] | None = None
        self._names: list[str] = []

    def state_of(self, model: nn.Module) -> dict[str, Any]:
        """What `get_model_state_dict` gives."""
        if self._keys is not None:
            with torch.no_grad():
                state = model.state_dict()
            if list(state) == self._keys:
                return dict(zip(self._names, state.values(), strict=True))
        self._keys = None
        found = get_model_state_dict(model)
        if not any(isinstance(module, FullyShardedDataParallel) for module in model.modules()):
            self._learn(model, found)
        return found

    def _learn(self, model: nn.Module, found: dict[str, Any]) -> None:
        """Only if each entry is in the place that it has in the state_dict: torch moves what it renames."""
        with torch.no_grad():
            state = model.state_dict()
        pairs = list(zip(state.values(), found.values(), strict=False))
        if len(state) == len(found) and all(_is_same_entry(one, other) for one, other in pairs):
            self._keys, self._names = list(state), list(found)


def _is_same_entry(one: Any, other: Any) -> bool:
    """Whether two looks at a model gave the same of its tensors; of anything else that cannot be told."""
    if not isinstance(one, torch.Tensor) or not isinstance(other, torch.Tensor):
        return False
    if isinstance(one, DTensor) and isinstance(other, DTensor):
        one, other = one._local_tensor, other._local_tensor
    same = type(one) is type(other) and one.shape == other.shape and one.dtype == other.dtype
    return same and type(one) in (torch.Tensor, nn.Parameter) and one.data_ptr() == other.data_ptr()


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
