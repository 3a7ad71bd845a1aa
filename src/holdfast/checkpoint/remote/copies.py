"""Remote copies of checkpoints, under one URL: pushed, listed, verified, pulled back and deleted.

```
<remote_root>/step_00000120-3fa9c1d2/__0_0.distcp …     every file of the checkpoint, byte for byte
<remote_root>/step_00000120-3fa9c1d2/holdfast.json      the marker: written last, removed first
<remote_root>/.standing/step_00000120-3fa9c1d2/…        how it was judged, as it lies beside the root
```
Guarantee: a copy counts when its marker is there, and the marker is there only when every file was stored
whole and its bytes were confirmed, by the store's own checksum or by reading them back. Nothing is renamed. A
push that is cut anywhere leaves a folder without a marker, which nothing takes for a checkpoint; the next
push simply does it again.

No torch, and no fsspec before a remote is opened.
"""

from __future__ import annotations

import contextlib
import os
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from urllib.parse import urlsplit

import msgspec
import xxhash

from holdfast.base import (
    create_exclusive,
    entries,
    escaped,
    fsync_dir,
    make_dirs,
    make_folder,
    move,
    read_regular,
    remove,
    replace_atomic,
    write_durable,
)
from holdfast.checkpoint import Owner, reading
from holdfast.checkpoint.format import (
    MANIFEST,
    MAX_MANIFEST_BYTES,
    STAGING,
    TRASH,
    CheckpointName,
    CheckpointRoot,
    FileEntry,
    Manifest,
    ManifestError,
    Problem,
    Reason,
    check_structure,
    parse_name,
)
from holdfast.checkpoint.format import manifest as manifests
from holdfast.checkpoint.remote.store import (
    BadCopyError,
    Budget,
    LocalCopyError,
    LocalStore,
    RemoteError,
    RemoteRefusedError,
    Retrier,
    Store,
    part_size,
)
from holdfast.config import mask, wrong_address
from holdfast.errors import ConfigError, UsageError
from holdfast.record import BESIDE, MAX_RECORD_BYTES, Fence, RootBook, Standing, newest, words_in

SETTING = "checkpoint.remote_root"
START_SECONDS = 30.0
"""How long the check at a start may take."""

Stop = Callable[[], None]
"""Called between requests; raises if the job must end (the lease is lost, time is up)."""
Progress = Callable[[int], None]


def _never() -> None:
    pass


class Copied(msgspec.Struct, frozen=True, kw_only=True):
    """What a push or a pull did."""

    bytes: int
    seconds: float
    already: bool = False
    """The same copy was there; nothing was transferred."""
    read_back: int = 0
    """Files whose bytes the store could not confirm by itself."""
    repeated: int = 0
    """Requests that had to be made again."""


def open_store(url: str) -> Store:
    """The store behind a URL. Makes no request; an address that cannot work is refused, saying what to do."""
    named = f"{SETTING} = {mask(url)!r}"
    if wrong := wrong_address(url):
        raise ConfigError(f"{named}: {wrong}")
    parsed = urlsplit(url)
    scheme, shown = parsed.scheme.lower(), url.rstrip("/")
    if scheme in ("file", "local"):
        return LocalStore(shown, Path(parsed.path))
    try:
        import fsspec

        options = dict(fsspec.config.conf.get(scheme, {}))
        if scheme in ("s3", "s3a"):
            from holdfast.checkpoint.remote.store import S3Store, open_bucket

            return S3Store(shown, open_bucket(options), parsed.netloc, parsed.path.strip("/"))
        from holdfast.checkpoint.remote.store import FsspecStore

        fs, path = fsspec.core.url_to_fs(shown, skip_instance_cache=True, use_listings_cache=False)
        return FsspecStore(shown, fs, path)
    except ImportError as error:
        remedy = "pip install 'holdfast[s3]'" if scheme in ("s3", "s3a") else f"install it: {error}"
        raise UsageError(f"{named}: the package for {scheme}:// is not installed; {remedy}") from error
    except ValueError as error:
        raise ConfigError(f"{named}: {error}; give s3://bucket/prefix or file:///path") from error


