"""One device's training stream and side stream: everything about snapshots that is specific to CUDA.

Guarantee: no call here makes the host wait for the device, given page-locked memory. The training stream is
whatever stream is current on the device when a call is made; streams and events are made once and used again.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol

import torch

LARGE = 8 * 1024**2
"""From this size on a tensor is copied within the device by a call of its own; smaller ones share kernels."""


@dataclass(frozen=True, slots=True)
class DeviceMemory:
    free: int
    """Bytes that could be allocated."""
    total: int


class Mark(Protocol):
    """A point in a stream's work."""

    def query(self) -> bool:
        """Whether the device has come past it. Never blocks."""


class Lane(Protocol):
    """What a snapshot needs of a device."""

    def guard(self) -> AbstractContextManager[Any]:
        """What is launched inside runs on this device."""

    def side(self) -> AbstractContextManager[Any]:
        """What is launched inside runs on the side stream."""

    def fork(self) -> None:
        """What the side stream is given from here on waits for what the training stream was given so far."""

    def mark(self) -> Mark:
        """Marks the current stream's work so far."""

    def hold(self, mark: Mark) -> None:
        """What the training stream is given from here on waits for the mark, on the device."""

    def capturing(self) -> bool:
        """Whether the training stream only records its work into a graph."""

    def seconds(self, start: Mark, end: Mark) -> float:
        """The device's time between two marks that it has come past."""

    def recycle(self, marks: Iterable[Mark]) -> None:
        """The marks are not needed any more."""

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
        if to:  # one call for all: a loop in C++ over asynchronous copies
            torch._foreach_copy_(list(to), list(source), non_blocking=True)


def _event() -> torch.cuda.Event:
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]


def is_locked(buffer: torch.Tensor) -> bool:
    """Whether host memory is page-locked, from its first byte to its last.

    Asked of tensors made for the purpose, since torch looks at where a tensor's whole storage begins.
    """
    whole = buffer.view(-1).numpy()
    return torch.from_numpy(whole).is_pinned() and torch.from_numpy(whole[-1:]).is_pinned()


def device_memory(device: torch.device) -> DeviceMemory:
    """What could be allocated: free, or kept in one piece by torch's caching allocator.

    Remainders of blocks that are partly in use are not counted: whether they fit is luck.
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
