"""What write_shards stores, VerifyingReader gives back bit for bit or refuses before a tensor is touched."""

from __future__ import annotations

import errno
import os
import pickle
import random
import shutil
import threading
from collections import Counter
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed import HashStore
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from holdfast.checkpoint.choose import extents, load
from holdfast.checkpoint.choose import verifying_reader as reading
from holdfast.checkpoint.choose.extents import Buffers
from holdfast.checkpoint.choose.load import _load_tensors
from holdfast.checkpoint.choose.verifying_reader import IN_PLACE, VerifyingReader
from holdfast.checkpoint.commit import write_metadata
from holdfast.checkpoint.format import manifest as manifests
from holdfast.checkpoint.format import metadata as metadatas
from holdfast.checkpoint.format.fingerprint import of_tensor
from holdfast.checkpoint.format.layout import READ_SLICE, ShardFile
from holdfast.checkpoint.format.manifest import METADATA, CheckpointName, FileEntry, Manifest
from holdfast.checkpoint.format.shards import Frames, plain, write_shards
from holdfast.checkpoint.save.plan import SnapshotPlanner, make_plan, signature_of
from holdfast.errors import CheckpointError, SaveFailedError
from holdfast.record.group import Group
from kit.checkpoints import list_file, seal
from kit.ranks.writers import ranks
from kit.tensors import DTYPES, bits, same_bits

SHARD = "__0_0.distcp"
pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


def write(directory: Path, state: dict[str, Any]) -> list[FileEntry]:
    """Save `state` as a rank that is alone would; what the writer says it stored."""
    directory.mkdir(exist_ok=True)
    planner = SnapshotPlanner(state, 0, is_coordinator=True)
    alone = Group(0, 1, HashStore(), None)
    plan = make_plan(alone, 1, planner, signature_of(planner, 1), {}, Frames())
    tensors = [planner.tensor_of(item) for item in plan.items]
    entries = write_shards(directory, plan, tensors, [of_tensor(plain(tensor)) for tensor in tensors])
    assert plan.declared is not None
    return [*entries, write_metadata(directory, plan.declared.metadata_for(CheckpointName(1, "0" * 16)))]


def read(directory: Path, manifest: Manifest, target: dict[str, Any]) -> None:
    try:
        dcp.load(target, storage_reader=VerifyingReader(directory, manifest), no_dist=True)
    except CheckpointException as error:
        raise next(iter(error.failures.values()))[0] from error


def read_straight(directory: Path, manifest: Manifest, target: dict[str, Any]) -> None:
    """As a resume does, which leaves to DCP's planner only what is stored in parts."""
    _load_tensors(target, VerifyingReader(directory, manifest))


WAYS = pytest.mark.parametrize("way", [read, read_straight])


def blank(state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: torch.zeros(tensor.shape, dtype=tensor.dtype) for name, tensor in state.items()}


def of_every_dtype() -> dict[str, torch.Tensor]:
    sizes = {"small": 12, "large": 3 * IN_PLACE}
    return {f"{dtype}.{name}": bits(count, dtype) for dtype in DTYPES for name, count in sizes.items()}


def of_every_form() -> dict[str, torch.Tensor]:
    base = torch.randn(400, 300)
    complex_base = torch.randn(200, 200, dtype=torch.complex64)
    return {
        "contiguous": base,
        "transposed": base.t(),
        "rows of a larger one": base[10:300],
        "columns of a larger one": base[:, 7:290],
        "every third": base[::3, ::2],
        "backwards offset": base.flatten()[1234:],
        "expanded": torch.randn(1, 500).expand(300, 500),
        "channels last": torch.randn(2, 8, 40, 50).to(memory_format=torch.channels_last),
        "zero-dimensional": torch.tensor(3.5),
        "zero-dimensional of a larger one": base[3, 4],
        "empty": torch.empty(0),
        "empty with shape": torch.empty(4, 0, 3),
        "one": torch.ones(1),
        "parameter": torch.nn.Parameter(torch.randn(200, 200)),
        "conjugated": complex_base.conj(),
        "conjugated transposed": complex_base.mH,
        "negated": complex_base.conj().imag,
    }


