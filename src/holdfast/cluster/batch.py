"""Batch scripts for Slurm: what a job shall look like, what cannot work, and the script's text.

Guarantee: everything that a user gave reaches the shell as quoted words, and nothing else does. The same
layout always gives the same text.
"""

from __future__ import annotations

import re
import shlex

import msgspec

from holdfast.errors import UsageError

# What a Slurm job shall look like; what cannot work is refused, with the flag's name.


SIGNAL_EARLIER = 60
"""Seconds by which Slurm may send its signal early."""
_TIME = re.compile(r"(?:\d{1,4}-\d{1,2}(?::\d{1,2}){0,2}|\d{1,7}(?::\d{1,2}){0,2})", re.ASCII)
_ARRAY = re.compile(r"\d+(-\d+(:\d+)?)?(,\d+(-\d+(:\d+)?)?)*(%\d+)?", re.ASCII)
_WORD = re.compile(r"[A-Za-z0-9_.,:@%+/-]+", re.ASCII)
_INTERPRETER = re.compile(r"(?:.*/)?python[0-9.]*", re.ASCII)


class JobLayout(msgspec.Struct, frozen=True, kw_only=True):
    """What a job looks like. Empty text and 0 leave a choice to Slurm."""

    command: list[str]
    """What follows the flags of `holdfast run`: the script and its arguments. If `plain`, a whole command."""
    nodes: int = 1
    min_nodes: int = 0
    """The fewest nodes with which an elastic run goes on; 0 for exactly `nodes`."""
    spares: int = 0
    """Additional nodes, which wait to take over."""
    gpus_per_node: int = 0
    processes_per_node: int = 0
    time: str = ""
    partition: str = ""
    account: str = ""
    job_name: str = "holdfast"
    array: str = ""
    signal_lead: int = 180
    """Seconds before the time limit at which Slurm signals the script; 0 leaves that to Holdfast."""
    local_tier: str = ""
    run_dir: str = ""
    log: str = ""
    plain: bool = False
    """Without `holdfast run`: one task per rank."""
    endpoints: str = ""
    """Where agents meet, if node names are not host names; by default, on the first nodes."""
    holdfast: list[str] = msgspec.field(default_factory=lambda: ["holdfast"])
    """The command by which Holdfast is called on the nodes."""
    extra: list[str] = []
    """More lines for sbatch, such as `--mem=0`."""
    setup: list[str] = []
    """Lines of shell to run before anything starts."""

    @property
    def processes(self) -> int:
        return self.processes_per_node or self.gpus_per_node or 1

    @property
    def survives(self) -> bool:
        """Whether the job can go on without one of its nodes."""
        return self.spares > 0 or 0 < self.min_nodes < self.nodes


def check(layout: JobLayout) -> None:
    """Raise UsageError for what cannot work, with the flag's name."""
    _check_counts(layout)
    _check_texts(layout)
    _check_command(layout)


def _check_counts(layout: JobLayout) -> None:
    for flag, value, least in (
        ("--nodes", layout.nodes, 1),
        ("--min-nodes", layout.min_nodes, 0),
        ("--spares", layout.spares, 0),
        ("--gpus-per-node", layout.gpus_per_node, 0),
        ("--nproc-per-node", layout.processes_per_node, 0),
        ("--signal-lead", layout.signal_lead, 0),
    ):
        if value < least:
            raise UsageError(f"{flag} {value}: give {least} or more")
    if layout.min_nodes > layout.nodes:
        raise UsageError(
            f"--min-nodes {layout.min_nodes} with --nodes {layout.nodes}: the fewest nodes that may train "
            "cannot be more than all of them"
        )
    if layout.plain and (layout.spares or layout.min_nodes):
        raise UsageError(
            "--plain with --spares or --min-nodes: only `holdfast run` can put in a spare, or go on with "
            "fewer. Leave --plain out"
        )
    if 0 < layout.gpus_per_node < layout.processes_per_node:
        raise UsageError(
            f"--nproc-per-node {layout.processes_per_node} with --gpus-per-node {layout.gpus_per_node}: "
            "ranks would share a GPU. Give as many GPUs as ranks, or leave --gpus-per-node out"
        )
    if layout.time and not _TIME.fullmatch(layout.time):
        raise UsageError(f"--time {layout.time}: write MINUTES, HH:MM:SS or DAYS-HH:MM:SS")
    seconds = time_in_seconds(layout.time)
    if seconds is not None and layout.signal_lead and seconds < 2 * (layout.signal_lead + SIGNAL_EARLIER):
        raise UsageError(
            f"--signal-lead {layout.signal_lead} with --time {layout.time}: Slurm may signal up to "
            f"{SIGNAL_EARLIER} s earlier than that, so less than half of the job's time would be for "
            "training. Give a shorter lead, or 0, or more time"
        )


