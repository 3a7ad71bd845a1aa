"""Events of in-process restart: a function that starts again in the processes that there are."""

from __future__ import annotations

import msgspec

from holdfast.journal.base import Event


class RestartFaulted(Event, tag="restart_faulted"):
    """What ended an iteration of a restartable function, or befell a process in it."""

    iteration: int
    member: int
    """The process, by the rank that it was started with; -1 if it is not known which."""
    kind: str
    """exception, lost, soft_timeout, hard_timeout, silent, late, unfit or asked."""
    rank: int | None = None
    """Under which it trained; None for a reserve."""
    node: str = ""
    detail: str = ""
    step: int = 0
    """The last one that it completed, as far as is known."""
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
    """There is no further iteration in these processes; who started them decides what follows."""

    iteration: int
    """The last one."""
    reason: str
    exit_code: int
    """That the processes end with."""


class FunctionRestarted(Event, tag="function_restarted"):
    """The function starts again in this process."""

    iteration: int
    rank: int
    seconds: float
    """Since this process knew that the iteration before had ended."""
