"""Optimizers that are not torch's, and other state with tensors in it: stored like a model's, and exact."""

from __future__ import annotations

import pickle
from collections import OrderedDict, defaultdict, deque
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.distributed.checkpoint.metadata import Metadata, TensorProperties, TensorStorageMetadata

import holdfast
from holdfast.checkpoint.format import manifest as manifests
from holdfast.checkpoint.format import metadata as metadatas
from holdfast.checkpoint.state import nested
from holdfast.checkpoint.state.adapters import flatten
from holdfast.checkpoint.state.proof import first_difference
from kit.ranks.together import together
from kit.tiny import checkpoints

LARGE = nested.LEAST // 4
"""Elements of a float32 tensor that is stored by itself."""


class Pair(NamedTuple):
    left: torch.Tensor
    right: int


@dataclass
class Factors:
    left: Any
    right: Any = None


@dataclass(frozen=True, slots=True)
class FrozenFactors:
    left: Any
    right: Any = None


class Buckets(dict[Any, Any]):
    """With an attribute of its own."""

    def __init__(self, **entries: Any) -> None:
        super().__init__(entries)
        self.size = 3


class FlatOptimizer:
    """Of Megatron's shape: each rank has one flat buffer, cut without regard to where parameters begin."""

    def __init__(self, model: nn.Module, rank: int, world: int) -> None:
        self.parameters = list(model.parameters())
        total = sum(parameter.numel() for parameter in self.parameters)
        each = -(-total // world)
        self.rank, self.each, self.total = rank, each, total
        self.moment = torch.zeros(min(each, total - rank * each))
        self.steps = 0

    def step(self) -> None:
        self.steps += 1
        flat = torch.cat([parameter.grad.flatten() for parameter in self.parameters])  # type: ignore[union-attr]
        mine = slice(self.rank * self.each, self.rank * self.each + len(self.moment))
        self.moment.mul_(0.9).add_(flat[mine])
        update = torch.zeros(self.total)
        update[mine] = self.moment
        if torch.distributed.is_initialized():
            torch.distributed.all_reduce(update)
        at = 0
        with torch.no_grad():
            for parameter in self.parameters:
                parameter.sub_(0.01 * update[at : at + parameter.numel()].view_as(parameter))
                parameter.grad = None
                at += parameter.numel()

    def state_dict(self) -> dict[str, Any]:
        return {"buffers": [{"dtype": "float32", "moment": self.moment}], "steps": self.steps}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.moment.copy_(state["buffers"][0]["moment"])
        self.steps = state["steps"]


class EightBit(torch.optim.Optimizer):
    """Of bitsandbytes' shape: moments in eight bits, with a scale for each block and a table of values."""

    BLOCK = 64

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.01})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state = self.state[parameter]
                if not state:
                    state["state1"] = torch.zeros(parameter.shape, dtype=torch.uint8)
                    state["absmax1"] = torch.zeros(-(-parameter.numel() // self.BLOCK))
                    state["qmap1"] = torch.linspace(-1, 1, 256)
                    state["step"] = 0
                state["step"] += 1
                blocks = state["qmap1"][state["state1"].long()].flatten().split(self.BLOCK)
                now = torch.cat([b * m for b, m in zip(blocks, state["absmax1"], strict=True)])
                now = 0.9 * now + parameter.grad.flatten()
                state["absmax1"] = torch.stack([block.abs().max() for block in now.split(self.BLOCK)])
                unit = torch.cat([b / m.clamp(min=1e-9) for b, m in
                                  zip(now.split(self.BLOCK), state["absmax1"], strict=True)])  # fmt: skip
                state["state1"] = ((unit + 1) * 127.5).round().to(torch.uint8).view_as(parameter)
                parameter.sub_(group["lr"] * now.view_as(parameter))


class Matrices(torch.optim.Optimizer):
    """Of Shampoo's shape: for each parameter a list of matrices, one for each of its dimensions."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.01})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state = self.state[parameter]
                if not state:
                    state["factors"] = [torch.eye(size) for size in parameter.shape]
                    state["step"] = 0
                state["step"] += 1
                grad = parameter.grad
                for at in range(grad.dim()):
                    side = grad.transpose(0, at).reshape(grad.shape[at], -1)
                    state["factors"][at] = state["factors"][at] + side @ side.T
                scale = sum(factor.diagonal().sum() for factor in state["factors"])
                parameter.sub_(group["lr"] * grad / scale.sqrt())


class Wrapping(torch.optim.AdamW):
    """Its state_dict has a form of its own: that of AdamW in it, and an average of the weights in objects."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, lr=0.01)
        self.average = [Factors(one.detach().clone()) for one in self.param_groups[0]["params"]]

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        super().step(closure)
        for kept, parameter in zip(self.average, self.param_groups[0]["params"], strict=True):
            kept.left = kept.left * 0.9 + parameter.detach() * 0.1
            with torch.no_grad():
                parameter.copy_(kept.left)

    def state_dict(self) -> dict[str, Any]:
        return {"inner": super().state_dict(), "average": self.average}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state["inner"])
        self.average = state["average"]


def _model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 600), nn.Tanh(), nn.Linear(600, 8))


