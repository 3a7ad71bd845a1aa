"""`holdfast run`: the drop-in for torchrun."""

from __future__ import annotations

import contextlib
import os
import sys
import threading

import typer


def run(ctx: typer.Context) -> None:
    """Start a training script like torchrun, and keep it alive. `holdfast run --help` shows all flags."""
    # c10d warns of every lost connection with a page of frames; the launcher says what it means, in a line.
    # Read once, when torch is imported; the workers must not inherit it.
    quiet = "TORCH_CPP_LOG_LEVEL" not in os.environ
    from holdfast.bounded import is_table_full
    from holdfast.errors import NoProcessesError
    from holdfast.launch.early import choose_format, insist_on_room, start_early
    from holdfast.launch.keeper import mark_environment
    from holdfast.lines import Source
    from holdfast.speaking import install

    install(Source.LAUNCHER)
    choose_format(ctx.args)
    insist_on_room()
    mark_environment()  # the parent's environment is what its forks show to whoever looks for them
    parent = start_early(ctx.args)  # before torch is imported here: both imports run side by side
    try:
        if quiet:
            os.environ["TORCH_CPP_LOG_LEVEL"] = "ERROR"
        from holdfast.launch.launcher import main

        if quiet:
            del os.environ["TORCH_CPP_LOG_LEVEL"]
        code = main(ctx.args, parent)
    except (RuntimeError, OSError) as error:
        if not is_table_full(error):
            raise
        raise NoProcessesError(str(error)) from error
    finally:
        if parent is not None:
            parent.close()
    _leave(code)


def _leave(code: int) -> None:
    """End this process, although threads of it may still wait for a store whose host was cut off.

    They wait in C++ without the interpreter's lock. When the interpreter goes down under them it ends them on
    their return, which C++ takes for a fatal error: the exit code would be that of an abort.
    """
    if any(thread.daemon for thread in threading.enumerate()):
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(OSError, ValueError):  # nobody reads it any more: no fault of the job
                stream.flush()
        os._exit(code)
    raise typer.Exit(code)
