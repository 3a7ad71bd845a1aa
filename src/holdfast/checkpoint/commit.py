"""From a staged directory to a committed checkpoint.

Guarantee: a directory with a checkpoint's name exists under the root only if it is complete and durable. The
order is

    shards written, digested, fsynced → part records → declared = written → .metadata → manifest
    → part records dropped, staged directory fsynced → commit record → rename → root fsynced → `latest`

A cut before the rename leaves something under `.staging` that no resume looks at; a cut after it leaves a
whole checkpoint. The rename and `latest` happen under the fence, so an attempt that lost its lease cannot
make either. Nothing that was committed is ever opened for writing again.
"""

from __future__ import annotations

import contextlib
import logging
import os
import time
from collections.abc import Callable
from pathlib import Path

import msgspec

from holdfast.base import (
    entries,
    fsync_dir,
    make_folder,
    move,
    open_folder,
    read_regular,
    remove,
    replace_atomic,
    write_durable,
)
from holdfast.checkpoint.format import (
    LATEST,
    MANIFEST,
    METADATA,
    PARTS,
    STAGING,
    TRASH,
    CheckpointName,
    CheckpointRoot,
    Declared,
    FileEntry,
    Manifest,
    table_digest,
)
from holdfast.checkpoint.format import manifest as manifests
from holdfast.errors import SaveFailedError
from holdfast.record import CommitRecord, ControlDirectory, Fence, RootBook, record_commit, record_done

log = logging.getLogger("holdfast.checkpoint")


STALE_DAYS = 7.0
"""Days without any change after which what another run has staged counts as abandoned."""


class Owner(msgspec.Struct, frozen=True, kw_only=True):
    """Who is staging a directory; lets a later attempt tell its own run's left-overs from a live save.

    Written beside the staged directory before that directory exists and removed after it is gone, so that a
    cut at any moment never leaves a directory that nobody owns.
    """

    run: str
    attempt: int
    epoch: int


class PartRecord(msgspec.Struct, frozen=True, kw_only=True):
    """What one rank wrote, with digests taken at the source; or why it wrote nothing."""

    rank: int
    checkpoint: str
    files: list[FileEntry]
    failed: str = ""
    """What went wrong on that rank, with its traceback; then there are no files."""


class Committed(msgspec.Struct, frozen=True, kw_only=True):
    """How much was committed."""

    bytes: int
    files: int


def _owner_path(root: CheckpointRoot, name: str) -> Path:
    return root.staging / f"{name}.owner"


def open_root(root: CheckpointRoot) -> None:
    """Make the root ready for saves when a run starts, and mark it as the intended one."""
    make_folder(root.path, STAGING)
    root.marker.touch()


def check_root(root: CheckpointRoot) -> None:
    """Refuse to save into what an unmounted file system leaves: an empty directory of the same name."""
    if not root.marker.exists():
        raise SaveFailedError(
            f"{root.marker.parent} is not what the run started with: it has no {root.marker.name}. "
            "Its file system was unmounted, or it was emptied; bring it back, or start the run again"
        )


def open_staged(root: CheckpointRoot, name: CheckpointName, owner: Owner, *, again: bool = False) -> Path:
    """On rank 0, make the staged directory before any rank writes. `again`: it may already exist."""
    check_root(root)
    make_folder(root.path, STAGING)
    replace_atomic(_owner_path(root, str(name)), msgspec.json.encode(owner), durable=False)
    staged = root.staged(name)
    staged.mkdir(exist_ok=again)
    (staged / PARTS).mkdir(exist_ok=again)
    open_folder(root.path, STAGING, str(name), PARTS).close()  # refuses a link that somebody put there
    return staged


def leave_part(
    staged: Path, name: CheckpointName, rank: int, files: list[FileEntry], failed: str = ""
) -> None:
    """Not made durable: it is read during this save and deleted before the commit."""
    record = PartRecord(rank=rank, checkpoint=str(name), files=files, failed=failed)
    replace_atomic(_part_path(staged, rank), msgspec.json.encode(record), durable=False)


def part_is_left(staged: Path, name: CheckpointName, rank: int) -> bool:
    """Whether an earlier writer wrote this rank's part completely."""
    try:
        read_part(staged, name, rank)
    except SaveFailedError:
        return False
    return True


def _part_path(staged: Path, rank: int) -> Path:
    return staged / PARTS / f"{rank}.json"


