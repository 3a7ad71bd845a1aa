"""Checkpoints in the layouts of other projects, as their own code writes them, made by hand and small."""

from __future__ import annotations

import json
import random
import warnings
from argparse import Namespace
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file
from torch import nn

STEP = 40


def build(seed: int = 0) -> tuple[nn.Module, torch.optim.Optimizer, Any]:
    """A model, its optimizer in two groups, and a schedule."""
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 4))
    groups = [
        {"params": [model[0].weight, model[2].weight], "weight_decay": 0.1},
        {"params": [model[0].bias, model[2].bias], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=0.01 * (seed + 1))
    return model, optimizer, torch.optim.lr_scheduler.StepLR(optimizer, 3)


def trained(seed: int = 1) -> tuple[nn.Module, torch.optim.Optimizer, Any]:
    """The same after a few steps, so that every part has a state."""
    model, optimizer, schedule = build(seed)
    for _ in range(4):
        optimizer.zero_grad()
        model(torch.randn(5, 6)).pow(2).sum().backward()
        optimizer.step()
        schedule.step()
    return model, optimizer, schedule


def names_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[int, str]:
    """The parameters' names by the numbers that an optimizer's state_dict has for them."""
    name = {id(parameter): one for one, parameter in model.named_parameters()}
    order = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    return {number: name[id(parameter)] for number, parameter in enumerate(order)}


def generators() -> dict[str, Any]:
    return {"python": random.getstate(), "numpy": numpy.random.get_state(), "cpu": torch.get_rng_state()}


def save_dcp(state: dict[str, Any], path: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        dcp.save(state, checkpoint_id=path, no_dist=True)


def hf_trainer(root: Path, *, ranks: int = 1, prefix: str = "", step: int = STEP) -> Path:
    model, optimizer, schedule = trained()
    path = root / f"checkpoint-{step}"
    path.mkdir(parents=True)
    save_file(
        {f"{prefix}{name}": one for name, one in model.state_dict().items()}, path / "model.safetensors"
    )
    torch.save(optimizer.state_dict(), path / "optimizer.pt")
    torch.save(schedule.state_dict(), path / "scheduler.pt")
    for rank in range(ranks):
        name = "rng_state.pth" if ranks == 1 else f"rng_state_{rank}.pth"
        torch.save(generators(), path / name)
    (path / "trainer_state.json").write_text(json.dumps({"global_step": step, "epoch": 0.5}))
    return path


def hf_model(root: Path) -> Path:
    """Sharded, with an index."""
    model, *_ = trained()
    path = root / "model"
    path.mkdir(parents=True)
    files: dict[str, str] = {}
    for number, (name, tensor) in enumerate(model.state_dict().items(), 1):
        files[name] = f"model-{number:05}-of-00004.safetensors"
        save_file({name: tensor}, path / files[name])
    index = {"metadata": {"total_size": 1}, "weight_map": files}
    (path / "model.safetensors.index.json").write_text(json.dumps(index))
    (path / "config.json").write_text("{}")
    return path


def lightning(root: Path, step: int = STEP) -> Path:
    model, optimizer, schedule = trained()
    root.mkdir(parents=True, exist_ok=True)
    path = root / f"epoch=1-step={step}.ckpt"
    state = {
        "epoch": 1,
        "global_step": step,
        "pytorch-lightning_version": "2.6.6",
        "state_dict": {f"net.{name}": one for name, one in model.state_dict().items()},
        "loops": {"fit_loop": {"epoch_progress": {"total": {"ready": 1}}}},
        "callbacks": {"ModelCheckpoint": {"kth_value": torch.tensor(torch.inf)}},
        "optimizer_states": [optimizer.state_dict()],
        "lr_schedulers": [schedule.state_dict()],
        "hparams": Namespace(lr=0.01),
    }
    torch.save(state, path)
    return path


def torch_file(root: Path, step: int = STEP) -> Path:
    model, optimizer, schedule = trained()
    root.mkdir(parents=True, exist_ok=True)
    path = root / f"ckpt_{step}.pt"
    parts = {"model": model, "optimizer": optimizer, "lr_scheduler": schedule}
    torch.save({**{name: one.state_dict() for name, one in parts.items()}, "step": step}, path)
    return path


def torchtitan(root: Path, step: int = STEP) -> Path:
    model, optimizer, schedule = trained()
    named = names_of(model, optimizer)
    packed = optimizer.state_dict()
    state: dict[str, Any] = dict(model.state_dict())
    flat: dict[str, Any] = {}
    for group in packed["param_groups"]:
        for number in group["params"]:
            for key, value in packed["state"][number].items():
                flat[f"state.{named[number]}.{key}"] = value
            for key, value in group.items():
                if key != "params":
                    flat[f"param_groups.{named[number]}.{key}"] = value
    state |= {"optimizer": flat, "lr_scheduler": schedule.state_dict()}
    state |= {"train_state": {"step": step, "ntokens_seen": 64}, "dataloader": {"dp_rank_0": b"x"}}
    path = root / f"step-{step}"
    save_dcp(state, path)
    return path


def kempner(root: Path, step: int = STEP) -> Path:
    model, optimizer, schedule = trained()
    named, packed = names_of(model, optimizer), optimizer.state_dict()
    states = {named[number]: entry for number, entry in packed["state"].items()}
    groups = [
        {**group, "params": [named[one] for one in group["params"]]} for group in packed["param_groups"]
    ]
    path = root / f"step_{step}"
    save_dcp({"model": model.state_dict(), "optimizer": {"state": states, "param_groups": groups}}, path)
    rng = generators()
    rng["torch_cpu"] = rng.pop("cpu")
    train = {"step": step, "tokens_seen": 64, "rng": rng, "scheduler": schedule.state_dict()}
    torch.save(train, path / "train_state.pt")
    (path / "metadata.json").write_text(json.dumps({"step": step, "tokens_seen": 64}))
    (root / "latest").symlink_to(path.name)
    return path


def megatron(root: Path, step: int = STEP, *, hyper_parameters: bool = True) -> Path:
    model, optimizer, schedule = trained()
    named, packed = names_of(model, optimizer), optimizer.state_dict()
    state: dict[str, Any] = dict(model.state_dict())
    for number, entry in packed["state"].items():
        state |= {f"optimizer.state.{key}.{named[number]}": value for key, value in entry.items()}
    path = root / f"iter_{step:07d}"
    save_dcp(state, path)
    common: dict[str, Any] = {
        "args": Namespace(lr=0.1, world_size=1),
        "iteration": step,
        "checkpoint_version": 3.0,
    }
    common["opt_param_scheduler"] = schedule.state_dict()
    if hyper_parameters:
        groups = [{**g, "params": [named[one] for one in g["params"]]} for g in packed["param_groups"]]
        common["optimizer"] = {"param_groups": groups}
    torch.save(common, path / "common.pt")
    backends = {"sharded_backend": "torch_dist", "sharded_backend_version": 1, "common_backend": "torch"}
    (path / "metadata.json").write_text(json.dumps(backends))
    (root / "latest_checkpointed_iteration.txt").write_text(str(step))
    return path


class LocalState:
    """As nvidia-resiliency-ext's state dicts are pickled: an object with all in its `state_dict`."""

    def __init__(self, state: dict[str, Any]) -> None:
        self.state_dict = state
        self._is_hollow = False


def megatron_local(root: Path, ranks: int = 2, step: int = STEP) -> Path:
    first = None
    for rank in range(ranks):
        model, *_ = trained(rank + 1)
        folder = root / str(rank)
        folder.mkdir(parents=True)
        path = folder / f"iter_{step:07d}_{rank}_local.pt"
        torch.save(LocalState({"model": dict(model.state_dict()), "iteration": step}), path)
        first = first or path
    assert first is not None
    return first


LAYOUTS: dict[str, Callable[[Path], Path]] = {
    "Hugging Face Trainer": hf_trainer,
    "Hugging Face model": hf_model,
    "Lightning": lightning,
    "torch file": torch_file,
    "torchtitan": torchtitan,
    "KempnerForge": kempner,
    "Megatron": megatron,
    "Megatron local": megatron_local,
}
FULL = [name for name in LAYOUTS if name not in ("Hugging Face model", "Megatron local")]
"""Those that hold a model, its optimizer and its schedule."""
