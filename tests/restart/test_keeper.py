"""The keeper of a node's members, with real processes: it sees their ends, and ends those that hang."""

from __future__ import annotations

import os
import signal
import socket
import sys
import threading
import time
from datetime import timedelta
from pathlib import Path

import msgspec
import pytest
from torch.distributed import HashStore

from holdfast.config.sections import InProcessSettings
from holdfast.policy.evidence import FaultKind
from holdfast.record.group import HostedStore, connect
from holdfast.restart import keeper as keeper_module
from holdfast.restart.keeper import log_path
from holdfast.restart.messages import (
    LEFT,
    LOST,
    EndKind,
    MemberHello,
    NodeKeeper,
    Over,
    OverKind,
    beat_key,
    end_key,
    fault_key,
    gone_key,
    keeper_key,
    plan_key,
    text,
)
from kit.harness import await_child, is_alive, job, wait_until
from kit.keeping import (
    GREETS,
    MEMBER,
    NODE,
    keeping,
    member,
    own_fds,
    read,
    read_end,
    read_gone,
    say_plan,
)


def test_a_killed_member_ends_the_iteration_within_moments(tmp_path: Path) -> None:
    with (
        keeping(tmp_path) as (keeper, store),
        member(keeper, 0, tmp_path) as first,
        member(keeper, 1, tmp_path),
    ):
        say_plan(store, [1, 0])
        first.signal(signal.SIGKILL)
        began = time.monotonic()
        store.wait([end_key(0)], timedelta(seconds=10))
        assert time.monotonic() - began < 0.2
        end = read_end(store)
        assert end.kind is EndKind.FAULT
        assert end.fault is not None
        fault = end.fault
        assert (fault.member, fault.rank, fault.node, fault.kind) == (0, 1, NODE, FaultKind.LOST)
        assert (fault.detail, fault.exit_code, fault.step) == ("death by SIGKILL", -9, 7)
        assert msgspec.json.decode(store.get(fault_key(0, 0)), type=type(fault)) == fault
        assert read_gone(store, 0) is not None
        assert store.add(LOST, 0) == 1
        assert list(keeper.gone()) == [0]
        assert not store.check([gone_key(1)])


def test_the_end_of_a_reserve_ends_nothing_but_itself(tmp_path: Path) -> None:
    with keeping(tmp_path) as (keeper, store), member(keeper, 2, tmp_path) as reserve:
        say_plan(store, [0, 1], [2])
        reserve.signal(signal.SIGKILL)
        gone = read_gone(store, 2)
        assert gone is not None
        wait_until(lambda: store.add(LOST, 0) == 1, 10, "told")
        beats = store.add(beat_key(NODE), 0)
        wait_until(lambda: store.add(beat_key(NODE), 0) > beats + 1, 10, "all that was to be told was told")
        assert not store.check([end_key(0)])


def test_two_ends_at_once_are_both_told(tmp_path: Path) -> None:
    with (
        keeping(tmp_path) as (keeper, store),
        member(keeper, 0, tmp_path) as first,
        member(keeper, 1, tmp_path) as second,
    ):
        say_plan(store, [0, 1])
        first.signal(signal.SIGKILL)
        second.signal(signal.SIGKILL)
        assert read_gone(store, 0) is not None
        assert read_gone(store, 1) is not None
        wait_until(lambda: store.add(LOST, 0) == 2, 10, "both counted")
        assert store.check([fault_key(0, 0)])
        assert store.check([fault_key(0, 1)])


def test_a_stopped_member_is_killed_after_hard_timeout_and_not_before(tmp_path: Path) -> None:
    told: list[str] = []
    with (
        keeping(tmp_path, told=told, hard_timeout=1.0) as (keeper, store),
        member(keeper, 0, tmp_path) as one,
    ):
        say_plan(store, [0])
        one.signal(signal.SIGSTOP)
        began = time.monotonic()
        fault = read_gone(store, 0)
        assert 0.8 < time.monotonic() - began < 3.0
        assert fault is not None
        assert fault.kind is FaultKind.HARD_TIMEOUT
        assert fault.detail == "no sign of life for 1 s"
        assert one.wait(5).code == -9
        assert "is killed: no sign of life for 1 s" in "".join(told)


