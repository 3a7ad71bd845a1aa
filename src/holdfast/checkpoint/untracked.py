"""What a script trains with and tracks nowhere.

An object counts as tracked, too, if one that is tracked holds it, in its attributes or in containers among
these: a wrapper around an optimizer, a trainer with a `state_dict` of its own. What a schedule or a model
holds does not count: neither saves its optimizer.
"""

from __future__ import annotations

import functools
import gc
import types
from collections import deque
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import DataLoader

FAR = 4
"""How many objects deep it is looked into things."""
MOST = 5_000
"""Objects that are looked at in all, the nearest first."""
_PLAIN = (
    str, bytes, int, float, complex, bool, type(None), type, types.ModuleType, torch.Tensor, torch.device,
    torch.dtype,
)  # fmt: skip


def held_by(things: Iterable[object]) -> dict[int, object]:
    """These objects and what they hold, by id."""
    found: dict[int, object] = {}
    to_look_at = deque((thing, 0) for thing in things)
    while to_look_at and len(found) < MOST:
        thing, depth = to_look_at.popleft()
        if isinstance(thing, _PLAIN) or id(thing) in found:
            continue
        found[id(thing)] = thing
        if depth < FAR:
            to_look_at.extend((part, depth + 1) for part in _parts(thing))
    return found


def _parts(thing: Any) -> Iterable[object]:
    if isinstance(thing, list | tuple | set | frozenset | deque):
        return list(thing)
    if isinstance(thing, dict):
        return list(thing.values())
    if isinstance(thing, types.MethodType):
        return [thing.__self__]
    if isinstance(thing, functools.partial):
        return [thing.func, *thing.args, *thing.keywords.values()]
    if isinstance(thing, types.FunctionType):
        return _closure(thing)
    if isinstance(thing, DataLoader | nn.Module) or type(thing).__module__.partition(".")[0] == "holdfast":
        return []
    held = dict(getattr(thing, "__dict__", {}))
    if isinstance(thing, torch.optim.Optimizer):  # its state and groups hold much, and nothing of interest
        return [value for name, value in held.items() if name not in ("state", "param_groups")]
    if isinstance(thing, LRScheduler):
        inner = [part for one in held.values() for part in (one if isinstance(one, list | tuple) else [one])]
        return [one for one in inner if isinstance(one, LRScheduler)]
    return list(held.values())


def _closure(function: types.FunctionType) -> list[object]:
    found = []
    for cell in function.__closure__ or ():
        try:
            found.append(cell.cell_contents)
        except ValueError:  # it is empty yet
            continue
    return found


def parameters_of(optimizers: Iterable[torch.optim.Optimizer]) -> set[int]:
    """Their parameters, by id."""
    return {
        id(parameter)
        for optimizer in optimizers
        for group in optimizer.param_groups
        for parameter in group["params"]
    }


def untracked_schedules(
    tracked: Iterable[object], without: Iterable[object], among: Iterable[object]
) -> list[LRScheduler]:
    """Of these objects the schedules of optimizers that are tracked, or held so, but are not so themselves.

    What is `without` is left out, and so are schedules of its optimizers.
    """
    known, left_out = held_by(tracked), held_by(without)
    attached = {
        number
        for number, one in known.items()
        if isinstance(one, torch.optim.Optimizer) and number not in left_out
    }
    strangers = [
        one
        for one in among
        if isinstance(one, LRScheduler)
        and id(one) not in known
        and id(one) not in left_out
        and id(getattr(one, "optimizer", None)) in attached
    ]
    within = {number for one in strangers for number in held_by([one]) if number != id(one)}
    return [one for one in strangers if id(one) not in within]


def has_schedule(optimizer: object) -> bool:
    """Whether a schedule was ever made for it: torch marks its `step` then."""
    return hasattr(getattr(optimizer, "step", None), "_wrapped_by_lr_sched")


def alive(*kinds: type) -> list[Any]:
    """All objects of these kinds. Goes through all of Python's objects, which takes a tenth of a second."""
    objects = gc.get_objects()
    wanted = {kind for kind in set(map(type, objects)) if issubclass(kind, kinds)}
    return [one for one in objects if type(one) in wanted] if wanted else []
