"""Formats across releases: newer reads older (fixtures are kept), older reads newer where it may."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

import msgspec
import pytest
import torch

from holdfast.checkpoint.format import manifest as manifests
from holdfast.checkpoint.format.manifest import (
    FORMAT,
    MANIFEST,
    METADATA,
    Chunk,
    FileEntry,
    Manifest,
    ManifestError,
    Versions,
    World,
)
from holdfast.checkpoint.format.structure import verify
from holdfast.checkpoint.remote.copies import open_remote
from holdfast.process import proc
from holdfast.record.standing import RootBook, Standing
from kit.commands import ckpt, ckpt_json
from kit.harness import REPO

FIXTURES = REPO / "tests" / "fixtures"
sys.path.insert(0, str(FIXTURES))

from make import train  # noqa: E402


@pytest.mark.parametrize("number", range(1, FORMAT + 1))
def test_a_run_of_an_older_format_verifies_and_goes_on_exactly(tmp_path: Path, number: int) -> None:
    """A17. A new format adds a fixture of its own; none is ever made again."""
    run_dir = tmp_path / "run"
    shutil.copytree(FIXTURES / f"format-{number}", run_dir)
    for path in sorted((run_dir / "checkpoints").glob("step_*")):
        assert verify(path).sound, verify(path).problems
    resumed = train(run_dir, 7)
    whole = train(tmp_path / "whole", 7)
    assert resumed["drawn"] == whole["drawn"][4:]
    assert (resumed["counter"], resumed["samples"]) == (7, 7)
    # The fixture's own steps were computed on another machine, whose last bits may differ.
    assert torch.allclose(torch.tensor(resumed["weight"]), torch.tensor(whole["weight"]), rtol=1e-4)
    assert torch.allclose(torch.tensor(resumed["bias"]), torch.tensor(whole["bias"]), rtol=1e-4)


def test_checkpoints_with_the_short_ids_of_older_releases_are_judged_drained_and_deleted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Issue point 19: ids are wider now; what has eight digits is a checkpoint as before, everywhere."""
    run_dir, url = tmp_path / "run", f"file://{tmp_path}/remote"
    shutil.copytree(FIXTURES / "format-1", run_dir)
    two, four = sorted(path.name for path in (run_dir / "checkpoints").glob("step_*"))
    assert [row["id"] for row in ckpt_json("ls", run_dir)["checkpoints"]] == [four[14:], two[14:]]
    assert ckpt("condemn", run_dir, four[14:], "--reason", "why", "--yes").code == 0
    assert RootBook(run_dir / "checkpoints").of(four) is Standing.CONDEMNED
    assert ckpt_json("locate", run_dir)["step"] == 2
    assert ckpt("acquit", run_dir, "4", "--reason", "why", "--yes").code == 0
    monkeypatch.setenv("HOLDFAST_CHECKPOINT_REMOTE_ROOT", url)
    train(run_dir, 5)
    there = {str(name) for name in open_remote(url).names()}
    assert {two, four} < there
    assert {len(name) for name in there} == {len(four), len(four) + 8}
    assert {str(name) for name in open_remote(url).judged()} == {four}
    monkeypatch.setenv("HOLDFAST_CHECKPOINT_KEEP_LAST", "2")
    monkeypatch.setenv("HOLDFAST_CHECKPOINT_READ_BACK", "false")
    train(run_dir, 14)
    left = {path.name for path in (run_dir / "checkpoints").glob("step_*")}
    assert two not in left
    assert two not in {str(name) for name in open_remote(url).names()}


def rewritten(change: dict[str, object]) -> bytes:
    """The fixture's manifest with some fields changed and its digest made right again."""
    path = next((FIXTURES / "format-1" / "checkpoints").glob("step_00000004-*"))
    body = msgspec.json.decode((path / "holdfast.json").read_bytes())["body"]
    raw = msgspec.json.encode({**body, **change})
    return b'{"digest":"%b","body":%b}\n' % (manifests.digest_bytes(raw).encode(), raw)


