"""An optimizer's state, as checkpoint state, and the tensors that a load reads into.

Guarantee: taking the state, and finding out what a load reads into, change nothing: no step is made, no
gradient, learning rate or entry comes into being, and no hook runs except those of the optimizer's own
`state_dict`. (torch's own `get_optimizer_state_dict` steps an optimizer that has no state yet.) What a load
reads into is modelled on what was saved, not on what a first step of this optimizer would make;
optimizer_load.py puts it into the optimizer.

In a checkpoint each tensor lies under `<part>.state.<parameter>.<key>`, with the parameter's qualified name
as `get_model_state_dict` spells it, and deeper if it lies in lists or dicts. Everything else is in the
rank's blob:

state         for each parameter that has an entry: whatever in it neither is a tensor nor holds one
param_groups  with the parameters' names
keys          which tensors this rank has for which parameters; another rank may have others
nested        containers that hold tensors: their form, without the tensors
whole         entries that are not a dict with text for keys: their form
named         entries under something other than a parameter: their form
extra         whatever else the optimizer's `state_dict` gives: its form
packed        instead of all these: what a `state_dict` gives that is not of torch's form
tensors       what is unusual about a tensor; see `_unusual`. A checkpoint of an older release has none
made          (parameter, key) of what is not in `optimizer.state` but was made by its `state_dict`
"""

from __future__ import annotations

import contextlib
import gc
from collections import OrderedDict, deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.tensor import DTensor
from torch.distributed.tensor import empty as distributed_empty
from torch.optim import Optimizer

from holdfast.base import hides_parameters, is_traceable_wrapper_subclass, local_part
from holdfast.checkpoint.format import FAILURES, about
from holdfast.checkpoint.state.adapters import OwnEntry, Wrapped, child_names, is_storable, unwrapped
from holdfast.checkpoint.state.unchanged import usual_entries
from holdfast.errors import IncompleteStateError, SaveFailedError, UsageError

Path = tuple[str, ...]
Form = tuple[Any, ...]
"""A container without its tensors: ("tensor",), ("value", it), or the kind of container and its members."""


@contextlib.contextmanager
def uncollected() -> Iterator[None]:
    """Without the garbage collector, which would repeatedly go through the many small objects made here."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def refuse_flat_parameters(name: str, model: nn.Module) -> None:
    """FSDP1 has one flat parameter in place of many, unless it is told to keep those, too."""
    if any(map(hides_parameters, model.modules())):
        raise UsageError(
            f"track({name}=…): the model is wrapped in FullyShardedDataParallel(use_orig_params=False), so "
            "an optimizer sees flat parameters without names, and their state fits one number of ranks only. "
            "Wrap it with use_orig_params=True, or use torch.distributed.fsdp.fully_shard"
        )


def refuse_what_cannot_be_taken(name: str, optimizer: Optimizer) -> None:
    """If each rank holds a share of an optimizer, its state exists only once gathered on one rank."""
    if any(kind.__name__ == "ZeroRedundancyOptimizer" for kind in type(optimizer).__mro__):
        raise UsageError(
            f"track({name}=…): the state of a ZeroRedundancyOptimizer lies in shares on all ranks, and its "
            "state_dict needs it gathered on one; shard the model with torch.distributed.fsdp.fully_shard "
            "instead, which shards a plain optimizer's state with it, or use a plain optimizer under DDP"
        )


def refuse_strangers(name: str, optimizer: Optimizer, models: Iterable[tuple[str, nn.Module]]) -> None:
    """Parameters that were a tracked model's when the run began, but no longer are: no resume has them."""
    known = {id(parameter) for _, model in models for parameter in model.parameters()}
    strangers = [
        f"parameter {place} of group {number}, of shape {tuple(parameter.shape)}"
        for number, group in enumerate(optimizer.param_groups)
        for place, parameter in enumerate(group["params"])
        if id(parameter) not in known
    ]
    if strangers:
        more = f", and {len(strangers) - 4} more" if len(strangers) > 4 else ""
        raise SaveFailedError(
            f"since the run began, {'; '.join(strangers[:4])}{more} of {name} belongs to no tracked model "
            "any more: a module was given another parameter in its place, but the optimizer still holds the "
            "old one, which no resume would have. Put the new parameter into the "
            "optimizer's param_groups, or change the model before the optimizer is made"
        )


