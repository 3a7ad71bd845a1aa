"""What all places need to know of a checkpoint in the local tier, kept in the control directory.

```
<run dir>/local/step_00000120-3fa9c1d2/
    parts/3.json          what rank 3 staged, with its digests; until the checkpoint is committed
    .metadata             as it would lie in the global tier, byte for byte
    holdfast.json         the manifest; written last
    where.json            which place saved which rank's shards, and which places were to get replicas
    replicas/3.<place>    a peer has confirmed that it holds rank 3's shards, verified
```
The manifest is the one that the global copy of the same checkpoint has: copies differ in where they lie,
never in what judges them.
"""

from __future__ import annotations

import contextlib
from pathlib import Path

import msgspec

from holdfast.checkpoint import manifest as manifests
from holdfast.checkpoint.identity import MANIFEST, METADATA, PARTS, CheckpointName, parse_name
from holdfast.checkpoint.manifest import Manifest, ManifestError
from holdfast.control.directory import ControlDirectory
from holdfast.files import make_dirs, read_regular, replace_atomic
from holdfast.removal import remove

LOCAL = "local"
WHERE = "where.json"
REPLICAS = "replicas"
MAX_WHERE_BYTES = 64 * 1024 * 1024


class RankPlace(msgspec.Struct, frozen=True, array_like=True):
    """Where one rank's shards went when they were saved."""

    place: str
    node: str
    targets: list[str]
    """Places that were to get a replica."""


class Where(msgspec.Struct, frozen=True, kw_only=True):
    """`where.json`: by rank."""

    ranks: list[RankPlace]
    nodes: dict[str, str]
    """Place → node."""


def folder(control: ControlDirectory, name: CheckpointName) -> Path:
    return control.path / LOCAL / str(name)


def names(control: ControlDirectory) -> list[CheckpointName]:
    """Checkpoints that the local tier has a manifest of, newest step first."""
    top = control.path / LOCAL
    entries = [parse_name(path.name) for path in top.iterdir()] if top.is_dir() else []
    there = [name for name in entries if name is not None and (top / str(name) / MANIFEST).exists()]
    return sorted(there, reverse=True)


def open_folder(control: ControlDirectory, name: CheckpointName) -> Path:
    """Made by whoever comes first; every rank leaves its part record in `parts/`."""
    path = folder(control, name)
    make_dirs(path / PARTS)
    return path


def seal(
    control: ControlDirectory, name: CheckpointName, manifest: Manifest, metadata: bytes, where: Where
) -> str:
    """Keep the manifest, written last; its digest. May be called again after a cut."""
    path = folder(control, name)
    data, digest = manifests.encode(manifest)
    replace_atomic(path / WHERE, msgspec.json.encode(where), durable=False)
    for file, content in ((METADATA, metadata), (MANIFEST, data)):
        replace_atomic(path / file, content)  # other ranks' writers look for it all the time
    return digest


def read(control: ControlDirectory, name: CheckpointName, digest: str) -> Manifest:
    """The manifest with this digest; ManifestError if there is none, or another."""
    manifest, found = manifests.read(folder(control, name))
    if found != digest:
        raise ManifestError(f"its digest is {found}; {digest} was committed under this name")
    return manifest


def read_where(control: ControlDirectory, name: CheckpointName) -> Where | None:
    with contextlib.suppress(OSError, msgspec.DecodeError):
        raw = read_regular(folder(control, name) / WHERE, MAX_WHERE_BYTES)
        return msgspec.json.decode(raw, type=Where)
    return None


def confirm_replica(control: ControlDirectory, name: CheckpointName, rank: int, place: str) -> None:
    """For people to see where copies are; no resume relies on it."""
    path = folder(control, name) / REPLICAS / f"{rank}.{place}"
    with contextlib.suppress(OSError):
        path.parent.mkdir(exist_ok=True)
        path.touch()


def forget(control: ControlDirectory, name: CheckpointName) -> None:
    """No place holds this checkpoint any more."""
    with contextlib.suppress(OSError):
        remove(control.path, LOCAL, str(name))
