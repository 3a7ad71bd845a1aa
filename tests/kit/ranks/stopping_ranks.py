"""Ranks that train together as forks of the test's process, for tests that ask them to stop."""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import random
import signal
import sys
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import xxhash

import holdfast
from holdfast.checkpoint.format import manifest as manifests
from kit.harness import await_child, wait_until
from kit.runs import journalled
from kit.tiny import build, end_with

LIMIT = 60.0
events = journalled

Hook = Callable[[holdfast.Run, int, int], None]
"""(run, rank, step), called in the middle of every step."""


class Ranks:
    """Forked ranks of one attempt. Each leaves `steps<rank>`, `err<rank>` and, at the end, `params<rank>`."""

    def __init__(self, place: Path, pids: list[int]) -> None:
        self.place = place
        self.pids = pids
        self._codes: dict[int, int] = {}

    def signal(self, number: int, *ranks: int) -> None:
        for rank in ranks or range(len(self.pids)):
            os.kill(self.pids[rank], number)

    def wait(self, timeout: float = LIMIT) -> list[int]:
        for rank, pid in enumerate(self.pids):
            if rank not in self._codes:
                self._codes[rank] = await_child(pid, timeout)
        return [self._codes[rank] for rank in range(len(self.pids))]

    def kill(self) -> None:
        for rank, pid in enumerate(self.pids):
            if rank not in self._codes:
                with contextlib.suppress(ProcessLookupError, ChildProcessError):
                    os.kill(pid, signal.SIGKILL)
                    os.waitpid(pid, 0)

    def at(self, name: str) -> None:
        """Wait until every rank has left this mark."""
        wait_until(
            lambda: all((self.place / f"{name}{rank}").exists() for rank in range(len(self.pids))),
            LIMIT,
            f"all ranks reach {name}: {self.errors()}",
        )

    def open_gate(self) -> None:
        (self.place / "go").touch()

    def steps(self, rank: int) -> list[str]:
        return (self.place / f"steps{rank}").read_text().splitlines()

    def last_steps(self) -> list[int]:
        return [int(self.steps(rank)[-1].split()[0]) for rank in range(len(self.pids))]

    def errors(self) -> str:
        return "\n".join(path.read_text() for path in sorted(self.place.glob("err*")))


def gate(at: int, *ranks: int) -> Hook:
    """Wait in this step until the test opens the gate; only on these ranks, if any are named."""

    def hook(run: holdfast.Run, rank: int, step: int) -> None:
        if step == at and (not ranks or rank in ranks):
            hold(Path(run.settings.run.dir).parent, f"waiting{rank}")

    return hook


def hold(place: Path, mark: str) -> None:
    (place / mark).touch()
    wait_until((place / "go").exists, LIMIT, "the test opens the gate")


def train(
    place: Path,
    rank: int,
    world: int,
    *,
    until: int,
    hook: Hook | None = None,
    before_start: Callable[[holdfast.Run, int], None] | None = None,
    loader: Callable[[], Any] | None = None,
    **settings: Any,
) -> None:
    """A run whose ranks need each other in every step, and whose every loss and sample is recorded."""
    model, optimizer, schedule, plain = build()
    torch.manual_seed(7 + rank)
    run = holdfast.Run(
        run_dir=place / "run", **{"checkpoint_interval": 3, "control_lease_ttl": 5.0, **settings}
    )
    run.track(model=model, optimizer=optimizer, schedule=schedule)
    if before_start is not None:
        before_start(run, rank)
    with (place / f"steps{rank}").open("a", buffering=1) as log:
        for step, (ids, x) in run.steps(loader() if loader is not None else plain, until=until):
            loss = (model(x + 0.01 * torch.randn_like(x)) - x).square().mean() + random.random() * 1e-3
            loss.backward()
            if hook is not None:
                hook(run, rank, step)
            if world > 1:
                for parameter in model.parameters():
                    dist.all_reduce(parameter.grad)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
            run.record(loss=loss, samples=ids, tokens=x.numel())
            log.write(f"{step} {loss.item().hex()} {ids.tolist()}\n")
    digest = xxhash.xxh3_64_hexdigest(b"".join(v.numpy().tobytes() for v in model.state_dict().values()))
    (place / f"params{rank}").write_text(digest)


@contextlib.contextmanager
def ranks(
    place: Path, world: int = 2, work: Callable[[int], None] | None = None, *, meet: bool = True, **how: Any
) -> Iterator[Ranks]:
    """Fork the ranks of an attempt (`work` instead of `train`, if given); kills what is left of them.

    `meet`: in a process group, before anything else.
    """
    torch.set_num_threads(1)  # a fork has none of its parent's threads
    warm_up()
    for mark in [*place.glob("waiting*"), place / "go"]:
        mark.unlink(missing_ok=True)
    store = place / f"store-{time.monotonic_ns()}"
    pids = []
    for rank in range(world):
        sys.stdout.flush()
        pid = os.fork()
        if pid == 0:
            _become(place, rank, world, store if meet and world > 1 else None, work, how)
        pids.append(pid)
    started = Ranks(place, pids)
    try:
        yield started
    finally:
        started.kill()


@functools.cache
def warm_up() -> None:
    """What torch imports at first use is imported once, and not in every fork."""
    model, optimizer, _, _ = build()
    model(torch.zeros(4, 6)).sum().backward()
    optimizer.step()


def _become(
    place: Path,
    rank: int,
    world: int,
    store: Path | None,
    work: Callable[[int], None] | None,
    how: dict[str, Any],
) -> None:
    def be_a_rank() -> None:
        os.setsid()
        with (place / f"err{rank}").open("ab") as file:
            os.dup2(file.fileno(), 2)
        sys.stderr = os.fdopen(2, "w", buffering=1, closefd=False)
        logging.root.handlers[:] = [logging.StreamHandler(sys.stderr)]
        os.environ.update(RANK=str(rank), WORLD_SIZE=str(world))
        if store is not None:
            dist.init_process_group(
                "gloo",
                store=dist.FileStore(str(store), world),
                rank=rank,
                world_size=world,
                timeout=timedelta(seconds=LIMIT),
            )
        if work is not None:
            work(rank)
        else:
            train(place, rank, world, **how)

    end_with(be_a_rank)


def reasons(place: Path) -> dict[int, list[str]]:
    """Step → why each of its checkpoints was saved."""
    found: dict[int, list[str]] = {}
    for path in sorted((place / "run" / "checkpoints").glob("step_*")):
        manifest, _ = manifests.read(path)
        found.setdefault(manifest.step, []).append(manifest.reason)
    return found
