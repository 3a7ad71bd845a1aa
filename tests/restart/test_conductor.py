"""The conductor of an in-process restart: who takes part in each iteration, and when it is over.

Members are played by the test, which writes into a real store what they and their keepers would.
"""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from types import ModuleType

import pytest
from torch.distributed import HashStore, Store

from holdfast.config.sections import InProcessSettings
from holdfast.errors import ConfigError
from holdfast.policy.evidence import Fault, FaultKind
from holdfast.policy.restarts import Assignment, Shortage, reassign
from holdfast.record.group import HostedStore, connect
from holdfast.restart.conductor import Conductor, Denied, Granted, Restart, assigner, sound
from holdfast.restart.messages import (
    LOST,
    End,
    EndKind,
    IterationPlan,
    Over,
    OverKind,
    Ready,
    arrived_key,
    beat_key,
    done_key,
    end_key,
    fault_key,
    gone_key,
    plan_key,
    ready_key,
    text,
)
from kit.harness import wait_until
from kit.keeping import read_end, read_gone, read_next, settings


class Grants:
    """Answers as it is told, and remembers what it was asked."""

    def __init__(self, answer: Granted | Denied | Exception | None = None) -> None:
        self.asked: list[Restart] = []
        self._answer = answer or Granted()

    def __call__(self, asked: Restart) -> Granted | Denied:
        self.asked.append(asked)
        if isinstance(self._answer, Exception):
            raise self._answer
        return self._answer


@contextlib.contextmanager
def conducting(
    members: int,
    store: Store | None = None,
    *,
    authorise: Grants | None = None,
    nodes: Mapping[int, str] | None = None,
    first_barrier: float = 0.0,
    **given: object,
) -> Iterator[tuple[Conductor, Store]]:
    chosen = store if store is not None else HashStore()
    conductor = Conductor(
        chosen,
        nodes or {},
        members,
        settings(**given),
        authorise or Grants(),
        lambda message: None,
        first_barrier=first_barrier,
    )
    try:
        yield conductor, chosen
    finally:
        conductor.close()
        assert conductor.finished


def arrive(store: Store, iteration: int, *members: int, **more: object) -> None:
    for member in members:
        given = {"node": f"node{member // 2}", **more}
        store.set(ready_key(iteration, member), text(Ready(member=member, pid=1, **given)))  # type: ignore[arg-type]
        store.add(arrived_key(iteration), 1)


def raised(store: Store, iteration: int, member: int, rank: int, detail: str = "ValueError: no") -> Fault:
    """A member says that the function raised."""
    fault = Fault(
        member=member,
        rank=rank,
        node=f"node{member // 2}",
        kind=FaultKind.EXCEPTION,
        detail=detail,
        error="ValueError",
        exit_code=1,
        at=time.time(),
    )
    store.compare_set(fault_key(iteration, member), "", text(fault))
    store.compare_set(end_key(iteration), "", text(End(kind=EndKind.FAULT, fault=fault)))
    return fault


def went(store: Store, member: int, kind: FaultKind | None = FaultKind.LOST) -> None:
    """Its keeper says that a member is gone; without a kind: after its farewell."""
    fault = Fault(member=member, kind=kind, at=time.time(), node=f"node{member // 2}") if kind else None
    store.compare_set(gone_key(member), "", text(fault))
    store.add(LOST, 1)


def plan(store: Store, iteration: int) -> IterationPlan:
    found = read_next(store, iteration)
    assert isinstance(found, IterationPlan), found
    return found


def over(store: Store, iteration: int) -> Over:
    found = read_next(store, iteration)
    assert isinstance(found, Over), found
    return found


def test_the_first_iteration_begins_when_all_are_there_and_ends_when_all_have_returned() -> None:
    with conducting(4, active_world_size=3) as (conductor, store):
        arrive(store, 0, 3, 1, 0)
        assert not store.check(["plan/0"])
        arrive(store, 0, 2)
        first = plan(store, 0)
        assert (first.order, first.reserves, first.reason, first.faults) == ([0, 1, 2], [3], "", [])
        store.add(done_key(0), 2)
        assert not store.check([end_key(0)])
        store.add(done_key(0), 1)
        assert read_end(store) == End(kind=EndKind.COMPLETED)
        wait_until(lambda: conductor.finished, 5, "nothing more to conduct")
        assert (conductor.plan, conductor.over, conductor.completed) == (first, None, True)


