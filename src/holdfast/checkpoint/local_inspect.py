"""All copies that this node holds of a run's checkpoints, each judged by the manifest that was committed.

The manifest is never taken from the place: it comes from the control directory (or the checkpoint root, which
has the same one), and only if its digest is the one in the run's commit record. Changes nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import msgspec

from holdfast.checkpoint import local_manifest
from holdfast.checkpoint import manifest as manifests
from holdfast.checkpoint.identity import MANIFEST, METADATA, CheckpointName, parse_name
from holdfast.checkpoint.local_recorded import read_recorded
from holdfast.checkpoint.local_tier import MAX_RECORD_BYTES, CopyRecord, LocalTier
from holdfast.checkpoint.local_verify import verify_copy
from holdfast.checkpoint.manifest import Manifest, ManifestError
from holdfast.checkpoint.problems import Problem, Reason, printable
from holdfast.checkpoint.verify import Progress
from holdfast.control.attempts import attempt_numbers
from holdfast.control.directory import ControlDirectory
from holdfast.control.lineage import CommitRecord, find_commit, read_timeline
from holdfast.files import read_regular

TIERS = {"local": "own", "peer": "replica"}
"""The kind of copy that a tier's name stands for, on the node that holds it."""


class CopyInspection(msgspec.Struct, kw_only=True):
    """One copy, and what is wrong with it."""

    checkpoint: str
    rank: int | None
    """None: it is no one rank's; `what` says what it is."""
    tier: str
    what: str = ""
    files: int = 0
    size: int = 0
    bytes_checked: int = 0
    problems: list[Problem] = []
    gone: bool = False
    """It was given up while it was looked at, as happens in a live run: nothing is wrong with it."""

    @property
    def sound(self) -> bool:
        return not self.problems


class Copies(msgspec.Struct, frozen=True):
    """What a place holds, before a byte of it was read."""

    records: list[CopyRecord]
    unreadable: list[CopyInspection]

    @property
    def nbytes(self) -> int:
        return sum(record.nbytes for record in self.records)


def list_copies(tier: LocalTier, tiers: Sequence[str], only: CheckpointName | None = None) -> Copies:
    """The records of the wanted copies, newest step first. Unlike `LocalTier.records` it moves nothing."""
    records: list[CopyRecord] = []
    unreadable: list[CopyInspection] = []
    kinds = {TIERS[one] for one in tiers}
    for path in sorted(tier.copies.glob("step_*.json")):
        name = parse_name(path.name.partition(".")[0])
        if only is not None and name != only:
            continue
        try:
            record = msgspec.json.decode(read_regular(path, MAX_RECORD_BYTES), type=CopyRecord)
            if f"{record.checkpoint}.{record.rank:05d}.json" != path.name or name is None:
                raise msgspec.ValidationError("it belongs to another copy")
        except FileNotFoundError:
            continue
        except (OSError, msgspec.DecodeError) as error:
            problem = Problem(Reason.UNREADABLE, printable(f"copies/{path.name}"), printable(str(error)))
            checkpoint = str(name) if name is not None else printable(path.name)
            unreadable.append(
                CopyInspection(
                    checkpoint=checkpoint, rank=None, tier=tiers[0], what="a copy", problems=[problem]
                )
            )
            continue
        if record.kind in kinds:
            records.append(record)
    return Copies(sorted(records, key=lambda r: (-r.name.step, r.name.id, r.rank)), unreadable)


