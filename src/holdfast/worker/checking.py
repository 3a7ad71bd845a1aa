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
    grad_norm: float | None = None
    """Of the gradients that this rank holds; None if they were not looked at, or there are none."""
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
        self._seen = Seen()
        self._own: dict[str, Check] = {}
        self._failed: set[str] = set()

    def add(self, name: str, check: Check) -> None:
        """A check of the user's own: given the loss, True or a text rejects the step."""
        if name in self._own:
            raise UsageError(f"add_check({name!r}): there is a check of that name already")
        self._own[name] = check

    @property
    def wanted(self) -> bool:
        """Whether there is anything to look for."""
        return self._rules.any or self._check_gradients or bool(self._own)

    def look(self, loss: Any) -> Look:
        """Look at the loss that was returned, and at the gradients as they are now."""
        held = single_number(loss)
        norms = self.gradients().norms() if self.looks_at_gradients() else []
        value, norm = read_together(held, norms)
        return self.judge(value, norm, exact=True)

    def judge(self, loss: float | None, norm: float | None, *, exact: bool) -> Look:
        """Judge values that were read. `exact`: the gradients are still there to be asked for details."""
        reasons: list[str] = []
        finite = True
        if loss is not None:
            reasons += judge(loss, self._rules, self._seen)
            finite = not (reasons and not_finite(loss))
        if norm is not None and not math.isfinite(norm):
            bad = self.gradients().bad() if exact else ["the gradients hold a NaN or an infinity"]
            # Squares of huge gradients overflow although each of them is a number.
            norm = norm if bad else None
            finite = finite and not bad
            reasons += bad
        if loss is not None and self._own:
            reasons += self._asked(loss)
        return Look(loss=loss, grad_norm=norm, reasons=reasons, finite=finite)

    def accepted(self, look: Look) -> None:
        """The step was accepted: its loss is part of what later ones are compared with."""
        if self._rules.compares and look.loss is not None:
            self._seen.add(look.loss)

    def looks_at_gradients(self) -> bool:
        """With a gradient scaler that is on, infinities in the scaled gradients are its own matter."""
        return self._check_gradients and not any(scaler.is_enabled() for scaler in self._tracked.scalers())

    def gradients(self) -> Gradients:
        if self._gradients is None:
            self._gradients = Gradients(self._tracked.models())
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
        if hasattr(loss, "full_tensor"):
            # Reading it is a collective, and that is not for a check to start.
            raise UsageError(
                "the loss is a DTensor; return its .full_tensor(), or its local part, on every rank"
            )
        if loss.numel() != 1 or loss.is_complex():
            return None
        return float(loss.detach()) if loss.is_cpu else loss.detach()
    if isinstance(loss, bool):
        return None
    return float(loss) if isinstance(loss, Real) else None


def read_together(
    loss: float | torch.Tensor | None, norms: list[torch.Tensor | float]
) -> tuple[float | None, float | None]:
    """The values of a loss and of the parts of a norm, read from their devices in one go."""
    waiting = [value for value in (loss, *norms) if isinstance(value, torch.Tensor)]
    read = iter(_gathered(waiting).tolist() if waiting else ())
    first = next(read) if isinstance(loss, torch.Tensor) else loss
    return first, together([next(read) if isinstance(part, torch.Tensor) else part for part in norms])


def together(parts: list[float]) -> float | None:
    """The norm of all, from the norms of its parts."""
    if not parts:
        return None
    return math.sqrt(sum(part * part for part in parts)) if len(parts) > 1 else float(parts[0])


def _gathered(values: list[torch.Tensor]) -> torch.Tensor:
    device = values[0].device
    wide = torch.float32 if device.type == "mps" else torch.float64
    return torch.stack([value.reshape(()).to(device, wide, non_blocking=True) for value in values])