def test_after_a_fault_a_reserve_takes_the_lost_ones_place() -> None:
    grants = Grants(Granted(launch={"attempt": 2}, reason="once more"))
    with conducting(4, active_world_size=3, authorise=grants) as (_, store):
        arrive(store, 0, 0, 1, 2, 3)
        plan(store, 0)
        went(store, 1)
        end = read_end(store)  # also if its keeper had no time to say that this ends the iteration
        assert end.kind is EndKind.FAULT
        assert end.fault is not None
        assert (end.fault.member, end.fault.rank) == (1, 1)
        symptom = raised(store, 0, 0, 0, "RuntimeError: Connection closed by peer")
        arrive(store, 1, 0, 2, committed=40)
        arrive(store, 1, 3, committed=30)
        second = plan(store, 1)
        assert (second.order, second.reserves, second.reason) == ([0, 3, 2], [], "once more")
        assert second.launch == {"attempt": 2}
        assert [fault.member for fault in second.faults] == [1, 0]
        (asked,) = grants.asked
        assert (asked.iteration, asked.order, asked.following, asked.committed) == (
            0,
            [0, 1, 2],
            [0, 3, 2],
            40,
        )
        assert sorted(one.member for one in asked.ready) == [0, 2, 3]
        assert asked.nodes == {0: "node0", 1: "node0", 2: "node1", 3: "node1"}
        assert asked.faults[1] == symptom


def test_a_lost_rank_takes_its_node_along_where_nodes_count() -> None:
    with conducting(6, active_world_size=4, granularity="node") as (_, store):
        arrive(store, 0, *range(6))
        assert plan(store, 0).reserves == [4, 5]
        went(store, 3)
        arrive(store, 1, 0, 1, 2, 4, 5)
        second = plan(store, 1)
        assert (second.order, second.reserves) == ([0, 1, 4, 5], [])
        raised(store, 1, 0, 0)
        arrive(store, 2, 0, 1, 4, 5)  # whoever was left out is not waited for
        assert plan(store, 2).order == [0, 1, 4, 5]


def test_who_is_late_is_left_out() -> None:
    with conducting(3, active_world_size=2, barrier_timeout=0.5) as (_, store):
        began = time.monotonic()
        arrive(store, 0, 0, 2)
        first = plan(store, 0)
        assert 0.4 < time.monotonic() - began < 3
        assert (first.order, first.reserves) == ([0, 2], [])
        assert [(fault.member, fault.kind) for fault in first.faults] == [(1, FaultKind.LATE)]
        gone = read_gone(store, 1)
        assert gone is not None
        assert gone.detail == "it was not at the barrier of iteration 0 within 0.5 s"


def test_what_a_script_does_before_it_calls_the_function_is_not_counted() -> None:
    """Neither before the first of them calls it, nor, up to the initial limit, before the last one does."""
    with conducting(2, first_barrier=60.0, barrier_timeout=0.3) as (conductor, store):
        for member in (0, 1):
            began = time.monotonic()
            wait_until(lambda began=began: time.monotonic() - began > 0.6, 5, "longer than barrier_timeout")
            assert not store.check([plan_key(0)])
            arrive(store, 0, member)
        assert plan(store, 0).order == [0, 1]
        assert conductor.over is None
        raised(store, 0, 1, 1)
        arrive(store, 1, 0)
        assert isinstance(over(store, 1), Over), "between two iterations barrier_timeout counts"


def test_what_nobody_reads_any_more_is_taken_out_of_the_store() -> None:
    with conducting(2) as (_, store):
        for iteration in range(3):
            arrive(store, iteration, 0, 1)
            plan(store, iteration)
            raised(store, iteration, 0, 0, f"ValueError: {iteration}")
        wait_until(lambda: not store.check([ready_key(0, 1)]), 5, "cleared")
        assert not store.check([fault_key(0, 0)])
        assert store.check([fault_key(2, 0)])


def test_who_died_at_the_barrier_is_not_waited_for() -> None:
    with conducting(3, active_world_size=2) as (_, store):
        arrive(store, 0, 0, 1)
        went(store, 1)
        arrive(store, 0, 2)
        assert plan(store, 0).order == [0, 2]


def test_too_few_that_are_left_is_the_end_unless_fewer_may_do() -> None:
    with conducting(2) as (conductor, store):
        arrive(store, 0, 0, 1)
        plan(store, 0)
        went(store, 0)
        arrive(store, 1, 1)
        end = over(store, 1)
        assert (end.kind, end.exit_code) == (OverKind.HANDED_OVER, 33)
        assert end.reason == "1 ranks are left that can train, and 2 are needed"
        assert [one.member for one in end.faults] == [0]
        wait_until(lambda: conductor.finished, 5, "nothing more to conduct")
        assert conductor.over == end
        assert not conductor.completed
    with conducting(2, min_world_size=1) as (_, store):
        arrive(store, 0, 0, 1)
        plan(store, 0)
        went(store, 0)
        arrive(store, 1, 1)
        assert plan(store, 1).order == [1]


