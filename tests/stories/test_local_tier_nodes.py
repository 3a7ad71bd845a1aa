"""The local tier under `holdfast run`: nodes with networks and memories of their own, killed and cut off.

Every node is an agent in a network namespace, with a directory in memory that nobody else uses; only the run
directory is shared. Each test is one run that meets one loss after the other, as real ones do: every attempt
is held before a step (`scripts/train/train_local.py`) until its local copies are replicated, and only then is
something done to it. So it is known beforehand what must be found where.
"""

from __future__ import annotations

import contextlib
import json
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from holdfast import GlobalBatches
from holdfast.checkpoint.copies.rules import Assembly
from holdfast.checkpoint.copies.tier import CopyRecord, LocalTier
from holdfast.errors import ExitCode
from holdfast.journal import events
from holdfast.journal.reader import read_journal
from holdfast.record.directory import ControlDirectory
from kit.harness import REPO, wait_until
from kit.nodes.local_tier import memory
from kit.nodes.namespaces import PORT, Network, missing, network
from kit.nodes.nodes import Cluster, cluster, finish_all
from kit.ranks.local_ranks import Nodes, await_replicas
from kit.runs import journalled, outcomes
from kit.tiny import Numbers, checkpoints

WHY = missing()
pytestmark = pytest.mark.skipif(bool(WHY), reason=WHY)

TRAIN = str(REPO / "tests" / "scripts" / "train" / "train_local.py")
NAMES = "abcde"
UNTIL = 12
LOCAL, GLOBAL = 2, 4
"""Steps between local saves, and between those that go to the checkpoint root too."""
RESUME_LIMIT = 30.0
"""Seconds from a loss to training again, on a busy machine: nothing may wait for who is gone."""
PRELOAD = ("--preload", "torch.distributed.fsdp", "--preload", "holdfast.run")
"""What the script imports: once a node, and not once a worker."""
SETTINGS = {
    "checkpoint.async_save": "true", "checkpoint.non_persistent_ckpt_type": "local",
    "checkpoint.non_persistent_save_interval": LOCAL, "checkpoint.interval": GLOBAL,
    "checkpoint.timeout": 30, "checkpoint.handover_timeout": 10, "checkpoint.replication_timeout": 5,
    "control.lease_ttl": 20, "control.decision_timeout": 60,
}  # fmt: skip


