"""Sharded state over meshes of any shape, saved on one and resumed on another, bit for bit."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import holdfast
from holdfast.base import local_part
from holdfast.checkpoint.format import manifest as manifests
from holdfast.errors import IncompleteStateError, SaveFailedError
from kit.ranks.together import together
from kit.tiny import checkpoints

HIDDEN = 6
"""Not a multiple of four: some shards are smaller, and some ranks have none."""


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(4, HIDDEN)
        self.down = nn.Linear(HIDDEN, 4, bias=False)
        self.scale = nn.Parameter(torch.ones(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(torch.tanh(self.up(x))) * self.scale.sum()


def _built(shape: tuple[int, ...]) -> nn.Module:
    """Over a mesh of (replicas,) shards and tensor-parallel ranks; of one rank, plain."""
    torch.manual_seed(0)
    model = Block()
    if not dist.is_initialized() or shape == ():
        return model
    names = ("replicate", "shard", "tensor")[-len(shape) :]
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
    if mesh["tensor"].size() > 1:
        plan: dict[str, Any] = {"up": ColwiseParallel(), "down": RowwiseParallel()}
        parallelize_module(model, mesh["tensor"], plan)
    fully_shard(model, mesh=mesh[names[:-1]] if len(names) > 2 else mesh["shard"])
    assert isinstance(model, FSDPModule)
    return model


def _whole(tensor: torch.Tensor) -> list[float]:
    full = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
    values: list[float] = full.detach().flatten().tolist()
    return values


def _state(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, list[float]]:
    found = {name: _whole(parameter) for name, parameter in model.named_parameters()}
    for name, parameter in model.named_parameters():
        moments: Mapping[str, Any] = optimizer.state[parameter]
        found |= {f"{name}.{key}": _whole(value) for key, value in moments.items()}
    return found


def _trained(run_dir: Path, shape: tuple[int, ...], until: int) -> tuple[Any, Any]:
    """The state as it was resumed (None at a first start), and at the end."""
    model = _built(shape)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, foreach=False)
    run = holdfast.Run(run_dir=run_dir, checkpoint_interval=0)
    run.track(model=model, optimizer=optimizer)
    before = _state(model, optimizer) if run.start() else None
    while run.step < until:
        run.begin_step()
        model(torch.ones(2, 4)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        run.end_step()
    run.finish()
    return before, _state(model, optimizer)


def _on(tmp_path: Path, shape: tuple[int, ...], until: int) -> tuple[Any, Any]:
    place = tmp_path / f"to{until}"
    place.mkdir()
    world = int(torch.tensor(shape).prod())
    found = together(place, world, lambda rank: _trained(tmp_path / "run", shape, until))
    assert all(one == found[0] for one in found)
    return found[0][0], found[0][1]


SMALL = [(2, 2), (3, 1), (1, 2)]
LARGE = [(2, 2, 2), (1, 4, 2), (4, 2), (1, 3), (2, 1, 3), (5, 1), ()]


@pytest.mark.parametrize(
    "shapes", [pytest.param(SMALL, id="2x2"), pytest.param(LARGE, id="2x2x2", marks=pytest.mark.drill)]
)
def test_state_goes_from_mesh_to_mesh(tmp_path: Path, shapes: list[tuple[int, ...]]) -> None:
    """Replicas, shards and tensor parallelism, uneven too; what two of them cut alike is strided."""
    saved: Any = None
    for number, shape in enumerate(shapes, start=1):
        before, after = _on(tmp_path, shape, number)
        assert before == saved
        saved = after
    first = manifests.read(checkpoints(tmp_path / "run")[-1])[0]
    assert first.world.layout["sizes"] == dict.fromkeys(
        ("replicate", "shard", "tensor")[-len(shapes[0]) :], 2
    )
    assert first.world.tied == []


class Experts(nn.Module):
    """Weights of a rank's own experts, sharded over the ranks that have the same ones, and a shared layer."""

    def __init__(self, meshes: list[list[int]], wide: bool) -> None:
        super().__init__()
        rank = dist.get_rank()
        which = next(at for at, ranks in enumerate(meshes) if rank in ranks)
        torch.manual_seed(0)
        self.shared = nn.Linear(4, HIDDEN)
        torch.manual_seed(100 + which)
        self.experts = nn.Linear(HIDDEN, 3 + which * wide)
        mine = [DeviceMesh("cpu", ranks) for ranks in meshes][which]
        fully_shard(self.experts, mesh=mine)
        fully_shard(self, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.experts(torch.tanh(self.shared(x)))
        return found


def _of_experts(
    run_dir: Path, meshes: list[list[int]], until: int, wide: bool, **settings: Any
) -> list[float]:
    """This rank's part of all weights and moments, with a gradient that waits for more, after some steps."""
    model = Experts(meshes, wide)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, foreach=False)
    run = holdfast.Run(run_dir=run_dir, checkpoint_interval=0, **settings)
    run.track(model=model, optimizer=optimizer)
    try:
        run.start()
    except IncompleteStateError:
        run.close()
        raise
    while run.step < until:
        run.begin_step()
        model(torch.full((2, 4), 1.0 + run.step)).square().sum().backward()
        if run.step % 2 == 0:
            optimizer.step()
            optimizer.zero_grad()
        run.end_step()
    run.finish()
    held: list[Any] = [*model.parameters()]
    held += [optimizer.state[one][key] for one in model.parameters() for key in ("exp_avg", "exp_avg_sq")]
    held += [one.grad for one in model.parameters() if one.grad is not None]
    return [value for one in held for value in local_part(one).flatten().tolist()]


