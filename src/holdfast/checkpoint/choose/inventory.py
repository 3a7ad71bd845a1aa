"""What a resume has to choose from: the ladder, as the control directory and the root give it."""

from __future__ import annotations

import contextlib
import re
import time
from collections.abc import Callable, Collection
from pathlib import Path

from holdfast.base import escaped
from holdfast.checkpoint import Owner, removed
from holdfast.checkpoint.choose.ladder import DELETED, REFUSED, Ladder, Rung, build_ladder
from holdfast.checkpoint.choose.plain import directories, is_checkpoint
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
from holdfast.checkpoint.remote import (
    Remote,
    RemoteError,
    RemoteUnavailableError,
    open_remote,
    pull,
    pull_named,
    pull_standing_of,
)
from holdfast.config import is_step
from holdfast.errors import HoldfastError, StorageError, UsageError
from holdfast.journal import CopyFetched, JournalWriter, RejectedOption, Warned
from holdfast.record import (
    CommitRecord,
    ControlDirectory,
    Fence,
    StandingBook,
    Timeline,
    deleted_names,
    find_deleted,
    read_timeline,
    told_progress,
    was_committed,
)

NAMED_OWNERS = 8
"""Checkpoints of others whose run is looked up: enough to tell what happened."""
MAX_LINKS = 40
"""Links that are followed one after the other, as many as the kernel follows."""


def take_inventory(
    control: ControlDirectory,
    root: CheckpointRoot,
    resume_from: str,
    *,
    force: bool,
    copies: Collection[CheckpointName] = (),
    local_unseen: bool = False,
) -> Ladder:
    """The ladder for `resume_from`: "auto", "fresh", a step number, or a path.

    `copies` are checkpoints that a remote or the local tier holds. One of this line that is not here is a
    rung all the same: it can be fetched, or put together. One that retention deleted is not, nor is anybody
    else's. `local_unseen`: what the local tier holds is not known.
    """
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
        return (
            _with_origin(ladder, timeline, control)
            if resume_from == "auto"
            else _with_deletions(ladder, control)
        )
    return _named(Path(resume_from), control, force=force)


def _owners(root: CheckpointRoot, known: Collection[CheckpointName]) -> dict[tuple[int, str], str]:
    """Which runs have saved what lies here beside this run's own, in words; of the newest few."""
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
    if standing in REFUSED and not force:
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
    """The ladder of a step that was asked for, with when and why retention deleted what it has deleted."""
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
    """Before its first attempt a run finds checkpoints in its root that nobody has a record of: to begin anew
    beside them may be meant, or may throw away what was trained; somebody must say which."""
    there = [path for path in directories(root.path) if is_checkpoint(path)] if root.path.is_dir() else []
    why = "no run has a record of it: name it with checkpoint.resume_from to go on from it, or say 'fresh'"
    found = [RejectedOption(escaped(path.name), [why]) for path in there[:NAMED_OWNERS]]
    return Ladder(ladder.rungs, [*ladder.rejected, *found], not found)


def _refused(rung: Rung, control: ControlDirectory) -> str:
    """The standing for which a checkpoint that was named by its path is refused; whoever recorded it."""
    if not rung.id:
        return ""
    path, name = Path(rung.path), str(CheckpointName(rung.step, rung.id))
    standing = StandingBook(control, path.parent).of(name)
    if standing not in REFUSED:
        # It may be a copy in another place of what this run judged, or was told of, in its own root.
        standing = StandingBook(control).of(name)
    return str(standing) if standing in REFUSED else ""


def refuse_named(rung: Rung, control: ControlDirectory) -> Ladder | None:
    """The empty ladder of a checkpoint that was named and may not be used; None if it may."""
    standing = _refused(rung, control)
    if not standing:
        return None
    name = str(CheckpointName(rung.step, rung.id))
    why = f"{standing}: set checkpoint.force to use it all the same"
    told = StandingBook(control, Path(rung.path).parent).evidence_of(name)
    return Ladder([], [RejectedOption(rung.name, [why, *(escaped(line, 500) for line in told)])], False)


def _named(path: Path, control: ControlDirectory, *, force: bool) -> Ladder:
    if not path.is_dir():
        why = removed(path, control) or removed(path)
        told = f"this checkpoint is not there any more: {why}" if why else "no such directory"
        raise UsageError(f"checkpoint.resume_from = {str(path)!r}: {told}")
    rung = _rung_at(path.absolute())
    if not force and (refused := refuse_named(rung, control)) is not None:
        return refused
    return Ladder([rung], [], False)


def _rung_at(path: Path) -> Rung:
    for _ in range(MAX_LINKS):  # what was judged lies beside the checkpoint, not beside a link to it
        if not path.is_symlink():
            break
        path = path.parent / path.readlink()
    inspection = check_structure(path)
    if inspection.manifest is not None:
        found = inspection.manifest
        return Rung(
            name=path.name, step=found.step, id=found.id, manifest=inspection.manifest_digest, path=str(path)
        )
    name = parse_name(path.name)
    digits = re.fullmatch(r"\D*?[-_](\d+)", path.name)
    step = name.step if name else int(digits[1]) if digits else 0
    return Rung(name=path.name, step=step, id="", manifest="", path=str(path))


