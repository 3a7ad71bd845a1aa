"""Incidents, the ledger of time, and losses: what the journal says about a run's faults."""

from __future__ import annotations

import io
import itertools
import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console

from holdfast.account.incidents import incidents_of
from holdfast.account.ledger import ledger_of, steps_done
from holdfast.journal import JournalLine
from holdfast.journal.events import (
    AttemptEnded,
    AttemptStarted,
    DecisionMade,
    OperatorActed,
    SaveCommitted,
    StepsDone,
)
from holdfast.observe.chart import losses_by_attempt
from holdfast.observe.status import incident_table
from kit.journals import ALTERED, START, Journal, killed_and_corrupted, loss_of, name_of

# --- incidents


def test_a_kill_and_an_altered_checkpoint_are_one_incident_with_evidence_decision_and_cost() -> None:
    first, second = incidents_of(killed_and_corrupted().lines)
    assert (first.number, first.attempt, first.what) == (1, 1, "rank 1 killed by SIGKILL")
    assert first.evidence == [
        "rank 1, pid 101 on a: signal SIGKILL",
        "1 of 3 restarts used",
        "followed by: rank 0 exited with code 1: RuntimeError: Connection closed by peer",
        f"{name_of(20)}: {ALTERED}",
    ]
    assert first.decision == f"restart here; resume from step 10 ({name_of(10)})"
    assert (first.failed_at_step, first.steps_lost, first.open) == (27, 17, False)
    # 0.2 to decide, 0.3 until the next attempt, 1.0 to start, 0.1 for the first step
    assert first.seconds_down == pytest.approx(1.6, abs=0.01)
    # then the other 16 lost steps of 0.1 and one save of 0.3
    assert first.seconds_lost == pytest.approx(1.6 + 1.6 + 0.3, abs=0.01)
    assert first.at == first.detected_at
    assert first.caught_up_at == pytest.approx(first.at + first.seconds_lost, abs=0.01)
    assert (second.what, second.steps_lost) == ("rank 0 killed by SIGKILL", 4)
    assert second.decision == f"restart here; resume from step 40 ({name_of(40, 2)})"


def test_a_run_without_faults_has_no_incidents() -> None:
    assert incidents_of([]) == []
    assert incidents_of(Journal().start().steps(1, 30).finish(30).lines) == []


def test_the_decision_names_the_root_cause_else_a_signal_else_the_first() -> None:
    def failing(root: int | None, *, signal: bool) -> str:
        run = Journal().start().steps(1, 5)
        run.fail(3, signal="SIGTERM", exit_code=-15)
        run.fail(0, signal="", exit_code=1, message="ConnectionError: reset").pass_time(0.1)
        if signal:
            run.fail(2, signal="SIGSEGV", exit_code=-11)
        return incidents_of(run.recover(root=root).start(resume=None).lines)[0].what

    assert failing(0, signal=True) == "rank 0 exited with code 1: ConnectionError: reset"
    assert failing(None, signal=True) == "rank 2 killed by SIGSEGV"
    assert failing(None, signal=False) == "rank 3 killed by SIGTERM"


def test_an_attempt_lost_with_its_launcher_counts_from_its_last_sign_of_life() -> None:
    run = Journal().start().steps(1, 10)
    name = run.save(10)
    run.steps(11, 14)
    died = run.now
    run.pass_time(600).start(resume=(name, 10)).steps(11, 20).finish(20)
    (incident,) = incidents_of(run.lines)
    assert incident.what == "attempt 1 was lost with its launcher"
    assert incident.evidence == ["no end was recorded before the next attempt"]
    assert incident.at == died
    assert incident.detected_at == died + 600
    assert incident.seconds_down == pytest.approx(601.1, abs=0.01)
    assert incident.steps_lost == 4
    assert incident.decision == f"resume from step 10 ({name})"


def test_what_an_operator_asks_later_is_no_sign_of_life_of_a_lost_attempt() -> None:
    run = Journal()
    run.start().steps(1, 10)
    died = run.now
    run.pass_time(600).write(OperatorActed(action="pause", reason="night", by="alice"), "operator")
    run.pass_time(5).start().steps(1, 20)
    (incident,) = incidents_of(run.lines)
    assert incident.at == died


