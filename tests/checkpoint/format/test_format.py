"""Formats across releases: newer reads older (fixtures are kept), older reads newer where it may."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

import msgspec
import pytest
import torch

from holdfast.checkpoint.format import manifest as manifests
from holdfast.checkpoint.format.manifest import FORMAT, ManifestError
from holdfast.checkpoint.format.structure import verify
from holdfast.checkpoint.remote.copies import open_remote
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
