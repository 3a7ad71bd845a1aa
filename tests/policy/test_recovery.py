"""What is decided after a failure, rule by rule. That it always ends is in test_recovery_ends.py."""

from __future__ import annotations

import subprocess
import sys

import msgspec
import pytest

from holdfast.errors import ExitCode
from holdfast.policy.budgets import BUDGETS, MAX_REQUEUES, RERUNS, PastAttempt
from holdfast.policy.diagnosis import diagnose
from holdfast.policy.evidence import DeviceError, Evidence, Raised, WorkerEnd
from holdfast.policy.placement import (
    MAX_LOWER_RUNGS,
    MAX_ROTATIONS,
    NEAR_RESUME,
    Cluster,
    Exclusion,
    cycle,
    signature,
)
from holdfast.policy.recovery import AT_IMPORT, CAPACITY_WAIT, INCURABLE, Decision, Situation, recover
from holdfast.policy.results import Findings
from holdfast.policy.signs import Action, Cause

GLOO = "RuntimeError: [gloo/transport/tcp/pair.cc:553] Connection closed by peer [127.0.0.1]:14766."
PAIR = Cluster(nodes=["a", "b"], devices={"a": ["0", "1"], "b": ["0", "1"]}, workers_per_node=2, min_nodes=2)


def failed(number: int = 1, cause: Cause = Cause.INFRASTRUCTURE, **more: object) -> PastAttempt:
    return PastAttempt(
        number=number,
        launch="l",
        outcome="failed",
        cause=cause,
        **{"exit_code": 1, "nodes": ["a", "b"], **more},  # type: ignore[arg-type]
    )


def decide(*attempts: PastAttempt, max_restarts: int = 100, **more: object) -> Decision:
    """About the last one."""
    situation = Situation(
        attempt=attempts[-1],
        max_restarts=max_restarts,
        facts=["seen"],
        **more,  # type: ignore[arg-type]
    )
    return recover(list(attempts[:-1]), situation)


def again(attempt: PastAttempt, **more: object) -> PastAttempt:
    """The next attempt, which ended the same way unless told otherwise."""
    return msgspec.structs.replace(attempt, **{"number": attempt.number + 1, **more})


def stopped(decision: Decision) -> int:
    assert decision.action is Action.STOP, decision
    assert decision.exit_code != 0
    return decision.exit_code


# -- what stops at once ----------------------------------------------------------------------------------


@pytest.mark.parametrize("code", sorted(INCURABLE))
def test_what_a_restart_cannot_cure_stops_at_once_with_its_own_code(code: int) -> None:
    """Scenario 13."""
    assert stopped(decide(failed(exit_code=code), cluster=PAIR)) == code


def test_a_spent_budget_stops_with_its_code_and_says_why() -> None:
    decision = decide(failed(1), failed(2, message="x"), failed(3), max_restarts=2)
    assert stopped(decision) == ExitCode.BUDGET_SPENT
    assert "seen" in decision.evidence
    assert any("saved" in line for line in decision.evidence)


def test_no_restart_means_none_also_for_preemption() -> None:
    assert stopped(decide(failed(cause=Cause.PREEMPTION), max_restarts=0)) == ExitCode.BUDGET_SPENT


@pytest.mark.parametrize(
    "code", [2, ExitCode.RERUN_WANTED, ExitCode.SAVE_FAILED, ExitCode.DECISION_TIMEOUT, -9]
)
def test_what_may_pass_is_restarted(code: int) -> None:
    """Scenario 13."""
    decision = decide(failed(exit_code=code), max_restarts=3)
    assert (decision.action, decision.restarts_left) == (Action.RESTART, 2)


def test_storage_that_failed_is_given_time_and_blames_nobody() -> None:
    """Queued again where that can be; else restarted a stated number of times; then a stop of its own."""
    code = ExitCode.STORAGE_FAILED
    first = failed(
        exit_code=code, message="SaveStorageError: No space left on device", rung="step_00000010-a"
    )
    queued = decide(first, can_requeue=True, lower_rungs=3, cluster=PAIR)
    assert (queued.action, queued.exit_code) == (Action.REQUEUE, code)
    attempts = [first]
    while (decision := decide(*attempts, lower_rungs=3, cluster=PAIR)).action is Action.RESTART:
        assert (decision.exclude, decision.avoid, decision.rotate_by) == ([], [], 0)
        attempts.append(again(attempts[-1]))
        assert len(attempts) < 20, "for ever"
    assert stopped(decision) == code
    assert len(attempts) == 1 + BUDGETS[Cause.INFRASTRUCTURE].repeats
    assert (decision.exclude, decision.avoid, decision.suspect) == ([], [], [])
    assert stopped(decide(first, max_restarts=0)) == code


