"""Parameters that are trained and that nothing which is saved brings back: a resume would begin them anew.

That is one that a tracked optimizer trains and neither a tracked model nor another tracked object holds (a
weight of the loss), or one that its model's `state_dict` leaves out. They are looked for in the fork that
proves a save (proof.py): they are spoilt before the load, and what is not as it was after it is held by
nothing. So it does not matter in which form, or by which object, something is held.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from holdfast.checkpoint.adapters import GeneratorState, ScheduleState, TrackerState
from holdfast.checkpoint.state import Tracked
from holdfast.torch_internals import local_part

SAMPLE = 64 << 10
"""Bytes of a tensor that are spoilt and compared: the fork pays for every page that it writes to."""
TOLD = 4


def strangers(tracked: Tracked) -> list[tuple[str, torch.Tensor]]:
    """Parameters that a tracked optimizer trains and no tracked model has, with words for each.

    Of what was just collected: this is asked at every save.
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
    """In the fork, around a load."""

    def __init__(
        self,
        tracked: Tracked,
        stored: Mapping[str, torch.Tensor],
        versions: Mapping[int, int],
        *,
        all_by_value: bool,
    ) -> None:
        """`versions`: of the parameters when the run began. `all_by_value`: every stored tensor is loaded
        with its values; else only what is in the blob."""
        self._tracked = tracked
        self._errors: list[str] = []
        self._parameters: list[tuple[str, torch.Tensor, torch.Tensor]] = []
        """Words, a sample of the parameter, and a copy of that."""
        seen = {_place(one) for one in stored.values()}
        found = strangers(tracked)
        if all_by_value:
            found += _left_out(tracked, versions)
        for words, parameter in found:
            if _place(parameter) in seen:
                continue
            seen.add(_place(parameter))
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
        told = list(self._errors)
        told += [
            _unheld(words) for words, sample, before in self._parameters if not torch.equal(sample, before)
        ]
        return told[:TOLD]


def _unheld(words: str) -> str:
    return (
        f"{words} is trained, and nothing that is tracked brings its value back, so a resume would begin it "
        "anew. Track what has it, with a state_dict and a load_state_dict that hold it, such as "
        "run.track(loss=criterion)"
    )


def versions_of(tracked: Tracked) -> dict[int, int]:
    """Of the parameters that tracked optimizers have, by id: one that was changed since has another."""
    return {
        id(parameter): parameter._version
        for optimizer in tracked.optimizers()
        for group in optimizer.param_groups
        for parameter in group["params"]
        if not is_lazy(parameter) and not parameter.is_inference()
    }


def _left_out(tracked: Tracked, versions: Mapping[int, int]) -> list[tuple[str, torch.Tensor]]:
    """Parameters of tracked models that were trained, with words for each.

    One that never changed is as the script made it, and will be so again: it need not be stored.
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
    """Some of its bytes, as they lie there; None where this process cannot write to them."""
    memory = local_part(parameter)
    plain = type(memory) is torch.Tensor or isinstance(parameter, DTensor | nn.Parameter)
    if not plain or not memory.is_cpu or memory.layout is not torch.strided or not memory.is_contiguous():
        return None
    return memory.reshape(-1).view(torch.uint8)[:SAMPLE]


def _may_hold_anything(tracked: Tracked) -> bool:
    """Whether there is an object of the script's own, which may hold what nobody else does."""
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
