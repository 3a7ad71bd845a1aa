"""Slots: the image files of a place that one rank stages its snapshots into.

In memory (tmpfs) a slot is the staging buffer itself: what the trainer copies the state into is the file that
becomes the local copy, and nothing is copied again. On a disk a slot is a file of the right size, which the
writer process fills.

Guarantee: a slot is given out only while no record says that it holds a copy, and while nobody reads it or is
at work on it. Copies are taken back for their memory in this order: what is off the line, then the oldest
beyond the ones to keep, and within these only for want of room (checkpoint/copies/rules.py). The newest one
on the line is never taken back. There are at most `keep` + 2 slots: the copies that are kept, one that is
being staged, and one whose copy is still being drained. They are made as they are needed; those that an
earlier attempt left are used again, and what they hold counts until then.
"""

from __future__ import annotations

import contextlib
import logging
import mmap
import os
import re
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import torch

from holdfast.checkpoint.copies.room import LocalRoom, Made
from holdfast.checkpoint.copies.tier import CopyRecord, LocalTier
from holdfast.checkpoint.format import CheckpointName
from holdfast.checkpoint.save import Buffer, Plan, TooLittleError
from holdfast.errors import HoldfastError, SaveFailedError

log = logging.getLogger("holdfast.checkpoint")

FIRST_INDEX = 8
"""The first slot's index, as the writer process knows it; smaller ones are staging buffers'."""
SPARE = 2
"""Slots beyond the copies to keep."""
REMEMBERED = 1000
"""How many of this attempt's saves are remembered; more than there can be copies of."""
FAILURES = 2
"""Local saves in a row that fail before the local tier is left alone for a while."""
LEFT_ALONE = 3
"""For how many saves it is left alone."""
AT_ONCE = 64 * 1024 * 1024
"""Bytes of a file on a disk that are allocated at a time beside training."""


class Slot:
    """One image file of this rank. In memory it is mapped when it is first used, and stays mapped."""

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
        """Have `size` bytes, all of them really allocated; raises SaveFailedError if they cannot be."""
        if in_memory and self.buffer is None:
            self.buffer = Buffer(self.index, _open(self.path))
        if self.buffer is not None:
            self.buffer.grow(size)
            self.size = self.buffer.there
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

    def unmade(self) -> int:
        """Bytes that its file takes already, but that are not known to it: an earlier attempt's."""
        return max(0, self.allocated() - self.buffer.there) if self.buffer is not None else 0

    def fits(self, size: int) -> bool:
        """Whether it has exactly this much memory, so that to take it changes nothing."""
        with contextlib.suppress(OSError):
            return size > 0 and self.path.stat().st_size == size + -size % mmap.PAGESIZE
        return False

    def is_there(self) -> bool:
        """Whether the file that it has mapped is still the one with this name."""
        if self.buffer is None:
            return True
        with contextlib.suppress(OSError):
            return os.path.samestat(self.path.stat(), os.fstat(self.buffer.descriptor))
        return False

    def close(self) -> None:
        if self.buffer is not None:
            self.buffer.close()
            self.buffer = None


