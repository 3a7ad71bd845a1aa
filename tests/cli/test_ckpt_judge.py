"""`holdfast ckpt condemn` and `acquit`: an operator's word is recorded, explained, and obeyed by a resume."""

from __future__ import annotations

import os
import pty
import shutil
import subprocess
from pathlib import Path

import pytest

from holdfast.cli import ckpt_inspect
from holdfast.errors import NoValidRungError, UsageError
from holdfast.journal.events import DecisionMade
from holdfast.journal.reader import read_journal
from holdfast.record.directory import ControlDirectory, read_record
from holdfast.record.lease import LeaseKeeper, claim, current_epoch, read_beat
from holdfast.record.standing import RootBook, StandingBook, StandingRecord
from kit.commands import ckpt, ckpt_json
from kit.damage import flip_shard
from kit.harness import holdfast
from kit.tiny import checkpoints, train, tree


def standings(run_dir: Path) -> list[str]:
    """Newest step first."""
    book = StandingBook(ControlDirectory.open(run_dir))
    return [str(book.of(path.name[14:])) for path in checkpoints(run_dir)]


def test_a_condemned_checkpoint_is_passed_over_and_used_again_once_acquitted(run_dir: Path) -> None:
    newest = checkpoints(run_dir)[0]
    condemned = ckpt("condemn", run_dir, "9", "--reason", "the loss went up", "--yes")
    assert condemned.code == 0, condemned.text
    assert f"{newest.name} is committed; it would be condemned" in condemned.out
    assert standings(run_dir) == ["condemned", "committed", "committed"]
    before = ckpt_json("locate", run_dir)
    assert before["step"] == 6
    assert ckpt("acquit", run_dir, "9", "--reason", "the data was at fault", "--yes").code == 0
    assert standings(run_dir) == ["acquitted", "committed", "committed"]
    assert train(run_dir, until=10, checkpoint_save_at_end=False).started_at == 9
    assert ckpt("condemn", run_dir, "9", "--reason", "it was not", "--yes").code == 0
    assert train(run_dir, until=7, checkpoint_save_at_end=False).started_at == 6


def test_what_was_saved_from_a_condemned_checkpoint_goes_with_it_and_comes_back_with_it(
    run_dir: Path,
) -> None:
    nine, six, _ = checkpoints(run_dir)
    result = ckpt("condemn", run_dir, six.name, "--reason", "a bad batch", "--yes")
    assert result.code == 0, result.text
    assert f"and {nine.name}, committed, saved from it" in result.out
    assert "recorded 2 checkpoints as condemned" in result.out
    assert standings(run_dir) == ["condemned", "condemned", "committed"]
    control = ControlDirectory.open(run_dir)
    record = read_record(control.standing / nine.name[14:] / "000001-condemned.json", StandingRecord)
    assert record is not None
    assert record.evidence == [
        "operator: a bad batch",
        f"condemned with {six.name}, from which it was saved",
    ]
    last = read_journal(run_dir / "journal")[-1]
    assert isinstance(last.body, DecisionMade)
    assert (last.who, last.attempt, last.body.about) == ("operator", 1, "standing")
    assert last.body.chosen == f"{six.name} is condemned"
    assert last.body.evidence == ["operator: a bad batch", f"with it, as saved from it: {nine.name}"]
    assert ckpt_json("acquit", run_dir, six.name[14:], "--reason", "it was fine", "--yes")["checkpoints"] == [
        six.name,
        nine.name,
    ]
    assert standings(run_dir) == ["acquitted", "acquitted", "committed"]


def test_one_with_evidence_of_its_own_stays_condemned(run_dir: Path) -> None:
    nine, six, _ = checkpoints(run_dir)
    ckpt("condemn", run_dir, "9", "--reason", "NaN three steps later", "--yes")
    assert ckpt_json("condemn", run_dir, "6", "--reason", "a bad batch", "--yes")["checkpoints"] == [six.name]
    result = ckpt("acquit", run_dir, "6", "--reason", "it was fine", "--yes")
    assert f"{nine.name}, saved from it, stays condemned" in result.out
    assert standings(run_dir) == ["condemned", "acquitted", "committed"]


