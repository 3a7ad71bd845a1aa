"""Ends that are certain: workers, what they started, and what a killed agent leaves."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from holdfast.launch.workers import orphans
from holdfast.launch.workers.orphans import REPLACEMENTS, Left, OrphanKeeper, Orphans, Workers, recognise
from holdfast.process import proc
from holdfast.process.companion import AGENT, OUTLIVES, outliving
from kit.harness import REPO, Job, is_alive, job, python, wait_until

SCRIPT = REPO / "tests" / "scripts" / "launch" / "agent_of_strays.py"
BELOW = "setsid sleep 301 & echo $! > below.pid; sleep 302"
"""Left the worker's session and is still below it."""
DAEMON = "(setsid sleep 303 & echo $! > daemon.pid); sleep 304"
"""Its parent is gone: the agent has it by now."""
SCRUBBED = "(env -i setsid sleep 305 & echo $! > scrubbed.pid); sleep 306"
"""Has given up its environment as well."""
CRASHED = "setsid sleep 307 & echo $! > crashed.pid; exit 3"
WRITER = (
    f"exec {sys.executable} -c \"import socket, time\nfrom holdfast.checkpoint.save import handoff\n"
    "ours, theirs = socket.socketpair()\nprocess = handoff.spawn(theirs.fileno())\n"
    "open('writer.pid', 'w').write(str(process.pid))\ntime.sleep(600)\""
)  # fmt: skip
STUBBORN = "trap '' TERM; echo $$ > stubborn.pid; while :; do sleep 308; done"


class Agent:
    def __init__(self, place: Path, running: Job) -> None:
        self.place = place
        self.job = running

    def pid_of(self, name: str) -> int:
        path = self.place / f"{name}.pid"
        wait_until(lambda: path.exists() and path.read_text().strip(), 60, f"{name} is started")
        return int(path.read_text())

    def workers(self) -> dict[str, int]:
        return self._read("ready")

    def order(self, text: str) -> None:
        (self.place / "order.new").write_text(text)
        (self.place / "order.new").rename(self.place / "order")

    def stop(self, grace: float = 0.0) -> dict[str, Any]:
        self.order(f"stop {grace}")
        return self._read("done")

    def tend(self) -> tuple[list[str], list[int]]:
        self.order("tend")
        told = self._read("tended")
        (self.place / "tended").unlink()
        return told[0], told[1]

    def _read(self, name: str) -> Any:
        path = self.place / name
        wait_until(lambda: path.exists() or self.job.process.poll() is not None, 60, f"the agent says {name}")
        assert path.exists(), self.job.output().text
        return json.loads(path.read_text())

    def end(self) -> None:
        self.order("end")
        assert self.job.wait(30).code == 0, self.job.output().text


@contextlib.contextmanager
def agent(place: Path, *commands: str, keeper: bool = False, outlive: float = 60.0) -> Iterator[Agent]:
    place.mkdir(exist_ok=True)
    how = "keeper" if keeper else "alone"
    argv = python(SCRIPT, str(place), how, str(outlive), *commands)
    with job(argv, cwd=place) as running:
        started = Agent(place, running)
        started.workers()
        yield started


@contextlib.contextmanager
def sleeper(*, apart: bool = True) -> Iterator[subprocess.Popen[bytes]]:
    """A child that does nothing, and is gone afterwards however the test ends."""
    with subprocess.Popen(["sleep", "600"], start_new_session=apart) as process:
        try:
            yield process
        finally:
            process.kill()


@pytest.fixture
def bystander() -> Iterator[subprocess.Popen[bytes]]:
    """A process that has nothing to do with any of it."""
    with sleeper() as process:
        yield process
        assert process.poll() is None, "somebody else's process was ended"


def test_what_workers_started_in_other_sessions_ends_with_them(
    tmp_path: Path, bystander: subprocess.Popen[bytes]
) -> None:
    """Lightning#8130: nothing of a worker lives on, wherever it went."""
    with agent(tmp_path, BELOW, DAEMON, SCRUBBED, CRASHED) as running:
        strays = [running.pid_of(name) for name in ("below", "daemon", "scrubbed", "crashed")]
        assert all(is_alive(pid) for pid in strays)
        done = running.stop()
        assert not any(is_alive(pid) for pid in strays)
        assert (done["dead"], done["left"], done["outliving"]) == (True, [], [])
        assert done["helpers"] == [None, None], "what the agent started itself is not the workers'"
        assert done["zombies"] == [], "what was adopted is reaped"
        assert done["codes"]["3"] == 3, "a worker's own end is still to be seen"
        running.end()


