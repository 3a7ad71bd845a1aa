"""FSDP1: each rank keeps a stretch of every parameter's elements, which no box of the whole need be."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy, fully_shard
from torch.distributed.fsdp.wrap import ModuleWrapPolicy

import holdfast
from holdfast.base import local_part
from holdfast.checkpoint.format import manifest as manifests
from holdfast.checkpoint.state.division import boxes
from holdfast.errors import SaveFailedError, UsageError
from kit.ranks.together import together
from kit.tiny import checkpoints


class Block(nn.Module):
    """Parameters of which no number of ranks gets whole rows, one without dimensions of 1, and a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(5, 7)
        self.outer = nn.Linear(7, 5, bias=False)
        self.norm = nn.BatchNorm1d(5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = x + self.norm(self.outer(torch.tanh(self.inner(x))))
        return out


def network() -> nn.Sequential:
    torch.manual_seed(3)
    tied = nn.Sequential(nn.Linear(5, 5, bias=False), Block(), Block(), nn.Linear(5, 5, bias=False))
    tied[3].weight = tied[0].weight
    return tied


def flat(model: nn.Module, strategy: str = "FULL_SHARD") -> nn.Module:
    return FullyShardedDataParallel(
        model,
        auto_wrap_policy=ModuleWrapPolicy({Block}),
        sharding_strategy=ShardingStrategy[strategy],
        use_orig_params=True,
        device_id=torch.device("cpu"),
    )


def mixed(model: nn.Sequential) -> nn.Module:
    """Blocks in FSDP1, within a model that FSDP2 shards."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    cpu = torch.device("cpu")
    blocks = [
        FullyShardedDataParallel(one, use_orig_params=True, device_id=cpu) for one in (model[1], model[2])
    ]
    held = {parameter for block in blocks for parameter in block.parameters()}
    model[1], model[2] = blocks
    return fully_shard(model, mesh=mesh, ignored_params=held)


def sharded(model: nn.Module) -> nn.Module:
    return fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))


def same(model: nn.Module) -> nn.Module:
    return model


def trained(run_dir: Path, wrapped: Any, steps: int, until: int, **settings: Any) -> dict[str, Any]:
    """Train up to a step on data that all ranks have alike; the whole state at its begin and at its end."""
    model = wrapped(network())
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
    run = holdfast.Run(run_dir=run_dir, checkpoint_interval=0, **settings)
    run.track(model=model, optimizer=optimizer)
    assert run.start() == steps
    before = whole(model, optimizer)
    losses = []
    while run.step < until:
        run.begin_step()
        optimizer.zero_grad()
        torch.manual_seed(run.step)
        loss = model(torch.randn(4, 5)).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        run.end_step()
    run.finish()
    return {"before": before, "after": whole(model, optimizer), "losses": losses}


def whole(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """All tensors of the model and the optimizer, gathered by torch itself."""
    from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict

    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=False)
    if not dist.is_initialized() or (dist.get_world_size() == 1 and not _is_wrapped(model)):
        options = StateDictOptions()
    tensors, states = get_state_dict(model, optimizer if optimizer.state else [], options=options)
    found = {name: tensor.tolist() for name, tensor in tensors.items()}
    for name, state in states.get("state", {}).items():
        found |= {f"{name}.{key}": value.tolist() for key, value in state.items()}
    return found


def _is_wrapped(model: nn.Module) -> bool:
    return any(isinstance(one, FullyShardedDataParallel) for one in model.modules())


def on(place: Path, world: int, wrapped: Any, steps: int, until: int, **settings: Any) -> Any:
    """What rank 0 has of the whole."""
    here = place / f"{world}-{steps}-{until}-{len(list(place.iterdir()))}"
    here.mkdir()
    return together(here, world, lambda rank: trained(place / "run", wrapped, steps, until, **settings))[0]


def test_a_run_in_fsdp1_resumes_bit_for_bit_on_as_many_ranks(tmp_path: Path) -> None:
    (tmp_path / "whole").mkdir()
    undisturbed = on(tmp_path / "whole", 2, flat, 0, 6)
    first = on(tmp_path, 2, flat, 0, 3)
    second = on(tmp_path, 2, flat, 3, 6)
    assert second["before"] == first["after"]
    assert first["losses"] + second["losses"] == undisturbed["losses"]
    assert second["after"] == undisturbed["after"]


drill = pytest.mark.drill


@pytest.mark.parametrize("world", [3, pytest.param(1, marks=drill)])
def test_a_run_in_fsdp1_resumes_on_another_number_of_ranks(tmp_path: Path, world: int) -> None:
    first = on(tmp_path, 2, flat, 0, 3)
    second = on(tmp_path, world, flat, 3, 5)
    assert second["before"] == first["after"]
    third = on(tmp_path, 2, flat, 5, 6)
    assert third["before"] == second["after"]


@pytest.mark.parametrize(
    "other", [sharded, pytest.param(same, marks=drill), pytest.param(mixed, marks=drill)]
)
def test_fsdp1_s_checkpoints_are_those_of_the_plain_model(tmp_path: Path, other: Any) -> None:
    """Saved by FSDP1, taken up by FSDP2, a plain model or both in one; and the other way round."""
    first = on(tmp_path, 2, flat, 0, 2)
    second = on(tmp_path, 2, other, 2, 3)
    assert second["before"] == first["after"]
    third = on(tmp_path, 3, flat, 3, 4)
    assert third["before"] == second["after"]


@drill
@pytest.mark.parametrize("strategy", ["SHARD_GRAD_OP", "NO_SHARD"])
def test_every_way_of_sharding(tmp_path: Path, strategy: str) -> None:
    def wrapped(model: nn.Module) -> nn.Module:
        return flat(model, strategy)

    first = on(tmp_path, 2, wrapped, 0, 2)
    second = on(tmp_path, 2, flat, 2, 3)
    assert second["before"] == first["after"]


def test_an_asynchronous_save(tmp_path: Path) -> None:
    first = on(tmp_path, 2, flat, 0, 3, checkpoint_async_save=True)
    second = on(tmp_path, 3, flat, 3, 4)
    assert second["before"] == first["after"]


class AllKinds(nn.Module):
    """A part of every kind: flat, sharded, held apart, declared, described, each rank's own, and alike."""

    def __init__(self) -> None:
        super().__init__()
        rank, world = dist.get_rank(), dist.get_world_size()
        torch.manual_seed(0)
        cpu = torch.device("cpu")
        self.flat = FullyShardedDataParallel(nn.Linear(5, 7), use_orig_params=True, device_id=cpu)
        self.sharded = fully_shard(nn.Linear(7, 5), mesh=init_device_mesh("cpu", (world,)))
        self.alike = nn.Linear(5, 2)
        torch.manual_seed(10 + rank)
        mine = [DeviceMesh("cpu", [one]) for one in range(world)][rank]  # all ranks make all groups
        self.apart = fully_shard(nn.Linear(5, 5), mesh=mine)
        self.declared = nn.Linear(5, 3 + rank)
        self.own = nn.Linear(5, 2)
        self.said: Any = nn.Parameter(torch.arange(24.0).reshape(6, 4)[:, 2 * rank : 2 * rank + 2].clone())
        self.said.global_shape, self.said.local_sizes = (6, 4), ((6, 2),)
        self.said.global_offsets, self.said.local_offsets = ((0, 2 * rank),), ((0, 0),)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        inner = self.apart(self.sharded(torch.tanh(self.flat(x))))
        found = (self.declared(inner), self.own(inner), self.alike(x), self.said)
        return torch.stack([one.square().sum() for one in found]).sum()


def test_all_of_it_at_once_in_the_background_and_in_the_local_tier(tmp_path: Path) -> None:
    """The resume reads nothing but local copies: the global tier has none."""
    local = {
        "checkpoint_async_save": True,
        "checkpoint_non_persistent_ckpt_type": "local",
        "checkpoint_non_persistent_local_ckpt_dir": str(tmp_path / "local"),
        "checkpoint_non_persistent_save_interval": 1,
        "checkpoint_replication_factor": 1,
    }

    def work(rank: int, name: str, until: int, **settings: Any) -> list[Any]:
        model, noise = AllKinds(), torch.Generator().manual_seed(rank)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.02, foreach=False)
        run = holdfast.Run(run_dir=tmp_path / name, checkpoint_interval=0, checkpoint_save_at_end=False,
                           **settings)  # fmt: skip
        layout = {"model.declared.*": holdfast.Split(dist.group.WORLD, 0)}
        run.track(model=model, optimizer=optimizer, noise=noise, layout=layout)
        began = run.start()
        while run.step < until:
            run.begin_step()
            model(torch.rand(4, 5, generator=noise)).backward()
            optimizer.step()
            optimizer.zero_grad()
            run.end_step()
        run.finish()
        moments = [one for state in optimizer.state.values() for one in state.values()]
        return [began, [local_part(one).tolist() for one in (*model.parameters(), *moments)]]

    def on(name: str, until: int, **settings: Any) -> list[Any]:
        (tmp_path / f"{name}-{until}").mkdir()
        return together(tmp_path / f"{name}-{until}", 2, lambda rank: work(rank, name, until, **settings))

    undisturbed = on("whole", 5)
    assert [began for began, _ in on("parted", 3, **local)] == [0, 0]
    second = on("parted", 5, **local)
    assert [began for began, _ in second] == [3, 3]
    assert [found for _, found in second] == [found for _, found in undisturbed]
    assert checkpoints(tmp_path / "parted") == []


