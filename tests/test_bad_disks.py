"""Saving to a disk that is full, read-only, gone or slow: training goes on, and saves work once it does."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import holdfast
from harness import finish
from holdfast.checkpoint.verify import verify
from holdfast.journal.events import SaveCommitted, SaveFailed, SaveSkipped, SaveStarted, StepsDone
from holdfast.journal.reader import read_journal
from tiny import checkpoints, let_saves_end, train

SCRIPTS = Path(__file__).with_name("scripts")
REASONS = {
    "full": "No space left on device",
    "read-only": "Read-only file system",
    "gone": "is not what the run started with",
}


@pytest.mark.drill
@pytest.mark.parametrize("background", [False, True])
@pytest.mark.parametrize("kind", REASONS)
def test_a_file_system_that_turns_bad_for_a_while(tmp_path: Path, kind: str, background: bool) -> None:
    """A real file system of its own, in a mount namespace of its own."""
    reference = train(tmp_path / "reference", until=12)
    command = [
        "unshare", "--user", "--map-root-user", "--mount", sys.executable, str(SCRIPTS / "bad_disk.py"),
        str(tmp_path), kind, f"checkpoint_async_save={json.dumps(background)}",
    ]  # fmt: skip
    result = finish(command, cwd=tmp_path, timeout=120)
    assert result.code == 0, result.text
    [told] = [line for line in result.text.splitlines() if line.startswith('{"losses"')]
    found = json.loads(told)
    assert found["losses"] == {str(step): loss for step, loss in reference.losses.items()}
    assert found["checkpoints"] == {"step_00000003": True, "step_00000009": True, "step_00000012": True}
    [(step, error)] = found["failed"]
    assert step == 6
    assert REASONS[kind] in error
    assert found["beneath"] == [], "nothing may be written where the file system is not"
    assert found["staging"] == []


@pytest.mark.parametrize("background", [False, True])
def test_a_root_that_was_taken_away_is_not_made_anew(tmp_path: Path, background: bool) -> None:
    """What an unmounted file system leaves is an empty directory of the same name."""
    run_dir, root = tmp_path / "run", tmp_path / "run" / "checkpoints"
    reference = train(tmp_path / "reference", until=12)

    def at_step(step: int, run: holdfast.Run) -> None:
        if step == 5:
            run.wait_for_saves()
            root.rename(tmp_path / "elsewhere")
            root.mkdir()
        if step == 8:
            let_saves_end(run)
            assert list(root.iterdir()) == []
            root.rmdir()
            (tmp_path / "elsewhere").rename(root)

    outcome = train(run_dir, until=12, at_step=at_step, checkpoint_async_save=background)
    assert outcome.losses == reference.losses
    assert sorted(path.name[:13] for path in checkpoints(run_dir)) == [
        "step_00000003", "step_00000009", "step_00000012",
    ]  # fmt: skip
    assert all(verify(path).sound for path in checkpoints(run_dir))
    failed = [line.body for line in read_journal(run_dir / "journal") if isinstance(line.body, SaveFailed)]
    assert [body.step for body in failed] == [6]


@pytest.fixture(scope="module")
def slow_io(tmp_path_factory: pytest.TempPathFactory) -> Path:
    library = tmp_path_factory.mktemp("slow") / "slow_io.so"
    compiler = shutil.which("cc") or shutil.which("gcc")
    assert compiler is not None, "a C compiler is part of what the tests need"
    source = str(SCRIPTS / "slow_io.c")
    subprocess.run([compiler, "-shared", "-fPIC", "-O1", "-o", str(library), source, "-ldl"], check=True)
    return library


TRAIN = """
import sys, time, torch
sys.path.insert(0, sys.argv[1])
import tiny
torch.set_num_threads(1)
tiny.train(__import__("pathlib").Path("run"), until=40, at_step=lambda step, run: time.sleep(0.02),
           checkpoint_async_save=True, checkpoint_interval=10, checkpoint_when_busy=sys.argv[2])
"""


@pytest.mark.drill
@pytest.mark.parametrize("when_busy", [pytest.param("queue", marks=pytest.mark.drill), "skip"])
def test_a_slow_disk_does_not_slow_training(tmp_path: Path, slow_io: Path, when_busy: str) -> None:
    """A disk on which a save takes longer than the interval: steps go on at their own pace meanwhile."""
    env = {
        "LD_PRELOAD": str(slow_io),
        "SLOW_DIR": str(tmp_path / "run" / "checkpoints" / ".staging"),
        "SLOW_MB_PER_S": "0.5",
        "SLOW_MS": "50",
        "PATH": os.environ["PATH"],
    }
    command = [sys.executable, "-c", TRAIN, str(SCRIPTS.parent), when_busy]
    result = finish(command, cwd=tmp_path, env=env, timeout=120)
    assert result.code == 0, result.text
    lines = list(read_journal(tmp_path / "run" / "journal"))
    committed = [line.body for line in lines if isinstance(line.body, SaveCommitted)]
    skipped = [line.body for line in lines if isinstance(line.body, SaveSkipped)]
    begun = [line.body for line in lines if isinstance(line.body, SaveStarted)]
    assert len(committed) + len(skipped) == len(begun) == 4
    assert min(body.seconds for body in committed) > 0.25, "the disk was not slow, so this shows nothing"
    steps = [s for line in lines if isinstance(line.body, StepsDone) for s in line.body.seconds]
    quickest = min(body.seconds for body in committed)
    assert sorted(steps)[len(steps) // 2] < quickest / 2
    if when_busy == "skip":
        assert skipped
        assert max(body.blocked_seconds for body in committed[:-1]) < quickest
    assert all(verify(path).sound for path in checkpoints(tmp_path / "run"))
    assert checkpoints(tmp_path / "run")[0].name.startswith("step_00000040")
