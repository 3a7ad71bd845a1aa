"""Incoming replicas: images that do not count yet, and how they come to count.

```
images/.00003.9f21c07a.part    the image, as large as it will be, filled from its start
images/.00003.9f21c07a.json    what was announced; the digests were taken at the source
images/00003.9f21c07a          the same image once everything in it was verified; its record follows at once
```
Guarantee: a record is written only after every byte that lies in the image was digested there and every file
had the announced digest. Whatever happens before that leaves no record. If the same replica is announced
again after a cut, the transfer continues from what is there, up to the first chunk whose digest is wrong.

Whoever works on a partial image keeps it locked, so that nobody else, be it another connection or the server
of an earlier attempt that has not ended yet, continues it or clears it away.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import logging
import mmap
import os
import re
import threading
import time
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

import msgspec
import xxhash

from holdfast.base import read_regular, replace_atomic
from holdfast.checkpoint.copies.tier import CopyFile, CopyRecord, LocalTier
from holdfast.checkpoint.copies.wire import AnnouncedFile, Announcement
from holdfast.checkpoint.format import digest_bytes

log = logging.getLogger("holdfast.checkpoint")

OLD = 3600.0
"""Seconds without a new byte after which a partial image is given up."""
UNREFERENCED = 600.0
"""The same for an image that was verified and lost its record, or never got it."""
MOST_SIDECAR = 256 * 1024 * 1024
SLICE = 512 * 1024
NOTICE = 1024 * 1024
"""New bytes that make it worth waking the thread that digests."""
_PARTIAL = re.compile(r"\.([0-9]{5,9}\.[0-9a-f]{8})\.part")
_FROM_PEERS = re.compile(r"[0-9]{5,9}\.[0-9a-f]{8}")


class NoRoomError(Exception):
    """The image does not fit; the message says what is free."""


class Incoming:
    """A partial image, locked and mapped."""

    def __init__(self, tier: LocalTier, replica: Announcement, name: str, descriptor: int) -> None:
        self._tier = tier
        self.replica = replica
        self._name = name
        self._descriptor = descriptor
        self._map = mmap.mmap(descriptor, replica.size)
        self.view = memoryview(self._map)
        self.there = 0
        """Bytes at the image's start that need not be sent."""

    def close(self) -> None:
        """Leave the partial image as it is, for whoever continues it."""
        if self._descriptor >= 0:
            fcntl.flock(self._descriptor, fcntl.LOCK_UN)
            self.view.release()
            self._map.close()  # it holds a descriptor of its own
            os.close(self._descriptor)
            self._descriptor = -1

    def discard(self) -> None:
        _remove(self._tier, self._name)

    def touch(self) -> None:
        """Renew the file's time: bytes that arrive through a mapping do not show in it."""
        with contextlib.suppress(OSError):
            os.utime(self._descriptor)

    def commit(self, kind: Literal["own", "replica"] = "replica") -> CopyRecord:
        """Every digest was right: from now on it counts."""
        replica = self.replica
        record = CopyRecord(
            checkpoint=replica.checkpoint,
            manifest=replica.manifest,
            rank=replica.rank,
            image=self._name,
            files=[CopyFile(file.path, file.start, file.size, file.digest) for file in replica.files],
            kind=kind,
            at=time.time(),
        )
        self.touch()
        os.rename(_part(self._tier, self._name), self._tier.images / self._name)
        _sidecar(self._tier, self._name).unlink(missing_ok=True)
        try:
            self._tier.commit(record)
        except OSError:
            (self._tier.images / self._name).unlink(missing_ok=True)  # an image without a record is no use
            raise
        return record


def begin(tier: LocalTier, replica: Announcement, *, max_bytes: int) -> Incoming:
    """Continue what an earlier transfer of the same replica left, or begin anew; raises NoRoomError."""
    for name in _partials(tier):
        if _announced(tier, name) == replica and (incoming := _take_up(tier, replica, name)) is not None:
            incoming.there = verified_prefix(incoming.view, replica.files)
            return incoming
    _check_room(tier, replica.size, max_bytes)
    name = f"{replica.rank:05d}.{uuid.uuid4().hex[:8]}"
    descriptor = -1
    try:
        flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW
        descriptor = os.open(_part(tier, name), flags, 0o600)
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        # Allocated in full before anything is sent: a mapping that finds no room later ends the process.
        os.posix_fallocate(descriptor, 0, replica.size)
        replace_atomic(_sidecar(tier, name), msgspec.msgpack.encode(replica), durable=False)
        return Incoming(tier, replica, name, descriptor)
    except BaseException as error:
        if descriptor >= 0:
            os.close(descriptor)
        _remove(tier, name)
        if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            raise NoRoomError(
                f"{replica.size} bytes do not fit into {tier.path}: {error.strerror}"
            ) from error
        raise


