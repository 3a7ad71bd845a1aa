"""The whole runbook, from looking to the record: examine, then what may be done, then watching it.

Guarantee: without `run`, `yes` or a person's answer nothing is changed but for the record's own file. A run
that is held by somebody, has no rung, no storage or no nodes is never started, whatever was answered; only a
stop that recovery decided on can be overruled.
"""

from __future__ import annotations

import shlex
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Protocol

import msgspec

from holdfast.base import check_output, explain_os_error, replace_atomic
from holdfast.checkpoint.choose import FRESH, REFUSED, checkpoint_root, resolve_plain
from holdfast.checkpoint.format import Progress
from holdfast.errors import ControlError, ExitCode
from holdfast.policy import (
    LIVE,
    Finding,
    Mark,
    Side,
    Stage,
    StorageFacts,
    exit_code,
    storage,
    why_not_started,
)
from holdfast.policy import command as command_finding
from holdfast.record import ControlDirectory, attempt_numbers, launch_to_repeat
from holdfast.recover.action import Started, command_of, drain, settings_of
from holdfast.recover.aftermath import ResumeWatch
from holdfast.recover.examine import (
    ATTEMPTS,
    Place,
    capacity_now,
    examine,
    rung_findings,
    timeline,
    try_places,
)
from holdfast.recover.facts import recent_lines
from holdfast.recover.resume_check import BAND, Agreement, is_correct
from holdfast.recover.ticket import MARK, Action, Report, Row, check_rows, markdown, rows, verdict

# The runbook for a directory of checkpoints that no run keeps a record of, such as plain DCP.
#
# What stopped the training, on which nodes, and what speaks against a checkpoint is not recorded there, and
# is said to be not known. Storage, the checkpoints themselves and the command are looked at as for any run.


RESUME_FROM = "HOLDFAST_CHECKPOINT_RESUME_FROM"


def recover_plain_root(root: Path, wishes: Wishes, show: Show, reading: Callable[[], Reading]) -> Report:
    """Go through what the runbook can say of it; the report's `exit_code` is what to end with."""
    check_record(wishes)
    with reading() as shown:
        report = _examined_plain(root, wishes, shown)
    for row in rows(report):
        show(row)
    show(Row("", "", report.answer))
    if wishes.run:
        _start_plain(report, wishes, show)
    if write_record(report, wishes):
        show(Row("", "", f"the record is in {wishes.record}"))
    return report


def _examined_plain(root: Path, wishes: Wishes, shown: Reading) -> Report:
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


def _start_plain(report: Report, wishes: Wishes, show: Show) -> None:
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


AGAIN = 2.0
"""Seconds between two looks for nodes."""
LOOK = 0.5
"""Seconds between two looks at the journal, and at what was started."""


class Wishes(msgspec.Struct, frozen=True, kw_only=True):
    """What was asked for on the command line."""

    run: bool = False
    yes: bool = False
    watch: bool | None = None
    """None: what is started here is watched."""
    timeout: float = 3600.0
    """Seconds for which a resume is watched."""
    wait: float = 600.0
    """Seconds for which nodes are waited for, where there are too few to start."""
    band: float = BAND
    """By how much longer a step may take than before the stop."""
    mtbf_hours: float = 0.0
    """Hours between failures, as somebody knows it; 0 takes the setting, or what was measured."""
    record: Path | None = None
    overwrite: bool = False
    """Of the record: a file that is no earlier one may be replaced."""
    root: Path | None = None
    remote: str | None = None
    ranks: int | None = None
    quick: bool = False
    command: Sequence[str] = ()
    by: str = ""
    to_stderr: bool = False


Show = Callable[[Row], None]
Ask = Callable[[str], bool | None]
"""A question to a person; None if there is none to ask."""


class Reading(Protocol):
    """Shows how far the reading of checkpoints has come, while it is open."""

    advance: Progress | None

    def __enter__(self) -> Reading: ...

    def __exit__(self, *exception: object) -> None: ...


