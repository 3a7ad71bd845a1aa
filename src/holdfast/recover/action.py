"""The command that starts a run again, and acting on it: draining nodes, asking the scheduler, running it.

Guarantee: nothing here is called without a person's word (`--yes`, or an answer). A node is durably excluded
from the run before the scheduler is asked to drain it, so that the run does without it in any case.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from holdfast.cluster import current_job, job_record, node_records, partition_nodes
from holdfast.cluster import drain as drain_node
from holdfast.config import Settings, load, parse_assignments
from holdfast.errors import HoldfastError, UsageError
from holdfast.policy import NodeDrain, NodeOffer
from holdfast.record import ControlDirectory, LaunchRecord, operator
from holdfast.recover.ticket import ActionTaken, Command

# The command that starts a run again: how many ranks it would have, and with which settings.


def command_of(
    started: LaunchRecord | None,
    given: Sequence[str],
    nodes: int | None,
    environ: Mapping[str, str] = os.environ,
) -> Command | None:
    """The command given on the command line, else that of the last launch; None if neither is known.

    `nodes`: how many would take part, if that is known.
    """
    if given:
        per_node, wanted = _asked(given)
        count = wanted or 1
        world = per_node * count if per_node else None
        return Command(argv=list(given), directory=str(Path.cwd()), source="given", world=world, nodes=count)
    if started is None:
        return None
    count = nodes or started.max_nodes
    per_node = started.workers_per_node
    return Command(
        argv=started.command(),
        directory=started.directory,
        source="launch",
        world=per_node * count if per_node else None,
        nodes=count,
        run_dir=started.run_dir,
        missing=[name for name in started.environment if name not in environ],
    )


def settings_of(
    started: LaunchRecord | None, given: Sequence[str], environ: Mapping[str, str] = os.environ
) -> Settings:
    """The settings that the command would run with, by its flags, their file and the environment here.

    A command whose settings cannot be read is refused when it starts; until then the defaults count.
    """
    argv: Sequence[str] = given or (started.argv if started is not None else [])
    directory = Path(started.directory) if started is not None and not given else Path.cwd()
    wanted = parse_words(argv, "--set")
    file = next(reversed(parse_words(argv, "--config")), None)
    try:
        return load(
            directory / file if file else None, environ=environ, command_line=parse_assignments(wanted)
        ).settings
    except (HoldfastError, OSError):
        return Settings()


def parse_words(argv: Sequence[str], flag: str) -> list[str]:
    """All values that a flag was given."""
    found: list[str] = []
    for at, word in enumerate(argv):
        if word.startswith(f"{flag}="):
            found.append(word.partition("=")[2])
        elif word == flag and at + 1 < len(argv):
            found.append(argv[at + 1])
    return found


def _asked(argv: Sequence[str]) -> tuple[int, int]:
    """(workers per node, nodes) as the flags of `holdfast run` or torchrun say; 0 if they do not."""
    values: dict[str, str] = {}
    for at, word in enumerate(argv):
        name, equals, value = word.partition("=")
        name = name.lstrip("-").replace("_", "-")
        if word.startswith("-") and name in ("nproc-per-node", "nnodes"):
            values[name] = value if equals else argv[at + 1] if at + 1 < len(argv) else ""
    launched = any(Path(word).name in ("holdfast", "torchrun", "run") for word in argv[:4])
    workers = values.get("nproc-per-node", "1" if launched else "")
    nodes = values.get("nnodes", "1").rpartition(":")[2]
    return int(workers) if workers.isdecimal() else 0, int(nodes) if nodes.isdecimal() else 0


PASSED_ON = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)


def drain(control: ControlDirectory, drains: Sequence[NodeDrain], by: str) -> list[ActionTaken]:
    """Take nodes out of the run and, if there is a scheduler, out of service."""
    done: list[ActionTaken] = []
    for one in drains:
        reason = f"holdfast recover: {one.reason}"
        try:
            operator.ask_to_exclude(control, one.node, one.device, reason, by)
        except HoldfastError as error:
            done.append(ActionTaken(what=f"exclude {one.describe()}", done=False, result=str(error)))
            continue
        done.append(ActionTaken(what=f"exclude {one.describe()} from the run", done=True, result=one.reason))
        if one.device is None and (asked := drain_by_scheduler(one.node, reason)) is not None:
            done.append(asked)
    return done


class StartedCommand:
    """The command, as a child in its own process group: the terminal's signals reach it once, through us."""

    def __init__(self, command: Command, *, to_stderr: bool, extra: Mapping[str, str] | None = None) -> None:
        """`to_stderr`: its output must not mix with ours; `extra`: additional variables for it."""
        out = sys.stderr.fileno() if to_stderr else None
        try:
            self._process = subprocess.Popen(
                command.argv,
                cwd=command.directory,
                stdout=out,
                process_group=0,
                env={**os.environ, **(extra or {})},
            )
        except OSError as error:
            raise UsageError(
                f"cannot run {command.argv[0]} in {command.directory}: {error.strerror or error}. "
                "Give the command after `--`"
            ) from error

    def poll(self) -> int | None:
        """Its exit code as a shell would show it; None while it runs."""
        code = self._process.poll()
        return None if code is None else code if code >= 0 else 128 - code

    def wait(self, seconds: float) -> None:
        """Wait until it has ended, at most so many seconds."""
        try:
            self._process.wait(seconds)
        except subprocess.TimeoutExpired:
            return

    @contextmanager
    def passing_on(self) -> Iterator[None]:
        """Within this context, signals sent to this process go on to the command."""

        def hand_on(number: int, frame: object) -> None:
            del frame
            self._process.send_signal(number)

        before = {number: signal.signal(number, hand_on) for number in PASSED_ON}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)


