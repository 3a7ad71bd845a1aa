"""Snapshots of tensors on CUDA devices into host memory, holding training up as little as possible.

Guarantee: once `InFlight.done()` is true and `torn()` is empty, the buffer holds every piece as it was when
`begin` was called; should it ever not, the fingerprints, taken on the training stream before anything else,
differ from the staged bytes. Every wait has a deadline, and only `block` makes the host wait at all.

How each way orders the copy relative to training (policy/upkeep.py says when each is chosen):

clone    pieces are copied within the device on the training stream; a side stream copies that to the host.
overlap  the side stream copies straight from the live tensors that a torch optimizer owns. A hook before
         every optimizer step, and the next step boundary, make the training stream wait for that copy, on
         the device. The tensors' versions are compared there first: if anything else changed one, the
         snapshot is torn. All other pieces are cloned, or copied at once where there is no room for a clone.
block    pieces are copied to the host on the training stream, and the host waits.

Only the thread that trains may call `begin`, `boundary` and `release`; any thread may call the rest. The
hook may run on an autograd thread (an optimizer inside the backward pass).
"""

from __future__ import annotations

import contextlib
import ctypes
import itertools
import logging
import mmap
import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

from holdfast.base import plural, size, tree_leaves
from holdfast.checkpoint.format import fingerprint, naming
from holdfast.errors import SaveFailedError, UsageError
from holdfast.policy import Way, clone_bytes

if TYPE_CHECKING:
    from holdfast.checkpoint.save.plan import Plan

log = logging.getLogger("holdfast.checkpoint")

# Page-locks the host memory that snapshots are copied into, once, so that every copy runs at full speed.
#
# Guarantee: a buffer that cannot be page-locked says so (`note`) and still works, only slower. What was
# registered here is unregistered exactly once, by `release`; memory registered by others is left to them.


_POPULATE_WRITE = 23
"""MADV_POPULATE_WRITE (Linux 5.14): allocates and maps the pages of a range, keeping their contents."""
_HUGEPAGE = 14
"""MADV_HUGEPAGE: a hint, which counts where the kernel's `shmem_enabled` is `advise`."""
_PORTABLE = 1
"""cudaHostRegisterPortable: page-locked for every device of the process."""
_SLICE = 256 * 1024**2

_libc = ctypes.CDLL(None, use_errno=True)  # its calls let other threads run; `mmap.madvise` does not


class Pinned:
    """A host buffer and whether it is page-locked. Make it with `pin`."""

    def __init__(self, buffer: torch.Tensor, *, registered: bool, locked: bool, note: str) -> None:
        self.buffer = buffer
        self.locked = locked
        """Copies from a device into it run at full speed and without the host."""
        self.note = note
        """What is not as it should be; empty if all is well."""
        self._registered = registered

    def release(self) -> str:
        """Unlocks what `pin` locked; returns what went wrong, if anything. No copy may be under way."""
        if not self._registered:
            return ""
        self._registered = self.locked = False
        error = _cudart().cudaHostUnregister(self.buffer.data_ptr())
        return "" if int(error) == 0 else f"the buffer could not be unlocked: {_told(error)}"


def pin(buffer: torch.Tensor, *, threads: int = 4, faulted: bool = False) -> Pinned:
    """Page-locks `buffer`, a contiguous CPU tensor; its memory must stay mapped until `release`.

    `faulted`: all its pages are there already.
    """
    if not torch.cuda.is_available():
        return Pinned(buffer, registered=False, locked=False, note="not page-locked: there is no CUDA device")
    if buffer.nbytes == 0:
        return Pinned(buffer, registered=False, locked=True, note="")
    torch.cuda.init()  # type: ignore[no-untyped-call]
    if is_locked(buffer):
        return Pinned(buffer, registered=False, locked=True, note="it was page-locked already")
    if not faulted:
        prefault(buffer, threads=threads)
    error = _cudart().cudaHostRegister(buffer.data_ptr(), buffer.nbytes, _PORTABLE)
    if int(error) == 0:
        return Pinned(buffer, registered=True, locked=True, note="")
    _forget_error()
    return Pinned(
        buffer,
        registered=False,
        locked=False,
        note=f"{buffer.nbytes} bytes of host memory could not be page-locked ({_told(error)}): "
        "snapshots block training and copy at a fraction of the speed",
    )


