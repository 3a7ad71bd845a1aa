"""The checks on one rank's own result: its loss, its gradients, and whatever the user adds.

Guarantee: `look` waits for a device at most once, however many tensors there are, unless something is wrong;
nothing in it is a collective; no check that a user added can end the run by failing.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterable, Mapping
from numbers import Real
from typing import Any

import msgspec
import torch

from holdfast.checkpoint.state import Tracked
from holdfast.errors import UsageError
from holdfast.policy.checks import Rules, Seen, judge, not_finite
from holdfast.settings_validation import ValidationSettings
from holdfast.worker.gradients import Gradients

log = logging.getLogger("holdfast")

Check = Callable[[float], object]


class Look(msgspec.Struct, kw_only=True):
    """What one look at a step's result showed on this rank."""

    loss: float | None = None
    """None if the result is not a single number."""
    reasons: list[str] = []
    """Why the result is rejected, on this rank's own loss and gradients; empty if it is not."""
    finite: bool = True
    """False if a NaN or an infinity is among the reasons."""


class Checks:
    """Looks at results, as the settings say."""

    def __init__(self, chosen: ValidationSettings, tracked: Tracked) -> None:
        self._rules = Rules(
            nan=chosen.check_for_nan_in_loss,
            spike=chosen.spiky_loss_factor if chosen.check_for_spiky_loss else 0.0,
            outlier=chosen.outlier_loss_factor if chosen.check_for_outlier_loss else 0.0,
        )
        self._check_gradients = chosen.check_for_nan_in_grad
        self._tracked = tracked
        self._gradients: Gradients | None = None
        self._scalers: list[torch.amp.GradScaler] | None = None
        self._seen = Seen()
        self._own: dict[str, Check] = {}
        self._failed: set[str] = set()

    def add(self, name: str, check: Check) -> None:
        """A check of the user's own: given the loss, True or a text rejects the step."""
        if name in self._own:
            raise UsageError(f"add_check({name!r}): there is a check of that name already")
        self._own[name] = check

    @property
    def judges_losses(self) -> bool:
        """Whether there is anything to look for in a loss by itself."""
        return self._rules.any or bool(self._own)

    @property
    def wanted(self) -> bool:
        """Whether there is anything to look for."""
        return self._rules.any or self._check_gradients or bool(self._own)

    def look(self, loss: Any) -> Look:
        """Look at the loss that was returned, and at the gradients as they are now."""
        held = single_number(loss)
        soundings = self.gradients().soundings() if self.looks_at_gradients() else []
        return self.judge(*read_together(held, soundings), exact=True)

    def judge(self, loss: float | None, sounding: float | None, *, exact: bool) -> Look:
        """Judge values that were read. `exact`: the gradients are still there to be asked for details."""
        reasons: list[str] = []
        finite = True
        if loss is not None:
            reasons += judge(loss, self._rules, self._seen)
            finite = not (reasons and not_finite(loss))
        if sounding is not None and not math.isfinite(sounding):
            # What huge gradients are summed up to overflows although each of them is a number.
            bad = self.gradients().bad() if exact else ["the gradients hold a NaN or an infinity"]
            finite = finite and not bad
            reasons += bad
        if loss is not None and self._own:
            reasons += self._asked(loss)
        return Look(loss=loss, reasons=reasons, finite=finite)

    def accepted(self, look: Look) -> None:
        """The step was accepted: its loss is part of what later ones are compared with."""
        if self._rules.compares and look.loss is not None:
            self._seen.add(look.loss)

    def looks_at_gradients(self) -> bool:
        """With a gradient scaler that is on, infinities in the scaled gradients are its own matter."""
        if self._scalers is None:
            self._scalers = self._tracked.scalers()
        return self._check_gradients and not (
            self._scalers and any(scaler.is_enabled() for scaler in self._scalers)
        )

    def gradients(self) -> Gradients:
        if self._gradients is None:
            self._gradients = Gradients(self._tracked.models(), self._tracked.optimizers())
        return self._gradients

    def begin_from(self, losses: Iterable[float | None]) -> None:
        """Losses before a checkpoint, from its manifest; used where it holds none of the checks' own."""
        if self._rules.compares and not self._seen.count:
            self._seen.add_all(losses)

    def state_dict(self) -> dict[str, Any]:
        """Empty where nothing has to be remembered."""
        return self._seen.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._seen.load_state_dict(state)

    def _asked(self, loss: float) -> list[str]:
        reasons = []
        for name, check in self._own.items():
            try:
                answer = check(loss)
                rejects = bool(answer)
            except Exception as error:  # noqa: BLE001 - whatever a user's check does, the run goes on
                if name not in self._failed:
                    self._failed.add(name)
                    log.warning(
                        "holdfast: the check %r failed on a loss of %g and is ignored where it does: %s: %s",
                        name, loss, type(error).__name__, error,
                    )  # fmt: skip
                continue
            if rejects:
                reasons.append(
                    f"{name}: {answer}" if isinstance(answer, str) else f"{name} (loss {loss:.6g})"
                )
        return reasons


def single_number(loss: Any) -> float | torch.Tensor | None:
    """A result as a loss, where it is one number; still on its device."""
    if isinstance(loss, torch.Tensor):
        if type(loss) is not torch.Tensor and hasattr(loss, "full_tensor"):
            # Reading it is a collective, and that is not for a check to start.
            raise UsageError(
                "the loss is a DTensor; return its .full_tensor(), or its local part, on every rank"
            )
        if loss.numel() != 1 or loss.is_complex():
            return None
        return float(loss.item()) if loss.is_cpu else loss.detach()
    if isinstance(loss, bool):
        return None
    return float(loss) if isinstance(loss, Real) else None


def read_together(
    loss: float | torch.Tensor | None, parts: list[torch.Tensor | float]
) -> tuple[float | None, float | None]:
    """A loss, and one number of several, read in one go: the norm of norms, finite only if all are."""
    known = [part for part in parts if not isinstance(part, torch.Tensor)]
    if len(known) == len(parts) and not isinstance(loss, torch.Tensor):
        return loss, math.hypot(*known) if known else None
    waiting = [value for value in (loss, *parts) if isinstance(value, torch.Tensor)]
    read = iter(_gathered(waiting).tolist())
    first = next(read) if isinstance(loss, torch.Tensor) else loss
    numbers = [next(read) if isinstance(part, torch.Tensor) else part for part in parts]
    return first, math.hypot(*numbers) if parts else None


def _gathered(values: list[torch.Tensor]) -> torch.Tensor:
    device = values[0].device
    wide = torch.float32 if device.type == "mps" else torch.float64
    return torch.stack([value.reshape(()).to(device, wide, non_blocking=True) for value in values])
