"""Processes as the kernel shows them: who they are, what they descend from, what they wait for.

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
import signal
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import NamedTuple, TypeVar

from holdfast.bounded import Bounded

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
