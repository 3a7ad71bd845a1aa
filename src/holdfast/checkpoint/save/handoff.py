"""Handing saves over to the writer process: what the two say to each other, and the trainer's side of it.

A stream socket between parent and child carries length-prefixed msgpack messages (never pickle), and once for
each staging buffer its file descriptor. The first message carries the writer's lock (record/lease.py),
which is held also while it is on its way.

The trainer never waits for the writer without a deadline, not even while the socket is full. A writer that
dies is replaced, and gets again what it had not finished, from the buffers, which the trainer still holds;
after RESTARTS deaths without a finished job in between, its jobs count as failed.

The writer process imports this module too, so torch must not be imported here.
"""

from __future__ import annotations

import array
import atexit
import contextlib
import functools
import logging
import os
import select
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec

from holdfast.checkpoint import Committed
from holdfast.checkpoint.copies import PlaceMap, Where
from holdfast.checkpoint.format import CheckpointName, Declared, Layout, Manifest
from holdfast.errors import SaveFailedError
from holdfast.process import Companion, start_child
from holdfast.record import announce, give_up, lock_for_writer

if TYPE_CHECKING:
    from holdfast.checkpoint.save.plan import Plan
    from holdfast.checkpoint.save.staging import Buffer

log = logging.getLogger("holdfast.checkpoint")

SEND_TIMEOUT = 60.0
RESTARTS = 3
LATE = 30.0
"""Seconds past a job's own deadline after which the writer is taken to be stuck, and ended."""
_LENGTH = 8


class Start(msgspec.Struct, frozen=True, kw_only=True, tag="start"):
    """The first message: who the writer works for."""

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
    """Its process id, which the writer's parent has for as long as the trainer lives; 0: not told."""
    locked: bool = False
    """The writer's lock comes with this message."""


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
    """On rank 0: of all ranks, for `where.json`."""


class MendCopies(msgspec.Struct, frozen=True, kw_only=True, tag="mend"):
    """The run has resumed from the local tier: what is missing of that checkpoint here is made again."""

    checkpoint: str
    manifest: str
    """Its digest."""
    home: str
    """Where the manifest is."""
    assembly: str
    """Where it is written which place holds what."""
    directory: str
    """Where the global tier has it, if it has."""
    rank: int
    ranks: list[int]
    """Whose shards this rank sees to, by who saved them."""
    places: PlaceMap
    tier: str
    node: str
    keep: int
    max_bytes: int
    timeout: float
    """Seconds that one copy may take."""


class Leave(msgspec.Struct, frozen=True, tag="leave"):
    """The run is at its end: what is being sent to peers need not be waited for."""


class Job(msgspec.Struct, frozen=True, kw_only=True, tag="job"):
    """A snapshot that is fully staged."""

    serial: int
    step: int
    id: str
    diagnostic: bool
    plan: int
    buffer: int
    prints: list[str]
    """Fingerprints, in the layout's order."""
    timeout: float
    """Seconds that this save may take from now."""
    called: float
    """Wall-clock time at which the save was asked for."""
    blocked: float
    """Seconds for which training was held up."""
    manifest: Manifest | None
    """On rank 0; complete but for the files and the parent."""
    failed: str = ""
    """The snapshot could not be staged on this rank; the others must learn of it."""
    again: bool = False
    """An earlier writer may have begun with it."""
    local: bool = False
    """It is committed in the local tier,"""
    globally: bool = True
    """and in the checkpoint root."""
    image: str = ""
    """Of a local one: the image that is to hold it. In memory, that is the buffer itself."""
    slot: int = -1
    """The image's index; the same as the buffer's where it is that."""


class BufferFree(msgspec.Struct, frozen=True, tag="free"):
    serial: int
    index: int


class JobDone(msgspec.Struct, frozen=True, kw_only=True, tag="done"):
    """This rank's part is written; on rank 0, all is committed."""

    serial: int
    seconds: float
    committed: Committed | None = None


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

