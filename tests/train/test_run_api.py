"""Run in both of its shapes, its errors, and what it leaves in a checkpoint."""

from __future__ import annotations

import gc
import math
import os
import random
import resource
import signal
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
import torch._dynamo  # an optimizer imports it: once here, and not in every fork
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.utils.data import DataLoader

import holdfast
from holdfast.checkpoint.format import manifest as manifests
from holdfast.checkpoint.format.structure import verify
from holdfast.errors import ConfigError, ExitCode, IncompleteStateError, SaveFailedError, UsageError
from holdfast.journal.events import RunFinished, StepsDone
from holdfast.journal.reader import read_journal
from holdfast.policy import budgets
from holdfast.record import operator
from holdfast.record.attempts import attempt_numbers, ends_of
from holdfast.record.directory import ControlDirectory
from holdfast.record.launches import told_progress
from kit.checkpoints import save_stock
from kit.harness import finish
from kit.harness import holdfast as launched
from kit.runs import events_in
from kit.tiny import Numbers, build, checkpoints, forked, train


class CallbackTrainer:
    """Built like the loops of Lightning and the HF Trainer: it owns epochs and hooks; Run is a guest."""

    def __init__(self, run: holdfast.Run, max_steps: int) -> None:
        self.run, self.max_steps = run, max_steps
        self.seen: dict[int, tuple[str, list[int]]] = {}

    def fit(self, model: nn.Module, optimizer: Any, schedule: Any, loader: DataLoader[Any]) -> None:
        feed = self.run.feed(loader)
        self.run.track(model=model, optimizer=optimizer, schedule=schedule)
        global_step = self.run.start()  # on_train_start
        while global_step < self.max_steps:
            for ids, x in feed:  # an epoch, or the rest of one
                self.run.begin_step()  # on_train_batch_start
                loss = (model(x + 0.01 * torch.randn_like(x)) - x).square().mean() + random.random() * 1e-3
                loss.backward()
                optimizer.step()
                schedule.step()
                optimizer.zero_grad()
                self.run.record(loss=loss, samples=ids)
                self.run.end_step()  # on_train_batch_end
                global_step += 1
                self.seen[global_step] = (loss.item().hex(), ids.tolist())
                if global_step >= self.max_steps:
                    break
        self.run.finish()  # on_train_end


def fit(run_dir: Path, until: int) -> tuple[CallbackTrainer, dict[str, bytes]]:
    model, optimizer, schedule, loader = build()
    trainer = CallbackTrainer(holdfast.Run(run_dir=run_dir, checkpoint_interval=3), until)
    trainer.fit(model, optimizer, schedule, loader)
    return trainer, {name: value.numpy().tobytes() for name, value in model.state_dict().items()}


def test_the_callback_shape_resumes_exactly_like_the_loop(tmp_path: Path) -> None:
    reference = train(tmp_path / "loop", until=12)
    for until in (4, 5, 12):
        trainer, parameters = fit(tmp_path / "callbacks", until)
        for step, (loss, ids) in trainer.seen.items():
            assert loss == reference.losses[step]
            assert ids == reference.samples[step]
    assert min(trainer.seen) == 6
    assert parameters == reference.parameters


def test_stock_dcp_reads_every_committed_checkpoint(tmp_path: Path) -> None:
    outcome = train(tmp_path / "run", until=6)
    model, *_ = build()
    for path in checkpoints(tmp_path / "run"):
        state = {"model": {name: torch.zeros_like(value) for name, value in model.state_dict().items()}}
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            dcp.load(state, checkpoint_id=path, no_dist=True)
        if path.name.startswith("step_00000006"):
            assert {k: v.numpy().tobytes() for k, v in state["model"].items()} == outcome.parameters


def test_the_manifest_says_what_the_checkpoint_holds(tmp_path: Path) -> None:
    train(tmp_path / "run", until=6)
    newest, older = checkpoints(tmp_path / "run")
    manifest, _ = manifests.read(newest)
    assert (manifest.step, manifest.attempt, manifest.world.size) == (6, 1, 1)
    assert manifest.parent == manifests.read(older)[0].id
    assert manifest.samples == 24
    assert set(manifest.parts) == {"model", "optimizer", "schedule", "rng", "data", "counters"}
    assert manifest.parts["model"].kind == "model"
    assert len(manifest.windows.loss) == 6
    assert all(loss is not None and math.isfinite(loss) for loss in manifest.windows.loss)
    assert manifest.versions.torch == str(torch.__version__)
    assert manifest.versions.config
    assert verify(newest).sound


