"""Every way a checkpoint can be wrong has its own reason, and no wrong one passes."""

from __future__ import annotations

import functools
import os
import pickle
import shutil
import stat
import tempfile
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from holdfast.checkpoint.format import manifest as manifests
from holdfast.checkpoint.format import structure as verifying
from holdfast.checkpoint.format.manifest import MANIFEST, METADATA, Manifest
from holdfast.checkpoint.format.structure import Inspection, check_structure, verify
from holdfast.errors import UsageError
from kit.checkpoints import ID, RUN, STEP, list_file, make_checkpoint, save_stock, seal, small_state
from kit.damage import flip

SHARD = "__0_0.distcp"
NAME = f"step_{STEP:08d}-{ID}"


@functools.cache
def original() -> Path:
    """One sound checkpoint for all tests; each works on a copy."""
    return make_checkpoint(Path(tempfile.mkdtemp(prefix="holdfast-test-")))


@pytest.fixture(scope="session", autouse=True)
def _remove_original() -> object:
    yield
    shutil.rmtree(original().parent)


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    return Path(shutil.copytree(original(), tmp_path / NAME))


def found(inspection: Inspection) -> list[tuple[str, str]]:
    return [(str(problem.reason), problem.path) for problem in inspection.problems]


def cut(path: Path, size: int) -> None:
    os.truncate(path, size)


def link_out(path: Path) -> None:
    """The file itself lies outside the directory; a link stands in its place."""
    outside = path.parent.with_name(f"outside-{path.parent.name}")
    shutil.move(path, outside)
    path.symlink_to(outside)


def rewrite(directory: Path, change: Callable[[Manifest], Manifest]) -> None:
    """Another manifest whose own digest is right."""
    manifest, _ = manifests.read(directory)
    (directory / MANIFEST).write_bytes(manifests.encode(change(manifest))[0])


def put_raw_body(directory: Path, body: bytes) -> None:
    data = b'{"digest":"%b","body":%b}\n' % (manifests.digest_bytes(body).encode(), body)
    (directory / MANIFEST).write_bytes(data)


def test_a_sound_checkpoint_is_sound_and_every_byte_was_read(checkpoint: Path) -> None:
    counted: list[int] = []
    inspection = verify(checkpoint, run=RUN, world=1, progress=counted.append)
    assert inspection.problems == []
    assert inspection.sound
    assert inspection.manifest is not None
    total = sum(entry.size for entry in inspection.manifest.files)
    assert inspection.bytes_checked == sum(counted) == inspection.size == total
    assert inspection.manifest_digest == manifests.read(checkpoint)[1]
    assert not inspection.digests_missing


def test_each_fault_has_its_own_reason(tmp_path: Path) -> None:
    """Scenario 9, and its neighbours. Cases diffusion-pipe#159, transformers#35782, pytorch#126952."""

    def stale(directory: Path) -> None:
        older = save_stock(tmp_path / "older", small_state(seed=1, width=5))
        shutil.copy(older / METADATA, directory / METADATA)

    faults: dict[str, tuple[Callable[[Path], object], str, str]] = {
        "missing shard": (lambda d: (d / SHARD).unlink(), "missing", SHARD),
        "truncated shard": (lambda d: cut(d / SHARD, 1000), "truncated", SHARD),
        "missing metadata": (lambda d: (d / METADATA).unlink(), "missing-metadata", METADATA),
        "stale metadata": (stale, "stale-metadata", METADATA),
        "flipped byte": (lambda d: flip(d / SHARD, 5000), "altered", SHARD),
        "zero-length shard": (lambda d: cut(d / SHARD, 0), "empty", SHARD),
        "link for a shard": (lambda d: link_out(d / SHARD), "not-a-file", SHARD),
        "extra file": (lambda d: (d / "extra").write_text("x"), "unlisted", "extra"),
        "garbled manifest": (lambda d: flip(d / MANIFEST, 99), "unreadable-manifest", MANIFEST),
        "no manifest": (lambda d: (d / MANIFEST).unlink(), "no-manifest", MANIFEST),
        "another name": (lambda d: d.rename(d.with_name("step_00000121-3fa9c1d2")), "wrong-name", "."),
    }  # fmt: skip
    seen: set[str] = set()
    for fault, (break_it, reason, path) in faults.items():
        root = tmp_path / fault.replace(" ", "-")
        root.mkdir()
        shutil.copytree(original(), root / NAME)
        break_it(root / NAME)
        (directory,) = root.glob("step_*")
        assert found(verify(directory)) == [(reason, path)], fault
        seen.add(reason)
    assert len(seen) == len(faults)