def test_what_only_some_ranks_hold_is_taken_up_by_those_that_hold_it_then(tmp_path: Path) -> None:
    """As many ranks with another division: a rank must not go on without the moments of what is new to it."""

    def one_module(model: nn.Module) -> nn.Module:
        """One flat tensor of all: the second rank has nothing of the first parameters."""
        return FullyShardedDataParallel(model, use_orig_params=True, device_id=torch.device("cpu"))

    first = on(tmp_path, 2, one_module, 0, 2)
    (saved,) = checkpoints(tmp_path / "run")
    assert manifests.read(saved)[0].needs == ["holdfast_gradients", "holdfast_absent"]
    second = on(tmp_path, 2, flat, 2, 3)
    assert second["before"] == first["after"]
    third = on(tmp_path, 2, one_module, 3, 4)
    assert third["before"] == second["after"]


@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.AdamW])
def test_gradients_that_wait_for_more_go_to_another_number_of_ranks(tmp_path: Path, kind: Any) -> None:
    """An optimizer that steps every second step: what the ranks have added up by then is resharded, too.

    A rank that has nothing of a parameter gets no gradient of it: the optimizer would begin a state for it.
    """

    def accumulated(world: int, steps: int, until: int) -> Any:
        def work(rank: int) -> Any:
            model = flat(network())
            optimizer = kind(model.parameters(), lr=0.5)
            run = holdfast.Run(run_dir=tmp_path / "run", checkpoint_interval=0)
            run.track(model=model, optimizer=optimizer)
            assert run.start() == steps
            for step in range(steps + 1, until + 1):
                run.begin_step()
                torch.manual_seed(step)
                model(torch.randn(4, 5)).square().mean().backward()
                if step % 2 == 0:
                    optimizer.step()
                    optimizer.zero_grad()
                run.end_step()
            run.finish()
            return whole(model, optimizer)

        place = tmp_path / f"{world}-{steps}"
        place.mkdir()
        return together(place, world, work)

    accumulated(2, 0, 1)
    resumed = accumulated(3, 1, 2)
    assert manifests.read(checkpoints(tmp_path / "run")[0])[0].world.tied == []
    undisturbed = flat_free(2) if kind is torch.optim.SGD else resumed[0]
    for name, value in resumed[0].items():
        assert torch.allclose(torch.tensor(value), torch.tensor(undisturbed[name]), rtol=1e-5), name


