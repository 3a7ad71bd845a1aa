"""What the demo shows while it runs: a live bar on a terminal, plain lines elsewhere."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING

from holdfast.account.incidents import headline, incidents
from holdfast.account.story import Story, back
from holdfast.journal.account_events import Account
from holdfast.journal.events import (
    AttemptStarted,
    Line,
    Resumed,
    RunFinished,
    RungRejected,
    SaveCommitted,
    SaveFailed,
    StepsDone,
    Warned,
    decode_loss,
)
from holdfast.journal.render import number, printable, render

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import Progress, TaskID

SHOWN = (AttemptStarted, Resumed, RunFinished, SaveCommitted, SaveFailed, Warned)
"""Events shown as lines. An incident is told as `holdfast run` tells it, by its account and what follows."""
STYLES = {"fault": "bold red", "warning": "yellow", "decision": "bold cyan", "saved": "blue", "good": "green"}
PLAIN_EVERY = 5.0
"""Seconds between two lines about the step, where there is no bar."""


class DemoView:
    """Writes to one console; the same calls for a terminal and for a file."""

    def __init__(self, console: Console) -> None:
        self.console = console
        self._began = time.monotonic()
        self._bar: tuple[Progress, TaskID] | None = None
        self._attempt, self._loss, self._saved, self._said = 1, "–", "none yet", 0.0
        self._story, self._lines = Story(), list[Line]()

    def say(self, text: str, style: str = "") -> None:
        """A line with the time since the demo began."""
        from rich.text import Text

        line = Text(f"{time.monotonic() - self._began:6.1f} s  ", style="dim")
        line.append(text, style=style or None)
        self.console.print(line, soft_wrap=not self.console.is_terminal, highlight=False)

    def heading(self, text: str) -> None:
        from rich.text import Text

        self.console.print()
        self.console.print(Text(text, style="bold"))

    @contextlib.contextmanager
    def following(self, what: str, steps: int) -> Iterator[None]:
        """Show the progress of one run while the block lasts."""
        self._attempt, self._loss, self._saved, self._said = 1, "–", "none yet", time.monotonic()
        if not self.console.is_terminal:
            yield
            return
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

        columns = (
            TextColumn("{task.description}"),
            BarColumn(bar_width=24),
            MofNCompleteColumn(),
            TextColumn(
                "loss {task.fields[loss]}  attempt {task.fields[attempt]}  last save {task.fields[saved]}"
            ),
            TimeElapsedColumn(),
        )
        progress = Progress(*columns, console=self.console, transient=True, refresh_per_second=5)
        task = progress.add_task(what, total=steps, loss="–", attempt=1, saved="none yet")
        self._bar = (progress, task)
        try:
            with progress:
                yield
        finally:
            self._bar = None

    def see(self, line: Line, *, quiet: bool = False) -> None:
        """A journal line: moves the bar, and is shown if it is of interest (`quiet`: never)."""
        body = line.body
        if not quiet:
            self._lines.append(line)
        if isinstance(body, StepsDone):
            if line.who == "rank-0":
                self._progress(line, body)
                self._tell_return(line)
            return
        if isinstance(body, AttemptStarted):
            self._attempt = line.attempt
        elif isinstance(body, SaveCommitted):
            self._saved = f"step {body.step}"
        elif isinstance(body, Resumed):
            self._saved = f"step {body.step}" if body.checkpoint else "none yet"
            if self._bar is not None:
                self._bar[0].update(self._bar[1], completed=body.step)
        told = None if quiet else self._story.line(line)
        if isinstance(body, Account) and not quiet:
            self._story.fell(body)
            self.say(headline(body), STYLES["fault"])
            self.say(f"  why:  {printable(body.why[0])}" if body.why else "", "dim")
            self.say(f"  done: {printable(body.done)}", "dim")
        elif told:
            self.say(told, STYLES["warning" if isinstance(body, RungRejected) else "decision"])
        elif isinstance(body, SHOWN) and not quiet:
            shown = render(body)
            self.say(shown.text, STYLES.get(shown.style, ""))
            for detail in shown.details:
                self.say(f"  {detail}", "dim")

    def _tell_return(self, line: Line) -> None:
        over = self._story.is_back(line)
        mine = [one for one in incidents(self._lines) if over is not None and one.attempt == over.attempt]
        for incident in mine[-1:]:
            self.say(back(incident, self._story.target), STYLES["good"])

    def _progress(self, line: Line, body: StepsDone) -> None:
        step = body.first + len(body.seconds) - 1
        self._loss = number(decode_loss(body.loss[-1])) if body.loss else "–"
        if self._bar is not None:
            progress, task = self._bar
            progress.update(task, completed=step, loss=self._loss, attempt=line.attempt, saved=self._saved)
        elif not self.console.is_terminal and time.monotonic() - self._said >= PLAIN_EVERY:
            self._said = time.monotonic()
            self.say(f"step {step}, loss {self._loss}, attempt {line.attempt}, last save {self._saved}")
