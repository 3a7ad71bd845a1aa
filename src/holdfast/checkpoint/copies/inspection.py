"""What the copies of the local tier really hold: one copy, those of an attempt, those of a node.

The manifest is never taken from the place: it comes from the control directory (or the checkpoint root, which
has the same one), and only if its digest is the one in the run's commit record. Changes nothing.
"""

from __future__ import annotations

import contextlib
import os
import stat
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import msgspec
import xxhash

from holdfast.base import escaped, read_regular, replace_atomic
from holdfast.checkpoint.copies import tier as local_manifest
from holdfast.checkpoint.copies.assembled import AssembledShards, PlaceMap
from holdfast.checkpoint.copies.rules import Assembly, assemble, describe_assembly
from holdfast.checkpoint.copies.tier import MAX_RECORD_BYTES, CopyFile, CopyRecord, LocalTier, read_recorded
from holdfast.checkpoint.format import (
    MANIFEST,
    METADATA,
    CheckpointName,
    FileEntry,
    Manifest,
    ManifestError,
    Problem,
    Progress,
    Reason,
    bad_chunks,
    parse_name,
    saver_of,
    stream,
)
from holdfast.checkpoint.format import manifest as manifests
from holdfast.journal import JournalWriter
from holdfast.journal.events import CopyQuarantined
from holdfast.record import (
    CommitRecord,
    ControlDirectory,
    DecisionStore,
    attempt_numbers,
    find_commit,
    read_key,
    read_timeline,
)

# Whether a copy in the local tier holds the bytes that its checkpoint was saved with. Changes nothing.
#
# Guarantee: `verify_copy` finds nothing wrong only if every shard of the record is listed in the manifest
# with that size and digest, no shard of its rank is left out, and the image's bytes, read now, have those
# digests. The copy is leased for as long as it is read, so what is judged is one copy and not two halves of
# it. Nothing that the record says is believed: it only tells where to look.
#
# `look_at_copy` reads none of the bytes: it finds nothing wrong if everything else is as it must be.
#
# A copy that is gone when it is looked at is `missing`: there is nothing to quarantine. Every other problem
# means that the copy is bad.


READ_SIZE = 512 * 1024
"""Bytes read at a time by one thread: they are still in the processor's cache when they are digested."""


def verify_copy(
    tier: LocalTier,
    record: CopyRecord,
    manifest: Manifest,
    *,
    digest: str = "",
    threads: int = 4,
    progress: Progress | None = None,
) -> list[Problem]:
    """Every problem of one copy, by shard; none means that its bytes are known to be right.

    `digest` is the manifest's own, if the record should name the same one. `progress` is called by one thread
    at a time. Reads with a thread for each shard, at most `threads`.
    """
    problems = _disagreements(record, manifest, digest)
    if problems:
        return problems  # compared with the wrong list, the bytes would prove nothing
    with tier.lease(record) as descriptor:
        length = _length(tier, record, descriptor)
        if isinstance(length, Problem):
            return [length]
        assert descriptor is not None
        listed = {entry.path: entry for entry in manifest.files}
        check = _Check(descriptor, length, listed, progress)
        with ThreadPoolExecutor(max(1, min(threads, len(record.files)))) as pool:
            # The longest first, so that no thread is left alone with one at the end.
            longest = sorted(record.files, key=lambda file: -file.size)
            found = dict(zip((file.path for file in longest), pool.map(check.file, longest), strict=True))
    return [problem for file in record.files if (problem := found[file.path]) is not None]


def look_at_copy(tier: LocalTier, record: CopyRecord, manifest: Manifest, *, digest: str) -> list[Problem]:
    """Every problem of one copy that shows without reading it."""
    if problems := _disagreements(record, manifest, digest):
        return problems
    with tier.lease(record) as descriptor:
        length = _length(tier, record, descriptor)
        if isinstance(length, Problem):
            return [length]
        return [problem for file in record.files if (problem := _too_short(file, length)) is not None]


