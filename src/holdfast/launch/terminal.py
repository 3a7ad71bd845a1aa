"""What a launch tells people: short lines of its own, and what it learns by following the run's journal.

Several processes have a part in a save: rank 0, its writer, the one that drains, the one that reads back. All
of them journal what they did, so the leading agent learns it from the journal, whichever process is alive by
then. Rank 0 also journals which checkpoint a restart refused, which it took, and when the run was back.

Guarantee: nobody waits for this. If storage does not answer, lines are lost; looking takes at most `SHARE` of
the time; and a run that saves at every step does not flood the terminal.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec

from holdfast.account import Story, back_line, closing_line, incidents_of, remarks_of
from holdfast.base import Bounded, LineKind, LineSource, LiveLine, plural, printable, speak
from holdfast.errors import MEANINGS, ExitCode
from holdfast.journal import JournalLine, JournalReader
from holdfast.journal.events import Account, CopyReplicated, SaveLines, StepsDone
from holdfast.policy import describe_end
from holdfast.record import RECOVERY, ControlDirectory, FailureRecord, decision_path, read_record

# What the launcher tells people on stderr: short, and always with what to do next.


def say(text: str, *, attempt: int | None = None, account: Account | None = None) -> None:
    """Print a line. If nobody reads it (`2>&1 | head -1`) or the log's disk is full, the job is not at fault.

    `account`: that of the incident which this line reports.
    """
    kind, level, more = None, "", dict[str, Any]()
    if account is not None:
        kind, level = LineKind.INCIDENT, "error" if account.ends else "warning"
        more = {"account": {name: getattr(account, name) for name in account.__struct_fields__}}
    try:
        speak(text, source=LineSource.LAUNCHER, kind=kind, level=level, attempt=attempt, more=more)
    except BrokenPipeError:
        silence(2)
    except (OSError, ValueError):
        pass  # it may be written again later


def live_line(attempt: int | None = None) -> LiveLine:
    """A line that shows a wait of the launcher."""
    return LiveLine(LineSource.LAUNCHER, attempt=attempt)


def silence(descriptor: int) -> None:
    """Nobody reads this any more: from here on, writing to it does not fail, nor in what is started later."""
    with contextlib.suppress(OSError):
        nothing = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nothing, descriptor)
        os.close(nothing)


def next_step(code: int) -> str:
    return MEANINGS[ExitCode(code)][1] if code in set(ExitCode) else MEANINGS[ExitCode.FAILED][1]


# An incident in one line, from the records of a release that kept no account of it. Without torch.
#
# `holdfast status` shows this line if there is no `account.json`. The records may be of any release: an
# action that is not known here is shown under its own name.


MESSAGE_LIMIT = 240

_ACTIONS = {
    "restart": "restart",
    "rotate": "restart on other devices",
    "lower_rung": "restart from an older checkpoint",
    "shrink": "restart with fewer nodes",
    "wait": "wait for capacity",
    "requeue": "give the job back to its scheduler",
}


class ShownDecision(msgspec.Struct, frozen=True, kw_only=True):
    """The part of a recovery decision that is shown; read leniently, from any release's record."""

    action: str
    exit_code: int = 0
    reason: str = ""
    evidence: list[str] = []
    restarts_left: int | None = None
    exclude: list[dict[str, Any]] = []
    avoid: list[str] = []
    spares: list[str] = []
    verdict: str = ""
    suspect: list[str] = []
    skip: dict[str, Any] | None = None

    @classmethod
    def of(cls, decision: msgspec.Struct | dict[str, Any]) -> ShownDecision:
        """From a decision, or from the content of its record; what has another shape is left out."""
        fields = msgspec.to_builtins(decision)
        try:
            return msgspec.convert(fields, cls)
        except msgspec.ValidationError:
            return cls(action=str(fields.get("action", "?")), reason=str(fields.get("reason", "")))


def shown_decision(control: ControlDirectory, number: int) -> ShownDecision | None:
    """What was decided about an attempt, by whichever release; None if nothing was."""
    found = read_record(decision_path(control, number, RECOVERY), dict)
    return ShownDecision.of(found) if found is not None else None


def line_of_record(
    *,
    attempt: int,
    cause: str,
    root: FailureRecord | None,
    decision: ShownDecision | None,
    step: int | None = None,
    max_restarts: int | None = None,
    detail: str = "",
) -> str:
    """`attempt 3: rank 1 on node-b killed by SIGKILL (infrastructure) at step 412 → restart, 2 of 3 left`."""
    what = _what(root) if root is not None else printable(detail, MESSAGE_LIMIT) or "failed"
    line = f"attempt {attempt}: {what}"
    if cause:
        line += f" ({printable(cause)})"
    if step is not None:
        line += f" at step {step}"
    return line if decision is None else f"{line} → {_next(decision, max_restarts)}"


def _what(root: FailureRecord) -> str:
    ended = describe_end(root.exit_code).replace("death by", "killed by")
    if root.exit_code >= 0:
        ended = f"ended with {ended}"
    if root.left:
        ended = "left with exit code 0 before its peers"
    text = f"rank {root.rank} on {printable(root.node)} {ended}"
    return f"{text}: {printable(root.message, MESSAGE_LIMIT)}" if root.message else text


