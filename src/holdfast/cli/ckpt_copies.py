"""`holdfast ckpt ls` and `verify` of copies: in the local tier, by record, and on the remote."""

from __future__ import annotations

import time
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import typer

from holdfast.cli.output import Bar, print_json, show_bytes

if TYPE_CHECKING:
    from holdfast.checkpoint.copies import CopyInspection, Judge, LocalTier
    from holdfast.checkpoint.format import CheckpointName, Inspection
    from holdfast.checkpoint.remote import Remote
    from holdfast.record import CommitRecord, ControlDirectory, RootBook, StandingBook


# `holdfast ckpt ls` of a run: what the local tier has, and where copies are, according to the records.


def with_local(
    control: ControlDirectory, standings: StandingBook | RootBook | None, rows: list[dict[str, Any]]
) -> list[dict[str, Any]]:
    """The checkpoint root's rows, with the other places of each, and those that only the local tier has."""
    from holdfast.checkpoint.copies import tier as local_manifest
    from holdfast.checkpoint.format import CheckpointName
    from holdfast.record import read_timeline

    local = local_manifest.names(control)
    for row in rows:
        row["copies"] = {"global": True, "local": None}
    if not local:
        return rows
    timeline = read_timeline(control)
    commits = {CheckpointName(one.step, one.id): one for one in timeline.on_line + timeline.abandoned}
    in_root = {row["name"]: row for row in rows}
    only_local: list[dict[str, Any]] = []
    for name in local:
        if str(name) not in in_root:
            row = _row(control, standings, name, commits.get(name))
            if row["problems"] and name not in local_manifest.names(control):
                continue  # no node holds it any more, as happens in a live run
            only_local.append(row)
            in_root[str(name)] = only_local[-1]
        in_root[str(name)]["copies"]["local"] = _recorded(control, name)
    return sorted(
        [*rows, *only_local], key=lambda row: -1 if row["step"] is None else row["step"], reverse=True
    )


def standing_of(standings: StandingBook | RootBook, id: str | None) -> dict[str, Any]:
    """A row's standing and the evidence for it."""
    from holdfast.base import escaped

    if not id:
        return {"standing": None, "standing_evidence": []}
    why = [escaped(line, 2000) for line in standings.evidence_of(id)]
    return {"standing": str(standings.of(id)), "standing_evidence": why}


def _row(
    control: ControlDirectory,
    standings: StandingBook | RootBook | None,
    name: CheckpointName,
    commit: CommitRecord | None,
) -> dict[str, Any]:
    """A checkpoint that has no directory under the checkpoint root."""
    from holdfast.base import escaped
    from holdfast.checkpoint.copies import tier as local_manifest
    from holdfast.checkpoint.format import ManifestError, Reason

    row: dict[str, Any] = dict.fromkeys(
        ("path", "parent", "run", "attempt", "created", "size", "files", "world")
    )
    row |= {"name": str(name), "state": "local only", "step": name.step, "id": name.id}
    row |= {"digests_missing": False, "problems": [], "latest": False}
    row["copies"] = {"global": False, "local": None}
    if standings is not None:
        row |= standing_of(standings, str(name))
    if commit is None:
        return row | {"state": "not committed"}
    try:
        manifest = local_manifest.read(control, name, commit.manifest)
    except ManifestError as error:
        reason = str(Reason.UNREADABLE_MANIFEST)
        problem = {"reason": reason, "path": f"local/{name}/holdfast.json", "detail": escaped(str(error))}
        return row | {"state": reason, "problems": [problem], "attempt": commit.attempt}
    return row | {
        "parent": manifest.parent,
        "run": escaped(manifest.run),
        "attempt": manifest.attempt,
        "created": manifest.created,
        "size": sum(entry.size for entry in manifest.files),
        "files": len(manifest.files),
        "world": manifest.world.size,
    }


def _recorded(control: ControlDirectory, name: CheckpointName) -> dict[str, Any]:
    from holdfast.base import escaped
    from holdfast.checkpoint.copies import read_recorded

    found = read_recorded(control, name)
    places = [
        {
            "place": escaped(place.place),
            "node": escaped(place.node),
            "own": place.own,
            "replicas_planned": place.planned,
            "replicas_confirmed": place.confirmed,
        }
        for place in found.places
    ]
    counts = {"nodes": found.nodes, "replicas_planned": found.planned, "replicas_confirmed": found.confirmed}
    return counts | {"places": places}


