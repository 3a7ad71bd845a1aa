"""Parts that a script trains with and has not tracked: an error within the first step, and never later."""

from __future__ import annotations

import itertools
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader
from torch.utils.data.dataloader import _BaseDataLoaderIter

import holdfast
from holdfast.errors import IncompleteStateError, UsageError
from holdfast.train import forgotten
from kit.ranks.together import together
from kit.runs import warnings_of
from kit.tiny import Numbers, checkpoints

BATCHES = [torch.ones(2, 6), torch.zeros(2, 6)]


class Script:
    """A small training that tracks, and ignores, what it is told to."""

    def __init__(self, run_dir: Path, **settings: Any) -> None:
        torch.manual_seed(1)
        self.model = nn.Linear(6, 6)
        self.opt = torch.optim.AdamW(self.model.parameters(), lr=1e-2)
        self.sched = torch.optim.lr_scheduler.StepLR(self.opt, 2)
        self.scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
        self.run = holdfast.Run(run_dir=run_dir, **{"checkpoint_interval": 2, **settings})
        self.overflow = 1.0
        self.every = 1

    def train(self, until: int = 3) -> list[int]:
        done = []
        for step, x in self.run.steps(BATCHES, until=until):
            loss = (self.model(x) - 1).square().mean() * (self.overflow if step == 1 else 1.0)
            self.scaler.scale(loss).backward()
            if step % self.every == 0:
                self.scaler.step(self.opt)
                self.scaler.update()
                self.sched.step()
                self.opt.zero_grad()
            done.append(step)
        return done


def test_everything_that_was_forgotten_is_named_with_the_line_to_add_before_anything_is_saved(
    tmp_path: Path,
) -> None:
    script = Script(tmp_path / "run", checkpoint_interval=1)
    script.run.track(model=script.model)
    with pytest.raises(IncompleteStateError) as raised:
        script.train()
    lines = str(raised.value).splitlines()
    assert lines[0] == "this run trains with things that are not tracked, so a resume would begin them anew:"
    assert [line.strip() for line in lines[1:]] == [
        "an AdamW of track(model=…) steps: add run.track(optimizer=self.opt) before the first step, or "
        "run.ignore(self.opt) if that is meant",
        "a StepLR of an AdamW: add run.track(schedule=self.sched) before the first step, or "
        "run.ignore(self.sched) if that is meant",
        "a GradScaler scales: add run.track(scaler=self.scaler) before the first step, or "
        "run.ignore(self.scaler) if that is meant",
    ]
    assert raised.value.exit_code == 25
    assert not checkpoints(tmp_path / "run")


@pytest.mark.parametrize("how", ["tracked", "ignored", "held by what is tracked"])
def test_what_is_tracked_or_ignored_is_not_forgotten(tmp_path: Path, how: str) -> None:
    class Trainer:
        def __init__(self, script: Script) -> None:
            self.parts = {"optimizer": script.opt, "others": [script.sched, script.scaler]}

        def state_dict(self) -> dict[str, Any]:
            return {"a": 1}

        def load_state_dict(self, state: dict[str, Any]) -> None:
            pass

    script = Script(tmp_path / "run", checkpoint_interval=0, checkpoint_save_at_end=False)
    script.run.track(model=script.model)
    if how == "tracked":
        script.run.track(optimizer=script.opt, schedule=script.sched, scaler=script.scaler)
    elif how == "ignored":
        script.run.ignore(script.opt, script.sched, script.scaler)
    else:
        script.run.track(trainer=Trainer(script))
    assert script.train() == [1, 2, 3]
    assert not [text for text in warnings_of(tmp_path / "run") if "tracked" in text]


def test_an_ignored_optimizer_has_its_schedule_ignored_and_a_tracked_schedule_tracks_no_optimizer(
    tmp_path: Path,
) -> None:
    first = Script(tmp_path / "first", checkpoint_save_at_end=False)
    first.run.track(model=first.model, scaler=first.scaler)
    first.run.ignore(first.opt)
    assert first.train(2) == [1, 2]
    second = Script(tmp_path / "second")
    second.run.track(model=second.model, scaler=second.scaler, schedule=second.sched)
    with pytest.raises(IncompleteStateError, match=r"AdamW of track\(model=…\) steps") as raised:
        second.train()
    assert "StepLR" not in str(raised.value)
    third = Script(tmp_path / "third")
    third.run.track(optimizer=third.opt)
    with pytest.raises(UsageError, match="this AdamW is tracked"):
        third.run.ignore(third.opt)
    third.run.close()


@pytest.mark.parametrize("why", ["the scaler leaves the first step out", "it steps at every second step"])
def test_an_optimizer_that_does_not_step_in_the_first_step_is_found_too(tmp_path: Path, why: str) -> None:
    script = Script(tmp_path / "run")
    script.run.track(model=script.model, schedule=script.sched, scaler=script.scaler)
    if "scaler" in why:
        script.overflow = float("inf")
    else:
        script.every = 2
    with pytest.raises(IncompleteStateError, match=r"run\.track\(optimizer=self\.opt\)"):
        script.train()


