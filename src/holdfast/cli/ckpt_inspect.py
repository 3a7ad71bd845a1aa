"""`holdfast ckpt locate`, `diff`, `export`, `import`, `condemn` and `acquit`.

`condemn` and `acquit` act under the run's lease, so never beside a live run, and write standing records; no
checkpoint is touched. What was saved from a condemned checkpoint is condemned with it, because it carries on
the same state.
"""

from __future__ import annotations

import sys
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from holdfast.cli.output import JSON, REASON, ROOT, RUN, WHICH, YES

if TYPE_CHECKING:
    from holdfast.checkpoint import Difference, EntryDifference
    from holdfast.checkpoint.choose import Resolution, RungOutlook
    from holdfast.record import CommitRecord, ControlDirectory, Fence, Standing


# `holdfast ckpt locate`, `diff` and `export`: what would be resumed, what differs, and the weights alone.
#
# None of them changes anything in a run or a checkpoint. `locate` never needs torch, `diff` needs it only for
# tensors whose digests differ, `export` always.


# --- locate ------------------------------------------------------------------------------------------------


def locate(
    run_dir: Annotated[
        Path, typer.Argument(help="The run's directory (run.dir, --run-dir), or one of checkpoints alone.")
    ],
    root: Annotated[
        Path | None, typer.Option(help="Its checkpoint root, if that is not RUN_DIR/checkpoints.")
    ] = None,
    resume_from: Annotated[
        str, typer.Option(help="Value of the setting: auto, fresh, a step or a path.")
    ] = "auto",
    force: Annotated[bool, typer.Option("--force", help="Assume checkpoint.force = true.")] = False,
    world: Annotated[
        int | None, typer.Option(min=1, help="Say what resuming with this many ranks would mean.")
    ] = None,
    full: Annotated[bool, typer.Option("--full", help="Read every byte, as a resume does.")] = False,
    as_json: JSON = False,
) -> None:
    """Say what a resume would use now, and why not each higher rung. Changes nothing.

    What nodes hold is known here only from the records: if a resume would look there first, this is said,
    together with what it would use otherwise.

    Exits with 0 if a checkpoint or a fresh start would be used, 18 if the run would refuse to start.
    """
    from holdfast.checkpoint.choose import (
        FRESH,
        LOCAL,
        REFUSED,
        USED,
        first_of,
        is_plain_root,
        resolve_resume,
    )
    from holdfast.errors import ExitCode, UsageError

    if not is_plain_root(run_dir):
        open_run(run_dir)
    if force and resume_from == "auto":
        raise UsageError("--force accepts one bad checkpoint by name: give --resume-from a step or a path")
    found = resolve_resume(run_dir, root=root, resume_from=resume_from, force=force, quick=not full)
    used, first = first_of(found.candidates, USED), first_of(found.candidates, LOCAL, USED)
    if as_json:
        answer = {
            "chosen": found.chosen,
            "step": found.step,
            "path": found.path,
            "without_local": found.without_local,
        }
        extra = {"run": found.run, "root": found.root, "digests_read": full, "pinned": found.pinned}
        _print_json(answer | extra | {"checkpoints": [_row(row) for row in found.candidates]})
    else:
        _print_ladder(found)
        if found.pinned is not None:
            typer.echo(found.why[-1] if found.live is None else f"pinned: {found.pinned}")
        if first is not None and first is not used:
            typer.echo(
                f"would resume at step {first.step} from the local tier ({first.local}, as recorded); "
                "if its nodes hold it no longer:"
            )
        read = "every digest matched" if full else "digests were not read: --full does that"
        if used is not None and not found.run:
            read = "; ".join(used.reasons) if full else "no value was looked at: --full does that"
        _print_answer(used, found.without_local == FRESH, resume_from, world, read=read)
    raise typer.Exit(ExitCode.NO_VALID_RUNG if found.chosen == REFUSED else ExitCode.OK)


def open_run(run_dir: Path) -> ControlDirectory:
    from holdfast.errors import UsageError
    from holdfast.record import ControlDirectory

    if not (run_dir / "run.json").is_file():
        raise UsageError(f"{run_dir} is not a run directory: it has no run.json. Give the run's --run-dir")
    return ControlDirectory.open(run_dir)


