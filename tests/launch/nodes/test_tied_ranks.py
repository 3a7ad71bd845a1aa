"""A run whose ranks hold different tensors under one name, on nodes of which one is lost."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from holdfast.journal import events
from kit.harness import REPO, wait_until
from kit.nodes.nodes import cluster, finish_all
from kit.runs import journalled, leads, outcomes

TIED = str(REPO / "tests" / "scripts" / "launch" / "train_tied.py")


@pytest.mark.drill
def test_a_node_that_joins_does_not_end_a_group_that_cannot_grow(tmp_path: Path) -> None:
    """A third node would make an attempt of three ranks, which no checkpoint of two can start."""
    soon = ("--rdzv-conf", "last_call_timeout=2,is_host=0", "--monitor-interval", "0.1")
    with cluster(tmp_path, "2:3") as group:
        for name in "ab":
            group.start(name, *soon, script=TIED, preload=True)
        log = tmp_path / "log"
        wait_until(lambda: log.exists() and log.read_text().count("saved") == 2, 90, "both have saved step 3")
        group.start("c", script=TIED, preload=True)
        group.said("c", "this one is a spare")
        leader, other = leads(tmp_path), "ab".replace(leads(tmp_path), "")
        group.agents[other].signal(signal.SIGKILL)
        finish_all(group, f"{leader} c")
    assert outcomes(tmp_path) == ["failed", "finished"]
    started = journalled(tmp_path, events.AttemptStarted)
    assert [(one.nodes, one.world_size) for one in started] == [(2, 2), (2, 2)]


@pytest.mark.drill
def test_a_launch_that_may_shrink_waits_for_a_node_where_fewer_ranks_could_not_go_on(tmp_path: Path) -> None:
    """It would shrink, resume nothing, and fail: two attempts and a node's time for what is known before."""

    def logged(what: str) -> list[str]:
        path = tmp_path / "log"
        return (
            [line for line in path.read_text().splitlines() if line.startswith(what)] if path.exists() else []
        )

    with cluster(tmp_path, "1:2") as group:
        for name in "ab":
            group.start(name, script=TIED, preload=True)
        wait_until(lambda: len(logged("saved")) == 2, 60, "both ranks have saved step 3")
        leader, other = leads(tmp_path), "ab".replace(leads(tmp_path), "")
        group.agents[other].signal(signal.SIGKILL)
        group.said(leader, "fewer cannot go on from what is saved: model.weight differs between ranks")
        assert logged("2 ") == []
        group.start("c", script=TIED, preload=True)
        finish_all(group, f"{leader} c")
    assert outcomes(tmp_path) == ["failed", "finished"]
    assert sorted(logged("2 ")) == ["2 0 2 3 103", "2 1 2 3 203"]
    started = journalled(tmp_path, events.AttemptStarted)
    assert [(one.nodes, one.world_size) for one in started] == [(2, 2), (2, 2)]
    assert "shrink" not in {one.chosen for one in journalled(tmp_path, events.DecisionMade)}
