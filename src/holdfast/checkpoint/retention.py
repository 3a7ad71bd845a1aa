"""Retention: deletes the checkpoints that the policy gives up.

Guarantee: a checkpoint is there whole, or it is gone from the root. Each one is taken away by one rename into
the trash, under the fence, after a record that says so; only then, and without the fence, is it deleted. A
cut in between leaves trash, which the next start sweeps. A checkpoint that is gone without such a record was
lost.

There is one owner: whoever holds the run's lease, which is rank 0 of an attempt after a commit, or
`holdfast ckpt gc`. So nothing is deleted while a resume reads: a new attempt claims the lease first, and from
then on the old one's fence refuses; the new one deletes nothing before its first commit, which needs every
rank to have loaded. A reader that holds no lease takes a lock (read_back.py), and is left alone.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import time
import uuid
from collections.abc import Callable
from pathlib import Path

import msgspec

from holdfast.base import Look, fsync_dir, make_folder, move, read_regular, remove
from holdfast.checkpoint.format import (
    MANIFEST,
    MAX_MANIFEST_BYTES,
    TRASH,
    CheckpointName,
    CheckpointRoot,
    Reason,
    check_structure,
    digest_bytes,
    parse_name,
)
from holdfast.checkpoint.read_back import ReadBackRecord, last_read_back, removed, unread
from holdfast.errors import HoldfastError
from holdfast.journal import JournalWriter
from holdfast.journal.events import CheckpointsDeleted, Warned
from holdfast.policy import LEAST, WAITS, Condition, RetentionRules, RetentionRuling, Stored, retain
from holdfast.record import (
    CommitRecord,
    ControlDirectory,
    DeletedRecord,
    Fence,
    RootBook,
    StandingBook,
    find_commit,
    latest_head,
    pinned,
    read_timeline,
    record_deleted,
)

log = logging.getLogger("holdfast.checkpoint")

LOOKED_AT_AGAIN = 8
"""How many of the newest must be seen to be sound, at every pass, before an older one may go."""
PASS_WAIT = 10.0
"""How long training waits for a pass; one that takes longer continues beside it."""
CLOSE_WAIT = 5.0
"""How long the end of a run waits for deletions that are still going on."""


class JudgedCheckpoint(msgspec.Struct, frozen=True, kw_only=True):
    """One checkpoint and what becomes of it."""

    name: CheckpointName
    standing: str
    keep: bool
    reason: str
    bytes: int


class RetentionOutcome(msgspec.Struct, frozen=True, kw_only=True):
    """What came of carrying out a plan."""

    items: list[JudgedCheckpoint]
    trashed: list[Path]
    """To be deleted by `empty`; no longer checkpoints."""
    error: OSError | HoldfastError | None
    """What kept the rest of the plan from being carried out."""


class _Examined(msgspec.Struct, frozen=True, kw_only=True):
    condition: Condition
    problem: str
    created: float
    bytes: int


class Retention:
    """Retention of one run's checkpoints under one root.

    Between passes it remembers what it saw, so that a pass costs little however long the history is: only the
    newest ones, and those about to be deleted, are looked at again.
    """

    def __init__(self, control: ControlDirectory, root: CheckpointRoot, rules: RetentionRules) -> None:
        self._control = control
        self._root = root
        self._rules = rules
        self._book = StandingBook(control, root.path)
        self._records: dict[CheckpointName, CommitRecord] | None = None
        self._off_line: set[CheckpointName] = set()
        self._looks: dict[CheckpointName, _Examined] = {}
        self._read_backs: dict[CheckpointName, ReadBackRecord] = {}

    # --- deciding -------------------------------------------------------------------------------------------

    def plan(self, attempt: int | None = None) -> list[JudgedCheckpoint]:
        """What would be kept and deleted now, and why; changes nothing. `attempt` is the running one."""
        present = self._root.names()
        records = self._known(present, attempt)
        standings = {name: str(self._book.of(str(name))) for name in present}
        pins = self._pins(records)
        fresh = self._refresh(present)
        # A dry run has no lease: a live run's own retention may delete some while this looks at them.
        present = [name for name in present if not self._went(name)]
        while True:
            candidates = [self._candidate(name, standings[name], pins) for name in present]
            verdicts = {verdict.id: verdict for verdict in retain(candidates, self._rules)}
            stale = [name for name in present if not verdicts[str(name)].keep and name not in fresh]
            if not stale:
                break
            for name in stale:
                self._looks[name] = self._look(name)
                fresh.add(name)
        return [self._item(name, standings[name], verdicts[str(name)]) for name in present]

    def _item(self, name: CheckpointName, standing: str, verdict: RetentionRuling) -> JudgedCheckpoint:
        look = self._looks[name]
        return JudgedCheckpoint(
            name=name, standing=standing, keep=verdict.keep, reason=verdict.reason, bytes=look.bytes
        )

    def _known(
        self, present: list[CheckpointName], attempt: int | None
    ) -> dict[CheckpointName, CommitRecord]:
        """The run's commit records. Read once; later only the running attempt can have added any."""
        if self._records is None:
            timeline = read_timeline(self._control)
            every = [*timeline.on_line, *timeline.abandoned]
            self._records = {CheckpointName(record.step, record.id): record for record in every}
            self._off_line = {CheckpointName(record.step, record.id) for record in timeline.abandoned}
        for name in present:
            if name not in self._records and attempt is not None:
                record = find_commit(self._control, attempt, name.step, name.id)
                if record is not None:
                    self._records[name] = record
        return self._records

    def _pins(self, records: dict[CheckpointName, CommitRecord]) -> dict[str, str]:
        """The checkpoint that the newest attempt came from, its parent, and the one pinned by an operator."""
        head = latest_head(self._control)
        asked = pinned(self._control)
        name = parse_name(asked.checkpoint) if asked is not None else None
        pins = {name.id: "an operator pinned it"} if name is not None else {}
        if head is None or head.checkpoint is None:
            return pins
        pins[head.checkpoint] = f"attempt {head.attempt} came from it"
        parent = next((record.parent for record in records.values() if record.id == head.checkpoint), None)
        if parent is not None:
            pins.setdefault(parent, f"the parent of the one that attempt {head.attempt} came from")
        return pins

    def _candidate(self, name: CheckpointName, standing: str, pins: dict[str, str]) -> Stored:
        look = self._looks[name]
        read = self._read_back(name) if look.condition is Condition.SOUND else None
        bad = read is not None and not read.sound
        return Stored(
            id=str(name),
            step=name.step,
            created=look.created,
            standing=standing,
            condition=Condition.BROKEN if bad else look.condition,
            on_line=self._is_on_line(name),
            pinned=pins.get(name.id, ""),
            problem=f"read back: {read.problems[0]}" if read is not None and bad else look.problem,
            read_back=read is not None and read.sound,
        )

    def _read_back(self, name: CheckpointName) -> ReadBackRecord | None:
        """What came of reading back what this run committed; once found, it is remembered."""
        if name not in self._read_backs:
            found, record = last_read_back(self._root, name), (self._records or {}).get(name)
            if found is None or record is None or found.manifest != record.manifest:
                return None
            self._read_backs[name] = found
        return self._read_backs[name]

    def _is_on_line(self, name: CheckpointName) -> bool:
        return self._records is not None and name in self._records and name not in self._off_line

    def _refresh(self, present: list[CheckpointName]) -> set[CheckpointName]:
        """Look again at the newest on the line until enough are seen to be sound, and at any that was not."""
        self._looks = {name: look for name, look in self._looks.items() if name in set(present)}
        self._read_backs = {name: read for name, read in self._read_backs.items() if name in set(present)}
        fresh: set[CheckpointName] = set()
        wanted = min(max(LEAST, self._rules.keep_last), LOOKED_AT_AGAIN)
        for name in present:
            again = wanted > 0 and self._is_on_line(name)
            if again or name not in self._looks or self._looks[name].condition is not Condition.SOUND:
                self._looks[name] = self._look(name)
                fresh.add(name)
            read = self._read_back(name)
            bad = read is not None and not read.sound
            wanted -= again and self._looks[name].condition is Condition.SOUND and not bad
        return fresh

    def _went(self, name: CheckpointName) -> bool:
        """Whether somebody else has deleted it since it was listed."""
        bad = self._looks[name].condition is not Condition.SOUND
        return bad and bool(removed(self._root.committed(name), self._control))

    def _look(self, name: CheckpointName) -> _Examined:
        directory = self._root.committed(name)
        record = (self._records or {}).get(name)
        inspection = check_structure(directory)
        condition, problem = Condition.SOUND, ""
        if record is None:
            condition, problem = Condition.FOREIGN, "there is no record of having saved it"
        elif inspection.manifest is not None and inspection.manifest_digest != record.manifest:
            condition, problem = Condition.FOREIGN, "its manifest is not the one that was committed"
        elif inspection.problems:
            problem = str(inspection.problems[0])
            unknown = any(found.reason is Reason.UNREADABLE for found in inspection.problems)
            unknown = unknown or (inspection.manifest is None and _may_be_intact(directory, record))
            condition = Condition.UNREADABLE if unknown else Condition.BROKEN
        return _Examined(
            condition=condition,
            problem=problem,
            created=inspection.manifest.created if inspection.manifest is not None else 0.0,
            bytes=inspection.size if inspection.sound else _bytes_in(directory),
        )

    # --- doing ----------------------------------------------------------------------------------------------

    def take_away(self, plan: list[JudgedCheckpoint], fence: Fence) -> RetentionOutcome:
        """Move what the plan gives up into the trash; what was not moved is kept, with the reason."""
        items: list[JudgedCheckpoint] = []
        trashed: list[Path] = []
        stopped: OSError | HoldfastError | None = None
        for item in plan:
            kept = ""
            if not item.keep and stopped is None:
                place = self._root.trash / f"{item.name}.{uuid.uuid4().hex[:8]}"
                try:
                    if self._move(item, place, fence):
                        trashed.append(place)
                        RootBook(self._root.path).forget(str(item.name))
                    else:
                        kept = "somebody is reading it"
                except (OSError, HoldfastError) as error:
                    stopped = error
            if not item.keep and stopped is not None:
                kept = f"could not be deleted: {stopped}"
            items.append(msgspec.structs.replace(item, keep=True, reason=kept) if kept else item)
        try:
            if trashed:
                # Both ends of the renames first: else a power cut could bring back half a checkpoint.
                fsync_dir(self._root.trash)
                fsync_dir(self._root.path)
        except OSError as error:
            stopped, trashed = error, []  # the next start sweeps the trash
        return RetentionOutcome(items=items, trashed=trashed, error=stopped)

    def _move(self, item: JudgedCheckpoint, place: Path, fence: Fence) -> bool:
        """One checkpoint into the trash; False if somebody is reading it."""
        assert self._records is not None
        record, directory = self._records[item.name], self._root.committed(item.name)
        deleted = DeletedRecord(
            id=record.id, step=record.step, reason=item.reason, epoch=fence.epoch, at=time.time()
        )
        make_folder(self._root.path, TRASH)
        with unread(directory) as free:
            if free:
                with fence.guard(f"delete {item.name}"):
                    record_deleted(self._control, record, deleted)
                    move(self._root.path, (directory.name,), (TRASH, place.name))
            return free


