"""Runs whose saves are taken by a fork: they resume bit by bit and lose no more than a child had not done."""

from __future__ import annotations

import os
import shutil
import signal
import threading
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from torch import nn

import holdfast
from forking_snapshots import Gate, alive, children, gated
from harness import wait_until
from holdfast.checkpoint import fork_child, host_stage
from holdfast.checkpoint.background import BackgroundSaver
from holdfast.checkpoint.frozen_memory import HostMemory
from holdfast.checkpoint.verify import verify
from holdfast.journal.events import Decision, SaveFailed, SaveSkipped, Warned
from test_writer_process import all_committed_once, nothing_in_staging, steps_of
from tiny import Outcome, checkpoints, die, forked, let_saves_end, train
from writers import forked_writers, ranks, told

FORK: dict[str, Any] = {"checkpoint_async_save": True, "checkpoint_snapshot": "fork"}
COST = "the next steps may pay for it"


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Outcome:
    return train(tmp_path_factory.mktemp("reference") / "run", until=12)


@pytest.fixture
def gate() -> Iterator[Gate]:
    with gated() as found:
        yield found


def saver(run: holdfast.Run) -> BackgroundSaver:
    assert run._saving is not None
    assert run._saving._background is not None
    return run._saving._background


def ways(run_dir: Path) -> list[str]:
    return [event.chosen for event in told(run_dir, Decision) if event.about == "snapshot"]


def warnings(run_dir: Path) -> list[str]:
    return [event.message for event in told(run_dir, Warned) if COST not in event.message]


def resumed(run_dir: Path, reference: Outcome, *, at: int) -> None:
    """The next attempt goes on from there and ends as a run that was never interrupted."""
    with forked_writers():
        outcome = train(run_dir, until=12, **FORK)
    assert outcome.started_at == at
    assert outcome.parameters == reference.parameters
    assert all(reference.losses[step] == loss for step, loss in outcome.losses.items())


# --- exact --------------------------------------------------------------------------------------------------


def test_a_run_resumes_bit_by_bit_from_what_was_copied_steps_later(
    tmp_path: Path, reference: Outcome, gate: Gate
) -> None:
    """Scenario 26: the optimizer, BatchNorm and the schedule all change before the child copies anything."""

    def at_step(step: int, run: holdfast.Run) -> None:
        if step in (4, 7, 10):
            assert len(saver(run)._flights) == 1, "the child waits, and training goes on"
        if step in (6, 9):  # two steps after the save, and before the next
            gate.open()
            let_saves_end(run)
            gate.close()
        if step == 12:
            gate.open()
            let_saves_end(run)
            die()

    def work() -> None:
        with forked_writers():
            train(tmp_path / "run", until=12, at_step=at_step, **FORK)

    assert forked(work) == -signal.SIGKILL
    all_committed_once(tmp_path / "run", [3, 6, 9])
    assert set(ways(tmp_path / "run")) == {"fork"}
    gate.open()
    resumed(tmp_path / "run", reference, at=9)


def test_what_a_fork_does_not_freeze_is_copied_in_the_call(
    tmp_path: Path, reference: Outcome, gate: Gate
) -> None:
    """The whole model is in shared memory, the optimizer's state is not."""

    def share(model: nn.Module) -> None:
        model.share_memory()

    def at_step(step: int, run: holdfast.Run) -> None:
        if step in (5, 8):
            assert len(saver(run)._flights) == 1
            gate.open()
            let_saves_end(run)
            gate.close()
        if step == 9:
            gate.open()
            die()

    def work() -> None:
        with forked_writers():
            train(tmp_path / "run", until=12, at_step=at_step, after_build=share, **FORK)

    assert forked(work) == -signal.SIGKILL
    all_committed_once(tmp_path / "run", [3, 6])
    gate.open()
    resumed(tmp_path / "run", reference, at=6)


def test_two_ranks_save_by_forks_side_by_side(tmp_path: Path, reference: Outcome) -> None:
    def work(rank: int) -> None:
        with forked_writers():
            train(tmp_path / "run", until=9, **FORK)

    ranks(tmp_path, 2, work)
    all_committed_once(tmp_path / "run", [3, 6, 9])


