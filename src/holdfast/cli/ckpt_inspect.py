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
    from holdfast.checkpoint.resolution import Resolution
    from holdfast.control.directory import ControlDirectory
    from holdfast.policy.rungs import Candidate


# --- locate ------------------------------------------------------------------------------------------------


def locate(
    run_dir: Annotated[
        Path, typer.Argument(help="The run's directory (run.dir, --run-dir), or one of checkpoints alone.")
    ],
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
    from holdfast.checkpoint.plain import is_plain_root
    from holdfast.checkpoint.resolver import resolve_resume
    from holdfast.errors import UsageError
    from holdfast.exit_codes import ExitCode
    from holdfast.policy.rungs import LOCAL, USED

    if not is_plain_root(run_dir):
        open_run(run_dir)
    if force and resume_from == "auto":
        raise UsageError("--force accepts one bad checkpoint by name: give --resume-from a step or a path")
    found = resolve_resume(run_dir, root=root, resume_from=resume_from, force=force, quick=not full)
    used = next((row for row in found.candidates if row.verdict == USED), None)
    first = next((row for row in found.candidates if row.verdict in (LOCAL, USED)), None)
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
        _print_answer(used, found.without_local == "fresh start", resume_from, world, read=read)
    raise typer.Exit(ExitCode.NO_VALID_RUNG if found.chosen == "refused" else ExitCode.OK)


def open_run(run_dir: Path) -> ControlDirectory:
    from holdfast.control.directory import ControlDirectory
    from holdfast.errors import UsageError

    if not (run_dir / "run.json").is_file():
        raise UsageError(f"{run_dir} is not a run directory: it has no run.json. Give the run's --run-dir")
    return ControlDirectory.open(run_dir)


def _row(row: Candidate) -> dict[str, Any]:
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
    used: Candidate | None, fresh: bool, resume_from: str, world: int | None, *, read: str
) -> None:
    asked = "" if resume_from == "auto" else f" (resume_from = {resume_from!r})"
    if used is not None:
        typer.echo(f"would resume{asked} at step {used.step} from {used.path}; {read}")
        if world is not None and used.world not in (None, world):
            typer.echo(f"it was saved by {_ranks(used.world)}, and would be resharded to {_ranks(world)}")
    elif fresh:
        typer.echo(f"would make a fresh start{asked}")
    else:
        typer.echo(f"would refuse to start{asked}: no checkpoint may be used (exit code 18)")


def _ranks(count: int | None) -> str:
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
        from holdfast.checkpoint.reading import no_such

        raise UsageError(no_such(path))
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
