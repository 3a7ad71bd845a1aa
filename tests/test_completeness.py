"""A checkpoint is complete by construction: what has state is saved, and a broken or missing one is told."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from torch import nn
from torch.testing._internal.two_tensor import TwoTensor

import holdfast
from holdfast.checkpoint import metadata as metadatas
from holdfast.checkpoint.adapters import ScheduleState, as_stateful
from holdfast.checkpoint.manifest import Versions
from holdfast.checkpoint.roundtrip import check_round_trip, first_difference
from holdfast.errors import IncompleteStateError, SaveFailedError
from holdfast.journal.events import Warned
from holdfast.journal.reader import read_journal
from holdfast.worker.versions import changes_since
from tiny import checkpoints


class Tracker:
    """Like the RNG trackers of tensor-parallel code: named generators, no state_dict."""

    def __init__(self) -> None:
        self.generators = {name: torch.Generator().manual_seed(i) for i, name in enumerate(("model", "data"))}

    def get_states(self) -> dict[str, torch.Tensor]:
        return {name: generator.get_state() for name, generator in self.generators.items()}

    def set_states(self, states: dict[str, torch.Tensor]) -> None:
        for name, state in states.items():
            self.generators[name].set_state(state)


def warnings_of(run_dir: Path) -> list[str]:
    return [line.body.message for line in read_journal(run_dir / "journal") if isinstance(line.body, Warned)]


def test_generator_objects_and_named_rng_trackers_resume_exactly(tmp_path: Path) -> None:
    """A10."""

    def draw(run_dir: Path, until: int) -> dict[int, tuple[float, ...]]:
        generator, tracker = torch.Generator().manual_seed(5), Tracker()
        run = holdfast.Run(run_dir=run_dir)
        run.track(model=nn.Linear(1, 1), noise=generator, rng=tracker)
        every = [generator, *tracker.generators.values()]
        return {
            step: tuple(torch.rand((), generator=g).item() for g in every)
            for step, _ in run.steps([1, 2], until=until)
        }

    whole = draw(tmp_path / "whole", 9)
    assert draw(tmp_path / "parts", 4) | draw(tmp_path / "parts", 9) == whole
    assert len({value for values in whole.values() for value in values}) == 27


class Holds:
    def __init__(self, state: Any) -> None:
        self.state = state

    def state_dict(self) -> Any:
        return self.state

    def load_state_dict(self, state: Any) -> None:
        self.state = state


def save_once(run_dir: Path, **parts: Any) -> None:
    run = holdfast.Run(run_dir=run_dir)
    run.track(model=nn.Linear(1, 1), **parts)
    for _ in run.steps([1], until=1):
        pass


class Forgetful:
    """Pickles, and comes back as something else."""

    def __reduce__(self) -> tuple[type, tuple[()]]:
        return (dict, ())


def test_state_that_does_not_survive_a_save_is_told_at_the_first_save(tmp_path: Path) -> None:
    save_once(
        tmp_path / "run", good=Holds({"a": [1, 2.5, None]}), empty=Holds({}), odd=Holds({"x": Forgetful()})
    )
    told = warnings_of(tmp_path / "run")
    assert any(text.startswith("empty: it has no state at all") for text in told)
    assert any(text.startswith("odd.x comes back from a save as something else") for text in told)
    assert not any("good" in text for text in told)
    assert len(checkpoints(tmp_path / "run")) == 1


def test_state_that_cannot_be_stored_is_an_error_that_names_the_part(tmp_path: Path) -> None:
    with pytest.raises(SaveFailedError, match=r"track\(hook=…\): its state cannot be saved"):
        save_once(tmp_path / "run", hook=Holds({"f": lambda: None}))
    assert not checkpoints(tmp_path / "run")


@pytest.mark.parametrize(
    "state",
    [
        {"nan": math.nan, "inf": math.inf, "t": (1, 2), "bytes": b"x", "none": None, "c": 1j},
        {"tensor": torch.tensor([math.nan, -0.0]), "bf16": torch.ones(2, dtype=torch.bfloat16)},
        {"array": numpy.arange(3), "nested": [{"deep": [torch.zeros(0)]}]},
        {1: "integer keys", "2": "too"},
    ],
)
def test_ordinary_state_survives(state: Any) -> None:
    assert check_round_trip({"part": state}) == []


@pytest.mark.parametrize(
    ("a", "b", "where"),
    [
        ({"x": 1}, {"x": 2}, "s.x"),
        ({"x": 1}, {"x": 1.0}, "s.x"),
        ({"x": 1, "y": 2}, {"x": 1}, "s"),
        ([1, [2]], [1, [3]], "s[1][0]"),
        ({"t": torch.zeros(2)}, {"t": -torch.zeros(2)}, "s.t"),
        ({"t": torch.zeros(2)}, {"t": torch.zeros(2, dtype=torch.float64)}, "s.t"),
        ((1, 2), [1, 2], "s"),
    ],
)
def test_the_first_difference_is_named(a: Any, b: Any, where: str) -> None:
    assert first_difference(a, b, "s") == where
    assert first_difference(a, a, "s") == ""


def counting() -> Any:
    calls = 0

    def rate(step: int) -> float:
        nonlocal calls
        calls += 1
        return 1 / (1 + calls)

    return rate


def remembering() -> Any:
    seen: list[int] = []

    def rate(step: int) -> float:
        seen.append(step)
        return 0.9 ** len(seen)

    return rate


class Trainer:
    """A method of it is the rate; `stopped` is none of the rate's business."""

    def __init__(self) -> None:
        self.calls, self.stopped = 0, False

    def rate(self, step: int) -> float:
        self.calls += 1
        return 1 / (1 + self.calls)


