"""`holdfast ckpt`."""

from __future__ import annotations

import typer

app = typer.Typer(help="stub", no_args_is_help=True)


@app.command()
def stub() -> None: ...


@app.command()
def stub2() -> None: ...