def test_the_same_job_error_twice_stops_before_the_budget_is_burnt() -> None:
    """Scenario 13."""
    first = failed(cause=Cause.JOB, message="ValueError: <obj at 0x7f01>")
    same = again(first, message="ValueError: <obj at 0x7f99>")
    assert stopped(decide(first, same)) == ExitCode.FAILED
    other = failed(2, message=GLOO)
    assert stopped(decide(first, other, again(same))) == ExitCode.FAILED, "whatever came between"
    # Any difference is a reason to try: another message, another step, no message, another cause.
    assert decide(first, again(same, message="KeyError: 1")).action is Action.RESTART
    assert decide(first, again(same, highest_step=10)).action is Action.RESTART
    assert decide(failed(cause=Cause.JOB), failed(2, cause=Cause.JOB)).action is Action.RESTART
    assert decide(failed(message=GLOO), failed(2, message=GLOO)).action is Action.RESTART


def test_a_script_that_fails_at_import_is_not_started_again() -> None:
    early = failed(cause=Cause.JOB, message="ModuleNotFoundError: x", alike=True, began=False, seconds=2.0)
    assert stopped(decide(early)) == ExitCode.FAILED
    for otherwise in (
        {"began": True},
        {"alike": False},
        {"seconds": AT_IMPORT + 1},
        {"cause": Cause.INFRASTRUCTURE},
        {"highest_step": 1},
    ):
        assert decide(msgspec.structs.replace(early, **otherwise)).action is Action.RESTART, otherwise
    strange = msgspec.structs.replace(early, cause=Cause.UNKNOWN, message="RuntimeError: Dataset not found")
    assert stopped(decide(strange)) == ExitCode.FAILED, "all ranks say so, so it is the script's"
    for otherwise in ({"alike": False}, {"message": ""}, {"message": "CUDA error: an illegal memory access"}):
        assert decide(msgspec.structs.replace(strange, **otherwise)).action is Action.RESTART, otherwise


def test_a_script_without_a_run_is_restarted_as_often_as_somebody_said() -> None:
    """As under torchrun: its progress is not known, so that nothing can be said to repeat itself."""
    first = failed(cause=Cause.JOB, message="ValueError: x", alike=True, began=False, seconds=2.0)
    assert stopped(decide(first, max_restarts=5)) == ExitCode.FAILED, "the default is no promise"
    attempts = [first]
    for left in (4, 3, 2, 1, 0):
        decision = decide(*attempts, max_restarts=5, restarts_chosen=True)
        assert (decision.action, decision.restarts_left) == (Action.RESTART, left)
        attempts.append(again(attempts[-1]))
    assert stopped(decide(*attempts, max_restarts=5, restarts_chosen=True)) == ExitCode.FAILED
    anew = decide(*attempts, again(first, number=7, launch="another"), max_restarts=5, restarts_chosen=True)
    assert (anew.action, anew.restarts_left) == (Action.RESTART, 4), "each launch has as many"
    for otherwise in (
        {"began": True, "alike": False, "number": 2},  # a Run tells of progress, or of none
        {"message": "ModuleNotFoundError: No module named 'x'"},
        {"message": "", "exit_code": ExitCode.USAGE},
        {"exit_code": ExitCode.VALIDATION_FAILED},
    ):
        hopeless = msgspec.structs.replace(first, **otherwise)
        earlier = [msgspec.structs.replace(hopeless, number=1)] if hopeless.began else []
        assert stopped(decide(*earlier, hopeless, max_restarts=5, restarts_chosen=True)), otherwise
    bare = [failed(number, cause=Cause.UNKNOWN, nodes=["a"], began=False) for number in range(1, 9)]
    assert decide(*bare, max_restarts=9, restarts_chosen=True).action is Action.RESTART
    for cause in (one for one in Cause if one not in (Cause.JOB, Cause.UNKNOWN)):
        same = [failed(number, cause=cause, nodes=["a"], began=False) for number in range(1, 60)]
        assert decide(*same, max_restarts=99, restarts_chosen=True).action is not Action.RESTART, cause


# -- a cycle is not repeated for ever --------------------------------------------------------------------


