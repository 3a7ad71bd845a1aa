"""Through the libraries themselves: a run begins with what they write, and they read what we write."""

from __future__ import annotations

import json
import os
import random
import shutil
import warnings
from argparse import Namespace
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import holdfast
from holdfast.checkpoint.choose.taking import load_foreign
from holdfast.checkpoint.foreign.recognition import checkpoints_in
from holdfast.checkpoint.state import Tracked, first_difference
from holdfast.errors import CheckpointError
from kit.commands import ckpt
from kit.tiny import checkpoints, forked

pytestmark = [pytest.mark.drill, pytest.mark.timeout(300)]


def begin(run_dir: Path, source: Path, parts: dict[str, Any], **settings: object) -> holdfast.Run:
    run = holdfast.Run(run_dir=run_dir, checkpoint_resume_from=str(source), **settings)
    run.track(**parts)
    run.start()
    return run


def net() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))


def saved(run: holdfast.Run, run_dir: Path) -> Path:
    """The first save after it, which is verified."""
    run.save()
    run.close()
    (path,) = checkpoints(run_dir)
    assert ckpt("verify", path).code == 0
    return path


# --- transformers -------------------------------------------------------------------------------------------


def gpt2() -> Any:
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(3)
    sizes = {"n_layer": 2, "n_head": 2, "n_embd": 16, "vocab_size": 64, "n_positions": 16}
    return GPT2LMHeadModel(GPT2Config(**sizes, bos_token_id=0, eos_token_id=0))


def test_a_trainers_checkpoint_goes_on_in_a_run_and_its_weights_go_back(tmp_path: Path) -> None:
    from transformers import GPT2LMHeadModel, Trainer, TrainingArguments

    model = gpt2()
    rows = [{key: torch.randint(0, 64, (8,)) for key in ("input_ids", "labels")} for _ in range(16)]
    arguments = TrainingArguments(
        str(tmp_path / "trainer"), max_steps=4, save_steps=2, per_device_train_batch_size=2, use_cpu=True,
        report_to=[], disable_tqdm=True,
    )  # fmt: skip
    trainer = Trainer(model=model, args=arguments, train_dataset=rows)
    trainer.train()
    theirs = {
        "model": dict(model.state_dict()),
        "optimizer": trainer.optimizer.state_dict(),
        "schedule": trainer.lr_scheduler.state_dict(),
    }
    python = torch.load(tmp_path / "trainer/checkpoint-4/rng_state.pth", weights_only=False)["python"]

    ours = gpt2()
    with torch.no_grad():
        for parameter in ours.parameters():
            parameter.zero_()
    flat = (
        [one for one in ours.parameters() if one.dim() > 1],
        [one for one in ours.parameters() if one.dim() < 2],
    )
    optimizer = torch.optim.AdamW([{"params": one} for one in flat], lr=1.0)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda _: 1.0)
    parts = {"model": ours, "optimizer": optimizer, "schedule": schedule}
    run = begin(tmp_path / "run", tmp_path / "trainer", parts)
    assert run.step == 4
    assert random.getstate() == python
    found = {"model": dict(ours.state_dict()), "optimizer": optimizer.state_dict()}
    assert not first_difference(found["model"], theirs["model"], "model")
    assert not first_difference(found["optimizer"]["state"], theirs["optimizer"]["state"], "optimizer")
    assert [one["lr"] for one in optimizer.param_groups] == [
        one["lr"] for one in theirs["optimizer"]["param_groups"]
    ]
    assert schedule.last_epoch == theirs["schedule"]["last_epoch"]
    path = saved(run, tmp_path / "run")

    back = ckpt("export", path, tmp_path / "hf", "--shard-size", "8KB")
    assert back.code == 0, back.text
    assert len(list((tmp_path / "hf").glob("model-*.safetensors"))) > 3
    shutil.copy(tmp_path / "trainer/checkpoint-4/config.json", tmp_path / "hf")
    again = GPT2LMHeadModel.from_pretrained(tmp_path / "hf")
    assert not first_difference(dict(again.state_dict()), theirs["model"], "model")


def test_a_pretrained_model_is_what_a_run_begins_with(tmp_path: Path) -> None:
    model = gpt2()
    model.save_pretrained(tmp_path / "pretrained", max_shard_size="8KB")
    assert (tmp_path / "pretrained/model.safetensors.index.json").is_file()
    ours = gpt2()
    with torch.no_grad():
        for parameter in ours.parameters():
            parameter.zero_()
    run = begin(tmp_path / "run", tmp_path / "pretrained", {"model": ours})
    run.close()
    assert not first_difference(dict(ours.state_dict()), dict(model.state_dict()), "model")


