"""`holdfast ckpt verify --tier`: a run's copies on this node, and its checkpoints in the checkpoint root."""

from __future__ import annotations

import time
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import typer

from holdfast.cli.output import Bar, print_json, show_bytes

if TYPE_CHECKING:
    from holdfast.checkpoint.identity import CheckpointName
    from holdfast.checkpoint.local_inspect import CopyInspection, Judge
    from holdfast.checkpoint.local_tier import LocalTier
    from holdfast.checkpoint.structure import Inspection
    from holdfast.control.directory import ControlDirectory


class Tier(StrEnum):
    local = "local"
    peer = "peer"
    all = "all"
    # Not named like the keyword; typer shows the value.
    in_root = "global"


HERE = {Tier.local: ["local"], Tier.peer: ["peer"], Tier.all: ["local", "peer"], Tier.in_root: []}
"""Tiers that lie on this node."""


def verify(
    paths: list[str],
    tier: Tier,
    *,
    local_dir: Path | None,
    config: Path | None,
    root: Path | None,
    as_json: bool,
) -> NoReturn:
    """Read every byte of a run's copies in a tier; prints, and exits as `ckpt verify` does."""
    from holdfast.checkpoint.local_inspect import Judge
    from holdfast.checkpoint.reading import removed
    from holdfast.cli.ckpt_inspect import open_run
    from holdfast.errors import UsageError

    if len(paths) > 2:
        raise UsageError("with --tier give the run's directory and at most one checkpoint: step, id or name")
    control = open_run(Path(paths[0]))
    there = (root if root is not None else control.path / "checkpoints").absolute()
    judge = Judge(control, there)
    place = _place(control, tier, local_dir, config) if HERE[tier] else None
    only = _named(control, there, judge, place, paths[1]) if len(paths) > 1 else None
    started = time.perf_counter()
    inspections = _in_root(judge, control, there, only) if tier in (Tier.in_root, Tier.all) else []
    copies = _on_this_node(judge, place, HERE[tier], only) if place is not None else []
    seconds = time.perf_counter() - started
    there_still = [one for one in inspections if only is None or not one.gone]
    if not there_still and not copies:
        what = str(only) if only is not None else "this run"
        why = removed(there / str(only), control) if only is not None else ""
        raise UsageError(
            f"there is nothing of {what} to verify in tier {tier} here"
            + (f": {why}" if why else "; `holdfast ckpt ls` lists it")
        )
    sound = all(one.sound for one in inspections) and all(one.sound for one in copies)
    if as_json:
        _print_json(tier, place, inspections, copies, seconds, sound=sound)
    else:
        _print(place, inspections, copies, seconds)
    raise typer.Exit(0 if sound else 1)


# --- finding them -------------------------------------------------------------------------------------------


def _place(
    control: ControlDirectory, tier: Tier, local_dir: Path | None, config: Path | None
) -> LocalTier | None:
    """This node's place of the run; None if it has none and that does not matter."""
    import msgspec

    from holdfast.checkpoint.local_tier import LocalTier
    from holdfast.cli.clean import local_directory
    from holdfast.errors import UsageError

    directory = local_dir if local_dir is not None else local_directory(config)
    path = directory.absolute() / control.run_id
    try:
        found = LocalTier.at(path)
        if found.record.run != control.run_id:
            raise msgspec.ValidationError(f"it says that it is of run {found.record.run}")
    except FileNotFoundError:
        if tier is Tier.all:
            return None
        raise UsageError(
            f"this node holds nothing of run {control.run_id} in {directory}: there is no {path}"
        ) from None
    except (OSError, msgspec.DecodeError) as error:
        raise UsageError(f"{path} cannot be used as a place of run {control.run_id}: {error}") from error
    return found


def _named(
    control: ControlDirectory, root: Path, judge: Judge, place: LocalTier | None, which: str
) -> CheckpointName:
    from holdfast.checkpoint import local_manifest
    from holdfast.checkpoint.identity import CheckpointRoot
    from holdfast.checkpoint.local_inspect import TIERS, list_copies
    from holdfast.errors import UsageError
    from holdfast.settings_fields import is_step

    held = list_copies(place, list(TIERS)).records if place is not None else []
    known = {*judge.committed, *local_manifest.names(control), *CheckpointRoot(root).names()}
    known |= {record.name for record in held}
    found = [
        name
        for name in sorted(known)
        if which in (name.id, str(name)) or (is_step(which) and int(which) == name.step)
    ]
    if not found:
        raise UsageError(f"run {control.run_id} has no checkpoint {which!r}; `holdfast ckpt ls` lists them")
    if len(found) > 1:
        raise UsageError(
            f"{which!r} names {len(found)} checkpoints: {', '.join(map(str, found))}. Give the id"
        )
    return found[0]


