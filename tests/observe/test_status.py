"""`holdfast status`: every state is told apart, and nothing in a run's directory can make it fail."""

from __future__ import annotations

import json
import os
import pty
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec
import pytest

from holdfast.journal.events import (
    StepsDone,
    StopAgreed,
    StopAsked,
    StopForced,
    StopHastened,
    StopSaved,
    WorkersStarted,
)
from holdfast.journal.writer import JournalWriter
from holdfast.observe.status import Status, status_line, status_of, status_rows
from holdfast.policy.recovery import Decision
from holdfast.policy.signs import Action
from holdfast.record import operator
from holdfast.record.attempts import (
    EndRecord,
    FailureRecord,
    HeadRecord,
    begin_attempt,
    end_attempt,
    record_failure,
    write_head,
)
from holdfast.record.directory import ControlDirectory, create_record
from holdfast.record.lease import Fence, LeaseKeeper, claim
from holdfast.record.lineage import CommitRecord, record_commit, record_done
from kit.commands import command
from kit.control import held_elsewhere
from kit.harness import REPO, finish, holdfast, job, wait_until
from kit.tiny import train, tree

TINY = str(REPO / "tests" / "scripts" / "train" / "train_tiny.py")


class Launch:
    """A launcher as far as its records go."""

    def __init__(self, control: ControlDirectory, name: str = "launch") -> None:
        self.control = control
        self.name = name
        self.keeper: LeaseKeeper | None = None
        self.fence: Fence | None = None

    def begin(self, *, max_restarts: int | None = 3, resumed: int | None = None) -> int:
        held = claim(self.control, self.name, 60.0)
        if self.keeper is not None:
            self.keeper.stop()
        self.keeper = LeaseKeeper(self.control, held, lambda why: None)
        self.fence = Fence(self.control, held.epoch)
        number = begin_attempt(self.control, self.fence, self.name, 2, max_restarts=max_restarts).number
        self.journal("agent-a", number, WorkersStarted(node="a", pids={0: 10, 1: 11}))
        if resumed is not None:
            head = HeadRecord(attempt=number, checkpoint=None, step=resumed)
            write_head(self.control, self.fence, head)
        return number

    def journal(self, who: str, attempt: int, *events: StepsDone | WorkersStarted) -> None:
        writer = JournalWriter(self.control.journal, who, attempt)
        for event in events:
            writer.write(event)
        writer.close()

    def steps(self, attempt: int, first: int, count: int, loss: float | str | None = 2.5) -> None:
        for step in range(first, first + count):
            self.journal("rank-0", attempt, StepsDone(first=step, seconds=[0.25], loss=[loss]))

    def fail(self, attempt: int, decision: Decision | None = None, highest: int = 0) -> None:
        assert self.fence is not None
        failure = FailureRecord(rank=1, node="a", pid=11, exit_code=-9, at=time.time())
        record_failure(self.control, attempt, failure)
        if decision is not None:
            create_record(self.control.attempt(attempt) / "decisions" / "recovery.json", decision)
        self.end(attempt, "failed", -9, cause="infrastructure", highest=highest)

    def end(self, attempt: int, outcome: str, code: int, cause: str = "", highest: int = 0) -> None:
        assert self.fence is not None
        record = EndRecord(outcome=outcome, exit_code=code, cause=cause, highest_step=highest, at=time.time())
        end_attempt(self.control, self.fence, attempt, record)

    def leave(self) -> None:
        if self.keeper is not None:
            self.keeper.release()
            self.keeper = None


@contextmanager
def launched(control: ControlDirectory, name: str = "launch") -> Iterator[Launch]:
    running = Launch(control, name)
    try:
        yield running
    finally:
        running.leave()


RESTART = Decision(action=Action.RESTART, exit_code=0, reason="may pass", evidence=[], restarts_left=2)
STOP = Decision(action=Action.STOP, exit_code=22, reason="none left", evidence=[], restarts_left=0)


def state(control: ControlDirectory) -> str:
    return status_of(control).state


