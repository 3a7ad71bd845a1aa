"""A run's control directory: fixtures of it, claims and beats by hand, and a clock that a test turns."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from holdfast.base.files import replace_atomic
from holdfast.process.proc import this_process
from holdfast.record.directory import ControlDirectory, create_record
from holdfast.record.lease import Claim, Fence, LeaseBeat, claim
from holdfast.record.standing import StandingBook


@pytest.fixture
def control(tmp_path: Path) -> ControlDirectory:
    """Of a new run."""
    return ControlDirectory.open_or_create(tmp_path / "run")[0]


@pytest.fixture
def fence(control: ControlDirectory) -> Fence:
    """Of a launch that holds the lease."""
    return Fence(control, claim(control, "launch", 5.0).epoch)


@pytest.fixture
def book(control: ControlDirectory) -> StandingBook:
    return StandingBook(control)


def held_elsewhere(control: ControlDirectory, *, epoch: int = 1, ttl: float = 0.4, **holder: object) -> Claim:
    """A claim written by hand, of a holder that cannot be seen from here unless `holder` says otherwise."""
    who = {"boot": "another machine", **holder}
    made = Claim(
        epoch=epoch,
        owner="other",
        holder=msgspec.structs.replace(this_process(), **who),
        ttl=ttl,
        at=0.0,
        evidence="by hand",
    )
    assert create_record(control.lease / f"{epoch:08d}.claim", made)
    return made


def beat(control: ControlDirectory, *, epoch: int = 1, count: int = 1, at: float | None = None) -> None:
    record = LeaseBeat(count=count, at=time.time() if at is None else at)
    replace_atomic(control.lease / f"{epoch:08d}.beat", msgspec.json.encode(record), durable=False)


def timed(action: Callable[[], Claim]) -> tuple[Claim, float]:
    started = time.monotonic()
    return action(), time.monotonic() - started


def tree(path: Path) -> dict[str, bytes]:
    return {str(file.relative_to(path)): file.read_bytes() for file in path.rglob("*") if file.is_file()}


class FakeTime:
    """A clock that a test turns by hand."""

    def __init__(self, on_sleep: Callable[[float], None] = lambda seconds: None) -> None:
        self.now = 1000.0
        self.on_sleep = on_sleep

    def monotonic(self) -> float:
        return self.now

    time = monotonic

    def sleep(self, seconds: float) -> None:
        self.now += seconds
        self.on_sleep(seconds)
