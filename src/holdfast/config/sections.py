"""Sections of the tree of settings: cluster, in-process restart, stragglers, result validation."""

from __future__ import annotations

import re
import signal
from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from holdfast.config.fields import LARGEST_COUNT, LONGEST_WAIT

# Settings of stopping, of the scheduler and of health checks: sections of the tree in `settings.py`.


_NOT_TO_TAKE = frozenset({"SIGKILL", "SIGSTOP", "SIGINT", "SIGSEGV", "SIGBUS", "SIGFPE", "SIGILL", "SIGCHLD"})
"""Signals that cannot be taken, or that mean something else to Python and torch."""


def parse_signals(text: str) -> list[signal.Signals]:
    """The signals that a text such as "SIGTERM,SIGUSR1" names; ValueError says what is wrong with it."""
    found: list[signal.Signals] = []
    for part in re.split(r"[,\s]+", text.strip()) if text.strip() else ():
        name = part.upper() if part.upper().startswith("SIG") else f"SIG{part.upper()}"
        if name not in signal.Signals.__members__:
            raise ValueError(f"{part[:40]!r} is not the name of a signal, such as SIGTERM")
        if name in _NOT_TO_TAKE:
            raise ValueError(f"{name} cannot be used to ask for a stop; SIGTERM, SIGUSR1 and SIGUSR2 can")
        if signal.Signals[name] not in found:
            found.append(signal.Signals[name])
    if not found:
        raise ValueError("name at least one signal; to handle none, set stop.exit_signal_handler = false")
    return found


class StopSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Stopping on request: what asks for it, and how long it may take."""

    exit_signal_handler: Annotated[
        bool,
        "Whether ranks treat the signals of exit_signal as a request to save and stop. Turn it off when "
        "the script handles those signals itself; the launcher still handles its own.",
    ] = True
    exit_signal: Annotated[
        str,
        "The signals that ask for a stop, by name with commas between them. Change it when the scheduler "
        "sends a different one.",
    ] = "SIGTERM,SIGUSR1,SIGUSR2"
    exit_signal_handler_for_dataloader: Annotated[
        bool,
        "Whether the processes of a data loader ignore those signals, so that a signal to the whole "
        "process group does not break the last steps. Turn it on where schedulers signal every process.",
    ] = False
    shutdown_timeout_sec: Annotated[
        float,
        Meta(ge=0, le=LONGEST_WAIT),
        "Seconds from the request until every rank must have saved and ended; a rank that has not is ended "
        "after its stacks are written down. 0 means no limit except the scheduler's. Make it longer than "
        "one save takes.",
    ] = 600.0
    stop_file: Annotated[
        str,
        "A file whose appearance asks for a stop; empty means `stop` inside run.dir. Set it where people can "
        "reach another directory more easily.",
    ] = ""


class SlurmSettings(msgspec.Struct, frozen=True, kw_only=True):
    """What to do about what Slurm says of the job. Has no effect without Slurm."""

    preempt_time: Annotated[
        float,
        Meta(ge=0, le=LONGEST_WAIT),
        "Seconds before the job's time limit at which the run saves and stops by itself; 0 means never. "
        "Make it longer than a save and a step together.",
    ] = 60.0
    requeue: Annotated[
        Literal["auto", "never"],
        "Whether a run that was stopped by the time limit, by preemption or by the loss of its nodes asks "
        "Slurm to queue the job again: `auto` if the job allows it. Set `never` when a chain of jobs or "
        "another program starts the next one.",
    ] = "auto"


class HealthSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Trying out machines before they are relied on, and peers while they are."""

    gate: Annotated[
        Literal["off", "warn", "refuse"],
        "What is done about a node that fails its health checks before it joins, and between attempts: "
        "nothing is checked, the failure is reported, or the node is kept out. Use `warn` while a check is "
        "wrong about your machines.",
    ] = "refuse"
    command: Annotated[
        str,
        "The site's own check of a node, a command for a shell; it runs on every node before the node "
        "joins, and between attempts; empty means none. Exit code 0: the node is fit; 3: the check could "
        "not tell; any other keeps the node out, as health.gate says. The end of its output is in the "
        "journal.",
    ] = ""
    command_timeout: Annotated[
        float,
        Meta(gt=0, le=LONGEST_WAIT),
        "Seconds that health.command may take; then it is killed, and the node counts as unfit.",
    ] = 60.0
    max_uncorrected_errors: Annotated[
        int,
        Meta(ge=0, le=LARGEST_COUNT),
        "Memory errors beyond correction that a GPU may have counted since its last reset; with more of "
        "them its node is kept out. Up to that number there is a warning.",
    ] = 4
    nccl_health_check_interval: Annotated[
        int,
        Meta(ge=0, le=LARGEST_COUNT),
        "Steps between two liveness pings of all ranks, on any backend; 0 means none. Set it where a lost "
        "peer would otherwise be found only after a long timeout.",
    ] = 0
    nccl_health_check_timeout: Annotated[
        float,
        Meta(gt=0, le=LONGEST_WAIT),
        "Seconds that a rank has to answer such a ping. Raise it when ranks may be further apart than that "
        "in a step.",
    ] = 10.0


