"""A group that was cut off can do no harm when it comes back."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest

import holdfast
from holdfast.checkpoint.commit import STALE_DAYS, Owner, commit, open_root, open_staged, sweep_staging
from holdfast.checkpoint.format.manifest import CheckpointName, CheckpointRoot
from holdfast.errors import ExitCode, LeaseLostError, RunIsLiveError
from holdfast.record.directory import ControlDirectory
from holdfast.record.lease import Fence, claim
from holdfast.record.lineage import CommitRecord, commits_of
from kit.harness import wait_until
from kit.tiny import checkpoints, forked, train, tree


def test_a_group_stopped_past_its_lease_can_neither_commit_nor_move_the_pointer(tmp_path: Path) -> None:
    """Scenario 28: stopped in step 5, overtaken by a new attempt, continued: its next save is refused."""
    run_dir = tmp_path / "run"
    reference = train(tmp_path / "reference", until=9)

    def stop_myself(step: int, run: holdfast.Run) -> None:
        if step == 5:
            os.kill(os.getpid(), signal.SIGSTOP)

    def old_group() -> None:
        train(run_dir, until=9, at_step=stop_myself, control_lease_ttl=2.0)

    pid = os.fork()
    if pid == 0:
        os._exit(forked_code(old_group))
    wait_until(lambda: is_stopped(pid), 30, "the old group stops")
    with pytest.raises(RunIsLiveError):
        train(run_dir, until=9, control_lease_ttl=2.0)
    wait_until(lambda: seconds_since_renewal(run_dir) > 2.0, 10, "the old group's lease lapses")
    outcome = train(run_dir, until=9, control_lease_ttl=2.0)
    assert outcome.started_at == 3
    assert outcome.attempt == 2
    assert outcome.parameters == reference.parameters
    root = run_dir / "checkpoints"
    before = tree(root)
    os.kill(pid, signal.SIGCONT)
    _, status = os.waitpid(pid, 0)
    assert os.waitstatus_to_exitcode(status) == ExitCode.LEASE_LOST
    assert tree(root) == before, "the old group changed something"
    assert [path.name[:13] for path in checkpoints(run_dir)] == [
        "step_00000009",
        "step_00000006",
        "step_00000003",
    ]
    assert train(run_dir, until=9).losses == {}, "the run is finished and unharmed"


def seconds_since_renewal(run_dir: Path) -> float:
    return time.time() - max(path.stat().st_mtime for path in (run_dir / "lease").glob("*.beat"))


def is_stopped(pid: int) -> bool:
    stat = Path(f"/proc/{pid}/stat").read_text()
    return stat.rpartition(")")[2].split()[0] == "T"


def forked_code(work: object) -> int:
    """The exit code of `work` run in this very process."""
    try:
        work()  # type: ignore[operator]
    except holdfast.HoldfastError as error:
        return int(error.exit_code)
    return 0


def test_the_next_launch_after_a_kill_takes_over_at_once(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"

    def die(step: int, run: holdfast.Run) -> None:
        if step == 5:
            os.kill(os.getpid(), signal.SIGKILL)

    assert forked(lambda: train(run_dir, until=9, at_step=die, control_lease_ttl=120.0) and None) == -9
    assert train(run_dir, until=9, control_lease_ttl=120.0).started_at == 3


def test_an_old_epoch_can_neither_commit_nor_sweep(tmp_path: Path) -> None:
    """Scenario 28, at the moment itself: the newer epoch is claimed between staging and the rename."""
    control, _ = ControlDirectory.open_or_create(tmp_path / "run")
    root = CheckpointRoot(tmp_path / "root")
    old = Fence(control, claim(control, "old", 5.0).epoch)
    name = CheckpointName(6, "0123abcd")
    owner = Owner(run=control.run_id, attempt=1, epoch=old.epoch)
    open_root(root)
    (open_staged(root, name, owner) / "file").write_text("staged")
    newer = Fence(control, claim(control, "old", 5.0).epoch)
    before = tree(root.path)
    record = CommitRecord(id=name.id, step=6, parent=None, attempt=1, manifest="0" * 32)
    with pytest.raises(LeaseLostError, match="refused to commit step_00000006-0123abcd"):
        commit(root, name, old, control, record)
    assert sweep_staging(root, control.run_id, old) == [], "its own staging is not older than itself"
    assert tree(root.path) == before
    assert not root.committed(name).exists()
    assert not root.latest.exists()
    assert commits_of(control, 1) == []
    assert sweep_staging(root, control.run_id, newer) == [str(name)]
    assert set(tree(root.path)) == {".holdfast-root"}


def test_what_another_run_has_staged_is_swept_only_when_it_is_long_abandoned(tmp_path: Path) -> None:
    control, _ = ControlDirectory.open_or_create(tmp_path / "run")
    fence = Fence(control, claim(control, "launch", 5.0).epoch)
    root = CheckpointRoot(tmp_path / "root")
    open_root(root)
    name = CheckpointName(6, "0123abcd")
    staged = open_staged(root, name, Owner(run="another", attempt=1, epoch=1))
    (staged / "shard").write_text("bytes")
    now = (staged / "shard").stat().st_mtime
    week = STALE_DAYS * 86400
    assert sweep_staging(root, control.run_id, fence, now=now + week - 60) == []
    os.utime(staged / "shard", (now + week, now + week))  # somebody is still writing
    assert sweep_staging(root, control.run_id, fence, now=now + week + 60) == []
    assert (staged / "shard").read_text() == "bytes"
    (root.staging / ".step_00000006-0123abcd.owner.abc.tmp").touch()
    assert sweep_staging(root, control.run_id, fence, now=now + 3 * week) == [str(name)]
    assert set(tree(root.path)) == {".holdfast-root"}
