"""Durable file operations.

Guarantee: a file made by these functions is either absent, or complete and on disk, also after a power
cut. Everything is written beside its destination, flushed, fsynced, moved into place in one step, and
the directory that now names it is fsynced last. Nothing here ever rewrites a file in place.
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat
import uuid
from pathlib import Path

from holdfast.errors import ControlError


def fsync_dir(path: Path) -> None:
    """Make the names in `path` durable (POSIX: fsyncing a file does not make its name durable)."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def write_durable(path: Path, data: bytes) -> None:
    """Write a new file and fsync it; the caller makes its name durable. Refuses to overwrite."""
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
    try:
        view = memoryview(data)
        while view:
            view = view[os.write(fd, view) :]
        os.fsync(fd)
    finally:
        os.close(fd)


def _beside(path: Path) -> Path:
    return path.with_name(f".{path.name}.{uuid.uuid4().hex[:12]}.tmp")


def replace_atomic(path: Path, data: bytes) -> None:
    """Give `path` new contents in one step; a reader sees the old ones or the new ones."""
    temporary = _beside(path)
    try:
        write_durable(temporary, data)
        os.replace(temporary, path)
    except BaseException:
        with contextlib.suppress(OSError):
            temporary.unlink()
        raise
    fsync_dir(path.parent)


def create_exclusive(path: Path, data: bytes) -> bool:
    """Create `path` complete, or return False if it exists. Among racing callers exactly one wins.

    Uses link(2), which is atomic on local file systems and NFS alike and never shows a partial file.
    """
    temporary = _beside(path)
    write_durable(temporary, data)
    try:
        os.link(temporary, path)
    except FileExistsError:
        return False
    except OSError as error:
        if error.errno not in (errno.EPERM, errno.ENOTSUP, errno.EMLINK):
            raise
        # No hard links here (some FUSE and FAT file systems): O_EXCL still lets exactly one caller win.
        try:
            write_durable(path, data)
        except FileExistsError:
            return False
    finally:
        temporary.unlink(missing_ok=True)
    fsync_dir(path.parent)
    return True


def make_dirs(path: Path) -> None:
    """Create a directory and its parents, each made durable in its own parent."""
    missing: list[Path] = []
    current = path
    while not current.exists():
        missing.append(current)
        current = current.parent
    for directory in reversed(missing):
        directory.mkdir(exist_ok=True)
        fsync_dir(directory.parent)
    if not path.is_dir():
        raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), str(path))


def read_regular(path: Path, limit: int) -> bytes:
    """Read a regular file of at most `limit` bytes; symlinks, devices and larger files are refused."""
    fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK)
    try:
        info = os.fstat(fd)
        if not stat.S_ISREG(info.st_mode):
            raise OSError(errno.EINVAL, "not a regular file", str(path))
        if info.st_size > limit:
            raise OSError(errno.EFBIG, f"{info.st_size} bytes, more than the {limit} allowed", str(path))
        with os.fdopen(os.dup(fd), "rb") as file:
            return file.read(limit + 1)[:limit]
    finally:
        os.close(fd)


def explain_os_error(error: OSError, what: str, path: Path) -> ControlError:
    """One wording for every file-system error on the control directory."""
    return ControlError(f"cannot {what} {path}: {error.strerror or error}")
