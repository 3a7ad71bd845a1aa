"""NaNDetector without Run (E9), and the settings around deferred checks."""

from __future__ import annotations

import logging
import math
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import holdfast
from holdfast.errors import ExitCode, UsageError, ValidationFailedError
from holdfast.train.check.nan_detector import MAX_ROLLBACKS, NaNDetector
from kit.ranks.together import together

NAN, INF = math.nan, math.inf


def stepped(model: nn.Module, loss_times: float = 1.0) -> torch.Tensor:
    loss: torch.Tensor = model(torch.ones(4, 3)).square().mean() * loss_times
    loss.backward()
    return loss.detach()


def weights(model: nn.Module) -> list[list[float]]:
    return [parameter.detach().flatten().tolist() for parameter in model.parameters()]


def test_it_is_found_at_the_front_door() -> None:
    """E9: parts usable alone."""
    assert holdfast.NaNDetector is NaNDetector


@pytest.mark.parametrize("policy", ["warn", "skip"])
def test_a_bad_step_is_dropped_and_never_reaches_the_optimizer(
    policy: Any, caplog: pytest.LogCaptureFixture
) -> None:
    """D5. The loop here does not even look at the answer."""
    torch.manual_seed(0)
    model = nn.Linear(3, 3)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    detector = NaNDetector(policy)
    with caplog.at_level(logging.WARNING, "holdfast"):
        for step, times in enumerate((1.0, NAN, 1.0, INF, 1.0), 1):
            before = weights(model)
            optimizer.zero_grad()
            ok = detector.check(stepped(model, times), model=model, step=step)
            optimizer.step()
            assert ok == math.isfinite(times)
            assert (weights(model) == before) == (not ok)
    assert detector.total == 2
    assert detector.consecutive == 0
    assert [bad.step for bad in detector.history] == [2, 4]
    assert detector.history[0].reasons[0] == "the loss is NaN"
    assert detector.history[0].act == "drop"
    assert len(caplog.messages) == (2 if policy == "warn" else 0)


def test_a_bad_gradient_behind_a_good_loss_is_found() -> None:
    model = nn.Linear(3, 3)
    loss = stepped(model)
    assert model.bias.grad is not None
    model.bias.grad[1] = INF
    detector = NaNDetector("skip")
    assert not detector.check(loss, model=model)
    assert detector.history[0].reasons == ["the gradients hold an infinity: model.bias"]
    assert detector.check(loss)  # the gradients are gone, and without a model nobody asks for them


def test_raise_stops_at_the_first_bad_step_and_the_others_after_too_many_in_a_row() -> None:
    """D5: max_consecutive."""
    with pytest.raises(ValidationFailedError, match=r"step 3.*NaN"):
        NaNDetector("raise").check(NAN, step=3)
    detector = NaNDetector("warn", max_consecutive=3)
    assert [detector.check(loss) for loss in (NAN, NAN, 1.0, NAN, NAN)] == [False, False, True, False, False]
    with pytest.raises(ValidationFailedError, match="3 bad steps in a row, 3 are too many") as error:
        detector.check(NAN)
    assert error.value.exit_code is ExitCode.VALIDATION_FAILED


def test_the_history_keeps_the_last_ones_only() -> None:
    """D5: history 100."""
    detector = NaNDetector("skip", max_consecutive=1000)
    for step in range(1, 251):
        detector.check(INF, step=step)
    assert [bad.step for bad in detector.history] == list(range(151, 251))
    assert detector.total == 250
    assert detector.history[-1].loss == "inf"


def test_rolling_back_calls_for_it_and_begins_to_count_again() -> None:
    called: list[int] = []
    detector = NaNDetector("rollback", max_consecutive=2, on_rollback=called.append)
    assert [detector.check(NAN, step=step) for step in (1, 2, 3)] == [False] * 3
    assert called == [2]
    assert detector.consecutive == 1


def test_rolling_back_that_gets_no_further_ends() -> None:
    """Any sequence of faults ends in progress or in a clear exit."""
    called: list[int] = []
    detector = NaNDetector("rollback", max_consecutive=1, on_rollback=called.append)
    for _ in range(MAX_ROLLBACKS):
        detector.check(1.0, step=4)
        assert not detector.check(NAN, step=5)
    with pytest.raises(ValidationFailedError, match="roll-backs that got no further"):
        detector.check(NAN, step=5)
    assert called == [5] * MAX_ROLLBACKS