def _check_texts(layout: JobLayout) -> None:
    for flag, text in (
        ("--partition", layout.partition),
        ("--account", layout.account),
        ("--job-name", layout.job_name),
        ("--log", layout.log),
        ("--rdzv-endpoint", layout.endpoints),
    ):
        if text and not _WORD.fullmatch(text):
            raise UsageError(f"{flag} {text[:80]!r}: use letters, digits and _ . , : @ % + / - only")
    if layout.array and not _ARRAY.fullmatch(layout.array):
        raise UsageError(f"--array {layout.array[:80]!r}: write 0-7, 1,3,5 or 0-31%4")
    for line in layout.extra:
        if not line.startswith("-") or not line.isprintable():
            raise UsageError(f"--sbatch {line[:80]!r}: give one option of sbatch, such as --sbatch=--mem=0")
    for flag, texts in (("--setup", layout.setup), ("--holdfast", layout.holdfast)):
        if not all(text.strip() and text.isprintable() for text in texts) or (
            flag == "--holdfast" and not texts
        ):
            raise UsageError(f"{flag}: give one line of shell that is not empty")
    for flag, text in (("--run-dir", layout.run_dir), ("--local-tier", layout.local_tier)):
        if not text.isprintable() and text:
            raise UsageError(f"{flag} {text[:80]!r}: a path on one line")
    if layout.local_tier and not layout.local_tier.startswith("/"):
        raise UsageError(f"--local-tier {layout.local_tier}: give an absolute path like /dev/shm/holdfast-me")
    if layout.array and not layout.run_dir:
        raise UsageError(
            "--array without --run-dir: every task is a run of its own and needs a place below it"
        )


def _check_command(layout: JobLayout) -> None:
    command = layout.command
    if not command:
        raise UsageError("no training command: write it after `--`, as in `-- train.py --steps 1000`")
    if not all(word.isprintable() for word in command):
        raise UsageError("the training command has a line break or another unprintable character in it")
    if not layout.plain and _INTERPRETER.fullmatch(command[0]):
        raise UsageError(
            f"the training command begins with {command[0]}: `holdfast run` starts Python itself. Write the "
            "script and its arguments, or give --plain"
        )
    if not layout.plain and command[0] in ("torchrun", "srun", "holdfast", "accelerate"):
        raise UsageError(
            f"the training command begins with {command[0]}: the job starts `holdfast run` in its place. "
            "Write the script and its arguments"
        )


def time_in_seconds(text: str) -> int | None:
    """Slurm's way to write a time limit; None if none is given."""
    if not text:
        return None
    days, dash, rest = text.rpartition("-")
    parts = [int(part) for part in rest.split(":")]
    if dash:
        hours, minutes, seconds = (*parts, 0, 0)[:3]
        return int(days) * 86400 + hours * 3600 + minutes * 60 + seconds
    if len(parts) == 1:
        return parts[0] * 60
    hours, minutes, seconds = (0, *parts) if len(parts) == 2 else parts
    return hours * 3600 + minutes * 60 + seconds


ENDPOINTS = 3
"""How many of the first nodes can host the store: the loss of two is survived."""
TOGETHER = 5
"""Seconds that a stopped rank without an agent leaves the others to end too."""
LOCAL = {
    "checkpoint.async_save": "true",
    "checkpoint.non_persistent_ckpt_type": "local",
    "checkpoint.non_persistent_local_ckpt_dir": "",
}
"""Settings of a local tier, without its directory."""

