"""The writer process: from a staged snapshot in shared memory to a committed checkpoint.

One process a rank, started by the trainer in a session of its own, so that nothing that ends a trainer ends
its writer. It takes jobs over a socket, writes this rank's shard and leaves its part record; the writer of
rank 0 also waits for the others' parts and commits. It talks to other ranks through files only and never
joins a process group. With a local tier a save is committed there first; one thread then drains what also
goes to the root, one save at a time and in order, and another sends replicas, so that neither holds up the
next local save; after a resume, a third makes lost copies again. A signal that asks a whole job to end does
not end this process, not even while it starts: it ends on its own, soon after its trainer.

Guarantee: a job that was handed over is seen through even if the trainer is gone: committed, or cleared away
by its deadline. Once its trainer is gone and nothing is left to do, this process exits.
It does not import torch, so it starts in a fraction of a second and needs little memory of its own.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import sys
import threading
import time
import traceback
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from holdfast.checkpoint import commit as commits
from holdfast.checkpoint.copies import tier as local_manifest
from holdfast.checkpoint.format import PARTS, CheckpointName, CheckpointRoot, FileEntry, Manifest
from holdfast.checkpoint.save.handoff import (
    SEND_TIMEOUT,
    BufferFree,
    Job,
    JobDone,
    JobFailed,
    Leave,
    LocalDone,
    MendCopies,
    Save,
    Start,
    ToTrainer,
    ToWriter,
    UseBuffer,
    UsePeers,
    UsePlan,
)
from holdfast.checkpoint.save.image import write_image
from holdfast.checkpoint.save.local import LocalCommit, LocalCommitter, ReplicaSender, quarantine
from holdfast.errors import HoldfastError, LeaseLostError, SaveFailedError
from holdfast.journal import JournalWriter, read_journal
from holdfast.journal.events import SaveCommitted, Warned
from holdfast.process import BESIDE, Gone, Stream, leave_stopping_to_the_trainer, step_aside
from holdfast.record import ControlDirectory, Fence, Writing, give_up, given_up, is_busy

if TYPE_CHECKING:
    from holdfast.checkpoint.save.local import Mender


# What a writer process learns from its trainer and from the other ranks' writers, and tells them.
#
# The trainer is at the other end of a socket; the other ranks' writers communicate through files only: that
# they have staged, what they have written, that they gave up. A writer stops waiting for another at its
# deadline, when the other gives up, when a newer epoch exists, and, once the trainers are gone, when the
# other does not even show that it has staged.


POLL = 0.01
ORPHAN_GRACE = 10.0
"""How long a writer, once its trainer is gone, waits for another rank's to show that it has staged."""