@pytest.mark.parametrize(
    ("wide", "asynchronous"), [pytest.param(False, True, marks=pytest.mark.drill), (True, False)]
)
def test_distributed_tensors_that_ranks_hold_apart_under_one_name(
    tmp_path: Path, wide: bool, asynchronous: bool
) -> None:
    """DCP takes them for one tensor: experts of the second half came back as those of the first."""
    pairs, others = [[0, 1], [2, 3]], [[0, 2], [1, 3]]
    apart = {"checkpoint_async_save": asynchronous}

    def on(run: str, meshes: list[list[int]], until: int, **settings: Any) -> list[Any]:
        number = len(list(tmp_path.glob("on*")))
        (tmp_path / f"on{number}").mkdir()

        def work(rank: int) -> Any:
            try:
                return _of_experts(tmp_path / run, meshes, until, wide, **settings)
            except IncompleteStateError as refused:
                return str(refused)

        return together(tmp_path / f"on{number}", sum(map(len, meshes)), work)

    undisturbed = on("whole", pairs, 4)
    on("parted", pairs, 2, **apart)  # with gradients that the next step adds to
    first = manifests.read(checkpoints(tmp_path / "parted")[0])[0].world
    assert {name for name in first.tied if name.startswith("model.")} == {
        "model.experts.bias", "model.experts.weight"
    }  # fmt: skip
    assert "shared" not in str(first.tied)
    for told in (*on("parted", [[0], [1]], 4), *on("parted", others, 4)):
        assert "model.experts.bias (and 5 more) differs between the 4 ranks that saved it" in told
    assert on("parted", pairs, 4, **apart) == undisturbed


