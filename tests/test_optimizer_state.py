"""Optimizers of every kind go on exactly where they were, and neither a save nor a load steps one."""

from __future__ import annotations

import warnings
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn

from holdfast.checkpoint.roundtrip import first_difference
from holdfast.checkpoint.state import Tracked, check_strict, from_blob, to_blob


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
@pytest.mark.parametrize("after", [0, 1, 4])
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


@pytest.mark.parametrize("kind", KINDS)
def test_one_that_is_in_use_goes_back_exactly(kind: str, tmp_path: Path) -> None:
    """As in a restart within the process, where the optimizer has state already, and of later steps."""
    if kind == "grown":
        pytest.skip("a group once given cannot be taken away")
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