def parameter_names(model: nn.Module) -> dict[str, nn.Parameter]:
    """The parameters under the names that checkpoints use: those of the model without its wrappers.

    A parameter with several names appears under the first of them.
    """
    found: dict[str, nn.Parameter] = {}
    seen: set[int] = set()

    def walk(module: nn.Module, prefix: str) -> None:
        seen.add(id(module))
        for name, parameter in module._parameters.items():
            if parameter is not None and id(parameter) not in seen:
                seen.add(id(parameter))
                found[prefix + name] = parameter
        called = child_names(module)
        for name, child in module._modules.items():
            if child is not None and id(child) not in seen:
                walk(child, prefix if _is_wrapper(module, name) else f"{prefix}{called.get(name, name)}.")

    walk(model, "")
    return found


def _is_wrapper(module: nn.Module, name: str) -> bool:
    """Whether a module only wraps the child of this name: DDP, FSDP1, compile, activation checkpointing."""
    if isinstance(module, nn.parallel.DistributedDataParallel):
        return name == "module"
    if isinstance(module, FullyShardedDataParallel):
        return name == "_fsdp_wrapped_module"
    if name == "_orig_mod":
        return type(module).__name__ == "OptimizedModule"
    return name == "_checkpoint_wrapped_module"


@dataclass(frozen=True)
class _Home:
    """The parameter that an entry belongs to, with its group; neither for an entry under another key."""

    parameter: torch.Tensor | None
    group: Mapping[str, Any]
    device: torch.device


def homes_of(
    optimizer: Optimizer, names: Mapping[str, nn.Parameter], groups: Sequence[Mapping[str, Any]]
) -> dict[str, _Home]:
    """By name, for the parameters that these groups name. Under "": the home of all other entries."""
    first = next((p for group in optimizer.param_groups for p in group["params"]), None)
    found = {"": _Home(None, {}, first.device if first is not None else torch.device("cpu"))}
    for group in groups:
        for name in group["params"]:
            if name in names:
                found[name] = _Home(names[name], group, names[name].device)
    return found


# Taking the state.


@uncollected()
def collect(
    part: str, optimizer: Optimizer, model: nn.Module, names: Mapping[str, nn.Parameter] | None = None
) -> tuple[dict[str, Any], dict[str, Any]]:
    """(tensors, everything else) of an optimizer whose parameters are all the model's. No copies are made.

    `names`: what `parameter_names` gives, if that is known.
    """
    if names is None:
        names = parameter_names(model)
    name_of = {id(parameter): name for name, parameter in names.items()}
    order = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    _refuse_numbered(part, optimizer, len(order))
    given: Mapping[str, Any] = optimizer.state_dict()
    if not _is_packed(given, len(order)):
        return {"state": {}}, {"packed": given}
    groups = [
        {**group, "params": [name_of[id(order[at])] for at in group["params"]]}
        for group in given["param_groups"]
    ]
    usual = usual_entries(optimizer, order, given)
    if usual is not None:
        of, entries = usual
        of_names = [name_of[id(parameter)] for parameter in of]
        return {"state": dict(zip(of_names, entries, strict=True))}, {
            "state": {name: {} for name in of_names},
            "param_groups": groups,
            "keys": {tuple(entries[0]): of_names},
            "tensors": {},
        }
    homes = homes_of(optimizer, names, groups)
    lifting = _Lifting(part, homes)
    state: dict[str, Any] = {}
    others: dict[str, Any] = {"state": state, "param_groups": groups}
    nested: dict[str, dict[str, Form]] = {}
    whole: dict[str, Form] = {}
    made: list[tuple[str, str | None]] = []
    named: list[tuple[Any, Form]] = []
    keys: dict[tuple[str, ...], list[str]] = {}
    for key, entry in given["state"].items():
        if not isinstance(key, int) or not 0 <= key < len(order):
            named.append((key, lifting.form(entry, ("named", str(key)), "")))
            continue
        parameter, name = order[key], name_of[id(order[key])]
        own = optimizer.state.get(parameter)
        if not isinstance(entry, dict) or not all(isinstance(one, str) for one in entry):
            whole[name] = lifting.form(entry, ("state", name), name)
            if entry is not own:
                made.append((name, None))
            continue
        state[name] = {}
        keys.setdefault(tuple(one for one in entry if is_storable(entry[one])), []).append(name)
        for one, value in entry.items():
            if entry is not own and not (isinstance(own, dict) and own.get(one) is value):
                made.append((name, one))
            if is_storable(value):
                lifting.lift(value, ("state", name, one), name)
            elif _holds_tensor(value):
                nested.setdefault(name, {})[one] = lifting.form(value, ("state", name, one), name)
            else:
                state[name][one] = value
    extra = {
        key: lifting.form(value, ("extra", key), "")
        for key, value in given.items()
        if key not in ("state", "param_groups")
    }
    unusual = {"nested": nested, "whole": whole, "named": named, "extra": extra, "made": made}
    others |= {key: value for key, value in unusual.items() if value}
    others |= {"keys": keys, "tensors": lifting.unusual}
    return lifting.tree, others


