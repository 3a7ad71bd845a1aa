"""What an agent makes of in-process restarts: whose end counts, and which attempt it is in.

With a real store and keeper; plans are written by hand, so that every moment between two can be looked at.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from torch.distributed import PrefixStore, TCPStore

from holdfast.config.sections import InProcessSettings
from holdfast.config.settings import Settings
from holdfast.errors import ExitCode
from holdfast.journal import events
from holdfast.journal.reader import read_journal
from holdfast.launch import in_place
from holdfast.launch.in_place import Desk, InProcess
from holdfast.launch.monitor import Learner, Monitor
from holdfast.launch.nodes.attempt import Attempt, AttemptAnnouncement, RoundPlace
from holdfast.launch.workers.orphans import Workers
from holdfast.policy.evidence import Fault, FaultKind
from holdfast.policy.timeouts import Limits
from holdfast.record.attempts import FailureRecord
from holdfast.record.directory import ControlDirectory
from holdfast.record.secret import SealedStore, run_secret
from holdfast.restart.conductor import Denied, Granted, Restart
from holdfast.restart.messages import PREFIX, End, EndKind, IterationPlan, Over, OverKind, end_key, plan_key
from holdfast.restart.records import as_evidence
from kit.harness import wait_until

KILLED, RAISED = -9, 1


class Node:
    """A node that follows, with members 2 and 3 of 4; 3 and 1 train."""

    def __init__(self, place: Path, store: TCPStore, settings: InProcessSettings) -> None:
        self.control, _ = ControlDirectory.open_or_create(place / "run")
        told = AttemptAnnouncement(
            run=self.control.run_id, attempt=4, epoch=7, master_addr="127.0.0.1", master_port=store.port
        )
        at = RoundPlace(node="b", group_rank=1, nodes=2, world_size=2)
        sealed = SealedStore(store, run_secret(self.control), self.control.run_id, "round")
        self.attempt = Attempt(self.control, at, "launch", told, sealed)
        self.monitor = Monitor(place / "monitor", Limits())
        learner = Learner(self.control, lambda text: None)
        learner.begin("b", 4)
        context: Any = SimpleNamespace(
            settings=Settings(inprocess=settings), monitor=self.monitor, learner=learner
        )
        self._words = PrefixStore(PREFIX, store)
        self.kept = InProcess(self.attempt, context, [2, 3], [], 4)
        self.begun: list[int] = []
        self.kept.started(Workers({2: 1002, 3: 1003}), lambda: self.begun.append(self.attempt.number))

    def say(self, key: str, word: msgspec.Struct) -> None:
        self._words.set(key, msgspec.json.encode(word).decode())
        self.kept.look()

    def plan(self, number: int, order: list[int], reserves: list[int], **launch: object) -> None:
        self.say(
            plan_key(number), IterationPlan(iteration=number, order=order, reserves=reserves, launch=launch)
        )

    def close(self) -> None:
        self.kept.close()
        self.monitor.close()
        self.attempt.close()


@pytest.fixture
def node(tmp_path: Path) -> Iterator[Node]:
    limit = timedelta(seconds=30)
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=limit)
    made = Node(tmp_path, store, InProcessSettings(enabled=True))
    yield made
    made.close()


@pytest.mark.parametrize("garbage", [b"garbage", b"\xff\xfe", b'"\xff"', b"[" * 5000, b"{}"])
def test_what_somebody_else_wrote_in_place_of_a_plan_is_ignored_and_told_once(
    node: Node, garbage: bytes, capsys: pytest.CaptureFixture[str]
) -> None:
    node._words.set(plan_key(0), garbage)
    for _ in range(2):
        node.kept.look()
    assert node.kept.plan is None
    assert capsys.readouterr().err.count("is ignored") == 1
    node.plan(0, [3, 1], [2])
    assert node.kept.plan is not None


def test_before_the_first_plan_every_end_counts_as_without(node: Node) -> None:
    node.kept.look()
    assert node.kept.counted({2: RAISED}) == {2: RAISED}
    assert not node.kept.between


def test_an_end_is_pending_while_a_restart_is_open_and_bounded(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    node.plan(0, [3, 1], [2, 0])
    assert node.kept.ranks() == {3: 0}
    assert node.kept.counted({3: KILLED}) == {}
    assert node.kept.between
    monkeypatch.setattr(in_place, "SLACK", -120.0)  # barrier_timeout is over
    assert node.kept.counted({3: KILLED}) == {3: KILLED}
    assert not node.kept.between


def test_who_is_left_out_is_no_longer_awaited(node: Node) -> None:
    node.plan(0, [3, 1], [2, 0])
    node.say(end_key(0), End(kind=EndKind.FAULT))
    assert node.kept.between
    node.plan(1, [2, 1], [0], attempt=5, epoch=8)
    assert not node.kept.between
    assert node.kept.counted({3: KILLED}) == {3: 0}
    assert node.kept.counted({}) == {3: 0}, "also while it has not ended yet"
    assert node.kept.explains(3, KILLED)
    assert not node.kept.explains(2, KILLED)
    assert node.kept.ranks() == {2: 0}


def test_the_end_of_a_reserve_is_no_failure(node: Node) -> None:
    node.plan(0, [3, 1], [2, 0])
    assert node.kept.counted({2: KILLED}) == {2: 0}
    assert not node.kept.between


@pytest.mark.parametrize("code", [RAISED, KILLED])
def test_what_comes_after_the_function_counts_at_once(node: Node, code: int) -> None:
    node.plan(0, [3, 1], [2, 0])
    node.say(end_key(0), End(kind=EndKind.COMPLETED))
    assert node.kept.counted({3: code}) == {3: code}


def test_a_stop_in_the_function_counts_at_once(node: Node) -> None:
    node.plan(0, [3, 1], [2, 0])
    assert node.kept.counted({3: int(ExitCode.STOPPED)}) == {3: int(ExitCode.STOPPED)}


def test_when_it_is_over_the_ends_count_once_all_have_ended(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    code = int(ExitCode.HANDED_OVER)
    node.plan(0, [3, 2], [1, 0])
    lost = Fault(member=3, rank=0, kind=FaultKind.LOST, exit_code=KILLED)
    node.say(plan_key(1), Over(kind=OverKind.HANDED_OVER, reason="too few", exit_code=code, faults=[lost]))
    assert node.kept.counted({3: KILLED}) == {}
    assert node.kept.counted({2: code, 3: KILLED}) == {2: code, 3: KILLED}
    assert node.kept.explains(2, code)
    assert node.kept.explains(3, KILLED)
    assert not node.kept.explains(2, RAISED)
    monkeypatch.setattr(in_place, "PARTING", 0.0)
    assert node.kept.counted({3: KILLED}) == {3: KILLED}, "one that does not end is not waited for for ever"


def test_a_lost_member_does_not_turn_a_stop_into_a_failure(node: Node) -> None:
    code = int(ExitCode.STOPPED)
    node.plan(0, [3, 2], [1, 0])
    faults = [Fault(member=one, kind=FaultKind.LOST) for one in (2, 3)]
    node.say(plan_key(1), Over(kind=OverKind.STOPPED, reason="asked", exit_code=code, faults=faults))
    assert node.kept.counted({2: code, 3: KILLED}) == {2: code, 3: 0}


def test_a_follower_goes_on_as_the_attempt_that_the_plan_names(node: Node) -> None:
    node.plan(0, [3, 1], [2, 0])
    assert (node.attempt.number, node.begun) == (4, [])
    node.plan(1, [3, 2, 1], [], attempt=5, epoch=8, orders={"avoid": ["step_00000003-aa"]})
    attempt = node.attempt
    assert (attempt.number, attempt.fence.epoch, attempt.place.world_size) == (5, 8, 3)
    assert attempt.told.orders.avoid == ["step_00000003-aa"]
    assert node.begun == [5]
    attempt.journal.close()
    (line,) = read_journal(node.control.journal)
    assert line.attempt == 5
    assert line.body == events.WorkersStarted(node="b", pids={0: 1003, 1: 1002}, kept=True)


def test_the_conductors_question_is_answered_in_the_agents_thread_or_denied() -> None:
    desk, question = Desk(), Restart(iteration=0, faults=[], order=[], ready=[], committed=0, following=[])
    got: list[Granted | Denied] = []

    def ask() -> threading.Thread:
        thread = threading.Thread(target=lambda: got.append(desk.ask(question, 20.0)))
        thread.start()
        return thread

    asking = ask()
    assert desk.woken.wait(10.0)
    assert desk.take() == question
    desk.answer(Granted(reason="go on"))
    asking.join(10.0)
    assert got == [Granted(reason="go on")]
    assert desk.take() is None
    assert isinstance(desk.ask(question, 0.0), Denied), "nobody took it up"
    asking = ask()
    wait_until(desk.take, 10.0, "the question is taken up")
    asking.join(0.2)
    assert asking.is_alive(), "it waits for the answer"
    desk.close()
    asking.join(10.0)
    assert isinstance(got[-1], Denied), "who took it up has left"


def test_faults_are_the_evidence_that_ends_of_workers_are() -> None:
    seen = FailureRecord(rank=1, node="a", pid=11, exit_code=KILLED, at=2.0, message="killed by the kernel")
    found = as_evidence(
        3,
        [
            Fault(member=1, rank=0, node="a", kind=FaultKind.LOST, exit_code=KILLED, detail="died", at=2.0),
            Fault(member=2, rank=1, node="a", kind=FaultKind.EXCEPTION, detail="ValueError: x", exit_code=1),
            Fault(member=3, rank=2, node="b", kind=FaultKind.HARD_TIMEOUT, detail="stood still"),
            Fault(member=4, rank=3, node="c", kind=FaultKind.SILENT, detail="unheard"),
            Fault(member=5, rank=4, node="c", kind=FaultKind.SILENT, detail="unheard"),
        ],
        world_size=5,
        pids={1: 11, 2: 12},
        devices={3: "gpu1"},
        ends={1: seen},
    )
    assert [(one.rank, one.pid, one.exit_code, one.message) for one in found.ended] == [
        (0, 11, KILLED, "killed by the kernel")
    ]
    assert [(one.rank, one.pid, one.message) for one in found.raised] == [(1, 12, "ValueError: x")]
    assert [(one.rank, one.device) for one in found.hangs] == [(2, "gpu1")]
    assert [one.node for one in found.lost] == ["c"], "a node is lost once"
