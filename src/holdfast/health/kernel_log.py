"""The errors of devices that the kernel's log tells of.

The log is read from `/dev/kmsg`, else as `dmesg` or `journalctl` show it: whichever this user may read. Where
none may be read, nothing is known, and that is said; it does not mean that there was no error.
"""

from __future__ import annotations

import errno
import os
import re
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec

from holdfast.health.result import ask
from holdfast.policy.gpu_health import judge_kernel_log
from holdfast.policy.health import CheckResult
from holdfast.policy.xids import XIDS

KMSG = Path("/dev/kmsg")
RECORD = 16 * 1024
"""Bytes that one record may have."""
MOST = 64 * 1024 * 1024
TIMEOUT = 5.0
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
        answer = ask(command, TIMEOUT)
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