def summary(row: dict[str, Any]) -> str | None:
    """Where a checkpoint's copies are, in one cell: `global · local on 4 nodes · replicas 4/4`."""
    copies = row.get("copies")
    if copies is None:
        return None
    local = copies["local"]
    words = ["global"] if copies["global"] else []
    if local is not None and local["nodes"]:
        words.append(f"local on {local['nodes']} node{'s' * (local['nodes'] != 1)}")
    elif local is not None:
        words.append("local, not recorded where")
    if local is not None and local["replicas_planned"]:
        words.append(f"replicas {local['replicas_confirmed']}/{local['replicas_planned']}")
    return " · ".join(words)


def print_local(rows: list[dict[str, Any]], *, each_node: bool) -> None:
    """Print what each node was given, if asked to, and how far this can be relied on."""
    there = [row for row in rows if row.get("copies", {}).get("local")]
    if not there:
        return
    for row in there if each_node else ():
        typer.echo(f"{row['name']}: {summary(row)}")
        places = row["copies"]["local"]["places"]
        width = max((len(place["node"]) for place in places), default=0)
        for place in places:
            typer.echo(f"  {place['node']:{width}}  {place['place']}  {_held(place)}")
    typer.echo(
        "Local copies are shown as recorded: `holdfast ckpt verify --tier all`, on a node, reads its own."
    )


def _held(place: dict[str, Any]) -> str:
    from holdfast.policy import ranks

    words = [f"own {ranks(place['own'])}"] if place["own"] else []
    planned, confirmed = set(place["replicas_planned"]), set(place["replicas_confirmed"])
    if planned | confirmed:
        words.append(f"replicas of {ranks(planned | confirmed)}, {_confirmed(planned, confirmed)}")
    return "; ".join(words)


def _confirmed(planned: set[int], confirmed: set[int]) -> str:
    from holdfast.policy import ranks

    if planned <= confirmed:
        return "confirmed"
    return f"{ranks(planned - confirmed)} not confirmed" if confirmed else "not confirmed"


# `holdfast ckpt ls` and `holdfast ckpt verify` for remote copies, named by URL.


def rows(url: str) -> list[dict[str, Any]]:
    """What `ckpt ls` shows of a remote root: finished copies, and those without a marker."""
    from holdfast.checkpoint.remote import BadCopyError

    remote = _open(url)
    found: list[dict[str, Any]] = []
    finished, judged = set(remote.names()), set(remote.judged())
    for name in remote.folders():
        row: dict[str, Any] = dict.fromkeys(("parent", "run", "attempt", "created", "size", "files", "world"))
        row |= {"path": f"{remote.url}/{name}", "name": str(name), "step": name.step, "id": name.id}
        row |= {"state": "unfinished", "digests_missing": True, "problems": [], "latest": False}
        row |= {"standing": str(remote.standing(name)) if name in judged else None, "standing_evidence": []}
        if name in finished:
            try:
                row |= _described(remote, name)
            except BadCopyError as error:
                if not remote.is_finished(name):
                    continue  # its deletion has begun since the listing
                problem = error.problem
                row["state"] = str(problem.reason)
                row["problems"] = [
                    {"reason": str(problem.reason), "path": problem.path, "detail": problem.detail}
                ]
        found.append(row)
    return found


def _described(remote: Remote, name: CheckpointName) -> dict[str, Any]:
    from holdfast.base import escaped

    manifest, _, data = remote.manifest(name)
    return {
        "state": "complete",
        "parent": manifest.parent,
        "run": escaped(manifest.run),
        "attempt": manifest.attempt,
        "created": manifest.created,
        "size": len(data) + sum(entry.size for entry in manifest.files),
        "files": len(manifest.files) + 1,
        "world": manifest.world.size,
        "digests_missing": False,
    }


