"""Watches what the journal tells of a resume, until its probation is over, and judges it. Reads only."""

from __future__ import annotations

import math
from pathlib import Path

from holdfast.checkpoint.identity import CheckpointName, parse_name
from holdfast.control.directory import ControlDirectory
from holdfast.journal.events import (
    AttemptEnded,
    AttemptStarted,
    CadenceChosen,
    DataSkipped,
    Line,
    ProbationEnded,
    Resumed,
    RunFinished,
    SaveCommitted,
)
from holdfast.journal.reader import JournalReader
from holdfast.policy.resume_check import BAND, Before, Point, Since, judge
from holdfast.recover.before import before_resume, manifest_of
from holdfast.recover.journalled import steps_told


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

    def _before(self) -> Before:
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

    def _since(self) -> Since:
        if self._resumed is None:
            return Since()
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
        return Since(
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