# What the scheduler adds to the runbook: nodes that are free, nodes to take out of service, where to start.
#
# Quiet where there is no Slurm; every question to it has a deadline, and no answer means "not known".


_FREE = re.compile(r"\bIDLE\b")


def offered_nodes(
    started: LaunchRecord | None, without: Collection[str], environ: Mapping[str, str] = os.environ
) -> NodeOffer | None:
    """The nodes that could be had now; None if there is no scheduler, or no answer.

    Inside a job these are its own nodes; otherwise the idle nodes of the last launch's partition.
    """
    job = current_job(environ)
    if job is not None:
        usable = [node for node in job.nodes if node not in without]
        return NodeOffer(by=f"Slurm job {job.label}", nodes=len(usable), queues=False) if job.nodes else None
    if started is None or not started.job:
        return None
    last = job_record(started.job)
    names = partition_nodes(last.partition) if last is not None and last.partition else None
    if names is None:
        return None
    found = node_records(names)
    free = [one for one in found.values() if one.usable and _FREE.search(one.state.upper())]
    return NodeOffer(by="Slurm", nodes=len([one for one in free if one.name not in without]), queues=True)


def drain_by_scheduler(node: str, reason: str) -> ActionTaken | None:
    """Have Slurm start nothing more on a node; None if it knows no such node."""
    known = node_records([node]).get(node)
    if known is None:
        return None
    what = f"drain {node} in Slurm"
    if not known.usable:
        return ActionTaken(what=what, done=True, result=f"it is {known.state} already: {known.reason}")
    reply = drain_node(node, reason)
    return ActionTaken(what=what, done=reply.ok, result=reply.text or reason)


def must_be_submitted(started: LaunchRecord | None, environ: Mapping[str, str] = os.environ) -> str:
    """How to start a run that belongs in Slurm, if this is not inside a job; empty if it may start here."""
    if started is None or not started.job or current_job(environ) is not None:
        return ""
    return (
        f"the last launch was in Slurm job {started.job}: submit its batch script again, or `scontrol "
        f"requeue {started.job}` while Slurm knows it; then `holdfast recover RUN --watch` judges the resume"
    )
