"""The run's records as the history that recovery decides on.

Guarantee: what was found out about an attempt is written once, with its decision, and read again as it was;
an attempt of an older release, or one that died with its launcher, is history too, with what is known of it.
"""

from __future__ import annotations

import msgspec

from holdfast.control.attempts import AttemptRecord, EndRecord, ends_of, failures_of
from holdfast.control.decisions import RECOVERY, decision_path
from holdfast.control.directory import ControlDirectory, create_record, read_record
from holdfast.control.rejections import rejection_of
from holdfast.launch.incident_line import Decided
from holdfast.policy.budgets import PastAttempt
from holdfast.policy.classify import root_cause
from holdfast.policy.recovery import Decision

INCIDENT = "incident.json"
LAUNCHER_ENDED = "the launcher on "
"""How a launcher's own warning begins when it ends without a decision."""


def keep_incident(control: ControlDirectory, failed: PastAttempt, decision: Decision) -> None:
    """Write down what an attempt's failure was and what was decided; the first word stays."""
    create_record(control.attempt(failed.number) / INCIDENT, _with(failed, decision))


def _with(attempt: PastAttempt, decision: Decision) -> PastAttempt:
    kept = ("action", "avoid", "verdict", "suspect", "acquit", "skip", "rerun", "trial")
    return msgspec.structs.replace(attempt, **{name: getattr(decision, name) for name in kept})


def was_kept(control: ControlDirectory, number: int) -> bool:
    """Whether all that was decided about an attempt has been written down."""
    return (control.attempt(number) / INCIDENT).exists()


def past_attempts(control: ControlDirectory, *, before: int) -> list[PastAttempt]:
    """The attempts with a lower number than `before`, oldest first."""
    return [_past(control, record, end) for record, end in ends_of(control) if record.number < before]


def _past(control: ControlDirectory, record: AttemptRecord, end: EndRecord | None) -> PastAttempt:
    known = read_record(control.attempt(record.number) / INCIDENT, PastAttempt)
    if known is not None:
        return known
    if end is None:
        lost = PastAttempt(
            number=record.number,
            launch=record.launch,
            outcome="lost",
            placement=record.placement,
            rotation=record.rotation,
            world_size=record.world_size,
            rejection=rejection_of(control, record.number),
        )
        decided = _decision(control, record.number)
        return lost if decided is None else _with(lost, decided)
    failures = failures_of(control, record.number) if end.outcome == "failed" else []
    failed = [failure for failure in failures if not failure.left]
    root = root_cause(failed) if failed else None
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


def last_decision(control: ControlDirectory) -> tuple[int, Decision | None]:
    """The newest attempt (0: none yet) and what was decided about it; None if nothing was, or had to be."""
    newest = next((record for record, _ in reversed(ends_of(control))), None)
    if newest is None:
        return 0, None
    return newest.number, _decision(control, newest.number)


def _decision(control: ControlDirectory, number: int) -> Decision | None:
    return read_record(decision_path(control, number, RECOVERY), Decision)


def shown_decision(control: ControlDirectory, number: int) -> Decided | None:
    """What was decided about an attempt, by whichever release; None if nothing was."""
    found = read_record(decision_path(control, number, RECOVERY), dict)
    return Decided.of(found) if found is not None else None
