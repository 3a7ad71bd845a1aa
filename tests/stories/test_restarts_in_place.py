"""In-process restart under `holdfast run`, with real agents, workers and signals."""

from __future__ import annotations

import os
import shutil
import signal
from pathlib import Path

import pytest

from holdfast.errors import ExitCode
from holdfast.journal import events
from holdfast.journal.events.run import RestartHandedOver, RestartPlanned, StopAgreed, StopAsked
from holdfast.observe.status import status_of
from holdfast.record.attempts import failures_of
from holdfast.record.directory import ControlDirectory
from kit.harness import REPO, Result, finish, holdfast, job, wait_until
from kit.nodes.local_tier import memory
from kit.nodes.nodes import Cluster, cluster
from kit.ranks.local_ranks import await_replicas
from kit.runs import control_of, end_records, journalled, record

SCRIPT = str(REPO / "tests" / "scripts" / "train" / "train_restarting.py")
QUICK = {
    "inprocess.enabled": "true",
    "inprocess.granularity": "rank",
    "inprocess.soft_timeout": "10",
    "inprocess.hard_timeout": "15",
    "inprocess.barrier_timeout": "30",
}
LONGEST = 90.0


def launch(ranks: int = 2, flags: tuple[str, ...] = (), **settings: str) -> list[str]:
    chosen = QUICK | {f"inprocess.{name}": value for name, value in settings.items()}
    given = [word for name, value in chosen.items() for word in ("--set", f"{name}={value}")]
    where = ["--nproc-per-node", str(ranks), "--run-dir", "run"]
    return holdfast("run", *where, *given, *flags, SCRIPT)


def ends(cwd: Path) -> list[tuple[str, int, str] | None]:
    return [end and (end.outcome, end.exit_code, end.cause) for end in end_records(cwd)]


def decided(cwd: Path) -> list[tuple[str, int]]:
    found = [one for one in journalled(cwd, events.DecisionMade) if one.about == "recovery"]
    return [(one.chosen, one.details["restarts_left"]) for one in found]


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> dict[str, object]:
    """An undisturbed run of two ranks."""
    directory = tmp_path_factory.mktemp("reference")
    result = finish(launch(), cwd=directory, timeout=LONGEST)
    assert result.code == 0, result.text
    found = record(directory)
    assert len(found) == 2 + 18
    return found


def run(cwd: Path, do: str, ranks: int = 2, flags: tuple[str, ...] = (), **settings: str) -> Result:
    return finish(launch(ranks, flags, **settings), cwd=cwd, env={"RESTARTING_DO": do}, timeout=LONGEST)


def test_after_an_exception_the_same_processes_go_on_as_the_next_attempt(
    tmp_path: Path, reference: dict[str, object]
) -> None:
    """Scenario 15: one budget, one history, bitwise the same result."""
    result = run(tmp_path, "1:5:raise", monitor_process_logdir="logs/keepers")
    assert result.code == 0, result.text
    assert record(tmp_path) == reference
    assert ends(tmp_path) == [("failed", 1, "job"), ("finished", 0, "")]
    (log,) = (tmp_path / "logs" / "keepers").glob("keeper-*.log")
    assert "iteration 1: 2 ranks" in log.read_text(), "the launcher's keeper logs like one of its own"
    warned = [one.message for one in journalled(tmp_path, events.Warned)]
    assert not any("process group's timeout" in message for message in warned), "that is Holdfast's own"
    assert "process group's timeout" not in result.text
    assert decided(tmp_path) == [("restart", 2)]
    started = journalled(tmp_path, events.WorkersStarted)
    assert [one.kept for one in started] == [False, True]
    assert started[0].pids == started[1].pids
    failed = {one.rank: one for one in failures_of(control_of(tmp_path), 1)}
    assert failed[1].message == "ValueError: told to fail"
    assert failed[1].pid == started[0].pids[1]
    assert not journalled(tmp_path, events.WorkerFailed), "nobody's process has ended"
    (planned,) = journalled(tmp_path, RestartPlanned)
    assert (planned.iteration, planned.world_size, planned.promoted, planned.ended) == (1, 2, [], 1)
    epochs = [one.epoch for one in journalled(tmp_path, events.AttemptStarted)]
    assert epochs == sorted(set(epochs))
    status = status_of(control_of(tmp_path))
    assert (status.state, status.attempt, status.step, status.problems) == ("finished", 2, 9, [])
    assert list(status.nodes.values()) == [[0, 1]]
    assert status.incident is not None
    assert "told to fail" in status.incident.text


