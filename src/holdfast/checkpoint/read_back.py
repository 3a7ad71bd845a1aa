"""Reading committed checkpoints back, and protecting from deletion those that are being read.

A commit shows that the storage took the bytes, not that it gives them back. So every checkpoint that rank 0's
trainer has seen committed is read once, whole, by a small separate process, which compares every digest and
records the result beside the checkpoint (`<root>/.standing/<name>/read-back`). Retention goes by this record.

Guarantee: it can neither slow nor end a run. The process has the lowest priority for processor and storage,
reads no faster than allowed (`checkpoint.read_back_rate`), needs no torch and little memory, and leaves the
page cache as it found it. The kernel ends it when its trainer ends. The trainer never waits for it; if it
dies it is replaced, a few times. It reads the newest checkpoint first, so that a process too slow for the
saves leaves older ones out rather than falling behind.

What a read-back shows: this node got the right bytes from the storage at that moment. The pages are dropped
from this node's cache before they are read; caches further away (in the device, in a file server) may still
answer. A copy that seems bad is first read a second time. A bad one is reported loudly, stays as evidence and
is never counted by retention. That says nothing about the checkpoint, of which there may be other copies.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import itertools
import logging
import os
import platform
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec

from holdfast.base import OpenFile, make_dirs, printable, read_regular, replace_atomic
from holdfast.checkpoint.format import CheckpointName, CheckpointRoot, Inspection, Reason, parse_name, verify
from holdfast.errors import ControlError, HoldfastError, LeaseLostError
from holdfast.journal import JournalWriter
from holdfast.journal.events import CopyQuarantined, CopyReadBack, Warned
from holdfast.process import LAST, Companion, Gone, Packets, start_child, step_aside
from holdfast.record import (
    MAX_RECORD_BYTES,
    ControlDirectory,
    Fence,
    RootBook,
    attempt_numbers,
    find_commit,
    find_deleted,
)

# Keeps a checkpoint from being deleted while somebody who does not hold the run's lease reads it.
#
# A reader holds a shared lock on the checkpoint's directory, a deletion an exclusive one. A deletion never
# waits for a reader; a reader waits a moment for a deletion under way, which is only a rename. This is only
# as good as the file system's locks: where there are none, both go ahead.
#
# A reader that lists checkpoints and reads them later holds no lock in between, and a live run deletes what
# its retention gives up. So a checkpoint that is gone by then need not be a fault: `gone_since` says whether
# it was deleted on purpose, from the record that a deletion leaves before it begins. What has no such record
# was lost.


log = logging.getLogger("holdfast.checkpoint")

DELETION_WAIT = 2.0
"""Seconds that a reader waits for a deletion under way, which is only a rename unless the storage hangs."""
DELETION_POLL = 0.01


@contextlib.contextmanager
def reading(directory: Path) -> Iterator[bool]:
    """Read undisturbed: a deletion that comes meanwhile is put off. False: nothing is there any more."""
    deadline = time.monotonic() + DELETION_WAIT
    while True:
        with _locked(directory, fcntl.LOCK_SH) as free:
            if free or time.monotonic() >= deadline:
                # What was opened may have been taken away before it was locked.
                yield not is_gone(directory)
                return
        time.sleep(DELETION_POLL)


@contextlib.contextmanager
def unread(directory: Path) -> Iterator[bool]:
    """Whether a checkpoint has no known reader; nobody begins to read it while this is held."""
    with _locked(directory, fcntl.LOCK_EX) as free:
        yield free


@contextlib.contextmanager
def _locked(directory: Path, how: int) -> Iterator[bool]:
    """Hold a lock on a directory, without waiting; False if another lock prevents it."""
    try:
        descriptor = OpenFile(directory, os.O_RDONLY | os.O_DIRECTORY)
    except OSError:
        yield True  # the caller meets the same error next, and says more about it
        return
    with descriptor:
        free = True
        try:
            fcntl.flock(descriptor.number, how | fcntl.LOCK_NB)
        except BlockingIOError:
            free = False
        except OSError as error:
            log.debug("holdfast: %s cannot be locked: %s", directory, error)
        yield free


# --- what is gone -------------------------------------------------------------------------------------------


def is_gone(directory: Path) -> bool:
    """Whether nothing of that name exists; storage that does not answer is no proof of that."""
    try:
        directory.stat()
    except FileNotFoundError:
        return True
    except OSError:
        return False
    return False


def gone_since(directory: Path, control: ControlDirectory | None) -> str:
    """Why a checkpoint that was listed is gone without fault, in words; empty if it is there, or was lost.

    Without the run's control directory deleted and lost look alike, and it gets the benefit of the doubt.
    """
    if not is_gone(directory):
        return ""
    control = control or _run_of(directory)
    return removed(directory, control) if control is not None else "it is gone since it was listed"


def removed(directory: Path, control: ControlDirectory | None = None) -> str:
    """When and why retention deleted a checkpoint that is gone, in words; empty if no record says so."""
    name, control = parse_name(directory.name), control or _run_of(directory)
    if name is None or control is None or not is_gone(directory):
        return ""
    found = find_deleted(control, name.step, name.id)
    return f"deleted {found.describe()}" if found is not None else ""


def no_such(directory: Path, control: ControlDirectory | None = None) -> str:
    """What to tell the user who named a directory that is not there."""
    if why := removed(directory, control):
        return f"{printable(str(directory), 4096)}: this checkpoint is not there any more: {why}"
    return f"{printable(str(directory), 4096)}: there is no such directory"


def _run_of(directory: Path) -> ControlDirectory | None:
    """The run in whose directory the checkpoint's root lies; None if the root is elsewhere."""
    path = directory.absolute().parent.parent
    try:
        return ControlDirectory.open(path) if (path / "run.json").is_file() else None
    except (OSError, ControlError):
        return None