def _row(row: RungOutlook) -> dict[str, Any]:
    shown = ("name", "step", "path", "verdict", "reasons", "world", "local")
    return {field: getattr(row, field) for field in shown}


def _print_ladder(found: Resolution) -> None:
    rows = found.candidates
    there = "" if Path(found.root).is_dir() else " (there is no such directory; --root names another)"
    typer.echo(f"checkpoints in {found.root}{there}")
    width = max((len(row.name) for row in rows), default=0)
    for row in rows:
        step = "-" if row.step is None else str(row.step)
        typer.echo(f"  step {step:>8}  {row.name:{width}}  {row.verdict}")
        for reason in row.reasons:
            typer.echo(f"      {reason}")
        if row.local:
            typer.echo(f"      {row.local}, as recorded")


def _print_answer(
    used: RungOutlook | None, fresh: bool, resume_from: str, world: int | None, *, read: str
) -> None:
    from holdfast.base import plural

    asked = "" if resume_from == "auto" else f" (resume_from = {resume_from!r})"
    if used is not None:
        typer.echo(f"would resume{asked} at step {used.step} from {used.path}; {read}")
        if world is not None and used.world is not None and used.world != world:
            saved, wanted = plural(used.world, "rank"), plural(world, "rank")
            typer.echo(f"it was saved by {saved}, and would be resharded to {wanted}")
    elif fresh:
        typer.echo(f"would make a fresh start{asked}")
    else:
        typer.echo(f"would refuse to start{asked}: no checkpoint may be used (exit code 18)")


# --- diff --------------------------------------------------------------------------------------------------


def diff(
    a: Annotated[Path, typer.Argument(help="A checkpoint directory.")],
    b: Annotated[Path, typer.Argument(help="Another one.")],
    tolerance: Annotated[
        float | None, typer.Option(min=0, help="Values that are no further apart than this count as equal.")
    ] = None,
    as_json: JSON = False,
) -> None:
    """Say what differs between two checkpoints, tensor by tensor, largest difference first.

    Exits with 0 if the state is equal, 1 if it differs, 2 if one of the two cannot be compared.
    """
    from holdfast.checkpoint import compare

    found = compare(a, b, tolerance=tolerance)
    if as_json:
        import msgspec

        _print_json(
            {
                "equal": found.equal,
                "compared": found.compared,
                "read": found.read,
                "facts": msgspec.to_builtins(found.facts),
                "entries": [_difference_row(entry) for entry in found.entries],
            }
        )
    else:
        _print_difference(found)
    raise typer.Exit(0 if found.equal else 1)


def _difference_row(entry: EntryDifference) -> dict[str, Any]:
    import msgspec

    from holdfast.journal.events import encode_loss

    row = {name: getattr(entry, name) for name in entry.__struct_fields__}
    return msgspec.to_builtins(row | {"max_abs": encode_loss(entry.max_abs)})  # type: ignore[no-any-return]


def _print_difference(found: Difference) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    from holdfast.base import escaped

    def table(*header: str) -> Table:
        made = Table(box=None, pad_edge=False, show_edge=False)
        for name in header:
            made.add_column(name, overflow="fold")
        return made

    console = Console(highlight=False)
    if not console.is_terminal:
        console.width = 200  # not a terminal: lines should stay whole
    if found.facts:
        facts = table("fact", "A", "B")
        for fact in found.facts:
            facts.add_row(*(Text(escaped(str(value))) for value in (fact.name, fact.a, fact.b)))
        console.print(facts)
    if found.entries:
        console.print()
        entries = table("entry", "what", "differing", "max abs", "NaN in A", "NaN in B")
        for entry in found.entries:
            entries.add_row(*(Text(cell) for cell in _cells(entry)))
        console.print(entries)
    alike = found.compared - sum(not entry.what.startswith("only") for entry in found.entries)
    verdict = "the state is equal" if found.equal else f"{len(found.entries)} entries differ"
    typer.echo(
        f"{verdict}; {alike} of {found.compared} shared entries are equal, {found.read} had to be read"
    )


