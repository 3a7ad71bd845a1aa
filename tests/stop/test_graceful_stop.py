"""A run under `holdfast run` that is asked to stop, in every way: one step, one save, one code."""

from __future__ import annotations

import os
import re
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from holdfast.errors import ExitCode
from holdfast.journal.events import DecisionMade, StopAgreed, StopAsked, StopForced, StopSaved, Warned
from holdfast.policy.requests import REPEATED
from holdfast.record.attempts import failures_of
from holdfast.record.directory import ControlDirectory
from kit.commands import command
from kit.harness import Job, finish, job, wait_until
from kit.nodes.nodes import cluster, free_endpoint, workers_of
from kit.runs import ends, journalled, leads
from kit.tiny import checkpoints
from kit.worlds.stopped import (
    SCRIPT,
    await_end,
    await_step,
    launch,
    pid_of,
    steps,
    stopped_well,
)

drill = pytest.mark.drill
A_WHILE = REPEATED + 0.2
"""Seconds after which a second signal is no longer the first one on another way."""


def to_ranks(number: signal.Signals, *ranks: int) -> Callable[[Job, Path], None]:
    def ask(running: Job, cwd: Path) -> None:
        del running
        for rank in ranks:
            os.kill(pid_of(cwd, rank), number)

    return ask


def to_agent(number: signal.Signals) -> Callable[[Job, Path], None]:
    return lambda running, cwd: running.signal(number)


def to_everybody(running: Job, cwd: Path) -> None:
    """As a scheduler does: the agent, the ranks, whatever runs."""
    for pid in [running.pid, pid_of(cwd, 0), pid_of(cwd, 1)]:
        os.kill(pid, signal.SIGTERM)


def stop_file(running: Job, cwd: Path) -> None:
    """Where nobody could look for it for a while, as on a file server that is gone: nothing ends by that."""
    del running
    point_to(cwd, "x" * 300)  # longer than a name may be
    wait_until(
        lambda: [one for one in journalled(cwd, Warned) if "cannot be looked for" in one.message],
        20,
        "it is told that the file cannot be looked for",
    )
    point_to(cwd, "run")
    (cwd / "run" / "stop").touch()


def point_to(cwd: Path, name: str) -> None:
    (cwd / "link").unlink(missing_ok=True)
    (cwd / "link").symlink_to(name)


def operator(running: Job, cwd: Path) -> None:
    del running
    done = command("control", "stop", cwd / "run", "--reason", "maintenance", "--by", "alice")
    assert done.code == 0, done.text


@pytest.mark.parametrize(
    ("ask", "source", "words"),
    [
        pytest.param(to_ranks(signal.SIGTERM, 1), "signal", "to rank 1", id="one rank"),
        pytest.param(to_everybody, "signal", "SIGTERM", id="everybody", marks=drill),
        pytest.param(stop_file, "stop_file", "stop file", id="stop file", marks=drill),
        pytest.param(operator, "operator", "alice: maintenance", id="an operator", marks=drill),
        pytest.param(to_agent(signal.SIGUSR1), "signal", "SIGUSR1", id="USR1 to the agent", marks=drill),
        pytest.param(to_agent(signal.SIGTERM), "signal", "to the launcher", id="agent", marks=drill),
        pytest.param(to_agent(signal.SIGUSR2), "signal", "SIGUSR2", id="USR2 to the agent", marks=drill),
        pytest.param(to_agent(signal.SIGINT), "signal", "SIGINT", id="Ctrl-C", marks=drill),
        pytest.param(to_ranks(signal.SIGTERM, 0, 1), "signal", "SIGTERM", id="all ranks", marks=drill),
        pytest.param(to_ranks(signal.SIGUSR2, 0), "signal", "SIGUSR2", id="USR2 to one rank", marks=drill),
    ],
)
def test_however_it_is_asked_all_ranks_stop_after_one_step_with_one_save(
    tmp_path: Path, ask: Callable[[Job, Path], None], source: str, words: str
) -> None:
    """Scenario 17; cases Lightning#20806, #8130, pytorch#154849: the same outcome wherever it was asked."""
    point_to(tmp_path, "run")
    command = launch("--set", "stop.stop_file=link/stop")
    with job(command, cwd=tmp_path) as running:
        await_step(running, tmp_path, 3)
        asked = time.monotonic()
        ask(running, tmp_path)
        result = await_end(running, asked)
    stopped_well(tmp_path, result, source, words)
    assert len(checkpoints(tmp_path / "run")) == 1
    if source != "stop_file":
        return
    assert (tmp_path / "run" / "stop").exists(), "it is not ours to delete"
    refused = finish(command, cwd=tmp_path)
    assert refused.code == ExitCode.USAGE, refused.text
    assert "the stop file link/stop is there already" in refused.err
    assert ends(tmp_path) == [("stopped", ExitCode.STOPPED)], "nothing was started"


