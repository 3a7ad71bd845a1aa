"""`holdfast ckpt ls` and `holdfast ckpt verify`: look at checkpoints without torch, changing nothing."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import typer

from holdfast.checkpoint.format import is_url
from holdfast.cli import ckpt_copies, ckpt_inspect, clean
from holdfast.cli.output import CONFIG, JSON, ROOT, Bar, print_columns, print_json, show_bytes, show_time

if TYPE_CHECKING:
    from holdfast.checkpoint.format import Inspection, Manifest, Progress
    from holdfast.record import ControlDirectory, RootBook, StandingBook

app = typer.Typer(help="List, verify, compare, judge, export and import checkpoints.", no_args_is_help=True)
JUDGED = ("suspect", "condemned", "acquitted")
"""Standings whose reasons somebody will want to know."""
app.command("locate")(ckpt_inspect.locate)
app.command("diff")(ckpt_inspect.diff)
app.command("condemn")(ckpt_inspect.condemn)
app.command("acquit")(ckpt_inspect.acquit)
app.command("export")(ckpt_inspect.export)
app.command("import")(ckpt_inspect.import_checkpoint)
app.command("gc")(clean.gc)


@app.command(name="ls")
def list_checkpoints(
    path: Annotated[
        str,
        typer.Argument(
            metavar="PATH|URL", help="A run directory, a directory that holds checkpoints, or a remote root."
        ),
    ],
    root: ROOT = None,
    copies: Annotated[
        bool,
        typer.Option(
            "--copies", "-v", help="Show for each node which copies it was given, according to the records."
        ),
    ] = False,
    as_json: JSON = False,
) -> None:
    """List checkpoints, newest step first. Looks at names and sizes; digests are not read.

    For a run, it also lists those that only the local tier has, and where copies are according to the
    records. Exits with 1 if a checkpoint is incomplete.
    """
    from holdfast.checkpoint import gone_since
    from holdfast.checkpoint.format import STAGING

    if is_url(path):
        _list_remote(path, as_json=as_json)
    folder, control = _resolve(_existing(Path(path)), root, local_will_do=True)
    standings = _standings(control, folder)
    rows: list[dict[str, Any]] = []
    latest = _latest(folder)
    for directory in _checkpoints(folder) if folder.exists() else ():
        row = _row(directory, standings)
        if row["problems"] and gone_since(directory, control):
            continue  # retention took it away after it was listed
        row["latest"] = directory.name == latest
        rows.append(row)
    if control is not None:
        rows = ckpt_copies.with_local(control, standings, rows)
    damaged = any(row["problems"] for row in rows)
    rows.extend(map(_staged_row, _folders_in(folder / STAGING)))
    if as_json:
        print_json({"root": str(folder), "latest": latest, "digests_read": False, "checkpoints": rows})
    else:
        _print_rows(folder, rows, latest, show_standing=standings is not None)
        ckpt_copies.print_local(rows, each_node=copies)
    raise typer.Exit(1 if damaged else 0)


@app.command(name="verify")
def verify_checkpoints(
    paths: Annotated[
        list[str],
        typer.Argument(
            metavar="PATH|URL…",
            help="Checkpoints, or run or checkpoint directories for all checkpoints in them, or URLs of "
            "remote copies. With --tier: RUN_DIR [STEP|ID|NAME].",
        ),
    ],
    tier: Annotated[
        ckpt_copies.Tier | None,
        typer.Option(
            help="Verify a run's copies on this node (local: its own, peer: replicas), the global "
            "ones, or all."
        ),
    ] = None,
    local_dir: Annotated[
        Path | None, typer.Option(help="With --tier: this node's local directory, if no --config names it.")
    ] = None,
    root: ROOT = None,
    config: CONFIG = None,
    as_json: JSON = False,
    run: Annotated[str | None, typer.Option(help="The run id that they must have.")] = None,
    world: Annotated[int | None, typer.Option(min=1, help="The world size that they must have.")] = None,
) -> None:
    """Read every byte of checkpoints and compare digests; name each problem.

    A checkpoint that a live run's retention deletes meanwhile is named, but is not a fault. Exits with 0 if
    all are sound, 1 if one is not, 2 if the request names something that cannot be verified.
    """
    from holdfast.errors import UsageError

    if tier is not None:
        if run is not None or world is not None:
            raise UsageError("--tier judges by a run's own records: leave out --run and --world")
        ckpt_copies.verify_tier(paths, tier, local_dir=local_dir, config=config, root=root, as_json=as_json)
    if local_dir is not None or root is not None or config is not None:
        raise UsageError("--local-dir, --root and --config belong to --tier: give that too")
    listed: list[tuple[Path, ControlDirectory | None]] = []
    if any(map(is_url, paths)):
        _verify_remote(paths, as_json=as_json)
    for path in map(_existing, map(Path, paths)):
        folder, control = _resolve(path)
        found = _checkpoints(folder)
        if not found:
            raise UsageError(f"{path}: there are no checkpoints here; give a checkpoint, its root or its run")
        listed += [(directory, control) for directory in found]
    inspections: list[Inspection] = []
    started = time.perf_counter()
    with Bar(lambda: listed_bytes([directory for directory, _ in listed])) as bar:
        for directory, control in listed:
            inspection = read_listed(directory, control, run=run, world=world, progress=bar.advance)
            if inspection.gone and directory in map(Path, paths):
                raise UsageError(f"{directory}: this checkpoint is not there any more: {inspection.gone}")
            inspections.append(inspection)
    if all(inspection.gone for inspection in inspections):
        raise UsageError("all that was listed was taken away before it could be read; try again")
    seconds = time.perf_counter() - started
    sound = all(inspection.sound for inspection in inspections)
    if as_json:
        print_json(
            {
                "sound": sound,
                "bytes_checked": sum(inspection.bytes_checked for inspection in inspections),
                "seconds": round(seconds, 6),
                "checkpoints": [verified_row(inspection) for inspection in inspections],
            }
        )
    else:
        _print_inspections(inspections, seconds)
    raise typer.Exit(0 if sound else 1)


def read_listed(
    directory: Path,
    control: ControlDirectory | None,
    *,
    run: str | None = None,
    world: int | None = None,
    progress: Progress | None = None,
) -> Inspection:
    """Verify a checkpoint that was listed. It is no problem if retention has removed it since."""
    from holdfast.checkpoint import gone_since, reading
    from holdfast.checkpoint.foreign import examine, recognise
    from holdfast.checkpoint.format import verify

    with reading(directory):
        foreign = recognise(directory)
        if foreign is not None and run is None and world is None:
            inspection, _ = examine(foreign, progress=progress)
        else:
            inspection = verify(directory, run=run, world=world, progress=progress)
    if inspection.problems and (why := gone_since(directory, control)):
        inspection.problems, inspection.gone = [], why
    return inspection


# --- remote copies -----------------------------------------------------------------------------------------


def _list_remote(url: str, *, as_json: bool) -> NoReturn:
    rows = ckpt_copies.rows(url)
    if as_json:
        print_json({"root": url, "latest": None, "digests_read": False, "checkpoints": rows})
    else:
        _print_rows(url, rows, None, show_standing=any(row["standing"] for row in rows))
    raise typer.Exit(1 if any(row["problems"] for row in rows) else 0)


def _verify_remote(urls: list[str], *, as_json: bool) -> NoReturn:
    from holdfast.errors import UsageError

    if not all(map(is_url, urls)):
        raise UsageError("give either paths or URLs, not both in one command")
    rows, seconds = ckpt_copies.verify_remote(urls)
    sound = all(row["sound"] for row in rows)
    if as_json:
        total = sum(row["bytes_checked"] for row in rows)
        print_json(
            {"sound": sound, "bytes_checked": total, "seconds": round(seconds, 6), "checkpoints": rows}
        )
    else:
        ckpt_copies.print_verified(rows, seconds)
    raise typer.Exit(0 if sound else 1)


# --- finding them ------------------------------------------------------------------------------------------


def _existing(path: Path) -> Path:
    from holdfast.errors import UsageError

    if not path.exists():
        from holdfast.checkpoint import no_such

        raise UsageError(no_such(path))
    if not path.is_dir() and not _is_foreign(path):
        raise UsageError(f"{path}: this is not a directory; give a checkpoint, its root or its run")
    return path


def _is_foreign(path: Path) -> bool:
    """Whether it is one checkpoint of another project's, which may be a file."""
    from holdfast.checkpoint.foreign import recognise

    return recognise(path) is not None


