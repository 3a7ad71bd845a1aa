"""In-process restarts in the journal: what is told of them, and what incidents and the ledger make of it."""

from __future__ import annotations

import pytest

from holdfast.account.incidents import incidents_of
from holdfast.account.ledger import ledger_of
from holdfast.journal import condense
from holdfast.journal.events import FunctionRestarted, RestartFaulted, RestartPlanned
from holdfast.policy.diagnosis import is_symptom
from holdfast.policy.evidence import Fault, FaultKind
from holdfast.restart.messages import IterationPlan, Over, OverKind, faulted, handed_over, planned
from kit.journals import Journal, name_of

GLOO = "RuntimeError: Connection closed by peer [127.0.0.1]:1"


def restarted(journal: Journal, *faults: Fault, resume: tuple[str, int], takes: float = 0.2) -> None:
    """A function starts again in place, without the launcher: the next attempt tells what ended the last."""
    ended = journal.attempt
    plan = IterationPlan(iteration=ended, order=[0, 1], faults=list(faults), reason="1 of 3 restarts used")
    told = [
        *(faulted(fault, ended - 1, ended) for fault in faults),
        planned(plan, [0, 1], journal.now, ended),
    ]
    journal.start(resume=resume, takes=takes)
    for event in told:
        journal.write(event)
    journal.write(FunctionRestarted(iteration=ended, rank=0, seconds=0.1))


def test_a_restart_in_place_is_one_incident_from_its_fault_to_the_first_step() -> None:
    run = Journal().start().steps(1, 10)
    ten = run.save(10)
    run.steps(11, 14)
    began = run.now
    lost = Fault(member=1, rank=1, node="a", kind=FaultKind.LOST, detail="killed by SIGKILL", at=began + 0.05)
    symptom = Fault(member=0, rank=0, node="a", kind=FaultKind.EXCEPTION, detail=GLOO, at=began + 0.01)
    assert is_symptom(0, symptom.detail)
    run.pass_time(0.3)
    restarted(run, symptom, lost, resume=(ten, 10))
    run.steps(11, 30).finish(30)
    (incident,) = incidents_of(run.lines)
    assert incident.what == "rank 1 on a ended: killed by SIGKILL", "not the symptom that was seen first"
    assert incident.evidence == [f"followed by: {faulted(symptom, 0).summary()}"]
    assert incident.decision == f"in place, with 2 ranks; resume from step 10 ({name_of(10)})"
    assert (incident.attempt, incident.steps_lost, incident.failed_at_step) == (1, 4, 14)
    assert incident.at == pytest.approx(began + 0.01)
    assert incident.seconds_down == pytest.approx(
        0.29 + 0.2 + 0.1, abs=0.01
    )  # to the plan, the start, a step
    assert not incident.open


def test_the_ledger_counts_the_time_of_a_restart_in_place() -> None:
    run = Journal().start().steps(1, 10)
    ten = run.save(10)
    fault = Fault(member=1, rank=1, kind=FaultKind.EXCEPTION, detail="ValueError: x", at=run.now)
    run.pass_time(0.5)
    restarted(run, fault, resume=(ten, 10), takes=0.25)
    run.steps(11, 20).finish(20)
    ledger = ledger_of(run.lines)
    assert ledger.down == pytest.approx(0.5, abs=0.01), "from the fault, not from the next attempt's start"
    assert ledger.starting == pytest.approx(1.0 + 0.25, abs=0.01)
    assert (ledger.recomputed, ledger.other) == pytest.approx((0.0, 0.0), abs=0.01)


def test_a_fault_that_ended_no_attempt_accuses_none() -> None:
    """The function had failed before it made a Run: the attempt that tells of it is another."""
    run = Journal().start()
    run.write(faulted(Fault(member=0, rank=0, kind=FaultKind.EXCEPTION, detail="ValueError: x", at=1.0), 0))
    run.steps(1, 10).finish(10)
    assert incidents_of(run.lines) == []


