"""A call that may hang, in a thread that is left behind if it does.

Guarantee: whoever waits for it goes on when its time is over, whatever the call does. A dead mount, a sick
driver and a store whose host is stopped cannot be interrupted; such a thread ends with its process.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Generic, TypeVar

T = TypeVar("T")


class Bounded(Generic[T]):
    """One call, under way from here on."""

    def __init__(self, call: Callable[[], T], name: str) -> None:
        self._returned: list[T] = []
        self._raised: BaseException | None = None
        self._thread = threading.Thread(target=self._run, args=(call,), name=f"holdfast-{name}", daemon=True)
        self._thread.start()

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
