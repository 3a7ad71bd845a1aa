"""Saves of very many tensors: what is as at the last save, or as usual, is not checked one tensor at a time.

Guarantee: what is returned here is what `collect` in module.py and optimizer.py would find one by one.
Any sign that it might not be sends the save that way.
"""

from __future__ import annotations

import itertools
import operator
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.optim import Optimizer

from holdfast.checkpoint.state.module import PLAIN_LOADS, RECORD, Built, collect, members, same_memory

_METHODS = operator.attrgetter(
    "state_dict.__func__",
    "load_state_dict.__func__",
    "_save_to_state_dict.__func__",
    "_load_from_state_dict.__func__",
    "get_extra_state.__func__",
    "set_extra_state.__func__",
)
_KEPT = operator.attrgetter("_parameters", "_buffers", "_non_persistent_buffers_set")
_HOOKS = operator.attrgetter("_state_dict_hooks", "_state_dict_pre_hooks", "_load_state_dict_pre_hooks")
_KIND = operator.attrgetter("shape", "dtype", "requires_grad")
_AS_TORCH_HAS_IT = frozenset(
    (
        nn.Module.state_dict,
        nn.Module.load_state_dict,
        nn.Module._save_to_state_dict,
        load,
        nn.Module.get_extra_state,
        nn.Module.set_extra_state,
    )
    for load in PLAIN_LOADS
)
_training = operator.attrgetter("training")


class _Seen(NamedTuple):
    form: tuple[list[Any], ...]
    """All that `collect` depends on, except the contents."""
    modules: list[nn.Module]
    parameters: list[nn.Parameter]
    buffers: list[torch.Tensor]


def _see(model: nn.Module) -> _Seen | None:
    """None if anything in the model is not as torch has it. Hardly any Python runs for each module."""
    try:
        modules, level = [model], [model]
        tree: list[Any] = []
        while level:
            below = [module._modules for module in level]
            tree += map(len, below)
            tree += itertools.chain.from_iterable(below)
            level = [child for children in below for child in children.values() if child is not None]
            tree += [len(level)]
            modules += level
        if not set(map(_METHODS, modules)) <= _AS_TORCH_HAS_IT or any(map(any, map(_HOOKS, modules))):
            return None
        parameters, buffers, loose = zip(*map(_KEPT, modules), strict=True)
        values = list(itertools.chain.from_iterable(map(dict.values, parameters)))
        others = list(itertools.chain.from_iterable(map(dict.values, buffers)))
        if any(loose) or set(map(type, values)) != {nn.Parameter} or set(map(type, others)) - {torch.Tensor}:
            return None
        form = (
            tree,
            list(map(id, modules)),
            list(map(type, modules)),
            list(map(len, parameters)),
            list(itertools.chain.from_iterable(parameters)),
            list(map(len, buffers)),
            list(itertools.chain.from_iterable(buffers)),
            list(map(id, values)),
            list(map(_KIND, values)),
            list(map(_KIND, others)),
            list(map(_training, modules)),
        )
    except (AttributeError, TypeError):  # a method that is not its class's; what should be a dict is not
        return None
    return _Seen(form, modules, values, others)


