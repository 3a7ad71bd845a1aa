"""A save, in the foreground or in the background: requested, staged, written, and what became of it.

In the foreground, by the time `begin` returns the checkpoint of the whole group is committed, or there is
none. Everything that can fail on one rank (collecting the state, making the staged directory, writing,
checking, committing) ends in an exchange, so that a failure anywhere reaches every rank as the same error and
nobody is left waiting. A failed save removes what it staged and touches nothing that was committed.

In the background, training is held up only until the snapshot is in staging memory. Guarantee: once it is
copied, this rank's snapshot is outside the trainer and in the hands of a process that outlives it. What is
copied by the time `begin` returns is handed over at once; a copy from a device may take longer, and a thread
hands it over as soon as it is complete. Snapshots are handed over in the order in which they were taken. Each
is announced in a record before it is copied: even an attempt that starts at once, while the writer is still
starting, does not take the run away from it. Whether it was committed is learned later, from `poll`.

A writer that dies is replaced; its successor gets what was unfinished from the buffers, which the trainer
still holds. After RESTARTS deaths without a finished save in between, what is under way counts as failed.

Every rank makes the same calls in the same order. All that ranks must agree on (is anyone still busy, does
the plan still fit) is settled in the one exchange that a snapshot takes.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Literal

import msgspec

from holdfast.base import REWRITTEN, LiveLine, Waiting, size, stretch
from holdfast.checkpoint import commit as commits
from holdfast.checkpoint.format import (
    FAILURES,
    FORMAT,
    OF_THE_JOB,
    CheckpointName,
    CheckpointRoot,
    Manifest,
    Versions,
    Windows,
    World,
    describe,
    save_failed,
    together,
    write_shards,
)
from holdfast.checkpoint.save.device import TAKEN, Buffer
from holdfast.checkpoint.save.handoff import (
    NO_SLOT,
    BufferFree,
    Job,
    JobDone,
    JobFailed,
    LocalDone,
    MendCopies,
    Save,
    Start,
    UsePeers,
    WriterConnection,
    writing_threads,
)
from holdfast.checkpoint.save.plan import Plan
from holdfast.checkpoint.save.snapshot import Snapshot, Snapshotter, Staged, Stager
from holdfast.checkpoint.save.staging import (
    GettingReady,
    LocalTarget,
    StagingMemory,
    Wants,
    choose_readying,
)
from holdfast.errors import LeaseLostError, SaveFailedError, TornSnapshotError
from holdfast.journal import Event
from holdfast.journal.events import DecisionMade, SaveCommitted, Warned
from holdfast.process import Gone
from holdfast.record import ControlDirectory, Fence, Group, add_up, announce, give_up

log = logging.getLogger("holdfast.checkpoint")

CARRY_POLL = 0.002
"""Seconds between two looks at a copy under way; small beside the copy, rare beside a training step."""
ABANDON_WAIT = 30.0
"""Seconds that a trainer ending with an error leaves a copy under way to complete."""

LEAVE = 10.0
"""Seconds that a run at its end waits for a page-locking under way, which nothing interrupts."""
HURRY = 1.0
"""The same for a run that ends with an error."""

RESTARTS = 3
LATE = 30.0
"""Seconds past a save's own deadline after which the writer is taken to be stuck, and ended."""
NO_BUFFER = -2
"""The index that stands for no buffer."""
SLOT_POLL = 0.05
"""Seconds between two looks at slots that somebody is reading, since no reader says when it is done."""

WhenBusy = Literal["queue", "skip", "wait"]
Tier = Literal["local", "global"]
BUSY = "the save before it is still being written on some rank (checkpoint.when_busy = 'skip')"
BUSY_LOCALLY = (
    "no local copy: on some rank all memory for local copies is being written, drained, sent or read"
)


class SaveFacts(msgspec.Struct, frozen=True, kw_only=True):
    """What the manifest says about the moment of a save."""

    step: int
    parent: str | None
    reason: str
    versions: Versions
    windows: Windows = msgspec.field(default_factory=Windows)


