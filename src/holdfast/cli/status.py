"""`holdfast status`: how a run is now."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from rich.text import Text

    from holdfast.control.directory import ControlDirectory
    from holdfast.observe.status import Status


def status(
    run_dir: Annotated[
        Path | None, typer.Argument(help="The run's directory; without it, the setting run.dir.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON for programs.")] = False,
    watch: Annotated[bool, typer.Option("--watch", "-w", help="Go on until Ctrl-C.")] = False,
    every: Annotated[float, typer.Option(min=0.1, help="Seconds between two looks of --watch.")] = 2.0,
) -> None:
    """Say how a run is: its state, attempt, step and rate, last save and incident, and what is left.

    Exits with 0 if it is alive, has finished or not yet begun, 1 if it failed, was stopped or lost, 2 if
    there is no run. Changes nothing.
    """
    from holdfast.exit_codes import ExitCode
    from holdfast.observe.status import look

    control = _open(run_dir)
    try:
        if watch:
            _watch(control, every, as_json=as_json)
            return
        found = look(control)
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
    from holdfast.control.directory import ControlDirectory
    from holdfast.errors import UsageError

    if run_dir is None:
        from holdfast.config import load

        run_dir = Path(load().settings.run.dir)
    if not (run_dir / "run.json").is_file():
        raise UsageError(f"{run_dir} is not a run directory: it has no run.json. Give the run's --run-dir")
    return ControlDirectory.open(run_dir)


def _watch(control: ControlDirectory, every: float, *, as_json: bool) -> None:
    from holdfast.observe.status import look
    from holdfast.observe.status_text import short

    if not as_json and sys.stdout.isatty():
        _watch_live(control, every)
        return
    while True:
        found = look(control)
        if as_json:
            _print_json(found)
        else:
            print(short(found), flush=True)
        time.sleep(every)


def _watch_live(control: ControlDirectory, every: float) -> None:
    from rich.live import Live

    from holdfast.observe.status import look

    with Live(_text(look(control)), auto_refresh=False, screen=False) as live:
        while True:
            time.sleep(every)
            live.update(_text(look(control)), refresh=True)


def _text(found: Status) -> Text:
    from rich.text import Text

    from holdfast.observe.status_text import rows

    lines = [
        Text.assemble((f"{row.label:<10}", "dim"), (row.text, row.style), overflow="fold")
        for row in rows(found)
    ]
    return Text("\n").join(lines)


def _print(found: Status) -> None:
    from holdfast.observe.status_text import rows

    if sys.stdout.isatty():
        from rich.console import Console

        Console(highlight=False).print(_text(found), soft_wrap=True)
        return
    for row in rows(found):
        print(f"{row.label:<10}{row.text}")
    sys.stdout.flush()


def _print_json(found: Status) -> None:
    import msgspec

    sys.stdout.write(msgspec.json.encode(found).decode() + "\n")
    sys.stdout.flush()
