"""Checks whose results are read some steps later, so that no step waits for the device.

Guarantee: `note` and `bad` never make the host wait for a device, unless the device is `DEPTH` steps behind.
Every noted step is judged exactly once, in order, by the same rules as at once; `settle` judges all that are
left. A bad step was used by the optimizer by then: it can be rolled back, not re-run or dropped.

For each step the loss and a sounding of the gradients are computed on the device, put into a small ring
there, copied to page-locked memory on the same stream, and marked by an event. Ring, memory and events are
made once. Where nothing is on a CUDA device a step is judged at once.
"""

from __future__ import annotations

import contextlib
import math
import mmap
import weakref
from collections import deque
from typing import Any

import torch

from holdfast.checkpoint.pinned import Pinned, pin
from holdfast.worker.checking import Checks, Look, read_together, single_number

DEPTH = 64
"""Steps that the host may be ahead of the device before it waits."""
HOST = torch.device("cpu")
LOSS, SOUNDING = 0, 1
COLUMNS = 2


class Ring:
    """Two numbers a step, on their way from a device to the host."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._there = torch.zeros(DEPTH, COLUMNS, dtype=torch.float64, device=device)
        # Memory of our own, because torch ends the process when it frees its page-locked memory after the
        # device has failed: a script whose kernel asserts is to end with its own error.
        memory = mmap.mmap(-1, self._there.nbytes)
        self._here = torch.frombuffer(memory, dtype=torch.float64).view(DEPTH, COLUMNS)
        self._rows = [(self._there[at], self._here[at]) for at in range(DEPTH)]
        self._cells = [(self._there[at, LOSS], self._there[at, SOUNDING]) for at in range(DEPTH)]
        self._events: list[torch.cuda.Event] = [torch.cuda.Event() for _ in range(DEPTH)]  # type: ignore[no-untyped-call]
        weakref.finalize(self, _unlock, pin(self._here), self._events)

    def put(self, at: int, loss: torch.Tensor | float, sounding: torch.Tensor | float) -> None:
        with torch.cuda.device(self.device):
            for cell, value in zip(self._cells[at], (loss, sounding), strict=True):
                if isinstance(value, torch.Tensor):
                    cell.copy_(value.reshape(()), non_blocking=True)
                else:
                    cell.fill_(value)
            there, here = self._rows[at]
            here.copy_(there, non_blocking=True)
            self._events[at].record(torch.cuda.current_stream(self.device))

    def ready(self, at: int) -> bool:
        return bool(self._events[at].query())  # type: ignore[no-untyped-call]

    def wait(self, at: int) -> None:
        self._events[at].synchronize()

    def read(self, at: int) -> tuple[float, float]:
        loss, sounding = self._here[at].tolist()
        return loss, sounding


def _unlock(pinned: Pinned, events: list[torch.cuda.Event]) -> None:
    """Once nothing is on its way there any more; on a device that has failed nothing is."""
    with contextlib.suppress(RuntimeError):
        for event in events:
            event.synchronize()
    pinned.release()


class Deferred:
    """One for a rank. Not for several threads."""

    def __init__(self, checks: Checks) -> None:
        self._checks = checks
        self._ring: Ring | None = None
        self._pending: deque[tuple[int, int, bool, bool]] = deque()
        """Step, row, whether there is a loss, whether there are gradients."""
        self._next = 0
        self._found: list[tuple[int, Look]] = []
        self.last = Look()
        """What the last step that is known showed."""

    @torch.no_grad()
    def note(self, step: int, loss: Any, *, gradients: bool = True) -> None:
        """The step's loss and gradients are as they are now; look at them later."""
        held = single_number(loss)
        wanted = gradients and self._checks.looks_at_gradients()
        soundings = self._checks.gradients().soundings() if wanted else []
        device = next((v.device for v in (held, *soundings) if isinstance(v, torch.Tensor)), HOST)
        if self._ring is None or self._ring.device != device:
            self._settle_all()  # in order, always
            self._ring = self.ring_for(device)
        if self._ring is None:
            self._keep(step, self._checks.judge(*read_together(held, soundings), exact=True))
            return
        if len(self._pending) == DEPTH:
            self._read_oldest()
        self._ring.put(self._next, math.nan if held is None else held, _joined(soundings, device))
        self._pending.append((step, self._next, held is not None, bool(soundings)))
        self._next = (self._next + 1) % DEPTH

    def ring_for(self, device: torch.device) -> Ring | None:
        """What defers reading from a device; None where there is nothing to wait for."""
        return Ring(device) if device.type == "cuda" else None

    def bad(self) -> list[tuple[int, Look]]:
        """The bad steps that are known by now and were not told yet, in order. Waits for nothing."""
        while self._pending and self._ring is not None and self._ring.ready(self._pending[0][1]):
            self._read_oldest()
        found, self._found = self._found, []
        return found

    def settle(self) -> list[tuple[int, Look]]:
        """The same, when all that was noted is known. Waits for the device: before a save, at the end."""
        self._settle_all()
        return self.bad()

    @property
    def pending(self) -> int:
        """Steps that were noted and not judged yet."""
        return len(self._pending)

    def _settle_all(self) -> None:
        while self._pending:
            self._read_oldest()

    def _read_oldest(self) -> None:
        assert self._ring is not None
        step, at, has_loss, has_sounding = self._pending.popleft()
        self._ring.wait(at)
        loss, sounding = self._ring.read(at)
        self._keep(
            step,
            self._checks.judge(loss if has_loss else None, sounding if has_sounding else None, exact=False),
        )

    def _keep(self, step: int, look: Look) -> None:
        self.last = look
        if look.reasons:
            self._found.append((step, look))
        if look.finite:  # what is only odd is told, and accepted: a level that stays is no oddity
            self._checks.accepted(look)


def _joined(soundings: list[torch.Tensor | float], device: torch.device) -> torch.Tensor | float:
    """One of several devices' soundings, on one of them."""
    if len(soundings) < 2:
        return soundings[0] if soundings else 0.0
    parts = [
        part.to(device, torch.float64, non_blocking=True)
        if isinstance(part, torch.Tensor)
        else torch.full((), part, dtype=torch.float64, device=device)
        for part in soundings
    ]
    whole: torch.Tensor = torch.linalg.vector_norm(torch.stack(parts))
    return whole
