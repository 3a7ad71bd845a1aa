"""What is known of each setting, read off the tree, and what to say about one that would do nothing.

`IN_OTHER_SYSTEMS` answers names that users bring from Megatron-LM, Megatron-Bridge, nvidia-resiliency-ext,
torchtitan, KempnerForge, Lightning and the Hugging Face Trainer: what it is called here, or why it is not
needed. `REMOVED` answers values that an earlier release accepted. `NEEDS` says which settings are read only
while another one is on.
"""

from __future__ import annotations

import json
import re
import typing
from collections.abc import Mapping
from types import UnionType
from typing import Literal, NamedTuple
from urllib.parse import urlsplit

import msgspec
from msgspec import Meta

# What is known of each setting, read off the classes of the tree in `settings.py`: its type, range, default,
# description, and the names it has in files, in the environment and as a keyword; and the largest values that
# numbers in the tree may have.


LARGEST_COUNT = 10**12 - 1
"""Twelve digits, as many as a checkpoint's name holds for its step."""
LONGEST_WAIT = 31_536_000.0
"""A year in seconds. Every wait has a deadline, and longer ones overflow the platform's timers."""

EXIT_SIGNAL = "stop.exit_signal"
INJECTION_RANKS = "validation.error_injection_ranks"
INJECTION_DEVICE = "validation.error_injection_device"
RESUME_FROM = "checkpoint.resume_from"
LOCAL_TYPE = "checkpoint.non_persistent_ckpt_type"
LOCAL_DIR = "checkpoint.non_persistent_local_ckpt_dir"
ASYNC_SAVE = "checkpoint.async_save"
KEEP_LAST = "checkpoint.keep_last"
REMOTE_ROOT = "checkpoint.remote_root"
NODE_NAME = "launch.node_name"
ALERT_COMMAND = "launch.alert_command"
HEALTH_COMMAND = "health.command"
ALERT_URL = "launch.alert_url"
ASSIGN = "inprocess.assign"
NAMES = "checkpoint.names"
FRESH_PARTS = "checkpoint.fresh_parts"
CKPT_FORMAT = "checkpoint.ckpt_format"
SECTION_TIMEOUTS = "monitor.rank_section_timeouts"
FAILURE_CAUSES = "launch.failure_causes"
PROBATION_STEPS = "validation.probation_steps"

_TEXTS = {
    RESUME_FROM: 'text: "auto", "fresh", a step number, a path or a URL',
    REMOTE_ROOT: "text: a URL such as s3://bucket/prefix or file:///path, or empty",
    NODE_NAME: "text: a name, or empty",
    ASSIGN: "text: package.module:function, or empty",
    NAMES: "text: package.module:function, or empty",
    ALERT_COMMAND: "text: a command for /bin/sh, or empty",
    HEALTH_COMMAND: "text: a command for /bin/sh, or empty",
    EXIT_SIGNAL: "text: signals, such as SIGTERM,SIGUSR1",
    ALERT_URL: "text: an http:// or https:// URL, or empty",
    FAILURE_CAUSES: "text: lines of a cause, a colon and a regular expression, or empty",
    SECTION_TIMEOUTS: "text: sections with their seconds, such as setup:600,step:180, or empty",
    FRESH_PARTS: "text: parts, such as optimizer,data, or empty",
    INJECTION_RANKS: "text: ranks, such as 0,3, or empty",
    INJECTION_DEVICE: "text: a device, or node/device, or empty",
}
"""What a text may be, unless it is a path."""


SECRET = frozenset({ALERT_URL})
"""Settings whose value is a secret: whoever knows a webhook's address can post to it."""
HIDDEN = "•••"
_STEP = re.compile(r"[0-9]{1,12}")
_CREDENTIALS = re.compile(
    r"(?P<before>\b[a-z][a-z0-9+.-]*://)[^/\s@]+(?=@)"
    r"|(?P<name>\b(?:authorization:\s*(?:bearer|basic|token)|bearer)\s+)[^\s'\"]+"
    r"|(?P<key>[\w-]*(?:token|secret|passw(?:or)?d|api[_-]?key|access[_-]?key)=)[^\s'\"&;]+",
    re.IGNORECASE,
)


def is_step(text: str) -> bool:
    """Whether `resume_from` names a step, and not a path."""
    return _STEP.fullmatch(text) is not None


def mask(text: str) -> str:
    """A text as it may be shown: without the credentials that can be recognised in it."""
    return _CREDENTIALS.sub(lambda found: f"{found['before'] or found['name'] or found['key']}{HIDDEN}", text)


def masked(key: str, value: object) -> object:
    """The value of a setting as it may be shown."""
    if not isinstance(value, str) or not value:
        return value
    if key not in SECRET:
        return mask(value)
    scheme, separator, rest = value.partition("://")
    host = re.split(r"[/?#]", rest, maxsplit=1)[0].rpartition("@")[2]
    return f"{scheme}://{host}/{HIDDEN}" if separator and host else HIDDEN


_NO_STORES = {
    "memory": "what is kept in memory is gone with its process; it cannot hold copies of checkpoints",
    "http": "nothing can be stored over plain HTTP; for an S3 server give s3://… and set AWS_ENDPOINT_URL",
    "https": "nothing can be stored over plain HTTP; for an S3 server give s3://… and set AWS_ENDPOINT_URL",
}


