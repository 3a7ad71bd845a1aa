"""What Slurm says of a job: read from its environment, from scontrol, and shown by `holdfast slurm`."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

import holdfast
from holdfast.cluster import slurm, time_limit
from holdfast.cluster.slurm import MOST, JobRecord, SlurmJob, current_job, expand, parse_job, parse_nodes
from holdfast.config.settings import Settings
from holdfast.journal.events import SaveCommitted
from holdfast.journal.reader import read_journal
from holdfast.journal.writer import JournalWriter
from holdfast.launch.context import Scheduler
from holdfast.policy.budgets import MAX_REQUEUES
from holdfast.record.attempts import HeadRecord, begin_attempt
from holdfast.record.directory import ControlDirectory, create_record
from holdfast.record.lease import Fence, claim
from kit.commands import command
from kit.harness import wait_until
from kit.nodes.fake_scontrol import (
    ASKED,
    AT_THE_LIMIT,
    ENVIRON,
    JOB,
    RUNNING,
    STARTED,
    Fake,
    a_run,
    changed,
    limit_in,
)
from kit.nodes.slurm_cluster import SlurmCluster

# --- names of nodes


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("", []),
        ("n1", ["n1"]),
        ("n[1-3,07-09]", ["n1", "n2", "n3", "n07", "n08", "n09"]),
        ("a,b[2-3]", ["a", "b2", "b3"]),
        ("n[9-11]", ["n9", "n10", "n11"]),
        ("n[08-10]", ["n08", "n09", "n10"]),
        ("r[0-1]n[1-2]", ["r0n1", "r0n2", "r1n1", "r1n2"]),
        ("rack[0-1][0-1]", ["rack00", "rack01", "rack10", "rack11"]),
        ("gpu-[1-2]-ib", ["gpu-1-ib", "gpu-2-ib"]),
    ],
)
def test_a_list_of_nodes_is_spelt_out(text: str, names: list[str]) -> None:
    assert expand(text) == names


@pytest.mark.parametrize(
    "text",
    ["n[1-3", "n]", "n[[1]]", "n[3-1]", "n[]", "n[a-b]", "n[1,]", "n[000x133]", "n[1-999999999]", "a b"],
)
def test_a_list_that_is_not_understood_is_refused_and_not_guessed(text: str) -> None:
    with pytest.raises(ValueError, match=r"brackets|range|more than|no spaces"):
        expand(text)


def test_a_list_cannot_stand_for_more_names_than_any_cluster_has() -> None:
    assert len(expand(f"n[1-{MOST}]")) == MOST
    for text in (f"n[0-{MOST}]", "n[0-999][0-999]", f"a,n[1-{MOST}]"):
        with pytest.raises(ValueError, match="more than"):
            expand(text)


@given(st.text(alphabet="n[]-,019 x", max_size=30))
def test_any_text_gives_names_or_an_error(text: str) -> None:
    try:
        names = expand(text)
    except ValueError:
        return
    assert all(name and "[" not in name and "," not in name for name in names)


# --- the environment


def test_a_job_is_known_from_its_environment() -> None:
    """E3: job, restarts and nodes."""
    job = current_job({**ENVIRON, "SLURM_RESTART_COUNT": "2", "SLURM_JOB_END_TIME": "1794767388"})
    assert job == SlurmJob(
        job_id=1234, name="gpt", partition="low", user="ada", restarts=2, nodes=["n1", "n2", "n3"], node="n2",
        tasks=3, ends_at=1794767388.0,
    )  # fmt: skip
    assert job.label == "1234"


def test_a_task_of_an_array_has_the_name_by_which_only_it_is_meant() -> None:
    """E3: the last task of an array has the array's own number, by which Slurm would take all of them."""
    job = current_job({**ENVIRON, "SLURM_ARRAY_JOB_ID": "1234", "SLURM_ARRAY_TASK_ID": "7"})
    assert job is not None
    assert (job.label, job.array_job_id, job.array_task_id) == ("1234_7", 1234, 7)


