"""The worker processes of one node: seen without being disturbed, and ended for certain.

Guarantee: a worker's end is observed without reaping it, so its process id stays reserved and signals to its
process group can only reach what the worker started. `stop` returns within the grace plus `KILL_TIMEOUT`,
whatever the workers do: torch's own waits ignore the configured grace (a literal 30 seconds).
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from collections.abc import Mapping

KILL_TIMEOUT = 10.0
"""Seconds for SIGKILL to take effect; a process in uninterruptible sleep may not die at all."""
POLL = 0.02


class Workers:
    """Children of this process, each the leader of a process group, by global rank."""

    def __init__(self, pids: Mapping[int, int]) -> None:
        self.pids = dict(pids)
        self._lock = threading.Lock()
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
        return found

    def signal(self, number: int) -> None:
        """Send a signal to every worker's process group. Safe from any thread, also after `forget`."""
        with self._lock:
            if not self._ours:
                return
            for pid in self.pids.values():
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.killpg(pid, number)

    def kill(self) -> None:
        self.signal(signal.SIGKILL)

    def stop(self, grace: float) -> bool:
        """SIGTERM, then SIGKILL after `grace` seconds, to the whole groups. True if all workers are dead."""
        if len(self.ended()) < len(self.pids):
            self.signal(signal.SIGTERM)
            self._await_end(grace)
        # Also when all have ended: what a worker started (loader processes) must not outlive it.
        self.kill()
        return self._await_end(KILL_TIMEOUT)

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
