"""A module's state, as checkpoint state and back.

Guarantee: after `apply` the module is, bit for bit, what the checkpoint holds of it, or the load is refused
and names what is not. Two things make it so:

* A tensor is read straight into the module's memory only where that is provably what load_state_dict would
  do: that memory *is* the parameter's or buffer's registered under its name, and nothing above it loads in a
  way of its own. Everything else (what get_extra_state gave, what a module keeps in a format of its own,
  whatever hooks have a hand in) is read into separate memory, shaped as in the checkpoint, and goes through
  load_state_dict: all of the module, strictly, once. What the module then says its state is must be what was
  read.
* What training changed but a state_dict does not show is recorded beside it, relative to the module as the
  script had built it (`Built`): buffers that are not persistent, were registered meanwhile, have another
  shape or are gone, parameters frozen or thawed, modules set to train or to evaluate. Parameters that come,
  go or change their shape have no place in the fresh module of a resume: such a save is refused by name.
"""

from __future__ import annotations

import contextlib
import copy
import sys
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.nn.parameter import is_lazy

from holdfast.base import (
    ActivationWrapper,
    InstanceNorm,
    NormBase,
    flat_stretches,
    forget_gathered,
    local_part,
)
from holdfast.checkpoint.format import fingerprint as fingerprints
from holdfast.checkpoint.format import plain
from holdfast.checkpoint.state.adapters import SplitTensor, Wrapped, child_names, rewrapped, split
from holdfast.errors import IncompleteStateError, SaveFailedError

RECORD = "holdfast.changed"
"""Where the changes that a state_dict does not show are kept, among what is not a tensor."""
LOOSE = "holdfast.loose."
"""Prefix to the names of buffers that are stored although they are not persistent: no state_dict has them.
Each rank's record says which of them it stored: what another rank changed, this one need not have."""
EXTRA = "_extra_state"
"""The last part of the name of what get_extra_state gave."""
FIRST_VERSION = {"version": 1}
"""What a state_dict's metadata says of most modules."""
PLAIN_LOADS = (
    nn.Module._load_from_state_dict,
    NormBase._load_from_state_dict,
    InstanceNorm._load_from_state_dict,
)
"""Loads that only copy what is registered, as long as the checkpoint has all of it. Those of normalisations
add or leave out what releases before 0.4 did not store."""
PLAIN_HOOKS = (
    "torch.distributed.fsdp.",
    "torch.distributed.algorithms._checkpoint.checkpoint_wrapper",
    "torch.nn.utils.parametrizations",
)
"""Where hooks that change no value come from: they put shards in place before these are read, or deal with
prefixes of wrappers and names of older releases."""


# --- the modules of a model -------------------------------------------------------------------------------


@dataclass(frozen=True)
class Submodule:
    """A module within a tracked one, with its prefixes: each empty, or ending in a dot."""

    module: nn.Module
    raw: str
    """Its prefix in a state_dict's `_metadata`: the path of attributes."""
    key: str
    """Its prefix in the keys of a state_dict."""
    name: str
    """Its prefix in a checkpoint: shows no wrapper (DDP, torch.compile, activation checkpointing)."""
    foreign: bool
    """Whether it, or one that contains it, loads in a way of its own."""


def members(model: nn.Module) -> list[Submodule]:
    """The model and all modules in it; a module that occurs twice is listed twice."""
    return list(_members(Submodule(model, "", "", "", _overrides(model, "load_state_dict"))))


def _members(member: Submodule) -> Iterator[Submodule]:
    module = member.module
    foreign = member.foreign or _loads_its_own_way(module)
    yield Submodule(module, member.raw, member.key, member.name, foreign)
    called = child_names(module)
    for child_name, child in module._modules.items():
        if child is None:
            continue
        raw = key = f"{child_name}."
        name = f"{called.get(child_name, child_name)}."
        if isinstance(module, ActivationWrapper):
            key = name = ""
        elif isinstance(module, DistributedDataParallel | FullyShardedDataParallel) or _is_compiled(module):
            name = ""
        yield from _members(Submodule(child, member.raw + raw, member.key + key, member.name + name, foreign))


