"""Losses that are only recorded, and scalers, on a real device: known before a save, and never waited for."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from torch import nn

import holdfast
from holdfast.health.judgements import HealthStatus
from holdfast.health.network import all_reduce, check_links
from holdfast.train.check.checks import Scales

pytestmark = pytest.mark.gpu
CUDA = torch.device("cuda", 0)


def steps_of(directory: Path) -> list[int]:
    return sorted(int(path.name[5:13]) for path in (directory / "checkpoints").glob("step_*"))


@pytest.mark.parametrize("deferred", [False, True])
def test_nothing_is_saved_after_a_recorded_loss_that_is_no_number(tmp_path: Path, deferred: bool) -> None:
    """A loop of `steps` and `record`, on a device that is behind."""
    torch.manual_seed(0)
    model = nn.Linear(8, 8).to(CUDA)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    run = holdfast.Run(run_dir=tmp_path, checkpoint_interval=2, validation_deferred=deferred)
    run.track(model=model, optimizer=optimizer)

    def train() -> None:
        for step, _ in run.steps([0] * 8, until=8):
            torch.cuda._sleep(20_000_000)
            loss = model(torch.ones(4, 8, device=CUDA)).square().mean()
            if step >= 5:
                loss = loss * math.nan
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            run.record(loss=loss.detach())

    with pytest.raises(holdfast.HoldfastError, match="NaN"):
        train()
    assert steps_of(tmp_path) == [2, 4]


def test_a_scaler_that_leaves_every_step_out_ends_the_run_and_nothing_is_saved(tmp_path: Path) -> None:
    model = nn.Linear(8, 8).to(CUDA)
    before = model.weight.detach().clone()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cuda", init_scale=2.0)
    run = holdfast.Run(run_dir=tmp_path, checkpoint_interval=50, checkpoint_save_at_end=False)
    run.track(model=model, optimizer=optimizer, scaler=scaler)

    def forward_backward() -> torch.Tensor:
        loss = model(torch.ones(4, 8, device=CUDA)).square().mean()
        scaler.scale(loss).backward()
        model.weight.grad.fill_(math.nan)
        return loss.detach()

    def train() -> None:
        for _ in run.steps([0] * 400, until=400):
            run.compute(forward_backward)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()

    with pytest.raises(holdfast.HoldfastError, match="scal"):
        train()
    assert run.step < 400
    assert torch.equal(before, model.weight)
    assert steps_of(tmp_path) == []


def test_looking_at_scales_never_waits_for_a_busy_device() -> None:
    scaler = torch.amp.GradScaler("cuda")
    scaler.scale(torch.ones((), device=CUDA))
    scales = Scales([scaler])
    scales.note(0)
    scales.found(wait=True)
    torch.cuda.synchronize()
    torch.cuda._sleep(400_000_000)
    torch.cuda.set_sync_debug_mode("error")
    try:
        for step in range(1, 5):
            scales.note(step)
            assert scales.found() == []
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert scales.pending
    scales.found(wait=True)
    assert not scales.pending


def test_the_networks_probe_reduces_over_nccl() -> None:
    """One device makes a world of one: the group, the reduction and the check of its sum are real."""
    found = all_reduce(torch.distributed.HashStore(), "nccl", 0, 1)
    print("reduced", found)
    assert found.status is HealthStatus.OK, found


def test_nvlink_counters_are_read_or_absent() -> None:
    found = check_links()
    print("links", found)
    assert not [one for one in found if one.status is HealthStatus.CRITICAL], found
