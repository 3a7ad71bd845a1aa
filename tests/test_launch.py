"""`holdfast run` with real agents, workers and signals."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import msgspec
import pytest
from torch._C._distributed_c10d import HashStore

from harness import REPO, Job, finish, holdfast, job, wait_until
from holdfast.control.attempts import EndRecord, FailureRecord, ends_of, failures_of
from holdfast.control.directory import ControlDirectory, create_record
from holdfast.control.hosted_store import connect
from holdfast.control.lease import Claim, current_epoch, read_beat, read_claim
from holdfast.control.secret import HARD_LIMIT, SealedStore, run_secret
from holdfast.exit_codes import ExitCode
from holdfast.journal import events
from holdfast.launch import attempt as attempts
from journals import journalled

STEP = str(REPO / "tests" / "scripts" / "launch_step.py")
GLOO = str(REPO / "tests" / "scripts" / "launch_gloo.py")


def launch(
    *flags: str, script: str = STEP, args: tuple[str, ...] = (), preload: bool | None = None
) -> list[str]:
    """Workers that need no torch are started cold: to import it for them is most of a test's time."""
    warm = script != STEP if preload is None else preload
    return holdfast("run", "--run-dir", "run", *([] if warm else ["--no-preload"]), *flags, script, *args)


def lines(path: Path) -> list[list[int]]:
    """What the workers logged: attempt, rank, … as numbers."""
    return [[int(word) for word in line.split()] for line in path.read_text().splitlines()]


def control(cwd: Path) -> ControlDirectory:
    return ControlDirectory.open(cwd / "run")


def ends(cwd: Path) -> list[EndRecord | None]:
    return [end for _, end in ends_of(control(cwd))]


