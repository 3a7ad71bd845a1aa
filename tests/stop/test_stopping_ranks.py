"""Stopping on request inside ranks: after the same step on all, with one save, by a deadline."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import holdfast
from holdfast.checkpoint.format.structure import verify
from holdfast.errors import ExitCode, SaveFailedError, UsageError
from holdfast.journal.events import (
    AttemptEnded,
    JobFound,
    RunFinished,
    SaveStarted,
    StopAgreed,
    StopAsked,
    StopForced,
    StopSaved,
)
from holdfast.stop import signals
from kit.harness import REPO, Job, free_port, job, python, wait_until
from kit.nodes.local_tier import memory
from kit.ranks.stopping_ranks import LIMIT, Ranks, events, gate, hold, ranks, reasons
from kit.tiny import checkpoints, forked
from kit.tiny import train as train_alone

STOPPED, UNSAVED = int(ExitCode.STOPPED), int(ExitCode.STOPPED_UNSAVED)
SCRIPT = REPO / "tests" / "scripts" / "train" / "train_tiny.py"

# --- whole ranks ------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two ranks that nobody asks to stop."""
    place = tmp_path_factory.mktemp("reference")
    with ranks(place, until=9) as uninterrupted:
        assert uninterrupted.wait() == [0, 0], uninterrupted.errors()
    return place


def goes_on_as_if_nothing_had_been(place: Path, reference: Path, until: int = 9) -> None:
    with ranks(place, until=until) as again:
        assert again.wait() == [0, 0], again.errors()
        for rank in range(2):
            assert (place / f"params{rank}").read_text() == (reference / f"params{rank}").read_text()
            assert again.steps(rank) == Ranks(reference, [0, 0]).steps(rank)


def nothing_is_torn(place: Path) -> None:
    for path in checkpoints(place / "run"):
        assert verify(path).sound, verify(path).problems
    staging = place / "run" / "checkpoints" / ".staging"
    assert not staging.exists() or not [path for path in staging.iterdir() if path.is_dir()]


@pytest.mark.parametrize(
    ("number", "whom", "source"),
    [
        (signal.SIGTERM, [1], "signal"),
        (signal.SIGUSR1, [0, 1], "signal"),
        (signal.SIGUSR2, [0], "signal"),
        (None, [], "stop_file"),
    ],
    ids=["SIGTERM to one", "SIGUSR1 to all", "SIGUSR2 to rank 0", "the stop file"],
)
def test_whoever_is_asked_all_ranks_save_the_same_step_once_and_resume_exactly(
    tmp_path: Path, reference: Path, number: int | None, whom: list[int], source: str
) -> None:
    """Scenario 17, Lightning#20806, pytorch#154849 (SIGUSR1, SIGUSR2), E1."""
    with ranks(tmp_path, until=9, hook=gate(5)) as running:
        running.at("waiting")
        if number is None:
            (tmp_path / "run" / "stop").touch()
        else:
            running.signal(number, *whom)
            running.signal(signal.SIGUSR2, *whom)  # the same request on another way
        wait_until(lambda: events(tmp_path, StopAgreed), LIMIT, "the ranks agree")
        running.open_gate()
        assert running.wait() == [STOPPED, STOPPED], running.errors()
        assert running.last_steps() == [5, 5]
    assert reasons(tmp_path) == {3: ["scheduled"], 5: ["stop"]}
    (asked,) = events(tmp_path, StopAsked)
    assert asked.source == source
    assert asked.seconds == 600.0
    assert [body.step for body in events(tmp_path, StopAgreed)] == [5]
    (saved,) = events(tmp_path, StopSaved)
    assert saved.step == 5
    assert saved.checkpoint == checkpoints(tmp_path / "run")[0].name
    assert not saved.already
    assert 0 < saved.seconds <= saved.after
    assert events(tmp_path, RunFinished) == []
    assert [body.outcome for body in events(tmp_path, AttemptEnded)] == ["stopped"]
    nothing_is_torn(tmp_path)
    if number is None:
        (tmp_path / "run" / "stop").unlink()
    goes_on_as_if_nothing_had_been(tmp_path, reference)


