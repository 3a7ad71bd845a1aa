"""Putting loaded state into an optimizer, by its own `load_state_dict`.

Guarantee: afterwards everything in `optimizer.state` is bitwise what was saved, with the type, the kind of
device and the layout that it had; or the load is refused by name. torch's `load_state_dict` casts state to
its parameter's type, moves it to its parameter's device and makes every container anew; an optimizer's own
`load_state_dict`, or a hook on it, may do anything, such as a step. So the result is compared with what was
read, and put right. Gradients stay as they are.
"""

from __future__ import annotations

import logging
from collections import OrderedDict, deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from holdfast.base import local_part
from holdfast.checkpoint.format import describe
from holdfast.checkpoint.format import fingerprint as fingerprints
from holdfast.checkpoint.state.adapters import Wrapped, flatten, unwrapped
from holdfast.checkpoint.state.optimizer import (
    Form,
    Path,
    group_names,
    homes_of,
    is_named_tuple,
    live_tensors,
    match_groups,
    parameter_names,
    uncollected,
    unwrap,
)
from holdfast.errors import IncompleteStateError

log = logging.getLogger("holdfast.checkpoint")

PLAIN = (bool, int, float, complex, str, bytes, type(None))


@uncollected()
def apply(
    part: str,
    optimizer: Optimizer,
    model: nn.Module,
    tensors: Mapping[str, Any],
    others: Mapping[str, Any],
) -> None:
    """Give an optimizer the state that was read, by its own `load_state_dict`, and check that it has it."""
    if "packed" in others:
        load_packed(part, optimizer, others["packed"])
        return
    names = parameter_names(model)
    name_of = {id(parameter): name for name, parameter in names.items()}
    saved = others["param_groups"]
    matched = match_groups(part, group_names(optimizer, name_of), [g["params"] for g in saved], names)
    for at in matched[len(optimizer.param_groups) :]:
        _add_group(part, optimizer, names, saved[at])
    loading = _Loading(part, optimizer)
    tree = loading.apart(tensors, live_tensors(optimizer, homes_of(optimizer, names, saved)))
    state = tree["state"]
    entries: dict[str, Any] = {}
    nested, whole = others.get("nested", {}), others.get("whole", {})
    keys = {name: keys for keys, having in others.get("keys", {}).items() for name in having}
    for name, plain in others["state"].items():
        node, forms, device = state.get(name, {}), nested.get(name, {}), names[name].device
        having = keys.get(name, ()) if "keys" in others else node
        entries[name] = {key: unwrap(node[key]) for key in having if key not in forms}
        entries[name] |= {key: _whole(form, node.get(key)) for key, form in forms.items()}
        entries[name] |= {key: _moved(value, device) for key, value in plain.items()}
    for name, form in whole.items():
        entries[name] = _whole(form, state.get(name))
    order = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    number = {id(parameter): at for at, parameter in enumerate(order)}
    groups = [
        {**saved[match], "params": [number[id(parameter)] for parameter in group["params"]]}
        for match, group in zip(matched, optimizer.param_groups, strict=True)
    ]
    packed: dict[str, Any] = {
        "state": {number[id(names[name])]: entry for name, entry in entries.items()},
        "param_groups": groups,
    }
    for key, form in others.get("named", ()):
        packed["state"][key] = _whole(form, tree.get("named", {}).get(str(key)))
    for key, form in others.get("extra", {}).items():
        packed[key] = _whole(form, tree.get("extra", {}).get(key))
    made = {(number[id(names[name])], key) for name, key in others.get("made", ()) if name in names}
    loading.load(packed, made, {number[id(names[name])]: name for name in entries})


def load_packed(part: str, optimizer: Optimizer, packed: Any) -> None:
    """Give an optimizer what its `state_dict` gave, as it came back from a blob, and check that it has it."""
    if not isinstance(packed, dict) or not {"state", "param_groups"} <= packed.keys():
        optimizer.load_state_dict(packed)
        return
    numbers = [number for group in packed["param_groups"] for number in group["params"]]
    order = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    state = dict(packed["state"])
    if len(numbers) == len(order):
        groups = [group for group in packed["param_groups"] for _ in group["params"]]
        for number, parameter, group in zip(numbers, order, groups, strict=True):
            for tensor in _tensors_in(state.get(number)):
                mesh = parameter.device_mesh if isinstance(parameter, DTensor) else None
                if isinstance(tensor, DTensor) and tensor.device_mesh != mesh:
                    raise IncompleteStateError(
                        f"{part}: state of parameter {number} was distributed over {tensor.device_mesh}, and "
                        f"the parameter is on {mesh or 'no mesh'} now. Resume with as many ranks as saved. "
                        "(The state of an optimizer whose parameters are all of one tracked model reshards)"
                    )
            if isinstance(entry := state.get(number), dict):
                on_host = not (group.get("capturable") or group.get("fused"))
                state[number] = {
                    key: value if key == "step" and on_host else _moved(value, parameter.device)
                    for key, value in entry.items()
                }
    loading = _Loading(part, optimizer)
    loading.load({**packed, "state": state}, set(), {number: f"parameter {number}" for number in numbers})


