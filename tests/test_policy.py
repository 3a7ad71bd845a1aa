"""The pure policies: root cause, classification, budgets, recovery."""

from __future__ import annotations

import signal
import subprocess
import sys
from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.exit_codes import ExitCode
from holdfast.policy.budgets import (
    MAX_REGROUPS,
    PastAttempt,
    may_regroup,
    restarts_left,
    restarts_without_progress,
)
from holdfast.policy.classify import KERNEL_OOM, Cause, Evidence, classify, evidence_of, root_cause
from holdfast.policy.recovery import INCURABLE, Action, Decision, Situation, recover

GLOO = "RuntimeError: [gloo/transport/tcp/pair.cc:553] Connection closed by peer [127.0.0.1]:14766."
RESET = "RuntimeError: [gloo/transport/tcp/pair.cc:537] Read error: Connection reset by peer."
NCCL = "DistBackendError: NCCL error ... ncclRemoteError: A call failed possibly due to a network error"


@dataclass(frozen=True)
class Failure:
    rank: int
    exit_code: int
    at: float
    message: str = ""


# -- root cause -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("symptom", [GLOO, RESET, NCCL])
def test_a_death_by_signal_outranks_the_symptoms_that_were_seen_first(symptom: str) -> None:
    killed = Failure(rank=3, exit_code=-signal.SIGKILL, at=11.0)
    symptoms = [Failure(rank=rank, exit_code=1, at=10.0, message=symptom) for rank in (0, 1, 2)]
    assert root_cause([*symptoms, killed]) is killed


def test_a_real_exception_outranks_earlier_symptoms_and_a_silent_abort() -> None:
    real = Failure(rank=2, exit_code=1, at=12.0, message="ValueError: bad sample")
    abort = Failure(rank=1, exit_code=-signal.SIGABRT, at=10.0)
    lost = Failure(rank=0, exit_code=1, at=9.0, message=GLOO)
    undecided = Failure(rank=4, exit_code=ExitCode.DECISION_TIMEOUT, at=8.0)
    assert root_cause([lost, abort, real, undecided]) is real
    assert root_cause([lost, abort, undecided]) is abort
    assert root_cause([lost, undecided]) is undecided


def test_among_equals_the_earliest_counts() -> None:
    first = Failure(rank=5, exit_code=1, at=1.0, message="ValueError: a")
    second = Failure(rank=0, exit_code=-signal.SIGSEGV, at=2.0)
    assert root_cause([second, first]) is first


failures = st.builds(
    Failure,
    rank=st.integers(0, 7),
    exit_code=st.sampled_from([-15, -9, -6, 1, 2, 16, 17, 18, 21, 137]),
    at=st.floats(0, 3),
    message=st.sampled_from(["", GLOO, NCCL, "ValueError: x", "CUDA out of memory"]),
)


@given(st.lists(failures, min_size=1, max_size=8, unique_by=lambda f: f.rank), st.randoms())
def test_the_root_cause_does_not_depend_on_the_order_of_reports(found: list[Failure], random: object) -> None:
    shuffled = list(found)
    random.shuffle(shuffled)  # type: ignore[attr-defined]
    assert root_cause(found) == root_cause(shuffled)


