"""Nodes that are lost, too many, or cut off from the store: real agents, killed and stopped for real."""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path

import pytest

from holdfast.errors import ExitCode
from holdfast.journal import events
from holdfast.journal.reader import read_journal
from holdfast.policy.budgets import restarts_without_progress
from holdfast.record.directory import ControlDirectory
from holdfast.record.history import past_attempts
from kit.acting import ACTS
from kit.harness import finish, holdfast, wait_until
from kit.nodes.namespaces import PORT, Network, missing, network
from kit.nodes.nodes import STEP, Cluster, cluster, finish_all, free_endpoint, workers_of
from kit.runs import journalled, leads, outcomes


def test_a_killed_agent_is_noticed_at_once_and_the_others_go_on(tmp_path: Path) -> None:
    """Case pytorch#151220: stock agents do not notice until their own workers fail."""
    with cluster(tmp_path, "1:2") as group:
        group.start("a")
        group.start("b")
        group.wait_for_workers(1, 2)
        leader, other = leads(tmp_path), "ab".replace(leads(tmp_path), "")
        group.agents[other].signal(signal.SIGKILL)
        killed = time.monotonic()
        group.wait_for_workers(2, 1)
        assert time.monotonic() - killed < 30, "did not wait for the last call again"
        finish_all(group, leader)
    assert outcomes(tmp_path) == ["failed", "finished"]
    (decision,) = journalled(tmp_path, events.DecisionMade)
    assert (decision.chosen, decision.details["cause"]) == ("shrink", "infrastructure")
    assert f"node {other} was lost: its connection was closed" in " ".join(decision.evidence)
    started = journalled(tmp_path, events.AttemptStarted)
    assert [(one.nodes, one.world_size) for one in started] == [(2, 2), (1, 1)]


def test_a_node_that_is_told_to_stop_leaves_and_the_others_go_on(tmp_path: Path) -> None:
    """Case pytorch#67742: SIGTERM to one agent is a scale-down, not a failure, and uses up no restart."""
    with cluster(tmp_path, "1:2") as group:
        group.start("a")
        group.start("b")
        group.wait_for_workers(1, 2)
        leader, other = leads(tmp_path), "ab".replace(leads(tmp_path), "")
        group.agents[other].signal(signal.SIGTERM)
        finish_all(group, other, ExitCode.STOPPED_UNSAVED)  # its script has no Run that could save
        finish_all(group, leader)
    assert outcomes(tmp_path) == ["stopped", "finished"]
    assert not journalled(tmp_path, events.DecisionMade), "nothing failed, so there was nothing to decide"
    started = journalled(tmp_path, events.AttemptStarted)
    assert [(one.nodes, one.world_size) for one in started] == [(2, 2), (1, 1)]
    run = ControlDirectory.open(tmp_path / "run")
    assert restarts_without_progress(past_attempts(run, before=3)) == 0


@pytest.mark.drill
def test_a_stopped_agent_is_lost_after_its_timeout(tmp_path: Path) -> None:
    """Nothing closes when a node hangs or is cut off; its silence has to do. Its workers are fenced off."""
    with cluster(tmp_path, "1:2") as group:
        group.start("a")
        group.start("b")
        group.wait_for_workers(1, 2)
        leader, other = leads(tmp_path), "ab".replace(leads(tmp_path), "")
        group.agents[other].signal(signal.SIGSTOP)
        group.wait_for_workers(2, 1)
        finish_all(group, leader)
        (decision,) = journalled(tmp_path, events.DecisionMade)
        assert f"node {other} was lost: nothing was heard from it for" in " ".join(decision.evidence)
        group.agents[other].signal(signal.SIGCONT)
        group.agents[other].wait(60)  # with whatever code: the run is over, and it must not hang


