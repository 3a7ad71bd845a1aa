"""The silent corruption watch: who is accused, what is passed on, and that nothing stays changed."""

from __future__ import annotations

import logging
import random
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from holdfast.checkpoint.state.tracked import Tracked
from holdfast.policy.results import Place, accuse
from holdfast.record.group import Group, join_group
from holdfast.train.check.corruption import CorruptionWatch, exchange, pack
from holdfast.train.check.rerun import Rewind
from holdfast.train.data.rng import capture_rng
from kit.ranks.together import together

# --- who is accused -----------------------------------------------------------------------------------------


@given(st.integers(3, 40), st.data())
def test_a_device_that_computes_wrongly_is_accused_alone(world: int, data: Any) -> None:
    bad = data.draw(st.integers(0, world - 1))
    differs = [rank in (bad, (bad - 1) % world) for rank in range(world)]
    assert accuse(differs, held_before=data.draw(st.booleans())).accused == [bad]


@given(st.lists(st.booleans(), min_size=2, max_size=40), st.booleans())
def test_only_ranks_whose_comparisons_differ_are_accused_and_all_of_those_are_explained(
    differs: list[bool], held_before: bool
) -> None:
    found = accuse(differs, held_before=held_before)
    world = len(differs)
    pairs = [{rank, (rank + 1) % world} for rank in range(world) if differs[rank]]
    assert all(any(rank in pair for pair in pairs) for rank in found.accused)
    assert found.suits is (not pairs) or bool(found.accused) == found.suits
    if found.suits:
        assert all(pair & set(found.accused) for pair in pairs)


def test_one_wrong_result_accuses_the_two_that_computed_it() -> None:
    assert accuse([False, True, False, False], held_before=True).accused == [1, 2]
    assert accuse([False, False, False, True], held_before=False).accused == [0, 3]


def test_where_everything_differs_it_is_the_method_that_does_not_suit() -> None:
    assert not accuse([True] * 8, held_before=True).suits
    assert not accuse([True, True], held_before=False).suits
    assert accuse([True, True], held_before=True).accused == [0, 1]


# --- the watch itself ---------------------------------------------------------------------------------------


