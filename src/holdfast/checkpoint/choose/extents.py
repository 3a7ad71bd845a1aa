"""Extents of a checkpoint's files, read and verified by several threads, in memory that is bounded.

Guarantee: whoever uses an extent is given it in the very memory in which it has matched its digests, and that
memory keeps its contents until they are done with it. When `read` returns or raises, no thread of it is left,
and nothing that it gave out is still in use.

A thread takes an extent through all that has to be done with it: it reads, digests and uses it, so threads
share nothing but the list of what is left to do. Reading, digesting and copying let go of the interpreter.
Memory is taken from a few buffers, which are used again and again: `most` bytes together, or one larger
extent alone. A large extent, which one digest covers, is read by several threads while another digests what
has arrived.

What only the caller's thread may do (calling into torch where that starts threads of its own, or into DCP) is
handed to it by `on_caller`.
"""

from __future__ import annotations

import contextlib
import itertools
import mmap
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from queue import Empty, SimpleQueue
from typing import NamedTuple, Protocol, TypeVar

import xxhash

from holdfast.checkpoint.format import Chunk, FileEntry, OpenShard, ShardSource
from holdfast.errors import CheckpointError
from holdfast.journal.events import LoadTimes
from holdfast.process import proc

MOST = 512 * 1024 * 1024
"""Bytes of buffers."""
MOST_THREADS = 8
"""Each takes memory, and a share of the processor from whatever else starts at that time."""
SHARED_FROM = 64 * 1024 * 1024
"""Extents from this size on are read by several threads."""
SHARE = 8 * 1024 * 1024
"""What each of them reads at a time."""
STRETCH = 32 * 1024 * 1024
"""Bytes of neighbouring extents that one thread takes on: they are read in order."""
ALONE = 1024 * 1024
"""So little is read by the caller's own thread."""
_LOOK = 0.1
"""Seconds after which a wait looks up, for what else may have happened."""

T = TypeVar("T")


class Extent(NamedTuple):
    """What is read at a time: one large item, or small ones that lie side by side."""

    path: str
    chunks: Sequence[Chunk]

    @property
    def offset(self) -> int:
        return self.chunks[0].offset

    @property
    def length(self) -> int:
        return self.chunks[-1].offset + self.chunks[-1].length - self.chunks[0].offset


@dataclass
class LoadClock:
    """Where the time of a load goes: seconds of all its threads together."""

    read: float = 0.0
    digest: float = 0.0
    copy: float = 0.0
    check: float = 0.0
    """For the fingerprints of tensors where they came to lie."""
    bytes: int = 0
    elapsed: float = 0.0
    """Seconds from the beginning of each reading to its end."""
    _lock: threading.Lock = field(default_factory=threading.Lock, repr=False, compare=False)

    def add(
        self,
        *,
        read: float = 0.0,
        digest: float = 0.0,
        copy: float = 0.0,
        check: float = 0.0,
        nbytes: int = 0,
    ) -> None:
        with self._lock:
            self.read += read
            self.digest += digest
            self.copy += copy
            self.check += check
            self.bytes += nbytes

    def as_elapsed(self) -> LoadTimes:
        """The time that passed, divided as the threads' time is."""
        busy = self.read + self.digest + self.copy + self.check
        share = min(1.0, self.elapsed / busy) if busy else 0.0
        read, digest, copy, check = (part * share for part in (self.read, self.digest, self.copy, self.check))
        return LoadTimes(read, digest, copy, check, self.bytes)


class Use(Protocol):
    """Does with a verified extent what it was read for.

    Returns what waits until its memory may be used again; None if that is now.
    """

    def __call__(self, extent: Extent, data: memoryview, times: LoadClock) -> Callable[[], object] | None: ...


