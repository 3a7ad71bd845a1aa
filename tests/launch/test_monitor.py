"""The agent's monitor and real ranks: what is found, what is not held up, and who is not listened to."""

from __future__ import annotations

import contextlib
import json
import os
import pickle
import signal
import socket
import stat
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from holdfast.launch import monitor as monitors
from holdfast.launch.incident.inquest import Questions
from holdfast.launch.monitor import Learner, Monitor
from holdfast.policy.signs import activity
from holdfast.policy.timeouts import Learned, StillRunning, hanging
from holdfast.process import PACKET_LIMIT
from holdfast.record.directory import ControlDirectory
from holdfast.train.beats import (
    ANSWER_LIMIT,
    MOST_INSIDE,
    AnswerPart,
    FromRank,
    Halted,
    Hello,
    State,
    StopWish,
)
from kit.harness import REPO, Job, job, python, wait_until
from kit.watching import FAR, PRELUDE, Rank, handover, heard, limits, speaking, watching

STEADY = """
beats = hello(Limits(initial=1e6, heartbeat=1e6, out_of_section=1e6))
for step in range(1, 10_000):
    beats.enter("step"); time.sleep(0.05); beats.step_done(step)
"""

# --- scenario 11: a rank that stops, in each of four places


PLACES = {
    "setup": ('beats.enter("setup"); stop()', {"setup": 1.0}, "section", 0),
    "step": ('beats.step_done(7); beats.enter("step"); stop()', {"step": 1.0}, "section", 7),
    "checkpointing": (
        'beats.step_done(7); beats.enter("checkpointing"); stop()',
        {"checkpointing": 1.0},
        "section",
        7,
    ),
    "": (
        'beats.enter("step"); beats.step_done(7); stop()',
        {"out_of_section": 1.0},
        "out_of_section",
        7,
    ),
    "eval": ('beats.step_done(7); beats.enter("eval"); stop()', {"heartbeat": 1.0}, "heartbeat", 7),
    "loading": ('beats.enter("setup"); beats.enter("loading"); stop()', {"initial": 1.0}, "initial", 0),
}


def test_a_rank_that_stops_is_found_by_the_limit_of_where_it_is(tmp_path: Path) -> None:
    """Each in its own place with a short limit there and long ones elsewhere, beside one that goes on."""
    with watching(tmp_path) as watch, contextlib.ExitStack() as stack:
        pids = {0: stack.enter_context(speaking(tmp_path, watch.path, STEADY)).pid}
        for rank, (code, limit, _, _) in enumerate(PLACES.values(), 1):
            hang = f"from holdfast.policy.timeouts import *\nbeats = hello({limits(**limit)!r})\n{code}"
            pids[rank] = stack.enter_context(speaking(tmp_path, watch.path, hang)).pid
        watch.begin(pids)
        wait_until(lambda: len(watch.overdue()) == len(PLACES), 60, "all hangs are found")
        found = {one.rank: one for one in watch.overdue()}
        for rank, (place, (_, _, rule, step)) in enumerate(PLACES.items(), 1):
            one = found[rank]
            assert (one.section, one.rule, one.step) == (place, rule, step)
            assert one.seconds > one.limit == 1.0
            assert f"rank {rank} has stood still for" in str(one)
            assert activity(place) in str(one)
        before = watch.last_steps()[0]
        wait_until(lambda: watch.last_steps()[0] > before, 60, "the healthy rank goes on")
        assert 0 not in {one.rank for one in watch.overdue()}


def test_a_first_step_that_compiles_longer_than_a_step_may_take_lives(tmp_path: Path) -> None:
    code = """
beats = hello()
beats.enter("step"); mark("compiling"); until("go on"); beats.step_done(1)
beats.enter("step"); stop()
"""
    with watching(tmp_path, limits(step=0.5)) as watch, speaking(tmp_path, watch.path, code) as rank:
        watch.begin({0: rank.pid})
        heard(watch, 0, "step")
        deadline = time.monotonic() + 1.5  # three times what a step may take
        while time.monotonic() < deadline:
            assert watch.overdue() == []
            time.sleep(0.02)
        (tmp_path / "go on").touch()
        (found,) = wait_until(watch.overdue, 60, "the second step's hang is found")
        assert (found.section, found.rule, found.step) == ("step", "section", 1)


