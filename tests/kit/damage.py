"""Damage to what is stored: one bit, one shard, and every way in which a checkpoint can be bad."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import msgspec

from holdfast.checkpoint.format import manifest as manifests


def flip(path: Path, at: int | None = None, bit: int = 0) -> None:
    """Flip one bit of a file in place; without `at`, in its middle."""
    with path.open("r+b") as file:
        where = path.stat().st_size // 2 if at is None else at
        file.seek(where)
        byte = file.read(1)[0]
        file.seek(where)
        file.write(bytes([byte ^ 1 << bit]))


def flip_shard(checkpoint: Path) -> None:
    """Flip the bit in the middle of a checkpoint's first shard."""
    flip(min(checkpoint.glob("*.distcp")))


def delete_shard(newest: Path, older: Path) -> None:
    (newest / "__0_0.distcp").unlink()


def truncate_shard(newest: Path, older: Path) -> None:
    with (newest / "__0_0.distcp").open("r+b") as file:
        file.truncate(1000)


def empty_shard(newest: Path, older: Path) -> None:
    (newest / "__0_0.distcp").write_bytes(b"")


def delete_metadata(newest: Path, older: Path) -> None:
    (newest / ".metadata").unlink()


def stale_metadata(newest: Path, older: Path) -> None:
    """An older save's metadata over these shards: same names, items elsewhere."""
    import pickle

    metadata = pickle.loads((older / ".metadata").read_bytes())
    metadata.storage_data = {
        k: type(v)("__0_0.distcp", v.offset, v.length - 1) for k, v in metadata.storage_data.items()
    }
    (newest / ".metadata").write_bytes(pickle.dumps(metadata))


def flip_bit(newest: Path, older: Path) -> None:
    flip_shard(newest)


def garbage_manifest(newest: Path, older: Path) -> None:
    (newest / "holdfast.json").write_bytes(b"\x00garbage")


def huge_manifest(newest: Path, older: Path) -> None:
    (newest / "holdfast.json").write_bytes(b'{"digest": "' + b"a" * 100_000_000)


def mistyped_manifest(newest: Path, older: Path) -> None:
    (newest / "holdfast.json").write_text('{"digest": 7, "body": [1, 2]}')


def swapped_manifest(newest: Path, older: Path) -> None:
    shutil.copy(older / "holdfast.json", newest / "holdfast.json")


def forged_manifest(newest: Path, older: Path) -> None:
    """A manifest that is right in itself, but not the one that was committed."""
    manifest, _ = manifests.read(newest)
    (newest / "holdfast.json").write_bytes(manifests.encode(msgspec.structs.replace(manifest, samples=7))[0])


def linked_shard(newest: Path, older: Path) -> None:
    (newest / "__0_0.distcp").rename(newest.parent.parent / "elsewhere")
    (newest / "__0_0.distcp").symlink_to(newest.parent.parent / "elsewhere")


def extra_file(newest: Path, older: Path) -> None:
    (newest / "extra.bin").write_bytes(b"x")


DAMAGE: list[tuple[Callable[[Path, Path], None], str]] = [
    (delete_shard, "missing"),
    (truncate_shard, "truncated"),
    (empty_shard, "empty"),
    (delete_metadata, "missing-metadata"),
    (stale_metadata, "stale-metadata"),
    (flip_bit, "altered"),
    (garbage_manifest, "unreadable-manifest"),
    (huge_manifest, "unreadable-manifest"),
    (mistyped_manifest, "unreadable-manifest"),
    (swapped_manifest, "wrong-name"),
    (forged_manifest, "altered holdfast.json"),
    (linked_shard, "not-a-file"),
    (extra_file, "unlisted"),
]