@pytest.mark.drill
def test_a_killed_ranks_place_is_taken_by_a_reserve(tmp_path: Path, reference: dict[str, object]) -> None:
    """Scenario 16, under the launcher: who lives keeps its process, and its rank."""
    result = run(tmp_path, "1:5:SIGKILL", ranks=3, active_world_size="2")
    assert result.code == 0, result.text
    assert record(tmp_path) == reference
    assert ends(tmp_path) == [("failed", -9, "infrastructure"), ("finished", 0, "")]
    assert decided(tmp_path) == [("restart", 2)]
    before, after = journalled(tmp_path, events.WorkersStarted)
    assert after.pids == {0: before.pids[0], 1: before.pids[2]}
    (planned,) = journalled(tmp_path, RestartPlanned)
    assert (planned.order, planned.promoted) == ([0, 2], [2])
    assert [one.world_size for one in journalled(tmp_path, events.AttemptStarted)] == [2, 2]


@pytest.mark.drill
def test_without_a_reserve_the_launcher_restarts_by_the_same_decision(
    tmp_path: Path, reference: dict[str, object]
) -> None:
    """One incident, one decision, one unit of the budget, whichever way the restart is made."""
    result = run(tmp_path, "1:5:SIGKILL")
    assert result.code == 0, result.text
    assert record(tmp_path) == reference
    assert ends(tmp_path) == [("failed", -9, "infrastructure"), ("finished", 0, "")]
    assert decided(tmp_path) == [("restart", 2)]
    before, after = journalled(tmp_path, events.WorkersStarted)
    assert not after.kept
    assert not set(before.pids.values()) & set(after.pids.values())
    told = [(one.rank, one.exit_code) for one in journalled(tmp_path, events.WorkerFailed)]
    assert told == [(1, -9)], "the others were told to end, and each end is told once"
    (over,) = journalled(tmp_path, RestartHandedOver)
    assert "1 ranks are left that can train, and 2 are needed" in over.reason


@pytest.mark.drill
def test_the_same_error_again_stops_with_recoverys_own_code(tmp_path: Path) -> None:
    """Scenario 15, the bound: a restart in process uses up what any restart does, and no more."""
    result = run(tmp_path, "1:5:raise+")
    assert result.code == ExitCode.FAILED, result.text
    assert "the same error repeated without progress" in result.err
    assert ends(tmp_path) == [("failed", 1, "job"), ("failed", 1, "job")]
    assert decided(tmp_path) == [("restart", 2), ("stop", 2)]
    assert [one.kept for one in journalled(tmp_path, events.WorkersStarted)] == [False, True]


def held(cwd: Path, mark: str) -> bool:
    return len(list((cwd / "out").glob(f"{mark}*"))) == 2


def asked(cwd: Path) -> bool:
    return bool(journalled(cwd, StopAsked))


@pytest.mark.drill
@pytest.mark.parametrize("whom", ["agent", "rank"])
def test_a_stop_between_two_calls_is_honoured(tmp_path: Path, whom: str) -> None:
    env = {"RESTARTING_DO": "1:5:raise", "RESTARTING_HOLD": "yes"}
    with job(launch(), cwd=tmp_path, env=env) as running:
        wait_until(lambda: held(tmp_path, "held"), LONGEST, "both ranks have left the function")
        if whom == "agent":
            running.signal(signal.SIGTERM)
            wait_until(lambda: asked(tmp_path), 20, "the stop is known")
        else:
            (started,) = journalled(tmp_path, events.WorkersStarted)
            os.kill(started.pids[0], signal.SIGTERM)
        (tmp_path / "out" / "go").touch()
        result = running.wait(60)
    assert result.code == ExitCode.STOPPED, result.text
    assert ends(tmp_path) == [("stopped", int(ExitCode.STOPPED), "")]
    assert not decided(tmp_path)
    assert status_of(control_of(tmp_path)).state == "stopped"


@pytest.mark.drill
def test_a_stop_after_a_restart_saves_the_step_that_it_is_in(
    tmp_path: Path, reference: dict[str, object]
) -> None:
    with job(launch(), cwd=tmp_path, env={"RESTARTING_DO": "1:5:raise,0:8:wait,1:8:wait"}) as running:
        wait_until(lambda: held(tmp_path, "waits"), LONGEST, "both ranks are at step 8")
        running.signal(signal.SIGTERM)
        wait_until(lambda: journalled(tmp_path, StopAgreed), 20, "the step is agreed on")
        (tmp_path / "out" / "go").touch()
        result = running.wait(60)
    assert result.code == ExitCode.STOPPED, result.text
    assert ends(tmp_path) == [("failed", 1, "job"), ("stopped", int(ExitCode.STOPPED), "")]
    assert run(tmp_path, "").code == 0
    assert record(tmp_path) == reference


