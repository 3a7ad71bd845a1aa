"""After a resume: copies of its checkpoint that are missing or bad on this node are made again.

Guarantee: beside training, and never in its way: a thread of the writer process, one copy at a time, each by
a deadline, every source of a shard asked once. A copy counts only once every file that lies in its image has
the digest of the manifest. It takes room that is free, and nothing is given up for it. Where it fails, what
is there stays as it is, the journal says so, and the next save brings the copy back as it would have anyway.

Replicas that the resume did not need were not read by it. They are verified here before they are relied on
any longer; a bad one is quarantined, and made again.
"""

from __future__ import annotations

import contextlib
import mmap
import threading
import time
from pathlib import Path

import msgspec
import xxhash

from holdfast.checkpoint import manifest as manifests
from holdfast.checkpoint import peer_receive
from holdfast.checkpoint.assembled import AssembledShards
from holdfast.checkpoint.handoff import MendCopies
from holdfast.checkpoint.identity import CheckpointName, parse_name, saver_of
from holdfast.checkpoint.local_room import LocalRoom
from holdfast.checkpoint.local_tier import CopyRecord, LocalTier
from holdfast.checkpoint.local_verify import verify_copy
from holdfast.checkpoint.manifest import FileEntry, Manifest, ManifestError
from holdfast.checkpoint.peer_messages import AnnouncedChunk, AnnouncedFile, Announcement
from holdfast.checkpoint.peer_receive import Incoming, NoRoomError
from holdfast.checkpoint.problems import Reason
from holdfast.checkpoint.shards import Shard
from holdfast.control.directory import ControlDirectory
from holdfast.errors import CheckpointError, HoldfastError
from holdfast.files import read_regular
from holdfast.journal.events import CopyQuarantined, CopyReplaced, Warned
from holdfast.journal.render import size
from holdfast.journal.writer import JournalWriter
from holdfast.policy.assembly import Assembly

MAX_ASSEMBLY_BYTES = 256 * 1024 * 1024
LEAVE = 2.0
"""Seconds for which the end of the writer waits for a copy that is being given up."""


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
        except Exception as error:  # noqa: BLE001 - whatever it is, it must be said, and costs nothing else
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

    def _quarantine(self, tier: LocalTier, record: CopyRecord, told: list[str]) -> None:
        if tier.quarantine(record, "; ".join(told)):
            self._journal.write(
                CopyQuarantined(
                    checkpoint=record.checkpoint, node=self._order.node, kind=record.kind, reasons=told
                )
            )

    # --- making one -----------------------------------------------------------------------------------------

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
            here=frozenset(one for one, place in enumerate(order.places.ranks) if place == at),
            node=order.node,
            limit=order.max_bytes,
            keep=order.keep,
            tell=self._journal.write,
        )
        with room.alone():
            if (left := room.left()) < copy.size:
                raise NoRoomError(f"{size(copy.size)} are needed and {size(max(0, left))} are free")
            return peer_receive.begin(tier, copy, max_bytes=order.max_bytes)

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

    def _read(self, shard: Shard, entry: FileEntry, view: memoryview, deadline: float) -> str:
        """Read a file to where it is to lie; why what lies there is not it, empty if it is."""
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
    """What the image is to hold: the files one after the other, each from a page's beginning."""
    listed, start = [], 0
    for entry in files:
        chunks = [AnnouncedChunk(chunk.offset, chunk.length, chunk.digest) for chunk in entry.chunks]
        listed.append(AnnouncedFile(entry.path, start, entry.size, entry.digest, chunks))
        start += entry.size + -entry.size % mmap.PAGESIZE
    return Announcement(checkpoint=str(name), manifest=manifest, rank=rank, files=listed)
