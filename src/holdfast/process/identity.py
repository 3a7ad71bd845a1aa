"""Processes as the kernel shows them: who they are, whether they live, what they descend from.

Guarantee: a process is identified by its id and the time it started, and a signal goes to that process or to
none, also when the id has been given to another one meanwhile. Nothing here waits for a process, but the
files that show a process's memory (arguments, environment) may make the reader wait as long as that process
holds its memory's lock, which in the kernel can be for ever: read them through `within`.

Needs the standard library only.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import platform
import re
import signal
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import NamedTuple, TypeVar

import msgspec

from holdfast.base import Bounded

# Marks in the environment by which processes are recognised, whoever their parent is by now.
#
# A process's parent, group and session say where it belongs only until it leaves them. What it was started
# with stays: `/proc/<pid>/environ`. Standard library only, so that any process may read it at no cost.


AGENT = "HOLDFAST_AGENT"
"""Which agent a process descends from: `<pid>.<start time>`, unique until the next boot."""
OUTLIVES = "HOLDFAST_OUTLIVES"
"""Set for a process that may outlive the trainer which started it: `<module> <trainer's pid>`."""

STOPPING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
"""Signals by which schedulers and people ask a whole job to end."""


def outliving(module: str) -> dict[str, str]:
    """The environment for a process of ours, run as `-m module`, that may outlive this one."""
    return {**os.environ, OUTLIVES: f"{module} {os.getpid()}"}


@contextlib.contextmanager
def stopping_blocked() -> Iterator[None]:
    """Around the start of such a process, which inherits it: while it starts, nothing can be ignored yet."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, STOPPING)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def leave_stopping_to_the_trainer() -> None:
    """For such a process: schedulers signal every process of a job; what that means, the trainer decides."""
    for number in STOPPING:
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, STOPPING)


# How a process of our own is started: without importing anything from the directory it happens to be in.
#
# Guarantee: what lies in the current directory (an `xxhash.py` in somebody's project, or one that was planted
# there) is never imported by a child of ours. `python -m` alone puts that directory first on the path, and
# `-P` keeps it away. PYTHONPATH is kept: it is how an installation may be found, and its owner chose it. A
# training script keeps the path that `python SCRIPT` gives it.


def own_child(module: str, *arguments: str) -> list[str]:
    """The command line that runs one of our modules."""
    return [sys.executable, "-P", "-m", module, *arguments]


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


PROC = Path("/proc")
PR_SET_CHILD_SUBREAPER = 36
READ_LIMIT = 256 * 1024
"""Of a file in /proc; arguments and environment may have megabytes."""

STATES = {
    "R": "running",
    "S": "sleeping",
    "D": "in uninterruptible sleep",
    "T": "stopped by a signal",
    "t": "stopped by a debugger",
    "Z": "ended",
    "X": "ended",
    "I": "idle",
}

_TGKILL = {"x86_64": 234, "aarch64": 131}.get(os.uname().machine, 0)

T = TypeVar("T")


class Process(NamedTuple):
    pid: int
    started: int
    """In clock ticks since the boot. With the id it names one process for good."""
    parent: int
    group: int
    session: int
    state: str
    name: str

    @property
    def identity(self) -> tuple[int, int]:
        return self.pid, self.started

    @property
    def ended(self) -> bool:
        return self.state in ("Z", "X")


class Thread(NamedTuple):
    tid: int
    name: str
    state: str
    wchan: str
    """The kernel function it waits in; empty if it does not wait, or may not be known."""
    syscall: str
    stack: tuple[str, ...]
    """Of the kernel, innermost first; only root may read it."""


def read(pid: int, *, proc: Path = PROC) -> Process | None:
    """A process, or None if there is none with this id."""
    try:
        fd = os.open(f"{proc}/{pid}/stat", os.O_RDONLY | os.O_CLOEXEC)  # a node may have thousands of them
    except OSError:
        return None
    try:
        raw = os.read(fd, 4096)
    except OSError:
        return None
    finally:
        os.close(fd)
    # The name is in brackets and may hold anything, brackets too.
    before, _, after = raw.decode(errors="replace").rpartition(")")
    fields = after.split()
    try:
        return Process(
            pid=pid,
            started=int(fields[19]),
            parent=int(fields[1]),
            group=int(fields[2]),
            session=int(fields[3]),
            state=fields[0],
            name=before.partition("(")[2],
        )
    except (IndexError, ValueError):
        return None


