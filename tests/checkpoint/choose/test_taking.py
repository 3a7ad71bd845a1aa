"""A run begins with another project's checkpoint: all of it, bit by bit, or it says what is in the way."""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

import holdfast
from holdfast.checkpoint.choose.load import load_stock
from holdfast.checkpoint.choose.taking import load_foreign
from holdfast.checkpoint.foreign.recognition import recognise
from holdfast.checkpoint.state import Tracked, first_difference
from holdfast.errors import CheckpointError, IncompleteStateError, NoValidRungError
from holdfast.journal import read_journal
from kit.commands import ckpt
from kit.tiny import checkpoints, forked
from kit.worlds import foreign


def tracked(*parts: str) -> tuple[Tracked, dict[str, Any]]:
    made = dict(zip(("model", "optimizer", "schedule"), foreign.build(), strict=True))
    found = Tracked()
    for name in parts or made:
        found.add(name, made[name])
    found.begin()
    return found, made


def load(path: Path, found: Tracked, *, rank: int = 0, world: int = 1, **options: Any) -> Any:
    recognised = recognise(path)
    assert recognised is not None
    state = load_foreign(recognised, found, rank, world, **options)
    state.apply()
    return state


def same(made: dict[str, Any], seed: int = 1) -> None:
    expected = dict(zip(("model", "optimizer", "schedule"), foreign.trained(seed), strict=True))
    for name, thing in made.items():
        assert not first_difference(thing.state_dict(), expected[name].state_dict(), name), name


@pytest.mark.parametrize("layout", foreign.FULL)
def test_every_part_is_bitwise_what_was_stored(layout: str, tmp_path: Path) -> None:
    path = foreign.LAYOUTS[layout](tmp_path)
    found, made = tracked()
    state = load(path, found)
    same(made)
    assert state.notes[0] == "no digests: nothing vouches for these bytes"
    has_generators = layout in ("Hugging Face Trainer", "KempnerForge")
    assert ("rng" in state.own) == has_generators


@pytest.mark.parametrize("layout", foreign.LAYOUTS)
def test_weights_alone_are_taken_where_the_rest_begins_anew(layout: str, tmp_path: Path) -> None:
    path = foreign.LAYOUTS[layout](tmp_path)
    found, made = tracked()
    kept = made["optimizer"].state_dict()
    fresh = ["optimizer", "schedule", "rng"]
    load(path, found, world=2 if layout == "Megatron local" else 1, fresh=fresh)
    same({"model": made["model"]})
    assert not first_difference(made["optimizer"].state_dict(), kept, "optimizer")


@pytest.mark.parametrize("layout", ["Hugging Face model", "Megatron local"])
def test_what_a_layout_does_not_hold_is_refused_by_name(layout: str, tmp_path: Path) -> None:
    found, made = tracked()
    world = 2 if layout == "Megatron local" else 1
    before = made["model"].state_dict()["0.weight"].clone()
    with pytest.raises(IncompleteStateError, match=r"does not hold optimizer, schedule: .*fresh_parts = "):
        load(foreign.LAYOUTS[layout](tmp_path), found, world=world)
    assert torch.equal(made["model"].state_dict()["0.weight"], before)


def test_an_optimizer_that_nobody_tracks_is_not_dropped_silently(tmp_path: Path) -> None:
    found, _ = tracked("model", "schedule")
    with pytest.raises(IncompleteStateError, match="holds optimizer, which nothing that is tracked takes"):
        load(foreign.hf_trainer(tmp_path), found)


def test_a_data_feed_has_to_be_told_to_begin_anew(tmp_path: Path) -> None:
    found, _ = tracked()
    path = foreign.lightning(tmp_path)
    with pytest.raises(IncompleteStateError, match="does not hold data"):
        load(path, found, needs_data=True)
    load(path, found, needs_data=True, fresh=["data"])


# --- one rank's own state -----------------------------------------------------------------------------------