@pytest.mark.drill
def test_an_operators_stop_ends_one_launch_and_is_shown_meanwhile(tmp_path: Path) -> None:
    """A new launch is not stopped by an old record; status tells of the stop, then of what was saved."""
    env = {"STOP_WAIT": "0:4"}
    with job(launch(), cwd=tmp_path, env=env) as running:
        wait_until((tmp_path / "waiting0").exists, 60, f"step 4: {running.output().text}")
        operator(running, tmp_path)
        wait_until(lambda: journalled(tmp_path, StopAgreed), 20, "the launcher has seen it")
        shown = command("status", tmp_path / "run")
        assert shown.code == 0, shown.text
        assert "stopping, attempt 1" in shown.out
        assert "asked by an operator" in shown.out
        assert "alice: maintenance" in shown.out
        assert " s left, all ranks stop after step 4" in shown.out
        (tmp_path / "go").touch()
        result = running.wait(60)
    step = stopped_well(tmp_path, result, "operator", "alice")
    shown = command("status", tmp_path / "run")
    assert shown.code == 1
    assert f"stopped, attempt 1: step {step} is saved" in shown.out, shown.out
    assert "(exit code 31)" in shown.out, shown.out
    refused = command("control", "stop", tmp_path / "run", "--reason", "again")
    assert refused.code == ExitCode.USAGE, refused.text
    assert "no launcher" in refused.text
    again = finish(launch(), cwd=tmp_path, env={"STOP_UNTIL": str(step + 2)})
    assert again.code == 0, again.text
    assert steps(tmp_path)[1] == [step + 1, step + 2], "it went on where it was stopped"


@pytest.mark.drill
def test_a_rank_stuck_beside_a_collective_is_ended_by_the_deadline_with_its_stacks(tmp_path: Path) -> None:
    """E1: rank 1 is caught outside, rank 0 waits for it in an all-reduce; nobody waits for ever."""
    flags = ("--set", "stop.shutdown_timeout_sec=2")
    with job(launch(*flags), cwd=tmp_path, env={"STOP_WAIT": "1:4"}) as running:
        wait_until((tmp_path / "waiting1").exists, 60, f"step 4: {running.output().text}")
        asked = time.monotonic()
        running.signal(signal.SIGTERM)
        result = await_end(running, asked)
    assert result.code == ExitCode.STOPPED_UNSAVED, result.text
    assert [one.step for one in journalled(tmp_path, StopAgreed)] == [4]
    forced = journalled(tmp_path, StopForced)
    assert sorted(one.rank for one in forced) == [0, 1]
    for rank, doing in ((0, r"line \d+ in all_reduce"), (1, r'train_stop\.py", line \d+ in wait')):
        text = (tmp_path / "run" / "attempts" / "000001" / "stop" / f"rank_{rank}.txt").read_text()
        assert re.search(doing, text), text
    assert ends(tmp_path) == [("stopped", ExitCode.STOPPED_UNSAVED)]
    assert failures_of(ControlDirectory.open(tmp_path / "run"), 1), "the evidence is kept"
    (decision,) = [one for one in journalled(tmp_path, DecisionMade) if one.about == "recovery"]
    assert decision.chosen == "stop"
    assert not journalled(tmp_path, StopSaved)
    assert not checkpoints(tmp_path / "run")