def flat_free(until: int) -> dict[str, Any]:
    """The same on one rank, without a wrapper."""
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    for step in range(1, until + 1):
        torch.manual_seed(step)
        model(torch.randn(4, 5)).square().mean().backward()
        if step % 2 == 0:
            optimizer.step()
            optimizer.zero_grad()
    return {name: tensor.tolist() for name, tensor in model.state_dict().items()}


def test_gradients_that_are_not_reduced_are_refused_by_name(tmp_path: Path) -> None:
    def work(rank: int) -> str:
        model = flat(network())
        run = holdfast.Run(run_dir=tmp_path / "run", checkpoint_interval=0)
        run.track(model=model)
        run.start()
        run.begin_step()
        with model.no_sync():  # type: ignore[operator]
            model(torch.randn(4, 5)).sum().backward()
        run.end_step()
        with pytest.raises(SaveFailedError) as refused:
            run.save()
        run.close()
        return str(refused.value)

    for told in together(tmp_path, 2, work):
        assert "FullyShardedDataParallel has gradients of model that are not reduced yet (no_sync)" in told


def test_flat_parameters_without_their_own_names_are_refused(tmp_path: Path) -> None:
    def work(rank: int) -> str:
        model = FullyShardedDataParallel(network(), use_orig_params=False, device_id=torch.device("cpu"))
        run = holdfast.Run(run_dir=tmp_path / "run", checkpoint_interval=0)
        with pytest.raises(UsageError) as refused:
            run.track(model=model)
        return str(refused.value)

    assert "Wrap it with use_orig_params=True" in together(tmp_path, 2, work)[0]