def test_a_job_submitted_from_within_another_is_not_taken_for_that_one() -> None:
    """It inherits the variables of the array's task, or of the heterogeneous job, that submitted it."""
    of_array = {"SLURM_ARRAY_JOB_ID": "1231", "SLURM_ARRAY_TASK_ID": "1", "SLURM_ARRAY_TASK_COUNT": "3"}
    of_het = {
        "SLURM_HET_SIZE": "2",
        "SLURM_JOB_ID_HET_GROUP_0": "1228",
        "SLURM_JOB_ID_HET_GROUP_1": "1229",
        "SLURM_JOB_NODELIST_HET_GROUP_0": "g1",
    }
    job = current_job({**ENVIRON, **of_array, **of_het})
    assert job is not None
    assert (job.label, job.array_job_id, job.array_task_id) == ("1234", None, None)
    assert (job.components, job.nodes) == (1, ["n1", "n2", "n3"])


OF_AN_ARRAY = """\
JobId=1231 ArrayJobId=1231 ArrayTaskId=5-9%2 JobName=a
   JobState=PENDING Reason=JobArrayTaskLimit Dependency=(null)

JobId=1232 ArrayJobId=1231 ArrayTaskId=1 JobName=a
   JobState=RUNNING Reason=None Dependency=(null)

JobId=1233 ArrayJobId=1231 ArrayTaskId=2 JobName=a
   JobState=COMPLETED Reason=None Dependency=(null)
"""


@pytest.mark.parametrize(
    ("asked", "label", "state"),
    [("1232", "1231_1", "RUNNING"), ("1231_2", "1231_2", "COMPLETED"), ("1233", "1231_2", "COMPLETED")],
)
def test_the_controllers_record_names_the_task(asked: str, label: str, state: str) -> None:
    record = parse_job(OF_AN_ARRAY, asked)
    assert record is not None
    assert record.state == state
    named = slurm.as_named(SlurmJob(job_id=record.job_id or 0), record)
    assert named.label == label


def test_a_record_of_another_job_names_nothing() -> None:
    job = SlurmJob(job_id=1240)
    assert slurm.as_named(job, parse_job(OF_AN_ARRAY, "1240")) == job
    assert slurm.as_named(job, None) == job
    plain = SlurmJob(job_id=1, array_job_id=1, array_task_id=3)
    assert slurm.as_named(plain, parse_job(RUNNING, "1")).label == "1"


