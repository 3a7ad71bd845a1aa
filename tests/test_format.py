"""Formats across releases: newer reads older (fixtures are kept), older reads newer where it may."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

import msgspec
import pytest
import torch

from holdfast.checkpoint import manifest as manifests
from holdfast.checkpoint.manifest import FORMAT, ManifestError
from holdfast.checkpoint.verify import verify

FIXTURES = Path(__file__).parent / "fixtures"
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