@pytest.mark.drill
def test_a_rank_that_stands_still_is_ended_and_replaced(tmp_path: Path, reference: dict[str, object]) -> None:
    """Scenario 16: its keeper ends it, long before the monitor would."""
    result = run(tmp_path, "1:5:SIGSTOP", ranks=3, active_world_size="2")
    assert result.code == 0, result.text
    assert record(tmp_path) == reference
    # Which of the two is seen first, its own standing still or its peer's time-out, is a matter of chance.
    assert [one and (one[0], one[2]) for one in ends(tmp_path)] == [("failed", "hang"), ("finished", "")]
    assert decided(tmp_path) == [("restart", 2)]
    before, after = journalled(tmp_path, events.WorkersStarted)
    assert after.pids == {0: before.pids[0], 1: before.pids[2]}


# --- several nodes -----------------------------------------------------------------------------------------


LOCAL = {
    "checkpoint.async_save": "true", "checkpoint.save_at_end": "false",
    "checkpoint.non_persistent_ckpt_type": "local", "checkpoint.non_persistent_save_interval": "2",
}  # fmt: skip
"""Copies in the nodes' memory, and nowhere else."""
FLAGS = [word for name, value in QUICK.items() for word in ("--set", f"{name}={value}")]


def start_nodes(group: Cluster, memory: Path | None = None) -> None:
    """`memory`: where each node keeps its local copies, if any."""
    for name in "abc":
        local = LOCAL | {"checkpoint.non_persistent_local_ckpt_dir": str(memory / name)} if memory else {}
        flags = [word for key, value in local.items() for word in ("--set", f"{key}={value}")]
        group.start_nodes(name, *FLAGS, *flags, "--set", "inprocess.active_world_size=2", script=SCRIPT)


def places(cwd: Path) -> dict[int, str]:
    """Rank → node, as the ranks were started."""
    started = journalled(cwd, events.WorkersStarted)
    return {rank: one.node for one in started if not one.kept for rank in one.pids}


def finish_nodes(group: Cluster, names: str) -> None:
    for name in names:
        result = group.agents[name].wait(LONGEST)
        assert result.code == 0, result.text


@pytest.mark.drill
def test_all_agents_go_on_with_the_next_attempt(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RESTARTING_DO", "1:5:raise")
    with cluster(tmp_path, "3") as group:
        start_nodes(group)
        finish_nodes(group, "abc")
    assert ends(tmp_path) == [("failed", 1, "job"), ("finished", 0, "")]
    assert decided(tmp_path) == [("restart", 2)]
    started = journalled(tmp_path, events.WorkersStarted)
    before = {rank: pid for one in started if not one.kept for rank, pid in one.pids.items()}
    after = {rank: pid for one in started if one.kept for rank, pid in one.pids.items()}
    assert after == {rank: before[rank] for rank in (0, 1)}


@pytest.mark.drill
def test_a_lost_nodes_rank_is_taken_by_a_reserve_of_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RESTARTING_DO", "1:5:wait")
    with cluster(tmp_path, "3") as group:
        start_nodes(group)
        wait_until((tmp_path / "out" / "waits1").exists, LONGEST, "rank 1 is in step 5")
        lost = places(tmp_path)[1]
        group.agents[lost].signal(signal.SIGKILL)
        finish_nodes(group, "abc".replace(lost, ""))
    assert [one and one[0] for one in ends(tmp_path)] == ["failed", "finished"]
    assert decided(tmp_path) == [("restart", 2)]
    (planned,) = journalled(tmp_path, RestartPlanned)
    assert (planned.order, planned.promoted) == ([0, 2], [2])


@pytest.mark.drill
def test_a_lost_nodes_state_comes_from_the_memory_of_its_data_parallel_peer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, reference: dict[str, object]
) -> None:
    """A node and its memory are gone. Its peer is still the same process, and nothing was ever on a disk."""
    monkeypatch.setenv("RESTARTING_DO", "1:8:wait")
    monkeypatch.setenv("RESTARTING_INTERVAL", "1000")
    with memory() as place, cluster(tmp_path, "3") as group:
        start_nodes(group, place)
        wait_until((tmp_path / "out" / "waits1").exists, LONGEST, "rank 1 is in step 8")
        await_replicas(ControlDirectory.open(tmp_path / "run"), 6, 2)
        lost = places(tmp_path)[1]
        group.agents[lost].signal(signal.SIGKILL)
        shutil.rmtree(place / lost)
        finish_nodes(group, "abc".replace(lost, ""))
    assert [one and one[0] for one in ends(tmp_path)] == ["failed", "finished"]
    (planned,) = journalled(tmp_path, RestartPlanned)
    assert planned.promoted == [2]
    assert record(tmp_path) == reference
    assert [one.step for one in journalled(tmp_path, events.Resumed)] == [0, 6]
    assert not list((tmp_path / "run" / "checkpoints").glob("step_*"))
