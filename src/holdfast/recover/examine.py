"""The runbook up to the command it would run: every stage from what stopped the run to the rung.

Changes nothing; the storage is tried with a file of its own, which is removed again.
"""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from pathlib import Path

from holdfast.checkpoint import manifest as manifests
from holdfast.checkpoint.identity import CheckpointRoot
from holdfast.checkpoint.manifest import ManifestError
from holdfast.checkpoint.resolution import BAD, FRESH, LOCAL, NO_RUNG, REFUSED, Resolution
from holdfast.checkpoint.resolver import resolve_resume
from holdfast.checkpoint.storage_probe import probe
from holdfast.checkpoint.verify import Progress
from holdfast.control.attempts import attempt_numbers
from holdfast.control.directory import ControlDirectory
from holdfast.control.launches import launch_to_repeat
from holdfast.control.operator import budget_reset
from holdfast.errors import UsageError
from holdfast.exit_codes import MEANINGS, ExitCode
from holdfast.journal.events import Line, SaveStarted
from holdfast.journal.render import condense, plural, printable, render, size
from holdfast.observe.status import Status, look
from holdfast.policy.capacity import fit
from holdfast.policy.readiness import StorageFacts, capacity, nodes_to_drain, storage, world
from holdfast.policy.runbook import LIVE, Finding, Mark, Stage, classify, exit_code, side_of, trigger
from holdfast.recover import scheduler
from holdfast.recover.command import command_of, this_node
from holdfast.recover.facts import cluster_of, facts_of, suspected
from holdfast.recover.journalled import recent_lines
from holdfast.recover.report import Command, Moment, Report

MOMENTS = 60
"""Lines of the journal in a record: those before the end tell most."""
ATTEMPTS = 3
"""Whose journals are read."""
PROBE_SECONDS = 60.0


def open_run(path: Path) -> ControlDirectory:
    """The run in a directory; says precisely what is there instead."""
    if not path.exists():
        raise UsageError(f"there is no directory {path}. Give the run's directory (run.dir, --run-dir)")
    if not path.is_dir():
        raise UsageError(f"{path} is a file, not a run's directory. Give the run's --run-dir")
    if not (path / "run.json").exists():
        names = os.listdir(path)
        if not names:
            what = "is empty: no run was ever started there, so there is nothing to recover"
        else:
            what = "is not a run's directory: it has no run.json"
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
    progress: Progress | None = None,
) -> Report:
    """Every stage, in the order of the runbook."""
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
    started = launch_to_repeat(control, node=this_node())
    cluster = cluster_of(control, started)
    drains, nodes = nodes_to_drain(suspected(control, lines, budget_reset(control) or 0), cluster)
    report.drains = drains
    out = {one.node for one in cluster.excluded if one.device is None} | {one.node for one in drains}
    findings += [nodes, capacity(cluster, drains, *scheduler.free_nodes(started, out))]
    repeats = started is not None and not given
    found = resolve_resume(
        control.path,
        root=root,
        remote=remote,
        resume_from=started.resume_from if started is not None and repeats else "auto",
        force=started is not None and repeats and started.force,
        quick=quick,
        progress=progress,
    )
    report.resolution = found
    findings.append(storage(_storage(control, found), found.storage_alarm))
    findings += _rung_findings(found)
    usable = fit(cluster, cluster.max_nodes or len(cluster.nodes))
    count = len(usable.nodes) if cluster.may_shrink and usable.nodes and not usable.missing else None
    command = command_of(started, given, count)
    report.command = command
    if found.chosen not in (FRESH, REFUSED):
        wanted = ranks if ranks is not None else command.world if command is not None else None
        findings.append(world(found.world, wanted, shared=_shared(found)))
    elsewhere = "" if given else scheduler.must_be_submitted(started)
    report.submit = elsewhere
    findings.append(_command_finding(control, command, elsewhere))
    report.exit_code = exit_code(findings)
    report.answer = _answer(report, status)
    return report


def _storage(control: ControlDirectory, found: Resolution) -> list[StorageFacts]:
    root = CheckpointRoot(Path(found.root))
    places = [_tried(control.path, "the run's memory", ExitCode.CONTROL_UNUSABLE, 0)]
    if root.path.is_dir() and (root.marker.exists() or not found.candidates):
        needed = max((row.bytes for row in found.candidates), default=0)
        return [_tried(root.path, "the checkpoints", ExitCode.SAVE_FAILED, needed), *places]
    if not found.candidates:
        return places  # nothing was ever kept there; a start creates it
    problem = "is not the directory that they were saved to; is its file system mounted?"
    if not root.path.is_dir():
        problem = "there is no such directory; is its file system mounted?"
    return [StorageFacts(place=found.root, what="the checkpoints", problem=problem), *places]


def _tried(path: Path, what: str, code: ExitCode, needed: int) -> StorageFacts:
    problem = printable(probe(path, PROBE_SECONDS), 1000)
    return StorageFacts(
        place=str(path), what=what, problem=problem, free=_free(path), needed=needed, code=int(code)
    )