@pytest.mark.parametrize(("ranks", "world"), [(1, 2), (2, 1), (2, 4)])
def test_random_generators_of_other_ranks_are_refused_by_name(ranks: int, world: int, tmp_path: Path) -> None:
    path = foreign.hf_trainer(tmp_path, ranks=ranks)
    found, made = tracked()
    with pytest.raises(IncompleteStateError, match=rf"its rng is of {ranks} ranks? alone, and {world} rank"):
        load(path, found, world=world)
    state = load(path, found, world=world, fresh=["rng"])
    assert "rng" not in state.own
    same(made)


def test_at_the_same_world_size_each_rank_takes_its_own_generators(tmp_path: Path) -> None:
    path = foreign.hf_trainer(tmp_path, ranks=2)
    own = torch.load(path / "rng_state_1.pth", weights_only=False)
    torch.save({**own, "cpu": torch.full_like(own["cpu"], 3)}, path / "rng_state_1.pth")
    states = []
    for rank in (0, 1):
        found, _ = tracked()
        states.append(load(path, found, rank=rank, world=2).own["rng"]["torch"])
    assert not torch.equal(*states)


def test_each_rank_takes_its_own_local_checkpoint_and_no_other_world_does(tmp_path: Path) -> None:
    path = foreign.megatron_local(tmp_path, ranks=2)
    for rank in (0, 1):
        found, made = tracked("model")
        load(path, found, rank=rank, world=2)
        same({"model": made["model"]}, seed=rank + 1)
    found, _ = tracked("model")
    with pytest.raises(IncompleteStateError, match="its model is of 2 ranks alone, and 1 rank would resume"):
        load(path, found)


def test_a_node_that_has_only_its_own_ranks_files_is_enough_for_them(tmp_path: Path) -> None:
    """What rank 0 proposes is the path of its own file, which the others' nodes do not have."""
    path = foreign.megatron_local(tmp_path, ranks=2)
    path.unlink()
    found, made = tracked("model")
    load(path, found, rank=1, world=2)
    same({"model": made["model"]}, seed=2)
    with pytest.raises(CheckpointError, match="rank 0's file is not here; here are those of 1"):
        load(path, found, rank=0, world=2)


# --- misfits ------------------------------------------------------------------------------------------------


def renamed(path: Path) -> None:
    tensors = load_file(path / "model.safetensors")
    save_file({f"x{name}": one for name, one in tensors.items()}, path / "model.safetensors")


def reshaped(path: Path) -> None:
    tensors = load_file(path / "model.safetensors")
    save_file({**tensors, "0.weight": torch.zeros(8, 7)}, path / "model.safetensors")


def added(path: Path) -> None:
    save_file({**load_file(path / "model.safetensors"), "more": torch.zeros(1)}, path / "model.safetensors")


def regrouped(path: Path) -> None:
    state = torch.load(path / "optimizer.pt")
    group = {**state["param_groups"][0], "params": [0, 1, 2, 3]}
    torch.save({**state, "param_groups": [group]}, path / "optimizer.pt")


def of_one_rank(path: Path) -> None:
    state = torch.load(path / "optimizer.pt")
    state["state"][0]["exp_avg"] = state["state"][0]["exp_avg"][:4]
    torch.save(state, path / "optimizer.pt")


class Stranger:
    """A class of somebody's script."""

    def __init__(self) -> None:
        self.steps = 3