@pytest.mark.parametrize(
    ("answer", "code", "reason"),
    [
        (Denied(reason="enough"), 33, "enough"),
        (Denied(reason="enough", exit_code=22), 22, "enough"),
        (OSError("no disk"), 33, "whether to go on could not be decided: OSError('no disk')"),
    ],
)
def test_what_is_not_granted_is_over(answer: Denied | Exception, code: int, reason: str) -> None:
    with conducting(1, authorise=Grants(answer)) as (_, store):
        arrive(store, 0, 0)
        plan(store, 0)
        raised(store, 0, 0, 0)
        arrive(store, 1, 0)
        end = over(store, 1)
        assert (end.kind, end.exit_code, end.reason) == (OverKind.HANDED_OVER, code, reason)
        assert [fault.detail for fault in end.faults] == ["ValueError: no"]


def test_a_signal_to_stop_is_the_end() -> None:
    grants = Grants()
    with conducting(2, authorise=grants) as (_, store):
        arrive(store, 0, 0, 1)
        plan(store, 0)
        raised(store, 0, 0, 0)
        arrive(store, 1, 0)
        arrive(store, 1, 1, stop="SIGTERM")
        end = over(store, 1)
        assert (end.kind, end.exit_code, end.reason) == (OverKind.STOPPED, 31, "SIGTERM came")
        assert not grants.asked


def test_an_unfit_member_is_left_out() -> None:
    with conducting(3, active_world_size=2) as (_, store):
        arrive(store, 0, 0, 1, 2)
        plan(store, 0)
        raised(store, 0, 1, 1)
        arrive(store, 1, 0, 2)
        arrive(store, 1, 1, unfit="GPU 1: ECC")
        second = plan(store, 1)
        assert (second.order, second.reserves) == ([0, 2], [])
        gone = read_gone(store, 1)
        assert gone is not None
        assert (gone.kind, gone.detail) == (FaultKind.UNFIT, "GPU 1: ECC")


def test_calls_and_faults_are_limited_where_that_is_set() -> None:
    with conducting(2, max_iterations=2) as (_, store):
        for iteration in range(2):
            arrive(store, iteration, 0, 1)
            plan(store, iteration)
            raised(store, iteration, 0, 0)
        arrive(store, 2, 0, 1)
        assert over(store, 2).reason == "the function was called 2 times, as often as max_iterations allows"
    with conducting(2, max_rank_faults=1, min_world_size=1) as (_, store):
        for iteration in range(2):
            arrive(store, iteration, 0, 1)
            assert plan(store, iteration).order == [0, 1]
            raised(store, iteration, 0, 0)
        arrive(store, 2, 0, 1)
        assert plan(store, 2).order == [1]


def test_those_who_do_not_return_after_the_first_make_all_restart() -> None:
    with conducting(2, completion_timeout=0.3) as (_, store):
        arrive(store, 0, 0, 1)
        plan(store, 0)
        store.add(done_key(0), 1)
        end = read_end(store)
        assert end.fault is not None
        assert end.fault.describe() == "late: 1 of 2 ranks had returned 0.3 s after the first"
        arrive(store, 1, 0, 1)
        assert [fault.kind for fault in plan(store, 1).faults] == [FaultKind.LATE]


def test_who_has_returned_waits_for_as_long_as_the_others_train() -> None:
    """No limit by default, as between nodes: a rank that evaluates for an hour is no fault."""
    assert InProcessSettings().completion_timeout == 0
    with conducting(2, completion_timeout=0.0) as (_, store):
        arrive(store, 0, 0, 1)
        plan(store, 0)
        store.add(done_key(0), 1)
        began = time.monotonic()
        while time.monotonic() - began < 0.3:
            assert not store.check([end_key(0)])
            time.sleep(0.01)
        store.add(done_key(0), 1)
        assert read_end(store).kind is EndKind.COMPLETED


