"""A step that was rejected and run again leaves no trace: the run is bitwise one without the fault."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import holdfast
from holdfast.errors import ExitCode
from holdfast.journal.events import DeterminismMeasured, StepRejected, Verdict, Warned
from kit.ranks.validated import Ended, Place, Training

RERUN = {"validation_rerun_mode": "validate_results"}
ONCE = {**RERUN, "validation_error_injection_step": 3, "validation_error_injection_type": "transient_error"}


def same(one: list[Ended], other: list[Ended]) -> None:
    for rank, (a, b) in enumerate(zip(one, other, strict=True)):
        assert (a.code, b.code) == (0, 0), a.error + b.error
        for name in ("loss", "ids", "weights", "rng", "tokens", "scale"):
            assert a.field(name) == b.field(name), f"rank {rank}: {name}"
        assert len(a.steps) == 4


CASES = [
    ("none", "one", True), ("none", "calls", False), ("none", "inside", True), ("none", "iterator", False),
    ("ddp", "one", False), ("ddp", "calls", True), ("ddp", "iterator", False),
    ("fsdp", "one", False), ("fsdp", "calls", False), ("fsdp", "inside", False),
]  # fmt: skip


@pytest.mark.parametrize(("wrap", "shape", "scaler"), CASES)
def test_a_step_that_was_run_again_leaves_no_trace(
    tmp_path: Path, wrap: str, shape: str, scaler: bool
) -> None:
    """D3: random numbers, buffers, gradients, scaler and micro-batches are put back."""
    world = 1 if wrap == "none" else 2
    usual = Place(tmp_path / "usual").train(Training(wrap, shape, scaler), world)
    place = Place(tmp_path / "faulty")
    ranks = {"validation_error_injection_ranks": "1"} if world > 1 else {}
    settings: dict[str, Any] = {**ONCE, **ranks}
    faulty = place.train(Training(wrap, shape, scaler, settings=settings), world)
    same(usual, faulty)
    (told,) = place.events(StepRejected)
    assert (told.step, told.ranks, told.then) == (3, [world - 1], "rerun")
    (verdict,) = place.events(Verdict)
    assert (verdict.verdict, verdict.step) == ("transient", 3)
    assert place.rejection() is None


def odd_once(look: int) -> Any:
    """A check that rejects one look on the last rank, the `look`-th, and never again."""

    def prepare(run: holdfast.Run) -> None:
        looks = 0

        def check(loss: float) -> bool:
            nonlocal looks
            looks += 1
            return looks == look and (dist.get_rank() == 1 if dist.is_initialized() else True)

        run.add_check("once", check)

    return prepare


@pytest.mark.parametrize("wrap", ["none", "ddp", "fsdp"])
def test_the_second_micro_batch_alone_is_run_again_and_the_gradients_of_the_first_stay(
    tmp_path: Path, wrap: str
) -> None:
    """Under FSDP2 they are where nobody sees them: in unsharded parameters."""
    world = 1 if wrap == "none" else 2
    usual = Place(tmp_path / "usual").train(Training(wrap, "calls"), world)
    place = Place(tmp_path / "faulty")
    faulty = place.train(Training(wrap, "calls", settings=RERUN, prepare=odd_once(6)), world)
    same(usual, faulty)
    assert [(one.step, one.then) for one in place.events(StepRejected)] == [(3, "rerun")]


def test_measuring_determinism_changes_nothing_and_reports_percentiles(tmp_path: Path) -> None:
    """D7. With 1 % of noise that no seed controls it is measured, too."""
    usual = Place(tmp_path / "usual").train(Training("ddp", "iterator"), 2)
    place = Place(tmp_path / "measured")
    mode = {"validation_rerun_mode": "report_determinism_stats"}
    same(usual, place.train(Training("ddp", "iterator", settings=mode), 2))
    (told,) = place.events(DeterminismMeasured)
    assert (told.steps, told.p50, told.p999, told.largest, told.ranks) == (4, 0.0, 0.0, 0.0, 2)
    calls = 0

    def only_rank_1_is_off(step: int, rank: int, loss: torch.Tensor) -> torch.Tensor:
        nonlocal calls
        calls += 1
        return loss * 1.25 if rank == 1 and calls % 2 == 0 else loss

    elsewhere = Place(tmp_path / "elsewhere")
    ended = elsewhere.train(Training("ddp", settings=mode, spoil=only_rank_1_is_off), 2)
    assert {one.code for one in ended} == {0}
    (told,) = elsewhere.events(DeterminismMeasured)
    assert told.p50 == pytest.approx(0.2), "rank 0 repeats to the bit, and would have said 0"
    assert (told.worst_rank, told.ranks) == (1, 2)

    def second_is_off(step: int, rank: int, loss: torch.Tensor) -> torch.Tensor:
        nonlocal calls
        calls += 1
        return loss * 1.001 if calls % 2 == 0 else loss

    (one,) = Place(tmp_path / "first").train(Training(settings=mode, spoil=second_is_off))
    alone = Place(tmp_path / "alone").train(Training())
    assert one.field("weights") == alone[0].field("weights"), "training goes on with the first result"
    noisy = Place(tmp_path / "noisy")

    def spoil(step: int, rank: int, loss: torch.Tensor) -> torch.Tensor:
        return loss * (1 + 0.01 * int.from_bytes(os.urandom(2)) / 65536)

    assert noisy.train(Training(settings=mode, spoil=spoil))[0].code == 0
    (told,) = noisy.events(DeterminismMeasured)
    assert 0.0 < told.p50 <= told.largest < 0.01


def test_a_batch_that_the_step_changes_in_place_is_not_run_again_but_said(tmp_path: Path) -> None:
    place = Place(tmp_path)
    training = Training(settings={**ONCE, "validation_nan_policy": "skip"}, in_place=True)
    (ended,) = place.train(training)
    assert ended.code == 0, ended.error
    assert ended.field("dropped") == [False, False, True, False]
    assert any("changed in place" in one.message for one in place.events(Warned))


def test_an_optimizer_stepped_inside_compute_is_refused_where_steps_are_run_again(tmp_path: Path) -> None:
    place = Place(tmp_path)
    (ended,) = place.train(Training(settings=RERUN, steps_inside=True))
    assert ended.code == ExitCode.USAGE
    assert "stepped inside run.compute()" in ended.error
    (ended,) = Place(tmp_path / "off").train(Training(steps_inside=True))
    assert ended.code == 0
    told = [one.message for one in Place(tmp_path / "off").events(Warned)]
    assert len([one for one in told if "stepped inside run.compute()" in one]) == 1


MODES = ["disabled", "validate_results", "report_determinism_stats"]


@pytest.mark.parametrize("before", MODES)
def test_what_is_saved_in_any_mode_goes_on_in_any_other(tmp_path: Path, before: str) -> None:
    """D1. And no mode leaves anything of its own in a checkpoint."""
    usual = Place(tmp_path / "usual").train(Training())
    for after in MODES:
        place = Place(tmp_path / after)
        settings = {"checkpoint_save_at_end": True}
        first = Training(until=2, settings={**settings, "validation_rerun_mode": before})
        second = Training(settings={**settings, "validation_rerun_mode": after})
        (one,), (other,) = place.train(first), place.train(second)
        assert (one.code, other.code) == (0, 0), one.error + other.error
        assert sorted(other.steps) == [3, 4]
        for name in ("loss", "weights", "rng", "ids"):
            assert one.field(name) + other.field(name) == usual[0].field(name)
        assert all("validation" not in own for own in place.own_parts())