def _trained(run_dir: Path, until: int, make: Any, *, background: bool = False) -> list[list[float]]:
    model = _model()
    optimizer = make(model)
    run = holdfast.Run(
        run_dir=run_dir, checkpoint_interval=1 if background else 0, checkpoint_async_save=background
    )
    run.track(model=model, optimizer=optimizer)
    run.start()
    while run.step < until:
        run.begin_step()
        generator = torch.Generator().manual_seed(run.step)
        model(torch.randn(4, 64, generator=generator)).square().mean().backward()
        optimizer.step()
        for parameter in model.parameters():
            parameter.grad = None
        run.end_step()
    run.finish()
    return [parameter.flatten().tolist() for parameter in model.parameters()]


@pytest.mark.parametrize("background", [False, True])
@pytest.mark.parametrize(
    "make",
    [
        lambda model: FlatOptimizer(model, 0, 1),
        lambda model: EightBit(model.parameters()),
        lambda model: Matrices(model.parameters()),
        lambda model: Wrapping(model.parameters()),
    ],
    ids=["flat buffers", "eight bits", "lists of matrices", "a form of its own"],
)
def test_optimizers_that_are_not_torchs_resume_bit_for_bit(
    tmp_path: Path, make: Any, background: bool
) -> None:
    whole = _trained(tmp_path / "whole", 6, make)
    _trained(tmp_path / "parts", 3, make, background=background)
    assert _trained(tmp_path / "parts", 6, make, background=background) == whole
    newest = checkpoints(tmp_path / "parts")[-1]
    entries = metadatas.read(newest).tensors
    blob = entries["holdfast.rank_00000"].shape[0]
    stored = sum(1 for name in entries if name.startswith("optimizer."))
    assert stored >= 1
    assert blob < 64 * 1024


def test_flat_shards_of_two_ranks_resume_and_are_refused_on_three(tmp_path: Path) -> None:
    """Each rank's buffer differs, and no name says of what it is a part."""

    def work(rank: int) -> Any:
        world = torch.distributed.get_world_size()
        until = 3 if not checkpoints(tmp_path / "run") else 6

        def make(model: nn.Module) -> FlatOptimizer:
            return FlatOptimizer(model, rank, world)

        if world == 3:
            with pytest.raises(holdfast.HoldfastError) as refused:
                _trained(tmp_path / "run", until, make)
            return str(refused.value)
        return _trained(tmp_path / "run", until, make)

    alone = _trained(tmp_path / "whole", 6, lambda model: FlatOptimizer(model, 0, 1))
    for name, world in (("save", 2), ("resume", 2), ("other", 3)):
        (tmp_path / name).mkdir()
        found = together(tmp_path / name, world, work)
        if name == "resume":
            assert found == [alone, alone]
    for told in found:
        assert "optimizer.buffers.0.moment differs between the 2 ranks that saved it" in told
    assert manifests.read(checkpoints(tmp_path / "run")[-1])[0].needs == ["holdfast_nested"]


@pytest.mark.parametrize("when", ["after", "before", "never"])
def test_sparse_adam_resumes(tmp_path: Path, when: str) -> None:
    """Its gradients are sparse, its state is not. `when` they are cleared: they may lie there at a save."""

    def train(run_dir: Path, until: int) -> list[list[float]]:
        torch.manual_seed(0)
        model = nn.Embedding(20, 3, sparse=True)
        optimizer = torch.optim.SparseAdam(model.parameters(), lr=0.1)
        run = holdfast.Run(run_dir=run_dir, checkpoint_interval=2)
        run.track(model=model, optimizer=optimizer)
        for _, ids in run.steps([torch.tensor([i, i + 3]) for i in range(8)], until=until):
            if when == "before":
                optimizer.zero_grad()
            model(ids).square().sum().backward()
            optimizer.step()
            if when == "after":
                optimizer.zero_grad()
        return model.weight.tolist()

    whole = train(tmp_path / "whole", 7)
    train(tmp_path / "parts", 3)
    assert train(tmp_path / "parts", 7) == whole


def read(tensors: dict[str, Any]) -> Metadata:
    """Metadata that has these tensors."""
    found = {
        f"part.{name}": TensorStorageMetadata(TensorProperties(one.dtype), one.size(), [])
        for name, one in flatten(tensors).items()
    }
    return Metadata(found)  # type: ignore[arg-type]


_leaf = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.text(max_size=3),
    st.integers(0, 3).map(lambda size: torch.arange(float(size))),
    st.just(LARGE).map(torch.ones),
)
_states = st.recursive(
    _leaf,
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.lists(inner, max_size=3).map(tuple),
        st.lists(inner, max_size=3).map(lambda values: deque(values, maxlen=5)),
        st.dictionaries(st.sampled_from(["a", "b", "0", "a.b", ""]) | st.integers(0, 2), inner, max_size=3),
        st.dictionaries(st.sampled_from("xyz"), inner, max_size=3).map(OrderedDict),
        inner.map(lambda value: Pair(torch.ones(2), 3) if value is None else value),
        inner.map(lambda value: Factors(value, [value])),
        inner.map(lambda value: FrozenFactors(value, 1)),
        st.dictionaries(st.sampled_from("xy"), inner, max_size=2).map(lambda one: defaultdict(list, one)),
        inner.map(lambda value: SimpleNamespace(held=value, name="n")),
    ),
    max_leaves=8,
)


