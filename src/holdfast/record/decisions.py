"""One decision for all: fixed once, durable, read by everyone.

Guarantee: for one name within one attempt, every process that returns from `decide` or `await_decision`
returns the same decision. It is written to the control directory first and then fixed by compare-and-set
in the store, so whatever a process has read is already durable. Whoever does not learn it before the
deadline, or can no longer reach the store, raises DecisionTimeoutError; it never chooses for itself.

The store can be any c10d store; decisions need only a few of its methods. Whoever only reads what was decided
needs no torch, so only the functions that reach other ranks import it.
"""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Protocol, TypeVar

import msgspec

from holdfast.base import Bounded, stretch
from holdfast.errors import ControlError, DecisionTimeoutError, UsageError
from holdfast.record.directory import ControlDirectory, create_record, read_record
from holdfast.record.lease import Fence

POLL_SECONDS = 0.02

D = TypeVar("D", bound=msgspec.Struct)
R = TypeVar("R")

RECOVERY = "recovery"
"""The decision about what to do after an attempt has failed."""

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,99}")


class DecisionStore(Protocol):
    """The part of torch.distributed.Store that decisions need."""

    def compare_set(self, key: str, expected: str, desired: str, /) -> bytes: ...

    def check(self, keys: list[str], /) -> bool: ...

    def get(self, key: str, /) -> bytes: ...

    def set(self, key: str, value: str, /) -> None: ...


def read_key(store: DecisionStore, key: str, timeout: float, what: str) -> bytes:
    """Wait for a key by polling (a blocking `get` would block the client for other threads too)."""
    deadline = time.monotonic() + timeout
    left = threading.Event()

    def poll() -> bytes | None:
        pause = POLL_SECONDS / 10
        while not store.check([key]):
            if time.monotonic() >= deadline or left.wait(pause):
                return None
            pause = min(pause * 2, POLL_SECONDS)
        return store.get(key)

    try:
        found = within(poll, timeout + 10 * POLL_SECONDS, what)
    finally:
        left.set()  # nobody is waiting for it any more
    if found is None:
        raise DecisionTimeoutError(
            f"waited {timeout:g} s for {what} and did not learn it. The rank that should have answered "
            "is gone or stuck; this rank ends rather than choose alone"
        )
    return found


def await_key(
    store: DecisionStore, key: str, timeout: float, what: str, *, patience: float, given_up: Callable[[], str]
) -> bytes:
    """Like `read_key`, but ends as soon as `given_up` says why the answer can no longer come.

    `patience`: how long the store itself may take to answer.
    """
    deadline = time.monotonic() + timeout
    while not within(lambda: store.check([key]), patience, what):
        why = given_up()
        if why:
            raise DecisionTimeoutError(f"gave up waiting for {what}: {why}")
        if time.monotonic() >= deadline:
            raise DecisionTimeoutError(
                f"waited {timeout:g} s for {what} and did not learn it. The node that should have answered "
                "is gone or stuck; this one ends rather than choose alone"
            )
        time.sleep(stretch(POLL_SECONDS))
    return within(lambda: store.get(key), patience, what)


def within(call: Callable[[], R], timeout: float, what: str) -> R:
    """Call the store, but not for longer than `timeout`, whatever the store does.

    TCPStore's own timeout does not cover `check` and `compare_set`: with its host stopped or cut off they
    never return. So the call is made in a thread that may be left behind, as its process ends soon. In a
    restartable function that has to be left, it is left behind at once.
    """
    started = time.monotonic()
    called = Bounded(call, "store")
    while not called.ended() and (left := started + timeout - time.monotonic()) > 0:
        called.ended(stretch(left))
    if not called.ended() and time.monotonic() - started > timeout + 1.0:
        called.ended(timeout)  # this process did not run for a while, so the store had no chance to answer
    if not called.ended():
        raise DecisionTimeoutError(
            f"the store did not answer for {timeout:g} s while waiting for {what}. Its host is stopped or "
            "cut off; this rank ends rather than choose alone"
        )
    try:
        return called.result()
    except RuntimeError as error:  # torch's DistNetworkError, DistStoreError, …
        first_line = str(error).partition("\n")[0]
        raise DecisionTimeoutError(
            f"lost the store while waiting for {what}: {first_line}. Its host is gone; this rank ends rather "
            "than choose alone"
        ) from error


def decision_path(control: ControlDirectory, attempt: int, name: str) -> Path:
    """Where an attempt's decision is kept."""
    return control.attempt(attempt) / "decisions" / f"{name}.json"


class Decisions:
    """The decisions of one attempt."""

    def __init__(
        self,
        control: ControlDirectory,
        fence: Fence,
        attempt: int,
        store: DecisionStore,
        *,
        store_timeout: float = 60.0,
    ) -> None:
        self._control = control
        self._attempt = attempt
        self._fence = fence
        self._store = store
        self._store_timeout = store_timeout
        self._prefix = f"decision/{attempt}"

    def decide(self, name: str, kind: type[D], choose: Callable[[], D]) -> D:
        """Choose and fix. Several may call this; the first durable choice counts for everybody.

        `choose` is not called if a durable choice already exists.
        """
        key = self._key(name)
        path = decision_path(self._control, self._attempt, name)
        fixed = read_record(path, kind)
        mine = choose() if fixed is None else None
        with self._fence.guard(f"decide {name}"):
            if fixed is None and mine is not None:
                fixed = mine if create_record(path, mine) else read_record(path, kind)
        if fixed is None:
            raise ControlError(f"{path} vanished while it was read; start the run again")
        text = msgspec.json.encode(fixed).decode()
        raw = within(
            lambda: self._store.compare_set(key, "", text), self._store_timeout, f"the decision {name!r}"
        )
        winner = self._decode(raw, name, kind)
        if winner != fixed:
            raise ControlError(
                f"the store says {winner!r:.200} for the decision {name!r}, but {path} says {fixed!r:.200}. "
                "Something else writes to this store; start the run again"
            )
        return winner

    def await_decision(
        self, name: str, kind: type[D], timeout: float, given_up: Callable[[], str] | None = None
    ) -> D:
        """Learn what was decided, or raise DecisionTimeoutError; at once if `given_up` says why."""
        what = f"the decision {name!r}"
        if given_up is None:
            raw = read_key(self._store, self._key(name), timeout, what)
        else:
            patience = self._store_timeout
            raw = await_key(self._store, self._key(name), timeout, what, patience=patience, given_up=given_up)
        return self._decode(raw, name, kind)

    def _key(self, name: str) -> str:
        if not _NAME.fullmatch(name):
            raise UsageError(
                f"a decision's name is made of letters, digits, '_', '.' and '-'; not {name!r:.120}"
            )
        return f"{self._prefix}/{name}"

    @staticmethod
    def _decode(raw: bytes, name: str, kind: type[D]) -> D:
        try:
            return msgspec.json.decode(raw, type=kind)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise ControlError(
                f"the store's value for the decision {name!r} is not a {kind.__name__}: {error}. "
                "Something else writes to this store; start the run again"
            ) from error
