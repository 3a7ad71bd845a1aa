"""The ladder: which checkpoints a resume may use, in which order, and why the others may not.

Pure: everything it decides on is handed in. The order is the lineage's, newest first; file names, file times
and the `latest` hint play no part in it.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

import msgspec

from holdfast.checkpoint.format import CheckpointName
from holdfast.errors import ControlError, ExitCode, NoValidRungError, RunIsLiveError
from holdfast.journal import RejectedOption
from holdfast.policy import RungOutlook
from holdfast.record import CommitRecord, LeaseState, Standing, Timeline

Name = tuple[int, str]
"""(step, id), as a CheckpointName is one."""
REFUSED = frozenset({Standing.SUSPECT, Standing.CONDEMNED})
DELETED = "deleted: by retention, as its record says"
LOST = "lost: only the local tier had it, and no node holds any of it now"
UNSEEN = "not seen: nodes may hold it, but this attempt goes on without the local tier"
AVOIDED = "avoided: the recovery decision was to resume below it"


class Rung(msgspec.Struct, frozen=True, kw_only=True):
    """A candidate. `path` is set when it was asked for by path; otherwise it lies under the root."""

    name: str
    step: int
    id: str
    manifest: str
    """Expected manifest digest; empty for a plain DCP directory."""
    path: str = ""


class Ladder(msgspec.Struct, frozen=True):
    rungs: list[Rung]
    rejected: list[RejectedOption]
    may_start_fresh: bool


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
    `deleted` those that retention took away, `local` those that the local tier committed. One that only the
    local tier had and has no more does not stand against a fresh start: it was never meant to last. With
    `local_unseen` nobody has looked, and it does.
    `owners` says, in words, whose those are that this run does not know.
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
            RejectedOption(str(name), ["abandoned: the run went back below it and on another way"])
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

    A fresh start becomes no more allowed by it: where nothing else is left, the resume is refused.
    """
    kept = [rung for rung in ladder.rungs if rung.name not in avoid]
    left_out = [RejectedOption(rung.name, [AVOIDED]) for rung in ladder.rungs if rung.name in avoid]
    fresh = ladder.may_start_fresh and not left_out
    return Ladder(kept, [*left_out, *ladder.rejected], fresh)


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
    if standing in REFUSED and not force:
        return f"{standing}: used only when named, with checkpoint.force"
    return ""


# What a resume would make of each checkpoint of a run: the answer of `resolver`.


class Resolution(msgspec.Struct, frozen=True, kw_only=True):
    """The answer; fields are only ever added."""

    run: str
    """The run's id; empty if there is none yet."""
    run_dir: str
    root: str
    chosen: str
    """A checkpoint's name, `fresh start` or `refused`."""
    step: int | None = None
    path: str | None = None
    tier: str = ""
    without_local: str = ""
    """What would be chosen if the nodes hold nothing any more."""
    why: list[str] = []
    candidates: list[RungOutlook] = []
    """In the order of the ladder; then what is no rung."""
    digests_read: bool = True
    asked: str = "auto"
    """`resume_from`, as it was asked with."""
    pinned: str | None = None
    live: LeaseState | None = None
    """Who holds the run, if somebody does."""
    storage_alarm: list[str] = []
    """Checkpoints in a row whose bytes were wrong, if so many were that the storage must be tried."""
    unseen: list[str] = []
    """Places that could not be looked at, and why."""
    samples: int | None = None
    tokens: int | None = None
    world: int | None = None
    exit_code: int = 0
    """What a start would end with: 0, 18 (no valid rung), 20 (somebody holds the run) or 24 (the directory
    of a run that was there before is not)."""

    @property
    def usable(self) -> bool:
        return self.exit_code == 0

    def require(self) -> Resolution:
        """Itself, or the error that the start would end with."""
        if self.exit_code == ExitCode.RUN_IS_LIVE:
            raise RunIsLiveError("; ".join(self.why))
        if self.exit_code == ExitCode.CONTROL_UNUSABLE:
            raise ControlError("; ".join(self.why))
        if self.exit_code:
            raise NoValidRungError("; ".join(self.why))
        return self