def with_an_object(path: Path) -> None:
    torch.save({"last_epoch": 3, "warmup": Stranger()}, path / "scheduler.pt")


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (renamed, r"model\.0\.weight: tracked, and not in the checkpoint[\s\S]*checkpoint\.names"),
        (reshaped, r"model\.0\.weight: shape \(8, 6\) tracked, \(8, 7\) in the checkpoint"),
        (added, "more: in the checkpoint, and not in the tracked model"),
        (regrouped, r"in groups of \[4\]; the tracked optimizer has groups of \[2, 2\]"),
        (of_one_rank, r"exp_avg of 0\.weight has the shape \(4, 6\).*or one rank's part of it"),
        (with_an_object, r"schedule\.warmup holds an object of .*Stranger, which is not made of plain data"),
    ],
)
def test_what_does_not_fit_is_refused_by_name_before_anything_is_loaded(
    change: Callable[[Path], None], why: str, tmp_path: Path
) -> None:
    path = foreign.hf_trainer(tmp_path)
    change(path)
    found, made = tracked()
    before = {name: one.clone() for name, one in made["model"].state_dict().items()}
    with pytest.raises(IncompleteStateError, match=why):
        load(path, found)
    assert not first_difference(dict(made["model"].state_dict()), before, "model")


def test_tied_weights_that_are_stored_once_fill_both_names(tmp_path: Path) -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.head = nn.Embedding(5, 3), nn.Linear(3, 5, bias=False)
            self.head.weight = self.embed.weight

    path = tmp_path / "model"
    path.mkdir()
    save_file({"embed.weight": torch.arange(15.0).reshape(5, 3)}, path / "model.safetensors")
    model, found = Tied(), Tracked()
    found.add("model", model)
    found.begin()
    load(path, found)
    assert model.head.weight is model.embed.weight
    assert model.head.weight.tolist() == torch.arange(15.0).reshape(5, 3).tolist()


def test_another_dtype_is_cast_and_said(tmp_path: Path) -> None:
    path = foreign.hf_model(tmp_path)
    one = path / "model-00001-of-00004.safetensors"
    save_file({name: tensor.bfloat16() for name, tensor in load_file(one).items()}, one)
    found, _ = tracked("model")
    state = load(path, found)
    assert "1 tensor of model cast, such as 0.weight from bfloat16 to float32" in state.notes


# --- a whole run --------------------------------------------------------------------------------------------


def begin(run_dir: Path, source: Path, **settings: object) -> tuple[holdfast.Run, dict[str, Any]]:
    made = dict(zip(("model", "optimizer", "schedule"), foreign.build(), strict=True))
    run = holdfast.Run(run_dir=run_dir, checkpoint_resume_from=str(source), **settings)
    run.track(**made)
    run.start()
    return run, made


def test_the_first_save_after_it_is_verified_and_the_newest_that_holds_is_taken(tmp_path: Path) -> None:
    root = tmp_path / "theirs"
    foreign.hf_trainer(root, step=20)
    os.truncate(foreign.hf_trainer(root, step=40) / "optimizer.pt", 400)
    run, made = begin(tmp_path / "run", root)
    assert run.step == 20
    same(made)
    run.save()
    run.close()
    (saved,) = checkpoints(tmp_path / "run")
    verified = ckpt("verify", saved)
    assert verified.code == 0
    assert ": sound, " in verified.out
    told = [line.body for line in read_journal(tmp_path / "run" / "journal")]
    decision = next(body for body in told if getattr(body, "about", "") == "resume")
    assert decision.chosen == "checkpoint-20"
    assert [(one.option, one.why[0].split(":")[0]) for one in decision.rejected] == [
        ("checkpoint-40", "unreadable-metadata")
    ]
    assert "another project (Hugging Face Trainer); no digests to check" in decision.evidence[0]


def test_a_nan_is_found_as_it_is_loaded_and_an_older_one_is_taken(tmp_path: Path) -> None:
    root = tmp_path / "theirs"
    foreign.hf_trainer(root, step=20)
    newest = foreign.hf_trainer(root, step=40)
    tensors = load_file(newest / "model.safetensors")
    tensors["2.bias"][1] = torch.nan
    save_file(tensors, newest / "model.safetensors")
    run, made = begin(tmp_path / "run", root)
    run.close()
    assert run.step == 20
    same(made)
    told = [line.body for line in read_journal(tmp_path / "run" / "journal")]
    decision = next(body for body in told if getattr(body, "about", "") == "resume")
    (rejected,) = decision.rejected
    assert rejected.why == ["not-finite: model.2.bias holds NaN or infinity (found by rank 0)"]


