"""Which rank is at which place, and shards from the nearest copy that can be trusted.

Guarantee: what a reader is given comes from one of the sources that say they hold the shard; which one makes
no difference, because the reader compares every chunk with the manifest's digest. A source whose bytes are
wrong is left for the next one, and is not asked for that shard again. A peer that does not answer in time
costs that time once: it is asked for nothing more in this load. A bad copy on this node is quarantined; one
that is gone is not, because nothing is left for anybody to read. One bad copy costs nothing but itself.
"""

from __future__ import annotations

import contextlib
import logging
import mmap
import os
import threading
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec

from holdfast.checkpoint.copies.peers import GoneError, PeerReader
from holdfast.checkpoint.copies.room import is_in_memory
from holdfast.checkpoint.copies.rules import GLOBAL, Assembly, order, share
from holdfast.checkpoint.copies.tier import CopyFile, CopyRecord, LocalTier, RankPlace, Where
from holdfast.checkpoint.format import READ_SLICE, FileEntry, ShardFile, ShardSource, read_at, saver_of
from holdfast.errors import CheckpointError, PeerError
from holdfast.journal import JournalWriter
from holdfast.journal.events import CopyQuarantined, Warned
from holdfast.record import ControlDirectory

# Which rank is at which place, and how each place's peer server is reached.
#
# All ranks of an attempt agree on one map, made by rank 0 from what every rank says about itself. It is
# small: a place is listed once, however many ranks it has.


class ServingRank(msgspec.Struct, frozen=True, kw_only=True):
    """What a rank says about itself."""

    place: str = ""
    node: str = ""
    host: str = ""
    port: int = 0
    """Of the peer server that this rank has started; 0 if it has started none."""
    problem: str = ""
    """Why this rank cannot use its local directory."""


class PlaceInfo(msgspec.Struct, frozen=True, array_like=True):
    place: str
    """Its id; empty if its local directory cannot be used."""
    node: str
    host: str
    port: int
    leader: int
    """The lowest rank there: it speaks for the place."""


class PlaceMap(msgspec.Struct, frozen=True):
    """The places of an attempt."""

    places: list[PlaceInfo]
    ranks: list[int]
    """By rank: its place's position in `places`."""

    def of(self, rank: int) -> PlaceInfo:
        return self.places[self.ranks[rank]]

    def leads(self, rank: int) -> bool:
        return self.of(rank).leader == rank

    def by_rank(self) -> list[str]:
        """The place of each rank, as `rules.replicate` wants it; empty for one that has none."""
        return [self.places[at].place for at in self.ranks]

    def usable(self) -> list[PlaceInfo]:
        return [info for info in self.places if info.place]

    def find(self, place: str) -> PlaceInfo | None:
        return next((info for info in self.places if info.place == place), None)

    def nodes(self) -> dict[str, str]:
        """Place → node."""
        return {info.place: info.node for info in self.usable()}

    def where(self, targets: Sequence[Sequence[str]]) -> Where:
        """What is kept with each local checkpoint, so that people can see where its copies are."""
        return Where(
            ranks=[
                RankPlace(self.of(rank).place, self.of(rank).node, list(given))
                for rank, given in enumerate(targets)
            ],
            nodes=self.nodes(),
        )


def make_map(hellos: Sequence[ServingRank]) -> PlaceMap:
    """Pure: one map from what all ranks said, by rank."""
    positions: dict[tuple[str, str], int] = {}
    places: list[PlaceInfo] = []
    ranks: list[int] = []
    for rank, hello in enumerate(hellos):
        key = (hello.place, "" if hello.place else hello.node)  # nodes without a place are not one place
        if key not in positions:
            positions[key] = len(places)
            places.append(PlaceInfo(hello.place, hello.node, hello.host, hello.port, rank))
        at = positions[key]
        if hello.port and not places[at].port:  # the one that serves need not be the first
            places[at] = msgspec.structs.replace(places[at], host=hello.host, port=hello.port)
        ranks.append(at)
    return PlaceMap(places, ranks)


log = logging.getLogger("holdfast.checkpoint")

FROM_PEER = 1024 * 1024 * 1024
"""Bytes read from a peer by one call: it asks for them piece by piece, and for the next one ahead."""
_POPULATE_READ = 22
"""MADV_POPULATE_READ (Linux 5.14): one call maps many pages, where otherwise every few would take a fault."""


class _GoneCopyError(CheckpointError):
    """The source no longer holds such a copy, which says nothing against whatever else it holds."""


class _NoAnswerError(CheckpointError):
    """A peer did not answer, or not in a way that can be understood."""


