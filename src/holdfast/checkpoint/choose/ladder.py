"""The ladder: which checkpoints a start may take, why not the others, and which a decision suspects.

Every caller takes the same inventory and walks down in the same way. What is done at a rung is passed in:

* A resume (`resume`) has all ranks load and verify the rung, and they agree on it. It holds the lease,
  fetches what is missing or bad, and tests the storage after two unusable rungs in a row.
* A look before anything is started (`resolver`) reads the bytes, or only names and sizes. It holds no lease,
  changes nothing, and knows what nodes hold only from the records. Where no run keeps a record, the rungs are
  the directories found there, and what is recorded beside each is read when its turn comes.
* A decision about a failed attempt (`situation_of`) takes the inventory alone. It reads no bytes,
  asks no remote and heeds no pin; the policy that decides leaves out what is to be avoided.

The order is the lineage's, newest first; file names, file times and the `latest` hint play no part in it.
`build_ladder`, `leave_out` and `walk_down` are pure: everything they decide on is passed in.

Which checkpoints fall under suspicion together is decided here too, and written down. Guarantee: what a
decision made suspect or acquitted is on record, under the fence, before the next attempt's workers start,
even if the process that decided died in between. Writing it again changes nothing.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Generic, NamedTuple, TypeVar

import msgspec

from holdfast.base import escaped
from holdfast.checkpoint import removed
from holdfast.checkpoint.choose.plain import directories, inspect, is_checkpoint, step_of
from holdfast.checkpoint.copies import tier
from holdfast.checkpoint.format import (
    MANIFEST,
    METADATA,
    CheckpointName,
    CheckpointRoot,
    Inspection,
    ManifestError,
    check_structure,
    parse_name,
    verify,
)
from holdfast.checkpoint.format import manifest as manifests
from holdfast.config import Settings, is_step
from holdfast.errors import ControlError, HoldfastError, StorageError, UsageError
from holdfast.journal import JournalWriter, events
from holdfast.journal.events import RejectedOption
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
    Pin,
    Standing,
    StandingBook,
    Timeline,
    avoided,
    deleted_names,
    descendants,
    exclude,
    find_deleted,
    keep_incident,
    operator,
    read_record,
    read_timeline,
    readmit,
    record_settled,
    record_skip,
    told_progress,
    was_committed,
)

T = TypeVar("T")
Name = tuple[int, str]
"""(step, id), as a CheckpointName is one."""
REFUSED_STANDINGS = frozenset({Standing.SUSPECT, Standing.CONDEMNED})
DELETED = "deleted: by retention, as its record says"
LOST = "lost: only the local tier had it, and no node holds any of it now"
UNSEEN = "not seen: nodes may hold it, but this attempt goes on without the local tier"
AVOIDED = "avoided: the recovery decision was to resume below it"

FRESH, REFUSED = "fresh start", "refused"
"""What is chosen when it is not a checkpoint."""
USED, BAD, LOWER, NO_RUNG = "would be used", "refused", "lower than the one used", "not a rung"
LOCAL = "would be used if its nodes still hold it"

ALARM = 2
"""Unusable rungs in a row after which the storage is tested."""
PROBE_SIZE = 8 * 1024 * 1024
"""Bytes with which the storage is tested."""
NAMED_OWNERS = 8
"""How many checkpoints of other runs have their run looked up: enough to show what happened."""
MAX_LINKS = 40
"""How many links in a row are followed: as many as the kernel follows."""


class Rung(msgspec.Struct, frozen=True, kw_only=True):
    """A candidate. `path` is set if it was asked for by path; otherwise it lies under the root."""

    name: str
    step: int
    id: str
    manifest: str
    """Expected manifest digest; empty for a plain DCP directory."""
    path: str = ""

    def under(self, root: Path) -> Path:
        """Where it lies, if the checkpoint root is `root`."""
        return Path(self.path) if self.path else root / self.name


class Ladder(msgspec.Struct, frozen=True):
    rungs: list[Rung]
    rejected: list[RejectedOption]
    may_start_fresh: bool
    avoided: list[Rung] = []
    """Those of `rejected` that would be rungs but for a recovery decision."""


class RungOutlook(msgspec.Struct, frozen=True, kw_only=True):
    """One checkpoint, and what a start makes of it."""

    name: str
    step: int | None
    verdict: str
    """`would be used`, `would be used if its nodes still hold it`, `refused`, `lower than the one used` or
    `not a rung`."""
    reasons: list[str] = []
    path: str | None = None
    """Where its bytes are: a directory, or a URL of the object store. None if only nodes may hold them."""
    tier: str = "global"
    """global, remote or local."""
    local: str | None = None
    """Where the local tier's copies should be, as recorded."""
    world: int | None = None
    """How many ranks saved it, if its manifest was read."""
    standing: str = ""
    bytes: int = 0