def _resolve(
    path: Path, root: Path | None = None, *, local_will_do: bool = False
) -> tuple[Path, ControlDirectory | None]:
    """The checkpoint root of a run directory, with the run's control directory; else the path itself."""
    from holdfast.errors import UsageError

    if not (path / "run.json").exists():
        if root is not None:
            raise UsageError(f"{path} is not a run directory, so --root says nothing about it; leave it out")
        return path, None
    from holdfast.checkpoint.copies import tier as local_manifest
    from holdfast.record import ControlDirectory

    control = ControlDirectory.open(path)
    there = root.absolute() if root is not None else path / "checkpoints"
    if not there.is_dir() and not (local_will_do and root is None and local_manifest.names(control)):
        raise UsageError(
            f"{path}: this run keeps no checkpoints in {there}; give its checkpoint root instead"
        )
    return there, control


def _standings(control: ControlDirectory | None, folder: Path) -> StandingBook | RootBook | None:
    """What a run knows of its checkpoints; without a run, how any that lie here were judged."""
    from holdfast.errors import ControlError
    from holdfast.record import RootBook, StandingBook

    if control is not None:
        return StandingBook(control, folder)
    is_one = folder.is_file() or (folder / "holdfast.json").exists()
    root = folder.absolute().parent if is_one else folder
    book = RootBook(root)
    try:
        return book if book.names() else None
    except ControlError:
        return book  # a standing that cannot be listed counts against all of them


