"""`holdfast run`: the drop-in for torchrun."""

from __future__ import annotations

import os

import typer


def run(ctx: typer.Context) -> None:
    """Start a training script like torchrun, and keep it alive. `holdfast run --help` shows all flags."""
    # c10d warns of every lost connection with a page of frames; the launcher says what it means, in a line.
    # Read once, when torch is imported; the workers must not inherit it.
    ours = "TORCH_CPP_LOG_LEVEL" not in os.environ
    if ours:
        os.environ["TORCH_CPP_LOG_LEVEL"] = "ERROR"
    from holdfast.launch.launcher import main

    if ours:
        del os.environ["TORCH_CPP_LOG_LEVEL"]
    raise typer.Exit(main(ctx.args))
