"""`holdfast.restartable`: a function that starts again in place, and the checks before it is first started.

Guarantee: whatever is known beforehand to make a restart fail is refused before anything is started. All
problems are named at once, each with its field, its value, where that came from and what to do.

What the checks of the environment protect from:

- TORCH_NCCL_RETHROW_CUDA_ERRORS: torch's watchdog of NCCL, when it learns of a failed collective, ends the
  process by rethrowing; at 0 it only ends itself. groups.py sets it for as long as there are groups of ours.
- NCCL_NVLS_ENABLE: communicators that use NVLink SHARP are not known to survive being aborted and made again;
  nvidia-resiliency-ext, which restarts functions too, asks for the same.
- TORCH_CPP_LOG_LEVEL: torch warns of every wait in a store that ends without an answer, and here many do.
- SLURM_KILL_BAD_EXIT: with ranks as tasks of srun, the first that ends badly would take all others with it.
"""

from __future__ import annotations

import functools
import logging
import os
import re
from collections.abc import Callable, Mapping, MutableMapping
from importlib import metadata
from typing import Any, ParamSpec, TypeVar

import msgspec
import torch.distributed as dist

from holdfast.base import current
from holdfast.cluster import slurm
from holdfast.config import Effective, sources
from holdfast.errors import ConfigError, UsageError
from holdfast.policy import Sizes, first_barrier, impossible
from holdfast.record import VARIABLE as LAUNCHED
from holdfast.record import LaunchInfo, one_config, restart_order, switched_off
from holdfast.restart.entry import VARIABLE as HANDED
from holdfast.restart.entry import join
from holdfast.restart.member import Member, Stage, Stages, default_backend
from holdfast.train import CrashHook

SECTION = "inprocess."
OLDEST_TORCH = (2, 11)
RETHROW = "TORCH_NCCL_RETHROW_CUDA_ERRORS"
NVLS = "NCCL_NVLS_ENABLE"
LOG_LEVEL = "TORCH_CPP_LOG_LEVEL"
KILL_ALL = "SLURM_KILL_BAD_EXIT"
_QUIET = frozenset({"error", "2", "fatal", "3"})


def refuse(
    effective: Effective,
    environ: Mapping[str, str],
    backend: str,
    members: int,
    *,
    group_timeout: float | None = None,
) -> None:
    """Raise ConfigError if a restart could not work.

    `backend` and `group_timeout`: as for `init_process_group`; empty and None leave them to torch.
    `members`: how many ranks were started.
    """
    chosen = effective.settings.inprocess
    if not chosen.enabled:
        found = _forgotten(effective)
    else:
        nccl = _uses_nccl(backend)
        watched = LAUNCHED in environ
        found = restart_order(effective, environ, watched=watched, nccl=nccl, group_timeout=group_timeout)
        found += impossible(_sizes(effective, members))
        found += _contradicted(environ) if nccl is not False else []
        found += _unknown_to_launcher(effective, environ)
        found += _scheduler(environ)
        found += _too_old(_torch_version())
    if found:
        count = "1 problem" if len(found) == 1 else f"{len(found)} problems"
        raise ConfigError("\n  ".join([f"{count} with in-process restart; nothing was started:", *found]))


def prepare(environ: MutableMapping[str, str], backend: str) -> list[str]:
    """Set what a restart needs in the environment, unless somebody has set it; returns mere nuisances.

    NCCL's part is read when the first group is made. The log level was read when torch was imported, and so
    helps only the processes that are started from here.
    """
    if _uses_nccl(backend) is not False:
        environ.setdefault(NVLS, "0")
    level = environ.setdefault(LOG_LEVEL, "error")
    if level.strip().lower() in _QUIET:
        return []
    return [
        f"{LOG_LEVEL} = {level} (environment): torch will warn of every wait in a restart that ends without "
        "an answer; set it to error unless that is wanted"
    ]


def _uses_nccl(backend: str) -> bool | None:
    """Whether a backend such as `nccl` or `cpu:gloo,cuda:nccl` uses NCCL; None if torch is to choose."""
    return "nccl" in backend.lower() if backend else None


def _forgotten(effective: Effective) -> list[str]:
    """Settings that nothing reads because the switch was never touched. Turning it off counts as meant."""
    if effective.sources[f"{SECTION}enabled"] != "default":
        return []
    given = [
        f"{key} = {msgspec.json.encode(effective.settings.get(key)).decode()} ({source})"
        for key, source in effective.sources.items()
        if key.startswith(SECTION) and source != "default"
    ]
    if not given:
        return []
    return [
        f"{', '.join(given)}: nothing reads this while {SECTION}enabled is false, its default; set "
        f"{SECTION}enabled = true, or say false to keep it for later"
    ]


def _unknown_to_launcher(effective: Effective, environ: Mapping[str, str]) -> list[str]:
    """What the launcher reads before it starts the script cannot be set in the script."""
    if LAUNCHED not in environ or HANDED in environ:
        return []
    source = effective.sources[f"{SECTION}enabled"]
    return [
        f"{SECTION}enabled = true ({source}): `holdfast run` started this script without knowing it, so "
        "nothing keeps these processes. Set it in the settings file, the environment or on the command line"
    ]