def test_a_node_whose_keeper_is_silent_is_lost() -> None:
    with conducting(4, active_world_size=2, heartbeat_timeout=0.6) as (_, store):
        arrive(store, 0, 0, 1, 2, 3)
        plan(store, 0)

        def ended() -> bool:
            store.add(beat_key("node1"), 1)
            return store.check([end_key(0)])

        began = time.monotonic()
        wait_until(ended, 10, "the silence is noticed")
        assert time.monotonic() - began > 0.4
        gone = read_gone(store, 0)
        assert gone is not None
        assert (gone.kind, gone.detail) == (
            FaultKind.SILENT,
            "the keeper of node0 gave no sign of life for 0.6 s",
        )
        assert read_gone(store, 1) is not None
        arrive(store, 1, 2, 3)
        second = plan(store, 1)
        assert second.order == [2, 3]


def test_a_node_that_others_found_to_be_lost_is_given_up_at_once() -> None:
    with conducting(4, active_world_size=2) as (conductor, store):
        arrive(store, 0, 0, 1, 2, 3)
        plan(store, 0)
        conductor.lose("node0", "its connection closed")
        assert read_end(store).kind is EndKind.FAULT
        arrive(store, 1, 2, 3)
        second = plan(store, 1)
        assert second.order == [2, 3]
        assert {fault.detail for fault in second.faults} == {"its connection closed"}


def test_what_befalls_a_reserve_is_remembered_but_ends_nothing() -> None:
    with conducting(3, active_world_size=2) as (_, store):
        arrive(store, 0, 0, 1, 2)
        plan(store, 0)
        went(store, 2)
        store.add(done_key(0), 2)
        assert read_end(store).kind is EndKind.COMPLETED


def test_when_everybody_has_left_there_is_nothing_to_conduct() -> None:
    with conducting(2) as (conductor, store):
        arrive(store, 0, 0, 1)
        plan(store, 0)
        went(store, 0, None)
        went(store, 1, None)
        wait_until(lambda: conductor.finished, 5, "nothing more to conduct")
        assert not store.check([end_key(0)])
        assert not conductor.completed


def test_a_lost_store_ends_the_conductor() -> None:
    hosted = HostedStore("127.0.0.1")
    with conducting(2, connect("127.0.0.1", hosted.port)) as (conductor, _):
        hosted.close()
        wait_until(lambda: conductor.finished, 10, "it ends")
        assert conductor.over is not None
        assert conductor.over.reason.startswith("the store was lost: ")


# --- who is who by a function of the user's ----------------------------------------------------------------


def backwards(
    nodes: Mapping[int, str], present: AbstractSet[int], before: Sequence[int], **limits: object
) -> Assignment:
    del nodes, before, limits
    return Assignment(order=sorted(present, reverse=True), reserves=[])


def twice(nodes: Mapping[int, str], present: AbstractSet[int], *more: object, **limits: object) -> Assignment:
    del nodes, more, limits
    return Assignment(order=[min(present)] * 2, reserves=[])


@pytest.fixture
def mine(monkeypatch: pytest.MonkeyPatch) -> str:
    module = ModuleType("places_of_mine")
    module.backwards, module.twice, module.number = backwards, twice, 3  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, module.__name__, module)
    return module.__name__


def test_without_a_name_it_is_our_own() -> None:
    assert assigner("") is reassign


def test_a_function_of_the_users_says_who_is_who(mine: str) -> None:
    with conducting(3, assign=f"{mine}:backwards") as (_, store):
        arrive(store, 0, 0, 1, 2)
        assert plan(store, 0).order == [2, 1, 0]


def test_an_answer_that_cannot_be_is_the_end_with_its_reason(mine: str) -> None:
    with conducting(2, assign=f"{mine}:twice") as (_, store):
        arrive(store, 0, 0, 1)
        end = over(store, 0)
        assert end.kind is OverKind.HANDED_OVER
        assert "[0, 0]" in end.reason
        assert "each may be named once" in end.reason


@pytest.mark.parametrize("name", ["no_such_module:f", "{mine}:no_such", "{mine}", "{mine}:number", ":"])
def test_what_cannot_be_found_is_refused_at_the_start(mine: str, name: str) -> None:
    with pytest.raises(ConfigError, match=r"inprocess\.assign"):
        assigner(name.format(mine=mine))


@pytest.mark.parametrize(
    "answer",
    [
        Assignment(order=[], reserves=[0]),
        Assignment(order=[0], reserves=[0]),
        Assignment(order=[5], reserves=[]),
        None,
    ],
)
def test_only_members_that_are_there_once_each(answer: Assignment) -> None:
    with pytest.raises(ValueError, match=r"inprocess\.assign"):
        sound(answer, {0, 1})


def test_a_shortage_is_an_answer() -> None:
    found = Shortage(usable=0, needed=2)
    assert sound(found, set()) is found