RECORD = "read-back"
"""Not `.json`: it is about one copy, and is not a standing."""
SETTLE = 5.0
"""Seconds after a commit before it is read: a run that is over by then starts no process for it."""
NEWEST = 8
"""How many of the newest checkpoints it searches for one not read yet."""
REPLACEMENTS = 3
TRIES = 2
"""How often a checkpoint that the storage refuses to read is tried before it is left alone."""
AGAIN = 0.5
"""Seconds before a bad copy is read a second time."""
STEP = 0.25
"""Longest single sleep, in seconds, so that it soon notices that its trainer is gone."""
LONGEST = 15_000
"""Most characters in a message to its trainer: one packet holds them, whichever they are."""
PR_SET_PDEATHSIG = 1


class ReadBackRecord(msgspec.Struct, frozen=True, kw_only=True):
    """The result of reading one copy; replaced as a whole when it is read again."""

    checkpoint: str
    manifest: str
    """Digest of the manifest that it was compared with."""
    root: str
    """Where the copy lay: a copy of this record elsewhere proves nothing."""
    at: float
    node: str
    attempt: int
    bytes: int
    seconds: float
    problems: list[str] = []
    """Empty: every byte was right."""

    @property
    def sound(self) -> bool:
        return not self.problems


def last_read_back(root: CheckpointRoot, name: CheckpointName) -> ReadBackRecord | None:
    """What is recorded of the copy in this root; None if it was not read, or its record cannot be used."""
    try:
        raw = read_regular(RootBook(root.path).folder(str(name)) / RECORD, MAX_RECORD_BYTES)
        record = msgspec.json.decode(raw, type=ReadBackRecord)
    except (OSError, msgspec.DecodeError, HoldfastError):
        return None
    return record if record.root == str(root.path.absolute()) else None


def record_read_back(root: CheckpointRoot, name: CheckpointName, record: ReadBackRecord) -> None:
    path = RootBook(root.path).folder(str(name)) / RECORD
    make_dirs(path.parent)
    replace_atomic(path, msgspec.json.encode(record))


# --- the trainer's end --------------------------------------------------------------------------------------


class ReadBackOrder(msgspec.Struct, frozen=True, kw_only=True):
    """Everything the process needs to know, given at its start."""

    control: str
    root: str
    epoch: int
    attempt: int
    rate: float
    """Bytes a second; 0: as fast as possible."""


class LookAgain(msgspec.Struct, frozen=True):
    """There is something to read."""


class ReadingTrouble(msgspec.Struct, frozen=True):
    """What a person should know, in words."""

    text: str


