"""The account of an incident: five answers, made once, and the same numbers wherever they are shown."""

from __future__ import annotations

import signal
from dataclasses import replace
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.account.answers import account_of_failure, account_of_stop
from holdfast.account.incidents import done_of, headline, incidents_of, stops_of
from holdfast.account.remarks import remarks_of
from holdfast.account.words import (
    Story,
    back_line,
    closing_line,
    cost_of,
    five_answers,
    incident_line,
    incident_text,
    short_advice,
    stop_text,
)
from holdfast.base.lines import duration
from holdfast.checkpoint.format.manifest import CheckpointName
from holdfast.errors import ExitCode
from holdfast.journal.events import (
    Account,
    AttemptEnded,
    Resumed,
    RungRejected,
    StepRejected,
    StepsDone,
    StopAsked,
    StopSaved,
    StragglerFound,
    StragglersReported,
)
from holdfast.policy.budgets import PastAttempt
from holdfast.policy.evidence import KERNEL_OOM, Hang, Loss, LostNode, Raised
from holdfast.policy.placement import Exclusion
from holdfast.policy.recovery import Decision, Situation
from holdfast.policy.requests import Source, StopRequest
from holdfast.policy.signs import Action, Cause
from holdfast.record.attempts import FailureRecord
from kit.journals import ALTERED, Journal, killed_and_corrupted, name_of

GLOO = "RuntimeError: Connection closed by peer [127.0.0.1]:1"


def ended(rank: int, code: int, message: str = "", where: str = "", **more: Any) -> FailureRecord:
    errors = [Raised(types=[message.partition(":")[0]], message=message, where=where)] if code > 0 else []
    return FailureRecord(
        rank=rank, node="node-b", pid=7, exit_code=code, at=1.0, message=message, errors=errors, **more
    )


def told(
    root: FailureRecord | None,
    cause: Cause = Cause.INFRASTRUCTURE,
    *,
    action: Action = Action.RESTART,
    code: int = 0,
    last: int | None = 24,
    rungs: tuple[int, ...] = (20, 10),
    others: tuple[FailureRecord, ...] = (),
    decided: dict[str, Any] | None = None,
    **more: Any,
) -> Account:
    failed = PastAttempt(number=1, launch="l", outcome="failed", cause=cause, last_step=last)
    situation = Situation(attempt=failed, max_restarts=3, rungs=[name_of(step) for step in rungs])
    fields = {"evidence": ["cause: x", "seen"], **(decided or {})}
    decision = Decision(action=action, exit_code=code, reason="why not", restarts_left=2, **fields)
    failures = [*others] if root is None else [root, *others]
    return account_of_failure(situation, decision, root, failures, **more)


# --- the answers --------------------------------------------------------------------------------------------


def test_a_killed_rank() -> None:
    account = told(ended(1, -9), others=(ended(0, 1, GLOO),))
    assert headline(account) == "rank 1 on node-b was killed by SIGKILL in step 25"
    assert "comes from outside" in account.why[0]
    assert account.done == "restarting from step 20: 4 steps to redo (restart 1 of 3)"
    assert account.next == "nothing to do"
    assert any("rank 0 ended only because it lost that one" in text for text in account.why)
    assert not account.ends


def test_a_script_that_raises_is_told_by_its_own_line() -> None:
    root = ended(1, 1, "ValueError: no luck", "train.py:44 in __getitem__")
    account = told(root, Cause.JOB, action=Action.STOP, code=ExitCode.BUDGET_SPENT)
    assert account.what == "failed in step 25 with ValueError: no luck"
    assert account.next == "mend train.py:44 in __getitem__, then run the same command"
    assert account.ends
    text = incident_text(account, "runs/a")
    assert "saved up to step 20, steps 21–24 are lost" in text
    assert "more: holdfast why runs/a" in text
    going_on = told(root, Cause.JOB)
    assert going_on.next == "nothing to do, unless it comes back: mend train.py:44 in __getitem__"


