"""Saving in the background: training is held up only until the snapshot is in staging memory.

Guarantee: once it is copied, this rank's snapshot is outside the trainer and in the hands of a process that
outlives it. State on the host is copied when `begin` returns; a copy from a device may go on for a while, and
is handed over by a thread as soon as it is complete. Snapshots are handed over in the order they were taken.
Whether one was committed is learnt later, from `poll`.

Every rank makes the same calls in the same order. All that ranks must agree on (is anyone still busy, does
the plan still fit) is settled in the one exchange that a snapshot takes.
"""

from __future__ import annotations

import logging
import os
import threading
import time
import traceback
from collections.abc import Callable
from typing import Any, Literal

import msgspec

from holdfast.checkpoint.handoff import Job, JobDone, JobFailed, Start
from holdfast.checkpoint.identity import CheckpointName
from holdfast.checkpoint.plan import Plan
from holdfast.checkpoint.save import SaveContext, SaveFacts
from holdfast.checkpoint.snapshot import Snapshotter
from holdfast.checkpoint.stage import Staged, Stager
from holdfast.checkpoint.staging import Buffer
from holdfast.checkpoint.state import Tracked
from holdfast.checkpoint.writer_client import WriterClient, writing_threads
from holdfast.errors import LeaseLostError, SaveFailedError, TornSnapshotError

log = logging.getLogger("holdfast.checkpoint")

CARRY_POLL = 0.002
"""Seconds between two looks at a copy from a device; small beside the copy, rare beside a training step."""
ABANDON_WAIT = 30.0
"""Seconds that a trainer which ends by an error gives a copy from a device to be completed."""

WhenBusy = Literal["queue", "skip", "wait"]


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


class _Under(msgspec.Struct, frozen=True, kw_only=True):
    begun: Begun
    diagnostic: bool