def _is_compiled(module: nn.Module) -> bool:
    """Whether this is what torch.compile puts around a module; if any exists, the code for it is loaded."""
    dynamo = sys.modules.get("torch._dynamo.eval_frame")
    return dynamo is not None and isinstance(module, dynamo.OptimizedModule)


def _overrides(module: nn.Module, method: str) -> bool:
    return getattr(getattr(module, method), "__func__", None) is not getattr(nn.Module, method)


def _loads_its_own_way(module: nn.Module) -> bool:
    """Whether loading does more to the state of this module, or of those in it, than copy it."""
    load = getattr(module._load_from_state_dict, "__func__", None)
    return load not in PLAIN_LOADS or any(map(_is_own, module._load_state_dict_pre_hooks.values()))


def _is_own(hook: Any) -> bool:
    """Whether a hook may do anything at all."""
    function = getattr(hook, "hook", hook)  # torch wraps some
    return not str(getattr(function, "__module__", "")).startswith(PLAIN_HOOKS)


def _takes_part(member: Submodule) -> bool:
    """Whether the module must take part in a load, even if all its tensors are already in place."""
    module = member.module
    extra = _overrides(module, "get_extra_state") or _overrides(module, "set_extra_state")
    return member.foreign or extra or any(map(_is_own, module._load_state_dict_post_hooks.values()))


class _Names:
    """From the keys of a state_dict to the names in a checkpoint and back."""

    def __init__(self, found: list[Submodule]) -> None:
        self._by_key = {member.key: member for member in found}
        self._by_name = {member.name: member for member in found}  # with wrappers, the innermost

    def name(self, key: str) -> str:
        member = _longest(self._by_key, key)
        return member.name + key[len(member.key) :]

    def key(self, name: str) -> str:
        member = self.owner(name)
        return member.key + name[len(member.name) :]

    def owner(self, name: str) -> Submodule:
        """The module that an entry of this name belongs to."""
        return _longest(self._by_name, name)


def _longest(by_prefix: Mapping[str, Submodule], path: str) -> Submodule:
    at = len(path)
    while True:
        at = path.rfind(".", 0, at)
        member = by_prefix.get(path[: at + 1])
        if member is not None:
            return member


def registered(found: list[Submodule]) -> dict[str, torch.Tensor]:
    """Parameters and persistent buffers, by name."""
    return {
        member.name + leaf: tensor
        for member in found
        for leaf, tensor in [*member.module._parameters.items(), *member.module._buffers.items()]
        if tensor is not None and leaf not in member.module._non_persistent_buffers_set
    }


def _stretches(found: list[Submodule]) -> dict[str, torch.Tensor]:
    """What FSDP1 has of its parameters on this rank, by name."""
    flat = {id(one.parameter): one.local for member in found for one in flat_stretches(member.module)}
    return {name: flat[id(one)] for name, one in _parameters(found) if id(one) in flat} if flat else {}


@contextlib.contextmanager
def _as_it_is_here(model: nn.Module) -> Iterator[None]:
    """Without FSDP1's hooks, which gather a state on all ranks, and expect a gathered one at a load."""
    kept: list[tuple[nn.Module, str, Any]] = []
    try:
        for module in model.modules():
            for kind in _STATE_HOOKS if isinstance(module, FullyShardedDataParallel) else ():
                hooks = getattr(module, kind)
                kept.append((module, kind, hooks))
                own = ((key, hook) for key, hook in hooks.items() if _is_own(hook))
                setattr(module, kind, type(hooks)(own))
        yield
    finally:
        for module, kind, hooks in kept:
            setattr(module, kind, hooks)


_STATE_HOOKS = (
    "_state_dict_pre_hooks",
    "_state_dict_hooks",
    "_load_state_dict_pre_hooks",
    "_load_state_dict_post_hooks",
)