class ReadBack:
    """On rank 0. `committed` and `poll` never block and never raise."""

    def __init__(
        self,
        *,
        control: ControlDirectory,
        root: CheckpointRoot,
        epoch: int,
        attempt: int,
        rate: float,
        journal: JournalWriter,
        settle: float | None = None,
    ) -> None:
        self._order = ReadBackOrder(
            control=str(control.path), root=str(root.path.absolute()), epoch=epoch, attempt=attempt, rate=rate
        )
        self._log = control.attempt(attempt) / "read_back.log"
        self._journal = journal
        self._settle = SETTLE if settle is None else settle
        self._due: float | None = None
        self._child: Companion[Packets[ReadingTrouble]] | None = None
        self._started = 0

    @property
    def pid(self) -> int | None:
        return self._child.pid if self._child is not None else None

    def committed(self) -> None:
        """There is a new checkpoint."""
        if self._due is None:
            self._due = time.monotonic() + self._settle

    def hurry(self) -> None:
        """Retention is waiting for a result: read what was committed without letting it settle first."""
        self._due = time.monotonic()

    def poll(self) -> None:
        """Have what is due read; report what was found bad."""
        try:
            self._listen()
            if self._due is not None and time.monotonic() >= self._due:
                self._due = None
                self._ask()
        except Exception as error:  # noqa: BLE001 - whatever it is, training goes on without it
            self._give_up(f"checkpoints are not read back: {type(error).__name__}: {error}")

    def _ask(self) -> None:
        if self._child is not None and self._child.code is not None:
            self._hang_up()
        if self._child is None:
            if self._started > REPLACEMENTS:
                return
            self._start()
        if self._child is not None and self._child.connected:
            # It may have enough requests, or be dead: the next call will show.
            with contextlib.suppress(Gone):
                self._child.line.send(LookAgain())

    def _start(self) -> None:
        self._started += 1
        if self._started > REPLACEMENTS:
            self._give_up(
                f"the process that reads checkpoints back ended {REPLACEMENTS} times (see {self._log}); "
                "none is read back until the next start"
            )
            return
        self._child = Companion(self._spawn, Packets.pair(ReadingTrouble))

    def _spawn(self, descriptor: int) -> subprocess.Popen[bytes]:
        order = msgspec.json.encode(self._order).decode()
        arguments = [order, str(descriptor), str(os.getpid())]
        return start_child("holdfast.checkpoint.read_back", *arguments, passed=[descriptor], log=self._log)

    def _listen(self) -> None:
        while self._child is not None and self._child.connected:
            try:
                trouble = self._child.line.receive()
            except Gone:
                self._child.hang_up()
                return
            if trouble is None:
                return
            log.error("holdfast: %s", trouble.text)

    def _give_up(self, why: str) -> None:
        self._started = REPLACEMENTS + 1
        self._hang_up()
        self._journal.write(Warned(message=why))
        log.warning("holdfast: %s", why)

    def _hang_up(self) -> None:
        child, self._child = self._child, None
        if child is not None:
            child.kill(1.0)

    def close(self) -> None:
        """The run ends, and the reading with it; the next attempt reads what was not read yet."""
        with contextlib.suppress(OSError):
            self._listen()
        self._hang_up()


# --- the process --------------------------------------------------------------------------------------------


class _OverError(Exception):
    """The trainer is gone, or a newer attempt holds the run."""