def recover_run(
    control: ControlDirectory, wishes: Wishes, show: Show, ask: Ask, reading: Callable[[], Reading]
) -> Report:
    """Go through the runbook; the report's `exit_code` is what to end with."""
    check_record(wishes)  # before anything is started for which there would be no record
    report = _examined(control, wishes, show, reading)
    _drain(control, report, wishes, show, ask)
    show(Row("", "", report.answer))
    if wishes.run and wishes.wait > 0 and report.exit_code == ExitCode.NO_CAPACITY:
        report = _wait(control, report, wishes, show, reading)
    if report.state in LIVE and wishes.watch:
        _watch_live(control, report, wishes, show)
    elif wishes.run and report.state not in (*LIVE, "finished") and _may_start(report, wishes, show, ask):
        _start(control, report, wishes, show)
    if _write(control, report, wishes):
        show(Row("", "", f"the record is in {wishes.record}"))
    return report


def _examined(
    control: ControlDirectory, wishes: Wishes, show: Show, reading: Callable[[], Reading]
) -> Report:
    with reading() as shown:
        report = examine(
            control,
            root=wishes.root,
            remote=wishes.remote,
            given=wishes.command,
            ranks=wishes.ranks,
            quick=wishes.quick,
            starts_here=wishes.run,
            progress=shown.advance,
        )
    for row in rows(report):
        show(row)
    return report


def _wait(
    control: ControlDirectory, report: Report, wishes: Wishes, show: Show, reading: Callable[[], Reading]
) -> Report:
    """Until there are nodes enough, or the deadline has come; then everything is looked at anew, because
    somebody may have started the run meanwhile, or the storage may be gone."""
    show(Row("wait", "yellow", f"for nodes, at most {wishes.wait:g} s (--wait)"))
    began = time.monotonic()
    deadline = began + wishes.wait
    while (found := capacity_now(control, wishes.command)).code and time.monotonic() < deadline:
        time.sleep(min(AGAIN, max(0.0, deadline - time.monotonic())))
    waited = f"{time.monotonic() - began:.0f} s"
    done = [*report.actions, Action(what="wait for nodes", done=not found.code, result=waited)]
    if found.code:
        show(Row("not done", "", f"waited {waited} for nodes: {found.text}"))
        report.actions = done
        return report
    again = _examined(control, wishes, show, reading)
    again.actions = done
    show(Row("", "", again.answer))
    return again


def _drain(control: ControlDirectory, report: Report, wishes: Wishes, show: Show, ask: Ask) -> None:
    if not report.drains:
        return
    names = ", ".join(one.describe() for one in report.drains)
    if wishes.yes or ask(f"Drain {names}?"):
        report.actions += drain(control, report.drains, wishes.by)
    else:
        why = "give --yes to do it"
        report.actions += [
            Action(what=f"drain {one.describe()}", done=False, result=why) for one in report.drains
        ]
    for action in report.actions:
        show(
            Row(
                "done" if action.done else "not done",
                "",
                f"{action.what}: {action.result}".removesuffix(": "),
            )
        )


def _may_start(report: Report, wishes: Wishes, show: Show, ask: Ask) -> bool:
    """Whether the command may be run; asks a person where a person's word counts."""
    refused = why_not_started(
        report.findings, report.answer, known=report.command is not None, submit=report.submit
    )
    if refused is None or (refused.question and (wishes.yes or ask(refused.question))):
        return True
    report.exit_code = refused.code or report.exit_code
    show(Row("not run", "bold red", refused.text))
    return False