def verify_remote(urls: list[str]) -> tuple[list[dict[str, Any]], float]:
    """Read every byte of the copies that the URLs name, or that lie under them: (rows, seconds)."""
    from holdfast.base import escaped
    from holdfast.checkpoint.format import parse_name
    from holdfast.checkpoint.remote import split_copy_url
    from holdfast.errors import UsageError

    started = time.perf_counter()
    found: list[dict[str, Any]] = []
    named: CheckpointName | None
    for url in urls:
        if parse_name(url.rstrip("/").rpartition("/")[2]) is not None:
            root, named = split_copy_url(url)
            remote, names = _open(root), [named]
        else:
            named = None
            remote = _open(url)
            names = remote.names()
        if not names:
            raise UsageError(
                f"{url}: there are no finished copies here; give a remote root or one of its copies"
            )
        for name in names:
            read = 0

            def count(more: int) -> None:
                nonlocal read
                read += more

            manifest, problems = remote.verify(name, count)
            gone = bool(problems) and name != named and not remote.is_finished(name)
            problems = [] if gone else problems
            listed = [{"reason": str(p.reason), "path": p.path, "detail": p.detail} for p in problems]
            found.append(
                {
                    "path": f"{remote.url}/{name}",
                    "sound": not problems,
                    "gone": gone,
                    "step": name.step,
                    "id": name.id,
                    "run": escaped(manifest.run) if manifest else None,
                    "files": len(manifest.files) + 1 if manifest else 0,
                    "bytes_checked": read,
                    "problems": listed,
                }
            )
    return found, time.perf_counter() - started


def print_verified(rows: list[dict[str, Any]], seconds: float) -> None:
    for row in rows:
        word = f"sound, {row['files']} files" if row["sound"] else "not sound"
        typer.echo(f"{row['path']}: {'deleted meanwhile' if row['gone'] else word}")
        for problem in row["problems"]:
            typer.echo(f"  {problem['reason']:<19}  {problem['path']}  {problem['detail']}")
    total = sum(row["bytes_checked"] for row in rows)
    bad = sum(not row["sound"] for row in rows)
    verdict = f"{bad} not sound" if bad else "nothing wrong found"
    there = sum(not row["gone"] for row in rows)
    noun = "copy" if there == 1 else "copies"
    typer.echo(f"{there} {noun}, {verdict}; {total / 1e6:.1f} MB read in {seconds:.2f} s")


def _open(url: str) -> Remote:
    from holdfast.checkpoint.remote import open_remote

    return open_remote(url, retry_seconds=20.0)


class Tier(StrEnum):
    local = "local"
    peer = "peer"
    all = "all"
    # The name avoids the keyword; typer shows the value.
    in_root = "global"


HERE = {Tier.local: ["local"], Tier.peer: ["peer"], Tier.all: ["local", "peer"], Tier.in_root: []}
"""Tiers that lie on this node."""


def verify_tier(
    paths: list[str],
    tier: Tier,
    *,
    local_dir: Path | None,
    config: Path | None,
    root: Path | None,
    as_json: bool,
) -> NoReturn:
    """Read every byte of a run's copies in a tier; prints, and exits as `ckpt verify` does."""
    from holdfast.checkpoint import removed
    from holdfast.checkpoint.copies import Judge
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
    """This node's place of the run; None if there is none and that does not matter."""
    import msgspec

    from holdfast.checkpoint.copies import LocalTier
    from holdfast.cli.clean import local_directory
    from holdfast.errors import UsageError

    directory = local_dir if local_dir is not None else local_directory(config)
    path = directory.absolute() / control.run_id
    try:
        found = LocalTier.at(path)
        if found.record.run != control.run_id:
            raise msgspec.ValidationError(f"it says that it belongs to run {found.record.run}")
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
    from holdfast.checkpoint.copies import TIERS, list_copies
    from holdfast.checkpoint.copies import tier as local_manifest
    from holdfast.checkpoint.format import CheckpointRoot
    from holdfast.config import is_step
    from holdfast.errors import UsageError

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
    from holdfast.checkpoint.format import MANIFEST, CheckpointRoot, Reason
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
    from holdfast.checkpoint.copies import list_copies

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
    from holdfast.base import escaped, plural

    for inspection in inspections:
        name = escaped(str(inspection.directory), 4096)
        if inspection.gone:
            typer.echo(f"{name}: taken away meanwhile: {escaped(inspection.gone, 2000)}")
            continue
        _print_one(name, inspection.sound, inspection.files, inspection.size, inspection.problems)
    node = escaped(place.record.node) if place is not None else ""
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
    from holdfast.base import escaped
    from holdfast.cli.ckpt import verified_row

    total = sum(one.bytes_checked for one in inspections) + sum(one.bytes_checked for one in copies)
    document: dict[str, Any] = {"sound": sound, "tier": str(tier), "bytes_checked": total}
    document |= {"seconds": round(seconds, 6), "checkpoints": [verified_row(one) for one in inspections]}
    document["place"] = place.place if place is not None else None
    document["node"] = escaped(place.record.node) if place is not None else None
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
