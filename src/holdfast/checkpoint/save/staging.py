"""Staging one rank's snapshot: from live tensors into memory that its writer process reads.

A buffer is an anonymous memory file: shared with the writer by its descriptor, visible to nobody else, and
gone with the last process that holds it; or, where it is to become a local copy as it is, a file in memory
(copies/slots.py). Its contents are the shard to be written, byte for byte; what
surrounds the tensors' bytes is put in when the plan changes, so a save copies nothing but tensors. A buffer's
memory is taken at once and in full: too little of it is an error at that moment, not a crash at a later one.
"""

from __future__ import annotations

import ctypes
import logging
import mmap
import operator
import os
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import torch

from holdfast.checkpoint.format import FAILURES, about, check_size, plain
from holdfast.checkpoint.format import fingerprint as fingerprints
from holdfast.checkpoint.save.device import DeviceStager, InFlight, Owned, Piece, Pinned, pin, prefault
from holdfast.checkpoint.save.plan import Plan
from holdfast.checkpoint.save.snapshot import Snapshot
from holdfast.checkpoint.state import Tracked, uncollected
from holdfast.errors import SaveFailedError
from holdfast.policy import Choice, Setting, Way, choose_snapshot, owned_enough

log = logging.getLogger("holdfast.checkpoint")

SLICE = 512 * 1024
"""Fingerprinted and copied at a time, so that the copy finds the bytes in the processor's cache."""


is_cpu = operator.attrgetter("is_cpu")


class Buffer:
    """One staging buffer, as the trainer sees it."""

    def __init__(self, index: int, descriptor: int | None = None) -> None:
        """`descriptor`: of a file in memory, instead of an anonymous one."""
        self.index = index
        self.size = 0
        self.plan = 0
        """The plan whose frames it holds."""
        if descriptor is None:
            descriptor = os.memfd_create(f"holdfast-staging-{index}", os.MFD_CLOEXEC)
        self.descriptor = descriptor
        self._map: mmap.mmap | None = None
        self._pinned: Pinned | None = None
        self.bytes: np.ndarray[tuple[int], np.dtype[np.uint8]] = np.empty(0, np.uint8)

    def prepare(self, plan: Plan) -> bool:
        """Make it fit a plan; whether its memory is a new one, which the writer must be told of."""
        grown = self.grow(plan.layout.size)
        if self.plan != plan.number:
            self.plan = 0
            for item, frame in zip(plan.layout.items, plan.frames, strict=True):
                end = item.offset + item.length
                self.bytes[item.offset : item.raw_offset] = np.frombuffer(frame.before, np.uint8)
                self.bytes[item.raw_offset + item.raw_length : end] = np.frombuffer(frame.after, np.uint8)
            self.plan = plan.number
        return grown

    def grow(self, size: int) -> bool:
        """Have at least so much memory, taken now; whether it is a new one."""
        if size <= self.size:
            return False
        size += -size % mmap.PAGESIZE
        self._unpin()
        try:
            os.ftruncate(self.descriptor, size)
            mapped = mmap.mmap(self.descriptor, size, mmap.MAP_SHARED)
            # On several cores; where the kernel cannot or there is too little, the second says so.
            if not prefault(torch.frombuffer(mapped, dtype=torch.uint8)):
                os.posix_fallocate(self.descriptor, 0, size)
            self._map = mapped
        except OSError as error:
            os.ftruncate(self.descriptor, self.size)  # what was got of it is given back
            raise SaveFailedError(
                f"no memory for a staging buffer of {size} bytes: {error.strerror}. Asynchronous saves need "
                "one to two of them a rank; set checkpoint.when_busy = 'skip' for one, or async_save = false"
            ) from error
        self.size, self.plan = size, 0
        self.bytes = np.frombuffer(self._map, np.uint8)
        return True

    def pinned(self) -> torch.Tensor:
        """The same memory, page-locked for copies from a device; locked at the first call, which is slow."""
        if self._pinned is None:
            self._pinned = pin(torch.from_numpy(self.bytes))
            if self._pinned.note:
                log.warning("holdfast: %s", self._pinned.note)
        return self._pinned.buffer

    def _unpin(self) -> None:
        pinned, self._pinned = self._pinned, None
        if pinned is not None and (problem := pinned.release()):
            log.warning("holdfast: %s", problem)

    def close(self) -> None:
        self._unpin()
        self.bytes = np.empty(0, np.uint8)
        self._map = None  # unmapped with the last view of it
        if self.descriptor >= 0:
            os.close(self.descriptor)
            self.descriptor = -1


