"""Batch scripts that `holdfast slurm script` writes: their text, and what becomes of them in a real Slurm."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.cluster.batch import JobLayout, render, time_in_seconds
from holdfast.cluster.slurm import expand
from holdfast.errors import UsageError
from kit.commands import command
from kit.harness import REPO
from kit.nodes.slurm_cluster import SlurmCluster

EXAMPLE = (
    "--nodes", "4", "--spares", "1", "--gpus-per-node", "8", "--time", "1-00:00:00", "--job-name", "gpt",
    "--partition", "train", "--local-tier", "/dev/shm/holdfast-me", "--run-dir", "/shared/runs/gpt",
    "--", "train_gpt.py", "--steps", "100000",
)  # fmt: skip
"""How examples/slurm/train.sbatch was written."""

# --- the text


def test_the_example_is_what_the_command_writes() -> None:
    assert (REPO / "examples/slurm/train.sbatch").read_text() == command("slurm", "script", *EXAMPLE).out


def layouts() -> list[JobLayout]:
    base = JobLayout(command=["train.py", "--lr", "3e-4", "it's a $HOME `x`"], run_dir="a run's dir")
    return [
        base,
        JobLayout(
            command=["train.py"], nodes=4, spares=2, gpus_per_node=8, time="1-00", local_tier="/dev/shm/a b"
        ),
        JobLayout(command=["train.py"], nodes=4, min_nodes=2, array="0-7%2", run_dir="runs", signal_lead=0),
        JobLayout(
            command=["python", "t.py"], nodes=2, processes_per_node=2, plain=True, local_tier="/dev/shm/x"
        ),
        JobLayout(
            command=["-m", "train"], setup=["module load cuda"], extra=["--mem=0"], endpoints="h:1,i:2"
        ),
    ]


@pytest.mark.parametrize("layout", layouts(), ids=["one", "spares", "elastic array", "plain", "more"])
def test_every_script_is_sound_shell(layout: JobLayout, tmp_path: Path) -> None:
    path = tmp_path / "job.sh"
    path.write_text(render(layout))
    subprocess.run(["bash", "-n", str(path)], check=True)
    if shellcheck := shutil.which("shellcheck"):
        done = subprocess.run([shellcheck, str(path)], capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout


@pytest.mark.parametrize("found", ["from the start", "by the setup lines"])
def test_a_signal_before_anything_was_started_asks_for_the_job_too(tmp_path: Path, found: str) -> None:
    """A job that is preempted while it loads its modules must come back as well."""
    tool = tmp_path / "bin" / "holdfast"
    tool.parent.mkdir()
    tool.write_text(f'#!/bin/sh\necho "$@" >> {shlex.quote(str(tmp_path / "asked"))}\n')
    tool.chmod(0o755)
    finds = f"PATH={shlex.quote(str(tool.parent))}:$PATH"
    lines = ["kill -s TERM $$", "echo after"]
    setup = [finds, *lines] if found == "from the start" else [*lines, finds]
    script = tmp_path / "script"
    script.write_text(render(JobLayout(command=["train.py"], nodes=1, run_dir="run", setup=setup)))
    environment = {"PATH": "/usr/bin:/bin", "SLURM_JOB_ID": "7"}
    done = subprocess.run(
        ["bash", script], env=environment, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 31, done.stderr
    assert (tmp_path / "asked").read_text() == "slurm requeue --exit-code 31 --run-dir run\n", done.stderr
    assert ("after" in done.stdout) == (found == "by the setup lines")


def options(text: str) -> list[str]:
    return re.findall(r"^#SBATCH (.*)$", text, re.MULTILINE)


def test_spares_are_allocated_and_the_loss_of_a_node_is_survived() -> None:
    text = render(JobLayout(command=["t.py"], nodes=4, spares=2, gpus_per_node=8))
    assert "--nodes=6" in options(text)
    assert "--no-kill" in options(text)
    assert "run --nnodes 4 --nproc-per-node 8" in text
    assert "--kill-on-bad-exit=0" in text
    assert "srun --kill-on-bad-exit=0 --wait=0 --cpu-bind=none --no-kill" in text
    assert '"${nodes[@]:0:3}"' in text


def test_without_spares_slurm_may_end_the_job_with_its_node() -> None:
    text = render(JobLayout(command=["t.py"], nodes=2))
    assert "--no-kill" not in text
    assert {"--requeue", "--open-mode=append", "--signal=B:USR1@180"} <= set(options(text))
    assert '"${nodes[@]:0:2}"' in text


def test_an_elastic_run_says_so_and_survives() -> None:
    text = render(JobLayout(command=["t.py"], nodes=4, min_nodes=2))
    assert "--nnodes 2:4" in text
    assert "--no-kill" in options(text)


def test_ranks_without_agents_end_together() -> None:
    """C5: kill-on-bad-exit by mode."""
    text = render(JobLayout(command=["python", "t.py"], nodes=2, processes_per_node=4, plain=True))
    assert "--kill-on-bad-exit=1" in text
    assert "--ntasks-per-node=4" in options(text)
    assert "holdfast run" not in text


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--nodes", "0"], "--nodes 0"),
        (["--spares", "-1"], "--spares -1"),
        (["--nodes", "2", "--min-nodes", "3"], "--min-nodes 3"),
        (["--plain", "--spares", "1"], "--plain"),
        (["--time", "soon"], "--time soon"),
        (["--time", "5"], "--signal-lead 180"),
        (["--gpus-per-node", "2", "--nproc-per-node", "4"], "share a GPU"),
        (["--job-name", "a b"], "--job-name"),
        (["--partition", "x\n#SBATCH --nodes=99"], "--partition"),
        (["--array", "1;2"], "--array"),
        (["--array", "0-3"], "--run-dir"),
        (["--local-tier", "here"], "--local-tier"),
        (["--sbatch", "mem=0"], "--sbatch"),
        (["--sbatch", "--mem=0\nrm"], "--sbatch"),
        (["--setup", "a\nb"], "--setup"),
        (["--holdfast", "'"], "--holdfast"),
        (["--holdfast", ""], "--holdfast"),
        (["--run-dir", "a\nb"], "--run-dir"),
    ],
)
def test_what_cannot_work_is_refused_by_the_name_of_its_flag(flags: list[str], said: str) -> None:
    told = command("slurm", "script", *flags, "--", "train.py")
    assert told.code == 2, told.text
    assert said in told.err
    assert told.out == ""


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ([], "no training command"),
        (["python3.11", "train.py"], "starts Python itself"),
        (["/usr/bin/python", "train.py"], "starts Python itself"),
        (["torchrun", "train.py"], "in its place"),
        (["train.py", "a\nb"], "line break"),
    ],
)
def test_a_command_that_cannot_be_started_is_refused(words: list[str], said: str) -> None:
    told = command("slurm", "script", "--", *words)
    assert told.code == 2, told.text
    assert said in told.err


def test_a_file_is_never_overwritten_unasked(tmp_path: Path) -> None:
    path = tmp_path / "job.sh"
    assert command("slurm", "script", "--output", path, "--", "a.py").code == 0
    first = path.read_text()
    assert os.access(path, os.X_OK)
    told = command("slurm", "script", "--output", path, "--", "b.py")
    assert told.code == 2
    assert "--force" in told.err
    assert path.read_text() == first
    assert command("slurm", "script", "--output", path, "--force", "--", "b.py").code == 0
    assert "b.py" in path.read_text()
    assert command("slurm", "script", "--output", tmp_path / "no" / "job.sh", "--", "a.py").code == 2


WORD = st.text("ab $`'\"\\;&|()<>*#~!{}=-é\n", min_size=1, max_size=12)


@given(st.lists(WORD, min_size=1, max_size=5), st.just("") | WORD)
def test_no_words_of_a_user_are_taken_for_shell(words: list[str], directory: str) -> None:
    try:
        text = render(JobLayout(command=words, run_dir=directory))
    except UsageError:
        return
    launch = text[text.index("srun ") :].partition(" &\n")[0].replace("\\\n", " ")
    assert shlex.split(launch)[-len(words) :] == words
    if directory:
        [line] = [line for line in text.split("\n") if line.startswith("run_dir=")]
        assert shlex.split(line) == [f"run_dir={directory}"]


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("", None), ("90", 5400), ("1:30", 90), ("2:00:00", 7200), ("1-00", 86400), ("1-02:03:04", 93784)],
)
def test_slurms_ways_to_write_a_time(text: str, seconds: int | None) -> None:
    assert time_in_seconds(text) == seconds


# --- in a real Slurm

PRETEND = shlex.join([sys.executable, str(REPO / "tests" / "scripts" / "launch" / "pretend_holdfast.py")])


RANK = (sys.executable, str(REPO / "tests" / "scripts" / "launch" / "pretend_rank.py"))


def submit(
    slurm: SlurmCluster, cwd: Path, *flags: str, words: Sequence[str] = ("train.py",), **environ: str
) -> str:
    """A script for agents that only pretend, submitted; `environ` is theirs."""
    cwd.mkdir(exist_ok=True)
    exports = [f"--setup=export {name}={value!r}" for name, value in environ.items()]
    told = command(
        "slurm", "script", "--holdfast", PRETEND, "--run-dir", "run", "--signal-lead", "0", *exports, *flags,
        "--log=%x-%A_%a.out" if "--array" in flags else "--log=%x-%A.out", "--output", cwd / "job.sh",
        "--force", "--", *words,
    )  # fmt: skip
    assert told.code == 0, told.text
    return slurm.sbatch(cwd / "job.sh", cwd=cwd)


def started(slurm: SlurmCluster, job: str, count: int) -> list[str]:
    """The nodes of a job whose agents all say that they are there.

    A task of an array goes by its own number, but for the one that has the array's.
    """
    slurm.wait_for(job, "RUNNING")
    number = slurm.job(job)["JobId"]
    named = job if number == job.partition("_")[0] else number
    nodes = slurm.nodes_of(job)
    assert len(nodes) == count
    for node in nodes:
        slurm.said(job, f"agent on {node} as {node} in life 0 of {named} ")
    return nodes


def test_names_are_spelt_out_as_slurm_does(slurm: SlurmCluster) -> None:
    for text in (
        "n[1-3,07-09]", "a[1-2]b[3-4]", "rack[0-1][0-2]", "n[9-11]", "n[1,1]", "n[1-2],n1", "n[01-3]",
        "n[1-010]", "x-[1-3]-[1-2]", "a,b[4],c-d[001-003]",
    ):  # fmt: skip
        assert slurm.command("scontrol", "show", "hostnames", text).split() == expand(text), text


def test_a_signal_to_the_script_alone_reaches_every_agent_and_kills_none(
    slurm: SlurmCluster, tmp_path: Path
) -> None:
    """A signal that reaches the batch script only has the same outcome; SIGTERM to srun would kill them."""
    job = submit(slurm, tmp_path, "--nodes=2")
    started(slurm, job, 2)
    slurm.scancel("--batch", "--signal=TERM", job)
    slurm.wait_for(job, "FAILED")
    output = slurm.output(job)
    assert output.count(" got SIGTERM") == 2, output
    assert output.count(" ends\n") == 2, output
    assert "asked: False: SIGTERM, and Slurm does not say" in output
    assert slurm.exit_code(job) == 31
    assert slurm.restarts(job) == 0


@pytest.mark.drill
def test_a_job_comes_back_on_other_nodes_with_the_reason_in_its_comment(
    slurm: SlurmCluster, tmp_path: Path
) -> None:
    """Requeue with a reason; excluded nodes are passed on; a drained node is not used either."""
    slurm.drain("n4")
    job = submit(slurm, tmp_path, "--nodes=2", "--sbatch=--comment=mine", EXCLUDE="n1 nowhere")
    assert "n1" in started(slurm, job, 2)
    slurm.scancel("--batch", "--signal=USR1", job)
    slurm.wait_for(job, "COMPLETED", restarts=1)
    output = slurm.output(job)
    assert output.count("got SIGUSR1") == 2, output
    assert output.count(" ends\n") == 2, output
    assert "asked: True: the scheduler's signal: SIGUSR1" in output
    assert output.count("in life 1") == 2, output
    assert slurm.processes(job, "scancel") == {}, "it would go on until it can signal the next life"
    assert sorted(slurm.nodes_of(job)) == ["n2", "n3"]
    found = slurm.job(job)
    assert found["Comment"] == "mine | holdfast: queued again: the scheduler's signal: SIGUSR1; without n1"
    assert found["ExcNodeList"] == "n1"


@pytest.mark.drill
def test_a_job_comes_back_once_whoever_asks_for_it_and_a_cancelled_one_never(
    slurm: SlurmCluster, tmp_path: Path
) -> None:
    """Preempted with a grace time the leader asks, without one Slurm does; a lost leader's script asks."""

    def on(node: str, partition: str, **environ: str) -> str:
        flags = ("--partition", partition, f"--sbatch=--nodelist={node}")
        return submit(slurm, tmp_path / node, *flags, **environ)

    graced, ungraced, cancelled = on("n1", "graced"), on("n2", "low"), on("n4", "low")
    leaderless = on("n3", "high", LOST_LEADER="1")
    for job in (graced, ungraced, leaderless, cancelled):
        started(slurm, job, 1)
    slurm.scancel(cancelled)
    slurm.scancel("--batch", "--signal=USR2", leaderless)
    slurm.submit("#!/bin/sh\n", "--partition=high", "--nodes=2", "--nodelist=n1,n2", cwd=tmp_path)
    for job in (graced, ungraced, leaderless):
        slurm.wait_for(job, "COMPLETED", restarts=1)
    assert "asked: True: it is being preempted: SIGTERM" in slurm.output(graced)
    assert "asked: False: Slurm queues it again by itself" in slurm.output(ungraced)
    asked = f"Slurm was asked to queue job {leaderless} again: the scheduler's signal: SIGUSR2"
    assert asked in slurm.output(leaderless)
    slurm.wait_for(cancelled, "CANCELLED")
    assert "asked: False: the job was cancelled" in slurm.output(cancelled)
    assert slurm.restarts(cancelled) == 0


