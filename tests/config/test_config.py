"""Settings: which source wins, what is refused, and how the refusal reads."""

from __future__ import annotations

import json
import os
import re
import signal
from collections.abc import Mapping
from pathlib import Path

import msgspec
import pytest
import xxhash
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from holdfast.config.fields import IN_OTHER_SYSTEMS, LOCAL_NEED, NEEDS, REMOVED, Field
from holdfast.config.settings import FIELDS, Settings
from holdfast.config.sources import FILE_LIMIT, digest, idle, load, parse_assignments
from holdfast.errors import ConfigError

SOURCES = ("file", "environment", "command line", "keyword")

# Four distinct values for each setting, all allowed in any combination with each other.
SAMPLES: dict[str, tuple[object, ...]] = {
    "run.dir": ("a", "b/c", "/d", "./e f"),
    "checkpoint.root": ("", "x", "/y", "z z"),
    "checkpoint.remote_root": ("", "s3://bucket/runs", "file:///y", "file:///z z"),
    "checkpoint.read_back": (True, False, True, False),
    "checkpoint.read_back_rate": (0.0, 0.5, 200.0, 1_000_000.0),
    "checkpoint.remote_retry_seconds": (0.5, 1.0, 60.0, 120.5),
    "checkpoint.interval": (0, 1, "auto", 999_999_999_999),
    "checkpoint.mtbf_hours": (0.0, 0.5, 24.0, 1000.0),
    "checkpoint.save_at_end": (False, True, False, True),
    "checkpoint.resume_from": ("120", "./old", "/runs/a/step_00000120-3fa9c1d2", "somewhere"),
    "checkpoint.force": (True, False, True, False),
    "checkpoint.fresh_parts": ("", "data", "optimizer,data", "optimizer, schedule"),
    "checkpoint.names": ("", "mine.names:tracked", "a.b:c", "x:y"),
    "checkpoint.data_position": ("trusted", "exact", "trusted", "exact"),
    "checkpoint.max_failed_saves": (1, 2, 5, 7),
    "checkpoint.timeout": (0.5, 60.0, 3600.0, 1.0),
    "checkpoint.async_save": (True, False, True, False),
    "checkpoint.when_busy": ("skip", "wait", "queue", "skip"),
    "checkpoint.snapshot": ("clone", "overlap", "block", "auto"),
    "checkpoint.ckpt_format": ("torch_dist", "torch_dist", "torch_dist", "torch_dist"),
    "checkpoint.handover_timeout": (0.0, 0.5, 60.0, 1000.0),
    "checkpoint.keep_last": (2, 3, 5, 999_999_999_999),
    "checkpoint.keep_every_steps": (0, 1, 500, 1000),
    "checkpoint.keep_every_hours": (0.0, 0.5, 12.0, 24.0),
    "checkpoint.non_persistent_ckpt_type": ("none", "none", "none", "none"),
    "checkpoint.non_persistent_local_ckpt_dir": ("", "/dev/shm/x", "/nvme/y", "./z z"),
    "checkpoint.non_persistent_local_ckpt_algo": ("fully_parallel",) * 4,
    "checkpoint.non_persistent_save_interval": (0, 1, "auto", 999_999_999_999),
    "checkpoint.non_persistent_save_share": (0.001, 0.01, 0.1, 0.5),
    "checkpoint.non_persistent_keep_last": (2, 3, 5, 64),
    "checkpoint.non_persistent_max_bytes": (0, 1, 64_000_000_000, 999_999_999_999),
    "checkpoint.replication_factor": (1, 2, 3, 64),
    "checkpoint.replication_jump": (0, 1, 8, 999_999_999_999),
    "checkpoint.replication_timeout": (0.5, 1.0, 60.0, 120.5),
    "control.lease_ttl": (2.0, 2.5, 10.0, 20.0),
    "control.decision_timeout": (31.0, 60.5, 1000.0, 31_536_000.0),
    "launch.max_restarts": (0, 1, 2, 100),
    "launch.node_name": ("", "a", "rack 1/b", "node-c.example"),
    "launch.node_timeout": (1.0, 2.5, 15.0, 60.0),
    "launch.stop_grace": (0.0, 0.25, 120.0, 1.0),
    "launch.max_pause": (0.0, 0.5, 3600.0, 86_400.5),
    "launch.failure_causes": ("", "job: a", "infrastructure: lustre.*evicted", "hang: x: y\nunknown: z"),
    "launch.print_saves": (False, True, False, True),
    "launch.alert_command": ("", "mail -s holdfast ops", "~/page --now", "$HOME/bin/page > $HOME/last"),
    "launch.alert_url": ("", "http://localhost:8080/x", "https://hooks.example/T0/B1", "http://[::1]/a?b=c"),
    "monitor.enable_ft_package": (False, True, False, True),
    "monitor.initial_rank_heartbeat_timeout": (0.0, 0.5, 1800.0, 3600.0),
    "monitor.rank_heartbeat_timeout": (0.0, 0.5, 300.0, 600.0),
    "monitor.rank_section_timeouts": ("", "step:1", "setup:600,step:0.5", "a:1,b:2"),
    "monitor.rank_out_of_section_timeout": (0.0, 0.5, 300.0, 600.0),
    "monitor.rank_exit_timeout": (0.0, 0.5, 3600.0, 7200.0),
    "monitor.calc_ft_timeouts": (True, False, True, False),
    "monitor.import_ft_state": ("", "ft_state.json", "/x/ft_state.json", "./y z"),
    "monitor.simulate_fault": (True, False, True, False),
    "monitor.simulated_fault_type": ("random", "rank_hung", "rank_killed", "random"),
    "monitor.simulated_fault_rank": (0, 1, "any", 7),
    "monitor.simulated_fault_base_delay": (0.0, 0.5, 60.0, 600.0),
    "validation.rerun_mode": ("disabled", "validate_results", "report_determinism_stats", "disabled"),
    "validation.check_for_nan_in_loss": (True, False, True, False),
    "validation.check_for_nan_in_grad": (True, False, True, False),
    "validation.check_for_spiky_loss": (True, False, True, False),
    "validation.spiky_loss_factor": (1.5, 10.0, 100.0, 3.0),
    "validation.check_for_outlier_loss": (True, False, True, False),
    "validation.outlier_loss_factor": (1.5, 12.0, 100.0, 3.0),
    "validation.deferred": (True, False, True, False),
    "validation.rerun_tolerance": (0.0, 0.5, 1e-6, 1.0),
    "validation.on_transient": ("accept", "stop", "accept", "stop"),
    "validation.max_transients": (1, 2, 3, 4),
    "validation.nan_policy": ("warn", "skip", "raise", "rollback"),
    "validation.max_consecutive": (1, 2, 10, 100),
    "validation.probation_steps": (0, 5, 10, 100),
    "validation.skip_bad_data": (True, False, True, False),
    "validation.corruption_watch_interval": (0, 1, 100, 1000),
    "validation.error_injection_rate": (0.0, 0.5, 0.25, 1.0),
    "validation.error_injection_type": (
        "correct_result",
        "transient_error",
        "persistent_error",
        "correct_result",
    ),
    "validation.error_injection_step": (0, 1, 3, 100),
    "validation.error_injection_ranks": ("", "0", "0,3", "1"),
    "validation.error_injection_device": ("", "0", "n/1", "GPU-1"),
    "stop.exit_signal_handler": (False, True, False, True),
    "stop.exit_signal": ("SIGTERM", "SIGUSR1", "SIGUSR1,SIGUSR2", "SIGTERM,SIGHUP"),
    "stop.exit_signal_handler_for_dataloader": (True, False, True, False),
    "stop.shutdown_timeout_sec": (0.0, 0.5, 60.0, 3600.0),
    "stop.stop_file": ("", "/home/me/stop", "./stop now", "x/y"),
    "slurm.preempt_time": (0.0, 0.5, 60.0, 300.0),
    "slurm.requeue": ("auto", "never", "auto", "never"),
    "health.gate": ("off", "warn", "refuse", "off"),
    "health.command": ("", "/site/check --fast", "~/check", "$HOME/check | tail -1"),
    "health.command_timeout": (0.5, 1.0, 60.0, 600.0),
    "health.max_uncorrected_errors": (0, 1, 4, 999),
    "health.nccl_health_check_interval": (0, 1, 100, 999_999_999_999),
    "health.nccl_health_check_timeout": (0.5, 1.0, 10.0, 60.0),
    "straggler.enabled": (True, False, True, False),
    "straggler.report_time_interval": (0.5, 60.0, 300.0, 3600.0),
    "straggler.calc_relative_gpu_perf": (False, True, False, True),
    "straggler.calc_individual_gpu_perf": (False, True, False, True),
    "straggler.gpu_relative_perf_threshold": (0.1, 0.5, 0.7, 1.0),
    "straggler.gpu_individual_perf_threshold": (0.1, 0.5, 0.7, 1.0),
    "straggler.num_gpu_perf_scores_to_print": (0, 1, 5, 10_000),
    "straggler.profiling_interval": (1, 2, 10, 1_000_000),
    "straggler.enable_logging": (False, True, False, True),
    "straggler.stop_if_detected": (True, False, True, False),
    "straggler.exclude_if_detected": (True, False, True, False),
    "inprocess.enabled": (True, False, True, False),
    "inprocess.granularity": ("rank", "node", "rank", "node"),
    "inprocess.active_world_size": (1, "all", 64, 10_000_000),
    "inprocess.min_world_size": (1, "active", 32, 10_000_000),
    "inprocess.assign": ("", "mine.places:assign", "a.b:c", "x:y"),
    "inprocess.max_iterations": (1, "budget", 10, 1_000_000),
    "inprocess.max_rank_faults": (0, "any", 3, 1_000_000),
    "inprocess.soft_timeout": (0.5, 5.0, 60.0, 120.5),
    "inprocess.hard_timeout": (0.5, 5.0, 90.0, 180.5),
    "inprocess.heartbeat_interval": (0.5, 1.0, 30.0, 60.5),
    "inprocess.heartbeat_timeout": (0.5, 5.0, 60.0, 120.5),
    "inprocess.barrier_timeout": (0.5, 10.0, 120.0, 240.5),
    "inprocess.completion_timeout": (0.5, 10.0, 120.0, 240.5),
    "inprocess.empty_cuda_cache": (False, True, False, True),
    "inprocess.monitor_process_logdir": ("", "/var/log/keepers", "./logs", "x/y z"),
    "journal.step_flush": (0.0, 0.5, 5.0, 10.0),
}


