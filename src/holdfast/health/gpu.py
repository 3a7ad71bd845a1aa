"""A node's GPUs: what NVML, `nvidia-smi`, torch and the kernel's log know, asked in a child process.

Guarantee: they are asked in a child process with a deadline, because a sick driver hangs for ever, and with
it whoever asks. What one of them does not know is left out, not guessed. The child runs this module and
prints one JSON document; only its `compute` and `torch` import torch.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import shutil
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import msgspec

from holdfast.base import size
from holdfast.cluster import VISIBLE, visible_devices
from holdfast.health.judgements import (
    UNCORRECTED_LIMIT,
    CheckResult,
    HealthStatus,
    judge_computed,
    judge_count,
    judge_driver,
    judge_free_memory,
    judge_kernel_log,
    judge_memory_errors,
    judge_reachable,
    judge_slowed,
    judge_untried,
    judge_unusable,
)
from holdfast.health.trials import ask
from holdfast.policy import XIDS
from holdfast.process import own_child

# --- asking in a process that may hang or die ---------------------------------------------------------------

# The device errors in the kernel's log.
#
# The log is read from `/dev/kmsg`, else as `dmesg` or `journalctl` show it: whichever this user may read. If
# none can be read, nothing is known, and the result says so; it does not mean that there was no error.


KMSG = Path("/dev/kmsg")
RECORD = 16 * 1024
"""Most bytes in one record."""
MOST = 64 * 1024 * 1024
KERNEL_LOG_TIMEOUT = 5.0
COMMANDS: tuple[tuple[str, ...], ...] = (
    ("dmesg", "--kernel", "--nopager"),
    ("journalctl", "-k", "-b", "-q", "--no-pager", "-o", "short-unix", "-n", "100000"),
)

_XID = re.compile(r"NVRM: Xid \((?:PCI:)?(?P<bus>[0-9a-fA-F:.]+)[^)]*\): (?P<number>\d+)(?:, (?P<rest>.*))?")
_DMESG = re.compile(r"^(?:<\d+>)?\[\s*(?P<at>\d+\.\d+)\]\s(?P<text>.*)$")
_JOURNAL = re.compile(r"^(?P<at>\d+\.\d+) \S+ kernel: (?P<text>.*)$")


class XidError(msgspec.Struct, frozen=True, kw_only=True):
    """One device error, as the log has it."""

    number: int
    bus: str
    """The device's address on the bus, e.g. `0000:3b:00`."""
    at: float
    """Seconds since 1970."""
    stamp: float = 0.0
    """By the kernel's own clock, which drifts from ours: tells a new error from one that was there before."""
    text: str = ""

    @property
    def identity(self) -> tuple[int, str, float]:
        return self.number, self.bus, self.stamp

    def describe(self) -> str:
        known = XIDS.get(self.number)
        what = known.meaning if known is not None else "not in Holdfast's table; see NVIDIA's catalogue"
        return f"XID {self.number} on {self.bus}: {what}" + (f" ({self.text[:120]})" if self.text else "")


class KernelLog(msgspec.Struct, frozen=True, kw_only=True):
    errors: list[XidError] = []
    problem: str = ""
    """Why it could not be read; empty if it was."""


def read_kernel_log(*, kmsg: Path | None = None, commands: Sequence[Sequence[str]] = COMMANDS) -> KernelLog:
    """The errors since boot, as far as the log still has them, oldest first."""
    kmsg = kmsg or KMSG
    refused: list[str] = []
    lines: list[tuple[float, str]] | None = None
    zero = _booted()
    try:
        lines = list(_from_kmsg(kmsg))
    except OSError as error:
        refused.append(f"{kmsg}: {error.strerror or error}")
    for command in commands if lines is None else ():
        answer = ask(command, KERNEL_LOG_TIMEOUT)
        pattern, boot = (_DMESG, _booted()) if command[0] == "dmesg" else (_JOURNAL, 0.0)
        found = [
            (float(match["at"]), match["text"])
            for match in map(pattern.match, answer.out.splitlines())
            if match is not None
        ]
        if answer.code == 0 and found:
            lines, zero = found, boot
            break
        said = answer.err.strip().splitlines() or ["it showed nothing"]
        refused.append(f"{command[0]}: {said[-1][:120]}")
    if lines is None:
        return KernelLog(problem="the kernel's log cannot be read (" + "; ".join(refused) + ")")
    errors = [one for stamp, text in lines if (one := _parse(zero, stamp, text))]
    return KernelLog(errors=sorted(errors, key=lambda one: one.at))