_SETUP = """
# What is started here gets a process group of its own: signals sent to the script must not reach srun, which
# takes SIGTERM as an order to kill the ranks at once. The ranks get SIGTERM through Slurm, and SIGUSR1
# and SIGUSR2 through srun.
set -m
job=$SLURM_JOB_ID
# An array's number means all of its tasks. A job submitted from within a task inherits these variables.
if [ "${SLURM_ARRAY_JOB_ID:-}" = "$job" ]; then
    job=${SLURM_ARRAY_JOB_ID}_$SLURM_ARRAY_TASK_ID
fi
step=
interrupted=
# Asks for a requeue only if what stopped the run is a reason to come back, and if nobody has asked yet.
end() {
    if [ "$1" -ne 0 ]; then
        "${holdfast[@]}" slurm requeue --exit-code "$1" --run-dir "$run_dir"
    fi
    exit "$1"
}
on_signal() {
    interrupted=1
    if [ -z "$step" ]; then
        # Nothing was started yet. The lines below may still have to say where holdfast is.
        if command -v "${holdfast[0]}" > /dev/null; then end 31; fi
    elif [ "$1" != TERM ]; then
        kill -s "$1" "$step" 2>/dev/null
    elif [ "$(timeout 10 squeue --noheader --jobs="$job" --format=%T 2>/dev/null)" = RUNNING ]; then
        # If Slurm ends the job, it tells the ranks itself. There scancel would try again and again, and at
        # last hit the job's next life: hence the look before, and a time limit too short for a second try.
        timeout 4 scancel --quiet --signal=TERM "$job" 2>/dev/null
    fi
}
trap 'on_signal TERM' TERM
trap 'on_signal USR1' USR1
trap 'on_signal USR2' USR2"""

_STOPPED = 'if [ -n "$interrupted" ]; then end 31; fi'
_NODES = 'mapfile -t nodes < <(scontrol show hostnames "$SLURM_JOB_NODELIST")'
_PORT = "$((20000 + SLURM_JOB_ID % 10000))"

_WAIT = """\
# A signal ends `wait` early, with a code of its own: wait again. 127 means that it was waited for before.
code=127
while :; do
    interrupted=
    wait "$step"
    last=$?
    if [ "$last" -ne 127 ]; then code=$last; fi
    if [ -z "$interrupted" ] || [ "$last" -eq 127 ]; then break; fi
done
"""

_RANK = f"""
# Wraps each rank: Slurm ends all of them as soon as one ends with a code other than 0, but one that stopped
# leaves the others time to end too. Where Slurm signals only a task's first process, this passes it on.
rank='
RANK=$SLURM_PROCID LOCAL_RANK=$SLURM_LOCALID WORLD_SIZE=$SLURM_NTASKS "$@" &
step=$!
interrupted=
for name in TERM USR1 USR2; do
    # shellcheck disable=SC2064
    trap "interrupted=1; kill -s $name $step 2>/dev/null" "$name"
done
{_WAIT.partition(chr(10))[2]}\
case $code in 31 | 32) sleep {TOGETHER} ;; esac
exit "$code"'
"""

_END = f"""\
step=$!

{_WAIT}
end "$code"
"""


def render(layout: JobLayout) -> str:
    """The script's text. Raises UsageError for what cannot work."""
    check(layout)
    setup = (
        "\n".join(["", *layout.setup, 'if [ -n "$interrupted" ]; then end 31; fi']) if layout.setup else ""
    )
    start = _plain(layout) if layout.plain else _agents(layout)
    parts = [_header(layout), _place(layout), _SETUP, setup, start, _END]
    return "\n".join(part for part in parts if part)


