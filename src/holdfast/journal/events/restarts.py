"""Events of a restart in place: a function that starts again in the processes that there are."""

from __future__ import annotations

import msgspec

from holdfast.base import Rendered, duration, plural, printable
from holdfast.journal import Event, because

_BEFELL = {
    "exception": "raised",
    "lost": "ended",
    "soft_timeout": "stood still",
    "hard_timeout": "was ended by its keeper",
    "silent": "was lost with its node",
    "late": "did not come to the barrier",
    "unfit": "is not fit to go on",
    "asked": "asked for a restart",
}


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

    def render(self) -> Rendered:
        details = [f"after step {self.step}"] if self.step else []
        return Rendered(self.summary(), "fault", details)

    def summary(self) -> str:
        """What befell whom: "rank 1 on a raised: ValueError: bad sample"."""
        reserve = f"reserve {self.member}" if self.member >= 0 else "a process"
        who = reserve if self.rank is None else f"rank {self.rank}"
        where = f" on {self.node}" if self.node else ""
        text = f"{who}{where} {_BEFELL.get(self.kind, self.kind)}"
        return printable(f"{text}: {self.detail}" if self.detail else text)


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

    def render(self) -> Rendered:
        text = f"restart in place: iteration {self.iteration} with {plural(self.world_size, 'rank')}"
        text += f" and {plural(len(self.reserves), 'reserve')}" if self.reserves else ""
        text += f", planned {duration(self.seconds)} after the fault" if self.seconds else ""
        details = because([self.reason]) if self.reason else []
        if self.promoted:
            details.append(f"promoted: {', '.join(map(self._place, self.promoted))}")
        return Rendered(text, "decision", details)

    def _place(self, member: int) -> str:
        rank = self.order.index(member) if member in self.order else member
        return f"process {member} as rank {rank}"


class RestartHandedOver(Event, tag="restart_handed_over"):
    """There is no further iteration in these processes; who started them decides what follows."""

    iteration: int
    """The last one."""
    reason: str
    exit_code: int
    """That the processes end with."""

    def render(self) -> Rendered:
        text = f"not restarted in place after iteration {self.iteration}: {printable(self.reason)}"
        return Rendered(text, "fault", [f"the processes end with code {self.exit_code}"])


class FunctionRestarted(Event, tag="function_restarted"):
    """The function starts again in this process."""

    iteration: int
    rank: int
    seconds: float
    """Since this process knew that the iteration before had ended."""

    def render(self) -> Rendered:
        text = f"iteration {self.iteration} begins as rank {self.rank}"
        return Rendered(f"{text}, {duration(self.seconds)} after the last one ended", "good")
