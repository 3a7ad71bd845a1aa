"""The commit in the local tier, as the writer process of one rank makes it.

The order is

    image locked, shared → fence → digests, fingerprints → part record → declared = written → manifest sealed
    → commit record → each rank: the manifest lists what I hold → record of the copy

Guarantee: a copy's record is written only for bytes that were digested after the image was locked, and that
the one manifest lists. Nobody stages into an image that is locked; a newer attempt claims its epoch before it
looks for slots, so a writer that passed the fence with the lock held may still commit, a later one may not.
A checkpoint is on the lineage once its commit record is there, which rank 0 writes under the fence after the
manifest is durable. Everything may be done again after a cut: the digests are taken anew, what was sealed
stays as it is.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec

from holdfast.checkpoint import commit as commits
from holdfast.checkpoint import local_manifest
from holdfast.checkpoint import manifest as manifests
from holdfast.checkpoint.handoff import Job, Start, UsePlan
from holdfast.checkpoint.identity import MANIFEST, METADATA, PARTS, CheckpointName, parse_name
from holdfast.checkpoint.image import digest_image
from holdfast.checkpoint.local_manifest import Where
from holdfast.checkpoint.local_tier import CopyFile, CopyRecord, LocalTier
from holdfast.checkpoint.manifest import FileEntry, Manifest
from holdfast.control.directory import ControlDirectory, list_names
from holdfast.control.lease import Fence
from holdfast.control.lineage import CommitRecord, find_commit, record_commit, shelve, was_committed
from holdfast.errors import SaveFailedError
from holdfast.removal import remove

SPARE_MANIFESTS = 2
"""Kept beyond the checkpoints that places keep, whose oldest copies may just be read."""

Wait = Callable[[int], None]
"""Called with a rank while something of it is missing; returns after a moment, or raises."""


class LocalCommit(msgspec.Struct, frozen=True, kw_only=True):
    """A checkpoint that is committed in the local tier, and this rank's copy of its part."""

    manifest: Manifest
    record: CopyRecord
    files: list[FileEntry]
    """What this rank stores of it."""

    @property
    def bytes(self) -> int:
        return sum(file.size for file in self.manifest.files)


