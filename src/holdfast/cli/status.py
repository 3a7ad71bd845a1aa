"""`holdfast status`, `why` and `journal`: how a run is doing, what befell it, and the record of it."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from holdfast.cli.output import print_json, show_time
from holdfast.errors import UsageError

if TYPE_CHECKING:
    from rich.text import Text

    from holdfast.account import Incident, Remark
    from holdfast.journal import JournalLine, JournalReader
    from holdfast.observe import Status
    from holdfast.record import ControlDirectory


# `holdfast status`: how a run is doing now.


def status(
    run_dir: Annotated[
        Path | None, typer.Argument(help="The run's directory; without it, the setting run.dir.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON for programs.")] = False,
    watch: Annotated[bool, typer.Option("--watch", "-w", help="Continue until Ctrl-C.")] = False,
    every: Annotated[float, typer.Option(min=0.1, help="Seconds between two looks of --watch.")] = 2.0,
) -> None:
    """Say how a run is doing: its state, attempt, step and rate, last save and incident, and what is left.

    Exits with 0 if it is alive, has finished or has not yet begun, 1 if it failed, was stopped or was lost, 2
    if there is no run. Changes nothing.
    """
    from holdfast.errors import ExitCode
    from holdfast.observe import status_of

    control = _open(run_dir)
    try:
        if watch:
            _watch(control, every, as_json=as_json)
            return
        found = status_of(control)
        _print_json(found) if as_json else _print(found)
    except BrokenPipeError:
        # The reader of our output has seen enough. Python flushes stdout once more at exit: give it a sink.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return
    except KeyboardInterrupt:
        if not watch:
            raise
        return
    raise typer.Exit(ExitCode.OK if found.ok else ExitCode.FAILED)


def _open(run_dir: Path | None) -> ControlDirectory:
    from holdfast.errors import UsageError
    from holdfast.record import ControlDirectory

    if run_dir is None:
        from holdfast.config import load

        run_dir = Path(load().settings.run.dir)
    if not (run_dir / "run.json").is_file():
        raise UsageError(f"{run_dir} is not a run directory: it has no run.json. Give the run's --run-dir")
    return ControlDirectory.open(run_dir)


def _watch(control: ControlDirectory, every: float, *, as_json: bool) -> None:
    from holdfast.observe import status_line, status_of

    if not as_json and sys.stdout.isatty():
        _watch_live(control, every)
        return
    while True:
        found = status_of(control)
        if as_json:
            _print_json(found)
        else:
            print(status_line(found), flush=True)
        time.sleep(every)


def _watch_live(control: ControlDirectory, every: float) -> None:
    from rich.live import Live

    from holdfast.observe import status_of

    with Live(_text(status_of(control)), auto_refresh=False, screen=False) as live:
        while True:
            time.sleep(every)
            live.update(_text(status_of(control)), refresh=True)


def _text(status: Status) -> Text:
    from rich.text import Text

    from holdfast.observe import status_rows

    lines = [
        Text.assemble((f"{row.label:<10}", "dim"), (row.text, row.style), overflow="fold")
        for row in status_rows(status)
    ]
    return Text("\n").join(lines)


def _print(status: Status) -> None:
    from holdfast.observe import status_rows

    if sys.stdout.isatty():
        from rich.console import Console

        Console(highlight=False).print(_text(status), soft_wrap=True)
        return
    for row in status_rows(status):
        print(f"{row.label:<10}{row.text}")
    sys.stdout.flush()


def _print_json(status: Status) -> None:
    import msgspec

    sys.stdout.write(msgspec.json.encode(status).decode() + "\n")
    sys.stdout.flush()


# `holdfast why`: the five answers about a run's last incident, or about one that was named.


def why(
    run_dir: Annotated[Path, typer.Argument(help="The run's directory (run.dir, --run-dir).")],
    attempt: Annotated[
        int | None, typer.Option(min=1, help="The attempt that failed; without it, the last one that did.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON for programs.")] = False,
) -> None:
    """Say who failed first, what happened, why, what was done and what it cost, and what to do now.

    Exits with 0, or with 2 if there is no such run, or if the attempt did not fail.
    Changes nothing.
    """
    from dataclasses import asdict

    from holdfast.account import incidents_of as incidents
    from holdfast.account import remarks_of as remarks
    from holdfast.account import stops_of
    from holdfast.journal import read_journal

    if not (run_dir / "run.json").is_file():
        raise UsageError(f"{run_dir} is not a run directory: it has no run.json. Give the run's --run-dir")
    lines = read_journal(run_dir / "journal")
    found = incidents(lines)
    others = remarks(lines, found)
    asked = stops_of(lines)
    told = sorted([*found, *asked], key=lambda one: one.at)
    if attempt is None:
        chosen = told[-1] if told else None
    else:
        chosen = next((one for one in told if one.attempt == attempt), None)
        if chosen is None:
            failed = ", ".join(str(one.attempt) for one in found) or "none"
            raise UsageError(f"--attempt {attempt} did not fail in {run_dir}; attempts that did: {failed}")
    if as_json:
        print_json({"incident": _as_json(chosen), "others": [asdict(one) for one in others]})
        return
    stop = next((one for one in others if chosen in asked and _is_of(one, chosen)), None)
    out = [one for one in others if one.kind == "unfit" and (chosen is None or one.at > chosen.at)]
    if out and attempt is None:  # the newest of all: nothing has run since
        stop = out[-1]
        _show_remark(stop, "a launch that could not begin")
    elif stop is not None:  # reported with what the stop cost, which no incident knows
        _show_remark(stop, "stop on request")
    elif chosen is not None:
        _show(chosen, "stop on request" if chosen in asked else f"incident {chosen.number} of {len(found)}")
    elif not others:
        typer.echo("no incident: nothing in this run's journal has failed")
    else:
        stop = max(others, key=lambda one: (one.seconds, one.count))
        _show_remark(stop, "not a failure, but worth knowing")
    for one in [one for one in others if one is not stop] if attempt is None else []:
        times = f" ({one.count} times)" if one.count > 1 and one.kind not in ("dropped", "copy") else ""
        typer.echo(f"also, {show_time(one.at)}: {one.what}{times}\n  next  {one.next}")


def _is_of(remark: Remark, stopped: Incident | None) -> bool:
    return remark.kind == "stop" and stopped is not None and remark.attempt == stopped.attempt


def _show_remark(remark: Remark, which: str) -> None:
    from holdfast.account import answers_of

    which += f", attempt {remark.attempt}" if remark.attempt else ""
    typer.echo(f"{which}, {show_time(remark.at)}")
    for question, text in answers_of(remark):
        typer.echo(f"  {question:<5} {text}")


def _show(incident: Incident, which: str) -> None:
    from holdfast.account import five_answers

    typer.echo(f"{which}, attempt {incident.attempt}, {show_time(incident.at)}")
    for question, text in five_answers(incident):
        typer.echo(f"  {question:<5} {text}")
    for name in incident.account.files if incident.account is not None else []:
        typer.echo(f"  file  {name}")


def _as_json(incident: Incident | None) -> dict[str, object] | None:
    import msgspec

    if incident is None:
        return None
    told = msgspec.to_builtins(incident.account) if incident.account is not None else None
    return {
        "number": incident.number,
        "attempt": incident.attempt,
        "at": incident.at,
        "account": told,
        "what": incident.what,
        "refused": list(incident.refused),
        "resumed_step": incident.resumed_step,
        "seconds_lost": incident.seconds_lost,
        "seconds_down": incident.seconds_down,
        "phases": [
            {"name": phase.name, "seconds": phase.seconds, "parts": dict(phase.parts)}
            for phase in incident.phases
        ],
        "steps_lost": incident.steps_lost,
        "failed_at_step": incident.failed_at_step,
        "open": incident.open,
    }


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

Pair = tuple["JournalLine", bytes]


def journal(
    run_dir: Annotated[Path, typer.Argument(help="The run's directory (run.dir, --run-dir).")],
    json: Annotated[bool, typer.Option("--json", help="Print the lines as they are in the files.")] = False,
    follow: Annotated[
        bool, typer.Option("--follow", "-f", help="Continue until the run has finished.")
    ] = False,
    attempt: Annotated[int | None, typer.Option(min=0, help="Only this attempt.")] = None,
    event: Annotated[list[str] | None, typer.Option(help="Only this event; may be repeated.")] = None,
    since: Annotated[
        float | None, typer.Option(min=0, metavar="N", help="Only what happened in the last N seconds.")
    ] = None,
    report: Annotated[Path | None, typer.Option(help="Write an HTML report to this file instead.")] = None,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="With --report: replace a file that is not an earlier report.")
    ] = False,
) -> None:
    """Show what happened in a run and why: events, and decisions with their evidence."""
    from holdfast.journal import JournalReader

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
    """An empty journal and one that we may not read are not the same."""
    from holdfast.base import printable
    from holdfast.errors import ControlError

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
) -> Callable[[JournalLine], bool]:
    """What the options ask for, as a test for lines."""
    from holdfast.journal import EVENT_NAMES, event_name

    wanted = set(names)
    unknown = wanted.difference(EVENT_NAMES, (event_name(line.body) for line, _ in pairs))
    if unknown:
        raise UsageError(
            f"--event {', '.join(sorted(unknown))}: no such event. Events are {', '.join(EVENT_NAMES)}"
        )
    earliest = time.time() - since if since is not None else None

    def matches(line: JournalLine) -> bool:
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

    from holdfast.base import printable
    from holdfast.journal import condense

    console = Console(highlight=False)
    for line in condense(line for line, _ in pairs):
        shown = line.body.render()
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
    from holdfast.observe import write_report

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
