"""`.metadata` is read as data: everything DCP writes, nothing that runs, one kind of error."""

from __future__ import annotations

import collections
import copyreg
import io
import os
import pickle
import pickletools
import re
import subprocess
import sys
import time
from pathlib import Path, PurePosixPath
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.checkpoint import filesystem
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)

from holdfast.checkpoint.format import metadata as metadatas
from holdfast.checkpoint.format.manifest import METADATA, Reason
from holdfast.checkpoint.format.metadata import (
    MAX_METADATA_BYTES,
    Chunks,
    MetadataError,
    StorageEntry,
    StoredChunks,
    StoredMetadata,
    completeness,
    parse,
    read,
)
from holdfast.process import proc
from kit.checkpoints import save_stock

FILE = "__0_0.distcp"


def tensor(
    shape: list[int], chunks: list[tuple[list[int], list[int]]], **properties: Any
) -> TensorStorageMetadata:
    listed = [ChunkStorageMetadata(torch.Size(o), torch.Size(s)) for o, s in chunks]
    return TensorStorageMetadata(TensorProperties(**properties), torch.Size(shape), listed)


def sharded(rows: int = 8, ranks: int = 4) -> Metadata:
    """A tensor in row-wise shards, one file a rank, and one object."""
    each = rows // ranks
    chunks = [([rank * each, 0], [each, 3]) for rank in range(ranks)]
    storage = {
        MetadataIndex("w", torch.Size([rank * each, 0]), rank): filesystem._StorageInfo(
            f"__{rank}_0.distcp", 0, 100
        )
        for rank in range(ranks)
    }
    storage[MetadataIndex("step")] = filesystem._StorageInfo("__0_0.distcp", 100, 7)
    return Metadata(
        {"w": tensor([rows, 3], chunks), "step": BytesStorageMetadata()},
        {"w": ("model", "w"), "step": ("step",)},
        storage,
        StorageMeta("/data/ckpt/step_00000120-3fa9c1d2", "save", modules=["m"]),
    )


SIZES = {"__0_0.distcp": 107} | {f"__{rank}_0.distcp": 100 for rank in range(1, 4)}


def reasons(meta: Metadata, sizes: dict[str, int]) -> list[tuple[Reason, str]]:
    return [(p.reason, p.path) for p in completeness(parse(pickle.dumps(meta)), sizes)]


def test_what_dcp_writes_is_read_as_torch_reads_it(tmp_path: Path) -> None:
    directory = save_stock(tmp_path / "stock")
    theirs = filesystem.FileSystemReader(directory).read_metadata()
    ours = read(directory)
    entries = theirs.state_dict_metadata
    assert sorted(ours.objects) == sorted(
        n for n, e in entries.items() if isinstance(e, BytesStorageMetadata)
    )
    assert set(ours.tensors) == {n for n, e in entries.items() if isinstance(e, TensorStorageMetadata)}
    for name, mine in ours.tensors.items():
        assert mine.shape == tuple(entries[name].size)
        assert f"torch.{mine.dtype}" == str(entries[name].properties.dtype)
        assert mine.chunks == [(tuple(c.offsets), tuple(c.sizes)) for c in entries[name].chunks]
    assert ours.storage == {
        (index.fqn, None if index.offset is None else tuple(index.offset)): StorageEntry(
            info.relative_path, info.offset, info.length
        )
        for index, info in theirs.storage_data.items()
    }
    assert ours.origin == "stock"
    sizes = {FILE: (directory / FILE).stat().st_size}
    assert completeness(ours, sizes) == []


@pytest.mark.parametrize("protocol", [4, 5])
def test_both_protocols_that_python_writes_by_default_are_read(protocol: int) -> None:
    meta = parse(pickle.dumps(sharded(), protocol=protocol))
    assert len(meta.storage) == 5
    assert meta.origin == "step_00000120-3fa9c1d2"


def test_every_dtype_and_every_form_of_a_path_is_read() -> None:
    dtypes = {str(v).removeprefix("torch."): v for v in vars(torch).values() if isinstance(v, torch.dtype)}
    assert len(dtypes) > 20
    meta = Metadata({name: tensor([1], [([0], [1])], dtype=dtype) for name, dtype in dtypes.items()})
    meta.storage_data = collections.OrderedDict()
    for origin in (Path("/a/b"), PurePosixPath("b"), "b/", None):
        meta.storage_meta = StorageMeta(origin)
        parsed = parse(pickle.dumps(meta))
        assert {name: entry.dtype for name, entry in parsed.tensors.items()} == {
            name: name for name in dtypes
        }
        assert parsed.origin == ("b" if origin else "")


