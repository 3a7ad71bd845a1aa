"""The `holdfast` command. Only light modules are imported here; torch never is."""

from __future__ import annotations

import contextlib
import errno
import io
import os
import sys

import typer

from holdfast import __version__
from holdfast.base import LineSource, LogFormat, install, log_format, speak
from holdfast.cli import ckpt, clean, config, control, doctor, plan, recover, run, slurm, status
from holdfast.errors import ExitCode, HoldfastError

app = typer.Typer(
    name="holdfast",
    help="Keeps long PyTorch training runs alive, correctly.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    add_completion=False,
    add_help_option=False,  # declared below, see _print_help
    rich_markup_mode=None,  # plain help: drawing with rich doubles the time that --help takes
)
app.add_typer(config.app, name="config")
app.add_typer(ckpt.app, name="ckpt")
app.add_typer(control.app, name="control")
app.add_typer(slurm.app, name="slurm")
app.command(name="status")(status.status)
app.command(name="why")(status.why)
app.command(name="journal")(status.journal)
app.command(name="recover")(recover.recover)
app.command(name="clean")(clean.clean)
app.command(name="plan")(plan.plan)
app.command(name="demo")(run.demo)
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

    Whoever stops reading our output (`| head`) has seen enough: that is no failure.
    """
    _open_standard_files()
    install(LineSource.COMMAND)
    for stream in (sys.stdout, sys.stderr):  # a name that this encoding cannot express is shown, not fatal
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
    code: int | str | None = 0
    try:
        app()
    except SystemExit as end:
        code = end.code
        if type(sys.stdout).__name__ == "PacifyFlushWrapper":  # how click handles a broken pipe, with code 1
            code = 0
    except HoldfastError as error:
        complain(f"error: {error}")
        code = int(error.exit_code)
    except BrokenPipeError:
        pass
    except OSError as error:
        if error.filename is None and error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EIO):
            complain(_INCOMPLETE.format(error.strerror))
            code = int(ExitCode.FAILED)
        else:
            code = _tell_os_error(error)
    except Exception as error:  # noqa: BLE001 - reported in one line, and kept whole where that line says
        code = tell_defect(error)
    sys.exit(_flushed(code))


_NOT_AS_GIVEN = frozenset(
    {
        errno.EACCES,
        errno.EEXIST,
        errno.EINVAL,
        errno.EISDIR,
        errno.ELOOP,
        errno.ENAMETOOLONG,
        errno.ENOENT,
        errno.ENOTDIR,
        errno.ENOTEMPTY,
        errno.ENXIO,
        errno.EPERM,
        errno.EXDEV,
    }
)
"""What can be wrong with a path that was given."""


def _tell_os_error(error: OSError) -> int:
    """A file that cannot be used as intended is no defect: say which and why, and return the code."""
    from holdfast.base import is_storage_trouble

    storage = is_storage_trouble(error)
    if error.filename is None or not (storage or error.errno in _NOT_AS_GIVEN):
        return tell_defect(error)
    path = os.fsdecode(error.filename) if isinstance(error.filename, bytes) else str(error.filename)
    if storage:
        complain(f"error: {_shown(path)}: {error.strerror}. Look at its file system, then try again")
        return int(ExitCode.STORAGE_FAILED)
    complain(f"error: {_shown(path)}: {error.strerror}. Check the path and who may use it")
    return int(ExitCode.USAGE)


def tell_defect(error: BaseException) -> int:
    """Nobody has thought of this: print one line for people, and keep the whole trace where it says."""
    import traceback

    frame = traceback.extract_tb(error.__traceback__)[-1:]
    where = f" ({os.path.basename(frame[0].filename)}:{frame[0].lineno})" if frame else ""  # noqa: PTH119
    what = _shown(f"{type(error).__name__}: {error}".partition("\n")[0])
    kept = _keep_trace("".join(traceback.format_exception(error)))
    complain(f"error: this is a defect of holdfast {__version__}, not of what you did: {what}{where}. {kept}")
    return int(ExitCode.FAILED)


def _keep_trace(trace: str) -> str:
    """Keep the trace in a file that only its owner can read; says in a sentence where it is."""
    import tempfile

    try:
        number, path = tempfile.mkstemp(prefix="holdfast-defect-", suffix=".txt")
        with os.fdopen(number, "w", errors="backslashreplace") as file:
            file.write(f"holdfast {__version__}, python {sys.version}\n{sys.argv!r}\n\n{trace}")
    except OSError as unkept:
        return f"Its trace could not be kept: {unkept.strerror}"
    return f"The full trace is in {path}: please report it"


def _shown(text: str, most: int = 1000) -> str:
    """The text on one line, and without what a terminal would act on."""
    from holdfast.base import printable

    return printable(text, most)


def complain(text: str) -> None:
    """Print on stderr, if that can be written."""
    # The launcher speaks like any other command, unless lines are to be JSON.
    launcher = sys.argv[1:2] == ["run"] and log_format(os.environ) is LogFormat.JSON
    with contextlib.suppress(OSError, ValueError):
        speak(text, source=LineSource.LAUNCHER if launcher else LineSource.COMMAND)


def _flushed(code: int | str | None) -> int | str | None:
    """Flush the output and return the code to end with. The interpreter itself prints a traceback."""
    for number, stream in ((1, sys.stdout), (2, sys.stderr)):
        try:
            stream.flush()
        except (OSError, ValueError) as error:
            nothing = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nothing, number)  # the rest is flushed once more when the interpreter ends
            os.close(nothing)
            if isinstance(error, OSError) and error.errno != errno.EPIPE:
                complain(_INCOMPLETE.format(error.strerror))
                code = code or int(ExitCode.FAILED)
    return code


def _open_standard_files() -> None:
    """If started without them (`>&-`), the next file opened would be taken for standard output."""
    for number in (0, 1, 2):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)
    sys.stdout = sys.stdout or os.fdopen(1, "w", closefd=False)
    sys.stderr = sys.stderr or os.fdopen(2, "w", closefd=False)
