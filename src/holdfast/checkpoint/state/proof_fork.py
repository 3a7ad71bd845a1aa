"""The fork of the trainer that a proof runs in (proof.py): how it is made harmless, watched and ended.

The trainer has threads, and a fork keeps none of them. It does keep the trainer's handlers, destructors,
files, sockets, and memory that is shared between processes. None of those may be used in it. So signals are
blocked and the garbage collector is off from before the fork on, every descriptor leads nowhere, and whoever
is about to fork looks first at what memory is mapped.

Guarantee: the fork never outlives its trainer, and is the first to go where the host runs out of memory.
`end` waits for no longer than REAP_PATIENCE. It reaps the fork by its own descriptor, so that whoever else
waits for children of this process, or ignores their signals, is neither disturbed nor believed.
"""

from __future__ import annotations

import bisect
import contextlib
import ctypes
import gc
import os
import select
import signal
import sys
import warnings
from collections.abc import Iterator, Sequence

from holdfast.checkpoint.save import PR_SET_PDEATHSIG
from holdfast.process import MemoryMapping, proc

REAP_PATIENCE = 10.0
"""Seconds for a fork that has reported, or was killed, to be gone; it has its view of the memory to undo."""
REPORT_BYTES = 64 * 1024
"""What a pipe holds: saying that much never blocks."""

_libc = ctypes.CDLL(None, use_errno=True)


# --- before the fork ----------------------------------------------------------------------------------------


class Mappings:
    """The memory of this process, as it is mapped now."""

    def __init__(self, mappings: Sequence[MemoryMapping]) -> None:
        self._mappings = mappings
        self._starts = [mapping.start for mapping in mappings]

    def shares(self, start: int, end: int) -> bool:
        """Whether some byte of a range would be the same memory in a child: what it writes, all read."""
        at = max(0, bisect.bisect_right(self._starts, start) - 1)
        while at < len(self._mappings) and self._mappings[at].start < end:
            if self._mappings[at].shared and start < self._mappings[at].end:
                return True
            at += 1
        return False

    @property
    def network_adapter(self) -> str:
        """An adapter whose memory this process has mapped (RDMA); empty if there is none.

        What its driver does to memory that it has pinned when its process forks is not known here.
        """
        return next((one.path for one in self._mappings if one.path.startswith("/dev/infiniband")), "")


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Around a fork: neither a signal handler nor a destructor of the trainer's may ever run in the child."""
    collecting = gc.isenabled()
    gc.disable()
    blocked = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
    if sys.version_info >= (3, 12):
        # A fork beside threads is what this module is about; made an error, the warning would lose the child.
        ours = __package__.replace(".", r"\.")
        warnings.filterwarnings("ignore", ".*fork", DeprecationWarning, module=rf"{ours}\.proof$")
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, blocked)
        if collecting:
            gc.enable()


# --- in the fork --------------------------------------------------------------------------------------------


def die_with(parent: int) -> None:
    _libc.prctl(PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)
    if os.getppid() != parent:  # it died before that took effect
        os._exit(1)


def keep_only(kept: int) -> None:
    """No file or socket of the trainer's but this one: what is printed or sent goes nowhere."""
    nowhere = os.open(os.devnull, os.O_RDWR)
    for number in proc.descriptors():
        if number not in (kept, nowhere):
            with contextlib.suppress(OSError):  # that of the listing itself
                os.fstat(number)
                os.dup2(nowhere, number)


def say(descriptor: int, told: bytes) -> None:
    view = memoryview(told[:REPORT_BYTES])
    while view:
        view = view[os.write(descriptor, view) :]


# --- in the trainer, beside it ------------------------------------------------------------------------------


def end(process: int) -> str:
    """Let it go, and learn how it ended, waiting no longer than for a dead process to be taken apart."""
    with contextlib.suppress(ProcessLookupError):
        signal.pidfd_send_signal(process, signal.SIGKILL)
    ready = select.poll()
    ready.register(process, select.POLLIN)
    ready.poll(int(1000 * REAP_PATIENCE))
    with contextlib.suppress(ChildProcessError):
        found = os.waitid(os.P_PIDFD, process, os.WEXITED | os.WNOHANG)
        if found is not None:
            killed = found.si_code in (os.CLD_KILLED, os.CLD_DUMPED)
            return f"{'signal' if killed else 'code'} {found.si_status}"
    return "unseen"
