"""Settings of stopping, of the scheduler and of health checks: sections of the tree in `settings.py`."""

from __future__ import annotations

import re
import signal
from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from holdfast.settings_fields import LARGEST_COUNT, LONGEST_WAIT

_NOT_TO_TAKE = frozenset({"SIGKILL", "SIGSTOP", "SIGINT", "SIGSEGV", "SIGBUS", "SIGFPE", "SIGILL", "SIGCHLD"})
"""Signals that cannot be taken, or that mean something else to Python and torch."""


def parse_signals(text: str) -> list[signal.Signals]:
    """The signals that a text such as "SIGTERM,SIGUSR1" names; ValueError says what is wrong with it."""
    found: list[signal.Signals] = []
    for part in re.split(r"[,\s]+", text.strip()) if text.strip() else ():
        name = part.upper() if part.upper().startswith("SIG") else f"SIG{part.upper()}"
        if name not in signal.Signals.__members__:
            raise ValueError(f"{part[:40]!r} is not the name of a signal, as SIGTERM is")
        if name in _NOT_TO_TAKE:
            raise ValueError(f"{name} cannot be used to ask for a stop; SIGTERM, SIGUSR1 and SIGUSR2 can")
        if signal.Signals[name] not in found:
            found.append(signal.Signals[name])
    if not found:
        raise ValueError("name at least one signal; stop.exit_signal_handler = false takes none")
    return found


class StopSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Stopping on request: what asks for it, and how long it may take."""

    exit_signal_handler: Annotated[
        bool,
        "Whether ranks take the signals of exit_signal as a request to save and stop. Turn it off when the "
        "script handles those signals itself; the launcher still takes its own.",
    ] = True
    exit_signal: Annotated[
        str,
        "The signals that ask for a stop, by name with commas between them. Change it when the scheduler "
        "sends another one.",
    ] = "SIGTERM,SIGUSR1,SIGUSR2"
    exit_signal_handler_for_dataloader: Annotated[
        bool,
        "Whether the processes of a data loader ignore those signals, so that one which reaches the whole "
        "process group does not break the last steps. Turn it on where schedulers signal every process.",
    ] = False
    shutdown_timeout_sec: Annotated[
        float,
        Meta(ge=0, le=LONGEST_WAIT),
        "Seconds from the request until every rank must have saved and ended; who has not is ended with its "
        "stacks written down. 0 means no limit but the scheduler's. Make it longer than one save takes.",
    ] = 600.0
    stop_file: Annotated[
        str,
        "A file whose appearance asks for a stop; empty means `stop` inside run.dir. Set it where people can "
        "reach another directory more easily.",
    ] = ""


class SlurmSettings(msgspec.Struct, frozen=True, kw_only=True):
    """What is done with what Slurm says of the job. Without Slurm none of it counts."""

    preempt_time: Annotated[
        float,
        Meta(ge=0, le=LONGEST_WAIT),
        "Seconds before the job's time limit at which the run saves and stops by itself; 0 means that it "
        "does not. Make it longer than a save and a step together.",
    ] = 60.0
    requeue: Annotated[
        Literal["auto", "never"],
        "Whether a run that was stopped by the time limit, by preemption or by the loss of its nodes asks "
        "Slurm to queue the job again: `auto` if the job allows it. Set `never` when a chain of jobs or "
        "another program starts the next one.",
    ] = "auto"


class HealthSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Trying machines out before they are relied on, and peers while they are."""

    gate: Annotated[
        Literal["off", "warn", "refuse"],
        "What is done about a node that fails its health checks before it joins, and between attempts: "
        "nothing is checked, it is told, or the node is kept out. Use `warn` while a check is wrong about "
        "your machines.",
    ] = "refuse"
    command: Annotated[
        str,
        "The site's own check of a node, a command for a shell; it is run on every node before it joins, and "
        "between attempts; empty means none. Exit code 0: the node is fit; 3: it could not tell; any other "
        "keeps it out, as health.gate says. Its last words are in the journal.",
    ] = ""
    command_timeout: Annotated[
        float,
        Meta(gt=0, le=LONGEST_WAIT),
        "Seconds that health.command has; then it is killed, and the node counts as unfit.",
    ] = 60.0
    max_uncorrected_errors: Annotated[
        int,
        Meta(ge=0, le=LARGEST_COUNT),
        "Memory errors beyond correction that a GPU may have counted since its last reset; with more of them "
        "its node is kept out. Fewer are a warning.",
    ] = 4
    nccl_health_check_interval: Annotated[
        int,
        Meta(ge=0, le=LARGEST_COUNT),
        "Steps between two liveness pings of all ranks, on any backend; 0 means none. Set it where a lost "
        "peer would otherwise be found by a long timeout only.",
    ] = 0
    nccl_health_check_timeout: Annotated[
        float,
        Meta(gt=0, le=LONGEST_WAIT),
        "Seconds that a rank has to answer such a ping. Raise it when ranks may be that far apart in a step.",
    ] = 10.0
