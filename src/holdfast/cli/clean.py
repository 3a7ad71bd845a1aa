"""`holdfast ckpt gc` and `holdfast clean`: what goes, what stays, and why, before and after."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from holdfast.cli.output import CONFIG, JSON, YES, print_columns, print_json

if TYPE_CHECKING:
    from holdfast.checkpoint import JudgedCheckpoint, Retention, RetentionOutcome
    from holdfast.checkpoint.copies import Cleaning, CleaningRuling, FoundPlace
    from holdfast.record import ControlDirectory, Fence


# `holdfast ckpt gc`: delete checkpoints by the policy of a run's own retention, and say why each one.


LEASE_TTL = 30.0


def gc(
    run_dir: Annotated[Path, typer.Argument(help="The run's directory (run.dir, --run-dir).")],
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Say what would be deleted; do nothing.")
    ] = False,
    keep_last: Annotated[
        int | None, typer.Option(min=2, help="Keep this many of the newest sound ones.")
    ] = None,
    keep_every_steps: Annotated[
        int, typer.Option(min=0, help="Also keep the first at or after each multiple of this many steps.")
    ] = 0,
    keep_every_hours: Annotated[
        float, typer.Option(min=0.0, help="Also keep the first of each period of this many hours.")
    ] = 0.0,
    broken: Annotated[bool, typer.Option("--broken", help="Delete damaged checkpoints too.")] = False,
    root: Annotated[
        Path | None, typer.Option(help="The checkpoint root, if it is not in the run's directory.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON for programs.")] = False,
) -> None:
    """Delete old checkpoints of a run that is not running; keep all that may be needed, and say why.

    A run's own settings are not read: the options alone say what to keep. Exits with 20 if the run is live,
    except with --dry-run.
    """
    from holdfast.checkpoint import Retention
    from holdfast.checkpoint.format import CheckpointRoot
    from holdfast.errors import HoldfastError, UsageError
    from holdfast.policy import RetentionRules as Rules
    from holdfast.record import ControlDirectory

    if keep_last is None and (keep_every_steps or keep_every_hours):
        raise UsageError("--keep-every-steps and --keep-every-hours are exceptions: give --keep-last too")
    if keep_last is None and not broken:
        raise UsageError("say what to keep with --keep-last N (2 or more), or give --broken, or both")
    control = ControlDirectory.open(run_dir)
    folder = root.absolute() if root is not None else control.path / "checkpoints"
    if not folder.is_dir():
        raise UsageError(f"{folder}: there is no such directory; name the checkpoint root with --root")
    rules = Rules(
        keep_last=keep_last or 0,
        keep_every_steps=keep_every_steps,
        keep_every_hours=keep_every_hours,
        broken=broken,
    )
    retention = Retention(control, CheckpointRoot(folder), rules)
    error: OSError | HoldfastError | None = None
    if dry_run:
        items = retention.plan()
    else:
        outcome = _delete(control, retention)
        items, error = outcome.items, outcome.error
    _print_deletions(folder, items, dry_run=dry_run, as_json=as_json)
    if error is not None:
        raise HoldfastError(f"could not delete all: {error}") if isinstance(error, OSError) else error


def _delete(control: ControlDirectory, retention: Retention) -> RetentionOutcome:
    """Plan and delete while holding the run's lease, so that meanwhile no attempt begins, reads or saves."""
    import os

    from holdfast.checkpoint import deletion_event, empty
    from holdfast.journal import JournalWriter
    from holdfast.record import attempt_numbers

    with _holding(control) as fence:
        outcome = retention.take_away(retention.plan(), fence)
        if not all(item.keep for item in outcome.items):
            newest = max(attempt_numbers(control), default=0)
            journal = JournalWriter(control.journal, f"gc-{os.uname().nodename}", newest)
            journal.write(deletion_event(outcome.items))
            journal.close()
        empty(outcome.trashed)
    return outcome


@contextmanager
def _holding(control: ControlDirectory) -> Iterator[Fence]:
    import logging
    import uuid

    from holdfast.record import Fence, LeaseKeeper, claim

    mine = claim(control, f"gc-{uuid.uuid4().hex[:12]}", LEASE_TTL)
    log = logging.getLogger("holdfast.cli")
    keeper = LeaseKeeper(control, mine, lambda why: log.warning("holdfast: the lease was lost: %s", why))
    try:
        yield Fence(control, mine.epoch, timeout=LEASE_TTL)
    finally:
        keeper.release()