def test_stale_metadata_is_named_also_when_it_has_the_same_layout(checkpoint: Path, tmp_path: Path) -> None:
    """Scenario 9: consecutive saves often differ in nothing but where they say they were written."""
    older = make_checkpoint(tmp_path / "other", step=110, id="0badc0de", state=small_state(seed=0))
    shutil.copy(older / METADATA, checkpoint / METADATA)
    entry = list_file(checkpoint, METADATA)
    rewrite(checkpoint, lambda m: with_entry(m, METADATA, size=entry.size))
    assert found(check_structure(checkpoint)) == []
    inspection = verify(checkpoint)
    assert found(inspection) == [("stale-metadata", METADATA)]
    assert "0badc0de" in inspection.problems[0].detail


def with_entry(manifest: Manifest, path: str, /, **changes: object) -> Manifest:
    files = [
        msgspec.structs.replace(e, **changes) if e.path == path else e  # type: ignore[arg-type]
        for e in manifest.files
    ]
    return msgspec.structs.replace(manifest, files=files)


def test_damaged_metadata_is_altered_or_truncated(checkpoint: Path) -> None:
    whole = (checkpoint / METADATA).read_bytes()
    (checkpoint / METADATA).write_bytes(b"\0" * len(whole))
    assert found(verify(checkpoint)) == [("altered", METADATA)]
    (checkpoint / METADATA).write_bytes(whole[:-1])
    assert found(verify(checkpoint)) == [("truncated", METADATA)]
    (checkpoint / METADATA).write_bytes(whole + b"x")
    assert found(verify(checkpoint)) == [("altered", METADATA)]


def test_the_damaged_chunks_are_named(checkpoint: Path) -> None:
    manifest, _ = manifests.read(checkpoint)
    (entry,) = (e for e in manifest.files if e.path == SHARD)
    bad = entry.chunks[2]
    flip(checkpoint / SHARD, bad.offset)
    (problem,) = verify(checkpoint).problems
    assert f"bytes {bad.offset}–{bad.offset + bad.length}" in problem.detail
    assert entry.digest in problem.detail
    (checkpoint / SHARD).write_bytes(b"\0" * entry.size)
    (problem,) = verify(checkpoint).problems
    assert f"{len(entry.chunks) - 3} more" in problem.detail


def test_a_wrong_run_and_a_wrong_world_are_told_apart(checkpoint: Path) -> None:
    assert found(verify(checkpoint, run="run-b")) == [("wrong-run", MANIFEST)]
    assert found(check_structure(checkpoint, world=2)) == [("wrong-world", MANIFEST)]


@pytest.mark.parametrize("path", ["../../etc/passwd", "/etc/passwd", "a/../../x", "..", "", "a//b", "x\n"])
def test_a_manifest_whose_paths_climb_out_is_refused(checkpoint: Path, path: str) -> None:
    rewrite(checkpoint, lambda m: with_entry(m, SHARD, path=path))
    inspection = verify(checkpoint)
    assert found(inspection) == [("unreadable-manifest", MANIFEST)]
    assert "not allowed" in inspection.problems[0].detail


def test_manifests_of_garbage_wrong_types_and_100_megabytes_are_refused(checkpoint: Path) -> None:
    good = msgspec.json.decode(msgspec.json.encode(manifests.read(checkpoint)[0]))
    bodies = [
        b"[]",
        b'"text"',
        b"[" * 100_000,
        *(msgspec.json.encode(good | change) for change in (
            {"step": -1}, {"step": "120"}, {"files": {}}, {"files": [1]}, {"id": "../../etc"},
            {"world": None}, {"format": 99}, {"needs": ["time-travel"]}, {"files": []}, {"created": "now"},
        )),
        b'{"format":1,"padding":"' + b"x" * 100_000_000 + b'"}',
    ]  # fmt: skip
    for body in bodies:
        put_raw_body(checkpoint, body)
        assert found(verify(checkpoint)) == [("unreadable-manifest", MANIFEST)], body[:80]
    for data in (b"", b"{}", b"\0" * 100_000_000, b"null", b'{"digest":"x","body":{}}'):
        (checkpoint / MANIFEST).write_bytes(data)
        assert found(verify(checkpoint)) == [("unreadable-manifest", MANIFEST)], data[:80]
    with (checkpoint / MANIFEST).open("wb") as file:
        file.truncate(manifests.MAX_MANIFEST_BYTES + 1)
    assert found(verify(checkpoint)) == [("unreadable-manifest", MANIFEST)]


