"""Counters of InfiniBand, NVLink and the bus, from a made-up sysfs tree; what GPUs show at the gate."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from holdfast.config.sources import load
from holdfast.health import gpu
from holdfast.health.compute import keeps_computing
from holdfast.health.gpu import AllComputed, Computed
from holdfast.health.judgements import CheckResult, HealthStatus, judge_history, judge_memory_errors
from holdfast.health.network import check_links, parse_nvlink
from holdfast.health.trials import ProgramAnswer
from holdfast.launch import gate as gate_module
from holdfast.launch.gate import Gate
from holdfast.record.directory import ControlDirectory
from kit.nodes.machines import SECOND, nvidia_smi


def by_name(results: list[CheckResult]) -> dict[str, CheckResult]:
    return {one.name: one for one in results}


def port(
    sysfs: Path, name: str, *, state: str = "4: ACTIVE", rate: str = "400 Gb/sec (4X NDR)", **counters: int
) -> None:
    place = sysfs / "class" / "infiniband" / name / "ports" / "1"
    (place / "counters").mkdir(parents=True)
    (place / "state").write_text(f"{state}\n")
    (place / "rate").write_text(f"{rate}\n")
    for counter in ("link_downed", "symbol_error", "port_rcv_errors", "port_xmit_wait"):
        (place / "counters" / counter).write_text(f"{counters.get(counter, 0)}\n")


def slot(
    sysfs: Path,
    bus: str,
    *,
    vendor: str = "0x10de",
    kind: str = "0x030200",
    width: str = "16",
    fatal: int = 0,
) -> None:
    place = sysfs / "bus" / "pci" / "devices" / bus
    place.mkdir(parents=True)
    (place / "vendor").write_text(f"{vendor}\n")
    (place / "class").write_text(f"{kind}\n")
    (place / "current_link_width").write_text(f"{width}\n")
    (place / "max_link_width").write_text("16\n")
    (place / "aer_dev_fatal").write_text(f"Undefined 0\nDLP 0\nTOTAL_ERR_FATAL {fatal}\n")


def test_a_node_without_links_has_nothing_to_tell(tmp_path: Path) -> None:
    assert check_links(tmp_path) == []


def test_ports_of_a_made_up_sysfs_are_judged(tmp_path: Path) -> None:
    port(tmp_path, "mlx5_0", port_xmit_wait=10**9)
    port(tmp_path, "mlx5_1", link_downed=3, symbol_error=7)
    port(tmp_path, "mlx5_2", state="1: DOWN")
    port(tmp_path, "mlx5_3", rate="200 Gb/sec (2X NDR)")
    found = by_name(check_links(tmp_path))
    assert (found["infiniband mlx5_0/1"].status, found["infiniband mlx5_0/1"].found) == (
        HealthStatus.OK, "active at 400 Gb/s, no errors",
    )  # fmt: skip
    assert found["infiniband mlx5_1/1"].found == "the link went down (link_downed 3)"
    assert found["infiniband mlx5_2/1"].found == "it is DOWN"
    assert found["infiniband mlx5_3/1"].found == "it runs at 200 Gb/s, another of this node at 400"
    assert [one.status for one in found.values()] == [HealthStatus.OK, *[HealthStatus.WARNING] * 3]


def test_lanes_and_errors_of_the_bus_are_judged(tmp_path: Path) -> None:
    slot(tmp_path, "0000:3b:00.0")
    slot(tmp_path, "0000:5e:00.0", width="8")
    slot(tmp_path, "0000:86:00.0", vendor="0x15b3", kind="0x020700", fatal=2)
    slot(tmp_path, "0000:00:1f.3", vendor="0x8086", width="1")
    slot(tmp_path, "0000:3b:00.1", kind="0x040300", width="1")
    found = by_name(check_links(tmp_path))
    assert set(found) == {"bus of gpu 0000:3b:00", "bus of gpu 0000:5e:00", "bus of adapter 0000:86:00"}
    assert found["bus of gpu 0000:3b:00"].status is HealthStatus.OK
    assert found["bus of gpu 0000:5e:00"].found == "8 of 16 lanes"
    assert "2 errors that the bus could not get over" in found["bus of adapter 0000:86:00"].found


NVLINK = """GPU 0: NVIDIA H200 (UUID: GPU-aaaa)
\t Link 0: Replay Errors: 0
\t Link 0: Recovery Errors: 2
\t Link 0: CRC Errors: 5
GPU 1: NVIDIA H200 (UUID: GPU-bbbb)
\t Link 0: Replay Errors: 3
something else
"""


def test_what_nvidia_smi_tells_of_nvlink_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = tmp_path / "nvidia-smi"
    program.write_text(f"#!/bin/sh\ncat <<'END'\n{NVLINK}END\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    found = by_name(check_links(tmp_path))
    assert (found["nvlink of GPU 0"].status, found["nvlink of GPU 0"].found) == (
        HealthStatus.WARNING, "link 0 recovery errors 2",
    )  # fmt: skip
    assert found["nvlink of GPU 1"].status is HealthStatus.OK
    assert parse_nvlink("no such thing") == {}


# --- GPUs at the gate ---------------------------------------------------------------------------------------


def test_memory_errors_above_the_limit_are_critical() -> None:
    def judged(count: int, limit: int) -> HealthStatus:
        return judge_memory_errors(
            "x", uncorrected=count, ever=count, remap_pending=False, remap_failed=False, retire_pending=None,
            limit=limit,
        ).status  # fmt: skip

    assert [judged(count, 4) for count in (0, 1, 4, 5)] == [
        HealthStatus.OK, HealthStatus.WARNING, HealthStatus.WARNING, HealthStatus.CRITICAL,
    ]  # fmt: skip
    assert judged(1, 0) is HealthStatus.CRITICAL


HOUR = 3600.0


@pytest.mark.parametrize(
    ("errors", "status"),
    [
        ([], None),
        ([(0.0, 31), (HOUR, 43), (2 * HOUR, 13)], None),
        ([(0.0, 79)], HealthStatus.WARNING),
        ([(float(second), 74) for second in range(50)], HealthStatus.WARNING),
        ([(0.0, 48), (HOUR, 48), (2 * HOUR, 95)], HealthStatus.CRITICAL),
        ([(0.0, 109), (HOUR, 109), (2 * HOUR, 109)], HealthStatus.WARNING),
    ],
)
def test_only_several_incidents_of_the_hardware_keep_a_device_s_node_out(
    errors: list[tuple[float, int]], status: HealthStatus | None
) -> None:
    """A program's bug, one incident that is logged fifty times, and what leaves it open do not."""
    found = judge_history("0", errors)
    assert (found.status if found is not None else None) is status


