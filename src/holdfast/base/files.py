"""Durable file operations, and removing what is ours beneath a directory and nothing else.

Guarantee: a file made by these functions is either absent, or complete and on disk, also after a power
cut. Everything is written beside its destination, flushed, fsynced, moved into place in one step, and
the directory that now names it is fsynced last. A call that fails leaves nothing behind. (A process killed in
the middle may leave one hidden `.<name>.<hex>.tmp`, which every reader ignores.)

`overwrite` alone rewrites a file in place, for a sign of life that must get through on a full disk too.
`OpenFile` is an open file that no interruption leaks.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import shutil
import stat
import uuid
from pathlib import Path
from typing import Self

from holdfast.base.scope import critical
from holdfast.errors import ControlError, StorageError, UsageError

_NO_LINKS = (errno.EPERM, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS)


class OpenFile:
    """An open file. It is closed at the end of its `with`, or else with its last reference, come what may.

    At no moment between the opening and the point where somebody is responsible for closing can an
    interruption (see scope.py) lose the descriptor. A plain number could be lost there, and the open file,
    with the locks on it, would be kept for as long as the process lives.
    """

    def __init__(self, path: Path | str, flags: int, *, beneath: OpenFile | None = None) -> None:
        self.number = -1
        with critical():  # an interruption at its end finds an object that knows what to close
            where = beneath.number if beneath is not None else None
            self.number = os.open(path, flags | os.O_CLOEXEC, dir_fd=where)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __del__(self) -> None:
        self.close()

    def close(self) -> None:
        """May be called twice."""
        number, self.number = self.number, -1
        if number >= 0:
            os.close(number)


def fsync_dir(path: Path) -> None:
    """Make the names in `path` durable (POSIX: fsyncing a file does not make its name durable)."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def _write_new(path: Path, data: bytes, *, durable: bool, mode: int = 0o644) -> None:
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, mode)
    try:
        try:
            view = memoryview(data)
            while view:
                view = view[os.write(fd, view) :]
            if durable:
                os.fsync(fd)
        finally:
            os.close(fd)  # may fail too: network file systems report a full disk here
    except OSError as error:
        error.filename = error.filename or str(path)
        _discard(path)
        raise
    except BaseException:
        _discard(path)
        raise


def write_durable(path: Path, data: bytes) -> None:
    """Write a new file and fsync it; the caller makes its name durable. Refuses to overwrite.

    The file is visible while it is being written; if that fails it is removed.
    """
    _write_new(path, data, durable=True)


def _beside(path: Path) -> Path:
    return path.with_name(f".{path.name}.{uuid.uuid4().hex[:12]}.tmp")


def _discard(path: Path) -> None:
    with contextlib.suppress(OSError):
        path.unlink()


def replace_atomic(path: Path, data: bytes, *, durable: bool = True, mode: int = 0o644) -> None:
    """Give `path` new contents in one step; a reader sees the old ones or the new ones.

    `durable=False` leaves out both fsyncs, for mere signs of life: an fsync can wait many seconds behind a
    checkpoint that is being written to the same disk.
    """
    temporary = _beside(path)
    try:
        _write_new(temporary, data, durable=durable, mode=mode)
        os.replace(temporary, path)
    except BaseException:
        _discard(temporary)
        raise
    if durable:
        fsync_dir(path.parent)


def overwrite(path: Path, data: bytes) -> None:
    """Give a small file, whose size never changes, new contents in place, without a new file or new space.

    Not durable, and a reader may see a mixture. Closing the file each time is what makes a network file
    system show it to other machines. A file that is missing, or of another size, is created.
    """
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK, 0o644)
    try:
        try:
            fresh = os.fstat(fd).st_size != len(data)
            if fresh:
                os.ftruncate(fd, 0)
            written = os.pwrite(fd, data, 0)
            if written != len(data):
                raise OSError(errno.ENOSPC, f"wrote {written} of {len(data)} bytes")
            if fresh:
                os.fsync(fd)  # its block exists from now on, and is not only promised
        finally:
            os.close(fd)
    except OSError as error:
        error.filename = error.filename or str(path)
        raise


def create_exclusive(path: Path, data: bytes, *, mode: int = 0o644) -> bool:
    """Create `path` complete, or return False if it exists. Among racing callers exactly one wins.

    Uses link(2), which is atomic on local file systems and NFS alike and never shows a partial file. A
    file system without hard links is refused: no other way of creating a file gives both.
    """
    temporary = _beside(path)
    try:
        _write_new(temporary, data, durable=True, mode=mode)
        try:
            os.link(temporary, path)
        except OSError as error:
            # NFS: a reply that was lost makes the client repeat a link that has already succeeded.
            if not _same_file(temporary, path):
                if isinstance(error, FileExistsError):
                    return False
                if error.errno in _NO_LINKS:
                    raise OSError(
                        error.errno, "the file system has no hard links, which are needed here", str(path)
                    ) from error
                raise
    finally:
        _discard(temporary)
    fsync_dir(path.parent)
    return True