class Run:
    """One run on nodes `a`, `b`, …, of which `a` hosts the store and is never lost."""

    def __init__(self, cwd: Path, group: Cluster, net: Network, where: Path, plan: str) -> None:
        self.cwd = cwd
        self.net = net
        self._group = group
        self.where = where
        self._plan = plan
        self.places: dict[str, str] = {}
        """By node: the place that it had last."""
        self.killed = 0

    # --- nodes ----------------------------------------------------------------------------------------------

    def start(self, node: str) -> None:
        host = NAMES.index(node)
        variables = [
            f"LOCAL_UNTIL={UNTIL}", f"TMPDIR={self.where / 'tmp'}", "GLOO_SOCKET_IFNAME=eth0",
            "CUDA_VISIBLE_DEVICES=",
        ]  # fmt: skip
        chosen = {**SETTINGS, "checkpoint.non_persistent_local_ckpt_dir": self.where / node}
        flags = [word for key, value in chosen.items() for word in ("--set", f"{key}={value}")]
        self._group.start(
            node, *PRELOAD, "--local-addr", self.net.address(host), *flags, acts=self._plan, script=TRAIN,
            preload=True, wrap=lambda command: self.net.inside(host, ["env", *variables, *command]),
        )  # fmt: skip

    def start_all(self, nodes: str) -> None:
        for node in nodes:
            self.start(node)
            if node == "a":
                wait_until(lambda: (self.cwd / "run" / "run.json").exists(), 60, "a is there")

    def parked(self, node: str) -> None:
        self._group.said(node, "waiting")

    def kill(self, *nodes: str) -> None:
        """Everything on these nodes, at once, the agents first."""
        assert "a" not in nodes, "the store would go with it"
        agents = [self._group.agents[node] for node in nodes]
        self.killed += len(agents)
        for agent in agents:
            agent.signal(signal.SIGKILL)
        for agent in agents:
            agent.kill_everything()

    def lose_memory(self, node: str) -> None:
        subprocess.run(["rm", "-r", str(self.where / node)], check=True)

    def cut(self, node: str) -> None:
        assert node != "a", "all the others would be cut off"
        self.net.cut(NAMES.index(node))

    def mend(self, node: str) -> None:
        self.net.mend(NAMES.index(node))

    def ended(self, node: str) -> int:
        code = self._group.agents[node].wait(30).code
        wait_until(lambda: not self._group.agents[node].processes(), 10, f"nothing of {node} is left")
        return code

    def finish(self, nodes: str) -> None:
        finish_all(self._group, " ".join(nodes))

    # --- what is seen ---------------------------------------------------------------------------------------

    @property
    def control(self) -> ControlDirectory:
        return ControlDirectory.open(self.cwd / "run")

    def held(self, attempt: int, world: int, step: int) -> list[str]:
        """Wait until an attempt is held, with its local copies replicated and drained; its nodes, by rank."""
        lines = [f"{attempt} {rank} {world} held" for rank in range(world)]

        def all_held() -> bool:
            return set(lines) <= set(self.log()) or self._group._ended()

        wait_until(all_held, 60, f"attempt {attempt} is held")
        told = "\n".join(f"--- {name}\n{agent.output().err}" for name, agent in self._group.agents.items())
        assert set(lines) <= set(self.log()), told
        await_replicas(self.control, step, world)
        drained = step // GLOBAL * GLOBAL
        wait_until(lambda: drained in self.in_global(), 30, f"step {drained} is drained")
        assert max(self.in_global()) == drained < step, "the checkpoint root has only an older one"
        ranks = {
            rank: line.body.node
            for line in read_journal(self.cwd / "run" / "journal")
            if isinstance(line.body, events.WorkersStarted) and line.attempt == attempt
            for rank in line.body.pids
        }
        nodes = [ranks[rank] for rank in range(world)]
        self.places |= {node: self.tier(node).place for node in nodes}
        return nodes

    def log(self) -> list[str]:
        path = self.cwd / "log"
        return path.read_text().splitlines() if path.exists() else []

    def in_global(self) -> list[int]:
        return [int(path.name[5:].partition("-")[0]) for path in checkpoints(self.cwd / "run")]

    def tier(self, node: str) -> LocalTier:
        return LocalTier.at(self.where / node / self.control.run_id)

    def copies(self, node: str, step: int) -> list[CopyRecord]:
        return [record for record in self.tier(node).records() if record.name.step == step]

    def events(self, kind: type[Any]) -> list[Any]:
        return journalled(self.cwd, kind)

    def decisions(self, about: str) -> list[events.DecisionMade]:
        return [decision for decision in self.events(events.DecisionMade) if decision.about == about]

    def resumed(self, attempt: int, since: float) -> events.Resumed:
        """Wait for an attempt's resume, which was the group's one decision, as its recovery was."""
        left = RESUME_LIMIT - (time.monotonic() - since)
        decided = self.control.attempt(attempt) / "decisions" / "resume.json"
        wait_until(decided.exists, left, f"attempt {attempt} decides what to resume from")
        wait_until(lambda: len(self.events(events.Resumed)) >= attempt, 10, f"attempt {attempt} resumes")
        resumes = self.events(events.Resumed)
        assert len(resumes) == len(self.decisions("resume")) == attempt
        assert len(self.decisions("recovery")) == attempt - 1
        return resumes[-1]  # type: ignore[no-any-return]

    def sources(self, attempt: int) -> dict[str, set[str]]:
        """The nodes that held what an attempt resumed from, verified, by the rank that had saved it."""
        folder = self.control.attempt(attempt)
        last = max(folder.glob("assembly-*.json"), key=lambda path: int(path.stem.partition("-")[2]))
        found = msgspec.json.decode(last.read_bytes(), type=Assembly)
        names = {place: node for node, place in self.places.items()}
        by_rank: dict[str, set[str]] = {}
        for path, places in found.sources.items():
            by_rank.setdefault(path.split("_")[2], set()).update(names[place] for place in places)
        return by_rank

    def steps(self) -> dict[int, list[str]]:
        """What each step gave, by rank."""
        return {step: [gave[key] for key in sorted(gave)] for step, gave in by_step(self.log()).items()}


