"""Which memory of this process a fork freezes, and how much of the host's is left for that.

A child sees private memory as it was at the fork, whatever its parent does afterwards. Not so memory that is
shared (`share_memory_()`, a mapped file, a staging buffer), which both see change; memory that its owner
keeps from children (MADV_DONTFORK) or has wiped in them (MADV_WIPEONFORK); and huge pages of the kernel's own
pool, which may run out under the child. `/proc/self/maps` tells the first at almost no cost, so the trainer
reads that; the rest only `/proc/self/smaps` tells, which takes as long as a fork, so the child reads its own.
"""

from __future__ import annotations

import bisect
import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

from holdfast.checkpoint.local_room import memory_left

Range = tuple[int, int]
"""First address, and the one behind the last."""

_NOT_FROZEN = {b"sh": "is shared", b"wf": "is wiped in a child", b"ht": "is in the pool of huge pages"}
"""Of the kernel's VmFlags."""
_CHUNK = 1 << 20


class Mapping(NamedTuple):
    """One line of `/proc/self/maps`."""

    start: int
    end: int
    private: bool
    """Private and no file's: what a fork freezes, as far as that can be told here."""
    path: str
    shared: bool = False
    """What a child writes there, its parent reads."""


class Frozen:
    """What a fork would freeze, as the mappings are now."""

    def __init__(self, mappings: Sequence[Mapping]) -> None:
        self._mappings = mappings
        self._starts = [mapping.start for mapping in mappings]

    def holds(self, start: int, end: int) -> bool:
        """Whether every byte of a range is frozen by a fork."""
        at = bisect.bisect_right(self._starts, start) - 1
        while start < end:
            if not 0 <= at < len(self._mappings):
                return False
            mapping = self._mappings[at]
            if not (mapping.private and mapping.start <= start < mapping.end):
                return False
            start, at = mapping.end, at + 1
        return True

    def shares(self, start: int, end: int) -> bool:
        """Whether some byte of a range would be the same memory in a child: what it writes, all read."""
        at = max(0, bisect.bisect_right(self._starts, start) - 1)
        while at < len(self._mappings) and self._mappings[at].start < end:
            if self._mappings[at].shared and start < self._mappings[at].end:
                return True
            at += 1
        return False

    @property
    def device(self) -> str:
        """A device whose memory this process has mapped (a GPU, a network adapter); empty if there is none.

        What its driver does to memory that it has pinned when its process forks is not known here.
        """
        for mapping in self._mappings:
            if mapping.path.startswith("/dev/") and not mapping.path.startswith(("/dev/shm/", "/dev/zero")):
                return mapping.path
        return ""


def frozen(maps: str = "/proc/self/maps") -> Frozen:
    """What a fork would freeze now; raises OSError where the kernel does not tell."""
    return Frozen([_mapping(line) for line in read(maps).splitlines()])


def _mapping(line: bytes) -> Mapping:
    fields = line.split(None, 5)
    start, _, end = fields[0].partition(b"-")
    path = os.fsdecode(fields[5]) if len(fields) > 5 else ""
    private = fields[1][3:4] == b"p" and int(fields[4]) == 0
    return Mapping(int(start, 16), int(end, 16), private, path, fields[1][3:4] == b"s")


def read(path: str) -> bytes:
    """The whole of a file of the kernel's, with as little of Python as can be: a child calls this too."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        chunks = []
        while chunk := os.read(descriptor, _CHUNK):
            chunks.append(chunk)
        return b"".join(chunks)
    finally:
        os.close(descriptor)


def not_frozen(ranges: Iterable[Range], smaps: str = "/proc/self/smaps") -> str:
    """In a child: what of these ranges does not hold what it held at the fork, and why; empty if all does."""
    known: list[tuple[int, int, str]] = []
    start = end = 0
    for line in read(smaps).splitlines():
        if line.startswith(b"VmFlags:"):
            flags = line.split()[1:]
            known.append((start, end, next((why for flag, why in _NOT_FROZEN.items() if flag in flags), "")))
        elif b"-" in line[:17] and b":" not in line[:17]:
            first, _, rest = line.partition(b"-")
            start, end = int(first, 16), int(rest.split(None, 1)[0], 16)
    starts = [entry[0] for entry in known]
    for low, high in ranges:
        at = bisect.bisect_right(starts, low) - 1
        while low < high:
            if not 0 <= at < len(known) or not known[at][0] <= low < known[at][1]:
                return f"memory at {low:#x} was not given to the child"
            if known[at][2]:
                return f"memory at {low:#x} {known[at][2]}"
            low, at = known[at][1], at + 1
    return ""


class HostMemory(NamedTuple):
    """What a choice between fork and block wants to know, in bytes."""

    private: int
    """Of this process, and no file's: what training may write, page by page, while a child looks on."""
    free: int
    """On this host, or under the limits of the job, for this rank alone."""
    total: int


def host_memory(ranks: int = 1) -> HostMemory:
    """`ranks`: how many of this host take their snapshots at the same time."""
    host = _kilobytes("/proc/meminfo")
    free = min(host.get("MemAvailable", 0), memory_left())
    status = _kilobytes("/proc/self/status")
    private = status.get("RssAnon", 0) + status.get("VmSwap", 0)
    return HostMemory(private, free // max(1, ranks), host.get("MemTotal", 0))


def _kilobytes(path: str) -> dict[str, int]:
    found = {}
    for line in Path(path).read_text().splitlines():
        name, _, rest = line.partition(":")
        words = rest.split()
        if len(words) == 2 and words[1] == "kB":
            found[name] = int(words[0]) * 1024
    return found
