"""Saves to the local tier in the test's own process: the settings, the directory in memory, what is there."""

from __future__ import annotations

import contextlib
import mmap
import shutil
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import xxhash

import holdfast
from holdfast.checkpoint.copies import tier as local_manifest
from holdfast.checkpoint.copies.tier import CopyRecord, LocalTier
from holdfast.journal.events import SaveCommitted
from holdfast.record.directory import ControlDirectory
from kit.runs import events_in


@contextlib.contextmanager
def memory() -> Iterator[Path]:
    """A directory in memory, gone afterwards."""
    path = Path("/dev/shm") / f"holdfast-test-{uuid.uuid4().hex[:8]}"
    path.mkdir()
    try:
        yield path
    finally:
        shutil.rmtree(path, ignore_errors=True)


def local(directory: Path, **more: Any) -> dict[str, Any]:
    return {
        "checkpoint_async_save": True,
        "checkpoint_non_persistent_ckpt_type": "local",
        "checkpoint_non_persistent_local_ckpt_dir": str(directory),
        "checkpoint_non_persistent_save_interval": 2,
        "checkpoint_interval": 6,
        **more,
    }


def settle(run: holdfast.Run) -> None:
    """Wait until nothing is being saved, in the middle of a step."""
    run._in_step = False
    run.wait_for_saves()
    run._in_step = True


def place(directory: Path) -> LocalTier:
    (path,) = directory.iterdir()
    return LocalTier.at(path)


def is_sound(tier: LocalTier, control: ControlDirectory, record: CopyRecord) -> bool | None:
    """Whether every digest of a copy is right, under a lease; None if it was taken back before."""
    with tier.lease(record) as descriptor:
        if descriptor is None:
            return None
        manifest = local_manifest.read(control, record.name, record.manifest)
        entries = {file.path: file for file in manifest.files}
        if not record.files:
            return True
        with mmap.mmap(descriptor, 0, mmap.MAP_SHARED, mmap.PROT_READ) as mapped:
            for file in record.files:
                entry = entries[file.path]
                data = mapped[file.start : file.start + file.size]
                if xxhash.xxh3_128_hexdigest(data) != entry.digest or entry.digest != file.digest:
                    return False
                for chunk in entry.chunks:
                    piece = data[chunk.offset : chunk.offset + chunk.length]
                    if xxhash.xxh3_128_hexdigest(piece) != chunk.digest:
                        return False
    return True


def copies(directory: Path, run_dir: Path) -> dict[int, list[int]]:
    """Steps → ranks of the copies that a place holds, each of them verified."""
    tier, control = place(directory), ControlDirectory.open(run_dir)
    found: dict[int, list[int]] = {}
    known = set(local_manifest.names(control))
    for record in tier.records():
        if record.name not in known:
            continue  # forgotten, and soon taken back: it can be judged by nothing, so nobody reads it
        assert is_sound(tier, control, record), record
        found.setdefault(record.name.step, []).append(record.rank)
    return found


def committed(run_dir: Path) -> dict[str, list[int]]:
    found: dict[str, list[int]] = {"local": [], "global": []}
    for event in events_in(run_dir, SaveCommitted):
        found[event.tier].append(event.step)
    return {tier: sorted(steps) for tier, steps in found.items()}
