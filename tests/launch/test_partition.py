"""Nodes that lose sight of each other: real networks, cut for real, in both directions and in one."""

from __future__ import annotations

from pathlib import Path

import pytest

from holdfast.errors import ExitCode
from holdfast.journal import events
from kit.harness import wait_until
from kit.nodes.namespaces import PORT, Network, missing, network
from kit.nodes.nodes import cluster, finish_all
from kit.runs import journalled, leads, outcomes

WHY = missing()
pytestmark = pytest.mark.skipif(bool(WHY), reason=WHY)


def cut(net: Network, how: str) -> None:
    """Node 1 is cut off from node 0, which hosts the store."""
    if how == "both directions":
        net.cut(1)
    elif how == "what it sends is lost":
        net.cut_one_way(1, 0)
    else:
        net.cut_one_way(0, 1)


@pytest.mark.drill
@pytest.mark.parametrize(
    "how",
    [
        "both directions",
        pytest.param("what it sends is lost", marks=pytest.mark.drill),
        pytest.param("what it should hear is lost", marks=pytest.mark.drill),
    ],
)
def test_a_node_that_is_cut_off_ends_itself_and_the_others_go_on(tmp_path: Path, how: str) -> None:
    """Scenario 28 and B10: no worker of the cut-off node lives on, and it can do no harm."""
    with network(2) as net, cluster(tmp_path, "1:2", f"{net.address(0)}:{PORT}") as group:
        for host, name in enumerate("ab"):
            group.start(name, "--local-addr", net.address(host), wrap=lambda c, h=host: net.inside(h, c))
            if name == "a":
                wait_until(lambda: (tmp_path / "run" / "run.json").exists(), 60, "a is there")
        group.wait_for_workers(1, 2)
        assert leads(tmp_path) in ("a", "b")
        cut(net, how)
        group.wait_for_workers(2, 1)
        finish_all(group, "a", timeout=60)
        ended = group.agents["b"].wait(60)
        assert ended.code in (ExitCode.STORE_LOST, ExitCode.LEASE_LOST), ended.text
        wait_until(lambda: not group.agents["b"].processes(), 10, "nothing of the cut-off node is left")
    assert outcomes(tmp_path) == ["failed", "finished"]
    assert len(journalled(tmp_path, events.Decision)) == 1
    last = journalled(tmp_path, events.AttemptStarted)[-1]
    assert (last.nodes, last.world_size) == (1, 1)
