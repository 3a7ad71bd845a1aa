"""`holdfast journal`: the record of a run, for people and for programs."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from holdfast.cli.output import show_time
from holdfast.errors import UsageError

if TYPE_CHECKING:
    from holdfast.journal.events import Line
    from holdfast.journal.reader import JournalReader

POLL_SECONDS = 0.2
LAST_WORDS_SECONDS = 2.0
"""How long `--follow` waits, after the last step, for the agent to record the attempt's end."""

STYLES = {
    "fault": "bold red",
    "warning": "yellow",
    "decision": "bold cyan",
    "saved": "blue",
    "good": "green",
    "progress": "dim",
    "plain": "",
}

Pair = tuple["Line", bytes]


def journal(
    run_dir: Annotated[Path, typer.Argument(help="The run's directory (run.dir, --run-dir).")],
    json: Annotated[bool, typer.Option("--json", help="The lines as they are in the files.")] = False,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Go on until the run has finished.")] = False,
    attempt: Annotated[int | None, typer.Option(min=0, help="Only this attempt.")] = None,
    event: Annotated[list[str] | None, typer.Option(help="Only this event; may be repeated.")] = None,
    since: Annotated[float | None, typer.Option(min=0, help="Only the last so many seconds.")] = None,
    report: Annotated[Path | None, typer.Option(help="Write an HTML report there instead.")] = None,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Of --report: replace a file that is no earlier report.")
    ] = False,
) -> None:
    """Show what happened in a run and why: events, and decisions with their evidence."""
    from holdfast.journal.reader import JournalReader

    if not (run_dir / "run.json").is_file():
        raise UsageError(f"{run_dir} is not a run directory: it has no run.json. Give the run's --run-dir")
    reader = JournalReader(run_dir / "journal")
    if report is not None:
        if json or follow or event or attempt is not None or since is not None:
            raise UsageError("--report covers the whole run; give it without the other options")
        _report(reader, run_dir, report, overwrite=overwrite)
        return
    if overwrite:
        raise UsageError("--overwrite belongs to --report: give that too, or leave it out")
    first = reader.poll_raw()
    wanted = _filter(first, attempt, event or [], since)
    show = _show_json if json else _show_people
    try:
        show([pair for pair in first if wanted(pair[0])])
        if follow:
            _follow(reader, first, lambda pairs: show([pair for pair in pairs if wanted(pair[0])]))
    except BrokenPipeError:
        # The reader of our output has seen enough. Python flushes stdout once more at exit: give it a sink.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except KeyboardInterrupt:
        if not follow:
            raise
    if reader.unreadable:
        print(f"holdfast: skipped {reader.unreadable} unreadable journal lines", file=sys.stderr)
    _insist_on_all(reader, run_dir)


def _insist_on_all(reader: JournalReader, run_dir: Path) -> None:
    """An empty journal and one that nobody lets us read are not the same."""
    from holdfast.errors import ControlError
    from holdfast.journal.render import printable

    if not reader.unopened:
        return
    name, why = min(reader.unopened.items())
    path = printable(str(run_dir / "journal" / name), 4096)
    others = f", nor {len(reader.unopened) - 1} more" if len(reader.unopened) > 1 else ""
    raise ControlError(
        f"the journal is not shown as a whole: {path} cannot be read: {why}{others}. Check who may read it"
    )


def _filter(
    pairs: list[Pair], attempt: int | None, names: list[str], since: float | None
) -> Callable[[Line], bool]:
    """What the options ask for, as a test of a line."""
    from holdfast.journal.events import EVENT_NAMES, event_name

    wanted = set(names)
    unknown = wanted.difference(EVENT_NAMES, (event_name(line.body) for line, _ in pairs))
    if unknown:
        raise UsageError(
            f"--event {', '.join(sorted(unknown))}: no such event. Events are {', '.join(EVENT_NAMES)}"
        )
    earliest = time.time() - since if since is not None else None

    def matches(line: Line) -> bool:
        return (
            (attempt is None or line.attempt == attempt)
            and (not wanted or event_name(line.body) in wanted)
            and (earliest is None or line.at >= earliest)
        )

    return matches


def _show_json(pairs: list[Pair]) -> None:
    for _, raw in pairs:
        sys.stdout.buffer.write(raw + b"\n")
    sys.stdout.buffer.flush()


def _show_people(pairs: list[Pair]) -> None:
    from rich.console import Console
    from rich.text import Text

    from holdfast.journal.render import condense, printable, render

    console = Console(highlight=False)
    for line in condense(line for line, _ in pairs):
        shown = render(line.body)
        text = Text(show_time(line.at), style="dim")
        text.append(f"  {line.attempt:>3}  {printable(line.who):<12}  ", style="dim")
        text.append(shown.text, style=STYLES[shown.style])
        for detail in shown.details:
            text.append("\n" + " " * 40 + detail, style="dim")
        with console.capture() as captured:  # rich would turn a broken pipe into exit code 1
            console.print(text, soft_wrap=True)
        sys.stdout.write(captured.get())
    sys.stdout.flush()


def _follow(reader: JournalReader, seen: list[Pair], show: Callable[[list[Pair]], None]) -> None:
    """Show lines as they come until the run has finished (or Ctrl-C). A restart un-finishes it."""
    from holdfast.journal.events import AttemptEnded, AttemptStarted, RunFinished

    finished_at: float | None = None
    pairs = seen
    while True:
        for line, _ in pairs:
            if isinstance(line.body, AttemptStarted):
                finished_at = None
            elif isinstance(line.body, RunFinished) and finished_at is None:
                finished_at = time.monotonic() + LAST_WORDS_SECONDS
            elif isinstance(line.body, AttemptEnded) and line.body.outcome == "finished":
                finished_at = time.monotonic()
        if finished_at is not None and time.monotonic() >= finished_at:
            return
        time.sleep(POLL_SECONDS)
        pairs = reader.poll_raw()
        show(pairs)


def _report(reader: JournalReader, run_dir: Path, destination: Path, *, overwrite: bool) -> None:
    from holdfast.observe.report import write_report

    lines = reader.poll()
    _insist_on_all(reader, run_dir)
    facts = [("Run directory", str(run_dir))]
    if reader.unreadable:
        facts.append(("Unreadable journal lines", str(reader.unreadable)))
    try:
        write_report(
            lines, destination, title=f"Run {run_dir.resolve().name}", facts=facts, overwrite=overwrite
        )
    except OSError as error:
        raise UsageError(f"cannot write the report {destination}: {error.strerror or error}") from error
    print(f"wrote {destination}")
