"""`holdfast recover`: every kind of dead run gets the right answer and code, and a resume is judged truly."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from holdfast.journal import Event
from holdfast.journal.events import HealthFailed, StopAsked, StopForced, StopSaved
from holdfast.journal.writer import JournalWriter
from holdfast.policy.recovery import Decision
from holdfast.policy.signs import Action
from holdfast.record import operator
from holdfast.record.attempts import (
    EndRecord,
    FailureRecord,
    attempt_numbers,
    begin_attempt,
    end_attempt,
    record_failure,
)
from holdfast.record.directory import ControlDirectory, create_record
from holdfast.record.launches import newest_launches
from holdfast.record.lease import Fence, LeaseKeeper, claim
from holdfast.record.standing import RootBook, Standing, StandingBook
from holdfast.recover import conduct, examine
from holdfast.recover.examine import capacity_now
from kit.commands import command
from kit.damage import flip_shard
from kit.harness import REPO, finish, holdfast, job, wait_until
from kit.nodes.fake_scontrol import installed
from kit.nodes.machines import hung_mount
from kit.tiny import checkpoints, die, forked, train, tree

SCRIPT = REPO / "tests" / "scripts" / "train" / "train_recovered.py"
SECRET = "s3cr3t-value"
FLAGS = (
    "--nproc-per-node", "1", "--run-dir", "run", "--set", "checkpoint.interval=3",
    "--set", "journal.step_flush=0", "--set", "launch.node_name=node-a", "--set", "checkpoint.keep_last=20",
)  # fmt: skip


@pytest.fixture(scope="module")
def killed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run whose agent and worker were killed in step 21: saved up to 18, steps 19 and 20 journalled."""
    home = tmp_path_factory.mktemp("killed")
    env = {"RECOVERED_GATE": "21", "RECOVERED_GO": str(home / "go"), "NCCL_SECRET": SECRET}
    with job(holdfast("run", *FLAGS, str(SCRIPT)), cwd=home, env=env, may_leave=True) as running:
        waiting = home / "go.waiting"
        wait_until(lambda: waiting.exists() or running.process.poll() is not None, 150, "the run gets so far")
        assert waiting.exists(), running.output().text
        running.kill_everything()
    return home / "run"


@pytest.fixture
def dead(killed: Path, tmp_path: Path) -> Path:
    """A copy of it that may be changed, as if it had been started there."""
    copy = Path(shutil.copytree(killed, tmp_path / "run"))
    left = copy / "launches" / "node-a.json"
    left.write_text(left.read_text().replace(str(killed.parent), str(tmp_path)))
    return copy


def recover(*args: str | Path) -> tuple[int, dict[str, Any]]:
    done = command("recover", "--json", *args)
    return done.code, json.loads(done.out)


def stage(report: dict[str, Any], name: str) -> dict[str, Any]:
    return next(one for one in report["findings"] if one["stage"] == name)


class Ended:
    """Adds an attempt with an end of its own to a dead run."""

    def __init__(self, run_dir: Path, *nodes: str) -> None:
        self.control = ControlDirectory.open(run_dir)
        held = claim(self.control, "later", 60.0)
        self.keeper = LeaseKeeper(self.control, held, lambda why: None)
        self.fence = Fence(self.control, held.epoch)
        self.attempt = begin_attempt(
            self.control, self.fence, "later", 1, max_restarts=3, nodes=[*nodes] or ["node-a"]
        ).number

    def journal(self, *events: Event) -> None:
        writer = JournalWriter(self.control.journal, "agent-node-a", self.attempt)
        for event in events:
            writer.write(event)
        writer.close()

    def end(self, outcome: str, code: int, cause: str = "", decision: Decision | None = None) -> None:
        if decision is not None:
            create_record(self.control.attempt(self.attempt) / "decisions" / "recovery.json", decision)
        if outcome == "failed":
            failure = FailureRecord(
                rank=0, node="node-a", pid=1, exit_code=1, at=time.time(), message="ValueError: bad shape"
            )
            record_failure(self.control, self.attempt, failure)
        record = EndRecord(outcome=outcome, exit_code=code, cause=cause, highest_step=18, at=time.time())
        end_attempt(self.control, self.fence, self.attempt, record)
        self.keeper.release()


def stopped_with(code: int, reason: str = "none left", evidence: tuple[str, ...] = ()) -> Decision:
    return Decision(action=Action.STOP, exit_code=code, reason=reason, evidence=[*evidence], restarts_left=0)


# --- dead runs ---------------------------------------------------------------------------------------------


