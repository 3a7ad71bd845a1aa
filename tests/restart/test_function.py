"""What a start of in-process restart is refused for: scenario 24, its part of it. One row a guard."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from holdfast.config.sources import Effective, load
from holdfast.errors import ConfigError
from holdfast.policy.restarts import collective_limit, first_barrier, first_step_limit
from holdfast.record.launches import VARIABLE as LAUNCHED
from holdfast.record.limits import check_timeouts
from holdfast.restart import function
from holdfast.restart.entry import VARIABLE as HANDED
from holdfast.restart.function import prepare, refuse
from kit.nodes import fake_scontrol

UNDER_SRUN = {"SLURM_PROCID": "0", "SLURM_NTASKS": "8"}
KEPT = {LAUNCHED: "{}", HANDED: "{}"}
"""As `holdfast run` starts its workers where it knows of in-process restart."""
WATCHDOG = "TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC"


def settings(**keywords: object) -> Effective:
    return load(environ={}, keywords={"inprocess_enabled": True, **keywords})


def refusal(effective: Effective, environ: dict[str, str], backend: str = "nccl", **more: float) -> str:
    with pytest.raises(ConfigError) as caught:
        refuse(effective, environ, backend, 8, **more)
    assert caught.value.exit_code == 2
    return str(caught.value)


@pytest.mark.parametrize("backend", ["gloo", "nccl", "cpu:gloo,cuda:nccl", ""])
def test_the_defaults_are_fine_wherever_they_are_used(backend: str) -> None:
    for environ in ({}, KEPT, {WATCHDOG: "480"}, {WATCHDOG: "garbage"}):
        refuse(settings(), environ, backend, 8)
    check_timeouts(settings(), {})


@pytest.mark.parametrize(
    ("keywords", "environ", "names", "order"),
    [
        (
            {"soft_timeout": 90},
            {},
            ["inprocess.soft_timeout = 90 (keyword)", "inprocess.hard_timeout = 90 (default)"],
            "inprocess.soft_timeout < inprocess.hard_timeout",
        ),
        (
            {"hard_timeout": 130},
            {},
            ["inprocess.hard_timeout = 130 (keyword)", "inprocess.barrier_timeout = 120 (default)"],
            "inprocess.hard_timeout < inprocess.barrier_timeout",
        ),
        (
            {"heartbeat_interval": 60},
            {},
            ["inprocess.heartbeat_interval = 60 (keyword)", "inprocess.heartbeat_timeout = 60 (default)"],
            "inprocess.heartbeat_interval < inprocess.heartbeat_timeout",
        ),
        (
            {"barrier_timeout": 700},
            {},
            ["inprocess.barrier_timeout = 700 (keyword)", "stop.shutdown_timeout_sec = 600 (default)"],
            "inprocess.barrier_timeout < stop.shutdown_timeout_sec",
        ),
        (
            {},
            {WATCHDOG: "90"},
            ["inprocess.hard_timeout = 90 (default)", f"{WATCHDOG} = 90 (environment)"],
            "inprocess.hard_timeout < NCCL's watchdog",
        ),
        (
            {"hard_timeout": 490, "barrier_timeout": 500},
            {},
            ["inprocess.hard_timeout = 490 (keyword)", f"{WATCHDOG} = 480 (torch's default)"],
            "inprocess.hard_timeout < NCCL's watchdog",
        ),
        (
            {"hard_timeout": 600, "barrier_timeout": 700},
            {"TORCH_NCCL_ENABLE_MONITORING": "0"},
            ["inprocess.hard_timeout = 600", "the process group's timeout = 600 (torch's default)"],
            "inprocess.hard_timeout < NCCL's watchdog",
        ),
    ],
    ids=["soft", "hard", "heartbeat", "shutdown", "watchdog", "watchdog-default", "collective"],
)
def test_timeouts_in_the_wrong_order_are_refused_with_the_right_one(
    keywords: dict[str, object], environ: dict[str, str], names: list[str], order: str
) -> None:
    given = {f"inprocess_{name}": value for name, value in keywords.items()}
    longer = {"stop_shutdown_timeout_sec": 3600} if keywords.get("hard_timeout") == 600 else {}
    message = refusal(settings(**given, **longer), environ)
    assert message.startswith("1 problem with in-process restart; nothing was started"), message
    for part in (*names, f"the right order is {order}"):
        assert part in message


def test_a_group_that_gives_up_before_the_hung_rank_is_ended_is_refused() -> None:
    message = refusal(settings(), {}, group_timeout=60)
    assert "the process group's timeout = 60 (as given)" in message
    refuse(settings(), {}, "gloo", 8, group_timeout=60)  # an error of gloo ends nobody: it is restarted from
    refuse(settings(), {}, "nccl", 8, group_timeout=91)


@pytest.mark.parametrize(
    ("keywords", "named"),
    [
        ({"monitor_rank_section_timeouts": "step:90"}, "step:90 in monitor.rank_section_timeouts (keyword)"),
        ({"monitor_rank_heartbeat_timeout": 80}, "monitor.rank_heartbeat_timeout = 80 (keyword)"),
    ],
    ids=["step", "heartbeat"],
)
def test_the_launchers_watch_comes_after_the_hard_timeout(keywords: dict[str, object], named: str) -> None:
    order = "the right order is inprocess.hard_timeout < monitor.rank_heartbeat_timeout and the limit of step"
    message = refusal(settings(**keywords), KEPT)
    assert named in message
    assert order in message
    with pytest.raises(ConfigError, match="contradiction") as caught:
        check_timeouts(settings(**keywords), {})  # the launcher says so before it starts anything
    assert order in str(caught.value)
    check_timeouts(
        load(environ={}, keywords=keywords), {}
    )  # without in-process restart it is nobody's concern
    refuse(settings(**keywords), {}, "nccl", 8)  # nor where nobody watches


def test_what_is_off_hides_nothing() -> None:
    off = {"monitor_rank_section_timeouts": "step:0", "monitor_rank_heartbeat_timeout": 0}
    refuse(settings(**off, stop_shutdown_timeout_sec=0), KEPT, "nccl", 8)
    unmonitored = {WATCHDOG: "5", "TORCH_NCCL_ENABLE_MONITORING": "0"}
    refuse(settings(), unmonitored, "nccl", 8)


@pytest.mark.parametrize(
    ("keywords", "named"),
    [
        ({"active_world_size": 9}, "inprocess.active_world_size = 9 (keyword): only 8 ranks were started"),
        ({"min_world_size": 9}, "inprocess.min_world_size = 9 (keyword): only 8 ranks train"),
        (
            {"active_world_size": 6, "min_world_size": 7},
            "inprocess.min_world_size = 7 (keyword): only 6 ranks train",
        ),
    ],
    ids=["active", "least", "least-of-active"],
)
def test_world_sizes_that_cannot_be_are_refused(keywords: dict[str, object], named: str) -> None:
    assert named in refusal(settings(**{f"inprocess_{name}": value for name, value in keywords.items()}), {})
    refuse(settings(inprocess_active_world_size=8, inprocess_min_world_size=8), {}, "gloo", 8)


@pytest.mark.parametrize(
    "environ",
    [{"TORCH_NCCL_RETHROW_CUDA_ERRORS": "1"}, {"NCCL_NVLS_ENABLE": "2"}, {"NCCL_NVLS_ENABLE": "1"}],
    ids=lambda environ: "".join(f"{name}={value}" for name, value in environ.items()),
)
def test_what_would_end_ranks_or_hinder_an_abort_is_refused_for_nccl_alone(environ: dict[str, str]) -> None:
    name, value = next(iter(environ.items()))
    for backend in ("nccl", "cpu:gloo,cuda:nccl", ""):
        message = refusal(settings(), environ, backend)
        assert f"{name} = {value} (environment)" in message
        assert f"set {name}=0, or leave it unset" in message
    refuse(settings(), environ, "gloo", 8)
    refuse(settings(), {name: "0"}, "nccl", 8)


def test_all_problems_are_told_at_once() -> None:
    message = refusal(
        settings(inprocess_soft_timeout=95, inprocess_active_world_size=9), {"NCCL_NVLS_ENABLE": "1"}
    )
    assert message.startswith("3 problems with in-process restart; nothing was started")


def test_the_environment_is_prepared_and_what_is_set_is_left() -> None:
    environ: dict[str, str] = {}
    assert prepare(environ, "nccl") == []
    assert environ == {"NCCL_NVLS_ENABLE": "0", "TORCH_CPP_LOG_LEVEL": "error"}
    environ = {"TORCH_CPP_LOG_LEVEL": "INFO"}
    warnings = prepare(environ, "gloo")
    assert environ == {"TORCH_CPP_LOG_LEVEL": "INFO"}, "nothing of NCCL for a job of gloo"
    assert len(warnings) == 1
    assert "TORCH_CPP_LOG_LEVEL = INFO (environment)" in warnings[0]
    assert prepare({"TORCH_CPP_LOG_LEVEL": "FATAL"}, "gloo") == []


def test_a_collective_is_given_up_after_who_stands_still_was_told_of_and_before_who_waits_is_ended() -> None:
    for soft, hard in [(60.0, 90.0), (2.0, 4.0), (0.1, 600.0)]:
        assert soft < collective_limit(soft, hard) < (soft + hard) / 2


# --- Slurm


def test_the_first_steps_limit_is_the_launchers_but_comes_before_it() -> None:
    assert first_step_limit(1800.0, 60.0, 90.0) + 30.0 < 1800.0, "who stands still is ended before all are"
    assert first_step_limit(1800.0, 60.0, 90.0) > 1700.0
    assert first_step_limit(30.0, 60.0, 90.0) == 60.0, "never less than for any step"
    assert first_step_limit(0.0, 60.0, 90.0) == math.inf
    assert first_barrier(1800.0, 120.0) == 1800.0
    assert first_barrier(30.0, 120.0) == 120.0
    assert first_barrier(0.0, 120.0) > 1e6, "off"


def test_a_scheduler_that_ends_all_with_the_first_is_refused() -> None:
    message = refusal(settings(), {**UNDER_SRUN, "SLURM_KILL_BAD_EXIT": "1"}, "gloo")
    assert "SLURM_KILL_BAD_EXIT = 1 (environment)" in message
    assert "export SLURM_KILL_BAD_EXIT=0 before srun" in message
    refuse(settings(), {**UNDER_SRUN, "SLURM_KILL_BAD_EXIT": "0"}, "gloo", 8)


@pytest.mark.parametrize(
    "environ",
    [KEPT, {"TORCHELASTIC_RUN_ID": "x"}, {"SLURM_NTASKS": "1"}],
    ids=["holdfast run", "torchrun", "one task"],
)
def test_where_a_task_is_no_rank_its_end_is_no_concern(environ: dict[str, str]) -> None:
    refuse(settings(), {**UNDER_SRUN, "SLURM_KILL_BAD_EXIT": "1", **environ}, "gloo", 8)


def test_the_clusters_own_rule_is_asked_for_by_one_rank(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    scontrol = fake_scontrol.installed(tmp_path, monkeypatch)
    (scontrol.home / "config").write_text("JobRequeue              = 1\nKillOnBadExit           = 1\n")
    assert "KillOnBadExit = 1 (slurm.conf)" in refusal(settings(), UNDER_SRUN, "gloo")
    assert scontrol.asked_about("config") == 1
    refuse(settings(), {**UNDER_SRUN, "SLURM_PROCID": "1"}, "gloo", 8)
    refuse(settings(), {**UNDER_SRUN, "SLURM_KILL_BAD_EXIT": "0"}, "gloo", 8)
    assert scontrol.asked_about("config") == 1, "the rest is told by the first, or by the environment"
    (scontrol.home / "config").write_text("KillOnBadExit           = 0\n")
    refuse(settings(), UNDER_SRUN, "gloo", 8)
    (scontrol.home / "config").write_text("nothing of the kind\n")
    refuse(settings(), UNDER_SRUN, "gloo", 8)


# --- versions, and the switch


def test_a_torch_that_is_too_old_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    for version, fine in (("2.10.1+cu128", False), ("2.11.0", True), ("3.0.0a0+git1", True), ("1.13", False)):
        monkeypatch.setattr(function.metadata, "version", lambda _, version=version: version)
        if fine:
            refuse(settings(), {}, "gloo", 8)
        else:
            assert f"torch {version}: " in refusal(settings(), {}, "gloo")


def test_settings_without_the_switch_are_refused_and_a_switch_turned_off_is_a_wish(tmp_path: Path) -> None:
    file = tmp_path / "h.toml"
    file.write_text('inprocess.granularity = "rank"\n')
    given = load(file, environ={}, keywords={"inprocess_soft_timeout": 5})
    message = refusal(given, {})
    assert f'inprocess.granularity = "rank" (file {file}), inprocess.soft_timeout = 5.0 (keyword)' in message
    assert "set inprocess.enabled = true" in message
    off = {"inprocess_enabled": False, "inprocess_soft_timeout": 500}
    refuse(load(file, environ={}, keywords=off), {**UNDER_SRUN, "SLURM_KILL_BAD_EXIT": "1"}, "nccl", 8)
    refuse(load(environ={}), {"NCCL_NVLS_ENABLE": "1"}, "nccl", 8)


def test_a_launcher_that_does_not_know_of_it_cannot_keep_the_processes() -> None:
    said = refusal(settings(), {LAUNCHED: "{}"}, "gloo")
    assert "inprocess.enabled = true (keyword): `holdfast run` started this script without knowing it" in said
    assert "Set it in the settings file" in said
