"""Fingerprints: a position-sensitive hash of one stored chunk, taken where its tensor is.

A fingerprint is a tagged string. Taken on the device before staging, it can be checked against the staged
bytes by a process without torch, and against the live tensor after a load: it sees what the digest of a file
cannot, because that is taken later (a torn snapshot, a wrongly assembled shard, a bad copy to the host).

`x:<32 hex>` is the xxh3-128 of the raw bytes, for tensors on the CPU.

`m:<32 hex>` is for tensors on other devices, where thousands of threads must share the work. The raw bytes,
zero-padded to a multiple of four, are read as little-endian 32-bit words and cut into blocks of `BLOCK`
words. A block's value is the sum of w_i · r_i modulo 2^64, where w_i is its i-th word and r_i the i-th of
`BLOCK` fixed odd weights. The fingerprint is the xxh3-128 of all block values in order, as 64-bit
little-endian numbers, followed by the number of bytes, likewise.

What a block value detects with certainty rests on one fact: a product is divisible by 2^64 only if its
factors together hold 64 factors of two, and an odd weight holds none.

* *One changed word.* The value changes by d · r_i with 0 < |d| < 2^32, which holds at most 31 factors of two.
  So any flipped bit is detected, and any number of them in one word.
* *Two different words swapped.* Inside a block the value changes by (w_a - w_b) · (r_i - r_j). The first
  factor holds at most 31 factors of two, the second at most 32, because the weights' low 33 bits differ
  pairwise: at most 63. Across two blocks, each of them has one changed word.
* *Two flipped bits.* In words i and j at bits a ≤ b < 32 the value changes by ±2^a · r_i ± 2^b · r_j. If
  a < b, that holds exactly a factors of two. If a = b, it is ±2^a · (r_i ± r_j), and the weights' low 33 bits
  differ pairwise *also up to their sign*: at most 31 + 32 again.

Anything else (rows or blocks swapped, bytes shifted, torn, of another step) changes many words, and is missed
as often as a sum of unrelated products happens to be 0: 2^-64 for each changed block. The worst case is a
change of only the top bit of many words: it moves only the sum's upper 33 bits, the lowest of which says only
whether their number is odd: 2^-32. The number of bytes distinguishes a tail of zeros from no tail.
"""

from __future__ import annotations

import ctypes
import logging
import operator
import struct
from collections.abc import Sequence
from functools import cache
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import xxhash

if TYPE_CHECKING:  # numpy too is imported where it is used: half of what a writer process takes to start
    import numpy as np
    import numpy.typing as npt
    import torch

    Words = npt.NDArray[np.uint64]

log = logging.getLogger("holdfast.checkpoint")

HOST = "x"
DEVICE = "m"
BLOCK = 4096
"""Words in a block: their weights fit the registers of one program on a GPU, and a CPU's first cache."""
BLOCK_BYTES = 4 * BLOCK
SMALL = 64 * 1024
"""Up to this many bytes, a tensor takes longer to look at than to hash; see `small_bytes`."""
ALIGNED = 16
"""Bytes a GPU reads at a time; a tensor at another address is read byte by byte."""

_SEED = 0x686F6C6466617374
"""Any number that passes the test of the weights would do; changing it changes every fingerprint."""
_U32, _U64 = "<u4", "<u8"
_SLICE = 1024
"""Blocks at a time when torch's own operations are used: 16 MiB, which need 48 MiB of device memory."""