# --- Lightning ----------------------------------------------------------------------------------------------


def test_a_lightning_checkpoint_goes_on_in_a_run_and_its_weights_go_back(tmp_path: Path) -> None:
    import lightning
    from lightning.pytorch.callbacks import ModelCheckpoint

    class Module(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.save_hyperparameters()
            self.net = net()

        def training_step(self, batch: Any, index: int) -> Any:
            return self.net(batch[0]).pow(2).mean()

        def configure_optimizers(self) -> Any:
            optimizer = torch.optim.AdamW(self.parameters(), lr=1e-3)
            schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2)
            return [optimizer], [{"scheduler": schedule, "interval": "step"}]

    lightning.seed_everything(1)
    module = Module()
    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(torch.randn(16, 8)), batch_size=2)
    keeps = ModelCheckpoint(tmp_path / "theirs", every_n_train_steps=2, save_top_k=-1, save_last=True)
    trainer = lightning.Trainer(
        max_steps=4, accelerator="cpu", logger=False, enable_progress_bar=False, callbacks=[keeps],
        enable_model_summary=False, default_root_dir=tmp_path,
    )  # fmt: skip
    trainer.fit(module, loader)
    model = net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=7.0)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 5)
    run = begin(
        tmp_path / "run", tmp_path / "theirs", {"model": model, "optimizer": optimizer, "schedule": schedule}
    )
    assert run.step == 4
    theirs, ours = module.net.state_dict(), dict(model.state_dict())
    assert not first_difference(ours, dict(theirs), "model")
    assert not first_difference(optimizer.state_dict(), trainer.optimizers[0].state_dict(), "optimizer")
    assert schedule.state_dict() == trainer.lr_scheduler_configs[0].scheduler.state_dict()
    path = saved(run, tmp_path / "run")

    assert ckpt("export", path, tmp_path / "weights.pt", "--format", "torch").code == 0
    weights = torch.load(tmp_path / "weights.pt", weights_only=True)
    again = Module()
    again.net.load_state_dict(weights)
    assert not first_difference(dict(again.net.state_dict()), dict(theirs), "model")


# --- torchtitan ---------------------------------------------------------------------------------------------


class State:
    def __init__(self, **state: Any) -> None:
        self.state = state

    def state_dict(self) -> dict[str, Any]:
        return dict(self.state)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.state = dict(state)


class Schedule(State):
    """A schedule as torchtitan's container of them looks: its last epoch is all that is kept."""