def _next(decision: ShownDecision, max_restarts: int | None) -> str:
    if decision.action == "stop":
        why = f": {printable(decision.reason, MESSAGE_LIMIT)}" if decision.reason else ""
        return f"stop with code {decision.exit_code}{why}"
    text = _ACTIONS.get(decision.action, printable(decision.action))
    out = [_named(one) for one in decision.exclude]
    if decision.action == "exclude":
        text = "restart"
    if out:
        text += f" without {printable(', '.join(out), MESSAGE_LIMIT)}"
    if decision.spares:
        text += f" on spare {printable(', '.join(decision.spares), MESSAGE_LIMIT)}"
    if decision.suspect:
        text += f", below {printable(decision.suspect[0])}, which is suspect"
    elif decision.avoid:
        text += f", below {printable(decision.avoid[-1])}"
    if decision.skip is not None:
        text += f" without batches {decision.skip.get('first', '?')} to {decision.skip.get('last', '?')}"
    if decision.verdict:
        text = f"{printable(decision.verdict)}: {text}"
    if decision.restarts_left is None or decision.action in ("wait", "requeue"):
        return text
    if max_restarts is None:
        return f"{text}, {plural(decision.restarts_left, 'restart')} left"
    return f"{text}, {decision.restarts_left} of {max_restarts} left"


def _named(exclusion: dict[str, Any]) -> str:
    node, device = exclusion.get("node", "?"), exclusion.get("device")
    return f"{node}" if device is None else f"device {device} of {node}"


WRITERS = frozenset({"rank-0", "writer-0", "drain", "read-back"})
"""The writers that journal what becomes of a save."""
LOOK = 0.5
"""Seconds between two looks, if looking takes next to no time."""
SHARE = 0.05
MOST_A_MINUTE = 120
OFTEN = 5.0
"""Seconds between two lines about local copies, which may be made at every step."""
CATCH_UP = 1.0
"""Seconds for which an incident waits until what happened before it has been printed."""
CLOSE = 2.0
"""Seconds for the last look."""
LAST_LINE = 5.0
"""Seconds for the line that sums up the whole run."""
MOST_READ = 16 * 1024 * 1024
"""Bytes of journal that are read to say what an incident cost; of a longer one, only the newest attempts."""


class SavesTold:
    """Prints saves and incidents; one per launch. `follow` and `close` return at once, or nearly so."""

    def __init__(self, journal: Path, say: Callable[[str], None], *, enabled: bool = True) -> None:
        """`enabled`: whether saves are printed too; incidents always are."""
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
        self._local: dict[type, tuple[float, int]] = {}
        """By kind of event: when a line about a local copy was printed last, and how many were not since."""

    def follow(self, attempt: int, *, leads: bool) -> None:
        """An attempt begins: its saves are printed here if this agent leads it, and elsewhere if not."""
        self._leads, self._attempt = leads, attempt
        if not leads or self._thread is not None or self._ending:
            return
        reader = JournalReader(self._journal, since=attempt, writers=WRITERS)
        thread = threading.Thread(target=self._work, args=(reader,), name="holdfast-saves", daemon=True)
        try:
            thread.start()
        except RuntimeError:  # no thread can be had: the launcher has other worries
            return
        self._thread = thread

    @property
    def attempt(self) -> int | None:
        """The attempt whose saves are printed; None before there is one."""
        return self._attempt or None

    def catch_up(self) -> None:
        """Print what was journalled before this ahead of what comes next, if that takes only a moment."""
        if self._thread is not None:
            self._looked.clear()
            self._wanted.set()
            self._looked.wait(CATCH_UP)

    def fell(self, account: Account) -> None:
        """An incident was printed: from here on, it is followed until the run is back where it was."""
        with self._lock:
            self._story.fell(account)

    def finished(self, run_dir: str) -> None:
        """The run is done: print the last line, with what all its incidents came to."""
        self.close()
        if not self._leads or self._thread is None:
            return
        last = Bounded(lambda: self._closing(run_dir), "closing-line")  # the storage may not answer
        steps = plural(self._step, "step")
        unread = f"finished: {steps}; the journal could not be read in time: holdfast why {run_dir}"
        self._say(last.result() if last.ended(LAST_LINE) else unread)

    def _closing(self, run_dir: str) -> str:
        lines = self._read(0)
        found = incidents_of(lines)
        return closing_line(found, remarks_of(lines, found), self._step, run_dir)

    def close(self) -> None:
        """Print what has been journalled by now, and no more."""
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
            if text is not None and self._leads and (text := self._thinned(line, text)):
                self._print(text)
            self._tell_story(line)

    def _thinned(self, line: JournalLine, text: str) -> str:
        """Of lines about local copies, one every few seconds and how many there were between; else `text`."""
        body = line.body
        if not isinstance(body, CopyReplicated) and getattr(body, "tier", "") != "local":
            return text
        last, left = self._local.get(type(body), (-OFTEN, 0))
        if line.at < last + OFTEN:
            self._local[type(body)] = last, left + 1
            return ""
        self._local[type(body)] = line.at, 0
        return f"{text} (and {left} before it)" if left else text

    def _tell_story(self, line: JournalLine) -> None:
        if isinstance(line.body, StepsDone):
            self._step = line.body.first + max(len(line.body.seconds), 1) - 1
        with self._lock:
            text, over, target = self._story.line(line), self._story.is_back(line), self._story.target
        if text is not None and self._leads:
            self._say(text)
        if over is not None and self._leads:
            mine = [one for one in incidents_of(self._read(over.attempt)) if one.attempt == over.attempt]
            for incident in mine[-1:]:
                self._say(back_line(incident, target))

    def _read(self, since: int) -> list[JournalLine]:
        """The run's journal; if it is long, only the attempts from `since` on."""
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