def test_out_of_memory_is_the_kernels_word() -> None:
    account = told(ended(1, -9, KERNEL_OOM), Cause.JOB, action=Action.STOP, code=1)
    assert "was killed by the kernel" in account.what
    assert "out-of-memory counter" in account.why[0]
    assert account.next.startswith("use less memory")


def test_a_rank_that_stands_still_and_not_the_one_that_waits() -> None:
    waiting = Hang(
        rank=0, at=100.0, node="a", section="step", seconds=10, limit=5, missing=[3], missing_nodes=["b"]
    )
    account = told(None, Cause.HANG, hangs=[waiting])
    assert headline(account) == (
        "rank 3 on b stood still in step 25 for 10 s (5 s are allowed); rank 0 waited for it"
    )
    assert account.began == 90.0, "the time that it stood still counts as lost"


def test_a_lost_node_and_what_is_kept_out() -> None:
    lost = LostNode(node="b", how=Loss.CLOSED, detail="its connection was closed")
    excluded = {"exclude": [Exclusion("b", None, "lost")], "spares": ["c"]}
    account = told(None, action=Action.EXCLUDE, lost=[lost], decided=excluded)
    assert headline(account) == "node b was lost in step 25: its connection was closed"
    assert account.done.startswith("restarting without b on the spare c from step 20")
    assert "have b looked at" in account.next


@pytest.mark.parametrize(
    ("rungs", "last", "avoid", "expected"),
    [
        ((), 24, [], "restarting from the beginning, as nothing was saved yet: 24 steps to redo"),
        ((), None, [], "restarting from the beginning, as nothing was saved yet"),
        ((20,), 20, [], "restarting from step 20: nothing to redo"),
        ((20, 10), 24, [name_of(20)], "restarting from step 10: 14 steps to redo"),
    ],
)
def test_where_it_goes_on(rungs: tuple[int, ...], last: int | None, avoid: list[str], expected: str) -> None:
    account = told(ended(1, -9), rungs=rungs, last=last, decided={"avoid": avoid})
    assert account.done == f"{expected} (restart 1 of 3)"


@given(
    cause=st.sampled_from(Cause),
    action=st.sampled_from(Action),
    code=st.integers(-70, 300),
    message=st.text(max_size=600),
    where=st.text(max_size=40),
    last=st.none() | st.integers(0, 10**9),
    rungs=st.lists(st.integers(0, 10**7), max_size=3),
    root=st.booleans(),
    left=st.booleans(),
)
def test_every_answer_is_there_and_no_terminal_obeys_any(
    cause: Cause, action: Action, code: int, message: str, where: str, last: int | None, rungs: list[int],
    root: bool, left: bool,
) -> None:  # fmt: skip
    record = ended(1, code, message, where, left=left) if root else None
    account = told(record, cause, action=action, code=22, last=last, rungs=tuple(rungs), detail=message)
    assert all([account.who, account.what, account.why, account.done, account.next])
    lines = [headline(account), incident_line(account), *incident_text(account, "r").split("\n")]
    assert all(line.isprintable() for line in lines)
    assert sum(map(len, lines)) < 20_000


def test_a_network_adapter_that_failed_is_what_to_look_at() -> None:
    named = {"evidence": ["check the network adapter mlx5_3:1 on node-b"]}
    account = told(ended(1, 1, "RuntimeError: ibv_poll_cq error"), decided=named)
    assert account.next == "check the network adapter mlx5_3:1 on node-b; the run itself needs nothing"
    account = told(ended(1, 1, "RuntimeError: x"), action=Action.STOP, code=22, decided=named)
    assert account.next == "check the network adapter mlx5_3:1 on node-b, then run the same command"


# --- one set of numbers -------------------------------------------------------------------------------------


def account_of(attempt: int, **more: Any) -> Account:
    return Account(
        attempt=attempt,
        cause="hang",
        who="rank 1 on a",
        what="stood still",
        why=["because"],
        done="restarting from step 20",
        next="nothing to do",
        **more,
    )


