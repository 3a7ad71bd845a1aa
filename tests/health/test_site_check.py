"""A site's own check of a node, `health.command`: run, bounded, heard, and obeyed by real agents."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest

from holdfast.config.sources import load
from holdfast.errors import ExitCode
from holdfast.health.judgements import HealthStatus
from holdfast.health.trials import run_site_command
from holdfast.journal import events
from holdfast.journal.events import HealthFailed
from holdfast.launch.gate import Gate
from holdfast.record.directory import ControlDirectory
from kit.commands import command
from kit.harness import finish, holdfast, wait_until
from kit.nodes.nodes import STEP, cluster
from kit.runs import journalled


@pytest.mark.parametrize(
    ("line", "status", "said"),
    [
        ("echo 17 checks passed", HealthStatus.OK, "ended with 0: 17 checks passed"),
        (
            "echo fan 3 stands still; echo 'on stderr' >&2; exit 7",
            HealthStatus.CRITICAL,
            "ended with 7: fan 3 stands still on stderr",
        ),
        ("echo no sensor; exit 3", HealthStatus.WARNING, "ended with 3: no sensor (it could not tell)"),
        ("kill -9 $$", HealthStatus.CRITICAL, "was ended by signal 9"),
        ("no-such-check-anywhere", HealthStatus.CRITICAL, "ended with 127"),
        ("printf 'a\\033[31mb'; exit 1", HealthStatus.CRITICAL, "ended with 1: a\\x1b[31mb"),
        ("exec >&- 2>&-; exit 0", HealthStatus.OK, "ended with 0"),
    ],
)
def test_its_end_is_the_answer_and_its_words_are_told(line: str, status: HealthStatus, said: str) -> None:
    found = run_site_command(line, 20.0)
    assert (found.status, found.found.startswith(said)) == (status, True), found


def test_a_check_that_does_not_end_is_killed_with_what_it_started(tmp_path: Path) -> None:
    began = time.monotonic()
    found = run_site_command(f"sleep 300 & echo $! > {tmp_path}/pid; echo waiting; sleep 300", 0.5)
    assert time.monotonic() - began < 10.0
    assert found.status is HealthStatus.CRITICAL
    assert found.found == "did not end within 0.5 s (health.command_timeout) and was killed: waiting"
    child = int((tmp_path / "pid").read_text())
    wait_until(lambda: not _runs(child), 10, "its child is gone")


def test_a_child_that_stays_behind_is_not_waited_for_and_ends(tmp_path: Path) -> None:
    began = time.monotonic()
    found = run_site_command(f"sleep 300 & echo $! > {tmp_path}/pid; exit 0", 60.0)
    assert (found.status, time.monotonic() - began < 20.0) == (HealthStatus.OK, True)
    child = int((tmp_path / "pid").read_text())
    wait_until(lambda: not _runs(child), 10, "its child is gone")


def test_however_much_it_says_only_the_last_words_are_kept() -> None:
    found = run_site_command("head -c 3000000 /dev/zero | tr '\\0' x; echo; echo the end; exit 1", 30.0)
    assert found.found.endswith("the end")
    assert len(found.found) < 700


def _runs(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def test_a_node_that_the_site_refuses_is_kept_out_and_its_words_are_in_the_journal(tmp_path: Path) -> None:
    argv = holdfast(
        "run", "--run-dir", "run", "--no-preload", "--set", "launch.node_name=only",
        "--set", "health.command=echo fan 3 stands still; exit 1", STEP, "ok", "log",
    )  # fmt: skip
    result = finish(argv, cwd=tmp_path, timeout=120)
    assert result.code == ExitCode.NO_CAPACITY, result.text
    assert "only does not take part: its health checks failed: health.command: ended with 1" in result.err
    (failed,) = journalled(tmp_path, HealthFailed)
    assert (failed.node, failed.status, failed.kept_out) == ("only", "critical", True)
    assert failed.problems[0].startswith("health.command: ended with 1: fan 3 stands still")
    assert not journalled(tmp_path, events.AttemptStarted)
    assert not (tmp_path / "log").exists()


def test_it_runs_before_the_first_attempt_and_between_attempts(tmp_path: Path) -> None:
    """By what it wrote down itself: once at the start, once more after the failure."""
    argv = holdfast(
        "run", "--run-dir", "run", "--no-preload", "--max-restarts", "1",
        "--set", "health.command=echo looked >> looks", STEP, "kill,ok", "log",
    )  # fmt: skip
    result = finish(argv, cwd=tmp_path, timeout=120)
    assert result.code == 0, result.text
    assert len(journalled(tmp_path, events.AttemptStarted)) == 2
    assert (tmp_path / "looks").read_text() == "looked\n" * 2


@pytest.mark.drill
def test_between_attempts_it_runs_on_every_node_wherever_it_failed(tmp_path: Path) -> None:
    """Two nodes; the attempt fails on one of them, and both are looked at again."""
    with cluster(tmp_path, "2") as group:
        for name in "ab":
            flag = f"health.command=echo {name} >> looks"
            group.start(name, "--set", flag, acts="wait,ok")
        group.wait_for_workers(1, 2)
        victim = (tmp_path / "log").read_text().split()[3]
        os.kill(int(victim), signal.SIGKILL)
        for name in "ab":
            ended = group.agents[name].wait(120)
            assert ended.code == 0, ended.text
    assert sorted((tmp_path / "looks").read_text().split()) == ["a", "a", "b", "b"]


def test_one_that_could_not_tell_is_told_and_keeps_nobody_out(tmp_path: Path) -> None:
    control, _ = ControlDirectory.open_or_create(tmp_path / "run")
    settings = load(
        keywords={"run_dir": str(tmp_path / "run"), "health_command": "echo no sensor; exit 3"}
    ).settings
    said: list[str] = []
    gate = Gate(settings, control, say=said.append)
    assert gate.why_unfit() == ""
    assert any("health.command: ended with 3: no sensor" in text for text in said)
    assert journalled(tmp_path, HealthFailed)[0].kept_out is False


def test_the_doctor_runs_it_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOLDFAST_HEALTH_COMMAND", "echo switch 4 is dark; exit 1")
    done = command("doctor", tmp_path / "run", "--quick")
    assert done.code == 2
    assert "ended with 1: switch 4 is dark" in done.out
