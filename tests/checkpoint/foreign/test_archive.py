"""Files of torch.save come out as data: every value as torch has it, nothing run, nothing believed."""

from __future__ import annotations

import contextlib
import io
import os
import zipfile
from argparse import Namespace
from collections import OrderedDict, defaultdict
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from holdfast.checkpoint.foreign.archive import ArchiveError, StoredTensor, read_archive
from holdfast.checkpoint.foreign.source import values_of
from holdfast.checkpoint.format import Record
from holdfast.errors import IncompleteStateError

TREE: dict[Any, Any] = {
    "tensor": torch.arange(12.0).reshape(3, 4),
    "turned": torch.arange(12.0).reshape(3, 4).t(),
    "part": torch.arange(20, dtype=torch.int64)[5:9],
    "nothing": torch.empty(0, 3),
    "number": torch.tensor(7, dtype=torch.bfloat16),
    "flags": torch.tensor([True, False]),
    "small": torch.ones(3).to(torch.float8_e4m3fn),
    "unsigned": torch.tensor([1, 65535], dtype=torch.uint16),
    "parameter": torch.nn.Parameter(torch.ones(2, 2)),
    "ordered": OrderedDict(a=1, b=[2.5, None, True]),
    "default": defaultdict(list),
    "tuple": (1, "two", 3.0, b"four", -(2**40), 2**100),
    "array": numpy.arange(6, dtype="u4").reshape(2, 3, order="F"),
    "scalar": numpy.float64(0.25),
    "set": {1, 2},
    3: {"by number": "text"},
    "dtype": torch.float16,
    "size": torch.Size([3, 4]),
}


def same(a: Any, b: Any) -> bool:
    if isinstance(a, torch.Tensor):
        bits = [one.detach().contiguous().reshape(-1).view(torch.uint8) for one in (a, b)]
        return a.shape == b.shape and a.dtype == b.dtype and torch.equal(*bits)
    if isinstance(a, numpy.ndarray):
        return bool(a.dtype == b.dtype and a.shape == b.shape and (a == b).all())
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
    if isinstance(a, list | tuple) and not isinstance(a, torch.Size):
        return len(a) == len(b) and all(map(same, a, b))
    return bool(a == b)


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
def test_what_is_read_is_what_torch_reads(protocol: int, tmp_path: Path) -> None:
    torch.save(TREE, tmp_path / "one.pt", pickle_protocol=protocol)
    assert same(values_of(read_archive(tmp_path / "one.pt").tree, "it"), TREE)


def test_shared_memory_is_read_for_each_that_shares_it(tmp_path: Path) -> None:
    whole = torch.arange(10.0)
    torch.save({"whole": whole, "part": whole[2:5]}, tmp_path / "one.pt")
    found = values_of(read_archive(tmp_path / "one.pt").tree, "it")
    assert found["part"].tolist() == [2.0, 3.0, 4.0]


class Trap:
    """What a hostile file would have run."""

    def __reduce__(self) -> Any:
        return os.system, ("touch sprung",)


def test_an_object_of_any_class_is_told_by_its_class_and_never_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    torch.save({"trap": Trap(), "args": Namespace(lr=0.1), "w": torch.ones(2)}, tmp_path / "one.pt")
    tree = read_archive(tmp_path / "one.pt").tree
    assert isinstance(tree["trap"], Record)
    assert (tree["trap"].cls, tree["trap"].arguments) == (f"{os.system.__module__}.system", ("touch sprung",))
    assert tree["args"].state == {"lr": 0.1}
    assert isinstance(tree["w"], StoredTensor)
    with pytest.raises(IncompleteStateError, match=r"trap holds an object of (posix|nt)\.system"):
        values_of(tree, "it")
    assert not (tmp_path / "sprung").exists()


def legacy(path: Path) -> None:
    torch.save({"w": torch.ones(2)}, path, _use_new_zipfile_serialization=False)


def empty(path: Path) -> None:
    path.write_bytes(b"")


def cut(path: Path) -> None:
    torch.save({"w": torch.ones(2)}, path)
    os.truncate(path, path.stat().st_size - 30)


def garbled(path: Path) -> None:
    torch.save({"w": torch.ones(2)}, path)
    data = bytearray(path.read_bytes())
    data[data.find(b"_rebuild_tensor_v2")] ^= 0xFF
    path.write_bytes(data)


def without_values(path: Path) -> None:
    torch.save({"w": torch.ones(2)}, path)
    with zipfile.ZipFile(path) as old, zipfile.ZipFile(path.with_suffix(".new"), "w") as new:
        for info in old.infolist():
            if not info.filename.endswith("data/0"):
                new.writestr(info, old.read(info))
    path.with_suffix(".new").rename(path)


def script(path: Path) -> None:
    torch.jit.save(torch.jit.script(torch.nn.Linear(1, 1)), path)


@pytest.mark.parametrize(
    ("damage", "why"),
    [
        (legacy, "the form that torch.save had before torch 1.6"),
        (empty, "it is empty"),
        (cut, "no whole archive"),
        (garbled, "Bad CRC-32 for file"),
        (without_values, "data/0, are not in it"),
        (script, "TorchScript"),
    ],
)
def test_what_is_no_such_file_is_refused_by_what_it_is(damage: Any, why: str, tmp_path: Path) -> None:
    damage(tmp_path / "one.pt")
    with pytest.raises(ArchiveError, match=why):
        read_archive(tmp_path / "one.pt")


