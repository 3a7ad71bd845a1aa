"""`holdfast ckpt condemn` and `acquit`: an operator's word on a checkpoint, recorded for every later resume.

Both act under the run's lease, so never beside a live run, and write standing records; no checkpoint is
touched. What was saved from a condemned checkpoint goes with it, because it carries the same state on.
"""

from __future__ import annotations

import sys
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from holdfast.cli.arguments import JSON, REASON, ROOT, RUN, WHICH, YES
from holdfast.cli.ckpt_inspect import open_run

if TYPE_CHECKING:
    from holdfast.control.directory import ControlDirectory
    from holdfast.control.lease import Fence
    from holdfast.control.lineage import CommitRecord
    from holdfast.control.standing import Standing

REMOTE_SECONDS = 30.0
"""For recording it in an object store too."""
LEASE_TTL = 10.0
"""Seconds. The lease is given back at once; this only bounds the wait after an operator's crash."""


def condemn(
    run_dir: RUN,
    which: WHICH,
    reason: REASON,
    root: ROOT = None,
    yes: YES = False,
    as_json: JSON = False,
) -> None:
    """Condemn a checkpoint, and with it all that was saved from it: no resume uses them any more.

    Exits with 0 if it was recorded, 20 if the run is live, 2 if asked for what cannot be done.
    """
    from holdfast.control.standing import Standing

    _judge(run_dir, which, reason, root, Standing.CONDEMNED, yes=yes, as_json=as_json)


def acquit(
    run_dir: RUN,
    which: WHICH,
    reason: REASON,
    root: ROOT = None,
    yes: YES = False,
    as_json: JSON = False,
) -> None:
    """Acquit a condemned or suspect checkpoint, and those that were condemned only with it.

    Exits with 0 if it was recorded, 20 if the run is live, 2 if asked for what cannot be done.
    """
    from holdfast.control.standing import Standing

    _judge(run_dir, which, reason, root, Standing.ACQUITTED, yes=yes, as_json=as_json)


def _judge(
    run_dir: Path, which: str, reason: str, root: Path | None, verdict: Standing, *, yes: bool, as_json: bool
) -> None:
    from holdfast.checkpoint.problems import printable
    from holdfast.control.standing import known_root
    from holdfast.errors import UsageError

    control = open_run(run_dir)
    where = (root if root is not None else run_dir / "checkpoints").absolute()
    if not reason.strip():
        raise UsageError("--reason must say why: it is all that a later reader of the journal has")
    reason = printable(reason.strip(), 2000)
    if root is None:
        where = known_root(control)
    chosen = _choose(control, where, which, verdict)
    if not as_json:
        _show(control, chosen, verdict)
    if not yes:
        if not sys.stdin.isatty():
            raise UsageError("this is not a terminal, so nobody can be asked; nothing was changed. Add --yes")
        typer.confirm(f"Record {_count(chosen)} as {verdict}?", abort=True, err=True)
    with _lease(control) as fence:
        # Nobody held the lease while a person was thinking: what they agreed to must still be what is there.
        if _choose(control, where, which, verdict) != chosen:
            raise UsageError("the run went on meanwhile; nothing was changed. Look again with `ckpt locate`")
        untold = _record(control, fence, chosen, verdict, reason, where)
    untold += _tell_remote(control, where, chosen)
    names = [_name(record) for record in chosen]
    for problem in untold:
        typer.echo(problem, err=True)
    if as_json:
        import json

        typer.echo(
            json.dumps({"standing": str(verdict), "checkpoints": names, "reason": reason, "not_told": untold})
        )
    else:
        typer.echo(
            f"recorded {_count(chosen)} as {verdict}; `holdfast ckpt locate` says what a resume would use"
        )


# --- which -------------------------------------------------------------------------------------------------


def _choose(control: ControlDirectory, root: Path, which: str, verdict: Standing) -> list[CommitRecord]:
    """The checkpoint that was named, then those that go with it, oldest first."""
    from holdfast.control.lineage import read_timeline
    from holdfast.control.standing import Standing, StandingBook
    from holdfast.errors import UsageError

    timeline = read_timeline(control)
    records = timeline.on_line + timeline.abandoned
    target = find_checkpoint(control, root, records, which)
    book = StandingBook(control, root)
    later = _descendants(target, records)
    if verdict is Standing.CONDEMNED:
        return [target, *(record for record in later if book.of(_name(record)) is not Standing.CONDEMNED)]
    standing = book.of(_name(target))
    if standing not in (Standing.CONDEMNED, Standing.SUSPECT):
        raise UsageError(f"{_name(target)} is {standing}: there is nothing to acquit it of")
    return [target, *(record for record in later if _condemned_with(control, record, target))]


def find_checkpoint(
    control: ControlDirectory, root: Path, records: list[CommitRecord], which: str
) -> CommitRecord:
    from holdfast.checkpoint import local_manifest
    from holdfast.control.lineage import was_committed
    from holdfast.errors import UsageError
    from holdfast.settings_fields import is_step

    # A save that was cut before its rename left a record too; it never existed for anyone, unless it was
    # committed in the local tier, which leaves a manifest.
    local = {str(name) for name in local_manifest.names(control)}
    real = [
        record
        for record in records
        if was_committed(control, record) or (root / _name(record)).is_dir() or _name(record) in local
    ]
    found = [
        record
        for record in real
        if which in (record.id, _name(record)) or (is_step(which) and int(which) == record.step)
    ]
    known = ", ".join(_name(record) for record in sorted(real, key=lambda record: -record.step)[:10])
    if not found:
        raise UsageError(f"run {control.run_id} saved no checkpoint {which!r}; it saved {known or 'none'}")
    if len(found) > 1:
        told = ", ".join(f"{record.id} (attempt {record.attempt})" for record in found)
        raise UsageError(f"{which!r} names {len(found)} checkpoints: {told}. Give the id of the one you mean")
    return found[0]


