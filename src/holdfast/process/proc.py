"""Processes as the kernel shows them: who they are, what they descend from, and whether one still lives.

This is the only place that reads what /proc says about processes. psutil is used where it says the same. It
does not know a session, a start in clock ticks, what a thread waits for, or which signals are caught. And it
is not imported for what is read in a signal handler, in a process that workers are forked from, or over and
over for every process on a node.

Guarantee: a process is identified by its id and the time it started, and a signal goes to that process or to
none, even if the id has been given to another process meanwhile. Nothing here waits for a process, but the
files that show a process's memory (arguments, environment) may make the reader wait as long as that process
holds its memory's lock, which in the kernel can be for ever: read them through `within`.

Guarantee: what is recorded about a process is enough to say afterwards whether it still lives. In doubt the
answer is "not known to be dead".
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import platform
import re
import signal
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import NamedTuple, TypeVar

import msgspec

from holdfast.base import Bounded
from holdfast.process import proc

PROC = Path("/proc")
PR_SET_CHILD_SUBREAPER = 36
ANCESTORS = 64
"""How far up a process's parents are followed."""
READ_LIMIT = 256 * 1024
"""Bytes read from a file in /proc; arguments and environment may have megabytes."""

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
    """In clock ticks since boot. Together with the id it names one process for good."""
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
    """The kernel function it waits in; empty if it does not wait, or this user may not know."""
    syscall: str
    stack: tuple[str, ...]
    """Its stack in the kernel, innermost first; only root may read it."""


def read(pid: int, *, proc: Path = PROC) -> Process | None:
    """A process, or None if there is none with this id, or it is hidden from this user."""
    # The name is in brackets and may contain anything, even brackets.
    before, _, after = _stat(pid, proc).rpartition(")")
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


def started_at(pid: int) -> int:
    """When a process was started, in clock ticks since boot; 0 if that cannot be determined."""
    found = read(pid)
    return found.started if found is not None else 0


