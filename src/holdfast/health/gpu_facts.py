"""What is known of a node's GPUs: from NVML, `nvidia-smi` or torch, and from the kernel's log.

Guarantee: asked in a child process with a deadline, because a sick driver hangs for ever and takes along who
asks it. What one of them does not know is left out, not guessed.
"""

from __future__ import annotations

import errno
import os
import re
import shutil
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec

from holdfast.health.judgements import CheckResult, judge_kernel_log
from holdfast.health.trials import ask
from holdfast.policy import XIDS
from holdfast.process import own_child

# The errors of devices that the kernel's log tells of.
#
# The log is read from `/dev/kmsg`, else as `dmesg` or `journalctl` show it: whichever this user may read.
# Where none may be read, nothing is known, and that is said; it does not mean that there was no error.


KMSG = Path("/dev/kmsg")
RECORD = 16 * 1024
"""Bytes that one record may have."""
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
    """One error of a device, as the log has it."""

    number: int
    bus: str
    """The device's address on the bus, e.g. `0000:3b:00`."""
    at: float
    """Seconds since 1970."""
    stamp: float = 0.0
    """By the kernel's own clock, which drifts from ours: tells an error from one that was there before."""
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
    """The errors since the machine was booted, as far as the log still has them, oldest first."""
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
    """Every record that the kernel still has. Each read of the device gives one; the end would block."""
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
    """One spelling of a device's address: the log leaves out the function, NVML has a longer domain."""
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
"""Names of older releases."""
REMAPPED = ("gpu_uuid", "remapped_rows.pending", "remapped_rows.failure")
_UNKNOWN_FIELD = re.compile(r'[Ff]ield "?([\w.]+)"? is not a valid field')


class Gpu(msgspec.Struct, frozen=True, kw_only=True):
    """One device. None: not known, or it has no such thing."""

    index: int
    uuid: str = ""
    bus: str = ""
    name: str = ""
    memory_total: int | None = None
    """Bytes, as `memory_used`."""
    memory_used: int | None = None
    temperature: float | None = None
    uncorrected: int | None = None
    """Memory errors that ECC could not correct, since the driver was loaded or the device reset."""
    uncorrected_ever: int | None = None
    retire_pending: bool | None = None
    remap_pending: bool | None = None
    remap_failed: bool | None = None
    throttling: int | None = None
    """NVML's bits: why its clocks are lower than they could be."""
    problem: str = ""
    """Why nothing could be learnt of it."""


class Gpus(msgspec.Struct, frozen=True, kw_only=True):
    devices: list[Gpu] = []
    source: str = ""
    """nvml, nvidia-smi or torch; empty if nobody could say."""
    problem: str = ""
    hung: bool = False


def present(dev: Path = Path("/dev")) -> bool:
    """Whether this node has NVIDIA's driver at all."""
    return (dev / "nvidiactl").exists() or shutil.which("nvidia-smi") is not None


def ask_gpus(timeout: float = FACTS_TIMEOUT) -> Gpus:
    """The node's devices, all of them, also those that this job may not use."""
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
    """Fields that this release does not know are left out, one by one."""
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
    """One line of the table; None if it is none."""
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
    """Devices before Ampere retire pages instead, and know nothing of rows."""
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


# --- names --------------------------------------------------------------------------------------------------


def names_of(devices: Sequence[Gpu], visible: Sequence[str]) -> dict[int, str]:
    """Index → the name that the launcher has for a device (`control.devices`), of the visible ones.

    Inside a container the driver numbers what it shows from 0, while names in `/dev` keep their number: where
    both lists are equally long, their order tells.
    """
    found: dict[int, str] = {}
    for gpu in devices:
        for name in visible:
            if name == str(gpu.index) or (name.startswith(("GPU-", "MIG-")) and gpu.uuid.startswith(name)):
                found[gpu.index] = name
    if len(found) < len(visible) and len(devices) == len(visible):
        return {gpu.index: name for gpu, name in zip(devices, visible, strict=True)}
    return found