@pytest.mark.parametrize("attempt", [1, 2])
def test_an_end_recorded_by_the_next_launcher_belongs_to_the_attempt_that_was_lost(attempt: int) -> None:
    run = Journal().start().steps(1, 10)
    died = run.now
    run.pass_time(60).write(AttemptEnded(outcome="lost"), "agent-b", attempt)
    run.write(
        DecisionMade(about="recovery", chosen="restart", evidence=["the launcher is gone"]),
        "agent-b",
        attempt,
    )
    run.start().steps(1, 20).finish(20)
    (incident,) = incidents_of(run.lines)
    assert (incident.attempt, incident.at, incident.detected_at) == (1, died, died + 60)
    assert incident.decision == "restart; fresh start"
    assert incident.evidence == ["the launcher is gone"]
    assert incident.steps_lost == 10


def test_a_fault_before_the_run_is_back_takes_over_and_no_second_counts_twice() -> None:
    run = Journal().start().steps(1, 10)
    ten = run.save(10)
    run.steps(11, 20).fail().recover()
    run.start(resume=(ten, 10)).steps(11, 13).fail().recover()
    run.start(resume=None).fail().recover()
    run.start(resume=(ten, 10)).steps(11, 30).finish(30)
    one, two, three = incidents_of(run.lines)
    assert (one.overtaken_by, two.overtaken_by, three.overtaken_by) == (2, 3, None)
    assert not any(incident.open for incident in (one, two, three))
    assert (one.ended_at, two.ended_at) == (two.at, three.at)
    assert [incident.steps_lost for incident in (one, two, three)] == [10, 0, 3]
    assert three.seconds_down == pytest.approx(1.1, abs=0.01)
    assert three.seconds_lost == pytest.approx(2.0, abs=0.01)


def test_an_incident_is_open_until_the_run_is_back_where_it_was() -> None:
    run = Journal().start().steps(1, 10)
    ten = run.save(10)
    run.steps(11, 20).fail()
    (incident,) = incidents_of(run.lines)
    assert (incident.open, incident.decision, incident.resumed_at) == (True, "none yet", None)
    run.recover().start(resume=(ten, 10)).steps(11, 19)
    (incident,) = incidents_of(run.lines)
    assert incident.open
    assert incident.resumed_at is not None
    assert incident.seconds_lost == pytest.approx(1.9, abs=0.01)
    run.steps(20, 20)
    assert not incidents_of(run.lines)[0].open


def test_the_highest_committed_step_is_not_taken_for_the_step_the_attempt_had_reached() -> None:
    """An agent ends an attempt with the highest step that anyone committed, here of an altered checkpoint."""
    run = Journal().start().steps(1, 10)
    ten = run.save(10)
    run.steps(11, 20)
    twenty = run.save(20)
    run.fail().recover(last_step=20).start(resume=(ten, 10), rejected=[twenty]).steps(11, 13)
    run.fail().recover(last_step=20).start(resume=(ten, 10)).steps(11, 30).finish(30)
    assert [(one.failed_at_step, one.steps_lost) for one in incidents_of(run.lines)] == [(20, 10), (13, 3)]


def test_evidence_says_each_thing_once_and_only_higher_rungs_are_passed_over() -> None:
    run = Journal().start().steps(1, 10)
    old = run.save(10)
    run.steps(11, 20)
    run.save(20)
    run.fail(1).fail(0, signal="", exit_code=1, message="gloo: closed")
    why = "rank 1 on a (pid 101) failed: death by SIGKILL"
    run.write(
        DecisionMade(about="recovery", chosen="restart", evidence=[why, "ranks 0 then lost their peer"])
    )
    run.end("failed").start(resume=(name_of(20), 20), rejected=[old]).steps(21, 22)
    assert incidents_of(run.lines)[0].evidence == [why, "ranks 0 then lost their peer"]


def test_a_run_that_finishes_without_passing_its_old_step_ends_its_incident() -> None:
    run = Journal().start().steps(1, 12).fail().recover()
    run.start().steps(1, 10).finish(10)
    (incident,) = incidents_of(run.lines)
    assert not incident.open
    assert incident.caught_up_at == run.now


