"""One agreement on where all stop, over any board its parties can reach: who asks, who promises, who names.

Guarantee: the first request counts for all. Every party gives one word, its promise; once all have given
theirs, party 0 names, once, the step after which all stop. The words are carried by a board: memory for a
party that is alone, the ranks' store where there is no launcher, or the attempt that agents share
(launch/stops.py).

A store that does not answer holds up nothing but the thread that asks it; the deadline of the stop is kept
elsewhere. In-process restarts need none of this between two iterations: nobody is in a step then, and each
member says at the barrier, where the one plan that all follow is made, whether it was asked to stop.
"""

from __future__ import annotations

import contextlib
import json
import logging
import math
import signal
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, Generic, Protocol, TypeVar

import msgspec

from holdfast.base import stretch
from holdfast.errors import DecisionTimeoutError
from holdfast.policy import Agreed, Promised, Source, StopRequest, agree
from holdfast.process import from_whom
from holdfast.record import DecisionStore

R = TypeVar("R")
T = TypeVar("T")

AT_ONCE = 256
"""How many words one call looks for."""
_REQUEST = "stop/request"
_AGREED = "stop/agreed"


class Board(Protocol):
    """Where the parties leave words for each other. Each is written once."""

    def fix(self, key: str, text: str, /) -> bytes:
        """Write this unless the key already has a text; returns the key's text."""

    def read(self, keys: Sequence[str], /) -> Mapping[str, bytes]:
        """The texts of these keys; if some keys have none yet, maybe no text at all."""


class Alone(Board):
    """For a party that has nobody to agree with."""

    def __init__(self) -> None:
        self._words: dict[str, bytes] = {}

    def fix(self, key: str, text: str, /) -> bytes:
        return self._words.setdefault(key, text.encode())

    def read(self, keys: Sequence[str], /) -> Mapping[str, bytes]:
        return {key: self._words[key] for key in keys if key in self._words}


class OverStore(Board):
    """For ranks that share a store."""

    def __init__(self, store: DecisionStore) -> None:
        self._store = store

    def fix(self, key: str, text: str, /) -> bytes:
        return self._store.compare_set(key, "", text)

    def read(self, keys: Sequence[str], /) -> Mapping[str, bytes]:
        return {key: self._store.get(key) for key in keys} if self._store.check(list(keys)) else {}


class StopAgreement(Generic[R]):
    """One party's part in the agreement. Nothing here waits, except for the board to answer."""

    def __init__(self, board: Board | None, party: int, parties: int, kind: type[R]) -> None:
        """`board`: None for a party that is alone; `kind`: the type in which requests are passed on."""
        self.request: R | None = None
        """The request that counts."""
        self.hastened = 0
        """How often the end has been brought forward since."""
        self._board = board if board is not None else Alone()
        self._party = party
        self._kind = kind
        self._words: dict[int, Promised] = {}
        self._missing = list(range(parties))

    def ask(self, mine: R | None) -> R | None:
        """The request that counts, if there is one: this party's own, unless another one's came first."""
        raw = self._fix(_REQUEST, mine) if mine is not None else self._read(_REQUEST)
        self.request = _decoded(raw, self._kind) if raw else None
        return self.request

    def say(self, word: Promised) -> None:
        """Give this party's word. The first counts."""
        self._fix(_word(self._party), word)

    def named(self, gone: Collection[int] = ()) -> Agreed | None:
        """What all do, once known: party 0 names it when all parties that are not `gone` have spoken."""
        raw: bytes | None
        if self._party != 0:
            raw = self._read(_AGREED)
        elif self._all_spoke(gone):
            said = (word for party, word in self._words.items() if party not in gone)
            raw = self._fix(_AGREED, agree(said))
        else:
            return None
        return _decoded(raw, Agreed) if raw else None

    def _all_spoke(self, gone: Collection[int]) -> bool:
        size = 1  # while the first of them is silent, there is no need to ask for the rest
        while some := [party for party in self._missing if party not in gone][:size]:
            said = self._board.read([_word(party) for party in some])
            for party in some:
                if (raw := said.get(_word(party))) is not None:
                    self._words[party] = _decoded(raw, Promised)
            self._missing = [party for party in self._missing if party not in self._words]
            if len(said) < len(some):
                return False
            size = AT_ONCE
        return True

    def silent(self, most: int) -> list[int]:
        """Parties that have not spoken. Stops soon after `most`: every party asks, and there may be many."""
        silent: list[int] = []
        for start in range(0, len(self._missing), AT_ONCE):
            some = self._missing[start : start + AT_ONCE]
            if len(self._board.read([_word(party) for party in some])) < len(some):
                silent += [party for party in some if self._read(_word(party)) is None]
            if len(silent) > most:
                break
        return silent

    def hasten(self, end: object) -> None:
        """Party 0 has learned of a sooner end; tell the others."""
        self._fix(self._sooner, end)
        self.hastened += 1

    def sooner(self, kind: type[T]) -> T | None:
        """A sooner end, if party 0 has announced one that this party does not know yet."""
        raw = self._read(self._sooner)
        self.hastened += raw is not None
        return _decoded(raw, kind) if raw is not None else None

    @property
    def _sooner(self) -> str:
        return f"stop/sooner/{self.hastened}"

    def _fix(self, key: str, value: object) -> bytes:
        # Not msgspec's own JSON: it refuses the undecodable bytes that a path may have.
        return self._board.fix(key, json.dumps(msgspec.to_builtins(value)))

    def _read(self, key: str) -> bytes | None:
        return self._board.read([key]).get(key)