@cache
def weights() -> Words:
    """The fixed table r: outputs 1 to `BLOCK` of splitmix64 from `_SEED`, each made odd."""
    import numpy as np

    state = np.arange(1, BLOCK + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15) + np.uint64(_SEED)
    mixed = (state ^ (state >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    table = (mixed ^ (mixed >> np.uint64(31))) | np.uint64(1)
    table.flags.writeable = False
    return table


def prepare_host() -> None:
    """Pay now what the first `m` fingerprint of bytes on the host costs: numpy, and the weights."""
    weights()


class Hasher:
    """Hashes bytes that come slice by slice, of any lengths; the same bytes give the same fingerprint."""

    def __init__(self, kind: str) -> None:
        if kind not in (HOST, DEVICE):
            raise ValueError(
                f"unknown kind of fingerprint {kind!r}: this release knows {HOST!r} and {DEVICE!r}"
            )
        self._kind = kind
        self._hash = xxhash.xxh3_128()
        self._begun = bytearray()
        """The start of a block that is not whole yet."""
        self._length = 0

    def update(self, data: bytes | bytearray | memoryview) -> None:
        """`data` is only looked at until this returns. Large data is hashed without holding the GIL."""
        whole = memoryview(data)
        if whole.nbytes == 0:
            return
        view = whole.cast("B")
        self._length += view.nbytes
        if self._kind == HOST:
            self._hash.update(view)
            return
        if self._begun:
            missing = BLOCK_BYTES - len(self._begun)
            self._begun += view[:missing]
            view = view[missing:]
            if len(self._begun) < BLOCK_BYTES:
                return
            self._blocks(memoryview(self._begun), 1)
            self._begun = bytearray()
        count = view.nbytes // BLOCK_BYTES
        if count:
            self._blocks(view[: count * BLOCK_BYTES], count)
        self._begun += view[count * BLOCK_BYTES :]

    def done(self) -> str:
        """The fingerprint. Nothing may be added after it."""
        if self._kind == DEVICE:
            if self._begun:
                self._begun += bytes(-len(self._begun) % 4)
                self._blocks(memoryview(self._begun), 1)
                self._begun = bytearray()
            self._hash.update(struct.pack("<Q", self._length))
        return f"{self._kind}:{self._hash.hexdigest()}"

    def _blocks(self, view: memoryview, count: int) -> None:
        """Add `count` blocks, or one that is shorter: in one pass, without the GIL.

        numpy widens a few thousand words at a time and multiplies those: nothing leaves the core's cache.
        """
        import numpy as np

        words = np.frombuffer(view, _U32).reshape(count, -1)
        values = np.einsum("ij,j->i", words, weights()[: words.shape[1]], dtype=np.uint64)
        self._hash.update(values.astype(_U64, copy=False).data)


def of_bytes(data: bytes | bytearray | memoryview, kind: str) -> str:
    """The fingerprint of a tensor's raw bytes, without torch."""
    hasher = Hasher(kind)
    hasher.update(data)
    return hasher.done()


def kind_of(fingerprint: str) -> str:
    kind, separator, digest = fingerprint.partition(":")
    if kind not in (HOST, DEVICE) or not separator or len(digest) != 32:
        raise ValueError(f"{fingerprint!r} is not a fingerprint: expected x: or m: and 32 hex digits")
    return kind


def matches(data: bytes | bytearray | memoryview, fingerprint: str) -> bool:
    """Whether these are the bytes that the fingerprint was taken of."""
    return of_bytes(data, kind_of(fingerprint)) == fingerprint


class Rows(NamedTuple):
    """What one launch on a GPU has to do; see `fingerprint_triton`, which does it."""

    table: npt.NDArray[np.int64]
    """Of fast programs (address, first block, blocks), then of slow ones (address, bytes, block)."""
    fast: int
    """How many of the rows are of the first sort."""


def launch_rows(addresses: npt.NDArray[np.int64], sizes: npt.NDArray[np.int64], span: int) -> Rows:
    """Share out the blocks of tensors: whole, aligned ones in runs of up to `span`, others one by one."""
    import numpy as np

    blocks = -(-sizes // BLOCK_BYTES)
    first = np.cumsum(blocks) - blocks
    whole = np.where(addresses % ALIGNED == 0, sizes // BLOCK_BYTES, 0)

    tensor, run = _spread(-(-whole // span))
    start = run * span
    fast = (
        addresses[tensor] + start * BLOCK_BYTES,
        first[tensor] + start,
        np.minimum(whole[tensor] - start, span),
    )
    tensor, block = _spread(blocks - whole)
    block += whole[tensor]
    slow = (
        addresses[tensor] + block * BLOCK_BYTES,
        np.minimum(sizes[tensor] - block * BLOCK_BYTES, BLOCK_BYTES),
        first[tensor] + block,
    )
    return Rows(np.concatenate([np.stack(fast, axis=1), np.stack(slow, axis=1)]), len(fast[0]))


def _spread(counts: npt.NDArray[np.int64]) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """(0, 0), (0, 1) … (1, 0) …: for each index of `counts` as many pairs as it says."""
    import numpy as np

    owner = np.repeat(np.arange(len(counts), dtype=np.int64), counts)
    return owner, np.arange(len(owner), dtype=np.int64) - (np.cumsum(counts) - counts)[owner]


class _Launch(Protocol):
    """Puts the block values of everything in a table into `values`, on the current stream."""

    def __call__(
        self, table: torch.Tensor, fast: int, weights: torch.Tensor, values: torch.Tensor
    ) -> None: ...


class _Device:
    """What one device needs for every fingerprint: the weights, and what computes with them."""

    def __init__(self, device: torch.device) -> None:
        import numpy as np
        import torch

        table = weights()
        self.weights = torch.from_numpy(table.view(np.int64).copy()).to(device)
        halves = np.concatenate([table.astype(np.uint32), (table >> np.uint64(32)).astype(np.uint32)])
        self.halves = torch.from_numpy(halves.view(np.int32)).to(device)
        """The low halves of all weights, then the high halves, as the kernel expects them."""
        self.launch: _Launch | None = None
        self.span = 1
        if device.type == "cuda":
            torch.cuda.current_stream(device).synchronize()  # once, so that any stream may read the tables
            try:
                from holdfast.checkpoint.format import fingerprint_triton
            except (ImportError, OSError, RuntimeError) as error:
                self.without_kernel(device, error)
            else:
                self.launch, self.span = fingerprint_triton.launch, fingerprint_triton.DEFAULT.span

    def without_kernel(self, device: torch.device, error: Exception) -> None:
        self.launch = None
        log.warning(
            "fingerprints on %s are taken with torch's own operations, which is correct but slow: "
            "the Triton kernel cannot be used (%s: %s)",
            device,
            type(error).__name__,
            error,
        )


@cache
def _device(device: torch.device) -> _Device:
    return _Device(device)


class Tables:
    """Keeps the launch table of the tensors seen last on each device.

    A caller that takes fingerprints of the same tensors again and again holds one of these: as long as
    addresses and sizes stay the same, `begin` then neither builds a table nor sends one to the device.
    """

    def __init__(self) -> None:
        self._kept: dict[torch.device, tuple[npt.NDArray[np.int64], torch.Tensor, int, Any]] = {}

    def get(
        self, device: torch.device, addresses: npt.NDArray[np.int64], sizes: npt.NDArray[np.int64], span: int
    ) -> tuple[torch.Tensor, int]:
        """The table on its device, safe to use on the current stream, and its number of fast rows."""
        import numpy as np
        import torch

        key = np.stack([addresses, sizes])
        stream = torch.cuda.current_stream(device)
        kept = self._kept.get(device)
        if kept is None or not np.array_equal(kept[0], key):
            rows = launch_rows(addresses, sizes, span)
            pinned = torch.empty(rows.table.shape, dtype=torch.int64, device="cpu", pin_memory=True)
            pinned.numpy()[:] = rows.table
            sent = pinned.to(device, non_blocking=True)
            kept = self._kept[device] = (key, sent, rows.fast, stream.record_event())
        _, table, fast, ready = kept
        stream.wait_event(ready)
        table.record_stream(stream)
        return table, fast


class _Part(NamedTuple):
    """What one device has under way."""

    places: list[int]
    """Where the tensors stand in the caller's list."""
    tensors: list[torch.Tensor]
    values: torch.Tensor
    """Their block values, one tensor's after another's."""
    ready: torch.cuda.Event | None
    """When `values`, then on the host, are all there. None: `values` are still on the device."""


class Pending:
    """Fingerprints under way. Holds the tensors until `result`, so that their memory is not reused."""

    def __init__(self, found: list[str], parts: list[_Part]) -> None:
        self._found = found
        self._parts = parts

    def result(self) -> list[str]:
        """Wait for the devices' part, and no longer; returns the fingerprints in the order of the tensors."""
        for part in self._parts:
            if part.ready is not None:
                part.ready.synchronize()
            values = part.values.cpu().numpy()
            on_host = values.data.cast("B") if values.size else memoryview(b"")
            start = 0
            for place, tensor in zip(part.places, part.tensors, strict=True):
                end = start + 8 * -(-tensor.nbytes // BLOCK_BYTES)
                digest = xxhash.xxh3_128(on_host[start:end])
                digest.update(struct.pack("<Q", tensor.nbytes))
                self._found[place] = f"{DEVICE}:{digest.hexdigest()}"
                start = end
        self._parts.clear()
        return list(self._found)


def begin(
    tensors: Sequence[torch.Tensor], *, kinds: Sequence[str] | None = None, tables: Tables | None = None
) -> Pending:
    """Start taking the fingerprints of local tensors; `Pending.result` gives them.

    Tensors on CUDA devices: everything is put on the *current* stream, in one launch per device, and nothing
    is waited for. The fingerprints do not see what that stream does to the tensors later. Tensors on the
    CPU are hashed before this returns. Those that are not contiguous are copied first, on their device.

    `kinds` asks for one kind per tensor instead of its device's own, to compare with fingerprints from
    elsewhere; kind "x" of a tensor on another device copies it to the host, and waits for that.
    """
    found: list[str] = []
    members: dict[torch.device, tuple[list[int], list[torch.Tensor]]] = {}
    for place, given in enumerate(tensors):
        if given.device.type == "meta":
            raise ValueError(
                f"tensor {place} of shape {tuple(given.shape)} is on the meta device: it has no bytes"
            )
        small = small_bytes(given)
        if small is not None and (kinds is None or kinds[place] == HOST):
            found.append(of_small(small))
            continue
        tensor = given.detach().resolve_conj().resolve_neg().contiguous()
        own = HOST if tensor.device.type == "cpu" else DEVICE
        kind = own if kinds is None else kinds[place]
        if own == DEVICE == kind:
            found.append("")  # until its device is done
            places, there = members.setdefault(tensor.device, ([], []))
            places.append(place)
            there.append(tensor)
        else:
            found.append(of_bytes(_bytes(tensor.cpu()), kind))
    kept = Tables() if tables is None else tables
    parts = [
        _Part(places, there, *_start(device, there, kept)) for device, (places, there) in members.items()
    ]
    return Pending(found, parts)


def _start(
    device: torch.device, tensors: list[torch.Tensor], tables: Tables
) -> tuple[torch.Tensor, torch.cuda.Event | None]:
    import torch

    if device.type != "cuda":
        return block_values(tensors, _device(device).weights), None
    with torch.cuda.device(device):
        values = _launch(device, tensors, tables)
        host = torch.empty(values.shape, dtype=torch.int64, device="cpu", pin_memory=True)
        host.copy_(values, non_blocking=True)
        ready = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
        ready.record()
        return host, ready


def _launch(device: torch.device, tensors: list[torch.Tensor], tables: Tables) -> torch.Tensor:
    import numpy as np
    import torch

    here = _device(device)
    if here.launch is not None:
        addresses = np.array([tensor.data_ptr() for tensor in tensors], dtype=np.int64)
        sizes = np.array([tensor.nbytes for tensor in tensors], dtype=np.int64)
        table, fast = tables.get(device, addresses, sizes, here.span)
        values = torch.empty(int((-(-sizes // BLOCK_BYTES)).sum()), dtype=torch.int64, device=device)
        try:
            here.launch(table, fast, here.halves, values)
        except RuntimeError as error:
            here.without_kernel(device, error)
        else:
            return values
    return block_values(tensors, here.weights)


def block_values(tensors: Sequence[torch.Tensor], table: torch.Tensor) -> torch.Tensor:
    """The block values of contiguous tensors, by torch's own operations. `table`: the weights, also there."""
    import torch

    found = [torch.empty(0, dtype=torch.int64, device=table.device)]
    for tensor in tensors:
        data = tensor.reshape(-1).view(torch.uint8)
        for start in range(0, data.numel(), _SLICE * BLOCK_BYTES):
            piece = data[start : start + _SLICE * BLOCK_BYTES]
            missing = -piece.numel() % BLOCK_BYTES
            if missing:
                piece = torch.nn.functional.pad(piece, (0, missing))
            elif piece.storage_offset() % 4 or piece.data_ptr() % 4:
                piece = piece.clone()
            words = piece.view(torch.int32).to(torch.int64).bitwise_and_(0xFFFFFFFF)
            found.append(words.view(-1, BLOCK).mul_(table).sum(dim=1))
    return torch.cat(found)


def of_tensor(tensor: torch.Tensor) -> str:
    """The fingerprint of a local tensor, of the kind that belongs to its device; waits for it."""
    return begin([tensor]).result()[0]


def of_live(tensor: torch.Tensor, kind: str) -> str:
    """The fingerprint of the given kind, wherever the tensor is. "x" copies a device's tensor to the host."""
    return begin([tensor], kinds=[kind]).result()[0]


def prepare(device: torch.device) -> None:
    """Pay now what the first fingerprint on a device costs: the weights, and compiling the kernel."""
    import torch

    of_tensor(torch.zeros(2 * BLOCK + 1, dtype=torch.int32, device=device))


_layout, _nbytes = map(operator.attrgetter, ("layout", "nbytes"))


@cache
def _plain() -> tuple[type[torch.Tensor], type[torch.nn.Parameter], torch.layout]:
    import torch

    return torch.Tensor, torch.nn.Parameter, torch.strided


@cache
def _memory(size: int) -> type[ctypes.Array[ctypes.c_char]]:
    return ctypes.c_char * size


def small_bytes(tensor: torch.Tensor) -> ctypes.Array[ctypes.c_char] | None:
    """A small tensor's memory on the host, if that is its elements in their order; None for any other.

    Valid for as long as the tensor is. With thousands of small tensors, the usual way, by half a dozen views
    of each, would be the slowest part of a save or a load.
    """
    plain, parameter, strided = _plain()
    kind = type(tensor)
    if (
        (kind is not plain and kind is not parameter)
        or not tensor.is_cpu
        or not 0 < (size := tensor.nbytes) <= SMALL
        or tensor.layout is not strided
        or not tensor.is_contiguous()
        or tensor.is_neg()
        or tensor.is_conj()
    ):
        return None
    return _memory(size).from_address(tensor.data_ptr())


def small_memories(tensors: Sequence[torch.Tensor]) -> list[ctypes.Array[ctypes.c_char] | None]:
    """`small_bytes` of tensors on the host. If all are plain, none is checked on its own."""
    plain, parameter, strided = _plain()
    if (
        tensors
        and set(map(type, tensors)) <= {plain, parameter}
        and set(map(_layout, tensors)) == {strided}
        and all(map(plain.is_contiguous, tensors))
        and not any(map(plain.is_neg, tensors))
        and not any(map(plain.is_conj, tensors))
    ):
        sizes = list(map(_nbytes, tensors))
        small = {size: _memory(size).from_address for size in set(sizes) if 0 < size <= SMALL}
        found = zip(sizes, map(plain.data_ptr, tensors), strict=True)
        return [small[size](address) if size in small else None for size, address in found]
    return list(map(small_bytes, tensors))


def of_small(memory: ctypes.Array[ctypes.c_char]) -> str:
    """The fingerprint of kind "x" of a small tensor's memory."""
    return f"{HOST}:{xxhash.xxh3_128_hexdigest(memory)}"


def _bytes(tensor: torch.Tensor) -> memoryview:
    """A contiguous CPU tensor's memory."""
    import torch

    array = tensor.reshape(-1).view(torch.uint8).numpy()
    return array.data if array.size else memoryview(b"")