def test_before_its_first_step_a_member_may_be_silent_for_longer_unless_it_is_stopped(tmp_path: Path) -> None:
    """A build may hold the interpreter's lock: then not even the thread that beats runs."""
    body = GREETS + "say(Beat(iteration=0, inside=True, idle=2.0, allowance=600.0)); time.sleep(60)"
    with keeping(tmp_path, hard_timeout=0.5) as (keeper, store), member(keeper, 0, tmp_path, body) as one:
        say_plan(store, [0])
        wait_until(lambda: keeper._members[0].beat.allowance, 10, "it has said so")
        began = time.monotonic()
        while time.monotonic() - began < 1.0:  # twice hard_timeout
            assert not store.check([gone_key(0)])
            time.sleep(0.02)
        one.signal(signal.SIGSTOP)
        fault = read_gone(store, 0)
        assert fault is not None
        assert fault.kind is FaultKind.HARD_TIMEOUT


@pytest.mark.parametrize(
    ("said", "detail"),
    [
        ("idle=5.0", "its main thread made no progress for 5.0 s"),
        ("leaving=5.0", "it did not leave the function within 5.0 s"),
    ],
)
def test_a_member_that_says_that_it_hangs_is_killed(tmp_path: Path, said: str, detail: str) -> None:
    body = GREETS + f"beat_for_ever({said})"
    with keeping(tmp_path, hard_timeout=0.5) as (keeper, store), member(keeper, 0, tmp_path, body) as one:
        fault = read_gone(store, 0)
        assert fault is not None
        assert (fault.kind, fault.detail) == (FaultKind.HARD_TIMEOUT, detail)
        assert one.wait(5).code == -9


def test_a_member_that_leads_a_session_is_killed_with_what_it_started(tmp_path: Path) -> None:
    body = GREETS + "import subprocess\nsubprocess.Popen(['sleep', '600'])\nbeat_for_ever(idle=5.0)"
    with keeping(tmp_path, hard_timeout=0.5) as (keeper, store), member(keeper, 0, tmp_path, body) as one:
        assert read_gone(store, 0) is not None
        wait_until(lambda: not one.processes(), 5, "its child ends too")


def test_a_member_that_beats_is_left_alone(tmp_path: Path) -> None:
    with keeping(tmp_path, hard_timeout=0.4) as (keeper, store), member(keeper, 0, tmp_path) as one:
        beats = int(read(store, beat_key(NODE)))
        wait_until(lambda: store.add(beat_key(NODE), 0) > beats + 10, 10, "a second passes")
        assert is_alive(one.pid)
        assert not keeper.gone()


@pytest.mark.parametrize("end", ["os._exit(3)", "signal.raise_signal(signal.SIGKILL)", "signal.pause()"])
def test_who_said_farewell_may_end_as_it_likes(tmp_path: Path, end: str) -> None:
    with keeping(tmp_path, hard_timeout=0.3) as (keeper, store):
        say_plan(store, [0])
        with member(keeper, 0, tmp_path, GREETS + f"say(Farewell())\n{end}"):
            assert read_gone(store, 0) is None
            beats = store.add(beat_key(NODE), 0)
            wait_until(lambda: store.add(beat_key(NODE), 0) > beats + 5, 10, "half a second passes")
        assert not store.check([end_key(0)])
        assert not keeper.gone()
        assert keeper.watching == 0


def test_who_is_left_out_and_does_not_end_is_killed(tmp_path: Path) -> None:
    with (
        keeping(tmp_path, hard_timeout=0.6) as (keeper, store),
        member(keeper, 0, tmp_path) as stays,
        member(keeper, 1, tmp_path) as left_out,
    ):
        say_plan(store, [0, 1])
        say_plan(store, [0], iteration=1)
        fault = read_gone(store, 1)
        assert fault is not None
        assert fault.detail == "it had not ended 0.6 s after the others went on without it"
        assert left_out.wait(5).code == -9
        assert not store.check([end_key(1)])
        assert is_alive(stays.pid)
        store.set(plan_key(2), text(Over(kind=OverKind.HANDED_OVER, reason="no", exit_code=33)))
        assert stays.wait(10).code == -9