def test_the_clock_of_an_outer_section_stands_still(tmp_path: Path) -> None:
    code = """
beats = hello()
beats.step_done(1)
beats.enter("outer"); beats.enter("inner"); until("out"); beats.leave("inner"); stop()
"""
    watched = limits(outer=1.0, inner=FAR)
    with watching(tmp_path, watched) as watch, speaking(tmp_path, watch.path, code) as rank:
        watch.begin({0: rank.pid})
        heard(watch, 0, "inner")
        deadline = time.monotonic() + 1.6
        while time.monotonic() < deadline:
            assert watch.overdue() == []
            time.sleep(0.02)
        (tmp_path / "out").touch()
        heard(watch, 0, "outer")
        state = watch.state(0)
        assert state is not None
        assert state.sections[0].spent < 1.0, "the time inside the inner section was not the outer one's"
        (found,) = wait_until(watch.overdue, 60, "the hang in the outer section is found")
        assert found.section == "outer"


def test_an_outer_limit_holds_while_inner_sections_open_and_close(tmp_path: Path) -> None:
    """Inner sections without end, each of which is short: nothing but the outer limit can find that."""
    code = """
beats = hello(); beats.step_done(1); beats.enter("outer")
while True:
    beats.enter("inner"); time.sleep(0.01); beats.leave("inner")
"""
    watched = msgspec.structs.replace(limits(outer=1.0), whole={"outer": 1.0})
    with watching(tmp_path, watched) as watch, speaking(tmp_path, watch.path, code) as rank:
        watch.begin({0: rank.pid})
        (found,) = wait_until(watch.overdue, 60, "the outer section's limit is reached")
        assert (found.section, found.rule, found.limit) == ("outer", "section", 1.0)
        state = watch.state(0)
        assert state is not None
        assert list(state.sections[0].inside) == ["inner"]


def test_what_has_more_names_than_are_told_counts_as_the_outer_sections_own(tmp_path: Path) -> None:
    code = """
beats = hello(); beats.step_done(1); beats.enter("outer")
for number in range(100):
    beats.enter(f"inner {number}"); time.sleep(0.001); beats.leave(f"inner {number}")
beats.enter("last"); until("never")
"""  # not stopped: where the agent is slow to read, the last word is said again by a thread
    with watching(tmp_path) as watch, speaking(tmp_path, watch.path, code) as rank:
        watch.begin({0: rank.pid})
        heard(watch, 0, "last")
        state = watch.state(0)
        assert state is not None
        outer = state.sections[0]
        assert len(outer.inside) == MOST_INSIDE
        assert outer.spent >= 0.001 * (100 - MOST_INSIDE)


def test_a_rank_that_uses_no_sections_is_watched_by_its_beats(tmp_path: Path) -> None:
    with (
        watching(tmp_path, limits(heartbeat=0.5, initial=FAR)) as watch,
        speaking(tmp_path, watch.path, "beats = hello(); until('beat'); beats.beat(); stop()") as rank,
    ):
        watch.begin({0: rank.pid})
        heard(watch, 0)
        time.sleep(1.0)
        assert watch.overdue() == [], "until its first beat the initial timeout rules"
        (tmp_path / "beat").touch()
        (found,) = wait_until(watch.overdue, 60, "the silence is found")
        assert (found.rule, found.section) == ("heartbeat", "")


def test_after_good_bye_only_the_process_is_watched_unless_an_error_shows(tmp_path: Path) -> None:
    """A script may do what it likes after training; a rank that fails must end in time."""
    code = """
beats = hello(); beats.enter("step"); beats.step_done(1); beats.rest(); mark("resting")
until("fail"); beats.failing(); stop()
"""
    with (
        watching(tmp_path, limits(out_of_section=0.5)) as watch,
        speaking(tmp_path, watch.path, code) as rank,
    ):
        watch.begin({0: rank.pid})
        wait_until(lambda: (state := watch.state(0)) is not None and state.done, 60, "good-bye")
        time.sleep(1.0)
        assert watch.overdue() == []
        (tmp_path / "fail").touch()
        (found,) = wait_until(watch.overdue, 60, "a failing rank that does not end is found")
        assert (found.rule, found.step) == ("out_of_section", 1)


def test_a_shell_around_a_script_may_do_what_it_likes_once_that_has_exited(tmp_path: Path) -> None:
    """What has a limit is the way from the loop's end to the exit of the process that trained."""
    code = "beats = hello(); beats.step_done(3); beats.exiting(); mark('exiting'); until('exit')"
    (tmp_path / "script.py").write_text(PRELUDE + code)
    shell = ["sh", "-c", f"{sys.executable} script.py; touch left; while :; do sleep 0.1; done"]
    watched = msgspec.structs.replace(limits(), exiting=0.5)
    with (
        watching(tmp_path, watched) as watch,
        job(shell, cwd=tmp_path, env=handover(watch.path), may_leave=True) as running,
    ):
        watch.begin({0: running.pid})
        (found,) = wait_until(watch.overdue, 60, "the limit of its exit has passed")
        assert (found.rule, found.step) == ("exiting", 3)
        assert "between the end of its loop and its exit, after step 3" in str(found)
        (tmp_path / "exit").touch()
        wait_until((tmp_path / "left").exists, 60, "the script has ended, and the shell goes on")
        wait_until(lambda: watch.overdue() == [], 60, "nothing rules the shell")
        running.kill_everything()


