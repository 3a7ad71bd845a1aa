"""Calls that may hang, in a thread that is left behind if they do; and when a long wait is told.

Guarantee: whoever waits for one goes on when its time is over, whatever the call does. A dead mount, a sick
driver and a store whose host is stopped cannot be interrupted; such a thread ends with its process.
"""

from __future__ import annotations

import errno
import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Generic, NamedTuple, TypeVar

log = logging.getLogger("holdfast")

T = TypeVar("T")

TABLE_PATIENCE = 5.0
"""Seconds for which a process table that is full may have room again."""
RETRY = 0.1
_NO_THREAD = ("can't start new thread", "Resource temporarily unavailable")
"""Of a RuntimeError: Python's own words, and those of a C++ library that wanted a thread, such as a store."""
PATIENCE = 0.5
"""Seconds that a healthy file system may take before whoever asked it for something goes on without."""
LINGER = 5.0
"""Seconds that a thread waits for more to do."""


def is_table_full(error: BaseException) -> bool:
    """Whether an error means that no process or thread could be started for want of room."""
    if isinstance(error, OSError):
        return error.errno == errno.EAGAIN
    return isinstance(error, RuntimeError) and any(words in str(error) for words in _NO_THREAD)


class Bounded(Generic[T]):
    """One call, under way from here on."""

    def __init__(self, call: Callable[[], T], name: str) -> None:
        self._returned: list[T] = []
        self._raised: BaseException | None = None
        deadline = time.monotonic() + TABLE_PATIENCE
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


class Look(Generic[T]):
    """A look that is taken again and again, one at a time: one that hangs costs its news, not its asker."""

    def __init__(self, look: Callable[[], T], name: str, patience: float = PATIENCE) -> None:
        self._look = look
        self._name = name
        self._patience = patience
        self._under_way: Bounded[T] | None = None

    def take(self) -> Bounded[T] | None:
        """One that has ended: its result is to be asked for. None while it hangs: only the first who asks
        waits for it, and not for long."""
        patience = 0.0
        if self._under_way is None:
            self._under_way, patience = Bounded(self._look, self._name), self._patience
        if not self._under_way.ended(patience):
            return None
        found, self._under_way = self._under_way, None
        return found


class Aside:
    """Work on storage that may hang, done in its order by one thread beside whoever hands it in.

    As long as it does not hang, it is done when `do` returns. The thread ends after a while without work.
    """

    def __init__(self, name: str, most: int, patience: float = PATIENCE) -> None:
        self._name = name
        self._most = most
        self._patience = patience
        self._more = threading.Condition()
        self._waiting: deque[tuple[Callable[[], None], threading.Event]] = deque()
        self._thread: threading.Thread | None = None
        self._leaves = False
        self.hangs = False
        """Whether somebody waited in vain, and nothing was done since."""

    def do(self, work: Callable[[], None], *, last: bool = False) -> bool:
        """Whether it is done, or will be; False if too much waits already, so that it never will.

        `last`: there is no more to come for a while, so the thread need not wait for it.
        """
        done = threading.Event()
        with self._more:
            if len(self._waiting) >= self._most:
                return False
            self._waiting.append((work, done))
            self._leaves = last
            if self._thread is None or not self._thread.is_alive():  # a child after a fork has no thread
                self._start()
            else:
                self._more.notify()
        if not self.hangs and not done.wait(self._patience):
            self.hangs = True
        return True

    def _start(self) -> None:
        self._thread = threading.Thread(target=self._serve, name=f"holdfast-{self._name}", daemon=True)
        try:
            self._thread.start()
        except RuntimeError:  # the interpreter is ending, or no more threads can be had
            self._thread = None
            work, done = self._waiting.popleft()
            done.set()
            work()

    def _serve(self) -> None:
        while True:
            with self._more:
                if not self._waiting and not self._leaves:
                    self._more.wait(LINGER)
                if not self._waiting:
                    self._thread = None
                    return
                work, done = self._waiting[0]
            try:
                work()
            except Exception:
                log.exception("holdfast: %s failed by a fault of its own", self._name)
            with self._more:
                self._waiting.popleft()
                self.hangs = False
            done.set()


# When a long wait is told, and in which words. Pure.
#
# On a terminal one line is rewritten in place; elsewhere a line is written when the wait has turned out to be
# one, and then at growing intervals, so that a night of waiting is a page of log.


SHORT = 3.0
"""Seconds: what is over by then is not worth a line."""
TOLD_AGAIN = (30.0, 60.0, 120.0, 300.0, 600.0, 1800.0, 3600.0)
"""Seconds into the wait at which it is told again; after the last one, as often as that."""
REWRITTEN = 1.0
"""Seconds after which the line on a terminal is rewritten."""


class Waiting(NamedTuple):
    """A wait that goes on."""

    what: str
    """What for, as it follows "waiting for"."""
    waited: float
    longest: float | None
    """Seconds in all; None if it has no limit."""


def in_words(waiting: Waiting) -> str:
    limit = "no limit" if waiting.longest is None else f"at most {span(waiting.longest)}"
    return f"waiting for {waiting.what}: {span(waiting.waited)} so far, {limit}"


def is_due(waited: float, told: float | None) -> bool:
    """Whether a line is due now. `told`: how long the wait had gone on when it was last told; None: never."""
    if told is None:
        return waited >= SHORT
    for at in TOLD_AGAIN:
        if told < at:
            return waited >= at
    return waited - told >= TOLD_AGAIN[-1]


def is_rewritten(waited: float, told: float | None) -> bool:
    """The same for a line that is rewritten in place."""
    return waited >= SHORT if told is None else waited - told >= REWRITTEN


def span(seconds: float) -> str:
    """In whole seconds, minutes or hours: what is rewritten every second has no decimals."""
    whole = round(max(seconds, 0.0))
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02d} s" if whole % 60 else f"{whole // 60} min"
    return f"{whole // 3600} h {whole % 3600 // 60:02d} min"