def _is_packed(given: Any, count: int) -> bool:
    """Whether a state_dict has the form that torch gives it, with this many parameters, numbered."""
    if not isinstance(given, Mapping) or not {"state", "param_groups"} <= given.keys():
        return False
    numbers = [number for group in given["param_groups"] for number in group["params"]]
    return isinstance(given["state"], Mapping) and numbers == list(range(count))


def _refuse_numbered(part: str, optimizer: Optimizer, count: int) -> None:
    """state_dict numbers the parameters, so an entry under a number could not be told from a parameter's."""
    keys: Iterable[Any] = optimizer.state
    for key in keys:
        if isinstance(key, int) and 0 <= key < count:
            raise SaveFailedError(
                f"{part}.state[{key}]: an entry under a plain number cannot be told from that of parameter "
                f"{key}. Give it a name"
            )


class _Lifting:
    """Takes the tensors out of an optimizer's state."""

    def __init__(self, part: str, homes: Mapping[str, _Home]) -> None:
        self.tree: dict[str, Any] = {"state": {}}
        self.unusual: dict[Path, dict[str, Any]] = {}
        self._part = part
        self._homes = homes
        self._places: dict[object, Path] = {
            _place(home.parameter): (name,) for name, home in homes.items() if home.parameter is not None
        }

    def lift(self, tensor: torch.Tensor, path: Path, home: str) -> None:
        try:
            facts = _unusual(tensor, self._homes[home], path)
            same = self._places.setdefault(_place(tensor), path)
            if same != path:
                facts["same"] = same
            self._put(path, unwrapped(tensor))
        except FAILURES as error:
            raise about(".".join((self._part, *path)), error) from error
        if facts:
            self.unusual[path] = facts

    def _put(self, path: Path, value: Any) -> None:
        node = self.tree
        for one in path[:-1]:
            node = node.setdefault(one, {})
        if path[-1] in node:
            raise ValueError("two entries have this name")
        node[path[-1]] = value

    def form(self, value: Any, path: Path, home: str) -> Form:
        if is_storable(value):
            self.lift(value, path, home)
            return ("tensor",)
        if not _holds_tensor(value):
            return ("value", value)
        if isinstance(value, dict):
            members = [(key, self.form(one, (*path, str(key)), home)) for key, one in value.items()]
            return ("ordered" if type(value) is OrderedDict else "dict", members)
        forms = [self.form(one, (*path, str(at)), home) for at, one in enumerate(value)]
        if type(value) is deque:
            return ("deque", forms, value.maxlen)
        if is_named_tuple(value):
            return ("named", forms, type(value))
        return (type(value).__name__, forms)


def _holds_tensor(value: object) -> bool:
    if type(value) in (dict, OrderedDict):
        return any(is_storable(one) or _holds_tensor(one) for one in value.values())  # type: ignore[attr-defined]
    if type(value) in (list, tuple, deque) or is_named_tuple(value):
        return any(is_storable(one) or _holds_tensor(one) for one in value)  # type: ignore[attr-defined]
    return False


