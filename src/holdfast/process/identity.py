"""Who a process is, told from all others also later, and whether this one ran all the time.

Guarantee: what is recorded of a process is enough to say afterwards whether it still lives. In doubt the
answer is "not known to be dead".
"""

from __future__ import annotations

import os
import platform
import re
import time
from collections.abc import Mapping

import msgspec

from holdfast.process import proc

# Whether this process ran all the time, or was stopped itself (SIGSTOP, a suspended machine, starvation).
#
# Who measures others by the clock has to know: what they did meanwhile it could not see.


class Waking:
    """One look after the other."""

    def __init__(self) -> None:
        self._looked = _awake()

    def missed(self) -> float:
        """Seconds since the look before this one."""
        now = _awake()
        passed, self._looked = now - self._looked, now
        return passed


def _awake() -> float:
    """Seconds on a clock that goes on while the machine sleeps."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


# Who a process is, precisely enough to tell later whether it still lives.
#
# A pid alone proves nothing: pids are reused, and two containers on one host have different ones. So a holder
# is (host, boot id, pid namespace, pid, start time); only within the same host, boot and namespace can
# another process say "dead", and everybody else must wait for the lease to lapse. In doubt the answer is "not
# known to be dead".


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


def this_process() -> Holder:
    return Holder(
        host=platform.node(),
        boot=proc.boot_id(),
        pid_namespace=proc.pid_namespace(),
        pid=os.getpid(),
        started=proc.started_at(os.getpid()),
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
        and holder.boot == proc.boot_id() != ""
        and holder.pid_namespace == proc.pid_namespace() != 0
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
    found = proc.read(holder.pid)
    if found is None:
        return False
    if found.ended:
        return True  # a zombie holds nothing
    return holder.started != 0 and found.started != holder.started