def test_minus_infinity_is_how_masks_are_written(tmp_path: Path) -> None:
    path = foreign.hf_trainer(tmp_path)
    tensors = load_file(path / "model.safetensors")
    tensors["2.bias"][1] = -torch.inf
    save_file(tensors, path / "model.safetensors")
    found, made = tracked()
    load(path, found)
    assert made["model"][2].bias[1] == -torch.inf


def test_a_directory_in_which_none_holds_is_refused(tmp_path: Path) -> None:
    os.truncate(foreign.lightning(tmp_path / "theirs"), 100)
    with pytest.raises(NoValidRungError, match=r"epoch=1-step=40\.ckpt: unreadable-metadata"):
        begin(tmp_path / "run", tmp_path / "theirs")


def test_a_users_function_maps_names_and_leaves_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = foreign.hf_trainer(tmp_path / "theirs", prefix="old_")
    added(path)
    body = "return None if name == 'more' else name.removeprefix('old_')"
    (tmp_path / "mapping_of_mine.py").write_text(f"def tracked(name):\n    {body}\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    run, made = begin(tmp_path / "run", path, checkpoint_names="mapping_of_mine:tracked")
    run.close()
    same(made)


FRESH = "rng,scheduler"


def rank_of_two(rank: int, folder: Path, source: Path) -> None:
    """FSDP2 over two ranks, from files that know of no ranks."""
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_RANK": str(rank)}
    store = dist.FileStore(str(folder / "store"), 2)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
    model, *_ = foreign.build()
    fully_shard(model, mesh=init_device_mesh("cpu", (2,)))
    groups = [
        {"params": [model[0].weight, model[2].weight], "weight_decay": 0.1},
        {"params": [model[0].bias, model[2].bias], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=9.0)
    run = holdfast.Run(
        run_dir=folder / "run",
        checkpoint_resume_from=str(source),
        checkpoint_fresh_parts=FRESH,
    )
    run.track(model=model, optimizer=optimizer)
    run.start()
    expected, whole, _ = foreign.trained()
    for name, parameter in model.named_parameters():
        assert isinstance(parameter.data, DTensor)
        assert torch.equal(parameter.detach().full_tensor(), expected.get_parameter(name).detach()), name
    entries = whole.state_dict()["state"]
    for number, entry in optimizer.state_dict()["state"].items():
        assert torch.equal(entry["exp_avg"].full_tensor(), entries[number]["exp_avg"])
    assert optimizer.param_groups[0]["lr"] == whole.param_groups[0]["lr"]
    run.close()
    dist.destroy_process_group()


@pytest.mark.parametrize("layout", ["Hugging Face Trainer", "torchtitan"])
def test_two_ranks_read_their_shards_from_files_of_one(layout: str, tmp_path: Path) -> None:
    path = foreign.LAYOUTS[layout](tmp_path / "theirs")
    with ThreadPoolExecutor(2) as pool:
        ranks = [pool.submit(forked, partial(rank_of_two, rank, tmp_path, path)) for rank in (0, 1)]
    assert [rank.result() for rank in ranks] == [0, 0]


# --- strangers ----------------------------------------------------------------------------------------------


class Sprung:
    """What a hostile checkpoint would have run."""

    def __reduce__(self) -> Any:
        return os.system, ("touch sprung",)


@pytest.mark.parametrize("layout", ["Lightning", "torch file", "Megatron", "Hugging Face Trainer"])
def test_nothing_that_is_stored_is_run_wherever_it_lies(
    layout: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    path = foreign.LAYOUTS[layout](tmp_path / "theirs")
    file = {"Megatron": path / "common.pt", "Hugging Face Trainer": path / "scheduler.pt"}.get(layout, path)
    state = torch.load(file, weights_only=False)
    torch.save({**state, "more": Sprung()}, file)
    assert ckpt("ls", path).code == 0
    assert ckpt("verify", path).code == 0
    found, _ = tracked()
    if layout == "Hugging Face Trainer":
        with pytest.raises(
            IncompleteStateError, match=r"schedule\.more holds an object of (posix|nt)\.system"
        ):
            load(path, found)
    else:
        load(path, found, fresh=["rng"])
    assert not (tmp_path / "sprung").exists()


def test_a_generator_of_one_rank_in_a_flat_file_is_not_given_to_two(tmp_path: Path) -> None:
    path = foreign.torch_file(tmp_path)
    torch.save({**torch.load(path), "rng_state": foreign.generators()}, path)
    found, _ = tracked()
    with pytest.raises(IncompleteStateError, match="its rng is of 1 rank alone, and 2 ranks would resume"):
        load(path, found, world=2)
    assert "rng" not in load(path, found, world=2, fresh=["rng"]).own
    assert "rng" in load(path, found).own


def test_the_step_is_the_one_that_a_file_tells_whatever_its_name(tmp_path: Path) -> None:
    foreign.torch_file(tmp_path, step=1200).rename(tmp_path / "epoch3.pt")
    run, _ = begin(tmp_path / "run", tmp_path / "epoch3.pt")
    run.close()
    assert run.step == 1200


@pytest.mark.parametrize("step", [-1, 10**12, 3.5, True, "7"])
def test_what_cannot_be_a_step_is_none(step: object, tmp_path: Path) -> None:
    path = foreign.torch_file(tmp_path, step=40)
    torch.save({**torch.load(path), "step": step}, path)
    run, _ = begin(tmp_path / "run", path)
    run.close()
    assert run.step == 40


def test_weights_that_lie_about_are_no_run_to_go_on_from(tmp_path: Path) -> None:
    """A directory in which a run is to begin may hold weights for whatever purpose."""
    torch.save(foreign.trained()[0].state_dict(), tmp_path / "pretrained.pt")
    assert holdfast.resolve_resume(tmp_path).chosen == "fresh start"


def test_plain_metadata_makes_no_class_but_its_own(tmp_path: Path) -> None:
    """Vetted once as data, and once more by whoever makes torch's objects of it."""
    state = {"model": foreign.build()[0].state_dict()}
    foreign.save_dcp(state, tmp_path / "step_7")
    data = (tmp_path / "step_7" / ".metadata").read_bytes()
    found, _ = tracked("model")
    load_stock(tmp_path / "step_7", found)
    assert data.count(b"TensorProperties") > 0
    (tmp_path / "step_7" / ".metadata").write_bytes(data.replace(b"TensorProperties", b"TensorPropertieZ"))
    with pytest.raises(CheckpointError, match=r"malformed \.metadata: it refers to .*TensorPropertieZ"):
        load_stock(tmp_path / "step_7", found)


@pytest.mark.parametrize("layout", ["Lightning", "torchtitan"])
def test_a_run_that_ends_before_its_first_save_begins_there_once_more(layout: str, tmp_path: Path) -> None:
    path = foreign.LAYOUTS[layout](tmp_path / "theirs")
    for _ in range(2):
        run, made = begin(tmp_path / "run", path)
        run.close()
        assert run.step == foreign.STEP
        same(made)
    located = ckpt("locate", tmp_path / "run")
    assert located.code == 0, located.text
    assert f"would resume at step {foreign.STEP} from {path}" in located.out
    asked = ckpt("locate", tmp_path / "run", "--resume-from", path)
    assert f"would resume (resume_from = '{path}') at step {foreign.STEP}" in asked.out
    os.truncate(path if path.is_file() else next(path.glob("*.distcp")), 300)
    with pytest.raises(NoValidRungError, match=path.name.replace("+", r"\+")):
        begin(tmp_path / "run", path)
