"""A kind of training: how its parts are built, what its step is, and what is expected of it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

SAMPLES, WIDTH, BATCH = 20, 6, 4
"""Five steps an epoch."""


@dataclass(frozen=True)
class Place:
    """Where the parts are built."""

    rank: int = 0
    world: int = 1
    device: str = "cpu"


@dataclass
class Parts:
    """What a script has before its loop, and the two halves of its step."""

    tracked: dict[str, Any]
    forward_backward: Callable[[Tensor], Tensor]
    update: Callable[[], None]
    before: Callable[[int], None] = lambda step: None
    """What the script does at the beginning of a step, by its number."""
    watched: dict[str, Any] = field(default_factory=dict)
    """What a script has and does not track, and what must come out the same all the same."""
    batches_a_step: int = 1


MIDDLE: list[Callable[[], None]] = []
"""Called in the middle of an accumulation: where the driver may kill."""


def middle() -> None:
    for call in MIDDLE:
        call()


@dataclass(frozen=True)
class Kind:
    name: str
    build: Callable[[Place], Parts]
    world: int = 1
    data: tuple[str, ...] = ()
    """The only data kinds that it goes with; none: any."""
    needs: str = ""
    """'gpu' if it cannot be tried without one, 'slow' if only the drill has time for it."""
    outcome: str = "exact"
    """'exact'; 'refused'; or 'not seen': different, by what a script has and does not track."""
    words: str = ""
    """What the refusal says, in part."""
    by: int = 3
    """The step by whose end it has ended, with a save every three: that of the first save; for what changes
    later, after as many failed saves as checkpoint.max_failed_saves allows, or at the end."""
    case: dict[str, Any] = field(default_factory=dict)
    """What of a case must be so, for this kind to show anything."""
    shapes: tuple[str, ...] = ("steps", "callback", "compute", "epochs")
    """The loops that it goes with: `compute` needs a step in two halves, `epochs` takes one batch a step."""


KINDS: dict[str, Kind] = {}


def kind(name: str, **facts: Any) -> Callable[[Callable[[Place], Parts]], Callable[[Place], Parts]]:
    def add(build: Callable[[Place], Parts]) -> Callable[[Place], Parts]:
        assert name not in KINDS
        KINDS[name] = Kind(name, build, **facts)
        return build

    return add


def mlp(hidden: int = 8) -> nn.Sequential:
    return nn.Sequential(nn.Linear(WIDTH, hidden), nn.Tanh(), nn.Dropout(0.1), nn.Linear(hidden, WIDTH))


def loss_of(model: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    return (model(x + 0.01 * torch.randn_like(x)) - x).square().mean()


def parts(
    model: Any,
    *optimizers: Any,
    schedule: Any = None,
    also: dict[str, Any] | None = None,
    loss: Callable[[Tensor], Tensor] | None = None,
    after: Callable[[], None] = lambda: None,
    before: Callable[[int], None] = lambda step: None,
    watched: dict[str, Any] | None = None,
) -> Parts:
    """The ordinary step: loss, backward; all optimizers, the schedule, and what comes after them."""
    measure = loss if loss is not None else partial(loss_of, model)

    def forward_backward(x: Tensor) -> Tensor:
        value = measure(x)
        value.backward()
        return value.detach()

    def update() -> None:
        for optimizer in optimizers:
            optimizer.step()
        if schedule is not None:
            schedule.step()
        after()
        for optimizer in optimizers:
            optimizer.zero_grad()

    tracked: dict[str, Any] = {"model": model}
    names = ["optimizer"] if len(optimizers) == 1 else [f"optimizer{n}" for n in range(len(optimizers))]
    tracked |= dict(zip(names, optimizers, strict=True))
    if schedule is not None:
        tracked["schedule"] = schedule
    return Parts(tracked | (also or {}), forward_backward, update, before, watched or {})
