"""What a run tracks, as checkpoint state and back.

A checkpoint holds three kinds of state:

* tensors of models and optimizers, under their fully qualified names, so any world size can read them;
* one blob a rank, `holdfast.rank_<rank>`: everything else that is tracked (schedules, scalers, optimizer
  hyper-parameters …) and Holdfast's own RNG, data position and counters. It is a uint8 tensor around a
  torch.save archive: DCP itself never has to unpickle anything of ours;
* nothing else. What cannot be captured is an error when saving, not a surprise when resuming.
"""

from __future__ import annotations

import io
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from holdfast.checkpoint.adapters import GeneratorState, Stateful, TrackerState, as_stateful
from holdfast.checkpoint.failures import FAILURES, about, naming
from holdfast.checkpoint.manifest import PartEntry
from holdfast.errors import IncompleteStateError, UsageError

OWN = "holdfast"
"""Reserved top-level name of the per-rank blobs."""
BLOB_STEP = 16 * 1024
"""A blob's length is a multiple of this; a plan holds only as long as every length stays the same."""


def rank_key(rank: int) -> str:
    return f"rank_{rank:05d}"


class Tracked:
    """The tracked objects of a run, by the names the user gave them."""

    def __init__(self) -> None:
        self._objects: dict[str, Stateful] = {}
        self._given: dict[str, object] = {}

    def add(self, name: str, thing: object) -> None:
        if name == OWN or not name.isidentifier():
            raise UsageError(f"track({name}=…): the name must be a plain identifier other than {OWN!r}")
        if name in self._given and self._given[name] is not thing:
            raise UsageError(f"track({name}=…): something else is tracked under that name already")
        stateful = as_stateful(thing)
        if stateful is None:
            raise UsageError(
                f"track({name}=…): a {type(thing).__name__} has no state_dict and load_state_dict; "
                "give it both, or track the object that has them"
            )
        self._given[name], self._objects[name] = thing, stateful

    def names(self) -> list[str]:
        return list(self._objects)

    def kind(self, name: str) -> str:
        thing = self._objects[name]
        if isinstance(thing, nn.Module):
            return "model"
        return "optimizer" if self._owner(thing) is not None else "object"

    def _owner(self, thing: object) -> nn.Module | None:
        """The tracked model that holds all of an optimizer's parameters, if there is one."""
        if not isinstance(thing, torch.optim.Optimizer):
            return None
        wanted = {id(parameter) for group in thing.param_groups for parameter in group["params"]}
        for model in self._objects.values():
            if isinstance(model, nn.Module) and wanted <= {id(p) for p in model.parameters()}:
                return model
        return None

    def optimizers(self) -> list[torch.optim.Optimizer]:
        """The tracked optimizers that are torch's own kind."""
        return [thing for thing in self._objects.values() if isinstance(thing, torch.optim.Optimizer)]

    def models(self) -> list[tuple[str, nn.Module]]:
        """The tracked models, by name."""
        return [(name, thing) for name, thing in self._objects.items() if isinstance(thing, nn.Module)]

    def scalers(self) -> list[torch.amp.GradScaler]:
        """The tracked gradient scalers that are torch's own kind."""
        return [thing for thing in self._objects.values() if isinstance(thing, torch.amp.GradScaler)]

    def generators(self) -> list[Stateful]:
        """Tracked generators of random numbers, and trackers of several."""
        return [t for t in self._objects.values() if isinstance(t, GeneratorState | TrackerState)]

    def given(self) -> dict[str, object]:
        """The tracked objects themselves, as they were given."""
        return dict(self._given)

    def devices(self) -> set[torch.device]:
        """The devices other than the host that tracked models are on."""
        found = {parameter.device for _, model in self.models() for parameter in model.parameters()}
        return {device for device in found if device.type not in ("cpu", "meta")}

    def collect(self) -> tuple[dict[str, Any], dict[str, Any]]:
        """(tensors by part, everything else by part). The tensors alias live state; they are not copies."""
        tensors: dict[str, Any] = {}
        others: dict[str, Any] = {}
        for name, thing in self._objects.items():
            with naming(f"track({name}=…), in its state_dict"):
                if isinstance(thing, nn.Module):
                    state = get_model_state_dict(thing)
                    tensors[name], others[name] = _split(state, name)
                elif isinstance(thing, torch.optim.Optimizer) and (owner := self._owner(thing)) is not None:
                    tensors[name], others[name] = _split_optimizer(
                        get_optimizer_state_dict(owner, thing), name
                    )
                else:
                    others[name] = thing.state_dict()
        return tensors, others

    def targets(self, others: Mapping[str, Any], metadata: Metadata) -> dict[str, Any]:
        """The tensors, by part, that a load of this checkpoint reads into. `others` is all else in it."""
        tensors, _ = self.collect()
        drop_stateless(tensors, others, metadata)
        return tensors

    def apply(self, tensors: Mapping[str, Any], others: Mapping[str, Any]) -> None:
        """Put loaded state into the tracked objects. Tensors were loaded in place already."""
        for name, thing in self._objects.items():
            if isinstance(thing, nn.Module):
                if others[name]:
                    set_model_state_dict(thing, {**rewrapped(tensors[name]), **others[name]})
            elif isinstance(thing, torch.optim.Optimizer) and (owner := self._owner(thing)) is not None:
                merged = _merge_optimizer(tensors[name], others[name])
                # Not torch's strictness but ours (check_strict): it refuses parameters without saved state.
                set_optimizer_state_dict(owner, thing, merged, options=StateDictOptions(strict=False))
            else:
                thing.load_state_dict(others[name])

    def parts(self, tensors: Mapping[str, Any]) -> dict[str, PartEntry]:
        return {
            name: PartEntry(kind=self.kind(name), entries=len(flatten(tensors.get(name, {}))))
            for name in self._objects
        }