def test_one_that_keeps_starting_others_ends(tmp_path: Path) -> None:
    """Each leaves its session and its parent; the reaper gets those that came after a look."""
    (tmp_path / "hydra.sh").write_text('sleep 0.05\nsetsid sh "$0" &\nsetsid sh "$0.leaf" &\n')
    (tmp_path / "hydra.sh.leaf").write_text("exec sleep 309\n")
    with agent(tmp_path, f"setsid sh {tmp_path}/hydra.sh & echo $! > hydra.pid; sleep 310") as running:
        running.pid_of("hydra")
        wait_until(lambda: len(running.job.processes()) > 8, 60, "it has started some")
        done = running.stop()
        assert (done["dead"], done["left"], done["zombies"]) == (True, [], [])
        running.end()


def test_a_stopped_and_a_stubborn_worker_end(tmp_path: Path) -> None:
    with agent(tmp_path, "kill -STOP $$; sleep 311", STUBBORN) as running:
        stopped = running.workers()["0"]
        running.pid_of("stubborn")
        wait_until(lambda: (p := proc.read(stopped)) and p.state == "T", 30, "it is stopped")
        done = running.stop(grace=0.3)
        assert done["dead"]
        assert done["codes"] == {"0": -signal.SIGKILL, "1": -signal.SIGKILL}
        running.end()


# --- writers -----------------------------------------------------------------------------------------------


@pytest.mark.drill
def test_a_writer_may_outlive_its_trainer_for_a_while_and_an_impostor_may_not(tmp_path: Path) -> None:
    module = "holdfast.checkpoint.save.writer_process"
    like_one = f"setsid sh -c 'sleep 312; :' -m {module} 3 & echo $! > like.pid; sleep 313"
    mark = f"{OUTLIVES}='{module} 1'"
    marked = f"{mark} setsid sleep 314 & echo $! > marked.pid; sleep 315"
    with agent(tmp_path, WRITER, like_one, marked, outlive=3.0) as running:
        writer, impostors = running.pid_of("writer"), [running.pid_of("like"), running.pid_of("marked")]
        os.kill(writer, signal.SIGSTOP)  # or it would end by itself as soon as its trainer is gone
        done = running.stop()
        assert done["dead"]
        assert done["left"] == []
        assert not any(is_alive(pid) for pid in impostors)
        (named,) = done["outliving"]
        assert named.startswith(f"writer process {writer} of trainer {running.workers()['0']} (")
        assert is_alive(writer)
        wait_until(lambda: running.tend() == ([], []), 60, "it is ended after its time, and reaped")
        assert not is_alive(writer)
        running.end()


def test_only_our_own_start_of_a_writer_is_recognised() -> None:
    module = "holdfast.checkpoint.save.writer_process"
    waiting = [sys.executable, "-c", "import time; time.sleep(600)"]

    def seen(
        argv: list[str], *, apart: bool = True, env: dict[str, str] | None = None
    ) -> tuple[str, int] | None:
        with subprocess.Popen(argv, start_new_session=apart, env=env) as process:
            try:
                wait_until(lambda: proc.arguments(process.pid)[:1] == argv[:1], 30, "it is executed")
                found = proc.read(process.pid)
                assert found is not None
                return recognise(found)
            finally:
                process.kill()

    assert seen(waiting, env=outliving(module)) == ("", 0), "another program"
    assert seen([*waiting[:2], waiting[2], "-m", module]) == ("", 0), "no mark"
    same = [sys.executable, "-c", waiting[2], "-m", module]
    assert seen(same, apart=False, env=outliving(module)) == ("", 0), "not in a session of its own"
    other = "some.other.module"
    assert seen([*same[:4], other], env=outliving(other)) == ("", 0), "not one of those that may"
    assert seen(same, env=outliving(module)) == (module, os.getpid())