def again(state: Any) -> Any:
    """After it was taken apart, stored and read."""
    tensors, left = nested.lift(object(), state)
    if not nested.is_lifted(left):
        assert left is state
        assert not tensors
        return state
    left = pickle.loads(pickle.dumps(left))
    targets = nested.targets("part", left, read(tensors))
    assert targets.keys() == tensors.keys()
    with torch.no_grad():
        for name, target in targets.items():
            target.copy_(tensors[name])
    return nested.whole(left, targets)


@given(_states)
def test_any_state_is_the_same_after_it_was_taken_apart(state: Any) -> None:
    found = again(state)
    assert first_difference(state, found, "state") == ""
    assert type(found) is type(state)


def lifted(state: Any) -> int:
    """How many of its tensors are stored by themselves; the state is the same again."""
    tensors, left = nested.lift(object(), state)
    assert nested.is_lifted(left)
    assert first_difference(state, again(state), "state") == ""
    return len(tensors)


def large() -> torch.Tensor:
    return torch.randn(LARGE)


@pytest.mark.parametrize(
    "make",
    [
        lambda: {"s": Factors(large())},
        lambda: {"s": FrozenFactors(large())},
        lambda: {"s": SimpleNamespace(a=large())},
        lambda: defaultdict(dict, {0: {"m": large()}}),
        lambda: {"s": Buckets(a=large())},
        lambda: {"s": nn.Parameter(large())},
        lambda: {"s": large().requires_grad_()},
        lambda: {(0, "a"): large()},
        lambda: {"x" * 1000: large()},
        lambda: {torch.float32: large(), frozenset({1}): 2},
    ],
    ids=["dataclass", "frozen", "namespace", "defaultdict", "subclass", "parameter", "gradient", "tuple",
         "long", "odd key"],
)  # fmt: skip
def test_tensors_are_found_wherever_they_are(make: Any) -> None:
    assert lifted(make()) == 1
    assert all(len(name) < 400 for name in nested.lift(object(), make())[0])


def test_keys_that_look_alike_are_told_apart() -> None:
    state = {"a.b": large(), "a": {"b": large()}, 0: large(), "0": large()}
    assert lifted(state) == 4


def test_what_has_no_strides_stays_beside_what_has() -> None:
    sparse = torch.sparse_coo_tensor([[0, 5]], [1.0, 2.0], (9,))
    quantized = torch.quantize_per_tensor(torch.randn(5), 0.1, 0, torch.quint8)
    assert lifted({"a": large(), "b": [sparse, torch.eye(3).to_sparse_csr(), quantized]}) == 1
    assert lifted({"a": large(), "b": torch.nested.nested_tensor([torch.ones(2), torch.ones(3)])}) == 1


def test_a_conjugate_is_another_tensor() -> None:
    """It lies in the same memory, and looks the same but for one bit that torch keeps of it."""
    numbers = torch.randn(LARGE, dtype=torch.complex64)
    assert lifted({"a": numbers, "b": numbers.conj()}) == 2


def test_one_container_in_two_places_is_one_again() -> None:
    both = Factors(large())
    found = again({"a": both, "b": [both, both.left]})
    assert found["a"] is found["b"][0]
    assert found["b"][1] is found["a"].left


def test_containers_in_two_places_each_are_looked_into_once() -> None:
    """Otherwise forty levels of them would never come to an end."""
    state: Any = [large()]
    for _ in range(40):
        state = [state, state]
    found = again({"deep": state})["deep"]
    assert found[0] is found[1]


def test_a_state_that_contains_itself_is_left_to_pickle() -> None:
    state: dict[str, Any] = {"a": large()}
    state["self"] = state
    assert nested.lift(object(), state) == ({}, state)


def test_what_is_one_tensor_is_one_tensor_again() -> None:
    shared = torch.ones(LARGE)
    tensors, _ = nested.lift(object(), {"a": shared, "b": [shared]})
    assert list(tensors) == ["a"]
    found = again({"a": shared, "b": [shared]})
    assert found["a"] is found["b"][0]


def test_little_stays_where_it_was() -> None:
    state = {"small": torch.ones(10), "number": 3}
    assert nested.lift(object(), state) == ({}, state)


def test_a_type_of_less_than_a_byte_is_refused_by_the_tensors_name(tmp_path: Path) -> None:
    """torch can neither plan nor write it; it says so without a name."""
    run = holdfast.Run(run_dir=tmp_path / "run", checkpoint_interval=0)
    model = nn.Linear(2, 2)
    model.register_buffer("codes", torch.zeros(8, dtype=torch.uint8).view(torch.uint4))
    run.track(model=model)
    run.start()
    with pytest.raises(holdfast.HoldfastError, match=r"model\.codes is of torch\.uint4, which torch cannot"):
        run.save()
    run.close()
