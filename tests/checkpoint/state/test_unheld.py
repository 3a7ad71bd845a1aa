"""What training uses and nothing tracked brings back is refused at the first save, by name; what anything
tracked holds, in whatever form, is not."""

from __future__ import annotations

import collections
import io
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import holdfast
from holdfast.checkpoint.format import manifest as manifests
from holdfast.checkpoint.state import proof
from holdfast.errors import IncompleteStateError
from kit.tiny import checkpoints

Parts = tuple[dict[str, Any], Callable[[int], None]]
"""What is tracked, and a step."""


def run_with(run_dir: Path, parts: Parts, until: int = 3, **settings: Any) -> None:
    """The first save is after the second step."""
    tracked, work = parts
    run = holdfast.Run(run_dir=run_dir, checkpoint_interval=2, control_lease_ttl=5.0, **settings)
    run.track(**tracked)
    for step, _ in run.steps([1, 2, 3], until=until):
        work(step)


def stepping(*optimizers: Any, loss: Callable[[], torch.Tensor]) -> Callable[[int], None]:
    def work(step: int) -> None:
        for one in optimizers:
            one.zero_grad()
        loss().backward()
        for one in optimizers:
            one.step()

    return work


# --- parameters ---------------------------------------------------------------------------------------------


def weight_of_the_loss(kind: Callable[..., Any] = torch.optim.Adam) -> Parts:
    model, weight = nn.Linear(2, 2), nn.Parameter(torch.ones(3))
    optimizer = kind([*model.parameters(), weight], 0.1)
    return {"model": model, "optimizer": optimizer}, stepping(
        optimizer, loss=lambda: model(torch.ones(1, 2)).sum() * weight.sum()
    )


