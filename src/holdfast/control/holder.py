"""Who a process is, precisely enough to tell later whether it still lives.

A pid alone proves nothing: pids are reused, and two containers on one host have different ones. So a
holder is (boot id, pid namespace, pid, start time); only within the same boot and namespace can another
process say "dead", and everybody else must wait for the lease to lapse.
"""

from __future__ import annotations

import os
import platform
from pathlib import Path

import msgspec


class Holder(msgspec.Struct, frozen=True, kw_only=True):
    host: str
    boot: str
    pid_namespace: int
    pid: int
    started: int
    """Start time in clock ticks since boot."""

    def describe(self) -> str:
        return f"pid {self.pid} on {self.host}"


def _start_ticks(pid: int) -> int | None:
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return None
    fields = text.rpartition(")")[2].split()
    if fields[0] in ("Z", "X"):
        return None  # a zombie holds nothing
    return int(fields[19])


def this_process() -> Holder:
    return Holder(
        host=platform.node(),
        boot=_boot_id(),
        pid_namespace=_pid_namespace(),
        pid=os.getpid(),
        started=_start_ticks(os.getpid()) or 0,
    )


def is_gone(holder: Holder) -> bool:
    """True only if the holder is known to be dead; False means alive or not knowable from here."""
    if holder.boot != _boot_id() or holder.pid_namespace != _pid_namespace():
        return False
    return _start_ticks(holder.pid) != holder.started


def is_here(holder: Holder) -> bool:
    """Whether the holder's process can be looked at from here."""
    return holder.boot == _boot_id() and holder.pid_namespace == _pid_namespace()


def _boot_id() -> str:
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""


def _pid_namespace() -> int:
    try:
        return Path("/proc/self/ns/pid").stat().st_ino
    except OSError:
        return 0
