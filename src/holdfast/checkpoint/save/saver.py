"""A save, in the foreground or in the background: asked for, staged, written, and what became of it.

In the foreground the checkpoint of the whole group is committed, or there is none, before `save` returns.
Everything that can fail on one rank (collecting the state, making the staged directory, writing, checking,
committing) ends in an exchange, so that a failure anywhere reaches every rank as the same error and nobody is
left waiting. A failed save removes what it staged and touches nothing that was committed.

In the background training is held up only until the snapshot is in staging memory. Guarantee: once it is
copied, this rank's snapshot is outside the trainer and in the hands of a process that outlives it. What is
copied when `begin` returns is handed over at once; a copy from a device may take longer, and a thread hands
it over as soon as it is complete. Snapshots are handed over in the order in which they were taken. That a
snapshot is coming is recorded before it is copied: even an attempt that starts at once, while the writer is
still starting, does not take the run away from it. Whether it was committed is learnt later, from `poll`.

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
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import msgspec

from holdfast.base import REWRITTEN, LiveLine, Waiting, stretch
from holdfast.checkpoint import commit as commits
from holdfast.checkpoint.copies import LocalRoom, LocalSlots, LocalTier, Refusal, Slot
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
from holdfast.checkpoint.save.handoff import (
    Job,
    JobFailed,
    LocalDone,
    MendCopies,
    Start,
    UsePeers,
    WriterClient,
    writing_threads,
)
from holdfast.checkpoint.save.plan import Plan
from holdfast.checkpoint.save.snapshot import Snapshot, Snapshotter
from holdfast.checkpoint.save.staging import Buffer, Staged, Stager
from holdfast.checkpoint.state import GRADIENTS, Tracked
from holdfast.errors import LeaseLostError, SaveFailedError, TornSnapshotError
from holdfast.journal import Event
from holdfast.record import ControlDirectory, Fence, Group, add_up

log = logging.getLogger("holdfast.checkpoint")

CARRY_POLL = 0.002
"""Seconds between two looks at a copy under way; small beside the copy, rare beside a training step."""
ABANDON_WAIT = 30.0
"""Seconds that a trainer which ends by an error gives a copy under way to be completed."""

NO_BUFFER = -2
"""The index of none."""
SLOT_POLL = 0.05
"""Seconds between two looks at slots that somebody reads, who does not tell when that ends."""

WhenBusy = Literal["queue", "skip", "wait"]
Tier = Literal["local", "global"]
BUSY = "the save before it is still being written on some rank (checkpoint.when_busy = 'skip')"


class SaveFacts(msgspec.Struct, frozen=True, kw_only=True):
    """What the manifest says about the moment of a save."""

    step: int
    parent: str | None
    reason: str
    versions: Versions
    windows: Windows = msgspec.field(default_factory=Windows)


class Saved(msgspec.Struct, frozen=True, kw_only=True):
    name: CheckpointName
    bytes: int
    """Stored by all ranks; known to rank 0 only, 0 elsewhere."""
    files: int
    seconds: float
    stored_seconds: float
    """Of these, for writing and committing the files."""


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
        """Complete but for the files, which nobody knows yet."""
        return Manifest(
            format=FORMAT,
            id=snapshot.name.id,
            step=snapshot.name.step,
            parent=facts.parent,
            run=self.control.run_id,
            attempt=self.attempt,
            epoch=self.fence.epoch,
            created=time.time(),
            world=World(size=self.group.world_size, backend=self.group.backend),
            parts=snapshot.parts,
            files=[],
            versions=facts.versions,
            samples=snapshot.samples,
            tokens=snapshot.tokens,
            counts=OF_THE_JOB,
            reason=facts.reason,
            windows=facts.windows,
            needs=[GRADIENTS] if GRADIENTS in snapshot.parts else [],
            proof=snapshot.proof,
        )


class Saver:
    """Saves in the foreground, for one attempt."""

    def __init__(self, context: SaveContext, snapshots: Snapshotter) -> None:
        self._context = context
        self._group = context.group
        self._snapshots = snapshots

    def save(
        self,
        tracked: Tracked,
        own: Callable[[], dict[str, Any]],
        facts: SaveFacts,
        *,
        diagnostic: bool = False,
    ) -> Saved:
        """Save and commit. Raises SaveFailedError (nothing changed) or LeaseLostError."""
        started = time.monotonic()
        root = self._context.root_for(diagnostic=diagnostic)
        name = self._snapshots.next_name(facts.step)

        opening = 0.0

        def open_staged(name: CheckpointName) -> None:
            nonlocal opening
            if self._group.is_coordinator:
                self._context.fence.check(f"stage {name}")
                begun = time.monotonic()
                commits.open_staged(root, name, self._context.owner())
                opening = time.monotonic() - begun

        try:
            snapshot = self._snapshots.take(
                tracked, own, facts.step, prepare=open_staged, prove=not diagnostic
            )
            assert snapshot is not None  # nobody is ever busy with a save in the foreground
            storing = time.monotonic()
            together(self._group, name, lambda: self._write(root, snapshot))
            stored = together(
                self._group, name, lambda: self._commit(root, snapshot, facts, diagnostic=diagnostic)
            )
        except FAILURES:
            if self._group.is_coordinator:
                commits.drop_staged(root, str(name))
            raise
        now = time.monotonic()
        return Saved(
            name=name,
            bytes=stored.bytes,
            files=stored.files,
            seconds=now - started,
            stored_seconds=opening + now - storing,
        )

    def _write(self, root: CheckpointRoot, snapshot: Snapshot) -> commits.Committed:
        staged = root.staged(snapshot.name)
        files = write_shards(staged, snapshot.plan, snapshot.tensors, snapshot.fingerprints())
        commits.leave_part(staged, snapshot.name, self._group.rank, files)
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


# What a snapshot is staged into: a slot of the local tier, or a staging buffer.
#
# In memory a slot is itself a buffer. On a disk a snapshot needs both: a buffer to be copied into, and the
# slot that its image is then written to. A save that goes to the checkpoint root may have to do without the
# local tier, on all ranks because of one, so for such a save a buffer has to be free as well.


@dataclass(frozen=True)
class LocalSaving:
    """What saves need to know of the local tier."""

    tier: LocalTier
    node: str
    keep: int
    max_bytes: int = 0
    here: frozenset[int] = frozenset()
    """The ranks of this place; its own is always one of them."""


class Wants:
    """Where a save is to go, and what became of that."""

    def __init__(self, slots: LocalSlots | None, *, globally: bool) -> None:
        self.slots = slots
        self.globally = globally
        self.refused: Refusal | None = None
        """Why this rank has no slot."""
        self.local = False
        """Whether every rank has one."""

    @property
    def cramped(self) -> bool:
        """Whether this rank has no slot, and waiting would not help."""
        return self.refused is not None and not self.refused.busy

    def why_not(self) -> str:
        told = self.refused.why if self.refused is not None else "another rank has no room for it"
        return f"no local copy: {told}"


class StagingMemory:
    """One rank's."""

    def __init__(
        self,
        buffers: int,
        context: SaveContext,
        local: LocalSaving | None,
        *,
        is_free: Callable[[int], bool],
        tell: Callable[[Event], None],
    ) -> None:
        """`is_free`: whether no save that is under way needs the buffer or slot with this index."""
        self._buffers = [Buffer(index) for index in range(buffers)]
        self._is_free = is_free
        self._in_use = contextlib.ExitStack()
        self.slots: LocalSlots | None = None
        if local is not None:
            self._in_use.enter_context(local.tier.in_use())
            rank = context.group.rank
            room = LocalRoom(
                local.tier,
                context.control,
                rank=rank,
                here=local.here,
                node=local.node,
                limit=local.max_bytes,
                keep=local.keep,
                tell=tell,
            )
            self.slots = LocalSlots(local.tier, room, rank=rank, keep=local.keep, is_free=is_free)

    def prepare(self, plan: Plan, *, pin: bool) -> None:
        """Take it before the first save does; raises SaveFailedError if there is too little."""
        if self.slots is not None:
            self.slots.prepare(plan, pin=pin)
        if self.slots is not None and self.slots.in_memory:
            return
        for buffer in self._buffers:
            buffer.prepare(plan)
            if pin:
                buffer.pinned()

    def is_there(self, wants: Wants, size: int | None) -> bool:
        """Whether a save can be staged now; a slot of this size is reserved for it, if the size is known."""
        if wants.slots is not None:
            if size is not None:
                wants.refused = wants.slots.reserve(size, globally=wants.globally)
            if wants.refused is not None and wants.refused.busy:
                return False
            if wants.slots.in_memory and not wants.globally:
                return True
        return any(self._is_free(buffer.index) for buffer in self._buffers)

    def use(self, wants: Wants, name: CheckpointName) -> tuple[Buffer, Slot | None]:
        """What this save is staged into, and the slot that its local copy will be in, if it has one."""
        slot = wants.slots.use(name) if wants.slots is not None and wants.local else None
        if slot is not None and slot.buffer is not None:
            return slot.buffer, slot
        return next(buffer for buffer in self._buffers if self._is_free(buffer.index)), slot

    def close(self, *, tidy: bool) -> None:
        if self.slots is not None:
            self.slots.close(tidy=tidy)
        self._in_use.close()
        for buffer in self._buffers:
            buffer.close()
        self._buffers = []