def read_parts(
    staged: Path, name: CheckpointName, world: int, wait: Callable[[int], None] | None = None
) -> list[list[FileEntry]]:
    """Every rank's files; an error if a rank left no record, or a record that it failed.

    `wait` is called with the rank each time its record is not there yet; it raises to give up.
    """
    parts: list[list[FileEntry]] = []
    for rank in range(world):
        while wait is not None and not _part_path(staged, rank).exists():
            wait(rank)
        parts.append(read_part(staged, name, rank))
    return parts


def read_part(staged: Path, name: CheckpointName, rank: int) -> list[FileEntry]:
    """One rank's files; an error if it left no record, or a record that it failed."""
    path = _part_path(staged, rank)
    try:
        record = msgspec.json.decode(read_regular(path, manifests.MAX_MANIFEST_BYTES), type=PartRecord)
    except (OSError, msgspec.DecodeError) as error:
        raise SaveFailedError(f"rank {rank} left no readable part record for {name}: {error}") from error
    if record.rank != rank or record.checkpoint != str(name):
        raise SaveFailedError(f"{path} belongs to rank {record.rank} of {record.checkpoint}")
    if record.failed:
        raise SaveFailedError(f"rank {rank}: {record.failed}")
    return record.files


def check_declared_is_written(staged: Path | None, declared: Declared, parts: list[list[FileEntry]]) -> None:
    """Check that every rank wrote exactly the files it should, with every item where `.metadata` says it is.

    Without `staged` (the local tier) the files are not here to be looked at.
    """
    if len(parts) != len(declared.ranks):
        raise SaveFailedError(f"{len(declared.ranks)} ranks should have written, {len(parts)} have")
    for rank, (promised, written) in enumerate(zip(declared.ranks, parts, strict=True)):
        found = {file.path: file for file in written}
        if sorted(found) != sorted(file.path for file in promised):
            raise SaveFailedError(
                f"rank {rank} should have written {[file.path for file in promised]}, "
                f"but wrote {sorted(found)}"
            )
        for file in promised:
            entry = found[file.path]
            if (
                entry.size != file.size
                or table_digest((c.offset, c.length) for c in entry.chunks) != file.table
            ):
                raise SaveFailedError(f"rank {rank}: {file.path} does not hold what the plan declares")
            size = (staged / file.path).stat().st_size if staged is not None else file.size
            if size != file.size:
                raise SaveFailedError(f"{file.path}: {file.size} bytes were written, {size} are there")


def write_metadata(staged: Path, data: bytes) -> FileEntry:
    """DCP's `.metadata`, durable before anything refers to it."""
    write_durable(staged / METADATA, data)
    return FileEntry(path=METADATA, size=len(data), digest=manifests.digest_bytes(data))


def finish(
    root: CheckpointRoot,
    declared: Declared,
    manifest: Manifest,
    fence: Fence,
    control: ControlDirectory | None,
    *,
    wait: Callable[[int], None] | None = None,
) -> Committed:
    """Turn a staged directory, in which every rank has left its part, into a committed checkpoint.

    `manifest` is complete except for its files; or fully complete, if the local tier has the checkpoint
    already: then the files here must be exactly the same. Without `control` (a diagnostic save) nothing
    points to the result. May be called again after a cut: what it does depends only on what it is given.
    """
    name = CheckpointName(manifest.step, manifest.id)
    staged = root.staged(name)
    sealed = is_sealed(root, name)
    if sealed is None:
        parts = read_parts(staged, name, manifest.world.size, wait)
        check_declared_is_written(staged, declared, parts)
        for left_by_a_cut in (METADATA, MANIFEST):
            (staged / left_by_a_cut).unlink(missing_ok=True)
        files = [file for part in parts for file in part]
        files.append(write_metadata(staged, declared.metadata_for(name)))
        if manifest.files and manifest.files != files:
            held = {file.path: file for file in manifest.files}
            other = [file.path for file in files if held.get(file.path) != file]
            raise SaveFailedError(f"{name}: {other} differ from the local tier's")
        sealed = msgspec.structs.replace(manifest, files=files)
        digest = seal(staged, sealed)
    else:
        digest = manifests.encode(sealed)[1]
    record = CommitRecord(
        id=name.id,
        step=name.step,
        parent=sealed.parent,
        attempt=sealed.attempt,
        manifest=digest,
        created=sealed.created,
        tied=manifests.what_ties(sealed),
    )
    commit(root, name, fence, control, record)
    return Committed(bytes=sum(file.size for file in sealed.files), files=len(sealed.files))