def _declared(run_dir: Path, shares: list[int], replicas: int, until: int) -> dict[str, Any]:
    """Train with the experts divided so, each rank's share of them sharded over `replicas` ranks."""
    torch.manual_seed(5)
    model, out = nn.Module(), sum(shares)
    shared, all_experts = nn.Linear(4, HIDDEN), nn.Linear(HIDDEN, out)
    layout: dict[str, Any] = {}
    experts = all_experts
    if dist.is_initialized():
        mesh = init_device_mesh("cpu", (len(shares), replicas), mesh_dim_names=("expert", "shard"))
        which = mesh["expert"].get_local_rank()
        first = sum(shares[:which])
        experts = nn.Linear(HIDDEN, shares[which])
        with torch.no_grad():
            experts.weight.copy_(all_experts.weight[first : first + shares[which]])
            experts.bias.copy_(all_experts.bias[first : first + shares[which]])
        fully_shard(experts, mesh=mesh["shard"])
        layout = {"layout": {"model.experts.*": holdfast.Split(mesh["expert"], [Shard(0)])}}
    model.shared, model.experts = shared, experts
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, foreach=False)
    run = holdfast.Run(run_dir=run_dir, checkpoint_interval=0)
    run.track(model=model, optimizer=optimizer, **layout)
    run.start()
    before = _gathered(model, optimizer) if run.step else None
    while run.step < until:
        run.begin_step()
        for number, parameter in enumerate(model.parameters(), start=run.step + 1):  # no rank's sum of others
            gradient = parameter.detach() * number
            parameter.grad = gradient if parameter.grad is None else parameter.grad + gradient
        if run.step % 2 == 0:
            optimizer.step()
            optimizer.zero_grad()
        run.end_step()
    run.finish()
    return {"before": before, "after": _gathered(model, optimizer)}


