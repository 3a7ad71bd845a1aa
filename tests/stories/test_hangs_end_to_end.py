"""A rank that hangs, under a real launcher: found within its limit, explained, ended, recovered."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from holdfast.journal import events
from holdfast.journal.reader import read_journal
from kit.harness import REPO, finish, holdfast
from kit.nodes.nodes import cluster

SCRIPT = str(REPO / "tests" / "scripts" / "train" / "train_hanging.py")
LIMITS = (
    "monitor.rank_section_timeouts=setup:16,step:4,checkpointing:4",
    "monitor.rank_heartbeat_timeout=30",
    "control.lease_ttl=8",
    "control.decision_timeout=15",
    "monitor.rank_out_of_section_timeout=3",
    "monitor.initial_rank_heartbeat_timeout=60",
    "checkpoint.interval=4",
    "launch.stop_grace=1",
)


def run_it(tmp_path: Path, place: str, *more: str) -> list[events.DecisionMade]:
    settings = [word for setting in (*LIMITS, *more) for word in ("--set", setting)]
    command = holdfast("run", "--run-dir", "run", "--nproc-per-node", "2", *settings, SCRIPT, place, "log")
    result = finish(command, cwd=tmp_path, timeout=150)
    assert result.code == 0, result.text
    assert (tmp_path / "log.hung").exists(), "the fault did not happen, so this shows nothing"
    values = {line.split()[1] for line in (tmp_path / "log").read_text().splitlines()}
    assert len(values) == 1
    lines = read_journal(tmp_path / "run" / "journal")
    return [
        line.body
        for line in lines
        if isinstance(line.body, events.DecisionMade) and line.body.about == "recovery"
    ]


def evidence(tmp_path: Path) -> dict[str, object]:
    (report,) = (tmp_path / "run" / "attempts" / "000001" / "hang").glob("*.json")
    found = json.loads(report.read_text())
    assert isinstance(found, dict)
    return found


def test_a_rank_that_hangs_in_a_step_is_found_named_and_replaced(tmp_path: Path) -> None:
    """Cases pytorch#141069 and nccl#1260: which rank, in which section, and who waits for it where."""
    (decision,) = run_it(tmp_path, "sleep")
    told = " ".join(decision.evidence)
    assert decision.details["cause"] == "hang"
    assert decision.chosen == "restart"
    assert "rank 1" in told
    assert "in its training step" in told
    report = evidence(tmp_path)
    texts = "".join(path.read_text() for path in (tmp_path / "run/attempts/000001/hang").glob("rank_*.txt"))
    assert "train_hanging.py" in texts, "the stacks of the ranks are kept"
    assert "all_reduce" in texts
    assert report["hung"]


@pytest.mark.drill
def test_a_rank_that_waits_for_the_first_step_of_another_is_no_hang(tmp_path: Path) -> None:
    """Rank 1 takes longer than a step in its first one, and may; rank 0 waits for it in the second."""
    limit = "monitor.rank_section_timeouts=setup:16,step:1,checkpointing:4"
    assert run_it(tmp_path, "slow", limit) == []
    assert not (tmp_path / "run" / "attempts" / "000002").exists()


@pytest.mark.drill
def test_a_rank_that_stands_still_before_it_says_hello_is_found(tmp_path: Path) -> None:
    """In the second attempt, by the initial limit, from the start of the workers; rank 0 waits in setup."""
    initial = "monitor.initial_rank_heartbeat_timeout=6"
    first, second = run_it(tmp_path, "unheard", initial, "monitor.rank_heartbeat_timeout=6")
    assert first.details["cause"] == "unknown"
    assert second.details["cause"] == "hang"
    told = " ".join(second.evidence)
    assert "rank 1 did not reach holdfast.Run" in told
    assert "stopped by a signal" in told
    assert (tmp_path / "run" / "hello.json").exists(), "the next launch knows it too"


@pytest.mark.drill
@pytest.mark.parametrize("place", ["step", "setup", "checkpointing", "outside"])
def test_a_stopped_rank_is_found_wherever_it_is(tmp_path: Path, place: str) -> None:
    """Scenario 11."""
    (decision,) = run_it(tmp_path, place)
    told = " ".join(decision.evidence)
    assert decision.details["cause"] == "hang"
    assert "stopped by a signal" in told or "rank 1" in told


@pytest.mark.drill
@pytest.mark.parametrize("place", ["after", "export"])
def test_a_rank_that_hangs_after_its_loop_is_found_and_what_follows_is_done_again(
    tmp_path: Path, place: str
) -> None:
    """The next attempt has no step to do: it goes on to what the script does after its loop."""
    limits = "setup:16,step:4,checkpointing:4" + (",export:2" if place == "export" else "")
    exit_ = "10" if place == "after" else "60"  # a busy machine takes seconds to end a process
    (decision,) = run_it(
        tmp_path, place, f"monitor.rank_section_timeouts={limits}", f"monitor.rank_exit_timeout={exit_}"
    )
    told = " ".join(decision.evidence)
    assert decision.details["cause"] == "hang"
    what = "between the end of its loop and its exit" if place == "after" else "after its loop, in 'export'"
    assert "rank 1 stood still" in told, told
    assert what in told, told
    lines = read_journal(tmp_path / "run" / "journal")
    done = [line.body.step for line in lines if isinstance(line.body, events.RunFinished)]
    assert done == [8, 8]
    assert not (tmp_path / "run" / "attempts" / "000003").exists()


@pytest.mark.drill
@pytest.mark.parametrize("place", ["slow", "sleep"])
def test_whether_it_is_a_hang_is_known_across_nodes(tmp_path: Path, place: str) -> None:
    """One rank a node: the agent of the one that waits has to ask about the other one."""
    limits = [word for setting in LIMITS for word in ("--set", setting)]
    limits += ["--set", "monitor.rank_section_timeouts=setup:16,step:2,checkpointing:4"]
    with cluster(tmp_path, "2") as nodes:
        for name in ("a", "b"):
            nodes.start(name, *limits, acts=place, script=SCRIPT)
        ended = [agent.wait(120) for agent in nodes.agents.values()]
    assert [one.code for one in ended] == [0, 0], ended[0].text + ended[1].text
    assert (tmp_path / "log.hung").exists(), "the fault did not happen, so this shows nothing"
    attempts = sorted(path.name for path in (tmp_path / "run" / "attempts").iterdir())
    assert attempts == (["000001"] if place == "slow" else ["000001", "000002"])
    if place == "sleep":
        reports = {path.stem for path in (tmp_path / "run/attempts/000001/hang").glob("*.json")}
        assert reports == {"a", "b"}
