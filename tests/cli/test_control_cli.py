"""`holdfast control`: what an operator asks is recorded with who and why, or refused and nothing changed."""

from __future__ import annotations

import json
import os
import pty
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from holdfast.journal.events import OperatorActed
from holdfast.journal.reader import read_journal
from holdfast.record.attempts import begin_attempt
from holdfast.record.directory import ControlDirectory
from holdfast.record.lease import Fence, LeaseKeeper, claim, current_epoch
from holdfast.record.operator import budget_reset, excluded, in_force, paused, pinned, stop_asked
from kit.commands import ckpt, command
from kit.harness import Result, finish, holdfast
from kit.tiny import checkpoints, tree


def control(*args: str | Path) -> Result:
    return command("control", *args)


def opened(run_dir: Path) -> ControlDirectory:
    return ControlDirectory.open(run_dir)


def test_pausing_and_going_on(run_dir: Path) -> None:
    done = control("pause", run_dir, "--reason", "the network is mended", "--by", "alice")
    assert done.code == 0, done.text
    holding = paused(opened(run_dir))
    assert holding is not None
    assert holding.describe() == "alice: the network is mended"
    last = read_journal(run_dir / "journal")[-1]
    assert (last.who, last.attempt) == ("operator", 1)
    assert last.body == OperatorActed(action="pause", reason="the network is mended", by="alice")
    assert control("unpause", run_dir, "--reason", "done").code == 0
    assert paused(opened(run_dir)) is None
    again = control("unpause", run_dir, "--reason", "done")
    assert again.code == 2
    assert "recovery is not paused" in again.err


def test_a_stop_is_for_the_launch_that_runs_and_refused_without_one(run_dir: Path) -> None:
    refused = control("stop", run_dir, "--reason", "x")
    assert refused.code == 2
    assert "no launcher of this run is alive" in refused.err
    assert not (run_dir / "operator" / "stop").exists()
    run = opened(run_dir)
    held = claim(run, "this-launch", 30.0)
    keeper = LeaseKeeper(run, held, lambda why: None)
    try:
        done = control("stop", run_dir, "--reason", "power work", "--by", "alice", "--json")
        assert done.code == 0, done.text
        assert json.loads(done.out) == {"action": "stop"}
        assert "the launch that runs is to stop, by alice: power work" in control("show", run_dir).out
        assert stop_asked(run, ["this-launch"]) is not None
        last = read_journal(run_dir / "journal")[-1]
        assert last.body == OperatorActed(
            action="stop", subject="launch this-launch", reason="power work", by="alice"
        )
    finally:
        keeper.release()
    assert in_force(run).stop is None, "it went with its launch"


def test_a_run_that_has_no_launcher_is_told_how_to_stop(run_dir: Path) -> None:
    """Under python or torchrun nobody looks at requests: a rank has to be signalled."""
    run = opened(run_dir)
    held = claim(run, "alone", 30.0)
    keeper = LeaseKeeper(run, held, lambda why: None)
    try:
        begin_attempt(run, Fence(run, held.epoch), "alone", 1)
        refused = control("stop", run_dir, "--reason", "x")
        assert refused.code == 2
        assert "stop.stop_file" in refused.err
    finally:
        keeper.release()


def test_who_asked_is_known_without_being_told(run_dir: Path) -> None:
    assert control("pause", run_dir, "--reason", "x").code == 0
    holding = paused(opened(run_dir))
    assert holding is not None
    assert "@" in holding.by


def test_resetting_the_budget(run_dir: Path) -> None:
    done = control("reset-budget", run_dir, "--reason", "new switch", "--json")
    assert json.loads(done.out) == {"action": "reset_budget", "attempt": 1}
    assert budget_reset(opened(run_dir)) == 1


@pytest.mark.parametrize("which", ["step", "id", "name"])
def test_pinning_by_step_id_or_name_says_what_is_left_behind(run_dir: Path, which: str) -> None:
    six = checkpoints(run_dir)[1].name
    given = {"step": "6", "id": six[14:], "name": six}[which]
    done = control("pin", run_dir, given, "--reason", "loss went up", "--yes")
    assert done.code == 0, done.text
    assert f"the next resume uses {six}, which leaves the last 3 saved steps behind" in done.out
    found = pinned(opened(run_dir))
    assert found is not None
    assert (found.checkpoint, found.once, found.force) == (six, True, False)
    assert control("unpin", run_dir, "--reason", "no").code == 0
    assert pinned(opened(run_dir)) is None
    assert control("unpin", run_dir, "--reason", "no").code == 2


def test_a_pin_that_could_not_be_used_is_refused_and_nothing_recorded(run_dir: Path) -> None:
    nine, six, three = checkpoints(run_dir)
    assert ckpt("condemn", run_dir, "9", "--reason", "NaN", "--yes").code == 0
    (six / "__0_0.distcp").unlink()
    shutil.rmtree(three)
    before = tree(run_dir)
    condemned = control("pin", run_dir, "9", "--reason", "x", "--yes")
    assert (condemned.code, "condemned: pin it with --force" in condemned.err) == (2, True)
    damaged = control("pin", run_dir, "6", "--reason", "x", "--yes")
    assert (damaged.code, "__0_0.distcp" in damaged.err) == (1, True)
    missing = control("pin", run_dir, "3", "--reason", "x", "--yes")
    assert (missing.code, "missing" in missing.err) == (2, True)
    unknown = control("pin", run_dir, "99", "--reason", "x", "--yes")
    assert (unknown.code, "saved no checkpoint" in unknown.err) == (2, True)
    assert tree(run_dir) == before
    forced = control("pin", run_dir, "9", "--reason", "x", "--yes", "--force", "--keep", "--json")
    assert json.loads(forced.out) == {"action": "pin", "checkpoint": nine.name, "once": False, "force": True}