def is_named_tuple(value: object) -> bool:
    return isinstance(value, tuple) and hasattr(value, "_fields")


def _is_wrapping(tensor: Any) -> bool:
    """Whether a tensor has no bytes of its own, only inner tensors that do; DTensors are another matter."""
    if type(tensor) in (torch.Tensor, nn.Parameter):  # the usual case, many times at every save
        return False
    return not isinstance(tensor, DTensor) and is_traceable_wrapper_subclass(tensor)


def _usual_device(home: _Home, path: Path, size: torch.Size) -> torch.device:
    """The device of a tensor in this place unless noted otherwise: `step` as torch's optimizers have it."""
    if home.parameter is None:
        return torch.device("cpu")
    if _is_step(path, size) and not (home.group.get("capturable") or home.group.get("fused")):
        return torch.device("cpu")
    return home.device


def _is_step(path: Path, size: torch.Size) -> bool:
    return path[2:] == ("step",) and not size


def _is_like(home: _Home, path: Path, size: torch.Size) -> bool:
    """Whether a tensor of this place and size is laid out like its parameter, unless noted otherwise."""
    return home.parameter is not None and home.parameter.size() == size and not _is_step(path, size)


def _unusual(tensor: torch.Tensor, home: _Home, path: Path) -> dict[str, Any]:
    """What a load has to know of a tensor besides size, type and its parameter; most often nothing.

    device      the kind of device, if not the usual one
    placements  those of a DTensor that is not laid out like its parameter
    plain       it is not a DTensor although its parameter is one, of the same size
    local       it is not a DTensor either, but of the size of this rank's part of the parameter
    whole       the size of a DTensor that is not of its parameter's
    order       that of its dimensions in memory, if not the usual one
    wraps       what it takes to make a tensor subclass from its inner tensors
    grad        it requires a gradient
    same        (noted by `_Lifting`) the path of another tensor in the same memory, or a parameter's name
    """
    facts: dict[str, Any] = {}
    size, parameter = tensor.size(), home.parameter
    like = _is_like(home, path, size)
    if tensor.requires_grad:
        facts["grad"] = True
    if tensor.device != _usual_device(home, path, size):
        facts["device"] = "parameter" if tensor.device == home.device else tensor.device.type
    if isinstance(tensor, DTensor):
        if not isinstance(parameter, DTensor) or tensor.device_mesh != parameter.device_mesh:
            raise ValueError("it is distributed over a different mesh from its parameter")
        if _is_wrapping(local_part(tensor)):
            kind = type(local_part(tensor)).__name__
            raise ValueError(
                f"it is distributed, and on each rank a {kind}, which only a model's parameters and buffers "
                "may be. Keep the optimizer's state in plain tensors"
            )
        if not like or tensor.placements != parameter.placements or _is_wrapping(local_part(parameter)):
            facts["placements"] = tuple(tensor.placements)
        if size != parameter.size():
            facts["whole"] = tuple(size)
        return facts
    if _is_wrapping(tensor):
        whole: Any = tensor
        _, context = whole.__tensor_flatten__()
        facts["wraps"] = (type(tensor), context, tuple(size), tuple(tensor.stride()))
        return facts
    if isinstance(parameter, DTensor):
        if like:
            facts["plain"] = True
        alone = parameter.device_mesh.size() == 1  # then a whole tensor cannot be told from a share
        if size and size == local_part(parameter).size() and (alone or not like):
            facts["local"] = True
    usual = parameter if like and not isinstance(parameter, DTensor) else None
    if not (tensor.is_contiguous() if usual is None else tensor.stride() == usual.stride()):
        order = _order(tensor)
        if order != (_order(usual) if usual is not None else tuple(range(tensor.dim()))):
            facts["order"] = order
    return facts


def _place(tensor: torch.Tensor) -> object:
    """Equal for tensors that are the same memory, viewed in the same way."""
    local: Any = local_part(tensor)
    if _is_wrapping(local) or not local.numel():
        return id(tensor)
    return (local.data_ptr(), local.dtype, local.size(), local.stride())