class Exchange:
    """One writer's exchange; used by all its threads."""

    def __init__(
        self,
        start: Start,
        channel: Stream[ToWriter],
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
        """Also asks who our parent is: a child forked by the trainer may hold its end of the socket open."""
        known = self._start.trainer
        return self._channel.other_end_is_gone() or (known > 0 and os.getppid() != known)

    def is_orphan_for(self, seconds: float) -> bool:
        now = time.monotonic()
        if self._orphaned_at is None and self.trainer_is_gone():
            self._orphaned_at = now
        return self._orphaned_at is not None and now > self._orphaned_at + seconds

    def tell(self, message: ToTrainer) -> bool:
        """Returns whether the trainer is there to hear it."""
        try:
            with self._sending:
                self._channel.send(message, within=SEND_TIMEOUT)
        except (Gone, TimeoutError):
            return False
        return True

    def tell_free(self, job: Job, index: int) -> bool:
        """Tell the trainer that this save no longer needs the buffer or slot."""
        return self.tell(BufferFree(job.save.serial, index))

    def tell_failed(self, job: Job, error: Exception, *, locally: bool = False) -> None:
        message = JobFailed(
            serial=job.save.serial,
            error=f"{type(error).__name__}: {error}",
            trace="".join(traceback.format_exception(error)),
            lease_lost=isinstance(error, LeaseLostError),
            locally=locally,
        )
        if not self.tell_free(job, job.buffer) or not self.tell(message):
            warning = f"{job.save.name}, staged by a trainer that is gone, failed: {error}"
            with contextlib.suppress(OSError):
                self._journal.write(Warned(message=warning))

    # --- the other ranks' writers ---------------------------------------------------------------------------

    def given_up(self, rank: int, job: Job, *, drain: bool = False) -> str:
        return given_up(self._control.path, self._start.epoch, rank, job.save.serial, drain=drain)

    def await_part(self, rank: int, job: Job, staged: Path) -> None:
        """Called while a rank's part is missing: wait a moment, or give up."""
        name = job.save.name
        if time.monotonic() > job.deadline:
            raise SaveFailedError(f"rank {rank} left no part of {name} before the deadline")
        if self.is_orphan_for(ORPHAN_GRACE) and not here(staged, rank).exists():
            raise SaveFailedError(f"the trainers ended before rank {rank} had staged its part of {name}")
        drain = job.save.drains and staged == self._root.staged(name)
        # It may have left its part after we looked, and then given up a later save: so look again.
        if (why := self.given_up(rank, job, drain=drain)) and not commits.part_is_left(staged, name, rank):
            raise SaveFailedError(f"rank {rank}: {why}")
        self._fence.check(f"commit {name}")
        time.sleep(POLL)

    def await_rank_0(self, job: Job, what: str, *, drain: bool = False) -> None:
        """Called while something that rank 0's writer makes is missing: wait a moment, or give up."""
        name = job.save.name
        if time.monotonic() > job.deadline:
            raise SaveFailedError(f"rank 0's writer did not make {what} within {job.timeout:g} s")
        alive = is_busy(self._control.path, self._start.epoch, drain=drain)
        if self.is_orphan_for(ORPHAN_GRACE) and not alive:
            raise SaveFailedError(f"the trainers ended before rank 0 had staged its part of {name}")
        self._fence.check(f"stage {name}")
        time.sleep(POLL)

    def give_up(self, job: Job, error: Exception, *, drain: bool) -> str:
        """Tell the other ranks' writers that this one gives up; returns the reason it gave."""
        trace = "".join(traceback.format_exception(error))
        why = f"{type(error).__name__}: {error}" if isinstance(error, HoldfastError) else trace
        if self._start.world > 1:
            start = self._start
            give_up(self._control.path, start.epoch, start.rank, job.save.serial, why, drain=drain)
        return why


def here(staged: Path, rank: int) -> Path:
    return staged / PARTS / f"{rank}.staged"


LOOK = 1.0
"""Seconds between two looks at whether the trainer lives, in case its end of the socket does not tell."""
KEPT_PLANS = 4
"""More than there can be jobs under way."""


class Writer:
    """Works through the jobs of one trainer."""

    def __init__(self, start: Start, channel: Stream[ToWriter], locked: int | None = None) -> None:
        """`locked`: on rank 0 the lock that serves as sign of life, already taken by the trainer."""
        self._start = start
        self._channel = channel
        self._root = CheckpointRoot(Path(start.root))
        self._control = ControlDirectory.open(Path(start.run_dir))
        if self._control.run_id != start.run:
            raise SaveFailedError(f"{start.run_dir} holds run {self._control.run_id}, not {start.run}")
        self._fence = Fence(self._control, start.epoch, timeout=start.lease_ttl)
        self._leads = start.rank == 0
        self._writing = Writing(self._control, start.epoch, locked) if self._leads else None
        self._journal = JournalWriter(self._control.journal, f"writer-{start.rank}", start.attempt)
        self._buffers: dict[int, mmap.mmap] = {}
        self._plans: dict[int, UsePlan] = {}
        self._parent: str | None = None
        self._exchange = Exchange(start, channel, self._control, self._fence, self._journal)
        self._local, self._no_local = self._open_local(start)
        self._replicas = (
            ReplicaSender(self._control, self._local.tier, self._journal) if self._local is not None else None
        )
        self._replication_timeout = 0.0
        self._mender: Mender | None = None
        self._drains = ThreadPoolExecutor(1, thread_name_prefix="holdfast-drain")

    def _open_local(self, start: Start) -> tuple[LocalCommitter | None, str]:
        """The local tier, or why there is none: a fault there must not keep a writer from the root."""
        if not start.tier:
            return None, "no local tier is set"
        try:
            return LocalCommitter(start, self._control, self._fence), ""
        except (OSError, msgspec.DecodeError) as error:
            return None, f"the local tier at {start.tier} cannot be used: {error}"

    def work(self) -> None:
        """Work until the trainer is gone and everything it handed over is done."""
        with contextlib.suppress(Gone):
            while True:
                received = self._channel.receive(LOOK)
                if received is None:
                    if self._exchange.trainer_is_gone():
                        break
                    continue
                message, descriptors = received
                if isinstance(message, UseBuffer):
                    self._map(message, *descriptors)
                elif isinstance(message, UsePlan):
                    self._plans[message.number] = message
                    self._plans.pop(message.number - KEPT_PLANS, None)
                elif isinstance(message, UsePeers):
                    self._use_peers(message)
                elif isinstance(message, MendCopies):
                    self._mend(message)
                elif isinstance(message, Leave):
                    self._replication_timeout = 0.0
                elif isinstance(message, Job):
                    self._do(msgspec.structs.replace(message, deadline=time.monotonic() + message.timeout))
        self._drains.shutdown()
        if self._mender is not None:
            self._mender.stop()
        if self._replicas is not None and self._local is not None:
            self._replicas.close(self._replication_timeout)
            self._local.close()
        if self._writing is not None:
            self._writing.close()
        self._journal.close()

    def _map(self, message: UseBuffer, descriptor: int) -> None:
        self._buffers[message.index] = mmap.mmap(descriptor, message.size, mmap.MAP_SHARED, mmap.PROT_READ)
        os.close(descriptor)

    def _use_peers(self, message: UsePeers) -> None:
        self._replication_timeout = message.timeout
        if self._replicas is not None and self._local is not None:
            self._replicas.use(message)
            self._local.where = message.where or self._local.where

    def _mend(self, message: MendCopies) -> None:
        from holdfast.checkpoint.save.local import Mender  # most writers never need it

        self._mender = Mender(message, self._control, self._journal)
        self._mender.start()

    def _busy_with(self, job: Job) -> contextlib.AbstractContextManager[None]:
        writing = self._writing
        return writing.busy_with(str(job.save.name)) if writing is not None else contextlib.nullcontext()

    def _do(self, job: Job) -> None:
        if job.save.local:
            self._do_locally(job)
            return
        root = self._root.diagnostic() if job.save.diagnostic else self._root
        with self._busy_with(job):
            try:
                if self._local is not None:  # earlier saves are drained first
                    self._drains.submit(lambda: None).result(job.timeout)
                self._save(job, self._plans[job.plan], root)
            except Exception as error:  # noqa: BLE001 - whatever it is, the trainer must learn of it
                self._failed(job, root, error)
                return
        self._tell_done(job)

    def _tell_done(self, job: Job) -> None:
        self._exchange.tell(JobDone(serial=job.save.serial, seconds=time.time() - job.save.asked))

    # --- the local tier -------------------------------------------------------------------------------------

    def _do_locally(self, job: Job) -> None:
        """Commit in the local tier; a drain and replicas then run beside whatever comes next."""
        if self._local is None or self._replicas is None:
            error = SaveFailedError(self._no_local)
            for drain in (False, True):
                self._exchange.give_up(job, error, drain=drain)
            self._exchange.tell_failed(job, error, locally=True)
            return
        save = job.save
        with self._busy_with(job):
            try:
                committed = self._save_locally(self._local, job)
            except Exception as error:  # noqa: BLE001 - whatever it is, the trainer must learn of it
                self._failed_locally(self._local, job, error)
                return
            if self._leads and not (job.again and self._was_told(save.name, "local")):
                self._tell_committed(save, committed.manifest, "local", save.blocked)
        if save.globally:
            if job.slot != job.buffer:
                self._exchange.tell_free(job, job.buffer)
            self._exchange.tell(LocalDone(serial=save.serial, seconds=time.time() - save.asked))
            self._drains.submit(self._drain, job, self._plans[job.plan], committed)
        else:
            self._tell_done(job)
        if save.replicate:
            self._replicas.send(committed)
        if self._leads:
            with contextlib.suppress(OSError, HoldfastError):
                self._local.tidy(save.name)

    def _save_locally(self, local: LocalCommitter, job: Job) -> LocalCommit:
        plan, name = self._plans[job.plan], job.save.name
        if job.again and (before := local.done_before(job)) is not None:
            self._parent = name.id
            return before
        with local.at_work(job):
            if job.again and (why := self._exchange.given_up(self._start.rank, job)):
                raise SaveFailedError(why)
            folder = local_manifest.open_folder(self._control, name)
            here(folder, self._start.rank).touch()
            if job.failed:
                raise SaveFailedError(job.failed)
            files: list[FileEntry] = []
            if plan.layout.items:
                files = local.write(job, plan, memoryview(self._buffers[job.buffer]))
            local.leave_part(name, files)
            manifest = self._manifest(job)
            if manifest is not None:

                def wait(rank: int) -> None:
                    self._exchange.await_part(rank, job, folder)

                sealed, digest = local.seal(plan, manifest, job.save, wait)
            else:
                sealed, digest = self._await_seal(local, job)
            committed = local.commit(job, plan, sealed, digest, files)
        self._parent = name.id
        return committed

    def _await_seal(self, local: LocalCommitter, job: Job) -> tuple[Manifest, str]:
        name = job.save.name
        while True:
            why = self._exchange.given_up(0, job)
            # In this order: rank 0 may have sealed it, and then given up a later save.
            sealed = local.sealed_for_own(name)
            if sealed is not None:
                return sealed
            if why:
                raise SaveFailedError(f"rank 0: {why}")
            self._exchange.await_rank_0(job, f"the manifest of {name}")

    def _drain(self, job: Job, plan: UsePlan, committed: LocalCommit) -> None:
        """From the local copy to the checkpoint root: copy, verify, commit with the same manifest."""
        try:
            self._save(job, plan, self._root, committed)
        except Exception as error:  # noqa: BLE001 - whatever it is, the trainer must learn of it
            self._failed(job, self._root, error)
            return
        self._tell_done(job)

    def _check_drained(self, committed: LocalCommit, files: list[FileEntry]) -> None:
        """Check that what was written is what the manifest lists; else the local copy has since changed."""
        if files == committed.files:
            return
        other = [file.path for file in files if file not in committed.files]
        why = f"read again, {other} have other digests than when they were committed"
        assert self._local is not None
        quarantine(self._local.tier, committed.record, why, self._journal)
        raise SaveFailedError(
            f"{committed.record.checkpoint}: its local copy is bad, and was not drained: {why}"
        )

    @contextlib.contextmanager
    def _image(self, job: Job, committed: LocalCommit | None) -> Iterator[memoryview]:
        """The bytes to write: the staging buffer, or the local copy, which is kept unchanged meanwhile."""
        if committed is None:
            yield memoryview(self._buffers[job.buffer])
            return
        assert self._local is not None
        with self._local.tier.lease(committed.record) as descriptor:
            if descriptor is None:
                raise SaveFailedError(f"{committed.record.checkpoint}: its local copy is gone")
            size = os.fstat(descriptor).st_size
            yield memoryview(mmap.mmap(descriptor, size, mmap.MAP_SHARED, mmap.PROT_READ))

    # --- the checkpoint root --------------------------------------------------------------------------------

    def _save(self, job: Job, plan: UsePlan, root: CheckpointRoot, local: LocalCommit | None = None) -> None:
        """Save into the root, from the staging buffer or from the `local` copy that was committed before."""
        save, name = job.save, job.save.name
        staged, begun = root.staged(name), time.monotonic()
        if self._enter(job, root):
            if job.failed:
                raise SaveFailedError(job.failed)
            files = []
            if plan.layout.items:
                with self._image(job, local) as image:
                    files = write_image(staged, image, plan.layout, job.prints, self._start.threads)
            if local is not None:
                self._check_drained(local, files)
            commits.leave_part(staged, name, self._start.rank, files)
        self._exchange.tell_free(job, job.slot if local is not None else job.buffer)
        manifest = local.manifest if local is not None else self._manifest(job)
        if job.manifest is None or manifest is None or plan.declared is None:
            return
        control = None if save.diagnostic else self._control

        def wait(rank: int) -> None:
            self._exchange.await_part(rank, job, staged)

        committed = commits.finish(root, plan.declared, manifest, self._fence, control, wait=wait)
        if not save.diagnostic and local is None:
            self._parent = name.id
        if not (job.again and self._was_told(name, "global")):
            blocked, taken = save.blocked if local is None else 0.0, time.monotonic() - begun
            self._tell_committed(save, manifest, "global", blocked, committed, taken)

    def _manifest(self, job: Job) -> Manifest | None:
        """On rank 0 the manifest, with the parent as it is known now."""
        if job.manifest is None or self._parent is None or job.save.diagnostic:
            return job.manifest
        # The save before may have failed after this one was staged: the parent is what was committed last.
        return msgspec.structs.replace(job.manifest, parent=self._parent)

    def _tell_committed(
        self,
        save: Save,
        manifest: Manifest,
        tier: str,
        blocked: float,
        stored: commits.Committed | None = None,
        taken: float = 0.0,
    ) -> None:
        """`taken`: how many seconds it took to write and commit it in the checkpoint root."""
        files = manifest.files
        self._journal.write(
            SaveCommitted(
                checkpoint=str(save.name),
                step=save.name.step,
                parent=manifest.parent,
                bytes=stored.bytes if stored is not None else sum(file.size for file in files),
                files=stored.files if stored is not None else len(files),
                seconds=time.time() - save.asked,
                blocked_seconds=blocked,
                tier=tier,
                stored_seconds=taken,
                root=str(self._root.path) if tier == "global" else "",
            )
        )

    def _was_told(self, name: CheckpointName, tier: str) -> bool:
        """Whether the writer before this one got as far as the journal."""
        journalled = (line.body for line in read_journal(self._control.journal))
        return any(
            isinstance(body, SaveCommitted) and (body.checkpoint, body.tier) == (str(name), tier)
            for body in journalled
        )

    def _enter(self, job: Job, root: CheckpointRoot) -> bool:
        """Rank 0's writer makes the staged directory; the others wait for it; all show that they are here.

        False: an earlier writer has completed this rank's part. It must not be touched then, since the
        commit may be under way.
        """
        start, name, drain = self._start, job.save.name, job.save.drains
        staged = root.staged(name)
        if job.again and (why := self._exchange.given_up(start.rank, job, drain=drain)):
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
                here(staged, start.rank).touch()
                return True
            if why := self._exchange.given_up(0, job, drain=drain):
                raise SaveFailedError(f"rank 0: {why}")
            self._exchange.await_rank_0(job, str(staged), drain=drain)

    def _is_written(self, root: CheckpointRoot, name: CheckpointName) -> bool:
        """Looks in this order because part records are dropped only once the checkpoint is sealed."""
        if commits.part_is_left(root.staged(name), name, self._start.rank):
            return True
        return commits.is_sealed(root, name) is not None

    def _failed(self, job: Job, root: CheckpointRoot, error: Exception) -> None:
        name = job.save.name
        why = self._exchange.give_up(job, error, drain=job.save.drains)
        if self._leads:
            commits.drop_staged(root, str(name))
        else:
            with contextlib.suppress(OSError):
                commits.leave_part(root.staged(name), name, self._start.rank, [], failed=why)
        self._exchange.tell_failed(job, error)

    def _failed_locally(self, local: LocalCommitter, job: Job, error: Exception) -> None:
        name = job.save.name
        why = self._exchange.give_up(job, error, drain=False)
        if job.save.drains:  # another rank's copy may be committed, its writer waiting for this one's part
            self._exchange.give_up(job, error, drain=True)
        with contextlib.suppress(OSError):
            if self._leads:
                local.clear_away(name)
            elif local.sealed(name) is None:
                local.leave_part(name, [], failed=why)
        self._exchange.tell_failed(job, error, locally=True)


def main(descriptor: int) -> int:
    leave_stopping_to_the_trainer()
    os.environ["OPENBLAS_NUM_THREADS"] = "1"  # else numpy starts a thread for each core, all unused here
    channel: Stream[ToWriter] = Stream.at(descriptor, ToWriter)
    try:
        received = channel.receive(60.0)
    except Gone:
        return 0
    start, descriptors = received or (None, [])
    if not isinstance(start, Start):
        return 1
    step_aside(BESIDE, threads=start.threads)
    Writer(start, channel, *descriptors).work()
    return 0


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1])))