def test_a_signal_on_a_save_step_makes_exactly_one_save(tmp_path: Path) -> None:
    """Scenario 18."""
    with ranks(tmp_path, until=9, hook=gate(6)) as running:
        running.at("waiting")
        running.signal(signal.SIGTERM, 0)
        wait_until(lambda: events(tmp_path, StopAgreed), LIMIT, "the ranks agree")
        running.open_gate()
        assert running.wait() == [STOPPED, STOPPED], running.errors()
    assert reasons(tmp_path) == {3: ["scheduled"], 6: ["stop"]}
    assert [body.step for body in events(tmp_path, SaveStarted)] == [3, 6]


def test_before_the_first_step_there_is_nothing_to_save_and_nothing_is(tmp_path: Path) -> None:
    def wait(run: holdfast.Run, rank: int) -> None:
        begin = run.begin_step

        def held() -> None:
            hold(tmp_path, f"waiting{rank}")
            begin()

        run.begin_step = held  # type: ignore[method-assign]

    with ranks(tmp_path, until=9, before_start=wait) as running:
        running.at("waiting")
        running.signal(signal.SIGTERM, 0)
        wait_until(lambda: events(tmp_path, StopAgreed), LIMIT, "the ranks agree")
        running.open_gate()
        assert running.wait() == [STOPPED, STOPPED], running.errors()
        assert [running.steps(rank) for rank in range(2)] == [[], []]
    assert checkpoints(tmp_path / "run") == []
    (saved,) = events(tmp_path, StopSaved)
    assert (saved.step, saved.checkpoint) == (0, "")


def test_a_signal_before_the_ranks_have_met_is_not_lost(tmp_path: Path) -> None:
    def wait(run: holdfast.Run, rank: int) -> None:
        hold(tmp_path, f"waiting{rank}")
        assert rank == 1 or run._halting.deadline.left is not None

    with ranks(tmp_path, until=5000, before_start=wait) as running:
        running.at("waiting")
        running.signal(signal.SIGTERM, 0)
        wait_until(lambda: "to rank 0" in running.errors(), LIMIT, "the rank has heard it")
        running.open_gate()
        assert running.wait() == [STOPPED, STOPPED], running.errors()
    (saved,) = events(tmp_path, StopSaved)
    for rank in range(2):
        done = [int(line.split()[0]) for line in running.steps(rank)]
        assert done == list(range(1, saved.step + 1)), "nobody goes on after the agreed step, wherever it is"
    newest = [path.name for path in checkpoints(tmp_path / "run")][:1]
    assert newest == ([saved.checkpoint] if saved.step else [])


def test_asked_during_a_resume_the_ranks_stop_before_they_train(tmp_path: Path, reference: Path) -> None:
    with ranks(tmp_path, until=3) as first:
        assert first.wait() == [0, 0], first.errors()
    before = reasons(tmp_path)

    def wait(run: holdfast.Run, rank: int) -> None:
        resume = run._session.resume

        def held(*joined: Any) -> None:
            hold(tmp_path, f"waiting{rank}")
            resume(*joined)

        run._session.resume = held  # type: ignore[method-assign]

    with ranks(tmp_path, until=9, before_start=wait) as running:
        running.at("waiting")
        running.signal(signal.SIGTERM, 1)
        wait_until(lambda: events(tmp_path, StopAgreed), LIMIT, "the ranks agree")
        running.open_gate()
        assert running.wait() == [STOPPED, STOPPED], running.errors()
        assert running.last_steps() == [3, 3]
    assert reasons(tmp_path) == before
    (saved,) = events(tmp_path, StopSaved)
    assert (saved.step, saved.already) == (3, True)
    goes_on_as_if_nothing_had_been(tmp_path, reference)


