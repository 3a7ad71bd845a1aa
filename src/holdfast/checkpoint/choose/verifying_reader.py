"""DCP's storage reader, verifying every byte before it is used, in one pass.

Guarantee: nothing is unpickled, and no tensor is touched, before the bytes it comes from have matched the
digest taken when they were written. Each item is read once into memory, digested there, and used from that
same memory, so what was verified is what is loaded; a large one that is already in this node's memory is
digested and used there, under the lease that keeps it unchanged. Then each tensor is checked where it ended
up: its fingerprint there must be the one taken when it was saved (or, for a tensor that is put together from
parts, that of each part as it was read).

Several threads do all of this at once (extents.py), each with another extent of the files. Small items that
lie side by side are one extent, and each is digested by itself. What goes to a device is read into page-
locked memory and copied from there on a stream of its own, while the next extents are read; all that lies
on a device is checked in one go at the end. A tensor that is stored whole goes straight to where it is
wanted (`expect`); DCP plans only what is put together from parts. An archive is opened once for all those
that differ from it only in the tensor's own bytes.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import io
import itertools
import time
import zipfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, cast

import numpy as np
import torch
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner, ReadItem
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.futures import Future

from holdfast.base import compute_local_shape_and_global_offset, narrow_tensor_by_index, read_regular
from holdfast.checkpoint.choose.extents import (
    MOST,
    Buffers,
    Extent,
    ExtentReader,
    LoadClock,
    threads_for_loading,
)
from holdfast.checkpoint.format import (
    METADATA,
    READ_SLICE,
    Chunk,
    Chunks,
    FileEntry,
    Manifest,
    ManifestError,
    MetadataError,
    OpenShard,
    ShardFile,
    StorageEntry,
    StoredChunks,
    StoredMetadata,
    as_torch,
    digest_bytes,
    memory_to_spare,
    parse,
    plain,
)
from holdfast.checkpoint.format import fingerprint as fingerprints
from holdfast.checkpoint.save import pin
from holdfast.checkpoint.state import SplitTensor
from holdfast.errors import CheckpointError
from holdfast.process import proc

IN_PLACE = 64 * 1024
"""Items at least this large are read one by one; smaller ones together, where they lie side by side."""
TOGETHER = READ_SLICE
"""Bytes of small items that are read at a time."""
LEAST = 64 * 1024 * 1024
"""Bytes of memory that are read into, however little there is."""
Place = tuple[int, int]
"""Where an item lies in its file: (offset, length)."""
Form = tuple[torch.dtype, tuple[int, ...], int]
"""What archives that differ only in their tensor's bytes have in common: dtype, shape, length."""


class Whole(NamedTuple):
    """A tensor that is stored whole in one item, and where it is wanted."""

    name: str
    place: Place
    form: Form
    target: torch.Tensor


class _Planned(NamedTuple):
    """A part of a tensor that DCP has planned."""

    item: ReadItem
    target: torch.Tensor | None
    """Where it is wanted; None for an object, which the planner loads."""


class _Frame(NamedTuple):
    """What all archives of a form have around the tensor's bytes."""

    before: np.ndarray[tuple[int], np.dtype[np.uint8]]
    raw: int
    after: np.ndarray[tuple[int], np.dtype[np.uint8]]


class _Chunks(dict[str, dict[Place, Chunk]]):
    """What the manifest says of each file's chunks, looked up when the file is first read."""

    def __init__(self, tables: Mapping[str, list[Chunk]]) -> None:
        super().__init__()
        self._tables = tables

    def __missing__(self, path: str) -> dict[Place, Chunk]:
        try:
            found = {(chunk.offset, chunk.length): chunk for chunk in self._tables[path]}
        except ManifestError as error:
            raise CheckpointError(f"unreadable-manifest: {error}") from error
        self[path] = found
        return found


