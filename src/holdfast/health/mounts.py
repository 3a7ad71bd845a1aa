"""What a directory is mounted from: whether it is there at all, and what is known of such file systems.

Rests on the kernel's table of mounts, and on the one of what should be mounted. Whoever asks bounds the wait:
even the name of a path on a dead file system may not be looked up in time.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

import msgspec

MOUNTS = Path("/proc/self/mountinfo")
PLANNED = Path("/etc/fstab")
_OWN = frozenset({"lost+found", ".snapshot", ".snapshots", ".zfs"})
"""What a file system has in it by itself."""
_OCTAL = re.compile(r"\\([0-7]{3})")


class Mount(msgspec.Struct, frozen=True, kw_only=True):
    point: str
    kind: str
    """As the kernel has it: ext4, nfs4, lustre, gpfs …"""
    source: str = ""
    options: list[str] = []


def mounts(table: Path = MOUNTS) -> list[Mount]:
    """Everything that is mounted, in the order in which it was; none if the kernel does not tell."""
    found = []
    for line in _lines(table):
        left, _, right = line.partition(" - ")
        fields, more = left.split(" "), right.split(" ")
        if len(fields) < 6 or len(more) < 3:
            continue
        options = [*fields[5].split(","), *more[2].split(",")]
        found.append(
            Mount(point=_plain(fields[4]), kind=more[0], source=_plain(more[1]), options=sorted(set(options)))
        )
    return found


def mount_of(path: Path, table: Path = MOUNTS) -> Mount | None:
    """What a path lies on; None if that is not known. The path need not be there."""
    where = os.path.realpath(path)  # a loop of links is no error to it
    over = [one for one in mounts(table) if _is_below(where, one.point)]
    # The longest counts, and of the same the last: it covers what was mounted there before.
    return max(enumerate(over), key=lambda one: (len(one[1].point), one[0]))[1] if over else None


def why_not_first(path: Path, *, requeued: int = 0, table: Path = MOUNTS, planned: Path = PLANNED) -> str:
    """Why a directory without a run must have held one before; empty if nothing says so.

    `requeued`: how often the scheduler has started this job again.
    """
    where = os.path.realpath(path)  # a loop of links is no error to it
    there = {one.point for one in mounts(table)}
    for point in _planned(planned):
        if there and point not in there and _is_below(where, point):
            return f"{point} should be mounted, by {planned}, and is not. Mount it, then try again"
    found = mount_of(path, table)
    if found is not None and found.point != "/" and _is_empty(Path(found.point)):
        return (
            f"{found.point} ({found.kind}, from {found.source or 'nowhere'}) is an empty mount. If it is the "
            "right one, and nothing was ever kept on it, ask for a fresh start: resume_from = 'fresh'"
        )
    if requeued:
        times = "once" if requeued == 1 else f"{requeued} times"
        return (
            f"the scheduler has started this job again {times}. Is its file system mounted? If the job had "
            "never begun, ask for a fresh start: resume_from = 'fresh'"
        )
    return ""


def _lines(table: Path) -> list[str]:
    try:
        return table.read_text(errors="replace").splitlines()
    except OSError:
        return []


def _planned(table: Path) -> list[str]:
    """Where something is mounted at every boot."""
    found = []
    for line in _lines(table):
        fields = line.split()
        if len(fields) < 4 or fields[0].startswith("#") or not fields[1].startswith("/") or fields[1] == "/":
            continue
        if "noauto" not in fields[3].split(","):
            found.append(_plain(fields[1]).rstrip("/"))
    return found


def _is_below(path: str, point: str) -> bool:
    return point == "/" or path == point or path.startswith(f"{point}/")


def _is_empty(point: Path) -> bool:
    try:
        return not set(os.listdir(point)) - _OWN
    except OSError:
        return False


def _plain(text: str) -> str:
    """A name as the kernel's tables write it: blanks are octal there."""
    return _OCTAL.sub(lambda found: chr(int(found[1], 8)), text)