class SaveContext(msgspec.Struct, frozen=True, kw_only=True):
    """What every save of an attempt has in common."""

    root: CheckpointRoot
    control: ControlDirectory
    fence: Fence
    group: Group
    attempt: int

    def owner(self) -> commits.Owner:
        return commits.Owner(run=self.control.run_id, attempt=self.attempt, epoch=self.fence.epoch)

    def root_for(self, *, diagnostic: bool) -> CheckpointRoot:
        return self.root.diagnostic() if diagnostic else self.root

    def manifest(self, snapshot: Snapshot, facts: SaveFacts) -> Manifest:
        """Complete except for the files, which nobody knows yet."""
        return Manifest(
            format=FORMAT,
            id=snapshot.name.id,
            step=snapshot.name.step,
            parent=facts.parent,
            run=self.control.run_id,
            attempt=self.attempt,
            epoch=self.fence.epoch,
            created=time.time(),
            world=World(
                size=self.group.world_size,
                backend=self.group.backend,
                layout=snapshot.plan.facts.layout,
                tied=snapshot.plan.facts.tied,
            ),
            parts=snapshot.parts,
            files=[],
            versions=facts.versions,
            samples=snapshot.samples,
            tokens=snapshot.tokens,
            counts=OF_THE_JOB,
            reason=facts.reason,
            windows=facts.windows,
            needs=snapshot.needs,
            proof=snapshot.proof,
        )


class Ended(msgspec.Struct, frozen=True, kw_only=True):
    """What a save came to in one tier, for this rank."""

    save: Save
    tier: Tier = "global"
    seconds: float = 0.0
    error: SaveFailedError | LeaseLostError | None = None
    """With the writer's traceback."""
    for_all: bool = False
    """Whether the whole save is known to be committed, not just this rank's part written."""
    told: SaveCommitted | None = None
    """The event for the journal; None where the writer journals it."""

    @property
    def moves_head(self) -> bool:
        """Whether this is the save's first commit."""
        return not self.save.diagnostic and (self.tier == "local" or not self.save.local)


class Saver:
    """Makes the saves of one attempt, and keeps track of those under way and of what became of them.

    `begin` starts a save; `poll` or `wait` says how it ended, exactly once.
    """

    in_background: ClassVar[bool]
    """Whether a save goes on after `begin` returns; else it is committed by then, for all ranks."""
    has_local_tier = False
    why_skipped = ""
    """Why the last `begin` led to no save, or to no local copy."""
    local_waits = True
    """Whether training waits for the memory of a save to the local tier alone, if `when_busy` says so."""

    def __init__(self, context: SaveContext, snapshots: Snapshotter) -> None:
        self._context = context
        self._snapshots = snapshots
        self._ended: list[Ended] = []

    @property
    def ready(self) -> bool:
        """Whether there is nothing left to get ready for the next save."""
        return True

    def resumed_from(self, head: CheckpointName | None) -> None:
        """The checkpoint from which the run continues."""

    def order(self, order: UsePeers | MendCopies) -> None:
        """What is to be done with local copies beside the saves, from now on."""

    def prepare(self) -> None:
        """Plan the first save now, on all ranks together."""

    def stepping(self) -> None:
        """The first step is about to begin: from now on, what saves need is got ready beside training."""

    def begin(
        self,
        facts: SaveFacts,
        *,
        diagnostic: bool = False,
        must: bool = False,
        globally: bool = True,
        local: bool = True,
    ) -> Save | None:
        """Take a snapshot and see that it is saved. None: skipped, on all ranks alike (`why_skipped`).

        Raises, on all ranks, SaveFailedError (nothing has changed) or LeaseLostError.

        With `local` it goes to the local tier, if there is one, and with `globally` to the checkpoint root
        too; if some rank has no room for a local copy, only to the root. `must`: wait for a busy rank even
        if the policy is to skip.
        """
        raise NotImplementedError

    def boundary(self) -> None:
        """The next step is about to begin: nothing may change under a copy that is still going on."""

    def poll(self) -> list[Ended]:
        """What has ended since the last call. Never blocks."""
        ended, self._ended = self._ended, []
        return ended

    def is_under_way(self, name: CheckpointName | None = None) -> bool:
        """Whether this save is under way; without a name, whether any is."""
        del name
        return False

    def wait(self, timeout: float, name: CheckpointName | None = None) -> list[Ended]:
        """Wait, at most `timeout`, for this save, or without a name for all; returns all that have ended."""
        del timeout, name
        return self.poll()

    def no_more(self) -> None:
        """No save will begin any more."""

    def abandon(self, *, await_at_exit: float = 0.0) -> None:
        """The trainer is about to end: what is under way is finished without it."""

    def close(self) -> None:
        """Call once everything has ended: gives everything back."""