def everyone(*, proc: Path = PROC) -> dict[int, Process]:
    """Every process that can be seen, zombies too."""
    try:
        names = os.listdir(proc)
    except OSError:
        return {}
    found = (read(int(name), proc=proc) for name in names if name.isdigit())
    return {process.pid: process for process in found if process is not None}


def descendants(of: Iterable[int], among: Mapping[int, Process]) -> list[Process]:
    """What descends from these processes, them left out, parents before their children."""
    children: dict[int, list[Process]] = {}
    for process in among.values():
        children.setdefault(process.parent, []).append(process)
    found: list[Process] = []
    seen = set(of)
    ahead = sorted(seen)
    while ahead:
        for child in children.get(ahead.pop(), ()):
            if child.pid not in seen:
                seen.add(child.pid)
                found.append(child)
                ahead.append(child.pid)
    return found


def send(process: Process, number: int) -> bool:
    """Send a signal to this process and no other; False if it is gone or not ours."""
    try:
        fd = os.pidfd_open(process.pid)
    except OSError as error:
        if error.errno != errno.ENOSYS:
            return False
        fd = -1  # a kernel before 5.3: there is a moment in which the id could change hands
    try:
        now = read(process.pid)  # the descriptor was opened first, so this is whom it stands for
        if now is None or now.started != process.started:
            return False
        if fd >= 0:
            signal.pidfd_send_signal(fd, number)
        else:
            os.kill(process.pid, number)
    except OSError:
        return False
    finally:
        if fd >= 0:
            os.close(fd)
    return True


def send_thread(pid: int, tid: int, number: int) -> bool:
    """Send a signal to one thread of a child that is not reaped yet, whose id is therefore still its own."""
    libc = ctypes.CDLL(None, use_errno=True)
    return int(libc.syscall(_TGKILL, pid, tid, number)) == 0 if _TGKILL else False


def threads(pid: int, *, proc: Path = PROC) -> list[Thread]:
    """What each thread of a process waits for, the main thread first."""
    task = proc / str(pid) / "task"
    try:
        numbers = sorted(int(name) for name in os.listdir(task) if name.isdigit())
    except OSError:
        return []
    found = []
    for number in sorted(numbers, key=lambda tid: tid != pid):
        seen = read(number, proc=task)
        if seen is not None:
            one = task / str(number)
            found.append(
                Thread(
                    tid=number,
                    name=seen.name,
                    state=seen.state,
                    wchan=wchan if (wchan := _text(one / "wchan")) != "0" else "",
                    syscall=_text(one / "syscall"),
                    stack=tuple(line.removeprefix("[<0>] ") for line in _text(one / "stack").splitlines()),
                )
            )
    return found


def catches(pid: int, number: int, *, proc: Path = PROC) -> bool:
    """Whether a process handles this signal: if not, the signal's default action would end it."""
    for line in _text(proc / str(pid) / "status").splitlines():
        if line.startswith("SigCgt:"):
            return bool(int(line.split()[1], 16) >> (number - 1) & 1)
    return False


def environment(pid: int) -> dict[str, str]:
    """What a process was started with; empty if that cannot be read. May wait: see above."""
    pairs = (item.partition("=") for item in _items(PROC / str(pid) / "environ"))
    return {name: value for name, equals, value in pairs if equals}


def arguments(pid: int) -> list[str]:
    return _items(PROC / str(pid) / "cmdline")


def within(seconds: float, call: Callable[[], T]) -> T | None:
    """What `call` returns, or None if it takes longer (it then goes on in a thread of its own) or raises."""
    called = Bounded(call, "within")
    with contextlib.suppress(Exception):  # None says that there is no answer
        return called.result() if called.ended(seconds) else None
    return None


def become_reaper() -> bool:
    """Make this process the parent of what its descendants leave behind, in place of init."""
    libc = ctypes.CDLL(None, use_errno=True)
    return int(libc.prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)) == 0


def _text(path: Path) -> str:
    try:
        with path.open("rb") as file:
            return file.read(READ_LIMIT).decode(errors="replace").strip()
    except OSError:
        return ""


def _items(path: Path) -> list[str]:
    try:
        with path.open("rb") as file:
            raw = file.read(READ_LIMIT)
    except OSError:
        return []
    return [item.decode(errors="replace") for item in raw.split(b"\0") if item]
