"""`holdfast run` with real agents, workers and signals."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import msgspec
import pytest
from torch.distributed import HashStore
from torch.distributed.elastic.multiprocessing.errors import record

from holdfast.config.settings import LaunchSettings, Settings
from holdfast.errors import ExitCode
from holdfast.journal import events
from holdfast.launch.command import parse
from holdfast.launch.incident import inquest as evidence
from holdfast.launch.nodes import attempt as attempts
from holdfast.policy.budgets import MAX_FAILED_LAUNCHES
from holdfast.policy.diagnosis import diagnose
from holdfast.policy.evidence import KERNEL_OOM, Evidence, MemoryKill
from holdfast.policy.signs import Cause
from holdfast.record.attempts import (
    EndRecord,
    FailureRecord,
    begin_attempt,
    end_attempt,
    failures_of,
)
from holdfast.record.directory import ControlDirectory, create_record
from holdfast.record.group import connect
from holdfast.record.launches import digest_of, told_progress
from holdfast.record.lease import Claim, Fence, LeaseKeeper, claim, current_epoch, read_beat, read_claim
from holdfast.record.operator import exclude
from holdfast.record.secret import HARD_LIMIT, SealedStore, run_secret
from kit.harness import REPO, Job, finish, holdfast, is_alive, job, wait_until
from kit.nodes.cgroups import LIMITS, inside_group, memory_group
from kit.runs import control_of, end_records, journalled

STEP = str(REPO / "tests" / "scripts" / "launch" / "launch_step.py")
ENDS = str(REPO / "tests" / "scripts" / "launch" / "launch_ends.py")
GLOO = str(REPO / "tests" / "scripts" / "launch" / "launch_gloo.py")


def launch(
    *flags: str, script: str = STEP, args: tuple[str, ...] = (), preload: bool | None = None
) -> list[str]:
    """Workers that need no torch are started cold: to import it for them is most of a test's time."""
    warm = script not in (STEP, ENDS) if preload is None else preload
    return holdfast("run", "--run-dir", "run", *([] if warm else ["--no-preload"]), *flags, script, *args)


def lines(path: Path) -> list[list[int]]:
    """What the workers logged: attempt, rank, … as numbers."""
    return [[int(word) for word in line.split()] for line in path.read_text().splitlines()]


def ready(running: Job, cwd: Path) -> None:
    """Wait until a worker that was told to `wait` does."""
    mark = cwd / "log.ready"
    wait_until(
        lambda: mark.exists() or running.process.poll() is not None, 60, f"a worker starts to wait {cwd}"
    )
    assert mark.exists(), running.output().text


@pytest.mark.drill
def test_the_script_sees_what_torchrun_would_show_it(tmp_path: Path) -> None:
    flags = ["--nproc-per-node", "2", "--role", "trainer", STEP, "dump"]
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--max-restarts", "3"]
    extra = ["--flag", "-m"]
    theirs_done = finish([*torchrun, *flags, "theirs", *extra], cwd=tmp_path, timeout=90)
    ours_run = launch(*flags[:-2], args=("dump", "ours", *extra), preload=True)
    ours_done = finish(ours_run, cwd=tmp_path, timeout=90)
    assert theirs_done.code == 0, theirs_done.text
    assert ours_done.code == 0, ours_done.text
    for rank in (0, 1):
        theirs = json.loads((tmp_path / f"theirs.{rank}.json").read_text())
        ours = json.loads((tmp_path / f"ours.{rank}.json").read_text())
        assert ours["argv"] == [STEP, "dump", "ours", *extra]
        assert [ours["file"], len(ours["argv"])] == [theirs["file"], len(theirs["argv"])]
        assert set(ours["env"]) - set(theirs["env"]) == {
            "HOLDFAST_LAUNCH",
            "HOLDFAST_AGENT",
            "HOLDFAST_PROGRESS",
        }
        assert set(theirs["env"]) - set(ours["env"]) == set()
        differ = {name for name in theirs["env"] if theirs["env"][name] != ours["env"][name]}
        # Values that name this very launch; HFTEST_JOB is the harness's.
        assert differ <= {"MASTER_PORT", "TORCHELASTIC_RUN_ID", "TORCHELASTIC_ERROR_FILE", "HFTEST_JOB"}
    assert [end and end.outcome for end in end_records(tmp_path)] == ["finished"]


@pytest.mark.drill
def test_gloo_works_after_each_of_three_restarts(tmp_path: Path) -> None:
    """Stock torchrun reuses one store: its restarted gloo ranks read dead addresses and fail."""
    args = ("--log", "log", "--fail", "kill,raise,kill", "--rank", "1")
    result = finish(launch("--nproc-per-node", "2", script=GLOO, args=args), cwd=tmp_path, timeout=120)
    assert result.code == 0, result.text
    assert sorted(line[:4] for line in lines(tmp_path / "log")) == [
        [attempt, rank, 2, attempt - 1] for attempt in (1, 2, 3, 4) for rank in (0, 1)
    ]
    assert [end and (end.outcome, end.exit_code, end.cause) for end in end_records(tmp_path)] == [
        ("failed", -9, "infrastructure"),
        ("failed", 1, "job"),
        ("failed", -9, "infrastructure"),
        ("finished", 0, ""),
    ]
    decisions = journalled(tmp_path, events.DecisionMade)
    assert [(d.chosen, d.details["root_rank"], d.details["restarts_left"]) for d in decisions] == [
        ("restart", 1, 2),
        ("restart", 1, 1),
        ("restart", 1, 0),
    ]
    assert all(len(d.evidence) >= 4 for d in decisions)
    # The error file of the one that raised outlives torch's temporary directory.
    raised = next(f for f in failures_of(control_of(tmp_path), 2) if f.rank == 1)
    assert raised.message == "ValueError: bad sample"
    assert "bad sample" in Path(raised.error_file).read_text()
    assert Path(raised.error_file).is_relative_to(tmp_path / "run" / "attempts" / "000002" / "errors")
    masters = {event.master for event in journalled(tmp_path, events.WorkersStarted)}
    assert len(masters) == 4, "every attempt has a store of its own"