def test_many_entries_and_long_names_use_every_form_of_a_number_and_a_text() -> None:
    """More than 255 memo entries, numbers of 1, 2, 4 and 8 bytes, texts longer than 255 bytes."""
    storage = {MetadataIndex(f"{'x' * n}.{n}"): filesystem._StorageInfo(FILE, 2**n, n) for n in range(63)}
    storage |= {MetadataIndex("y" * n): filesystem._StorageInfo(FILE, 0, n) for n in range(250, 600)}
    meta = Metadata({i.fqn: BytesStorageMetadata() for i in storage}, None, storage)
    parsed = parse(pickle.dumps(meta))
    assert {k[0]: (e.offset, e.length) for k, e in parsed.storage.items()} == {
        i.fqn: (s.offset, s.length) for i, s in storage.items()
    }


# --- nothing runs ------------------------------------------------------------------------------------------


class Call:
    """Pickles as a call of anything."""

    def __init__(self, function: Any, *arguments: Any, state: Any = None) -> None:
        self._reduced = (function, arguments) if state is None else (function, arguments, state)

    def __reduce__(self) -> Any:
        return self._reduced


def bombs(marker: Path) -> dict[str, bytes]:
    code = f"open({str(marker)!r}, 'w')"
    reached = {
        "os.system": Call(os.system, f"touch {marker}"),
        "builtins.eval": Call(eval, code),
        "builtins.exec": Call(exec, code),
        "getattr": Call(getattr, torch.Size, "__class__"),
        "nested getattr": Call(getattr, Call(getattr, TensorProperties, "create_from_tensor"), "__globals__"),
        "pathlib touch": Call(Path.touch, marker),
        "io.open": Call(io.open, str(marker), "w"),
        "torch.load": Call(torch.load, str(marker)),
        "subprocess": Call(subprocess.Popen, ["touch", str(marker)]),
    }
    found = {name: pickle.dumps(value) for name, value in reached.items()}
    inside = sharded()
    inside.planner_data = {"x": reached["os.system"]}
    found["inside planner_data"] = pickle.dumps(inside)
    # Through a dotted name: an allowed module, and from there by attributes to something else.
    found["dotted name"] = (
        b"\x80\x04\x8c\x07pathlib\x8c\x0fPosixPath.touch\x93" + b"\x8c" + bytes([len(str(marker))])
        + str(marker).encode() + b"\x85R."
    )  # fmt: skip
    found["protocol 0"] = b"cos\nsystem\n(S'touch %b'\ntR." % str(marker).encode()
    found["global opcode"] = b"\x80\x04cos\nsystem\n\x8c\x01x\x85R."
    found["instance opcode"] = b"\x80\x04(S'touch x'\nios\nsystem\n."
    found["persistent id"] = b"\x80\x04\x8c\x01xQ."
    found["extension code"] = b"\x80\x04\x82\x01."
    return found


BOMBS = sorted(bombs(Path("/nonexistent/marker")))


@pytest.mark.parametrize("name", BOMBS)
def test_a_pickle_bomb_is_refused_and_does_not_go_off(name: str, tmp_path: Path) -> None:
    marker = tmp_path / "went-off"
    data = bombs(marker)[name]
    with pytest.raises(MetadataError):
        parse(data)
    assert not marker.exists()


def test_the_refusal_names_what_was_refused(tmp_path: Path) -> None:
    with pytest.raises(MetadataError, match=r"posix\.system"):
        parse(pickle.dumps(Call(os.system, "true")))
    with pytest.raises(MetadataError, match=r"getattr"):
        parse(pickle.dumps(Call(getattr, TensorProperties, "create_from_tensor")))
    with pytest.raises(MetadataError, match=r"calls torch\.distributed\.checkpoint\.metadata\.MetadataIndex"):
        parse(pickle.dumps([Call(MetadataIndex, "w")]))
    with pytest.raises(MetadataError, match="whole number of 255 bytes"):
        parse(HOSTILE["a number of 255 bytes"])