def test_acquitting_what_came_from_a_condemned_one_says_so(run_dir: Path) -> None:
    _, six, _ = checkpoints(run_dir)
    ckpt("condemn", run_dir, "6", "--reason", "a bad batch", "--yes")
    result = ckpt("acquit", run_dir, "9", "--reason", "only this one", "--yes")
    assert f"{six.name}, from which it was saved, stays condemned" in result.out
    assert standings(run_dir) == ["acquitted", "condemned", "committed"]


def test_abandoned_descendants_go_too_and_a_step_saved_twice_must_be_named_by_id(run_dir: Path) -> None:
    """Scenario 27."""
    nine = checkpoints(run_dir)[0]
    flip_shard(nine)
    train(run_dir, until=9)
    twice = [path for path in checkpoints(run_dir) if path.name.startswith("step_00000009")]
    assert len(twice) == 2
    before = tree(run_dir)
    result = ckpt("condemn", run_dir, "9", "--reason", "why", "--yes")
    assert result.code == 2
    assert all(path.name[14:] in result.err for path in twice)
    assert tree(run_dir) == before
    done = ckpt_json("condemn", run_dir, "3", "--reason", "why", "--yes")
    assert len(done["checkpoints"]) == 4
    assert standings(run_dir) == ["condemned"] * 4


def test_the_lease_is_given_back_at_once(run_dir: Path) -> None:
    control = ControlDirectory.open(run_dir)
    before = current_epoch(control)
    assert ckpt("condemn", run_dir, "9", "--reason", "why", "--yes").code == 0
    assert current_epoch(control) == before + 1
    beat = read_beat(control, before + 1)
    assert beat is not None
    assert beat.released


def test_a_live_run_is_refused_and_nothing_recorded(run_dir: Path) -> None:
    control = ControlDirectory.open(run_dir)
    keeper = LeaseKeeper(control, claim(control, "launch", 5.0), lambda why: None)
    try:
        result = ckpt("condemn", run_dir, "9", "--reason", "why", "--yes")
    finally:
        keeper.release()
    assert result.code == 20, result.text
    assert "Stop it first" in result.err
    assert standings(run_dir) == ["committed"] * 3


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (["condemn", "RUN", "7", "--reason", "why", "--yes"], "saved no checkpoint '7'"),
        (["condemn", "RUN", "9", "--reason", "  ", "--yes"], "--reason must say why"),
        (["condemn", "RUN", "9", "--yes"], "Missing option"),
        (["condemn", "RUN", "9", "--reason", "why"], "Add --yes"),
        (["acquit", "RUN", "9", "--reason", "why", "--yes"], "nothing to acquit"),
        (["condemn", "nowhere", "9", "--reason", "why", "--yes"], "run.json"),
    ],
)
def test_usage_errors_exit_2_and_change_nothing(run_dir: Path, args: list[str], said: str) -> None:
    before = tree(run_dir)
    result = ckpt(*(str(run_dir) if word == "RUN" else word for word in args))
    assert result.code == 2, result.text
    assert said in result.err
    assert tree(run_dir) == before


@pytest.mark.parametrize(("answer", "standing"), [("y\n", "condemned"), ("n\n", "committed")])
def test_on_a_terminal_a_person_is_asked(run_dir: Path, answer: str, standing: str) -> None:
    controller, terminal = pty.openpty()
    try:
        os.write(controller, answer.encode())
        done = subprocess.run(
            holdfast("ckpt", "condemn", str(run_dir), "9", "--reason", "why"),
            stdin=terminal, capture_output=True, timeout=60, check=False,
        )  # fmt: skip
    finally:
        os.close(controller)
        os.close(terminal)
    assert b"Record 1 checkpoint as condemned?" in done.stderr
    assert done.returncode == (0 if standing == "condemned" else 1), done.stderr
    assert standings(run_dir)[0] == standing


