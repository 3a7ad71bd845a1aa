"""In-process restart: whether it may go on, who takes part under which rank, whether its limits fit. Pure.

Guarantee: there is only one recovery policy. What happened to the members is evidence like any other, an
iteration is an attempt like any other, and `recovery.recover` decides about both. This module only says how
to present them as such, and which of its decisions can be carried out in these processes. So any sequence of
faults ends in progress or in a clear end, by the same budgets.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet

import msgspec

from holdfast.config import LONGEST_WAIT, InProcessSettings
from holdfast.policy.budgets import PastAttempt
from holdfast.policy.diagnosis import diagnose, is_symptom
from holdfast.policy.evidence import Evidence, Fault, FaultKind, Hang, Loss, LostNode, WorkerEnd
from holdfast.policy.recovery import Decision, Situation, recover
from holdfast.policy.signs import Action
from holdfast.policy.timeouts import STEP, Value, hides

STAYS = frozenset({Action.RESTART, Action.LOWER_RUNG})
"""What can be done without starting processes. The other actions need other nodes or devices, or an end."""

_STOOD_STILL = frozenset({FaultKind.SOFT_TIMEOUT, FaultKind.HARD_TIMEOUT, FaultKind.LATE})


class InProcessLimits(msgspec.Struct, frozen=True, kw_only=True):
    """What the settings allow, given the number of started processes."""

    wanted: int
    """How many ranks train."""
    least: int | None
    """How few ranks are enough; None: not fewer than `wanted`."""
    whole_nodes: bool
    max_iterations: int | None
    max_rank_faults: int | None


def limits_of(chosen: InProcessSettings, members: int) -> InProcessLimits:
    return InProcessLimits(
        wanted=members if chosen.active_world_size == "all" else chosen.active_world_size,
        least=None if chosen.min_world_size == "active" else chosen.min_world_size,
        whole_nodes=chosen.granularity == "node",
        max_iterations=None if chosen.max_iterations == "budget" else chosen.max_iterations,
        max_rank_faults=None if chosen.max_rank_faults == "any" else chosen.max_rank_faults,
    )


def blamed(faults: Sequence[Fault]) -> set[int]:
    """The members whose own faults these are.

    Excludes those that only lost a peer, and those that stood still together, as most of them waited for one.
    """
    still = {fault.member for fault in faults if fault.kind is FaultKind.SOFT_TIMEOUT}
    return {
        fault.member
        for fault in faults
        if fault.member >= 0
        and not is_symptom(fault.exit_code, fault.detail)
        and not (fault.kind is FaultKind.SOFT_TIMEOUT and len(still) > 1)
    }


def over_the_limit(counted: Mapping[int, int], limits: InProcessLimits) -> list[int]:
    """The members that had more faults than a member may have."""
    if limits.max_rank_faults is None:
        return []
    return sorted(member for member, times in counted.items() if times > limits.max_rank_faults)


def count(counted: Counter[int], faults: Sequence[Fault]) -> Counter[int]:
    """The number of faults of each member so far, including those of one more iteration."""
    return counted + Counter(blamed(faults))


def evidence_of(faults: Sequence[Fault], world_size: int) -> Evidence:
    """What happened to the members, as the evidence that an incident is judged by."""
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
                    # An exception would have ended its process with code 1, unless it has a code of its own.
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
    """An iteration that these faults ended, as an attempt."""
    found = diagnose(evidence_of(faults, len(order)))
    return PastAttempt(
        number=iteration + 1,
        launch=launch,
        outcome="failed",
        highest_step=committed,
        seconds=seconds,
        at=at,
        nodes=list(nodes),
        node_count=len(nodes),
        world_size=len(order),
        placement=" ".join(map(str, order)),
        **msgspec.structs.asdict(found),
    )


def decide(
    history: Sequence[PastAttempt], failed: PastAttempt, faults: Sequence[Fault], max_restarts: int
) -> Decision:
    """What recovery decides about an iteration that failed."""
    facts = [fault.describe() for fault in faults]
    return recover(history, Situation(attempt=failed, max_restarts=max_restarts, facts=facts))


def after(failed: PastAttempt, decision: Decision) -> PastAttempt:
    """A failed iteration with what was decided about it, for the next decision to look back on."""
    return msgspec.structs.replace(failed, action=decision.action, decided=decision.findings())


# Which process trains under which rank in the next iteration of an in-process restart. Pure.
#
# Guarantees: no process is given two ranks, no unusable process is given any, and a process that stays keeps
# its rank unless the world shrinks. A lost rank's place is taken by a reserve of its own node if there is
# one. The answer has `wanted` ranks; it has fewer only where that is allowed, and never fewer than `least`.


class Assignment(msgspec.Struct, frozen=True, kw_only=True):
    """Which member has which rank next."""

    order: list[int]
    """Members by rank."""
    reserves: list[int]
    promoted: list[int] = []
    """The members that had no rank before."""
    shrinks: bool = False


class Shortage(msgspec.Struct, frozen=True, kw_only=True):
    """Too few members are left."""

    usable: int
    needed: int

    @property
    def reason(self) -> str:
        return f"{self.usable} ranks are left that can train, and {self.needed} are needed"


def reassign(
    nodes: Mapping[int, str],
    present: AbstractSet[int],
    before: Sequence[int],
    *,
    wanted: int,
    least: int | None,
    whole_nodes: bool,
) -> Assignment | Shortage:
    """The next order of members.

    `nodes`: every member there has ever been, with its node; `before`: the order of the previous iteration,
    empty for the first one; `whole_nodes`: a node with a missing member is not used.
    """
    broken = {nodes[member] for member in nodes if member not in present} if whole_nodes else set()
    usable = [member for member in sorted(present) if nodes[member] not in broken]
    if not before:
        if len(usable) < wanted:
            return _fewer(usable, [], wanted, least)
        return Assignment(order=usable[:wanted], reserves=usable[wanted:])
    taken = set(before)
    spare = [member for member in usable if member not in taken]
    stays = set(usable) & taken
    order: list[int | None] = [member if member in stays else None for member in before]
    order += [None] * (wanted - len(order))  # it had shrunk before
    promoted: list[int] = []
    for near in (True, False):  # first reserves on the lost one's own node, so that the rest stays as it is
        for rank, member in enumerate(order):
            lost_from = nodes[before[rank]] if rank < len(before) else None
            found = next((one for one in spare if not near or nodes[one] == lost_from), None)
            if member is None and found is not None:
                order[rank] = found
                spare.remove(found)
                promoted.append(found)
    filled = [member for member in order if member is not None]
    if len(filled) < wanted:
        return _fewer(filled, promoted, wanted, least)
    return Assignment(order=filled, reserves=spare, promoted=promoted)


def _fewer(usable: list[int], promoted: list[int], wanted: int, least: int | None) -> Assignment | Shortage:
    if least is None or len(usable) < max(1, least):
        return Shortage(usable=len(usable), needed=wanted if least is None else least)
    return Assignment(order=usable, reserves=[], promoted=promoted, shrinks=True)


# Whether the limits of in-process restart fit each other, and everything else that may end a rank. Pure.
#
# The right order, from gentle to drastic: a rank that stands still is asked to restart (soft), then it alone
# is ended (hard), then the others go on without it (barrier). Whatever ends more than that rank (the
# launcher's watch, NCCL's watchdog, the deadline of a stop) comes later. From when a `Run` is made until
# every rank has done its first step, soft and hard are longer: by as much as the first step's own limit.


class RestartTimeouts(msgspec.Struct, frozen=True, kw_only=True):
    """All timeouts that matter, in seconds; None for one that does not apply here."""

    soft: Value
    hard: Value
    barrier: Value
    interval: Value
    """inprocess.heartbeat_interval."""
    silence: Value
    """inprocess.heartbeat_timeout."""
    shutdown: Value
    """stop.shutdown_timeout_sec; 0 means no deadline."""
    step: Value | None = None
    heartbeat: Value | None = None
    """That of the launcher's watch over ranks, where there is one."""
    watchdog: Value | None = None
    """When NCCL's watchdog ends a process in which the watchdog itself is stuck."""
    collective: Value | None = None
    """When NCCL's watchdog ends a process whose collective is not done."""