def test_a_hang_costs_the_time_in_which_nothing_moved() -> None:
    journal = Journal().start().steps(1, 20)
    journal.save(20)
    journal.steps(21, 24)
    stood = journal.now
    journal.pass_time(10.0)
    journal.write(account_of(1, step=24, began=stood), "agent-a")
    journal.end("failed").start(resume=(name_of(20), 20)).steps(21, 30)
    (incident,) = incidents_of(journal.lines)
    assert incident.at == stood
    assert incident.seconds_lost > 10.0
    assert incident.steps_lost == 4
    assert ("cost", f"{incident.seconds_lost:.1f} s") == (
        five_answers(incident)[-2].question,
        five_answers(incident)[-2].text.partition(": ")[0],
    )


def test_steps_that_rank_0_could_not_journal_count_too() -> None:
    journal = Journal().start().steps(1, 20)
    journal.save(20)
    journal.steps(21, 22)
    journal.write(account_of(1, step=24), "agent-a")
    journal.end("failed").start(resume=(name_of(20), 20)).steps(21, 30)
    (incident,) = incidents_of(journal.lines)
    assert (incident.failed_at_step, incident.steps_lost) == (24, 4)


# --- the story ----------------------------------------------------------------------------------------------


def test_refusals_the_resume_and_being_back_are_told_once() -> None:
    story, journal = Story(), Journal().start().steps(1, 24)
    assert [story.line(line) for line in journal.lines if story.line(line)] == [], "a first start is no story"
    story.fell(account_of(1, step=24))
    again = Journal()
    again.attempt = 2
    refusal = again.write(RungRejected(checkpoint=name_of(20), step=20, reasons=[ALTERED]))
    text = story.line(refusal)
    assert text == f"the checkpoint at step 20 ({name_of(20)}) was refused: {ALTERED}"
    assert story.line(refusal) is None
    resumed = again.write(Resumed(checkpoint=name_of(10), step=10, seconds=0.1))
    assert story.line(resumed) == f"goes on from step 10, the newest that is sound ({name_of(10)}, verified)"
    assert story.is_back(again.write(StepsDone(first=11, seconds=[0.1] * 13))) is None
    assert story.is_back(again.write(StepsDone(first=24, seconds=[0.1]))) is not None
    assert story.is_back(again.write(StepsDone(first=25, seconds=[0.1]))) is None, "only once"


def test_an_end_is_not_followed() -> None:
    story = Story()
    story.fell(account_of(1, step=24, exit_code=22))
    later = Journal()
    later.attempt = 2
    assert story.is_back(later.write(StepsDone(first=1, seconds=[0.1] * 40))) is None


def test_the_closing_line() -> None:
    journal = killed_and_corrupted()
    found = incidents_of(journal.lines)
    text = closing_line(found, remarks_of(journal.lines, found), 60, "runs/a")
    assert text.startswith("finished: 60 steps, ")
    assert text.endswith("report: holdfast journal runs/a --report report.html")
    assert "nothing to do" in text
    assert closing_line([], [], 60, "runs/a") == "finished: 60 steps, no incident"
    assert "nothing to do" in back_line(found[0], 24)


# --- what did not fail --------------------------------------------------------------------------------------


