"""Deferred checks, with a device that lags behind as far as a test wants. On CUDA: tests/gpu."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import nn

from holdfast.checkpoint.state.tracked import Tracked
from holdfast.config import sources
from holdfast.config.sections import ValidationSettings
from holdfast.errors import ConfigError
from holdfast.policy.results import ENOUGH
from holdfast.train.check.checks import DEPTH, Checks, Deferred, Ring
from kit.worlds.late_device import LateRing

NAN = math.nan


class Late(Deferred):
    def __init__(self, checks: Checks) -> None:
        super().__init__(checks)
        self.late = LateRing()

    def ring_for(self, device: torch.device) -> Ring | None:
        return self.late


def model_and_checks(**settings: Any) -> tuple[nn.Linear, Checks]:
    model = nn.Linear(2, 2)
    tracked = Tracked()
    tracked.add("model", model)
    return model, Checks(ValidationSettings(**settings), tracked)


def test_a_bad_step_is_told_as_soon_as_the_device_is_done_with_it_and_only_once() -> None:
    _, checks = model_and_checks()
    deferred = Late(checks)
    for step in range(1, 6):
        deferred.note(step, NAN if step in (2, 4) else 1.0)
    assert deferred.bad() == []
    deferred.late.done = 3
    ((step, look),) = deferred.bad()
    assert (step, look.reasons, look.finite) == (2, ["the loss is NaN"], False)
    assert deferred.bad() == []
    assert [step for step, _ in deferred.settle()] == [4]
    assert deferred.settle() == []
    assert deferred.pending == 0


def test_the_host_never_waits_until_the_device_is_as_far_behind_as_the_ring_is_deep() -> None:
    _, checks = model_and_checks()
    deferred = Late(checks)
    for step in range(1, DEPTH + 1):
        deferred.note(step, NAN)
        assert deferred.bad() == []
    assert deferred.late.waited == 0
    deferred.note(DEPTH + 1, 1.0)
    assert deferred.late.waited == 1
    assert [step for step, _ in deferred.bad()] == [1]
    assert [step for step, _ in deferred.settle()] == list(range(2, DEPTH + 1))


def test_gradients_are_seen_as_they_were_when_the_step_was_noted() -> None:
    model, checks = model_and_checks()
    deferred = Late(checks)
    model.weight.grad = torch.tensor([[1.0, math.inf], [0.0, 0.0]])
    deferred.note(1, 1.0)
    model.weight.grad = None
    deferred.note(2, 1.0)
    ((step, look),) = deferred.settle()
    assert (step, look.reasons) == (1, ["the gradients hold a NaN or an infinity"])


def test_a_step_without_a_loss_or_without_gradients_is_not_bad() -> None:
    _, checks = model_and_checks()
    deferred = Late(checks)
    deferred.note(1, None)
    deferred.note(2, 1.0)
    assert deferred.settle() == []


def test_steps_are_judged_in_order_so_that_spikes_are_the_same_as_at_once() -> None:
    losses = [1.0] * ENOUGH + [20.0, 1.0, 300.0, NAN, 4000.0]
    _, checks = model_and_checks(check_for_spiky_loss=True)
    at_once = []
    for step, loss in enumerate(losses, 1):
        look = checks.look(loss)
        if look.reasons:
            at_once.append((step, look.reasons))
        if look.finite:  # what is only odd is accepted
            checks.accepted(look)
    _, checks = model_and_checks(check_for_spiky_loss=True)
    deferred = Late(checks)
    for step, loss in enumerate(losses, 1):
        deferred.note(step, loss)
        deferred.late.done = max(0, step - 3)
    assert [(step, look.reasons) for step, look in deferred.settle()] == at_once
    assert len(at_once) == 4


def test_on_the_host_a_step_is_judged_at_once() -> None:
    model, checks = model_and_checks()
    deferred = Deferred(checks)
    loss = model(torch.ones(2)).sum()
    loss.backward()
    deferred.note(1, loss)
    assert deferred.bad() == []
    assert model.weight.grad is not None
    model.weight.grad[0, 0] = NAN
    deferred.note(2, loss)
    ((step, look),) = deferred.bad()
    assert (step, look.reasons) == (2, ["the gradients hold a NaN: model.weight"])


@pytest.mark.parametrize("mode", ["validate_results", "report_determinism_stats"])
def test_re_running_with_deferred_checks_is_refused_at_the_start_with_the_reason(mode: str) -> None:
    with pytest.raises(ConfigError, match=r"validation.deferred.*validation.rerun_mode.*after the optimizer"):
        sources.load(None, environ={}, keywords={"validation_deferred": True, "validation_rerun_mode": mode})


def test_dropping_with_deferred_checks_is_refused_at_the_start_with_the_reason() -> None:
    with pytest.raises(ConfigError, match=r"validation.deferred.*validation.nan_policy.*after the optimizer"):
        sources.load(
            None, environ={}, keywords={"validation_deferred": True, "validation_nan_policy": "skip"}
        )
    for policy in ("warn", "raise", "rollback"):
        sources.load(
            None, environ={}, keywords={"validation_deferred": True, "validation_nan_policy": policy}
        )