def test_a_stop_that_was_asked_for_is_no_incident() -> None:
    run = Journal().start().steps(1, 10).fail(0, signal="SIGTERM", exit_code=-15).end("stopped")
    run.pass_time(100).start().steps(1, 20).finish(20)
    assert incidents_of(run.lines) == []


def test_no_steps_are_lost_when_the_resume_is_where_the_run_stood() -> None:
    run = Journal().start().steps(1, 10)
    ten = run.save(10)
    run.fail().recover().start(resume=(ten, 10)).steps(11, 20)
    (incident,) = incidents_of(run.lines)
    assert (incident.steps_lost, incident.open) == (0, False)
    assert incident.seconds_lost == incident.seconds_down == pytest.approx(1.1, abs=0.01)


def test_the_terminal_table_shows_what_evidence_decision_and_time() -> None:
    found = incidents_of(killed_and_corrupted().lines)
    out = io.StringIO()
    Console(file=out, width=300).print(incident_table(found))
    text = out.getvalue()
    for wanted in (
        "rank 1 killed by SIGKILL",
        "altered __0_0.distcp",
        "resume from step 10",
        "3.5 s",
        "17 steps",
    ):
        assert wanted in text


def test_square_brackets_in_a_message_are_not_taken_for_markup() -> None:
    run = Journal().start().fail(0, signal="", exit_code=1, message="KeyError: [bold red]x[/]").recover()
    out = io.StringIO()
    Console(file=out, width=300).print(incident_table(incidents_of(run.lines)))
    assert "KeyError: [bold red]x[/]" in out.getvalue()


# --- the ledger


def test_each_kind_of_second_lands_in_its_part() -> None:
    run = killed_and_corrupted()
    ledger = ledger_of(run.lines)
    assert ledger.productive == pytest.approx(6.0, abs=0.01), "60 steps of 0.1"
    assert ledger.recomputed == pytest.approx(2.1, abs=0.01), "17 and 4 steps"
    assert ledger.saving == pytest.approx(1.5, abs=0.01), "5 saves of 0.3"
    assert ledger.starting == pytest.approx(3.0, abs=0.01), "3 starts of 1"
    assert ledger.down == pytest.approx(0.7, abs=0.01), "from the failures to the next starts"
    assert ledger.other == pytest.approx(0.6, abs=0.01), "steps that were cut off"
    assert ledger.whole == pytest.approx(run.now - START, abs=1e-6)
    assert ledger.goodput == pytest.approx(6.0 / 13.9, abs=0.001)


def test_an_empty_journal_and_a_run_that_never_started_account_for_nothing_and_everything() -> None:
    assert ledger_of([]).whole == 0
    run = Journal()
    run.write(AttemptEnded(outcome="lost"), attempt=0)
    run.pass_time(5).write(AttemptEnded(outcome="lost"), attempt=0)
    assert ledger_of(run.lines).whole == 5


MOVES = st.lists(
    st.tuples(
        st.sampled_from(["start", "steps", "save", "fail", "recover", "end", "wait", "finish", "odd"]),
        st.floats(0, 100),
        st.integers(0, 30),
    ),
    max_size=25,
)


def played(moves: list[tuple[str, float, int]]) -> list[JournalLine]:
    """A journal of any moves at all, sensible or not."""
    run = Journal()
    for move, seconds, count in moves:
        if move == "start":
            run.start(resume=(None, 0) if count % 3 else None, takes=seconds)
        elif move == "steps":
            run.steps(count, count + count % 7, seconds=seconds / 10)
        elif move == "save":
            run.save(count, seconds=seconds, blocked=seconds * (count % 4) / 2)
        elif move == "fail":
            run.fail(count)
        elif move == "recover":
            run.recover(root=count)
        elif move == "end":
            run.end(("failed", "stopped", "lost", "finished", "?")[count % 5], last_step=count)
        elif move == "wait":
            run.pass_time(seconds)
        elif move == "finish":
            run.finish(count)
        else:  # times that cannot be true, and a line of another attempt
            run.write(StepsDone(first=count, seconds=[1e6, -5.0], loss=["nan"]), attempt=count)
            run.write(SaveCommitted(checkpoint="x", step=-1, parent=None, bytes=0, files=0, seconds=-3.0,
                                    blocked_seconds=1e9))  # fmt: skip
            run.write(AttemptStarted(epoch=0, world_size=0), attempt=count)
    return run.lines


