"""Recovery always ends: the policies played against any sequence of faults, without processes.

The driver is a launcher reduced to what the policies see of one: it starts attempts as it is told, lets each
end with the next fault, and keeps the history that a control directory would.
"""

from __future__ import annotations

from itertools import repeat

import msgspec
from hypothesis import example, given, settings
from hypothesis import strategies as st

from holdfast.errors import ExitCode
from holdfast.policy.budgets import (
    BUDGETS,
    MAX_REQUEUES,
    MOST_IDENTICAL,
    PastAttempt,
    launch_refused,
)
from holdfast.policy.placement import (
    arrange,
    layout,
)
from holdfast.policy.results import Findings
from holdfast.policy.signs import Action, Cause
from kit.worlds.recovery_worlds import ENOUGH, Driver, Fault, calm, drivers, faults, launch_again_and_again


@settings(deadline=None)
@given(drivers, st.lists(faults, min_size=1, max_size=60))
def test_any_sequence_of_faults_keeps_every_promise(driver: Driver, sequence: list[Fault]) -> None:
    driver.play(sequence)


@settings(deadline=None)
@given(drivers, st.lists(faults, min_size=1, max_size=5))
@example(
    driver=Driver(max_restarts=10**6, can_requeue=True, min_nodes=2, nodes=["a", "b"]),
    pattern=[Fault(culprit=1, leaves=True, arrives=True, message="x", cause=Cause.PREEMPTION)],
)
def test_without_progress_every_pattern_of_faults_ends_within_the_stated_bound(
    driver: Driver, pattern: list[Fault]
) -> None:
    decision = driver.play(calm(fault) for again in repeat(pattern) for fault in again)
    assert decision is not None
    assert decision.action is Action.STOP
    launches = 1 + MAX_REQUEUES
    assert len(driver.history) <= launches + driver.most_restarts


@settings(deadline=None)
@given(
    drivers,
    st.lists(faults, min_size=1, max_size=5),
    st.sampled_from(["same", "reset", "edited"]),
)
@example(driver=Driver(max_restarts=3), pattern=[Fault(launcher_dies=True)], how="same")
def test_launches_that_nobody_watches_end_and_whoever_fixed_something_is_let_in(
    driver: Driver, pattern: list[Fault], how: str
) -> None:
    launch_again_and_again(driver, pattern, how)


@settings(deadline=None)
@given(drivers, st.lists(faults, min_size=1, max_size=30))
def test_launches_that_get_on_are_never_refused(driver: Driver, sequence: list[Fault]) -> None:
    for fault in sequence:
        assert not launch_refused(driver.history, driver.started_with)
        driver.play_launch(iter([Fault(**{**fault.__dict__, "rise": 1, "launcher_dies": False})]))


@settings(deadline=None)
@given(drivers, faults)
def test_one_repeating_fault_is_met_in_the_same_setting_only_a_few_times(
    driver: Driver, fault: Fault
) -> None:
    """`max_restarts=100` must not mean 100 identical cycles."""
    driver.max_restarts, driver.restarts_chosen = 100, False
    decision = driver.play(repeat(calm(fault)))
    assert decision is not None
    most = max(driver.cycles().values())
    launches = 1 + sum(past.action == "requeue" for past in driver.history)
    if fault.cause is Cause.PREEMPTION and fault.exit_code != ExitCode.RERUN_WANTED:
        assert most <= launches + BUDGETS[Cause.PREEMPTION].restarts
    else:
        assert most <= MOST_IDENTICAL + launches - 1, (
            "each launch by the scheduler has one attempt of its own"
        )


@settings(deadline=None)
@given(drivers, faults, st.text(min_size=1, max_size=20))
def test_whatever_fails_during_a_stop_nothing_is_started_again(
    driver: Driver, fault: Fault, why: str
) -> None:
    driver.stopping = why
    decision = driver.settle(driver.attempt(1, fault), fault)
    assert decision.action is Action.STOP
    assert decision.exit_code == ExitCode.STOPPED_UNSAVED
    assert not decision.exclude


