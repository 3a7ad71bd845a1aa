"""The writer process: from a staged snapshot in shared memory to a committed checkpoint.

One process a rank, started by the trainer in a session of its own, so that nothing that ends a trainer ends
its writer. It takes jobs over a socket, writes this rank's shard and leaves its part record; the writer of
rank 0 also waits for the others' parts and commits. It talks to other ranks through files only and never
joins a process group.

Guarantee: a job that was handed over is carried to its end also when the trainer is gone: committed, or
cleared away by its deadline. Then, when its trainer is gone and nothing is left, this process exits.
It does not import torch: it starts in a fraction of a second and needs little memory of its own.
"""

from __future__ import annotations

import contextlib
import logging
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
from holdfast.control.writing import Writing
from holdfast.errors import HoldfastError, LeaseLostError, SaveFailedError
from holdfast.journal.events import SaveCommitted, Warned
from holdfast.journal.writer import JournalWriter

log = logging.getLogger("holdfast.checkpoint")

POLL = 0.01
KEPT_PLANS = 4
"""More than there can be jobs under way."""
ORPHAN_GRACE = 10.0
"""Once its own trainer is gone, how long rank 0's writer waits for a rank to show that it has staged."""


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
                received = self._channel.receive(None)
                assert received is not None
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
        sealed = self._leads and commits.is_sealed(root, name) is not None
        if not sealed:
            self._enter(job, root, name, deadline)
            if job.failed:
                raise SaveFailedError(job.failed)
            files = []
            if plan.layout.items:
                image = memoryview(self._buffers[job.buffer])
                files = [
                    write_image(
                        staged / plan.layout.path, image, plan.layout, job.prints, self._start.threads
                    )
                ]
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
            self._await_part(rank, staged, name, deadline)

        committed = commits.finish(root, plan.declared, manifest, self._fence, control, wait=wait)
        if not job.diagnostic:
            self._parent = job.id
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

    def _enter(self, job: Job, root: CheckpointRoot, name: CheckpointName, deadline: float) -> None:
        """Rank 0's writer makes the staged directory; the others wait for it; all show that they are here."""
        staged = root.staged(name)
        if self._leads:
            self._fence.check(f"stage {name}")
            start = self._start
            owner = commits.Owner(run=start.run, attempt=start.attempt, epoch=start.epoch)
            commits.open_staged(root, name, owner, again=job.again)
        while not (staged / PARTS).is_dir():
            if time.monotonic() > deadline:
                raise SaveFailedError(f"rank 0's writer did not make {staged} within {job.timeout:g} s")
            self._fence.check(f"stage {name}")
            time.sleep(POLL)
        _here(staged, self._start.rank).touch()

    def _await_part(self, rank: int, staged: Path, name: CheckpointName, deadline: float) -> None:
        """Called while a rank's part is missing: wait a moment, or give up."""
        now = time.monotonic()
        if now > deadline:
            raise SaveFailedError(f"rank {rank} left no part of {name} before the deadline")
        if self._orphaned_at is None and self._channel.other_side_is_gone():
            self._orphaned_at = now
        orphaned = self._orphaned_at is not None and now > self._orphaned_at + ORPHAN_GRACE
        if orphaned and not _here(staged, rank).exists():
            raise SaveFailedError(f"the trainers ended before rank {rank} had staged its part of {name}")
        self._fence.check(f"commit {name}")
        time.sleep(POLL)

    def _failed(self, job: Job, root: CheckpointRoot, name: CheckpointName, error: Exception) -> None:
        trace = "".join(traceback.format_exception(error))
        if self._leads:
            with contextlib.suppress(OSError):
                shutil.rmtree(commits.discard_staged(root, str(name)), ignore_errors=True)
        else:
            with contextlib.suppress(OSError):
                told = f"{type(error).__name__}: {error}" if isinstance(error, HoldfastError) else trace
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
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the trainer decides what Ctrl-C means
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