def _header(layout: JobLayout) -> str:
    options = [
        f"--job-name={layout.job_name or 'holdfast'}",
        f"--nodes={layout.nodes + layout.spares}",
        f"--ntasks-per-node={layout.processes if layout.plain else 1}",
        f"--gpus-per-node={layout.gpus_per_node}" if layout.gpus_per_node else "",
        "--exclusive",
        f"--time={layout.time}" if layout.time else "",
        f"--partition={layout.partition}" if layout.partition else "",
        f"--account={layout.account}" if layout.account else "",
        f"--array={layout.array}" if layout.array else "",
        f"--output={layout.log or ('%x-%A_%a.out' if layout.array else '%x-%j.out')}",
        "--open-mode=append",
        "--requeue",
        f"--signal=B:USR1@{layout.signal_lead}" if layout.signal_lead else "",
        "--no-kill" if layout.survives else "",
        *layout.extra,
    ]
    lines = ["#!/bin/bash", *(f"#SBATCH {option}" for option in options if option)]
    lines.append("# Written by `holdfast slurm script`.")
    # Single quotes are for the tasks' own shell; traps call the functions that nothing seems to call.
    lines.append("# shellcheck disable=SC2016,SC2317")
    if layout.local_tier:
        lines += [
            "# Local copies outlive the job. Have the cluster's epilog give their memory back, as",
            "# examples/slurm/epilog.sh of Holdfast does, or run `holdfast clean` on the nodes now and then.",
        ]
    return "\n".join(lines)


def _place(layout: JobLayout) -> str:
    run_dir = shlex.quote(layout.run_dir) if layout.run_dir else 'runs/"$SLURM_JOB_NAME"'
    if layout.array:
        run_dir += '"/task_$SLURM_ARRAY_TASK_ID"'
    return f"\nholdfast=({shlex.join(layout.holdfast)})\nrun_dir={run_dir}"


def _agents(layout: JobLayout) -> str:
    """One agent per node. They end attempts and start new ones: Slurm must not end all when one is gone."""
    nodes = f"{layout.min_nodes}:{layout.nodes}" if layout.min_nodes else str(layout.nodes)
    srun = "srun --kill-on-bad-exit=0 --wait=0 --cpu-bind=none"
    parts = [
        f"{srun} --no-kill" if layout.survives else srun,
        "bash -c 'HOLDFAST_LAUNCH_NODE_NAME=$SLURMD_NODENAME exec \"$@\"' agent",
        f'"${{holdfast[@]}}" run --nnodes {nodes} --nproc-per-node {layout.processes}',
        '--rdzv-backend c10d --rdzv-endpoint "$endpoints" --rdzv-id "$job.${SLURM_RESTART_COUNT:-0}"',
        '--run-dir "$run_dir"',
        *(f"--set {shlex.quote(f'{key}={value}')}" for key, value in _local(layout).items()),
        shlex.join(layout.command),
    ]
    return f"{_endpoints(layout)}\n" + _launch(parts)


def _endpoints(layout: JobLayout) -> str:
    if layout.endpoints:
        return f"endpoints={shlex.quote(layout.endpoints)}"
    count = min(ENDPOINTS, layout.nodes + layout.spares)
    lines = [
        "",
        "# The first nodes host the store in which the agents meet: if one is lost, the next one does.",
        _NODES,
        f"port={_PORT}",
        "endpoints=",
        f'for node in "${{nodes[@]:0:{count}}}"; do',
        '    endpoints+="${endpoints:+,}$node:$port"',
        "done",
    ]
    return "\n".join(lines)


def _plain(layout: JobLayout) -> str:
    """One task per rank. When one fails, the others wait for it in vain: Slurm must end them."""
    settings = {key.replace(".", "_").upper(): value for key, value in _local(layout).items()}
    lines = [
        _NODES,
        "export MASTER_ADDR=${nodes[0]}",
        f"export MASTER_PORT={_PORT}",
        'export HOLDFAST_RUN_DIR="$run_dir"',
        *(f"export HOLDFAST_{name}={shlex.quote(value)}" for name, value in settings.items()),
    ]
    lines.append(_RANK.rstrip())
    parts = [
        "srun --kill-on-bad-exit=1 --wait=0 --cpu-bind=none",
        'bash -c "$rank" rank',
        shlex.join(layout.command),
    ]
    return "\n".join(lines) + "\n" + _launch(parts)


def _launch(parts: list[str]) -> str:
    return '\n"${holdfast[@]}" slurm info\n' + " \\\n    ".join(parts) + " &"


def _local(layout: JobLayout) -> dict[str, str]:
    return {key: value or layout.local_tier for key, value in LOCAL.items()} if layout.local_tier else {}
