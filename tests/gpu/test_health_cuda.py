"""Health checks on a real GPU: the driver answers, a known product is right, and a ping over NCCL."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import holdfast
from holdfast.health.gpu import ask_gpus, ask_nvidia_smi, check_compute, names_of, read_kernel_log
from holdfast.health.judgements import HealthStatus

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")


def test_the_driver_says_what_there_is() -> None:
    found = ask_gpus()
    assert not found.problem, found
    assert len(found.devices) >= torch.cuda.device_count()
    first = found.devices[0]
    print("asked", found.source, first)
    assert first.name
    assert first.memory_total is not None
    assert first.memory_total > 2**30
    if found.source != "torch":
        assert first.uuid.startswith("GPU-")
        assert first.bus.count(":") == 2
        assert first.throttling is not None
    assert names_of(found.devices, [str(first.index)])[first.index] == str(first.index)


@pytest.mark.skipif(shutil.which("nvidia-smi") is None, reason="no nvidia-smi")
def test_every_field_is_known_to_this_nvidia_smi() -> None:
    found = ask_nvidia_smi()
    assert not found.problem, found
    first = found.devices[0]
    print("nvidia-smi", first)
    assert first.memory_used is not None
    assert first.temperature is not None
    assert first.throttling is not None
    # A data-centre device counts memory errors and replaces rows; others may not.
    if first.uncorrected is not None:
        assert first.uncorrected_ever is not None
        assert first.remap_failed is not None or first.retire_pending is not None


def test_a_known_answer_is_computed_in_a_child_process() -> None:
    found = check_compute()
    print("computed", found)
    assert len(found) == torch.cuda.device_count()
    for one in found:
        assert one.status is HealthStatus.OK, one
        assert "the known answer" in one.found


def test_a_device_that_another_program_fills_is_busy_and_not_broken() -> None:
    free, _ = torch.cuda.mem_get_info(0)
    taken = torch.empty(free - 700 * 2**20, dtype=torch.uint8, device="cuda:0")
    try:
        first = check_compute()[0]
    finally:
        del taken
        torch.cuda.empty_cache()
    print("busy", first)
    assert first.status is HealthStatus.WARNING, first
    assert "another program uses it" in first.found


def test_all_about_the_gpus_alone() -> None:
    """E6, E9."""
    found = holdfast.check_gpus()
    assert {"gpu 0", "gpu 0 memory errors", "gpu 0 clocks", "gpu 0 compute"} <= {one.name for one in found}
    assert not [one for one in found if one.status is HealthStatus.CRITICAL], found


def test_the_doctor_looks_at_the_gpu(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "holdfast", "doctor", str(tmp_path), "--json"],
        capture_output=True, text=True, check=False, timeout=180,
    )  # fmt: skip
    report = json.loads(done.stdout)
    names = [one["name"] for one in report["nodes"][0]["results"]]
    assert "gpu 0 compute" in names
    assert "kernel log" in names
    assert done.returncode in (0, 1, 3), done.stdout


def test_the_kernels_log_is_read_or_said_to_be_closed() -> None:
    found = read_kernel_log()
    print("kernel log", found.problem or found.errors)
    assert isinstance(found.errors, list)


PING = """
import os, sys, time
import torch, torch.distributed as dist
import holdfast
torch.cuda.set_device(0)
dist.init_process_group("nccl", init_method="file://" + sys.argv[1], rank=0, world_size=1)
ping = holdfast.health.ping.LivenessPing(timeout=20.0)
ping.world_size = 2  # as if another rank were there: marks are awaited
store, number = ping._store, 0
ping._make_group("nccl")
ping._connect = lambda: None
store.set("mark/1", "1"); store.add("count", 1)
ping.world_size = 2
began = time.monotonic()
try:
    ping()
except holdfast.HoldfastError as error:
    text = str(error)
    assert "the sum is 1" in text, text
    print("reduced", round(time.monotonic() - began, 3))
one = torch.ones(4, device="cuda")
dist.all_reduce(one)
torch.cuda.synchronize()
print("training goes on", one.sum().item())
os._exit(0)
"""


def test_the_pings_own_nccl_group_works_beside_trainings(tmp_path: Path) -> None:
    """One device makes a world of one; the reduction is real, and its wrong sum is found."""
    environment = dict(os.environ, PYTHONFAULTHANDLER="1")
    done = subprocess.run(
        [sys.executable, "-c", "import holdfast.health.ping\n" + PING, str(tmp_path / "store")],
        capture_output=True, text=True, check=False, timeout=180, env=environment,
    )  # fmt: skip
    assert "reduced" in done.stdout, done.stderr[-3000:]
    assert "training goes on 4.0" in done.stdout, done.stderr[-3000:]
