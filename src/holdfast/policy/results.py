"""Which results are rejected and why, and a rejected result as evidence. Pure.

Whatever is not known is left out; every field has a default except those that identify a thing, so a report
of an older release is evidence too. Losses are as `journal.encode_loss` gives them.
"""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from enum import StrEnum
from typing import Any, Literal

import msgspec

from holdfast.policy.trial import LOOK_BACK

# Which losses are rejected, and why. Pure.
#
# Guarantee: NaN and the infinities are always told apart from numbers. A spike or an outlier is reported only
# upwards, only for a finite loss, and only after `ENOUGH` accepted ones; a rejected loss never affects what
# the next loss is compared with.
#
# spike     the loss is more than `spike` times the largest that was ever accepted. A loss that was ever
#           negative has no such scale, and no spikes.
# outlier   the loss is above the window's median by `outlier` times its spread. The spread is the median
#           distance from the median, or that of the window's highest tenth if it is larger, each scaled so
#           that it is one standard deviation of Gaussian noise, and never below `FLOOR` of the median. While
#           all losses are positive, logarithms are taken first: the noise of a loss grows and shrinks with
#           it, and single batches of a healthy run may be many times the median. Few values give a poor
#           estimate of a spread, so the bar is higher while the window is short. Harder data may come only
#           now and then, so the bar is at least `REACH` times as far from the median as any of the last
#           `MEMORY` losses.


WINDOW = 64
"""How many accepted losses the outlier test takes the median and the spread of."""
MEMORY = 256
"""How many accepted losses it takes the largest of."""
ENOUGH = 16
"""How many losses must be accepted before there are spikes and outliers."""
SCALE = 1.4826
"""Median distance from the median × this = standard deviation, for Gaussian noise."""
TENTH = 1.2816
"""The highest tenth of Gaussian noise begins this many standard deviations above its median."""
FLOOR = 0.02
"""Smallest spread, as a share of the median, so that a loss that hardly moves is no outlier when it does."""
SHORT = 32
"""The bar is (1 + SHORT / values) times as far away as for an endless window."""
REACH = 1.5


class CheckRules(msgspec.Struct, frozen=True, kw_only=True):
    """What to look for; a factor of 0 means off."""

    nan: bool = True
    spike: float = 0.0
    outlier: float = 0.0

    @property
    def any(self) -> bool:
        return self.nan or self.compares

    @property
    def compares(self) -> bool:
        """Whether a loss is compared with earlier ones."""
        return bool(self.spike or self.outlier)


