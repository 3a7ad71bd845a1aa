"""The runbook up to the command it would run: every stage from what stopped the run to the rung.

Changes nothing; the storage is tried with a file of its own, which is removed again.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple, TypeVar

import msgspec

from holdfast.base import Bounded, plural, printable, size
from holdfast.checkpoint.choose import (
    BAD,
    FRESH,
    LOCAL,
    NO_RUNG,
    PROBE_SIZE,
    REFUSED,
    USED,
    Resolution,
    RungOutlook,
    checkpoint_root,
    first_of,
    is_plain_root,
    resolve_resume,
    run_of_root,
)
from holdfast.checkpoint.format import CheckpointRoot, ManifestError, Progress
from holdfast.checkpoint.format import manifest as manifests
from holdfast.cluster import node_name
from holdfast.errors import MEANINGS, ControlError, ExitCode, UsageError
from holdfast.health import try_storage, why_not_first
from holdfast.journal import JournalLine, condense
from holdfast.journal.events import SaveStarted
from holdfast.observe import Status, status_of
from holdfast.policy import (
    LIVE,
    Cluster,
    Finding,
    NodeDrain,
    Stage,
    StageMark,
    StorageFacts,
    capacity,
    classify,
    command,
    exit_code,
    nodes_to_drain,
    nodes_to_start_with,
    side_of,
    storage,
    trigger,
    world,
)
from holdfast.record import ControlDirectory, LaunchRecord, attempt_numbers, budget_reset, launch_to_repeat
from holdfast.recover import action as scheduler
from holdfast.recover.action import command_of, settings_of
from holdfast.recover.facts import cluster_of, facts_of, recent_lines, suspected
from holdfast.recover.ticket import Command, Moment, RecoverReport

# Trying the directories that hold a run, before anything is read from them.
#
# Guarantee: never longer than its deadline. A file system whose server is gone makes whoever merely looks at
# it wait for ever; what is on it can then be neither read nor chosen, and the report says so.


SECONDS = 60.0
"""Seconds that a file system has to answer: an fsync may wait behind a checkpoint that is being written."""

T = TypeVar("T")


class TriedPlace(msgspec.Struct, frozen=True, kw_only=True):
    """A directory, and what trying it showed."""

    path: Path
    there: bool = False
    marked: bool | None = None
    """Whether it carries the mark of a checkpoint root; None if that could not be seen."""
    hangs: bool = False
    problem: str = ""
    """Why it does not accept and return what is written; empty if it does, or is not there."""
    free: int | None = None


def try_places(*paths: Path) -> list[TriedPlace]:
    """Try all of them at the same time."""
    deadline = time.monotonic() + SECONDS
    trying = [(path, Bounded(partial(_try, path), "place")) for path in paths]
    return [
        one.result()
        if one.ended(deadline - time.monotonic())
        else TriedPlace(path=path, hangs=True, problem=_hangs())
        for path, one in trying
    ]


def _try(path: Path) -> TriedPlace:
    try:
        if not path.is_dir():
            return TriedPlace(path=path)
        marked = CheckpointRoot(path).marker.exists()
        info = os.statvfs(path)
    except OSError as error:
        return TriedPlace(path=path, there=True, problem=f"cannot be looked at: {error.strerror or error}")
    problem = printable(try_storage(path, PROBE_SIZE).problem, 1000)
    free = info.f_bavail * info.f_frsize
    return TriedPlace(path=path, there=True, marked=marked, problem=problem, free=free)


def _hangs() -> str:
    return f"no answer within {SECONDS:g} s: its file system hangs"


def looked_at(path: Path, look: Callable[[], T]) -> T:
    """The result of looking at a path; ControlError if its file system hangs."""
    looking = Bounded(look, "place")
    if looking.ended(SECONDS):
        return looking.result()
    raise ControlError(f"{path}: {_hangs()}. Look at its server and the mount, then try again")


def storage_facts(
    memory: TriedPlace, root: TriedPlace, found: Resolution | None, *, begun: bool = False
) -> list[StorageFacts]:
    """Facts for the runbook: about the run's directory and, if it ever existed, the checkpoints' place.

    `begun`: a rank has begun, so the root existed and was marked.
    """
    own = StorageFacts(
        place=str(memory.path),
        what="the run's memory",
        problem=memory.problem,
        free=memory.free,
        code=int(ExitCode.CONTROL_UNUSABLE),
    )
    kept = found.candidates if found is not None else []
    if not root.there and not root.hangs and not kept and not begun:
        return [own]  # a start creates it
    problem = root.problem
    if not root.hangs and not root.there:
        problem = "there is no such directory; is its file system mounted?"
    elif (kept or begun) and root.marked is False:
        problem = "is not the directory that they were saved to; is its file system mounted?"
    needed = max((row.bytes for row in kept), default=0)
    checkpoints = StorageFacts(
        place=str(root.path), what="the checkpoints", problem=problem, free=root.free, needed=needed
    )
    return [checkpoints, own]


MOMENTS = 60
"""Journal lines in a record: those before the end tell most."""
ATTEMPTS = 3
"""How many attempts have their journals read."""


def open_run(path: Path) -> ControlDirectory | None:
    """The run in a directory, None if only checkpoints lie there; otherwise an error says precisely what is
    there instead."""
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
) -> RecoverReport:
    """Go through every stage, in the runbook's order. `starts_here`: the command will run on this machine."""
    status = status_of(control)
    lines = recent_lines(control, attempt_numbers(control)[-ATTEMPTS:])
    facts = facts_of(control, status, lines)
    findings = [trigger(facts), classify(facts)]
    report = RecoverReport(
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
        shared, tied = _bound_to_ranks(found)
        findings.append(world(found.world, wanted, shared=shared, tied=tied))
    report.submit = "" if given else scheduler.must_be_submitted(started)
    findings.append(_command_finding(control, report.command, report.submit))
    report.exit_code = exit_code(findings)
    report.answer = _answer(report, status)
    return report


class _Staffed(NamedTuple):
    cluster: Cluster
    drains: list[NodeDrain]
    nodes: Finding
    capacity: Finding


def _staffed(
    control: ControlDirectory,
    lines: list[JournalLine],
    started: LaunchRecord | None,
    given: Sequence[str],
    *,
    starts_here: bool,
) -> _Staffed:
    """Which nodes there are, which of them should be drained, and whether the rest suffices.

    This machine counts if the command would be run on it: always for a run on one node, unless its scheduler
    says where it runs. A login node from which a run is examined is not one of the run's nodes.
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
    """Whether there are now enough nodes to start it here."""
    lines = recent_lines(control, attempt_numbers(control)[-ATTEMPTS:])
    started = launch_to_repeat(control, node=node_name())
    return _staffed(control, lines, started, given, starts_here=True).capacity


def _begun(control: ControlDirectory) -> bool:
    """Whether a rank has ever begun to train, from a checkpoint or from nothing."""
    return any((control.attempt(number) / "head.json").exists() for number in attempt_numbers(control))


def _bound_to_ranks(found: Resolution) -> tuple[bool | None, str]:
    """Whether the data position of the chosen checkpoint is global, and what else ties it to its number of
    ranks, according to its manifest."""
    if found.path is None or found.tier != "global":
        return None, ""
    try:
        manifest, _ = manifests.read(Path(found.path))
    except ManifestError:
        return None, ""
    part = manifest.parts.get("data")
    return part.is_global if part is not None else None, manifests.tied_words(manifest.world.tied)


def _command_finding(control: ControlDirectory, found: Command | None, submit: str) -> Finding:
    if found is None:
        return command(None)
    wrong = "" if submit else _starts_something_else(control, found)
    return command(found.shown(), nodes=found.nodes, missing=found.missing, submit=submit, wrong=wrong)


def _starts_something_else(control: ControlDirectory, command: Command) -> str:
    """Why the command would not start this run; empty if it would, as far as is known."""
    directory, run_dir = Path(command.directory), command.run_dir
    try:
        if not looked_at(directory, directory.is_dir):
            return f"{command.directory} is not there"
        if run_dir and looked_at(Path(run_dir), Path(run_dir).resolve) != control.path.resolve():
            return f"it starts the run in {run_dir}, of which this is a copy, or which was moved"
    except ControlError as error:
        return str(error)
    return ""


def _answer(report: RecoverReport, status: Status) -> str:
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


def timeline(lines: list[JournalLine]) -> list[Moment]:
    """What the journal says about the last attempts, one line per event."""
    return [
        Moment(at=line.at, attempt=line.attempt, who=printable(line.who), text=line.body.render().text)
        for line in condense(line for line in lines if not isinstance(line.body, SaveStarted))[-MOMENTS:]
    ]


# What a resume would make of each checkpoint of a stopped run, as findings of the runbook. Pure.


def rung_findings(found: Resolution | None) -> list[Finding]:
    """Where candidates are, what verifying them showed, and which one is used. None: their storage hangs."""
    if found is None:
        text = "not looked at: what they lie on hangs"
        return [Finding(stage=Stage.LOCATE, mark=StageMark.UNKNOWN, text=text)]
    rungs = [row for row in found.candidates if row.verdict != NO_RUNG]
    bad = [row for row in rungs if row.verdict == BAD]
    return [
        _located(found, rungs),
        _verified(rungs, bad, digests_read=found.digests_read, run=found.run),
        _chosen(found, bad),
    ]


def _located(found: Resolution, rungs: Sequence[RungOutlook]) -> Finding:
    elsewhere = [f"{row.name}: {row.local}, as recorded" for row in rungs if row.local]
    unseen = [f"could not be looked at: {text}" for text in found.unseen]
    kept_out = [
        f"no rung: {row.name}: {'; '.join(row.reasons)}" for row in found.candidates if row.verdict == NO_RUNG
    ]
    return Finding(
        stage=Stage.LOCATE,
        mark=StageMark.NOTE if unseen else StageMark.OK,
        text=f"{plural(len(rungs), 'rung')} under {found.root}",
        evidence=[*elsewhere, *unseen, *kept_out],
    )


def _verified(
    rungs: Sequence[RungOutlook], bad: Sequence[RungOutlook], *, digests_read: bool, run: str
) -> Finding:
    how = "every byte that was read matches" if digests_read else "names and sizes fit; digests were not read"
    used = first_of(rungs, USED)
    if used is not None and used.reasons and not run:  # what was looked at, as there are no digests
        how = used.reasons[0]
    return Finding(
        stage=Stage.VERIFY,
        mark=StageMark.NOTE if bad else StageMark.OK,
        text=f"{plural(len(bad), 'rung')} failed" if bad else how if rungs else "nothing to verify",
        evidence=[f"{row.name}: {'; '.join(row.reasons)}" for row in bad],
    )


def _chosen(found: Resolution, bad: Sequence[RungOutlook]) -> Finding:
    if found.exit_code == ExitCode.RUN_IS_LIVE:  # somebody has claimed it since the first look
        return _none("somebody holds the run now", found.why, ExitCode.RUN_IS_LIVE)
    if found.chosen == REFUSED:
        return _none("no checkpoint may be used", found.why, ExitCode.NO_VALID_RUNG)
    if found.chosen == FRESH and found.asked == "fresh":
        return _none(
            "the last launch was told to start fresh, and would do so again",
            ["checkpoint.resume_from = 'fresh'"],
            ExitCode.USAGE,
            "take that setting away to go on from where it was, or give the command after `--`",
        )
    if found.chosen == FRESH:
        text = "a fresh start: no checkpoint was ever kept"
        return Finding(stage=Stage.RUNG, mark=StageMark.OK, text=text, evidence=found.why)
    used = next(row for row in found.candidates if row.name == found.chosen)
    told = f", {size(used.bytes)}" if used.bytes else ""
    below = [f"if its nodes hold it no longer: {found.without_local}"] if used.verdict == LOCAL else []
    why = [line for line in found.why if not line.startswith("not ")]  # those are reported as verified
    why += [f"passed over: {', '.join(row.name for row in bad)}"] if bad else []
    return Finding(
        stage=Stage.RUNG,
        mark=StageMark.NOTE if bad or below else StageMark.OK,
        text=f"step {found.step} from {found.chosen} ({found.tier}{told})",
        evidence=[*why, *below],
    )


def _none(why: str, evidence: list[str], code: ExitCode, remedy: str = "") -> Finding:
    return Finding(
        stage=Stage.RUNG,
        mark=StageMark.PROBLEM,
        text=f"none: {why}",
        evidence=evidence,
        code=int(code),
        next=remedy or MEANINGS[code][1],
    )
