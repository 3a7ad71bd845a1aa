"""`holdfast recover`: the recovery runbook as a program."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from holdfast.cli.output import JSON, ROOT, RUN, YES

if TYPE_CHECKING:
    from holdfast.recover import TicketRow


def recover(
    run_dir: RUN,
    command: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[-- COMMAND...]", help="The command to start the run with, instead of the last launch's."
        ),
    ] = None,
    run: Annotated[bool, typer.Option("--run", help="Run the command, in the foreground.")] = False,
    yes: YES = False,
    watch: Annotated[
        bool | None,
        typer.Option("--watch/--no-watch", help="Judge the resume of what --run starts, or of a live run."),
    ] = None,
    timeout: Annotated[float, typer.Option(min=0.0, help="Seconds for which a resume is watched.")] = 3600.0,
    wait: Annotated[
        float, typer.Option(min=0.0, help="Seconds for which --run waits for nodes, if there are too few.")
    ] = 600.0,
    band: Annotated[
        float, typer.Option(min=0.0, help="How much longer a step may take than before: 0.1 is 10 %.")
    ] = 0.1,
    mtbf: Annotated[
        float | None, typer.Option(min=0.0, help="Hours between failures, instead of the measured value.")
    ] = None,
    record: Annotated[
        Path | None, typer.Option("--markdown", metavar="FILE", help="Write a record for a ticket.")
    ] = None,
    overwrite: Annotated[
        bool,
        typer.Option("--overwrite", help="With --markdown: replace a file that is not an earlier record."),
    ] = False,
    root: ROOT = None,
    remote: Annotated[str | None, typer.Option(help="URL of the copies, if not the last launch's.")] = None,
    world: Annotated[int | None, typer.Option(min=1, help="Number of ranks that a start would have.")] = None,
    quick: Annotated[
        bool, typer.Option("--quick", help="Check names and sizes only; read no digests.")
    ] = False,
    as_json: JSON = False,
) -> None:
    """Say what stopped a run, whether it can continue and from where; with --run, start it and judge the
    resume.

    A directory of checkpoints without a run (plain DCP) is examined as far as possible. Changes nothing
    without --run, --yes or a confirmation. Exits with 0 if the run can be, or was, resumed correctly;
    otherwise with the code that says why: 1 the resume was not correct or the job's error stands, 2 no run
    there or no command for it, 17 validation failed, 18 no valid rung, 20 alive, 22 budget spent, 23 storage,
    24 control directory, 25 state does not fit, 26 nothing left to vary, 28 too few nodes; what the command
    ended with, if it was run and failed.
    """
    from holdfast.cli.control import user
    from holdfast.cli.output import Bar
    from holdfast.recover import Wishes, open_run, recover_plain_root, recover_run

    wishes = Wishes(
        run=run,
        yes=yes,
        watch=watch,
        timeout=timeout,
        wait=wait,
        band=band,
        mtbf_hours=mtbf or 0.0,
        record=record,
        overwrite=overwrite,
        root=root,
        remote=remote,
        ranks=world,
        quick=quick,
        command=command or [],
        by=user(),
        to_stderr=as_json,
    )
    control = open_run(run_dir)
    show = _quiet if as_json else _show
    if control is None:
        report = recover_plain_root(run_dir, wishes, show, lambda: Bar(lambda: None))
    else:
        report = recover_run(control, wishes, show, _ask, lambda: Bar(lambda: None))
    if as_json:
        import msgspec

        typer.echo(msgspec.json.encode(report).decode())
    raise typer.Exit(report.exit_code)


def _quiet(row: TicketRow) -> None:
    del row


def _show(row: TicketRow) -> None:
    from holdfast.recover import plain_text

    line = plain_text(row)
    if row.word and row.style and sys.stdout.isatty() and "NO_COLOR" not in os.environ:
        from rich.console import Console
        from rich.text import Text

        text = Text(line)
        text.stylize(row.style, 0, len(row.word))
        Console(highlight=False).print(text, soft_wrap=True)
        return
    typer.echo(line)


def _ask(question: str) -> bool | None:
    if not sys.stdin.isatty() or not sys.stdout.isatty():
        return None
    return typer.confirm(question, default=False)