def test_a_tensor_that_reaches_beyond_its_bytes_is_refused(tmp_path: Path) -> None:
    torch.save({"w": torch.ones(4)}, tmp_path / "one.pt")
    with zipfile.ZipFile(tmp_path / "one.pt") as old, zipfile.ZipFile(tmp_path / "other.pt", "w") as new:
        for info in old.infolist():
            data = old.read(info)
            if info.filename.endswith("data.pkl"):
                # K\x04 is the number 4: of the storage, and of the shape. The second is the shape's.
                at = data.index(b"K\x04", data.index(b"K\x04") + 1)
                data = data[: at + 1] + b"\x7f" + data[at + 2 :]
            new.writestr(info.filename, data)
    with pytest.raises(ArchiveError, match=r"shape \[127\] reaches beyond the 16 bytes of data/0"):
        read_archive(tmp_path / "other.pt")


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_a_flipped_byte_is_an_error_of_ours_or_other_data_and_nothing_else(
    data: st.DataObject, tmp_path: Path
) -> None:
    buffer = io.BytesIO()
    torch.save({"w": torch.ones(3), "lr": 0.1, "names": ["a", "b"]}, buffer)
    whole = bytearray(buffer.getvalue())
    for _ in range(data.draw(st.integers(1, 3))):
        whole[data.draw(st.integers(0, len(whole) - 1))] ^= 1 << data.draw(st.integers(0, 7))
    (tmp_path / "one.pt").write_bytes(whole)
    with contextlib.suppress(ArchiveError):
        read_archive(tmp_path / "one.pt")


def pickled(path: Path, opcodes: bytes) -> Path:
    with zipfile.ZipFile(path, "w") as made:
        made.writestr("archive/data.pkl", b"\x80\x02" + opcodes)
    return path


@pytest.mark.parametrize(
    ("opcodes", "why"),
    [
        (b"Nr\xff\xff\xff\x7f.", "remembers values out of order"),
        (b"Nq\x09.", "remembers values out of order"),
        (b"(" * 20_000, "piles up values"),
        (b"}" * 20_000, "piles up values"),
        (b"C\xffabc", "ends too early"),
        (b"\x8a\xff" + bytes(255) + b".", "a whole number of 255 bytes"),
        (b"N.N", "1 bytes follow its end"),
        (b"i.", "opcode 0x69, which no torch.save does"),
    ],
)
def test_a_pickle_that_no_torch_save_writes_is_refused(opcodes: bytes, why: str, tmp_path: Path) -> None:
    with pytest.raises(ArchiveError, match=why):
        read_archive(pickled(tmp_path / "one.pt", opcodes))


def test_a_key_of_tuples_in_tuples_does_not_end_the_process(tmp_path: Path) -> None:
    """Hashing it is recursive in C. The long text makes room for as many tuples."""
    text = b"X" + (2_000_000).to_bytes(4, "little") + b"x" * 2_000_000
    opcodes = b"]" + text + b"a}N" + b"\x85" * 300_000 + b"Nsa."
    with pytest.raises(ArchiveError, match="uses a tuple as a dictionary key"):
        read_archive(pickled(tmp_path / "one.pt", opcodes))


def doubled(kind: Any) -> Any:
    """Sixty levels, each of which holds the one below it twice: a kilobyte that spreads out to 2^60."""
    inner: Any = kind(1, 2)
    for _ in range(60):
        inner = kind(inner, inner)
    return inner


def within(depth: int) -> Any:
    inner: Any = []
    for _ in range(depth):
        inner = {"a": inner}
    return inner


def in_itself() -> Any:
    inner: dict[str, Any] = {"step": 3}
    inner["self"] = [inner]
    return inner


@pytest.mark.parametrize(
    ("tree", "why"),
    [
        (doubled(lambda a, b: [a, b]), "far more than its bytes"),
        (doubled(lambda a, b: (a, b)), "far more than its bytes"),
        (doubled(lambda a, b: {"a": a, "b": b}), "far more than its bytes"),
        (doubled(lambda a, b: Namespace(a=a, b=b)), "far more than its bytes"),
        (in_itself(), "contains itself"),
        (within(300), "more than 200 containers in each other"),
        ({"w": torch.ones(1).expand(1 << 20, 1 << 22)}, "repeats the 4 bytes of data/0 far too often"),
    ],
    ids=["lists", "tuples", "dicts", "objects", "itself", "deep", "expanded"],
)
def test_a_small_file_never_makes_the_work_of_a_large_one(tree: Any, why: str, tmp_path: Path) -> None:
    torch.save(tree, tmp_path / "one.pt")
    with pytest.raises(ArchiveError, match=why):
        read_archive(tmp_path / "one.pt")


def test_what_is_shared_within_reason_is_read(tmp_path: Path) -> None:
    settings = {"betas": (0.9, 0.95), "rows": list(range(100))}
    torch.save({"w": torch.ones(1).expand(4, 5), "layers": [settings] * 1000}, tmp_path / "one.pt")
    tree = read_archive(tmp_path / "one.pt").tree
    assert len(tree["layers"]) == 1000
    assert torch.equal(values_of(tree["w"], "w"), torch.ones(4, 5))


@pytest.mark.parametrize("record", ["data.pkl", "byteorder", "data/0"])
def test_a_compressed_record_is_refused_before_it_is_read(record: str, tmp_path: Path) -> None:
    """A megabyte of zeros takes a kilobyte so; a hundred gigabytes, a hundred megabytes."""
    torch.save({"step": 3}, tmp_path / "one.pt")
    with zipfile.ZipFile(tmp_path / "one.pt", "a") as made:
        made.writestr(f"one/{record}", bytes(1 << 20), zipfile.ZIP_DEFLATED)
    with pytest.raises(ArchiveError, match="a record is compressed"):
        read_archive(tmp_path / "one.pt")
