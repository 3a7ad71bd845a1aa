"""DCP's storage reader, verifying every byte before it is used, in one pass.

Guarantee: nothing is unpickled, and no tensor is touched, before the bytes it comes from have matched the
digest taken when they were written. Each item is read once into memory, digested there, and used from that
same memory, so what was verified is what is loaded; a large one that is already in this node's memory is
digested and used there, under the lease that keeps it unchanged. While one item is used, a helper thread
reads and digests the next. Then each tensor is checked where it ended up: its fingerprint there must be the
one taken when it was saved (or, for a tensor that is put together from parts, that of each part as it was
read).

Small items that lie side by side are read together, and each is digested by itself. A tensor that is stored
whole goes straight to where it is wanted (`expect`); DCP plans only what is put together from parts. An
archive is opened once for all those that differ from it only in the tensor's own bytes.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import io
import itertools
import zipfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future as Pending
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple, cast

import numpy as np
import torch
import xxhash
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner, ReadItem
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.futures import Future

from holdfast.base import compute_local_shape_and_global_offset, narrow_tensor_by_index, read_regular
from holdfast.checkpoint.format import (
    METADATA,
    READ_SLICE,
    Chunk,
    Chunks,
    Manifest,
    ManifestError,
    MetadataError,
    OpenShard,
    ShardFile,
    ShardSource,
    StorageEntry,
    StoredChunks,
    StoredMetadata,
    as_torch,
    digest_bytes,
    parse,
    plain,
)
from holdfast.checkpoint.format import fingerprint as fingerprints
from holdfast.checkpoint.state import SplitTensor
from holdfast.errors import CheckpointError

IN_PLACE = 64 * 1024
"""Items at least this large are read one by one; smaller ones together, where they lie side by side."""
TOGETHER = READ_SLICE
"""Bytes of small items that are read at a time."""
AHEAD = 256 * 1024 * 1024
"""Items up to this size are read while the previous one is used; memory holds only one larger item."""
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
    ) -> None:
        """`shards` opens a shard where it does not lie in the directory itself.

        `tables`: the files' chunks, where the manifest was read without them. `metadata`: what is in
        `.metadata`, if somebody else has read it; it is verified here all the same.
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
        self._buffers = [bytearray(), bytearray()]
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
        for path in dict.fromkeys([*wholes, *parts]):
            whole, part = wholes.get(path, {}), parts.get(path, {})
            for places, data in self._verified(path, sorted({*whole, *part})):
                self._fill(path, data, places[0][0], [whole[place] for place in places if place in whole])
                for place in places:
                    if planner is not None and place in part:
                        start = place[0] - places[0][0]
                        known = self._chunks[path][place].fingerprint
                        self._use(data[start : start + place[1]], part[place], planner, known)
        self._check_on_devices()

    def verify_rest(self, paths: Iterable[str]) -> None:
        """Verify the chunks of these files that loading did not need."""
        for path in paths:
            done = self._read.get(path, set())
            left = [(c.offset, c.length) for c in self._chunks[path].values() if c.offset not in done]
            if left:
                for _ in self._verified(path, left):
                    pass

    def shard_paths(self) -> list[str]:
        return sorted(path for path in self._files if path != METADATA)

    def _verified(self, path: str, places: Sequence[Place]) -> Iterator[tuple[list[Place], memoryview]]:
        """Verified bytes, for a run of adjacent places at a time, until all are read; valid until the next.

        `places` are in the order in which they lie in the file.
        """
        if path not in self._files:
            raise CheckpointError(
                f"stale-metadata {path[:200]!r}: .metadata names a file the manifest does not list"
            )
        with self._open(self._files[path]) as shard, ThreadPoolExecutor(1) as helper:
            current: tuple[list[Place], Pending[memoryview]] | None = None
            slot = 0
            for run in runs(places):
                # Two buffers take turns: the caller uses one while the other is filled.
                slot = 1 - slot
                if run[0][1] > AHEAD:
                    if current is not None:
                        yield current[0], current[1].result()
                    current, slot = None, 0
                coming = helper.submit(self._read_verified, shard, path, run, slot)
                if current is not None:
                    yield current[0], current[1].result()
                current = run, coming
            if current is not None:
                yield current[0], current[1].result()

    def _read_verified(self, shard: ShardSource, path: str, run: list[Place], slot: int) -> memoryview:
        chunks: list[Chunk] = []
        for place in run:
            chunk = self._chunks[path].get(place)
            if chunk is None:
                raise CheckpointError(
                    f"stale-metadata {path}: .metadata places an item at {place[0]}+{place[1]}; "
                    "the manifest does not"
                )
            chunks.append(chunk)
        done = 0
        while True:
            length = run[-1][0] + run[-1][1] - run[0][0]
            view = shard.in_place(run[0][0], length) if len(run) == 1 and length >= IN_PLACE else None
            if view is not None:
                why = _unlike(path, chunks[0], xxhash.xxh3_128_hexdigest(view))
            else:
                if len(self._buffers[slot]) < length:
                    self._buffers[slot] = bytearray(length)
                view = memoryview(self._buffers[slot])[:length]
                good, why = _read(shard, path, view[run[done][0] - run[0][0] :], chunks[done:])
                done += good  # another source has to supply only the rest
            if not why:
                self._read.setdefault(path, set()).update(chunk.offset for chunk in chunks)
                return view
            if not shard.another(why):
                raise CheckpointError(why)

    def _fill(self, path: str, data: memoryview, base: int, wholes: Sequence[Whole]) -> None:
        """Put verified items where they are wanted; `data` begins at offset `base` of the file."""
        if len(wholes) == 1 and wholes[0].place[1] >= IN_PLACE:
            (whole,) = wholes
            expected = self._chunks[path][whole.place].fingerprint
            self._put(whole.name, self._tensor(data, whole.form), whole.target, expected)
            return
        # Group those of one form in a row without a gap: for them the difference stays the same.
        key = lambda pair: (pair[1].form, pair[1].place[0] - pair[0] * pair[1].place[1])  # noqa: E731
        for _, found in itertools.groupby(enumerate(wholes), key=key):
            alike = [whole for _, whole in found]
            start, length = alike[0].place[0] - base, alike[0].place[1]
            self._fill_alike(
                data[start : start + len(alike) * length],
                alike,
                [self._chunks[path][whole.place].fingerprint for whole in alike],
            )

    def _fill_alike(self, data: memoryview, wholes: list[Whole], expected: list[str]) -> None:
        form = wholes[0].form
        sources = self._tensors(data, form, len(wholes))
        if sources is None:
            for at, (whole, print_) in enumerate(zip(wholes, expected, strict=True)):
                source = _loaded(data[at * form[2] : (at + 1) * form[2]])
                self._put(whole.name, source, whole.target, print_)
            return
        torch._foreach_copy_([whole.target for whole in wholes], sources)
        for whole, source, print_ in zip(wholes, sources, expected, strict=True):
            lies = fingerprints.small_bytes(whole.target) if print_.startswith("x:") else None
            if lies is not None:
                _require_same(whole.name, print_, fingerprints.of_small(lies))
            else:
                self._check_live(whole.name, source, whole.target, print_)

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

    def _use(self, data: memoryview, items: list[ReadItem], planner: LoadPlanner, fingerprint: str) -> None:
        tensor: torch.Tensor | None = None
        for item in items:
            if item.type == LoadItemType.BYTE_IO:
                planner.load_bytes(item, io.BytesIO(data))
                continue
            if tensor is None:
                form = self._form(item, data.nbytes)
                tensor = self._tensor(data, form) if form is not None else _loaded(data)
            target = planner.resolve_tensor(item).detach()
            source = narrow_tensor_by_index(tensor, item.storage_offsets, item.lengths)
            if target.size() != source.size():
                raise CheckpointError(
                    f"{item.storage_index.fqn}: stored shape {tuple(source.size())}, "
                    f"wanted {tuple(target.size())}"
                )
            expected = fingerprint if fingerprint and source.numel() == tensor.numel() else ""
            self._put(item.storage_index.fqn, source, target, expected)
            planner.commit_tensor(item, target)

    def _put(self, name: str, source: torch.Tensor, target: torch.Tensor, expected: str) -> None:
        """Copy one tensor, and check it where it then lies."""
        if expected.startswith("x:") and _same_bytes(target, source):
            _require_same(name, expected, _copy_and_look(target, source))
        else:
            target.copy_(source)
            if target.dtype == source.dtype:
                self._check_live(name, source, target, expected)

    def _check_live(self, name: str, source: torch.Tensor, target: torch.Tensor, expected: str) -> None:
        """Check that the live tensor is what it must be; on a device, later, for all tensors at once."""
        if target.is_cpu:
            expected = expected or fingerprints.of_live(plain(source), "x")
            found = fingerprints.of_live(plain(target), fingerprints.kind_of(expected))
            _require_same(name, expected, found)
        else:
            if not expected.startswith("m:"):
                expected = fingerprints.of_live(plain(source), "m")
            self._on_devices.append((name, target, expected))

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