def test_the_journal_holds_every_step_once(tmp_path: Path) -> None:
    outcome = train(tmp_path / "run", until=7)
    done = events_in(tmp_path / "run", StepsDone)
    steps = [event.first + i for event in done for i in range(len(event.seconds))]
    assert steps == list(range(1, 8))
    losses = [loss for event in done for loss in event.loss]
    assert [float(loss).hex() for loss in losses if loss is not None] == list(outcome.losses.values())
    assert all(digest for event in done for digest in event.samples)
    last = events_in(tmp_path / "run")
    assert any(isinstance(body, RunFinished) and body.step == 7 for body in last)


def test_gradient_norms_reach_the_journal_and_the_manifest(tmp_path: Path) -> None:
    run = holdfast.Run(run_dir=tmp_path / "run")
    run.track(model=nn.Linear(1, 1))
    for step, _ in run.steps([1, 2, 3], until=3):
        run.record(loss=torch.tensor(float(step)), grad_norm=math.inf if step == 2 else torch.tensor(0.5))
    done = [b.body for b in read_journal(tmp_path / "run" / "journal") if isinstance(b.body, StepsDone)]
    assert [norm for some in done for norm in some.grad_norm or []] == [0.5, "inf", 0.5]
    manifest, _ = manifests.read(checkpoints(tmp_path / "run")[0])
    assert manifest.windows.grad_norm == [0.5, None, 0.5]
    assert manifest.windows.loss == [1.0, 2.0, 3.0]


def test_a_finished_run_started_again_does_nothing(tmp_path: Path) -> None:
    train(tmp_path / "run", until=6)
    outcome = train(tmp_path / "run", until=6)
    assert outcome.losses == {}
    assert len(checkpoints(tmp_path / "run")) == 2


def test_every_generator_is_restored(tmp_path: Path) -> None:
    """Python, numpy and torch, and the generator object of a sampler."""

    def draw(run_dir: Path, until: int) -> dict[int, Any]:
        torch.manual_seed(1)
        random.seed(1)
        numpy.random.seed(1)
        generator = torch.Generator().manual_seed(3)
        loader = DataLoader(Numbers(), batch_size=3, shuffle=True, generator=generator)
        run = holdfast.Run(run_dir=run_dir, checkpoint_interval=0)
        run.track(model=nn.Linear(1, 1))
        return {
            step: (ids.tolist(), random.random(), numpy.random.rand(), torch.rand(1).item())
            for step, (ids, _) in run.steps(loader, until=until)
        }

    whole = draw(tmp_path / "whole", 20)
    for stop in (2, 7, 8, 14):
        parts = draw(tmp_path / f"parts-{stop}", stop) | draw(tmp_path / f"parts-{stop}", 20)
        assert parts == whole


class Positioned:
    """A loader with its own state, like StatefulDataLoader."""

    def __init__(self) -> None:
        self.at, self.loads = 0, 0

    def __iter__(self) -> Iterator[int]:
        while self.at < 5:
            self.at += 1
            yield self.at
        self.at = 0

    def state_dict(self) -> dict[str, int]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.at, self.loads = state["at"], self.loads + 1


@pytest.mark.parametrize("stop", range(1, 12))
def test_a_loader_with_its_own_state_resumes_where_it_was(tmp_path: Path, stop: int) -> None:
    """Case meta-pytorch/data#1437: also at the end of an epoch."""

    def batches(until: int) -> dict[int, int]:
        run = holdfast.Run(run_dir=tmp_path / "run", checkpoint_interval=0)
        run.track(model=nn.Linear(1, 1))
        return dict(run.steps(Positioned(), until=until))

    assert batches(stop) | batches(12) == {step: (step - 1) % 5 + 1 for step in range(1, 13)}


def test_a_plain_dcp_directory_is_loaded_by_name_and_its_lack_of_digests_told(tmp_path: Path) -> None:
    model, *_ = build()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(0.5)
    stock = save_stock(tmp_path / "step-40", {"model": model.state_dict()})
    seen: dict[str, Any] = {}

    def look(step: int, run: holdfast.Run) -> None:
        seen.setdefault("step", step)

    def remember(built: nn.Module) -> None:
        seen["model"] = built

    settings = {"checkpoint_resume_from": str(stock), "checkpoint_fresh_parts": "optimizer,schedule,data"}
    train(tmp_path / "run", until=40, after_build=remember, **settings)
    assert torch.equal(seen["model"].state_dict()["0.weight"], model.state_dict()["0.weight"])
    train(tmp_path / "run", until=41, at_step=look, **settings)
    assert seen["step"] == 41
    decision = (tmp_path / "run" / "attempts" / "000001" / "decisions" / "resume.json").read_text()
    assert "no digests" in decision