class VerifyingReader(FileSystemReader):
    """Reads a checkpoint directory under its manifest."""

    def __init__(
        self,
        directory: Path,
        manifest: Manifest,
        shards: OpenShard | None = None,
        tables: Mapping[str, list[Chunk]] | None = None,
        metadata: bytes | None = None,
        *,
        threads: int = 0,
    ) -> None:
        """`shards` opens a shard where it does not lie in the directory itself.

        `tables`: the files' chunks, where the manifest was read without them. `metadata`: what is in
        `.metadata`, if somebody else has read it; it is verified here all the same. `threads`: how many read
        at once, 0 for this rank's share of the cores.
        """
        super().__init__(directory)
        self._directory = directory
        self._files = {entry.path: entry for entry in manifest.files}
        self._tables = tables or {entry.path: entry.chunks for entry in manifest.files}
        self._chunks = _Chunks(self._tables)
        self._open = shards or functools.partial(ShardFile, directory)
        self._given = metadata
        self._read: dict[str, set[int]] = {}
        """Offsets verified so far, by file."""
        self._stored: StoredMetadata | None = None
        self._metadata: Metadata | None = None
        self._planned: Metadata | None = None
        """What DCP plans from at present, if that is not all."""
        self._singles: Mapping[str, StorageEntry] | None = None
        self._wholes: dict[str, dict[Place, Whole]] = {}
        """Expected, and not read yet; by file."""
        self._frames: dict[Form, _Frame | None] = {}
        self._threads = threads or threads_for_loading()
        self.times = LoadClock()
        """Where the time went, over all that was read so far."""
        self._on_devices: list[tuple[str, torch.Tensor, str]] = []
        """Loaded tensors whose fingerprint is still to be checked: (name, tensor, expected)."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        del args, kwargs
        if self._metadata is None:
            try:
                self._metadata = as_torch(self._read_stored())
            except MetadataError as error:
                raise CheckpointError(f"malformed {METADATA}: {error}") from error
        return self._planned or self._metadata

    def _read_stored(self) -> StoredMetadata:
        """What `.metadata` says, kept in arrays: it may be of millions of chunks, of which few are read."""
        if self._stored is None:
            entry = self._files[METADATA]
            data, self._given = self._given, None
            if data is None:
                data = read_regular(self._directory / METADATA, entry.size)
            found = digest_bytes(data)
            if found != entry.digest:
                raise CheckpointError(f"altered {METADATA}: expected {entry.digest}, found {found}")
            try:
                self._stored = parse(data)
            except MetadataError as error:
                raise CheckpointError(f"malformed {METADATA}: {error}") from error
        return self._stored

    def expect(self, wanted: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Let the next `read_data` also fill those of these that are stored whole; returns the others.

        The names, shapes and dtypes are known to fit what is stored (`check_strict`).
        """
        stored, singles = self._read_stored(), self._stored_once()
        rest: dict[str, torch.Tensor] = {}
        for name, tensor in wanted.items():
            entry, info = stored.tensors.get(name), singles.get(name)
            if (
                info is None
                or type(tensor) not in (torch.Tensor, torch.nn.Parameter)
                or entry is None
                or len(entry.chunks) != 1
                or entry.chunks[0][1] != entry.shape
                or entry.shape != tensor.shape
                or entry.dtype != _name_of(tensor.dtype)
                or tensor.layout is not torch.strided
            ):
                rest[name] = tensor
                continue
            places = self._wholes.setdefault(info.path, {})
            place = info.offset, info.length
            if place in places:
                rest[name] = tensor
                continue
            target = tensor.detach()
            form = tensor.dtype, entry.shape, info.length
            places[place] = Whole(name, place, form, target)
        return rest

    def _stored_once(self) -> Mapping[str, StorageEntry]:
        """Where items lie whose name has one place only; of the others, it may be that of a part."""
        if self._singles is None:
            storage = self._read_stored().storage
            self._singles = (
                storage.singles()
                if isinstance(storage, StoredChunks)
                else {name: entry for (name, _), entry in storage.items()}
            )
        return self._singles

    @contextlib.contextmanager
    def planning(self, wanted: Mapping[str, Any]) -> Iterator[None]:
        """DCP sees these entries alone, and of a sharded one only chunks of this rank's own part.

        It compares each part that is wanted with each chunk that is stored.
        """
        whole = self.read_metadata()
        entries = {
            name: whole.state_dict_metadata[name] for name in wanted if name in whole.state_dict_metadata
        }
        for name, value in wanted.items():
            tensor, own = self._read_stored().tensors.get(name), _own_boxes(value)
            if tensor is not None and own is not None and isinstance(tensor.chunks, Chunks):
                within = {chunk for box in own for chunk in tensor.chunks.within(*box)}
                chunks = [
                    ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes))
                    for offsets, sizes in sorted(within)
                ]
                entry = cast("TensorStorageMetadata", entries[name])
                entries[name] = dataclasses.replace(entry, chunks=chunks)
        self._planned = dataclasses.replace(whole, state_dict_metadata=entries)
        try:
            yield
        finally:
            self._planned = None

    def read_expected(self) -> None:
        """Read what `expect` took on, when there is nothing else to read."""
        self._read_all({}, None)

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        parts: dict[str, dict[Place, list[ReadItem]]] = {}
        for item in plan.items:
            info = self.storage_data[item.storage_index]
            parts.setdefault(info.relative_path, {}).setdefault((info.offset, info.length), []).append(item)
        self._read_all(parts, planner)
        future: Future[None] = Future()
        future.set_result(None)
        return future

    def _read_all(self, parts: dict[str, dict[Place, list[ReadItem]]], planner: LoadPlanner | None) -> None:
        """Read what is expected and what DCP has planned, in one pass over each file."""
        wholes, self._wholes = self._wholes, {}
        planned = {
            path: {place: [_part(item, planner) for item in items] for place, items in places.items()}
            for path, places in parts.items()
        }
        devices = _Devices(wholes, planned)
        buffers = Buffers(_most(), devices.lock_pages if devices.any else None)
        reader = self._extent_reader(buffers, in_place=lambda extent: not devices.takes(extent))

        def use(extent: Extent, data: memoryview, times: LoadClock) -> Callable[[], object] | None:
            whole, part = wholes.get(extent.path, {}), planned.get(extent.path, {})
            filling = _Filling(reader, devices, times, self._on_devices)
            places = [(chunk.offset, chunk.length) for chunk in extent.chunks]
            self._fill(extent, data, [whole[place] for place in places if place in whole], filling)
            for chunk, place in zip(extent.chunks, places, strict=True):
                if place in part:
                    assert planner is not None
                    start = chunk.offset - extent.offset
                    item = data[start : start + chunk.length]
                    self._use(item, part[place], planner, chunk.fingerprint, filling)
            self._was_read(extent)
            return filling.until()

        paths = dict.fromkeys([*wholes, *planned])
        wanted = ((path, sorted({*wholes.get(path, {}), *planned.get(path, {})})) for path in paths)
        try:
            reader.read(self._pieces(wanted), use)
            devices.join()
        finally:
            buffers.close()
        for places in planned.values():
            for part in itertools.chain.from_iterable(places.values()):
                if planner is not None and part.target is not None:
                    planner.commit_tensor(part.item, part.target)
        started = time.perf_counter()
        self._check_on_devices()
        checking = time.perf_counter() - started
        self.times.add(check=checking)
        self.times.elapsed += checking

    def verify_rest(self, paths: Iterable[str]) -> None:
        """Verify the chunks of these files that loading did not need."""

        def left() -> Iterator[tuple[str, list[Place]]]:
            for path in paths:
                done = self._read.get(path, set())
                yield (
                    path,
                    [(c.offset, c.length) for c in self._chunks[path].values() if c.offset not in done],
                )

        def use(extent: Extent, data: memoryview, times: LoadClock) -> None:
            del data, times
            self._was_read(extent)

        buffers = Buffers(_most())
        try:
            self._extent_reader(buffers).read(self._pieces(left()), use)
        finally:
            buffers.close()

    def shard_paths(self) -> list[str]:
        return sorted(path for path in self._files if path != METADATA)

    def _extent_reader(
        self, buffers: Buffers, in_place: Callable[[Extent], bool] = lambda _: True
    ) -> ExtentReader:
        return ExtentReader(
            self._open,
            buffers,
            threads=self._threads,
            in_place=lambda extent: (
                len(extent.chunks) == 1 and extent.length >= IN_PLACE and in_place(extent)
            ),
            times=self.times,
        )

    def _was_read(self, extent: Extent) -> None:
        self._read.setdefault(extent.path, set()).update([chunk.offset for chunk in extent.chunks])

    def _pieces(
        self, files: Iterable[tuple[str, Sequence[Place]]]
    ) -> Iterator[tuple[FileEntry, list[Extent]]]:
        """What is to be read of files, as the manifest has it. Places are in the order of the file."""
        for path, places in files:
            if path not in self._files:
                raise CheckpointError(
                    f"stale-metadata {path[:200]!r}: .metadata names a file the manifest does not list"
                )
            if not places:
                continue
            chunks = self._chunks[path]
            for offset, length in places:
                if (offset, length) not in chunks:
                    raise CheckpointError(
                        f"stale-metadata {path}: .metadata places an item at {offset}+{length}; "
                        "the manifest does not"
                    )
            yield self._files[path], [Extent(path, [chunks[place] for place in run]) for run in runs(places)]

    def _fill(self, extent: Extent, data: memoryview, wholes: Sequence[Whole], filling: _Filling) -> None:
        """Put verified items where they are wanted."""
        prints = {chunk.offset: chunk.fingerprint for chunk in extent.chunks}
        if len(wholes) == 1 and wholes[0].place[1] >= IN_PLACE:
            (whole,) = wholes
            filling.put(whole.name, self._tensor(data, whole.form), whole.target, prints[whole.place[0]])
            return
        # Group those of one form in a row without a gap: for them the difference stays the same.
        key = lambda pair: (pair[1].form, pair[1].place[0] - pair[0] * pair[1].place[1])  # noqa: E731
        for _, found in itertools.groupby(enumerate(wholes), key=key):
            alike = [whole for _, whole in found]
            start, length = alike[0].place[0] - extent.offset, alike[0].place[1]
            expected = [prints[whole.place[0]] for whole in alike]
            self._fill_alike(data[start : start + len(alike) * length], alike, expected, filling)

    def _fill_alike(
        self, data: memoryview, wholes: list[Whole], expected: list[str], filling: _Filling
    ) -> None:
        form = wholes[0].form
        sources = self._tensors(data, form, len(wholes))
        if sources is None:
            for at, (whole, print_) in enumerate(zip(wholes, expected, strict=True)):
                source = _loaded(data[at * form[2] : (at + 1) * form[2]])
                filling.put(whole.name, source, whole.target, print_)
        else:
            names, targets = [whole.name for whole in wholes], [whole.target for whole in wholes]
            filling.put_small(names, sources, targets, expected)

    def _tensors(self, data: memoryview, form: Form, count: int) -> list[torch.Tensor] | None:
        """`count` archives of a form, in a row, as tensors, without copying; None: each must be opened."""
        dtype, sizes, length = form
        rows = np.frombuffer(data, np.uint8).reshape(count, length)
        if form not in self._frames:
            self._frames[form] = _frame_of(data[:length], form)
        frame = self._frames[form]
        if frame is None:
            return None
        start = len(frame.before)
        end = start + frame.raw
        if not (rows[:, :start] == frame.before).all() or not (rows[:, end:] == frame.after).all():
            return None
        if (rows.ctypes.data + start) % dtype.itemsize:
            return None
        raw = torch.from_numpy(rows)[:, start:end]
        return list(raw.view(dtype).view(count, *sizes).unbind(0))

    def _use(
        self,
        data: memoryview,
        parts: list[_Planned],
        planner: LoadPlanner,
        fingerprint: str,
        filling: _Filling,
    ) -> None:
        tensor: torch.Tensor | None = None
        for item, target in parts:
            if target is None:
                filling.on_caller(functools.partial(planner.load_bytes, item, io.BytesIO(data)))
                continue
            if tensor is None:
                form = self._form(item, data.nbytes)
                tensor = self._tensor(data, form) if form is not None else _loaded(data)
            source = narrow_tensor_by_index(tensor, item.storage_offsets, item.lengths)
            if target.size() != source.size():
                raise CheckpointError(
                    f"{item.storage_index.fqn}: stored shape {tuple(source.size())}, "
                    f"wanted {tuple(target.size())}"
                )
            expected = fingerprint if fingerprint and source.numel() == tensor.numel() else ""
            filling.put(item.storage_index.fqn, source, target, expected)

    def _check_on_devices(self) -> None:
        waiting, self._on_devices = self._on_devices, []
        found = fingerprints.begin([plain(target) for _, target, _ in waiting]).result()
        for (name, _, expected), now in zip(waiting, found, strict=True):
            _require_same(name, expected, now)

    def _tensor(self, data: memoryview, form: Form) -> torch.Tensor:
        """One archive's tensor, used in place if possible."""
        if data.nbytes < IN_PLACE:
            found = self._tensors(data, form, 1)
            return found[0] if found is not None else _loaded(data)
        dtype, sizes, _ = form
        record, count = _only_data_record(data), int(np.prod(sizes, dtype=np.int64))
        if record is None or record[1] != count * dtype.itemsize or count == 0:
            return _loaded(data)
        start, length = record
        return torch.frombuffer(data[start : start + length], dtype=dtype, count=count).view(sizes)

    def _form(self, item: ReadItem, length: int) -> Form | None:
        """What `.metadata` says of an item; None if nothing."""
        entry = self._read_stored().tensors.get(item.storage_index.fqn)
        if entry is None:
            return None
        offsets, chunks = item.storage_index.offset, entry.chunks
        if offsets is None:
            sizes = chunks[0][1] if chunks else None
        elif isinstance(chunks, Chunks):
            sizes = chunks.sizes_at(tuple(offsets))
        else:
            sizes = next((size for begin, size in chunks if begin == tuple(offsets)), None)
        return None if sizes is None else (getattr(torch, entry.dtype), sizes, length)