def _checkpoints(folder: Path) -> list[Path]:
    """The checkpoint that `folder` is, or those in it."""
    from holdfast.checkpoint.foreign import checkpoints_in
    from holdfast.checkpoint.format import checkpoints_under, looks_like_checkpoint
    from holdfast.errors import UsageError

    if looks_like_checkpoint(folder.resolve()) or _is_foreign(folder):
        return [folder]
    try:
        ours = checkpoints_under(folder)
        return ours + [one.path for one in checkpoints_in(folder) if one.path not in ours]
    except OSError as error:
        raise UsageError(f"{folder}: cannot be listed: {error.strerror or error}") from error


def _folders_in(staging: Path) -> list[Path]:
    if not staging.is_dir() or staging.is_symlink():
        return []
    try:
        return sorted(entry for entry in staging.iterdir() if entry.is_dir())
    except OSError as error:
        typer.echo(f"{staging}: cannot be listed: {error.strerror or error}", err=True)
        return []


def _latest(folder: Path) -> str | None:
    """The name in the `latest` hint; None if there is none, or a link, of which `_hints` tells."""
    from holdfast.base import escaped, read_regular
    from holdfast.checkpoint.format import LATEST

    if (link := folder / LATEST).is_symlink():
        return escaped(link.resolve().name) if link.exists() else None
    try:
        return escaped(read_regular(folder / LATEST, 4096).decode("utf-8", "replace").strip())
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        return f"unreadable: {error.strerror or error}"


# --- rows --------------------------------------------------------------------------------------------------


def _row(directory: Path, standings: StandingBook | RootBook | None) -> dict[str, Any]:
    from holdfast.base import escaped
    from holdfast.checkpoint.foreign import examine, recognise, step_told
    from holdfast.checkpoint.format import check_structure, parse_name

    foreign = recognise(directory)
    inspection = examine(foreign, quick=True)[0] if foreign is not None else check_structure(directory)
    manifest, name = inspection.manifest, parse_name(directory.name)
    row: dict[str, Any] = {
        "path": escaped(str(directory), 4096),
        "name": escaped(directory.name),
        "state": "complete" if inspection.sound else str(inspection.problems[0].reason),
        "step": manifest.step if manifest else name.step if name else step_told(foreign) if foreign else None,
        "id": manifest.id if manifest else name.id if name else None,
        "layout": str(foreign.layout) if foreign is not None else None,
        "parent": manifest.parent if manifest else None,
        "run": escaped(manifest.run) if manifest else None,
        "attempt": manifest.attempt if manifest else None,
        "created": manifest.created if manifest else None,
        "size": inspection.size,
        "files": inspection.files,
        "world": manifest.world.size if manifest else None,
        "digests_missing": inspection.digests_missing,
        "problems": _problems(inspection),
        "read_back": _read_back(directory),
    }
    if standings is not None:
        row |= ckpt_copies.standing_of(standings, str(name) if name else row["id"])
    return row


