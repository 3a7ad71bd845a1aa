"""A call that may hang, in a thread that is left behind if it does.

Guarantee: whoever waits for it goes on when its time is over, whatever the call does. A dead mount, a sick
driver and a store whose host is stopped cannot be interrupted; such a thread ends with its process.
"""

from __future__ import annotations

import errno
import threading
import time
from collections.abc import Callable
from typing import Generic, TypeVar

T = TypeVar("T")

PATIENCE = 5.0
"""Seconds for which a process table that is full may have room again."""
RETRY = 0.1
_NO_THREAD = "can't start new thread"


def is_table_full(error: BaseException) -> bool:
    """Whether an error means that no process or thread could be started for want of room."""
    if isinstance(error, OSError):
        return error.errno == errno.EAGAIN
    return isinstance(error, RuntimeError) and _NO_THREAD in str(error)


class Bounded(Generic[T]):
    """One call, under way from here on."""

    def __init__(self, call: Callable[[], T], name: str) -> None:
        self._returned: list[T] = []
        self._raised: BaseException | None = None
        deadline = time.monotonic() + PATIENCE
        while True:
            self._thread = threading.Thread(
                target=self._run, args=(call,), name=f"holdfast-{name}", daemon=True
            )
            try:
                self._thread.start()
                return
            except RuntimeError:  # somebody else's processes may fill the table for a moment
                if time.monotonic() > deadline:
                    raise
                time.sleep(RETRY)

    def _run(self, call: Callable[[], T]) -> None:
        try:
            self._returned.append(call())
        except BaseException as error:  # noqa: BLE001 - whoever asks for the result gets it, whatever it is
            self._raised = error

    def ended(self, seconds: float = 0.0) -> bool:
        """Whether it has returned or raised; waited for at most so long."""
        self._thread.join(max(0.0, seconds))
        return not self._thread.is_alive()

    def result(self) -> T:
        """What it returned or raised. To be asked for once it has ended."""
        if self._raised is not None:
            raise self._raised
        return self._returned[0]
