"""Optimizers of every kind go on exactly where they were, and neither a save nor a load steps one."""

from __future__ import annotations

import os
import warnings
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import numpy
import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.checkpoint.state_dict import get_model_state_dict, get_optimizer_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.tensor import DTensor

import holdfast
from holdfast.checkpoint.choose.load import load_stock
from holdfast.checkpoint.state import optimizer as optimizer_state
from holdfast.checkpoint.state.adapters import flatten
from holdfast.checkpoint.state.optimizer import _empty, _Home, _unusual, match_groups, parameter_names
from holdfast.checkpoint.state.optimizer_load import load_packed
from holdfast.checkpoint.state.proof import first_difference
from holdfast.checkpoint.state.tracked import Tracked, check_strict, from_blob, to_blob
from holdfast.errors import IncompleteStateError, SaveFailedError, UsageError
from kit.tiny import forked


@dataclass
class Training:
    """A model, its optimizers and what a step does with them."""

    model: nn.Module
    optimizers: dict[str, torch.optim.Optimizer]
    step: Callable[[int], None]

    def tracked(self) -> Tracked:
        tracked = Tracked()
        tracked.add("model", self.model)
        for name, optimizer in self.optimizers.items():
            tracked.add(name, optimizer)
        return tracked

    def state(self) -> dict[str, Any]:
        """Everything that decides how it goes on."""
        return {
            "model": {name: one.detach().clone() for name, one in self.model.state_dict().items()},
            **{name: contents(self.model, one) for name, one in self.optimizers.items()},
        }


