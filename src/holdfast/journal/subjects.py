"""What every event is; events of accounts, the cluster, restarts in place and stragglers."""

from __future__ import annotations

from statistics import median

import msgspec

# What every event of the journal is; the events are in events.py and the other files named so.


class Event(msgspec.Struct, tag_field="event", kw_only=True, omit_defaults=True):
    """Base of all events."""


class StopAsked(Event, tag="stop_asked"):
    """Somebody or something asked the run to stop; from here on the deadline counts."""

    source: str
    """signal, stop_file, operator, time_limit or straggler."""
    detail: str
    """In words: which signal, who, why."""
    node: str = ""
    rank: int | None = None
    """The rank that saw it; None if no rank did."""
    seconds: float | None = None
    """Until the hard deadline; None if there is none."""
    sender: str = ""
    """Who sent a signal, if the kernel provides it; empty if that is not known."""


class StopHastened(Event, tag="stop_hastened"):
    """The scheduler ends the job sooner than was known when the stop was asked for."""

    seconds: float
    """Until the present hard deadline."""
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
    """The checkpoint that holds it; empty if there was nothing to save yet."""
    already: bool = False
    """Whether it had been saved before the stop was asked for."""
    seconds: float = 0.0
    """How long the save took."""
    after: float = 0.0
    """Seconds since the stop was asked for."""


class StopForced(Event, tag="stop_forced"):
    """A stop was not complete by the deadline, or was asked for again: the process was ended as it was."""

    why: str
    """Says so if the state was saved nevertheless."""
    rank: int | None = None
    stacks: str = ""
    """File with what every thread of the rank was doing."""


class JobFound(Event, tag="job_found"):
    """What the scheduler says about the job in which an attempt runs."""

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
    """Whether the node is kept out because of it."""


class PingFailed(Event, tag="ping_failed"):
    """Ranks that did not answer a liveness ping in time."""

    step: int
    missing: list[int]
    seconds: float


# Events of in-process restart: a function that starts again in the processes that there are.


class RestartFaulted(Event, tag="restart_faulted"):
    """What ended an iteration of a restartable function, or what happened to a process in it."""

    iteration: int
    member: int
    """The process, by the rank that it was started with; -1 if it is not known which."""
    kind: str
    """exception, lost, soft_timeout, hard_timeout, silent, late, unfit or asked."""
    rank: int | None = None
    """The rank under which it trained; None for a reserve."""
    node: str = ""
    detail: str = ""
    step: int = 0
    """The last step that it completed, as far as is known."""
    at: float = 0.0
    """When, in seconds since 1970; the line may be written later."""
    ended: int = 0
    """The attempt that this ended; 0 if it is not known to have ended one."""


class RestartPlanned(Event, tag="restart_planned"):
    """There is another iteration: who takes part in it, and why."""

    iteration: int
    world_size: int
    order: list[int] = msgspec.field(default_factory=list)
    """Processes by rank; empty if all train under the rank that they were started with."""
    reserves: list[int] = msgspec.field(default_factory=list)
    promoted: list[int] = msgspec.field(default_factory=list)
    """Processes that were reserves before."""
    reason: str = ""
    seconds: float = 0.0
    """From the first fault to the plan."""
    ended: int = 0
    """The attempt that the iteration before was, if it was one."""


class RestartHandedOver(Event, tag="restart_handed_over"):
    """There is no further iteration in these processes; whatever started them decides what follows."""

    iteration: int
    """The last one."""
    reason: str
    exit_code: int
    """The exit code of the processes."""


class FunctionRestarted(Event, tag="function_restarted"):
    """The function starts again in this process."""

    iteration: int
    rank: int
    seconds: float
    """Since this process learned that the previous iteration had ended."""


# Events of the straggler detector.


class StragglersReported(Event, tag="stragglers_reported"):
    """What the ranks measured since the last report. The lists have one entry per row; a row is a rank or
    a node.
    """

    step: int
    """The last one measured."""
    steps: int
    """How many steps were measured, on the rank with the fewest."""
    seconds: float
    """Since the last report."""
    step_seconds: float
    """Time of a step, the median over the ranks."""
    ranks: list[int]
    """The rank of each row; for a node, its slowest rank."""
    nodes: list[str] = msgspec.field(default_factory=list)
    sections: dict[str, list[float]] = msgspec.field(default_factory=dict)
    """Seconds of an average step by section until the rank arrived."""
    waiting: list[float] = msgspec.field(default_factory=list)
    """Seconds of it for which the rank is known to have waited for others."""
    relative: list[float | None] = msgspec.field(default_factory=list)
    """Speed against the other ranks: 1 means as fast as they are."""
    individual: list[float | None] = msgspec.field(default_factory=list)
    """Speed against its own best."""
    by_node: bool = False
    """Whether a row is a node: there are too many ranks to list."""
    group_slower: bool = False
    """Most ranks lost speed at once, so none could be named."""

    def behind(self, rank: int | None, node: str) -> float:
        """Seconds for which the others waited for that rank (or, without one, for the slowest of that node):
        how much later than most of them it arrived in an average step, times the steps."""
        arrived = [sum(column[row] for column in self.sections.values()) for row in range(len(self.ranks))]
        mine = {
            row
            for row in range(len(self.ranks))
            if (self.ranks[row] == rank if rank is not None else self.nodes[row] == node)
        }
        others = [value for row, value in enumerate(arrived) if row not in mine]
        if not mine or not others or not self.sections:
            return 0.0
        return max(0.0, max(arrived[row] for row in mine) - median(others)) * self.steps


class StragglerFound(Event, tag="straggler_found"):
    """A rank, or a node, that the others wait for."""

    step: int
    kind: str
    """compute, input, section, other or node."""
    section: str
    """Where most of the time goes."""
    why: str
    """In words, with the figures."""
    rank: int | None = None
    """None for a whole node."""
    node: str = ""
    device: str = ""
    relative: float | None = None
    individual: float | None = None
    seconds: float = 0.0
    """How much longer a step takes because of it."""
    then: str = "told"
    """told, stop (the run saves and stops) or exclude (it continues without that device)."""


# The account of an incident, as the journal and the attempt's directory keep it.


FAILURE, STOP = "failure", "stop"


class Account(Event, tag="account"):
    """Five answers about one incident, in plain English. Made once, by the process that decided about it.
    The cost is not yet known at that time; it follows from the journal (`account.incidents`).
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
    """The evidence, the strongest first."""
    done: str = ""
    """What was decided, with the step from which the run continues."""
    next: str = ""
    """What a person has to do."""
    step: int | None = None
    """The last step that was complete."""
    saved: int | None = None
    """The step of the newest checkpoint that can be used; None if there is none."""
    began: float | None = None
    """When the run last made progress, if that was well before the fault was noticed: a rank that stood
    still.
    """
    exit_code: int = 0
    """What the launch ends with; 0 if it continues."""
    kind: str = FAILURE
    """failure, or stop (on request)."""
    files: list[str] = msgspec.field(default_factory=list)
    """Where the full details are kept: error files, last lines, stacks."""
    suspects: list[str] = msgspec.field(default_factory=list)
    """Checkpoints that may be the cause; later findings about them are reported with it."""
    undecided: bool = False
    """A bad result whose cause is still being looked for: another incident at the same step may name it."""
    alone: bool = False
    """Made by a single launch or node that could ask no other: what was decided about the attempt takes
    precedence.
    """

    @property
    def ends(self) -> bool:
        """Whether the run does not go on by itself."""
        return self.exit_code != 0
