"""DCP's storage reader, verifying every byte before it is used, in one pass.

Guarantee: nothing is unpickled, and no tensor is touched, before the bytes it comes from have matched the
digest taken when they were written. Each item is read once into memory, digested there, and used from that
same memory, so what was verified is what is loaded; a large one that lies in this node's memory already is
digested and used there, under the lease that keeps it as it is. While one item is used, a helper thread reads
and digests the next. Then each tensor is looked at where it came to lie: its fingerprint there must be the
one taken when it was saved (or, of a tensor that is put together from parts, that of each part as it was
read).
"""

from __future__ import annotations

import functools
import io
import pickle
import zipfile
from collections.abc import Iterable, Iterator
from concurrent.futures import Future as Pending
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
import xxhash
from torch.distributed._shard._utils import narrow_tensor_by_index
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner, ReadItem
from torch.futures import Future

from holdfast.checkpoint import fingerprint as fingerprints
from holdfast.checkpoint.identity import METADATA
from holdfast.checkpoint.manifest import Chunk, Manifest, digest_bytes
from holdfast.checkpoint.shards import SLICE, OpenShard, Shard, ShardFile
from holdfast.checkpoint.writer import plain
from holdfast.errors import CheckpointError
from holdfast.files import read_regular

IN_PLACE = 64 * 1024
"""Items at least this large are used where they were read; smaller ones go through torch.load."""
AHEAD = 256 * 1024 * 1024
"""Items up to this size are read while the one before is used; of larger ones only one is held in memory."""
Place = tuple[int, int]
"""Where an item lies in its file: (offset, length)."""


class VerifyingReader(FileSystemReader):
    """Reads a checkpoint directory under its manifest."""

    def __init__(self, directory: Path, manifest: Manifest, shards: OpenShard | None = None) -> None:
        """`shards` opens a shard where it does not lie in the directory itself."""
        super().__init__(directory)
        self._directory = directory
        self._files = {entry.path: entry for entry in manifest.files}
        self._chunks = {
            entry.path: {(chunk.offset, chunk.length): chunk for chunk in entry.chunks}
            for entry in manifest.files
        }
        self._open = shards or functools.partial(ShardFile, directory)
        self._read: dict[str, set[int]] = {}
        """Offsets verified so far, by file."""
        self._metadata: Metadata | None = None
        self._buffers = [bytearray(), bytearray()]
        self._on_devices: list[tuple[str, torch.Tensor, str]] = []
        """Loaded tensors whose fingerprint is still to be asked for: (name, tensor, expected)."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        del args, kwargs
        if self._metadata is None:
            entry = self._files[METADATA]
            data = read_regular(self._directory / METADATA, entry.size)
            found = digest_bytes(data)
            if found != entry.digest:
                raise CheckpointError(f"altered {METADATA}: expected {entry.digest}, found {found}")
            self._metadata = pickle.loads(data)
        return self._metadata

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        wanted: dict[str, dict[Place, list[ReadItem]]] = {}
        for item in plan.items:
            info = self.storage_data[item.storage_index]
            wanted.setdefault(info.relative_path, {}).setdefault((info.offset, info.length), []).append(item)
        for path, places in wanted.items():
            for place, data in self._verified(path, sorted(places)):
                self._use(data, places[place], planner, self._chunks[path][place].fingerprint)
        self._check_on_devices()
        future: Future[None] = Future()
        future.set_result(None)
        return future

    def verify_rest(self, paths: Iterable[str]) -> None:
        """Verify the chunks of these files that loading did not need."""
        for path in paths:
            done = self._read.get(path, set())
            left = [(c.offset, c.length) for c in self._files[path].chunks if c.offset not in done]
            if left:
                for _ in self._verified(path, left):
                    pass

    def shard_paths(self) -> list[str]:
        return sorted(path for path in self._files if path != METADATA)

    def _verified(self, path: str, places: Iterable[Place]) -> Iterator[tuple[Place, memoryview]]:
        """Each place's verified bytes, valid until the next are asked for."""
        if path not in self._files:
            raise CheckpointError(
                f"stale-metadata {path[:200]!r}: .metadata names a file the manifest does not list"
            )
        with self._open(self._files[path]) as shard, ThreadPoolExecutor(1) as helper:
            current: tuple[Place, Pending[memoryview]] | None = None
            slot = 0
            for place in places:
                # Two buffers take turns: the caller uses one while the other is filled.
                slot = 1 - slot
                if place[1] > AHEAD:
                    if current is not None:
                        yield current[0], current[1].result()
                    current, slot = None, 0
                coming = helper.submit(self._read_verified, shard, path, place, slot)
                if current is not None:
                    yield current[0], current[1].result()
                current = place, coming
            if current is not None:
                yield current[0], current[1].result()

    def _read_verified(self, shard: Shard, path: str, place: Place, slot: int) -> memoryview:
        offset, length = place
        chunk: Chunk | None = self._chunks[path].get(place)
        if chunk is None:
            raise CheckpointError(
                f"stale-metadata {path}: .metadata places an item at {offset}+{length}; the manifest does not"
            )
        while True:
            view = shard.in_place(offset, length) if length >= IN_PLACE else None
            if view is not None:
                why = _unlike(path, chunk, xxhash.xxh3_128_hexdigest(view))
            else:
                if len(self._buffers[slot]) < length:
                    self._buffers[slot] = bytearray(length)
                view = memoryview(self._buffers[slot])[:length]
                why = _why_not(shard, path, view, chunk)
            if not why:
                self._read.setdefault(path, set()).add(offset)
                return view
            if not shard.another(why):
                raise CheckpointError(why)

    def _use(self, data: memoryview, items: list[ReadItem], planner: LoadPlanner, fingerprint: str) -> None:
        tensor: torch.Tensor | None = None
        for item in items:
            if item.type == LoadItemType.BYTE_IO:
                planner.load_bytes(item, io.BytesIO(data))
                continue
            if tensor is None:
                tensor = self._tensor(data, item)
            target = planner.resolve_tensor(item).detach()
            source = narrow_tensor_by_index(tensor, item.storage_offsets, item.lengths)
            if target.size() != source.size():
                raise CheckpointError(
                    f"{item.storage_index.fqn}: stored shape {tuple(source.size())}, "
                    f"wanted {tuple(target.size())}"
                )
            expected = fingerprint if fingerprint and source.numel() == tensor.numel() else ""
            if expected.startswith("x:") and _same_bytes(target, source):
                _require_same(item.storage_index.fqn, expected, _copy_and_look(target, source))
            else:
                target.copy_(source)
                if target.dtype == source.dtype:
                    self._check_live(item, source, target, expected)
            planner.commit_tensor(item, target)

    def _check_live(self, item: ReadItem, source: torch.Tensor, target: torch.Tensor, expected: str) -> None:
        """Whether the live tensor is what it must be; on a device it is asked later, for all at once."""
        name = item.storage_index.fqn
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

    def _tensor(self, data: memoryview, item: ReadItem) -> torch.Tensor:
        if data.nbytes >= IN_PLACE:
            in_place = self._tensor_in_place(data, item)
            if in_place is not None:
                return in_place
        loaded = torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)
        assert isinstance(loaded, torch.Tensor)
        return loaded

    def _tensor_in_place(self, data: memoryview, item: ReadItem) -> torch.Tensor | None:
        """The archive's one record, seen as a tensor without copying it; None if it has another form."""
        assert self._metadata is not None
        entry = self._metadata.state_dict_metadata[item.storage_index.fqn]
        if not isinstance(entry, TensorStorageMetadata):
            return None
        offsets = item.storage_index.offset
        sizes = next((c.sizes for c in entry.chunks if offsets is None or c.offsets == offsets), None)
        dtype = entry.properties.dtype
        if sizes is None:
            return None
        count = sizes.numel()
        record = _only_data_record(data)
        if record is None or record[1] != count * dtype.itemsize or count == 0:
            return None
        start, length = record
        return torch.frombuffer(data[start : start + length], dtype=dtype, count=count).view(sizes)