def test_progress_beyond_the_bad_step_allows_rolling_back_again() -> None:
    called: list[int] = []
    detector = NaNDetector("rollback", max_consecutive=1, on_rollback=called.append)
    for step in range(5, 50, 5):
        detector.check(NAN, step=step)
        detector.check(1.0, step=step)
        detector.check(1.0, step=step + 1)
    assert len(called) == 9


def test_restoring_an_earlier_state_in_a_rollback_does_not_restore_the_number_of_rollbacks() -> None:
    detector = NaNDetector(
        "rollback", max_consecutive=1, on_rollback=lambda step: detector.load_state_dict(kept)
    )
    kept = detector.state_dict()
    assert [detector.check(NAN, step=5) for _ in range(MAX_ROLLBACKS)] == [False] * MAX_ROLLBACKS
    with pytest.raises(ValidationFailedError):
        detector.check(NAN, step=5)


def test_a_state_dict_goes_through_a_save_and_counts_on() -> None:
    detector = NaNDetector("skip", max_consecutive=3)
    detector.check(NAN, step=7)
    detector.check(NAN, step=8)
    again = NaNDetector("skip", max_consecutive=3)
    again.load_state_dict(detector.state_dict())
    assert again.history == detector.history
    with pytest.raises(ValidationFailedError):
        again.check(NAN, step=9)


def test_with_a_scaler_its_overflow_is_its_own_and_a_bad_loss_makes_it_skip_and_back_off_once() -> None:
    model = nn.Linear(3, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    detector = NaNDetector("skip")

    def step(loss: Any, times: float) -> tuple[bool, float]:
        optimizer.zero_grad()
        scaler.scale(model(torch.ones(4, 3)).square().mean() * times).backward()
        ok = detector.check(loss, model=model, scaler=scaler)
        scaler.step(optimizer)
        scaler.update()
        return ok, scaler.get_scale()

    before = weights(model)
    assert step(1.0, INF) == (True, 4.0)  # the scaler found it by itself
    assert step(NAN, 1.0) == (False, 2.0)  # its gradients were fine: they were made not to be
    assert weights(model) == before
    assert step(1.0, 1.0) == (True, 2.0)
    assert weights(model) != before


@pytest.mark.parametrize(
    "wrong",
    [
        {"policy": "ignore"},
        {"max_consecutive": 0},
        {"history": 0},
        {"policy": "rollback"},
        {"on_rollback": print},
    ],
)
def test_what_cannot_work_is_refused_at_once(wrong: dict[str, Any]) -> None:
    with pytest.raises(UsageError, match="NaNDetector"):
        NaNDetector(**wrong)


def test_a_nan_on_one_rank_is_dropped_by_all_and_their_parameters_stay_equal(tmp_path: Path) -> None:
    """D5: all ranks together."""

    def work(rank: int) -> Any:
        torch.manual_seed(0)
        model = nn.Linear(3, 3)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        detector = NaNDetector("skip", max_consecutive=3, group=dist.group.WORLD)
        answers = []
        for step in range(1, 7):
            optimizer.zero_grad()
            bad = step >= 4 or (step == 2 and rank == 1)
            loss = stepped(model, NAN if bad and (rank == 1 or step == 2) else 1.0)
            try:
                answers.append(detector.check(loss, model=model, step=step))
            except ValidationFailedError as error:
                answers.append(int(error.exit_code))
                break
            optimizer.step()
        return answers, weights(model), [(bad.step, bad.reasons) for bad in detector.history]

    (answers, found, history), other = together(tmp_path, 2, work)
    assert answers == other[0] == [True, False, True, False, False, 17]
    assert found == other[1]
    assert all(math.isfinite(value) for row in found for value in row)
    assert history[0] == [2, ["the result of another rank"]]
    assert other[2][0][1][0] == "the loss is NaN"


def test_ranks_without_a_group_are_told_that_each_decides_alone(tmp_path: Path) -> None:
    def work(rank: int) -> Any:
        messages: list[str] = []
        handler = logging.Handler()
        handler.emit = lambda record: messages.append(record.getMessage())  # type: ignore[method-assign]
        logging.getLogger("holdfast").addHandler(handler)
        detector = NaNDetector("skip")
        answers = [detector.check(NAN if rank else 1.0) for _ in range(2)]
        return answers, len([m for m in messages if "decides alone" in m])

    assert together(tmp_path, 2, work) == [[[True, True], 1], [[False, False], 1]]