@pytest.mark.parametrize("kind", ["counting", "remembering", "method", "nested"])
def test_what_a_schedule_s_function_keeps_is_part_of_its_state(tmp_path: Path, kind: str) -> None:
    """torch leaves functions out: the rate began anew after every resume, and nobody was told."""
    schedules = torch.optim.lr_scheduler
    trainers: list[Trainer] = []

    def rates(run_dir: Path, until: int) -> dict[int, float]:
        model, trainer = nn.Linear(2, 2), Trainer()
        trainers.append(trainer)
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        rate = {"remembering": remembering(), "method": trainer.rate}.get(kind) or counting()
        schedule: Any = schedules.LambdaLR(optimizer, rate)
        if kind == "nested":
            later = schedules.LambdaLR(optimizer, lambda step: 0.5**step)
            schedule = schedules.SequentialLR(optimizer, [schedule, later], [8])
        found: dict[int, float] = {}
        run = holdfast.Run(run_dir=run_dir, checkpoint_interval=0, checkpoint_read_back=False)
        run.track(model=model, optimizer=optimizer, schedule=schedule)
        for step, _ in run.steps([torch.zeros(1)] * 20, until=until):
            model(torch.ones(1, 2)).sum().backward()
            optimizer.step()
            schedule.step()
            trainer.stopped = step == until
            found[step] = optimizer.param_groups[0]["lr"]
        return found

    whole = rates(tmp_path / "whole", 10)
    assert rates(tmp_path / "parts", 4) | rates(tmp_path / "parts", 10) == whole
    assert len(set(whole.values())) > 5
    assert [one.calls for one in trainers] == ([11, 5, 11] if kind == "method" else [0, 0, 0])


@pytest.mark.parametrize("tracked", ["nothing", "the inner ones", "it", "an object that has it"])
def test_a_schedule_of_a_tracked_optimizer_that_is_not_tracked_is_told(tmp_path: Path, tracked: str) -> None:
    schedules = torch.optim.lr_scheduler
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    inner = [schedules.LinearLR(optimizer), schedules.StepLR(optimizer, 2)]
    whole = schedules.SequentialLR(optimizer, inner, [3])
    holder = Holds({"last": 1})
    holder.schedules = [whole]  # type: ignore[attr-defined]
    parts: dict[str, dict[str, Any]] = {
        "nothing": {},
        "the inner ones": {"first": inner[0], "second": inner[1]},
        "it": {"schedule": whole},
        "an object that has it": {"holder": holder},
    }
    run = holdfast.Run(run_dir=tmp_path / "run", checkpoint_interval=0)
    run.track(model=model, optimizer=optimizer, **parts[tracked])
    run.start()
    run.save()
    run.finish()
    told = [text for text in warnings_of(tmp_path / "run") if "is not tracked" in text]
    kinds = sorted(text.split()[1] for text in told)
    assert kinds == (["SequentialLR"] if tracked in ("nothing", "the inner ones") else [])
    assert all("track(optimizer=…)" in text for text in told)


