"""torchao's own tensors under FSDP2: weights that are cast to float8 in the forward, and quantized ones."""

from __future__ import annotations

import logging
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard

import holdfast
from holdfast.base import local_part
from kit.ranks.together import together
from kit.tiny import checkpoints


@pytest.fixture(scope="module", autouse=True)
def _quietly() -> None:
    """torchao looks for kernels of devices that are not here, and says so; before ranks are forked."""
    logging.getLogger("torchao").setLevel(logging.CRITICAL)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import torchao.float8
        import torchao.prototype.mx_formats.mx_tensor
        import torchao.quantization  # noqa: F401


def float8_model() -> nn.Module:
    """Every weight is a subclass within a DTensor, which casts it to float8 for the forward."""
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(32, 48, bias=False), nn.ReLU(), nn.Linear(48, 32, bias=False))
    config = Float8LinearConfig(enable_fsdp_float8_all_gather=True, emulate=True)
    convert_to_float8_training(model, config=config)
    return fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))


def trained(run_dir: Path, steps: int, until: int) -> dict[str, Any]:
    model = float8_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
    run = holdfast.Run(run_dir=run_dir, checkpoint_interval=0)
    run.track(model=model, optimizer=optimizer)
    assert run.start() == steps
    before = [_whole(one) for one in model.parameters()]
    while run.step < until:
        run.begin_step()
        for parameter in model.parameters():  # without a forward: gloo cannot gather float8
            held: Any = parameter
            gradient = local_part(held)._tensor.detach() / 2  # type: ignore[attr-defined]
            like = {"shape": held.shape, "stride": held.stride()}
            held.grad = DTensor.from_local(
                gradient, held.device_mesh, held.placements, run_check=False, **like
            )
        optimizer.step()
        optimizer.zero_grad()
        run.end_step()
    run.finish()
    moments = [_whole(optimizer.state[one]["exp_avg"]) for one in model.parameters()]
    return {"before": before, "after": [_whole(one) for one in model.parameters()], "moments": moments}


def _whole(parameter: Any) -> list[float]:
    """All shards of a parameter, whatever is around its values here."""
    local: Any = local_part(parameter)
    mine = getattr(local, "_tensor", local).flatten().tolist()
    shards: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(shards, mine)
    return [value for one in shards for value in one]


@pytest.mark.drill
def test_training_with_float8_resumes_bit_for_bit_and_on_other_ranks(tmp_path: Path) -> None:
    def on(run: str, world: int, steps: int, until: int) -> Any:
        place = tmp_path / f"{run}-{world}-{steps}"
        place.mkdir()
        return together(place, world, lambda rank: trained(tmp_path / run, steps, until))[0]

    undisturbed = on("whole", 2, 0, 4)
    on("parted", 2, 0, 2)
    second = on("parted", 2, 2, 4)
    assert (second["after"], second["moments"]) == (undisturbed["after"], undisturbed["moments"])
    third, longer = on("parted", 3, 4, 5), on("whole", 2, 4, 5)
    assert third["before"] == undisturbed["after"]
    assert (third["after"], third["moments"]) == (longer["after"], longer["moments"])


def quantized(kind: str, rows: torch.Tensor) -> torch.Tensor:
    if kind == "float8":
        from torchao.quantization import Float8Tensor

        return Float8Tensor.from_hp(rows, torch.float8_e4m3fn)
    from torchao.prototype.mx_formats.mx_tensor import MXTensor

    made: torch.Tensor = MXTensor.to_mx(rows, torch.float8_e4m3fn, 32)
    return made


@pytest.mark.parametrize("kind", ["float8", "MXFP8"])
def test_quantized_weights_go_to_another_number_of_ranks(tmp_path: Path, kind: str) -> None:
    """Bytes and scales: one for each row, or for each 32 elements of it."""

    def shard(seed: int) -> tuple[Any, nn.Module]:
        torch.manual_seed(seed)
        rows = torch.randn(8, 64, dtype=torch.bfloat16).chunk(dist.get_world_size())[dist.get_rank()]
        local = quantized(kind, rows)
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        model = nn.Module()
        whole = DTensor.from_local(local, mesh, [Shard(0)], run_check=False)
        model.weight = nn.Parameter(whole, requires_grad=False)
        return local, model

    def work(rank: int) -> bool:
        saves = not checkpoints(tmp_path / "run")
        expected, _ = shard(7)
        _, model = shard(7 if saves else 8)
        run = holdfast.Run(run_dir=tmp_path / "run", checkpoint_interval=0)
        run.track(model=model)
        run.start()
        if saves:
            run.begin_step()
            run.end_step()
            run.finish()
        else:
            run.close()
        found: Any = local_part(model.weight)
        same = [
            torch.equal(getattr(found, name).view(torch.uint8), getattr(expected, name).view(torch.uint8))
            for name in ("qdata", "scale")
        ]
        return all(same)

    for world in (2, 4, 1):
        (tmp_path / str(world)).mkdir()
        assert together(tmp_path / str(world), world, work) == [True] * world
