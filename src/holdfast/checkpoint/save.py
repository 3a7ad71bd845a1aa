"""Saving: one checkpoint of the whole group, or none.

Everything that can fail on one rank (collecting the state, making the staged directory, writing, checking,
committing) runs inside DCP's own exchanges, so a failure anywhere reaches every rank as the same error and
nobody is left waiting. A failed save removes what it staged and touches nothing that was committed.
"""

from __future__ import annotations

import contextlib
import shutil
import time
import warnings
from collections.abc import Callable
from typing import Any

import msgspec
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.checkpoint.storage import WriteResult

from holdfast.checkpoint import commit as commits
from holdfast.checkpoint import metadata as metadatas
from holdfast.checkpoint.identity import CheckpointName, CheckpointRoot, derive_id
from holdfast.checkpoint.manifest import (
    FORMAT,
    FileEntry,
    Manifest,
    ManifestError,
    PartEntry,
    Versions,
    Windows,
    World,
)
from holdfast.checkpoint.planner import SnapshotPlanner
from holdfast.checkpoint.roundtrip import check_round_trip
from holdfast.checkpoint.state import OWN, Tracked, rank_key, to_blob
from holdfast.checkpoint.writer import StagingWriter
from holdfast.control.directory import ControlDirectory
from holdfast.control.group import Group
from holdfast.control.lease import Fence
from holdfast.control.lineage import CommitRecord
from holdfast.errors import HoldfastError, LeaseLostError, SaveFailedError

OWN_PARTS = {
    "rng": PartEntry(kind="rng"),
    "data": PartEntry(kind="data"),
    "counters": PartEntry(kind="counters"),
}


class SaveFacts(msgspec.Struct, frozen=True, kw_only=True):
    """What the manifest says about the moment of a save."""

    step: int
    parent: str | None
    reason: str
    samples: int = 0
    tokens: int = 0
    versions: Versions
    windows: Windows = msgspec.field(default_factory=Windows)


class Saved(msgspec.Struct, frozen=True, kw_only=True):
    name: CheckpointName
    bytes: int
    """Stored by all ranks; known to rank 0 only, 0 elsewhere."""
    files: int
    seconds: float


class Saver:
    """Saves for one attempt. `root` may be a tier's root or the diagnostic one beneath it."""

    def __init__(
        self, *, root: CheckpointRoot, control: ControlDirectory, fence: Fence, group: Group, attempt: int
    ) -> None:
        self._root = root
        self._diagnostic = root.diagnostic()
        self._control = control
        self._fence = fence
        self._group = group
        self._attempt = attempt
        self._serial = 0
        self._doubts: list[str] = []

    def next_name(self, step: int) -> CheckpointName:
        """The next save's identity; the same on every rank, because every rank counts its saves alike."""
        return CheckpointName(step, derive_id(self._control.run_id, self._attempt, step, self._serial + 1))

    def take_doubts(self) -> list[str]:
        """What the first save found wrong with the state of tracked objects; told once."""
        doubts, self._doubts = self._doubts, []
        return doubts

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
        name = self.next_name(facts.step)
        self._serial += 1
        root = self._diagnostic if diagnostic else self._root
        staged = root.staged(name)
        parts: dict[str, PartEntry] = {}
        stored: list[FileEntry] = []

        def collect() -> dict[str, Any]:
            tensors, others = tracked.collect()
            if self._serial == 1:
                self._doubts = check_round_trip({n: others[n] for n in others if tracked.kind(n) == "object"})
            parts.update(tracked.parts(tensors), **OWN_PARTS)
            blob = to_blob({"format": 1, "tracked": others, "own": own()})
            return {**tensors, OWN: {rank_key(self._group.rank): blob}}

        def leave_part(files: list[FileEntry]) -> None:
            commits.leave_part(staged, name, self._group.rank, files)

        def commit(metadata: Metadata, results: list[list[WriteResult]]) -> None:
            files = commits.read_parts(staged, name, self._group.world_size)
            commits.check_declared_is_written(staged, metadata, results, files)
            entry = commits.write_metadata(staged, metadata, results, writer.storage_meta())
            if self._serial == 1:
                # What our own reader would refuse at a resume must fail now. Once an attempt is enough: the
                # kinds of entries do not change, and parsing a very large file takes seconds.
                metadatas.read(staged)
            files.append(entry)
            stored.extend(files)
            manifest = self._manifest(name, facts, parts, files)
            digest = commits.seal(staged, manifest)
            record = CommitRecord(
                id=name.id, step=name.step, parent=facts.parent, attempt=self._attempt, manifest=digest
            )
            commits.commit(root, name, self._fence, None if diagnostic else self._control, record)

        def open_staged() -> None:
            owner = commits.Owner(run=self._control.run_id, attempt=self._attempt, epoch=self._fence.epoch)
            self._fence.check(f"stage {name}")
            commits.open_staged(root, name, owner)

        writer = StagingWriter(staged, open_staged=open_staged, leave_part=leave_part, commit=commit)
        try:
            with warnings.catch_warnings():
                warnings.filterwarnings(
                    "ignore", message="torch.distributed is disabled", category=UserWarning
                )
                save(
                    {},
                    storage_writer=writer,
                    planner=SnapshotPlanner(collect, self._group.rank, self._group.world_size),
                    process_group=self._group.process_group,
                    no_dist=self._group.process_group is None,
                )
        except CheckpointException as error:
            if self._group.rank == 0:
                with contextlib.suppress(OSError):
                    shutil.rmtree(commits.discard_staged(root, str(name)), ignore_errors=True)
            raise _explain(error, name) from error
        return Saved(
            name=name,
            bytes=sum(entry.size for entry in stored),
            files=len(stored),
            seconds=time.monotonic() - started,
        )

    def _manifest(
        self, name: CheckpointName, facts: SaveFacts, parts: dict[str, PartEntry], files: list[FileEntry]
    ) -> Manifest:
        return Manifest(
            format=FORMAT,
            id=name.id,
            step=name.step,
            parent=facts.parent,
            run=self._control.run_id,
            attempt=self._attempt,
            epoch=self._fence.epoch,
            created=time.time(),
            world=World(size=self._group.world_size, backend=self._group.backend),
            parts=parts,
            files=files,
            versions=facts.versions,
            samples=facts.samples,
            tokens=facts.tokens,
            reason=facts.reason,
            windows=facts.windows,
        )


def _explain(error: CheckpointException, name: CheckpointName) -> BaseException:
    """DCP's error as ours: what a retry may cure is a failed save, anything else is raised as it is."""
    failures = sorted(error.failures.items())
    for _, (cause, _) in failures:
        if isinstance(cause, LeaseLostError):
            return LeaseLostError(str(cause))
    for rank, (cause, _) in failures:
        if isinstance(cause, HoldfastError) and not isinstance(cause, SaveFailedError):
            return type(cause)(f"rank {rank}: {cause}")
        if not isinstance(cause, (OSError, SaveFailedError, ManifestError)):
            return cause
    told = "; ".join(f"rank {rank}: {type(cause).__name__}: {cause}" for rank, (cause, _) in failures)
    return SaveFailedError(f"{name} was not saved ({told}). Every older checkpoint is untouched")
