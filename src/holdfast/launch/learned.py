"""Learns a node's time limits while it runs, for the attempts and launches after this one.

Within an attempt the limits stand still: what it sees is smoothed with what was known at its start, however
often it is written. Writing fails quietly but once, and nobody waits for a file system that does not answer:
a run does not end for want of an estimate.

That the ranks of a command say hello is learned too, and kept at once: from then on, on all nodes and in all
attempts, a rank that does not is overdue some day. How long they took is kept with it.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Sequence

from holdfast.base import PATIENCE, Bounded, Look
from holdfast.errors import ControlError
from holdfast.launch.monitor import Monitor
from holdfast.policy import Learned, learn
from holdfast.record import (
    ControlDirectory,
    HelloRecord,
    read_hello,
    read_learned,
    store_hello,
    store_learned,
)

LEARN_EVERY = 1.0
"""Seconds between two looks for what another node, or an earlier attempt, has kept."""
PERIOD = 30.0
"""Seconds between two writes during an attempt."""
LONGER = 1.25
"""How many times as long as known a rank must have taken to its hello for that to be written."""


class Learner:
    """One node's learning. `tell` gets what a person should know."""

    def __init__(
        self, control: ControlDirectory, tell: Callable[[str], None], command: Sequence[str] = ()
    ) -> None:
        """`command`: what a worker is started with."""
        self._control = control
        self._tell = tell
        self._command = hashlib.sha256("\0".join(command).encode(errors="surrogateescape")).hexdigest()[:32]
        self._node = ""
        self._attempt = 0
        self._earlier = Learned()
        self._stored = Learned()
        self._wrote = time.monotonic()
        self._failed = False
        self._hello: HelloRecord | None = None
        """What is known of this command's ranks; looked for until there is something."""
        self._hellos = Look(lambda: read_hello(control, self._command), "hello")
        self._next_look = 0.0
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
        """Call it now and then during an attempt, from its start on."""
        if time.monotonic() - self._wrote >= PERIOD:
            self.keep(monitor)
        else:
            self._learn_hello(monitor)

    def _learn_hello(self, monitor: Monitor) -> None:
        """Who is known to say hello: what was kept, and what was heard here."""
        known = self._hello = self._hello or self._kept_hello()
        said = monitor.hellos()
        if said is not None:
            initial, longest = said
            if known is None or known.initial != initial or longest > LONGER * known.longest:
                longest = max(longest, known.longest if known is not None else 0.0)
                self._hello = HelloRecord(command=self._command, initial=initial, longest=longest)
                record = self._hello
                if problem := self._write(lambda: store_hello(self._control, record)):
                    self._complain(problem)
        monitor.expect(self._hello)

    def _kept_hello(self) -> HelloRecord | None:
        """What any node has kept, looked for every now and then."""
        now = time.monotonic()
        if now < self._next_look:
            return None
        looked = self._hellos.take()
        if looked is None:
            return None
        self._next_look = now + LEARN_EVERY
        return looked.result()

    def _complain(self, problem: str) -> None:
        if not self._failed:
            self._failed = True
            self._tell(f"learned timeouts cannot be kept in {self._control.path}: {problem}")

    def keep(self, monitor: Monitor) -> Learned | None:
        """Write what was learned, now and then and at the attempt's end; None if there is nothing new."""
        self._learn_hello(monitor)  # an attempt may end before anybody has looked
        self._wrote = time.monotonic()
        if not monitor.learns():
            return None
        found = learn(*monitor.observed(), self._earlier)
        if found == self._stored:
            return None
        node, attempt = self._node, self._attempt
        if problem := self._write(lambda: store_learned(self._control, node, attempt, found)):
            self._complain(problem)
            return None
        self._stored = found
        return found

    def _write(self, store: Callable[[], None]) -> str:
        """Why it could not be written; empty if it was."""
        if self._writing is None or self._writing.ended():
            self._writing = Bounded(store, "learned-timeouts")
            self._writing.ended(PATIENCE)
        if not self._writing.ended():
            return "the file system does not answer"
        written, self._writing = self._writing, None
        try:
            written.result()
        except (OSError, ControlError) as error:
            return str(error)
        return ""