def _cells(entry: EntryDifference) -> list[str]:
    from holdfast.base import escaped

    name = escaped(entry.name)
    if entry.what != "values":
        detail = ", ".join(entry.parts) or entry.detail
        return [name, f"{entry.what}: {escaped(detail, 1000)}" if detail else entry.what, "", "", "", ""]
    apart = "-" if entry.max_abs is None else f"{entry.max_abs:.6g}"
    return [
        name, "values", f"{entry.differing} of {entry.elements}", apart, str(entry.nans_a), str(entry.nans_b)
    ]  # fmt: skip


# --- export ------------------------------------------------------------------------------------------------


def export(
    path: Annotated[Path, typer.Argument(help="A checkpoint directory.")],
    out: Annotated[Path, typer.Argument(help="The file to write.")],
    part: Annotated[str, typer.Option(help="The tracked part to export.")] = "model",
    shard_size: Annotated[
        str | None,
        typer.Option(
            help="Write OUT as a directory of safetensors files of at most this size, such as 5GB, with the "
            "index that Hugging Face's libraries read."
        ),
    ] = None,
    form: Annotated[str, typer.Option("--format", help="safetensors or torch.")] = "safetensors",
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace OUT if it exists.")] = False,
    as_json: JSON = False,
) -> None:
    """Write the complete weights of a checkpoint to one file. Every byte is verified on the way.

    Exits with 0 if OUT was written, 1 if the checkpoint is not sound, 2 if the request cannot be carried out.
    """
    from holdfast.errors import UsageError

    if not path.exists():
        from holdfast.checkpoint import no_such

        raise UsageError(no_such(path))
    shard_bytes = _size(shard_size) if shard_size is not None else None
    import msgspec

    from holdfast.checkpoint import export_weights

    done = export_weights(path, out, part=part, form=form, overwrite=overwrite, shard_bytes=shard_bytes)
    if as_json:
        _print_json(msgspec.to_builtins(done))
    else:
        typer.echo(
            f"{done.path}: {done.tensors} tensors of {done.part}, {done.bytes} bytes, {done.format}; "
            f"step {done.step}, checkpoint {done.checkpoint} of "
            f"{f'run {done.run}' if done.run else 'another project, unverified'}"
        )


def _size(text: str) -> int:
    """`5GB`, `500 MB` or a number of bytes."""
    import re

    from holdfast.errors import UsageError

    found = re.fullmatch(r"(\d+)\s*(|[KMGT])B?", text.strip(), re.I)
    if found is None or not int(found[1]):
        raise UsageError(f"--shard-size {text!r} is not a size such as 5GB")
    size: int = int(found[1]) * 1000 ** " KMGT".index(found[2].upper() or " ")
    return size


def import_checkpoint(
    source: Annotated[
        Path, typer.Argument(metavar="SRC", help="Another project's checkpoint, or a directory of them.")
    ],
    run_dir: Annotated[Path, typer.Argument(metavar="RUN_DIR", help="The directory of the run to make.")],
    parts: Annotated[
        list[str] | None,
        typer.Option("--part", help="A part to take over, such as model; repeat it. Default: all of them."),
    ] = None,
    names: Annotated[
        str,
        typer.Option(help="The function that says which name a stored one gets: package.module:function."),
    ] = "",
    as_json: JSON = False,
) -> None:
    """Convert another project's checkpoint to one of ours, verified from then on, in a run of its own.

    Exits with 0 if it was committed, 1 if SRC is not sound, 2 if the request cannot be carried out, 25 if a
    part of it cannot be carried over.
    """
    import msgspec

    from holdfast.recover import convert

    done = convert(source, run_dir, parts=parts or [], names=names)
    if as_json:
        _print_json(msgspec.to_builtins(done))
        return
    for line in done.passed_over:
        typer.echo(f"passed over: {line}")
    typer.echo(f"{done.path}: step {done.step}, {', '.join(done.parts)} of {done.source} ({done.layout})")
    for note in done.notes:
        typer.echo(f"  {note}")
    typer.echo(f"It has digests now. A run begins with it by checkpoint.resume_from = {done.path!r}")