@pytest.mark.drill
def test_one_node_too_many_parks_takes_over_and_ends_with_the_run(tmp_path: Path) -> None:
    """Scenario 14; case nvidia-resiliency-ext#348: the spare's arrival must not hurt the run."""
    with cluster(tmp_path, "2") as group:
        group.start("a")
        group.start("b")
        group.wait_for_workers(1, 2)
        group.start("c")
        group.said("c", "waiting: the group is running with 2 nodes; this one is a spare")
        group.start("d")  # after c, which is therefore the first to be taken
        group.said("d", "waiting")
        assert group.begun(2) == 0, "their arrival disturbed nobody"
        group.agents["b"].signal(signal.SIGKILL)
        finish_all(group, "a c d")
        assert "the run has ended" in group.agents["d"].output().err
    assert outcomes(tmp_path) == ["failed", "finished"]
    nodes = [sorted(line.body.node for line in read_journal(tmp_path / "run" / "journal")
                    if isinstance(line.body, events.WorkersStarted) and line.attempt == attempt)
             for attempt in (1, 2)]  # fmt: skip
    assert nodes == [["a", "b"], ["a", "c"]]


@pytest.mark.drill
def test_a_node_on_which_the_script_cannot_import_is_replaced_and_does_not_end_the_run(
    tmp_path: Path,
) -> None:
    """A broken mount: its rank fails in its first lines, and all others would have gone on."""
    with cluster(tmp_path, "2") as group:
        group.start("a", acts="go?ok", script=ACTS)
        group.start("b", acts="spare?error:ModuleNotFoundError: No module named 'data'", script=ACTS)
        group.wait_for_workers(1, 2)
        group.start("c", acts="go?ok", script=ACTS)
        group.said("c", "waiting")
        (tmp_path / "spare").touch()
        group.wait_for_workers(3, 2)
        (tmp_path / "go").touch()
        finish_all(group, "a c")
        group.agents["b"].wait(60)
    first, second = journalled(tmp_path, events.DecisionMade)
    assert (first.chosen, second.chosen) == ("restart", "exclude"), "in the same place first"
    assert [one["node"] for one in second.details["excluded"]] == ["b"]
    assert first.details["cause"] == second.details["cause"] == "unknown"
    assert outcomes(tmp_path) == ["failed", "failed", "finished"]


@pytest.mark.drill
def test_a_spare_that_is_not_needed_ends_with_the_run_too(tmp_path: Path) -> None:
    with cluster(tmp_path, "1") as group:
        group.start("a", acts="wait,ok")
        group.wait_for_workers(1, 1)
        group.start("b")
        group.said("b", "waiting")
        for pid in workers_of(group.agents["a"]):
            os.kill(pid, signal.SIGKILL)
        finish_all(group, "a b")


def test_the_loss_of_the_leader_is_decided_by_the_next_one(tmp_path: Path) -> None:
    """One decision, made by the survivors' leader, before its own attempt begins."""
    with cluster(tmp_path, "1:2") as group:
        group.start("a")
        group.start("b")
        group.wait_for_workers(1, 2)
        leader, other = leads(tmp_path), "ab".replace(leads(tmp_path), "")
        group.agents[leader].signal(signal.SIGKILL)
        group.wait_for_workers(2, 1)
        finish_all(group, other)
    (decision,) = journalled(tmp_path, events.DecisionMade)
    assert "the leading node was lost before it could decide" in decision.evidence
    assert outcomes(tmp_path) == ["failed", "finished"]


@pytest.mark.drill
def test_a_leader_that_was_only_stopped_comes_back_and_ends_nothing(tmp_path: Path) -> None:
    """The others took it for lost and went on. It must not declare their run over; it may take part again."""
    with cluster(tmp_path, "1:2") as group:
        group.start("a", acts="wait,wait,ok")
        group.start("b", acts="wait,wait,ok")
        group.wait_for_workers(1, 2)
        leader, other = leads(tmp_path), "ab".replace(leads(tmp_path), "")
        group.agents[leader].signal(signal.SIGSTOP)
        group.wait_for_workers(2, 1)
        assert leads(tmp_path) == other
        group.agents[leader].signal(signal.SIGCONT)
        group.wait_for_workers(3, 2)  # it has joined again
        finish_all(group, "a b")
    assert outcomes(tmp_path) == ["failed", "stopped", "finished"]