def test_a_run_that_reaches_its_end_at_that_very_step_has_finished(tmp_path: Path) -> None:
    with ranks(tmp_path, until=4, hook=gate(4)) as running:
        running.at("waiting")
        running.signal(signal.SIGTERM)
        wait_until(lambda: events(tmp_path, StopAgreed), LIMIT, "the ranks agree")
        running.open_gate()
        assert running.wait() == [0, 0], running.errors()
    assert reasons(tmp_path) == {3: ["scheduled"], 4: ["final"]}
    assert len(events(tmp_path, RunFinished)) == 1
    assert events(tmp_path, StopSaved, StopForced) == []


def test_a_stuck_collective_ends_by_the_deadline_with_stacks(tmp_path: Path, reference: Path) -> None:
    """Scenario 17: rank 1 never comes to the collective that rank 0 waits in."""
    with ranks(tmp_path, until=9, hook=gate(5, 1), stop_shutdown_timeout_sec=1.0) as running:
        wait_until((tmp_path / "waiting1").exists, LIMIT, "rank 1 is stuck")
        asked = time.monotonic()
        running.signal(signal.SIGTERM, 0)
        assert running.wait() == [UNSAVED, UNSAVED], running.errors()
        assert time.monotonic() - asked < 15
    for rank, doing in ((0, "all_reduce"), (1, "wait_until")):
        assert doing in (tmp_path / "run/attempts/000001/stop" / f"rank_{rank}.txt").read_text()
        assert doing in (tmp_path / f"err{rank}").read_text()
    forced = events(tmp_path, StopForced)
    assert sorted(body.rank for body in forced) == [0, 1]
    assert all("shutdown_timeout_sec" in body.why and body.stacks for body in forced)
    assert reasons(tmp_path) == {3: ["scheduled"]}
    assert events(tmp_path, StopSaved) == []
    nothing_is_torn(tmp_path)
    goes_on_as_if_nothing_had_been_after_a_kill(tmp_path, reference)


def goes_on_as_if_nothing_had_been_after_a_kill(place: Path, reference: Path) -> None:
    """As above, but for steps that were done and not saved: they are done again, the same."""
    with ranks(place, until=9) as again:
        assert again.wait() == [0, 0], again.errors()
        for rank in range(2):
            assert (place / f"params{rank}").read_text() == (reference / f"params{rank}").read_text()
            assert sorted(set(again.steps(rank))) == Ranks(reference, [0, 0]).steps(rank)


def test_an_error_on_the_way_to_the_stop_is_told_at_once_and_waits_for_nobody(tmp_path: Path) -> None:
    """Lightning#20187: no collective after an error, which would wait for dead peers and hide it."""
    wait = gate(5)

    def fail(run: holdfast.Run, rank: int, step: int) -> None:
        wait(run, rank, step)
        if step == 5 and rank == 1:
            raise RuntimeError("told to fail")

    with ranks(tmp_path, until=9, hook=fail) as running:
        running.at("waiting")
        running.signal(signal.SIGTERM, 0)
        wait_until(lambda: events(tmp_path, StopAgreed), LIMIT, "the ranks agree")
        started = time.monotonic()
        running.open_gate()
        assert running.wait() == [70, 70], running.errors()  # the other one has lost its peer
        assert time.monotonic() - started < 20
        assert "told to fail" in (tmp_path / "err1").read_text()
    assert events(tmp_path, StopSaved) == []
    assert reasons(tmp_path) == {3: ["scheduled"]}


def test_a_stop_whose_save_fails_ends_with_the_code_of_that(tmp_path: Path) -> None:
    def refuse(*args: object, **kwargs: object) -> None:
        raise SaveFailedError("the disk is full")

    def fail(run: holdfast.Run, rank: int, step: int) -> None:
        del rank
        if step == 5:
            run._session.saving._foreground.save = refuse  # type: ignore[assignment]
            os.kill(os.getpid(), signal.SIGTERM)
            wait_until(lambda: run.stopping, LIMIT, "the signal is heard")

    with ranks(tmp_path, 1, until=9, hook=fail) as running:
        assert running.wait() == [int(ExitCode.SAVE_FAILED)], running.errors()
    assert events(tmp_path, StopSaved) == []
    assert [body.outcome for body in events(tmp_path, AttemptEnded)] == ["failed"]
    nothing_is_torn(tmp_path)