def _order(tensor: torch.Tensor) -> tuple[int, ...]:
    """The dimensions, ordered by how far apart their elements lie, farthest first."""
    apart = tensor.stride()
    return tuple(sorted(range(tensor.dim()), key=lambda at: -apart[at]))


# What a load reads into.


@uncollected()
def targets(
    part: str, optimizer: Optimizer, model: nn.Module, others: Mapping[str, Any], metadata: Metadata
) -> dict[str, Any]:
    """The tensors to read into: the optimizer's own where they are of the kind that was saved, else new ones.

    Only those that are stored; what is stored but has no place in this optimizer is left out, for the strict
    check to name.
    """
    if "packed" in others:
        return {"state": {}}
    names = parameter_names(model)
    name_of = {id(parameter): name for name, parameter in names.items()}
    match_groups(part, group_names(optimizer, name_of), [g["params"] for g in others["param_groups"]], names)
    return _Reading(part, optimizer, names, others, metadata).tree()


def stock_targets(
    part: str, optimizer: Optimizer, model: nn.Module, metadata: Metadata
) -> tuple[dict[str, Any], dict[str, Any]]:
    """(the tensors to read into, all else) for a plain DCP directory, which gives only names and sizes."""
    names = parameter_names(model)
    name_of = {id(parameter): name for name, parameter in names.items()}
    groups = [
        {**group, "params": members}
        for group, members in zip(optimizer.param_groups, group_names(optimizer, name_of), strict=True)
    ]
    others: dict[str, Any] = {"state": {}, "param_groups": groups}
    tree = _Reading(part, optimizer, names, others, metadata).tree()
    others["state"] = {name: {} for name in tree["state"]}
    return tree, others


def group_names(optimizer: Optimizer, name_of: Mapping[int, str]) -> list[list[str]]:
    return [[name_of[id(parameter)] for parameter in group["params"]] for group in optimizer.param_groups]


def match_groups(
    part: str, live: Sequence[Sequence[str]], saved: Sequence[Sequence[str]], known: Iterable[str]
) -> list[int]:
    """Pure: for each parameter group, which saved group it is; then the saved groups still to be added.

    A group that was added while the run trained does not exist when the script starts again.
    """
    left = {at: frozenset(group) for at, group in enumerate(saved)}
    found: list[int] = []
    problems: list[str] = []
    saved_names = frozenset[str]().union(*left.values())
    for at, group in enumerate(live):
        members = frozenset(group)
        match = next((saved_at for saved_at, others in left.items() if others == members), None)
        if match is not None:
            found.append(match)
            del left[match]
            continue
        new = sorted(members - saved_names)
        problems += [
            f"{part}: parameter {name} is optimized, but was not when this was saved" for name in new
        ]
        if not new:
            problems.append(f"{part}: parameter group {at} holds other parameters than when this was saved")
    known = frozenset(known)
    taken = frozenset(name for group in live for name in group)
    for at, members in left.items():
        if members & taken or not members:
            problems.append(f"{part}: parameter group {at} of the checkpoint has no counterpart")
        problems += [f"{part}: parameter {name} was optimized, and the model has none of that name"
                     for name in sorted(members - known)]  # fmt: skip
    if problems:
        shown = "\n  ".join(problems[:12]) + (
            f"\n  … and {len(problems) - 12} more" if len(problems) > 12 else ""
        )
        raise IncompleteStateError(
            f"the optimizer's parameter groups do not fit the checkpoint:\n  {shown}\n"
            "Give the optimizer the groups that it had, or start with resume_from = 'fresh'"
        )
    return found + sorted(left)


_UNDIVIDED = {"plain", "local"}
"""Noted of tensors that are not distributed although their parameter is."""


