"""The `holdfast` command. Only light modules are imported here; torch never is."""

from __future__ import annotations

import contextlib
import errno
import os
import sys

import typer

from holdfast._version import __version__
from holdfast.cli import (
    ckpt,
    clean,
    config,
    control,
    demo,
    doctor,
    journal,
    plan,
    recover,
    run,
    slurm,
    status,
)
from holdfast.errors import HoldfastError
from holdfast.exit_codes import ExitCode

app = typer.Typer(
    name="holdfast",
    help="Keeps long PyTorch training runs alive, correctly.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    add_completion=False,
    add_help_option=False,  # declared below, see _print_help
    rich_markup_mode=None,  # plain help: drawing it with rich doubles the time that --help takes
)
app.add_typer(config.app, name="config")
app.add_typer(ckpt.app, name="ckpt")
app.add_typer(control.app, name="control")
app.add_typer(slurm.app, name="slurm")
app.command(name="status")(status.status)
app.command(name="journal")(journal.journal)
app.command(name="recover")(recover.recover)
app.command(name="clean")(clean.clean)
app.command(name="plan")(plan.plan)
app.command(name="demo")(demo.demo)
app.command(name="doctor")(doctor.doctor)
app.command(
    name="run",
    add_help_option=False,
    context_settings={
        "allow_extra_args": True,
        "ignore_unknown_options": True,
        "allow_interspersed_args": False,
    },
)(run.run)


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"holdfast {__version__}")
        raise typer.Exit


def _print_help(context: typer.Context, wanted: bool) -> None:
    """The usual --help, declared here: typer 0.29 imports pydantic (0.1 s) to see that its own is unset."""
    if wanted:
        typer.echo(context.get_help())
        raise typer.Exit


@app.callback()
def _options(
    version: bool = typer.Option(
        False, "--version", callback=_print_version, is_eager=True, help="Show the version."
    ),
    help: bool = typer.Option(
        False, "--help", callback=_print_help, is_eager=True, help="Show this message and exit."
    ),
) -> None:
    del version, help


_INCOMPLETE = "error: the output cannot be written: {}. What was printed is incomplete"


def main() -> None:
    """Run the command; an error raised on purpose becomes one clear line and its documented code.

    Who stops reading our output (`| head`) has seen enough: that is no failure, and there is nobody to tell.
    """
    _open_standard_files()
    code: int | str | None = 0
    try:
        app()
    except SystemExit as end:
        code = end.code
        if type(sys.stdout).__name__ == "PacifyFlushWrapper":  # how click takes a broken pipe, with code 1
            code = 0
    except HoldfastError as error:
        complain(f"error: {error}")
        code = int(error.exit_code)
    except BrokenPipeError:
        pass
    except OSError as error:
        if error.filename is not None or error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EIO):
            raise
        complain(_INCOMPLETE.format(error.strerror))
        code = int(ExitCode.FAILED)
    sys.exit(_flushed(code))


def complain(text: str) -> None:
    """On stderr, if that can be written."""
    with contextlib.suppress(OSError, ValueError):
        print(f"holdfast: {text}", file=sys.stderr, flush=True)


def _flushed(code: int | str | None) -> int | str | None:
    """The code to end with once the last of the output is out; the interpreter's own way is a traceback."""
    for number, stream in ((1, sys.stdout), (2, sys.stderr)):
        try:
            stream.flush()
        except (OSError, ValueError) as error:
            nothing = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nothing, number)  # what is left over is flushed once more when the interpreter ends
            os.close(nothing)
            if isinstance(error, OSError) and error.errno != errno.EPIPE:
                complain(_INCOMPLETE.format(error.strerror))
                code = code or int(ExitCode.FAILED)
    return code


def _open_standard_files() -> None:
    """Started without them (`>&-`), the next file that is opened would be taken for standard output."""
    for number in (0, 1, 2):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)
    sys.stdout = sys.stdout or os.fdopen(1, "w", closefd=False)
    sys.stderr = sys.stderr or os.fdopen(2, "w", closefd=False)
