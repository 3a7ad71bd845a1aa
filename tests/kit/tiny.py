"""A tiny training run in the test's own process, and forks of it, for tests that need many runs fast."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

import holdfast
from kit.harness import await_child, stood_at, tell_where_it_stood


class Numbers(Dataset[tuple[int, torch.Tensor]]):
    def __len__(self) -> int:
        return 20

    def __getitem__(self, index: int) -> tuple[int, torch.Tensor]:
        return index, torch.randn(6, generator=torch.Generator().manual_seed(index))


@dataclass
class Outcome:
    """What a run did in this process, exactly."""

    losses: dict[int, str] = field(default_factory=dict)
    samples: dict[int, list[int]] = field(default_factory=dict)
    parameters: dict[str, bytes] = field(default_factory=dict)
    started_at: int = 0
    attempt: int = 0


def build() -> tuple[nn.Module, torch.optim.Optimizer, Any, DataLoader[Any]]:
    torch.manual_seed(7)
    random.seed(7)
    model = nn.Sequential(nn.Linear(6, 12), nn.BatchNorm1d(12), nn.Dropout(0.1), nn.Linear(12, 6))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.9)
    return model, optimizer, schedule, DataLoader(Numbers(), batch_size=4, shuffle=True)


def train(
    run_dir: Path,
    *,
    until: int = 9,
    at_step: Callable[[int, holdfast.Run], None] | None = None,
    after_build: Callable[[nn.Module], None] | None = None,
    **settings: object,
) -> Outcome:
    """Train to `until`, resuming what is there. The same seeds give the same run, bit by bit."""
    model, optimizer, schedule, loader = build()
    if after_build is not None:
        after_build(model)
    run = holdfast.Run(run_dir=run_dir, **{"checkpoint_interval": 3, "control_lease_ttl": 5.0, **settings})
    run.track(model=model, optimizer=optimizer, schedule=schedule)
    outcome = Outcome()
    first = True
    for step, (ids, x) in run.steps(loader, until=until):
        if first:
            outcome.started_at, outcome.attempt, first = step - 1, run.attempt, False
        if at_step is not None:
            at_step(step, run)
        loss = (model(x + 0.01 * torch.randn_like(x)) - x).square().mean() + random.random() * 1e-3
        loss.backward()
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        run.record(loss=loss, samples=ids, tokens=x.numel())
        outcome.losses[step] = loss.item().hex()
        outcome.samples[step] = ids.tolist()
    outcome.parameters = {name: value.numpy().tobytes() for name, value in model.state_dict().items()}
    return outcome


def forked(work: Callable[[], None], timeout: float = 60.0) -> int:
    """Run `work` in a fork of this process; its wait status as from `os.waitstatus_to_exitcode`."""
    return await_child(start_fork(work), timeout)


def start_fork(work: Callable[[], None]) -> int:
    """The process id of a fork of this process that does this and ends."""
    sys.stdout.flush()
    sys.stderr.flush()
    pid = os.fork()
    if pid == 0:
        end_with(work)
    return pid


def end_with(work: Callable[[], None]) -> NoReturn:
    """In a forked child: do this, and end with the code that a script would end with; 70 for an error."""
    tell_where_it_stood()
    code = 70
    try:
        work()
        code = 0
    except SystemExit as leaving:
        code = int(leaving.code or 0)
    except holdfast.HoldfastError as error:
        traceback.print_exc()
        code = int(error.exit_code)
    except BaseException:  # noqa: BLE001 - the child must end here, whatever happened
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        stood_at(os.getpid()).unlink(missing_ok=True)
        os._exit(code)


def a_step(run: holdfast.Run) -> None:
    """A step in which nothing is trained."""
    run.begin_step()
    run.end_step()


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def around_scheduled_save(run: holdfast.Run, context: Callable[[], AbstractContextManager[None]]) -> None:
    """Make the run's scheduled saves from now on happen inside a context."""
    saving = run._session.saving
    assert saving is not None
    original = saving.scheduled

    def scheduled() -> None:
        with context():
            original()

    saving.scheduled = scheduled  # type: ignore[method-assign]


def let_saves_end(run: holdfast.Run, timeout: float = 60.0) -> None:
    """Wait until nothing is under way, as the loop would notice it: failures are reported, not raised."""
    saving = run._session.saving
    assert saving is not None
    deadline = time.monotonic() + timeout
    while saving._saver.is_under_way():
        assert time.monotonic() < deadline, "a save is still under way"
        saving.at_boundary()
        time.sleep(0.005)


FILE_OPERATIONS = (
    "open", "write", "pwrite", "ftruncate", "fsync", "rename", "replace", "link", "unlink", "mkdir", "rmdir",
)  # fmt: skip


@contextlib.contextmanager
def counting_file_operations(
    on_operation: Callable[[int, str, tuple[Any, ...]], None], *, any_thread: bool = False
) -> Iterator[None]:
    """Call `on_operation(number, name, arguments)` before every file operation made through `os`."""
    originals = {name: getattr(os, name) for name in FILE_OPERATIONS}
    number = 0
    caller = threading.current_thread()  # the lease is renewed from another thread, at times of its own

    def wrap(name: str) -> Callable[..., Any]:
        original = originals[name]

        def operation(*args: Any, **kwargs: Any) -> Any:
            nonlocal number
            changes = name != "open" or args[1] & (os.O_CREAT | os.O_WRONLY | os.O_RDWR)
            if changes and (any_thread or threading.current_thread() is caller):
                on_operation(number, name, args)
                number += 1
            return original(*args, **kwargs)

        return operation

    for name in FILE_OPERATIONS:
        setattr(os, name, wrap(name))
    try:
        yield
    finally:
        for name, original in originals.items():
            setattr(os, name, original)


def tree(directory: Path) -> dict[str, bytes]:
    """Every file below a directory, with its contents."""
    return {
        str(p.relative_to(directory)): p.read_bytes() for p in sorted(directory.rglob("*")) if p.is_file()
    }


def checkpoints(run_dir: Path) -> list[Path]:
    """Committed directories, newest step first."""
    found = [path for path in (run_dir / "checkpoints").glob("step_*") if path.is_dir()]
    return sorted(found, reverse=True)


def steps_of(run_dir: Path) -> list[int]:
    return [int(path.name[5:13]) for path in checkpoints(run_dir)]


class Holds:
    def __init__(self, state: Any) -> None:
        self.state = state

    def state_dict(self) -> Any:
        return self.state

    def load_state_dict(self, state: Any) -> None:
        self.state = state
