"""Two runs on one machine: what breaks one of them does not reach the other, and leaves nothing."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from kit.acting import MOMENT, Place, clean_place, nothing_left
from kit.harness import job, wait_until


@pytest.fixture
def places(tmp_path: Path) -> Iterator[tuple[Place, Place]]:
    for name in ("broken", "calm"):
        (tmp_path / name).mkdir()
    with clean_place(tmp_path / "broken") as broken:
        calm = Place(tmp_path / "calm", broken.tmp)  # one temporary directory, as two runs of one user have
        yield broken, calm
        nothing_left(calm)


@pytest.mark.drill
def test_a_run_that_is_broken_twice_does_not_disturb_the_one_beside_it(places: tuple[Place, Place]) -> None:
    broken, calm = places
    command = broken.launch("--nproc-per-node", "2", acts="go?ok")
    with (
        job(command, cwd=calm.cwd, env=calm.environment()) as other,
        job(command, cwd=broken.cwd, env=broken.environment(), may_leave=True) as running,
    ):
        untouched = calm.await_workers(other, 1, 2)
        theirs = {path.name for path in calm.tmp.iterdir()}
        worker = broken.await_workers(running, 1, 2)[1]
        os.kill(worker.pid, signal.SIGKILL)
        broken.await_workers(running, 2, 2)
        running.signal(signal.SIGKILL)
        running.process.wait(MOMENT)
        wait_until(lambda: not running.processes(), MOMENT, "what the killed agent left is ended")
        wait_until(lambda: len(list(calm.tmp.iterdir())) == 2, MOMENT, "its directories are gone")
        assert {path.name for path in calm.tmp.iterdir()} <= theirs, "the other one's are not"
        assert {one.pid for one in untouched} <= set(other.processes()), "its workers live"
        calm.go()
        assert other.wait(60).code == 0, other.output().text
    assert calm.outcomes() == ["finished"]
    assert [one.attempt for one in calm.seen()] == [1, 1]
    assert broken.outcomes() == ["failed", "none"], "and the next launch may go on with it"
    assert broken.run().run_id != calm.run().run_id
