"""The whole runbook: examine, then do what may be done, then watch the resume until its probation is over.

Guarantee: without `run`, `yes` or a person's answer, nothing but the record's own file is changed. A run that
somebody holds, or that has no rung, no storage or no nodes, is never started, whatever was answered; only a
stop that recovery decided on can be overruled.

It compares what a run had left before its resume with what it does until its probation is over.
"""

from __future__ import annotations

import itertools
import math
import shlex
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Protocol

import msgspec

from holdfast.base import check_output, explain_os_error, replace_atomic
from holdfast.checkpoint.choose import FRESH, REFUSED, REFUSED_STANDINGS, checkpoint_root, resolve_plain
from holdfast.checkpoint.format import CheckpointName, Manifest, ManifestError, Progress, parse_name
from holdfast.checkpoint.format import manifest as manifests
from holdfast.errors import ControlError, ExitCode
from holdfast.journal import JournalLine, JournalReader
from holdfast.journal.events import (
    AttemptEnded,
    AttemptStarted,
    CadenceChosen,
    DataSkipped,
    ProbationEnded,
    Resumed,
    RunFinished,
    SaveCommitted,
)
from holdfast.policy import (
    LIVE,
    Finding,
    Side,
    Stage,
    StageMark,
    StorageFacts,
    exit_code,
    mtbf_of,
    storage,
    why_not_started,
)
from holdfast.policy import command as command_finding
from holdfast.record import (
    CommitRecord,
    ControlDirectory,
    HeadRecord,
    StandingBook,
    attempt_numbers,
    commits_of,
    launch_to_repeat,
    read_record,
    read_timeline,
)
from holdfast.recover.action import StartedCommand, command_of, drain, settings_of
from holdfast.recover.examine import (
    ATTEMPTS,
    TriedPlace,
    capacity_now,
    examine,
    rung_findings,
    timeline,
    try_places,
)
from holdfast.recover.facts import recent_lines, steps_told
from holdfast.recover.resume_check import (
    BAND,
    BeforeResume,
    Correctness,
    Point,
    SinceResume,
    is_correct,
    judge,
)
from holdfast.recover.ticket import (
    MARK,
    ActionTaken,
    RecoverReport,
    TicketRow,
    check_rows,
    markdown,
    rows,
    verdict,
)
from holdfast.train import measured_before

# --- the runbook --------------------------------------------------------------------------------------------

# What a run had left by the time it was resumed, to judge the resume by. Reads only.


COUNTED = 6
"""How many checkpoints have their counts and distances compared."""


def manifest_of(control: ControlDirectory, root: Path, name: CheckpointName) -> Manifest | None:
    """A checkpoint's manifest, from the root or from the local tier's record; None if there is none."""
    for place in (root / str(name), control.path / "local" / str(name)):
        try:
            return manifests.read(place)[0]
        except ManifestError:
            continue
    return None


def before_resume(
    control: ControlDirectory,
    root: Path,
    checkpoint: str,
    *,
    attempts: int,
    world: int | None,
    mtbf_hours: float = 0.0,
) -> BeforeResume:
    """The run as it was up to attempt `attempts`; `checkpoint` is what is resumed from, empty for nothing.

    `mtbf_hours`: as somebody gave it; 0 takes the measured value.
    """
    numbers = [number for number in attempt_numbers(control) if number <= attempts]
    name = parse_name(checkpoint) if checkpoint else None
    seen = measured_before(control, attempts + 1, "")
    mtbf = mtbf_of(seen.running, seen.failures, mtbf_hours * 3600)
    if name is None:
        return BeforeResume(checkpoint=checkpoint, starts=world, mtbf=mtbf.seconds, mtbf_source=mtbf.source)
    manifest = manifest_of(control, root, name)
    records = [one for one in read_timeline(control).on_line if one.step <= name.step]
    if all(one.id != name.id for one in records):  # off the lineage: another has its step
        records = [one for one in records if one.step < name.step]
    recent = sorted(records, key=lambda one: one.step)[-COUNTED:]
    losses, digests = _done_after(control, name, numbers)
    return BeforeResume(
        checkpoint=checkpoint,
        step=name.step,
        window=manifest.windows.loss if manifest is not None else (),
        step_seconds=manifest.windows.step_seconds if manifest is not None else (),
        losses=losses,
        digests=digests,
        samples_per_step=_rates(control, root, recent, "samples"),
        tokens_per_step=_rates(control, root, recent, "tokens"),
        interval=_interval([one.step for one in recent]),
        world=manifest.world.size if manifest is not None else None,
        starts=world,
        mtbf=mtbf.seconds,
        mtbf_source=mtbf.source,
    )