def _read_back(directory: Path) -> dict[str, Any] | None:
    """When and where this copy was read back after its commit, and what was wrong; None if it was not."""
    from holdfast.base import escaped
    from holdfast.checkpoint import last_read_back
    from holdfast.checkpoint.format import CheckpointRoot, parse_name

    name = parse_name(directory.name)
    found = last_read_back(CheckpointRoot(directory.absolute().parent), name) if name is not None else None
    if found is None:
        return None
    return {
        "at": found.at,
        "node": escaped(found.node),
        "attempt": found.attempt,
        "sound": found.sound,
        "problems": [escaped(problem, 2000) for problem in found.problems],
    }


def _staged_row(directory: Path) -> dict[str, Any]:
    """Work in progress, or the leftovers of a save that never committed: never a candidate for a resume."""
    from holdfast.base import escaped
    from holdfast.checkpoint.format import parse_name

    name = parse_name(directory.name)
    row: dict[str, Any] = dict.fromkeys(("parent", "run", "attempt", "created", "size", "files", "world"))
    row.update(path=escaped(str(directory), 4096), name=escaped(directory.name), state="staging")
    row.update(step=name.step if name else None, id=name.id if name else None)
    return row | {"digests_missing": True, "problems": [], "latest": False}


def verified_row(inspection: Inspection) -> dict[str, Any]:
    from holdfast.base import escaped

    manifest = inspection.manifest
    return {
        "path": escaped(str(inspection.directory), 4096),
        "sound": inspection.sound,
        "step": manifest.step if manifest else None,
        "id": manifest.id if manifest else None,
        "run": escaped(manifest.run) if manifest else None,
        "manifest_digest": inspection.manifest_digest or None,
        "digests_missing": inspection.digests_missing,
        "files": inspection.files,
        "size": inspection.size,
        "bytes_checked": inspection.bytes_checked,
        "problems": _problems(inspection),
        "gone": inspection.gone or None,
        "proof": _proof(manifest) if manifest else None,
    }


def _proof(manifest: Manifest) -> dict[str, Any] | None:
    """What was proven about its structure when it was first saved; None if nobody tried."""
    from holdfast.base import escaped

    found = manifest.proof
    if found.step is None:
        return None
    parts = {escaped(name): escaped(level, 800) for name, level in found.parts.items()}
    return {"step": found.step, "parts": parts, "why_not": escaped(found.why_not, 800)}


def _proof_line(proof: dict[str, Any]) -> str:
    """For example: proven to resume at step 3: values (model, optimizer), structure (data)."""
    if proof["why_not"]:
        return f"not proven to resume (step {proof['step']}): {proof['why_not']}"
    by_level: dict[str, list[str]] = {}
    for name, level in proof["parts"].items():
        by_level.setdefault(level, []).append(name)
    told = ", ".join(f"{level} ({', '.join(names)})" for level, names in by_level.items())
    return f"proven to resume at step {proof['step']}: {told}"


def _problems(inspection: Inspection) -> list[dict[str, str]]:
    return [{"reason": str(p.reason), "path": p.path, "detail": p.detail} for p in inspection.problems]


# --- printing ----------------------------------------------------------------------------------------------


