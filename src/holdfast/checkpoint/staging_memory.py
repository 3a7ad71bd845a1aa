"""What a snapshot is staged into: a slot of the local tier, or a staging buffer.

In memory a slot is itself a buffer. On a disk a snapshot needs both: a buffer to be copied into, and the slot
that its image is then written to. A save that goes to the checkpoint root may have to do without the local
tier, on all ranks because of one, so for such a save a buffer has to be free as well.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass

from holdfast.checkpoint.identity import CheckpointName
from holdfast.checkpoint.local_room import LocalRoom
from holdfast.checkpoint.local_slots import LocalSlots, Refusal, Slot
from holdfast.checkpoint.local_tier import LocalTier
from holdfast.checkpoint.plan import Plan
from holdfast.checkpoint.save import SaveContext
from holdfast.checkpoint.staging import Buffer
from holdfast.journal.events import Event


@dataclass(frozen=True)
class LocalSaving:
    """What saves need to know of the local tier."""

    tier: LocalTier
    node: str
    keep: int
    max_bytes: int = 0
    here: frozenset[int] = frozenset()
    """The ranks of this place; its own is always one of them."""


class Wants:
    """Where a save is to go, and what became of that."""

    def __init__(self, slots: LocalSlots | None, *, globally: bool) -> None:
        self.slots = slots
        self.globally = globally
        self.refused: Refusal | None = None
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
    """One rank's."""

    def __init__(
        self,
        buffers: int,
        context: SaveContext,
        local: LocalSaving | None,
        *,
        is_free: Callable[[int], bool],
        tell: Callable[[Event], None],
    ) -> None:
        """`is_free`: whether no save that is under way needs the buffer or slot with this index."""
        self._buffers = [Buffer(index) for index in range(buffers)]
        self._is_free = is_free
        self._in_use = contextlib.ExitStack()
        self.slots: LocalSlots | None = None
        if local is not None:
            self._in_use.enter_context(local.tier.in_use())
            rank = context.group.rank
            room = LocalRoom(
                local.tier,
                context.control,
                rank=rank,
                here=local.here,
                node=local.node,
                limit=local.max_bytes,
                keep=local.keep,
                tell=tell,
            )
            self.slots = LocalSlots(local.tier, room, rank=rank, keep=local.keep, is_free=is_free)

    def prepare(self, plan: Plan, *, pin: bool) -> None:
        """Take it before the first save does; raises SaveFailedError if there is too little."""
        if self.slots is not None:
            self.slots.prepare(plan, pin=pin)
        if self.slots is not None and self.slots.in_memory:
            return
        for buffer in self._buffers:
            buffer.prepare(plan)
            if pin:
                buffer.pinned()

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
        """What this save is staged into, and the slot that its local copy will be in, if it has one."""
        slot = wants.slots.use(name) if wants.slots is not None and wants.local else None
        if slot is not None and slot.buffer is not None:
            return slot.buffer, slot
        return next(buffer for buffer in self._buffers if self._is_free(buffer.index)), slot

    def close(self, *, tidy: bool) -> None:
        if self.slots is not None:
            self.slots.close(tidy=tidy)
        self._in_use.close()
        for buffer in self._buffers:
            buffer.close()
        self._buffers = []