@drill
def test_a_second_signal_means_now_and_one_right_after_the_first_does_not(tmp_path: Path) -> None:
    with job(launch(), cwd=tmp_path, env={"STOP_WAIT": "1:4"}) as running:
        wait_until((tmp_path / "waiting1").exists, 60, f"step 4: {running.output().text}")
        running.signal(signal.SIGTERM)
        wait_until(lambda: journalled(tmp_path, StopAgreed), 20, "the step is agreed on")
        running.signal(signal.SIGTERM)
        deadline = time.monotonic() + A_WHILE
        while time.monotonic() < deadline:
            assert running.process.poll() is None, running.output().text
            time.sleep(0.05)
        asked = time.monotonic()
        running.signal(signal.SIGTERM)
        result = await_end(running, asked)
    assert result.code == ExitCode.STOPPED_UNSAVED, result.text
    assert "a second signal, means now" in result.err
    (forced,) = journalled(tmp_path, StopForced)
    assert "to the launcher on" in forced.why
    assert not checkpoints(tmp_path / "run")


@pytest.mark.drill
def test_a_second_ctrl_c_means_now_at_once(tmp_path: Path) -> None:
    with job(launch(), cwd=tmp_path, env={"STOP_WAIT": "1:4"}) as running:
        wait_until((tmp_path / "waiting1").exists, 60, f"step 4: {running.output().text}")
        running.signal(signal.SIGINT)
        wait_until(lambda: journalled(tmp_path, StopAsked), 20, "the first is seen")
        asked = time.monotonic()
        running.signal(signal.SIGINT)
        result = await_end(running, asked)
    assert result.code == ExitCode.STOPPED_UNSAVED, result.text
    assert "a second signal, means now" in result.err
    assert len(journalled(tmp_path, StopForced)) == 1
    assert not checkpoints(tmp_path / "run")
    assert ends(tmp_path) == [("stopped", ExitCode.STOPPED_UNSAVED)]


@drill
def test_a_second_signal_to_a_rank_means_now_for_all(tmp_path: Path) -> None:
    with job(launch(), cwd=tmp_path, env={"STOP_WAIT": "1:4"}) as running:
        wait_until((tmp_path / "waiting1").exists, 60, f"step 4: {running.output().text}")
        os.kill(pid_of(tmp_path, 0), signal.SIGUSR2)
        wait_until(lambda: journalled(tmp_path, StopAgreed), 20, "the step is agreed on")
        deadline = time.monotonic() + A_WHILE
        while time.monotonic() < deadline:
            assert running.process.poll() is None, running.output().text
            time.sleep(0.05)
        asked = time.monotonic()
        os.kill(pid_of(tmp_path, 0), signal.SIGUSR2)
        result = await_end(running, asked)
    assert result.code == ExitCode.STOPPED_UNSAVED, result.text
    assert ends(tmp_path) == [("stopped", ExitCode.STOPPED_UNSAVED)]
    assert journalled(tmp_path, StopForced)


@drill
def test_a_script_that_keeps_its_signals_gets_them_from_the_launcher(tmp_path: Path) -> None:
    """stop.exit_signal_handler = false: SIGTERM is the script's affair, and nobody else saves for it."""
    flags = ("--set", "stop.exit_signal_handler=false", "--set", "launch.stop_grace=5")
    with job(launch(*flags), cwd=tmp_path) as running:
        await_step(running, tmp_path, 3)
        asked = time.monotonic()
        running.signal(signal.SIGTERM)
        result = await_end(running, asked)
    assert result.code == ExitCode.STOPPED_UNSAVED, result.text
    assert ends(tmp_path) == [("stopped", ExitCode.STOPPED_UNSAVED)]
    assert not journalled(tmp_path, StopAgreed)


