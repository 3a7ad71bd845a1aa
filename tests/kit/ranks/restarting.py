"""Processes that call a restartable function together, as forks of the test's process.

The keeper and the conductor are threads of the test's process, as they are of an agent under `holdfast run`,
so that no test has to wait for another process to import torch.
"""

from __future__ import annotations

import contextlib
import gc
import json
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, TCPStore

import holdfast
from holdfast.base.scope import Scope
from holdfast.config import sources
from holdfast.restart.conductor import Conductor, Denied, Granted, Restart
from holdfast.restart.entry import KeeperHandover
from holdfast.restart.keeper import Keeper
from holdfast.restart.keeper_process import Memory
from holdfast.restart.messages import PREFIX
from kit.harness import wait_until
from kit.ranks.stopping_ranks import Ranks, ranks

LIMIT = 60.0
QUICK: dict[str, object] = {
    "inprocess_enabled": True,
    "inprocess_granularity": "rank",
    "inprocess_soft_timeout": 6.0,
    "inprocess_hard_timeout": 12.0,
    "inprocess_barrier_timeout": 30.0,
    "inprocess_completion_timeout": 30.0,
    "inprocess_heartbeat_interval": 0.5,
    "inprocess_heartbeat_timeout": 20.0,
}
"""Short enough for a test, long enough for two busy cores."""

Hook = Callable[[Scope, int], None]
"""(scope, step), in the middle of every step."""


class Members(Ranks):
    """Each leaves a line in `said<member>` for every step (iteration, rank, world, step, value), and what the
    call returned in `returned<member>`."""

    keeper: Keeper
    conductor: Conductor

    def said(self, member: int) -> list[list[str]]:
        path = self.place / f"said{member}"
        return [line.split() for line in path.read_text().splitlines()] if path.exists() else []

    def iterations(self, member: int) -> list[int]:
        return sorted({int(line[0]) for line in self.said(member)})

    def returned(self, member: int) -> Any:
        return json.loads((self.place / f"returned{member}").read_text())

    def await_step(self, member: int, iteration: int, step: int) -> None:
        wait_until(
            lambda: [str(iteration), str(step)] in [[line[0], line[3]] for line in self.said(member)],
            LIMIT,
            f"member {member} reaches step {step} of iteration {iteration}: {self.errors()}",
        )


def steps(place: Path, scope: Scope, hook: Hook | None, *, until: int = 8) -> list[float]:
    """A loop whose ranks need each other in every step."""
    total = torch.zeros(1)
    found = []
    with (place / f"said{scope.member}").open("a", buffering=1) as log:
        for step in range(1, until + 1):
            if hook is not None:
                hook(scope, step)
            value = torch.tensor([float(step * (dist.get_rank() + 1))])
            dist.all_reduce(value)
            total += value
            found.append(float(value))
            scope.step = step
            log.write(f"{scope.iteration} {dist.get_rank()} {dist.get_world_size()} {step} {float(total)}\n")
    return found


def expected(world: int, *, until: int = 8) -> list[float]:
    return [float(step * world * (world + 1) // 2) for step in range(1, until + 1)]


def await_mark(path: Path) -> None:
    wait_until(path.exists, LIMIT, f"{path.name} appears")


@contextlib.contextmanager
def members(
    place: Path,
    count: int,
    hook: Hook | None = None,
    *,
    function: Callable[[], Any] | None = None,
    authorise: Callable[[Restart], Granted | Denied] | None = None,
    until: int = 8,
    stages: dict[str, Any] | None = None,
    **settings: Any,
) -> Iterator[Members]:
    """Fork the members; `function` is called instead of `steps`, if given."""
    chosen = {**QUICK, **settings}
    inprocess = sources.load(None, keywords=chosen).settings.inprocess
    handed = place / f"handed-{time.monotonic_ns()}.json"

    def work(member: int) -> None:
        gc.freeze()  # what the test's process left to be collected has threads that a fork has not
        await_mark(handed)
        os.environ.update(LOCAL_RANK=str(member), HOLDFAST_RESTART=handed.read_text())

        def body() -> Any:
            scope = holdfast.restart_scope()
            assert scope is not None
            return steps(place, scope, hook, until=until)

        call = holdfast.restartable(backend="gloo", **(stages or {}), **chosen)(function or body)
        value = call()
        (place / f"returned{member}").write_text(json.dumps(value))

    with ranks(place, count, work, meet=False) as started:
        started.__class__ = Members
        store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        mine = PrefixStore(PREFIX, store)
        pids = dict(enumerate(started.pids))
        keeper = Keeper(mine, "here", pids, inprocess, place / "keeper")
        conductor = Conductor(
            PrefixStore(PREFIX, store.clone()),
            dict.fromkeys(pids, "here"),
            count,
            inprocess,
            authorise or Memory(3).authorise,
            lambda event: None,
        )
        assert isinstance(started, Members)
        started.keeper, started.conductor = keeper, conductor
        told = KeeperHandover(
            host="127.0.0.1", port=store.port, keeper=keeper.path, members=count, node="here"
        )
        partial = handed.with_suffix(".part")
        partial.write_text(told.to_environment()["HOLDFAST_RESTART"])
        partial.rename(handed)
        try:
            yield started
        finally:
            started.kill()
            conductor.close()
            keeper.close()
            del started.keeper, started.conductor