def stage_from_host(
    buffer: Buffer,
    plan: Plan,
    tensors: Sequence[torch.Tensor],
    known: dict[int, str],
    threads: int,
) -> dict[int, str]:
    """Copy the tensors that are on the host into a buffer; their fingerprints, taken in the same pass."""
    all_here: Sequence[int] = range(len(tensors))
    if not all(map(is_cpu, tensors)):
        all_here = [at for at in all_here if tensors[at].is_cpu]
    found, here = _stage_small(buffer, plan, tensors, known, all_here)

    def one(at: int) -> str:
        item = plan.layout.items[at]
        try:
            source = plain(tensors[at]).numpy()
        except FAILURES as error:
            raise about(item.name, error) from error
        check_size(item, source.nbytes)
        target = buffer.bytes[item.raw_offset : item.raw_offset + item.raw_length]
        if at in known:
            target[:] = source
            return known[at]
        hasher = fingerprints.Hasher("x")
        for start in range(0, source.nbytes, SLICE):
            piece = source[start : start + SLICE]
            hasher.update(piece.data)
            target[start : start + SLICE] = piece
        return hasher.done()

    if threads == 1 or len(here) < 2:
        return found | {at: one(at) for at in here}
    with ThreadPoolExecutor(threads, thread_name_prefix="holdfast-stage") as pool:
        return found | dict(zip(here, pool.map(one, here), strict=True))


def _stage_small(
    buffer: Buffer, plan: Plan, tensors: Sequence[torch.Tensor], known: dict[int, str], here: Sequence[int]
) -> tuple[dict[int, str], list[int]]:
    """Copy the small ones among these, which no thread is worth; their fingerprints, and who is left."""
    base, size = int(buffer.bytes.ctypes.data), buffer.bytes.nbytes
    memories = fingerprints.small_memories([tensors[at] for at in here])
    found: dict[int, str] = {}
    left: list[int] = []
    for at, memory, (offset, wanted) in zip(here, memories, _raw_places(plan, here), strict=True):
        if memory is None:
            left.append(at)
            continue
        length = len(memory)
        if wanted != length or not 0 <= offset <= size - length:
            item = plan.layout.items[at]
            check_size(item, length)
            raise SaveFailedError(f"{item.name} ends behind the staging buffer, which has {size} bytes")
        found[at] = known.get(at) or fingerprints.of_small(memory)
        ctypes.memmove(base + offset, memory, length)
    return found, left


def _raw_places(plan: Plan, here: Sequence[int]) -> Iterable[tuple[int, int]]:
    places = plan.raw_places
    return places if len(here) == len(places) else [places[at] for at in here]


# Staging one rank's snapshot: from live tensors, wherever they are, into a buffer.
#
# Those on a device are copied in the way that the policy (policy/upkeep.py) chooses: clone, overlap or
# block. That copy may go on while training does; `Staged` then says when it is complete, and whether it can
# be believed. Those on the host are copied at once.


STAGING_THREADS = 8
"""At most so many copy from host memory; a few more fill the memory's bandwidth no further."""


