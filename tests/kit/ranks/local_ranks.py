"""Ranks as forks of the test's process, each on a node of its own: a local directory that can be lost.

Quick, because nothing is imported again. What a rank did is in its log; all else is in the run directory.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import holdfast
from holdfast.checkpoint.copies import tier
from holdfast.checkpoint.format.manifest import CheckpointName, parse_name
from holdfast.journal.event import Event
from holdfast.record.directory import ControlDirectory
from kit.harness import await_child, wait_until
from kit.nodes.local_tier import memory
from kit.runs import events_in
from kit.tiny import Numbers, start_fork

E = TypeVar("E", bound=Event)
AtStep = Callable[[int, holdfast.Run], None]


PLACE = "HFTEST_PLACE"
"""In the environment of what the ranks start: whose it is."""


def _at_work_in(place: Path) -> list[int]:
    """Servers and writers of ranks that have ended: what they still write must not appear after the end."""
    found = []
    for entry in Path("/proc").iterdir():
        with contextlib.suppress(OSError):
            if entry.name.isdigit() and f"{PLACE}={place}".encode() in (
                (entry / "environ").read_bytes().split(b"\0")
            ):
                found.append(int(entry.name))
    return found


@dataclass
class Nodes:
    """A run directory that all nodes see, and what each has for itself."""

    shared: Path
    memory: Path
    """Under which every node has its directory."""
    per_node: int = 1
    settings: dict[str, object] = field(default_factory=dict)
    reference: dict[int, list[str]] = field(default_factory=dict)
    """What `steps` gives for the same training, never interrupted."""

    @property
    def run_dir(self) -> Path:
        return self.shared / "run"

    @property
    def control(self) -> ControlDirectory:
        return ControlDirectory.open(self.run_dir)

    def directory(self, node: str) -> Path:
        return self.memory / node

    def place(self, node: str) -> Path:
        return self.directory(node) / self.control.run_id

    def lose(self, node: str) -> None:
        """The node's memory is gone."""
        shutil.rmtree(self.directory(node))

    def copy(self, name: str) -> Nodes:
        """The same state once more, to try something else with it."""
        there = Nodes(self.shared.with_name(name), self.memory / f"at-{name}", self.per_node, self.settings)
        shutil.copytree(self.shared, there.shared, symlinks=True)
        there.memory.mkdir()
        for node in self.memory.iterdir():
            if not node.name.startswith("at-"):
                shutil.copytree(node, there.memory / node.name)
        return there

    @contextlib.contextmanager
    def aside(self, name: str) -> Iterator[Nodes]:
        """The same once more for one test, which may do with it what it likes."""
        there = self.copy(f"t{abs(hash(name)) % 10**8}")
        try:
            yield there
        finally:
            wait_until(lambda: not _at_work_in(there.shared), 30, "its servers and writers end")
            shutil.rmtree(there.memory)
            shutil.rmtree(there.shared)

    def events(self, kind: type[E]) -> list[E]:
        """What the journal tells of one kind."""
        return events_in(self.run_dir, kind)

    def local(self) -> list[CheckpointName]:
        return tier.names(self.control)

    # --- running --------------------------------------------------------------------------------------------

    def train(
        self,
        nodes: Sequence[str],
        until: int,
        *,
        log: str = "log",
        at_step: Mapping[int, AtStep] | None = None,
        **settings: object,
    ) -> list[int]:
        """Train on these nodes; how each rank ended. `at_step` has what a rank does before each step."""
        (self.shared / log).mkdir(exist_ok=True)
        ranks = [node for node in nodes for _ in range(self.per_node)]
        torch.set_num_threads(1)
        keeper, port = store_process()

        def ranked(rank: int, node: str) -> None:
            os.environ |= {
                "RANK": str(rank), "WORLD_SIZE": str(len(ranks)),
                "LOCAL_RANK": str(rank % self.per_node), "LOCAL_WORLD_SIZE": str(self.per_node),
                "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), PLACE: str(self.shared),
            }  # fmt: skip
            chosen = {**self.settings, **settings, "launch_node_name": node}
            chosen["checkpoint_non_persistent_local_ckpt_dir"] = str(self.directory(node))
            self._rank(rank, len(ranks), port, until, log, (at_step or {}).get(rank), chosen)

        children = [start_fork(partial(ranked, rank, node)) for rank, node in enumerate(ranks)]
        codes = [await_child(pid, 120) for pid in children]
        os.kill(keeper, signal.SIGKILL)
        await_child(keeper, 10)
        return codes

    def _rank(
        self,
        rank: int,
        world: int,
        port: int,
        until: int,
        log: str,
        at_step: AtStep | None,
        settings: dict[str, object],
    ) -> None:
        limit = timedelta(seconds=60)
        store = dist.TCPStore("127.0.0.1", port, is_master=False, timeout=limit)  # type: ignore[attr-defined]
        dist.init_process_group("gloo", store=store, rank=rank, world_size=world, timeout=limit)
        torch.manual_seed(1)
        model = nn.Sequential(nn.Linear(6, 24), nn.GELU(), nn.Linear(24, 6))
        fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        run = holdfast.Run(run_dir=self.run_dir, **{**DEFAULTS, **settings})
        run.track(model=model, optimizer=optimizer)
        with (self.shared / log / f"rank{rank}.log").open("a", buffering=1) as file:
            for step, (ids, x) in run.steps(holdfast.GlobalBatches(Numbers(), 12, seed=2), until=until):
                if at_step is not None:
                    at_step(step, run)
                loss = (model(x) - x).square().mean()
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                run.record(loss=loss, samples=ids)
                file.write(f"{step} {loss.item().hex()} {ids.tolist()}\n")
        dist.destroy_process_group()

    def steps(self, log: str = "log") -> dict[int, list[str]]:
        """What each step gave, by rank; a step that was done twice must have given the same."""
        found: dict[int, dict[int, str]] = {}
        for path in sorted((self.shared / log).glob("rank*.log")):
            rank = int(path.stem.removeprefix("rank"))
            for line in path.read_text().splitlines():
                step, rest = line.split(" ", 1)
                before = found.setdefault(int(step), {}).setdefault(rank, rest)
                assert before == rest, f"step {step} of rank {rank} was done twice, differently"
        return {step: [by_rank[rank] for rank in sorted(by_rank)] for step, by_rank in sorted(found.items())}


