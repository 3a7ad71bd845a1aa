"""From a staged directory to a committed checkpoint.

Guarantee: a directory with a checkpoint's name exists under the root only complete and durable. The order is

    shards written, digested, fsynced → part records → declared = written → .metadata → manifest
    → staged directory fsynced → commit record → rename → root fsynced → `latest`

A cut before the rename leaves something under `.staging` that no resume looks at; a cut after it leaves a
whole checkpoint. The rename and `latest` happen under the fence, so an attempt that lost its lease cannot
make either. Nothing that was committed is ever opened for writing again.
"""

from __future__ import annotations

import logging
import os
import pickle
import shutil
from collections.abc import Sequence
from pathlib import Path

import msgspec
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, TensorStorageMetadata
from torch.distributed.checkpoint.storage import WriteResult

from holdfast.checkpoint import manifest as manifests
from holdfast.checkpoint.identity import LATEST, MANIFEST, METADATA, PARTS, CheckpointName, CheckpointRoot
from holdfast.checkpoint.manifest import FileEntry, Manifest
from holdfast.control.directory import ControlDirectory
from holdfast.control.lease import Fence
from holdfast.control.lineage import CommitRecord, record_commit, record_done
from holdfast.errors import SaveFailedError
from holdfast.files import fsync_dir, make_dirs, read_regular, replace_atomic, write_durable

log = logging.getLogger("holdfast.checkpoint")


class Owner(msgspec.Struct, frozen=True, kw_only=True):
    """Who is staging a directory; lets a later attempt tell its own run's left-overs from a live save.

    Written beside the staged directory before that exists and removed after it is gone, so that there is no
    moment at which a cut leaves a directory that nobody owns.
    """

    run: str
    attempt: int
    epoch: int


class PartRecord(msgspec.Struct, frozen=True, kw_only=True):
    """What one rank wrote, with digests taken at the source."""

    rank: int
    checkpoint: str
    files: list[FileEntry]


def _owner_path(root: CheckpointRoot, name: str) -> Path:
    return root.staging / f"{name}.owner"


def open_staged(root: CheckpointRoot, name: CheckpointName, owner: Owner) -> Path:
    """Make the staged directory; called by the coordinator before any rank writes."""
    make_dirs(root.staging)
    replace_atomic(_owner_path(root, str(name)), msgspec.json.encode(owner), durable=False)
    staged = root.staged(name)
    staged.mkdir()
    (staged / PARTS).mkdir()
    return staged


def leave_part(staged: Path, name: CheckpointName, rank: int, files: list[FileEntry]) -> None:
    """Not made durable: it is read during this save and deleted before the commit."""
    record = PartRecord(rank=rank, checkpoint=str(name), files=files)
    replace_atomic(staged / PARTS / f"{rank}.json", msgspec.json.encode(record), durable=False)


def read_parts(staged: Path, name: CheckpointName, world: int) -> list[FileEntry]:
    """Every rank's files; an error if a rank left no record."""
    entries: list[FileEntry] = []
    for rank in range(world):
        path = staged / PARTS / f"{rank}.json"
        try:
            record = msgspec.json.decode(read_regular(path, manifests.MAX_MANIFEST_BYTES), type=PartRecord)
        except (OSError, msgspec.DecodeError) as error:
            raise SaveFailedError(f"rank {rank} left no readable part record for {name}: {error}") from error
        if record.rank != rank or record.checkpoint != str(name):
            raise SaveFailedError(f"{path} belongs to rank {record.rank} of {record.checkpoint}")
        entries.extend(record.files)
    return entries


