"""`holdfast config`: shows the effective settings and where each of them came from."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from holdfast.cli.output import CONFIG

if TYPE_CHECKING:
    from holdfast.config import Effective

app = typer.Typer(help="Show the settings.", no_args_is_help=True)

WIDEST = 110
"""Columns of text, even into a pipe, which has no width of its own."""


@app.callback()
def _group() -> None:
    """Show the settings."""  # without a callback typer would fold a lone command into its group


@app.command()
def show(
    config: CONFIG = None,
    assignments: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="SECTION.KEY=VALUE", help="Set one setting; may be repeated."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON for programs.")] = False,
) -> None:
    """Print every setting: its value, where that came from, what it does.

    Only the file given with --config and the HOLDFAST_* environment are read.
    """
    import msgspec

    from holdfast.config import load, masked, parse_assignments

    effective = load(config, command_line=parse_assignments(assignments or ()))
    if as_json:
        rows = {
            key: {"value": masked(key, effective.settings.get(key)), "source": source}
            for key, source in effective.sources.items()
        }
        typer.echo(msgspec.json.format(msgspec.json.encode(rows)))
    else:
        _print_table(effective)


def _print_table(effective: Effective) -> None:
    """Drawn without rich, which would take longer than everything else here together."""
    import shutil
    import textwrap

    import msgspec

    from holdfast.config import FIELDS, masked

    width = min(WIDEST, shutil.get_terminal_size((WIDEST, 24)).columns)
    section = ""
    for field in FIELDS.values():
        if section != field.section:
            typer.echo(f"[{field.section}]" if not section else f"\n[{field.section}]")
        section = field.section
        source = effective.sources[field.key]
        # As JSON, so that text can be told from numbers and no control character reaches the terminal.
        value = msgspec.json.encode(masked(field.key, effective.settings.get(field.key))).decode()
        given = source != "default"
        typer.echo(
            f"{field.key} = {typer.style(value, bold=given)}  {typer.style(f'({source})', dim=not given)}"
        )
        typer.echo(textwrap.indent(textwrap.fill(field.description, max(20, width - 4)), "    "))
