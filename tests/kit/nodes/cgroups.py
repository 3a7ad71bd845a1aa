"""A control group of the kernel's with a limit of its own, for what only a real limit shows."""

from __future__ import annotations

import contextlib
import os
import shlex
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

MOUNTED = Path("/sys/fs/cgroup")
LIMITS = ("memory.limit_in_bytes", "memory.max")
"""Of the first version of cgroups, and of the second."""
EMPTY = 10.0
"""Seconds for the last process to leave a group."""


@contextlib.contextmanager
def memory_group() -> Iterator[Path]:
    """A new group whose memory can be limited; skips the test, with the reason, where none can be made."""
    why = []
    for parent in _parents():
        place = parent / f"holdfast-{os.getpid()}-{time.monotonic_ns()}"
        try:
            place.mkdir()
        except OSError as error:
            why.append(str(error))
            continue
        limit = next((place / name for name in LIMITS if os.access(place / name, os.W_OK)), None)
        if limit is None:
            place.rmdir()
            why.append(f"{parent} hands no memory controller down")
            continue
        try:
            yield place
        finally:
            _remove(place)
        return
    pytest.skip(f"NO MEMORY CGROUP: {'; '.join(why)}; kills for lack of memory are not tested")


def inside_group(group: Path, command: list[str]) -> list[str]:
    """The command line that runs the command as part of a group."""
    entered = f"echo $$ > {shlex.quote(str(group / 'cgroup.procs'))} && exec {shlex.join(command)}"
    return ["sh", "-c", entered]


def _parents() -> list[Path]:
    """Where a group might be made: below the own one, beside it, and above."""
    found: list[Path] = []
    for line in Path("/proc/self/cgroup").read_text().splitlines():
        _, controllers, group = line.split(":", 2)
        if controllers and "memory" not in controllers.split(","):
            continue
        base = MOUNTED / "memory" if controllers else MOUNTED
        own = base / group.lstrip("/")
        found += [place for place in (own, *own.parents) if place.is_relative_to(base) and place.is_dir()]
    first = [place for place in found if (place / LIMITS[0]).exists()]  # both versions may be mounted
    return [*first, *(place for place in found if place not in first)]


def _remove(group: Path) -> None:
    deadline = time.monotonic() + EMPTY
    while (group / "cgroup.procs").read_text() and time.monotonic() < deadline:
        time.sleep(0.05)
    group.rmdir()