@pytest.mark.parametrize("cause", [c for c in Cause if c is not Cause.PREEMPTION])
def test_a_cycle_is_repeated_a_stated_number_of_times_where_nothing_can_vary(cause: Cause) -> None:
    attempts = [failed(cause=cause, nodes=["a"])]
    for _ in range(BUDGETS[cause].repeats):
        assert decide(*attempts).action is Action.RESTART
        attempts.append(again(attempts[-1]))
    assert stopped(decide(*attempts)) == ExitCode.NOTHING_LEFT
    assert stopped(decide(*attempts, cluster=Cluster(nodes=["a"]))) == ExitCode.NOTHING_LEFT
    assert decide(*attempts[:-1], again(attempts[-2], highest_step=1)).action is Action.RESTART


def test_ports_and_pids_do_not_make_two_failures_different_but_the_jobs_own_words_do() -> None:
    one, other = failed(message=GLOO), failed(message=GLOO.replace("14766", "9"))
    assert signature(one) == signature(other)
    mine, yours = failed(cause=Cause.JOB, message="sample 3"), failed(cause=Cause.JOB, message="sample 4")
    assert signature(mine) != signature(yours)
    full = "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate {} GiB. Process {} has 3 MiB"
    assert signature(failed(1, Cause.JOB, message=full.format("2.00", 71))) == signature(
        failed(1, Cause.JOB, message=full.format("1.25", 72))
    )
    hangs = [failed(cause=Cause.HANG, section="step", message=f"for {n} s") for n in (180, 181)]
    assert signature(hangs[0]) == signature(hangs[1])
    assert cycle(one) != cycle(msgspec.structs.replace(one, rung="step_100"))
    assert signature(failed(culprit_node="a")) != signature(failed(culprit_node="b"))


@pytest.mark.parametrize("cause", list(Cause))
def test_each_cause_has_an_end_of_its_own_below_the_jobs(cause: Cause) -> None:
    attempts = [failed(1, cause)]
    while (decision := decide(*attempts)).action.goes_on:
        letter = chr(97 + len(attempts))
        attempts.append(again(attempts[-1], message=letter, section=letter, at=4000.0 * len(attempts)))
        assert len(attempts) < 100
    assert stopped(decision) == ExitCode.BUDGET_SPENT
    assert len(attempts) == 1 + BUDGETS[cause].restarts
    queued = decide(*attempts, can_requeue=True).action is Action.REQUEUE
    assert queued is (cause in (Cause.PREEMPTION, Cause.INFRASTRUCTURE)), "a job's error goes along"


def test_preemption_costs_no_restart_but_not_too_many_in_its_window() -> None:
    budget = BUDGETS[Cause.PREEMPTION]
    attempts = [failed(cause=Cause.PREEMPTION, at=1e9)]
    for _ in range(budget.per_window):
        decision = decide(*attempts, max_restarts=1)
        assert (decision.action, decision.restarts_left) == (Action.RESTART, 1)
        attempts.append(again(attempts[-1], at=attempts[-1].at + 60))
    assert stopped(decide(*attempts, max_restarts=1)) == ExitCode.BUDGET_SPENT
    queued = decide(*attempts, max_restarts=1, can_requeue=True)
    assert (queued.action, queued.exit_code) == (Action.REQUEUE, ExitCode.REQUEUE_WANTED)
    slower = [msgspec.structs.replace(a, at=1e9 + 1000 * a.number) for a in attempts]
    assert decide(*slower, max_restarts=1).action is Action.RESTART


# -- rotation --------------------------------------------------------------------------------------------


def test_a_device_error_that_names_nobody_moves_every_rank_but_not_for_ever() -> None:
    many = msgspec.structs.replace(PAIR, devices={"a": list("0123"), "b": list("0123")})
    attempts = [failed(cause=Cause.DEVICE)]
    shifts = []
    while (decision := decide(*attempts, cluster=many)).action is Action.ROTATE:
        shifts.append(decision.rotate_by)
        attempts[-1] = msgspec.structs.replace(attempts[-1], action="rotate")
        attempts.append(
            again(attempts[-1], rotation=decision.rotate_by, placement=str(decision.rotate_by), action="")
        )
    assert shifts == [1, 2, 3]
    assert len(shifts) == MAX_ROTATIONS
    assert (decision.action, decision.rotate_by) == (Action.RESTART, 3), "then once more as it is"
    assert stopped(decide(*attempts, again(attempts[-1]), cluster=many)) == ExitCode.NOTHING_LEFT


