"""The places in which a rank keeps gradients and buffers, and copies of what is in them.

A gradient is in its parameter's `grad`. FSDP2 keeps what was accumulated without a reduction elsewhere, where
nobody sees it between two calls: `torch_internals` knows where.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.hooks import RemovableHandle

from holdfast.torch_internals import local_part, sharded_parameters


class Slot(NamedTuple):
    """Something that holds a tensor, or none."""

    read: Callable[[], torch.Tensor | None]
    write: Callable[[torch.Tensor | None], None]


StepHook = Callable[[torch.optim.Optimizer, Any, Any], None]


def before_steps(optimizers: Sequence[torch.optim.Optimizer], call: StepHook) -> list[RemovableHandle]:
    """Call this before each step of these optimizers.

    One that was made without torch's constructor, around another one, takes no hooks: then that other one's
    steps, which it makes for the same parameters, count as its own.
    """
    handles: list[RemovableHandle] = []
    without: list[torch.optim.Optimizer] = []
    for one in optimizers:
        try:
            handles.append(one.register_step_pre_hook(call))
        except (AttributeError, TypeError):
            without.append(one)
    if not without:
        return handles

    def before(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        theirs = {id(p) for one in without for group in one.param_groups for p in group["params"]}
        mine = {id(p) for group in optimizer.param_groups for p in group["params"]}
        if not any(optimizer is one for one in optimizers) and theirs & mine:
            call(optimizer, args, kwargs)

    return [*handles, register_optimizer_step_pre_hook(before)]


def gradient_slots(models: Iterable[nn.Module]) -> list[Slot]:
    """Every place with a gradient, of every parameter once."""
    slots: list[Slot] = []
    seen: set[int] = set()
    for model in models:
        for parameter in model.parameters():
            if id(parameter) not in seen:
                seen.add(id(parameter))
                slots.append(Slot(partial(getattr, parameter, "grad"), partial(setattr, parameter, "grad")))
        for module in model.modules():
            for sharded in sharded_parameters(module):
                if id(sharded.record) not in seen:
                    seen.add(id(sharded.record))
                    slots.append(Slot(sharded.gradient, sharded.set_gradient))
    return slots


def buffer_slots(models: Iterable[nn.Module]) -> list[Slot]:
    """Every buffer, also those that no checkpoint holds; by its place, because a module may replace it."""
    slots: list[Slot] = []
    seen: set[tuple[int, str]] = set()
    for model in models:
        for module in model.modules():
            for name in module._buffers:
                if (id(module), name) not in seen:
                    seen.add((id(module), name))
                    buffers: Any = module._buffers
                    slots.append(Slot(partial(buffers.get, name), partial(buffers.__setitem__, name)))
    return slots


class Copies:
    """What was in some slots at one moment. The memory of the copies is used again and again."""

    def __init__(self, slots: Sequence[Slot]) -> None:
        self._slots = slots
        self._held: list[torch.Tensor | None] = [None] * len(slots)
        """The very tensors that were there: views of a bucket must stay what they are."""
        self._copies: list[torch.Tensor | None] = [None] * len(slots)

    def capture(self) -> None:
        sources: list[torch.Tensor] = []
        targets: list[torch.Tensor] = []
        for at, slot in enumerate(self._slots):
            tensor = self._held[at] = slot.read()
            if tensor is None:
                continue
            local = local_part(tensor)
            if local.layout is not torch.strided:  # a sparse one has no fixed size
                self._copies[at] = local.clone()
                continue
            copy = self._copies[at]
            if copy is None or not _alike(copy, local):
                copy = self._copies[at] = torch.empty_like(local)
            sources.append(local)
            targets.append(copy)
        if targets:
            torch._foreach_copy_(targets, sources)

    def restore(self) -> None:
        with torch.no_grad():
            for slot, tensor, copy in zip(self._slots, self._held, self._copies, strict=True):
                if tensor is not None:
                    assert copy is not None
                    if copy.layout is not torch.strided:
                        tensor = copy.clone()
                    else:
                        local_part(tensor).copy_(copy)
                if slot.read() is not tensor:
                    slot.write(tensor)

    def release(self) -> None:
        """Let go of the tensors that were there; only the memory of the copies is kept."""
        self._held = [None] * len(self._slots)


def _alike(one: torch.Tensor, other: torch.Tensor) -> bool:
    return (
        one.layout is torch.strided
        and one.shape == other.shape
        and one.dtype == other.dtype
        and one.device == other.device
    )
