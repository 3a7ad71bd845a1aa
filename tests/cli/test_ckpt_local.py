"""`ckpt locate`, `condemn`, `acquit` and `control pin` of a checkpoint that only the nodes have."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from holdfast.checkpoint.copies import tier
from holdfast.checkpoint.format.manifest import MANIFEST, METADATA, CheckpointName, parse_name
from holdfast.record.directory import ControlDirectory
from holdfast.record.operator import pinned
from holdfast.record.standing import Standing, StandingBook
from kit.commands import ckpt, ckpt_json, command
from kit.damage import flip
from kit.nodes.local_places import LocalRun, local_run, manifest_of, two_tiers
from kit.tiny import checkpoints, train, tree

BOTH, ONLY_LOCAL = CheckpointName(100, "0000aaaa"), CheckpointName(120, "0000bbbb")


@pytest.fixture
def run(tmp_path: Path) -> LocalRun:
    return two_tiers(tmp_path, BOTH, ONLY_LOCAL)


def test_locate_says_that_a_resume_looks_at_the_nodes_first(tmp_path: Path) -> None:
    """Then what it would use if they have lost it; it is not called missing."""
    run_dir = tmp_path / "run"
    train(run_dir, until=6)
    newest, older = checkpoints(run_dir)
    control = ControlDirectory.open(run_dir)
    name = parse_name(newest.name)
    assert name is not None
    folder = tier.open_folder(control, name)
    for file in (MANIFEST, METADATA):
        shutil.copy(newest / file, folder)
    both = ckpt_json("locate", run_dir)
    assert both["chosen"] == both["without_local"] == newest.name
    assert [row["local"] for row in both["checkpoints"]] == ["local, not recorded where", None]
    shutil.rmtree(newest)
    next(run_dir.glob(f"attempts/*/commits/*-{name.id}.done")).unlink()
    before = tree(run_dir)
    result = ckpt("locate", run_dir)
    assert tree(run_dir) == before, "looking must change nothing"
    assert result.code == 0, result.text
    assert f"step        6  {newest.name}  would be used if its nodes still hold it" in result.out
    *_, local, otherwise = result.out.splitlines()
    assert local.startswith("would resume at step 6 from the local tier (local, not recorded where, as rec")
    assert otherwise.startswith(f"would resume at step 3 from {older}")
    assert "missing" not in result.out
    found = ckpt_json("locate", run_dir)
    assert (found["chosen"], found["step"], found["path"]) == (newest.name, 6, None)
    assert found["without_local"] == older.name


def test_a_bad_copy_in_the_root_may_still_be_whole_on_the_nodes(run: LocalRun) -> None:
    flip(run.control.path / "checkpoints" / str(BOTH) / METADATA, 3)
    rows = {row["name"]: row for row in ckpt_json("locate", run.control.path)["checkpoints"]}
    assert rows[str(BOTH)]["verdict"] == "would be used if its nodes still hold it"
    assert rows[str(BOTH)]["reasons"][0].startswith("altered")


def test_what_only_nodes_had_does_not_stand_against_a_fresh_start(tmp_path: Path) -> None:
    run = local_run(tmp_path)
    run.commit(manifest_of(name=ONLY_LOCAL, run=run.control.run_id))
    result = ckpt("locate", run.control.path)
    assert result.code == 0, result.text
    assert result.out.splitlines()[-1] == "would make a fresh start"
    assert ckpt_json("locate", run.control.path)["without_local"] == "fresh start"


def test_a_condemned_one_is_not_looked_for_on_nodes(run: LocalRun) -> None:
    """Condemned and acquitted by its step, though the root never had it."""
    done = ckpt("condemn", run.control.path, "120", "--reason", "loss went up", "--yes")
    assert done.code == 0, done.text
    assert StandingBook(run.control).of(ONLY_LOCAL.id) is Standing.CONDEMNED
    found = ckpt_json("locate", run.control.path)
    assert found["chosen"] == str(BOTH), "from the nodes, or the root"
    row = next(row for row in found["checkpoints"] if row["name"] == str(ONLY_LOCAL))
    assert row["reasons"][0].startswith("condemned")
    done = ckpt("acquit", run.control.path, ONLY_LOCAL.id, "--reason", "it was the data", "--yes")
    assert done.code == 0, done.text
    assert ckpt_json("locate", run.control.path)["chosen"] == str(ONLY_LOCAL)


def test_one_that_only_nodes_have_can_be_pinned(run: LocalRun) -> None:
    done = command("control", "pin", run.control.path, "120", "--reason", "go on there", "--yes")
    assert done.code == 0, done.text
    pin = pinned(run.control)
    assert pin is not None
    assert pin.checkpoint == str(ONLY_LOCAL)
    result = ckpt("locate", run.control.path)
    assert result.code == 0, result.text
    assert "no other one is looked at" in result.out
    assert "would resume at step 120 from the local tier" in result.out
    assert result.out.splitlines()[-1].startswith("would refuse to start"), "a pin allows nothing else"


def test_one_that_is_nowhere_cannot_be_pinned(run: LocalRun) -> None:
    tier.forget(run.control, ONLY_LOCAL)
    done = command("control", "pin", run.control.path, "120", "--reason", "go on there", "--yes")
    assert done.code == 2
    assert pinned(run.control) is None
