"""`holdfast ckpt gc`: delete checkpoints by the policy of a run's own retention, and say why each one."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from holdfast.checkpoint.retention import Item, Outcome, Retention
    from holdfast.control.directory import ControlDirectory
    from holdfast.control.lease import Fence

LEASE_TTL = 30.0


def gc(
    run_dir: Annotated[Path, typer.Argument(help="The run's directory (run.dir, --run-dir).")],
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Say what would be deleted; do nothing.")
    ] = False,
    keep_last: Annotated[
        int | None, typer.Option(min=2, help="Keep so many of the newest sound ones.")
    ] = None,
    keep_every_steps: Annotated[
        int, typer.Option(min=0, help="Also keep the first at or after each multiple of so many steps.")
    ] = 0,
    keep_every_hours: Annotated[
        float, typer.Option(min=0.0, help="Also keep the first of each so many hours.")
    ] = 0.0,
    broken: Annotated[bool, typer.Option("--broken", help="Delete damaged checkpoints too.")] = False,
    root: Annotated[
        Path | None, typer.Option(help="The checkpoint root, if it is not in the run's directory.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON for programs.")] = False,
) -> None:
    """Delete old checkpoints of a run that is not running; keep, and explain, all that may be needed.

    A run's own settings are not read: what to keep is what the options say. Exits with 20 if the run is live,
    except with --dry-run.
    """
    from holdfast.checkpoint.identity import CheckpointRoot
    from holdfast.checkpoint.retention import Retention
    from holdfast.control.directory import ControlDirectory
    from holdfast.errors import HoldfastError, UsageError
    from holdfast.policy.retention import Rules

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
    _print(folder, items, dry_run=dry_run, as_json=as_json)
    if error is not None:
        raise HoldfastError(f"could not delete all: {error}") if isinstance(error, OSError) else error


def _delete(control: ControlDirectory, retention: Retention) -> Outcome:
    """Plan and delete while holding the run's lease, so that no attempt begins, reads or saves meanwhile."""
    import os

    from holdfast.checkpoint.retention import deletion_event, empty
    from holdfast.control.attempts import attempt_numbers
    from holdfast.journal.writer import JournalWriter

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

    from holdfast.control.lease import Fence, LeaseKeeper, claim

    mine = claim(control, f"gc-{uuid.uuid4().hex[:12]}", LEASE_TTL)
    log = logging.getLogger("holdfast.cli")
    keeper = LeaseKeeper(control, mine, lambda why: log.warning("holdfast: the lease was lost: %s", why))
    try:
        yield Fence(control, mine.epoch, timeout=LEASE_TTL)
    finally:
        keeper.release()


# --- printing -----------------------------------------------------------------------------------------------


def _print(folder: Path, items: list[Item], *, dry_run: bool, as_json: bool) -> None:
    freed = sum(item.bytes for item in items if not item.keep)
    if as_json:
        import json

        rows = [_row(item) for item in items]
        typer.echo(
            json.dumps({"root": str(folder), "dry_run": dry_run, "bytes_freed": freed, "checkpoints": rows})
        )
        return
    from holdfast.journal.render import plural, printable, size

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


def _row(item: Item) -> dict[str, Any]:
    return {
        "name": str(item.name),
        "step": item.name.step,
        "id": item.name.id,
        "standing": item.standing,
        "bytes": item.bytes,
        "deleted": not item.keep,
        "reason": item.reason,
    }
