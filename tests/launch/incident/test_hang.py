"""Evidence of a hang, from real ranks that hang in real ways."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import msgspec
import pytest

from holdfast.launch.incident import hang
from holdfast.launch.incident.hang import (
    HangRecord,
    HangReport,
    RankEvidence,
    merge,
    parse_stacks,
    place,
    summarise,
)
from holdfast.policy.evidence import Position
from holdfast.process import proc
from holdfast.train import testimony
from kit.harness import REPO, Job, job, python, wait_until

SCRIPT = REPO / "tests" / "scripts" / "launch" / "hang_rank.py"
SPAN = 15.0
"""Seconds for a collection: on a machine that others keep busy, each share of it must still be enough."""


@dataclass
class Late:
    rank: int
    section: str = "step"
    rule: str = "section"
    limit: float = 180.0
    seconds: float = 181.0
    step: int = 7


class Ranks:
    """Ranks that hang, each a child of this process."""

    def __init__(self, home: Path) -> None:
        self.home = home
        self.private = home / "private"
        self.private.mkdir(mode=0o700)
        self.jobs: dict[int, Job] = {}
        self._stack = contextlib.ExitStack()

    def start(self, rank: int, how: str, *arguments: str) -> None:
        argv = python(SCRIPT, str(self.private), str(rank), how, *arguments)
        if how == "deaf" and arguments == ("wrapped",):
            argv = ["sh", "-c", '"$@"; exit $?', "wrapper", *argv]
        self.jobs[rank] = self._stack.enter_context(job(argv, cwd=self.home, may_leave=True))

    def await_ready(self) -> None:
        for rank, running in self.jobs.items():
            mark = self.private / f"{rank}.ready"
            wait_until(
                lambda m=mark, r=running: m.exists() or r.process.poll() is not None, 60, "a rank hangs"
            )
            assert mark.exists(), running.output().text

    @property
    def pids(self) -> dict[int, int]:
        return {rank: running.pid for rank, running in self.jobs.items()}

    def ask(self, rank: int, timeout: float) -> bytes | None:
        deadline = time.monotonic() + timeout
        parts = []
        with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX) as line:
            line.settimeout(max(0.01, deadline - time.monotonic()))
            line.connect(str(self.private / f"{rank}.sock"))
            while part := line.recv(65536):
                parts.append(part)
            return b"".join(parts)
        return None

    def collect(self, *late: int, span: float = SPAN, home: Path | None = None) -> HangReport:
        return hang.collect(
            (home or self.home) / "attempt",
            "node0",
            self.pids,
            self.ask,
            hung=[Late(rank) for rank in late],
            deadline=time.monotonic() + span,
            stacks=self.private,
        )

    def text(self, rank: int) -> str:
        return (self.home / "attempt" / "hang" / f"rank_{rank:06d}.txt").read_text()

    def all_live(self) -> bool:
        return all(running.process.poll() is None for running in self.jobs.values())

    def close(self) -> None:
        for running in self.jobs.values():
            running.kill_everything()
        self._stack.close()


@pytest.fixture(scope="module")
def c_library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    library = tmp_path_factory.mktemp("hang") / "hang_in_c.so"
    compiler = shutil.which("cc") or shutil.which("gcc")
    assert compiler is not None, "a C compiler is part of what the tests need"
    source = str(REPO / "tests" / "scripts" / "launch" / "hang_in_c.c")
    subprocess.run([compiler, "-shared", "-fPIC", "-O1", "-o", str(library), source], check=True)
    return library


@pytest.fixture
def ranks(tmp_path: Path) -> Iterator[Ranks]:
    started = Ranks(tmp_path)
    try:
        yield started
    finally:
        started.close()


def state(pid: int) -> str:
    found = proc.read(pid)
    return found.state if found is not None else ""


def test_a_rank_that_never_joins_a_collective_is_named(ranks: Ranks) -> None:
    """pytorch#141069, nccl#1260: which rank is missing, from what, and where it is instead."""
    for rank in (0, 1):
        ranks.start(rank, "gloo", str(ranks.home / "store"))
    ranks.await_ready()
    wait_until(lambda: state(ranks.pids[0]) == "S", 30, "rank 0 waits")
    wait_until(lambda: merge([ranks.collect(0)]).missing, 60, "rank 0 is in the collective")
    report = ranks.collect(0)
    assert report.summary == (
        "rank 0 waited for rank 1 in an all_reduce "
        f"(hang_rank.py:{line_of('dist.all_reduce(torch.ones(2, 3))', last=True)} in forward); "
        f"rank 1 was at {report.ranks[1].where}"
    )
    (record,) = report.hung
    assert (record.missing, record.silent, record.state, record.step) == ((1,), (), "S", 7)
    other = report.ranks[1]
    assert other.where == f"hang_rank.py:{line_of('time.sleep(600)', last=True)} in wait_for_data"
    assert other.positions is not None
    assert [(p.entered, p.waits_in, p.members) for p in other.positions] == [(3, 0, (0, 1))]
    assert [stack.name for stack in other.stacks if stack.main] == ["MainThread"]
    assert "holdfast-answers" in ranks.text(1)
    assert "waits in all_reduce #4, shapes [2,3] -> [2,3]" in ranks.text(0)
    assert "thread MainThread (main)" in ranks.text(0)
    assert hang.read_reports(ranks.home / "attempt") == [report]
    assert ranks.all_live(), "looking must not end anything"


