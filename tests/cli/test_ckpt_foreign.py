"""`ckpt import`, `export`, `diff` and `recover` with checkpoints of other projects."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import holdfast
from holdfast.checkpoint.state import first_difference
from kit.commands import ckpt, ckpt_json, command
from kit.tiny import checkpoints, tree
from kit.worlds import foreign

NAMED = ["torchtitan", "KempnerForge", "Megatron"]
"""Layouts whose optimizers name their parameters."""
NUMBERED = ["Hugging Face Trainer", "Lightning", "torch file"]


@pytest.mark.parametrize("layout", NAMED)
def test_what_names_its_parameters_is_imported_whole_and_is_verified_then(
    layout: str, tmp_path: Path
) -> None:
    path = foreign.LAYOUTS[layout](tmp_path / "theirs")
    before = tree(tmp_path / "theirs")
    done = ckpt("import", path, tmp_path / "run")
    assert done.code == 0, done.text
    assert tree(tmp_path / "theirs") == before
    (imported,) = checkpoints(tmp_path / "run")
    assert str(imported) in done.out
    assert ": sound, " in ckpt("verify", imported).out
    model, optimizer, schedule = foreign.build()
    run = holdfast.Run(run_dir=tmp_path / "next", checkpoint_resume_from=str(imported))
    run.track(model=model, optimizer=optimizer, scheduler=schedule)
    run.start()
    run.close()
    assert run.step == foreign.STEP
    for found, expected in zip((model, optimizer, schedule), foreign.trained(), strict=True):
        assert not first_difference(found.state_dict(), expected.state_dict(), "state")
    assert ckpt("diff", path, imported, "--json").code == 1  # a rank's own state is in ours alone
    told = ckpt_json("diff", path, imported)
    assert [entry["name"] for entry in told["entries"]] == ["holdfast.rank_00000"]


@pytest.mark.parametrize("layout", NUMBERED)
def test_what_numbers_its_parameters_is_refused_by_name_or_left_out(layout: str, tmp_path: Path) -> None:
    path = foreign.LAYOUTS[layout](tmp_path / "theirs")
    done = ckpt("import", path, tmp_path / "run")
    assert done.code == 25
    assert "optimizer does not name its parameters" in done.err
    assert not (tmp_path / "run").exists()
    assert ckpt("import", path, tmp_path / "run", "--part", "model").code == 0
    (imported,) = checkpoints(tmp_path / "run")
    assert ckpt("export", imported, tmp_path / "ours.safetensors").code == 0
    assert ckpt("export", path, tmp_path / "theirs.safetensors").code == 0
    ours, theirs = (load_file(tmp_path / f"{name}.safetensors") for name in ("ours", "theirs"))
    assert not first_difference(ours, theirs, "weights")


@pytest.mark.parametrize(
    ("damage", "why"),
    [
        (lambda path: os.truncate(path / "model.safetensors", 200), "incomplete: model.safetensors"),
        (lambda path: (path / "trainer_state.json").unlink(), "missing: trainer_state.json"),
    ],
)
def test_nothing_is_imported_of_what_is_not_sound(
    damage: Callable[[Path], object], why: str, tmp_path: Path
) -> None:
    path = foreign.hf_trainer(tmp_path / "theirs")
    damage(path)
    done = ckpt("import", tmp_path / "theirs", tmp_path / "run", "--part", "model")
    assert done.code == 1
    assert why in done.err
    assert not (tmp_path / "run").exists()


def test_the_newest_sound_one_is_imported_and_what_was_passed_over_is_named(tmp_path: Path) -> None:
    foreign.torchtitan(tmp_path / "theirs", step=20)
    os.truncate(next(foreign.torchtitan(tmp_path / "theirs", step=40).glob("*.distcp")), 500)
    done = ckpt("import", tmp_path / "theirs", tmp_path / "run")
    assert done.code == 0, done.text
    assert "passed over: " in done.out
    assert "truncated: __0_0.distcp" in done.out
    assert checkpoints(tmp_path / "run")[0].name.startswith("step_00000020-")


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        (["nowhere", "run"], "no checkpoint of another project"),
        (["theirs", "theirs"], "is not empty"),
        (["theirs", "run", "--part", "other"], "there is no part 'other'"),
        (["theirs", "run", "--part", "scheduler"], "without weights"),
        (["theirs", "run", "--names", "json:nothing"], "checkpoint.names = 'json:nothing'"),
    ],
)
def test_a_request_that_cannot_be_carried_out_says_why(
    arguments: list[str], why: str, tmp_path: Path
) -> None:
    foreign.hf_trainer(tmp_path / "theirs")
    there = [
        one if one.startswith("--") or at > 1 else str(tmp_path / one) for at, one in enumerate(arguments)
    ]
    done = ckpt("import", *there, "--part", "model") if "--names" in there else ckpt("import", *there)
    assert done.code == 2, done.text
    assert why in done.err
    assert not (tmp_path / "run" / "run.json").exists()


@pytest.mark.parametrize("layout", [name for name in foreign.LAYOUTS if name != "Megatron local"])
def test_weights_are_exported_from_each_layout(layout: str, tmp_path: Path) -> None:
    path = foreign.LAYOUTS[layout](tmp_path / "theirs")
    assert ckpt("export", path, tmp_path / "out", "--shard-size", "200B").code == 0
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    files = sorted(set(index["weight_map"].values()))
    assert files == [
        f"model-{number:05}-of-{len(files):05}.safetensors" for number in range(1, len(files) + 1)
    ]
    found: dict[str, torch.Tensor] = {}
    for name in files:
        found |= load_file(tmp_path / "out" / name)
    expected = foreign.trained()[0].state_dict()
    ours = {name: found.get(name, found.get(f"net.{name}")) for name in expected}
    assert len(found) == len(ours)
    assert not first_difference(ours, dict(expected), "weights")
    assert index["metadata"]["total_size"] == sum(one.nbytes for one in found.values())


def test_an_export_in_shards_appears_whole_or_not_at_all(tmp_path: Path) -> None:
    path = foreign.hf_trainer(tmp_path / "theirs")
    (tmp_path / "out").mkdir()
    refused = ckpt("export", path, tmp_path / "out", "--shard-size", "1KB")
    assert refused.code == 2
    assert "give a directory that does not" in refused.err
    assert ckpt("export", path, tmp_path / "new", "--shard-size", "none").code == 2
    assert ckpt("export", path, tmp_path / "new", "--shard-size", "1KB", "--format", "torch").code == 2
    os.truncate(path / "model.safetensors", 300)
    assert ckpt("export", path, tmp_path / "new", "--shard-size", "1KB").code == 1
    assert sorted(one.name for one in tmp_path.iterdir()) == ["out", "theirs"]


def test_one_file_that_holds_all_needs_no_index(tmp_path: Path) -> None:
    path = foreign.hf_trainer(tmp_path / "theirs")
    assert ckpt("export", path, tmp_path / "out", "--shard-size", "5GB").code == 0
    assert [one.name for one in (tmp_path / "out").iterdir()] == ["model.safetensors"]


def test_what_each_rank_keeps_for_itself_is_not_taken_for_the_whole(tmp_path: Path) -> None:
    path = foreign.megatron_local(tmp_path / "theirs")
    exported = ckpt("export", path, tmp_path / "out.safetensors")
    assert exported.code == 2
    assert "each of 2 ranks keeps model for itself" in exported.err
    imported = ckpt("import", path, tmp_path / "run")
    assert imported.code == 25
    assert "each of 2 ranks keeps model for itself" in imported.err
    assert sorted(one.name for one in tmp_path.iterdir()) == ["theirs"]


def test_an_import_that_fails_amid_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """So that the same command can be tried again."""
    path = foreign.torchtitan(tmp_path / "theirs")

    def full(*_: object, **__: object) -> None:
        raise holdfast.HoldfastError("the disk is full")

    with monkeypatch.context() as patched:
        patched.setattr(holdfast.Run, "save", full)
        assert "the disk is full" in ckpt("import", path, tmp_path / "run").err
    assert not (tmp_path / "run").exists()
    done = ckpt("import", path, tmp_path / "run")
    assert done.code == 0, done.text


def test_diff_looks_at_what_every_rank_keeps(tmp_path: Path) -> None:
    one, other = foreign.megatron_local(tmp_path / "a"), foreign.megatron_local(tmp_path / "b")
    assert ckpt("diff", one, other).code == 0
    second = other.parent.parent / "1" / other.name.replace("_0_local", "_1_local")
    state = torch.load(second, weights_only=False)
    state.state_dict["model"]["0.bias"][2] += 0.5
    torch.save(state, second)
    told = ckpt_json("diff", one, other)
    assert [(one["name"], one["differing"]) for one in told["entries"]] == [("rank_00001.model.0.bias", 1)]


def test_ls_believes_no_pointer_and_needs_none(tmp_path: Path) -> None:
    path = foreign.lightning(tmp_path / "one")
    assert "latest" not in ckpt("ls", path).out
    foreign.kempner(tmp_path / "two")
    listed = ckpt("ls", tmp_path / "two").out
    assert "relies on it" not in listed
    assert listed.splitlines()[1].endswith("latest")
    (tmp_path / "two" / "latest").unlink()
    (tmp_path / "two" / "latest").symlink_to("step_80")
    assert "the link `latest` names step_80; no resume relies on it" in ckpt("ls", tmp_path / "two").out
    foreign.megatron(tmp_path / "three")
    (tmp_path / "three" / "latest_checkpointed_iteration.txt").write_bytes(b"\xff\x00 iter;rm")
    assert "holds neither a number nor `release`" in ckpt("ls", tmp_path / "three").out


def test_diff_tells_what_differs_between_two_of_theirs(tmp_path: Path) -> None:
    one, other = foreign.lightning(tmp_path / "a"), foreign.lightning(tmp_path / "b")
    assert ckpt("diff", one, other).code == 0
    state = torch.load(other, weights_only=False)
    state["state_dict"]["net.0.bias"][2] += 0.5
    torch.save(state, other)
    told = ckpt_json("diff", one, other)
    assert [(entry["name"], entry["differing"]) for entry in told["entries"]] == [("model.net.0.bias", 1)]


def test_recover_begins_with_the_newest_that_holds(tmp_path: Path) -> None:
    foreign.megatron(tmp_path, step=20)
    os.truncate(foreign.megatron(tmp_path, step=40) / "common.pt", 10)
    result = command("recover", tmp_path)
    assert "can be resumed at step 20" in result.out
    assert f"checkpoint.resume_from={tmp_path / 'iter_0000020'}" in result.out