# --- printing -----------------------------------------------------------------------------------------------


def _print_deletions(folder: Path, items: list[JudgedCheckpoint], *, dry_run: bool, as_json: bool) -> None:
    freed = sum(item.bytes for item in items if not item.keep)
    if as_json:
        import json

        rows = [_deletion_row(item) for item in items]
        typer.echo(
            json.dumps({"root": str(folder), "dry_run": dry_run, "bytes_freed": freed, "checkpoints": rows})
        )
        return
    from holdfast.base import plural, printable, size

    deleted = "would delete" if dry_run else "deleted"
    lines = [["", "step", "id", "standing", "size", "why"]]
    for item in items:
        verdict = "kept" if item.keep else deleted
        facts = [str(item.name.step), item.name.id, item.standing, size(item.bytes)]
        lines.append([verdict, *facts, printable(item.reason)])
    if items:
        widths = [max(len(line[column]) for line in lines) for column in range(len(lines[0]))]
        for line in lines:
            typer.echo("  ".join(f"{c:{w}}" for c, w in zip(line, widths, strict=True)).rstrip())
    gone = sum(not item.keep for item in items)
    kept = plural(len(items) - gone, "checkpoint")
    end = f"{gone} would be deleted, {size(freed)}" if dry_run else f"{gone} deleted, {size(freed)} freed"
    typer.echo(f"{folder}: {kept} kept, {end}")


def _deletion_row(item: JudgedCheckpoint) -> dict[str, Any]:
    return {
        "name": str(item.name),
        "step": item.name.step,
        "id": item.name.id,
        "standing": item.standing,
        "bytes": item.bytes,
        "deleted": not item.keep,
        "reason": item.reason,
    }


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
        typer.Option(
            "--run", metavar="ID", help="Remove only this run's places, of any age; may be repeated."
        ),
    ] = None,
    older_than: Annotated[
        float, typer.Option(min=0.0, metavar="HOURS", help="Remove only what has not changed for this long.")
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
            "--force/--no-force", help="Also remove what a run that may be live elsewhere could resume from."
        ),
    ] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Say what would be removed; do nothing.")
    ] = False,
    yes: YES = False,
    as_json: JSON = False,
) -> None:
    """Remove local copies of runs that no longer need them, but never those in use on this node.

    Exits with 0 if everything that may be removed is gone, 1 if something could not be removed or the
    confirmation was declined, 2 if the request cannot be carried out.
    """
    import os

    from holdfast.checkpoint.copies import Cleaning as RetentionOutcome
    from holdfast.checkpoint.copies import Rules, judge, look, remove
    from holdfast.errors import HoldfastError, UsageError

    folders = [_existing(path) for path in directories or [local_directory(config)]]
    rules = Rules(older_than * 3600, tuple(runs or ()), keep_resumable, force)
    try:
        outcomes = [
            RetentionOutcome(found, judge(found, rules, os.geteuid()))
            for folder in folders
            for found in look(folder)
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


def _ask(folders: list[Path], outcomes: list[Cleaning], *, as_json: bool) -> None:
    from holdfast.base import plural
    from holdfast.errors import UsageError

    if not sys.stdin.isatty():
        raise UsageError(
            "this is not a terminal, so nobody can be asked; nothing was removed. Add --yes, or --dry-run"
        )
    if not as_json:
        _print(folders, outcomes, dry_run=True, as_json=False)
    going = sum(not outcome.verdict.keep for outcome in outcomes)
    typer.confirm(f"Remove {plural(going, 'place')}?", abort=True, err=True)


# --- printing -----------------------------------------------------------------------------------------------


def _print(folders: list[Path], outcomes: list[Cleaning], *, dry_run: bool, as_json: bool) -> None:
    freed = sum(one.found.bytes for one in outcomes if not one.verdict.keep and not one.error)
    if as_json:
        document = {"directories": [str(folder) for folder in folders], "dry_run": dry_run}
        rows = [_row(one.found, one.verdict, one.error, dry_run=dry_run) for one in outcomes]
        print_json(document | {"bytes_freed": freed, "places": rows})
        return
    from holdfast.base import plural, printable, size

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
    from holdfast.base import duration

    return duration(max(0.0, seconds))


def _row(found: FoundPlace, verdict: CleaningRuling, error: str, *, dry_run: bool) -> dict[str, Any]:
    from holdfast.base import printable

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