# --- states ------------------------------------------------------------------------------------------------


def test_the_states_of_a_run_that_fails_once_and_finishes(control: ControlDirectory) -> None:
    assert state(control) == "new"
    with launched(control) as launch:
        first = launch.begin()
        assert state(control) == "starting"
        write_head(control, Fence(control, 1), HeadRecord(attempt=first, checkpoint=None, step=0))
        assert state(control) == "running"
        launch.fail(first, RESTART)
        assert state(control) == "restarting"
        operator.pause(control, "the switch", "alice")
        paused = status_of(control)
        assert (paused.state, paused.detail) == ("paused", "recovery was paused by alice: the switch")
        operator.unpause(control, "done", "alice")
        assert state(control) == "restarting"
        second = launch.begin(resumed=0)
        operator.pause(control, "for later", "alice")
        assert state(control) == "running", "a pause concerns recovery, not a running attempt"
        launch.end(second, "finished", 0, highest=9)
        assert state(control) == "finished"
    found = status_of(control)
    assert (found.state, found.exit_code, found.ok) == ("finished", 0, True)


def test_a_stop_by_decision_is_a_failure_also_before_the_launcher_is_gone(control: ControlDirectory) -> None:
    with launched(control) as launch:
        launch.fail(launch.begin(resumed=0), STOP)
        found = status_of(control)
    assert (found.state, found.exit_code) == ("failed", 22)
    assert found.detail == "none left (exit code 22)"
    assert (status_of(control).state, status_of(control).ok) == ("failed", False)


def test_a_failure_that_nobody_restarts_is_a_failure(control: ControlDirectory) -> None:
    with launched(control) as launch:
        launch.fail(launch.begin(resumed=0), RESTART)
    assert state(control) == "failed"


def test_a_signal_to_the_launcher_is_a_stop_and_a_regroup_is_none(control: ControlDirectory) -> None:
    with launched(control) as launch:
        first = launch.begin(resumed=0)
        launch.end(first, "stopped", 0)
        assert state(control) == "restarting"
        launch.end(launch.begin(resumed=0), "stopped", 143)
        assert state(control) == "stopped", "the launcher is about to leave"
    found = status_of(control)
    assert (found.state, found.exit_code, found.ok) == ("stopped", 143, False)
    assert found.detail.startswith("by SIGTERM")


def test_a_stop_is_shown_while_it_is_under_way_and_by_what_it_saved(control: ControlDirectory) -> None:
    with launched(control) as launch:
        number = launch.begin(resumed=0)
        agent = JournalWriter(control.journal, "agent-n", number)
        rank = JournalWriter(control.journal, "rank-0", number)
        agent.write(StopAsked(source="signal", detail="SIGTERM to rank 1 on n", node="n", seconds=600.0))
        asked = status_of(control)
        assert (asked.state, asked.ok, asked.exit_code) == ("stopping", True, None)
        assert asked.detail.startswith("asked by SIGTERM to rank 1 on n, ")
        assert asked.detail.endswith("s left")
        agent.write(StopHastened(seconds=30.0, why="the scheduler ends the job in 40 s"))
        closer = status_of(control).stop
        assert closer is not None
        assert closer.ends_at is not None
        assert closer.ends_at < time.time() + 31
        agent.write(StopAgreed(step=7, after=0.1))
        assert status_of(control).detail.endswith("left, all ranks stop after step 7")
        rank.write(StopSaved(step=7, checkpoint="step_00000007-00000001", seconds=0.1, after=0.3))
        assert status_of(control).detail.endswith("saved, the ranks end")
        launch.end(number, "stopped", 31, highest=7)
        agent.close()
        rank.close()
    found = status_of(control)
    assert (found.state, found.exit_code, found.ok) == ("stopped", 31, False)
    assert found.detail.startswith("step 7 is saved (step_00000007-00000001); asked by SIGTERM")
    assert found.stop is not None
    assert (found.stop.step, found.stop.checkpoint) == (7, "step_00000007-00000001")
    with launched(control) as launch:
        launch.begin(resumed=7)
        assert state(control) == "running", "an earlier attempt's stop is not this one's"


