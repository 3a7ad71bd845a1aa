"""The local tier: the copies of one place, and what the control directory has recorded of them.

```
<non_persistent_local_ckpt_dir>/<run id>/      one place, for one run; for its owner only
    place.json                                 its random id, made once
    in_use.lock                                locked, shared, by every process that uses the place
    images/00003.0                             rank 3's shards one after the other: an image
    images/00003.9f21c07a                      one that a peer sent
    copies/step_00000120-3fa9c1d2.00003.json   a committed copy: which image holds it
    quarantine/…                               records of copies whose bytes were found wrong
```
Guarantee: a copy counts only while its record is there, and the record is there only while the image
holds those bytes: it is written after them, and taken away before they change. A reader first takes a shared
lock on the image and then checks that the record still stands (`lease`); whoever wants the memory back takes
an exclusive lock for the moment in which it takes the record away (`take_back`), or checks whether it could
(`is_idle`). So neither waits for the other, except a reader for that moment.

A record proves nothing: bytes are judged by the manifest that its digest names. Nothing here is made durable:
what a power cut leaves of it is found by digest, or not at all.

Removing what dead runs left in a local directory: `holdfast clean`.

Guarantee: no place that a process uses is touched, nor anything that is not a place, is a link, or belongs to
another user. A place is renamed to a hidden name before its first file is deleted, under the lock that
excludes its users, and judged again under that lock. So whatever happens meanwhile, what looks like a place
is a whole one, and a process that opens it at that moment finds it whole or makes a new one
(`LocalTier.in_use`).

What a removal that was cut short has left is hidden, and the next one finishes it.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import logging
import os
import re
import stat
import time
import uuid
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated, Literal

import msgspec

from holdfast.base import (
    OpenFile,
    create_exclusive,
    duration,
    make_dirs,
    read_regular,
    replace_atomic,
)
from holdfast.base import remove as remove_tree
from holdfast.checkpoint.format import (
    MANIFEST,
    METADATA,
    PARTS,
    CheckpointName,
    Count,
    Digest,
    Manifest,
    ManifestError,
    parse_name,
)
from holdfast.checkpoint.format import manifest as manifests
from holdfast.errors import ControlError, UsageError
from holdfast.process import is_gone
from holdfast.record import (
    ControlDirectory,
    current_epoch,
    list_names,
    read_beat,
    read_claim,
    read_timeline,
)

log = logging.getLogger("holdfast.checkpoint")

PLACE = "place.json"
IN_USE = "in_use.lock"
MAX_RECORD_BYTES = 16 * 1024 * 1024
MOMENT = 1.0
"""Seconds that a reader waits for an exclusive lock on an image, which is only ever held for a moment."""

Place = Annotated[str, msgspec.Meta(pattern="^[0-9a-f]{12}$")]
ImageName = Annotated[str, msgspec.Meta(pattern=r"^[0-9]{5,9}\.[0-9a-f]{1,12}$")]

OPEN_TRIES = 10
IN_USE_TIMEOUT = 10.0
"""Seconds to wait for `holdfast clean` to be done with a place."""
_TAKEN_AWAY = (FileNotFoundError, FileExistsError)
"""What is raised if `holdfast clean` renames a directory meanwhile; the second by `mkdir` with `exist_ok`."""


class PlaceRecord(msgspec.Struct, frozen=True, kw_only=True):
    """`place.json`: what this directory is, and for whom it can be given up."""

    place: Place
    run: str
    run_dir: str
    node: str
    created: float


class CopyFile(msgspec.Struct, frozen=True, array_like=True):
    """One shard, and where it begins in the image."""

    path: str
    start: Count
    size: Count
    digest: Digest


class CopyRecord(msgspec.Struct, frozen=True, kw_only=True):
    """A committed copy of one rank's shards of one checkpoint."""

    checkpoint: str
    manifest: Digest
    """The manifest that judges it."""
    rank: Count
    """The rank that saved it, which need not be one of this place."""
    image: ImageName
    files: list[CopyFile]
    kind: Literal["own", "replica"]
    at: float

    @property
    def name(self) -> CheckpointName:
        found = parse_name(self.checkpoint)
        assert found is not None  # checked when it was read
        return found

    @property
    def nbytes(self) -> int:
        return sum(file.size for file in self.files)


