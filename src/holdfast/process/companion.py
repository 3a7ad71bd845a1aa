"""A child of ours that works beside this process: started, known, spoken to, kept out of its way, and ended.

Guarantee: nothing here waits for the child for longer than it is told to, whatever the child does.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Collection, Iterator, Sequence
from pathlib import Path
from typing import Any, Generic, NamedTuple, TypeVar

from holdfast.base import make_dirs
from holdfast.process.local_wire import Packets, Stream

Line = TypeVar("Line", bound=Packets[Any] | Stream[Any])

# Marks in the environment by which processes are recognised, whatever their parent is by now.
#
# A process's parent, group and session say where it belongs only until it leaves them. The environment that
# it was started with stays, and the kernel shows it (`proc.environment`).


AGENT = "HOLDFAST_AGENT"
"""Which agent a process descends from: `<pid>.<start time>`, unique until the next boot."""
OUTLIVES = "HOLDFAST_OUTLIVES"
"""Set for a process that may outlive the trainer that started it: `<module> <trainer's pid>`."""

STOPPING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
"""Signals by which schedulers and people ask a whole job to end."""


def outliving(module: str) -> dict[str, str]:
    """The environment for a process of ours, run as `-m module`, that may outlive this one."""
    return {**os.environ, OUTLIVES: f"{module} {os.getpid()}"}


@contextlib.contextmanager
def stopping_blocked() -> Iterator[None]:
    """Block stopping signals around the start of such a process, which inherits the mask: it cannot ignore
    them yet while it starts."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, STOPPING)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def leave_stopping_to_the_trainer() -> None:
    """For such a process: schedulers signal every process of a job, but the trainer decides what it means."""
    for number in STOPPING:
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, STOPPING)


# How a process of our own is started: without importing anything from the directory it happens to be in.
#
# Guarantee: what lies in the current directory (an `xxhash.py` in somebody's project, or one that was planted
# there) is never imported by a child of ours. `python -m` alone puts that directory first on the path; `-P`
# keeps it off. PYTHONPATH is kept: an installation may depend on it, and its owner chose it. A training
# script keeps the path that `python SCRIPT` gives it.


def own_child(module: str, *arguments: str) -> list[str]:
    """The command line that runs one of our modules."""
    return [sys.executable, "-P", "-m", module, *arguments]


def start_child(
    module: str,
    *arguments: str,
    passed: Sequence[int] = (),
    log: Path | None = None,
    outlives: bool = False,
) -> subprocess.Popen[bytes]:
    """Start one of our modules. Raises OSError.

    `passed`: descriptors that it gets; `log`: where its output goes, if not where this process's does;
    `outlives`: it may outlive this process, and what ends this one's session or group must not end it.
    """
    with contextlib.ExitStack() as around:
        output = None
        if log is not None:  # whoever reads this process's output to its end must not wait for the child
            make_dirs(log.parent)
            output = around.enter_context(log.open("ab"))
        if outlives:
            around.enter_context(stopping_blocked())
        return subprocess.Popen(
            own_child(module, *arguments),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            pass_fds=passed,
            env=outliving(module) if outlives else None,
            start_new_session=outlives,
        )


# How a companion keeps out of the trainer's way: its priority for processors and storage, and its cores.
#
# Guarantee: a companion is never slower for it where nobody else wants the processor, and what training waits
# for is not slowed down either: a trainer that waits for its writer does not compute, so nobody competes. A
# priority only decides between two that both want to run; and a companion is moved to spare cores only where
# those are enough for it, else they are added to the trainer's. None of this can fail: what the kernel
# refuses stays as it was. Processes that guard liveness (keepers) never step aside.


class Level(NamedTuple):
    """How far a companion steps aside."""

    nice: int
    """Added to the trainer's own."""
    storage: int
    """Level of best effort in `ionice`'s terms, from 0 to 7; 4 is everybody's. Not the idle class: a busy
    disk would then never let it work."""


