"""What a run had left by the time it was resumed, for judging the resume by. Reads only."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Sequence
from pathlib import Path

from holdfast.checkpoint import manifest as manifests
from holdfast.checkpoint.identity import CheckpointName, parse_name
from holdfast.checkpoint.ladder import REFUSED
from holdfast.checkpoint.manifest import Manifest, ManifestError
from holdfast.control.attempts import HeadRecord, attempt_numbers
from holdfast.control.directory import ControlDirectory, read_record
from holdfast.control.lineage import CommitRecord, commits_of, read_timeline
from holdfast.control.standing import StandingBook
from holdfast.policy.cadence import mtbf_of
from holdfast.policy.resume_check import Before
from holdfast.recover.journalled import recent_lines, steps_told
from holdfast.worker.measured import measured_before

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
) -> Before:
    """As it was up to attempt number `attempts`; `checkpoint` is what is resumed from, empty for nothing.

    `mtbf_hours`: as given by somebody; 0 takes what was measured.
    """
    numbers = [number for number in attempt_numbers(control) if number <= attempts]
    name = parse_name(checkpoint) if checkpoint else None
    seen = measured_before(control, attempts + 1, "")
    mtbf = mtbf_of(seen.running, seen.failures, mtbf_hours * 3600)
    if name is None:
        return Before(checkpoint=checkpoint, starts=world, mtbf=mtbf.seconds, mtbf_source=mtbf.source)
    manifest = manifest_of(control, root, name)
    records = [one for one in read_timeline(control).on_line if one.step <= name.step]
    if all(one.id != name.id for one in records):  # pinned, off the line: what was saved before it is not it
        records = [one for one in records if one.step < name.step]
    recent = sorted(records, key=lambda one: one.step)[-COUNTED:]
    losses, digests = _done_after(control, name, numbers)
    return Before(
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
        if went_on and not any(book.of(one.id) in REFUSED for one in later):
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
