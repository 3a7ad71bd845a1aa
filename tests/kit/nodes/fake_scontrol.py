"""A scontrol of the tests' own, with answers as Slurm 22.05 writes them."""

from __future__ import annotations

import os
import stat
import time
from pathlib import Path

import pytest

from holdfast.cluster.slurm import SlurmJob
from holdfast.journal.events import StopAsked
from holdfast.journal.writer import JournalWriter
from holdfast.policy.requests import Source, StopRequest
from holdfast.record.directory import ControlDirectory
from kit.acting import Place

ENVIRON = {
    "SLURM_JOB_ID": "1234",
    "SLURM_JOB_NAME": "gpt",
    "SLURM_JOB_PARTITION": "low",
    "SLURM_JOB_USER": "ada",
    "SLURM_JOB_NODELIST": "n[1-3]",
    "SLURMD_NODENAME": "n2",
    "SLURM_NTASKS": "3",
}


RUNNING = """\
JobId=1 JobName=my job PreemptTime=2020-01-01T00:00:00
   UserId=ada(1000) GroupId=ada(1000) MCS_label=N/A
   Priority=4294901759 Nice=0 Account=(null) QOS=(null)
   JobState=RUNNING Reason=None Dependency=(null)
   Requeue=1 Restarts=2 BatchFlag=1 Reboot=0 ExitCode=0:0
   RunTime=00:00:07 TimeLimit=00:05:00 TimeMin=N/A
   SubmitTime=2026-11-15T18:24:47 EligibleTime=2026-11-15T18:24:47
   AccrueTime=2026-11-15T18:24:47
   StartTime=2026-11-15T18:24:48 EndTime=2026-11-15T18:29:48 Deadline=N/A
   PreemptEligibleTime=2026-11-15T18:24:48 PreemptTime=None
   SuspendTime=None SecsPreSuspend=0 LastSchedEval=2026-11-15T18:24:48 Scheduler=Backfill
   Partition=low AllocNode:Sid=localhost:26451
   ReqNodeList=(null) ExcNodeList=n[7-8]
   NodeList=n[1-2]
   BatchHost=n1
   NumNodes=2 NumCPUs=4 NumTasks=2 CPUs/Task=1 ReqB:S:C:T=0:0:*:*
   TRES=cpu=4,node=2,billing=4
   Socks/Node=* NtasksPerN:B:S:C=1:0:*:* CoreSpec=*
   MinCPUsNode=1 MinMemoryNode=0 MinTmpDiskNode=0
   Features=(null) DelayBoot=00:00:00
   OverSubscribe=NO Contiguous=0 Licenses=(null) Network=(null)
   Command=/home/ada/a job.sh Requeue=0
   WorkDir=/home/ada
   Comment=lr=3 JobState=FAILED the Requeue=0 one
   StdErr=/home/ada/j1.out
   StdIn=/dev/null
   StdOut=/home/ada/j1.out
   Power=


"""
STARTED = 1794767088.0


def changed(**fields: str) -> str:
    """The record above with other values, as Slurm would print it."""
    text = RUNNING.replace("JobName=my job PreemptTime=2020-01-01T00:00:00", "JobName=x")
    for name, value in fields.items():
        old = next(word for word in text.split() if word.startswith(f"{name}="))
        text = text.replace(f" {old}", f" {name}={value}", 1)
    return text


def limit_in(seconds: float, of: float = 1000.0) -> str:
    """A record of a job that began `of` seconds before its end, which is `seconds` away."""
    end = time.time() + seconds
    stamps = {"StartTime": end - of, "EndTime": end}
    return changed(
        **{name: time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(at)) for name, at in stamps.items()}
    )


class Fake:
    """A scontrol of the test's own: answers `show job` with a text, writes down whatever else it is asked."""

    def __init__(self, home: Path) -> None:
        self.home = home
        self.answer(RUNNING)
        self.program("")

    def program(self, first: str) -> None:
        path = self.home / "scontrol"
        path.write_text(
            f'#!/bin/sh\n{first}\nif [ "$1" = show ] && [ -f "{self.home}/$2" ]; then\n'
            f'    echo "$2" >>"{self.home}/questions"; cat "{self.home}/$2"; exit 0\nfi\n'
            f'printf "%s\\n" "$*" >>"{self.home}/calls"\n'
        )
        path.chmod(0o755)

    def answer(self, text: str) -> None:
        (self.home / "job").write_text(text)
        (self.home / "partition").write_text("PartitionName=low\n   Nodes=n[1-4]\n")

    def configure(self, kill_wait: int, grace_time: int = 0) -> None:
        (self.home / "config").write_text(
            f"KillOnBadExit           = 0\nKillWait                = {kill_wait} sec\n"
        )
        (self.home / "partition").write_text(f"PartitionName=low\n   GraceTime={grace_time} Hidden=NO\n")

    @property
    def calls(self) -> list[str]:
        path = self.home / "calls"
        return path.read_text().splitlines() if path.exists() else []

    @property
    def questions(self) -> int:
        """How often it was asked about the job."""
        return self.asked_about("job")

    def asked_about(self, what: str) -> int:
        path = self.home / "questions"
        return path.read_text().splitlines().count(what) if path.exists() else 0


def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Fake:
    """The only scontrol that is found."""
    home = tmp_path / "bin"
    home.mkdir()
    monkeypatch.setenv("PATH", f"{home}:/usr/bin:/bin")
    return Fake(home)


JOB = SlurmJob(job_id=1, restarts=2, nodes=["n1", "n2"], node="n1")
PREEMPTED = StopRequest(source=Source.SIGNAL, detail="SIGTERM to the agent of n1", signal="SIGTERM")
AT_THE_LIMIT = StopRequest(source=Source.TIME_LIMIT, detail="Slurm ends job 1 in 60 s")


def a_run(path: Path, *events: object) -> Path:
    """A run with one attempt and these events in its journal."""
    control, _ = ControlDirectory.open_or_create(path)
    journal = JournalWriter(control.journal, "agent-n1", 1)
    for event in events:
        journal.write(event)  # type: ignore[arg-type]
    journal.close()
    return path


ASKED = StopAsked(source="signal", detail="SIGUSR1 to the agent of n1", node="n1")

SCONTROL = """#!/bin/sh
echo "$@" >> {log}
[ "$1" = show ] && [ "$2" = job ] && echo "JobId=1234 JobName=train
   Requeue=1 Restarts=1 BatchFlag=1 JobState=RUNNING Reason=None
   StartTime={start} EndTime={end} NumNodes=3 Partition=gpu"
[ "$1" = requeue ] && cat {cwd}/run/lease/*.beat > {cwd}/beats-at-requeue
exit 0
"""


def job_environment(place: Place, left: float) -> dict[str, str]:
    """The environment of a job whose time limit is so far off."""
    now = time.time()
    form = "%Y-%m-%dT%H:%M:%S"
    text = SCONTROL.format(
        log=place.cwd / "asked",
        cwd=place.cwd,
        start=time.strftime(form, time.gmtime(now - 3600)),
        end=time.strftime(form, time.gmtime(now + left)),
    )
    program = place.cwd / "bin" / "scontrol"
    program.parent.mkdir(exist_ok=True)
    program.write_text(text)
    program.chmod(program.stat().st_mode | stat.S_IXUSR)
    return {
        "PATH": f"{program.parent}:{os.environ['PATH']}",
        "SLURM_JOB_ID": "1234",
        "SLURM_JOB_NODELIST": "n[1-3]",
        "SLURM_RESTART_COUNT": "1",
        "SLURM_JOB_END_TIME": str(int(now + left)),
    }