def test_a_plain_dcp_directory_that_is_incomplete_is_refused(tmp_path: Path) -> None:
    model, *_ = build()
    stock = save_stock(tmp_path / "step-40", {"model": model.state_dict()})
    next(stock.glob("*.distcp")).unlink()
    with pytest.raises(holdfast.HoldfastError, match="missing"):
        train(tmp_path / "run", until=41, checkpoint_resume_from=str(stock))


# --- strict in both directions (cases pytorch#126881, #126285) ----------------------------------------------


def resume_with(run_dir: Path, model: nn.Module, **more: Any) -> None:
    run = holdfast.Run(run_dir=run_dir)
    run.track(model=model, **more)
    for _ in run.steps([1, 2, 3], until=2):
        pass


def save_with(run_dir: Path, model: nn.Module, **more: Any) -> None:
    run = holdfast.Run(run_dir=run_dir)
    run.track(model=model, **more)
    for _ in run.steps([1, 2, 3], until=1):
        pass


class Two(nn.Module):
    def __init__(self, width: int = 3, dtype: torch.dtype = torch.float32, extra: bool = False) -> None:
        super().__init__()
        self.a = nn.Linear(2, width, dtype=dtype)
        if extra:
            self.b = nn.Linear(2, 2)


@pytest.mark.parametrize(
    ("saved", "resumed", "told"),
    [
        (Two(), Two(extra=True), "b.bias: tracked, but not in the checkpoint"),
        (Two(extra=True), Two(), "b.bias: in the checkpoint, but not tracked"),
        (Two(), Two(width=4), r"shape \(4,\) tracked, \(3,\) in the checkpoint"),
        (Two(), Two(dtype=torch.bfloat16), "torch.bfloat16 tracked, torch.float32 in the checkpoint"),
    ],
)
def test_state_that_does_not_fit_is_refused_and_named(
    tmp_path: Path, saved: nn.Module, resumed: nn.Module, told: str
) -> None:
    save_with(tmp_path / "run", saved)
    with pytest.raises(IncompleteStateError, match=told):
        resume_with(tmp_path / "run", resumed)


class Counter:
    def __init__(self) -> None:
        self.value = 0

    def state_dict(self) -> dict[str, int]:
        return {"value": self.value}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.value = state["value"]


def test_a_part_that_is_missing_or_no_longer_tracked_is_an_error(tmp_path: Path) -> None:
    """Case RLinf#1469: a missing part is an error, not a warning."""
    save_with(tmp_path / "without", Two())
    with pytest.raises(IncompleteStateError, match=r"Missing from the checkpoint: \['scaler'\]"):
        resume_with(tmp_path / "without", Two(), scaler=Counter())
    save_with(tmp_path / "with", Two(), scaler=Counter())
    with pytest.raises(IncompleteStateError, match=r"not tracked any more: \['scaler'\]"):
        resume_with(tmp_path / "with", Two())


def test_an_object_is_restored(tmp_path: Path) -> None:
    counter = Counter()
    counter.value = 41
    save_with(tmp_path / "run", Two(), counter=counter)
    other = Counter()
    resume_with(tmp_path / "run", Two(), counter=other)
    assert other.value == 41


def test_an_optimizer_with_parameters_that_had_no_gradient_yet_resumes_exactly(tmp_path: Path) -> None:
    """Their state is created at their first gradient, after the resume, just as without one."""

    def go(run_dir: Path, until: int) -> dict[str, Any]:
        torch.manual_seed(0)
        model = Two(extra=True)
        optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
        run = holdfast.Run(run_dir=run_dir)
        run.track(model=model, optimizer=optimizer)
        for step, _ in run.steps([1, 2, 3], until=until):
            output = model.a(torch.ones(1, 2)).sum()
            if step > 4:
                output = output + model.b(torch.ones(1, 2)).sum()
            output.backward()
            optimizer.step()
            optimizer.zero_grad()
        return {name: value.clone() for name, value in model.state_dict().items()}

    go(tmp_path / "run", 3)
    resumed = go(tmp_path / "run", 7)
    whole = go(tmp_path / "whole", 7)
    assert all(torch.equal(resumed[name], value) for name, value in whole.items())


