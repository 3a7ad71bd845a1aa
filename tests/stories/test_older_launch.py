"""A launch's run directory that an older release wrote: read, told and gone on with by this one (A17).

`tests/fixtures/launch-1` was written by two ranks under `holdfast run`, before the rooms were rebuilt: four
attempts, each ended by a kill, the last of them without progress.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from holdfast.checkpoint.format import verify
from holdfast.journal import JournalLine, read_journal
from holdfast.journal.events import Account, Resumed, StepsDone
from holdfast.record import AttemptRecord, ControlDirectory, EndRecord, past_attempts, read_record
from kit.commands import command
from kit.harness import REPO, finish, holdfast

FIXTURE = REPO / "tests" / "fixtures" / "launch-1"
SCRIPT = REPO / "tests" / "fixtures" / "launched.py"


@pytest.fixture
def older(tmp_path: Path) -> Path:
    return Path(shutil.copytree(FIXTURE, tmp_path / "run"))


def losses(lines: list[JournalLine], who: str, attempt: int) -> dict[int, float]:
    found: dict[int, float] = {}
    for line in lines:
        if isinstance(line.body, StepsDone) and (line.who, line.attempt) == (who, attempt):
            found |= {
                line.body.first + n: loss for n, loss in enumerate(line.body.loss) if isinstance(loss, float)
            }
    return found


def test_every_line_and_record_of_an_older_launch_is_read(older: Path) -> None:
    lines = read_journal(older / "journal")
    written = sum(len(path.read_text().splitlines()) for path in (older / "journal").iterdir())
    assert len(lines) == written
    control = ControlDirectory.open(older)
    history = past_attempts(control, before=5)
    assert [(one.number, one.cause, one.exit_code, one.root_rank) for one in history] == [
        (number, "infrastructure", -9, 1) for number in (1, 2, 3, 4)
    ]
    assert [one.highest_step for one in history] == [4, 6, 8, 8]
    assert [one.action for one in history] == ["restart", "restart", "restart", "stop"]
    for number in (1, 2, 3, 4):
        assert read_record(control.attempt(number) / "attempt.json", AttemptRecord)
        assert read_record(control.attempt(number) / "end.json", EndRecord)
    for path in sorted((older / "checkpoints").glob("step_*")):
        assert verify(path).sound, verify(path).problems


def test_what_befell_an_older_launch_is_told_as_it_was(older: Path) -> None:
    told = [line.body for line in read_journal(older / "journal") if isinstance(line.body, Account)]
    for number, account in enumerate(told, 1):
        answer = command("why", older, "--attempt", str(number)).out
        for words in (account.who, account.what, account.why[0], account.next):
            assert words in answer
        completed = (
            "restarting from step 8, whose save was completed meanwhile: 1 step to redo (restart 1 of 1)"
        )
        assert (completed if number == 2 else account.done) in answer
    assert json.loads(command("status", older, "--json").out)["save"]["step"] == 8
    assert command("journal", older, "--report", older / "report.html").code == 0
    assert "rank 1" in (older / "report.html").read_text()


def test_an_older_launch_goes_on_exactly(older: Path, tmp_path: Path) -> None:
    """From its newest checkpoint, as the next attempt, to the losses of a run that nobody disturbed."""
    options = ["run", "--nproc-per-node", "2", "--max-restarts", "1"]
    for run_dir in (older, tmp_path / "whole"):
        launch = holdfast(*options, "--run-dir", str(run_dir), str(SCRIPT), "train")
        done = finish(launch, cwd=tmp_path, env={"LAUNCHED_SPARED": "1"}, timeout=120)
        assert done.code == 0, done.text
    lines, whole = read_journal(older / "journal"), read_journal(tmp_path / "whole" / "journal")
    (resumed,) = [
        line
        for line in lines
        if isinstance(line.body, Resumed) and line.attempt == 5 and line.who == "rank-0"
    ]
    assert (resumed.body.step, resumed.body.checkpoint) == (8, "step_00000008-b884bdcc888c9200")
    for rank in ("rank-0", "rank-1"):
        again, through = losses(lines, rank, 5), losses(whole, rank, 1)
        assert list(again) == [9, 10, 11, 12]
        # The fixture's own steps were computed on another machine, whose last bits may differ.
        assert again == pytest.approx({step: through[step] for step in again}, rel=1e-4)
