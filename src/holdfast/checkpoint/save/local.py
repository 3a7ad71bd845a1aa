"""Copies on the nodes: the commit in the local tier, replicas to peers, and mending after a resume.

Guarantee: mending runs beside training and never in its way: in a thread of the writer process, one copy at a
time, each by a deadline, asking every source of a shard once. A copy counts only once every file that lies in
its image has the digest given in the manifest. It uses only room that is free; nothing is given up for it. If
it fails, what is there stays as it is, the journal says so, and the next save brings the copy back as it
would have anyway.

The resume did not read the replicas that it did not need. They are verified here before anyone relies on
them further; a bad one is quarantined, and made again.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import xxhash

from holdfast.base import read_regular, remove, size
from holdfast.checkpoint import commit as commits
from holdfast.checkpoint.copies import (
    AnnouncedChunk,
    AnnouncedFile,
    Announcement,
    AssembledShards,
    Assembly,
    CopyFile,
    CopyRecord,
    Incoming,
    LocalRoom,
    LocalTier,
    NoRoomError,
    Where,
    receipt,
    verify_copy,
)
from holdfast.checkpoint.copies import tier as local_manifest
from holdfast.checkpoint.format import (
    MANIFEST,
    METADATA,
    PARTS,
    CheckpointName,
    FileEntry,
    Manifest,
    ManifestError,
    Reason,
    ShardSource,
    parse_name,
    saver_of,
)
from holdfast.checkpoint.format import manifest as manifests
from holdfast.checkpoint.save.handoff import Job, MendCopies, PeerTarget, Save, Start, UsePeers, UsePlan
from holdfast.checkpoint.save.image import digest_image
from holdfast.errors import AlteredCopyError, CheckpointError, HoldfastError, SaveFailedError
from holdfast.journal import JournalWriter
from holdfast.journal.events import CopyQuarantined, CopyReplaced, CopyReplicated, ReplicaFailed, Warned
from holdfast.record import (
    CommitRecord,
    ControlDirectory,
    Fence,
    find_commit,
    list_names,
    record_commit,
    shelve,
    was_committed,
)

# Sends replicas of what was committed locally to the peers, beside everything else.
#
# Guarantee: no save ever waits for a replica. One checkpoint is sent at a time; if another is committed while
# one waits for its turn, the older is left out, and the journal says so. Whatever goes wrong is journalled
# and harms neither this rank's own copy nor the run. A place that says it holds a replica has first verified
# it against the digests that were taken here.


SUPERSEDED = "superseded: a newer checkpoint was committed before this one's turn came"


def quarantine(tier: LocalTier, record: CopyRecord, why: str, journal: JournalWriter) -> None:
    """A copy of ours turned out to be bad: it no longer counts, and the journal says why."""
    tier.quarantine(record, why)
    bad = CopyQuarantined(
        checkpoint=record.checkpoint, node=tier.record.node, kind=record.kind, reasons=[why]
    )
    journal.write(bad)


class ReplicaSender:
    """One rank's sender, a thread of its writer process."""

    def __init__(self, control: ControlDirectory, tier: LocalTier, journal: JournalWriter) -> None:
        self._control = control
        self._tier = tier
        self._journal = journal
        self._peers: UsePeers | None = None
        self._waiting: LocalCommit | None = None
        self._sending = False
        self._changed = threading.Condition()

    def use(self, peers: UsePeers) -> None:
        with self._changed:
            self._peers = peers

    def send(self, committed: LocalCommit) -> None:
        """Send it once whatever is being sent now is done; never waits."""
        with self._changed:
            if self._peers is None or not self._peers.targets:
                return
            superseded, self._waiting = self._waiting, committed
            targets = self._peers.targets
            if not self._sending:
                self._sending = True
                threading.Thread(target=self._work, name="holdfast-replicas", daemon=True).start()
        if superseded is not None:
            for target in targets:
                self._failed(superseded, target, SUPERSEDED)

    def _work(self) -> None:
        while True:
            with self._changed:
                committed, self._waiting = self._waiting, None
                if committed is None or self._peers is None:
                    self._sending = False
                    self._changed.notify_all()
                    return
                peers = self._peers
            deadline = time.monotonic() + peers.timeout
            for target in peers.targets:
                self._send(committed, target, deadline)

    def _send(self, committed: LocalCommit, target: PeerTarget, deadline: float) -> None:
        from holdfast.checkpoint.copies import send_replica  # most writers never need it

        record, began = committed.record, time.monotonic()
        try:
            address = (target.host, target.port)
            place = send_replica(
                address, self._control, self._tier, record, committed.files, deadline=deadline
            )
        except AlteredCopyError as error:
            quarantine(self._tier, record, str(error), self._journal)
            self._failed(committed, target, str(error))
        except (HoldfastError, OSError) as error:
            self._failed(committed, target, str(error))
        else:
            local_manifest.confirm_replica(self._control, record.name, record.rank, place)
            if record.rank == 0:  # one line a save is enough; the records say who confirmed what
                self._journal.write(
                    CopyReplicated(
                        checkpoint=record.checkpoint,
                        step=record.name.step,
                        rank=record.rank,
                        node=target.node,
                        seconds=time.monotonic() - began,
                    )
                )

    def _failed(self, committed: LocalCommit, target: PeerTarget, why: str) -> None:
        record = committed.record
        self._journal.write(
            ReplicaFailed(
                checkpoint=record.checkpoint,
                step=record.name.step,
                rank=record.rank,
                node=target.node,
                error=why,
            )
        )

    def close(self, timeout: float) -> None:
        """Wait until nothing is being sent, for at most `timeout` seconds."""
        deadline = time.monotonic() + timeout
        with self._changed:
            while self._sending and (left := deadline - time.monotonic()) > 0:
                self._changed.wait(left)


