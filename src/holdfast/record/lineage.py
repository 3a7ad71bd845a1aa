"""Which checkpoints are on the run's present timeline.

Every commit is recorded under its attempt before the checkpoint appears, and every attempt records its head
before it trains. An attempt is one straight line of steps, so the timeline is: the newest attempt's commits,
then its head, then the commits up to that head made by the attempt that the head came from, and so on down to
a fresh start.

None of this is read from the checkpoints, so a damaged, missing or forged one cannot bend the lineage; and a
late commit by a group that was cut off is not on it, because a newer attempt has a newer head.

A run may save to its nodes' memory many times a minute. Once no place holds such a checkpoint any more, its
commit is put on the shelf: one file per attempt, with a line for each (`shelve`). It still counts for the
line and for what was saved from what; it just no longer takes a file of its own.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path

import msgspec

from holdfast.base import explain_os_error, moment, read_regular, replace_atomic
from holdfast.errors import ControlError
from holdfast.record.attempts import HeadRecord, attempt_numbers
from holdfast.record.directory import ControlDirectory, create_record, list_names, read_record
from holdfast.record.lease import Fence

SHELF = "shelf.jsonl"
SHELF_LIMIT = 1024 * 1024 * 1024
"""In bytes: enough for millions of commits of one attempt."""


class CommitRecord(msgspec.Struct, frozen=True, kw_only=True):
    """A checkpoint that was about to be committed; its directory, or the local tier, shows whether it was."""

    id: str
    step: int
    parent: str | None
    attempt: int
    manifest: str
    """The manifest's digest: a directory with another manifest is not this checkpoint."""
    created: float = 0.0
    """By rank 0's clock: of two that an attempt saved at the same step, the later one is the newer."""
    tied: str = ""
    """What ties it to the number of ranks that saved it, in words; empty if others can take it up."""


def record_commit(control: ControlDirectory, fence: Fence, record: CommitRecord) -> None:
    """Called with the fence held, just before the rename that commits."""
    fence.check(f"record the commit of step {record.step}")
    create_record(_path(control, record), record)


def record_done(control: ControlDirectory, record: CommitRecord) -> None:
    """Called after the rename: from now on an absent directory means that it was lost, not never committed.

    Not made durable: it matters only once the directory has been lost, long after.
    """
    replace_atomic(_path(control, record).with_suffix(".done"), msgspec.json.encode(record), durable=False)


def was_committed(control: ControlDirectory, record: CommitRecord) -> bool:
    """Whether the rename is known to have happened."""
    return _path(control, record).with_suffix(".done").exists()


class DeletedRecord(msgspec.Struct, frozen=True, kw_only=True):
    """A checkpoint that was deleted on purpose. As long as its directory exists, that counts and not this."""

    id: str
    step: int
    reason: str
    epoch: int
    at: float

    def describe(self) -> str:
        """By whom, when and why; `deleted …`."""
        return f"by retention, {moment(self.at)} ({self.reason})"


def record_deleted(control: ControlDirectory, record: CommitRecord, deleted: DeletedRecord) -> None:
    """Called with the fence held, just before the rename that takes the checkpoint away."""
    create_record(_path(control, record).with_suffix(".deleted"), deleted)


def deleted_names(control: ControlDirectory) -> frozenset[tuple[int, str]]:
    """(step, id) of checkpoints that retention deleted, or was about to. A record's name alone says so."""
    names = [name for n in attempt_numbers(control) for name in list_names(_folder(control, n))]
    deleted = (name.removesuffix(".deleted").partition("-") for name in names if name.endswith(".deleted"))
    return frozenset((int(step), id) for step, _, id in deleted if step.isdecimal())


def find_deleted(control: ControlDirectory, step: int, id: str) -> DeletedRecord | None:
    """The record of one deletion, without reading all the others; it counts even if it cannot be read."""
    for number in reversed(attempt_numbers(control)):
        path = _folder(control, number) / f"{step:012d}-{id}.deleted"
        try:
            found = read_record(path, DeletedRecord)
        except ControlError as error:
            return DeletedRecord(id=id, step=step, reason=str(error), epoch=0, at=0.0)
        if found is not None:
            return found
    return None


def find_commit(control: ControlDirectory, attempt: int, step: int, id: str) -> CommitRecord | None:
    """One attempt's record of one checkpoint, without reading all the others."""
    return read_record(_folder(control, attempt) / f"{step:012d}-{id}.json", CommitRecord)


def commits_of(control: ControlDirectory, attempt: int) -> list[CommitRecord]:
    folder = _folder(control, attempt)
    # In this order, what is put on the shelf meanwhile is seen at least once.
    found = [read_record(path, CommitRecord) for path in sorted(folder.glob("*.json"))]
    found += _shelved(folder / SHELF)
    once = {(record.step, record.id): record for record in found if record is not None}
    return sorted(once.values(), key=lambda record: (record.step, record.id))


Saved = tuple[int, str, bool]
"""A checkpoint that an attempt saved: its step, its id, and whether its rename is known to have happened."""