def verified_prefix(view: memoryview, files: list[AnnouncedFile]) -> int:
    """How many bytes from the image's start are right, by the digests of chunks that follow without a gap."""
    end = 0
    for file in files:
        if file.start != end:
            break
        for chunk in file.chunks:
            start = file.start + chunk.offset
            if start != end or digest_bytes(view[start : start + chunk.length]) != chunk.digest:
                return end
            end = start + chunk.length
        rest = file.start + file.size
        if end != rest:
            # Without chunks up to its end only the whole file's digest can tell.
            if digest_bytes(view[file.start : rest]) != file.digest:
                return end
            end = rest
    return end


@contextlib.contextmanager
def mapped(descriptor: int, start: int, length: int) -> Iterator[memoryview]:
    """Bytes of an image, mapped where they lie."""
    skipped = start % mmap.ALLOCATIONGRANULARITY
    whole = mmap.mmap(descriptor, skipped + length, prot=mmap.PROT_READ, offset=start - skipped)
    with whole, memoryview(whole) as view, view[skipped:] as piece:
        yield piece


def wrong_file(view: memoryview, files: list[AnnouncedFile]) -> tuple[str, str, str] | None:
    """The first file that is not what was announced: its path, the digest expected and the one found."""
    for file in files:
        found = digest_bytes(view[file.start : file.start + file.size])
        if found != file.digest:
            return file.path, file.digest, found
    return None


class RunningDigests:
    """The digests of an image's files, taken in a thread while the image arrives.

    They cover what lies in the image, not what came over the wire: what is verified is what will be read.
    """

    def __init__(self, view: memoryview, files: list[AnnouncedFile], there: int) -> None:
        self._view = view
        self._files = files
        self._changed = threading.Condition()
        self._arrived = self._noticed = there
        self._stopped = False
        self._found: list[str] = []
        self._thread = threading.Thread(target=self._run, name="holdfast-peer-digest", daemon=True)
        self._thread.start()

    def arrived(self, end: int) -> None:
        """The image is there up to here."""
        self._arrived = end
        if end - self._noticed >= NOTICE:
            self._noticed = end
            with self._changed:
                self._changed.notify()

    def finish(self) -> tuple[str, str, str] | None:
        """All of it has arrived; returns the same as `wrong_file`."""
        with self._changed:
            self._changed.notify()
        self._thread.join()
        for file, found in zip(self._files, self._found, strict=True):
            if found != file.digest:
                return file.path, file.digest, found
        return None

    def stop(self) -> None:
        """Returns once the thread no longer looks at the image."""
        self._stopped = True
        with self._changed:
            self._changed.notify()
        self._thread.join()

    def _run(self) -> None:
        for file in self._files:
            digest = xxhash.xxh3_128()
            at, end = file.start, file.start + file.size
            while at < end:
                upto = min(end, at + SLICE)
                with self._changed:
                    # Short waits, since `arrived` does not wake us for every byte.
                    while self._arrived < upto and not self._stopped:
                        self._changed.wait(0.05)
                if self._stopped:
                    return
                with self._view[at:upto] as piece:
                    digest.update(piece)
                at = upto
            self._found.append(digest.hexdigest())


# --- clearing away ------------------------------------------------------------------------------------------


def sweep(tier: LocalTier, *, rank: int | None = None, keep: Announcement | None = None) -> None:
    """Clear away what no transfer will continue.

    That is what is old; with a rank, at its next announcement, also every other partial image of that rank;
    without one, at a server's start, also those after which a replica of the same rank was committed.
    """
    now = time.time()
    replicas = [record for record in tier.records() if record.kind == "replica"]
    for name in _partials(tier):
        age, whose = _age(_part(tier, name), now), int(name.partition(".")[0])
        if rank is not None:
            superseded = whose == rank and _announced(tier, name) != keep
        else:
            superseded = any(record.rank == whose and record.at > now - age for record in replicas)
        if (superseded or age > OLD) and (descriptor := _lock(_part(tier, name))) is not None:
            _remove(tier, name)
            os.close(descriptor)
    for path in sorted(tier.images.glob(".*.json")):
        if not path.with_suffix(".part").exists() and _age(path, now) > UNREFERENCED:
            path.unlink(missing_ok=True)
    for path in sorted(tier.images.iterdir()):
        if _FROM_PEERS.fullmatch(path.name) and _age(path, now) > UNREFERENCED:
            _remove_unreferenced(tier, path)


