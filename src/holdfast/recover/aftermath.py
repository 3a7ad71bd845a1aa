"""What a run had left before its resume, and whether the resume is right until its probation is over."""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Sequence
from pathlib import Path

from holdfast.checkpoint.choose import REFUSED_STANDINGS
from holdfast.checkpoint.format import CheckpointName, Manifest, ManifestError, parse_name
from holdfast.checkpoint.format import manifest as manifests
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
from holdfast.policy import mtbf_of
from holdfast.record import (
    CommitRecord,
    ControlDirectory,
    HeadRecord,
    StandingBook,
    attempt_numbers,
    commits_of,
    read_record,
    read_timeline,
)
from holdfast.recover.facts import recent_lines, steps_told
from holdfast.recover.resume_check import BAND, BeforeResume, Point, SinceResume, judge
from holdfast.train import measured_before

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
