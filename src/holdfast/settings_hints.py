"""What is said about a setting that would do nothing: another system's, or one whose switch is off.

`IN_OTHER_SYSTEMS` answers names that users bring from Megatron-LM, Megatron-Bridge, nvidia-resiliency-ext,
torchtitan, KempnerForge, Lightning and the Hugging Face Trainer: what it is called here, or why it is not
needed. `REMOVED` answers values that an earlier release took. `NEEDS` says which settings are read only while
another one is on.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

FT_LAUNCHER = {
    "rank_termination_signal": "launch.stop_grace (SIGTERM first, SIGKILL after the grace)",
    "workers_stop_timeout": "launch.stop_grace",
    "term_timeout": "launch.stop_grace",
    "restart_policy": "launch.max_restarts (any failed rank restarts the whole group)",
    "max_no_progress_cycles": "launch.max_restarts (counted without progress)",
    "min_progress_iterations": "nothing: any rise of the highest committed step is progress",
    "checkpoint_iteration_file": "nothing: commits are recorded in the run's directory",
    "log_level": "the LOGLEVEL variable",
    "workload_check_interval": "--monitor-interval",
    "safety_factor": "monitor.calc_ft_timeouts",
    "num_warmup_iterations": "monitor.initial_rank_heartbeat_timeout (until the first step is done)",
    "node_health_check_interval": "health.gate",
    "node_health_check_endpoint": "health.gate",
    "enable_nic_monitor": "health.gate",
    "enable_nic_healthcheck": "health.gate",
    "pci_topo_file": "health.gate",
    "link_down_path_template": "health.gate",
    "link_state_path_template": "health.gate",
    "enable_dist_storage_healthcheck": "health.gate",
    "storage_healthcheck_path": "health.gate",
    "storage_health_check_path": "health.gate",
    "restart_check_interval": "inprocess.enabled, and the other settings of inprocess",
    "numa_bind_strict": "--numa-binding",
    "check_remaining_processes": "nothing: what workers leave behind is always ended",
    "install_exception_hook": "nothing: holdfast.Run and forked workers always leave an error file",
    "skip_section_response": "nothing: a rank never waits for an answer to a sign of life",
    "per_cycle_applog_prefix": "--log-dir, with --redirects or --tee",
    "ignore_missing_cfg": "nothing: leave --ft-cfg-path out where there is no such file",
}
"""Parameters of nvidia-resiliency-ext's ft_launcher without a setting of the same name, and what to use."""

_PLAN = "a save's plan is reused as long as every rank finds the structure unchanged, and made anew otherwise"
_PARALLEL = "each rank always stores and loads its own share"
_WHOLE = "a checkpoint is always whole"
_BEGIN = "it is checkpoint.resume_from, with checkpoint.fresh_parts for what is to begin anew"
_UNTIL = "it is run.steps(loader, until=…)"

IN_OTHER_SYSTEMS: Mapping[str, str] = {
    # Megatron-LM and Megatron-Bridge
    "assume_constant_structure": f"it is not needed: {_PLAN}",
    "ckpt_assume_constant_structure": f"it is not needed: {_PLAN}",
    "save": "it is checkpoint.root",
    "save_interval": "it is checkpoint.interval",
    "save_retain_interval": "it is checkpoint.keep_every_steps, together with checkpoint.keep_last",
    "most_recent_k": "it is checkpoint.keep_last",
    "load": _BEGIN,
    "ckpt_step": "it is checkpoint.resume_from, which also takes a step",
    "pretrained_checkpoint": _BEGIN,
    "finetune": _BEGIN,
    "save_optim": f"it is not needed: {_WHOLE}",
    "save_rng": f"it is not needed: {_WHOLE}",
    "load_optim": "it is checkpoint.fresh_parts, which names what is not to be loaded",
    "load_rng": f"it is not needed: {_WHOLE}",
    "exit_on_missing_checkpoint": "it is not needed: a run that had checkpoints never begins anew unasked",
    "use_checkpoint_args": "it is not needed: settings are given at each start, and changes are journalled",
    "dist_ckpt_strictness": "it is not needed: a checkpoint and the tracked objects must fit, both ways",
    "dist_ckpt_format": "it is checkpoint.ckpt_format",
    "fully_parallel_save": f"it is not needed: {_PARALLEL}",
    "fully_parallel_load": f"it is not needed: {_PARALLEL}",
    "ckpt_fully_parallel_save": f"it is not needed: {_PARALLEL}",
    "ckpt_fully_parallel_load": f"it is not needed: {_PARALLEL}",
    "use_persistent_ckpt_worker": "it is not needed: checkpoint.async_save always keeps its writer process",
    "dist_ckpt_workers": "it is not needed: checkpoint.async_save has one writer process a rank",
    "async_strategy": "it is checkpoint.async_save",
    "non_persistent_global_ckpt_dir": "there is none: only checkpoint.non_persistent_ckpt_type = local",
    "replication": "it is checkpoint.replication_factor, where 1 means no replicas",
    "verify_integrity": "it is not needed: every checkpoint has digests, checked before it is loaded",
    "exit_interval": _UNTIL,
    "train_iters": _UNTIL,
    "exit_duration_in_mins": "it is slurm.preempt_time under Slurm; else ask for a stop with a signal",
    "log_straggler": "it is straggler.enabled",
    "enable_straggler_on_startup": "it is straggler.enabled",
    "straggler_minmax_count": "it is straggler.num_gpu_perf_scores_to_print",
    "logger_name": "it is not needed: everything is logged by the logger named holdfast",
    # nvidia-resiliency-ext
    "monitor_thread_interval": "it is not needed: how often progress is looked at follows from soft_timeout",
    "monitor_process_interval": "it is not needed: how often progress is looked at follows from hard_timeout",
    "progress_watchdog_interval": "it is not needed: how often progress is told follows from soft_timeout",
    "last_call_wait": "it is inprocess.barrier_timeout",
    "termination_grace_time": "it is inprocess.hard_timeout",
    **{name: f"use {ours}" for name, ours in FT_LAUNCHER.items()},
    # torchtitan and KempnerForge
    "enable_checkpoint": "it is not needed: checkpoint.interval = 0 saves nothing on schedule",
    "folder": "it is checkpoint.root",
    "dump_folder": "it is run.dir",
    "initial_load_path": _BEGIN,
    "load_path": _BEGIN,
    "load_step": "it is checkpoint.resume_from, which also takes a step",
    "exclude_from_loading": "it is checkpoint.fresh_parts",
    "async_mode": "it is checkpoint.async_save, true or false",
    "keep_latest_k": "it is checkpoint.keep_last",
    "keep_last_n": "it is checkpoint.keep_last",
    "last_save_model_only": "it is not needed: `holdfast ckpt export` writes the weights of any checkpoint",
    "export_dtype": "it is not needed: `holdfast ckpt export` writes the weights of any checkpoint",
    "enable_first_step_checkpoint": "it is run.save() after the first step",
    # Lightning and the Hugging Face Trainer
    "every_n_train_steps": "it is checkpoint.interval",
    "save_top_k": "it is checkpoint.keep_last",
    "save_last": "it is checkpoint.save_at_end",
    "dirpath": "it is checkpoint.root",
    "save_steps": "it is checkpoint.interval",
    "save_total_limit": "it is checkpoint.keep_last",
    "save_strategy": "it is checkpoint.interval, where 0 means no scheduled saves",
    "output_dir": "it is run.dir, with checkpoint.root for the checkpoints",
    "resume_from_checkpoint": "it is checkpoint.resume_from",
}