_to_writer = msgspec.msgpack.Decoder(ToWriter)
_to_trainer = msgspec.msgpack.Decoder(ToTrainer)


class Gone(Exception):  # noqa: N818 - not an error: the other side has ended
    """The other side has closed its end."""


class Channel:
    """One end of the socket."""

    def __init__(self, sock: socket.socket, decoder: msgspec.msgpack.Decoder[Any]) -> None:
        self._socket = sock
        self._decoder = decoder
        self._received = bytearray()
        self._descriptors: list[int] = []
        sock.setblocking(False)

    @classmethod
    def of_trainer(cls, sock: socket.socket) -> Channel:
        return cls(sock, _to_trainer)

    @classmethod
    def of_writer(cls, sock: socket.socket) -> Channel:
        return cls(sock, _to_writer)

    def send(self, message: ToWriter | ToTrainer, descriptor: int | None = None) -> None:
        """Raises Gone if nobody is there, SaveFailedError if nobody reads."""
        body = msgspec.msgpack.encode(message)
        data = memoryview(len(body).to_bytes(_LENGTH, "little") + body)
        deadline = time.monotonic() + SEND_TIMEOUT
        extra = [] if descriptor is None else [_rights(descriptor)]
        while data:
            try:
                sent = self._socket.sendmsg([data], extra)
                data, extra = data[sent:], []
            except BlockingIOError:
                left = deadline - time.monotonic()
                if left <= 0:
                    raise SaveFailedError(f"the writer process read nothing for {SEND_TIMEOUT:g} s") from None
                self._wait_for(select.POLLOUT, left)
            except OSError as error:
                raise Gone from error

    def receive(self, timeout: float | None) -> tuple[Any, int | None] | None:
        """The next message and the descriptor that came with it; None after `timeout` (None: no limit).

        Raises Gone when the other side has ended and everything it had said was received.
        """
        deadline = None if timeout is None else time.monotonic() + timeout
        while True:
            message = self._next()
            if message is not None:
                with_one = isinstance(message, UseBuffer) or (isinstance(message, Start) and message.locked)
                return message, self._descriptors.pop(0) if with_one else None
            try:
                data, ancillary, _, _ = self._socket.recvmsg(1 << 20, socket.CMSG_SPACE(4))
            except BlockingIOError:
                left = None if deadline is None else deadline - time.monotonic()
                if left is not None and left <= 0:
                    return None
                self._wait_for(select.POLLIN, left)
                continue
            except OSError as error:
                raise Gone from error
            self._descriptors += _received_descriptors(ancillary)
            if not data:
                raise Gone
            self._received += data

    def other_side_is_gone(self) -> bool:
        """Never blocks; takes nothing off the stream. What it had said may still be there to be received."""
        ready = select.poll()
        ready.register(self._socket, select.POLLRDHUP)
        return bool(ready.poll(0))

    def _wait_for(self, event: int, seconds: float | None) -> None:
        ready = select.poll()  # not select(), which knows only the first 1024 descriptors of a process
        ready.register(self._socket, event)
        ready.poll(None if seconds is None else max(1, int(seconds * 1000)))

    def _next(self) -> Any:
        if len(self._received) < _LENGTH:
            return None
        length = int.from_bytes(self._received[:_LENGTH], "little")
        if len(self._received) < _LENGTH + length:
            return None
        body = bytes(self._received[_LENGTH : _LENGTH + length])
        del self._received[: _LENGTH + length]
        return self._decoder.decode(body)

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._socket.close()


def _rights(descriptor: int) -> tuple[int, int, bytes]:
    return socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [descriptor]).tobytes()


def _received_descriptors(ancillary: list[tuple[int, int, bytes]]) -> list[int]:
    found = array.array("i")
    for level, kind, data in ancillary:
        if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
            found.frombytes(data[: len(data) - len(data) % found.itemsize])
    return list(found)


Outcome = JobDone | JobFailed
News = Outcome | LocalDone


