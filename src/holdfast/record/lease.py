"""The lease: which attempt may act on a run, whether somebody holds it, and which writers it waits for.

Guarantee: at most one epoch is current, epochs only rise, and whoever acts under an older one is refused.

* An epoch is claimed by creating `lease/<epoch>.claim` exclusively, so exactly one claimant gets it.
* Its holder renews `lease/<epoch>.beat`, in place: a renewal needs neither a new file nor more space. A
  claimant takes the next epoch only if the holder released it, is the same launch, is known dead, or let a
  whole time-to-live pass *on the claimant's own clock* without a new beat. Clocks of different nodes are
  never compared; a wall clock can only cause a claim to be refused.
* A holder that cannot renew (the disk is full, fails, or does not answer) has not lost anything yet: as long
  as nobody has claimed a higher epoch it goes on, says so, and tries again. If somebody has, everything that
  it does is refused by the fence, and it learns that as soon as it can read.
* `Fence.guard` wraps every commit, deletion, pointer move and decision. It holds `lease/<epoch>.lock` while
  it checks the epoch and acts; claiming takes the lock of the epoch that it ends, so no claim can fall
  between the check and the act. The claim leaves its number in that lock file, because a network file system
  refreshes a file that is locked, while its listing of a directory may be old.
  A process that is stopped while it holds that lock cannot block a claim for ever: after a time-to-live
  the claim goes ahead, and the new epoch has a lock of its own. All that the stopped process can then still
  do is finish one rename for an attempt that is off the lineage by then (see lineage.py), which no resume
  picks up.

A snapshot that was fully staged outlives its trainer: the writer process commits it. But once a newer epoch
is claimed, the fence refuses that commit. So whoever claims the next epoch first lets the writer of the
ending one finish, for a bounded time.

The sign of life is a lock on `writing/<epoch>.lock`, held for as long as the writer lives; the kernel
releases it however the writer ends. The trainer takes the lock and sends it to the writer, so it is held from
the moment the writer process exists, however long that takes to start. The file says what the writer is doing
or is about to be handed: the trainer writes that before it stages anything, and the writer clears it when it
is done. A writer whose trainer is gone takes up what it was handed within moments, or exits. So nobody waits
for a writer that stays idle.

Writers of different ranks reach each other only through files. A writer that gives up a save says so here, in
`writing/<epoch>.<rank>.failed`, so that the others need not wait for it until their deadline. The next
attempt does not wait for what is committed in the local tier and on its way to the checkpoint root (a drain).
Later saves go on beside a drain, so each drain is given up by a file of its own.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import re
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated

import msgspec

from holdfast.base import (
    Bounded,
    Waiting,
    critical,
    explain_os_error,
    make_dirs,
    overwrite,
    printable,
    read_regular,
    replace_atomic,
    stretch,
)
from holdfast.errors import ControlError, LeaseLostError, RunIsLiveError, StorageError, UsageError
from holdfast.process import Holder, Waking, is_gone, is_here, this_process
from holdfast.record.directory import (
    MAX_RECORD_BYTES,
    RUN_RECORD,
    ControlDirectory,
    create_record,
    list_names,
    read_record,
)

log = logging.getLogger("holdfast.control")

BEATS_PER_TTL = 5
BEAT_BYTES = 128
"""The size of a beat's file. It never changes, so that a renewal needs no space."""
LATE = 0.6
"""The share of the time-to-live after which a renewal that has not come back is reported, and a claim that is
gone counts as lost."""
SAID_AGAIN, SAID_AT_LEAST = 30.0, 3600.0
"""Seconds after which trouble is reported again, doubling each time, and the most between two reports."""
MAX_TTL = 31_536_000.0
"""A year, as in the settings; anything longer in a claim is damage."""
CLAIM_PATIENCE = 3
"""After how many times-to-live a claim that keeps losing races gives up."""
HANDOVER = 120.0
"""For how many seconds a claim lets the writer of the epoch that it ends go on."""


