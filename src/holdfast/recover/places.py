"""Trying the directories that a run lies in, before anything is read from them.

Guarantee: never longer than its deadline. A file system whose server is gone makes whoever only looks at it
wait for ever; what is on it can then neither be read nor chosen, and that is said instead.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TypeVar

import msgspec

from holdfast.bounded import Bounded
from holdfast.checkpoint.identity import CheckpointRoot
from holdfast.checkpoint.resolution import Resolution
from holdfast.checkpoint.storage_probe import SIZE
from holdfast.errors import ControlError
from holdfast.exit_codes import ExitCode
from holdfast.health.storage import try_storage
from holdfast.journal.text import printable
from holdfast.policy.readiness import StorageFacts

SECONDS = 60.0
"""That a file system has to answer: an fsync may wait behind a checkpoint that is being written."""

T = TypeVar("T")


class Place(msgspec.Struct, frozen=True, kw_only=True):
    """A directory, and what trying it showed."""

    path: Path
    there: bool = False
    marked: bool | None = None
    """Whether it carries the mark of a checkpoint root; None if that could not be seen."""
    hangs: bool = False
    problem: str = ""
    """Why it does not take and give back what is written; empty if it does, or is not there."""
    free: int | None = None


def try_places(*paths: Path) -> list[Place]:
    """Each of them, at the same time."""
    deadline = time.monotonic() + SECONDS
    trying = [(path, Bounded(partial(_try, path), "place")) for path in paths]
    return [
        one.result()
        if one.ended(deadline - time.monotonic())
        else Place(path=path, hangs=True, problem=_hangs())
        for path, one in trying
    ]


def _try(path: Path) -> Place:
    try:
        if not path.is_dir():
            return Place(path=path)
        marked = CheckpointRoot(path).marker.exists()
        info = os.statvfs(path)
    except OSError as error:
        return Place(path=path, there=True, problem=f"cannot be looked at: {error.strerror or error}")
    problem = printable(try_storage(path, SIZE).problem, 1000)
    free = info.f_bavail * info.f_frsize
    return Place(path=path, there=True, marked=marked, problem=problem, free=free)


def _hangs() -> str:
    return f"no answer within {SECONDS:g} s: its file system hangs"


def looked_at(path: Path, look: Callable[[], T]) -> T:
    """What looking at a path tells; ControlError if its file system hangs."""
    looking = Bounded(look, "place")
    if looking.ended(SECONDS):
        return looking.result()
    raise ControlError(f"{path}: {_hangs()}. Look at its server and the mount, then try again")


def storage_facts(
    memory: Place, root: Place, found: Resolution | None, *, begun: bool = False
) -> list[StorageFacts]:
    """As the runbook judges it: the checkpoints' place, unless nobody ever began with one, and the run's.

    `begun`: a rank has begun, so the root was there, and marked.
    """
    own = StorageFacts(
        place=str(memory.path),
        what="the run's memory",
        problem=memory.problem,
        free=memory.free,
        code=int(ExitCode.CONTROL_UNUSABLE),
    )
    kept = found.candidates if found is not None else []
    if not root.there and not root.hangs and not kept and not begun:
        return [own]  # a start creates it
    problem = root.problem
    if not root.hangs and not root.there:
        problem = "there is no such directory; is its file system mounted?"
    elif (kept or begun) and root.marked is False:
        problem = "is not the directory that they were saved to; is its file system mounted?"
    needed = max((row.bytes for row in kept), default=0)
    checkpoints = StorageFacts(
        place=str(root.path), what="the checkpoints", problem=problem, free=root.free, needed=needed
    )
    return [checkpoints, own]