def first_of(rows: Iterable[RungOutlook], *verdicts: str) -> RungOutlook | None:
    """The first checkpoint with one of these verdicts."""
    return next((row for row in rows if row.verdict in verdicts), None)


# --- the walk -----------------------------------------------------------------------------------------------


class RungLook(NamedTuple, Generic[T]):
    """What was found at a rung."""

    row: RungOutlook
    held: T | None = None
    """If it would be used: what looking at it produced."""
    of_bytes: bool = True
    """Whether its bytes were judged: several bad ones in a row may be the fault of the storage."""


@dataclass
class Walk(Generic[T]):
    """What was found on the way down."""

    rows: list[RungOutlook] = field(default_factory=list)
    """One for each rung that was looked at."""
    lower: Sequence[Rung] = ()
    """Those below the one that would be used."""
    held: T | None = None
    """What looking at the one that would be used produced."""
    alarm: list[str] = field(default_factory=list)
    """Rungs in a row whose bytes could not be used, if there were enough to suspect the storage."""


def walk_down(
    rungs: Sequence[Rung],
    look: Callable[[Rung], RungLook[T]],
    refused: Callable[[RungOutlook, list[str]], None] | None = None,
) -> Walk[T]:
    """Look at one rung after another until one would be used; what is below that one is not looked at.

    `refused` is called for each rung that is refused, with the names of all that were refused in a row. It
    may raise, which ends the walk.
    """
    walk: Walk[T] = Walk()
    bad: list[str] = []
    for place, rung in enumerate(rungs):
        row, held, of_bytes = look(rung)
        walk.rows.append(row)
        if row.verdict == USED:
            walk.held, walk.lower = held, rungs[place + 1 :]
            break
        if of_bytes:
            bad = [*bad, rung.name] if row.verdict == BAD else []
            walk.alarm = bad if len(bad) >= ALARM else walk.alarm
        if row.verdict == BAD and refused is not None:
            refused(row, bad)
    return walk


# --- which rungs there are ----------------------------------------------------------------------------------