def look_at(rung: Rung, root: CheckpointRoot, run: str, world: int | None = None) -> tuple[Path, Inspection]:
    """Where a rung lies, and what the cheap checks say of it: names, sizes, and the bytes of `.metadata`."""
    path = Path(rung.path) if rung.path else root.path / rung.name
    if not rung.manifest:
        return path, check_structure(path)
    return path, verify(path, run=None if rung.path else run, world=world, files=[METADATA])


def highest_committed_step(root: Path, control: ControlDirectory) -> int:
    """The highest step among committed checkpoints; 0 if there is none. Says nothing about their bytes.

    One that is suspect or condemned is no progress. A run that has no checkpoints at all, because its script
    saves by itself, is believed what it tells (`handover.progress`); beside checkpoints that counts nothing.
    """
    checkpoints, book = CheckpointRoot(root), StandingBook(control, root)
    try:
        names = checkpoints.names()
        if not names:
            return told_progress(control.path)
        there = (name for name in names if (checkpoints.committed(name) / MANIFEST).is_file())
        return next((name.step for name in there if book.of(str(name)) not in REFUSED), 0)
    except (OSError, StorageError):
        return 0


# What a resume asks of the remote: which rungs it could fetch, and to fetch one.
#
# Guarantee: all that is fetched during one resume takes at most `timeout` seconds together, so that the other
# ranks, which wait for the next proposal longer than that, are not left behind. A rung is fetched at most
# once.


def open_at_start(url: str, *, retry_seconds: float, insist: bool, journal: JournalWriter) -> Remote:
    """The remote of a run that starts, seen to work: an error names checkpoint.remote_root and what to do.

    Without `insist` (a restart of a run that already trains) a store that does not answer is only a warning:
    the local checkpoints may do, and copying begins when it answers again. What no wait can cure is always an
    error.
    """
    remote = open_remote(url, retry_seconds=retry_seconds)
    try:
        remote.check()
    except RemoteUnavailableError as error:
        if insist:
            raise
        journal.write(Warned(message=f"going on without remote copies for now: {error}"))
    return remote


class Fetcher:
    """Fetches for one resume; without a remote it only says that there is none."""

    def __init__(
        self,
        *,
        remote: Callable[[], Remote] | None,
        root: CheckpointRoot,
        run: str,
        fence: Fence,
        attempt: int,
        journal: JournalWriter,
        timeout: float,
        retry_seconds: float,
    ) -> None:
        self._opening = remote
        self._remote: Remote | None = None
        self._root = root
        self._fence = fence
        self._owner = Owner(run=run, attempt=attempt, epoch=fence.epoch)
        self._journal = journal
        self._left = timeout
        self._retry_seconds = retry_seconds
        self._names: set[CheckpointName] = set()
        self._tried: set[str] = set()

    def open(self) -> None:
        """Open the remote, if there is one; an error says what to set or to do."""
        if self._opening is not None and self._remote is None:
            started = time.monotonic()
            self._remote = self._opening()
            self._left -= time.monotonic() - started

    def names(self) -> set[CheckpointName]:
        """Checkpoints that have a copy; none, with a warning, if the remote does not tell."""
        if self._remote is not None:
            started = time.monotonic()
            try:
                self._names = set(self._remote.names(started + self._left))
            except RemoteError as error:
                self._journal.write(Warned(message=f"resuming without remote copies: {error}"))
            self._left -= time.monotonic() - started
        return self._names

    def fetch(self, rung: Rung, problems: list[str]) -> list[str] | None:
        """None if a good copy of the rung is in place now; else what to add to its problems."""
        name = parse_name(rung.name)
        on_line = bool(rung.manifest) and not rung.path
        if self._remote is None or name is None or name not in self._names or not on_line:
            return []
        if rung.name in self._tried:
            return ["its remote copy was fetched, and did not do either"]
        self._tried.add(rung.name)
        started = time.monotonic()
        try:
            pulled = pull(
                self._remote,
                name,
                self._root,
                fence=self._fence,
                owner=self._owner,
                expected=rung.manifest,
                deadline=started + self._left,
            )
        except RemoteError as error:
            return [str(error)]
        except OSError as error:
            return [f"its remote copy could not be stored here: {error}"]
        finally:
            self._left -= time.monotonic() - started
        self._journal.write(
            CopyFetched(
                checkpoint=rung.name,
                step=rung.step,
                remote=self._remote.url,
                bytes=pulled.copied.bytes,
                seconds=pulled.copied.seconds,
                because=problems,
                quarantine=str(pulled.quarantine or ""),
            )
        )
        return None

    @property
    def url(self) -> str:
        """Of the remote; empty if there is none, or it was not opened yet."""
        return self._remote.url if self._remote is not None else ""

    def standing_of(self, url: str) -> Path:
        """Learn what was judged of the checkpoint that a URL names; where it would come to."""
        started = time.monotonic()
        try:
            return pull_standing_of(url, self._root, timeout=self._left, retry_seconds=self._retry_seconds)
        finally:
            self._left -= time.monotonic() - started

    def named(self, url: str) -> Path:
        """The checkpoint that a URL names, as a local directory."""
        return pull_named(
            url,
            self._root,
            fence=self._fence,
            owner=self._owner,
            timeout=self._left,
            retry_seconds=self._retry_seconds,
        )
