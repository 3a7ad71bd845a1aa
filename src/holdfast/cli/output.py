"""How commands show sizes, times, JSON and progress, and the arguments that several of them take."""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Annotated, Any

import typer

from holdfast.base import moment

# Arguments that several commands take, each spelt and explained once.


# `parser`: by default typer looks at every path it is given, which never ends on a dead mount.
RUN = Annotated[Path, typer.Argument(parser=Path, help="The run's directory (run.dir, --run-dir).")]
WHICH = Annotated[str, typer.Argument(metavar="STEP|ID|NAME", help="The checkpoint: step, id or name.")]
REASON = Annotated[str, typer.Option(help="The reason; kept with the record and in the journal.")]
ROOT = Annotated[
    Path | None, typer.Option(parser=Path, help="Its checkpoint root, if that is not RUN_DIR/checkpoints.")
]
YES = Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")]
JSON = Annotated[bool, typer.Option("--json", help="Print JSON for programs.")]
CONFIG = Annotated[
    Path | None, typer.Option("--config", metavar="FILE", help="Read settings from this TOML file.")
]


def print_json(value: Any) -> None:
    import json

    typer.echo(json.dumps(value))


def print_columns(lines: list[list[str]]) -> None:
    """Print lines with equally many cells; each column is as wide as its widest cell."""
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    for line in lines:
        typer.echo("  ".join(f"{cell:{width}}" for cell, width in zip(line, widths, strict=True)).rstrip())


def show_bytes(count: float | None) -> str:
    if count is None:
        return "-"
    for unit in ("B", "kB", "MB", "GB"):
        if count < 1000:
            return f"{count:.0f} B" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1000
    return f"{count:.1f} TB"


def show_time(created: float | None) -> str:
    return "-" if created is None else moment(created)


class Bar:
    """A progress bar of bytes on a terminal's stderr; nothing anywhere else."""

    def __init__(self, total: Callable[[], int | None]) -> None:
        self._bar: AbstractContextManager[Any] = nullcontext()
        self.advance: Any = None
        if not sys.stderr.isatty():
            return
        from rich.console import Console
        from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

        columns = (TextColumn("verifying"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
        progress = Progress(*columns, console=Console(stderr=True), transient=True)
        task = progress.add_task("verify", total=total())
        self._bar = progress
        self.advance = lambda count: progress.advance(task, count)

    def __enter__(self) -> Bar:
        self._bar.__enter__()
        return self

    def __exit__(self, *exception: Any) -> None:
        self._bar.__exit__(*exception)