class AssembledShards:
    """One rank's access to the shards of one checkpoint. `open` is what a VerifyingReader takes."""

    def __init__(
        self,
        checkpoint: str,
        assembly: Assembly,
        *,
        places: PlaceMap,
        rank: int,
        tier: LocalTier | None,
        control: ControlDirectory,
        directory: Path,
        journal: JournalWriter,
        timeout: float,
    ) -> None:
        """`directory`: where the global tier has the checkpoint, if it has it. No tier: nothing lies here."""
        self.checkpoint = checkpoint
        self.used: Counter[str] = Counter()
        """Bytes read, by source: own, peer, global."""
        self.bad: list[str] = []
        """Sources whose bytes were wrong, and what was read instead."""
        self._assembly = assembly
        self._places = places
        self._rank = rank
        self._here = places.of(rank).place
        self._tier = tier
        self._in_memory = tier is not None and is_in_memory(tier.path)
        self._control = control
        self._directory = directory
        self._journal = journal
        self._timeout = timeout
        self._own: dict[str, tuple[CopyRecord, CopyFile]] = {
            file.path: (record, file)
            for record in (tier.records() if tier is not None else ())
            if record.checkpoint == checkpoint
            for file in record.files
        }
        self._readers: dict[str, _PeerLine] = {}
        self._silent: set[str] = set()
        """Peers that did not answer."""
        self._lock = threading.RLock()
        """Several threads read at once."""
        self._given_up: set[tuple[str, str]] = set()
        """Sources that could not be used, each with the file for which it could not."""

    @contextlib.contextmanager
    def open(self, entry: FileEntry) -> Iterator[ShardSource]:
        with contextlib.ExitStack() as stack:
            yield _AssembledShard(self, entry, stack)

    def rest(self, saved_world: int) -> list[str]:
        """Files in which this rank has to verify what it did not load; the ranks together cover all files."""
        places = self._places.by_rank()
        return share(self._assembly, places, self._rank, saver=saver_of, saved_world=saved_world)

    def close(self) -> None:
        for peer in self._readers.values():
            peer.reader.close()
        self._readers.clear()

    def count(self, place: str, nbytes: int) -> None:
        with self._lock:
            self.used[self.kind(place)] += nbytes

    def order(self, path: str) -> list[str]:
        found = order(self._assembly, path, self._here, self._rank)
        return [place for place in found if place not in self._silent and (place, path) not in self._given_up]

    def source(self, place: str, entry: FileEntry, stack: contextlib.ExitStack) -> ShardSource:
        """One source of a shard, opened; CheckpointError if it cannot be."""
        if place == GLOBAL:
            return stack.enter_context(ShardFile(self._directory, entry))
        if place == self._here:
            if self._tier is None or entry.path not in self._own:
                raise _GoneCopyError(f"missing {entry.path}: this node does not hold it any more")
            record, file = self._own[entry.path]
            descriptor = stack.enter_context(self._tier.lease(record))
            if descriptor is None:
                raise _GoneCopyError(f"missing {entry.path}: this node's copy was given up meanwhile")
            return _OwnShard(descriptor, file, in_memory=self._in_memory)
        return _PeerShard(self._peer(place), self.checkpoint, entry.path)

    def kind(self, place: str) -> str:
        return {GLOBAL: "global", self._here: "own"}.get(place, "peer")

    def _peer(self, place: str) -> _PeerLine:
        with self._lock:
            if place not in self._readers:
                info = self._places.find(place)
                if info is None or not info.port:
                    raise _NoAnswerError(f"missing: place {place} has no peer server")
                reader = PeerReader((info.host, info.port), self._control, timeout=self._timeout)
                self._readers[place] = _PeerLine(reader)
            return self._readers[place]

    def give_up(
        self,
        place: str,
        entry: FileEntry,
        why: str,
        failure: type[CheckpointError] | None,
        instead: str = "",
    ) -> None:
        """A source could not be used, and why; `failure` is what reading raised, None if the bytes are wrong;
        `instead`: the next source, if there is one."""
        with self._lock:
            self._give_up(place, entry, why, failure, instead)

    def _give_up(
        self, place: str, entry: FileEntry, why: str, failure: type[CheckpointError] | None, instead: str
    ) -> None:
        self._given_up.add((place, entry.path))
        gone = failure is not None and issubclass(failure, _GoneCopyError)
        if failure is None and instead:
            where = "from the checkpoint root" if instead == GLOBAL else f"on {self._node(instead)}"
            at = "in the checkpoint root" if place == GLOBAL else f"on {self._node(place)}"
            self.bad.append(f"{at}: {why}; read {where} instead")
        if place == self._here and entry.path in self._own and not gone:
            self._quarantine(self._own[entry.path][0], why)
        elif place != GLOBAL:
            if failure is not None and issubclass(failure, _NoAnswerError):
                self._silent.add(place)
            node = self._node(place)
            self._journal.write(
                Warned(message=f"{entry.path} of {self.checkpoint} could not be read from {node}: {why}")
            )
            if not gone:
                log.warning(
                    "holdfast: %s of %s is not read from %s: %s", entry.path, self.checkpoint, node, why
                )

    def _node(self, place: str) -> str:
        info = self._places.find(place)
        return info.node if info is not None else place

    def _quarantine(self, record: CopyRecord, why: str) -> None:
        self._given_up.update((self._here, file.path) for file in record.files)  # it never counts again
        if self._tier is None or not self._tier.quarantine(record, why):
            return  # another rank of this node was quicker
        self._journal.write(
            CopyQuarantined(
                checkpoint=self.checkpoint,
                node=self._places.of(self._rank).node,
                kind=record.kind,
                reasons=[why],
            )
        )