def store_process() -> tuple[int, int]:
    """A store in a process of its own (its pid, its port): a fork of one that has its threads may hang."""
    reading, writing = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)  # type: ignore[attr-defined]
            os.write(writing, f"{store.port}\n".encode())
            signal.pause()
        finally:
            os._exit(1)
    os.close(writing)
    with os.fdopen(reading) as told:
        return pid, int(told.readline())


DEFAULTS: dict[str, object] = {
    "checkpoint_async_save": True,
    "checkpoint_non_persistent_ckpt_type": "local",
    "checkpoint_non_persistent_save_interval": 2,
    "checkpoint_interval": 6,
    "checkpoint_timeout": 60.0,
    "checkpoint_handover_timeout": 20.0,
    "control_lease_ttl": 20.0,
    "control_decision_timeout": 60.0,
}


def die_when_replicated(step: int, ranks: int, factor: int = 2) -> AtStep:
    """Before that step: wait until the local copy of the step before is on all its nodes, then be killed."""

    def at_step(now: int, run: holdfast.Run) -> None:
        if now == step:
            await_replicas(ControlDirectory.open(Path(run.settings.run.dir)), step - 1, ranks * (factor - 1))
            os.kill(os.getpid(), signal.SIGKILL)

    return at_step


def await_replicas(control: ControlDirectory, step: int, count: int, timeout: float = 30.0) -> None:
    deadline = time.monotonic() + timeout
    while True:
        found = [name for name in tier.names(control) if name.step == step]
        there = sum(len(list((tier.folder(control, name) / tier.REPLICAS).glob("*"))) for name in found)
        if found and there >= count:
            return
        assert time.monotonic() < deadline, f"{there} of {count} replicas of step {step}"
        time.sleep(0.01)


def name_of(path: Path) -> CheckpointName:
    found = parse_name(path.name)
    assert found is not None
    return found


@contextlib.contextmanager
def killed_after_saves(folder: Path, names: list[str], last: int, end: int) -> Iterator[Nodes]:
    """Nodes of a rank each that saved locally to step `last`, replicated, and were killed in the next one.

    `reference` is what they do up to step `end` if nothing disturbs them.
    """
    with memory() as where:
        nodes = Nodes(folder, where)
        nodes.shared.mkdir()
        reference = nodes.copy("reference")
        plain = {"checkpoint_async_save": False, "checkpoint_non_persistent_ckpt_type": "none"}
        assert reference.train(names, end, checkpoint_interval=0, **plain) == [0] * len(names)
        dying = die_when_replicated(last + 1, ranks=len(names))
        assert nodes.train(names, end, at_step=dict.fromkeys(range(len(names)), dying)) == [-9] * len(names)
        nodes.reference = reference.steps()
        yield nodes