@pytest.mark.parametrize("make", [of_every_dtype, of_every_form])
def test_every_kind_of_tensor_comes_back_bit_for_bit(tmp_path: Path, make: Any) -> None:
    state = make()
    entries = write(tmp_path / "saved", state)
    manifest = seal(tmp_path / "saved")
    listed = [
        msgspec.structs.replace(e, chunks=[msgspec.structs.replace(c, fingerprint="") for c in e.chunks])
        for e in entries
    ]
    assert sorted(manifest.files, key=lambda e: e.path) == sorted(listed, key=lambda e: e.path)
    manifest = msgspec.structs.replace(manifest, files=entries)
    for way in ("planned", "straight", "stock"):
        target = blank(state)
        if way == "stock":
            dcp.load(target, checkpoint_id=tmp_path / "saved", no_dist=True)
        else:
            (read if way == "planned" else read_straight)(tmp_path / "saved", manifest, target)
        wrong = [name for name in state if not same_bits(target[name], state[name])]
        assert wrong == [], f"{way} load"


def test_a_view_is_stored_without_the_rest_of_its_storage(tmp_path: Path) -> None:
    state = {"view": torch.randn(1_000_000)[:100]}
    write(tmp_path / "saved", state)
    assert (tmp_path / "saved" / SHARD).stat().st_size < 10_000


def test_objects_that_stock_dcp_stored_come_back_beside_tensors(tmp_path: Path) -> None:
    state: dict[str, Any] = {"w": torch.arange(5), "o": {"lr": [0.1, 0.2], "name": "x" * 300_000}}
    dcp.save(state, checkpoint_id=tmp_path / "saved", no_dist=True)
    manifest = seal(tmp_path / "saved")
    target: dict[str, Any] = {"w": torch.zeros(5, dtype=torch.int64), "o": {"lr": [0, 0], "name": ""}}
    read(tmp_path / "saved", manifest, target)
    assert target["o"] == state["o"]
    assert torch.equal(target["w"], state["w"])


@WAYS
@pytest.mark.parametrize("around", [IN_PLACE, READ_SLICE, 2 * READ_SLICE])
def test_sizes_around_each_threshold_come_back(tmp_path: Path, around: int, way: Any) -> None:
    # An archive adds about a kibibyte around its one record.
    lengths = [around + offset for offset in (-2048, -1500, -1200, -1024, -600, -1, 0, 1, 7)]
    state = {f"n{length}": bits(length, torch.uint8, length) for length in lengths}
    write(tmp_path / "saved", state)
    target = blank(state)
    way(tmp_path / "saved", seal(tmp_path / "saved"), target)
    assert [name for name in state if not torch.equal(state[name], target[name])] == []


@WAYS
@pytest.mark.parametrize("in_place", [0, 1 << 60])
def test_both_ways_to_a_tensor_give_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, in_place: int, way: Any
) -> None:
    state = {**of_every_form(), **of_every_dtype()}
    write(tmp_path / "saved", state)
    monkeypatch.setattr(reading, "IN_PLACE", in_place)
    target = blank(state)
    way(tmp_path / "saved", seal(tmp_path / "saved"), target)
    assert [name for name in state if not same_bits(target[name], state[name])] == []


def test_memory_for_reading_is_bounded_but_for_a_larger_item_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes = [90_000, 200_000, 1_000, 300_000] * 6
    state = {f"{n:02d}": bits(size, torch.uint8, n) for n, size in enumerate(sizes)}
    write(tmp_path / "saved", state)
    held: Counter[int] = Counter()
    seen: list[list[int]] = []
    take, give_back = Buffers.take, Buffers.give_back

    def taken(self: Buffers, length: int, stopped: threading.Event) -> Any:
        buffer = take(self, length, stopped)
        assert buffer is not None
        held[buffer.size] += 1
        seen.append(sorted(held.elements()))
        return buffer

    def given_back(self: Buffers, buffer: Any, until: Any) -> None:
        held[buffer.size] -= 1
        give_back(self, buffer, until)

    monkeypatch.setattr(Buffers, "take", taken)
    monkeypatch.setattr(Buffers, "give_back", given_back)
    monkeypatch.setattr(extents, "ALONE", 0)
    monkeypatch.setattr(extents, "STRETCH", 1)
    monkeypatch.setattr(reading, "LEAST", 250_000)
    monkeypatch.setattr(reading, "MOST", 250_000)
    reader = VerifyingReader(tmp_path / "saved", seal(tmp_path / "saved"), threads=4)
    target = blank(state)
    dcp.load(target, storage_reader=reader, no_dist=True)
    assert [name for name in state if not torch.equal(state[name], target[name])] == []
    assert any(len(sizes) > 1 for sizes in seen), "several at once, where there is room"
    assert all(sum(sizes) <= 250_000 or len(sizes) == 1 for sizes in seen)
    assert not +held


