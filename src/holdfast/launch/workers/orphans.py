"""The workers of one node and whatever they start: ended for certain, even when the agent itself is killed.

A worker's end is observed without reaping it, so its process id stays reserved, and a signal to its process
group can only reach what the worker started. A process that left that group is found below the worker while
the worker lives. After that the kernel gives it to the agent, which has asked to be the reaper of its
descendants, so every child that the agent did not start comes from a worker. When the agent is gone too, the
kernel gives it to init, and only its environment shows whose it was: every agent marks its own
(`HOLDFAST_AGENT`), every descendant inherits the mark, and a keeper process that waits for the agent's end
kills whatever carries it.

Guarantee: only such processes are signalled, each by its id and start time. `Workers.stop` returns within the
grace plus `KILL_TIMEOUT` whatever they do, give or take a second for each process that hangs in the kernel;
what SIGKILL does not end is in `left`. (torch's own waits ignore the configured grace: they take a literal 30
seconds.) Within moments of the agent's end nothing that descends from it is alive. The exceptions are a
process that gave up both its session and its environment, and a checkpoint writer, drain process or peer
server of ours: it may go on for `outlive` seconds, because it may still commit a snapshot that was staged
whole, or a replica that is on its way. It is recognised by three things that come together only when its
trainer starts it: the mark in its environment, its arguments, and a session of its own. Its children in that
session are spared with it.

The keeper runs this module as a process of its own: no torch, about 15 MB, a tenth of a second per launch.
The agent replaces a keeper that is killed; if both are killed at once, only the kernel's promise about
workers (process/guard.py) is left.
"""

from __future__ import annotations

import contextlib
import os
import select
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import NamedTuple

from holdfast.launch import say
from holdfast.process import AGENT, OUTLIVES, Process, leave_stopping_to_the_trainer, own_child, proc

MODULES = (
    "holdfast.checkpoint.save.writer_process",
    "holdfast.checkpoint.remote.drain",
    "holdfast.checkpoint.copies.peer_process",
)
PATIENCE = 1.0
"""Seconds to read what a process was started with: if it hangs in the kernel, that may not be readable."""


class Outliving(NamedTuple):
    """A process that may go on for a while without its trainer."""

    process: Process
    module: str
    trainer: int
    until: float
    """When it is ended, on the monotonic clock."""

    def __str__(self) -> str:
        what = self.module.rpartition(".")[2].replace("_", " ")
        left = max(0.0, self.until - time.monotonic())
        return f"{what} {self.process.pid} of trainer {self.trainer} ({left:.0f} s left)"


def recognise(process: Process) -> tuple[str, int] | None:
    """The module and trainer's pid of a process that may outlive its trainer; ("", 0) for any other.

    None if that cannot be known now. A child of such a process, in its session, counts as its parent: it
    works for it, on a large image, and ends with it.
    """
    if process.session != process.pid:
        leader = proc.read(process.session)
        ours = leader is not None and leader.pid == leader.session == process.parent
        return recognise(leader) if leader is not None and ours else ("", 0)
    told = proc.within(PATIENCE, lambda: (proc.environment(process.pid), proc.arguments(process.pid)))
    if told is None:
        return None
    environment, arguments = told
    module, _, trainer = environment.get(OUTLIVES, "").partition(" ")
    if module not in MODULES or not trainer.isdigit():
        return "", 0
    start = arguments[:4]
    started_so = "-m" in start and arguments[start.index("-m") + 1 :][:1] == [module]
    return (module, int(trainer)) if started_so else ("", 0)


