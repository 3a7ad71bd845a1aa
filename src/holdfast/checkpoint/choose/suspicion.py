"""Which checkpoints fall under suspicion together, and how that is written down.

Guarantee: what a decision made suspect or acquitted is on record, under the fence, before the next attempt's
workers start, also if the one that decided died in between. Writing it again changes nothing.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from holdfast.checkpoint.choose.ladder import take_inventory
from holdfast.checkpoint.copies import tier
from holdfast.checkpoint.format import CheckpointName, CheckpointRoot, parse_name
from holdfast.config import Settings
from holdfast.errors import ControlError, UsageError
from holdfast.journal import JournalWriter, events
from holdfast.policy import (
    Cluster,
    Decision,
    Kind,
    Orders,
    PastAttempt,
    Situation,
    open_rerun,
    open_trial,
)
from holdfast.record import (
    CommitRecord,
    ControlDirectory,
    FailureRecord,
    Fence,
    HeadRecord,
    Standing,
    StandingBook,
    avoided,
    descendants,
    exclude,
    keep_incident,
    operator,
    read_record,
    read_timeline,
    readmit,
    record_settled,
    record_skip,
)

TRUSTED = frozenset({Standing.PROVEN, Standing.ACQUITTED})
"""Whoever saved from one of these did not carry on what may be bad."""


def doubtful_with(control: ControlDirectory, rung: str, probation_steps: int) -> list[str]:
    """The checkpoint that was loaded and those that are as doubtful as it, by name, lowest step first.

    Upwards: what it was saved from, if that was still in its probation then. Downwards: whatever was saved
    from any of these and is on the present line, because a resume would take that first.
    """
    timeline, book = read_timeline(control), StandingBook(control)
    records = {record.id: record for record in [*timeline.abandoned, *timeline.on_line]}
    name = parse_name(rung)
    loaded = records.get(name.id) if name is not None else None
    if loaded is None:
        return [rung] if rung else []
    group = {loaded.id}
    above: CommitRecord | None = loaded
    while above is not None:
        above = _unproven_source(control, above, records, book, probation_steps)
        if above is None or above.id in group:
            break
        group.add(above.id)
    group |= {one.id for one in descendants(group, timeline.on_line)}
    kept = [records[one] for one in group if book.of(one) is not Standing.CONDEMNED or one == loaded.id]
    return [str(CheckpointName(one.step, one.id)) for one in sorted(kept, key=lambda one: (one.step, one.id))]


def _unproven_source(
    control: ControlDirectory,
    record: CommitRecord,
    records: dict[str, CommitRecord],
    book: StandingBook,
    probation_steps: int,
) -> CommitRecord | None:
    """What the attempt that saved this one came from, if it had not shown itself to be good by then."""
    head = read_record(control.attempt(record.attempt) / "head.json", HeadRecord)
    source = records.get(head.checkpoint) if head is not None and head.checkpoint is not None else None
    if source is None or record.step - source.step > probation_steps or book.of(source.id) in TRUSTED:
        return None
    return source


def next_orders(control: ControlDirectory, attempts: Sequence[PastAttempt]) -> Orders:
    """What the next attempt is to be told, from the records alone; `attempts` are all before it."""
    return msgspec.structs.replace(still_open(control, attempts), avoid=avoided(control))


def still_open(control: ControlDirectory, attempts: Sequence[PastAttempt]) -> Orders:
    """What earlier attempts were told and none has done yet."""
    trial, book = open_trial(attempts), StandingBook(control)
    if trial is not None:
        left = [name for name in trial.suspects if _standing(book, name) is Standing.SUSPECT]
        trial = msgspec.structs.replace(trial, suspects=left) if left else None
    return Orders(rerun=open_rerun(attempts), trial=trial)


def _standing(book: StandingBook, name: str) -> Standing | None:
    parsed = parse_name(name)
    return book.of(str(parsed)) if parsed is not None else None


def write_findings(
    control: ControlDirectory, fence: Fence, journal: JournalWriter, attempt: int, decision: Decision
) -> None:
    """Record and journal what a decision about an attempt says of checkpoints, data and steps.

    What is on record stays as it is.
    """
    book = StandingBook(control)
    evidence = [*decision.grounds, decision.reason]
    if decision.skip is not None:
        record_skip(control, fence, decision.skip, decision.reason)
    for settled in decision.settled:
        record_settled(control, attempt, settled)
    for names, standing in ((decision.suspect, Standing.SUSPECT), (decision.acquit, Standing.ACQUITTED)):
        for name in names:
            parsed = parse_name(name)
            if parsed is None:
                journal.write(
                    events.Warned(message=f"{name} is not of this run and cannot become {standing}")
                )
                continue
            now = book.of(name)
            if now is standing or (standing is Standing.ACQUITTED and now is not Standing.SUSPECT):
                continue  # ranks or an operator may have settled it meanwhile
            book.append(fence, name, standing, evidence)
            journal.write(events.StandingChanged(checkpoint=name, standing=standing, evidence=evidence))


def situation_of(
    control: ControlDirectory,
    failed: PastAttempt,
    history: Sequence[PastAttempt],
    settings: Settings,
    *,
    max_restarts: int,
    restarts_chosen: bool = False,
    facts: list[str],
    cluster: Cluster | None,
    stopping: str = "",
    storage: str = "",
    can_requeue: bool = False,
    forgiven: int = 0,
) -> Situation:
    """What recovery decides on: the failed attempt, and what the records say of checkpoints and requests.

    `forgiven`: attempts up to this number do not count, beside what an operator has forgiven.
    """
    rungs = _rungs(control, settings)
    return Situation(
        attempt=failed,
        max_restarts=max_restarts,
        restarts_chosen=restarts_chosen,
        facts=facts,
        cluster=cluster,
        lower_rungs=sum(step < rungs[failed.rung] for step in rungs.values()) if failed.rung in rungs else 0,
        budget_reset=max(forgiven, operator.budget_reset(control) or 0),
        rungs=list(rungs),
        together=_doubtful(control, settings, failed),
        skip_bad_data=settings.validation.skip_bad_data,
        nan_policy=settings.validation.nan_policy,
        orders=still_open(control, [*history, failed]),
        stopping=stopping,
        storage=storage,
        can_requeue=can_requeue,
    )


def _rungs(control: ControlDirectory, settings: Settings) -> dict[str, int]:
    """Name → step of what a resume may still use, newest first, as far as names tell."""
    try:
        root, local = CheckpointRoot(settings.checkpoint_root()), tier.names(control)
        ladder = take_inventory(control, root, "auto", force=False, copies=local)
    except (ControlError, UsageError, OSError):
        return {}
    return {one.name: one.step for one in ladder.rungs}


def _doubtful(control: ControlDirectory, settings: Settings, failed: PastAttempt) -> list[str]:
    if failed.rejection is None or not failed.rung:
        return []
    try:
        return doubtful_with(control, failed.rung, settings.validation.probation_steps)
    except (ControlError, OSError):
        return [failed.rung]


def write_down(
    control: ControlDirectory,
    fence: Fence,
    journal: JournalWriter,
    failed: PastAttempt,
    root: FailureRecord | None,
    decision: Decision,
) -> None:
    """Everything that must outlive this process: what is excluded or suspect, why, and last the history.

    An attempt without it in the history is one whose decision may not have been written down whole.
    """
    for one in decision.exclude:
        exclude(control, one.node, one.device, one.reason, "recovery", failed.number)
    for node in decision.readmit:
        readmit(control, node, None, decision.reason, "recovery", failed.number)
    write_findings(control, fence, journal, failed.number, decision)
    keep_incident(control, failed, decision)
    told = failed.rejection is not None and failed.rejection.kind is Kind.DEVICE  # by the ranks themselves
    if decision.verdict and failed.rejection is not None and not told:
        accused = decision.exclude[0] if decision.exclude else None
        journal.write(
            events.Verdict(
                verdict=decision.verdict,
                step=failed.rejection.step,
                evidence=[*decision.grounds, decision.reason],
                node=accused.node if accused is not None else "",
                device=(accused.device or "") if accused is not None else "",
            )
        )
    journal.write(
        events.Decision(
            about="recovery",
            chosen=decision.action,
            evidence=[*decision.evidence, decision.reason],
            details={
                "cause": str(failed.cause),
                "root_rank": root.rank if root else None,
                "exit_code": failed.exit_code,
                "restarts_left": decision.restarts_left,
                "excluded": [msgspec.to_builtins(one) for one in decision.exclude],
                "avoid": decision.avoid,
                "rotate_by": decision.rotate_by,
                "verdict": decision.verdict,
                "suspect": decision.suspect,
                "acquit": decision.acquit,
                "skip": msgspec.to_builtins(decision.skip),
                "settled": [msgspec.to_builtins(one) for one in decision.settled],
                "readmitted": decision.readmit,
            },
        )
    )
