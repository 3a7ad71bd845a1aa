"""The runbook up to the command it would run: every stage from what stopped the run to the rung.

Changes nothing; the storage is tried with a file of its own, which is removed again.
"""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec

from holdfast.checkpoint import manifest as manifests
from holdfast.checkpoint.manifest import ManifestError
from holdfast.checkpoint.plain import is_plain_root
from holdfast.checkpoint.resolution import Resolution
from holdfast.checkpoint.resolver import checkpoint_root, resolve_resume, run_of_root
from holdfast.checkpoint.verify import Progress
from holdfast.cluster.node_name import node_name
from holdfast.control.attempts import attempt_numbers
from holdfast.control.directory import ControlDirectory
from holdfast.control.launches import LaunchRecord, launch_to_repeat
from holdfast.control.operator import budget_reset
from holdfast.errors import ControlError, UsageError
from holdfast.health.mounts import why_not_first
from holdfast.journal.events import Line, SaveStarted
from holdfast.journal.render import condense, printable, render
from holdfast.observe.status import Status, look
from holdfast.policy.capacity import Cluster
from holdfast.policy.readiness import (
    Drain,
    capacity,
    command,
    nodes_to_drain,
    nodes_to_start_with,
    storage,
    world,
)
from holdfast.policy.runbook import LIVE, Finding, classify, exit_code, side_of, trigger
from holdfast.policy.rungs import FRESH, REFUSED, rung_findings
from holdfast.recover import scheduler
from holdfast.recover.command import command_of, settings_of
from holdfast.recover.facts import cluster_of, facts_of, suspected
from holdfast.recover.journalled import recent_lines
from holdfast.recover.places import looked_at, storage_facts, try_places
from holdfast.recover.report import Command, Moment, Report

MOMENTS = 60
"""Lines of the journal in a record: those before the end tell most."""
ATTEMPTS = 3
"""Whose journals are read."""


def open_run(path: Path) -> ControlDirectory | None:
    """The run in a directory, None if only checkpoints lie there; says precisely what is there instead."""
    return looked_at(path, lambda: _opened(path))


def _opened(path: Path) -> ControlDirectory | None:
    if is_plain_root(path):
        return run_of_root(path)
    lost = "" if (path / "run.json").exists() or path.is_file() else why_not_first(path)
    if lost and (not path.exists() or not os.listdir(path)):
        raise ControlError(f"there is no run in {path}, and this is no first start: {lost}")
    if not path.exists():
        raise UsageError(f"there is no directory {path}. Give the run's directory (run.dir, --run-dir)")
    if not path.is_dir():
        raise UsageError(f"{path} is a file, not a run's directory. Give the run's --run-dir")
    if not (path / "run.json").exists():
        names = os.listdir(path)
        if not names:
            what = "is empty: nothing in it tells of a run, so there is nothing to recover from"
        else:
            what = "is not a run's directory: it has no run.json, and no checkpoints lie in it"
        raise UsageError(f"{path} {what}. Give the run's directory (run.dir, --run-dir)")
    return ControlDirectory.open(path)


def examine(
    control: ControlDirectory,
    *,
    root: Path | None = None,
    remote: str | None = None,
    given: Sequence[str] = (),
    ranks: int | None = None,
    quick: bool = False,
    starts_here: bool = False,
    progress: Progress | None = None,
) -> Report:
    """Every stage, in the order of the runbook. `starts_here`: the command is to be run on this machine."""
    status = look(control)
    lines = recent_lines(control, attempt_numbers(control)[-ATTEMPTS:])
    facts = facts_of(control, status, lines)
    findings = [trigger(facts), classify(facts)]
    report = Report(
        at=time.time(),
        run=control.run_id,
        run_dir=str(control.path),
        state=status.state,
        cause=str(side_of(facts)),
        findings=findings,
        exit_code=exit_code(findings),
        answer="",
        timeline=timeline(lines),
    )
    if status.state in LIVE or status.state == "finished":
        report.answer = _answer(report, status)
        return report
    started = launch_to_repeat(control, node=node_name())
    staffed = _staffed(control, lines, started, given, starts_here=starts_here)
    cluster, report.drains = staffed.cluster, staffed.drains
    findings += [staffed.nodes, staffed.capacity]
    repeats = started is not None and not given
    memory, kept = try_places(control.path, root.absolute() if root is not None else checkpoint_root(control))
    found = None
    if not memory.hangs and not kept.hangs:
        found = resolve_resume(
            control.path,
            root=kept.path,
            remote=remote,
            resume_from=started.resume_from if started is not None and repeats else "auto",
            force=started is not None and repeats and started.force,
            quick=quick,
            progress=progress,
        )
    report.resolution = found
    findings.append(
        storage(
            storage_facts(memory, kept, found, begun=_begun(control)),
            found.storage_alarm if found is not None else [],
        )
    )
    findings += rung_findings(found)
    report.command = command_of(started, given, nodes_to_start_with(cluster, report.drains))
    if found is not None and found.chosen not in (FRESH, REFUSED):
        wanted = ranks if ranks is not None or report.command is None else report.command.world
        findings.append(world(found.world, wanted, shared=_shared(found)))
    report.submit = "" if given else scheduler.must_be_submitted(started)
    findings.append(_command_finding(control, report.command, report.submit))
    report.exit_code = exit_code(findings)
    report.answer = _answer(report, status)
    return report


