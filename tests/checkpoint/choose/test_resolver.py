"""The resume resolver: the right run, the right rung, by evidence, and nobody else's."""

from __future__ import annotations

import shutil
from pathlib import Path

import msgspec
import pytest

import holdfast
from holdfast.checkpoint.choose.resolver import resolve_resume
from holdfast.checkpoint.format import manifest as manifests
from holdfast.errors import NoValidRungError, RunIsLiveError, UsageError
from holdfast.record.directory import ControlDirectory
from holdfast.record.launches import launch_to_repeat, newest_launches, record_launch
from holdfast.record.lease import LeaseKeeper, claim
from kit.damage import flip_shard
from kit.tiny import checkpoints, train, tree


def launched(run_dir: Path, job: str, root: str = "", remote: str = "") -> None:
    control = ControlDirectory.open_or_create(run_dir)[0]
    environ = {"SLURM_JOB_ID": job, "SLURM_RESTART_COUNT": "1"} if job else {}
    problem = record_launch(
        control, "launch", ["train.py"], node="a", min_nodes=1, max_nodes=1, workers_per_node=1,
        root=root, remote=remote, environ=environ,
    )  # fmt: skip
    assert problem == ""


def test_what_it_foretells_is_what_the_resume_does(run_dir: Path) -> None:
    """E4: by evidence. The file's name and size are right, its bytes are not."""
    newest, older, *_ = checkpoints(run_dir)
    flip_shard(newest)
    before = tree(run_dir)
    found = holdfast.resolve_resume(run_dir).require()
    assert (found.chosen, found.step, found.path) == (older.name, 6, str(older))
    assert (found.world, found.samples, found.digests_read) == (1, 24, True)
    assert found.why[0] == "newest usable checkpoint; every digest matched"
    assert found.why[1].startswith(f"not {newest.name}: altered")
    assert [row.verdict for row in found.candidates] == [
        "refused",
        "would be used",
        "lower than the one used",
    ]
    assert tree(run_dir) == before
    assert resolve_resume(run_dir, quick=True).chosen == newest.name
    assert train(run_dir, until=10).started_at == 6


def test_a_run_that_somebody_holds_is_refused(run_dir: Path) -> None:
    """Part 3: a new job with the same control directory while the old one still runs."""
    control = ControlDirectory.open(run_dir)
    keeper = LeaseKeeper(control, claim(control, "the old job", 60.0), lambda why: None)
    try:
        found = resolve_resume(run_dir)
    finally:
        keeper.release()
    assert found.exit_code == 20
    assert found.live is not None
    assert not found.usable
    with pytest.raises(RunIsLiveError, match="nobody else may start it"):
        found.require()
    assert resolve_resume(run_dir).usable, "it has let go"


@pytest.mark.parametrize("missing", [False, True], ids=["wrong bytes", "missing shards"])
def test_no_valid_rung_is_foretold_with_every_reason(run_dir: Path, *, missing: bool) -> None:
    for one in checkpoints(run_dir):
        if missing:
            next(one.glob("__0_*")).unlink()
        else:
            flip_shard(one)
    found = resolve_resume(run_dir)
    assert (found.chosen, found.exit_code, found.step) == ("refused", 18, None)
    assert len(found.why) == 4
    assert found.storage_alarm
    with pytest.raises(NoValidRungError):
        found.require()


def test_a_directory_without_a_run_is_one_that_a_start_creates(tmp_path: Path) -> None:
    found = resolve_resume(tmp_path / "new")
    assert (found.run, found.chosen, found.exit_code) == ("", "fresh start", 0)
    assert list(tmp_path.iterdir()) == []


def test_the_run_of_this_job_is_found_among_several(prepared: Path, tmp_path: Path) -> None:
    """E4: the right run for the requeued job."""
    for name, job in (("a", "41"), ("b", "42")):
        shutil.copytree(prepared, tmp_path / name)
        launched(tmp_path / name, job)
    found = resolve_resume(tmp_path, environ={"SLURM_JOB_ID": "42"})
    assert Path(found.run_dir).name == "b"
    assert found.step == 9
    inherited = {"SLURM_JOB_ID": "42", "SLURM_ARRAY_JOB_ID": "40", "SLURM_ARRAY_TASK_ID": "1"}
    found = resolve_resume(tmp_path, environ=inherited)
    assert Path(found.run_dir).name == "b", "an array's task has submitted it, and is another job"
    for environ in ({}, {"SLURM_JOB_ID": "43"}):
        with pytest.raises(UsageError, match="holds 2 runs"):
            resolve_resume(tmp_path, environ=environ)


def test_where_the_last_launch_kept_its_checkpoints_is_where_it_looks(run_dir: Path, tmp_path: Path) -> None:
    elsewhere = tmp_path / "elsewhere"
    (run_dir / "checkpoints").rename(elsewhere)
    assert resolve_resume(run_dir).chosen == "refused"
    launched(run_dir, "", root=str(elsewhere))
    assert resolve_resume(run_dir).path == str(checkpoints_in(elsewhere)[0])


def test_launches_do_not_pile_up_and_a_damaged_record_is_left_out(run_dir: Path) -> None:
    for job in ("41", "42", "43"):
        launched(run_dir, job)
    control = ControlDirectory.open(run_dir)
    assert [one.job for one in newest_launches(control)] == ["43"]
    assert len(list((run_dir / "launches").iterdir())) == 1
    (run_dir / "launches" / "b.json").write_text("{")
    again = launch_to_repeat(control, node="b")
    assert again is not None
    assert (again.job, again.restarts, again.node) == ("43", 1, "a")
    assert resolve_resume(run_dir).step == 9


def checkpoints_in(root: Path) -> list[Path]:
    return sorted(root.glob("step_*"), reverse=True)


def test_a_copy_in_the_remote_stands_in_for_a_bad_directory(run_dir: Path, tmp_path: Path) -> None:
    newest, older, *_ = checkpoints(run_dir)
    remote = tmp_path / "remote"
    shutil.copytree(newest, remote / newest.name)
    flip_shard(newest)
    found = resolve_resume(run_dir, remote=f"file://{remote}")
    assert (found.chosen, found.tier) == (newest.name, "remote")
    assert found.path == f"file://{remote}/{newest.name}"
    flip_shard(remote / newest.name)
    found = resolve_resume(run_dir, remote=f"file://{remote}")
    assert (found.chosen, found.tier) == (older.name, "global")
    assert any("in file://" in reason for reason in found.candidates[0].reasons)


def test_a_remote_copy_under_another_manifest_is_not_this_checkpoint(run_dir: Path, tmp_path: Path) -> None:
    """Principle 1: its name and its own digests are right, and it is another one all the same."""
    newest, older, *_ = checkpoints(run_dir)
    other = Path(shutil.copytree(newest, tmp_path / "remote" / newest.name))
    manifest, _ = manifests.read(other)
    data, _ = manifests.encode(msgspec.structs.replace(manifest, samples=manifest.samples + 1))
    (other / "holdfast.json").write_bytes(data)
    flip_shard(newest)
    found = resolve_resume(run_dir, remote=f"file://{other.parent}")
    assert (found.chosen, found.tier) == (older.name, "global")


def test_a_remote_that_does_not_answer_is_named_and_not_waited_for(run_dir: Path) -> None:
    found = resolve_resume(run_dir, remote="nosuch://bucket/prefix")
    assert found.chosen == checkpoints(run_dir)[0].name
    assert found.unseen
    assert "nosuch" in found.unseen[0]