def test_no_rotation_is_tried_twice_against_the_same_failure() -> None:
    attempts = [failed(cause=Cause.DEVICE, placement="p0", action="rotate")]
    attempts.append(again(attempts[0], rotation=1, placement="p1", action=""))
    attempts.append(again(attempts[1], rotation=0, placement="p0", launch="next"))
    assert decide(*attempts, cluster=PAIR).rotate_by == 2, "1 did not help"
    other = msgspec.structs.replace(attempts[2], message="another one")
    assert decide(*attempts[:2], other, cluster=PAIR).rotate_by == 1
    two = Cluster(nodes=["a"], devices={"a": ["0", "1"]})
    alone = [msgspec.structs.replace(attempt, nodes=["a"]) for attempt in attempts]
    assert stopped(decide(*alone, cluster=two)) == ExitCode.NOTHING_LEFT


def test_a_restart_stays_on_the_devices_that_it_was_rotated_to() -> None:
    assert decide(failed(rotation=2), cluster=PAIR).rotate_by == 2


def test_a_job_error_does_not_move_ranks() -> None:
    same = [failed(number, Cause.JOB) for number in (1, 2, 3)]
    assert stopped(decide(*same, cluster=PAIR)) == ExitCode.NOTHING_LEFT


def test_a_rejected_step_is_run_on_other_devices_then_fails_validation() -> None:
    """Scenarios 3 and 13."""
    first = failed(cause=Cause.DEVICE, exit_code=16)
    turned = decide(first, cluster=PAIR)
    assert (turned.action, turned.rotate_by) == (Action.ROTATE, 1)
    assert decide(first).action is Action.RESTART, "on the only device there is"
    attempts = [failed(number, Cause.DEVICE, exit_code=16) for number in range(1, RERUNS + 2)]
    assert decide(*attempts[:-1]).action is Action.RESTART
    assert stopped(decide(*attempts)) == ExitCode.VALIDATION_FAILED
    assert stopped(decide(*attempts, cluster=PAIR)) == ExitCode.VALIDATION_FAILED
    assert stopped(decide(*attempts[:2], max_restarts=1)) == ExitCode.VALIDATION_FAILED
    assert stopped(decide(attempts[0], max_restarts=0)) == ExitCode.BUDGET_SPENT


def test_a_rejection_that_follows_the_device_excludes_it() -> None:
    """Scenario 4."""
    place = {**PAIR.devices, "a": ["0", "1", "2"]}
    roomy = msgspec.structs.replace(PAIR, devices=place)
    bad = failed(cause=Cause.DEVICE, exit_code=16, culprit_node="a", culprit_device="1", action="rotate")
    decision = decide(bad, again(bad, rotation=1), cluster=roomy)
    assert decision.action is Action.EXCLUDE
    assert [(e.node, e.device) for e in decision.exclude] == [("a", "1")]
    moved = again(bad, rotation=1, culprit_device="0")
    assert decide(bad, moved, cluster=roomy).action is Action.ROTATE, "it stays with the work"


# -- exclusion -------------------------------------------------------------------------------------------


def broken(**more: object) -> PastAttempt:
    seen = Evidence(devices=[DeviceError(node="b", device="1", xid=79)])
    return failed(**{**msgspec.structs.asdict(diagnose(seen)), **more})  # type: ignore[arg-type]


def test_a_device_that_the_hardware_accuses_goes_at_once() -> None:
    roomy = msgspec.structs.replace(PAIR, workers_per_node=1)
    decision = decide(broken(), cluster=roomy)
    assert (decision.action, decision.nodes, decision.spares) == (Action.EXCLUDE, ["a", "b"], [])
    assert [(e.node, e.device) for e in decision.exclude] == [("b", "1")]
    assert "XID 79" in decision.exclude[0].reason


def test_its_node_goes_where_the_other_devices_are_too_few_for_its_workers() -> None:
    decision = decide(broken(), cluster=msgspec.structs.replace(PAIR, spares=["c", "d"]))
    assert (decision.action, decision.nodes, decision.spares) == (Action.EXCLUDE, ["a", "c"], ["c"])
    assert [(e.node, e.device) for e in decision.exclude] == [("b", None)]
    may = msgspec.structs.replace(PAIR, may_shrink=True, min_nodes=1)
    decision = decide(broken(), cluster=may)
    assert (decision.action, decision.nodes) == (Action.SHRINK, ["a"])
    assert [e.node for e in decision.exclude] == ["b"]
    decision = decide(broken(), cluster=PAIR)
    assert (decision.action, decision.exclude) == (Action.RESTART, []), (
        "never below the least number of nodes"
    )
    assert stopped(decide(broken(), again(broken()), cluster=PAIR)) == ExitCode.NOTHING_LEFT
    queued = decide(broken(), again(broken()), cluster=PAIR, can_requeue=True)
    assert (queued.action, [e.node for e in queued.exclude]) == (Action.REQUEUE, ["b"])


