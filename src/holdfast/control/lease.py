"""The lease: which attempt may act on a run.

Guarantee: at most one epoch is current, epochs only rise, and whoever acts under an older one is refused.

* An epoch is claimed by creating `lease/<epoch>.claim` exclusively, so exactly one claimant gets it.
* Its holder renews `lease/<epoch>.beat`. A claimant takes the next epoch only if the holder released it,
  is the same launch, is known dead, or let a whole time-to-live pass *on the claimant's own clock* without
  a new beat; clocks of different nodes are never compared.
* `Fence.guard` wraps every commit, deletion, pointer move and decision. It holds `lease/fence.lock` while
  it checks the epoch and acts; claiming takes the same lock, so no claim falls between check and act.
  A process that is stopped while it holds that lock cannot block a claim for ever: after a time-to-live
  the claim goes ahead. What the stopped process may then still do is finish one rename of an attempt that
  is off the lineage by then (see checkpoint/lineage.py), which no resume picks up.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec

from holdfast.control.directory import ControlDirectory, create_record, read_record
from holdfast.control.holder import Holder, is_gone, is_here, this_process
from holdfast.errors import ControlError, LeaseLostError, RunIsLiveError
from holdfast.files import explain_os_error, make_dirs, replace_atomic

log = logging.getLogger("holdfast.control")

BEATS_PER_TTL = 5


class Claim(msgspec.Struct, frozen=True, kw_only=True):
    epoch: int
    owner: str
    """Launch id: attempts of one launch follow each other without waiting."""
    holder: Holder
    ttl: float
    at: float
    evidence: str


class Beat(msgspec.Struct, frozen=True, kw_only=True):
    count: int
    at: float
    released: bool = False


def current_epoch(control: ControlDirectory) -> int:
    """The highest epoch ever claimed; 0 if none."""
    try:
        names = os.listdir(control.lease)
    except FileNotFoundError:
        return 0
    except OSError as error:
        raise explain_os_error(error, "read", control.lease) from error
    return max(
        (int(name[:-6]) for name in names if name.endswith(".claim") and name[:-6].isdigit()), default=0
    )


def _claim_path(control: ControlDirectory, epoch: int) -> Path:
    return control.lease / f"{epoch:08d}.claim"


def _beat_path(control: ControlDirectory, epoch: int) -> Path:
    return control.lease / f"{epoch:08d}.beat"


def read_claim(control: ControlDirectory, epoch: int) -> Claim | None:
    return read_record(_claim_path(control, epoch), Claim)


def read_beat(control: ControlDirectory, epoch: int) -> Beat | None:
    return read_record(_beat_path(control, epoch), Beat)


def claim(control: ControlDirectory, owner: str, ttl: float) -> Claim:
    """Take the next epoch, waiting at most about one time-to-live of the present holder.

    Raises RunIsLiveError when the present holder is seen to be alive.
    """
    while True:
        epoch = current_epoch(control)
        evidence = "first claim" if epoch == 0 else _why_free(control, epoch, owner)
        wanted = Claim(
            epoch=epoch + 1, owner=owner, holder=this_process(), ttl=ttl, at=time.time(), evidence=evidence
        )
        with _fence_lock(control, ttl, insist=False):
            if create_record(_claim_path(control, wanted.epoch), wanted):
                return wanted
        # Somebody else took that epoch; look again. This ends: the winner is live, or it has died.


def _why_free(control: ControlDirectory, epoch: int, owner: str) -> str:
    """Evidence that `epoch`'s holder no longer holds it; waits for a lapse, raises if it is alive."""
    held = read_claim(control, epoch)
    if held is None:
        raise ControlError(f"{_claim_path(control, epoch)} vanished while it was read")
    first = read_beat(control, epoch)
    if first is not None and first.released:
        return f"epoch {epoch} was released"
    if held.owner == owner:
        return f"epoch {epoch} belongs to the same launch"
    if is_gone(held.holder):
        return f"holder of epoch {epoch}, {held.holder.describe()}, is dead"
    if is_here(held.holder) and first is not None and time.time() - first.at < held.ttl:
        raise _live(control, held, f"alive, last renewed {time.time() - first.at:.1f} s ago")
    deadline = time.monotonic() + held.ttl
    while time.monotonic() < deadline:
        time.sleep(min(0.2, held.ttl / 20))
        now = read_beat(control, epoch)
        if now is not None and now.released:
            return f"epoch {epoch} was released"
        if now != first:
            raise _live(control, held, "it renewed the lease while we watched")
        if is_gone(held.holder):
            return f"holder of epoch {epoch}, {held.holder.describe()}, is dead"
        if current_epoch(control) != epoch:
            return "another claim came first"  # the caller's exclusive create will fail and look again
    return f"epoch {epoch} lapsed: no renewal for {held.ttl:g} s"