def _untold(waiting: Waiting) -> None:
    del waiting


_CLAIM_NAME = re.compile(r"([0-9]{8,18})\.claim")


class Claim(msgspec.Struct, frozen=True, kw_only=True):
    epoch: Annotated[int, msgspec.Meta(ge=1)]
    owner: str
    """Launch id. Attempts of one launch follow each other without waiting."""
    holder: Holder
    ttl: Annotated[float, msgspec.Meta(gt=0, le=MAX_TTL)]
    at: float
    evidence: str


class LeaseBeat(msgspec.Struct, frozen=True, kw_only=True):
    count: int
    at: float
    released: bool = False


def current_epoch(control: ControlDirectory) -> int:
    """The highest epoch ever claimed; 0 if none."""
    matches = (_CLAIM_NAME.fullmatch(name) for name in list_names(control.lease))
    return max((int(match[1]) for match in matches if match), default=0)


def _claim_path(control: ControlDirectory, epoch: int) -> Path:
    return control.lease / f"{epoch:08d}.claim"


def _beat_path(control: ControlDirectory, epoch: int) -> Path:
    return control.lease / f"{epoch:08d}.beat"


def _lock_path(control: ControlDirectory, epoch: int) -> Path:
    return control.lease / f"{epoch:08d}.lock"


def read_claim(control: ControlDirectory, epoch: int) -> Claim | None:
    path = _claim_path(control, epoch)
    found = read_record(path, Claim)
    if found is not None and found.epoch != epoch:
        raise ControlError(
            f"{path} says epoch {found.epoch}. The run's memory is damaged; restore the file from a backup "
            "or use another run directory"
        )
    return found


def read_beat(control: ControlDirectory, epoch: int) -> LeaseBeat | None:
    path = _beat_path(control, epoch)
    with contextlib.suppress(ControlError):  # it may have been read while it was being written
        return read_record(path, LeaseBeat)
    return read_record(path, LeaseBeat)


def claim(
    control: ControlDirectory,
    owner: str,
    ttl: float,
    *,
    handover: float = HANDOVER,
    waiting: Callable[[Waiting], None] = _untold,
) -> Claim:
    """Take the next epoch, waiting at most about one time-to-live of the present holder.

    Before that, a writer process of the present epoch may finish what it was handed, for `handover` seconds.
    `waiting` is called at every look with what is being waited for.

    Raises RunIsLiveError when the present holder is seen to be alive, or when others keep winning the
    race for CLAIM_PATIENCE times-to-live.
    """
    if not 0 < ttl <= MAX_TTL:
        raise UsageError(f"a lease's time-to-live must be above 0 and at most {MAX_TTL:g} s, not {ttl!r}")
    started = time.monotonic()
    patience = CLAIM_PATIENCE * ttl
    epoch = current_epoch(control)
    while True:
        evidence: str | None = "first claim"
        lock_timeout = ttl
        if epoch > 0:
            held = read_claim(control, epoch)
            if held is None:
                raise ControlError(
                    f"{_claim_path(control, epoch)} vanished while it was read. The lease directory must not "
                    "be changed by hand while a launcher runs; start again"
                )
            patience = max(patience, CLAIM_PATIENCE * held.ttl)
            lock_timeout = held.ttl
            evidence = _why_free(control, held, owner, waiting)
            if evidence is not None:
                looked = time.monotonic()
                if seen := let_writer_finish(control, epoch, handover, waiting):
                    evidence = f"{evidence}; {seen}"
                patience += time.monotonic() - looked  # this wait was not caused by other claimants
        if evidence is not None:
            wanted = Claim(
                epoch=epoch + 1, owner=owner, holder=this_process(), ttl=ttl, at=time.time(),
                evidence=evidence,
            )  # fmt: skip
            with _epoch_lock(control, epoch, lock_timeout, insist=False) as lock:
                if create_record(_claim_path(control, wanted.epoch), wanted):
                    _mark_superseded(lock, wanted.epoch)
                    return wanted
        # Somebody else took that epoch: look again. A listing may be old, but epoch + 1 does exist.
        epoch = max(current_epoch(control), epoch + 1)
        if time.monotonic() - started > patience:
            raise RunIsLiveError(
                f"run {control.run_id} in {control.path}: other launchers took every epoch up to {epoch} "
                f"for {patience:g} s. Leave the run to one launcher, or use another run directory"
            )


