"""Keeps a checkpoint from being deleted while somebody who does not hold the run's lease reads it.

A reader holds a shared lock on the checkpoint's directory, a deletion an exclusive one. A deletion never
waits for a reader; a reader waits a moment for a deletion under way, which is only a rename. As good as the
file system's locks: where there are none, both go ahead.

Whoever lists checkpoints and reads them later holds no lock in between, and a live run deletes what its
retention gives up. So what is gone when it is read is no fault: `gone_since` says whether it was taken away
on purpose, by the record that a deletion leaves before it begins. What has no such record was lost.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import time
from collections.abc import Iterator
from pathlib import Path

from holdfast.checkpoint.identity import parse_name
from holdfast.control.directory import ControlDirectory
from holdfast.control.lineage import find_deleted
from holdfast.errors import ControlError
from holdfast.files import OpenFile
from holdfast.journal.text import printable

log = logging.getLogger("holdfast.checkpoint")

DELETION_WAIT = 2.0
"""Seconds that a reader gives a deletion which is under way; a rename, unless storage hangs."""
DELETION_POLL = 0.01


@contextlib.contextmanager
def reading(directory: Path) -> Iterator[bool]:
    """Read in peace: a deletion that comes meanwhile is put off. False: nothing is there any more."""
    deadline = time.monotonic() + DELETION_WAIT
    while True:
        with _locked(directory, fcntl.LOCK_SH) as free:
            if free or time.monotonic() >= deadline:
                # What was opened may have been taken away before it was locked.
                yield not is_gone(directory)
                return
        time.sleep(DELETION_POLL)


@contextlib.contextmanager
def unread(directory: Path) -> Iterator[bool]:
    """Whether nobody is known to read a checkpoint; nobody begins to while this is held."""
    with _locked(directory, fcntl.LOCK_EX) as free:
        yield free


@contextlib.contextmanager
def _locked(directory: Path, how: int) -> Iterator[bool]:
    """Hold a lock on a directory, without waiting; False if another lock stands against it."""
    try:
        descriptor = OpenFile(directory, os.O_RDONLY | os.O_DIRECTORY)
    except OSError:
        yield True  # whoever wants the lock meets the same error next, and says more about it
        return
    with descriptor:
        free = True
        try:
            fcntl.flock(descriptor.number, how | fcntl.LOCK_NB)
        except BlockingIOError:
            free = False
        except OSError as error:
            log.debug("holdfast: %s cannot be locked: %s", directory, error)
        yield free


# --- what is gone -------------------------------------------------------------------------------------------


def is_gone(directory: Path) -> bool:
    """Whether there is nothing of that name; storage that does not answer says nothing about that."""
    try:
        directory.stat()
    except FileNotFoundError:
        return True
    except OSError:
        return False
    return False


def gone_since(directory: Path, control: ControlDirectory | None) -> str:
    """Why a checkpoint that was listed is gone without fault, in words; empty if it is there, or was lost.

    Without the run's control directory nobody can tell one from the other, and it gets the benefit of that.
    """
    if not is_gone(directory):
        return ""
    control = control or _run_of(directory)
    return removed(directory, control) if control is not None else "it is gone since it was listed"


def removed(directory: Path, control: ControlDirectory | None = None) -> str:
    """When and why retention took away a checkpoint that is gone, in words; empty if nothing tells."""
    name, control = parse_name(directory.name), control or _run_of(directory)
    if name is None or control is None or not is_gone(directory):
        return ""
    found = find_deleted(control, name.step, name.id)
    return f"deleted {found.describe()}" if found is not None else ""


def no_such(directory: Path, control: ControlDirectory | None = None) -> str:
    """What to tell whoever named a directory that is not there."""
    if why := removed(directory, control):
        return f"{printable(str(directory), 4096)}: this checkpoint is not there any more: {why}"
    return f"{printable(str(directory), 4096)}: there is no such directory"


def _run_of(directory: Path) -> ControlDirectory | None:
    """The run whose directory holds the root that a checkpoint lies or lay in; None if it is elsewhere."""
    path = directory.absolute().parent.parent
    try:
        return ControlDirectory.open(path) if (path / "run.json").is_file() else None
    except (OSError, ControlError):
        return None
