"""The whole runbook: examine, then what may be done, then watching the resume until its probation is over.

Guarantee: without `run`, `yes` or a person's answer nothing is changed but for the record's own file. A run
that is held by somebody, has no rung, no storage or no nodes is never started, whatever was answered; only a
stop that recovery decided on can be overruled.

What a run had left before its resume, and whether the resume is right until its probation is over.
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
from holdfast.journal import JournalReader, Line
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
    Mark,
    Side,
    Stage,
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
from holdfast.recover.action import Started, command_of, drain, settings_of
from holdfast.recover.examine import (
    ATTEMPTS,
    Place,
    capacity_now,
    examine,
    rung_findings,
    timeline,
    try_places,
)
from holdfast.recover.facts import recent_lines, steps_told
from holdfast.recover.resume_check import BAND, Agreement, BeforeResume, Point, SinceResume, is_correct, judge
from holdfast.recover.ticket import MARK, Action, Report, Row, check_rows, markdown, rows, verdict
from holdfast.train import measured_before

# --- the runbook --------------------------------------------------------------------------------------------

# What a run had left by the time it was resumed, for judging the resume by. Reads only.


COUNTED = 6
"""Checkpoints whose counts and distances are compared."""


def manifest_of(control: ControlDirectory, root: Path, name: CheckpointName) -> Manifest | None:
    """A checkpoint's manifest, from the root or as the local tier recorded it; None if there is none."""
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
    """As it was up to attempt number `attempts`; `checkpoint` is what is resumed from, empty for nothing.

    `mtbf_hours`: as given by somebody; 0 takes what was measured.
    """
    numbers = [number for number in attempt_numbers(control) if number <= attempts]
    name = parse_name(checkpoint) if checkpoint else None
    seen = measured_before(control, attempts + 1, "")
    mtbf = mtbf_of(seen.running, seen.failures, mtbf_hours * 3600)
    if name is None:
        return BeforeResume(checkpoint=checkpoint, starts=world, mtbf=mtbf.seconds, mtbf_source=mtbf.source)
    manifest = manifest_of(control, root, name)
    records = [one for one in read_timeline(control).on_line if one.step <= name.step]
    if all(one.id != name.id for one in records):  # pinned, off the line: what was saved before it is not it
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
    """Losses and sample digests of the steps after a checkpoint, as attempts that went on from it did them.

    An attempt that saved something suspect or condemned after it is no measure.
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
    """How many samples or tokens a step had, between each two checkpoints; the first from a fresh start."""
    points: list[tuple[int, int, str]] = []
    for record in records:
        manifest = manifest_of(control, root, CheckpointName(record.step, record.id))
        if manifest is not None:
            points.append((manifest.step, getattr(manifest, count), manifest.counts))
    origin = read_timeline(control).origin
    if len(points) < COUNTED and origin is not None and origin.checkpoint is None and not origin.source:
        points.insert(0, (0, 0, points[0][2] if points else ""))
    return [  # an older release counted rank 0's alone: that and the job's make no rate
        (b - a) / (after - step)
        for (step, a, whose), (after, b, then) in itertools.pairwise(points)
        if after > step and whose == then
    ]


def _interval(steps: Sequence[int]) -> int:
    """Steps between saves, as most of them had it; the first one's distance from the start if it is alone."""
    gaps = [after - step for step, after in itertools.pairwise(steps)] or [*steps[:1]]
    return statistics.mode(gaps) if gaps else 0


class ResumeWatch:
    """One resume: that of the first attempt after number `after` in which a rank resumes."""

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
        """`expected`: the checkpoint that was foretold, empty for a fresh start; None takes what is used.

        `band`: by how much longer a step may take than before; `mtbf_hours`: as given, 0 if it was not.
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
        self._lines: list[Line] = []
        self._world: int | None = None
        self._resumed: Resumed | None = None
        self.over = False
        """Whether there is nothing more to wait for: probation has ended, or the attempt."""

    def poll(self) -> None:
        """Take in what is new."""
        for line in self._reader.poll():
            self._take(line)

    def _take(self, line: Line) -> None:
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
        """Whether the resume was correct, as far as that is known by now."""
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
                case CadenceChosen():
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
        """Samples and tokens of a step, from what was loaded to the newest count."""
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