def refusal(
    file: Path | str | None = None,
    *,
    environ: Mapping[str, str] | None = None,
    command_line: Mapping[str, str] | None = None,
    **keywords: object,
) -> str:
    """The message that `load` refuses these settings with."""
    with pytest.raises(ConfigError) as caught:
        load(file, environ=environ or {}, command_line=command_line, keywords=keywords)
    assert caught.value.exit_code == 2
    return str(caught.value)


def toml(path: Path, text: str) -> Path:
    path.write_text(text, encoding="utf-8")
    return path


def as_text(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def as_toml(tree: Mapping[str, object]) -> str:
    """TOML of dotted keys; JSON spells our scalars the same way."""
    return "".join(f"{key} = {json.dumps(value)}\n" for key, value in tree.items())


# --- precedence


def test_without_any_source_every_setting_is_its_default() -> None:
    effective = load(environ={"PATH": "/bin", "HOLDFASTER": "x"})
    assert effective.settings == Settings()
    assert effective.sources == dict.fromkeys(FIELDS, "default")


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    given_by=st.fixed_dictionaries({key: st.sets(st.sampled_from(SOURCES)) for key in SAMPLES}),
    order=st.permutations(range(4)),
)
def test_the_highest_source_wins_and_is_named(
    tmp_path: Path, given_by: dict[str, set[str]], order: list[int]
) -> None:
    """Random subsets of sources for every setting at once."""
    given_by["checkpoint.resume_from"].add("file")  # force needs a name to go with
    given_by["checkpoint.keep_last"].add("file")  # and the other two keep_ settings need this one
    given_by["checkpoint.non_persistent_ckpt_type"].add("file")  # else its settings would be read by nobody
    given_by["launch.alert_url"].discard("command line")  # a secret: refused there
    value_of = {key: dict(zip(SOURCES, (SAMPLES[key][i] for i in order), strict=True)) for key in FIELDS}

    def winning(key: str) -> object:
        winner = next((source for source in reversed(SOURCES) if source in given_by[key]), None)
        return FIELDS[key].default if winner is None else value_of[key][winner]

    if winning("validation.rerun_mode") != "disabled" or winning("validation.nan_policy") == "skip":
        given_by["validation.deferred"].clear()  # it comes too late for both

    def of(source: str) -> dict[str, object]:
        return {key: value_of[key][source] for key in FIELDS if source in given_by[key]}

    file = toml(tmp_path / "holdfast.toml", as_toml(of("file")))
    effective = load(
        file,
        environ={FIELDS[key].environment: as_text(value) for key, value in of("environment").items()},
        command_line={key: as_text(value) for key, value in of("command line").items()},
        keywords={FIELDS[key].keyword: value for key, value in of("keyword").items()},
    )
    for key, field in FIELDS.items():
        winner = next((source for source in reversed(SOURCES) if source in given_by[key]), None)
        spelled = {"file": f"file {file}", "environment": f"environment {field.environment}"}
        assert effective.sources[key] == ("default" if winner is None else spelled.get(winner, winner))
        value = effective.settings.get(key)
        assert value == (field.default if winner is None else value_of[key][winner])
        assert type(value) is (str if value == field.word else field.kind)


