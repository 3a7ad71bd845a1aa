"""Whether a checkpoint's bytes are the ones that were saved. Never writes, never follows a link, no torch.

`check_structure` looks at names, sizes and file types only. `verify` also reads every listed file and
compares its digest with the one taken when it was saved; only then are the bytes known. A directory without
a manifest (stock DCP) can be complete at best, and its inspection says that there are no digests.

Both return an `Inspection` with every problem found, each with its own reason; neither raises for anything
that is wrong with a checkpoint.
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import xxhash

from holdfast.checkpoint import metadata as metadatas
from holdfast.checkpoint.identity import METADATA, parse_name
from holdfast.checkpoint.manifest import FileEntry, Manifest, is_safe_path
from holdfast.checkpoint.metadata import MetadataError, StoredMetadata
from holdfast.checkpoint.problems import Problem, Reason, printable
from holdfast.checkpoint.structure import Inspection, check_structure, looks_like_checkpoint
from holdfast.errors import UsageError
from holdfast.files import OpenFile

__all__ = ["Inspection", "Problem", "Reason", "check_structure", "looks_like_checkpoint", "verify"]

READ_SIZE = 4 * 1024 * 1024
BAD_CHUNKS_NAMED = 3

Progress = Callable[[int], None]
"""Called with the number of bytes read since the last call."""


def verify(
    directory: Path,
    *,
    run: str | None = None,
    world: int | None = None,
    files: Iterable[str] | None = None,
    progress: Progress | None = None,
    cold: bool = False,
) -> Inspection:
    """The full check: the structure, then the digest of every listed file (or only of `files` among them).

    With `files`, several ranks can share the reading; each still checks the whole structure. `cold`: what
    this node has in its page cache is dropped first, as far as the kernel does that, and again afterwards.
    """
    inspection = check_structure(directory, run=run, world=world)
    if inspection.manifest is None:
        return inspection
    entries = {entry.path: entry for entry in inspection.manifest.files}
    wanted = list(entries) if files is None else list(files)
    unknown = [path for path in wanted if path not in entries]
    if unknown:
        raise UsageError(f"{directory}: asked to verify {unknown[0]!r}, which its manifest does not list")
    broken = {problem.path for problem in inspection.problems}
    reader = _Reader(inspection, progress, cold=cold)
    for path in wanted:
        # A file that is missing, short or no file at all has been named already.
        if path not in broken and reader.matches(entries[path]) and path == METADATA:
            _cross_check(inspection, inspection.manifest)
    return inspection


def open_beneath(directory: Path, path: str) -> OpenFile:
    """Open a listed file for reading; no part of its path may be a link."""
    if not is_safe_path(path):
        raise OSError(errno.EINVAL, "not a path inside the directory", path)
    *folders, name = path.split("/")
    here = OpenFile(directory, os.O_RDONLY | os.O_DIRECTORY)
    for folder in folders:
        here = OpenFile(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW, beneath=here)
    # O_NONBLOCK: opening a named pipe must not wait for a writer.
    return OpenFile(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK, beneath=here)


class _Reader:
    """Reads files of one checkpoint through one reused buffer."""

    def __init__(self, inspection: Inspection, progress: Progress | None, *, cold: bool) -> None:
        self._inspection = inspection
        self._progress = progress
        self._cold = cold
        self._buffer = memoryview(bytearray(READ_SIZE))

    def matches(self, entry: FileEntry) -> bool:
        """Whether the file's bytes are those listed; if not, the problem is noted."""
        inspection = self._inspection
        try:
            file = open_beneath(inspection.directory, entry.path)
        except OSError as error:
            reason = {
                errno.ELOOP: Reason.NOT_A_FILE,
                errno.ENOENT: Reason.MISSING,
                errno.ENOTDIR: Reason.NOT_A_FILE,
            }.get(error.errno or 0, Reason.UNREADABLE)
            inspection.add(reason, entry.path, f"cannot be opened: {error.strerror or error}")
            return False
        try:
            with file:
                if not stat.S_ISREG(os.fstat(file.number).st_mode):
                    inspection.add(Reason.NOT_A_FILE, entry.path, "expected a regular file")
                    return False
                if not self._cold:
                    return self._compare(file.number, entry)
                os.posix_fadvise(file.number, 0, 0, os.POSIX_FADV_DONTNEED)
                try:
                    return self._compare(file.number, entry)
                finally:
                    os.posix_fadvise(file.number, 0, 0, os.POSIX_FADV_DONTNEED)
        except OSError as error:
            inspection.add(Reason.UNREADABLE, entry.path, f"cannot be read: {error.strerror or error}")
            return False

    def _compare(self, fd: int, entry: FileEntry) -> bool:
        inspection = self._inspection
        digest, read = xxhash.xxh3_128(), 0
        # One byte past the listed size shows a file that has grown meanwhile.
        for view in stream(fd, 0, entry.size + 1, self._buffer):
            digest.update(view)
            read += len(view)
            inspection.bytes_checked += len(view)
            if self._progress is not None:
                self._progress(len(view))
        if read != entry.size:
            reason = Reason.TRUNCATED if read < entry.size else Reason.ALTERED
            inspection.add(reason, entry.path, f"expected {entry.size} bytes, read {read}")
            return False
        found = digest.hexdigest()
        if found == entry.digest:
            return True
        detail = f"expected digest {entry.digest}, found {found}{bad_chunks(fd, entry, self._buffer)}"
        reason = Reason.ALTERED
        if entry.path == METADATA and inspection.manifest is not None:
            stale = _staleness(inspection.directory, inspection.manifest)
            if stale:
                reason, detail = Reason.STALE_METADATA, f"{detail}; {stale}"
        inspection.add(reason, entry.path, detail)
        return False


