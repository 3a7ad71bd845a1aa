"""The worker processes of one node: seen without being disturbed, and ended for certain.

Guarantee: a worker's end is observed without reaping it, so its process id stays reserved and signals to its
process group can only reach what the worker started. `stop` ends also what workers started in sessions of its
own (see orphans.py), and returns within the grace plus `KILL_TIMEOUT` whatever they do, give or take a second
for each process that hangs in the kernel: torch's own waits ignore the configured grace (a literal 30
seconds). What SIGKILL does not end is in `left`.
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from collections.abc import Collection, Mapping
from typing import NamedTuple

from holdfast.launch import processes
from holdfast.launch.orphans import Orphans

KILL_TIMEOUT = 10.0
"""Seconds for SIGKILL to take effect; a process in uninterruptible sleep may not die at all."""
POLL = 0.02
LOOK = 0.2
"""Longest pause between two looks at all processes, which take a tenth of a second on a busy node."""


class Left(NamedTuple):
    """A process that SIGKILL did not end: what it holds (devices, files) cannot be used by another."""

    pid: int
    rank: int | None
    """None for something that a worker started."""
    name: str
    state: str
    """As the kernel's letter: mostly D, uninterruptible sleep."""
    wchan: str
    """The kernel function that it waits in, if that can be known."""

    def __str__(self) -> str:
        who = f"rank {self.rank}, " if self.rank is not None else ""
        waits = f" in {self.wchan}" if self.wchan else ""
        return f"{who}pid {self.pid} ({self.name}), {processes.STATES.get(self.state, self.state)}{waits}"


class Workers:
    """Children of this process, each the leader of a process group, by global rank."""

    def __init__(self, pids: Mapping[int, int], orphans: Orphans | None = None) -> None:
        """`orphans`: what finds and ends what workers leave behind; one for all attempts of an agent."""
        self.pids = dict(pids)
        self.seen: dict[int, float] = {}
        """When each was first seen to have ended, in seconds since 1970."""
        self.left: list[Left] = []
        """What the last `stop` could not end."""
        self._orphans = orphans or Orphans(outlive=0.0)
        for pid in self.pids.values():
            self._orphans.own(pid)
        # A signal's handler may call `kill` while this thread is in there already.
        self._lock = threading.RLock()
        self._ours = True

    def ended(self) -> dict[int, int]:
        """Global rank → exit code as from waitpid, of those that have ended."""
        found: dict[int, int] = {}
        for rank, pid in self.pids.items():
            with contextlib.suppress(ChildProcessError):
                status = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
                if status is not None:
                    exited = status.si_code == os.CLD_EXITED
                    found[rank] = status.si_status if exited else -status.si_status
                    self.seen.setdefault(rank, time.time())
        return found

    def signal(self, number: int, kill: Collection[int] = ()) -> None:
        """Send a signal to every worker's process group, SIGKILL to those of the ranks in `kill`.

        Safe from any thread, also after `forget`.
        """
        with self._lock:
            if not self._ours:
                return
            for rank, pid in self.pids.items():
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.killpg(pid, signal.SIGKILL if rank in kill else number)

    def kill(self) -> None:
        self.signal(signal.SIGKILL)

    def stop(self, grace: float, at_once: Collection[int] = ()) -> bool:
        """SIGTERM, then SIGKILL after `grace` seconds, to the whole groups. True if all workers are dead.

        Ranks in `at_once` are not asked first: they would take SIGTERM as a request to save, with others that
        are gone.
        """
        # Where orphans cannot be adopted, this is when it is last known whose they are.
        seen = self._below()
        if len(self.ended()) < len(self.pids):
            self.signal(signal.SIGTERM, at_once)
            self._await_end(grace)
            seen += self._below()
        # Also when all have ended: what a worker started (loader processes) must not outlive it.
        deadline = time.monotonic() + KILL_TIMEOUT
        self.kill()
        pause = POLL
        while True:
            dead = self._await_end(min(pause, max(0.0, deadline - time.monotonic())))
            strays = self._clear(seen)
            if (dead and not strays) or time.monotonic() >= deadline:
                break
            if dead:
                time.sleep(pause)
            pause = min(LOOK, 2 * pause)
        ended = self.ended()
        alive = {pid: rank for rank, pid in self.pids.items() if rank not in ended}
        self.left = [_left(pid, rank) for pid, rank in sorted(alive.items())]
        self.left += [_left(stray.pid, None) for stray in strays if stray.pid not in alive]
        return not alive

    def _below(self) -> list[processes.Process]:
        return self._orphans.below(set(self.pids.values())) if self._ours else []

    def _clear(self, seen: list[processes.Process]) -> list[processes.Process]:
        """Kill what workers started outside their groups; what of it was found alive."""
        return self._orphans.clear(set(self.pids.values()), seen) if self._ours else []

    def _await_end(self, timeout: float) -> bool:
        deadline = time.monotonic() + timeout
        while len(self.ended()) < len(self.pids):
            if time.monotonic() >= deadline:
                return False
            time.sleep(POLL)
        return True

    def forget(self) -> None:
        """Send no more signals: the workers are about to be reaped and their ids to be free again."""
        with self._lock:
            self._ours = False


def _left(pid: int, rank: int | None) -> Left:
    found = processes.read(pid)
    # In a thread: the files of one that hangs in the kernel may make their reader hang as well.
    threads = processes.within(1.0, lambda: processes.threads(pid)) or []
    # The one that cannot be ended is seldom the main thread, which may have ended.
    stuck = next((thread for thread in threads if thread.state == "D"), threads[0] if threads else None)
    return Left(
        pid=pid,
        rank=rank,
        name=found.name if found is not None else "",
        state=stuck.state if stuck is not None else (found.state if found is not None else ""),
        wchan=stuck.wchan if stuck is not None else "",
    )