def test_a_node_that_is_at_fault_twice_makes_room_for_a_spare() -> None:
    first = failed(exit_code=-9, culprit_node="b")
    with_spare = msgspec.structs.replace(PAIR, spares=["c"])
    assert decide(first, cluster=with_spare).action is Action.RESTART
    decision = decide(first, again(first), cluster=with_spare)
    assert (decision.action, decision.nodes) == (Action.EXCLUDE, ["a", "c"])
    assert "2 times" in decision.exclude[0].reason
    other_device = again(msgspec.structs.replace(first, culprit_device="0"), culprit_device="1")
    assert decide(first, other_device, cluster=with_spare).action is Action.EXCLUDE, "a kill accuses the node"
    elsewhere = again(first, culprit_node="a")
    assert decide(first, elsewhere, cluster=with_spare).action is Action.RESTART
    error = failed(cause=Cause.JOB, culprit_node="b")
    assert decide(error, again(error), cluster=with_spare).exclude == [], "a job's error accuses no node"


def test_the_group_does_not_get_smaller_while_repeating_may_still_help() -> None:
    may = msgspec.structs.replace(PAIR, may_shrink=True, min_nodes=1)
    attempts = [failed(exit_code=-9, culprit_node="b")]
    for _ in range(BUDGETS[Cause.INFRASTRUCTURE].repeats):
        assert decide(*attempts, cluster=may).action is Action.RESTART
        attempts.append(again(attempts[-1]))
    decision = decide(*attempts, cluster=may)
    assert (decision.action, decision.nodes) == (Action.SHRINK, ["a"])


def test_what_is_excluded_is_not_taken_as_a_spare() -> None:
    out = msgspec.structs.replace(PAIR, spares=["c", "d"], excluded=[Exclusion("c", None, "bad")])
    assert decide(broken(), cluster=out).nodes == ["a", "d"]


def test_a_broken_device_that_is_kept_out_already_does_not_cost_its_node() -> None:
    out = [Exclusion("b", "1", "XID 79")]
    roomy = Cluster(nodes=["a", "b"], spares=["c"], devices=PAIR.devices, excluded=out)
    assert decide(broken(), cluster=roomy).exclude == []


def test_a_scheduler_gets_the_job_back_where_the_culprit_cannot_be_replaced() -> None:
    attempts = [failed(exit_code=-9, culprit_node="a", nodes=["a"])]
    for _ in range(BUDGETS[Cause.INFRASTRUCTURE].repeats):
        attempts.append(again(attempts[-1]))
    alone = Cluster(nodes=["a"])
    assert stopped(decide(*attempts, cluster=alone)) == ExitCode.NOTHING_LEFT
    decision = decide(*attempts, cluster=alone, can_requeue=True)
    assert (decision.action, decision.exit_code) == (Action.REQUEUE, ExitCode.REQUEUE_WANTED)
    assert [e.node for e in decision.exclude] == ["a"]


# -- nodes that are gone ---------------------------------------------------------------------------------


def test_a_lost_node_is_replaced_or_done_without_or_waited_for_or_the_job_is_given_back() -> None:
    lost = failed(culprit_node="b", nodes=["a", "b"])
    left = msgspec.structs.replace(PAIR, nodes=["a"])
    decision = decide(lost, cluster=msgspec.structs.replace(left, spares=["c"]))
    assert (decision.action, decision.nodes, decision.spares) == (Action.RESTART, ["a", "c"], ["c"])
    assert decision.exclude == [], "once is no reason to keep it out"
    decision = decide(lost, cluster=msgspec.structs.replace(left, may_shrink=True, min_nodes=1))
    assert (decision.action, decision.nodes) == (Action.SHRINK, ["a"])
    decision = decide(lost, cluster=left)
    assert (decision.action, decision.wait_seconds) == (Action.WAIT, CAPACITY_WAIT)
    assert decision.restarts_left == 100, "waiting is no restart"
    assert decide(lost, cluster=left, waited=CAPACITY_WAIT - 5).wait_seconds == 5
    assert decide(lost, cluster=PAIR, waited=30).action is Action.RESTART, "it came back"
    assert stopped(decide(lost, cluster=left, waited=CAPACITY_WAIT)) == ExitCode.NO_CAPACITY
    assert decide(lost, cluster=left, waited=CAPACITY_WAIT, can_requeue=True).action is Action.REQUEUE


