"""Checks on a real device: at once with one wait, deferred with none."""

from __future__ import annotations

import gc
import math
import warnings
from typing import Any

import pytest
import torch
from torch import nn

from holdfast.checkpoint.state.tracked import Tracked
from holdfast.config.sections import ValidationSettings
from holdfast.train.check.checks import DEPTH, Checks, Deferred, read_together

pytestmark = pytest.mark.gpu
CUDA = torch.device("cuda", 0)
CYCLES = 400_000_000
"""At least 0.2 s."""


def model_and_checks(**settings: Any) -> tuple[nn.Module, Checks]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64).half(), nn.Linear(64, 64).bfloat16()).to(CUDA)
    for parameter in model.parameters():
        parameter.grad = torch.randn_like(parameter)
    tracked = Tracked()
    tracked.add("model", model)
    return model, Checks(ValidationSettings(**settings), tracked)


def busy() -> None:
    torch.cuda._sleep(CYCLES)


def idle() -> bool:
    return bool(torch.cuda.current_stream(CUDA).query())


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_every_bad_element_is_seen_at_once_and_deferred(value: float) -> None:
    model, checks = model_and_checks()
    deferred = Deferred(checks)
    loss = torch.ones((), device=CUDA)
    assert checks.look(loss).reasons == []
    step = 0
    for parameter in model.parameters():
        assert parameter.grad is not None
        flat = parameter.grad.view(-1)
        for at in (0, flat.numel() // 2, flat.numel() - 1):
            kept = flat[at].clone()
            flat[at] = value
            assert not checks.look(loss).finite
            step += 1
            deferred.note(step, loss)
            flat[at] = kept
    assert [number for number, _ in deferred.settle()] == list(range(1, step + 1))
    assert checks.look(loss).reasons == []


def test_a_look_makes_the_host_wait_once() -> None:
    _, checks = model_and_checks()
    loss = torch.ones((), device=CUDA)
    checks.look(loss)
    with warnings.catch_warnings(record=True) as waits:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            checks.look(loss)
        finally:
            torch.cuda.set_sync_debug_mode("default")
    assert len([wait for wait in waits if "called a synchronizing" in str(wait.message)]) == 1


def test_noting_and_asking_never_wait_for_a_busy_device() -> None:
    model, checks = model_and_checks()
    deferred = Deferred(checks)
    loss = torch.full((), math.nan, device=CUDA)
    deferred.note(0, loss)
    deferred.settle()
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        busy()
        for step in range(1, 20):
            deferred.note(step, loss)
            assert deferred.bad() == []
        assert not idle()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert [step for step, _ in deferred.settle()] == list(range(1, 20))
    assert all(parameter.grad is not None for parameter in model.parameters())


def test_a_device_that_is_far_behind_is_waited_for_and_nothing_is_lost() -> None:
    _, checks = model_and_checks()
    deferred = Deferred(checks)
    busy()
    told = []
    for step in range(1, 3 * DEPTH):
        loss = torch.full((), math.nan if step % 7 == 0 else 1.0, device=CUDA)
        deferred.note(step, loss)
        told += [number for number, _ in deferred.bad()]
    told += [number for number, _ in deferred.settle()]
    assert told == [step for step in range(1, 3 * DEPTH) if step % 7 == 0]


def test_nothing_is_allocated_on_the_device_that_is_not_used_again() -> None:
    _, checks = model_and_checks()
    deferred = Deferred(checks)
    loss = torch.ones((), device=CUDA)

    def steps(number: int) -> tuple[int, int, int]:
        for step in range(number):
            checks.look(loss)
            deferred.note(step, loss)
            deferred.bad()
        deferred.settle()
        stats = torch.cuda.memory_stats(CUDA)
        return (
            stats["allocated_bytes.all.current"],
            stats["reserved_bytes.all.current"],
            stats["allocated_bytes.all.peak"],
        )

    gc.collect()  # what an earlier test left behind must not be freed in between
    before = steps(100)
    assert steps(500) == before


def test_a_huge_half_precision_gradient_is_not_called_infinite() -> None:
    model, checks = model_and_checks()
    for parameter in model.parameters():
        assert parameter.grad is not None
        parameter.grad.fill_(60_000.0)
    deferred = Deferred(checks)
    deferred.note(1, torch.ones((), device=CUDA))
    assert deferred.settle() == []
    _, norm = read_together(None, checks.gradients().soundings())
    assert norm is not None
    assert norm == pytest.approx(60_000 * math.sqrt(sum(p.numel() for p in model.parameters())), rel=1e-2)