def _length(tier: LocalTier, record: CopyRecord, descriptor: int | None) -> int | Problem:
    """How long the image of a copy is; or the problem that it is gone, or is not a file."""
    if descriptor is None:
        return _why_gone(tier, record)
    info = os.fstat(descriptor)
    if not stat.S_ISREG(info.st_mode):
        return Problem(Reason.NOT_A_FILE, _image(record), "expected a regular file")
    return info.st_size


def _too_short(file: CopyFile, size: int) -> Problem | None:
    if file.start + file.size <= size:
        return None
    detail = f"expected {file.size} bytes from {file.start} of the image, which has {size}"
    return Problem(Reason.TRUNCATED, file.path, detail)


def _disagreements(record: CopyRecord, manifest: Manifest, digest: str) -> list[Problem]:
    """Where the record does not describe this checkpoint's shards of its rank."""
    name = CheckpointName(manifest.step, manifest.id)
    if record.name != name:
        return [Problem(Reason.WRONG_NAME, ".", f"it is a copy of {record.checkpoint}, expected {name}")]
    if digest and record.manifest != digest:
        detail = f"the copy was made under manifest {record.manifest}; {digest} was committed"
        return [Problem(Reason.ALTERED, ".", detail)]
    problems: list[Problem] = []
    listed = {entry.path: entry for entry in manifest.files}
    copied: set[str] = set()
    for file in record.files:
        entry = listed.get(file.path)
        path = escaped(file.path)
        if entry is None:
            problems.append(Problem(Reason.UNLISTED, path, "the manifest does not list it"))
        elif file.path in copied:
            problems.append(Problem(Reason.ALTERED, path, "the record lists it twice"))
        elif (file.size, file.digest) != (entry.size, entry.digest):
            expected = f"expected {entry.size} bytes with digest {entry.digest}"
            detail = f"{expected}, the record says {file.size} bytes with {file.digest}"
            problems.append(Problem(Reason.ALTERED, path, detail))
        copied.add(file.path)
    own = f"__{record.rank}_"
    left_out = [path for path in listed if path.startswith(own) and path not in copied]
    why = f"the manifest lists it for rank {record.rank}, the record does not"
    return problems + [Problem(Reason.INCOMPLETE, path, why) for path in left_out]


def _image(record: CopyRecord) -> str:
    return f"images/{record.image}"


def _why_gone(tier: LocalTier, record: CopyRecord) -> Problem:
    """Why a copy could not be leased."""
    path = _image(record)
    if tier.find(record.checkpoint, record.rank) != record:
        return Problem(Reason.MISSING, path, "its record is gone: it was taken back, dropped or quarantined")
    try:
        mode = os.lstat(tier.image(record)).st_mode
    except FileNotFoundError:
        return Problem(Reason.MISSING, path, "the image is not there")
    except OSError as error:
        return Problem(Reason.UNREADABLE, path, f"cannot be looked at: {error.strerror or error}")
    if not stat.S_ISREG(mode):
        return Problem(Reason.NOT_A_FILE, path, "expected a regular file")
    if not os.access(tier.image(record), os.R_OK):
        return Problem(Reason.UNREADABLE, path, "it cannot be opened: check its permissions")
    return Problem(Reason.MISSING, path, "it is being taken back right now")


