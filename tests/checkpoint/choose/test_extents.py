"""Extents are read by several threads, verified, in bounded memory, and no thread is left behind."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import xxhash

from holdfast.checkpoint.choose import extents
from holdfast.checkpoint.choose.extents import Buffers, Extent, ExtentReader, LoadClock, threads_for_loading
from holdfast.checkpoint.format import Chunk, FileEntry, ShardFile
from holdfast.errors import CheckpointError

SIZE = 4000
COUNT = 40
LIMIT = 20.0


class Files:
    """A few files of equal items, and the extents that they are read in."""

    def __init__(self, directory: Path, *, files: int = 4, size: int = SIZE) -> None:
        self.directory = directory
        self.contents = {f"{n}.bin": os.urandom(size * COUNT // files) for n in range(files)}
        self.size = size
        self.entries: list[tuple[FileEntry, list[Extent]]] = []
        for path, data in self.contents.items():
            (directory / path).write_bytes(data)
            chunks = [
                Chunk(at, size, xxhash.xxh3_128_hexdigest(data[at : at + size]))
                for at in range(0, len(data), size)
            ]
            entry = FileEntry(path=path, size=len(data), digest="0" * 32, chunks=chunks)
            self.entries.append((entry, [Extent(path, [chunk]) for chunk in chunks]))
        self.used: dict[tuple[str, int], bytes] = {}
        self.times = LoadClock()

    def use(self, extent: Extent, data: memoryview, times: LoadClock) -> None:
        self.used[extent.path, extent.offset] = bytes(data)

    def reader(self, open_shard: Any = None, *, threads: int = 4, most: int = 1 << 20) -> ExtentReader:
        opens = open_shard or (lambda entry: ShardFile(self.directory, entry))
        return ExtentReader(opens, Buffers(most), threads=threads, in_place=lambda _: False, times=self.times)

    def wanted(self) -> dict[tuple[str, int], bytes]:
        return {
            (path, at): data[at : at + self.size]
            for path, data in self.contents.items()
            for at in range(0, len(data), self.size)
        }

    def flip(self, path: str, at: int) -> None:
        data = bytearray((self.directory / path).read_bytes())
        data[at] ^= 1
        (self.directory / path).write_bytes(data)


@pytest.fixture
def several(monkeypatch: pytest.MonkeyPatch) -> None:
    """Little data is read by one thread; here it is read by several."""
    monkeypatch.setattr(extents, "ALONE", 0)
    monkeypatch.setattr(extents, "STRETCH", SIZE)


@pytest.fixture(autouse=True)
def nobody_left() -> Iterator[None]:
    yield
    for thread in threading.enumerate():
        if thread.name.startswith("holdfast-load"):
            thread.join(LIMIT)  # one whose start was interrupted ends without having done anything
            assert not thread.is_alive()


def test_every_extent_is_used_once_whoever_reads_it(tmp_path: Path, several: None) -> None:
    files = Files(tmp_path)
    readers: set[str] = set()
    together = threading.Barrier(3)

    def use(extent: Extent, data: memoryview, times: LoadClock) -> None:
        assert (extent.path, extent.offset) not in files.used
        if len(readers) < 3 and threading.current_thread().name not in readers:
            readers.add(threading.current_thread().name)
            together.wait(LIMIT)  # comes through only if three are at it at once
        files.use(extent, data, times)

    files.reader(threads=3).read(files.entries, use)
    assert files.used == files.wanted()
    assert len(readers) == 3
    assert files.times.bytes == SIZE * COUNT
    assert min(files.times.read, files.times.digest) > 0


def test_little_is_read_by_the_callers_own_thread(tmp_path: Path) -> None:
    files = Files(tmp_path)
    readers: set[int] = set()
    files.reader().read(files.entries, lambda extent, data, times: readers.add(threading.get_ident()))
    assert readers == {threading.get_ident()}


@pytest.mark.parametrize("position", range(0, COUNT, 7))
def test_a_bad_extent_at_any_position_is_named_and_never_used(
    tmp_path: Path, several: None, position: int
) -> None:
    files = Files(tmp_path)
    path, at = sorted(files.wanted())[position]
    files.flip(path, at + 17)
    with pytest.raises(CheckpointError, match=f"altered {path}: bytes {at} to {at + SIZE}"):
        files.reader().read(files.entries, files.use)
    assert (path, at) not in files.used
    wanted = files.wanted()
    assert all(wanted[place] == data for place, data in files.used.items())


def test_what_is_wrong_with_the_list_of_files_reaches_the_caller_too(tmp_path: Path, several: None) -> None:
    """It is made as it is read: a file that the manifest does not know may come late, and on any thread."""
    files = Files(tmp_path)

    def listed() -> Iterator[tuple[FileEntry, list[Extent]]]:
        yield from files.entries
        raise CheckpointError("stale-metadata")

    with pytest.raises(CheckpointError, match="stale-metadata"):
        files.reader().read(listed(), files.use)


def test_what_using_an_extent_raises_reaches_the_caller(tmp_path: Path, several: None) -> None:
    files = Files(tmp_path)

    def use(extent: Extent, data: memoryview, times: LoadClock) -> None:
        raise ValueError("not this one")

    with pytest.raises(ValueError, match="not this one"):
        files.reader().read(files.entries, use)


def test_what_only_the_callers_thread_may_do_is_done_there(tmp_path: Path, several: None) -> None:
    files = Files(tmp_path)
    reader = files.reader()
    done: list[int] = []

    def use(extent: Extent, data: memoryview, times: LoadClock) -> None:
        assert reader.on_caller(lambda: done.append(threading.get_ident()) or extent.offset) == extent.offset
        with pytest.raises(KeyError):
            reader.on_caller(lambda: {}[extent.offset])

    reader.read(files.entries, use)
    assert done == [threading.get_ident()] * COUNT


def test_a_signal_ends_it_and_nothing_is_used_afterwards(tmp_path: Path, several: None) -> None:
    files = Files(tmp_path)
    reader = files.reader()
    begun = threading.Event()

    class InterruptedLoadError(Exception):
        pass

    def handler(number: int, frame: Any) -> None:
        raise InterruptedLoadError

    def use(extent: Extent, data: memoryview, times: LoadClock) -> None:
        if not begun.is_set():
            begun.set()
            os.kill(os.getpid(), signal.SIGUSR1)
        assert reader._stopped.wait(LIMIT), "the caller has not begun to leave"
        files.use(extent, data, times)

    before = signal.signal(signal.SIGUSR1, handler)
    try:
        with pytest.raises(InterruptedLoadError):
            reader.read(files.entries, use)
    finally:
        signal.signal(signal.SIGUSR1, before)
    used = len(files.used)
    assert used <= 4, "what was being used, and no more"
    nobody = [t for t in threading.enumerate() if t.name.startswith("holdfast-load") and t.ident]
    for thread in nobody:
        thread.join(LIMIT)
    assert len(files.used) == used


def test_without_more_threads_the_callers_own_reads(
    tmp_path: Path, several: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = Files(tmp_path)

    def refused(self: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refused)
    files.reader().read(files.entries, files.use)
    assert files.used == files.wanted()


def test_files_are_closed_when_their_last_extent_is_read(tmp_path: Path, several: None) -> None:
    files = Files(tmp_path, files=20)
    open_now: list[int] = []
    most: list[int] = []

    @contextlib.contextmanager
    def opens(entry: FileEntry) -> Iterator[ShardFile]:
        with ShardFile(tmp_path, entry) as shard:
            open_now.append(1)
            most.append(len(open_now))
            try:
                yield shard
            finally:
                open_now.pop()

    files.reader(opens, threads=2).read(files.entries, files.use)
    assert files.used == files.wanted()
    assert not open_now
    assert max(most) <= 3


# --- other sources ------------------------------------------------------------------------------------------


class TwoSources:
    """A shard whose first source is bad from some byte on."""

    at_once = 1000
    concurrent = True

    def __init__(self, directory: Path, entry: FileEntry, bad_from: int, given_up: list[str]) -> None:
        self.turn = 0
        self._file = ShardFile(directory, entry)
        self._bad_from = bad_from
        self._given_up = given_up
        self._lock = threading.Lock()

    def __enter__(self) -> TwoSources:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.__exit__()

    def read_into(self, view: memoryview, offset: int, *, until: int = 0) -> None:
        turn = self.turn
        self._file.read_into(view, offset, until=until)
        if turn == 0 and offset + view.nbytes > self._bad_from:
            view[-1] ^= 1

    def in_place(self, offset: int, length: int) -> memoryview | None:
        return None

    def another(self, why: str, turn: int | None = None) -> bool:
        with self._lock:
            if turn in (None, self.turn):
                self.turn += 1
                self._given_up.append(why)
        return self.turn < 2


def test_a_source_is_given_up_once_however_many_threads_find_it_bad(tmp_path: Path, several: None) -> None:
    files = Files(tmp_path, files=1)
    given_up: list[str] = []
    reader = files.reader(lambda entry: TwoSources(tmp_path, entry, 0, given_up))
    reader.read(files.entries, files.use)
    assert files.used == files.wanted()
    assert len(given_up) == 1


# --- large extents ------------------------------------------------------------------------------------------


@pytest.fixture
def shared(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(extents, "SHARED_FROM", SIZE)
    monkeypatch.setattr(extents, "SHARE", 700)


def test_a_large_extent_is_read_by_several_threads_and_digested_in_order(
    tmp_path: Path, shared: None
) -> None:
    files = Files(tmp_path, files=1)
    readers: set[str] = set()

    class Noting(ShardFile):
        def read_into(self, view: memoryview, offset: int, *, until: int = 0) -> None:
            readers.add(threading.current_thread().name)
            super().read_into(view, offset, until=until)

    files.reader(lambda entry: Noting(tmp_path, entry)).read(files.entries, files.use)
    assert files.used == files.wanted()
    assert all(name.startswith("holdfast-load-share") for name in readers)


def test_a_large_extent_with_a_flipped_byte_is_not_used(tmp_path: Path, shared: None) -> None:
    files = Files(tmp_path, files=1)
    files.flip("0.bin", 2 * SIZE + 1500)
    with pytest.raises(CheckpointError, match=f"altered 0.bin: bytes {2 * SIZE} to {3 * SIZE}"):
        files.reader().read(files.entries, files.use)
    assert ("0.bin", 2 * SIZE) not in files.used


def test_a_large_extent_whose_source_fails_amid_it_is_read_from_the_next(
    tmp_path: Path, shared: None
) -> None:
    files = Files(tmp_path, files=1)
    given_up: list[str] = []
    reader = files.reader(lambda entry: TwoSources(tmp_path, entry, 3 * SIZE + 900, given_up))
    reader.read(files.entries, files.use)
    assert files.used == files.wanted()
    assert len(given_up) == 1


# --- memory -------------------------------------------------------------------------------------------------


def test_a_buffer_is_used_again_and_not_before_a_device_has_read_it() -> None:
    buffers = Buffers(1000)
    stopped = threading.Event()
    first = buffers.take(600, stopped)
    assert first is not None
    waited: list[int] = []
    buffers.give_back(first, lambda: waited.append(1))
    assert not waited
    again = buffers.take(600, stopped)
    assert again is first
    assert waited == [1]


def test_buffers_that_are_too_small_make_room_for_larger_ones() -> None:
    released: list[int] = []

    def made(view: memoryview) -> Callable[[], object]:
        return lambda: released.append(view.nbytes)

    buffers = Buffers(1000, made)
    stopped = threading.Event()
    small = [buffers.take(300, stopped) for _ in range(3)]
    for buffer in small:
        assert buffer is not None
        buffers.give_back(buffer, None)
    large = buffers.take(700, stopped)
    assert large is not None
    assert released == [300, 300]
    buffers.give_back(large, None)
    buffers.close()
    assert sorted(released) == [300, 300, 300, 700]


def test_whoever_waits_for_memory_learns_that_the_reading_was_stopped() -> None:
    buffers = Buffers(1000)
    stopped = threading.Event()
    assert buffers.take(900, stopped) is not None
    found: list[Any] = []
    waiting = threading.Thread(target=lambda: found.append(buffers.take(900, stopped)))
    waiting.start()
    stopped.set()
    waiting.join(LIMIT)
    assert found == [None]


def test_threads_are_this_ranks_share_of_the_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(16)))
    for told, expected in {"": 8, "1": 8, "4": 4, "8": 2, "16": 2, "garbage": 8}.items():
        monkeypatch.setenv("LOCAL_WORLD_SIZE", told)
        assert threads_for_loading() == expected
