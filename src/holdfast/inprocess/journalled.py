"""What the journal is told of a restart, from what members and conductor say to each other. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from holdfast.inprocess.messages import Over, Plan
from holdfast.journal.restart_events import RestartFaulted, RestartHandedOver, RestartPlanned
from holdfast.policy.faults import Fault


def faulted(fault: Fault, iteration: int, ended: int = 0) -> RestartFaulted:
    """`iteration` and `ended`: the one that the fault is of, and the attempt that it was, if any."""
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


def planned(plan: Plan, before: Sequence[int], now: float, ended: int = 0) -> RestartPlanned:
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
