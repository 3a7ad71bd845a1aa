"""What is trained but nothing brings back: parameters that no state holds, objects that nobody tracks.

Such a parameter is trained by a tracked optimizer but held by no tracked model or other tracked object (a
weight of the loss), or its model's `state_dict` leaves it out. The fork that proves a save (proof.py) finds
them: candidates are spoiled before the load, and whatever does not regain its value in the load is held by
nothing. So it does not matter in which form, or by which object, something is held.
"""

from __future__ import annotations

import functools
import gc
import types
from collections import deque
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import DataLoader

from holdfast.base import is_traceable_wrapper_subclass, local_part
from holdfast.checkpoint.state.adapters import (
    GeneratorState,
    ScheduleState,
    TrackerState,
    flatten,
    unwrapped,
)
from holdfast.checkpoint.state.tracked import Tracked

SAMPLE = 64 << 10
"""Bytes of a tensor that are spoiled and compared: the fork pays for every page that it writes to."""
TOLD = 4


def strangers(tracked: Tracked) -> list[tuple[str, torch.Tensor]]:
    """Parameters that a tracked optimizer trains and no tracked model has, with a description of each.

    Relies on what was just collected, because it is called at every save.
    """
    loose = tracked.loose_optimizers()
    if not loose:
        return []
    known = {id(parameter) for _, model in tracked.models() for parameter in model.parameters()}
    return [
        (
            f"track({name}=…): parameter {place} of group {number}, of shape {tuple(parameter.shape)},",
            parameter,
        )
        for name, optimizer in loose
        for number, group in enumerate(optimizer.param_groups)
        for place, parameter in enumerate(group["params"])
        if parameter.requires_grad and id(parameter) not in known and not is_lazy(parameter)
    ]


def in_question(tracked: Tracked) -> frozenset[int]:
    """What a proof is about besides the tracked objects; another proof is due when there is more of it."""
    return frozenset(id(one) for _, one in strangers(tracked))


class Unheld:
    """The search for them, in the fork, around a load."""

    def __init__(
        self,
        tracked: Tracked,
        stored: Mapping[str, torch.Tensor],
        versions: Mapping[int, int],
        *,
        all_by_value: bool,
    ) -> None:
        """`versions`: those of the parameters when the run began. `all_by_value`: every stored tensor is
        loaded with its values; otherwise only what is in the blob is."""
        self._tracked = tracked
        self._errors: list[str] = []
        self._parameters: list[tuple[str, torch.Tensor, torch.Tensor]] = []
        """A description, a sample of the parameter, and a copy of the sample."""
        seen = {_place(tensor) for tensor in stored.values()}
        found = strangers(tracked)
        if all_by_value:
            found += _left_out(tracked, versions)
        for words, parameter in found:
            places = {_place(inner) for inner in flatten({"": unwrapped(parameter)}).values()}
            if places <= seen:
                continue
            seen |= places
            self._take(words, parameter)

    def _take(self, words: str, parameter: torch.Tensor) -> None:
        sample = _sample(parameter)
        if sample is not None:
            self._parameters.append((words, sample, sample.clone()))
        elif not _may_hold_anything(self._tracked):
            self._errors.append(_unheld(words))

    def spoil(self) -> None:
        for _, sample, _ in self._parameters:
            torch.bitwise_not(sample, out=sample)

    def errors(self) -> list[str]:
        """Parameters that no load has brought back."""
        errors = list(self._errors)
        errors += [
            _unheld(words) for words, sample, before in self._parameters if not torch.equal(sample, before)
        ]
        return errors[:TOLD]


def _unheld(words: str) -> str:
    return (
        f"{words} is trained, and nothing that is tracked brings its value back, so a resume would begin it "
        "anew. Track the object that has it, with a state_dict and a load_state_dict that include it, such "
        "as run.track(loss=criterion)"
    )