def test_a_product_that_comes_out_wrong_once_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    cpu = torch.device("cpu")
    assert keeps_computing(cpu, 0.0, size=64) is True
    real, calls = torch.mm, []

    def sometimes(left: Any, right: Any, *, out: Any) -> Any:
        calls.append(1)
        real(left, right, out=out)
        if len(calls) == 3:
            out[5, 7] += 1
        return out

    monkeypatch.setattr(torch, "mm", sometimes)
    assert keeps_computing(cpu, 60.0, size=64) is False
    assert len(calls) == 3


@pytest.fixture
def computing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Gate, list[list[str]], list[str]]:
    """A gate on a node with two devices, whose computing is counted and answers what it is told to."""
    for name, value in nvidia_smi(tmp_path / "bin", [{}, SECOND]).items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    monkeypatch.setattr(gate_module, "FRESH", 0.0)
    monkeypatch.setattr(gate_module, "AGAIN", 0.0)
    asked: list[list[str]] = []
    wrong: list[str] = []

    def compute(*, devices: list[str]) -> list[CheckResult]:
        asked.append(devices)
        return [
            CheckResult(
                name=f"gpu {one} compute",
                status=HealthStatus.CRITICAL if one in wrong else HealthStatus.OK,
                found="it",
            )
            for one in devices
        ]

    monkeypatch.setattr(gate_module, "check_compute", compute)
    control, _ = ControlDirectory.open_or_create(tmp_path / "run")
    settings = load(keywords={"run_dir": str(tmp_path / "run"), "launch_node_name": "here"}).settings
    log = tmp_path / "kmsg"
    log.write_text("")
    return Gate(settings, control, say=lambda text: None, kernel_log=log), asked, wrong