def _done_after(
    control: ControlDirectory, name: CheckpointName, numbers: Sequence[int]
) -> tuple[dict[int, float], dict[int, str]]:
    """Losses and sample digests of the steps after a checkpoint, from the attempts that went on from it.

    An attempt that saved something suspect or condemned after it is no reference.
    """
    book = StandingBook(control)
    comparable = []
    for number in numbers:
        commits = commits_of(control, number)
        head = read_record(control.attempt(number) / "head.json", HeadRecord)
        went_on = (head is not None and head.checkpoint == name.id) or any(
            one.id == name.id for one in commits
        )
        later = [one for one in commits if one.step > name.step]
        if went_on and not any(book.of(one.id) in REFUSED_STANDINGS for one in later):
            comparable.append(number)
    losses: dict[int, float] = {}
    digests: dict[int, str] = {}
    for told in steps_told(recent_lines(control, comparable[-2:])):
        if told.step > name.step and told.loss is not None:
            losses[told.step] = told.loss
        if told.step > name.step and told.samples:
            digests[told.step] = told.samples
    return losses, digests


def _rates(control: ControlDirectory, root: Path, records: Sequence[CommitRecord], count: str) -> list[float]:
    """How many samples or tokens a step had, between successive checkpoints; the first from a fresh start."""
    points: list[tuple[int, int, str]] = []
    for record in records:
        manifest = manifest_of(control, root, CheckpointName(record.step, record.id))
        if manifest is not None:
            points.append((manifest.step, getattr(manifest, count), manifest.counts))
    origin = read_timeline(control).origin
    if len(points) < COUNTED and origin is not None and origin.checkpoint is None and not origin.source:
        points.insert(0, (0, 0, points[0][2] if points else ""))
    return [  # an older release counted only rank 0's: they cannot be compared with the job's
        (b - a) / (after - step)
        for (step, a, whose), (after, b, then) in itertools.pairwise(points)
        if after > step and whose == then
    ]


def _interval(steps: Sequence[int]) -> int:
    """The most frequent number of steps between saves; for a single save, its distance from the start."""
    gaps = [after - step for step, after in itertools.pairwise(steps)] or [*steps[:1]]
    return statistics.mode(gaps) if gaps else 0


