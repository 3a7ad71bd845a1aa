"""A writer process's sign of life, and the next attempt's wait for it.

A snapshot that was fully staged outlives its trainer: the writer process commits it. But once a newer epoch
is claimed, the fence refuses that commit. So whoever claims the next epoch first lets the writer of the
ending one finish, for a bounded time.

The sign of life is a lock on `writing/<epoch>.lock`, held for as long as the writer lives; the kernel lets go
of it however the writer ends. It is taken by the trainer, which sends it to the writer: so it is held from
the moment the process exists, however long that takes to start. What the file says is what the writer is
doing or is about to be handed: the trainer writes that before it stages anything, and the writer takes it
back when that is done. A writer whose trainer is gone takes up what it was handed within moments, or exits.
So a writer that stays idle is not waited for.

Writers of different ranks reach each other through files only. One that gives a save up says so here, in
`writing/<epoch>.<rank>.failed`, so that the others need not wait for it until their deadline. What is
committed in the local tier and on its way to the checkpoint root (a drain) is not waited for by the next
attempt. Later saves go on beside it, so each drain is given up by a file of its own.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec

from holdfast.base import Waiting, make_dirs, read_regular, replace_atomic, stretch
from holdfast.errors import ControlError
from holdfast.record.directory import MAX_RECORD_BYTES, ControlDirectory

IDLE_PATIENCE = 2.0
"""A writer that has nothing to do for so long, while it is watched, will not get anything to do."""
POLL = 0.02
LOCK_PATIENCE = 30.0
"""Seconds for which the writer that replaces a dead one waits for the kernel to let go of its lock."""


class GivenUp(msgspec.Struct, frozen=True, kw_only=True):
    """A rank does nothing more for its saves up to this one: they are done, or failed for this reason."""

    serial: int
    why: str


def give_up(run_dir: Path, epoch: int, rank: int, serial: int, why: str, *, drain: bool = False) -> None:
    """Say so as well as can be: where it cannot be written, the others find out at their deadline."""
    path = _given_up_path(run_dir, epoch, rank, drain=serial if drain else None)
    with contextlib.suppress(OSError):
        make_dirs(path.parent)
        replace_atomic(path, msgspec.json.encode(GivenUp(serial=serial, why=why)), durable=False)


def given_up(run_dir: Path, epoch: int, rank: int, serial: int, *, drain: bool = False) -> str:
    """Why a rank has given that save up, or its drain; empty if nothing says so."""
    try:
        path = _given_up_path(run_dir, epoch, rank, drain=serial if drain else None)
        raw = read_regular(path, MAX_RECORD_BYTES)
        found = msgspec.json.decode(raw, type=GivenUp)
    except (OSError, msgspec.DecodeError):
        return ""
    return found.why if found.serial >= serial else ""


def is_busy(run_dir: Path, epoch: int, *, drain: bool = False) -> bool:
    """Whether the writer of rank 0 lives and has something to do; a drain does not show, so its life does."""
    try:
        fd = os.open(_path(run_dir, epoch), os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
    except OSError:
        return False
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return drain or bool(os.pread(fd, 256, 0))
    else:
        return False
    finally:
        os.close(fd)


def _given_up_path(run_dir: Path, epoch: int, rank: int, *, drain: int | None) -> Path:
    which = "" if drain is None else f".drain-{drain}"
    return run_dir / "writing" / f"{epoch:08d}.{rank}{which}.failed"


def _path(run_dir: Path, epoch: int) -> Path:
    return run_dir / "writing" / f"{epoch:08d}.lock"


def lock_for_writer(run_dir: Path, epoch: int, what: str) -> int | None:
    """For the trainer of rank 0: a descriptor that holds the lock, for a writer that is about to do `what`.

    None: it cannot be had now, and the writer itself has to take it.
    """
    path = _path(run_dir, epoch)
    try:
        make_dirs(path.parent)
        fd = _open(path)
    except OSError:
        return None
    if not _locked(fd):  # by an earlier writer that is still dying
        os.close(fd)
        return None
    _say(fd, what)
    return fd


def announce(run_dir: Path, epoch: int, what: str) -> None:
    """For the trainer of rank 0: its writer, which may still be starting, is about to be handed this."""
    with contextlib.suppress(OSError):  # then the next attempt may not wait for a writer that starts, no more
        fd = os.open(_path(run_dir, epoch), os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
        try:
            _say(fd, what)
        finally:
            os.close(fd)


def _open(path: Path) -> int:
    return os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o644)


def _locked(fd: int) -> bool:
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _say(fd: int, what: str) -> None:
    with contextlib.suppress(OSError):  # a full disk: then the next attempt does not wait, no more
        os.ftruncate(fd, 0)
        os.pwrite(fd, what.encode(), 0)


def _said(fd: int) -> str:
    with contextlib.suppress(OSError):
        return os.pread(fd, 256, 0).decode(errors="replace")
    return ""


class Writing:
    """Held by the writer process of rank 0."""

    def __init__(self, control: ControlDirectory, epoch: int, locked: int | None = None) -> None:
        """`locked`: the lock as the trainer has taken it; else it is taken here."""
        self._path = _path(control.path, epoch)
        if locked is not None:
            os.set_inheritable(locked, False)
            self._fd = locked
            return
        make_dirs(self._path.parent)
        self._fd = _open(self._path)
        # A writer that replaces a dead one finds the lock free; one that is still dying lets go in a moment.
        deadline = time.monotonic() + LOCK_PATIENCE
        while not _locked(self._fd):
            if time.monotonic() > deadline:
                raise ControlError(
                    f"{self._path} stayed locked for {LOCK_PATIENCE:g} s: another writer of this attempt "
                    "does not end"
                )
            time.sleep(POLL)

    @contextlib.contextmanager
    def busy_with(self, what: str) -> Iterator[None]:
        """What the trainer has announced since then stays said until it is done too."""
        if not _said(self._fd):
            _say(self._fd, what)
        try:
            yield
        finally:
            if _said(self._fd) == what:
                _say(self._fd, "")

    def close(self) -> None:
        """Nothing was left undone: take the file away, so that nobody needs to look at it."""
        self._path.unlink(missing_ok=True)
        os.close(self._fd)


def let_writer_finish(
    control: ControlDirectory,
    epoch: int,
    timeout: float,
    waiting: Callable[[Waiting], None] | None = None,
) -> str:
    """Wait until the writer of an epoch is done or gone, at most `timeout`; what was seen, for the record."""
    path = _path(control.path, epoch)
    try:
        fd = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
    except OSError:
        return ""  # there is none, or nothing that can be asked
    try:
        return _watch(fd, timeout, waiting)
    finally:
        os.close(fd)


def _watch(fd: int, timeout: float, waiting: Callable[[Waiting], None] | None) -> str:
    started = idle_since = time.monotonic()
    seen = ""
    while True:
        now = time.monotonic()
        try:
            fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
            return f"its writer finished {seen} first, in {now - started:.1f} s" if seen else ""
        except BlockingIOError:
            pass
        doing = _said(fd)
        if doing:
            seen, idle_since = doing, now
        elif now - idle_since > IDLE_PATIENCE:
            return ""
        if now - started > timeout:
            return f"its writer was still at {seen or 'nothing'} after {timeout:g} s and was not waited for"
        if waiting is not None:
            what = f"the writer of the last attempt to finish {seen or 'what it was handed'}"
            waiting(Waiting(what, now - started, timeout))
        time.sleep(stretch(POLL))
