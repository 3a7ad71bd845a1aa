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
from holdfast.checkpoint.manifest import Versions
from holdfast.checkpoint.roundtrip import changes, first_difference
from holdfast.checkpoint.state import from_blob, to_blob
from holdfast.errors import IncompleteStateError
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


def test_an_object_without_any_state_is_told_at_the_first_save(tmp_path: Path) -> None:
    save_once(tmp_path / "run", good=Holds({"a": [1, 2.5, None]}), empty=Holds({}))
    (told,) = warnings_of(tmp_path / "run")
    assert told.startswith("empty: it has no state at all")
    assert len(checkpoints(tmp_path / "run")) == 1


def test_state_that_cannot_be_stored_is_an_error_that_names_the_part(tmp_path: Path) -> None:
    with pytest.raises(IncompleteStateError, match=r"track\(hook=…\): its state cannot be saved"):
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
    assert list(changes(state, from_blob(to_blob(state)))) == []


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