def test_an_evaluation_before_a_load_leaves_no_gathered_parameters(tmp_path: Path) -> None:
    """FSDP1 keeps the root's whole parameters after a forward without a backward: a load makes them stale."""

    @torch.no_grad()
    def evaluated(model: nn.Module) -> float:
        model.eval()
        found: float = model(torch.ones(4, 5)).sum().item()
        model.train()
        return found

    def work(rank: int, before: bool) -> Any:
        model = flat(network())
        run = holdfast.Run(run_dir=tmp_path / "run", checkpoint_interval=0)
        run.track(model=model)
        untrained = evaluated(model) if before else None
        if run.start():
            run.close()
            return untrained, evaluated(model)
        run.begin_step()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(2.0)
        run.end_step()
        run.finish()
        return None

    found = []
    for name, before in (("saved", False), ("loaded", False), ("evaluated and loaded", True)):
        (tmp_path / name).mkdir()
        found.append(together(tmp_path / name, 2, lambda rank, before=before: work(rank, before))[0])
    _, (_, loaded), (untrained, loaded_after) = found
    assert loaded_after == loaded != untrained


@given(
    st.lists(st.integers(0, 5), max_size=4).flatmap(
        lambda shape: st.tuples(
            st.just(shape), st.lists(st.integers(0, max(1, torch.Size(shape).numel())), max_size=4)
        )
    )
)
def test_stretches_become_boxes_that_cover_them_and_follow_each_other(
    case: tuple[list[int], list[int]],
) -> None:
    """Any shape, cut anywhere: every element is in exactly one box, at its own place, and boxes are few."""
    shape, marks = case
    total = torch.Size(shape).numel()
    whole = torch.arange(total).reshape(shape)
    rebuilt = torch.full_like(whole, -1)
    edges = sorted({0, total, *(mark for mark in marks if mark <= total)})
    for start, end in itertools.pairwise(edges):
        local = whole.flatten()[start:end]
        made = list(boxes(shape, start, end - start))
        assert len(made) <= max(1, 2 * len(shape) - 1)
        for cut in made:
            part = rebuilt[tuple(slice(o, o + n) for o, n in zip(cut.offsets, cut.size, strict=True))]
            assert (part == -1).all()
            part.copy_(cut.of(local))
    assert torch.equal(rebuilt, whole)


@drill
def test_replicas_of_shards(tmp_path: Path) -> None:
    """Two replicas of two shards, on a mesh; what they hold twice is stored once."""

    def hybrid(model: nn.Module) -> nn.Module:
        return FullyShardedDataParallel(
            model,
            device_mesh=init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard")),
            sharding_strategy=ShardingStrategy.HYBRID_SHARD,
            auto_wrap_policy=ModuleWrapPolicy({Block}),
            use_orig_params=True,
            device_id=torch.device("cpu"),
        )

    first = on(tmp_path, 4, hybrid, 0, 2)
    second = on(tmp_path, 2, flat, 2, 3)
    assert second["before"] == first["after"]
    third = on(tmp_path, 4, hybrid, 3, 4)
    assert third["before"] == second["after"]
