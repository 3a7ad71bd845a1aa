"""What is waited for around a decision, and what follows if the wait was in vain.

A disk that stays full ends a run with one story: no restart is announced that does not follow. A paused
recovery waits until the pause is taken back, and never longer than allowed.
"""

from __future__ import annotations

import threading
from pathlib import Path

import msgspec
import pytest
from torch.distributed.elastic.rendezvous import RendezvousTimeoutError

from holdfast.config.settings import Settings
from holdfast.errors import ControlError, ExitCode
from holdfast.health.judgements import MIB, Trouble, last_words
from holdfast.launch import command as launcher
from holdfast.launch.incident import decision
from holdfast.launch.incident.decision import await_storage, find_trouble, least_space, wait_while_paused
from holdfast.policy.budgets import PastAttempt
from holdfast.policy.recovery import Situation, recover
from holdfast.policy.signs import Action, Cause
from holdfast.record import operator
from holdfast.record.directory import ControlDirectory
from kit.harness import finish, holdfast
from kit.nodes.machines import inside_mounts

FULL = Trouble(path="/data/run", full=True, free=4 * MIB, waited=30.2)
MORE_THAN_ANY_DISK = 1 << 62


def test_the_last_words_say_what_is_saved_what_is_lost_and_what_to_do() -> None:
    assert last_words(FULL, saved=40, last=100) == (
        "the disk is full (4.0 MiB free in /data/run, 1.0 GiB needed; waited 30 s). "
        "Saved up to step 40; steps 41–100 are lost. Next: free space, run the same command."
    )
    assert "step 40; step 41 is lost. " in last_words(FULL, saved=40, last=41)
    assert "Saved up to step 40; no step is lost. " in last_words(FULL, saved=40, last=40)
    assert "Nothing is saved; steps 1–9 are lost. " in last_words(FULL, saved=0, last=9)


def test_what_is_not_known_is_left_out() -> None:
    assert "Saved up to step 40. Next" in last_words(FULL, saved=40, last=None)
    told = last_words(FULL, saved=None, last=100)
    assert "step" not in told
    quota = Trouble(path="/d", problem="cannot write: Disk quota exceeded", full=True, free=1 << 40)
    assert "free in" not in quota.describe(), "they would only puzzle"
    broken = Trouble(path="/d", problem="it does not answer")
    assert last_words(broken, saved=1, last=None).startswith("the storage of /d takes nothing (it does not")
    assert "queued again" in last_words(FULL, saved=1, last=None, requeued=True)


@pytest.mark.parametrize("can_requeue", [False, True])
@pytest.mark.parametrize("exit_code", [ExitCode.STORAGE_FAILED, -9, 1])
def test_no_restart_is_decided_that_could_not_begin(exit_code: int, can_requeue: bool) -> None:
    attempt = PastAttempt(
        number=1, launch="l", outcome="failed", cause=Cause.INFRASTRUCTURE, exit_code=exit_code, nodes=["a"]
    )
    well = Situation(attempt=attempt, max_restarts=3)
    assert recover([], well).action is Action.RESTART
    full = Situation(attempt=attempt, max_restarts=3, storage=FULL.brief, can_requeue=can_requeue)
    decision = recover([], full)
    assert decision.action is (Action.REQUEUE if can_requeue else Action.STOP)
    assert decision.exit_code == ExitCode.STORAGE_FAILED
    assert "full" in decision.reason or can_requeue
    assert decision.restarts_left == 3, "none was used"


def test_little_space_is_trouble_where_the_gate_would_keep_the_node_out(tmp_path: Path) -> None:
    root = tmp_path / "checkpoints"
    assert find_trouble([tmp_path, root]) is None
    found = find_trouble([tmp_path, root], MORE_THAN_ANY_DISK)
    assert found is not None
    assert (found.full, found.path, found.problem) == (True, str(tmp_path), "")
    assert find_trouble([tmp_path / "gone"]) is not None
    settings = Settings()
    assert least_space(settings) == 16 * MIB
    lenient = msgspec.structs.replace(settings.health, gate="warn")
    assert least_space(msgspec.structs.replace(settings, health=lenient)) == 0


def test_the_wait_is_told_and_ends_with_what_is_wrong(tmp_path: Path) -> None:
    told: list[str] = []
    found = await_storage(
        [tmp_path], check=lambda: None, tell=told.append, least=MORE_THAN_ANY_DISK, patience=0.05
    )
    assert found is not None
    assert found.waited > 0.05
    assert len(told) == 1
    assert await_storage([tmp_path], check=lambda: None, tell=told.append) is None


