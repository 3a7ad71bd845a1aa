"""What a writer process learns from its trainer and from the other ranks' writers, and tells them.

The trainer is at the other end of a socket; the other ranks' writers are met through files only: that they
have staged, what they have written, that they gave up. Whoever waits for one of them stops at its deadline,
when that one gives up, when a newer epoch exists, and, once the trainers are gone, when it does not even show
that it has staged.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
import traceback
from pathlib import Path

from holdfast.checkpoint import commit as commits
from holdfast.checkpoint.handoff import BufferFree, Channel, Gone, Job, JobFailed, Start, ToTrainer
from holdfast.checkpoint.identity import PARTS, CheckpointName, CheckpointRoot
from holdfast.control.directory import ControlDirectory
from holdfast.control.lease import Fence
from holdfast.control.writing import give_up, given_up, is_busy
from holdfast.errors import HoldfastError, LeaseLostError, SaveFailedError
from holdfast.journal.events import Warned
from holdfast.journal.writer import JournalWriter

POLL = 0.01
ORPHAN_GRACE = 10.0
"""Once its own trainer is gone, how long a writer waits for another rank's to show that it has staged."""


class Exchange:
    """One writer's; used by all its threads."""

    def __init__(
        self,
        start: Start,
        channel: Channel,
        control: ControlDirectory,
        fence: Fence,
        journal: JournalWriter,
    ) -> None:
        self._start = start
        self._channel = channel
        self._control = control
        self._fence = fence
        self._journal = journal
        self._root = CheckpointRoot(Path(start.root))
        self._orphaned_at: float | None = None
        self._sending = threading.Lock()
        """Held while a message goes to the trainer, from whichever thread."""

    # --- the trainer ----------------------------------------------------------------------------------------

    def trainer_is_gone(self) -> bool:
        """A child that the trainer forked may hold its end of the socket open: then only our parent tells."""
        known = self._start.trainer
        return self._channel.other_side_is_gone() or (known > 0 and os.getppid() != known)

    def is_orphan_for(self, seconds: float) -> bool:
        now = time.monotonic()
        if self._orphaned_at is None and self.trainer_is_gone():
            self._orphaned_at = now
        return self._orphaned_at is not None and now > self._orphaned_at + seconds

    def tell(self, message: ToTrainer) -> bool:
        """Whether the trainer is there to hear it."""
        try:
            with self._sending:
                self._channel.send(message)
        except (Gone, SaveFailedError):
            return False
        return True

    def tell_failed(self, job: Job, name: CheckpointName, error: Exception, *, locally: bool = False) -> None:
        message = JobFailed(
            serial=job.serial,
            error=f"{type(error).__name__}: {error}",
            trace="".join(traceback.format_exception(error)),
            lease_lost=isinstance(error, LeaseLostError),
            locally=locally,
        )
        if not self.tell(BufferFree(job.serial, job.buffer)) or not self.tell(message):
            with contextlib.suppress(OSError):
                self._journal.write(
                    Warned(message=f"{name}, staged by a trainer that is gone, failed: {error}")
                )

    # --- the other ranks' writers ---------------------------------------------------------------------------

    def given_up(self, rank: int, job: Job, *, drain: bool = False) -> str:
        return given_up(self._control.path, self._start.epoch, rank, job.serial, drain=drain)

    def await_part(self, rank: int, job: Job, staged: Path, name: CheckpointName, deadline: float) -> None:
        """Called while a rank's part is missing: wait a moment, or give up."""
        if time.monotonic() > deadline:
            raise SaveFailedError(f"rank {rank} left no part of {name} before the deadline")
        if self.is_orphan_for(ORPHAN_GRACE) and not here(staged, rank).exists():
            raise SaveFailedError(f"the trainers ended before rank {rank} had staged its part of {name}")
        drain = is_drain(job) and staged == self._root.staged(name)
        # It may have left its part after we looked, and then given a later save up: so look again.
        if (why := self.given_up(rank, job, drain=drain)) and not commits.part_is_left(staged, name, rank):
            raise SaveFailedError(f"rank {rank}: {why}")
        self._fence.check(f"commit {name}")
        time.sleep(POLL)

    def await_rank_0(
        self, job: Job, name: CheckpointName, what: str, deadline: float, *, drain: bool = False
    ) -> None:
        """Called while something is missing that rank 0's writer makes: wait a moment, or give up."""
        if time.monotonic() > deadline:
            raise SaveFailedError(f"rank 0's writer did not make {what} within {job.timeout:g} s")
        alive = is_busy(self._control.path, self._start.epoch, drain=drain)
        if self.is_orphan_for(ORPHAN_GRACE) and not alive:
            raise SaveFailedError(f"the trainers ended before rank 0 had staged its part of {name}")
        self._fence.check(f"stage {name}")
        time.sleep(POLL)

    def give_up(self, job: Job, error: Exception, *, drain: bool) -> str:
        """Say so to the other ranks' writers."""
        trace = "".join(traceback.format_exception(error))
        told = f"{type(error).__name__}: {error}" if isinstance(error, HoldfastError) else trace
        if self._start.world > 1:
            start = self._start
            give_up(self._control.path, start.epoch, start.rank, job.serial, told, drain=drain)
        return told


def is_drain(job: Job) -> bool:
    """Whether what goes to the root was committed in the local tier before."""
    return job.local and job.globally


def here(staged: Path, rank: int) -> Path:
    return staged / PARTS / f"{rank}.staged"