def test_who_never_said_hello_takes_no_part_and_is_not_ended(tmp_path: Path) -> None:
    """A script that does not call the function, with a launcher that is ready for it."""
    child = os.fork()
    if not child:
        signal.pause()
        os._exit(0)
    try:
        with keeping(tmp_path, members={0: child}, hard_timeout=0.3) as (keeper, store):
            store.set(plan_key(0), text(Over(kind=OverKind.HANDED_OVER, reason="late", exit_code=33)))
            wait_until(lambda: keeper.planned, 5, "it knows")
            beats = store.add(beat_key(NODE), 0)
            wait_until(lambda: store.add(beat_key(NODE), 0) > beats + 6, 10, "longer than the limit")
            assert is_alive(child)
    finally:
        os.kill(child, signal.SIGKILL)
        await_child(child, 10)


def test_members_see_the_end_of_their_keeper(tmp_path: Path) -> None:
    with keeping(tmp_path) as (keeper, store):
        body = GREETS + "say(Beat(iteration=0))\nawait_end_of_connection()\nsys.exit(33)"
        with member(keeper, 0, tmp_path, body) as one:
            keeper.close()
            assert one.wait(10).code == 33
        assert store.add(LEFT, 0) >= 1


def test_a_lost_store_is_the_end_of_all(tmp_path: Path) -> None:
    """Who can still say so says farewell; who does not end is killed."""
    hosted = HostedStore("127.0.0.1")
    reads = (
        GREETS + "threading.Thread(target=beat_for_ever, daemon=True).start()\nawait_end_of_connection()\n"
    )
    with (
        keeping(tmp_path, connect("127.0.0.1", hosted.port), hard_timeout=3.0) as (keeper, _),
        member(keeper, 0, tmp_path, reads + "say(Farewell())\ntime.sleep(2)\nos._exit(33)") as obeys,
        member(keeper, 1, tmp_path, reads + "signal.pause()") as hangs,
    ):
        hosted.close()
        wait_until(lambda: keeper.lost, 10, "the keeper notices")
        assert keeper.lost.startswith("the store was lost: ")
        assert hangs.wait(10).code == -9
        assert obeys.wait(10).code == 33
        assert list(keeper.gone()) == [1]


class _Stuck(HashStore):
    """A store whose host was stopped: what is asked of it is never answered."""

    def __init__(self) -> None:
        super().__init__()
        self.stuck = threading.Event()

    def add(self, key: str, value: int) -> int:
        if self.stuck.is_set():
            threading.Event().wait(30)
        return super().add(key, value)


def test_a_store_that_does_not_answer_is_lost_too_and_keeps_nobody_from_being_killed(tmp_path: Path) -> None:
    store = _Stuck()
    with keeping(tmp_path, store, hard_timeout=0.5, heartbeat_timeout=1.0) as (keeper, _):
        with member(keeper, 0, tmp_path) as one:
            store.stuck.set()
            one.signal(signal.SIGSTOP)
            assert one.wait(5).code == -9
        wait_until(lambda: keeper.lost, 10, "the keeper notices")
        assert keeper.lost == "the store has not answered for 1 s"


def pass_seconds(seconds: float) -> None:
    """What is tested is that nothing happens in that time."""
    began = time.monotonic()
    wait_until(lambda: time.monotonic() - began > seconds, seconds + 5, "time passes")


def test_a_keeper_that_was_itself_stopped_counts_no_time_against_others(tmp_path: Path) -> None:
    """The whole job was suspended, and its keeper is the first to go on."""
    place = tmp_path / "keeper" / keeper_module.SOCKET
    child = os.fork()
    if not child:
        try:
            with keeping(tmp_path, hard_timeout=1.0):
                signal.pause()
        finally:
            os._exit(1)
    try:
        wait_until(place.exists, 10, "the keeper listens")
        body = GREETS + "print('here', flush=True)\nbeat_for_ever()"
        with job([sys.executable, "-c", body, str(place), "0"], cwd=tmp_path) as one:
            wait_until(lambda: "here" in one.output().out, 20, "the member has said hello")
            one.signal(signal.SIGSTOP)
            pass_seconds(0.3)  # the keeper has read all that was said
            os.kill(child, signal.SIGSTOP)
            pass_seconds(1.5)
            os.kill(child, signal.SIGCONT)
            pass_seconds(0.5)
            assert is_alive(one.pid)
            assert one.wait(5).code == -9  # it still stands still, and the keeper's clock goes on
    finally:
        os.kill(child, signal.SIGKILL)
        await_child(child, 10)


