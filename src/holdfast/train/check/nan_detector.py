"""NaNDetector: finds non-finite losses and gradients and keeps them from the optimizer, without a Run.

```python
detector = holdfast.NaNDetector(policy="skip")
...
if detector.check(loss, model=model, step=step):
    optimizer.step()
```
Guarantee: with a process group all ranks get the same answer for the same step. A bad step's gradients are
gone when `check` returns, so that even a loop that ignores the answer does not use them. No sequence of bad
steps goes on for ever: too many in a row stop the loop or roll it back, and rolling back without getting
further is tried `MAX_ROLLBACKS` times.
"""

from __future__ import annotations

import logging
import math
import weakref
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any, get_args

import msgspec
import torch
import torch.distributed as dist
from torch import nn

from holdfast.errors import UsageError, ValidationFailedError
from holdfast.journal.events import encode_loss
from holdfast.policy import Act, Count, Policy, Scale, StepOutcome, not_finite
from holdfast.train.check.checks import read_pair, read_together, scale_of, single_number
from holdfast.train.check.gradients import Gradients, plain

log = logging.getLogger("holdfast")

MAX_ROLLBACKS = 2
_STUCK, _WRONG = 1, 2
"""What a step can be: fine except for its scaler, or itself bad."""


class BadStep(msgspec.Struct, frozen=True, kw_only=True):
    """A bad step, as `NaNDetector.history` keeps it."""

    step: int
    reasons: list[str]
    """This rank's own; or that the bad result was another rank's."""
    loss: float | str | None = None
    """As in the journal: a number, or the name of what is not a finite one."""
    act: str = ""
    """drop, stop or roll_back."""


