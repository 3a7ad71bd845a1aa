"""Ranks as forks of the test's process, around a store that lives in none of them; some may hang or die."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from holdfast.restart.groups import GroupWatch, StoreLine
from kit.harness import await_child, wait_until
from kit.ranks.local_ranks import store_process
from kit.tiny import end_with

LIMIT = 60.0
GROUP_TIMEOUT = timedelta(seconds=15)
"""Of the groups: much longer than being freed takes, and shorter than a test may; what is half-way through a
message ends by it."""


@dataclass
class Rank:
    """One of them, seen from inside."""

    number: int
    place: Path
    port: int
    store: dist.TCPStore = field(init=False)
    _line: StoreLine | None = None

    def __post_init__(self) -> None:
        self.store = dist.TCPStore("127.0.0.1", self.port, is_master=False, timeout=timedelta(seconds=LIMIT))

    def mark(self, name: str) -> None:
        (self.place / f"{name}{self.number}").touch()

    def join(self, watch: GroupWatch, name: str, world: int, rank: int | None = None) -> None:
        """Make the default group, as a member of a restartable job does."""
        if self._line is None or self._line.ended:
            self._line = StoreLine(self.store)
        dist.init_process_group(
            "gloo",
            store=dist.PrefixStore(name, watch.over(self._line)),
            rank=self.number if rank is None else rank,
            world_size=world,
            timeout=GROUP_TIMEOUT,
        )


@dataclass
class Ranks:
    place: Path
    port: int
    pids: dict[int, int]

    def marked(self, name: str, *ranks: int) -> None:
        for rank in ranks:
            wait_until((self.place / f"{name}{rank}").exists, LIMIT, f"rank {rank}: {name}")

    def ended(self, *ranks: int, within: float = LIMIT) -> list[int]:
        return [await_child(self.pids.pop(rank), within) for rank in ranks]


@contextlib.contextmanager
def started(place: Path, work: Callable[[Rank], None], *numbers: int) -> Iterator[Ranks]:
    """These ranks at work. Whoever is still there in the end is killed."""
    torch.set_num_threads(1)  # a fork has none of its parent's threads
    keeper, port = store_process()
    ranks = Ranks(place, port, {})
    try:
        for number in numbers:
            sys.stdout.flush()
            sys.stderr.flush()
            pid = os.fork()
            if pid == 0:
                end_with(lambda number=number: work(Rank(number, place, port)))
            ranks.pids[number] = pid
        yield ranks
    finally:
        for pid in (keeper, *ranks.pids.values()):
            with contextlib.suppress(ProcessLookupError, ChildProcessError):
                os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, 0)


@contextlib.contextmanager
def aborted_when(watch: GroupWatch, condition: Callable[[], bool]) -> Iterator[Callable[[], float]]:
    """Abort the groups from another thread, as the lookout does; gives the seconds since the first time."""
    began: list[float] = []
    left = threading.Event()

    def lookout() -> None:
        while not left.wait(0.2 if began else 0.01):
            if began or condition():
                began.append(time.monotonic())
                watch.abort()

    thread = threading.Thread(target=lookout, daemon=True)
    thread.start()
    try:
        yield lambda: time.monotonic() - began[0]
    finally:
        left.set()
        thread.join(LIMIT)