def bad_chunks(fd: int, entry: FileEntry, buffer: memoryview, start: int = 0) -> str:
    """Which stored items are damaged, as far as the manifest has digests of them. It begins at `start`."""
    bad: list[str] = []
    for chunk in entry.chunks:
        digest = xxhash.xxh3_128()
        for view in stream(fd, start + chunk.offset, chunk.length, buffer):
            digest.update(view)
        if digest.hexdigest() != chunk.digest:
            bad.append(f"{chunk.offset}–{chunk.offset + chunk.length}")
    if not bad:
        return ""
    more = f" and {len(bad) - BAD_CHUNKS_NAMED} more" if len(bad) > BAD_CHUNKS_NAMED else ""
    return f"; bad chunks at bytes {', '.join(bad[:BAD_CHUNKS_NAMED])}{more}"


def stream(fd: int, offset: int, length: int, buffer: memoryview) -> Iterator[memoryview]:
    """A range of a file through one reused buffer; it ends early where the file does."""
    end = offset + length
    while offset < end:
        count = os.preadv(fd, [buffer[: end - offset]], offset)
        if count == 0:
            return
        offset += count
        yield buffer[:count]


def _disagreement(meta: StoredMetadata, manifest: Manifest, *, exact: bool) -> Problem | None:
    """Where the metadata describes other chunks than the manifest; `exact`: or fewer. None if nowhere."""
    listed = {entry.path: entry for entry in manifest.files if entry.path != METADATA}
    placed: dict[str, set[tuple[int, int]]] = {}
    for key, stored in meta.storage.items():
        placed.setdefault(stored.path, set()).add((stored.offset, stored.length))
        entry = listed.get(stored.path)
        if entry is None or stored.offset + stored.length > entry.size:
            where = (
                f"places {metadatas.show_key(key)} at bytes {stored.offset}–{stored.offset + stored.length}"
            )
            detail = f"the metadata {where}, outside of what the manifest lists"
            return Problem(Reason.INCOMPLETE, stored.path, detail)
    for path, entry in listed.items():
        chunks = {(chunk.offset, chunk.length) for chunk in entry.chunks}
        items = placed.get(path, set())
        odd = (chunks ^ items if exact else items - chunks) if chunks else set()
        if odd:
            first = min(odd)
            who = "manifest" if first in chunks else "metadata"
            detail = f"only the {who} has an item at bytes {first[0]}–{sum(first)}"
            return Problem(Reason.INCOMPLETE, path, detail)
    return None


def _staleness(directory: Path, manifest: Manifest) -> str:
    """Why a `.metadata` with a wrong digest is another save's; empty if it may be this one's, damaged."""
    try:
        meta = metadatas.read(directory)
    except MetadataError:
        return ""
    origin = parse_name(meta.origin)
    if origin is not None and origin.id != manifest.id:
        return f"it was written for {origin}"
    problem = _disagreement(meta, manifest, exact=True)
    return f"{problem.path}: {problem.detail}" if problem is not None else ""


def _cross_check(inspection: Inspection, manifest: Manifest) -> None:
    """A `.metadata` that has the right bytes must also agree with the manifest it was committed with."""
    try:
        meta = metadatas.read(inspection.directory)
    except MetadataError as error:
        inspection.add(Reason.UNREADABLE_METADATA, METADATA, printable(str(error)))
        return
    problem = _disagreement(meta, manifest, exact=False)
    sizes = {entry.path: entry.size for entry in manifest.files}
    inspection.problems.extend(metadatas.completeness(meta, sizes) if problem is None else [problem])
