"""Storage that is full, read-only, gone, slow or stuck: training goes on, and so do saves once it is well."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

import holdfast
from holdfast.checkpoint.format.structure import verify
from holdfast.errors import ExitCode
from holdfast.journal.events import (
    LeaseLost,
    SaveCommitted,
    SaveFailed,
    SaveSkipped,
    SaveStarted,
    StepsDone,
    Warned,
    WorkerFailed,
)
from holdfast.journal.reader import read_journal
from kit.harness import REPO, finish, job, wait_until
from kit.harness import holdfast as holdfast_command
from kit.nodes.machines import fill, hung_mount, inside_mounts
from kit.runs import events_in
from kit.tiny import checkpoints, let_saves_end, train

SCRIPTS = REPO / "tests" / "scripts"
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
        "unshare", "--user", "--map-root-user", "--mount",
        sys.executable, str(SCRIPTS / "faults" / "bad_disk.py"),
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
    failed = events_in(run_dir, SaveFailed)
    assert [body.step for body in failed] == [6]


TRAIN = """
import sys, time, torch
sys.path.insert(0, sys.argv[1])
from kit import tiny
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


# --- the run directory itself -----------------------------------------------------------------------------


def whole_run(*flags: str) -> list[str]:
    """A run of one rank whose directory is `run`, with the shortest lease that can be set."""
    settings = ("control.lease_ttl=2", "launch.node_timeout=1", "checkpoint.max_failed_saves=5")
    chosen = [word for setting in (*settings, "health.gate=off", *flags) for word in ("--set", setting)]
    return holdfast_command(
        "run", "--run-dir", "run", *chosen, str(SCRIPTS / "train" / "train_stop.py"), "log"
    )


def last_step(directory: Path) -> int:
    return max(
        (int(path.read_text().split()[-1]) for path in directory.glob("log.*") if path.stat().st_size),
        default=0,
    )


ON_A_DISK = "mount -t tmpfs -o size=8m tmpfs run"


@pytest.mark.usefixtures("mount_namespaces")
@pytest.mark.parametrize("background", [False, pytest.param(True, marks=pytest.mark.drill)])
def test_a_run_directory_on_a_full_disk_costs_saves_and_not_the_run(tmp_path: Path, background: bool) -> None:
    """Something else fills the disk for several times the lease's time-to-live, and gives it back."""
    (tmp_path / "run").mkdir()
    command = whole_run(f"checkpoint.async_save={json.dumps(background)}")
    env = {"STOP_EVERY": "40", "STOP_UNTIL": "130", "STOP_WAIT": "0:120"}
    with job(inside_mounts(ON_A_DISK, command), cwd=tmp_path, env=env) as running:
        run_dir = Path(f"/proc/{running.pid}/root{tmp_path}/run")
        wait_until(lambda: list(run_dir.glob("checkpoints/step_*40-*")), 60, "the first save")
        fill(run_dir / "filler")
        full = time.monotonic()
        wait_until((tmp_path / "waiting0").exists, 60, "training goes on to step 120")
        wait_until(lambda: time.monotonic() - full > 4.5, 10, "more than two times-to-live pass")
        assert running.process.poll() is None, running.output().text
        (run_dir / "filler").unlink()
        (tmp_path / "go").touch()
        wait_until((tmp_path / "finished0").exists, 60, "the run ends")
        shutil.copytree(run_dir, tmp_path / "kept")  # its file system goes with it
        result = running.wait(60)
    assert result.code == 0, result.text
    assert "lease" not in result.text, "a beat in place needs no space"
    found = {path.name[:13]: verify(path).sound for path in checkpoints(tmp_path / "kept")}
    assert found["step_00000040"]
    assert found["step_00000130"]
    lines = events_in(tmp_path / "kept")
    assert not any(isinstance(body, LeaseLost) for body in lines)
    assert [body.step for body in lines if isinstance(body, SaveFailed)] or "not saved" in result.text
    assert len({line.attempt for line in read_journal(tmp_path / "kept" / "journal")} - {0}) == 1