# --- an agent that does not read


def test_an_agent_that_does_not_read_holds_up_no_step_and_learns_the_newest_state(tmp_path: Path) -> None:
    """20,000 messages are many times what a socket holds. Without non-blocking sends the rank never ends."""
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    listener.bind(str(tmp_path / "deaf.sock"))
    listener.listen(1)
    code = """
beats = hello()
for number in range(20_000):
    beats.enter(f"section {number}"); beats.leave(f"section {number}")
beats.step_done(20_000)
beats.enter("late")
mark(f"dropped-{beats.dropped}")
time.sleep(300)
"""
    with (
        contextlib.closing(listener),
        speaking(tmp_path, tmp_path / "deaf.sock", code),
    ):
        listener.settimeout(60)
        channel, _ = listener.accept()
        (mark,) = wait_until(lambda: list(tmp_path.glob("dropped-*")), 60, "the rank is through its sections")
        dropped = int(mark.name.removeprefix("dropped-"))
        assert dropped > 10_000
        channel.settimeout(20)
        newest: State | None = None
        while newest is None or not newest.sections or newest.sections[-1].name != "late":
            message = msgspec.msgpack.decode(channel.recv(PACKET_LIMIT), type=FromRank)
            newest = message if isinstance(message, State) else newest
        assert newest.step == 20_000
        assert newest.dropped >= dropped
        channel.close()


def test_a_word_about_stopping_is_kept_until_the_agent_reads_again(tmp_path: Path) -> None:
    """No later message makes it good, as a newer state does for an older one."""
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    listener.bind(str(tmp_path / "deaf.sock"))
    listener.listen(1)
    code = """
import holdfast.train.beats
holdfast.train.beats.URGENT = 0.1
beats = hello()
while not beats.dropped:
    beats.beat()
beats.wish("SIGTERM to rank 0", "SIGTERM")
beats.halted(7)
mark("said")
until("heard")
beats.close()
"""
    with contextlib.closing(listener), speaking(tmp_path, tmp_path / "deaf.sock", code) as rank:
        listener.settimeout(60)
        channel, _ = listener.accept()
        with contextlib.closing(channel):
            wait_until((tmp_path / "said").exists, 60, "the rank has said it")
            channel.settimeout(20)
            words: list[StopWish | Halted] = []
            while len(words) < 2:
                message = msgspec.msgpack.decode(channel.recv(PACKET_LIMIT), type=FromRank)
                words += [message] if isinstance(message, StopWish | Halted) else []
            assert words == [StopWish("SIGTERM to rank 0", signal="SIGTERM"), Halted(7)]
            (tmp_path / "heard").touch()
            assert rank.wait(30).code == 0
            rest = iter(lambda: channel.recv(PACKET_LIMIT), b"")
            said = [msgspec.msgpack.decode(data, type=FromRank) for data in rest]
            assert not any(isinstance(message, StopWish | Halted) for message in said), "each of them once"


def test_a_rank_outlives_its_monitor(tmp_path: Path) -> None:
    code = """
beats = hello(); mark("said")
until("gone")
for step in range(1, 1000):
    beats.enter("step"); beats.step_done(step)
beats.close(); mark("done")
"""
    with watching(tmp_path) as watch, speaking(tmp_path, watch.path, code) as rank:
        watch.begin({0: rank.pid})
        heard(watch, 0)
        watch.close()
        (tmp_path / "gone").touch()
        result = rank.wait(60)
        assert result.code == 0, result.text
        assert (tmp_path / "done").exists()
        assert result.err.count("no longer watched") == 1


def test_a_rank_without_a_monitor_to_reach_goes_on_and_says_so(tmp_path: Path) -> None:
    with speaking(
        tmp_path, tmp_path / "none.sock", "beats = hello(); beats.enter('step'); beats.close()"
    ) as rank:
        result = rank.wait(60)
    assert result.code == 0
    assert "cannot reach the agent's monitor" in result.err


# --- who may speak, and what


def test_the_socket_lies_where_only_its_owner_gets_at_it(tmp_path: Path) -> None:
    (tmp_path / "agent").mkdir(mode=0o755)
    with watching(tmp_path) as watch:
        assert stat.S_IMODE(watch.path.parent.stat().st_mode) == 0o700
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(PermissionError, match="may not lie there"):
        Monitor(tmp_path / "link", limits())
    assert list((tmp_path / "elsewhere").iterdir()) == []