# -- classification --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("exit_code", "message", "cause"),
    [
        (-signal.SIGTERM, "", Cause.PREEMPTION),
        (-signal.SIGUSR1, "", Cause.PREEMPTION),
        (143, "", Cause.PREEMPTION),
        (-signal.SIGKILL, "", Cause.INFRASTRUCTURE),
        (137, "", Cause.INFRASTRUCTURE),
        (-signal.SIGKILL, KERNEL_OOM, Cause.JOB),
        (-signal.SIGSEGV, "", Cause.UNKNOWN),
        (1, "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2 GiB", Cause.JOB),
        (1, "MemoryError: ", Cause.JOB),
        (1, "ValueError: bad sample", Cause.JOB),
        (2, "", Cause.JOB),
        (1, GLOO, Cause.INFRASTRUCTURE),
        (1, NCCL, Cause.INFRASTRUCTURE),
        (1, "RuntimeError: CUDA error: uncorrectable ECC error encountered", Cause.DEVICE),
        (1, "RuntimeError: CUDA error: device-side assert triggered", Cause.JOB),
        (-signal.SIGABRT, "Watchdog caught collective operation timeout: WorkNCCL(...)", Cause.HANG),
        (1, "CheckpointError: shard __0_0.distcp: digest differs", Cause.CHECKPOINT),
        (ExitCode.RERUN_WANTED, "", Cause.DEVICE),
        (ExitCode.VALIDATION_FAILED, "", Cause.JOB),
        (ExitCode.NO_VALID_RUNG, "", Cause.CHECKPOINT),
        (ExitCode.LEASE_LOST, "", Cause.INFRASTRUCTURE),
        (ExitCode.DECISION_TIMEOUT, "", Cause.INFRASTRUCTURE),
        (ExitCode.SAVE_FAILED, "", Cause.INFRASTRUCTURE),
        (ExitCode.CONTROL_UNUSABLE, "", Cause.INFRASTRUCTURE),
        (0, "", Cause.UNKNOWN),
    ],
)
def test_each_end_has_its_cause(exit_code: int, message: str, cause: Cause) -> None:
    assert classify(evidence_of(Failure(rank=0, exit_code=exit_code, at=0.0, message=message))) == cause


@given(st.integers(-200, 400), st.text(max_size=60), st.booleans())
def test_every_end_is_classified(exit_code: int, message: str, oom: bool) -> None:
    assert classify(Evidence(exit_code=exit_code, message=message, kernel_oom=oom)) in set(Cause)


# -- budgets -----------------------------------------------------------------------------------------------


def past(
    number: int, launch: str = "a", outcome: str = "failed", step: int = 0, **more: object
) -> PastAttempt:
    cause = Cause.INFRASTRUCTURE if outcome == "failed" else ""
    return PastAttempt(
        number=number, launch=launch, outcome=outcome, highest_step=step, **{"cause": cause, **more}
    )


def test_restarts_are_counted_over_launches_and_first_attempts_are_free() -> None:
    """Case pytorch#147064."""
    assert restarts_without_progress([past(1)]) == 0
    assert restarts_without_progress([past(1), past(2), past(3)]) == 2
    assert restarts_without_progress([past(1), past(2), past(3, "b"), past(4, "b")]) == 2
    assert restarts_left([past(1), past(2), past(3, "b"), past(4, "b")], 2) == 0


def test_only_a_rise_of_the_highest_step_refunds() -> None:
    spent = [past(1, step=100), past(2, step=100), past(3, step=100)]
    assert restarts_without_progress(spent) == 2
    assert restarts_without_progress([*spent, past(4, step=90)]) == 3
    assert restarts_without_progress([*spent, past(4, step=101)]) == 0
    assert restarts_without_progress([*spent, past(4, step=101), past(5, step=101)]) == 1


def test_an_attempt_that_was_lost_with_its_launcher_gives_nothing_back() -> None:
    history = [past(1, step=100), past(2, step=100), past(3, "b", "lost"), past(4, "b", step=100)]
    assert restarts_without_progress(history) == 2


def test_a_change_of_membership_is_no_restart_but_bounded() -> None:
    """Note 2 of torch's agent: a spare that keeps arriving would restart the group for ever."""
    history = [past(number, outcome="stopped") for number in range(1, MAX_REGROUPS + 1)]
    assert restarts_without_progress(history) == 0
    assert may_regroup(history)
    assert not may_regroup([*history, past(MAX_REGROUPS + 1, outcome="stopped")])


# -- recovery ----------------------------------------------------------------------------------------------


def decide(history: list[PastAttempt], failed: PastAttempt, max_restarts: int = 3) -> Decision:
    return recover(history, Situation(attempt=failed, max_restarts=max_restarts, facts=["seen"]))


def test_a_spent_budget_stops_with_its_code_and_says_why() -> None:
    decision = decide([past(1), past(2)], past(3), max_restarts=2)
    assert (decision.action, decision.exit_code) == (Action.STOP, ExitCode.BUDGET_SPENT)
    assert "seen" in decision.evidence
    assert any("no progress" in line for line in decision.evidence)


