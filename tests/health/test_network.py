"""The network between nodes: who meets whom, what is measured over real sockets, and what that says."""

from __future__ import annotations

import socket
import statistics
import sys
import threading
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed import HashStore, Store  # type: ignore[attr-defined]

from holdfast.config.sources import load
from holdfast.health import network
from holdfast.health.connections import (
    Pair,
    judge_all_reduce,
    judge_file_system,
    judge_pairs,
    judge_ports,
    partner,
    round_count,
)
from holdfast.health.judgements import CheckResult, HealthStatus
from holdfast.health.network import Node, ProbeListener, local_checks, meet_all, network_seconds, resolve
from holdfast.journal.events import HealthFailed
from holdfast.launch import gate as gate_module
from holdfast.launch.gate import Gate
from holdfast.record.directory import ControlDirectory
from kit.commands import command
from kit.harness import finish, free_port, holdfast, job
from kit.nodes.namespaces import PORT, missing
from kit.nodes.namespaces import network as networked
from kit.runs import journalled


@given(st.integers(1, 70))
def test_every_two_nodes_meet_once_and_nobody_meets_two_at_a_time(nodes: int) -> None:
    met: list[tuple[int, int]] = []
    for number in range(round_count(nodes)):
        partners = [partner(node, number, nodes) for node in range(nodes)]
        for node, other in enumerate(partners):
            assert other is None or (partners[other] == node and other != node)
            if other is not None and node < other:
                met.append((node, other))
    assert sorted(met) == [(a, b) for a in range(nodes) for b in range(a + 1, nodes)]
    assert round_count(nodes) <= nodes, "as many rounds as nodes, not as pairs"


def test_its_time_grows_with_the_nodes() -> None:
    assert network_seconds(2000) < 11 * network_seconds(200)


TOKEN = b"t" * network.TOKEN


class Meeting:
    """Nodes of one process, each with a listener of its own; real connections over the loopback."""

    def __init__(self, count: int) -> None:
        self.listeners = [ProbeListener("127.0.0.1", TOKEN) for _ in range(count)]
        self.nodes = [
            Node(name=f"n{i}", host=f"n{i}", address="127.0.0.1", port=one.port)
            for i, one in enumerate(self.listeners)
        ]
        self.found: dict[int, list[Pair]] = {}

    def run(self, *ranks: int) -> dict[int, list[Pair]]:
        def meet(rank: int) -> None:
            self.found[rank] = meet_all(rank, self.nodes, self.listeners[rank], TOKEN)

        threads = [threading.Thread(target=meet, args=(rank,)) for rank in ranks]
        for one in threads:
            one.start()
        for one in threads:
            one.join(60)
        for listener in self.listeners:
            listener.close()
        return self.found


def test_both_ends_learn_the_same_and_every_pair_is_measured() -> None:
    found = Meeting(5).run(*range(5))
    pairs = {(one.a, one.b): one for told in found.values() for one in told}
    assert len(pairs) == 20
    for (a, b), one in pairs.items():
        assert one.problem == ""
        assert one.bandwidth > 1e6
        assert 0 < one.latency < 1
        assert pairs[b, a].bandwidth == one.bandwidth


def test_a_node_that_cannot_be_reached_costs_its_own_pairs_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(network, "ROUND", 0.3)
    meeting = Meeting(4)
    meeting.listeners[3].close()
    found = meeting.run(0, 1, 2)
    for rank in (0, 1, 2):
        assert {one.b for one in found[rank] if one.problem} == {"n3"}
    results = network.judge_reached("eth0", found[0])
    assert results[0].status is HealthStatus.CRITICAL
    assert "1 node cannot be reached over eth0: n3: connecting: Connection refused" in results[0].found


def test_who_does_not_know_the_token_is_not_heard() -> None:
    listener = ProbeListener("127.0.0.1", TOKEN)
    with socket.create_connection(("127.0.0.1", listener.port), 5) as stranger:
        stranger.sendall(network._HELLO.pack(b"x" * network.TOKEN, 0, 0))
        stranger.settimeout(10)
        assert stranger.recv(1) == b"", "the connection is closed"
    with pytest.raises(TimeoutError):
        listener.take(0, 0, 0.0)
    listener.close()


# --- the ring at the gate -----------------------------------------------------------------------------------


def gates(tmp_path: Path, *names: str) -> list[tuple[Gate, list[str]]]:
    control, _ = ControlDirectory.open_or_create(tmp_path / "run")
    found = []
    for name in names:
        keywords = {"run_dir": str(tmp_path / "run"), "launch_node_name": name}
        said: list[str] = []
        found.append((Gate(load(keywords=keywords).settings, control, say=said.append), said))
    return found