class Orphans:
    """One for all attempts of an agent."""

    def __init__(self, outlive: float) -> None:
        self._outlive = outlive
        self._reaps = False
        self._own: set[tuple[int, int]] = set()
        self._known: dict[tuple[int, int], Outliving | None] = {}
        """What each process was recognised as, so that it is examined only once; None: nothing special."""

    def become_reaper(self) -> bool:
        """From now on, what workers leave behind becomes a child of this process; False if refused."""
        self._reaps = proc.become_reaper()
        return self._reaps

    def own(self, pid: int) -> None:
        """This child was started by the agent itself: its end is awaited elsewhere, and it is not a stray."""
        process = proc.read(pid)
        if process is not None:
            self._own.add(process.identity)

    def below(self, workers: Collection[int]) -> list[Process]:
        """What these workers started, as far as it is still below them."""
        return proc.descendants(workers, proc.everyone())

    def clear(self, workers: Collection[int], seen: Iterable[Process] = ()) -> list[Process]:
        """Kill what these workers started, except the workers themselves and what may outlive them.

        `seen`: what was below them earlier, and may be nobody's by now. Returns what was found alive; to be
        called until that is nothing. The workers must not be reaped yet, since their ids would be free.
        Adopted processes that have ended are reaped.
        """
        everyone = proc.everyone()
        since = min((everyone[pid].started for pid in workers if pid in everyone), default=None)
        if since is None:
            return []
        adopted = [p for p in self._adopted(everyone.values()) if p.started >= since and p.pid not in workers]
        self._reap(adopted)
        there = {process.identity for process in everyone.values()}
        known = [*adopted, *(everyone[process.pid] for process in seen if process.identity in there)]
        below = proc.descendants([*workers, *(process.pid for process in known)], everyone)
        found = {process.pid: process for process in [*known, *below]}
        left = []
        for process in found.values():
            if process.ended or process.identity in self._own:
                continue
            if self._recognised(process):
                if self._known[process.identity] is not None:
                    continue
                proc.send(process, signal.SIGKILL)
            left.append(process)
        return left

    def tend(self) -> list[Outliving]:
        """End processes whose time is over, and reap ended ones; returns those that outlive their trainers.

        To be called every now and then, even while no workers run.
        """
        everyone = proc.everyone()
        self._reap(self._adopted(everyone.values()))
        here = {process.identity for process in everyone.values() if not process.ended}
        self._known = {identity: one for identity, one in self._known.items() if identity in here}
        self._own = {identity for identity in self._own if identity[0] in everyone}
        alive = [one for one in self._known.values() if one is not None]
        for one in alive:
            if time.monotonic() >= one.until:
                proc.send(one.process, signal.SIGKILL)
        return alive

    def _adopted(self, among: Iterable[Process]) -> list[Process]:
        """Children of this process that it did not start.

        Those that it starts without a session of their own are in its session, where no worker's descendant
        can be: a process can leave its session, but can only enter a new one.
        """
        me, session = os.getpid(), os.getsid(0)
        return [
            process
            for process in among
            if self._reaps
            and process.parent == me
            and process.session != session
            and process.identity not in self._own
        ]

    def _reap(self, adopted: Iterable[Process]) -> None:
        for process in adopted:
            if process.ended:
                with contextlib.suppress(ChildProcessError):
                    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOHANG)

    def _recognised(self, process: Process) -> bool:
        """Whether it is known what this process is. If not, it is not killed, but named as left."""
        if process.identity not in self._known:
            recognised = recognise(process)
            if recognised is None:
                return False
            module, trainer = recognised
            until = time.monotonic() + self._outlive
            self._known[process.identity] = Outliving(process, module, trainer, until) if module else None
        return True


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
    """The kernel's letter: mostly D, uninterruptible sleep."""
    wchan: str
    """The kernel function in which it waits, if that can be known."""

    def __str__(self) -> str:
        who = f"rank {self.rank}, " if self.rank is not None else ""
        waits = f" in {self.wchan}" if self.wchan else ""
        return f"{who}pid {self.pid} ({self.name}), {proc.STATES.get(self.state, self.state)}{waits}"


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
        """Global rank → exit code as from waitpid, for the workers that have ended."""
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

        Safe from any thread, even after `forget`.
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

        Ranks in `at_once` are not asked first: they would take SIGTERM as a request to save together with
        others that are gone.
        """
        # If orphans cannot be adopted, this is the last moment at which it is known whose they are.
        seen = self._below()
        if len(self.ended()) < len(self.pids):
            self.signal(signal.SIGTERM, at_once)
            self._await_end(grace)
            seen += self._below()
        # Even when all have ended: what a worker started (loader processes) must not outlive it.
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

    def _below(self) -> list[proc.Process]:
        return self._orphans.below(set(self.pids.values())) if self._ours else []

    def _clear(self, seen: list[proc.Process]) -> list[proc.Process]:
        """Kill what workers started outside their groups; returns what was found alive."""
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
    found = proc.read(pid)
    # In a thread: the files of one that hangs in the kernel may make their reader hang as well.
    threads = proc.within(1.0, lambda: proc.threads(pid)) or []
    # The thread that cannot be ended is seldom the main thread, which may have ended.
    stuck = next((thread for thread in threads if thread.state == "D"), threads[0] if threads else None)
    return Left(
        pid=pid,
        rank=rank,
        name=found.name if found is not None else "",
        state=stuck.state if stuck is not None else (found.state if found is not None else ""),
        wchan=stuck.wchan if stuck is not None else "",
    )


SWEEP_PAUSE = 0.05
SWEEP_LOOK = 1.0
"""Seconds between two looks at the parent, if the kernel cannot report its end."""
KILL_PATIENCE = 30.0
"""Seconds after which a process that SIGKILL has not ended is left: it hangs in the kernel."""
REPLACEMENTS = 3


def mark_environment() -> str:
    """Mark this process as an agent, for all that it starts hereafter. An outer agent's mark is replaced."""
    mark = _mark_of(os.getpid())
    os.environ[AGENT] = mark
    return mark