class _Check:
    """Reads shards of one leased image, several at a time."""

    def __init__(
        self, descriptor: int, size: int, listed: dict[str, FileEntry], progress: Progress | None
    ) -> None:
        self._descriptor = descriptor
        self._size = size
        self._listed = listed
        self._progress = progress
        self._lock = threading.Lock()

    def file(self, file: CopyFile) -> Problem | None:
        if (problem := _too_short(file, self._size)) is not None:
            return problem
        try:
            return self._compare(file, self._listed[file.path])
        except OSError as error:
            return Problem(Reason.UNREADABLE, file.path, f"cannot be read: {error.strerror or error}")

    def _compare(self, file: CopyFile, entry: FileEntry) -> Problem | None:
        buffer = memoryview(bytearray(min(READ_SIZE, max(1, file.size))))
        digest, read = xxhash.xxh3_128(), 0
        for view in stream(self._descriptor, file.start, file.size, buffer):
            digest.update(view)
            read += len(view)
            if self._progress is not None:
                with self._lock:
                    self._progress(len(view))
        if read != file.size:
            detail = f"expected {file.size} bytes from {file.start} of the image, read {read}"
            return Problem(Reason.TRUNCATED, file.path, detail)
        if digest.hexdigest() == entry.digest:
            return None
        bad = bad_chunks(self._descriptor, entry, buffer, file.start)
        detail = f"expected digest {entry.digest}, found {digest.hexdigest()}{bad}"
        return Problem(Reason.ALTERED, file.path, detail)


# What the places of an attempt really hold, found out at a resume.
#
# Guarantee: a place is a source of a shard only if its record fits the manifest and its image is there, at
# full size; its bytes are not trusted. They are read once, by the rank that loads them, and each chunk is
# compared with its digest before it is used, from this source or the next one. File names say only what is
# worth looking at.
#
# Each place's leader says which checkpoints it has records of (`report`). For a rung that rank 0 proposes,
# each leader answers with what it holds of it (`answer`), and rank 0 puts the answers together (`gather`). If
# then some rank finds no right bytes of a file anywhere, every leader is asked once more, and reads all that
# it holds of that rung (`thorough`), so that what is bad is known to be bad, and stays out of every later
# resume. What is found bad is quarantined at once; a copy that is given up meanwhile is not bad, only gone.


MAX_ASSEMBLY_BYTES = 256 * 1024 * 1024


class _Sound(msgspec.Struct, frozen=True, kw_only=True):
    """What a place holds of a checkpoint."""

    files: list[str]
    bad: list[str]
    """What was found wrong, in words."""
    verified: bool
    """Whether every byte was read for this."""


