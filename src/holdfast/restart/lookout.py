"""A member's lookout: frees the main thread when an iteration ends, and gives signs of life.

Guarantees: once the iteration's end is known here, the main thread is interrupted and the groups are aborted,
again and again until it has left the function; a main thread that makes no progress for `soft_timeout` (plus
the scope's allowance, while a first step is not done) ends the iteration for all; and as long as this
process's interpreter runs, the keeper hears from it what it needs to end it if all that does not help.
"""

from __future__ import annotations

import contextlib
import ctypes
import logging
import queue
import signal
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

from holdfast.base import Scope
from holdfast.errors import HandedOverError, UsageError
from holdfast.process import Garbage, Gone, Packets
from holdfast.restart.groups import GroupWatch
from holdfast.restart.messages import Beat, Farewell, MemberHello, Said

if TYPE_CHECKING:
    from torch.distributed import Store


# Waiting for a key of the store without asking again and again, and without holding anybody up.
#
# The waits are made by a thread with a connection of its own: a store's client serves one call at a time, and
# a main thread that waits in C sees no signals. Ten thousand polling members would be a load, so none polls.
# The connection is kept: torch looks up the name of the other side for every new one, and a name service may
# take seconds to answer, or not answer at all.


SLICE = 0.25
"""Seconds between two signs of life of a thread that waits for another one."""
CALL = 600.0
"""Seconds for one wait at the store; it is repeated as long as somebody is interested."""


class KeyWatch:
    """The wait for one key, which begins when this is made."""

    def __init__(self, key: str, deadline: float) -> None:
        self.key = key
        self.deadline = deadline
        self.value: bytes | None = None
        self.error = ""
        """Why the value will not be learned any more."""
        self._told: list[Callable[[], None]] = []
        self._lock = threading.Lock()
        self._over = threading.Event()

    def tell(self, then: Callable[[], None]) -> None:
        """Call this once the wait is over, from the thread that waits; at once if it is already over."""
        with self._lock:
            if not self._over.is_set():
                self._told.append(then)
                return
        then()

    def wait(self, timeout: float, touch: Callable[[], None]) -> bool:
        """Wait at most this long, in slices, so that the thread handles signals; returns whether it is over.

        `touch` is called between the slices: a thread that waits here does not hang.
        """
        deadline = time.monotonic() + timeout
        while not self._over.wait(max(0.0, min(SLICE, deadline - time.monotonic()))):
            touch()
            if time.monotonic() >= deadline:
                return False
        return True

    def end(self, value: bytes | None, error: str = "") -> None:
        self.value, self.error = value, error
        with self._lock:
            self._over.set()
            told = self._told
        for then in told:
            then()


class KeyWatcher:
    """Makes the waits of a member, one after the other: keys asked for later also appear later."""

    def __init__(self, client: Store) -> None:
        """`client` is used by nobody else."""
        self._client = client
        self._asked: queue.SimpleQueue[KeyWatch | None] = queue.SimpleQueue()
        threading.Thread(target=self._serve, name="holdfast-key-watcher", daemon=True).start()

    def watch(self, key: str, within: float = float("inf")) -> KeyWatch:
        """Wait for this key; without `within`, until the key is there or the store is gone."""
        asked = KeyWatch(key, time.monotonic() + within)
        self._asked.put(asked)
        return asked

    def close(self) -> None:
        """End the thread without waiting for it: it may be in a wait, which ends with the process."""
        self._asked.put(None)

    def _serve(self) -> None:
        while (asked := self._asked.get()) is not None:
            try:
                asked.end(self._learn(asked))
            except Exception as error:  # noqa: BLE001 - whatever it is, the waiting thread gets it
                asked.end(None, str(error).partition("\n")[0] or type(error).__name__)

    def _learn(self, asked: KeyWatch) -> bytes:
        while True:
            left = asked.deadline - time.monotonic()
            try:
                self._client.wait([asked.key], timedelta(seconds=max(0.001, min(CALL, left))))
                return self._client.get(asked.key)
            except RuntimeError as error:
                if "timeout" not in str(error).lower() or time.monotonic() >= asked.deadline:
                    raise


# How another thread makes the main thread leave the function.
#
# A real-time signal to the main thread breaks whatever it waits for in Python (a sleep, a lock, a read: PEP
# 475 lets the handler's exception through); otherwise its handler runs before the next bytecode. The handler
# asks the scope, in the main thread itself, so there is no gap between checking that leaving is safe and
# leaving. An exception set from outside would leave such a gap.
#
# None of this reaches C code that waits with signals blocked or retried (a collective): see groups.py for
# that; and what nothing can free is ended by the keeper.