def same_memory(a: Any, b: Any) -> bool:
    """Whether two tensors are the same elements of the same memory, so that writing one writes the other."""
    if isinstance(a, Wrapped) or isinstance(b, Wrapped):
        return (
            isinstance(a, Wrapped)
            and isinstance(b, Wrapped)
            and a.keys() == b.keys()
            and all(same_memory(a[key], b[key]) for key in a)
        )
    if isinstance(a, SplitTensor) or isinstance(b, SplitTensor):
        return (
            isinstance(a, SplitTensor)
            and isinstance(b, SplitTensor)
            and (a.size(), a.cuts) == (b.size(), b.cuts)
            and same_memory(a.local, b.local)
        )
    if isinstance(a, DTensor) or isinstance(b, DTensor):
        return (
            isinstance(a, DTensor)
            and isinstance(b, DTensor)
            and a.placements == b.placements
            and a.device_mesh == b.device_mesh
            and same_memory(a.to_local(), b.to_local())
        )
    if is_lazy(a) or is_lazy(b):
        return False
    return bool(
        a.data_ptr() == b.data_ptr()
        and a.shape == b.shape
        and a.stride() == b.stride()
        and a.dtype == b.dtype
        and a.device == b.device
        and a.is_conj() == b.is_conj()
        and a.is_neg() == b.is_neg()
    )


# --- what the script had built ----------------------------------------------------------------------------


@dataclass
class _Parameter:
    kind: tuple[object, ...] | None
    requires_grad: bool
    tied_to: str
    """The first name under which the same parameter is registered."""


@dataclass
class _Buffer:
    kind: tuple[object, ...] | None
    persistent: bool
    content: str
    """Its fingerprint, if it is not persistent."""


def _kind(tensor: torch.Tensor) -> tuple[object, ...] | None:
    """Shape and dtype; None for a lazy tensor, which has none yet."""
    return None if is_lazy(tensor) else (tuple(tensor.shape), tensor.dtype)


@dataclass
class Built:
    """A module as the script built it, before anything was loaded: what a resume will find."""

    parameters: dict[str, _Parameter] = field(default_factory=dict)
    buffers: dict[str, _Buffer] = field(default_factory=dict)
    training: dict[str, bool] = field(default_factory=dict)
    foreign: set[str] = field(default_factory=set)
    """Prefixes of the modules that load in a way of their own: they may take what does not look like them."""
    loaded: Mapping[str, Any] = field(default_factory=dict)
    """What the loaded checkpoint had recorded: recorded again, because a restart within the process may reuse
    a module that training has already changed."""


def look_at(model: nn.Module) -> Built:
    """Call it once nothing more will be added before a load."""
    built = Built()
    found = members(model)
    built.training = {member.name: member.module.training for member in found}
    built.foreign = {member.name for member in found if member.foreign}
    first: dict[int, str] = {}
    here = _stretches(found)
    for name, parameter in _parameters(found):
        tied_to = first.setdefault(id(parameter), name)
        kind = _kind(here.get(name, parameter))
        built.parameters[name] = _Parameter(kind, parameter.requires_grad, tied_to)
    loose = {name: buffer for name, buffer, persistent in _buffers(found) if not persistent}
    prints = _fingerprints(loose)
    for name, buffer, persistent in _buffers(found):
        built.buffers[name] = _Buffer(_kind(buffer), persistent, prints.get(name, ""))
    return built


def _parameters(found: list[Submodule]) -> Iterator[tuple[str, nn.Parameter]]:
    for member in found:
        for leaf, parameter in member.module._parameters.items():
            if parameter is not None:
                yield member.name + leaf, parameter


def _buffers(found: list[Submodule]) -> Iterator[tuple[str, torch.Tensor, bool]]:
    """(name, buffer, whether it is persistent)"""
    for member in found:
        for leaf, buffer in member.module._buffers.items():
            if buffer is not None:
                yield member.name + leaf, buffer, leaf not in member.module._non_persistent_buffers_set


