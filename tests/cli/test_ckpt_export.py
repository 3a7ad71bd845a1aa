"""`holdfast ckpt export`: the weights that were saved, whole, in one file, or nothing."""

from __future__ import annotations

import os
import resource
import shutil
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors import safe_open
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import holdfast
from holdfast.checkpoint import export as exports
from holdfast.checkpoint.export import export_weights
from holdfast.checkpoint.format import manifest as manifests
from holdfast.checkpoint.read_back import unread
from holdfast.errors import HoldfastError
from kit.checkpoints import make_checkpoint, save_stock
from kit.commands import ckpt, ckpt_json
from kit.damage import flip_shard
from kit.tiny import Outcome, build, checkpoints, forked, train, tree

DTYPES = {
    "BOOL": torch.bool, "U8": torch.uint8, "I8": torch.int8, "I16": torch.int16, "I32": torch.int32,
    "I64": torch.int64, "F16": torch.float16, "BF16": torch.bfloat16, "F32": torch.float32,
    "F64": torch.float64, "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2,
}  # fmt: skip


def read_safetensors(path: Path) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
    """By the format's own library."""
    with safe_open(path, "pt") as file:
        return {name: file.get_tensor(name) for name in file.keys()}, dict(file.metadata())  # noqa: SIM118


def read_torch(path: Path) -> dict[str, torch.Tensor]:
    loaded: dict[str, torch.Tensor] = torch.load(path, weights_only=True)
    return loaded


def same(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert found[name].dtype == tensor.dtype, name
        assert found[name].shape == tensor.shape, name
        assert found[name].reshape(-1).view(torch.uint8).equal(tensor.reshape(-1).view(torch.uint8)), name


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Outcome]:
    """A run's last checkpoint, and its parameters as the process had them."""
    run_dir = tmp_path_factory.mktemp("trained") / "run"
    outcome = train(run_dir, until=3)
    return checkpoints(run_dir)[0], outcome


@pytest.mark.parametrize("form", ["safetensors", "torch"])
def test_the_exported_weights_are_those_of_the_model(
    trained: tuple[Path, Outcome], tmp_path: Path, form: str
) -> None:
    checkpoint, outcome = trained
    before = tree(checkpoint)
    result = ckpt("export", checkpoint, tmp_path / "weights", "--format", form)
    assert result.code == 0, result.text
    assert "tensors of model" in result.out
    found = read_torch(tmp_path / "weights") if form == "torch" else read_safetensors(tmp_path / "weights")[0]
    assert {name: tensor.numpy().tobytes() for name, tensor in found.items()} == outcome.parameters
    assert tree(checkpoint) == before
    assert [path.name for path in tmp_path.iterdir()] == ["weights"]


def test_the_file_says_what_it_was_made_from(trained: tuple[Path, Outcome], tmp_path: Path) -> None:
    checkpoint, _ = trained
    manifest, digest = manifests.read(checkpoint)
    done = ckpt_json("export", checkpoint, tmp_path / "weights")
    about = read_safetensors(tmp_path / "weights")[1]
    origin = {"step": "3", "run": manifest.run, "checkpoint": manifest.id, "manifest": digest}
    assert about == {"format": "pt", **origin}
    assert done["bytes"] == (tmp_path / "weights").stat().st_size
    assert (done["step"], done["checkpoint"], done["manifest"]) == (3, manifest.id, digest)


def test_another_part_can_be_exported(trained: tuple[Path, Outcome], tmp_path: Path) -> None:
    assert ckpt("export", trained[0], tmp_path / "moments", "--part", "optimizer").code == 0
    assert "state.0.weight.exp_avg" in read_safetensors(tmp_path / "moments")[0]


def test_every_dtype_and_shape_survives(tmp_path: Path) -> None:
    state = {f"a{i}": torch.ones(3).to(dtype) for i, dtype in enumerate(DTYPES.values())}
    state |= {
        "empty": torch.empty(0, 3),
        "scalar": torch.tensor(7.5),
        "large": torch.randn(300, 300),
        "ü\n": torch.ones(1),
    }
    checkpoint = make_checkpoint(tmp_path / "root", state={"model": state})
    for form in ("safetensors", "torch"):
        result = ckpt("export", checkpoint, tmp_path / form, "--format", form)
        assert result.code == 0, result.text
    same(read_safetensors(tmp_path / "safetensors")[0], state)
    same(read_torch(tmp_path / "torch"), state)


def test_a_dtype_without_a_word_in_safetensors_is_refused_with_advice(tmp_path: Path) -> None:
    checkpoint = make_checkpoint(
        tmp_path / "root", state={"model": {"w": torch.ones(2, dtype=torch.complex64)}}
    )
    result = ckpt("export", checkpoint, tmp_path / "weights")
    assert result.code == 2, result.text
    assert "use --format torch" in result.err
    assert [path.name for path in tmp_path.iterdir()] == ["root"]


def rank_of_two(rank: int, folder: Path) -> None:
    """One step with FSDP2, and a save."""
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_RANK": str(rank)}
    store = dist.FileStore(str(folder / "store"), 2)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
    model, _, _, _ = build()
    fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    run = holdfast.Run(run_dir=folder / "run")
    run.track(model=model)
    run.start()
    run.begin_step()
    model(torch.randn(4, 6, generator=torch.Generator().manual_seed(rank))).sum().backward()
    run.end_step()
    run.finish()
    dist.destroy_process_group()


