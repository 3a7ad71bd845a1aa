"""The memory that snapshots are staged into, taken beside training so that no save has to wait for it.

Guarantee: what is done beside training never ends a run. It is done in slices of a few milliseconds, at low
priority; no slice begins while a save is being taken. Only page-locking is one call for a whole buffer,
which a save waits for only if it needs that buffer. A save that comes too early makes the rest itself, at
full speed. Memory is taken only as long as there is enough for all of a buffer and RESERVE beside it; if
there is not, or after an error, what was taken of it is given back. After `close` the thread has ended; if a
driver keeps it for longer, that is reported, and it gives the buffer back itself.

In memory a slot of the local tier is itself a buffer. On a disk a snapshot needs both: a buffer to be copied
into, and the slot that its image is then written to. A save that goes to the checkpoint root may have to do
without the local tier, on all ranks because of one, so such a save needs a free buffer as well.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Literal

import torch

from holdfast.base import duration, size
from holdfast.checkpoint.copies import LocalRoom, LocalSlots, LocalTier, Slot, SlotRefusal
from holdfast.checkpoint.format import CheckpointName, describe, memory_to_spare
from holdfast.checkpoint.save.device import Buffer, TooLittleError
from holdfast.checkpoint.save.plan import Plan
from holdfast.journal import Event
from holdfast.record import ControlDirectory

log = logging.getLogger("holdfast.checkpoint")

RESERVE = 2 * 1024**3
"""Bytes that must be left beside the buffers: for the proof at the first save, and for the trainer."""
NICE = 10
"""Of the thread: where training keeps every core busy, it gets a tenth of one. With less, a slice would last
so long that the trainer's own calls for memory had to wait for it."""


class GettingReady:
    """One thread that gets things ready for saves, slice by slice, beside whatever the trainer does.

    Work is an iterator: each `next` does a slice. What it yields, if anything, is what the next slice, a long
    one, is at work on. Its errors are reported, and end all the work there is.
    """

    def __init__(self, tell: Callable[[str], None]) -> None:
        self._tell = tell
        self._changed = threading.Condition()
        self._work: deque[Iterator[Buffer | None]] = deque()
        self._thread: threading.Thread | None = None
        self._held = self._closed = self._slicing = False
        self._busy_with: Buffer | None = None
        """What a long slice under way is at work on."""
        self._left_to_it: Buffer | None = None
        """What it has to close itself, because nobody waits for it any longer."""

    def add(self, work: Iterator[Buffer | None]) -> None:
        """Do this after all else. If there can be no thread, it is not done, which is reported."""
        with self._changed:
            if self._closed:
                return
            self._work.append(work)
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="holdfast-ahead", daemon=True)
                try:
                    self._thread.start()
                except RuntimeError as error:
                    self._thread = None
                    self._work.clear()
                    self._tell(describe(error))
            self._changed.notify_all()

    def hold(self, timeout: float) -> bool:
        """No slice begins from now on; whether the present one, if it is short, has ended in time."""
        with self._changed:
            self._held = True
            return self._changed.wait_for(lambda: not self._slicing or self._busy_with is not None, timeout)

    def let_go(self) -> None:
        with self._changed:
            self._held = False
            self._changed.notify_all()

    def is_at(self, buffer: Buffer) -> bool:
        """Whether a long slice is at work on this."""
        return self._busy_with is buffer

    def leaves(self, buffer: Buffer, timeout: float) -> bool:
        """Wait until no slice is at work on this; False if that takes too long."""
        with self._changed:
            return self._changed.wait_for(lambda: self._busy_with is not buffer, timeout)

    @property
    def done(self) -> bool:
        """Whether there is nothing left to do."""
        return not self._work

    def stop(self) -> None:
        """Begin no more slices, ever."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def close(self, timeout: float) -> Buffer | None:
        """Stop, and return what a slice that does not end in time is at work on: the thread closes it."""
        self.stop()
        with self._changed:
            thread = self._thread
        if thread is None or thread is threading.current_thread():
            return None
        thread.join(timeout)
        with self._changed:
            self._left_to_it = self._busy_with
            return self._left_to_it

    def _run(self) -> None:
        upcoming: Buffer | None = None
        while True:
            with self._changed:
                self._slicing, self._busy_with = False, None
                if self._left_to_it is not None:
                    self._left_to_it.close()
                self._changed.notify_all()
                self._changed.wait_for(lambda: self._closed or not self._held)
                if self._closed:
                    self._work.clear()
                if not self._work:
                    self._thread = None
                    return
                work, self._slicing, self._busy_with = self._work[0], True, upcoming
            upcoming = None
            try:
                upcoming = next(work)
            except StopIteration:
                with self._changed:
                    self._work.popleft()
            except Exception as error:  # noqa: BLE001 - it must not do any other harm
                with self._changed:
                    self._work.clear()
                self._tell(describe(error))


def at_low_priority() -> None:
    """For the calling thread alone, and for what it starts."""
    with contextlib.suppress(OSError):
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICE)


Readying = Literal["wait", "block"]

LOCK_RATE = 4e9
"""Bytes a second that are page-locked. All three as on an H200."""
PAGEABLE_RATE = 4e9
"""Bytes a second that a device copies to memory that is not page-locked."""
PINNED_RATE = 50e9


def choose_readying(
    *, missing: int, unlocked: int, copied: int, under_way: bool = False
) -> tuple[Readying, list[str]]:
    """Pure: what a save does that comes before its memory is ready: `wait` for that, or `block`.

    `missing` bytes are not allocated yet, which no save can do without; `unlocked` are to be page-locked for
    `copied` bytes from a device. To block is to copy them at once and slowly into memory that is not
    page-locked, while training waits. `under_way`: it is being page-locked, which nothing can interrupt.
    """
    evidence = [f"{size(missing)} of its memory were not there yet"] if missing else []
    if under_way:
        return "wait", [*evidence, f"{size(unlocked)} were being page-locked"]
    if not unlocked or not copied:
        return "wait", evidence
    waiting = unlocked / LOCK_RATE + copied / PINNED_RATE
    blocking = copied / PAGEABLE_RATE
    evidence += [
        f"{size(unlocked)} were not page-locked yet",
        f"to page-lock them first: about {duration(waiting)}",
        f"to copy without: about {duration(blocking)}",
    ]
    return ("wait" if waiting <= blocking else "block"), evidence


@dataclass(frozen=True)
class LocalTarget:
    """The place in the local tier that a rank's saves go to."""

    tier: LocalTier
    node: str
    keep: int
    max_bytes: int = 0
    here: frozenset[int] = frozenset()
    """The ranks of this place; this rank is always one of them."""


