"""Queueing a job again, and stopping ahead of its time limit: when, in which order, and when never."""

from __future__ import annotations

import functools
import time
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.cluster import slurm, time_limit
from holdfast.cluster.slurm import job_found
from holdfast.cluster.time_limit import TimeLimit, last_stop, requeue_at_the_end
from holdfast.config.settings import Settings
from holdfast.errors import ExitCode, StorageError
from holdfast.journal import JournalLine
from holdfast.journal.events import SaveCommitted
from holdfast.journal.events.cluster import RequeueAsked
from holdfast.journal.events.run import StopAgreed, StopAsked
from holdfast.journal.writer import JournalWriter
from holdfast.launch import context as launch_context
from holdfast.launch.context import Scheduler
from holdfast.policy.budgets import MAX_REQUEUES
from holdfast.policy.requests import Grace, JobFacts, Source, StopRequest, after_stop, by_decision
from holdfast.record import operator
from holdfast.record.directory import ControlDirectory
from holdfast.record.operator import record_requeue, requeues_without_progress
from kit.harness import wait_until
from kit.nodes.fake_scontrol import (
    ASKED,
    AT_THE_LIMIT,
    JOB,
    PREEMPTED,
    Fake,
    a_run,
    changed,
    limit_in,
)
from kit.runs import events_in

# --- queueing again


def test_a_job_at_its_time_limit_is_queued_again_with_the_reason_first(fake_scontrol: Fake) -> None:
    """Lightning#20542: a stop ahead of the time limit comes back."""
    asked = time_limit.requeue_after_stop(JOB, "auto", AT_THE_LIMIT, exclude=["n2"], stalled=0)
    assert asked.asked
    assert asked.exclude == ["n2"]
    assert fake_scontrol.calls == [
        "update JobId=1 Comment=lr=3 JobState=FAILED the Requeue=0 one | holdfast: queued again: the time "
        "limit: Slurm ends job 1 in 60 s; without n2",
        "requeue 1",
        "update JobId=1 ExcNodeList=n7,n8,n2",
    ]


def test_a_comment_that_is_refused_is_written_once_the_job_waits_again(fake_scontrol: Fake) -> None:
    fake_scontrol.program(
        f'[ "$1" != requeue ] || touch "{fake_scontrol.home}/again"\n'
        f'case "$*" in *Comment=*) [ -f "{fake_scontrol.home}/again" ] || exit 1;; esac'
    )
    asked = time_limit.requeue_by_decision(JOB, "auto", "a bad node", exclude=[])
    assert asked.asked
    assert [call.split("=")[0] for call in fake_scontrol.calls] == ["requeue 1", "update JobId"]
    assert "holdfast: queued again: a bad node" in fake_scontrol.calls[1]


def test_our_part_of_a_comment_is_replaced_and_the_users_is_kept() -> None:
    once = time_limit.comment("mine", "the first time", [])
    assert once == "mine | holdfast: queued again: the first time"
    assert time_limit.comment(once, "again", ["n1"]) == "mine | holdfast: queued again: again; without n1"
    assert time_limit.comment("holdfast: queued again: x", "y", []) == "holdfast: queued again: y"


@pytest.mark.parametrize(
    ("fields", "exclude", "told", "said"),
    [
        ({}, ["n1", "elsewhere", "n2.2"], ["n1"], ""),
        ({"ExcNodeList": "n1"}, ["n1"], [], ""),
        ({"ExcNodeList": "(null)", "NumNodes": "3"}, ["n1", "n2"], [], "2 of the 3 nodes"),
        ({"ReqNodeList": "n[1-2]"}, ["n1"], [], "--nodelist asks for n1"),
    ],
)
def test_a_node_is_excluded_only_if_the_job_can_start_without(
    fake_scontrol: Fake, fields: dict[str, str], exclude: list[str], told: list[str], said: str
) -> None:
    fake_scontrol.answer(changed(**fields))
    asked = time_limit.requeue_by_decision(JOB, "auto", "why", exclude=exclude)
    assert asked.asked
    assert asked.exclude == told
    assert said in asked.reason
    assert any("ExcNodeList" in call for call in fake_scontrol.calls) == bool(told)


def test_a_refused_requeue_is_told(fake_scontrol: Fake) -> None:
    fake_scontrol.program(
        '[ "$1" != requeue ] || { echo "Requested operation is presently disabled" >&2; exit 1; }'
    )
    asked = time_limit.requeue_by_decision(JOB, "auto", "why", exclude=["n1"])
    assert not asked.asked
    assert asked.refused
    assert "presently disabled" in asked.reason
    assert not any("ExcNodeList" in call for call in fake_scontrol.calls)