def _decoded(raw: bytes, kind: type[T]) -> T:
    return msgspec.convert(json.loads(raw), type=kind)


def _word(party: int) -> str:
    return f"stop/word/{party}"


# A rank's promise, and the step that was agreed on: what its loop shares with the agreement.
#
# Guarantee: once a promise is given, the loop does not go past it until it knows the step after which all
# ranks stop; and it never goes past that step. Until somebody asks, no lock is taken and nothing is waited
# for.
#
# It rests on the order of two writes and two reads. The asking thread sets `asked` before it reads the loop's
# counter; the loop raises its counter before it reads `asked`. So one of them sees the other: if the loop has
# not seen the request, its counter is in the promise; if its counter came too late for that, it sees the
# request and waits.


class LastStep:
    """Shared by the loop's thread and the one that hears of requests. `counter`: steps completed so far."""

    def __init__(self, counter: Callable[[], int]) -> None:
        self.asked = False
        """Read by the loop at every boundary; watching for a stop costs no more than that."""
        self.why = ""
        self.since = 0.0
        """When the stop was asked for, by time.monotonic()."""
        self._counter = counter
        self._begun = False
        self._promise: int | None = None
        self._stop_at: int | None = None
        self._changed = threading.Condition()

    # --- for the thread that hears of requests --------------------------------------------------------------

    def prepare(self, why: str, ago: float = 0.0) -> int:
        """A stop was asked for `ago` seconds ago: promise a step not to go past until the last step is known.

        A second call returns the same promise.
        """
        with self._changed:
            if self._promise is None:
                self.why, self.since = why, time.monotonic() - ago
                self.asked = True  # before the counter is read: see above
                self._promise = self._counter() + self._begun
            return self._promise

    def agreed(self, step: int) -> None:
        """Every rank has promised, and all stop after this step. The first call counts."""
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

        Where the promise ends, it waits at most `patience` seconds for the others' promises to be counted.
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
        """Seconds since the stop was asked for."""
        return time.monotonic() - self.since if self.asked else 0.0


# The thread with which a rank takes part in the agreement where no agent speaks for it.
#
# Every rank looks once a second for a request, through a connection of its own: a store's client makes one
# call at a time, and training may be blocked in one. A rank that is alone needs no store.


log = logging.getLogger("holdfast")

LOOK = 1.0
"""Seconds between two looks for a request."""
LOOK_FOR_PROMISES = 0.05
"""The same once there is a request."""
NAMED = 8
"""How many of the ranks that do not answer are named."""
ANSWERS = 20.0
"""Seconds for all promises. Threads answer within a second or two, whatever their loops do; a rank that has
not answered by then is gone, and without a launcher nobody ends the others, which may be waiting for it in a
collective."""
PARTING = 2.0
TOLD = 5.0
"""Seconds for which rank 0 waits, before it leaves, until the others know the step: it may host the store."""


def signalled(number: signal.Signals, sender: str, rank: int, node: str) -> StopRequest:
    """What a signal to a rank asks for."""
    return StopRequest(
        source=Source.SIGNAL,
        detail=f"{number.name}{from_whom(sender)} to rank {rank}",
        signal=number.name,
        sender=sender,
        node=node,
        rank=rank,
        at=time.time(),
    )


def own_connection(store: Any) -> DecisionStore:
    """Another client of the same store; this one if the store cannot be cloned."""
    with contextlib.suppress(AttributeError, RuntimeError, NotImplementedError):
        another: DecisionStore = store.clone()
        return another
    log.warning(
        "holdfast: the store (%s) cannot be cloned: requests to stop share its one connection with training",
        type(store).__name__,
    )
    same: DecisionStore = store
    return same