def line_of(text: str, *, last: bool = False) -> int:
    found = [n for n, line in enumerate(SCRIPT.read_text().splitlines(), 1) if line.strip() == text]
    return found[-1] if last else found[0]


def sleeping_line() -> int:
    """Of the last statement of `forward`."""
    lines = SCRIPT.read_text().splitlines()
    return next(n for n, line in enumerate(lines, 1) if line == "        time.sleep(600)")


def test_one_that_holds_the_interpreters_lock_shows_its_stacks_by_the_signal(
    ranks: Ranks, c_library: Path
) -> None:
    ranks.start(3, "gil", str(c_library))
    ranks.start(4, "sleep")
    ranks.await_ready()
    report = ranks.collect(3, span=8.0)
    held, asleep = report.ranks
    assert (held.stacks_by, held.positions) == ("signal", None)
    assert held.where == f"hang_rank.py:{line_of('ctypes.PyDLL(argument).hang_in_sleep(600)')} in forward"
    assert held.problems == ["did not answer"]
    assert (asleep.stacks_by, asleep.positions, asleep.sections) == ("answer", [], ["train", "step"])
    assert asleep.where == f"hang_rank.py:{sleeping_line()} in forward"
    assert report.hung[0].where == held.where
    assert ranks.all_live()
    # And again: the file is read from where it ended before.
    again = ranks.collect(3, span=8.0).ranks[0]
    assert (again.where, [stack.main for stack in again.stacks].count(True)) == (held.where, 1)


def test_a_stopped_rank_is_said_to_be_stopped(ranks: Ranks) -> None:
    """It can neither answer nor handle a signal; nothing is sent that would be waiting for it."""
    ranks.start(0, "sleep")
    ranks.await_ready()
    os.kill(ranks.pids[0], signal.SIGSTOP)
    wait_until(lambda: state(ranks.pids[0]) == "T", 30, "it is stopped")
    report = ranks.collect(0)
    assert report.summary == (
        "rank 0 stood still for 181 s in its training step (180 s are allowed): "
        "its process was stopped by a signal"
    )
    assert report.hung[0].state == "T"
    assert report.seconds < SPAN * hang.ASKING, "it was not asked"
    assert "stopped by a signal: it can neither answer" in ranks.text(0)
    pending = Path(f"/proc/{ranks.pids[0]}/status").read_text()
    assert "ShdPnd:\t0000000000000000" in pending


def test_nobody_gets_the_signal_who_did_not_register_it(ranks: Ranks) -> None:
    ranks.start(0, "mute")
    ranks.start(1, "deaf")
    ranks.start(2, "deaf")
    ranks.await_ready()
    # Rank 2's registration is that of a process which had the id before.
    path = testimony.record_path(ranks.private, 2)
    old = msgspec.json.decode(path.read_bytes(), type=testimony.Registered)
    path.write_bytes(msgspec.json.encode(msgspec.structs.replace(old, started=old.started - 1)))
    report = ranks.collect(0, span=8.0)
    assert [(one.stacks_by, bool(one.where)) for one in report.ranks] == [
        ("", False), ("signal", True), ("", False),
    ]  # fmt: skip
    assert report.ranks[0].problems == ["did not answer", "registered no stack signal"]
    assert "does not handle the stack signal" in report.ranks[2].problems[-1]
    assert ranks.all_live()