def named_buffers(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """The buffers by the names that they have in a checkpoint."""
    for name, buffer, _ in _buffers(members(model)):
        yield name, buffer


def _fingerprints(tensors: Mapping[str, Any]) -> dict[str, str]:
    """Those of this rank's part of tensors, by name; leaves out what cannot be viewed as plain bytes."""
    kinds: dict[str, str] = {}
    plains: list[torch.Tensor] = []
    for name, value in _flat(tensors):
        local = value.local if isinstance(value, SplitTensor) else value
        local = local.to_local() if isinstance(local, DTensor) else local
        if is_lazy(local) or local.device.type == "meta" or local.layout is not torch.strided:
            continue
        try:
            plains.append(plain(local))
        except (RuntimeError, TypeError):  # a subclass, or a dtype, that cannot be viewed as bytes
            continue
        kinds[name] = f"{tuple(local.shape)} {local.dtype}"
    found = fingerprints.begin(plains).result()
    return {name: f"{kind} {one}" for (name, kind), one in zip(kinds.items(), found, strict=True)}


def _flat(tensors: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, torch.Tensor]]:
    for name, value in tensors.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{prefix}{name}.")
        else:
            yield prefix + name, value


def _changes(
    found: list[Submodule], built: Built, part: str
) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    """(what to record, the tensors to store with it) for changes that a state_dict does not show."""
    names, before = _Names(found), built.loaded
    known = {*before.get("buffers", []), *before.get("loose", [])}
    foreign = built.foreign | {member.name for member in found if member.foreign}
    loose = {name: buffer for name, buffer, persistent in _buffers(found) if not persistent}
    prints = _fingerprints(loose)
    changed: list[str] = []
    for name, buffer, persistent in _buffers(found):
        owner = names.owner(name).name
        if persistent and owner in foreign:
            continue  # its module's own state says what it is like
        if not persistent and (name not in prints or owner not in built.training):
            continue  # nothing to store, or made by a module that will itself be made anew
        now = _Buffer(_kind(buffer), persistent, prints.get(name, ""))
        if now != built.buffers.get(name) or name in known:
            changed.append(name)
    gone = [
        name
        for name in {*built.buffers, *before.get("gone", [])} - {name for name, _, _ in _buffers(found)}
        if names.owner(name).name + name.rpartition(".")[2] == name and names.owner(name).name not in foreign
    ]
    thawed = {
        name: parameter.requires_grad
        for name, parameter in _parameters(found)
        if name in before.get("requires_grad", {})
        or ((was := built.parameters.get(name)) and was.requires_grad != parameter.requires_grad)
    }
    training = {
        member.name: member.module.training
        for member in found
        if member.name in before.get("training", {})
        or built.training.get(member.name, member.module.training) != member.module.training
    }
    _refuse_misfits(found, built, part, foreign, changed)
    buffers = [name for name in changed if name not in loose]
    changes = {
        "buffers": buffers,
        "loose": [name for name in changed if name in loose],
        "gone": sorted(gone),
        "requires_grad": thawed,
        "training": training,
    }
    record = {what: values for what, values in changes.items() if values}
    return record, {LOOSE + name: loose[name] for name in changed if name in loose}


def _refuse_misfits(
    found: list[Submodule], built: Built, part: str, foreign: set[str], changed: list[str]
) -> None:
    """Name what a fresh module would not take, now rather than when a resume finds out."""
    names = _Names(found)
    problems: list[str] = []
    now = {name: parameter for name, parameter in _parameters(found) if names.owner(name).name not in foreign}
    here = _stretches(found)
    first: dict[int, str] = {}
    for name, parameter in _parameters(found):
        tied_to, now_kind = first.setdefault(id(parameter), name), _kind(here.get(name, parameter))
        was, kind = built.parameters.get(name), type(names.owner(name).module).__name__
        if name not in now:
            continue
        if was is None:
            problems.append(f"{part}.{name}, a parameter of {kind}, was added")
        elif was.kind is not None and was.kind != now_kind:
            problems.append(
                f"{part}.{name}, a parameter of {kind}, became {_told(now_kind)}; it was {_told(was.kind)}"
            )
        elif was.tied_to != tied_to:
            tied = f"is the same as {tied_to}"
            if tied_to == name:
                tied = f"is no longer the same as {was.tied_to}"
            problems.append(f"{part}.{name}, a parameter of {kind}, {tied}")
    present = {name for name, _ in _parameters(found)}
    problems += [
        f"{part}.{name}, a parameter, was removed"
        for name in built.parameters
        if name not in present and not name.startswith(tuple(foreign))
    ]
    problems += [
        f"{part}.{name}, a buffer, is in a module that was added"
        for name in changed
        if names.owner(name).name not in built.training
    ]
    prefixes = {member.name for member in found}
    problems += [
        f"{part}.{name}, a buffer, is in a module that was removed"
        for name, buffer in built.buffers.items()
        if buffer.persistent
        and name[: name.rfind(".") + 1] not in prefixes
        and not name.startswith(tuple(foreign))
    ]
    if problems:
        more = f", and {len(problems) - 4} more" if len(problems) > 4 else ""
        raise SaveFailedError(
            f"since the script built the model: {'; '.join(problems[:4])}{more}. A resume starts from the "
            "model as the script builds it before the first step, which would not take this checkpoint. Give "
            "it its final parameters before the first step (one that is not used yet may be frozen)"
        )


