"""What is not finite reaches no optimizer, on no rank, whatever the policy says; and all ranks end alike."""

from __future__ import annotations

import itertools
import math
from pathlib import Path

import pytest
import torch

from holdfast.errors import ExitCode
from holdfast.journal.events import StepRejected, Warned
from holdfast.policy.results import Kind
from kit.ranks.validated import Ended, Place, Training


def nan_at(*steps: int, on: int = 0, value: float = math.nan) -> object:
    """Spoils these steps on one rank, gradients included."""

    def spoil(step: int, rank: int, loss: torch.Tensor) -> torch.Tensor:
        return loss * value if step in steps and rank == on else loss

    return spoil


def kept(ended: Ended) -> list[bool]:
    """Of each step after the first: whether it left the parameters as they were."""
    parameters = ended.field("parameters")
    return [before == after for before, after in itertools.pairwise(parameters)]


@pytest.mark.parametrize("policy", ["warn", "skip"])
@pytest.mark.parametrize(
    ("wrap", "shape"), [("none", "one"), ("ddp", "calls"), ("fsdp", "one"), ("fsdp", "calls")]
)
def test_a_nan_on_one_rank_drops_the_step_on_all_of_them(
    tmp_path: Path, wrap: str, shape: str, policy: str
) -> None:
    """D5. With micro-batches the first one is bad, and the second one's gradients are dropped too."""
    world = 1 if wrap == "none" else 2
    place = Place(tmp_path)

    def spoil(step: int, rank: int, loss: torch.Tensor) -> torch.Tensor:
        nonlocal calls
        calls += 1
        return loss * math.nan if step == 3 and rank == world - 1 and (shape == "one" or calls == 5) else loss

    calls = 0
    training = Training(wrap, shape, settings={"validation_nan_policy": policy}, spoil=spoil)
    ended = place.train(training, world)
    for one in ended:
        assert one.code == 0, one.error
        assert one.field("dropped") == [False, False, True, False]
        assert kept(one) == [False, True, False]
        assert one.field("tokens") == [one.field("tokens")[0] * step for step in (1, 2, 3, 4)], "it counts"
    if wrap == "ddp":
        assert ended[0].field("parameters") == ended[1].field("parameters")
    (told,) = place.events(StepRejected)
    assert (told.step, told.then, told.ranks) == (3, "dropped", [world - 1])
    warned = [one.message for one in place.events(Warned) if "step 3" in one.message]
    assert len(warned) == (policy == "warn"), warned


def test_a_rank_whose_loss_is_fine_is_not_accused_of_the_gradients_of_another(tmp_path: Path) -> None:
    """Reduced gradients are bad everywhere; whose they were, the losses tell."""
    place = Place(tmp_path)
    place.train(Training("ddp", spoil=nan_at(2, on=1)), 2)
    (told,) = place.events(StepRejected)
    assert told.ranks == [1]
    assert all(reason.startswith("rank 1: ") for reason in told.reasons)


@pytest.mark.parametrize(("wrap", "shape"), [("none", "one"), ("ddp", "calls")])
def test_a_scaler_backs_off_once_and_alike_when_a_step_is_dropped(
    tmp_path: Path, wrap: str, shape: str
) -> None:
    world = 1 if wrap == "none" else 2
    ended = Place(tmp_path).train(Training(wrap, shape, scaler=True, spoil=nan_at(2, on=world - 1)), world)
    for one in ended:
        assert one.code == 0, one.error
        assert one.field("scale") == [8.0, 4.0, 4.0, 8.0]
        assert kept(one) == [True, False, False]


def test_a_step_that_has_unscaled_its_gradients_is_dropped_by_the_scaler_too(tmp_path: Path) -> None:
    """They were fine when they were looked at, and nobody looks again: the scaler is told."""
    (one,) = Place(tmp_path).train(Training(scaler=True, false_at=2))
    assert one.code == 0, one.error
    assert one.field("scale") == [8.0, 4.0, 4.0, 8.0]
    assert kept(one) == [True, False, False]


def test_a_scalers_own_overflow_is_its_own_matter(tmp_path: Path) -> None:
    place = Place(tmp_path)

    def overflow(step: int, rank: int, loss: torch.Tensor) -> torch.Tensor:
        return loss + (loss - loss.detach()) * 3e38 if step == 2 else loss

    (ended,) = place.train(Training(scaler=True, spoil=overflow))
    assert ended.code == 0, ended.error
    assert (ended.field("dropped"), kept(ended)) == ([False] * 4, [True, False, False])
    assert place.events(StepRejected) == []