def test_a_stop_that_saved_nothing_says_why(control: ControlDirectory) -> None:
    with launched(control) as launch:
        number = launch.begin(resumed=0)
        agent = JournalWriter(control.journal, "agent-n", number)
        agent.write(StopAsked(source="operator", detail="an operator, alice: why", node="n"))
        rank = JournalWriter(control.journal, "rank-0", number)
        rank.write(StopForced(why="a second signal means now"))
        rank.close()
        agent.write(StopForced(why="it was killed"))  # later, and only a consequence
        agent.close()
        launch.end(number, "stopped", 32)
    told = status_of(control).detail
    assert told.startswith("ended without saving (a second signal means now); asked by an operator")


def test_a_launcher_that_is_gone_or_silent_lost_its_attempt(control: ControlDirectory) -> None:
    with launched(control) as launch:
        launch.begin(resumed=0)
    lost = status_of(control)
    assert lost.state == "lost"
    assert lost.incident is not None
    assert lost.incident.text == "attempt 1: lost with its launcher"
    held_elsewhere(control, epoch=2, ttl=5.0)
    silent = status_of(control)
    assert silent.state == "lost"
    assert silent.lease is not None
    assert silent.lease.detail.startswith("no sign of life")


def test_a_new_launch_over_an_ended_run_is_starting(control: ControlDirectory) -> None:
    with launched(control) as launch:
        launch.fail(launch.begin(resumed=0), STOP)
    with launched(control, "another") as launch:
        launch.keeper = LeaseKeeper(control, claim(control, "another", 60.0), lambda why: None)
        assert state(control) == "starting"
    assert state(control) == "failed"


@pytest.mark.parametrize("owner", ["operator-1234", "gc-1234"])
def test_a_command_that_holds_the_lease_for_a_moment_is_no_launch(
    control: ControlDirectory, owner: str
) -> None:
    with launched(control) as launch:
        launch.fail(launch.begin(resumed=0), STOP)
    keeper = LeaseKeeper(control, claim(control, owner, 60.0), lambda why: None)
    assert state(control) == "failed"
    keeper.release()


# --- what it shows -----------------------------------------------------------------------------------------


def test_step_rate_loss_save_incident_and_budget(control: ControlDirectory) -> None:
    with launched(control) as launch:
        first = launch.begin(resumed=0)
        launch.steps(first, 1, 4)
        launch.fail(first, RESTART, highest=3)
        second = launch.begin(resumed=3)
        starting = status_of(control)
        assert (starting.step, starting.steps_per_second) == (3, None), "what it came from"
        launch.steps(second, 4, 3, loss="nan")
        assert launch.fence is not None
        commit = CommitRecord(id="3fa9c1d2", step=6, parent=None, attempt=second, manifest="x")
        with launch.fence.guard("commit"):
            record_commit(control, launch.fence, commit)
        assert status_of(control).save is None, "it was not renamed yet"
        record_done(control, commit)
        found = status_of(control)
    assert (found.attempt, found.world_size, found.nodes) == (2, 2, {"a": [0, 1]})
    assert (found.step, found.loss) == (6, "nan")
    assert found.steps_per_second is not None
    assert found.save is not None
    assert (found.save.checkpoint, found.save.step) == ("step_00000006-3fa9c1d2", 6)
    assert found.incident is not None
    assert found.incident.text == (
        "attempt 1: rank 1 on a killed by SIGKILL (infrastructure) at step 4 → restart, 2 of 3 left"
    )
    assert found.budget is not None
    assert (found.budget.used, found.budget.max_restarts, found.budget.left) == (0, 3, 3), (
        "step 6 is progress"
    )
    text = "\n".join(f"{row.label}: {row.text}" for row in status_rows(found))
    assert "state: running, attempt 2 for" in text
    assert "ranks: 2 ranks on 1 node (a: 0–1)" in text
    assert re.search(r"step: 6, [\d.e+]+ steps/s, loss NaN \(", text)
    assert "last save: step 6, " in text
    assert "local save" not in text
    assert "restarts: 0 since the last progress, 3 of 3 left" in text
    assert re.fullmatch(
        r"\d\d:\d\d:\d\d  running  attempt 2  step 6, .* steps/s, loss NaN \(.* ago\)  saved step 6",
        status_line(found),
    )