def test_a_main_thread_that_keeps_the_interpreters_lock_is_ended_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(signals, "BEHIND", 0.5)

    def keep_lock(run: holdfast.Run, rank: int, step: int) -> None:
        del rank
        if step == 2:
            (tmp_path / "waiting0").touch()
            wait_until(lambda: run._halting.deadline.left is not None, LIMIT, "the deadline is armed")
            ctypes.PyDLL(None).sleep(1000)

    with ranks(tmp_path, 1, until=9, hook=keep_lock, stop_shutdown_timeout_sec=0.5) as running:
        running.at("waiting")
        running.signal(signal.SIGTERM)
        assert running.wait(20) == [1]
        assert "in keep_lock" in running.errors()


def test_a_stop_file_that_is_there_before_the_start_refuses_it(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "stop").touch()
    with pytest.raises(UsageError, match=r"stop file .*run/stop is there already.*Remove it"):
        holdfast.Run(run_dir=tmp_path / "run")
    assert (tmp_path / "run" / "stop").exists()
    with pytest.raises(UsageError, match=r"cannot be looked for.*Set stop\.stop_file"):
        holdfast.Run(run_dir=tmp_path / "other", stop_stop_file=str(tmp_path / ("x" * 300)))


def test_without_the_launcher_rank_0_stops_ahead_of_the_jobs_time_limit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """E1: the deadline is the scheduler's lead, less a margin, where that is shorter."""
    monkeypatch.setenv("SLURM_JOB_ID", "77")
    monkeypatch.setenv("SLURM_JOB_END_TIME", str(int(time.time()) + 58))
    monkeypatch.setenv("PATH", str(tmp_path))  # no scontrol: what the environment says has to do
    with ranks(tmp_path, 1, until=10**6, checkpoint_interval=0, slurm_preempt_time=60.0) as running:
        assert running.wait() == [STOPPED], running.errors()
    (asked,) = events(tmp_path, StopAsked)
    assert asked.source == "time_limit"
    assert "job 77" in asked.detail
    assert asked.seconds is not None
    assert asked.seconds <= 48
    (saved,) = events(tmp_path, StopSaved)
    assert reasons(tmp_path) == {saved.step: ["stop"]}


def test_without_the_launcher_a_signal_leaves_no_more_time_than_the_scheduler_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SLURM_JOB_ID", "77")
    monkeypatch.setenv("SLURM_JOB_END_TIME", str(int(time.time()) + 200))
    monkeypatch.setenv("PATH", str(tmp_path))
    with ranks(tmp_path, 1, until=9, hook=gate(5), slurm_requeue="never") as running:
        running.at("waiting")
        running.signal(signal.SIGTERM)
        wait_until(lambda: events(tmp_path, StopAgreed), LIMIT, "the rank agrees with itself")
        running.open_gate()
        assert running.wait() == [STOPPED], running.errors()
    (asked,) = events(tmp_path, StopAsked)
    assert asked.source == "signal"
    assert asked.seconds is not None
    assert 100 < asked.seconds <= 190
    (found,) = events(tmp_path, JobFound)
    assert (found.job, found.requeue) == ("77", "never"), "the batch script is told what the run is set to"


