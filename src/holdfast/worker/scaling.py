"""What becomes of the gradient scalers' scales, without making a step wait for the device.

Guarantee: every scale is looked at once a step, in order. `note` never waits for a device, unless that is
many steps behind; `found(wait=True)` waits until all of them are known.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from typing import Any

import torch

from holdfast.policy.scaling import Scale
from holdfast.worker.deferring import DEPTH, Ring


class Scales:
    """Of one rank's scalers."""

    def __init__(self, scalers: Iterable[torch.amp.GradScaler]) -> None:
        self._scalers = [_Watched(scaler) for scaler in scalers if scaler.is_enabled()]

    def __bool__(self) -> bool:
        return bool(self._scalers)

    def note(self, step: int) -> None:
        """A step is complete."""
        for one in self._scalers:
            one.note(step)

    def found(self, *, wait: bool = False) -> list[int]:
        """The bad steps that are known by now and were not told yet, in order."""
        return sorted({step for one in self._scalers for step in one.found(wait=wait)})

    @property
    def pending(self) -> bool:
        """Whether some are not known yet."""
        return any(one.pending for one in self._scalers)

    def why(self) -> list[str]:
        """What is wrong with the scales, as far as they are known."""
        return [one.scale.why for one in self._scalers if one.scale.why]


class _Watched:
    def __init__(self, scaler: torch.amp.GradScaler) -> None:
        self._scaler: Any = scaler
        self.scale = Scale(scaler.get_scale())
        self._ring: Ring | None = None
        self._pending: deque[tuple[int, int]] = deque()
        self._next = 0
        self._bad: list[int] = []

    def note(self, step: int) -> None:
        pair = scale_of(self._scaler)
        if pair is None:
            return
        scale, good = pair
        if not scale.is_cuda:
            self._observe(step, *read_pair(scale, good))
            return
        if self._ring is None or self._ring.device != scale.device:
            self.found(wait=True)
            self._ring = Ring(scale.device)
        if len(self._pending) == DEPTH:
            self._read_oldest()
        self._ring.put(self._next, scale, good)
        self._pending.append((step, self._next))
        self._next = (self._next + 1) % DEPTH

    @property
    def pending(self) -> int:
        return len(self._pending)

    def found(self, *, wait: bool) -> list[int]:
        while self._pending and self._ring is not None and (wait or self._ring.ready(self._pending[0][1])):
            self._read_oldest()
        found, self._bad = self._bad, []
        return found

    def _read_oldest(self) -> None:
        assert self._ring is not None
        step, at = self._pending.popleft()
        self._ring.wait(at)
        scale, good = self._ring.read(at)
        self._observe(step, scale, int(good))

    def _observe(self, step: int, scale: float, good: int) -> None:
        if self.scale.observe(scale, good):
            self._bad.append(step)


def scale_of(scaler: torch.amp.GradScaler) -> tuple[torch.Tensor, torch.Tensor] | None:
    """The scale and the count of good steps, where they are; None before the scaler is first used."""
    kept: Any = scaler
    scale, good = getattr(kept, "_scale", None), getattr(kept, "_growth_tracker", None)
    return (scale, good) if isinstance(scale, torch.Tensor) and isinstance(good, torch.Tensor) else None


def read_pair(scale: torch.Tensor, good: torch.Tensor) -> tuple[float, int]:
    """Both, on the host; waits for their device once."""
    if scale.is_cpu and good.is_cpu:
        return scale.item(), int(good.item())
    first, second = torch.stack([scale.double().reshape(()), good.double().reshape(())]).tolist()
    return first, int(second)