@settings(max_examples=150, deadline=None)
@given(MOVES)
def test_the_parts_always_sum_to_the_whole(moves: list[tuple[str, float, int]]) -> None:
    lines = played(moves)
    ledger = ledger_of(lines)
    span = max((line.at for line in lines), default=0) - min((line.at for line in lines), default=0)
    assert math.isclose(ledger.whole, span, rel_tol=1e-9, abs_tol=1e-3)
    assert all(seconds >= 0 for _, seconds in ledger.parts())


@settings(max_examples=150, deadline=None)
@given(MOVES)
def test_any_journal_has_incidents_that_add_up(moves: list[tuple[str, float, int]]) -> None:
    lines = played(moves)
    found = incidents_of(lines)
    assert [incident.number for incident in found] == list(range(1, len(found) + 1))
    for incident in found:
        assert incident.seconds_lost >= 0
        assert incident.steps_lost >= 0
        assert not (incident.open and incident.overtaken_by)


# --- steps and losses


def test_steps_are_laid_out_in_time_around_saves() -> None:
    run = Journal().start()
    run.pass_time(0.2)  # two steps
    called = run.now
    run.save(2, seconds=0.5)
    run.pass_time(0.3)  # three more, then the batch is written
    run.write(StepsDone(first=1, seconds=[0.1] * 5))
    done = steps_done(run.lines)
    assert [step.step for step in done] == [1, 2, 3, 4, 5]
    assert done[1].end == pytest.approx(called, abs=1e-3)
    assert done[2].start == pytest.approx(called + 0.5, abs=1e-3)
    assert ledger_of(run.lines).productive == pytest.approx(0.5, abs=1e-3)


def test_a_step_that_lies_around_a_save_keeps_its_length() -> None:
    run = Journal().start().pass_time(0.5)
    run.save(1, seconds=0.5)
    run.pass_time(0.5).write(StepsDone(first=1, seconds=[1.0]))
    (step,) = steps_done(run.lines)
    assert step.end - step.start == pytest.approx(1.5, abs=1e-3)
    ledger = ledger_of(run.lines)
    assert (ledger.productive, ledger.saving) == pytest.approx((1.0, 0.5), abs=1e-3)


def test_steps_never_reach_into_the_batch_before() -> None:
    run = Journal().start().steps(1, 5, batch=5)
    before = run.now
    run.pass_time(0.3).write(StepsDone(first=6, seconds=[0.2] * 3))  # says 0.6 seconds, and 0.3 have passed
    done = steps_done(run.lines)
    assert all(step.start >= before for step in done[5:])
    assert all(one.end <= other.start for one, other in itertools.pairwise(done))


def test_losses_are_given_per_attempt_with_what_was_done_again() -> None:
    first, second, third = losses_by_attempt(killed_and_corrupted().lines)
    assert [(one.attempt, len(one.points), one.kept) for one in (first, second, third)] == [
        (1, 27, 10),
        (2, 34, 40),
        (3, 20, None),
    ]
    assert first.points[0].loss == loss_of(1)
    assert [point.at for point in first.points] == sorted(point.at for point in first.points)


def test_a_loss_that_is_not_a_number_is_kept_and_one_that_is_missing_is_not() -> None:
    run = Journal().start().steps(1, 4, losses={2: math.nan, 3: None, 4: math.inf})
    (series,) = losses_by_attempt(run.lines)
    assert [point.step for point in series.points] == [1, 2, 4]
    assert math.isnan(series.points[1].loss)
    assert series.points[2].loss == math.inf
    assert losses_by_attempt(Journal().start().lines) == []


def test_only_rank_0_reports_steps() -> None:
    run = Journal().start().steps(1, 3)
    run.write(StepsDone(first=1, seconds=[0.1] * 3, loss=[9.0] * 3), "rank-1")
    (series,) = losses_by_attempt(run.lines)
    assert len(series.points) == 3