class ResumeWatch:
    """Watches one resume: that of the first attempt after number `after` in which a rank resumes."""

    def __init__(
        self,
        control: ControlDirectory,
        root: Path,
        *,
        after: int,
        expected: str | None,
        band: float = BAND,
        mtbf_hours: float = 0.0,
    ) -> None:
        """`expected`: the checkpoint that was predicted, empty for a fresh start; None accepts any.

        `band`: how much longer a step may take than before; `mtbf_hours`: as given, 0 if it was not.
        """
        self._control = control
        self._root = root
        self._after = after
        self._expected = expected
        self._band = band
        self._mtbf_hours = mtbf_hours
        self._reader = JournalReader(control.journal, since=after + 1)
        self._attempt = 0
        """The attempt that is watched; 0 if none has resumed yet."""
        self._lines: list[JournalLine] = []
        self._world: int | None = None
        self._resumed: Resumed | None = None
        self.over = False
        """Whether there is nothing more to wait for: probation or the attempt has ended."""

    def poll(self) -> None:
        """Take in new journal lines."""
        for line in self._reader.poll():
            self._take(line)

    def _take(self, line: JournalLine) -> None:
        if line.attempt <= self._after or (self._attempt and line.attempt != self._attempt):
            return
        self._lines.append(line)
        match line.body:
            case AttemptStarted() if not self._attempt:
                self._world = line.body.world_size
            case Resumed() if self._resumed is None:
                self._attempt, self._resumed = line.attempt, line.body
                self._lines = [one for one in self._lines if one.attempt == line.attempt]
            case ProbationEnded() | RunFinished():
                self.over = True
            case AttemptEnded() if self._attempt == line.attempt:
                self.over = True
            case _:
                pass

    def points(self) -> list[Point]:
        """Whether the resume was correct, as far as is known by now."""
        return judge(self._before(), self._since(), band=self._band)

    def _before(self) -> BeforeResume:
        used = (self._resumed.checkpoint or "") if self._resumed is not None else ""
        expected = self._expected if self._expected is not None else used
        up_to = self._attempt - 1 if self._attempt else self._after
        return before_resume(
            self._control,
            self._root,
            expected,
            attempts=up_to,
            world=self._world,
            mtbf_hours=self._mtbf_hours,
        )

    def _since(self) -> SinceResume:
        if self._resumed is None:
            return SinceResume()
        losses: dict[int, float | None] = {}
        seconds: dict[int, float] = {}
        digests: dict[int, str] = {}
        saves: dict[int, str] = {}
        probation: ProbationEnded | None = None
        finished: RunFinished | None = None
        interval, skipped = 0, False
        for told in steps_told(self._lines):
            seconds[told.step] = told.seconds
            finite = told.loss is not None and math.isfinite(told.loss)
            losses[told.step] = told.loss if finite else None
            if told.samples:
                digests[told.step] = told.samples
        for line in self._lines:
            match line.body:
                case SaveCommitted():
                    saves[line.body.step] = line.body.checkpoint
                case ProbationEnded():
                    probation = line.body
                case RunFinished():
                    finished = line.body
                case CadenceChosen(tier="global"):
                    interval = line.body.interval
                case DataSkipped():
                    skipped = True
                case _:
                    pass
        first = min(seconds, default=0)
        order = range(first, max(seconds, default=-1) + 1) if first else range(0)
        samples, tokens = self._rates(saves, finished)
        return SinceResume(
            resumed=True,
            checkpoint=self._resumed.checkpoint or "",
            step=self._resumed.step,
            first=first,
            losses=[losses.get(step) for step in order],
            seconds=[seconds[step] for step in order if step in seconds],
            digests=digests,
            samples_per_step=samples,
            tokens_per_step=tokens,
            saves=sorted(saves),
            interval=interval,
            probation=probation.outcome if probation is not None else "",
            evidence=probation.evidence if probation is not None else (),
            skipped=skipped,
        )

    def _rates(
        self, saves: dict[int, str], finished: RunFinished | None
    ) -> tuple[float | None, float | None]:
        """Samples and tokens per step, from what was loaded to the newest count."""
        assert self._resumed is not None
        start = parse_name(self._resumed.checkpoint or "")
        base = manifest_of(self._control, self._root, start) if start is not None else None
        if start is not None and base is None:
            return None, None
        step, samples, tokens = (base.step, base.samples, base.tokens) if base is not None else (0, 0, 0)
        whose = base.counts if base is not None else None
        if finished is not None and finished.step > step and whose in (None, finished.counts):
            done = finished.step - step
            return (finished.samples - samples) / done, (finished.tokens - tokens) / done
        for at in sorted(saves, reverse=True):
            name: CheckpointName | None = parse_name(saves[at])
            newest = manifest_of(self._control, self._root, name) if name is not None else None
            if newest is not None and newest.step > step and whose in (None, newest.counts):
                done = newest.step - step
                return (newest.samples - samples) / done, (newest.tokens - tokens) / done
        return None, None


# The runbook for a directory of checkpoints of which no run keeps a record, such as plain DCP.
#
# What stopped the training, on which nodes, and what speaks against a checkpoint are not recorded there, and
# are reported as not known. Storage, the checkpoints themselves and the command are examined as for any run.


RESUME_FROM = "HOLDFAST_CHECKPOINT_RESUME_FROM"


def recover_plain_root(
    root: Path, wishes: Wishes, show: Show, reading: Callable[[], Reading]
) -> RecoverReport:
    """Go through what the runbook can say about it; the report's `exit_code` is the code to end with."""
    check_record(wishes)
    with reading() as shown:
        report = _examined_plain(root, wishes, shown)
    for row in rows(report):
        show(row)
    show(TicketRow("", "", report.answer))
    if wishes.run:
        _start_plain(report, wishes, show)
    if write_record(report, wishes):
        show(TicketRow("", "", f"the record is in {wishes.record}"))
    return report