class Wants:
    """Where a save is to go, and what came of that wish."""

    def __init__(self, slots: LocalSlots | None, *, globally: bool) -> None:
        self.slots = slots
        self.globally = globally
        self.refused: SlotRefusal | None = None
        """Why this rank has no slot."""
        self.local = False
        """Whether every rank has one."""

    @property
    def cramped(self) -> bool:
        """Whether this rank has no slot, and waiting would not help."""
        return self.refused is not None and not self.refused.busy

    def why_not(self) -> str:
        told = self.refused.why if self.refused is not None else "another rank has no room for it"
        return f"no local copy: {told}"


class StagingMemory:
    """The staging memory of one rank."""

    def __init__(
        self,
        buffers: int,
        control: ControlDirectory,
        rank: int,
        local: LocalTarget | None,
        *,
        is_free: Callable[[int], bool],
        tell: Callable[[Event], None],
    ) -> None:
        """`is_free`: whether no save under way needs the buffer or slot with this index."""
        self._buffers = [Buffer(index) for index in range(buffers)]
        self._is_free = is_free
        self._in_use = contextlib.ExitStack()
        self.slots: LocalSlots | None = None
        if local is not None:
            self._in_use.enter_context(local.tier.in_use())
            room = LocalRoom(
                local.tier,
                control,
                rank=rank,
                here=local.here,
                node=local.node,
                limit=local.max_bytes,
                keep=local.keep,
                tell=tell,
            )
            self.slots = LocalSlots(local.tier, room, rank=rank, keep=local.keep, is_free=is_free)

    def prepare(self, plan: Plan, *, pin: torch.device | None) -> Iterator[Buffer | None]:
        """Allocate it beside training, slice by slice (see `GettingReady`): one buffer or slot after another.

        `pin`: the device for whose sake it is to be page-locked, if there is one.
        """
        at_low_priority()
        in_slots = self.slots is not None and self.slots.in_memory
        for buffer in self._buffers if not in_slots else ():
            if self._is_free(buffer.index):
                try:
                    yield from buffer.take(plan.layout.size, memory_to_take)
                except (OSError, TooLittleError):
                    if self._is_free(buffer.index):
                        buffer.give_back()
                    raise
                if not buffer.plan and self._is_free(buffer.index):
                    yield from buffer.frame(plan)
            if pin is not None and buffer.there and not buffer.locked:
                yield buffer
                buffer.lock(pin)
        if self.slots is not None:
            yield from self.slots.prepare(plan, pin=pin, left=memory_to_take)

    def is_there(self, wants: Wants, size: int | None) -> bool:
        """Whether a save can be staged now; a slot of this size is reserved for it, if the size is known."""
        if wants.slots is not None:
            if size is not None:
                wants.refused = wants.slots.reserve(size, globally=wants.globally)
            if wants.refused is not None and wants.refused.busy:
                return False
            if wants.slots.in_memory and not wants.globally:
                return True
        return any(self._is_free(buffer.index) for buffer in self._buffers)

    def use(self, wants: Wants, name: CheckpointName) -> tuple[Buffer, Slot | None]:
        """The buffer this save is staged into, and the slot for its local copy, if it has one."""
        slot = wants.slots.use(name) if wants.slots is not None and wants.local else None
        if slot is not None and slot.buffer is not None:
            return slot.buffer, slot
        free = [buffer for buffer in self._buffers if self._is_free(buffer.index)]
        return max(free, key=lambda buffer: (buffer.locked, buffer.there, -buffer.index)), slot

    def close(self, *, tidy: bool, but: Buffer | None) -> None:
        """`but`: somebody else closes this one."""
        if self.slots is not None:
            self.slots.close(tidy=tidy, but=but)
        self._in_use.close()
        for buffer in self._buffers:
            if buffer is not but:
                buffer.close()
        self._buffers = []


def memory_to_take() -> int:
    """Bytes that may be taken beside training, within the limits of the job and of the machine."""
    return memory_to_spare() - RESERVE
