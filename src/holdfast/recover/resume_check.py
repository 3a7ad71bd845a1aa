"""Whether a resume was correct, point by point: what was expected, what was found, and whether they agree.

Guarantee: pure, and it never guesses. A point is `correct` or `not correct` only by values that both sides
recorded; where one is missing it is `not known`, and says what is missing. Steps done before the stop and
again after it are the strongest evidence: the same samples must come again, and give the same loss.

A replayed loss need not be the same to the last digit (other devices, other kernels); it counts as different
if it is off by more than a tenth in most of the replayed steps.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from enum import StrEnum

import msgspec

from holdfast.base import duration
from holdfast.policy import ENOUGH, FAR_OFF, LOSS_FLOOR, Series, discontinuities

COMPARED = 64
"""Steps after the resume whose losses are compared with the window before it."""
THROUGHPUT = "throughput"
LATE = 2
"""After so many intervals without a save, one that is merely slow to be written explains it no longer."""
BAND = 0.1
"""How much longer a step may take than before, unless somebody states another band."""
TOLERANCE = 0.1
"""How far the samples or tokens of a step may be off the range seen before: epochs end unevenly."""


class Correctness(StrEnum):
    CORRECT = "correct"
    NOT_CORRECT = "not correct"
    NOT_KNOWN = "not known"


class Point(msgspec.Struct, frozen=True, kw_only=True):
    point: str
    """rung, loss, samples, tokens, throughput, cadence or probation."""
    verdict: Correctness
    expected: str
    found: str


class BeforeResume(msgspec.Struct, frozen=True, kw_only=True):
    """What the run had left by the time it was resumed."""

    checkpoint: str
    """Empty for a fresh start."""
    step: int = 0
    window: Sequence[float | None] = ()
    """Losses of the steps before the save."""
    step_seconds: Sequence[float] = ()
    losses: Mapping[int, float] = {}
    """By step, the losses of steps after the checkpoint that were done before the stop."""
    digests: Mapping[int, str] = {}
    """By step, the digests of the samples of these steps."""
    samples_per_step: Sequence[float] = ()
    tokens_per_step: Sequence[float] = ()
    """Between successive checkpoints, oldest first."""
    interval: int = 0
    """Steps between saves; 0 if not known."""
    world: int | None = None
    """How many ranks saved it, and how many start; None if not known."""
    starts: int | None = None
    mtbf: float | None = None
    """Seconds between failures, as measured or given; None if not known."""
    mtbf_source: str = ""

    @property
    def same_world(self) -> bool:
        return self.world is None or self.starts is None or self.world == self.starts


class SinceResume(msgspec.Struct, frozen=True, kw_only=True):
    """What the journal says since the resume."""

    resumed: bool = False
    checkpoint: str = ""
    """What was resumed from; empty for a fresh start."""
    step: int = 0
    first: int = 0
    """The first step done; 0 if there was none."""
    losses: Sequence[float | None] = ()
    seconds: Sequence[float] = ()
    digests: Mapping[int, str] = {}
    samples_per_step: float | None = None
    tokens_per_step: float | None = None
    """From the resume to the newest known count."""
    saves: Sequence[int] = ()
    interval: int = 0
    """Steps between saves, if the run said so itself."""
    probation: str = ""
    """passed, breached or unsettled; empty while it goes on, or if there is none."""
    evidence: Sequence[str] = ()
    skipped: bool = False
    """Whether data has been left out on purpose since: then different samples are right."""

    @property
    def last(self) -> int:
        return self.first + len(self.losses) - 1 if self.first else self.step


def judge(before: BeforeResume, since: SinceResume, *, band: float = BAND) -> list[Point]:
    """Every point, in the order of the runbook. `band`: how much longer a step may take than before."""
    if not since.resumed:
        expected = before.checkpoint or "a fresh start"
        return [
            Point(point="rung", verdict=Correctness.NOT_KNOWN, expected=expected, found="no rank has resumed")
        ]
    return [
        _rung(before, since),
        _loss(before, since),
        _samples(before, since),
        _counted("tokens", before.tokens_per_step, since.tokens_per_step, before),
        _throughput(before, since, band),
        _cadence(before, since),
        _probation(before, since),
    ]


def is_correct(points: Sequence[Point]) -> bool | None:
    """False if any point is wrong; None if nothing was found that could have shown correctness.

    Throughput does not count: slow steps accuse a node, never what was resumed from. The right rung alone
    does not make a resume correct: the loss, the samples or probation must say so.
    """
    verdicts = {point.point: point.verdict for point in points if point.point != THROUGHPUT}
    if Correctness.NOT_CORRECT in verdicts.values():
        return False
    told = any(verdicts.get(name) is Correctness.CORRECT for name in ("loss", "samples", "probation"))
    return True if told else None


def _point(name: str, correct: bool | None, expected: str, found: str) -> Point:
    verdict = (
        Correctness.NOT_KNOWN
        if correct is None
        else Correctness.CORRECT
        if correct
        else Correctness.NOT_CORRECT
    )
    return Point(point=name, verdict=verdict, expected=expected, found=found)


def _rung(before: BeforeResume, since: SinceResume) -> Point:
    expected = (
        f"{before.checkpoint}, then step {before.step + 1}"
        if before.checkpoint
        else "a fresh start, then step 1"
    )
    found = f"{since.checkpoint or 'a fresh start'}, then " + (
        f"step {since.first}" if since.first else "no step yet"
    )
    same = since.checkpoint == before.checkpoint and since.first in (0, before.step + 1)
    return _point("rung", None if same and not since.first else same, expected, found)


def _loss(before: BeforeResume, since: SinceResume) -> Point:
    window = [value for value in before.window if value is not None and math.isfinite(value)]
    level = f"its level was {statistics.median(window[-ENOUGH:]):.4g}" if window else "no loss was recorded"
    recorded = [value for value in since.losses if value is not None]
    replayed = _replayed(before, since)
    if replayed:
        off = [abs(now - then) / max(abs(then), 1e-12) for _, then, now in replayed]
        far = sum(one > LOSS_FLOOR for one in off)
        steps = _steps([step for step, _, _ in replayed])
        if 2 * far > len(off):
            step, then, now = max(replayed, key=lambda one: abs(one[2] - one[1]))
            return _point("loss", False, f"{then:.6g} at step {step}, as before the stop", f"{now:.6g}")
        exact = "the same to the last digit" if max(off) == 0 else f"within {max(off):.2g} of it"
        again = f"{steps} gave {exact}"
    else:
        again = "no step was done again"
    if len(window) >= ENOUGH and len(recorded) >= FAR_OFF:
        for until in range(FAR_OFF, min(len(since.losses), COMPARED) + 1):
            shifted = discontinuities(
                Series(loss=before.window), Series(loss=since.losses[:until]), since.first or before.step + 1
            )
            if shifted:
                return _point("loss", False, f"goes on from where it was: {level}", shifted[0])
        found = f"{again}; {len(recorded)} losses, the last {recorded[-1]:.4g}"
        return _point("loss", True, f"goes on from where it was: {level}", found)
    if replayed:
        return _point(
            "loss", True, f"what {_steps([step for step, _, _ in replayed])} gave before the stop", again
        )
    why = f"{len(window)} losses before the save and {len(recorded)} since: too few to compare"
    return _point("loss", None, level, f"{why}; {again}")


def _replayed(before: BeforeResume, since: SinceResume) -> list[tuple[int, float, float]]:
    found = []
    for at, value in enumerate(since.losses):
        step = since.first + at
        then = before.losses.get(step)
        if value is not None and then is not None and math.isfinite(then) and math.isfinite(value):
            found.append((step, then, value))
    return found


def _samples(before: BeforeResume, since: SinceResume) -> Point:
    if since.skipped:
        return _point("samples", None, "others than before: data is left out", _rate(since.samples_per_step))
    both = sorted(before.digests.keys() & since.digests.keys()) if before.same_world else []
    wrong = [step for step in both if before.digests[step] != since.digests[step]]
    if wrong:
        expected = f"{_steps(both)} on the samples that they had before the stop"
        return _point("samples", False, expected, f"other samples at {_steps(wrong)}")
    counted = _counted("samples", before.samples_per_step, since.samples_per_step, before)
    if both and counted.verdict is not Correctness.NOT_CORRECT:
        expected = f"{_steps(both)} on the samples that they had before the stop"
        return _point("samples", True, expected, "the same, by their digests")
    return counted


def _counted(name: str, rates: Sequence[float], since: float | None, before: BeforeResume) -> Point:
    """Counts of the whole job. With a different number of ranks, a step may have as many as before, or as
    many per rank; only the script knows which is meant, if either is."""
    known = [one for one in rates if one > 0]
    if not known:
        return _point(name, None, f"no {name} were counted before", _rate(since))
    low, high = min(known), max(known)
    expected = f"{low:g} a step" if low == high else f"{low:g} to {high:g} a step"
    if since is None:
        return _point(name, None, expected, "no checkpoint since the resume that has a count")
    if _within(since, low, high):
        return _point(name, True, expected, _rate(since))
    if before.same_world or not before.world or not before.starts:
        return _point(name, False, expected, _rate(since))
    ratio = before.starts / before.world
    told = f"{expected} of {before.world} ranks; {before.starts} start"
    scaled = _within(since, low * ratio, high * ratio)
    found = f"{_rate(since)}{', as many for each rank as before' if scaled else ''}"
    return _point(name, True if scaled else None, told, found)


def _within(value: float, low: float, high: float) -> bool:
    return low * (1 - TOLERANCE) <= value <= high * (1 + TOLERANCE)


def _rate(value: float | None) -> str:
    return f"{value:g} a step" if value else "not counted"


def _throughput(before: BeforeResume, since: SinceResume, band: float) -> Point:
    if len(before.step_seconds) < ENOUGH or not before.same_world:
        why = "too few steps were timed before the save" if before.same_world else "other ranks timed them"
        return _point(THROUGHPUT, None, why, _median(since.seconds))
    then = statistics.median(before.step_seconds)
    expected = f"{then:.3g} s a step, at most {band:.0%} more"
    if len(since.seconds) < FAR_OFF + 1:
        return _point(THROUGHPUT, None, expected, f"only {len(since.seconds)} steps since")
    now = statistics.median(since.seconds[1:])  # the first step warms up
    off = f", {abs(now / then - 1):.0%} {'more' if now > then else 'less'}" if then > 0 else ""
    return _point(THROUGHPUT, now <= then * (1 + band), expected, _median(since.seconds) + off)


def _median(seconds: Sequence[float]) -> str:
    return f"{statistics.median(seconds[1:] or seconds):.3g} s a step" if seconds else "no step yet"


def _cadence(before: BeforeResume, since: SinceResume) -> Point:
    """Whether saves happen, as often as they should, and more often than failures."""
    interval = since.interval or before.interval
    if not interval:
        return _point("cadence", None, "no interval between saves is known", _saves(since))
    expected = f"a save every {interval} step{'s' * (interval != 1)}"
    gaps = [after - step for step, after in zip([before.step, *since.saves], since.saves, strict=False)]
    silent = since.last - (since.saves[-1] if since.saves else before.step)
    if max([*gaps, silent], default=0) > LATE * interval:
        return _point("cadence", False, expected, f"{_saves(since)}, and step {since.last} is done")
    timed = since.seconds[1:] or since.seconds or before.step_seconds
    if before.mtbf is not None and timed:
        every = interval * statistics.median(timed)
        failures = f"the MTBF of {duration(before.mtbf)} ({before.mtbf_source})"
        if every >= before.mtbf:
            found = f"{_saves(since)}: one every {duration(every)}, so most failures come before the next one"
            return _point("cadence", False, f"saves at a shorter distance than {failures}", found)
        expected += f", which is within {failures}"
    return _point("cadence", True if gaps else None, expected, _saves(since))


def _saves(since: SinceResume) -> str:
    shown = ", ".join(map(str, since.saves[:5])) + (" …" if len(since.saves) > 5 else "")
    return (
        f"saved at {'step' if len(since.saves) == 1 else 'steps'} {shown}" if since.saves else "no save yet"
    )


def _probation(before: BeforeResume, since: SinceResume) -> Point:
    if not before.checkpoint:
        return _point("probation", None, "none: nothing was loaded", since.probation or "none")
    expected = "passed"
    told = f": {'; '.join(since.evidence)}" if since.evidence else ""
    if since.probation in ("passed", "breached"):
        return _point("probation", since.probation == "passed", expected, f"{since.probation}{told}")
    return _point("probation", None, expected, f"{since.probation or 'not over'}{told}")


def _steps(steps: Sequence[int]) -> str:
    if len(steps) == 1:
        return f"step {steps[0]}"
    if steps[-1] - steps[0] == len(steps) - 1:
        return f"steps {steps[0]} to {steps[-1]}"
    return f"steps {', '.join(map(str, steps[:5]))}{' …' if len(steps) > 5 else ''}"