def _same_file(one: Path, other: Path) -> bool:
    try:
        return os.path.samestat(os.lstat(one), os.lstat(other))
    except OSError:
        return False


def make_dirs(path: Path) -> None:
    """Create a directory and its parents, each made durable in its own parent."""
    missing: list[Path] = []
    current = path
    while not current.exists():
        missing.append(current)
        current = current.parent
    # Whoever made `current` may have died before making its name durable, and everything below depends on it.
    # The parent of a directory that somebody else gave us may be closed to us; then it is theirs to sync.
    with contextlib.suppress(PermissionError):
        fsync_dir(current.parent)
    for directory in reversed(missing):
        directory.mkdir(exist_ok=True)
        fsync_dir(directory.parent)
    if not path.is_dir():
        raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), str(path))


def read_regular(path: Path, limit: int) -> bytes:
    """Read a regular file of at most `limit` bytes; symlinks, devices and larger files are refused."""
    try:
        return _read_regular(path, limit)
    except OSError as error:
        if error.errno != errno.ESTALE:
            raise
    # NFS: the file was replaced from another node between the look-up and the read. Look it up again.
    return _read_regular(path, limit)


def _read_regular(path: Path, limit: int) -> bytes:
    try:
        # O_NONBLOCK: opening a FIFO would otherwise wait for its writer.
        file = OpenFile(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise OSError(errno.ELOOP, "a symbolic link, not a regular file", str(path)) from error
        raise
    with file:
        info = os.fstat(file.number)
        if not stat.S_ISREG(info.st_mode):
            raise OSError(errno.EINVAL, "not a regular file", str(path))
        if info.st_size > limit:
            raise OSError(errno.EFBIG, f"{info.st_size} bytes, more than the {limit} allowed", str(path))
        with open(file.number, "rb", closefd=False) as stream:
            # Not `limit` at once: so much memory would be asked for, however small the file is.
            data = stream.read(min(limit, info.st_size) + 1)
            while len(data) <= limit and (more := stream.read(min(1 << 20, limit + 1 - len(data)))):
                data += more  # it has grown meanwhile
    if len(data) > limit:
        raise OSError(errno.EFBIG, f"more than the {limit} bytes allowed", str(path))
    return data


MARKED_WITHIN = 4096
"""How many bytes at the beginning of an output are searched for its mark."""


def check_output(path: Path, *, mark: str = "", overwrite: bool = False, option: str = "--overwrite") -> None:
    """Refuse to replace anything but a regular file, and, unless asked to, a file that is not ours.

    `mark`: what an earlier output of the same kind has at its beginning; such a file may be replaced.
    """
    try:
        kind = path.lstat().st_mode
    except FileNotFoundError:
        _check_folder(path)
        return
    except OSError as error:
        raise UsageError(f"cannot write {path}: {error.strerror or error}; choose another place") from error
    if not stat.S_ISREG(kind):
        what = _KINDS.get(stat.S_IFMT(kind), "no regular file")
        raise UsageError(f"refused to replace {path}: it is {what}; give the name of a file to write")
    if overwrite:
        return
    try:
        with OpenFile(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK) as file:
            found = os.read(file.number, MARKED_WITHIN)
    except OSError as error:
        raise UsageError(f"refused to replace {path}: it cannot be read: {error.strerror}") from error
    if not mark or mark.encode() not in found:
        raise UsageError(
            f"refused to replace {path}: it is there already, and not from this command. Choose another "
            f"name, or give {option}"
        )


def _check_folder(path: Path) -> None:
    folder = path.parent
    if not folder.is_dir():
        raise UsageError(f"cannot write {path}: {folder} is not a directory; make it first")


_KINDS = {
    stat.S_IFDIR: "a directory",
    stat.S_IFLNK: "a symbolic link",
    stat.S_IFIFO: "a pipe",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
}


_REMEDIES = {
    errno.ENOSPC: "free some space",
    errno.EDQUOT: "free some space or raise the quota",
    errno.EACCES: "check its permissions",
    errno.EPERM: "check its permissions and file system",
    errno.EROFS: "mount it writable",
}


_STORAGE = frozenset(
    {
        errno.ENOSPC,
        errno.EDQUOT,
        errno.EIO,
        errno.EROFS,
        errno.ESTALE,
        errno.ETIMEDOUT,
        errno.ENOTCONN,
        errno.ECONNABORTED,
        errno.EREMOTEIO,
    }
)


_STORAGE_WORDS = re.compile(
    "|".join(rf"\[errno {number}\]|{re.escape(os.strerror(number))}" for number in sorted(_STORAGE)),
    re.IGNORECASE,
)


def names_storage_trouble(text: str) -> bool:
    """Whether the text of an error from elsewhere names trouble with the storage."""
    return _STORAGE_WORDS.search(text) is not None


def is_storage_trouble(error: BaseException | None) -> bool:
    """Whether this says that the storage is full, failing or away, and so nothing against whoever uses it."""
    return isinstance(error, StorageError) or (isinstance(error, OSError) and error.errno in _STORAGE)


def explain_os_error(error: OSError, what: str, path: Path) -> ControlError:
    """One wording for every file-system error on the control directory."""
    remedy = _REMEDIES.get(error.errno or 0, "check that the directory is there and mounted")
    kind = StorageError if is_storage_trouble(error) else ControlError
    return kind(f"cannot {what} {path}: {error.strerror or error}; {remedy}, or use another run directory")


# Removing what is ours beneath a directory, and nothing else.
#
# Guarantee: nothing outside `root` is ever removed, moved or listed. `root` itself is what its owner named,
# and may be a link; every step below it is opened relative to the one before and without following a link, so
# that a `.trash` that somebody turned into a link to elsewhere is refused, even if that was a moment ago. A
# link that is itself to be removed is removed, and what it points to is not.


_FOLDER = os.O_RDONLY | os.O_DIRECTORY


def open_folder(root: Path, *names: str) -> OpenFile:
    """The directory `root/names…`. OSError if it is missing, or if a step below `root` is not a directory."""
    folder = OpenFile(root, _FOLDER)
    where = root
    for name in names:
        where = where / name
        if name in ("", ".", "..") or "/" in name:
            raise OSError(errno.EINVAL, "not the name of an entry", str(where))
        with folder as above:
            try:
                folder = OpenFile(name, _FOLDER | os.O_NOFOLLOW, beneath=above)
            except OSError as error:
                if error.errno in (errno.ENOTDIR, errno.ELOOP) and _is_link(name, above):
                    raise OSError(
                        errno.ENOTDIR,
                        "a symbolic link where a directory of its own has to be; remove the link",
                        str(where),
                    ) from error
                raise OSError(error.errno, error.strerror, str(where)) from error
    return folder


def make_folder(root: Path, *names: str) -> None:
    """Make `root/names…`, durably, unless it exists; refuse if a step below `root` is a link."""
    make_dirs(root)
    for count in range(len(names)):
        with open_folder(root, *names[:count]) as above:
            try:
                os.mkdir(names[count], dir_fd=above.number)
            except FileExistsError:
                continue
            os.fsync(above.number)
    open_folder(root, *names).close()


def entries(root: Path, *names: str) -> list[str]:
    """What lies in the directory `root/names…`; nothing if that does not exist."""
    try:
        with open_folder(root, *names) as folder:
            return sorted(os.listdir(folder.number))
    except FileNotFoundError:
        return []


def move(root: Path, source: tuple[str, ...], target: tuple[str, ...]) -> None:
    """Rename one entry beneath `root` to another; the directories of both must exist."""
    with open_folder(root, *source[:-1]) as there, open_folder(root, *target[:-1]) as here:
        os.rename(source[-1], target[-1], src_dir_fd=there.number, dst_dir_fd=here.number)


def remove(root: Path, *names: str) -> None:
    """Remove the entry `root/names…`, with all that is in it. It need not exist."""
    try:
        with open_folder(root, *names[:-1]) as above:
            info = os.stat(names[-1], dir_fd=above.number, follow_symlinks=False)
            if stat.S_ISDIR(info.st_mode):
                shutil.rmtree(names[-1], dir_fd=above.number)
            else:
                os.unlink(names[-1], dir_fd=above.number)
    except FileNotFoundError as error:
        path = root.joinpath(*names)
        if os.path.lexists(path):  # somebody else is removing it too, and was quicker with a part of it
            raise OSError(errno.EBUSY, "somebody else is removing it", str(path)) from error
    except OSError as error:  # names the entry as seen from the directory it is in
        if not Path(error.filename or "").is_absolute():
            error.filename = str(root.joinpath(*names[:-1], error.filename or names[-1]))
        raise


def unlink(root: Path, *names: str) -> None:
    """Remove the file or link `root/names…`, never a directory. It need not exist."""
    with contextlib.suppress(FileNotFoundError), open_folder(root, *names[:-1]) as above:
        os.unlink(names[-1], dir_fd=above.number)


def _is_link(name: str, above: OpenFile) -> bool:
    try:
        return stat.S_ISLNK(os.stat(name, dir_fd=above.number, follow_symlinks=False).st_mode)
    except OSError:
        return False