def test_a_save_that_is_known_not_to_fit_is_told(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """E1: warn when the last measured save does not fit."""

    def slow(run: holdfast.Run, rank: int, step: int) -> None:
        del rank
        if step == 5:
            run._session.schedule.note(blocked=99.0, commit=99.0)
            os.kill(os.getpid(), signal.SIGTERM)
            wait_until(lambda: run.stopping, 10, "the signal is heard")

    with ranks(tmp_path, 1, until=9, hook=slow, stop_shutdown_timeout_sec=30.0) as running:
        assert running.wait() == [STOPPED], running.errors()
        assert running.errors().count("the last save took 99.0 s, and 30 s are left") == 1


def test_a_stop_right_after_a_resume_from_the_nodes_memory_saves_to_the_root(tmp_path: Path) -> None:
    """A copy in the memory of nodes that are about to be given back is not where the state is safe."""
    with memory() as shm:
        local = {
            "checkpoint_async_save": True,
            "checkpoint_non_persistent_ckpt_type": "local",
            "checkpoint_non_persistent_local_ckpt_dir": str(shm),
            "checkpoint_non_persistent_save_interval": 2,
            "checkpoint_interval": 0,
            "checkpoint_save_at_end": False,
        }
        with ranks(tmp_path, 1, until=5, **local) as first:
            assert first.wait() == [0], first.errors()
        assert reasons(tmp_path) == {}

        def ask(run: holdfast.Run, rank: int) -> None:
            del rank
            begin = run.begin_step

            def held() -> None:
                os.kill(os.getpid(), signal.SIGTERM)
                wait_until(lambda: run.stopping, LIMIT, "the signal is heard")
                begin()

            run.begin_step = held  # type: ignore[method-assign]

        with ranks(tmp_path, 1, until=9, before_start=ask, **local) as running:
            assert running.wait() == [STOPPED], running.errors()
    (saved,) = events(tmp_path, StopSaved)
    assert (saved.step, saved.already) == (4, False)
    assert reasons(tmp_path) == {4: ["stop"]}


# --- real processes ---------------------------------------------------------------------------------------


@contextlib.contextmanager
def two_processes(place: Path, port: int, **more: str) -> Iterator[list[Job]]:
    """What torchrun would start, without its agent: rank 0 hosts the store."""
    with contextlib.ExitStack() as stack:
        yield [
            stack.enter_context(
                job(
                    python(SCRIPT),
                    cwd=place,
                    env={
                        "RANK": str(rank),
                        "WORLD_SIZE": "2",
                        "MASTER_ADDR": "127.0.0.1",
                        "MASTER_PORT": str(port),
                        "TINY_OUT": "out",
                        "TINY_WRAP": "ddp",
                        "TINY_UNTIL": "12",
                        **more,
                    },
                )
            )
            for rank in range(2)
        ]


@pytest.mark.drill
def test_processes_that_meet_in_a_tcp_store_stop_with_code_31(tmp_path: Path) -> None:
    """Every process gets the signal, as from a scheduler: also writers, which finish what they have."""
    with two_processes(tmp_path, free_port(), TINY_GATE="7", HOLDFAST_CHECKPOINT_ASYNC_SAVE="true") as both:
        for rank in range(2):
            wait_until((tmp_path / "out" / f"waiting{rank}").exists, 2 * LIMIT, f"rank {rank} is at the gate")
        for one in both:
            for pid in one.processes():
                os.kill(pid, signal.SIGUSR1)
        wait_until(lambda: events(tmp_path, StopAgreed), LIMIT, "the ranks agree")
        started = time.monotonic()
        (tmp_path / "out" / "go").touch()
        for one in both:
            result = one.wait()
            assert result.code == STOPPED, result.text
            assert "Traceback" not in result.err, result.text
        assert time.monotonic() - started < 30
    assert reasons(tmp_path) == {3: ["scheduled"], 6: ["scheduled"], 7: ["stop"]}
    (saved,) = events(tmp_path, StopSaved)
    assert saved.step == 7
    nothing_is_torn(tmp_path)
    assert not list((tmp_path / "out").glob("params*"))  # what comes after the loop did not run


def test_a_stop_is_neither_an_error_nor_the_end_of_the_loop(tmp_path: Path) -> None:
    def work() -> None:
        def ask(step: int, run: holdfast.Run) -> None:
            if step == 4:
                os.kill(os.getpid(), signal.SIGTERM)
                wait_until(lambda: run.stopping, LIMIT, "the signal is heard")

        try:
            train_alone(tmp_path / "run", until=500, at_step=ask)
        except Exception:  # noqa: BLE001 - which is what it must not be
            os._exit(99)
        os._exit(98)

    assert forked(work) == STOPPED
    assert reasons(tmp_path)[4] == ["stop"]