def _add_group(
    part: str, optimizer: Optimizer, names: Mapping[str, nn.Parameter], saved: Mapping[str, Any]
) -> None:
    log.warning(
        "holdfast: %s: a parameter group of %d parameters (first %s) was added while the run trained; it is "
        "added again",
        part,
        len(saved["params"]),
        saved["params"][0],
    )
    parameters: Any = [names[name] for name in saved["params"]]
    if "param_names" in saved:
        parameters = list(zip(saved["param_names"], parameters, strict=True))
    group = {key: value for key, value in saved.items() if key != "param_names"}
    optimizer.add_param_group({**group, "params": parameters})


def _whole(form: Form, node: Any) -> Any:
    """The container that a form describes, around the tensors that were read."""
    kind = form[0]
    if kind == "tensor":
        return unwrap(node)
    if kind == "value":
        return form[1]
    members = node if isinstance(node, Mapping) else {}
    if kind in ("dict", "ordered"):
        made = {key: _whole(one, members.get(str(key))) for key, one in form[1]}
        return OrderedDict(made) if kind == "ordered" else made
    values = [_whole(one, members.get(str(at))) for at, one in enumerate(form[1])]
    if kind == "deque":
        return deque(values, form[2])
    if kind == "named":
        return form[2](*values)
    return tuple(values) if kind == "tuple" else values


def _moved(value: Any, device: torch.device) -> Any:
    """Tensors out of a blob are on the host; they belong on their parameter's device."""
    if isinstance(value, torch.Tensor):
        return value.to(device)
    if type(value) in (dict, OrderedDict):
        return type(value)((key, _moved(one, device)) for key, one in value.items())
    if type(value) in (list, tuple):
        return type(value)(_moved(one, device) for one in value)
    return value


class _Loading:
    """One call of an optimizer's `load_state_dict`, and the checks around it."""

    def __init__(self, part: str, optimizer: Optimizer) -> None:
        self._part = part
        self._optimizer = optimizer
        self._is_custom = (
            type(optimizer).load_state_dict is not Optimizer.load_state_dict
            or "load_state_dict" in vars(optimizer)
            or bool(getattr(optimizer, "_optimizer_load_state_dict_pre_hooks", None))
            or bool(getattr(optimizer, "_optimizer_load_state_dict_post_hooks", None))
        )
        """Whether more than torch's own code runs, which may well step the optimizer."""

    def apart(self, tensors: Mapping[str, Any], live: Mapping[Path, torch.Tensor]) -> dict[str, Any]:
        """The tensors; as copies where custom code might change them because they are the optimizer's own."""
        own = {id(tensor) for tensor in live.values()} if self._is_custom else set()

        def copied(node: Any) -> Any:
            if isinstance(node, Wrapped):
                return Wrapped(node.whole.clone(), {}) if id(node.whole) in own else node
            if isinstance(node, Mapping):
                return {key: copied(one) for key, one in node.items()}
            return node.detach().clone() if id(node) in own else node

        found = {key: copied(node) for key, node in tensors.items()}
        return {"state": {}, **found}

    def load(
        self, packed: dict[str, Any], made: set[tuple[int, str | None]], names: Mapping[Any, str]
    ) -> None:
        optimizer = self._optimizer
        order = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        entries = {number: entry for number, entry in packed["state"].items() if number in names}
        devices = [
            {key: value.device for key, value in group.items() if isinstance(value, torch.Tensor)}
            for group in optimizer.param_groups
        ]
        handed = packed
        if not self._is_custom:
            state = {
                number: _castable(entry) if number in names else entry
                for number, entry in packed["state"].items()
            }
            groups = [{**group, "params": _searchable(group["params"])} for group in packed["param_groups"]]
            handed = {**packed, "state": state, "param_groups": groups}
        gradients = [parameter.grad for parameter in order]
        watched = [*order, *_tensors_in(entries)] if self._is_custom else []
        before = _prints(watched)
        try:
            optimizer.load_state_dict(handed)
        except Exception as error:
            raise IncompleteStateError(
                f"{self._part}: {type(optimizer).__name__}.load_state_dict does not take back what its "
                f"state_dict gave: {describe(error)}"
            ) from error
        if self._is_custom:
            for parameter, gradient in zip(order, gradients, strict=True):
                parameter.grad = gradient
            if _prints(watched) != before:
                raise IncompleteStateError(
                    f"{self._part}: {type(optimizer).__name__}.load_state_dict, or a hook of it, changes the "
                    "parameters or the state that it is given, so that a resume would not be exact. Let it "
                    "do nothing but take the state over"
                )
        self._put_right(entries, made)
        for group, device_of in zip(optimizer.param_groups, devices, strict=True):
            for key, device in device_of.items():
                if isinstance(value := group.get(key), torch.Tensor):
                    group[key] = value.to(device)

    def _put_right(self, entries: Mapping[int, Any], made: set[tuple[int, str | None]]) -> None:
        """Put in whatever is not there as it was read: torch cast it, or the optimizer's own code lost it."""
        optimizer = self._optimizer
        order = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        for number, parameter in enumerate(order):
            if number not in entries:
                if self._is_custom and not made:
                    optimizer.state.pop(parameter, None)  # the load made it, by a step that never took place
                continue
            entry, found = entries[number], optimizer.state.get(parameter)
            if (number, None) in made:
                continue
            if isinstance(entry, dict) and found is None and all((number, key) in made for key in entry):
                continue  # it belongs to another optimizer, whose state this one's state_dict reports too
            if not isinstance(entry, dict) or not isinstance(found, dict):
                if not _is_same(entry, found):
                    optimizer.state[parameter] = entry
                continue
            for key, value in entry.items():
                if (number, key) not in made and not (key in found and _is_same(value, found[key])):
                    found[key] = value


