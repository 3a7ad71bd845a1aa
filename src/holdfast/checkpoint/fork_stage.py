"""Takes a snapshot of host memory by a fork: the trainer's side.

The kernel freezes the trainer's private memory in a child at the moment of the fork. Nothing that training
does afterwards, by whatever means, can change what the child copies; training is held up for the fork alone.

Guarantee: once `done()` is true and `fingerprints()` does not raise, the staging memory holds every tensor as
it was when `begin` was called. A child that does not report in time is killed, and one that dies is noticed;
both make `fingerprints` raise. Every child is reaped, by its own descriptor: whoever else waits for children
of this process, or ignores their signals, is neither disturbed nor believed.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import mmap
import os
import select
import signal
import sys
import threading
import time
import warnings
from collections.abc import Iterator, Sequence

from holdfast.checkpoint import fork_child
from holdfast.checkpoint.fork_child import DONE, FAILED, PRINT, Work
from holdfast.errors import SaveFailedError

REAP_PATIENCE = 10.0
"""Seconds for a child that has reported, or was killed, to be gone; it has its view of the memory to undo."""
_POPULATE_WRITE = 23
"""MADV_POPULATE_WRITE (Linux 5.14)."""
_REPORT = 64 * 1024

_libc = ctypes.CDLL(None, use_errno=True)  # its calls let other threads run


def missing_here() -> str:
    """Why this system has no snapshots by fork; empty if it has."""
    if not os.access("/proc/self/smaps", os.R_OK):
        return "the kernel does not tell what a fork freezes (/proc/self/smaps)"
    try:
        os.close(os.pidfd_open(os.getpid()))
    except (OSError, AttributeError) as error:
        return f"the kernel has no descriptors of processes ({error})"
    return ""


class ForkedCopy:
    """A snapshot that a child copies. `begin` it; then any thread may ask."""

    def __init__(
        self,
        works: Sequence[Work],
        known: Sequence[str],
        board: mmap.mmap,
        reading: int,
        deadline: float,
    ) -> None:
        self._works = works
        """Held until the end: their memory must not become somebody else's before it is made ready again."""
        self._known = known
        self._board = board
        self._reading = reading
        self._begun = time.monotonic()
        self._deadline = deadline
        self._lock = threading.RLock()
        self._ending = threading.Lock()
        self._report = b""
        self._failed = ""
        self._over = False
        self._reaped = False
        self._how = ""
        self._seconds = 0.0
        self._prints: list[str] = []
        self.pid = 0
        self._process = -1
        """A descriptor of the child."""

    # --- what a snapshot in flight is asked -----------------------------------------------------------------

    def done(self) -> bool:
        """Whether the staging memory holds all of it, or never will. Never blocks."""
        with self._lock:
            if self._over:
                return True
            ended = self._has_ended()  # before the last look at what it said
            self._listen()
            if self._report == DONE:
                self._prints = [text or self._print_at(place) for place, text in enumerate(self._known)]
            elif ended or self._reaped:
                said = self._report.removeprefix(FAILED).decode(errors="replace")
                self._failed = self._failed or said or f"it ended without a word ({self._how or 'unseen'})"
            elif time.monotonic() >= self._deadline:
                late = f"it did not report within {self._deadline - self._begun:.0f} s, and was ended"
                self._failed = self._failed or late
                self._kill()
                return False  # until it is gone: it may still write
            else:
                return False
            self._seconds = time.monotonic() - self._begun
            self._over = True
            return True

    def boundary(self) -> None:
        """Nothing: what the child sees does not change."""

    def torn(self) -> str:
        return ""

    def fingerprints(self) -> list[str]:
        """Of each tensor, in the order given; raises SaveFailedError if it was not copied."""
        if not self.done() or self._failed:
            raise SaveFailedError(
                f"the child {self.pid}, which copied the snapshot, failed: {self._failed or 'it is not done'}"
                ". Later snapshots of this attempt are taken by blocking"
            )
        return self._prints

    def release(self) -> None:
        """Nothing that would wait: see `settle`."""

    def copy_seconds(self) -> float:
        """From the fork to the report; 0 before that."""
        return self._seconds if not self._failed else 0.0

    @property
    def problem(self) -> str:
        """Why it failed; empty if it did not, or not yet."""
        return self._failed

    # --- the end --------------------------------------------------------------------------------------------

    def settle(self) -> None:
        """Wait for the child's end, bounded, and take its pages back. For a thread that may wait.

        The kernel left every page of the trainer's to be claimed again by a fault at its next write. Claimed
        here, all at once and on another core, that does not slow the steps down.
        """
        self.end()
        works, self._works = self._works, []
        for work in works if not self._failed else ():
            start, end = work.range
            start, end = start // mmap.PAGESIZE * mmap.PAGESIZE, -(-end // mmap.PAGESIZE) * mmap.PAGESIZE
            _libc.madvise(ctypes.c_void_p(start), ctypes.c_size_t(end - start), ctypes.c_int(_POPULATE_WRITE))

    def end(self) -> None:
        """The child is gone when this returns, however far it was; bounded."""
        with self._ending:
            if self._process < 0:
                return
            if not self.done():
                self._failed = self._failed or "it was ended before it was done"
            if self._failed:
                self._kill()
            deadline = time.monotonic() + REAP_PATIENCE
            while not self._has_ended() and (left := deadline - time.monotonic()) > 0:
                ready = select.poll()
                ready.register(self._process, select.POLLIN)
                ready.poll(max(1, int(left * 1000)))
            self._kill()  # only if it is still there: it hangs in the kernel, and ends when it can
            self.done()
            with self._lock:
                os.close(self._reading)
                os.close(self._process)
                self._reading = self._process = -1

    def _has_ended(self) -> bool:
        with self._lock:
            if not self._reaped and self._process >= 0:
                try:
                    found = os.waitid(os.P_PIDFD, self._process, os.WEXITED | os.WNOHANG)
                    if found is not None:
                        killed = found.si_code in (os.CLD_KILLED, os.CLD_DUMPED)
                        self._how = f"{'signal' if killed else 'code'} {found.si_status}"
                        self._reaped = True
                except ChildProcessError:  # somebody else has waited for it, or nobody needs to
                    ready = select.poll()
                    ready.register(self._process, select.POLLIN)
                    self._reaped = bool(ready.poll(0))
            return self._reaped

    def _listen(self) -> None:
        with contextlib.suppress(BlockingIOError):
            while self._reading >= 0 and (more := os.read(self._reading, _REPORT)):
                self._report += more

    def _print_at(self, place: int) -> str:
        return self._board[place * PRINT : (place + 1) * PRINT].decode()

    def _kill(self) -> None:
        with self._lock, contextlib.suppress(ProcessLookupError):
            if not self._reaped and self._process >= 0:
                signal.pidfd_send_signal(self._process, signal.SIGKILL)