def open_remote(url: str, *, retry_seconds: float = 120.0) -> Remote:
    """The remote behind a URL, with a budget of seconds for retrying each operation. Makes no request."""
    return Remote(open_store(url), Budget(seconds=retry_seconds))


def split_copy_url(url: str) -> tuple[str, CheckpointName]:
    """`s3://…/step_…-id` → the remote root, and the checkpoint."""
    parent, _, last = url.rstrip("/").rpartition("/")
    name = parse_name(last)
    if name is None or "://" not in parent:
        raise UsageError(f"{url!r} does not name a remote checkpoint: it must end in /step_<step>-<id>")
    return parent, name


class Remote:
    """The copies under one URL."""

    def __init__(self, store: Store, budget: Budget | None = None) -> None:
        self._store = store
        self._budget = budget or Budget()

    @property
    def url(self) -> str:
        return self._store.url

    def _tries(self, deadline: float | None = None) -> Retrier:
        return Retrier(self._budget, deadline)

    # --- at a start -----------------------------------------------------------------------------------------

    def check(self, timeout: float = START_SECONDS) -> None:
        """List, write, read and delete once, within a deadline; an error says what to set or to do."""
        budget = msgspec.structs.replace(self._budget, seconds=min(timeout, self._budget.seconds))
        tries = Retrier(budget, time.monotonic() + timeout)
        probe, data = f".holdfast-probe-{uuid.uuid4().hex[:12]}", b"holdfast"
        try:
            self._store.folders(tries)
            self._store.upload(probe, [data], len(data), tries)
            try:
                found = self._store.read(probe, 0, len(data), tries)
            finally:
                self._store.remove([probe], tries)
        except FileNotFoundError as error:
            raise RemoteRefusedError(f"{SETTING} = {self.url!r}: what was written is not there") from error
        except RemoteError as error:
            raise type(error)(f"{SETTING} = {self.url!r} cannot be used: {error}") from error
        if found != data:
            raise RemoteRefusedError(f"{SETTING} = {self.url!r}: bytes came back altered")

    def abort_uploads(self, ours: list[CheckpointName], before: float) -> list[str]:
        """Abort unfinished uploads to these checkpoints that began before `before`; never anybody else's."""
        return self._store.abort_uploads([str(name) for name in ours], before, self._tries())

    # --- looking --------------------------------------------------------------------------------------------

    def names(self, deadline: float | None = None) -> list[CheckpointName]:
        """Checkpoints with a marker, newest step first."""
        tries = self._tries(deadline)
        return [name for name in self._folders(tries) if self._store.size(_marker(name), tries) is not None]

    def is_finished(self, name: CheckpointName) -> bool:
        """Whether a copy has its marker; one that had it and has lost it is being deleted, or is gone."""
        return self._store.size(_marker(name), self._tries()) is not None

    def folders(self) -> list[CheckpointName]:
        """Those without a marker too: copies that were never finished, or whose deletion was cut."""
        return self._folders(self._tries())

    def _folders(self, tries: Retrier) -> list[CheckpointName]:
        found = (parse_name(folder) for folder in self._store.folders(tries))
        return sorted((name for name in found if name is not None), reverse=True)

    def manifest(self, name: CheckpointName, deadline: float | None = None) -> tuple[Manifest, str, bytes]:
        """The marker of a copy: manifest, its digest, its bytes. BadCopyError if it cannot be trusted."""
        data = self._read_marker(name, self._tries(deadline))
        if data is None:
            raise self._bad(
                name, Reason.NO_MANIFEST, MANIFEST, "there is no marker: it is not a finished copy"
            )
        try:
            manifest, digest = manifests.decode(data)
        except ManifestError as error:
            raise self._bad(name, Reason.UNREADABLE_MANIFEST, MANIFEST, str(error)) from error
        if (manifest.step, manifest.id) != (name.step, name.id):
            found = CheckpointName(manifest.step, manifest.id)
            raise self._bad(name, Reason.WRONG_NAME, MANIFEST, f"the manifest is that of {found}")
        return manifest, digest, data

    def _read_marker(self, name: CheckpointName, tries: Retrier) -> bytes | None:
        size = self._store.size(_marker(name), tries)
        if size is None:
            return None
        if size > MAX_MANIFEST_BYTES:
            raise self._bad(name, Reason.UNREADABLE_MANIFEST, MANIFEST, f"it has {size} bytes: too many")
        try:
            return b"".join(self._store.stream(_marker(name), size, tries))
        except FileNotFoundError:
            return None

    def _bad(self, name: CheckpointName, reason: Reason, path: str, detail: str) -> BadCopyError:
        return BadCopyError(f"{self.url}/{name}", Problem(reason, path, escaped(detail)))

    def download(
        self, name: CheckpointName, entry: FileEntry, deadline: float | None = None
    ) -> Iterator[bytes]:
        """The bytes of one file, in order; ends with BadCopyError unless they are those that were saved."""
        digest, read = xxhash.xxh3_128(), 0
        tries = self._tries(deadline)
        try:
            # One byte past the listed size shows an object that is longer.
            for data in self._store.stream(f"{name}/{entry.path}", entry.size + 1, tries):
                tries.check(f"read {self.url}/{name}/{entry.path}")
                digest.update(data)
                read += len(data)
                yield data
        except FileNotFoundError:
            raise self._bad(name, Reason.MISSING, entry.path, "there is no such object") from None
        if read != entry.size:
            reason = Reason.TRUNCATED if read < entry.size else Reason.ALTERED
            raise self._bad(name, reason, entry.path, f"expected {entry.size} bytes, found {read}")
        if digest.hexdigest() != entry.digest:
            found = digest.hexdigest()
            raise self._bad(
                name, Reason.ALTERED, entry.path, f"expected digest {entry.digest}, found {found}"
            )

    def verify(
        self, name: CheckpointName, progress: Progress | None = None
    ) -> tuple[Manifest | None, list[Problem]]:
        """Read every byte of a copy and compare digests; every problem found, each with its reason."""
        try:
            manifest, _, _ = self.manifest(name)
        except BadCopyError as error:
            return None, [error.problem]
        problems: list[Problem] = []
        for entry in manifest.files:
            try:
                for data in self.download(name, entry):
                    if progress is not None:
                        progress(len(data))
            except BadCopyError as error:
                problems.append(error.problem)
        listed = {f"{name}/{entry.path}" for entry in manifest.files} | {_marker(name)}
        for key in sorted(self._store.keys(str(name), self._tries()).keys() - listed):
            problems.append(Problem(Reason.UNLISTED, escaped(key), "the manifest does not list it"))
        return manifest, problems

    # --- how they were judged -------------------------------------------------------------------------------

    def judged(self) -> list[CheckpointName]:
        """Checkpoints that have records of their standing here."""
        keys = self._store.keys(BESIDE, self._tries())
        found = {parse_name(key.split("/")[1]) for key in keys if key.count("/") >= 2}
        return sorted(name for name in found if name is not None)

    def standing(self, name: CheckpointName) -> Standing:
        """How it was judged, by the names of the records here; COMMITTED if it was not."""
        keys = self._store.keys(f"{BESIDE}/{name}", self._tries())
        word = newest(words_in((key.rpartition("/")[2] for key in keys), Path(BESIDE)))
        return word.standing if word is not None else Standing.COMMITTED

    def pull_standing(self, name: CheckpointName, book: RootBook, deadline: float | None = None) -> int:
        """Copy the records of a checkpoint's standing to `book`, which keeps its own; returns how many."""
        tries = self._tries(deadline)
        under = f"{BESIDE}/{name}"
        found = self._store.keys(under, tries)
        folder = book.folder(str(name))
        for key, size in sorted(found.items()):
            entry = key.removeprefix(f"{under}/")
            if "/" in entry or not entry.endswith(".json"):
                continue
            # One that cannot be read is kept by its name, which is what counts.
            data = self._store.read(key, 0, min(size, MAX_RECORD_BYTES), tries)
            make_dirs(folder)
            create_exclusive(folder / entry, data)
        return len(found)

    def push_standing(self, name: CheckpointName, book: RootBook, *, stop: Stop = _never) -> int:
        """Copy to the remote the records beside a checkpoint that it lacks; returns how many it lacked."""
        tries = self._tries()
        under = f"{BESIDE}/{name}"
        there = self._store.keys(under, tries)
        missing = [entry for entry in book.files(str(name)) if f"{under}/{entry}" not in there]
        for entry in missing:
            stop()
            try:
                data = read_regular(book.folder(str(name)) / entry, MAX_RECORD_BYTES)
            except FileNotFoundError:
                continue  # retention took the checkpoint away, and its records with it
            self._store.upload(f"{under}/{entry}", [data], len(data), tries)
        return len(missing)

    # --- changing -------------------------------------------------------------------------------------------

    def push(
        self, directory: Path, *, expected: str = "", stop: Stop = _never, deadline: float | None = None
    ) -> Copied:
        """Copy a committed checkpoint here. `expected` is the manifest digest that the run remembers, if any.

        Does nothing if the same copy is there. LocalCopyError: the local checkpoint is not what was saved.
        """
        started = time.monotonic()
        name = parse_name(directory.name)
        if name is None:
            raise UsageError(f"{directory} is not named as a checkpoint")
        tries = self._tries(deadline)
        with reading(directory):
            manifest, digest, data = _local_manifest(directory, name, expected)
            if self._is_there(name, digest, tries):
                return Copied(bytes=0, seconds=time.monotonic() - started, already=True)
            read_back = 0
            for entry in manifest.files:
                stop()
                read_back += self._push_file(directory, name, entry, tries, stop)
            stop()
            if not self._store.upload(_marker(name), [data], len(data), tries):
                read_back += 1
                if self._read_marker(name, tries) != data:
                    self._store.remove([_marker(name)], tries)
                    raise self._bad(name, Reason.ALTERED, MANIFEST, "the bytes that came back differ")
        return Copied(
            bytes=len(data) + sum(entry.size for entry in manifest.files),
            seconds=time.monotonic() - started,
            read_back=read_back,
            repeated=tries.repeated,
        )

    def _is_there(self, name: CheckpointName, digest: str, tries: Retrier) -> bool:
        data = self._read_marker(name, tries)
        if data is None:
            return False
        with contextlib.suppress(ManifestError):
            found = manifests.decode(data)[1]
            if found != digest:
                raise RemoteRefusedError(
                    f"{self.url}/{name} holds another checkpoint of that name (manifest {found}, ours is "
                    f"{digest}); give this run a {SETTING} of its own"
                )
            return True
        # A marker that cannot be read vouches for nothing. Take it away before what lies beside it changes.
        self._store.remove([_marker(name)], tries)
        return False

    def _push_file(
        self, directory: Path, name: CheckpointName, entry: FileEntry, tries: Retrier, stop: Stop
    ) -> int:
        """Store one file; returns 1 if it had to be read back, else 0."""
        key = f"{name}/{entry.path}"
        confirmed = self._store.upload(key, _local_parts(directory, entry, tries, stop), entry.size, tries)
        size = self._store.size(key, tries)
        if size != entry.size:
            raise self._bad(name, Reason.TRUNCATED, entry.path, f"stored {entry.size} bytes, found {size}")
        if not confirmed:
            for _ in self.download(name, entry):
                stop()
        return 0 if confirmed else 1

    def delete(self, name: CheckpointName, *, stop: Stop = _never) -> int:
        """Delete a copy, its marker first; returns the number of objects that were there."""
        tries = self._tries()
        stop()
        had_marker = self._store.size(_marker(name), tries) is not None
        if had_marker:
            self._store.remove([_marker(name)], tries)
        rest = sorted(self._store.keys(str(name), tries))
        rest += sorted(self._store.keys(f"{BESIDE}/{name}", tries))
        stop()
        self._store.remove(rest, tries)
        return len(rest) + had_marker


