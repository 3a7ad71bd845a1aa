"""The launcher inside a Slurm job, with a `scontrol` that writes down what it is asked: told at the start,
stopped ahead of the limit, queued again once, by the leader, at the very end. tests with a real Slurm are
elsewhere.
"""

from __future__ import annotations

import os
import signal

import pytest

from holdfast.errors import ExitCode
from holdfast.journal.events import JobFound, RequeueAsked, StopAsked
from holdfast.record.lease import current_epoch, read_beat
from kit.acting import Place
from kit.harness import job, wait_until
from kit.nodes.fake_scontrol import job_environment
from kit.nodes.nodes import cluster


def requeues(place: Place) -> list[str]:
    path = place.cwd / "asked"
    lines = path.read_text().splitlines() if path.exists() else []
    return [line for line in lines if line.startswith("requeue")]


def test_a_job_at_its_time_limit_stops_and_is_queued_again_once(place: Place) -> None:
    env = place.environment(**job_environment(place, left=40))
    with job(place.launch(acts="never?ok"), cwd=place.cwd, env=env) as running:
        result = running.wait(60)
    assert result.code == ExitCode.STOPPED_UNSAVED, "the script has no Run that could save"
    assert "Slurm job 1234, restart 1, 3 nodes" in result.err
    assert "s left" in result.err
    (found,) = place.journalled(JobFound)
    assert (found.scheduler, found.job, found.restarts) == ("slurm", "1234", 1)
    assert found.nodes == ["n1", "n2", "n3"]
    (asked,) = place.journalled(StopAsked)
    assert asked.source == "time_limit"
    assert asked.seconds is not None
    assert asked.seconds < 40
    assert len(requeues(place)) == 1
    (told,) = place.journalled(RequeueAsked)
    assert told.asked
    assert "Slurm was asked to queue job 1234 again" in result.err
    assert '"released":true' in (place.cwd / "beats-at-requeue").read_text().replace(" ", ""), (
        "the run was given back before the job was ended"
    )


@pytest.mark.drill
def test_a_signal_of_a_person_queues_nothing_again_and_the_job_is_named_to_who_comes_too(
    place: Place,
) -> None:
    env = place.environment(**job_environment(place, left=7200))
    command = place.launch(acts="never?ok")
    with job(command, cwd=place.cwd, env=env) as running:
        place.await_workers(running, 1)
        refused = place.finish(command)
        assert refused.code == ExitCode.RUN_IS_LIVE, refused.text
        assert "Slurm job 1234" in refused.err
        running.signal(signal.SIGTERM)
        result = running.wait(60)
    assert result.code == ExitCode.STOPPED_UNSAVED, result.text
    (told,) = place.journalled(RequeueAsked)
    assert not told.asked
    assert not requeues(place)
    run = place.run()
    beat = read_beat(run, current_epoch(run))
    assert beat is not None
    assert beat.released


def test_recovery_gives_the_job_back_when_these_nodes_cannot_do_it(place: Place) -> None:
    """Code 27, and the scheduler is asked: excluded nodes are named in the job's comment."""
    env = place.environment(**job_environment(place, left=7200))
    command = place.launch("--max-restarts", "20", acts="kill", name="n1")
    with job(command, cwd=place.cwd, env=env) as running:
        result = running.wait(90)
    assert result.code == ExitCode.REQUEUE_WANTED, result.text
    assert place.decisions()[-1].chosen == "requeue"
    assert len(requeues(place)) == 1
    (told,) = place.journalled(RequeueAsked)
    assert told.asked
    comment = next(line for line in (place.cwd / "asked").read_text().splitlines() if "Comment=" in line)
    assert comment.endswith("without n1")
    assert len(place.journalled(JobFound)) == len(place.attempts()), "at the start of every attempt"


@pytest.mark.drill
def test_a_signal_of_the_scheduler_between_two_attempts_queues_the_job_again(place: Place) -> None:
    env = place.environment(**job_environment(place, left=7200))
    with job(place.launch(acts="go?ok;kill"), cwd=place.cwd, env=env) as running:
        (worker,) = place.await_workers(running, 1)
        place.control("pause", "--reason", "why")
        os.kill(worker.pid, signal.SIGKILL)
        wait_until(lambda: "recovery is paused by" in running.output().err, 30, "the launcher waits")
        running.signal(signal.SIGUSR1)
        result = running.wait(60)
    assert result.code == ExitCode.STOPPED, result.text
    assert len(requeues(place)) == 1


@pytest.mark.drill
def test_only_the_leading_agent_asks_to_be_queued_again(place: Place) -> None:
    words = job_environment(place, left=7200)
    with cluster(place.cwd, "2") as group:
        for name in "ab":
            group.start(name, acts="wait", wrap=place.wrap(**words))
        group.wait_for_workers(1, 2)
        for name in "ab":  # as srun passes it on
            group.agents[name].signal(signal.SIGUSR1)
        for name in "ab":
            assert group.agents[name].wait(60).code == ExitCode.STOPPED_UNSAVED
    assert len(requeues(place)) == 1
    (found,) = place.journalled(JobFound)
    assert found.job == "1234"
    wait_until(lambda: len(place.journalled(RequeueAsked)) == 1, 10, "journalled once")
