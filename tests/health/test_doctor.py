"""`holdfast doctor`: a table with fixes, JSON, exit codes; on all nodes of a job; without torch."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest

from holdfast.health import examination
from holdfast.health.examination import NodeReport, Skew
from holdfast.health.judgements import CheckResult, HealthStatus
from kit.commands import command
from kit.harness import finish, holdfast
from kit.nodes.machines import nvidia_smi
from kit.nodes.slurm_cluster import SlurmCluster

WELL = CheckResult(name="memory", status=HealthStatus.OK, found="22 GiB available")
ODD = CheckResult(name="shared memory", status=HealthStatus.WARNING, found="64 MiB", fix="--shm-size")
BAD = CheckResult(name="open files", status=HealthStatus.CRITICAL, found="a limit of 8", fix="raise it")
DARK = CheckResult(name="kernel log", status=HealthStatus.UNKNOWN, found="cannot be read")


@pytest.mark.parametrize(
    ("results", "code"),
    [([WELL], 0), ([WELL, ODD], 1), ([BAD, ODD, DARK], 2), ([WELL, DARK], 3), ([ODD, DARK], 1)],
    ids=["ok", "warning", "critical", "unknown", "a warning counts more than what is unknown"],
)
def test_the_exit_code_is_the_worst_of_all(
    tmp_path: Path, results: list[CheckResult], code: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(examination, "run_checks", lambda checks: results)
    shown = command("doctor", tmp_path)
    assert shown.code == code, shown.text
    for one in results:
        assert one.found in shown.out
        assert one.fix in shown.out
    told = json.loads(command("doctor", tmp_path, "--json").out)
    assert [one["status"] for one in told["nodes"][0]["results"]] == [str(one.status) for one in results]


def test_this_machine_is_looked_at_without_torch_and_nothing_is_left_behind(tmp_path: Path) -> None:
    """Issue 7, part 4: in a process of its own, as people call it."""
    code = (
        "import sys; sys.argv = ['holdfast', 'doctor', 'run', '--json']\n"
        "from holdfast.cli.app import main\n"
        "try: main()\n"
        "except SystemExit as end: print(end.code, 'torch' in sys.modules, file=sys.stderr)"
    )
    (tmp_path / "run" / "checkpoints").mkdir(parents=True)
    result = finish([sys.executable, "-c", code], cwd=tmp_path, env={"CUDA_VISIBLE_DEVICES": ""})
    report = json.loads(result.out)
    names = [one["name"] for one in report["nodes"][0]["results"]]
    for wanted in (
        "memory", "shared memory", "open files", "threads", "load", "clock", "gpu",
        "space of the run directory", "storage of the run directory", "storage of the checkpoint root",
    ):  # fmt: skip
        assert wanted in names, names
    assert report["nodes"][0]["skew"] is not None
    assert result.err.split()[-2:] == [str({"ok": 0, "warning": 1}[report["status"]]), "False"]
    assert not list(tmp_path.rglob(".holdfast-probe*"))


def test_a_tiny_file_limit_is_critical_for_real(tmp_path: Path) -> None:
    result = finish(["prlimit", "--nofile=100:100", *holdfast("doctor", "run", "--quick")], cwd=tmp_path)
    assert result.code == 2, result.text
    assert "CRITICAL" in result.out
    assert "open files: `ulimit -n 1024` or more" in result.out


def test_a_sick_gpu_is_told_with_what_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in nvidia_smi(tmp_path / "bin", [{}], remapped={"GPU-aaaa": ("No", "Yes")}).items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    monkeypatch.setattr("holdfast.health.gpu._installed", lambda _: False)
    shown = command("doctor", tmp_path, "--quick")
    assert shown.code == 2
    assert "gpu 0 memory errors: drain the node and have the device replaced" in shown.out
    assert "gpu compute" not in shown.out, "--quick computes nothing"


def test_a_wrong_config_is_refused(tmp_path: Path) -> None:
    (tmp_path / "x.toml").write_text("[health]\ngat = 'off'\n")
    assert "health.gat" in command("doctor", "--config", tmp_path / "x.toml").err


# --- all nodes ----------------------------------------------------------------------------------------------


def pretend_job(folder: Path, monkeypatch: pytest.MonkeyPatch, *, answers: list[str], then: str = "") -> Path:
    """A job on n1 and n2, with an `srun` that runs its command once for each node that answers."""
    folder.mkdir()
    program = folder / "srun"
    program.write_text(
        f"""#!{sys.executable}
import os, subprocess, sys, time
words = sys.argv[1:]
open({str(folder / "asked")!r}, "w").write(" ".join(words))
words = words[next(i for i, word in enumerate(words) if not word.startswith("--")):]
for node in {answers!r}:
    subprocess.run(words, env=dict(os.environ, SLURMD_NODENAME=node))
{then or "sys.exit(2)"}
"""
    )
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")
    monkeypatch.setenv("SLURM_JOB_ID", "77")
    monkeypatch.setenv("SLURM_JOB_NODELIST", "n[1-2]")
    return folder / "asked"


def test_all_nodes_of_a_job_are_asked_and_told_together(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also on all nodes of a Slurm job; clocks are compared by the one clock that all of them read."""
    asked = pretend_job(tmp_path / "bin", monkeypatch, answers=["n1", "n2"])
    (tmp_path / "run").mkdir()
    shown = command("doctor", tmp_path / "run", "--all-nodes", "--quick", "--json")
    report: dict[str, Any] = json.loads(shown.out)
    assert [one["node"] for one in report["nodes"]] == ["n1", "n2"], shown.text
    assert [one["name"] for one in report["between"]] == ["clocks"]
    assert "--jobid=77" in asked.read_text()
    assert f"doctor --lines {tmp_path / 'run'} --quick" in asked.read_text()