def _mark_of(pid: int) -> str:
    found = proc.read(pid)
    return f"{pid}.{found.started if found is not None else 0}"


class OrphanKeeper:
    """The agent's side of the keeper process."""

    def __init__(self, outlive: float, scratch: Sequence[str] = ()) -> None:
        """`outlive`: seconds for which a writer may go on without the agent; `scratch`: its directories."""
        self._outlive = outlive
        self._scratch = scratch
        self._process: subprocess.Popen[bytes] | None = None
        self._replaced = 0

    def start(self) -> int:
        """Mark this process's environment and start a keeper; its id. Raises OSError if that fails."""
        mark = mark_environment()
        arguments = [str(os.getpid()), mark, repr(self._outlive), *self._scratch]
        self._process = subprocess.Popen(
            own_child("holdfast.launch.workers.orphans", *arguments),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            start_new_session=True,  # what ends the agent's session or group must not end its keeper
        )
        return self._process.pid

    def check(self) -> tuple[int | None, str]:
        """Replace a keeper that died, a few times. Returns the new one's id, if any, and what to say."""
        code = self._process.poll() if self._process is not None else None
        if code is None:
            return None, ""
        self._process = None
        if self._replaced >= REPLACEMENTS:
            return None, f"the keeper process ended {self._replaced + 1} times ({code}) and is not replaced"
        self._replaced += 1
        try:
            return self.start(), f"the keeper process ended ({code}) and was replaced"
        except OSError as error:
            return None, f"the keeper process ended ({code}) and another cannot be started: {error}"


def await_end(pid: int) -> None:
    """Wait until our parent, the agent, is gone."""
    fd = -1
    with contextlib.suppress(OSError):
        fd = os.pidfd_open(pid)  # before the look at the parent, so that it is surely the agent's
    poll = select.poll()
    if fd >= 0:
        poll.register(fd, select.POLLIN)
    while os.getppid() == pid:
        poll.poll(SWEEP_LOOK * 1000)


def end_the_rest(mark: str, outlive: float) -> tuple[int, int]:
    """Kill what has the mark until nothing is left to kill; returns how many were killed, and are left."""
    began = time.monotonic()
    killed: set[tuple[int, int]] = set()
    while True:
        mortal, outliving = _sort(mark)
        late = time.monotonic() - began
        if late >= outlive:
            mortal, outliving = mortal + outliving, []
        if not mortal and not outliving:
            return len(killed), 0
        for process in mortal:
            if proc.send(process, signal.SIGKILL):
                killed.add(process.identity)
        if mortal and not outliving and late >= max(outlive, 0.0) + KILL_PATIENCE:
            return len(killed), len(mortal)
        time.sleep(SWEEP_PAUSE if mortal or late < SWEEP_LOOK else SWEEP_LOOK)


def _sort(mark: str) -> tuple[list[Process], list[Process]]:
    """Processes with the mark: those to end at once, and those that may go on for a while."""
    mortal, outliving = [], []
    for process in proc.everyone().values():
        if process.ended or process.pid == os.getpid() or not _has(process, mark):
            continue
        recognised = recognise(process)
        if recognised is None or recognised[0]:
            outliving.append(process)
        else:
            mortal.append(process)
    return mortal, outliving


def _has(process: Process, mark: str) -> bool:
    # What started before the agent cannot descend from it; most of a machine's processes did.
    if process.started < int(mark.rpartition(".")[2]):
        return False
    environment = proc.within(PATIENCE, lambda: proc.environment(process.pid))
    return environment is not None and environment.get(AGENT) == mark


def _remove(scratch: Sequence[str]) -> None:
    for path in scratch:
        shutil.rmtree(path, ignore_errors=True)


def main() -> int:
    leave_stopping_to_the_trainer()  # here: to the agent
    signal.signal(signal.SIGQUIT, signal.SIG_IGN)
    agent, mark, outlive, scratch = int(sys.argv[1]), sys.argv[2], float(sys.argv[3]), sys.argv[4:]
    if _mark_of(agent) == mark:
        await_end(agent)
    _remove(scratch)  # a writer that goes on needs none of it, and may take long
    killed, left = end_the_rest(mark, outlive)
    _remove(scratch)  # what a worker wrote while it was being ended
    if killed:
        say(f"the launcher is gone; ended {killed} processes that it left")
    if left:
        say(f"{left} of them hang in the kernel and do not end")
    return 0


if __name__ == "__main__":
    sys.exit(main())
