"""What surrounds a tensor's bytes in a DCP shard, known before any bytes are.

A DCP shard holds one torch.save archive an item. With the archive's CRC left out, everything in it but the
tensor's own bytes depends on nothing but dtype and shape. So a shard's whole layout, and with it DCP's
`.metadata`, is fixed when the save is planned; what remains to do for a save is to put bytes where they
belong.

Two things differ from what torch.save alone would write, and every reader of torch archives takes both:

* no CRC-32: it costs more than the write, is never checked on read, and the digests replace it;
* a zip comment fills each archive up to a multiple of 64 bytes, so that every tensor's bytes lie aligned in
  the shard, ready for direct copies, without gaps that no digest would cover.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import IO, Any, NamedTuple, cast

import numpy as np
import torch

ALIGNMENT = 64
_END_OF_DIRECTORY = b"PK\x05\x06"
_END_LENGTH = 22


class Frame(NamedTuple):
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
        self._known: dict[tuple[torch.dtype, tuple[int, ...]], Frame] = {}

    def of(self, dtype: torch.dtype, sizes: tuple[int, ...]) -> Frame:
        frame = self._known.get((dtype, sizes))
        if frame is None:
            frame = self._known[dtype, sizes] = make_frame(dtype, sizes)
        return frame


def make_frame(dtype: torch.dtype, sizes: tuple[int, ...]) -> Frame:
    """Let torch.save write a tensor of that kind, and keep everything but the tensor's bytes."""
    tensor = torch.empty(sizes, dtype=dtype)  # its memory is never touched, so it is never really taken
    capture = _Capture(tensor.data_ptr() if tensor.nbytes else 0, tensor.nbytes)
    with _without_crc():
        torch.save(tensor, cast("IO[bytes]", capture))
    before, after = capture.parts()
    if after[-_END_LENGTH:][:4] != _END_OF_DIRECTORY:
        raise AssertionError("torch.save no longer ends its archives with a plain end-of-directory record")
    padding = -(len(before) + tensor.nbytes + len(after)) % ALIGNMENT
    after = after[:-2] + padding.to_bytes(2, "little") + bytes(padding)
    return Frame(before, tensor.nbytes, after)


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