def test_a_newer_manifest_with_only_optional_parts_added_is_read() -> None:
    manifest, _ = manifests.decode(rewritten({"colour": "blue", "later": {"nested": [1]}}))
    assert manifest.step == 4


def test_a_newer_manifest_that_needs_something_unknown_is_refused_by_name() -> None:
    with pytest.raises(ManifestError, match="it needs fingerprints, which this release does not have"):
        manifests.decode(rewritten({"needs": ["fingerprints"]}))


def test_a_newer_format_is_refused_naming_the_version() -> None:
    with pytest.raises(ManifestError, match=f"format {FORMAT + 1}; this release reads up to {FORMAT}"):
        manifests.decode(rewritten({"format": FORMAT + 1, "step": "of another type then"}))


def of_two_files() -> bytes:
    chunks = [Chunk(0, 5, "1" * 32), Chunk(5, 5, "2" * 32, "x:" + "3" * 32)]
    files = [FileEntry(path=f"__{rank}_0.distcp", size=10, digest="4" * 32, chunks=chunks) for rank in (0, 1)]
    return manifests.encode(
        Manifest(
            format=1, id="0" * 16, step=1, parent=None, run="r", attempt=1, epoch=1, created=0.0, parts={},
            files=[*files, FileEntry(path=METADATA, size=9, digest="5" * 32)], world=World(size=2),
            versions=Versions(holdfast="", torch="", python=""), tokens=7,
        )
    )[0]  # fmt: skip


def test_a_manifest_that_is_read_lazily_says_the_same(tmp_path: Path) -> None:
    (tmp_path / MANIFEST).write_bytes(of_two_files())
    whole, digest = manifests.read(tmp_path)
    lazily, same, tables = manifests.read_lazily(tmp_path)
    assert same == digest
    assert {entry.path: entry.chunks for entry in whole.files} == dict(tables)
    files = [msgspec.structs.replace(entry, chunks=tables[entry.path]) for entry in lazily.files]
    assert msgspec.structs.replace(lazily, files=files) == whole


def test_a_bad_table_of_chunks_is_refused_when_it_is_asked_for(tmp_path: Path) -> None:
    """Of this file; what the others hold can still be used."""
    body = of_two_files().partition(b'"body":')[2].removesuffix(b"}\n")
    first, second, rest = body.split(b"[5,5,", 2)
    for bad, said in (
        (b"[5,6,", "outside the file"),
        (b"[4,5,", "over another"),
        (b"[-5,5,", "cannot be parsed"),
    ):
        data = first + b"[5,5," + second + bad + rest
        text = b'{"digest":"%b","body":%b}\n' % (manifests.digest_bytes(data).encode(), data)
        (tmp_path / MANIFEST).write_bytes(text)
        with pytest.raises(ManifestError, match=said):
            manifests.read(tmp_path)
        _, _, tables = manifests.read_lazily(tmp_path)
        assert len(tables["__0_0.distcp"]) == 2
        with pytest.raises(ManifestError, match=said):
            tables["__1_0.distcp"]


def test_what_stands_beside_the_list_of_files_has_a_bound_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """It may hold values of any kind, which take far more memory than text."""
    data = of_two_files()
    rest = len(data) - data.index(b',"versions"') + data.index(b'"files":')
    monkeypatch.setattr(manifests, "MAX_REST_BYTES", rest + 100)
    assert manifests.decode(data)[0].tokens == 7
    monkeypatch.setattr(manifests, "MAX_REST_BYTES", rest - 200)
    with pytest.raises(ManifestError, match="beside its list of files"):
        manifests.decode(data)


def test_a_manifest_that_would_not_fit_into_memory_is_refused_unread(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(proc, "memory_available", lambda: 100 * 1024 * 1024)
    with (tmp_path / MANIFEST).open("wb") as file:
        file.truncate(60 * 1024 * 1024)
    with pytest.raises(ManifestError, match=r"62914560 bytes.* 104857600 are available; at most 171798"):
        manifests.read(tmp_path)
