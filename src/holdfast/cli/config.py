"""`holdfast config`: shows the effective settings and where each of them came from."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from holdfast.cli.arguments import CONFIG

if TYPE_CHECKING:
    from holdfast.config import Effective

app = typer.Typer(help="Show the settings.", no_args_is_help=True)

WIDE = 120
"""Columns from which on every part of a setting gets a column of its own."""
WIDTH_OF_A_PIPE = 160


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

    Nothing is read but the file given with --config and the HOLDFAST_* environment.
    """
    import msgspec

    from holdfast.config import FIELDS, load, parse_assignments

    effective = load(config, command_line=parse_assignments(assignments or ()))
    if as_json:
        rows = {
            key: {"value": effective.settings.get(key), "source": effective.sources[key]} for key in FIELDS
        }
        typer.echo(msgspec.json.format(msgspec.json.encode(rows)))
    else:
        _print_table(effective)


def _print_table(effective: Effective) -> None:
    import msgspec
    from rich import box
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    from holdfast.config import FIELDS

    console = Console()
    if not console.is_terminal:  # a pipe has no width of its own
        console = Console(width=WIDTH_OF_A_PIPE)
    wide = console.width >= WIDE
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for title in (
        ("setting", "value", "where it came from") if wide else ("setting, value, where it came from",)
    ):
        table.add_column(title, overflow="fold")
    table.add_column("what it does, and when to change it", overflow="fold", ratio=1)
    section = ""
    for field in FIELDS.values():
        if section and section != field.section:
            table.add_section()
        section = field.section
        source = effective.sources[field.key]
        style = "dim" if source == "default" else "bold"
        # As JSON, so that text is told from numbers and control characters do not reach the terminal.
        value = msgspec.json.encode(effective.settings.get(field.key)).decode()
        parts = [
            Text(field.key),
            Text(value, style="" if source == "default" else "bold"),
            Text(source, style),
        ]
        if not wide:
            parts = [Text.assemble(parts[0], " = ", parts[1], "\n  ", parts[2])]
        table.add_row(*parts, Text(field.description))
    console.print(table)