class Buffers:
    """Memory for extents: at most `most` bytes, or one larger extent alone."""

    def __init__(self, most: int, made: Callable[[memoryview], Callable[[], object]] | None = None) -> None:
        """`made` is told of each new buffer, to page-lock it; what it returns is called before it goes."""
        self._most = most
        self._made = made
        self._free: list[_Block] = []
        self._busy: deque[tuple[_Block, Callable[[], object]]] = deque()
        """Given back, and still read by a device."""
        self._taken = 0
        """Bytes of the buffers that extents are in now."""
        self._changed = threading.Condition()

    def take(self, length: int, stopped: threading.Event) -> _Block | None:
        """A buffer for an extent; None: the reading was stopped meanwhile."""
        while not stopped.is_set():
            with self._changed:
                while self._busy and not self._fits(length):
                    self._finish_oldest()
                if self._fits(length):
                    buffer = self._reused(length)
                    self._taken += length if buffer is None else buffer.size
                    break
                self._changed.wait(_LOOK)
        else:
            return None
        if buffer is None:
            try:
                buffer = self._new(length)
            except BaseException:
                with self._changed:
                    self._taken -= length
                    self._changed.notify_all()
                raise
        return buffer

    def give_back(self, buffer: _Block, until: Callable[[], object] | None) -> None:
        """`until` waits for whatever still reads it."""
        with self._changed:
            self._taken -= buffer.size
            if until is not None:
                self._busy.append((buffer, until))
            else:
                self._free.append(buffer)
            self._changed.notify_all()

    def close(self) -> None:
        """Wait for what is still being read, and let go of all memory."""
        with self._changed:
            while self._busy:
                self._finish_oldest()
            while self._free:
                self._free.pop().release()

    def _fits(self, length: int) -> bool:
        """Whether there is room for it beside what is in use; a larger one has to be alone."""
        busy = sum(buffer.size for buffer, _ in self._busy)
        return self._taken + busy == 0 or self._taken + busy + length <= self._most

    def _reused(self, length: int) -> _Block | None:
        """The smallest free one that is large enough; if there is none, what is in the way is let go of."""
        fitting = [buffer for buffer in self._free if buffer.size >= length]
        best = min(fitting, key=lambda buffer: buffer.size, default=None)
        if best is not None and (best.size <= 2 * length or best.size <= ALONE):
            self._free.remove(best)
            return best
        in_use = self._taken + sum(buffer.size for buffer, _ in self._busy)
        while self._free and in_use + sum(buffer.size for buffer in self._free) + length > self._most:
            smallest = min(self._free, key=lambda buffer: buffer.size)
            self._free.remove(smallest)
            smallest.release()
        return None

    def _finish_oldest(self) -> None:
        buffer, wait = self._busy.popleft()
        wait()
        self._free.append(buffer)

    def _new(self, length: int) -> _Block:
        memory = mmap.mmap(-1, length)
        with contextlib.suppress(OSError, ValueError, AttributeError):
            memory.madvise(mmap.MADV_HUGEPAGE)
        view = memoryview(memory)
        return _Block(view, length, self._made(view) if self._made is not None else None)


class _Block(NamedTuple):
    view: memoryview
    size: int
    unlock: Callable[[], object] | None

    def release(self) -> None:
        if self.unlock is not None:
            self.unlock()


class _File:
    """A file that several threads read: opened by the first, closed by the last."""

    def __init__(self, open_shard: OpenShard, entry: FileEntry) -> None:
        self._open = open_shard
        self._entry = entry
        self._stack = contextlib.ExitStack()
        self._shard: ShardSource | None = None
        self._lock = threading.Lock()
        self.left = 0
        """How many stretches of it are still to be read."""

    def shard(self) -> ShardSource:
        with self._lock:
            if self._shard is None:
                self._shard = self._stack.enter_context(self._open(self._entry))
            return self._shard

    def done(self) -> None:
        with self._lock:
            self.left -= 1
            if not self.left:
                self._shard = None
                self._stack.close()

    def close(self) -> None:
        with self._lock:
            self._shard = None
            self._stack.close()


class _Stretch(NamedTuple):
    """Neighbouring extents, read in order by one thread."""

    file: _File
    extents: list[Extent]


def threads_for_loading() -> int:
    """This rank's share of the cores, and two at least: one reads while the other waits."""
    return max(2, min(MOST_THREADS, proc.cores_of_this_rank()))


