"""`holdfast ckpt ls` and `holdfast ckpt verify` for remote copies, named by URL."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import typer

if TYPE_CHECKING:
    from holdfast.checkpoint.identity import CheckpointName
    from holdfast.checkpoint.remote import Remote


def rows(url: str) -> list[dict[str, Any]]:
    """What `ckpt ls` shows of a remote root: finished copies, and what has no marker (yet, or any more)."""
    from holdfast.checkpoint.remote_retry import BadCopyError

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
                    continue  # its deletion has begun since it was listed
                problem = error.problem
                row["state"] = str(problem.reason)
                row["problems"] = [
                    {"reason": str(problem.reason), "path": problem.path, "detail": problem.detail}
                ]
        found.append(row)
    return found


def _described(remote: Remote, name: CheckpointName) -> dict[str, Any]:
    from holdfast.checkpoint.problems import printable

    manifest, _, data = remote.manifest(name)
    return {
        "state": "complete",
        "parent": manifest.parent,
        "run": printable(manifest.run),
        "attempt": manifest.attempt,
        "created": manifest.created,
        "size": len(data) + sum(entry.size for entry in manifest.files),
        "files": len(manifest.files) + 1,
        "world": manifest.world.size,
        "digests_missing": False,
    }


def verify(urls: list[str]) -> tuple[list[dict[str, Any]], float]:
    """Read every byte of the copies that the URLs name, or that lie under them; a row each, and seconds."""
    from holdfast.checkpoint.identity import parse_name
    from holdfast.checkpoint.problems import printable
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
                    "run": printable(manifest.run) if manifest else None,
                    "files": len(manifest.files) + 1 if manifest else 0,
                    "bytes_checked": read,
                    "problems": listed,
                }
            )
    return found, time.perf_counter() - started


def print_verified(found: list[dict[str, Any]], seconds: float) -> None:
    for row in found:
        word = f"sound, {row['files']} files" if row["sound"] else "not sound"
        typer.echo(f"{row['path']}: {'deleted meanwhile' if row['gone'] else word}")
        for problem in row["problems"]:
            typer.echo(f"  {problem['reason']:<19}  {problem['path']}  {problem['detail']}")
    total = sum(row["bytes_checked"] for row in found)
    bad = sum(not row["sound"] for row in found)
    verdict = f"{bad} not sound" if bad else "nothing wrong found"
    there = sum(not row["gone"] for row in found)
    noun = "copy" if there == 1 else "copies"
    typer.echo(f"{there} {noun}, {verdict}; {total / 1e6:.1f} MB read in {seconds:.2f} s")


def _open(url: str) -> Remote:
    from holdfast.checkpoint.remote import open_remote

    return open_remote(url, retry_seconds=20.0)
