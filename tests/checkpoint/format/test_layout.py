"""The file that digests what is written to it."""

from __future__ import annotations

import errno
import os
import random
from pathlib import Path

import pytest

from holdfast.checkpoint.format import layout
from holdfast.checkpoint.format.layout import SLICE, SMALL, WRITE_BACK, DigestingFile
from holdfast.checkpoint.format.manifest import digest_bytes
from kit.tensors import noise


def write_items(path: Path, items: list[list[bytes]]) -> layout.FileEntry:
    with DigestingFile(path) as file:
        for writes in items:
            file.begin_chunk()
            for data in writes:
                assert file.write(data) == len(data)
            file.end_chunk()
        return file.finish()


def check(path: Path, entry: layout.FileEntry, items: list[list[bytes]]) -> None:
    data = path.read_bytes()
    stored = [b"".join(writes) for writes in items]
    assert data == b"".join(stored)
    assert (entry.path, entry.size, entry.digest) == (path.name, len(data), digest_bytes(data))
    at = 0
    for chunk, item in zip(entry.chunks, stored, strict=True):
        assert (chunk.offset, chunk.length, chunk.digest) == (at, len(item), digest_bytes(item))
        at += len(item)


EDGES = [0, 1, SMALL - 1, SMALL, SMALL + 1, SLICE - 1, SLICE, SLICE + 1, 4 * SMALL, 4 * SMALL + 1]


@pytest.mark.parametrize("length", EDGES)
def test_one_write_of_any_length_gets_the_right_digests(tmp_path: Path, length: int) -> None:
    items = [[noise(length)]]
    check(tmp_path / "shard", write_items(tmp_path / "shard", items), items)


def test_every_mix_of_small_and_large_writes_gets_the_right_digests(tmp_path: Path) -> None:
    for seed in range(12):
        choose = random.Random(seed)
        items = [
            [
                noise(choose.choice([*EDGES, 7, 64, 4096]), seed * 100 + n)
                for n in range(choose.randrange(0, 7))
            ]
            for _ in range(5)
        ]
        path = tmp_path / f"shard-{seed}"
        check(path, write_items(path, items), items)


def test_many_tiny_writes_are_gathered_and_none_is_lost(tmp_path: Path) -> None:
    items = [[noise(97, n) for n in range(20_000)], [b"the next item"]]
    check(tmp_path / "shard", write_items(tmp_path / "shard", items), items)


def test_starting_write_back_early_changes_nothing_that_is_stored(tmp_path: Path) -> None:
    items = [[noise(WRITE_BACK + 13)], [noise(100, 1)], [noise(WRITE_BACK // 2, 2), noise(WRITE_BACK, 3)]]
    check(tmp_path / "shard", write_items(tmp_path / "shard", items), items)


def test_a_c_library_without_sync_file_range_is_enough(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(layout, "_sync_file_range", None)
    items = [[noise(WRITE_BACK + 13)], [noise(WRITE_BACK, 1)]]
    check(tmp_path / "shard", write_items(tmp_path / "shard", items), items)


def test_memory_may_be_reused_as_soon_as_a_write_returns(tmp_path: Path) -> None:
    """What torch.save hands over is only valid during the call."""
    memory = bytearray(noise(3 * SMALL))
    first = bytes(memory)
    with DigestingFile(tmp_path / "shard") as file:
        file.begin_chunk()
        file.write(memoryview(memory))
        memory[:] = bytes(len(memory))
        file.write(memoryview(memory)[:10])
        memory[:10] = b"0123456789"
        file.end_chunk()
        entry = file.finish()
    check(tmp_path / "shard", entry, [[first, bytes(10)]])


def test_a_partial_write_is_continued(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel may take less than it was given, and never takes more than 2 GiB at once."""
    whole = os.write
    monkeypatch.setattr(os, "write", lambda fd, data: whole(fd, data[: max(1, len(data) // 3)]))
    items = [[noise(3 * SMALL)], [noise(50, 1)]]
    entry = write_items(tmp_path / "shard", items)
    monkeypatch.undo()
    check(tmp_path / "shard", entry, items)


def fill(file: DigestingFile, data: bytes) -> None:
    file.write(data)
    file.end_chunk()


@pytest.mark.parametrize("length", [10, 3 * SMALL])
def test_a_full_disk_is_raised_and_the_file_is_closed(tmp_path: Path, length: int) -> None:
    """Scenario: a full disk in the middle of a save; /dev/full is the real thing."""
    before = os.listdir("/proc/self/fd")
    with DigestingFile(tmp_path / "shard") as file:
        full = os.open("/dev/full", os.O_WRONLY)
        os.dup2(full, file._fd)
        os.close(full)
        file.begin_chunk()
        with pytest.raises(OSError, match=os.strerror(errno.ENOSPC)):
            fill(file, noise(length))
    assert os.listdir("/proc/self/fd") == before


def test_an_existing_file_or_link_is_never_written_to(tmp_path: Path) -> None:
    (tmp_path / "taken").write_text("older")
    (tmp_path / "link").symlink_to(tmp_path / "elsewhere")
    for name in ("taken", "link"):
        with pytest.raises(FileExistsError):
            DigestingFile(tmp_path / name)
    assert (tmp_path / "taken").read_text() == "older"
    assert not (tmp_path / "elsewhere").exists()


def test_an_empty_file_has_the_digest_of_nothing(tmp_path: Path) -> None:
    check(tmp_path / "shard", write_items(tmp_path / "shard", []), [])