@pytest.mark.drill
def test_a_rank_killed_during_the_stop_ends_it_unsaved_and_starts_nothing(tmp_path: Path) -> None:
    with job(launch("--max-restarts", "3"), cwd=tmp_path, env={"STOP_WAIT": "1:4"}) as running:
        wait_until((tmp_path / "waiting1").exists, 60, f"step 4: {running.output().text}")
        running.signal(signal.SIGTERM)
        wait_until(lambda: journalled(tmp_path, StopAgreed), 20, "the step is agreed on")
        asked = time.monotonic()
        os.kill(pid_of(tmp_path, 1), signal.SIGKILL)
        result = await_end(running, asked)
    assert result.code == ExitCode.STOPPED_UNSAVED, result.text
    assert ends(tmp_path) == [("stopped", ExitCode.STOPPED_UNSAVED)], "nothing was restarted"
    (failure,) = [one for one in failures_of(ControlDirectory.open(tmp_path / "run"), 1) if one.rank == 1]
    assert failure.exit_code == -signal.SIGKILL
    (decision,) = [one for one in journalled(tmp_path, DecisionMade) if one.about == "recovery"]
    assert "while it was being stopped" in decision.evidence[-1]


@drill
def test_a_stop_before_the_first_step_saves_nothing_and_is_no_loss(tmp_path: Path) -> None:
    with job(launch(), cwd=tmp_path, env={"STOP_WAIT": "all:setup"}) as running:
        wait_until(lambda: len(list(tmp_path.glob("waiting*"))) == 2, 60, f"setup {running.output().text}")
        running.signal(signal.SIGTERM)
        wait_until(lambda: journalled(tmp_path, StopAgreed), 20, "the step is agreed on")
        (tmp_path / "go").touch()
        result = running.wait(60)
    assert result.code == ExitCode.STOPPED, result.text
    assert steps(tmp_path) == {0: [], 1: []}
    assert not checkpoints(tmp_path / "run")
    assert ends(tmp_path) == [("stopped", ExitCode.STOPPED)]


@drill
def test_ranks_that_are_long_in_their_setup_are_not_waited_for(tmp_path: Path) -> None:
    flags = ("--set", "launch.stop_grace=1")
    with job(launch(*flags), cwd=tmp_path, env={"STOP_WAIT": "all:setup"}) as running:
        wait_until(lambda: len(list(tmp_path.glob("waiting*"))) == 2, 60, f"setup {running.output().text}")
        asked = time.monotonic()
        running.signal(signal.SIGTERM)
        result = await_end(running, asked)
    assert result.code == ExitCode.STOPPED, result.text
    assert ends(tmp_path) == [("stopped", ExitCode.STOPPED)]


@drill
def test_a_stop_on_a_save_step_saves_once(tmp_path: Path) -> None:
    """Scenario 18."""
    with job(launch(), cwd=tmp_path, env={"STOP_WAIT": "1:5", "STOP_EVERY": "5"}) as running:
        wait_until((tmp_path / "waiting1").exists, 60, f"step 5: {running.output().text}")
        running.signal(signal.SIGTERM)
        wait_until(lambda: journalled(tmp_path, StopAgreed), 20, "the step is agreed on")
        (tmp_path / "go").touch()
        result = running.wait(60)
    assert stopped_well(tmp_path, result, "signal", "SIGTERM") == 5
    assert len(checkpoints(tmp_path / "run")) == 1


@drill
def test_a_script_that_ends_with_0_after_it_was_stopped_has_not_finished(tmp_path: Path) -> None:
    with job(launch(), cwd=tmp_path, env={"STOP_CATCH": "1"}) as running:
        await_step(running, tmp_path, 3)
        asked = time.monotonic()
        running.signal(signal.SIGTERM)
        result = await_end(running, asked)
    stopped_well(tmp_path, result, "signal", "SIGTERM")


