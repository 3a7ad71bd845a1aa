"""Golden screens of what memory, state, devices and storage do to a run: see golden.py."""

from __future__ import annotations

import contextlib
import os
import shlex
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from golden import compare
from harness import REPO, Result, finish, holdfast, wait_until
from machines import inside_mounts

SCRIPTS = REPO / "tests" / "scripts"
SCRIPT = SCRIPTS / "meet_a_bad_state.py"
SCRIPT_NAMED = [("(\\.\\./)*" + str(SCRIPT).lstrip("/"), "train.py"), ("/train.py", "train.py")]
ALWAYS = ["--nproc-per-node", "2", "--run-dir", "run", "--set", "launch.node_name=here"]


def settings(*given: str) -> list[str]:
    return [word for one in given for word in ("--set", one)]


def launch(fault: str, *flags: str) -> list[str]:
    return holdfast("run", *ALWAYS, *flags, str(SCRIPT), fault)


def see(fault: str, result: Result, place: Path, code: int, *replaced: tuple[str, str]) -> None:
    assert result.code == code, result.text
    compare(fault, result.err, place, [*SCRIPT_NAMED, *replaced])


CASES: dict[str, tuple[int, list[str]]] = {
    "blocked in C": (0, settings("monitor.rank_section_timeouts=step:4")),
    "exception on all": (1, []),
    "torn save": (0, []),
    "drain failed": (0, settings("checkpoint.remote_retry_seconds=0.3")),
    "bad local copy": (
        0,
        settings(
            "checkpoint.async_save=true",
            "checkpoint.non_persistent_ckpt_type=local",
            "checkpoint.non_persistent_local_ckpt_dir=memory",
            "checkpoint.non_persistent_save_interval=5",
        ),
    ),
    "nothing left": (26, ["--max-restarts", "9"]),
    "NaN from state": (0, settings("validation.rerun_mode=validate_results")),
}
"""The fault → the code of the launch, and settings."""


@pytest.mark.parametrize("fault", CASES)
def test_what_is_seen_of(fault: str, tmp_path: Path) -> None:
    code, flags = CASES[fault]
    if fault == "drain failed":
        (tmp_path / "remote").mkdir()
        flags = [*flags, *settings(f"checkpoint.remote_root=file://{tmp_path}/remote")]
    see(fault, finish(launch(fault, *flags), cwd=tmp_path, timeout=120), tmp_path, code)


@contextlib.contextmanager
def memory_group() -> Iterator[Path]:
    """A group of processes that a test may limit the memory of."""
    first = Path("/sys/fs/cgroup/memory")
    place = (first if first.is_dir() else Path("/sys/fs/cgroup")) / f"holdfast-screen-{os.getpid()}"
    try:
        place.mkdir()
    except OSError as error:
        pytest.skip(f"no cgroup can be made here: {error}")
    try:
        if not any((place / name).exists() for name in ("memory.limit_in_bytes", "memory.max")):
            pytest.skip("the memory controller is not handed down here")
        yield place
    finally:
        wait_until(lambda: not (place / "cgroup.procs").read_text(), 10, "the cgroup is empty")
        place.rmdir()


def test_what_is_seen_of_a_kill_by_the_kernel_for_want_of_memory(tmp_path: Path) -> None:
    """By a real kernel, in a group of its own."""
    with memory_group() as group:
        joined = f"echo $$ > {shlex.quote(str(group))}/cgroup.procs && exec {shlex.join(launch('OOM kill'))}"
        env = {"SCREEN_CGROUP": str(group)}
        result = finish(["sh", "-c", joined], cwd=tmp_path, env=env, timeout=120)
    see("OOM kill", result, tmp_path, 0)


def test_what_is_seen_of_a_wrong_device(tmp_path: Path) -> None:
    flags = settings(
        "validation.rerun_mode=validate_results",
        "validation.error_injection_type=persistent_error",
        "validation.error_injection_step=25",
        "validation.error_injection_ranks=1",
    )
    env = {"CUDA_VISIBLE_DEVICES": "0,1,2"}
    result = finish(launch("wrong device", *flags), cwd=tmp_path, env=env, timeout=150)
    see("wrong device", result, tmp_path, 0)


@pytest.mark.drill
@pytest.mark.usefixtures("mount_namespaces")
def test_what_is_seen_of_a_disk_that_stays_full(tmp_path: Path) -> None:
    """The run's directory is a small file system of its own; what it held is kept to be looked at."""
    (tmp_path / "run").mkdir()
    command = shlex.join(launch("full disk", *settings("checkpoint.max_failed_saves=1")))
    kept = ["sh", "-c", f"{command}; code=$?; rm -f run/filler; cp -a run kept; exit $code"]
    result = finish(inside_mounts("mount -t tmpfs -o size=80m tmpfs run", kept), cwd=tmp_path, timeout=150)
    (tmp_path / "run").rmdir()
    (tmp_path / "kept").rename(tmp_path / "run")
    see("full disk", result, tmp_path, 34)


@pytest.fixture(scope="module")
def slow_io(tmp_path_factory: pytest.TempPathFactory) -> Path:
    library = tmp_path_factory.mktemp("slow") / "slow_io.so"
    compiler = shutil.which("cc") or shutil.which("gcc")
    assert compiler is not None, "a C compiler is part of what the tests need"
    source = str(SCRIPTS / "slow_io.c")
    subprocess.run([compiler, "-shared", "-fPIC", "-O1", "-o", str(library), source, "-ldl"], check=True)
    return library


def test_what_is_seen_of_a_slow_disk(tmp_path: Path, slow_io: Path) -> None:
    env = {
        "LD_PRELOAD": str(slow_io),
        "SLOW_DIR": str(tmp_path / "run" / "checkpoints" / ".staging"),
        "SLOW_MB_PER_S": "3",
        "SLOW_MS": "20",
    }
    see("slow disk", finish(launch("slow disk"), cwd=tmp_path, env=env, timeout=120), tmp_path, 0)