def alive(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state not in ("Z", "X")


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
        assert set(ours["env"]) - set(theirs["env"]) == {"HOLDFAST_LAUNCH", "HOLDFAST_AGENT"}
        assert set(theirs["env"]) - set(ours["env"]) == set()
        differ = {name for name in theirs["env"] if theirs["env"][name] != ours["env"][name]}
        # Values that name this very launch; HFTEST_JOB is the harness's.
        assert differ <= {"MASTER_PORT", "TORCHELASTIC_RUN_ID", "TORCHELASTIC_ERROR_FILE", "HFTEST_JOB"}
    assert [end and end.outcome for end in ends(tmp_path)] == ["finished"]


@pytest.mark.drill
def test_gloo_works_after_each_of_three_restarts(tmp_path: Path) -> None:
    """Stock torchrun reuses one store: its restarted gloo ranks read dead addresses and fail."""
    args = ("--log", "log", "--fail", "kill,raise,kill", "--rank", "1")
    result = finish(launch("--nproc-per-node", "2", script=GLOO, args=args), cwd=tmp_path, timeout=120)
    assert result.code == 0, result.text
    assert sorted(line[:4] for line in lines(tmp_path / "log")) == [
        [attempt, rank, 2, attempt - 1] for attempt in (1, 2, 3, 4) for rank in (0, 1)
    ]
    assert [end and (end.outcome, end.exit_code, end.cause) for end in ends(tmp_path)] == [
        ("failed", -9, "infrastructure"),
        ("failed", 1, "job"),
        ("failed", -9, "infrastructure"),
        ("finished", 0, ""),
    ]
    decisions = journalled(tmp_path, events.Decision)
    assert [(d.chosen, d.details["root_rank"], d.details["restarts_left"]) for d in decisions] == [
        ("restart", 1, 2),
        ("restart", 1, 1),
        ("restart", 1, 0),
    ]
    assert all(len(d.evidence) >= 4 for d in decisions)
    # The error file of the one that raised outlives torch's temporary directory.
    raised = next(f for f in failures_of(control(tmp_path), 2) if f.rank == 1)
    assert raised.message == "ValueError: bad sample"
    assert "bad sample" in Path(raised.error_file).read_text()
    assert Path(raised.error_file).is_relative_to(tmp_path / "run" / "attempts" / "000002" / "errors")
    masters = {event.master for event in journalled(tmp_path, events.WorkersStarted)}
    assert len(masters) == 4, "every attempt has a store of its own"


@pytest.mark.drill
def test_the_budget_is_durable_and_refunded_by_progress_only(tmp_path: Path) -> None:
    """Cases pytorch#147064 and Megatron-LM#5281: restarts are bounded job-wide, not per launch."""
    acts = "kill,torn,kill,kill,commit:50,kill,kill,kill"
    first = finish(launch("--max-restarts", "2", args=(acts, "log")), cwd=tmp_path)
    assert first.code == ExitCode.BUDGET_SPENT, first.text
    assert "Traceback" not in first.err
    assert "death by SIGKILL" in first.err
    second = finish(launch("--max-restarts", "2", args=(acts, "log")), cwd=tmp_path)
    assert second.code == ExitCode.BUDGET_SPENT, second.text
    assert len(lines(tmp_path / "log")) == 3 + 1, "the asked-for attempt and no restart"
    third = finish(launch("--max-restarts", "2", args=(acts, "log")), cwd=tmp_path)
    assert third.code == ExitCode.BUDGET_SPENT, third.text
    assert [end and end.highest_step for end in ends(tmp_path)] == [0, 0, 0, 0, 50, 50, 50]
    failed: list[FailureRecord] = failures_of(control(tmp_path), 2)
    assert [(f.exit_code, f.message) for f in failed] == [(1, "")], (
        "half an error file costs its message only"
    )


def test_a_repeated_job_error_stops_the_run(tmp_path: Path) -> None:
    """Scenario 13."""
    args = ("--log", "log", "--fail", "raise,raise,raise", "--rank", "1")
    flags = ("--nproc-per-node", "2", "--max-restarts", "50")
    result = finish(launch(*flags, script=GLOO, args=args), cwd=tmp_path, timeout=120)
    assert result.code == ExitCode.FAILED, result.text
    assert {line[0] for line in lines(tmp_path / "log")} == {1, 2}
    for told in ("error file: ", "the same error repeated", "next: "):
        assert told in result.err


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
        assert all(alive(pid) for pid in pids)
        assert first.process.poll() is None
        first.signal(signal.SIGKILL)
        wait_until(lambda: not any(alive(pid) for pid in pids), 2, "workers end with their agent")
        began = time.monotonic()
        second = finish(command, cwd=tmp_path)
    assert second.code == 0, second.text
    assert time.monotonic() - began < 25, "did not wait for the lease of a dead launcher to lapse"
    claimed = journalled(tmp_path, events.LeaseClaimed)[-1]
    assert "is dead" in claimed.evidence
    assert [end and end.outcome for end in ends(tmp_path)] == [None, "finished"]


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
    end = ends(tmp_path)[0]
    assert end is not None
    assert (end.outcome, end.exit_code) == ("stopped", ExitCode.STOPPED_UNSAVED)
    beat = read_beat(control(tmp_path), 1)
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
        run = control(tmp_path)
        held = read_claim(run, current_epoch(run))
        assert held is not None
        newer = msgspec.structs.replace(held, epoch=held.epoch + 1, owner="another launch", evidence="test")
        assert isinstance(newer, Claim)
        assert create_record(run.lease / f"{newer.epoch:08d}.claim", newer)
        result = running.wait(15)
    assert result.code == ExitCode.LEASE_LOST, result.text
    assert [e.epoch for e in journalled(tmp_path, events.LeaseLost)] == [1]
    assert ends(tmp_path) == [None], "an attempt that was fenced off writes nothing"


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
    decisions = journalled(tmp_path, events.Decision)
    assert len(decisions) == 1, "one decision for both"
    assert decisions[0].details["root_rank"] == 1
    assert [end and (end.outcome, end.exit_code) for end in ends(tmp_path)] == [
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
    assert [end and end.outcome for end in ends(tmp_path)] == ["failed", "finished"]


def test_who_stops_reading_what_the_launcher_says_does_not_fail_the_job(tmp_path: Path) -> None:
    """As in `holdfast run … 2>&1 | head -0`: nobody is there when the first attempt's end is told."""
    reading, writing = os.pipe()
    os.close(reading)
    command = launch(args=("kill,ok", "log"))
    with subprocess.Popen(command, cwd=tmp_path, stdout=writing, stderr=writing) as running:
        os.close(writing)
        assert running.wait(60) == 0
    assert [end and end.outcome for end in ends(tmp_path)] == ["failed", "finished"]


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
    assert [end and (end.outcome, end.exit_code) for end in ends(tmp_path)] == [
        ("stopped", 0),
        ("finished", 0),
    ]


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--no-such-flag", STEP], "unrecognized arguments: --no-such-flag"),
        (["--ft-cfg-path=x.yaml", STEP], "--config FILE"),
        (["--ft-nccl-heartbeat", "30", STEP], "is a flag of ft_launcher"),
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
    from holdfast.launch.options import parse

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
    from holdfast.launch.options import make_parser, parse

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


def test_the_hand_over_round_trips_and_refuses_what_it_did_not_write() -> None:
    from holdfast.control.handover import LaunchInfo
    from holdfast.errors import UsageError

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
    place = attempts.Place(node="b", group_rank=1, nodes=2, world_size=2)
    told = attempts.Announcement(run="another", attempt=1, epoch=1)
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