records = st.builds(
    PastAttempt,
    number=st.integers(1, 50),
    launch=st.sampled_from(["1", "2"]),
    outcome=st.sampled_from(["failed", "failed", "lost", "stopped", "finished"]),
    cause=st.sampled_from(["", *Cause]),
    exit_code=st.sampled_from([-9, 0, 1, 16, 17]),
    message=st.sampled_from(["", "ValueError: x"]),
    highest_step=st.integers(0, 3),
    culprit_node=st.sampled_from(["", "a", "b"]),
    at=st.sampled_from([0.0, 1e9]),
    nodes=st.sampled_from([[], ["a"], ["a", "b"]]),
    rotation=st.integers(-3, 9),
    rung=st.sampled_from(["", "step_10"]),
    action=st.sampled_from(["", "wait", "other", *Action]),
    decided=st.sampled_from([Findings(), Findings(avoid=["step_10"])]),
)


@settings(deadline=None)
@given(drivers, st.lists(records, max_size=30, unique_by=lambda r: r.number), faults)
def test_from_any_state_whatever_one_reads_a_repeating_fault_ends(
    driver: Driver, state: list[PastAttempt], fault: Fault
) -> None:
    """Also from records that no launcher of this release would write."""
    driver.can_requeue = False
    history = list(state)
    went_on = 0
    for number in range(51, 51 + ENOUGH):
        attempt = driver.attempt(number, calm(fault))
        driver.history = history
        decision = driver.settle(attempt, fault)
        history.append(
            msgspec.structs.replace(attempt, action=str(decision.action), decided=decision.findings())
        )
        if not decision.action.goes_on:
            break
        driver.excluded.extend(decision.exclude)
        driver.group, driver.rotation, driver.avoid = decision.nodes, decision.rotate_by, decision.avoid
        went_on += 1
    assert decision.action is Action.STOP
    # What is in the state may raise the highest step late, but only once: at its first attempt here.
    assert went_on <= 1 + driver.most_restarts


# -- faults that stay with something are got rid of --------------------------------------------------------


def test_a_fault_that_stays_with_a_node_ends_when_the_node_is_replaced() -> None:
    driver = Driver(max_restarts=100, nodes=["a", "b"], spares=["c"], min_nodes=2)
    driver.play([Fault(culprit=1, exit_code=-9)] * 2)
    assert driver.group == ["a", "c"]
    assert [(e.node, e.device) for e in driver.excluded] == [("b", None)]


def test_a_fault_that_stays_with_a_device_ends_when_no_rank_runs_on_it() -> None:
    """The device is met under whatever rank runs on it; after the second time it is known."""
    driver = Driver(max_restarts=100, devices=3, workers=2)
    bad, met = "1", 0
    for _ in range(10):
        placed = arrange(layout(driver.cluster(), driver.group), driver.rotation)[0]
        if bad not in placed.devices[:2]:
            break
        met += 1
        attempt = driver.attempt(met, Fault(cause=Cause.DEVICE, exit_code=16, culprit=0, device=1))
        decision = driver.settle(attempt, Fault())
        driver.history.append(msgspec.structs.replace(attempt, action=str(decision.action)))
        driver.excluded.extend(decision.exclude)
        driver.rotation = decision.rotate_by
    assert met <= 2
    assert bad not in arrange(layout(driver.cluster(), driver.group), driver.rotation)[0].devices[:2]


def test_a_fault_that_stays_with_a_checkpoint_ends_on_a_lower_rung() -> None:
    """Scenario 2: the newest is bad; no second identical cycle after it is known."""
    driver = Driver(max_restarts=100, rungs=[120, 100, 80])
    nan = Fault(cause=Cause.JOB, message="FloatingPointError: the loss is nan", steps=3)
    driver.play([nan, nan])
    assert driver.rung == "step_100"
    assert [decision.action for decision in driver.decisions] == [Action.RESTART, Action.LOWER_RUNG]


def test_progress_pays_back_and_a_run_that_makes_it_is_never_stopped() -> None:
    driver = Driver(max_restarts=1, nodes=["a", "b"], min_nodes=2)
    assert driver.play([Fault(exit_code=-9, rise=1)] * 200) is None
    assert all(decision.restarts_left == 0 for decision in driver.decisions)