INTERRUPT = signal.SIGRTMAX - 5
"""Far from the signals that people, schedulers and the C library use."""
AGAIN = 1.0
"""Seconds between two exceptions: code that unwinds needs time, and code that swallowed one gets another."""

_WHOLE = frozenset(
    {"<frozen importlib._bootstrap>", "<frozen importlib._bootstrap_external>", logging.__file__}
)
"""Code that must not be interrupted half-way: a module that was half imported stays so for good, and a log
whose lock was not given back takes nothing more. A thread that hangs in there is the keeper's affair."""

_Pending = ctypes.PYFUNCTYPE(ctypes.c_int, ctypes.c_void_p)


class Interruption:
    """Installed in the main thread for as long as there are iterations."""

    def __init__(self) -> None:
        if threading.current_thread() is not threading.main_thread():
            raise UsageError(
                "a restartable function was called outside the main thread, but only there can it be "
                "interrupted. Call it in the main thread"
            )
        self._scope: Scope | None = None
        self._raised = 0.0
        self._looking = False
        self._touch = _Pending(self._progress)
        self._main = threading.main_thread().ident or 0
        self._before: Any = signal.signal(INTERRUPT, self._handle)

    def open(self, scope: Scope) -> None:
        """From here on, an exception may end the function."""
        self._raised = 0.0
        self._scope = scope

    def shut(self) -> None:
        """From here on, nothing is raised any more. The main thread may still be interrupted right here."""
        self._scope = None

    def send(self) -> None:
        """Make the main thread leave the function, if it is open. From any thread."""
        if self._scope is not None:
            signal.pthread_kill(self._main, INTERRUPT)

    def look(self) -> None:
        """Have the main thread touch the open scope as soon as it runs Python again. From any thread."""
        if self._scope is not None and not self._looking:
            self._looking = True  # one at a time: the interpreter has room for only a few
            if ctypes.pythonapi.Py_AddPendingCall(self._touch, None) != 0:
                self._looking = False

    def close(self) -> None:
        self.shut()
        signal.signal(INTERRUPT, self._before)

    def _progress(self, unused: object) -> int:
        del unused
        self._looking = False
        scope = self._scope
        if scope is not None:
            scope.touch()
        return 0

    def _handle(self, number: int, frame: FrameType | None) -> None:
        del number
        scope, now = self._scope, time.monotonic()
        if scope is not None and now - self._raised >= AGAIN and not _in_what_stays_whole(frame):
            self._raised = now if scope.leaves else 0.0
            scope.interrupt()


def _in_what_stays_whole(frame: FrameType | None) -> bool:
    while frame is not None:
        if frame.f_code.co_filename in _WHOLE:
            return True
        frame = frame.f_back
    return False


log = logging.getLogger("holdfast")

BEAT = 1.0
"""Seconds between two signs of life."""
NOTABLE = 0.5
"""Share of `soft_timeout` after which it is worth logging where a rank stands."""
NUDGE = 0.2
"""Seconds between two interruptions of a main thread that has not left."""
CONNECT = 10.0
PARTING = 2.0


