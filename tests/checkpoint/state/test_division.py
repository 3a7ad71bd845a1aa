"""Tensors that differ between ranks: declared as parts of larger ones, or kept and refused by name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Placement, Replicate, Shard
from torch.utils.data import DataLoader, TensorDataset

import holdfast
from holdfast.checkpoint.format import manifest as manifests
from holdfast.checkpoint.state.division import Cut, Division, SplitTensor
from holdfast.errors import IncompleteStateError, UsageError
from holdfast.record import ControlDirectory, tied_to_ranks
from kit.ranks.together import together
from kit.tiny import checkpoints

LOWEST = "lowest"


class Experts(nn.Module):
    """Some experts of a larger number, as one plain tensor, and a router that all ranks have alike."""

    def __init__(self, first: int, count: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.arange(first, first + count).float().repeat(3, 1).T.clone())
        self.router = nn.Parameter(torch.full((2,), 7.0))

    def forward(self) -> torch.Tensor:
        return self.weight.square().sum() + self.router.sum()


def _step(run: holdfast.Run, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    run.begin_step()
    model().backward()
    optimizer.step()
    optimizer.zero_grad()
    run.end_step()


def _trained(
    run_dir: Path, shares: list[int], rank: int, layout: Any, steps: int, until: int
) -> dict[str, Any]:
    """Train up to a step; this rank's experts and their momentum, before the first step and at the end."""
    first = sum(shares[:rank])
    model = Experts(first, shares[rank])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.125, momentum=0.5)
    run = holdfast.Run(run_dir=run_dir, checkpoint_interval=0)
    run.track(model=model, optimizer=optimizer, layout=layout)
    done = run.start()
    assert done == steps
    before = model.weight.tolist()
    while run.step < until:
        _step(run, model, optimizer)
    run.finish()
    return {
        "before": before,
        "after": model.weight.tolist(),
        "momentum": optimizer.state[model.weight]["momentum_buffer"].tolist(),
        "router": model.router.tolist(),
    }


def _whole(found: list[dict[str, Any]], what: str) -> list[list[float]]:
    return [row for one in found for row in one[what]]


@pytest.mark.parametrize("uneven", [False, True])
def test_declared_experts_go_to_any_number_of_ranks(tmp_path: Path, uneven: bool) -> None:
    """Each of 2 ranks has its own experts under the same name; on 3 ranks and on 1 they are the same."""
    run_dir = tmp_path / "run"

    def on(shares: list[int], steps: int, until: int) -> list[dict[str, Any]]:
        place = tmp_path / f"on{len(shares)}to{until}"
        place.mkdir()

        def work(rank: int) -> dict[str, Any]:
            layout = {"model.weight": holdfast.Split(dist.group.WORLD, 0)}
            return _trained(run_dir, shares, rank, layout, steps, until)

        return together(place, len(shares), work)

    two = on([4, 2] if uneven else [3, 3], 0, 2)
    three = on([4, 0, 2] if uneven else [2, 2, 2], 2, 3)  # and one with none at all
    assert _whole(three, "before") == _whole(two, "after")
    one = on([6], 3, 4)
    assert one[0]["before"] == _whole(three, "after")
    assert one[0]["router"] == [7.0 - 0.125 * sum((1, 1.5, 1.75, 1.875))] * 2
    alone = Experts(0, 6)
    optimizer = torch.optim.SGD(alone.parameters(), lr=0.125, momentum=0.5)
    for _ in range(4):
        alone().backward()
        optimizer.step()
        optimizer.zero_grad()
    assert one[0]["after"] == alone.weight.tolist()
    assert one[0]["momentum"] == optimizer.state[alone.weight]["momentum_buffer"].tolist()
    assert [manifests.read(path)[0].world.tied for path in checkpoints(run_dir)] == [[], [], []]


