"""A rank's shards in torch's own format: what surrounds a tensor's bytes, and writing them.

A DCP shard holds one torch.save archive per item. With the archive's CRC left out, everything in it except
the tensor's own bytes depends only on dtype and shape. So a shard's whole layout, and with it DCP's
`.metadata`, is fixed when the save is planned; what remains to do for a save is to put bytes where they
belong.

Two things differ from what torch.save alone would write, and every reader of torch archives accepts both:

* no CRC-32: it costs more than the write, is never checked on read, and the digests replace it;
* a zip comment fills each archive up to a multiple of 64 bytes, so that every tensor's bytes lie aligned in
  the shard, ready for direct copies, without gaps that no digest would cover.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, NamedTuple, cast

import numpy as np
import torch

from holdfast.checkpoint.format import fingerprint as fingerprints
from holdfast.checkpoint.format.failures import FAILURES, about
from holdfast.checkpoint.format.layout import DigestingFile, Item, Shard, torn
from holdfast.checkpoint.format.manifest import FileEntry
from holdfast.errors import SaveFailedError, TornSnapshotError

if TYPE_CHECKING:
    from holdfast.checkpoint.save import Plan


ALIGNMENT = 64
_END_OF_DIRECTORY = b"PK\x05\x06"
_END_LENGTH = 22


class ArchiveFrame(NamedTuple):
    """An archive without its tensor's bytes: those before, their count, and those after."""

    before: bytes
    raw: int
    after: bytes

    @property
    def length(self) -> int:
        return len(self.before) + self.raw + len(self.after)


class Frames:
    """Frames by dtype and shape; models have few different ones."""

    def __init__(self) -> None:
        self._known: dict[tuple[torch.dtype, tuple[int, ...]], ArchiveFrame] = {}

    def of(self, dtype: torch.dtype, sizes: tuple[int, ...]) -> ArchiveFrame:
        frame = self._known.get((dtype, sizes))
        if frame is None:
            frame = self._known[dtype, sizes] = make_frame(dtype, sizes)
        return frame


def make_frame(dtype: torch.dtype, sizes: tuple[int, ...]) -> ArchiveFrame:
    """Let torch.save write a tensor of that kind, and keep everything but the tensor's bytes."""
    tensor = torch.empty(sizes, dtype=dtype)  # its memory is never touched, so it is never really allocated
    capture = _Capture(tensor.data_ptr() if tensor.nbytes else 0, tensor.nbytes)
    with _without_crc():
        torch.save(tensor, cast("IO[bytes]", capture))
    before, after = capture.parts()
    if after[-_END_LENGTH:][:4] != _END_OF_DIRECTORY:
        raise AssertionError("torch.save no longer ends its archives with a plain end-of-directory record")
    padding = -(len(before) + tensor.nbytes + len(after)) % ALIGNMENT
    after = after[:-2] + padding.to_bytes(2, "little") + bytes(padding)
    return ArchiveFrame(before, tensor.nbytes, after)


class _Capture:
    """A file for torch.save that keeps all but the one write that is the tensor's memory itself."""

    def __init__(self, address: int, length: int) -> None:
        self._address = address
        self._length = length
        self._before = bytearray()
        self._after: bytearray | None = None

    def write(self, data: bytes | memoryview) -> int:
        length = data.nbytes if isinstance(data, memoryview) else len(data)
        if (
            self._length
            and self._after is None
            and length == self._length
            and _address_of(data) == self._address
        ):
            self._after = bytearray()
        else:
            (self._before if self._after is None else self._after).extend(data)
        return length

    def flush(self) -> None:
        """Part of the file protocol that torch.save expects."""

    def parts(self) -> tuple[bytes, bytes]:
        if not self._length:
            return bytes(self._before[:-_END_LENGTH]), bytes(self._before[-_END_LENGTH:])
        if self._after is None:
            raise AssertionError("torch.save no longer writes a tensor's memory in one piece")
        return bytes(self._before), bytes(self._after)


def _address_of(data: bytes | memoryview) -> int:
    if isinstance(data, bytes) or data.nbytes == 0:
        return 0
    return int(np.frombuffer(data, dtype=np.uint8).ctypes.data)


@contextlib.contextmanager
def _without_crc() -> Iterator[None]:
    before: Any = torch.serialization.get_crc32_options()
    torch.serialization.set_crc32_options(False)
    try:
        yield
    finally:
        torch.serialization.set_crc32_options(before)


# Writing one rank's shards straight from live tensors, digesting them in the same pass.
#
# This is how a save without background writing stores its bytes; the files it leaves are the same, byte for
# byte, as those that a writer process makes from a staged snapshot (see image.py).


def write_shards(
    directory: Path, plan: Plan, tensors: Sequence[torch.Tensor], prints: Sequence[str]
) -> list[FileEntry]:
    """Write, digest and fsync; returns the files, of which a rank with nothing to store has none."""
    return [_write_one(directory, plan, shard, tensors, prints) for shard in plan.layout.shards]


def _write_one(
    directory: Path, plan: Plan, shard: Shard, tensors: Sequence[torch.Tensor], prints: Sequence[str]
) -> FileEntry:
    with DigestingFile(directory / shard.path) as file:
        for at in range(shard.first, shard.first + shard.count):
            item, frame = plan.layout.items[at], plan.frames[at]
            try:
                raw = host_bytes(tensors[at])
            except FAILURES as error:
                raise about(item.name, error) from error
            check_size(item, raw.nbytes)
            if not fingerprints.matches(raw, prints[at]):
                raise TornSnapshotError(torn(item.name))
            file.begin_chunk()
            file.write(frame.before)
            file.write(raw)
            file.write(frame.after)
            file.end_chunk(prints[at])
        return file.finish()


def check_size(item: Item, found: int) -> None:
    if item.raw_length != found:
        raise SaveFailedError(f"{item.name} has {found} bytes, {item.raw_length} were planned")


def plain(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor's own elements, contiguous, as plain bytes that need no flags to be read; on its device.

    A lazy conjugate or negative keeps its sign in a flag beside the bytes, unseen by a reader of the bytes.
    """
    if type(tensor) is not torch.Tensor:
        tensor = tensor.detach().as_subclass(torch.Tensor)
    whole = tensor.detach().resolve_conj().resolve_neg().contiguous()
    return whole.reshape(-1).view(torch.uint8)


def host_bytes(tensor: torch.Tensor) -> memoryview:
    raw = plain(tensor)
    return raw.cpu().numpy().data if raw.numel() else memoryview(b"")