def ring(store: Store, names: list[str], *taking_part: tuple[int, Gate]) -> None:
    threads = [
        threading.Thread(target=gate.try_network, args=(store, rank, names, "127.0.0.1"))
        for rank, gate in taking_part
    ]
    for one in threads:
        one.start()
    for one in threads:
        one.join(60)


def test_at_the_gate_each_node_tries_the_next_one_once_for_each_set_of_nodes(tmp_path: Path) -> None:
    names = ["a", "b", "c"]
    (a, told), (b, _), (c, _) = gates(tmp_path, *names)
    first, second, third = HashStore(), HashStore(), HashStore()
    ring(first, names, (0, a), (1, b), (2, c))
    pairs = network.ring_pairs(first, 3, 5.0)
    assert [(one.a, one.b, one.problem) for one in pairs] == [("a", "b", ""), ("b", "c", ""), ("c", "a", "")]
    assert all(one.bandwidth > 1e6 for one in pairs)
    assert told == []
    ring(second, names, (0, a), (1, b), (2, c))
    assert not second.check(["ring/0"]), "a restart of the same nodes does not wait for it again"
    (d, _), *_ = gates(tmp_path, "d")
    ring(third, ["a", "b", "d"], (0, a), (1, b), (2, d))
    assert len(network.ring_pairs(third, 3, 5.0)) == 3, "the leader decides for the one who is new"
    assert not journalled(tmp_path, HealthFailed)


def test_a_neighbour_that_cannot_be_reached_is_told_and_keeps_nobody_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(network, "RING_WAIT", 0.3)
    monkeypatch.setattr(gate_module, "GO_PATIENCE", 0.3)
    (a, told), (b, _) = gates(tmp_path, "a", "b")
    store = HashStore()
    ring(store, ["a", "b"], (0, a))
    assert any("1 node cannot be reached over the interface used" in text for text in told), told
    (failed,) = journalled(tmp_path, HealthFailed)
    assert (failed.node, failed.status, failed.kept_out) == ("a", "warning", False)
    ring(HashStore(), ["a", "b"], (1, b))  # without the leader's word nobody tries


def pair(a: str, b: str, rate: float, problem: str = "") -> Pair:
    return Pair(a=a, b=b, latency=1e-5, bandwidth=rate * 1e9, problem=problem)


def test_a_slow_node_is_found_among_the_pairs() -> None:
    names = [f"n{i}" for i in range(6)]
    every = [pair(a, b, 1.0 if "n4" in (a, b) else 10.0) for a in names for b in names if a < b]
    found = judge_pairs(every)
    assert (found.status, "n4 is part of 5 of them" in found.found) == (HealthStatus.WARNING, True)
    assert "n4" in found.fix
    assert judge_pairs([pair(a, b, 10.0) for a in names for b in names if a < b]).status is HealthStatus.OK
    assert judge_pairs([pair("a", "b", 0, "no route")]).status is HealthStatus.UNKNOWN


def test_a_wrong_or_missing_sum_is_critical() -> None:
    bad = judge_all_reduce("gloo", 3, seconds=0, size=4, problem="a WRONG sum: 1.0 instead of 6.0")
    good = judge_all_reduce("gloo", 2, seconds=0.001, size=10**6, problem="")
    assert (bad.status, good.status) == (HealthStatus.CRITICAL, HealthStatus.OK)
    assert good.found == "2 nodes have the right sum after 1 ms, 1 GB/s on the bus"


def named(results: list[CheckResult]) -> dict[str, CheckResult]:
    return {one.name: one for one in results}


def test_an_interface_that_is_named_and_not_there_is_critical(tmp_path: Path) -> None:
    sysfs = tmp_path / "net"
    (sysfs / "lo").mkdir(parents=True)
    (sysfs / "lo" / "operstate").write_text("unknown\n")
    found = named(local_checks({"GLOO_SOCKET_IFNAME": "eth9", "NCCL_SOCKET_IFNAME": "lo"}, sysfs))
    assert found["network interface eth9"].status is HealthStatus.CRITICAL
    assert "GLOO_SOCKET_IFNAME names it, and it is not there" in found["network interface eth9"].found
    assert (found["network interface lo"].status, found["network interface lo"].found) == (
        HealthStatus.OK,
        "127.0.0.1",
    )
    (sysfs / "lo" / "operstate").write_text("down\n")
    down = named(local_checks({"NCCL_SOCKET_IFNAME": "=lo"}, sysfs))["network interface lo"]
    assert (down.status, "is down" in down.found) == (HealthStatus.CRITICAL, True)
    assert "network interface lo" not in named(local_checks({"NCCL_SOCKET_IFNAME": "^lo"}, sysfs))