class LocalSaver:
    """One rank's part in local commits."""

    def __init__(self, start: Start, control: ControlDirectory, fence: Fence) -> None:
        self.tier = LocalTier.at(Path(start.tier))
        self._start = start
        self._control = control
        self._fence = fence
        self.where = Where(ranks=[], nodes={self.tier.place: self.tier.record.node})
        self._in_use = contextlib.ExitStack()
        self._in_use.enter_context(self.tier.in_use())

    def close(self) -> None:
        self._in_use.close()

    def folder(self, name: CheckpointName) -> Path:
        return local_manifest.folder(self._control, name)

    def done_before(self, job: Job, name: CheckpointName) -> LocalCommit | None:
        """What an earlier writer has committed of this job, to its end."""
        record = self.tier.find(str(name), self._start.rank)
        if record is None or record.image != job.image:
            return None
        with contextlib.suppress(manifests.ManifestError):
            manifest = local_manifest.read(self._control, name, record.manifest)
            return LocalCommit(manifest=manifest, record=record, files=_listed(manifest, record))
        return None

    @contextlib.contextmanager
    def at_work(self, job: Job, name: CheckpointName) -> Iterator[int]:
        """Hold the image from the fence to the commit; its descriptor."""
        with self.tier.work_on(job.image) as descriptor:
            if descriptor is None:
                raise SaveFailedError(f"{self.tier.images / job.image}, the image for {name}, is gone")
            self._fence.check(f"commit {name} in the local tier")
            yield descriptor

    def write(self, job: Job, plan: UsePlan, image: memoryview) -> list[FileEntry]:
        """Digest this rank's shards, where they lie; where that is not the image, write it too."""
        if job.slot == job.buffer:
            return digest_image(image, plan.layout, job.prints, self._start.threads)
        target = os.open(self.tier.images / job.image, os.O_WRONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
        try:
            return digest_image(image, plan.layout, job.prints, self._start.threads, into=target)
        finally:
            os.close(target)

    def leave_part(self, name: CheckpointName, files: list[FileEntry], failed: str = "") -> None:
        commits.leave_part(self.folder(name), name, self._start.rank, files, failed)

    def sealed(self, name: CheckpointName) -> Manifest | None:
        """The manifest, once rank 0's writer has sealed it."""
        with contextlib.suppress(manifests.ManifestError):
            manifest, _ = manifests.read(self.folder(name))
            if (manifest.step, manifest.id) == name:
                return manifest
        return None

    def seal(self, plan: UsePlan, manifest: Manifest, name: CheckpointName, wait: Wait) -> Manifest:
        """For rank 0: all parts are there, and are what was declared. The checkpoint is on the lineage."""
        sealed = self.sealed(name)
        if sealed is None:
            assert plan.declared is not None
            parts = commits.read_parts(self.folder(name), name, manifest.world.size, wait)
            commits.check_declared_is_written(None, plan.declared, parts)
            metadata = plan.declared.metadata_for(name)
            entry = FileEntry(path=METADATA, size=len(metadata), digest=manifests.digest_bytes(metadata))
            files = [*(file for part in parts for file in part), entry]
            sealed = msgspec.structs.replace(manifest, files=files)
            local_manifest.seal(self._control, name, sealed, metadata, self.where)
        record = CommitRecord(
            id=name.id,
            step=name.step,
            parent=sealed.parent,
            attempt=sealed.attempt,
            manifest=manifests.encode(sealed)[1],
            created=sealed.created,
        )
        with self._fence.guard(f"commit {name} in the local tier"):
            record_commit(self._control, self._fence, record)
        return sealed

    def commit(
        self, job: Job, plan: UsePlan, name: CheckpointName, manifest: Manifest, files: list[FileEntry]
    ) -> LocalCommit:
        """This rank's copy counts from now on."""
        listed = {file.path: file for file in manifest.files}
        for file in files:
            if listed.get(file.path) != file:
                raise SaveFailedError(
                    f"{name}: the manifest does not list {file.path} with the digest {file.digest} that this "
                    "rank's copy has; the copy does not count"
                )
        starts = {shard.path: shard.start for shard in plan.layout.shards}
        record = CopyRecord(
            checkpoint=str(name),
            manifest=manifests.encode(manifest)[1],
            rank=self._start.rank,
            image=job.image,
            files=[CopyFile(file.path, starts[file.path], file.size, file.digest) for file in files],
            kind="own",
            at=time.time(),
        )
        self.tier.commit(record)
        return LocalCommit(manifest=manifest, record=record, files=files)

    def clear_away(self, name: CheckpointName) -> None:
        """For rank 0: a save that failed before it was sealed leaves nothing."""
        if self.sealed(name) is None:
            local_manifest.forget(self._control, name)

    def tidy(self, name: CheckpointName) -> None:
        """For rank 0, after a commit: drop what nobody needs of it and of older ones."""
        with contextlib.suppress(OSError):
            remove(self._control.path, local_manifest.LOCAL, str(name), PARTS)
        sealed: list[tuple[float, CheckpointName]] = []
        for entry in list_names(self._control.path / local_manifest.LOCAL):
            found = parse_name(entry)
            if found is None or found == name:
                continue
            try:
                when = (self.folder(found) / MANIFEST).stat().st_mtime
                sealed.append((when, found))
            except OSError:
                if found.step < name.step:  # saves are committed in order: this one failed
                    local_manifest.forget(self._control, found)
        # By time and not by step: after a rollback higher steps may be the older ones.
        for _, old in sorted(sealed, reverse=True)[self._start.keep + SPARE_MANIFESTS - 1 :]:
            self._shelve(old)
            local_manifest.forget(self._control, old)

    def _shelve(self, name: CheckpointName) -> None:
        """The commit of a checkpoint that lived in the local tier alone needs no file of its own any more."""
        manifest = self.sealed(name)
        if manifest is None:
            return
        record = find_commit(self._control, manifest.attempt, name.step, name.id)
        if record is not None and not was_committed(self._control, record):
            shelve(self._control, self._fence, record)


def _listed(manifest: Manifest, record: CopyRecord) -> list[FileEntry]:
    own = {file.path for file in record.files}
    return [file for file in manifest.files if file.path in own]