@drill
def test_a_run_that_reaches_its_last_step_while_it_is_stopped_has_finished(tmp_path: Path) -> None:
    with job(launch(), cwd=tmp_path, env={"STOP_WAIT": "1:5", "STOP_UNTIL": "5"}) as running:
        wait_until((tmp_path / "waiting1").exists, 60, f"step 5: {running.output().text}")
        running.signal(signal.SIGTERM)
        wait_until(lambda: journalled(tmp_path, StopAgreed), 20, "the step is agreed on")
        (tmp_path / "go").touch()
        result = running.wait(60)
    assert result.code == 0, result.text
    assert ends(tmp_path) == [("finished", 0)]
    assert len(list(tmp_path.glob("finished*"))) == 2


# --- several nodes ------------------------------------------------------------------------------------------


def leader_and_others(cwd: Path, names: str) -> tuple[str, str]:
    leader = leads(cwd)
    return leader, names.replace(leader, "")


@pytest.mark.drill
def test_a_signal_to_one_nodes_agent_stops_a_job_of_fixed_size_on_all_nodes(tmp_path: Path) -> None:
    with cluster(tmp_path, "2") as group:
        for name in "ab":
            group.start(name, script=SCRIPT, preload=True)
        await_step(group.agents["a"], tmp_path, 3)
        _, other = leader_and_others(tmp_path, "ab")
        asked = time.monotonic()
        group.agents[other].signal(signal.SIGUSR1)
        results = [await_end(group.agents[name], asked) for name in "ab"]
    for result in results:
        stopped_well(tmp_path, result, "signal", f"to the launcher on {other}")
    assert ends(tmp_path) == [("stopped", ExitCode.STOPPED)]
    assert not [one for one in journalled(tmp_path, DecisionMade) if one.about == "recovery"]


@pytest.mark.drill
def test_a_node_that_leaves_a_group_that_may_shrink_saves_with_it_and_the_others_go_on(
    tmp_path: Path,
) -> None:
    """Case pytorch#67742: SIGTERM to one agent is a scale-down; no step is lost by it."""
    with cluster(tmp_path, "1:2") as group:
        for name in "ab":
            group.start(name, script=SCRIPT, preload=True)
        await_step(group.agents["a"], tmp_path, 3)
        leader, other = leader_and_others(tmp_path, "ab")
        before = set(tmp_path.glob("log.*.*"))
        group.agents[other].signal(signal.SIGTERM)
        left = group.agents[other].wait(60)
        assert left.code == ExitCode.STOPPED, left.text
        wait_until(lambda: set(tmp_path.glob("log.*.*")) - before, 60, "the other node goes on")
        (saved,) = journalled(tmp_path, StopSaved)
        wait_until(lambda: steps(tmp_path)[0][:1] == [saved.step + 1], 20, "from the step that was saved")
        group.agents[leader].signal(signal.SIGTERM)
        last = group.agents[leader].wait(60)
        assert last.code == ExitCode.STOPPED, last.text
    assert ends(tmp_path) == [("stopped", 0), ("stopped", ExitCode.STOPPED)]
    assert not [one for one in journalled(tmp_path, DecisionMade) if one.about == "recovery"]


def test_a_signal_while_the_nodes_meet_ends_the_launcher_with_31(tmp_path: Path) -> None:
    """Nothing runs, so there is nothing to save, and nobody has to be asked."""
    with cluster(tmp_path, "2") as group:
        group.start("a")
        wait_until((tmp_path / "run" / "run.json").exists, 60, "a waits for another node")
        asked = time.monotonic()
        group.agents["a"].signal(signal.SIGUSR1)
        result = await_end(group.agents["a"], asked)
    assert result.code == ExitCode.STOPPED, result.text
    assert "Traceback" not in result.err
    assert not ends(tmp_path)