class Begun(msgspec.Struct, frozen=True, kw_only=True):
    """A save that is under way."""

    name: CheckpointName
    serial: int
    blocked: float
    """Seconds for which training was held up."""
    waited: float = 0.0
    """Of these, for an earlier save to let go of its memory."""


class Ended(msgspec.Struct, frozen=True, kw_only=True):
    """A save that was under way, as it ended for this rank; on rank 0, for all."""

    name: CheckpointName
    diagnostic: bool
    blocked: float
    seconds: float = 0.0
    error: SaveFailedError | LeaseLostError | None = None
    """With the writer's traceback."""
    tier: Tier = "global"
    local_only: bool = False
    """It was not meant for the checkpoint root."""
    moves_head: bool = True
    """Whether this is the first commit of it."""


class _Under(msgspec.Struct, frozen=True, kw_only=True):
    begun: Begun
    diagnostic: bool
    local: bool
    globally: bool


class _Flight(msgspec.Struct, frozen=True, kw_only=True):
    """A snapshot that is still being copied."""

    job: Job
    plan: Plan
    buffer: Buffer
    new_buffer: bool
    staged: Staged | None
    """None if staging failed at once."""


class BackgroundSaver:
    """Saves through a writer process, for one attempt."""

    def __init__(
        self,
        context: SaveContext,
        snapshots: Snapshotter,
        *,
        stager: Stager,
        when_busy: WhenBusy,
        timeout: float,
        lease_ttl: float,
        local: LocalSaving | None,
        tell: Callable[[Event], None],
    ) -> None:
        self._context = context
        self._snapshots = snapshots
        self._stager = stager
        self._when_busy = when_busy
        self._timeout = timeout
        self._handed: dict[int, int] = {}
        """Sizes of the buffers as the writer knows them."""
        self.why_skipped = ""
        """Why the last `begin` came to nothing, or to no local copy."""
        self._fitting_plan = 0
        """The last plan for which all ranks had room in the local tier."""
        self._serial = 0
        self._under_way: dict[int, _Under] = {}
        self._ended: list[Ended] = []
        self._flights: dict[int, _Flight] = {}
        """Snapshots that a thread of their own hands over when they are copied, by serial, in order."""
        self._to_release: list[Staged] = []
        """Copied, and still to be let go of, which is for the thread that trains."""
        self._copied: dict[int, Job] = {}
        """Those of them that are copied, or will never be, and wait only for the ones before."""
        self._lock = threading.RLock()
        """Held for the writer and the flights, which those threads use too."""
        self._landed = threading.Condition(self._lock)
        self._writer = WriterClient(
            Start(
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
        )
        self._memory = StagingMemory(
            2 if when_busy == "queue" else 1, context, local, is_free=self._is_free, tell=tell
        )

    def resumed_from(self, head: CheckpointName | None) -> None:
        if self._memory.slots is not None:
            self._memory.slots.resumed_from(head)

    def use_peers(self, peers: UsePeers) -> None:
        """Where replicas of local copies go from now on."""
        with self._lock:
            self._writer.use_peers(peers)

    def mend(self, order: MendCopies) -> None:
        """Have lost copies of the checkpoint that the run came from made again."""
        with self._lock:
            self._writer.mend(order)

    def launch(self) -> None:
        """Start the writer now rather than at the first save."""
        self._writer.launch()

    def prepare(self, tracked: Tracked, own: Callable[[], dict[str, Any]]) -> None:
        """Pay now for what the first save would: its plan, and staging memory, page-locked if need be."""
        plan = self._snapshots.plan_ahead(tracked, own)
        if plan is not None:
            self._prepare(plan, tracked)

    def _prepare(self, plan: Plan, tracked: Tracked) -> None:
        try:
            self._memory.prepare(plan, pin=bool(tracked.devices()))
        except FAILURES as error:  # the first save will say so again, to all ranks
            log.warning("holdfast: staging memory could not be prepared: %s", describe(error))

    @property
    def has_local_tier(self) -> bool:
        return self._memory.slots is not None

    @property
    def outstanding(self) -> int:
        return len(self._under_way)

    def begin(
        self,
        tracked: Tracked,
        own: Callable[[], dict[str, Any]],
        facts: SaveFacts,
        *,
        diagnostic: bool = False,
        must: bool = False,
        globally: bool = True,
        local: bool = True,
    ) -> Begun | None:
        """Take a snapshot and hand it over. None: skipped, on all ranks alike (`why_skipped`).

        With `local` it goes to the local tier, if there is one, and with `globally` to the checkpoint root
        too; where some rank has no room for a local copy, only there. `must`: wait for a busy rank also where
        the policy is to skip.
        """
        started, called = time.monotonic(), time.time()
        waited, self.why_skipped = 0.0, ""
        wants = Wants(self._memory.slots if local and not diagnostic else None, globally=globally)

        def take(*, busy: bool, prepare: Callable[[CheckpointName], None] | None = None) -> Snapshot | None:
            return self._snapshots.take(
                tracked,
                own,
                facts.step,
                prepare=prepare,
                busy=busy,
                cramped=wants.cramped,
                only_local=not globally,
                prove=not diagnostic,
            )

        busy, trouble = False, None
        try:
            busy = self._busy(wants)
        except FAILURES as error:
            trouble = _raising(error)
        snapshot = take(busy=busy, prepare=trouble)
        if snapshot is None and not (self._snapshots.cramped and not globally):
            if self._when_busy == "skip" and not must:
                self.why_skipped = BUSY
                return None
            try:
                there = self._await_memory(wants, started + self._timeout)
                trouble = None if there else self._say_there_is_none
            except FAILURES as error:
                trouble = _raising(error)
            waited = time.monotonic() - started
            snapshot = take(busy=False, prepare=trouble)
        fits = snapshot is not None and self._fits(wants, snapshot, tracked)
        if wants.slots is not None and not wants.local:
            self.why_skipped = wants.why_not()
        if snapshot is None or not fits:
            return None
        self._serial += 1
        failed = ""
        slot: Slot | None = None
        try:
            buffer, slot = self._memory.use(wants, snapshot.name)
        except FAILURES as error:
            buffer, failed = _no_buffer(), _told(error)
        job = Job(
            serial=self._serial,
            step=facts.step,
            id=snapshot.name.id,
            diagnostic=diagnostic,
            plan=snapshot.plan.number,
            buffer=buffer.index,
            prints=[],
            timeout=self._timeout,
            called=called,
            blocked=0.0,
            manifest=self._context.manifest(snapshot, facts) if self._context.group.is_coordinator else None,
            local=wants.slots is not None and wants.local,
            globally=globally,
            image=slot.image if slot is not None else "",
            slot=slot.index if slot is not None else -1,
        )
        staged = None
        if not failed:
            with self._lock:
                self._writer.expect(snapshot.name)
            try:
                buffer.prepare(snapshot.plan)
                staged = self._stager.stage(snapshot, buffer, tracked)
            except FAILURES as error:  # the other ranks have staged: they must learn of it
                failed = _told(error)
        blocked = time.monotonic() - started
        job = msgspec.structs.replace(job, blocked=blocked, failed=failed)
        begun = Begun(name=snapshot.name, serial=self._serial, blocked=blocked, waited=waited)
        self._under_way[self._serial] = _Under(
            begun=begun, diagnostic=diagnostic, local=job.local, globally=globally
        )
        new_buffer = self._handed.get(buffer.index) != buffer.size
        self._handed[buffer.index] = buffer.size
        flight = _Flight(job=job, plan=snapshot.plan, buffer=buffer, new_buffer=new_buffer, staged=staged)
        with self._lock:
            self._flights[job.serial] = flight
        if staged is None or staged.done():
            self._land(flight)
        else:
            threading.Thread(target=self._carry, args=(flight,), name="holdfast-carry", daemon=True).start()
        return begun

    def _fits(self, wants: Wants, snapshot: Snapshot, tracked: Tracked) -> bool:
        """Whether the save can go on; with a new plan all ranks first agree on whether its image fits.

        The first save under a plan then also pays for the slots of the next ones.
        """
        if wants.slots is None:
            return True
        wants.local = not self._snapshots.cramped
        if wants.local and snapshot.plan.number != self._fitting_plan:
            wants.refused = wants.slots.reserve(snapshot.plan.layout.size, globally=wants.globally)
            wants.local = not add_up(self._context.group, [wants.refused is not None])[0]
            self._fitting_plan = snapshot.plan.number if wants.local else 0
            if wants.local:
                self._prepare(snapshot.plan, tracked)
        return wants.local or wants.globally

    def _carry(self, flight: _Flight) -> None:
        """On a thread of its own: hand a snapshot over as soon as it is copied, also amid a step."""
        deadline = time.monotonic() + self._timeout
        assert flight.staged is not None
        while not flight.staged.done() and time.monotonic() < deadline:
            time.sleep(CARRY_POLL)
        self._land(flight)

    def _land(self, flight: _Flight) -> None:
        """A snapshot is copied, or will never be: hand it over, but none before those that came before it."""
        job = flight.job
        if flight.staged is not None:
            prints, failed = self._result(flight.staged)
            job = msgspec.structs.replace(job, prints=prints, failed=failed)
        with self._lock:
            self._copied[job.serial] = job
            if flight.staged is not None:
                self._to_release.append(flight.staged)
            while self._flights and (serial := next(iter(self._flights))) in self._copied:
                first = self._flights.pop(serial)
                ready = self._copied.pop(serial)
                self._writer.hand_over(ready, first.plan, first.buffer, new_buffer=first.new_buffer)
            self._landed.notify_all()

    def _result(self, staged: Staged) -> tuple[list[str], str]:
        """The fingerprints, and why the snapshot must not be used, if so."""
        try:
            if not staged.done():
                raise SaveFailedError(f"the copy of the snapshot did not end within {self._timeout:g} s")
            prints = staged.fingerprints()
            self._stager.note(staged)
            return prints, staged.torn()
        except FAILURES as error:  # the other ranks have staged: they must learn of it
            return [], _told(error)

    def boundary(self) -> None:
        """The next step is about to begin: nothing may change under a copy that is still going on."""
        if self._flights or self._to_release:
            with self._lock:
                for flight in self._flights.values():
                    if flight.staged is not None:
                        flight.staged.boundary()
                for staged in self._to_release:
                    staged.boundary()
                    staged.release()
                self._to_release = []

    def _busy(self, wants: Wants) -> bool:
        self._take(0.0)
        if self._when_busy != "queue" and self._memory.slots is None and self._under_way:
            return True
        return not self._memory.is_there(wants, self._snapshots.planned_bytes)

    def _is_free(self, index: int) -> bool:
        """Of a buffer or a slot: whether no save that is under way needs it."""
        with self._lock:
            flying = any(index in (f.buffer.index, f.job.slot) for f in self._flights.values())
            return not flying and self._writer.is_free(index)

    def _await_memory(self, wants: Wants, deadline: float) -> bool:
        """Wait until there is some, at most until then; on a rank that was not busy there is already."""
        with self._lock:
            while not self._memory.is_there(wants, self._snapshots.planned_bytes):
                left = stretch(deadline - time.monotonic())
                if left <= 0:
                    return False
                if wants.slots is not None:
                    left = min(left, SLOT_POLL)
                if self._flights:
                    self._landed.wait(left)
                elif not self._writer.await_buffer(left):
                    time.sleep(min(left, SLOT_POLL))  # somebody else reads the slots
        return True

    def _say_there_is_none(self, name: CheckpointName) -> None:
        raise SaveFailedError(
            f"{name}: the save before it still holds the staging memory after {self._timeout:g} s"
        )

    # --- how it went ----------------------------------------------------------------------------------------

    def poll(self) -> list[Ended]:
        """What has ended since the last call. Never blocks."""
        if self._under_way:
            self._take(0.0)
        ended, self._ended = self._ended, []
        return ended

    def is_under_way(self, name: CheckpointName | None = None) -> bool:
        """Whether this save is, or, without a name, any."""
        return any(name in (None, under.begun.name) for under in self._under_way.values())

    def wait(self, timeout: float, name: CheckpointName | None = None) -> list[Ended]:
        """Wait until nothing is under way, or not this, at most `timeout`; everything that has ended."""
        deadline = time.monotonic() + timeout
        what, line = f"the save {name} to be complete" if name else "saves to be complete", LiveLine()
        while self.is_under_way(name) and (left := deadline - time.monotonic()) > 0:
            line(Waiting(what, timeout - left, timeout))
            self._take(min(stretch(left), REWRITTEN))
        line.over()
        return self.poll()

    def _take(self, timeout: float) -> None:
        deadline = time.monotonic() + timeout
        with self._lock:
            while self._flights and (left := deadline - time.monotonic()) > 0:
                self._landed.wait(left)
            outcomes = self._writer.poll(max(0.0, deadline - time.monotonic()))
        for outcome in outcomes:
            if isinstance(outcome, JobFailed):
                self._end_failed(outcome)
            elif isinstance(outcome, LocalDone):
                self._ended.append(self._end_well(self._under_way[outcome.serial], outcome.seconds, "local"))
            else:
                under = self._under_way.pop(outcome.serial)
                tier: Tier = "global" if under.globally else "local"
                self._ended.append(self._end_well(under, outcome.seconds, tier))

    def _end_well(self, under: _Under, seconds: float, tier: Tier) -> Ended:
        if tier == "local" and self._memory.slots is not None:
            self._memory.slots.went_well()
        return _ended(under, tier, seconds)

    def _end_failed(self, outcome: JobFailed) -> None:
        under = self._under_way.pop(outcome.serial)
        if outcome.error.startswith(TornSnapshotError.__name__):
            self._stager.was_torn()
        if outcome.locally and self._memory.slots is not None:
            self._memory.slots.went_wrong(outcome.error)
        ended = _ended(under, "local" if outcome.locally else "global")
        self._ended.append(msgspec.structs.replace(ended, error=_error(outcome, under.begun.name)))

    def abandon(self, *, await_at_exit: float = 0.0) -> None:
        """The trainer is about to end: the writer finishes by itself what it was handed."""
        with self._lock:
            deadline = time.monotonic() + ABANDON_WAIT
            while self._flights and (left := deadline - time.monotonic()) > 0:
                self._landed.wait(left)
            self._writer.abandon(await_at_exit=await_at_exit)
        self._let_go(tidy=False)

    def close(self) -> None:
        """Everything has ended: let the writer exit and give the memory back."""
        self._writer.close()
        self._let_go(tidy=True)

    def _let_go(self, *, tidy: bool) -> None:
        self.boundary()
        self._memory.close(tidy=tidy)


def _raising(error: BaseException) -> Callable[[CheckpointName], None]:
    """Something that a rank does in its part of a save: tell the others that it failed before."""

    def tell(_: CheckpointName) -> None:
        raise error

    return tell


def _told(error: BaseException) -> str:
    """For the writer, which tells all ranks: what it was, and then where it came from."""
    return f"{describe(error)}\n{''.join(traceback.format_exception(error)).rstrip()}"


def _no_buffer() -> Buffer:
    """In place of one that a rank does not have, for a job that only says so."""
    buffer = Buffer(NO_BUFFER)
    buffer.close()
    return buffer


def _ended(under: _Under, tier: Tier, seconds: float = 0.0) -> Ended:
    return Ended(
        name=under.begun.name,
        diagnostic=under.diagnostic,
        blocked=under.begun.blocked,
        seconds=seconds,
        tier=tier,
        local_only=under.local and not under.globally,
        moves_head=tier == "local" or not under.local,
    )


def _error(outcome: JobFailed, name: CheckpointName) -> SaveFailedError | LeaseLostError:
    if outcome.lease_lost:
        return LeaseLostError(outcome.error)
    error = save_failed(f"{name} was not saved ({outcome.error}). Every older checkpoint is untouched")
    if outcome.trace:
        error.add_note(f"In the writer process:\n{outcome.trace.rstrip()}")
    return error
