"""Golden screens of what memory, state, devices and storage do to a run: see golden.py."""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest

from cgroups import inside_group, memory_group
from golden import compare
from harness import REPO, Result, finish, holdfast
from machines import inside_mounts

SCRIPTS = REPO / "tests" / "scripts"
SCRIPT = SCRIPTS / "meet_a_bad_state.py"
SCRIPT_NAMED = [
    ("(\\.\\./)*" + str(SCRIPT).lstrip("/"), "train.py"),
    ("/train.py", "train.py"),
    (r"(train|meet_a_bad_state)\.py:\d+", "train.py:N"),
]
EITHER_COSTLIEST = [(r"(?s)(The costliest of 3 incidents).*?(?=\nSteps: )", r"\1 …")]
"""Two incidents that cost about the same: which of them cost more depends on the machine."""
ALWAYS = ["--nproc-per-node", "2", "--run-dir", "run", "--set", "launch.node_name=here"]


def settings(*given: str) -> list[str]:
    return [word for one in given for word in ("--set", one)]


def launch(fault: str, *flags: str) -> list[str]:
    return holdfast("run", *ALWAYS, *flags, str(SCRIPT), fault)


def see(fault: str, result: Result, place: Path, code: int, *replaced: tuple[str, str]) -> None:
    assert result.code == code, result.text
    compare(fault, result.err, place, [*SCRIPT_NAMED, *replaced])


@pytest.mark.drill
def test_what_is_seen_of_a_rank_that_is_blocked_in_c(tmp_path: Path) -> None:
    flags = settings("monitor.rank_section_timeouts=step:4")
    result = finish(launch("blocked in C", *flags), cwd=tmp_path, timeout=120)
    see("blocked in C", result, tmp_path, 0)


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
    see("full disk", result, tmp_path, 34, (r"rank \d( and 1 more)?: OSError", "rank N: OSError"))


@pytest.mark.drill
def test_what_is_seen_of_a_rank_that_the_kernel_kills_for_memory(tmp_path: Path) -> None:
    with memory_group() as group:
        result = finish(
            inside_group(group, launch("OOM kill")),
            cwd=tmp_path,
            env={"SCREEN_CGROUP": str(group)},
            timeout=120,
        )
    see("OOM kill", result, tmp_path, 0, (r"/[^ ,]*holdfast-\d+-\d+", "/the-group-of-the-job"))


@pytest.mark.drill
def test_what_is_seen_of_an_error_on_all_ranks_again_and_again(tmp_path: Path) -> None:
    result = finish(launch("exception on all"), cwd=tmp_path, timeout=150)
    see("exception on all", result, tmp_path, 1, *EITHER_COSTLIEST)


@pytest.mark.drill
def test_what_is_seen_of_a_save_that_is_cut_off(tmp_path: Path) -> None:
    result = finish(launch("torn save"), cwd=tmp_path, timeout=120)
    see("torn save", result, tmp_path, 0)


@pytest.mark.drill
def test_what_is_seen_of_a_slow_disk(tmp_path: Path, slow_io: Path) -> None:
    """Every write and fsync below the checkpoint root takes long."""
    slow = {
        "LD_PRELOAD": str(slow_io),
        "SLOW_DIR": str(tmp_path / "run" / "checkpoints"),
        "SLOW_MB_PER_S": "10",
        "SLOW_MS": "700",
    }
    result = finish(launch("slow disk"), cwd=tmp_path, env=slow, timeout=150)
    see("slow disk", result, tmp_path, 0)