def test_samples_cover_every_setting() -> None:
    assert list(SAMPLES) == list(FIELDS)


def test_values_that_equal_the_default_still_name_their_source() -> None:
    assert load(environ={"HOLDFAST_RUN_DIR": "holdfast-run"}).sources["run.dir"] == (
        "environment HOLDFAST_RUN_DIR"
    )


def test_sections_of_a_file_may_be_written_as_tables(tmp_path: Path) -> None:
    file = toml(tmp_path / "h.toml", "[checkpoint]\ninterval = 7\n[control]\nlease_ttl = 5\n")
    loaded = load(str(file), environ={}).settings
    assert loaded.checkpoint.interval == 7
    assert loaded.control.lease_ttl == 5.0
    assert isinstance(loaded.control.lease_ttl, float)


def test_a_link_to_a_settings_file_is_followed(tmp_path: Path) -> None:
    toml(tmp_path / "real.toml", "checkpoint.interval = 7")
    (tmp_path / "link.toml").symlink_to("real.toml")
    assert load(tmp_path / "link.toml", environ={}).settings.checkpoint.interval == 7


def test_the_launchers_hand_over_is_not_taken_for_a_setting() -> None:
    assert load(environ={"HOLDFAST_LAUNCH": "{}", "HOLDFAST_RESTART": "{}"}).settings == Settings()
    assert load(environ={"HOLDFAST_ALERT_KIND": "stop"}).settings == Settings(), "an alert command's own"


@pytest.mark.parametrize(
    ("text", "value"), [("true", True), ("1", True), ("false", False), ("0", False)], ids=str
)
def test_a_switch_in_the_environment_is_true_false_1_or_0(text: str, value: bool) -> None:
    loaded = load(environ={"HOLDFAST_CHECKPOINT_SAVE_AT_END": text})
    assert loaded.settings.checkpoint.save_at_end is value


