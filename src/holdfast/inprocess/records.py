"""What the faults of an in-process restart are for recovery: what the ends of workers are without it.

Pure. `policy.inprocess` says what each fault is; here it becomes the records that an incident is judged by.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec

from holdfast.control.attempts import FailureRecord
from holdfast.inprocess.journalled import faulted
from holdfast.journal.render_restarts import restart_fault
from holdfast.policy.evidence import Hang, LostNode, WorkerEnd
from holdfast.policy.faults import Fault, FaultKind
from holdfast.policy.inprocess import evidence_of


class Faulted(msgspec.Struct, frozen=True, kw_only=True):
    """What befell the members of one attempt."""

    attempt: int = 0
    ended: list[FailureRecord] = []
    """Whose processes have ended."""
    raised: list[FailureRecord] = []
    """Whose processes live: what each would have ended with."""
    hangs: list[Hang] = []
    lost: list[LostNode] = []
    facts: list[str] = []
    """Of what is no worker's end, in words."""


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

    By member: `pids` and `devices`, where they are known, and `ends`, what this node's agent itself saw.
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
            facts.append(restart_fault(faulted(fault, 0)))
    return Faulted(
        attempt=attempt, ended=ended, raised=raised, hangs=hangs, lost=list(lost.values()), facts=facts
    )


def _failure(
    fault: Fault, end: WorkerEnd, pid: int, device: str, seen: FailureRecord | None
) -> FailureRecord:
    message = end.message
    if fault.kind is FaultKind.LOST and end.exit_code:  # it says what its exit code says
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