@pytest.mark.parametrize("world", [1, 2])
def test_the_policy_raise_stops_every_rank_with_its_code(tmp_path: Path, world: int) -> None:
    place = Place(tmp_path)
    training = Training(
        "ddp" if world > 1 else "none",
        settings={"validation_nan_policy": "raise"},
        spoil=nan_at(3, on=world - 1, value=-math.inf),
    )
    for one in place.train(training, world):
        assert one.code == ExitCode.VALIDATION_FAILED, one.error
        assert "step 3 is not finite" in one.error
        assert sorted(one.steps) == [1, 2]
    assert place.rejection() is None
    assert [one.then for one in place.events(StepRejected)] == ["stop"]


def test_too_many_dropped_steps_in_a_row_stop_the_run_and_a_good_one_between_does_not(
    tmp_path: Path,
) -> None:
    settings = {"validation_max_consecutive": 2, "validation_nan_policy": "skip"}
    place = Place(tmp_path / "row")
    for one in place.train(Training("ddp", settings=settings, spoil=nan_at(2, 3, on=1)), 2):
        assert one.code == ExitCode.VALIDATION_FAILED, one.error
        assert "2 bad steps in a row" in one.error
        assert sorted(one.steps) == [1, 2]
    (one,) = Place(tmp_path / "apart").train(Training(settings=settings, spoil=nan_at(2, 4)))
    assert one.code == 0, one.error


def test_a_row_goes_on_after_a_resume(tmp_path: Path) -> None:
    settings = {"validation_max_consecutive": 2, "checkpoint_save_at_end": True}
    place = Place(tmp_path)
    (one,) = place.train(Training(until=2, settings=settings, spoil=nan_at(2)))
    assert one.code == 0, one.error
    (own,) = place.own_parts()
    assert own["validation"]["nonfinite"]["in_a_row"] == 1
    (one,) = place.train(Training(settings=settings, spoil=nan_at(3)))
    assert one.code == ExitCode.VALIDATION_FAILED, one.error


def test_rolling_back_asks_the_launcher_and_is_refused_without_one(tmp_path: Path) -> None:
    place = Place(tmp_path)
    settings = {"validation_max_consecutive": 2, "validation_nan_policy": "rollback"}
    training = Training("ddp", settings=settings, spoil=nan_at(2, 3, on=1))
    for one in place.train(training, 2):
        assert one.code == ExitCode.USAGE, one.error
        assert "validation.nan_policy = rollback" in one.error
    launched = place.launched(world=2)
    for one in place.train(training, 2, launched=launched, devices="0,1"):
        assert one.code == ExitCode.RERUN_WANTED, one.error
        assert kept(one) == [True]
    rejection = place.rejection(launched.attempt)
    assert rejection is not None
    assert (rejection.kind, rejection.step, [one.rank for one in rejection.bad]) == (Kind.ROLLBACK, 3, [1])
    assert not rejection.rerun


@pytest.mark.parametrize("world", [1, 2])
def test_the_callback_shape_checks_and_drops_too(tmp_path: Path, world: int) -> None:
    place = Place(tmp_path)
    wrap = "ddp" if world > 1 else "none"
    for one in place.train(Training(wrap, "check", spoil=nan_at(3, on=world - 1)), world):
        assert one.code == 0, one.error
        assert one.field("dropped") == [False, False, True, False]
        assert kept(one) == [False, True, False]


def test_a_spike_that_is_not_run_again_is_accepted_with_a_warning(tmp_path: Path) -> None:
    place = Place(tmp_path)
    settings = {"validation_check_for_spiky_loss": True}
    (one,) = place.train(Training(until=18, settings=settings, spoil=nan_at(17, value=1e4)))
    assert one.code == 0, one.error
    assert not any(one.field("dropped"))
    assert [(told.step, told.then) for told in place.events(StepRejected)] == [(17, "accepted")]
    assert any("step 17 is accepted although it is odd" in told.message for told in place.events(Warned))


def test_an_optimizer_stepped_in_spite_of_it_changes_nothing(tmp_path: Path) -> None:
    """Without the scaler that is tracked, or with gradients that came later: they are gone by then."""
    (one,) = Place(tmp_path).train(Training(scaler=True, spoil=nan_at(2), bypass=True))
    assert one.code == 0, one.error
    assert kept(one)[0]


def test_ranks_that_call_compute_unequally_often_are_told_so(tmp_path: Path) -> None:
    for one in Place(tmp_path).train(Training("none", "one", uneven=True), 2):
        assert one.code == ExitCode.USAGE, one.error
        assert "as many calls in a step as the others" in one.error


def test_with_everything_off_nothing_is_exchanged_and_with_checks_one_a_step(tmp_path: Path) -> None:
    off = {"validation_check_for_nan_in_loss": False, "validation_check_for_nan_in_grad": False}
    for settings, expected in ((off, 1), ({}, 5)):  # one after the first step is for what was forgotten
        for one in Place(tmp_path / str(expected)).train(Training("ddp", settings=settings), 2):
            assert one.code == 0, one.error
            assert one.field("exchanges")[-1] == expected
