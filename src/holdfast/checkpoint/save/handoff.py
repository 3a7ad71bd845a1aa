"""Handing saves over to the writer process: what trainer and writer say to each other, and the line between.

They speak over a stream (process/local_wire.py), which also carries the file descriptor of each staging
buffer, once. The first message carries the writer's lock (record/lease.py), which stays held while it is
on its way.

The trainer never waits for the writer without a deadline, not even while the socket is full. The saver
(saver.py) knows what is under way, and what becomes of it when a writer dies.

The writer process imports this module too, so torch must not be imported here.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import logging
import os
import subprocess
import sys
import threading
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from holdfast.checkpoint.copies import PlaceMap, Where
from holdfast.checkpoint.format import CheckpointName, Declared, Layout, Manifest
from holdfast.errors import SaveFailedError
from holdfast.process import Companion, Gone, Stream, proc, start_child
from holdfast.record import lock_for_writer

if TYPE_CHECKING:
    from holdfast.checkpoint.save.device import Buffer
    from holdfast.checkpoint.save.plan import Plan

log = logging.getLogger("holdfast.checkpoint")

SEND_TIMEOUT = 60.0
NO_SLOT = -1


class Start(msgspec.Struct, frozen=True, kw_only=True, tag="start"):
    """The first message: whom the writer works for. On rank 0 the writer's lock may come with it."""

    run_dir: str
    run: str
    attempt: int
    epoch: int
    lease_ttl: float
    root: str
    rank: int
    world: int
    threads: int
    tier: str = ""
    """This place's directory in the local tier; empty: there is none."""
    keep: int = 2
    """Checkpoints that the local tier keeps."""
    trainer: int = 0
    """Its process id: the id of the writer's parent for as long as the trainer lives; 0: not known."""


class UseBuffer(msgspec.Struct, frozen=True, tag="buffer"):
    """A staging buffer; its file descriptor comes with this message."""

    index: int
    size: int


class UsePlan(msgspec.Struct, frozen=True, tag="plan"):
    number: int
    layout: Layout
    declared: Declared | None


class PeerTarget(msgspec.Struct, frozen=True, array_like=True):
    """A place that is to hold a replica of what this rank saves, and where its peer server listens."""

    place: str
    node: str
    host: str
    port: int


class UsePeers(msgspec.Struct, frozen=True, kw_only=True, tag="peers"):
    """Where replicas go from now on."""

    targets: list[PeerTarget]
    timeout: float
    """Seconds that the replicas of one save may take."""
    where: Where | None = None
    """On rank 0: the places of all ranks, for `where.json`."""


class MendCopies(msgspec.Struct, frozen=True, kw_only=True, tag="mend"):
    """The run has resumed from the local tier: whatever this node lacks of that checkpoint is made again."""

    checkpoint: str
    manifest: str
    """Its digest."""
    home: str
    """Where the manifest is."""
    assembly: str
    """The file that says which place holds what."""
    directory: str
    """Where the global tier has the checkpoint, if it does."""
    rank: int
    ranks: list[int]
    """The ranks whose shards, as saved by them, this rank sees to."""
    places: PlaceMap
    tier: str
    node: str
    keep: int
    max_bytes: int
    timeout: float
    """Seconds that one copy may take."""


class Leave(msgspec.Struct, frozen=True, tag="leave"):
    """The run is at its end: no need to wait for what is being sent to peers."""


class Save(msgspec.Struct, frozen=True, kw_only=True):
    """One save, as everyone involved knows it: from its snapshot to what became of it."""

    name: CheckpointName
    serial: int
    """Counts the snapshots of an attempt, on every rank alike."""
    diagnostic: bool = False
    local: bool = False
    """Whether it is to be committed in the local tier."""
    globally: bool = True
    """Whether it is to be committed in the checkpoint root."""
    asked: float = 0.0
    """Wall-clock time at which it was requested."""
    blocked: float = 0.0
    """Seconds for which training was held up."""
    waited: float = 0.0
    """How many of these were spent waiting for an earlier save to let go of its memory."""
    replicate: bool = True
    """Whether its local copies are sent to peers; the same on every rank."""

    @property
    def drains(self) -> bool:
        """Whether it reaches the root from the local tier, where it was committed first."""
        return self.local and self.globally

    @property
    def local_only(self) -> bool:
        return self.local and not self.globally