class AcceptedLosses:
    """The accepted losses of one rank, as far as they are needed."""

    def __init__(self) -> None:
        self.largest = -math.inf
        self.smallest = math.inf
        self.count = 0
        self.recent: deque[float] = deque(maxlen=MEMORY)

    def add(self, loss: float) -> None:
        if math.isfinite(loss):
            self.largest = max(self.largest, loss)
            self.smallest = min(self.smallest, loss)
            self.count += 1
            self.recent.append(loss)

    def add_all(self, losses: Iterable[float | None]) -> None:
        for loss in losses:
            if loss is not None:
                self.add(loss)

    def state_dict(self) -> dict[str, Any]:
        if not self.count:
            return {}
        return {
            "largest": self.largest,
            "smallest": self.smallest,
            "count": self.count,
            "recent": list(self.recent),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.recent = deque((float(value) for value in state.get("recent", ())), maxlen=MEMORY)
        self.largest = float(state.get("largest", -math.inf))
        self.smallest = float(state.get("smallest", math.inf))
        self.count = int(state.get("count", 0))


def not_finite(value: float) -> str:
    """What kind of a non-number it is; empty for a number."""
    if math.isfinite(value):
        return ""
    return "NaN" if math.isnan(value) else "+Inf" if value > 0 else "-Inf"


def judge(loss: float, rules: CheckRules, seen: AcceptedLosses) -> list[str]:
    """Why a loss is rejected; nothing if it is not."""
    if kind := not_finite(loss):
        return [f"the loss is {kind}"] if rules.nan else []
    if not rules.compares or seen.count < ENOUGH or loss <= seen.recent[-1] or loss <= max(seen.recent):
        return []
    reasons = []
    if rules.spike and seen.smallest >= 0 and 0 < seen.largest < loss / rules.spike:
        reasons.append(
            f"the loss {loss:.6g} is a spike: more than {rules.spike:g} times the largest seen, "
            f"{seen.largest:.6g}"
        )
    if rules.outlier and loss > (bar := outlier_bar(seen.recent, rules.outlier)):
        reasons.append(
            f"the loss {loss:.6g} is an outlier: the last ones have the median "
            f"{statistics.median(list(seen.recent)[-WINDOW:]):.6g} and allow up to {bar:.6g}"
        )
    return reasons


def outlier_bar(recent: Iterable[float], factor: float) -> float:
    """The bar above which a loss counts as an outlier, after these losses."""
    values = list(recent)
    if min(values) > 0:
        exponent = _bar([math.log(value) for value in values], factor, FLOOR)
        return math.exp(exponent) if exponent < 700 else math.inf
    return _bar(values, factor, FLOOR * abs(statistics.median(values[-WINDOW:])))


def _bar(values: list[float], factor: float, floor: float) -> float:
    window = sorted(values[-WINDOW:])
    middle = statistics.median(window)
    typical = SCALE * statistics.median(abs(value - middle) for value in window)
    upper = (window[len(window) * 9 // 10] - middle) / TENTH
    far = factor * (1 + SHORT / len(window)) * max(typical, upper, floor)
    return middle + max(far, REACH * (max(values) - middle))


# What happens to a non-finite step, and when there have been too many in a row. Pure.
#
# Guarantee: a bad step is never used, whatever the policy says; after `max_consecutive` bad steps in a row
# the answer is `stop` or `roll_back`, the same on every rank that was given the same steps. A good step, and
# nothing else, ends a row.
#
# warn      a bad step is dropped, with a warning
# skip      a bad step is dropped
# raise     the first bad step stops the run
# rollback  a bad step is dropped; too many in a row go back to an earlier state instead of stopping


Policy = Literal["warn", "skip", "raise", "rollback"]


class Act(StrEnum):
    USE = "use"
    DROP = "drop"
    STOP = "stop"
    ROLL_BACK = "roll_back"


class StepOutcome(msgspec.Struct, frozen=True, kw_only=True):
    """What to do with a step; all ranks do the same."""

    act: Act
    warn: bool = False
    """Whether to tell a person; they are told of stopping and going back in any case."""
    in_a_row: int = 0
    """Bad steps in a row, this one included."""
    why: str = ""
    """Why the run stops or goes back."""


class Count:
    """Counts bad steps. It changes only by what `after` is given."""

    def __init__(self, policy: Policy, max_consecutive: int) -> None:
        self.policy = policy
        self.max_consecutive = max_consecutive
        self.in_a_row = 0
        self.total = 0

    def after(self, bad: bool) -> StepOutcome:
        """The step was bad, or was not: what to do with it."""
        if not bad:
            self.in_a_row = 0
            return StepOutcome(act=Act.USE)
        self.in_a_row += 1
        self.total += 1
        if self.policy == "raise":
            return StepOutcome(
                act=Act.STOP, in_a_row=self.in_a_row, why="the policy for a bad step is to raise"
            )
        if self.in_a_row >= self.max_consecutive:
            return StepOutcome(
                act=Act.ROLL_BACK if self.policy == "rollback" else Act.STOP,
                in_a_row=self.in_a_row,
                why=f"{self.in_a_row} bad steps in a row, {self.max_consecutive} are too many",
            )
        return StepOutcome(act=Act.DROP, warn=self.policy == "warn", in_a_row=self.in_a_row)

    def began_again(self) -> None:
        """An earlier state was restored: the row is over."""
        self.in_a_row = 0

    def state_dict(self) -> dict[str, int]:
        return {"in_a_row": self.in_a_row, "total": self.total}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.in_a_row, self.total = state.get("in_a_row", 0), state.get("total", 0)


# Whether a gradient scaler still lets training learn. Pure.
#
# Guarantee: a healthy run never gives rise to what is reported here. A scaler that began too high leaves out
# as many steps as it takes to get down, and later one or two now and then; after `SKIPS` in a row, or with a
# scale below `COLLAPSED`, it is no longer searching for its scale: the gradients themselves are bad.


SKIPS = 32
"""How many steps left out in a row are too many: from the usual 65536 down to a hundred-thousandth."""
COLLAPSED = 2.0**-24
"""The smallest number that a half-precision gradient can be: below such a scale all gradients vanish."""


class Scale:
    """One scaler's scale, over time. It changes only by what `observe` is given."""

    def __init__(self, begins_at: float = 1.0) -> None:
        self._floor = COLLAPSED * min(1.0, begins_at)
        self._before: tuple[float, int] | None = None
        self.skipped = 0
        """How many steps were left out in a row."""

    def observe(self, scale: float, good: int) -> bool:
        """Whether a step was bad, given the scale and the scaler's count of good steps after it.

        A step left out lowers the scale, and nothing else does. A good one raises the count, or the scale.
        """
        before, self._before = self._before, (scale, good)
        updated = before is not None and before != (scale, good)
        if before is not None and scale < before[0]:
            self.skipped += 1
        elif updated:
            self.skipped = 0
        lost = not math.isfinite(scale) or scale < self._floor
        return lost or (updated and self.skipped >= SKIPS)

    @property
    def why(self) -> str:
        """What is wrong with the scale at present; empty if nothing is."""
        if self._before is None:
            return ""
        scale = self._before[0]
        if self.skipped >= SKIPS:
            return (
                f"the gradient scaler has left out {self.skipped} steps in a row, its scale is {scale:.3g}: "
                "the gradients hold a NaN or an infinity whatever the scale, and the weights do not move"
            )
        if not math.isfinite(scale) or scale < self._floor:
            return (
                f"the gradient scaler's scale has collapsed to {scale:.3g}, below {self._floor:.3g}: "
                "gradients vanish at such a scale"
            )
        return ""


# Which ranks are accused when the same micro-batches are computed twice. Pure.
#
# Every rank computes its own micro-batch and that of the rank before it. `differs[i]` says that the micro-
# batch of rank i gave one loss there and another on rank i + 1 (the ranks form a ring).
#
# Guarantee: where nothing differs, nobody is accused. A device that computes wrongly spoils two comparisons,
# its own and its neighbour's, and is among the accused, unless so much differs that devices cannot be the
# reason. Then the method does not suit the run (the model is split over ranks, results cannot be repeated to
# within the tolerance, or a step takes data from elsewhere than its arguments), and nobody is accused. With
# two ranks, one bad device looks the same as a method that does not suit; only an earlier comparison that
# held in the same attempt tells them apart.


class Disagreement(msgspec.Struct, frozen=True, kw_only=True):
    accused: list[int] = []
    suits: bool = True
    """Whether comparing between neighbours makes sense in this run."""


def accuse(differs: Sequence[bool], *, held_before: bool) -> Disagreement:
    """`held_before`: in an earlier comparison of this attempt nothing differed."""
    world = len(differs)
    spoiled = [rank for rank in range(world) if differs[rank]]
    if not spoiled:
        return Disagreement()
    if len(spoiled) > max(2, world // 2) or (len(spoiled) == world and not held_before):
        return Disagreement(suits=False)
    # A rank that is accused by both of its comparisons explains both of them.
    common = {rank for rank in spoiled if world > 2 and differs[rank - 1]}
    accused = set(common)
    for rank in spoiled:
        pair = {rank, (rank + 1) % world}
        if not pair & common:
            accused |= pair
    return Disagreement(accused=sorted(accused))


class Kind(StrEnum):
    """What the ranks ask for."""

    STEP = "step"
    """A step was rejected, and rejected again when it was re-run in place (if re-running is on)."""
    PROBATION = "probation"
    """The loaded state does not continue from where it was: by the loss, the gradients or the counters."""
    ROLLBACK = "rollback"
    """Too many non-finite steps in a row, and the setting is to go back past the newest checkpoint."""
    DEVICE = "device"
    """The ranks know which device is at fault: see `accused`."""


class Place(msgspec.Struct, frozen=True):
    """A device of a node; `device` is empty where a node has none to tell apart."""

    node: str
    device: str = ""


class RankResult(msgspec.Struct, frozen=True, kw_only=True):
    """One rank's own result of the rejected step, before any reduction."""

    rank: int
    node: str = ""
    device: str = ""
    reasons: list[str] = []
    """Why this rank's own result is bad; empty if it is not."""
    first: float | str | None = None
    again: float | str | None = None
    """The loss, and the loss of the re-run."""
    differs: bool = False
    """Whether the two differ by more than the tolerance."""
    state: str = ""
    """Fingerprint of the tracked state that the step began from."""
    where: str = ""
    """The first part of the model whose output was not finite although its input was, if it was found."""


class Window(msgspec.Struct, frozen=True):
    """Batches of one epoch on every rank, counted from 0; `last` is part of it."""

    epoch: int
    first: int
    last: int


class Rejection(msgspec.Struct, frozen=True, kw_only=True):
    """What the group agreed on before it ended with exit code 16."""

    kind: Kind
    step: int
    """The step that was being computed: completed steps + 1. For a breach, the last completed step."""
    reasons: list[str]
    ranks: list[RankResult] = []
    """Every rank that has something to report, in order; those that are bad have reasons."""
    rerun: bool = False
    """Whether it was re-run in place, and rejected again."""
    finite: bool = False
    """Whether every bad result was a finite number: from a spike, an outlier, or the user's own check. Such a
    rejection is never evidence against a checkpoint."""
    in_probation: bool = False
    counters: bool = False
    """Whether the counters of the loaded state are not those of its manifest, which has no innocent cause."""
    window: Window | None = None
    """The data that the step was computed from; None if the run does not own the data."""
    accused: Place | None = None
    optional: bool = False
    """Whether the run could also go on with what is accused, which is slow, but computes correctly."""
    diagnostic: str = ""
    """The diagnostic save, or why there is none."""

    @property
    def bad(self) -> list[RankResult]:
        """The ranks whose own results were bad; empty if only the reduced result was seen to be."""
        return [one for one in self.ranks if one.reasons]


class Rerun(msgspec.Struct, frozen=True, kw_only=True):
    """An order to the attempt after a rejection: which step to compare with what, and what to do then."""

    step: int
    bad: list[RankResult]
    """The bad results of the last time."""
    can_exclude: bool = False
    """Whether the run can go on without the devices of `bad`."""
    accept: bool = False
    """Whether the step is to be accepted if it is rejected again: it is finite, and the same on every
    device."""
    breach: bool = False
    """Whether it was not a step that was rejected: the loaded state did not continue from where it was."""
    settles: bool = False
    """Whether nothing is left to compare with: if it fails again, and the fault does not follow a device, the
    ranks settle it themselves (see `policy.verdicts.settle`)."""


class Trial(msgspec.Struct, frozen=True, kw_only=True):
    """An order to an attempt that replays, from a lower rung, the steps in which a suspect failed."""

    suspects: list[str]
    """Checkpoints by name. They are condemned if this attempt completes step `until` without a breach."""
    until: int


class How(StrEnum):
    """What was settled about a step."""

    ACCEPTED = "accepted"
    """It is finite, and the same everywhere: it is used as it is."""
    TOLERATED = "tolerated"
    """It is not finite, and that is not blamed on what was loaded: `validation.nan_policy` applies."""
    SHIFT = "shift"
    """From here on the loss or the gradients have another level, whatever was loaded: no breach."""
    FATAL = "fatal"
    """It is not finite, whatever was loaded, and `validation.nan_policy` ends the run because of it."""


class Settled(msgspec.Struct, frozen=True, kw_only=True):
    """A verdict on one step of the run's timeline. It is durable, and every later attempt that replays the
    step follows it, whichever checkpoint it starts from."""

    step: int
    how: How
    window: Window | None = None
    """The step's data; None if the run does not own the data."""
    world_size: int = 0
    """How many ranks shared these data; 0 if not known."""
    shown: bool = False
    """Whether it was shown elsewhere too; if not, the step was only dropped where it came up."""
    why: str = ""


class Orders(msgspec.Struct, frozen=True, kw_only=True):
    """What an attempt must do differently from those before it."""

    avoid: list[str] = []
    """Checkpoints that it must not use, by name; this stays in force until there is progress."""
    rerun: Rerun | None = None
    """The step whose rejection made this attempt necessary."""
    trial: Trial | None = None
    """The checkpoints whose guilt this attempt settles."""


class Findings(Orders, frozen=True, kw_only=True):
    """What a decision says about checkpoints, data and steps: what was found out, and the orders that follow.

    The orders are part of it by inheritance, not as a field, because the records that hold findings
    (a decision's, an incident's) are flat, and older ones must stay readable.
    """

    verdict: str = ""
    """The verdict on a rejected step: device or reproducible; empty if there is none yet."""
    suspect: list[str] = []
    acquit: list[str] = []
    """Checkpoints that are made suspect, or cleared, before the next attempt begins."""
    skip: Window | None = None
    """Data that are left out from now on."""
    settled: list[Settled] = []
    """Steps on which every attempt that replays them follows this verdict from now on."""

    def findings(self) -> Findings:
        """The findings alone, without the rest of a decision."""
        return Findings(**{name: getattr(self, name) for name in Findings.__struct_fields__})


SHIFT_SEEN = 64
"""How many steps after a shift it may be seen again: the windows of checkpoints reach that far back."""


def settled_as(
    settled: Iterable[Settled], how: How, step: int, window: Window | None, world_size: int
) -> Settled | None:
    """What was settled about this step, computed from these data; of several, the latest that says most."""
    found = [one for one in settled if one.how is how and _covers(one, step, window, world_size)]
    return max(reversed(found), key=lambda one: one.shown, default=None)


def _covers(settled: Settled, step: int, window: Window | None, world_size: int) -> bool:
    if settled.how is How.SHIFT:
        return settled.step - LOOK_BACK <= step <= settled.step + SHIFT_SEEN
    if settled.step != step or (settled.world_size and world_size and settled.world_size != world_size):
        return False
    return settled.window is None or window is None or settled.window == window


# How the data of a step are described to people. Pure.


NAMED = 8
"""How many samples, or ranks, are named one by one."""


def batch_in_words(window: Window | None, samples: Mapping[int, Sequence[int]], world: int) -> str:
    """As in `batch 25 of epoch 1 (samples 96–99)`: batches and epochs counted from 1, samples from 0.

    `samples`: by rank, for the ranks whose batch was bad; empty where not known.
    """
    if window is None:
        return ""
    first, last = window.first + 1, window.last + 1
    which = f"batch {first}" if first == last else f"batches {first}–{last}"
    where = f"{which} of epoch {window.epoch + 1}"
    bad = [(rank, in_short(indices)) for rank, indices in sorted(samples.items()) if indices]
    if not bad:
        return where
    if world == 1:
        return f"{where} ({_samples(samples[bad[0][0]])} {bad[0][1]})"
    each = [f"{_samples(samples[rank])} {text} on rank {rank}" for rank, text in bad[:NAMED]]
    more = f"; and on {len(bad) - NAMED} more" if len(bad) > NAMED else ""
    return f"{where} ({'; '.join(each)}{more})"


def _samples(indices: Sequence[int]) -> str:
    return "sample" if len(indices) == 1 else "samples"


def in_short(indices: Sequence[int]) -> str:
    """`96–99` for consecutive ones, else one by one in their order, as far as there is room."""
    if len(indices) > 1 and list(indices) == list(range(indices[0], indices[0] + len(indices))):
        return f"{indices[0]}–{indices[-1]}"
    named = ", ".join(map(str, indices[:NAMED]))
    return f"{named} and {len(indices) - NAMED} more" if len(indices) > NAMED else named