def _print_json(value: Any) -> None:
    import json

    typer.echo(json.dumps(value))


REMOTE_SECONDS = 30.0
"""Needed to record it in an object store too."""
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
    """Condemn a checkpoint and everything that was saved from it: no resume uses them any more.

    Exits with 0 if it was recorded, 20 if the run is live, 2 if the request cannot be carried out.
    """
    from holdfast.record import Standing

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

    Exits with 0 if it was recorded, 20 if the run is live, 2 if the request cannot be carried out.
    """
    from holdfast.record import Standing

    _judge(run_dir, which, reason, root, Standing.ACQUITTED, yes=yes, as_json=as_json)


def _judge(
    run_dir: Path, which: str, reason: str, root: Path | None, verdict: Standing, *, yes: bool, as_json: bool
) -> None:
    from holdfast.base import escaped
    from holdfast.errors import UsageError
    from holdfast.record import known_root

    control = open_run(run_dir)
    where = (root if root is not None else run_dir / "checkpoints").absolute()
    if not reason.strip():
        raise UsageError("--reason must say why: it is all that a later reader of the journal has")
    reason = escaped(reason.strip(), 2000)
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
        # Nobody held the lease while a person was thinking: what they agreed to must still be true.
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
    """The checkpoint that was named, then those that share its fate, oldest first."""
    from holdfast.errors import UsageError
    from holdfast.record import Standing, StandingBook, read_timeline

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
    from holdfast.checkpoint.copies import tier as local_manifest
    from holdfast.config import is_step
    from holdfast.errors import UsageError
    from holdfast.record import was_committed

    # A save that was cut off before its rename left a record too. Its checkpoint never existed for anyone,
    # unless it was committed in the local tier, which leaves a manifest.
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
    from holdfast.record import descendants

    return descendants({target.id}, records)


def _with(target: CommitRecord) -> str:
    from holdfast.record import condemned_with

    return condemned_with(_name(target))


def _condemned_with(control: ControlDirectory, record: CommitRecord, target: CommitRecord) -> bool:
    """Whether its newest record condemns it only for its origin; in doubt, no."""
    from holdfast.errors import ControlError
    from holdfast.record import StandingRecord, list_names, read_record

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
    """Hold the run's lease for a moment; RunIsLiveError if somebody else holds it."""
    from holdfast.record import Fence, LeaseKeeper, claim

    held = claim(control, f"operator-{uuid.uuid4().hex[:12]}", LEASE_TTL)
    # Losing it needs no handler: the fence refuses whatever would come afterwards.
    keeper = LeaseKeeper(control, held, lambda _why: None)
    try:
        yield Fence(control, held.epoch, timeout=LEASE_TTL)
    finally:
        keeper.release()


def _tell_remote(control: ControlDirectory, root: Path, chosen: list[CommitRecord]) -> list[str]:
    """Put the records beside the remote copies too, if the run has any. Returns what did not work."""
    from holdfast.checkpoint.format import CheckpointName
    from holdfast.checkpoint.remote import open_remote
    from holdfast.errors import HoldfastError
    from holdfast.record import RootBook, known_remote

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
    """Write it down. Returns, in words, what could not be written beside the checkpoints."""
    from holdfast.journal import JournalWriter
    from holdfast.journal.events import DecisionMade
    from holdfast.record import Standing, StandingBook, attempt_numbers

    book = StandingBook(control, root)
    target, *others = chosen
    said = f"operator: {reason}"
    # Condemning starts with the youngest, so that if it is cut off nothing usable descends from what is
    # condemned already; acquitting goes the other way round, for the same reason.
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
        DecisionMade(
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
    from holdfast.record import Standing, StandingBook, read_timeline

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
    from holdfast.checkpoint.format import CheckpointName

    return str(CheckpointName(record.step, record.id))


def _count(chosen: list[Any]) -> str:
    return "1 checkpoint" if len(chosen) == 1 else f"{len(chosen)} checkpoints"