class Job(msgspec.Struct, frozen=True, kw_only=True, tag="job"):
    """A save whose snapshot is fully staged, and how the writer gets at it."""

    save: Save
    plan: int
    buffer: int
    prints: list[str]
    """Fingerprints, in the layout's order."""
    timeout: float
    """Seconds that this save may take from now."""
    deadline: float = 0.0
    """When they are over, by the clock of the writer, which fills it in."""
    manifest: Manifest | None
    """On rank 0 only; complete except for the files and the parent."""
    failed: str = ""
    """Why the snapshot could not be staged on this rank, if so; the others must learn of it."""
    again: bool = False
    """An earlier writer may have begun it already."""
    image: str = ""
    """For a local save: the image that is to hold it. In memory, that is the buffer itself."""
    slot: int = NO_SLOT
    """The image's index; the buffer's own where the image is the buffer."""


class BufferFree(msgspec.Struct, frozen=True, tag="free"):
    serial: int
    index: int


class JobDone(msgspec.Struct, frozen=True, kw_only=True, tag="done"):
    """This rank's part is written; on rank 0, the whole save is committed."""

    serial: int
    seconds: float


class LocalDone(msgspec.Struct, frozen=True, kw_only=True, tag="local"):
    """It is committed in the local tier, and now goes to the checkpoint root too."""

    serial: int
    seconds: float


class JobFailed(msgspec.Struct, frozen=True, kw_only=True, tag="failed"):
    serial: int
    error: str
    trace: str
    lease_lost: bool = False
    locally: bool = False
    """It did not even get as far as the local tier."""


ToWriter = Start | UseBuffer | UsePlan | UsePeers | MendCopies | Job | Leave
ToTrainer = BufferFree | LocalDone | JobDone | JobFailed


def spawn(descriptor: int) -> subprocess.Popen[bytes]:
    """Start a writer process that talks over this socket."""
    module = "holdfast.checkpoint.save.writer_process"
    return start_child(module, str(descriptor), passed=[descriptor], outlives=True)


