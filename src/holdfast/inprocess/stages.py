"""The stages of an iteration that can be replaced, each a small function of the `Iteration`.

`assign` is not among them: who is who is decided once for all, outside of the members, by the function that
`inprocess.assign` names. To do more than a stage does, put them together: `each(init_group(), mine)`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from holdfast.settings_inprocess import InProcessSettings

if TYPE_CHECKING:
    from torch.distributed import Store


@dataclass(kw_only=True)
class Iteration:
    """What a stage may know."""

    number: int
    member: int
    """The rank that this process was started with."""
    rank: int
    """-1 for a reserve, or where there is none yet."""
    world_size: int
    store: Store
    """The iteration's own part of the store, for the process group."""
    backend: str
    timeout: float
    """Of the process group, in seconds; 0 for torch's own."""
    chosen: InProcessSettings
    why: str = ""
    """What ended the iteration before, or this one."""


Stage = Callable[[Iteration], object]


def each(*stages: Stage) -> Stage:
    """One stage that is several, in this order."""

    def together(iteration: Iteration) -> None:
        for stage in stages:
            stage(iteration)

    return together


def nothing(iteration: Iteration) -> None:
    del iteration


def give_back(iteration: Iteration, value: Any) -> Any:
    """What the function returned, as it is."""
    del iteration
    return value


def init_group(iteration: Iteration) -> None:
    """torch.distributed, under the iteration's ranks and with keys of its own."""
    limit = timedelta(seconds=iteration.timeout) if iteration.timeout else None
    dist.init_process_group(
        iteration.backend,
        store=iteration.store,
        rank=iteration.rank,
        world_size=iteration.world_size,
        timeout=limit,
    )


def check_device(iteration: Iteration) -> None:
    """Raise if the device that this process has used computes no more: its context dies with the process."""
    del iteration
    if torch.cuda.is_available() and torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        one = torch.ones(64, device=torch.cuda.current_device())
        found = float(one.sum())  # waits for the device; the keeper minds how long
        if found != 64.0:
            raise RuntimeError(f"the device {torch.cuda.current_device()} counts 64 ones as {found}")


@dataclass(frozen=True, kw_only=True)
class Stages:
    initialize: Stage = init_group
    """Before the function, inside of what can be interrupted."""
    abort: Stage = nothing
    """After the function was left by a fault, before the groups are torn down."""
    finalize: Stage = nothing
    """After that: what else the function leaves behind."""
    health_check: Stage = check_device
    """Whether this process can be part of another iteration; raises if not."""
    complete: Callable[[Iteration, Any], Any] = give_back
    """What the call returns on an active member, once the function has returned on all."""
    terminate: Stage = nothing
    """Before a member ends that cannot go on here."""


def default_backend() -> str:
    return "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