def test_what_a_writer_forks_for_its_work_is_spared_with_it_and_nothing_else_is() -> None:
    module = "holdfast.checkpoint.save.writer_process"
    forks = "import os, time; p = os.fork(); p and print(p, flush=True); time.sleep(600)"

    def seen(env: dict[str, str]) -> tuple[str, int] | None:
        argv = [sys.executable, "-c", forks, "-m", module]
        with subprocess.Popen(argv, start_new_session=True, env=env, stdout=subprocess.PIPE) as process:
            assert process.stdout is not None
            child = int(process.stdout.readline())
            try:
                found = proc.read(child)
                assert found is not None
                return recognise(found)
            finally:
                process.kill()
                os.kill(child, signal.SIGKILL)

    assert seen(outliving(module)) == (module, os.getpid())
    assert seen(outliving("some.other.module")) == ("", 0)


# --- the keeper --------------------------------------------------------------------------------------------


def test_nothing_outlives_a_killed_agent(tmp_path: Path, bystander: subprocess.Popen[bytes]) -> None:
    """Workers die by the kernel's hand; what left their sessions is found by its mark."""
    with (
        agent(tmp_path / "one", BELOW, DAEMON, STUBBORN, keeper=True) as running,
        agent(tmp_path / "other", BELOW, keeper=True) as other,
    ):
        strays = [running.pid_of(name) for name in ("below", "daemon")]
        theirs = other.pid_of("below")
        os.killpg(running.job.pid, signal.SIGKILL)  # its whole group, as a shell or a scheduler would
        wait_until(lambda: not running.job.processes(), 60, "everything ends, the keeper last")
        assert not any(is_alive(pid) for pid in strays)
        assert "the launcher is gone; ended" in running.job.output().err
        assert is_alive(theirs), "another agent's"
        assert other.stop()["dead"]
        other.end()
        wait_until(lambda: not other.job.processes(), 60, "a keeper ends with its agent")


@pytest.mark.drill
def test_a_writer_outlives_a_killed_agent_for_its_time_only(tmp_path: Path) -> None:
    with agent(tmp_path, WRITER, BELOW, keeper=True, outlive=4.0) as running:
        writer, stray = running.pid_of("writer"), running.pid_of("below")
        os.kill(writer, signal.SIGSTOP)
        os.kill(running.job.pid, signal.SIGKILL)
        wait_until(lambda: not is_alive(stray), 60, "the stray ends")
        assert is_alive(writer)
        wait_until(lambda: not running.job.processes(), 60, "so does the writer, after its time")


def test_a_keeper_that_dies_is_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(AGENT, "")  # so that the mark is taken back at the end
    keeper = OrphanKeeper(outlive=1.0)
    pid = keeper.start()
    assert os.environ[AGENT].startswith(f"{os.getpid()}.")
    assert keeper.check() == (None, "")
    for _ in range(REPLACEMENTS):
        os.kill(pid, signal.SIGKILL)
        wait_until(lambda p=pid: not is_alive(p), 30, "it is dead")
        replaced, why = keeper.check()
        assert replaced is not None
        assert "was replaced" in why
        pid = replaced
    os.kill(pid, signal.SIGKILL)
    wait_until(lambda: not is_alive(pid), 30, "it is dead")
    assert keeper.check() == (
        None,
        f"the keeper process ended {REPLACEMENTS + 1} times (-9) and is not replaced",
    )
    assert keeper.check() == (None, "")


# --- what cannot be ended ----------------------------------------------------------------------------------


def test_what_sigkill_does_not_end_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """pytorch#185414. A mock, since nothing here hangs in the kernel for good: SIGKILL is not delivered."""
    real = os.killpg
    monkeypatch.setattr(
        os, "killpg", lambda pid, number: real(pid, number) if number != signal.SIGKILL else None
    )
    monkeypatch.setattr(orphans, "KILL_TIMEOUT", 0.5)
    argv = [sys.executable, "-c", "import signal, time; signal.signal(15, lambda *_: None); time.sleep(600)"]
    with subprocess.Popen(argv, start_new_session=True) as process:
        try:
            wait_until(lambda: proc.catches(process.pid, 15), 30, "Python has started")
            wait_until(lambda: "time.sleep" in " ".join(proc.arguments(process.pid)), 30, "it is executed")
            group = Workers({4: process.pid})
            started = time.monotonic()
            assert group.stop(0.1) is False
            assert time.monotonic() - started < 30
            (left,) = group.left
            assert (left.pid, left.rank, left.state) == (process.pid, 4, "S")
            assert str(left).startswith(f"rank 4, pid {process.pid} (")
        finally:
            process.kill()
    assert str(Left(9, None, "nfsd io", "D", "rpc_wait_bit_killable")) == (
        "pid 9 (nfsd io), in uninterruptible sleep in rpc_wait_bit_killable"
    )


