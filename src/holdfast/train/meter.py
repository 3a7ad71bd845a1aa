"""What a run counts and measures: steps, samples, tokens, losses, step times.

Losses on a device are kept there and read back together when the journal is flushed, so that recording a
loss does not make the loop wait for the device at every step.
"""

from __future__ import annotations

import math
import statistics
import time
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import xxhash

from holdfast.checkpoint.format import Windows
from holdfast.errors import UsageError
from holdfast.journal import JournalWriter
from holdfast.journal.events import StepsDone, Warned, encode_loss

WINDOW = 64


class Meter:
    """Counters that belong to the state, and a window of recent values for the manifest and the journal."""

    def __init__(self, flush_seconds: float) -> None:
        self.step = 0
        """Steps completed."""
        self.samples = 0
        self.tokens = 0
        """This rank's own share of what the job has counted since the run began."""
        self._others = (0, 0)
        """Samples and tokens of all other ranks, when the ranks last exchanged them."""
        self._flush_seconds = flush_seconds
        self._began = time.perf_counter()
        self._flushed = time.monotonic()
        self._loss: Any = None
        self._grad_norm: Any = None
        self._sample_digest = ""
        self._first = 1
        self._any = False
        """Whether any step was journalled yet."""
        self._data_seconds = 0.0
        """How long the first step had to wait for its first batch."""
        self._pending_loss: list[Any] = []
        self._pending_norm: list[Any] = []
        self._pending_seconds: list[float] = []
        self._pending_samples: list[str] = []
        self._losses: deque[float | None] = deque(maxlen=WINDOW)
        self._norms: deque[float | None] = deque(maxlen=WINDOW)
        self._seconds: deque[float] = deque(maxlen=WINDOW)
        self.seconds = 0.0
        """How long the last step took."""
        self.told: set[int] = set()
        """Steps that are known to be bad, so that their losses need no separate warning."""

    def begin_step(self) -> None:
        self._began = time.perf_counter()
        self._loss = None
        self._grad_norm = None
        self._sample_digest = ""

    def record(
        self,
        *,
        loss: Any = None,
        grad_norm: Any = None,
        samples: int | Sequence[int] | torch.Tensor | None = None,
        tokens: int = 0,
    ) -> None:
        if loss is not None:
            self._loss = _kept(loss, "loss")
        if grad_norm is not None:
            self._grad_norm = _kept(grad_norm, "grad_norm")
        if samples is not None:
            if isinstance(samples, int):
                self.samples += samples
            else:
                ids = samples.tolist() if isinstance(samples, torch.Tensor) else list(samples)
                self.samples += len(ids)
                self._sample_digest = xxhash.xxh3_64_hexdigest(f"{self._sample_digest}{ids}".encode())
        self.tokens += tokens

    def recorded(self) -> tuple[Any, ...]:
        """What was recorded for this step so far, for `back_to`."""
        return self.samples, self.tokens, self._loss, self._grad_norm, self._sample_digest

    def back_to(self, recorded: tuple[Any, ...]) -> None:
        """Forget what was recorded since: the step is computed again."""
        self.samples, self.tokens, self._loss, self._grad_norm, self._sample_digest = recorded

    @property
    def loss(self) -> Any:
        """The loss that was recorded for this step, still on its device; None if none was."""
        return self._loss

    def first_batch(self, drawn: float) -> None:
        """In the first step: when its first batch was there (by `time.perf_counter`)."""
        if not self._any and not self._pending_seconds:
            self._data_seconds = max(0.0, drawn - self._began)

    def end_step(self) -> None:
        self.step += 1
        self._pending_loss.append(self._loss)
        self._pending_norm.append(self._grad_norm)
        self.seconds = time.perf_counter() - self._began
        self._pending_seconds.append(self.seconds)
        self._pending_samples.append(self._sample_digest)

    def flush_due(self) -> bool:
        """The first step is written at once: with it, the run is back."""
        return not self._any or time.monotonic() - self._flushed >= self._flush_seconds

    def flush(self, journal: JournalWriter, *, read_device: bool = True) -> None:
        """Write the steps since the last flush as one event.

        Without `read_device`, losses still on a device are left out: after a crash, waiting for it may hang.
        """
        self._flushed = time.monotonic()
        if not self._pending_seconds:
            return
        losses = _on_host(self._pending_loss, read_device=read_device)
        norms = _on_host(self._pending_norm, read_device=read_device)
        for number, loss in enumerate(losses):
            if loss is not None and not math.isfinite(loss) and self._first + number not in self.told:
                journal.write(Warned(message=f"the loss of step {self._first + number} is {loss}"))
        journal.write(
            StepsDone(
                first=self._first,
                seconds=[round(value, 6) for value in self._pending_seconds],
                loss=[encode_loss(loss) for loss in losses],
                grad_norm=[encode_loss(norm) for norm in norms] if any(n is not None for n in norms) else [],
                samples=self._pending_samples if any(self._pending_samples) else [],
                data=0.0 if self._any else round(min(self._data_seconds, self._pending_seconds[0]), 6),
            )
        )
        self._any = True
        self.told.clear()
        self._losses.extend(losses)
        self._norms.extend(norms)
        self._seconds.extend(self._pending_seconds)
        self._first = self.step + 1
        self._pending_loss, self._pending_norm = [], []
        self._pending_seconds, self._pending_samples = [], []

    def flush_at_once(self, journal: JournalWriter) -> None:
        """Flush, unless that would make the loop wait for a device."""
        if all(isinstance(value, float | None) for value in (*self._pending_loss, *self._pending_norm)):
            self.flush(journal)

    def median_step(self) -> float | None:
        """Seconds that a step takes; None if none was measured yet."""
        seconds = [*self._seconds, *self._pending_seconds][-WINDOW:]
        return statistics.median(seconds) if seconds else None

    def latest(self) -> tuple[float | None, float | None]:
        """Loss and gradient norm as they were recorded for the present step; waits for the device."""
        loss, norm = _on_host([self._loss, self._grad_norm], read_device=True)
        return loss, norm

    def go_on_from(self, windows: Windows) -> None:
        """After a resume: so a checkpoint saved soon has a window too. Step times are this attempt's own."""
        self._losses.extend(windows.loss)
        self._norms.extend(windows.grad_norm)

    def windows(self) -> Windows:
        return Windows(
            loss=_finite(self._losses), grad_norm=_finite(self._norms), step_seconds=list(self._seconds)
        )

    def agreed(self, samples: int, tokens: int) -> None:
        """The ranks have exchanged what they have counted: these are the sums."""
        self._others = samples - self.samples, tokens - self.tokens

    def others_told(self, of_all: tuple[int, int], own: Mapping[str, int]) -> None:
        """The same on a resume; `own` is this rank's share in what was loaded."""
        self._others = of_all[0] - own["samples"], of_all[1] - own["tokens"]

    def of_the_job(self) -> tuple[int, int]:
        """Samples and tokens of all ranks: the others' as last exchanged, this rank's as of now."""
        return self.samples + self._others[0], self.tokens + self._others[1]

    def state_dict(self) -> dict[str, int]:
        return {"step": self.step, "samples": self.samples, "tokens": self.tokens}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.step, self.samples, self.tokens = state["step"], state["samples"], state["tokens"]
        self._first = self.step + 1


def _kept(value: Any, what: str) -> Any:
    """A number now, or a copy that stays on its device until the next flush."""
    if not isinstance(value, torch.Tensor):
        return float(value)
    if hasattr(value, "full_tensor"):
        # Reading it is a collective, but ranks do not flush at the same time: that would hang.
        raise UsageError(f"record({what}=…) was given a DTensor; pass its .full_tensor(), on every rank")
    return value.detach().clone() if value.is_cuda else float(value.detach())


def _on_host(values: list[Any], *, read_device: bool) -> list[float | None]:
    return [
        None if value is None or not (read_device or isinstance(value, float)) else float(value)
        for value in values
    ]


def _finite(values: deque[float | None]) -> list[float | None]:
    """JSON has no NaN; in a window for comparison, a step without a finite value is a gap."""
    return [value if value is not None and math.isfinite(value) else None for value in values]