@pytest.mark.parametrize(
    ("body", "why"),
    [
        ("say(Beat(iteration=0))", "its first message is not a hello"),
        ("channel.send(b'nonsense')", "its first message is not a hello"),
        ("say(MemberHello(member=9, pid=os.getpid()))", "there is no member 9 here"),
        ("say(MemberHello(member=0, pid=1))", "it says that it is process 1"),
        ("say(MemberHello(member=1, pid=os.getpid()))", "member 1 is process"),
    ],
)
def test_who_may_not_speak_is_not_listened_to(tmp_path: Path, body: str, why: str) -> None:
    told: list[str] = []
    with keeping(tmp_path, told=told) as (keeper, _), member(keeper, 1, tmp_path):
        with member(keeper, 0, tmp_path, f"{MEMBER}{body}\nawait_end_of_connection()") as other:
            assert other.wait(20).code == 0, other.output().text
        assert keeper.watching == 1
        assert why in "".join(told)


def test_nonsense_later_on_makes_a_member_silent_not_the_keeper(tmp_path: Path) -> None:
    body = GREETS + "channel.send(b'nonsense')\nsignal.pause()"
    with keeping(tmp_path, hard_timeout=0.5) as (keeper, store), member(keeper, 0, tmp_path, body):
        fault = read_gone(store, 0)
        assert fault is not None
        assert fault.detail == "no sign of life for 0.5 s"


def test_a_process_that_the_launcher_named_is_watched_before_its_hello(tmp_path: Path) -> None:
    child = os.fork()
    if not child:
        signal.pause()
        os._exit(0)
    try:
        with keeping(tmp_path, members={4: child}) as (keeper, store):
            wait_until(lambda: keeper.watching == 1, 5, "watched")
            os.kill(child, signal.SIGKILL)
            fault = read_gone(store, 4)
            assert fault is not None
            assert fault.exit_code == -9
    finally:
        os.kill(child, signal.SIGKILL)
        await_child(child, 10)
    with keeping(tmp_path, members={4: child}) as (keeper, store):  # and one that is no more
        fault = read_gone(store, 4)
        assert fault is not None
        assert (fault.kind, fault.detail) == (FaultKind.LOST, "its process has ended")


def test_a_store_with_another_keeper_of_this_node_belongs_to_another_job(tmp_path: Path) -> None:
    store = HashStore()
    store.set(keeper_key(NODE), text(NodeKeeper(path="/nowhere", pid=1)))
    with keeping(tmp_path, store) as (keeper, _):
        wait_until(lambda: keeper.lost, 5, "the keeper notices")
        assert "it is another job's" in keeper.lost


def test_nothing_is_left_of_a_keeper(tmp_path: Path) -> None:
    before, threads = own_fds(), threading.active_count()
    for round_ in range(5):
        with keeping(tmp_path / str(round_)) as (keeper, _):
            channel = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            channel.connect(keeper.path)
            channel.send(msgspec.msgpack.encode(MemberHello(member=0, pid=os.getpid())))
            wait_until(lambda one=keeper: one.watching == 1, 5, "heard")
            channel.close()
    assert own_fds() <= before  # something that an earlier test left to the collector may go meanwhile
    assert threading.active_count() <= threads


def test_a_log_that_is_no_regular_file_is_refused_and_not_waited_for(tmp_path: Path) -> None:
    chosen = InProcessSettings(enabled=True, monitor_process_logdir=str(tmp_path / "logs"))
    path = log_path(chosen, "a")
    assert path == tmp_path / "logs" / "keeper-a.log"
    path.write_text("what an earlier one saw\n")
    assert log_path(chosen, "a") == path
    path.unlink()
    os.mkfifo(path)
    with pytest.raises(OSError, match=r"not a regular file.*keeper-a\.log"):
        log_path(chosen, "a")
