"""Checks that look back, the corruption watch as part of a run, and what a re-run is made of."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import holdfast
from holdfast.checkpoint.state.tracked import Tracked
from holdfast.errors import ExitCode
from holdfast.journal.events import StepRejected, Verdict, Warned
from holdfast.policy.results import Kind
from holdfast.train.check.rerun import Rewind, difference
from kit.ranks.validated import Place, Training
from kit.tiny import checkpoints

DEFERRED = {"validation_deferred": True}


def nan_on_rank_1(step: int, rank: int, loss: torch.Tensor) -> torch.Tensor:
    return loss * math.nan if step == 2 and rank == 1 else loss


@pytest.mark.parametrize("policy", ["warn", "raise", "rollback"])
def test_deferred_checks_find_a_bad_step_before_its_state_is_saved(tmp_path: Path, policy: str) -> None:
    """It was used by then: the run goes back, stops, or goes on, and nothing of it is saved."""
    place = Place(tmp_path)
    settings = {**DEFERRED, "validation_nan_policy": policy, "checkpoint_interval": 3}
    training = Training("ddp", settings=settings, spoil=nan_on_rank_1)
    ended = place.train(training, 2, launched=place.launched(world=2), devices="0,1")
    code = ExitCode.RERUN_WANTED if policy == "rollback" else ExitCode.VALIDATION_FAILED
    assert {one.code for one in ended} == {code}, ended[0].error
    told = place.events(StepRejected)[0]
    assert (told.step, told.ranks) == (2, [1])
    found = place.rejection(1)
    if policy == "rollback":
        assert found is not None
        assert (found.kind, found.step) == (Kind.ROLLBACK, 2)
    else:
        assert found is None
    if policy == "warn":
        assert any("an optimizer has used it" in one.message for one in place.events(Warned))
        assert "has reached its last step, 4, but that is not saved" in ended[0].error
    assert checkpoints(place.run_dir) == []
    assert ended[0].field("exchanges")[-1] <= 2, "none in a step, but for the first"


def test_the_corruption_watch_in_a_run_leaves_no_trace_and_finds_a_bad_device(tmp_path: Path) -> None:
    usual = Place(tmp_path / "usual").train(Training("ddp"), 2)
    watch = {"validation_corruption_watch_interval": 2}
    place = Place(tmp_path / "watched")
    watched = place.train(Training("ddp", settings=watch), 2)
    for one, other in zip(usual, watched, strict=True):
        assert other.code == 0, other.error
        for name in ("loss", "weights", "rng", "ids", "tokens"):
            assert one.field(name) == other.field(name), name
    assert place.events(StepRejected) == []

    flips = Place(tmp_path / "flips")
    calls = 0

    def flip(step: int, rank: int, loss: torch.Tensor) -> torch.Tensor:
        """Finite, and wrong, the first time that step 2 is computed."""
        nonlocal calls
        calls += 1
        return loss * 1.5 if calls == 2 else loss

    settings: dict[str, Any] = {**watch, "validation_rerun_mode": "validate_results"}
    (ended,) = flips.train(Training(settings=settings, spoil=flip))
    assert ended.code == 0, ended.error
    assert [one.verdict for one in flips.events(Verdict)] == ["transient"]
    assert ended.field("weights") == Place(tmp_path / "one").train(Training())[0].field("weights")


def test_a_difference_knows_nan_and_the_infinities() -> None:
    """D7: NaN equals NaN, +Inf does not equal -Inf."""
    nan, inf = math.nan, math.inf
    for one, other in ((nan, nan), (inf, inf), (-inf, -inf), (2.0, 2.0), (0.0, -0.0), (None, None)):
        assert difference(one, other) == 0.0
    for one, other in ((inf, -inf), (nan, 1.0), (1.0, inf), (None, 1.0), (nan, inf)):
        assert difference(one, other) == math.inf
        assert difference(other, one) == math.inf
    assert difference(1.0, 0.99) == pytest.approx(0.01)
    assert difference(0.0, 1e-300) == 1.0


def test_capturing_uses_the_same_memory_in_every_step() -> None:
    model = nn.Sequential(nn.Linear(64, 64), nn.BatchNorm1d(64))
    tracked = Tracked()
    tracked.add("model", model)
    rewind = Rewind(tracked)
    places: set[tuple[int, ...]] = set()
    for _ in range(5):
        model(torch.randn(4, 64)).sum().backward()
        rewind.capture()
        rewind.release()
        copies = [*rewind._gradients._copies, *rewind._buffers._copies]
        places.add(tuple(copy.data_ptr() for copy in copies if copy is not None))
    assert len(places) == 1
    assert len(next(iter(places))) == 4 + 3


def test_a_gradient_that_was_none_is_none_again_and_another_is_the_very_tensor_it_was() -> None:
    model = nn.Linear(2, 2)
    tracked = Tracked()
    tracked.add("model", model)
    model.weight.grad = torch.ones(2, 2)
    kept = model.weight.grad
    rewind = Rewind(tracked)
    rewind.capture()
    model.zero_grad()
    model(torch.ones(1, 2)).sum().backward()
    rewind.restore()
    assert model.weight.grad is kept
    assert torch.equal(kept, torch.ones(2, 2))
    assert model.bias.grad is None


def test_compute_before_the_start_is_refused(tmp_path: Path) -> None:
    run = holdfast.Run(run_dir=tmp_path / "run")
    with pytest.raises(holdfast.HoldfastError, match=r"before start\(\)"):
        run.compute(lambda: 1.0)
    with pytest.raises(holdfast.HoldfastError, match=r"before start\(\)"):
        run.check(1.0)
    run.close()