def test_a_linked_or_strange_manifest_is_refused(checkpoint: Path, tmp_path: Path) -> None:
    shutil.move(checkpoint / MANIFEST, tmp_path / "m")
    (checkpoint / MANIFEST).symlink_to(tmp_path / "m")
    assert found(verify(checkpoint)) == [("unreadable-manifest", MANIFEST)]
    (checkpoint / MANIFEST).unlink()
    (checkpoint / MANIFEST).mkdir()
    assert found(verify(checkpoint)) == [("unreadable-manifest", MANIFEST)]


@pytest.mark.parametrize("make", [os.mkfifo, os.mkdir], ids=["pipe", "directory"])
def test_a_pipe_or_directory_for_a_shard_is_refused_without_waiting(
    checkpoint: Path, make: Callable[[Path], None]
) -> None:
    (checkpoint / SHARD).unlink()
    make(checkpoint / SHARD)
    assert found(verify(checkpoint)) == [("not-a-file", SHARD)]


def test_a_link_on_the_way_to_a_listed_file_is_not_followed(checkpoint: Path, tmp_path: Path) -> None:
    (checkpoint / "deep").mkdir()
    (checkpoint / "deep" / "file").write_bytes(b"bytes")
    seal(checkpoint)
    assert verify(checkpoint).sound
    shutil.move(checkpoint / "deep", tmp_path / "outside")
    (checkpoint / "deep").symlink_to(tmp_path / "outside")
    assert found(verify(checkpoint)) == [("missing", "deep/file"), ("unlisted", "deep")]


