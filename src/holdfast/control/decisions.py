"""One decision for all: fixed once, durable, read by everyone.

Guarantee: for one name within one attempt, every process that returns from `decide` or `await_decision`
returns the same bytes. The decision is written to the control directory first and then fixed by
compare-and-set in the store, so whatever a process has read is already durable. Whoever does not learn it
before the deadline raises DecisionTimeoutError; it never chooses for itself.

The store is any c10d store; this module needs only three of its methods and so does not import torch.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import timedelta
from typing import Protocol, TypeVar

import msgspec

from holdfast.control.directory import ControlDirectory, create_record, read_record
from holdfast.control.lease import Fence
from holdfast.errors import DecisionTimeoutError

POLL_SECONDS = 0.02

D = TypeVar("D", bound=msgspec.Struct)


class Store(Protocol):
    """The part of torch.distributed.Store that decisions need."""

    def compare_set(self, key: str, expected: str, desired: str, /) -> bytes: ...

    def check(self, keys: list[str], /) -> bool: ...

    def get(self, key: str, /) -> bytes: ...

    def set(self, key: str, value: str, /) -> None: ...

    def set_timeout(self, timeout: timedelta, /) -> None: ...


def read_key(store: Store, key: str, timeout: float, what: str) -> bytes:
    """Wait for a key by polling (a blocking `get` would hold the client for its other threads too)."""
    deadline = time.monotonic() + timeout
    pause = POLL_SECONDS / 10
    while not store.check([key]):
        if time.monotonic() >= deadline:
            raise DecisionTimeoutError(
                f"waited {timeout:g} s for {what} and did not learn it. The rank that should have answered "
                "is gone or stuck; this rank ends rather than choose alone"
            )
        time.sleep(pause)
        pause = min(pause * 2, POLL_SECONDS)
    return store.get(key)


class Decisions:
    """The decisions of one attempt."""

    def __init__(self, control: ControlDirectory, fence: Fence, attempt: int, store: Store) -> None:
        self._directory = control.attempt(attempt) / "decisions"
        self._fence = fence
        self._store = store
        self._prefix = f"decision/{attempt}"

    def decide(self, name: str, kind: type[D], choose: Callable[[], D]) -> D:
        """Choose and fix. Several may call this; the first durable choice is everybody's."""
        path = self._directory / f"{name}.json"
        mine = choose()
        with self._fence.guard(f"decide {name}"):
            fixed = mine if create_record(path, mine) else read_record(path, kind)
        assert fixed is not None
        text = msgspec.json.encode(fixed).decode()
        winner = self._store.compare_set(f"{self._prefix}/{name}", "", text)
        return msgspec.json.decode(winner, type=kind)

    def await_decision(self, name: str, kind: type[D], timeout: float) -> D:
        """Learn what was decided, or raise DecisionTimeoutError."""
        raw = read_key(self._store, f"{self._prefix}/{name}", timeout, f"the decision {name!r}")
        return msgspec.json.decode(raw, type=kind)
