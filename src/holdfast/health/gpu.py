"""The health of a node's GPUs, asked in a process that may hang or die.

Prints one JSON document. Only `compute` and `torch` import torch.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import msgspec

from holdfast.cluster import VISIBLE, visible_devices
from holdfast.health.gpu_facts import CHILD, FACTS_TIMEOUT, Gpu, Gpus, ask_gpus, names_of, normal_bus, present
from holdfast.health.judgements import (
    UNCORRECTED_LIMIT,
    CheckResult,
    Status,
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
from holdfast.health.trials import ask
from holdfast.process import own_child

SECONDS = 1.0
"""For which each device computes: a fault of heat or power does not show in the first millisecond."""
ALLOCATE = 256 * 1024 * 1024
"""Bytes that are taken, written and read on each device."""


class Computed(msgspec.Struct, frozen=True, kw_only=True):
    """What came of computing on one device."""

    index: int
    """As torch numbers what is visible."""
    right: bool = False
    """Whether the product and what memory gave back were what they have to be."""
    gflops: float = 0.0
    free: int | None = None
    """Bytes of its memory, if they were too few to compute with."""
    problem: str = ""
    """What it failed with before there was an answer."""


class AllComputed(msgspec.Struct, frozen=True, kw_only=True):
    devices: list[Computed] = []
    problem: str = ""
    cuda: bool = True
    """Whether torch was built for CUDA at all."""


def nvml() -> Gpus:
    import pynvml  # type: ignore[import-untyped,import-not-found,unused-ignore]

    pynvml.nvmlInit()
    devices = []
    for index in range(int(pynvml.nvmlDeviceGetCount())):
        try:
            devices.append(_nvml_device(pynvml, index))
        except pynvml.NVMLError as error:
            devices.append(Gpu(index=index, problem=str(error)))
    return Gpus(devices=devices, source="nvml")


def _nvml_device(pynvml: Any, index: int) -> Gpu:
    handle = pynvml.nvmlDeviceGetHandleByIndex(index)

    def known(call: Callable[[], Any]) -> Any:
        """None where this device or release has no such thing; a lost device is an error."""
        try:
            return call()
        except (pynvml.NVMLError_NotSupported, pynvml.NVMLError_FunctionNotFound, AttributeError):
            return None
        except pynvml.NVMLError as error:
            if getattr(error, "value", None) in (pynvml.NVML_ERROR_GPU_IS_LOST, pynvml.NVML_ERROR_UNKNOWN):
                raise
            return None

    def ecc(counter: int) -> Any:
        kind = pynvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED
        return known(lambda: pynvml.nvmlDeviceGetTotalEccErrors(handle, kind, counter))

    memory = known(lambda: pynvml.nvmlDeviceGetMemoryInfo(handle))
    rows = known(lambda: pynvml.nvmlDeviceGetRemappedRows(handle))
    pending = known(lambda: pynvml.nvmlDeviceGetRetiredPagesPendingStatus(handle))
    reasons = known(lambda: pynvml.nvmlDeviceGetCurrentClocksEventReasons(handle))
    if reasons is None:
        reasons = known(lambda: pynvml.nvmlDeviceGetCurrentClocksThrottleReasons(handle))
    return Gpu(
        index=index,
        uuid=_text(known(lambda: pynvml.nvmlDeviceGetUUID(handle))),
        bus=normal_bus(_text(pynvml.nvmlDeviceGetPciInfo(handle).busId)),
        name=_text(known(lambda: pynvml.nvmlDeviceGetName(handle))),
        memory_total=None if memory is None else int(memory.total),
        memory_used=None if memory is None else int(memory.used),
        temperature=known(
            lambda: float(pynvml.nvmlDeviceGetTemperature(handle, pynvml.NVML_TEMPERATURE_GPU))
        ),
        uncorrected=ecc(pynvml.NVML_VOLATILE_ECC),
        uncorrected_ever=ecc(pynvml.NVML_AGGREGATE_ECC),
        retire_pending=None if pending is None else bool(pending),
        remap_pending=None if rows is None else bool(rows[2]),
        remap_failed=None if rows is None else bool(rows[3]),
        throttling=None if reasons is None else int(reasons),
    )


def _text(value: Any) -> str:
    return value.decode() if isinstance(value, bytes) else str(value or "")


def by_torch() -> Gpus:
    """What torch alone can say: which devices there are, and their memory."""
    import torch

    devices = []
    for index in range(torch.cuda.device_count()):
        facts = torch.cuda.get_device_properties(index)
        uuid = getattr(facts, "uuid", None)
        devices.append(
            Gpu(
                index=index,
                uuid=f"GPU-{uuid}" if uuid is not None else "",
                name=facts.name,
                memory_total=facts.total_memory,
            )
        )
    return Gpus(devices=devices, source="torch")


def compute() -> AllComputed:
    """A known answer, and some memory, on each visible device."""
    import torch

    if not torch.cuda.is_available():
        return AllComputed(problem="torch sees no usable CUDA device", cuda=torch.version.cuda is not None)
    indices = range(torch.cuda.device_count())
    with ThreadPoolExecutor(max(1, len(indices))) as pool:  # each for a second, all of them in one
        return AllComputed(devices=list(pool.map(_compute_on, indices)))


def _compute_on(index: int) -> Computed:
    import torch

    from holdfast.health.compute import keeps_computing, probe_compute

    try:
        device = torch.device("cuda", index)
        free, _ = torch.cuda.mem_get_info(index)
        if free < 2 * ALLOCATE:
            return Computed(index=index, free=free)
        filled = torch.full((ALLOCATE // 4,), 0x5A5A5A5A, dtype=torch.int32, device=device)
        sound = bool((filled == 0x5A5A5A5A).all())
        probe = probe_compute(device)
        sound = sound and keeps_computing(device, SECONDS)
        return Computed(index=index, right=probe.right and sound, gflops=probe.gflops, problem=probe.problem)
    except Exception as error:  # noqa: BLE001 - a device that is ill may fail in any way
        return Computed(index=index, problem=f"{type(error).__name__}: {error}"[:200])


def main() -> int:
    how = sys.argv[1] if len(sys.argv) > 1 else ""
    ways: dict[str, Callable[[], msgspec.Struct]] = {"nvml": nvml, "torch": by_torch, "compute": compute}
    try:
        with contextlib.redirect_stdout(sys.stderr):
            answer = ways[how]()
    except Exception as error:  # noqa: BLE001 - the parent reads what went wrong from the last line
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return 1
    sys.stdout.write(msgspec.json.encode(answer).decode() + "\n")
    return 0


# The health of a node's GPUs: reachable, sound memory, not slowed down, and right about a known answer.
#
# Usable alone: `holdfast.check_gpus()`. Whatever a sick driver does happens in child processes.


COMPUTE_TIMEOUT = 120.0
"""Importing torch and waking eight devices takes its time."""


def check_gpus(
    *, compute: bool = True, timeout: float = FACTS_TIMEOUT, limit: int = UNCORRECTED_LIMIT
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


if __name__ == "__main__":
    sys.exit(main())
