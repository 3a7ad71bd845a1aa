"""Events of life on a cluster: stopping on request, the scheduler, and the health of nodes."""

from __future__ import annotations

import msgspec

from holdfast.journal.base import Event


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


class StopHastened(Event, tag="stop_hastened"):
    """The scheduler ends the job sooner than was known when the stop was asked for."""

    seconds: float
    """Until the hard deadline as it is now."""
    why: str


class StopAgreed(Event, tag="stop_agreed"):
    """All ranks know after which step they stop."""

    step: int
    after: float
    """Seconds since it was asked for."""


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


class StopForced(Event, tag="stop_forced"):
    """A stop did not come to its end by the deadline, or was asked for again: ended as it was."""

    why: str
    """Says so if the state was saved all the same."""
    rank: int | None = None
    stacks: str = ""
    """File with what every thread of the rank was doing."""


class JobFound(Event, tag="job_found"):
    """What the scheduler says of the job that an attempt runs in."""

    scheduler: str
    job: str
    """As the scheduler names it: `1234`, or `1230_4` for a task of an array."""
    restarts: int = 0
    """How often the scheduler has queued it again."""
    nodes: list[str] = msgspec.field(default_factory=list)
    ends_at: float | None = None
    """Seconds since 1970 at which it will be ended; None if never, or if that is not known."""
    requeue: str = ""
    """The run's slurm.requeue; empty if an older release wrote this."""
    partition: str = ""


class RequeueAsked(Event, tag="requeue_asked"):
    """The scheduler was asked to queue the job again, or why not."""

    job: str
    asked: bool
    reason: str
    exclude: list[str] = msgspec.field(default_factory=list)
    """Nodes that the next start should do without."""


class HealthFailed(Event, tag="health_failed"):
    """Health checks of a node that did not pass."""

    node: str
    status: str
    """warning, critical or unknown: the worst of them."""
    problems: list[str]
    kept_out: bool = False
    """Whether the node may not take part because of it."""


class PingFailed(Event, tag="ping_failed"):
    """Ranks that did not answer a liveness ping in time."""

    step: int
    missing: list[int]
    seconds: float
