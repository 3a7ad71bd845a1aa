"""What an operator asks of a run is done by a real launcher: paused, pinned, forgiven, told."""

from __future__ import annotations

import json
import os
import signal

import pytest

from holdfast.errors import ExitCode
from holdfast.journal import events
from holdfast.record.attempts import HeadRecord, attempt_numbers
from holdfast.record.directory import read_record
from holdfast.record.operator import in_force
from kit.acting import MOMENT, Place, stays
from kit.harness import REPO, holdfast, job, wait_until

RUNG = str(REPO / "tests" / "scripts" / "train" / "train_rung.py")


@pytest.mark.drill
def test_a_paused_failure_waits_and_goes_on_from_what_was_pinned_meanwhile(place: Place) -> None:
    """The whole of what an operator does about a run that looks wrong, with the alert that called him."""
    alert = "launch.alert_command=cat >> alerts; echo >> alerts"
    command = holdfast("run", "--run-dir", "run", "--set", alert, "--set", "launch.node_name=n")
    with job([*command, RUNG, "gate", "log"], cwd=place.cwd, env=place.environment()) as running:
        wait_until((place.cwd / "waiting").exists, 60, f"step 8: {running.output().text}")
        place.control("pause", "--reason", "loss looks odd", "--by", "alice")
        assert running.process.poll() is None
        assert place.status()["state"] == "running", "a running attempt goes on"
        (line,) = (place.cwd / "log").read_text().splitlines()
        os.kill(int(line.split()[2]), signal.SIGKILL)
        said = "recovery is paused by alice: loss looks odd. Nothing is restarted until"
        wait_until(lambda: said in running.output().err, MOMENT, said)
        found = place.status()
        assert found["state"] == "paused"
        assert found["paused"]["by"] == "alice"
        assert found["exit_code"] is None
        assert "rank 0 on n was killed by SIGKILL in step 8" in found["incident"]["text"]
        place.control("pin", "3", "--reason", "before it looked odd", "--yes")
        stays(lambda: attempt_numbers(place.run()) == [1], "restarted although recovery is paused")
        place.control("unpause", "--reason", "go on", "--by", "alice")
        assert running.wait(60).code == 0, running.output().text
        assert "recovery goes on, after a pause of" in running.output().err
    assert [line.split()[:2] for line in (place.cwd / "log").read_text().splitlines()] == [
        ["1", "1"],
        ["2", "4"],
    ]
    head = read_record(place.run().attempt(2) / "head.json", HeadRecord)
    assert head is not None
    assert head.step == 3
    found = place.status()
    assert (found["state"], found["paused"], found["pin"]) == ("finished", None, None), "used up"
    acted = [one.action for one in place.journalled(events.OperatorActed)]
    assert acted == ["pause", "pin", "unpause"]
    (alert_text,) = (place.cwd / "alerts").read_text().splitlines()
    told = json.loads(alert_text)
    assert (told["kind"], told["attempt"], told["cause"]) == ("incident", 1, "infrastructure")
    assert told["run"] == place.run().run_id
    assert told["run_dir"] == str(place.cwd / "run")
    assert told["text"].startswith("rank 0 on n was killed by SIGKILL in step 8 → restarting")


@pytest.mark.drill
def test_a_signal_ends_a_paused_launcher_and_the_pause_ends_by_itself(place: Place) -> None:
    """A pause holds no machine that somebody wants back, nor any for ever."""
    command = place.launch(acts="go?ok;kill")
    with job(command, cwd=place.cwd, env=place.environment()) as running:
        (worker,) = place.await_workers(running, 1)
        place.control("pause", "--reason", "why")
        os.kill(worker.pid, signal.SIGKILL)
        wait_until(lambda: "recovery is paused by" in running.output().err, MOMENT, "the launcher waits")
        running.signal(signal.SIGTERM)
        result = running.wait(MOMENT)
    assert result.code == ExitCode.STOPPED, result.text
    assert len(place.seen()) == 1
    assert in_force(place.run()).paused is not None, "the request holds for the next launch"
    alert = ("--set", "launch.alert_command=cat >> alerts; echo >> alerts")
    late = place.finish(place.launch("--set", "launch.max_pause=1", *alert, acts="go?ok;kill"))
    assert late.code == ExitCode.PAUSED_TOO_LONG, late.text
    *_, told = (json.loads(line) for line in (place.cwd / "alerts").read_text().splitlines())
    assert (told["kind"], told["exit_code"]) == ("stop", ExitCode.PAUSED_TOO_LONG)
    assert "recovery stayed paused for 1 s" in told["text"]
    assert [one.attempt for one in place.seen()] == [1, 2], "a new launch starts, and is not restarted"


@pytest.mark.drill
def test_a_reset_budget_lets_a_stopped_run_restart_again(place: Place) -> None:
    command = place.launch("--max-restarts", "1", acts="kill;kill;kill;ok")
    first = place.finish(command)
    assert first.code == ExitCode.BUDGET_SPENT, first.text
    assert [one.attempt for one in place.seen()] == [1, 2]
    place.control("reset-budget", "--reason", "bad cable found")
    again = place.finish(command)
    assert again.code == 0, again.text
    assert [one.attempt for one in place.seen()] == [1, 2, 3, 4]
    assert place.outcomes() == ["failed", "failed", "failed", "finished"]
    assert place.decisions()[-1].details["restarts_left"] == 0