@pytest.mark.parametrize(("text", "value"), [("5", 5.0), ("2.", 2.0), ("+1e1", 10.0), ("2.5e0", 2.5)])
def test_text_becomes_a_number(text: str, value: float) -> None:
    assert load(environ={}, command_line={"control.lease_ttl": text}).settings.control.lease_ttl == value


def test_a_keyword_path_may_be_a_path_object() -> None:
    loaded = load(environ={}, keywords={"run_dir": Path("a/b"), "checkpoint_root": Path("/c")}).settings
    assert (loaded.run.dir, loaded.checkpoint.root) == ("a/b", "/c")


def test_checkpoints_lie_in_the_run_directory_unless_told_otherwise() -> None:
    assert load(environ={}, keywords={"run_dir": "r"}).settings.checkpoint_root() == Path("r/checkpoints")
    elsewhere = load(environ={}, keywords={"run_dir": "r", "checkpoint_root": "/fast"}).settings
    assert elsewhere.checkpoint_root() == Path("/fast")


def test_the_digest_depends_on_the_values_and_not_on_their_source() -> None:
    by_keyword = load(environ={}, keywords={"control_lease_ttl": 20}).settings
    by_environment = load(environ={"HOLDFAST_CONTROL_LEASE_TTL": "20.0"}).settings
    assert digest(by_keyword) == digest(by_environment)
    canonical = json.dumps(msgspec.to_builtins(by_keyword), sort_keys=True, separators=(",", ":"))
    assert digest(by_keyword) == xxhash.xxh3_128_hexdigest(canonical.encode())
    assert digest(by_keyword) != digest(Settings())


# --- refusals of values

WRONG: dict[type, tuple[object, ...]] = {
    str: (5, 1.5, True, None, b"bytes", [], {}, "\0", " ", "\ud800", "~/run", "$HOME/run"),
    int: (1.0, True, None, "5", "many", [], {}, -1, 10**15, 10**40, float("nan")),
    float: (True, None, "5", "long", [], {}, -1.0, float("nan"), float("inf"), -float("inf"), 10**400, 4e7),
    bool: (1, 0, None, "true", "yes", [], 1.0),
}
WRONG_FOR: dict[str, tuple[object, ...]] = {
    "checkpoint.interval": ("", "Auto", " auto", "never"),
    "checkpoint.resume_from": ("", "Auto", "FRESH", " auto", "-5", "+5", "1" * 13),
    "checkpoint.fresh_parts": ("optimizer data", "optimizer,,data", "a.b"),
    "checkpoint.max_failed_saves": (0, 10**12),
    "checkpoint.non_persistent_keep_last": (0, 1, 65),
    "checkpoint.non_persistent_save_interval": (10**12, "each", -1),
    "checkpoint.non_persistent_save_share": (0.0, 0.51, -0.1),
    "checkpoint.replication_factor": (0,),
    "checkpoint.keep_last": (1,),
    "control.lease_ttl": (1.99, 0),
    "monitor.rank_section_timeouts": ("step", "step:", "step:-1", "step:1s", ":5", "a b:1", "a:1,a:2"),
    "checkpoint.timeout": (0, -0.0),
    "checkpoint.remote_retry_seconds": (0,),
    "control.decision_timeout": (0, 0.0),
    "validation.probation_steps": (1, 2, 3),
    "stop.exit_signal": (15, signal.SIGKILL, "SIGNONE", [signal.SIGTERM, 15]),
    "checkpoint.root": ("s3://bucket/runs", "a://", "file:///x", "gs:/bucket", Path("s3://bucket/x"), "://x"),
    "run.dir": ("", "s3://bucket", "hdfs://x/y"),
    "stop.stop_file": ("s3://bucket/stop",),
    "checkpoint.non_persistent_local_ckpt_dir": ("memory://x",),
}
RIGHT_FOR = dict.fromkeys(("launch.alert_command", "health.command"), ("~/run", "$HOME/run"))
"""What a shell expands."""
CASES = [
    (field, value)
    for field in FIELDS.values()
    for value in (*WRONG[field.kind], *WRONG_FOR.get(field.key, ()))
    if value not in RIGHT_FOR.get(field.key, ())
]


@pytest.mark.parametrize(
    ("field", "value"), CASES, ids=[f"{f.key}-{type(v).__name__}-{i}" for i, (f, v) in enumerate(CASES)]
)
def test_a_wrong_keyword_value_is_refused_with_key_source_value_and_what_is_allowed(
    field: Field, value: object
) -> None:
    message = refusal(**{field.keyword: value})
    assert message.startswith("1 problem in the settings")
    assert f"{field.key} = " in message
    assert "(keyword)" in message
    assert f"allowed is {field.allowed}; " in message
    assert len(message) < 1000
    message.encode()  # printable wherever it ends up


TEXTS = {
    "checkpoint.interval": ("", " 5", "5.0", "1e3", "0x10", "1_000", "five", "-1", "٣", "9" * 20),
    "checkpoint.save_at_end": ("", "True", "yes", "on", "2"),
    "control.lease_ttl": ("", "nan", "inf", "-5", "1_0.0", " 5", "1", "5s", "1e999"),
    "run.dir": ("",),
    "checkpoint.resume_from": ("",),
}


