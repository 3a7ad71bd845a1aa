"""Fingerprints on a GPU: the same as on the host, in one launch, without waiting for anything."""

from __future__ import annotations

import logging
import time

import pytest
import torch

from holdfast.checkpoint.format import fingerprint
from holdfast.checkpoint.format.fingerprint import BLOCK_BYTES, Tables, begin, of_bytes

pytestmark = pytest.mark.gpu
DEVICE = torch.device("cuda", 0)
SIZES = [
    0,
    1,
    3,
    4,
    5,
    2049,
    BLOCK_BYTES - 1,
    BLOCK_BYTES,
    BLOCK_BYTES + 1,
    16 * BLOCK_BYTES,
    40 * BLOCK_BYTES + 7,
]
DTYPES = [
    torch.bool,
    torch.uint8,
    torch.int16,
    torch.int32,
    torch.int64,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
    torch.bfloat16,
    torch.float16,
    torch.float32,
    torch.float64,
    torch.complex64,
    torch.complex128,
]


def noise(size: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator(DEVICE).manual_seed(seed)
    return torch.randint(0, 256, (size,), dtype=torch.uint8, device=DEVICE, generator=generator)


def staged(tensor: torch.Tensor, kind: str = "m") -> str:
    """The fingerprint of the bytes as they are on the host: what the writer, without torch, compares with."""
    copy = tensor.cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
    return of_bytes(copy.data if copy.size else b"", kind)


@pytest.fixture(autouse=True, scope="module")
def kernel() -> None:
    assert torch.cuda.is_available()
    began = time.perf_counter()
    fingerprint.prepare(DEVICE)
    print(f"prepare: {time.perf_counter() - began:.2f} s")
    assert fingerprint._device(DEVICE).launch is not None, (
        "the kernel itself is tested here, not its stand-in"
    )


def many() -> list[torch.Tensor]:
    """Every size at addresses that are aligned and not, and every type."""
    store = noise(2**20)
    tensors = [store[offset : offset + size] for size in SIZES for offset in (0, 1, 2, 4, 8, 16)]
    for dtype in DTYPES:
        plain = (
            (noise(3 * BLOCK_BYTES + 128, 1) & 1) if dtype == torch.bool else noise(3 * BLOCK_BYTES + 128, 1)
        )
        tensors += [plain.view(dtype), plain.view(dtype)[1:], plain.view(dtype).reshape(8, -1).t()]
    return [*tensors, torch.tensor(3.5, device=DEVICE), torch.empty(4, 0, device=DEVICE)]


def test_many_tensors_in_one_launch_have_the_fingerprints_of_their_staged_bytes() -> None:
    tensors = many()
    assert begin(tensors).result() == [staged(tensor) for tensor in tensors]
    assert begin([]).result() == []
    assert begin([torch.empty(0, device=DEVICE)]).result() == [of_bytes(b"", "m")]


def test_a_large_tensor_is_right_in_every_block() -> None:
    """Past 2^31 bytes, where an index of 32 bits would wrap."""
    large = torch.zeros(2**31 + 3 * BLOCK_BYTES + 5, dtype=torch.uint8, device=DEVICE)
    large[-(2**20) :] = noise(2**20)
    large[: 2**20] = noise(2**20, 1)
    before = fingerprint.of_tensor(large)
    table = fingerprint._device(DEVICE).weights
    values = fingerprint.block_values([large], table)
    part = fingerprint._Part([0], [large], values, None)
    assert fingerprint.Pending([""], [part]).result() == [before]
    large[2**31 + 77] ^= 4
    assert fingerprint.of_tensor(large) != before


def test_every_flipped_bit_and_swapped_rows_are_seen() -> None:
    data = noise(4 * BLOCK_BYTES)
    variants = [data]
    for bit in range(0, 8 * data.numel(), 4099):
        other = data.clone()
        other[bit // 8] ^= 1 << bit % 8
        variants.append(other)
    rows = data.view(64, -1)
    for row in range(1, 64):
        order = torch.arange(64, device=DEVICE)
        order[[0, row]] = order[[row, 0]]
        variants.append(rows[order].reshape(-1))
    assert len(set(begin(variants).result())) == len(variants)


def test_it_waits_for_nothing_and_sees_the_moment_it_was_asked_in() -> None:
    tensors = [noise(8 * 2**20, seed) for seed in range(8)]
    expected = [staged(tensor) for tensor in tensors]
    tables = Tables()
    assert (
        begin(tensors, tables=tables).result() == expected
    )  # pinned memory and the table exist from here on
    torch.cuda.synchronize()
    torch.cuda._sleep(2_000_000_000)  # about a second
    began = time.perf_counter()
    pending = begin(tensors, tables=tables)
    took = time.perf_counter() - began
    for tensor in tensors:
        tensor.zero_()
    still = not torch.cuda.current_stream().query()
    assert pending.result() == expected
    print(f"begin: {took * 1e3:.2f} ms while the device was busy")
    assert still
    assert took < 0.25
    assert begin(tensors, tables=tables).result() == [staged(tensor) for tensor in tensors] != expected


def test_it_works_on_the_current_stream_and_a_kept_table_serves_another() -> None:
    tables = Tables()
    tensors = [noise(3 * 2**20 + seed, seed) for seed in range(5)]
    side = torch.cuda.Stream()
    for turn in range(6):
        with torch.cuda.stream(side if turn % 2 else torch.cuda.current_stream()):
            for tensor in tensors:
                tensor.add_(turn)
            pending = begin(tensors, tables=tables)
            found = pending.result()
        torch.cuda.synchronize()
        assert found == [staged(tensor) for tensor in tensors]
    kept = tables._kept[DEVICE][1]
    begin(tensors, tables=tables).result()
    assert tables._kept[DEVICE][1] is kept
    moved = [tensor.clone() for tensor in tensors]
    assert begin(moved, tables=tables).result() == [staged(tensor) for tensor in moved]
    assert tables._kept[DEVICE][1] is not kept


def test_it_waits_for_its_own_event_and_not_for_the_whole_device() -> None:
    tensors = [noise(2**20)]
    tables = Tables()
    begin(tensors, tables=tables).result()
    side = torch.cuda.Stream()
    torch.cuda.synchronize()
    pending = begin(tensors, tables=tables)
    with torch.cuda.stream(side):
        torch.cuda._sleep(2_000_000_000)
    found = pending.result()
    assert not side.query(), "the other stream is still busy"
    assert found == [staged(tensors[0])]


def test_both_kinds_of_a_live_tensor_on_either_side_agree() -> None:
    tensors = [noise(100_003), torch.randn(300, 7, device=DEVICE), torch.randn(64)]
    for tensor in tensors:
        for kind in ("x", "m"):
            assert fingerprint.of_live(tensor, kind) == staged(tensor, kind)
            assert fingerprint.of_live(tensor, kind) == staged(tensor, kind)
    assert begin(tensors).result() == [staged(tensors[0]), staged(tensors[1]), staged(tensors[2], "x")]


def test_without_the_kernel_the_values_are_the_same_and_it_is_said_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(*_: object) -> None:
        raise RuntimeError("no compiler here")

    here = fingerprint._device(DEVICE)
    monkeypatch.setattr(here, "launch", broken)
    tensors = many()
    expected = [staged(tensor) for tensor in tensors]
    with caplog.at_level(logging.WARNING):
        assert begin(tensors).result() == expected
        assert begin(tensors).result() == expected
    assert len([r for r in caplog.records if "no compiler here" in r.getMessage()]) == 1
