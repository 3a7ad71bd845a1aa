"""What a node gives a process: memory, files, threads, a clock that agrees, storage that keeps its data.

Each function looks at one thing, and raises OSError if it cannot. Nothing is judged here.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import resource
import secrets
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec
import xxhash

from holdfast.base import fsync_dir
from holdfast.health.judgements import (
    CheckResult,
    HealthStatus,
    judge_load,
    judge_memory,
    judge_open_files,
    judge_shared_memory,
    judge_space,
    judge_storage,
    judge_threads,
)
from holdfast.process import proc

# What a directory is mounted from: whether that is there at all, and which kind of file system it is.
#
# Read from the kernel's table of mounts, and from the table of what should be mounted. The caller bounds the
# wait: on a dead file system even looking up a name may hang.


MOUNTS = Path("/proc/self/mountinfo")
PLANNED = Path("/etc/fstab")
_OWN = frozenset({"lost+found", ".snapshot", ".snapshots", ".zfs"})
"""What an empty file system contains."""
_OCTAL = re.compile(r"\\([0-7]{3})")


class Mount(msgspec.Struct, frozen=True, kw_only=True):
    point: str
    kind: str
    """As the kernel calls it: ext4, nfs4, lustre, gpfs …"""
    source: str = ""
    options: list[str] = []


def mounts(table: Path = MOUNTS) -> list[Mount]:
    """Everything that is mounted, in the order of mounting; nothing if the kernel does not tell."""
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
    """The mount that a path lies on; None if that is not known. The path need not exist."""
    where = os.path.realpath(path)  # a loop of links is no error to it
    over = [one for one in mounts(table) if _is_below(where, one.point)]
    # The longest mount point counts, and of equal ones the last: it hides what was mounted there before.
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
    """A name from the kernel's tables, where blanks are written in octal."""
    return _OCTAL.sub(lambda found: chr(int(found[1], 8)), text)


# Trying a directory's storage: does it accept what is written, keep it, move it and give it back?
#
# Guarantee: nothing is left behind, even if a step fails, as long as the storage lets a file be removed at
# all; and nobody else's file is touched. It is for the caller to walk away from a hang (`trials.py`).


SMALL = 64 * 1024
"""Bytes: enough that a network file system has to send them, too few to be a load."""
PREFIX = ".holdfast-probe."


class TryOutcome(msgspec.Struct, frozen=True, kw_only=True):
    """What came of the trial."""

    problem: str = ""
    """Empty if the storage accepts and returns what is written."""
    errno: int | None = None
    """Number of the system error, if there was one."""
    seconds: float = 0.0
    slowest: str = ""
    """The step that took longest."""
    skew: float | None = None
    """Seconds by which this machine's clock is ahead of the clock that the storage stamps files with."""
    uncertain: float = 0.0
    """How far off that may be."""


def try_storage(directory: Path, size: int = SMALL) -> TryOutcome:
    """Write, fsync, rename, fsync the directory, read back (from the disk, not from memory) and compare."""
    path = directory / f"{PREFIX}{os.getpid()}.{secrets.token_hex(4)}"
    moved = path.with_suffix(".moved")
    data = secrets.token_bytes(size)
    took: dict[str, float] = {}
    began = time.monotonic()
    before = time.time()
    step = "write"
    try:
        with _timed(took, "write"), path.open("xb") as file:
            file.write(data)
            file.flush()
            stamp, after = os.fstat(file.fileno()).st_mtime, time.time()
            step = "fsync"
            with _timed(took, "fsync"):
                os.fsync(file.fileno())
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        step = "rename"
        with _timed(took, "rename"):
            os.rename(path, moved)
        step = "fsync the directory"
        with _timed(took, "fsync the directory"):
            _fsync_dir(directory)
        step = "read back"
        with _timed(took, "read back"):
            found = moved.read_bytes()
    except OSError as error:
        where = error.filename or path
        return TryOutcome(
            problem=f"cannot {step}: {error.strerror or error} ({where})",
            errno=error.errno,
            seconds=time.monotonic() - began,
        )
    finally:
        for left in (path, moved):
            with contextlib.suppress(OSError):
                left.unlink()
    seconds = time.monotonic() - began
    if found != data:
        expected, got = (xxhash.xxh3_128_hexdigest(part) for part in (data, found))
        problem = f"{size} bytes with digest {expected} were written and read back as {len(found)} with {got}"
        return TryOutcome(problem=problem, seconds=seconds)
    slowest = max(took, key=lambda name: took[name])
    # The stamp lies between the two looks at our own clock; some file systems round it to a whole second.
    middle, half = (before + after) / 2, (after - before) / 2
    rounding = 1.0 if stamp == int(stamp) else 0.01
    return TryOutcome(seconds=seconds, slowest=slowest, skew=middle - stamp, uncertain=half + rounding)


