"""The faults of in-process restarts as evidence for recovery, and the account of one no launcher decided.

Under `holdfast run` the leading agent writes the account, and `account_of` and `keep` are not used.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec

from holdfast.account import account_of_failure
from holdfast.base import printable
from holdfast.errors import ExitCode, HoldfastError
from holdfast.journal import JournalWriter
from holdfast.journal.events import Account
from holdfast.policy import (
    Action,
    Decision,
    Fault,
    FaultKind,
    Hang,
    LostNode,
    Situation,
    WorkerEnd,
    deed,
    evidence_of,
    failed_iteration,
)
from holdfast.record import ControlDirectory, FailureRecord, keep_account
from holdfast.restart.messages import IterationPlan, Over, faulted

# To recovery, the faults of an in-process restart are what the ends of workers are without it.
#
# Pure. `policy.inprocess` says what each fault is; here it becomes the records that an incident is judged by.


class Faulted(msgspec.Struct, frozen=True, kw_only=True):
    """What befell the members of one attempt."""

    attempt: int = 0
    ended: list[FailureRecord] = []
    """Members whose processes have ended."""
    raised: list[FailureRecord] = []
    """Members whose processes are alive: what each would have ended with."""
    hangs: list[Hang] = []
    lost: list[LostNode] = []
    facts: list[str] = []
    """Faults that are not a worker's end, in words."""


def as_evidence(
    attempt: int,
    faults: Sequence[Fault],
    *,
    world_size: int,
    pids: Mapping[int, int],
    devices: Mapping[int, str],
    ends: Mapping[int, FailureRecord],
) -> Faulted:
    """All that is known of an attempt's faults.

    By member: `pids` and `devices`, as far as they are known, and `ends`, which this node's agent itself saw.
    """
    ended: list[FailureRecord] = []
    raised: list[FailureRecord] = []
    hangs: list[Hang] = []
    lost: dict[str, LostNode] = {}
    facts: list[str] = []
    for fault in faults:
        found = evidence_of([fault], world_size)
        device = devices.get(fault.member, "")
        hangs += [msgspec.structs.replace(hang, device=device) for hang in found.hangs]
        for node in found.lost:
            lost.setdefault(node.node, node)
        if found.ends:
            pid, seen = pids.get(fault.member, 0), ends.get(fault.member)
            failure = _failure(fault, found.ends[0], pid, device, seen)
            (ended if fault.kind is FaultKind.LOST else raised).append(failure)
        else:
            facts.append(faulted(fault, 0).summary())
    return Faulted(
        attempt=attempt, ended=ended, raised=raised, hangs=hangs, lost=list(lost.values()), facts=facts
    )


def _failure(
    fault: Fault, end: WorkerEnd, pid: int, device: str, seen: FailureRecord | None
) -> FailureRecord:
    message = end.message
    if fault.kind is FaultKind.LOST and end.exit_code:  # its message only repeats the exit code
        message = seen.message if seen is not None else ""
    return FailureRecord(
        rank=fault.rank if fault.rank >= 0 else fault.member,  # a reserve has none
        node=fault.node,
        pid=pid,
        exit_code=end.exit_code,
        at=fault.at,
        message=message,
        error_file=seen.error_file if seen is not None else "",
        device=device,
        errors=end.errors or (seen.errors if seen is not None else []),
        stderr_file=seen.stderr_file if seen is not None else "",
    )


log = logging.getLogger("holdfast")

WHO = "members"
"""The journal's writer when no run of the function is open."""


def account_of(
    following: IterationPlan | Over, iteration: int, order: Sequence[int], max_restarts: int
) -> Account:
    """The account of the iteration that the faults named in `following` ended, and of what comes after it.

    `order`: its members by rank.
    """
    faults = following.faults
    decision = _decided(following)
    said = {fault.describe() for fault in faults}
    decision = msgspec.structs.replace(
        decision, evidence=[text for text in decision.evidence if text not in said]
    )
    failed = failed_iteration(
        iteration,
        faults,
        launch="",
        order=order,
        nodes=sorted({fault.node for fault in faults}),
        committed=following.committed,
        seconds=0.0,
        at=time.time(),
    )
    last = max([fault.step for fault in faults] + [following.committed], default=0)
    failed = msgspec.structs.replace(failed, number=following.ended, began=last > 0, last_step=last or None)
    found = as_evidence(following.ended, faults, world_size=len(order), pids={}, devices={}, ends={})
    failures = sorted([*found.ended, *found.raised], key=lambda one: one.at)
    root = next((one for one in failures if one.rank == failed.root_rank), None)
    account = account_of_failure(
        Situation(attempt=failed, max_restarts=max_restarts),
        decision,
        root,
        failures,
        hangs=found.hangs,
        lost=found.lost,
        seen=found.facts,
        detail="" if root is not None else failed.message,
        in_place=isinstance(following, IterationPlan),
        newest=following.committed or None,
    )
    first = faults[0] if faults else None
    return _asked(account, first) if first is not None and first.kind is FaultKind.ASKED else account


def _decided(following: IterationPlan | Over) -> Decision:
    """What was decided; if these processes cannot do it, the decision that they end."""
    known = following.decision
    if known is not None and (isinstance(following, IterationPlan) or known.action is Action.STOP):
        return known
    reason = f"{deed(known.action)}: {known.reason}" if known is not None else following.reason
    if isinstance(following, IterationPlan):  # from a foreign conductor, which gave no reasons
        plain = Decision(action=Action.RESTART, exit_code=0, reason=reason, evidence=[], restarts_left=0)
    else:
        code = following.exit_code or int(ExitCode.HANDED_OVER)
        plain = Decision(action=Action.STOP, exit_code=code, reason=reason, evidence=[], restarts_left=0)
    return plain if known is None else msgspec.structs.replace(plain, evidence=known.evidence)


def _asked(account: Account, fault: Fault) -> Account:
    """Nothing had failed: the function wanted to be called again."""
    why = printable(fault.detail) or "no reason given"
    return msgspec.structs.replace(
        account,
        who=f"rank {fault.rank} on {printable(fault.node)}",
        what=f"asked for a restart in step {(account.step or 0) + 1}: {why}",
        why=["the training function itself asked for it", *account.why[1:]],
        next="nothing to do",
    )


def keep(run_dir: Path, account: Account) -> None:
    """Keep the account in the run's records; the function's run is closed by now and cannot."""
    try:
        control = ControlDirectory.open(run_dir)
        with contextlib.closing(JournalWriter(control.journal, WHO, account.attempt)) as journal:
            journal.write(account)
        keep_account(control, account)
    except (HoldfastError, OSError) as error:
        log.warning("holdfast: the account of attempt %d is not kept: %s", account.attempt, error)