def test_a_reset_gives_the_budget_back(control: ControlDirectory) -> None:
    with launched(control) as launch:
        for _ in range(3):
            launch.fail(launch.begin(resumed=0), RESTART)
        launch.begin(resumed=0)
        spent = status_of(control).budget
        assert spent is not None
        assert (spent.used, spent.left) == (3, 0)
        operator.reset_budget(control, "new switch", "alice")
        fresh = status_of(control).budget
    assert fresh is not None
    assert (fresh.used, fresh.left) == (0, 3)


def test_the_rate_counts_saves_too_and_one_batch_is_enough(control: ControlDirectory) -> None:
    with launched(control) as launch:
        number = launch.begin(resumed=0)
        launch.journal("rank-0", number, StepsDone(first=1, seconds=[0.5, 0.5], loss=[]))
        one = status_of(control)
        assert one.steps_per_second == pytest.approx(2.0)
        assert one.loss is None
        path = next(control.journal.glob("*-rank-0-*"))
        line = json.loads(path.read_text().splitlines()[-1])
        for seconds, first in ((10, 3), (20, 5)):
            later = {**line, "at": line["at"] + seconds, "body": {**line["body"], "first": first}}
            with path.open("a") as file:
                file.write(json.dumps(later) + "\n")
        assert status_of(control).steps_per_second == pytest.approx(4 / 20)


def test_what_an_operator_asked_is_shown(control: ControlDirectory) -> None:
    operator.pause(control, "p", "alice")
    operator.pin(control, "step_00000006-3fa9c1d2", "q", "bob", once=False, force=True)
    operator.reset_budget(control, "r", "carol")
    operator.ask_to_exclude(control, "node-b", "3", "s", "dan")
    text = "\n".join(f"{row.label}: {row.text}" for row in status_rows(status_of(control)))
    assert re.search(r"paused: recovery, alice, .* ago: p", text)
    assert re.search(r"pinned: step_00000006-3fa9c1d2 for every resume, forced, bob, .* ago: q", text)
    assert re.search(r"reset: restarts up to attempt 0 no longer count, carol, .* ago: r", text)
    assert re.search(r"excluded: node-b, device 3: s \(dan, .* ago\)", text)


# --- what it survives --------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    run_dir = tmp_path_factory.mktemp("prepared") / "run"
    train(run_dir, until=4)
    return run_dir


@pytest.fixture
def run_dir(prepared: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(prepared, tmp_path / "copy"))


def test_any_file_may_be_missing_or_damaged_but_the_first(run_dir: Path) -> None:
    """Each file of a run in turn: gone, empty, garbage, a directory."""
    files = [
        path.relative_to(run_dir)
        for path in sorted(run_dir.rglob("*"))
        if path.is_file() and path.name != "run.json" and "checkpoints" not in path.parts
    ]
    assert len(files) > 8
    for relative in files:
        path = run_dir / relative
        kept = path.read_bytes()
        for damage in (None, b"", b"\xff{", b"[]", b"{}"):
            path.unlink()
            if damage is not None:
                path.write_bytes(damage)
            found = status_of(ControlDirectory.open(run_dir))
            assert all(row.text.isprintable() for row in status_rows(found)), relative
            assert json.loads(msgspec.json.encode(found))["run"] == found.run
            path.write_bytes(kept)
        path.unlink()
        path.mkdir()
        status_of(ControlDirectory.open(run_dir))
        path.rmdir()
        path.write_bytes(kept)
    assert status_of(ControlDirectory.open(run_dir)).problems == []


