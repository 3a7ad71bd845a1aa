"""Room for one more local copy: measured before it is taken, made by giving older copies up.

What a place may take is bounded by its file system, by checkpoint.non_persistent_max_bytes, and, in memory,
by the memory limit of the job, which counts every page of a file there. What is given up is chosen by
checkpoint/copies/rules.py. A rank gives up its own copies, and those that no rank of this place stages into:
replicas, and what was left by ranks that are no longer here.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec

from holdfast.checkpoint.copies import tier as local_manifest
from holdfast.checkpoint.copies.rules import HeldCheckpoint, Room, make_room
from holdfast.checkpoint.copies.tier import CopyRecord, LocalTier
from holdfast.errors import SaveFailedError
from holdfast.health import CGROUPS, OWN, cgroup_memory
from holdfast.journal import Event
from holdfast.journal.events import CopiesDropped
from holdfast.record import ControlDirectory

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
    """Why there is none; empty if there is."""
    own: list[CopyRecord]
    """This rank's copies that have to go for it: their owner takes them back, and may use the memory."""


class LocalRoom:
    """Room in one place, as seen and made by one of its ranks."""

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
        """The same, also within the limit of the place."""
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
                        "rank of this node is not getting its memory"
                    )
                time.sleep(_POLL)
            yield
        finally:
            os.close(descriptor)

    def make(
        self, needed: int, *, on_line: Callable[[CopyRecord], bool], busy: Callable[[CopyRecord], bool]
    ) -> Made:
        """Make room for an image of `needed` bytes, as far as possible. Call it only while `alone`."""
        records = self._tier.records()
        mine = [record for record in records if self._may_go(record)]
        held = self._held(mine, on_line, busy)
        limit = 0
        if self._limit:
            others = self._used() - sum(checkpoint.nbytes for checkpoint in held)
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
    ) -> list[HeldCheckpoint]:
        committed = {str(name) for name in local_manifest.names(self._control)}
        by_checkpoint: dict[str, list[CopyRecord]] = {}
        for record in records:
            by_checkpoint.setdefault(record.checkpoint, []).append(record)
        return [
            HeldCheckpoint(
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