class LocalInventory:
    """One rank's part in this, for one attempt."""

    def __init__(
        self,
        *,
        tier: LocalTier | None,
        places: PlaceMap,
        rank: int,
        control: ControlDirectory,
        store: DecisionStore,
        journal: JournalWriter,
        attempt: int,
        timeout: float,
        peer_timeout: float,
    ) -> None:
        """`timeout` is how long verifying may take, `peer_timeout` how long one read from a peer may.

        Without a tier this node holds nothing, and reads what others hold.
        """
        self._tier = tier
        self._places = places
        self._rank = rank
        self._control = control
        self._store = store
        self._journal = journal
        self._attempt = attempt
        self._timeout = timeout
        self._peer_timeout = peer_timeout
        self._node = places.of(rank).node
        self._leads = tier is not None and places.leads(rank)

    def report(self) -> None:
        """Every place's leader says what it has records of, before anything is proposed."""
        if self._leads and self._tier is not None:
            held = sorted({record.checkpoint for record in self._tier.records()})
            self._store.set(f"copies/claims/{self._rank}", msgspec.json.encode(held).decode())

    def claims(self) -> set[CheckpointName]:
        """On rank 0: checkpoints that some place has a record of."""
        found: set[CheckpointName] = set()
        deadline = time.monotonic() + self._timeout
        for info in self._places.usable():
            left = max(0.0, deadline - time.monotonic())
            what = f"what {info.node} holds in its local tier, from rank {info.leader}"
            raw = read_key(self._store, f"copies/claims/{info.leader}", left, what)
            names = map(parse_name, msgspec.json.decode(raw, type=list[str]))
            found |= {name for name in names if name is not None}
        return found

    def home(self, name: CheckpointName, digest: str, directory: Path) -> Path | None:
        """Where the manifest with this digest is, and the `.metadata` that it lists; None if nowhere."""
        for path in (local_manifest.folder(self._control, name), directory):
            with contextlib.suppress(ManifestError, OSError):
                if _has_metadata(path, _read(path, digest)):
                    return path
        return None

    def answer(
        self, number: int, name: CheckpointName, digest: str, home: Path, *, thorough: bool = True
    ) -> None:
        """A place's leader says what it holds of a checkpoint; `thorough`: after reading all of it."""
        if not self._leads or self._tier is None:
            return
        sound = _Sound(files=[], bad=[], verified=thorough)
        try:
            sound = self._look(self._tier, name, _read(home, digest), digest, thorough=thorough)
        except (ManifestError, OSError) as error:
            sound.bad.append(f"{self._node} could not verify its copies: {error}")
        self._store.set(f"copies/{number}/sound/{self._rank}", msgspec.json.encode(sound).decode())

    def _look(
        self, tier: LocalTier, name: CheckpointName, manifest: Manifest, digest: str, *, thorough: bool
    ) -> _Sound:
        sound = _Sound(files=[], bad=[], verified=thorough)
        threads = min(16, len(os.sched_getaffinity(0)))
        for record in tier.records():
            if record.name != name:
                continue
            if thorough:
                problems = verify_copy(tier, record, manifest, digest=digest, threads=threads)
            else:
                problems = look_at_copy(tier, record, manifest, digest=digest)
            if not problems:
                sound.files.extend(file.path for file in record.files)
                continue
            found = [str(problem) for problem in problems]
            if any(problem.reason is not Reason.MISSING for problem in problems):
                self._quarantine(tier, record, found)
            sound.bad.append(
                f"{record.kind} copy of rank {record.rank}'s part on {self._node}: {'; '.join(found)}"
            )
        return sound

    def _quarantine(self, tier: LocalTier, record: CopyRecord, told: list[str]) -> None:
        if tier.quarantine(record, "; ".join(told)):
            self._journal.write(
                CopyQuarantined(checkpoint=record.checkpoint, node=self._node, kind=record.kind, reasons=told)
            )

    def gather(self, number: int, manifest: Manifest, *, in_global: bool) -> tuple[Assembly, list[str]]:
        """On rank 0: where each shard can come from, and what was found bad on the way."""
        held: dict[str, list[str]] = {}
        bad: list[str] = []
        verified = True
        deadline = time.monotonic() + self._timeout
        for info in self._places.usable():
            left = max(0.0, deadline - time.monotonic())
            what = f"what {info.node} holds of the proposed checkpoint, from rank {info.leader}"
            raw = read_key(self._store, f"copies/{number}/sound/{info.leader}", left, what)
            sound = msgspec.json.decode(raw, type=_Sound)
            held[info.place] = sound.files
            bad += sound.bad
            verified = verified and sound.verified
        files = [entry.path for entry in manifest.files if entry.path != METADATA]
        return assemble(files, held, in_global=in_global, verified=verified), bad

    def describe(self, name: CheckpointName, assembly: Assembly) -> list[str]:
        """Where the shards come from, in words."""
        where = local_manifest.read_where(self._control, name)
        nodes = {**(where.nodes if where else {}), **self._places.nodes()}
        ranks = where.ranks if where else []
        saved_at = {}
        for path in assembly.sources:
            saver = saver_of(path)
            if saver is not None and saver < len(ranks):
                saved_at[path] = ranks[saver].place
        return describe_assembly(assembly, nodes, saved_at)

    def publish(self, number: int, assembly: Assembly) -> str:
        """On rank 0: write it where every rank can read it; for many ranks it is too large for the store."""
        path = self._control.attempt(self._attempt) / f"assembly-{number}.json"
        replace_atomic(path, msgspec.json.encode(assembly), durable=False)
        return str(path)

    def shards(self, name: CheckpointName, assembly: str, directory: Path) -> AssembledShards:
        """This rank's access to the shards, as rank 0 has published it."""
        found = msgspec.json.decode(read_regular(Path(assembly), MAX_ASSEMBLY_BYTES), type=Assembly)
        return AssembledShards(
            str(name),
            found,
            places=self._places,
            rank=self._rank,
            tier=self._tier,
            control=self._control,
            directory=directory,
            journal=self._journal,
            timeout=self._peer_timeout,
        )