def alone(store: Path) -> None:
    dist.init_process_group("gloo", store=dist.FileStore(str(store), 1), rank=0, world_size=1)
    os.environ |= {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0"}


def titans_save(place: Path) -> None:
    """torchtitan's own manager, container of optimizers included, in a process of its own."""
    from torchtitan.components.checkpoint import CheckpointManager
    from torchtitan.components.optimizer import OptimizersContainer
    from torchtitan.components.optimizer.optimizer import ParamGroupConfig

    alone(place / "store")
    torch.manual_seed(2)
    model = net()
    group = ParamGroupConfig(pattern=".*", optimizer_name="AdamW", optimizer_kwargs={"lr": 1e-3})
    wanted = OptimizersContainer.Config(param_groups=[group], implementation="for-loop")
    optimizers = OptimizersContainer(wanted, model_parts=[model])
    for _ in range(4):
        model(torch.randn(4, 8)).sum().backward()
        optimizers.step()
        optimizers.zero_grad()
    chosen = CheckpointManager.Config(enable=True, interval=2, folder="theirs", last_save_model_only=False)
    manager = CheckpointManager(
        chosen, dataloader=State(dp_rank_0=b"x", world_size=1), model_parts=[model], optimizers=optimizers,
        lr_schedulers=Schedule(last_epoch=4), states={"train_state": State(step=4, ntokens_seen=9)},
        sd_adapter=None, base_folder=str(place),
    )  # fmt: skip
    manager.save(4)
    manager.close()
    packed = optimizers.optimizers[0].state_dict()
    torch.save({"model": model.state_dict(), "optimizer": packed["state"]}, place / "expected.pt")
    dist.destroy_process_group()


def test_a_torchtitan_checkpoint_goes_on_in_a_run_and_is_imported(tmp_path: Path) -> None:
    assert forked(partial(titans_save, tmp_path), timeout=120) == 0
    expected = torch.load(tmp_path / "expected.pt", weights_only=True)
    for source in (tmp_path / "theirs", tmp_path / "imported"):
        if source.name == "imported":
            done = ckpt("import", tmp_path / "theirs", source)
            assert done.code == 0, done.text
            (source,) = checkpoints(source)
        model = net()
        optimizer = torch.optim.AdamW(model.parameters(), lr=7.0)
        parts = {"model": model, "optimizer": optimizer, "scheduler": Schedule(last_epoch=0)}
        run = begin(tmp_path / f"run of {source.parent.name}", source, parts)
        run.close()
        assert run.step == 4
        assert not first_difference(dict(model.state_dict()), dict(expected["model"]), "model")
        assert not first_difference(optimizer.state_dict()["state"], expected["optimizer"], "optimizer")
        assert optimizer.param_groups[0]["lr"] == 1e-3
        assert parts["scheduler"].state_dict() == {"last_epoch": 4}


# --- Megatron -----------------------------------------------------------------------------------------------


class Decoder(nn.Module):
    """Two layers, as Megatron stacks them: `decoder.layers.weight` of shape (2, …)."""

    def __init__(self) -> None:
        super().__init__()
        self.decoder = nn.Module()
        self.decoder.layers = nn.ModuleList(nn.Linear(4, 4, bias=False) for _ in range(2))
        self.decoder.final = nn.Linear(4, 8)


def megatrons_save(place: Path, ranks: int = 1) -> None:
    """Megatron-core's own writer. It asks for a device only to wait for it, which a host has no need of."""
    torch.cuda.synchronize = lambda *_: None  # type: ignore[assignment]
    torch.cuda.current_device = lambda: "cpu"  # type: ignore[assignment, return-value]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from megatron.core.dist_checkpointing import ShardedTensor, save
        from megatron.core.dist_checkpointing.mapping import ShardedObject

    alone(place / "store")
    torch.manual_seed(2)
    model, state = Decoder(), dict[str, Any]()
    for number, layer in enumerate(model.decoder.layers):
        state[f"layer {number}"] = ShardedTensor.from_rank_offsets(
            "decoder.layers.weight", layer.weight.detach(), (0, number, 2), prepend_axis_num=1
        )
    for name in ("weight", "bias"):
        tensor = getattr(model.decoder.final, name).detach()
        state[name] = ShardedTensor.from_rank_offsets(f"decoder.final.{name}", tensor)
    for rank in range(ranks):  # as that many tensor parallel ones would
        random.seed(rank)
        generators = [{"random_rng_state": random.getstate(), "torch_rng_state": torch.get_rng_state()}]
        state[f"rng {rank}"] = ShardedObject("rng_state", generators, (1, ranks), (0, rank))
    state |= {
        "args": Namespace(lr=0.1, world_size=ranks), "iteration": 4, "checkpoint_version": 3.0,
        "opt_param_scheduler": {"max_lr": 0.1, "num_steps": 64},
    }  # fmt: skip
    path = place / "theirs" / "iter_0000004"
    path.mkdir(parents=True)
    save(state, str(path))
    (place / "theirs" / "latest_checkpointed_iteration.txt").write_text("4")
    torch.save(model.state_dict(), place / "expected.pt")
    dist.destroy_process_group()


@pytest.fixture
def megatron(tmp_path: Path) -> Path:
    assert forked(partial(megatrons_save, tmp_path), timeout=120) == 0
    return tmp_path


def test_a_megatron_checkpoint_goes_on_in_a_run(megatron: Path) -> None:
    assert ckpt("verify", megatron / "theirs").code == 0
    model, schedule = Decoder(), Schedule()
    run = begin(megatron / "run", megatron / "theirs", {"model": model, "schedule": schedule})
    assert run.step == 4
    expected = torch.load(megatron / "expected.pt", weights_only=True)
    assert not first_difference(dict(model.state_dict()), dict(expected), "model")
    assert schedule.state_dict() == {"max_lr": 0.1, "num_steps": 64}
    saved(run, megatron / "run")


def test_each_tensor_parallel_rank_gets_the_generators_that_megatron_kept_for_it(tmp_path: Path) -> None:
    assert forked(partial(megatrons_save, tmp_path, ranks=2), timeout=120) == 0
    (source,) = checkpoints_in(tmp_path / "theirs")
    for rank in (1, 0):
        tracked = Tracked()
        tracked.add("model", Decoder())
        tracked.add("schedule", Schedule())
        tracked.begin()
        found = load_foreign(source, tracked, rank, 2).own["rng"]["python"]
        random.seed(rank)
        assert found == random.getstate()


def test_a_flipped_byte_in_a_megatron_checkpoint_is_found(megatron: Path) -> None:
    shard = next((megatron / "theirs" / "iter_0000004").glob("*.distcp"))
    data = bytearray(shard.read_bytes())
    expected = torch.load(megatron / "expected.pt", weights_only=True)["decoder.final.weight"]
    for path in shard.parent.glob("*.distcp"):
        data = bytearray(path.read_bytes())
        if (at := data.find(expected.numpy().tobytes())) > 0:
            data[at + 3] ^= 1
            path.write_bytes(data)
    result = ckpt("verify", megatron / "theirs")
    assert result.code == 1
    assert "altered" in result.out


def megatron_keeps(place: Path, rank: int, world: int) -> None:
    """Its local checkpoints: nvidia-resiliency-ext's manager, and Megatron-core's state dict in it."""
    torch.cuda.synchronize = lambda *_: None  # type: ignore[assignment]
    torch.cuda.current_device = lambda: "cpu"  # type: ignore[assignment, return-value]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from megatron.core.dist_checkpointing import ShardedTensor
        from megatron.core.dist_checkpointing.tensor_aware_state_dict import MCoreTensorAwareStateDict
        from nvidia_resiliency_ext.checkpointing.local.ckpt_managers.local_manager import (
            LocalCheckpointManager,
        )
    store = dist.FileStore(str(place / "store"), world)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world)
    torch.manual_seed(2)
    model, state = Decoder(), dict[str, Any]()
    for number, layer in enumerate(model.decoder.layers):
        state[f"layer {number}"] = ShardedTensor.from_rank_offsets(
            "decoder.layers.weight",
            layer.weight.detach(),
            (0, number, 2),
            prepend_axis_num=1,
            replica_id=rank,
        )
    for name in ("weight", "bias"):
        tensor = getattr(model.decoder.final, name).detach()
        key = f"decoder.final.{name}"
        state[name] = ShardedTensor.from_rank_offsets(key, tensor, replica_id=rank)
    state |= {"iteration": 4, "opt_param_scheduler": {"num_steps": 64}}
    kept, _ = MCoreTensorAwareStateDict.from_state_dict(state, algo="fully_parallel")
    LocalCheckpointManager(place / "theirs").save(kept, 4, is_async=False)
    if rank == 0:
        torch.save(model.state_dict(), place / "expected.pt")
    dist.destroy_process_group()


