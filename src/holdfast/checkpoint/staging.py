"""Staging buffers: host memory that a trainer fills and its writer process reads.

A buffer is an anonymous memory file: shared with the writer by its descriptor, visible to nobody else, and
gone with the last process that holds it; or, where it is to become a local copy as it is, a file in memory
(local_slots.py). Its contents are the shard to be written, byte for byte; what
surrounds the tensors' bytes is put in when the plan changes, so a save copies nothing but tensors. A buffer's
memory is taken at once and in full: too little of it is an error at that moment, not a crash at a later one.
"""

from __future__ import annotations

import ctypes
import logging
import mmap
import operator
import os
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import torch

from holdfast.checkpoint import fingerprint as fingerprints
from holdfast.checkpoint.failures import FAILURES, about
from holdfast.checkpoint.pinned import Pinned, pin, prefault
from holdfast.checkpoint.plan import Plan
from holdfast.checkpoint.writer import check_size, plain
from holdfast.errors import SaveFailedError

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