class Training:
    """A small training whose step uses random numbers of every kind, buffers and gradients from before."""

    def __init__(self, group: Group, *, wrap: bool = False, tolerance: float = 0.0) -> None:
        torch.manual_seed(5)
        inner = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Dropout(0.3), nn.Linear(8, 6))
        self.model = DistributedDataParallel(inner) if wrap else inner
        self.tracked = Tracked()
        self.tracked.add("model", self.model)
        self.spoil: Callable[[float], float] | None = None
        self.calls = 0
        self.watch = CorruptionWatch(
            1,
            tolerance,
            group=group,
            tracked=self.tracked,
            place=Place(f"n{group.rank}", str(group.rank)),
            state=lambda: Rewind(self.tracked),
        )
        torch.manual_seed(100 + group.rank)
        random.seed(100 + group.rank)
        numpy.random.seed(100 + group.rank)

    def step(self, x: torch.Tensor, times: float = 1.0) -> torch.Tensor:
        self.calls += 1
        noise = random.random() + float(numpy.random.rand())
        loss = (self.model(x + 0.01 * torch.randn_like(x)) - x).square().mean() * times + noise
        loss.backward()
        return loss.detach() if self.spoil is None else torch.tensor(self.spoil(float(loss.detach())))

    def call(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> torch.Tensor:
        return self.step(*args, **kwargs)

    def everything(self) -> list[Any]:
        rng = capture_rng()
        return [
            {name: b.tolist() for name, b in self.model.named_buffers()},
            {name: None if p.grad is None else p.grad.tolist() for name, p in self.model.named_parameters()},
            rng["torch"].tolist(),
            rng["python"][1][-1],
            rng["numpy"][1].tolist()[:3],
            rng["numpy"][2],
        ]

    def watched(self, *args: Any, **kwargs: Any) -> tuple[list[str], bool]:
        """Reasons of one watched step, and whether everything is as without the watch."""
        self.watch.before()
        result = self.step(*args, **kwargs)
        before = self.everything()
        reasons = self.watch.compare(self.call, args, kwargs, result)
        return reasons, self.everything() == before


def batch(rank: int) -> torch.Tensor:
    return torch.randn(4, 6, generator=torch.Generator().manual_seed(rank))


def alone() -> Group:
    return join_group(10)


def test_alone_a_micro_batch_is_computed_twice_and_nothing_stays_changed() -> None:
    training = Training(alone())
    for _ in range(3):  # gradients accumulate
        assert training.watched(batch(0), times=2.0) == ([], True)
    assert (training.calls, training.watch.compared) == (6, 3)


def test_alone_a_result_that_cannot_be_repeated_is_told_with_both_values_and_the_place() -> None:
    training = Training(alone())
    values = iter((2.5, 2.75))
    training.spoil = lambda loss: next(values)
    reasons, unchanged = training.watched(batch(0))
    assert unchanged
    assert reasons == ["the micro-batch gave the loss 2.5, then 2.75, computed twice on rank 0 (n0/0)"]


def test_alone_a_backward_that_goes_wrong_behind_an_equal_loss_is_seen_by_the_norm() -> None:
    training = Training(alone())
    bias = next(parameter for name, parameter in training.model.named_parameters() if name == "3.bias")
    bias.register_hook(lambda grad: grad + (1e-3 if training.calls % 2 == 0 else 0))
    (reason,), unchanged = training.watched(batch(0))
    assert unchanged
    assert "gradients of norm" in reason


def test_nan_equals_nan_and_an_infinity_only_itself() -> None:
    training = Training(alone())
    training.spoil = lambda loss: float("nan")
    assert training.watched(batch(0))[0] == []
    values = iter((float("inf"), float("-inf")))
    training.spoil = lambda loss: next(values)
    assert len(training.watched(batch(0))[0]) == 1


def test_a_difference_within_the_tolerance_is_none() -> None:
    training = Training(alone(), tolerance=1e-3)
    values = iter((2.5, 2.501, 2.5, 2.51))
    training.spoil = lambda loss: next(values)
    assert training.watched(batch(0))[0] == []
    assert training.watched(batch(0))[0] != []


def test_it_is_due_every_so_many_steps_and_never_when_off() -> None:
    watch = Training(alone()).watch
    watch._interval = 5
    assert [step for step in range(1, 16) if watch.due(step)] == [5, 10, 15]
    watch._interval = 0
    assert not any(watch.due(step) for step in range(1, 16))


@pytest.mark.parametrize("wrap", [False, True], ids=["each for itself", "DDP"])
def test_a_neighbour_gets_the_same_loss_from_the_same_batch_and_random_numbers(
    tmp_path: Path, wrap: bool
) -> None:
    """Bit by bit, with dropout, noise of three kinds and a BatchNorm; afterwards all is as it was."""

    def work(rank: int) -> Any:
        group = join_group(30)
        training = Training(group, wrap=wrap)
        found = [training.watched(batch(10 * number + rank), times=1.5) for number in range(2)]
        compared_there = training.watch._held
        return found, compared_there

    for found, compared_there in together(tmp_path, 3, work):
        assert found == [[[], True], [[], True]]
        assert compared_there


def test_the_rank_with_the_bad_device_is_accused_with_both_ranks_and_devices_named(tmp_path: Path) -> None:
    """A mismatch is handled like a rejected step: reasons on the rank that is at fault."""

    def work(rank: int) -> Any:
        training = Training(join_group(30))
        fine = training.watched(batch(rank))
        if rank == 1:
            training.spoil = lambda loss: loss * 1.01
        return fine, training.watched(batch(rank))

    found = together(tmp_path, 3, work)
    assert [fine for fine, _ in found] == [[[], True]] * 3
    assert [bool(reasons) for _, (reasons, _) in found] == [False, True, False]
    assert all(unchanged for _, (_, unchanged) in found)
    first, second = found[1][1][0]
    assert first.startswith("the micro-batch of rank 0 gave the loss ")
    assert "there (n0/0)" in first
    assert first.endswith("on rank 1 (n1/1)")
    assert second.startswith("the micro-batch of rank 1 gave the loss ")
    assert second.endswith("on rank 2 (n2/2)")


def test_a_step_that_takes_its_data_from_elsewhere_accuses_nobody_and_is_computed_twice_from_then_on(
    tmp_path: Path,
) -> None:
    def work(rank: int) -> Any:
        messages: list[str] = []
        handler = logging.Handler()
        handler.emit = lambda record: messages.append(record.getMessage())  # type: ignore[method-assign]
        logging.getLogger("holdfast").addHandler(handler)
        training = Training(join_group(30))
        own = batch(rank)
        step = training.step
        training.step = lambda scale: step(own, times=float(scale))  # type: ignore[method-assign,assignment]
        found = [training.watched(torch.tensor(1.0)) for _ in range(2)]
        values = iter((1.0, 2.0))
        training.spoil = lambda loss: next(values) if rank == 0 else loss
        return found, training.watched(torch.tensor(1.0))[0], messages

    found = together(tmp_path, 2, work)
    assert [one[0] for one in found] == [[[[], True], [[], True]]] * 2
    assert [len(one[1]) for one in found] == [1, 0]
    assert all("compares on each rank alone from now on" in one[2][0] for one in found)


def test_arguments_that_cannot_be_passed_on_by_one_rank_are_computed_twice_by_all(tmp_path: Path) -> None:
    def work(rank: int) -> Any:
        training = Training(join_group(30))
        step = training.step
        training.step = lambda x, extra: step(x)  # type: ignore[method-assign,assignment]
        extra = object() if rank == 1 else 3
        return training.watched(batch(rank), extra), training.calls, training.watch._held

    assert together(tmp_path, 2, work) == [[[[], True], 2, False]] * 2


# --- what is passed on --------------------------------------------------------------------------------------


def test_arguments_arrive_as_they_were_sent_whatever_their_shape_and_kind(tmp_path: Path) -> None:
    def arguments(rank: int) -> tuple[list[Any], dict[str, Any]]:
        made = torch.Generator().manual_seed(rank)
        return (
            [
                torch.randn(2 + rank, 3, generator=made),  # another shape on each rank
                {"ids": torch.arange(5) + rank, "mask": torch.tensor([rank == 0, True])},
                (rank, rank / 3, f"text {rank}", None, rank == 1),
                torch.randn(3, 2, generator=made).t().bfloat16(),
            ],
            {
                "wave": torch.tensor([1j * rank]),
                "empty": torch.zeros(0, 4),
                "scalar": torch.tensor(rank + 0.5, dtype=torch.float64),
                "learned": torch.ones(2, requires_grad=True),
                "own": len,
            },
        )

    def told(value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return [str(value.dtype), list(value.shape), str(value.tolist()), value.requires_grad]
        if isinstance(value, dict):
            return {key: told(item) for key, item in value.items()}
        if isinstance(value, list | tuple):
            return [told(item) for item in value]
        return value if isinstance(value, int | float | str | None) else repr(value)

    def work(rank: int) -> Any:
        group = join_group(30)
        torch.manual_seed(rank)
        random.seed(rank)
        numpy.random.seed(rank)
        packed = pack(*arguments(rank))
        assert not isinstance(packed, str)
        args, kwargs = exchange(packed, capture_rng(), group)
        drawn = [torch.rand(()).item(), random.random(), float(numpy.random.rand())]
        return told((args, kwargs)), drawn

    found = together(tmp_path, 3, work)
    for rank in range(3):
        sent = (rank - 1) % 3
        assert found[rank][0] == told(arguments(sent))
        torch.manual_seed(sent)
        random.seed(sent)
        numpy.random.seed(sent)
        assert found[rank][1] == [torch.rand(()).item(), random.random(), float(numpy.random.rand())]


@pytest.mark.parametrize(
    ("argument", "why"),
    [
        (object(), "an argument is a object"),
        (iter([1]), "an argument is a list_iterator"),
        (2**70, "an argument is a int"),
        (torch.zeros(3).to_sparse(), "an argument is a Tensor"),
        (3, "no tensor is among the arguments"),
    ],
)
def test_what_cannot_be_passed_on_is_said(argument: Any, why: str) -> None:
    assert pack([argument], {}) == why


def test_nothing_that_is_passed_on_is_pickled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: Any, **kwargs: Any) -> None:
        raise AssertionError("pickled")

    def work(rank: int) -> Any:
        group = join_group(30)
        for name in ("dumps", "loads", "Pickler", "Unpickler"):
            monkeypatch.setattr(f"pickle.{name}", refuse)
        monkeypatch.setattr(dist, "all_gather_object", refuse)
        return Training(group).watched(batch(rank))

    assert together(tmp_path, 2, work) == [[[], True]] * 2