class Wrapped(dict[str, Any]):
    """The tensors that a tensor subclass is made of, by name, and the subclass around them."""

    def __init__(self, whole: torch.Tensor, inner: dict[str, Any]) -> None:
        super().__init__(inner)
        self.whole = whole


def unwrapped(tensor: torch.Tensor) -> torch.Tensor | Wrapped:
    """A tensor that only wraps others, such as a quantized weight, has no bytes of its own: those have."""
    whole: Any = tensor
    if isinstance(tensor, DTensor) or not is_traceable_wrapper_subclass(whole):
        return tensor
    names, _ = whole.__tensor_flatten__()
    return Wrapped(tensor, {name: unwrapped(getattr(tensor, name)) for name in names})


def rewrapped(entries: Mapping[str, Any]) -> dict[str, Any]:
    """The other way round: inner tensors were loaded in place, so what wraps them is up to date."""
    return {key: value.whole if isinstance(value, Wrapped) else value for key, value in entries.items()}


def _split(state: Mapping[str, Any], prefix: str) -> tuple[dict[str, Any], dict[str, Any]]:
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


def _split_optimizer(state: Mapping[str, Any], prefix: str) -> tuple[dict[str, Any], dict[str, Any]]:
    tensors: dict[str, Any] = {}
    others: dict[str, Any] = {}
    for name, entries in state["state"].items():
        tensors[name], others[name] = _split(entries, f"{prefix}.state.{name}")
    return {"state": tensors}, {"state": others, "param_groups": state["param_groups"]}


def _merge_optimizer(tensors: Mapping[str, Any], others: Mapping[str, Any]) -> dict[str, Any]:
    merged = {
        name: {**rewrapped(entries), **others["state"].get(name, {})}
        for name, entries in tensors["state"].items()
    }
    return {"state": merged, "param_groups": others["param_groups"]}


def flatten(tree: Mapping[str, Any], prefix: str = "") -> dict[str, torch.Tensor]:
    """DCP's own naming: path elements joined by dots."""
    flat: dict[str, torch.Tensor] = {}
    for key, value in tree.items():
        if isinstance(value, Mapping):
            flat.update(flatten(value, f"{prefix}{key}."))
        else:
            flat[f"{prefix}{key}"] = value
    return flat


