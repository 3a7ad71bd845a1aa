"""Who trains under which rank after a fault: nobody twice, who stays keeps its rank, and never too few."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.config.sections import InProcessSettings
from holdfast.errors import MEANINGS, ExitCode
from holdfast.policy.budgets import PastAttempt, most_restarts
from holdfast.policy.diagnosis import diagnose
from holdfast.policy.evidence import Fault, FaultKind
from holdfast.policy.recovery import Decision
from holdfast.policy.restarts import (
    STAYS,
    Assignment,
    Shortage,
    after,
    blamed,
    count,
    decide,
    evidence_of,
    failed_iteration,
    limits_of,
    over_the_limit,
    reassign,
)
from holdfast.policy.signs import Action, Cause
from holdfast.restart.conductor import Denied, Granted, Restart
from holdfast.restart.keeper_process import Memory

PAIRS = {member: f"n{member // 2}" for member in range(6)}


def assign(present: set[int], before: list[int], **more: object) -> Assignment | Shortage:
    given = {"wanted": 4, "least": None, "whole_nodes": False, **more}
    return reassign(PAIRS, present, before, **given)  # type: ignore[arg-type]


def test_the_first_ranks_are_the_members_in_order_and_the_rest_waits() -> None:
    assert assign({0, 1, 2, 3, 4, 5}, []) == Assignment(order=[0, 1, 2, 3], reserves=[4, 5])
    assert assign({1, 2, 3, 4, 5}, []) == Assignment(order=[1, 2, 3, 4], reserves=[5])
    assert assign({1, 2, 3, 4, 5}, [], whole_nodes=True) == Assignment(order=[2, 3, 4, 5], reserves=[])


def test_a_reserve_of_the_lost_ones_own_node_comes_first() -> None:
    found = assign({0, 1, 2, 4, 5}, [0, 1, 2, 4])
    assert found == Assignment(order=[0, 1, 2, 4], reserves=[5])
    found = assign({0, 1, 2, 3, 5}, [0, 1, 2, 4])
    assert found == Assignment(order=[0, 1, 2, 5], reserves=[3], promoted=[5])


def test_a_lost_rank_takes_its_node_along_where_nodes_count() -> None:
    found = assign({0, 1, 2, 4, 5}, [0, 1, 2, 3], whole_nodes=True)
    assert found == Assignment(order=[0, 1, 4, 5], reserves=[], promoted=[4, 5])


def test_it_shrinks_only_where_that_is_allowed_and_grows_again_when_it_can() -> None:
    assert assign({0, 1, 3}, [0, 1, 2, 3]) == Shortage(usable=3, needed=4)
    found = assign({0, 1, 3}, [0, 1, 2, 3], least=3)
    assert found == Assignment(order=[0, 1, 3], reserves=[], shrinks=True)
    assert assign({0, 1}, [0, 1, 2, 3], least=3) == Shortage(usable=2, needed=3)
    assert assign({0, 1, 3, 5}, [0, 1, 3], least=3) == Assignment(
        order=[0, 1, 3, 5], reserves=[], promoted=[5]
    )


@st.composite
def worlds(draw: st.DrawFn) -> tuple[dict[int, str], set[int], list[int], int, int | None, bool]:
    members = draw(st.integers(1, 10))
    nodes = {member: f"n{draw(st.integers(0, 3))}" for member in range(members)}
    present = draw(st.sets(st.integers(0, members - 1)))
    wanted = draw(st.integers(1, members))
    before = draw(st.permutations(range(members)))[: draw(st.integers(0, wanted))]
    least = draw(st.none() | st.integers(1, wanted))
    return nodes, present, before, wanted, least, draw(st.booleans())


@given(worlds())
def test_what_is_guaranteed(world: tuple[dict[int, str], set[int], list[int], int, int | None, bool]) -> None:
    nodes, present, before, wanted, least, whole_nodes = world
    found = reassign(nodes, present, before, wanted=wanted, least=least, whole_nodes=whole_nodes)
    broken = {nodes[member] for member in nodes if member not in present} if whole_nodes else set()
    usable = {member for member in present if nodes[member] not in broken}
    if isinstance(found, Shortage):
        assert found.usable == len(usable) < found.needed
        assert found.needed == (wanted if least is None else least)
        return
    everyone = [*found.order, *found.reserves]
    assert len(everyone) == len(set(everyone))  # nobody twice
    assert set(everyone) == usable  # nobody who is not usable, and nobody who is forgotten
    assert len(found.order) == wanted or (found.shrinks and least is not None and len(found.order) >= least)
    assert len(found.order) <= wanted
    assert found.shrinks == (len(found.order) < wanted)
    assert set(found.promoted) == (set(found.order) - set(before) if before else set())
    if not found.shrinks:
        for rank, member in enumerate(before):
            if member in usable:
                assert found.order[rank] == member  # who stays keeps its rank
    else:
        stays = [member for member in before if member in usable]
        assert [member for member in found.order if member in stays] == stays  # and their order


@given(worlds())
def test_a_lost_ones_place_is_taken_from_its_own_node_if_that_has_a_reserve(
    world: tuple[dict[int, str], set[int], list[int], int, int | None, bool],
) -> None:
    nodes, present, before, wanted, least, whole_nodes = world
    found = reassign(nodes, present, before, wanted=wanted, least=least, whole_nodes=whole_nodes)
    if isinstance(found, Shortage) or found.shrinks:
        return
    for rank, lost in enumerate(before):
        if found.order[rank] != lost and nodes[found.order[rank]] != nodes[lost]:
            near = [member for member in found.reserves if nodes[member] == nodes[lost]]
            assert not near, (rank, lost, near)


# --- whether a function may start again ---------------------------------------------------------------------


LOST_PEER = "RuntimeError: Connection closed by peer"


def fault(kind: FaultKind = FaultKind.EXCEPTION, member: int = 0, **more: object) -> Fault:
    given = {"rank": member, "node": "a", "at": 100.0 + member, **more}
    return Fault(member=member, kind=kind, **given)  # type: ignore[arg-type]


def raised(detail: str = "ValueError: no", member: int = 0, **more: object) -> Fault:
    return fault(member=member, detail=detail, error=detail.partition(":")[0], exit_code=1, **more)


def attempt(
    iteration: int, faults: Sequence[Fault], committed: int = 0, order: Sequence[int] = (0, 1)
) -> PastAttempt:
    return failed_iteration(
        iteration,
        faults,
        launch="l",
        order=order,
        nodes=["a"],
        committed=committed,
        seconds=5.0,
        at=1000.0 + iteration,
    )


class Played:
    """A job without launcher, reduced to what the policy sees of it."""

    def __init__(self, max_restarts: int = 3) -> None:
        self.history: list[PastAttempt] = []
        self._max_restarts = max_restarts

    def fail(self, faults: Sequence[Fault], committed: int = 0, order: Sequence[int] = (0, 1)) -> Decision:
        failed = attempt(len(self.history), faults, committed, order)
        decision = decide(self.history, failed, faults, self._max_restarts)
        self.history.append(after(failed, decision))
        return decision


# --- what a fault is as evidence ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("found", "cause"),
    [
        (raised(), Cause.JOB),
        (raised("torch.OutOfMemoryError: CUDA out of memory"), Cause.JOB),
        (raised("RuntimeError: CUDA error: uncorrectable ECC error encountered"), Cause.DEVICE),
        (fault(FaultKind.LOST, exit_code=-9), Cause.INFRASTRUCTURE),
        (fault(FaultKind.LOST, exit_code=-15), Cause.PREEMPTION),
        (fault(FaultKind.LOST), Cause.UNKNOWN),
        (fault(FaultKind.SOFT_TIMEOUT), Cause.HANG),
        (fault(FaultKind.HARD_TIMEOUT), Cause.HANG),
        (fault(FaultKind.LATE, member=-1), Cause.HANG),
        (fault(FaultKind.SILENT), Cause.INFRASTRUCTURE),
        (fault(FaultKind.UNFIT, detail="GPU 1: ECC"), Cause.INFRASTRUCTURE),
        (fault(FaultKind.ASKED, detail="the user said so"), Cause.UNKNOWN),
    ],
)
def test_every_fault_is_evidence_of_something(found: Fault, cause: Cause) -> None:
    assert diagnose(evidence_of([found], 2)).cause is cause


def test_no_kind_of_fault_is_forgotten() -> None:
    for kind in FaultKind:
        found = evidence_of([fault(kind)], 1)
        assert len([*found.ends, *found.hangs, *found.lost]) == 1, kind


def test_who_lost_a_peer_does_not_hide_the_cause() -> None:
    faults = [raised(LOST_PEER, 0, at=99.0), raised("ValueError: no", 1, at=100.0)]
    found = attempt(0, faults)
    assert (found.cause, found.message) == (Cause.JOB, "ValueError: no")


# --- who is to blame ----------------------------------------------------------------------------------------


def test_neither_symptoms_nor_waiting_together_are_counted_against_a_process() -> None:
    assert blamed([raised(member=1), raised(LOST_PEER, 0)]) == {1}
    still = [fault(FaultKind.SOFT_TIMEOUT, one) for one in (0, 1)]
    assert blamed(still[:1]) == {0}
    assert blamed(still) == set()
    assert blamed([*still, raised(member=2)]) == {2}
    assert blamed([fault(FaultKind.LATE, -1)]) == set()


def test_faults_are_counted_over_all_iterations() -> None:
    limits = limits_of(InProcessSettings(max_rank_faults=1), 2)
    counted: Counter[int] = Counter()
    for _ in range(2):
        counted = count(counted, [raised(), raised(LOST_PEER, 1)])
    assert over_the_limit(counted, limits) == [0]
    assert over_the_limit(counted, limits_of(InProcessSettings(), 2)) == []
    none = limits_of(InProcessSettings(max_rank_faults=0), 2)
    assert over_the_limit(count(Counter(), [raised()]), none) == [0]


def test_settings_are_read_for_the_number_of_processes() -> None:
    plain = limits_of(InProcessSettings(), 8)
    assert (plain.wanted, plain.least, plain.whole_nodes) == (8, None, True)
    assert (plain.max_iterations, plain.max_rank_faults) == (None, None)
    chosen = limits_of(
        InProcessSettings(active_world_size=6, min_world_size=4, granularity="rank", max_iterations=3), 8
    )
    assert (chosen.wanted, chosen.least, chosen.whole_nodes, chosen.max_iterations) == (6, 4, False, 3)


# --- how it ends --------------------------------------------------------------------------------------------


def test_an_identical_error_is_not_run_a_third_time() -> None:
    played = Played()
    assert played.fail([raised()]).action is Action.RESTART
    again = played.fail([raised()])
    assert (again.action, again.exit_code) == (Action.STOP, ExitCode.FAILED)
    assert again.reason == "the same error repeated without progress"


def test_progress_gives_the_restarts_back() -> None:
    played = Played(max_restarts=1)
    for number in range(20):
        assert played.fail([fault(FaultKind.LOST, exit_code=-9)], committed=number + 1).action in STAYS
    spent = played.fail([fault(FaultKind.LOST, exit_code=-9)], committed=20)
    assert (spent.action, spent.exit_code) == (Action.STOP, ExitCode.BUDGET_SPENT)


ANY_FAULT = st.builds(
    Fault,
    member=st.integers(-1, 3),
    rank=st.integers(-1, 3),
    node=st.sampled_from(["", "a", "b"]),
    kind=st.sampled_from(FaultKind),
    detail=st.sampled_from(
        ["", "ValueError: no", "KeyError: 'x'", LOST_PEER, "CUDA error: an illegal access"]
    ),
    error=st.sampled_from(["", "ValueError"]),
    exit_code=st.sampled_from([0, 1, 2, 16, 17, 18, 19, 21, 33, -6, -9, -11, -15, 137]),
    at=st.floats(0, 1e9),
    step=st.integers(0, 100),
)


@given(
    iterations=st.lists(
        st.tuples(st.lists(ANY_FAULT, max_size=3), st.booleans(), st.permutations(range(4))),
        min_size=1,
        max_size=6,
    ),
    max_restarts=st.integers(0, 5),
)
def test_any_sequence_of_faults_ends_in_progress_or_in_a_clear_end(
    iterations: list[tuple[list[Fault], bool, list[int]]], max_restarts: int
) -> None:
    """Played over and over; a job that never gets further is called only so often."""
    played = Played(max_restarts)
    committed = without_progress = 0
    most = most_restarts(max_restarts)
    for number in range(most + len(iterations) + 2):
        faults, progress, order = iterations[number % len(iterations)]
        if progress and number < len(iterations):
            committed, without_progress = committed + 1, 0
        decision = played.fail(faults, committed, order[:2])
        if decision.action not in STAYS:
            assert decision.reason
            if decision.action is Action.STOP:
                assert ExitCode(decision.exit_code) in MEANINGS
                assert decision.exit_code != ExitCode.OK
            return
        without_progress += 1
        assert without_progress <= most
    raise AssertionError("it never ended")


# --- the history in memory ----------------------------------------------------------------------------------


def asked(iteration: int, faults: list[Fault], committed: int = 0) -> Restart:
    return Restart(
        iteration=iteration,
        faults=faults,
        order=[0, 1],
        ready=[],
        committed=committed,
        following=[0, 1],
        nodes={0: "a", 1: "a"},
    )


def test_the_history_in_memory_grants_and_denies_by_the_same_policy() -> None:
    memory = Memory(max_restarts=3)
    first = memory.authorise(asked(0, [raised()]))
    assert isinstance(first, Granted)
    assert first.reason
    second = memory.authorise(asked(1, [raised()]))
    assert isinstance(second, Denied)
    assert (second.reason, second.exit_code) == ("the same error repeated without progress", ExitCode.FAILED)
    assert second.decision is not None
    assert "attempt 1 ended with the same error at the same step" in second.decision.evidence
    assert memory.authorise(asked(2, [raised()], committed=5)) != second


def test_what_cannot_be_done_in_these_processes_is_handed_over() -> None:
    memory = Memory(max_restarts=0)
    answer = memory.authorise(asked(0, [fault(FaultKind.SOFT_TIMEOUT)]))
    assert isinstance(answer, Denied)
    assert answer.exit_code == ExitCode.BUDGET_SPENT
