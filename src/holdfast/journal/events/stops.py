"""Events of a stop on request: asked for, agreed on, saved, or forced at the deadline."""

from __future__ import annotations

from holdfast.base import Rendered, duration, printable
from holdfast.journal import Event


class StopAsked(Event, tag="stop_asked"):
    """Somebody or something asked the run to stop; from here on the deadline counts."""

    source: str
    """signal, stop_file, operator, time_limit or straggler."""
    detail: str
    """In words: which signal, who, why."""
    node: str = ""
    rank: int | None = None
    """Where it was seen; None if no rank saw it."""
    seconds: float | None = None
    """Until the hard deadline; None if there is none."""
    sender: str = ""
    """Of a signal, as far as the kernel tells; empty if that is not known."""

    def render(self) -> Rendered:
        limit = "" if self.seconds is None else f"; {duration(self.seconds)} until the deadline"
        return Rendered(f"asked to stop: {printable(self.detail)}{limit}", "decision")


class StopHastened(Event, tag="stop_hastened"):
    """The scheduler ends the job sooner than was known when the stop was asked for."""

    seconds: float
    """Until the hard deadline as it is now."""
    why: str

    def render(self) -> Rendered:
        text = f"the stop must be over within {duration(self.seconds)}: {printable(self.why)}"
        return Rendered(text, "warning")


class StopAgreed(Event, tag="stop_agreed"):
    """All ranks know after which step they stop."""

    step: int
    after: float
    """Seconds since it was asked for."""

    def render(self) -> Rendered:
        text = f"all ranks stop after step {self.step} (agreed in {duration(self.after)})"
        return Rendered(text, "decision")


class StopSaved(Event, tag="stop_saved"):
    """The state of the last step is safe, and the ranks end."""

    step: int
    checkpoint: str = ""
    """What holds it; empty if nothing was done yet that could be saved."""
    already: bool = False
    """Whether it had been saved before the stop was asked for."""
    seconds: float = 0.0
    """That the save took."""
    after: float = 0.0
    """Seconds since the stop was asked for."""

    def render(self) -> Rendered:
        if not self.checkpoint:
            return Rendered(f"stopped at step {self.step}: there was nothing to save", "good")
        how = "was saved already" if self.already else f"saved in {duration(self.seconds)}"
        text = f"stopped after step {self.step}: {printable(self.checkpoint)} {how}"
        return Rendered(f"{text}, {duration(self.after)} after it was asked", "good")


class StopForced(Event, tag="stop_forced"):
    """A stop did not come to its end by the deadline, or was asked for again: ended as it was."""

    why: str
    """Says so if the state was saved all the same."""
    rank: int | None = None
    stacks: str = ""
    """File with what every thread of the rank was doing."""

    def render(self) -> Rendered:
        whose = f"rank {self.rank}" if self.rank is not None else "the workers"
        details = [f"stacks: {printable(self.stacks)}"] if self.stacks else []
        return Rendered(f"{whose} ended by force: {printable(self.why)}", "fault", details)