def _why_free(
    control: ControlDirectory, held: Claim, owner: str, waiting: Callable[[Waiting], None]
) -> str | None:
    """Evidence that the holder no longer holds its epoch; waits for a lapse, raises if it is alive.

    None if another claim came first. A beat that cannot be understood is evidence of nothing: then, as if
    there were none, only a change within the time-to-live shows life.
    """
    epoch = held.epoch
    dead = f"holder of epoch {epoch}, {held.holder.describe()}, is dead"
    released = f"epoch {epoch} was released"
    first = _raw_beat(control, epoch)
    beat = _decode_beat(first)
    if beat is not None and beat.released:
        return released
    if held.owner == owner:
        return f"epoch {epoch} belongs to the same launch"
    if is_gone(held.holder):
        return dead
    if beat is not None and is_here(held.holder):
        age = time.time() - beat.at  # outside these bounds the wall clock was set: then only watching tells
        if 0 <= age < held.ttl:
            raise _live(control, held, f"alive, last renewed {age:.1f} s ago")
    what = f"the lease of {held.holder.describe()} to run out, in case that launcher is dead"
    deadline = time.monotonic() + held.ttl
    while True:
        waiting(Waiting(what, held.ttl - (deadline - time.monotonic()), held.ttl))
        # Checked before the look: a process that was stopped past the deadline must look once more.
        last_look = time.monotonic() >= deadline
        now = _raw_beat(control, epoch)
        if now is not None and now != first:
            beat = _decode_beat(now)
            if beat is not None and beat.released:
                return released
            raise _live(control, held, "it renewed the lease while we watched")
        if is_gone(held.holder):
            return dead
        if current_epoch(control) != epoch:
            return None
        if last_look:
            return f"epoch {epoch} lapsed: no renewal for {held.ttl:g} s"
        time.sleep(stretch(min(0.2, held.ttl / 20)))


def _raw_beat(control: ControlDirectory, epoch: int) -> bytes | None:
    path = _beat_path(control, epoch)
    try:
        return read_regular(path, MAX_RECORD_BYTES)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise explain_os_error(error, "read", path) from error


def _decode_beat(raw: bytes | None) -> LeaseBeat | None:
    try:
        return None if raw is None else msgspec.json.decode(raw, type=LeaseBeat)
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError):
        return None


def _live(control: ControlDirectory, held: Claim, why: str) -> RunIsLiveError:
    return RunIsLiveError(
        f"run {control.run_id} in {control.path} is held by {held.holder.describe()} "
        f"(epoch {held.epoch}, {why}). Stop it first, or use another run directory"
    )


@contextlib.contextmanager
def _epoch_lock(control: ControlDirectory, epoch: int, timeout: float, *, insist: bool) -> Iterator[int]:
    """Hold an epoch's lock file; after `timeout` either raise (`insist`) or go ahead without it."""
    path = _lock_path(control, epoch)
    try:
        if not insist:
            make_dirs(control.lease)  # only a claim may create it: a guard must not revive a deleted run
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o644)
    except OSError as error:
        raise explain_os_error(error, "open", path) from error
    try:
        locked = _lock(fd, path, timeout)
        if not locked and insist:
            raise StorageError(
                f"{path} stayed locked for {timeout:g} s. Another process of this attempt is stopped or "
                "stuck in the middle of a commit, deletion, pointer move or decision; end it and start again"
            )
        if not locked:
            log.warning("holdfast: %s stayed locked for %g s; claiming without it", path, timeout)
        try:
            yield fd
        finally:
            if locked:
                # Closing alone would not do: a child forked meanwhile shares the lock.
                fcntl.flock(fd, fcntl.LOCK_UN)
    finally:
        os.close(fd)