def by_step(log: list[str]) -> dict[int, dict[tuple[int, int], str]]:
    """What each step gave, by world size and rank; one that was done twice must have given the same."""
    found: dict[int, dict[tuple[int, int], str]] = {}
    for line in log:
        _, rank, world, step, *rest = line.split(" ", 5)
        if step != "held":
            by_rank = found.setdefault(int(step), {})
            before = by_rank.setdefault((int(world), int(rank)), " ".join(rest))
            assert before == " ".join(rest), f"step {step} of rank {rank} was done twice, differently"
    return dict(sorted(found.items()))


def samples_of(log: list[str]) -> dict[int, dict[int, list[int]]]:
    """All ids of each step together, by the number of ranks that shared them."""
    found: dict[int, dict[int, list[int]]] = {}
    for step, by_rank in by_step(log).items():
        for (world, _), text in by_rank.items():
            found.setdefault(step, {}).setdefault(world, []).extend(json.loads(text.partition(" ")[2]))
    return {step: {world: sorted(ids) for world, ids in each.items()} for step, each in found.items()}


def epochs() -> Iterator[list[int]]:
    """The ids of one global batch after the other."""
    batches = GlobalBatches(Numbers(), 12, seed=2)
    while True:
        for ids, _ in batches:
            yield sorted(ids.tolist())


@contextlib.contextmanager
def running(cwd: Path, nnodes: str, hosts: int, plan: str) -> Iterator[Run]:
    """Nothing of the nodes is left afterwards: their processes are looked for by `job`, the rest here."""
    with memory() as where:
        (where / "tmp").mkdir()
        with network(hosts) as net, cluster(cwd, nnodes, f"{net.address(0)}:{PORT}") as group:
            run = Run(cwd, group, net, where, plan)
            yield run
        assert net.inside(0, [])[3] not in subprocess.check_output(["ip", "netns"], text=True)
        left = [path.name for path in (where / "tmp").iterdir() if path.name.startswith("holdfast")]
        assert len(left) <= 2 * run.killed, f"a killed agent cannot tidy up, but others can: {left}"
    assert not where.exists()


def uninterrupted(cwd: Path, where: Path) -> dict[int, list[str]]:
    """The same training on four ranks, without saves and without faults."""
    nodes = Nodes(cwd / "reference", where)
    nodes.shared.mkdir()
    plain = {"checkpoint_async_save": False, "checkpoint_non_persistent_ckpt_type": "none"}
    plain |= {"checkpoint_interval": 0, "checkpoint_save_at_end": False, "control_lease_ttl": 20.0}
    assert nodes.train(list("abcd"), UNTIL, **plain) == [0] * 4
    return nodes.steps()


def flip(tier: LocalTier, record: CopyRecord) -> None:
    with tier.image(record).open("r+b") as image:
        image.seek(1000)
        byte = image.read(1)[0]
        image.seek(1000)
        image.write(bytes([byte ^ 4]))


