"""A power cut at any operation of a save: the newest commit is complete, and nothing older is lost."""

from __future__ import annotations

import contextlib
import pickle
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import holdfast
from kit.tiny import Outcome, around_scheduled_save, forked, train
from kit.worlds.powercut import READINGS, Disk, Operation, check_cuts, recording


def recorded_save(directory: Path) -> tuple[Path, list[Operation]]:
    """A run with a checkpoint of step 3, as it was before the save of step 6, and that save's operations.

    Made by a process that is gone afterwards, like one that lost its power.
    """

    def work() -> None:
        trace: list[Operation] = []

        @contextlib.contextmanager
        def recorded() -> Iterator[None]:
            shutil.copytree(directory / "run", directory / "before", symlinks=True)
            with recording(trace):
                yield
            (directory / "trace").write_bytes(pickle.dumps(trace))
            raise SystemExit(0)

        def at_step(now: int, run: holdfast.Run) -> None:
            if now == 6:
                around_scheduled_save(run, recorded)

        train(directory / "run", until=9, at_step=at_step)

    assert forked(work) == 0
    return directory / "before", pickle.loads((directory / "trace").read_bytes())


def test_power_cuts_all_over_a_save(tmp_path: Path, reference: Outcome) -> None:
    """Cases diffusion-pipe#159, nvidia-resiliency-ext#359; every eighth operation."""
    started = check_cuts(
        tmp_path, recorded_save(tmp_path), lambda count: [*range(0, count, 8), count], reference
    )
    assert started["names_first"] == started["torn"] == {3, 6}, "both sides of the commit were cut"
    assert 3 in started["strict"]


@pytest.mark.drill
def test_a_power_cut_at_every_operation_of_a_save(tmp_path: Path, reference: Outcome) -> None:
    started = check_cuts(tmp_path, recorded_save(tmp_path), lambda count: range(count + 1), reference)
    assert started == {reading: {3, 6} for reading in READINGS}


def test_the_model_tells_a_missing_fsync(tmp_path: Path) -> None:
    """The harness itself: a rename without fsyncs is lost, zero-length or torn; with them it is whole."""
    import os

    from holdfast.base.files import fsync_dir, replace_atomic, write_durable

    def cut(name: str, work: Any) -> dict[str, bytes | None]:
        home = tmp_path / name
        home.mkdir()
        (home / "old").write_bytes(b"old")
        disk = Disk(home)
        trace: list[Operation] = []
        with recording(trace):
            work(home)
        for operation in trace:
            disk.apply(operation)
        seen = {}
        for reading in READINGS:
            disk.write(tmp_path / f"{name}-{reading}", reading)
            target = tmp_path / f"{name}-{reading}" / "new"
            seen[reading] = target.read_bytes() if target.exists() else None
        return seen

    def careless(home: Path) -> None:
        fd = os.open(home / "tmp", os.O_WRONLY | os.O_CREAT)
        os.write(fd, b"12345678")
        os.close(fd)
        os.rename(home / "tmp", home / "new")

    def nearly(home: Path) -> None:
        write_durable(home / "tmp", b"12345678")
        os.rename(home / "tmp", home / "new")

    def careful(home: Path) -> None:
        nearly(home)
        fsync_dir(home)

    assert cut("careless", careless) == {"strict": None, "names_first": b"", "torn": b"1234"}
    assert cut("nearly", nearly) == {"strict": None, "names_first": b"12345678", "torn": b"12345678"}
    assert cut("careful", careful) == dict.fromkeys(READINGS, b"12345678")
    assert cut("ours", lambda home: replace_atomic(home / "new", b"12345678")) == dict.fromkeys(
        READINGS, b"12345678"
    )