def build_ladder(
    timeline: Timeline,
    standings: Mapping[Name, Standing],
    present: Sequence[CheckpointName],
    committed: frozenset[Name],
    *,
    deleted: frozenset[Name] = frozenset(),
    local: frozenset[Name] = frozenset(),
    local_unseen: bool = False,
    owners: Mapping[Name, str] | None = None,
    step: int | None = None,
    force: bool = False,
) -> Ladder:
    """The rungs for an ordinary resume, or, with `step`, only those of that step.

    `present` are the directories under the root, `committed` those whose rename is known to have happened,
    `deleted` those that retention deleted, `local` those that the local tier committed. One that only the
    local tier had, and has lost, does not prevent a fresh start: it was never meant to last. With
    `local_unseen` nobody has looked, so it does prevent one.
    `owners` says, in words, whose the checkpoints are that this run does not know.
    A fresh start is allowed only if the run never had a checkpoint and the root holds nobody else's.
    """
    rungs: list[Rung] = []
    rejected: list[RejectedOption] = []
    there = set(present)
    had_any = False
    gone: list[CheckpointName] = []
    for record in sorted(timeline.on_line, key=lambda record: record.step, reverse=True):
        name = CheckpointName(record.step, record.id)
        if name not in there and name in local - committed - deleted:
            rejected.append(RejectedOption(str(name), [UNSEEN if local_unseen else LOST]))
            had_any = had_any or local_unseen
            continue
        if name not in there and name not in committed | deleted:
            continue  # the save was cut before its rename: it never existed
        had_any = True
        if name not in there and name in deleted:
            gone.append(name)
            continue
        why = _why_not(record, standings, present=name in there, step=step, force=force)
        if name not in there and name in local - committed:
            why = "local only: it was never in the checkpoint root"
        if why:
            rejected.append(RejectedOption(str(name), [why]))
        else:
            rungs.append(Rung(name=str(name), step=record.step, id=record.id, manifest=record.manifest))
    rejected.extend(_deleted(gone, step))
    abandoned = {CheckpointName(record.step, record.id) for record in timeline.abandoned}
    known = {CheckpointName(record.step, record.id) for record in timeline.on_line} | abandoned
    for name in sorted(there & abandoned, reverse=True):
        rejected.append(
            RejectedOption(str(name), ["abandoned: the run went back below it and continued from there"])
        )
    for name in sorted(there - known, reverse=True):
        why = "unknown: this run has no record of having saved it"
        if owner := (owners or {}).get(name):
            why += f"; {owner} has. Give each run a checkpoint.root of its own"
        rejected.append(RejectedOption(str(name), [why]))
    fresh = not had_any and not there - abandoned and step is None
    return Ladder(rungs, rejected, fresh)


def leave_out(ladder: Ladder, avoid: Collection[str]) -> Ladder:
    """The ladder without the rungs that a recovery decision told this attempt not to use.

    That never makes a fresh start allowed: if nothing else is left, the resume is refused.
    """
    kept = [rung for rung in ladder.rungs if rung.name not in avoid]
    avoided = [rung for rung in ladder.rungs if rung.name in avoid]
    rejected = [*(RejectedOption(rung.name, [AVOIDED]) for rung in avoided), *ladder.rejected]
    return Ladder(kept, rejected, ladder.may_start_fresh and not avoided, avoided)


def _deleted(gone: Sequence[CheckpointName], step: int | None) -> list[RejectedOption]:
    """One line for all that retention deleted, which may be very many; or those of the step asked for."""
    why = [DELETED]
    if step is not None:
        return [RejectedOption(str(name), why) for name in gone if name.step == step]
    if len(gone) < 2:
        return [RejectedOption(str(name), why) for name in gone]
    return [RejectedOption(f"{len(gone)} from {gone[-1]} to {gone[0]}", why)]


def _why_not(
    record: CommitRecord, standings: Mapping[Name, Standing], *, present: bool, step: int | None, force: bool
) -> str:
    if not present:
        return "missing: its directory is gone"
    if step is not None and record.step != step:
        return f"not asked for: resume_from names step {step}"
    standing = standings.get((record.step, record.id), Standing.COMMITTED)
    if standing in REFUSED_STANDINGS and not force:
        return f"{standing}: used only when named, with checkpoint.force"
    return ""


# --- the inventory, as the control directory and the root give it ------------------------------------------


