"""In-process restart over several nodes: agents that follow learn the next attempt from the plan."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from harness import wait_until
from holdfast.journal import events
from holdfast.journal.restart_events import RestartPlanned
from nodes import Cluster, cluster
from test_inprocess_launch import LONGEST, QUICK, SCRIPT, decided, ends, journalled

pytestmark = pytest.mark.drill
FLAGS = [word for name, value in QUICK.items() for word in ("--set", f"{name}={value}")]


def start(group: Cluster) -> None:
    for name in "abc":
        group.start(name, *FLAGS, "--set", "inprocess.active_world_size=2", script=SCRIPT)


def places(cwd: Path) -> dict[int, str]:
    """Rank → node, as the ranks were started."""
    started = journalled(cwd, events.WorkersStarted)
    return {rank: one.node for one in started if not one.kept for rank in one.pids}


def finish(group: Cluster, names: str) -> None:
    for name in names:
        result = group.agents[name].wait(LONGEST)
        assert result.code == 0, result.text


def test_all_agents_go_on_with_the_next_attempt(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RESTARTING_DO", "1:5:raise")
    with cluster(tmp_path, "3") as group:
        start(group)
        finish(group, "abc")
    assert ends(tmp_path) == [("failed", 1, "job"), ("finished", 0, "")]
    assert decided(tmp_path) == [("restart", 2)]
    started = journalled(tmp_path, events.WorkersStarted)
    before = {rank: pid for one in started if not one.kept for rank, pid in one.pids.items()}
    after = {rank: pid for one in started if one.kept for rank, pid in one.pids.items()}
    assert after == {rank: before[rank] for rank in (0, 1)}


def test_a_lost_nodes_rank_is_taken_by_a_reserve_of_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RESTARTING_DO", "1:5:wait")
    with cluster(tmp_path, "3") as group:
        start(group)
        wait_until((tmp_path / "out" / "waits1").exists, LONGEST, "rank 1 is in step 5")
        lost = places(tmp_path)[1]
        group.agents[lost].signal(signal.SIGKILL)
        finish(group, "abc".replace(lost, ""))
    assert [one and one[0] for one in ends(tmp_path)] == ["failed", "finished"]
    assert decided(tmp_path) == [("restart", 2)]
    (planned,) = journalled(tmp_path, RestartPlanned)
    assert (planned.order, planned.promoted) == ([0, 2], [2])