def _remove_unreferenced(tier: LocalTier, path: Path) -> None:
    descriptor = _lock(path)
    if descriptor is None:
        return
    try:
        # Looked up under the lock: a commit holds it until its record is there.
        if not any(record.image == path.name for record in tier.records()):
            path.unlink(missing_ok=True)
    finally:
        os.close(descriptor)


def drop_older(tier: LocalTier, rank: int, newest: CopyRecord | None, keep: int) -> list[CopyRecord]:
    """Drop a rank's replicas beyond `keep`, the oldest ones; one that is being read is dropped later.

    Returns those that were dropped. Age is by time of commit and not by step: after a rollback the newest has
    a lower step than those before it.
    """
    replicas = [record for record in tier.records() if record.kind == "replica" and record.rank == rank]
    replicas.sort(key=lambda record: (record == newest, record.at), reverse=True)
    dropped = []
    for record in replicas[max(keep, 1) :]:
        if tier.drop(record):
            dropped.append(record)
        else:
            log.info("holdfast: %s, rank %d is being read; it is dropped later", record.checkpoint, rank)
    return dropped


def _check_room(tier: LocalTier, size: int, max_bytes: int) -> None:
    """Before anything is allocated: filling a node's memory to find out what fits would hurt others."""
    free = os.statvfs(tier.images)
    if size > free.f_bavail * free.f_frsize:
        raise NoRoomError(
            f"{size} bytes do not fit into {tier.path}: {free.f_bavail * free.f_frsize} bytes are free"
        )
    if max_bytes:
        used = 0
        for path in tier.images.iterdir():
            with contextlib.suppress(FileNotFoundError):
                used += path.stat().st_blocks * 512
        if used + size > max_bytes:
            raise NoRoomError(
                f"{size} bytes do not fit into {tier.path}: {used} of the {max_bytes} bytes of "
                "checkpoint.non_persistent_max_bytes are in use"
            )


# --- names --------------------------------------------------------------------------------------------------


def _part(tier: LocalTier, name: str) -> Path:
    return tier.images / f".{name}.part"


def _sidecar(tier: LocalTier, name: str) -> Path:
    return tier.images / f".{name}.json"


def _partials(tier: LocalTier) -> Iterator[str]:
    for path in sorted(tier.images.glob(".*.part")):
        if match := _PARTIAL.fullmatch(path.name):
            yield match[1]


def _announced(tier: LocalTier, name: str) -> Announcement | None:
    try:
        return msgspec.msgpack.decode(read_regular(_sidecar(tier, name), MOST_SIDECAR), type=Announcement)
    except (OSError, msgspec.DecodeError):
        return None


def _take_up(tier: LocalTier, replica: Announcement, name: str) -> Incoming | None:
    """A partial image that nobody else is working on, if it has its full size."""
    descriptor = _lock(_part(tier, name))
    if descriptor is None:
        return None
    if os.fstat(descriptor).st_size != replica.size:  # cut before its memory was allocated
        _remove(tier, name)
        os.close(descriptor)
        return None
    return Incoming(tier, replica, name, descriptor)


def _lock(path: Path) -> int | None:
    """A descriptor with the only lock on a file; None if it is gone or somebody is working on it."""
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
    except OSError:
        return None
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        # It may have been renamed or removed between opening and locking.
        if os.path.samestat(os.fstat(descriptor), path.stat()):
            return descriptor
    except OSError:
        pass
    os.close(descriptor)
    return None


def _remove(tier: LocalTier, name: str) -> None:
    _part(tier, name).unlink(missing_ok=True)
    _sidecar(tier, name).unlink(missing_ok=True)


def _age(path: Path, now: float) -> float:
    try:
        return now - path.stat().st_mtime
    except OSError:
        return 0.0