class Judge:
    """Judges copies of one run; reads each checkpoint's manifest once."""

    def __init__(self, control: ControlDirectory, root: Path | None) -> None:
        self._control = control
        self._root = root
        timeline = read_timeline(control)
        self._commits: dict[CheckpointName, CommitRecord] = {
            CheckpointName(record.step, record.id): record for record in timeline.on_line + timeline.abandoned
        }
        self._manifests: dict[CheckpointName, tuple[Manifest, str] | Problem] = {}

    @property
    def committed(self) -> list[CheckpointName]:
        return sorted(self._commits, reverse=True)

    def expected(self, name: CheckpointName) -> str | None:
        """The manifest digest that was committed under a name; None if none was."""
        commit = self._commits.get(name)
        return commit.manifest if commit is not None else None

    def inspect(
        self, tier: LocalTier, record: CopyRecord, progress: Progress | None = None
    ) -> CopyInspection:
        inspection = CopyInspection(
            checkpoint=record.checkpoint,
            rank=record.rank,
            tier=next(name for name, kind in TIERS.items() if kind == record.kind),
            files=len(record.files),
            size=record.nbytes,
        )
        found = self._manifest(record.name)
        if isinstance(found, Problem):
            inspection.gone = tier.find(record.checkpoint, record.rank) != record
            inspection.problems = [] if inspection.gone else [found]
            return inspection
        manifest, digest = found
        inspection.problems = verify_copy(
            tier, record, manifest, digest=digest, progress=_counting(inspection, progress)
        )
        missing = any(problem.reason is Reason.MISSING for problem in inspection.problems)
        if missing and tier.find(record.checkpoint, record.rank) != record:
            inspection.problems, inspection.gone = [], True
        return inspection

    def metadata(self, names: Iterable[CheckpointName]) -> list[CopyInspection]:
        """Checkpoints whose `.metadata` in the control directory is not the one that was committed.

        No copy holds it, and no shard of any copy can be found without it.
        """
        bad: list[CopyInspection] = []
        for name in names:
            found = self._manifest(name)
            if (
                isinstance(found, Problem)
                or not (folder := local_manifest.folder(self._control, name)).is_dir()
            ):
                continue
            entry = next(entry for entry in found[0].files if entry.path == METADATA)
            try:
                data = read_regular(folder / METADATA, entry.size)
                digest = manifests.digest_bytes(data)
                problem = Problem(Reason.ALTERED, METADATA, f"expected digest {entry.digest}, found {digest}")
                sound = digest == entry.digest
            except FileNotFoundError:
                if not (folder / MANIFEST).exists():
                    continue  # no node holds the checkpoint any more, and it was forgotten meanwhile
                problem, sound = (
                    Problem(Reason.MISSING_METADATA, METADATA, f"expected {entry.size} bytes"),
                    False,
                )
            except OSError as error:
                problem, sound = Problem(Reason.UNREADABLE, METADATA, printable(str(error))), False
            if not sound:
                what = f"{METADATA} in the run directory"
                bad.append(
                    CopyInspection(
                        checkpoint=str(name), rank=None, tier="local", what=what, problems=[problem]
                    )
                )
        return bad

    def absent(self, tier: LocalTier, name: CheckpointName, tiers: Sequence[str]) -> list[CopyInspection]:
        """Copies of one checkpoint that this place is recorded to hold and does not."""
        here = {record.rank for record in list_copies(tier, list(TIERS), name).records}
        found: list[CopyInspection] = []
        for place in read_recorded(self._control, name).places:
            if place.place != tier.place:
                continue
            for one, ranks in (("local", place.own), ("peer", place.confirmed)):
                for rank in ranks if one in tiers else ():
                    if rank not in here:
                        why = (
                            "recorded for this node and gone: given up, quarantined, or lost with its memory"
                        )
                        problem = Problem(Reason.MISSING, f"copies/{name}.{rank:05d}.json", why)
                        found.append(
                            CopyInspection(checkpoint=str(name), rank=rank, tier=one, problems=[problem])
                        )
        return found

    def _manifest(self, name: CheckpointName) -> tuple[Manifest, str] | Problem:
        if name not in self._manifests:
            self._manifests[name] = self._read(name)
        return self._manifests[name]

    def _read(self, name: CheckpointName) -> tuple[Manifest, str] | Problem:
        commit = self._commits.get(name) or self._committed_since(name)
        if commit is None:
            return Problem(Reason.NO_MANIFEST, ".", "this run has no record of having committed it")
        try:
            manifest = local_manifest.read(self._control, name, commit.manifest)
        except ManifestError as error:
            elsewhere = self._from_root(name, commit.manifest)
            if elsewhere is None:
                there = (local_manifest.folder(self._control, name) / MANIFEST).exists()
                reason = Reason.UNREADABLE_MANIFEST if there else Reason.NO_MANIFEST
                return Problem(reason, MANIFEST, f"in the control directory: {printable(str(error))}")
            manifest = elsewhere
        if manifest.run != self._control.run_id:
            detail = f"it is of run {printable(manifest.run)}, expected {self._control.run_id}"
            return Problem(Reason.WRONG_RUN, MANIFEST, detail)
        return manifest, commit.manifest

    def _committed_since(self, name: CheckpointName) -> CommitRecord | None:
        """A live run commits on while somebody looks."""
        for number in reversed(attempt_numbers(self._control)):
            if (record := find_commit(self._control, number, name.step, name.id)) is not None:
                self._commits[name] = record
                return record
        return None

    def _from_root(self, name: CheckpointName, digest: str) -> Manifest | None:
        """A checkpoint that the local tier has forgotten may have its manifest beside its global copy."""
        if self._root is None:
            return None
        try:
            manifest, found = manifests.read(self._root / str(name))
        except ManifestError:
            return None
        return manifest if found == digest else None


def _counting(inspection: CopyInspection, progress: Progress | None) -> Callable[[int], None]:
    def count(more: int) -> None:
        inspection.bytes_checked += more
        if progress is not None:
            progress(more)

    return count
