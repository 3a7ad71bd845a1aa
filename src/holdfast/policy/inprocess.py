"""Whether a function may start again in the same processes, and which of them take part. Pure.

Guarantee: there is one policy of recovery. What befell the members is evidence like any other, an iteration
is an attempt like any other, and `recovery.recover` decides on both; here it is only said how to see them so,
and which of its decisions can be carried out in these processes. So any sequence of faults ends in progress
or in a clear end, by the same budgets.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

import msgspec

from holdfast.policy.actions import Action
from holdfast.policy.budgets import PastAttempt
from holdfast.policy.classify import diagnose, is_symptom
from holdfast.policy.evidence import Evidence, Hang, Loss, LostNode, WorkerEnd
from holdfast.policy.faults import Fault, FaultKind
from holdfast.policy.recovery import Decision, Situation, recover
from holdfast.settings_inprocess import InProcessSettings

STAYS = frozenset({Action.RESTART, Action.LOWER_RUNG})
"""What can be done without starting processes: the others ask for other nodes, devices or an end."""

_STOOD_STILL = frozenset({FaultKind.SOFT_TIMEOUT, FaultKind.HARD_TIMEOUT, FaultKind.LATE})


class Limits(msgspec.Struct, frozen=True, kw_only=True):
    """What the settings allow, for so many started processes."""

    wanted: int
    """Ranks that train."""
    least: int | None
    """Ranks that may do; None: not fewer than `wanted`."""
    whole_nodes: bool
    max_iterations: int | None
    max_rank_faults: int | None


def limits_of(chosen: InProcessSettings, members: int) -> Limits:
    return Limits(
        wanted=members if chosen.active_world_size == "all" else chosen.active_world_size,
        least=None if chosen.min_world_size == "active" else chosen.min_world_size,
        whole_nodes=chosen.granularity == "node",
        max_iterations=None if chosen.max_iterations == "budget" else chosen.max_iterations,
        max_rank_faults=None if chosen.max_rank_faults == "any" else chosen.max_rank_faults,
    )


def blamed(faults: Sequence[Fault]) -> set[int]:
    """The members whose own faults these are.

    Not those that only lost a peer; nor those that stood still together, for most of them waited for one.
    """
    still = {fault.member for fault in faults if fault.kind is FaultKind.SOFT_TIMEOUT}
    return {
        fault.member
        for fault in faults
        if fault.member >= 0
        and not is_symptom(fault.exit_code, fault.detail)
        and not (fault.kind is FaultKind.SOFT_TIMEOUT and len(still) > 1)
    }


def over_the_limit(counted: Mapping[int, int], limits: Limits) -> list[int]:
    """The members that had more faults than one may have."""
    if limits.max_rank_faults is None:
        return []
    return sorted(member for member, times in counted.items() if times > limits.max_rank_faults)


def count(counted: Counter[int], faults: Sequence[Fault]) -> Counter[int]:
    """The faults of each member so far, with those of another iteration."""
    return counted + Counter(blamed(faults))


def evidence_of(faults: Sequence[Fault], world_size: int) -> Evidence:
    """What befell the members, as what an incident left to judge by."""
    ends, hangs, lost = [], [], []
    for fault in faults:
        if fault.kind in _STOOD_STILL:
            hangs.append(Hang(rank=fault.rank, at=fault.at, node=fault.node))
        elif fault.kind is FaultKind.SILENT:
            lost.append(LostNode(node=fault.node, how=Loss.SILENT, at=fault.at, detail=fault.detail))
        elif fault.kind is FaultKind.UNFIT:
            lost.append(LostNode(node=fault.node, how=Loss.REFUSED, at=fault.at, detail=fault.detail))
        else:
            ends.append(
                WorkerEnd(
                    rank=fault.rank,
                    # What raised would have ended its process with a code of its own, 1 unless it says so.
                    exit_code=fault.exit_code or int(fault.kind is FaultKind.EXCEPTION),
                    at=fault.at,
                    node=fault.node,
                    message=fault.detail,
                    errors=fault.errors,
                )
            )
    return Evidence(ends=ends, hangs=hangs, lost=lost, world_size=world_size)


def failed_iteration(
    iteration: int,
    faults: Sequence[Fault],
    *,
    launch: str,
    order: Sequence[int],
    nodes: Sequence[str],
    committed: int,
    seconds: float,
    at: float,
) -> PastAttempt:
    """An iteration that ended by these faults, as an attempt."""
    found = diagnose(evidence_of(faults, len(order)))
    return PastAttempt(
        number=iteration + 1,
        launch=launch,
        outcome="failed",
        cause=found.cause,
        exit_code=found.exit_code,
        message=found.message,
        highest_step=committed,
        culprit_node=found.culprit_node,
        alike=found.alike,
        same_ranks=found.same_ranks,
        root_rank=found.root_rank,
        seconds=seconds,
        at=at,
        nodes=list(nodes),
        node_count=len(nodes),
        world_size=len(order),
        placement=" ".join(map(str, order)),
    )


def decide(
    history: Sequence[PastAttempt], failed: PastAttempt, faults: Sequence[Fault], max_restarts: int
) -> Decision:
    """What recovery decides about an iteration that failed."""
    facts = [fault.describe() for fault in faults]
    return recover(history, Situation(attempt=failed, max_restarts=max_restarts, facts=facts))


def after(failed: PastAttempt, decision: Decision) -> PastAttempt:
    """A failed iteration with what was decided about it: what the next decision looks back on."""
    return msgspec.structs.replace(failed, action=decision.action, avoid=decision.avoid)
