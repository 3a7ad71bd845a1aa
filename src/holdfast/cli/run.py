"""`holdfast run`, the drop-in for torchrun, and `holdfast demo`."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from holdfast.errors import HoldfastError, UsageError

if TYPE_CHECKING:
    from types import FrameType

    from holdfast.drill import DemoResult, DemoView


# `holdfast run`: the drop-in for torchrun.


def run(ctx: typer.Context) -> None:
    """Start a training script like torchrun, and keep it alive. `holdfast run --help` shows all flags."""
    # c10d reports every lost connection with a page of stack frames; the launcher says in a line what it
    # means. The variable is read once, when torch is imported; the workers must not inherit it.
    quiet = "TORCH_CPP_LOG_LEVEL" not in os.environ
    from holdfast.base import LineSource, install, is_table_full
    from holdfast.errors import NoProcessesError
    from holdfast.launch.workers import choose_format, insist_on_room, mark_environment, start_early
    from holdfast.process import proc

    install(LineSource.LAUNCHER)
    choose_format(ctx.args)
    insist_on_room()
    mark_environment()  # forks show their parent's environment to whoever looks for them
    parent = start_early(ctx.args)  # before torch is imported here: both imports run side by side
    try:
        if quiet:
            os.environ["TORCH_CPP_LOG_LEVEL"] = "ERROR"
        from holdfast.launch import main

        if quiet:
            del os.environ["TORCH_CPP_LOG_LEVEL"]
        code = main(ctx.args, parent)
    except (RuntimeError, OSError) as error:
        if not is_table_full(error):
            raise
        raise NoProcessesError(str(error), proc.threads_of(os.getuid())) from error
    finally:
        if parent is not None:
            parent.close()
    _leave(code)


def _leave(code: int) -> None:
    """End this process although some of its threads may still be waiting for a store whose host was cut off.

    They wait in C++ without the interpreter's lock. If the interpreter shuts down meanwhile, it ends them
    when they return, which C++ takes for a fatal error: the exit code would be that of an abort.
    """
    if any(thread.daemon for thread in threading.enumerate()):
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(OSError, ValueError):  # nobody is reading any more: not the job's fault
                stream.flush()
        os._exit(code)
    raise typer.Exit(code)


def demo(
    ranks: Annotated[int, typer.Option(min=2, max=16, help="CPU processes to train on.")] = 2,
    steps: Annotated[int, typer.Option(min=20, max=100_000, help="Steps to train.")] = 160,
    directory: Annotated[
        Path,
        typer.Option("--dir", help="Where the runs and the report go; an earlier demo there is replaced."),
    ] = Path("holdfast-demo"),
    open_report: Annotated[
        bool, typer.Option("--open/--no-open", help="Open the report in a browser.")
    ] = False,
    json: Annotated[
        bool, typer.Option("--json", help="Print one result object; progress goes to stderr.")
    ] = False,
) -> None:
    """Train a small GPT, corrupt its newest checkpoint, kill a rank, and prove that the run loses nothing.

    Exits with 0 only if both faults happened, were handled, and the run ended bitwise equal to an
    uninterrupted one.
    """
    from rich.console import Console

    from holdfast.drill import DemoResult, DemoView, demo_directory, run_demo

    console = Console(stderr=json, highlight=False)
    if not console.is_terminal:
        console.width = max(console.width, 140)  # a file has no width to wrap at; the tables need some room
    view = DemoView(console)
    signal.signal(signal.SIGTERM, _stop)
    result = DemoResult(ranks=ranks, steps=steps, interval=steps // 4, directory=str(directory.absolute()))
    try:
        with demo_directory(directory) as place:
            view.say(f"a small GPT on {ranks} CPU ranks, {steps} steps, a checkpoint every {steps // 4}")
            result = run_demo(place, view, ranks=ranks, steps=steps)
    except KeyboardInterrupt:
        view.say(f"interrupted; everything that was started has been ended. Logs are in {directory}")
        raise typer.Exit(130) from None
    except UsageError:
        raise
    except HoldfastError as error:
        if not json:
            raise
        result.error = str(error)
    _show(result, view, directory)
    if json:
        import msgspec

        typer.echo(msgspec.json.encode(result).decode())
    if open_report and result.report:
        import webbrowser

        webbrowser.open(Path(result.report).as_uri())
    raise typer.Exit(0 if result.passed else 1)


def _stop(number: int, frame: FrameType | None) -> None:
    """SIGTERM ends the demo the way an error does: the processes it started are ended first."""
    del frame
    sys.exit(128 + number)


def _show(result: DemoResult, view: DemoView, directory: Path) -> None:
    from rich.markup import escape
    from rich.text import Text

    from holdfast.account import incidents_of as incidents
    from holdfast.base import duration
    from holdfast.journal import read_journal
    from holdfast.observe import incident_table

    out = view.console
    if result.error:
        out.print(Text(f"the demo failed: {result.error}", style="bold red"))
        return
    for holds, text in (
        *((check.holds, f"{check.claim}: {check.found}") for check in result.checks),
        *((one.equal, str(one)) for one in result.comparisons),
    ):
        line = Text("✓ " if holds else "✗ ", style="bold green" if holds else "bold red")
        out.print(line.append(text, style="" if holds else "bold red"))
    view.heading("Incidents")
    out.print(incident_table(incidents(read_journal(Path(result.directory) / "run" / "journal"))))
    verdict = (
        "The broken run and the reference are bitwise equal."
        if result.passed
        else "The demo FAILED: a difference or a claim that does not hold, marked ✗ above."
    )
    out.print(Text(verdict, style="bold green" if result.passed else "bold red"))
    took = ", ".join(f"{name} {duration(seconds)}" for name, seconds in result.seconds.items())
    out.print(f"Took {took}", style="dim")
    out.print(f"\nReport: [bold]{escape(result.report)}[/bold]", soft_wrap=True)
    out.print("Look further:")
    assert result.flipped is not None
    command = _command()
    for arguments in (
        f"journal {directory}/run",
        f"ckpt ls {directory}/run",
        f"ckpt verify {directory}/run/checkpoints/{result.flipped.checkpoint}",
    ):
        out.print(f"  {escape(f'{command} {arguments}')}", soft_wrap=True)


def _command() -> str:
    """What to type for `holdfast` here: its full path if a virtual environment keeps it off the PATH."""
    import os
    import shutil

    installed = Path(sys.executable).with_name("holdfast")
    if shutil.which("holdfast") or not installed.exists():
        return "holdfast"
    return os.path.relpath(installed)