def take_inventory(
    control: ControlDirectory,
    root: CheckpointRoot,
    resume_from: str,
    *,
    force: bool,
    copies: Collection[CheckpointName] = (),
    avoid: Collection[str] = (),
    pin: Pin | None = None,
    local_unseen: bool = False,
) -> Ladder:
    """The ladder for `resume_from`: "auto", "fresh", a step number, or a path.

    `copies` are checkpoints that a remote or the local tier holds. One of this line that is not here is a
    rung all the same: it can be fetched, or put together. One that retention deleted is not, nor is anybody
    else's. `avoid` names what an ordinary resume ("auto") leaves out. A `pin` overrides all of these.
    `local_unseen`: what the local tier holds is not known.
    """
    if pin is not None:
        return take_pinned(control, root, pin.checkpoint, force=pin.force, copies=copies)
    if resume_from == "fresh":
        return Ladder([], [], True)
    timeline = read_timeline(control)
    if resume_from == "auto" or is_step(resume_from):
        book = StandingBook(control, root.path)
        records = timeline.on_line + timeline.abandoned
        deleted = deleted_names(control)
        known = {CheckpointName(record.step, record.id) for record in records} - deleted
        ladder = build_ladder(
            timeline,
            {(record.step, record.id): book.of(_name(record)) for record in records},
            sorted({*root.names(), *known.intersection(copies)}, reverse=True),
            frozenset((record.step, record.id) for record in records if was_committed(control, record)),
            deleted=deleted,
            local=frozenset(tier.names(control)),
            local_unseen=local_unseen,
            owners=_owners(root, {CheckpointName(record.step, record.id) for record in records}),
            step=int(resume_from) if is_step(resume_from) else None,
            force=force,
        )
        if ladder.may_start_fresh and timeline.origin is None:
            ladder = _with_plain(ladder, root)
        if resume_from == "auto":
            return leave_out(_with_origin(ladder, timeline, control), avoid)
        return _with_deletions(ladder, control)
    return _named(Path(resume_from), control, force=force)


def _owners(root: CheckpointRoot, known: Collection[CheckpointName]) -> dict[tuple[int, str], str]:
    """Which runs saved the newest few checkpoints here that are not this run's own, in words."""
    found: dict[tuple[int, str], str] = {}
    for name in sorted(set(root.names()) - set(known), reverse=True)[:NAMED_OWNERS]:
        with contextlib.suppress(ManifestError):
            run = escaped(manifests.read(root.committed(name))[0].run, 80)
            found[name] = f"run {run}"
            with contextlib.suppress(HoldfastError, OSError):
                if ControlDirectory.open(root.path.parent).run_id == run:
                    found[name] = f"run {run} in {root.path.parent}"
    return found


def take_pinned(
    control: ControlDirectory,
    root: CheckpointRoot,
    pinned: str,
    *,
    force: bool,
    copies: Collection[CheckpointName] = (),
) -> Ladder:
    """The ladder of an operator's pin: that checkpoint and no other, on the present timeline or off it."""
    timeline = read_timeline(control)
    record = next(
        (
            record
            for record in timeline.on_line + timeline.abandoned
            if str(CheckpointName(record.step, record.id)) == pinned
        ),
        None,
    )
    if record is None:
        return Ladder(
            [], [RejectedOption(pinned, ["unknown: this run has no record of having saved it"])], False
        )
    name = CheckpointName(record.step, record.id)
    standing = StandingBook(control, root.path).of(str(name))
    why = ""
    if standing in REFUSED_STANDINGS and not force:
        why = f"{standing}: pin it with --force to use it all the same"
    elif name not in root.names() and name not in copies:
        gone = find_deleted(control, name.step, name.id)
        why = f"deleted: {gone.describe()}" if gone is not None else "missing: its directory is gone"
    if why:
        return Ladder([], [RejectedOption(pinned, [why])], False)
    return Ladder([Rung(name=pinned, step=record.step, id=record.id, manifest=record.manifest)], [], False)


def _name(record: CommitRecord) -> str:
    return str(CheckpointName(record.step, record.id))


def _with_deletions(ladder: Ladder, control: ControlDirectory) -> Ladder:
    """The ladder of a step that was asked for, saying when and why retention deleted what it deleted."""
    rejected = []
    for option in ladder.rejected:
        name = parse_name(option.option)
        found = find_deleted(control, *name) if name is not None and option.why == [DELETED] else None
        why = [f"deleted: {found.describe()}"] if found is not None else option.why
        rejected.append(RejectedOption(option.option, why))
    return Ladder(ladder.rungs, rejected, ladder.may_start_fresh)


def _with_origin(ladder: Ladder, timeline: Timeline, control: ControlDirectory) -> Ladder:
    """A run that began from somebody else's checkpoint has that one as its lowest rung."""
    if timeline.origin is None or not timeline.origin.source:
        return ladder
    rung = _rung_at(Path(timeline.origin.source))
    if why := _refused(rung, control):
        rejected = RejectedOption(rung.name, [f"{why}: used only when named, with checkpoint.force"])
        return Ladder(ladder.rungs, [*ladder.rejected, rejected], False)
    return Ladder([*ladder.rungs, rung], ladder.rejected, False)