def test_the_job_itself_is_queued_again_and_not_the_task_it_was_submitted_from(
    fake_scontrol: Fake, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake_scontrol.answer(RUNNING.replace("JobId=1 ", "JobId=1240 "))
    of_array = {"SLURM_ARRAY_JOB_ID": "1231", "SLURM_ARRAY_TASK_ID": "1", "SLURM_RESTART_COUNT": "2"}
    for name, value in {**ENVIRON, **of_array, "SLURM_JOB_ID": "1240"}.items():
        monkeypatch.setenv(name, value)
    done = command("slurm", "requeue", "--reason", "tried")
    assert done.code == 0, done
    assert "1240" in done.err
    assert [call.split(" Comment=")[0] for call in fake_scontrol.calls] == [
        "update JobId=1240",
        "requeue 1240",
    ]


def test_a_heterogeneous_job_is_its_first_component_on_all_nodes() -> None:
    job = current_job(
        {
            **ENVIRON,
            "SLURM_JOB_ID": "1235",
            "SLURM_HET_SIZE": "2",
            "SLURM_JOB_ID_HET_GROUP_0": "1234",
            "SLURM_JOB_NODELIST_HET_GROUP_0": "n1",
            "SLURM_JOB_NODELIST_HET_GROUP_1": "g[1-2]",
        }
    )
    assert job is not None
    assert (job.job_id, job.components, job.nodes) == (1234, 2, ["n1", "g1", "g2"])


@pytest.mark.parametrize(
    "environ", [{}, {"SLURM_JOB_ID": ""}, {"SLURM_JOB_ID": "x"}, {"SLURM_CONF": "/etc/x"}]
)
def test_outside_of_slurm_there_is_no_job(environ: dict[str, str]) -> None:
    assert current_job(environ) is None


@given(
    st.dictionaries(st.sampled_from(sorted([*ENVIRON, "SLURM_RESTART_COUNT", "SLURM_HET_SIZE"])), st.text())
)
def test_no_environment_makes_it_fail(environ: dict[str, str]) -> None:
    current_job({**ENVIRON, **environ})


def test_the_job_can_be_asked_for_without_run_and_without_torch() -> None:
    """E9: usable alone."""
    assert holdfast.SlurmJob is SlurmJob
    code = (
        "import sys, holdfast; job = holdfast.current_slurm_job(); "
        "assert 'torch' not in sys.modules; print(job.label, *job.nodes)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, **ENVIRON},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.split() == ["1234", "n1", "n2", "n3"]


# --- what scontrol says. Texts as Slurm 22.05 and 23.11 write them.


def test_what_people_wrote_is_never_taken_for_what_slurm_says() -> None:
    record = parse_job(RUNNING)
    assert record == JobRecord(
        state="RUNNING", job_id=1, starts_at=STARTED, ends_at=STARTED + 300, requeue=True, batch=True,
        restarts=2, preempted_at=None, comment="lr=3 JobState=FAILED the Requeue=0 one", exclude=["n7", "n8"],
        nodes=["n1", "n2"], node_count=2, partition="low",
    )  # fmt: skip


def test_a_comment_of_several_lines_changes_nothing_either() -> None:
    text = RUNNING.replace("the Requeue=0 one", "the\n   JobState=FAILED Requeue=0\n   EndTime=Unknown")
    record = parse_job(text)
    assert record is not None
    assert (record.state, record.requeue, record.ends_at) == ("RUNNING", True, STARTED + 300)


@pytest.mark.parametrize("limit", ["UNLIMITED", "365-00:00:00"])
def test_the_year_that_slurm_writes_for_a_job_without_limit_is_no_end(limit: str) -> None:
    year = parse_job(changed(TimeLimit=limit, EndTime="2027-11-15T18:24:48"))
    assert year is not None
    assert year.ends_at is None
    preempted = parse_job(changed(TimeLimit=limit))  # its grace time ends it after all
    assert preempted is not None
    assert preempted.ends_at == STARTED + 300


def test_a_job_without_end_and_one_of_no_batch_script() -> None:
    record = parse_job(changed(EndTime="Unknown", BatchFlag="0", PreemptTime="2026-11-15T18:25:00"))
    assert record is not None
    assert record.ends_at is None
    assert record.batch is False
    assert record.preempted_at == STARTED + 12


@pytest.mark.parametrize(
    "text", ["", "slurm_load_jobs error: Invalid job id specified", "JobId=1", "\n\n=\n= ="]
)
def test_an_answer_that_is_no_record_is_not_known(text: str) -> None:
    assert parse_job(text) is None


@given(st.text(max_size=200))
def test_no_answer_makes_reading_it_fail(text: str) -> None:
    parse_job(text)
    parse_job(RUNNING + text)
    parse_nodes(text)


def test_the_states_of_nodes_are_read_with_their_reasons() -> None:
    text = """\
NodeName=n1 Arch=x86_64 CoresPerSocket=1
   OS=Linux 6.1 #1 SMP State=DOWN
   State=IDLE ThreadsPerCore=1 TmpDisk=0 Weight=1 Owner=N/A MCS_label=N/A

NodeName=n2 Arch=x86_64 CoresPerSocket=1
   State=MIXED+DRAIN ThreadsPerCore=1 TmpDisk=0
   Reason=holdfast: GPU 3 State=IDLE [root@2026-11-15T18:24:33]

NodeName=n3 CoresPerSocket=1
   State=DOWN* ThreadsPerCore=1
"""
    nodes = {node.name: node for node in parse_nodes(text)}
    assert {name: node.usable for name, node in nodes.items()} == {"n1": True, "n2": False, "n3": False}
    assert nodes["n2"].reason == "holdfast: GPU 3 State=IDLE [root@2026-11-15T18:24:33]"
    assert nodes["n1"].reason == ""


# --- a scontrol that is missing, hangs, or plays along


def test_without_scontrol_everything_is_unknown_and_nothing_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Works without Slurm's commands, as in a container: quietly."""
    monkeypatch.setenv("PATH", str(tmp_path))
    assert slurm.job_record("1") is None
    assert slurm.node_records(["n1"]) == {}
    assert slurm.partition_nodes("low") is None
    assert not slurm.drain("n1", "why").ok
    assert not time_limit.may_requeue(JOB, "auto", 0)
    asked = time_limit.requeue_after_stop(JOB, "auto", AT_THE_LIMIT, exclude=[], stalled=0)
    assert not asked.asked
    assert "did not say" in asked.reason


def test_the_start_says_what_slurm_leaves_and_warns_when_a_save_does_not_fit(
    fake_scontrol: Fake, tmp_path: Path
) -> None:
    control, _ = ControlDirectory.open_or_create(tmp_path / "run")
    fence = Fence(control, claim(control, "one", 60.0).epoch)
    fake_scontrol.answer(limit_in(6000))
    fake_scontrol.configure(kill_wait=5)
    told: list[str] = []
    for number in (1, 2):
        begin_attempt(control, fence, "launch", 1)
        scheduler = Scheduler(control, Settings(), JOB)
        with contextlib.closing(JournalWriter(control.journal, "rank-0", number)) as journal:
            scheduler.found(journal, number, "launch", told.append)
            journal.write(
                SaveCommitted(
                    checkpoint="a", step=1, parent=None, bytes=1, files=1, seconds=12.0, blocked_seconds=1.0
                )
            )
        create_record(
            control.attempt(number) / "head.json", HeadRecord(attempt=number, checkpoint=None, step=0)
        )
        scheduler.part(told.append)
    said = [line for line in told if "KillWait" in line]
    assert len(said) == 2
    assert said[0].endswith("no save was measured yet")
    assert said[1].startswith("warning: ")
    assert "12.0 s: it does not fit" in said[1]


def test_outside_of_slurm_nobody_is_asked_anything(fake_scontrol: Fake, tmp_path: Path) -> None:
    control, _ = ControlDirectory.open_or_create(tmp_path / "run")
    outside = Scheduler(control, Settings(), None)
    told: list[str] = []
    with contextlib.closing(JournalWriter(control.journal, "agent", 1)) as journal:
        outside.found(journal, 1, "launch", told.append)
    assert outside.due() is None
    outside.ask_again()
    assert outside.ends_at is None
    assert not outside.can_requeue(0)
    outside.after_stop(1, AT_THE_LIMIT, 0, [])
    outside.by_decision(1, "why", 0, [])
    outside.part(told.append)
    assert (told, fake_scontrol.questions, fake_scontrol.calls) == ([], 0, [])
    assert not list(read_journal(control.journal))
    assert not (control.path / "requeues").exists()


def test_slurm_is_not_asked_about_a_job_that_does_not_come_back_anyway(fake_scontrol: Fake) -> None:
    assert not time_limit.may_requeue(JOB, "never", 0)
    assert not time_limit.may_requeue(JOB, "auto", MAX_REQUEUES)
    assert fake_scontrol.questions == 0
    assert time_limit.may_requeue(JOB, "auto", MAX_REQUEUES - 1)


def test_a_scontrol_that_hangs_is_ended_at_its_deadline_with_all_it_started(fake_scontrol: Fake) -> None:
    fake_scontrol.program(f'echo $$ >"{fake_scontrol.home}/pid"; sleep 60')
    began = time.monotonic()
    assert slurm.job_record("1", timeout=0.3) is None
    assert not slurm.requeue("1", timeout=0.3).ok
    assert time.monotonic() - began < 10
    pid = int((fake_scontrol.home / "pid").read_text())
    wait_until(lambda: not Path(f"/proc/{pid}").exists(), 5, "the hanging scontrol is gone")
    assert not fake_scontrol.calls


def test_a_scontrol_that_cannot_even_be_killed_is_not_waited_for(
    fake_scontrol: Fake, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file server that is gone may keep it in the kernel."""
    fake_scontrol.program(f'echo $$ >"{fake_scontrol.home}/pid"; exec sleep 60')
    monkeypatch.setattr(slurm, "END", 0.2)
    killpg = os.killpg
    monkeypatch.setattr(os, "killpg", lambda pid, number: None)
    began = time.monotonic()
    assert slurm.call("show", "job", "1", timeout=0.5).late
    assert time.monotonic() - began < 20
    killpg(int((fake_scontrol.home / "pid").read_text()), signal.SIGKILL)


def test_an_answer_with_a_failing_code_or_with_noise_beside_it(fake_scontrol: Fake) -> None:
    fake_scontrol.program('echo "JobId=9 JobState=FAILED" >&2')
    record = slurm.job_record("1")
    assert record is not None
    assert record.state == "RUNNING"
    fake_scontrol.program("echo JobId=9 JobState=FAILED; exit 1")
    assert slurm.job_record("1") is None


def test_times_do_not_depend_on_the_zone_of_the_machine(
    fake_scontrol: Fake, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TZ", "Asia/Tokyo")
    monkeypatch.setenv("SLURM_TIME_FORMAT", "relative")
    fake_scontrol.program(f'echo "$TZ $SLURM_TIME_FORMAT" >"{fake_scontrol.home}/zone"')
    record = slurm.job_record("1")
    assert record is not None
    assert record.ends_at == STARTED + 300
    assert (fake_scontrol.home / "zone").read_text() == "UTC standard\n"


def test_a_signal_to_the_job_does_not_end_a_question_that_is_under_way(fake_scontrol: Fake) -> None:
    """Queueing a job again ends it: the process that asks gets SIGTERM before it is done."""
    fake_scontrol.program("kill -TERM $$; kill -USR1 $$; kill -INT $$; kill -HUP $$")
    assert slurm.requeue("1", {"ExcNodeList": "n1"}).ok
    assert fake_scontrol.calls == ["requeue 1", "update JobId=1 ExcNodeList=n1"]
    assert slurm.job_record("1") is not None


def test_a_comment_stays_on_one_line(fake_scontrol: Fake) -> None:
    assert slurm.set_comment("1", "a\nJobState=FAILED\x1b[0m " + "x" * 5000).ok
    assert len(fake_scontrol.calls) == 1
    assert fake_scontrol.calls[0].startswith("update JobId=1 Comment=a JobState=FAILED [0m xxx")
    assert len(fake_scontrol.calls[0]) < 1100


# --- the command


def test_info_outside_of_slurm_says_so_and_is_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith("SLURM")]:
        monkeypatch.delenv(name)
    told = command("slurm", "info")
    assert (told.code, told.out) == (0, "not inside a Slurm job\n")
    assert json.loads(command("slurm", "info", "--json").out) == {"slurm": False}
    refused = command("slurm", "requeue")
    assert refused.code == 2
    assert "not inside a Slurm job" in refused.err


def test_info_says_what_is_known_of_the_job(fake_scontrol: Fake, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {**ENVIRON, "SLURM_RESTART_COUNT": "2"}.items():
        monkeypatch.setenv(name, value)
    fake_scontrol.answer(limit_in(3000))
    told = command("slurm", "info")
    assert told.code == 0, told.text
    assert "job 1234 (gpt) in partition low, queued again 2 times" in told.out
    assert "3 nodes: n1, n2, n3" in told.out
    assert "running; may be queued again" in told.out
    assert "without n7, n8" in told.out
    found = json.loads(command("slurm", "info", "--json").out)
    assert 2900 < found["time_left"] < 3000
    assert found["may_requeue"] is True
    assert found["preempted"] is False
    fake_scontrol.program("exit 1")
    assert "could not be asked" in command("slurm", "info").out
    assert json.loads(command("slurm", "info", "--json").out)["may_requeue"] is None


def test_a_script_can_ask_for_itself(
    fake_scontrol: Fake, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("SLURM_JOB_ID", "1")
    monkeypatch.setenv("SLURM_RESTART_COUNT", "2")
    told = command("slurm", "requeue", "--reason", "the data is not there yet", "--exclude", "n1")
    assert told.code == 0
    assert "was asked to queue job 1 again: the data is not there yet" in told.err
    assert fake_scontrol.calls[-2:] == ["requeue 1", "update JobId=1 ExcNodeList=n7,n8,n1"]
    run = a_run(tmp_path / "run", ASKED)
    monkeypatch.setenv("HOLDFAST_SLURM_REQUEUE", "never")
    told = command("slurm", "requeue", "--exit-code", "31", "--run-dir", run, "--json")
    assert told.code == 0
    assert json.loads(told.out) == {
        "job": "1",
        "asked": False,
        "reason": "slurm.requeue = never",
        "exclude": [],
    }
    fake_scontrol.program('[ "$1" != requeue ] || exit 1')
    assert command("slurm", "requeue", "--reason", "x").code == 1


# --- a real Slurm

REAL = """
import json, sys, time
from holdfast.cluster import slurm
from holdfast.cluster.time_limit import may_requeue
from holdfast.cluster.slurm import SlurmJob
job, held, now = sys.argv[1], sys.argv[2], time.time()
drained = slurm.drain("n4", "holdfast: GPU 3 has\\nbad memory")
record = slurm.job_record(job)
nodes = slurm.node_records(["n1", "n4"])
print(json.dumps({
    "left": record.ends_at - now, "state": record.state, "nodes": record.nodes, "comment": record.comment,
    "restarts": record.restarts, "exclude": record.exclude, "partition": record.partition,
    "may": [may_requeue(SlurmJob(job_id=int(one)), "auto", 0) for one in (job, held)],
    "drained": drained.ok, "usable": {name: node.usable for name, node in nodes.items()},
    "reason": nodes["n4"].reason, "all": slurm.partition_nodes("low,high"),
    "missing": [slurm.job_record("99999"), slurm.partition_nodes("none"), slurm.drain("no", "x").ok],
}))
"""


def test_a_real_slurm_is_understood(slurm: SlurmCluster, tmp_path: Path) -> None:
    script = "#!/bin/sh\nsleep 60\n"
    comment = "--comment=my lr=3 Requeue=0"
    job = slurm.submit(script, "--time=5", comment, "--exclude=n3", "--requeue", cwd=tmp_path)
    held = slurm.submit(script, "--no-requeue", "--exclude=n3", cwd=tmp_path)
    slurm.wait_for(job, "RUNNING")
    slurm.wait_for(held, "RUNNING")
    wait_until(lambda: slurm.job(job)["EndTime"] != "Unknown", 10, "Slurm knows the end")
    told = json.loads(slurm.command(sys.executable, "-c", REAL, job, held))
    assert 240 < told.pop("left") <= 300
    assert told.pop("reason").startswith("holdfast: GPU 3 has bad memory [")
    assert told == {
        "state": "RUNNING", "nodes": slurm.nodes_of(job), "comment": "my lr=3 Requeue=0", "restarts": 0,
        "exclude": ["n3"], "partition": "low", "may": [True, False], "drained": True,
        "usable": {"n1": True, "n4": False}, "all": ["n1", "n2", "n3", "n4"],
        "missing": [None, None, False],
    }  # fmt: skip


@pytest.mark.drill
def test_a_job_that_an_arrays_task_submitted_is_itself_queued_again(
    slurm: SlurmCluster, tmp_path: Path
) -> None:
    again = (
        '#!/bin/sh\nif [ "$(scontrol show job $SLURM_JOB_ID | grep -c Restarts=0)" = 1 ]; then\n'
        f"    {sys.executable} -m holdfast slurm requeue --reason tried; sleep 60\nfi\n"
        'echo "again: $SLURM_JOB_ID $SLURM_ARRAY_JOB_ID"\n'
    )
    (tmp_path / "plain.sh").write_text(again)
    submit = (
        '#!/bin/sh\nif [ "$SLURM_ARRAY_TASK_ID" = 0 ]; then\n'
        "    sbatch --parsable --requeue --output=plain.out --open-mode=append plain.sh\nfi\nsleep 60\n"
    )
    array = slurm.submit(submit, "--array=0-1", "--requeue", cwd=tmp_path)
    first = tmp_path / f"job-{array}_0.out"
    wait_until(lambda: first.exists() and first.read_text().strip(), 60, "the task has submitted its job")
    job = first.read_text().split()[0]
    slurm.wait_for(job, "COMPLETED", restarts=1, timeout=120)
    said = (tmp_path / "plain.out").read_text()
    assert f"again: {job} {array}" in said, "the variables were inherited"
    assert slurm.job(job)["Comment"].startswith("holdfast: queued again: tried")
    for task in (f"{array}_0", f"{array}_1"):
        assert slurm.restarts(task) == 0
        assert slurm.job(task).get("Comment", "(null)") in ("(null)", "")