def _why_not(shard: Shard, path: str, view: memoryview, chunk: Chunk) -> str:
    """Read a chunk into memory; why that must not be used, empty if its digest is right."""
    digest = xxhash.xxh3_128()
    try:
        for start in range(0, chunk.length, shard.at_once):
            piece = view[start : start + shard.at_once]
            shard.read_into(piece, chunk.offset + start, until=chunk.offset + chunk.length)
            digest.update(piece)
    except CheckpointError as error:
        return str(error)
    return _unlike(path, chunk, digest.hexdigest())


def _unlike(path: str, chunk: Chunk, found: str) -> str:
    """Why bytes with this digest are not the chunk's; empty if they are."""
    if found == chunk.digest:
        return ""
    return (
        f"altered {path}: bytes {chunk.offset} to {chunk.offset + chunk.length} have digest {found}, "
        f"expected {chunk.digest}"
    )


def _same_bytes(target: torch.Tensor, source: torch.Tensor) -> bool:
    """Whether copying one to the other is copying bytes on the host, in their order."""
    plainly = target.is_cpu and target.is_contiguous() and source.is_contiguous()
    return plainly and target.dtype == source.dtype and not target.is_neg() and not target.is_conj()


def _copy_and_look(target: torch.Tensor, source: torch.Tensor) -> str:
    """Copy, and fingerprint the target as it then is, piece by piece while it is in the cache."""
    to, what = (tensor.reshape(-1).view(torch.uint8).numpy() for tensor in (target, source))
    hasher = fingerprints.Hasher("x")
    for start in range(0, what.nbytes, SLICE):
        to[start : start + SLICE] = what[start : start + SLICE]
        hasher.update(to[start : start + SLICE].data)
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