def test_dropped_steps_stops_and_slow_ranks_are_no_silence() -> None:
    journal = Journal().start().steps(1, 24)
    for step in (25, 25, 27):  # rank after rank journals the same one
        journal.write(StepRejected(step=step, reasons=["the loss is NaN"], then="dropped"))
    slow = StragglerFound(
        step=30, kind="compute", section="step", why="1.9 times the others", rank=1, node="b", seconds=0.2
    )
    journal.write(slow)
    journal.write(slow)
    journal.write(StopAsked(source="signal", detail="SIGTERM to rank 0"))
    found = {one.kind: one for one in remarks_of(journal.lines)}
    assert set(found) == {"dropped", "slow", "stop"}
    assert found["dropped"].what.startswith("2 steps dropped (25, 27)")
    assert found["slow"].count == 2
    assert "rank 1 on b slowed the others, 200 ms of every step" in found["slow"].what
    text = closing_line([], list(found.values()), 40, "r")
    assert text.startswith("finished: 40 steps, no restart; ")
    assert "2 dropped steps" in text
    assert "1 slow rank (rank 1 on b: 200 ms of every step);" in text, (
        "found twice, and one rank all the same"
    )
    assert "no incident" not in text


def test_a_slow_link_is_no_slow_rank_and_blames_no_node() -> None:
    journal = Journal().start().steps(1, 24)
    why = "the link between ranks 0, 1 is slow: even the rank that comes last waits 60 ms a step more there"
    journal.write(
        StragglerFound(step=30, kind="link", section="0,1", why=why, ranks=[0, 1], seconds=0.06, relative=0.1)
    )
    (found,) = remarks_of(journal.lines)
    assert (found.kind, found.who) == ("link", "the link between ranks 0, 1")
    assert found.next.startswith("look at the network")
    text = closing_line([], [found], 40, "r")
    assert "1 slow link (the link between ranks 0, 1: 60 ms of every step);" in text
    assert "node" not in text


@pytest.mark.parametrize("source", Source)
def test_a_stop_is_told_once_in_five_answers_and_is_no_failure(source: Source) -> None:
    journal = Journal().start().steps(1, 24)
    journal.write(StopAsked(source=source, detail="the stop file run/stop"))
    request = StopRequest(source=source, detail="the stop file run/stop")
    account = account_of_stop(1, request, 31, detail=request.detail, step=24, saved=24)
    journal.write(StopSaved(step=24, checkpoint="step_x"))
    journal.write(AttemptEnded(outcome="stopped", exit_code=31, last_step=24))
    journal.write(account)
    said = {
        Source.STOP_FILE: "the stop file asked the run to stop",
        Source.TIME_LIMIT: "the job's time limit is near, so the run was asked to stop",
        Source.STRAGGLER: "a slow rank made the run stop",
    }.get(source, "the stop file run/stop asked the run to stop")
    assert headline(account) == said
    assert "the stop file run/stop" in f"{said} {account.why[0]}", "the request's own words are not lost"
    assert account.done == "stopped after step 24, saved"
    assert incidents_of(journal.lines) == []
    (stop,) = stops_of(journal.lines)
    assert [question for question, _ in five_answers(stop)] == [
        "who",
        "what",
        "why",
        *[""] * (len(account.why) - 1),
        "done",
        "cost",
        "next",
    ]
    (remark,) = remarks_of(journal.lines)
    assert remark.what == f"{said}: stopped after step 24, saved"
    assert account.next in stop_text(account, "r")


def test_a_stop_that_could_not_save_says_what_is_lost() -> None:
    request = StopRequest(source=Source.SIGNAL, detail="SIGTERM")
    account = account_of_stop(1, request, 32, detail="SIGTERM; a second one means now", step=24, saved=20)
    shown = stop_text(account, "r")
    assert (
        "stopped after step 24 without saving (exit code 32); saved up to step 20, steps 21–24 are lost"
        in shown
    )
    assert "a second one means now" in shown


def test_a_refusal_that_an_incident_tells_of_is_not_told_again() -> None:
    journal = killed_and_corrupted()
    found = incidents_of(journal.lines)
    assert any(one.refused for one in found)
    assert not [one for one in remarks_of(journal.lines, found) if one.kind == "refused"]
    assert [one for one in remarks_of(journal.lines) if one.kind == "refused"]


def test_every_signal_has_a_name() -> None:
    assert "was killed by SIGSEGV" in told(ended(0, -signal.SIGSEGV)).what
    assert "was killed by signal 70" in told(ended(0, -70)).what


