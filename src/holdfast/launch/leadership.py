"""The lease as the leading agent holds it, across the attempts of one launch.

Guarantee: between two attempts of a launch the run is never free for others: the old epoch is kept alive
until the next one is claimed. While workers run, the loss of the lease ends them at once; that it cannot be
renewed is told, and ends nothing.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

from holdfast.control.directory import ControlDirectory
from holdfast.control.lease import HANDOVER, Claim, LeaseKeeper, claim, current_epoch, read_claim
from holdfast.errors import ControlError
from holdfast.launch.summary import live_line


class Leadership:
    def __init__(
        self,
        control: ControlDirectory,
        ttl: float,
        handover: float = HANDOVER,
        tell: Callable[[str], None] | None = None,
    ) -> None:
        """`tell` gets what a person should know, from another thread."""
        self._control = control
        self._ttl = ttl
        self._handover = handover
        self._tell = tell
        self._keeper: LeaseKeeper | None = None
        self._lock = threading.Lock()
        self._owner = ""
        self._on_lost: Callable[[], None] | None = None
        self.lost = ""
        """Why the lease was lost while workers ran; empty while it was not."""

    def claim(self, owner: str) -> Claim:
        """Take the next epoch for this launch. Raises RunIsLiveError if another launch is alive."""
        self._owner = owner
        line = live_line()
        held = claim(self._control, owner, self._ttl, handover=self._handover, waiting=line)
        line.over()
        previous, self._keeper = self._keeper, LeaseKeeper(self._control, held, self._lost, self._tell)
        if previous is not None:
            previous.stop()
        return held

    def guard(self, on_lost: Callable[[], None]) -> None:
        """Workers start: from now on a loss calls `on_lost`, from another thread."""
        with self._lock:
            self._on_lost = on_lost

    def unguard(self) -> None:
        """Workers are gone. Until the next attempt, another agent of this launch may become the leader."""
        with self._lock:
            self._on_lost = None

    def _lost(self, evidence: str) -> None:
        with self._lock:
            if self._on_lost is None and self._handed_over():
                return
            self.lost = evidence
            if self._on_lost is not None:
                self._on_lost()

    def _handed_over(self) -> bool:
        try:
            newest = read_claim(self._control, current_epoch(self._control))
        except ControlError:
            return False
        return newest is not None and newest.owner == self._owner

    def release(self) -> None:
        if self._keeper is not None:
            self._keeper.release()
            self._keeper = None