class Lookout:
    """One for all iterations of a member."""

    def __init__(
        self,
        keeper: str,
        member: int,
        pid: int,
        interruption: Interruption,
        *,
        soft_timeout: float,
        on_still: Callable[[float], None],
        on_idle: Callable[[float], None],
        on_stepped: Callable[[Scope], None],
    ) -> None:
        """At most once per iteration, one of the first two is called with the seconds for which the main
        thread has stood still: `on_still` once that is too long, `on_idle` if another rank's fault came
        first. `on_stepped` is called now and then while this rank has done its first step and still has an
        allowance."""
        self.alone = ""
        """Why there is no keeper any more; empty while there is one."""
        self._interruption = interruption
        self._soft_timeout = soft_timeout
        self._on_still = on_still
        self._on_idle = on_idle
        self._on_stepped = on_stepped
        self._scope: Scope | None = None
        self._groups: GroupWatch | None = None
        self._iteration = 0
        self._asked_at = 0.0
        self._still = False
        self._last = Scope(iteration=0, member=member, rank=-1, world_size=0)
        self._wake = threading.Event()
        self._closing = False
        self._lock = threading.Lock()
        self._line = _connect(keeper)
        self._say(MemberHello(member=member, pid=pid))
        self._thread = threading.Thread(target=self._run, name="holdfast-lookout", daemon=True)
        self._thread.start()

    # --- by the main thread ---------------------------------------------------------------------------------

    def begin(self, scope: Scope, groups: GroupWatch) -> None:
        """The function is about to be entered."""
        with self._lock:
            self._scope = self._last = scope
            self._groups = groups
            self._iteration = scope.iteration
            self._asked_at, self._still = 0.0, False
        self._wake.set()

    def left(self) -> None:
        """The main thread has left the function."""
        with self._lock:
            self._scope = self._groups = None

    def between(self, iteration: int) -> None:
        """This member waits for the plan of an iteration, or is a reserve in it."""
        with self._lock:
            self._iteration = iteration

    def touch(self) -> None:
        """The main thread makes progress outside the function."""
        self._last.touch()

    def close(self) -> None:
        """This member no longer needs a keeper."""
        self._closing = True
        self._wake.set()
        self._thread.join(PARTING)
        self._say(Farewell())
        self._line.close()

    # --- by any thread --------------------------------------------------------------------------------------

    def ask(self, why: str) -> None:
        """The iteration has ended: the main thread is to leave the function."""
        with self._lock:
            if self._scope is None:
                return
            self._scope.ask(why)
            self._asked_at = self._asked_at or time.monotonic()
        self._wake.set()

    # --- the thread -----------------------------------------------------------------------------------------

    def _run(self) -> None:
        beaten = 0.0
        while not self._closing:
            self._wake.wait(NUDGE if self._asked_at else BEAT)
            self._wake.clear()
            with self._lock:
                scope, groups = self._scope, self._groups
            if scope is not None and groups is not None and scope.asked:
                self._remark(scope)
                groups.abort()
                self._interruption.send()
            elif scope is not None:
                self._interruption.look()
                if scope.stepped and scope.allowance:
                    self._on_stepped(scope)
                self._judge(scope)
            now = time.monotonic()
            if now - beaten >= BEAT / 2:
                beaten = now
                self._beat(scope, now)
                self._listen()

    def _judge(self, scope: Scope) -> None:
        idle = scope.idle(time.monotonic())
        if idle > self._soft_timeout + scope.allowance and not self._still:
            self._still = True
            self._on_still(idle)

    def _remark(self, scope: Scope) -> None:
        """Say before it is freed that it stands still: a rank waiting for it is often reported sooner."""
        if self._still:
            return
        self._still = True
        idle = scope.idle(time.monotonic())
        if idle > self._soft_timeout * NOTABLE:
            self._on_idle(idle)

    def _beat(self, scope: Scope | None, now: float) -> None:
        last = scope or self._last
        leaving = now - self._asked_at if scope is not None and self._asked_at else 0.0
        beat = Beat(
            iteration=self._iteration,
            rank=scope.rank if scope is not None else -1,
            inside=scope is not None,
            idle=last.idle(now),
            allowance=last.allowance if scope is not None else 0.0,
            leaving=leaving,
            step=last.step,
        )
        self._say(beat)

    def _say(self, word: Said) -> None:
        try:
            self._line.send(word)  # if the keeper does not read it, the next message says everything
        except Gone as error:
            self._lose_keeper(str(error))

    def _listen(self) -> None:
        """A keeper sends nothing; all that it can say is to close the connection, or its reading side."""
        try:
            self._line.receive()
        except Garbage:
            pass
        except Gone as error:
            self._lose_keeper(str(error))

    def _lose_keeper(self, why: str) -> None:
        """Nobody would end this process if it hung, nor report its end: it must not go on."""
        if self.alone or self._closing:
            return
        self.alone = f"the keeper of this node is gone: {why}"
        log.error("holdfast: %s", self.alone)
        scope = self._scope
        if scope is not None and scope.request is not None:
            with contextlib.suppress(Exception):
                scope.request(self.alone)


def _connect(keeper: str) -> Packets[None]:
    try:
        return Packets.connect(Path(keeper), None, CONNECT)
    except OSError as error:
        raise HandedOverError(
            f"the keeper of this node cannot be reached at {keeper}: {error.strerror or error}. "
            "It has ended, or never ran; start the run again"
        ) from error