def saved_by(control: ControlDirectory, attempt: int) -> list[Saved]:
    """What an attempt saved, by the names of its records alone, lowest step first."""
    names = list_names(_folder(control, attempt))
    found = [name.removesuffix(".json").partition("-") for name in names if name.endswith(".json")]
    known = {(int(step), id) for step, _, id in found if step.isdigit()}
    known |= {(record.step, record.id) for record in _shelved(_folder(control, attempt) / SHELF)}
    done = {name.removesuffix(".done") for name in names if name.endswith(".done")}
    return [(step, id, f"{step:012d}-{id}" in done) for step, id in sorted(known)]


def shelve(control: ControlDirectory, fence: Fence, record: CommitRecord) -> None:
    """No place holds this checkpoint any more, and it was never in the root: keep its commit in few bytes."""
    fence.check(f"shelve the commit of step {record.step}")
    path = _path(control, record)
    if not path.exists():
        return
    descriptor = os.open(path.parent / SHELF, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
    try:
        size = os.fstat(descriptor).st_size
        torn = (
            size > 0 and os.pread(descriptor, 1, size - 1) != b"\n"
        )  # by a cut; that commit still has its own file
        try:
            view = memoryview((b"\n" if torn else b"") + msgspec.json.encode(record) + b"\n")
            while view:  # a disk that fills up takes only a part at first
                view = view[os.write(descriptor, view) :]
            os.fsync(descriptor)
        except OSError:
            with contextlib.suppress(OSError):
                os.ftruncate(descriptor, size)
            raise
    finally:
        os.close(descriptor)
    path.unlink(missing_ok=True)


def _shelved(path: Path) -> list[CommitRecord]:
    """The commits on the shelf. A line torn by a cut is left out: its commit still has a file of its own."""
    try:
        lines = read_regular(path, SHELF_LIMIT).split(b"\n")
    except FileNotFoundError:
        return []
    except OSError as error:
        raise explain_os_error(error, "read", path) from error
    found: list[CommitRecord] = []
    for line in lines:
        with contextlib.suppress(msgspec.DecodeError):
            found.append(msgspec.json.decode(line, type=CommitRecord))
    return found


def _path(control: ControlDirectory, record: CommitRecord) -> Path:
    return _folder(control, record.attempt) / f"{record.step:012d}-{record.id}.json"


def _folder(control: ControlDirectory, attempt: int) -> Path:
    return control.attempt(attempt) / "commits"


def timeline(
    heads: Mapping[int, HeadRecord], commits: Mapping[int, Sequence[CommitRecord]]
) -> list[CommitRecord]:
    """Pure: the commits on the present timeline, newest first."""
    # By step and id: ids of older releases are so short that two checkpoints may share one.
    by_name = {(record.step, record.id): record for records in commits.values() for record in records}
    line: list[CommitRecord] = []
    attempt = max(heads, default=None)
    limit: int | None = None
    while attempt is not None:
        mine = [record for record in commits.get(attempt, ()) if limit is None or record.step <= limit]
        line.extend(sorted(mine, key=lambda record: (record.step, record.created), reverse=True))
        head = heads.get(attempt)
        source = by_name.get((head.step, head.checkpoint or "")) if head is not None else None
        if source is None or source.attempt >= attempt:
            break
        attempt, limit = source.attempt, source.step
    return line


class Timeline(msgspec.Struct, frozen=True):
    """What the control directory knows about a run's checkpoints."""

    on_line: list[CommitRecord]
    """Newest step first."""
    abandoned: list[CommitRecord]
    origin: HeadRecord | None
    """The oldest head on the line: a fresh start, or a checkpoint this run did not make."""


def descendants(ids: Collection[str], records: Iterable[CommitRecord]) -> list[CommitRecord]:
    """Pure: all that was saved from these, directly or not, on any path the run took; oldest first."""
    records = list(records)
    family = set(ids)
    while grown := {record.id for record in records if record.parent in family} - family:
        family |= grown
    found = [record for record in records if record.id in family and record.id not in ids]
    return sorted(found, key=lambda record: (record.attempt, record.step, record.id))


def condemned_with(name: str) -> str:
    """The evidence against what was saved from a condemned checkpoint; acquitting that clears it too."""
    return f"condemned with {name}, from which it was saved"


def read_timeline(control: ControlDirectory) -> Timeline:
    """The timeline, all of it from disk; unreadable records are errors, never guesses."""
    heads: dict[int, HeadRecord] = {}
    commits: dict[int, list[CommitRecord]] = {}
    for number in attempt_numbers(control):
        head = read_record(control.attempt(number) / "head.json", HeadRecord)
        if head is not None:
            heads[number] = head
        commits[number] = commits_of(control, number)
    on_line = timeline(heads, commits)
    names = {(record.step, record.id) for record in on_line}
    every = [record for records in commits.values() for record in records]
    abandoned = [record for record in every if (record.step, record.id) not in names]
    oldest = on_line[-1].attempt if on_line else max(heads, default=None)
    return Timeline(on_line, abandoned, heads.get(oldest) if oldest is not None else None)


def tied_to_ranks(control: ControlDirectory) -> str:
    """What ties the timeline's newest checkpoint to the number of ranks that saved it; empty if nothing."""
    return next((record.tied for record in read_timeline(control).on_line), "")
