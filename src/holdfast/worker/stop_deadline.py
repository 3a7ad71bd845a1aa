"""By when a rank that was asked to stop must have ended, whatever its threads do.

Guarantee: once armed with a limit, the process ends by it. A thread of its own first writes down what every
thread was doing, to standard error and to a file, then ends the process at once: no clean-up that could
hang. If the main thread never gives the interpreter's lock back, the fault handler's timer, which needs no
lock, ends it a little later. A snapshot that the writer process has is committed all the same.
"""

from __future__ import annotations

import contextlib
import faulthandler
import logging
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path

from holdfast.exit_codes import ExitCode
from holdfast.speaking import rendered

log = logging.getLogger("holdfast")

BEHIND = 5.0
"""Seconds after the deadline at which the fault handler's timer ends what the thread could not."""
LAST_WORDS = 3.0
"""Seconds for what is written at the end: the disk may be what hangs."""
STDERR = 2


class StopDeadline:
    """One for a rank. Every method may be called from any thread; the shortest limit counts."""

    def __init__(self, on_forced: Callable[[str, str], None] | None = None) -> None:
        """`on_forced`: told why, and the file with the stacks (or nothing), right before the end."""
        self._on_forced = on_forced
        self._stacks: Path | None = None
        self._lock = threading.Lock()
        self._moved = threading.Condition(self._lock)
        self._ends: float | None = None
        self._why = ""
        self._thread: threading.Thread | None = None
        self._over = False
        self.saved = False
        """Whether the state is safe: a process that does not end by itself has still stopped as asked."""

    def write_to(self, path: Path) -> None:
        """Where the stacks go."""
        self._stacks = path

    def arm(self, seconds: float | None, why: str) -> None:
        """From now on so many seconds are left; None is no limit."""
        if seconds is None:
            return
        with self._moved:
            ends = time.monotonic() + seconds
            if self._over or (self._ends is not None and self._ends <= ends):
                return
            self._ends, self._why = ends, why
            with contextlib.suppress(RuntimeError, ValueError, OSError):
                faulthandler.dump_traceback_later(seconds + BEHIND, exit=True, file=STDERR)
            if self._thread is None:
                self._thread = threading.Thread(target=self._watch, name="holdfast-deadline", daemon=True)
                self._thread.start()
            self._moved.notify_all()

    @property
    def left(self) -> float | None:
        """Seconds; None for no limit."""
        ends = self._ends
        return None if ends is None else max(0.0, ends - time.monotonic())

    def disarm(self) -> None:
        """There is no deadline any more: nothing is to be stopped."""
        with self._moved:
            self._over = True
            if self._ends is not None:
                faulthandler.cancel_dump_traceback_later()
            self._moved.notify_all()

    def _watch(self) -> None:
        with self._moved:
            while not self._over:
                assert self._ends is not None
                left = self._ends - time.monotonic()
                if left <= 0:
                    break
                self._moved.wait(left)
            if self._over:
                return
        self._force()

    def _force(self) -> None:
        why = f"the deadline has passed ({self._why})"
        if self.saved:
            why = f"its state is saved, but the process did not end: {why}"
        words = threading.Thread(target=self._last_words, args=(why,), name="holdfast-forced", daemon=True)
        words.start()
        words.join(LAST_WORDS)
        os._exit(int(ExitCode.STOPPED if self.saved else ExitCode.STOPPED_UNSAVED))

    def _last_words(self, why: str) -> None:
        with contextlib.suppress(OSError):
            os.write(STDERR, f"{rendered(f'{why}; what every thread was doing:')}\n".encode())
        with contextlib.suppress(Exception):
            faulthandler.dump_traceback(file=STDERR, all_threads=True)
        written = ""
        with contextlib.suppress(Exception):
            if self._stacks is not None:
                self._stacks.parent.mkdir(parents=True, exist_ok=True)
                with self._stacks.open("wb", buffering=0) as file:
                    file.write(f"{why}\n\n".encode())
                    faulthandler.dump_traceback(file=file, all_threads=True)
                written = str(self._stacks)
        with contextlib.suppress(Exception):
            if self._on_forced is not None:
                self._on_forced(why, written)
