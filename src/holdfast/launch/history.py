"""The run's records as the history that recovery decides on.

Guarantee: what was found out about an attempt is written once, with its decision, and read again as it was;
an attempt of an older release, or one that died with its launcher, is history too, with what is known of it.
"""

from __future__ import annotations

import msgspec

from holdfast.control.attempts import AttemptRecord, EndRecord, ends_of, failures_of
from holdfast.control.directory import ControlDirectory, create_record, read_record
from holdfast.policy.budgets import PastAttempt
from holdfast.policy.classify import root_cause
from holdfast.policy.recovery import Decision

INCIDENT = "incident.json"
DECISION = "recovery.json"


def keep_incident(control: ControlDirectory, failed: PastAttempt, decision: Decision) -> None:
    """Write down what an attempt's failure was and what was decided; the first word stays."""
    known = msgspec.structs.replace(failed, action=decision.action, avoid=decision.avoid)
    create_record(control.attempt(failed.number) / INCIDENT, known)


def past_attempts(control: ControlDirectory, *, before: int) -> list[PastAttempt]:
    """The attempts with a lower number than `before`, oldest first."""
    return [_past(control, record, end) for record, end in ends_of(control) if record.number < before]


def _past(control: ControlDirectory, record: AttemptRecord, end: EndRecord | None) -> PastAttempt:
    known = read_record(control.attempt(record.number) / INCIDENT, PastAttempt)
    if known is not None:
        return known
    if end is None:
        return PastAttempt(number=record.number, launch=record.launch, outcome="lost")
    failures = failures_of(control, record.number) if end.outcome == "failed" else []
    root = root_cause(failures) if failures else None
    return PastAttempt(
        number=record.number,
        launch=record.launch,
        outcome=end.outcome,
        cause=end.cause,
        exit_code=root.exit_code if root else end.exit_code,
        message=root.message if root else "",
        highest_step=end.highest_step,
        at=end.at,
        nodes=record.nodes,
        node_count=len(record.nodes),
        world_size=record.world_size,
        placement=record.placement,
        rotation=record.rotation,
    )


def last_decision(control: ControlDirectory) -> Decision | None:
    """What was decided about the newest attempt; None if nothing was, or nothing had to be."""
    newest = next((record for record, _ in reversed(ends_of(control))), None)
    if newest is None:
        return None
    return read_record(control.attempt(newest.number) / "decisions" / DECISION, Decision)
