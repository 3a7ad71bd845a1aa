"""What workers start and leave behind: found for certain, ended, and reaped by the agent.

A process that left its worker's session is not reached through the worker's group. While its parent lives it
is found below it; after that the kernel gives it to the agent, which has asked to be the reaper of its
descendants. So every child of the agent that the agent did not start comes from a worker, however it was
started: nobody else's process can become one.

Guarantee: only such processes are signalled, each by its id and start time. Of them, a checkpoint writer,
drain process or peer server of ours may go on, for `outlive` seconds after it was first seen to be left: it
may still commit a snapshot that was staged whole, or a replica that is on its way. It is known by three
things that only its trainer's start of it brings together: the mark in its environment, its arguments, and a
session of its own. Its own children in that session are spared with it.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Collection, Iterable
from typing import NamedTuple

from holdfast.control.marks import OUTLIVES
from holdfast.launch import processes
from holdfast.launch.processes import Process

MODULES = (
    "holdfast.checkpoint.writer_process",
    "holdfast.checkpoint.drain_process",
    "holdfast.checkpoint.peer_process",
)
PATIENCE = 1.0
"""Seconds to read what a process was started with: one that hangs in the kernel may not be readable."""


class Outliving(NamedTuple):
    """A process that may go on for a while without its trainer."""

    process: Process
    module: str
    trainer: int
    until: float
    """On the monotonic clock; then it is ended."""

    def __str__(self) -> str:
        what = self.module.rpartition(".")[2].replace("_", " ")
        left = max(0.0, self.until - time.monotonic())
        return f"{what} {self.process.pid} of trainer {self.trainer} ({left:.0f} s left)"


def recognise(process: Process) -> tuple[str, int] | None:
    """The module and trainer's pid of a process that may outlive its trainer; ("", 0) for any other.

    None if that cannot be known now. A child of such a process, in its session, is what its parent is: it
    works for it, on a large image, and ends with it.
    """
    if process.session != process.pid:
        leader = processes.read(process.session)
        ours = leader is not None and leader.pid == leader.session == process.parent
        return recognise(leader) if leader is not None and ours else ("", 0)
    told = processes.within(
        PATIENCE, lambda: (processes.environment(process.pid), processes.arguments(process.pid))
    )
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
        """What each process was recognised as, so that it is looked at once; None: nothing special."""

    def become_reaper(self) -> bool:
        """From now on what workers leave behind becomes a child of this process; False if that is refused."""
        self._reaps = processes.become_reaper()
        return self._reaps

    def own(self, pid: int) -> None:
        """This child was started by the agent itself: its end is awaited elsewhere, and it is no stray."""
        found = processes.read(pid)
        if found is not None:
            self._own.add(found.identity)

    def below(self, workers: Collection[int]) -> list[Process]:
        """What these workers started, as far as it is still below them."""
        return processes.descendants(workers, processes.everyone())

    def clear(self, workers: Collection[int], seen: Iterable[Process] = ()) -> list[Process]:
        """Kill what these workers started, they themselves and what may outlive them left out.

        `seen`: what was below them earlier, and may be nobody's by now. Returns what was found alive: to be
        called until there is nothing. The workers must not be reaped yet, since their ids would be free.
        Adopted processes that have ended are reaped.
        """
        everyone = processes.everyone()
        since = min((everyone[pid].started for pid in workers if pid in everyone), default=None)
        if since is None:
            return []
        adopted = [p for p in self._adopted(everyone.values()) if p.started >= since and p.pid not in workers]
        self._reap(adopted)
        there = {process.identity for process in everyone.values()}
        known = [*adopted, *(everyone[process.pid] for process in seen if process.identity in there)]
        below = processes.descendants([*workers, *(process.pid for process in known)], everyone)
        found = {process.pid: process for process in [*known, *below]}
        left = []
        for process in found.values():
            if process.ended or process.identity in self._own:
                continue
            if self._recognised(process):
                if self._known[process.identity] is not None:
                    continue
                processes.send(process, signal.SIGKILL)
            left.append(process)
        return left

    def tend(self) -> list[Outliving]:
        """Those that still outlive their trainers. Ends those whose time is over, and reaps what has ended.

        To be called every now and then, also while no workers run.
        """
        everyone = processes.everyone()
        self._reap(self._adopted(everyone.values()))
        here = {process.identity for process in everyone.values() if not process.ended}
        self._known = {identity: one for identity, one in self._known.items() if identity in here}
        self._own = {identity for identity in self._own if identity[0] in everyone}
        alive = [one for one in self._known.values() if one is not None]
        for one in alive:
            if time.monotonic() >= one.until:
                processes.send(one.process, signal.SIGKILL)
        return alive

    def _adopted(self, among: Iterable[Process]) -> list[Process]:
        """Children of this process that it did not start.

        Those it starts without a session of their own are in its session, where no worker's descendant can
        be: a session can be left, and only a new one be entered.
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
        """Whether it is known what this is. What is not known is not killed, but named as left."""
        if process.identity not in self._known:
            recognised = recognise(process)
            if recognised is None:
                return False
            module, trainer = recognised
            until = time.monotonic() + self._outlive
            self._known[process.identity] = Outliving(process, module, trainer, until) if module else None
        return True
