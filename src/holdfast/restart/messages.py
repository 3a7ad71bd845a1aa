"""What members, keepers and the conductor say to each other, under which keys, and what the journal is told.

A *member* is a process, known by the rank that it was started with, which it never loses; the ranks that it
trains as may change. A *keeper* runs outside the members of one node: it sees them end, and ends those that
hang. One of the keepers, where the store is hosted, is the *conductor*: it alone makes plans.

An *iteration* is one call of the function on all active members. All keys live in a c10d store under PREFIX
and are written once, by compare-and-set:

    end/<i>          how iteration i ended: the first word counts. All wait for this one key.
    fault/<i>/<m>    what befell member m in iteration i, as evidence; the first word counts
    ready/<i>/<m>    member m has left the iteration before and can be part of iteration i
    plan/<i>         Plan or Over: what iteration i is to be. Only the conductor writes it
    gone/<m>         member m will never come back: the Fault, or null if it said farewell; only its keeper
                     and the conductor write it
    keeper/<n>       where node n's keeper is reached

and these are counted up with `add`: `arrived/<i>` after each ready, `done/<i>` when the function has returned
on an active member, `stepped/<i>` by each member that has completed its first step, `lost` after each gone,
`keeps` after each keeper, `left` by each keeper whose members need it no longer, and `beat/<n>` by a keeper
as its sign of life.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import StrEnum

import msgspec

from holdfast.journal.events import RestartFaulted, RestartHandedOver, RestartPlanned
from holdfast.policy import Decision, Fault

PREFIX = "holdfast/restart"
LOST, KEEPS, LEFT = "lost", "keeps", "left"


def text(value: object) -> str:
    """A value as it is written into the store."""
    return msgspec.json.encode(value).decode()


UNREADABLE = (msgspec.MsgspecError, ValueError, RecursionError)
"""What reading raises if somebody else has written into the store."""


def lost_store(error: Exception) -> str:
    """Says in words that the store could no longer be read or written."""
    first_line = str(error).partition("\n")[0]
    return f"the store was lost: {first_line}"


def end_key(iteration: int) -> str:
    return f"end/{iteration}"


def fault_key(iteration: int, member: int) -> str:
    return f"fault/{iteration}/{member}"


def ready_key(iteration: int, member: int) -> str:
    return f"ready/{iteration}/{member}"


def arrived_key(iteration: int) -> str:
    return f"arrived/{iteration}"


def done_key(iteration: int) -> str:
    return f"done/{iteration}"


def stepped_key(iteration: int) -> str:
    return f"stepped/{iteration}"


def plan_key(iteration: int) -> str:
    return f"plan/{iteration}"


def gone_key(member: int) -> str:
    return f"gone/{member}"


def keeper_key(node: str) -> str:
    return f"keeper/{node}"


def beat_key(node: str) -> str:
    return f"beat/{node}"


class EndKind(StrEnum):
    FAULT = "fault"
    COMPLETED = "completed"


class End(msgspec.Struct, frozen=True, kw_only=True):
    """How an iteration ended."""

    kind: EndKind
    fault: Fault | None = None


class Ready(msgspec.Struct, frozen=True, kw_only=True):
    """A member at the barrier before an iteration."""

    member: int
    node: str
    pid: int
    seconds: float = 0.0
    """From the end of the iteration before to the barrier."""
    unfit: str = ""
    """Why it cannot take part: what its health check found. Such a member leaves."""
    stop: str = ""
    """The signal, such as SIGTERM, that asked it meanwhile to stop the run; empty if none did."""
    committed: int = 0
    """The highest step that it knows to be committed: what counts as progress."""
    attempt: int = 0
    """The attempt that its run was in the last iteration; 0 if there was no run."""


class IterationPlan(msgspec.Struct, frozen=True, kw_only=True, tag="plan"):
    """Who is who in an iteration. A member in neither list leaves."""

    iteration: int
    order: list[int]
    """Members by rank."""
    reserves: list[int] = []
    reason: str = ""
    """Why there is another iteration; empty for the first."""
    faults: list[Fault] = []
    """Those of the iteration before."""
    decision: Decision | None = None
    """The decision behind the plan, if no launcher made and reports it."""
    ended: int = 0
    """The attempt that the iteration before was; 0 if it was none."""
    committed: int = 0
    """The highest step that was known to be committed at that iteration's end."""
    launch: dict[str, object] = {}
    """The fields of `LaunchInfo` that changed under `holdfast run`: the attempt, its epoch, what to avoid."""


class OverKind(StrEnum):
    HANDED_OVER = "handed_over"
    """These processes must not go on."""
    STOPPED = "stopped"
    """A signal asked for it."""


class Over(msgspec.Struct, frozen=True, kw_only=True, tag="over"):
    """There is no further iteration."""

    kind: OverKind
    reason: str
    exit_code: int
    faults: list[Fault] = []
    decision: Decision | None = None
    ended: int = 0
    committed: int = 0
    """As in a plan."""


Next = IterationPlan | Over


class NodeKeeper(msgspec.Struct, frozen=True, kw_only=True):
    """A node's keeper."""

    path: str
    """The path of the socket on which it listens."""
    pid: int


class MemberHello(msgspec.Struct, frozen=True, kw_only=True, tag="hello"):
    """A member's first word to its keeper; the keeper believes the pid only if the kernel confirms it."""

    member: int
    pid: int


class Beat(msgspec.Struct, frozen=True, kw_only=True, tag="beat"):
    """A member's sign of life, from its lookout thread about once a second."""

    iteration: int
    rank: int = -1
    inside: bool = False
    """Whether the main thread is in the function."""
    idle: float = 0.0
    """Seconds since its main thread last made progress; not counted in Holdfast's own bounded work."""
    allowance: float = 0.0
    """Seconds for which it may be idle beyond hard_timeout: a first step is not done yet."""
    leaving: float = 0.0
    """Seconds since the iteration's end became known, while the main thread has not left the function."""
    step: int = 0


class Farewell(msgspec.Struct, frozen=True, kw_only=True, tag="farewell"):
    """This member no longer needs a keeper: from here on, how it ends is its own affair."""


Said = MemberHello | Beat | Farewell


# What the journal is told of a restart, from what members and conductor say to each other. Pure.


def faulted(fault: Fault, iteration: int, ended: int = 0) -> RestartFaulted:
    """`iteration`: where the fault happened; `ended`: the attempt that this iteration was, if it was one."""
    return RestartFaulted(
        iteration=iteration,
        member=fault.member,
        kind=fault.kind.value,
        rank=fault.rank if fault.rank >= 0 else None,
        node=fault.node,
        detail=fault.detail,
        step=fault.step,
        at=fault.at,
        ended=ended,
    )


def planned(plan: IterationPlan, before: Sequence[int], now: float, ended: int = 0) -> RestartPlanned:
    """`before`: the order of the iteration before; `now`: when the plan was made, in seconds since 1970."""
    known = set(before)
    first = min((fault.at for fault in plan.faults if fault.at), default=now)
    return RestartPlanned(
        iteration=plan.iteration,
        world_size=len(plan.order),
        order=[] if plan.order == list(range(len(plan.order))) else plan.order,
        reserves=plan.reserves,
        promoted=[member for member in plan.order if member not in known],
        reason=plan.reason,
        seconds=max(0.0, now - first),
        ended=ended,
    )


def handed_over(over: Over, iteration: int) -> RestartHandedOver:
    return RestartHandedOver(iteration=iteration, reason=over.reason, exit_code=over.exit_code)
