"""Low throughput after a resume: probes on all ranks, a node accused, and never the checkpoint."""

from __future__ import annotations

import os
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed import HashStore

from holdfast.health import compute
from holdfast.health.compute import ComputeProbe, probe_compute
from holdfast.journal.events import ThroughputLow
from holdfast.journal.writer import JournalWriter
from holdfast.record.directory import ControlDirectory
from holdfast.record.group import Group, join_group
from holdfast.train import probation
from holdfast.train.probation import Throughput
from kit.harness import await_child
from kit.runs import events_in

# --- the probe ---------------------------------------------------------------------------------------------


def test_a_probe_is_right_short_and_draws_no_random_numbers() -> None:
    before = torch.get_rng_state()
    began = time.process_time()
    probe = probe_compute()
    assert time.process_time() - began < 2.0  # of this process; others are busy too
    assert probe.right
    assert probe.gflops > 0
    assert probe.copy_gbps > 0
    assert "GFLOP/s" in probe.describe()
    assert torch.equal(torch.get_rng_state(), before)


def test_a_wrong_product_and_a_device_that_fails_are_told_and_raise_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert "the probe failed" in probe_compute(torch.device("meta")).describe()
    monkeypatch.setattr(compute.torch, "mm", lambda left, right, out: out.add_(1))
    probe = probe_compute()
    assert not probe.right
    assert "a WRONG product" in probe.describe()


# --- one rank ----------------------------------------------------------------------------------------------


def lone(tmp_path: Path) -> tuple[Throughput, ControlDirectory]:
    control = ControlDirectory.open_or_create(tmp_path / "run")[0]
    journal = JournalWriter(control.journal, "rank-0", 1)
    return Throughput(Group(0, 1, HashStore(), None), journal, node="", device=None), control


def test_slow_steps_are_told_with_a_probe_and_accuse_nobody_where_there_is_one_node(tmp_path: Path) -> None:
    watched, control = lone(tmp_path)
    watched.before = [0.01] * 20
    for seconds in (0.5, 0.03, 0.03, 0.03, 0.03):
        watched.note(seconds)
    watched.judge()
    (event,) = events_in(control.path, ThroughputLow)
    assert (event.seconds, event.before, event.accused) == (0.03, 0.01, "")
    assert len(event.probes) == 1
    assert "rank 0 on this node" in event.probes[0]
    assert not control.standing.exists()


def test_steps_as_long_as_before_start_no_probe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def unwanted(device: torch.device | None) -> ComputeProbe:
        raise AssertionError("no probe was due")

    monkeypatch.setattr(probation, "probe_compute", unwanted)
    watched, control = lone(tmp_path)
    watched.before = [0.01] * 20
    for seconds in (0.5, 0.015, 0.015, 0.015, 0.015):
        watched.note(seconds)
    watched.judge()
    assert events_in(control.path, ThroughputLow) == []


# --- several ranks -----------------------------------------------------------------------------------------


def in_ranks(tmp_path: Path, world: int, work: Callable[[int, Group], None]) -> None:
    """Real ranks with a gloo group, as forks."""
    children = []
    for rank in range(world):
        pid = os.fork()
        if pid == 0:
            code = 70
            try:
                torch.set_num_threads(1)
                store = dist.FileStore(str(tmp_path / "store"), world)
                limit = timedelta(seconds=60)
                dist.init_process_group("gloo", store=store, rank=rank, world_size=world, timeout=limit)
                work(rank, join_group(60.0))
                dist.destroy_process_group()
                code = 0
            except BaseException:  # noqa: BLE001 - the child must end here, whatever happened
                traceback.print_exc()
            finally:
                os._exit(code)
        children.append(pid)
    assert [await_child(pid, 90) for pid in children] == [0] * world


@pytest.mark.parametrize("slow", [True, False])
def test_all_ranks_probe_together_and_the_slower_node_is_accused(tmp_path: Path, slow: bool) -> None:
    control = ControlDirectory.open_or_create(tmp_path / "run")[0]

    def rank_of(rank: int, group: Group) -> None:
        speed = 10.0 if rank < 2 else 3.0
        probe = ComputeProbe(device="cpu", gflops=speed, copy_gbps=5.0, right=True)
        probation.probe_compute = lambda device: probe  # type: ignore[assignment]
        journal = JournalWriter(control.journal, f"rank-{rank}", 1)
        watched = Throughput(group, journal, node="a" if rank < 2 else "node-b", device=None)
        # Only rank 0 has to know how it was before; the others follow it.
        watched.before = [0.01] * 20 if rank == 0 else ()
        for _ in range(6):
            watched.note(0.05 if slow else 0.01)
        watched.judge()

    in_ranks(tmp_path, 3, rank_of)
    events = events_in(control.path, ThroughputLow)
    if not slow:
        assert events == []
        return
    (event,) = events
    assert event.accused == "node-b"
    assert [probe.partition(",")[0] for probe in event.probes] == [
        "rank 0 on a", "rank 1 on a", "rank 2 on node-b",
    ]  # fmt: skip
    assert not control.standing.exists(), "it never touches the standing of a checkpoint"


def test_a_rank_whose_probe_gave_a_wrong_product_accuses_its_node(tmp_path: Path) -> None:
    control = ControlDirectory.open_or_create(tmp_path / "run")[0]

    def rank_of(rank: int, group: Group) -> None:
        probe = ComputeProbe(device="cpu", gflops=10.0, copy_gbps=5.0, right=rank == 0)
        probation.probe_compute = lambda device: probe  # type: ignore[assignment]
        journal = JournalWriter(control.journal, f"rank-{rank}", 1)
        watched = Throughput(group, journal, node="ab"[rank] * 999, device=None)
        watched.before = [0.01] * 20
        for _ in range(6):
            watched.note(0.05)
        watched.judge()

    in_ranks(tmp_path, 2, rank_of)
    (event,) = events_in(control.path, ThroughputLow)
    assert "a WRONG product" in event.probes[1]
    assert event.accused == "b" * 200


@pytest.mark.parametrize("letter", [b"", b"{", b"\xff" * 10, b'{"node": 1}'])
def test_an_answer_that_cannot_be_read_is_told_as_such(letter: bytes) -> None:
    assert "could not be read" in probation._read(letter.ljust(64)).probe.describe()