def test_a_rank_behind_a_wrapper_is_looked_at_itself(ranks: Ranks) -> None:
    """`holdfast run --no-python wrapper.sh`: the worker is a shell that waits."""
    ranks.start(0, "deaf", "wrapped")
    ranks.await_ready()
    (one,) = ranks.collect(0, span=6.0).ranks
    assert one.pid != ranks.pids[0]
    assert (one.stacks_by, one.where) == ("signal", f"hang_rank.py:{sleeping_line()} in forward")
    assert one.pid in ranks.jobs[0].processes()


def test_a_registration_alone_is_not_believed(ranks: Ranks) -> None:
    """The process has no handler (any more): the signal would end it."""
    ranks.start(0, "mute")
    ranks.await_ready()
    pid = ranks.pids[0]
    found = proc.read(pid)
    assert found is not None
    record = testimony.Registered(pid=pid, started=found.started, signal=signal.SIGRTMIN + 7, main_thread=1)
    testimony.record_path(ranks.private, 0).write_bytes(msgspec.json.encode(record))
    testimony.stacks_path(ranks.private, 0).touch()
    report = ranks.collect(0, span=4.0)
    assert "does not handle the stack signal" in report.ranks[0].problems[-1]
    assert ranks.all_live()


@pytest.mark.drill
def test_a_main_thread_that_waits_in_the_kernel_is_shown_by_another_thread(
    ranks: Ranks, c_library: Path
) -> None:
    """pytorch#185414: uninterruptible sleep. The kernel's own part of the stack says where."""
    ranks.start(0, "vfork", str(c_library))
    ranks.await_ready()
    pid = ranks.pids[0]
    wait_until(lambda: state(pid) in ("D", "S"), 30, "it waits for its child")
    sleeps = state(pid)  # S on kernels that let a vforking parent sleep interruptibly
    report = ranks.collect(0, span=10.0)
    (one,) = report.ranks
    assert (one.state, one.stacks_by) == (sleeps, "signal")
    assert one.where == f"hang_rank.py:{line_of('ctypes.PyDLL(argument).hang_in_vfork(600)')} in forward"
    if sleeps == "D":
        assert "uninterruptible sleep" in report.summary
        assert "D in uninterruptible sleep" in ranks.text(0)


def test_a_disk_that_hangs_does_not_hold_up_the_kill(ranks: Ranks, monkeypatch: pytest.MonkeyPatch) -> None:
    """A mock, since no disk here hangs: the write waits until the test ends."""
    ranks.start(0, "sleep")
    ranks.await_ready()
    go_on = threading.Event()
    monkeypatch.setattr(hang, "make_dirs", lambda path: go_on.wait(60))
    started = time.monotonic()
    try:
        report = ranks.collect(0, span=3.0)
        assert time.monotonic() - started < 30
        assert report.kept == ""
        assert "was not written" in report.problems[0]
        assert report.hung[0].where, "what was found is told all the same"
        assert not (ranks.home / "attempt").exists()
    finally:
        go_on.set()


def test_evidence_that_cannot_be_written_is_told(ranks: Ranks) -> None:
    ranks.start(0, "sleep")
    ranks.await_ready()
    (ranks.home / "attempt").write_text("a file is in the way")
    report = ranks.collect(0)
    assert report.kept == ""
    assert "could not be written" in report.problems[0]
    assert "rank 0 stood still for 181 s in its training step" in report.summary


def test_a_rank_that_answers_nothing_or_nonsense_costs_its_answer_only(tmp_path: Path) -> None:
    """Also an ask that raises, or that never returns."""
    sleepers = [subprocess.Popen(["sleep", "600"]) for _ in range(4)]

    def ask(rank: int, timeout: float) -> bytes | None:
        if rank == 0:
            return b"\xff{nonsense"
        if rank == 1:
            raise ConnectionResetError("gone")
        if rank == 2:
            time.sleep(5)
        return None

    try:
        report = hang.collect(
            tmp_path, "n", {rank: sleeper.pid for rank, sleeper in enumerate(sleepers)}, ask,
            hung=[Late(2)], deadline=time.monotonic() + 2.0, stacks=tmp_path,
        )  # fmt: skip
        assert "cannot be read" in report.ranks[0].problems[0]
        assert report.ranks[1].problems == ["ConnectionResetError: gone"]
        assert report.ranks[2].problems == ["nothing could be found out in time"]
        assert report.ranks[3].problems == ["did not answer", "registered no stack signal"]
        assert [one.positions for one in report.ranks] == [None] * 4
        assert [sleeper.poll() for sleeper in sleepers] == [None] * 4
    finally:
        for sleeper in sleepers:
            sleeper.kill()
            sleeper.wait()