def test_the_devices_compute_before_the_first_attempt_and_until_they_do_so_right(
    computing: tuple[Gate, list[list[str]], list[str]],
) -> None:
    gate, asked, wrong = computing
    wrong.append("1")
    assert "gpu 1 compute" in gate.why_unfit()
    assert "gpu 1 compute" in gate.why_unfit()
    wrong.clear()
    assert gate.why_unfit() == ""
    assert gate.why_unfit() == ""
    assert asked == [["0", "1"]] * 3, "a restart does not wait for it without need"


def test_after_a_device_s_error_they_compute_again_but_not_the_excluded_one(
    computing: tuple[Gate, list[list[str]], list[str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate, asked, wrong = computing
    assert gate.why_unfit() == ""
    gate.begin("here")
    (tmp_path / "kmsg").write_text("3,1,1000000,-;NVRM: Xid (PCI:0000:5e:00): 79, gone\n")
    gate.keep_device_errors(1)
    control = ControlDirectory.open(tmp_path / "run")
    exclude_device(control, "here", "1")
    wrong.append("1")
    assert gate.why_unfit() == ""
    assert asked == [["0", "1"], ["0"]]


def exclude_device(control: ControlDirectory, node: str, device: str) -> None:
    from holdfast.record import operator

    operator.ask_to_exclude(control, node, device, "XID 79", "me")


def test_what_the_log_tells_of_a_device_is_told_and_several_incidents_keep_it_out(
    computing: tuple[Gate, list[list[str]], list[str]], tmp_path: Path
) -> None:
    gate, _, _ = computing
    line = "3,{n},{at},-;NVRM: Xid (PCI:0000:3b:00): 48, DBE\n"
    (tmp_path / "kmsg").write_text(line.format(n=1, at=1_000_000))
    assert gate.why_unfit() == ""
    hours = [line.format(n=n, at=n * 3_600_000_000) for n in (1, 2, 3)]
    (tmp_path / "kmsg").write_text("".join(hours))
    assert "gpu 0 history: XID 48 since the boot, 3 times the hardware itself to blame" in gate.why_unfit()


@pytest.mark.parametrize(("limit", "kept_out"), [(4, True), (20, False)])
def test_a_gpu_with_too_many_memory_errors_keeps_its_node_out(
    computing: tuple[Gate, list[list[str]], list[str]], tmp_path: Path, limit: int, kept_out: bool
) -> None:
    """By the setting, at the gate itself; the driver's answer is a real program's."""
    nvidia_smi(tmp_path / "bin", [{"ecc.errors.uncorrected.volatile.total": "9"}, SECOND])
    keywords = {"run_dir": str(tmp_path / "run"), "health_max_uncorrected_errors": limit}
    control = ControlDirectory.open(tmp_path / "run")
    gate = Gate(
        load(keywords=keywords).settings, control, say=lambda text: None, kernel_log=tmp_path / "kmsg"
    )
    why = gate.why_unfit()
    assert bool(why) is kept_out, why
    assert not kept_out or "9 memory errors beyond correction since its last reset, of which" in why


def test_a_torch_without_cuda_keeps_nobody_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever trains on the CPU of a node with devices does not use them; what the child says is its own."""
    said = {}

    def ask(command: list[str], timeout: float, environ: dict[str, str] | None) -> ProgramAnswer:
        said.update(environ or {})
        return ProgramAnswer(code=0, out=msgspec.json.encode(answer).decode())

    monkeypatch.setattr(gpu, "ask", ask)
    answer = AllComputed(problem="torch sees no usable CUDA device", cuda=False)
    assert [one.status for one in gpu.check_compute(devices=["2", "3"])] == [HealthStatus.UNKNOWN]
    assert said["CUDA_VISIBLE_DEVICES"] == "2,3"
    answer = AllComputed(problem="torch sees no usable CUDA device", cuda=True)
    assert [one.status for one in gpu.check_compute(devices=["2", "3"])] == [HealthStatus.CRITICAL]
    answer = AllComputed(devices=[Computed(index=0, right=True), Computed(index=1, right=False)])
    assert [(one.name, one.status) for one in gpu.check_compute(devices=["2", "3"])] == [
        ("gpu 2 compute", HealthStatus.OK), ("gpu 3 compute", HealthStatus.CRITICAL),
    ]  # fmt: skip