def _examined_plain(root: Path, wishes: Wishes, shown: Reading) -> RecoverReport:
    (place,) = try_places(root.absolute())
    found = None if place.hangs else resolve_plain(root, quick=wishes.quick, progress=shown.advance)
    told = "not known: no run keeps a record here"
    findings = [
        Finding(stage=Stage.TRIGGER, mark=StageMark.UNKNOWN, text=told),
        Finding(stage=Stage.CLASSIFY, mark=StageMark.UNKNOWN, text=f"{Side.UNKNOWN}: {told}"),
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
    return RecoverReport(
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


def _storage(place: TriedPlace, alarm: list[str]) -> Finding:
    """A root that cannot be written can still be resumed from: the run saves to a root of its own."""
    if place.problem and not place.hangs:
        text = "can be read; a run that starts from it needs a root of its own"
        told = [f"{place.path}: {place.problem}", *(f"cannot be used: {name}" for name in alarm)]
        return Finding(stage=Stage.STORAGE, mark=StageMark.NOTE, text=text, evidence=told)
    facts = StorageFacts(
        place=str(place.path), what="the checkpoints", problem=place.problem, free=place.free
    )
    return storage([facts], alarm)


def _start_plain(report: RecoverReport, wishes: Wishes, show: Show) -> None:
    refused = why_not_started(report.findings, report.answer, known=report.command is not None, submit="")
    if refused is not None:
        report.exit_code = refused.code or report.exit_code
        show(TicketRow("not run", "bold red", refused.text))
        return
    assert report.command is not None
    assert report.resolution is not None
    extra: Mapping[str, str] = {RESUME_FROM: report.resolution.path or ""}
    show(TicketRow("run", "", f"{RESUME_FROM}={shlex.quote(extra[RESUME_FROM])} {report.command.shown()}"))
    started = StartedCommand(report.command, to_stderr=wishes.to_stderr, extra=extra)
    report.started = True
    report.actions.append(ActionTaken(what="start from this checkpoint", done=True))
    with started.passing_on():
        while (code := started.poll()) is None:  # for as long as it is alive: it bounds itself
            started.wait(LOOK)
    report.ended_with = report.exit_code = code
    report.answer = f"started, and ended with code {code}"
    show(TicketRow("", "", report.answer))


AGAIN = 2.0
"""Seconds between two looks for nodes."""
LOOK = 0.5
"""Seconds between two looks at the journal, and at what was started."""


class Wishes(msgspec.Struct, frozen=True, kw_only=True):
    """What was asked for on the command line."""

    run: bool = False
    yes: bool = False
    watch: bool | None = None
    """None: watch if something is started here."""
    timeout: float = 3600.0
    """Seconds for which a resume is watched."""
    wait: float = 600.0
    """Seconds to wait for nodes, if there are too few to start."""
    band: float = BAND
    """How much longer a step may take than before the stop."""
    mtbf_hours: float = 0.0
    """Hours between failures, if somebody knows them; 0 takes the setting, or the measured value."""
    record: Path | None = None
    overwrite: bool = False
    """Whether the record may replace a file that is not an earlier record."""
    root: Path | None = None
    remote: str | None = None
    ranks: int | None = None
    quick: bool = False
    command: Sequence[str] = ()
    by: str = ""
    to_stderr: bool = False


Show = Callable[[TicketRow], None]
Ask = Callable[[str], bool | None]
"""Asks a person a question; None if nobody can be asked."""


class Reading(Protocol):
    """While open, shows how far the reading of checkpoints has come."""

    advance: Progress | None

    def __enter__(self) -> Reading: ...

    def __exit__(self, *exception: object) -> None: ...


def recover_run(
    control: ControlDirectory, wishes: Wishes, show: Show, ask: Ask, reading: Callable[[], Reading]
) -> RecoverReport:
    """Go through the runbook; the report's `exit_code` is the code to end with."""
    check_record(wishes)  # nothing may be started that could not be recorded
    report = _examined(control, wishes, show, reading)
    _drain(control, report, wishes, show, ask)
    show(TicketRow("", "", report.answer))
    if wishes.run and wishes.wait > 0 and report.exit_code == ExitCode.NO_CAPACITY:
        report = _wait(control, report, wishes, show, reading)
    if report.state in LIVE and wishes.watch:
        _watch_live(control, report, wishes, show)
    elif wishes.run and report.state not in (*LIVE, "finished") and _may_start(report, wishes, show, ask):
        _start(control, report, wishes, show)
    if _write(control, report, wishes):
        show(TicketRow("", "", f"the record is in {wishes.record}"))
    return report


def _examined(
    control: ControlDirectory, wishes: Wishes, show: Show, reading: Callable[[], Reading]
) -> RecoverReport:
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
    control: ControlDirectory,
    report: RecoverReport,
    wishes: Wishes,
    show: Show,
    reading: Callable[[], Reading],
) -> RecoverReport:
    """Wait for enough nodes, or until the deadline; then examine everything anew, because meanwhile somebody
    may have started the run, or the storage may be gone."""
    show(TicketRow("wait", "yellow", f"for nodes, at most {wishes.wait:g} s (--wait)"))
    began = time.monotonic()
    deadline = began + wishes.wait
    while (found := capacity_now(control, wishes.command)).code and time.monotonic() < deadline:
        time.sleep(min(AGAIN, max(0.0, deadline - time.monotonic())))
    waited = f"{time.monotonic() - began:.0f} s"
    done = [*report.actions, ActionTaken(what="wait for nodes", done=not found.code, result=waited)]
    if found.code:
        show(TicketRow("not done", "", f"waited {waited} for nodes: {found.text}"))
        report.actions = done
        return report
    again = _examined(control, wishes, show, reading)
    again.actions = done
    show(TicketRow("", "", again.answer))
    return again


def _drain(control: ControlDirectory, report: RecoverReport, wishes: Wishes, show: Show, ask: Ask) -> None:
    if not report.drains:
        return
    names = ", ".join(one.describe() for one in report.drains)
    if wishes.yes or ask(f"Drain {names}?"):
        report.actions += drain(control, report.drains, wishes.by)
    else:
        why = "give --yes to do it"
        report.actions += [
            ActionTaken(what=f"drain {one.describe()}", done=False, result=why) for one in report.drains
        ]
    for action in report.actions:
        show(
            TicketRow(
                "done" if action.done else "not done",
                "",
                f"{action.what}: {action.result}".removesuffix(": "),
            )
        )


def _may_start(report: RecoverReport, wishes: Wishes, show: Show, ask: Ask) -> bool:
    """Whether the command may be run; asks a person if that person's word can decide it."""
    refused = why_not_started(
        report.findings, report.answer, known=report.command is not None, submit=report.submit
    )
    if refused is None or (refused.question and (wishes.yes or ask(refused.question))):
        return True
    report.exit_code = refused.code or report.exit_code
    show(TicketRow("not run", "bold red", refused.text))
    return False


def _start(control: ControlDirectory, report: RecoverReport, wishes: Wishes, show: Show) -> None:
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
    show(TicketRow("run", "", report.command.shown()))
    started = StartedCommand(report.command, to_stderr=wishes.to_stderr)
    report.started = True
    report.actions.append(ActionTaken(what="start the run again", done=True))
    deadline = time.monotonic() + wishes.timeout
    watching = wishes.watch is not False
    with started.passing_on():
        while (code := started.poll()) is None:  # for as long as the run is alive: it bounds itself
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
    show(TicketRow("", "", report.answer))


def _judge(report: RecoverReport, watch: ResumeWatch, show: Show) -> None:
    """Say whether the resume was correct, unless exactly that was said before."""
    points = watch.points()
    said = [(one.point, one.verdict) for one in report.check]
    report.check, report.correct = points, is_correct(points)
    if [(one.point, one.verdict) for one in points] == said:
        return
    for row in check_rows(points):
        show(row)
    show(TicketRow("", "", verdict(report)))
    mark = {True: StageMark.OK, False: StageMark.PROBLEM, None: StageMark.UNKNOWN}[report.correct]
    wrong = [
        f"{one.point}: expected {one.expected}, found {one.found}"
        for one in points
        if one.verdict is Correctness.NOT_CORRECT
    ]
    kept = [one for one in report.findings if one.stage is not Stage.RESUME]
    report.findings = [*kept, Finding(stage=Stage.RESUME, mark=mark, text=verdict(report), evidence=wrong)]


def _watch_live(control: ControlDirectory, report: RecoverReport, wishes: Wishes, show: Show) -> None:
    """Judge the resume of the attempt that is running now, whoever started it."""
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
    """The value given here, else that of the run's own settings; 0 if neither has one."""
    return wishes.mtbf_hours or settings_of(launch_to_repeat(control), wishes.command).checkpoint.mtbf_hours


def check_record(wishes: Wishes) -> None:
    """Refuse now a place to which the record could not be written later."""
    if wishes.record is not None:
        check_output(wishes.record, mark=MARK, overwrite=wishes.overwrite)


def write_record(report: RecoverReport, wishes: Wishes) -> bool:
    """Write the record, if one was asked for."""
    if wishes.record is None:
        return False
    check_record(wishes)
    try:
        replace_atomic(wishes.record, markdown(report).encode())
    except OSError as error:
        raise ControlError(str(explain_os_error(error, "write", wishes.record))) from error
    return True


def _write(control: ControlDirectory, report: RecoverReport, wishes: Wishes) -> bool:
    if wishes.record is not None:
        report.timeline = timeline(recent_lines(control, attempt_numbers(control)[-ATTEMPTS:]))
    return write_record(report, wishes)
