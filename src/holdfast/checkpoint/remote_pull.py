"""From a remote copy back to an ordinary local checkpoint.

Guarantee: nothing local changes unless every byte that came is what was saved. A copy is downloaded into the
staging directory, each file digested on its way and fsynced, and then committed as a save is: by one rename,
under the fence. A local directory of the same name is moved aside first, into `.quarantine`, in the same
guard; it is kept for a look, and only the newest such one.

A cut before the rename leaves something in staging that the next attempt sweeps. The remote copy stays.
"""

from __future__ import annotations

import contextlib
import os
import time
import uuid
from pathlib import Path

import msgspec

from holdfast.checkpoint.commit import Owner
from holdfast.checkpoint.identity import MANIFEST, STAGING, TRASH, CheckpointName, CheckpointRoot
from holdfast.checkpoint.manifest import FileEntry
from holdfast.checkpoint.problems import Problem, Reason
from holdfast.checkpoint.remote import Copied, Remote, open_remote, split_copy_url
from holdfast.checkpoint.remote_retry import BadCopyError, RemoteError
from holdfast.checkpoint.structure import check_structure
from holdfast.control.lease import Fence
from holdfast.control.standing import RootBook
from holdfast.errors import UsageError
from holdfast.files import fsync_dir, replace_atomic, write_durable
from holdfast.removal import entries, make_folder, move, remove

QUARANTINE = ".quarantine"
IMPORTED = "imported"
"""Below the root: checkpoints that were named by URL. No resume and no retention meets them by itself."""


class Pulled(msgspec.Struct, frozen=True, kw_only=True):
    path: Path
    copied: Copied
    quarantine: Path | None = None
    """Where the local directory went that this copy replaced."""


def pull(
    remote: Remote,
    name: CheckpointName,
    root: CheckpointRoot,
    *,
    fence: Fence,
    owner: Owner,
    expected: str = "",
    deadline: float | None = None,
) -> Pulled:
    """Make `<root>/<name>` from its remote copy. `expected`: the manifest digest that the run remembers.

    BadCopyError: the copy is not what was saved. RemoteError: it cannot be had. OSError: no room for it here.
    """
    started = time.monotonic()
    manifest, digest, data = remote.manifest(name, deadline)
    if expected and digest != expected:
        detail = f"its manifest is {digest}, the run committed {expected}"
        raise BadCopyError(f"{remote.url}/{name}", Problem(Reason.ALTERED, MANIFEST, detail))
    staged = root.staging / f"{name}.pull"
    marker = root.staging / f"{name}.pull.owner"
    make_folder(root.path, STAGING)
    remove(root.path, STAGING, staged.name)
    replace_atomic(marker, msgspec.json.encode(owner), durable=False)
    try:
        staged.mkdir()
        for entry in manifest.files:
            _fetch(remote, name, entry, staged, deadline)
        write_durable(staged / MANIFEST, data)
        for folder in {(staged / entry.path).parent for entry in manifest.files} | {staged}:
            fsync_dir(folder)
        quarantine = _put_in_place(root, name, staged, fence)
    except BaseException:
        with contextlib.suppress(OSError):
            remove(root.path, STAGING, staged.name)
        raise
    finally:
        with contextlib.suppress(OSError):
            marker.unlink(missing_ok=True)
    _forget_older(root, quarantine)
    copied = Copied(
        bytes=len(data) + sum(entry.size for entry in manifest.files), seconds=time.monotonic() - started
    )
    return Pulled(path=root.committed(name), copied=copied, quarantine=quarantine)


def _fetch(
    remote: Remote, name: CheckpointName, entry: FileEntry, staged: Path, deadline: float | None
) -> None:
    path = staged / entry.path
    path.parent.mkdir(parents=True, exist_ok=True)
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
    try:
        for data in remote.download(name, entry, deadline):
            view = memoryview(data)
            while view:
                view = view[os.write(fd, view) :]
        os.fsync(fd)
    finally:
        os.close(fd)


def _put_in_place(root: CheckpointRoot, name: CheckpointName, staged: Path, fence: Fence) -> Path | None:
    destination = root.committed(name)
    aside = root.path / QUARANTINE / f"{name}.{uuid.uuid4().hex[:8]}"
    make_folder(root.path, QUARANTINE)
    with fence.guard(f"commit {name} from its remote copy"):
        replaced = os.path.lexists(destination)
        if replaced:
            os.rename(destination, aside)
            fsync_dir(aside.parent)
        os.rename(staged, destination)
        fsync_dir(root.path)
    return aside if replaced else None


def _forget_older(root: CheckpointRoot, newest: Path | None) -> None:
    """One bad copy is evidence; a heap of them is a full disk. What goes, goes through the trash."""
    with contextlib.suppress(OSError):
        if newest is None:
            (root.path / QUARANTINE).rmdir()
            return
        for entry in entries(root.path, QUARANTINE):
            if entry != newest.name:
                make_folder(root.path, TRASH)
                move(root.path, (QUARANTINE, entry), (TRASH, entry))


def pull_standing_of(url: str, root: CheckpointRoot, *, timeout: float, retry_seconds: float) -> Path:
    """Bring only what was judged of the checkpoint that a URL names; where that checkpoint would come to."""
    parent, name = split_copy_url(url)
    place = CheckpointRoot(root.path / IMPORTED)
    try:
        remote = open_remote(parent, retry_seconds=retry_seconds)
        remote.pull_standing(name, RootBook(place.path), time.monotonic() + timeout)
    except (RemoteError, OSError) as error:
        raise UsageError(
            f"checkpoint.resume_from = {url!r} cannot be used: what was judged of it cannot be read, which "
            f"counts as a condemnation; set checkpoint.force to go on without ({error})"
        ) from error
    return place.committed(name)


def pull_named(
    url: str,
    root: CheckpointRoot,
    *,
    fence: Fence,
    owner: Owner,
    timeout: float,
    retry_seconds: float,
) -> Path:
    """The checkpoint that `checkpoint.resume_from` names by URL, as a local directory under `imported`.

    One that an earlier start brought here, whole by its sizes, is used as it is: loading verifies it.
    """
    parent, name = split_copy_url(url)
    remote = open_remote(parent, retry_seconds=retry_seconds)
    place = CheckpointRoot(root.path / IMPORTED)
    deadline = time.monotonic() + timeout
    try:
        _, digest, _ = remote.manifest(name, deadline)
        found = check_structure(place.committed(name))
        if found.sound and found.manifest_digest == digest:
            return place.committed(name)
        pulled = pull(remote, name, place, fence=fence, owner=owner, expected=digest, deadline=deadline)
        return pulled.path
    except (RemoteError, OSError) as error:
        raise UsageError(f"checkpoint.resume_from = {url!r} cannot be used: {error}") from error