def _booted() -> float:
    """When the kernel's own clock was at zero."""
    return time.time() - time.clock_gettime(time.CLOCK_MONOTONIC)


def _from_kmsg(path: Path) -> Iterator[tuple[float, str]]:
    """Every record that the kernel still has. Each read gives one; a read at the end would block."""
    fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        total = 0
        rest = b""
        while total < MOST:
            try:
                data = os.read(fd, RECORD)
            except BlockingIOError:
                break
            except OSError as error:
                if error.errno == errno.EPIPE:  # records were overwritten before we got to them
                    continue
                raise
            if not data:
                break
            total += len(data)
            *lines, rest = (rest + data).split(b"\n")
            for line in lines:
                head, separator, text = line.partition(b";")
                parts = head.split(b",")
                if separator and len(parts) >= 3 and parts[2].isdigit():
                    yield int(parts[2]) / 1e6, text.decode(errors="replace")
    finally:
        os.close(fd)


def _parse(zero: float, stamp: float, text: str) -> XidError | None:
    found = _XID.search(text)
    if found is None:
        return None
    return XidError(
        number=int(found["number"]),
        bus=normal_bus(found["bus"]),
        at=zero + stamp,
        stamp=stamp,
        text=(found["rest"] or "").strip(),
    )


def normal_bus(bus: str) -> str:
    """One spelling for a device's address: the log leaves out the function, NVML has a longer domain."""
    bus = bus.lower().partition(".")[0]
    parts = bus.split(":")
    if len(parts) == 2:
        parts = ["0000", *parts]
    return ":".join([parts[0][-4:].rjust(4, "0"), *parts[1:]])


def check_kernel_log() -> CheckResult:
    """XIDs in the log, where they stay until the next boot."""
    return judged(read_kernel_log())


def judged(log: KernelLog) -> CheckResult:
    return judge_kernel_log(log.problem, [(one.number, one.describe()) for one in log.errors])


FACTS_TIMEOUT = 20.0
"""Without its persistence daemon the driver wakes every device first, for seconds."""
CHILD = "holdfast.health.gpu"

FIELDS = {
    "index": "index",
    "uuid": "uuid",
    "pci.bus_id": "bus",
    "name": "name",
    "memory.total": "memory_total",
    "memory.used": "memory_used",
    "temperature.gpu": "temperature",
    "ecc.errors.uncorrected.volatile.total": "uncorrected",
    "ecc.errors.uncorrected.aggregate.total": "uncorrected_ever",
    "retired_pages.pending": "retire_pending",
    "clocks_event_reasons.active": "throttling",
}
"""What `nvidia-smi` calls it → what we call it."""
FORMER = {"clocks_event_reasons.active": "clocks_throttle_reasons.active"}
"""A field's name → its name in older releases."""
REMAPPED = ("gpu_uuid", "remapped_rows.pending", "remapped_rows.failure")
_UNKNOWN_FIELD = re.compile(r'[Ff]ield "?([\w.]+)"? is not a valid field')


class Gpu(msgspec.Struct, frozen=True, kw_only=True):
    """One device. None: not known, or the device has no such thing."""

    index: int
    uuid: str = ""
    bus: str = ""
    name: str = ""
    memory_total: int | None = None
    """In bytes, like `memory_used`."""
    memory_used: int | None = None
    temperature: float | None = None
    uncorrected: int | None = None
    """Memory errors that ECC could not correct, since the driver was loaded or the device reset."""
    uncorrected_ever: int | None = None
    retire_pending: bool | None = None
    remap_pending: bool | None = None
    remap_failed: bool | None = None
    throttling: int | None = None
    """NVML's bits that say why its clocks are lower than they could be."""
    problem: str = ""
    """Why nothing could be learned about it."""


class Gpus(msgspec.Struct, frozen=True, kw_only=True):
    devices: list[Gpu] = []
    source: str = ""
    """nvml, nvidia-smi or torch; empty if none of them could say."""
    problem: str = ""
    hung: bool = False


def present(dev: Path = Path("/dev")) -> bool:
    """Whether this node has NVIDIA's driver at all."""
    return (dev / "nvidiactl").exists() or shutil.which("nvidia-smi") is not None


def ask_gpus(timeout: float = FACTS_TIMEOUT) -> Gpus:
    """All devices of the node, including those that this job may not use."""
    if _installed("pynvml"):
        found = _ask_child("nvml", timeout)
        if not found.problem or found.hung:
            return found
    if shutil.which("nvidia-smi") is not None:
        return ask_nvidia_smi(timeout)
    if _installed("torch"):
        return _ask_child("torch", max(timeout, 60.0))
    return Gpus(problem="neither nvidia-ml-py nor nvidia-smi is there to ask")