def test_a_path_longer_than_the_kernel_takes_works(tmp_path: Path) -> None:
    deep = tmp_path / ("d" * 120)
    deep.mkdir()
    with (
        watching(deep) as watch,
        speaking(deep, watch.path, "beats = hello(); beats.enter('x'); stop()") as rank,
    ):
        watch.begin({0: rank.pid})
        heard(watch, 0, "x")


def test_a_worker_quicker_than_its_agent_is_heard_and_one_of_an_earlier_attempt_is_not(
    tmp_path: Path,
) -> None:
    code = "beats = hello(); beats.step_done(5); beats.enter('x'); mark('said-%d'); time.sleep(300)"
    with watching(tmp_path) as watch, speaking(tmp_path, watch.path, code % 1) as first:
        wait_until((tmp_path / "said-1").exists, 60, "the first worker has said where it is")
        assert watch.state(0) is None
        watch.begin({0: first.pid})
        heard(watch, 0, "x")
        assert watch.last_steps() == {0: 5}
        with speaking(tmp_path, watch.path, code % 2) as second:
            wait_until((tmp_path / "said-2").exists, 60, "the second worker has said where it is")
            watch.begin({3: second.pid})
            assert watch.state(0) is None, "state is cleared per attempt"
            heard(watch, 3, "x")
            assert watch.last_steps() == {3: 5}
            assert watch.observed()[0] == {}


def test_a_process_that_a_worker_started_does_not_displace_it(tmp_path: Path) -> None:
    (tmp_path / "child.py").write_text(PRELUDE + "beats = hello(); beats.enter('not mine'); mark('tried')")
    code = """
import subprocess
beats = hello(); beats.enter("mine")
subprocess.run([sys.executable, "child.py"], check=True)
beats.enter("still mine"); time.sleep(300)
"""
    with watching(tmp_path) as watch, speaking(tmp_path, watch.path, code) as rank:
        watch.begin({0: rank.pid})
        heard(watch, 0, "still mine")
        assert (tmp_path / "tried").exists()


def test_a_script_under_a_shell_speaks_for_its_worker(tmp_path: Path) -> None:
    (tmp_path / "inner.py").write_text(PRELUDE + "beats = hello(); beats.enter('inside'); time.sleep(300)")
    with watching(tmp_path) as watch:
        command = ["sh", "-c", f"{sys.executable} inner.py; true"]
        with job(command, cwd=tmp_path, env=handover(watch.path), may_leave=True) as rank:
            watch.begin({0: rank.pid})
            heard(watch, 0, "inside")


GARBAGE = {
    "no message": b"\xff\xfe garbage",
    "another type": msgspec.msgpack.encode({"exec": "rm"}),
    "a wrong field": msgspec.msgpack.encode(["state", "x", None]),
    "not a hello first": msgspec.msgpack.encode(State(0.0, 1, True, True, 0.0, [], 0)),
    "a pickle": b"\x80\x04\x95\x1e\x00\x00\x00\x00\x00\x00\x00\x8c\x05posix\x94\x8c\x06system\x94\x93\x94.",
    "a huge message": msgspec.msgpack.encode(Hello(1, 0.0, limits(**{"x" * PACKET_LIMIT: 1.0}))),
    "a huge text": msgspec.msgpack.encode(Hello(1, 0.0)) + b"x" * 60_000,
}


def test_garbage_closes_its_connection_and_changes_nothing_else(tmp_path: Path) -> None:
    code = """
import pickle
for number, garbage in enumerate(pickle.loads(open("garbage", "rb").read())):
    channel = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    channel.connect(path)
    channel.send(garbage)
    channel.settimeout(60)
    assert channel.recv(1) == b"", number
beats = hello(); beats.enter("again"); time.sleep(300)
"""
    (tmp_path / "garbage").write_bytes(pickle.dumps(list(GARBAGE.values())))
    told: list[str] = []
    with (
        watching(tmp_path, told=told) as watch,
        speaking(tmp_path, watch.path, STEADY) as steady,
        speaking(tmp_path, watch.path, code) as rank,
    ):
        watch.begin({0: steady.pid, 1: rank.pid})
        heard(watch, 1, "again")
        assert [text.split(" sent ")[0] for text in told] == [f"rank 1 (process {rank.pid})"] * len(GARBAGE)
        before = watch.last_steps()[0]
        wait_until(lambda: watch.last_steps()[0] > before, 60, "the other rank is still heard")
        assert watch.overdue() == []