def test_all_nodes_of_a_real_job_are_asked(slurm: SlurmCluster, tmp_path: Path) -> None:
    """Inside a batch script of a real Slurm, on three nodes."""
    (tmp_path / "run").mkdir()
    text = (
        f"#!/bin/sh\n{sys.executable} -m holdfast doctor run --all-nodes --quick --json > report.json\n"
        "echo $? > code\n"
    )
    job = slurm.submit(text, "--nodes=3", "--ntasks-per-node=1", cwd=tmp_path)
    slurm.wait_for(job, "COMPLETED", timeout=90)
    report = json.loads((tmp_path / "report.json").read_text())
    assert [one["node"] for one in report["nodes"]] == slurm.nodes_of(job), slurm.output(job)
    for one in report["nodes"]:
        assert "storage of the run directory" in [result["name"] for result in one["results"]]
        assert one["skew"] is not None
    assert int((tmp_path / "code").read_text()) == {"ok": 0, "warning": 1}[report["status"]]
    assert not list(tmp_path.rglob(".holdfast-probe*"))


@pytest.mark.drill
def test_the_nodes_of_a_real_job_try_the_network_out_between_them(
    slurm: SlurmCluster, tmp_path: Path
) -> None:
    """Inside a batch script of a real Slurm, on three nodes that have networks of their own."""
    (tmp_path / "run").mkdir()
    text = f"#!/bin/sh\n{sys.executable} -m holdfast doctor run --all-nodes --json > report.json\n"
    job = slurm.submit(text, "--nodes=3", "--ntasks-per-node=1", cwd=tmp_path)
    slurm.wait_for(job, "COMPLETED", "FAILED", timeout=200)
    report = json.loads((tmp_path / "report.json").read_text())
    between = 0
    for one in report["nodes"]:
        told = {result["name"]: result for result in one["results"]}
        assert told["network peers"]["status"] == "ok", told
        assert told["network peers"]["found"].startswith("2 nodes reached over ")
        assert told["all-reduce over gloo"]["status"] == "ok", told
        between += "network between nodes" in told
    assert between == 1


@pytest.mark.drill
def test_a_node_that_does_not_answer_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pretend_job(tmp_path / "bin", monkeypatch, answers=["n1"], then="time.sleep(60)")
    monkeypatch.setattr(examination.ask_all_nodes, "__defaults__", (6.0,))
    shown = command("doctor", tmp_path, "--all-nodes", "--quick")
    assert shown.code == 2, shown.text
    assert "n2, node: try `srun -w n2 hostname`" in shown.out
    assert "no answer within 6 s" in shown.out
    assert "n1  OK        memory" in shown.out, "what the others said is not lost"


def test_outside_of_a_job_there_are_no_nodes_to_ask(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith("SLURM")]:
        monkeypatch.delenv(name)
    shown = command("doctor", tmp_path, "--all-nodes")
    assert shown.code == 2
    assert "this is no Slurm job" in shown.err


def test_a_job_whose_nodes_are_not_known_is_not_called_well(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = pretend_job(tmp_path / "bin", monkeypatch, answers=[], then="sys.exit(0)")
    monkeypatch.delenv("SLURM_JOB_NODELIST")
    shown = command("doctor", tmp_path, "--all-nodes", "--quick")
    assert shown.code == 2, shown.text
    assert "which nodes job 77 has is not known" in shown.err
    assert not asked.exists(), "nobody was asked, and nobody was reported"


def test_clocks_of_two_nodes_that_differ_are_told() -> None:
    def report(name: str, seconds: float) -> NodeReport:
        skew = Skew(seconds=seconds, uncertain=0.01)
        return NodeReport(node=name, status=HealthStatus.OK, results=[], skew=skew)

    apart = examination.merge([report("a", 1.9), report("b", -1.9)])
    assert apart.status is HealthStatus.WARNING
    assert apart.between[0].found == "that of a 3.80 s ahead of that of b"
    assert examination.merge([report("a", 0.1), report("b", 0.0)]).status is HealthStatus.OK
    assert examination.merge([report("a", 0.1)]).between == []


def test_a_report_goes_through_srun_in_lines_that_are_not_cut() -> None:
    """srun mixes up longer lines of several nodes: seen with a real Slurm."""
    long = CheckResult(name="storage of x", status=HealthStatus.CRITICAL, found="ü" * 900, fix="f" * 900)
    one = NodeReport(
        node="n1", status=HealthStatus.CRITICAL, results=[BAD, long], skew=Skew(seconds=1, uncertain=0)
    )
    lines = examination.lines_of(one)
    assert all(len(line.encode()) <= examination.LINE for line in lines)
    (told,) = examination.from_lines("noise\n" + "\n".join(lines))
    assert (told.status, told.skew, told.results[0]) == (one.status, one.skew, BAD)
    assert told.results[1].found.startswith("üüü")
    assert examination.from_lines("\n".join(lines[:-1])) == [], "who did not tell all is not taken for well"