def test_under_the_launcher_its_decision_and_the_plan_are_told_together() -> None:
    run = Journal().start().steps(1, 4)
    fault = Fault(member=2, rank=1, node="b", kind=FaultKind.SOFT_TIMEOUT, detail="no progress", at=run.now)
    run.write(faulted(fault, 0, ended=1), "agent-a")
    run.recover("restart")
    run.write(
        planned(IterationPlan(iteration=1, order=[0, 3], faults=[fault]), [0, 2], run.now, 1), "agent-a"
    )
    (incident,) = incidents_of(run.lines)
    assert incident.what == "rank 1 on b stood still: no progress"
    assert incident.decision == "restart; in place, with 2 ranks"
    assert "no end was recorded before the next attempt" not in incident.evidence


def test_a_plan_says_who_is_new_and_how_long_it_took() -> None:
    faults = [
        Fault(member=1, rank=1, kind=FaultKind.LOST, at=100.0),
        Fault(member=4, kind=FaultKind.LATE, at=0.0),
    ]
    plan = IterationPlan(
        iteration=3, order=[0, 5, 2], reserves=[6], faults=faults, reason="within the budget"
    )
    event = planned(plan, [0, 1, 2], 100.25, ended=7)
    assert (event.world_size, event.order, event.promoted, event.reserves) == (3, [0, 5, 2], [5], [6])
    assert (event.seconds, event.ended) == (0.25, 7)
    shown = event.render()
    assert shown.text == (
        "restart in place: iteration 3 with 3 ranks and 1 reserve, planned 250 ms after the fault"
    )
    assert shown.details == ["because within the budget", "promoted: process 5 as rank 1"]
    same = planned(IterationPlan(iteration=1, order=[0, 1]), [0, 1], 5.0)
    assert (same.order, same.promoted, same.seconds) == ([], [], 0.0), "nothing that goes without saying"
    regained = RestartPlanned(iteration=2, world_size=2, promoted=[1])
    assert regained.render().details == ["promoted: process 1 as rank 1"]


@pytest.mark.parametrize("kind", list(FaultKind))
def test_every_kind_of_fault_is_told_in_words_of_its_own(kind: FaultKind) -> None:
    fault = Fault(member=3, rank=1, node="a", kind=kind, detail="why", step=12)
    shown = faulted(fault, 0).render()
    assert shown.text.startswith("rank 1 on a ")
    assert shown.text.endswith(": why")
    assert shown.text != f"rank 1 on a {kind.value}: why", "a sentence, not a name"
    assert shown.details == ["after step 12"]
    reserve = faulted(Fault(member=3, kind=kind), 0)
    assert (reserve.rank, reserve.render().text.split(" ")[:2]) == (None, ["reserve", "3"])
    assert faulted(Fault(member=-1, kind=kind), 0).render().text.startswith("a process "), (
        "nobody knows which"
    )


def test_a_hand_over_says_why_and_with_which_code() -> None:
    over = Over(kind=OverKind.HANDED_OVER, reason="1 ranks are left", exit_code=33)
    shown = handed_over(over, 4).render()
    assert shown.text == "not restarted in place after iteration 4: 1 ranks are left"
    assert shown.details == ["the processes end with code 33"]


def test_of_what_every_rank_says_people_see_one_line() -> None:
    run = Journal().start()
    for rank in range(3):
        run.write(FunctionRestarted(iteration=1, rank=rank, seconds=0.125), f"rank-{rank}")
    run.write(RestartFaulted(iteration=0, member=2, kind="lost", rank=2), "rank-2")
    kept = [line for line in condense(run.lines) if isinstance(line.body, FunctionRestarted | RestartFaulted)]
    assert [line.who for line in kept] == ["rank-0", "rank-2"]
    assert kept[0].body.render().text == "iteration 1 begins as rank 0, 125 ms after the last one ended"