class _Flight(msgspec.Struct, frozen=True, kw_only=True):
    """A snapshot that is still being copied from a device."""

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
    ) -> None:
        self._context = context
        self._snapshots = snapshots
        self._stager = stager
        self._when_busy = when_busy
        self._timeout = timeout
        self._buffers = [Buffer(index) for index in range(2 if when_busy == "queue" else 1)]
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
            )
        )

    def launch(self) -> None:
        """Start the writer now rather than at the first save."""
        self._writer.launch()

    def prepare(self, tracked: Tracked, own: Callable[[], dict[str, Any]]) -> None:
        """Pay now for what the first save would: its plan, and staging memory, page-locked if need be."""
        plan = self._snapshots.plan_ahead(tracked, own)
        if plan is None:
            return
        for buffer in self._buffers:
            try:
                buffer.prepare(plan)
                if tracked.devices():
                    buffer.pinned()
            except SaveFailedError as error:  # the first save will say so again, to all ranks
                log.warning("holdfast: %s", error)
                return

    @property
    def outstanding(self) -> int:
        return len(self._under_way)

    @property
    def writer_pid(self) -> int | None:
        return self._writer.pid

    def begin(
        self,
        tracked: Tracked,
        own: Callable[[], dict[str, Any]],
        facts: SaveFacts,
        *,
        diagnostic: bool = False,
        must: bool = False,
    ) -> Begun | None:
        """Take a snapshot and hand it over. None: skipped, on all ranks, because one was still busy.

        `must`: wait for a busy rank even where the policy is to skip.
        """
        started, called = time.monotonic(), time.time()
        waited = 0.0
        snapshot = self._snapshots.take(tracked, own, facts.step, busy=self._busy())
        if snapshot is None:
            if self._when_busy == "skip" and not must:
                return None
            self._await_buffer(started + self._timeout)
            waited = time.monotonic() - started
            snapshot = self._snapshots.take(tracked, own, facts.step, prepare=self._need_buffer)
            assert snapshot is not None
        self._serial += 1
        job = Job(
            serial=self._serial,
            step=facts.step,
            id=snapshot.name.id,
            diagnostic=diagnostic,
            plan=snapshot.plan.number,
            buffer=0,
            prints=[],
            timeout=self._timeout,
            called=called,
            blocked=0.0,
            manifest=self._context.manifest(snapshot.name, facts, snapshot.parts)
            if self._context.group.is_coordinator
            else None,
        )
        buffer = next(b for b in self._buffers if self._is_free(b))
        staged, new_buffer, failed = None, False, ""
        try:
            new_buffer = buffer.prepare(snapshot.plan)
            staged = self._stager.stage(snapshot, buffer, tracked)
        except Exception as error:  # noqa: BLE001 - the other ranks have staged: they must learn of it
            failed = "".join(traceback.format_exception(error))
        blocked = time.monotonic() - started
        job = msgspec.structs.replace(job, buffer=buffer.index, blocked=blocked, failed=failed)
        begun = Begun(name=snapshot.name, serial=self._serial, blocked=blocked, waited=waited)
        self._under_way[self._serial] = _Under(begun=begun, diagnostic=diagnostic)
        flight = _Flight(job=job, plan=snapshot.plan, buffer=buffer, new_buffer=new_buffer, staged=staged)
        with self._lock:
            self._flights[job.serial] = flight
        if staged is None or staged.done():
            self._land(flight)
        else:
            threading.Thread(target=self._carry, args=(flight,), name="holdfast-carry", daemon=True).start()
        return begun

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
                raise SaveFailedError(f"the copy from the device did not end within {self._timeout:g} s")
            prints = staged.fingerprints()
            self._stager.note(staged)
            return prints, staged.torn()
        except Exception as error:  # noqa: BLE001 - the other ranks have staged: they must learn of it
            return [], "".join(traceback.format_exception(error))

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

    def _busy(self) -> bool:
        self._take(0.0)
        if self._when_busy == "queue":
            return not any(map(self._is_free, self._buffers))
        return bool(self._under_way)

    def _is_free(self, buffer: Buffer) -> bool:
        with self._lock:
            in_flight = any(flight.buffer is buffer for flight in self._flights.values())
            return not in_flight and self._writer.is_free(buffer.index)

    def _await_buffer(self, deadline: float) -> None:
        """Wait until one is free, at most until then; on a rank that was not busy there is one already."""
        with self._lock:
            while not any(map(self._is_free, self._buffers)):
                left = deadline - time.monotonic()
                if left <= 0:
                    return
                if self._flights:
                    self._landed.wait(left)
                else:
                    self._writer.await_buffer(left)

    def _need_buffer(self, name: CheckpointName) -> None:
        if not any(map(self._is_free, self._buffers)):
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

    def wait(self, timeout: float) -> list[Ended]:
        """Wait until nothing is under way, at most `timeout`; everything that has ended."""
        deadline = time.monotonic() + timeout
        while self._under_way and (left := deadline - time.monotonic()) > 0:
            self._take(left)
        return self.poll()

    def _take(self, timeout: float) -> None:
        deadline = time.monotonic() + timeout
        with self._lock:
            while self._flights and (left := deadline - time.monotonic()) > 0:
                self._landed.wait(left)
            outcomes = self._writer.poll(max(0.0, deadline - time.monotonic()))
        for outcome in outcomes:
            if isinstance(outcome, JobFailed) and outcome.error.startswith(TornSnapshotError.__name__):
                self._stager.was_torn()
            under = self._under_way.pop(outcome.serial)
            self._ended.append(
                Ended(
                    name=under.begun.name,
                    diagnostic=under.diagnostic,
                    blocked=under.begun.blocked,
                    seconds=outcome.seconds if isinstance(outcome, JobDone) else 0.0,
                    error=_error(outcome, under.begun.name) if isinstance(outcome, JobFailed) else None,
                )
            )

    def abandon(self, *, await_at_exit: float = 0.0) -> None:
        """The trainer is about to end: the writer finishes by itself what it was handed."""
        with self._lock:
            deadline = time.monotonic() + ABANDON_WAIT
            while self._flights and (left := deadline - time.monotonic()) > 0:
                self._landed.wait(left)
            self._writer.abandon(await_at_exit=await_at_exit)
        self._let_go()

    def close(self) -> None:
        """Everything has ended: let the writer exit and give the memory back."""
        self._writer.close()
        self._let_go()

    def _let_go(self) -> None:
        self.boundary()
        for buffer in self._buffers:
            buffer.close()
        self._buffers = []


def _error(outcome: JobFailed, name: CheckpointName) -> SaveFailedError | LeaseLostError:
    if outcome.lease_lost:
        return LeaseLostError(outcome.error)
    error = SaveFailedError(f"{name} was not saved ({outcome.error}). Every older checkpoint is untouched")
    if outcome.trace:
        error.add_note(f"In the writer process:\n{outcome.trace.rstrip()}")
    return error
