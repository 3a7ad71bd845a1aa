"""Who a process is, precisely enough to tell later whether it still lives.

A pid alone proves nothing: pids are reused, and two containers on one host have different ones. So a
holder is (host, boot id, pid namespace, pid, start time); only within the same host, boot and namespace can
another process say "dead", and everybody else must wait for the lease to lapse. In doubt the answer is "not
known to be dead".
"""

from __future__ import annotations

import os
import platform
import re
from collections.abc import Mapping
from pathlib import Path

import msgspec


class Holder(msgspec.Struct, frozen=True, kw_only=True):
    host: str
    boot: str
    pid_namespace: int
    pid: int
    started: int
    """Start time in clock ticks since boot; 0 if unknown."""
    job: str = ""
    """The scheduler's name of the job it is part of, as `Slurm job 1234`; empty if none is known."""

    def describe(self) -> str:
        job = f", {self.job}" if self.job else ""
        return f"pid {self.pid} on {self.host}{job}"


def _state_and_start(pid: int) -> tuple[str, int] | None:
    """State letter and start ticks; None if /proc does not tell (gone, or hidden from this user)."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return None
    fields = text.rpartition(")")[2].split()
    return fields[0], int(fields[19])


def started_at(pid: int) -> int:
    """When a process was started, in clock ticks since boot; 0 if that cannot be told."""
    seen = _state_and_start(pid)
    return seen[1] if seen else 0


def this_process() -> Holder:
    return Holder(
        host=platform.node(),
        boot=_boot_id(),
        pid_namespace=_pid_namespace(),
        pid=os.getpid(),
        started=started_at(os.getpid()),
        job=_job(os.environ),
    )


def job_of(environ: Mapping[str, str]) -> str:
    """The Slurm job that an environment is of, by its own number; `1234_4` for the task of an array that has
    the array's; else empty. What a job has inherited from the task that submitted it names another job."""
    job, task = environ.get("SLURM_JOB_ID", ""), environ.get("SLURM_ARRAY_TASK_ID", "")
    return f"{job}_{task}" if job and task and environ.get("SLURM_ARRAY_JOB_ID") == job else job


def _job(environ: Mapping[str, str]) -> str:
    """For a message to people only: nothing is decided by it."""
    job = job_of(environ)
    return f"Slurm job {job[:40]}" if re.fullmatch(r"[0-9]+(_[0-9]+)?", job) else ""


def is_here(holder: Holder) -> bool:
    """Whether the holder's process can be looked at from here."""
    # Cloned machines share a boot id, so the host's name counts too. Unknown never equals unknown.
    return (
        holder.host == platform.node()
        and holder.boot == _boot_id() != ""
        and holder.pid_namespace == _pid_namespace() != 0
    )


def is_gone(holder: Holder) -> bool:
    """True only if the holder is known to be dead; False means alive or not knowable from here."""
    if not is_here(holder) or holder.pid <= 0:
        return False
    try:
        os.kill(holder.pid, 0)  # unlike /proc, this also sees processes that are hidden from this user
    except ProcessLookupError:
        return True
    except (OSError, OverflowError):
        pass  # it exists and belongs to somebody else, or is no pid at all: /proc has the last word
    seen = _state_and_start(holder.pid)
    if seen is None:
        return False
    state, started = seen
    if state in ("Z", "X"):
        return True  # a zombie holds nothing
    return holder.started != 0 and started != holder.started


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