def _start(control: ControlDirectory, report: Report, wishes: Wishes, show: Show) -> None:
    assert report.command is not None
    assert report.resolution is not None
    found = report.resolution
    newest = max(attempt_numbers(control), default=0)
    expected = "" if found.chosen == FRESH else found.chosen
    watch = ResumeWatch(
        control,
        Path(found.root),
        after=newest,
        expected=expected,
        band=wishes.band,
        mtbf_hours=_mtbf_hours(control, wishes),
    )
    show(Row("run", "", report.command.shown()))
    started = Started(report.command, to_stderr=wishes.to_stderr)
    report.started = True
    report.actions.append(Action(what="start the run again", done=True))
    deadline = time.monotonic() + wishes.timeout
    watching = wishes.watch is not False
    with started.passing_on():
        while (code := started.poll()) is None:  # as long as the run lives: it is its own bound
            started.wait(LOOK)
            if not watching:
                continue
            watch.poll()
            if watch.over or time.monotonic() >= deadline:
                _judge(report, watch, show)
                _write(control, report, wishes)
                watching = False
    report.ended_with = code
    if wishes.watch is not False:
        watch.poll()
        _judge(report, watch, show)
    report.exit_code = code or (int(ExitCode.FAILED) if report.correct is False else 0)
    report.answer = f"started again, and ended with code {code}"
    show(Row("", "", report.answer))


def _judge(report: Report, watch: ResumeWatch, show: Show) -> None:
    """Say whether the resume was correct, unless the very same was said before."""
    points = watch.points()
    said = [(one.point, one.verdict) for one in report.check]
    report.check, report.correct = points, is_correct(points)
    if [(one.point, one.verdict) for one in points] == said:
        return
    for row in check_rows(points):
        show(row)
    show(Row("", "", verdict(report)))
    mark = {True: Mark.OK, False: Mark.PROBLEM, None: Mark.UNKNOWN}[report.correct]
    wrong = [
        f"{one.point}: expected {one.expected}, found {one.found}"
        for one in points
        if one.verdict is Agreement.NOT_CORRECT
    ]
    kept = [one for one in report.findings if one.stage is not Stage.RESUME]
    report.findings = [*kept, Finding(stage=Stage.RESUME, mark=mark, text=verdict(report), evidence=wrong)]


def _watch_live(control: ControlDirectory, report: Report, wishes: Wishes, show: Show) -> None:
    """Judge the resume of the attempt that runs now, started by whomever."""
    newest = max(attempt_numbers(control), default=0)
    watch = ResumeWatch(
        control,
        wishes.root or checkpoint_root(control),
        after=newest - 1,
        expected=None,
        band=wishes.band,
        mtbf_hours=_mtbf_hours(control, wishes),
    )
    deadline = time.monotonic() + wishes.timeout
    while True:
        watch.poll()
        if watch.over or time.monotonic() >= deadline:
            break
        time.sleep(LOOK)
    _judge(report, watch, show)
    if report.correct is not None:
        report.exit_code = 0 if report.correct else int(ExitCode.FAILED)


def _mtbf_hours(control: ControlDirectory, wishes: Wishes) -> float:
    """As given here, else as the run's own settings have it; 0 if neither has."""
    return wishes.mtbf_hours or settings_of(launch_to_repeat(control), wishes.command).checkpoint.mtbf_hours


def check_record(wishes: Wishes) -> None:
    """Refuse now what the record could not be written to later."""
    if wishes.record is not None:
        check_output(wishes.record, mark=MARK, overwrite=wishes.overwrite)


def write_record(report: Report, wishes: Wishes) -> bool:
    """Write the record, if one was asked for."""
    if wishes.record is None:
        return False
    check_record(wishes)
    try:
        replace_atomic(wishes.record, markdown(report).encode())
    except OSError as error:
        raise ControlError(str(explain_os_error(error, "write", wishes.record))) from error
    return True


def _write(control: ControlDirectory, report: Report, wishes: Wishes) -> bool:
    if wishes.record is not None:
        report.timeline = timeline(recent_lines(control, attempt_numbers(control)[-ATTEMPTS:]))
    return write_record(report, wishes)