# As they were seen on a real Slurm 22.05, each just after its SIGTERM.
PREEMPTED_WITH_GRACE = changed(PreemptTime="2026-11-15T18:25:00", EndTime="2026-11-15T18:25:20")
PREEMPTED_REQUEUED = changed(JobState="COMPLETING", Restarts="3")
PREEMPTED_CANCELLED = changed(
    JobState="COMPLETING", PreemptTime="2026-11-15T18:25:20", EndTime="2026-11-15T18:25:20"
)
CANCELLED = changed(JobState="COMPLETING", EndTime="2026-11-15T18:25:10")
CANCELLED_IN_GRACE = changed(
    JobState="COMPLETING", PreemptTime="2026-11-15T18:25:00", EndTime="2026-11-15T18:25:10"
)
TIMED_OUT = changed(JobState="COMPLETING", Reason="TimeLimit", EndTime="2026-11-15T18:29:48")


@pytest.mark.parametrize(
    ("record", "asked", "said"),
    [
        (PREEMPTED_WITH_GRACE, True, "preempted"),
        (PREEMPTED_CANCELLED, True, "preempted"),
        (TIMED_OUT, True, "time limit"),
        (PREEMPTED_REQUEUED, False, "by itself"),
        (CANCELLED, False, "cancelled"),
        (CANCELLED_IN_GRACE, False, "cancelled"),
        (changed(), False, "does not say that the job is being preempted"),
        (PREEMPTED_WITH_GRACE.replace("Requeue=1", "Requeue=0"), False, "--requeue"),
    ],
    ids=[
        "grace",
        "cancel mode",
        "limit",
        "requeue mode",
        "scancel",
        "scancel in grace",
        "signal",
        "no-requeue",
    ],
)
def test_after_sigterm_a_job_comes_back_only_from_preemption(
    fake_scontrol: Fake, record: str, asked: bool, said: str
) -> None:
    fake_scontrol.answer(record)
    found = time_limit.requeue_after_stop(JOB, "auto", PREEMPTED, exclude=[], stalled=0)
    assert found.asked == asked
    assert said in found.reason
    assert ("requeue 1" in fake_scontrol.calls) == asked


@pytest.mark.parametrize("record", [CANCELLED, CANCELLED_IN_GRACE], ids=["plain", "in grace"])
def test_a_job_that_is_cancelled_while_it_saves_at_its_limit_stays_cancelled(
    fake_scontrol: Fake, record: str
) -> None:
    """scancel in the middle of the save: Slurm would bring even a cancelled job back."""
    fake_scontrol.answer(record)
    found = time_limit.requeue_after_stop(JOB, "auto", AT_THE_LIMIT, exclude=[], stalled=0)
    assert not found.asked
    assert fake_scontrol.calls == []


def test_what_a_person_asked_for_is_not_even_asked_of_slurm(fake_scontrol: Fake) -> None:
    for source, name in (
        (Source.STOP_FILE, ""),
        (Source.OPERATOR, ""),
        (Source.STRAGGLER, ""),
        (Source.SIGNAL, "SIGINT"),
        (Source.SIGNAL, "SIGHUP"),
    ):
        request = StopRequest(source=source, detail="somebody", signal=name)
        found = time_limit.requeue_after_stop(JOB, "auto", request, exclude=[], stalled=0)
        assert not found.asked
    assert fake_scontrol.questions == 0
    assert fake_scontrol.calls == []


_SIGNALS = ["", "SIGTERM", "SIGUSR1", "SIGUSR2", "SIGINT", "SIGHUP", "SIGXCPU"]
requests = st.builds(
    lambda source, name: StopRequest(source=source, detail="d", signal=name if source == "signal" else ""),
    st.sampled_from(list(Source)),
    st.sampled_from(_SIGNALS),
)
facts = st.builds(
    JobFacts,
    allowed=st.sampled_from([True, False, None]),
    queued_again=st.booleans(),
    ending=st.booleans(),
    preempted=st.booleans(),
    timed_out=st.booleans(),
)