def test_what_is_not_declared_is_refused_by_name_at_another_number_of_ranks(tmp_path: Path) -> None:
    """Experts 100 and 101 came back as 100 on all three ranks of another world size, without an error."""

    def work(rank: int) -> str:
        model = nn.Linear(2, 2, bias=False)
        with torch.no_grad():
            model.weight.fill_(100 + rank)
        run = holdfast.Run(run_dir=tmp_path / "run", checkpoint_interval=0)
        run.track(model=model)
        if dist.get_world_size() == 3:
            with pytest.raises(IncompleteStateError) as refused:
                run.start()
            assert model.weight.tolist() == [[100.0 + rank] * 2] * 2
            run.close()
            return str(refused.value)
        if run.start():
            return str(model.weight[0, 0].item())
        run.begin_step()
        run.end_step()
        run.finish()
        return ""

    for number, world in enumerate((2, 3, 2)):
        (tmp_path / str(number)).mkdir()
        found = together(tmp_path / str(number), world, work)
        if world == 3:
            for told in found:
                assert (
                    "model.weight differs between the 2 ranks that saved it: rank 1 has one of its own"
                    in told
                )
                assert "Resume with 2 ranks" in told
    assert found == ["100.0", "101.0"]
    (saved,) = checkpoints(tmp_path / "run")
    assert manifests.read(saved)[0].world.tied == ["model.weight"]
    control = ControlDirectory.open(tmp_path / "run")
    assert tied_to_ranks(control) == "model.weight differs between ranks", "as a launcher asks"


@pytest.mark.parametrize("shared", [False, True])
def test_a_launcher_learns_that_each_rank_has_a_data_position_of_its_own(
    tmp_path: Path, shared: bool
) -> None:
    """Another number of ranks would be refused at its resume: that is known before it is started."""
    numbers = TensorDataset(torch.arange(8.0))
    loader: Any = holdfast.GlobalBatches(numbers, 2, seed=1) if shared else DataLoader(numbers, 2)
    run = holdfast.Run(run_dir=tmp_path / "run", checkpoint_interval=0)
    run.track(model=nn.Linear(1, 1))
    for _ in run.steps(loader, until=2):
        pass
    assert tied_to_ranks(ControlDirectory.open(tmp_path / "run")) == "", "fewer than one rank there are not"
    (saved,) = checkpoints(tmp_path / "run")
    manifest = manifests.read(saved)[0]
    of_two = msgspec.structs.replace(manifest, world=msgspec.structs.replace(manifest.world, size=2))
    assert manifests.what_ties(of_two) == ("" if shared else "the data position is one for each rank")


def test_the_same_bytes_in_another_shape_or_type_are_another_tensor(tmp_path: Path) -> None:
    """Zeros, as biases and moments begin: the save was refused, since one of them stood for both."""

    def work(rank: int) -> list[Any]:
        model = nn.Module()
        model.register_buffer("table", torch.zeros((2, 3) if rank else (3, 2)))
        model.register_buffer("kind", torch.zeros(2, dtype=torch.int32 if rank else torch.float32))
        model.register_buffer("empty", torch.zeros((0, 3) if rank else (4, 0)))
        run = holdfast.Run(run_dir=tmp_path / "run", checkpoint_interval=0)
        run.track(model=model)
        step = run.start()
        if not step:
            run.begin_step()
            run.end_step()
            run.finish()
        else:
            run.close()
        return [step, *(tuple(one.shape) for one in model.buffers())]

    for name in ("saved", "resumed"):
        (tmp_path / name).mkdir()
        found = together(tmp_path / name, 2, work)
    assert found == [[1, [3, 2], [2], [4, 0]], [1, [2, 3], [2], [0, 3]]]
    (saved,) = checkpoints(tmp_path / "run")
    assert manifests.read(saved)[0].world.tied == ["model.empty", "model.kind", "model.table"]


