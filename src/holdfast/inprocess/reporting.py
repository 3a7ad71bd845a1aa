"""A keeper's side of the store: says who is gone, gives signs of life, and learns the plans.

All of it happens on a thread of its own, so that a store that does not answer never keeps the keeper from
seeing an end or from ending who hangs. A store that is lost, or does not answer for heartbeat_timeout, is
said (`lost`), once and for good.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

import msgspec

from holdfast.inprocess.messages import (
    KEEPS,
    LEFT,
    LOST,
    UNREADABLE,
    End,
    EndKind,
    Fault,
    Kept,
    Next,
    Plan,
    beat_key,
    end_key,
    fault_key,
    gone_key,
    keeper_key,
    lost_store,
    plan_key,
    text,
)
from holdfast.settings_inprocess import InProcessSettings

if TYPE_CHECKING:
    from torch.distributed import Store

FOLLOW = 0.5
"""Seconds between two looks for a new plan: only who is left out by one is judged by it."""
PARTING = 2.0
"""Seconds for the last words."""


class Reporter:
    """One for each keeper. `plan` and `lost` may be read, and every method called, from any thread."""

    def __init__(self, store: Store, node: str, kept: Kept, chosen: InProcessSettings) -> None:
        self.plan: Next | None = None
        """The newest that is known."""
        self.planned = 0.0
        """When it became known, on the monotonic clock."""
        self.lost = ""
        """Why the store cannot be spoken to any more; empty while it can."""
        self._store = store
        self._node = node
        self._interval = chosen.heartbeat_interval
        self._patience = chosen.heartbeat_timeout
        self._beaten = float("-inf")
        self._work: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._calling = 0.0
        self._work.put(lambda: self._introduce(kept))
        self._thread = threading.Thread(target=self._serve, name="holdfast-keeper-store", daemon=True)
        self._thread.start()

    def gone(self, member: int, fault: Fault | None) -> None:
        """This member will never come back; without a fault: it said farewell."""
        self._work.put(lambda: self._tell_gone(member, fault))

    def look(self, fresh: float) -> None:
        """Whether the store still answers; `fresh`: since when this process has been awake."""
        since = self._calling
        if since and time.monotonic() - max(since, fresh) > self._patience:
            self._lose(f"the store has not answered for {self._patience:g} s")

    def close(self) -> None:
        """Say what is still to be said, bounded, and that this keeper leaves."""
        self._work.put(lambda: self._add(LEFT))
        self._work.put(None)
        self._thread.join(PARTING)

    # --- the thread -----------------------------------------------------------------------------------------

    def _serve(self) -> None:
        try:
            while True:
                try:
                    work = self._work.get(timeout=min(FOLLOW, self._interval))
                except queue.Empty:
                    work = self._routine
                if work is None or self.lost:
                    return
                self._calling = time.monotonic()
                work()
                self._routine()
                self._calling = 0.0
        except (RuntimeError, *UNREADABLE) as error:  # torch's DistNetworkError, DistStoreError, …
            self._lose(lost_store(error))

    def _lose(self, why: str) -> None:
        self.lost = self.lost or why

    def _add(self, key: str) -> None:
        self._store.add(key, 1)

    def _introduce(self, kept: Kept) -> None:
        mine = text(kept)
        found = self._store.compare_set(keeper_key(self._node), "", mine).decode()
        if found != mine:
            self._lose(f"the store has a keeper of {self._node} already ({found}): it is another job's")
        self._add(KEEPS)

    def _routine(self) -> None:
        now = time.monotonic()
        if now - self._beaten >= self._interval:
            self._add(beat_key(self._node))
            self._beaten = now
        self._follow()

    def _follow(self) -> None:
        while self.plan is None or isinstance(self.plan, Plan):
            key = plan_key(0 if self.plan is None else self.plan.iteration + 1)
            if not self._store.check([key]):
                return
            self.plan = msgspec.json.decode(self._store.get(key), type=Next)
            self.planned = time.monotonic()

    def _tell_gone(self, member: int, fault: Fault | None) -> None:
        mine = text(fault)
        if self._store.compare_set(gone_key(member), "", mine).decode() == mine:
            self._add(LOST)  # before the look at the plan: whoever plans looks the other way round
        self._follow()
        plan = self.plan
        if fault is None or not isinstance(plan, Plan) or member not in plan.order:
            return  # what befalls a reserve does not end the iteration
        fault = msgspec.structs.replace(fault, rank=plan.order.index(member))
        self._store.compare_set(fault_key(plan.iteration, member), "", text(fault))
        self._store.compare_set(end_key(plan.iteration), "", text(End(kind=EndKind.FAULT, fault=fault)))
