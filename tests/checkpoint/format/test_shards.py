"""An archive's frame and the tensor's bytes in it are what torch.save means, for every dtype and shape."""

from __future__ import annotations

import io
import resource
import zipfile
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from holdfast.checkpoint.format.shards import ALIGNMENT, Frames, make_frame
from kit.tensors import DTYPES, bits, same_bits

pytestmark = pytest.mark.filterwarnings("ignore:ComplexHalf support")
SHAPES = [(), (0,), (1,), (7,), (64,), (3, 5), (4, 0, 3), (2, 1, 9), (31, 33), (1, 1, 1, 1, 1), (65_537,)]
ALL_DTYPES = [*DTYPES, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz, torch.float8_e8m0fnu, torch.complex32]


def filled(dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
    count = 1
    for size in shape:
        count *= size
    return bits(count, dtype, 3).reshape(shape)


def archive(tensor: torch.Tensor) -> bytes:
    frame = make_frame(tensor.dtype, tuple(tensor.shape))
    raw = tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes() if tensor.numel() else b""
    assert len(raw) == frame.raw
    return frame.before + raw + frame.after


@pytest.mark.parametrize("dtype", ALL_DTYPES, ids=str)
def test_torch_reads_back_what_a_frame_was_filled_with(dtype: torch.dtype) -> None:
    for shape in SHAPES:
        tensor = filled(dtype, shape)
        loaded = torch.load(io.BytesIO(archive(tensor)), weights_only=True)
        assert same_bits(loaded, tensor), shape
        assert loaded.stride() == tensor.stride()


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_an_archive_is_a_zip_of_whole_cache_lines_with_aligned_bytes(shape: tuple[int, ...]) -> None:
    """So that any number of them, one after the other, keep every tensor's bytes aligned."""
    for dtype in (torch.float32, torch.bfloat16, torch.bool, torch.complex128):
        data = archive(filled(dtype, shape))
        frame = make_frame(dtype, shape)
        assert len(data) == frame.length
        assert len(data) % ALIGNMENT == 0
        assert frame.raw == 0 or len(frame.before) % ALIGNMENT == 0
        with zipfile.ZipFile(io.BytesIO(data)) as opened:
            assert set(opened.comment) <= {0}, "what fills it up is a comment, and nothing else"
            (inside,) = [name for name in opened.namelist() if "/data/" in name]
            assert opened.getinfo(inside).compress_type == zipfile.ZIP_STORED
            assert opened.getinfo(inside).file_size == frame.raw


def test_what_torch_itself_saves_differs_only_by_the_checksum_and_the_padding() -> None:
    tensor = filled(torch.float32, (31, 33))
    plain = io.BytesIO()
    before = torch.serialization.get_crc32_options()
    torch.serialization.set_crc32_options(False)
    try:
        torch.save(tensor, plain)
    finally:
        torch.serialization.set_crc32_options(before)
    saved, ours = plain.getvalue(), archive(tensor)
    assert ours[: len(saved) - 2] == saved[:-2]
    assert saved[-2:] == b"\0\0", "the length of the comment"
    assert ours[len(saved) :] == bytes(int.from_bytes(ours[len(saved) - 2 : len(saved)], "little"))


def test_the_crc_option_is_as_it_was() -> None:
    original = torch.serialization.get_crc32_options()
    try:
        for option in (True, False):
            torch.serialization.set_crc32_options(option)
            make_frame(torch.float32, (3,))
            assert torch.serialization.get_crc32_options() is option
    finally:
        torch.serialization.set_crc32_options(original)


def test_no_memory_is_taken_for_a_huge_tensor() -> None:
    def peak() -> int:
        for line in Path("/proc/self/status").read_text().splitlines():
            if line.startswith("VmHWM"):
                return int(line.split()[1])
        raise AssertionError("no VmHWM")

    make_frame(torch.float32, (5,))
    before = max(peak(), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)
    frame = make_frame(torch.float32, (1 << 30, 1))
    assert frame.raw == 4 << 30
    assert len(frame.before) + len(frame.after) < 4096
    assert peak() - before < 64 * 1024, "kilobytes"


def test_a_frame_is_made_once_for_a_kind() -> None:
    frames = Frames()
    first = frames.of(torch.float32, (3, 4))
    assert frames.of(torch.float32, (3, 4)) is first
    assert frames.of(torch.float32, (4, 3)) is not first
    assert frames.of(torch.int32, (3, 4)) is not first


@given(st.sampled_from(ALL_DTYPES), st.lists(st.integers(0, 9), max_size=4).map(tuple))
def test_any_shape_comes_back(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    tensor = filled(dtype, shape)
    assert same_bits(torch.load(io.BytesIO(archive(tensor)), weights_only=True), tensor)