def test_the_lowest_ranks_is_taken_where_that_is_declared_or_ddp_does_so_itself(tmp_path: Path) -> None:
    """Running statistics: DDP hands rank 0's to all before each forward; elsewhere it must be said."""

    def work(rank: int) -> list[float]:
        declared, wrapped = nn.BatchNorm1d(2), nn.BatchNorm1d(2)
        ddp = nn.parallel.DistributedDataParallel(wrapped)
        run = holdfast.Run(run_dir=tmp_path / "run", checkpoint_interval=0)
        run.track(declared=declared, wrapped=wrapped, layout={"declared.running_*": LOWEST})
        if not run.start():
            run.begin_step()
            x = torch.full((4, 2), float(rank)) + torch.arange(8.0).view(4, 2)
            (declared(x) + ddp(x)).sum().backward()
            for parameter in (*declared.parameters(), *wrapped.parameters()):
                parameter.grad = None
            run.end_step()
            run.finish()
        else:
            run.close()
        return [*declared.running_mean.tolist(), *wrapped.running_mean.tolist()]

    found = []
    for world in (2, 3):
        (tmp_path / str(world)).mkdir()
        found.append(together(tmp_path / str(world), world, work))
    assert found[0][0] != found[0][1]
    assert found[1] == [found[0][0]] * 3
    (saved,) = checkpoints(tmp_path / "run")
    assert manifests.read(saved)[0].world.tied == [], "other numbers of ranks can take it up"


def test_a_mesh_says_how_parts_lie_and_the_manifest_says_the_mesh(tmp_path: Path) -> None:
    """Two dimensions of the mesh cut two dimensions of the tensor."""

    def work(rank: int) -> list[list[int]]:
        whole = torch.arange(24.0).view(4, 6)
        shape = (2, 2) if dist.get_world_size() == 4 else (1, 3)
        mesh = init_device_mesh("cpu", shape, mesh_dim_names=("data", "tensor"))
        row, column = mesh.get_coordinate() or (0, 0)
        part = whole.chunk(shape[0], 0)[row].chunk(shape[1], 1)[column].clone()
        model = nn.Module()
        model.register_buffer("table", part if not (tmp_path / "saved").exists() else torch.zeros_like(part))
        run = holdfast.Run(run_dir=tmp_path / "run", checkpoint_interval=0)
        run.track(model=model, layout={"model.table": holdfast.Split(mesh, [Shard(0), Shard(1)])})
        if not run.start():
            run.begin_step()
            run.end_step()
            run.finish()
        else:
            run.close()
        assert torch.equal(model.table, part)
        return mesh.mesh.tolist()

    for world in (4, 3):
        (tmp_path / str(world)).mkdir()
        together(tmp_path / str(world), world, work)
        (tmp_path / "saved").touch()
    (saved,) = checkpoints(tmp_path / "run")
    assert manifests.read(saved)[0].world.layout == {
        "sizes": {"data": 2, "tensor": 2},
        "coordinates": {"data": [0, 0, 1, 1], "tensor": [0, 1, 0, 1]},
    }


def test_parts_that_are_declared_to_be_the_same_and_differ_are_refused(tmp_path: Path) -> None:
    """A replicated dimension that is none: one of two different tensors would be stored for both."""

    def work(rank: int) -> str:
        mesh = init_device_mesh("cpu", (2, 1))
        model = nn.Module()
        model.register_buffer("table", torch.full((2, 2), float(rank)))
        placements: list[Placement] = [Replicate(), Shard(0)]
        run = holdfast.Run(run_dir=tmp_path / "run", checkpoint_interval=0)
        run.track(model=model, layout={"model.table": holdfast.Split(mesh, placements)})
        run.start()
        run.begin_step()
        run.end_step()
        with pytest.raises(holdfast.HoldfastError) as refused:
            run.save()
        run.close()
        return str(refused.value)

    for told in together(tmp_path, 2, work):
        assert "model.table[0, 0]: rank 1 holds something else than a lower rank does" in told
    assert checkpoints(tmp_path / "run") == []