class Sizes(msgspec.Struct, frozen=True, kw_only=True):
    """Numbers of ranks, each with how a message names it."""

    started: int | None
    """None if not known here."""
    active: int | None
    """None: all that were started."""
    active_shown: str
    least: int | None
    """None: as many as are active."""
    least_shown: str


def collective_limit(soft: float, hard: float) -> float:
    """After how many seconds a collective is given up, where its backend reports that in the waiting rank.

    Later than `soft`: otherwise the rank that waits would fail, and be reported, in place of the one that
    stands still. Well before `hard`: what nothing else can free must be free before its keeper ends it.
    """
    return soft + (hard - soft) / 4


def first_step_limit(initial: float, soft: float, hard: float) -> float:
    """After how many seconds without progress a rank is asked to restart while a first step is not done.

    `initial`: the launcher's limit for that. It ends all ranks, so it must come after this one, and after
    what follows from this one; 0 switches both off.
    """
    return max(soft, initial - 2 * (hard - soft)) if initial else math.inf


def first_barrier(initial: float, barrier: float) -> float:
    """How many seconds the first rank that calls the function waits for the last one to do so.

    What a script does before that is part of its start, for which the launcher allows `initial` too.
    """
    return max(barrier, initial or LONGEST_WAIT)


def out_of_order(all_of: RestartTimeouts) -> list[str]:
    """Pairs in which one timeout would hide the other, with the right order. [] if all is well."""
    found: list[str] = []

    def judge(first: Value, then: Value | None, why: str, order: str) -> None:
        if then is not None and hides(then, first):
            found.append(f"{first.shown} with {then.shown}: {why}; the right order is {order}")

    judge(
        all_of.soft,
        all_of.hard,
        "a rank that stands still would be ended before it is asked to restart, and so be lost",
        "inprocess.soft_timeout < inprocess.hard_timeout",
    )
    judge(
        all_of.hard,
        all_of.barrier,
        "the others would go on without a rank while it may still run, before its keeper ends it",
        "inprocess.hard_timeout < inprocess.barrier_timeout",
    )
    judge(
        all_of.interval,
        all_of.silence,
        "a node would count as lost between two signs of life of its keeper",
        "inprocess.heartbeat_interval < inprocess.heartbeat_timeout",
    )
    judge(
        all_of.barrier,
        all_of.shutdown,
        "a stop that is asked for during a restart is answered when the ranks have come together, and would "
        "run out of time before",
        "inprocess.barrier_timeout < stop.shutdown_timeout_sec",
    )
    for watched in (all_of.step, all_of.heartbeat):
        judge(
            all_of.hard,
            watched,
            "the launcher would end all ranks of a hung group before the hung one alone is ended",
            f"inprocess.hard_timeout < monitor.rank_heartbeat_timeout and the limit of {STEP}",
        )
    for ends in (all_of.watchdog, all_of.collective):
        judge(
            all_of.hard,
            ends,
            "NCCL's watchdog would end the healthy ranks of a hung group before the hung one is ended, and "
            "there would be nothing left to restart in",
            "inprocess.hard_timeout < NCCL's watchdog",
        )
    return found


def impossible(sizes: Sizes) -> list[str]:
    """Numbers of ranks that are impossible. [] if all is well."""
    found: list[str] = []
    if sizes.active is not None and sizes.started is not None and sizes.active > sizes.started:
        found.append(
            f"{sizes.active_shown}: only {sizes.started} ranks were started; start more, or lower "
            "inprocess.active_world_size"
        )
    active = sizes.active if sizes.active is not None else sizes.started
    if sizes.least is not None and active is not None and sizes.least > active:
        found.append(
            f"{sizes.least_shown}: only {active} ranks train; the right order is inprocess.min_world_size ≤ "
            "inprocess.active_world_size ≤ started ranks"
        )
    return found