def empty(trashed: list[Path]) -> None:
    """Delete what was taken away. What cannot be deleted now is swept at the next start."""
    for path in trashed:
        with contextlib.suppress(OSError):
            remove(path.parent.parent, path.parent.name, path.name)


class Retainer:
    """Retention as a run does it: after a commit, on rank 0, without making training wait for deletions.

    Nor does training wait for a file system that does not answer: the pass then continues beside it.
    """

    def __init__(
        self,
        *,
        control: ControlDirectory,
        root: CheckpointRoot,
        rules: RetentionRules,
        fence: Fence,
        attempt: int,
        journal: JournalWriter,
        on_deleted: Callable[[list[str]], None] | None = None,
        on_waiting: Callable[[], None] | None = None,
    ) -> None:
        """`on_deleted` gets the names of the deleted checkpoints, so that their other copies can go too.

        `on_waiting` is called when something could be deleted if only a newer one had been read back.
        """
        self._retention = Retention(control, root, rules)
        self._on_deleted = on_deleted
        self._on_waiting = on_waiting
        self._idle = rules.keep_last == 0
        self._fence = fence
        self._attempt = attempt
        self._journal = journal
        self._deleting: threading.Thread | None = None
        self._passes = Look(self._pass, "retention-pass", PASS_WAIT)

    def after_commit(self) -> None:
        """Take away what the policy gives up. A failure is journalled; it never fails the save."""
        if self._idle or (self._deleting is not None and self._deleting.is_alive()):
            return  # still deleting: the next pass decides about the rest again
        passed = self._passes.take()
        if passed is None:
            return  # its outcome is reported after a later commit
        try:
            outcome = passed.result()
        except Exception as error:  # noqa: BLE001 - whatever it is, the checkpoint was committed before it
            self._warn(error)
            return
        if outcome.error is not None:
            self._warn(outcome.error)
        if self._on_waiting is not None and any(item.reason == WAITS for item in outcome.items):
            self._on_waiting()
        if not all(item.keep for item in outcome.items):
            event = deletion_event(outcome.items)
            self._journal.write(event)
            if self._on_deleted is not None:
                self._on_deleted(event.names)
        if outcome.trashed:
            self._deleting = threading.Thread(
                target=empty, args=(outcome.trashed,), name="holdfast-retention", daemon=True
            )
            self._deleting.start()

    def _pass(self) -> RetentionOutcome:
        return self._retention.take_away(self._retention.plan(self._attempt), self._fence)

    def _warn(self, error: Exception) -> None:
        why = error if isinstance(error, OSError | HoldfastError) else f"{type(error).__name__}: {error}"
        self._journal.write(Warned(message=f"retention stopped, the next save tries again: {why}"))
        log.warning("holdfast: retention stopped, the next save tries again: %s", why)

    def close(self) -> None:
        """Give deletions under way a moment to finish."""
        if self._deleting is not None:
            self._deleting.join(CLOSE_WAIT)


def deletion_event(items: list[JudgedCheckpoint]) -> CheckpointsDeleted:
    gone = [item for item in items if not item.keep]
    return CheckpointsDeleted(
        names=[str(item.name) for item in gone],
        reasons=[item.reason for item in gone],
        bytes=sum(item.bytes for item in gone),
    )


# --- small things -------------------------------------------------------------------------------------------


def _may_be_intact(directory: Path, record: CommitRecord) -> bool:
    """Whether a manifest that cannot be understood may be the committed one, written by a newer release."""
    try:
        data = read_regular(directory / MANIFEST, MAX_MANIFEST_BYTES)
    except FileNotFoundError:
        return False
    except OSError:
        return True
    start = b'{"digest":"%b","body":' % record.manifest.encode()
    return data.startswith(start) and digest_bytes(data[len(start) : -2]) == record.manifest


def _bytes_in(directory: Path) -> int:
    total = 0
    for folder, _, files in os.walk(directory):
        for file in files:
            with contextlib.suppress(OSError):
                total += (Path(folder) / file).lstat().st_size
    return total