def _read(shard: ShardSource, path: str, view: memoryview, chunks: Sequence[Chunk]) -> tuple[int, str]:
    """Read adjacent chunks; returns how many of them are right, and why the next must not be used."""
    base = chunks[0].offset
    until = base + view.nbytes
    digest = xxhash.xxh3_128()
    try:
        for start in range(0, view.nbytes, shard.at_once):
            piece = view[start : start + shard.at_once]
            shard.read_into(piece, base + start, until=until)
            if len(chunks) == 1:
                digest.update(piece)
    except CheckpointError as error:
        return 0, str(error)
    if len(chunks) == 1:
        why = _unlike(path, chunks[0], digest.hexdigest())
        return int(not why), why
    for at, chunk in enumerate(chunks):
        start = chunk.offset - base
        found = xxhash.xxh3_128_hexdigest(view[start : start + chunk.length])
        if found != chunk.digest:
            return at, _unlike(path, chunk, found)
    return len(chunks), ""


def _unlike(path: str, chunk: Chunk, found: str) -> str:
    """Why bytes with this digest are not the chunk's; empty if they are."""
    if found == chunk.digest:
        return ""
    return (
        f"altered {path}: bytes {chunk.offset} to {chunk.offset + chunk.length} have digest {found}, "
        f"expected {chunk.digest}"
    )


def _same_bytes(target: torch.Tensor, source: torch.Tensor) -> bool:
    """Whether copying one to the other means copying bytes on the host, in their order."""
    plainly = target.is_cpu and target.is_contiguous() and source.is_contiguous()
    return plainly and target.dtype == source.dtype and not target.is_neg() and not target.is_conj()


def _copy_and_look(target: torch.Tensor, source: torch.Tensor) -> str:
    """Copy, and fingerprint the target as it then is, piece by piece while it is in the cache."""
    to, what = (tensor.reshape(-1).view(torch.uint8).numpy() for tensor in (target, source))
    hasher = fingerprints.Hasher("x")
    for start in range(0, what.nbytes, READ_SLICE):
        to[start : start + READ_SLICE] = what[start : start + READ_SLICE]
        hasher.update(to[start : start + READ_SLICE].data)
    return hasher.done()


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
