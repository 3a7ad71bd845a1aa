"""Agents of several nodes that stop an attempt: real attempts, stores and monitors, in the test's process."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from torch.distributed import HashStore

from holdfast.cluster.slurm import SlurmJob
from holdfast.config.sections import SlurmSettings
from holdfast.config.settings import Settings
from holdfast.errors import ExitCode
from holdfast.journal.events.run import StopAsked, StopForced, StopHastened
from holdfast.launch.context import LaunchSignals, Scheduler
from holdfast.launch.incident import hang as rolls
from holdfast.launch.incident import supervision
from holdfast.launch.incident.supervision import StorageDoubt, Vigil
from holdfast.launch.monitor import Overdue
from holdfast.launch.nodes.attempt import Attempt, AttemptAnnouncement, Notice, RoundPlace
from holdfast.launch.stops import Stopping
from holdfast.policy.timeouts import Limits, OpenSection
from holdfast.record.directory import ControlDirectory
from holdfast.record.secret import SealedStore, run_secret
from holdfast.train.beats import Halted, Prepare, Promise, State, StopAt
from kit.harness import wait_until
from kit.nodes.fake_scontrol import JOB, Fake, limit_in
from kit.runs import journalled
from kit.watching import Rank, watching

LIMIT = 30.0


class Node:
    """The agent of one node as far as a stop concerns it, and its only rank."""

    def __init__(self, attempt: Attempt, monitor: Any, job: SlurmJob | None) -> None:
        number = attempt.place.group_rank
        settings = Settings(slurm=SlurmSettings(preempt_time=0.0))
        monitor.begin({number: os.getpid()})
        self.ended: dict[int, int] = {}
        self.killed = False
        self.attempt = attempt
        self.rank = Rank(monitor)
        self.signals = LaunchSignals("SIGTERM")
        self.scheduler = Scheduler(attempt.control, settings, job)
        context: Any = SimpleNamespace(
            settings=settings,
            control=attempt.control,
            monitor=monitor,
            signals=self.signals,
            scheduler=self.scheduler,
            leadership=SimpleNamespace(lost=""),
            elastic=False,
            min_nodes=attempt.place.nodes,
            max_nodes=attempt.place.nodes,
            launch=attempt.launch,
            earlier_launches=[],
        )
        workers: Any = SimpleNamespace(
            pids={number: os.getpid()}, ended=lambda: self.ended, kill=lambda: setattr(self, "killed", True)
        )
        self.stopping = Stopping(attempt, workers, context)
        self.vigil = Vigil(
            attempt,
            workers,
            context,
            None,
            self.stopping,
            interval=0.1,
            newcomers=lambda: 0,
        )
        wait_until(lambda: monitor.hearing().there == {number}, LIMIT, "the rank has said hello")

    def look(self) -> Notice | None:
        return self.vigil._look()


@contextlib.contextmanager
def nodes(home: Path, count: int, job: SlurmJob | None = None) -> Iterator[list[Node]]:
    """Agents of one attempt, the leading one first."""
    control, _ = ControlDirectory.open_or_create(home / "run")
    store = HashStore()
    told = AttemptAnnouncement(run=control.run_id, attempt=1, epoch=1)
    with contextlib.ExitStack() as stack:
        found = []
        for rank in range(count):
            place = RoundPlace(node=f"n{rank}", group_rank=rank, nodes=count, world_size=count)
            sealed = SealedStore(store, run_secret(control), control.run_id, "round")
            attempt = Attempt(control, place, "launch", told, sealed)
            stack.callback(attempt.close)
            monitor = stack.enter_context(watching(home / place.node))
            found.append(Node(attempt, monitor, job))
            stack.callback(found[-1].rank.channel.close)
            stack.callback(found[-1].scheduler.part, lambda text: None)
        yield found


def test_whoever_asks_the_deadline_is_the_one_that_the_leading_agent_learns_from_the_scheduler(
    tmp_path: Path, fake_scontrol: Fake
) -> None:
    """E1: min(shutdown_timeout_sec, lead − margin), also if a node asks that knows of no limit.

    And a job that is preempted learns only after the signal that its end has come closer. The end in the
    environment is over: somebody has extended the limit since.
    """
    fake_scontrol.answer(limit_in(7200, of=10_000))
    with nodes(tmp_path, 2, msgspec.structs.replace(JOB, ends_at=1.0)) as (leader, other):
        assert leader.scheduler.due() is None
        wait_until(lambda: (leader.scheduler.ends_at or 0.0) > 1.0, LIMIT, "Slurm has answered")
        fake_scontrol.answer(limit_in(70, of=10_000))
        other.signals.received = signal.SIGUSR1
        for node in (other, leader):
            wait_until(lambda node=node: node.look() or node.stopping.request, LIMIT, "it knows")
            first = node.rank.hear()
            assert isinstance(first, Prepare)
            assert first.seconds is not None
            assert 590 < first.seconds <= 600
        assert other.scheduler.ends_at is None, "only the leading agent asks"
        wait_until(lambda: leader.look() or journalled(tmp_path, StopHastened), LIMIT, "it is told to all")
        for node in (leader, other):
            wait_until(
                lambda node=node: node.look() or node.stopping._agreement.hastened, LIMIT, "it knows that too"
            )
            again = node.rank.hear()
            assert isinstance(again, Prepare)
            assert again.seconds is not None
            assert 40 < again.seconds <= 60
    (asked,) = journalled(tmp_path, StopAsked)
    (closer,) = journalled(tmp_path, StopHastened)
    assert asked.seconds == 600.0
    assert 40 < closer.seconds <= 60
    assert "the scheduler ends the job" in closer.why


@pytest.mark.parametrize(
    ("halted", "code"), [(True, ExitCode.STOPPED), (False, ExitCode.STOPPED_UNSAVED)], ids=["saved", "not"]
)
def test_now_costs_nothing_once_the_state_is_saved(tmp_path: Path, halted: bool, code: ExitCode) -> None:
    with nodes(tmp_path, 1) as (node,):
        node.signals.received = signal.SIGTERM
        wait_until(lambda: node.look() or node.stopping.request, LIMIT, "it is asked")
        assert isinstance(node.rank.hear(), Prepare)
        node.rank.say(Promise(7))
        wait_until(lambda: node.look() or node.stopping._told, LIMIT, "the step is named")
        assert node.rank.hear() == StopAt(7)
        if halted:
            node.rank.say(Halted(7))
            wait_until(lambda: node.vigil._context.monitor.stop_words().halted, LIMIT, "it has stopped")
        node.signals.again = signal.SIGTERM
        notice = node.look()
    assert notice is not None
    assert (notice.kind, notice.exit_code) == ("stopped", code)
    assert node.killed
    (forced,) = journalled(tmp_path, StopForced)
    assert ("the state is saved" in forced.why) == halted


def test_a_node_that_is_asked_to_stop_when_all_have_finished_has_finished(tmp_path: Path) -> None:
    with nodes(tmp_path, 2) as (leader, other):
        leader.ended, other.ended = {0: 0}, {1: 0}
        assert other.look() is None
        finished = leader.look()
        assert finished is not None
        assert finished.kind == "finished"
        other.signals.received = signal.SIGTERM
        assert other.look() == finished


def test_a_node_that_is_through_waits_for_the_others_for_as_long_as_they_train(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not for 300 s: how long the others evaluate is their script's affair."""
    with nodes(tmp_path, 2) as (leader, other):
        leader.ended = {0: 0}
        assert leader.look() is None
        later = SimpleNamespace(
            monotonic=lambda: time.monotonic() + 7 * 86_400, time=time.time, sleep=time.sleep
        )
        monkeypatch.setattr(supervision, "time", later)
        assert leader.look() is None
        assert other.look() is None
        other.ended = {1: 0}
        finished = other.look()
        assert finished is not None
        assert finished.kind == "finished"
        assert leader.look() == finished