# Settings of in-process restart: a section of the tree in `settings.py`.
#
# The names are those that users of nvidia-resiliency-ext know, so that a file can be taken over.


MOST_MEMBERS = 10**7


class InProcessSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Starting the training function again in the same processes."""

    enabled: Annotated[
        bool,
        "Whether `holdfast.restartable` restarts its function in place after a fault; otherwise the "
        "function is called once. Turn it on where starting processes, importing and connecting cost more "
        "than a step.",
    ] = False
    granularity: Annotated[
        Literal["node", "rank"],
        "What a lost rank takes with it: its whole node, or only the rank. Set rank where ranks of one "
        "node may train without each other.",
    ] = "node"
    active_world_size: Annotated[
        Annotated[int, Meta(ge=1, le=MOST_MEMBERS)] | Literal["all"],
        "How many of the started ranks train; the rest wait as warm reserves. `all`: there are no reserves.",
    ] = "all"
    min_world_size: Annotated[
        Annotated[int, Meta(ge=1, le=MOST_MEMBERS)] | Literal["active"],
        "The lowest number of ranks with which the function may continue when no reserve is left. "
        "`active`: as many as active_world_size, or not at all.",
    ] = "active"
    assign: Annotated[
        str,
        "The function that says which process trains under which rank, as package.module:function; empty "
        "for Holdfast's own. Set it where ranks cannot be exchanged freely; see `holdfast.policy.reassign`.",
    ] = ""
    max_iterations: Annotated[
        Annotated[int, Meta(ge=1, le=1_000_000)] | Literal["budget"],
        "How many times the function may be called. `budget`: the budgets of recovery are the only "
        "bound, as for restarts by the launcher.",
    ] = "budget"
    max_rank_faults: Annotated[
        Annotated[int, Meta(ge=0, le=1_000_000)] | Literal["any"],
        "How many faults of any kind one process may have before it is left out. `any`: there is no such "
        "limit.",
    ] = "any"
    soft_timeout: Annotated[
        float,
        Meta(gt=0, le=LONGEST_WAIT),
        "Seconds without progress of a rank's main thread after which all ranks restart. Raise it where a "
        "single call outside Python takes longer, such as compiling a model.",
    ] = 60.0
    hard_timeout: Annotated[
        float,
        Meta(gt=0, le=LONGEST_WAIT),
        "Seconds after which a rank that stands still, or does not leave the function, is ended. It must "
        "be longer than soft_timeout.",
    ] = 90.0
    heartbeat_interval: Annotated[
        float,
        Meta(gt=0, le=LONGEST_WAIT),
        "Seconds between two signs of life of a node's keeper. Lower it to notice a lost node sooner.",
    ] = 30.0
    heartbeat_timeout: Annotated[
        float,
        Meta(gt=0, le=LONGEST_WAIT),
        "Seconds without a sign of life after which a node counts as lost. It must be longer than "
        "heartbeat_interval.",
    ] = 60.0
    barrier_timeout: Annotated[
        float,
        Meta(gt=0, le=LONGEST_WAIT),
        "Seconds for all ranks to come together before the function starts again; a rank that is late is "
        "left out. For the first start they have monitor.initial_rank_heartbeat_timeout if that is longer. "
        "It must be longer than hard_timeout.",
    ] = 120.0
    completion_timeout: Annotated[
        float,
        Meta(ge=0, le=LONGEST_WAIT),
        "Seconds for the other ranks to return once one has; 0 means as long as they make progress. Set it "
        "where a rank that returns alone is a sign that something went wrong.",
    ] = 0.0
    empty_cuda_cache: Annotated[
        bool,
        "Whether cached device memory is given back before the function starts again. Turn it off where "
        "nothing but the function uses the device.",
    ] = True
    monitor_process_logdir: Annotated[
        str,
        "Directory for the log of each node's keeper, whether that is a separate process or part of the "
        "launcher. Keepers log nothing if it is empty.",
    ] = ""


# Settings of the straggler detector: a section of the tree in `settings.py`.
#
# The names are those that users of nvidia-resiliency-ext know, so that a file can be taken over. `gpu` in
# them stands for the rank's device, a CPU too.


class StragglerSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Finding the rank that the others wait for."""

    enabled: Annotated[
        bool,
        "Measure the time that each rank spends in its sections, and compare the ranks at every report. "
        "Turn it on when steps take longer than they should and nobody knows why.",
    ] = False
    report_time_interval: Annotated[
        float,
        Meta(gt=0, le=LONGEST_WAIT),
        "Seconds between two reports; a rank is named after two of three reports in a row. Lower it to be "
        "told sooner, raise it where step times vary a lot.",
    ] = 300.0
    calc_relative_gpu_perf: Annotated[
        bool,
        "Whether a rank is compared with the others; in a pipeline only with those of its stage. Turn it off "
        "where ranks have different work in another way.",
    ] = True
    calc_individual_gpu_perf: Annotated[
        bool,
        "Whether a rank is compared with its own best report of this attempt. Turn it off where the work of "
        "a step grows by design.",
    ] = True
    gpu_relative_perf_threshold: Annotated[
        float,
        Meta(gt=0, le=1),
        "Speed relative to the median of the other ranks below which a rank is slow. Raise it to find "
        "smaller differences, lower it where ranks differ by design.",
    ] = 0.7
    gpu_individual_perf_threshold: Annotated[
        float,
        Meta(gt=0, le=1),
        "Speed relative to its own best below which a rank is slow. Raise it to find smaller losses.",
    ] = 0.7
    num_gpu_perf_scores_to_print: Annotated[
        int,
        Meta(ge=0, le=10_000),
        "How many of the best and of the worst scores each report prints; 0 prints none. Raise it to see "
        "more ranks in the log.",
    ] = 5
    profiling_interval: Annotated[
        int,
        Meta(ge=1, le=1_000_000),
        "Measure one step in this many; 1 means all. Raise it where steps are very short.",
    ] = 1
    enable_logging: Annotated[
        bool,
        "Whether reports and the ranks that are named go to the log; the journal has them anyway. Turn it "
        "off where the log is for other things.",
    ] = True
    stop_if_detected: Annotated[
        bool,
        "Whether the run saves and stops, as on request, once a rank is named. Turn it on where a slow run "
        "costs more than the time until somebody has replaced the machine.",
    ] = False
    exclude_if_detected: Annotated[
        bool,
        "Whether the run saves and `holdfast run` continues without the named device or node, if a spare "
        "can take its place. Turn it on where there are spares.",
    ] = False