HOSTILE = {
    # One opcode that makes CPython's unpickler reserve gigabytes.
    "a memo index of four billion": b"\x80\x04Nr\xff\xff\xff\xff.",
    "a text of an exabyte": b"\x80\x04\x8d" + (2**60).to_bytes(8, "little") + b"x.",
    "a frame of an exabyte": b"\x80\x04\x95" + (2**60).to_bytes(8, "little") + b"N.",
    # Hashing this ends CPython's unpickler with a segmentation fault.
    "a million nested tuples as a key": b"\x80\x04})" + b"\x85" * 1_000_000 + b"Ns.",
    "a million nested lists": b"\x80\x04" + b"]" * 1_000_000 + b"a" * 999_999 + b".",
    "a million marks": b"\x80\x04" + b"(" * 1_000_000 + b".",
    "a number of 255 bytes": b"\x80\x04\x8a\xff" + b"\x7f" * 255 + b".",
    "a list in itself": b"\x80\x04]\x94h\x00a.",
    "nothing": b"",
    "only the protocol": b"\x80\x04",
    "a later protocol": b"\x80\x06N.",
    "something after the end": pickle.dumps(sharded()) + b"x",
}


def test_hostile_forms_are_refused_within_a_small_memory() -> None:
    """In a process of its own: a crash or a lack of memory would show as its exit code."""
    code = (
        "import resource, sys, pickle\n"
        "from holdfast.checkpoint.format.metadata import MetadataError, parse\n"
        "resource.setrlimit(resource.RLIMIT_AS, (2 << 30, 2 << 30))\n"
        "for name, data in pickle.load(sys.stdin.buffer).items():\n"
        "    try:\n"
        "        parse(data)\n"
        "    except MetadataError:\n"
        "        continue\n"
        "    sys.exit(name)\n"
    )
    result = subprocess.run(
        [sys.executable, "-c", code],
        input=pickle.dumps(HOSTILE),
        capture_output=True,
        timeout=60,
        check=False,
    )
    assert (result.returncode, result.stderr) == (0, b"")