BESIDE = Level(5, 5)
"""Work that a resume or a stop may soon want: committing a save, serving copies to peers."""
BEHIND = Level(10, 6)
"""Copies to a remote."""
LAST = Level(19, 7)
"""What nobody waits for."""


def step_aside(level: Level, *, threads: int = 1) -> None:
    """For a companion, at its start, before it has threads. `threads`: how many of them work at once."""
    import psutil

    with contextlib.suppress(OSError):
        os.nice(level.nice)
    with contextlib.suppress(OSError, ValueError, AttributeError, psutil.Error):
        psutil.Process().ionice(psutil.IOPRIO_CLASS_BE, level.storage)
    with contextlib.suppress(OSError, ValueError, AttributeError, psutil.Error):
        own = os.sched_getaffinity(0)
        os.sched_setaffinity(0, range(max(os.cpu_count() or 1, max(own) + 1)))  # less what a cpuset forbids
        allowed = os.sched_getaffinity(0)
        trainers = _trainers_here(allowed) if allowed != own else []
        os.sched_setaffinity(0, cores_beside(own, allowed, trainers, threads=threads, ranks=_ranks_here()))


def cores_beside(
    own: Collection[int],
    allowed: Collection[int],
    trainers: Sequence[Collection[int]],
    *,
    threads: int,
    ranks: int,
) -> set[int]:
    """Pure: the cores for a companion with so many threads, one for each of the node's ranks.

    `own`: its trainer's; `trainers`: those of all trainers that are bound to less than what is `allowed`.
    Unless they are all known, so are no spare cores, and the companion stays where its trainer is.
    """
    spare = set(allowed).difference(own, *trainers)
    if not spare or ranks < 1 or len(trainers) < ranks:
        return set(own)
    return spare if len(spare) >= threads * ranks else spare | set(own)


def _ranks_here() -> int:
    told = os.environ.get("LOCAL_WORLD_SIZE", "")
    return int(told) if told.isascii() and told.isdigit() else 0


def _trainers_here(allowed: Collection[int]) -> list[set[int]]:
    """The cores of this node's trainers, ours and those that its parent started too, as far as they are
    bound to some."""
    import psutil

    ours = psutil.Process(os.getppid())
    launcher = ours.parent()
    found = []
    for process in [ours] if launcher is None else launcher.children():
        with contextlib.suppress(OSError, psutil.Error):
            cores = os.sched_getaffinity(process.pid)
            if len(cores) < len(allowed):
                found.append(cores)
    return found


class Companion(Generic[Line]):
    """A child of ours, and the line to it."""

    def __init__(
        self, start: Callable[[int], subprocess.Popen[bytes]], pair: tuple[Line, socket.socket]
    ) -> None:
        """`start` gets the descriptor of the child's end. `pair`: from `Packets.pair` or `Stream.pair`.

        Raises OSError if the child cannot be started.
        """
        self.line, theirs = pair
        try:
            self.process = start(theirs.fileno())
        except BaseException:
            self.line.close()
            raise
        finally:
            theirs.close()

    @property
    def pid(self) -> int:
        return self.process.pid

    @property
    def connected(self) -> bool:
        """Whether the line is open at this end. The child may live on without it."""
        return self.line.open

    @property
    def code(self) -> int | None:
        """How it ended, as from waitpid; None while it runs. What it said may still be in the line."""
        return self.process.poll()

    def hang_up(self) -> None:
        """Close the line, which tells the child to end."""
        self.line.close()

    def wait(self, seconds: float) -> int | None:
        """How it ended; None if it still runs after that many seconds."""
        try:
            return self.process.wait(seconds)
        except subprocess.TimeoutExpired:
            return None

    def kill(self, seconds: float) -> int | None:
        """End it and hang up; None if it is still there after that many seconds: it hangs in the kernel."""
        with contextlib.suppress(OSError):
            self.process.kill()
        self.hang_up()
        return self.wait(seconds)
