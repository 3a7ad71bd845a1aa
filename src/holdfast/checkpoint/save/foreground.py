"""Saving in the foreground: one checkpoint of the whole group, or none, before this returns.

Everything that can fail on one rank (collecting the state, making the staged directory, writing, checking,
committing) ends in an exchange, so a failure anywhere reaches every rank as the same error and nobody is left
waiting. A failed save removes what it staged and touches nothing that was committed.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import msgspec

from holdfast.checkpoint import commit as commits
from holdfast.checkpoint.format import (
    FAILURES,
    FORMAT,
    OF_THE_JOB,
    CheckpointName,
    CheckpointRoot,
    Manifest,
    Versions,
    Windows,
    World,
    together,
    write_shards,
)
from holdfast.checkpoint.save.snapshot import Snapshot, Snapshotter
from holdfast.checkpoint.state import GRADIENTS, Tracked
from holdfast.record import ControlDirectory, Fence, Group


class SaveFacts(msgspec.Struct, frozen=True, kw_only=True):
    """What the manifest says about the moment of a save."""

    step: int
    parent: str | None
    reason: str
    versions: Versions
    windows: Windows = msgspec.field(default_factory=Windows)


class Saved(msgspec.Struct, frozen=True, kw_only=True):
    name: CheckpointName
    bytes: int
    """Stored by all ranks; known to rank 0 only, 0 elsewhere."""
    files: int
    seconds: float
    stored_seconds: float
    """Of these, for writing and committing the files."""


class SaveContext(msgspec.Struct, frozen=True, kw_only=True):
    """What every save of an attempt has in common."""

    root: CheckpointRoot
    control: ControlDirectory
    fence: Fence
    group: Group
    attempt: int

    def owner(self) -> commits.Owner:
        return commits.Owner(run=self.control.run_id, attempt=self.attempt, epoch=self.fence.epoch)

    def root_for(self, *, diagnostic: bool) -> CheckpointRoot:
        return self.root.diagnostic() if diagnostic else self.root

    def manifest(self, snapshot: Snapshot, facts: SaveFacts) -> Manifest:
        """Complete but for the files, which nobody knows yet."""
        return Manifest(
            format=FORMAT,
            id=snapshot.name.id,
            step=snapshot.name.step,
            parent=facts.parent,
            run=self.control.run_id,
            attempt=self.attempt,
            epoch=self.fence.epoch,
            created=time.time(),
            world=World(size=self.group.world_size, backend=self.group.backend),
            parts=snapshot.parts,
            files=[],
            versions=facts.versions,
            samples=snapshot.samples,
            tokens=snapshot.tokens,
            counts=OF_THE_JOB,
            reason=facts.reason,
            windows=facts.windows,
            needs=[GRADIENTS] if GRADIENTS in snapshot.parts else [],
            proof=snapshot.proof,
        )


class Saver:
    """Saves in the foreground, for one attempt."""

    def __init__(self, context: SaveContext, snapshots: Snapshotter) -> None:
        self._context = context
        self._group = context.group
        self._snapshots = snapshots

    def save(
        self,
        tracked: Tracked,
        own: Callable[[], dict[str, Any]],
        facts: SaveFacts,
        *,
        diagnostic: bool = False,
    ) -> Saved:
        """Save and commit. Raises SaveFailedError (nothing changed) or LeaseLostError."""
        started = time.monotonic()
        root = self._context.root_for(diagnostic=diagnostic)
        name = self._snapshots.next_name(facts.step)

        opening = 0.0

        def open_staged(name: CheckpointName) -> None:
            nonlocal opening
            if self._group.is_coordinator:
                self._context.fence.check(f"stage {name}")
                begun = time.monotonic()
                commits.open_staged(root, name, self._context.owner())
                opening = time.monotonic() - begun

        try:
            snapshot = self._snapshots.take(
                tracked, own, facts.step, prepare=open_staged, prove=not diagnostic
            )
            assert snapshot is not None  # nobody is ever busy with a save in the foreground
            storing = time.monotonic()
            together(self._group, name, lambda: self._write(root, snapshot))
            stored = together(
                self._group, name, lambda: self._commit(root, snapshot, facts, diagnostic=diagnostic)
            )
        except FAILURES:
            if self._group.is_coordinator:
                commits.drop_staged(root, str(name))
            raise
        now = time.monotonic()
        return Saved(
            name=name,
            bytes=stored.bytes,
            files=stored.files,
            seconds=now - started,
            stored_seconds=opening + now - storing,
        )

    def _write(self, root: CheckpointRoot, snapshot: Snapshot) -> commits.Committed:
        staged = root.staged(snapshot.name)
        files = write_shards(staged, snapshot.plan, snapshot.tensors, snapshot.fingerprints())
        commits.leave_part(staged, snapshot.name, self._group.rank, files)
        return commits.Committed(bytes=sum(file.size for file in files), files=len(files))

    def _commit(
        self, root: CheckpointRoot, snapshot: Snapshot, facts: SaveFacts, *, diagnostic: bool
    ) -> commits.Committed:
        declared = snapshot.plan.declared
        if declared is None:
            return commits.Committed(bytes=0, files=0)
        manifest = self._context.manifest(snapshot, facts)
        control = None if diagnostic else self._context.control
        return commits.finish(root, declared, manifest, self._context.fence, control)
