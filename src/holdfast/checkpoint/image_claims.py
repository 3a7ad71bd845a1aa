"""Who does which part of the work on an image.

A shard's own digest can only be taken from its first byte to its last, so each shard has a leader, which goes
through its runs of items in order and takes both digests of what it has just brought into its cache. Whoever
finds no shard left to lead helps: it takes runs from the far end of the shard with the most left to do. A
leader that meets its helpers has nothing left of the shard but its own digest.

Guarantee: each run is given out once, whether to threads or to forks of one process, and a process that dies
holds nobody up: the kernel gives its lock back.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import threading
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import NamedTuple, Self

_WORD = 8


class Run(NamedTuple):
    """The `at`-th run of items of a shard."""

    shard: int
    at: int


class Claims:
    """Which runs are given out: to a leader those before `first`, to helpers those from `end` on."""

    def __init__(self, runs: Sequence[int], *, forks: bool) -> None:
        """`runs`: how many each shard has. `forks`: for processes forked from here on, instead of threads."""
        self._shards = len(runs)
        self._file = -1
        self._memory = mmap.mmap(-1, _WORD * (1 + 2 * self._shards))  # anonymous, and shared with forks
        self._words = memoryview(self._memory).cast("q")
        for shard, count in enumerate(runs):
            self._words[self._end(shard)] = count
        self._lock: AbstractContextManager[object] = threading.Lock()
        if forks:
            self._file = os.memfd_create("holdfast-claims", os.MFD_CLOEXEC)
            self._lock = _RecordLock(self._file)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._file >= 0:
            os.close(self._file)

    @staticmethod
    def _first(shard: int) -> int:
        return 1 + 2 * shard

    @staticmethod
    def _end(shard: int) -> int:
        return 2 + 2 * shard

    def _left(self, shard: int) -> int:
        return self._words[self._end(shard)] - self._words[self._first(shard)]

    def lead(self) -> int | None:
        """A shard that nobody leads yet."""
        with self._lock:
            shard = self._words[0]
            if shard >= self._shards:
                return None
            self._words[0] = shard + 1
            return shard

    def next_run(self, shard: int) -> bool:
        """For its leader: whether its next run is its own to do. Once it is not, none will be."""
        with self._lock:
            if not self._left(shard):
                return False
            self._words[self._first(shard)] += 1
            return True

    def help(self) -> Run | None:
        """A run that its leader would come to last, of the shard with the most left; None: there is none."""
        with self._lock:
            shard = max(range(self._shards), key=self._left, default=0)
            if not self._shards or not self._left(shard):
                return None
            self._words[self._end(shard)] -= 1
            return Run(shard, self._words[self._end(shard)])

    def stop(self) -> None:
        """Give out nothing more: somebody has failed."""
        with self._lock:
            self._words[0] = self._shards
            for shard in range(self._shards):
                self._words[self._end(shard)] = self._words[self._first(shard)]


class _RecordLock(AbstractContextManager[None]):
    """A lock between processes, which the kernel gives back when its holder dies."""

    def __init__(self, descriptor: int) -> None:
        self._held = descriptor

    def __enter__(self) -> None:
        fcntl.lockf(self._held, fcntl.LOCK_EX)

    def __exit__(self, *_: object) -> None:
        fcntl.lockf(self._held, fcntl.LOCK_UN)