def test_requeues_without_progress_are_bounded() -> None:
    left = msgspec.structs.replace(PAIR, nodes=["a"])
    attempts = [
        msgspec.structs.replace(failed(number), launch=str(number), action="requeue")
        for number in range(1, MAX_REQUEUES + 2)
    ]
    more = {"cluster": left, "waited": CAPACITY_WAIT, "can_requeue": True}
    assert decide(*attempts[:-1], **more).action is Action.REQUEUE
    assert stopped(decide(*attempts, **more)) == ExitCode.NO_CAPACITY


def test_a_node_that_comes_and_goes_is_not_taken_again_and_again() -> None:
    """It waits as a spare each time, and is lost each time."""
    flapping = msgspec.structs.replace(PAIR, nodes=["a"], spares=["b"])
    attempts = [failed(culprit_node="b")]
    while (decision := decide(*attempts, cluster=flapping)).action.goes_on:
        assert decision.nodes == ["a", "b"]
        attempts.append(again(attempts[-1], rotation=decision.rotate_by, placement=f"p{decision.rotate_by}"))
        attempts[-2] = msgspec.structs.replace(attempts[-2], action=decision.action)
    assert stopped(decision) == ExitCode.NOTHING_LEFT
    settings = [cycle(attempt) for attempt in attempts]
    assert max(settings.count(one) for one in settings) <= 1 + BUDGETS[Cause.INFRASTRUCTURE].repeats
    better = msgspec.structs.replace(flapping, spares=["b", "c"])
    decision = decide(*attempts[:2], cluster=better)
    assert (decision.action, decision.nodes) == (Action.EXCLUDE, ["a", "c"])


# -- lower rungs -----------------------------------------------------------------------------------------


def test_a_checkpoint_that_cannot_be_used_is_left_for_an_older_one_at_most_twice() -> None:
    attempts = [failed(cause=Cause.CHECKPOINT, rung="step_120")]
    avoided = []
    for rung in ("step_110", "step_100"):
        decision = decide(*attempts, lower_rungs=5)
        assert decision.action is Action.LOWER_RUNG
        avoided.append(decision.avoid)
        attempts[-1] = msgspec.structs.replace(attempts[-1], action="lower_rung", decided=decision.findings())
        attempts.append(again(attempts[-1], rung=rung, action="", decided=Findings()))
    assert avoided == [["step_120"], ["step_110", "step_120"]]
    assert len(avoided) == MAX_LOWER_RUNGS
    decision = decide(*attempts, lower_rungs=5)
    assert (decision.action, decision.avoid) == (Action.RESTART, ["step_110", "step_120"])
    assert stopped(decide(*attempts, again(attempts[-1]), lower_rungs=5)) == ExitCode.NOTHING_LEFT


def test_what_was_left_stays_left_until_there_is_progress() -> None:
    left = failed(
        cause=Cause.CHECKPOINT, rung="step_120", action="lower_rung", decided=Findings(avoid=["step_120"])
    )
    killed = failed(2, exit_code=-9, rung="step_110")
    assert decide(left, killed).avoid == ["step_120"]
    assert decide(left, msgspec.structs.replace(killed, highest_step=130)).avoid == []


@pytest.mark.parametrize(
    ("cause", "steps", "lowers"),
    [
        (Cause.UNKNOWN, None, False),
        (Cause.UNKNOWN, 0, False),
        (Cause.PREEMPTION, 0, False),
        (Cause.HANG, NEAR_RESUME, True),
        (Cause.HANG, NEAR_RESUME + 1, False),
        (Cause.HANG, None, False),
        (Cause.JOB, 3, True),
        (Cause.JOB, 300, False),
        (Cause.DATA, 3, False),
        (Cause.INFRASTRUCTURE, 0, False),
        (Cause.DEVICE, 0, False),
    ],
)
def test_only_what_a_checkpoint_can_cause_goes_to_an_older_one(
    cause: Cause, steps: int | None, lowers: bool
) -> None:
    attempts = [failed(1, cause, message="E: x", rung="step_120", steps=steps)]
    while (decision := decide(*attempts, lower_rungs=1)).action is Action.RESTART:
        attempts.append(again(attempts[-1]))
    assert (decision.action is Action.LOWER_RUNG) is lowers, decision
    fresh = [msgspec.structs.replace(attempt, rung="") for attempt in attempts]
    assert decide(*fresh, lower_rungs=1).action is Action.STOP, "there was nothing loaded"
    assert decide(*attempts, lower_rungs=0).action is Action.STOP


