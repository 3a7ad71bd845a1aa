"""Everything that a forward and backward changes in a rank, and the way back.

Guarantee: after `restore` a call of the same function with the same batches gives what it gave the first
time, bit by bit, as far as the device's own kernels do. Put back are: random numbers of every kind (python,
numpy, torch, every CUDA device, tracked generators and trackers), the buffers of tracked models, gradients as
they were on entry (none stays none), the state of gradient scalers, and what the loop recorded of the step.
Parameters and optimizer state are not: a step that changes them while it computes cannot be taken back, and
is refused. What only the user's own objects know is not put back either.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from holdfast.checkpoint.state import Tracked
from holdfast.torch_internals import scaler_findings
from holdfast.worker.meter import Meter
from holdfast.worker.rng import Randomness
from holdfast.worker.slots import Copies, buffer_slots, gradient_slots


class Rewind:
    """The state of this rank at one moment, to go back to. Each captures anew over the last one."""

    def __init__(self, tracked: Tracked, meter: Meter | None = None) -> None:
        self._randomness = Randomness(tracked)
        models = [model for _, model in tracked.models()]
        self._gradients = Copies(gradient_slots(models))
        self._buffers = Copies(buffer_slots(models))
        self._scalers = [_ScalerState(scaler) for scaler in tracked.scalers() if scaler.is_enabled()]
        self._replicas = [
            module
            for model in models
            for module in model.modules()
            if isinstance(module, nn.parallel.DistributedDataParallel)
        ]
        self._syncs: list[bool] = []
        """Whether DDP is to send rank 0's buffers before its next forward: it was not, after `no_sync`."""
        self._meter = meter
        self._random: Any = None
        self._recorded: Any = None

    def capture(self) -> None:
        self._random = self._randomness.capture()
        with torch.no_grad():
            self._gradients.capture()
            self._buffers.capture()
        self._syncs = [replica.require_forward_param_sync for replica in self._replicas]
        for scaler in self._scalers:
            scaler.capture()
        if self._meter is not None:
            self._recorded = self._meter.recorded()

    def restore(self) -> None:
        self._gradients.restore()
        self._buffers.restore()
        for replica, syncs in zip(self._replicas, self._syncs, strict=True):
            replica.require_forward_param_sync = syncs
        for scaler in self._scalers:
            scaler.restore()
        if self._meter is not None:
            self._meter.back_to(self._recorded)
        self._randomness.restore(self._random)

    def release(self) -> None:
        """Hold on to nothing of the training's but the memory of the copies."""
        self._gradients.release()
        self._buffers.release()


class _ScalerState:
    """A gradient scaler's scale, and which optimizers' gradients it has unscaled in this step.

    Its state_dict knows nothing of the latter, and reading it would wait for the device.
    """

    def __init__(self, scaler: torch.amp.GradScaler) -> None:
        self._scaler: Any = scaler
        self._numbers: dict[str, tuple[torch.Tensor, torch.Tensor] | None] = {}
        self._optimizers: dict[int, dict[str, Any]] = {}

    def capture(self) -> None:
        for name in ("_scale", "_growth_tracker"):
            tensor = getattr(self._scaler, name)
            kept = self._numbers.get(name)
            if tensor is None:
                self._numbers[name] = None
            elif kept is not None and kept[0] is tensor:
                kept[1].copy_(tensor)
            else:
                self._numbers[name] = tensor, tensor.clone()
        self._optimizers = {
            key: {**state, "found_inf_per_device": dict(state["found_inf_per_device"])}
            for key, state in scaler_findings(self._scaler).items()
        }

    def restore(self) -> None:
        for name, kept in self._numbers.items():
            if kept is not None:
                kept[0].copy_(kept[1])
            setattr(self._scaler, name, kept[0] if kept is not None else None)
        states = scaler_findings(self._scaler)
        states.clear()
        for key, state in self._optimizers.items():
            states[key] = {**state, "found_inf_per_device": dict(state["found_inf_per_device"])}
