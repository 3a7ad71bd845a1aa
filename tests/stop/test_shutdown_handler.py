"""ShutdownHandler: a loop of one's own stops when asked, on all ranks after the same step, without Run."""

from __future__ import annotations

import os
import re
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import holdfast
from holdfast.errors import ExitCode, UsageError
from holdfast.stop import signals
from kit.harness import REPO, finish, wait_until
from kit.nodes.fake_scontrol import changed, installed, limit_in
from kit.ranks.stopping_ranks import LIMIT, hold, ranks
from kit.tiny import forked

UNTIL = 2000


def loop(
    place: Path,
    rank: int,
    at_step: Callable[[holdfast.ShutdownHandler, int], None] | None = None,
    first: int = 1,
    **how: object,
) -> None:
    """A loop that needs all ranks in every step, and leaves word of where it stopped."""
    with holdfast.ShutdownHandler(**how) as stop:  # type: ignore[arg-type]
        for step in range(first, UNTIL):
            if at_step is not None:
                at_step(stop, step)
            if dist.is_initialized():
                dist.all_reduce(torch.ones(1))
            if stop.should_stop(step):
                (place / f"saved{rank}").write_text(f"{step} {stop.why}")
                break


def saved(place: Path, world: int = 2) -> list[str]:
    return [(place / f"saved{rank}").read_text() for rank in range(world)]


@pytest.mark.parametrize(("number", "whom"), [(signal.SIGTERM, [1]), (signal.SIGUSR1, [0, 1])])
def test_a_signal_to_any_rank_stops_all_after_the_same_step(
    tmp_path: Path, number: int, whom: list[int]
) -> None:
    """E9, Lightning#20806."""

    def work(rank: int) -> None:
        def at_step(stop: holdfast.ShutdownHandler, step: int) -> None:
            if step == 104:
                hold(tmp_path, f"waiting{rank}")
                wait_until(lambda: stop.stopping, LIMIT, "the request is heard here")

        loop(tmp_path, rank, at_step, first=101)

    with ranks(tmp_path, work=work) as running:
        running.at("waiting")
        running.signal(number, *whom)
        running.open_gate()
        assert running.wait() == [0, 0], running.errors()
    first, second = saved(tmp_path)
    assert first == second
    assert first.startswith("104 ")
    assert signal.Signals(number).name in first


def test_a_stop_file_asks_too_and_the_calls_are_counted_where_no_step_is_given(tmp_path: Path) -> None:
    def work(rank: int) -> None:
        with holdfast.ShutdownHandler(stop_file=tmp_path / "enough") as stop:
            done = 0
            while not stop.should_stop():
                dist.all_reduce(torch.ones(1))
                done += 1
                if done == 3:
                    (tmp_path / "enough").touch()
        (tmp_path / f"saved{rank}").write_text(str(done))

    with ranks(tmp_path, work=work) as running:
        assert running.wait() == [0, 0], running.errors()
    assert len(set(saved(tmp_path))) == 1


