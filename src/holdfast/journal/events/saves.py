"""Events of saves and resumes: what was saved and deleted, how often, and what a resume used.

Each event of a save also has a line that `holdfast run` prints, stable and made to be searched for:

    holdfast: save scheduled: step 12, step_00000012-3fa9c1d2
    holdfast: save committed: step 12, step_00000012-3fa9c1d2, local, 1.2 GiB in 310 ms, training …
    holdfast: save replicated: step 12, step_00000012-3fa9c1d2, rank 0's part on node-b in 800 ms
    holdfast: save drained: step 12, step_00000012-3fa9c1d2, to the checkpoint root, 1.2 GiB in 3.1 s
    holdfast: save verified: step 12, step_00000012-3fa9c1d2, read back, 1.2 GiB in 6.0 s

`docs/guides/async-saves.md` has the table of them. Failures have words of their own: `save failed` is an
error in the log of rank 0, so it is not printed a second time.
"""

from __future__ import annotations

from collections import deque
from itertools import zip_longest

import msgspec

from holdfast.base import Rendered, duration, plural, printable, size
from holdfast.journal import Event, Unknown, because


def format_save_line(what: str, step: int, checkpoint: str, *more: str) -> str:
    return ", ".join([f"save {what}: step {step}", printable(checkpoint), *more])


class SaveStarted(Event, tag="save_started"):
    """A save has begun."""

    checkpoint: str
    step: int
    background: bool = False
    """Whether it is written by a process beside the rank, which may outlive the rank."""

    def render(self) -> Rendered:
        return Rendered(f"save started: {printable(self.checkpoint)}", "plain")

    def save_line(self) -> str:
        return format_save_line("scheduled", self.step, self.checkpoint)


class SaveCommitted(Event, tag="save_committed"):
    """A checkpoint is complete and durable; from here on a resume may use it."""

    checkpoint: str
    step: int
    parent: str | None
    bytes: int
    files: int
    seconds: float
    """Time from the call to the commit."""
    blocked_seconds: float
    """How long training stood still."""
    tier: str = "global"
    """`local`: committed on the nodes. A save to both tiers has two events, the second without blocking."""
    stored_seconds: float = 0.0
    """The part of `seconds` that rank 0 took to write and commit the files; 0 if not measured."""
    root: str = ""
    """The directory that it was committed in; empty for the local tier."""

    def render(self) -> Rendered:
        tier = " to the local tier" if self.tier == "local" else ""
        text = f"checkpoint committed{tier}: {printable(self.checkpoint)}, {self._took}"
        return Rendered(f"{text} (training stood still for {duration(self.blocked_seconds)})", "saved")

    def save_line(self, *, was_local: bool = False) -> str:
        """`was_local`: the local tier already had it, so this is how it came to the checkpoint root."""
        if was_local and self.tier != "local":
            return format_save_line(
                "drained", self.step, self.checkpoint, "to the checkpoint root", self._took
            )
        still = f"training stood still for {duration(self.blocked_seconds)}"
        return format_save_line(
            "committed", self.step, self.checkpoint, printable(self.tier), self._took, still
        )

    @property
    def _took(self) -> str:
        return f"{size(self.bytes)} in {duration(self.seconds)}"


class SaveFailed(Event, tag="save_failed"):
    """A save came to nothing; what was committed before is untouched."""

    checkpoint: str
    step: int
    error: str
    in_a_row: int

    def render(self) -> Rendered:
        row = f" ({self.in_a_row} in a row)" if self.in_a_row > 1 else ""
        return Rendered(f"save failed{row}: {printable(self.checkpoint)}: {printable(self.error)}", "fault")


class SaveSkipped(Event, tag="save_skipped"):
    """A save that was due was left out, on all ranks."""

    checkpoint: str
    step: int
    reason: str

    def render(self) -> Rendered:
        return Rendered(f"save left out: {printable(self.checkpoint)}: {printable(self.reason)}", "fault")

    def save_line(self) -> str:
        return format_save_line("skipped", self.step, self.checkpoint, printable(self.reason))


class CheckpointsDeleted(Event, tag="checkpoints_deleted"):
    """Retention, or `holdfast ckpt gc`, deleted these; everything older or newer is untouched."""

    names: list[str]
    reasons: list[str]
    """One for each name."""
    bytes: int

    def render(self) -> Rendered:
        text = f"{plural(len(self.names), 'checkpoint')} deleted, {size(self.bytes)}"
        pairs = zip_longest(self.names, self.reasons, fillvalue="")
        return Rendered(text, "plain", [printable(f"{name}: {why}") for name, why in pairs])


class CadenceChosen(Event, tag="cadence_chosen"):
    """How often the run saves from now on. Written at a start and when the interval changes notably."""

    interval: int
    """Steps between saves."""
    seconds: float
    """The same interval in time; 0 until a step has been measured."""
    overhead: float
    """Expected share of all time lost to saves and failures; 0 until something has been measured."""
    mtbf: float
    evidence: list[str]
    warnings: list[str] = msgspec.field(default_factory=list)
    tier: str = "global"
    """`local`: of saves to the local tier; `overhead` is then the share of time that these alone cost, and
    `mtbf` is 0."""

    def render(self) -> Rendered:
        every = f" ({duration(self.seconds)})" if self.seconds > 0 else ""
        cost = f"; expected overhead {self.overhead:.2%}" if self.overhead > 0 else ""
        warnings = [f"warning: {printable(item)}" for item in self.warnings]
        where = " to the local tier" if self.tier == "local" else ""
        text = f"saving{where} every {plural(self.interval, 'step')}{every}{cost}"
        style = "warning" if self.warnings else "decision"
        return Rendered(text, style, because(self.evidence) + warnings)


class RungRejected(Event, tag="rung_rejected"):
    """A checkpoint that a resume could not use, and why."""

    checkpoint: str
    step: int
    reasons: list[str]

    def render(self) -> Rendered:
        reasons = "; ".join(printable(reason) for reason in self.reasons)
        return Rendered(f"rung rejected: {printable(self.checkpoint)}: {reasons}", "warning")


class Resumed(Event, tag="resumed"):
    """The state is in place, from this checkpoint or for a fresh start."""

    checkpoint: str | None
    """None for a fresh start."""
    step: int
    seconds: float
    """From the start of the search to the state being in place."""
    world_size: int = 0
    """How many ranks resumed; 0 if not recorded."""
    saved_by: int = 0
    """How many ranks had saved it; 0 if not recorded."""
    bad_copies: list[str] = msgspec.field(default_factory=list)
    """Copies of it whose bytes are wrong: where, what is wrong, and what was read instead."""

    def render(self) -> Rendered:
        took = duration(self.seconds)
        if self.checkpoint is None:
            return Rendered(f"fresh start, after {took}", "good")
        return Rendered(f"resumed at step {self.step} from {printable(self.checkpoint)} in {took}", "good")


KEPT = 5000
"""How many local commits are remembered: if one comes to the root later, it was drained there."""


class SaveLines:
    """Lines for the events of one run's saves, in the order in which they came."""

    def __init__(self) -> None:
        self._local: deque[str] = deque(maxlen=KEPT)

    def line(self, body: Event | Unknown) -> str | None:
        """What to print for an event; None if it is not about a save."""
        if isinstance(body, Unknown):
            return None
        if not isinstance(body, SaveCommitted):
            return body.save_line()
        line = body.save_line(was_local=body.checkpoint in self._local)
        if body.tier == "local":
            self._local.append(body.checkpoint)
        return line