def test_a_process_that_no_worker_started_is_refused(tmp_path: Path) -> None:
    """One of another session whose parents are gone, as a stray process of the same user would be."""
    stranger = """
if os.fork():
    os._exit(0)
os.setsid()
if os.fork():
    os._exit(0)
time.sleep(0.3)
channel = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
channel.connect(path)
channel.settimeout(60)
mark("refused" if channel.recv(1) == b"" else "heard")
"""
    told: list[str] = []
    with (
        watching(tmp_path, told=told) as watch,
        speaking(tmp_path, watch.path, STEADY) as steady,
        speaking(tmp_path, watch.path, stranger),
    ):
        watch.begin({0: steady.pid})
        wait_until((tmp_path / "refused").exists, 60, "the stranger is refused")
        wait_until(lambda: told, 60, "the refusal is told")
        assert len(told) == 1
        assert "was refused" in told[0]
        heard_before = watch.last_steps().get(0, 0)
        wait_until(lambda: watch.last_steps().get(0, 0) > heard_before, 60, "the worker is still heard")


def test_a_rank_that_never_says_hello_is_told_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(monitors, "UNHEARD", 0.3)
    told: list[str] = []
    with watching(tmp_path, told=told) as watch, speaking(tmp_path, watch.path, "time.sleep(300)") as rank:
        watch.begin({4: rank.pid})
        wait_until(lambda: told, 60, "it is told")
        time.sleep(1.0)
        assert len(told) == 1
        assert "rank 4 has not said hello" in told[0]
        assert watch.overdue() == []


# --- questions


def test_a_rank_whose_main_thread_hangs_still_testifies_at_length(tmp_path: Path) -> None:
    code = """
def testify():
    return b"stack of the main thread" + b"x" * 5_000_000
beats = hello(testify=testify)
beats.enter("step")
lock = threading.Lock(); lock.acquire(); lock.acquire()
"""
    with watching(tmp_path) as watch, speaking(tmp_path, watch.path, code) as rank:
        watch.begin({0: rank.pid})
        heard(watch, 0, "step")
        answer = watch.ask(0, 60)
        assert answer is not None
        assert answer.startswith(b"stack of the main thread")
        assert len(answer) == 5_000_024
        assert watch.ask(0, 60) == answer


def test_a_question_ends_whatever_the_rank_does(tmp_path: Path) -> None:
    stopped = "beats = hello(testify=lambda: b'x'); beats.enter('step'); stop()"
    raising = "beats = hello(testify=lambda: 1 / 0); beats.enter('step'); time.sleep(300)"
    without = "beats = hello(); beats.enter('step'); time.sleep(300)"
    too_long = "beats = hello(testify=lambda: bytes(17 << 20)); beats.enter('step'); time.sleep(300)"
    told: list[str] = []
    with watching(tmp_path, told=told) as watch, contextlib.ExitStack() as stack:
        pids = {}
        for number, code in enumerate((stopped, raising, without, too_long)):
            pids[number] = stack.enter_context(speaking(tmp_path, watch.path, code)).pid
        watch.begin(pids)
        for number in pids:
            heard(watch, number, "step")
        began = time.monotonic()
        assert watch.ask(9, 60) is None
        assert [watch.ask(number, 60) for number in (1, 2, 3)] == [None, None, None]
        assert time.monotonic() - began < 50, "answered, not waited for"
        assert watch.ask_all([0, 1], 0.5) == {0: None, 1: None}
        assert told == [], "a rank does not send more than its agent takes"
        os.kill(pids[0], signal.SIGKILL)
        assert watch.ask(0, 0.5) is None


def test_an_answer_without_end_is_refused() -> None:
    questions = Questions()
    number = questions.put(0)
    questions.take(1, AnswerPart(number, 0, 1, b"of another rank"))
    for index in range(ANSWER_LIMIT >> 20):
        questions.take(0, AnswerPart(number, index, 10_000, bytes(1 << 20)))
    with pytest.raises(ValueError, match="more than"):
        questions.take(0, AnswerPart(number, 9_999, 10_000, b"x"))
    with pytest.raises(ValueError, match="part 3 of 2"):
        questions.take(0, AnswerPart(number, 3, 2, b""))
    assert questions.await_answer(number, 0.0) is None
    assert not questions.any()