@pytest.mark.parametrize(("key", "text"), [(key, text) for key in TEXTS for text in TEXTS[key]])
def test_wrong_text_is_refused_in_the_environment_and_on_the_command_line(key: str, text: str) -> None:
    field = FIELDS[key]
    for message, source in (
        (refusal(environ={field.environment: text}), f"environment {field.environment}"),
        (refusal(command_line={key: text}), "command line"),
    ):
        assert f"{key} = {text!r} ({source}): allowed is {field.allowed}; " in message


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ('checkpoint.interval = "50"', "write 50 without quotes"),
        ("checkpoint.resume_from = 120", "write it in quotes"),
        ('checkpoint.save_at_end = "yes"', "write true"),
        ("checkpoint.save_at_end = 0", "write false"),
        ('checkpoint.interval = "Auto"', 'or "auto"; write "auto"'),
        (
            "checkpoint.interval = -1",
            'a whole number, 0 or more, at most 999999999999, or "auto"; the default is 100',
        ),
        ("checkpoint.max_failed_saves = 0", "a whole number, 1 or more"),
        ("control.lease_ttl = 1", "a number, 2 or more"),
        ("control.decision_timeout = 0", "a number, more than 0"),
        ("run.dir = 1979-05-27", "datetime.date(1979, 5, 27)"),
        ("validation.probation_steps = 2", "write 4 or more, or 0 for none"),
        ("stop.exit_signal = 15", 'write "SIGTERM"'),
        ('checkpoint.root = "s3://bucket/x"', "checkpoint.remote_root takes a URL"),
        ('checkpoint.remote_root = "copies"', "give a URL such as s3://bucket/prefix or file:///path"),
        ('checkpoint.remote_root = "file://copies/x"', "write three slashes before an absolute path"),
        (
            'checkpoint.remote_root = "https://host/x"',
            "for an S3 server give s3://… and set AWS_ENDPOINT_URL",
        ),
        ('run.dir = "$SCRATCH/run"', "not expanded: write it out, or put ./ before a real name"),
        ('checkpoint.resume_from = "Fresh"', 'write "fresh", or put ./ before a path'),
        ('launch.alert_url = "hooks.example/x"', "write http:// or https://, a host and a path"),
        ('launch.alert_url = "file:///etc/passwd"', "write http:// or https://, a host and a path"),
        ('launch.alert_url = "https://a b"', "without spaces"),
    ],
)
def test_the_suggestion_fits_the_mistake(tmp_path: Path, line: str, expected: str) -> None:
    message = refusal(toml(tmp_path / "holdfast.toml", line))
    assert expected in message
    assert f"(file {tmp_path}/holdfast.toml)" in message


def test_a_mistake_is_refused_even_where_another_source_overrides_it(tmp_path: Path) -> None:
    file = toml(tmp_path / "h.toml", "checkpoint.interval = -5")
    assert "checkpoint.interval = -5" in refusal(file, checkpoint_interval=5)


def test_all_problems_are_reported_at_once(tmp_path: Path) -> None:
    file = toml(tmp_path / "h.toml", "checkpoint.interval = -1\ncheckpoint.intervall = 1\n[jurnal]\nx = 1")
    message = refusal(
        file,
        environ={"HOLDFAST_RUN_DIR": "", "HOLDFAST_RUNDIR": "x"},
        command_line={"launch.max_restarts": "many", "nonsense": "1"},
        control_lease_ttl=60,
        control_decision_timeout=60,
        checkpoint_force=True,
    )
    assert message.startswith("9 problems in the settings; nothing was started:\n")
    for part in (
        "checkpoint.interval = -1",
        "checkpoint.intervall = 1",
        "[jurnal]",
        "HOLDFAST_RUN_DIR)",
        "HOLDFAST_RUNDIR = 'x'",
        "launch.max_restarts = 'many'",
        "nonsense = '1'",
        "control.decision_timeout = 60.0 (keyword)",
        "checkpoint.force = true (keyword)",
    ):
        assert part in message, part
    assert len(message.splitlines()) == 10


# --- contradictions


@pytest.mark.parametrize("timeout", [30, 29.9, 5.0])
def test_a_decision_may_not_time_out_before_a_lease_can_lapse(timeout: float) -> None:
    message = refusal(control_decision_timeout=timeout)
    assert f"control.decision_timeout = {float(timeout)} (keyword)" in message
    assert "control.lease_ttl = 30.0 (default)" in message
    assert "raise control.decision_timeout above 30 or lower control.lease_ttl" in message
    assert load(environ={}, keywords={"control_decision_timeout": 30.1}).settings


def test_a_local_tier_needs_a_directory_and_asynchronous_saves() -> None:
    message = refusal(checkpoint_non_persistent_ckpt_type="local")
    assert "set checkpoint.non_persistent_local_ckpt_dir, for example to /dev/shm/holdfast" in message
    assert "set checkpoint.async_save to true" in message
    keywords: dict[str, object] = {
        "checkpoint_non_persistent_ckpt_type": "local", "checkpoint_async_save": True,
        "checkpoint_non_persistent_local_ckpt_dir": "/dev/shm/x",
    }  # fmt: skip
    assert load(environ={}, keywords=keywords).settings


