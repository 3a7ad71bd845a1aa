"""What the demo shows while it runs: a live bar on a terminal, plain lines elsewhere."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING

from holdfast.journal.events import (
    AttemptStarted,
    Decision,
    Line,
    Resumed,
    RunFinished,
    SaveCommitted,
    SaveFailed,
    StepsDone,
    Warned,
    WorkerFailed,
    decode_loss,
)
from holdfast.journal.render import number, render

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import Progress, TaskID

SHOWN = (AttemptStarted, Decision, Resumed, RunFinished, SaveCommitted, SaveFailed, Warned, WorkerFailed)
"""Events shown as lines. A rejected rung is not among them: the decision to resume names it and says why."""
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
        if isinstance(body, StepsDone):
            if line.who == "rank-0":
                self._progress(line, body)
            return
        if isinstance(body, AttemptStarted):
            self._attempt = line.attempt
        elif isinstance(body, SaveCommitted):
            self._saved = f"step {body.step}"
        elif isinstance(body, Resumed):
            self._saved = f"step {body.step}" if body.checkpoint else "none yet"
            if self._bar is not None:
                self._bar[0].update(self._bar[1], completed=body.step)
        if isinstance(body, SHOWN) and not quiet:
            shown = render(body)
            self.say(shown.text, STYLES.get(shown.style, ""))
            for detail in shown.details:
                self.say(f"  {detail}", "dim")

    def _progress(self, line: Line, body: StepsDone) -> None:
        step = body.first + len(body.seconds) - 1
        self._loss = number(decode_loss(body.loss[-1])) if body.loss else "–"
        if self._bar is not None:
            progress, task = self._bar
            progress.update(task, completed=step, loss=self._loss, attempt=line.attempt, saved=self._saved)
        elif not self.console.is_terminal and time.monotonic() - self._said >= PLAIN_EVERY:
            self._said = time.monotonic()
            self.say(f"step {step}, loss {self._loss}, attempt {line.attempt}, last save {self._saved}")
