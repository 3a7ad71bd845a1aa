"""Golden screens of faults of several nodes and of schedulers: see golden.py."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from holdfast.errors import ExitCode
from holdfast.journal.events import AttemptStarted, StopAsked
from holdfast.journal.reader import read_journal
from holdfast.record.directory import ControlDirectory
from kit.acting import Place
from kit.control import held_elsewhere
from kit.golden import compare
from kit.harness import REPO, Job, finish, holdfast, job, wait_until
from kit.nodes.fake_scontrol import job_environment
from kit.nodes.nodes import Cluster, cluster, free_endpoint
from kit.runs import journalled

SCRIPT = REPO / "tests" / "scripts" / "faults" / "meet_a_cluster_fault.py"
DIFFERS = [
    ("(\\.\\./)*" + str(SCRIPT).lstrip("/"), "train.py"),
    ("/train.py", "train.py"),
    (r"pid \d+ on \S+?([;,)]| is)", r"pid N on HOST\1"),
    (r"127\.0\.0\.1:\d+", "127.0.0.1:PORT"),
    (r"at \d\d:\d\d:\d\d", "at TIME"),
    (r"in step \d+, as node", "in step N, as node"),
    (r"\d+ min \d\d s", "T"),
    (r"steps? \d+(–\d+)? (is|are) lost", "steps N are lost"),
]
PATIENCE = 90.0


def launch(fault: str, *flags: str, ranks: int = 2) -> list[str]:
    named = ("--nproc-per-node", str(ranks), "--run-dir", "run", "--set", "launch.node_name=here")
    return holdfast("run", *named, *flags, str(SCRIPT), fault)


def await_wait(cwd: Path, running: Job) -> None:
    """Until a rank waits in step 25."""
    wait_until(lambda: (cwd / "waits").exists() or running.process.poll() is not None, PATIENCE, "it waits")
    assert (cwd / "waits").exists(), running.output().text


def go(cwd: Path) -> None:
    (cwd / "go").touch()


@pytest.mark.drill
def test_what_is_seen_of_a_network_error(tmp_path: Path) -> None:
    result = finish(launch("network error"), cwd=tmp_path, timeout=PATIENCE)
    assert result.code == 0, result.text
    compare("network error", result.err, tmp_path, DIFFERS)


def start(group: Cluster, name: str) -> Job:
    at_once = ("--set", "journal.step_flush=0")  # the last steps are known whenever the node is lost
    return group.start(name, *at_once, acts="wait global", script=str(SCRIPT), grace=1.0, preload=True)


def led_by(cwd: Path) -> str:
    found = [one.who for one in read_journal(cwd / "run" / "journal") if isinstance(one.body, AttemptStarted)]
    return found[-1].removeprefix("agent-")


@pytest.mark.drill
def test_what_is_seen_of_a_lost_node(tmp_path: Path) -> None:
    with cluster(tmp_path, "1:2") as group:
        start(group, "a")
        start(group, "b")
        await_wait(tmp_path, group.agents["a"])
        leader = led_by(tmp_path)
        group.agents["ab".replace(leader, "")].kill_everything()
        group.said(leader, "was lost", PATIENCE)  # rank 0 still waits: it has no error of its own
        result = group.agents[leader].wait(PATIENCE)
    assert result.code == 0, result.text
    names = [(rf"\b(node|on|why|agent-) ?{leader}\b", r"\1 LEADER"), (r"\b(node|why) [ab]\b", r"\1 OTHER")]
    compare("node lost", result.err, tmp_path, [*names, *DIFFERS])


@pytest.mark.drill
def test_what_is_seen_of_a_lost_store(tmp_path: Path) -> None:
    with cluster(tmp_path, "2", free_endpoint()) as group:
        start(group, "a")
        wait_until(lambda: (tmp_path / "run" / "run.json").exists(), PATIENCE, "a is there")
        start(group, "b")  # a hosts the store: it was alone when it looked for one
        await_wait(tmp_path, group.agents["b"])
        group.agents["a"].kill_everything()
        result = group.agents["b"].wait(PATIENCE)
    assert result.code == ExitCode.STORE_LOST, result.text
    compare("store lost", result.err, tmp_path, [*DIFFERS, (r"Steps: \d+", "Steps: N")])


@pytest.mark.drill
def test_what_is_seen_of_a_preemption_with_grace(tmp_path: Path) -> None:
    with job(launch("wait"), cwd=tmp_path) as running:
        await_wait(tmp_path, running)
        running.signal(signal.SIGTERM)
        wait_until(lambda: "asked to stop" in running.output().err, PATIENCE, "it is asked")
        go(tmp_path)
        result = running.wait(PATIENCE)
    assert result.code == ExitCode.STOPPED, result.text
    compare("preemption with grace", result.err, tmp_path, DIFFERS)


@pytest.mark.drill
def test_what_the_next_launch_says_of_a_preemption_without_grace(tmp_path: Path) -> None:
    with job(launch("wait"), cwd=tmp_path) as running:
        await_wait(tmp_path, running)
        running.signal(signal.SIGTERM)
        wait_until(lambda: journalled(tmp_path, StopAsked), PATIENCE, "it is asked")
        running.kill_everything()
    result = finish(launch("nothing"), cwd=tmp_path, timeout=PATIENCE)
    assert result.code == 0, result.text
    compare("preemption without grace", result.err, tmp_path, DIFFERS)


@pytest.mark.drill
def test_what_is_seen_of_a_straggler(tmp_path: Path) -> None:
    flags = ("--set", "straggler.enabled=true", "--set", "straggler.report_time_interval=0.4")
    result = finish(launch("straggler", *flags), cwd=tmp_path, timeout=PATIENCE)
    assert result.code == 0, result.text
    figures = [
        (r"(since|at) step \d+", r"\1 step N"),
        (r"\d+% of a step; score \d\.\d\d, which is \d+% of", "P% of a step; score S, which is P% of"),
        (r"waits \d+%", "waits P%"),
        (r"\S+ holdfast\[rank N\]: straggler scores .*\n", ""),
    ]
    compare("straggler", result.err, tmp_path, [*figures, *DIFFERS])


@pytest.mark.drill
def test_what_is_seen_of_a_run_that_goes_on_with_another_number_of_ranks(tmp_path: Path) -> None:
    with job(launch("wait global"), cwd=tmp_path) as running:
        await_wait(tmp_path, running)
        running.signal(signal.SIGTERM)
        wait_until(lambda: "asked to stop" in running.output().err, PATIENCE, "it is asked")
        go(tmp_path)
        assert running.wait(PATIENCE).code == ExitCode.STOPPED, running.output().text
    result = finish(launch("global", ranks=1), cwd=tmp_path, timeout=PATIENCE)
    assert result.code == 0, result.text
    compare("world size changed", result.err, tmp_path, DIFFERS)


@pytest.mark.drill
def test_what_is_seen_of_a_run_that_another_launch_has_taken_over(tmp_path: Path) -> None:
    with job(launch("wait", "--set", "control.lease_ttl=4"), cwd=tmp_path) as running:
        await_wait(tmp_path, running)
        held_elsewhere(ControlDirectory.open(tmp_path / "run"), epoch=2)
        result = running.wait(PATIENCE)
    assert result.code == ExitCode.LEASE_LOST, result.text
    compare("lease claimed by another", result.err, tmp_path, DIFFERS)


@pytest.mark.drill
def test_what_is_seen_of_a_time_limit(tmp_path: Path) -> None:
    place = Place(tmp_path, tmp_path)
    limited = job_environment(place, 40.0)
    settings = ("--set", "slurm.preempt_time=30")
    with job(launch("slowly", *settings), cwd=tmp_path, env=limited) as running:
        result = running.wait(PATIENCE)
    assert result.code == ExitCode.STOPPED, result.text
    compare("time limit", result.err, tmp_path, [(r"Steps: \d+", "Steps: N"), *DIFFERS])