def _read(path: Path, digest: str) -> Manifest:
    manifest, found = manifests.read(path)
    if found != digest:
        raise ManifestError(f"its digest is {found}; {digest} was committed under this name")
    return manifest


def _has_metadata(path: Path, manifest: Manifest) -> bool:
    listed = next((entry for entry in manifest.files if entry.path == METADATA), None)
    if listed is None:
        return False
    return manifests.digest_bytes(read_regular(path / METADATA, listed.size)) == listed.digest


TIERS = {"local": "own", "peer": "replica"}
"""The kind of copy that a tier's name stands for, on the node that holds it."""


class CopyInspection(msgspec.Struct, kw_only=True):
    """One copy, and what is wrong with it."""

    checkpoint: str
    rank: int | None
    """None: it belongs to no single rank; `what` says what it is."""
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


class PlaceContents(msgspec.Struct, frozen=True):
    """What a place holds, before a byte of it was read."""

    records: list[CopyRecord]
    unreadable: list[CopyInspection]

    @property
    def nbytes(self) -> int:
        return sum(record.nbytes for record in self.records)


def list_copies(tier: LocalTier, tiers: Sequence[str], only: CheckpointName | None = None) -> PlaceContents:
    """The records of the wanted copies, newest step first. Unlike `LocalTier.records` it moves nothing."""
    records: list[CopyRecord] = []
    unreadable: list[CopyInspection] = []
    kinds = {TIERS[name] for name in tiers}
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
            problem = Problem(Reason.UNREADABLE, escaped(f"copies/{path.name}"), escaped(str(error)))
            checkpoint = str(name) if name is not None else escaped(path.name)
            unreadable.append(
                CopyInspection(
                    checkpoint=checkpoint, rank=None, tier=tiers[0], what="a copy", problems=[problem]
                )
            )
            continue
        if record.kind in kinds:
            records.append(record)
    return PlaceContents(sorted(records, key=lambda r: (-r.name.step, r.name.id, r.rank)), unreadable)


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
                problem, sound = Problem(Reason.UNREADABLE, METADATA, escaped(str(error))), False
            if not sound:
                what = f"{METADATA} in the run directory"
                bad.append(
                    CopyInspection(
                        checkpoint=str(name), rank=None, tier="local", what=what, problems=[problem]
                    )
                )
        return bad

    def absent(self, tier: LocalTier, name: CheckpointName, tiers: Sequence[str]) -> list[CopyInspection]:
        """Copies of one checkpoint that this place is recorded to hold but does not."""
        here = {record.rank for record in list_copies(tier, list(TIERS), name).records}
        found: list[CopyInspection] = []
        for place in read_recorded(self._control, name).places:
            if place.place != tier.place:
                continue
            for kind, ranks in (("local", place.own), ("peer", place.confirmed)):
                for rank in ranks if kind in tiers else ():
                    if rank not in here:
                        why = (
                            "recorded for this node but gone: given up, quarantined, or lost with its memory"
                        )
                        problem = Problem(Reason.MISSING, f"copies/{name}.{rank:05d}.json", why)
                        found.append(
                            CopyInspection(checkpoint=str(name), rank=rank, tier=kind, problems=[problem])
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
                return Problem(reason, MANIFEST, f"in the control directory: {escaped(str(error))}")
            manifest = elsewhere
        if manifest.run != self._control.run_id:
            detail = f"it belongs to run {escaped(manifest.run)}, expected {self._control.run_id}"
            return Problem(Reason.WRONG_RUN, MANIFEST, detail)
        return manifest, commit.manifest

    def _committed_since(self, name: CheckpointName) -> CommitRecord | None:
        """A live run goes on committing while somebody looks."""
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