def _sizes(effective: Effective, members: int) -> Sizes:
    def shown(key: str) -> str:
        return f"{key} = {effective.settings.get(key)} ({effective.sources[key]})"

    chosen = effective.settings.inprocess
    return Sizes(
        started=members,
        active=chosen.active_world_size if isinstance(chosen.active_world_size, int) else None,
        active_shown=shown(f"{SECTION}active_world_size"),
        least=chosen.min_world_size if isinstance(chosen.min_world_size, int) else None,
        least_shown=shown(f"{SECTION}min_world_size"),
    )


def _contradicted(environ: Mapping[str, str]) -> list[str]:
    found: list[str] = []
    if RETHROW in environ and not switched_off(environ, RETHROW):
        found.append(
            f"{RETHROW} = {environ[RETHROW]} (environment): torch would end every rank at the first failed "
            f"collective; set {RETHROW}=0, or leave it unset"
        )
    if NVLS in environ and environ[NVLS].strip() != "0":
        found.append(
            f"{NVLS} = {environ[NVLS]} (environment): communicators with NVLink SHARP are not "
            f"known to survive being aborted and made again; set {NVLS}=0, or leave it unset"
        )
    return found


def _scheduler(environ: Mapping[str, str]) -> list[str]:
    """Without a launcher only: under one, the tasks of srun are its agents, and they outlive a rank."""
    task = environ.get("SLURM_PROCID")
    alone = environ.get("SLURM_STEP_NUM_TASKS", environ.get("SLURM_NTASKS")) == "1"
    if task is None or alone or LAUNCHED in environ or "TORCHELASTIC_RUN_ID" in environ:
        return []
    said = environ.get(KILL_ALL)
    if said is not None:
        kills, source = said.strip() != "0", f"{KILL_ALL} = {said} (environment)"
    else:  # one rank asks: thousands at once would hold up the controller
        kills = task == "0" and slurm.kills_on_bad_exit() is True
        source = "KillOnBadExit = 1 (slurm.conf)"
    if not kills:
        return []
    return [
        f"{source}: Slurm would end all ranks as soon as one ends badly; export {KILL_ALL}=0 before srun "
        "(srun's own --kill-on-bad-exit=0 cannot be seen from here), or use `holdfast run`"
    ]


def _torch_version() -> str:
    try:
        return metadata.version("torch")
    except metadata.PackageNotFoundError:  # not installed as a package, so nothing is known
        return ""


def _too_old(version: str) -> list[str]:
    numbers = re.match(r"(\d+)\.(\d+)", version)
    if numbers is None or (int(numbers[1]), int(numbers[2])) >= OLDEST_TORCH:
        return []
    oldest = ".".join(map(str, OLDEST_TORCH))
    return [
        f"torch {version}: aborting and making groups again was tried from {oldest} on; install that or newer"
    ]


# `holdfast.restartable`: a training function that starts again in place.
#
# ```python
# @holdfast.restartable("holdfast.toml", backend="nccl")
# def train() -> None:
#     ...                      # torch.distributed is initialised; build the model in here, make a Run, train
#
# train()
# ```
# On a fault anywhere (an exception, a lost process, a rank that stands still, a request) all healthy
# processes leave the function, and it starts again in them. The budgets are those for the launcher's
# restarts.


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

    `backend` and `timeout` (seconds) are those of the process group. A stage that is given replaces the
    default one; see `holdfast.restart.member`. The call returns what the function returned in this process,
    and None in a process that stayed a reserve.
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
        raise UsageError("write @holdfast.restartable() with parentheses: they hold its settings")

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
    CrashHook()  # stays installed: an error that ends the call ends the process with its own exit code
    launched = LaunchInfo.from_environment(os.environ)
    effective = sources.load(
        one_config(file, launched),
        command_line=launched.command_line if launched else None,
        keywords=keywords,
    )
    if current() is not None:
        raise UsageError("a restartable function was called inside another one; only one can restart")
    backend = backend or default_backend()
    started = int(os.environ.get("WORLD_SIZE", "1"))
    refuse(effective, os.environ, backend, started, group_timeout=timeout or None)
    if not effective.settings.inprocess.enabled:
        return _once(function, backend)
    if dist.is_initialized():
        raise UsageError(
            "torch.distributed was initialised before a restartable function was called, so its groups "
            "cannot be made anew after a fault. Leave init_process_group to `restartable`, or call it in a "
            "function given as `initialize`"
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
    """Call the function as a plain script would: once, with the group that the environment describes."""
    ours = "RANK" in os.environ and "MASTER_ADDR" in os.environ and not dist.is_initialized()
    if ours:
        dist.init_process_group(backend)
    try:
        return function()
    finally:
        if ours and dist.is_initialized():
            dist.destroy_process_group()
