"""`holdfast control`: what an operator can ask of a run, even while it runs.

Each command leaves a durable record of who asked and why, and a line in the journal; none of them needs the
run's lease or touches a process or a checkpoint. The run acts on a record when it next looks at it: at its
next failure, start or resume; on a request to stop within a second or two.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from holdfast.cli.output import JSON, REASON, ROOT, RUN, WHICH, YES

if TYPE_CHECKING:
    from holdfast.record import ControlDirectory

app = typer.Typer(
    help="Stop a run, pause recovery, reset a budget, pin a checkpoint, exclude nodes.", no_args_is_help=True
)

_BY = Annotated[str | None, typer.Option(help="Who makes the request, if not the user at this host.")]
_NODE = Annotated[str, typer.Argument(help="The node's name, as the launcher shows it.")]
_DEVICE = Annotated[str | None, typer.Option(help="Only this device of the node.")]


@app.command()
def stop(run_dir: RUN, reason: REASON, by: _BY = None, as_json: JSON = False) -> None:
    """Have the running launch save and end, on all its nodes, with code 31. A later launch is not affected.

    Exits with 0 if it was recorded, 2 if no launcher is alive that could act on it.
    """
    from holdfast.record import operator

    control, why, who = _begin(run_dir, reason, by)
    launch = _live_launch(control)
    operator.stop(control, launch, why, who)
    _done(as_json, "stop", "the run is asked to save and stop; `holdfast status` shows how far it is")


@app.command()
def pause(run_dir: RUN, reason: REASON, by: _BY = None, as_json: JSON = False) -> None:
    """From now on, do not restart a failed attempt: the launcher waits for `unpause`, without workers.

    A running attempt continues. Exits with 0 if it was recorded.
    """
    from holdfast.record import operator

    control, why, who = _begin(run_dir, reason, by)
    operator.pause(control, why, who)
    _done(as_json, "pause", "recovery is paused: a failed attempt waits for `holdfast control unpause`")


@app.command()
def unpause(run_dir: RUN, reason: REASON, by: _BY = None, as_json: JSON = False) -> None:
    """Let recovery continue, within a second if a launcher is waiting. Exits with 0 if it was recorded."""
    from holdfast.record import operator

    control, why, who = _begin(run_dir, reason, by)
    _require(operator.paused(control) is not None, "recovery is not paused")
    operator.unpause(control, why, who)
    _done(as_json, "unpause", "recovery goes on")


@app.command(name="reset-budget")
def reset_budget(run_dir: RUN, reason: REASON, by: _BY = None, as_json: JSON = False) -> None:
    """Count from 0 again: restarts up to now no longer count against launch.max_restarts, nor launches and
    verdicts against the next launch.

    Exits with 0 if it was recorded.
    """
    from holdfast.record import operator

    control, why, who = _begin(run_dir, reason, by)
    attempt = operator.reset_budget(control, why, who)
    _done(as_json, "reset_budget", f"restarts up to attempt {attempt} no longer count", attempt=attempt)


@app.command()
def pin(
    run_dir: RUN,
    which: WHICH,
    reason: REASON,
    keep: Annotated[bool, typer.Option("--keep", help="Use it for every resume until `unpin`.")] = False,
    force: Annotated[
        bool, typer.Option("--force", help="Pin it even if it is suspect or condemned.")
    ] = False,
    root: ROOT = None,
    by: _BY = None,
    yes: YES = False,
    as_json: JSON = False,
) -> None:
    """Have the next resume use this checkpoint or refuse to start. What was saved after it is left behind.

    Exits with 0 if it was recorded, 1 if its files are incomplete or the confirmation was declined, 2 if
    there is no such checkpoint or it is condemned and --force was not given.
    """
    from holdfast.record import operator

    control, why, who = _begin(run_dir, reason, by)
    where = (root if root is not None else run_dir / "checkpoints").absolute()
    name, behind = _choose(control, where, which, force=force)
    if not yes:
        _confirm(f"Go back to {name}{behind}?")
    operator.pin(control, name, why, who, once=not keep, force=force)
    resumes = "every resume until `holdfast control unpin`" if keep else "the next resume"
    _done(as_json, "pin", f"{resumes} uses {name}{behind}", checkpoint=name, once=not keep, force=force)


@app.command()
def unpin(run_dir: RUN, reason: REASON, by: _BY = None, as_json: JSON = False) -> None:
    """Let resumes choose for themselves again. Exits with 0 if it was recorded."""
    from holdfast.record import operator

    control, why, who = _begin(run_dir, reason, by)
    _require(operator.pinned(control) is not None, "nothing is pinned, or it was used already")
    operator.unpin(control, why, who)
    _done(as_json, "unpin", "nothing is pinned any more")


@app.command()
def exclude(
    run_dir: RUN,
    node: _NODE,
    reason: REASON,
    device: _DEVICE = None,
    by: _BY = None,
    as_json: JSON = False,
) -> None:
    """Keep a node, or one device of it, out of every later attempt. A running attempt is not affected.

    Exits with 0 if it was recorded.
    """
    from holdfast.record import operator

    control, why, who = _begin(run_dir, reason, by)
    record = operator.ask_to_exclude(control, node, device, why, who)
    text = f"excluded {record.describe()}: no later attempt uses it"
    _done(as_json, "exclude", text, node=node, device=device)


@app.command()
def readmit(
    run_dir: RUN,
    node: _NODE,
    reason: REASON,
    device: _DEVICE = None,
    by: _BY = None,
    as_json: JSON = False,
) -> None:
    """Let a node, or one device of it, take part again. Exits with 0 if it was recorded."""
    from holdfast.record import excluded, operator

    control, why, who = _begin(run_dir, reason, by)
    out = [(one.node, one.device) for one in excluded(control)]
    told = ", ".join(one.describe() for one in excluded(control)) or "nothing"
    what = node if device is None else f"{node}, device {device}"
    _require((node, device) in out, f"{_clean(what)} is not excluded; what is: {_clean(told)}")
    record = operator.ask_to_readmit(control, node, device, why, who)
    _done(as_json, "readmit", f"{record.describe()} may take part again", node=node, device=device)


@app.command()
def show(run_dir: RUN, as_json: JSON = False) -> None:
    """Show what is in force. Changes nothing."""
    from holdfast.record import in_force

    found = in_force(_open(run_dir))
    if as_json:
        import msgspec

        typer.echo(msgspec.json.encode(found).decode())
        return
    if found.stop is not None:
        typer.echo(f"the launch that runs is to stop, by {_clean(found.stop.describe())}")
    if found.paused is not None:
        typer.echo(f"recovery is paused by {_clean(found.paused.describe())}")
    if found.pin is not None:
        until = "the next resume" if found.pin.once else "every resume"
        forced = ", forced" if found.pin.force else ""
        typer.echo(
            f"{_clean(found.pin.checkpoint)} is pinned for {until}{forced} "
            f"by {_clean(found.pin.request.describe())}"
        )
    if found.budget_reset is not None:
        who = _clean(found.budget_reset.describe())
        typer.echo(f"restarts up to attempt {found.budget_reset.attempt} do not count, by {who}")
    for one in found.exclusions:
        by = f" (by {_clean(one.by)})" if one.by else ""
        typer.echo(f"{_clean(one.describe())} is excluded: {_clean(one.reason)}{by}")
    if not any((found.stop, found.paused, found.pin, found.budget_reset, found.exclusions)):
        typer.echo("nothing is in force")


# --- what they share ---------------------------------------------------------------------------------------


def _open(run_dir: Path) -> ControlDirectory:
    from holdfast.cli.ckpt_inspect import open_run

    return open_run(run_dir)


def _begin(run_dir: Path, reason: str, by: str | None) -> tuple[ControlDirectory, str, str]:
    """The run, the reason and who is asking, as they are kept."""
    from holdfast.errors import UsageError

    control = _open(run_dir)
    why = _clean(reason)
    if not why:
        raise UsageError("--reason must say why: it is all that a later reader of the journal has")
    return control, why, _clean(by) if by is not None and by.strip() else user()


def _live_launch(control: ControlDirectory) -> str:
    """The launch that holds the run now; refuses if there is none, or none with a launcher."""
    from holdfast.record import attempt_numbers, read_attempt, who_holds

    held = who_holds(control)
    told = f" (the last one, {held.lease.holder}: {held.lease.detail})" if held is not None else ""
    live = held is not None and held.is_launch
    _require(live, f"no launcher of this run is alive{_clean(told)}, so there is nothing to stop")
    assert held is not None
    newest = max(attempt_numbers(control), default=0)
    record = read_attempt(control, newest) if newest else None
    alone = record is not None and record.launch == held.claim.owner and record.max_restarts is None
    _require(
        not alone,
        f"no launcher looks at requests here: {held.lease.holder} was not started by "
        "`holdfast run`. Make the stop file (setting stop.stop_file), or send SIGTERM to a rank",
    )
    return held.claim.owner


def user() -> str:
    """Who is asking: the user at this host."""
    import getpass
    import platform

    try:
        return f"{getpass.getuser()}@{platform.node()}"
    except (KeyError, OSError):  # a container's user without a name
        import os

        return f"uid {os.getuid()}@{platform.node()}"


def _clean(text: str) -> str:
    from holdfast.base import printable

    return printable(text, 2000)


def _require(condition: bool, otherwise: str) -> None:
    from holdfast.errors import UsageError

    if not condition:
        raise UsageError(f"{otherwise}; nothing was changed")


def _confirm(question: str) -> None:
    from holdfast.errors import UsageError

    if not sys.stdin.isatty():
        raise UsageError("this is not a terminal, so nobody can be asked; nothing was changed. Add --yes")
    typer.confirm(question, abort=True, err=True)


def _choose(control: ControlDirectory, root: Path, which: str, *, force: bool) -> tuple[str, str]:
    """The checkpoint's name, usable as far as cheap checks can tell, and what would be left behind."""
    from holdfast.checkpoint import removed
    from holdfast.checkpoint.choose import look_at, take_pinned
    from holdfast.checkpoint.copies import tier as local_manifest
    from holdfast.checkpoint.format import CheckpointRoot
    from holdfast.cli.ckpt_inspect import find_checkpoint
    from holdfast.errors import CheckpointError, UsageError
    from holdfast.record import read_timeline

    timeline = read_timeline(control)
    record = find_checkpoint(control, root, timeline.on_line + timeline.abandoned, which)
    name = f"step_{record.step:08d}-{record.id}"
    there = CheckpointRoot(root)
    local = local_manifest.names(control)
    ladder = take_pinned(control, there, name, force=force, copies=local)
    for option in ladder.rejected:
        raise UsageError(f"{name} cannot be pinned: {'; '.join(option.why)}; nothing was changed")
    _, inspection = look_at(ladder.rungs[0], there, control.run_id)
    # The nodes may have what the root lacks: the resume judges that, byte by byte.
    if inspection.problems and (why := removed(root / name, control)):
        raise UsageError(f"{name} cannot be pinned: {why}; nothing was changed")
    if inspection.problems and name not in map(str, local):
        told = "; ".join(str(problem) for problem in inspection.problems)
        raise CheckpointError(f"{name} cannot be pinned: {told}; nothing was changed. Choose another one")
    newest = max((one.step for one in timeline.on_line), default=record.step)
    left = newest - record.step
    return name, f", which leaves the last {left} saved steps behind" if left > 0 else ""


def _done(as_json: bool, action: str, text: str, **facts: Any) -> None:
    if as_json:
        import json

        typer.echo(json.dumps({"action": action, **facts}))
    else:
        typer.echo(_clean(text))