@pytest.mark.drill
def test_without_the_store_and_another_endpoint_everybody_ends_at_once_and_can_resume(tmp_path: Path) -> None:
    paged = "launch.alert_command=cat >> paged"
    with cluster(tmp_path, "2", free_endpoint()) as group:
        group.start("a", "--set", paged)
        wait_until(lambda: (tmp_path / "run" / "run.json").exists(), 60, "a is there")
        group.start("b", "--set", paged)
        group.wait_for_workers(1, 2)
        host = "a" if "a" in _hosts(group) else "b"
        other = "b" if host == "a" else "a"
        group.agents[host].signal(signal.SIGKILL)
        finish_all(group, other, ExitCode.STORE_LOST, timeout=30)
        assert "start the same command again" in group.agents[other].output().err
        assert json.loads((tmp_path / "paged").read_text())["exit_code"] == ExitCode.STORE_LOST
        wait_until(lambda: not group.agents[other].processes(), 10, "no worker is left")


@pytest.mark.drill
def test_with_a_second_endpoint_the_loss_of_the_stores_host_is_survived(tmp_path: Path) -> None:
    with cluster(tmp_path, "1:2", f"{free_endpoint()},{free_endpoint()}") as group:
        lease = ("--set", "control.lease_ttl=4")
        group.start("a", *lease)
        wait_until(lambda: (tmp_path / "run" / "run.json").exists(), 60, "a is there")
        group.start("b", *lease)
        group.wait_for_workers(1, 2)
        host = "a" if "a" in _hosts(group) else "b"
        other = "b" if host == "a" else "a"
        group.agents[host].signal(signal.SIGKILL)
        group.said(other, "Meeting the other nodes at")
        group.wait_for_workers(2, 1)
        finish_all(group, other)
    assert outcomes(tmp_path) == ["failed", "finished"]


def _hosts(group: Cluster) -> list[str]:
    """The agents that listen on the endpoint's port."""
    port = int(group.endpoint.partition(",")[0].rpartition(":")[2])
    found = []
    for name, agent in group.agents.items():
        inodes = set()
        for fd in Path(f"/proc/{agent.pid}/task").glob(
            "*/fd/*"
        ):  # the store's threads have files of their own
            try:
                inodes.add(fd.readlink().name)
            except OSError:
                continue
        for table in ("tcp", "tcp6"):
            for line in Path(f"/proc/{agent.pid}/net/{table}").read_text().splitlines()[1:]:
                words = line.split()
                listens = words[3] == "0A" and int(words[1].rpartition(":")[2], 16) == port
                if listens and f"socket:[{words[9]}]" in inodes:
                    found.append(name)
    return found


def test_too_few_nodes_end_with_their_code_and_a_word_in_the_journal(tmp_path: Path) -> None:
    command = holdfast(
        "run", "--run-dir", "run", "--nnodes", "2", "--rdzv-backend", "c10d", "--rdzv-endpoint",
        free_endpoint(), "--rdzv-conf", "join_timeout=1", "--rdzv-id", "few", "--no-preload",
        "--set", "launch.alert_command=$TEST_PAGE", STEP, "ok", "log",
    )  # fmt: skip
    paged = {**os.environ, "TEST_PAGE": f"tee -a {tmp_path}/paged"}
    result = finish(command, cwd=tmp_path, timeout=60, env=paged)
    assert result.code == ExitCode.NO_CAPACITY, result.text
    alert = json.loads((tmp_path / "paged").read_text())
    assert (alert["kind"], alert["exit_code"]) == ("stop", ExitCode.NO_CAPACITY)
    assert "fewer than 2 nodes joined" in alert["text"]
    assert not (tmp_path / "log").exists(), "no worker began"
    told = [body.message for body in journalled(tmp_path, events.Warned)]
    assert any("ended with code 28: fewer than 2 nodes" in text for text in told), told


# --- nodes that lose sight of each other --------------------------------------------------------------------


WHY = missing()
"""Why there can be no networks to cut here, if so."""


def cut(net: Network, how: str) -> None:
    """Node 1 is cut off from node 0, which hosts the store."""
    if how == "both directions":
        net.cut(1)
    elif how == "what it sends is lost":
        net.cut_one_way(1, 0)
    else:
        net.cut_one_way(0, 1)


@pytest.mark.skipif(bool(WHY), reason=WHY)
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
    assert len(journalled(tmp_path, events.DecisionMade)) == 1
    last = journalled(tmp_path, events.AttemptStarted)[-1]
    assert (last.nodes, last.world_size) == (1, 1)