def _free(path: Path) -> int | None:
    try:
        found = os.statvfs(path)
    except OSError:
        return None
    return found.f_bavail * found.f_frsize


def _rung_findings(found: Resolution) -> list[Finding]:
    """Where candidates are, what verifying them showed, and which one is used, in three findings."""
    rungs = [row for row in found.candidates if row.verdict != NO_RUNG]
    others = [row for row in found.candidates if row.verdict == NO_RUNG]
    where = f"{plural(len(rungs), 'rung')} under {found.root}"
    elsewhere = [f"{row.name}: {row.local}, as recorded" for row in rungs if row.local]
    unseen = [f"could not be looked at: {text}" for text in found.unseen]
    kept_out = [f"no rung: {row.name}: {'; '.join(row.reasons)}" for row in others]
    located = Finding(
        stage=Stage.LOCATE,
        mark=Mark.NOTE if unseen else Mark.OK,
        text=where,
        evidence=[*elsewhere, *unseen, *kept_out],
    )
    bad = [row for row in rungs if row.verdict == BAD]
    how = (
        "every byte that was read matches"
        if found.digests_read
        else "names and sizes fit; digests were not read"
    )
    verified = Finding(
        stage=Stage.VERIFY,
        mark=Mark.NOTE if bad else Mark.OK,
        text=f"{plural(len(bad), 'rung')} failed" if bad else how if rungs else "nothing to verify",
        evidence=[f"{row.name}: {'; '.join(row.reasons)}" for row in bad],
    )
    return [located, verified, _chosen(found, len(bad))]


def _chosen(found: Resolution, bad: int) -> Finding:
    if found.live is not None:  # somebody has claimed it since the first look
        return Finding(
            stage=Stage.RUNG, mark=Mark.PROBLEM, text="none: somebody holds the run now", evidence=found.why,
            code=int(ExitCode.RUN_IS_LIVE), next=MEANINGS[ExitCode.RUN_IS_LIVE][1],
        )  # fmt: skip
    if found.chosen == REFUSED:
        return Finding(
            stage=Stage.RUNG,
            mark=Mark.PROBLEM,
            text="none: no checkpoint may be used",
            evidence=found.why,
            code=found.exit_code or int(ExitCode.NO_VALID_RUNG),
            next=MEANINGS[ExitCode.NO_VALID_RUNG][1],
        )
    if found.chosen == FRESH and found.asked == "fresh":
        return Finding(
            stage=Stage.RUNG,
            mark=Mark.PROBLEM,
            text="none: the last launch was told to start fresh, and would do so again",
            evidence=["checkpoint.resume_from = 'fresh'"],
            code=int(ExitCode.USAGE),
            next="take that setting away to go on from where it was, or give the command after `--`",
        )
    if found.chosen == FRESH:
        text = "a fresh start: no checkpoint was ever kept"
        return Finding(stage=Stage.RUNG, mark=Mark.OK, text=text, evidence=found.why)
    used = next(row for row in found.candidates if row.name == found.chosen)
    told = f", {size(used.bytes)}" if used.bytes else ""
    text = f"step {found.step} from {found.chosen} ({found.tier}{told})"
    below = [f"if its nodes hold it no longer: {found.without_local}"] if used.verdict == LOCAL else []
    why = [line for line in found.why if not line.startswith("not ")]  # those have been told as verified
    passed = [row.name for row in found.candidates if row.verdict == BAD]
    why += [f"passed over: {', '.join(passed)}"] if passed else []
    mark = Mark.NOTE if bad or below else Mark.OK
    return Finding(stage=Stage.RUNG, mark=mark, text=text, evidence=[*why, *below])


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


def _command_finding(control: ControlDirectory, command: Command | None, elsewhere: str) -> Finding:
    if command is None:
        return Finding(
            stage=Stage.COMMAND,
            mark=Mark.UNKNOWN,
            text="not known: the run was not started by `holdfast run`",
            next="start it as before, or give the command after `--`",
        )
    evidence = (
        [f"set for the last launch, and not here: {', '.join(command.missing)}"] if command.missing else []
    )
    if elsewhere:
        evidence.append(elsewhere)
    elif command.nodes > 1:
        evidence.append(f"on each of {command.nodes} nodes, or through the batch script again")
    wrong = "" if elsewhere else _starts_something_else(control, command)
    if wrong:
        return Finding(
            stage=Stage.COMMAND,
            mark=Mark.PROBLEM,
            text=command.shown(),
            evidence=[wrong],
            code=int(ExitCode.USAGE),
            next="give the command that starts this run after `--`",
        )
    mark = Mark.NOTE if evidence else Mark.OK
    return Finding(stage=Stage.COMMAND, mark=mark, text=command.shown(), evidence=evidence)


def _starts_something_else(control: ControlDirectory, command: Command) -> str:
    """Why the command would not start this run; empty if it would, as far as that is known."""
    if not Path(command.directory).is_dir():
        return f"{command.directory} is not there"
    if command.run_dir and Path(command.run_dir).resolve() != control.path.resolve():
        return f"it starts the run in {command.run_dir}, of which this is a copy, or which was moved"
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