def test_a_killed_agent_is_infrastructure_and_the_newest_rung_is_offered(dead: Path) -> None:
    """Part 5, "killed agent": no end, and a lease whose holder is gone."""
    before = tree(dead)
    code, found = recover(dead)
    newest = checkpoints(dead)[0].name
    assert code == 0
    assert (found["state"], found["cause"], found["started"]) == ("lost", "infrastructure", False)
    assert found["answer"] == f"can be resumed at step 18, from {newest}"
    assert "lost with its launcher after step 20, saved up to step 18" in stage(found, "trigger")["text"]
    assert "its process is gone" in stage(found, "trigger")["evidence"][0]
    assert [one["stage"] for one in found["findings"]] == [
        "trigger", "classify", "nodes", "capacity", "storage", "locate", "verify", "rung", "world", "command",
    ]  # fmt: skip
    assert all(one["mark"] in ("ok", "note") for one in found["findings"]), found["findings"]
    assert stage(found, "capacity")["text"] == "enough: 1 of 1 node (node-a)"
    assert found["command"]["argv"][-len(FLAGS) - 2 :] == ["run", *FLAGS, str(SCRIPT)]
    assert found["resolution"]["digests_read"]
    assert tree(dead) == before, "looking must change nothing"


def test_in_words_it_reads_well_without_colour(dead: Path) -> None:
    done = command("recover", dead, "--quick")
    assert done.code == 0
    assert "\x1b" not in done.out
    lines = done.out.splitlines()
    assert lines[1].startswith("note        trigger   attempt 1 was lost with its launcher")
    assert any(line.startswith("ok          rung      step 18 from") for line in lines)
    assert lines[-1].startswith("can be resumed at step 18")
    assert "names and sizes fit; digests were not read" in done.out


def test_a_corrupt_newest_checkpoint_falls_back_to_the_one_before(dead: Path) -> None:
    """Part 5, "corrupt newest"."""
    newest, older, *_ = checkpoints(dead)
    flip_shard(newest)
    code, found = recover(dead)
    assert code == 0
    assert found["resolution"]["chosen"] == older.name
    assert stage(found, "verify")["mark"] == "note"
    assert stage(found, "verify")["evidence"][0].startswith(f"{newest.name}: altered")
    assert found["resolution"]["why"][1].startswith(f"not {newest.name}: altered")
    assert found["resolution"]["storage_alarm"] == []
    assert recover(dead, "--quick")[1]["resolution"]["chosen"] == newest.name, "which reads no digests"


def test_two_corrupt_in_a_row_raise_the_storage_alarm(dead: Path) -> None:
    """Part 5, "two corrupt"."""
    first, second, third, *_ = checkpoints(dead)
    flip_shard(first)
    flip_shard(second)
    code, found = recover(dead)
    assert code == 0
    assert found["resolution"]["chosen"] == third.name
    assert found["resolution"]["storage_alarm"] == [first.name, second.name]
    storage = stage(found, "storage")
    assert storage["mark"] == "note"
    assert storage["evidence"][-1].startswith(f"storage alarm: {first.name} and {second.name}, one after")
    assert "works, so the next older checkpoint counts" in storage["evidence"][-1]


def test_when_every_rung_is_bad_there_is_none(dead: Path) -> None:
    for one in checkpoints(dead):
        flip_shard(one)
    code, found = recover(dead)
    assert code == 18
    assert found["answer"] == "cannot be resumed yet (rung): none: no checkpoint may be used"
    assert command("recover", dead, "--run", "--yes").code == 18, "what has no rung is not started"
    assert attempt_numbers(ControlDirectory.open(dead)) == [1]


@pytest.mark.skipif(os.geteuid() != 0, reason="mounting a small file system needs root")
def test_a_full_disk_is_found_before_anything_is_started(dead: Path, tmp_path: Path) -> None:
    """Part 5, "full disk": a file system with no room for the next save."""
    small = tmp_path / "small"
    small.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=5m", "tmpfs", str(small)], check=True)
    try:
        shutil.copytree(dead, small / "run")
        code, found = recover(small / "run")
        started = command("recover", small / "run", "--run", "--yes")
        left = [path.name for path in small.rglob(".holdfast-probe*")]
    finally:
        subprocess.run(["umount", "-l", str(small)], check=True)
    assert code == 23
    assert "No space left on device" in stage(found, "storage")["evidence"][0]
    assert found["resolution"]["chosen"] != "refused", "the rung is sound all the same"
    assert started.code == 23
    assert "not run" in started.out
    assert left == []