def is_sealed(root: CheckpointRoot, name: CheckpointName) -> Manifest | None:
    """The manifest that an interrupted `finish` left, staged or even committed; None if it left none.

    It is written last, when all else is durable, so if it can be read there is nothing left to write.
    """
    for directory in (root.staged(name), root.committed(name)):
        try:
            manifest, _ = manifests.read(directory)
        except manifests.ManifestError:
            continue
        if (manifest.step, manifest.id) == name:
            return manifest
    return None


def seal(staged: Path, manifest: Manifest) -> str:
    """Write the manifest, the last file of a checkpoint. Returns its digest."""
    data, digest = manifests.encode(manifest)
    write_durable(staged / MANIFEST, data)
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
    staged = root.staged(name)
    if staged.exists():
        with contextlib.suppress(OSError):
            remove(root.path, STAGING, str(name), PARTS)
        with open_folder(root.path, STAGING, str(name)) as folder:
            os.fsync(folder.number)
    with fence.guard(f"commit {name}"):
        if control is not None:
            record_commit(control, fence, record)
        if staged.exists() or not destination.exists():  # else a cut came right after the rename
            os.rename(staged, destination)
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


def discard_staged(root: CheckpointRoot, name: str) -> str:
    """Move a staged directory out of the way into the trash; returns its name there, for deletion."""
    trashed = f"{name}.{os.getpid()}"
    if name in entries(root.path, STAGING):
        make_folder(root.path, TRASH)
        move(root.path, (STAGING, name), (TRASH, trashed))
    remove(root.path, STAGING, f"{name}.owner")
    return trashed


def drop_staged(root: CheckpointRoot, name: str) -> None:
    """Remove a staged directory as far as possible; the next start sweeps what is left of it."""
    with contextlib.suppress(OSError):
        remove(root.path, TRASH, discard_staged(root, name))


def _is_stale(staged: Path, owner: Path, now: float) -> bool:
    """Whether a staged directory has been untouched for so long that nobody can still be at work there."""
    newest = 0.0
    for path in (owner, staged, staged / PARTS, *staged.glob("*"), *staged.glob(f"{PARTS}/*")):
        with contextlib.suppress(OSError):
            newest = max(newest, path.lstat().st_mtime)
    return now - newest > STALE_DAYS * 86400


def sweep_staging(root: CheckpointRoot, run: str, fence: Fence, *, now: float | None = None) -> list[str]:
    """Remove what earlier attempts of this run left under `.staging`.

    What other runs staged under the same root is left alone, unless it has not changed for STALE_DAYS.

    Only the rename needs the fence. Deleting may take long and is done without it, so that no other guard
    has to wait; a cut in between leaves only trash, which the next sweep deletes.
    """
    swept: list[str] = []
    staged = entries(root.path, STAGING)
    for path in (root.staging / entry for entry in staged if entry.endswith(".owner")):
        try:
            owner = msgspec.json.decode(read_regular(path, 4096), type=Owner)
        except (OSError, msgspec.DecodeError) as error:
            log.warning("holdfast: %s does not say whose it is (%s)", path, error)
            owner = Owner(run="", attempt=0, epoch=0)
        name = path.name.removesuffix(".owner")
        ours = owner.run == run and owner.epoch < fence.epoch
        if ours or (owner.run != run and _is_stale(root.staging / name, path, now or time.time())):
            with fence.guard(f"sweep {name}"):
                discard_staged(root, name)
            swept.append(name)
    for left in staged:  # left by a kill while an owner file was being written
        if left.startswith(".") and left.endswith(".tmp"):
            path = root.staging / left
            if _is_stale(path, path, now or time.time()):
                remove(root.path, STAGING, left)
    book = RootBook(root.path)
    for name in book.names():  # records of checkpoints that somebody removed by hand, long ago
        if not (root.path / name).is_dir() and _is_stale(
            book.folder(name), book.folder(name), now or time.time()
        ):
            book.forget(name)
    for entry in entries(root.path, TRASH):
        fence.check(f"delete {entry}")
        with contextlib.suppress(OSError):
            remove(root.path, TRASH, entry)
    return swept