class LeavesOut(nn.Module):
    """Gives its adapter away, as libraries for adapters do, and not its base."""

    def __init__(self) -> None:
        super().__init__()
        self.base, self.adapter = nn.Linear(2, 2), nn.Linear(2, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base(x) + self.adapter(x)  # type: ignore[no-any-return]

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:  # type: ignore[override]
        whole = super().state_dict(*args, **kwargs)
        return {name: value for name, value in whole.items() if name.startswith("adapter.")}

    def load_state_dict(self, state_dict: Any, strict: bool = True, assign: bool = False) -> Any:
        return super().load_state_dict(state_dict, strict=False, assign=assign)


def left_out(*, trained: bool) -> Parts:
    model = LeavesOut()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    part = model if trained else model.adapter
    return {"model": model, "optimizer": optimizer}, stepping(
        optimizer, loss=lambda: part(torch.ones(1, 2)).sum()
    )


@pytest.mark.parametrize(
    ("parts", "named"),
    [
        (weight_of_the_loss, r"track\(optimizer=…\): parameter 2 of group 0, of shape \(3,\), is trained"),
        (lambda: weight_of_the_loss(torch.optim.SGD), r"parameter 2 of group 0, of shape \(3,\), is trained"),
        (lambda: left_out(trained=True), r"track\(model=…\): base\.weight, .*its state_dict leaves out"),
    ],
)
@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_trained_parameter_that_nothing_brings_back_is_refused_at_the_first_save(
    tmp_path: Path, parts: Callable[[], Parts], named: str, asynchronous: bool
) -> None:
    with pytest.raises(IncompleteStateError, match=named) as caught:
        run_with(tmp_path / "run", parts(), checkpoint_async_save=asynchronous)
    assert "step_00000002" in str(caught.value)
    assert "run.track(loss=criterion)" in str(caught.value)
    assert checkpoints(tmp_path / "run") == []


class Packs:
    """Holds a parameter in a form of its own."""

    def __init__(self, weight: nn.Parameter) -> None:
        self._weight = weight

    def state_dict(self) -> dict[str, bytes]:
        buffer = io.BytesIO()
        torch.save(self._weight.detach(), buffer)
        return {"packed": buffer.getvalue()}

    def load_state_dict(self, state: dict[str, bytes]) -> None:
        with torch.no_grad():
            self._weight.copy_(torch.load(io.BytesIO(state["packed"])))


def packed() -> Parts:
    tracked, work = weight_of_the_loss()
    weight = tracked["optimizer"].param_groups[0]["params"][-1]
    return {**tracked, "loss": Packs(weight)}, work


def frozen() -> Parts:
    tracked, work = weight_of_the_loss()
    tracked["optimizer"].param_groups[0]["params"][-1].requires_grad_(False)
    return tracked, work


def of_a_tracked_module() -> Parts:
    tracked, work = weight_of_the_loss()
    loss = nn.Module()
    loss.weight = tracked["optimizer"].param_groups[0]["params"][-1]
    return {**tracked, "loss": loss}, work


@pytest.mark.parametrize("parts", [packed, frozen, of_a_tracked_module, lambda: left_out(trained=False)])
def test_one_that_some_object_holds_or_that_nobody_trains_is_none(
    tmp_path: Path, parts: Callable[[], Parts]
) -> None:
    run_with(tmp_path / "run", parts())
    run_with(tmp_path / "run", parts(), until=5)
    assert len(checkpoints(tmp_path / "run")) == 4


# --- optimizers ---------------------------------------------------------------------------------------------


def test_one_that_takes_the_place_of_another_is_told(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Once, when it has stepped twice; what a run past its first step trains with does not end it."""
    model = nn.Linear(2, 2)
    optimizers = [torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)]

    def work(step: int) -> None:
        if step == 3:
            optimizers.append(torch.optim.Adam(model.parameters(), 0.1))  # type: ignore[arg-type]
        stepping(optimizers[-1], loss=lambda: model(torch.ones(1, 2)).sum())(step)

    run_with(tmp_path / "run", ({"model": model, "optimizer": optimizers[0]}, work), until=8)
    (told,) = [record.message for record in caplog.records if "is not tracked" in record.message]
    assert "an Adam of track(model=…) steps now" in told
    assert "run.track(optimizer_2=…)" in told


class Around(torch.optim.Optimizer):
    """Around another one, as many repositories have it: without torch's constructor, so it takes no hooks.

    Its state_dict has torch's form; its own state, which it makes late, is a further entry.
    """

    def __init__(self, base: torch.optim.Optimizer, hooks: bool) -> None:
        self.base, self.count = base, 0
        self.defaults, self.param_groups = base.defaults, base.param_groups
        self.state = collections.defaultdict(dict)
        if hooks:
            self._optimizer_step_pre_hooks: Any = {}

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.base.zero_grad(set_to_none)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.base.step()
        self.count += 1
        if self.count % 3 == 0:
            for parameter in self._order():
                slow = self.state[parameter].setdefault("slow", torch.zeros_like(parameter))
                parameter.copy_(slow.lerp_(parameter, 0.5))

    def _order(self) -> list[torch.Tensor]:
        return [parameter for group in self.param_groups for parameter in group["params"]]

    def state_dict(self) -> dict[str, Any]:
        slow = {at: self.state[p] for at, p in enumerate(self._order()) if p in self.state}
        return {**self.base.state_dict(), "slow": slow, "count": self.count}

    def load_state_dict(self, state_dict: Any) -> None:
        self.base.load_state_dict({key: state_dict[key] for key in ("state", "param_groups")})
        self.param_groups, self.count = self.base.param_groups, state_dict["count"]
        order = self._order()
        self.state = collections.defaultdict(dict, {order[at]: v for at, v in state_dict["slow"].items()})


@pytest.mark.parametrize("hooks", [False, True], ids=["without hooks", "hooks in a plain dict"])
def test_an_optimizer_around_another_goes_on_exactly(tmp_path: Path, hooks: bool) -> None:
    """The inner one is not tracked itself; the outer one's own state comes after the first save."""

    def parts() -> tuple[nn.Module, Parts]:
        torch.manual_seed(3)
        model = nn.Linear(2, 2)
        outer = Around(torch.optim.Adam(model.parameters(), 0.1), hooks)
        return model, ({"model": model, "optimizer": outer}, stepping(outer, loss=loss_of(model)))

    def loss_of(model: nn.Module) -> Callable[[], torch.Tensor]:
        return lambda: model(torch.ones(1, 2)).square().sum()

    plain, (_, work) = parts()
    for step in range(1, 9):
        work(step)
    for until in (3, 5):
        run_with(tmp_path / "run", parts()[1], until=until)
    model, again = parts()
    run_with(tmp_path / "run", again, until=8)
    for (name, wanted), (_, found) in zip(plain.named_parameters(), model.named_parameters(), strict=True):
        assert torch.equal(wanted, found), name


def inner_loop() -> Parts:
    """A new one in each step, as in meta-learning: it takes nothing along."""
    model = nn.Linear(2, 2)

    def work(step: int) -> None:
        stepping(torch.optim.Adam(model.parameters(), 0.1), loss=lambda: model(torch.ones(1, 2)).sum())(step)

    return {"model": model}, work


class Keeps:
    """An object of the script's own around the optimizer."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._optimizer = optimizer

    def state_dict(self) -> dict[str, Any]:
        return {"inner": self._optimizer.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._optimizer.load_state_dict(state["inner"])


def kept_by_an_object() -> Parts:
    model = nn.Linear(2, 2)
    optimizer = torch.optim.Adam(model.parameters(), 0.1)
    return {"model": model, "keeper": Keeps(optimizer)}, stepping(
        optimizer, loss=lambda: model(torch.ones(1, 2)).sum()
    )


@pytest.mark.parametrize("parts", [inner_loop, kept_by_an_object])
def test_one_that_takes_nothing_along_or_that_an_object_keeps_is_none(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, parts: Callable[[], Parts]
) -> None:
    run_with(tmp_path / "run", parts())
    assert len(checkpoints(tmp_path / "run")) == 2
    assert "not tracked" not in caplog.text


# --- shared memory ------------------------------------------------------------------------------------------


class LoadsForEver(nn.Linear):
    def _load_from_state_dict(self, *args: Any) -> None:  # type: ignore[override]
        time.sleep(30)


def test_a_proof_does_not_write_to_memory_that_the_trainer_shares(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A fork that is ended in the midst of its work would leave other weights there."""
    monkeypatch.setattr(proof, "DEADLINE", 0.5)
    model = LoadsForEver(2, 2)
    model.share_memory()
    before: list[torch.Tensor] = []

    def work(step: int) -> None:
        assert not before or torch.equal(before[-1], model.weight), f"step {step} begins with other weights"
        with torch.no_grad():
            model.weight += 1.0
        before.append(model.weight.detach().clone())

    run_with(tmp_path / "run", ({"model": model}, work))
    found = manifests.read(checkpoints(tmp_path / "run")[-1])[0].proof
    assert "model.weight lies in memory that is shared between processes" in found.why_not