def check_declared_is_written(
    staged: Path, metadata: Metadata, results: Sequence[Sequence[WriteResult]], files: list[FileEntry]
) -> None:
    """Every declared chunk was written, into a file whose size and chunk table agree."""
    written = {result.index: result.storage_data for per_rank in results for result in per_rank}
    for name, entry in metadata.state_dict_metadata.items():
        offsets = [c.offsets for c in entry.chunks] if isinstance(entry, TensorStorageMetadata) else [None]
        for offset in offsets:
            if MetadataIndex(name, offset) not in written:
                raise SaveFailedError(f"{name} at {offset} was declared but no rank wrote it")
    tables = {file.path: {(chunk.offset, chunk.length) for chunk in file.chunks} for file in files}
    for index, info in written.items():
        if (info.offset, info.length) not in tables.get(info.relative_path, set()):
            raise SaveFailedError(f"{index.fqn}: {info.relative_path} has no chunk at {info.offset}")
    for file in files:
        found = (staged / file.path).stat().st_size
        if found != file.size:
            raise SaveFailedError(f"{file.path}: {file.size} bytes were written, {found} are there")


def write_metadata(
    staged: Path, metadata: Metadata, results: Sequence[Sequence[WriteResult]], storage_meta: object
) -> FileEntry:
    """DCP's `.metadata`, durable before anything refers to it."""
    metadata.version = "1.0.0"
    metadata.storage_data = {result.index: result.storage_data for per_rank in results for result in per_rank}
    metadata.storage_meta = storage_meta  # type: ignore[assignment]
    data = pickle.dumps(metadata)
    write_durable(staged / METADATA, data)
    return FileEntry(path=METADATA, size=len(data), digest=manifests.digest_bytes(data))


def seal(staged: Path, manifest: Manifest) -> str:
    """Write the manifest, drop what only staging needs, make the directory durable. Returns the digest."""
    data, digest = manifests.encode(manifest)
    write_durable(staged / MANIFEST, data)
    shutil.rmtree(staged / PARTS)
    fsync_dir(staged)
    return digest


def commit(
    root: CheckpointRoot,
    name: CheckpointName,
    fence: Fence,
    control: ControlDirectory | None,
    record: CommitRecord,
) -> Path:
    """The atomic moment. Without `control` (a diagnostic save) nothing points to the result."""
    destination = root.committed(name)
    with fence.guard(f"commit {name}"):
        if control is not None:
            record_commit(control, fence, record)
        os.rename(root.staged(name), destination)
        fsync_dir(root.path)
        if control is not None:
            record_done(control, record)
    _owner_path(root, str(name)).unlink(missing_ok=True)
    if control is not None:
        try:
            with fence.guard(f"point {LATEST} to {name}"):
                replace_atomic(root.latest, f"{name}\n".encode())
        except OSError as error:
            # The checkpoint is committed; `latest` is a hint that no resume relies on.
            log.warning("holdfast: could not update %s: %s", root.latest, error)
    return destination


def discard_staged(root: CheckpointRoot, name: str) -> Path:
    """Take a staged directory out of the way, into the trash; returns where it is, for deletion."""
    trashed = root.trash / f"{name}.{os.getpid()}"
    if (root.staging / name).exists():
        root.trash.mkdir(exist_ok=True)
        os.rename(root.staging / name, trashed)
    _owner_path(root, name).unlink(missing_ok=True)
    return trashed


def sweep_staging(root: CheckpointRoot, run: str, fence: Fence) -> list[str]:
    """Remove what earlier attempts of this run left under `.staging`; other runs' work is left alone.

    Only the rename needs the fence. Deleting may take long and is done without it, so that no other guard
    has to wait; a cut in between leaves only trash, which the next sweep deletes.
    """
    swept: list[str] = []
    for path in sorted(root.staging.glob("*.owner")):
        try:
            owner = msgspec.json.decode(read_regular(path, 4096), type=Owner)
        except (OSError, msgspec.DecodeError) as error:
            log.warning("holdfast: %s does not say whose it is (%s); left where it is", path, error)
            continue
        if owner.run == run and owner.epoch < fence.epoch:
            name = path.name.removesuffix(".owner")
            with fence.guard(f"sweep {name}"):
                discard_staged(root, name)
            swept.append(name)
    for entry in root.trash.iterdir() if root.trash.is_dir() else ():
        fence.check(f"delete {entry.name}")
        shutil.rmtree(entry, ignore_errors=True)
    return swept