def test_the_closing_line_repeats_what_is_left_to_do() -> None:
    journal = Journal().start().steps(1, 20)
    journal.save(20)
    account = account_of(1, step=20)
    account.next = "have b looked at (its disk), or take it out; the run itself needs nothing"
    journal.write(account, "agent-a")
    journal.end("failed").start(resume=(name_of(20), 20)).steps(21, 30).finish(30)
    text = closing_line(incidents_of(journal.lines), [], 30, "r")
    assert "1.1 s lost; to do: have b looked at; report:" in text


# --- said once, and in plain words --------------------------------------------------------------------------


def test_what_a_cost_is_made_of_adds_up_and_no_number_stands_there_twice() -> None:
    journal = Journal().start().steps(1, 24)
    journal.save(20)
    journal.write(account_of(1, step=24), "agent-a")
    journal.end("failed").start(resume=(name_of(20), 20)).steps(21, 30)
    (incident,) = incidents_of(journal.lines)
    again = incident.seconds_lost - incident.seconds_down
    assert cost_of(incident) == (
        f"{duration(incident.seconds_lost)}: {duration(incident.seconds_down)} until it trained again, "
        f"then 4 steps done again in {duration(again)}"
    )
    quick = replace(incident, seconds_lost=incident.seconds_down)
    assert cost_of(quick) == f"{duration(incident.seconds_down)} until it trained again, 4 steps done again"
    assert cost_of(replace(quick, steps_lost=0)).endswith("until it trained again, no step lost")


def test_a_refused_checkpoint_changes_what_is_said_to_have_been_done() -> None:
    account = account_of(1, step=24, saved=20)
    account.done = "restarting from step 20: 4 steps to redo (restart 1 of 3)"
    meant = "restarting from step 10, as what was saved later was refused: 14 steps to redo (restart 1 of 3)"
    assert done_of(account, None) == done_of(account, 20) == account.done
    assert done_of(account, 10) == meant
    assert meant in incident_line(account, 10)
    assert done_of(account, 0).startswith(
        "restarting from the beginning, as what was saved later was refused"
    )


def test_a_wrong_setting_is_not_laid_to_the_script() -> None:
    message = "ConfigError: checkpoint.root = 'x': it lies in the run's own records"
    root = ended(0, 2, message)
    raised = Raised(types=["holdfast.errors.ConfigError"], message=message, where="train.py:6 in <module>")
    root = msgspec.structs.replace(root, errors=[raised])
    account = told(root, Cause.JOB, action=Action.STOP, code=1, rungs=(), last=None)
    assert account.why[0] == "a setting is wrong; neither the training script nor the machine is to blame"
    assert account.next == "correct that setting, then run the same command"
    assert "train.py" not in " ".join([account.what, *account.why, account.next])


def test_a_save_that_is_still_under_way_may_be_where_it_goes_on() -> None:
    coming = CheckpointName(24, "1")
    account = told(ended(1, -9), rungs=(20,), last=24, coming=coming)
    open_end = "or from step 24 if its save, still under way, is completed: at most 4 steps to redo"
    assert account.done == f"restarting from step 20, {open_end} (restart 1 of 3)"
    assert done_of(account, None) == account.done
    assert done_of(account, 20) == "restarting from step 20: 4 steps to redo (restart 1 of 3)"
    completed = (
        "restarting from step 24, whose save was completed meanwhile: nothing to redo (restart 1 of 3)"
    )
    assert done_of(account, 24) == completed
    assert done_of(account, 10).startswith("restarting from step 10, as what was saved later was refused: 14")
    first = told(ended(1, -9), rungs=(), last=24, coming=coming)
    assert first.done.startswith(
        f"restarting from the beginning, {open_end.replace('at most 4', 'at most 24')}"
    )
    assert "nothing was saved" not in first.done


