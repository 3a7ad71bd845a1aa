"""A save that fails is reported and costs nothing: older checkpoints stay, and the next save works."""

from __future__ import annotations

import errno
import os
import resource
import signal
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

import holdfast
from holdfast.base import scope
from holdfast.checkpoint import commit as commits
from holdfast.checkpoint.format.failures import explain
from holdfast.checkpoint.format.manifest import CheckpointName
from holdfast.checkpoint.format.structure import verify
from holdfast.checkpoint.save import plan as planning
from holdfast.checkpoint.save.plan import SnapshotPlanner
from holdfast.errors import (
    ControlError,
    ExitCode,
    LeaseLostError,
    SaveFailedError,
    SaveStorageError,
    UsageError,
)
from holdfast.journal.events import SaveFailed
from holdfast.record import directory
from kit.ranks.together import together
from kit.runs import events_in
from kit.tiny import checkpoints, forked, let_saves_end, train, tree


def limit_file_size(limit: int) -> None:
    """Make every write beyond `limit` bytes of a file fail, as on a full disk (EFBIG instead of ENOSPC)."""
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, resource.RLIM_INFINITY))


def failures(run_dir: Path) -> list[SaveFailed]:
    return events_in(run_dir, SaveFailed)


def test_a_full_disk_in_the_middle_of_a_save_loses_nothing(tmp_path: Path) -> None:
    """The save of step 6 fails, the run goes on, and the save of step 9 works once there is room again."""
    run_dir = tmp_path / "run"
    reference = train(tmp_path / "reference", until=12)

    def at_step(step: int, run: holdfast.Run) -> None:
        if step == 5:
            (tmp_path / "before").write_text(repr(sorted(tree(checkpoints(run_dir)[0]).items())))
            limit_file_size(20_000)
        if step == 7:
            resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))

    def work() -> None:
        outcome = train(run_dir, until=12, at_step=at_step)
        assert outcome.losses == reference.losses
        assert outcome.parameters == reference.parameters

    assert forked(work) == 0
    assert [path.name[:13] for path in checkpoints(run_dir)] == [
        "step_00000012",
        "step_00000009",
        "step_00000003",
    ]
    assert all(verify(path).sound for path in checkpoints(run_dir))
    assert repr(sorted(tree(checkpoints(run_dir)[-1]).items())) == (tmp_path / "before").read_text()
    (failure,) = failures(run_dir)
    assert (failure.step, failure.in_a_row) == (6, 1)
    assert "File too large" in failure.error
    assert not list((run_dir / "checkpoints" / ".staging").iterdir()), "the failed save was cleared away"


def test_too_many_failed_saves_in_a_row_stop_the_run(tmp_path: Path) -> None:
    """Cases orbax#605, keras#23609: a failure is never swallowed."""
    run_dir = tmp_path / "run"

    def at_step(step: int, run: holdfast.Run) -> None:
        if step == 4:
            limit_file_size(20_000)

    def work() -> None:
        train(run_dir, until=30, at_step=at_step, checkpoint_max_failed_saves=2)

    assert forked(work) == ExitCode.SAVE_FAILED
    assert [failure.step for failure in failures(run_dir)] == [6, 9]
    assert [path.name[:13] for path in checkpoints(run_dir)] == ["step_00000003"]
    assert train(run_dir, until=4).started_at == 3