DEFERRED = "validation.deferred"
DEFERRED_REFUSES = {
    "validation.rerun_mode": ("validate_results", "report_determinism_stats"),
    "validation.nan_policy": ("skip",),
}
"""What is done before the optimizer steps; deferred checks come too late for it."""
DEFERRED_ALLOWS = {"validation.rerun_mode": "disabled", "validation.nan_policy": "warn, raise or rollback"}


def parse_ranks(text: str) -> frozenset[int]:
    """The ranks that a text such as "0,3" names; ValueError says what is wrong with it."""
    parts = [part.strip() for part in text.split(",")] if text else []
    if not all(part.isascii() and part.isdigit() and len(part) <= 9 for part in parts):
        raise ValueError("write whole numbers with commas between them, such as 0,3")
    return frozenset(int(part) for part in parts)


class ValidationSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Checking results, re-running rejected steps, and probation after a resume."""

    rerun_mode: Annotated[
        Literal["disabled", "validate_results", "report_determinism_stats"],
        "What is done about a rejected step before anything else: nothing, re-run it, or re-run every step "
        "and measure how much results differ. Set validate_results when devices cannot be trusted.",
    ] = "disabled"
    check_for_nan_in_loss: Annotated[
        bool,
        "Whether a step whose loss is NaN or infinite is rejected. Turn it off only for a loss that may "
        "legitimately be NaN or infinite.",
    ] = True
    check_for_nan_in_grad: Annotated[
        bool,
        "Whether a step whose gradients hold a NaN or an infinity is rejected; a gradient scaler's own "
        "overflow is not. Turn it off when gradients are sparse and such values are normal.",
    ] = True
    check_for_spiky_loss: Annotated[
        bool,
        "Whether a step whose loss is spiky_loss_factor times the largest seen is rejected. Set it "
        "together with rerun_mode.",
    ] = False
    spiky_loss_factor: Annotated[
        float,
        Meta(gt=1, le=1e6),
        "How many times the largest loss seen so far counts as a spike. Raise it for a loss that jumps for "
        "good reasons.",
    ] = 10.0
    check_for_outlier_loss: Annotated[
        bool,
        "Whether a step whose loss is far outside the recent ones (median and spread of a window) is "
        "rejected. More sensitive than the spike test; set it together with rerun_mode.",
    ] = False
    outlier_loss_factor: Annotated[
        float,
        Meta(gt=1, le=1e6),
        "How many spreads above the window's median counts as an outlier. Lower it to catch smaller jumps.",
    ] = 12.0
    deferred: Annotated[
        bool,
        "Whether checks on a GPU are read some steps later, so that no step waits for the device. A bad "
        "step is then found after the optimizer used it: it can be rolled back, but not re-run, skipped or "
        "dropped.",
    ] = False
    rerun_tolerance: Annotated[
        float,
        Meta(ge=0, le=1),
        "Relative difference up to which two runs of one step count as equal. Set it to what "
        "report_determinism_stats measured, if results are not repeatable to the bit.",
    ] = 0.0
    on_transient: Annotated[
        Literal["accept", "stop"],
        "What to do with a step that was rejected once but not again: continue with the second result, or "
        "stop.",
    ] = "accept"
    max_transients: Annotated[
        int,
        Meta(ge=1, le=LARGEST_COUNT),
        "Transient faults after which a device counts as bad. Lower it to exclude flaky devices sooner.",
    ] = 3
    nan_policy: Annotated[
        Literal["warn", "skip", "raise", "rollback"],
        "What happens to a non-finite step; it never reaches the optimizer. warn: dropped on all ranks, "
        "with a warning. skip: dropped quietly. raise: the run stops. rollback: dropped, and after "
        "max_consecutive of them the run goes back past its newest checkpoint.",
    ] = "warn"
    max_consecutive: Annotated[
        int,
        Meta(ge=1, le=LARGEST_COUNT),
        "Non-finite steps in a row after which the run stops, or rolls back if nan_policy says so.",
    ] = 10
    probation_steps: Annotated[
        int,
        Meta(ge=0, le=LARGEST_COUNT),
        "Steps after a resume in which an anomaly makes what was loaded suspect; 0 turns probation off. "
        "Raise it when bad state shows late; keep it above 3.",
    ] = 10
    skip_bad_data: Annotated[
        bool,
        "Whether the samples of a step that fails on every device and from every checkpoint are left out, "
        "instead of leaving the step to nan_policy. All ranks leave out the same ones; the journal says "
        "which.",
    ] = False
    corruption_watch_interval: Annotated[
        int,
        Meta(ge=0, le=LARGEST_COUNT),
        "Steps after which a micro-batch is computed again, on a neighbour rank if there is one, and "
        "compared; 0 switches it off. It costs one more forward and backward each time.",
    ] = 0
    error_injection_rate: Annotated[
        float,
        Meta(ge=0, le=1),
        "Share of steps in which a false result is injected, as a rehearsal; 0 switches it off. Needs "
        "rerun_mode.",
    ] = 0.0
    error_injection_type: Annotated[
        Literal["correct_result", "transient_error", "persistent_error"],
        "What is rehearsed: a bad result that comes from the work itself, one that does not come back, or "
        "one that comes from the device.",
    ] = "transient_error"
    error_injection_step: Annotated[
        int,
        Meta(ge=0, le=LARGEST_COUNT),
        "The one step in which a false result is injected, whatever the rate; 0 means none.",
    ] = 0
    error_injection_ranks: Annotated[
        str,
        Meta(max_length=200),
        "Ranks that get false results, such as 0,3; empty means all. With persistent_error, the devices that "
        "they have at the first false result stay bad, unless error_injection_device names one.",
    ] = ""
    error_injection_device: Annotated[
        str,
        Meta(max_length=200),
        "The device that gives false results, as node/device or device, with persistent_error.",
    ] = ""