@pytest.mark.parametrize("stopped", [True, False])
def test_a_rank_that_is_stopped_by_a_signal_excuses_nobody(tmp_path: Path, stopped: bool) -> None:
    """Stopped between two steps, where 300 seconds are allowed by default: the others' limits count at once.

    A rank that is as slow there, but runs, is one that they wait for.
    """
    waits = f"beats = hello({limits(step=0.5)!r}); beats.step_done(7); beats.enter('step'); time.sleep(600)"
    there = f"beats = hello({limits()!r}); beats.enter('step'); beats.step_done(7); time.sleep(600)"
    imports = "from holdfast.policy.timeouts import *\n"
    with watching(tmp_path) as watch, contextlib.ExitStack() as stack:
        first = stack.enter_context(speaking(tmp_path, watch.path, imports + waits))
        second = stack.enter_context(speaking(tmp_path, watch.path, imports + there))
        watch.begin({0: first.pid, 1: second.pid})
        wait_until(lambda: watch.last_steps() == {0: 7, 1: 7}, 30, "both are there")
        if stopped:
            os.kill(second.pid, signal.SIGSTOP)
            wait_until(lambda: watch.standing("a").in_time is None, 30, "nobody is in time")
        wait_until(lambda: watch.standing("a").late, 30, "one is late")
        assert watch.standing("a").in_time == (None if stopped else 7)
        hung, _ = hanging([watch.standing("a")], {}, time.monotonic())
        assert [late.rank for _, late in hung] == ([0] if stopped else [])


# --- an agent that was itself stopped


@pytest.mark.drill
def test_an_agent_that_was_stopped_gives_everybody_a_fresh_start_loudly(tmp_path: Path) -> None:
    """SIGSTOP to the agent for longer than the limit: without the guard the rank counts as hung at once."""
    rank = (
        "import time, os\n"
        + PRELUDE
        + "beats = hello(); beats.step_done(1); beats.enter('step'); time.sleep(300)"
    )
    (tmp_path / "rank.py").write_text(rank)
    agent = f"""
import subprocess, sys, time
from pathlib import Path
sys.path.insert(0, {str(REPO / "tests")!r})
from holdfast.launch import monitor as monitors
from kit.watching import handover, limits
import os
monitors.BLIND = 1.0
watch = monitors.Monitor(Path("agent"), limits(step=3.0), lambda text: print("told", time.monotonic(), text))
rank = subprocess.Popen([sys.executable, "rank.py"], env={{**os.environ, **handover(watch.path)}})
watch.begin({{0: rank.pid}})
while watch.state(0) is None or watch.state(0).section != "step":
    time.sleep(0.01)
print("ready", flush=True)
while not (found := watch.overdue()):
    time.sleep(0.01)
print("overdue", time.monotonic(), found[0].seconds)
rank.kill(); rank.wait()
watch.close()
"""
    (tmp_path / "agent.py").write_text(agent)
    with job(python("agent.py"), cwd=tmp_path) as running:
        wait_until(lambda: "ready" in running.output().out, 60, "the rank is in its step")
        running.signal(signal.SIGSTOP)
        time.sleep(4.0)
        running.signal(signal.SIGCONT)
        woken = time.monotonic()
        result = running.wait(60)
    assert result.code == 0, result.text
    lines = [line.split(maxsplit=2) for line in result.out.splitlines()]
    kinds = [line[0] for line in lines]
    assert kinds.index("told") < kinds.index("overdue")
    assert "all their time limits start afresh" in result.out
    overdue = lines[kinds.index("overdue")]
    assert float(overdue[1]) - woken > 2.5, "the rank got its whole limit again"


# --- what is learned


def test_twenty_steps_and_a_save_are_learned_and_used_by_the_next_attempt(tmp_path: Path) -> None:
    """Scenario 12, without a launcher around it."""
    code = """
beats = hello(Limits(sections={"setup": 600.0, "step": 180.0, "checkpointing": 420.0}), learn=True)
beats.enter("setup"); beats.leave("setup")
for step in range(1, 21):
    beats.enter("step")
    if step == 1:
        time.sleep(1.0)  # compiles
    beats.step_done(step)
with beats.section("checkpointing"):
    time.sleep(0.1)
with beats.section("checkpointing", learn=False):
    time.sleep(1.0)  # an asynchronous one
beats.enter("here"); time.sleep(300)
"""
    control, _ = ControlDirectory.open_or_create(tmp_path / "run")
    told: list[str] = []
    learner = Learner(control, told.append)
    with watching(tmp_path, told=told) as watch, speaking(tmp_path, watch.path, code) as rank:
        watch.begin({0: rank.pid}, learner.begin("host", 1))
        heard(watch, 0, "here")
        wait_until(lambda: "checkpointing" in watch.observed()[0], 60, "what was measured is told")
        sections, gaps = watch.observed()
        assert (sections["setup"].count, sections["checkpointing"].count) == (1, 1)
        assert sections["checkpointing"].longest >= 0.1
        assert watch.limits(0).sections["step"] == 180.0, "within an attempt the limits stand still"
        found = learner.keep(watch)
        assert found is not None
        assert found.sections["checkpointing"] == 60.0, "its floor"
        assert gaps.count > 16
        assert learner.keep(watch) is None, "nothing new"
    with watching(tmp_path) as watch, speaking(tmp_path, watch.path, code) as rank:
        watch.begin({0: rank.pid}, Learner(control, told.append).begin("host", 2))
        heard(watch, 0, "here")
        limit = watch.limits(0)
        assert (limit.sections["setup"], limit.sections["checkpointing"]) == (120.0, 60.0)
        assert limit.out_of_section == 30.0
    assert told == []
    record = json.loads((control.path / "timeouts" / "host.json").read_text())
    assert (record["node"], record["attempt"]) == ("host", 1)
    assert [path.name for path in (control.path / "timeouts").iterdir()] == ["host.json"]