def _descendants(target: CommitRecord, records: list[CommitRecord]) -> list[CommitRecord]:
    from holdfast.control.lineage import descendants

    return descendants({target.id}, records)


def _with(target: CommitRecord) -> str:
    from holdfast.control.lineage import condemned_with

    return condemned_with(_name(target))


def _condemned_with(control: ControlDirectory, record: CommitRecord, target: CommitRecord) -> bool:
    """Whether its newest record condemns it for nothing but its origin; in doubt it does not."""
    from holdfast.control.directory import list_names, read_record
    from holdfast.control.standing import StandingRecord
    from holdfast.errors import ControlError

    folder = control.standing / record.id
    numbers = {name: name.partition("-")[0] for name in list_names(folder) if name.endswith(".json")}
    if not numbers or not all(number.isdecimal() for number in numbers.values()):
        return False
    try:
        newest = read_record(folder / max(numbers, key=lambda name: int(numbers[name])), StandingRecord)
    except ControlError:
        return False
    return newest is not None and newest.standing == "condemned" and _with(target) in newest.evidence


# --- recording ---------------------------------------------------------------------------------------------


@contextmanager
def _lease(control: ControlDirectory) -> Iterator[Fence]:
    """Hold the run for a moment; RunIsLiveError if somebody else does."""
    from holdfast.control.lease import Fence, LeaseKeeper, claim

    held = claim(control, f"operator-{uuid.uuid4().hex[:12]}", LEASE_TTL)
    # A loss needs no handler: the fence refuses whatever would come after it.
    keeper = LeaseKeeper(control, held, lambda _why: None)
    try:
        yield Fence(control, held.epoch, timeout=LEASE_TTL)
    finally:
        keeper.release()


def _tell_remote(control: ControlDirectory, root: Path, chosen: list[CommitRecord]) -> list[str]:
    """Put the records beside remote copies too, where the run has any; what could not be told, in words."""
    from holdfast.checkpoint.identity import CheckpointName
    from holdfast.checkpoint.remote import open_remote
    from holdfast.control.standing import RootBook, known_remote
    from holdfast.errors import HoldfastError

    url = known_remote(control)
    if not url:
        return []
    try:
        remote, book = open_remote(url, retry_seconds=REMOTE_SECONDS), RootBook(root)
        for record in chosen:
            remote.push_standing(CheckpointName(record.step, record.id), book)
    except (HoldfastError, OSError) as error:
        return [f"not recorded in {url} yet; the run's next start makes up for that: {error}"]
    return []


def _record(
    control: ControlDirectory,
    fence: Fence,
    chosen: list[CommitRecord],
    verdict: Standing,
    reason: str,
    root: Path,
) -> list[str]:
    """Write it down; what could not be written beside the checkpoints."""
    from holdfast.control.attempts import attempt_numbers
    from holdfast.control.standing import Standing, StandingBook
    from holdfast.journal.events import Decision
    from holdfast.journal.writer import JournalWriter

    book = StandingBook(control, root)
    target, *others = chosen
    said = f"operator: {reason}"
    # Condemning goes from the youngest back, so that a cut leaves nothing usable that descends from what is
    # condemned already; acquitting the other way round, for the same reason.
    order = [*reversed(others), target] if verdict is Standing.CONDEMNED else chosen
    for record in order:
        evidence = [said]
        if record is not target and verdict is Standing.CONDEMNED:
            evidence.append(_with(target))
        elif record is not target:
            evidence.append(f"acquitted with {_name(target)}, with which it was condemned")
        book.append(fence, _name(record), verdict, evidence)
    journal = JournalWriter(control.journal, "operator", max(attempt_numbers(control), default=0))
    names = [_name(record) for record in chosen]
    evidence = [said]
    if others:
        evidence.append(f"with it, as saved from it: {', '.join(names[1:])}")
    journal.write(
        Decision(
            about="standing",
            chosen=f"{names[0]} is {verdict}",
            evidence=evidence,
            details={"checkpoints": names, "standing": str(verdict)},
        )
    )
    journal.close()
    return book.publish_all(fence, names)


# --- showing -----------------------------------------------------------------------------------------------


def _show(control: ControlDirectory, chosen: list[CommitRecord], verdict: Standing) -> None:
    from holdfast.control.lineage import read_timeline
    from holdfast.control.standing import Standing, StandingBook

    book = StandingBook(control)
    target, *others = chosen
    typer.echo(f"{_name(target)} is {book.of(_name(target))}; it would be {verdict}")
    for record in others:
        why = "saved from it" if verdict is Standing.CONDEMNED else "condemned with it"
        typer.echo(f"  and {_name(record)}, {book.of(_name(record))}, {why}")
    if verdict is not Standing.ACQUITTED:
        return
    timeline = read_timeline(control)
    records = timeline.on_line + timeline.abandoned
    for record in _descendants(target, records):
        if record not in chosen and book.of(_name(record)) is Standing.CONDEMNED:
            typer.echo(f"  {_name(record)}, saved from it, stays condemned: it has evidence of its own")
    for record in records:
        if target in _descendants(record, records) and book.of(_name(record)) is Standing.CONDEMNED:
            typer.echo(f"  {_name(record)}, from which it was saved, stays condemned")


def _name(record: CommitRecord) -> str:
    from holdfast.checkpoint.identity import CheckpointName

    return str(CheckpointName(record.step, record.id))


def _count(chosen: list[Any]) -> str:
    return "1 checkpoint" if len(chosen) == 1 else f"{len(chosen)} checkpoints"