def versions_of(tracked: Tracked) -> dict[int, int]:
    """Versions of the parameters of tracked optimizers, by id: a changed parameter has another version."""
    return {
        id(parameter): parameter._version
        for optimizer in tracked.optimizers()
        for group in optimizer.param_groups
        for parameter in group["params"]
        if not is_lazy(parameter) and not parameter.is_inference()
    }


def _left_out(tracked: Tracked, versions: Mapping[int, int]) -> list[tuple[str, torch.Tensor]]:
    """Parameters of tracked models that were trained, with a description of each.

    A parameter that never changed is as the script made it, and will be so again: it need not be stored.
    """
    now = versions_of(tracked)
    return [
        (
            f"track({name}=…): {key}, of shape {tuple(parameter.shape)}, which its state_dict leaves out,",
            parameter,
        )
        for name, model in tracked.models()
        for key, parameter in model.named_parameters()
        if parameter.requires_grad
        and not is_lazy(parameter)
        and now.get(id(parameter)) != versions.get(id(parameter))
    ]


def _place(tensor: torch.Tensor) -> int:
    memory = local_part(tensor)
    return memory.untyped_storage().data_ptr() if memory.layout is torch.strided else id(tensor)


def _sample(parameter: torch.Tensor) -> torch.Tensor | None:
    """A view of some of its bytes; None where this process cannot write to them."""
    memory: Any = local_part(parameter)
    plain = type(memory) is torch.Tensor or isinstance(parameter, DTensor | nn.Parameter)
    if (
        not plain
        or is_traceable_wrapper_subclass(memory)
        or not memory.is_cpu
        or memory.layout is not torch.strided
        or not memory.is_contiguous()
    ):
        return None
    sample: torch.Tensor = memory.reshape(-1).view(torch.uint8)[:SAMPLE]
    return sample


def _may_hold_anything(tracked: Tracked) -> bool:
    """Whether an object of the script's own is tracked, which may hold what nothing else does."""
    known = (
        nn.Module,
        Optimizer,
        LRScheduler,
        ScheduleState,
        GeneratorState,
        TrackerState,
        torch.amp.GradScaler,
    )
    return any(not isinstance(thing, known) for _, thing in tracked.items())


# What a script trains with and tracks nowhere.
#
# An object also counts as tracked if a tracked one holds it, in its attributes or in containers among these:
# a wrapper around an optimizer, a trainer with a `state_dict` of its own. What a schedule or a model holds
# does not count: neither saves its optimizer.


FAR = 4
"""How many objects deep the search goes."""
MOST = 5_000
"""How many objects are looked at in all, the nearest first."""
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
    if isinstance(thing, torch.optim.Optimizer):  # its state and groups hold much, but nothing of interest
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
        except ValueError:  # it is still empty
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
    """The schedules `among` these that nothing tracked holds although it holds their optimizer.

    What is in `without` is left out, and so are schedules of its optimizers.
    """
    known, left_out = held_by(tracked), held_by(without)
    attached = {
        number
        for number, thing in known.items()
        if isinstance(thing, torch.optim.Optimizer) and number not in left_out
    }
    strangers = [
        thing
        for thing in among
        if isinstance(thing, LRScheduler)
        and id(thing) not in known
        and id(thing) not in left_out
        and id(getattr(thing, "optimizer", None)) in attached
    ]
    within = {number for outer in strangers for number in held_by([outer]) if number != id(outer)}
    return [schedule for schedule in strangers if id(schedule) not in within]


def has_schedule(optimizer: object) -> bool:
    """Whether a schedule was ever made for it: torch then marks its `step`."""
    return hasattr(getattr(optimizer, "step", None), "_wrapped_by_lr_sched")


def alive(*kinds: type) -> list[Any]:
    """All objects of these kinds. Goes through all of Python's objects, which takes a tenth of a second."""
    objects = gc.get_objects()
    wanted = {kind for kind in set(map(type, objects)) if issubclass(kind, kinds)}
    return [thing for thing in objects if type(thing) in wanted] if wanted else []
