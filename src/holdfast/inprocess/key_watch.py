"""Waiting for a key of the store without asking again and again, and without holding anybody up.

The waits are made by a thread with a connection of its own: a store's client serves one call at a time, and a
main thread that waits in C sees no signals. Ten thousand members that poll would be a load, so nobody does.
The connection is kept: torch asks for the name of the other side with every new one, and a name service may
take seconds to answer, or not answer at all.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch.distributed import Store

SLICE = 0.25
"""Seconds between two signs of life of a thread that waits for another one."""
CALL = 600.0
"""Seconds for one wait at the store; it is made again as long as somebody is interested."""


class KeyWatch:
    """The wait for one key, from its making on."""

    def __init__(self, key: str, deadline: float) -> None:
        self.key = key
        self.deadline = deadline
        self.value: bytes | None = None
        self.error = ""
        """Why it will not be learnt any more."""
        self._told: list[Callable[[], None]] = []
        self._lock = threading.Lock()
        self._over = threading.Event()

    def tell(self, then: Callable[[], None]) -> None:
        """Call this once it is over, from the thread that waits; at once if it is already."""
        with self._lock:
            if not self._over.is_set():
                self._told.append(then)
                return
        then()

    def wait(self, timeout: float, touch: Callable[[], None]) -> bool:
        """At most so long, in slices, so that the waiting thread handles signals; whether it is over.

        `touch` is called between them: who waits here does not hang.
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
    """Makes the waits of a member, one after the other: what is asked for later is what comes later."""

    def __init__(self, client: Store) -> None:
        """`client` is used by nobody else."""
        self._client = client
        self._asked: queue.SimpleQueue[KeyWatch | None] = queue.SimpleQueue()
        threading.Thread(target=self._serve, name="holdfast-key-watcher", daemon=True).start()

    def watch(self, key: str, within: float = float("inf")) -> KeyWatch:
        """Without `within`, until the key is there or the store is gone."""
        asked = KeyWatch(key, time.monotonic() + within)
        self._asked.put(asked)
        return asked

    def close(self) -> None:
        """Not waited for: it may be in a wait, which ends with the process."""
        self._asked.put(None)

    def _serve(self) -> None:
        while (asked := self._asked.get()) is not None:
            try:
                asked.end(self._learn(asked))
            except Exception as error:  # noqa: BLE001 - told to who waits, whatever it is
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
