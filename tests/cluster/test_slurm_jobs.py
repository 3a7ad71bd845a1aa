"""Jobs of the example under a real Slurm: preempted, at their limit, cancelled, drained, in arrays."""

from __future__ import annotations

import contextlib
import fcntl
import os
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from holdfast.checkpoint.format.structure import verify
from holdfast.drill.faults import kill_rank, stopped_rank, training
from holdfast.errors import ExitCode
from holdfast.journal.events import AttemptEnded, JobFound, RequeueAsked, StopAsked, StopHastened, StopSaved
from kit.commands import command
from kit.harness import wait_until
from kit.nodes.slurm_cluster import KILL_WAIT, SlurmCluster, missing, slurm_cluster
from kit.nodes.slurm_runs import EXAMPLE, RANKS, SETTINGS, SlurmRun, arguments, checkpoints, differences

drill = pytest.mark.drill
pytestmark = pytest.mark.timeout(600)  # each starts a dozen processes that import torch, twice


@pytest.mark.skipif(bool(missing()), reason=missing())
def test_a_cluster_leaves_no_process_and_no_file_behind() -> None:
    with slurm_cluster() as cluster:
        cluster.submit("#!/bin/sh\nsleep 600\n", "--nodes=4", cwd=cluster.home)
        assert list(cluster._marked())
    assert [pid for pid, _, _ in cluster._marked()] == []
    assert not cluster.home.exists()
    assert cluster.network is None or not Path(cluster.network.namespace(0)).exists()