def _told(kind: tuple[object, ...] | None) -> str:
    return "shapeless (lazy)" if kind is None else f"{kind[1]} {kind[0]}"


# --- collecting -------------------------------------------------------------------------------------------


def collect(model: nn.Module, part: str, built: Built | None) -> tuple[dict[str, Any], dict[str, Any]]:
    """(tensors by name, everything else by name); the tensors alias live state where the state_dict's do."""
    with torch.no_grad(), _as_it_is_here(model):
        state = model.state_dict()
    found = members(model)  # after the state_dict, which may put shards in place
    names = _Names(found)
    given = {names.name(key): value for key, value in state.items()}
    tensors, others = split({**given, **_stretches(found)}, part)
    record: dict[str, Any] = {}
    if built is not None:
        record, loose = _changes(found, built, part)
        tensors |= split(loose, part)[0]
    if any(member.foreign for member in found) and (versions := getattr(state, "_metadata", None)):
        by_raw = {member.raw.removesuffix("."): member for member in found}
        record["versions"] = {
            by_raw[raw].name: values
            for raw, values in versions.items()
            if raw in by_raw and values != FIRST_VERSION
        }
    if record:
        others[RECORD] = record
    return tensors, others


# --- loading ----------------------------------------------------------------------------------------------


def materialise(model: nn.Module, part: str, metadata: Metadata) -> None:
    """Give lazy parameters and buffers the shape that they have in the checkpoint, as optimizers need it."""
    for member in members(model):
        for leaf, tensor in [*member.module._parameters.items(), *member.module._buffers.items()]:
            entry = metadata.state_dict_metadata.get(f"{part}.{member.name}{leaf}")
            if tensor is not None and is_lazy(tensor) and isinstance(entry, TensorStorageMetadata):
                lazy: Any = tensor
                with torch.no_grad():
                    lazy.materialize(entry.size)


def targets(model: nn.Module, part: str, saved: Mapping[str, Any], metadata: Metadata) -> dict[str, Any]:
    """What to read into: live memory where that is as good as load_state_dict, else separate memory.

    `saved` is what the checkpoint holds of the module besides tensors.
    """
    live, _ = collect(model, part, None)
    stored = {
        key[len(part) + 1 :]: entry
        for key, entry in metadata.state_dict_metadata.items()
        if key.startswith(f"{part}.") and isinstance(entry, TensorStorageMetadata)
    }
    record = saved.get(RECORD, {})
    changed = {*record.get("buffers", []), *(LOOSE + name for name in record.get("loose", []))}
    found = members(model)
    names, memory = _Names(found), {**registered(found), **_stretches(found)}
    wanted: dict[str, Any] = {}
    for name, value in live.items():
        if name not in changed and _is_in_place(name, value, memory, names):
            wanted[name] = value
        elif _is_stored(name, value, stored):
            wanted[name] = _fresh(name, value, stored)
        # Otherwise load_state_dict reports it as missing, or the module does without it.
    for name in record.get("gone", []):
        wanted.pop(name, None)
    device = next((p.device for p in model.parameters() if p.device.type != "meta"), torch.device("cpu"))
    inside = {inner for inner, _ in _flat(wanted)}
    for name, entry in stored.items():
        if name in inside:
            continue
        if name in changed:
            wanted[name] = torch.empty(entry.size, dtype=entry.properties.dtype, device=device)
        elif _is_extra(name, names.owner(name)) or names.owner(name).foreign:
            wanted[name] = torch.empty(entry.size, dtype=entry.properties.dtype)
    return wanted