@functools.cache
def _name_of(dtype: torch.dtype) -> str:
    """As `.metadata` has it."""
    return str(dtype).removeprefix("torch.")


def _own_boxes(value: Any) -> list[tuple[tuple[int, ...], tuple[int, ...]]] | None:
    """(offsets, sizes) of what this rank holds of a tensor, where that is known to be in boxes."""
    if isinstance(value, SplitTensor):
        return [(tuple(cut.offsets), tuple(cut.size)) for cut in value.cuts]
    if not isinstance(value, DTensor) or value.device_mesh.get_coordinate() is None:
        return None
    if not all(type(placement) in (Shard, Replicate) for placement in value.placements):
        return None
    sizes, offsets = compute_local_shape_and_global_offset(value.shape, value.device_mesh, value.placements)
    return [(tuple(offsets), tuple(sizes))]


def runs(places: Iterable[Place]) -> Iterator[list[Place]]:
    """Pure: what is read at a time, in order: one large item, or small ones that lie side by side."""
    run: list[Place] = []
    size = 0
    for place in places:
        offset, length = place
        if run and (length >= IN_PLACE or size + length > TOGETHER or offset != run[-1][0] + run[-1][1]):
            yield run
            run, size = [], 0
        run.append(place)
        size += length
        if length >= IN_PLACE:
            yield run
            run, size = [], 0
    if run:
        yield run


