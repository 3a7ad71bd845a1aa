"""What has no digest is judged by its form: whole ones are said to be unverified, damage is named."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from holdfast.checkpoint.foreign.recognition import checkpoints_in, recognise
from holdfast.checkpoint.foreign.soundness import examine
from kit.commands import ckpt
from kit.tiny import tree
from kit.worlds import foreign


@pytest.mark.parametrize("layout", foreign.LAYOUTS)
def test_a_whole_one_is_sound_and_unverified(layout: str, tmp_path: Path) -> None:
    path = foreign.LAYOUTS[layout](tmp_path / "there")
    before = tree(tmp_path)
    found = recognise(path)
    assert found is not None
    inspection, notes = examine(found)
    assert inspection.problems == []
    assert inspection.digests_missing
    assert notes[0].startswith(f"{layout}: ")
    assert notes[0].endswith("its bytes are unverified, and the first save after it makes them verified")
    assert any(note.startswith("holds model (4 tensors)") for note in notes)
    assert tree(tmp_path) == before
    verified = ckpt("verify", path)
    assert verified.code == 0, verified.text
    assert "no digests: its bytes are unverified" in verified.out


def flip(path: Path, at: int | None = None) -> None:
    data = bytearray(path.read_bytes())
    data[at if at is not None else len(data) // 2] ^= 0x10
    path.write_bytes(data)


def put_nan(path: Path) -> None:
    tensors = load_file(path / "model.safetensors")
    tensors["0.weight"][0, 0] = torch.nan
    save_file(tensors, path / "model.safetensors")


def put_nan_into_lightning(path: Path) -> None:
    state = torch.load(path, weights_only=False)
    state["optimizer_states"][0]["state"][0]["exp_avg"][0] = torch.inf
    torch.save(state, path)


def another_step(path: Path) -> None:
    (path / "trainer_state.json").write_text(json.dumps({"global_step": 41}))


def another_iteration(path: Path) -> None:
    common = torch.load(path / "common.pt", weights_only=False)
    torch.save({**common, "iteration": 41}, path / "common.pt")


def without_groups(path: Path) -> None:
    common = torch.load(path / "common.pt", weights_only=False)
    torch.save({**common, "optimizer": {}}, path / "common.pt")


def first(path: Path, pattern: str) -> Path:
    return next(path.glob(pattern))


DAMAGE: dict[str, tuple[str, Callable[[Path], object], str]] = {
    "weights cut": (
        "Hugging Face Trainer",
        lambda path: os.truncate(path / "model.safetensors", 300),
        "incomplete: model.safetensors",
    ),
    "weights gone": (
        "Hugging Face Trainer",
        lambda path: (path / "model.safetensors").unlink(),
        "incomplete: .",
    ),
    "a NaN in the weights": ("Hugging Face Trainer", put_nan, "not-finite: .: "),
    "optimizer cut": (
        "Hugging Face Trainer",
        lambda path: os.truncate(path / "optimizer.pt", 500),
        "unreadable-metadata: optimizer.pt",
    ),
    "no trainer state": (
        "Hugging Face Trainer",
        lambda path: (path / "trainer_state.json").unlink(),
        "missing: trainer_state.json",
    ),
    "of another step": ("Hugging Face Trainer", another_step, "wrong-name: .: it is of step 41"),
    "a shard gone": (
        "Hugging Face model",
        lambda path: (path / "model-00002-of-00004.safetensors").unlink(),
        "missing: model-00002-of-00004.safetensors",
    ),
    "an infinity in the optimizer": ("Lightning", put_nan_into_lightning, "not-finite: .: "),
    "emptied": ("Lightning", lambda path: os.truncate(path, 0), "empty: epoch=1-step=40.ckpt"),
    "cut": ("torch file", lambda path: os.truncate(path, 2000), "unreadable-metadata: ckpt_40.pt"),
    "values flipped": ("torch file", lambda path: flip(path), "ckpt_40.pt"),
    "shard cut": (
        "torchtitan",
        lambda path: os.truncate(first(path, "*.distcp"), 900),
        "truncated: __0_0.distcp",
    ),
    "metadata gone": (
        "torchtitan",
        lambda path: (path / ".metadata").unlink(),
        "missing-metadata: .metadata",
    ),
    "train state gone": (
        "KempnerForge",
        lambda path: (path / "train_state.pt").unlink(),
        "missing: train_state.pt",
    ),
    "common gone": ("Megatron", lambda path: (path / "common.pt").unlink(), "missing: common.pt"),
    "common of another iteration": ("Megatron", another_iteration, "wrong-name: .: it is of step 41"),
    "common without groups": ("Megatron", without_groups, "incomplete: common.pt"),
    "backends gone": ("Megatron", lambda path: (path / "metadata.json").unlink(), "missing: metadata.json"),
    "a rank's file cut": (
        "Megatron local",
        lambda path: os.truncate(path, 900),
        "unreadable-metadata: iter_0000040_0_local.pt",
    ),
}


@pytest.mark.parametrize("what", DAMAGE)
def test_damage_is_named_by_the_file_that_has_it(what: str, tmp_path: Path) -> None:
    layout, damage, told = DAMAGE[what]
    path = foreign.LAYOUTS[layout](tmp_path / "there")
    damage(path)
    found = recognise(path)
    assert found is not None
    inspection, notes = examine(found)
    assert any(told in str(problem) for problem in inspection.problems), inspection.problems
    assert notes == []
    verified = ckpt("verify", path)
    assert verified.code == 1
    assert "not sound" in verified.out


def test_a_score_that_lightning_has_not_found_yet_is_no_fault(tmp_path: Path) -> None:
    """Its callbacks begin with an infinity, which is no state of training."""
    found = recognise(foreign.lightning(tmp_path))
    assert found is not None
    assert examine(found)[0].sound


def test_a_quick_look_reads_no_values(tmp_path: Path) -> None:
    path = foreign.hf_trainer(tmp_path)
    put_nan(path)
    found = recognise(path)
    assert found is not None
    assert examine(found, quick=True)[0].sound
    assert not examine(found)[0].sound


def test_locate_passes_over_what_is_damaged_and_says_why(tmp_path: Path) -> None:
    foreign.hf_trainer(tmp_path, step=20)
    os.truncate(foreign.hf_trainer(tmp_path, step=40) / "model.safetensors", 300)
    result = ckpt("locate", tmp_path)
    assert result.code == 0, result.text
    assert "would resume at step 20" in result.out
    assert "incomplete: model.safetensors" in result.out


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """One of each layout, in a directory of its own."""
    home = tmp_path_factory.mktemp("layouts")
    return {name: make(home / str(number)) for number, (name, make) in enumerate(foreign.LAYOUTS.items())}


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_whatever_was_done_to_a_file_is_a_problem_or_nothing_and_never_an_exception(
    data: st.DataObject, whole: dict[str, Path], tmp_path: Path
) -> None:
    source = whole[data.draw(st.sampled_from(list(whole)))]
    home = source.parent.parent if source.is_file() and source.parent.name.isdecimal() else source.parent
    shutil.rmtree(tmp_path / "there", ignore_errors=True)
    shutil.copytree(home, tmp_path / "there", symlinks=True)
    files = sorted(
        path for path in (tmp_path / "there").rglob("*") if path.is_file() and not path.is_symlink()
    )
    file = data.draw(st.sampled_from(files))
    content = bytearray(file.read_bytes())
    start = data.draw(st.integers(0, len(content)))
    end = data.draw(st.integers(start, min(len(content), start + 40)))
    content[start:end] = data.draw(st.binary(max_size=40))
    file.write_bytes(content)
    for found in checkpoints_in(tmp_path / "there"):
        examine(found, quick=True)
        examine(found)