class ExtentReader:
    """Reads extents of files, once. Made anew for every reading."""

    def __init__(
        self,
        open_shard: OpenShard,
        buffers: Buffers,
        *,
        threads: int,
        in_place: Callable[[Extent], bool],
        times: LoadClock,
    ) -> None:
        """`in_place`: whether an extent may be used where it lies, if its source allows that."""
        self._open = open_shard
        self._buffers = buffers
        self._threads = threads
        self._in_place = in_place
        self._times = times
        self._stopped = threading.Event()
        self._errors: list[BaseException] = []
        self._calls: SimpleQueue[Callable[[], None]] = SimpleQueue()
        self._caller = threading.get_ident()
        self._helpers: ThreadPoolExecutor | None = None
        """Threads that read shares of large extents."""
        self._lock = threading.Lock()

    def read(self, files: Iterable[tuple[FileEntry, list[Extent]]], use: Use) -> None:
        """Use every extent, verified. Raises what was raised first, by reading or by using one."""
        opened: list[_File] = []
        began = time.perf_counter()
        left = self._stretches(files, opened)
        ahead = list(itertools.islice(left, 2))
        total = sum(extent.length for stretch in ahead for extent in stretch.extents)
        wanted = 1 if len(ahead) < 2 or total < ALONE else self._threads
        todo = itertools.chain(ahead, left)
        taking = threading.Lock()

        def work() -> None:
            while not self._stopped.is_set():
                try:
                    with taking:
                        stretch = next(todo, None)
                    if stretch is None:
                        return
                    self._read_stretch(stretch, use)
                except BaseException as error:  # noqa: BLE001 - the caller's thread raises it
                    self._errors.append(error)
                    self._stopped.set()

        try:
            if wanted == 1:
                work()
            else:
                self._work_together(work, wanted)
        finally:
            self._stopped.set()
            if self._helpers is not None:
                self._helpers.shutdown(wait=True, cancel_futures=True)
            for file in opened:
                file.close()
            self._times.elapsed += time.perf_counter() - began
        if self._errors:
            raise self._errors[0]

    def on_caller(self, call: Callable[[], T]) -> T:
        """Have the thread that called `read` do this, and return what it returns."""
        if threading.get_ident() == self._caller:
            return call()
        done: Future[T] = Future()

        def run() -> None:
            try:
                done.set_result(call())
            except BaseException as error:  # noqa: BLE001 - for whoever waits
                done.set_exception(error)

        self._calls.put(run)
        while True:
            with contextlib.suppress(TimeoutError):
                return done.result(_LOOK)
            if self._stopped.is_set() and not done.done():
                raise CheckpointError("the load was stopped")

    def _stretches(
        self, files: Iterable[tuple[FileEntry, list[Extent]]], opened: list[_File]
    ) -> Iterator[_Stretch]:
        for entry, extents in files:
            file = _File(self._open, entry)
            opened.append(file)
            stretches = list(_cut(extents))
            file.left = len(stretches)
            for stretch in stretches:
                yield _Stretch(file, stretch)

    def _work_together(self, work: Callable[[], None], wanted: int) -> None:
        ended: SimpleQueue[None] = SimpleQueue()
        # Nobody begins before all are known: whatever interrupts this thread, it knows whom to wait for.
        gate = threading.Event()

        def thread() -> None:
            gate.wait()
            try:
                work()
            finally:
                ended.put(None)
                self._calls.put(lambda: None)

        started: list[threading.Thread] = []
        try:
            for number in range(wanted):
                one = threading.Thread(target=thread, name=f"holdfast-load-{number}", daemon=True)
                try:
                    one.start()
                except RuntimeError:
                    break  # no more threads are to be had; these will do
                started.append(one)
            gate.set()
            if not started:
                work()
                return
            while ended.qsize() < len(started):
                with contextlib.suppress(Empty):
                    self._calls.get(timeout=_LOOK)()
        finally:
            self._stopped.set()
            gate.set()
            for one in started:
                one.join()

    def _read_stretch(self, stretch: _Stretch, use: Use) -> None:
        shard = stretch.file.shard()
        for extent in stretch.extents:
            if self._stopped.is_set():
                return
            self._read_extent(shard, extent, use)
        stretch.file.done()

    def _read_extent(self, shard: ShardSource, extent: Extent, use: Use) -> None:
        done = 0
        buffer: _Block | None = None
        until: Callable[[], object] | None = None
        try:
            while True:
                turn = shard.turn
                view = shard.in_place(extent.offset, extent.length) if self._in_place(extent) else None
                if view is not None:
                    _, why = self._digested(extent, view, 0)
                else:
                    if buffer is None:
                        buffer = self._buffers.take(extent.length, self._stopped)
                        if buffer is None:
                            return
                    view = buffer.view[: extent.length]
                    good, why = self._fill(shard, extent, view, done)
                    done += good  # another source has to supply only the rest
                if self._stopped.is_set():
                    return
                if not why:
                    break
                if not shard.another(why, turn):
                    raise CheckpointError(why)
            self._times.add(nbytes=extent.length)
            until = use(extent, view, self._times)
        finally:
            if buffer is not None:
                self._buffers.give_back(buffer, until)

    def _fill(self, shard: ShardSource, extent: Extent, view: memoryview, done: int) -> tuple[int, str]:
        """Read its chunks from `done` on; how many of them are right, and why the next must not be used."""
        chunks = extent.chunks[done:]
        rest = view[chunks[0].offset - extent.offset :]
        try:
            if len(chunks) > 1:
                self._read_slices(shard, rest, chunks[0].offset, None)
                return self._digested(extent, view, done)
            digest = xxhash.xxh3_128()
            if rest.nbytes >= SHARED_FROM and self._threads > 1 and shard.concurrent:
                self._read_shares(shard, rest, chunks[0].offset, digest)
            else:
                self._read_slices(shard, rest, chunks[0].offset, digest)
        except CheckpointError as error:
            return 0, str(error)
        why = _unlike(extent.path, chunks[0], digest.hexdigest())
        return int(not why), why

    def _digested(self, extent: Extent, view: memoryview, done: int) -> tuple[int, str]:
        started = time.perf_counter()
        try:
            for at, chunk in enumerate(extent.chunks[done:]):
                start = chunk.offset - extent.offset
                found = xxhash.xxh3_128_hexdigest(view[start : start + chunk.length])
                if found != chunk.digest:
                    return at, _unlike(extent.path, chunk, found)
            return len(extent.chunks) - done, ""
        finally:
            self._times.add(digest=time.perf_counter() - started)

    def _read_slices(
        self, shard: ShardSource, view: memoryview, base: int, digest: xxhash.xxh3_128 | None
    ) -> None:
        """Read in order, digesting each slice while it is in the cache."""
        reading = digesting = 0.0
        step, until = shard.at_once, base + view.nbytes
        for start in range(0, view.nbytes, step):
            if self._stopped.is_set():
                break
            part = view[start : start + step]
            began = time.perf_counter()
            shard.read_into(part, base + start, until=until)
            read = time.perf_counter()
            reading += read - began
            if digest is not None:
                digest.update(part)
                digesting += time.perf_counter() - read
        self._times.add(read=reading, digest=digesting)

    def _read_shares(self, shard: ShardSource, view: memoryview, base: int, digest: xxhash.xxh3_128) -> None:
        """Several threads read, and this one digests what they have read, in order."""
        with self._lock:
            if self._helpers is None:
                self._helpers = ThreadPoolExecutor(self._threads, thread_name_prefix="holdfast-load-share")
            helpers = self._helpers

        def share(start: int) -> memoryview:
            part = view[start : start + SHARE]
            self._read_slices(shard, part, base + start, None)
            return part

        starts = iter(range(0, view.nbytes, SHARE))
        coming = deque(helpers.submit(share, start) for start in itertools.islice(starts, self._threads + 1))
        try:
            while coming and not self._stopped.is_set():
                part = coming.popleft().result()
                coming.extend(helpers.submit(share, start) for start in itertools.islice(starts, 1))
                began = time.perf_counter()
                digest.update(part)
                self._times.add(digest=time.perf_counter() - began)
        finally:
            for one in coming:
                if not one.cancel():
                    with contextlib.suppress(CheckpointError):
                        one.result()  # it writes into memory that is about to be used for something else


def _cut(extents: Sequence[Extent]) -> Iterator[list[Extent]]:
    """What threads take on: enough to be worth it, and little enough that all end at about the same time."""
    stretch: list[Extent] = []
    size = 0
    for extent in extents:
        if stretch and size + extent.length > STRETCH:
            yield stretch
            stretch, size = [], 0
        stretch.append(extent)
        size += extent.length
    if stretch:
        yield stretch


def _unlike(path: str, chunk: Chunk, found: str) -> str:
    """Why bytes with this digest are not the chunk's; empty if they are."""
    if found == chunk.digest:
        return ""
    return (
        f"altered {path}: bytes {chunk.offset} to {chunk.offset + chunk.length} have digest {found}, "
        f"expected {chunk.digest}"
    )