def test_a_run_past_its_first_step_is_told_and_goes_on(tmp_path: Path) -> None:
    """Also one that resumes: what it did not track before, it goes on without."""

    def train(until: int) -> None:
        model, other = nn.Linear(6, 6), nn.Linear(6, 6)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        late = torch.optim.Adagrad(other.parameters(), lr=0.1)
        run = holdfast.Run(run_dir=tmp_path / "run", checkpoint_interval=0)
        run.track(model=model, optimizer=optimizer)
        for step, x in run.steps(BATCHES, until=until):
            model(x).sum().backward()
            optimizer.step()
            if step >= 2:
                other(x).sum().backward()
                late.step()

    train(3)
    told = [text for text in warnings_of(tmp_path / "run") if "Adagrad" in text]
    assert len(told) == 1
    assert "an Adagrad of no tracked model steps now, but is not tracked" in told[0]
    assert "run.track(optimizer_2=…)" in told[0]
    train(5)
    told = [text for text in warnings_of(tmp_path / "run") if "Adagrad" in text]
    assert "has begun it anew: an Adagrad of no tracked model steps" in told[1]
    assert len(told) == 2


def test_a_wrapper_that_keeps_nothing_is_no_loss_and_one_with_state_of_its_own_is(tmp_path: Path) -> None:
    class Around(torch.optim.Optimizer):
        """As many around an optimizer are: an optimizer itself, with the groups of the one inside."""

        def __init__(self, inner: torch.optim.Optimizer, *, keeps: bool) -> None:
            super().__init__(inner.param_groups, {})
            self.inner, self.keeps = inner, keeps

        def step(self, closure: Any = None) -> None:  # type: ignore[override]
            self.inner.step()
            if self.keeps:
                self.state[self.param_groups[0]["params"][0]]["slow"] = torch.ones(1)

    def train(run_dir: Path, *, keeps: bool, of: str) -> None:
        model = nn.Linear(6, 6)
        inner = torch.optim.LBFGS(model.parameters(), max_iter=1) if of == "LBFGS" else None
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        outer = Around(optimizer, keeps=keeps)
        run = holdfast.Run(run_dir=run_dir, checkpoint_save_at_end=False)
        run.track(model=model, optimizer=inner or optimizer)
        for _, x in run.steps(BATCHES, until=1):
            if inner is not None:
                inner.step(lambda x=x: model(x).square().sum())
            else:
                model(x).sum().backward()
                outer.step()

    train(tmp_path / "a", keeps=False, of="SGD")
    train(tmp_path / "b", keeps=False, of="LBFGS")
    with pytest.raises(IncompleteStateError, match=r"an Around of track\(model=…\) steps"):
        train(tmp_path / "c", keeps=True, of="SGD")


@pytest.mark.parametrize("loop", ["own", "beside the feed", "ignored", "evaluation", "fed"])
def test_a_loader_that_is_iterated_without_the_run_is_told_from_others(tmp_path: Path, loop: str) -> None:
    model = nn.Linear(6, 6)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loader = DataLoader(Numbers(), batch_size=4, shuffle=True)
    other = DataLoader(Numbers(), batch_size=5)
    before = _BaseDataLoaderIter.__next__
    run = holdfast.Run(run_dir=tmp_path / "run", checkpoint_interval=0, checkpoint_save_at_end=False)
    run.track(model=model, optimizer=optimizer)
    if loop == "ignored":
        run.ignore(other)
    feed = run.feed(loader) if loop != "own" else None

    def train() -> None:
        run.start()
        extra = iter(other)
        for _, x in itertools.islice(feed if feed is not None else loader, 3):
            run.begin_step()
            if loop in ("beside the feed", "ignored"):
                next(extra)
            if loop == "evaluation":
                whole = iter(other)  # which stays, and is at its end
                assert len(list(whole)) == 4
                for _ in other:
                    break  # and one that is left early
            model(x).sum().backward()
            optimizer.step()
            run.end_step()
        run.finish()

    if loop in ("own", "beside the feed"):
        name = "loader" if loop == "own" else "other"
        wanted = f"a DataLoader over a Numbers is iterated without the run: iterate over run.steps({name}, "
        with pytest.raises(IncompleteStateError, match=re.escape(wanted)):
            train()
        run.close()
    else:
        train()
    assert _BaseDataLoaderIter.__next__ is before


def test_what_one_rank_alone_forgets_ends_all_of_them_with_the_same_words(tmp_path: Path) -> None:
    def work(rank: int) -> str:
        model = nn.Linear(6, 6)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        extra = torch.optim.Adagrad(nn.Linear(2, 2).parameters(), lr=0.1)
        run = holdfast.Run(run_dir=tmp_path / "run", checkpoint_interval=1)
        run.track(model=model, optimizer=optimizer)
        try:
            for _, x in run.steps(BATCHES, until=3):
                model(x).sum().backward()
                optimizer.step()
                if rank == 1:
                    extra.step()
        except IncompleteStateError as error:
            return str(error)
        return "went on"

    first, second = together(tmp_path, 2, work)
    assert first == second
    assert "rank 1: an Adagrad of no tracked model steps: add run.track(optimizer_2=extra)" in first
    assert not checkpoints(tmp_path / "run")


@pytest.mark.parametrize(
    ("kind", "said"),
    [("Adam", "an Adam"), ("SGD", "an SGD"), ("RAdam", "an RAdam"), ("DataLoader", "a DataLoader")],
)
def test_things_are_named_as_one_says_them(kind: str, said: str) -> None:
    assert forgotten._a(type(kind, (), {})()) == said