class _Devices:
    """The CUDA devices that tensors are wanted on, and the streams on which they are filled."""

    def __init__(
        self, wholes: Mapping[str, Mapping[Place, Whole]], parts: Mapping[str, Mapping[Place, list[_Planned]]]
    ) -> None:
        self._places: set[tuple[str, int]] = set()
        """(file, offset) of what goes to a device."""
        self._streams: dict[torch.device, torch.cuda.Stream] = {}
        for path, places in wholes.items():
            for place, whole in places.items():
                self._add(path, place, whole.target)
        for path, found in parts.items():
            for place, items in found.items():
                for part in items:
                    self._add(path, place, part.target)
        self.any = bool(self._streams)

    def _add(self, path: str, place: Place, target: torch.Tensor | None) -> None:
        if target is None or target.device.type != "cuda":
            return
        self._places.add((path, place[0]))
        if target.device not in self._streams:
            # What the caller has queued (initial values, say) comes before what is copied now.
            stream = torch.cuda.Stream(target.device)  # type: ignore[no-untyped-call]
            self._streams[target.device] = stream
            stream.wait_stream(torch.cuda.current_stream(target.device))

    def takes(self, extent: Extent) -> bool:
        """Whether it goes to a device: then it is read into page-locked memory, wherever it lies."""
        return any((extent.path, chunk.offset) in self._places for chunk in extent.chunks)

    def lock_pages(self, memory: memoryview) -> Callable[[], object]:
        # Memory that cannot be locked still works: copies from it are slower, and wait.
        return pin(torch.frombuffer(memory, dtype=torch.uint8), threads=1).release

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> Callable[[], object]:
        """Start copying to a device; returns what waits until `source` is no longer needed."""
        stream = self._streams[target.device]
        with torch.cuda.device(target.device), torch.cuda.stream(stream):
            target.copy_(source, non_blocking=True)
            done = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
            done.record(stream)
        return done.synchronize

    def join(self) -> None:
        """What the caller queues from now on comes after what was copied."""
        for device, stream in self._streams.items():
            torch.cuda.current_stream(device).wait_stream(stream)