def drop_stateless(tensors: dict[str, Any], others: Mapping[str, Any], metadata: Metadata) -> None:
    """Forget optimizer entries for parameters that had no state when the checkpoint was saved.

    A fresh optimizer is given state for all of its parameters before a load, one in use has it only for those
    that ever had a gradient. The saved parameter groups tell such a parameter from a new one.
    """
    for name, tree in tensors.items():
        saved = others.get(name)
        if not isinstance(saved, Mapping) or "param_groups" not in saved or "state" not in tree:
            continue
        known = {parameter for group in saved["param_groups"] for parameter in group["params"]}
        for parameter in [p for p in tree["state"] if p in known]:
            wanted = flatten(tree["state"][parameter], f"{name}.state.{parameter}.")
            if not any(key in metadata.state_dict_metadata for key in wanted):
                del tree["state"][parameter]


def check_strict(tensors: Mapping[str, Any], metadata: Metadata) -> None:
    """Both directions, by name, shape and dtype: DCP ignores unread keys and casts dtypes silently."""
    wanted = flatten(tensors)
    stored = {
        key: entry for key, entry in metadata.state_dict_metadata.items() if not key.startswith(f"{OWN}.")
    }
    problems = [f"{key}: tracked, but not in the checkpoint" for key in sorted(wanted.keys() - stored.keys())]
    problems += [
        f"{key}: in the checkpoint, but not tracked" for key in sorted(stored.keys() - wanted.keys())
    ]
    for key in sorted(wanted.keys() & stored.keys()):
        entry, tensor = stored[key], wanted[key]
        if not isinstance(entry, TensorStorageMetadata):
            problems.append(f"{key}: a tensor is tracked, the checkpoint holds an object")
        elif entry.size != tensor.size():
            problems.append(
                f"{key}: shape {tuple(tensor.size())} tracked, {tuple(entry.size)} in the checkpoint"
            )
        elif entry.properties.dtype != tensor.dtype:
            problems.append(f"{key}: {tensor.dtype} tracked, {entry.properties.dtype} in the checkpoint")
    if problems:
        shown = "\n  ".join(problems[:12]) + (
            f"\n  … and {len(problems) - 12} more" if len(problems) > 12 else ""
        )
        raise IncompleteStateError(
            f"the tracked state does not fit the checkpoint ({len(problems)} differences):\n  {shown}\n"
            "Make the script track what was saved, or start with resume_from = 'fresh'"
        )


def check_parts(names: list[str], parts: Mapping[str, Any]) -> None:
    """The tracked names must be exactly those that were saved."""
    missing = sorted(set(names) - parts.keys())
    extra = sorted(parts.keys() - set(names))
    if missing or extra:
        raise IncompleteStateError(
            f"the checkpoint holds {sorted(parts)}; this script tracks {sorted(names)}. "
            f"Missing from the checkpoint: {missing or 'nothing'}; not tracked any more: {extra or 'nothing'}"
        )


def to_blob(value: Any, at_least: int = 0) -> torch.Tensor:
    """Its length is a multiple of BLOB_STEP, and `at_least` if that can be: so it seldom changes.

    A zip comment fills the archive up; it can be no longer than 65,535 bytes.
    """
    buffer = io.BytesIO()
    torch.save(value, buffer)
    data = bytearray(buffer.getbuffer())
    length = len(data) + -len(data) % BLOB_STEP
    if length < at_least <= len(data) + 0xFFFF:
        length = at_least
    data[-2:] = (length - len(data)).to_bytes(2, "little")
    data.extend(bytes(length - len(data)))
    return torch.frombuffer(data, dtype=torch.uint8)


def from_blob(blob: torch.Tensor) -> Any:
    """Unpickles: only ever called on bytes that matched their digest."""
    return torch.load(io.BytesIO(blob.numpy().tobytes()), map_location="cpu", weights_only=False)