def _is_in_place(name: str, value: Any, registered: Mapping[str, torch.Tensor], names: _Names) -> bool:
    memory = registered.get(name)
    if memory is None or names.owner(name).foreign:
        return False
    return same_memory(value, split({name: memory.detach()}, "")[0][name])


def _is_extra(name: str, owner: Submodule) -> bool:
    """Whether an entry is the extra state of a module that takes one."""
    return name == owner.name + EXTRA and _overrides(owner.module, "set_extra_state")


def _is_stored(name: str, value: Any, stored: Mapping[str, TensorStorageMetadata]) -> bool:
    return any(inner in stored for inner, _ in _flat({name: value}))


def _fresh(name: str, like: Any, stored: Mapping[str, TensorStorageMetadata]) -> Any:
    """Memory for an entry, shaped as it is in the checkpoint and placed as it is in the module."""
    if isinstance(like, Wrapped):
        inner = {key: _fresh(f"{name}.{key}", value, stored) for key, value in like.items()}
        whole: Any = like.whole
        local: Any = local_part(whole)
        _, context = local.__tensor_flatten__()
        again = type(local).__tensor_unflatten__(rewrapped(inner), context, local.size(), local.stride())
        if isinstance(whole, DTensor):
            again = DTensor.from_local(
                again,
                whole.device_mesh,
                whole.placements,
                run_check=False,
                shape=whole.size(),
                stride=whole.stride(),
            )
        return Wrapped(again, inner)
    entry = stored.get(name)
    if entry is None:
        return like
    if isinstance(like, SplitTensor):
        return SplitTensor(torch.empty_like(like.local), like.size(), like.cuts)
    if isinstance(like, DTensor):
        return torch.empty_like(like, dtype=entry.properties.dtype)
    device = torch.device("cpu") if is_lazy(like) else like.device
    return torch.empty(entry.size, dtype=entry.properties.dtype, device=device)


def apply(
    model: nn.Module,
    part: str,
    tensors: Mapping[str, Any],
    saved: Mapping[str, Any],
    built: Built | None,
) -> None:
    """Put what was loaded into the module. What was read in place is already there."""
    others = {name: value for name, value in saved.items() if name != RECORD}
    record = saved.get(RECORD, {})
    loose = {name.removeprefix(LOOSE): t for name, t in tensors.items() if name.startswith(LOOSE)}
    given = {name: value for name, value in tensors.items() if not name.startswith(LOOSE)}
    changed = {name: given[name] for name in record.get("buffers", []) if name in given}
    if built is not None:
        built.loaded = record
    _set_up(model, record, changed)
    for module in model.modules():
        forget_gathered(module)
    found = members(model)
    names, memory = _Names(found), {**registered(found), **_stretches(found)}
    in_place = all(_is_in_place(name, value, memory, names) for name, value in given.items())
    if others or not in_place or any(map(_takes_part, found)):
        _load(model, part, given, others, record.get("versions"))
    _set_buffers(members(model), loose, persistent=False)


def _set_up(model: nn.Module, record: Mapping[str, Any], buffers: Mapping[str, Any]) -> None:
    """Change the module as training had changed it, where load_state_dict could not."""
    found = members(model)
    names = _Names(found)
    _set_buffers(found, buffers, persistent=True)
    for name in record.get("gone", []):
        owner = names.owner(name)
        if owner.module._buffers.get(name[len(owner.name) :]) is not None:
            owner.module._buffers[name[len(owner.name) :]] = None
    parameters = dict(_parameters(found))
    for name, requires_grad in record.get("requires_grad", {}).items():
        if name in parameters:
            parameters[name].requires_grad_(requires_grad)
    for member in found:
        if member.name in (training := record.get("training", {})):
            member.module.training = training[member.name]


