"""What a node gives a process: memory, space, shared memory, files, threads, a clock that agrees.

Each function looks at one thing and raises OSError where it cannot; nothing is judged here.
"""

from __future__ import annotations

import contextlib
import os
import resource
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from holdfast.health.storage import nearest
from holdfast.policy.health import (
    CheckResult,
    Status,
    judge_load,
    judge_memory,
    judge_open_files,
    judge_shared_memory,
    judge_space,
    judge_threads,
)

CGROUPS = Path("/sys/fs/cgroup")
OWN = Path("/proc/self/cgroup")
"""Says which of them this process is in."""
SHARED = Path("/dev/shm")
_NO_LIMIT = 1 << 60
"""What version 1 of cgroups writes for no limit is a number about that large."""


def check_memory(cgroups: Path = CGROUPS, own: Path = OWN) -> CheckResult:
    available = _available()
    found = cgroup_memory(cgroups, own)
    if found is None:
        return judge_memory(available, None)
    return judge_memory(max(0, min(available, found.limit - found.used)), found.limit)


def _available() -> int:
    for line in Path("/proc/meminfo").read_text().splitlines():
        name, _, value = line.partition(":")
        if name == "MemAvailable":
            return int(value.split()[0]) * 1024
    raise OSError("/proc/meminfo does not say how much memory is available")


class MemoryLimit(NamedTuple):
    """The tightest memory limit of the cgroups that a process is in."""

    limit: int
    used: int
    """Without what the kernel would give up."""
    group: str
    """Whose limit it is, as a path below the root of what is mounted."""


def cgroup_memory(cgroups: Path = CGROUPS, own: Path = OWN) -> MemoryLimit | None:
    found: list[MemoryLimit] = []
    for version, place in _groups("memory", cgroups, own):
        names = ("memory.max", "memory.current")
        if version == 1:
            names = ("memory.limit_in_bytes", "memory.usage_in_bytes")
        limit, used = (_number(place / name) for name in names)
        if limit is not None and used is not None and limit < _NO_LIMIT:
            group = f"/{place.relative_to(cgroups if version == 2 else cgroups / 'memory')}"
            named = "/" if group == "/." else group
            found.append(MemoryLimit(limit, max(0, used - _reclaimable(place)), named))
    return min(found, key=lambda one: one.limit - one.used, default=None)


def _groups(controller: str, cgroups: Path, own: Path) -> Iterator[tuple[int, Path]]:
    """(cgroups' version, directory) of the cgroups that this process is in: a limit above it holds too."""
    try:
        lines = own.read_text().splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, group = line.split(":", 2)
        if controllers == "":
            version, base = 2, cgroups
        elif controller in controllers.split(","):
            version, base = 1, cgroups / controller
        else:
            continue
        folder = base / group.lstrip("/")
        for place in (folder, *folder.parents):
            if not place.is_relative_to(base):
                break
            yield version, place


def _reclaimable(group: Path) -> int:
    """Bytes of files that the kernel keeps in memory and gives up when somebody needs it.

    Most of what a job that reads its data again and again seems to use is that.
    """
    try:
        pairs = (line.split() for line in (group / "memory.stat").read_text().splitlines())
        told = {name: int(value) for name, value in pairs}
    except (OSError, ValueError):
        return 0
    # Version 1 has both, and only the second counts what is below the group.
    return sum(told.get(f"total_{name}", told.get(name, 0)) for name in ("inactive_file", "active_file"))


def _number(path: Path) -> int | None:
    try:
        return int(path.read_text())
    except (OSError, ValueError):  # "max"
        return None


def check_space(directory: Path, what: str) -> CheckResult:
    place = nearest(directory)
    info = os.statvfs(place)
    inodes = info.f_favail if info.f_files else None
    return judge_space(what, str(place), info.f_bavail * info.f_frsize, inodes)


def check_shared_memory(shared: Path = SHARED) -> CheckResult:
    if not shared.is_dir():
        return CheckResult(
            name="shared memory",
            status=Status.WARNING,
            found=f"there is no {shared}",
            fix="mount a tmpfs there: data loaders and asynchronous saves need it",
        )
    info = os.statvfs(shared)
    return judge_shared_memory(info.f_blocks * info.f_frsize, info.f_bavail * info.f_frsize)


def check_open_files() -> CheckResult:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    return judge_open_files(*(-1 if one == resource.RLIM_INFINITY else one for one in (soft, hard)))


def check_threads(cgroups: Path = CGROUPS, own: Path = OWN) -> CheckResult:
    """The tightest of the limits of its cgroups and of its user, where each counts."""
    found: list[tuple[int, int, str]] = []
    for _, place in _groups("pids", cgroups, own):
        limit, used = _number(place / "pids.max"), _number(place / "pids.current")
        if limit is not None and used is not None:
            found.append((limit, used, "this container or job"))
    soft, _ = resource.getrlimit(resource.RLIMIT_NPROC)
    if soft != resource.RLIM_INFINITY and os.geteuid() != 0:  # root is not held to it
        found.append((soft, _threads_of(os.geteuid()), "this user"))
    if not found:
        return judge_threads(0, None, "")
    limit, used, whose = min(found, key=lambda one: one[0] - one[1])
    return judge_threads(used, limit, whose)


def _threads_of(user: int) -> int:
    count = 0
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError):  # it may end while we look
                if entry.stat().st_uid == user:
                    count += len(os.listdir(entry / "task"))
    return count


def check_load() -> CheckResult:
    return judge_load(os.getloadavg()[0], len(os.sched_getaffinity(0)))


def check_node(directories: Sequence[tuple[str, Path]] = ()) -> list[CheckResult]:
    """All of it, for use alone; `directories`: name → where space is needed."""
    found = [check_memory(), check_shared_memory(), check_open_files(), check_threads(), check_load()]
    return found + [check_space(path, what) for what, path in directories]