def contents(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """All of an optimizer, by what it is, not by what its state_dict says; tensors with all that they are."""
    names = {id(parameter): name for name, parameter in model.named_parameters()}

    def told(value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            if id(value) in names:
                return names[id(value)]
            kind = (type(value).__name__, value.device.type, value.requires_grad)
            return (
                *kind,
                tuple(value.stride()) if value.numel() else (),
                value.detach().clone(),
            )
        if isinstance(value, dict):
            keys = value if isinstance(value, OrderedDict) else sorted(value, key=str)
            return (type(value).__name__, {key: told(value[key]) for key in keys})
        if isinstance(value, (list, tuple, deque)):
            length = value.maxlen if isinstance(value, deque) else None
            return (type(value).__name__, length, [told(one) for one in value])
        return value if not isinstance(value, numpy.ndarray) else ("array", value.tolist())

    entries = {str(names.get(id(key), key)): told(entry) for key, entry in optimizer.state.items()}
    return {"state": dict(sorted(entries.items())), "groups": told(optimizer.param_groups)}


def same(one: Any, other: Any) -> None:
    assert not first_difference(one, other, ""), (first_difference(one, other, ""), one, other)


class Mlp(nn.Module):
    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.first = nn.Linear(4, 6, dtype=dtype)
        self.second = nn.Linear(6, 3, dtype=dtype)
        self.scale = nn.Parameter(torch.ones((), dtype=dtype))
        self.nothing = nn.Parameter(torch.empty(0, 3, dtype=dtype))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.second(torch.tanh(self.first(inputs))) * self.scale + self.nothing.sum()


def batch(step: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(5, 4, generator=torch.Generator().manual_seed(step)).to(dtype)


Make = Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]


def plainly(make: Make, dtype: torch.dtype = torch.float32) -> Callable[[], Training]:
    """One optimizer over a whole model; the first layer's bias never has a gradient before step 6."""

    def build() -> Training:
        model = Mlp(dtype)
        optimizer = make(model.parameters())

        def step(number: int) -> None:
            model(batch(number, dtype)).square().mean().backward()
            if number < 6:
                model.first.bias.grad = None
            optimizer.step()
            optimizer.zero_grad()

        return Training(model, {"optimizer": optimizer}, step)

    return build


def late() -> Training:
    """One optimizer begins after the save, as a GAN's generator may."""
    model = Mlp()
    early = torch.optim.Adam(model.first.parameters(), lr=0.1)
    later = torch.optim.Adam([*model.second.parameters(), model.scale], lr=0.1)

    def step(number: int) -> None:
        model(batch(number)).square().mean().backward()
        early.step()
        if number >= 6:
            later.step()
        model.zero_grad()

    return Training(model, {"early": early, "later": later}, step)


def closures() -> Training:
    model = Mlp()
    optimizer = torch.optim.LBFGS(
        model.parameters(), lr=0.1, max_iter=3, history_size=4, line_search_fn="strong_wolfe"
    )

    def step(number: int) -> None:
        def closure() -> torch.Tensor:
            optimizer.zero_grad()
            loss = model(batch(number)).square().mean()
            loss.backward()
            return loss

        optimizer.step(closure)

    return Training(model, {"optimizer": optimizer}, step)


def sparse() -> Training:
    model = nn.Sequential(nn.Embedding(9, 4, sparse=True), nn.Linear(4, 2))
    rows = torch.optim.SparseAdam(model[0].parameters(), lr=0.1)
    rest = torch.optim.SGD(model[1].parameters(), lr=0.1)

    def step(number: int) -> None:
        model(torch.tensor([number % 9, 3])).square().mean().backward()
        rows.step()
        rest.step()
        model.zero_grad()

    return Training(model, {"rows": rows, "rest": rest}, step)


def grown() -> Training:
    """A layer is given to the optimizer while the run trains, with another learning rate."""
    model = Mlp()
    optimizer = torch.optim.Adam(model.first.parameters(), lr=0.1)

    def step(number: int) -> None:
        if number == 3:
            optimizer.add_param_group({"params": list(model.second.parameters()), "lr": 0.01})
        model(batch(number)).square().mean().backward()
        optimizer.step()
        model.zero_grad()

    return Training(model, {"optimizer": optimizer}, step)


class Plain(torch.optim.Optimizer):
    """Gradient descent, for what else its state holds."""

    def __init__(self, parameters: Iterable[nn.Parameter], lr: float = 0.1) -> None:
        super().__init__(parameters, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self.one(parameter, parameter.grad, self.state[parameter])
                    parameter.add_(parameter.grad, alpha=-group["lr"])

    def one(self, parameter: nn.Parameter, grad: torch.Tensor, state: dict[str, Any]) -> None:
        raise NotImplementedError


class Lookahead(Plain):
    """Every third step the weights go half of the way back to slow ones, which a first step does not make."""

    def one(self, parameter: nn.Parameter, grad: torch.Tensor, state: dict[str, Any]) -> None:
        state["count"] = state.get("count", 0) + 1
        if state["count"] == 2:
            state["slow"] = parameter.clone()
        elif state["count"] % 3 == 0:
            state["slow"].lerp_(parameter, 0.5)
            parameter.copy_(state["slow"])


class Named(Plain):
    """Some of its state is nobody's."""

    def one(self, parameter: nn.Parameter, grad: torch.Tensor, state: dict[str, Any]) -> None:
        every: Any = self.state
        common = every["common"]
        common["steps"] = common.get("steps", 0) + 1
        common.setdefault("norm", torch.zeros(())).add_(grad.square().sum())
        every["list"] = [common["norm"] * 2, "words"]
        parameter.mul_(1 - 1e-3 * common["steps"])
        parameter.add_(common["norm"] * 1e-4)


class Numbers(Plain):
    """No tensor at all."""

    def one(self, parameter: nn.Parameter, grad: torch.Tensor, state: dict[str, Any]) -> None:
        state["count"] = state.get("count", 0) + 1
        state["none"], state["list"] = None, [1, 2.5, state["count"]]
        parameter.mul_(1 - 1e-2 * state["count"])


class Containers(Plain):
    """What torch's load_state_dict makes anew, and cannot; tensors of other shapes, deep inside."""

    def one(self, parameter: nn.Parameter, grad: torch.Tensor, state: dict[str, Any]) -> None:
        state.setdefault("recent", deque(maxlen=2)).append(grad.double().sum())
        state.setdefault("rows", {0: grad.clone(), "deep": [(torch.ones(2, 3, dtype=torch.int64), None)]})
        state["rows"][0].mul_(0.9).add_(grad)
        state["ordered"] = OrderedDict(b=grad.sum(), a=1)
        state["word"], state["array"] = "adagrad", numpy.arange(3)
        state["empty"] = torch.empty(0, 2)
        assert state["recent"].maxlen == 2
        assert state["word"] == "adagrad"
        parameter.add_(state["rows"][0] * 1e-2)
        parameter.add_(sum(state["recent"]).to(parameter.dtype) * 1e-3)


class Precise(Plain):
    """Keeps its state in single precision whatever its parameters are in, and some of it transposed."""

    def one(self, parameter: nn.Parameter, grad: torch.Tensor, state: dict[str, Any]) -> None:
        average = state.setdefault("average", torch.zeros_like(parameter, dtype=torch.float32))
        average.lerp_(grad.float(), 0.1)
        if grad.dim() == 2:
            turned = state.setdefault("turned", torch.zeros(grad.shape[::-1]).t())
            turned.add_(average)
        state["rows"] = [average.sum()]
        parameter.add_(average.to(parameter.dtype))


class Stepping(torch.optim.Adam):
    """Takes state over by stepping first, so that there is some to copy into; copies are made too late."""

    def load_state_dict(self, state_dict: Any) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.grad = torch.zeros_like(parameter)
        learned = [group["lr"] for group in self.param_groups]
        for group in self.param_groups:
            group["lr"] = 0.0
        self.step()
        for group, lr in zip(self.param_groups, learned, strict=True):
            group["lr"] = lr
        for number, entry in state_dict["state"].items():
            parameter = self.param_groups[0]["params"][number]
            for key, value in entry.items():
                self.state[parameter][key].copy_(value)


class Upcast(torch.optim.Adam):
    """Its state_dict is not its state: that is what its own load_state_dict is for."""

    def state_dict(self) -> Any:
        given = super().state_dict()
        state = {
            number: {key: value.double() if key != "step" else value for key, value in entry.items()}
            for number, entry in given["state"].items()
        }
        return {**given, "state": state, "beside": {"tensor": torch.arange(3), "n": 1}}

    def load_state_dict(self, state_dict: Any) -> None:
        assert state_dict["beside"]["tensor"].tolist() == [0, 1, 2]
        super().load_state_dict({key: state_dict[key] for key in ("state", "param_groups")})


class Pair(NamedTuple):
    one: torch.Tensor
    other: int


class Shared(Plain):
    """Tensors that are the same memory, and one that is the parameter's own."""

    def one(self, parameter: nn.Parameter, grad: torch.Tensor, state: dict[str, Any]) -> None:
        if not state:
            state["a"] = state["b"] = torch.zeros_like(parameter)
            state["mine"], state["pair"] = parameter.detach(), Pair(torch.zeros(2), 3)
        state["a"].add_(grad)
        state["pair"].one.add_(1)
        state["mine"].add_(state["b"], alpha=-0.1)
        assert torch.equal(state["a"], state["b"])
        assert state["mine"].data_ptr() == parameter.data_ptr()


class Anchored(Plain):
    """Begins with its parameter's own memory for state, and has its own later."""

    def __init__(self, parameters: Iterable[nn.Parameter]) -> None:
        super().__init__(parameters)
        for parameter in self.param_groups[0]["params"]:
            self.state[parameter]["anchor"] = parameter.detach()

    def one(self, parameter: nn.Parameter, grad: torch.Tensor, state: dict[str, Any]) -> None:
        if state["anchor"].data_ptr() == parameter.data_ptr():
            state["anchor"] = state["anchor"].clone()
        parameter.lerp_(state["anchor"], 0.1)


def precise_half(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    return Precise(parameters, lr=0.01)


KINDS: dict[str, Callable[[], Training]] = {
    "adam": plainly(lambda ps: torch.optim.Adam(ps, lr=0.1)),
    "adamw foreach": plainly(lambda ps: torch.optim.AdamW(ps, lr=0.1, foreach=True, amsgrad=True)),
    "adam fused": plainly(lambda ps: torch.optim.Adam(ps, lr=0.1, fused=True)),
    "adam with lr as a tensor": plainly(lambda ps: torch.optim.Adam(ps, lr=torch.tensor(0.1))),
    "adam named": plainly(lambda ps: torch.optim.Adam([(str(i), p) for i, p in enumerate(ps)], lr=0.1)),
    "nadam": plainly(lambda ps: torch.optim.NAdam(ps)),
    "asgd": plainly(lambda ps: torch.optim.ASGD(ps)),
    "sgd": plainly(lambda ps: torch.optim.SGD(ps, lr=0.1)),
    "sgd momentum": plainly(lambda ps: torch.optim.SGD(ps, lr=0.1, momentum=0.9)),
    "adagrad": plainly(lambda ps: torch.optim.Adagrad(ps, lr=0.1)),
    "adafactor": plainly(lambda ps: torch.optim.Adafactor([p for p in ps if p.numel()])),
    "adam bfloat16": plainly(lambda ps: torch.optim.Adam(ps, lr=0.1), torch.bfloat16),
    "late": late,
    "lbfgs": closures,
    "sparse": sparse,
    "grown": grown,
    "lookahead": plainly(Lookahead),
    "named entries": plainly(Named),
    "numbers": plainly(Numbers),
    "containers": plainly(Containers),
    "precise": plainly(precise_half, torch.bfloat16),
    "shared": plainly(Shared),
    "anchored": plainly(Anchored),
    "stepping": plainly(lambda ps: Stepping(ps, lr=0.1)),
    "upcast": plainly(lambda ps: Upcast(ps, lr=0.1)),
}


def save(tracked: Tracked, directory: Path) -> torch.Tensor:
    tensors, others = tracked.collect()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        dcp.save(tensors, checkpoint_id=directory, no_dist=True)
    return to_blob(others)


def load(tracked: Tracked, directory: Path, blob: torch.Tensor) -> None:
    others = from_blob(blob)
    metadata = dcp.FileSystemReader(directory).read_metadata()
    tensors = tracked.targets(others, metadata)
    check_strict(tensors, metadata)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        dcp.load(tensors, checkpoint_id=directory, no_dist=True)
    tracked.apply(tensors, others)


def built(kind: str, seed: int = 0) -> Training:
    torch.manual_seed(seed)
    return KINDS[kind]()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("after", [0, 4])
def test_a_resumed_optimizer_goes_on_exactly(kind: str, after: int, tmp_path: Path) -> None:
    """Bit by bit, in all that its state is; a save and a load change nothing of what goes on."""
    whole, first = built(kind), built(kind)
    for step in range(after):
        whole.step(step)
        first.step(step)
    before = first.state()
    blob = save(first.tracked(), tmp_path / "saved")
    same(before, first.state())
    resumed = built(kind, seed=1)
    load(resumed.tracked(), tmp_path / "saved", blob)
    same(before, resumed.state())
    for step in range(after, after + 5):
        for training in (whole, first, resumed):
            training.step(step)
    same(whole.state(), first.state())
    same(whole.state(), resumed.state())


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "grown"])  # a group cannot be taken away
def test_one_that_is_in_use_goes_back_exactly(kind: str, tmp_path: Path) -> None:
    """As in a restart within the process, where the optimizer has state already, and of later steps."""
    training = built(kind)
    for step in range(4):
        training.step(step)
    before = training.state()
    blob = save(training.tracked(), tmp_path / "saved")
    for step in range(4, 8):
        training.step(step)
    after = training.state()
    load(training.tracked(), tmp_path / "saved", blob)
    same(before, training.state())
    for step in range(4, 8):
        training.step(step)
    same(after, training.state())


@pytest.mark.parametrize(
    ("kind", "after"), [("adam", 0), ("sgd", 0), ("adagrad", 0), ("late", 2), ("stepping", 2)]
)
def test_nobody_steps_an_optimizer_but_the_loop(kind: str, after: int, tmp_path: Path) -> None:
    """Hooks are counted over a start, saves and a resume of a real run; gradients stay what they are."""
    calls: Counter[str] = Counter()

    def hooked(training: Training) -> Training:
        for one in training.optimizers.values():
            one.register_step_pre_hook(lambda *_: calls.update(["step"]))
            one.register_step_post_hook(lambda *_: calls.update(["step"]))
            one.register_state_dict_pre_hook(lambda *_: calls.update(["state_dict"]))
            one.register_state_dict_post_hook(lambda *_: calls.update(["state_dict"]))
            one.register_load_state_dict_pre_hook(lambda *_: calls.update(["load"]))
            one.register_load_state_dict_post_hook(lambda *_: calls.update(["load"]))
        return training

    def start(training: Training) -> holdfast.Run:
        run = holdfast.Run(run_dir=tmp_path / "run", checkpoint_interval=0)
        run.track(model=training.model, **training.optimizers)
        run.start()
        return run

    def looked_at(training: Training) -> Any:
        grads = {name: p.grad for name, p in training.model.named_parameters()}
        told = {name: grad.clone() if grad is not None else None for name, grad in grads.items()}
        return training.state(), told, [id(grad) for grad in grads.values()]

    first = hooked(built(kind))
    run = start(first)
    for step in range(after):
        run.begin_step()
        first.step(step)
        run.end_step()
    run.begin_step()
    run.end_step()
    calls.clear()
    before = looked_at(first)
    assert not any(grad is not None for grad in before[1].values())
    run.save()
    same(before, looked_at(first))
    first.model(batch(0)).sum().backward()
    before = looked_at(first)
    run.save()
    run.finish()
    same(before, looked_at(first))
    assert set(calls) == {"state_dict"}
    again = hooked(built(kind, seed=1))
    calls.clear()
    start(again).close()
    same(before[0], again.state())
    for mine, theirs in zip(again.model.parameters(), first.model.parameters(), strict=True):
        assert (mine.grad is None) == (theirs.grad is None)
        assert mine.grad is None or torch.equal(mine.grad, theirs.grad), "accumulated ones are state"
    del calls["state_dict"]
    asked = {"step": 2} if kind == "stepping" else {"load": 2 * len(first.optimizers)}
    assert calls == asked, "its own load_state_dict may do what it wants"


def test_what_a_plain_dcp_directory_does_not_hold_is_not_touched(tmp_path: Path) -> None:
    saved, fresh = built("late"), built("late", seed=1)
    for step in range(3):
        saved.step(step)
    tensors, _ = saved.tracked().collect()
    hooks: list[str] = []
    for one in fresh.optimizers.values():
        one.register_step_pre_hook(lambda *_: hooks.append("step"))
    fresh.optimizers["later"].register_load_state_dict_pre_hook(lambda *_: hooks.append("load"))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        dcp.save(tensors, checkpoint_id=tmp_path / "saved", no_dist=True)
    with pytest.raises(IncompleteStateError, match=r"does not hold later.*fresh_parts = 'later'"):
        load_stock(tmp_path / "saved", fresh.tracked())
    loaded = load_stock(tmp_path / "saved", fresh.tracked(), fresh=["later"])
    loaded.apply()
    same(saved.state(), fresh.state())
    assert not hooks
    assert [note for note in loaded.notes if note.startswith("later: begins anew")]
    assert not [note for note in loaded.notes if note.startswith("early")]


@pytest.mark.parametrize("kind", ["adam", "sgd momentum", "adafactor", "nadam"])
def test_a_checkpoint_of_an_older_release_loads(kind: str, tmp_path: Path) -> None:
    """Its optimizers were taken with torch's own function, and nothing more was noted."""
    first, resumed = built(kind), built(kind, seed=1)
    for step in range(3):
        first.step(step)
    given = get_optimizer_state_dict(first.model, first.optimizers["optimizer"])
    state = {
        name: {key: one for key, one in entry.items() if isinstance(one, torch.Tensor)}
        for name, entry in given["state"].items()
    }
    others = {
        name: {key: one for key, one in entry.items() if not isinstance(one, torch.Tensor)}
        for name, entry in given["state"].items()
    }
    tensors, all_else = first.tracked().collect()
    names = set(flatten(tensors["optimizer"]))
    tensors["optimizer"] = {"state": state}
    all_else["optimizer"] = {"state": others, "param_groups": given["param_groups"]}
    assert set(flatten(tensors["optimizer"])) == names, "the names are what they were"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        dcp.save(tensors, checkpoint_id=tmp_path / "saved", no_dist=True)
    load(resumed.tracked(), tmp_path / "saved", to_blob(all_else))
    same(first.state(), resumed.state())


def test_parameters_have_the_names_that_models_are_stored_under() -> None:
    model = nn.Sequential(
        checkpoint_wrapper(nn.Linear(2, 2)), nn.Sequential(torch.compile(nn.Linear(2, 2)), nn.Linear(2, 2))
    )
    model[1][1].weight = model[0].weight
    names = parameter_names(torch.compile(model))
    assert list(names) == ["0.weight", "0.bias", "1.0.weight", "1.0.bias", "1.1.bias"]
    assert set(names) <= set(get_model_state_dict(torch.compile(model)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    given = get_optimizer_state_dict(model, optimizer)
    assert given["param_groups"][0]["params"] == list(names)


def test_an_optimizer_over_no_tracked_model_goes_on_exactly(tmp_path: Path) -> None:
    def build(seed: int) -> tuple[nn.Module, torch.optim.Optimizer, Tracked]:
        torch.manual_seed(seed)
        model, tracked = Mlp(torch.bfloat16), Tracked()
        optimizer = Precise(model.parameters(), lr=0.01)
        tracked.add("model", nn.Linear(1, 1))
        tracked.add("optimizer", optimizer)
        return model, optimizer, tracked

    model, optimizer, tracked = build(0)
    model(batch(0, torch.bfloat16)).sum().backward()
    optimizer.step()
    blob = save(tracked, tmp_path / "saved")
    other, its_optimizer, its_tracked = build(1)
    load(its_tracked, tmp_path / "saved", blob)
    one, two = optimizer.state[model.first.weight], its_optimizer.state[other.first.weight]
    assert two["average"].dtype is torch.float32
    assert torch.equal(one["average"], two["average"])
    same(contents(model, optimizer)["state"], contents(other, its_optimizer)["state"])


class Forgetting(torch.optim.Adam):
    """Takes over all but the averages."""

    def load_state_dict(self, state_dict: Any) -> None:
        super().load_state_dict(state_dict)
        for entry in self.state.values():
            entry["exp_avg"].zero_()


class Decaying(torch.optim.Adam):
    """Changes the weights that were loaded."""

    def load_state_dict(self, state_dict: Any) -> None:
        super().load_state_dict(state_dict)
        with torch.no_grad():
            self.param_groups[0]["params"][0].mul_(0.5)


class Refusing(torch.optim.Adam):
    def load_state_dict(self, state_dict: Any) -> None:
        raise KeyError("something")


@pytest.mark.parametrize(
    ("kind", "told"),
    [
        (Forgetting, "Forgetting.load_state_dict, or a hook of it, changes the parameters or the state"),
        (Decaying, "Decaying.load_state_dict, or a hook of it, changes the parameters or the state"),
        (Refusing, "Refusing.load_state_dict does not take back what its state_dict gave: KeyError"),
    ],
)
def test_one_that_does_not_take_its_state_back_is_refused_by_name(
    kind: type[torch.optim.Adam], told: str, tmp_path: Path
) -> None:
    first, resumed = (plainly(lambda ps: kind(ps, lr=0.1))() for _ in range(2))
    first.step(0)
    blob = save(first.tracked(), tmp_path / "saved")
    with pytest.raises(IncompleteStateError, match=f"optimizer: {told}"):
        load(resumed.tracked(), tmp_path / "saved", blob)


def test_a_rank_is_not_given_what_only_another_had(tmp_path: Path) -> None:
    """All tensors of a name lie in one place; which of them a rank had is in its own blob."""
    more, fewer, resumed = built("containers"), built("containers"), built("containers", seed=1)
    for training in (more, fewer):
        training.step(0)
    own = fewer.optimizers["optimizer"].state
    for key in ("rows", "empty"):
        del own[fewer.model.first.weight][key]
    del own[fewer.model.scale]
    save(more.tracked(), tmp_path / "saved")
    load(resumed.tracked(), tmp_path / "saved", to_blob(fewer.tracked().collect()[1]))
    same(fewer.state(), resumed.state())


def test_state_that_cannot_be_stored_names_its_optimizer_at_the_first_save(tmp_path: Path) -> None:
    training = built("adam")
    training.optimizers["optimizer"].state[training.model.scale]["function"] = lambda: None
    run = holdfast.Run(run_dir=tmp_path / "run", checkpoint_interval=0)
    run.track(model=training.model, **training.optimizers)
    run.start()
    run.begin_step()
    run.end_step()
    with pytest.raises(IncompleteStateError, match=r"track\(optimizer=…\): its state cannot be saved"):
        run.save()
    run.close()


def test_an_entry_under_a_number_is_refused_at_the_save() -> None:
    training = built("adam")
    state: Any = training.optimizers["optimizer"].state
    state[3] = {"steps": 1}
    with pytest.raises(SaveFailedError, match=r"optimizer\.state\[3\].*Give it a name"):
        training.tracked().collect()


def test_groups_are_known_by_their_parameters() -> None:
    known = ["a", "b", "c", "d"]
    assert match_groups("o", [["a"], ["b"]], [["b"], ["a"]], known) == [1, 0]
    assert match_groups("o", [["a", "b"]], [["b", "a"], ["c"], ["d"]], known) == [0, 1, 2]
    for live, saved, told in [
        ([["a", "new"]], [["a"]], "parameter new is optimized, but was not when this was saved"),
        ([["a"]], [["a", "b"]], "parameter group 0 holds other parameters than when this was saved"),
        ([["a"]], [["a"], ["gone"]], "parameter gone was optimized, and the model has none of that name"),
        ([["a", "b"]], [["a"], ["b"]], "group 0 holds other parameters"),
        ([], [[]], "group 0 of the checkpoint has no counterpart"),
    ]:
        with pytest.raises(IncompleteStateError, match=told):
            match_groups("o", live, saved, known)


def test_a_parameter_that_was_not_optimized_is_missing_and_one_without_state_is_not(tmp_path: Path) -> None:
    first = built("adam")
    first.step(0)  # leaves the first bias without any
    blob = save(first.tracked(), tmp_path / "saved")
    model = Mlp()
    model.first.bias.requires_grad_(False)
    wholly = torch.optim.Adam(model.parameters())
    load(Training(model, {"optimizer": wholly}, print).tracked(), tmp_path / "saved", blob)
    assert model.first.bias not in wholly.state
    partly = torch.optim.Adam([*model.first.parameters(), model.nothing, model.scale])
    with pytest.raises(IncompleteStateError, match="parameter group 0 holds other parameters"):
        load(Training(model, {"optimizer": partly}, print).tracked(), tmp_path / "saved", blob)


def test_state_is_read_onto_the_kind_of_device_that_it_was_on() -> None:
    """The device without memory stands for an accelerator; of what is usual nothing is noted."""
    parameters = [None, torch.empty(2, 3, device="meta"), torch.ones((), device="meta")]
    groups: list[dict[str, Any]] = [{}, {"capturable": True}, {"fused": True}]
    shapes: list[tuple[int, ...]] = [(), (2, 3), (5,)]
    for parameter, group, shape, key, on_host in product(
        parameters, groups, shapes, ("step", "other"), (True, False)
    ):
        home = _Home(parameter, group, torch.device("meta"))
        saved = torch.empty(shape, device="cpu" if on_host else "meta", dtype=torch.float64)
        path = ("state", "name", key) if parameter is not None else ("named", key)
        facts = _unusual(saved, home, path)
        found = _empty(saved.size(), saved.dtype, home, path, facts, "")
        assert (found.device, found.size(), found.dtype) == (saved.device, saved.size(), saved.dtype)
        usual = on_host == (parameter is None or (key == "step" and not shape and not group))
        assert bool(facts) != usual


def unowned_and_distributed(folder: Path) -> None:
    dist.init_process_group("gloo", store=dist.FileStore(str(folder / "store"), 1), rank=0, world_size=1)

    def build(shape: tuple[int, ...]) -> tuple[Tracked, Plain]:
        torch.manual_seed(0)
        model = nn.Linear(2, 2)
        fully_shard(model, mesh=init_device_mesh("cpu", shape, mesh_dim_names=("a", "b")[: len(shape)]))
        optimizer, tracked = Lookahead(model.parameters()), Tracked()
        for _ in range(3):
            model(torch.ones(1, 2)).sum().backward()
            optimizer.step()
        tracked.add("model", nn.Linear(1, 1))
        tracked.add("optimizer", optimizer)
        return tracked, optimizer

    (tracked, optimizer), (_, other) = build((1,)), build((1, 1))
    blob = save(tracked, folder / "saved")
    packed = from_blob(blob)["optimizer"]
    same(packed, from_blob(blob)["optimizer"])
    load(tracked, folder / "saved", blob)
    assert all(isinstance(entry["slow"], DTensor) for entry in optimizer.state.values())
    with pytest.raises(IncompleteStateError, match="optimizer: state of parameter 0 was distributed over"):
        load_packed("optimizer", other, packed)


def test_distributed_state_in_a_blob_needs_the_mesh_that_it_had(tmp_path: Path) -> None:
    """An optimizer whose parameters are of no tracked model, or of several."""
    assert forked(partial(unowned_and_distributed, tmp_path)) == 0


def test_an_optimizer_that_keeps_a_parameter_which_the_model_has_replaced_is_refused_at_the_save() -> None:
    """No resume would have that parameter. One that was told of the new one is taken as before."""
    model = nn.Linear(2, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    tracked = Tracked()
    tracked.add("model", model)
    tracked.add("optimizer", optimizer)
    tracked.begin()
    old, model.weight = model.weight, nn.Parameter(torch.zeros(3, 2))
    with pytest.raises(
        SaveFailedError, match=r"parameter 0 of group 0, of shape \(3, 2\) of optimizer belongs"
    ):
        tracked.collect()
    group = optimizer.param_groups[0]
    group["params"] = [model.weight if parameter is old else parameter for parameter in group["params"]]
    tracked.collect()


def flat_parameters(folder: Path) -> None:
    dist.init_process_group("gloo", store=dist.FileStore(str(folder / "store"), 1), rank=0, world_size=1)
    model = nn.Sequential(FullyShardedDataParallel(nn.Linear(2, 2), device_id=torch.device("cpu")))
    with pytest.raises(UsageError, match=r"track\(model=…\): .* FullyShardedDataParallel.*fully_shard"):
        Tracked().add("model", model)


def test_flat_parameters_are_refused_when_they_are_tracked(tmp_path: Path) -> None:
    """What was saved of them came back as something else, silently."""
    assert forked(partial(flat_parameters, tmp_path)) == 0


class Mixed(Plain):
    """State of every layout over distributed parameters."""

    def one(self, parameter: nn.Parameter, grad: torch.Tensor, state: dict[str, Any]) -> None:
        if not state:
            state["like"] = torch.zeros_like(parameter, dtype=torch.float64)
            state["whole"] = torch.zeros(parameter.shape)
            state["rows"] = [torch.zeros_like(grad[:, :1])] if grad.dim() == 2 else []
            state["count"] = torch.zeros(3, dtype=torch.int32)
        state["like"].add_(grad)
        state["whole"].add_(grad.full_tensor())
        for rows in state["rows"]:
            rows.add_(grad.sum(dim=1, keepdim=True))
        state["count"] += 1


class Local(Plain):
    """Each rank keeps something of the size of its own part of a parameter."""

    def one(self, parameter: nn.Parameter, grad: torch.Tensor, state: dict[str, Any]) -> None:
        state.setdefault("own", torch.zeros_like(grad.to_local())).add_(grad.to_local())


class Uneven(Local):
    """One rank has more than the other."""

    def one(self, parameter: nn.Parameter, grad: torch.Tensor, state: dict[str, Any]) -> None:
        super().one(parameter, grad, state)
        if dist.get_rank() == 0:
            state["only here"], state["and"] = torch.ones(3), [torch.ones(2)]


def rank_of(world: int, rank: int, folder: Path, name: str, kinds: Sequence[type[Plain]], steps: int) -> None:
    """Starts a run with FSDP2, trains, and notes all of the optimizers' state, put together."""
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(world), "LOCAL_RANK": str(rank)}
    store = dist.FileStore(str(folder / f"store-{name}"), world)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world)
    torch.manual_seed(steps)
    model = nn.Sequential(nn.Linear(6, 8), nn.Linear(8, 6), nn.Linear(6, 4))
    fully_shard(model, mesh=init_device_mesh("cpu", (world,)))
    optimizers: dict[str, torch.optim.Optimizer] = {
        "adam": torch.optim.AdamW(model[0].parameters(), lr=0.1),
        "sgd": torch.optim.SGD(model[1].parameters(), lr=0.1, momentum=0.9),
        **{kind.__name__: kind(model[2].parameters()) for kind in kinds},
    }
    run = holdfast.Run(run_dir=folder / "run", checkpoint_interval=0)
    run.track(model=model, **optimizers)
    run.start()
    for step in range(steps):
        run.begin_step()
        model(torch.randn(4, 6, generator=torch.Generator().manual_seed(step))).square().sum().backward()
        for optimizer in optimizers.values():
            optimizer.step()
        model.zero_grad()
        run.end_step()

    def told(value: Any) -> Any:
        if isinstance(value, DTensor):
            return (str(value.placements), value.full_tensor())
        if isinstance(value, dict):
            return {key: told(value[key]) for key in sorted(value)}
        return [told(one) for one in value] if isinstance(value, list) else value

    state = {
        f"{name}.{at}": told(optimizer.state.get(parameter))
        for name, optimizer in optimizers.items()
        for at, parameter in enumerate(optimizer.param_groups[0]["params"])
    }
    torch.save(state, folder / f"{name}{rank}.pt")
    run.finish()
    dist.destroy_process_group()


def ranks_of(world: int, folder: Path, name: str, kinds: Sequence[type[Plain]], steps: int = 0) -> list[int]:
    with ThreadPoolExecutor(world) as pool:
        works = [partial(rank_of, world, rank, folder, name, kinds, steps) for rank in range(world)]
        return list(pool.map(forked, works))


def test_distributed_state_is_laid_out_as_its_parameters_are_now(tmp_path: Path) -> None:
    """FSDP2, over as many ranks and over others; what is whole on every rank, and what has other shapes."""
    assert ranks_of(2, tmp_path, "saved", [Mixed], steps=2) == [0, 0]
    assert ranks_of(2, tmp_path, "same", [Mixed]) == [0, 0]
    assert ranks_of(3, tmp_path, "other", [Mixed]) == [0, 0, 0]
    saved = torch.load(tmp_path / "saved0.pt")
    assert saved["Mixed.0"]["like"][0] == "(Shard(dim=0),)"
    assert saved["Mixed.0"]["whole"].any()
    same(saved, torch.load(tmp_path / "same0.pt"))
    same(saved, torch.load(tmp_path / "other0.pt"))


def test_each_rank_gets_back_what_it_had(tmp_path: Path) -> None:
    assert ranks_of(2, tmp_path, "saved", [Uneven], steps=1) == [0, 0]
    assert ranks_of(2, tmp_path, "same", [Uneven]) == [0, 0]
    for rank in (0, 1):
        saved = torch.load(tmp_path / f"saved{rank}.pt")
        assert ("only here" in saved["Uneven.0"]) == (rank == 0)
        same(saved, torch.load(tmp_path / f"same{rank}.pt"))


def test_what_each_rank_keeps_of_its_own_is_refused_by_name_on_others(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert ranks_of(2, tmp_path, "saved", [Local], steps=1) == [0, 0]
    capfd.readouterr()
    assert ranks_of(1, tmp_path, "other", [Local]) != [0]
    assert (
        "Local.state.2.bias.own (and 1 more) differs between the 2 ranks that saved it"
        in capfd.readouterr().err
    )


Change = Callable[[Any, Any], object]


def _first(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    return next(iter(optimizer.state.values()))


UNUSUAL: dict[str, Change] = {
    "nothing": lambda model, optimizer: None,
    "an entry gone": lambda model, optimizer: optimizer.state.pop(model[0].bias),
    "entries in another order": lambda model, optimizer: optimizer.state.update(
        {model[0].weight: optimizer.state.pop(model[0].weight)}
    ),
    "a number": lambda model, optimizer: _first(optimizer).update(count=3),
    "numbers": lambda model, optimizer: [one.update(count=3) for one in optimizer.state.values()],
    "a list of tensors": lambda model, optimizer: _first(optimizer).update(more=[torch.ones(2)]),
    "another size": lambda model, optimizer: _first(optimizer).update(exp_avg=torch.ones(7)),
    "another order in memory": lambda model, optimizer: _first(optimizer).update(
        exp_avg=torch.ones(5, 3).t()  # the parameter is 3 by 5
    ),
    "a gradient": lambda model, optimizer: _first(optimizer)["exp_avg"].requires_grad_(),
    "the parameter's memory": lambda model, optimizer: _first(optimizer).update(
        exp_avg=model[0].weight.detach()
    ),
    "shared memory": lambda model, optimizer: _first(optimizer).update(
        exp_avg_sq=_first(optimizer)["exp_avg"]
    ),
    "a shared step": lambda model, optimizer: [
        one.update(step=_first(optimizer)["step"]) for one in optimizer.state.values()
    ],
    "an entry under a name": lambda model, optimizer: optimizer.state.update(shared={"sum": torch.ones(2)}),
    "an own state_dict": lambda model, optimizer: optimizer.register_state_dict_post_hook(
        lambda o, state: {**state, "more": model[0].bias.detach()[:1]}
    ),
    "copies by state_dict": lambda model, optimizer: optimizer.register_state_dict_post_hook(
        lambda o, state: {**state, "state": {key: dict(one) for key, one in state["state"].items()}}
    ),
}


@pytest.mark.parametrize("change", UNUSUAL.values(), ids=UNUSUAL)
def test_an_optimizer_of_the_usual_kind_is_taken_at_once_and_like_any_other(
    change: Change, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = nn.Sequential(nn.Linear(5, 3), nn.Linear(3, 2))
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.ones(1, 5)).sum().backward()
    optimizer.step()
    change(model, optimizer)
    tensors, others = optimizer_state.collect("optimizer", optimizer, model)
    taken_at_once = optimizer_state.usual_entries(
        optimizer, optimizer.param_groups[0]["params"], optimizer.state_dict()
    )
    usual = ("nothing", "an entry gone", "entries in another order")
    assert (taken_at_once is not None) == any(change is UNUSUAL[name] for name in usual)
    monkeypatch.setattr(optimizer_state, "usual_entries", lambda *_: None)
    slowly, all_else = optimizer_state.collect("optimizer", optimizer, model)
    assert first_difference(others, all_else, "others") == ""
    assert list(others) == list(all_else)
    by_name, wanted = flatten(tensors), flatten(slowly)
    assert list(by_name) == list(wanted)
    assert [one.data_ptr() for one in by_name.values()] == [one.data_ptr() for one in wanted.values()]
