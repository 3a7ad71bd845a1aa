"""`holdfast ckpt locate`, `diff` and `export`: what would be resumed, what differs, and the weights alone.

None of them changes anything in a run or a checkpoint. `locate` never needs torch, `diff` only for tensors
whose digests differ, `export` always.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from holdfast.cli.arguments import JSON

if TYPE_CHECKING:
    from holdfast.checkpoint.difference import Difference, EntryDifference
    from holdfast.checkpoint.identity import CheckpointRoot
    from holdfast.checkpoint.ladder import Ladder, Rung
    from holdfast.control.directory import ControlDirectory


USED, REFUSED, LOWER, NO_RUNG = "would be used", "refused", "lower than the one used", "not a rung"
LOCAL = "would be used if its nodes still hold it"


# --- locate ------------------------------------------------------------------------------------------------


def locate(
    run_dir: Annotated[Path, typer.Argument(help="The run's directory (run.dir, --run-dir).")],
    root: Annotated[
        Path | None, typer.Option(help="Its checkpoint root, if not RUN_DIR/checkpoints.")
    ] = None,
    resume_from: Annotated[str, typer.Option(help="auto, fresh, a step or a path: the setting.")] = "auto",
    force: Annotated[bool, typer.Option("--force", help="As with checkpoint.force.")] = False,
    world: Annotated[int | None, typer.Option(min=1, help="Say what so many ranks would mean.")] = None,
    full: Annotated[bool, typer.Option("--full", help="Read every byte, as a resume does.")] = False,
    as_json: JSON = False,
) -> None:
    """Say what a resume would use now, and why not each higher rung. Changes nothing.

    What nodes hold is known here only as recorded: where a resume would look at it first, that is said, and
    what it would use otherwise.

    Exits with 0 if a checkpoint or a fresh start would be used, 18 if the run would refuse to start.
    """
    from holdfast.checkpoint import local_manifest
    from holdfast.checkpoint.identity import CheckpointRoot
    from holdfast.checkpoint.inventory import take_inventory, take_pinned
    from holdfast.checkpoint.problems import printable
    from holdfast.cli.ckpt_copies import as_recorded
    from holdfast.control.operator import pinned
    from holdfast.errors import UsageError
    from holdfast.exit_codes import ExitCode

    control = open_run(run_dir)
    pin = pinned(control)
    local = local_manifest.names(control)
    if force and resume_from == "auto":
        raise UsageError("--force accepts one bad checkpoint by name: give --resume-from a step or a path")
    there = CheckpointRoot((root if root is not None else run_dir / "checkpoints").absolute())
    try:
        if pin is not None:
            ladder = take_pinned(control, there, pin.checkpoint, force=pin.force, copies=local)
        else:
            ladder = take_inventory(control, there, resume_from, force=force, copies=local)
        recorded = {str(name): as_recorded(control, name) for name in local}
        rows = _walk(_with_evidence(ladder, control), there, control.run_id, recorded, full=full)
        # What only nodes have does not stand against a fresh start once they have lost it.
        fresh = ladder.may_start_fresh or (
            pin is None and take_inventory(control, there, resume_from, force=force).may_start_fresh
        )
    except OSError as error:
        raise UsageError(f"the checkpoint root {there.path} cannot be read: {error}") from error
    used = next((row for row in rows if row["verdict"] == USED), None)
    fresh = used is None and fresh
    first = next((row for row in rows if row["verdict"] in (LOCAL, USED)), None)
    lost = used["name"] if used is not None else "fresh start" if fresh else "refused"
    if as_json:
        answer = {
            "chosen": first["name"] if first is not None else lost,
            "step": first["step"] if first else None,
            "path": first["path"] if first else None,
            "without_local": lost,
        }
        extra = {"run": control.run_id, "root": str(there.path), "digests_read": full}
        extra["pinned"] = pin.checkpoint if pin is not None else None
        _print_json(answer | extra | {"checkpoints": rows})
    else:
        _print_ladder(rows, there.path)
        if pin is not None:
            typer.echo(f"pinned by {printable(pin.request.describe(), 2000)}: no other one is looked at")
        if first is not None and first is not used:
            typer.echo(
                f"would resume at step {first['step']} from the local tier ({first['local']}, as recorded); "
                "if its nodes hold it no longer:"
            )
        _print_answer(used, fresh, resume_from, world, full=full)
    raise typer.Exit(ExitCode.OK if first is not None or fresh else ExitCode.NO_VALID_RUNG)


def open_run(run_dir: Path) -> ControlDirectory:
    from holdfast.control.directory import ControlDirectory
    from holdfast.errors import UsageError

    if not (run_dir / "run.json").is_file():
        raise UsageError(f"{run_dir} is not a run directory: it has no run.json. Give the run's --run-dir")
    return ControlDirectory.open(run_dir)


def _with_evidence(ladder: Ladder, control: ControlDirectory) -> Ladder:
    """The ladder with what speaks against those that are suspect or condemned."""
    from holdfast.checkpoint.identity import parse_name
    from holdfast.checkpoint.ladder import REFUSED as REFUSED_STANDINGS
    from holdfast.checkpoint.ladder import Ladder
    from holdfast.control.standing import StandingBook
    from holdfast.journal.events import RejectedOption

    book, rejected = StandingBook(control), []
    for option in ladder.rejected:
        name, why = parse_name(option.option), []
        if name is not None and book.of(name.id) in REFUSED_STANDINGS:
            why = [f"{book.of(name.id)}: {line}" for line in book.evidence_of(name.id)]
        rejected.append(RejectedOption(option.option, [*option.why, *why]))
    return Ladder(ladder.rungs, rejected, ladder.may_start_fresh)


def _walk(
    ladder: Ladder, root: CheckpointRoot, run: str, recorded: dict[str, str], *, full: bool
) -> list[dict[str, Any]]:
    """Down the ladder as a resume goes, until a rung holds; then what is no rung at all.

    `recorded` has where local copies should be; what they are worth is known to their nodes only.
    """
    from holdfast.checkpoint.identity import parse_name

    rows: list[dict[str, Any]] = []
    used = False
    for rung in ladder.rungs:
        if used:
            path = Path(rung.path) if rung.path else root.path / rung.name
            rows.append(_row(rung.name, rung.step, path, LOWER, []) | {"world": None})
            continue
        path, ranks, reasons = _look(rung, root, run, full=full)
        used = not reasons
        in_local = not rung.path and rung.name in recorded
        verdict = USED if used else LOCAL if in_local else REFUSED
        where = path if path.is_dir() or not in_local else None
        reasons = [] if where is None else reasons
        rows.append(_row(rung.name, rung.step, where, verdict, reasons) | {"world": ranks})
    for option in ladder.rejected:
        name, path = parse_name(option.option), root.path / option.option
        where = path if name is not None and path.is_dir() else None
        step = name.step if name is not None else None
        rows.append(_row(option.option, step, where, NO_RUNG, option.why) | {"world": None})
    return [row | {"local": recorded.get(row["name"])} for row in rows]


def _row(name: str, step: int | None, path: Path | None, verdict: str, reasons: list[str]) -> dict[str, Any]:
    from holdfast.checkpoint.problems import printable

    where = printable(str(path), 4096) if path is not None else None
    shown = {"name": printable(name), "step": step, "path": where, "verdict": verdict}
    return shown | {"reasons": [printable(reason, 2000) for reason in reasons]}


def _look(rung: Rung, root: CheckpointRoot, run: str, *, full: bool) -> tuple[Path, int | None, list[str]]:
    """Where a rung lies, how many ranks saved it, and what a resume would find wrong: cheaply, or all."""
    from holdfast.checkpoint.inventory import look_at
    from holdfast.checkpoint.reading import reading
    from holdfast.checkpoint.verify import verify

    path, inspection = look_at(rung, root, run)
    ranks = inspection.manifest.world.size if inspection.manifest is not None else None
    if inspection.sound and rung.manifest and inspection.manifest_digest != rung.manifest:
        found = inspection.manifest_digest
        why = f"altered: holdfast.json: its digest is {found}; {rung.manifest} was committed under this name"
        return path, ranks, [why]
    if inspection.sound and rung.manifest and full:
        with reading(path):
            inspection = verify(path)
    return path, ranks, [str(problem) for problem in inspection.problems]


def _print_ladder(rows: list[dict[str, Any]], root: Path) -> None:
    there = "" if root.is_dir() else " (there is no such directory; --root names another)"
    typer.echo(f"checkpoints in {root}{there}")
    width = max((len(row["name"]) for row in rows), default=0)
    for row in rows:
        step = "-" if row["step"] is None else str(row["step"])
        typer.echo(f"  step {step:>8}  {row['name']:{width}}  {row['verdict']}")
        for reason in row["reasons"]:
            typer.echo(f"      {reason}")
        if row["local"]:
            typer.echo(f"      {row['local']}, as recorded")


def _print_answer(
    used: dict[str, Any] | None, fresh: bool, resume_from: str, world: int | None, *, full: bool
) -> None:
    asked = "" if resume_from == "auto" else f" (resume_from = {resume_from!r})"
    if used is not None:
        read = "every digest matched" if full else "digests were not read: --full does that"
        typer.echo(f"would resume{asked} at step {used['step']} from {used['path']}; {read}")
        if world is not None and used["world"] not in (None, world):
            typer.echo(f"it was saved by {_ranks(used['world'])}, and would be resharded to {_ranks(world)}")
    elif fresh:
        typer.echo(f"would make a fresh start{asked}")
    else:
        typer.echo(f"would refuse to start{asked}: no checkpoint may be used (exit code 18)")


def _ranks(count: int) -> str:
    return "1 rank" if count == 1 else f"{count} ranks"


# --- diff --------------------------------------------------------------------------------------------------


def diff(
    a: Annotated[Path, typer.Argument(help="A checkpoint directory.")],
    b: Annotated[Path, typer.Argument(help="Another one.")],
    tolerance: Annotated[
        float | None, typer.Option(min=0, help="Values no further apart than this count as equal.")
    ] = None,
    as_json: JSON = False,
) -> None:
    """Say what differs between two checkpoints, tensor by tensor, largest difference first.

    Exits with 0 if the state is equal, 1 if it differs, 2 if one of the two cannot be compared.
    """
    from holdfast.checkpoint.difference import compare

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

    from holdfast.checkpoint.problems import printable

    def table(*header: str) -> Table:
        made = Table(box=None, pad_edge=False, show_edge=False)
        for name in header:
            made.add_column(name, overflow="fold")
        return made

    console = Console(highlight=False)
    if not console.is_terminal:
        console.width = 200  # nobody's window: lines should stay whole
    if found.facts:
        facts = table("fact", "A", "B")
        for fact in found.facts:
            facts.add_row(*(Text(printable(str(value))) for value in (fact.name, fact.a, fact.b)))
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
    from holdfast.checkpoint.problems import printable

    name = printable(entry.name)
    if entry.what != "values":
        detail = ", ".join(entry.parts) or entry.detail
        return [name, f"{entry.what}: {printable(detail, 1000)}" if detail else entry.what, "", "", "", ""]
    apart = "-" if entry.max_abs is None else f"{entry.max_abs:.6g}"
    return [
        name, "values", f"{entry.differing} of {entry.elements}", apart, str(entry.nans_a), str(entry.nans_b)
    ]  # fmt: skip


# --- export ------------------------------------------------------------------------------------------------


def export(
    path: Annotated[Path, typer.Argument(help="A checkpoint directory.")],
    out: Annotated[Path, typer.Argument(help="The file to write.")],
    part: Annotated[str, typer.Option(help="The tracked part to export.")] = "model",
    form: Annotated[str, typer.Option("--format", help="safetensors or torch.")] = "safetensors",
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace OUT if it exists.")] = False,
    as_json: JSON = False,
) -> None:
    """Write the weights of a checkpoint, whole, to one file. Every byte is verified on the way.

    Exits with 0 if OUT was written, 1 if the checkpoint is not sound, 2 if asked for what cannot be done.
    """
    from holdfast.errors import UsageError

    if not path.is_dir():
        raise UsageError(f"{path}: there is no such directory")
    import msgspec

    from holdfast.checkpoint.export import export as write

    done = write(path, out, part=part, form=form, overwrite=overwrite)
    if as_json:
        _print_json(msgspec.to_builtins(done))
    else:
        typer.echo(
            f"{done.path}: {done.tensors} tensors of {done.part}, {done.bytes} bytes, {done.format}; "
            f"step {done.step}, checkpoint {done.checkpoint} of run {done.run}"
        )


def _print_json(value: Any) -> None:
    import json

    typer.echo(json.dumps(value))
