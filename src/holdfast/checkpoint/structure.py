"""The cheap look at a checkpoint directory: its manifest, and the names, sizes and types of its files.

Nothing here reads a shard, writes, or follows a link. A directory without a manifest (stock DCP) is checked
for completeness by its `.metadata`. Whatever is wrong with a checkpoint becomes a `Problem`, never an
exception.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

from holdfast.checkpoint import manifest as manifests
from holdfast.checkpoint import metadata as metadatas
from holdfast.checkpoint.identity import MANIFEST, METADATA, parse_name
from holdfast.checkpoint.manifest import FileEntry, Manifest, ManifestError
from holdfast.checkpoint.metadata import MetadataError
from holdfast.checkpoint.problems import Problem, Reason, printable


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
    """It was taken away on purpose while it was looked at, which is no fault: when and why, in words."""

    @property
    def sound(self) -> bool:
        return not self.problems

    def add(self, reason: Reason, path: str, detail: str) -> None:
        self.problems.append(Problem(reason, printable(path), detail))


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
    """The cheap check: manifest, names, sizes, file types, and that it is of this run and world size."""
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
    """Top-level entries by name, not followed; None if the directory cannot be listed."""
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
        inspection.add(Reason.UNREADABLE_MANIFEST, MANIFEST, printable(str(error)))
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
        inspection.add(Reason.WRONG_NAME, ".", f"the manifest is of {claimed}; the directory is named {name}")
    if run is not None and manifest.run != run:
        inspection.add(Reason.WRONG_RUN, MANIFEST, f"expected run {run}, found {printable(manifest.run)}")
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
        inspection.add(Reason.STALE_METADATA, path, f"{detail}; it is a valid one of other shards")
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
        inspection.add(reason, METADATA, printable(str(error)))
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