class Reader:
    def __init__(self, order: ReadBackOrder, line: Packets[LookAgain], parent: int) -> None:
        self._order = order
        self._line = line
        self._parent = parent
        self._control = ControlDirectory.open(Path(order.control))
        self._root = CheckpointRoot(Path(order.root))
        self._fence = Fence(self._control, order.epoch)
        self._journal = JournalWriter(self._control.journal, "read-back", order.attempt)
        self._tries: dict[CheckpointName, int] = {}
        self._ours: dict[CheckpointName, bool] = {}
        self._owed = 0.0
        """Seconds by which the reading is ahead of its rate."""
        self._since = time.monotonic()

    def run(self) -> None:
        with contextlib.suppress(_OverError, LeaseLostError):
            while True:
                self._await_word()
                while (name := self._next()) is not None:
                    self._read(name)

    def _await_word(self) -> None:
        while True:
            try:
                message = self._line.receive(4 * STEP)
            except Gone:
                raise _OverError from None
            self._check()
            if message is not None:
                return

    def _check(self) -> None:
        if os.getppid() != self._parent:
            raise _OverError

    def _next(self) -> CheckpointName | None:
        """The newest checkpoint that this run saved and nobody has read back."""
        mine = (name for name in self._root.names() if self._is_ours(name))
        for name in itertools.islice(mine, NEWEST):
            if self._tries.get(name, 0) < TRIES and last_read_back(self._root, name) is None:
                return name
        return None

    def _is_ours(self, name: CheckpointName) -> bool:
        """Whether this run recorded its commit; another run under the same root reads its own."""
        if name not in self._ours:
            attempts = reversed(attempt_numbers(self._control))
            self._ours[name] = any(
                find_commit(self._control, number, name.step, name.id) is not None for number in attempts
            )
        return self._ours[name]

    def _read(self, name: CheckpointName) -> None:
        self._fence.check("read checkpoints back")
        self._tries[name] = self._tries.get(name, 0) + 1
        directory, started = self._root.committed(name), time.monotonic()
        try:
            with reading(directory) as there:  # also while recording: a deletion takes the records too
                found = self._compare(name, directory) if there else None
                if found is not None:
                    self._record(name, found, time.monotonic() - started)
        except OSError as error:
            if directory.is_dir():
                self._warn(f"{name} could not be read back: {error}")

    def _compare(self, name: CheckpointName, directory: Path) -> Inspection | None:
        """What is wrong with it, once that is certain; None if it cannot be said."""
        found = verify(directory, progress=self._pace, cold=True)
        first = [str(problem) for problem in found.problems]
        if first and directory.is_dir():
            self._sleep(AGAIN)
            found = verify(directory, progress=self._pace, cold=True)
        if not directory.is_dir():
            return None  # retention has taken it away meanwhile
        if first and found.sound:
            self._warn(
                f"{name} was read back twice: the first time it was bad ({first[0]}), the second time all "
                "was right. Something between the storage and this node's memory is not reliable"
            )
        if any(problem.reason is Reason.UNREADABLE for problem in found.problems):
            self._warn(f"{name} could not be read back: {found.problems[0]}")
            return None
        return found

    def _record(self, name: CheckpointName, found: Inspection, seconds: float) -> None:
        problems = [str(problem) for problem in found.problems[:5]]
        record = ReadBackRecord(
            checkpoint=str(name),
            manifest=found.manifest_digest or "",
            root=self._order.root,
            at=time.time(),
            node=platform.node(),
            attempt=self._order.attempt,
            bytes=found.bytes_checked,
            seconds=round(seconds, 3),
            problems=problems,
        )
        self._fence.check("record what was read back")
        self._tries[name] = TRIES
        if problems:
            self._journal.write(
                CopyQuarantined(checkpoint=str(name), node=record.node, kind="global", reasons=problems)
            )
        else:
            self._journal.write(
                CopyReadBack(checkpoint=str(name), step=name.step, bytes=record.bytes, seconds=record.seconds)
            )
        try:  # after the journal: this process may be ended at any moment; without a record it is read again
            record_read_back(self._root, name, record)
        except OSError as error:
            if self._root.committed(name).is_dir():
                self._warn(f"{name} was read back, but that could not be recorded: {error}")
        if not problems:
            return
        self._tell(
            f"{name} was read back, twice, and is bad: {problems[0]}. It stays as evidence and does not "
            f"count for retention; look at {self._root.path} and the storage below it"
        )

    def _pace(self, count: int) -> None:
        """Called for each piece read: keeps to the rate, and stops when the trainer is gone."""
        now = time.monotonic()
        if self._order.rate > 0:
            self._owed = max(0.0, self._owed - (now - self._since)) + count / self._order.rate
        self._since = now
        self._check()
        if self._owed > 0.01:
            self._sleep(self._owed)

    def _sleep(self, seconds: float) -> None:
        end = time.monotonic() + seconds
        while (left := end - time.monotonic()) > 0:
            time.sleep(min(left, STEP))
            self._check()

    def _warn(self, text: str) -> None:
        self._journal.write(Warned(message=text))
        self._tell(text)

    def _tell(self, text: str) -> None:
        with contextlib.suppress(Gone):
            self._line.send(ReadingTrouble(text[:LONGEST]))


def _step_back(parent: int) -> None:
    """Take the lowest priority for processor and storage, and end when the trainer ends."""
    libc = ctypes.CDLL(None, use_errno=True)
    libc.prctl(PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)
    if os.getppid() != parent:
        raise SystemExit(0)  # the trainer ended before that was arranged
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    step_aside(LAST)


def main() -> int:
    """`python -m holdfast.checkpoint.read_back <order> <socket> <parent>`: started by ReadBack only."""
    parent = int(sys.argv[3])
    _step_back(parent)
    order = msgspec.json.decode(sys.argv[1].encode(), type=ReadBackOrder)
    Reader(order, Packets.at(int(sys.argv[2]), LookAgain), parent).run()
    return 0


if __name__ == "__main__":
    sys.exit(main())