def test_what_was_saved_from_a_checkpoint_that_is_avoided_is_not_waited_for() -> None:
    account = told(
        ended(1, -9),
        rungs=(20, 10),
        last=24,
        coming=CheckpointName(24, "1"),
        decided={"avoid": [name_of(20)]},
    )
    assert account.done.startswith("restarting from step 10: 14 steps to redo")


def test_a_save_that_was_completed_after_the_decision_is_not_called_refused() -> None:
    """Of an older release's account too, which did not know that one was under way."""
    account = account_of(1, step=9, saved=6)
    account.done = "restarting from step 6: 3 steps to redo (restart 1 of 1)"
    meant = "restarting from step 8, whose save was completed meanwhile: 1 step to redo (restart 1 of 1)"
    assert done_of(account, 8) == meant
    account.done = "restarting from the beginning, as nothing was saved yet: 9 steps to redo (restart 1 of 1)"
    assert done_of(account, 8) == meant
    assert done_of(account, 12) == account.done


def test_the_error_of_a_loaders_process_is_said_once() -> None:
    passed_on = (
        "KeyError: Caught KeyError in DataLoader worker process 0. Original Traceback (most recent call "
        "last): … KeyError: 'no label'"
    )
    account = told(ended(1, 1, passed_on, "train.py:18 in __getitem__"), Cause.DATA)
    assert account.what == "failed in step 25 with KeyError: 'no label'"
    assert account.why[0] == "raised at train.py:18 in __getitem__: this points to the data"
    assert account.next == "nothing to do, unless it comes back: mend train.py:18 in __getitem__"
    assert "train.py:18" in incident_line(account)


def test_no_room_for_a_thread_is_not_laid_to_the_line_that_asked_for_one() -> None:
    root = ended(1, 1, "RuntimeError: can't start new thread", "train.py:39 in <module>")
    account = told(root, Cause.UNKNOWN, action=Action.STOP, code=ExitCode.NOTHING_LEFT)
    assert "ulimit -u" in account.why[0]
    assert (
        account.next == "raise that limit, or end what else that user runs there, then run the same command"
    )
    assert "train.py" not in " ".join([*account.why, account.next])


def test_an_end_that_could_not_be_written_down_is_told_by_its_code() -> None:
    journal = Journal().start().steps(1, 34)
    journal.save(30)
    journal.end("failed", ExitCode.STORAGE_FAILED)
    (incident,) = incidents_of(journal.lines)
    said = dict(one for one in five_answers(incident) if one.question)
    assert set(said) == {"who", "what", "why", "done", "cost", "next"}
    assert "storage could not be written" in said["what"]
    assert said["cost"] == "the run ended; saved up to step 30, steps 31–34 are lost"
    assert "look at the storage" in said["next"]


@pytest.mark.parametrize(
    ("told", "wanted"),
    [
        ("nothing to do", ""),
        ("nothing to do, unless it comes back: mend train.py:7", ""),
        ("check the adapter mlx5_3 on a; the run itself needs nothing", "check the adapter mlx5_3 on a"),
        (
            "give it more time between SIGTERM and SIGKILL (Slurm: GraceTime), or save more "
            "often; the run itself needs nothing",
            "give it more time between SIGTERM and SIGKILL",
        ),
    ],
)  # fmt: skip
def test_a_line_that_says_much_else_names_what_to_do_briefly(told: str, wanted: str) -> None:
    assert short_advice(told) == wanted


def test_two_ranks_of_which_one_is_slow_cost_all_that_the_other_waited() -> None:
    """Of two, the median is half of the difference."""
    report = StragglersReported(
        step=30, steps=20, seconds=3.0, step_seconds=0.06, ranks=[0, 1], nodes=["a", "a"],
        sections={"compute": [0.01, 0.06]},
    )  # fmt: skip
    assert report.behind(1, "") == pytest.approx(1.0)
    assert report.behind(0, "") == 0.0
    assert report.behind(None, "a") == 0.0, "nobody is left to wait for that node"