class WriterConnection:
    """The line to the current writer process, and what that process has been told; knows nothing of saves."""

    def __init__(self, start: Start) -> None:
        self._start = start
        self._writer: Companion[Stream[ToTrainer]] | None = None
        self._plans: set[int] = set()
        """Numbers of the plans that it knows."""
        self._buffers: dict[int, int] = {}
        """Sizes of the buffers that it has, by index."""
        self._orders: dict[type, UsePeers | MendCopies] = {}
        """Kept for every writer that takes this one's place, too."""

    @property
    def pid(self) -> int | None:
        return self._writer.pid if self._writer is not None else None

    @property
    def has_died(self) -> bool:
        return self._writer is not None and self._writer.code is not None

    def launch(self, first: str) -> None:
        """Start the process, unless it is running; it is to work on save `first`. Returns at once."""
        if self._writer is not None:
            return  # if it has died, the next exchange shows that and sees to it
        try:
            self._writer = Companion(spawn, Stream.pair(ToTrainer))
        except OSError as error:
            raise SaveFailedError(f"the writer process cannot be started: {error}") from error
        self._plans, self._buffers = set(), {}
        self._send_start(first)
        for order in self._orders.values():
            self._say(order)

    def _send_start(self, first: str) -> None:
        """With rank 0's sign of life: while it is under way, the message holds the lock for the writer."""
        start, locked = self._start, None
        if start.rank == 0:
            locked = lock_for_writer(Path(start.run_dir), start.epoch, first)
        try:
            self._say(start, locked)
        finally:
            if locked is not None:
                os.close(locked)

    def order(self, order: UsePeers | MendCopies) -> None:
        """What the writer does beside the saves, from now on; a writer that takes its place is told too."""
        self._orders[type(order)] = order
        if self._writer is not None:
            with contextlib.suppress(Gone, SaveFailedError):
                self._say(order)

    def hand_over(self, job: Job, plan: Plan, buffer: Buffer) -> None:
        """Send a job, preceded by what the writer needs for it and lacks. Raises Gone, or SaveFailedError."""
        # Without memory there is nothing to map, only a failure to report; a slot may be closed for good.
        if buffer.size and buffer.descriptor >= 0 and self._buffers.get(buffer.index) != buffer.size:
            self._say(UseBuffer(buffer.index, buffer.size), buffer.descriptor)
            self._buffers[buffer.index] = buffer.size
        if plan.number not in self._plans:
            self._say(UsePlan(plan.number, plan.layout, plan.declared))
            self._plans.add(plan.number)
        self._say(job)

    def _say(self, message: ToWriter, descriptor: int | None = None) -> None:
        """Raises Gone if nobody is there, SaveFailedError if nobody reads."""
        if self._writer is None:
            raise Gone
        try:
            self._writer.line.send(message, [] if descriptor is None else [descriptor], within=SEND_TIMEOUT)
        except TimeoutError:
            raise SaveFailedError(f"the writer process read nothing for {SEND_TIMEOUT:g} s") from None

    def receive(self, timeout: float) -> ToTrainer | None:
        """The next message; None if none comes in time. Raises Gone once there will be no more."""
        if self._writer is None:
            raise Gone
        received = self._writer.line.receive(timeout)
        return received[0] if received is not None else None

    def end(self, *, kill: bool = False) -> str:
        """Let go of the process; returns how it ended, in words."""
        writer, self._writer = self._writer, None
        if writer is None:
            return "it was not running"
        if kill:
            writer.kill(0.0)
        writer.hang_up()
        code = writer.wait(5.0)
        if code is None:
            return "it does not end"  # stuck in the kernel; its socket is closed, so it ends when it can
        return f"signal {-code}" if code < 0 else f"exit code {code}"

    def abandon(self, *, await_at_exit: float) -> None:
        """Let the writer finish on its own what it was handed, and exit.

        `await_at_exit`: how many seconds the interpreter waits for that, if it ends without an error.
        """
        if self._writer is not None:
            self._writer.hang_up()
            _see_off(self._writer.process, await_at_exit)
        self._writer = None

    def close(self, timeout: float = 5.0) -> None:
        """For when nothing is outstanding: the writer exits when its socket is closed."""
        if self._writer is not None:
            with contextlib.suppress(Gone, SaveFailedError):
                self._say(Leave())
            self._writer.hang_up()
            if self._writer.wait(timeout) is None:
                self._writer.kill(timeout)
        self._writer = None


def _see_off(process: subprocess.Popen[bytes], await_at_exit: float) -> None:
    """A thread waits for it to end, since this process may go on; at exit the interpreter waits too."""
    wait = functools.partial(_await_unless_crashed, process, await_at_exit)

    def forget() -> None:
        process.wait()
        atexit.unregister(wait)

    if await_at_exit > 0:
        atexit.register(wait)
    threading.Thread(target=forget, name="holdfast-writer-end", daemon=True).start()


def _await_unless_crashed(process: subprocess.Popen[bytes], timeout: float) -> None:
    if getattr(sys, "last_value", None) is not None:
        return  # an exception is ending this process: whoever started it should learn of that soon
    try:
        process.wait(timeout)
    except subprocess.TimeoutExpired:
        log.error("holdfast: a save was still under way %g s after the run had stopped", timeout)


def writing_threads() -> int:
    """How many threads a writer may use: its rank's share of this node's processors."""
    return min(16, proc.cores_of_this_rank())
