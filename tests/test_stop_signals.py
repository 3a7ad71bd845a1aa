"""The signals that ask for a stop: taken, counted, given back, and not inherited."""

from __future__ import annotations

import os
import signal
import threading
import time
from pathlib import Path

import pytest

import holdfast
from harness import await_child, wait_until
from holdfast.exit_codes import ExitCode
from holdfast.journal.cluster_events import StopAsked, StopForced
from holdfast.worker import stop_signals
from stopping_ranks import LIMIT, events, gate, ranks, reasons
from tiny import forked
from tiny import train as train_alone

STOPPED = int(ExitCode.STOPPED)


def test_a_second_signal_means_now(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stop_signals, "is_repeated", lambda first, now: now - first < 0.2)
    with ranks(tmp_path, 1, until=9, hook=gate(5)) as running:
        running.at("waiting")
        running.signal(signal.SIGTERM)
        wait_until(lambda: events(tmp_path, StopAsked), LIMIT, "the first is heard")
        time.sleep(0.25)  # what is tested is that so much time makes it another request
        running.signal(signal.SIGUSR1)
        assert running.wait(10) == [128 + signal.SIGUSR1], running.errors()
    assert reasons(tmp_path) == {3: ["scheduled"]}
    (forced,) = events(tmp_path, StopForced)
    assert "a second time" in forced.why


def test_a_signal_to_a_child_of_the_rank_is_none_to_the_rank(tmp_path: Path) -> None:
    """The handlers and the wakeup descriptor are not inherited by what a rank forks."""

    def fork(run: holdfast.Run, rank: int, step: int) -> None:
        del rank
        if step == 2:
            child = os.fork()
            if child == 0:
                time.sleep(60)
                os._exit(0)
            os.kill(child, signal.SIGTERM)
            assert await_child(child, 10) == -signal.SIGTERM
            pid = os.fork()
            if pid == 0:
                signal.signal(signal.SIGTERM, lambda *_: os._exit(5))  # takes the child's own, and no more
                os.kill(os.getpid(), signal.SIGTERM)
                os._exit(6)
            assert await_child(pid, 10) == 5
            time.sleep(1.2 * stop_signals.LOOK_UNWOKEN)
            assert not run.stopping

    with ranks(tmp_path, 1, until=4, hook=fork) as running:
        assert running.wait() == [0], running.errors()
    assert events(tmp_path, StopAsked) == []


def test_handlers_are_given_back_and_a_replaced_one_is_told(tmp_path: Path) -> None:
    def work() -> None:
        heard: list[int] = []
        signal.signal(signal.SIGUSR1, lambda number, _: heard.append(number))
        mine = signal.getsignal(signal.SIGUSR1)
        train_alone(tmp_path / "run", until=2)
        assert signal.getsignal(signal.SIGUSR1) is mine
        assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
        assert signal.set_wakeup_fd(-1) == -1
        unused = holdfast.Run(run_dir=tmp_path / "other")
        assert signal.getsignal(signal.SIGTERM) != signal.SIG_DFL
        unused.close()
        assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
        train_alone(tmp_path / "run", until=3, stop_exit_signal_handler=False)
        left = [thread.name for thread in threading.enumerate() if "stop" in thread.name]
        assert left == [], left

    assert forked(work) == 0


def test_a_replaced_handler_is_told_with_the_setting_that_prevents_it(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    before = signal.signal(signal.SIGUSR2, lambda *_: None)
    try:
        holdfast.Run(run_dir=tmp_path / "run").close()
    finally:
        signal.signal(signal.SIGUSR2, before)
    assert "SIGUSR2 is replaced" in caplog.text
    assert "stop.exit_signal_handler = false" in caplog.text


def test_where_the_wakeup_descriptor_is_anothers_the_count_of_the_handler_is_enough(tmp_path: Path) -> None:
    def work() -> None:
        read, write = os.pipe()
        os.set_blocking(write, False)
        signal.set_wakeup_fd(write)

        def ask(step: int, run: holdfast.Run) -> None:
            if step == 4:
                os.kill(os.getpid(), signal.SIGTERM)
                wait_until(lambda: run.stopping, 10, "the signal is heard")

        try:
            train_alone(tmp_path / "run", at_step=ask)
        finally:
            assert signal.set_wakeup_fd(-1) == write
            assert os.read(read, 10)[:1] == bytes([signal.SIGTERM])

    assert forked(work) == STOPPED
    assert reasons(tmp_path)[4] == ["stop"]


def test_away_from_the_main_thread_no_signal_is_taken_and_that_is_told(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    before = signal.getsignal(signal.SIGTERM)
    made: list[holdfast.Run] = []
    thread = threading.Thread(target=lambda: made.append(holdfast.Run(run_dir=tmp_path / "run")))
    thread.start()
    thread.join(LIMIT)
    assert signal.getsignal(signal.SIGTERM) == before
    assert caplog.text.count("not in the main thread") == 1
    made[0].close()