def test_a_stop_file_that_cannot_be_looked_for_is_told_once_and_signals_are_heard_all_the_same(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    link = tmp_path / "link"
    link.symlink_to("x" * 300)  # longer than a name may be
    with holdfast.ShutdownHandler("SIGUSR1", stop_file=link / "enough") as stop:
        assert stop._over_store is not None
        for _ in range(2):
            stop._over_store._wake.set()
            wait_until(lambda: not stop._over_store._wake.is_set(), LIMIT, "it is looked for")
        wait_until(lambda: "cannot be looked for" in caplog.text, LIMIT, "that is told")
        assert not stop.should_stop(1)
        os.kill(os.getpid(), signal.SIGUSR1)
        wait_until(lambda: stop.stopping, LIMIT, "the signal is heard")
        assert stop.should_stop(2)
    assert caplog.text.count("cannot be looked for") == 1


def test_by_the_deadline_a_rank_that_does_not_leave_is_ended_with_its_stacks(tmp_path: Path) -> None:
    def work(rank: int) -> None:
        def at_step(stop: holdfast.ShutdownHandler, step: int) -> None:
            del stop
            if step == 2 and rank == 1:
                hold(tmp_path, "waiting1")

        loop(tmp_path, rank, at_step, timeout=0.7, stacks=tmp_path / f"stacks{rank}")

    with ranks(tmp_path, work=work) as running:
        wait_until((tmp_path / "waiting1").exists, LIMIT, "rank 1 is stuck")
        running.signal(signal.SIGTERM, 0)
        assert running.wait(20) == [int(ExitCode.STOPPED_UNSAVED)] * 2, running.errors()
    assert "all_reduce" in (tmp_path / "stacks0").read_text()
    assert "in hold" in (tmp_path / "stacks1").read_text()
    assert not list(tmp_path.glob("saved*"))


def test_where_slurm_ends_the_job_the_deadline_is_killwait(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    fake = installed(tmp_path, monkeypatch)
    fake.answer(limit_in(6000))
    fake.configure(kill_wait=20)
    monkeypatch.setenv("SLURM_JOB_ID", "1")
    monkeypatch.setenv("SLURM_RESTART_COUNT", "2")
    with holdfast.ShutdownHandler(timeout=600) as stop:
        wait_until(lambda: "Slurm leaves 20 s" in caplog.text, LIMIT, "the start says what there is")
        fake.answer(changed(JobState="COMPLETING"))
        os.kill(os.getpid(), signal.SIGTERM)
        wait_until(lambda: "the stop must be over within" in caplog.text, LIMIT, "Slurm was asked")
        left = stop._deadline.left
        assert left is not None
        assert left <= 16.0
        assert "within 16 s if it is Slurm that ends the job (KillWait = 20 s)" in caplog.text
        assert stop.should_stop(1)


def test_a_given_store_serves_ranks_that_have_no_group(tmp_path: Path) -> None:
    store = tmp_path / "given"

    def work(rank: int) -> None:
        given = dist.FileStore(str(store), 2)

        def at_step(stop: holdfast.ShutdownHandler, step: int) -> None:
            if step == 5:
                hold(tmp_path, f"waiting{rank}")
                wait_until(lambda: stop.stopping, LIMIT, "the request is heard here")

        loop(tmp_path, rank, at_step, group=(given, (rank, 2)))

    with ranks(tmp_path, work=work, meet=False) as running:
        running.at("waiting")
        running.signal(signal.SIGTERM, 0)
        running.open_gate()
        assert running.wait() == [0, 0], running.errors()
    first, second = saved(tmp_path)
    assert first == second
    assert re.fullmatch(r"5 SIGTERM( from .+ \(pid \d+, .+\))? to rank 0", first)


def test_two_loops_one_after_the_other_do_not_hear_each_others_requests(tmp_path: Path) -> None:
    def work(rank: int) -> None:
        def ask(stop: holdfast.ShutdownHandler, step: int) -> None:
            if rank == 0 and step == 2:
                os.kill(os.getpid(), signal.SIGTERM)

        loop(tmp_path, rank, ask)
        with holdfast.ShutdownHandler() as stop:
            for step in range(1, 50):
                dist.all_reduce(torch.ones(1))
                assert not stop.should_stop(step)
        assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL

    with ranks(tmp_path, work=work) as running:
        assert running.wait() == [0, 0], running.errors()


def test_a_rank_that_has_done_all_its_steps_is_not_waited_for(tmp_path: Path) -> None:
    """Rank 1 leaves; rank 0 is asked later, and must not wait for a promise that nobody gives."""

    def work(rank: int) -> None:
        with holdfast.ShutdownHandler() as stop:
            for step in range(1, 4 if rank else 6):
                if step == 4:
                    wait_until((tmp_path / "left").exists, LIMIT, "rank 1 has left")
                    os.kill(os.getpid(), signal.SIGTERM)
                    wait_until(lambda: stop.stopping, LIMIT, "the request is heard")
                if stop.should_stop(step):
                    (tmp_path / f"saved{rank}").write_text(str(step))
                    break
        (tmp_path / "left").touch()

    with ranks(tmp_path, work=work) as running:
        started = time.monotonic()
        assert running.wait() == [0, 0], running.errors()
        assert time.monotonic() - started < 20
    assert (tmp_path / "saved0").read_text() == "4"


def test_a_second_signal_means_now_and_one_in_the_handlers_place_does_nothing(tmp_path: Path) -> None:
    def work() -> None:
        with holdfast.ShutdownHandler(["SIGUSR1", signal.SIGUSR2]) as stop:
            os.kill(os.getpid(), signal.SIGUSR1)
            wait_until(lambda: stop.stopping, 10, "the first is heard")
            stop._signals._first = time.monotonic() - 10
            os.kill(os.getpid(), signal.SIGUSR2)
            wait_until(lambda: False, 10, "the process ends")

    assert forked(work) == 128 + signal.SIGUSR2
    del tmp_path


def test_handlers_are_given_back_also_when_the_loop_raises() -> None:
    def work() -> None:
        before = signal.getsignal(signal.SIGTERM)
        stop = holdfast.ShutdownHandler()
        with pytest.raises(ZeroDivisionError), stop:
            _ = 1 / int(stop.should_stop(1))
        assert signal.getsignal(signal.SIGTERM) == before
        with pytest.raises(UsageError, match="used only once"), stop:
            pass

    assert forked(work) == 0


def test_wrong_use_is_refused_by_name() -> None:
    with pytest.raises(UsageError, match="SIGKILL cannot be used"):
        holdfast.ShutdownHandler("SIGKILL")
    with pytest.raises(UsageError, match="timeout=-1"):
        holdfast.ShutdownHandler(timeout=-1)


def test_ranks_that_cannot_agree_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(UsageError, match="init_process_group before ShutdownHandler"):
        holdfast.ShutdownHandler().__enter__()


def test_it_works_without_torch_and_a_signal_in_a_long_call_is_heard_at_once(tmp_path: Path) -> None:
    """E9: usable alone, and no heavier than it has to be."""
    script = (
        "import os, signal, sys, threading, time, holdfast\n"
        "with holdfast.ShutdownHandler() as stop:\n"
        "    threading.Timer(0.1, os.kill, (os.getpid(), signal.SIGTERM)).start()\n"
        "    for step in range(1, 100):\n"
        "        time.sleep(0.05)\n"
        "        if stop.should_stop(step): break\n"
        "    else: sys.exit(3)\n"
        "assert 'torch' not in sys.modules\n"
        "sys.exit(holdfast.ExitCode.STOPPED)\n"
    )
    result = finish([sys.executable, "-c", script], cwd=tmp_path, env={"PYTHONPATH": str(REPO / "src")})
    assert result.code == int(ExitCode.STOPPED), result.text


def test_a_stop_file_whose_file_system_does_not_answer_holds_nobody_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    told, answers, real = list[str](), threading.Event(), signals._exists
    monkeypatch.setattr(signals, "_exists", lambda path: (answers.wait(60), real(path))[1])
    file = signals.StopFile(tmp_path / "stop", told.append)
    (tmp_path / "stop").touch()
    began = time.monotonic()
    assert [file.is_there() for _ in range(20)] == [False] * 20
    assert time.monotonic() - began < 5.0
    assert len(told) == 1
    assert "its file system does not answer" in told[0]
    answers.set()
    wait_until(file.is_there, 20, "it is seen once the file system answers")
