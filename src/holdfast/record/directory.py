"""The control directory: where a run keeps what must outlive all of its processes.

```
run.json                     the run's id; written once
lease/                       who may act (see lease.py)
attempts/000003/             attempt.json, head.json, failures/, errors/, decisions/, end.json, crashed.json
standing/<checkpoint id>/    one file a record (see standing.py)
operator/, exclusions/       what people asked for (see operator.py), what is kept out (see there)
skips/                       data that is left out (see operator.py)
origin/                      where the run was told to begin (see launches.py)
progress/                    how far a script without Run says it has got (see launches.py)
journal/                     one file a writer
reserve                      room for what has to be written once the disk is full
```
Every record is created once, whole, and never changed; the newest number wins. So any process may read at
any time, and if two race, the one that could create the file has won.
"""

from __future__ import annotations

import contextlib
import os
import re
import time
import uuid
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import msgspec

from holdfast.base import create_exclusive, explain_os_error, make_dirs, read_regular
from holdfast.errors import ControlError

CONTROL_FORMAT = 1
RUN_RECORD = "run.json"
MAX_RECORD_BYTES = 4 * 1024 * 1024
RESERVE = "reserve"
RESERVE_BYTES = 256 * 1024
"""Room for some records and a few hundred journal lines: an end with its account takes a tenth of it."""
ROOM_FOR_RESERVE = 64 * RESERVE_BYTES
"""With less room than this nothing is set aside: the run may need it."""

T = TypeVar("T")


class RunRecord(msgspec.Struct, frozen=True, kw_only=True):
    """`run.json`."""

    format: int
    run: str
    created: float


def read_record(path: Path, kind: type[T]) -> T | None:
    """A typed record, or None if it does not exist. An unreadable one is an error, never a guess."""
    try:
        raw = read_regular(path, MAX_RECORD_BYTES)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise explain_os_error(error, "read", path) from error
    try:
        return msgspec.json.decode(raw, type=kind)
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
        raise ControlError(
            f"{path} is not a {kind.__name__}: {error}. "
            "The run's memory is damaged; restore the file from a backup or use another run directory"
        ) from error


def create_record(
    path: Path, record: msgspec.Struct | dict[str, Any], kind: type[msgspec.Struct] | None = None
) -> bool:
    """Create a record once; False if it already exists. One that could not be read back is refused.

    `kind`: the type that it is read as, if not that of `record`.
    """
    try:
        raw = msgspec.json.encode(record) + b"\n"
        msgspec.json.decode(raw, type=kind or type(record))
    except (ValueError, TypeError) as error:  # a NaN, a lone surrogate, a field of the wrong type
        raise ControlError(
            f"refused to write {path}: {record!r:.200} could not be read back: {error}"
        ) from error
    if len(raw) > MAX_RECORD_BYTES:
        raise ControlError(
            f"refused to write {path}: {len(raw)} bytes, more than the {MAX_RECORD_BYTES} a record may have"
        )
    try:
        make_dirs(path.parent)
        return create_exclusive(path, raw)
    except OSError as error:
        raise explain_os_error(error, "write", path) from error


def list_names(path: Path) -> list[str]:
    """The names in a directory; [] if it does not exist. (`Path.glob` would hide a permission error.)"""
    try:
        return os.listdir(path)
    except FileNotFoundError:
        return []
    except OSError as error:
        raise explain_os_error(error, "read", path) from error


class ControlDirectory:
    """Paths of one run's control directory, and its identity."""

    def __init__(self, path: Path, record: RunRecord) -> None:
        self.path = path
        self.run_id = record.run
        self.journal = path / "journal"
        self.lease = path / "lease"
        self.attempts = path / "attempts"
        self.standing = path / "standing"

    def attempt(self, number: int) -> Path:
        return self.attempts / f"{number:06d}"

    @classmethod
    def open(cls, path: Path) -> ControlDirectory:
        """Open an existing run; an error if there is none."""
        path = Path(path).absolute()
        record = read_record(path / RUN_RECORD, RunRecord)
        if record is None:
            raise ControlError(f"{path} is not a run directory: it has no run.json. Check the path")
        if not 1 <= record.format <= CONTROL_FORMAT:
            raise ControlError(
                f"{path / RUN_RECORD} has format {record.format}; this release reads 1 to {CONTROL_FORMAT}. "
                "Use the release that made it, or a newer one"
            )
        return cls(path, record)

    @classmethod
    def open_or_create(cls, path: Path) -> tuple[ControlDirectory, bool]:
        """Open a run, creating it first if the directory holds none; whether this call created it."""
        path = Path(path).absolute()
        if read_record(path / RUN_RECORD, RunRecord) is not None:
            return cls.open(path), False
        record = RunRecord(format=CONTROL_FORMAT, run=uuid.uuid4().hex[:12], created=time.time())
        created = create_record(path / RUN_RECORD, record)
        return cls.open(path), created

    def set_room_aside(self) -> None:
        """Reserve a little room, to record the end of a run in even if the disk is full by then."""
        path = self.path / RESERVE
        with contextlib.suppress(OSError):
            room = os.statvfs(self.path)
            if room.f_bavail * room.f_frsize < ROOM_FOR_RESERVE or path.exists():
                return
            part = path.with_name(f".{RESERVE}.{os.getpid()}")
            try:
                with part.open("wb") as file:
                    os.posix_fallocate(file.fileno(), 0, RESERVE_BYTES)
                part.rename(path)
            finally:
                part.unlink(missing_ok=True)

    def give_room_up(self) -> None:
        """Free the reserved room: the disk is full, and whoever filled it is gone or has ended. What is left
        to write has room again."""
        with contextlib.suppress(OSError):
            (self.path / RESERVE).unlink(missing_ok=True)


# Append-only records that any process may add to, without a lease: `<folder>/<number>-<word>.json`.
#
# Guarantee: a record is created once, whole and durably, and never changed or removed. The file's name alone
# says what the record is (its word), so one whose contents are damaged still counts for what it is. Writers
# on several nodes need not know of each other: if two take the same number with different words, both records
# stand, and the reader decides which of them counts.


R = TypeVar("R", bound=msgspec.Struct)

_NAME = re.compile(r"([0-9]{6,18})-(.*)\.json")


class RecordEntry(NamedTuple):
    number: int
    """0 if the name does not tell: such a record may be the newest."""
    word: str
    path: Path


def append(folder: Path, word: str, record: msgspec.Struct) -> int:
    """Add a record after all existing ones; returns its number."""
    number = max((entry.number for entry in entries(folder)), default=0) + 1
    while not create_record(folder / f"{number:06d}-{word}.json", record):
        number += 1  # somebody else has just taken it, or a network file system's listing is old
    return number


def entries(folder: Path) -> list[RecordEntry]:
    """The existing records, in the order of their numbers."""
    found: list[RecordEntry] = []
    for name in list_names(folder):
        if match := _NAME.fullmatch(name):
            found.append(RecordEntry(int(match[1]), match[2], folder / name))
        elif name.endswith(".json") and not name.startswith("."):
            found.append(RecordEntry(0, "", folder / name))
    return sorted(found)


def contents(entry: RecordEntry, kind: type[R]) -> R | None:
    """What a record says; None if that cannot be read. Its name counts for as much as before even then."""
    try:
        return read_record(entry.path, kind)
    except ControlError:
        return None