def _fsync_dir(directory: Path) -> None:
    try:
        fsync_dir(directory)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):  # some network file systems cannot do that
            raise


@contextlib.contextmanager
def _timed(took: dict[str, float], name: str) -> Iterator[None]:
    began = time.monotonic()
    yield
    took[name] = time.monotonic() - began


def nearest(path: Path) -> Path:
    """The directory itself, or the nearest one above it that exists."""
    path = path.absolute()
    while not path.exists() and path != path.parent:
        path = path.parent
    return path


def check_storage(directory: str | os.PathLike[str], what: str = "", size: int = SMALL) -> CheckResult:
    """Try a directory out. If it does not exist yet, it is not made, but its parent must allow making it."""
    directory = Path(directory).absolute()
    what = what or str(directory)
    if directory.is_dir():
        tried = try_storage(directory, size)
        return judge_storage(what, str(directory), tried.problem, tried.seconds, tried.slowest)
    above = nearest(directory)
    if directory.exists() or not above.is_dir():
        return judge_storage(what, str(directory), f"{above} is not a directory", 0.0)
    if not os.access(above, os.W_OK | os.X_OK):
        return judge_storage(what, str(directory), f"it is not there, and {above} cannot be written", 0.0)
    return CheckResult(
        name=f"storage of {what}",
        status=HealthStatus.OK,
        found=f"{directory} is not there yet, and can be made",
    )


CGROUPS = Path("/sys/fs/cgroup")
OWN = Path("/proc/self/cgroup")
"""Says which cgroups this process is in."""
SHARED = Path("/dev/shm")
_NO_LIMIT = 1 << 60
"""Version 1 of cgroups writes a number about this large for "no limit"."""


def check_memory(cgroups: Path = CGROUPS, own: Path = OWN) -> CheckResult:
    available = proc.memory_available()
    found = cgroup_memory(cgroups, own)
    if found is None:
        return judge_memory(available, None)
    return judge_memory(max(0, min(available, found.limit - found.used)), found.limit)


class MemoryLimit(NamedTuple):
    """The tightest memory limit of the cgroups that a process is in."""

    limit: int
    used: int
    """Bytes in use, without what the kernel would give up."""
    group: str
    """The cgroup with this limit, as a path below the mounted root."""


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
    """(cgroups' version, directory) of the cgroups that this process is in: a limit further up holds too."""
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
    """Bytes of files that the kernel keeps in memory and gives up when memory is needed.

    In a job that reads its data again and again, they are most of the memory that seems to be in use.
    """
    try:
        pairs = (line.split() for line in (group / "memory.stat").read_text().splitlines())
        told = {name: int(value) for name, value in pairs}
    except (OSError, ValueError):
        return 0
    # Version 1 has both, and only the second includes the groups below.
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
            status=HealthStatus.WARNING,
            found=f"there is no {shared}",
            fix="mount a tmpfs there: data loaders and asynchronous saves need it",
        )
    info = os.statvfs(shared)
    return judge_shared_memory(info.f_blocks * info.f_frsize, info.f_bavail * info.f_frsize)


def check_open_files() -> CheckResult:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    return judge_open_files(*(-1 if one == resource.RLIM_INFINITY else one for one in (soft, hard)))


def check_threads(cgroups: Path = CGROUPS, own: Path = OWN) -> CheckResult:
    """The tightest of the limits of this process's cgroups and of its user."""
    found: list[tuple[int, int, str]] = []
    for _, place in _groups("pids", cgroups, own):
        limit, used = _number(place / "pids.max"), _number(place / "pids.current")
        if limit is not None and used is not None:
            found.append((limit, used, "this container or job"))
    soft, _ = resource.getrlimit(resource.RLIMIT_NPROC)
    if soft != resource.RLIM_INFINITY and os.geteuid() != 0:  # it does not apply to root
        found.append((soft, proc.threads_of(os.geteuid()), "this user"))
    if not found:
        return judge_threads(0, None, "")
    limit, used, whose = min(found, key=lambda one: one[0] - one[1])
    return judge_threads(used, limit, whose)


def check_load() -> CheckResult:
    return judge_load(os.getloadavg()[0], len(os.sched_getaffinity(0)))


def check_node(directories: Sequence[tuple[str, Path]] = ()) -> list[CheckResult]:
    """All of these checks, for use on its own. `directories`: name → where space is needed."""
    found = [check_memory(), check_shared_memory(), check_open_files(), check_threads(), check_load()]
    return found + [check_space(path, what) for what, path in directories]