def test_where_orphans_cannot_be_adopted_what_is_below_a_worker_still_ends(tmp_path: Path) -> None:
    with subprocess.Popen(["sh", "-c", BELOW], start_new_session=True, cwd=tmp_path) as process:
        path = tmp_path / "below.pid"
        wait_until(lambda: path.exists() and path.read_text().strip(), 30, "it is started")
        assert Workers({0: process.pid}).stop(0.0)
        below = proc.read(int(path.read_text()))
        try:
            wait_until(lambda: below is None or not is_alive(below.pid), 10, "it ends")
        finally:
            if below is not None:
                proc.send(below, signal.SIGKILL)


def test_a_kill_from_a_signals_handler_does_not_wait_for_this_thread() -> None:
    with sleeper() as process:
        group = Workers({0: process.pid})
        with group._lock:  # as in the middle of `signal`
            group.kill()
        assert process.wait(30) == -signal.SIGKILL


# --- processes ---------------------------------------------------------------------------------------------


def test_a_signal_goes_to_that_process_or_to_none() -> None:
    with sleeper(apart=False) as process:
        found = proc.read(process.pid)
        assert found is not None
        assert not proc.send(found._replace(started=found.started - 1), signal.SIGKILL)
        assert process.poll() is None, "the id belonged to another process before"
        assert proc.send(found, signal.SIGKILL)
        process.wait(30)
    assert not proc.send(found, signal.SIGKILL)


def test_threads_are_read_with_what_they_wait_for(tmp_path: Path) -> None:
    """A fake /proc, for states that cannot be made here, and names that hold what separates fields."""
    rest = " ".join(["1", "7", "7", *["0"] * 15, "4242"])
    for tid, state, name, wchan in (
        (7, "S", "a) b (c", "0"),
        (9, "D", "nccl", "nv_wait"),
        (8, "t", "gdb", ""),
    ):
        task = tmp_path / "7" / "task" / str(tid)
        task.mkdir(parents=True)
        (task / "stat").write_text(f"{tid} ({name}) {state} {rest}")
        (task / "wchan").write_text(wchan)
        (task / "stack").write_text("[<0>] nv_wait+0x1/0x2\n[<0>] ioctl+0x1/0x2\n")
    found = proc.threads(7, proc=tmp_path)
    assert [(t.tid, t.state, t.name, t.wchan) for t in found] == [
        (7, "S", "a) b (c", ""), (8, "t", "gdb", ""), (9, "D", "nccl", "nv_wait"),
    ]  # fmt: skip
    assert found[2].stack == ("nv_wait+0x1/0x2", "ioctl+0x1/0x2")
    assert proc.threads(1234, proc=tmp_path) == []
    assert proc.read(1234, proc=tmp_path) is None
    (tmp_path / "5").mkdir()
    (tmp_path / "5" / "stat").write_text("torn")
    assert proc.everyone(proc=tmp_path) == {}


def test_a_read_that_hangs_is_given_up() -> None:
    started = time.monotonic()
    assert proc.within(0.1, lambda: time.sleep(20)) is None
    assert time.monotonic() - started < 15
    assert proc.within(10.0, lambda: 7) == 7
    assert proc.within(10.0, lambda: 1 // 0) is None


def test_without_the_right_to_reap_nothing_counts_as_adopted() -> None:
    """A child in a session of its own that this process did start, unknown to it, is left alone."""
    with sleeper() as worker, sleeper() as mine:
        assert Orphans(1.0).clear({worker.pid}) == []
        assert mine.poll() is None
