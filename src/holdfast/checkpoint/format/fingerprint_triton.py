"""The block values of "m" fingerprints, on a CUDA device, for any number of tensors in one kernel launch.

`fingerprint` defines what a block value is; this module computes the same numbers at the speed of memory. It
needs Triton, which comes with PyTorch's CUDA builds: importing this module fails where Triton is missing.

The programs of the launch are of two sorts. *Fast* ones take a run of whole blocks that starts at an address
divisible by 16: they hold the weights in registers, read 16 bytes at a time, and ask for the next block
before they sum up the one they have. *Slow* ones take one block each, of any length and at any address, byte
by byte: the tail of every tensor, small tensors, and all of a misaligned one.
"""

from __future__ import annotations

import subprocess
from typing import TYPE_CHECKING, NamedTuple

import triton  # type: ignore[import-not-found,import-untyped,unused-ignore]
import triton.language as tl  # type: ignore[import-not-found,import-untyped,unused-ignore]
from triton.errors import TritonError  # type: ignore[import-not-found,import-untyped,unused-ignore]

from holdfast.checkpoint.format.fingerprint import BLOCK

if TYPE_CHECKING:
    import torch


class Shape(NamedTuple):
    """How the kernel is laid out; every shape gives the same values."""

    warps: int = 8
    span: int = 16
    """The most blocks of a fast program, which loads its weights once for all of them."""
    ahead: bool = True
    """Ask for the next block before summing up this one."""


DEFAULT = Shape()
_COMPLAINTS = (
    TritonError,
    OSError,
    subprocess.SubprocessError,
    AssertionError,
    AttributeError,
    TypeError,
    ValueError,
)
"""What building a kernel may raise if Triton, its compiler or the device are not as it expects."""
_PIECE = 512
"""Words a slow program takes at a time."""


def _kernel(
    table: tl.tensor,
    weights: tl.tensor,
    values: tl.tensor,
    fast: tl.tensor,
    BLOCK: tl.constexpr,  # noqa: N803 - Triton's way to write a constant
    PIECE: tl.constexpr,  # noqa: N803
    AHEAD: tl.constexpr,  # noqa: N803
) -> None:
    """`table`: as `fingerprint.Rows` says. `weights`: the low halves of all of them, then the high halves.

    Two 32-bit tables and not one of 64 bits, because then words and weights lie in the threads in the same
    order and nothing has to be moved between threads.
    """
    program = tl.program_id(0)
    row = table + program.to(tl.int64) * 3
    if program < fast:
        # The compiler reads 16 bytes at a time only because it is told what the address is divisible by.
        words = tl.multiple_of(tl.load(row).to(tl.pointer_type(tl.int32)), 16)
        value = values + tl.load(row + 1)
        blocks = tl.load(row + 2).to(tl.int32)
        position = tl.arange(0, BLOCK)
        low = tl.load(weights + position).to(tl.uint32, bitcast=True).to(tl.int64)
        high = tl.load(weights + BLOCK + position)
        if AHEAD:
            word = tl.load(words + position, eviction_policy="evict_first")
            for block in range(1, blocks):
                following = tl.load(words + block * BLOCK + position, eviction_policy="evict_first")
                product = word.to(tl.uint32, bitcast=True).to(tl.int64) * low
                product += (word * high).to(tl.int64) << 32
                tl.store(value + block - 1, tl.sum(product, axis=0))
                word = following
            product = word.to(tl.uint32, bitcast=True).to(tl.int64) * low
            product += (word * high).to(tl.int64) << 32
            tl.store(value + blocks - 1, tl.sum(product, axis=0))
        else:
            for block in range(blocks):
                word = tl.load(words + block * BLOCK + position, eviction_policy="evict_first")
                product = word.to(tl.uint32, bitcast=True).to(tl.int64) * low
                product += (word * high).to(tl.int64) << 32
                tl.store(value + block, tl.sum(product, axis=0))
    else:
        data = tl.load(row).to(tl.pointer_type(tl.uint8))
        size = tl.load(row + 1).to(tl.int32)
        total = tl.zeros([PIECE], dtype=tl.int64)
        for start in range(0, (size + 3) // 4, PIECE):
            position = start + tl.arange(0, PIECE)
            byte = position * 4
            word = tl.load(data + byte, mask=byte < size, other=0).to(tl.int64)
            word += tl.load(data + byte + 1, mask=byte + 1 < size, other=0).to(tl.int64) << 8
            word += tl.load(data + byte + 2, mask=byte + 2 < size, other=0).to(tl.int64) << 16
            word += tl.load(data + byte + 3, mask=byte + 3 < size, other=0).to(tl.int64) << 24
            low = tl.load(weights + position).to(tl.uint32, bitcast=True).to(tl.int64)
            high = tl.load(weights + BLOCK + position).to(tl.int64) << 32
            total += word * (low + high)
        tl.store(values + tl.load(row + 2), tl.sum(total, axis=0))


kernel = triton.jit(_kernel, do_not_specialize=["fast"])  # one compilation for any number of tensors


def launch(
    table: torch.Tensor, fast: int, weights: torch.Tensor, values: torch.Tensor, *, shape: Shape = DEFAULT
) -> None:
    """Put every block value that the table asks for into `values`, on the current device and stream.

    Raises RuntimeError if Triton cannot build the kernel; then nothing was started.
    """
    if not len(table):
        return
    try:
        kernel[(len(table),)](
            table, weights, values, fast, BLOCK=BLOCK, PIECE=_PIECE, AHEAD=shape.ahead, num_warps=shape.warps
        )
    except _COMPLAINTS as error:
        raise RuntimeError(f"the fingerprint kernel could not be built: {error}") from error
