"""`holdfast run`: the drop-in for torchrun."""

from __future__ import annotations

import typer


def run(ctx: typer.Context) -> None:
    """Start a training script like torchrun, and keep it alive. `holdfast run --help` shows all flags."""
    from holdfast.launch.early import start_early

    parent = start_early(ctx.args)  # before the next line, which imports torch: both imports run side by side
    try:
        from holdfast.launch.launcher import main

        raise typer.Exit(main(ctx.args, parent))
    finally:
        if parent is not None:
            parent.close()