def _marker(name: CheckpointName) -> str:
    return f"{name}/{MANIFEST}"


def _local_manifest(directory: Path, name: CheckpointName, expected: str) -> tuple[Manifest, str, bytes]:
    try:
        data = read_regular(directory / MANIFEST, MAX_MANIFEST_BYTES)
        manifest, digest = manifests.decode(data)
    except (OSError, ManifestError) as error:
        raise LocalCopyError(f"{directory} was not copied: its {MANIFEST} cannot be read: {error}") from error
    if (expected and digest != expected) or (manifest.step, manifest.id) != (name.step, name.id):
        raise LocalCopyError(f"{directory} was not copied: its manifest is not the one that was committed")
    return manifest, digest, data


def _local_parts(directory: Path, entry: FileEntry, tries: Retrier, stop: Stop) -> Iterator[bytes]:
    """A local file in parts, digested on the way. The last part comes only if all of it is what was saved."""
    path = directory / entry.path
    step = part_size(entry.size)
    digest, left = xxhash.xxh3_128(), entry.size
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError as error:
        raise LocalCopyError(f"{path} was not copied: {error.strerror or error}") from error
    with os.fdopen(fd, "rb", buffering=0) as file:
        while True:
            stop()
            tries.check(f"copy {path}")
            wanted = min(step, left)
            data = _read_exactly(file.fileno(), wanted, path)
            digest.update(data)
            left -= len(data)
            if len(data) < wanted:
                raise LocalCopyError(
                    f"{path} was not copied: it is {left} bytes shorter than when it was saved"
                )
            if left == 0:
                found = digest.hexdigest()
                if found != entry.digest or _read_exactly(file.fileno(), 1, path):
                    raise LocalCopyError(
                        f"{path} was not copied: it has other bytes than were saved "
                        f"(expected digest {entry.digest}, found {found}); "
                        f"see `holdfast ckpt verify {directory}`"
                    )
                yield data
                return
            yield data


