"""Workers of an attempt are forked or start cold, with torchrun's logs, whatever happens to the parent."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, Std

from holdfast.launch.workers import start
from holdfast.launch.workers.forked_worker import processors_matter
from holdfast.launch.workers.preload import REPLACEMENTS, PreloadedParent, guess
from holdfast.launch.workers.start import StartedWorkers, Starter
from kit.harness import REPO, await_child, finish, holdfast, wait_until
from kit.ranks.forking import DEADLINE, without_torch

BORN = str(REPO / "tests" / "scripts" / "launch" / "launch_born.py")
SLEEP = """
import sys, time
print("forked" if "holdfast.launch.workers.forked_worker" in sys.modules else "cold")
time.sleep(300)
"""


def launch(*flags: str, acts: str = "ok", env: dict[str, str] | None = None, cwd: Path) -> tuple[str, str]:
    """Run to a good end: what it wrote to stdout and stderr."""
    flags = ("--run-dir", "run", "--nproc-per-node", "2", *flags)
    result = finish(holdfast("run", *flags, BORN, acts), cwd=cwd, env=env, timeout=120)
    assert result.code == 0, result.text
    return result.out, result.err


@pytest.mark.drill
def test_logs_are_laid_out_as_by_torchrun_and_kept_for_every_attempt(tmp_path: Path) -> None:
    out, err = launch(
        "--log-dir", "logs", "--redirects", "2", "--tee", "1", acts="kill,kill,ok", cwd=tmp_path
    )
    assert "workers start cold" not in err
    tops = list((tmp_path / "logs").iterdir())
    assert len(tops) == 1
    found = {str(path.relative_to(tops[0])) for path in tops[0].rglob("*.log")}
    assert found == {
        f"attempt_{attempt}/{rank}/{name}.log"
        for attempt in (0, 1, 2)
        for rank in (0, 1)
        for name in ("stdout", "stderr")
    }
    for attempt in (0, 1, 2):
        for rank in (0, 1):
            place = tops[0] / f"attempt_{attempt}" / str(rank)
            said = (place / "stdout.log").read_text()
            errors = (place / "stderr.log").read_text()
            if said:  # the other rank may have been stopped before it said anything
                line = f"attempt {attempt + 1} rank {rank} forked preloaded=False\n"
                assert said == line
                assert errors in ("", f"attempt {attempt + 1} on stderr\n")
                assert f"[default{rank}]:{line}" in out
    assert "attempt 3 on stderr" not in err, "redirected, not shown"


@pytest.mark.parametrize(
    ("flags", "variables", "how", "reason"),
    [
        pytest.param(["--no-preload"], {}, "cold", "", marks=pytest.mark.drill),
        pytest.param([], {"PET_NO_PRELOAD": "1"}, "cold", "", marks=pytest.mark.drill),
        (["--preload", "chosen"], {}, "forked", ""),
        (["--preload", "nowhere_at_all"], {}, "cold", "the import of --preload nowhere_at_all failed"),
    ],
)
def test_flags(flags: list[str], variables: dict[str, str], how: str, reason: str, tmp_path: Path) -> None:
    (tmp_path / "chosen.py").write_text("import os\nMADE_IN = os.getpid()\n")
    out, err = launch(*flags, env={"PYTHONPATH": str(tmp_path), **variables}, acts="kill,ok", cwd=tmp_path)
    assert {line.split()[4] for line in out.splitlines() if line.startswith("attempt")} == {how}
    assert ("preloaded=True" in out) == (flags == ["--preload", "chosen"])
    assert err.count("workers start cold") == (1 if reason else 0), "said once, in two attempts"
    assert reason in err


# -- what workers write -------------------------------------------------------------------------------------


class Caught:
    """What a worker writes to, and a pipe that somebody may read."""

    def __init__(self) -> None:
        self.reader, sink = os.pipe()
        os.set_blocking(self.reader, False)
        self.worker = os.memfd_create("worker")
        self.caught = start._Caught(0, os.dup(self.worker), sink)

    def write(self, data: bytes) -> None:
        assert os.write(self.worker, data) == len(data)

    def read(self) -> bytes:
        """All that is handed on until there is no more."""
        found = b""
        while True:
            left = self.caught.hand_on()
            try:
                found += os.read(self.reader, 1 << 20)
            except BlockingIOError:
                if not left:
                    return found

    def close(self) -> None:
        self.caught.close()
        self.caught.close()
        os.close(self.worker)


@pytest.fixture
def caught() -> Iterator[Caught]:
    found = Caught()
    yield found
    found.close()


def test_what_a_worker_writes_waits_for_its_reader_and_the_worker_for_nobody(caught: Caught) -> None:
    text = b"".join(b"line %d\n" % number for number in range(200_000))
    caught.write(text)  # far more than a pipe holds
    assert caught.caught.hand_on(), "nobody has read it, and this did not wait for that"
    assert caught.read() == text
    assert caught.caught.last() == text[-start.LAST :]
    caught.write(b"37%\r")
    assert caught.read() == b"37%\r", "a line need not be finished to be shown"
    assert not caught.caught.hand_on()


def test_a_reader_that_is_gone_hurts_nobody_and_the_last_lines_are_kept(caught: Caught) -> None:
    os.close(caught.reader)
    for _ in range(3):
        caught.write(b"x" * 100_000)
        assert not caught.caught.hand_on()
    caught.write(b"terminate called\n")
    assert caught.caught.last().endswith(b"xterminate called\n")
    caught.caught.close()
    assert len(caught.caught.last()) == start.LAST, "also when all is over"


def test_what_nobody_takes_is_left_out_and_that_is_said(
    caught: Caught, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(start, "MOST_WAITING", 1_000_000)
    caught.write(b"a" * 900_000)
    assert caught.caught.hand_on()
    caught.write(b"b" * 900_000)
    assert caught.caught.hand_on()
    shown = caught.read()
    told = re.fullmatch(rb"(a+)\nholdfast: (\d+) bytes that local rank 0 wrote are left out: .*\n(b+)", shown)
    assert told is not None, shown[-200:]
    assert len(told[3]) == 500_000, "the newest half of what may wait"
    assert len(told[1]) + int(told[2]) + len(told[3]) == 1_800_000
    caught.write(b"c")
    assert caught.read() == b"c"


def test_memory_of_what_was_handed_on_is_given_back(caught: Caught) -> None:
    for _ in range(8):
        caught.write(bytes(1 << 20))
        caught.read()
    assert os.fstat(caught.worker).st_size == 8 << 20
    freed = os.pread(caught.worker, 4096, 0)
    assert freed == bytes(4096)
    assert caught.caught._freed == 7 << 20


def test_one_that_begins_anew_is_shown_from_its_beginning(caught: Caught) -> None:
    caught.write(b"before\n" * 100)
    assert caught.read() == b"before\n" * 100
    with open(f"/proc/self/fd/{caught.worker}", "wb") as again:  # noqa: PTH123 - as a shell's > /dev/stderr
        again.write(b"after\n")
    assert caught.read() == b"after\n"


def test_where_no_thread_can_be_started_that_is_what_is_raised(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And not that a thread which never ran cannot be waited for: a full process table is told of."""
    destinations = DefaultLogsSpecs(log_dir=str(tmp_path / "logs")).reify({0: {}})
    logs = start.Logs("default", destinations, None, None, None)
    logs.streams(0)

    def full(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", full)
    with pytest.raises(RuntimeError, match="start new thread"):
        logs.show()
    logs.close()
    logs.finish()


@pytest.mark.drill
def test_a_burst_is_handed_on_whole_to_one_who_reads_it(tmp_path: Path) -> None:
    """Far more than a pipe holds, and faster than anybody looks for it."""
    (tmp_path / "burst.py").write_text(
        "import sys\nfor _ in range(400000):\n    print('x' * 99, file=sys.stderr)\n"
    )
    argv = holdfast("run", "--run-dir", "run", "--no-preload", "--nproc-per-node", "1", "burst.py")
    done = subprocess.run(argv, cwd=tmp_path, stderr=subprocess.PIPE, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr[-1000:]
    assert done.stderr.count("x" * 99 + "\n") == 400_000
    assert "left out" not in done.stderr


ENDS = str(REPO / "tests" / "scripts" / "launch" / "launch_ends.py")


@pytest.mark.drill
def test_a_terminal_stays_a_terminal(tmp_path: Path) -> None:
    ours, theirs = os.openpty()
    argv = holdfast("run", "--run-dir", "run", "--no-preload", "--nproc-per-node", "1", ENDS, "ok")
    done = subprocess.run(
        argv, cwd=tmp_path, stderr=theirs, stdout=subprocess.DEVNULL, timeout=60, check=False
    )
    os.close(theirs)
    shown = os.read(ours, 1 << 16).decode()
    os.close(ours)
    assert done.returncode == 0, shown
    assert "attempt 1 rank 0 ok tty=True" in shown


@pytest.mark.drill
def test_standard_output_and_error_keep_their_order_where_they_go_to_the_same_place(tmp_path: Path) -> None:
    (tmp_path / "both.py").write_text(
        "import sys\nfor number in range(3000):\n"
        "    print(number, file=sys.stderr if number % 2 else sys.stdout, flush=True)\n"
    )
    argv = holdfast("run", "--run-dir", "run", "--no-preload", "--nproc-per-node", "1", "both.py")
    done = subprocess.run(
        argv,
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stdout
    numbers = [int(line) for line in done.stdout.splitlines() if line.isdigit()]
    assert numbers == list(range(3000))


# -- without an agent ---------------------------------------------------------------------------------------


class Stage:
    """Starts workers as the agent does."""

    def __init__(self, cwd: Path) -> None:
        self.said: list[str] = []
        self.cwd = cwd
        self.command = [sys.executable, "-u", "sleep.py"]
        self.starter = Starter(say=self.said.append, notes=cwd)
        self.specs = DefaultLogsSpecs(log_dir=str(cwd / "logs"), redirects=Std.ALL)
        self.attempts = 0
        self.running: list[StartedWorkers] = []

    def start(self, extra: dict[str, str] | None = None, numa: object = None) -> StartedWorkers:
        """A new attempt of two workers, after the last one has been ended."""
        self.stop()
        base = {"TORCHELASTIC_RUN_ID": "id", "TORCHELASTIC_RESTART_COUNT": str(self.attempts)}
        envs = {rank: {**base, "RANK": str(rank), **(extra or {})} for rank in (0, 1)}
        self.attempts += 1
        self.starter.prepare()
        program, *arguments = self.command
        args = dict.fromkeys(envs, tuple(arguments))
        started = self.starter.start("default", program, args, envs, self.specs, numa_options=numa)
        self.running.append(started)
        logs = Path(started.error_files[0]).parent / "stdout.log"
        told = wait_until(logs.read_text, 60, "a worker says how it was born").strip()
        assert told.split()[0] == ("forked" if started.warm else "cold")
        return started

    def stop(self) -> None:
        for started in self.running:
            started.close()
            for pid in started.pids().values():
                assert not Path(f"/proc/{pid}").exists(), "reaped"
        self.running = []


@pytest.fixture
def stage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Stage]:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    (tmp_path / "sleep.py").write_text(SLEEP)
    without_torch(tmp_path)
    there = Stage(tmp_path)
    yield there
    there.stop()
    last = there.starter.parent_pid
    there.starter.close()
    assert last is None or not Path(f"/proc/{last}").exists()


def test_a_parent_that_dies_is_replaced_a_few_times_and_then_not(stage: Stage) -> None:
    stage.starter.expect(stage.command)
    for death in range(REPLACEMENTS + 1):
        pid = stage.starter.parent_pid
        assert pid is not None
        os.kill(pid, signal.SIGKILL)
        if death == 0:
            started = stage.start()  # not noticed before the start: this one is cold
            assert not started.warm
            assert all(os.getsid(pid) == pid for pid in started.pids().values())
        else:
            wait_until(lambda: stage.starter.tend() or stage.starter.parent_pid != pid, 20, "noticed")  # noqa: B023
    assert stage.starter.parent_pid is None
    assert not stage.start().warm
    assert stage.said == [
        "workers start cold (slower, but otherwise the same): the preloaded parent ended with SIGKILL",
        "the preloaded parent ended with SIGKILL; another one is getting ready for the next restart",
        "4 preloaded parents were of no use; workers start cold from now on",
    ]


def test_a_changed_environment_costs_one_cold_start(stage: Stage) -> None:
    """Something that only the workers have, and that an import may read: the next parent has it too."""
    stage.starter.expect(stage.command)
    assert stage.start().warm
    assert not stage.start({"MKL_CBWR": "COMPATIBLE"}).warm
    assert stage.start({"MKL_CBWR": "COMPATIBLE"}).warm
    assert len(stage.said) == 1
    assert "MKL_CBWR changed" in stage.said[0]


def test_a_parent_that_was_made_for_something_else_is_not_used(stage: Stage) -> None:
    found = guess(["--nproc-per-node", "2", "sleep.py"], dict(os.environ))
    assert found is not None
    early = PreloadedParent(found._replace(environment={**os.environ, "OMP_NUM_THREADS": "3"}))
    starter = stage.starter = Starter(parent=early, say=stage.said.append)
    starter.expect(stage.command)
    assert starter.parent_pid not in (None, early.pid)
    assert stage.start().warm
    assert stage.said == []


def test_workers_that_cannot_be_forked_start_cold_and_die_with_the_agent(stage: Stage) -> None:
    stage.command = [sys.executable, "-B", "sleep.py"]
    stage.starter.expect(stage.command)
    started = stage.start()
    assert not started.warm
    assert re.search("the workers' command has another form", stage.said[0])
    assert stage.starter.parent_pid is None
    for pid in started.pids().values():
        os.kill(pid, signal.SIGTERM)
    assert [os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT) is not None for pid in started.pids().values()]


def test_a_worker_that_starts_over_makes_later_attempts_cold_and_is_told_of_once(stage: Stage) -> None:
    text = "import os, torch\nos.environ['OMP_NUM_THREADS'] = '2'\n"
    early = text.replace("import os, torch\n", "import os\n") + "import torch\n"
    (stage.cwd / "sleep.py").write_text(text + SLEEP)
    stage.starter.expect(stage.command)
    assert stage.start().warm
    stage.starter.tend()
    assert stage.said == [], "after the import it is the script's own affair"
    stage.stop()
    (stage.cwd / "sleep.py").write_text(early + SLEEP.replace('"cold"', '"forked and cold"'))
    started = stage.start()
    pids = started.pids()
    stage.starter.tend()
    stage.starter.tend()
    assert len(stage.said) == 1
    assert "workers start cold" in stage.said[0]
    assert "changes OMP_NUM_THREADS before it imports torch" in stage.said[0]
    for pid in pids.values():
        assert os.getpgid(pid) == pid
        assert "sleep.py" in Path(f"/proc/{pid}/cmdline").read_text()
    assert stage.starter.parent_pid is None, "of no use any more"
    (stage.cwd / "sleep.py").write_text(early + SLEEP)
    assert not stage.start().warm
    assert len(stage.said) == 1


def test_forked_workers_are_bound_to_processors_as_torch_chooses(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Which ones are near a device only a machine with one knows."""
    here = sorted(os.sched_getaffinity(0))
    if len(here) < 2:
        pytest.skip("one processor only")
    seen: list[object] = []

    def choose(*, gpu_index: int, numa_options: object) -> set[int]:
        seen.append(numa_options)
        return {here[gpu_index]}

    monkeypatch.setattr("torch.numa.binding._get_logical_cpus_to_bind_to", choose)
    stage.starter.expect(stage.command, numa=True)
    wanted = object()
    started = stage.start(numa=wanted)
    assert started.warm, stage.said
    assert seen == [wanted, wanted]
    for rank, pid in started.pids().items():
        assert os.sched_getaffinity(pid) == {here[rank]}
    assert sorted(os.sched_getaffinity(0)) == here
    parent = stage.starter.parent_pid
    assert parent is not None
    assert sorted(os.sched_getaffinity(parent)) == here


def test_bound_workers_whose_threads_are_counted_at_import_start_cold(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS")
    stage.starter.expect(stage.command, numa=True)
    assert stage.starter.parent_pid is None
    assert "OMP_NUM_THREADS is not set" in stage.said[0]
    assert not processors_matter({"OMP_NUM_THREADS": "4"})
    assert processors_matter({"OMP_NUM_THREADS": "4", "OMP_PROC_BIND": "true"})


def test_closing_ends_what_still_runs(stage: Stage) -> None:
    stage.starter.expect(stage.command)
    started = stage.start()
    assert started.warm
    stage.stop()
    with pytest.raises(ChildProcessError):
        await_child(started.pids()[0], DEADLINE)


# -- the quick look at the command line ---------------------------------------------------------------------


@pytest.mark.parametrize(
    ("argv", "variables", "modules", "threads"),
    [
        (["s.py"], {}, (), None),
        (["--nproc-per-node", "2", "s.py", "--preload", "not.ours"], {}, (), "1"),
        (["--nproc_per_node=4", "s.py"], {"OMP_NUM_THREADS": "8"}, (), "8"),
        (["--nproc-per-node=1", "s.py"], {}, (), None),
        (["s.py"], {"PET_NPROC_PER_NODE": "2"}, (), "1"),
        (["--preload", "a.b", "--standalone", "--preload=c", "-m", "s"], {}, ("a.b", "c"), None),
    ],
)
def test_the_guess(
    argv: list[str],
    variables: dict[str, str],
    modules: tuple[str, ...],
    threads: str | None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "s.py").touch()
    found = guess(argv, variables)
    assert found is not None
    assert found.modules == modules
    assert found.first_path == str(tmp_path)
    assert found.environment.get("OMP_NUM_THREADS") == threads


@pytest.mark.parametrize(
    ("argv", "variables"),
    [
        ([], {}),
        (["--help"], {}),
        (["nowhere.py"], {}),
        (["--no-preload", "s.py"], {}),
        (["--no_python", "s.py"], {}),
        (["s.py"], {"PET_NO_PRELOAD": "1"}),
        (["s.py"], {"PYTHON_EXEC": "/usr/bin/pypy"}),
    ],
)
def test_no_parent_is_started_where_it_is_of_no_use(
    argv: list[str], variables: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "s.py").touch()
    assert guess(argv, variables) is None