def _with_plain(ladder: Ladder, root: CheckpointRoot) -> Ladder:
    """Before its first attempt, a run may find checkpoints in its root that nobody has a record of. To begin
    anew beside them may be intended, or may throw away what was trained; a person must say which."""
    found = directories(root.path) if root.path.is_dir() else []
    there = [path for path in found if path.is_dir() and is_checkpoint(path)]
    why = "no run has a record of it: name it with checkpoint.resume_from to go on from it, or say 'fresh'"
    rejected = [RejectedOption(escaped(path.name), [why]) for path in there[:NAMED_OWNERS]]
    return Ladder(ladder.rungs, [*ladder.rejected, *rejected], not rejected)


def _refused(rung: Rung, control: ControlDirectory) -> str:
    """The standing for which a checkpoint named by its path is refused, no matter which run recorded it."""
    if not rung.id:
        return ""
    path, name = Path(rung.path), str(CheckpointName(rung.step, rung.id))
    standing = StandingBook(control, path.parent).of(name)
    if standing not in REFUSED_STANDINGS:
        # It may be a copy, elsewhere, of a checkpoint that this run judged or learned of in its own root.
        standing = StandingBook(control).of(name)
    return str(standing) if standing in REFUSED_STANDINGS else ""


def refuse_named(rung: Rung, control: ControlDirectory) -> Ladder | None:
    """The empty ladder of a checkpoint that was named and may not be used; None if it may."""
    standing = _refused(rung, control)
    if not standing:
        return None
    name = str(CheckpointName(rung.step, rung.id))
    why = f"{standing}: set checkpoint.force to use it all the same"
    evidence = StandingBook(control, Path(rung.path).parent).evidence_of(name)
    return Ladder([], [RejectedOption(rung.name, [why, *(escaped(line, 500) for line in evidence)])], False)


def _named(path: Path, control: ControlDirectory, *, force: bool) -> Ladder:
    if not path.is_dir() and not is_checkpoint(path):
        why = removed(path, control) or removed(path)
        told = f"this checkpoint is not there any more: {why}" if why else "no such directory"
        raise UsageError(f"checkpoint.resume_from = {str(path)!r}: {told}")
    if not is_checkpoint(path) and (rungs := _rungs_in(path.absolute())):
        return Ladder(rungs, [], False)
    rung = _rung_at(path.absolute())
    if not force and (refused := refuse_named(rung, control)) is not None:
        return refused
    return Ladder([rung], [], False)


def _rungs_in(directory: Path) -> list[Rung]:
    """The checkpoints in a directory that was named, newest first, if none of them is a run's of ours."""
    there = directories(directory)
    if any((path / MANIFEST).exists() or parse_name(path.name) is not None for path in there):
        return []
    return [_rung_at(path) for path in there]


def _rung_at(path: Path) -> Rung:
    for _ in range(MAX_LINKS):  # its standing lies beside the checkpoint, not beside a link to it
        if not path.is_symlink():
            break
        path = path.parent / path.readlink()
    inspection = check_structure(path)
    if inspection.manifest is not None:
        found = inspection.manifest
        return Rung(
            name=path.name, step=found.step, id=found.id, manifest=inspection.manifest_digest, path=str(path)
        )
    return Rung(name=path.name, step=step_of(path) or 0, id="", manifest="", path=str(path))


def look_at(rung: Rung, root: CheckpointRoot, run: str, world: int | None = None) -> tuple[Path, Inspection]:
    """Where a rung lies, and what the cheap checks say of it: names, sizes, and the bytes of `.metadata`."""
    path = rung.under(root.path)
    if not rung.manifest:
        return path, inspect(path, quick=True)[0]
    return path, verify(path, run=None if rung.path else run, world=world, files=[METADATA])