MAX_ASSEMBLY_BYTES = 256 * 1024 * 1024
LEAVE = 2.0
"""Seconds for which an ending writer waits for a copy that is being given up."""


class _StoppedError(Exception):
    """The run is at its end."""


class Mender:
    """Sees to the copies that one rank answers for, once."""

    def __init__(self, order: MendCopies, control: ControlDirectory, journal: JournalWriter) -> None:
        self._order = order
        self._control = control
        self._journal = journal
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="holdfast-mend", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._stopping.set()
        self._thread.join(LEAVE)

    def _run(self) -> None:
        order = self._order
        try:
            tier = LocalTier.at(Path(order.tier))
            name = parse_name(order.checkpoint)
            manifest, digest = manifests.read(Path(order.home))
            if name is None or digest != order.manifest:
                raise ManifestError(f"its digest is {digest}, expected {order.manifest}")
            with tier.in_use():
                for rank in order.ranks:
                    self._see_to(tier, name, manifest, rank)
        except _StoppedError:
            return
        except Exception as error:  # noqa: BLE001 - whatever it is, it must be reported, and do no other harm
            self._warn(f"the copies of {order.checkpoint} on {order.node} were not looked after: {error}")

    def _see_to(self, tier: LocalTier, name: CheckpointName, manifest: Manifest, rank: int) -> None:
        if any(record.name.step > name.step for record in tier.records(rank)):
            return  # a newer one is here already
        files = [entry for entry in manifest.files if saver_of(entry.path) == rank]
        if not files or self._is_here(tier, name, manifest, rank):
            return
        try:
            self._make(tier, name, rank, files)
        except (HoldfastError, NoRoomError, OSError) as error:
            self._warn(
                f"the copy of rank {rank}'s part of {name} on {self._order.node} was not replaced: {error}. "
                "The next save brings it back"
            )

    def _is_here(self, tier: LocalTier, name: CheckpointName, manifest: Manifest, rank: int) -> bool:
        record = tier.find(str(name), rank)
        if record is None:
            return False
        if record.kind == "own" and rank == self._order.rank:
            return True  # this rank has just loaded it
        problems = verify_copy(tier, record, manifest, digest=self._order.manifest, threads=1)
        if problems and any(problem.reason is not Reason.MISSING for problem in problems):
            self._quarantine(tier, record, [str(problem) for problem in problems])
        return not problems

    def _quarantine(self, tier: LocalTier, record: CopyRecord, reasons: list[str]) -> None:
        if tier.quarantine(record, "; ".join(reasons)):
            self._journal.write(
                CopyQuarantined(
                    checkpoint=record.checkpoint, node=self._order.node, kind=record.kind, reasons=reasons
                )
            )

    # --- making a copy --------------------------------------------------------------------------------------

    def _make(self, tier: LocalTier, name: CheckpointName, rank: int, files: list[FileEntry]) -> None:
        order, started = self._order, time.monotonic()
        assembly = msgspec.json.decode(read_regular(Path(order.assembly), MAX_ASSEMBLY_BYTES), type=Assembly)
        shards = AssembledShards(
            str(name),
            assembly,
            places=order.places,
            rank=order.rank,
            tier=tier,
            control=self._control,
            directory=Path(order.directory),
            journal=self._journal,
            timeout=order.timeout,
        )
        incoming = self._begin(tier, _announce(name, order.manifest, rank, files))
        try:
            with contextlib.closing(shards):
                self._fill(incoming, files, shards, started + order.timeout)
            record = incoming.commit("own" if rank == order.rank else "replica")
        except BaseException:
            incoming.discard()
            raise
        finally:
            incoming.close()
        self._journal.write(
            CopyReplaced(
                checkpoint=record.checkpoint,
                step=name.step,
                rank=rank,
                node=order.node,
                kind=record.kind,
                sources=sorted(shards.used),
                bytes=record.nbytes,
                seconds=time.monotonic() - started,
            )
        )

    def _begin(self, tier: LocalTier, copy: Announcement) -> Incoming:
        order = self._order
        at = order.places.ranks[order.rank]
        room = LocalRoom(
            tier,
            self._control,
            rank=order.rank,
            here=frozenset(rank for rank, place in enumerate(order.places.ranks) if place == at),
            node=order.node,
            limit=order.max_bytes,
            keep=order.keep,
            tell=self._journal.write,
        )
        with room.alone():
            if (left := room.left()) < copy.size:
                raise NoRoomError(f"{size(copy.size)} are needed and {size(max(0, left))} are free")
            return receipt.begin(tier, copy, max_bytes=order.max_bytes)

    def _fill(
        self, incoming: Incoming, files: list[FileEntry], shards: AssembledShards, deadline: float
    ) -> None:
        starts = {file.path: file.start for file in incoming.replica.files}
        for entry in files:
            start = starts[entry.path]
            with incoming.view[start : start + entry.size] as view, shards.open(entry) as shard:
                while why := self._read(shard, entry, view, deadline):
                    if not shard.another(why):
                        raise CheckpointError(why)

    def _read(self, shard: ShardSource, entry: FileEntry, view: memoryview, deadline: float) -> str:
        """Read a file to where it is to lie; returns what is wrong with it there, empty if nothing."""
        digest = xxhash.xxh3_128()
        try:
            at = 0
            while at < entry.size:
                if self._stopping.is_set():
                    raise _StoppedError
                if time.monotonic() > deadline:
                    raise HoldfastError(f"it took more than {self._order.timeout:g} s")
                with view[at : at + shard.at_once] as piece:
                    shard.read_into(piece, at, until=entry.size)
                    digest.update(piece)
                    at += piece.nbytes
        except CheckpointError as error:
            return str(error)
        found = digest.hexdigest()
        return (
            "" if found == entry.digest else f"altered {entry.path}: digest {found}, expected {entry.digest}"
        )

    def _warn(self, message: str) -> None:
        self._journal.write(Warned(message=message))


