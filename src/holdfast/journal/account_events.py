"""The account of an incident, as the journal and the attempt's directory keep it."""

from __future__ import annotations

import msgspec

from holdfast.journal.base import Event

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
    """When the run last got on, where that was well before the fault was seen: a rank that stood still."""
    exit_code: int = 0
    """What the launch ends with; 0 if it goes on."""
    kind: str = FAILURE
    """failure, or stop: it was asked for."""
    files: list[str] = msgspec.field(default_factory=list)
    """Where the whole of it is kept: error files, last lines, stacks."""
    suspects: list[str] = msgspec.field(default_factory=list)
    """Checkpoints that may be the cause; what is found out about them later is told with it."""
    undecided: bool = False
    """A bad result of which the cause is looked for: another incident at the same step may name it."""
    alone: bool = False
    """Told by one launch or node that could ask nobody: what was decided about the attempt goes before it."""

    @property
    def ends(self) -> bool:
        """Whether the run does not go on by itself."""
        return self.exit_code != 0