class NaNDetector:
    """Looks at each step's result and says whether the optimizer may use it."""

    def __init__(
        self,
        policy: Policy = "warn",
        max_consecutive: int = 10,
        history: int = 100,
        *,
        group: dist.ProcessGroup | None = None,
        on_rollback: Callable[[int], object] | None = None,
    ) -> None:
        """`group`: the ranks that decide together, such as `torch.distributed.group.WORLD`. `on_rollback` is
        called with the step, on every rank, to restore an earlier state; the rollback policy needs it."""
        if policy not in get_args(Policy):
            raise UsageError(
                f"NaNDetector(policy={policy!r}): allowed is one of {', '.join(get_args(Policy))}"
            )
        if max_consecutive < 1 or history < 1:
            raise UsageError(
                f"NaNDetector(max_consecutive={max_consecutive}, history={history}): both must be at least 1"
            )
        if (policy == "rollback") != (on_rollback is not None):
            raise UsageError(
                "NaNDetector: policy='rollback' and on_rollback=… belong together; give the function that "
                "restores an earlier state, or choose another policy"
            )
        self._count = Count(policy, max_consecutive)
        self._group = group
        self._on_rollback = on_rollback
        self._history: deque[BadStep] = deque(maxlen=history)
        self._gradients: Gradients | None = None
        self._model: nn.Module | None = None
        self._flag: torch.Tensor | None = None
        self._calls = 0
        self._rollbacks = 0
        self._furthest = 0
        """The highest step that was bad."""
        self._lonely_told = False
        self._scale: tuple[weakref.ref[torch.amp.GradScaler], Scale] | None = None

    def check(
        self,
        loss: Any = None,
        *,
        model: nn.Module | None = None,
        step: int | None = None,
        scaler: torch.amp.GradScaler | None = None,
    ) -> bool:
        """Whether this step's result may be used. Call it after the backward, on every rank.

        Looks at the loss, and at the gradients of `model`. With a `scaler` that is on, infinities in the
        scaled gradients are left to it, and a step with a bad loss is turned into one that it skips. Too many
        skipped in a row, or a scale that has collapsed, make a bad step (see `holdfast.policy.results`).
        """
        self._calls += 1
        at = self._calls if step is None else step
        scaled = scaler is not None and scaler.is_enabled()
        value, reasons = self._look(loss, model, look_at_gradients=not scaled)
        own = _WRONG if reasons else 0
        if scaler is not None and scaled and (stuck := self._look_at_scale(scaler)):
            reasons += stuck
            own = own or _STUCK
        bad = self._worst(own)
        outcome = self._count.after(bool(bad))
        if not bad:
            if step is not None and at > self._furthest:
                self._rollbacks = 0
            return True
        self._furthest = max(self._furthest, at)
        if model is not None and bad == _WRONG:  # otherwise the gradients may be used, if the scaler does
            _drop(model, spoil=scaled)
        reasons = reasons or ["the result of another rank"]
        self._history.append(BadStep(step=at, reasons=reasons, loss=encode_loss(value), act=str(outcome.act)))
        self._act(at, reasons, outcome)
        return False

    @property
    def history(self) -> list[BadStep]:
        """The last bad steps, oldest first."""
        return list(self._history)

    @property
    def consecutive(self) -> int:
        """Bad steps in a row, up to now."""
        return self._count.in_a_row

    @property
    def total(self) -> int:
        """Bad steps in all."""
        return self._count.total

    def state_dict(self) -> dict[str, Any]:
        return {
            **self._count.state_dict(),
            "calls": self._calls,
            "rollbacks": self._rollbacks,
            "furthest": self._furthest,
            "history": [msgspec.to_builtins(bad) for bad in self._history],
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """What a roll-back restores must not undo the roll-back's own record: its counts only grow."""
        self._count.load_state_dict(dict(state))
        self._calls = int(state.get("calls", 0))
        self._rollbacks = max(self._rollbacks, int(state.get("rollbacks", 0)))
        self._furthest = max(self._furthest, int(state.get("furthest", 0)))
        self._history.clear()
        self._history.extend(msgspec.convert(state.get("history", []), list[BadStep]))

    def _look(
        self, loss: Any, model: nn.Module | None, *, look_at_gradients: bool
    ) -> tuple[float | None, list[str]]:
        if model is not self._model:
            self._model = model
            self._gradients = Gradients([("model", model)]) if model is not None else None
        gradients = self._gradients if look_at_gradients else None
        soundings = gradients.soundings() if gradients is not None else []
        value, sounding = read_together(single_number(loss), soundings)
        kind = not_finite(value) if value is not None else ""
        reasons = [f"the loss is {kind}"] if kind else []
        if gradients is not None and sounding is not None and not math.isfinite(sounding):
            reasons += gradients.bad()
        return value, reasons

    def _look_at_scale(self, scaler: torch.amp.GradScaler) -> list[str]:
        """What the scaler's last update has shown; nothing if there was none since the previous look."""
        if self._scale is None or self._scale[0]() is not scaler:
            self._scale = weakref.ref(scaler), Scale(scaler.get_scale())
        pair = scale_of(scaler)
        scale = self._scale[1]
        return [scale.why] if pair is not None and scale.observe(*read_pair(*pair)) else []

    def _worst(self, bad: int) -> int:
        """The worst value on any rank."""
        if self._group is None:
            if not self._lonely_told and dist.is_available() and dist.is_initialized():
                self._lonely_told = True
                if dist.get_world_size() > 1:
                    log.warning(
                        "holdfast: NaNDetector has no group, so each of %d ranks decides alone; pass "
                        "group=torch.distributed.group.WORLD to keep them together",
                        dist.get_world_size(),
                    )
            return bad
        if self._flag is None:
            on_host = "gloo" in str(dist.get_backend(self._group))
            self._flag = torch.zeros((), dtype=torch.int32, device="cpu" if on_host else "cuda")
        self._flag.fill_(bad)
        dist.all_reduce(self._flag, op=dist.ReduceOp.MAX, group=self._group)
        return int(self._flag)

    def _act(self, step: int, reasons: list[str], outcome: StepOutcome) -> None:
        dropped = f"step {step} is dropped: {'; '.join(reasons)}"
        if outcome.act is Act.DROP:
            if outcome.warn:
                log.warning("holdfast: %s (%d in a row)", dropped, outcome.in_a_row)
            return
        if outcome.act is Act.ROLL_BACK:
            self._rollbacks += 1
            if self._rollbacks <= MAX_ROLLBACKS:
                assert self._on_rollback is not None
                log.warning("holdfast: %s; %s: rolling back", dropped, outcome.why)
                self._count.began_again()
                self._on_rollback(step)
                self._count.began_again()  # the restored state may hold a row of its own
                return
            why = f"{outcome.why}, after {MAX_ROLLBACKS} roll-backs that got no further"
        else:
            why = outcome.why
        raise ValidationFailedError(
            f"{dropped}; {why}. Look at the learning rate and at this step's data, or go back to an older "
            "checkpoint"
        )


@torch.no_grad()
def _drop(model: nn.Module, *, spoil: bool) -> None:
    """Remove the gradients; or, for a scaler, which needs some, make them infinite so that it skips."""
    for parameter in model.parameters():
        if not spoil:
            parameter.grad = None
        elif parameter.grad is not None and (values := plain(parameter.grad)).numel():
            values[(0,) * values.dim()] = math.inf