def test_learned_values_that_cannot_be_written_are_told_once_and_end_nothing(tmp_path: Path) -> None:
    control, _ = ControlDirectory.open_or_create(tmp_path / "run")
    (control.path / "timeouts").write_text("in the way")
    told: list[str] = []
    learner = Learner(control, told.append)
    code = """
beats = hello(learn=True); beats.enter("setup"); beats.leave("setup"); beats.enter("x"); time.sleep(300)
"""
    with watching(tmp_path) as watch, speaking(tmp_path, watch.path, code) as rank:
        watch.begin({0: rank.pid}, learner.begin("host", 1))
        heard(watch, 0, "x")
        wait_until(lambda: watch.observed()[0], 60, "something was seen")
        assert learner.keep(watch) is None
        assert learner.keep(watch) is None
    assert sum("cannot be kept" in text for text in told) == 1


def test_a_file_system_that_does_not_answer_holds_up_no_agent_that_learns(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    control, _ = ControlDirectory.open_or_create(tmp_path / "run")
    answers, told, real = threading.Event(), list[str](), monitors.store_learned
    monkeypatch.setattr(monitors, "store_learned", lambda *args: (answers.wait(60), real(*args))[1])
    learner = Learner(control, told.append)
    code = """
beats = hello(learn=True); beats.enter("setup"); beats.leave("setup"); beats.enter("x"); time.sleep(300)
"""
    with watching(tmp_path) as watch, speaking(tmp_path, watch.path, code) as rank:
        watch.begin({0: rank.pid}, learner.begin("host", 1))
        heard(watch, 0, "x")
        wait_until(lambda: watch.observed()[0], 60, "something was seen")
        began = time.monotonic()
        assert [learner.keep(watch) for _ in range(20)] == [None] * 20
        assert time.monotonic() - began < 5.0
        answers.set()
        wait_until(lambda: learner.keep(watch), 20, "it is kept once the file system answers")
    assert [text for text in told if "does not answer" in text] == told[:1] == told


# --- ranks that have not said hello


@contextlib.contextmanager
def quiet(home: Path) -> Iterator[Job]:
    """A worker that says nothing."""
    with job(["sleep", "300"], cwd=home, may_leave=True) as running:
        try:
            yield running
        finally:
            running.kill_everything()


def test_who_does_not_say_hello_where_others_do_is_overdue_from_its_start_on(tmp_path: Path) -> None:
    """Stopped before `Run`: known as such, by the initial limit, in any attempt."""
    with watching(tmp_path, limits(initial=1.0)) as watch, quiet(tmp_path) as silent:
        watch.begin({0: os.getpid(), 1: silent.pid})
        os.kill(silent.pid, signal.SIGSTOP)
        assert watch.standing("n").in_time == 0, "others may wait for it meanwhile"
        rank = Rank(watch)
        wait_until(lambda: watch.hearing().there == {0}, 60, "rank 0 has said hello")
        found = wait_until(lambda: {one.rank: one for one in watch.overdue()}.get(1), 60, "rank 1 is overdue")
        assert (found.rule, found.limit, found.step, found.stopped) == ("hello", 1.0, 0, True)
        assert "rank 1 has not reached holdfast.Run" in str(found)
        assert "stopped by a signal" in str(found)
        assert 1 not in {one.rank for one in watch.overdue(ended=[1])}
        late = {one.rank: one for one in watch.standing("n", [], {1: 7}).late}[1]
        assert late.stopped
        assert "rank 7" in late.told, "named by its present rank"
        watch.path.rename(watch.path.with_suffix(".away"))
        assert 1 not in {one.rank for one in watch.overdue()}, "nobody can reach this monitor to say hello"
        watch.path.with_suffix(".away").rename(watch.path)
        rank.channel.close()


def test_a_script_of_which_nobody_says_hello_is_left_alone(tmp_path: Path) -> None:
    with watching(tmp_path, limits(initial=0.2)) as watch, quiet(tmp_path) as silent:
        watch.begin({0: silent.pid})
        wait_until(lambda: watch.standing("n").in_time is None, 60, "the initial limit is over")
        assert watch.overdue() == []
        assert watch.standing("n") == StillRunning(node="n"), "nor is it what others are excused by"


def test_that_a_command_says_hello_is_known_to_its_next_attempts_and_launches(tmp_path: Path) -> None:
    control, _ = ControlDirectory.open_or_create(tmp_path / "run")
    told: list[str] = []
    with watching(tmp_path, limits(initial=0.2)) as watch, quiet(tmp_path) as silent:
        first = Learner(control, told.append, ["train.py", "--lr", "1"])
        watch.begin({0: os.getpid()}, first.begin("a", 1))
        first.poll(watch)
        assert not (control.path / "hello.json").exists()
        rank = Rank(watch)
        wait_until(lambda: watch.hearing().there, 60, "rank 0 has said hello")
        first.poll(watch)
        kept = json.loads((control.path / "hello.json").read_text())
        assert kept["initial"] == 0.2
        rank.channel.close()

        other = Learner(control, told.append, ["export.py"])
        watch.begin({0: silent.pid}, other.begin("a", 2))
        other.poll(watch)
        wait_until(lambda: watch.standing("n").in_time is None, 60, "the initial limit is over")
        assert watch.overdue() == [], "another script may be one without Run"

        kept["longest"] = 0.5
        (control.path / "hello.json").write_text(json.dumps(kept))
        again = Learner(control, told.append, ["train.py", "--lr", "1"])
        watch.begin({0: silent.pid}, again.begin("b", 3))
        again.poll(watch)
        (found,) = wait_until(watch.overdue, 60, "it is known that it has to say hello")
        assert (found.rule, found.limit) == ("hello", 1.0), "twice what the slowest took"
        (control.path / "hello.json").write_text("{")
        Learner(control, told.append, ["train.py", "--lr", "1"]).poll(watch)
        assert watch.overdue() == [], "what cannot be read is not known"
    assert told == []


def test_an_attempt_that_ended_before_anybody_looked_is_learned_from_too(tmp_path: Path) -> None:
    """Its ranks said hello; those of the next attempt all stand still, so that nobody tells of the others."""
    control, _ = ControlDirectory.open_or_create(tmp_path / "run")
    told: list[str] = []
    with watching(tmp_path, limits(initial=0.2)) as watch, quiet(tmp_path) as silent:
        learner = Learner(control, told.append, ["train.py"])
        watch.begin({0: os.getpid()}, learner.begin("a", 1))
        rank = Rank(watch)
        wait_until(lambda: watch.hearing().there, 60, "rank 0 has said hello")
        learner.keep(watch)
        rank.channel.close()
        assert (control.path / "hello.json").exists()

        watch.begin({0: silent.pid}, learner.begin("a", 2))
        (found,) = wait_until(watch.overdue, 60, "it is known that it has to say hello")
        assert found.rule == "hello"
    assert told == []


# --- the same workers as another attempt


def test_who_goes_on_as_another_attempt_begins_anew(tmp_path: Path) -> None:
    """The farewell of the attempt before is forgotten, a new hello from the same process counts."""
    code = """
beats = hello(); beats.step_done(3); beats.close()
mark("parted"); until("next")
beats = hello(); beats.enter("step"); mark("again"); until("never")
"""
    hung = 'beats = hello(); beats.step_done(1); beats.enter("step"); stop()'
    with watching(tmp_path, limits(step=0.5)) as watch, contextlib.ExitStack() as stack:
        ranks = {
            n: stack.enter_context(speaking(tmp_path, watch.path, one)) for n, one in enumerate((code, hung))
        }
        watch.begin({rank: one.pid for rank, one in ranks.items()})
        wait_until((tmp_path / "parted").exists, 60, "rank 0 has taken leave")
        wait_until(watch.overdue, 60, "rank 1 hangs")
        watch.go_on([0], [], Learned())
        assert watch.overdue() == [], "who is left out hangs no more"
        assert watch.hearing().done == frozenset(), "who took leave of the attempt before has not of this one"
        assert watch.last_steps() == {}
        (tmp_path / "next").touch()
        heard(watch, 0, "step")
        assert watch.hearing().there == {0}
        deadline = time.monotonic() + 1.0  # twice what the one that was left out would be given again
        while time.monotonic() < deadline:
            assert watch.overdue() == []
            time.sleep(0.02)


def test_reserves_are_not_missed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[str] = []
    monkeypatch.setattr(monitors, "UNHEARD", 0.3)
    with watching(tmp_path, told=told) as watch:
        watch.begin({0: 1 << 22, 1: (1 << 22) - 1})
        watch.go_on([0, 1], [1], Learned())
        wait_until(lambda: told, 30, "the rank that says nothing is told of")
    assert "rank 0 has not said hello" in told[0]