def _installed(module: str) -> bool:
    import importlib.util

    try:
        return importlib.util.find_spec(module) is not None
    except (ImportError, ValueError):
        return False


def _ask_child(how: str, timeout: float) -> Gpus:
    answer = ask(own_child(CHILD, how), timeout)
    if answer.hung:
        return Gpus(source=how, problem=f"{how} did not answer within {timeout:g} s", hung=True)
    try:
        return msgspec.json.decode(answer.out, type=Gpus)
    except msgspec.DecodeError:
        said = answer.err.strip().splitlines() or [f"it ended with {answer.code}"]
        return Gpus(source=how, problem=f"{how}: {said[-1][:200]}")


# --- nvidia-smi ---------------------------------------------------------------------------------------------


def ask_nvidia_smi(timeout: float = FACTS_TIMEOUT) -> Gpus:
    """Ask `nvidia-smi`. Fields that the installed release does not know are left out, one by one."""
    wanted = list(FIELDS)
    names = dict(FIELDS)
    for _ in range(2 * len(FIELDS)):
        answer = ask(
            ["nvidia-smi", f"--query-gpu={','.join(wanted)}", "--format=csv,noheader,nounits"], timeout
        )
        unknown = _UNKNOWN_FIELD.search(answer.out + answer.err)
        if unknown is None or unknown[1] not in wanted:
            break
        place = wanted.index(unknown[1])
        former = FORMER.get(wanted[place])
        if former is not None:
            names[former] = names[wanted[place]]
            wanted[place] = former
        else:
            del wanted[place]
    if answer.hung:
        return Gpus(source="nvidia-smi", problem=answer.err, hung=True)
    devices = [
        parse_row([names[field] for field in wanted], line.split(", "))
        for line in answer.out.splitlines()
        if line.count(", ") == len(wanted) - 1
    ]
    found = [one for one in devices if one is not None]
    if answer.code != 0 and not found:
        said = (answer.err.strip() or answer.out.strip()).splitlines() or [f"it ended with {answer.code}"]
        return Gpus(source="nvidia-smi", problem=f"nvidia-smi: {said[0][:200]}")
    problem = "" if answer.code == 0 else f"nvidia-smi ended with {answer.code}: {answer.err.strip()[:200]}"
    return Gpus(devices=_with_remaps(found, timeout), source="nvidia-smi", problem=problem)


def parse_row(names: Sequence[str], cells: Sequence[str]) -> Gpu | None:
    """One line of the table; None if it is not one."""
    given: dict[str, object] = {}
    for name, raw in zip(names, (cell.strip() for cell in cells), strict=True):
        value: object = raw
        if name in ("index", "uncorrected", "uncorrected_ever"):
            value = int(raw) if raw.isdigit() else None
        elif name in ("memory_total", "memory_used"):
            value = int(raw) * 1024 * 1024 if raw.isdigit() else None
        elif name == "temperature":
            value = float(raw) if raw.replace(".", "", 1).isdigit() else None
        elif name == "throttling":
            value = int(raw, 16) if re.fullmatch(r"0x[0-9a-fA-F]+", raw) else None
        elif name == "retire_pending":
            value = {"yes": True, "no": False}.get(raw.lower())
        elif name == "bus":
            value = normal_bus(raw)
        given[name] = value
    if given.get("index") is None:
        return None
    if any("GPU is lost" in cell or "Unknown Error" in cell for cell in cells):
        given["problem"] = next(cell for cell in cells if "GPU is lost" in cell or "Unknown Error" in cell)
    return msgspec.convert(given, Gpu)


def _with_remaps(devices: list[Gpu], timeout: float) -> list[Gpu]:
    """Add what is known of row remapping. Devices before Ampere have none: they retire pages instead."""
    answer = ask(
        ["nvidia-smi", f"--query-remapped-rows={','.join(REMAPPED)}", "--format=csv,noheader"], timeout
    )
    rows = {}
    for line in answer.out.splitlines() if answer.code == 0 else ():
        cells = [cell.strip() for cell in line.split(",")]
        if len(cells) == len(REMAPPED):
            rows[cells[0]] = [_flag(cell) for cell in cells[1:]]
    return [
        msgspec.structs.replace(one, remap_pending=rows[one.uuid][0], remap_failed=rows[one.uuid][1])
        if one.uuid in rows
        else one
        for one in devices
    ]


def _flag(cell: str) -> bool | None:
    known = {"yes": True, "no": False, "1": True, "0": False}
    return known.get(cell.lower())


# --- who holds memory ---------------------------------------------------------------------------------------


