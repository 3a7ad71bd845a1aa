"""In-process restart over several nodes: agents that follow learn the next attempt from the plan."""

from __future__ import annotations

import shutil
import signal
from pathlib import Path

import pytest
from test_end_to_end import record
from test_inprocess_launch import LONGEST, QUICK, SCRIPT, decided, ends, journalled, reference

from holdfast.journal import RestartPlanned, events
from holdfast.record.directory import ControlDirectory
from kit.harness import wait_until
from kit.nodes.nodes import Cluster, cluster
from kit.ranks.local_ranks import await_replicas, memory

__all__ = ["reference"]
pytestmark = pytest.mark.drill
LOCAL = {
    "checkpoint.async_save": "true", "checkpoint.save_at_end": "false",
    "checkpoint.non_persistent_ckpt_type": "local", "checkpoint.non_persistent_save_interval": "2",
}  # fmt: skip
"""Copies in the nodes' memory, and nowhere else."""
FLAGS = [word for name, value in QUICK.items() for word in ("--set", f"{name}={value}")]


def start(group: Cluster, memory: Path | None = None) -> None:
    """`memory`: where each node keeps its local copies, if any."""
    for name in "abc":
        local = LOCAL | {"checkpoint.non_persistent_local_ckpt_dir": str(memory / name)} if memory else {}
        flags = [word for key, value in local.items() for word in ("--set", f"{key}={value}")]
        group.start(name, *FLAGS, *flags, "--set", "inprocess.active_world_size=2", script=SCRIPT)


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


def test_a_lost_nodes_state_comes_from_the_memory_of_its_data_parallel_peer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, reference: dict[str, object]
) -> None:
    """A node and its memory are gone. Its peer is still the same process, and nothing was ever on a disk."""
    monkeypatch.setenv("RESTARTING_DO", "1:8:wait")
    monkeypatch.setenv("RESTARTING_INTERVAL", "1000")
    with memory() as place, cluster(tmp_path, "3") as group:
        start(group, place)
        wait_until((tmp_path / "out" / "waits1").exists, LONGEST, "rank 1 is in step 8")
        await_replicas(ControlDirectory.open(tmp_path / "run"), 6, 2)
        lost = places(tmp_path)[1]
        group.agents[lost].signal(signal.SIGKILL)
        shutil.rmtree(place / lost)
        finish(group, "abc".replace(lost, ""))
    assert [one and one[0] for one in ends(tmp_path)] == ["failed", "finished"]
    (planned,) = journalled(tmp_path, RestartPlanned)
    assert planned.promoted == [2]
    assert record(tmp_path) == reference
    assert [one.step for one in journalled(tmp_path, events.Resumed)] == [0, 6]
    assert not list((tmp_path / "run" / "checkpoints").glob("step_*"))