def _searchable(numbers: Sequence[int]) -> Sequence[int]:
    """The same numbers, quick to search: torch looks them up for every tensor, which is slow in a list."""
    count = range(numbers[0], numbers[0] + len(numbers)) if numbers and type(numbers[0]) is int else numbers
    return count if list(count) == list(numbers) else numbers


def _castable(value: Any) -> Any:
    """As torch's load_state_dict can take it: it rebuilds every iterable, even those it cannot rebuild."""
    if isinstance(value, torch.Tensor):
        return value
    if isinstance(value, dict):
        return {key: _castable(one) for key, one in value.items()}
    if type(value) in (list, tuple, deque):
        return type(value)(_castable(one) for one in value)
    return None if isinstance(value, Iterable) else value


def _is_same(value: Any, found: Any) -> bool:
    """Whether what is in the optimizer is what was read. If in doubt, no."""
    if value is found:
        return True
    if isinstance(value, torch.Tensor):
        alike = (
            type(value) is type(found)
            and value.size() == found.size()
            and value.dtype == found.dtype
            and value.device == found.device
            and value.layout == found.layout
        )
        return alike and value.layout is torch.strided and _prints([value]) == _prints([found])
    if isinstance(value, PLAIN):
        if isinstance(found, torch.Tensor):  # older states have a number where torch wants a tensor
            return isinstance(value, int | float) and found.numel() == 1 and found.item() == value
        return type(value) is type(found) and (value == found or (value != value and found != found))
    if type(value) is not type(found):
        return False
    if type(value) in (dict, OrderedDict):
        return list(value) == list(found) and all(_is_same(one, found[key]) for key, one in value.items())
    if type(value) is deque and value.maxlen != found.maxlen:
        return False
    if type(value) in (list, tuple, deque) or is_named_tuple(value):
        return len(value) == len(found) and all(map(_is_same, value, found))
    return False


def _tensors_in(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        if value.layout is torch.strided:
            yield value
    elif isinstance(value, Mapping):
        for one in value.values():
            yield from _tensors_in(one)
    elif type(value) in (list, tuple, deque) or is_named_tuple(value):
        for one in value:
            yield from _tensors_in(one)


def _prints(tensors: Iterable[torch.Tensor]) -> list[str]:
    """Fingerprints of what this rank holds of some tensors."""
    flat: list[torch.Tensor] = []
    for tensor in tensors:
        for one in flatten({"": unwrapped(local_part(tensor))}).values():
            bits = one.detach().as_subclass(torch.Tensor).resolve_conj().resolve_neg().contiguous()
            flat.append(bits.reshape(-1).view(torch.uint8))
    return fingerprints.begin(flat).result()
