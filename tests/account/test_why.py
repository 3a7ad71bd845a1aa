"""`holdfast why`, and the first screen of the report: the same five answers from the same account."""

from __future__ import annotations

import json
import shlex
from pathlib import Path

from holdfast.journal.events import Account, StepRejected
from holdfast.observe.report import report_html
from kit.harness import finish, holdfast, job, wait_until
from kit.journals import Journal, name_of


def failed_twice(last: Account | None = None) -> Journal:
    """A rank that was killed, then one that raised; the second ends the run."""
    journal = Journal().start().steps(1, 20)
    journal.save(20)
    journal.steps(21, 24)
    first = Account(
        attempt=1, cause="infrastructure", who="rank 1 on a", what="was killed by SIGKILL in step 25",
        why=["from outside"], done="restarting from step 20", next="nothing to do", step=24, saved=20,
    )  # fmt: skip
    journal.write(first, "agent-a")
    journal.end("failed").start(resume=(name_of(20), 20)).steps(21, 29)
    journal.write(last or stopped(), "agent-a")
    return journal.end("failed", 1)


def stopped(**more: str) -> Account:
    texts = {
        "who": "rank 0 on a",
        "what": "failed in step 30 with ValueError: x at train.py:3 in <module>",
        **more,
    }
    return Account(
        attempt=2, cause="job", why=["raised at train.py:3"], done="stopped: no restart is left",
        next="mend train.py:3, then run the same command", step=29, saved=20, exit_code=22,
        files=["errors/rank_000000.json"], **texts,
    )  # fmt: skip


def test_the_last_incident_or_the_one_that_is_named(tmp_path: Path) -> None:
    failed_twice().store(tmp_path / "run")
    last = finish(holdfast("why", "run"), cwd=tmp_path)
    assert last.code == 0, last.text
    assert last.out.splitlines()[0].startswith("incident 2 of 2, attempt 2, ")
    assert "  who   rank 0 on a\n" in last.out
    assert "  cost  the run ended; saved up to step 20, steps 21–29 are lost\n" in last.out
    assert "  next  mend train.py:3, then run the same command\n" in last.out
    assert "  file  errors/rank_000000.json\n" in last.out
    first = finish(holdfast("why", "run", "--attempt", "1"), cwd=tmp_path)
    assert "  what  was killed by SIGKILL in step 25\n" in first.out
    assert "4 steps done again" in first.out
    none = finish(holdfast("why", "run", "--attempt", "3"), cwd=tmp_path)
    assert (none.code, none.out) == (2, "")
    assert "attempts that did: 1, 2" in none.err


def test_for_programs(tmp_path: Path) -> None:
    failed_twice().store(tmp_path / "run")
    told = json.loads(finish(holdfast("why", "run", "--json"), cwd=tmp_path).out)
    assert told["incident"]["account"]["who"] == "rank 0 on a"
    assert told["incident"]["account"]["exit_code"] == 22
    assert told["incident"]["open"]
    assert told["others"] == []


def test_a_run_without_an_incident_and_a_directory_without_a_run(tmp_path: Path) -> None:
    journal = Journal().start().steps(1, 20)
    journal.store(tmp_path / "run")
    assert finish(holdfast("why", "run"), cwd=tmp_path).out == (
        "no incident: nothing in this run's journal has failed\n"
    )
    journal.write(StepRejected(step=7, reasons=["the loss is NaN"], then="dropped"))
    journal.store(tmp_path / "dropped")
    dropped = finish(holdfast("why", "dropped"), cwd=tmp_path)
    assert "1 step dropped (7)" in dropped.out
    assert "no incident" not in dropped.out
    nowhere = finish(holdfast("why", "nowhere"), cwd=tmp_path)
    assert nowhere.code == 2
    assert "is not a run directory" in nowhere.err


def test_the_reports_first_screen_says_how_it_ended_and_what_cost_most() -> None:
    page = report_html(failed_twice().lines, title="t")
    first_screen = page.partition('<dl class="figures">')[0]
    for text in (
        "How it ended",
        "rank 0 on a",
        "mend train.py:3, then run the same command",
        "SIGKILL",
        "Cost",
    ):
        assert text in first_screen, text
    assert first_screen.index("How it ended") < first_screen.index("The costliest of 2 incidents")


def test_a_hostile_account_is_shown_as_text() -> None:
    page = report_html(failed_twice(stopped(what="<script>alert(1)</script>\x1b[2J")).lines, title="t")
    assert "<script>" not in page
    assert "\x1b" not in page


def test_a_launch_that_its_node_could_not_begin_answers_the_five_questions(tmp_path: Path) -> None:
    """The gate keeps the only node out: nothing was started, and there is no attempt to tell of."""
    (tmp_path / "x.py").touch()
    launch = holdfast(
        "run", "--nproc-per-node", "1", "--run-dir", "run", "--set", "launch.node_name=here", "x.py"
    )
    with job(["sh", "-c", f"ulimit -n 100; exec {shlex.join(launch)}"], cwd=tmp_path) as running:
        refused = running.wait(60)
        assert refused.code == 28, refused.text
        wait_until(lambda: not running.processes(), 20, "what cleans up after a launch has ended")
    told = finish(holdfast("why", "run"), cwd=tmp_path).out
    status = finish(holdfast("status", "run"), cwd=tmp_path).out
    assert told.startswith("a launch that could not begin, 2")
    assert "  who   node here\n" in told
    assert "  what  did not take part: its health checks failed\n" in told
    assert "  why   open files: a limit of 100" in told
    assert "  done  kept out before anything was started on it\n" in told
    assert "  next  mend what failed, then run the same command" in told
    assert "new: no attempt has begun: node here did not take part" in status
    made = finish(holdfast("journal", "run", "--report", "report.html"), cwd=tmp_path)
    assert made.code == 0, made.text
    page = (tmp_path / "report.html").read_text()
    assert "node here did not take part: its health checks failed" in page
    assert "mend what failed, then run the same command" in page