def test_a_shard_swapped_for_a_link_after_the_look_is_not_followed(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def look_then_swap(directory: Path, **wanted: object) -> Inspection:
        inspection = check_structure(directory)
        link_out(checkpoint / SHARD)
        return inspection

    monkeypatch.setattr(verifying, "check_structure", look_then_swap)
    assert found(verify(checkpoint)) == [("not-a-file", SHARD)]


def test_unlisted_entries_of_every_kind_are_named_printably(checkpoint: Path) -> None:
    (checkpoint / "parts").mkdir()
    (checkpoint / "parts" / "0.json").write_text("{}")
    (checkpoint / "line\nbreak\x1b[31m").write_text("x")
    (checkpoint / os.fsdecode(b"\xff\xfe")).write_text("x")
    (checkpoint / "link").symlink_to("/etc/passwd")
    inspection = verify(checkpoint)
    assert {reason for reason, _ in found(inspection)} == {"unlisted"}
    assert len(inspection.problems) == 4
    assert all(str(problem).isprintable() for problem in inspection.problems)
    msgspec.json.encode(inspection.problems)


def test_only_the_asked_files_are_read_and_the_structure_always(checkpoint: Path) -> None:
    flip(checkpoint / SHARD, 100)
    (checkpoint / "extra").write_text("x")
    size = (checkpoint / METADATA).stat().st_size
    inspection = verify(checkpoint, files=[METADATA])
    assert found(inspection) == [("unlisted", "extra")]
    assert inspection.bytes_checked == size
    assert verify(checkpoint, files=[]).bytes_checked == 0
    with pytest.raises(UsageError, match="does not list"):
        verify(checkpoint, files=["nothing"])


def test_metadata_that_disagrees_with_its_own_manifest_is_incomplete(checkpoint: Path) -> None:
    """Bytes as committed, yet the manifest's chunk table lacks an item that the metadata places."""
    manifest, _ = manifests.read(checkpoint)
    (entry,) = (e for e in manifest.files if e.path == SHARD)
    rewrite(checkpoint, lambda m: with_entry(m, SHARD, chunks=entry.chunks[1:]))
    assert found(verify(checkpoint)) == [("incomplete", SHARD)]


def test_a_manifest_over_dangerous_metadata_is_refused(checkpoint: Path) -> None:
    """Its digest is right, and it is still never given to an unpickler that could run it."""
    (checkpoint / METADATA).write_bytes(pickle.dumps(os.getcwd))
    entry = list_file(checkpoint, METADATA)
    rewrite(checkpoint, lambda m: with_entry(m, METADATA, size=entry.size, digest=entry.digest))
    inspection = verify(checkpoint)
    assert found(inspection) == [("unreadable-metadata", METADATA)]
    assert "getcwd" in inspection.problems[0].detail


def test_a_stock_directory_is_complete_without_digests_and_each_lack_is_named(tmp_path: Path) -> None:
    stock = save_stock(tmp_path / "stock")
    inspection = verify(stock)
    assert inspection.sound
    assert inspection.digests_missing
    assert inspection.bytes_checked == 0
    assert inspection.files == 2
    assert found(verify(stock, run="r", world=1)) == [("wrong-run", "."), ("wrong-world", ".")]
    faults: dict[str, tuple[Callable[[Path], object], str, str]] = {
        "truncated": (lambda d: cut(d / SHARD, 10), "truncated", SHARD),
        "missing": (lambda d: (d / SHARD).unlink(), "missing", SHARD),
        "linked": (lambda d: link_out(d / SHARD), "not-a-file", SHARD),
        "extra": (lambda d: (d / "__7_0.distcp").write_text("x"), "unlisted", "__7_0.distcp"),
        "no metadata": (lambda d: (d / METADATA).unlink(), "missing-metadata", METADATA),
        "garbage": (lambda d: (d / METADATA).write_bytes(b"garbage"), "unreadable-metadata", METADATA),
        "empty": (lambda d: cut(d / METADATA, 0), "empty", METADATA),
    }  # fmt: skip
    for fault, (break_it, reason, path) in faults.items():
        broken = Path(shutil.copytree(stock, tmp_path / fault))
        break_it(broken)
        assert found(verify(broken)) == [(reason, path)], fault


def test_a_missing_or_empty_directory_is_not_sound(tmp_path: Path) -> None:
    assert found(verify(tmp_path / "nowhere")) == [("missing", ".")]
    assert found(verify(tmp_path)) == [("no-manifest", MANIFEST)]
    (tmp_path / "file").write_text("x")
    assert found(verify(tmp_path / "file")) == [("unreadable", ".")]


def test_verification_changes_nothing(checkpoint: Path) -> None:
    def state() -> dict[str, tuple[bytes, int]]:
        return {p.name: (p.read_bytes(), p.stat().st_mtime_ns) for p in checkpoint.iterdir()}

    before, mode = state(), stat.S_IMODE(checkpoint.stat().st_mode)
    checkpoint.chmod(0o555)
    try:
        assert verify(checkpoint).sound
    finally:
        checkpoint.chmod(mode)
    assert state() == before


def copy_of_original(folder: str) -> Path:
    return Path(shutil.copytree(original(), Path(folder) / NAME))


FILES = [SHARD, METADATA, MANIFEST]


@settings(max_examples=150, deadline=None)
@given(st.sampled_from(FILES), st.integers(0, 2**30), st.integers(0, 7))
def test_any_flipped_bit_anywhere_is_found(name: str, at: int, bit: int) -> None:
    with tempfile.TemporaryDirectory() as folder:
        directory = copy_of_original(folder)
        flip(directory / name, at % (directory / name).stat().st_size, bit)
        ((reason, path),) = found(verify(directory))
        assert path == name
        assert (
            reason
            in {
                SHARD: ["altered"],
                METADATA: ["altered", "stale-metadata"],
                MANIFEST: ["unreadable-manifest"],
            }[name]
        )


@settings(max_examples=60, deadline=None)
@given(st.sampled_from(FILES), st.integers(0, 2**30))
@example(MANIFEST, -1).via("the last newline")
@example(SHARD, -1)
@example(METADATA, -1)
def test_any_truncation_is_found(name: str, at: int) -> None:
    with tempfile.TemporaryDirectory() as folder:
        directory = copy_of_original(folder)
        size = at % (directory / name).stat().st_size
        cut(directory / name, size)
        expected = "unreadable-manifest" if name == MANIFEST else "truncated" if size else "empty"
        assert found(verify(directory)) == [(expected, name)]
