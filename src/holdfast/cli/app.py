"""The `holdfast` command. Only light modules are imported here; torch never is."""

from __future__ import annotations

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


def main() -> None:
    """Run the command; an error raised on purpose becomes one clear line and its documented code."""
    try:
        app()
    except HoldfastError as error:
        print(f"holdfast: error: {error}", file=sys.stderr)
        sys.exit(int(error.exit_code))
