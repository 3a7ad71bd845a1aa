"""Keeps a checkpoint from being deleted while somebody who does not hold the run's lease reads it.

A reader holds a shared lock on the checkpoint's directory, a deletion an exclusive one; neither waits for the
other. As good as the file system's locks: where there are none, both go ahead.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
from collections.abc import Iterator
from pathlib import Path

from holdfast.open_file import OpenFile

log = logging.getLogger("holdfast.checkpoint")


@contextlib.contextmanager
def reading(directory: Path) -> Iterator[None]:
    """Read in peace: a deletion that comes meanwhile is put off."""
    with _locked(directory, fcntl.LOCK_SH):
        yield


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