class _Filling:
    """Puts the tensors of one extent where they are wanted, and checks them there."""

    def __init__(
        self,
        reader: ExtentReader,
        devices: _Devices,
        times: LoadClock,
        later: list[tuple[str, torch.Tensor, str]],
    ) -> None:
        """`later`: tensors on devices, to be checked all together: (name, tensor, expected)."""
        self.on_caller = reader.on_caller
        self._devices = devices
        self._times = times
        self._later = later
        self._waits: list[Callable[[], object]] = []
        self._begun: list[torch.Tensor] = []
        """What devices are being filled from."""

    def until(self) -> Callable[[], object] | None:
        """What waits until devices have read the extent's memory; None if none does."""
        if not self._waits:
            return None

        def wait() -> None:
            for one in self._waits:
                one()
            self._begun.clear()

        return wait

    def put(self, name: str, source: torch.Tensor, target: torch.Tensor, expected: str) -> None:
        """Copy one tensor, and check it where it then lies."""
        if target.device.type == "cuda":
            started = time.perf_counter()
            self._waits.append(self._devices.copy(target, source))
            self._begun.append(source)
            self._times.add(copy=time.perf_counter() - started)
            self._check(name, source, target, expected)
        elif _same_bytes(target, source):
            copying, checking, found = _copy_and_look(target, source, expected)
            self._times.add(copy=copying, check=checking)
            _require_same(name, expected, found)
        else:
            # torch may use threads of its own for this, which belong to the caller's thread.
            self.on_caller(functools.partial(self._put_with_torch, name, source, target, expected))

    def put_small(
        self, names: list[str], sources: list[torch.Tensor], targets: list[torch.Tensor], expected: list[str]
    ) -> None:
        """Several small tensors of one form, on one device."""
        if targets[0].device.type == "cuda":
            for name, source, target, print_ in zip(names, sources, targets, expected, strict=True):
                self.put(name, source, target, print_)
            return
        started = time.perf_counter()
        torch._foreach_copy_(targets, sources)
        copied = time.perf_counter()
        for name, source, target, print_ in zip(names, sources, targets, expected, strict=True):
            lies = fingerprints.small_bytes(target) if print_.startswith("x:") else None
            if lies is not None:
                _require_same(name, print_, fingerprints.of_small(lies))
            else:
                self._check(name, source, target, print_)
        self._times.add(copy=copied - started, check=time.perf_counter() - copied)

    def _put_with_torch(self, name: str, source: torch.Tensor, target: torch.Tensor, expected: str) -> None:
        started = time.perf_counter()
        target.copy_(source)
        self._times.add(copy=time.perf_counter() - started)
        self._check(name, source, target, expected)

    def _check(self, name: str, source: torch.Tensor, target: torch.Tensor, expected: str) -> None:
        """Check that the live tensor is what it must be; on a device, later, for all tensors at once."""
        if target.dtype != source.dtype:
            return
        if target.is_cpu:
            expected = expected or fingerprints.of_live(plain(source), "x")
            found = fingerprints.of_live(plain(target), fingerprints.kind_of(expected))
            _require_same(name, expected, found)
        else:
            if not expected.startswith("m:"):
                expected = fingerprints.of_live(plain(source), "m")
            self._later.append((name, target, expected))


