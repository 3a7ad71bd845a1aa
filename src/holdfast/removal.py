"""Removing what is ours beneath a directory, and nothing else.

Guarantee: nothing outside `root` is ever removed, moved or listed. `root` itself is what its owner named, and
may be a link; every step below it is opened relative to the one before and without following a link, so that
a `.trash` that somebody made a link to elsewhere is refused, also if it was exchanged a moment ago. A link
that is itself to be removed is removed, and what it points to is not.
"""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import stat
from pathlib import Path

from holdfast.files import OpenFile, make_dirs

_FOLDER = os.O_RDONLY | os.O_DIRECTORY


def open_folder(root: Path, *names: str) -> OpenFile:
    """The directory `root/names…`. OSError if it is not there, or if a step below `root` is no directory."""
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
    """Make `root/names…`, durably, unless it is there; refuse it if a step below `root` is a link."""
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
    """What lies in the directory `root/names…`; nothing if it is not there."""
    try:
        with open_folder(root, *names) as folder:
            return sorted(os.listdir(folder.number))
    except FileNotFoundError:
        return []


def move(root: Path, source: tuple[str, ...], target: tuple[str, ...]) -> None:
    """Rename one entry beneath `root` to another; the directories of both must be there."""
    with open_folder(root, *source[:-1]) as there, open_folder(root, *target[:-1]) as here:
        os.rename(source[-1], target[-1], src_dir_fd=there.number, dst_dir_fd=here.number)


def remove(root: Path, *names: str) -> None:
    """Remove the entry `root/names…`, with all that is in it. It is fine if it is not there."""
    try:
        with open_folder(root, *names[:-1]) as above:
            info = os.stat(names[-1], dir_fd=above.number, follow_symlinks=False)
            if stat.S_ISDIR(info.st_mode):
                shutil.rmtree(names[-1], dir_fd=above.number)
            else:
                os.unlink(names[-1], dir_fd=above.number)
    except FileNotFoundError as error:
        path = root.joinpath(*names)
        if os.path.lexists(path):  # somebody else removes it too, and was quicker with a part of it
            raise OSError(errno.EBUSY, "somebody else is removing it", str(path)) from error
    except OSError as error:  # named as seen from the directory it is in
        if not Path(error.filename or "").is_absolute():
            error.filename = str(root.joinpath(*names[:-1], error.filename or names[-1]))
        raise


def unlink(root: Path, *names: str) -> None:
    """Remove the file or link `root/names…`, and no directory. It is fine if it is not there."""
    with contextlib.suppress(FileNotFoundError), open_folder(root, *names[:-1]) as above:
        os.unlink(names[-1], dir_fd=above.number)


def _is_link(name: str, above: OpenFile) -> bool:
    try:
        return stat.S_ISLNK(os.stat(name, dir_fd=above.number, follow_symlinks=False).st_mode)
    except OSError:
        return False