class SlotRefusal(msgspec.Struct, frozen=True):
    """Why there is no slot."""

    busy: bool
    """It will pass: the writer is at work on the existing slots, or somebody is reading them."""
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
        self.replicated: deque[CheckpointName] = deque(maxlen=2)
        """The newest that are replicated. The next one is not begun before the older of them is on all peers
        or has failed, so one of them is whole if a node is lost; where not every save is replicated, they
        are kept beyond their turn."""
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
        """Copies of steps beyond this belong to a line that the run has left."""
        self._head = head
        self.replicated.clear()
        if head is not None:
            self.replicated.append(head)

    # --- giving one out -------------------------------------------------------------------------------------

    def reserve(self, size: int, *, globally: bool = False) -> SlotRefusal | None:
        """Make sure that there is a slot of at least this size to stage into; None: there is.

        `globally`: for a save that goes to the checkpoint root too.
        """
        if self._left_alone[globally]:
            self._left_alone[globally] -= 1
            return SlotRefusal(False, f"the last local save failed: {self._trouble}")
        try:
            return self._reserve(size)
        except (OSError, HoldfastError) as error:
            return SlotRefusal(False, str(error))
        except Exception as error:  # noqa: BLE001 - the other ranks wait to hear whether this one has room
            return SlotRefusal(False, f"{type(error).__name__}: {error}")

    def use(self, name: CheckpointName) -> Slot:
        """The slot that was reserved; from now on it is this save's."""
        slot, self._reserved = self._reserved, None
        assert slot is not None
        self._saved.append(name)
        return slot

    def _reserve(self, size: int) -> SlotRefusal | None:
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
                return SlotRefusal(False, why)
            slot.take(size, in_memory=self.in_memory)
        return None

    def _find_room(self, size: int) -> SlotRefusal | None:
        """No slot is free: make one, or give up a copy that is within the ones to keep."""
        made = self._make_room(size)
        self._reserved = self._take_back_first(made.own)
        behind = any(name in list(self._saved)[:-2] for name in self.replicated)
        if self._reserved is None and len(self._slots) >= self._keep + SPARE + behind:
            return SlotRefusal(True, f"all {len(self._slots)} slots are being drained, sent or read")
        if self._reserved is None and made.why:
            passes = any(not self._is_free(slot.index) for slot in self._slots)
            return SlotRefusal(passes, made.why)
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
        replicated = [record for record in line if record.name in self.replicated]
        others = [record for record in line if record not in replicated]
        beyond = [one for one in others[max(0, self._keep - len(replicated)) :] if one is not line[0]]
        return self._take_back_first([*reversed(off), *reversed(beyond)])

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
        """Whether a copy belongs to the present timeline, judged by names: this attempt saved it, or it is
        the head or below it. What is beyond the head was left behind."""
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
        """If somebody took an image's name away, its memory is no longer a local copy, whatever is in it."""
        for slot in [slot for slot in self._slots if not slot.is_there() and self._is_free(slot.index)]:
            slot.close()
            self._slots.remove(slot)
            self._reserved = None if self._reserved is slot else self._reserved

    def prepare(
        self, plan: Plan, *, pin: torch.device | None, left: Callable[[], int]
    ) -> Iterator[Buffer | None]:
        """Allocate beside training, as far as there is room, what saves will need; see `GettingReady`.

        Nothing is given up for it. What a slot holds stays as it is: it is only mapped, and page-locked.
        `left`: bytes of memory that may be taken.
        """
        wanted = plan.layout.size
        if self.in_memory:
            for held in [slot for slot in self._slots if slot.image in self._taken() and slot.fits(wanted)]:
                yield from self._map(held, wanted, pin=pin)
        while (slot := self._next_to_make(wanted)) is not None:
            try:
                yield from self._make(slot, wanted, lambda: min(left(), self._room.left()))
            except (OSError, TooLittleError):
                self._unmake(slot)
                raise
            if (buffer := slot.buffer) is None:
                continue
            if not buffer.plan and self._is_free(slot.index) and slot is not self._reserved:
                yield from buffer.frame(plan)
            if pin is not None and not buffer.locked:
                yield buffer
                buffer.lock(pin)

    def _taken(self) -> set[str]:
        return {record.image for record in self._records()}

    def _map(self, slot: Slot, wanted: int, *, pin: torch.device | None) -> Iterator[Buffer | None]:
        """Map an image that lies there already."""
        buffer = slot.buffer = slot.buffer or Buffer(slot.index, _open(slot.path))
        try:
            yield from buffer.take(wanted, lambda: wanted)
        except OSError:
            slot.close()
            raise
        slot.size = max(slot.size, buffer.there)
        if pin is not None and not buffer.locked:
            yield buffer
            buffer.lock(pin)

    def _next_to_make(self, wanted: int) -> Slot | None:
        """The next slot to allocate; None if there are enough, or there is no room for it."""
        taken = self._taken()
        enough = [slot for slot in self._slots if slot.image in taken or slot.size >= wanted]
        if len(enough) > self._keep:
            return None
        free = [
            slot
            for slot in self._slots
            if slot not in enough and self._is_free(slot.index) and self.tier.is_idle(slot.image)
        ]
        if wanted - (free[0].allocated() if free else 0) > self._room.left():
            return None
        return free[0] if free else self._new()

    def _make(self, slot: Slot, wanted: int, left: Callable[[], int]) -> Iterator[None]:
        if self.in_memory:
            buffer = slot.buffer = slot.buffer or Buffer(slot.index, _open(slot.path))
            yield from buffer.take(wanted, lambda: left() + slot.unmade())
            slot.size = max(slot.size, buffer.there)
            return
        at = 0
        while at < wanted and slot.size < wanted:  # a save that comes in between allocates all of it
            descriptor = _open(slot.path)
            try:
                if at == 0:
                    os.ftruncate(descriptor, 0)
                length = min(wanted - at, AT_ONCE)
                os.posix_fallocate(descriptor, at, length)
            finally:
                os.close(descriptor)
            at += length
            yield
        slot.size = max(slot.size, wanted)

    def _unmake(self, slot: Slot) -> None:
        """Give back what was allocated of a slot, unless a save has taken it meanwhile."""
        if slot in self._slots and slot is not self._reserved and self._is_free(slot.index):
            slot.close()
            self._slots.remove(slot)
            if slot.image not in self._taken() and self.tier.is_idle(slot.image):
                slot.path.unlink(missing_ok=True)

    # --- how it goes ----------------------------------------------------------------------------------------

    def went_well(self) -> None:
        self._failed = 0
        self._left_alone = {False: 0, True: 0}

    def went_wrong(self, why: str) -> None:
        """A local save failed. The root must not lose a checkpoint by that: its next ones go there alone.

        After some failures in a row, all saves leave the tier alone for a while.
        """
        self._failed += 1
        self._trouble = why
        self._left_alone[True] = LEFT_ALONE
        if self._failed >= FAILURES:
            self._failed, self._left_alone[False] = 0, LEFT_ALONE

    def close(self, *, tidy: bool, but: Buffer | None = None) -> None:
        """Let go of the memory, which the copies keep; `tidy`: memory that holds none is given back.

        `but`: somebody else closes this one.
        """
        taken = self._taken() if tidy else set()
        for slot in self._slots:
            if slot.buffer is None or slot.buffer is not but:
                slot.close()
            if tidy and slot.image not in taken and self.tier.is_idle(slot.image):
                slot.path.unlink(missing_ok=True)
        self._slots, self._reserved = [], None


def _open(path: Path) -> int:
    return os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