def test_reports_of_nodes_say_together_what_none_can_say_alone(tmp_path: Path) -> None:
    group = Position(group="0", entered=412, name="all_reduce", waits_in=412, members=(0, 1, 2, 3))
    behind = Position(group="0", entered=411, name="all_reduce", members=(0, 1, 2, 3))

    def report(node: str, hung: list[HangRecord], *said: tuple[int, list[Position] | None]) -> HangReport:
        evidence = [RankEvidence(rank=rank, pid=1, positions=positions) for rank, positions in said]
        return HangReport(node=node, at=0.0, seconds=0.0, hung=hung, ranks=evidence)

    overdue = HangRecord(
        rank=0, node="a", section="step", seconds=181, limit=180, where="train.py:88 in step"
    )
    one = report("a", [overdue], (0, [group]), (1, [group]))
    other = report("b", [], (2, [behind]), (3, None))
    job_wide = merge([one, other])
    assert job_wide == merge([other, one])
    assert job_wide.suspects == (2,)
    assert job_wide.summary == (
        "rank 0 waited for rank 2 in an all_reduce (train.py:88 in step); nothing is known of rank 3, "
        "which could not be asked; look at rank 2 first"
    )
    assert merge([one], world=4).hung[0].silent == (2, 3), "a node without a report could not testify"
    for path, kept in (("a", one), ("b", other)):
        (tmp_path / "hang").mkdir(exist_ok=True)
        (tmp_path / "hang" / f"{path}.json").write_bytes(msgspec.json.encode(kept))
    (tmp_path / "hang" / "torn.json").write_text('{"node": "c", ')
    assert hang.read_reports(tmp_path) == [one, other]


def test_a_stopped_rank_is_named_although_it_is_another_that_is_overdue() -> None:
    """Scenario 11, in setup: the one that waits for it may have begun to wait earlier."""
    hung = [HangRecord(rank=0, node="a", section="setup", seconds=16.0, limit=16.0)]
    ranks = [RankEvidence(rank=0, pid=1, state="S"), RankEvidence(rank=1, pid=2, state="T")]
    found = merge([HangReport(node="a", at=0.0, seconds=0.0, hung=hung, ranks=ranks)], world=2)
    assert found.suspects == (1,)
    assert "rank 1 is stopped by a signal" in found.summary
    assert found.summary.endswith("look at rank 1 first")


def test_a_summary_names_what_is_known_and_nothing_else() -> None:
    assert summarise(HangRecord(rank=5, node="n", seconds=300.4, limit=300)) == (
        "rank 5 stood still for 300 s between its steps (300 s are allowed)"
    )
    exiting = HangRecord(rank=5, node="n", rule="exiting", seconds=3600.4, limit=3600)
    assert summarise(exiting) == (
        "rank 5 stood still for 3600 s between the end of its loop and its exit (3600 s are allowed)"
    )
    assert "uninterruptible sleep" in summarise(HangRecord(rank=5, node="n", section="setup", state="D"))


def test_stacks_of_the_handler_are_read_whatever_is_in_them() -> None:
    told = testimony.Registered(pid=1, started=1, signal=41, main_thread=0x7F01)
    text = (
        'Thread 0x00007f02 (most recent call first):\n  File "/x/a "b".py", line 3 in <lambda>\n  ...\n\n'
        "Current thread 0x00007f03 [name] (most recent call first):\n  <no Python frame>\n\n"
        "Thread 0x00007f01 (most recent call first):\n"
        '  File "/usr/lib/python3.11/threading.py", line 1 in wait\n'
        '  File "/home/me/train.py", line 88 in forward\n'
        '  File "/home/me/train.py", line ??? in <module>\n torn'
    )
    stacks = parse_stacks(text, told)
    assert [(stack.main, len(stack.frames)) for stack in stacks] == [(True, 3), (False, 1), (False, 0)]
    assert place(stacks) == "train.py:88 in forward"
    assert parse_stacks("", told) == []
    assert place([]) == ""