def _gathered(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Weights, moments and gradients of the whole, each rank's rows after the other's."""
    found: dict[str, Any] = {}
    for name, parameter in model.named_parameters():
        held = {"weight": parameter, "gradient": parameter.grad, **optimizer.state[parameter]}
        for what, one in held.items():
            mine = local_part(one).tolist() if one is not None else None
            each: list[Any] = [mine]
            if dist.is_initialized() and name.startswith("experts.") and isinstance(mine, list):
                each = [None] * dist.get_world_size()
                dist.all_gather_object(each, mine)
                mine = [row for rows in each for row in rows]
            found[f"{name}.{what}"] = mine
    return found


def test_what_ranks_hold_apart_is_divided_as_declared(tmp_path: Path) -> None:
    """Experts of other ranks, each share of them sharded: the same whole on any division of it."""
    whole = _declared(tmp_path / "whole", [7], 1, 6)["after"]
    saved: Any = None
    for until, (shares, replicas) in enumerate([([3, 4], 2), ([7], 2), ([4, 1, 2], 1), ([2, 5], 1)], start=2):
        (tmp_path / str(until)).mkdir()

        def work(
            rank: int, shares: list[int] = shares, replicas: int = replicas, until: int = until
        ) -> dict[str, Any]:
            return _declared(tmp_path / "run", shares, replicas, until)

        found = together(tmp_path / str(until), len(shares) * replicas, work)
        assert found[0]["before"] == saved
        saved = found[0]["after"]
    alone = _declared(tmp_path / "run", [7], 1, 6)
    assert alone["before"] == saved
    assert alone["after"] == whole
    assert [manifests.read(path)[0].world.tied for path in checkpoints(tmp_path / "run")] == [[]] * 5


class Eight(torch.Tensor):
    """A weight in eight bits with a scale for each row, and a table that no rank has a share of."""

    data8: torch.Tensor
    scale: torch.Tensor
    table: torch.Tensor

    @staticmethod
    def __new__(cls, data8: torch.Tensor, scale: torch.Tensor, table: torch.Tensor) -> Eight:
        made: Eight = torch.Tensor._make_wrapper_subclass(cls, data8.shape, dtype=torch.float32)
        made.data8, made.scale, made.table = data8, scale, table
        return made

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["data8", "scale", "table"], None

    @classmethod
    def __tensor_unflatten__(cls, inner: Any, context: Any, size: Any, stride: Any) -> Eight:
        return cls(inner["data8"], inner["scale"], inner["table"])

    @classmethod
    def __torch_dispatch__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function in (torch.ops.aten.detach.default, torch.ops.aten.view.default):
            return cls(*(one.detach() for one in (args[0].data8, args[0].scale, args[0].table)))
        raise NotImplementedError(str(function))

    def __repr__(self) -> str:  # type: ignore[override]
        return "Eight()"


class Quantized(nn.Module):
    """One weight of that kind, cut along its rows over all ranks; whole where there is one rank."""

    def __init__(self, first: int, *, per_rank_table: bool) -> None:
        super().__init__()
        rank, world = dist.get_rank(), dist.get_world_size()
        rows = torch.arange(first, first + 4 * 3, dtype=torch.int8).view(4, 3)
        mine = slice(rank * 4 // world, (rank + 1) * 4 // world)
        table = torch.full((5,), float(first + (rank if per_rank_table else 0)))
        local = Eight(rows[mine].clone(), rows[mine].float().sum(1), table)
        mesh = init_device_mesh("cpu", (world,))
        whole = DTensor.from_local(local, mesh, [Shard(0)], run_check=False)
        self.weight = nn.Parameter(whole, requires_grad=False)


def _inner(model: Quantized) -> list[list[float]]:
    local: Any = local_part(model.weight)
    return [one.flatten().tolist() for one in (local.data8, local.scale, local.table)]


class Opaque(torch.Tensor):
    """A weight that nobody can take apart."""

    @staticmethod
    def __new__(cls, size: tuple[int, ...]) -> Opaque:
        made: Opaque = torch.Tensor._make_wrapper_subclass(cls, size, dtype=torch.float32)
        return made

    @classmethod
    def __torch_dispatch__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function in (torch.ops.aten.detach.default, torch.ops.aten.view.default):
            return cls(tuple(args[0].size()))
        raise NotImplementedError(str(function))


def test_what_has_no_bytes_and_cannot_be_taken_apart_is_named_with_its_class(tmp_path: Path) -> None:
    """At the first save, and not at a resume."""

    def work(rank: int) -> str:
        mesh = init_device_mesh("cpu", (2,))
        model = nn.Module()
        whole = DTensor.from_local(Opaque((2, 3)), mesh, [Shard(0)], run_check=False)
        model.weight = nn.Parameter(whole, requires_grad=False)
        run = holdfast.Run(run_dir=tmp_path / "run", checkpoint_interval=0)
        run.track(model=model)
        run.start()
        run.begin_step()
        run.end_step()
        with pytest.raises(SaveFailedError) as refused:
            run.save()
        run.close()
        return str(refused.value)

    for told in together(tmp_path, 2, work):
        assert "model.weight: what this rank holds of it is an Opaque, which has no bytes of its own" in told
    assert checkpoints(tmp_path / "run") == []


@pytest.mark.parametrize("per_rank_table", [False, True])
def test_a_subclass_inside_a_distributed_tensor(tmp_path: Path, per_rank_table: bool) -> None:
    """A DTensor over a quantized weight ended the run. What is cut as the whole is reshards, too."""

    def work(rank: int) -> Any:
        first = 0 if not checkpoints(tmp_path / "run") else 50
        expected = _inner(Quantized(0, per_rank_table=per_rank_table))
        model = Quantized(first, per_rank_table=per_rank_table)
        run = holdfast.Run(run_dir=tmp_path / "run", checkpoint_interval=0)
        run.track(model=model)
        if per_rank_table and dist.get_world_size() == 4:
            with pytest.raises(
                IncompleteStateError, match=r"model\.weight\.table differs between the 2 ranks"
            ):
                run.start()
            run.close()
            return True
        if not run.start():
            run.begin_step()
            run.end_step()
            run.finish()
        else:
            run.close()
        return _inner(model) == expected

    for number, world in enumerate((2, 2, 4, 1)[: 3 if per_rank_table else 4]):
        (tmp_path / str(number)).mkdir()
        assert together(tmp_path / str(number), world, work) == [True] * world