class HeldMemory(msgspec.Struct, frozen=True, kw_only=True):
    """Memory of a device that a process holds, as the driver has it."""

    device: str
    """Its UUID."""
    pid: int
    nbytes: int = 0
    """0 if the driver does not say."""

    def __str__(self) -> str:
        much = size(self.nbytes) if self.nbytes else "memory"
        return f"pid {self.pid} holds {much} of {self.device}"


HOLDERS = ("gpu_uuid", "pid", "used_memory")


def ask_holders(timeout: float = FACTS_TIMEOUT) -> list[HeldMemory] | None:
    """Every process that computes on a device of this node; None if the driver cannot say. In a container
    without the host's process ids the driver shows none, or ids that mean nothing here."""
    answer = ask(
        ["nvidia-smi", f"--query-compute-apps={','.join(HOLDERS)}", "--format=csv,noheader,nounits"], timeout
    )
    if answer.missing or answer.hung or answer.code != 0:
        return None
    return [held for line in answer.out.splitlines() if (held := parse_holder(line)) is not None]


def parse_holder(line: str) -> HeldMemory | None:
    """One line of the table; None if it is not one."""
    cells = [cell.strip() for cell in line.split(",")]
    if len(cells) != len(HOLDERS) or not cells[1].isdigit():
        return None
    much = int(cells[2]) * 1024 * 1024 if cells[2].isdigit() else 0
    return HeldMemory(device=cells[0], pid=int(cells[1]), nbytes=much)


# --- names --------------------------------------------------------------------------------------------------


def names_of(devices: Sequence[Gpu], visible: Sequence[str]) -> dict[int, str]:
    """Index → the launcher's name for a device (cluster/devices.py), for the visible ones.

    Inside a container the driver numbers what it shows from 0, while names in `/dev` keep their numbers: if
    both lists are equally long, they are matched by order.
    """
    found: dict[int, str] = {}
    for gpu in devices:
        for name in visible:
            if name == str(gpu.index) or (name.startswith(("GPU-", "MIG-")) and gpu.uuid.startswith(name)):
                found[gpu.index] = name
    if len(found) < len(visible) and len(devices) == len(visible):
        return {gpu.index: name for gpu, name in zip(devices, visible, strict=True)}
    return found


SECONDS = 1.0
"""Seconds for which each device computes: a fault of heat or power does not show in the first millisecond."""
ALLOCATE = 256 * 1024 * 1024
"""Bytes that are allocated, written and read on each device."""


class Computed(msgspec.Struct, frozen=True, kw_only=True):
    """What came of computing on one device."""

    index: int
    """The device's number among those visible to torch."""
    right: bool = False
    """Whether the product, and what was read back from memory, were right."""
    gflops: float = 0.0
    free: int | None = None
    """Bytes of free memory, if those were too few to compute with."""
    problem: str = ""
    """The error that came before there was an answer."""


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
        """None if this device or release has no such thing; a lost device is an error."""
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
    """What torch alone can tell: which devices exist, and their memory."""
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
    """Compute a known answer, and try some memory, on each visible device."""
    import torch

    if not torch.cuda.is_available():
        return AllComputed(problem="torch sees no usable CUDA device", cuda=torch.version.cuda is not None)
    indices = range(torch.cuda.device_count())
    with ThreadPoolExecutor(max(1, len(indices))) as pool:  # a second for each, and for all together
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


# The health of a node's GPUs: reachable, with sound memory, not slowed down, and right about a known answer.
#
# Usable alone: `holdfast.check_gpus()`. Whatever a sick driver does happens in child processes.


COMPUTE_TIMEOUT = 120.0
"""Importing torch and waking eight devices takes a while."""


def check_gpus(
    *, compute: bool = True, timeout: float = FACTS_TIMEOUT, limit: int = UNCORRECTED_LIMIT
) -> list[CheckResult]:
    """Check everything about the GPUs that this process may use; one result if there are none.

    `limit`: memory errors beyond correction that a device may have counted since its last reset.
    """
    if not present():
        return [CheckResult(name="gpu", status=HealthStatus.OK, found="this node has no NVIDIA driver")]
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
    return results or [
        CheckResult(name="gpu", status=HealthStatus.OK, found="none is visible to this process")
    ]


def _judge(gpu: Gpu, limit: int) -> list[CheckResult]:
    name = f"gpu {gpu.index}"
    reachable = judge_reachable(name, gpu.problem)
    if reachable.status is not HealthStatus.OK:
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
    """Compute a known answer for a second, and try some memory, on every device, in a child process.

    `devices`: only these of the visible ones. If it is given, a torch built without CUDA is no fault: what
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