class _AssembledShard:
    """A shard with several sources, of which one is in use at a time."""

    def __init__(self, shards: AssembledShards, entry: FileEntry, stack: contextlib.ExitStack) -> None:
        self._shards = shards
        self._entry = entry
        self._stack = stack
        self._left = shards.order(entry.path)
        self._current: ShardSource | None = None
        self._failures: dict[int, type[CheckpointError]] = {}
        """What reading raised, by the turn of the source."""
        self._lock = threading.Lock()
        self.turn = 0

    @property
    def concurrent(self) -> bool:
        return self._shards.kind(next(iter(self._left), GLOBAL)) != "peer"

    @property
    def at_once(self) -> int:
        return READ_SLICE if self.concurrent else FROM_PEER

    def read_into(self, view: memoryview, offset: int, *, until: int = 0) -> None:
        turn = self.turn
        try:
            place, source = self._opened()
            source.read_into(view, offset, until=until)
        except CheckpointError as error:
            self._failures.setdefault(turn, type(error))
            raise
        self._shards.count(place, view.nbytes)

    def in_place(self, offset: int, length: int) -> memoryview | None:
        try:
            place, source = self._opened()
            view = source.in_place(offset, length)
        except CheckpointError:
            return None  # reading it will say the same
        if view is not None:
            self._shards.count(place, length)
        return view

    def _opened(self) -> tuple[str, ShardSource]:
        with self._lock:
            if not self._left:
                raise CheckpointError(f"missing {self._entry.path}: no copy of it is left")
            if self._current is None:
                self._current = self._shards.source(self._left[0], self._entry, self._stack)
            return self._left[0], self._current

    def another(self, why: str, turn: int | None = None) -> bool:
        with self._lock:
            if turn in (None, self.turn) and self._left:
                place, instead = self._left.pop(0), next(iter(self._left), "")
                failure = self._failures.get(self.turn)
                self._shards.give_up(place, self._entry, why, failure, instead)
                self._current = None
                self.turn += 1
            return bool(self._left)


class _OwnShard:
    """A shard inside an image of this place, which stays unchanged while its lease is held.

    In memory it is used where it lies. On a disk it is read: a mapping would turn a bad sector into a signal
    that ends the process.
    """

    at_once = READ_SLICE
    turn = 0
    concurrent = True

    def __init__(self, descriptor: int, file: CopyFile, *, in_memory: bool) -> None:
        self._descriptor = descriptor
        self._file = file
        self._whole: memoryview | None = None
        if in_memory and file.size and os.fstat(descriptor).st_size >= file.start + file.size:
            # Private, so that nothing can get into the image through it; writable, because torch requires it.
            how = mmap.MAP_PRIVATE
            skipped = file.start % mmap.ALLOCATIONGRANULARITY
            length, start = skipped + file.size, file.start - skipped
            self._map = mmap.mmap(descriptor, length, flags=how, offset=start)
            self._whole = memoryview(self._map)[skipped:]
            self._skipped = skipped

    def read_into(self, view: memoryview, offset: int, *, until: int = 0) -> None:
        del until
        read_at(self._descriptor, view, self._file.start + offset, self._file.path)

    def in_place(self, offset: int, length: int) -> memoryview | None:
        if self._whole is None:
            return None
        start = (self._skipped + offset) // mmap.PAGESIZE * mmap.PAGESIZE
        with contextlib.suppress(OSError, ValueError):
            self._map.madvise(_POPULATE_READ, start, self._skipped + offset + length - start)
        return self._whole[offset : offset + length]

    def another(self, why: str, turn: int | None = None) -> bool:
        del why, turn
        return False


class _PeerLine:
    """The connection to one peer, for one thread at a time."""

    def __init__(self, reader: PeerReader) -> None:
        self.reader = reader
        self.lock = threading.Lock()
        self.silent = ""
        """Why it is asked for nothing more."""


class _PeerShard:
    at_once = FROM_PEER
    turn = 0
    concurrent = False

    def __init__(self, peer: _PeerLine, checkpoint: str, path: str) -> None:
        self._peer = peer
        self._checkpoint = checkpoint
        self._path = path

    def in_place(self, offset: int, length: int) -> memoryview | None:
        del offset, length
        return None

    def read_into(self, view: memoryview, offset: int, *, until: int = 0) -> None:
        with self._peer.lock:
            if self._peer.silent:  # found by another thread, while this one waited for its turn
                raise _NoAnswerError(f"missing {self._path}: {self._peer.silent}")
            try:
                self._peer.reader.read_into(
                    view, checkpoint=self._checkpoint, path=self._path, offset=offset, until=until
                )
            except GoneError as error:
                raise _GoneCopyError(f"missing {self._path}: {error}") from error
            except PeerError as error:  # `missing`, because it says nothing about any storage
                self._peer.silent = str(error)
                raise _NoAnswerError(f"missing {self._path}: {error}") from error

    def another(self, why: str, turn: int | None = None) -> bool:
        del why, turn
        return False