def spawn(descriptor: int) -> subprocess.Popen[bytes]:
    """Start a writer process that talks over this socket."""
    module = "holdfast.checkpoint.save.writer_process"
    return start_child(module, str(descriptor), passed=[descriptor], outlives=True)


class _Handed(NamedTuple):
    job: Job
    plan: Plan
    late: float
    """The time at which a writer that has not finished it is taken to be stuck."""


class WriterClient:
    """One writer process at a time."""

    def __init__(self, start: Start) -> None:
        self._start = start
        self._writer: Companion | None = None
        self._channel: Channel | None = None
        self._deaths = 0
        self._jobs: dict[int, _Handed] = {}
        """Handed over and not finished, in order."""
        self._holding: dict[int, int] = {}
        """Buffers that a job still needs, by index: the job's serial."""
        self._buffers: dict[int, Buffer] = {}
        self._told: set[int] = set()
        """Numbers of the plans that the writer knows."""
        self._outcomes: list[News] = []
        self._peers: UsePeers | None = None
        self._mend: MendCopies | None = None
        self._committed: str | None = None
        """Id of the last checkpoint that was committed: the next one's parent."""

    # --- handing over ---------------------------------------------------------------------------------------

    def launch(self) -> None:
        """Start the process, if it does not run. Returns at once."""
        if self._writer is not None:
            return  # if it has died, that shows in the next exchange, and is seen to there
        try:
            self._writer = Companion(spawn)
        except OSError as error:
            raise SaveFailedError(f"the writer process cannot be started: {error}") from error
        self._channel = Channel.of_trainer(self._writer.line)
        self._told = set()
        self._send_start()
        for buffer in self._buffers.values():
            self._tell_buffer(buffer)
        for told in (self._peers, self._mend):
            if told is not None:
                self._channel.send(told)

    def _send_start(self) -> None:
        """With rank 0's sign of life: a message under way holds the lock until the writer reads it."""
        start, locked = self._start, None
        if start.rank == 0:
            under_way = [CheckpointName(h.job.step, h.job.id) for h in self._jobs.values()]
            what = str(under_way[0]) if under_way else ""
            locked = lock_for_writer(Path(start.run_dir), start.epoch, what)
        try:
            self._channel_now().send(msgspec.structs.replace(start, locked=locked is not None), locked)
        finally:
            if locked is not None:
                os.close(locked)

    def expect(self, name: CheckpointName) -> None:
        """A snapshot is about to be staged: from now on the next attempt waits for what becomes of it.

        What goes wrong here is told when the snapshot is handed over.
        """
        if self._writer is not None and self._writer.code is not None:
            self._drain()
        with contextlib.suppress(Gone, SaveFailedError):
            self.launch()
        if self._start.rank == 0:
            announce(Path(self._start.run_dir), self._start.epoch, str(name))

    def use_peers(self, peers: UsePeers) -> None:
        """Where replicas go from now on. A writer that is gone is told when it is replaced."""
        self._peers = peers
        if self._channel is not None:
            with contextlib.suppress(Gone, SaveFailedError):
                self._channel.send(peers)

    def mend(self, order: MendCopies) -> None:
        """Have copies made again; a writer that takes the place of this one begins with it anew."""
        self._mend = order
        if self._channel is not None:
            with contextlib.suppress(Gone, SaveFailedError):
                self._channel.send(order)

    def hand_over(self, job: Job, plan: Plan, buffer: Buffer, *, new_buffer: bool) -> None:
        """A job is staged: from here on it is the writer's. Whatever goes wrong becomes its outcome."""
        known = buffer.index in self._buffers and not new_buffer
        self._buffers[buffer.index] = buffer
        self._jobs[job.serial] = _Handed(job, plan, time.monotonic() + job.timeout + LATE)
        self._holding[buffer.index] = job.serial
        if job.slot >= 0:
            self._holding[job.slot] = job.serial
        try:
            if self._writer is None:
                self.launch()
            elif not known:
                self._tell_buffer(buffer)
            self._send(job, plan)
        except Gone:
            self._drain()
        except SaveFailedError as error:
            self._end_stuck(str(error))
        except Exception as error:  # noqa: BLE001 - the other ranks have handed theirs over
            self._end_stuck(f"{type(error).__name__}: {error}")

    def _drain(self) -> None:
        """The writer is gone: hear what it had still said; hearing its end, `_receive` replaces it."""
        writer = self._writer
        while self._writer is writer and self._receive(0.0):
            pass

    def _tell_buffer(self, buffer: Buffer) -> None:
        # Without memory there is nothing to map, only a failure to be told; a slot may be closed for good.
        if buffer.size and buffer.descriptor >= 0:
            self._channel_now().send(UseBuffer(buffer.index, buffer.size), buffer.descriptor)

    def _send(self, job: Job, plan: Plan) -> None:
        if self._committed is not None and job.manifest is not None and not job.diagnostic:
            # The save before it may have been committed, or have failed, since this one was taken.
            parent = msgspec.structs.replace(job.manifest, parent=self._committed)
            job = msgspec.structs.replace(job, manifest=parent)
        if plan.number not in self._told:
            self._channel_now().send(UsePlan(plan.number, plan.layout, plan.declared))
            self._told.add(plan.number)
        self._channel_now().send(job)

    def _channel_now(self) -> Channel:
        if self._channel is None:
            raise Gone
        return self._channel

    # --- what became of it ----------------------------------------------------------------------------------

    def is_free(self, buffer: int) -> bool:
        return buffer not in self._holding

    def poll(self, timeout: float = 0.0) -> list[News]:
        """What became of jobs since the last call; waits for the first of it at most `timeout`."""
        deadline = time.monotonic() + timeout
        while self._jobs and not self._outcomes:
            left = deadline - time.monotonic()
            self._receive(max(0.0, left))
            if left <= 0:
                break
        while self._jobs and self._receive(0.0):
            pass
        outcomes, self._outcomes = self._outcomes, []
        return outcomes

    def await_buffer(self, timeout: float) -> bool:
        """Wait until the writer lets go of some buffer or slot, at most `timeout`; False: it holds none."""
        deadline = time.monotonic() + timeout
        held = len(self._holding)
        while self._jobs and len(self._holding) >= held > 0:
            left = deadline - time.monotonic()
            if left <= 0:
                break
            self._receive(left)
        return held > 0

    def _receive(self, timeout: float) -> bool:
        """Take one message, or notice that the writer is dead or stuck; whether there was one."""
        late = min((handed.late for handed in self._jobs.values()), default=None)
        if late is not None and time.monotonic() > late:
            self._end_stuck("the writer process did not answer in time and was ended")
            return True
        limit = timeout if late is None else min(timeout, max(0.0, late - time.monotonic()))
        try:
            received = self._channel_now().receive(limit)
        except Gone:
            self._replace()
            return True
        if received is None:
            return False
        message = received[0]
        if isinstance(message, BufferFree):
            if self._holding.get(message.index) == message.serial:
                del self._holding[message.index]
        elif isinstance(message, LocalDone):
            self._deaths = 0
            if (handed := self._jobs.get(message.serial)) is not None:
                self._committed = handed.job.id
                self._outcomes.append(message)
        else:
            self._deaths = 0
            self._end(message)
        return True

    def _end(self, outcome: Outcome) -> None:
        ended = self._jobs.pop(outcome.serial, None)
        if ended is not None:
            for index in (ended.job.buffer, ended.job.slot):
                if self._holding.get(index) == outcome.serial:
                    del self._holding[index]
            drained = ended.job.local and ended.job.globally  # and the local commit has counted
            if isinstance(outcome, JobDone) and not ended.job.diagnostic and not drained:
                self._committed = ended.job.id
            self._outcomes.append(outcome)

    # --- a writer that died or hangs ------------------------------------------------------------------------

    def _replace(self) -> None:
        """The writer is gone: start another and give it again what is not finished."""
        code = self._reap()
        self._deaths += 1
        while self._jobs and self._deaths <= RESTARTS:
            log.warning("holdfast: the writer process ended (%s); starting another", code)
            try:
                self.launch()
                for handed in self._jobs.values():
                    self._send(msgspec.structs.replace(handed.job, again=True), handed.plan)
                return
            except Gone:
                code = self._reap()
                self._deaths += 1
            except SaveFailedError as error:
                self._end_stuck(str(error))
        self._fail_all(f"the writer process ended {self._deaths} times ({code})")

    def _end_stuck(self, why: str) -> None:
        if self._writer is not None:
            self._writer.kill(0.0)
        self._reap()
        self._fail_all(why)

    def _fail_all(self, why: str) -> None:
        """No writer will see to what is under way; the other ranks' writers must not wait for this one's."""
        self._deaths = 0
        start, told = self._start, f"SaveFailedError: {why}"
        if self._jobs and start.world > 1:
            give_up(Path(start.run_dir), start.epoch, start.rank, max(self._jobs), told)
        for serial, handed in self._jobs.items() if start.world > 1 else ():
            if handed.job.local and handed.job.globally:
                give_up(Path(start.run_dir), start.epoch, start.rank, serial, told, drain=True)
        for serial in list(self._jobs):
            self._end(JobFailed(serial=serial, error=told, trace=""))

    def _reap(self) -> str:
        """Let go of the process; how it ended, in words."""
        writer, self._writer, self._channel = self._writer, None, None
        if writer is None:
            return "it was not running"
        writer.hang_up()
        code = writer.wait(5.0)
        if code is None:
            return "it does not end"  # stuck in the kernel; its socket is closed, so it will when it can
        return f"signal {-code}" if code < 0 else f"exit code {code}"

    def abandon(self, *, await_at_exit: float = 0.0) -> None:
        """Let the writer finish by itself what it was handed, and exit.

        `await_at_exit`: seconds for which the interpreter, if it ends without an error, waits for that.
        """
        if self._writer is not None:
            self._writer.hang_up()
            _see_off(self._writer.process, await_at_exit if self._jobs else 0.0)
        self._writer = self._channel = None
        self._jobs.clear()

    def close(self, timeout: float = 5.0) -> None:
        """Nothing is outstanding: the writer exits when its socket is closed."""
        if self._channel is not None:
            with contextlib.suppress(Gone, SaveFailedError):
                self._channel.send(Leave())
        if self._writer is not None:
            self._writer.hang_up()
            if self._writer.wait(timeout) is None:
                self._writer.kill(timeout)
        self._writer = self._channel = None

    @property
    def pid(self) -> int | None:
        return self._writer.pid if self._writer is not None else None


def _see_off(process: subprocess.Popen[bytes], await_at_exit: float) -> None:
    """A thread waits for its end, because this process may go on; the interpreter's end waits so long too."""
    wait = functools.partial(_await_unless_crashed, process, await_at_exit)

    def forget() -> None:
        process.wait()
        atexit.unregister(wait)

    if await_at_exit > 0:
        atexit.register(wait)
    threading.Thread(target=forget, name="holdfast-writer-end", daemon=True).start()


def _await_unless_crashed(process: subprocess.Popen[bytes], timeout: float) -> None:
    if getattr(sys, "last_value", None) is not None:
        return  # an exception ends this process: whoever started it should learn of that soon
    try:
        process.wait(timeout)
    except subprocess.TimeoutExpired:
        log.error("holdfast: a save was still under way %g s after the run had stopped", timeout)


def writing_threads() -> int:
    """How many threads a writer may use: its rank's share of this node's processors."""
    local = int(os.environ.get("LOCAL_WORLD_SIZE", "1") or "1")
    return max(1, min(16, len(os.sched_getaffinity(0)) // max(1, local)))