class Known:
    """What the last save of a model found out, for as long as nothing but its contents changes.

    With thousands of modules, most of a save's time goes into asking each of them again. What is compared
    keeps no module and no tensor alive: a different object at the same place in memory, of the same kind and
    name, gives the same result.
    """

    def __init__(self) -> None:
        self.serial = 0
        """Goes up whenever something is not as before."""
        self.parameters: dict[str, nn.Parameter] | None = None
        """By name; put here by the code that needs them."""
        self.parameter_ids: frozenset[int] = frozenset()
        self._form: tuple[list[Any], ...] | None = None
        self._about: tuple[Built, Mapping[str, Any]] | None = None
        self._names: list[str] = []
        self._pick: Callable[[list[torch.Tensor]], tuple[torch.Tensor, ...]] = tuple
        self._record: dict[str, Any] = {}

    def collect(self, model: nn.Module, part: str, built: Built) -> tuple[dict[str, Any], dict[str, Any]]:
        """Gives what the function `collect` gives."""
        seen = _see(model)
        if seen is not None and seen.form == self._form and self._is_about(built):
            with torch.no_grad():
                tensors = list(map(torch.Tensor.detach, self._pick([*seen.parameters, *seen.buffers])))
            return dict(zip(self._names, tensors, strict=True)), dict(self._record)
        self.serial += 1
        self._form = self.parameters = None
        tensors_now, others = collect(model, part, built)
        if seen is not None:
            self._keep(model, seen, tensors_now, others, built)
        return tensors_now, others

    @property
    def holds(self) -> bool:
        """Whether anything is known by which the next save could turn out to be like the last."""
        return self._form is not None

    def _is_about(self, built: Built) -> bool:
        return self._about is not None and self._about[0] is built and self._about[1] is built.loaded

    def _keep(
        self,
        model: nn.Module,
        seen: _Seen,
        tensors: dict[str, Any],
        others: dict[str, Any],
        built: Built,
    ) -> None:
        """Keep this, provided that each tensor is a registered one and there is nothing else."""
        live = [*seen.parameters, *seen.buffers]
        first: dict[int, tuple[int, int]] = {}
        """Where in `live` a module's parameters begin, and where its buffers."""
        parameters, buffers = 0, len(seen.parameters)
        for module in seen.modules:
            first.setdefault(id(module), (parameters, buffers))
            parameters, buffers = parameters + len(module._parameters), buffers + len(module._buffers)
        positions: dict[str, int] = {}
        for member in members(model):
            own, kept = first[id(member.module)]
            for at, leaf in enumerate(member.module._parameters):
                positions[member.name + leaf] = own + at
            for at, leaf in enumerate(member.module._buffers):
                positions[member.name + leaf] = kept + at
        if positions.keys() != tensors.keys() or len(live) < 2 or not others.keys() <= {RECORD}:
            return
        if all(same_memory(tensors[name], live[at].detach()) for name, at in positions.items()):
            self._names = list(tensors)
            self._pick = operator.itemgetter(*(positions[name] for name in self._names))
            self.parameter_ids = frozenset(map(id, seen.parameters))
            self._record, self._form, self._about = others, seen.form, (built, built.loaded)


_layout, _is_quantized, _device, _shape, _requires_grad = map(
    operator.attrgetter, ("layout", "is_quantized", "device", "shape", "requires_grad")
)


def usual_entries(
    optimizer: Optimizer, order: list[torch.Tensor], given: Mapping[str, Any]
) -> tuple[list[torch.Tensor], list[dict[str, Any]]] | None:
    """The parameters that have an entry, and the entries, if a load needs no special facts about any of them.

    That holds for torch's own optimizers on plain parameters, and is found without asking any tensor by
    itself: with tens of thousands of them that takes most of a save. None if anything may not be as usual.
    """
    keys, entries = list(given["state"]), list(given["state"].values())
    if not entries or given.keys() != {"state", "param_groups"} or set(map(type, keys)) != {int}:
        return None
    if min(keys) < 0 or max(keys) >= len(order) or set(map(type, entries)) != {dict}:
        return None
    parameters = [order[key] for key in keys]
    if list(map(id, optimizer.state)) != list(map(id, parameters)):
        return None
    if list(map(id, optimizer.state.values())) != list(map(id, entries)):  # its state_dict made them
        return None
    forms = set(map(tuple, entries))
    form = forms.pop()
    if forms or not form or set(map(type, form)) != {str} or set(map(type, order)) != {nn.Parameter}:
        return None
    where = set(map(_device, parameters))
    on_device = {bool(g.get("capturable") or g.get("fused")) for g in optimizer.param_groups}
    if len(where) > 1 or len(on_device) > 1:
        return None
    (device,) = where
    shapes, strides = list(map(_shape, parameters)), list(map(torch.Tensor.stride, parameters))
    memory = list(map(torch.Tensor.data_ptr, order))
    for key in form:
        column = [entry[key] for entry in entries]
        if set(map(type, column)) != {torch.Tensor} or set(map(_layout, column)) != {torch.strided}:
            return None
        if any(map(_is_quantized, column)) or any(map(_requires_grad, column)):
            return None
        sizes = list(map(_shape, column))
        step = key == "step" and not any(sizes)
        if not step and (sizes != shapes or list(map(torch.Tensor.stride, column)) != strides):
            return None
        usual = device if not step or on_device == {True} else torch.device("cpu")
        if set(map(_device, column)) != {usual}:
            return None
        memory += map(torch.Tensor.data_ptr, column)
    if len(set(memory)) < len(memory):  # some share memory, or have none
        return None
    return parameters, entries
