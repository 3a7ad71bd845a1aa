"""Which checkpoints fall under suspicion together, and how that is written down.

Guarantee: what a decision made suspect or acquitted is on record, under the fence, before the next attempt's
workers start, also if the one that decided died in between. Writing it again changes nothing.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from holdfast.checkpoint.identity import CheckpointName, parse_name
from holdfast.control.attempts import HeadRecord
from holdfast.control.directory import ControlDirectory, read_record
from holdfast.control.lease import Fence
from holdfast.control.lineage import CommitRecord, descendants, read_timeline
from holdfast.control.skips import record_skip
from holdfast.control.standing import Standing, StandingBook
from holdfast.journal import events
from holdfast.journal.writer import JournalWriter
from holdfast.policy.budgets import PastAttempt
from holdfast.policy.recovery import Decision
from holdfast.policy.rejection import Rerun, Trial
from holdfast.policy.unsettled import open_rerun, open_trial

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


def still_open(
    control: ControlDirectory, attempts: Sequence[PastAttempt]
) -> tuple[Rerun | None, Trial | None]:
    """What the next attempt is to be told, from the records alone."""
    trial, book = open_trial(attempts), StandingBook(control)
    if trial is not None:
        left = [name for name in trial.suspects if _standing(book, name) is Standing.SUSPECT]
        trial = msgspec.structs.replace(trial, suspects=left) if left else None
    return open_rerun(attempts), trial


def _standing(book: StandingBook, name: str) -> Standing | None:
    parsed = parse_name(name)
    return book.of(str(parsed)) if parsed is not None else None


def write_findings(
    control: ControlDirectory, fence: Fence, journal: JournalWriter, decision: Decision
) -> None:
    """Record and journal what a decision says of checkpoints and data; what is on record stays as it is."""
    book = StandingBook(control)
    evidence = [*decision.grounds, decision.reason]
    if decision.skip is not None:
        record_skip(control, fence, decision.skip, decision.reason)
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
