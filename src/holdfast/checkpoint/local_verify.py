"""Whether a copy in the local tier holds the bytes that its checkpoint was saved with. Changes nothing.

Guarantee: `verify_copy` finds nothing wrong only if every shard of the record is listed in the manifest with
that size and digest, no shard of its rank is left out, and the image's bytes, read now, have those digests.
The copy is leased for as long as it is read, so what is judged is one copy and not two halves of it. The
record is believed in nothing: it only says where to look.

`look_at_copy` reads none of the bytes: it finds nothing wrong if all but they is as it must be.

A copy that is gone when it is looked at is `missing`: there is nothing to quarantine. Every other problem
means that the copy is bad.
"""

from __future__ import annotations

import os
import stat
import threading
from concurrent.futures import ThreadPoolExecutor

import xxhash

from holdfast.checkpoint.identity import CheckpointName
from holdfast.checkpoint.local_tier import CopyFile, CopyRecord, LocalTier
from holdfast.checkpoint.manifest import FileEntry, Manifest
from holdfast.checkpoint.problems import Problem, Reason, printable
from holdfast.checkpoint.verify import Progress, bad_chunks, stream

READ_SIZE = 512 * 1024
"""Read at a time by one thread: it is still in the processor's cache when it is digested."""


def verify_copy(
    tier: LocalTier,
    record: CopyRecord,
    manifest: Manifest,
    *,
    digest: str = "",
    threads: int = 4,
    progress: Progress | None = None,
) -> list[Problem]:
    """Every problem of one copy, by shard; none means that its bytes are known.

    `digest` is the manifest's own, where the record should name the same. `progress` is called by one thread
    at a time. Reads with a thread for each shard, at most `threads`.
    """
    problems = _disagreements(record, manifest, digest)
    if problems:
        return problems  # read by a wrong list, the bytes would prove nothing
    with tier.lease(record) as descriptor:
        length = _length(tier, record, descriptor)
        if isinstance(length, Problem):
            return [length]
        assert descriptor is not None
        listed = {entry.path: entry for entry in manifest.files}
        check = _Check(descriptor, length, listed, progress)
        with ThreadPoolExecutor(max(1, min(threads, len(record.files)))) as pool:
            # The longest first, so that no thread is left alone with one at the end.
            longest = sorted(record.files, key=lambda file: -file.size)
            found = dict(zip((file.path for file in longest), pool.map(check.file, longest), strict=True))
    return [problem for file in record.files if (problem := found[file.path]) is not None]


def look_at_copy(tier: LocalTier, record: CopyRecord, manifest: Manifest, *, digest: str) -> list[Problem]:
    """Every problem of one copy that shows without reading it."""
    if problems := _disagreements(record, manifest, digest):
        return problems
    with tier.lease(record) as descriptor:
        length = _length(tier, record, descriptor)
        if isinstance(length, Problem):
            return [length]
        return [problem for file in record.files if (problem := _too_short(file, length)) is not None]


def _length(tier: LocalTier, record: CopyRecord, descriptor: int | None) -> int | Problem:
    """How long the image of a copy is; or that it is gone, or no file."""
    if descriptor is None:
        return _why_gone(tier, record)
    info = os.fstat(descriptor)
    if not stat.S_ISREG(info.st_mode):
        return Problem(Reason.NOT_A_FILE, _image(record), "expected a regular file")
    return info.st_size


def _too_short(file: CopyFile, size: int) -> Problem | None:
    if file.start + file.size <= size:
        return None
    detail = f"expected {file.size} bytes from {file.start} of the image, which has {size}"
    return Problem(Reason.TRUNCATED, file.path, detail)


def _disagreements(record: CopyRecord, manifest: Manifest, digest: str) -> list[Problem]:
    """Where the record does not describe this checkpoint's shards of its rank."""
    name = CheckpointName(manifest.step, manifest.id)
    if record.name != name:
        return [Problem(Reason.WRONG_NAME, ".", f"it is a copy of {record.checkpoint}, expected {name}")]
    if digest and record.manifest != digest:
        detail = f"the copy was made under manifest {record.manifest}; {digest} was committed"
        return [Problem(Reason.ALTERED, ".", detail)]
    problems: list[Problem] = []
    listed = {entry.path: entry for entry in manifest.files}
    copied: set[str] = set()
    for file in record.files:
        entry = listed.get(file.path)
        path = printable(file.path)
        if entry is None:
            problems.append(Problem(Reason.UNLISTED, path, "the manifest does not list it"))
        elif file.path in copied:
            problems.append(Problem(Reason.ALTERED, path, "the record lists it twice"))
        elif (file.size, file.digest) != (entry.size, entry.digest):
            expected = f"expected {entry.size} bytes with digest {entry.digest}"
            detail = f"{expected}, the record says {file.size} bytes with {file.digest}"
            problems.append(Problem(Reason.ALTERED, path, detail))
        copied.add(file.path)
    own = f"__{record.rank}_"
    left_out = [path for path in listed if path.startswith(own) and path not in copied]
    why = f"the manifest lists it for rank {record.rank}, the record does not"
    return problems + [Problem(Reason.INCOMPLETE, path, why) for path in left_out]


def _image(record: CopyRecord) -> str:
    return f"images/{record.image}"


def _why_gone(tier: LocalTier, record: CopyRecord) -> Problem:
    """Why a copy could not be leased."""
    path = _image(record)
    if tier.find(record.checkpoint, record.rank) != record:
        return Problem(Reason.MISSING, path, "its record is gone: it was taken back, dropped or quarantined")
    try:
        mode = os.lstat(tier.image(record)).st_mode
    except FileNotFoundError:
        return Problem(Reason.MISSING, path, "the image is not there")
    except OSError as error:
        return Problem(Reason.UNREADABLE, path, f"cannot be looked at: {error.strerror or error}")
    if not stat.S_ISREG(mode):
        return Problem(Reason.NOT_A_FILE, path, "expected a regular file")
    if not os.access(tier.image(record), os.R_OK):
        return Problem(Reason.UNREADABLE, path, "it cannot be opened: check its permissions")
    return Problem(Reason.MISSING, path, "it is being taken back just now")


class _Check:
    """Reads shards of one leased image, several at a time."""

    def __init__(
        self, descriptor: int, size: int, listed: dict[str, FileEntry], progress: Progress | None
    ) -> None:
        self._descriptor = descriptor
        self._size = size
        self._listed = listed
        self._progress = progress
        self._lock = threading.Lock()

    def file(self, file: CopyFile) -> Problem | None:
        if (problem := _too_short(file, self._size)) is not None:
            return problem
        try:
            return self._compare(file, self._listed[file.path])
        except OSError as error:
            return Problem(Reason.UNREADABLE, file.path, f"cannot be read: {error.strerror or error}")

    def _compare(self, file: CopyFile, entry: FileEntry) -> Problem | None:
        buffer = memoryview(bytearray(min(READ_SIZE, max(1, file.size))))
        digest, read = xxhash.xxh3_128(), 0
        for view in stream(self._descriptor, file.start, file.size, buffer):
            digest.update(view)
            read += len(view)
            if self._progress is not None:
                with self._lock:
                    self._progress(len(view))
        if read != file.size:
            detail = f"expected {file.size} bytes from {file.start} of the image, read {read}"
            return Problem(Reason.TRUNCATED, file.path, detail)
        if digest.hexdigest() == entry.digest:
            return None
        bad = bad_chunks(self._descriptor, entry, buffer, file.start)
        detail = f"expected digest {entry.digest}, found {digest.hexdigest()}{bad}"
        return Problem(Reason.ALTERED, file.path, detail)