def _lock(fd: int, path: Path, timeout: float) -> bool:
    deadline = time.monotonic() + timeout
    while True:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        except BlockingIOError:
            if time.monotonic() >= deadline:
                return False
        except OSError as error:
            raise explain_os_error(error, "lock", path) from error
        time.sleep(stretch(min(0.01, timeout)))


def _mark_superseded(lock: int, by: int) -> None:
    try:
        os.pwrite(lock, f"{by:08d}\n".encode(), 0)
    except OSError as error:
        # The claim stands without it; only a node with an old listing would learn of the claim later.
        log.warning("holdfast: could not mark the lock of the epoch before %d: %s", by, error)


def _superseded_by(lock: int) -> int:
    return _epoch_in(os.pread(lock, 32, 0))


def _epoch_in(mark: bytes) -> int:
    text = mark.strip()
    return int(text) if text.isdigit() else 0


class Fence:
    """What an attempt acts through: every change to shared state is made inside `guard`.

    Keep what is done inside short (one rename, one small file): a claim waits for it, at most for one
    time-to-live. Guards do not nest.
    """

    def __init__(self, control: ControlDirectory, epoch: int, *, timeout: float = 30.0) -> None:
        self._control = control
        self.epoch = epoch
        self._timeout = timeout
        self._claim = read_claim(control, epoch)

    def check(self, action: str) -> None:
        """Raise LeaseLostError if a newer epoch exists, or if ours is no longer the one we started with."""
        self._refuse_if_newer(action, current_epoch(self._control))
        found = read_claim(self._control, self.epoch)
        if self._claim is None:
            self._claim = found
        if found is None or found != self._claim:
            state = "is gone" if found is None else f"now names {found.holder.describe()}"
            raise LeaseLostError(
                f"refused to {action}: {_claim_path(self._control, self.epoch)} {state}. The run directory "
                "was emptied or replaced under this attempt; nothing was changed"
            )

    def _refuse_if_newer(self, action: str, newest: int) -> None:
        if newest > self.epoch:
            raise LeaseLostError(
                f"refused to {action}: this attempt holds epoch {self.epoch}, but epoch {newest} exists in "
                f"{self._control.lease}. A newer attempt runs; nothing was changed"
            )

    @contextlib.contextmanager
    def guard(self, action: str) -> Iterator[None]:
        """Check and act, with no claim in between."""
        lock_of = _epoch_lock(self._control, self.epoch, self._timeout, insist=True)
        with critical(at_most=self._timeout), lock_of as lock:
            self._refuse_if_newer(action, _superseded_by(lock))
            self.check(action)
            yield