def _announce(name: CheckpointName, manifest: str, rank: int, files: list[FileEntry]) -> Announcement:
    """What the image is to hold: the files one after another, each starting at the beginning of a page."""
    listed, start = [], 0
    for entry in files:
        chunks = [AnnouncedChunk(chunk.offset, chunk.length, chunk.digest) for chunk in entry.chunks]
        listed.append(AnnouncedFile(entry.path, start, entry.size, entry.digest, chunks))
        start += entry.size + -entry.size % mmap.PAGESIZE
    return Announcement(checkpoint=str(name), manifest=manifest, rank=rank, files=listed)


# The commit in the local tier, as the writer process of one rank makes it.
#
# The order is
#
#     image locked, shared → fence → digests, fingerprints → part record → declared = written → manifest
# sealed     → commit record → each rank: the manifest lists what I hold → record of the copy
#
# Guarantee: a copy's record is written only for bytes that were digested after the image was locked, and that
# the one manifest lists. Nobody stages into an image that is locked; a newer attempt claims its epoch before
# it looks for slots, so a writer that passed the fence with the lock held may still commit, a later one may
# not. A checkpoint is on the lineage once its commit record exists, which rank 0 writes under the fence
# after the manifest is durable. Everything may be done again after an interruption: the digests are taken
# anew, and what was sealed stays as it is.