@pytest.mark.drill
def test_ranks_without_agents_fail_together_but_stop_each_in_its_time(
    slurm: SlurmCluster, tmp_path: Path
) -> None:
    """C5: kill-on-bad-exit by mode."""
    plain = ("--plain", "--nodes=2")
    stopped = submit(slurm, tmp_path / "stopped", *plain, words=RANK)
    failed = submit(slurm, tmp_path / "failed", *plain, words=RANK, FAILING_RANK="1")
    slurm.wait_for(stopped, "RUNNING")
    first = slurm.nodes_of(stopped)[0]
    for rank in (0, 1):
        slurm.said(stopped, f"rank {rank} of 2 at {first} {20000 + int(stopped)} in run")
    slurm.scancel("--batch", "--signal=USR1", stopped)
    slurm.wait_for(failed, "FAILED")
    assert " ends" not in slurm.output(failed)
    slurm.wait_for(stopped, "FAILED")
    assert slurm.exit_code(stopped) == 31
    assert {"rank 0 ends", "rank 1 ends"} <= set(slurm.output(stopped).splitlines())


@pytest.mark.drill
def test_one_task_of_an_array_comes_back_and_the_other_goes_on(slurm: SlurmCluster, tmp_path: Path) -> None:
    """The last task has the array's number: asked by that, Slurm would take them all."""
    array = submit(slurm, tmp_path, "--array", "0-1")
    tasks = [f"{array}_0", f"{array}_1"]
    for task in tasks:
        started(slurm, task, 1)
    [last] = [task for task in tasks if slurm.job(task)["JobId"] == array]
    [other] = [task for task in tasks if task != last]
    slurm.scancel("--batch", "--signal=USR1", last)
    slurm.wait_for(last, "COMPLETED", restarts=1)
    assert slurm.state(other) == "RUNNING"
    assert slurm.restarts(other) == 0
    assert (tmp_path / "run" / f"task_{last.partition('_')[2]}" / "run.json").exists()
    assert not (tmp_path / "run" / f"task_{other.partition('_')[2]}").exists()
    slurm.scancel("--signal=TERM", other)
    slurm.wait_for(other, "FAILED")
    assert "got SIGTERM" in slurm.output(other)
