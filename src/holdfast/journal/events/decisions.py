"""Events of what was decided: for the whole group, about an incident, and by an operator."""

from __future__ import annotations

from typing import Any

import msgspec

from holdfast.base import Rendered, printable
from holdfast.journal import Event, because


class RejectedOption(msgspec.Struct, frozen=True):
    option: str
    why: list[str]


class DecisionMade(Event, tag="decision"):
    """A choice made for the whole group, with what it rests on."""

    about: str
    """resume, recovery, …"""
    chosen: str
    evidence: list[str]
    rejected: list[RejectedOption] = msgspec.field(default_factory=list)
    details: dict[str, Any] = msgspec.field(default_factory=dict)

    def render(self) -> Rendered:
        details = because(self.evidence)
        for option in self.rejected:
            why = "; ".join(printable(reason) for reason in option.why) or "no reason given"
            details.append(f"not {printable(option.option)}: {why}")
        return Rendered(f"decided {printable(self.about)}: {printable(self.chosen)}", "decision", details)


FAILURE, STOP = "failure", "stop"


class Account(Event, tag="account"):
    """Five answers about one incident, in plain English. Made once, by whoever decided about it.

    What it cost is not known yet when it is made: that follows from the journal (`account.incidents`).
    """

    attempt: int
    """The attempt that failed."""
    cause: str
    """The class of the cause, for programs: see `policy.signs.Cause`."""
    who: str
    """Who failed first: a rank, a node, a device; "the job" where that is not known."""
    what: str
    """What it did, as the end of a sentence that begins with `who`."""
    why: list[str] = msgspec.field(default_factory=list)
    """What that rests on, the strongest first."""
    done: str = ""
    """What was decided, with the step that the run goes on from."""
    next: str = ""
    """What a person has to do."""
    step: int | None = None
    """The last step that was complete."""
    saved: int | None = None
    """The step of the newest checkpoint that can be used; None if there is none."""
    began: float | None = None
    """When the run last made progress, if well before the fault was seen: for a rank that stood still."""
    exit_code: int = 0
    """The code that the launch ends with; 0 if it goes on."""
    kind: str = FAILURE
    """failure, or stop if it was asked for."""
    files: list[str] = msgspec.field(default_factory=list)
    """Where all of it is kept: error files, last lines, stacks."""
    suspects: list[str] = msgspec.field(default_factory=list)
    """Checkpoints that may be the cause; what is learned about them later is shown with the account."""
    undecided: bool = False
    """A bad result whose cause is still sought: another incident at the same step may name it."""
    alone: bool = False
    """By one launch or node that could ask nobody: what was decided about the attempt takes precedence."""

    @property
    def ends(self) -> bool:
        """Whether the run does not go on by itself."""
        return self.exit_code != 0

    def render(self) -> Rendered:
        details = because(self.why)
        details += [f"done: {printable(self.done)}", f"next: {printable(self.next)}"]
        return Rendered(printable(f"{self.who} {self.what}"), "fault", details)


class OperatorActed(Event, tag="operator_acted"):
    """Somebody asked something of the run; the record of what they asked is durable already."""

    action: str
    """pause, unpause, reset_budget, pin, unpin, exclude or readmit."""
    subject: str = ""
    """What it is about: a checkpoint, a node, a device."""
    reason: str = ""
    by: str = ""

    def render(self) -> Rendered:
        what = printable(f"{self.action.replace('_', ' ')} {self.subject}".strip())
        details = because([self.reason]) if self.reason else []
        return Rendered(f"{printable(self.by) or 'an operator'} asked: {what}", "decision", details)