@drill
def test_a_signal_to_one_node_of_a_paused_job_of_fixed_size_ends_it_on_all(tmp_path: Path) -> None:
    with cluster(tmp_path, "2") as group:
        for name in "ab":
            group.start(name, acts="wait")
        group.wait_for_workers(1, 2)
        done = command("control", "pause", tmp_path / "run", "--reason", "why")
        assert done.code == 0, done.text
        for pid in workers_of(group.agents["a"])[:1]:
            os.kill(pid, signal.SIGKILL)
        for name in "ab":
            group.said(name, "recovery is paused by")
        _, other = leader_and_others(tmp_path, "ab")
        asked = time.monotonic()
        group.agents[other].signal(signal.SIGTERM)
        for name in "ab":
            assert await_end(group.agents[name], asked).code == ExitCode.STOPPED
    assert ends(tmp_path) == [("failed", -9)]


@drill
def test_a_group_that_may_shrink_ends_when_all_its_agents_are_signalled(tmp_path: Path) -> None:
    """Preemption reaches every agent at about the same time: nobody is left to go on."""
    with cluster(tmp_path, "1:2") as group:
        for name in "ab":
            group.start(name, script=SCRIPT, preload=True)
        await_step(group.agents["a"], tmp_path, 3)
        leader, other = leader_and_others(tmp_path, "ab")
        asked = time.monotonic()
        for name in (other, leader):
            group.agents[name].signal(signal.SIGTERM)
        for name in "ab":
            result = await_end(group.agents[name], asked)
            assert result.code == ExitCode.STOPPED, result.text
    assert len(ends(tmp_path)) == 1, "no other attempt began"
    assert len(journalled(tmp_path, StopSaved)) == 1


@drill
def test_nodes_of_a_static_rendezvous_stop_together(tmp_path: Path) -> None:
    port = free_endpoint().rpartition(":")[2]
    static = ("--nnodes", "2", "--master-addr", "127.0.0.1", "--master-port", port)
    commands = [launch(*static, "--node-rank", str(rank), ranks=1) for rank in (0, 1)]
    with job(commands[0], cwd=tmp_path) as leader, job(commands[1], cwd=tmp_path) as other:
        await_step(leader, tmp_path, 3)
        asked = time.monotonic()
        other.signal(signal.SIGTERM)
        for result in (await_end(leader, asked), await_end(other, asked)):
            stopped_well(tmp_path, result, "signal", "to the launcher")


@drill
def test_a_leader_lost_during_a_stop_ends_it_unsaved_on_all_nodes(tmp_path: Path) -> None:
    with cluster(tmp_path, "3") as group:
        for name in "abc":
            group.start(name, script=SCRIPT, preload=True, wrap=lambda argv: ["env", "STOP_WAIT=1:4", *argv])
        wait_until((tmp_path / "waiting1").exists, 90, "step 4")
        leader, others = leader_and_others(tmp_path, "abc")
        group.agents[others[0]].signal(signal.SIGTERM)
        wait_until(lambda: journalled(tmp_path, StopAgreed), 20, "the step is agreed on")
        asked = time.monotonic()
        group.agents[leader].signal(signal.SIGKILL)
        for name in others:
            assert await_end(group.agents[name], asked).code == ExitCode.STOPPED_UNSAVED
    assert ends(tmp_path) == [None]
    assert not checkpoints(tmp_path / "run")


@drill
def test_three_nodes_stop_together_when_a_rank_of_one_is_signalled(tmp_path: Path) -> None:
    with cluster(tmp_path, "3") as group:
        for name in "abc":
            group.start(name, script=SCRIPT, preload=True)
        await_step(group.agents["a"], tmp_path, 3, ranks=3)
        asked = time.monotonic()
        os.kill(pid_of(tmp_path, 2), signal.SIGUSR1)
        for name in "abc":
            result = await_end(group.agents[name], asked)
            stopped_well(tmp_path, result, "signal", "to rank 2", ranks=3)