def test_errors_of_the_fabric_and_of_nobody_are_tried_again_in_place_and_cost_no_rung() -> None:
    """The same NCCL error twice, right after a resume: it had cost a checkpoint, or ended the run."""
    said = (
        "NCCL error in: x.cpp:1, unhandled system error\nLast error:\nCall to ibv_modify_qp failed with error"
    )
    fabric = WorkerEnd(
        rank=3,
        node="b",
        exit_code=1,
        message=f"DistBackendError: {said}",
        errors=[Raised(types=["torch.distributed.DistBackendError"], message=said)],
    )
    nobody = WorkerEnd(rank=3, node="b", exit_code=-11, message="nobody has met this line", stderr_file="x")
    for end, cause in ((fabric, Cause.INFRASTRUCTURE), (nobody, Cause.UNKNOWN)):
        found = diagnose(Evidence(ends=[end], world_size=4, rung="step_120", steps=1))
        first = failed(**msgspec.structs.asdict(found))
        assert first.cause is cause
        decisions = [decide(first, lower_rungs=2), decide(first, again(first), lower_rungs=2)]
        assert [one.action for one in decisions] == [Action.RESTART, Action.RESTART]
        assert [one.avoid for one in decisions] == [[], []]
    left = diagnose(Evidence(ends=[fabric, msgspec.structs.replace(fabric, rank=1, exit_code=0, left=True)]))
    assert left.root_rank == 3, "who left is not to blame for the fabric"


@pytest.mark.parametrize(
    "said",
    [
        "NET/IB: Got completion from peer 10.0.0.7<54862> with status=12 opcode=0 vendor err 129 (mlx5_3:1)",
        "ibv_poll_cq error on mlx5_3:1",
    ],
)
def test_an_adapter_that_times_out_twice_is_named_and_no_checkpoint_is(said: str) -> None:
    end = WorkerEnd(rank=3, node="b", exit_code=1, message=f"ValueError: {said}")
    found = diagnose(Evidence(ends=[end], world_size=4, rung="step_120", steps=1))
    first = failed(**msgspec.structs.asdict(found))
    for attempts in ((first,), (first, again(first))):
        decision = decide(*attempts, lower_rungs=2)
        assert (decision.action, decision.avoid) == (Action.RESTART, [])
        assert decision.evidence.count("check the network adapter mlx5_3:1 on b") == 1
        assert "cause: infrastructure" in decision.evidence
    told = decide(first, lower_rungs=2).evidence
    situation = Situation(attempt=first, max_restarts=3, facts=told[:2])
    assert recover([], situation).evidence.count("check the network adapter mlx5_3:1 on b") == 1


def test_an_import_error_of_one_rank_is_told_as_its_own() -> None:
    """All run the same lines: what differs is its node, or its path."""
    end = WorkerEnd(rank=1, node="b", exit_code=1, message="ModuleNotFoundError: No module named 'data'")
    peer = WorkerEnd(rank=0, node="a", exit_code=1, message=GLOO, at=1.0)
    for ends in ([end], [end, peer]):
        found = diagnose(Evidence(ends=ends, world_size=2))
        first = failed(began=False, world_size=2, **msgspec.structs.asdict(found))
        decision = decide(first)
        assert (decision.action, decision.reason) == (
            Action.RESTART,
            "exit code 1 (unknown) on rank 1 on b only may not happen again",
        )
        [where] = [line for line in decision.evidence if "rank 1 on b only" in line]
        assert where.endswith("what differs is that node, or what that rank does")
        attempts = [first]
        while (decision := decide(*attempts)).action is not Action.STOP:
            attempts.append(again(attempts[-1]))
        assert "on rank 1 on b only" in decision.reason
        assert any("what differs is that node" in text for text in decision.evidence)
        assert "alike" not in decision.reason


@pytest.mark.parametrize(
    ("ranks", "world", "told"),
    [(1, 1, "s, before its"), (2, 2, "s, on all ranks alike and"), (2, 3, "s, on 2 of 3 ranks alike and")],
)
def test_only_ranks_that_failed_so_are_said_to_be_alike(ranks: int, world: int, told: str) -> None:
    """The others were stopped before they could show it."""
    message = "ModuleNotFoundError: No module named 'data'"
    ends = [WorkerEnd(rank=rank, exit_code=1, message=message) for rank in range(ranks)]
    found = diagnose(Evidence(ends=ends, world_size=world))
    decision = decide(failed(began=False, world_size=world, **msgspec.structs.asdict(found)))
    assert stopped(decision) == ExitCode.FAILED
    assert told in decision.reason


