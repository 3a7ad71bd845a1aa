"""The run's records as the history that recovery decides on.

Guarantee: what was found out about an attempt is written once, with its decision, and read back unchanged; an
attempt of an older release, or one that died with its launcher, is history too, with what is known about it:
what it had committed by then is progress, even if nobody saw its end.
"""

from __future__ import annotations

import time
from collections.abc import Collection
from pathlib import Path
from typing import Any

import msgspec

from holdfast.errors import ExitCode
from holdfast.policy import (
    Decision,
    Diagnosis,
    Findings,
    PastAttempt,
    Rejection,
    episode,
    launch_refused,
    root_cause,
)
from holdfast.record.attempts import AttemptRecord, EndRecord, HeadRecord, ends_of, failures_of, rejection_of
from holdfast.record.decisions import RECOVERY, decision_path
from holdfast.record.directory import ControlDirectory, create_record, read_record
from holdfast.record.launches import origin_attempts, told_progress
from holdfast.record.lineage import Saved, saved_by
from holdfast.record.operator import budget_reset, pin_attempts
from holdfast.record.standing import Standing, StandingBook

INCIDENT = "incident.json"
LAUNCHER_ENDED = "the launcher on "
"""How a launcher's own warning begins when it ends without a decision."""


def keep_incident(control: ControlDirectory, failed: PastAttempt, decision: Decision) -> None:
    """Write down what an attempt's failure was and what was decided about it; the first word stays."""
    fields = msgspec.to_builtins(_with(failed, decision))
    create_record(control.attempt(failed.number) / INCIDENT, fields | fields.pop("decided"), PastAttempt)


def _kept_incident(control: ControlDirectory, number: int) -> PastAttempt | None:
    """The incident as it was written: flat, with the findings among the attempt's own fields."""
    path = control.attempt(number) / INCIDENT
    past, decided = read_record(path, PastAttempt), read_record(path, Findings)
    if past is None or decided is None:
        return None
    return msgspec.structs.replace(past, decided=decided)


def _with(attempt: PastAttempt, decision: Decision) -> PastAttempt:
    return msgspec.structs.replace(attempt, action=decision.action, decided=decision.findings())


def rung_of(head: HeadRecord | None) -> str:
    """What an attempt came from, by its name on the ladder; empty for a fresh start."""
    if head is None:
        return ""
    if head.source:
        return Path(head.source).name
    # As `checkpoint.identity` writes it, which this room may not import.
    return f"step_{head.step:08d}-{head.checkpoint}" if head.checkpoint is not None else ""


def was_kept(control: ControlDirectory, number: int) -> bool:
    """Whether everything that was decided about an attempt has been written down."""
    return (control.attempt(number) / INCIDENT).exists()


def past_attempts(control: ControlDirectory, *, before: int | None = None) -> list[PastAttempt]:
    """The attempts with a lower number than `before`, or all of them, oldest first."""
    known = ends_of(control)
    sent = origin_attempts(control) | pin_attempts(control)
    saves = any(saved_by(control, record.number) for record, _ in known)
    # What a lost attempt's script had reported was recorded at the start of the next attempt.
    reached = [] if saves else [record.told for record, _ in known[1:]] + [told_progress(control.path)]
    found = []
    for index, (record, end) in enumerate(known):
        if before is not None and record.number >= before:
            break
        past = _past(control, record, end, sent)
        if past.outcome == "lost" and reached:
            past = msgspec.structs.replace(past, highest_step=max(past.highest_step, reached[index]))
        found.append(past)
    return found


def failed_attempt(
    control: ControlDirectory,
    record: AttemptRecord,
    found: Diagnosis,
    *,
    highest_step: int,
    began: bool = True,
    last_step: int | None = None,
    rejection: Rejection | None = None,
) -> PastAttempt:
    """An attempt that has just failed, as recovery and every later decision see it."""
    now = time.time()
    failed = _of_record(
        record,
        outcome="failed",
        highest_step=highest_step,
        seconds=max(0.0, now - record.started),
        at=now,
        began=began,
        last_step=last_step,
        rejection=rejection,
        **msgspec.structs.asdict(found),
    )
    return _measured(control, failed, origin_attempts(control) | pin_attempts(control))


