"""What each rank stored for itself, shared out: ranks with different names, and generators of their own."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import holdfast
from holdfast.checkpoint.choose.sharing import reshard
from holdfast.checkpoint.state import LeftOut, tracked_by_nobody
from holdfast.errors import IncompleteStateError
from kit.ranks.together import together
from kit.tiny import checkpoints


class Layers(nn.Module):
    """Some layers of a model, under the numbers that they have in the whole."""

    def __init__(self, numbers: list[int]) -> None:
        super().__init__()
        for number in numbers:
            torch.manual_seed(number)
            self.add_module(f"layer{number}", nn.Linear(2, 2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.stack([layer(x).square().sum() for layer in self.children()]).sum()


def trained(
    run_dir: Path, numbers: list[int], until: int, track: Callable[[Layers, Any], dict[str, Any]]
) -> dict[str, list[float]]:
    """Train these layers up to a step: each layer's weights and its optimizer's second moments."""
    model = Layers(numbers)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    run = holdfast.Run(run_dir=run_dir, checkpoint_interval=0)
    parts = track(model, optimizer)
    run.track(**parts)
    if optimizer not in parts.values():
        run.ignore(optimizer)
    run.start()
    while run.step < until:
        run.begin_step()
        model(torch.ones(1, 2)).backward()
        optimizer.step()
        optimizer.zero_grad()
        run.end_step()
    run.finish()
    return {
        name: [*weight.flatten().tolist(), *optimizer.state[weight]["exp_avg_sq"].flatten().tolist()]
        for name, weight in model.named_parameters()
    }


def stages(model: Layers, optimizer: Any) -> dict[str, Any]:
    return {"model": model, "optimizer": optimizer}


def alone(model: Layers, optimizer: Any) -> dict[str, Any]:
    """For what is about the model only."""
    del optimizer
    return {"model": model}


def apart(model: Layers, optimizer: Any) -> dict[str, Any]:
    """Each layer under a name of its own, and an optimizer that is named after the first of them."""
    first = next(iter(model._modules))
    return {**model._modules, f"optimizer_of_{first}": optimizer}


@pytest.mark.parametrize("track", [stages, apart])
def test_ranks_that_track_different_names_resume(tmp_path: Path, track: Any) -> None:
    """Rank r tracks layer r: it saved, and could never resume; the whole was compared with each rank."""
    whole = trained(tmp_path / "whole", [0, 1, 2, 3], 4, stages)

    def work(rank: int) -> dict[str, list[float]]:
        until = 4 if (tmp_path / "1").exists() else 2
        return trained(tmp_path / "run", [2 * rank, 2 * rank + 1], until, track)

    for number in range(2):
        (tmp_path / str(number)).mkdir()
        found = together(tmp_path / str(number), 2, work)
    assert {**found[0], **found[1]} == whole


def test_stages_go_to_another_number_of_ranks(tmp_path: Path) -> None:
    """Four layers in two stages, then in four, one and three: the names say where everything belongs."""
    whole = trained(tmp_path / "whole", [0, 1, 2, 3], 6, stages)
    for until, cuts in enumerate(([0, 2, 4], [0, 1, 2, 3, 4], [0, 4], [0, 1, 3, 4]), start=3):
        world = len(cuts) - 1
        (tmp_path / str(world)).mkdir()

        def work(rank: int, cuts: list[int] = cuts, until: int = until) -> dict[str, list[float]]:
            return trained(tmp_path / "run", list(range(cuts[rank], cuts[rank + 1])), until, stages)

        found = together(tmp_path / str(world), world, work)
    assert {name: values for one in found for name, values in one.items()} == whole


@pytest.mark.parametrize("world", [2, 1])
def test_what_no_rank_tracks_any_more_is_named(tmp_path: Path, world: int) -> None:
    def work(rank: int) -> str:
        saved = not (tmp_path / "left").exists()
        numbers = [2 * rank, 2 * rank + 1] if saved else [0] if rank == 0 else [2, 3]
        if saved:
            trained(tmp_path / "run", numbers, 2, alone)
            return ""
        with pytest.raises(IncompleteStateError) as refused:
            trained(tmp_path / "run", numbers, 4, alone)
        return str(refused.value)

    (tmp_path / "save").mkdir()
    together(tmp_path / "save", 2, work)
    (tmp_path / "left").mkdir()
    for told in together(tmp_path / "left", world, work):
        assert "model.layer1.weight: in the checkpoint, but not tracked" in told
        assert ("model.layer2.weight" in told) is (world == 1)


def test_a_part_may_move_to_another_of_as_many_ranks(tmp_path: Path) -> None:
    """Layers 0 and 1, and 2; then 0, and 1 and 2: the first rank has lost what the second now tracks."""

    def work(rank: int) -> dict[str, list[float]]:
        saves = not (tmp_path / "moved").exists()
        numbers = ([[0, 1], [2]] if saves else [[0], [1, 2]])[rank]
        model = Layers(numbers if saves else [])
        for number in [] if saves else numbers:
            model.add_module(f"layer{number}", nn.Linear(2, 2))
        run = holdfast.Run(run_dir=tmp_path / "run", checkpoint_interval=0)
        run.track(**model._modules)
        if not run.start():
            run.begin_step()
            run.end_step()
            run.finish()
        else:
            run.close()
        return {name: one.flatten().tolist() for name, one in model.named_parameters()}

    for name in ("saved", "moved"):
        (tmp_path / name).mkdir()
        found = together(tmp_path / name, 2, work)
    expected = {name: one.flatten().tolist() for name, one in Layers([0, 1, 2]).named_parameters()}
    assert {**found[0], **found[1]} == expected


def test_a_part_without_tensors_that_no_rank_tracks_any_more_is_named_too(tmp_path: Path) -> None:
    """At another number of ranks, where nobody looks for what it does not track in a blob of its own."""

    def work(rank: int) -> str:
        saves = torch.distributed.get_world_size() == 2
        model = Layers([0])
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1)
        run = holdfast.Run(run_dir=tmp_path / "run", checkpoint_interval=0)
        run.track(model=model, optimizer=optimizer, **({"schedule": schedule} if saves else {}))
        if saves:
            run.start()
            run.begin_step()
            run.end_step()
            run.finish()
            return ""
        run.ignore(schedule)
        with pytest.raises(IncompleteStateError) as refused:
            run.start()
        run.close()
        return str(refused.value)

    for world in (2, 3):
        (tmp_path / str(world)).mkdir()
        found = together(tmp_path / str(world), world, work)
    assert all("schedule: in the checkpoint, but not tracked" in told for told in found)


@pytest.mark.parametrize("dropped_by", [[1], [0], [0, 1]])
def test_a_part_without_tensors_that_its_only_rank_tracks_no_more_is_named(
    tmp_path: Path, dropped_by: list[int]
) -> None:
    """On as many ranks: the others take up what they saved themselves, and know of no other part."""

    def work(rank: int) -> str:
        saves = not (tmp_path / "resumed").exists()
        torch.manual_seed(0)
        run = holdfast.Run(run_dir=tmp_path / "run", checkpoint_interval=0)
        mine = {f"of_{rank}": Counter(rank)} if saves or rank not in dropped_by else {}
        run.track(model=nn.Linear(2, 2), **mine)
        told = ""
        try:
            run.start()
        except IncompleteStateError as refused:
            told = str(refused)
        if saves:
            run.begin_step()
            run.end_step()
            run.finish()
        else:
            run.close()
        return told

    for name in ("saved", "resumed"):
        (tmp_path / name).mkdir()
        found = together(tmp_path / name, 2, work)
    for told in found:
        for rank in range(2):
            assert (f"of_{rank}: in the checkpoint, but not tracked" in told) is (rank in dropped_by)


def test_what_a_rank_tracks_and_nobody_saved_is_named_with_its_rank(tmp_path: Path) -> None:
    def work(rank: int) -> str:
        if not (tmp_path / "more").exists():
            trained(tmp_path / "run", [rank], 2, stages)
            return ""
        with pytest.raises(IncompleteStateError) as refused:
            trained(tmp_path / "run", [rank, 7] if rank else [rank], 4, stages)
        return str(refused.value)

    for name in ("save", "more"):
        (tmp_path / name).mkdir()
        found = together(tmp_path / name, 2, work)
    for told in found:
        assert "layer7" in told
    assert "rank 1: " in found[0]


def test_what_begins_anew_is_no_matter_at_another_number_of_ranks(tmp_path: Path) -> None:
    """Neither a part that differs between the ranks that saved it, nor one that is no longer tracked."""

    def work(rank: int) -> int:
        saves = torch.distributed.get_world_size() == 2
        more = {} if saves else {"checkpoint_resume_from": str(path), "checkpoint_fresh_parts": "mine,gone"}
        run = holdfast.Run(run_dir=tmp_path / ("run" if saves else "other"), checkpoint_interval=0, **more)
        torch.manual_seed(0)
        gone = {"gone": Counter(1)} if saves else {}
        run.track(model=nn.Linear(2, 2), mine=Counter(rank), **gone)
        done = run.start()
        if saves:
            run.begin_step()
            run.end_step()
            run.finish()
        else:
            run.close()
        return done

    path = tmp_path
    for world in (2, 3):
        (tmp_path / str(world)).mkdir()
        found = together(tmp_path / str(world), world, work)
        path = checkpoints(tmp_path / "run")[0]
    assert found == [1, 1, 1]


class Counter:
    def __init__(self, count: int) -> None:
        self.count = count

    def state_dict(self) -> dict[str, int]:
        return {"count": self.count}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.count = state["count"]


class Tracker:
    """Named generators, as tensor-parallel code keeps them."""

    def __init__(self, seed: int) -> None:
        seeds = {"alike": 7, "data": seed, "expert": seed}
        self.states = {name: torch.Generator().manual_seed(one).get_state() for name, one in seeds.items()}

    def get_states(self) -> dict[str, torch.Tensor]:
        return self.states

    def set_states(self, states: dict[str, torch.Tensor]) -> None:
        self.states = states

    def drawn(self) -> list[float]:
        found = []
        for state in self.states.values():
            generator = torch.Generator()
            generator.set_state(state)
            found.append(torch.rand(1, generator=generator).item())
        return found


def test_generators_follow_the_rule_at_another_number_of_ranks(tmp_path: Path) -> None:
    """Those that differ between ranks are seeded anew, differently on each; one that all share goes on."""

    def work(rank: int) -> list[float]:
        own, shared = torch.Generator().manual_seed(rank), torch.Generator().manual_seed(9)
        tracker = Tracker(rank)
        run = holdfast.Run(run_dir=tmp_path / "run", checkpoint_interval=0)
        run.track(model=nn.Linear(1, 1), own=own, shared=shared, tracker=tracker)
        if not run.start():
            run.begin_step()
            torch.rand(5, generator=shared)
            run.end_step()
            run.finish()
        else:
            run.close()
        return [torch.rand(1, generator=shared).item(), torch.rand(1, generator=own).item(), *tracker.drawn()]

    found = []
    for number, world in enumerate((2, 3, 3)):
        (tmp_path / str(number)).mkdir()
        found.append(together(tmp_path / str(number), world, work))
    two, three, again = found
    assert {(one[0], one[2]) for one in (*two, *three)} == {(two[0][0], two[0][2])}, "what all had alike"
    drawn = [value for one in three for value in (one[1], *one[3:])]
    assert len(set(drawn)) == len(drawn) == 9
    assert not set(drawn) & {value for one in two for value in one[1:]}
    assert again == three


def blob(**tracked: Any) -> dict[str, Any]:
    counters = {"step": 1, "samples": 0, "tokens": 0}
    return {"tracked": tracked, "own": {"counters": counters, "data": None, "rng": {}}}


def shared_out(blobs: list[dict[str, Any]], **more: Any) -> Any:
    return reshard(blobs, run="r", step=1, rank=0, world=3, **more)


@pytest.mark.parametrize(
    ("states", "told"),
    [
        ([{"param_groups": [], "packed": 1}, {"param_groups": [], "packed": 2}], "stored as a whole by each"),
        ([{"param_groups": [{"params": ["a"]}]}, {"param_groups": []}], "another number of parameter groups"),
        (
            [{"param_groups": [{"params": ["a"], "lr": 1}]}, {"param_groups": [{"params": ["b"], "lr": 2}]}],
            "optimizer, group 0: lr differs",
        ),
        (
            [
                {"param_groups": [{"params": ["a"]}], "state": {"a": {"step": 1}}},
                {"param_groups": [{"params": ["a", "b"]}], "state": {"a": {"step": 2}}},
            ],
            "optimizer, state: a differs",
        ),
    ],
)
def test_optimizers_that_do_not_go_together_are_refused(states: list[Any], told: str) -> None:
    with pytest.raises(IncompleteStateError, match=told):
        shared_out([blob(optimizer=one) for one in states], kinds={"optimizer": "optimizer"})


@dataclass
class Held:
    value: object


@pytest.mark.parametrize(
    "hold",
    [
        lambda value: deque([1, value]),
        lambda value: {1, value},
        Held,
        lambda value: Held(torch.tensor([value])),
        lambda value: SimpleNamespace(inner=Held(value)),
        lambda value: defaultdict(list, {value: 1}),
        lambda value: torch.sparse_coo_tensor([[value]], [1.0], (9,)),
    ],
)
def test_what_differs_between_ranks_in_an_object_of_any_class_is_refused(hold: Any) -> None:
    """And what is the same goes to any number of ranks."""
    blobs = [blob(thing={"a": hold(value)}) for value in (3, 3, 4)]
    with pytest.raises(IncompleteStateError, match=r"thing\.a.* differs between ranks 0 and 2"):
        shared_out(blobs, kinds={"thing": "object"})
    assert shared_out(blobs[:2], kinds={"thing": "object"}).tracked["thing"] is blobs[0]["tracked"]["thing"]


@given(st.lists(st.sets(st.integers(0, 200)), min_size=1, max_size=5), st.integers(1, 200))
def test_what_all_ranks_leave_out_is_what_nobody_tracks(left: list[set[int]], count: int) -> None:
    names = [f"n{at:03}" for at in range(count)]
    each = [{names[at] for at in one if at < count} for one in left]
    told = tracked_by_nobody([LeftOut.of(one, names) for one in each], names)
    assert told == sorted(set.intersection(*each))


def test_as_many_ranks_keep_what_is_their_own_and_share_the_rest_by_name() -> None:
    """Tensor parallel ranks in place of pipeline stages: generators, position and counts stay."""
    stages = [{"param_groups": [{"params": [name]}], "state": {name: {"step": 3}}} for name in "ab"]
    blobs = [
        {
            "tracked": {"optimizer": stage, "noise": {"state": rank}},
            "own": {"counters": {"step": 1, "samples": 5 + rank}, "data": f"position {rank}", "rng": rank},
        }
        for rank, stage in enumerate(stages)
    ]
    kinds = {"optimizer": "optimizer", "noise": "object"}
    names = {"optimizer": {"a", "b"}}
    shared = reshard(
        blobs,
        run="r",
        step=1,
        rank=1,
        world=2,
        kinds=kinds,
        names=names,
        generators=["noise"],
        same_size=True,
    )
    assert shared.own == blobs[1]["own"]
    assert shared.tracked["noise"] == {"state": 1}
    assert shared.tracked["optimizer"]["param_groups"] == [{"params": ["a", "b"]}]
    assert shared.tracked["optimizer"]["state"] == {"a": {"step": 3}, "b": {"step": 3}}
    assert "hold other parts of it now" in shared.notes[0]