SPARE_MANIFESTS = 2
"""Kept beyond the checkpoints that places keep, since somebody may be reading the oldest copies."""

Wait = Callable[[int], None]
"""Called with a rank while something from it is missing; returns after a moment, or raises."""


class LocalCommit(msgspec.Struct, frozen=True, kw_only=True):
    """A checkpoint that is committed in the local tier, and this rank's copy of its part."""

    manifest: Manifest
    record: CopyRecord
    files: list[FileEntry]
    """What this rank stores of it."""

    @property
    def bytes(self) -> int:
        return sum(file.size for file in self.manifest.files)


class LocalCommitter:
    """One rank's part in local commits."""

    def __init__(self, start: Start, control: ControlDirectory, fence: Fence) -> None:
        self.tier = LocalTier.at(Path(start.tier))
        self._start = start
        self._control = control
        self._fence = fence
        self._replicated: deque[str] = deque(maxlen=2)
        """Ids of the newest that are replicated: their manifests are kept for as long as their copies."""
        self.where = Where(ranks=[], nodes={self.tier.place: self.tier.record.node})
        self._in_use = contextlib.ExitStack()
        self._in_use.enter_context(self.tier.in_use())

    def close(self) -> None:
        self._in_use.close()

    def folder(self, name: CheckpointName) -> Path:
        return local_manifest.folder(self._control, name)

    def done_before(self, job: Job) -> LocalCommit | None:
        """The commit of this job, if an earlier writer completed it."""
        name = job.save.name
        record = self.tier.find(str(name), self._start.rank)
        if record is None or record.image != job.image:
            return None
        with contextlib.suppress(manifests.ManifestError):
            manifest = local_manifest.read(self._control, name, record.manifest)
            return LocalCommit(manifest=manifest, record=record, files=_listed(manifest, record))
        return None

    @contextlib.contextmanager
    def at_work(self, job: Job) -> Iterator[int]:
        """Hold the image from the fence to the commit; yields its descriptor."""
        name = job.save.name
        with self.tier.work_on(job.image) as descriptor:
            if descriptor is None:
                raise SaveFailedError(f"{self.tier.images / job.image}, the image for {name}, is gone")
            self._fence.check(f"commit {name} in the local tier")
            yield descriptor

    def write(self, job: Job, plan: UsePlan, image: memoryview) -> list[FileEntry]:
        """Digest this rank's shards where they lie; if that is not in the image, write the image too."""
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

    def sealed_for_own(self, name: CheckpointName) -> tuple[Manifest, str] | None:
        """The same for any other rank, with the digest: of no file but its own the chunks are looked at."""
        with contextlib.suppress(manifests.ManifestError):
            manifest, digest, tables = manifests.read_lazily(self.folder(name))
            if (manifest.step, manifest.id) == name:
                files = [
                    msgspec.structs.replace(file, chunks=tables[file.path])
                    if saver_of(file.path) == self._start.rank
                    else file
                    for file in manifest.files
                ]
                return msgspec.structs.replace(manifest, files=files), digest
        return None

    def seal(self, plan: UsePlan, manifest: Manifest, save: Save, wait: Wait) -> tuple[Manifest, str]:
        """For rank 0: once all parts are there and are what was declared, put it on the lineage."""
        name, where = save.name, self.where
        if not self._replicated and manifest.parent:
            self._replicated.append(manifest.parent)  # what the run came from
        if save.replicate and name.id not in self._replicated:
            self._replicated.append(name.id)
        else:
            here = [msgspec.structs.replace(place, targets=[]) for place in where.ranks]
            where = msgspec.structs.replace(where, ranks=here)
        sealed = self.sealed(name)
        if sealed is None:
            assert plan.declared is not None
            parts = commits.read_parts(self.folder(name), name, manifest.world.size, wait)
            commits.check_declared_is_written(None, plan.declared, parts)
            metadata = plan.declared.metadata_for(name)
            entry = FileEntry(path=METADATA, size=len(metadata), digest=manifests.digest_bytes(metadata))
            files = [*(file for part in parts for file in part), entry]
            sealed = msgspec.structs.replace(manifest, files=files)
            digest = local_manifest.seal(self._control, name, sealed, metadata, where)
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
        with self._fence.guard(f"commit {name} in the local tier"):
            record_commit(self._control, self._fence, record)
        return sealed, digest

    def commit(
        self, job: Job, plan: UsePlan, manifest: Manifest, digest: str, files: list[FileEntry]
    ) -> LocalCommit:
        """This rank's copy counts from now on."""
        name = job.save.name
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
            manifest=digest,
            rank=self._start.rank,
            image=job.image,
            files=[CopyFile(file.path, starts[file.path], file.size, file.digest) for file in files],
            kind="own",
            at=time.time(),
        )
        self.tier.commit(record)
        return LocalCommit(manifest=manifest, record=record, files=files)

    def clear_away(self, name: CheckpointName) -> None:
        """For rank 0: a save that failed before it was sealed leaves nothing behind."""
        if self.sealed(name) is None:
            local_manifest.forget(self._control, name)

    def tidy(self, name: CheckpointName) -> None:
        """For rank 0, after a commit: drop whatever of it, and of older ones, nobody needs."""
        with contextlib.suppress(OSError):
            remove(self._control.path, local_manifest.LOCAL, str(name), PARTS)
        sealed: list[tuple[float, CheckpointName]] = []
        for entry in list_names(self._control.path / local_manifest.LOCAL):
            found = parse_name(entry)
            if found is None or found == name or found.id in self._replicated:
                continue
            try:
                when = (self.folder(found) / MANIFEST).stat().st_mtime
                sealed.append((when, found))
            except OSError:
                if found.step < name.step:  # saves are committed in order: this one failed
                    local_manifest.forget(self._control, found)
        # By time, not by step: after a rollback the higher steps may be the older ones.
        for _, old in sorted(sealed, reverse=True)[self._start.keep + SPARE_MANIFESTS - 1 :]:
            self._shelve(old)
            local_manifest.forget(self._control, old)

    def _shelve(self, name: CheckpointName) -> None:
        """The commit of a checkpoint that lived only in the local tier no longer needs a file of its own."""
        manifest = self.sealed(name)
        if manifest is None:
            return
        record = find_commit(self._control, manifest.attempt, name.step, name.id)
        if record is not None and not was_committed(self._control, record):
            shelve(self._control, self._fence, record)


def _listed(manifest: Manifest, record: CopyRecord) -> list[FileEntry]:
    own = {file.path for file in record.files}
    return [file for file in manifest.files if file.path in own]
