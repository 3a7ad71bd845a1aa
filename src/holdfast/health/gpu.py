"""The health of a node's GPUs: reachable, sound memory, not slowed down, and right about a known answer.

Usable alone: `holdfast.check_gpus()`. Whatever a sick driver does happens in child processes.
"""

from __future__ import annotations

import os
from collections.abc import Sequence

import msgspec

from holdfast.control.devices import VISIBLE, visible_devices
from holdfast.health.gpu_child import AllComputed, Computed
from holdfast.health.gpu_facts import CHILD, TIMEOUT, Gpu, Gpus, ask_gpus, names_of, present
from holdfast.health.result import ask
from holdfast.own_child import own_child
from holdfast.policy.gpu_health import (
    UNCORRECTED_LIMIT,
    judge_computed,
    judge_count,
    judge_driver,
    judge_free_memory,
    judge_memory_errors,
    judge_reachable,
    judge_slowed,
    judge_untried,
    judge_unusable,
)
from holdfast.policy.health import CheckResult, Status

COMPUTE_TIMEOUT = 120.0
"""Importing torch and waking eight devices takes its time."""


def check_gpus(
    *, compute: bool = True, timeout: float = TIMEOUT, limit: int = UNCORRECTED_LIMIT
) -> list[CheckResult]:
    """Everything about the GPUs that this process may use; one result where there are none.

    `limit`: memory errors beyond correction that a device may have counted since its last reset.
    """
    if not present():
        return [CheckResult(name="gpu", status=Status.OK, found="this node has no NVIDIA driver")]
    visible = visible_devices()
    found = judge_gpus(ask_gpus(timeout), visible, insist=VISIBLE not in os.environ, limit=limit)
    return found + (check_compute() if compute else [])


def judge_gpus(
    gpus: Gpus, visible: Sequence[str], *, insist: bool = True, limit: int = UNCORRECTED_LIMIT
) -> list[CheckResult]:
    """`insist`: the visible ones must be there, because the kernel shows them and nobody named them."""
    if gpus.problem and not gpus.devices:
        return [judge_driver(gpus.problem, visible=bool(visible), hung=gpus.hung, source=gpus.source)]
    names = names_of(gpus.devices, visible)
    count = judge_count(len(gpus.devices), visible, source=gpus.source, insist=insist)
    results = [count] if count is not None else []
    for one in gpus.devices:
        if not visible or one.index in names:
            results += _judge(one, limit)
    return results or [CheckResult(name="gpu", status=Status.OK, found="none is visible to this process")]


def _judge(gpu: Gpu, limit: int) -> list[CheckResult]:
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
            limit=limit,
        ),
        judge_slowed(f"{name} clocks", gpu.throttling, gpu.temperature),
        judge_free_memory(f"{name} memory", gpu.memory_used, gpu.memory_total),
    ]


def check_compute(
    timeout: float = COMPUTE_TIMEOUT, devices: Sequence[str] | None = None
) -> list[CheckResult]:
    """A known answer, again and again for a second, and some memory on every device, in a child process.

    `devices`: only these of the visible ones, and a torch that was built without CUDA is no fault then: what
    runs here does not use them.
    """
    environ = {**os.environ, VISIBLE: ",".join(devices)} if devices is not None else None
    answer = ask(own_child(CHILD, "compute"), timeout, environ)
    name = "gpu compute"
    if answer.hung:
        return [judge_untried(name, f"no answer within {timeout:g} s", hung=True)]
    try:
        computed = msgspec.json.decode(answer.out, type=AllComputed)
    except msgspec.DecodeError:
        said = answer.err.strip().splitlines() or [f"it ended with {answer.code}"]
        return [judge_untried(name, said[-1][:200], hung=False)]
    if computed.problem and devices is not None and not computed.cuda:
        return [judge_untried(name, "torch was built without CUDA", hung=False)]
    if computed.problem:
        return [judge_unusable(name, computed.problem)]
    return [_judge_computed(one, devices) for one in computed.devices]


def _judge_computed(one: Computed, devices: Sequence[str] | None) -> CheckResult:
    known = devices is not None and one.index < len(devices)
    called = devices[one.index] if devices is not None and known else str(one.index)
    return judge_computed(
        f"gpu {called} compute", right=one.right, gflops=one.gflops, free=one.free, problem=one.problem
    )