@pytest.mark.parametrize("wrong", ["pattern", "size", "dimension", "rank"])
def test_a_declaration_that_does_not_fit_is_refused(tmp_path: Path, wrong: str) -> None:
    def work(rank: int) -> str:
        model = nn.Module()
        model.register_buffer("table", torch.zeros(2, 2 + (rank if wrong == "size" else 0)))
        name = "model.tabel" if wrong == "pattern" else "model.table*"
        if wrong == "rank" and rank == 1:
            model.register_buffer("table2", torch.zeros(2))
        split = holdfast.Split(dist.group.WORLD, 2 if wrong == "dimension" else 0)
        run = holdfast.Run(run_dir=tmp_path / "run", checkpoint_interval=0)
        run.track(model=model, layout={name: split})

        def save() -> None:
            run.start()
            run.begin_step()
            run.end_step()
            run.save()

        with pytest.raises(holdfast.HoldfastError) as refused:
            save()
        run.close()
        return str(refused.value)

    told = {
        "pattern": "no rank has a tensor of that name",
        "size": "differ in another one (rank 0: (2, 2), rank 1: (2, 3))",
        "dimension": "has 2 dimensions and is cut along 2",
        "rank": "model.table2 is declared on only some of the ranks [0, 1] that share it",
    }
    for found in together(tmp_path, 2, work):
        assert told[wrong] in found
    assert checkpoints(tmp_path / "run") == []


@pytest.mark.parametrize("layout", [[("a", 1)], {"a": "shared"}, {"a": 0}])
def test_a_layout_that_is_none_is_refused_at_once(layout: Any) -> None:
    with pytest.raises(UsageError, match=r"track\(layout="):
        Division().declare(layout)


def test_a_piece_says_its_place_and_nothing_else_can_be_done_with_it() -> None:
    piece = SplitTensor(torch.ones(2, 3), torch.Size((4, 3)), [Cut((2, 0), (2, 3), (0, 0))])
    assert (piece.size(), piece.dtype) == (torch.Size((4, 3)), torch.float32)
    assert repr(piece) == "SplitTensor((2, 3) at (2, 0) of (4, 3))"
    with pytest.raises(NotImplementedError, match="use its `local`"):
        piece + 1


