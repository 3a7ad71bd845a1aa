"""Trying a directory's storage: does it take what is written, keep it, move it and give it back?

Guarantee: nothing is left behind, also where a step of it fails, as long as the storage lets a file be
removed at all; and no file of anybody else is touched. What hangs is the caller's to leave (`result.py`).
"""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec
import xxhash

from holdfast.files import fsync_dir
from holdfast.policy.health import CheckResult, Status, judge_storage

SMALL = 64 * 1024
"""Enough for a network file system to have to send it, too little to be a load."""
PREFIX = ".holdfast-probe."


class Tried(msgspec.Struct, frozen=True, kw_only=True):
    """What came of it."""

    problem: str = ""
    """Empty if it takes and gives back what is written."""
    errno: int | None = None
    """Of the system's error that it met."""
    seconds: float = 0.0
    slowest: str = ""
    """The step that took longest."""
    skew: float | None = None
    """Seconds by which this machine's clock is ahead of the clock that the storage stamps files with."""
    uncertain: float = 0.0
    """How far off that may be."""


def try_storage(directory: Path, size: int = SMALL) -> Tried:
    """Write, fsync, rename, fsync the directory, read back from the disk and not from memory, compare."""
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
        return Tried(
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
        return Tried(problem=problem, seconds=seconds)
    slowest = max(took, key=lambda name: took[name])
    # The stamp lies between the two looks at our own clock; some file systems round it to a whole second.
    middle, half = (before + after) / 2, (after - before) / 2
    rounding = 1.0 if stamp == int(stamp) else 0.01
    return Tried(seconds=seconds, slowest=slowest, skew=middle - stamp, uncertain=half + rounding)


def _fsync_dir(directory: Path) -> None:
    try:
        fsync_dir(directory)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):  # some network file systems have no such thing
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
    """Try a directory out. One that is not there yet is not made: then its parent must allow making it."""
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
        name=f"storage of {what}", status=Status.OK, found=f"{directory} is not there yet, and can be made"
    )
