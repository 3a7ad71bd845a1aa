"""Learns a node's time limits while it runs, for the attempts and launches after this one.

Within an attempt the limits stand still: what it sees is smoothed with what was known at its start, however
often it is written. Writing fails quietly but once, and nobody waits for a file system that does not answer:
a run does not end for want of an estimate.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from holdfast.bounded import PATIENCE, Bounded
from holdfast.control.directory import ControlDirectory
from holdfast.control.timeouts import read_learned, store_learned
from holdfast.errors import ControlError
from holdfast.launch.monitor import Monitor
from holdfast.policy.timeouts import Learned, learn

PERIOD = 30.0
"""Seconds between two writes during an attempt."""


class Learner:
    """One node's learning. `tell` gets what a person should know."""

    def __init__(self, control: ControlDirectory, tell: Callable[[str], None]) -> None:
        self._control = control
        self._tell = tell
        self._node = ""
        self._attempt = 0
        self._earlier = Learned()
        self._stored = Learned()
        self._wrote = time.monotonic()
        self._failed = False
        self._writing: Bounded[None] | None = None

    def begin(self, node: str, attempt: int) -> Learned:
        """An attempt starts: what was learned so far on all nodes, for `Monitor.begin`."""
        self._node, self._attempt = node, attempt
        self._wrote = time.monotonic()
        self._earlier, problems = read_learned(self._control)
        self._stored = self._earlier
        for problem in problems:
            self._tell(problem)
        return self._earlier

    def go_on(self, monitor: Monitor, attempt: int) -> Learned:
        """The same workers go on as another attempt: what it begins with, as `begin` says it."""
        self.keep(monitor)
        return self.begin(self._node, attempt)

    def poll(self, monitor: Monitor) -> None:
        """Call it now and then during an attempt."""
        if time.monotonic() - self._wrote >= PERIOD:
            self.keep(monitor)

    def keep(self, monitor: Monitor) -> Learned | None:
        """Write what was learned, at a commit or at the attempt's end; None if there is nothing new."""
        self._wrote = time.monotonic()
        if not monitor.learns():
            return None
        found = learn(*monitor.observed(), self._earlier)
        if found == self._stored:
            return None
        problem = self._write(found)
        if problem:
            if not self._failed:
                self._failed = True
                self._tell(f"learned timeouts cannot be kept in {self._control.path}: {problem}")
            return None
        self._stored = found
        return found

    def _write(self, found: Learned) -> str:
        """Why it could not be written; empty if it was."""
        node, attempt = self._node, self._attempt
        if self._writing is None or self._writing.ended():
            self._writing = Bounded(
                lambda: store_learned(self._control, node, attempt, found), "learned-timeouts"
            )
            self._writing.ended(PATIENCE)
        if not self._writing.ended():
            return "the file system does not answer"
        written, self._writing = self._writing, None
        try:
            written.result()
        except (OSError, ControlError) as error:
            return str(error)
        return ""