def _of_record(record: AttemptRecord, outcome: str, **known: Any) -> PastAttempt:
    return PastAttempt(
        number=record.number,
        launch=record.launch,
        outcome=outcome,
        nodes=record.nodes,
        node_count=len(record.nodes),
        world_size=record.world_size,
        placement=record.placement,
        rotation=record.rotation,
        **known,
    )


def _measured(control: ControlDirectory, past: PastAttempt, sent: Collection[int]) -> PastAttempt:
    """An attempt with what its progress is measured by: what it saved, and whether it was sent somewhere."""
    saved = _committed(control, saved_by(control, past.number))
    return msgspec.structs.replace(past, saved=saved, sent=past.number in sent)


def _past(
    control: ControlDirectory, record: AttemptRecord, end: EndRecord | None, sent: Collection[int]
) -> PastAttempt:
    past = _measured(control, _as_known(control, record, end), sent)
    return msgspec.structs.replace(past, started_with=record.started_with)


def _as_known(control: ControlDirectory, record: AttemptRecord, end: EndRecord | None) -> PastAttempt:
    known = _kept_incident(control, record.number)
    if known is not None:
        return known
    saved = saved_by(control, record.number)
    last_step = max((step for step, _, _ in saved), default=None)
    if end is None:
        lost = _of_record(
            record,
            "lost",
            highest_step=_committed(control, saved),
            last_step=last_step,
            rung=rung_of(read_record(control.attempt(record.number) / "head.json", HeadRecord)),
            rejection=rejection_of(control, record.number),
        )
        decided = _decision(control, record.number)
        return lost if decided is None else _with(lost, decided)
    failures = failures_of(control, record.number) if end.outcome == "failed" else []
    failed = [failure for failure in failures if not failure.left]
    root = root_cause(failed) if failed else None
    code = root.exit_code if root else end.exit_code
    return _of_record(
        record,
        end.outcome,
        cause=end.cause,
        exit_code=code,
        message=root.message if root else "",
        highest_step=end.highest_step,
        seconds=max(0.0, end.at - record.started),
        at=end.at,
        last_step=last_step,
        rejection=rejection_of(control, record.number) if code == ExitCode.RERUN_WANTED else None,
    )


def _committed(control: ControlDirectory, saved: list[Saved]) -> int:
    """The highest step that is known to have been committed and is not suspect or condemned; 0 if none is."""
    book = StandingBook(control)
    refused = (Standing.SUSPECT, Standing.CONDEMNED)
    # By id, from this run's own records: the checkpoints' storage may be what failed.
    good = (step for step, id, done in reversed(saved) if done and book.of(id) not in refused)
    return next(good, 0)


def refused_launch(control: ControlDirectory, started_with: str, launches: Collection[str]) -> str:
    """Why a launch is refused, and what would let it in; empty if it may begin.

    `launches`: the ids that it has, and has had. Only its first attempt is looked at: later ones are
    restarts, which have budgets of their own.
    """
    history = past_attempts(control)
    if any(one.launch in launches for one in history):
        return ""
    why = launch_refused(history, started_with, budget_reset(control) or 0)
    if not why:
        return ""
    return (
        f"{why}. Nothing was started. Read `holdfast journal {control.path}`, and fix the cause: the next "
        "launch is let in when the script, a Python file beside it, its arguments or a setting has changed. "
        f'If it was fixed elsewhere: `holdfast control reset-budget {control.path} --reason "what was fixed"`'
    )


def last_decision(control: ControlDirectory) -> tuple[int, Decision | None]:
    """The newest attempt (0: none yet) and what was decided about it; None if nothing was or had to be."""
    newest = next((record for record, _ in reversed(ends_of(control))), None)
    if newest is None:
        return 0, None
    return newest.number, _decision(control, newest.number)


def avoided(control: ControlDirectory) -> list[str]:
    """Checkpoints that the next attempt must not use, whoever starts it.

    The decision about the newest attempt repeats what earlier ones avoided, as long as there was no progress.
    If nothing was decided about that attempt (it was stopped, or died with its launcher), what was avoided
    since the last progress still is. An operator who resets the budget does not change that.
    """
    _, decided = last_decision(control)
    if decided is not None:
        return decided.avoid
    return sorted({name for one in episode(past_attempts(control)) for name in one.decided.avoid})


def _decision(control: ControlDirectory, number: int) -> Decision | None:
    return read_record(decision_path(control, number, RECOVERY), Decision)