@pytest.fixture(scope="session")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same training without Slurm and without any interruption; one for all processes of xdist."""
    home = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        home = home.parent
    run_dir, log, done = (home / f"undisturbed{kind}" for kind in ("", ".log", ".done"))
    with (home / "undisturbed.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # at most one training long
        if done.exists():
            return run_dir
        with training(
            EXAMPLE, run_dir, log, ranks=RANKS, settings=list(SETTINGS), arguments=arguments()
        ) as run:
            run.process.wait(300)
        assert run.process.returncode == 0, log.read_text()
        done.touch()
    return run_dir


@drill
@pytest.mark.parametrize("partition", ["low", "graced"])
def test_a_preempted_job_saves_and_goes_on_elsewhere_bitwise_as_if_undisturbed(
    slurm: SlurmCluster, tmp_path: Path, undisturbed: Path, partition: str
) -> None:
    """Without grace Slurm queues the job again by itself; one that ends within its grace has to ask."""
    run = SlurmRun(slurm, tmp_path)
    run.submit(f"--partition={partition}")
    run.await_step(10)
    with stopped_rank(run.lines, 1):  # so that the job does not end before Slurm gets to it
        taken = slurm.nodes_of(run.job)[0]
        slurm.submit(
            "#!/bin/sh\nsleep 600\n", "--partition=high", f"--nodelist={taken}", cwd=tmp_path, name="high"
        )
        run.await_journal(lambda: run.events(StopAsked), "the stop is asked for")
        if partition == "low":
            run.await_journal(lambda: run.events(StopHastened), "KillWait is all that is left")
    slurm.wait_for(run.job, "RUNNING", restarts=1)
    assert taken not in slurm.nodes_of(run.job)
    slurm.wait_for(run.job, "COMPLETED", timeout=180)
    [saved] = run.events(StopSaved)
    assert run.resumed_from() == [0, saved.step], run.text()
    assert [event.asked for event in run.events(RequeueAsked)] == [partition == "graced"]
    left = 60 if partition == "graced" else KILL_WAIT
    assert f"Slurm leaves {left} s from SIGTERM to SIGKILL" in run.text()
    assert all(event.seconds <= left for event in run.events(StopHastened))
    assert "the last save took" in run.text(), "the next start says whether it fits"
    assert [path.name for path in checkpoints(run.run_dir)][:-1] == [saved.checkpoint]
    assert differences(run.run_dir, undisturbed) == []


@pytest.mark.drill
@pytest.mark.parametrize("who", ["holdfast", pytest.param("slurm", marks=drill)])
def test_a_job_stops_ahead_of_its_time_limit_and_has_itself_queued_again(
    slurm: SlurmCluster, tmp_path: Path, undisturbed: Path, who: str
) -> None:
    """Lightning#20542, by our own look at the clock and by the signal that Slurm sends to the script.

    A node that was found bad meanwhile is not used again.
    """
    run = SlurmRun(slurm, tmp_path)
    if who == "holdfast":
        run.submit(options=("--time", "2", "--signal-lead", "0"))
    else:
        run.submit(options=("--time", "4", "--signal-lead", "50"), settings=("slurm.preempt_time=0",))
    run.await_step(10)
    with stopped_rank(run.lines, 1):  # so that the job does not end before its limit
        bad = slurm.nodes_of(run.job)[-1]
        assert command("control", "exclude", run.run_dir, bad, "--reason", "ECC errors").code == 0
        # Slurm looks at its limits twice a minute.
        slurm.end_within(run.job, 20 if who == "holdfast" else 50)
        run.await_journal(lambda: run.events(StopAsked), "the stop is asked for")
    slurm.wait_for(run.job, "PENDING", restarts=1)
    slurm.scontrol("update", f"JobId={run.job}", "TimeLimit=10")
    slurm.wait_for(run.job, "COMPLETED", timeout=180)
    [asked] = run.events(StopAsked)
    assert asked.source == ("time_limit" if who == "holdfast" else "signal")
    [saved] = run.events(StopSaved)
    assert run.resumed_from() == [0, saved.step], run.text()
    assert [event.asked for event in run.events(RequeueAsked)] == [True]
    reason = "the time limit" if who == "holdfast" else "the scheduler's signal: SIGUSR1"
    assert reason in slurm.job(run.job)["Comment"]
    assert slurm.job(run.job)["ExcNodeList"] == bad
    assert bad not in slurm.nodes_of(run.job)
    assert differences(run.run_dir, undisturbed) == []


@contextlib.contextmanager
def within_a_save(run: SlurmRun, staging: Path) -> Iterator[None]:
    """The rank that would commit is stopped while a save is under way. Saves are short: not at first go."""
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        wait_until(lambda: list(staging.glob("step_*")), 30, "a save is under way")
        with stopped_rank(run.lines, 0):
            if list(staging.glob("step_*")):
                yield
                return
    raise AssertionError("no rank could be stopped within a save: not within 60 s")


@pytest.mark.drill
def test_a_job_cancelled_within_a_save_tears_nothing_and_the_next_avoids_a_drained_node(
    slurm: SlurmCluster, tmp_path: Path, undisturbed: Path
) -> None:
    run = SlurmRun(slurm, tmp_path)
    run.submit(settings=("checkpoint.interval=5",))
    run.await_step(7)
    staging = run.run_dir / "checkpoints" / ".staging"
    with within_a_save(run, staging):
        slurm.scancel(run.job)
        run.await_journal(lambda: run.events(StopAsked), "the stop is asked for")
        slurm.kill(run.job, sys.executable)  # what Slurm does itself, KillWait later
        slurm.wait_for(run.job, "CANCELLED")
    before = checkpoints(run.run_dir)
    torn = {path.name for path in staging.glob("step_*")}
    assert torn
    assert not torn.intersection(path.name for path in before)
    assert before
    assert all(verify(path).sound for path in before)
    assert not [event for event in run.events(RequeueAsked) if event.asked], "it was cancelled"

    drained = slurm.nodes_of(run.job)[1]
    slurm.drain(drained)
    run.submit()
    slurm.wait_for(run.job, "COMPLETED", timeout=180)
    assert drained not in slurm.nodes_of(run.job)
    assert run.resumed_from() == [0, int(before[-1].name[5:13])], run.text()
    assert not torn.intersection(path.name for path in checkpoints(run.run_dir))
    assert differences(run.run_dir, undisturbed) == []


@pytest.mark.drill
def test_tasks_of_an_array_keep_apart_and_a_signal_to_one_script_alone_stops_and_requeues_its_task(
    slurm: SlurmCluster, tmp_path: Path
) -> None:
    array = SlurmRun(slurm, tmp_path, "array")
    array.submit(nodes=1, options=("--array", "0-1", "--time", "10"))
    tasks = [SlurmRun(slurm, tmp_path, f"array/task_{number}") for number in (0, 1)]
    for number, task in enumerate(tasks):
        task.job, task.ranks = f"{array.job}_{number}", 1
    tasks[0].await_step(5)
    with stopped_rank(tasks[0].lines, 0):  # so that it does not end before the signal is there
        slurm.scancel("--batch", "--signal=USR1", tasks[0].job)
        tasks[0].await_journal(lambda: tasks[0].events(StopAsked), "the stop is asked for")
    for task in tasks:
        slurm.wait_for(task.job, "COMPLETED", timeout=180)
    assert [slurm.restarts(task.job) for task in tasks] == [1, 0]
    [saved] = tasks[0].events(StopSaved)
    assert [task.resumed_from() for task in tasks] == [[0, saved.step], [0]]
    for task in tasks:
        assert {event.job for event in task.events(JobFound)} == {task.job}
        assert [event.outcome for event in task.events(AttemptEnded)][-1] == "finished"


@pytest.mark.drill
def test_a_second_job_on_a_live_run_is_refused_and_sigterm_to_one_rank_stops_them_all(
    slurm: SlurmCluster, tmp_path: Path, record_property: pytest.RecordProperty
) -> None:
    """Scenario 17 across nodes, Lightning#20806, and the bound on the time from the signal to the exit."""
    run = SlurmRun(slurm, tmp_path)
    run.submit(nodes=2, steps=100_000)
    run.await_step(10)
    second = SlurmRun(slurm, tmp_path)
    second.submit(nodes=1)
    assert slurm.wait_for(second.job, "FAILED") == "FAILED"
    assert slurm.exit_code(second.job) == ExitCode.RUN_IS_LIVE
    assert f"job {run.job}" in slurm.output(second.job)

    hit = kill_rank(run.lines, 1, signal.SIGTERM)
    run.await_journal(lambda: run.events(AttemptEnded), "the attempt ends")
    took = next(line.at for line in run.lines if isinstance(line.body, AttemptEnded)) - hit.at
    slurm.wait_for(run.job, "FAILED")
    assert slurm.exit_code(run.job) == ExitCode.STOPPED
    assert slurm.restarts(run.job) == 0
    [saved] = run.events(StopSaved)
    record_property("seconds from the signal to the end", round(took, 2))
    assert took < 30 + saved.seconds  # 5 s on a machine with nothing else to do: tests/stop/test_stop_time.py
    assert [event.asked for event in run.events(RequeueAsked)] == [False]
    assert [path.name for path in checkpoints(run.run_dir)] == [saved.checkpoint]
