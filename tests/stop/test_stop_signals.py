"""The signals that ask for a stop: taken, counted, given back, and not inherited."""

from __future__ import annotations

import ctypes
import faulthandler
import os
import signal
import threading
import time
from pathlib import Path

import pytest

import holdfast
from holdfast.errors import ExitCode
from holdfast.journal.events import StopAsked, StopForced
from holdfast.stop import signals
from holdfast.stop.signals import StopDeadline, StopSignals
from kit.harness import await_child, wait_until
from kit.ranks.stopping_ranks import LIMIT, events, gate, hold, ranks, reasons, train
from kit.tiny import forked
from kit.tiny import train as train_alone

STOPPED = int(ExitCode.STOPPED)


def test_a_second_signal_means_now(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(signals, "is_repeated", lambda first, now: now - first < 0.2)
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


def test_a_second_signal_ends_a_process_that_cannot_tell_of_it_any_more(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The journal's disk hangs, and nobody reads what this process says: that must not hold the end up."""
    monkeypatch.setattr(signals, "is_repeated", lambda first, now: False)
    monkeypatch.setattr(signals, "LAST_WORDS", 0.3)

    def work() -> None:
        _, full = os.pipe()
        os.set_blocking(full, False)
        while True:
            try:
                os.write(full, bytes(4096))
            except BlockingIOError:
                break
        os.set_blocking(full, True)
        os.dup2(full, 2)
        heard, never = threading.Event(), threading.Event()
        StopSignals([signal.SIGTERM], lambda _: heard.set(), lambda _: bool(never.wait())).install()
        os.kill(os.getpid(), signal.SIGTERM)
        assert heard.wait(LIMIT)
        os.kill(os.getpid(), signal.SIGTERM)
        never.wait(LIMIT)

    assert forked(work, 20) == 128 + signal.SIGTERM


def test_once_the_state_is_saved_a_second_signal_is_no_loss(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A scheduler signals again at its limit, while the script still does what it does at its end."""
    monkeypatch.setattr(signals, "is_repeated", lambda first, now: now - first < 0.2)

    def ask(run: holdfast.Run, rank: int, step: int) -> None:
        del rank
        if step == 2:
            os.kill(os.getpid(), signal.SIGTERM)
            wait_until(lambda: run.stopping, LIMIT, "the signal is heard")

    def work(rank: int) -> None:
        try:
            train(tmp_path, rank, 1, until=9, hook=ask)
        finally:
            time.sleep(0.25)  # what is tested is that so much time makes it another request
            hold(tmp_path, "waiting0")

    with ranks(tmp_path, 1, work=work) as running:
        running.at("waiting")
        running.signal(signal.SIGUSR1)
        assert running.wait(20) == [STOPPED], running.errors()
    assert reasons(tmp_path) == {2: ["stop"]}
    (forced,) = events(tmp_path, StopForced)
    assert forced.why.startswith("its state is saved")


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
            time.sleep(1.2 * signals.LOOK_UNWOKEN)
            assert not run.stopping

    with ranks(tmp_path, 1, until=4, hook=fork) as running:
        assert running.wait() == [0], running.errors()
    assert events(tmp_path, StopAsked) == []


def test_a_fork_while_a_deadline_runs_has_a_fault_handler_that_works(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The fault handler's timer has a thread that a fork does not have; setting it anew there never ended."""
    monkeypatch.setattr(signals, "BEHIND", 0.5)

    def work() -> None:
        deadline = StopDeadline()
        deadline.arm(LIMIT, "a request")
        child = os.fork()
        if child == 0:
            faulthandler.dump_traceback_later(LIMIT, exit=True)
            own = StopDeadline()
            own.arm(LIMIT, "a request to the child")
            own.disarm()
            os._exit(7)
        assert await_child(child, 10) == 7
        deadline.arm(0.5, "a shorter limit")
        if os.fork() == 0:
            os._exit(0)
        while True:  # a child's end may cut a sleep short
            ctypes.PyDLL(None).sleep(
                1000
            )  # keeps the interpreter's lock: only the timer can end this process

    began = time.monotonic()
    assert forked(work, 30) == 1
    assert time.monotonic() - began < 15


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
        chained = holdfast.Run(run_dir=tmp_path / "third")
        ours = signal.getsignal(signal.SIGUSR2)
        assert callable(ours)
        signal.signal(signal.SIGUSR2, lambda number, frame: (heard.append(number), ours(number, frame)))
        chained.close()
        os.kill(os.getpid(), signal.SIGUSR2)
        assert heard == [signal.SIGUSR2], "once: who has replaced ours may still call it"
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
            # Perhaps not first: a handler that an earlier test left (a loader's, for SIGCHLD) writes too.
            assert signal.SIGTERM in os.read(read, 100)

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


def test_a_run_that_another_thread_closes_gives_its_signals_back_all_the_same(tmp_path: Path) -> None:
    """A loop's generator may be collected on any thread. Until then its descriptors are nobody else's."""

    def work() -> None:
        heard: list[int] = []
        signal.signal(signal.SIGUSR1, lambda number, _: heard.append(number))
        run = holdfast.Run(run_dir=tmp_path / "run")
        closing = threading.Thread(target=run.close)
        closing.start()
        closing.join(LIMIT)
        files = [(tmp_path / f"file{index}").open("wb") for index in range(8)]
        os.kill(os.getpid(), signal.SIGUSR1)
        assert heard == [signal.SIGUSR1]
        assert [os.fstat(file.fileno()).st_size for file in files] == [0] * 8, "a signal was written to one"
        assert signal.set_wakeup_fd(-1) == -1
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(LIMIT)

    assert forked(work, 20) == -signal.SIGTERM