def said(node: Node, *, step: int, section: str, since: float, limits: Limits | None = None) -> None:
    """The rank of a node says where it is; `since`: seconds ago."""
    number, now = node.attempt.place.group_rank, time.monotonic()
    monitor = node.vigil._context.monitor
    if limits is not None:
        monitor._ranks[number].limits = limits
    node.rank.say(
        State(
            at=now - since,
            step=step,
            trained=step > 0,
            sectioned=True,
            left=now - since,
            sections=[OpenSection(section, now - since)],
            dropped=0,
        )
    )
    wait_until(lambda: monitor.state(number).step == step, LIMIT, "it is heard")


def awake(node: Node) -> None:
    """So that the rank's clocks may have begun before the monitor did."""
    node.vigil._context.monitor._fresh = 0.0


SHORT = Limits(initial=60.0, heartbeat=60.0, out_of_section=60.0, sections={"step": 4.0})


def test_a_rank_that_waits_for_one_of_another_node_is_no_hang_until_that_one_is_late_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first step's grace is the group's, wherever its ranks are: `step:4`, and one still builds."""
    monkeypatch.setattr(rolls, "ASK", 0.0)
    monkeypatch.setattr(rolls, "CALL", 0.0)
    with nodes(tmp_path, 3) as found:
        leader, other, third = found
        for node in found:
            awake(node)
        said(leader, step=1, section="step", since=1.0, limits=SHORT)
        said(other, step=1, section="step", since=7.0, limits=SHORT)
        said(third, step=0, section="step", since=7.0, limits=SHORT)
        for _ in range(10):
            assert [node.look() for node in found] == [None] * 3
        assert leader.attempt.counted("roll/called") >= 3, "the others were asked"
        said(third, step=0, section="step", since=61.0, limits=SHORT)
        for _ in range(10):
            assert [node.look() for node in found] == [None] * 3, "the leader's own rank may be waited for"
        said(leader, step=1, section="step", since=5.0, limits=SHORT)
        notice = wait_until(
            lambda: next((seen for node in found if (seen := node.look()) is not None), None), LIMIT, "a hang"
        )
        assert notice.kind == "hang"
        assert "rank 0 has stood still for" in notice.detail
        assert "in its training step, before its first step" in notice.detail
        assert [node.look() for node in found] == [notice] * 3


def test_an_agent_that_does_not_look_holds_up_no_hang_of_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, seconds in (("ASK", 0.0), ("CALL", 0.0), ("PATIENCE", 0.3)):
        monkeypatch.setattr(rolls, name, seconds)
    for home, silent in (("follows", 0), ("leads", 1)):
        with nodes(tmp_path / home, 2) as found:
            looks = found[1 - silent]
            awake(looks)
            said(looks, step=1, section="step", since=7.0, limits=SHORT)
            assert looks.look() is None
            notice = wait_until(looks.look, LIMIT, "it is judged without the other")
            assert notice.kind == "hang"


def test_a_rank_that_has_ended_without_a_good_bye_does_not_hang(tmp_path: Path) -> None:
    """As after os._exit(0): its siblings may train on, and nothing rules it any more."""
    with nodes(tmp_path, 1) as (node,):
        awake(node)
        said(node, step=3, section="step", since=500.0, limits=SHORT)
        assert node.vigil._context.monitor.overdue() != []
        node.ended = {0: 0}
        notice = node.look()
        assert notice is not None
        assert notice.kind == "finished"


def test_what_a_node_has_got_to_counts_once(tmp_path: Path) -> None:
    """A signal in the middle of recovery: the node had reported, and ends."""
    with nodes(tmp_path, 2) as (leader, other):
        other.attempt.count_in("reported")
        other.attempt.count_in("reported")
        assert leader.attempt.counted("reported") == 1


def test_storage_that_answers_excuses_nobody_however_often_it_is_asked(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Two agents that ask in turn never agreed that a rank hung in a save: every other look excused it."""
    told: list[str] = []
    late = Overdue(rank=1, section="checkpointing", rule="section", limit=20.0, seconds=25.0, step=3)
    doubt = StorageDoubt(lambda: None, 600.0, told.append)
    wait_until(lambda: not doubt(late), LIMIT, "the storage has answered")
    assert not any(doubt(late) for _ in range(200))
    assert told == []

    monkeypatch.setattr(supervision, "STORAGE_PATIENCE", 0.1)
    answers = threading.Event()
    stalled = StorageDoubt(lambda: answers.wait(60), 600.0, told.append)
    assert not stalled(msgspec.structs.replace(late, stopped=True)), "who is stopped waits for nothing"
    assert not stalled(msgspec.structs.replace(late, section="step"))
    wait_until(lambda: stalled(late) and told, LIMIT, "it is told that the storage does not answer")
    assert all(stalled(late) for _ in range(50))
    assert not stalled(msgspec.structs.replace(late, seconds=621.0)), "not for ever"
    answers.set()
    short = msgspec.structs.replace(late, limit=0.2)
    wait_until(lambda: not stalled(short), LIMIT, "the rank has had its limit again")
    assert len(told) == 1
