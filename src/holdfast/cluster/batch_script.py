"""A batch script for Slurm that starts a run, passes signals on and comes back when it should.

Guarantee: everything that a user gave reaches the shell as quoted words, and nothing else does. The same
layout always gives the same text.
"""

from __future__ import annotations

import shlex

from holdfast.cluster.batch_layout import Layout, check

ENDPOINTS = 3
"""First nodes that can host the store: the loss of two is survived."""
TOGETHER = 5
"""Seconds that a stopped rank without an agent leaves the others to end as well."""
LOCAL = {
    "checkpoint.async_save": "true",
    "checkpoint.non_persistent_ckpt_type": "local",
    "checkpoint.non_persistent_local_ckpt_dir": "",
}
"""Settings of a local tier, without its directory."""

_SETUP = """
# What is started here gets a process group of its own: what is sent to the script must not reach srun, which
# takes SIGTERM as an order to kill the ranks at once. So they get that one through Slurm; SIGUSR1 and SIGUSR2
# are passed on by srun.
set -m
job=$SLURM_JOB_ID
# By an array's number all of its tasks are meant. A job that was submitted from within a task inherits these.
if [ "${SLURM_ARRAY_JOB_ID:-}" = "$job" ]; then
    job=${SLURM_ARRAY_JOB_ID}_$SLURM_ARRAY_TASK_ID
fi
step=
interrupted=
# Asks only if what stopped the run is a reason to come back, and if nobody has asked yet.
end() {
    if [ "$1" -ne 0 ]; then
        "${holdfast[@]}" slurm requeue --exit-code "$1" --run-dir "$run_dir"
    fi
    exit "$1"
}
on_signal() {
    interrupted=1
    if [ -z "$step" ]; then
        # Nothing was started. Where holdfast is, the lines below may be yet to say.
        if command -v "${holdfast[0]}" > /dev/null; then end 31; fi
    elif [ "$1" != TERM ]; then
        kill -s "$1" "$step" 2>/dev/null
    elif [ "$(timeout 10 squeue --noheader --jobs="$job" --format=%T 2>/dev/null)" = RUNNING ]; then
        # A job that Slurm ends is told by Slurm. There scancel would try again and again, and in the end meet
        # the job's next life: hence the look before, and less time than it waits before it tries again.
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
# A signal ends `wait` early, with a code of its own: wait again. 127 means that it was waited for already.
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
# Around each rank: Slurm ends all of them as soon as one ends with another code than 0, but one that stopped
# leaves the others time to end as well. Where Slurm signals only a task's first process, this tells the rank.
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


def render(layout: Layout) -> str:
    """The script's text. Raises UsageError for what cannot work."""
    check(layout)
    setup = (
        "\n".join(["", *layout.setup, 'if [ -n "$interrupted" ]; then end 31; fi']) if layout.setup else ""
    )
    start = _plain(layout) if layout.plain else _agents(layout)
    parts = [_header(layout), _place(layout), _SETUP, setup, start, _END]
    return "\n".join(part for part in parts if part)


def _header(layout: Layout) -> str:
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
    # Single quotes are for the tasks' own shell; traps call what seems to be called by nobody.
    lines.append("# shellcheck disable=SC2016,SC2317")
    if layout.local_tier:
        lines += [
            "# Local copies outlive the job. Have the cluster's epilog give their memory back, as",
            "# examples/slurm/epilog.sh of Holdfast does, or run `holdfast clean` on the nodes now and then.",
        ]
    return "\n".join(lines)


def _place(layout: Layout) -> str:
    run_dir = shlex.quote(layout.run_dir) if layout.run_dir else 'runs/"$SLURM_JOB_NAME"'
    if layout.array:
        run_dir += '"/task_$SLURM_ARRAY_TASK_ID"'
    return f"\nholdfast=({shlex.join(layout.holdfast)})\nrun_dir={run_dir}"


def _agents(layout: Layout) -> str:
    """One agent a node. They end attempts and start new ones: Slurm must not end all because one is gone."""
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


def _endpoints(layout: Layout) -> str:
    if layout.endpoints:
        return f"endpoints={shlex.quote(layout.endpoints)}"
    count = min(ENDPOINTS, layout.nodes + layout.spares)
    lines = [
        "",
        "# The first nodes host the store in which the agents meet: the next one if one is lost.",
        _NODES,
        f"port={_PORT}",
        "endpoints=",
        f'for node in "${{nodes[@]:0:{count}}}"; do',
        '    endpoints+="${endpoints:+,}$node:$port"',
        "done",
    ]
    return "\n".join(lines)


def _plain(layout: Layout) -> str:
    """One task a rank. One that fails leaves the others waiting for it: Slurm must end them."""
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


def _local(layout: Layout) -> dict[str, str]:
    return {key: value or layout.local_tier for key, value in LOCAL.items()} if layout.local_tier else {}