def _loaded(data: memoryview) -> torch.Tensor:
    loaded = torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)
    assert isinstance(loaded, torch.Tensor)
    return loaded


def _frame_of(data: memoryview, form: Form) -> _Frame | None:
    """What surrounds the tensor's bytes in this archive, if torch itself finds the tensor exactly there."""
    dtype, sizes, _ = form
    record, tensor = _only_data_record(data), _loaded(data)
    if record is None or record[1] != tensor.nbytes or not tensor.nbytes or not tensor.is_contiguous():
        return None
    start, end = record[0], record[0] + record[1]
    whole = np.frombuffer(data, np.uint8)
    if tensor.dtype != dtype or tuple(tensor.shape) != sizes or start % dtype.itemsize:
        return None
    if len(whole) % dtype.itemsize or not np.array_equal(plain(tensor).numpy(), whole[start:end]):
        return None
    return _Frame(whole[:start].copy(), end - start, whole[end:].copy())


def _part(item: ReadItem, planner: LoadPlanner | None) -> _Planned:
    assert planner is not None
    if item.type == LoadItemType.BYTE_IO:
        return _Planned(item, None)
    return _Planned(item, planner.resolve_tensor(item).detach())


def _most() -> int:
    """Bytes of memory to read into: not more than a quarter of what this rank may still take."""
    return max(LEAST, min(MOST, memory_to_spare() // (4 * proc.local_ranks())))


def _same_bytes(target: torch.Tensor, source: torch.Tensor) -> bool:
    """Whether copying one to the other means copying bytes on the host, in their order."""
    plainly = target.is_cpu and target.is_contiguous() and source.is_contiguous()
    return plainly and target.dtype == source.dtype and not target.is_neg() and not target.is_conj()


def _copy_and_look(target: torch.Tensor, source: torch.Tensor, expected: str) -> tuple[float, float, str]:
    """Copy, and look at the target as it then is, slice by slice while it is in the cache.

    Returns the seconds of both, and the target's fingerprint, of the kind that is expected. Where none is,
    the target is compared with the source itself: "" if they are alike.
    """
    to, what = (tensor.reshape(-1).view(torch.uint8).numpy() for tensor in (target, source))
    hasher = fingerprints.Hasher(fingerprints.kind_of(expected)) if expected else None
    copying = checking = 0.0
    alike = True
    for start in range(0, what.nbytes, READ_SLICE):
        began = time.perf_counter()
        there, here = to[start : start + READ_SLICE], what[start : start + READ_SLICE]
        there[...] = here
        copied = time.perf_counter()
        if hasher is not None:
            hasher.update(there.data)
        else:
            alike = alike and np.array_equal(there, here)
        copying += copied - began
        checking += time.perf_counter() - copied
    found = hasher.done() if hasher is not None else "" if alike else "not what was read"
    return copying, checking, found


def _require_same(name: str, expected: str, found: str) -> None:
    if found != expected:
        raise CheckpointError(
            f"wrong-in-memory {name}: its fingerprint after the load is {found}, expected {expected}. "
            "The stored bytes are right; the memory or the way they were put together is not"
        )


def _only_data_record(data: memoryview) -> tuple[int, int] | None:
    """Where the archive's only storage lies: (offset, length)."""
    with zipfile.ZipFile(_ViewFile(data)) as archive:
        records = [info for info in archive.infolist() if "/data/" in info.filename]
    if len(records) != 1 or records[0].compress_type != zipfile.ZIP_STORED:
        return None
    header = records[0].header_offset
    name_length = int.from_bytes(data[header + 26 : header + 28], "little")
    extra_length = int.from_bytes(data[header + 28 : header + 30], "little")
    return header + 30 + name_length + extra_length, records[0].file_size


class _ViewFile(io.RawIOBase):
    """A read-only file over memory, without BytesIO's copy."""

    def __init__(self, data: memoryview) -> None:
        self._data = data
        self._at = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = 0) -> int:
        base = (0, self._at, self._data.nbytes)[whence]
        self._at = max(0, base + offset)
        return self._at

    def read(self, size: int | None = -1) -> bytes:
        end = self._data.nbytes if size is None or size < 0 else min(self._at + size, self._data.nbytes)
        piece = bytes(self._data[self._at : end])
        self._at = max(self._at, end)
        return piece