@pytest.mark.parametrize(
    "filling",
    [b"}", b"N", b"N\x94\x94", b"(", b"]\x94", b"h\x00\x94", b"\x85", b"]h\x00a0"],
    ids=["dictionaries", "nothings", "memos", "marks", "lists", "the same again", "tuples", "mixed"],
)
def test_bytes_that_only_pile_up_values_are_refused_at_once(filling: bytes) -> None:
    """Of 40 MB of them a look at a directory took 3 GB and 21 s."""
    data = b"\x80\x04]\x94" + filling * (40_000_000 // len(filling)) + b"."
    before = time.process_time()
    with pytest.raises(MetadataError, match=r"piles up values|opcode 0x30") as refused:
        parse(data)
    assert time.process_time() - before < 1.0
    assert re.search(r"piles up values that nothing uses, \d{1,6} bytes|0x30", str(refused.value))


@pytest.mark.parametrize("shared", ["chunks", "entry"])
def test_entries_that_share_their_chunks_do_not_multiply_the_work(shared: str) -> None:
    """172 kB that would have taken minutes: a thousand entries of three thousand chunks without elements."""
    size = torch.Size
    chunks = [ChunkStorageMetadata(size([at, 0]), size([1, 0])) for at in range(3000)]
    of_all = TensorStorageMetadata(TensorProperties(torch.float32), size([3000, 0]), chunks)
    entries = {
        f"e{at}": of_all
        if shared == "entry"
        else TensorStorageMetadata(TensorProperties(torch.float32), size([3000, 0]), chunks)
        for at in range(1000)
    }
    with pytest.raises(MetadataError, match="describe more chunks than they can"):
        metadatas.parse(pickle.dumps(Metadata(entries, {}, {}), 4))


def test_the_standard_unpickler_would_crash_here() -> None:
    """Why pickled.py exists. When this fails, CPython was cured and the reader can become simpler."""
    code = "import pickle, sys; pickle.loads(sys.stdin.buffer.read())"
    data = HOSTILE["a million nested tuples as a key"]
    result = subprocess.run(
        [sys.executable, "-c", code], input=data, capture_output=True, timeout=60, check=False
    )
    assert result.returncode < 0


# --- one kind of error -------------------------------------------------------------------------------------


def only_metadata_error(data: bytes) -> None:
    said = "parsed"
    try:
        parse(data)
    except MetadataError as error:
        said = str(error)
    assert said.isprintable()


@settings(max_examples=300, deadline=None)
@given(st.binary(max_size=300))
def test_random_bytes_give_metadata_error_only(data: bytes) -> None:
    only_metadata_error(data)
    only_metadata_error(b"\x80\x04" + data)


VALID = pickle.dumps(sharded())


def test_every_truncation_is_refused() -> None:
    for end in range(len(VALID)):
        with pytest.raises(MetadataError):
            parse(VALID[:end])


@settings(max_examples=400, deadline=None)
@given(st.integers(0, len(VALID) - 1), st.integers(0, 255), st.integers(0, 40))
def test_changed_bytes_give_metadata_error_or_a_checked_value(at: int, byte: int, cut: int) -> None:
    only_metadata_error(VALID[:at] + bytes([byte]) + VALID[at + 1 :])
    only_metadata_error(VALID[:at] + VALID[at + cut :])


ODD = st.one_of(
    st.integers(-3, 2**70),
    st.floats(),
    st.text(max_size=5),
    st.lists(st.integers(-1, 9), max_size=70).map(tuple),
    st.sampled_from([None, True, (), [], {}, (1, "x"), {"a": 1}, torch.Size([1]), torch.float32]),
    st.sampled_from([BytesStorageMetadata(), MetadataIndex("w"), ChunkStorageMetadata]),
)
FIELDS = [
    "state_dict_metadata", "storage_data", "storage_meta", "entry", "size", "properties", "chunks", "chunk",
    "offsets", "sizes", "key", "fqn", "offset", "info", "relative_path", "start", "length", "dtype", "name",
]  # fmt: skip


def hashable(value: Any) -> Any:
    try:
        hash(value)
    except TypeError:
        return repr(value)
    return value


def with_field(field: str, value: Any) -> Metadata:
    meta = sharded(rows=1, ranks=1)
    entry: Any = meta.state_dict_metadata["w"]
    index = next(iter(meta.storage_data))
    info = meta.storage_data[index]
    if field in ("state_dict_metadata", "storage_data", "storage_meta"):
        setattr(meta, field, value)
    elif field == "entry":
        meta.state_dict_metadata["w"] = value
    elif field == "name":
        meta.state_dict_metadata = {hashable(value): entry}
    elif field in ("size", "properties", "chunks"):
        setattr(entry, field, value)
    elif field == "chunk":
        entry.chunks[0] = value
    elif field in ("offsets", "sizes"):
        setattr(entry.chunks[0], field, value)
    elif field == "key":
        meta.storage_data = {hashable(value): info}
    elif field in ("fqn", "offset"):
        changed = MetadataIndex("w")
        object.__setattr__(changed, field, hashable(value))
        meta.storage_data = {changed: info}
    elif field == "info":
        meta.storage_data[index] = value
    elif field == "dtype":
        entry.properties = TensorProperties(dtype=value)
    else:
        setattr(info, {"start": "offset"}.get(field, field), value)
    return meta


@settings(max_examples=400, deadline=None)
@given(st.sampled_from(FIELDS), ODD)
def test_fields_of_a_wrong_type_give_metadata_error_only(field: str, value: Any) -> None:
    data = pickle.dumps(with_field(field, value))
    only_metadata_error(data)


@pytest.mark.parametrize(
    ("field", "value", "said"),
    [
        ("state_dict_metadata", [], "not a dictionary"),
        ("storage_data", None, "not a dictionary"),
        ("entry", {}, "not a TensorStorageMetadata"),
        ("name", 3, "name is not text"),
        ("size", (-1,), "size"),
        ("size", (True,), "size"),
        ("size", (1,) * 65, "at most 64"),
        ("sizes", (2**64, 1), "sizes"),
        ("offsets", (0,), "dimensions"),
        ("dtype", "float32", "dtype"),
        ("dtype", torch.Size, "dtype"),
        ("start", -1, "whole number"),
        ("length", 1.0, "whole number"),
        ("length", True, "whole number"),
        ("relative_path", "../../etc/passwd", "not a path inside"),
        ("relative_path", "/etc/passwd", "not a path inside"),
        ("relative_path", "a/../b", "not a path inside"),
        ("relative_path", "", "not a path inside"),
        ("relative_path", "a\x00b", "not a path inside"),
        ("fqn", None, "no name"),
        ("info", (FILE, 0, 1), "not a _StorageInfo"),
    ],
)
def test_a_wrong_field_is_named(field: str, value: Any, said: str) -> None:
    with pytest.raises(MetadataError, match=said):
        parse(pickle.dumps(with_field(field, value)))


def test_one_item_in_two_places_is_refused() -> None:
    meta = sharded()
    again = MetadataIndex("again")
    meta.storage_data[again] = filesystem._StorageInfo(FILE, 0, 1)
    object.__setattr__(again, "fqn", "step")
    with pytest.raises(MetadataError, match="step is stored twice"):
        parse(pickle.dumps(meta))


def test_a_file_over_the_limit_is_refused_unread(tmp_path: Path) -> None:
    with (tmp_path / METADATA).open("wb") as file:
        file.truncate(MAX_METADATA_BYTES + 1)
    with pytest.raises(MetadataError, match=f"more than the {MAX_METADATA_BYTES}"):
        read(tmp_path)
    with (tmp_path / METADATA).open("wb") as file:
        file.truncate(1001)
    with pytest.raises(MetadataError, match="more than the 1000"):  # what the manifest says
        read(tmp_path, 1000)


def test_a_file_that_would_not_fit_into_memory_is_refused_unread(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(proc, "memory_available", lambda: 100 * 1024 * 1024)
    with (tmp_path / METADATA).open("wb") as file:
        file.truncate(60 * 1024 * 1024)
    began = time.process_time()
    with pytest.raises(MetadataError, match=r"62914560 bytes.* 104857600 are available; at most 171798"):
        read(tmp_path)
    assert time.process_time() - began < 0.05
    # Regular ones need less; only what the interpreter has to read is refused.
    data = b"\x80\x04" + b"N0" * (10 * 1024 * 1024)
    with pytest.raises(MetadataError, match=r"bytes; reading it takes up to \d+ of memory"):
        parse(data)


def test_a_missing_or_linked_file_is_metadata_error(tmp_path: Path) -> None:
    with pytest.raises(MetadataError, match=r"no \.metadata"):
        read(tmp_path)
    (tmp_path / "real").write_bytes(VALID)
    (tmp_path / METADATA).symlink_to("real")
    with pytest.raises(MetadataError, match="link"):
        read(tmp_path)


# --- completeness ------------------------------------------------------------------------------------------


def test_a_whole_directory_is_complete() -> None:
    assert reasons(sharded(), SIZES) == []


def test_each_lack_is_told_apart() -> None:
    """Scenario 9, for a directory that has no digests."""
    second = "__1_0.distcp"
    assert reasons(sharded(), {k: v for k, v in SIZES.items() if k != second}) == [(Reason.MISSING, second)]
    assert reasons(sharded(), SIZES | {second: 99}) == [(Reason.TRUNCATED, second)]
    assert reasons(sharded(), SIZES | {second: 0}) == [(Reason.EMPTY, second)]
    assert reasons(sharded(), SIZES | {second: 101}) == [(Reason.ALTERED, second)]
    assert reasons(sharded(), SIZES | {"__9_0.distcp": 1}) == [(Reason.UNLISTED, "__9_0.distcp")]
    assert reasons(sharded(), SIZES | {"notes.txt": 1}) == []


def test_a_chunk_that_is_stored_nowhere_is_found() -> None:
    meta = sharded()
    del meta.storage_data[MetadataIndex("w", torch.Size([2, 0]))]
    assert (Reason.INCOMPLETE, METADATA) in reasons(meta, SIZES)
    meta = sharded()
    del meta.storage_data[MetadataIndex("step")]
    assert (Reason.INCOMPLETE, METADATA) in reasons(meta, SIZES)


def test_chunks_that_do_not_add_up_reach_outside_or_overlap_are_found() -> None:
    """DCP's cached plan after a world shrink drops half of a tensor silently."""
    for chunks, said in (
        ([([0, 0], [2, 3]), ([2, 0], [2, 3]), ([4, 0], [2, 3])], "its chunks 18"),
        ([([0, 0], [2, 3]), ([2, 0], [2, 3]), ([4, 0], [2, 3]), ([6, 0], [3, 3])], "outside"),
        ([([0, 0], [2, 3]), ([2, 0], [2, 3]), ([4, 0], [2, 3]), ([2, 0], [2, 3])], "overlap"),
    ):
        meta = sharded()
        meta.state_dict_metadata["w"] = tensor([8, 3], chunks)
        (problem,) = completeness(parse(pickle.dumps(meta)), SIZES)
        assert problem.reason is Reason.INCOMPLETE
        assert said in problem.detail


def test_two_dimensional_shards_and_empty_ones_are_complete() -> None:
    boxes = [([r, c], [2, 2]) for r in (0, 2) for c in (0, 2)]
    chunks = [*boxes, ([4, 0], [0, 4]), ([4, 0], [0, 4])]
    storage = {MetadataIndex("w", torch.Size(o)): filesystem._StorageInfo(FILE, 0, 1) for o, _ in boxes}
    meta = Metadata({"w": tensor([4, 4], chunks)}, None, storage)
    assert reasons(meta, {FILE: 1}) == []


# --- the regular stretches: the same answer, faster ---------------------------------------------------------


def many(tensors: int, ranks: int, shape: tuple[int, ...] = (4, 3), *, nones: int = 0) -> Metadata:
    """Tensors in row-wise shards as a save plans them, in an order of their own where they are stored."""
    described: dict[str, Any] = {}
    by_rank: list[list[MetadataIndex]] = [[] for _ in range(ranks)]
    rows, *rest = shape
    for number in range(tensors):
        name, scale = f"model.layer.{number}.weight", 1000 ** (number % 6)
        chunks = []
        for rank in range(ranks):
            offsets = torch.Size([rows * rank * scale, *(0 for _ in rest)])
            chunks.append(ChunkStorageMetadata(offsets, torch.Size([rows * scale, *rest])))
            by_rank[rank].append(MetadataIndex(name, offsets, rank))
        dtype = (torch.float32, torch.bfloat16)[number % 2]
        size = torch.Size([rows * ranks * scale, *rest])
        described[name] = TensorStorageMetadata(TensorProperties(dtype), size, chunks)
    described |= {f"object.{number}": BytesStorageMetadata() for number in range(nones)}
    by_rank[0] += [MetadataIndex(f"object.{number}") for number in range(nones)]
    storage: dict[MetadataIndex, Any] = {}
    for rank, indices in enumerate(by_rank):
        path = f"__{rank}_0.distcp"
        for at, index in enumerate(indices):
            storage[index] = filesystem._StorageInfo(path, at * 70_000 ** (rank % 3), 70_000 ** (rank % 3))
    meta = Metadata(described, {name: tuple(name.split(".")) for name in described}, storage)
    meta.storage_meta = StorageMeta("/data/ckpt/step_00000120-3fa9c1d2")
    return meta


def plainly(meta: StoredMetadata) -> Any:
    tensors = {name: (one.shape, one.dtype, list(one.chunks)) for name, one in meta.tensors.items()}
    return list(tensors.items()), meta.objects, dict(meta.storage), meta.origin, meta.paths


def read_both_ways(data: bytes) -> tuple[Any, Any]:
    """What the interpreter alone says, and what is said with the regular stretches recognised."""
    answers = []
    for least in (1 << 60, 0):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(metadatas, "REGULAR_FROM", least)
            try:
                meta = parse(data)
                sizes = {"__0_0.distcp": 100, "__1_0.distcp": 0, "__9_0.distcp": 1}
                told = sorted(map(str, completeness(meta, sizes)))
                answers.append((plainly(meta), told))
            except MetadataError as error:
                answers.append(str(error))
    return answers[0], answers[1]


def whole_tensors(count: int, shape: list[int]) -> Metadata:
    index = {n: MetadataIndex(f"t{n}", torch.Size([0] * len(shape)), 0) for n in range(count)}
    return Metadata(
        {f"t{n}": tensor(shape, [([0] * len(shape), shape)]) for n in range(count)},
        {f"t{n}": (f"t{n}",) for n in range(count)},
        {index[n]: filesystem._StorageInfo(FILE, n, 1) for n in range(count)},
    )


REGULAR = {
    "row-wise shards": many(5, 40),
    "of one dimension": many(4, 30, (7,)),
    "of three and four": Metadata(
        many(3, 20, (2, 3, 4)).state_dict_metadata, None, many(3, 20, (2, 3, 4)).storage_data
    ),
    "of six, with objects": many(2, 30, (1, 2, 3, 4, 5, 6), nones=20),
    "whole tensors": many(1, 1),
    "thousands": many(2, 1500),
    "many whole tensors": whole_tensors(600, [3, 2]),
    "whole tensors in many frames": whole_tensors(8000, [3, 2]),
    "scalars": whole_tensors(80, []),
}


class Torch215(pickle.Pickler):
    """Stores a tensor's properties as torch 2.15 does: with the strides, if there are any."""

    def reducer_override(self, value: Any) -> Any:
        if type(value) is TensorProperties and hasattr(value, "of"):
            return copyreg.__newobj__, (TensorProperties,), (*value.__getstate__(), value.of)
        return NotImplemented


def pickled(meta: Metadata, protocol: int) -> bytes:
    stream = io.BytesIO()
    Torch215(stream, protocol).dump(meta)
    return stream.getvalue()


def with_strides(meta: Metadata) -> Metadata:
    for number, entry in enumerate(meta.state_dict_metadata.values()):
        of = (None, [], [7], [300, 1], [70_000, 300, 1], [9, 8, 7, 6])[number % 6]
        entry.properties.of = None if of is None else tuple(of)  # one of its own
    return meta


REGULAR["of torch 2.15"] = with_strides(many(9, 20, (7, 1)))
PICKLED = {(name, protocol): pickled(meta, protocol) for name, meta in REGULAR.items() for protocol in (4, 5)}


@pytest.mark.parametrize(("name", "protocol"), list(PICKLED))
def test_the_regular_stretches_are_read_as_the_interpreter_reads_them(name: str, protocol: int) -> None:
    alone, with_them = read_both_ways(PICKLED[name, protocol])
    assert alone == with_them
    assert not isinstance(alone, str), alone
    data = PICKLED[name, protocol]
    if len(data) > metadatas.REGULAR_FROM and "six" not in name:
        assert isinstance(parse(data).storage, StoredChunks)  # it was not the interpreter that read it
    if name == "thousands":
        assert all(isinstance(one.chunks, Chunks) for one in parse(data).tensors.values())


MUTATED = [
    pickle.dumps(many(3, 5), 4), pickled(with_strides(many(6, 3, (7, 1))), 4),
    pickle.dumps(many(2, 4, (2, 3, 4)), 5), pickle.dumps(whole_tensors(12, []), 4),
    pickle.dumps(whole_tensors(9, [3, 2]), 4),
]  # fmt: skip


@settings(max_examples=100, deadline=None)
@given(st.data())
def test_mutated_files_are_read_alike_both_ways(data: st.DataObject) -> None:
    """Bytes changed, cut out, repeated, exchanged: the same value or the same refusal."""
    whole = bytearray(data.draw(st.sampled_from(MUTATED)))
    for _ in range(data.draw(st.integers(1, 3))):
        at = data.draw(st.integers(2, len(whole) - 1))
        kind = data.draw(st.sampled_from(["byte", "cut", "twice", "opcode", "reference"]))
        length = data.draw(st.integers(1, 120))
        if kind == "byte":
            whole[at] = data.draw(st.integers(0, 255))
        elif kind == "cut":
            del whole[at : at + length]
        elif kind == "twice":
            whole[at:at] = whole[at : at + length]
        elif kind == "opcode":
            whole[at:at] = data.draw(
                st.sampled_from(
                    [
                        b"a",
                        b"e",
                        b"u",
                        b"s",
                        b"\x94",
                        b"\x85",
                        b"\x86",
                        b"(",
                        b"b",
                        b"t",
                        b"\x95" + bytes(8),
                        b"N",
                        b")",
                        b"}",
                        b"]",
                    ]
                )
            )
        elif (place := whole.find(b"h", at)) >= 0 and place + 1 < len(whole):
            whole[place + 1] = data.draw(st.integers(0, 80))
    alone, with_them = read_both_ways(bytes(whole))
    assert alone == with_them


def references_elsewhere(data: bytes, name: str) -> bytes:
    """All that mean this text, but for the first, which spells it out, mean another."""
    texts, known, last = {}, 0, None
    changed = bytearray(data)
    for opcode, argument, place in pickletools.genops(data):
        if opcode.name == "MEMOIZE":
            texts.setdefault(str(last), known)
            known += 1
        elif opcode.name in ("BINGET", "LONG_BINGET") and argument == texts.get(name):
            other = texts["state_dict_metadata"]
            width = 1 if opcode.name == "BINGET" else 4
            changed[(place or 0) + 1 : (place or 0) + 1 + width] = other.to_bytes(width, "little")
        last = argument
    return bytes(changed)


def reference_to_what_comes_later(data: bytes) -> bytes:
    """The name of a chunk's storage is a text that is read only after it."""
    texts: dict[str, int] = {}
    known, found, last = 0, 0, None
    for opcode, argument, place in pickletools.genops(data):
        if opcode.name == "MEMOIZE":
            texts.setdefault(str(last), known)
            known += 1
        elif opcode.name == "LONG_BINGET" and last == texts.get("fqn"):
            found = place or 0
        last = argument
    assert found
    return data[: found + 1] + texts["save_id"].to_bytes(4, "little") + data[found + 5 :]


def altered(kind: str) -> bytes:
    meta = many(3, 12)
    second: Any = meta.state_dict_metadata["model.layer.1.weight"]
    some = list(meta.storage_data)[20:23]
    if kind == "another number of dimensions":
        second.size = torch.Size([48_000])
    elif kind == "stored twice":
        object.__setattr__(some[0], "fqn", some[1].fqn)
        object.__setattr__(some[0], "offset", torch.Size(list(some[1].offset)))
    elif kind == "stored nowhere":
        del meta.storage_data[some[1]]
    elif kind == "outside":
        second.chunks[5].sizes = torch.Size([4000, 4])
    elif kind == "outside, of the same volume":
        second.chunks[5].offsets, second.chunks[5].sizes = torch.Size([0, 3]), torch.Size([4000, 3])
    elif kind == "an empty chunk outside":
        second.chunks.insert(5, ChunkStorageMetadata(torch.Size([90_000, 0]), torch.Size([0, 3])))
    elif kind == "a chunk missing":
        del second.chunks[5]
    elif kind == "overlap":
        second.chunks[5].offsets = torch.Size([16_000, 0])
        meta.storage_data[MetadataIndex("model.layer.1.weight", torch.Size([16_000, 0]))] = (
            meta.storage_data.pop(MetadataIndex("model.layer.1.weight", torch.Size([20_000, 0])))
        )
    elif kind == "more elements than can be counted":
        second.size = torch.Size([2**62, 3])
        second.chunks = [ChunkStorageMetadata(torch.Size([0, 0]), torch.Size([2**62, 3])) for _ in range(4)]
    elif kind == "two chunks in a dictionary":
        meta.planner_data = {"x": [ChunkStorageMetadata(torch.Size([n]), torch.Size([1])) for n in range(2)]}
    elif kind == "very many in one list":
        meta = many(1, 12_000, (1,))
    elif kind == "a later text":
        meta = many(5, 12)  # so that there are long references to names
    data = pickle.dumps(meta, 4)
    if kind == "two chunks in a dictionary":
        begin = data.index(b"\x8c\x01x\x94]\x94(")
        end = data.index(b"es", begin)
        data = (
            data[:begin]
            + b"(\x8c\x01x\x94\x94\x95"
            + bytes(8)
            + data[begin + 7 : end]
            + b"u"
            + data[end + 2 :]
        )
    elif kind == "very many in one list":
        data = data.replace(b"ube(h", b"ubh")
    elif kind == "a later text":
        data = reference_to_what_comes_later(data)
    elif kind.startswith("elsewhere: "):
        data = references_elsewhere(data, kind.removeprefix("elsewhere: "))
    elif kind == "out of the directory":
        data = data.replace(b"__5_0.distcp", b"../_0.distcp")
    elif kind.startswith("renamed: "):
        name = kind.removeprefix("renamed: ").encode()
        data = data.replace(
            bytes([len(name)]) + name + b"\x94", bytes([len(name)]) + b"x" + name[1:] + b"\x94"
        )
    elif kind == "another class":
        data = data.replace(b"ChunkStorageMetadata", b"BytesStorageMetadata")
    return data


FIELDS_OF_MANY = (
    "offsets", "sizes", "fqn", "offset", "relative_path", "length", "properties", "size", "chunks",
)  # fmt: skip
KINDS = [
    "another number of dimensions", "stored twice", "stored nowhere", "outside",
    "outside, of the same volume", "an empty chunk outside", "a chunk missing", "overlap",
    "more elements than can be counted", "two chunks in a dictionary", "very many in one list",
    "a later text", "out of the directory", "another class",
    *(f"{how}: {name}" for how in ("renamed", "elsewhere") for name in FIELDS_OF_MANY),
]  # fmt: skip


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_wrong_with_a_regular_file_is_told_as_the_interpreter_tells_it(kind: str) -> None:
    alone, with_them = read_both_ways(altered(kind))
    assert alone == with_them
    assert alone != read_both_ways(altered("not at all"))[0]