def _set_buffers(found: list[Submodule], buffers: Mapping[str, Any], *, persistent: bool) -> None:
    names = _Names(found)
    for name, value in rewrapped(buffers).items():
        owner = names.owner(name)
        leaf = name[len(owner.name) :]
        now = owner.module._buffers.get(leaf)
        if now is not None and not is_lazy(now) and _kind(now) == _kind(value) and now.device == value.device:
            now.detach().copy_(value)
            continue
        if "." in leaf or (leaf not in owner.module._buffers and hasattr(owner.module, leaf)):
            raise IncompleteStateError(
                f"{name}: the checkpoint has it as a buffer; the script's {type(owner.module).__name__} has "
                "no place for one. Build the model as it was when it was saved, or start with "
                "resume_from = 'fresh'"
            )
        owner.module.register_buffer(leaf, value, persistent=persistent)


def _load(
    model: nn.Module,
    part: str,
    tensors: Mapping[str, Any],
    others: Mapping[str, Any],
    versions: Mapping[str, Any] | None,
) -> None:
    """Put all of it through load_state_dict, then check that the module took it."""
    found = members(model)
    names = _Names(found)
    state: Any = OrderedDict((names.key(n), value) for n, value in {**rewrapped(tensors), **others}.items())
    with _as_it_is_here(model):
        today = getattr(model.state_dict(), "_metadata", {})
    upgraded: tuple[str, ...] = ()
    if versions is None:  # an older checkpoint: use what the module says today
        state._metadata = today
    else:
        state._metadata = {
            member.raw.removesuffix("."): copy.deepcopy(versions.get(member.name, FIRST_VERSION))
            for member in found
        }
        upgraded = tuple(
            member.name
            for member in found
            if (raw := member.raw.removesuffix(".")) in today and today[raw] != state._metadata[raw]
        )
    read = _fingerprints(tensors)
    what = type(model).__name__
    try:
        with _as_it_is_here(model):
            model.load_state_dict(state)
    except torch.OutOfMemoryError:
        raise
    except Exception as error:
        raise IncompleteStateError(
            f"track({part}=…): {what}.load_state_dict does not take what was saved: {type(error).__name__}: "
            f"{' '.join(str(error).split()).rstrip(' .')}. Make the script build the model as it was when it "
            "was saved, or start with resume_from = 'fresh'"
        ) from error
    now, others_now = collect(model, part, None)
    found_now = _fingerprints(now)
    for name, fingerprint in read.items():
        # A class whose version has changed since may turn what an older one saved into something else.
        if found_now.get(name) != fingerprint and not name.startswith(upgraded):
            raise _not_taken(part, name, names.owner(name).module)
    name = _certain_difference(model, part, others, others_now)
    if name:
        raise _not_taken(part, name, names.owner(name).module)


def _certain_difference(model: nn.Module, part: str, given: Mapping[str, Any], now: Mapping[str, Any]) -> str:
    """The first entry that is not what was given; an entry that differs at every look is no evidence."""
    from holdfast.checkpoint.state.proof import first_difference  # proof builds on this module

    for name, value in given.items():
        if name not in now:
            return name
        if first_difference(value, now[name], name, by_value=True):
            again = collect(model, part, None)[1]
            if not first_difference(now[name], again.get(name), name, by_value=True):
                return name
    return ""


def _not_taken(part: str, name: str, owner: nn.Module) -> IncompleteStateError:
    kind = type(owner).__name__
    how = "set_extra_state" if name.rpartition(".")[2] == EXTRA else "load_state_dict (or a hook of it)"
    return IncompleteStateError(
        f"{part}.{name}: {kind} did not take it: after the load its state_dict gives something else. A run "
        f"that goes on from there would silently be a different one. Make {kind}'s {how} put back exactly "
        "what its state_dict gives, or keep the value in a registered buffer"
    )