class RankStop:
    """One rank's part, on a thread. `look`: called once a second for a request from elsewhere."""

    def __init__(
        self,
        stopping: LastStep,
        store: DecisionStore | None,
        rank: int,
        world: int,
        *,
        heard: Callable[[StopRequest], None],
        agreed: Callable[[int], None],
        unanswered: Callable[[str], None],
        hastened: Callable[[float], None],
        look: Callable[[], StopRequest | None] | None = None,
        every: float = LOOK,
        answers: float = ANSWERS,
    ) -> None:
        """`heard` gets the request that counts, on every rank; `agreed` the step, on rank 0; `unanswered`, on
        every rank, who kept them from agreeing; `hastened`, on every rank, the seconds that are left
        according to rank 0 (see `hasten`). `store` may be None for a rank that is alone.
        """
        self._stopping = stopping
        self._store = store if world > 1 else None
        self._rank = rank
        self._world = world
        self._named = False
        """Whether this rank has named the step to others."""
        self._heard = heard
        self._tell_agreed = agreed
        self._unanswered = unanswered
        self._hastened = hastened
        self._ends_at: float | None = None
        """Seconds since 1970: the clocks of one job's nodes agree well enough for that."""
        self._answers = answers
        self._asked_at = 0.0
        self._look = look
        self._every = every
        self._wish: StopRequest | None = None
        self._wake = threading.Event()
        self._closing: bool = False
        self._leaving: int | None = None
        self._thread = threading.Thread(target=self._serve, name="holdfast-stop", daemon=True)
        self._thread.start()

    def wish(self, request: StopRequest) -> None:
        """This rank was asked to stop, so the whole group is to stop."""
        self._wish = self._wish or request
        self._wake.set()

    def hasten(self, seconds: float) -> None:
        """Rank 0 has learned that the scheduler ends the job in so many seconds; tell all ranks."""
        self._hastened(seconds)
        self._ends_at = time.time() + seconds
        self._wake.set()

    def close(self, done: int, *, failed: bool = False) -> None:
        """`done`: this rank does no more than this many steps; a later request need not wait for it.

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
            board = OverStore(store) if store is not None else None
            agreement = StopAgreement(board, self._rank, self._world, StopRequest)
            while not self._closing:
                waiting = agreement.request is not None and self._stopping.stop_at is None
                self._wake.wait(LOOK_FOR_PROMISES if waiting else self._every)
                self._wake.clear()
                self._step(agreement, store)
            if store is not None:
                self._part(agreement, store)
        except Exception as error:  # noqa: BLE001 - torch's errors of a store have no common base
            if not self._closing and self._stopping.stop_at is None:
                first = str(error).partition("\n")[0]
                log.warning("holdfast: requests to stop are no longer seen: %s", first)

    def _part(self, agreement: StopAgreement[StopRequest], store: DecisionStore) -> None:
        """The last words of a rank that leaves."""
        if agreement.request is None and self._leaving is not None:
            agreement.say(Promised(step=self._leaving))
        store.set(_knows(self._rank), "1")  # or no longer needs to know
        deadline = time.monotonic() + TOLD
        waiting = list(range(1, self._world)) if self._named else []
        while waiting and time.monotonic() < deadline:
            if store.check([_knows(rank) for rank in waiting[:AT_ONCE]]):
                del waiting[:AT_ONCE]
            else:
                time.sleep(LOOK_FOR_PROMISES)

    def _step(self, agreement: StopAgreement[StopRequest], store: DecisionStore | None) -> None:
        if agreement.request is None:
            request = agreement.ask(self._wish or (self._look() if self._look is not None else None))
            if request is None:
                return
            self._asked_at = time.monotonic()
            agreement.say(Promised(step=self._stopping.prepare(request.detail)))
            self._heard(request)  # after the promise, for which others wait
        if self._stopping.stop_at is None:
            self._agree(agreement, store)
        if self._rank != 0:  # rank 0 alone asks the scheduler, and all heed the answer
            ends_at = agreement.sooner(float)
            if ends_at is not None:
                self._hastened(ends_at - time.time())
        elif self._ends_at is not None:
            agreement.hasten(self._ends_at)
            self._ends_at = None

    def _agree(self, agreement: StopAgreement[StopRequest], store: DecisionStore | None) -> None:
        agreed = agreement.named()
        if agreed is not None and agreed.step is not None:
            self._named = self._rank == 0 and store is not None
            self._stopping.agreed(agreed.step)
            if self._rank == 0:
                self._tell_agreed(agreed.step)
            elif store is not None:
                store.set(_knows(self._rank), "1")
        elif time.monotonic() - self._asked_at > self._answers:
            self._asked_at = math.inf  # once
            self._unanswered(self._who_is_missing(agreement))

    def _who_is_missing(self, agreement: StopAgreement[StopRequest]) -> str:
        silent = agreement.silent(NAMED)
        named = ", ".join(map(str, silent[:NAMED])) + (" and more" if len(silent) > NAMED else "")
        who = f"rank {named}" if len(silent) == 1 else f"ranks {named}" if silent else "rank 0"
        return f"{who} did not answer within {self._answers:g} s"


def _knows(rank: int) -> str:
    return f"stop/knows/{rank}"
