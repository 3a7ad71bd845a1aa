"""`holdfast ckpt locate` says what a resume will do, and a resume then does that."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from holdfast.errors import NoValidRungError
from holdfast.record.directory import ControlDirectory
from holdfast.record.lease import Fence, LeaseKeeper, claim
from holdfast.record.standing import Standing, StandingBook
from kit.commands import ckpt, ckpt_json
from kit.damage import DAMAGE, flip_bit, flip_shard
from kit.harness import finish
from kit.runs import rejections
from kit.tiny import checkpoints, train, tree


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with checkpoints of steps 3 and 6."""
    run_dir = tmp_path_factory.mktemp("prepared") / "run"
    train(run_dir, until=6)
    return run_dir


def resumed_at(run_dir: Path, **settings: object) -> int | None:
    """Where a real run starts; None if it refuses."""
    try:
        return train(run_dir, until=10, checkpoint_save_at_end=False, **settings).started_at
    except NoValidRungError:
        return None


def condemn(run_dir: Path, checkpoint: Path) -> None:
    control = ControlDirectory.open(run_dir)
    held = claim(control, "test", 5.0)
    keeper = LeaseKeeper(control, held, lambda why: None)
    fence = Fence(control, held.epoch)
    StandingBook(control).append(fence, checkpoint.name[14:], Standing.CONDEMNED, ["said so"])
    keeper.release()


@pytest.mark.parametrize(("damage", "reason"), DAMAGE, ids=[damage.__name__ for damage, _ in DAMAGE])
def test_a_damaged_newest_one_is_refused_for_the_reason_that_a_resume_finds(
    run_dir: Path, damage: Callable[[Path, Path], None], reason: str
) -> None:
    """Scenario 9, asked beforehand."""
    newest, older = checkpoints(run_dir)
    damage(newest, older)
    before = tree(run_dir)
    result = ckpt("locate", run_dir, "--full")
    found = ckpt_json("locate", run_dir, "--full")
    cheap = ckpt_json("locate", run_dir)
    assert tree(run_dir) == before, "looking must change nothing"
    assert result.code == 0, result.text
    assert f"would resume at step 3 from {older}; every digest matched" in result.out
    rows = {row["name"]: row for row in found["checkpoints"]}
    assert (found["chosen"], found["step"], found["path"]) == (older.name, 3, str(older))
    assert rows[newest.name]["verdict"] == "refused"
    assert cheap["chosen"] == (newest.name if damage is flip_bit else older.name)
    assert resumed_at(run_dir) == 3
    word = reason.split()[0]
    assert rows[newest.name]["reasons"][0].startswith(word)
    assert rejections(run_dir)[newest.name][0].startswith(word)


def test_what_is_sound_is_used_and_the_lower_rung_named(run_dir: Path) -> None:
    newest, older = checkpoints(run_dir)
    result = ckpt("locate", run_dir)
    assert result.code == 0, result.text
    lines = result.out.splitlines()
    assert lines[0] == f"checkpoints in {run_dir / 'checkpoints'}"
    assert lines[1].endswith(f"{newest.name}  would be used")
    assert lines[2].endswith(f"{older.name}  lower than the one used")
    assert lines[3].endswith(f"from {newest}; digests were not read: --full does that")
    more = ckpt("locate", run_dir, "--world", "2").out.splitlines()
    assert more[:-1] == lines
    assert more[-1] == "it was saved by 1 rank, and would be resharded to 2 ranks"
    assert resumed_at(run_dir) == 6


def test_when_every_rung_is_bad_it_foretells_the_refusal(run_dir: Path) -> None:
    for path in checkpoints(run_dir):
        flip_shard(path)
    result = ckpt("locate", run_dir, "--full")
    assert result.code == 18, result.text
    assert result.out.count("altered") == 2
    assert "would refuse to start" in result.out
    assert resumed_at(run_dir) is None