class LeaseKeeper:
    """Renews a claim from a thread until released, and says what became of it.

    `on_lost` is called once, from a thread of the keeper, when a newer epoch appears, or when the claim was
    replaced or stays gone: the caller ends its workers. `on_trouble` gets a sentence when the claim cannot be
    renewed, again at growing intervals while that lasts, and when it is over; nobody has to end because of
    that. A second thread watches the first, which may hang with its file system.
    """

    def __init__(
        self,
        control: ControlDirectory,
        held: Claim,
        on_lost: Callable[[str], None],
        on_trouble: Callable[[str], None] | None = None,
    ) -> None:
        self._control = control
        self._claim = held
        self._on_lost = on_lost
        self._on_trouble = on_trouble or (lambda told: log.error("holdfast: %s", told))
        self._stop = threading.Event()
        self._over = threading.Lock()
        """Taken for good by whatever ends this first: `release` or a loss."""
        self._count = 0
        self._trouble = ""
        """Why the last renewal failed; empty if it did not."""
        self._renewed = time.monotonic()
        self._recovered = 0.0
        """Seconds without a renewal before the last one, if they are to be reported."""
        self._gone: float | None = None
        """Since when the claim's file has been missing."""
        try:
            self._renew()
        except OSError as error:
            raise explain_os_error(error, "renew", _beat_path(control, held.epoch)) from error
        self._thread = threading.Thread(target=self._keep, name="holdfast-lease", daemon=True)
        self._watcher = threading.Thread(target=self._watch, name="holdfast-lease-watch", daemon=True)
        self._thread.start()
        self._watcher.start()

    def _renew(self) -> None:
        """Renew once; LeaseLostError if the epoch is no longer ours."""
        self._require_ours()
        started = time.monotonic()  # before the write: a claimant may start its watch as soon as it sees it
        self._beat(released=False)
        silent, self._renewed = started - self._renewed, started
        if silent > self._claim.ttl:
            self._recovered = silent
        self._trouble, self._gone = "", None

    def _require_ours(self) -> None:
        mine = self._claim.epoch
        newest = max(current_epoch(self._control), self._marked_by())
        if newest > mine:
            raise LeaseLostError(f"epoch {newest} was claimed over our {mine}")
        found = read_claim(self._control, mine)
        path = _claim_path(self._control, mine)
        if found is None:
            raise ControlError(f"{path} is gone")  # perhaps only for now
        if found != self._claim:
            raise LeaseLostError(f"{path} now names {found.holder.describe()}")

    def _marked_by(self) -> int:
        """The epoch claimed over ours, according to the lock file: a directory listing may be older."""
        path = _lock_path(self._control, self._claim.epoch)
        try:
            return _epoch_in(read_regular(path, MAX_RECORD_BYTES))
        except FileNotFoundError:  # nobody has acted under this epoch yet
            return 0

    def _beat(self, *, released: bool) -> None:
        self._count += 1
        beat = LeaseBeat(count=self._count, at=time.time(), released=released)
        raw = msgspec.json.encode(beat).ljust(BEAT_BYTES - 1) + b"\n"
        overwrite(_beat_path(self._control, self._claim.epoch), raw)

    def _keep(self) -> None:
        while not self._stop.wait(self._claim.ttl / BEATS_PER_TTL):
            try:
                self._renew()
            except LeaseLostError as error:
                self._lose(str(error))
            except (OSError, ControlError) as error:
                self._trouble = str(error)
                self._mind_a_claim_that_is_gone()
            except Exception as error:  # a bug of ours is no reason to end a healthy run
                log.exception("holdfast: renewing epoch %d failed", self._claim.epoch)
                self._trouble = f"renewing failed unexpectedly: {error!r}"

    def _mind_a_claim_that_is_gone(self) -> None:
        """A lease that stays missing, while the run directory is there, was taken away by somebody.

        If the whole directory is missing, its file system most likely is too, and nobody can have claimed
        anything.
        """
        path = _claim_path(self._control, self._claim.epoch)
        try:
            if path.exists() or not (self._control.path / RUN_RECORD).exists():
                self._gone = None
                return
        except OSError:
            return
        now = time.monotonic()
        self._gone = self._gone or now
        if now - self._gone > LATE * self._claim.ttl:
            self._lose(f"no renewal for {now - self._renewed:.1f} s: {path} is gone")

    def _watch(self) -> None:
        told, since, said = 0, 0.0, 0.0
        waking, pause = Waking(), self._claim.ttl / 20
        while not self._stop.wait(pause):
            if waking.missed() > pause + self._claim.ttl / 2:
                continue  # this process was stopped itself: the renewal has had no time either
            now, silent = time.monotonic(), time.monotonic() - self._renewed
            late, recovered = silent > LATE * self._claim.ttl, self._recovered
            if self._trouble or late:
                since = since or self._renewed
                if told == 0 or now - said > min(SAID_AGAIN * 2 ** (told - 1), SAID_AT_LEAST):
                    told, said = told + 1, now
                    self._say(self._in_words(silent))
            elif told or recovered:
                silent = max(now - since if told else 0.0, recovered)
                told, since, self._recovered = 0, 0.0, 0.0
                self._say(
                    f"the lease of epoch {self._claim.epoch} is renewed again, after {silent:.1f} s; nobody "
                    "has claimed the run meanwhile"
                )

    def _in_words(self, silent: float) -> str:
        why = self._trouble or "the file system does not answer"
        return (
            f"the lease of epoch {self._claim.epoch} has not been renewed for {silent:.1f} s: {why}. Nobody "
            "has claimed the run, as far as can be seen, so it goes on, and renewing will be retried. Look "
            f"at the storage under {self._control.path}: saves and the journal need it too"
        )

    def _say(self, told: str) -> None:
        try:
            self._on_trouble(told)
        except Exception:
            log.exception("holdfast: %s; and reporting it failed", told)

    def _lose(self, why: str) -> None:
        if not self._over.acquire(blocking=False):
            return
        self._stop.set()
        try:
            self._on_lost(why)
        except Exception:
            log.exception("holdfast: the lease was lost (%s) and its handler failed", why)

    def stop(self) -> None:
        """Stop renewing without releasing, because the same launch already holds the next epoch."""
        self._stop.set()
        self._over.acquire(blocking=False)

    def release(self) -> None:
        """Stop renewing and say so, so that the next claim need not wait. Writes nothing after a loss."""
        self._stop.set()
        if not self._over.acquire(blocking=False):
            return
        last = Bounded(self._release, "release")
        if not last.ended(self._claim.ttl):
            log.warning(
                "holdfast: could not release epoch %d: the file system did not answer for %g s",
                self._claim.epoch,
                self._claim.ttl,
            )

    def _release(self) -> None:
        self._thread.join()
        try:
            self._require_ours()
            self._beat(released=True)
        except (OSError, ControlError, LeaseLostError) as error:
            log.warning("holdfast: could not release epoch %d: %s", self._claim.epoch, error)