def test_an_image_of_the_local_tier_is_filled_by_a_fork(tmp_path: Path, reference: Outcome) -> None:
    shm = Path("/dev/shm") / f"holdfast-test-{uuid.uuid4().hex[:12]}"
    shm.mkdir()
    settings = {
        **FORK,
        "checkpoint_non_persistent_ckpt_type": "local",
        "checkpoint_non_persistent_local_ckpt_dir": str(shm),
        "checkpoint_non_persistent_save_interval": 2,
        "checkpoint_interval": 6,
    }

    def at_step(step: int, run: holdfast.Run) -> None:
        if step == 11:
            let_saves_end(run)
            die()

    def work() -> None:
        with forked_writers():
            train(tmp_path / "run", until=12, at_step=at_step, **settings)

    try:
        assert forked(work) == -signal.SIGKILL
        with forked_writers():
            outcome = train(tmp_path / "run", until=12, **settings)
        assert outcome.started_at == 10
        assert outcome.parameters == reference.parameters
        assert set(ways(tmp_path / "run")) == {"fork"}
    finally:
        shutil.rmtree(shm, ignore_errors=True)


# --- a trainer that dies ------------------------------------------------------------------------------------


def test_a_trainer_killed_before_the_child_reports_loses_that_snapshot_only(
    tmp_path: Path, reference: Outcome, gate: Gate
) -> None:
    def at_step(step: int, run: holdfast.Run) -> None:
        if step == 6:
            gate.open()
            let_saves_end(run)
            gate.close()
        if step == 7:
            (flight,) = saver(run)._flights.values()
            assert flight.staged is not None
            (tmp_path / "child").write_text(str(flight.staged._flight.pid))  # type: ignore[union-attr]
            die()

    def work() -> None:
        with forked_writers():
            train(tmp_path / "run", until=12, at_step=at_step, **FORK)

    assert forked(work) == -signal.SIGKILL
    child = int((tmp_path / "child").read_text())
    wait_until(lambda: not alive(child), 5, "the child dies with its trainer")
    assert steps_of(tmp_path / "run") == [3]
    gate.open()
    resumed(tmp_path / "run", reference, at=3)
    nothing_in_staging(tmp_path / "run")


def test_a_snapshot_that_the_child_has_reported_outlives_its_trainer(
    tmp_path: Path, reference: Outcome
) -> None:
    def at_step(step: int, run: holdfast.Run) -> None:
        if step == 7:
            wait_until(lambda: not saver(run)._flights, 10, "the snapshot of step 6 is staged")
            die()

    def work() -> None:
        with forked_writers():
            train(tmp_path / "run", until=12, at_step=at_step, **FORK)

    assert forked(work) == -signal.SIGKILL
    resumed(tmp_path / "run", reference, at=6)


# --- busy, and the end --------------------------------------------------------------------------------------


def test_a_second_snapshot_takes_the_other_buffer_and_a_third_waits(tmp_path: Path, gate: Gate) -> None:
    def at_step(step: int, run: holdfast.Run) -> None:
        if step == 9:
            assert len(saver(run)._flights) == 2
            threading.Timer(0.3, gate.open).start()

    with forked_writers():
        train(tmp_path / "run", until=10, at_step=at_step, **FORK)
    all_committed_once(tmp_path / "run", [3, 6, 9, 10])
    (warned,) = warnings(tmp_path / "run")
    assert "training waited" in warned
    assert "step_00000009" in warned


def test_skip_leaves_a_save_out_while_the_child_still_copies(tmp_path: Path, gate: Gate) -> None:
    def at_step(step: int, run: holdfast.Run) -> None:
        if step == 7:
            gate.open()

    with forked_writers():
        train(tmp_path / "run", until=8, at_step=at_step, checkpoint_when_busy="skip", **FORK)
    assert steps_of(tmp_path / "run") == [8, 3]
    assert [event.step for event in told(tmp_path / "run", SaveSkipped)] == [6]


def test_the_end_of_a_run_waits_for_the_child_and_leaves_none(tmp_path: Path, gate: Gate) -> None:
    before = children()

    def at_step(step: int, run: holdfast.Run) -> None:
        if step == 4:
            threading.Timer(0.3, gate.open).start()

    with forked_writers():
        train(tmp_path / "run", until=4, at_step=at_step, **FORK)
        all_committed_once(tmp_path / "run", [3, 4])
    assert children() == before


