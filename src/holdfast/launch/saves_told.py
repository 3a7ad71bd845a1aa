"""Prints what becomes of the run's saves, and how it gets over an incident, by following the journal.

Several processes have a part in a save: rank 0, its writer, the one that drains, the one that reads back. All
of them journal what they did, so the journal is where the leading agent learns it, whichever process is alive
by then. Which checkpoint a restart refused, which it took, and when the run was back, rank 0 journals too.

Guarantee: nobody waits for this. Storage that does not answer costs lines; looking takes at most `SHARE` of
the time; and a run that saves at every step does not flood the terminal.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path

from holdfast.account.incidents import incidents
from holdfast.account.remarks import remarks
from holdfast.account.story import Story, back, closing
from holdfast.bounded import Bounded
from holdfast.journal.account_events import Account
from holdfast.journal.events import Line, StepsDone
from holdfast.journal.reader import JournalReader
from holdfast.journal.save_lines import SaveLines
from holdfast.journal.text import plural

WRITERS = frozenset({"rank-0", "writer-0", "drain", "read-back"})
"""Those who journal what becomes of a save."""
LOOK = 0.5
"""Seconds between two looks, if looking takes next to no time."""
SHARE = 0.05
MOST_A_MINUTE = 120
CATCH_UP = 1.0
"""Seconds that an incident waits for what happened before it to be told."""
CLOSE = 2.0
"""Seconds for the last look."""
LAST_LINE = 5.0
"""Seconds for what the whole run came to."""
MOST_READ = 16 * 1024 * 1024
"""Bytes of journal that are read to say what an incident cost; of a longer one only the newest attempts."""


class SavesTold:
    """One for a launch. `follow` and `close` return at once, or nearly so."""

    def __init__(self, journal: Path, say: Callable[[str], None], *, enabled: bool = True) -> None:
        """`enabled`: saves are told too; incidents always are."""
        self._journal = journal
        self._say = say
        self._enabled = enabled
        self._story = Story()
        self._lock = threading.Lock()
        self._step = 0
        """The last step that was journalled."""
        self._leads, self._attempt = False, 0
        self._ending = False
        self._wanted, self._looked = threading.Event(), threading.Event()
        self._thread: threading.Thread | None = None
        self._lines = SaveLines()
        self._printed: deque[float] = deque(maxlen=MOST_A_MINUTE)
        self._left_out = 0

    def follow(self, attempt: int, *, leads: bool) -> None:
        """An attempt begins: its saves are told here if this agent leads it, and elsewhere if not."""
        self._leads, self._attempt = leads, attempt
        if not leads or self._thread is not None or self._ending:
            return
        reader = JournalReader(self._journal, since=attempt, writers=WRITERS)
        thread = threading.Thread(target=self._work, args=(reader,), name="holdfast-saves", daemon=True)
        try:
            thread.start()
        except RuntimeError:  # no thread to be had: the launcher has other worries
            return
        self._thread = thread

    @property
    def attempt(self) -> int | None:
        """The attempt whose saves are told; None before there is one."""
        return self._attempt or None

    def catch_up(self) -> None:
        """What was journalled before this is told before what comes next, if that takes but a moment."""
        if self._thread is not None:
            self._looked.clear()
            self._wanted.set()
            self._looked.wait(CATCH_UP)

    def fell(self, account: Account) -> None:
        """An incident was told: from here on it is followed until the run is back where it was."""
        with self._lock:
            self._story.fell(account)

    def finished(self, run_dir: str) -> None:
        """The run is done: the last line, with what all its incidents came to."""
        self.close()
        if not self._leads or self._thread is None:
            return
        last = Bounded(lambda: self._closing(run_dir), "closing-line")  # the storage may not answer
        steps = plural(self._step, "step")
        unread = f"finished: {steps}; the journal could not be read in time: holdfast why {run_dir}"
        self._say(last.result() if last.ended(LAST_LINE) else unread)

    def _closing(self, run_dir: str) -> str:
        lines = self._read(0)
        found = incidents(lines)
        return closing(found, remarks(lines, found), self._step, run_dir)

    def close(self) -> None:
        """Tell what has been journalled by now, and no more."""
        self._ending = True
        self._wanted.set()
        if self._thread is not None:
            self._thread.join(CLOSE)

    def _work(self, reader: JournalReader) -> None:
        wait = LOOK
        while True:
            self._wanted.wait(wait)
            self._wanted.clear()
            last = self._ending
            began = time.monotonic()
            self._look(reader)
            self._looked.set()
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
            text = self._lines.line(line.body) if self._enabled else None
            if text is not None and self._leads:
                self._print(text)
            self._tell_story(line)

    def _tell_story(self, line: Line) -> None:
        if isinstance(line.body, StepsDone):
            self._step = line.body.first + max(len(line.body.seconds), 1) - 1
        with self._lock:
            text, over, target = self._story.line(line), self._story.is_back(line), self._story.target
        if text is not None and self._leads:
            self._say(text)
        if over is not None and self._leads:
            mine = [one for one in incidents(self._read(over.attempt)) if one.attempt == over.attempt]
            for incident in mine[-1:]:
                self._say(back(incident, target))

    def _read(self, since: int) -> list[Line]:
        """The run's journal; of a long one only the attempts from `since` on."""
        try:
            whole = sum(path.stat().st_size for path in self._journal.iterdir()) <= MOST_READ
            newest = max(since, self._attempt - 1)
            return JournalReader(self._journal, since=0 if whole else newest).poll()
        except OSError:
            return []

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