def test_a_script_without_run_earns_its_restarts_by_telling_how_far_it_is(tmp_path: Path) -> None:
    """Three restarts with a budget of one: each told a higher step. One that is told again earns nothing."""
    acts = "tell:3,tell:7,tell:8,tell:8,tell:8"
    result = finish(launch("--max-restarts", "1", args=(acts, "log")), cwd=tmp_path)
    assert result.code == ExitCode.BUDGET_SPENT, result.text
    assert [end and end.highest_step for end in end_records(tmp_path)] == [3, 7, 8, 8]
    assert told_progress(tmp_path / "run") == 8


def test_launches_that_nobody_watches_end_and_a_changed_script_is_let_in(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    script = tmp_path / "step.py"
    shutil.copy(STEP, script)
    one = launch(script=str(script), args=("ok", "log"), preload=False)
    fail_launches(one[one.index("run") + 1 :], MAX_FAILED_LAUNCHES)
    refused = finish(one, cwd=tmp_path)
    assert refused.code == ExitCode.BUDGET_SPENT, refused.text
    assert f"{MAX_FAILED_LAUNCHES} launches in a row of the same script and settings" in refused.err
    assert "holdfast control reset-budget" in refused.err
    assert not (tmp_path / "log").exists(), "no worker was started"
    assert len(end_records(tmp_path)) == MAX_FAILED_LAUNCHES
    assert any("was refused with code 22" in one.message for one in journalled(tmp_path, events.Warned))
    script.write_text(script.read_text() + "# mended\n")
    again = finish(one, cwd=tmp_path)
    assert again.code == ExitCode.OK, again.text


def fail_launches(argv: list[str], count: int) -> None:
    """As if this had been launched again and again, and had failed at once."""
    options = parse(argv)
    run, _ = ControlDirectory.open_or_create(Path(options.settings.run.dir))
    mark = digest_of(options.args.training_script, options.args.training_script_args, options.settings)
    for number in range(count):
        held = claim(run, f"launch{number}", 5.0)
        fence = Fence(run, held.epoch)
        begun = begin_attempt(run, fence, held.owner, 1, max_restarts=0, started_with=mark)
        end = EndRecord(outcome="failed", exit_code=1, cause="unknown", highest_step=0, at=time.time())
        end_attempt(run, fence, begun.number, end)
        LeaseKeeper(run, held, print).release()


def test_what_makes_a_launch_another_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    script, beside = tmp_path / "train.py", tmp_path / "model" / "layers.py"
    beside.parent.mkdir()
    (tmp_path / "wandb" / "code").mkdir(parents=True)
    given = tmp_path / "lr.yaml"
    for path in (script, beside, given):
        path.write_text("x = 1\n")

    def digest(*arguments: str, name: str = "", **launched: Any) -> str:
        settings = Settings(launch=LaunchSettings(node_name=name, **launched))
        return digest_of(str(script), ["--config=lr.yaml", *arguments], settings)

    plain = digest()
    assert digest(name="pod-7f9c") == plain, "a pod has another name each time"
    (tmp_path / "wandb" / "code" / "train.py").write_text("what a logger keeps of each launch")
    (tmp_path / "out.log").write_text("what a launch leaves")
    assert digest() == plain
    assert digest("--lr", "2") != plain
    assert digest(max_restarts=9) != plain
    for path in (script, beside, given):
        path.write_text("x = 2\n")
        assert digest() != plain
        path.write_text("x = 1\n")
        assert digest() == plain
    link = tmp_path / "link.py"
    link.symlink_to(script)
    linked = digest_of(str(link), [], Settings())
    script.write_text("x = 3\n")
    assert digest_of(str(link), [], Settings()) != linked
    assert digest_of("", [], Settings()) == "", "somebody types"


@pytest.mark.drill
def test_the_budget_is_durable_and_refunded_by_progress_only(tmp_path: Path) -> None:
    """Cases pytorch#147064 and Megatron-LM#5281: restarts are bounded job-wide, not per launch."""
    acts = "kill,torn,kill,kill,commit:50,kill,kill,kill"
    first = finish(launch("--max-restarts", "2", args=(acts, "log")), cwd=tmp_path)
    assert first.code == ExitCode.BUDGET_SPENT, first.text
    assert "Traceback" not in first.err
    assert "was killed by SIGKILL" in first.err
    second = finish(launch("--max-restarts", "2", args=(acts, "log")), cwd=tmp_path)
    assert second.code == ExitCode.BUDGET_SPENT, second.text
    assert len(lines(tmp_path / "log")) == 3 + 1, "the asked-for attempt and no restart"
    third = finish(launch("--max-restarts", "2", args=(acts, "log")), cwd=tmp_path)
    assert third.code == ExitCode.BUDGET_SPENT, third.text
    assert [end and end.highest_step for end in end_records(tmp_path)] == [0, 0, 0, 0, 50, 50, 50]
    failed: list[FailureRecord] = failures_of(control_of(tmp_path), 2)
    assert [(f.exit_code, f.message) for f in failed] == [(1, "")], (
        "half an error file costs its message only"
    )


def test_a_repeated_job_error_stops_the_run(tmp_path: Path) -> None:
    """Scenario 13."""
    args = ("--log", "log", "--fail", "raise,raise,raise", "--rank", "1")
    result = finish(launch("--nproc-per-node", "2", script=GLOO, args=args), cwd=tmp_path, timeout=120)
    assert result.code == ExitCode.FAILED, result.text
    assert {line[0] for line in lines(tmp_path / "log")} == {1, 2}
    for told in ("errors/rank_000001.json", "the same error repeated", "next: "):
        assert told in result.err


def test_a_script_without_a_run_is_restarted_as_often_as_max_restarts_says(tmp_path: Path) -> None:
    """It may have made progress that nobody here knows of."""
    result = finish(launch("--max-restarts", "2", args=("error:ValueError: bad", "log")), cwd=tmp_path)
    assert result.code == ExitCode.FAILED, result.text
    assert len(lines(tmp_path / "log")) == 3, "the first attempt and two restarts"


@pytest.mark.drill
@pytest.mark.parametrize("act", ["error:ModuleNotFoundError: No module named 'data'", "exit:2"])
def test_what_fails_at_once_on_all_ranks_is_not_tried_again(tmp_path: Path, act: str) -> None:
    """A module that is missing, a flag that the script does not know: the first error is the last."""
    result = finish(launch("--max-restarts", "50", args=(act, "log")), cwd=tmp_path)
    assert result.code == ExitCode.FAILED, result.text
    assert len(lines(tmp_path / "log")) == 1
    assert "before its first step" in result.err
    if act.startswith("error"):
        assert "No module named 'data'" in result.err


def test_each_end_is_told_from_the_others_by_what_the_rank_left(tmp_path: Path) -> None:
    """Scripts without Run, started cold: there is no error file, only what they wrote."""
    flags = ("--nproc-per-node", "2", "--max-restarts", "5")
    result = finish(launch(*flags, script=ENDS, args=("import,abort,errno,ok",)), cwd=tmp_path, timeout=90)
    assert result.code == 0, result.text
    assert [end and (end.outcome, end.exit_code, end.cause) for end in end_records(tmp_path)] == [
        ("failed", 1, "unknown"),
        ("failed", -signal.SIGABRT, "hang"),
        ("failed", 1, "infrastructure"),
        ("finished", 0, ""),
    ]
    decisions = journalled(tmp_path, events.DecisionMade)
    assert [(d.chosen, d.details["root_rank"]) for d in decisions] == [("restart", 1)] * 3
    assert "1 of 2 ranks failed in their first lines" in decisions[0].evidence
    assert "on all ranks alike" not in result.err
    (nowhere,), (aborted,), (wrapped,) = (failures_of(control_of(tmp_path), number) for number in (1, 2, 3))
    assert nowhere.message == "ModuleNotFoundError: No module named 'a_module_that_is_nowhere'"
    assert "Watchdog caught collective operation timeout" in aborted.message
    assert [(one.types[0], one.errno) for one in wrapped.errors] == [
        ("ValueError", None),
        ("TimeoutError", 110),
    ]
    last = Path(aborted.stderr_file).read_text()
    assert last.startswith("attempt 2 rank 1 abort"), last
    assert last.rstrip().endswith("frame #59: somewhere + 0x3b in libtorch.so")
    assert last in result.err, "shown whole and in order, before what was decided about it"
    first = result.err.index("holdfast: rank 1 on")
    assert result.err.index(last) < result.err.index("holdfast: rank 1 on", first + 1)


def test_a_rank_that_leaves_with_0_before_its_peers_is_named_and_not_tried_for_long(tmp_path: Path) -> None:
    result = finish(launch("--nproc-per-node", "2", script=ENDS, args=("leave",)), cwd=tmp_path, timeout=90)
    assert result.code == ExitCode.FAILED, result.text
    assert [end and (end.exit_code, end.cause) for end in end_records(tmp_path)] == [(0, "job"), (0, "job")]
    node = failures_of(control_of(tmp_path), 1)[0].node
    assert f"rank 1 on {node} left with exit code 0 before its peers were done" in result.err
    assert re.search(r"rank 1 .* left with exit code 0 at [\d:]+ UTC, \d\.\d s before its peers", result.err)
    assert re.search(r"done: stopped: .* \(exit code 1\)", result.err)
    decision = journalled(tmp_path, events.DecisionMade)[-1]
    assert decision.details["root_rank"] == 1
    assert "rank 0 then lost its peer" in decision.evidence
    shown = finish(holdfast("status", "run"), cwd=tmp_path, timeout=60)
    assert "left with exit code 0 before its peers" in shown.out


# -- what is known of one rank's end ------------------------------------------------------------------------


def end_of_rank(tmp_path: Path, exit_code: int, error: object = None, **more: Any) -> FailureRecord:
    """The record of a rank that ended so, and left this as its error file."""
    path = tmp_path / "error.json"
    path.unlink(missing_ok=True)
    if error is not None:
        path.write_text(json.dumps(error))
    known = {"memory": None, **more}
    (found,) = evidence.gather(tmp_path / "attempt", "a", {3: 7}, {3: exit_code}, {3: str(path)}, **known)
    return found


def written_by_torch(tmp_path: Path, error: BaseException) -> object:
    """The error file of torch's @record."""
    path = tmp_path / "torch.json"

    @record
    def main() -> None:
        try:
            raise RuntimeError("DataLoader worker (pid 7) is killed by signal: Killed. ")
        except RuntimeError as inner:
            raise error from inner

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TORCHELASTIC_ERROR_FILE", str(path))
        with pytest.raises(type(error)):
            main()
    return json.loads(path.read_text())


def test_a_loader_that_the_kernel_killed_for_memory_is_the_jobs_and_one_that_somebody_killed_is_not(
    tmp_path: Path,
) -> None:
    error = written_by_torch(tmp_path, RuntimeError("DataLoader worker (pid(s) 7) exited unexpectedly"))
    killed = end_of_rank(tmp_path, 1, error)
    assert [one.message for one in killed.errors] == [
        "DataLoader worker (pid(s) 7) exited unexpectedly",
        "DataLoader worker (pid 7) is killed by signal: Killed. ",
    ], "from the traceback that torch writes"
    assert diagnose(Evidence(ends=[killed])).cause is Cause.INFRASTRUCTURE
    for code in (1, -signal.SIGKILL):
        starved = end_of_rank(tmp_path, code, error, memory=MemoryKill(kills=1, group="/job"))
        assert starved.message.startswith(KERNEL_OOM)
        assert starved.memory is not None
        assert diagnose(Evidence(ends=[starved])).cause is Cause.JOB
    other = end_of_rank(tmp_path, 1, {"message": "ValueError: x"})
    assert (other.message, other.errors) == ("ValueError: x", [])


@pytest.mark.parametrize(
    ("code", "written", "message", "cause"),
    [
        (1, "Traceback (most recent call last):\n  File\nKeyError: 'lr'\n", "KeyError: 'lr'", Cause.JOB),
        (1, "usage\nCall to ibv_modify_qp failed with 110\nbye\n", "Call to ibv_mod", Cause.INFRASTRUCTURE),
        (1, "epoch 3\n 37%|###\n", "37%|###", Cause.UNKNOWN),
        (
            -signal.SIGSEGV,
            "Traceback (most recent call last):\n  File\nKeyError: 'lr'\n",
            "KeyE",
            Cause.UNKNOWN,
        ),
        (-signal.SIGKILL, "ConnectionError: retrying\n", "", Cause.INFRASTRUCTURE),
        (-signal.SIGTERM, "ConnectionError: retrying\n", "", Cause.PREEMPTION),
        (1, "", "", Cause.UNKNOWN),
        (2, "", "", Cause.JOB),
    ],
)
def test_without_an_error_file_the_last_lines_tell(
    tmp_path: Path, code: int, written: str, message: str, cause: Cause
) -> None:
    found = end_of_rank(tmp_path, code, last_lines=lambda rank: written if rank == 3 else "of another")
    assert found.message.startswith(message)
    assert bool(found.message) == bool(message)
    assert diagnose(Evidence(ends=[found])).cause is cause
    assert (Path(found.stderr_file).read_text() if found.stderr_file else "") == written
    added = [("data", "epoch 3")]
    own = end_of_rank(tmp_path, code, last_lines=lambda _: f"Epoch 3\n{written}", causes=added)
    if code in (1, -signal.SIGSEGV) and not own.errors:
        assert own.message.lower() == "epoch 3", "what the configuration adds is looked for first"
        assert diagnose(Evidence(ends=[own], causes=added)).cause is Cause.DATA
    told = end_of_rank(tmp_path, code, {"message": "ValueError: x"}, last_lines=lambda _: written)
    assert told.message == "ValueError: x", "an error file comes first"


EATER = """
import subprocess, sys
from holdfast.launch.incident.inquest import count_oom_kills, memory_kill
before = count_oom_kills()
eats = [sys.executable, "-c", "x = [bytes([1]) * (1 << 20) for _ in range(400)]"]
assert memory_kill(before) is None
code = subprocess.run(eats).returncode
found = memory_kill(before)
print(code, found.kills, found.limit >> 20, found.group, found.limited)
"""


def test_the_kernels_own_kills_for_memory_are_counted(tmp_path: Path) -> None:
    """By a real kernel, with whichever version of cgroups it has."""
    with memory_group() as place:
        limit = next(place / name for name in LIMITS if (place / name).exists())
        limit.write_text(str(200 << 20))
        result = finish(inside_group(place, [sys.executable, "-c", EATER]), cwd=tmp_path, timeout=60)
        code, kills, allowed, group, limited = result.out.split()
        assert (code, kills, allowed) == ("-9", "1", "200"), result.text
        assert Path(group).name == Path(limited).name == place.name


@pytest.mark.parametrize(
    ("groups", "files", "expected"),
    [
        ("0::/job\n", {"job/memory.events": "oom 3\noom_kill 2\n"}, 2),
        ("0::/../job\n", {"memory.events": "oom 3\noom_kill 2\n"}, 2),
        ("4:cpu,memory:/job\n0::/\n", {"memory/job/memory.oom_control": "under_oom 0\noom_kill 5\n"}, 5),
        ("4:memory:/hidden\n0::/\n", {"memory/memory.oom_control": "oom_kill 6\n"}, 6),
        ("4:memory:/job\n", {"memory/job/memory.oom_control": "oom_kill_disable 0\nunder_oom 0\n"}, 0),
        ("5:devices:/\n", {}, 0),
    ],
)
def test_both_versions_of_cgroups_are_read(
    tmp_path: Path, groups: str, files: dict[str, str], expected: int
) -> None:
    (tmp_path / "groups").write_text(groups)
    for name, text in files.items():
        (tmp_path / "mounted" / name).parent.mkdir(parents=True)
        (tmp_path / "mounted" / name).write_text(text)
    assert evidence.count_oom_kills(tmp_path / "groups", tmp_path / "mounted") == expected


@pytest.mark.drill
def test_an_incurable_code_stops_the_run_with_that_code(tmp_path: Path) -> None:
    """Scenario 13."""
    result = finish(launch("--max-restarts", "50", args=("exit:17", "log")), cwd=tmp_path)
    assert result.code == ExitCode.VALIDATION_FAILED, result.text
    assert len(lines(tmp_path / "log")) == 1


@pytest.mark.drill
def test_a_second_launcher_is_refused_and_a_dead_ones_run_is_taken_over(tmp_path: Path) -> None:
    """SIGKILL of the agent leaves no worker behind, and the next launch need not wait for the lease."""
    command = launch("--nproc-per-node", "2", args=("wait,ok", "log"))
    with job(command, cwd=tmp_path, may_leave=True) as first:
        ready(first, tmp_path)
        pids = wait_until(
            lambda: (tmp_path / "log").exists() and [line[3] for line in lines(tmp_path / "log")],
            10,
            "workers write their pids",
        )
        refused = finish(command, cwd=tmp_path)
        assert refused.code == ExitCode.RUN_IS_LIVE, refused.text
        assert f"pid {first.pid}" in refused.err
        assert all(is_alive(pid) for pid in pids)
        assert first.process.poll() is None
        first.signal(signal.SIGKILL)
        wait_until(lambda: not any(is_alive(pid) for pid in pids), 2, "workers end with their agent")
        began = time.monotonic()
        second = finish(command, cwd=tmp_path)
    assert second.code == 0, second.text
    assert time.monotonic() - began < 25, "did not wait for the lease of a dead launcher to lapse"
    claimed = journalled(tmp_path, events.LeaseClaimed)[-1]
    assert "is dead" in claimed.evidence
    assert [end and end.outcome for end in end_records(tmp_path)] == [None, "finished"]


def test_the_default_run_directory_is_one_scripts_only(tmp_path: Path) -> None:
    """Another script would go on with what the first one left there, and be restarted on its account."""
    other = tmp_path / "other.py"
    other.write_text("raise SystemExit('started')\n")
    command = holdfast("run", "--standalone", "--no-preload", STEP, "ok", "log")
    assert finish(command, cwd=tmp_path).code == 0
    refused = finish(holdfast("run", "--standalone", "--no-preload", "other.py"), cwd=tmp_path)
    assert refused.code == ExitCode.USAGE, refused.text
    for told in (STEP, "those of other.py", "--run-dir holdfast-run-other", "started"):
        assert (told in refused.err) == (told != "started"), refused.text
    assert len([*(tmp_path / "holdfast-run" / "attempts").iterdir()]) == 1
    assert finish(command, cwd=tmp_path).code == 0, "the same script goes on there"


@pytest.mark.parametrize(
    ("argv", "found"),
    [
        (["train.py", "-m"], "train.py"),
        (["/here/b/train.py"], "b/train.py"),
        (["--nproc-per-node"], ""),
        (["--nproc-per-node", "2", "--standalone", "../a/train.py"], "/a/train.py"),
        (["-m", "pkg.train", "x"], "-m pkg.train"),
        (["--no-python", "train"], "program train"),
        (["--standalone"], ""),
    ],
)
def test_what_a_command_line_runs(argv: list[str], found: str) -> None:
    from holdfast.launch.command import script_of

    assert script_of(argv, "/here") == found


@pytest.mark.drill
def test_sigterm_stops_everything_cleanly_within_the_grace(tmp_path: Path) -> None:
    """Case pytorch#119856: the grace is the configured one, also for workers that ignore SIGTERM."""
    command = launch("--set", "launch.stop_grace=0.5", args=("wait,ok", "log"))
    with job(command, cwd=tmp_path) as running:
        ready(running, tmp_path)
        began = time.monotonic()
        running.signal(signal.SIGTERM)
        result = running.wait(20)
        assert time.monotonic() - began < 8
        assert result.code == ExitCode.STOPPED_UNSAVED, result.text
        assert "Traceback" not in result.err
        # The worker's own child went with it.
        wait_until(lambda: not running.processes(), 2, "nothing of the job is left")
    end = end_records(tmp_path)[0]
    assert end is not None
    assert (end.outcome, end.exit_code) == ("stopped", ExitCode.STOPPED_UNSAVED)
    beat = read_beat(control_of(tmp_path), 1)
    assert beat is not None
    assert beat.released
    assert [e.outcome for e in journalled(tmp_path, events.AttemptEnded)] == ["stopped"]
    again = finish(command, cwd=tmp_path)
    assert again.code == 0, again.text


def test_a_lost_lease_ends_the_workers_at_once(tmp_path: Path) -> None:
    """Scenario 28: who is fenced off does not go on."""
    flags = ["--set", "control.lease_ttl=2", "--set", "launch.stop_grace=30"]
    with job(launch(*flags, args=("wait", "log")), cwd=tmp_path) as running:
        ready(running, tmp_path)
        run = control_of(tmp_path)
        held = read_claim(run, current_epoch(run))
        assert held is not None
        newer = msgspec.structs.replace(held, epoch=held.epoch + 1, owner="another launch", evidence="test")
        assert isinstance(newer, Claim)
        assert create_record(run.lease / f"{newer.epoch:08d}.claim", newer)
        result = running.wait(15)
    assert result.code == ExitCode.LEASE_LOST, result.text
    assert [e.epoch for e in journalled(tmp_path, events.LeaseLost)] == [1]
    assert end_records(tmp_path) == [None], "an attempt that was fenced off writes nothing"


@pytest.mark.drill
def test_two_agents_restart_together_after_a_worker_of_one_is_killed(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        endpoint = f"localhost:{free.getsockname()[1]}"
    flags = ("--nnodes", "2", "--rdzv-backend", "c10d", "--rdzv-endpoint", endpoint, "--rdzv-id", "two")
    command = launch(*flags, script=GLOO, args=("--log", "log", "--fail", "kill", "--rank", "1"))
    with job(command, cwd=tmp_path) as one, job(command, cwd=tmp_path) as other:
        results = [one.wait(120), other.wait(120)]
    assert [result.code for result in results] == [0, 0], "\n".join(result.text for result in results)
    assert sorted(line[:4] for line in lines(tmp_path / "log")) == [
        [1, 0, 2, 0],
        [1, 1, 2, 0],
        [2, 0, 2, 1],
        [2, 1, 2, 1],
    ]
    decisions = journalled(tmp_path, events.DecisionMade)
    assert len(decisions) == 1, "one decision for both"
    assert decisions[0].details["root_rank"] == 1
    assert [end and (end.outcome, end.exit_code) for end in end_records(tmp_path)] == [
        ("failed", -9),
        ("finished", 0),
    ]


def _is_open(connection: socket.socket) -> bool:
    try:
        return bool(connection.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT))
    except BlockingIOError:
        return True
    except OSError:
        return False


def test_garbage_and_a_crowd_at_the_store_do_not_end_a_run(tmp_path: Path) -> None:
    """1,100 connections that say nothing, at a limit of 1,024 files, and a stranger's words on its keys."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    flags = ("--nnodes", "1:2", "--rdzv-backend", "c10d", "--rdzv-endpoint", f"127.0.0.1:{port}")
    flags = (
        *flags,
        "--rdzv-id",
        "open",
        "--rdzv-conf",
        "last_call_timeout=1",
        "--set",
        "launch.stop_grace=0.5",
    )
    command = launch(*flags, args=("wait,ok", "log"))
    with job(["prlimit", "--nofile=1024:1024", *command], cwd=tmp_path) as running:
        ready(running, tmp_path)
        crowd = [socket.create_connection(("127.0.0.1", port), timeout=10) for _ in range(1100)]
        assert len(os.listdir(f"/proc/{running.pid}/fd")) < 200, "the agent has its files for itself"
        stranger = connect("127.0.0.1", port, 20.0)
        for key in ("meeting", "round.1/holdfast/notice", "round.1/holdfast/attempt", "farewell"):
            stranger.set(f"holdfast.open.0/{key}", b"\xffgarbage")
        stranger.set("holdfast.open/holdfast/launch", b"\xffgarbage")
        os.kill(lines(tmp_path / "log")[0][3], signal.SIGKILL)
        wait_until(lambda: sum(map(_is_open, crowd)) <= HARD_LIMIT, 20, "most are cut at once")
        result = running.wait(60)
        for one in crowd:
            one.close()
    assert result.code == 0, result.text
    assert result.text.count("was not written by this run and is ignored") == 1, result.text
    assert "Traceback" not in result.text, result.text
    assert "Too many open files" not in result.text
    assert [end and end.outcome for end in end_records(tmp_path)] == ["failed", "finished"]


def test_who_stops_reading_what_the_launcher_says_does_not_fail_the_job(tmp_path: Path) -> None:
    """As in `holdfast run … 2>&1 | head -0`: nobody is there when the first attempt's end is told."""
    reading, writing = os.pipe()
    os.close(reading)
    command = launch(args=("kill,ok", "log"))
    with subprocess.Popen(command, cwd=tmp_path, stdout=writing, stderr=writing) as running:
        os.close(writing)
        assert running.wait(60) == 0
    assert [end and end.outcome for end in end_records(tmp_path)] == ["failed", "finished"]


USER = 54321
CAPABLE = "+dac_override,+dac_read_search"
"""To read what only root may, as the interpreter may be, and not to be above limits as root is."""
drill = pytest.mark.drill


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to be another user")
@pytest.mark.parametrize(
    ("limit", "workers"),
    [(3, 1), *(pytest.param(n, 1, marks=drill) for n in (1, 2, 5, 10, 14)),
     *(pytest.param(n, 8, marks=drill) for n in (15, 17))],
)  # fmt: skip
def test_a_process_table_that_is_full_is_told_in_one_line_and_ends(
    tmp_path: Path, limit: int, workers: int
) -> None:
    tmp_path.chmod(0o777)
    for parent in list(tmp_path.parents)[:2]:
        parent.chmod(0o755)
    become = ["setpriv", f"--reuid={USER}", f"--regid={USER}", "--clear-groups", f"--inh-caps={CAPABLE}"]
    become += [f"--ambient-caps={CAPABLE}", f"--bounding-set=-all,{CAPABLE}", "prlimit", f"--nproc={limit}"]
    flags = ("--nproc-per-node", str(workers), "--set", "health.gate=off")
    env = {**os.environ, "HOME": str(tmp_path), "USER": "somebody", "TMPDIR": str(tmp_path)}
    with job([*become, *launch(*flags, args=("ok", "log"))], cwd=tmp_path, env=env) as running:
        result = running.wait(90)
    assert result.code == ExitCode.NO_CAPACITY, result.text
    told = [line for line in result.err.splitlines() if "no more processes or threads can be started" in line]
    assert len(told) == 1, result.text
    assert f"`ulimit -u` is {limit}" in told[0]
    assert "Traceback" not in result.text
    if limit < 15:
        assert result.err.splitlines() == told
        assert not (tmp_path / "run").exists(), "nothing was begun"


@pytest.mark.parametrize("kind", ["14", "store", *(pytest.param(n, marks=drill) for n in ("17", "26", "32"))])
def test_a_process_table_that_fills_up_later_is_told_in_one_line_too(tmp_path: Path, kind: str) -> None:
    """Whatever it is that cannot be started then, a thread inside of torch too: no traceback of our own."""
    injected = [sys.executable, str(REPO / "tests" / "scripts" / "launch" / "no_more_processes.py"), kind]
    flags = ("run", "--run-dir", "run", "--set", "health.gate=off")
    result = finish([*injected, *flags, STEP, "ok", "log"], cwd=tmp_path, timeout=60)
    assert result.code == ExitCode.NO_CAPACITY, result.text
    told = [line for line in result.err.splitlines() if "no more processes or threads can be started" in line]
    assert len(told) == 1, result.text
    assert re.search(r"`ulimit -u` is \S+ for all that this user runs here \(now \d+\)", told[0])
    assert "Traceback" not in result.text
    assert "defect" not in result.text


@pytest.mark.drill
def test_nodes_that_do_not_see_the_same_run_directory_end_at_once(tmp_path: Path) -> None:
    """The control directory must be shared, and the random run id in it proves whether it is."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        endpoint = f"localhost:{free.getsockname()[1]}"
    flags = ("--nnodes", "2", "--rdzv-backend", "c10d", "--rdzv-endpoint", endpoint, "--rdzv-id", "apart")
    command = launch(*flags, "--set", "launch.stop_grace=0.5", args=("wait", "log"))
    places = [tmp_path / "one", tmp_path / "other"]
    for place in places:
        place.mkdir()
    with job(command, cwd=places[0]) as one, job(command, cwd=places[1]) as other:
        results = [one.wait(60), other.wait(60)]
    assert [result.code for result in results] == [ExitCode.CONTROL_UNUSABLE] * 2, results
    assert all("the same run directory" in result.err for result in results), results


@pytest.mark.drill
def test_a_node_that_joins_later_regroups_without_using_up_a_restart(tmp_path: Path) -> None:
    """Stock torch 2.13 does not publish its address again, and the newcomer waits in vain."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        endpoint = f"localhost:{free.getsockname()[1]}"
    flags = ("--nnodes", "1:2", "--rdzv-backend", "c10d", "--rdzv-endpoint", endpoint, "--rdzv-id", "grow")
    more = ("--rdzv-conf", "last_call_timeout=1", "--set", "launch.stop_grace=0.5")
    command = launch(*flags, *more, args=("wait,ok", "log"))
    with job(command, cwd=tmp_path) as one:
        ready(one, tmp_path)
        with job(command, cwd=tmp_path) as other:
            results = [one.wait(60), other.wait(60)]
    assert [result.code for result in results] == [0, 0], "\n".join(result.text for result in results)
    assert sorted(line[:3] for line in lines(tmp_path / "log")) == [[1, 0, 1], [2, 0, 2], [2, 1, 2]]
    assert [end and (end.outcome, end.exit_code) for end in end_records(tmp_path)] == [
        ("stopped", 0),
        ("finished", 0),
    ]


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--no-such-flag", STEP], "unrecognized arguments: --no-such-flag"),
        (["--ft-cfg-path=x.yaml", STEP], "--ft-cfg-path x.yaml cannot be read"),
        (["--ft-cfg-path", str(REPO / "pyproject.toml"), STEP], "cannot be read"),
        (["--ft-nccl-heartbeat", "30", STEP], "is a flag of ft_launcher"),
        (["--ft-param-rank_termination_signal=SIGKILL", STEP], "use launch.stop_grace"),
        (["--workers-stop-timeout=5", STEP], "use launch.stop_grace"),
        (["--restart-policy", "any-failed", STEP], "launch.max_restarts"),
        (["--rdzv-conf", "join_timout=5", STEP], "reads join_timeout=…, last_call_timeout=…"),
        (["--rdzv-conf", "join_timeout=5,,", STEP], "reads join_timeout=…"),
        (["--rdzv-conf", "join_timeout=soon", STEP], "is not a number of whole seconds"),
        (["--rdzv-conf", "is_host=perhaps", STEP], "is not true or false"),
        (["--rdzv-conf", "store_type=file", STEP], "'store_type=file': the c10d rendezvous reads"),
        (
            ["--rdzv-backend", "static", "--master-port", "1", "--rdzv-conf", "join_timeout=5", STEP],
            "timeout=…",
        ),
        (["--ft-rank-heartbeat-timeout", "soon", STEP], "monitor.rank_heartbeat_timeout"),
        (["--rdzv-backend", "etcd-v2", STEP], "--rdzv-backend c10d"),
        (["--nnodes", "two", STEP], "MIN:MAX"),
        (["--set", "launch.max_restart=1", STEP], "launch.max_restarts"),
        (["--max-restarts", "-1", STEP], "launch.max_restarts = "),
        (
            ["--nnodes", "2", "--set", "launch.node_timeout=30", STEP],
            "launch.node_timeout < control.lease_ttl",
        ),
        (["nowhere.py"], "there is no script nowhere.py"),
        (["--no-python", "no-such-program-here"], "no such program"),
    ],
)
def test_a_wrong_command_line_is_refused_before_anything_is_made(
    flags: list[str],
    said: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    from holdfast.errors import HoldfastError
    from holdfast.launch.command import parse

    monkeypatch.chdir(tmp_path)
    with pytest.raises((HoldfastError, SystemExit)) as caught:
        parse(["--run-dir", "run", *flags])
    if isinstance(caught.value, SystemExit):
        assert caught.value.code == 2
    else:
        assert caught.value.exit_code == ExitCode.USAGE
    assert said in capsys.readouterr().err + str(caught.value)
    assert not any(tmp_path.iterdir())


def test_flags_become_settings_and_the_script_keeps_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from holdfast.launch.command import make_parser, parse

    monkeypatch.chdir(tmp_path)
    plain = parse([STEP, "--log", "x", "--config", "mine", "--", "--run-dir"])
    assert plain.args.training_script_args == ["--log", "x", "--config", "mine", "--", "--run-dir"]
    assert (plain.args.rdzv_backend, plain.args.rdzv_endpoint) == ("c10d", "localhost:0")
    assert plain.args.max_restarts == plain.settings.launch.max_restarts == 3
    assert plain.command_line == {}
    known = parse(["--ft-rank-section-timeouts", "setup:700,step:90", "--ft-rank_heartbeat_timeout=90", STEP])
    assert known.settings.monitor.rank_section_timeouts == "setup:700,step:90"
    assert known.settings.monitor.rank_heartbeat_timeout == 90
    flags = [
        "--nproc-per-node=2",
        "--max-restarts=0",
        "--run-dir",
        "here",
        "-m",
        "--set",
        "control.lease_ttl=5",
    ]
    given = parse([*flags, "mod", "-m"])
    assert (given.args.module, given.args.training_script, given.args.training_script_args) == (
        True,
        "mod",
        ["-m"],
    )
    assert given.settings.launch.max_restarts == 0
    assert given.settings.run.dir == "here"
    assert given.command_line == {
        "control.lease_ttl": "5",
        "run.dir": "here",
        "launch.max_restarts": "0",
    }
    monkeypatch.setenv("PET_MAX_RESTARTS", "7")
    assert parse([STEP]).settings.launch.max_restarts == 7
    help_text = make_parser().format_help()
    assert help_text.index("--run-dir DIR") < help_text.index("Number of nodes")


def test_the_shutdown_timeout_is_what_torchruns_help_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from torch.distributed.run import get_args_parser

    from holdfast.errors import UsageError
    from holdfast.launch.command import parse

    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", "7")
    told = parse([STEP])
    assert told.settings.launch.stop_grace == 7
    assert told.command_line == {"launch.stop_grace": "7"}, "the workers are told, too"
    if "--shutdown-timeout" in get_args_parser().format_help():  # torchrun of torch 2.11 has none
        assert parse(["--shutdown-timeout", "8", STEP]).settings.launch.stop_grace == 8
    assert parse(["--set", "launch.stop_grace=9", STEP]).settings.launch.stop_grace == 9
    (tmp_path / "our.toml").write_text("[launch]\nstop_grace = 10.0\n")
    assert parse(["--config", "our.toml", STEP]).settings.launch.stop_grace == 10
    monkeypatch.setenv("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", "soon")
    with pytest.raises(UsageError, match="TORCH_ELASTIC_SHUTDOWN_TIMEOUT='soon'"):
        parse([STEP])


FT_FILE = """
exp_manager:
  fault_tolerance:
    initial_rank_heartbeat_timeout: 900
    rank_heartbeat_timeout: null
    rank_section_timeouts: {setup: 600, step: null, checkpointing: 420.5}
    rank_termination_signal: SIGKILL
    unheard_of: 1
"""


def test_what_ft_launcher_calls_a_thing_that_exists_here_is_taken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from holdfast.errors import UsageError
    from holdfast.launch.command import parse

    monkeypatch.chdir(tmp_path)
    former = (
        "--ft-param-rank_section_timeouts=setup:600,step:None",
        "--ft-param-rank-heartbeat-timeout",
        "90",
    )
    known = parse([*former, "--ft-rank-out-of-section-timeout", "null", STEP, "--ft-param-x"])
    assert known.settings.monitor.rank_section_timeouts == "setup:600,step:0"
    assert known.settings.monitor.rank_heartbeat_timeout == 90
    assert known.settings.monitor.rank_out_of_section_timeout == 0
    assert known.args.training_script_args == ["--ft-param-x"]

    (tmp_path / "ft.yaml").write_text(FT_FILE)
    read = parse(["--ft-cfg-path", "ft.yaml", "--ft-initial_rank_heartbeat_timeout=800", STEP])
    assert read.settings.monitor.initial_rank_heartbeat_timeout == 800, "the flag before the file"
    assert read.settings.monitor.rank_heartbeat_timeout == 0
    assert read.settings.monitor.rank_section_timeouts == "setup:600,step:0,checkpointing:420.5"
    assert len(read.notes) == 1
    assert "rank_termination_signal (use launch.stop_grace" in read.notes[0]
    assert "unheard_of (there is no such setting here" in read.notes[0]

    (tmp_path / "other.yaml").write_text("a: [1, {b: 2}]\n")
    with pytest.raises(UsageError, match="no section `fault_tolerance`"):
        parse(["--ft-cfg-path=other.yaml", STEP])
    monkeypatch.setitem(sys.modules, "yaml", None)
    with pytest.raises(UsageError, match="pip install pyyaml"):
        parse(["--ft-cfg-path=ft.yaml", STEP])


def test_keys_of_the_rendezvous_that_torch_knows_and_nothing_here_reads_are_told_of(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from holdfast.launch.command import parse

    monkeypatch.chdir(tmp_path)
    told = parse(["--rdzv-conf", "join_timeout=5,store_type=tcp, keep_alive_interval=3,is_host=True", STEP])
    assert told.notes == ["--rdzv-conf keep_alive_interval has no effect here: use launch.node_timeout"]
    assert parse(["--rdzv-conf", "", STEP]).notes == []


def test_with_virtual_local_ranks_each_rank_has_the_device_that_it_is_given(tmp_path: Path) -> None:
    """A device is excluded, by the number that it has here: the second rank moves on, and alone."""
    run, _ = ControlDirectory.open_or_create(tmp_path / "run")
    exclude(run, "n", "1", "ECC", "test", 0)
    flags = ("--nproc-per-node", "2", "--virtual-local-rank", "--set", "launch.node_name=n")
    result = finish(
        launch(*flags, args=("dump", "ours")), cwd=tmp_path, env={"CUDA_VISIBLE_DEVICES": "0,1,2"}, timeout=60
    )
    assert result.code == 0, result.text
    found = []
    for rank in (0, 1):
        env = json.loads((tmp_path / f"ours.{rank}.json").read_text())["env"]
        device = json.loads(env["HOLDFAST_LAUNCH"])["device"]
        found.append((env["LOCAL_RANK"], env["CUDA_VISIBLE_DEVICES"], device))
    assert found == [("0", "0", "0"), ("0", "2", "2")]


def test_with_run_path_the_scripts_own_modules_are_found_and_not_ours(tmp_path: Path) -> None:
    from holdfast.launch.workers.preload import RUN_PATH, Script

    place = tmp_path / "project"
    place.mkdir()
    (place / "agent.py").write_text("mine = True\n")
    script = place / "train.py"
    script.write_text("import agent, sys\nassert agent.mine\nprint(sys.path[0], *sys.argv)\n")
    command = [sys.executable, "-u", RUN_PATH, str(script), "x"]
    cold = finish(command, cwd=tmp_path, timeout=60)
    assert cold.code == 0, cold.text
    assert cold.out.split() == [str(place), str(script), "x"]
    assert Script.of(command).first_path == str(place), "and so a forked worker's, and its parent's"


def test_the_hand_over_round_trips_and_refuses_what_it_did_not_write() -> None:
    from holdfast.errors import UsageError
    from holdfast.record.launches import LaunchInfo

    info = LaunchInfo(
        run_dir="/r", run_id="id", launch="l", attempt=3, epoch=4, node="n", command_line={"run.dir": "ü"}
    )
    assert LaunchInfo.from_environment({**os.environ, **info.to_environment()}) == info
    assert LaunchInfo.from_environment({}) is None
    with pytest.raises(UsageError, match="HOLDFAST_LAUNCH"):
        LaunchInfo.from_environment({"HOLDFAST_LAUNCH": "{"})


def test_a_node_that_cannot_take_part_stays_until_the_leader_has_read_why(tmp_path: Path) -> None:
    """It may be the one that hosts the store: gone too soon, the leader would only see a lost store."""
    mine, _ = ControlDirectory.open_or_create(tmp_path / "mine")
    base = HashStore()
    store = SealedStore(base, run_secret(mine), mine.run_id, "round")
    theirs = SealedStore(base, b"another secret", "another", "round")
    place = attempts.RoundPlace(node="b", group_rank=1, nodes=2, world_size=2)
    told = attempts.AttemptAnnouncement(run="another", attempt=1, epoch=1)
    theirs.set(attempts.ANNOUNCEMENT, msgspec.json.encode(told).decode())
    ended: list[BaseException] = []

    def take_part() -> None:
        try:
            attempts.follow(mine, place, "launch", store, timeout=10.0, node_timeout=5.0, given_up=str)
        except attempts.StopRun as stop:
            ended.append(stop)

    node = threading.Thread(target=take_part, daemon=True)
    node.start()
    wait_until(lambda: base.check(["foreign/another"]), 10, "the node waits for the leader")
    assert not ended
    assert theirs.hailed(), "the leader has read it and leaves too"
    assert theirs.foreign == mine.run_id
    node.join(10)
    assert [stop.code for stop in ended] == [ExitCode.CONTROL_UNUSABLE]  # type: ignore[attr-defined]