def test_a_meeting_that_nobody_may_come_to_for_want_of_space_is_no_lack_of_nodes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    class Context:
        settings = msgspec.structs.replace(
            Settings(), run=msgspec.structs.replace(Settings().run, dir=str(tmp_path))
        )
        control = None

    class Config:
        run_id, min_nodes = "x", 1

    monkeypatch.setattr(launcher, "highest_committed_step", lambda *_: 40)
    error = RendezvousTimeoutError("waited")

    def explain() -> int:
        return launcher._explain_rendezvous(error, Config, Context)[0]  # type: ignore[arg-type]

    assert explain() == ExitCode.NO_CAPACITY
    monkeypatch.setattr(launcher, "least_space", lambda _: MORE_THAN_ANY_DISK)
    capsys.readouterr()
    assert explain() == ExitCode.STORAGE_FAILED
    err = capsys.readouterr().err
    assert "stopped: the disk is full" in err
    assert "Saved up to step 40. Next: free space" in err
    assert "rendezvous" not in err


TRAIN = """
import os, sys, torch, torch.distributed as dist, holdfast
dist.init_process_group("gloo")
run = holdfast.Run(run_dir="run", checkpoint_interval=20)
run.track(model=torch.nn.Linear(1024, 2048))
run.start()
while run.step < 200:
    run.begin_step()
    dist.all_reduce(torch.ones(1))
    if run.step == 40 and os.environ["RANK"] == "0":
        free = os.statvfs("run")
        left = free.f_bavail * free.f_frsize - int(sys.argv[1])
        with open("run/filler", "wb", buffering=0) as filler:
            try:
                while left > 0:
                    left -= filler.write(bytes(min(left, 1 << 16)))
            except OSError:
                pass
    run.end_step()
run.finish()
"""


@pytest.mark.drill
@pytest.mark.usefixtures("mount_namespaces")
@pytest.mark.parametrize("left", [4 * MIB, 0], ids=["little is left", "nothing is left"])
def test_a_disk_that_stays_full_is_told_once_at_the_end(tmp_path: Path, left: int) -> None:
    """With a little space a decision can be recorded, and the gate lets nobody in; with none it cannot."""
    (tmp_path / "run").mkdir()
    (tmp_path / "train.py").write_text(TRAIN)
    flags = ("--nproc-per-node", "2", "--run-dir", "run", "--set", "checkpoint.max_failed_saves=2")
    command = holdfast("run", *flags, "train.py", str(left))
    setup = "mount -t tmpfs -o size=120m tmpfs run"
    result = finish(inside_mounts(setup, command), cwd=tmp_path, timeout=120)
    assert result.code == ExitCode.STORAGE_FAILED, result.text
    ends = [line for line in result.err.splitlines() if "stopped: " in line]
    assert len(ends) == 1, result.text
    assert "stopped: the disk is full (" in ends[0]
    assert "; waited 30 s). Saved up to step 40; steps 41–80 are lost. Next: free space" in ends[0]
    for wrong in ("restart,", "rendezvous", "bring nodes", "has no record", "parked"):
        assert wrong not in result.err, result.text


class StoppedError(Exception):
    pass


def nothing() -> None:
    pass


def test_without_a_pause_nobody_waits_and_nothing_is_said(control: ControlDirectory) -> None:
    told: list[str] = []
    assert wait_while_paused(control, 600.0, check=nothing, tell=told.append)
    assert told == []


def test_the_wait_ends_when_recovery_is_resumed(control: ControlDirectory) -> None:
    operator.pause(control, "the switch is replaced", "alice")
    told: list[str] = []
    looks = 0

    def check() -> None:
        nonlocal looks
        looks += 1
        if looks == 2:
            threading.Thread(target=operator.unpause, args=(control, "done", "bob")).start()

    assert wait_while_paused(control, 600.0, check=check, tell=told.append)
    assert told[0].startswith(
        "recovery is paused by alice: the switch is replaced. Nothing is restarted until"
    )
    assert f"holdfast control unpause {control.path}" in told[0]
    assert told[-1].startswith("recovery goes on")


def test_the_wait_has_an_end_of_its_own(control: ControlDirectory) -> None:
    operator.pause(control, "why", "alice")
    told: list[str] = []
    assert not wait_while_paused(control, 0.2, check=nothing, tell=told.append)
    assert "stayed paused" in told[-1]
    assert not wait_while_paused(control, 0.0, check=nothing, tell=told.append)


def test_a_stop_ends_the_wait(control: ControlDirectory) -> None:
    operator.pause(control, "why", "alice")

    def check() -> None:
        raise StoppedError

    with pytest.raises(StoppedError):
        wait_while_paused(control, 600.0, check=check, tell=lambda text: None)


def test_records_that_cannot_be_read_for_a_while_are_no_reason_to_go_on(
    control: ControlDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    operator.pause(control, "why", "alice")
    monkeypatch.setattr(decision, "PAUSE_POLL", 0.01)
    real, looks = decision.paused, 0

    def flaky(control: ControlDirectory) -> operator.OperatorRequest | None:
        nonlocal looks
        looks += 1
        if looks in (3, 4, 5):
            raise ControlError("the server does not answer")
        if looks == 8:
            operator.unpause(control, "why", "alice")
        return real(control)

    monkeypatch.setattr(decision, "paused", flaky)
    assert wait_while_paused(control, 600.0, check=nothing, tell=lambda text: None)
    assert looks == 8