# --- reading them -------------------------------------------------------------------------------------------


def _in_root(
    judge: Judge, control: ControlDirectory, root: Path, only: CheckpointName | None
) -> list[Inspection]:
    from holdfast.checkpoint.identity import MANIFEST, CheckpointRoot
    from holdfast.checkpoint.verify import Reason
    from holdfast.cli.ckpt import listed_bytes, read_listed

    there = CheckpointRoot(root)
    found: list[Inspection] = []
    names = [name for name in there.names() if only in (None, name)]
    with Bar(lambda: listed_bytes([there.committed(name) for name in names])) as bar:
        for name in names:
            inspection = read_listed(there.committed(name), control, run=control.run_id, progress=bar.advance)
            expected = judge.expected(name)
            if inspection.manifest_digest and expected not in (None, inspection.manifest_digest):
                told = f"its digest is {inspection.manifest_digest}; {expected} was committed under this name"
                inspection.add(Reason.ALTERED, MANIFEST, told)
            found.append(inspection)
    return found


def _on_this_node(
    judge: Judge, place: LocalTier, tiers: list[str], only: CheckpointName | None
) -> list[CopyInspection]:
    from holdfast.checkpoint.local_inspect import list_copies

    copies = list_copies(place, tiers, only)
    found = list(copies.unreadable)
    with place.in_use(), Bar(lambda: copies.nbytes) as bar:
        found += [judge.inspect(place, record, bar.advance) for record in copies.records]
    found += judge.metadata(dict.fromkeys(record.name for record in copies.records))
    return found + (judge.absent(place, only, tiers) if only is not None else [])


# --- showing them -------------------------------------------------------------------------------------------


def _print(
    place: LocalTier | None, inspections: list[Inspection], copies: list[CopyInspection], seconds: float
) -> None:
    from holdfast.checkpoint.problems import printable
    from holdfast.journal.render import plural

    for inspection in inspections:
        name = printable(str(inspection.directory), 4096)
        if inspection.gone:
            typer.echo(f"{name}: taken away meanwhile: {printable(inspection.gone, 2000)}")
            continue
        _print_one(name, inspection.sound, inspection.files, inspection.size, inspection.problems)
    node = printable(place.record.node) if place is not None else ""
    for copy in copies:
        whose = copy.what if copy.rank is None else f"rank {copy.rank}"
        name = f"{copy.checkpoint} {whose}, {copy.tier}, on {node}"
        if copy.gone:
            typer.echo(f"{name}: given up meanwhile")
        else:
            _print_one(name, copy.sound, copy.files, copy.size, copy.problems)
    total = sum(one.bytes_checked for one in inspections) + sum(one.bytes_checked for one in copies)
    bad = sum(not one.sound for one in inspections) + sum(not one.sound for one in copies)
    there = sum(not one.gone for one in inspections)
    what = [plural(there, "checkpoint")] if inspections else []
    what += [f"{len(copies)} {'copy' if len(copies) == 1 else 'copies'}"] if copies else []
    verdict = f"{bad} not sound" if bad else "nothing wrong found"
    rate = f"{total / max(seconds, 1e-9) / 1e9:.2f} GB/s"
    typer.echo(f"{', '.join(what)}, {verdict}; {show_bytes(total)} read in {seconds:.2f} s ({rate})")


def _print_one(name: str, sound: bool, files: int, size: int, problems: list[Any]) -> None:
    typer.echo(f"{name}: sound, {files} files, {show_bytes(size)}" if sound else f"{name}: not sound")
    for problem in problems:
        typer.echo(f"  {problem.reason:<19}  {problem.path}  {problem.detail}")


def _print_json(
    tier: Tier,
    place: LocalTier | None,
    inspections: list[Inspection],
    copies: list[CopyInspection],
    seconds: float,
    *,
    sound: bool,
) -> None:
    from holdfast.checkpoint.problems import printable
    from holdfast.cli.ckpt import verified_row

    total = sum(one.bytes_checked for one in inspections) + sum(one.bytes_checked for one in copies)
    document: dict[str, Any] = {"sound": sound, "tier": str(tier), "bytes_checked": total}
    document |= {"seconds": round(seconds, 6), "checkpoints": [verified_row(one) for one in inspections]}
    document["place"] = place.place if place is not None else None
    document["node"] = printable(place.record.node) if place is not None else None
    document["copies"] = [
        {
            "checkpoint": one.checkpoint,
            "rank": one.rank,
            "what": one.what,
            "tier": one.tier,
            "sound": one.sound,
            "gone": one.gone,
            "files": one.files,
            "size": one.size,
            "bytes_checked": one.bytes_checked,
            "problems": [{"reason": str(p.reason), "path": p.path, "detail": p.detail} for p in one.problems],
        }
        for one in copies
    ]
    print_json(document)
