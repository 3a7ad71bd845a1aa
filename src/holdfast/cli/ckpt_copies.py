"""`holdfast ckpt ls` of a run: what the local tier has, and where copies are, as recorded."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import typer

if TYPE_CHECKING:
    from holdfast.checkpoint.identity import CheckpointName
    from holdfast.control.directory import ControlDirectory
    from holdfast.control.lineage import CommitRecord
    from holdfast.control.standing import RootBook, StandingBook


def with_local(
    control: ControlDirectory, standings: StandingBook | RootBook | None, rows: list[dict[str, Any]]
) -> list[dict[str, Any]]:
    """The rows of the checkpoint root with where else they are, and those that only the local tier has."""
    from holdfast.checkpoint import local_manifest
    from holdfast.checkpoint.identity import CheckpointName
    from holdfast.control.lineage import read_timeline

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
    """A row's standing and what that rests on."""
    from holdfast.checkpoint.problems import printable

    if not id:
        return {"standing": None, "standing_evidence": []}
    why = [printable(line, 2000) for line in standings.evidence_of(id)]
    return {"standing": str(standings.of(id)), "standing_evidence": why}


def _row(
    control: ControlDirectory,
    standings: StandingBook | RootBook | None,
    name: CheckpointName,
    commit: CommitRecord | None,
) -> dict[str, Any]:
    """A checkpoint that has no directory under the checkpoint root."""
    from holdfast.checkpoint import local_manifest
    from holdfast.checkpoint.manifest import ManifestError
    from holdfast.checkpoint.problems import Reason, printable

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
        problem = {"reason": reason, "path": f"local/{name}/holdfast.json", "detail": printable(str(error))}
        return row | {"state": reason, "problems": [problem], "attempt": commit.attempt}
    return row | {
        "parent": manifest.parent,
        "run": printable(manifest.run),
        "attempt": manifest.attempt,
        "created": manifest.created,
        "size": sum(entry.size for entry in manifest.files),
        "files": len(manifest.files),
        "world": manifest.world.size,
    }


def _recorded(control: ControlDirectory, name: CheckpointName) -> dict[str, Any]:
    from holdfast.checkpoint.local_recorded import read_recorded
    from holdfast.checkpoint.problems import printable

    found = read_recorded(control, name)
    places = [
        {
            "place": printable(place.place),
            "node": printable(place.node),
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
    """What each node was given, if that was asked for, and what all of this is worth."""
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
    from holdfast.policy.missing import ranks

    words = [f"own {ranks(place['own'])}"] if place["own"] else []
    planned, confirmed = set(place["replicas_planned"]), set(place["replicas_confirmed"])
    if planned | confirmed:
        words.append(f"replicas of {ranks(planned | confirmed)}, {_confirmed(planned, confirmed)}")
    return "; ".join(words)


def _confirmed(planned: set[int], confirmed: set[int]) -> str:
    from holdfast.policy.missing import ranks

    if planned <= confirmed:
        return "confirmed"
    return f"{ranks(planned - confirmed)} not confirmed" if confirmed else "not confirmed"
