"""What a run counts and measures: steps, samples, tokens, losses, step times.

Losses on a device are kept there and read back together when the journal is flushed, so that recording one
does not make the loop wait for the device at every step.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Sequence
from typing import Any

import torch
import xxhash

from holdfast.checkpoint.manifest import Windows
from holdfast.journal.events import StepsDone, Warned, encode_loss
from holdfast.journal.writer import JournalWriter

WINDOW = 64


class Meter:
    """Counters that belong to the state, and a window of recent values for the manifest and the journal."""

    def __init__(self, flush_seconds: float) -> None:
        self.step = 0
        """Steps completed."""
        self.samples = 0
        self.tokens = 0
        self._flush_seconds = flush_seconds
        self._began = time.perf_counter()
        self._flushed = time.monotonic()
        self._loss: Any = None
        self._sample_digest = ""
        self._first = 1
        self._pending_loss: list[Any] = []
        self._pending_seconds: list[float] = []
        self._pending_samples: list[str] = []
        self._losses: deque[float | None] = deque(maxlen=WINDOW)
        self._seconds: deque[float] = deque(maxlen=WINDOW)

    def begin_step(self) -> None:
        self._began = time.perf_counter()
        self._loss = None
        self._sample_digest = ""

    def record(self, loss: Any, samples: int | Sequence[int] | torch.Tensor | None, tokens: int) -> None:
        if loss is not None:
            if isinstance(loss, torch.Tensor):
                loss = loss.detach().clone() if loss.is_cuda else float(loss.detach())
            self._loss = loss
        if samples is not None:
            if isinstance(samples, int):
                self.samples += samples
            else:
                ids = samples.tolist() if isinstance(samples, torch.Tensor) else list(samples)
                self.samples += len(ids)
                self._sample_digest = xxhash.xxh3_64_hexdigest(f"{self._sample_digest}{ids}".encode())
        self.tokens += tokens

    def end_step(self) -> None:
        self.step += 1
        self._pending_loss.append(self._loss)
        self._pending_seconds.append(time.perf_counter() - self._began)
        self._pending_samples.append(self._sample_digest)

    def flush_due(self) -> bool:
        return time.monotonic() - self._flushed >= self._flush_seconds

    def flush(self, journal: JournalWriter, *, read_device: bool = True) -> None:
        """Write the steps since the last flush as one event.

        Without `read_device` losses still on a device are left out: after a crash, waiting for it may hang.
        """
        self._flushed = time.monotonic()
        if not self._pending_seconds:
            return
        kept = [loss if read_device or isinstance(loss, float) else None for loss in self._pending_loss]
        losses = [None if loss is None else float(loss) for loss in kept]
        for number, loss in enumerate(losses):
            if loss is not None and not math.isfinite(loss):
                journal.write(Warned(message=f"the loss of step {self._first + number} is {loss}"))
        journal.write(
            StepsDone(
                first=self._first,
                seconds=[round(value, 6) for value in self._pending_seconds],
                loss=[encode_loss(loss) for loss in losses],
                samples=self._pending_samples if any(self._pending_samples) else [],
            )
        )
        self._losses.extend(losses)
        self._seconds.extend(self._pending_seconds)
        self._first = self.step + 1
        self._pending_loss, self._pending_seconds, self._pending_samples = [], [], []

    def windows(self) -> Windows:
        finite = [loss if loss is not None and math.isfinite(loss) else None for loss in self._losses]
        return Windows(loss=finite, step_seconds=list(self._seconds))

    def state_dict(self) -> dict[str, int]:
        return {"step": self.step, "samples": self.samples, "tokens": self.tokens}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.step, self.samples, self.tokens = state["step"], state["samples"], state["tokens"]
        self._first = self.step + 1
