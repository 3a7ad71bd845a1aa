"""Calls that may hang, each in a thread that is left behind if it does; and when to report a long wait.

Guarantee: whoever waits for such a call goes on when its time is up, whatever the call does. A dead mount, a
sick driver or a store whose host is stopped cannot be interrupted; a stuck thread ends with its process.
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
"""Seconds within which a full process table may have room again."""
RETRY = 0.1
_NO_THREAD = ("can't start new thread", "Resource temporarily unavailable")
"""Words of such a RuntimeError: Python's own, and those of a C++ library that wanted a thread (a store)."""
PATIENCE = 0.5
"""Seconds that a healthy file system may take to answer; after that, whoever asked goes on without."""
LINGER = 5.0
"""Seconds that a thread waits for more to do."""


def is_table_full(error: BaseException) -> bool:
    """Whether an error means that no process or thread could be started for lack of room."""
    if isinstance(error, OSError):
        return error.errno == errno.EAGAIN
    return isinstance(error, RuntimeError) and any(words in str(error) for words in _NO_THREAD)


class Bounded(Generic[T]):
    """One call, which is under way as soon as this exists."""

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
        """Whether it has returned or raised; waits for that at most so many seconds."""
        self._thread.join(max(0.0, seconds))
        return not self._thread.is_alive()

    def result(self) -> T:
        """What it returned or raised. Ask only once it has ended."""
        if self._raised is not None:
            raise self._raised
        return self._returned[0]


class Look(Generic[T]):
    """A look taken again and again, one at a time. One that hangs yields no news, but holds nobody up."""

    def __init__(self, look: Callable[[], T], name: str, patience: float = PATIENCE) -> None:
        self._look = look
        self._name = name
        self._patience = patience
        self._under_way: Bounded[T] | None = None

    def take(self) -> Bounded[T] | None:
        """A look that has ended, to be asked for its result; None while one hangs. Only the first who asks
        waits for it, and not for long."""
        patience = 0.0
        if self._under_way is None:
            self._under_way, patience = Bounded(self._look, self._name), self._patience
        if not self._under_way.ended(patience):
            return None
        found, self._under_way = self._under_way, None
        return found


class Aside:
    """Work on storage that may hang, done in order by one thread beside whoever hands it in.

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
        """Whether somebody waited in vain and nothing has been done since."""

    def do(self, work: Callable[[], None], *, last: bool = False) -> bool:
        """Do the work. False if too much is waiting already, so that it will never be done.

        `last`: no more will come for a while, so the thread need not wait for it.
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


# When a long wait is reported, and in which words. Pure.
#
# On a terminal one line is rewritten in place; elsewhere a line is written once the wait has turned out to be
# long, and then at growing intervals, so that a night of waiting makes a page of log.


SHORT = 3.0
"""Seconds: a wait that is over by then is not worth a line."""
TOLD_AGAIN = (30.0, 60.0, 120.0, 300.0, 600.0, 1800.0, 3600.0)
"""Seconds into the wait at which it is reported again; after the last of these, every so many seconds."""
REWRITTEN = 1.0
"""Seconds after which the line on a terminal is rewritten."""


class Waiting(NamedTuple):
    """A wait that is still going on."""

    what: str
    """What is waited for, worded to follow "waiting for"."""
    waited: float
    longest: float | None
    """Seconds in all; None if it has no limit."""


def in_words(waiting: Waiting) -> str:
    limit = "no limit" if waiting.longest is None else f"at most {span(waiting.longest)}"
    return f"waiting for {waiting.what}: {span(waiting.waited)} so far, {limit}"


def is_due(waited: float, told: float | None) -> bool:
    """Whether a line is due now. `told`: seconds into the wait at the last line; None if there was none."""
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
    """In whole seconds, minutes or hours: a line that is rewritten every second needs no decimals."""
    whole = round(max(seconds, 0.0))
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02d} s" if whole % 60 else f"{whole // 60} min"
    return f"{whole // 3600} h {whole % 3600 // 60:02d} min"