@pytest.mark.drill
@pytest.mark.timeout(300)
def test_four_nodes_go_on_bitwise_whether_one_is_cut_off_has_bad_replicas_or_is_lost(tmp_path: Path) -> None:
    """Scenario 1, node loss with a spare, and nodes that come back with old copies; always four ranks."""
    with running(tmp_path, "4", hosts=5, plan="1:7,2:11,3:11") as run:
        reference = uninterrupted(tmp_path, run.where)
        run.start_all("abcd")
        first = run.held(1, 4, step=6)
        run.start("e")
        run.parked("e")
        assert sorted(first) == list("abcd")

        # One is cut off, and its memory with it. The others and the spare, which has nothing, go on from the
        # newest step all the same: the peer of the lost node sends its shards over the network.
        away = first[2]
        run.cut(away)
        assert run.resumed(2, time.monotonic()).step == 6
        assert run.sources(2) == {"0": set(first[:2]), "1": set(first[:2]), "2": {first[3]}, "3": {first[3]}}
        assert run.ended(away) in (ExitCode.STORE_LOST, ExitCode.LEASE_LOST)
        run.mend(away)
        run.start(away)
        run.parked(away)

        # Scenario 1: one is killed, and the replicas of its shards were altered. The step goes with them, and
        # for the one below, which all had drained, what is bad comes from the checkpoint root.
        second = run.held(2, 4, step=10)
        assert set(second) == {*"abcde"} - {away}
        peer, killed = second[:2]
        for step in (8, 10):
            (replica,) = [copy for copy in run.copies(peer, step) if copy.kind == "replica"]
            assert replica.rank == 1
            flip(run.tier(peer), replica)
        run.kill(killed)
        assert run.resumed(3, time.monotonic()).step == 8
        # A copy is verified as it is read: what was bad of it came from the root, the rest from the peer.
        # As a whole it is taken out beside training.
        assert "from the checkpoint root" in run.decisions("resume")[-1].evidence[-1]
        wait_until(lambda: len(run.events(events.CopyQuarantined)) >= 2, 30, "both are taken out")
        bad = [(one.checkpoint[:13], one.node, one.kind) for one in run.events(events.CopyQuarantined)]
        assert bad == [("step_00000010", peer, "replica"), ("step_00000008", peer, "replica")]
        assert run.sources(3) == {"0": {peer}, "1": {peer}, "2": set(second[2:]), "3": set(second[2:])}, (
            f"{away} has taken part and holds copies of older steps, which count for nothing"
        )

        # The killed one comes back with what it had, step 10 of a way that was abandoned. One more is lost.
        run.start(killed)
        run.parked(killed)
        third = run.held(3, 4, step=10)
        assert third == [peer, *second[2:], away], "the one that was cut off has taken part"
        lost = third[3]
        run.kill(lost)
        run.lose_memory(lost)
        (old,) = {copy.checkpoint for copy in run.copies(killed, 10)}
        resumed = run.resumed(4, time.monotonic())
        assert resumed.step == 10
        assert resumed.checkpoint != old
        assert run.sources(4) == {"0": set(third[:2]), "1": set(third[:2]), "2": {third[2]}, "3": {third[2]}}
        run.finish("".join({*"abcde"} - {lost}))
        assert run.steps() == reference
        assert len(run.events(events.CopyQuarantined)) == 2
    assert outcomes(tmp_path) == ["failed", "failed", "failed", "finished"]


@pytest.mark.drill
def test_fewer_nodes_go_on_from_memory_and_two_of_a_group_lost_cost_what_was_not_drained(
    tmp_path: Path,
) -> None:
    """Scenario 21 and node loss without a spare: 4→3 from memory, then 3→1 from the checkpoint root."""
    with running(tmp_path, "1:4", hosts=4, plan="1:7,2:11") as run:
        run.start_all("abcd")
        four = run.held(1, 4, step=6)
        run.kill(four[2])
        run.lose_memory(four[2])
        assert run.resumed(2, time.monotonic()).step == 6
        assert run.sources(2) == {"0": set(four[:2]), "1": set(four[:2]), "2": {four[3]}, "3": {four[3]}}

        three = run.held(2, 3, step=10)
        assert three == [*four[:2], four[3]]
        run.kill(*three[1:])
        for node in three[1:]:
            run.lose_memory(node)
        assert run.resumed(3, time.monotonic()).step == 8
        (rejected,) = run.events(events.RungRejected)
        assert rejected.step == 10
        assert any("on all nodes" in reason for reason in rejected.reasons), rejected.reasons
        run.finish("a")
        assert not run.events(events.CopyQuarantined)
        done = samples_of(run.log())
    assert outcomes(tmp_path) == ["failed", "failed", "finished"]
    assert [set(done[step]) for step in (6, 7, 9, 11)] == [{4}, {3}, {3, 1}, {1}]
    batches = iter(epochs())
    for step in range(1, UNTIL + 1):
        wanted = next(batches)
        assert all(found == wanted for found in done[step].values()), f"step {step}: {done[step]}"