def prefault(buffer: torch.Tensor, *, threads: int = 4) -> bool:
    """Makes the kernel allocate all pages of `buffer`, on several cores; False where it cannot.

    Registration by itself faults pages in on one core, which takes many seconds for tens of gigabytes.
    """
    page = mmap.PAGESIZE
    start, end = buffer.data_ptr(), buffer.data_ptr() + buffer.nbytes
    start = -(-start // page) * page  # a page shared with something else is left to the registration
    slices = [(at, min(_SLICE, end - at)) for at in range(start, end, _SLICE)]
    with ThreadPoolExecutor(max(1, min(threads, os.cpu_count() or 1))) as pool:
        return all(pool.map(lambda piece: _populate(*piece), slices))


def _populate(address: int, length: int) -> bool:
    return _advise(address, length, _POPULATE_WRITE)


def fault_in(memory: np.ndarray[tuple[int], np.dtype[np.uint8]]) -> bool:
    """The same for a piece that begins at a page, in one call on this thread."""
    return _populate(memory.ctypes.data, memory.nbytes)


def ask_for_huge_pages(memory: np.ndarray[tuple[int], np.dtype[np.uint8]]) -> None:
    """Before any of it is faulted in. Nothing changes where the kernel does not give them."""
    _advise(memory.ctypes.data, memory.nbytes, _HUGEPAGE)


def _advise(address: int, length: int, advice: int) -> bool:
    return bool(_libc.madvise(ctypes.c_void_p(address), ctypes.c_size_t(length), ctypes.c_int(advice)) == 0)


def _cudart() -> Any:
    return torch.cuda.cudart()  # type: ignore[no-untyped-call]


def _told(error: object) -> str:
    return str(_cudart().cudaGetErrorString(error))


def _forget_error() -> None:
    """CUDA remembers a failed call, and the next kernel launch anywhere would raise it: raise it here."""
    with contextlib.suppress(RuntimeError):
        torch.ones(1, device="cuda")  # a kernel, because a memset would not check for the error


# The memory that a snapshot is staged into.
#
# A buffer is an anonymous memory file: shared with the writer by its descriptor, visible to nobody else, and
# gone with the last process that holds it; or, where it is itself to become a local copy, a file in memory
# (copies/slots.py). Its contents are the shard to be written, byte for byte; what surrounds the tensors'
# bytes is put in when the plan changes, so a save copies nothing but tensors. A buffer's memory is allocated
# at once and in full: a lack of it is an error at that moment, not a crash at a later one.


TAKEN = 4 * 1024**2
"""Bytes faulted in at a time: for about as long a call of the trainer that maps memory may have to wait."""
LOOK = 64 * 1024**2
"""Bytes after which to look again how much memory is left."""
FRAMES = 256
"""Tensors whose surroundings are written at a time."""


class TooLittleError(Exception):
    """There is not enough memory to take a buffer beside training."""

    def __init__(self, needed: int, free: int) -> None:
        super().__init__(f"{size(needed)} more are needed and {size(max(0, free))} may be taken")


class Buffer:
    """One staging buffer, as the trainer sees it."""

    def __init__(self, index: int, descriptor: int | None = None) -> None:
        """`descriptor`: that of a file in memory, to be used instead of an anonymous one."""
        self.index = index
        self.size = 0
        """Bytes that are mapped."""
        self.there = 0
        """How many of them, from the first on, are really allocated; all of them once `grow` has returned."""
        self.plan = 0
        """The plan whose frames it holds."""
        if descriptor is None:
            descriptor = os.memfd_create(f"holdfast-staging-{index}", os.MFD_CLOEXEC)
        self.descriptor = descriptor
        self._map: mmap.mmap | None = None
        self._pinned: Pinned | None = None
        self.bytes: np.ndarray[tuple[int], np.dtype[np.uint8]] = np.empty(0, np.uint8)

    def prepare(self, plan: Plan) -> None:
        """Make it fit a plan."""
        self.grow(plan.layout.size)
        if self.plan != plan.number:
            for _ in self.frame(plan):
                pass

    def frame(self, plan: Plan) -> Iterator[None]:
        """Put in what surrounds the tensors' bytes, some of it at a time."""
        self.plan = 0
        for at, (item, frame) in enumerate(zip(plan.layout.items, plan.frames, strict=True)):
            end = item.offset + item.length
            self.bytes[item.offset : item.raw_offset] = np.frombuffer(frame.before, np.uint8)
            self.bytes[item.raw_offset + item.raw_length : end] = np.frombuffer(frame.after, np.uint8)
            if at % FRAMES == FRAMES - 1:
                yield
                if self.plan:  # a save has come in between, and has put in its own
                    return
        self.plan = plan.number

    def grow(self, size: int) -> None:
        """Make sure it has at least this much memory, allocated now."""
        if size <= self.there:
            return
        try:
            self._map_at_least(size)
            # On several cores; where the kernel cannot, or memory is short, the second call says so.
            if not prefault(torch.from_numpy(self.bytes[self.there :])):
                os.posix_fallocate(self.descriptor, self.there, self.size - self.there)
        except OSError as error:
            self.give_back()
            raise SaveFailedError(
                f"no memory for a staging buffer of {size} bytes: {error.strerror}. Asynchronous saves need "
                "one to two of them a rank; set checkpoint.when_busy = 'skip' for one, or async_save = false"
            ) from error
        self.there = self.size

    def take(self, size: int, left: Callable[[], int]) -> Iterator[None]:
        """The same beside training: a slice at a time, each short, and only while there is room for the rest.

        `left`: bytes that may be taken at present. Raises TooLittleError, or OSError. A save that comes in
        between may use it and `grow` it; then there is nothing left to do here.
        """
        looked = 0
        while self.there < size and self.descriptor >= 0:
            if looked <= self.there:
                looked = self.there + LOOK
                if (free := left()) < size - self.there:
                    raise TooLittleError(size - self.there, free)
            self._map_at_least(size)
            length = min(TAKEN, self.size - self.there)
            if not fault_in(self.bytes[self.there : self.there + length]):
                os.posix_fallocate(self.descriptor, self.there, length)
            self.there += length
            yield

    def _map_at_least(self, size: int) -> None:
        if size <= self.size:
            return
        size += -size % mmap.PAGESIZE
        self._unpin()
        os.ftruncate(self.descriptor, size)
        self._map = mmap.mmap(self.descriptor, size, mmap.MAP_SHARED)
        self.size, self.plan = size, 0
        self.bytes = np.frombuffer(self._map, np.uint8)
        ask_for_huge_pages(self.bytes)

    def give_back(self) -> None:
        """Let go of the memory, and of what is in it."""
        self._unpin()
        self._map, self.bytes = None, np.empty(0, np.uint8)  # unmapped with the last view of it
        self.size = self.there = self.plan = 0
        if self.descriptor >= 0:
            with contextlib.suppress(OSError):
                os.ftruncate(self.descriptor, 0)

    @property
    def locked(self) -> bool:
        """Whether it is page-locked; also if that was tried in vain."""
        return self._pinned is not None

    def memory(self) -> torch.Tensor:
        """All of it, page-locked or not."""
        return self._pinned.buffer if self._pinned is not None else torch.from_numpy(self.bytes)

    def lock(self, device: torch.device | None = None) -> None:
        """Page-lock it for copies from a device, once, which is slow.

        `device`: one that this process uses, for a thread that has chosen none. Another would be opened.
        """
        if self._pinned is None:
            with torch.cuda.device(device):
                pinned = pin(torch.from_numpy(self.bytes), faulted=self.there == self.size)
            if pinned.note:
                log.warning("holdfast: %s", pinned.note)
            self._pinned = pinned

    def _unpin(self) -> None:
        pinned, self._pinned = self._pinned, None
        if pinned is not None and (problem := pinned.release()):
            log.warning("holdfast: %s", problem)

    def close(self) -> None:
        self._unpin()
        self._map, self.bytes = None, np.empty(0, np.uint8)
        if self.descriptor >= 0:
            os.close(self.descriptor)
            self.descriptor = -1


# One device's training stream and side stream: everything about snapshots that is specific to CUDA.
#
# Guarantee: with page-locked memory, no call here makes the host wait for the device. The training stream is
# whichever stream is current on the device when a call is made; streams and events are made once and reused.


LARGE = 8 * 1024**2
"""From this size up, a tensor is copied within the device by its own call; smaller ones share kernels."""


@dataclass(frozen=True, slots=True)
class DeviceMemory:
    free: int
    """Bytes that could be allocated."""
    total: int


class Mark(Protocol):
    """A point in a stream's work."""

    def query(self) -> bool:
        """Whether the device has passed it. Never blocks."""


class Lane(Protocol):
    """What a snapshot needs of a device."""

    def guard(self) -> AbstractContextManager[Any]:
        """What is launched inside runs on this device."""

    def side(self) -> AbstractContextManager[Any]:
        """What is launched inside runs on the side stream."""

    def fork(self) -> None:
        """Work given to the side stream from here on waits for what the training stream was given so far."""

    def mark(self) -> Mark:
        """Marks the current stream's work so far."""

    def hold(self, mark: Mark) -> None:
        """Work given to the training stream from here on waits for the mark, on the device."""

    def capturing(self) -> bool:
        """Whether the training stream is only recording its work into a graph."""

    def seconds(self, start: Mark, end: Mark) -> float:
        """The device's time between two marks that it has passed."""

    def recycle(self, marks: Iterable[Mark]) -> None:
        """The marks are no longer needed."""

    def memory(self) -> DeviceMemory: ...

    def empty(self, nbytes: int) -> torch.Tensor:
        """Bytes on the device; raises torch.OutOfMemoryError."""

    def pinned(self, buffer: torch.Tensor) -> bool: ...

    def within(self, to: Sequence[torch.Tensor], source: Sequence[torch.Tensor]) -> None:
        """Copies bytes within the device, on the current stream."""

    def to_host(self, to: Sequence[torch.Tensor], source: Sequence[torch.Tensor]) -> None:
        """Copies bytes to the host, on the current stream."""


class CudaLane:
    """A CUDA device."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.stream: torch.cuda.Stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._ready = _event()
        self._events: list[torch.cuda.Event] = []

    def guard(self) -> AbstractContextManager[Any]:
        return torch.cuda.device(self.device)

    def side(self) -> AbstractContextManager[Any]:
        return torch.cuda.stream(self.stream)

    def fork(self) -> None:
        self._ready.record(torch.cuda.current_stream(self.device))
        self.stream.wait_event(self._ready)

    def mark(self) -> torch.cuda.Event:
        event = self._events.pop() if self._events else _event()
        event.record(torch.cuda.current_stream(self.device))
        return event

    def hold(self, mark: Mark) -> None:
        torch.cuda.current_stream(self.device).wait_event(mark)  # type: ignore[arg-type]

    def capturing(self) -> bool:
        with self.guard():
            return torch.cuda.is_current_stream_capturing()

    def seconds(self, start: Mark, end: Mark) -> float:
        return float(start.elapsed_time(end)) / 1000  # type: ignore[attr-defined]

    def recycle(self, marks: Iterable[Mark]) -> None:
        self._events.extend(marks)  # type: ignore[arg-type]

    def memory(self) -> DeviceMemory:
        return device_memory(self.device)

    def empty(self, nbytes: int) -> torch.Tensor:
        return torch.empty(nbytes, dtype=torch.uint8, device=self.device)

    def pinned(self, buffer: torch.Tensor) -> bool:
        return is_locked(buffer)

    def within(self, to: Sequence[torch.Tensor], source: Sequence[torch.Tensor]) -> None:
        copy_within(to, source)

    def to_host(self, to: Sequence[torch.Tensor], source: Sequence[torch.Tensor]) -> None:
        if to:  # one call for all of them: a loop in C++ over asynchronous copies
            torch._foreach_copy_(list(to), list(source), non_blocking=True)


def _event() -> torch.cuda.Event:
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]


def is_locked(buffer: torch.Tensor) -> bool:
    """Whether host memory is page-locked, from its first byte to its last.

    Tensors made for the purpose are asked, since torch looks at where a tensor's whole storage begins.
    """
    whole = buffer.view(-1).numpy()
    return torch.from_numpy(whole).is_pinned() and torch.from_numpy(whole[-1:]).is_pinned()


def device_memory(device: torch.device) -> DeviceMemory:
    """What could be allocated: memory that is free, or kept in one piece by torch's caching allocator.

    Remainders of blocks that are partly in use do not count: whether they fit is a matter of luck.
    """
    free, total = torch.cuda.mem_get_info(device)
    stats = torch.cuda.memory_stats(device)
    kept = (
        stats.get("reserved_bytes.all.current", 0)
        - stats.get("active_bytes.all.current", 0)
        - stats.get("inactive_split_bytes.all.current", 0)
    )
    return DeviceMemory(free=int(free) + max(0, int(kept)), total=int(total))


def copy_within(to: Sequence[torch.Tensor], source: Sequence[torch.Tensor], *, large: int = LARGE) -> None:
    """Copies flat uint8 tensors on one device: large ones by a call each, small ones in a few kernels."""
    small: dict[torch.dtype, tuple[list[torch.Tensor], list[torch.Tensor]]] = {}
    for target, tensor in zip(to, source, strict=True):
        if tensor.nbytes >= large:
            target.copy_(tensor)
            continue
        # Eight bytes at a time where the address allows: single bytes would take eight times as many loads.
        wide = all(t.nbytes % 8 == t.data_ptr() % 8 == t.storage_offset() % 8 == 0 for t in (target, tensor))
        word = torch.int64 if wide else torch.uint8
        targets, sources = small.setdefault(word, ([], []))
        targets.append(target.view(word))
        sources.append(tensor.view(word))
    for targets, sources in small.values():
        torch._foreach_copy_(targets, sources)


ALIGNMENT = 512
BUCKET = 1024**3
"""A clone is made of allocations of at most this size (or of one larger piece), to fit into free gaps."""
TIMEOUT = 600.0
"""Seconds after which a copy that has not ended is taken to be hanging."""
_POLL = 0.0002


@dataclass(frozen=True, slots=True, eq=False)
class TensorPiece:
    """The bytes of `tensor`, in row-major order, belong at `offset` of the buffer."""

    tensor: torch.Tensor
    offset: int
    nbytes: int
    name: str = ""


class Owned:
    """The memory that torch optimizers own: their parameters and state, which change only in their `step`.

    An optimizer whose `step` does not call torch's hooks is left out, because its step would not wait.
    """

    def __init__(self, optimizers: Iterable[torch.optim.Optimizer]) -> None:
        self._owners: dict[tuple[torch.device, int, int], torch.Tensor] = {}
        with torch.no_grad():
            for optimizer in optimizers:
                if getattr(type(optimizer).step, "hooked", False):
                    for group in optimizer.param_groups:
                        self._add(group["params"])
                    self._add(list(optimizer.state.values()))

    def _add(self, tree: object) -> None:
        for tensor in tree_leaves(tree):
            if isinstance(tensor, torch.Tensor) and not tensor.is_inference():
                local = tensor.to_local() if hasattr(tensor, "to_local") else tensor
                if local.nbytes:
                    self._owners[(local.device, local.data_ptr(), local.nbytes)] = tensor

    def owner(self, tensor: torch.Tensor) -> torch.Tensor | None:
        """The optimizer's own tensor over the same memory, whose version changes when that is written."""
        return self._owners.get((tensor.device, tensor.data_ptr(), tensor.nbytes))

    def nbytes(self, pieces: Iterable[TensorPiece]) -> int:
        """How many bytes of `pieces` are owned."""
        return sum(piece.nbytes for piece in pieces if self.owner(piece.tensor) is not None)


@dataclass(slots=True)
class _Share:
    """One device's part of a snapshot: its pieces, their bytes on the device, and how each is copied."""

    lane: Lane
    indices: list[int] = field(default_factory=list)
    pieces: list[TensorPiece] = field(default_factory=list)
    sources: list[torch.Tensor] = field(default_factory=list)
    live: list[int] = field(default_factory=list)
    """The next four sort the pieces: read straight from live memory; cloned first; read from a contiguous
    copy that had to be made anyway; copied at once. A piece without bytes is in none of them."""
    cloned: list[int] = field(default_factory=list)
    apart: list[int] = field(default_factory=list)
    blocked: list[int] = field(default_factory=list)
    buckets: list[torch.Tensor] = field(default_factory=list)
    clones: list[torch.Tensor] = field(default_factory=list)
    """Where in the buckets each of `cloned` goes."""
    watched: list[tuple[str, torch.Tensor, int]] = field(default_factory=list)
    """For each live piece: what to call it, the optimizer's tensor, and its version."""

    def divide(self, way: Way, owned: Owned | None) -> None:
        self.live, self.cloned, self.apart, self.blocked, self.watched = [], [], [], [], []
        for at, (piece, source) in enumerate(zip(self.pieces, self.sources, strict=True)):
            if not piece.nbytes:
                continue
            if way == "block":
                self.blocked.append(at)
            elif source.data_ptr() != piece.tensor.data_ptr():
                self.apart.append(at)
            elif way == "overlap" and owned is not None and (owner := owned.owner(piece.tensor)) is not None:
                self.live.append(at)
                name = piece.name or f"piece {self.indices[at]}"
                self.watched.append((name, owner, owner._version))
            else:
                self.cloned.append(at)

    def bytes_of(self, positions: list[int]) -> list[torch.Tensor]:
        return [self.sources[at] for at in positions]


class InFlight:
    """A snapshot whose copy to the host is under way."""

    def __init__(self, way: Way, notes: list[str], timeout: float) -> None:
        self.way: Way = way
        self.notes = notes
        """What was not done as asked, and why; empty if all was."""
        self._timeout = timeout
        self._lock = threading.RLock()
        self._held: list[object] = []
        self._fingerprints: list[tuple[list[int], fingerprint.Pending]] = []
        self._watched: list[tuple[str, torch.Tensor, int]] = []
        self._live: list[tuple[Lane, Mark]] = []
        self._ends: list[tuple[Lane, Mark, Mark]] = []
        self._urgent: list[Mark] = []
        self._hook: Any = None
        self._judged = self._done = self._released = False
        self._torn = ""
        self._copy_seconds = 0.0
        self._told: list[str] | None = None

    def done(self) -> bool:
        """Whether the buffer holds all of it. Never blocks."""
        with self._lock:
            if self._done:
                return True
            if not all(end.query() for _, _, end in self._ends):
                return False
            self._judge()
            self._copy_seconds = max((lane.seconds(a, b) for lane, a, b in self._ends), default=0.0)
            self._done = True
            self._held.clear()  # training gets the clone's memory back
            return True

    def wait(self, timeout: float) -> bool:
        """Waits until `done`, for at most `timeout` seconds; says whether it is."""
        return _until(self.done, timeout)

    def boundary(self) -> None:
        """Call it at the next step boundary; harmless at any other. Live tensors may change after it."""
        self._let_change()
        self._unhook()

    def torn(self) -> str:
        """What was changed while it was being copied; empty if nothing is known. Final once `done`."""
        with self._lock:
            return self._torn

    def fingerprints(self) -> list[str]:
        """One for each piece, in the order given, as it was on its device at `begin`."""
        if not self.done():
            raise UsageError("a snapshot's fingerprints were asked for before it was done; wait for it first")
        with self._lock:
            if self._told is None:
                found = {
                    index: text
                    for indices, pending in self._fingerprints
                    for index, text in zip(indices, pending.result(), strict=True)
                }
                self._told = [found[index] for index in sorted(found)]
            return self._told

    def copy_seconds(self) -> float:
        """How long the copy to the host took on the slowest device; 0 before it is done."""
        return self._copy_seconds

    def release(self) -> None:
        """Lets go of everything; waits for a copy under way, so that nobody reuses the buffer beneath it."""
        self._unhook()
        if not self.wait(self._timeout):
            raise SaveFailedError(_hangs(self._timeout))
        self.fingerprints()
        with self._lock:
            if self._released:
                return
            self._released = True
            for lane, start, end in self._ends:
                lane.recycle((start, end))
            for lane, mark in self._live:
                lane.recycle((mark,))
            self._ends, self._live, self._urgent, self._watched, self._fingerprints = [], [], [], [], []

    def _before_step(self, _optimizer: object, _args: object, _kwargs: object) -> None:
        # A step that is captured into a graph changes nothing now, and its replays call no hook. The boundary
        # then finds the versions changed, and rightly so: such a step would not have waited.
        if not any(lane.capturing() for lane, _ in self._live):
            self._let_change()

    def _let_change(self) -> None:
        """Work given to the training stream from here on waits for the copy from live tensors."""
        with self._lock:
            if not self._done:
                self._judge()
                for lane, mark in self._live:
                    lane.hold(mark)

    def _judge(self) -> None:
        """Compares versions, once only: after the first wait, or after the copy, a change does no harm."""
        if self._judged:
            return
        self._judged = True
        changed = [name for name, tensor, version in self._watched if tensor._version != version]
        if changed:
            more = f" (and {plural(len(changed) - 1, 'other')})" if len(changed) > 1 else ""
            self._torn = (
                f"{changed[0]}{more} was changed while it was copied, and not in a torch optimizer's step; "
                "the snapshot may be torn"
            )

    def _unhook(self) -> None:
        # Never from the hook itself or from another thread: torch iterates over its hooks as it calls them.
        if self._hook is not None:
            self._hook.remove()
            self._hook = None


class DeviceStager:
    """Takes snapshots from CUDA devices. Side streams and events are kept; a clone lives only in flight."""

    def __init__(self, *, timeout: float = TIMEOUT, lane: Callable[[torch.device], Lane] = CudaLane) -> None:
        self._timeout = timeout
        self._make = lane
        self._lanes: dict[torch.device, Lane] = {}
        self._tables = fingerprint.Tables()

    def prepare(self, device: torch.device) -> None:
        """Pays at start-up what the first snapshot from a device would cost: a stream, compiling a kernel."""
        self._lane(device)
        fingerprint.prepare(device)

    def memory(self, device: torch.device) -> DeviceMemory:
        """What `policy.choose_snapshot` wants to know about a device."""
        return self._lane(device).memory()

    def begin(
        self, pieces: Sequence[TensorPiece], buffer: torch.Tensor, way: Way, owned: Owned | None = None
    ) -> InFlight:
        """Starts a snapshot of `pieces` as they are now on the current streams of their devices.

        Only what is in `owned` is ever overlapped; without it, a clone that does not fit becomes a block.
        The buffer must stay, and not be read, until the snapshot is done.
        """
        _check(pieces, buffer)
        with torch.no_grad():
            shares = self._shares(pieces)
            prints = []
            for share in shares:  # before all else: whatever goes wrong afterwards then differs from them
                with share.lane.guard():
                    prints.append((share.indices, fingerprint.begin(share.sources, tables=self._tables)))
            way, notes = _divide(shares, buffer, way, owned)
            flight = InFlight(way, notes, self._timeout)
            flight._fingerprints = prints
            for share in shares:
                with share.lane.guard():
                    share.clones = _places(share)
                    share.lane.within(share.clones, share.bytes_of(share.cloned))
            # While the devices are doing that:
            places = cut(buffer, [(piece.offset, piece.nbytes) for piece in pieces])
            for share in shares:
                with share.lane.guard():
                    _launch(flight, share, places)
        if flight._live:
            flight._hook = register_optimizer_step_pre_hook(flight._before_step)
        if not _until(lambda: all(mark.query() for mark in flight._urgent), self._timeout):
            flight._unhook()
            raise SaveFailedError(_hangs(self._timeout))
        return flight

    def _lane(self, device: torch.device) -> Lane:
        if device not in self._lanes:
            self._lanes[device] = self._make(device)
        return self._lanes[device]

    def _shares(self, pieces: Sequence[TensorPiece]) -> list[_Share]:
        shares: dict[torch.device, _Share] = {}
        for index, piece in enumerate(pieces):
            device = piece.tensor.device
            if (share := shares.get(device)) is None:
                share = shares[device] = _Share(self._lane(device))
            share.indices.append(index)
            share.pieces.append(piece)
            with naming(piece.name):
                share.sources.append(_bytes(piece.tensor))
        return list(shares.values())


def _until(condition: Callable[[], bool], timeout: float) -> bool:
    deadline = time.monotonic() + timeout
    while not condition():
        if time.monotonic() >= deadline:
            return False
        time.sleep(_POLL)
    return True


def _hangs(timeout: float) -> str:
    return f"a copy of a snapshot to the host did not end within {timeout:.0f} s; the device may hang"


def _check(pieces: Sequence[TensorPiece], buffer: torch.Tensor) -> None:
    if buffer.dtype != torch.uint8 or buffer.dim() != 1 or not buffer.is_contiguous():
        raise UsageError(f"a snapshot needs flat uint8 memory, not {buffer.dtype} {tuple(buffer.shape)}")
    for piece in pieces:
        if piece.tensor.nbytes != piece.nbytes or not 0 <= piece.offset <= buffer.nbytes - piece.nbytes:
            raise UsageError(
                f"{piece.name or 'a piece'} of {piece.tensor.nbytes} bytes was to be staged as {piece.nbytes}"
                f" at {piece.offset} of a buffer of {buffer.nbytes}"
            )


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor's bytes, flat, on its device: its own memory, or a copy where that is not contiguous."""
    if tensor.is_conj() or tensor.is_neg():
        tensor = tensor.resolve_conj().resolve_neg()
    return tensor.contiguous().view(-1).view(torch.uint8)


def cut(memory: torch.Tensor, places: Sequence[tuple[int, int]]) -> list[torch.Tensor]:
    """Views of flat memory at each (start, length), in one call: one call each takes longer than the copies.

    Raises UsageError where two of them overlap.
    """
    sizes: list[int] = []
    where = [0] * len(places)
    end = 0
    for at in sorted(range(len(places)), key=places.__getitem__):
        start, length = places[at]
        if start < end:
            raise UsageError(f"pieces of a snapshot overlap: one ends at {end}, the next begins at {start}")
        if start > end:
            sizes.append(start - end)
        where[at] = len(sizes)
        sizes.append(length)
        end = start + length
    sizes.append(memory.numel() - end)
    views = torch.unsafe_split_with_sizes(memory, sizes)
    return [views[at] for at in where]


def _divide(
    shares: list[_Share], buffer: torch.Tensor, way: Way, owned: Owned | None
) -> tuple[Way, list[str]]:
    """Decides how every piece is copied and allocates the clones; returns the way it came to, and why."""
    notes: list[str] = []
    if way != "block" and not all(share.lane.pinned(buffer) for share in shares):
        notes.append(
            f"the host buffer is not page-locked, so that {way} would wait for it too; block instead"
        )
        way = "block"
    if way == "overlap" and owned is None:
        notes.append("no torch optimizer is known to own any of the state; block instead of overlap")
        way = "block"
    for share in shares:
        share.divide(way, owned)
    short = _allocate(shares)
    if short and way == "clone":
        way = "overlap" if owned is not None else "block"
        notes.append(f"{short}; {way} instead of clone")
        for share in shares:
            share.divide(way, owned)
        short = _allocate(shares)
    if short:
        notes.append(f"{short}; training waits until whatever no optimizer owns has been copied")
        for share in shares:
            share.blocked, share.cloned = share.cloned, []
    return way, notes


def _allocate(shares: list[_Share]) -> str:
    """Allocates the clones of all devices, or none of them; then returns why.

    Looks before it asks: an allocation that fails makes torch give back its whole cache first, which is slow.
    """
    why = ""
    for share in shares:
        needed = sum(_aligned(share.sources[at].nbytes) for at in share.cloned)
        if not needed or why:
            continue
        memory = share.lane.memory()
        wanted = clone_bytes(needed, memory.total)
        if memory.free < wanted:
            why = f"a clone needs {size(wanted)} with its reserve, {size(memory.free)} are free on the device"
            continue
        try:
            with share.lane.guard():
                for members in _buckets(share):
                    nbytes = sum(_aligned(share.sources[at].nbytes) for at in members)
                    share.buckets.append(share.lane.empty(nbytes))
        except torch.OutOfMemoryError:
            why = f"a clone of {size(needed)} could not be allocated on the device"
    if why:
        for share in shares:
            share.buckets = []
    return why


def _aligned(nbytes: int) -> int:
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


def _buckets(share: _Share) -> list[list[int]]:
    """Which cloned pieces share a bucket: neighbours, up to its size."""
    buckets: list[list[int]] = []
    used = 0
    for at in share.cloned:
        nbytes = _aligned(share.sources[at].nbytes)
        if not buckets or used + nbytes > BUCKET:
            buckets.append([])
            used = 0
        buckets[-1].append(at)
        used += nbytes
    return buckets


def _places(share: _Share) -> list[torch.Tensor]:
    """Where in the buckets each cloned piece goes."""
    found: list[torch.Tensor] = []
    for bucket, members in zip(share.buckets, _buckets(share), strict=True):
        lengths = [share.sources[at].nbytes for at in members]
        starts = itertools.accumulate((_aligned(length) for length in lengths), initial=0)
        found += cut(bucket, list(zip(starts, lengths, strict=False)))
    return found


def _launch(flight: InFlight, share: _Share, places: list[torch.Tensor]) -> None:
    """Starts the copies to the host: first on the training stream, then on the side stream."""

    def host(positions: list[int]) -> list[torch.Tensor]:
        return [places[share.indices[at]] for at in positions]

    lane = share.lane
    if share.blocked:
        begun = lane.mark()
        lane.to_host(host(share.blocked), share.bytes_of(share.blocked))
        ended = lane.mark()
        flight._urgent.append(ended)
        flight._ends.append((lane, begun, ended))
    if share.live or share.cloned or share.apart:
        lane.fork()
        with lane.side():
            begun = lane.mark()
            lane.to_host(host(share.live), share.bytes_of(share.live))
            if share.live:
                flight._live.append((lane, lane.mark()))
            lane.to_host(host(share.cloned + share.apart), share.clones + share.bytes_of(share.apart))
            flight._ends.append((lane, begun, lane.mark()))
    flight._watched += share.watched
    # Live memory too: a parameter's storage may be replaced, and must not be freed during the copy.
    flight._held += [share.buckets, share.sources]
