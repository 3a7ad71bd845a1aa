"""Dropping a step: its gradients never reach an optimizer.

Guarantee: after `drop` and until the next step the tracked optimizers of torch's own kind change nothing.
Without gradients they leave a parameter and its state alone. Where a gradient scaler is tracked the gradients
stay, and one of each optimizer is made infinite on every rank: then `scaler.step` skips on all of them, and
`update` backs off once, alike everywhere (without any gradient it would raise). An optimizer that is stepped
all the same, without the scaler or with gradients that came later, loses them at that moment.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

from holdfast.checkpoint.state import Tracked
from holdfast.torch_internals import local_part, scaler_findings
from holdfast.worker.slots import Slot, before_steps, gradient_slots


class Dropping:
    """Stands before the tracked optimizers, from when the run starts until it ends."""

    def __init__(self, tracked: Tracked) -> None:
        self._tracked = tracked
        self._slots: Sequence[Slot] | None = None
        self.dropped = False
        """Whether the present step was dropped."""
        self.stepped = False
        """Whether an optimizer was stepped since this was last set to False."""
        self._hooks = before_steps(tracked.optimizers(), self._before_step)

    def close(self) -> None:
        for hook in self._hooks:
            hook.remove()

    def _before_step(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        del args, kwargs
        self.stepped = True
        if self.dropped:
            _forget(optimizer)

    def drop(self) -> None:
        """Take this step's gradients away from the optimizers."""
        self.dropped = True
        scalers = [scaler for scaler in self._tracked.scalers() if scaler.is_enabled()]
        if scalers:
            for optimizer in self._tracked.optimizers():
                _spoil(optimizer)
                for scaler in scalers:
                    _tell(scaler, optimizer)
            return
        if self._slots is None:
            self._slots = gradient_slots(model for _, model in self._tracked.models())
        for slot in self._slots:
            if slot.read() is not None:
                slot.write(None)
        for optimizer in self._tracked.optimizers():  # some of its parameters may be of no tracked model
            _forget(optimizer)


def _forget(optimizer: torch.optim.Optimizer) -> None:
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            parameter.grad = None


def _spoil(optimizer: torch.optim.Optimizer) -> None:
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    candidates = [parameter for parameter in parameters if local_part(parameter).numel()]
    chosen = next((parameter for parameter in candidates if parameter.grad is not None), None)
    if chosen is None and candidates:
        chosen = candidates[0]
        chosen.grad = torch.zeros_like(chosen)
    if chosen is not None:
        gradient = local_part(chosen.grad)
        values = gradient._values() if gradient.is_sparse else gradient
        if values.numel():
            values.view(-1)[:1].fill_(math.inf) if values.is_contiguous() else values.fill_(math.inf)


def _tell(scaler: torch.amp.GradScaler, optimizer: torch.optim.Optimizer) -> None:
    """Gradients that the step has unscaled already are not looked at again: the answer is changed itself."""
    for found in scaler_findings(scaler).get(id(optimizer), {}).get("found_inf_per_device", {}).values():
        found.fill_(1.0)
