"""Large images are worked on by forks of the writer: the same result as by threads, and the same errors."""

from __future__ import annotations

import errno
import os
import signal
from pathlib import Path

import pytest
import xxhash

from holdfast.checkpoint.format import fingerprint
from holdfast.checkpoint.format.layout import Item, Layout, Shard
from holdfast.checkpoint.save import image
from holdfast.checkpoint.save.image import Piece, in_children
from holdfast.errors import SaveFailedError, TornSnapshotError
from holdfast.process import proc

LENGTHS = [5000, 1 << 20, 3, 70_000, 2_000_001, 40_000]


@pytest.fixture
def laid_out() -> tuple[bytearray, Layout, list[str]]:
    items, at = [], 0
    for number, length in enumerate(LENGTHS):
        items.append(Item(f"t{number}", at, length + 150, at + 90, length))
        at += length + 150
    half = items[3].offset
    shards = [Shard("__0_0.distcp", 0, half, 0, 3), Shard("__0_1.distcp", half, at - half, 3, 3)]
    memory = bytearray(os.urandom(at))
    kinds = ["x", "m"] * 3
    prints = [
        fingerprint.of_bytes(memoryview(memory)[item.raw_offset : item.raw_offset + item.raw_length], kind)
        for item, kind in zip(items, kinds, strict=True)
    ]
    return memory, Layout(at, items, shards), prints


@pytest.fixture
def forking(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(image, "LARGE", 1)


def files_of(tmp_path: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in tmp_path.iterdir()}


def test_the_result_is_the_same_as_by_threads(
    laid_out: tuple[bytearray, Layout, list[str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    memory, layout, prints = laid_out
    by_threads = image.digest_image(memoryview(memory), layout, prints, 4)
    monkeypatch.setattr(image, "LARGE", 1)
    for children in (2, 5, 16):
        assert image.digest_image(memoryview(memory), layout, prints, children) == by_threads
    assert image.write_image(tmp_path, memoryview(memory), layout, prints, 2) == by_threads
    assert b"".join(files_of(tmp_path)[shard.path] for shard in layout.shards) == memory
    for entry in by_threads:
        assert entry.digest == xxhash.xxh3_128_hexdigest(files_of(tmp_path)[entry.path])


def test_a_torn_snapshot_is_told_as_such(
    laid_out: tuple[bytearray, Layout, list[str]], forking: None
) -> None:
    before = children()  # other tests' fixtures may have some
    memory, layout, prints = laid_out
    memory[layout.items[4].raw_offset + 77] ^= 1
    with pytest.raises(TornSnapshotError, match="t4: its bytes do not match"):
        image.digest_image(memoryview(memory), layout, prints, 4)
    assert children() == before


def test_a_full_disk_is_told_with_its_path(
    laid_out: tuple[bytearray, Layout, list[str]],
    tmp_path: Path,
    forking: None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    before = children()
    memory, layout, prints = laid_out

    def full(*_: object) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "pwrite", full)
    with pytest.raises(OSError, match=r"No space left.*__0_") as caught:
        image.write_image(tmp_path, memoryview(memory), layout, prints, 2)
    assert caught.value.errno == errno.ENOSPC
    assert children() == before


def test_one_that_dies_fails_the_save_and_leaves_no_other_behind() -> None:
    before = children()

    def die() -> Piece:
        os.kill(os.getpid(), signal.SIGKILL)
        raise AssertionError

    def wait() -> Piece:
        signal.pause()
        raise AssertionError

    with pytest.raises(SaveFailedError, match="without a word"):
        in_children([[die], [wait]])
    assert children() == before


def test_anything_else_keeps_its_traceback() -> None:
    def fail() -> Piece:
        raise KeyError("what it was")

    with pytest.raises(SaveFailedError, match="what it was"):
        in_children([[fail]])


def children() -> list[int]:
    return [process.pid for process in proc.everyone().values() if process.parent == os.getpid()]
