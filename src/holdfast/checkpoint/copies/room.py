"""Slots: the image files of a place that one rank stages its snapshots into.

In memory (tmpfs) a slot is the staging buffer itself: what the trainer copies the state into is the file that
becomes the local copy, and nothing is copied again. On a disk a slot is a file of the right size, which the
writer process fills.

Guarantee: a slot is given out only while no record says that it holds a copy, and while nobody reads it or is
at work on it. A copy is taken back for its memory in this order: what is off the line, then the oldest beyond
the ones to keep, and within these only for want of room (checkpoint/copies/rules.py). The newest one on the
line is never taken back. There are at most `keep` + 2 slots: the copies that are kept, one that is being
staged, and one whose copy is still being drained. They are made as they are needed; those that an earlier
attempt left are used again, and what they hold counts until then.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import logging
import mmap
import os
import re
import time
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec

from holdfast.checkpoint.copies import tier as local_manifest
from holdfast.checkpoint.copies.rules import Held, Room, make_room
from holdfast.checkpoint.copies.tier import CopyRecord, LocalTier
from holdfast.checkpoint.format import CheckpointName
from holdfast.checkpoint.save import Buffer, Plan
from holdfast.errors import HoldfastError, SaveFailedError
from holdfast.health import CGROUPS, OWN, cgroup_memory
from holdfast.journal import CopiesDropped, Event
from holdfast.record import ControlDirectory

# Room for one more local copy: measured before it is taken, made by giving older copies up.
#
# What a place may take is bounded by its file system, by checkpoint.non_persistent_max_bytes, and, in memory,
# by the memory limit of the job, which counts every page of a file there. What is given up is chosen by
# checkpoint/copies/rules.py. A rank gives up its own copies, and those that no rank of this place stages
# into: replicas, and what ranks that are no longer here have left.


TMPFS = 0x01021994
LOCK_PATIENCE = 60.0
"""Seconds for which a rank waits until the others of its place have taken their memory."""
_POLL = 0.005
_ANY = 1 << 62


class _StatFs(ctypes.Structure):
    _fields_ = (("kind", ctypes.c_long), ("rest", ctypes.c_long * 31))


def is_in_memory(path: Path) -> bool:
    """Whether a directory is on tmpfs: its files are memory that can be mapped and page-locked."""
    found = _StatFs()
    libc = ctypes.CDLL(None, use_errno=True)
    return bool(libc.statfs(os.fsencode(path), ctypes.byref(found)) == 0 and found.kind == TMPFS)


def memory_left(own: Path = OWN, groups: Path = CGROUPS) -> int:
    """Bytes that this process may still take under the memory limits of its job; very many if none is set.

    What the kernel can drop at once (pages of files on disks) counts as free.
    """
    found = cgroup_memory(groups, own)
    return _ANY if found is None else max(0, found.limit - found.used)


class Made(msgspec.Struct, frozen=True):
    """What came of asking for room."""

    why: str
    """Why there is none; empty: there is."""
    own: list[CopyRecord]
    """Copies of this rank that are to go for it: to be taken back by their owner, who may use the memory."""


class LocalRoom:
    """Room in one place, as one of its ranks sees to it."""

    def __init__(
        self,
        tier: LocalTier,
        control: ControlDirectory,
        *,
        rank: int,
        here: frozenset[int],
        node: str,
        limit: int,
        keep: int,
        tell: Callable[[Event], None],
    ) -> None:
        """`here`: the ranks of this place; `limit`: bytes that the place may take, 0 for any."""
        self._tier = tier
        self._control = control
        self._rank = rank
        self._here = here | {rank}
        self._node = node
        self._limit = limit
        self._keep = keep
        self._tell = tell
        self.in_memory = is_in_memory(tier.path)

    def free(self) -> int:
        """Bytes that can be taken now."""
        about = os.statvfs(self._tier.path)
        free = about.f_bavail * about.f_frsize
        return min(free, memory_left()) if self.in_memory else free

    def left(self) -> int:
        """The same, under the limit of the place too."""
        return min(self.free(), self._limit - self._used()) if self._limit else self.free()

    @contextlib.contextmanager
    def alone(self) -> Iterator[None]:
        """While this is held, no other rank of the place measures or takes."""
        descriptor = os.open(self._tier.path / "room.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        deadline = time.monotonic() + LOCK_PATIENCE
        try:
            while True:
                with contextlib.suppress(BlockingIOError):
                    fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    break
                if time.monotonic() > deadline:
                    raise SaveFailedError(
                        f"{self._tier.path / 'room.lock'} stayed locked for {LOCK_PATIENCE:g} s: another "
                        "rank of this node does not get its memory"
                    )
                time.sleep(_POLL)
            yield
        finally:
            os.close(descriptor)

    def make(
        self, needed: int, *, on_line: Callable[[CopyRecord], bool], busy: Callable[[CopyRecord], bool]
    ) -> Made:
        """Room for an image of so many bytes, as far as that can be had. Call it `alone`."""
        records = self._tier.records()
        mine = [record for record in records if self._may_go(record)]
        held = self._held(mine, on_line, busy)
        limit = 0
        if self._limit:
            others = self._used() - sum(one.nbytes for one in held)
            limit = max(1, self._limit - max(0, others))
        room = make_room(held, needed=needed, free=self.free(), limit=limit, keep=self._keep)
        own = [record for record in mine if record.checkpoint in room.drop and self._is_own(record)]
        self._give_up(room, [record for record in mine if not self._is_own(record)])
        return Made(room.why, own)

    def _may_go(self, record: CopyRecord) -> bool:
        return record.kind == "replica" or record.rank == self._rank or record.rank not in self._here

    def _is_own(self, record: CopyRecord) -> bool:
        return record.kind == "own" and record.rank == self._rank

    def _held(
        self,
        records: list[CopyRecord],
        on_line: Callable[[CopyRecord], bool],
        busy: Callable[[CopyRecord], bool],
    ) -> list[Held]:
        committed = {str(name) for name in local_manifest.names(self._control)}
        by_checkpoint: dict[str, list[CopyRecord]] = {}
        for record in records:
            by_checkpoint.setdefault(record.checkpoint, []).append(record)
        return [
            Held(
                checkpoint=checkpoint,
                step=copies[0].name.step,
                nbytes=sum(self._size(record) for record in copies),
                on_line=any(map(on_line, copies)),
                complete=checkpoint in committed,
                busy=any(busy(record) or self._tier.is_read(record) for record in copies),
            )
            for checkpoint, copies in by_checkpoint.items()
        ]

    def _give_up(self, room: Room, droppable: list[CopyRecord]) -> None:
        names: dict[str, str] = dict(zip(room.drop, room.reasons, strict=True))
        gone: dict[str, int] = {}
        for record in droppable:
            size = self._size(record)
            if record.checkpoint in names and self._tier.drop(record):
                gone[record.checkpoint] = gone.get(record.checkpoint, 0) + size
        if gone:
            self._tell(
                CopiesDropped(
                    node=self._node,
                    checkpoints=list(gone),
                    reasons=[names[name] for name in gone],
                    bytes=sum(gone.values()),
                )
            )

    def _size(self, record: CopyRecord) -> int:
        with contextlib.suppress(OSError):
            return self._tier.image(record).stat().st_blocks * 512
        return 0

    def _used(self) -> int:
        """Bytes that all images of the place take, whoever stages into them."""
        total = 0
        for path in self._tier.images.iterdir():
            with contextlib.suppress(OSError):
                total += path.stat().st_blocks * 512
        return total


log = logging.getLogger("holdfast.checkpoint")

FIRST_INDEX = 8
"""Of a slot, as the writer process knows it; smaller ones are staging buffers."""
SPARE = 2
"""Slots beyond the copies to keep."""
REMEMBERED = 1000
"""Saves of this attempt; more than there can be copies of."""
FAILURES = 2
"""Local saves in a row that fail before the local tier is left alone for a while."""
LEFT_ALONE = 3
"""Saves for which it is."""


class Slot:
    """One image file of this rank. In memory it is mapped when it is first used, and stays so."""

    def __init__(self, index: int, path: Path) -> None:
        self.index = index
        self.path = path
        self.buffer: Buffer | None = None
        """In memory only."""
        self.size = 0
        """Bytes that it is known to have."""

    @property
    def image(self) -> str:
        return self.path.name

    def take(self, size: int, *, in_memory: bool) -> None:
        """Have so many bytes, all of them really there; raises SaveFailedError if they are not."""
        if in_memory and self.buffer is None:
            self.buffer = Buffer(self.index, _open(self.path))
        if self.buffer is not None:
            self.buffer.grow(size)
            self.size = self.buffer.size
            return
        descriptor = _open(self.path)
        try:
            os.ftruncate(descriptor, 0)
            if size:
                os.posix_fallocate(descriptor, 0, size)
        except OSError as error:
            os.ftruncate(descriptor, 0)
            raise SaveFailedError(
                f"no room for a local copy of {size} bytes at {self.path}: {error}"
            ) from error
        finally:
            os.close(descriptor)
        self.size = size

    def allocated(self) -> int:
        """Bytes that its file takes now, whoever made it."""
        with contextlib.suppress(OSError):
            return self.path.stat().st_blocks * 512
        return 0

    def fits(self, size: int) -> bool:
        """Whether it has exactly so much memory, so that to have it changes nothing."""
        with contextlib.suppress(OSError):
            return size > 0 and self.path.stat().st_size == size + -size % mmap.PAGESIZE
        return False

    def is_there(self) -> bool:
        """Whether the file that it has mapped is still the one of this name."""
        if self.buffer is None:
            return True
        with contextlib.suppress(OSError):
            return os.path.samestat(self.path.stat(), os.fstat(self.buffer.descriptor))
        return False

    def close(self) -> None:
        if self.buffer is not None:
            self.buffer.close()
            self.buffer = None


class Refusal(msgspec.Struct, frozen=True):
    """Why there is no slot."""

    busy: bool
    """It passes: the writer is at work on the ones there are, or somebody reads them."""
    why: str


class LocalSlots:
    """The slots of one rank."""

    def __init__(
        self, tier: LocalTier, room: LocalRoom, *, rank: int, keep: int, is_free: Callable[[int], bool]
    ) -> None:
        """`is_free`: whether no save that is under way needs the slot with this index."""
        self.tier = tier
        self._room = room
        self._rank = rank
        self._keep = keep
        self._is_free = is_free
        self._head: CheckpointName | None = None
        self._saved: deque[CheckpointName] = deque(maxlen=REMEMBERED)
        self._slots: list[Slot] = []
        self._made = 0
        self._reserved: Slot | None = None
        self._failed = 0
        self._left_alone = {False: 0, True: 0}
        """For how many more saves, by whether they go to the checkpoint root too."""
        self._trouble = ""
        self._find_left()

    @property
    def in_memory(self) -> bool:
        return self._room.in_memory

    @property
    def count(self) -> int:
        return len(self._slots)

    def resumed_from(self, head: CheckpointName | None) -> None:
        """Copies of steps beyond this are of a way that the run has left."""
        self._head = head

    # --- giving one out -------------------------------------------------------------------------------------

    def reserve(self, size: int, *, globally: bool = False) -> Refusal | None:
        """See to it that there is a slot of at least this size to be staged into; None: there is.

        `globally`: for a save that goes to the checkpoint root too.
        """
        if self._left_alone[globally]:
            self._left_alone[globally] -= 1
            return Refusal(False, f"the last local save failed: {self._trouble}")
        try:
            return self._reserve(size)
        except (OSError, HoldfastError) as error:
            return Refusal(False, str(error))
        except Exception as error:  # noqa: BLE001 - the other ranks wait to hear whether this one has room
            return Refusal(False, f"{type(error).__name__}: {error}")

    def use(self, name: CheckpointName) -> Slot:
        """The slot that was reserved; from now on it is this save's."""
        slot, self._reserved = self._reserved, None
        assert slot is not None
        self._saved.append(name)
        return slot

    def _reserve(self, size: int) -> Refusal | None:
        self._forget_lost()
        self._reserved = self._reserved or self._free(size) or self._beyond_keep()
        if self._reserved is not None and self._reserved.size >= size:
            return None
        with self._room.alone():
            if self._reserved is None and (refused := self._find_room(size)):
                return refused
            slot = self._reserved
            assert slot is not None
            missing = size - slot.allocated()
            if missing > 0 and (why := self._make_room(missing).why):
                return Refusal(False, why)
            slot.take(size, in_memory=self.in_memory)
        return None

    def _find_room(self, size: int) -> Refusal | None:
        """No slot is free: make one, or give up a copy that is within the ones to keep."""
        made = self._make_room(size)
        self._reserved = self._take_back_first(made.own)
        if self._reserved is None and len(self._slots) >= self._keep + SPARE:
            return Refusal(True, f"all {len(self._slots)} slots are being drained, sent or read")
        if self._reserved is None and made.why:
            passes = any(not self._is_free(slot.index) for slot in self._slots)
            return Refusal(passes, made.why)
        if self._reserved is None:
            self._reserved = self._new()
        return None

    def _make_room(self, needed: int) -> Made:
        return self._room.make(needed, on_line=self.on_line, busy=self._is_held)

    def _free(self, size: int) -> Slot | None:
        """One that holds no copy, if possible large enough already."""
        taken = {record.image for record in self._records()}
        free = [
            slot
            for slot in self._slots
            if slot.image not in taken and self._is_free(slot.index) and self.tier.is_idle(slot.image)
        ]
        return max(free, key=lambda slot: (min(slot.size, size), -slot.index), default=None)

    def _beyond_keep(self) -> Slot | None:
        """The memory of what is off the line, or of the oldest beyond the copies to keep."""
        records = self._records()
        line = [record for record in records if self.on_line(record)]
        off = [record for record in records if not self.on_line(record)]
        return self._take_back_first([*reversed(off), *reversed(line[self._keep :])])

    def _take_back_first(self, records: list[CopyRecord]) -> Slot | None:
        slots = {slot.image: slot for slot in self._slots}
        for record in records:
            slot = slots.get(record.image)
            if slot is None:  # its image is gone, or is of no use here
                self.tier.drop(record)
            elif self._is_free(slot.index) and self.tier.take_back(record):
                return slot
        return None

    def _records(self) -> list[CopyRecord]:
        """This rank's own copies, the newest of the line first."""
        return [record for record in self.tier.records(self._rank) if record.kind == "own"]

    def on_line(self, record: CopyRecord) -> bool:
        """Whether a copy is of the present timeline, as far as names tell: this attempt saved it, or it is
        the head or below it. What goes beyond the head was left behind."""
        head, name = self._head, record.name
        return name in self._saved or (head is not None and (name.step < head.step or name == head))

    def _is_held(self, record: CopyRecord) -> bool:
        """Whether a save that is under way, such as a drain, needs it."""
        return any(slot.image == record.image and not self._is_free(slot.index) for slot in self._slots)

    # --- the files ------------------------------------------------------------------------------------------

    def _find_left(self) -> None:
        """What an earlier attempt left. It is not touched now: a resume may be about to read it."""
        own = re.compile(rf"{self._rank:05d}\.[0-9a-f]{{1,2}}")
        for path in sorted(self.tier.images.iterdir()):
            if own.fullmatch(path.name):
                self._slots.append(Slot(self._next_index(), path))

    def _new(self) -> Slot:
        taken = {slot.image for slot in self._slots}
        names = (f"{self._rank:05d}.{number:x}" for number in range(256))
        slot = Slot(self._next_index(), self.tier.images / next(name for name in names if name not in taken))
        self._slots.append(slot)
        return slot

    def _next_index(self) -> int:
        self._made += 1
        return FIRST_INDEX + self._made - 1

    def _forget_lost(self) -> None:
        """Somebody took an image's name away: its memory is no local copy any more, whatever is in it."""
        for slot in [slot for slot in self._slots if not slot.is_there() and self._is_free(slot.index)]:
            slot.close()
            self._slots.remove(slot)
            self._reserved = None if self._reserved is slot else self._reserved

    def prepare(self, plan: Plan, *, pin: bool) -> None:
        """Have now, as far as there is room, what saves will need; nothing is given up for it.

        What a slot holds stays as it is: it is only mapped, and page-locked.
        """
        size = plan.layout.size
        taken = {record.image for record in self._records()}
        held = [slot for slot in self._slots if slot.image in taken and slot.fits(size)]
        free = [slot for slot in self._slots if slot.image not in taken and self.tier.is_idle(slot.image)]
        with self._room.alone():
            for slot in held if self.in_memory else ():
                self._have(slot, size, pin=pin)
            for _ in range(max(0, self._keep + 1 - len(taken))):
                if not free and self._room.left() < size:
                    return
                slot = free.pop(0) if free else self._new()
                if slot.allocated() < size and self._room.left() < size:
                    return
                self._have(slot, size, pin=pin)
                if slot.buffer is not None:
                    slot.buffer.prepare(plan)

    def _have(self, slot: Slot, size: int, *, pin: bool) -> None:
        slot.take(size, in_memory=self.in_memory)
        if pin and slot.buffer is not None:
            slot.buffer.pinned()

    # --- how it goes ----------------------------------------------------------------------------------------

    def went_well(self) -> None:
        self._failed = 0
        self._left_alone = {False: 0, True: 0}

    def went_wrong(self, why: str) -> None:
        """A local save failed. No checkpoint may be lost to the root by that: the next ones go there alone.

        After some in a row the tier is left alone by all saves for a while.
        """
        self._failed += 1
        self._trouble = why
        self._left_alone[True] = LEFT_ALONE
        if self._failed >= FAILURES:
            self._failed, self._left_alone[False] = 0, LEFT_ALONE

    def close(self, *, tidy: bool) -> None:
        """Let go of the memory, which the copies keep; `tidy`: what holds none is given back."""
        taken = {record.image for record in self._records()} if tidy else set()
        for slot in self._slots:
            slot.close()
            if tidy and slot.image not in taken and self.tier.is_idle(slot.image):
                slot.path.unlink(missing_ok=True)
        self._slots, self._reserved = [], None


def _open(path: Path) -> int:
    return os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
