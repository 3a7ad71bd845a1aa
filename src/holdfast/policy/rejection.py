"""A rejected result as evidence: plain values, from the ranks that saw it to the policy that judges it. Pure.

Whatever is not known is left out; every field but what identifies a thing has a default, so a report of an
older release is evidence too. Losses are as `journal.events.encode_loss` gives them.
"""

from __future__ import annotations

from collections.abc import Iterable
from enum import StrEnum

import msgspec

from holdfast.policy.probation import LOOK_BACK


class Kind(StrEnum):
    """What the ranks ask for."""

    STEP = "step"
    """A step was rejected, and again when it was re-run in place (if re-running is on)."""
    PROBATION = "probation"
    """What was loaded does not go on from where it was: the loss, the gradients or the counters say so."""
    ROLLBACK = "rollback"
    """Too many non-finite steps in a row, and the setting is to go back past the newest checkpoint."""
    DEVICE = "device"
    """The ranks know the device that is at fault: see `accused`."""


class Place(msgspec.Struct, frozen=True):
    """A device of a node; the device is empty where a node has none to tell apart."""

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
    """The first part of the model whose output was not finite although its input was, if that was found."""


class Window(msgspec.Struct, frozen=True):
    """Batches of one epoch on every rank, counted from 0; `last` is part of it."""

    epoch: int
    first: int
    last: int


class Rejection(msgspec.Struct, frozen=True, kw_only=True):
    """What the group agreed on before it ended with exit code 16."""

    kind: Kind
    step: int
    """The step that was being computed: completed steps + 1. Of a breach: the last completed step."""
    reasons: list[str]
    ranks: list[RankResult] = []
    """Every rank that has something to tell, in order; those that are bad have reasons."""
    rerun: bool = False
    """Whether it was re-run in place, and rejected again."""
    finite: bool = False
    """Whether every bad result was a finite number: a spike, an outlier, a check of the user's own. Such a
    rejection never speaks against a checkpoint."""
    in_probation: bool = False
    counters: bool = False
    """Whether the counters of what was loaded are not those of its manifest: that has no honest cause."""
    window: Window | None = None
    """The data that it was computed from; None if the run does not own the data."""
    accused: Place | None = None
    optional: bool = False
    """Whether the run can as well go on with what is accused: it is slow, and what it computed is right."""
    diagnostic: str = ""
    """The diagnostic save, or why there is none."""

    @property
    def bad(self) -> list[RankResult]:
        """The ranks whose own results were bad; empty if only what was reduced was seen to be."""
        return [one for one in self.ranks if one.reasons]


class Rerun(msgspec.Struct, frozen=True, kw_only=True):
    """Told to the attempt after a rejection: which step to compare with what, and what then may be done."""

    step: int
    bad: list[RankResult]
    """As they were the last time."""
    can_exclude: bool = False
    """Whether the run can go on without the devices of `bad`."""
    accept: bool = False
    """Whether the step is to be accepted although it is rejected again: it is finite, and the same on every
    device."""
    breach: bool = False
    """Whether it was no step that was rejected: what was loaded did not go on from where it was."""
    settles: bool = False
    """Whether nothing is left to compare with: if it fails again, and the fault does not follow a device, the
    ranks settle it themselves (see `policy.replay.settle`)."""


class Trial(msgspec.Struct, frozen=True, kw_only=True):
    """Told to an attempt that replays, from a lower rung, the steps in which a suspect failed."""

    suspects: list[str]
    """Checkpoints by name. They are condemned if this attempt completes step `until` without a breach."""
    until: int


class How(StrEnum):
    """What was settled about a step."""

    ACCEPTED = "accepted"
    """It is finite, and the same everywhere: used as it is."""
    TOLERATED = "tolerated"
    """It is not finite, and that is not put down to what was loaded: `validation.nan_policy` applies."""
    SHIFT = "shift"
    """From here on the level of the loss or the gradients is another one, whatever was loaded: no breach."""
    FATAL = "fatal"
    """It is not finite, whatever was loaded, and `validation.nan_policy` ends the run for it."""


class Settled(msgspec.Struct, frozen=True, kw_only=True):
    """A verdict on one step of the run's timeline. It is durable, and every later attempt that replays the
    step goes by it, whichever checkpoint it comes from."""

    step: int
    how: How
    window: Window | None = None
    """The step's data; None if the run does not own the data."""
    world_size: int = 0
    """Among how many ranks they were shared out; 0 if not known."""
    shown: bool = False
    """Whether it was shown elsewhere too; else the step was dropped where it came up, and nothing more."""
    why: str = ""


SHIFT_SEEN = 64
"""Steps after a shift in which it may be seen again: so far back reach the windows of checkpoints."""


def settled_as(
    settled: Iterable[Settled], how: How, step: int, window: Window | None, world_size: int
) -> Settled | None:
    """What was settled about this step, computed from these data; the latest that says most."""
    found = [one for one in settled if one.how is how and _covers(one, step, window, world_size)]
    return max(reversed(found), key=lambda one: one.shown, default=None)


def _covers(settled: Settled, step: int, window: Window | None, world_size: int) -> bool:
    if settled.how is How.SHIFT:
        return settled.step - LOOK_BACK <= step <= settled.step + SHIFT_SEEN
    if settled.step != step or (settled.world_size and world_size and settled.world_size != world_size):
        return False
    return settled.window is None or window is None or settled.window == window