def _print_rows(
    folder: Path | str, rows: list[dict[str, Any]], latest: str | None, *, show_standing: bool
) -> None:
    if not rows:
        typer.echo(f"{folder}: no checkpoints")
        return
    show_copies = any(row.get("copies", {}).get("local") for row in rows)
    header = ["step", "id", "parent", "attempt", "created", "size", "files", "world", "state"]
    show_read = any(row.get("read_back") for row in rows)
    header += ["read back"] if show_read else []
    header += ["standing"] if show_standing else []
    header += ["copies"] if show_copies else []
    lines = [[*header, ""]]
    for row in rows:
        own = [
            row["step"],
            row["id"] or row["name"],
            row["parent"],
            row["attempt"],
            show_time(row["created"]),
        ]
        own += [show_bytes(row["size"]), row["files"], row["world"], _state(row)]
        own += [_read_back_cell(row.get("read_back"))] if show_read else []
        own += [row.get("standing")] if show_standing else []
        own += [ckpt_copies.summary(row)] if show_copies else []
        lines.append(["-" if cell is None else str(cell) for cell in own] + ["latest" * row["latest"]])
    print_columns(lines)
    for row in rows:
        for problem in row["problems"]:
            typer.echo(f"{row['name']}: {problem['reason']}: {problem['path']}: {problem['detail']}")
        if (read := row.get("read_back")) and not read["sound"]:
            told = f"{read['problems'][0]} (attempt {read['attempt']}, on {read['node']})"
            typer.echo(f"{row['name']}: bad when it was read back: {told}")
        if row.get("standing") in JUDGED:
            why = "; ".join(row["standing_evidence"]) or "as recorded beside it"
            typer.echo(f"{row['name']}: {row['standing']}: {why}")
    for hint in _hints(folder):
        typer.echo(f"{hint}; no resume relies on it")
    if latest is not None and not any(row["latest"] for row in rows):
        typer.echo(f"latest names {latest!r}, which is not here; no resume relies on it")
    typer.echo("Digests were not read: `holdfast ckpt verify` does that.")


def _read_back_cell(found: dict[str, Any] | None) -> str | None:
    if found is None:
        return None
    return show_time(found["at"]) if found["sound"] else f"bad, {show_time(found['at'])}"


def _state(row: dict[str, Any]) -> str:
    if row["state"] != "complete" or not row["digests_missing"]:
        return row["state"]  # type: ignore[no-any-return]
    return f"complete, no digests ({row['layout']})" if row.get("layout") else "complete, no digests"


def _print_inspections(inspections: list[Inspection], seconds: float) -> None:
    from holdfast.base import escaped, plural

    for inspection in inspections:
        name = escaped(str(inspection.directory), 4096)
        summary = f"{plural(inspection.files, 'file')}, {show_bytes(inspection.size)}"
        if inspection.gone:
            typer.echo(f"{name}: taken away meanwhile: {escaped(inspection.gone, 2000)}")
        elif not inspection.sound:
            typer.echo(f"{name}: not sound")
        elif inspection.digests_missing:
            typer.echo(
                f"{name}: complete, {summary}; no digests: its bytes are unverified"
                f"{_layout(inspection.directory)}"
            )
        else:
            typer.echo(f"{name}: sound, {summary}")
        if inspection.manifest is not None and (proof := _proof(inspection.manifest)) is not None:
            typer.echo(f"  {_proof_line(proof)}")
        for problem in inspection.problems:
            typer.echo(f"  {problem.reason:<19}  {problem.path}  {problem.detail}")
    # What has no digests was read for its check sums and values.
    total = sum(one.size if one.digests_missing else one.bytes_checked for one in inspections)
    bad = sum(not inspection.sound for inspection in inspections)
    rate = f"{total / max(seconds, 1e-9) / 1e9:.2f} GB/s"
    verdict = f"{bad} not sound" if bad else "nothing wrong found"
    there = plural(sum(not inspection.gone for inspection in inspections), "checkpoint")
    typer.echo(f"{there}, {verdict}; {show_bytes(total)} read in {seconds:.2f} s ({rate})")


def _hints(folder: Path | str) -> list[str]:
    """What pointers of other projects say, where they differ from what is here."""
    from holdfast.checkpoint.foreign import checkpoints_in, hints

    if not isinstance(folder, Path) or not folder.is_dir():
        return []
    return hints(folder, checkpoints_in(folder))


def _layout(path: Path) -> str:
    """What a checkpoint of another project's is, and what was found out about it beside its sizes."""
    from holdfast.checkpoint.foreign import recognise

    found = recognise(path)
    return f" ({found.layout}; its archives can be read and its values are numbers)" if found else ""


def listed_bytes(directories: list[Path]) -> int | None:
    """Bytes that will be read, as the manifests list them; None if no manifest says."""
    from holdfast.checkpoint.format import ManifestError, read

    total = 0
    for directory in directories:
        try:
            total += sum(entry.size for entry in read(directory)[0].files)
        except ManifestError:
            continue
    return total or None