class _Staffed(NamedTuple):
    cluster: Cluster
    drains: list[Drain]
    nodes: Finding
    capacity: Finding


def _staffed(
    control: ControlDirectory,
    lines: list[Line],
    started: LaunchRecord | None,
    given: Sequence[str],
    *,
    starts_here: bool,
) -> _Staffed:
    """Which nodes there are, which of them are to be drained, and whether the rest suffices.

    This machine counts where the command would be run on it: always for a run of one node, unless its
    scheduler says where it runs. A login node from which others are looked at is no node of theirs.
    """
    named = settings_of(started, given).launch.node_name
    here = "" if scheduler.must_be_submitted(started) and not given else node_name(named)
    cluster = cluster_of(control, started, here)
    if not starts_here and max(cluster.max_nodes, cluster.min_nodes, len(cluster.nodes)) > 1:
        cluster = msgspec.structs.replace(cluster, spares=[])
    drains, nodes = nodes_to_drain(suspected(control, lines, budget_reset(control) or 0), cluster)
    out = {one.node for one in cluster.excluded if one.device is None}
    out |= {one.node for one in drains if one.device is None}
    enough = capacity(cluster, drains, scheduler.offered_nodes(started, out))
    return _Staffed(cluster, drains, nodes, enough)


def capacity_now(control: ControlDirectory, given: Sequence[str]) -> Finding:
    """Whether there are nodes enough to start it here by now."""
    lines = recent_lines(control, attempt_numbers(control)[-ATTEMPTS:])
    started = launch_to_repeat(control, node=node_name())
    return _staffed(control, lines, started, given, starts_here=True).capacity


def _begun(control: ControlDirectory) -> bool:
    """Whether a rank has ever begun to train, from a checkpoint or from nothing."""
    return any((control.attempt(number) / "head.json").exists() for number in attempt_numbers(control))


def _shared(found: Resolution) -> bool | None:
    """Whether the data position of the chosen checkpoint is a global one, as its manifest has it."""
    if found.path is None or found.tier != "global":
        return None
    try:
        manifest, _ = manifests.read(Path(found.path))
    except ManifestError:
        return None
    part = manifest.parts.get("data")
    return part.is_global if part is not None else None


def _command_finding(control: ControlDirectory, found: Command | None, submit: str) -> Finding:
    if found is None:
        return command(None)
    wrong = "" if submit else _starts_something_else(control, found)
    return command(found.shown(), nodes=found.nodes, missing=found.missing, submit=submit, wrong=wrong)


def _starts_something_else(control: ControlDirectory, command: Command) -> str:
    """Why the command would not start this run; empty if it would, as far as that is known."""
    directory, run_dir = Path(command.directory), command.run_dir
    try:
        if not looked_at(directory, directory.is_dir):
            return f"{command.directory} is not there"
        if run_dir and looked_at(Path(run_dir), Path(run_dir).resolve) != control.path.resolve():
            return f"it starts the run in {run_dir}, of which this is a copy, or which was moved"
    except ControlError as error:
        return str(error)
    return ""


def _answer(report: Report, status: Status) -> str:
    if status.state == "finished":
        return f"finished after step {status.step}: there is nothing to resume" if status.step else "finished"
    if status.state in LIVE:
        return f"alive: {report.findings[0].evidence[0] if report.findings[0].evidence else status.state}"
    in_the_way = next((one for one in report.findings if one.code and one.code == report.exit_code), None)
    found = report.resolution
    if in_the_way is not None:
        return f"cannot be resumed yet ({in_the_way.stage}): {in_the_way.text}"
    assert found is not None
    if found.chosen == FRESH:
        return "can be started: it begins anew"
    return f"can be resumed at step {found.step}, from {found.chosen}"


def timeline(lines: list[Line]) -> list[Moment]:
    """What the journal tells of the last attempts, a line each."""
    return [
        Moment(at=line.at, attempt=line.attempt, who=printable(line.who), text=render(line.body).text)
        for line in condense(line for line in lines if not isinstance(line.body, SaveStarted))[-MOMENTS:]
    ]
