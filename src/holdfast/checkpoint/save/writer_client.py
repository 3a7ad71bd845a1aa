"""The trainer's side of its writer process: starting it, handing jobs over, replacing it.

Nothing here ever waits for the writer, except where a deadline is given. A writer that dies is replaced and
given again what it had not finished, from the buffers, which the trainer still holds; after RESTARTS deaths
without a finished job in between, its jobs count as failed.
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
import time
from pathlib import Path
from typing import NamedTuple

import msgspec

from holdfast.checkpoint.format import CheckpointName
from holdfast.checkpoint.save.handoff import (
    BufferFree,
    Channel,
    Gone,
    Job,
    JobDone,
    JobFailed,
    Leave,
    LocalDone,
    MendCopies,
    Start,
    UseBuffer,
    UsePeers,
    UsePlan,
)
from holdfast.checkpoint.save.plan import Plan
from holdfast.checkpoint.save.staging import Buffer
from holdfast.errors import SaveFailedError
from holdfast.process import Companion, start_child
from holdfast.record import announce, give_up, lock_for_writer

log = logging.getLogger("holdfast.checkpoint")

RESTARTS = 3
LATE = 30.0
"""Seconds past a job's own deadline after which the writer is taken to be stuck, and ended."""

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
