"""The runbook for a directory of checkpoints that no run keeps a record of, such as plain DCP.

What stopped the training, on which nodes, and what speaks against a checkpoint is not recorded there, and is
said to be not known. Storage, the checkpoints themselves and the command are looked at as for any run.
"""

from __future__ import annotations

import shlex
import time
from collections.abc import Callable, Mapping
from pathlib import Path

from holdfast.checkpoint.plain import resolve_plain
from holdfast.policy.readiness import StorageFacts, storage
from holdfast.policy.readiness import command as command_finding
from holdfast.policy.runbook import Finding, Mark, Side, Stage, exit_code, why_not_started
from holdfast.policy.rungs import REFUSED, rung_findings
from holdfast.recover.acting import Started
from holdfast.recover.command import command_of
from holdfast.recover.conduct import LOOK, Reading, Show, Wishes, check_record, write_record
from holdfast.recover.places import Place, try_places
from holdfast.recover.report import Action, Report
from holdfast.recover.text import Row, rows

RESUME_FROM = "HOLDFAST_CHECKPOINT_RESUME_FROM"


def conduct_plain(root: Path, wishes: Wishes, show: Show, reading: Callable[[], Reading]) -> Report:
    """Go through what the runbook can say of it; the report's `exit_code` is what to end with."""
    check_record(wishes)
    with reading() as shown:
        report = _examined(root, wishes, shown)
    for row in rows(report):
        show(row)
    show(Row("", "", report.answer))
    if wishes.run:
        _start(report, wishes, show)
    if write_record(report, wishes):
        show(Row("", "", f"the record is in {wishes.record}"))
    return report


def _examined(root: Path, wishes: Wishes, shown: Reading) -> Report:
    (place,) = try_places(root.absolute())
    found = None if place.hangs else resolve_plain(root, quick=wishes.quick, progress=shown.advance)
    told = "not known: no run keeps a record here"
    findings = [
        Finding(stage=Stage.TRIGGER, mark=Mark.UNKNOWN, text=told),
        Finding(stage=Stage.CLASSIFY, mark=Mark.UNKNOWN, text=f"{Side.UNKNOWN}: {told}"),
        _storage(place, found.storage_alarm if found is not None else []),
        *rung_findings(found),
    ]
    command = command_of(None, wishes.command, None)
    findings.append(command_finding(command.shown() if command is not None else None))
    code = exit_code(findings)
    stands = next((one for one in findings if one.code == code and code), None)
    answer = f"cannot be resumed yet ({stands.stage}): {stands.text}" if stands is not None else ""
    if found is not None and found.chosen != REFUSED and not answer:
        answer = (
            f"can be resumed at step {found.step}, from {found.chosen}: start a run with "
            f"--set checkpoint.resume_from={shlex.quote(found.path or '')}"
        )
    return Report(
        at=time.time(),
        run="",
        run_dir=str(root),
        state="unknown",
        cause=str(Side.UNKNOWN),
        findings=findings,
        exit_code=code,
        answer=answer,
        resolution=found,
        command=command,
    )


def _storage(place: Place, alarm: list[str]) -> Finding:
    """What cannot be written can be resumed from all the same: the run saves to a root of its own."""
    if place.problem and not place.hangs:
        text = "can be read; a run that starts from it needs a root of its own"
        told = [f"{place.path}: {place.problem}", *(f"cannot be used: {name}" for name in alarm)]
        return Finding(stage=Stage.STORAGE, mark=Mark.NOTE, text=text, evidence=told)
    facts = StorageFacts(
        place=str(place.path), what="the checkpoints", problem=place.problem, free=place.free
    )
    return storage([facts], alarm)


def _start(report: Report, wishes: Wishes, show: Show) -> None:
    refused = why_not_started(report.findings, report.answer, known=report.command is not None, submit="")
    if refused is not None:
        report.exit_code = refused.code or report.exit_code
        show(Row("not run", "bold red", refused.text))
        return
    assert report.command is not None
    assert report.resolution is not None
    extra: Mapping[str, str] = {RESUME_FROM: report.resolution.path or ""}
    show(Row("run", "", f"{RESUME_FROM}={shlex.quote(extra[RESUME_FROM])} {report.command.shown()}"))
    started = Started(report.command, to_stderr=wishes.to_stderr, extra=extra)
    report.started = True
    report.actions.append(Action(what="start from this checkpoint", done=True))
    with started.passing_on():
        while (code := started.poll()) is None:  # as long as it lives: it is its own bound
            started.wait(LOOK)
    report.ended_with = report.exit_code = code
    report.answer = f"started, and ended with code {code}"
    show(Row("", "", report.answer))