# Whether somebody holds a run, by a single look, without claiming anything or waiting for anybody.
#
# A look can be wrong: a holder on another machine that died a moment ago still counts as alive until its
# time-to-live has passed, and one whose clock is further behind than that counts as dead. Only `lease.claim`,
# which relies on one clock alone, decides who may act.


COMMANDS = ("operator-", "gc-")
"""Prefixes of lease owners that are not launches, but commands that hold it for a moment."""


class LeaseState(msgspec.Struct, frozen=True, kw_only=True):
    epoch: int
    holder: str
    alive: bool
    detail: str
    """What this rests on."""


class Holding(msgspec.Struct, frozen=True):
    """The newest claim, and what is known about its holder."""

    claim: Claim
    lease: LeaseState

    @property
    def is_launch(self) -> bool:
        """Whether the run itself is alive, and not only a command that holds it for a moment."""
        return self.lease.alive and not self.claim.owner.startswith(COMMANDS)


def newest_claim(control: ControlDirectory) -> Claim | None:
    epoch = current_epoch(control)
    return read_claim(control, epoch) if epoch else None


def lease_state(control: ControlDirectory, held: Claim, now: float) -> LeaseState:
    """Whether the holder of a claim is alive, as far as can be seen from here."""
    beat = read_beat(control, held.epoch)
    age = now - (beat.at if beat is not None else held.at)
    if beat is not None and beat.released:
        alive, detail = False, "released"
    elif is_gone(held.holder):
        alive, detail = False, "its process is gone"
    elif age >= held.ttl:
        alive, detail = False, f"no sign of life for {age:.0f} s"
    else:
        alive, detail = True, f"renewed {max(0.0, age):.1f} s ago"
    return LeaseState(epoch=held.epoch, holder=printable(held.holder.describe()), alive=alive, detail=detail)


