"""Whether a checkpoint directory holds what it says: by a cheap look, or byte by byte.

Nothing here writes or follows a link, and only `verify` reads shards. A directory without a manifest (stock
DCP) is checked for completeness by its `.metadata`. Whatever is wrong with a checkpoint becomes a `Problem`,
never an exception.
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import xxhash

from holdfast.base import OpenFile, escaped
from holdfast.checkpoint.format import manifest as manifests
from holdfast.checkpoint.format import metadata as metadatas
from holdfast.checkpoint.format.manifest import (
    MANIFEST,
    METADATA,
    FileEntry,
    Manifest,
    ManifestError,
    Problem,
    Reason,
    is_safe_path,
    parse_name,
)
from holdfast.checkpoint.format.metadata import MetadataError, StoredMetadata
from holdfast.errors import UsageError


@dataclass
class Inspection:
    """What looking at one checkpoint directory found."""

    directory: Path
    manifest: Manifest | None = None
    manifest_digest: str = ""
    problems: list[Problem] = field(default_factory=list)
    bytes_checked: int = 0
    """Bytes whose digest was compared; 0 after a structure check."""
    digests_missing: bool = False
    """A stock DCP directory: complete at best, its bytes unknown."""
    files: int = 0
    size: int = 0
    """Bytes in the files that belong to the checkpoint, as found."""
    gone: str = ""
    """It was deleted on purpose while it was looked at, which is not a fault: when and why, in words."""

    @property
    def sound(self) -> bool:
        return not self.problems

    def add(self, reason: Reason, path: str, detail: str) -> None:
        self.problems.append(Problem(reason, escaped(path), detail))


def looks_like_checkpoint(directory: Path) -> bool:
    """Whether a directory is meant to be a checkpoint, sound or not, ours or stock."""
    if parse_name(directory.name) is not None:
        return True
    try:
        names = os.listdir(directory)
    except OSError:
        return False
    return MANIFEST in names or METADATA in names or any(name.endswith(".distcp") for name in names)


def checkpoints_under(root: Path) -> list[Path]:
    """Directories directly under `root` that are meant to be checkpoints, newest step first.

    Links are left out, and so is what lies under hidden names: staging and trash.
    """
    found = [
        entry
        for entry in root.iterdir()
        if not entry.name.startswith(".")
        and entry.is_dir()
        and not entry.is_symlink()
        and looks_like_checkpoint(entry)
    ]
    return sorted(found, key=lambda path: (parse_name(path.name) or (-1, ""), path.name), reverse=True)


def check_structure(directory: Path, *, run: str | None = None, world: int | None = None) -> Inspection:
    """The cheap check: manifest, names, sizes, file types, and that run and world size are as expected."""
    inspection = Inspection(directory)
    found = _look(inspection)
    if found is None:
        return inspection
    if MANIFEST in found:
        _check_against_manifest(inspection, found, run, world)
    else:
        _check_without_manifest(inspection, found, run, world)
    return inspection


# --- what is there -----------------------------------------------------------------------------------------


def _look(inspection: Inspection) -> dict[str, os.stat_result] | None:
    """Top-level entries by name, links not followed; None if the directory cannot be listed."""
    found: dict[str, os.stat_result] = {}
    try:
        with os.scandir(inspection.directory) as entries:
            for entry in entries:
                found[entry.name] = entry.stat(follow_symlinks=False)
    except FileNotFoundError:
        inspection.add(Reason.MISSING, ".", "there is no such directory")
        return None
    except OSError as error:
        inspection.add(Reason.UNREADABLE, ".", f"cannot be listed: {error.strerror or error}")
        return None
    return found


def _walk(
    inspection: Inspection, found: dict[str, os.stat_result], folders: set[str]
) -> dict[str, os.stat_result]:
    """`found` and what lies in the `folders` that hold listed files; other folders stay single entries."""
    whole = dict(found)
    for folder in sorted(folders):  # parents come before what is in them
        info = whole.get(folder)
        if info is None or not stat.S_ISDIR(info.st_mode):
            continue
        try:
            with os.scandir(inspection.directory / folder) as entries:
                whole.update({f"{folder}/{e.name}": e.stat(follow_symlinks=False) for e in entries})
        except OSError as error:
            inspection.add(Reason.UNREADABLE, folder, f"cannot be listed: {error.strerror or error}")
            continue
        del whole[folder]
    return whole


def _kind(info: os.stat_result) -> str:
    return (
        "a symlink" if stat.S_ISLNK(info.st_mode)
        else "a directory" if stat.S_ISDIR(info.st_mode)
        else "a device, socket or pipe"
    )  # fmt: skip


# --- a checkpoint with a manifest --------------------------------------------------------------------------


def _check_against_manifest(
    inspection: Inspection, found: dict[str, os.stat_result], run: str | None, world: int | None
) -> None:
    try:
        manifest, digest = manifests.read(inspection.directory)
    except (ManifestError, MemoryError) as error:
        inspection.add(Reason.UNREADABLE_MANIFEST, MANIFEST, escaped(str(error)))
        return
    inspection.manifest, inspection.manifest_digest = manifest, digest
    _check_identity(inspection, manifest, run, world)
    listed = {entry.path: entry for entry in manifest.files}
    present = _walk(inspection, found, _folders(listed))
    for path, entry in listed.items():
        _check_file(inspection, entry, present.get(path))
    for path in sorted(present.keys() - listed.keys() - {MANIFEST}):
        info = present[path]
        what = f"a file of {info.st_size} bytes" if stat.S_ISREG(info.st_mode) else _kind(info)
        inspection.add(Reason.UNLISTED, path, f"{what} that the manifest does not list")


def _check_identity(inspection: Inspection, manifest: Manifest, run: str | None, world: int | None) -> None:
    name = parse_name(inspection.directory.resolve().name)
    if name is not None and (name.step, name.id) != (manifest.step, manifest.id):
        claimed = f"step {manifest.step}, id {manifest.id}"
        detail = f"the manifest is for {claimed}; the directory is named {name}"
        inspection.add(Reason.WRONG_NAME, ".", detail)
    if run is not None and manifest.run != run:
        inspection.add(Reason.WRONG_RUN, MANIFEST, f"expected run {run}, found {escaped(manifest.run)}")
    if world is not None and manifest.world.size != world:
        detail = f"expected a world of {world} ranks, found {manifest.world.size}"
        inspection.add(Reason.WRONG_WORLD, MANIFEST, detail)


def _folders(paths: Iterable[str]) -> set[str]:
    """Every folder on the way to a listed file."""
    folders: set[str] = set()
    for path in paths:
        parts = path.split("/")
        folders.update("/".join(parts[:end]) for end in range(1, len(parts)))
    return folders


def _check_file(inspection: Inspection, entry: FileEntry, info: os.stat_result | None) -> None:
    path, size = entry.path, entry.size
    if info is None:
        reason = Reason.MISSING_METADATA if path == METADATA else Reason.MISSING
        inspection.add(reason, path, f"expected {size} bytes, found no file")
        return
    if not stat.S_ISREG(info.st_mode):
        inspection.add(Reason.NOT_A_FILE, path, f"expected a regular file, found {_kind(info)}")
        return
    inspection.files += 1
    inspection.size += info.st_size
    detail = f"expected {size} bytes, found {info.st_size}"
    if info.st_size == size:
        return
    if info.st_size == 0:
        inspection.add(Reason.EMPTY, path, detail)
    elif path == METADATA and inspection.manifest is not None and _parses(inspection):
        # A file cut short or garbled does not parse to its end: this is another save's metadata.
        inspection.add(Reason.STALE_METADATA, path, f"{detail}; it is valid, but for other shards")
    elif info.st_size < size:
        inspection.add(Reason.TRUNCATED, path, detail)
    else:
        inspection.add(Reason.ALTERED, path, detail)


def _parses(inspection: Inspection) -> bool:
    try:
        metadatas.read(inspection.directory)
    except MetadataError:
        return False
    return True


# --- a stock DCP directory ---------------------------------------------------------------------------------


def _check_without_manifest(
    inspection: Inspection, found: dict[str, os.stat_result], run: str | None, world: int | None
) -> None:
    inspection.digests_missing = True
    if parse_name(inspection.directory.resolve().name) is not None:
        # Our commits rename a directory that already holds its manifest: somebody took it away.
        inspection.add(Reason.NO_MANIFEST, MANIFEST, "the directory is named as a checkpoint of a run")
    if run is not None:
        inspection.add(Reason.WRONG_RUN, ".", f"expected run {run}; without a manifest it belongs to none")
    if world is not None:
        inspection.add(Reason.WRONG_WORLD, ".", f"expected {world} ranks; without a manifest it is not known")
    if METADATA not in found:
        if any(name.endswith(".distcp") for name in found):
            inspection.add(
                Reason.MISSING_METADATA, METADATA, "there are shards, and nothing says what is in them"
            )
        elif not inspection.problems:
            inspection.add(Reason.NO_MANIFEST, MANIFEST, "neither a manifest nor DCP metadata is here")
        return
    try:
        meta = metadatas.read(inspection.directory)
    except MetadataError as error:
        empty = stat.S_ISREG(found[METADATA].st_mode) and found[METADATA].st_size == 0
        regular = stat.S_ISREG(found[METADATA].st_mode)
        reason = Reason.EMPTY if empty else Reason.UNREADABLE_METADATA if regular else Reason.NOT_A_FILE
        inspection.add(reason, METADATA, escaped(str(error)))
        return
    paths = {entry.path for entry in meta.storage.values()}
    present = _walk(inspection, found, _folders(paths))
    sizes: dict[str, int] = {}
    odd: set[str] = set()
    for path, info in present.items():
        if stat.S_ISREG(info.st_mode):
            sizes[path] = info.st_size
        elif path in paths or path.endswith(".distcp"):
            odd.add(path)
            inspection.add(Reason.NOT_A_FILE, path, f"expected a regular file, found {_kind(info)}")
    inspection.problems.extend(p for p in metadatas.completeness(meta, sizes) if p.path not in odd)
    held = [size for path, size in sizes.items() if path in paths or path == METADATA]
    inspection.files, inspection.size = len(held), sum(held)


# Whether a checkpoint's bytes are the ones that were saved. Never writes, never follows a link, no torch.
#
# `check_structure` looks at names, sizes and file types only. `verify` also reads every listed file and
# compares its digest with the one taken when it was saved; only then are the bytes known to be right. A
# directory without a manifest (stock DCP) can be complete at best, and its inspection says that there are no
# digests.
#
# Both return an `Inspection` with every problem found, each with its own reason; neither raises for anything
# that is wrong with a checkpoint.


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
        # A file that is missing, short or not a file at all has been reported already.
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
    """Which stored items are damaged, as far as the manifest has digests. The file begins at `start`."""
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
    listed = next(entry.size for entry in manifest.files if entry.path == METADATA)
    try:
        meta = metadatas.read(inspection.directory, listed)
    except MetadataError as error:
        inspection.add(Reason.UNREADABLE_METADATA, METADATA, escaped(str(error)))
        return
    problem = _disagreement(meta, manifest, exact=False)
    sizes = {entry.path: entry.size for entry in manifest.files}
    inspection.problems.extend(metadatas.completeness(meta, sizes) if problem is None else [problem])