@given(st.sampled_from(["auto", "never"]), requests, st.none() | facts, st.integers(0, 9))
def test_no_job_comes_back_unasked_or_against_its_will(
    setting: str, request: StopRequest, known: JobFacts | None, count: int
) -> None:
    verdict = after_stop(setting, request, known, count)
    assert verdict.reason
    if not verdict.ask:
        return
    assert setting == "auto"
    assert known is not None
    assert known.allowed
    assert not known.queued_again
    assert not known.ending or known.preempted or known.timed_out
    assert request.source in (Source.TIME_LIMIT, Source.SIGNAL)
    assert request.signal not in ("SIGINT", "SIGHUP")
    assert request.signal != "SIGTERM" or known.preempted or known.timed_out
    assert count < MAX_REQUEUES
    assert by_decision(setting, "why", known, count).ask


@given(st.sampled_from(["time_limit", "SIGUSR1", "SIGUSR2"]), st.integers(0, MAX_REQUEUES - 1), st.booleans())
def test_the_schedulers_own_stop_comes_back_whenever_the_job_may(
    what: str, count: int, preempted: bool
) -> None:
    source = Source.TIME_LIMIT if what == "time_limit" else Source.SIGNAL
    request = StopRequest(source=source, detail="d", signal="" if source is Source.TIME_LIMIT else what)
    assert after_stop("auto", request, JobFacts(allowed=True, preempted=preempted), count).ask


def test_five_requeues_without_progress_are_the_last() -> None:
    assert after_stop("auto", AT_THE_LIMIT, JobFacts(allowed=True), MAX_REQUEUES - 1).ask
    verdict = after_stop("auto", AT_THE_LIMIT, JobFacts(allowed=True), MAX_REQUEUES)
    assert not verdict.ask
    assert "without progress" in verdict.reason
    assert by_decision("auto", "why", JobFacts(allowed=True), MAX_REQUEUES) == verdict


# --- the time limit


def test_a_stop_is_asked_for_once_the_lead_is_reached(fake_scontrol: Fake) -> None:
    """E3: preempt_time."""
    fake_scontrol.answer(limit_in(100))
    limit = TimeLimit(JOB, 60)
    ends_at = limit.first_answer(10)
    assert ends_at is not None
    assert ends_at == limit.ends_at
    now = ends_at - 61
    assert limit.due(now) is None
    request = wait_until(lambda: limit.due(now + 2), 10, "the request")
    limit.close()
    assert request.source is Source.TIME_LIMIT
    assert request.lead == 59
    assert request.node == "n1"
    assert "job 1 in 59 s" in request.detail