@pytest.mark.parametrize("code", sorted(INCURABLE))
def test_what_a_restart_cannot_cure_stops_at_once_with_its_own_code(code: int) -> None:
    """Scenario 13."""
    decision = decide([], past(1, exit_code=code))
    assert (decision.action, decision.exit_code) == (Action.STOP, code)


@pytest.mark.parametrize(
    "code", [2, ExitCode.RERUN_WANTED, ExitCode.SAVE_FAILED, ExitCode.DECISION_TIMEOUT, -9]
)
def test_what_may_pass_is_restarted(code: int) -> None:
    """Scenario 13."""
    decision = decide([], past(1, exit_code=code))
    assert (decision.action, decision.restarts_left) == (Action.RESTART, 2)


def test_the_same_job_error_twice_stops_before_the_budget_is_burnt() -> None:
    """Scenario 13."""
    error = {"cause": Cause.JOB, "exit_code": 1}
    first = past(1, message="ValueError: <obj at 0x7f01>", **error)
    again = past(2, message="ValueError: <obj at 0x7f99>", **error)
    decision = decide([first], again, max_restarts=100)
    assert (decision.action, decision.exit_code) == (Action.STOP, ExitCode.FAILED)
    # Any difference is a reason to try: another message, another step, no message, another cause.
    assert decide([first], past(2, message="KeyError: 1", **error)).action == Action.RESTART
    assert decide([first], past(2, message=again.message, step=10, **error)).action == Action.RESTART
    assert decide([past(1, **error)], past(2, **error)).action == Action.RESTART
    assert decide([past(1, message=GLOO)], past(2, message=GLOO)).action == Action.RESTART


ends = st.tuples(
    st.sampled_from([-15, -11, -9, -6, 1, 2, 16, 21, 23]),
    st.sampled_from(["", "ValueError: x", "KeyError: y", GLOO]),
    st.booleans(),  # does the launcher die with the attempt, so that somebody has to launch again
)


@given(st.lists(ends, min_size=1, max_size=60), st.integers(0, 6))
def test_any_sequence_of_failures_without_progress_is_restarted_at_most_max_restarts_times(
    sequence: list[tuple[int, str, bool]], max_restarts: int
) -> None:
    history: list[PastAttempt] = []
    launch, restarts = 0, 0
    for number, (code, message, launcher_dies) in enumerate(sequence, start=1):
        cause = classify(Evidence(exit_code=code, message=message))
        outcome = "lost" if launcher_dies else "failed"
        failed = PastAttempt(
            number=number, launch=str(launch), outcome=outcome, cause=cause, exit_code=code, message=message
        )
        if launcher_dies:
            launch += 1
        else:
            decision = decide(history, failed, max_restarts)
            assert decision == decide(list(reversed(history)), failed, max_restarts)
            if decision.action == Action.RESTART:
                restarts += 1
            else:
                assert decision.exit_code != 0
                launch += 1
        history.append(failed)
    # A restart that its launcher did not live to count is a new launch's first attempt.
    assert restarts <= max_restarts


@given(st.lists(st.integers(0, 3), min_size=1, max_size=60), st.integers(1, 4))
def test_restarts_between_two_rises_of_the_highest_step_are_bounded(
    rises: list[int], max_restarts: int
) -> None:
    """Whatever the pattern of progress: no more than `max_restarts` restarts in a row without a rise."""
    history: list[PastAttempt] = []
    step, in_a_row = 0, 0
    for number, rise in enumerate(rises, start=1):
        step += rise
        in_a_row = 0 if rise else in_a_row
        failed = past(number, step=step, exit_code=-9)
        decision = decide(history, failed, max_restarts)
        history.append(failed)
        if decision.action == Action.STOP:
            assert in_a_row == max_restarts
            return
        in_a_row += 1
        assert in_a_row <= max_restarts


def test_policies_import_nothing_with_effects() -> None:
    code = (
        "import sys, holdfast.policy.recovery\n"
        "effects = ('holdfast.control', 'holdfast.launch', 'holdfast.journal')\n"
        "bad = [m for m in sys.modules if m == 'torch' or m.startswith(effects)]\n"
        "assert not bad, bad"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=30)