def test_a_job_that_finished_has_finished_also_if_its_run_directory_is_gone(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("import shutil\nshutil.rmtree('run')\n")
    result = finish(holdfast_command("run", "--run-dir", "run", "train.py"), cwd=tmp_path, timeout=60)
    assert result.code == 0, result.text
    assert "attempt 1 has no record of its end, which is finished" in result.err
    assert not (tmp_path / "run" / "attempts").exists()


@pytest.mark.drill
def test_a_run_directory_whose_file_system_stalls_holds_up_nothing(tmp_path: Path) -> None:
    """A real file system that does not answer, over the run directory, for several times-to-live."""
    env = {"STOP_UNTIL": "130", "STOP_WAIT": "0:120"}
    with job(whole_run("journal.step_flush=0"), cwd=tmp_path, env=env) as running:
        wait_until(lambda: last_step(tmp_path) > 5, 60, "training begins")
        with hung_mount(tmp_path / "run"):
            stalled, before = time.monotonic(), last_step(tmp_path)
            wait_until(lambda: time.monotonic() - stalled > 5.0, 10, "more than two times-to-live pass")
            assert running.process.poll() is None, running.output().text
            assert last_step(tmp_path) > before + 60, "training was held up"
        (tmp_path / "go").touch()
        result = running.wait(60)
    assert result.code == 0, result.text
    assert result.err.count("the file system does not answer. Nobody has claimed the run") == 1, result.text
    assert "is renewed again, after" in result.err
    lines = events_in(tmp_path / "run")
    assert not any(isinstance(body, LeaseLost) for body in lines)
    told = [body.message for body in lines if isinstance(body, Warned) and "the lease of" in body.message]
    assert ["not answer" in told[0], "renewed again" in told[-1]] == [True, True], "journalled afterwards"
    assert [path.name[:13] for path in checkpoints(tmp_path / "run")] == ["step_00000130"]


@pytest.mark.drill
def test_a_save_that_waits_for_storage_which_does_not_answer_is_no_hang(tmp_path: Path) -> None:
    limits = "monitor.rank_section_timeouts=setup:600,step:60,checkpointing:2"
    env = {"STOP_EVERY": "40", "STOP_UNTIL": "90"}
    with job(whole_run(limits), cwd=tmp_path, env=env) as running:
        wait_until(lambda: 5 < last_step(tmp_path) < 35, 60, "training begins")
        with hung_mount(tmp_path / "run"):
            wait_until(lambda: "so it is waited for" in running.output().err, 30, "the save is late")
            assert last_step(tmp_path) == 40
            assert running.process.poll() is None, running.output().text
        result = running.wait(60)
    assert result.code == 0, result.text
    lines = events_in(tmp_path / "run")
    assert not any(isinstance(body, WorkerFailed) for body in lines)
    assert [body.step for body in lines if isinstance(body, SaveFailed)] == [40]
    assert [path.name[:13] for path in checkpoints(tmp_path / "run")] == ["step_00000090", "step_00000080"]


@pytest.mark.drill
@pytest.mark.usefixtures("mount_namespaces")
@pytest.mark.parametrize("end", ["saves fail", "a rank dies", "a stop"])
def test_what_ends_on_a_disk_that_stays_full_ends_with_a_code_of_its_own(tmp_path: Path, end: str) -> None:
    """Nothing can be decided there, so nothing is; a scheduler queues it again, if nobody wanted the end."""
    (tmp_path / "run").mkdir()
    env = {"STOP_EVERY": "40", "STOP_UNTIL": "4000", "STOP_PAUSE": "0.01"}
    with job(inside_mounts(ON_A_DISK, whole_run()), cwd=tmp_path, env=env) as running:
        run_dir = Path(f"/proc/{running.pid}/root{tmp_path}/run")
        wait_until(lambda: list(run_dir.glob("checkpoints/step_*40-*")), 60, "the first save")
        fill(run_dir / "filler")
        if end == "a rank dies":
            [rank] = [int(path.name.rpartition(".")[2]) for path in tmp_path.glob("log.*")]
            os.kill(rank, signal.SIGKILL)
        elif end == "a stop":
            running.signal(signal.SIGTERM)
        result = running.wait(90)
    wanted = ExitCode.STOPPED_UNSAVED if end == "a stop" else ExitCode.STORAGE_FAILED
    assert result.code == wanted, result.text
    assert "takes nothing: cannot write: No space left on device" in result.err
    assert "lost the run's lease" not in result.err


@pytest.mark.drill
@pytest.mark.usefixtures("mount_namespaces")
def test_a_rank_that_dies_on_a_disk_that_is_full_for_a_moment_is_restarted(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    env = {"STOP_EVERY": "40", "STOP_UNTIL": "400", "STOP_PAUSE": "0.01"}
    with job(inside_mounts(ON_A_DISK, whole_run()), cwd=tmp_path, env=env) as running:
        run_dir = Path(f"/proc/{running.pid}/root{tmp_path}/run")
        wait_until(lambda: list(run_dir.glob("checkpoints/step_*40-*")), 60, "the first save")
        fill(run_dir / "filler")
        [rank] = [int(path.name.rpartition(".")[2]) for path in tmp_path.glob("log.*")]
        os.kill(rank, signal.SIGKILL)
        wait_until(lambda: "takes nothing" in running.output().err, 20, "the disk is waited for")
        (run_dir / "filler").unlink()
        result = running.wait(90)
    assert result.code == 0, result.text
    assert "works again, after" in result.err


@pytest.mark.drill
@pytest.mark.usefixtures("mount_namespaces")
def test_who_cannot_write_ends_when_another_launch_has_claimed_the_run(tmp_path: Path) -> None:
    """The first one's file system turns read-only, for it alone; the second sees no beat, and takes over."""
    for name in ("run", "closed"):
        (tmp_path / name).mkdir()
    env = {"STOP_EVERY": "40", "STOP_UNTIL": "130"}
    waits = {**env, "STOP_WAIT": "0:50"}
    with job(inside_mounts("true", whole_run()), cwd=tmp_path, env=waits) as first:
        wait_until((tmp_path / "waiting0").exists, 60, "training goes on to step 50")
        inside = ["nsenter", "--target", str(first.pid), "--user", "--mount", "sh", "-c"]
        close = "mount --bind run closed && mount -o remount,ro,bind closed && mount --bind closed run"
        subprocess.run([*inside, f"cd {tmp_path} && {close}"], check=True)
        wait_until(lambda: "Read-only file system" in first.output().err, 20, "it cannot renew")
        silent = time.monotonic()
        wait_until(lambda: time.monotonic() - silent > 3, 10, "its lease lapses")
        assert first.process.poll() is None, first.output().text
        with job(whole_run(), cwd=tmp_path, env=env) as second:
            told = first.wait(60)
            result = second.wait(60)
    assert told.code == ExitCode.LEASE_LOST, told.text
    assert "epoch 2 was claimed over our 1" in told.err
    assert result.code == 0, result.text
    assert checkpoints(tmp_path / "run")[0].name.startswith("step_00000130")