REMOVED: Mapping[tuple[str, str], str] = {
    ("checkpoint.snapshot", "fork"): (
        'snapshots by fork were removed, because the steps after one cost more than the copy: write "auto", '
        "which copies state in host memory while training waits"
    ),
}
"""By setting and value: what to write instead."""


class Need(NamedTuple):
    """Settings that are read only while another one is on."""

    switch: str
    fix: str
    """What to set, for a message."""
    keys: tuple[str, ...]


LOCAL_NEED = Need(
    "checkpoint.non_persistent_ckpt_type",
    'checkpoint.non_persistent_ckpt_type = "local"',
    (
        "checkpoint.non_persistent_local_ckpt_dir",
        "checkpoint.non_persistent_local_ckpt_algo",
        "checkpoint.non_persistent_save_interval",
        "checkpoint.non_persistent_keep_last",
        "checkpoint.non_persistent_max_bytes",
        "checkpoint.replication_factor",
        "checkpoint.replication_jump",
        "checkpoint.replication_timeout",
    ),
)
"""Refused without it: who set one of these believes in copies that nobody makes."""

NEEDS = (
    Need(
        "checkpoint.async_save",
        "checkpoint.async_save = true",
        (
            "checkpoint.when_busy",
            "checkpoint.snapshot",
        ),
    ),
    Need(
        "checkpoint.remote_root",
        "checkpoint.remote_root",
        ("checkpoint.remote_retry_seconds",),
    ),
    Need(
        "validation.check_for_spiky_loss",
        "validation.check_for_spiky_loss = true",
        ("validation.spiky_loss_factor",),
    ),
    Need(
        "validation.check_for_outlier_loss",
        "validation.check_for_outlier_loss = true",
        ("validation.outlier_loss_factor",),
    ),
    Need(
        "monitor.simulate_fault",
        "monitor.simulate_fault = true",
        (
            "monitor.simulated_fault_type",
            "monitor.simulated_fault_rank",
            "monitor.simulated_fault_base_delay",
        ),
    ),
    Need(
        "health.nccl_health_check_interval",
        "health.nccl_health_check_interval",
        ("health.nccl_health_check_timeout",),
    ),
    Need(
        "straggler.enabled",
        "straggler.enabled = true",
        (
            "straggler.report_time_interval",
            "straggler.calc_relative_gpu_perf",
            "straggler.calc_individual_gpu_perf",
            "straggler.gpu_relative_perf_threshold",
            "straggler.gpu_individual_perf_threshold",
            "straggler.num_gpu_perf_scores_to_print",
            "straggler.profiling_interval",
            "straggler.enable_logging",
        ),
    ),
)
"""Told without it, once, at the start of a run."""


def in_other_systems(name: str, sections: frozenset[str]) -> str:
    """What a name of another system is here; empty if it is none of those.

    `name` as it was written: `checkpoint.save_steps`, `checkpoint_save_steps` or `HOLDFAST_SAVE_STEPS`.
    """
    plain = name.removeprefix("HOLDFAST_").lower().replace("-", "_").rpartition(".")[2]
    section, _, rest = plain.partition("_")
    for one in (plain, rest if section in sections else ""):
        if one in IN_OTHER_SYSTEMS:
            return IN_OTHER_SYSTEMS[one]
    return ""


def without_switch(need: Need, sources: Mapping[str, str]) -> list[str]:
    """Its settings that were given while nobody touched the switch; who turned that off means it."""
    if sources[need.switch] != "default":
        return []
    return [key for key in need.keys if sources[key] != "default"]