def began_at(pid: int) -> float:
    """When a process was started, in seconds since 1970, to a hundredth; 0 if that cannot be determined."""
    ticks = started_at(pid)
    if not ticks:
        return 0.0
    return time.time() - (time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK"))


def exit_code_of(pid: int) -> int:
    """How a process ended that its parent has not reaped yet, as from waitpid; otherwise 0."""
    fields = _stat(pid).rpartition(")")[2].split()
    try:
        return os.waitstatus_to_exitcode(int(fields[49])) if fields[0] == "Z" else 0
    except (ValueError, IndexError):
        return 0


def _stat(pid: int, proc: Path = PROC) -> str:
    """The process's `stat` file; empty if there is none."""
    try:
        fd = os.open(f"{proc}/{pid}/stat", os.O_RDONLY | os.O_CLOEXEC)  # a node may have thousands of them
    except OSError:
        return ""
    try:
        return os.read(fd, 4096).decode(errors="replace")
    except OSError:
        return ""
    finally:
        os.close(fd)


def everyone(*, proc: Path = PROC) -> dict[int, Process]:
    """Every process that can be seen, including zombies."""
    try:
        names = os.listdir(proc)
    except OSError:
        return {}
    found = (read(int(name), proc=proc) for name in names if name.isdigit())
    return {process.pid: process for process in found if process is not None}


def descendants(of: Iterable[int], among: Mapping[int, Process]) -> list[Process]:
    """What descends from these processes, without the processes themselves; parents before their children."""
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


def lineage(pid: int) -> Iterator[int]:
    """A process, its parent, its parent's parent, …"""
    for _ in range(ANCESTORS):
        if pid <= 1:
            return
        yield pid
        found = read(pid)
        pid = found.parent if found is not None else 0


def descends(pid: int, ancestor: int) -> bool:
    return ancestor in lineage(pid)


def send(process: Process, number: int) -> bool:
    """Send a signal to this process and no other; False if it is gone or not ours."""
    try:
        fd = os.pidfd_open(process.pid)
    except OSError as error:
        if error.errno != errno.ENOSYS:
            return False
        fd = -1  # a kernel before 5.3: for a moment the id could change hands
    try:
        now = read(process.pid)  # the descriptor was opened first, so this is the process it stands for
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
    """Send a signal to one thread of a child that is not reaped yet, so that its id is still its own."""
    libc = ctypes.CDLL(None, use_errno=True)
    return int(libc.syscall(_TGKILL, pid, tid, number)) == 0 if _TGKILL else False


def thread_ids(pid: int, *, proc: Path = PROC) -> list[int]:
    """The threads of a process. Raises OSError if there is no such process."""
    return sorted(int(name) for name in os.listdir(proc / str(pid) / "task") if name.isdigit())


def threads(pid: int, *, proc: Path = PROC) -> list[Thread]:
    """What each thread of a process waits for, the main thread first."""
    task = proc / str(pid) / "task"
    try:
        numbers = thread_ids(pid, proc=proc)
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


def status(pid: int, *, proc: Path = PROC) -> dict[str, str]:
    """What the kernel says about a process in words; nothing if it is gone. Waits for nothing."""
    pairs = (line.partition(":") for line in _text(proc / str(pid) / "status").splitlines())
    return {name: value.strip() for name, _, value in pairs}


def caught(pid: int, *, proc: Path = PROC) -> int:
    """The signals that a process handles, in Python or in C, as a mask: bit n - 1 for signal n."""
    return int(status(pid, proc=proc).get("SigCgt", "0"), 16)


def catches(pid: int, number: int, *, proc: Path = PROC) -> bool:
    """Whether a process handles this signal; if not, the signal's default action would end it."""
    return bool(caught(pid, proc=proc) >> (number - 1) & 1)


def environment(pid: int) -> dict[str, str]:
    """The environment a process was started with; empty if it cannot be read. May wait: see above."""
    pairs = (item.partition("=") for item in _items(PROC / str(pid) / "environ"))
    return {name: value for name, equals, value in pairs if equals}


def arguments(pid: int) -> list[str]:
    return _items(PROC / str(pid) / "cmdline")


def within(seconds: float, call: Callable[[], T]) -> T | None:
    """What `call` returns, or None if it takes longer (it then goes on in its own thread) or raises."""
    called = Bounded(call, "within")
    with contextlib.suppress(Exception):  # None means that there is no answer
        return called.result() if called.ended(seconds) else None
    return None


def become_reaper() -> bool:
    """Make this process, in place of init, the parent of what its descendants leave behind."""
    libc = ctypes.CDLL(None, use_errno=True)
    return int(libc.prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)) == 0


# --- this process itself ------------------------------------------------------------------------------------