def _read_exactly(fd: int, count: int, path: Path) -> bytes:
    pieces: list[bytes] = []
    try:
        while count > 0:
            data = os.read(fd, count)
            if not data:
                break
            pieces.append(data)
            count -= len(data)
    except OSError as error:
        raise LocalCopyError(
            f"{path} was not copied: it cannot be read: {error.strerror or error}"
        ) from error
    return pieces[0] if len(pieces) == 1 else b"".join(pieces)


# From a remote copy back to an ordinary local checkpoint.
#
# Guarantee: nothing local changes unless every byte that arrived is what was saved. A copy is downloaded into
# the staging directory, each file digested on its way and fsynced, and then committed as a save is: by one
# rename, under the fence. A local directory of the same name is moved aside first, into `.quarantine`, in the
# same guard; it is kept for inspection, and only the newest one is.
#
# A cut before the rename leaves something in staging that the next attempt sweeps. The remote copy stays.


QUARANTINE = ".quarantine"
IMPORTED = "imported"
"""Below the root: checkpoints that were named by URL. No resume and no retention meets them by itself."""


class Pulled(msgspec.Struct, frozen=True, kw_only=True):
    path: Path
    copied: Copied
    quarantine: Path | None = None
    """Where the local directory that this copy replaced went."""


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

    BadCopyError: the copy is not what was saved. RemoteError: it cannot be fetched. OSError: no room for it
    here.
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
    """Fetch only the standing of the checkpoint that a URL names; returns where that one would be put."""
    parent, name = split_copy_url(url)
    place = CheckpointRoot(root.path / IMPORTED)
    try:
        remote = open_remote(parent, retry_seconds=retry_seconds)
        remote.pull_standing(name, RootBook(place.path), time.monotonic() + timeout)
    except (RemoteError, OSError) as error:
        raise UsageError(
            f"checkpoint.resume_from = {url!r} cannot be used: its standing cannot be read, which counts as "
            f"condemned; set checkpoint.force to go on without it ({error})"
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

    One that an earlier start fetched, complete by its sizes, is used as it is: loading verifies it.
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