def test_checkpoints_on_storage_that_is_not_mounted_are_not_taken_for_lost(dead: Path) -> None:
    (dead / "checkpoints").rename(dead / "elsewhere")
    code, found = recover(dead)
    assert code == 23
    assert "is its file system mounted?" in stage(found, "storage")["evidence"][0]
    (dead / "checkpoints").mkdir()
    code, found = recover(dead)
    assert code == 23
    assert "is not the directory that they were saved to" in stage(found, "storage")["evidence"][0]
    assert list((dead / "checkpoints").iterdir()) == []


def test_a_root_that_is_gone_before_the_first_save_is_no_first_start(tmp_path: Path) -> None:
    """A rank has begun with it, so it was there: a start would quietly make another one."""
    run_dir = tmp_path / "run"
    forked(lambda: train(run_dir, at_step=lambda step, run: die() if step == 2 else None))
    assert checkpoints(run_dir) == []
    assert recover(run_dir, "--quick")[0] == 0
    shutil.rmtree(run_dir / "checkpoints")
    code, found = recover(run_dir, "--quick")
    assert code == 23
    assert "is its file system mounted?" in stage(found, "storage")["evidence"][0]


def test_storage_that_hangs_is_told_in_time_and_nothing_on_it_is_looked_at(
    dead: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A real mount whose server never answers; `stat` of it alone would wait for ever."""
    monkeypatch.setattr(examine, "SECONDS", 1.0)
    began = time.monotonic()
    with hung_mount(dead / "checkpoints"):
        code, found = recover(dead)
        started = command("recover", dead, "--run", "--yes")
    assert (code, started.code) == (23, 23)
    assert time.monotonic() - began < 30.0
    assert "no answer within 1 s: its file system hangs" in stage(found, "storage")["evidence"][0]
    assert stage(found, "locate")["mark"] == "unknown"
    assert (found["resolution"], found["started"]) == (None, False)
    with hung_mount(dead):
        lost = command("recover", dead)
    assert lost.code == 24
    assert "its file system hangs" in lost.err
    assert recover(dead, "--quick")[0] == 0


def test_a_run_that_never_began_can_be_started(tmp_path: Path) -> None:
    ControlDirectory.open_or_create(tmp_path / "run")
    code, found = recover(tmp_path / "run")
    assert (code, found["state"], found["answer"]) == (0, "new", "can be started: it begins anew")
    done = command("recover", tmp_path / "run", "--run")
    assert done.code == 2, "nobody has ever said how"
    assert "give the command after `--`" in done.out


def test_another_number_of_ranks_is_refused_where_the_data_position_is_each_rank_s_own(dead: Path) -> None:
    """Part 5, "wrong world size"."""
    code, found = recover(dead, "--world", "2")
    assert code == 25
    assert stage(found, "world")["text"] == "1 rank saved it, 2 ranks would start: refused"
    code, found = recover(dead, "--", "holdfast", "run", "--nproc_per_node=3", "--nnodes", "1:2", "train.py")
    assert code == 25
    assert stage(found, "world")["text"].startswith("1 rank saved it, 6 ranks would start")


def test_another_number_of_ranks_is_fine_with_a_global_data_position(dead: Path) -> None:
    newest = checkpoints(dead)[0]
    from holdfast.checkpoint.format import manifest as manifests

    manifest, digest = manifests.read(newest)
    assert manifest.parts["data"].is_global is False
    import msgspec

    part = msgspec.structs.replace(manifest.parts["data"], is_global=True)
    data, other = manifests.encode(msgspec.structs.replace(manifest, parts={**manifest.parts, "data": part}))
    (newest / "holdfast.json").write_bytes(data)
    for record in dead.glob("attempts/*/commits/*.json"):
        record.write_text(record.read_text().replace(digest, other))
    code, found = recover(dead, "--world", "2")
    assert code == 0
    assert stage(found, "world")["text"] == "1 rank saved it, 2 ranks would start: resharding is fine"


def test_what_is_no_run_is_said_precisely(tmp_path: Path) -> None:
    """Part 5, "empty directory" and "not a run at all"."""
    empty, other, damaged = (tmp_path / name for name in ("empty", "other", "damaged"))
    for path in (empty, other, damaged):
        path.mkdir()
    (other / "notes.txt").write_text("hello")
    (damaged / "run.json").write_text("{")
    for path, said in (
        (empty, "is empty"),
        (other, "it has no run.json"),
        (other / "notes.txt", "is a file"),
        (tmp_path / "nowhere", "there is no directory"),
    ):
        done = command("recover", path, "--run", "--yes")
        assert (done.code, said in done.err) == (2, True), done.text
    assert command("recover", damaged).code == 24
    assert list(empty.iterdir()) == []


def test_a_live_run_is_left_alone(dead: Path) -> None:
    """Part 5, "still live"."""
    held = Ended(dead)
    try:
        code, found = recover(dead)
        started = command("recover", dead, "--run", "--yes")
    finally:
        held.keeper.release()
    assert (code, found["cause"], found["resolution"]) == (20, "nobody", None)
    assert found["answer"].startswith("alive: pid")
    assert started.code == 20
    assert attempt_numbers(held.control) == [1, held.attempt]


def test_a_run_that_is_stopping_is_alive_and_none_of_its_nodes_is_drained(dead: Path) -> None:
    """Its ranks save; a word against a node of it must wait until they have."""
    held = Ended(dead)
    held.journal(
        HealthFailed(node="node-b", status="critical", problems=["ECC errors on GPU 3"]),
        StopAsked(source="signal", detail="SIGTERM to the agent on node-a"),
    )
    try:
        code, found = recover(dead, "--yes", "--run")
    finally:
        held.keeper.release()
    assert (code, found["state"], found["cause"]) == (20, "stopping", "nobody")
    assert (found["drains"], found["actions"], found["started"]) == ([], [], False)
    assert operator.in_force(held.control).exclusions == []


def test_a_finished_run_has_nothing_to_recover(dead: Path) -> None:
    Ended(dead).end("finished", 0)
    code, found = recover(dead, "--run")
    assert (code, found["state"], found["started"]) == (0, "finished", False)
    assert "finished" in found["answer"]


def test_a_spent_budget_stands_until_somebody_says_that_its_cause_is_gone(dead: Path) -> None:
    Ended(dead).end("failed", 1, "job", stopped_with(22, evidence=("rank 0 failed alike 4 times",)))
    code, found = recover(dead)
    assert (code, found["cause"]) == (22, "job")
    assert "rank 0 failed alike 4 times" in stage(found, "trigger")["evidence"], "what it was decided on"
    assert stage(found, "classify")["mark"] == "problem"
    assert "ValueError: bad shape" in stage(found, "trigger")["evidence"][0]
    assert found["resolution"]["chosen"] == checkpoints(dead)[0].name, "it could go on from there"
    refused = command("recover", dead, "--run")
    assert refused.code == 22
    assert "Give --yes to start it all the same" in refused.out
    operator.reset_budget(ControlDirectory.open(dead), "cable replaced", "me")
    code, found = recover(dead)
    assert code == 0
    assert "forgiven" in stage(found, "classify")["evidence"][0]


@pytest.mark.parametrize(
    ("code", "cause", "expected", "side"),
    [
        (26, "unknown", 26, "unknown"),
        (17, "job", 17, "job"),
        (25, "", 25, "job"),
        (1, "data", 1, "data"),
        (28, "infrastructure", 0, "infrastructure"),
        (30, "", 0, "infrastructure"),
        (18, "checkpoint", 0, "checkpoint"),
    ],
)
def test_a_decided_stop_stands_only_where_nothing_can_be_looked_at_again(
    dead: Path, code: int, cause: str, expected: int, side: str
) -> None:
    Ended(dead).end("failed", code, cause, stopped_with(code))
    ended, found = recover(dead, "--quick")
    assert (ended, found["cause"]) == (expected, side)


def test_a_condemned_newest_checkpoint_is_passed_over(dead: Path) -> None:
    newest, older, *_ = checkpoints(dead)
    later = Ended(dead)
    book = StandingBook(later.control)
    book.append(later.fence, newest.name.rpartition("-")[2], Standing.CONDEMNED, ["NaN at step 19"])
    later.end("failed", 1, "checkpoint")
    code, found = recover(dead)
    assert (code, found["cause"]) == (0, "checkpoint")
    assert found["resolution"]["chosen"] == older.name
    assert any("condemned: NaN at step 19" in line for line in stage(found, "locate")["evidence"])


def test_a_run_s_own_root_is_looked_at_as_the_run(dead: Path) -> None:
    """Only the run knows what it has condemned."""
    newest, older, *_ = checkpoints(dead)
    later = Ended(dead)
    book = StandingBook(later.control)
    book.append(later.fence, newest.name, Standing.CONDEMNED, ["NaN at step 19"])
    later.end("failed", 1, "checkpoint")
    code, found = recover(dead / "checkpoints", "--quick")
    assert (code, found["run"], found["resolution"]["chosen"]) == (0, later.control.run_id, older.name)
    alone = Path(shutil.move(dead / "checkpoints", dead.parent / "alone"))
    code, found = recover(alone)
    assert (code, found["run"], found["resolution"]["chosen"]) == (0, "", older.name)
    assert found["resolution"]["candidates"][0]["reasons"] == ["condemned", "condemned: NaN at step 19"], (
        "which was written down beside it too"
    )
    shutil.rmtree(RootBook(alone).path)
    code, found = recover(alone)
    assert (code, found["resolution"]["chosen"]) == (0, newest.name)
    assert "every digest matched" in stage(found, "verify")["text"]


def test_what_recovery_decided_to_avoid_is_not_offered(dead: Path) -> None:
    newest, older, *_ = checkpoints(dead)
    decided = Decision(
        action=Action.LOWER_RUNG, exit_code=0, reason="", evidence=[], restarts_left=2, avoid=[newest.name]
    )
    Ended(dead).end("failed", 1, "checkpoint", decided)
    assert recover(dead)[1]["resolution"]["chosen"] == older.name


@pytest.mark.parametrize(
    ("source", "detail", "side"),
    [
        ("signal", "SIGTERM to the agent on node-a", "preemption"),
        ("time_limit", "the time limit comes in 60 s", "preemption"),
        ("operator", "me: maintenance", "operator"),
        ("stop_file", "run/stop is there", "operator"),
        ("signal", "SIGINT to the agent on node-a", "operator"),
    ],
)
def test_a_graceful_stop_says_who_wanted_it_and_what_it_saved(
    dead: Path, source: str, detail: str, side: str
) -> None:
    newest = checkpoints(dead)[0].name
    later = Ended(dead)
    later.journal(StopAsked(source=source, detail=detail), StopSaved(step=18, checkpoint=newest))
    later.end("stopped", 31)
    code, found = recover(dead, "--quick")
    assert (code, found["cause"]) == (0, side)
    assert detail in stage(found, "trigger")["text"]
    assert stage(found, "trigger")["evidence"][0] == f"its state is saved as {newest}"


def test_a_stop_before_the_first_step_had_nothing_to_save_and_one_that_was_forced_says_why(
    dead: Path,
) -> None:
    """As the status tells it."""
    first = Ended(dead)
    first.journal(StopAsked(source="signal", detail="SIGTERM"))
    writer = JournalWriter(first.control.journal, "rank-0", first.attempt)
    writer.write(StopSaved(step=0, checkpoint=""))
    writer.close()
    first.end("stopped", 31)
    assert stage(recover(dead, "--quick")[1], "trigger")["evidence"][0] == "there was nothing to save"
    second = Ended(dead)
    second.journal(StopAsked(source="signal", detail="SIGTERM"))
    writer = JournalWriter(second.control.journal, "rank-3", second.attempt)
    writer.write(StopForced(why="the deadline has passed", rank=3))
    writer.close()
    second.end("stopped", 32)
    told = stage(recover(dead, "--quick")[1], "trigger")["evidence"][0]
    assert told == "it ended without saving: the deadline has passed"


def test_a_pin_decides_and_is_named(dead: Path) -> None:
    oldest = checkpoints(dead)[-1]
    operator.pin(ControlDirectory.open(dead), oldest.name, "loss spike", "me")
    code, found = recover(dead)
    assert (code, found["resolution"]["chosen"]) == (0, oldest.name)
    assert "pinned by me: loss spike" in found["resolution"]["why"][-1]
    flip_shard(oldest)
    assert recover(dead)[0] == 18, "a pin never falls back"


def test_a_launch_that_was_told_to_start_fresh_is_not_repeated(dead: Path) -> None:
    """The command would do what it did: throw away all that was trained."""
    for record in (dead / "launches").iterdir():
        record.write_text(record.read_text().replace('"resume_from":"auto"', '"resume_from":"fresh"'))
    code, found = recover(dead, "--run", "--yes")
    assert (code, found["started"]) == (2, False)
    assert "told to start fresh" in stage(found, "rung")["text"]
    code, found = recover(dead, "--", "holdfast", "run", "train.py")
    assert (code, found["resolution"]["step"]) == (0, 18)


def test_a_pause_that_still_holds_is_told(dead: Path) -> None:
    operator.pause(ControlDirectory.open(dead), "switch is replaced", "me")
    code, found = recover(dead, "--quick")
    assert code == 0
    assert "paused by me: switch is replaced" in stage(found, "classify")["evidence"][0]


def test_a_command_that_starts_another_directory_s_run_is_not_offered(dead: Path, tmp_path: Path) -> None:
    """A copy that was made to look at must not start the original."""
    copy = Path(shutil.copytree(dead, tmp_path / "copy"))
    code, found = recover(copy, "--run", "--yes")
    assert (code, found["started"]) == (2, False)
    assert f"it starts the run in {dead}" in stage(found, "command")["evidence"][0]
    assert attempt_numbers(ControlDirectory.open(dead)) == [1]
    assert recover(copy, "--", "holdfast", "run", "--run-dir", str(copy), "train.py")[0] == 0


def test_too_few_nodes_are_waited_for(dead: Path) -> None:
    operator.ask_to_exclude(ControlDirectory.open(dead), "node-a", None, "fan broken", "me")
    code, found = recover(dead)
    assert code == 28
    assert stage(found, "capacity")["text"] == "wait: 0 of 1 node usable, 1 more needed"
    assert "node-a is out already: fan broken" in stage(found, "nodes")["evidence"]


def test_a_replacement_node_takes_the_place_of_one_that_is_out(
    dead: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The very command that is printed works on it, so it must not be refused for want of nodes."""
    left = dead / "launches" / "node-a.json"
    left.write_text(left.read_text().replace('"--set","launch.node_name=node-a",', ""))
    operator.ask_to_exclude(ControlDirectory.open(dead), "node-a", None, "fan broken", "me")
    monkeypatch.setenv("HOLDFAST_LAUNCH_NODE_NAME", "node-b")
    code, found = recover(dead, "--quick")
    assert (code, stage(found, "capacity")["text"]) == (0, "enough: 1 of 1 node (node-b)")
    assert stage(found, "capacity")["evidence"] == [
        "node-b is new to the run: it takes the place of one that is out"
    ]
    done = command("recover", dead, "--quick", "--run", "--no-watch", "--", sys.executable, "-c", "pass")
    assert (done.code, "started again, and ended with code 0" in done.out) == (0, True), done.text
    left.write_text(left.read_text().replace('"max_nodes":1', '"max_nodes":2'))
    assert recover(dead, "--quick")[0] == 28, "of a run of several nodes this may be the login node"
    done = command("recover", dead, "--quick", "--run", "--no-watch", "--", sys.executable, "-c", "pass")
    assert done.code == 0, "which it is not if the command is to be run here"


def test_wait_waits_until_there_are_nodes_or_its_deadline(
    dead: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    control = ControlDirectory.open(dead)
    operator.ask_to_exclude(control, "node-a", None, "fan broken", "me")
    monkeypatch.setattr(conduct, "AGAIN", 0.01)
    waiting = ("--quick", "--run", "--no-watch", "--wait")
    ending = ("--", sys.executable, "-c", "pass")
    monkeypatch.setenv("HOLDFAST_LAUNCH_NODE_NAME", "node-a")
    code, found = recover(dead, *waiting, "0.2", *ending)
    assert (code, found["started"]) == (28, False)
    assert [(one["what"], one["done"]) for one in found["actions"]] == [("wait for nodes", False)]
    looks: list[int] = []

    def look(*args: Any) -> Any:
        looks.append(len(looks))
        if len(looks) == 3:
            operator.ask_to_readmit(control, "node-a", None, "fan replaced", "me")
        return capacity_now(*args)

    monkeypatch.setattr(conduct, "capacity_now", look)
    done = command("recover", dead, *waiting, "60", *ending)
    assert (done.code, len(looks)) == (0, 3), done.text
    assert "wait        for nodes, at most 60 s (--wait)" in done.out
    assert "started again, and ended with code 0" in done.out


def test_a_verdict_on_the_data_is_told_as_data(dead: Path) -> None:
    """The incident was classified before anybody knew; running the step again elsewhere told."""
    decided = Decision(
        action=Action.STOP, exit_code=17, reason="", evidence=[], restarts_left=0, verdict="reproducible"
    )
    Ended(dead).end("failed", 16, "unknown", decided)
    code, found = recover(dead, "--quick")
    assert (code, found["cause"]) == (17, "data")
    assert stage(found, "classify")["text"].startswith("data: the same samples come again")


def test_a_sick_node_is_drained_only_with_a_person_s_word(dead: Path) -> None:
    later = Ended(dead)
    later.journal(HealthFailed(node="node-b", status="critical", problems=["ECC errors on GPU 3"]))
    later.end("failed", 1, "infrastructure")
    code, found = recover(dead)
    assert code == 0
    assert [one["node"] for one in found["drains"]] == ["node-b"]
    assert [one["done"] for one in found["actions"]] == [False], "nobody was there to ask"
    assert operator.in_force(later.control).exclusions == []
    found = recover(dead, "--yes")[1]
    assert [one["done"] for one in found["actions"]] == [True]
    (out,) = operator.in_force(later.control).exclusions
    assert (out.node, out.reason) == ("node-b", "holdfast recover: ECC errors on GPU 3")
    assert recover(dead)[1]["drains"] == [], "it is out already"
    operator.ask_to_readmit(later.control, "node-b", None, "card swapped", "me")
    assert recover(dead)[1]["drains"] == [], "what was said before it was readmitted no longer counts"


def test_a_node_that_is_to_be_drained_does_not_count_among_those_that_start(dead: Path) -> None:
    for record in (dead / "launches").iterdir():
        record.write_text(record.read_text().replace('"max_nodes":1', '"max_nodes":2'))
    later = Ended(dead, "node-a", "node-b")
    later.journal(HealthFailed(node="node-b", status="critical", problems=["ECC errors on GPU 3"]))
    later.end("failed", 1, "infrastructure")
    code, found = recover(dead, "--quick")
    assert (code, [one["node"] for one in found["drains"]]) == (0, ["node-b"])
    assert stage(found, "capacity")["text"].startswith("shrink: 1 of 2 nodes usable")
    assert (found["command"]["nodes"], found["command"]["world"]) == (1, 1)
    assert stage(found, "world")["text"] == "1 rank saved it, as many would start"


NODES = """\
NodeName=n1 Arch=x86_64
   State=IDLE ThreadsPerCore=1

NodeName=n2 Arch=x86_64
   State=ALLOCATED ThreadsPerCore=1

NodeName=n3 Arch=x86_64
   State=IDLE+DRAIN ThreadsPerCore=1
   Reason=bad fan
"""


def test_with_slurm_nodes_are_drained_there_too_and_the_job_is_not_started_beside_it(
    dead: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Part 5: through scontrol where there is one."""
    slurm = installed(tmp_path, monkeypatch)
    (slurm.home / "node").write_text(NODES)
    for record in (dead / "launches").iterdir():
        record.write_text(record.read_text().replace('"job":""', '"job":"1234"'))
    later = Ended(dead)
    later.journal(HealthFailed(node="n1", status="critical", problems=["XID 79"]))
    later.end("failed", 1, "infrastructure")
    code, found = recover(dead)
    assert code == 0
    assert stage(found, "capacity")["text"].startswith("wait: Slurm has 0 free, 1 are wanted"), "n1 is to go"
    assert slurm.calls == [], "nothing was asked of Slurm but questions"
    done = command("recover", dead, "--yes", "--run")
    assert done.code == 2
    assert "scontrol requeue 1234" in done.out
    assert slurm.calls == ["update NodeName=n1 State=DRAIN Reason=holdfast recover: XID 79"]
    assert [one.node for one in operator.in_force(later.control).exclusions] == ["n1"]


def test_inside_a_job_too_few_nodes_are_too_few(dead: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The job keeps the nodes that it has: nothing is gained by waiting in it."""
    monkeypatch.setenv("SLURM_JOB_ID", "1234")
    monkeypatch.setenv("SLURM_JOB_NODELIST", "node-a")
    assert recover(dead, "--quick")[0] == 0
    operator.ask_to_exclude(ControlDirectory.open(dead), "node-a", None, "fan broken", "me")
    code, found = recover(dead, "--quick")
    assert code == 28
    assert stage(found, "capacity")["text"] == "wait: Slurm job 1234 has 0 usable, 1 are wanted"
    monkeypatch.delenv("SLURM_JOB_NODELIST")
    assert stage(recover(dead, "--quick")[1], "capacity")["text"].startswith("wait: 0 of 1 node usable")


# --- starting it again -------------------------------------------------------------------------------------


@pytest.fixture
def place(killed: Path, tmp_path: Path) -> Iterator[Path]:
    """The killed run where its launch left it, so that its own command starts it; put back afterwards."""
    kept = Path(shutil.copytree(killed, tmp_path / "kept"))
    yield killed
    shutil.rmtree(killed)
    shutil.copytree(kept, killed)


def test_run_starts_it_again_and_finds_the_resume_correct(place: Path, tmp_path: Path) -> None:
    """Part 5: with --run it runs the command, and says point by point whether the resume was right."""
    record = tmp_path / "incident.md"
    argv = holdfast("recover", str(place), "--run", "--json", "--markdown", str(record))
    done = finish(argv, cwd=tmp_path, timeout=180)
    assert done.code == 0, done.text
    found = json.loads(done.out.splitlines()[-1])
    points = {one["point"]: one for one in found["check"]}
    assert found["correct"] is True
    assert found["ended_with"] == 0
    assert points["rung"]["verdict"] == "correct"
    assert points["rung"]["found"] == f"{found['resolution']['chosen']}, then step 19"
    assert points["samples"]["found"] == "the same, by their digests"
    assert points["samples"]["expected"].startswith("steps 19 to 20 ")
    assert "steps 19 to 20 gave the same to the last digit" in points["loss"]["found"]
    assert (points["tokens"]["verdict"], points["tokens"]["found"]) == ("correct", "24 a step")
    assert (points["cadence"]["verdict"], points["cadence"]["found"]) == ("correct", "saved at steps 21, 24")
    text = record.read_text()
    for heading in (
        "# Recovery of run",
        "## Findings",
        "## Evidence",
        "## Actions",
        "## Resume check",
        "## Timeline",
    ):
        assert heading in text
    assert "the resume was correct" in text
    assert "lost with its launcher" in text
    assert SECRET not in text


@pytest.mark.drill
def test_a_resume_that_does_not_go_on_where_it_was_is_said_to_be_wrong(place: Path, tmp_path: Path) -> None:
    """The script was changed on purpose: it trains on other samples, and its loss is another one."""
    done = finish(
        holdfast("recover", str(place), "--run", "--yes"),
        cwd=tmp_path,
        env={"RECOVERED_CHANGED": "samples,loss", "HOLDFAST_VALIDATION_PROBATION_STEPS": "0"},
        timeout=180,
    )
    assert done.code == 1, done.text
    assert "the resume was NOT correct: loss, samples" in done.out
    assert "not correct loss" in done.out
    assert "not correct samples     other samples at steps 19 to 20" in done.out
    assert "started again, and ended with code 0" in done.out, "the command itself saw nothing wrong"


def test_signals_go_on_to_what_it_started(dead: Path, tmp_path: Path) -> None:
    script = tmp_path / "waits.py"
    script.write_text(
        "import pathlib, signal, sys, time\n"
        "signal.signal(signal.SIGUSR1, lambda *_: sys.exit(31))\n"
        "pathlib.Path('ready').touch()\n"
        "time.sleep(60)\n"
    )
    argv = holdfast("recover", str(dead), "--run", "--quick", "--", sys.executable, str(script))
    with job(argv, cwd=tmp_path) as running:
        wait_until((tmp_path / "ready").exists, 120, "the command runs")
        running.signal(signal.SIGUSR1)
        done = running.wait(30)
    assert done.code == 31, done.text
    assert "started again, and ended with code 31" in done.out


def test_a_live_resume_can_be_judged_from_beside(tmp_path: Path) -> None:
    """--watch, beside a run that somebody else has started."""
    run_dir = tmp_path / "run"
    judged: list[tuple[int, dict[str, Any]]] = []

    def look(step: int, run: Any) -> None:
        if step == 11:
            judged.append(recover(run_dir, "--watch", "--timeout", "0"))
            judged.append(recover(run_dir, "--watch", "--timeout", "0", "--mtbf", "0.0000000001"))

    forked(
        lambda: train(run_dir, at_step=lambda step, run: die() if step == 9 else None, journal_step_flush=0)
    )
    train(run_dir, until=12, at_step=look, journal_step_flush=0)
    (code, found), (worse, exposed) = judged
    (cadence,) = (one for one in exposed["check"] if one["point"] == "cadence")
    assert (worse, exposed["correct"], cadence["verdict"]) == (1, False, "not correct")
    assert "(given)" in cadence["expected"]
    assert (code, found["correct"], found["state"]) == (0, True, "running")
    points = {one["point"]: one for one in found["check"]}
    assert (points["samples"]["verdict"], points["samples"]["found"]) == (
        "correct",
        "the same, by their digests",
    )
    assert points["samples"]["expected"].startswith("steps 7 to 8 ")


# --- what a launch leaves ----------------------------------------------------------------------------------


def test_a_launch_leaves_how_it_was_started_and_no_values(killed: Path) -> None:
    (left,) = newest_launches(ControlDirectory.open(killed))
    assert left.argv == [*FLAGS, str(SCRIPT)]
    assert (left.directory, left.node, left.workers_per_node) == (str(killed.parent), "node-a", 1)
    assert "NCCL_SECRET" in left.environment
    assert sorted(tree(killed / "launches")) == ["node-a.json"]
    assert all(SECRET.encode() not in data for data in tree(killed / "launches").values())


def test_it_does_without_torch(dead: Path) -> None:
    code = (
        "import sys\n"
        "from holdfast.cli.app import app\n"
        "try:\n"
        f"    app(['recover', {str(dead)!r}])\n"
        "except SystemExit as end:\n"
        "    assert not end.code, end.code\n"
        "print(sorted(name for name in sys.modules if name.split('.')[0] in ('torch', 'numpy')))\n"
    )
    result = finish([sys.executable, "-c", code], cwd=dead.parent)
    assert result.code == 0, result.text
    assert result.out.splitlines()[-1] == "[]"