def test_damage_is_named(run_dir: Path) -> None:
    end = next(run_dir.glob("attempts/*/end.json"))
    end.write_text("{")
    found = status_of(ControlDirectory.open(run_dir))
    assert any(str(end) in problem for problem in found.problems)
    assert found.state == "lost", "an end that nobody can read is not taken for one"


def test_torn_and_foreign_journal_lines_are_passed_over(control: ControlDirectory) -> None:
    with launched(control) as launch:
        number = launch.begin(resumed=0)
        launch.steps(number, 1, 3)
        with next(control.journal.glob("*-rank-0-*")).open("ab") as file:
            file.write(b'not json\n{"v":9}\n\xff\xfe\n{"v":1,"at":17')
        os.mkfifo(control.journal / f"{number:06d}-rank-0-999.jsonl")  # would block whoever opens it
        assert status_of(control).step == 3


def test_records_of_another_release_are_read(control: ControlDirectory) -> None:
    with launched(control) as launch:
        number = launch.begin(max_restarts=None, resumed=0)
        folder = control.attempt(number)
        record = json.loads((folder / "attempt.json").read_text())
        del record["max_restarts"]
        (folder / "attempt.json").write_text(json.dumps(record | {"of": "a newer one"}))
        launch.fail(number)
        decision = {"action": "pray", "reason": "r", "exclude": ["a string"], "restarts_left": "many"}
        (folder / "decisions").mkdir()
        (folder / "decisions" / "recovery.json").write_text(json.dumps(decision))
        found = status_of(control)
    assert found.state == "restarting"
    assert found.budget is not None
    assert (found.budget.used, found.budget.left) == (0, None)
    assert found.incident is not None
    assert found.incident.text.endswith("→ pray")


def test_a_journal_of_a_million_lines_is_not_read_through(control: ControlDirectory) -> None:
    with launched(control) as launch:
        number = launch.begin(resumed=0)
        launch.steps(number, 1, 1)
        path = next(control.journal.glob("*-rank-0-*"))
        line = path.read_bytes()
        with path.open("ab") as file:
            for _ in range(100):
                file.write(line * 10_000)
        launch.steps(number, 77, 1)
        seconds = []
        for _ in range(3):
            before = time.process_time()
            assert status_of(control).step == 77
            seconds.append(time.process_time() - before)
        path.unlink()
    assert min(seconds) < 0.3, seconds  # parsing them all takes ten times as long


# --- the command -------------------------------------------------------------------------------------------


def test_the_command_prints_and_its_code_says_whether_it_is_well(run_dir: Path) -> None:
    before = tree(run_dir)
    done = command("status", run_dir)
    assert done.code == 0, done.text
    assert "state     finished, attempt 1" in done.out
    assert "\x1b" not in done.out
    assert json.loads(command("status", run_dir, "--json").out)["state"] == "finished"
    (next(run_dir.glob("attempts/*")) / "end.json").unlink()
    assert command("status", run_dir).code == 1
    assert set(tree(run_dir)) == {name for name in before if not name.endswith("end.json")}