def test_a_rank_that_leaves_early_is_tried_once_more_and_costs_no_rung() -> None:
    lost = WorkerEnd(rank=0, exit_code=1, message=GLOO)
    found = diagnose(
        Evidence(ends=[lost, WorkerEnd(rank=1, exit_code=0, left=True)], rung="step_120", steps=1)
    )
    first = failed(**msgspec.structs.asdict(found))
    assert decide(first, lower_rungs=2).action is Action.RESTART
    assert stopped(decide(first, again(first), lower_rungs=2)) == ExitCode.FAILED


def test_an_error_right_after_a_resume_is_tried_once_from_below_and_then_is_the_jobs() -> None:
    """Scenario 2, with bad data: both rungs fail."""
    first = failed(cause=Cause.JOB, message="FloatingPointError: nan", rung="step_120", steps=3)
    second = again(first)
    decision = decide(first, second, lower_rungs=2)
    assert (decision.action, decision.avoid) == (Action.LOWER_RUNG, ["step_120"])
    gone = Cluster(nodes=["a"], spares=["c"])
    replaced = decide(first, second, lower_rungs=2, cluster=gone)
    assert (replaced.action, replaced.nodes) == (Action.LOWER_RUNG, ["a", "c"]), "it is not the lost node's"
    second = msgspec.structs.replace(second, action="lower_rung", decided=decision.findings())
    third = again(second, rung="step_100", steps=23, action="", decided=Findings())
    assert stopped(decide(first, second, third, lower_rungs=1)) == ExitCode.FAILED


def test_a_run_that_is_tied_to_its_ranks_waits_instead_of_shrinking_and_says_why() -> None:
    free = Cluster(nodes=["a"], min_nodes=1, max_nodes=2, may_shrink=True)
    tied = msgspec.structs.replace(free, tied="model.experts differs between ranks")
    lost = failed(cause=Cause.INFRASTRUCTURE, nodes=["a", "b"])
    assert decide(lost, cluster=free).action == Action.SHRINK
    waiting = decide(lost, cluster=tied, capacity_wait=60.0)
    assert waiting.action == Action.WAIT
    assert "fewer cannot go on from what is saved: model.experts differs between ranks" in waiting.reason


# -- operators -------------------------------------------------------------------------------------------


def test_a_reset_budget_counts_from_there_on() -> None:
    attempts = [failed(number) for number in range(1, 5)]
    assert stopped(decide(*attempts, max_restarts=3)) == ExitCode.BUDGET_SPENT
    decision = decide(*attempts, max_restarts=3, budget_reset=4)
    assert (decision.action, decision.restarts_left) == (Action.RESTART, 2)
    assert decide(*attempts, max_restarts=3, budget_reset=2).restarts_left == 0


# -- records ---------------------------------------------------------------------------------------------


def test_every_decision_says_what_it_rests_on() -> None:
    lost = failed(cause=Cause.HANG, exit_code=0, section="step", action="restart")
    decision = decide(lost)
    assert "no sign of life in its training step" in decision.reason
    assert decision.evidence[:2] == ["seen", "cause: hang"]
    assert "100 of 100 restarts without progress were left" in decision.evidence
    ended = decide(lost, again(lost, action=""))
    assert "tried since the last progress: restart once" in ended.evidence
    assert "2 times" in ended.reason


def test_records_of_an_older_release_are_read_and_decisions_survive_being_written() -> None:
    old = b'{"number": 1, "launch": "l", "outcome": "failed", "cause": "job", "exit_code": 1, "message": "m"}'
    attempt = msgspec.json.decode(old, type=PastAttempt)
    assert (attempt.began, attempt.steps, attempt.rung, attempt.nodes) == (True, None, "", [])
    told = b'{"action":"restart","exit_code":0,"reason":"r","evidence":["e"],"restarts_left":2}'
    assert msgspec.json.decode(told, type=Decision).avoid == []
    for decision in (decide(broken(), cluster=PAIR), decide(failed(cause=Cause.JOB), cluster=PAIR)):
        assert msgspec.json.decode(msgspec.json.encode(decision), type=Decision) == decision
    situation = Situation(attempt=attempt, max_restarts=1, cluster=PAIR)
    assert msgspec.json.decode(msgspec.json.encode(situation), type=Situation) == situation


def test_policies_import_nothing_with_effects() -> None:
    code = (
        "import sys, holdfast.policy.recovery\n"
        "effects = ('holdfast.control', 'holdfast.launch', 'holdfast.journal')\n"
        "bad = [m for m in sys.modules if m == 'torch' or m.startswith(effects)]\n"
        "assert not bad, bad"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=30)