def test_a_state_dict_that_raises_is_a_failed_save_that_names_the_object(tmp_path: Path) -> None:
    class Broken(Counter):
        def state_dict(self) -> dict[str, int]:
            raise KeyError("lost")

    with pytest.raises(
        SaveFailedError, match=r"track\(broken=…\), in its state_dict: KeyError: 'lost'"
    ) as told:
        save_with(tmp_path / "run", Two(), broken=Broken())
    assert isinstance(told.value.__cause__, SaveFailedError)
    assert isinstance(told.value.__cause__.__cause__, KeyError)
    assert not checkpoints(tmp_path / "run")


# --- misuse -------------------------------------------------------------------------------------------------


def test_misuse_is_told_plainly(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = holdfast.Run(run_dir=tmp_path / "run")
    with pytest.raises(UsageError, match="nothing is tracked"):
        run.start()
    with pytest.raises(UsageError, match="has no state_dict"):
        run.track(thing=object())
    with pytest.raises(UsageError, match="plain identifier"):
        run.track(holdfast=nn.Linear(1, 1))
    with pytest.raises(UsageError, match="one-way iterator"):
        run.feed(iter([1, 2]))
    with pytest.raises(UsageError, match="has not started"):
        run.save()
    run.track(model=nn.Linear(1, 1))
    with pytest.raises(UsageError, match="before start"):
        run.begin_step()
    run.start()
    with pytest.raises(UsageError, match="after the run started"):
        run.track(other=nn.Linear(1, 1))
    with pytest.raises(UsageError, match="without begin_step"):
        run.end_step()
    run.begin_step()
    with pytest.raises(UsageError, match="in the middle of step 1"):
        run.save()
    run.end_step()
    run.close()
    with pytest.raises(ConfigError, match="interval"):
        holdfast.Run(checkpoint_intervall=3)
    monkeypatch.setenv("WORLD_SIZE", "2")
    lonely = holdfast.Run(run_dir=tmp_path / "other")
    lonely.track(model=nn.Linear(1, 1))
    assert signal.getsignal(signal.SIGTERM) != signal.SIG_DFL
    with pytest.raises(UsageError, match="init_process_group"):
        lonely.start()
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL, "a script that goes on without it can be ended"


def test_an_empty_loader_is_told_instead_of_looping_for_ever(tmp_path: Path) -> None:
    run = holdfast.Run(run_dir=tmp_path / "run")
    run.track(model=nn.Linear(1, 1))
    with pytest.raises(UsageError, match="gave no batch"):
        next(iter(run.steps([], until=2)))


def test_a_changed_dataset_is_noticed_when_its_batches_are_skipped(tmp_path: Path) -> None:
    run = holdfast.Run(run_dir=tmp_path / "run")
    run.track(model=nn.Linear(1, 1))
    list(run.steps([1, 2, 3, 4, 5], until=4))
    again = holdfast.Run(run_dir=tmp_path / "run")
    again.track(model=nn.Linear(1, 1))
    with pytest.raises(IncompleteStateError, match="ended after 2 batches"):
        list(again.steps([1, 2], until=6))


def test_an_uncaught_error_ends_the_process_with_its_documented_code(tmp_path: Path) -> None:
    """In a fresh interpreter: the hook sets the code and writes the launcher's error file."""
    import json

    from kit.harness import finish, python

    script = tmp_path / "script.py"
    script.write_text(
        "import holdfast\nrun = holdfast.Run(run_dir='run')\nraise holdfast.errors.NoValidRungError('none')\n"
    )
    result = finish(
        python(script), cwd=tmp_path, env={"TORCHELASTIC_ERROR_FILE": str(tmp_path / "error.json")}
    )
    assert result.code == ExitCode.NO_VALID_RUNG, result.text
    assert "NoValidRungError: none" in result.err
    report = json.loads((tmp_path / "error.json").read_text())
    assert report["message"]["message"] == "NoValidRungError: none"
    assert "." in report["message"]["extraInfo"]["timestamp_exact"]


def test_a_second_run_on_a_live_directory_is_refused(tmp_path: Path) -> None:
    def at_step(step: int, run: holdfast.Run) -> None:
        if step == 2:
            assert forked(lambda: train(tmp_path / "run", until=3) and None) == ExitCode.RUN_IS_LIVE

    assert len(train(tmp_path / "run", until=3, at_step=at_step).losses) == 3


def test_the_per_rank_blob_is_a_plain_tensor_for_dcp(tmp_path: Path) -> None:
    """DCP never has to unpickle an object of ours."""
    import pickle

    train(tmp_path / "run", until=3)
    metadata = pickle.loads((checkpoints(tmp_path / "run")[0] / ".metadata").read_bytes())
    kinds = {type(entry).__name__ for entry in metadata.state_dict_metadata.values()}
    assert kinds == {"TensorStorageMetadata"}
    assert "holdfast.rank_00000" in metadata.state_dict_metadata


# --- launches that nobody watches --------------------------------------------------------------------------


@pytest.fixture
def few_launches(a_script: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(budgets, "MAX_FAILED_LAUNCHES", 2)
    monkeypatch.setattr(budgets, "MAX_LAUNCHES", 4)


@pytest.mark.usefixtures("few_launches")
def test_plain_starts_that_get_nowhere_end_with_22_and_whoever_fixed_it_is_let_in(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"

    def start(fails: bool = True, **settings: object) -> int:
        def at_step(step: int, run: holdfast.Run) -> None:
            (tmp_path / "trained").touch()
            if fails and step == 2:
                raise RuntimeError("no such file: data.bin")

        (tmp_path / "trained").unlink(missing_ok=True)
        return forked(lambda: as_a_script(lambda: str(train(run_dir, until=4, at_step=at_step, **settings))))

    assert [start() for _ in range(2)] == [70, 70]
    ends = [end for _, end in ends_of(ControlDirectory.open(run_dir)) if end is not None]
    assert [(end.outcome, end.exit_code) for end in ends] == [("failed", 1)] * 2
    assert [start() for _ in range(2)] == [ExitCode.BUDGET_SPENT] * 2
    assert not (tmp_path / "trained").exists(), "it ends before it trains"
    control = ControlDirectory.open(run_dir)
    assert attempt_numbers(control) == [1, 2]
    assert start(journal_step_flush=7) == 70, "a changed setting is let in, and counts anew"
    operator.reset_budget(control, "the file is back", "me")
    assert start() == 70, "so is who has fixed it elsewhere"
    assert start(fails=False) == 0
    assert [start(fails=False) for _ in range(5)] == [0] * 5, "what is finished may be started again"


def as_a_script(work: Callable[[], object]) -> None:
    """The interpreter's order: all frames are left, and with them the loop's generator; then the hook."""
    try:
        work()
    except BaseException as error:
        if not isinstance(error, holdfast.HoldfastError):
            sys.excepthook(type(error), error, error.__traceback__)
        raise


def test_who_interrupts_a_loop_or_leaves_it_has_not_seen_it_fail(tmp_path: Path) -> None:
    def interrupted(step: int, run: holdfast.Run) -> None:
        if step == 2:
            raise KeyboardInterrupt

    def left() -> None:
        run = holdfast.Run(run_dir=tmp_path / "run")
        run.track(model=nn.Linear(1, 1))
        for _ in run.steps([1, 2, 3], until=3):
            break

    forked(lambda: as_a_script(lambda: train(tmp_path / "run", until=4, at_step=interrupted)))
    assert forked(lambda: as_a_script(left)) == 0
    control = ControlDirectory.open(tmp_path / "run")
    assert [end.outcome for _, end in ends_of(control) if end is not None] == ["stopped", "stopped"]


@pytest.mark.usefixtures("few_launches")
def test_plain_starts_that_are_killed_but_get_on_are_never_refused(tmp_path: Path) -> None:
    def killed(step: int, run: holdfast.Run) -> None:
        if step == run.attempt + 1:
            signal.raise_signal(signal.SIGKILL)

    ends = [
        forked(lambda: str(train(tmp_path / "run", until=99, at_step=killed, checkpoint_interval=1)))
        for _ in range(6)
    ]
    assert ends == [-signal.SIGKILL] * 6, "each left one step more, and no end"


def test_progress_is_told_without_torch_and_costs_nothing_elsewhere(tmp_path: Path) -> None:
    path = tmp_path / "progress" / "rank_000000"
    path.parent.mkdir()
    code = "import holdfast, sys; holdfast.progress(7); assert 'torch' not in sys.modules"
    plain = {name: value for name, value in os.environ.items() if name != "HOLDFAST_PROGRESS"}
    assert finish([sys.executable, "-c", code], cwd=tmp_path, env=plain).code == 0
    assert not path.exists()
    told = finish([sys.executable, "-c", code], cwd=tmp_path, env={"HOLDFAST_PROGRESS": str(path)})
    assert told.code == 0, told.text
    assert told_progress(tmp_path) == 7
    for nonsense in (b"", b"9x", b"-5", b"99999999999999999999", b"\xff" * 1000):
        (path.parent / "rank_000001").write_bytes(nonsense)
        assert told_progress(tmp_path) == 7


def test_nonsense_that_is_told_as_progress_is_said_and_ends_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("HOLDFAST_PROGRESS", str(tmp_path / "nowhere" / "rank_000000"))
    for step in (-1, 10**15, math.nan, 7):
        holdfast.progress(step)  # type: ignore[arg-type]
    assert caplog.text.count("could not be told to the launcher") == 4


# --- the directory that a script is in ----------------------------------------------------------------------


def test_a_change_of_directory_moves_no_path_of_the_run(tmp_path: Path) -> None:
    one, two, three = (tmp_path / name for name in ("one", "two", "three"))

    def wander() -> None:
        os.chdir(one)
        run = holdfast.Run(run_dir="run", checkpoint_root="saved", stop_stop_file="halt")
        run.track(model=nn.Linear(1, 1))
        os.chdir(two)
        run.start()
        os.chdir(three)
        deadline = time.monotonic() + 30
        while time.monotonic() < deadline:
            run.begin_step()
            (one / "halt").touch()
            run.end_step()

    for place in (one, two, three):
        place.mkdir()
    assert forked(wander) == ExitCode.STOPPED
    assert sorted(path.name for path in one.iterdir()) == ["halt", "run", "saved"]
    assert list((one / "saved").glob("step_*"))
    assert not [*two.iterdir(), *three.iterdir()]


def test_a_launched_script_that_changes_its_directory_first_means_the_launchers_paths(tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "holdfast.toml").write_text('[checkpoint]\nroot = "saved"\n')
    (tmp_path / "train.py").write_text(
        "import os, holdfast\nfrom torch import nn\n"
        "os.chdir('elsewhere')\n"
        "run = holdfast.Run('holdfast.toml', run_dir='run')\n"
        "run.track(model=nn.Linear(1, 1))\n"
        "for _ in run.steps([1, 2], until=2): pass\n"
    )
    argv = launched(
        "run", "--nproc-per-node", "1", "--run-dir", "run", "--config", "holdfast.toml", "train.py"
    )
    result = finish(argv, cwd=tmp_path, timeout=60)
    assert result.code == 0, result.text
    assert list((tmp_path / "saved").glob("step_*"))
    assert not list((tmp_path / "elsewhere").iterdir())


def test_whatever_ends_a_run_has_one_base() -> None:
    for ending in (UsageError("so"), holdfast.Stopped(3, "asked")):
        with pytest.raises(holdfast.RunEnded) as caught:
            raise ending
        assert caught.value.exit_code is (
            ExitCode.USAGE if isinstance(ending, UsageError) else ExitCode.STOPPED
        )
    assert isinstance(holdfast.Stopped(3, "asked"), SystemExit)
    assert not isinstance(holdfast.Stopped(3, "asked"), Exception), "`except Exception` is for failures"
    assert issubclass(holdfast.HoldfastError, Exception)


def test_nothing_grows_over_200_saves(tmp_path: Path) -> None:
    run = holdfast.Run(run_dir=tmp_path / "run", checkpoint_interval=1, checkpoint_save_at_end=False)
    model = nn.Linear(256, 256)
    run.track(model=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))
    gc.collect()  # what earlier tests left behind must not go meanwhile
    others = set(threading.enumerate())
    seen: dict[int, tuple[int, int, int]] = {}
    for step, _ in run.steps([1, 2, 3], until=201):
        if step in (20, 200):
            kept = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
            own = set(threading.enumerate()) - others
            seen[step] = (len(os.listdir("/proc/self/fd")), len(own), kept)
    line = run._session.saving._read_back is not None  # to the process that reads back
    assert seen[200][0] - seen[20][0] <= int(line), "descriptors"
    assert seen[200][1] <= seen[20][1], "threads"
    assert seen[200][2] - seen[20][2] < 20_000, "kilobytes of memory"
    assert len(checkpoints(tmp_path / "run")) == 200
    assert not list((tmp_path / "run" / "checkpoints" / ".staging").iterdir())