class LocalTier:
    """One place's copies for one run."""

    def __init__(self, path: Path, record: PlaceRecord) -> None:
        self.path = path
        self.record = record
        self.images = path / "images"
        self.copies = path / "copies"
        self.quarantined = path / "quarantine"

    @property
    def place(self) -> str:
        return self.record.place

    @classmethod
    def open(cls, directory: Path, run: str, *, node: str, run_dir: Path) -> LocalTier:
        """The place under a local directory, made by whoever comes first. UsageError: it cannot be used."""
        path = directory.absolute() / run
        record = PlaceRecord(
            place=uuid.uuid4().hex[:12],
            run=run,
            run_dir=str(run_dir.absolute()),
            node=node,
            created=time.time(),
        )
        try:
            for _ in range(OPEN_TRIES - 1):
                with contextlib.suppress(*_TAKEN_AWAY):
                    _make(path, record)
                    return cls.at(path)
            _make(path, record)
            return cls.at(path)
        except (OSError, msgspec.DecodeError) as error:
            raise UsageError(
                f"the local tier cannot use {path}: {error}. Set checkpoint.non_persistent_local_ckpt_dir to "
                "a directory on this node that this job can write"
            ) from error

    @classmethod
    def at(cls, path: Path) -> LocalTier:
        """An existing place; OSError or msgspec.DecodeError if it is not one."""
        return cls(path, msgspec.json.decode(read_regular(path / PLACE, MAX_RECORD_BYTES), type=PlaceRecord))

    # --- what it holds --------------------------------------------------------------------------------------

    def records(self, rank: int | None = None) -> list[CopyRecord]:
        """Every committed copy, newest step first. One that cannot be read is quarantined.

        `rank`: only what that rank saved.
        """
        which = "step_*.json" if rank is None else f"step_*.{rank:05d}.json"
        found = [self._read(path) for path in sorted(self.copies.glob(which))]
        return sorted(
            (record for record in found if record is not None),
            key=lambda r: (-r.name.step, r.name.id, r.rank),
        )

    def find(self, checkpoint: str, rank: int) -> CopyRecord | None:
        return self._read(self._record_path(checkpoint, rank))

    def _read(self, path: Path) -> CopyRecord | None:
        try:
            record = msgspec.json.decode(read_regular(path, MAX_RECORD_BYTES), type=CopyRecord)
            if parse_name(record.checkpoint) is None or path != self._record_path(
                record.checkpoint, record.rank
            ):
                raise msgspec.ValidationError("it belongs to another checkpoint")
        except FileNotFoundError:
            return None
        except (OSError, msgspec.DecodeError) as error:
            log.warning("holdfast: %s is not a record of a copy (%s); it does not count", path, error)
            with contextlib.suppress(OSError):
                os.replace(path, self.quarantined / path.name)
            return None
        return record

    def image(self, record: CopyRecord) -> Path:
        return self.images / record.image

    def _record_path(self, checkpoint: str, rank: int) -> Path:
        return self.copies / f"{checkpoint}.{rank:05d}.json"

    # --- changes --------------------------------------------------------------------------------------------

    def commit(self, record: CopyRecord) -> None:
        """The image holds this copy, checked: from now on it counts."""
        path = self._record_path(record.checkpoint, record.rank)
        replace_atomic(path, msgspec.json.encode(record), durable=False)

    def take_back(self, record: CopyRecord) -> bool:
        """The copy no longer counts, and its image may be changed; False if somebody is reading it now."""
        with _locked(self.image(record), fcntl.LOCK_EX) as descriptor:
            if descriptor is None and self.image(record).exists():
                return False
            self._record_path(record.checkpoint, record.rank).unlink(missing_ok=True)
            return True

    def drop(self, record: CopyRecord) -> bool:
        """Take a copy back and free its memory too; False if somebody is reading it now."""
        if not self.take_back(record):
            return False
        if not any(other.image == record.image for other in self.records()):
            self.image(record).unlink(missing_ok=True)
        return True

    def quarantine(self, record: CopyRecord, why: str) -> bool:
        """Its bytes are wrong: it never counts again. The reason is kept, the memory is not.

        False: somebody else was quicker, or it was given up.
        """
        try:
            self._record_path(record.checkpoint, record.rank).unlink()
        except FileNotFoundError:
            return False
        note = msgspec.json.encode({"why": why, "at": time.time(), "record": record})
        name = f"{record.checkpoint}.{record.rank:05d}.{uuid.uuid4().hex[:8]}.json"
        with contextlib.suppress(OSError):  # a full tier must not keep a bad copy in the inventory
            replace_atomic(self.quarantined / name, note, durable=False)
        return True

    @contextlib.contextmanager
    def lease(self, record: CopyRecord) -> Iterator[int | None]:
        """A descriptor of the image, which stays unchanged for as long as this is held; None: it is gone."""
        with _locked(self.image(record), fcntl.LOCK_SH) as descriptor:
            # In this order: what is taken back after the lock was taken cannot be changed before it is
            # released.
            stands = descriptor is not None and self.find(record.checkpoint, record.rank) == record
            yield descriptor if stands else None

    def is_read(self, record: CopyRecord) -> bool:
        """Whether somebody holds a lease on it right now."""
        return not self.is_idle(record.image)

    def is_idle(self, image: str) -> bool:
        """Whether nobody reads an image, or works on one that is not committed yet."""
        with _locked(self.images / image, fcntl.LOCK_EX) as descriptor:
            return descriptor is not None or not (self.images / image).exists()

    @contextlib.contextmanager
    def work_on(self, image: str) -> Iterator[int | None]:
        """For a writer: nobody takes this image's memory before its copy is committed. None: it is gone."""
        with _locked(self.images / image, fcntl.LOCK_SH) as descriptor:
            yield descriptor

    @contextlib.contextmanager
    def in_use(self) -> Iterator[None]:
        """For as long as this is held, `holdfast clean` leaves the place alone.

        A place that it took away a moment ago is made again, empty.
        """
        descriptor = self._lock_in_use()
        try:
            _make(self.path, self.record)  # only now: before, it could have been taken away half made
            self.record = self.at(self.path).record  # if it was made again, then perhaps by somebody else
            yield
        finally:
            os.close(descriptor)

    def _lock_in_use(self) -> int:
        deadline = time.monotonic() + IN_USE_TIMEOUT
        while True:
            try:
                self.path.mkdir(mode=0o700, parents=True, exist_ok=True)
                descriptor = os.open(self.path / IN_USE, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            except _TAKEN_AWAY:
                if time.monotonic() >= deadline:
                    raise
                time.sleep(0.01)
                continue
            try:
                fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
            except BlockingIOError:
                stands = False
            except OSError:  # no locks here, and then `holdfast clean` takes nothing away either
                stands = True
            else:
                stands = _is_at(descriptor, self.path / IN_USE)
            if stands or time.monotonic() >= deadline:
                return descriptor
            os.close(descriptor)
            time.sleep(0.01)


def _make(path: Path, record: PlaceRecord) -> None:
    """Make whatever a place lacks; whoever comes first gives it its id."""
    path.mkdir(mode=0o700, parents=True, exist_ok=True)
    if path.is_symlink() or path.stat().st_uid != os.geteuid():
        raise PermissionError(errno.EPERM, "it is a link or belongs to somebody else", str(path))
    for folder in ("images", "copies", "quarantine"):
        (path / folder).mkdir(exist_ok=True)
        if (path / folder).is_symlink():  # what is swept there would be somebody else's
            raise PermissionError(errno.EPERM, "it is a link", str(path / folder))
    if not (path / PLACE).exists():
        create_exclusive(path / PLACE, msgspec.json.encode(record), mode=0o600)


def _is_at(descriptor: int, path: Path) -> bool:
    """Whether an open file is still the one with that name."""
    try:
        return os.path.samestat(os.fstat(descriptor), os.lstat(path))
    except FileNotFoundError:
        return False


def places_under(directory: Path) -> list[LocalTier]:
    """Every run's place under a local directory; what is not a place is left out."""
    found = []
    for path in sorted(directory.iterdir()) if directory.is_dir() else ():
        if re.fullmatch(r"[0-9a-f]{12}", path.name):
            with contextlib.suppress(OSError, msgspec.DecodeError):
                found.append(LocalTier.at(path))
    return found


@contextlib.contextmanager
def _locked(image: Path, how: int) -> Iterator[int | None]:
    """A descriptor of an image with a lock on it; None if it is gone, or another lock excludes this one."""
    try:
        descriptor = OpenFile(image, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError:
        yield None
        return
    with descriptor:
        deadline = time.monotonic() + (MOMENT if how == fcntl.LOCK_SH else 0.0)
        while not _lock(descriptor.number, how):
            if time.monotonic() >= deadline:
                yield None
                return
            time.sleep(0.001)
        yield descriptor.number


def _lock(descriptor: int, how: int) -> bool:
    try:
        fcntl.flock(descriptor, how | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


# What all places need to know of a checkpoint in the local tier, kept in the control directory.
#
# ```
# <run dir>/local/step_00000120-3fa9c1d2/
#     parts/3.json          what rank 3 staged, with its digests; until the checkpoint is committed
#     .metadata             as it would lie in the global tier, byte for byte
#     holdfast.json         the manifest; written last
#     where.json            which place saved which rank's shards, and which places were to get replicas
#     replicas/3.<place>    a peer has confirmed that it holds rank 3's shards, verified
# ```
# The manifest is the one that the global copy of the same checkpoint has: copies differ in where they lie,
# never in what judges them.


LOCAL = "local"
WHERE = "where.json"
REPLICAS = "replicas"
MAX_WHERE_BYTES = 64 * 1024 * 1024


class RankPlace(msgspec.Struct, frozen=True, array_like=True):
    """Where one rank's shards went when they were saved."""

    place: str
    node: str
    targets: list[str]
    """Places that were to get a replica."""


class Where(msgspec.Struct, frozen=True, kw_only=True):
    """`where.json`: by rank."""

    ranks: list[RankPlace]
    nodes: dict[str, str]
    """Place → node."""


def folder(control: ControlDirectory, name: CheckpointName) -> Path:
    return control.path / LOCAL / str(name)


def names(control: ControlDirectory) -> list[CheckpointName]:
    """Checkpoints that the local tier has a manifest of, newest step first."""
    top = control.path / LOCAL
    entries = [parse_name(path.name) for path in top.iterdir()] if top.is_dir() else []
    there = [name for name in entries if name is not None and (top / str(name) / MANIFEST).exists()]
    return sorted(there, reverse=True)


def open_folder(control: ControlDirectory, name: CheckpointName) -> Path:
    """The folder, made by whoever comes first; every rank leaves its part record in `parts/`."""
    path = folder(control, name)
    make_dirs(path / PARTS)
    return path


def seal(
    control: ControlDirectory, name: CheckpointName, manifest: Manifest, metadata: bytes, where: Where
) -> str:
    """Keep the manifest, written last; returns its digest. May be called again after a cut."""
    path = folder(control, name)
    data, digest = manifests.encode(manifest)
    replace_atomic(path / WHERE, msgspec.json.encode(where), durable=False)
    for file, content in ((METADATA, metadata), (MANIFEST, data)):
        replace_atomic(path / file, content)  # other ranks' writers keep looking for it
    return digest


def read(control: ControlDirectory, name: CheckpointName, digest: str) -> Manifest:
    """The manifest with this digest; ManifestError if there is none, or another."""
    manifest, found = manifests.read(folder(control, name))
    if found != digest:
        raise ManifestError(f"its digest is {found}; {digest} was committed under this name")
    return manifest


def read_where(control: ControlDirectory, name: CheckpointName) -> Where | None:
    with contextlib.suppress(OSError, msgspec.DecodeError):
        raw = read_regular(folder(control, name) / WHERE, MAX_WHERE_BYTES)
        return msgspec.json.decode(raw, type=Where)
    return None


def confirm_replica(control: ControlDirectory, name: CheckpointName, rank: int, place: str) -> None:
    """Note a replica, for people to see where copies are; no resume relies on it."""
    path = folder(control, name) / REPLICAS / f"{rank}.{place}"
    with contextlib.suppress(OSError):
        path.parent.mkdir(exist_ok=True)
        path.touch()


def confirmed_replicas(control: ControlDirectory, name: CheckpointName) -> int:
    """How many replicas of it were noted; 0 if that cannot be read."""
    with contextlib.suppress(OSError):
        return len(list_names(folder(control, name) / REPLICAS))
    return 0


def forget(control: ControlDirectory, name: CheckpointName) -> None:
    """No place holds this checkpoint any more."""
    with contextlib.suppress(OSError):
        remove_tree(control.path, LOCAL, str(name))


# Where the copies of a checkpoint in the local tier are, according to the control directory.
#
# What is recorded is no proof: a node may have lost its memory since. It tells people where to look.


class PlaceCopies(msgspec.Struct, frozen=True, kw_only=True):
    """What one place was given of a checkpoint, by the ranks that saved it."""

    place: str
    node: str
    own: list[int]
    planned: list[int]
    """Ranks whose replica it was to get."""
    confirmed: list[int]
    """Those whose replica it has confirmed that it holds, verified."""


class Recorded(msgspec.Struct, frozen=True):
    places: list[PlaceCopies]
    """In the order of the lowest rank that each saved."""
    ranks: int
    """How many ranks saved the checkpoint; 0 if `where.json` cannot be read."""

    @property
    def nodes(self) -> int:
        return sum(bool(place.own) for place in self.places)

    @property
    def planned(self) -> int:
        return sum(len(place.planned) for place in self.places)

    @property
    def confirmed(self) -> int:
        """How many of the planned ones."""
        return sum(len({*place.planned} & {*place.confirmed}) for place in self.places)


def read_recorded(control: ControlDirectory, name: CheckpointName) -> Recorded:
    """Every place that saved or was to get something of a checkpoint; what cannot be read is left out."""
    where = read_where(control, name)
    nodes = dict(where.nodes) if where is not None else {}
    own: dict[str, list[int]] = {}
    planned: dict[str, list[int]] = {}
    for rank, saved in enumerate(where.ranks if where is not None else ()):
        nodes.setdefault(saved.place, saved.node)
        own.setdefault(saved.place, []).append(rank)
        for target in saved.targets:
            planned.setdefault(target, []).append(rank)
    confirmed = _confirmed(control, name)
    order = dict.fromkeys((*own, *planned, *confirmed))
    places = [
        PlaceCopies(
            place=place,
            node=nodes.get(place, ""),
            own=own.get(place, []),
            planned=planned.get(place, []),
            confirmed=confirmed.get(place, []),
        )
        for place in order
    ]
    return Recorded(places, len(where.ranks) if where is not None else 0)


def _confirmed(control: ControlDirectory, name: CheckpointName) -> dict[str, list[int]]:
    found: dict[str, list[int]] = {}
    with contextlib.suppress(OSError):
        for entry in os.listdir(folder(control, name) / REPLICAS):
            rank, _, place = entry.partition(".")
            if rank.isdecimal() and place:
                found.setdefault(place, []).append(int(rank))
    return {place: sorted(ranks) for place, ranks in sorted(found.items())}


# --- removing what dead runs left ---------------------------------------------------------------------------

_HIDDEN = re.compile(r"\.([0-9a-f]{12})\.[0-9a-f]{8}\.gone")
CLOCKS = 60.0
"""Seconds by which the clocks of two nodes may differ: a lease that is silent for less counts as held."""

DELETE_TRIES = 100

RunState = Literal["live", "over", "not known"]


class Rules(msgspec.Struct, frozen=True):
    """What may go."""

    older_than: float
    """Seconds without a change."""
    runs: Sequence[str] = ()
    """Only these runs' places, whatever their age and whether or not a resume would want them."""
    keep_resumable: bool = True
    force: bool = False
    """Also those of a run that may be live elsewhere, as long as nobody uses them here."""


class FoundPlace(msgspec.Struct, frozen=True, kw_only=True):
    """What was found when a place was looked at."""

    path: str
    run: str
    run_dir: str
    node: str
    newest: CheckpointName | None
    """Judged by its records' names; no byte is read for it."""
    bytes: int
    age: float
    """Seconds since something in it changed."""
    in_use: bool
    owner: int
    run_state: RunState
    ahead: bool
    """The run's newest checkpoint here is newer than its newest one in the checkpoint root."""
    left_over: bool = False
    """What an earlier removal did not finish."""


class CleaningRuling(msgspec.Struct, frozen=True):
    keep: bool
    reason: str


class Cleaning(msgspec.Struct, frozen=True):
    """What became of one place."""

    found: FoundPlace
    verdict: CleaningRuling
    error: str = ""
    """Why it could not be removed, or not wholly."""


def judge(found: FoundPlace, rules: Rules, user: int) -> CleaningRuling:
    """Pure: whether a place stays, and why."""
    named = found.run in rules.runs
    if found.owner != user:
        return CleaningRuling(True, f"belongs to user {found.owner}")
    if rules.runs and not named:
        return CleaningRuling(True, "another run was asked for")
    if found.left_over:
        return CleaningRuling(False, "left by a removal that was cut short")
    if found.in_use:
        return CleaningRuling(True, "in use: a process on this node holds it")
    if found.run_state == "live" and not rules.force:
        return CleaningRuling(
            True, "its run is live, perhaps on other nodes; --force removes it all the same"
        )
    if named:
        return CleaningRuling(False, "asked for by name")
    if found.age < rules.older_than:
        return CleaningRuling(True, f"changed {duration(max(found.age, 0.0))} ago")
    if found.ahead and rules.keep_resumable and not rules.force:
        return CleaningRuling(True, "holds a checkpoint that is newer than any in the checkpoint root")
    return CleaningRuling(False, f"not changed for {duration(found.age)}")


def look(directory: Path) -> list[FoundPlace]:
    """Every place under a local directory, and what removals left there. Changes nothing."""
    found = [_look(tier, in_use=_is_used(tier.path)) for tier in _places(directory)]
    for path in sorted(directory.iterdir()):
        match = _HIDDEN.fullmatch(path.name)
        if match is not None and stat.S_ISDIR(path.lstat().st_mode):
            found.append(_look_at_left_over(path, match[1]))
    return found


def remove(found: FoundPlace, rules: Rules) -> Cleaning:
    """Look at a place once more, with its users excluded, and remove it if it still may go."""
    path = Path(found.path)
    user = os.geteuid()
    if found.left_over:
        verdict = judge(found, rules, user)
        return Cleaning(found, verdict, "" if verdict.keep else _delete(path))
    try:
        with _alone(path) as alone:
            if not alone:
                return Cleaning(found, CleaningRuling(True, "in use: a process on this node holds it"))
            again = _look(LocalTier.at(path), in_use=False)
            verdict = judge(again, rules, user)
            if verdict.keep:
                return Cleaning(again, verdict)
            hidden = path.with_name(f".{path.name}.{uuid.uuid4().hex[:8]}.gone")
            os.rename(path, hidden)
            return Cleaning(again, verdict, _delete(hidden))
    except FileNotFoundError:
        return Cleaning(found, CleaningRuling(True, "gone already: somebody else removed it"))
    except (OSError, msgspec.DecodeError) as error:
        return Cleaning(found, judge(found, rules, user), f"{path}: {error}")


def _places(directory: Path) -> list[LocalTier]:
    return [tier for tier in places_under(directory) if not tier.path.is_symlink()]


def _delete(hidden: Path) -> str:
    """Delete what has been taken away; returns why it could not be. Never follows a link."""
    for _ in range(DELETE_TRIES):
        try:
            remove_tree(hidden.parent, hidden.name)
        except OSError as error:
            if error.errno == errno.EBUSY and error.filename == str(hidden):  # somebody else deletes it too
                continue
            why = error.strerror or error
            return f"{error.filename or hidden}: {why}; the next `holdfast clean` tries again"
        else:
            return ""
    return f"{hidden}: somebody else is deleting it"


# --- alone with a place -------------------------------------------------------------------------------------


@contextlib.contextmanager
def _alone(path: Path) -> Iterator[bool]:
    """Whether nobody uses a place; nobody begins to while this is held. If in doubt, somebody does."""
    try:
        flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
        descriptor = os.open(path / IN_USE, flags, 0o600)
    except FileNotFoundError:
        raise
    except OSError:
        yield False
        return
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            free = os.path.samestat(os.fstat(descriptor), os.lstat(path / IN_USE))
        except FileNotFoundError:
            raise
        except OSError:  # it is used, or cannot be locked, so that nobody can know
            free = False
        yield free
    finally:
        os.close(descriptor)


def _is_used(path: Path) -> bool:
    """Whether somebody holds a place; makes nothing."""
    try:
        descriptor = os.open(path / IN_USE, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    except FileNotFoundError:
        return False
    except OSError:
        return True
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return True
    finally:
        os.close(descriptor)
    return False


# --- looking ------------------------------------------------------------------------------------------------


def _look(tier: LocalTier, *, in_use: bool) -> FoundPlace:
    record = tier.record
    names = {name for path in _listed(tier.copies) if (name := parse_name(path.name.partition(".")[0]))}
    state, ahead = _ask_run(Path(record.run_dir), record.run, names)
    taken, changed = _measure(tier.path)
    return FoundPlace(
        path=str(tier.path),
        run=record.run,
        run_dir=record.run_dir,
        node=record.node,
        newest=max(names, default=None),
        bytes=taken,
        age=time.time() - changed,
        in_use=in_use,
        owner=tier.path.lstat().st_uid,
        run_state=state,
        ahead=ahead,
    )


def _look_at_left_over(path: Path, run: str) -> FoundPlace:
    taken, changed = _measure(path)
    return FoundPlace(
        path=str(path),
        run=run,
        run_dir="",
        node="",
        newest=None,
        bytes=taken,
        age=time.time() - changed,
        in_use=False,
        owner=path.lstat().st_uid,
        run_state="not known",
        ahead=False,
        left_over=True,
    )


def _listed(folder: Path) -> list[Path]:
    try:
        return list(folder.iterdir())
    except OSError:
        return []


def _measure(path: Path) -> tuple[int, float]:
    """Bytes that it really takes, and when something in it changed last. Locking it is not a change."""
    taken, changed = 0, 0.0
    for folder, folders, files in os.walk(path):
        for name in (*folders, *files):
            with contextlib.suppress(OSError):
                info = os.lstat(f"{folder}/{name}")
                taken += info.st_blocks * 512
                if name != IN_USE:
                    changed = max(changed, info.st_mtime)
    return taken, changed


def _ask_run(run_dir: Path, run: str, here: set[CheckpointName]) -> tuple[RunState, bool]:
    """Whether the run may be live, and whether what is here is newer than what the checkpoint root has."""
    try:
        control = ControlDirectory.open(run_dir)
        if control.run_id != run:  # the directory was made anew for another run
            return "over", False
        on_line = {CheckpointName(record.step, record.id) for record in read_timeline(control).on_line}
        state: RunState = "live" if _is_held(control) else "over"
    except (ControlError, OSError):
        return "not known", False
    in_root = {name for name in on_line if (control.path / "checkpoints" / str(name)).is_dir()}
    return state, max(here & on_line, default=_NONE) > max(in_root, default=_NONE)


_NONE = CheckpointName(-1, "")


def _is_held(control: ControlDirectory) -> bool:
    """Whether the run's lease may still be held. By wall clocks: good enough to leave something alone."""
    epoch = current_epoch(control)
    claim = read_claim(control, epoch) if epoch else None
    if claim is None or is_gone(claim.holder):
        return False
    beat = read_beat(control, epoch)
    if beat is not None and beat.released:
        return False
    return time.time() - (beat.at if beat is not None else claim.at) < claim.ttl + CLOCKS
