"""The writer process: from a staged snapshot in shared memory to a committed checkpoint.

One process a rank, started by the trainer in a session of its own, so that nothing that ends a trainer ends
its writer. It takes jobs over a socket, writes this rank's shard and leaves its part record; the writer of
rank 0 also waits for the others' parts and commits. It talks to other ranks through files only and never
joins a process group. A signal that asks a whole job to end does not end it: it ends by itself, soon after
its trainer.

Guarantee: a job that was handed over is carried to its end also when the trainer is gone: committed, or
cleared away by its deadline. Then, when its trainer is gone and nothing is left, this process exits.
It does not import torch: it starts in a fraction of a second and needs little memory of its own.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import shutil
import signal
import socket
import sys
import time
import traceback
from pathlib import Path

import msgspec

from holdfast.checkpoint import commit as commits
from holdfast.checkpoint.handoff import (
    BufferFree,
    Channel,
    Gone,
    Job,
    JobDone,
    JobFailed,
    Start,
    ToTrainer,
    UseBuffer,
    UsePlan,
)
from holdfast.checkpoint.identity import PARTS, CheckpointName, CheckpointRoot
from holdfast.checkpoint.image import write_image
from holdfast.control.directory import ControlDirectory
from holdfast.control.lease import Fence
from holdfast.control.writing import Writing, give_up, given_up, is_busy
from holdfast.errors import HoldfastError, LeaseLostError, SaveFailedError
from holdfast.journal.events import SaveCommitted, Warned
from holdfast.journal.reader import read_journal
from holdfast.journal.writer import JournalWriter

POLL = 0.01
LOOK = 1.0
"""Seconds between two looks at whether the trainer lives, where its end of the socket does not tell."""
KEPT_PLANS = 4
"""More than there can be jobs under way."""
ORPHAN_GRACE = 10.0
"""Once its own trainer is gone, how long a writer waits for another rank's to show that it has staged."""