def who_holds(control: ControlDirectory) -> Holding | None:
    """Who claimed the run last; None if nobody ever did."""
    held = newest_claim(control)
    return None if held is None else Holding(held, lease_state(control, held, time.time()))


# --- the writers of an epoch that ends ----------------------------------------------------------------------

IDLE_PATIENCE = 2.0
"""A writer that has had nothing to do for this long while being watched will not get anything to do."""
POLL = 0.02
LOCK_PATIENCE = 30.0
"""How many seconds the writer that replaces a dead one waits for the kernel to release its lock."""


class GivenUp(msgspec.Struct, frozen=True, kw_only=True):
    """A rank does nothing more for its saves up to this one: they are done, or failed for this reason."""

    serial: int
    why: str


def give_up(run_dir: Path, epoch: int, rank: int, serial: int, why: str, *, drain: bool = False) -> None:
    """Say so if at all possible: where it cannot be written, the others find out at their deadline."""
    path = _given_up_path(run_dir, epoch, rank, drain=serial if drain else None)
    with contextlib.suppress(OSError):
        make_dirs(path.parent)
        replace_atomic(path, msgspec.json.encode(GivenUp(serial=serial, why=why)), durable=False)


def given_up(run_dir: Path, epoch: int, rank: int, serial: int, *, drain: bool = False) -> str:
    """Why a rank has given up that save, or its drain; empty if nothing says that it has."""
    try:
        path = _given_up_path(run_dir, epoch, rank, drain=serial if drain else None)
        raw = read_regular(path, MAX_RECORD_BYTES)
        found = msgspec.json.decode(raw, type=GivenUp)
    except (OSError, msgspec.DecodeError):
        return ""
    return found.why if found.serial >= serial else ""


def is_busy(run_dir: Path, epoch: int, *, drain: bool = False) -> bool:
    """Whether the writer of rank 0 lives and has something to do; for a drain, which does not show, that it
    lives."""
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

    None if it cannot be taken now: then the writer has to take it itself.
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
    with contextlib.suppress(OSError):  # then the next attempt may not wait for a starting writer: no more
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
    with contextlib.suppress(OSError):  # a full disk: then the next attempt does not wait, nothing worse
        os.ftruncate(fd, 0)
        os.pwrite(fd, what.encode(), 0)


def _said(fd: int) -> str:
    with contextlib.suppress(OSError):
        return os.pread(fd, 256, 0).decode(errors="replace")
    return ""


class Writing:
    """The lock, as held by the writer process of rank 0."""

    def __init__(self, control: ControlDirectory, epoch: int, locked: int | None = None) -> None:
        """`locked`: the lock if the trainer has taken it; otherwise it is taken here."""
        self._path = _path(control.path, epoch)
        if locked is not None:
            os.set_inheritable(locked, False)
            self._fd = locked
            return
        make_dirs(self._path.parent)
        self._fd = _open(self._path)
        # The lock of a dead writer is free; that of one which is still dying will be, in a moment.
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
        """Say what is being done. What the trainer announces meanwhile stays there until it is done too."""
        if not _said(self._fd):
            _say(self._fd, what)
        try:
            yield
        finally:
            if _said(self._fd) == what:
                _say(self._fd, "")

    def close(self) -> None:
        """Nothing was left undone: remove the file, so that nobody needs to look at it."""
        self._path.unlink(missing_ok=True)
        os.close(self._fd)


def let_writer_finish(
    control: ControlDirectory,
    epoch: int,
    timeout: float,
    waiting: Callable[[Waiting], None] | None = None,
) -> str:
    """Wait until the writer of an epoch is done or gone, at most `timeout`. Returns what was seen of it."""
    path = _path(control.path, epoch)
    try:
        fd = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
    except OSError:
        return ""  # there is no writer, or nothing that can be asked
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
