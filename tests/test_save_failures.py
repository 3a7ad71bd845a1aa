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

import holdfast
from holdfast.checkpoint import commit as commits
from holdfast.checkpoint.failures import explain
from holdfast.checkpoint.identity import CheckpointName
from holdfast.checkpoint.verify import verify
from holdfast.control import directory
from holdfast.errors import (
    ControlError,
    LeaseLostError,
    SaveFailedError,
    SaveStorageError,
    StorageError,
    UsageError,
)
from holdfast.exit_codes import ExitCode
from holdfast.journal.events import SaveFailed
from holdfast.journal.reader import read_journal
from tiny import checkpoints, forked, train, tree


def limit_file_size(limit: int) -> None:
    """Make every write beyond `limit` bytes of a file fail, as on a full disk (EFBIG instead of ENOSPC)."""
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, resource.RLIM_INFINITY))


def failures(run_dir: Path) -> list[SaveFailed]:
    return [line.body for line in read_journal(run_dir / "journal") if isinstance(line.body, SaveFailed)]


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


def test_what_failed_a_save_on_all_ranks_decides_what_it_is() -> None:
    name = CheckpointName(3, "abc")
    quota, wrong = OSError(errno.EDQUOT, "Disk quota exceeded"), OSError(errno.EACCES, "Permission denied")
    locked = StorageError("00000001.lock stayed locked for 30 s")
    assert isinstance(explain([(0, quota), (1, locked)], name), SaveStorageError)
    for errors in ([(0, wrong)], [(0, SaveFailedError("rank 1 left no part"))]):
        assert type(explain([*errors], name)) is SaveFailedError
    assert type(explain([(0, ControlError("damaged"))], name)) is ControlError
    assert isinstance(explain([(0, quota), (1, LeaseLostError("x"))], name), LeaseLostError)