def test_nobody_to_ask_is_no_yes(run_dir: Path) -> None:
    before = tree(run_dir)
    done = finish(holdfast("control", "pin", str(run_dir), "6", "--reason", "x"), cwd=run_dir.parent)
    assert done.code == 2
    assert "Add --yes" in done.err
    assert tree(run_dir) == before


@pytest.mark.parametrize(("answer", "code"), [(b"y\n", 0), (b"n\n", 1)])
def test_a_person_is_asked(run_dir: Path, answer: bytes, code: int) -> None:
    leader, follower = pty.openpty()
    process = subprocess.Popen(
        holdfast("control", "pin", str(run_dir), "6", "--reason", "x"),
        stdin=follower, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
    )  # fmt: skip
    os.close(follower)
    os.write(leader, answer)
    assert process.wait(60) == code
    os.close(leader)
    assert (pinned(opened(run_dir)) is not None) == (code == 0)


def test_excluding_and_readmitting(run_dir: Path) -> None:
    assert control("exclude", run_dir, "node-b", "--reason", "NIC").code == 0
    done = control("exclude", run_dir, "node-c", "--device", "3", "--reason", "ECC", "--json")
    assert json.loads(done.out) == {"action": "exclude", "node": "node-c", "device": "3"}
    assert [one.describe() for one in excluded(opened(run_dir))] == ["node-b", "node-c, device 3"]
    wrong = control("readmit", run_dir, "node-c", "--reason", "x")
    assert wrong.code == 2
    assert "node-c is not excluded; what is: node-b, node-c, device 3" in wrong.err
    assert control("readmit", run_dir, "node-c", "--device", "3", "--reason", "swapped").code == 0
    assert [one.describe() for one in excluded(opened(run_dir))] == ["node-b"]


def test_show_says_all_that_is_in_force(run_dir: Path) -> None:
    assert control("show", run_dir).out == "nothing is in force\n"
    control("pause", run_dir, "--reason", "p", "--by", "alice")
    control("pin", run_dir, "6", "--reason", "q", "--by", "bob", "--yes", "--keep")
    control("reset-budget", run_dir, "--reason", "r", "--by", "carol")
    control("exclude", run_dir, "node-b", "--reason", "s", "--by", "dan")
    six = checkpoints(run_dir)[1].name
    assert control("show", run_dir).out.splitlines() == [
        "recovery is paused by alice: p",
        f"{six} is pinned for every resume by bob: q",
        "restarts up to attempt 1 do not count, by carol: r",
        "node-b is excluded: s (by dan)",
    ]
    found = json.loads(control("show", run_dir, "--json").out)
    assert set(found) == {"paused", "budget_reset", "pin", "exclusions", "stop"}
    assert found["pin"]["checkpoint"] == six


ACTS = [
    ("pause",), ("unpause",), ("reset-budget",), ("pin", "6", "--yes"), ("unpin",), ("exclude", "n"),
    ("readmit", "n"),
]  # fmt: skip


@pytest.mark.parametrize("act", ACTS, ids=lambda act: act[0])
def test_an_act_without_a_reason_is_refused(run_dir: Path, act: tuple[str, ...]) -> None:
    before = tree(run_dir)
    name, *rest = act
    assert control(name, run_dir, *rest).code == 2
    blank = control(name, run_dir, *rest, "--reason", "  ")
    assert blank.code == 2
    assert "--reason must say why" in blank.err
    assert tree(run_dir) == before


@pytest.mark.parametrize("act", [*ACTS, ("show",)], ids=lambda act: act[0])
def test_a_directory_that_is_no_run_is_refused_and_left_alone(tmp_path: Path, act: tuple[str, ...]) -> None:
    name, *rest = act
    reason = () if name == "show" else ("--reason", "x")
    done = control(name, tmp_path, *rest, *reason)
    assert done.code in (2, 24), done.text
    assert "run.json" in done.err
    assert list(tmp_path.iterdir()) == []


def test_a_live_run_may_be_asked_and_keeps_its_lease(run_dir: Path) -> None:
    held = opened(run_dir)
    keeper = LeaseKeeper(held, claim(held, "launch", 5.0), lambda why: None)
    try:
        epoch = current_epoch(held)
        assert control("pause", run_dir, "--reason", "x").code == 0
        assert control("pin", run_dir, "6", "--reason", "x", "--yes").code == 0
        assert current_epoch(held) == epoch
    finally:
        keeper.release()
    assert in_force(held).paused is not None


def test_text_cannot_steer_a_terminal(run_dir: Path) -> None:
    control("exclude", run_dir, "n\x1b[31m", "--reason", "a\x1b]0;x\x07\nb")
    shown = control("show", run_dir).out
    assert "\x1b" not in shown
    assert len(shown.splitlines()) == 1


def test_it_works_without_torch(run_dir: Path) -> None:
    for act in (["show"], ["pin", "6", "--yes", "--reason", "x"], ["exclude", "n", "--reason", "x"]):
        code = (
            "import atexit, sys\n"
            "atexit.register(lambda: print(*sys.modules, sep='\\n', file=sys.stderr))\n"
            "from holdfast.cli.app import main\n"
            f"sys.argv = {['holdfast', 'control', act[0], str(run_dir), *act[1:]]!r}\n"
            "main()\n"
        )
        done = finish([sys.executable, "-c", code], cwd=run_dir.parent)
        assert done.code == 0, done.text
        imported = set(done.err.splitlines())
        assert "holdfast.record.operator" in imported
        assert not imported & {"torch", "numpy", "rich"}