def _live(control: ControlDirectory, held: Claim, why: str) -> RunIsLiveError:
    return RunIsLiveError(
        f"run {control.run_id} in {control.path} is held by {held.holder.describe()} "
        f"(epoch {held.epoch}, {why}). Stop it first, or use another run directory"
    )


@contextlib.contextmanager
def _fence_lock(control: ControlDirectory, timeout: float, *, insist: bool) -> Iterator[None]:
    """Hold `fence.lock`; after `timeout` either raise (`insist`) or go ahead without it."""
    path = control.lease / "fence.lock"
    try:
        make_dirs(control.lease)
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    except OSError as error:
        raise explain_os_error(error, "write", path) from error
    try:
        deadline = time.monotonic() + timeout
        while True:
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() >= deadline:
                    if insist:
                        raise ControlError(f"{path} stayed locked for {timeout:g} s") from None
                    log.warning("holdfast: %s stayed locked for %g s; claiming without it", path, timeout)
                    break
                time.sleep(0.01)
        yield
    finally:
        os.close(fd)


class Fence:
    """What an attempt acts through: every effect on shared state is made inside `guard`."""

    def __init__(self, control: ControlDirectory, epoch: int, *, timeout: float = 30.0) -> None:
        self._control = control
        self.epoch = epoch
        self._timeout = timeout

    def check(self, action: str) -> None:
        """Raise LeaseLostError if a newer epoch exists."""
        newest = current_epoch(self._control)
        if newest != self.epoch:
            raise LeaseLostError(
                f"refused to {action}: this attempt holds epoch {self.epoch}, but epoch {newest} exists in "
                f"{self._control.lease}. A newer attempt runs; nothing was changed"
            )

    @contextlib.contextmanager
    def guard(self, action: str) -> Iterator[None]:
        """Check and act with no claim in between."""
        with _fence_lock(self._control, self._timeout, insist=True):
            self.check(action)
            yield


class LeaseKeeper:
    """Renews a claim from a thread until released, and says when it no longer can.

    `on_lost` is called once, from that thread, when a newer epoch appears or when no renewal succeeded
    for 60 % of the time-to-live, so that the caller can end its workers before the lease lapses.
    """

    def __init__(self, control: ControlDirectory, held: Claim, on_lost: Callable[[str], None]) -> None:
        self._control = control
        self._claim = held
        self._on_lost = on_lost
        self._stop = threading.Event()
        self._count = 0
        self._beat(released=False)
        self._thread = threading.Thread(target=self._keep, name="holdfast-lease", daemon=True)
        self._thread.start()

    def _beat(self, *, released: bool) -> None:
        self._count += 1
        beat = Beat(count=self._count, at=time.time(), released=released)
        replace_atomic(_beat_path(self._control, self._claim.epoch), msgspec.json.encode(beat) + b"\n")

    def _keep(self) -> None:
        last = time.monotonic()
        while not self._stop.wait(self._claim.ttl / BEATS_PER_TTL):
            try:
                newest = current_epoch(self._control)
                if newest != self._claim.epoch:
                    self._on_lost(f"epoch {newest} was claimed over our {self._claim.epoch}")
                    return
                if time.monotonic() - last > self._claim.ttl:
                    self._on_lost(f"this process did not run for {time.monotonic() - last:.1f} s")
                    return
                self._beat(released=False)
                last = time.monotonic()
            except (OSError, ControlError) as error:
                if time.monotonic() - last > 0.6 * self._claim.ttl:
                    self._on_lost(f"no renewal for {time.monotonic() - last:.1f} s: {error}")
                    return

    def release(self) -> None:
        """Stop renewing and say so, so that the next claim need not wait."""
        self._stop.set()
        self._thread.join(timeout=self._claim.ttl)
        try:
            if current_epoch(self._control) == self._claim.epoch:
                self._beat(released=True)
        except (OSError, ControlError) as error:
            log.warning("holdfast: could not release epoch %d: %s", self._claim.epoch, error)