class Staged:
    """A snapshot on its way into a buffer."""

    def __init__(self, prints: dict[int, str], at: list[int], flight: InFlight | None) -> None:
        self._prints = prints
        self._at = at
        """The positions of what is in flight."""
        self._flight = flight

    def done(self) -> bool:
        """Whether the buffer holds all of it. Never blocks."""
        return self._flight is None or self._flight.done()

    def boundary(self) -> None:
        """The next step is about to begin: nothing may change under the copy."""
        if self._flight is not None:
            self._flight.boundary()

    def torn(self) -> str:
        """Why it must not be used; empty if it may. Final once `done`."""
        return self._flight.torn() if self._flight is not None else ""

    def fingerprints(self) -> list[str]:
        """In the layout's order; once it is done. May be called from any thread, unlike all else here."""
        found = dict(self._prints)
        if self._flight is not None:
            found.update(zip(self._at, self._flight.fingerprints(), strict=True))
        return [found[at] for at in range(len(found))]

    def release(self) -> None:
        """Let go of the device; waits until it is done."""
        if self._flight is not None:
            self._flight.release()

    @property
    def copy_seconds(self) -> float:
        """From a device; 0 if nothing was."""
        return self._flight.copy_seconds() if self._flight is not None else 0.0


class Stager:
    """Stages the snapshots of one rank."""

    def __init__(
        self,
        setting: Setting,
        *,
        timeout: float,
        step_seconds: Callable[[], float | None],
        tell: Callable[[Choice], None],
        devices: DeviceStager | None = None,
    ) -> None:
        self._setting = setting
        self._step_seconds = step_seconds
        self._tell = tell
        self._told: Choice | None = None
        self._devices = devices or DeviceStager(timeout=timeout)
        self._copy_seconds: float | None = None
        self._torn = False

    def prepare(self, devices: set[torch.device]) -> None:
        """Pay at the start for what the first snapshot from a device would."""
        for device in devices:
            self._devices.prepare(device)

    @uncollected()
    def stage(self, snapshot: Snapshot, buffer: Buffer, tracked: Tracked) -> Staged:
        """Begin to copy a snapshot into a buffer that was prepared for its plan."""
        tensors, items = snapshot.tensors, snapshot.plan.layout.items
        all_here = all(map(is_cpu, tensors))
        elsewhere = [] if all_here else [at for at, tensor in enumerate(tensors) if not tensor.is_cpu]
        flight: InFlight | None = None
        if elsewhere:  # first: what training may change soonest
            pieces = [Piece(tensors[at], items[at].raw_offset, items[at].raw_length, items[at].name)
                      for at in elsewhere]  # fmt: skip
            owned = Owned(tracked.optimizers())
            way = self._choose(pieces, owned)
            trusted = None if self._torn else owned
            flight = self._devices.begin(pieces, buffer.pinned(), way, trusted)
            for note in flight.notes:
                log.warning("holdfast: %s", note)
        threads = min(STAGING_THREADS, torch.get_num_threads())
        prints = stage_from_host(buffer, snapshot.plan, tensors, snapshot.prints, threads)
        return Staged(prints, elsewhere, flight)

    def note(self, staged: Staged) -> None:
        """A snapshot is done: what it took counts for the next choice."""
        self._copy_seconds = staged.copy_seconds or self._copy_seconds
        if staged.torn():
            self.was_torn()

    def was_torn(self) -> None:
        """A snapshot was changed while it was copied: from now on nothing is copied from live tensors."""
        self._torn = True

    def _choose(self, pieces: list[Piece], owned: Owned) -> Way:
        needed: dict[torch.device, int] = {}
        for piece in pieces:
            needed[piece.tensor.device] = needed.get(piece.tensor.device, 0) + piece.nbytes
        memory = {device: self._devices.memory(device) for device in needed}
        tightest = min(needed, key=lambda device: memory[device].free - needed[device])
        choice = choose_snapshot(
            self._setting,
            free_bytes=memory[tightest].free,
            needed_bytes=needed[tightest],
            device_bytes=memory[tightest].total,
            copy_seconds=self._copy_seconds,
            step_seconds=self._step_seconds(),
            has_owned=owned_enough(owned.nbytes(pieces), sum(needed.values())),
            torn_before=self._torn,
        )
        if self._told is None or (choice.way, choice.warning) != (self._told.way, self._told.warning):
            self._told = choice
            self._tell(choice)
        return choice.way