def wrong_address(url: str) -> str:
    """Why nothing can be stored at this URL, and what to write instead; empty if it may work."""
    try:
        parsed = urlsplit(url)
        _ = parsed.port
    except ValueError as error:
        return f"it is not a URL: {error}"
    scheme, place = parsed.scheme.lower(), parsed.netloc + parsed.path
    if scheme in _NO_STORES:
        return _NO_STORES[scheme]
    if "://" not in url or not place.strip("/"):
        return "give a URL such as s3://bucket/prefix or file:///path"
    if parsed.query or parsed.fragment or parsed.username:
        return "only a plain address; credentials come from the environment"
    if scheme in ("file", "local") and parsed.netloc:
        return "write three slashes before an absolute path, file:///path"
    return ""


class Field(msgspec.Struct, frozen=True, kw_only=True):
    """What is known of one setting, read off the classes of the tree."""

    section: str
    name: str
    kind: type
    annotation: object
    """The type with its bounds, as msgspec checks it."""
    bounds: Meta
    default: object
    description: str
    """What it does and when to change it."""
    word: str = ""
    """The one word that may be given instead of a number."""
    words: tuple[str, ...] = ()
    """The words that a text may be, if there are only a few."""

    @property
    def key(self) -> str:
        return f"{self.section}.{self.name}"

    @property
    def environment(self) -> str:
        return f"HOLDFAST_{self.section}_{self.name}".upper()

    @property
    def keyword(self) -> str:
        return f"{self.section}_{self.name}"

    @property
    def is_path(self) -> bool:
        """Whether it names a file or a directory of this machine."""
        return self.kind is str and not self.words and self.key not in _TEXTS

    @property
    def allowed(self) -> str:
        """What the value may be, in words."""
        if self.key in _TEXTS:
            return _TEXTS[self.key]
        if self.key == KEEP_LAST:
            return f"a whole number, 0 or 2 or more, at most {self.bounds.le:.0f}"
        if self.key == PROBATION_STEPS:
            return f"a whole number, 0 or 4 or more, at most {self.bounds.le:.0f}"
        if self.words:
            return f"text: {', '.join(json.dumps(word) for word in self.words)}"
        if self.kind is str:
            return "text: a path, not empty" if self.bounds.min_length else "text: a path, or empty"
        if self.kind is bool:
            return "true or false"
        number = "a whole number" if self.kind is int else "a number"
        low, more_than = self.bounds.ge, self.bounds.gt
        lowest = f"{low:g} or more" if low is not None else f"more than {more_than:g}"
        allowed = f"{number}, {lowest}, at most {self.bounds.le:.0f}"
        return f'{allowed}, or "{self.word}"' if self.word else allowed


def read_fields(tree: type) -> dict[str, Field]:
    """Every setting of a tree of sections by its dotted key, in the order of the classes."""
    found: dict[str, Field] = {}
    for section, cls in typing.get_type_hints(tree).items():
        annotations = typing.get_type_hints(cls, include_extras=True)
        for field in msgspec.structs.fields(cls):
            kind, *notes = typing.get_args(annotations[field.name])
            word, words = "", ()
            if typing.get_origin(kind) is Literal:
                kind, words = str, typing.get_args(kind)
            if typing.get_origin(kind) in (UnionType, typing.Union):  # a number, or one word instead
                number, literal = typing.get_args(kind)
                kind, *bounds = typing.get_args(number)
                notes, word = [*bounds, *notes], typing.get_args(literal)[0]
            entry = Field(
                section=section,
                name=field.name,
                kind=kind,
                annotation=annotations[field.name],
                bounds=next((note for note in notes if isinstance(note, Meta)), Meta()),
                default=field.default,
                description=next(note for note in notes if isinstance(note, str)),
                word=word,
                words=words,
            )
            found[entry.key] = entry
    return found


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
        "checkpoint.non_persistent_save_share",
        "checkpoint.non_persistent_keep_last",
        "checkpoint.non_persistent_max_bytes",
        "checkpoint.replication_factor",
        "checkpoint.replication_jump",
        "checkpoint.replication_timeout",
    ),
)
"""Refused without it: whoever set one of these counts on copies that nobody makes."""

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
        "checkpoint.non_persistent_save_interval",
        'checkpoint.non_persistent_save_interval = "auto"',
        ("checkpoint.non_persistent_save_share",),
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
"""Reported, once at the start of a run, if given without it."""


def in_other_systems(name: str, sections: frozenset[str]) -> str:
    """What a name from another system is called here; empty if it is not one of those.

    `name` as it was written: `checkpoint.save_steps`, `checkpoint_save_steps` or `HOLDFAST_SAVE_STEPS`.
    """
    plain = name.removeprefix("HOLDFAST_").lower().replace("-", "_").rpartition(".")[2]
    section, _, rest = plain.partition("_")
    for one in (plain, rest if section in sections else ""):
        if one in IN_OTHER_SYSTEMS:
            return IN_OTHER_SYSTEMS[one]
    return ""


def without_switch(need: Need, sources: Mapping[str, str]) -> list[str]:
    """Its settings that were given while nobody touched the switch; whoever turned that off meant it."""
    if sources[need.switch] != "default":
        return []
    return [key for key in need.keys if sources[key] != "default"]