def test_ports_and_names(tmp_path: Path) -> None:
    ports = tmp_path / "range"
    ports.write_text("60000\t60999\n")
    assert named(local_checks({}, ports=ports))["network ports"].status is HealthStatus.WARNING
    assert judge_ports(32768, 60999, "Address already in use").status is HealthStatus.CRITICAL
    assert set(resolve(["localhost", "no-such-host.invalid"])) == {"no-such-host.invalid"}


@pytest.mark.parametrize(
    ("kind", "options", "status", "said"),
    [
        ("lustre", ["rw", "flock"], HealthStatus.OK, "is on Lustre; a directory's stripe count"),
        ("nfs4", ["rw", "hard"], HealthStatus.OK, "is on NFS; other nodes see a new name"),
        ("nfs", ["rw", "soft"], HealthStatus.WARNING, "mounted `soft`"),
        ("gpfs", ["rw"], HealthStatus.OK, "is on GPFS; quotas"),
        ("overlay", ["rw"], HealthStatus.WARNING, "lost with the container"),
        ("tmpfs", ["rw"], HealthStatus.WARNING, "lost with the next reboot"),
        ("ext4", ["ro"], HealthStatus.WARNING, "mounted read-only"),
        ("fuse.s3fs", ["rw"], HealthStatus.WARNING, "renames may not be one step"),
        ("ext4", ["rw"], HealthStatus.OK, "is on ext4"),
    ],
)
def test_file_systems_are_named_with_what_matters(
    kind: str, options: list[str], status: HealthStatus, said: str
) -> None:
    found = judge_file_system("the run directory", "/fs/run", kind, options, kept=True)
    assert (found.status, said in found.found, bool(found.fix)) == (
        status,
        True,
        status is not HealthStatus.OK,
    ), found
    assert judge_file_system("x", "/shm", "tmpfs", [], kept=False).status is HealthStatus.OK


def test_a_wrong_endpoint_is_refused() -> None:
    for words in (["--network", "host"], ["--network", "host:0x1", "--nodes", "2"], ["--network", "h:1"]):
        assert command("doctor", *words).code == 2


@pytest.mark.drill
@pytest.mark.skipif(bool(missing()), reason=missing() or "there are network namespaces")
def test_nodes_with_networks_of_their_own_find_the_one_that_is_cut_off(tmp_path: Path) -> None:
    """Three hosts; what the second sends to the third is lost. The first reaches both."""
    with networked(3) as net:
        net.cut_one_way(1, 2)
        argv = [
            net.inside(
                host,
                holdfast(
                    "doctor",
                    "run",
                    "--quick",
                    "--network",
                    f"{net.address(0)}:{PORT}",
                    "--nodes",
                    "3",
                    "--json",
                ),
            )
            for host in range(3)
        ]
        names = [{"HOLDFAST_LAUNCH_NODE_NAME": f"n{host}"} for host in range(3)]
        with (
            job(argv[0], cwd=tmp_path, env=names[0]) as first,
            job(argv[1], cwd=tmp_path, env=names[1]) as second,
            job(argv[2], cwd=tmp_path, env=names[2]) as third,
        ):
            ended = [one.wait(240) for one in (first, second, third)]
    import json

    told = {}
    for one in ended:
        (report,) = json.loads(one.out)["nodes"]
        told[report["node"]] = {result["name"]: result for result in report["results"]}
    assert told["n0"]["network peers"]["status"] == "ok"
    assert {one["all-reduce over gloo"]["status"] for one in told.values()} == {"unknown"}
    assert "eth0" in told["n0"]["network peers"]["found"]
    for name, other in (("n1", "n2"), ("n2", "n1")):
        assert told[name]["network peers"]["status"] == "critical"
        assert (
            f"1 node cannot be reached over eth0 ({net.address(int(name[1]))}): {other}"
            in told[name]["network peers"]["found"]
        )


@pytest.mark.drill
def test_two_doctors_on_one_machine_reduce_together_over_gloo(tmp_path: Path) -> None:
    flags = ["doctor", "run", "--quick", "--network", f"127.0.0.1:{free_port()}", "--nodes", "2"]
    with job(holdfast(*flags), cwd=tmp_path, env={"HOLDFAST_LAUNCH_NODE_NAME": "a"}) as other:
        mine = finish(holdfast(*flags), cwd=tmp_path, env={"HOLDFAST_LAUNCH_NODE_NAME": "b"}, timeout=180)
        theirs = other.wait(60)
    for told in (mine, theirs):
        assert "2 nodes have the right sum" in told.out, told.text
        assert "1 node reached over lo (127.0.0.1)" in told.out
    assert sum("network between nodes" in told.out for told in (mine, theirs)) == 1
    assert statistics.fmean((mine.code, theirs.code)) < 2, sys.version