def test_a_gradient_that_is_zero_in_one_ranks_part_is_stored_with_the_others(tmp_path: Path) -> None:
    """It waits for more: left out by the rank that has zeros, the whole would have a hole."""

    def work(rank: int) -> list[float]:
        world = dist.get_world_size()
        model = Experts(rank * 4 // world, 4 // world)
        run = holdfast.Run(run_dir=tmp_path / "run", checkpoint_interval=0)
        run.track(model=model, layout={"model.weight": holdfast.Split(dist.group.WORLD, 0)})
        if not run.start():
            run.begin_step()
            model.weight.grad = torch.full_like(model.weight, float(rank))
            run.end_step()
            run.finish()
        else:
            run.close()
        assert model.weight.grad is not None
        return model.weight.grad[:, 0].tolist()

    for world in (2, 1):
        (tmp_path / str(world)).mkdir()
        found = together(tmp_path / str(world), world, work)
    assert found == [[0.0, 0.0, 1.0, 1.0]]


def test_as_many_ranks_take_their_own_also_where_a_part_begins_anew(tmp_path: Path) -> None:
    """Another part, and a module without state, are no other division of what was there."""

    def work(rank: int, saves: bool) -> list[float]:
        inner = nn.Linear(2, 2, bias=False)
        model = nn.Sequential(inner) if saves else nn.Sequential(inner, nn.Dropout())
        with torch.no_grad():
            inner.weight.fill_(100 + rank if saves else 0)
        more = {} if saves else {"checkpoint_resume_from": str(saved), "checkpoint_fresh_parts": "head"}
        run = holdfast.Run(run_dir=tmp_path / ("run" if saves else "other"), checkpoint_interval=0, **more)
        run.track(model=model, **({} if saves else {"head": torch.Generator()}))
        run.start()
        if saves:
            run.begin_step()
            run.end_step()
            run.finish()
        else:
            run.close()
        return inner.weight.flatten().tolist()

    (tmp_path / "first").mkdir()
    together(tmp_path / "first", 2, lambda rank: work(rank, True))
    (saved,) = checkpoints(tmp_path / "run")
    assert manifests.read(saved)[0].world.tied == ["model.0.weight"]
    (tmp_path / "second").mkdir()
    found = together(tmp_path / "second", 2, lambda rank: work(rank, False))
    assert found == [[100.0] * 4, [101.0] * 4]


class Described(nn.Module):
    """A weight of 6 × 4 in columns of other lengths on each rank, kept in two pieces in the other order."""

    def __init__(self, rank: int, world: int) -> None:
        super().__init__()
        whole = torch.arange(24.0).reshape(6, 4)
        cut = {1: [0, 4], 2: [0, 3, 4], 3: [0, 1, 2, 4]}[world]
        first, last = cut[rank], cut[rank + 1]
        mine = whole[:, first:last]
        self.weight = nn.Parameter(torch.cat([mine[4:], mine[:4]]))
        self.weight.global_shape = (6, 4)  # type: ignore[attr-defined]
        self.weight.global_offsets = ((4, first), (0, first))  # type: ignore[attr-defined]
        self.weight.local_offsets = ((0, 0), (2, 0))  # type: ignore[attr-defined]
        self.weight.local_sizes = ((2, last - first), (4, last - first))  # type: ignore[attr-defined]

    def forward(self) -> torch.Tensor:
        return self.weight.square().sum()


def test_a_parameter_that_describes_its_parts_goes_to_any_number_of_ranks(tmp_path: Path) -> None:
    """torch's `CheckpointableTensor`: several boxes in one tensor, and no declaration in the script."""
    run_dir = tmp_path / "run"

    def work(rank: int, steps: int, until: int) -> dict[str, Any]:
        model = Described(rank, dist.get_world_size())
        with torch.no_grad():
            model.weight.mul_(1 if not steps else -1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.125, momentum=0.5)
        run = holdfast.Run(run_dir=run_dir, checkpoint_interval=0)
        run.track(model=model, optimizer=optimizer)
        assert run.start() == steps
        while run.step < until:
            _step(run, model, optimizer)
        run.finish()
        momentum = optimizer.state[model.weight]["momentum_buffer"]
        return {
            "weight": torch.cat([model.weight[2:], model.weight[:2]]).tolist(),
            "momentum": torch.cat([momentum[2:], momentum[:2]]).tolist(),
        }

    def on(world: int, steps: int, until: int) -> dict[str, torch.Tensor]:
        (tmp_path / str(world)).mkdir()
        found = together(tmp_path / str(world), world, lambda rank: work(rank, steps, until))
        return {what: torch.cat([torch.tensor(one[what]) for one in found], dim=1) for what in found[0]}

    on(2, 0, 2)
    on(3, 2, 3)
    last = on(1, 3, 4)
    weight = torch.arange(24.0).reshape(6, 4).requires_grad_()
    optimizer = torch.optim.SGD([weight], lr=0.125, momentum=0.5)
    for _ in range(4):
        weight.square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    assert torch.equal(last["weight"], weight)
    assert torch.equal(last["momentum"], optimizer.state[weight]["momentum_buffer"])
    assert [manifests.read(path)[0].world.tied for path in checkpoints(run_dir)] == [[], [], []]


@pytest.mark.parametrize(
    ("fact", "value", "told"),
    [
        ("local_sizes", ((3, 4), (4, 4)), "reach beyond it or beyond the whole"),
        ("global_offsets", ((5, 0), (0, 0)), "reach beyond it or beyond the whole"),
        ("global_offsets", ((4, 0),), "does not say properly of what it is a part"),
        ("global_shape", 6, "does not say properly of what it is a part"),
    ],
)
def test_a_description_that_cannot_be_is_refused_by_name(fact: str, value: Any, told: str) -> None:
    model = Described(0, 1)
    setattr(model.weight, fact, value)
    with pytest.raises(UsageError, match=f"^model.weight.* {told}"):
        Division().describe({"model": model})


def test_a_tensor_that_says_itself_what_it_is_is_not_declared_as_well() -> None:
    division, model = Division(), Described(0, 1)
    division.describe({"model": model})
    division.declare({"model.weight": holdfast.Split(dist.group.WORLD, 0)})  # type: ignore[arg-type]
    with pytest.raises(UsageError, match=r"model\.weight says itself of what it is a part"):
        division.settle({"model": {"weight": model.weight.detach()}})