class _Reading:
    """Finds or makes the tensors that stored ones are read into."""

    def __init__(
        self,
        part: str,
        optimizer: Optimizer,
        names: Mapping[str, nn.Parameter],
        others: Mapping[str, Any],
        metadata: Metadata,
    ) -> None:
        self._part = part
        self._homes = homes_of(optimizer, names, others["param_groups"])
        self._notes: Mapping[Path, Mapping[str, Any]] | None = others.get("tensors")
        self._stored = _stored(part, self._homes, metadata)
        self._live = live_tensors(optimizer, self._homes)
        self._taken = {_memory(parameter) for parameter in names.values()}

    def tree(self) -> dict[str, Any]:
        state = self._stored.get("state", {})
        tree: dict[str, Any] = {
            "state": {
                name: self._make(node, ("state", name), name)
                for name, node in state.items()
                if name in self._homes
            }
        }
        for kind in ("named", "extra"):
            if kind in self._stored:
                tree[kind] = self._make(self._stored[kind], (kind,), "")
        for path, facts in (self._notes or {}).items():
            if "same" in facts:
                self._share(tree, path, facts["same"])
        return tree

    def _share(self, tree: dict[str, Any], path: Path, same: Path) -> None:
        """Put what shared memory into shared memory again."""
        node, other = _at(tree, path[:-1]), _at(tree, same)
        if len(same) == 1 and same[0] in self._homes:
            parameter = self._homes[same[0]].parameter
            other = parameter.detach() if parameter is not None else None
        if isinstance(node, dict) and path[-1] in node and isinstance(other, torch.Tensor):
            node[path[-1]] = other

    def _make(self, node: Any, path: Path, name: str) -> Any:
        home = self._homes[name]
        facts = self._notes.get(path, {}) if self._notes is not None else {}
        if not isinstance(node, dict):
            return self._tensor(node, path, home, facts)
        live = self._live.get(path)
        if "wraps" in facts:
            inner = {key: self._make(one, (*path, key), name) for key, one in node.items()}
            return _wrapped(inner, facts)
        if self._notes is None and len(path) == 3:  # from an older release, which did not note wrappers
            like = live if live is not None else home.parameter
            if like is not None and _is_wrapping(like):
                return unwrapped(like if like is live else torch.zeros_like(like))
        return {key: self._make(one, (*path, key), name) for key, one in node.items()}

    def _tensor(self, entry: Any, path: Path, home: _Home, facts: Mapping[str, Any]) -> torch.Tensor:
        if not isinstance(entry, TensorStorageMetadata):
            raise IncompleteStateError(f"{self._name(path)}: the checkpoint holds an object, not a tensor")
        live = self._live.get(path)
        size, dtype, parameter = entry.size, entry.properties.dtype, home.parameter
        if isinstance(entry, OwnEntry) and isinstance(parameter, DTensor) and not facts.keys() & _UNDIVIDED:
            size = torch.Size(facts["whole"]) if "whole" in facts else entry.size_as(parameter)
        if live is not None and self._fits(live, size, dtype, path, home, facts):
            return live
        if facts.get("local") and isinstance(parameter, DTensor) and local_part(parameter).size() != size:
            raise IncompleteStateError(
                f"{self._name(path)}: each rank kept its own, of shape {tuple(size)}; now a rank holds "
                f"{tuple(local_part(parameter).size())} of the parameter. Resume with as many ranks as saved"
            )
        tensor = _empty(size, dtype, home, path, facts, self._name(path))
        return tensor.requires_grad_() if facts.get("grad") else tensor

    def _fits(
        self,
        live: torch.Tensor,
        size: torch.Size,
        dtype: torch.dtype,
        path: Path,
        home: _Home,
        facts: Mapping[str, Any],
    ) -> bool:
        """Whether the optimizer's own tensor is of the kind that was saved, with memory all its own."""
        if live.size() != size or live.dtype != dtype:
            return False
        if self._notes is not None:
            noted = {key: value for key, value in facts.items() if key != "same"}
            if _unusual(live, home, path) != noted:
                return False
        memory = _memory(live)
        if memory in self._taken:
            return False
        self._taken.add(memory)
        return True

    def _name(self, path: Path) -> str:
        return ".".join((self._part, *path))


def _at(tree: Any, path: Path) -> Any:
    for one in path:
        tree = tree.get(one) if isinstance(tree, dict) else None
    return tree


def _wrapped(inner: dict[str, Any], facts: Mapping[str, Any]) -> Wrapped:
    kind, context, size, stride = facts["wraps"]
    made = {key: unwrap(one) for key, one in inner.items()}
    return Wrapped(kind.__tensor_unflatten__(made, context, torch.Size(size), stride), inner)