@pytest.mark.parametrize("key", LOCAL_NEED.keys)
def test_a_setting_of_the_local_tier_without_the_tier_is_refused(key: str) -> None:
    """Who sets one believes that local copies are made."""
    keyword, value = FIELDS[key].keyword, SAMPLES[key][1]
    message = refusal(**{keyword: value})
    assert message.startswith("1 problem")
    assert f"{key} = " in message
    assert 'set checkpoint.non_persistent_ckpt_type = "local"' in message
    off = {keyword: value, "checkpoint_non_persistent_ckpt_type": "none"}
    assert load(environ={}, keywords=off).settings, "who turned it off means it"


def test_what_its_switch_leaves_unread_is_told_with_the_switch() -> None:
    given = load(environ={}, keywords={"straggler_profiling_interval": 5, "checkpoint_when_busy": "skip"})
    assert idle(given) == [
        "checkpoint.when_busy = 'skip' (keyword): nothing reads this without checkpoint.async_save = true",
        "straggler.profiling_interval = 5 (keyword): nothing reads this without straggler.enabled = true",
    ]
    for more in ({"straggler_enabled": True}, {"straggler_enabled": False}):
        keywords: dict[str, object] = {"straggler_profiling_interval": 5, **more}
        assert idle(load(environ={}, keywords=keywords)) == []
    assert idle(load(environ={})) == []
    named = [key for need in (*NEEDS, LOCAL_NEED) for key in (need.switch, *need.keys)]
    assert set(named) <= set(FIELDS)


def test_force_without_anything_to_apply_is_refused() -> None:
    message = refusal(checkpoint_force=True, checkpoint_resume_from="auto")
    assert "checkpoint.resume_from = 'auto' (keyword)" in message
    assert "set checkpoint.resume_from to a step, a path or fresh" in message
    for wish in ("120", "fresh"):
        named = {"checkpoint_force": True, "checkpoint_resume_from": wish}
        assert load(environ={}, keywords=named).settings.checkpoint.force


@pytest.mark.parametrize("key", ["checkpoint_keep_every_steps", "checkpoint_keep_every_hours"])
def test_keeping_every_so_often_needs_something_to_be_deleted(key: str) -> None:
    message = refusal(**{key: 5})
    assert "checkpoint.keep_last = 0 (default): nothing is deleted" in message
    assert load(environ={}, keywords={key: 5, "checkpoint_keep_last": 2}).settings
    assert load(environ={}, keywords={key: 0}).settings
    assert refusal(**{key: 5, "checkpoint_keep_last": 1}).startswith("1 problem")


def test_a_refused_value_does_not_raise_a_contradiction_on_top() -> None:
    assert refusal(control_decision_timeout=-1).startswith("1 problem")
    assert refusal(control_lease_ttl=1, control_decision_timeout=20).startswith("1 problem")
    assert refusal(checkpoint_force=True, checkpoint_resume_from="").startswith("1 problem")


# --- unknown names


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("HOLDFAST_CHECKPOINT_INTERVALL", "HOLDFAST_CHECKPOINT_INTERVAL"),
        ("HOLDFAST_INTERVAL", "HOLDFAST_CHECKPOINT_INTERVAL"),
        ("HOLDFAST_Run_Dir", "HOLDFAST_RUN_DIR"),
        ("HOLDFAST_LAUNCH_MAXRESTARTS", "HOLDFAST_LAUNCH_MAX_RESTARTS"),
    ],
)
def test_an_unknown_environment_name_is_refused_with_the_closest_known_one(name: str, meant: str) -> None:
    message = refusal(environ={name: "5"})
    assert f"{name} = '5' (environment): there is no such setting; did you mean {meant}?" in message


@pytest.mark.parametrize(
    ("key", "meant"),
    [
        ("checkpoint.intervall", "checkpoint.interval"),
        ("interval", "checkpoint.interval"),
        ("run.interval", "checkpoint.interval"),
        ("run_dir", "run.dir"),
        ("journal.step-flush", "journal.step_flush"),
        ("control.lease", "control.lease_ttl"),
    ],
)
def test_an_unknown_key_is_refused_with_the_closest_known_one(tmp_path: Path, key: str, meant: str) -> None:
    expected = f"there is no such setting; did you mean {meant}?"
    assert f"{key} = '5' (command line): {expected}" in refusal(command_line={key: "5"})
    file = toml(tmp_path / "h.toml", f"{key} = 5")
    assert f"{key} = 5 (file {file}): {expected}" in refusal(file)


def test_an_unknown_keyword_is_refused_with_the_closest_known_one() -> None:
    assert "interval = 5 (keyword): there is no such setting; did you mean checkpoint_interval?" in refusal(
        interval=5
    )


@pytest.mark.parametrize("word", ["normal", "debug", ""])
def test_how_much_is_printed_is_no_setting(word: str, caplog: pytest.LogCaptureFixture) -> None:
    assert load(environ={"HOLDFAST_VERBOSITY": word}).settings == Settings()
    assert not caplog.text


