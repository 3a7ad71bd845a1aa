"""One rank's part in the agreement on where all stop: what it has promised, and what was agreed.

Guarantee: once a promise is given, the loop does not go past it before the step is known after which all
ranks stop; and it never goes past that one. No lock is taken, and nothing is waited for, until somebody asks.

It rests on the order of two writes and two reads. Who asks sets `asked` before it reads the loop's counter;
the loop raises its counter before it reads `asked`. So one of them sees the other: the counter of a loop that
has not seen the request is in the promise, and a loop whose counter came too late sees the request and waits.

How requests, promises and the agreed step travel is others' business (beats.py, stop_store.py).
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from holdfast.errors import DecisionTimeoutError
from holdfast.scope import stretch


class Stopping:
    """Between the loop's thread and the one that hears of requests. `counter`: the steps completed so far."""

    def __init__(self, counter: Callable[[], int]) -> None:
        self.asked = False
        """Read by the loop at every boundary: all that watching for a stop costs."""
        self.why = ""
        self.since = 0.0
        """By time.monotonic(), when it was asked for."""
        self._counter = counter
        self._begun = False
        self._promise: int | None = None
        self._stop_at: int | None = None
        self._changed = threading.Condition()

    # --- for the thread that hears of requests --------------------------------------------------------------

    def prepare(self, why: str, ago: float = 0.0) -> int:
        """A stop was asked for, `ago` seconds ago: the step that this rank will not go past until it knows.

        Asked again, it gives the same promise.
        """
        with self._changed:
            if self._promise is None:
                self.why, self.since = why, time.monotonic() - ago
                self.asked = True  # before the counter is read: see above
                self._promise = self._counter() + self._begun
            return self._promise

    def agreed(self, step: int) -> None:
        """Every rank has promised, and all stop after this step. The first word counts."""
        with self._changed:
            if self._stop_at is None:
                self.asked = True
                self.since = self.since or time.monotonic()
                self._stop_at = step
                self._changed.notify_all()

    @property
    def stop_at(self) -> int | None:
        return self._stop_at

    # --- for the loop ---------------------------------------------------------------------------------------

    def begin(self) -> None:
        """The first step of this attempt is about to begin. The loop looks at `asked` after this."""
        self._begun = True

    def reached(self, step: int, patience: float) -> bool:
        """Whether to stop here, where `step` steps are complete. Only worth a call once `asked` is set.

        Waits where the promise ends, at most `patience` seconds, for the others' promises to be counted.
        """
        deadline = time.monotonic() + patience
        with self._changed:
            while self._stop_at is None:
                if self._promise is not None and step < self._promise:
                    return False
                left = deadline - time.monotonic()
                if left <= 0:
                    raise DecisionTimeoutError(
                        f"asked to stop ({self.why}), this rank waited {patience:g} s after step {step} to "
                        "learn after which step all ranks stop. A rank or an agent that should have answered "
                        "is gone or stuck; this rank ends rather than choose alone"
                    )
                self._changed.wait(stretch(left))
            return step >= self._stop_at

    @property
    def seconds(self) -> float:
        """Since it was asked for."""
        return time.monotonic() - self.since if self.asked else 0.0
