"""Losses that a loop only records, and gradient scalers that are stuck: judged at the end of a step."""

from __future__ import annotations

import math
import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import holdfast
from holdfast.errors import SaveFailedError, Stopped, ValidationFailedError
from holdfast.journal.events import RunFinished, SaveSkipped, StepRejected, Warned
from holdfast.policy.results import COLLAPSED, SKIPS, Scale
from holdfast.train.check.checks import Deferred
from kit.ranks.together import together
from kit.runs import events_in
from kit.tiny import checkpoints
from kit.worlds.late_device import LateRing

BATCHES = [torch.ones(2, 6), torch.zeros(2, 6)]


def saved(run_dir: Path) -> list[int]:
    return sorted(int(path.name.split("-")[0].removeprefix("step_")) for path in checkpoints(run_dir))


def record(
    run_dir: Path, losses: dict[int, float], *, until: int = 8, only: int | None = None, **settings: Any
) -> holdfast.Run:
    """A loop that records a loss of 1, or what `losses` says, and saves every second step; `only` one rank
    records."""
    model = nn.Linear(6, 6)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    run = holdfast.Run(run_dir=run_dir, **{"checkpoint_interval": 2, "checkpoint_keep_last": 9, **settings})
    run.track(model=model, optimizer=optimizer)
    rank = torch.distributed.get_rank() if torch.distributed.is_initialized() else 0
    for step, x in run.steps(BATCHES, until=until):
        model(x).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        if only is None or rank == only:
            run.record(loss=losses.get(step, 1.0), samples=2)
    return run


def test_nothing_is_saved_as_good_after_a_loss_that_is_no_number(tmp_path: Path) -> None:
    """The issue's own: NaN from step 5 on was exit 0, with three checkpoints after it."""
    run_dir = tmp_path / "run"
    with pytest.raises(
        ValidationFailedError, match=r"its last step, 8, but that is not saved.*loss is NaN"
    ) as raised:
        record(run_dir, dict.fromkeys(range(5, 9), math.nan))
    assert raised.value.exit_code == 17
    assert saved(run_dir) == [2, 4]
    assert [one.step for one in events_in(run_dir, StepRejected)] == [5, 6, 7, 8]
    (skipped,) = events_in(run_dir, SaveSkipped)
    assert skipped.step == 6
    assert any(
        "because it was only recorded: run.compute()" in one.message for one in events_in(run_dir, Warned)
    )
    assert events_in(run_dir, RunFinished) == []


