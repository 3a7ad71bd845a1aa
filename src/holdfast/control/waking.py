"""Whether this process ran all the time, or was stopped itself (SIGSTOP, a suspended machine, starvation).

Who measures others by the clock has to know: what they did meanwhile it could not see.
"""

from __future__ import annotations

import time


class Waking:
    """One look after the other."""

    def __init__(self) -> None:
        self._looked = _awake()

    def missed(self) -> float:
        """Seconds since the look before this one."""
        now = _awake()
        passed, self._looked = now - self._looked, now
        return passed


def _awake() -> float:
    """Seconds on a clock that goes on while the machine sleeps."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)