def boot_id() -> str:
    """An id that is different after each boot of the machine; empty if it cannot be determined."""
    try:
        return (PROC / "sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""


def pid_namespace() -> int:
    """The namespace in which this process's ids are valid; 0 if it cannot be determined."""
    try:
        return (PROC / "self/ns/pid").stat().st_ino
    except OSError:
        return 0


def children() -> list[int]:
    """What this process has started and not reaped."""
    found = []
    for thread in thread_ids(os.getpid()):
        found += [int(pid) for pid in _text(PROC / "self/task" / str(thread) / "children").split()]
    return found


def descriptors() -> list[int]:
    """This process's open files, including the one with which they are listed."""
    return [int(name) for name in os.listdir(PROC / "self/fd")]


def file_of(descriptor: int) -> str:
    """What a descriptor of this process refers to, as the kernel names it. Raises OSError if it is closed."""
    return os.readlink(PROC / "self/fd" / str(descriptor))  # noqa: PTH115 - it need not be a path


def details_of(descriptor: int) -> str:
    """What the kernel says about a descriptor of ours; for an epoll, what it waits for. Raises OSError."""
    return (PROC / "self/fdinfo" / str(descriptor)).read_text()


def place_of_arguments() -> tuple[int, int]:
    """Where this process's command line begins and ends in its memory; (0, 0) if that cannot be told."""
    fields = _stat(os.getpid()).rpartition(")")[2].split()
    return (int(fields[45]), int(fields[46])) if len(fields) > 46 else (0, 0)


def be_ended_first() -> None:
    """Let the kernel end this process before any other if the host runs out of memory."""
    with contextlib.suppress(OSError):
        fd = os.open(PROC / "self/oom_score_adj", os.O_WRONLY | os.O_CLOEXEC)
        try:
            os.write(fd, b"1000")
        finally:
            os.close(fd)


class MemoryMapping(NamedTuple):
    """A mapping of this process's memory."""

    start: int
    end: int
    path: str
    shared: bool
    """Whether a parent reads what its child writes there."""


def mapped(maps: Path = PROC / "self/maps") -> list[MemoryMapping]:
    """This process's mappings. Raises OSError where the kernel does not tell. (psutil would measure each one,
    which takes seconds.)"""
    with maps.open("rb") as lines:
        return [_mapping(line) for line in lines]


def _mapping(line: bytes) -> MemoryMapping:
    fields = line.split(None, 5)
    start, _, end = fields[0].partition(b"-")
    path = os.fsdecode(fields[5].rstrip(b"\n")) if len(fields) > 5 else ""
    return MemoryMapping(int(start, 16), int(end, 16), path, fields[1][3:4] == b"s")


# --- what psutil says ---------------------------------------------------------------------------------------


def threads_of(user: int) -> int:
    """How many threads a user's processes have here, as `ulimit -u` counts; 0 if that cannot be seen."""
    import psutil

    found = 0
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error, OSError):  # it has ended, or is hidden
            if process.uids().real == user:
                found += process.num_threads()
    return found


def private_bytes(pid: int) -> int:
    """How much of its memory a process shares with no other; 0 where the kernel does not tell."""
    import psutil

    try:
        return int(psutil.Process(pid).memory_full_info().uss)
    except (psutil.Error, OSError):
        return 0


def local_ranks() -> int:
    """How many ranks share this machine, as the launcher says; 1 if nobody does."""
    told = os.environ.get("LOCAL_WORLD_SIZE", "")
    return max(1, int(told)) if told.isdecimal() else 1


def cores_of_this_rank() -> int:
    """Its share of the cores that it may use; 1 at least."""
    return max(1, len(os.sched_getaffinity(0)) // local_ranks())


def memory_available() -> int:
    """Bytes that this machine can still give without swapping. Raises OSError."""
    import psutil

    return int(psutil.virtual_memory().available)


# --- its files ----------------------------------------------------------------------------------------------


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


# --- who a process is ---------------------------------------------------------------------------------------

# Whether this process ran all the time, or was itself stopped (SIGSTOP, a suspended machine, starvation).
#
# Whoever measures others by the clock has to know, because it could not see what they did meanwhile.


class Waking:
    """Takes one look after another, and says how long ago the last one was."""

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
# A pid alone proves nothing: pids are reused, and two containers on one host number theirs differently. So a
# holder is (host, boot id, pid namespace, pid, start time); only within the same host, boot and namespace can
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
    """The job that it is part of, as in `Slurm job 1234`; empty if none is known."""

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
    """The Slurm job that an environment belongs to, by its own number; `1234_4` for the task of an array that
    has the array's number; empty outside of Slurm. What a job inherited from the task that submitted it names
    another job."""
    job, task = environ.get("SLURM_JOB_ID", ""), environ.get("SLURM_ARRAY_TASK_ID", "")
    return f"{job}_{task}" if job and task and environ.get("SLURM_ARRAY_JOB_ID") == job else job


def _job(environ: Mapping[str, str]) -> str:
    """The job, for messages to people only: nothing is decided by it."""
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
    """True only if the holder is known to be dead; False if it is alive, or if that cannot be known here."""
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
