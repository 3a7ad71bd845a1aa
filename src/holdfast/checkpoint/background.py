"""Saving in the background: training is held up only until the snapshot is in staging memory.

Guarantee: when `begin` returns a name, this rank's snapshot is complete, outside the trainer, and in the
hands of a process that outlives it. Whether it was committed is learnt later, from `poll`.

Every rank makes the same calls in the same order. All that ranks must agree on (is anyone still busy, does
the plan still fit) is settled in the one exchange that a snapshot takes.
"""

from __future__ import annotations

import time
import traceback
from collections.abc import Callable
from typing import Any, Literal

import msgspec
import torch

from holdfast.checkpoint.handoff import Job, JobDone, JobFailed, Start
from holdfast.checkpoint.identity import CheckpointName
from holdfast.checkpoint.save import SaveContext, SaveFacts
from holdfast.checkpoint.snapshot import Snapshot, Snapshotter
from holdfast.checkpoint.staging import Buffer, stage_from_host
from holdfast.checkpoint.state import Tracked
from holdfast.checkpoint.writer_client import WriterClient, writing_threads
from holdfast.errors import LeaseLostError, SaveFailedError

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


class BackgroundSaver:
    """Saves through a writer process, for one attempt."""

    def __init__(
        self,
        context: SaveContext,
        snapshots: Snapshotter,
        *,
        when_busy: WhenBusy,
        timeout: float,
        lease_ttl: float,
    ) -> None:
        self._context = context
        self._snapshots = snapshots
        self._when_busy = when_busy
        self._timeout = timeout
        self._buffers = [Buffer(index) for index in range(2 if when_busy == "queue" else 1)]
        self._serial = 0
        self._under_way: dict[int, _Under] = {}
        self._ended: list[Ended] = []
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
            )
        )

    def launch(self) -> None:
        """Start the writer now rather than at the first save."""
        self._writer.launch()

    @property
    def outstanding(self) -> int:
        return self._writer.outstanding

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
            self._writer.await_buffer(self._timeout)
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
        buffer = next(b for b in self._buffers if self._writer.is_free(b.index))
        new_buffer = False
        try:
            new_buffer = buffer.prepare(snapshot.plan)
            job = msgspec.structs.replace(job, prints=self._stage(snapshot, buffer))
        except Exception as error:  # noqa: BLE001 - the other ranks have staged: they must learn of it
            told = "".join(traceback.format_exception(error))
            job = msgspec.structs.replace(job, failed=told)
        blocked = time.monotonic() - started
        job = msgspec.structs.replace(job, buffer=buffer.index, blocked=blocked)
        self._writer.hand_over(job, snapshot.plan, buffer, new_buffer=new_buffer)
        begun = Begun(name=snapshot.name, serial=self._serial, blocked=blocked, waited=waited)
        self._under_way[self._serial] = _Under(begun=begun, diagnostic=diagnostic)
        return begun

    def _busy(self) -> bool:
        self._take(0.0)
        if self._when_busy == "queue":
            return not any(self._writer.is_free(buffer.index) for buffer in self._buffers)
        return self._writer.outstanding > 0

    def _need_buffer(self, name: CheckpointName) -> None:
        if not any(self._writer.is_free(buffer.index) for buffer in self._buffers):
            raise SaveFailedError(
                f"{name}: the save before it still holds the staging memory after {self._timeout:g} s"
            )

    def _stage(self, snapshot: Snapshot, buffer: Buffer) -> list[str]:
        threads = min(4, torch.get_num_threads())
        return stage_from_host(buffer, snapshot.plan, snapshot.tensors, snapshot.prints, threads)

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
        for outcome in self._writer.poll(timeout):
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

    def abandon(self) -> None:
        """The trainer is about to end: the writer finishes by itself what it was handed."""
        self._writer.abandon()
        self._let_go()

    def close(self) -> None:
        """Everything has ended: let the writer exit and give the memory back."""
        self._writer.close()
        self._let_go()

    def _let_go(self) -> None:
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