def test_deleted_checkpoints_are_missed_and_no_fresh_start_is_promised(run_dir: Path) -> None:
    shutil.rmtree(run_dir / "checkpoints")
    result = ckpt("locate", run_dir)
    assert result.code == 18, result.text
    assert "no such directory" in result.out
    assert result.out.count("its directory is gone") == 2
    assert not (run_dir / "checkpoints").exists(), "looking must not create the root"
    assert resumed_at(run_dir) is None


def test_a_condemned_one_is_passed_over_unless_named_with_force(run_dir: Path) -> None:
    newest, older = checkpoints(run_dir)
    condemn(run_dir, newest)
    found = ckpt_json("locate", run_dir)
    assert found["chosen"] == older.name
    assert found["checkpoints"][-1]["reasons"][0].startswith("condemned")
    assert ckpt("locate", run_dir, "--resume-from", "6").code == 18
    assert ckpt_json("locate", run_dir, "--resume-from", "6", "--force")["chosen"] == newest.name
    assert ckpt("locate", run_dir, "--force").code == 2, "the settings refuse that too"
    assert resumed_at(run_dir) == 3


def test_an_abandoned_one_is_named_and_not_used(run_dir: Path) -> None:
    """Scenario 27."""
    abandoned, older = checkpoints(run_dir)
    shard = abandoned / "__0_0.distcp"
    good = shard.read_bytes()
    flip_shard(abandoned)
    train(run_dir, until=5, checkpoint_save_at_end=False)
    shard.write_bytes(good)
    found = ckpt_json("locate", run_dir, "--full")
    assert found["chosen"] == older.name
    assert found["checkpoints"][-1]["name"] == abandoned.name
    assert found["checkpoints"][-1]["reasons"][0].startswith("abandoned")
    assert resumed_at(run_dir) == 3


def test_a_named_step_or_path_or_fresh_is_honoured(run_dir: Path, tmp_path: Path) -> None:
    newest, older = checkpoints(run_dir)
    assert ckpt_json("locate", run_dir, "--resume-from", "3")["chosen"] == older.name
    assert ckpt_json("locate", run_dir, "--resume-from", newest)["path"] == str(newest)
    assert ckpt_json("locate", run_dir, "--resume-from", "fresh")["chosen"] == "fresh start"
    assert ckpt("locate", run_dir, "--resume-from", "5").code == 18
    assert ckpt("locate", run_dir, "--resume-from", tmp_path / "nowhere").code == 2


def test_a_run_that_never_saved_would_start_fresh(tmp_path: Path) -> None:
    ControlDirectory.open_or_create(tmp_path / "run")
    before = sorted(tmp_path.rglob("*"))
    result = ckpt("locate", tmp_path / "run")
    assert result.code == 0, result.text
    assert result.out.splitlines()[-1] == "would make a fresh start"
    assert sorted(tmp_path.rglob("*")) == before
    assert resumed_at(tmp_path / "run") == 0


def test_a_root_elsewhere_is_given_by_option(run_dir: Path, tmp_path: Path) -> None:
    (run_dir / "checkpoints").rename(tmp_path / "elsewhere")
    found = ckpt_json("locate", run_dir, "--root", tmp_path / "elsewhere")
    assert found["step"] == 6
    assert Path(found["path"]).parent == tmp_path / "elsewhere"


def test_no_run_directory_is_a_usage_error(tmp_path: Path) -> None:
    result = ckpt("locate", tmp_path)
    assert result.code == 2
    assert "run.json" in result.err


def test_it_does_without_torch(run_dir: Path) -> None:
    code = (
        "import sys\n"
        "from holdfast.cli.app import app\n"
        "try:\n"
        f"    app(['ckpt', 'locate', '--full', {str(run_dir)!r}])\n"
        "except SystemExit as end:\n"
        "    assert not end.code, end.code\n"
        "print(sorted(name for name in sys.modules if name.split('.')[0] in ('torch', 'numpy')))\n"
    )
    result = finish([sys.executable, "-c", code], cwd=run_dir.parent)
    assert result.code == 0, result.text
    assert result.out.splitlines()[-1] == "[]"
