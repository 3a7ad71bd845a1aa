"""FSDP1 with mixed precision on a GPU that several ranks share, trained on the device or on the host."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from kit.harness import REPO, finish, holdfast

pytestmark = pytest.mark.gpu
SCRIPT = str(REPO / "tests" / "scripts" / "gpu" / "train_flat.py")


def trained(place: Path, run: str, ranks: int, until: int, where: str) -> Any:
    out = place / f"{run}-{until}.json"
    argv = holdfast("run", "--nproc-per-node", str(ranks), "--run-dir", f"run-{run}", SCRIPT)
    result = finish([*argv, f"run-{run}", str(until), where, str(out)], cwd=place, timeout=180)
    assert result.code == 0, result.text
    return json.loads(out.read_text())


@pytest.mark.parametrize("where", ["device", "offload"])
def test_what_fsdp1_trains_resumes_bit_for_bit_and_on_other_ranks(tmp_path: Path, where: str) -> None:
    whole = trained(tmp_path, "whole", 2, 6, where)
    first = trained(tmp_path, "parted", 2, 3, where)
    second = trained(tmp_path, "parted", 2, 6, where)
    assert (first["begun"], second["begun"]) == (0, 3)
    assert first["losses"] | second["losses"] == whole["losses"]
    assert second["model"] == whole["model"]
    other = trained(tmp_path, "parted", 3, 6, "device" if where == "offload" else "offload")
    assert (other["begun"], other["model"]) == (6, whole["model"])