class ForegroundSaver(Saver):
    """Writes and commits a save itself, before training goes on."""

    in_background = False

    def begin(self, facts: SaveFacts, *, diagnostic: bool = False, **_: bool) -> Save:
        started, asked = time.monotonic(), time.time()
        group, root = self._context.group, self._context.root_for(diagnostic=diagnostic)
        name = self._snapshots.next_name(facts.step)

        opening = 0.0

        def open_staged(name: CheckpointName) -> None:
            nonlocal opening
            if group.is_coordinator:
                self._context.fence.check(f"stage {name}")
                begun = time.monotonic()
                commits.open_staged(root, name, self._context.owner())
                opening = time.monotonic() - begun

        try:
            snapshot = self._snapshots.take(facts.step, prepare=open_staged, prove=not diagnostic)
            assert snapshot is not None  # nobody is ever busy with a save in the foreground
            storing = time.monotonic()
            together(group, name, lambda: self._write(root, snapshot))
            stored = together(group, name, lambda: self._commit(root, snapshot, facts, diagnostic=diagnostic))
        except FAILURES:
            if group.is_coordinator:
                commits.drop_staged(root, str(name))
            raise
        now = time.monotonic()
        seconds = now - started
        save = Save(name=name, serial=snapshot.serial, diagnostic=diagnostic, asked=asked, blocked=seconds)
        told = SaveCommitted(
            checkpoint=str(name),
            step=facts.step,
            parent=facts.parent,
            bytes=stored.bytes,
            files=stored.files,
            seconds=seconds,
            blocked_seconds=seconds,
            stored_seconds=opening + now - storing,
            root=str(self._context.root.path),
        )
        self._ended.append(Ended(save=save, seconds=seconds, for_all=True, told=told))
        return save

    def _write(self, root: CheckpointRoot, snapshot: Snapshot) -> commits.Committed:
        staged = root.staged(snapshot.name)
        files = write_shards(staged, snapshot.plan, snapshot.tensors, snapshot.fingerprints())
        commits.leave_part(staged, snapshot.name, self._context.group.rank, files)
        return commits.Committed(bytes=sum(file.size for file in files), files=len(files))

    def _commit(
        self, root: CheckpointRoot, snapshot: Snapshot, facts: SaveFacts, *, diagnostic: bool
    ) -> commits.Committed:
        declared = snapshot.plan.declared
        if declared is None:
            return commits.Committed(bytes=0, files=0)
        manifest = self._context.manifest(snapshot, facts)
        control = None if diagnostic else self._context.control
        return commits.finish(root, declared, manifest, self._context.fence, control)


@dataclass
class _UnderWay:
    """A save from its snapshot to its end, from its trainer's side."""

    job: Job
    plan: Plan
    buffer: Buffer
    staged: Staged | None
    """Its copy into the buffer; None if that failed at once."""
    holds: set[int]
    """The buffer and the slot that it still needs."""
    copied: bool = False
    """The copy is complete, or never will be: it waits only for earlier saves to be handed over."""
    late: float | None = None
    """Once it is handed over: the time after which a writer that has not finished it counts as stuck."""

    @property
    def save(self) -> Save:
        return self.job.save