def test_a_run_that_went_on_while_the_person_thought_is_not_judged(
    run_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The answer belongs to what was shown: here a checkpoint more was saved before it came."""
    controller, terminal = pty.openpty()
    with os.fdopen(controller), os.fdopen(terminal) as person:
        monkeypatch.setattr("sys.stdin", person)
        monkeypatch.setattr("typer.confirm", lambda *args, **options: train(run_dir, until=12))
        with pytest.raises(UsageError, match="went on meanwhile"):
            ckpt_inspect.condemn(run_dir, "9", "why")
    assert standings(run_dir)[0] == "committed"
    assert "condemned" not in standings(run_dir)


def test_condemned_is_condemned_also_for_another_run_that_is_given_its_path(
    run_dir: Path, tmp_path: Path
) -> None:
    """Issue point 17: refused in its own run, it was loaded by another run's `resume_from` without force."""
    nine, six, _ = checkpoints(run_dir)
    settings = {"checkpoint_save_at_end": False, "checkpoint_interval": 0}
    early = train(tmp_path / "early", until=10, checkpoint_resume_from=str(nine), **settings)
    assert early.started_at == 9
    assert ckpt("condemn", run_dir, "9", "--reason", "the loss went up", "--yes").code == 0
    with pytest.raises(NoValidRungError, match=r"condemned: set checkpoint\.force.*the loss went up"):
        train(tmp_path / "other", until=10, checkpoint_resume_from=str(nine), **settings)
    with pytest.raises(NoValidRungError, match=r"condemned: used only when named, with checkpoint\.force"):
        train(tmp_path / "early", until=11, **settings)  # its lowest rung, and it has no other
    forced = train(
        tmp_path / "other", until=10, checkpoint_resume_from=str(nine), checkpoint_force=True, **settings
    )
    assert forced.started_at == 9
    assert train(tmp_path / "third", until=7, checkpoint_resume_from=str(six), **settings).started_at == 6
    listed = ckpt_json("ls", nine.parent)  # without the run
    assert [row["standing"] for row in listed["checkpoints"]] == ["condemned", "committed", "committed"]
    moved = tmp_path / "moved"
    shutil.copytree(nine.parent, moved)
    with pytest.raises(NoValidRungError, match="condemned"):
        train(tmp_path / "fourth", until=10, checkpoint_resume_from=str(moved / nine.name), **settings)
    best, mine = tmp_path / "best", tmp_path / "mine"
    best.symlink_to(nine)
    mine.symlink_to("best")
    with pytest.raises(NoValidRungError, match="condemned"):
        train(tmp_path / "linked", until=10, checkpoint_resume_from=str(mine), **settings)
    assert ckpt("acquit", run_dir, "9", "--reason", "the data was at fault", "--yes").code == 0
    again = train(tmp_path / "fifth", until=10, checkpoint_resume_from=str(nine), **settings)
    assert again.started_at == 9


def test_records_beside_the_checkpoints_go_with_them(run_dir: Path) -> None:
    nine, six, three = checkpoints(run_dir)
    book = RootBook(nine.parent)
    assert ckpt("condemn", run_dir, "3", "--reason", "bad", "--yes").code == 0
    assert sorted(book.names()) == sorted(path.name for path in (nine, six, three))
    assert ckpt("acquit", run_dir, "3", "--reason", "fine", "--yes").code == 0
    train(run_dir, until=18, checkpoint_keep_last=2, checkpoint_read_back=False)
    left = {path.name for path in checkpoints(run_dir)}
    assert three.name not in left
    assert set(book.names()) <= left, "and what a resume, retention and `ckpt ls` see is checkpoints alone"
    lost = book.folder("step_00000001-0123456789abcdef")
    lost.mkdir()
    train(run_dir, until=19)
    assert lost.is_dir(), "somebody may be copying a root to here"
    os.utime(lost, (0, 0))
    train(run_dir, until=20)
    assert not lost.exists()
