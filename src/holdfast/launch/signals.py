"""Signals that ask the launcher to stop.

A handler that raises anywhere would tear a durable write apart; one that only sets a flag would let a
rendezvous wait for minutes. So a signal raises only inside `interruptible()`, which wraps the long waits, and
is otherwise kept until the launcher looks. A second signal means "now": `hurry` is called, which kills.
"""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Callable, Iterator
from types import FrameType


class Interrupted(Exception):  # noqa: N818 - not an error
    """A stop signal arrived during a wait."""


class StopSignals:
    def __init__(self, names: str) -> None:
        """`names` as torchrun's --signals-to-handle takes them: `SIGTERM,SIGINT`."""
        self._numbers = [
            signal.Signals[name.strip()]
            for name in names.split(",")
            if name.strip() in signal.Signals.__members__
        ]
        self._may_raise = False
        self.received: signal.Signals | None = None
        self.hurry: Callable[[], None] | None = None

    def install(self) -> None:
        """Take the signals over."""
        for number in self._numbers:
            signal.signal(number, self._handle)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        del frame
        if self.received is not None:
            if self.hurry is not None:
                self.hurry()
            return
        self.received = signal.Signals(number)
        if self._may_raise:
            raise Interrupted

    def check(self) -> None:
        """Raise if a signal has arrived."""
        if self.received is not None:
            raise Interrupted

    @contextlib.contextmanager
    def interruptible(self) -> Iterator[None]:
        self._may_raise = True
        try:
            self.check()
            yield
        finally:
            self._may_raise = False
