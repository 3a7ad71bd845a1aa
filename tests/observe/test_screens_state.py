"""Golden screens of what memory, state, devices and storage do to a run: see golden.py."""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest

from kit.golden import compare
from kit.harness import REPO, Result, finish, holdfast
from kit.nodes.cgroups import inside_group, memory_group
from kit.nodes.machines import inside_mounts

SCRIPTS = REPO / "tests" / "scripts"
SCRIPT = SCRIPTS / "faults" / "meet_a_bad_state.py"
SCRIPT_NAMED = [
    ("(\\.\\./)*" + str(SCRIPT).lstrip("/"), "train.py"),
    ("/train.py", "train.py"),
    (r"(train|meet_a_bad_state)\.py:\d+", "train.py:N"),
]
EITHER_COSTLIEST = [(r"(?s)(The costliest of 3 incidents).*?(?=\nSteps: )", r"\1 …")]
"""Two incidents that cost about the same: which of them cost more depends on the machine."""
WHICH_DIFFERS = [(r"__\d_0\.distcp", "__N_0.distcp")]
"""Whose copy is the newest is chance."""
ALWAYS = ["--nproc-per-node", "2", "--run-dir", "run", "--set", "launch.node_name=here"]


IN_PLACE = SCRIPTS / "faults" / "meet_a_fault_in_place.py"
IN_PLACE_NAMED = [("(\\.\\./)*" + str(IN_PLACE).lstrip("/"), "train.py"), ("/train.py", "train.py")]


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


@pytest.mark.drill
def test_what_is_seen_of_a_bad_local_copy(tmp_path: Path) -> None:
    """The newest checkpoint lies on the node and in the checkpoint root; one copy on the node is bad."""
    (tmp_path / "memory").mkdir()
    flags = settings(
        "checkpoint.async_save=true",
        "checkpoint.non_persistent_ckpt_type=local",
        "checkpoint.non_persistent_local_ckpt_dir=memory",
        "checkpoint.non_persistent_save_interval=5",
        "checkpoint.replication_factor=1",
    )
    result = finish(launch("bad local copy", *flags), cwd=tmp_path, timeout=120)
    see("bad local copy", result, tmp_path, 0, *WHICH_DIFFERS)


@pytest.mark.drill
def test_what_is_seen_of_a_state_that_makes_nan(tmp_path: Path) -> None:
    flags = settings("validation.rerun_mode=validate_results")
    result = finish(launch("NaN from state", *flags), cwd=tmp_path, timeout=120)
    see("NaN from state", result, tmp_path, 0)


@pytest.mark.drill
def test_what_is_seen_of_a_bad_device(tmp_path: Path) -> None:
    """Devices are only names here; what one of them computes is falsified, whichever rank has it."""
    flags = settings(
        "validation.rerun_mode=validate_results",
        "validation.error_injection_type=persistent_error",
        "validation.error_injection_step=25",
        "validation.error_injection_ranks=1",
    )
    env = {"CUDA_VISIBLE_DEVICES": "0,1,2,3"}
    result = finish(launch("wrong device", *flags), cwd=tmp_path, env=env, timeout=120)
    see("wrong device", result, tmp_path, 0)


@pytest.mark.drill
def test_what_is_seen_of_a_remote_that_is_gone(tmp_path: Path) -> None:
    flags = settings(f"checkpoint.remote_root=file://{tmp_path.resolve()}/remote")
    result = finish(launch("drain failed", *flags), cwd=tmp_path, timeout=120)
    see("drain failed", result, tmp_path, 0)


@pytest.mark.drill
def test_what_is_seen_of_a_restart_in_the_same_processes(tmp_path: Path) -> None:
    flags = settings(
        "inprocess.enabled=true",
        "inprocess.granularity=rank",
        "inprocess.soft_timeout=10",
        "inprocess.hard_timeout=15",
        "inprocess.barrier_timeout=30",
    )
    command = holdfast("run", *ALWAYS, *flags, str(IN_PLACE), "exception")
    result = finish(command, cwd=tmp_path, timeout=120)
    assert result.code == 0, result.text
    compare("restart in place", result.err, tmp_path, IN_PLACE_NAMED)
