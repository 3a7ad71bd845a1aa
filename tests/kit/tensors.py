"""Tensors of every dtype and form, and their bytes."""

from __future__ import annotations

import random

import torch

from holdfast.checkpoint.format.fingerprint import BLOCK_BYTES

SIZES = [0, 1, 3, 4, 5, 8, 257, 2049, BLOCK_BYTES - 1, BLOCK_BYTES, BLOCK_BYTES + 1, 40 * BLOCK_BYTES + 7]
"""In bytes; the last is more than is hashed at a time."""


def same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    def raw(tensor: torch.Tensor) -> bytes:
        plain = tensor.detach().resolve_conj().resolve_neg().contiguous()
        return plain.reshape(-1).view(torch.uint8).numpy().tobytes()

    return one.dtype == other.dtype and one.shape == other.shape and raw(one) == raw(other)


def bits(count: int, dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    """Every bit pattern the dtype has, NaNs of all kinds included."""
    if dtype is torch.bool:
        return torch.arange(count) % 3 == 0
    raw = bytearray(random.Random(seed).randbytes(count * dtype.itemsize))
    return torch.frombuffer(raw, dtype=dtype, count=count) if count else torch.empty(0, dtype=dtype)


DTYPES = [
    torch.float32,
    torch.float64,
    torch.float16,
    torch.bfloat16,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
    torch.complex64,
    torch.complex128,
    torch.uint8,
    torch.int8,
    torch.int16,
    torch.int32,
    torch.int64,
    torch.uint16,
    torch.uint32,
    torch.uint64,
    torch.bool,
]


def noise(length: int, seed: int = 0) -> bytes:
    return random.Random(seed).randbytes(length)


def raw(tensor: torch.Tensor) -> bytes:
    return bytes(tensor.contiguous().reshape(-1).view(torch.uint8).tolist())


def some_tensors() -> list[torch.Tensor]:
    """Of many sizes, at addresses that are aligned and not; they all live in one piece of memory."""
    store = torch.frombuffer(bytearray(noise(1 << 20)), dtype=torch.uint8)
    base = store[-store.data_ptr() % 64 :]
    tensors = []
    for number, size in enumerate([*SIZES, 2 * BLOCK_BYTES, 5 * BLOCK_BYTES + 4, 3 * BLOCK_BYTES]):
        for offset in (0, 1, 4, 8):
            start = 64 * number + offset
            tensors.append(base[start : start + size])
    return tensors