def test_without_an_argument_it_is_the_run_that_the_settings_name(
    run_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOLDFAST_RUN_DIR", str(run_dir))
    assert command("status").code == 0


def test_a_directory_that_is_no_run_is_refused(tmp_path: Path) -> None:
    done = command("status", tmp_path)
    assert done.code == 2
    assert "run.json" in done.err
    (tmp_path / "run.json").write_text("{")
    assert command("status", tmp_path).code == 24
    assert command("status", tmp_path / "nothing").code == 2


def test_the_page_names_every_field() -> None:
    page = (REPO / "docs" / "reference" / "status.md").read_text()
    fields = page.partition("### The fields of")[2].partition("## How")[0]
    listed = re.findall(r"^\| `(\w+)` \|", fields, re.MULTILINE)
    assert listed == list(Status.__struct_fields__)


def test_it_works_without_torch(run_dir: Path) -> None:
    code = (
        "import atexit, sys\n"
        "atexit.register(lambda: print(*sys.modules, sep='\\n', file=sys.stderr))\n"
        "from holdfast.cli.app import main\n"
        f"sys.argv = ['holdfast', 'status', {str(run_dir)!r}]\n"
        "main()\n"
    )
    done = finish([sys.executable, "-c", code], cwd=run_dir.parent)
    assert done.code == 0, done.text
    imported = set(done.err.splitlines())
    assert "holdfast.observe.status" in imported
    assert not imported & {"torch", "numpy", "rich"}


@pytest.mark.parametrize("form", [[], ["--json"]], ids=["lines", "json"])
def test_watching_into_a_pipe_gives_a_line_a_look_and_ctrl_c_ends_it_well(
    run_dir: Path, form: list[str]
) -> None:
    argv = holdfast("status", str(run_dir), "--watch", "--every", "0.1", *form)
    with job(argv, cwd=run_dir.parent) as running:
        wait_until(lambda: running.output().out.count("\n") >= 3, 60, "three looks")
        running.signal(signal.SIGINT)
        done = running.wait()
    assert done.code == 0, done.text
    assert done.err == ""
    for line in done.out.splitlines():
        if form:
            assert json.loads(line)["state"] == "finished"
        else:
            assert "  finished  attempt 1  step 4" in line


def test_whoever_has_read_enough_may_leave(run_dir: Path) -> None:
    argv = holdfast("status", str(run_dir), "--watch", "--every", "0.1")
    with subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.readline()
        process.stdout.close()
        assert process.wait(60) == 0
        assert process.stderr.read() == b""


def test_watching_on_a_terminal_shows_it_live_until_ctrl_c(run_dir: Path) -> None:
    leader, follower = pty.openpty()
    argv = holdfast("status", str(run_dir), "--watch", "--every", "0.2")
    environment = {**os.environ, "TERM": "xterm-256color"}
    with subprocess.Popen(argv, stdin=follower, stdout=follower, stderr=follower, env=environment) as process:
        os.close(follower)
        seen = b""

        def read_on() -> bool:
            nonlocal seen
            seen += os.read(leader, 65536)
            return seen.count(b"finished") >= 2

        wait_until(read_on, 60, "two looks")
        process.send_signal(signal.SIGINT)
        assert process.wait(60) == 0
    os.close(leader)
    assert b"\x1b[" in seen
    assert b"Traceback" not in seen


@pytest.mark.drill
def test_a_real_launch_is_seen_to_run_to_restart_and_to_be_lost(tmp_path: Path) -> None:
    """Under `holdfast run`: one rank is killed once; then the launcher itself."""
    (tmp_path / "out").mkdir()
    env = {"TINY_OUT": str(tmp_path / "out"), "TINY_GATE": "5", "TINY_DIE": "0:3:SIGKILL", "TINY_UNTIL": "9"}
    argv = holdfast(
        "run", "--run-dir", "run", "--set", "checkpoint.interval=2", "--set", "journal.step_flush=0", TINY
    )
    with job(argv, cwd=tmp_path, env=env) as running:
        wait_until(lambda: (tmp_path / "run" / "run.json").exists(), 60, "the run exists")
        control = ControlDirectory.open(tmp_path / "run")
        wait_until(
            lambda: (now := status_of(control)).attempt == 2 and now.step == 4, 120, "it goes on after it"
        )
        found = status_of(control)
        assert found.state == "running"
        assert found.incident is not None
        assert re.search(
            r"^rank 0 on \S+ was killed by SIGKILL in step \d+ → restarting", found.incident.text
        )
        assert found.incident.text.endswith("(restart 1 of 3)")
        assert list(found.nodes.values()) == [[0]]
        os.kill(running.pid, signal.SIGKILL)
        running.process.wait(30)
        wait_until(lambda: status_of(control).state == "lost", 60, "the loss is seen")
    assert command("status", tmp_path / "run").code == 1
