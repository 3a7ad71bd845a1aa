"""Data loaders' worker processes that do not die of a request to stop, where the settings say so.

A scheduler signals every process of a job. A loader's worker that dies of it ends the step that the rank
still has to do before it stops. So workers let such a signal pass if their rank is stopping, which they learn
from a byte that they share with it. If the rank is not, the signal was meant for the worker itself, such as
that by which multiprocessing ends its children, and the worker ends, a few seconds later than it would have.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Callable, Iterable
from types import FrameType
from typing import Any

from holdfast.policy.stopping import REPEATED

LOOK = 0.05


class LoaderSignals:
    """What a rank shares with the workers of its loaders."""

    def __init__(self, numbers: Iterable[signal.Signals]) -> None:
        self._numbers = [int(number) for number in numbers]
        self._flags: list[Any] = []
        self._asked = False

    def spare(self, loader: Any) -> None:
        """Have the workers that this loader will start take part; for any other object nothing is done."""
        if not getattr(loader, "num_workers", 0) or not hasattr(loader, "worker_init_fn"):
            return
        context = getattr(loader, "multiprocessing_context", None) or multiprocessing
        flag = context.RawValue("b", 0)
        self._flags.append(flag)
        flag.value = int(self._asked)  # in this order: who asks meanwhile sets those that are in the list
        loader.worker_init_fn = SparedWorker(loader.worker_init_fn, self._numbers, flag)

    def asked(self) -> None:
        """The rank is to stop."""
        self._asked = True
        for flag in self._flags:
            flag.value = 1


class SparedWorker:
    """A loader's `worker_init_fn`: takes the signals, then calls the user's own. Can be pickled."""

    def __init__(self, inner: Callable[[int], object] | None, numbers: list[int], flag: Any) -> None:
        self._inner = inner
        self._numbers = numbers
        self._flag = flag

    def __call__(self, worker: int) -> None:
        for number in self._numbers:
            signal.signal(number, self._handle)
        if self._inner is not None:
            self._inner(worker)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        del frame
        if not self._flag.value:
            threading.Thread(target=self._end_unless_stopping, args=(number,), daemon=True).start()

    def _end_unless_stopping(self, number: int) -> None:
        deadline = time.monotonic() + REPEATED
        while not self._flag.value:
            if time.monotonic() >= deadline:
                os._exit(128 + number)
            time.sleep(LOOK)
