"""`holdfast.restartable`: a training function that starts again in place.

```python
@holdfast.restartable("holdfast.toml", backend="nccl")
def train() -> None:
    ...                      # torch.distributed is initialised; build the model in here, make a Run, train

train()
```
On a fault anywhere (an exception, a lost process, a rank that stands still, a request) all healthy processes
leave the function, and it starts again in them, within the same budgets as restarts by the launcher.
"""

from __future__ import annotations

import functools
import logging
import os
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

import torch.distributed as dist

from holdfast import config
from holdfast.control.handover import LaunchInfo, one_config
from holdfast.errors import UsageError
from holdfast.inprocess.joining import join
from holdfast.inprocess.member import Member
from holdfast.inprocess.refusing import prepare, refuse
from holdfast.inprocess.stages import Stage, Stages, default_backend
from holdfast.policy.restart_limits import first_barrier
from holdfast.scope import current
from holdfast.worker.crash import CrashHook

log = logging.getLogger("holdfast")

P = ParamSpec("P")
T = TypeVar("T")


def restartable(
    file: str | os.PathLike[str] | None = None,
    /,
    *,
    backend: str = "",
    timeout: float = 0.0,
    initialize: Stage | None = None,
    abort: Stage | None = None,
    finalize: Stage | None = None,
    health_check: Stage | None = None,
    complete: Callable[..., Any] | None = None,
    terminate: Stage | None = None,
    **settings: object,
) -> Callable[[Callable[P, T]], Callable[P, T | None]]:
    """Make a function restartable, as the settings say; they are spelt as for `Run`.

    `backend` and `timeout` (seconds) are those of the process group. A stage that is given takes the place of
    the one that would be; see `holdfast.inprocess.stages`. The call returns what the function returned in
    this process, and None in one that stayed a reserve.
    """
    given = {
        "initialize": initialize,
        "abort": abort,
        "finalize": finalize,
        "health_check": health_check,
        "complete": complete,
        "terminate": terminate,
    }
    stages = Stages(**{name: stage for name, stage in given.items() if stage is not None})  # type: ignore[arg-type]
    if callable(file):
        raise UsageError("write @holdfast.restartable() with parentheses: what they hold are its settings")

    def wrap(function: Callable[P, T]) -> Callable[P, T | None]:
        @functools.wraps(function)
        def call(*args: P.args, **kwargs: P.kwargs) -> T | None:
            return _call(
                functools.partial(function, *args, **kwargs), file, settings, stages, backend, timeout
            )

        return call

    return wrap


def _call(
    function: Callable[[], T],
    file: str | os.PathLike[str] | None,
    keywords: dict[str, object],
    stages: Stages,
    backend: str,
    timeout: float,
) -> T | None:
    CrashHook()  # stays: an error that ends the call ends the process with its own code
    launched = LaunchInfo.from_environment(os.environ)
    effective = config.load(
        one_config(file, launched),
        command_line=launched.command_line if launched else None,
        keywords=keywords,
    )
    if current() is not None:
        raise UsageError("a restartable function was called inside of another one; only one can restart")
    backend = backend or default_backend()
    started = int(os.environ.get("WORLD_SIZE", "1"))
    refuse(effective, os.environ, backend, started, group_timeout=timeout or None)
    if not effective.settings.inprocess.enabled:
        return _once(function, backend)
    if dist.is_initialized():
        raise UsageError(
            "torch.distributed was initialised before a restartable function was called, so its groups "
            "cannot be made anew after a fault. Leave init_process_group to `restartable`, or give it as "
            "`initialize`"
        )
    for nuisance in prepare(os.environ, backend):
        log.warning("holdfast: %s", nuisance)
    launch, chosen = effective.settings.launch, effective.settings.inprocess
    initial = effective.settings.monitor.initial_rank_heartbeat_timeout
    joined = join(
        chosen,
        os.environ,
        node=launch.node_name,
        max_restarts=launch.max_restarts,
        first_barrier=first_barrier(initial, chosen.barrier_timeout),
    )
    try:
        return Member(joined, effective.settings, stages, backend=backend, timeout=timeout).run(function)
    finally:
        joined.close()


def _once(function: Callable[[], T], backend: str) -> T:
    """As a plain script: one call, with the groups that the launcher's environment describes."""
    ours = "RANK" in os.environ and "MASTER_ADDR" in os.environ and not dist.is_initialized()
    if ours:
        dist.init_process_group(backend)
    try:
        return function()
    finally:
        if ours and dist.is_initialized():
            dist.destroy_process_group()
