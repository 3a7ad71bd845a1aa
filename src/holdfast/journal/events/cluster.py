"""Events of the machines and their scheduler: the job, its requeue, and the health of nodes and ranks."""

from __future__ import annotations

import msgspec

from holdfast.base import Rendered, duration, moment, plural, printable
from holdfast.journal import Event


class JobFound(Event, tag="job_found"):
    """What the scheduler says about the job that an attempt runs in."""

    scheduler: str
    job: str
    """As the scheduler names it: `1234`, or `1230_4` for a task of an array."""
    restarts: int = 0
    """How often the scheduler has queued it again."""
    nodes: list[str] = msgspec.field(default_factory=list)
    ends_at: float | None = None
    """When it will be ended, in seconds since 1970; None if never, or if not known."""
    requeue: str = ""
    """The run's slurm.requeue; empty if this was written by an older release."""
    partition: str = ""

    def render(self) -> Rendered:
        text = f"{printable(self.scheduler)} job {printable(self.job)} on {plural(len(self.nodes), 'node')}"
        text += f", queued again {plural(self.restarts, 'time')}" if self.restarts else ""
        details = []
        if self.ends_at is not None:
            details.append(f"ends at {moment(self.ends_at)}")
        if self.requeue == "never":
            details.append("is not to be queued again: slurm.requeue = never")
        return Rendered(text, "plain", details)


class RequeueAsked(Event, tag="requeue_asked"):
    """Whether the scheduler was asked to queue the job again, and why or why not."""

    job: str
    asked: bool
    reason: str
    exclude: list[str] = msgspec.field(default_factory=list)
    """Nodes that the next start should do without."""

    def render(self) -> Rendered:
        what = "was asked to queue" if self.asked else "was not asked to queue"
        details = [f"without {', '.join(map(printable, self.exclude))}"] if self.exclude else []
        text = f"the scheduler {what} job {printable(self.job)} again: {printable(self.reason)}"
        return Rendered(text, "decision" if self.asked else "plain", details)


class HealthFailed(Event, tag="health_failed"):
    """Health checks that a node did not pass."""

    node: str
    status: str
    """warning, critical or unknown: the worst of them."""
    problems: list[str]
    kept_out: bool = False
    """Whether the node is barred from taking part because of it."""

    def render(self) -> Rendered:
        then = "; it is kept out" if self.kept_out else ""
        text = f"health of {printable(self.node)} is {printable(self.status)}{then}"
        style = "fault" if self.kept_out else "warning"
        return Rendered(text, style, [printable(problem) for problem in self.problems])


class PingFailed(Event, tag="ping_failed"):
    """Ranks that did not answer a liveness ping in time."""

    step: int
    missing: list[int]
    seconds: float

    def render(self) -> Rendered:
        who = f"{plural(len(self.missing), 'rank')} ({', '.join(map(str, self.missing))})"
        text = f"no answer to the ping at step {self.step} from {who} in {duration(self.seconds)}"
        return Rendered(text, "fault")