def test_on_a_device_that_is_behind_it_is_known_before_a_save(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ring = LateRing()
    monkeypatch.setattr(Deferred, "ring_for", lambda self, device: ring)
    with pytest.raises(ValidationFailedError, match="that is not saved"):
        record(tmp_path / "run", dict.fromkeys(range(5, 9), math.nan))
    assert saved(tmp_path / "run") == [2, 4]
    assert [one.step for one in events_in(tmp_path / "run", StepRejected)] == [5, 7, 8]


def test_a_number_after_it_shows_that_the_state_is_well_and_the_save_is_made_up_for(tmp_path: Path) -> None:
    record(tmp_path / "run", {4: math.inf})
    assert saved(tmp_path / "run") == [2, 5, 6, 8]


def test_too_many_in_a_row_stop_the_run_and_raise_stops_at_once(tmp_path: Path) -> None:
    bad = dict.fromkeys(range(3, 40), math.nan)
    with pytest.raises(ValidationFailedError, match="4 bad steps in a row, 4 are too many"):
        record(tmp_path / "many", bad, until=40, validation_max_consecutive=4)
    assert events_in(tmp_path / "many", StepRejected)[-1].step == 6
    with pytest.raises(ValidationFailedError, match="the policy for a bad step is to raise"):
        record(tmp_path / "raise", bad, validation_nan_policy="raise")
    assert [one.step for one in events_in(tmp_path / "raise", StepRejected)] == [3]
    assert saved(tmp_path / "raise") == [2]


def test_a_spike_is_told_and_its_step_is_not_saved_and_a_level_that_stays_is_none(tmp_path: Path) -> None:
    settings = {"validation_check_for_spiky_loss": True, "checkpoint_interval": 20}
    record(tmp_path / "run", dict.fromkeys(range(20, 30), 50.0), until=24, **settings)
    (rejected,) = events_in(tmp_path / "run", StepRejected)
    assert (rejected.step, rejected.then) == (20, "accepted")
    assert saved(tmp_path / "run") == [21, 24]


def test_a_save_that_is_asked_for_is_refused_and_a_stop_does_not_save_what_is_bad(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model = nn.Linear(6, 6)
    run = holdfast.Run(run_dir=tmp_path / "run", checkpoint_interval=0)
    run.track(model=model)
    run.start()
    for loss in (1.0, math.nan):
        run.begin_step()
        run.record(loss=loss)
        run.end_step()
        if loss == 1.0:
            run.save()
    with pytest.raises(SaveFailedError, match=r"step 2 is not saved.*loss is NaN.*save\(diagnostic=True\)"):
        run.save()
    run.save(diagnostic=True)
    os.kill(os.getpid(), signal.SIGTERM)

    def go_on() -> None:
        for _ in range(5):
            run.begin_step()
            run.record(loss=math.nan)
            run.end_step()

    with pytest.raises(Stopped):
        go_on()
    run._halting.give_signals_back()  # else a process that has stopped keeps them to its end,
    run._halting.deadline.disarm()  # and has one
    assert saved(tmp_path / "run") == [1]
    assert "its state is bad, so step_00000001-" in caplog.text


def test_all_ranks_act_alike_on_a_loss_that_one_of_them_records(tmp_path: Path) -> None:
    """Rank 0 alone records losses, as many loops do; and a loss counts for the whole job."""

    def work(rank: int) -> list[str]:
        ends = []
        for name, policy in (("warn", "warn"), ("raise", "raise")):
            try:
                run = record(tmp_path / name, {3: math.nan}, only=1, validation_nan_policy=policy)
                ends.append(f"{run.samples}")
            except ValidationFailedError as error:
                ends.append(str(error).split(":")[0])
        return ends

    first, second = together(tmp_path, 2, work)
    assert first == second == ["16", "step 3 is not finite"]
    assert saved(tmp_path / "warn") == [2, 4, 6, 8]
    assert saved(tmp_path / "raise") == [2]
    assert events_in(tmp_path / "warn", StepRejected)[0].ranks == [1]


# --- gradient scalers ---------------------------------------------------------------------------------------


def scaled(run_dir: Path, *, bad_from: int, shape: str, until: int = 150, **settings: Any) -> int:
    """Train with a scaler, and gradients that are NaN from a step on although the loss is a number."""
    model = nn.Linear(6, 6)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu")
    run = holdfast.Run(run_dir=run_dir, **{"checkpoint_interval": 4, **settings})
    run.track(model=model, optimizer=optimizer, scaler=scaler)

    def forward_backward(x: torch.Tensor) -> float:
        loss = model(x).square().mean()
        scaler.scale(loss).backward()
        if run.step + 1 >= bad_from:
            assert model.weight.grad is not None
            model.weight.grad.fill_(math.nan)
        return loss.item()

    for _, x in run.steps(BATCHES, until=until):
        if shape == "compute":
            run.compute(forward_backward, x)
        else:
            run.record(loss=forward_backward(x))
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    return run.step


@pytest.mark.parametrize("shape", ["compute", "record"])
def test_a_scaler_that_leaves_steps_out_for_ever_ends_the_run_and_nothing_is_saved_meanwhile(
    tmp_path: Path, shape: str
) -> None:
    """150 steps, weights that never moved, a scale of 4.6e-41, and code 0 it was."""
    run_dir = tmp_path / "run"
    with pytest.raises(
        ValidationFailedError, match=r"the gradient scaler has left out \d+ steps in a row.*too many"
    ):
        scaled(run_dir, bad_from=1, shape=shape)
    last = events_in(run_dir, StepRejected)[-1]
    assert SKIPS <= last.step <= SKIPS + 10 + 16
    assert max(saved(run_dir)) < SKIPS + 1


def test_a_scaler_that_begins_too_high_is_let_find_its_scale(tmp_path: Path) -> None:
    assert scaled(tmp_path / "run", bad_from=1000, shape="compute", until=20) == 20
    assert events_in(tmp_path / "run", StepRejected) == []


@given(st.lists(st.sampled_from(["good", "skip", "nothing"]), max_size=200), st.sampled_from([1.0, 2.0**16]))
def test_only_many_skips_in_a_row_or_a_lost_scale_are_bad(events: list[str], begins: float) -> None:
    """Against the plain rule, written out."""
    watch, scale, good, row = Scale(begins), begins, 0, 0
    watch.observe(scale, good)
    for event in events:
        if event == "skip":
            scale, good, row = scale / 2, 0, row + 1
        elif event == "good":
            good, row = good + 1, 0
        lost = scale < COLLAPSED
        bad = watch.observe(scale, good)
        assert bad == (lost or (event == "skip" and row >= SKIPS))
        assert bool(watch.why) == (lost or row >= SKIPS)


def test_a_detector_with_a_scaler_sees_it_too() -> None:
    model = nn.Linear(3, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu")
    detector = holdfast.NaNDetector("skip", max_consecutive=3)
    answers = []

    def step() -> None:
        optimizer.zero_grad()
        scaler.scale(model(torch.ones(4, 3)).square().mean()).backward()
        assert model.weight.grad is not None
        model.weight.grad.fill_(math.nan)
        answers.append(detector.check(1.0, model=model, scaler=scaler))
        scaler.step(optimizer)
        scaler.update()

    for _ in range(SKIPS + 2):
        step()
    with pytest.raises(ValidationFailedError, match="has left out 34 steps in a row"):
        step()
    assert answers == [True] * SKIPS + [False] * 2
    assert "the gradient scaler has left out 32 steps" in detector.history[0].reasons[0]
