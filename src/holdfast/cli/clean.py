"""`holdfast clean`: remove what dead runs left in a node's memory or on its disk, and say why each one."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from holdfast.cli.arguments import CONFIG, JSON, YES
from holdfast.cli.output import print_columns, print_json

if TYPE_CHECKING:
    from holdfast.checkpoint.local_clean import Found, Outcome, Verdict


def clean(
    directories: Annotated[
        list[Path] | None,
        typer.Argument(
            metavar="[DIR]…",
            help="Local directories (checkpoint.non_persistent_local_ckpt_dir) of this node.",
        ),
    ] = None,
    config: CONFIG = None,
    runs: Annotated[
        list[str] | None,
        typer.Option("--run", metavar="ID", help="Only this run's places, of any age; may be repeated."),
    ] = None,
    older_than: Annotated[
        float, typer.Option(min=0.0, metavar="HOURS", help="Only what did not change for so long.")
    ] = 24.0,
    keep_resumable: Annotated[
        bool,
        typer.Option(
            "--keep-resumable/--no-keep-resumable",
            help="Keep what is newer than the run's newest checkpoint in its checkpoint root.",
        ),
    ] = True,
    force: Annotated[
        bool,
        typer.Option(
            "--force/--no-force", help="Also what a run that may be live elsewhere could resume from."
        ),
    ] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Say what would be removed; do nothing.")
    ] = False,
    yes: YES = False,
    as_json: JSON = False,
) -> None:
    """Remove local copies of runs that no longer need them; never of one in use on this node.

    Exits with 0 if all that may go is gone, 1 if something could not be removed or the person asked said no,
    2 if asked for what cannot be done.
    """
    import os

    from holdfast.checkpoint.local_clean import Outcome, Rules, judge, look, remove
    from holdfast.errors import HoldfastError, UsageError

    folders = [_existing(path) for path in directories or [local_directory(config)]]
    rules = Rules(older_than * 3600, tuple(runs or ()), keep_resumable, force)
    try:
        outcomes = [
            Outcome(found, judge(found, rules, os.geteuid())) for folder in folders for found in look(folder)
        ]
    except OSError as error:
        raise UsageError(f"{error.filename or folders[0]}: cannot be read: {error.strerror}") from error
    going = sum(not outcome.verdict.keep for outcome in outcomes)
    if going and not dry_run:
        if not yes:
            _ask(folders, outcomes, as_json=as_json)
        outcomes = [one if one.verdict.keep else remove(one.found, rules) for one in outcomes]
    _print(folders, outcomes, dry_run=dry_run, as_json=as_json)
    errors = [outcome.error for outcome in outcomes if outcome.error]
    if errors:
        raise HoldfastError(f"could not remove all: {'; '.join(errors[:3])}")


def local_directory(config: Path | None) -> Path:
    """The local directory that the settings name; UsageError if they name none."""
    from holdfast.config import load
    from holdfast.errors import UsageError

    named = load(config).settings.checkpoint.non_persistent_local_ckpt_dir
    if not named:
        raise UsageError(
            "no local directory is known: name it, or give --config with a file that sets "
            "checkpoint.non_persistent_local_ckpt_dir"
        )
    return Path(named)


def _existing(path: Path) -> Path:
    from holdfast.errors import UsageError

    if not path.is_dir():
        raise UsageError(f"{path}: there is no such directory")
    return path.absolute()


def _ask(folders: list[Path], outcomes: list[Outcome], *, as_json: bool) -> None:
    from holdfast.errors import UsageError
    from holdfast.journal.render import plural

    if not sys.stdin.isatty():
        raise UsageError(
            "this is not a terminal, so nobody can be asked; nothing was removed. Add --yes, or --dry-run"
        )
    if not as_json:
        _print(folders, outcomes, dry_run=True, as_json=False)
    going = sum(not outcome.verdict.keep for outcome in outcomes)
    typer.confirm(f"Remove {plural(going, 'place')}?", abort=True, err=True)


# --- printing -----------------------------------------------------------------------------------------------


def _print(folders: list[Path], outcomes: list[Outcome], *, dry_run: bool, as_json: bool) -> None:
    freed = sum(one.found.bytes for one in outcomes if not one.verdict.keep and not one.error)
    if as_json:
        document = {"directories": [str(folder) for folder in folders], "dry_run": dry_run}
        rows = [_row(one.found, one.verdict, one.error, dry_run=dry_run) for one in outcomes]
        print_json(document | {"bytes_freed": freed, "places": rows})
        return
    from holdfast.journal.render import plural, printable, size

    lines = [["", "run", "node", "newest", "size", "age", "in use", "run is", "why"]]
    for one in outcomes:
        found = one.found
        done = "would remove" if dry_run else "not removed" if one.error else "removed"
        newest = str(found.newest) if found.newest is not None else "-"
        facts = [found.run, printable(found.node, 64) or "-", newest, size(found.bytes), _hours(found.age)]
        facts += ["yes" if found.in_use else "no", found.run_state]
        lines.append(["kept" if one.verdict.keep else done, *facts, one.verdict.reason])
    if outcomes:
        print_columns(lines)
    gone = sum(not one.verdict.keep and not one.error for one in outcomes)
    kept = plural(len(outcomes) - gone, "place")
    end = f"{gone} would be removed, {size(freed)}" if dry_run else f"{gone} removed, {size(freed)} freed"
    typer.echo(f"{', '.join(map(str, folders))}: {kept} kept, {end}")


def _hours(seconds: float) -> str:
    from holdfast.journal.render import duration

    return duration(max(0.0, seconds))


def _row(found: Found, verdict: Verdict, error: str, *, dry_run: bool) -> dict[str, Any]:
    from holdfast.journal.render import printable

    return {
        "path": printable(found.path, 4096),
        "run": found.run,
        "run_dir": printable(found.run_dir, 4096),
        "node": printable(found.node),
        "newest": str(found.newest) if found.newest is not None else None,
        "bytes": found.bytes,
        "age_seconds": round(found.age, 3),
        "in_use": found.in_use,
        "run_state": found.run_state,
        "left_over": found.left_over,
        "removed": not verdict.keep and not dry_run and not error,
        "would_remove": not verdict.keep,
        "reason": verdict.reason,
        "error": printable(error, 1000) or None,
    }