def test_megatrons_local_checkpoints_give_each_rank_what_it_had(tmp_path: Path) -> None:
    with ThreadPoolExecutor(2) as pool:
        ranks = [pool.submit(forked, partial(megatron_keeps, tmp_path, rank, 2), 120) for rank in (0, 1)]
    assert [rank.result() for rank in ranks] == [0, 0]
    assert len(list((tmp_path / "theirs").glob("*/iter_0000004_*_local.pt"))) == 2
    assert ckpt("verify", tmp_path / "theirs").code == 0
    expected = torch.load(tmp_path / "expected.pt", weights_only=True)
    (source,) = checkpoints_in(tmp_path / "theirs")
    for rank in (0, 1):
        model, schedule, tracked = Decoder(), Schedule(), Tracked()
        tracked.add("model", model)
        tracked.add("schedule", schedule)
        tracked.begin()
        load_foreign(source, tracked, rank, 2).apply()
        assert not first_difference(dict(model.state_dict()), dict(expected), "model")
        assert schedule.state_dict() == {"num_steps": 64}
    (tmp_path / "theirs" / "1" / "iter_0000004_1_local.pt").unlink()
    with pytest.raises(CheckpointError, match="is left to another rank's file, and none here has it"):
        load_foreign(source, tracked, 0, 2)


def test_the_index_is_what_the_library_wrote_itself(tmp_path: Path) -> None:
    """Our reading of an index against the library's own."""
    model = gpt2()
    model.save_pretrained(tmp_path / "theirs", max_shard_size="8KB")
    done = ckpt("import", tmp_path / "theirs", tmp_path / "imported")
    assert done.code == 0, done.text
    (path,) = checkpoints(tmp_path / "imported")
    assert ckpt("export", path, tmp_path / "ours", "--shard-size", "8KB").code == 0
    ours, theirs = (
        json.loads((tmp_path / name / "model.safetensors.index.json").read_text())["weight_map"]
        for name in ("ours", "theirs")
    )
    assert ours.keys() == theirs.keys()
    assert ckpt("diff", tmp_path / "theirs", tmp_path / "ours").code == 0