def test_what_a_script_sets_for_a_schedule_s_function_stays_the_script_s() -> None:
    def schedule(warmup: int, limits: dict[str, float] | None = None) -> Any:
        optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], 0.1)
        rate = lambda step: min(1.0, (step + 1) / warmup) * (limits or {"top": 1.0})["top"]  # noqa: E731
        return torch.optim.lr_scheduler.LambdaLR(optimizer, rate)

    before, after = as_stateful(schedule(4)), schedule(8)
    assert before is not None
    state = before.state_dict()
    assert ScheduleState.KEY not in state, "nothing has changed"
    later = as_stateful(after)
    assert later is not None
    later.load_state_dict(state)
    assert after.lr_lambdas[0](0) == 1 / 8
    kept: dict[str, float] = {"top": 1.0}
    stateful = as_stateful(schedule(4, kept))
    assert stateful is not None
    kept["top"] = 0.5
    state = stateful.state_dict()
    assert state[ScheduleState.KEY] == {"lr_lambdas[0]: limits": {"top": 0.5}}
    kept["top"] = 0.25
    stateful.load_state_dict(state)
    assert kept == {"top": 0.5}, "in place"
    plain = torch.optim.lr_scheduler.StepLR(torch.optim.SGD([nn.Parameter(torch.zeros(1))], 0.1), 2)
    assert as_stateful(plain) is plain
    step = torch.optim.lr_scheduler.LambdaLR(plain.optimizer, counting())
    counted = as_stateful(step)
    assert counted is not None
    with pytest.raises(IncompleteStateError, match=r"lr_lambdas\[0\]: limits"):
        counted.load_state_dict(step.state_dict() | {ScheduleState.KEY: state[ScheduleState.KEY]})


def test_a_change_since_the_save_is_told_and_no_change_is_not(tmp_path: Path) -> None:
    save_once(tmp_path / "run")
    again = holdfast.Run(run_dir=tmp_path / "run", checkpoint_interval=7)
    again.track(model=nn.Linear(1, 1))
    for _ in again.steps([1], until=2):
        pass
    assert warnings_of(tmp_path / "run") == ["since this checkpoint was saved: the settings are others"]
    same = Versions(holdfast="1", torch="2", python="3", code="c", config="d")
    assert changes_since(same, same) == []
    other = Versions(holdfast="1", torch="2.1", python="3", code="e", config="")
    assert changes_since(same, other) == ["torch 2 → 2.1", "the main script is another"]


def test_tensors_that_wrap_others_come_back_by_what_they_are_made_of(tmp_path: Path) -> None:
    """A3: tensor subclasses, here one with two tensors inside, as a parameter and in an optimizer's state."""

    def build(seed: int) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
        torch.manual_seed(seed)
        model = torch.nn.Linear(3, 2)
        model.register_buffer("pair", TwoTensor(torch.randn(4), torch.randn(4)))
        return model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

    def start(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> holdfast.Run:
        run = holdfast.Run(run_dir=tmp_path / "run", checkpoint_interval=0)
        run.track(model=model, optimizer=optimizer)
        run.start()
        return run

    model, optimizer = build(1)
    run = start(model, optimizer)
    model.weight.sum().backward()
    optimizer.step()
    momentum = optimizer.state[model.weight]["momentum_buffer"]
    optimizer.state[model.weight]["momentum_buffer"] = TwoTensor(momentum, momentum * 2)
    run.begin_step()
    run.end_step()
    run.finish()
    other, its_optimizer = build(2)
    other.weight.sum().backward()
    its_optimizer.step()
    empty = torch.zeros_like(momentum)
    its_optimizer.state[other.weight]["momentum_buffer"] = TwoTensor(empty, empty.clone())
    start(other, its_optimizer).close()
    for inner in ("a", "b"):
        assert torch.equal(getattr(other.pair, inner), getattr(model.pair, inner))
        found = its_optimizer.state[other.weight]["momentum_buffer"]
        assert isinstance(found, TwoTensor)
        kept = optimizer.state[model.weight]["momentum_buffer"]
        assert torch.equal(getattr(found, inner), getattr(kept, inner))
    metadata = metadatas.read(next((tmp_path / "run" / "checkpoints").glob("step_*")))
    assert {"model.pair.a", "model.pair.b"} <= set(metadata.tensors)