def test_a_final_save_that_fails_is_raised(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"

    def at_step(step: int, run: holdfast.Run) -> None:
        if step == 4:
            limit_file_size(20_000)

    assert forked(lambda: train(run_dir, until=5, at_step=at_step) and None) == ExitCode.SAVE_FAILED


@pytest.mark.parametrize("what", ["root", "run"])
def test_a_directory_that_cannot_be_written_is_told_at_once(tmp_path: Path, what: str) -> None:
    (tmp_path / "file").write_text("in the way")
    blocked = tmp_path / "file" / "below"
    settings: dict[str, Any] = {"checkpoint_root": str(blocked)} if what == "root" else {}
    run_dir = blocked if what == "run" else tmp_path / "run"
    with pytest.raises((UsageError, ControlError), match="below"):
        train(run_dir, until=9, **settings)
    assert (tmp_path / "file").read_text() == "in the way"


def test_something_in_the_way_of_staging_is_told_at_the_start_and_never_overwritten(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    train(run_dir, until=3)
    root = run_dir / "checkpoints"
    (root / ".staging").rmdir()
    (root / ".staging").write_text("not a directory")
    with pytest.raises(UsageError, match=r"checkpoint\.root"):
        train(run_dir, until=4)
    assert (root / ".staging").read_text() == "not a directory"
    assert [path.name[:13] for path in checkpoints(run_dir)] == ["step_00000003"]


@pytest.mark.parametrize("where", ["the commit record", "the last record"])
def test_a_control_directory_that_is_full_fails_the_save_and_not_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    """Checkpoints may lie elsewhere, with room to spare. Nor does a run fail for want of a last record."""
    run_dir, real = tmp_path / "run", directory.create_exclusive
    full = threading.Event()

    def create_exclusive(path: Path, data: bytes, **more: Any) -> bool:
        refused = full.is_set() and path.parent.name == "commits"
        if refused or (where == "the last record" and path.name == "end.json"):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
        return real(path, data, **more)

    def at_step(step: int, run: holdfast.Run) -> None:
        if step in (5, 8) and where == "the commit record":
            full.set() if step == 5 else full.clear()

    monkeypatch.setattr(directory, "create_exclusive", create_exclusive)
    reference = train(tmp_path / "reference", until=12)
    assert train(run_dir, until=12, at_step=at_step).losses == reference.losses
    found = [path.name[:13] for path in checkpoints(run_dir)]
    missed = {"step_00000006"} if where == "the commit record" else set()
    assert set(found) == {f"step_{step:08d}" for step in (3, 6, 9, 12)} - missed
    assert ["No space left" in failure.error for failure in failures(run_dir)] == [True] * len(missed)


def test_saves_that_storage_alone_fails_end_the_run_with_the_code_of_that(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*args: object, **kwargs: object) -> None:
        raise OSError(errno.EDQUOT, os.strerror(errno.EDQUOT))

    def work() -> None:
        monkeypatch.setattr(commits, "open_staged", full)
        train(tmp_path / "run", until=30, checkpoint_max_failed_saves=2)

    assert forked(work) == ExitCode.STORAGE_FAILED
    assert [failure.in_a_row for failure in failures(tmp_path / "run")] == [1, 2]


# --- a save never ends a run by a surprise ------------------------------------------------------------------


class Fails:
    """A tracked object whose state_dict fails at some steps."""

    def __init__(self, errors: dict[int, BaseException]) -> None:
        self.errors = errors
        self.run: holdfast.Run | None = None

    def state_dict(self) -> dict[str, int]:
        if self.run is not None and (error := self.errors.get(self.run.step)) is not None:
            raise error
        return {"a": 1}

    def load_state_dict(self, state: dict[str, int]) -> None:
        del state


class Opaque(torch.Tensor):
    """A tensor subclass that does not say of which tensors it is made."""

    @staticmethod
    def __new__(cls, *size: int) -> Opaque:
        made: Opaque = torch.Tensor._make_wrapper_subclass(cls, size, dtype=torch.float32)
        return made

    @classmethod
    def __torch_dispatch__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function in (torch.ops.aten.detach.default, torch.ops.aten.view.default):
            return cls(*args[0].size())
        raise NotImplementedError(str(function))


class Part(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(3, 3)


@pytest.mark.parametrize("asynchronous", [False, True])
def test_whatever_goes_wrong_on_one_rank_is_a_failed_save_on_all_and_training_goes_on(
    tmp_path: Path, asynchronous: bool
) -> None:
    """A DTensor over a tensor without bytes of its own raised a bare RuntimeError out of `end_step`."""

    def work(rank: int) -> list[str]:
        mesh = init_device_mesh("cpu", (2,))
        errors: dict[int, BaseException] = {2: KeyError("lost"), 4: CheckpointException("odd", {})}
        hook = Fails(errors if rank == 1 else {})
        model = Part()
        run = holdfast.Run(
            run_dir=tmp_path / "run",
            checkpoint_interval=1,
            checkpoint_async_save=asynchronous,
            checkpoint_max_failed_saves=20,
            checkpoint_timeout=20.0,
            checkpoint_save_at_end=False,
        )
        run.track(model=model, hook=hook)
        hook.run = run
        finish = SnapshotPlanner.finish_plan
        for step, _ in run.steps([1], until=8):
            let_saves_end(run)
            if step == 3:
                model.register_buffer("odd", DTensor.from_local(Opaque(2, 2), mesh, [Shard(0)]))
            if step == 4:
                del model.odd
            if step == 5 and rank == 1:  # a mistake of Holdfast's own, after the last exchange of a new plan
                SnapshotPlanner.finish_plan = None  # type: ignore[method-assign,assignment]
            if step == 5:
                model.register_buffer("more", torch.ones(2))
            if step == 6:
                SnapshotPlanner.finish_plan = finish  # type: ignore[method-assign]
            if step == 7 and rank == 0:  # another, where the plan is made for all
                planning._plan_for_all = None  # type: ignore[assignment]
            if step == 7:
                model.register_buffer("again", torch.ones(3))
        return [f"{one.step}: {one.error}" for one in failures(tmp_path / "run")]

    told = together(tmp_path, 2, work)[0]
    assert [line.partition(":")[0] for line in told] == ["2", "3", "4", "5", "7"]
    assert "rank 1: track(hook=…), in its state_dict: KeyError: 'lost'" in told[0]
    assert "model.odd: what this rank holds of it is an Opaque" in told[1]
    assert "rank 1: track(hook=…), in its state_dict: CheckpointException" in told[2]
    assert "rank 1: TypeError" in told[3]
    assert "the save could not be planned: TypeError" in told[4]
    assert [path.name[:13] for path in checkpoints(tmp_path / "run")] == ["step_00000006", "step_00000001"]
    assert all(verify(path).sound for path in checkpoints(tmp_path / "run"))
    assert not list((tmp_path / "run" / "checkpoints" / ".staging").iterdir())


@pytest.mark.parametrize("asking", [KeyboardInterrupt(), SystemExit(3), scope.RestartRequested("why")])
def test_what_asks_the_process_to_end_is_no_failed_save(tmp_path: Path, asking: BaseException) -> None:
    hook = Fails({1: asking})
    run = holdfast.Run(run_dir=tmp_path / "run", checkpoint_interval=1)
    run.track(model=nn.Linear(1, 1), hook=hook)
    hook.run = run
    with pytest.raises(type(asking)):
        list(run.steps([1], until=3))
    assert failures(tmp_path / "run") == []
    assert not checkpoints(tmp_path / "run")


def test_a_state_that_can_never_be_saved_ends_the_run_after_so_many_saves_and_says_what_it_is(
    tmp_path: Path,
) -> None:
    error = RuntimeError("no state today")
    hook = Fails(dict.fromkeys(range(1, 9), error))
    run = holdfast.Run(run_dir=tmp_path / "run", checkpoint_interval=1, checkpoint_max_failed_saves=2)
    run.track(model=nn.Linear(1, 1), hook=hook)
    hook.run = run
    done = []
    with pytest.raises(SaveFailedError, match=r"track\(hook=…\).*no state today.*2 failed saves in a row"):
        done += [step for step, _ in run.steps([1], until=8)]
    assert [failure.in_a_row for failure in failures(tmp_path / "run")] == [1, 2]


@given(
    st.lists(
        st.tuples(
            st.sampled_from([SaveFailedError, SaveStorageError, LeaseLostError]),
            st.sampled_from(["a", "b", "c", "d", "e", "f"]),
        ),
        min_size=1,
        max_size=40,
    )
)
def test_all_ranks_make_the_same_error_of_what_each_told(told: list[tuple[Any, str]]) -> None:
    error = explain([(rank, *one) for rank, one in enumerate(told)], CheckpointName(3, "ab"))
    kinds = {kind for kind, _ in told}
    assert isinstance(error, LeaseLostError) == (LeaseLostError in kinds)
    assert isinstance(error, SaveFailedError) or LeaseLostError in kinds
    assert isinstance(error, SaveStorageError) == (kinds == {SaveStorageError}), "storage alone"
    assert len(str(error)) < 400, "however many ranks there are"
