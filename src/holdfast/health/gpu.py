"""The health of a node's GPUs: reachable, sound memory, not slowed down, and right about a known answer.

Usable alone: `holdfast.check_gpus()`. Whatever a sick driver does happens in child processes.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

import msgspec

from holdfast.control.devices import VISIBLE, visible_devices
from holdfast.health.gpu_child import AllComputed, Computed
from holdfast.health.gpu_facts import CHILD, TIMEOUT, Gpu, Gpus, ask_gpus, names_of, present
from holdfast.health.result import ask
from holdfast.policy.gpu_health import (
    judge_computed,
    judge_free_memory,
    judge_memory_errors,
    judge_reachable,
    judge_slowed,
)
from holdfast.policy.health import CheckResult, Status

COMPUTE_TIMEOUT = 120.0
"""Importing torch and waking eight devices takes its time."""


def check_gpus(*, compute: bool = True, timeout: float = TIMEOUT) -> list[CheckResult]:
    """Everything about the GPUs that this process may use; one result where there are none."""
    if not present():
        return [CheckResult(name="gpu", status=Status.OK, found="this node has no NVIDIA driver")]
    found = judge_gpus(ask_gpus(timeout), visible_devices(), insist=VISIBLE not in os.environ)
    return found + (check_compute() if compute else [])


def judge_gpus(gpus: Gpus, visible: Sequence[str], *, insist: bool = True) -> list[CheckResult]:
    """`insist`: the visible ones must be there, because the kernel shows them and nobody named them."""
    if gpus.problem and not gpus.devices:
        # A driver that hangs is ill; one that cannot be asked from here may be well.
        ill = bool(visible) and (gpus.hung or gpus.source == "nvidia-smi")
        return [
            CheckResult(
                name="gpu",
                status=Status.CRITICAL if ill else Status.UNKNOWN,
                found=gpus.problem,
                expected="an answer",
                fix="look at the kernel log for XIDs; drain the node and reboot" if ill else "",
            )
        ]
    names = names_of(gpus.devices, visible)
    results: list[CheckResult] = []
    if len(gpus.devices) < len(visible) and not any(name.startswith("MIG-") for name in visible):
        results.append(
            CheckResult(
                name="gpu count",
                status=Status.CRITICAL if insist else Status.WARNING,
                found=f"{gpus.source} lists {len(gpus.devices)} of {len(visible)}",
                expected=f"{len(visible)}: {', '.join(visible)}",
                fix="a device is lost, or CUDA_VISIBLE_DEVICES names one that is not there; see XID 79",
            )
        )
    for one in gpus.devices:
        if not visible or one.index in names:
            results += _judge(one)
    return results or [CheckResult(name="gpu", status=Status.OK, found="none is visible to this process")]


def _judge(gpu: Gpu) -> list[CheckResult]:
    name = f"gpu {gpu.index}"
    reachable = judge_reachable(name, gpu.problem)
    if reachable.status is not Status.OK:
        return [reachable]
    return [
        msgspec.structs.replace(reachable, found=f"{gpu.name or 'it'} answers"),
        judge_memory_errors(
            f"{name} memory errors",
            uncorrected=gpu.uncorrected,
            ever=gpu.uncorrected_ever,
            remap_pending=gpu.remap_pending,
            remap_failed=gpu.remap_failed,
            retire_pending=gpu.retire_pending,
        ),
        judge_slowed(f"{name} clocks", gpu.throttling, gpu.temperature),
        judge_free_memory(f"{name} memory", gpu.memory_used, gpu.memory_total),
    ]


def check_compute(timeout: float = COMPUTE_TIMEOUT) -> list[CheckResult]:
    """A known answer and some memory on every visible device, in a child process."""
    answer = ask([sys.executable, "-m", CHILD, "compute"], timeout)
    name = "gpu compute"
    if answer.hung:
        fix = "the driver or a device hangs: look at the kernel log, drain the node and reboot"
        text = f"no answer within {timeout:g} s"
        return [CheckResult(name=name, status=Status.CRITICAL, found=text, expected="an answer", fix=fix)]
    try:
        computed = msgspec.json.decode(answer.out, type=AllComputed)
    except msgspec.DecodeError:
        said = answer.err.strip().splitlines() or [f"it ended with {answer.code}"]
        text = f"could not be tried: {said[-1][:200]}"
        return [CheckResult(name=name, status=Status.UNKNOWN, found=text)]
    if computed.problem:
        return [
            CheckResult(
                name=name,
                status=Status.CRITICAL,
                found=computed.problem,
                expected="CUDA works",
                fix="compare the driver's release (`nvidia-smi`) with torch's (`torch.version.cuda`)",
            )
        ]
    return [_judge_computed(one) for one in computed.devices]


def _judge_computed(one: Computed) -> CheckResult:
    return judge_computed(f"gpu {one.index} compute", one.right, one.problem, one.gflops)
