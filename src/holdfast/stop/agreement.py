"""The agreement on where all stop: one rank's part in it, and how it travels where there is no launcher.

Guarantee: the first request counts for all ranks, and the step is named once, by rank 0, after every rank has
promised. A store that does not answer holds up nothing but the thread that asks it; the deadline of the stop
is kept elsewhere.

Every rank looks once a second for one key, through a connection of its own: a store's client makes one call
at a time, and training may sit in one. A rank that is alone needs no store.
"""

from __future__ import annotations

import contextlib
import logging
import math
import threading
import time
from collections.abc import Callable
from typing import Any, Protocol

import msgspec

from holdfast.base import stretch
from holdfast.errors import DecisionTimeoutError
from holdfast.policy import StopRequest, stop_step
from holdfast.record import Store

# One rank's part in the agreement on where all stop: what it has promised, and what was agreed.
#
# Guarantee: once a promise is given, the loop does not go past it before the step is known after which all
# ranks stop; and it never goes past that one. No lock is taken, and nothing is waited for, until somebody
# asks.
#
# It rests on the order of two writes and two reads. Who asks sets `asked` before it reads the loop's counter;
# the loop raises its counter before it reads `asked`. So one of them sees the other: the counter of a loop
# that has not seen the request is in the promise, and a loop whose counter came too late sees the request and
# waits.
#
# How requests, promises and the agreed step travel is not decided here: see train/beats.py, or below where
# there is no launcher.


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


log = logging.getLogger("holdfast")

LOOK = 1.0
"""Seconds between two looks for a request."""
LOOK_FOR_PROMISES = 0.05
"""The same once there is one."""
NAMED = 8
"""Ranks that are named, of those that do not answer."""
AT_ONCE = 256
"""Promises that are looked for in one call."""
ANSWERS = 20.0
"""Seconds for all promises. Threads answer within a second or two, whatever their loops do; a rank that has
not by then is gone, and without a launcher nobody ends the others, which may wait for it in a collective."""
PARTING = 2.0
TOLD = 5.0
"""Seconds that rank 0 waits for the others to know the step before it leaves: it may host the store."""

_REQUEST = "stop/request"
_AT = "stop/at"
_ENDS = "stop/ends"
"""When the scheduler ends the job, in seconds since 1970: the clocks of one job's nodes agree well enough."""


class Heard(Protocol):
    """What is done once a request counts: told to people, and its deadline armed."""

    def __call__(self, request: StopRequest) -> None: ...


def own_connection(store: Any) -> Store:
    """Another client of the same store; the same one where that cannot be had."""
    with contextlib.suppress(AttributeError, RuntimeError, NotImplementedError):
        found: Store = store.clone()
        return found
    log.warning(
        "holdfast: the store (%s) cannot be cloned: requests to stop share its one connection with training",
        type(store).__name__,
    )
    same: Store = store
    return same