@pytest.mark.parametrize("word", ["loud", "DEBUG", "2"])
def test_a_word_for_how_much_is_printed_that_does_not_exist_is_refused(word: str) -> None:
    with pytest.raises(ConfigError) as refused:
        load(environ={"HOLDFAST_VERBOSITY": word})
    told = f"HOLDFAST_VERBOSITY = {word!r} (environment): allowed is normal, debug"
    assert told in str(refused.value)


@pytest.mark.parametrize("word", ["text", "json", ""])
def test_the_form_of_the_lines_is_no_setting(word: str, caplog: pytest.LogCaptureFixture) -> None:
    assert load(environ={"HOLDFAST_LOG_FORMAT": word}).settings == Settings()
    assert not caplog.text


@pytest.mark.parametrize("word", ["yaml", "JSON", "1"])
def test_a_form_of_the_lines_that_does_not_exist_is_refused(word: str) -> None:
    with pytest.raises(ConfigError) as refused:
        load(environ={"HOLDFAST_LOG_FORMAT": word})
    assert f"HOLDFAST_LOG_FORMAT = {word!r} (environment): allowed is text, json" in str(refused.value)


def test_an_environment_name_like_no_setting_is_told_and_not_refused(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Others, too, have variables that begin with a name as common as ours."""
    load(environ={"HOLDFAST_HOME": "/opt", "HOLDFAST_API_TOKEN": "secret"})
    assert "HOLDFAST_HOME in the environment is not a setting; it is ignored" in caplog.text
    assert "secret" not in caplog.text
    caplog.clear()
    load(environ={"HOLDFAST_HOME": "/opt", "HOLDFAST_LAUNCH": "{}"})
    assert not caplog.text, "a worker: the launcher has said so"


@pytest.mark.parametrize("name", IN_OTHER_SYSTEMS)
def test_a_name_that_another_system_has_is_answered(tmp_path: Path, name: str) -> None:
    """With what it is called here, or why it is not needed; and what is named exists."""
    answer = f"there is no such setting; here {IN_OTHER_SYSTEMS[name]}"
    assert answer in refusal(**{name: 1})
    assert answer in refusal(**{f"checkpoint_{name}": 1})
    assert answer in refusal(command_line={f"checkpoint.{name}": "1"})
    assert answer in refusal(environ={f"HOLDFAST_CHECKPOINT_{name.upper()}": "1"})
    assert answer in refusal(toml(tmp_path / "h.toml", f"[checkpoint]\n{name.replace('_', '-')} = 1\n"))
    assert name not in {field.name for field in FIELDS.values()}, "one of ours must be found by that"
    sections = "|".join({field.section for field in FIELDS.values()})
    for key in re.findall(rf"\b(?:{sections})\.\w+", answer):
        assert key in FIELDS or key in ("run.steps", "run.save"), key


def test_a_value_that_was_removed_is_answered_with_what_replaces_it(tmp_path: Path) -> None:
    told = 'snapshots by fork were removed, because the steps after one cost more than the copy: write "auto"'
    assert told in refusal(checkpoint_snapshot="fork")
    assert told in refusal(command_line={"checkpoint.snapshot": "fork"})
    assert told in refusal(environ={"HOLDFAST_CHECKPOINT_SNAPSHOT": "fork"})
    assert told in refusal(toml(tmp_path / "h.toml", '[checkpoint]\nsnapshot = "fork"\n'))
    for key, value in REMOVED:
        assert value not in FIELDS[key].words


def test_a_signal_is_understood_by_its_name_and_as_pythons_own() -> None:
    for written, held in (
        (signal.SIGTERM, "SIGTERM"),
        ([signal.SIGUSR1, "SIGTERM"], "SIGUSR1,SIGTERM"),
        ("SIGHUP", "SIGHUP"),
    ):
        loaded = load(environ={}, keywords={"stop_exit_signal": written}).settings
        assert loaded.stop.exit_signal == held


def test_a_real_directory_with_a_name_like_a_url_can_be_had() -> None:
    loaded = load(environ={}, keywords={"checkpoint_root": "./s3://bucket", "run_dir": "a:b/c"}).settings
    assert (loaded.checkpoint.root, loaded.run.dir) == ("./s3://bucket", "a:b/c")


def test_a_name_like_no_setting_points_to_the_list_of_all() -> None:
    assert "zzz = 1 (keyword): there is no such setting; `holdfast config show` lists all" in refusal(zzz=1)


# --- files


def test_an_unknown_section_is_refused_with_the_closest_known_one(tmp_path: Path) -> None:
    message = refusal(toml(tmp_path / "h.toml", "[checkpoints]\ninterval = 5"))
    assert f"[checkpoints] (file {tmp_path}/h.toml): there is no such setting" in message
    assert "did you mean [checkpoint]?" in message


@pytest.mark.parametrize("value", ["5", '"x"', "[1, 2]", "[{interval = 5}]", "true"])
def test_a_section_that_is_no_table_is_refused(tmp_path: Path, value: str) -> None:
    message = refusal(toml(tmp_path / "h.toml", f"checkpoint = {value}"))
    assert "checkpoint = " in message
    assert "allowed is a section; write [checkpoint]" in message


@pytest.mark.parametrize("value", ["{a = 1}", "[50]", "1979-05-27T07:32:00Z"])
def test_a_setting_that_is_no_scalar_is_refused(tmp_path: Path, value: str) -> None:
    assert "checkpoint.interval = " in refusal(toml(tmp_path / "h.toml", f"checkpoint.interval = {value}"))


def test_a_syntax_error_names_file_and_line(tmp_path: Path) -> None:
    file = toml(tmp_path / "h.toml", "[checkpoint]\ninterval = 5\nforce = maybe\n")
    message = refusal(file)
    assert f"file {file}: is not valid TOML" in message
    assert "at line 3, column 9" in message


def test_a_missing_or_unreadable_file_is_named(tmp_path: Path) -> None:
    missing = tmp_path / "none.toml"
    assert f"file {missing}: cannot be read: No such file or directory" in refusal(missing)
    assert f"file {tmp_path}: cannot be read: not a regular file" in refusal(tmp_path)
    loop = tmp_path / "loop.toml"
    loop.symlink_to("loop.toml")
    assert f"file {loop}: cannot be read" in refusal(loop)
    fifo = tmp_path / "fifo.toml"
    os.mkfifo(fifo)
    assert f"file {fifo}: cannot be read: not a regular file" in refusal(fifo)
    assert "cannot be read" in refusal("")


def test_a_line_that_would_keep_tomllib_busy_is_refused_unparsed(tmp_path: Path) -> None:
    """Its time grows with the square of a dotted key's parts: 20 s for these 60 kB."""
    message = refusal(toml(tmp_path / "h.toml", "[run]\nx" + ".x" * 30_000 + " = 1"))
    assert "more than 4096 characters (at line 2)" in message


HOSTILE = {
    "nested arrays": b"x = " + b"[\n" * 30_000,
    "nested tables": b"x = " + b"{a=" * 1_300,
    "dotted keys of 1000 parts": b"".join(b"x%d" % i + b".x" * 1_000 + b" = 1\n" for i in range(30)),
    "nested within a setting": b"run.dir = " + b"[" * 100 + b"]" * 100,
    "decimal number of 4000 digits": b"checkpoint.interval = " + b"9" * 4_000,
    "decimal number of 20 000 digits": b"checkpoint.interval = " + b"9" * 20_000,
    "hexadecimal number of 4000 digits": b"checkpoint.interval = 0x" + b"f" * 4_000,
    "hexadecimal number for text": b"run.dir = 0x" + b"f" * 4_000,
    "long text": b'checkpoint.interval = """' + b"xyz\n" * 15_000 + b'"""',
    "long key": b"x" * 4_000 + b" = 1",
    "long line": b"x" * 60_000 + b" = 1",
    "eight thousand unknown keys": b"".join(b"k%d=1\n" % i for i in range(8_000)),
    "a key that rewrites the terminal": b'"\\u001b[2J\\n" = 1',
    "zero bytes": bytes(1000),
    "binary": bytes(range(256)) * 10,
    "latin-1": "run.dir = 'é'\n".encode("latin-1"),
    "utf-16": "run.dir = 'e'\n".encode("utf-16"),
    "too large": b"#" * (FILE_LIMIT + 1),
    "text with a zero": b'run.dir = "a\\u0000b"',
    "not a number": b"control.lease_ttl = nan",
    "infinite": b"control.lease_ttl = -inf",
    "a key twice": b"run.dir = 'a'\nrun.dir = 'b'",
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_files_are_refused_in_a_few_words(tmp_path: Path, name: str) -> None:
    file = tmp_path / "h.toml"
    file.write_bytes(HOSTILE[name])
    message = refusal(file)
    assert f"file {file}" in message
    assert len(message) < 20_000
    assert "\x1b" not in message


@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    data=st.one_of(st.binary(max_size=200), st.text(max_size=200).map(lambda s: s.encode("utf-8", "replace")))
)
def test_any_bytes_load_or_are_refused(tmp_path: Path, data: bytes) -> None:
    file = tmp_path / "any.toml"
    file.write_bytes(data)
    try:
        load(file, environ={})
    except ConfigError as error:
        message = str(error)
    else:
        return
    assert str(file) in message


@settings(max_examples=200, deadline=None)
@given(
    keywords=st.dictionaries(
        st.one_of(st.sampled_from([field.keyword for field in FIELDS.values()]), st.text(max_size=20)),
        st.one_of(
            st.none(), st.booleans(), st.integers(), st.floats(), st.text(), st.binary(), st.lists(st.none())
        ),
        max_size=5,
    )
)
def test_any_keywords_load_to_settings_within_their_types_or_are_refused(keywords: dict[str, object]) -> None:
    try:
        loaded = load(environ={}, keywords=keywords).settings
    except ConfigError:
        return
    assert msgspec.convert(msgspec.to_builtins(loaded), Settings) == loaded
    assert digest(loaded)


def test_assignments_split_at_the_first_equals_sign_and_the_last_wins() -> None:
    assert parse_assignments(["run.dir=a=b", "run.dir=c=d"]) == {"run.dir": "c=d"}
    with pytest.raises(ConfigError, match=r"allowed is section\.key=value") as caught:
        parse_assignments(["run.dir", "=x", "run.dir=a"])
    assert "2 problems" in str(caught.value)
