"""A save that fails is reported and costs nothing: older checkpoints stay, and the next save works."""

from __future__ import annotations

import resource
import signal
from pathlib import Path
from typing import Any

import pytest

import holdfast
from holdfast.checkpoint.verify import verify
from holdfast.errors import ControlError, UsageError
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