class StopOverStore:
    """One rank's thread of the agreement. `look`: asked once a second for a request from elsewhere."""

    def __init__(
        self,
        stopping: Stopping,
        store: Store | None,
        rank: int,
        world: int,
        *,
        heard: Heard,
        agreed: Callable[[int], None],
        unanswered: Callable[[str], None],
        hastened: Callable[[float], None],
        look: Callable[[], StopRequest | None] | None = None,
        every: float = LOOK,
        answers: float = ANSWERS,
    ) -> None:
        """`agreed` is told the step, on rank 0; `unanswered`, on every rank, who kept them from agreeing;
        `hastened`, on the others, the seconds that rank 0 learnt to be left (see `hasten`).

        `store` may be None for a rank that is alone.
        """
        self._stopping = stopping
        self._store = store if world > 1 else None
        self._rank = rank
        self._world = world
        self._missing = list(range(world))
        self._named = False
        """Whether this rank has named the step to others."""
        self._heard = heard
        self._tell_agreed = agreed
        self._unanswered = unanswered
        self._hastened = hastened
        self._ends_at: float | None = None
        self._told_end = False
        self._answers = answers
        self._asked_at = 0.0
        self._look = look
        self._every = every
        self._wish: StopRequest | None = None
        self._request: StopRequest | None = None
        self._promises: list[int] = []
        self._wake = threading.Event()
        self._closing: bool = False
        self._leaving: int | None = None
        self._thread = threading.Thread(target=self._serve, name="holdfast-stop", daemon=True)
        self._thread.start()

    def wish(self, request: StopRequest) -> None:
        """This rank was asked: the whole group is to stop."""
        self._wish = self._wish or request
        self._wake.set()

    def hasten(self, seconds: float) -> None:
        """Rank 0 has learnt that the scheduler ends the job in so many seconds: the others are told."""
        self._ends_at = time.time() + seconds
        self._wake.set()

    def close(self, done: int, *, failed: bool = False) -> None:
        """`done`: this rank does no more than so many steps; who is asked later need not wait for it.

        `failed`: an error ends this rank, and nothing may hold that up.
        """
        self._leaving = None if failed else done
        self._closing = True
        self._wake.set()
        if not failed:
            self._thread.join(PARTING + (TOLD if self._named else 0.0))

    # --- the thread -----------------------------------------------------------------------------------------

    def _serve(self) -> None:
        try:
            store = own_connection(self._store) if self._store is not None else None
            while not self._closing:
                waiting = self._request is not None and self._stopping.stop_at is None
                self._wake.wait(LOOK_FOR_PROMISES if waiting else self._every)
                self._wake.clear()
                self._step(store)
            if store is not None:
                self._part(store)
        except Exception as error:  # noqa: BLE001 - torch's errors of a store have no common base
            if not self._closing and self._stopping.stop_at is None:
                first = str(error).partition("\n")[0]
                log.warning("holdfast: requests to stop are no longer seen: %s", first)

    def _part(self, store: Store) -> None:
        """The last words of a rank that leaves."""
        if self._request is None and self._leaving is not None:
            store.set(_promise(self._rank), str(self._leaving))
        store.set(f"stop/knows/{self._rank}", "1")  # or need not know any more
        deadline = time.monotonic() + TOLD
        waiting = list(range(1, self._world)) if self._named else []
        while waiting and time.monotonic() < deadline:
            if store.check([f"stop/knows/{rank}" for rank in waiting[:AT_ONCE]]):
                del waiting[:AT_ONCE]
            else:
                time.sleep(LOOK_FOR_PROMISES)

    def _step(self, store: Store | None) -> None:
        if self._request is None:
            self._request = self._find(store)
            if self._request is not None:
                self._prepare(store, self._request)
        if self._request is not None and self._stopping.stop_at is None:
            self._agree(store)
            if self._stopping.stop_at is None and time.monotonic() - self._asked_at > self._answers:
                self._asked_at = math.inf  # once
                self._unanswered(self._who_is_missing(store))

        if self._request is not None and store is not None and not self._told_end:
            self._pass_end_on(store)

    def _pass_end_on(self, store: Store) -> None:
        """One process asks the scheduler, and all mind what it says."""
        if self._rank == 0 and self._ends_at is not None:
            self._told_end = True
            store.set(_ENDS, repr(self._ends_at))
        elif self._rank != 0 and store.check([_ENDS]):
            self._told_end = True
            self._hastened(float(store.get(_ENDS)) - time.time())

    def _who_is_missing(self, store: Store | None) -> str:
        silent = self._silent(store) if store is not None else []
        named = ", ".join(map(str, silent[:NAMED])) + (" and more" if len(silent) > NAMED else "")
        who = f"rank {named}" if len(silent) == 1 else f"ranks {named}" if silent else "rank 0"
        return f"{who} did not answer within {self._answers:g} s"

    def _silent(self, store: Store) -> list[int]:
        """Those that have not promised, as many as are named: every rank asks, and there may be very many."""
        found: list[int] = []
        for start in range(0, len(self._missing), AT_ONCE):
            some = self._missing[start : start + AT_ONCE]
            if not store.check([_promise(rank) for rank in some]):
                found += [rank for rank in some if not store.check([_promise(rank)])]
            if len(found) > NAMED:
                break
        return found

    def _find(self, store: Store | None) -> StopRequest | None:
        wish = self._wish or (self._look() if self._look is not None else None)
        if store is None:
            return wish
        if wish is not None:
            raw = store.compare_set(_REQUEST, "", msgspec.json.encode(wish).decode())
        elif store.check([_REQUEST]):
            raw = store.get(_REQUEST)
        else:
            return None
        return msgspec.json.decode(raw, type=StopRequest)

    def _prepare(self, store: Store | None, request: StopRequest) -> None:
        self._asked_at = time.monotonic()
        promise = self._stopping.prepare(request.detail)
        if store is None:
            self._promises = [promise]
            self._missing = []
        else:
            store.set(_promise(self._rank), str(promise))
        self._heard(request)  # after the promise: others wait for that one

    def _agree(self, store: Store | None) -> None:
        if self._rank != 0 and store is not None:
            if store.check([_AT]):
                self._stopping.agreed(int(store.get(_AT)))
                store.set(f"stop/knows/{self._rank}", "1")
            return
        while self._missing and store is not None:
            some = self._missing[:AT_ONCE]
            if not store.check([_promise(rank) for rank in some]):
                return
            self._promises += [int(store.get(_promise(rank))) for rank in some]
            del self._missing[: len(some)]
        step = stop_step(self._promises)
        if store is not None:
            store.set(_AT, str(step))
            self._named = True
        self._stopping.agreed(step)
        self._tell_agreed(step)


def _promise(rank: int) -> str:
    return f"stop/promise/{rank}"
