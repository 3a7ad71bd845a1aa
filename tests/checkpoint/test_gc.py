"""`holdfast ckpt gc`, as a shell sees it."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from holdfast.checkpoint.read_back import unread
from holdfast.cli import ckpt as commands
from holdfast.journal.events import CheckpointsDeleted, LeaseClaimed
from holdfast.journal.reader import read_journal
from holdfast.record.directory import ControlDirectory
from holdfast.record.lease import Fence, LeaseKeeper, claim, current_epoch
from kit.harness import Result, finish, holdfast
from kit.runs import events_in
from kit.tiny import checkpoints, steps_of, train, tree


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run with the checkpoints 1 to 5."""
    run_dir = tmp_path_factory.mktemp("prepared") / "run"
    train(run_dir, until=5, checkpoint_interval=1)
    return run_dir


def gc(run_dir: Path, *args: str | Path) -> Result:
    return finish(holdfast("ckpt", "gc", str(run_dir), *map(str, args)), cwd=run_dir.parent)


def test_gc_deletes_says_why_and_the_run_goes_on(run_dir: Path) -> None:
    result = gc(run_dir, "--keep-last", "2", "--keep-every-steps", "3")
    assert result.code == 0, result.text
    lines = result.out.splitlines()
    assert lines[0].split() == ["step", "id", "standing", "size", "why"]
    assert [line.split()[:2] for line in lines[1:-1]] == [
        ["kept", "5"],
        ["kept", "4"],
        ["kept", "3"],
        ["deleted", "2"],
        ["deleted", "1"],
    ]
    assert lines[3].endswith("the first at or after step 3 (every 3 steps)")
    assert lines[4].endswith("older than the last 2")
    assert "3 checkpoints kept, 2 deleted, " in lines[-1]
    assert lines[-1].endswith("KiB freed")
    assert steps_of(run_dir) == [5, 4, 3]
    assert list((run_dir / "checkpoints" / ".trash").iterdir()) == []
    journal = [
        line for line in read_journal(run_dir / "journal") if isinstance(line.body, CheckpointsDeleted)
    ]
    assert [name[:13] for name in journal[0].body.names] == ["step_00000002", "step_00000001"]  # type: ignore[union-attr]
    assert journal[0].who.startswith("gc-")
    assert gc(run_dir, "--keep-last", "2", "--keep-every-steps", "3").out.endswith("0 deleted, 0 B freed\n")
    assert train(run_dir, until=6).started_at == 5
    claims = events_in(run_dir, LeaseClaimed)
    assert claims[-1].evidence == "epoch 3 was released", "gc gave the lease back, both times"


def test_a_dry_run_says_the_same_and_changes_nothing(run_dir: Path) -> None:
    before = tree(run_dir)
    result = gc(run_dir, "--keep-last", "2", "--dry-run")
    assert result.code == 0, result.text
    assert [line.split()[:2] for line in result.out.splitlines()[4:6]] == [["would", "delete"]] * 2
    assert "2 checkpoints kept, 3 would be deleted, " in result.out
    assert tree(run_dir) == before


def test_json_is_for_programs(run_dir: Path) -> None:
    said = json.loads(gc(run_dir, "--keep-last", "2", "--dry-run", "--json").out)
    assert said["dry_run"] is True
    assert [(row["step"], row["deleted"]) for row in said["checkpoints"]] == [
        (5, False),
        (4, False),
        (3, True),
        (2, True),
        (1, True),
    ]
    assert said["bytes_freed"] == sum(row["bytes"] for row in said["checkpoints"] if row["deleted"]) > 200_000
    assert all(row["reason"] and row["standing"] == "committed" for row in said["checkpoints"])


def test_a_live_run_is_refused_with_20_and_left_alone(run_dir: Path) -> None:
    control = ControlDirectory.open(run_dir)
    keeper = LeaseKeeper(control, claim(control, "another launch", 30.0), lambda why: None)
    try:
        epoch = current_epoch(control)
        result = gc(run_dir, "--keep-last", "2")
        assert result.code == 20, result.text
        assert "is held by pid" in result.err
        assert steps_of(run_dir) == [5, 4, 3, 2, 1]
        assert gc(run_dir, "--keep-last", "2", "--dry-run").code == 0, "looking is allowed"
        assert current_epoch(control) == epoch
        Fence(control, epoch).check("go on")
    finally:
        keeper.release()


def test_damaged_ones_go_only_when_asked_for(run_dir: Path) -> None:
    next(checkpoints(run_dir)[3].glob("*.distcp")).unlink()
    result = gc(run_dir, "--keep-last", "2")
    assert steps_of(run_dir) == [5, 4, 2]
    assert "damaged, kept as evidence: missing: __0_0.distcp" in result.out
    result = gc(run_dir, "--broken")
    assert result.code == 0, result.text
    assert "damaged: missing: __0_0.distcp" in result.out
    assert steps_of(run_dir) == [5, 4]


@pytest.mark.parametrize(
    ("args", "said"),
    [
        ([], "say what to keep with --keep-last"),
        (["--keep-last", "1"], "--keep-last"),
        (["--keep-every-steps", "5"], "give --keep-last too"),
        (["--keep-every-hours", "5", "--broken"], "give --keep-last too"),
        (["--keep-last", "2", "--root", "nowhere"], "there is no such directory"),
    ],
    ids=str,
)
def test_what_makes_no_sense_is_a_usage_error(run_dir: Path, args: list[str], said: str) -> None:
    result = gc(run_dir, *args)
    assert result.code == 2, result.text
    assert said in result.err
    assert steps_of(run_dir) == [5, 4, 3, 2, 1]


def test_a_root_elsewhere_is_named(run_dir: Path) -> None:
    elsewhere = Path(shutil.move(run_dir / "checkpoints", run_dir.parent / "elsewhere"))
    assert gc(run_dir, "--keep-last", "2").code == 2
    assert gc(run_dir, "--keep-last", "2", "--root", elsewhere).code == 0
    assert len(list(elsewhere.glob("step_*"))) == 2


def test_what_is_not_a_run_is_refused(tmp_path: Path) -> None:
    result = gc(tmp_path, "--keep-last", "2")
    assert result.code == 24, result.text
    assert "is not a run directory" in result.err


def test_a_verification_keeps_what_it_reads(run_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A checkpoint is not deleted under `holdfast ckpt verify`."""
    import typer

    from holdfast.checkpoint.format import structure as verification

    real = verification.verify
    locked: list[bool] = []

    def watched(directory: Path, **options: object) -> object:
        with unread(directory) as free:
            locked.append(not free)
        return real(directory, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(verification, "verify", watched)
    with pytest.raises(typer.Exit) as left:
        commands.verify_checkpoints([run_dir])
    assert left.value.exit_code == 0
    assert locked == [True] * 5
    with unread(checkpoints(run_dir)[0]) as free:
        assert free
