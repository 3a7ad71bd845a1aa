"""How many restarts are left: counted over the whole history, refunded by progress only."""

from __future__ import annotations

from holdfast.policy.budgets import (
    BUDGETS,
    LONG_LAUNCH,
    MAX_FAILED_LAUNCHES,
    MAX_LAUNCHES,
    MAX_REGROUPS,
    MAX_REQUEUES,
    MOST_IDENTICAL,
    RERUNS,
    PastAttempt,
    episode,
    launch_refused,
    launches_without_progress,
    may_regroup,
    most_restarts,
    recent,
    restarts_after,
    restarts_left,
    restarts_without_progress,
)
from holdfast.policy.signs import Cause
from kit.harness import REPO


def past(
    number: int, launch: str = "a", outcome: str = "failed", step: int = 0, **more: object
) -> PastAttempt:
    cause = Cause.INFRASTRUCTURE if outcome == "failed" else ""
    return PastAttempt(
        number=number,
        launch=launch,
        outcome=outcome,
        highest_step=step,
        **{"cause": cause, **more},  # type: ignore[arg-type]
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


def test_preemption_uses_up_no_restart_but_is_counted_for_itself() -> None:
    history = [past(1), past(2, cause=Cause.PREEMPTION), past(3), past(4)]
    assert restarts_without_progress(history) == 2
    assert restarts_after(Cause.PREEMPTION, history) == 1
    assert restarts_after(Cause.INFRASTRUCTURE, history) == 2


def test_an_operator_forgives_what_was_before() -> None:
    history = [past(1), past(2), past(3), past(4)]
    assert restarts_without_progress(history, forgiven=3) == 1
    assert restarts_without_progress(history, forgiven=9) == 0
    assert restarts_after(Cause.INFRASTRUCTURE, history, forgiven=3) == 1
    assert [attempt.number for attempt in episode(history, forgiven=2)] == [3, 4]


def test_an_episode_begins_with_the_attempt_that_made_the_progress() -> None:
    history = [past(3, step=50), past(1, step=20), past(2, outcome="lost"), past(4, step=50)]
    assert [attempt.number for attempt in episode(history)] == [3, 4]


def test_a_window_forgets_what_is_older_and_counts_what_has_no_time() -> None:
    window = BUDGETS[Cause.PREEMPTION].window
    when = [1e9, 1e9 - window, 1e9 - window - 1, 0.0]
    history = [past(number, cause=Cause.PREEMPTION, at=at) for number, at in enumerate(when)]
    assert recent(Cause.PREEMPTION, history, now=1e9) == 3
    assert recent(Cause.PREEMPTION, history, now=0.0) == 4
    assert recent(Cause.DEVICE, history, now=1e9) == 0


def test_a_change_of_membership_is_no_restart_but_bounded() -> None:
    """Note 2 of torch's agent: a spare that keeps arriving would restart the group for ever."""
    history = [past(number, outcome="stopped") for number in range(1, MAX_REGROUPS + 1)]
    assert restarts_without_progress(history) == 0
    assert may_regroup(history)
    assert not may_regroup([*history, past(MAX_REGROUPS + 1, outcome="stopped")])


def test_an_attempt_that_finished_refunds_everything() -> None:
    """A launch that ended with 0 is no failure to count from, whatever it committed."""
    spent = [past(1, step=100), past(2, step=100), past(3, step=100)]
    done = past(4, "b", "finished", step=100)
    assert restarts_without_progress([*spent, done]) == 0
    assert episode([*spent, done]) == []
    again = [*spent, done, past(5, "c", step=100), past(6, "c", step=100)]
    assert restarts_without_progress(again) == 1
    assert [attempt.number for attempt in episode(again)] == [5, 6]


def test_a_run_that_was_sent_back_is_measured_by_what_it_reached_since() -> None:
    """Going back to step 11 of 1000 must not make all the way up again count for nothing."""
    before = [past(1, step=1000, saved=1000), past(2, step=1000)]
    ways = [past(n, f"l{n}", step=1000, saved=10 * n, started_with="x") for n in range(3, 60)]
    back = [*before, past(3, "l3", step=1000, saved=30, sent=True, started_with="x"), *ways[1:]]
    assert launch_refused(back, "x") == ""
    assert restarts_without_progress(back) == 0
    assert launch_refused([*before, *ways], "x"), "nobody has sent it: a lower rung's replay earns nothing"
    stuck = [*back, *launches(MAX_FAILED_LAUNCHES, first=60, step=1000, saved=590)]
    assert launch_refused(stuck, "x"), "it does not get on from there either"


def launches(count: int, outcome: str = "failed", **more: object) -> list[PastAttempt]:
    first = int(str(more.pop("first", 1)))
    told = {"started_with": "x", **more}
    return [past(number, f"l{number}", outcome, **told) for number in range(first, first + count)]  # type: ignore[arg-type]


def test_launches_of_the_same_thing_that_fail_in_a_row_are_bounded() -> None:
    row = launches(MAX_FAILED_LAUNCHES)
    assert launch_refused(row[:-1], "x") == ""
    why = launch_refused(row, "x")
    assert f"{MAX_FAILED_LAUNCHES} launches in a row" in why
    assert launch_refused(row, "y") == "", "a changed script is let in"
    assert launch_refused(row, "") == "", "nobody types as often by mistake"
    assert launch_refused(row, "x", forgiven=MAX_FAILED_LAUNCHES) == "", "an operator lets it in"
    assert launch_refused([*row, past(9, "m", started_with="y")], "x") == "", "something else was between"


def test_launches_that_make_progress_or_finish_end_the_row() -> None:
    row = launches(MAX_FAILED_LAUNCHES)
    for last in (past(50, "m", step=7, started_with="x"), past(50, "m", "finished", started_with="x")):
        assert launch_refused([*row, last], "x") == ""
    steps = [past(number, f"l{number}", step=number, started_with="x") for number in range(1, 60)]
    assert launch_refused(steps, "x") == "", "however often it fails"
    restarted = [past(1, step=7, started_with="x"), past(2, started_with="x"), past(3, started_with="x")]
    assert launches_without_progress(restarted, "x") == [], "the launch itself made it, before its restarts"


def test_launches_that_were_killed_or_preempted_have_the_patience_of_preemption() -> None:
    for gone in (
        launches(MAX_LAUNCHES, "lost"),
        launches(MAX_LAUNCHES, "stopped", exit_code=31),
        launches(MAX_LAUNCHES, cause=Cause.PREEMPTION),
    ):
        assert launch_refused(gone[:-1], "x") == ""
        assert launch_refused(gone, "x")
    assert BUDGETS[Cause.PREEMPTION].restarts == MAX_LAUNCHES
    assert MAX_FAILED_LAUNCHES == 1 + MAX_REQUEUES


def test_restarts_of_one_launch_are_one_launch() -> None:
    many = [past(number, "one", started_with="x") for number in range(1, 30)]
    assert launches_without_progress(many, "x") == [many]


def test_where_no_progress_was_ever_shown_a_launch_that_lasted_may_have_made_some() -> None:
    """A script that saves by itself and tells nobody: ended only by what ends any launch."""
    lasted = launches(MAX_LAUNCHES, seconds=LONG_LAUNCH)
    assert launch_refused(lasted[:-1], "x") == ""
    assert launch_refused(lasted, "x")
    known = [
        past(1, "first", step=5, started_with="x"),
        *launches(MAX_FAILED_LAUNCHES, first=2, seconds=LONG_LAUNCH),
    ]
    assert launch_refused(known, "x"), "this one does tell, and got nowhere"


def test_every_cause_has_a_budget_with_its_reason_and_the_bounds_follow_from_it() -> None:
    assert set(BUDGETS) == set(Cause)
    assert all(budget.why and 0 < budget.repeats <= budget.restarts for budget in BUDGETS.values())
    assert most_restarts(0) == 0
    assert most_restarts(3) == 3 + 20
    assert most_restarts(10**6) == 44 + 20, "however many are allowed"
    assert MOST_IDENTICAL == 4 > RERUNS


def test_the_page_has_the_budgets_of_the_code() -> None:
    page = " ".join((REPO / "docs" / "guides" / "recovery.md").read_text(encoding="utf-8").split())
    for cause, budget in BUDGETS.items():
        hourly = f", at most {budget.per_window} in an hour" if budget.window == 3600 else ""
        row = f"| {cause} | {budget.restarts}{hourly} | {budget.repeats} | {budget.why} |"
        assert row in page, f"docs/guides/recovery.md should have:\n{row}"
    assert f"`launch.max_restarts`, {most_restarts(10**6) - 20}) + 20 times" in page
    assert f"repeats a cycle that was run {MOST_IDENTICAL} times" in page
    assert f"After {MAX_FAILED_LAUNCHES} launches in a row that failed" in page
    assert f"or {MAX_LAUNCHES} whatever ended them" in page
