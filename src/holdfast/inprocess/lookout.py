"""A member's lookout: a thread that frees the main thread when an iteration ends, and gives signs of life.

Guarantees: once the iteration's end is known here, the main thread is interrupted and the groups are aborted,
again and again until it has left the function; a main thread that makes no progress for `soft_timeout` (and
the scope's allowance, while a first step is not done) ends the iteration for all; and the keeper hears from
this process as long as its interpreter runs, with what it needs to end it if that does not help.
"""

from __future__ import annotations

import contextlib
import logging
import socket
import threading
import time
from collections.abc import Callable
from pathlib import Path

import msgspec

from holdfast.errors import HandedOverError
from holdfast.inprocess.groups import GroupWatch
from holdfast.inprocess.interruption import Interruption
from holdfast.inprocess.messages import Beat, Farewell, Hello, Said
from holdfast.scope import Scope
from holdfast.worker.beats import short_address

log = logging.getLogger("holdfast")

BEAT = 1.0
"""Seconds between two signs of life."""
NOTABLE = 0.5
"""Share of `soft_timeout` from which on it is worth a word where a rank stands."""
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
        """Of the first two one is told, at most once an iteration, that the main thread stood still for so
        many seconds: `on_still` once that is too long, `on_idle` if another rank's fault came before.
        `on_stepped` is called now and then while this rank has done its first step and still has an
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
        self._channel = _connect(keeper)
        self._say(Hello(member=member, pid=pid))
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
        """The main thread makes progress outside of the function."""
        self._last.touch()

    def close(self) -> None:
        """This member needs no keeper any more."""
        self._closing = True
        self._wake.set()
        self._thread.join(PARTING)
        self._say(Farewell())
        self._channel.close()

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
        """Before it is freed: who waits for a rank that stands still is often told of before that one."""
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
            self._channel.send(msgspec.msgpack.encode(word))
        except BlockingIOError:
            pass  # it does not read; what is said next says everything
        except OSError as error:
            self._lose_keeper(error.strerror or str(error))

    def _listen(self) -> None:
        """A keeper says nothing; that it closes, or that nothing is to be read any more, is its word."""
        with contextlib.suppress(BlockingIOError):
            try:
                if not self._channel.recv(1):
                    self._lose_keeper("it has closed the connection")
            except ConnectionError as error:
                self._lose_keeper(error.strerror or str(error))

    def _lose_keeper(self, why: str) -> None:
        """Nobody would end this process if it hung, nor tell of its end: it must not go on."""
        if self.alone or self._closing:
            return
        self.alone = f"the keeper of this node is gone: {why}"
        log.error("holdfast: %s", self.alone)
        scope = self._scope
        if scope is not None and scope.request is not None:
            with contextlib.suppress(Exception):
                scope.request(self.alone)


def _connect(keeper: str) -> socket.socket:
    channel = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        channel.settimeout(CONNECT)
        with short_address(Path(keeper)) as address:
            channel.connect(address)
        channel.setblocking(False)
    except OSError as error:
        channel.close()
        raise HandedOverError(
            f"the keeper of this node cannot be reached at {keeper}: {error.strerror or error}. "
            "It has ended, or was never there; start the run again"
        ) from error
    return channel
