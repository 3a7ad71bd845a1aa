"""Signals that ask the launcher to stop.

While an attempt runs, a first signal is a request: the ranks agree on a step, save and end (stopping.py). A
handler that raises anywhere would tear a durable write apart; one that only sets a flag would let a
rendezvous wait for minutes. So a signal raises only inside `interruptible()`, which wraps the long waits
while no attempt runs, and is otherwise kept until the launcher looks.

A second signal means "now": `hurry` is called, which kills. Within `REPEATED` of the first it is the same
request on another way, and ignored; but who presses Ctrl-C twice means it.
"""

from __future__ import annotations

import contextlib
import signal
import time
from collections.abc import Callable, Iterator
from types import FrameType

from holdfast.policy.stopping import is_repeated
from holdfast.signal_senders import Seen, named, seen, take, watch

ALSO = (signal.SIGUSR1, signal.SIGUSR2)
"""Taken besides those that torchrun takes: schedulers announce the end of a job by them."""


class Interrupted(BaseException):
    """A stop signal arrived during a wait.

    No `Exception`, because it can be raised anywhere within the wait: whoever handles what can go wrong
    there, such as `threading.Thread.start` for a thread that could not be had, must not take it for that.
    """


class StopSignals:
    def __init__(self, names: str) -> None:
        """`names` as torchrun's --signals-to-handle takes them: `SIGTERM,SIGINT`."""
        named = [name.strip() for name in names.split(",")]
        known = [signal.Signals[name] for name in named if name in signal.Signals.__members__]
        self._numbers = list(dict.fromkeys([*known, *ALSO]))
        self._may_raise = False
        self._at = 0.0
        self.received: signal.Signals | None = None
        """The first one."""
        self.again: signal.Signals | None = None
        """The one that meant "now"."""
        self._seen: dict[str, Seen | None] = {}
        self._named: dict[str, str] = {}
        self.hurry: Callable[[], None] | None = None

    def install(self) -> None:
        """Take the signals over."""
        for number in self._numbers:
            signal.signal(number, self._handle)
            watch(number)

    @property
    def sender(self) -> str:
        """Who sent the first one; empty if that is not known. Never waited for within the handler."""
        return self._name("first", self.received)

    @property
    def sender_again(self) -> str:
        return self._name("again", self.again)

    def _name(self, which: str, number: signal.Signals | None) -> str:
        if number is None:
            return ""
        if which not in self._named:
            self._named[which] = named(number, self._seen.get(which))
        return self._named[which]

    def _handle(self, number: int, frame: FrameType | None) -> None:
        del frame
        found = None
        with contextlib.suppress(Exception):  # nothing about the sender may hold a stop up
            found = seen(take(number))
        if self.received is not None:
            if number != signal.SIGINT and is_repeated(self._at, time.monotonic()):
                return
            self._seen.setdefault("again", found)
            self.again = self.again or signal.Signals(number)
            if self.hurry is not None:
                self.hurry()
            return
        self._at = time.monotonic()
        self._seen["first"] = found
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
