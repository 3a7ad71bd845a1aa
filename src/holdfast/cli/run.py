"""`holdfast run`: the drop-in for torchrun."""

from __future__ import annotations

import typer


def run(ctx: typer.Context) -> None:
    """Start a training script like torchrun, and keep it alive. `holdfast run --help` shows all flags."""
    from holdfast.launch.launcher import main

    raise typer.Exit(main(ctx.args))