def begin(
    works: Sequence[Work], staging: int, known: Sequence[str], *, shares: int, timeout: float
) -> ForkedCopy:
    """Fork a child that copies `works` into the file `staging`; raises OSError where it cannot be.

    `works` must be in the order of their places, from 0; `known` are their fingerprints, "" where there is
    none yet; `shares`: how many processes copy.
    """
    divided = fork_child.share_out(works, shares)
    board = mmap.mmap(-1, max(1, len(works)) * PRINT)
    reading, report = os.pipe()
    os.set_blocking(reading, False)
    flight = ForkedCopy(works, known, board, reading, time.monotonic() + timeout)
    trainer = os.getpid()
    try:
        with quiet():
            pid = os.fork()
            if pid == 0:
                fork_child.work(trainer, report, staging, board, divided)
        flight.pid = pid
        try:
            flight._process = os.pidfd_open(pid)
        except OSError:
            os.kill(pid, signal.SIGKILL)  # not waited for by anybody yet: it is still this child
            os.waitpid(pid, 0)
            raise
    except OSError:
        os.close(reading)
        raise
    finally:
        os.close(report)
    return flight


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Around a fork: neither a signal handler nor a destructor of the trainer's may ever run in the child."""
    collecting = gc.isenabled()
    gc.disable()
    blocked = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
    if sys.version_info >= (3, 12):
        # A fork beside threads is what this module is about; made an error, the warning would lose the child.
        ours = __package__.replace(".", r"\.")
        warnings.filterwarnings(
            "ignore", ".*fork", DeprecationWarning, module=rf"{ours}\.(fork_stage|proof)$"
        )
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, blocked)
        if collecting:
            gc.enable()