def test_an_error_in_the_loop_waits_for_the_child_too(tmp_path: Path, gate: Gate) -> None:
    before = children()

    def at_step(step: int, run: holdfast.Run) -> None:
        if step == 5:
            threading.Timer(0.3, gate.open).start()
            raise ZeroDivisionError

    with forked_writers():
        with pytest.raises(ZeroDivisionError):
            train(tmp_path / "run", until=9, at_step=at_step, **FORK)
        wait_until(lambda: steps_of(tmp_path / "run") == [3], 10, "the writer commits what was staged")
    assert children() == before


# --- falling back -------------------------------------------------------------------------------------------


def test_a_child_that_fails_costs_its_save_and_later_ones_block(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fork_child, "_copy", lambda *_: os.kill(os.getpid(), signal.SIGKILL))

    def at_step(step: int, run: holdfast.Run) -> None:
        if step == 5:
            let_saves_end(run)

    with forked_writers():
        train(tmp_path / "run", until=7, at_step=at_step, **FORK)
    assert steps_of(tmp_path / "run") == [7, 6]
    assert all(verify(path).sound for path in checkpoints(tmp_path / "run"))
    (failed,) = told(tmp_path / "run", SaveFailed)
    assert failed.step == 3
    assert "it ended without a word (signal 9)" in failed.error
    assert ways(tmp_path / "run") == ["fork", "block"]
    (warned,) = warnings(tmp_path / "run")
    assert "fork was asked for and cannot be: a child that copied a snapshot failed" in warned
    nothing_in_staging(tmp_path / "run")


def test_a_child_that_hangs_is_ended_and_its_save_fails(tmp_path: Path, gate: Gate) -> None:
    def at_step(step: int, run: holdfast.Run) -> None:
        if step == 4:
            let_saves_end(run)

    with forked_writers():
        train(tmp_path / "run", until=5, at_step=at_step, checkpoint_timeout=1.0, **FORK)
    assert steps_of(tmp_path / "run") == [5]
    (failed,) = told(tmp_path / "run", SaveFailed)
    assert "did not report within 1 s, and was ended" in failed.error


def test_a_fork_that_is_refused_costs_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*_arguments: Any, **_settings: Any) -> Any:
        raise OSError(12, "Cannot allocate memory")

    monkeypatch.setattr(host_stage.fork_stage, "begin", refused)
    with forked_writers():
        train(tmp_path / "run", until=6, **FORK)
    all_committed_once(tmp_path / "run", [3, 6])
    assert ways(tmp_path / "run") == ["fork", "block", "block"]
    assert any("a fork failed: [Errno 12]" in text for text in warnings(tmp_path / "run"))


@pytest.mark.parametrize(
    ("name", "value", "why"),
    [
        ("host_memory", lambda ranks: HostMemory(10 << 30, 10 << 30, 16 << 30), "only 10.0 GiB are free"),
        ("_uses_a_device", lambda: True, "torch has initialised a device"),
        ("frozen", lambda: host_stage.Frozen([]), "in memory that a fork freezes"),
    ],
    ids=["no room", "a device", "nothing is frozen"],
)
def test_where_a_fork_is_not_known_to_be_safe_it_blocks_and_says_why(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, value: Any, why: str
) -> None:
    monkeypatch.setattr(host_stage, name, value)
    monkeypatch.setattr(host_stage.fork_stage, "begin", lambda *_, **__: pytest.fail("it forked"))
    with forked_writers():
        train(tmp_path / "run", until=6, **FORK)
    all_committed_once(tmp_path / "run", [3, 6])
    assert ways(tmp_path / "run") == ["block"]
    (warned,) = warnings(tmp_path / "run")
    assert why in warned


def test_by_itself_it_never_forks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not even for large state, with cores to spare and steps that outlast the copy: the steps would pay."""
    monkeypatch.setattr(host_stage, "_cores", lambda: 4)
    monkeypatch.setattr(host_stage.fork_stage, "begin", lambda *_, **__: pytest.fail("it forked"))
    run = holdfast.Run(
        run_dir=tmp_path / "run", checkpoint_async_save=True, checkpoint_interval=0,
        checkpoint_save_at_end=False,
    )  # fmt: skip
    run.track(model=nn.Linear(4096, 4200))  # 66 MiB
    with forked_writers():
        run.start()
        host = saver(run)._stager._host
        host._step_seconds = lambda: 30.0
        run.begin_step()
        run.end_step()
        run.save()
        run.close()
    assert ways(tmp_path / "run") == []
    assert told(tmp_path / "run", Warned) == []
    assert len(checkpoints(tmp_path / "run")) == 1