def test_shards_of_two_ranks_become_whole_tensors(tmp_path: Path) -> None:
    """FSDP2; stock DCP's own consolidation is the measure."""

    with ThreadPoolExecutor(2) as pool:
        ranks = [pool.submit(forked, partial(rank_of_two, rank, tmp_path)) for rank in (0, 1)]
    assert [rank.result() for rank in ranks] == [0, 0]
    checkpoint = checkpoints(tmp_path / "run")[0]
    assert len(list(checkpoint.glob("*.distcp"))) == 2
    dcp_to_torch_save(checkpoint, tmp_path / "stock")
    stock: dict[str, Any] = torch.load(tmp_path / "stock", weights_only=True)
    assert any(name.startswith("own_") for name in stock["holdfast"]), "BatchNorm statistics differ"
    result = ckpt("export", checkpoint, tmp_path / "weights")
    assert result.code == 0, result.text
    found = read_safetensors(tmp_path / "weights")[0]
    assert found["0.weight"].shape == (12, 6)
    same(found, stock["model"])
    whole = make_checkpoint(tmp_path / "one", state={"model": stock["model"]})
    compared = ckpt_json("diff", checkpoint, whole)
    assert compared["read"] > 0, "other chunks have other digests"
    assert not [entry for entry in compared["entries"] if entry["name"].startswith("model.")]


@pytest.mark.parametrize("where", ["the part", "elsewhere"])
def test_an_altered_byte_anywhere_is_refused_and_leaves_nothing(tmp_path: Path, where: str) -> None:
    state = {"model": {"w": torch.randn(20_000)}, "optimizer": {"m": torch.randn(20_000)}}
    checkpoint = make_checkpoint(tmp_path / "root", state=state)
    shard = checkpoint / "__0_0.distcp"
    data = bytearray(shard.read_bytes())
    wanted = state["model"]["w"] if where == "the part" else state["optimizer"]["m"]
    data[data.index(wanted.numpy().tobytes()) + 1234] ^= 1
    shard.write_bytes(data)
    for form in ("safetensors", "torch"):
        result = ckpt("export", checkpoint, tmp_path / "weights", "--format", form)
        assert result.code == 1, result.text
        assert "not sound" in result.err
        assert "altered" in result.err
    assert [path.name for path in tmp_path.iterdir()] == ["root"]


def test_a_missing_shard_is_named(trained: tuple[Path, Outcome], tmp_path: Path) -> None:
    checkpoint = Path(shutil.copytree(trained[0], tmp_path / trained[0].name))
    (checkpoint / "__0_0.distcp").unlink()
    result = ckpt("export", checkpoint, tmp_path / "weights")
    assert result.code == 1, result.text
    assert "missing: __0_0.distcp" in result.err


def test_an_existing_file_is_kept_unless_told_otherwise(
    trained: tuple[Path, Outcome], tmp_path: Path
) -> None:
    out = tmp_path / "weights"
    out.write_text("precious")
    result = ckpt("export", trained[0], out)
    assert result.code == 2
    assert "--overwrite" in result.err
    assert out.read_text() == "precious"
    damaged = Path(shutil.copytree(trained[0], tmp_path / trained[0].name))
    flip_shard(damaged)
    assert ckpt("export", damaged, out, "--overwrite").code == 1
    assert out.read_text() == "precious", "a failed export must not cost what was there"
    assert ckpt("export", trained[0], out, "--overwrite").code == 0
    assert "0.weight" in read_safetensors(out)[0]


@pytest.mark.parametrize(
    ("more", "said"),
    [
        (["--part", "nothing"], "Parts with tensors: model, optimizer"),
        (["--part", "schedule"], "no tensors of its own"),
        (["--part", "holdfast"], "no such part"),
        (["--format", "onnx"], "safetensors or torch"),
    ],
)
def test_usage_errors_exit_2(
    trained: tuple[Path, Outcome], tmp_path: Path, more: list[str], said: str
) -> None:
    result = ckpt("export", trained[0], tmp_path / "weights", *more)
    assert result.code == 2, result.text
    assert said in result.err
    assert not list(tmp_path.iterdir())


def test_impossible_places_are_refused(trained: tuple[Path, Outcome], tmp_path: Path) -> None:
    checkpoint = trained[0]
    before = tree(checkpoint)
    for out in (checkpoint / "weights", tmp_path, tmp_path / "nowhere" / "weights"):
        result = ckpt("export", checkpoint, out)
        assert result.code == 2, result.text
    assert tree(checkpoint) == before, "a committed checkpoint is never written into"
    assert ckpt("export", tmp_path / "nowhere", tmp_path / "weights").code == 2
    stock = ckpt("export", save_stock(tmp_path / "stock"), tmp_path / "weights")
    assert "checkpoint stock of another project, unverified" in stock.out


def test_a_disk_that_takes_no_more_is_one_clear_error(trained: tuple[Path, Outcome], tmp_path: Path) -> None:
    """A limit on the size of files stands in for a full disk: writing fails half-way."""

    def work() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (2000, 2000))
        with pytest.raises(HoldfastError, match=r"cannot write .*weights: File too large; nothing was left"):
            export_weights(trained[0], tmp_path / "weights", part="optimizer", form="safetensors")

    assert forked(work) == 0
    assert not list(tmp_path.iterdir())


def test_the_checkpoint_cannot_be_deleted_while_it_is_exported(
    trained: tuple[Path, Outcome], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[bool] = []
    read = exports.read_entry

    def look(*args: Any) -> torch.Tensor:
        with unread(trained[0]) as free:
            seen.append(free)
        return read(*args)

    monkeypatch.setattr(exports, "read_entry", look)
    assert ckpt("export", trained[0], tmp_path / "weights").code == 0
    assert seen
    assert not any(seen)