def highest_committed_step(root: Path, control: ControlDirectory) -> int:
    """The highest step among committed checkpoints; 0 if there is none. Says nothing about their bytes.

    A suspect or condemned one does not count as progress. If a run has no checkpoints at all, because its
    script saves by itself, what it reports (`handover.progress`) is believed; once there are checkpoints,
    that counts for nothing.
    """
    checkpoints, book = CheckpointRoot(root), StandingBook(control, root)
    try:
        names = checkpoints.names()
        if not names:
            return told_progress(control.path)
        there = (name for name in names if (checkpoints.committed(name) / MANIFEST).is_file())
        return next((name.step for name in there if book.of(str(name)) not in REFUSED_STANDINGS), 0)
    except (OSError, StorageError):
        return 0


# --- suspicion ----------------------------------------------------------------------------------------------

TRUSTED = frozenset({Standing.PROVEN, Standing.ACQUITTED})
"""An attempt that came from one of these did not carry on anything that may be bad."""


def doubtful_with(control: ControlDirectory, rung: str, probation_steps: int) -> list[str]:
    """The checkpoint that was loaded and those that are as doubtful as it, by name, lowest step first.

    Upwards: the checkpoint it was saved from, if that was still in its probation then. Downwards: whatever
    was saved from any of these and is on the present line, because a resume would take that first.
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
    group |= {record.id for record in descendants(group, timeline.on_line)}
    kept = [records[id_] for id_ in group if book.of(id_) is not Standing.CONDEMNED or id_ == loaded.id]
    kept.sort(key=lambda record: (record.step, record.id))
    return [str(CheckpointName(record.step, record.id)) for record in kept]


def _unproven_source(
    control: ControlDirectory,
    record: CommitRecord,
    records: dict[str, CommitRecord],
    book: StandingBook,
    probation_steps: int,
) -> CommitRecord | None:
    """What the attempt that saved this one came from, if that had not proven itself good by then."""
    head = read_record(control.attempt(record.attempt) / "head.json", HeadRecord)
    source = records.get(head.checkpoint) if head is not None and head.checkpoint is not None else None
    if source is None or record.step - source.step > probation_steps or book.of(source.id) in TRUSTED:
        return None
    return source


def next_orders(control: ControlDirectory, attempts: Sequence[PastAttempt]) -> Orders:
    """The orders for the next attempt, from the records alone; `attempts` are all those before it."""
    return msgspec.structs.replace(still_open(control, attempts), avoid=avoided(control))


def still_open(control: ControlDirectory, attempts: Sequence[PastAttempt]) -> Orders:
    """The orders that earlier attempts were given and none has carried out yet."""
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
    """Record and journal what a decision about an attempt says about checkpoints, data and steps.

    What is already on record stays as it is.
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
                    events.Warned(message=f"{name} does not belong to this run and cannot become {standing}")
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
    """What recovery decides on: the failed attempt, and what the records say about checkpoints and requests.

    `forgiven`: attempts up to this number do not count, in addition to those that an operator has forgiven.
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
    """Name → step of what a resume may still use, newest first, judged by names alone."""
    try:
        root, local = CheckpointRoot(settings.checkpoint_root()), tier.names(control)
        ladder = take_inventory(control, root, "auto", force=False, copies=local)
    except (ControlError, UsageError, OSError):
        return {}
    return {rung.name: rung.step for rung in ladder.rungs}


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
    """Everything that must outlive this process: what is excluded or suspect, why, and, last, the history.

    If the history lacks it for an attempt, the decision about that one may not have been written down whole.
    """
    for one in decision.exclude:
        exclude(control, one.node, one.device, one.reason, "recovery", failed.number)
    for node in decision.readmit:
        readmit(control, node, None, decision.reason, "recovery", failed.number)
    write_findings(control, fence, journal, failed.number, decision)
    keep_incident(control, failed, decision)
    # The ranks themselves have journalled the verdict on a device.
    by_ranks = failed.rejection is not None and failed.rejection.kind is Kind.DEVICE
    if decision.verdict and failed.rejection is not None and not by_ranks:
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
        events.DecisionMade(
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
