"""Whole runs under `holdfast run` and torchrun: whatever is killed, the result is bitwise the same."""

from __future__ import annotations

import signal
import sys
from pathlib import Path

import pytest

from holdfast.checkpoint.format.structure import verify
from holdfast.errors import ExitCode
from holdfast.journal.events import DecisionMade, RungRejected, StopAgreed
from holdfast.journal.reader import read_journal
from holdfast.record.attempts import attempt_numbers, latest_head
from holdfast.record.directory import ControlDirectory
from kit.harness import REPO, Result, finish, holdfast, job, wait_until
from kit.runs import events_in, record
from kit.tiny import checkpoints, tree

SCRIPT = str(REPO / "tests" / "scripts" / "train" / "train_tiny.py")


def launch(*flags: str, ranks: int = 2) -> list[str]:
    return holdfast("run", "--nproc-per-node", str(ranks), "--run-dir", "run", *flags, SCRIPT)


def environment(until: int = 12, wrap: str = "fsdp", **more: str) -> dict[str, str]:
    return {"TINY_OUT": "out", "TINY_WRAP": wrap, "TINY_UNTIL": str(until), **more}


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> dict[str, object]:
    """An uninterrupted run, under plain torchrun."""
    directory = tmp_path_factory.mktemp("reference")
    argv = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", SCRIPT]
    result = finish(argv, cwd=directory, env=environment(), timeout=90)
    assert result.code == 0, result.text
    found = record(directory)
    assert len(found) == 2 + 24
    return found


def succeed(directory: Path, env: dict[str, str], *flags: str) -> Result:
    result = finish(launch(*flags), cwd=directory, env=env, timeout=120)
    assert result.code == 0, result.text
    return result


def all_sound(directory: Path) -> None:
    for path in checkpoints(directory / "run"):
        assert verify(path).sound, verify(path).problems


@pytest.mark.drill
def test_ranks_killed_and_failing_in_one_run_end_bitwise_equal(
    tmp_path: Path, reference: dict[str, object]
) -> None:
    """Scenario 21: a SIGKILL and an exception, on different ranks, two resumes, by itself."""
    succeed(tmp_path, environment(TINY_DIE="1:5:SIGKILL,0:11:raise"))
    assert record(tmp_path) == reference
    control = ControlDirectory.open(tmp_path / "run")
    assert attempt_numbers(control) == [1, 2, 3]
    decisions = events_in(control.path, DecisionMade)
    recovery = [decision for decision in decisions if decision.about == "recovery"]
    assert [decision.details["root_rank"] for decision in recovery] == [1, 0]
    assert all(decision.evidence for decision in decisions)
    all_sound(tmp_path)


@pytest.mark.parametrize(
    "kill",
    ["0:12", pytest.param("1:1", marks=pytest.mark.drill), pytest.param("0:40", marks=pytest.mark.drill)],
)
@pytest.mark.drill
def test_a_rank_killed_inside_a_save_ends_bitwise_equal(
    tmp_path: Path, reference: dict[str, object], kill: str
) -> None:
    """Scenario 5 with two ranks: the coordinator early and late in its save, and the other one."""
    succeed(tmp_path, environment(TINY_KILL_SAVE=kill))
    assert (tmp_path / "out" / "killed-in-save").exists()
    assert record(tmp_path) == reference
    all_sound(tmp_path)


@pytest.mark.parametrize(
    ("number", "code", "step"),
    [
        pytest.param(signal.SIGKILL, -9, 6, marks=pytest.mark.drill),
        pytest.param(signal.SIGTERM, int(ExitCode.STOPPED), 8, marks=pytest.mark.drill),
    ],
)
def test_after_the_agent_is_killed_the_next_launch_ends_bitwise_equal(
    tmp_path: Path, reference: dict[str, object], number: int, code: int, step: int
) -> None:
    """Killed, it goes on from the last save; stopped, from the very step it was in."""
    with job(launch(), cwd=tmp_path, env=environment(TINY_GATE="8")) as running:
        wait_until(lambda: len(list((tmp_path / "out").glob("waiting*"))) == 2, 60, "both ranks reach step 8")
        running.signal(number)
        if number == signal.SIGTERM:
            journal = tmp_path / "run" / "journal"
            agreed = lambda: any(isinstance(line.body, StopAgreed) for line in read_journal(journal))  # noqa: E731
            wait_until(agreed, 20, "the step is agreed on")
            (tmp_path / "out" / "go").touch()
        assert running.wait(30).code == code
        wait_until(lambda: not running.processes(), 5, "no worker outlives its agent")
    (tmp_path / "out" / "go").touch()
    succeed(tmp_path, environment())
    assert record(tmp_path) == reference
    head = latest_head(ControlDirectory.open(tmp_path / "run"))
    assert head is not None
    assert head.step == step
    all_sound(tmp_path)


@pytest.mark.drill  # the demo's own test shows the same of a flipped bit
def test_one_ranks_bad_shard_gives_the_same_choice_everywhere(
    tmp_path: Path, reference: dict[str, object]
) -> None:
    """Scenario 10: only rank 1 reads the altered bytes; both ranks go down to step 3, without a deadlock."""
    succeed(tmp_path, environment(until=6))
    newest, older = checkpoints(tmp_path / "run")
    shard = newest / "__1_0.distcp"
    data = bytearray(shard.read_bytes())
    data[len(data) // 2] ^= 0x10
    shard.write_bytes(data)
    before = tree(older)
    succeed(tmp_path, environment())
    assert record(tmp_path) == reference
    rejected = [
        line.body
        for line in read_journal(tmp_path / "run" / "journal")
        if isinstance(line.body, RungRejected)
    ]
    assert [rung.checkpoint for rung in rejected] == [newest.name]
    assert rejected[0].reasons[0].startswith("altered __1_0.distcp")
    assert rejected[0].reasons[0].endswith("(found by rank 1)")
    assert tree(older) == before


@pytest.mark.drill
def test_another_world_size_is_refused_where_samples_would_be_lost(tmp_path: Path) -> None:
    succeed(tmp_path, environment(until=3))
    result = finish(launch(ranks=1), cwd=tmp_path, env=environment(wrap="none"), timeout=60)
    assert result.code == ExitCode.STATE_MISFIT, result.text
    assert "the data position of 2 ranks cannot be shared out to 1" in result.err


@pytest.mark.drill
def test_ddp_with_buffers_that_differ_between_ranks_resumes_bitwise_equal(tmp_path: Path) -> None:
    """BatchNorm's statistics share a name and differ by rank: DCP alone would give all ranks one of them."""
    for name, env in {
        "whole": environment(wrap="ddp"),
        "parts": environment(wrap="ddp", TINY_DIE="1:5:SIGKILL,0:10:SIGKILL"),
    }.items():
        (tmp_path / name).mkdir()
        succeed(tmp_path / name, env)
    assert record(tmp_path / "parts") == record(tmp_path / "whole")
    parameters = {record(tmp_path / "whole")[f"params{rank}"] for rank in (0, 1)}
    assert len(parameters) == 2, "the ranks' statistics differ, or this test shows nothing"