class Writer:
    """Works through the jobs of one trainer."""

    def __init__(self, start: Start, channel: Channel) -> None:
        self._start = start
        self._channel = channel
        self._root = CheckpointRoot(Path(start.root))
        self._control = ControlDirectory.open(Path(start.run_dir))
        if self._control.run_id != start.run:
            raise SaveFailedError(f"{start.run_dir} holds run {self._control.run_id}, not {start.run}")
        self._fence = Fence(self._control, start.epoch, timeout=start.lease_ttl)
        self._leads = start.rank == 0
        self._writing = Writing(self._control, start.epoch) if self._leads else None
        self._journal = JournalWriter(self._control.journal, f"writer-{start.rank}", start.attempt)
        self._buffers: dict[int, mmap.mmap] = {}
        self._plans: dict[int, UsePlan] = {}
        self._parent: str | None = None
        self._orphaned_at: float | None = None

    def work(self) -> None:
        """Until the trainer is gone and everything it handed over is done."""
        with contextlib.suppress(Gone):
            while True:
                received = self._channel.receive(LOOK)
                if received is None:
                    if self._trainer_is_gone():
                        break
                    continue
                message, descriptor = received
                if isinstance(message, UseBuffer):
                    assert descriptor is not None
                    self._map(message, descriptor)
                elif isinstance(message, UsePlan):
                    self._plans[message.number] = message
                    self._plans.pop(message.number - KEPT_PLANS, None)
                elif isinstance(message, Job):
                    self._do(message)
        if self._writing is not None:
            self._writing.close()
        self._journal.close()

    def _trainer_is_gone(self) -> bool:
        """A child that the trainer forked may hold its end of the socket open: then only our parent tells."""
        known = self._start.trainer
        return self._channel.other_side_is_gone() or (known > 0 and os.getppid() != known)

    def _is_orphan_for(self, seconds: float) -> bool:
        now = time.monotonic()
        if self._orphaned_at is None and self._trainer_is_gone():
            self._orphaned_at = now
        return self._orphaned_at is not None and now > self._orphaned_at + seconds

    def _map(self, message: UseBuffer, descriptor: int) -> None:
        self._buffers[message.index] = mmap.mmap(descriptor, message.size, mmap.MAP_SHARED, mmap.PROT_READ)
        os.close(descriptor)

    def _do(self, job: Job) -> None:
        name = CheckpointName(job.step, job.id)
        root = self._root.diagnostic() if job.diagnostic else self._root
        started = time.monotonic()
        busy = self._writing.busy_with(str(name)) if self._writing is not None else contextlib.nullcontext()
        with busy:
            try:
                committed = self._save(job, root, name, started + job.timeout)
            except Exception as error:  # noqa: BLE001 - whatever it is, the trainer must learn of it
                self._failed(job, root, name, error)
                return
        self._tell(JobDone(serial=job.serial, seconds=time.time() - job.called, committed=committed))

    def _save(
        self, job: Job, root: CheckpointRoot, name: CheckpointName, deadline: float
    ) -> commits.Committed | None:
        plan = self._plans[job.plan]
        staged = root.staged(name)
        if self._enter(job, root, name, deadline):
            if job.failed:
                raise SaveFailedError(job.failed)
            files = []
            if plan.layout.items:
                image = memoryview(self._buffers[job.buffer])
                files = write_image(staged, image, plan.layout, job.prints, self._start.threads)
            commits.leave_part(staged, name, self._start.rank, files)
        self._tell(BufferFree(job.serial, job.buffer))
        if job.manifest is None or plan.declared is None:
            return None
        manifest = job.manifest
        if self._parent is not None and not job.diagnostic:
            # The save before may have failed after this one was staged: the parent is what was committed.
            manifest = msgspec.structs.replace(manifest, parent=self._parent)
        control = None if job.diagnostic else self._control

        def wait(rank: int) -> None:
            self._await_part(rank, job, staged, name, deadline)

        committed = commits.finish(root, plan.declared, manifest, self._fence, control, wait=wait)
        if not job.diagnostic:
            self._parent = job.id
        if not (job.again and self._was_told(name)):
            self._journal.write(
                SaveCommitted(
                    checkpoint=str(name),
                    step=job.step,
                    parent=manifest.parent,
                    bytes=committed.bytes,
                    files=committed.files,
                    seconds=time.time() - job.called,
                    blocked_seconds=job.blocked,
                )
            )
        return committed

    def _was_told(self, name: CheckpointName) -> bool:
        """Whether the writer before this one got as far as the journal."""
        told = (line.body for line in read_journal(self._control.journal))
        return any(isinstance(body, SaveCommitted) and body.checkpoint == str(name) for body in told)

    def _enter(self, job: Job, root: CheckpointRoot, name: CheckpointName, deadline: float) -> bool:
        """Rank 0's writer makes the staged directory; the others wait for it; all show that they are here.

        False: an earlier writer has written this rank's part to its end. It must not be touched then, since
        the commit may be going on.
        """
        start, staged = self._start, root.staged(name)
        if job.again and (why := self._given_up(start.rank, job)):
            raise SaveFailedError(why)
        if self._leads:
            self._fence.check(f"stage {name}")
            if job.again and self._is_written(root, name):
                return False
            owner = commits.Owner(run=start.run, attempt=start.attempt, epoch=start.epoch)
            commits.open_staged(root, name, owner, again=job.again)
        while True:
            if job.again and self._is_written(root, name):
                return False
            with contextlib.suppress(FileNotFoundError):
                _here(staged, start.rank).touch()
                return True
            if why := self._given_up(0, job):
                raise SaveFailedError(f"rank 0: {why}")
            if time.monotonic() > deadline:
                raise SaveFailedError(f"rank 0's writer did not make {staged} within {job.timeout:g} s")
            if self._is_orphan_for(ORPHAN_GRACE) and not is_busy(self._control.path, start.epoch):
                raise SaveFailedError(f"the trainers ended before rank 0 had staged its part of {name}")
            self._fence.check(f"stage {name}")
            time.sleep(POLL)

    def _is_written(self, root: CheckpointRoot, name: CheckpointName) -> bool:
        """In this order: part records are dropped only once the checkpoint is sealed."""
        if commits.part_is_left(root.staged(name), name, self._start.rank):
            return True
        return commits.is_sealed(root, name) is not None

    def _given_up(self, rank: int, job: Job) -> str:
        return given_up(self._control.path, self._start.epoch, rank, job.serial)

    def _await_part(self, rank: int, job: Job, staged: Path, name: CheckpointName, deadline: float) -> None:
        """Called while a rank's part is missing: wait a moment, or give up."""
        if time.monotonic() > deadline:
            raise SaveFailedError(f"rank {rank} left no part of {name} before the deadline")
        if self._is_orphan_for(ORPHAN_GRACE) and not _here(staged, rank).exists():
            raise SaveFailedError(f"the trainers ended before rank {rank} had staged its part of {name}")
        # It may have left its part after we looked, and then given a later save up: so look again.
        if (why := self._given_up(rank, job)) and not commits.part_is_left(staged, name, rank):
            raise SaveFailedError(f"rank {rank}: {why}")
        self._fence.check(f"commit {name}")
        time.sleep(POLL)

    def _failed(self, job: Job, root: CheckpointRoot, name: CheckpointName, error: Exception) -> None:
        trace = "".join(traceback.format_exception(error))
        told = f"{type(error).__name__}: {error}" if isinstance(error, HoldfastError) else trace
        if self._start.world > 1:
            give_up(self._control.path, self._start.epoch, self._start.rank, job.serial, told)
        if self._leads:
            with contextlib.suppress(OSError):
                shutil.rmtree(commits.discard_staged(root, str(name)), ignore_errors=True)
        else:
            with contextlib.suppress(OSError):
                commits.leave_part(root.staged(name), name, self._start.rank, [], failed=told)
        message = JobFailed(
            serial=job.serial,
            error=f"{type(error).__name__}: {error}",
            trace=trace,
            lease_lost=isinstance(error, LeaseLostError),
        )
        if not self._tell(BufferFree(job.serial, job.buffer)) or not self._tell(message):
            with contextlib.suppress(OSError):
                self._journal.write(
                    Warned(message=f"{name}, staged by a trainer that is gone, failed: {error}")
                )

    def _tell(self, message: ToTrainer) -> bool:
        """Whether the trainer is there to hear it."""
        try:
            self._channel.send(message)
        except (Gone, SaveFailedError):
            return False
        return True


def _here(staged: Path, rank: int) -> Path:
    return staged / PARTS / f"{rank}.staged"


def main(descriptor: int) -> int:
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):  # what they mean, the trainer decides
        signal.signal(number, signal.SIG_IGN)
    channel = Channel.of_writer(socket.socket(fileno=descriptor))
    try:
        received = channel.receive(60.0)
    except Gone:
        return 0
    if received is None or not isinstance(received[0], Start):
        return 1
    Writer(received[0], channel).work()
    return 0


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1])))