def _stored(part: str, homes: Mapping[str, _Home], metadata: Metadata) -> dict[str, Any]:
    """What a checkpoint holds of a part, as a tree."""
    paths = metadata.planner_data if isinstance(metadata.planner_data, Mapping) else {}
    tree: dict[str, Any] = {}
    for key, entry in metadata.state_dict_metadata.items():
        if not key.startswith(f"{part}."):
            continue
        path = paths.get(key)
        names = tuple(map(str, path[1:])) if path else _path_of(key.removeprefix(f"{part}."), homes)
        if names[0] not in ("state", "named", "extra") or len(names) < 2:
            continue
        node = tree
        for one in names[:-1]:
            node = node.setdefault(one, {})
        node[names[-1]] = entry
    return tree


def _path_of(key: str, homes: Mapping[str, _Home]) -> Path:
    """The path that a name came from, where it was not kept: parameters' names have dots, too."""
    kind, _, rest = key.partition(".")
    elements = rest.split(".")
    for at in range(len(elements), 0, -1):
        name = ".".join(elements[:at])
        if name in homes:
            return (kind, name, ".".join(elements[at:])) if at < len(elements) else (kind, name)
    return (kind, rest)


def live_tensors(optimizer: Optimizer, homes: Mapping[str, _Home]) -> dict[Path, torch.Tensor]:
    """The tensors that an optimizer has now, by the paths under which they would be stored."""
    found: dict[Path, torch.Tensor] = {}

    def walk(value: Any, path: Path) -> None:
        if is_storable(value):
            found[path] = value
        elif isinstance(value, dict):
            for key, one in value.items():
                walk(one, (*path, str(key)))
        elif type(value) in (list, tuple, deque) or is_named_tuple(value):
            for at, one in enumerate(value):
                walk(one, (*path, str(at)))

    for name, home in homes.items():
        if home.parameter is not None and home.parameter in optimizer.state:
            walk(optimizer.state[home.parameter], ("state", name))
    every: Mapping[Any, Any] = optimizer.state
    for key, value in every.items():
        if not isinstance(key, torch.Tensor):
            walk(value, ("named", str(key)))
    return found


def _memory(tensor: torch.Tensor) -> object:
    """Equal for tensors in the same memory."""
    local: Any = local_part(tensor)
    if _is_wrapping(local) or local.layout is not torch.strided or not local.numel():
        return id(tensor)
    return local.untyped_storage().data_ptr() or id(tensor)


def _empty(
    size: torch.Size,
    dtype: torch.dtype,
    home: _Home,
    path: Path,
    facts: Mapping[str, Any],
    name: str,
) -> torch.Tensor:
    """A tensor of the kind that was saved, for this world: laid out as its parameter is now."""
    parameter = home.parameter
    if "placements" in facts:
        if not isinstance(parameter, DTensor) or parameter.device_mesh.ndim != len(facts["placements"]):
            raise IncompleteStateError(
                f"{name}: it was distributed as {list(facts['placements'])}, and its parameter's mesh is "
                f"{parameter.device_mesh if isinstance(parameter, DTensor) else 'none'} now. Resume with a "
                "mesh of as many dimensions as it was saved with"
            )
        made: torch.Tensor = distributed_empty(
            size, dtype=dtype, device_mesh=parameter.device_mesh, placements=facts["placements"]
        )
        return made
    kind = facts.get("device")
    device = _usual_device(home, path, size)
    if kind is not None:
        device = home.device if kind == "parameter" else torch.device(kind)
    if _is_like(home, path, size) and not facts.get("plain") and "order" not in facts:
        assert parameter is not None
        whole: Any = parameter.detach()
        if isinstance(whole, DTensor):
            return torch.empty_like(whole, dtype=dtype)
        if not _is_wrapping(whole):
            return torch.empty_like(whole, dtype=dtype, device=device).as_subclass(torch.Tensor)
    order = facts.get("order", range(len(size)))
    apart = torch.empty([size[at] for at in order], dtype=dtype, device=device)
    return apart.permute([list(order).index(at) for at in range(len(size))])


def unwrap(value: Any) -> Any:
    return value.whole if isinstance(value, Wrapped) else value