# --- many small ones ----------------------------------------------------------------------------------------


def many(count: int = 400) -> dict[str, torch.Tensor]:
    """Small ones of two shapes, in turns, and a large one amid them."""
    found = {f"p{n:04d}": bits(256 + 16 * (n // 10 % 2), torch.float32, n) for n in range(count)}
    return {**found, "p0100": bits(IN_PLACE, torch.uint8, 1)}


def test_small_ones_that_lie_side_by_side_are_read_together() -> None:
    """Not across a gap, and no more at a time than stays in the processor's cache."""
    quarter = reading.TOGETHER // 5
    places: list[tuple[int, int]] = []
    at = 0
    for length in [quarter] * 6 + [IN_PLACE, 7, 7]:
        places.append((at, length))
        at += length
    places += [(at + 64, 5), (at + 69, 5)]
    found = list(reading.runs(places))
    assert found == [places[:5], places[5:6], places[6:7], places[7:9], places[9:]]


def test_many_small_ones_are_read_at_once_and_few_of_them_opened(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Opening each archive, and DCP's plan for each, took longer than all of dcp.load."""
    state = many()
    entries = write(tmp_path / "saved", state)
    manifest = msgspec.structs.replace(seal(tmp_path / "saved"), files=entries)
    reads: list[int] = []
    opened: list[int] = []
    really, opens = ShardFile.read_into, reading._loaded

    def read_into(self: ShardFile, view: memoryview, offset: int, *, until: int = 0) -> None:
        reads.append(view.nbytes)
        really(self, view, offset, until=until)

    def loaded(data: memoryview) -> torch.Tensor:
        opened.append(data.nbytes)
        return opens(data)

    monkeypatch.setattr(ShardFile, "read_into", read_into)
    monkeypatch.setattr(reading, "_loaded", loaded)
    monkeypatch.setattr(load, "dcp_load", None)
    target = blank(state)
    read_straight(tmp_path / "saved", manifest, target)
    assert [name for name in state if not same_bits(target[name], state[name])] == []
    assert len(opened) == 2
    assert len(reads) < 10


def test_an_archive_like_others_but_for_its_strides_is_opened_by_itself(tmp_path: Path) -> None:
    """As many bytes as its neighbours have, and of the same shape, but in another order."""
    square = torch.arange(16.0).reshape(4, 4)
    state = {"a": square + 1, "b": square.clone(), "c": square * 2}
    write(tmp_path / "saved", state)
    storage = pickle.loads((tmp_path / "saved" / METADATA).read_bytes()).storage_data
    [at] = [info.offset for index, info in storage.items() if index.fqn == "b"]
    shard = tmp_path / "saved" / SHARD
    before, after = shard.read_bytes()[:at], shard.read_bytes()[at:]
    strides = [b"K\x04K\x01\x86", b"K\x01K\x04\x86"]  # as pickled
    assert strides[0] in after
    raw = [plain(tensor).numpy().tobytes() for tensor in (square, square.t())]
    shard.write_bytes(before + after.replace(*strides, 1).replace(*raw, 1))
    target = blank(state)
    read_straight(tmp_path / "saved", seal(tmp_path / "saved"), target)
    assert [name for name in state if not torch.equal(target[name], state[name])] == []


def test_one_of_many_that_is_not_in_memory_what_was_saved_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    state = many()
    entries = write(tmp_path / "saved", state)
    manifest = msgspec.structs.replace(seal(tmp_path / "saved"), files=entries)
    really = torch._foreach_copy_
    target = blank(state)

    def goes_wrong(targets: list[torch.Tensor], sources: list[torch.Tensor]) -> None:
        really(targets, sources)
        target["p0042"].view(torch.uint8)[17] ^= 1

    monkeypatch.setattr(torch, "_foreach_copy_", goes_wrong)
    with pytest.raises(CheckpointError, match="wrong-in-memory p0042: its fingerprint"):
        read_straight(tmp_path / "saved", manifest, target)


# --- what is refused, and when ------------------------------------------------------------------------------


def small() -> dict[str, torch.Tensor]:
    side_by_side = {"c": torch.arange(300), "d": torch.randn(64), "e": torch.randn(64)}
    return {"a": torch.randn(64), "b": torch.randn(IN_PLACE), **side_by_side}


@pytest.fixture
def saved(tmp_path: Path) -> tuple[Path, Manifest, dict[str, torch.Tensor]]:
    state = small()
    write(tmp_path / "saved", state)
    return tmp_path / "saved", seal(tmp_path / "saved"), state


Saved = tuple[Path, Manifest, dict[str, torch.Tensor]]


def refusal(saved: Saved) -> str:
    with pytest.raises(CheckpointError) as caught:
        read(saved[0], saved[1], blank(saved[2]))
    return str(caught.value)


@WAYS
def test_a_flipped_byte_anywhere_in_a_shard_is_refused_before_its_tensor_is_touched(
    saved: Saved, way: Any
) -> None:
    """Case: dcp.load loads bit-flipped payloads silently. Headers, payload and archive tails alike."""
    directory, manifest, state = saved
    shard = directory / SHARD
    sound = shard.read_bytes()
    [entry] = [entry for entry in manifest.files if entry.path == SHARD]
    reader = VerifyingReader(directory, manifest)
    places = {info.offset: index.fqn for index, info in reader.read_metadata().storage_data.items()}
    positions = {0, len(sound) - 1} | {random.Random(5).randrange(len(sound)) for _ in range(25)}
    for chunk in entry.chunks:
        positions |= {chunk.offset, chunk.offset + 40, chunk.offset + chunk.length - 1}
    for position in positions:
        altered = bytearray(sound)
        altered[position] ^= 1 << (position % 8)
        shard.write_bytes(altered)
        target = {name: torch.full_like(tensor, 7) for name, tensor in state.items()}
        with pytest.raises(CheckpointError, match=f"altered {SHARD}"):
            way(directory, manifest, target)
        [hit] = [c for c in entry.chunks if c.offset <= position < c.offset + c.length]
        assert bool((target[places[hit.offset]] == 7).all()), f"byte {position} reached its tensor"


def test_a_chunk_that_the_load_did_not_need_is_verified_by_verify_rest(saved: Saved) -> None:
    directory, manifest, state = saved
    reader = VerifyingReader(directory, manifest)
    index = next(i for i in reader.read_metadata().storage_data if i.fqn == "c")
    at = reader.read_metadata().storage_data[index].offset
    shard = directory / SHARD
    altered = bytearray(shard.read_bytes())
    altered[at + 50] ^= 4
    shard.write_bytes(altered)
    dcp.load({"a": torch.zeros_like(state["a"])}, storage_reader=reader, no_dist=True)
    with pytest.raises(CheckpointError, match=f"altered {SHARD}"):
        reader.verify_rest(reader.shard_paths())


def test_verify_rest_reads_nothing_twice(saved: Saved, monkeypatch: pytest.MonkeyPatch) -> None:
    directory, manifest, state = saved
    reader = VerifyingReader(directory, manifest)
    dcp.load(blank(state), storage_reader=reader, no_dist=True)
    shutil.rmtree(directory)
    reader.verify_rest(reader.shard_paths())


def test_altered_metadata_is_refused_before_it_is_unpickled(saved: Saved, tmp_path: Path) -> None:
    class Boom:
        def __reduce__(self) -> Any:
            return os.mkdir, (str(tmp_path / "executed"),)

    directory, manifest, _ = saved
    size = (directory / METADATA).stat().st_size
    (directory / METADATA).write_bytes(pickle.dumps(Boom()).ljust(size, b"\0"))
    with pytest.raises(CheckpointError, match=f"altered {METADATA}"):
        VerifyingReader(directory, manifest).read_metadata()
    assert not (tmp_path / "executed").exists()


def test_a_truncated_or_grown_or_missing_shard_is_named_so(saved: Saved) -> None:
    shard = saved[0] / SHARD
    sound = shard.read_bytes()
    shard.write_bytes(sound[:-1])
    assert f"truncated {SHARD}" in refusal(saved)
    shard.write_bytes(sound + b"\0")
    assert f"altered {SHARD}" in refusal(saved)
    shard.unlink()
    assert f"missing {SHARD}" in refusal(saved)


def test_a_symlink_in_place_of_a_shard_is_refused(saved: Saved, tmp_path: Path) -> None:
    shard = saved[0] / SHARD
    shard.rename(tmp_path / "elsewhere")
    shard.symlink_to(tmp_path / "elsewhere")
    assert f"unreadable {SHARD}" in refusal(saved)


def test_a_fifo_in_place_of_a_shard_is_refused_without_waiting(saved: Saved) -> None:
    shard = saved[0] / SHARD
    shard.unlink()
    os.mkfifo(shard)
    told: list[str] = []
    thread = threading.Thread(target=lambda: told.append(refusal(saved)), daemon=True)
    thread.start()
    thread.join(timeout=20)
    assert told
    assert SHARD in told[0]


def test_a_directory_in_place_of_a_shard_is_refused(saved: Saved) -> None:
    (saved[0] / SHARD).unlink()
    (saved[0] / SHARD).mkdir()
    assert SHARD in refusal(saved)


def test_short_reads_are_continued(saved: Saved, monkeypatch: pytest.MonkeyPatch) -> None:
    """A network file system may return less than was asked for."""
    directory, manifest, state = saved
    whole = os.preadv
    monkeypatch.setattr(
        os, "preadv", lambda fd, views, at: whole(fd, [views[0][: max(1, len(views[0]) // 3)]], at)
    )
    target = blank(state)
    read(directory, manifest, target)
    assert all(torch.equal(target[name], state[name]) for name in state)


def test_a_shard_that_shrinks_while_it_is_read_is_called_truncated(
    saved: Saved, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "preadv", lambda fd, views, at: 0)
    assert f"truncated {SHARD}" in refusal(saved)


def test_an_error_of_the_disk_names_the_file_and_the_place(
    saved: Saved, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(fd: int, views: list[memoryview], at: int) -> int:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(os, "preadv", broken)
    assert f"unreadable {SHARD} at 0: Input/output error" in refusal(saved)


def test_metadata_that_points_outside_the_manifest_is_refused(saved: Saved, tmp_path: Path) -> None:
    """Metadata and manifest of two different saves must not be mixed."""
    directory, manifest, state = saved
    write(tmp_path / "other", {**state, "a": torch.randn(9_000)})
    shutil.copy(tmp_path / "other" / METADATA, directory / METADATA)
    files = [entry for entry in manifest.files if entry.path != METADATA]
    mixed = Manifest(
        **{
            **{field: getattr(manifest, field) for field in manifest.__struct_fields__},
            "files": [*files, list_file(directory, METADATA)],
        }
    )
    with pytest.raises(CheckpointError, match="stale-metadata"):
        read(directory, mixed, {"c": torch.zeros_like(state["c"])})


# --- the writer's manners -----------------------------------------------------------------------------------


@pytest.mark.parametrize("before", [True, False])
def test_the_crc_option_is_as_it_was_after_a_save(tmp_path: Path, before: bool) -> None:
    original = torch.serialization.get_crc32_options()
    torch.serialization.set_crc32_options(before)
    try:
        write(tmp_path / "saved", small())
        assert torch.serialization.get_crc32_options() is before
        assert torch.serialization.get_crc32_options() is before
    finally:
        torch.serialization.set_crc32_options(original)


def test_what_is_not_a_tensor_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(SaveFailedError, match="o is not a tensor"):
        write(tmp_path / "saved", {"a": torch.ones(3), "o": "an object"})
    assert not (tmp_path / "saved" / SHARD).exists()


def test_a_shard_that_is_there_already_is_not_overwritten(tmp_path: Path) -> None:
    (tmp_path / SHARD).write_text("someone else's")
    with pytest.raises(FileExistsError):
        write(tmp_path, small())
    assert (tmp_path / SHARD).read_text() == "someone else's"


# --- fingerprints of what was loaded ------------------------------------------------------------------------


def test_a_tensor_that_is_not_in_memory_what_was_saved_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The stored bytes are right, and yet the live tensor is not: a bad copy, or faulty memory."""
    state = {"large": bits(300_000, torch.uint8, 1), "small": bits(50, torch.uint8, 2)}
    entries = write(tmp_path / "saved", state)
    manifest = msgspec.structs.replace(seal(tmp_path / "saved"), files=entries)
    real = reading.fingerprints.Hasher.update

    for name, length in (("large", 300_000), ("small", 50)):

        def one_bit_flips(self: Any, view: memoryview, length: int = length) -> None:
            seen = bytearray(view)
            if len(seen) == length % READ_SLICE or len(seen) == length:
                seen[7] ^= 1
            real(self, seen)

        target = blank(state)
        with monkeypatch.context() as patch:
            patch.setattr(reading.fingerprints.Hasher, "update", one_bit_flips)
            with pytest.raises(CheckpointError, match=f"wrong-in-memory {name}: its fingerprint"):
                read(tmp_path / "saved", manifest, target)
    target = blank(state)
    read(tmp_path / "saved", manifest, target)
    assert [name for name in state if not same_bits(target[name], state[name])] == []


def test_a_part_of_a_tensor_is_looked_at_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As when resharding: no fingerprint of the part was stored, so the source's own is what counts."""
    whole = torch.arange(4000, dtype=torch.float32)
    entries = write(tmp_path / "saved", {"w": whole})
    manifest = msgspec.structs.replace(seal(tmp_path / "saved"), files=entries)
    reader = VerifyingReader(tmp_path / "saved", manifest)
    target = torch.zeros(1000)
    wanted = dcp.metadata.MetadataIndex("w", torch.Size([0]))
    part = dcp.planner.ReadItem(
        type=dcp.planner.LoadItemType.TENSOR,
        dest_index=wanted,
        dest_offsets=torch.Size([0]),
        storage_index=wanted,
        storage_offsets=torch.Size([500]),
        lengths=torch.Size([1000]),
    )
    reader.set_up_storage_reader(reader.read_metadata(), is_coordinator=True)

    class Planner:
        def resolve_tensor(self, item: Any) -> torch.Tensor:
            return target

        def commit_tensor(self, item: Any, tensor: torch.Tensor) -> None:
            pass

    plan = dcp.planner.LoadPlan([part])
    reader.read_data(plan, Planner())  # type: ignore[arg-type]
    assert torch.equal(target, whole[500:1500])
    target = torch.zeros(2000)[::2]
    reader.read_data(plan, Planner())  # type: ignore[arg-type]
    assert torch.equal(target, whole[500:1500]), "not in a row in memory"
    monkeypatch.setattr(torch.Tensor, "copy_", lambda self, source: self.fill_(1.0))
    with pytest.raises(CheckpointError, match="wrong-in-memory w"):
        reader.read_data(plan, Planner())  # type: ignore[arg-type]


def test_ranks_of_another_number_load_from_arrays_and_plan_their_own_parts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """DCP would compare each part that is wanted with each chunk that is stored, on every rank."""
    monkeypatch.setattr(metadatas, "REGULAR_FROM", 0)
    whole = {f"w{n}": torch.randn(24 + n, 3) for n in range(4)}
    directory = tmp_path / "stock"

    def sharded(tensors: dict[str, torch.Tensor], world: int) -> dict[str, Any]:
        mesh = init_device_mesh("cpu", (world,))
        return {name: distribute_tensor(tensor, mesh, [Shard(0)]) for name, tensor in tensors.items()}

    ranks(tmp_path / "save", 4, lambda rank: dcp.save(sharded(whole, 4), checkpoint_id=directory))
    manifest = seal(directory)

    def load(rank: int) -> None:
        reader = VerifyingReader(directory, manifest)
        target = sharded(blank(whole), 3)
        with reader.planning(target):
            planned = reader.read_metadata().state_dict_metadata
            assert planned.keys() == whole.keys()
            assert all(0 < len(entry.chunks) < 4 for entry in planned.values())
        assert all(len(entry.chunks) == 4 for entry in reader.read_metadata().state_dict_metadata.values())
        _load_tensors(target, reader)
        for name, expected in sharded(whole, 3).items():
            assert same_bits(target[name].to_local(), expected.to_local()), name

    ranks(tmp_path / "load", 3, load)


def test_only_the_chunks_of_files_that_are_read_are_decoded(saved: Saved) -> None:
    directory, _, state = saved
    manifest, _, tables = manifests.read_lazily(directory)
    assert all(not entry.chunks for entry in manifest.files)
    reader = VerifyingReader(directory, manifest, tables=tables)
    assert not reader._chunks
    target = blank(state)
    _load_tensors(target, reader)
    assert list(reader._chunks) == [SHARD]
    assert all(same_bits(target[name], state[name]) for name in state)