class BackgroundSaver(Saver):
    """Saves through a writer process, beside training."""

    in_background = True

    def __init__(
        self,
        context: SaveContext,
        snapshots: Snapshotter,
        *,
        stager: Stager,
        when_busy: WhenBusy,
        timeout: float,
        lease_ttl: float,
        local: LocalTarget | None,
        tell: Callable[[Event], None],
    ) -> None:
        super().__init__(context, snapshots)
        self._stager = stager
        self._when_busy = when_busy
        self._timeout = timeout
        self.has_local_tier = local is not None
        self._fitting_plan = 0
        """The last plan for which all ranks had room in the local tier."""
        self._under_way: dict[int, _UnderWay] = {}
        """By serial, in order: first those that were handed over, then those being copied."""
        self._to_release: list[Staged] = []
        """Copied, and still to be released, which only the thread that trains may do."""
        self._parent: str | None = None
        """Id of the last checkpoint that was committed: the next one's parent."""
        self._deaths = 0
        self._lock = threading.RLock()
        """Guards the writer and what is under way: the threads that hand snapshots over use them too."""
        self._landed = threading.Condition(self._lock)
        self._start = Start(
            run_dir=str(context.control.path),
            run=context.control.run_id,
            attempt=context.attempt,
            epoch=context.fence.epoch,
            lease_ttl=lease_ttl,
            root=str(context.root.path),
            rank=context.group.rank,
            world=context.group.world_size,
            threads=writing_threads(),
            trainer=os.getpid(),
            tier=str(local.tier.path) if local is not None else "",
            keep=local.keep if local is not None else 0,
        )
        self._writer = WriterConnection(self._start)
        self._memory = StagingMemory(
            2 if when_busy == "queue" else 1,
            context.control,
            context.group.rank,
            local,
            is_free=self._is_free,
            tell=tell,
        )
        self._tell = tell
        self._told_readying = self._told_not_ahead = self._stepping = False
        self._ready_for = 0
        """The plan for which memory is got ready, or was."""
        self._ahead = GettingReady(self._tell_not_ahead)

    @property
    def ready(self) -> bool:
        return self._ahead.done

    def resumed_from(self, head: CheckpointName | None) -> None:
        if self._memory.slots is not None:
            self._memory.slots.resumed_from(head)

    def order(self, order: UsePeers | MendCopies) -> None:
        with self._lock:
            self._writer.order(order)

    def prepare(self) -> None:
        self._snapshots.plan_ahead()
        self._get_ready()

    def stepping(self) -> None:
        if not self._stepping:
            self._stepping = True
            self._ahead.add(self._start_writer())
            self._get_ready()

    def _start_writer(self) -> Iterator[None]:
        with self._lock:
            self._launch()
        yield

    def _get_ready(self) -> None:
        """Have the memory for the present plan got ready, once the run makes steps."""
        plan = self._snapshots.plan
        if self._stepping and plan is not None and plan.number != self._ready_for:
            self._ready_for = plan.number
            devices = self._snapshots.tracked.devices()
            self._ahead.add(self._memory.prepare(plan, pin=min(devices, key=str, default=None)))

    def _tell_not_ahead(self, why: str) -> None:
        if self._told_not_ahead:
            return
        self._told_not_ahead = True
        told = (
            f"rank {self._context.group.rank}: what saves need is not got ready beside training any more "
            f"({why}); saves see to it themselves, and the first ones may take longer"
        )
        log.warning("holdfast: %s", told)
        self._tell(Warned(message=told))

    # --- from live state to the writer ----------------------------------------------------------------------

    def begin(
        self,
        facts: SaveFacts,
        *,
        diagnostic: bool = False,
        must: bool = False,
        globally: bool = True,
        local: bool = True,
    ) -> Save | None:
        try:
            return self._begin(facts, diagnostic=diagnostic, must=must, globally=globally, local=local)
        finally:
            self._ahead.let_go()
            self._get_ready()

    def _begin(
        self, facts: SaveFacts, *, diagnostic: bool, must: bool, globally: bool, local: bool
    ) -> Save | None:
        started, asked = time.monotonic(), time.time()
        waited, self.why_skipped = 0.0, ""
        wants = Wants(self._memory.slots if local and not diagnostic else None, globally=globally)

        def take(*, busy: bool, prepare: Callable[[CheckpointName], None] | None = None) -> Snapshot | None:
            return self._snapshots.take(
                facts.step,
                prepare=prepare,
                busy=busy,
                cramped=wants.cramped,
                only_local=not globally,
                prove=not diagnostic,
            )

        busy, trouble = False, None
        try:
            self._hold_ahead()
            busy = self._busy(wants)
        except FAILURES as error:
            trouble = _raising(error)
        snapshot = take(busy=busy, prepare=trouble)
        if snapshot is None and not (self._snapshots.cramped and not globally):
            if (self._when_busy == "skip" or not (globally or self.local_waits)) and not must:
                self.why_skipped = BUSY if globally or self.local_waits else BUSY_LOCALLY
                return None
            try:
                there = self._await_memory(wants, started + self._timeout)
                trouble = None if there else self._say_there_is_none
            except FAILURES as error:
                trouble = _raising(error)
            waited = time.monotonic() - started
            snapshot = take(busy=False, prepare=trouble)
        fits = snapshot is not None and self._fits(wants, snapshot)
        if wants.slots is not None and not wants.local:
            self.why_skipped = wants.why_not()
        if snapshot is None or not fits:
            return None
        save = Save(
            name=snapshot.name,
            serial=snapshot.serial,
            diagnostic=diagnostic,
            local=wants.local,
            globally=globally,
            asked=asked,
            waited=waited,
            replicate=not self._snapshots.heard & 1,
        )
        if wants.slots is not None and wants.local and save.replicate:
            wants.slots.replicated.append(save.name)
        one = self._stage(save, snapshot, facts, wants, started)
        with self._lock:
            self._under_way[save.serial] = one
        if one.staged is None or one.staged.done():
            self._land(one)
        else:
            threading.Thread(target=self._carry, args=(one,), name="holdfast-carry", daemon=True).start()
        return one.save

    def _hold_ahead(self) -> None:
        if not self._ahead.hold(self._timeout):
            raise SaveFailedError(
                f"the kernel has not given {size(TAKEN)} of staging memory for {self._timeout:g} s"
            )

    def _busy(self, wants: Wants) -> bool:
        self._take(0.0)
        if self._when_busy != "queue" and self._memory.slots is None and self._under_way:
            return True
        return not self._memory.is_there(wants, self._snapshots.planned_bytes)

    def _is_free(self, index: int) -> bool:
        """For a buffer or a slot: whether no save under way needs it."""
        with self._lock:
            return not any(index in one.holds for one in self._under_way.values())

    def _await_memory(self, wants: Wants, deadline: float) -> bool:
        """Wait until there is some, at most until `deadline`; a rank that was not busy has some already."""
        with self._lock:
            while not self._memory.is_there(wants, self._snapshots.planned_bytes):
                left = stretch(deadline - time.monotonic())
                if left <= 0:
                    return False
                if wants.slots is not None:
                    left = min(left, SLOT_POLL)
                if self._in_copy():
                    self._landed.wait(left)
                elif not self._await_release(left):
                    time.sleep(min(left, SLOT_POLL))  # somebody else is reading the slots
        return True

    def _say_there_is_none(self, name: CheckpointName) -> None:
        raise SaveFailedError(
            f"{name}: the save before it still holds the staging memory after {self._timeout:g} s"
        )

    def _fits(self, wants: Wants, snapshot: Snapshot) -> bool:
        """Whether the save can go on; with a new plan all ranks first agree on whether its image fits."""
        if wants.slots is None:
            return True
        wants.local = not self._snapshots.cramped
        if wants.local and snapshot.plan.number != self._fitting_plan:
            wants.refused = wants.slots.reserve(snapshot.plan.layout.size, globally=wants.globally)
            wants.local = not add_up(self._context.group, [wants.refused is not None])[0]
            self._fitting_plan = snapshot.plan.number if wants.local else 0
        return wants.local or wants.globally

    def _stage(
        self, save: Save, snapshot: Snapshot, facts: SaveFacts, wants: Wants, started: float
    ) -> _UnderWay:
        """Begin to copy the snapshot. If that fails, the other ranks learn why from the writer."""
        failed, staged, slot = "", None, None
        try:
            buffer, slot = self._memory.use(wants, save.name)
        except FAILURES as error:
            buffer, failed = _no_buffer(), _told(error)
        manifest = self._context.manifest(snapshot, facts) if self._context.group.is_coordinator else None
        if not failed:
            with self._lock:
                self._expect(save.name)
            try:
                self._make_ready(buffer, snapshot)
                staged = self._stager.stage(snapshot, buffer, self._snapshots.tracked)
            except FAILURES as error:
                failed = _told(error)
        job = Job(
            save=msgspec.structs.replace(save, blocked=time.monotonic() - started),
            plan=snapshot.plan.number,
            buffer=buffer.index,
            prints=[],
            timeout=self._timeout,
            manifest=manifest,
            failed=failed,
            image=slot.image if slot is not None else "",
            slot=slot.index if slot is not None else NO_SLOT,
        )
        return _UnderWay(job, snapshot.plan, buffer, staged, {buffer.index, job.slot} - {NO_SLOT})

    def _make_ready(self, buffer: Buffer, snapshot: Snapshot) -> None:
        """Make the buffer fit; where it was not got ready in time, do what is quicker, and say so once."""
        image = snapshot.plan.layout.size
        copied = sum(tensor.nbytes for tensor in snapshot.tensors if not tensor.is_cpu)
        missing = max(0, image - buffer.there)
        unlocked = 0 if buffer.locked or not copied else max(image, buffer.size)
        way, evidence = choose_readying(
            missing=missing, unlocked=unlocked, copied=copied, under_way=self._ahead.is_at(buffer)
        )
        if (missing or unlocked) and self._stepping and not self._told_readying:
            self._told_readying = True
            log.info("holdfast: %s came before its staging memory was ready: %s", snapshot.name, way)
            if self._context.group.is_coordinator:
                self._tell(DecisionMade(about="staging", chosen=way, evidence=evidence))
        if not self._ahead.leaves(buffer, self._timeout):
            raise SaveFailedError(f"its staging memory was being page-locked for {self._timeout:g} s")
        buffer.prepare(snapshot.plan)
        if unlocked and way == "wait":
            buffer.lock()

    def _expect(self, name: CheckpointName) -> None:
        """A snapshot is about to be staged: from now on the next attempt waits for what becomes of it.

        Whatever goes wrong here comes up again when the snapshot is handed over.
        """
        if self._writer.has_died:
            self._hear_last_words()
        with contextlib.suppress(Gone, SaveFailedError):
            self._launch()
        if self._start.rank == 0:
            announce(Path(self._start.run_dir), self._start.epoch, str(name))

    def _in_copy(self) -> list[_UnderWay]:
        return [one for one in list(self._under_way.values()) if one.late is None]

    def _carry(self, one: _UnderWay) -> None:
        """On a thread of its own: hand a snapshot over as soon as it is copied, even during a step."""
        deadline = time.monotonic() + self._timeout
        assert one.staged is not None
        while not one.staged.done() and time.monotonic() < deadline:
            time.sleep(CARRY_POLL)
        self._land(one)

    def _land(self, one: _UnderWay) -> None:
        """A snapshot is copied, or never will be: hand it over, but only after all earlier ones."""
        if one.staged is not None:
            prints, failed = self._result(one.staged)
            one.job = msgspec.structs.replace(one.job, prints=prints, failed=failed)
        with self._lock:
            one.copied = True
            if one.staged is not None:
                self._to_release.append(one.staged)
            for first in self._in_copy():
                if not first.copied:
                    break
                self._hand_over(first)
            self._landed.notify_all()

    def _result(self, staged: Staged) -> tuple[list[str], str]:
        """The fingerprints, and why the snapshot must not be used, if it must not."""
        try:
            if not staged.done():
                raise SaveFailedError(f"the copy of the snapshot did not end within {self._timeout:g} s")
            prints = staged.fingerprints()
            self._stager.note(staged)
            return prints, staged.torn()
        except FAILURES as error:  # the other ranks have staged theirs: they must learn of it
            return [], _told(error)

    def boundary(self) -> None:
        if self._in_copy() or self._to_release:
            with self._lock:
                for one in self._in_copy():
                    if one.staged is not None:
                        one.staged.boundary()
                for staged in self._to_release:
                    staged.boundary()
                    staged.release()
                self._to_release = []

    # --- the writer -----------------------------------------------------------------------------------------

    def _handed_over(self) -> list[_UnderWay]:
        return [one for one in self._under_way.values() if one.late is not None]

    def _launch(self) -> None:
        """Start a writer if there is none."""
        self._writer.launch(next((str(one.save.name) for one in self._handed_over()), ""))

    def _hand_over(self, one: _UnderWay) -> None:
        """From here on the save is the writer's. Whatever goes wrong becomes the save's outcome."""
        one.late = time.monotonic() + self._timeout + LATE
        try:
            self._launch()
            self._send(one)
        except Gone:
            self._hear_last_words()
        except SaveFailedError as error:
            self._end_stuck(str(error))
        except Exception as error:  # noqa: BLE001 - the other ranks have handed theirs over
            self._end_stuck(f"{type(error).__name__}: {error}")

    def _send(self, one: _UnderWay, *, again: bool = False) -> None:
        manifest = one.job.manifest
        if self._parent is not None and manifest is not None and not one.save.diagnostic:
            # The save before it may have been committed, or may have failed, since this one was taken.
            manifest = msgspec.structs.replace(manifest, parent=self._parent)
        job = msgspec.structs.replace(one.job, manifest=manifest, again=again)
        self._writer.hand_over(job, one.plan, one.buffer)

    def _hear_last_words(self) -> None:
        """The writer is gone: take in the messages it left; when `_receive` sees its end, it replaces it."""
        gone = self._writer.pid
        while gone is not None and self._writer.pid == gone and self._receive(0.0):
            pass

    def _receive(self, timeout: float) -> bool:
        """Take one message, or notice that the writer is dead or stuck; returns whether there was either."""
        late = min((one.late for one in self._under_way.values() if one.late is not None), default=None)
        if late is not None and time.monotonic() > late:
            self._end_stuck("the writer process did not answer in time and was ended")
            return True
        limit = timeout if late is None else min(timeout, max(0.0, late - time.monotonic()))
        try:
            message = self._writer.receive(limit)
        except Gone:
            self._replace()
            return True
        if message is None:
            return False
        one = self._under_way.get(message.serial)
        if isinstance(message, BufferFree):
            if one is not None:
                one.holds.discard(message.index)
            return True
        self._deaths = 0
        if one is not None:
            self._take_in(one, message)
        return True

    def _take_in(self, one: _UnderWay, news: LocalDone | JobDone | JobFailed) -> None:
        """Take in what became of a save, in one tier at least."""
        save, slots = one.save, self._memory.slots
        if not isinstance(news, LocalDone):
            del self._under_way[save.serial]
        if isinstance(news, JobFailed):
            if news.error.startswith(TornSnapshotError.__name__):
                self._stager.was_torn()
            if news.locally and slots is not None:
                slots.went_wrong(news.error)
            error = _error(news, save.name)
            self._ended.append(Ended(save=save, tier="local" if news.locally else "global", error=error))
            return
        tier: Tier = "local" if isinstance(news, LocalDone) or not save.globally else "global"
        if tier == "local" and slots is not None:
            slots.went_well()
        ended = Ended(
            save=save,
            tier=tier,
            seconds=news.seconds,
            for_all=tier == "local" or self._context.group.is_coordinator,
        )
        if ended.moves_head:
            self._parent = save.name.id
        self._ended.append(ended)

    def _replace(self) -> None:
        """The writer is gone: start another, and give it again what is unfinished."""
        code = self._writer.end()
        self._deaths += 1
        while self._handed_over() and self._deaths <= RESTARTS:
            log.warning("holdfast: the writer process ended (%s); starting another", code)
            try:
                self._launch()
                for one in self._handed_over():
                    self._send(one, again=True)
                return
            except Gone:
                code = self._writer.end()
                self._deaths += 1
            except SaveFailedError as error:
                self._end_stuck(str(error))
        self._fail_all(f"the writer process ended {self._deaths} times ({code})")

    def _end_stuck(self, why: str) -> None:
        self._writer.end(kill=True)
        self._fail_all(why)

    def _fail_all(self, why: str) -> None:
        """No writer will finish what is under way; the other ranks' writers must not wait for this one's."""
        self._deaths = 0
        start, error = self._start, f"SaveFailedError: {why}"
        ended = self._handed_over()
        if ended and start.world > 1:
            give_up(Path(start.run_dir), start.epoch, start.rank, ended[-1].save.serial, error)
        for one in ended:
            if one.save.drains and start.world > 1:
                give_up(Path(start.run_dir), start.epoch, start.rank, one.save.serial, error, drain=True)
        for one in ended:
            self._take_in(one, JobFailed(serial=one.save.serial, error=error, trace=""))

    # --- how it went ----------------------------------------------------------------------------------------

    def poll(self) -> list[Ended]:
        if self._under_way:
            self._take(0.0)
        return super().poll()

    def is_under_way(self, name: CheckpointName | None = None) -> bool:
        return any(name in (None, one.save.name) for one in list(self._under_way.values()))

    def wait(self, timeout: float, name: CheckpointName | None = None) -> list[Ended]:
        deadline = time.monotonic() + timeout
        what, line = f"the save {name} to be complete" if name else "saves to be complete", LiveLine()
        while self.is_under_way(name) and (left := deadline - time.monotonic()) > 0:
            line(Waiting(what, timeout - left, timeout))
            self._take(min(stretch(left), REWRITTEN))
        line.over()
        return self.poll()

    def _take(self, timeout: float) -> None:
        """Take in all there is to hear; wait at most `timeout` for some save to end."""
        deadline = time.monotonic() + timeout
        with self._lock:
            before = len(self._ended)
            while self._in_copy() and (left := deadline - time.monotonic()) > 0:
                self._landed.wait(left)
            while self._handed_over() and len(self._ended) == before:
                left = deadline - time.monotonic()
                self._receive(max(0.0, left))
                if left <= 0:
                    break
            while self._handed_over() and self._receive(0.0):
                pass

    def _await_release(self, timeout: float) -> bool:
        """Wait at most `timeout` until the writer lets go of a buffer or slot; False: it holds none."""
        deadline = time.monotonic() + timeout

        def held() -> int:
            return sum(len(one.holds) for one in self._under_way.values())

        before = held()
        while self._handed_over() and held() >= before > 0 and (left := deadline - time.monotonic()) > 0:
            self._receive(left)
        return before > 0

    # --- the end --------------------------------------------------------------------------------------------

    def no_more(self) -> None:
        self._ahead.stop()

    def abandon(self, *, await_at_exit: float = 0.0) -> None:
        busy = self._ahead.close(HURRY)
        with self._lock:
            deadline = time.monotonic() + ABANDON_WAIT
            while self._in_copy() and (left := deadline - time.monotonic()) > 0:
                self._landed.wait(left)
            left_alone = self._handed_over()
            self._writer.abandon(await_at_exit=await_at_exit if left_alone else 0.0)
            for one in left_alone:
                del self._under_way[one.save.serial]
        self._let_go(tidy=False, but=busy)

    def close(self) -> None:
        """Let the writer exit and give the memory back."""
        busy = self._ahead.close(LEAVE)  # first: it may be starting a writer
        self._writer.close()
        self._let_go(tidy=True, but=busy)

    def _let_go(self, *, tidy: bool, but: Buffer | None) -> None:
        self.boundary()
        if but is not None:
            log.warning("holdfast: a driver still page-locks staging memory, which is given back after that")
        self._memory.close(tidy=tidy, but=but)


def _raising(error: BaseException) -> Callable[[CheckpointName], None]:
    """A step for a rank's part of a save that tells the others that this rank has failed already."""

    def tell(_: CheckpointName) -> None:
        raise error

    return tell


def _told(error: BaseException) -> str:
    """For the writer, which tells all ranks: first what the error was, then where it came from."""
    return f"{describe(error)}\n{''.join(traceback.format_exception(error)).rstrip()}"


def _no_buffer() -> Buffer:
    """Stands in for a buffer that a rank does not have, in a job that only says so."""
    buffer = Buffer(NO_BUFFER)
    buffer.close()
    return buffer


def _error(outcome: JobFailed, name: CheckpointName) -> SaveFailedError | LeaseLostError:
    if outcome.lease_lost:
        return LeaseLostError(outcome.error)
    error = save_failed(f"{name} was not saved ({outcome.error}). Every older checkpoint is untouched")
    if outcome.trace:
        error.add_note(f"In the writer process:\n{outcome.trace.rstrip()}")
    return error