def test_an_end_that_slurm_does_not_know_at_first_is_asked_for_soon(
    fake_scontrol: Fake, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(time_limit, "SOONEST", 0.05)
    fake_scontrol.answer(changed(EndTime="Unknown"))
    limit = TimeLimit(JOB, 60)
    wait_until(lambda: fake_scontrol.questions >= 2, 10, "Slurm is asked again")
    fake_scontrol.answer(limit_in(100))
    wait_until(lambda: limit.ends_at, 10, "the end is known")
    limit.close()


def test_a_job_without_end_is_not_asked_about_for_ever(
    fake_scontrol: Fake, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(time_limit, "SOONEST", 0.001)
    monkeypatch.setattr(time_limit, "TRIES", 2)
    fake_scontrol.answer(changed(EndTime="Unknown"))
    limit = TimeLimit(JOB, 60)
    wait_until(lambda: fake_scontrol.questions >= 2, 10, "Slurm is asked a few times")
    limit._ask.wait(0.3)  # nothing to wait for: that it is not asked again
    limit.close()
    assert fake_scontrol.questions == 2


def test_the_nearer_the_end_the_sooner_slurm_is_asked_again(
    fake_scontrol: Fake, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Somebody may move the end of a job nearer: what was learnt a minute ago is then too old."""
    monkeypatch.setattr(time_limit, "SOONEST", 0.05)
    fake_scontrol.answer(limit_in(3))
    limit = TimeLimit(JOB, 1)
    wait_until(lambda: fake_scontrol.questions >= 3, 10, "Slurm is asked again and again")
    limit.close()


def test_a_limit_that_was_extended_meanwhile_does_not_stop_the_run(fake_scontrol: Fake) -> None:
    fake_scontrol.answer(limit_in(100))
    limit = TimeLimit(JOB, 60)
    wait_until(lambda: limit.ends_at, 10, "Slurm has answered")
    assert limit.ends_at is not None
    then = limit.ends_at - 50
    fake_scontrol.answer(limit_in(5000))
    assert limit.due(then) is None
    wait_until(lambda: fake_scontrol.questions >= 2, 10, "Slurm is asked again before the stop")
    wait_until(lambda: limit.ends_at and limit.ends_at > then + 1000, 10, "the new limit is known")
    assert limit.due(then) is None
    limit.close()


def test_a_limit_that_was_lifted_meanwhile_does_not_stop_the_run(fake_scontrol: Fake) -> None:
    """`scontrol update TimeLimit=UNLIMITED`; not the same as an end that Slurm does not tell."""
    fake_scontrol.answer(limit_in(100))
    limit = TimeLimit(JOB, 60)
    wait_until(lambda: limit.ends_at, 10, "Slurm has answered")
    assert limit.ends_at is not None
    then = limit.ends_at - 50
    fake_scontrol.answer(limit_in(364.9 * 86_400, of=365 * 86_400))
    assert limit.due(then) is None
    wait_until(lambda: limit.ends_at is None, 10, "it is known that there is none any more")
    assert limit.due(then) is None
    limit.close()


def test_a_slurm_that_no_longer_answers_does_not_hold_the_stop_up(fake_scontrol: Fake) -> None:
    fake_scontrol.answer(limit_in(100))
    limit = TimeLimit(JOB, 60)
    wait_until(lambda: limit.ends_at, 10, "Slurm has answered")
    assert limit.ends_at is not None
    fake_scontrol.program("sleep 60")
    now = limit.ends_at - 60
    assert limit.due(now) is None
    assert limit.due(now + 4) is None
    request = limit.due(now + 6)
    began = time.monotonic()
    limit.close()
    assert request is not None
    assert request.lead == 54
    assert time.monotonic() - began < 5


def test_the_lead_takes_at_most_half_of_a_short_job(fake_scontrol: Fake) -> None:
    """A job of a minute with a lead of a minute would stop at once, be queued again, and so for ever."""
    fake_scontrol.answer(limit_in(59, of=60))
    limit = TimeLimit(JOB, 60)
    wait_until(lambda: limit.ends_at, 10, "Slurm has answered")
    assert limit.ends_at is not None
    assert limit.lead == 30
    assert limit.due(limit.ends_at - 31) is None
    limit.close()


@pytest.mark.parametrize("lead", [0.0, 60.0])
def test_no_lead_or_no_end_is_no_stop(fake_scontrol: Fake, lead: float) -> None:
    fake_scontrol.answer(limit_in(10) if lead == 0 else changed(EndTime="Unknown"))
    limit = TimeLimit(JOB, lead)
    wait_until(lambda: fake_scontrol.questions, 10, "Slurm is asked")
    assert limit.due(time.time() + 1_000_000) is None
    limit.close()


def test_the_times_of_a_jobs_next_life_are_not_taken_for_this_ones(fake_scontrol: Fake) -> None:
    fake_scontrol.answer(limit_in(10).replace("JobState=RUNNING", "JobState=COMPLETING"))
    limit = TimeLimit(JOB, 60)
    wait_until(lambda: fake_scontrol.questions, 10, "Slurm is asked")
    limit.close()
    assert limit.ends_at is None


# --- a batch script that asks at its end


@pytest.mark.parametrize(
    "ended",
    [
        changed(JobState="COMPLETING"),
        changed(JobState="PENDING", Restarts="3"),
        changed(JobState="CANCELLED", Reason="None"),
    ],
)
def test_a_job_that_slurm_ends_without_grace_has_killwait_and_no_more(
    fake_scontrol: Fake, ended: str
) -> None:
    fake_scontrol.answer(limit_in(600))
    fake_scontrol.configure(kill_wait=5)
    graces: list[Grace] = []
    left: list[float] = []
    limit = TimeLimit(JOB, 60, on_grace=graces.append, on_ending=left.append)
    limit.first_answer(10)
    assert graces == [Grace(5.0, "KillWait")]
    assert limit.grace == graces[0]
    fake_scontrol.answer(ended)
    began = time.time()
    limit.ask_again()
    wait_until(lambda: left, 10, "it is told that Slurm ends the job")
    assert limit.ends_at is not None
    assert began + 4.9 < limit.ends_at < began + 5.5
    assert left[0] <= 5.0
    assert limit.due(time.time()) is None, "it is no time limit: who sent the signal is another question"
    limit.close()


def test_a_sigterm_that_slurm_did_not_send_leaves_the_time_there_was(fake_scontrol: Fake) -> None:
    fake_scontrol.answer(limit_in(600))
    fake_scontrol.configure(kill_wait=5, grace_time=30)
    limit = TimeLimit(JOB, 60, on_ending=lambda seconds: pytest.fail(f"{seconds} s are left"))
    limit.first_answer(10)
    assert limit.grace == Grace(30.0, "GraceTime of partition low")
    asked = fake_scontrol.questions
    limit.ask_again()
    wait_until(lambda: fake_scontrol.questions > asked, 10, "Slurm is asked again")
    limit.close()
    assert limit.ends_at is not None
    assert limit.ends_at > time.time() + 500


def saved(step: int, tier: str = "global") -> SaveCommitted:
    return SaveCommitted(
        checkpoint="c", step=step, parent=None, bytes=1, files=1, seconds=1, blocked_seconds=0, tier=tier
    )


def test_the_script_asks_for_a_run_that_nobody_asked_for(fake_scontrol: Fake, tmp_path: Path) -> None:
    run = a_run(tmp_path / "run", ASKED, saved(10), saved(30, tier="local"))
    asked = requeue_at_the_end(JOB, "auto", 31, run, [])
    assert asked.asked
    assert "requeue 1" in fake_scontrol.calls
    asked = events_in(run, RequeueAsked)
    assert [event.asked for event in asked] == [True]
    control = ControlDirectory.open(run)
    assert requeues_without_progress(control, 10) == 1, "the launcher counts it too"
    assert requeues_without_progress(control, 11) == 0
    assert not requeue_at_the_end(JOB, "auto", 31, run, []).asked  # not twice
    assert fake_scontrol.calls.count("requeue 1") == 1


@pytest.mark.parametrize(
    ("code", "events"),
    [
        (0, [ASKED]),
        (1, [ASKED]),
        (137, [ASKED]),
        (31, []),
        (31, [StopAsked(source="operator", detail="ada: enough")]),
        (31, [StopAsked(source="a newer one", detail="?")]),
        (31, [ASKED, RequeueAsked(job="1", asked=False, reason="slurm.requeue = never")]),
        (31, [job_found(JOB, None, "never"), ASKED]),
        (27, [job_found(JOB, None, "never")]),
    ],
)
def test_the_script_never_asks_against_what_the_run_decided(
    fake_scontrol: Fake, tmp_path: Path, code: int, events: list[object]
) -> None:
    asked = requeue_at_the_end(JOB, "auto", code, a_run(tmp_path / "run", *events), [])
    assert not asked.asked
    assert asked.reason
    assert fake_scontrol.calls == []


def test_the_script_asks_after_the_loss_of_the_store_but_not_for_ever(
    fake_scontrol: Fake, tmp_path: Path
) -> None:
    """Whoever asked before: one count of them, which an operator may reset."""
    for code in (30, 31):
        run = a_run(tmp_path / str(code), ASKED, saved(10))
        control = ControlDirectory.open(run)
        control.attempt(1).mkdir(parents=True)
        for _ in range(MAX_REQUEUES):
            record_requeue(control, 1, 10, JOB.label)
        asked = requeue_at_the_end(JOB, "auto", code, run, [])
        assert not asked.asked
        assert "without progress" in asked.reason
        assert requeues_without_progress(control, 10) == MAX_REQUEUES, "what was not asked does not count"
        operator.reset_budget(control, "cable", "alice")
        journal = JournalWriter(control.journal, "agent-n1", 2)
        journal.write(ASKED)
        journal.close()
        assert requeue_at_the_end(JOB, "auto", code, run, []).asked
    assert fake_scontrol.calls.count("requeue 1") == 2


def test_a_requeue_that_slurm_did_not_answer_counts(
    fake_scontrol: Fake, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A busy controller may have done it all the same: uncounted, such a job would come back for ever."""
    monkeypatch.setattr(slurm, "requeue", functools.partial(slurm.requeue, timeout=0.3))
    fake_scontrol.program('[ "$1" != requeue ] || exec sleep 60')
    run = a_run(tmp_path / "run", ASKED)
    asked = requeue_at_the_end(JOB, "auto", 31, run, [])
    assert not asked.asked
    assert asked.refused
    assert "not known whether" in asked.reason
    assert requeues_without_progress(ControlDirectory.open(run), 0) == 1


def test_a_script_without_a_run_directory_asks_nothing_after_a_stop(
    fake_scontrol: Fake, tmp_path: Path
) -> None:
    assert not requeue_at_the_end(JOB, "auto", 31, None, []).asked
    assert not requeue_at_the_end(JOB, "auto", 31, tmp_path / "nowhere", []).asked
    assert fake_scontrol.calls == []


def line(attempt: int, body: object) -> JournalLine:
    return JournalLine(v=1, at=float(attempt), who="a", attempt=attempt, seq=0, body=body)  # type: ignore[arg-type]


def test_only_the_newest_attempts_stop_counts() -> None:
    old = [line(1, ASKED), line(1, RequeueAsked(job="1", asked=True, reason="r"))]
    assert last_stop([*old, line(2, StopAgreed(step=1, after=0.1))]).request is None
    found = last_stop([*old, line(2, StopAsked(source="signal", detail="SIGTERM on n2"))])
    assert found.request is not None
    assert found.request.signal == "SIGTERM"
    assert found.settled is None


# --- storage that fails


def full(*args: object, **kwargs: object) -> int:
    raise StorageError("cannot write requeues: No space left on device")


def test_a_run_whose_storage_failed_comes_back_but_not_for_ever(fake_scontrol: Fake, tmp_path: Path) -> None:
    run = a_run(tmp_path / "run", saved(10))
    control = ControlDirectory.open(run)
    assert requeue_at_the_end(JOB, "auto", ExitCode.STORAGE_FAILED, run, []).asked
    assert requeues_without_progress(control, 10) == 1
    for _ in range(MAX_REQUEUES):
        record_requeue(control, 1, 10, JOB.label)
    last = a_run(tmp_path / "run", RequeueAsked(job="1", asked=True, reason="before"))
    assert not requeue_at_the_end(JOB, "auto", ExitCode.STORAGE_FAILED, last, []).asked
    assert fake_scontrol.calls.count("requeue 1") == 1


@pytest.mark.parametrize("restarts", [MAX_REQUEUES - 1, MAX_REQUEUES])
def test_where_nothing_can_be_counted_slurms_own_count_bounds_it(
    fake_scontrol: Fake, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, restarts: int
) -> None:
    """On a full disk no record of the requeue can be made: unbounded, the job would come back for ever."""
    job = msgspec.structs.replace(JOB, restarts=restarts)
    fake_scontrol.answer(changed(Restarts=str(restarts)))
    monkeypatch.setattr(time_limit, "record_requeue", full)
    asked = requeue_at_the_end(job, "auto", ExitCode.STORAGE_FAILED, a_run(tmp_path / "run", saved(10)), [])
    assert asked.asked == (restarts < MAX_REQUEUES)
    assert ("requeue 1" in fake_scontrol.calls) == asked.asked
    assert asked.asked or "cannot be counted" in asked.reason


@pytest.mark.parametrize("code", [ExitCode.STORAGE_FAILED, ExitCode.STORE_LOST])
def test_a_run_that_cannot_even_be_read_comes_back_if_that_is_why_it_ended(
    fake_scontrol: Fake, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: ExitCode
) -> None:
    monkeypatch.setattr(time_limit, "requeues_without_progress", full)
    asked = requeue_at_the_end(JOB, "auto", code, a_run(tmp_path / "run", saved(10)), [])
    assert asked.asked == (code is ExitCode.STORAGE_FAILED)


def test_a_person_who_asked_for_the_stop_is_heard_though_its_save_failed(
    fake_scontrol: Fake, tmp_path: Path
) -> None:
    run = a_run(tmp_path / "run", StopAsked(source="operator", detail="ada: enough"))
    asked = requeue_at_the_end(JOB, "auto", ExitCode.STORAGE_FAILED, run, [])
    assert not asked.asked
    assert fake_scontrol.calls == []


@pytest.mark.parametrize("restarts", [1, MAX_REQUEUES])
def test_the_agent_asks_at_the_end_of_a_launch_whose_storage_failed(
    fake_scontrol: Fake, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, restarts: int
) -> None:
    fake_scontrol.answer(changed(Restarts=str(restarts)))
    control = ControlDirectory.open(a_run(tmp_path / "run", saved(10)))
    scheduler = Scheduler(control, Settings(), msgspec.structs.replace(JOB, restarts=restarts))
    monkeypatch.setattr(launch_context, "requeues_without_progress", full)
    scheduler.storage_failed(1, "cannot write end.json: No space left on device", 10, [])
    assert fake_scontrol.calls == [], "only when nothing else is left to do"
    told: list[str] = []
    scheduler.part(told.append)
    assert ("requeue 1" in fake_scontrol.calls) == (restarts < MAX_REQUEUES)
    assert ("was not asked" in told[0]) == (restarts >= MAX_REQUEUES)
