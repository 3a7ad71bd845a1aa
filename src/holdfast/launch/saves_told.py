"""Prints what becomes of the run's saves, by following the journal beside everything else.

Several processes have a part in a save: rank 0, its writer, the one that drains, the one that reads back. All
of them journal what they did, so the journal is where the leading agent learns it, whichever process is alive
by then. Guarantee: nobody waits for this. Storage that does not answer costs lines; looking takes at most
`SHARE` of the time; and a run that saves at every step does not flood the terminal.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path

from holdfast.journal.reader import JournalReader
from holdfast.journal.save_lines import SaveLines

WRITERS = frozenset({"rank-0", "writer-0", "drain", "read-back"})
"""Those who journal what becomes of a save."""
LOOK = 0.5
"""Seconds between two looks, if looking takes next to no time."""
SHARE = 0.05
MOST_A_MINUTE = 120
CLOSE = 2.0
"""Seconds for the last look."""


class SavesTold:
    """One for a launch. `follow` and `close` return at once, or nearly so."""

    def __init__(self, journal: Path, say: Callable[[str], None], *, enabled: bool = True) -> None:
        self._journal = journal
        self._say = say
        self._enabled = enabled
        self._leads = False
        self._ending = threading.Event()
        self._thread: threading.Thread | None = None
        self._lines = SaveLines()
        self._printed: deque[float] = deque(maxlen=MOST_A_MINUTE)
        self._left_out = 0

    def follow(self, attempt: int, *, leads: bool) -> None:
        """An attempt begins: its saves are told here if this agent leads it, and elsewhere if not."""
        self._leads = leads
        if not (self._enabled and leads) or self._thread is not None or self._ending.is_set():
            return
        reader = JournalReader(self._journal, since=attempt, writers=WRITERS)
        thread = threading.Thread(target=self._work, args=(reader,), name="holdfast-saves", daemon=True)
        try:
            thread.start()
        except RuntimeError:  # no thread to be had: the launcher has other worries
            return
        self._thread = thread

    def close(self) -> None:
        """Tell what has been journalled by now, and no more."""
        self._ending.set()
        if self._thread is not None:
            self._thread.join(CLOSE)

    def _work(self, reader: JournalReader) -> None:
        wait = LOOK
        while True:
            last = self._ending.wait(wait)
            began = time.monotonic()
            self._look(reader)
            wait = max(LOOK, (time.monotonic() - began) / SHARE)
            if last:
                self._tell_left_out()
                return

    def _look(self, reader: JournalReader) -> None:
        try:
            found = reader.poll()
        except OSError:
            return
        for line in found:
            text = self._lines.line(line.body)
            if text is not None and self._leads:
                self._print(text)

    def _print(self, text: str) -> None:
        now = time.monotonic()
        if len(self._printed) == MOST_A_MINUTE and now - self._printed[0] < 60:
            self._left_out += 1
            return
        self._tell_left_out()
        self._printed.append(now)
        self._say(text)

    def _tell_left_out(self) -> None:
        if self._left_out:
            self._say(f"save lines left out: {self._left_out}; `holdfast journal` has them all")
            self._left_out = 0
