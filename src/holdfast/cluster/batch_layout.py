"""What a job of Slurm is to look like, and what cannot work, refused with the flag's name."""

from __future__ import annotations

import re

import msgspec

from holdfast.errors import UsageError

SIGNAL_EARLIER = 60
"""Seconds by which Slurm may send its signal too early."""
_TIME = re.compile(r"(?:\d{1,4}-\d{1,2}(?::\d{1,2}){0,2}|\d{1,7}(?::\d{1,2}){0,2})", re.ASCII)
_ARRAY = re.compile(r"\d+(-\d+(:\d+)?)?(,\d+(-\d+(:\d+)?)?)*(%\d+)?", re.ASCII)
_WORD = re.compile(r"[A-Za-z0-9_.,:@%+/-]+", re.ASCII)
_INTERPRETER = re.compile(r"(?:.*/)?python[0-9.]*", re.ASCII)


class Layout(msgspec.Struct, frozen=True, kw_only=True):
    """What a job looks like. Empty text and 0 mean that it is left to Slurm."""

    command: list[str]
    """What `holdfast run` takes after its own flags: the script and its arguments. Plain: a whole command."""
    nodes: int = 1
    min_nodes: int = 0
    """Of an elastic run, which goes on with fewer; 0 for exactly `nodes`."""
    spares: int = 0
    """Nodes on top, which wait to take over."""
    gpus_per_node: int = 0
    processes_per_node: int = 0
    time: str = ""
    partition: str = ""
    account: str = ""
    job_name: str = "holdfast"
    array: str = ""
    signal_lead: int = 180
    """Seconds before the time limit at which Slurm signals the script; 0 leaves it to Holdfast alone."""
    local_tier: str = ""
    run_dir: str = ""
    log: str = ""
    plain: bool = False
    """Without `holdfast run`: one task a rank."""
    endpoints: str = ""
    """Where agents meet, if node names are not host names; else the first nodes."""
    holdfast: list[str] = msgspec.field(default_factory=lambda: ["holdfast"])
    """How it is called on the nodes."""
    extra: list[str] = []
    """More lines for sbatch, such as `--mem=0`."""
    setup: list[str] = []
    """Lines of shell before anything starts."""

    @property
    def processes(self) -> int:
        return self.processes_per_node or self.gpus_per_node or 1

    @property
    def survives(self) -> bool:
        """Whether the job can go on without one of its nodes."""
        return self.spares > 0 or 0 < self.min_nodes < self.nodes


def check(layout: Layout) -> None:
    """Raise UsageError for what cannot work, with the flag's name."""
    _check_counts(layout)
    _check_texts(layout)
    _check_command(layout)


def _check_counts(layout: Layout) -> None:
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
            "--plain with --spares or --min-nodes: only `holdfast run` can put a spare in, or go on with "
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


def _check_texts(layout: Layout) -> None:
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
            raise UsageError(f"--sbatch {line[:80]!r}: give one option of sbatch, as --sbatch=--mem=0")
    for flag, texts in (("--setup", layout.setup), ("--holdfast", layout.holdfast)):
        if not all(text.strip() and text.isprintable() for text in texts) or (
            flag == "--holdfast" and not texts
        ):
            raise UsageError(f"{flag}: give one line of shell that is not empty")
    for flag, text in (("--run-dir", layout.run_dir), ("--local-tier", layout.local_tier)):
        if not text.isprintable() and text:
            raise UsageError(f"{flag} {text[:80]!r}: a path on one line")
    if layout.local_tier and not layout.local_tier.startswith("/"):
        raise UsageError(f"--local-tier {layout.local_tier}: give an absolute path, as /dev/shm/holdfast-me")
    if layout.array and not layout.run_dir:
        raise UsageError(
            "--array without --run-dir: every task is a run of its own and needs a place below it"
        )


def _check_command(layout: Layout) -> None:
    command = layout.command
    if not command:
        raise UsageError("no training command: write it after `--`, as `-- train.py --steps 1000`")
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
