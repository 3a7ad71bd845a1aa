"""Random faults of mixed kinds against one run: it ends as if nothing had happened, or says why not."""

from __future__ import annotations

import contextlib
from pathlib import Path

import pytest

from holdfast.drill.compare import compare_checkpoints
from kit.harness import finish, holdfast
from kit.nodes.local_tier import memory
from kit.nodes.machines import may_mount, small_disk
from kit.nodes.namespaces import missing, network
from kit.worlds.soak import DISK, EXAMPLE, INTERVAL, NODES, Soak, model


def soak(
    tmp_path: Path, *, faults: int, seed: int, partitions: bool, local: bool = False, disk: bool = False
) -> None:
    if disk:
        with small_disk(tmp_path / "soak" / "run", DISK):
            _soak(tmp_path, faults=faults, seed=seed, partitions=partitions, local=local, disk=True)
    else:
        _soak(tmp_path, faults=faults, seed=seed, partitions=partitions, local=local, disk=False)


def _soak(tmp_path: Path, *, faults: int, seed: int, partitions: bool, local: bool, disk: bool) -> None:
    place = tmp_path / "soak"
    place.mkdir(exist_ok=True)
    with contextlib.ExitStack() as stack:
        net = stack.enter_context(network(len(NODES))) if partitions else None
        where = stack.enter_context(memory()) if local else None
        world = Soak(place, faults=faults, seed=seed, net=net, local=where, disk=disk)
        report = world.run()
    print(report)
    (tmp_path / "report.txt").write_text(f"{report}\n")
    assert report.problems == [], report
    assert len(report.faults) == faults
    assert bool(report.from_memory) == local, report
    assert report.attempts <= 4 * faults + 4, report
    reference = finish(
        holdfast(
            "run", "--run-dir", "reference", "--nproc-per-node", str(len(NODES)),
            "--set", f"checkpoint.interval={10 * INTERVAL}", EXAMPLE,
            *model(world.steps),
        ),
        cwd=tmp_path, timeout=400, env={"CUDA_VISIBLE_DEVICES": ""},
    )  # fmt: skip
    assert reference.code == 0, reference.text
    (undisturbed,) = (tmp_path / "reference" / "checkpoints").glob(f"step_{world.steps:08d}-*")
    differences = [one for one in compare_checkpoints(world.final(), undisturbed) if not one.equal]
    assert differences == [], f"{differences}\n{report}"


@pytest.mark.drill
def test_a_few_random_faults_leave_no_trace_in_the_parameters(tmp_path: Path) -> None:
    soak(tmp_path, faults=2, seed=3, partitions=False)


@pytest.mark.drill
def test_a_few_leave_none_where_the_nodes_resume_from_memory_either(tmp_path: Path) -> None:
    soak(tmp_path, faults=3, seed=5, partitions=False, local=True)


@pytest.mark.drill
def test_a_few_leave_none_where_the_storage_is_what_fails(tmp_path: Path) -> None:
    if not may_mount():
        pytest.skip("a file system that can be filled and stalled needs root and /dev/fuse")
    soak(tmp_path, faults=3, seed=11, partitions=False, disk=True)


@pytest.mark.drill
@pytest.mark.parametrize("local", [False, True])
@pytest.mark.parametrize("seed", [41, 42])
def test_many_random_faults_leave_no_trace_in_the_parameters(tmp_path: Path, seed: int, local: bool) -> None:
    """With partitions and bad storage where this machine can have them: 60 faults each, of eleven kinds."""
    why = missing()
    if why:
        print(f"without partitions: {why}")
    soak(tmp_path, faults=60, seed=seed, partitions=not why, local=local, disk=may_mount())
