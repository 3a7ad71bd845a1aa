"""The launcher's part of a graceful stop, piece by piece: signals, what ranks say, what nodes agree on."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.errors import ExitCode
from holdfast.launch import context as signals_module
from holdfast.launch.context import Interrupted, LaunchSignals
from holdfast.launch.workers.orphans import Workers
from holdfast.policy.requests import HELLO, REPEATED, Promised, agree, goes_on, leaves, node_word
from holdfast.process.proc import Holder, this_process
from holdfast.record import operator
from holdfast.record.directory import ControlDirectory
from holdfast.record.operator import record_requeue, requeues_without_progress, withdraw_requeue
from holdfast.train.beats import Halted, Prepare, Promise, StopAt, StopWish
from kit.harness import wait_until
from kit.watching import Rank, watching

ranks = st.frozensets(st.integers(0, 5))
steps = st.integers(0, 9)


# --- what is agreed on --------------------------------------------------------------------------------------


@given(ranks, ranks, ranks, st.dictionaries(st.integers(0, 5), steps), st.floats(0, 100))
def test_a_node_speaks_once_every_rank_that_can_be_asked_has_promised(
    running: frozenset[int],
    there: frozenset[int],
    done: frozenset[int],
    promises: dict[int, int],
    waited: float,
) -> None:
    word = node_word(running, there, done, promises, waited)
    missing = {rank for rank in running & there if rank not in promises}
    mute = running - there - done - set(promises)
    if missing:
        assert word is None
    elif waited >= HELLO or not mute:
        assert word == Promised(step=max(promises.values(), default=None), mute=len(mute))
    if word is None and not missing:
        assert any(promises.values()), "nobody is waited for while nothing was trained"


@given(st.lists(st.builds(Promised, step=st.none() | steps, mute=st.integers(0, 3)), min_size=1, max_size=6))
def test_all_stop_after_the_highest_promise_and_nothing_trained_is_ever_thrown_away(
    words: list[Promised],
) -> None:
    agreed = agree(words)
    promised = [word.step for word in words if word.step is not None]
    if promised and max(promised) > 0:
        assert (agreed.step, agreed.end) == (max(promised), False)
    if agreed.end:
        assert any(word.mute for word in words)
        assert agreed.code == (ExitCode.STOPPED if promised else ExitCode.STOPPED_UNSAVED)


@given(st.integers(1, 9), st.integers(0, 9), st.booleans(), st.integers(1, 9))
def test_a_group_goes_on_only_with_its_leader_and_enough_nodes(
    count: int, leaving: int, without_leader: bool, fewest: int
) -> None:
    if goes_on(count, leaving, without_leader=without_leader, min_nodes=fewest):
        assert count - leaving >= fewest
        assert not without_leader
    else:
        assert without_leader or count - leaving < fewest
    assert not leaves(leads=True, elastic=True), "a leader that is signalled ends the run"
    assert not leaves(leads=False, elastic=False), "a job of fixed size cannot do without"
    assert leaves(leads=False, elastic=True)


# --- signals ------------------------------------------------------------------------------------------------


@pytest.fixture
def taken() -> Iterator[LaunchSignals]:
    found = LaunchSignals("SIGTERM,SIGHUP")
    before = {number: signal.getsignal(number) for number in found._numbers}
    found.install()
    try:
        yield found
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def test_torchs_signals_keep_their_meaning_and_two_are_taken_besides(taken: LaunchSignals) -> None:
    names = [number.name for number in taken._numbers]
    assert names == ["SIGTERM", "SIGHUP", "SIGUSR1", "SIGUSR2"]
    os.kill(os.getpid(), signal.SIGUSR2)
    assert taken.received is signal.SIGUSR2
    with pytest.raises(Interrupted):
        taken.check()


def test_a_signal_soon_after_the_first_is_the_same_request_and_a_later_one_means_now(
    taken: LaunchSignals, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = [1000.0]
    monkeypatch.setattr(signals_module.time, "monotonic", lambda: clock[0])
    hurried: list[int] = []
    taken.hurry = lambda: hurried.append(1)
    os.kill(os.getpid(), signal.SIGTERM)
    clock[0] += REPEATED - 0.1
    os.kill(os.getpid(), signal.SIGUSR1)
    assert (taken.again, hurried) == (None, [])
    clock[0] += 0.2
    os.kill(os.getpid(), signal.SIGUSR1)
    assert taken.received is signal.SIGTERM
    assert (taken.again, hurried) == (signal.SIGUSR1, [1])


def test_ctrl_c_twice_means_now_however_quickly(taken: LaunchSignals) -> None:
    taken._handle(signal.SIGINT, None)
    taken._handle(signal.SIGINT, None)
    assert taken.again is signal.SIGINT


def test_a_signal_raises_only_where_it_may(taken: LaunchSignals) -> None:
    os.kill(os.getpid(), signal.SIGTERM)
    assert taken.received is signal.SIGTERM, "kept, while a durable write may be under way"
    with pytest.raises(Interrupted), taken.interruptible():
        raise AssertionError("not reached")


def test_a_signal_while_a_thread_starts_is_no_failure_to_start_it(
    taken: LaunchSignals, monkeypatch: pytest.MonkeyPatch
) -> None:
    unraisable: list[Any] = []
    monkeypatch.setattr(sys, "unraisablehook", unraisable.append)
    started, may_go = threading._start_new_thread, threading.Event()  # type: ignore[attr-defined]

    def start(target: Any, *args: Any) -> None:
        def begin() -> None:
            may_go.wait(20)
            target(*args[0])

        started(begin, ())
        os.kill(os.getpid(), signal.SIGTERM)

    ran = threading.Event()
    monkeypatch.setattr(threading, "_start_new_thread", start)
    with pytest.raises(Interrupted), taken.interruptible():
        threading.Thread(target=ran.set, daemon=True).start()
    monkeypatch.undo()
    monkeypatch.setattr(sys, "unraisablehook", unraisable.append)
    may_go.set()
    assert ran.wait(20), unraisable
    assert not unraisable


# --- what ranks say -----------------------------------------------------------------------------------------


def test_the_monitor_hears_wishes_promises_and_halts_and_passes_on_what_is_agreed(tmp_path: Path) -> None:
    with watching(tmp_path) as monitor:
        monitor.begin({3: os.getpid(), 4: 1})
        rank = Rank(monitor)
        wait_until(lambda: monitor.hearing().there, 20, "it has said hello")
        assert monitor.hearing().there == monitor.hearing().defer == {3}, "rank 4 never said anything"
        assert not monitor.tell(4, StopAt(7))
        rank.say(StopWish("SIGTERM to rank 3", signal="SIGTERM"))
        wait_until(lambda: monitor.stop_words().wishes, 20, "the wish")
        assert monitor.tell(3, Prepare("SIGTERM to rank 3", 600.0))
        assert rank.hear() == Prepare("SIGTERM to rank 3", 600.0)
        rank.say(Promise(7))
        wait_until(lambda: monitor.stop_words().promises == {3: 7}, 20, "the promise")
        assert monitor.tell(3, StopAt(9))
        assert rank.hear() == StopAt(9)
        rank.say(StopWish("SIGTERM", now=True))
        rank.say(Promise(8))
        rank.say(Halted(9))
        wait_until(lambda: monitor.stop_words().halted == {3: 9}, 20, "the halt")
        words = monitor.stop_words()
        assert words.promises == {3: 7}, "a promise is given once"
        assert words.wishes[3].now, "a second wish is not hidden by the first"
        monitor.begin({3: os.getpid()})
        assert not monitor.stop_words().promises, "the next attempt begins anew"
        rank.channel.close()


def test_ranks_that_would_take_sigterm_for_a_request_are_ended_without_being_asked(tmp_path: Path) -> None:
    """After a failure the others must not cost the whole grace: they could only save together."""
    deaf = "import signal, time; signal.signal(15, signal.SIG_IGN); open('ready', 'w'); time.sleep(60)"
    rank = subprocess.Popen([sys.executable, "-c", deaf], cwd=tmp_path, start_new_session=True)
    try:
        wait_until((tmp_path / "ready").exists, 30, "it ignores SIGTERM")
        workers = Workers({0: rank.pid})
        began = time.monotonic()
        assert workers.stop(40.0, at_once={0})
        assert time.monotonic() - began < 20, "the grace was waited for"
        assert workers.ended() == {0: -signal.SIGKILL}
    finally:
        rank.kill()
        rank.wait()


# --- what is kept -------------------------------------------------------------------------------------------


def test_requeues_count_until_there_is_progress_a_reset_or_a_withdrawal(tmp_path: Path) -> None:
    control, _ = ControlDirectory.open_or_create(tmp_path / "run")
    for attempt in (1, 2, 3):
        record_requeue(control, attempt, 10, "1234")
    assert requeues_without_progress(control, 10) == 3
    assert requeues_without_progress(control, 11) == 0, "progress"
    number = record_requeue(control, 4, 10, "1234")
    withdraw_requeue(control, number, 4, 10)
    assert requeues_without_progress(control, 10) == 3, "Slurm said no"
    control.attempt(2).mkdir(parents=True)
    operator.reset_budget(control, "cable", "alice")
    assert requeues_without_progress(control, 10) == 1, "those up to attempt 2 are forgiven"
    (tmp_path / "run" / "requeues" / "000003-asked.json").write_text("{")
    assert requeues_without_progress(control, 11) == 1, "what cannot be read counts"


def test_a_request_to_stop_is_one_launchs_alone(tmp_path: Path) -> None:
    control, _ = ControlDirectory.open_or_create(tmp_path / "run")
    operator.stop(control, "first", "maintenance", "alice")
    assert operator.stop_asked(control, ["second"]) is None
    found = operator.stop_asked(control, ["second", "first"])
    assert found is not None
    assert found.describe() == "alice: maintenance"
    (path,) = (tmp_path / "run" / "operator" / "stop").iterdir()
    path.write_text("{")
    assert operator.stop_asked(control, ["first"]) == operator.OperatorRequest(), "its name is enough"


@pytest.mark.parametrize(
    ("environ", "told"),
    [
        ({"SLURM_JOB_ID": "1234"}, ", Slurm job 1234"),
        ({"SLURM_JOB_ID": "7", "SLURM_ARRAY_JOB_ID": "7", "SLURM_ARRAY_TASK_ID": "2"}, ", Slurm job 7_2"),
        ({"SLURM_JOB_ID": "9", "SLURM_ARRAY_JOB_ID": "7", "SLURM_ARRAY_TASK_ID": "2"}, ", Slurm job 9"),
        ({"SLURM_JOB_ID": "1\x1b[2J"}, ""),
        ({}, ""),
    ],
)
def test_who_holds_a_run_names_its_job(
    environ: dict[str, str], told: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("SLURM_JOB_ID", "SLURM_ARRAY_JOB_ID", "SLURM_ARRAY_TASK_ID"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    holder = this_process()
    assert holder.describe() == f"pid {os.getpid()} on {holder.host}{told}"
    old = Holder(host="h", boot="b", pid_namespace=1, pid=2, started=3)
    assert msgspec.convert(msgspec.to_builtins(old), Holder).describe() == "pid 2 on h"
