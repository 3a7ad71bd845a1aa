"""Copying committed checkpoints to the remote, beside training: the trainer's side, and the process for it.

Guarantee: `push`, `delete` and `poll` never block, whatever the remote or the drain process does. The work is
done by a separate process (`-m` this module), in a session of its own, so that it outlives its trainer and
cannot slow the loop. If it dies it is replaced, a few times, and the new one is given the jobs that the old
one had not answered. The next start makes up for what is lost all the same.

Guarantee of the process: every job it was given is done, or its failure is in the journal, in bounded time.
After its trainer's death it continues with these jobs for at most `linger` seconds; when a newer attempt
holds the run it stops, and leaves the rest to that one. At its start it makes up for what earlier attempts
could no longer do: uploads they left are aborted, checkpoints they committed are copied, copies given up are
deleted.

It acts under its attempt's epoch: the fence is checked before every file, part and marker. (The fence's lock
is not held during a request, since a slow remote would then hold up the trainer's own commits. What a cut-off
process can do in between is harmless: every object is whole, and the same bytes for the same name.)
"""

from __future__ import annotations

import collections
import contextlib
import logging
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterable
from pathlib import Path

import msgspec

from holdfast.base import LiveLine, Waiting
from holdfast.checkpoint.format import CheckpointName, CheckpointRoot, parse_name
from holdfast.checkpoint.remote.copies import Remote, open_remote
from holdfast.checkpoint.remote.store import LocalCopyError, RemoteUnavailableError
from holdfast.errors import HoldfastError, LeaseLostError
from holdfast.journal import JournalWriter
from holdfast.journal.events import CopyDeleted, CopyDrained, DrainFailed, Warned
from holdfast.process import (
    BEHIND,
    Companion,
    Gone,
    Packets,
    leave_stopping_to_the_trainer,
    start_child,
    step_aside,
)
from holdfast.record import (
    CommitRecord,
    ControlDirectory,
    Fence,
    RootBook,
    deleted_names,
    find_commit,
    read_timeline,
)

log = logging.getLogger("holdfast.checkpoint")

# What a trainer and its drain process say to each other.


class DrainOrder(msgspec.Struct, frozen=True, kw_only=True):
    """Everything a drain process needs to know, given at its start."""

    control: str
    root: str
    url: str
    epoch: int
    attempt: int
    retry_seconds: float
    """Budget for retrying one request."""
    linger: float
    """Seconds for which it continues with its jobs after its trainer has died or left."""


class Push(msgspec.Struct, frozen=True, tag="push"):
    name: str


class Delete(msgspec.Struct, frozen=True, tag="delete"):
    name: str


class Finish(msgspec.Struct, frozen=True, tag="finish"):
    """Nothing more will come: end when all is done."""


Message = Push | Delete | Finish


class Outcome(msgspec.Struct, frozen=True, kw_only=True):
    """What became of one job."""

    job: str
    """push or delete."""
    name: str
    bytes: int = 0
    seconds: float = 0.0
    problem: str = ""
    """Why it did not work; empty if it did."""
    note: str = ""
    """Why nothing had to be done; empty if something was."""


REPLACEMENTS = 3


class Drain:
    """The trainer's end. `start` once; `poll` every now and then; `close` at the end."""

    def __init__(
        self,
        *,
        control: ControlDirectory,
        root: CheckpointRoot,
        remote_url: str,
        epoch: int,
        attempt: int,
        journal: JournalWriter,
        retry_seconds: float,
        linger: float,
    ) -> None:
        self._order = DrainOrder(
            control=str(control.path),
            root=str(root.path),
            url=remote_url,
            epoch=epoch,
            attempt=attempt,
            retry_seconds=retry_seconds,
            linger=linger,
        )
        self._log = control.attempt(attempt) / "drain.log"
        self._journal = journal
        self._child: Companion[Packets[Outcome]] | None = None
        self._unsent: collections.deque[Push | Delete] = collections.deque()
        self._unanswered: dict[tuple[str, str], Push | Delete] = {}
        self._replaced = 0
        self._given_up = False

    @property
    def pid(self) -> int | None:
        return self._child.pid if self._child is not None else None

    @property
    def waiting(self) -> int:
        """Jobs without an answer yet."""
        return len(self._unsent) + len(self._unanswered)

    def start(self) -> None:
        """Start the process; a failure is journalled, and training goes on without remote copies."""
        try:
            self._child = Companion(self._spawn, Packets.pair(Outcome))
        except OSError as error:
            self._warn(
                f"the drain process could not be started, nothing is copied to {self._order.url}: {error}"
            )
            self._given_up = True

    def _spawn(self, descriptor: int) -> subprocess.Popen[bytes]:
        return start_child(
            "holdfast.checkpoint.remote.drain",
            msgspec.json.encode(self._order).decode(),
            str(descriptor),
            str(os.getpid()),
            passed=[descriptor],
            log=self._log,
            outlives=True,
        )

    def push(self, name: str) -> None:
        """Have a committed checkpoint copied."""
        if self._given_up:
            return
        self._unsent.append(Push(name))
        self._send()

    def delete(self, names: Iterable[str]) -> None:
        """Have copies deleted, of checkpoints whose local directories are gone."""
        if self._given_up:
            return
        self._unsent.extend(Delete(name) for name in names)
        self._send()

    def poll(self) -> list[Outcome]:
        """What became of jobs since the last call. Replaces a drain process that has died."""
        outcomes = self._receive()
        if self._child is not None and self._child.code is not None:
            outcomes += self._receive()  # what it said before it died
            self._replace()
        self._send()
        return outcomes

    def close(self, timeout: float) -> list[Outcome]:
        """Say that nothing more will come, and wait for the rest; what is not done then continues alone."""
        deadline = time.monotonic() + timeout
        outcomes = self.poll()
        said, line = False, LiveLine()
        while self._child is not None and self._child.code is None:
            self._send()
            if not said and not self._unsent and self._line is not None:
                with contextlib.suppress(Gone):
                    said = self._line.send(Finish())
            left = deadline - time.monotonic()
            if left <= 0:
                break
            line(Waiting(f"the copies to {self._order.url} to be complete", timeout - left, timeout))
            if self._line is not None:
                self._line.wait(min(left, 0.05))
            outcomes += self._receive()
            if self._line is None:  # it has said all it had to say, and is about to end
                self._child.wait(min(left, 5.0))
                break
        line.over()
        outcomes += self._receive()
        if self.waiting and not self._given_up:
            self._warn(
                f"{self.waiting} jobs for {self._order.url} are not done after {timeout:g} s. "
                f"The drain process goes on for at most {self._order.linger:g} s, "
                "and the next start makes up for the rest"
            )
        self._hang_up()
        self._given_up = True
        return outcomes

    # --- the line -------------------------------------------------------------------------------------------

    def _send(self) -> None:
        while self._unsent and self._line is not None:
            job = self._unsent[0]
            try:
                if not self._line.send(job):
                    return  # its inbox is full; the next poll tries again
            except Gone:
                self._hang_up()
                return
            self._unanswered[_key(job)] = self._unsent.popleft()

    def _receive(self) -> list[Outcome]:
        outcomes: list[Outcome] = []
        while self._line is not None:
            try:
                outcome = self._line.receive()
            except Gone:
                self._hang_up()
                break
            if outcome is None:
                break
            self._unanswered.pop((outcome.job, outcome.name), None)
            if outcome.problem:
                log.warning("holdfast: %s", self._in_words(outcome))
            outcomes.append(outcome)
        return outcomes

    def _in_words(self, outcome: Outcome) -> str:
        """How a job failed, and what that means."""
        url, name = self._order.url, parse_name(outcome.name)
        which = f"the checkpoint at step {name.step} ({outcome.name})" if name else outcome.name
        if outcome.job != "push":
            return f"the copy of {outcome.name} in {url} was not deleted: {outcome.problem}"
        return (
            f"{which} was not copied to {url}: {outcome.problem}. Nothing is lost: it lies in the checkpoint "
            f"root. Look at {url} (checkpoint.remote_root); the next start copies what is missing there"
        )

    @property
    def _line(self) -> Packets[Outcome] | None:
        """None once it is hung up."""
        return self._child.line if self._child is not None and self._child.connected else None

    def _hang_up(self) -> None:
        if self._child is not None:
            self._child.hang_up()

    def _replace(self) -> None:
        assert self._child is not None
        code = self._child.code
        self._hang_up()
        self._child = None
        self._unsent.extendleft(reversed(self._unanswered.values()))
        self._unanswered.clear()
        if code == 0:  # it ended on purpose, because a newer attempt holds the run; the journal says so
            self._given_up = True
        if self._given_up:
            return
        if self._replaced >= REPLACEMENTS:
            self._given_up = True
            self._warn(
                f"the drain process ended {self._replaced + 1} times (code {code}, see {self._log}); "
                f"nothing more is copied to {self._order.url} until the next start"
            )
            return
        self._replaced += 1
        self._warn(
            f"the drain process ended with code {code} (see {self._log}); it is started anew, "
            f"{self._replaced} of {REPLACEMENTS}"
        )
        self.start()

    def _warn(self, message: str) -> None:
        self._journal.write(Warned(message=message))
        log.warning("holdfast: %s", message)


def _key(job: Push | Delete) -> tuple[str, str]:
    return ("push" if isinstance(job, Push) else "delete", job.name)


# --- the process --------------------------------------------------------------------------------------------

IDLE_LOOK = 0.5
"""Seconds between checks of whether the trainer is still there."""
GRACE = 2.0
"""Seconds beyond its time after which the process ends even in the middle of a request."""
LONGEST = 15_000
"""Most characters of a problem that the trainer is told: one packet holds them, whichever they are."""


class DrainProcess:
    def __init__(self, order: DrainOrder, line: Packets[Message], parent: int) -> None:
        self._order = order
        self._line = line
        self._parent = parent
        self._control = ControlDirectory.open(Path(order.control))
        self._root = CheckpointRoot(Path(order.root))
        self._fence = Fence(self._control, order.epoch)
        self._journal = JournalWriter(self._control.journal, "drain", order.attempt)
        self._remote: Remote = open_remote(order.url, retry_seconds=order.retry_seconds)
        self._jobs: collections.deque[Push | Delete] = collections.deque()
        self._later: list[Push | Delete] = []
        """Jobs that failed because the store was unavailable; tried again once it is seen to work."""
        self._unsaid: collections.deque[Outcome] = collections.deque()
        """Outcomes for which there was no room in the trainer's inbox."""
        self._judged: dict[str, set[str]] = {}
        """Records of standing that the remote has, by checkpoint."""
        self._told = ""
        self._began = time.time()
        self._made_up = False
        self._last_message = False
        self._ends: float | None = None

    def run(self) -> None:
        threading.Thread(target=self._keep_time, name="holdfast-drain-time", daemon=True).start()
        try:
            self._make_up()
            if self._made_up:
                self._push_standings()
            while self._jobs or not self._last_message:
                self._listen(wait=not self._jobs)
                if self._jobs:
                    self._do(self._jobs.popleft())
            self._say_the_rest()
        except LeaseLostError as error:
            left = len(self._jobs) + len(self._later)
            self._journal.write(
                Warned(message=f"the drain process ends, leaving {left} jobs to others: {error}")
            )
        except _OutOfTimeError:
            left = len(self._jobs) + len(self._later)
            text = f"the drain process has run out of time; one job was cut and {left} more are not done"
            self._journal.write(Warned(message=f"{text}; the next start makes up for them"))

    # --- what the trainer says ------------------------------------------------------------------------------

    def _listen(self, *, wait: bool) -> None:
        """Take what has come; with `wait`, wait for something to do."""
        while not self._last_message:
            if os.getppid() != self._parent:
                self._leave_behind()  # a fork of the trainer may still hold its end of the line
            ready = self._line.wait(IDLE_LOOK if wait else 0.0, room=bool(self._unsaid))
            self._speak()
            if not ready:
                if wait and not self._last_message:
                    continue
                return
            try:
                message = self._line.receive()
            except Gone:
                self._leave_behind()
                return
            if isinstance(message, Finish):
                self._leave_behind()
            elif message is not None:
                if message not in self._jobs:  # `_make_up` may have found it missing before its order came
                    self._jobs.append(message)
                wait = False

    def _leave_behind(self) -> None:
        """Nothing more will come, because the trainer is done or dead."""
        if not self._last_message:
            self._last_message = True
            self._ends = time.monotonic() + self._order.linger

    def _stop(self) -> None:
        """Called between requests: raises when this process may not or need not go on."""
        self._fence.check("copy checkpoints")
        if self._ends is None and os.getppid() != self._parent:
            self._leave_behind()
        if self._ends is not None and time.monotonic() >= self._ends:
            raise _OutOfTimeError

    def _keep_time(self) -> None:
        """End this process in time: a request may hang for longer than it may live."""
        while True:
            time.sleep(IDLE_LOOK)
            if os.getppid() != self._parent:
                self._leave_behind()
            if self._ends is not None and time.monotonic() >= self._ends + GRACE:
                text = "the drain process has run out of time in the middle of a request"
                self._journal.write(Warned(message=f"{text}; the next start makes up for what is not done"))
                os._exit(1)

    def _say(self, outcome: Outcome) -> None:
        self._unsaid.append(outcome)
        self._speak()

    def _speak(self) -> None:
        """Say what there is room for; never wait for the trainer, which may be in a long step."""
        try:
            while self._unsaid and self._line.send(self._unsaid[0]):
                self._unsaid.popleft()
        except Gone:
            self._unsaid.clear()  # nobody is there any more

    def _say_the_rest(self) -> None:
        deadline = time.monotonic() + GRACE
        while self._unsaid and time.monotonic() < deadline:
            self._line.wait(IDLE_LOOK, room=True)
            self._speak()

    # --- doing ----------------------------------------------------------------------------------------------

    def _do(self, job: Push | Delete) -> None:
        name = parse_name(job.name)
        kind = "push" if isinstance(job, Push) else "delete"
        if name is None:
            self._say(Outcome(job=kind, name=job.name, problem="not a checkpoint's name"))
            return
        self._stop()
        try:
            outcome = self._push(name) if isinstance(job, Push) else self._delete(name)
        except (LeaseLostError, _OutOfTimeError):
            raise
        except (HoldfastError, OSError) as error:
            if isinstance(error, RemoteUnavailableError):
                self._later.append(job)
                if self._last_message and self._jobs:
                    text = f"{len(self._jobs)} more jobs for {self._remote.url} are left to the next start"
                    self._journal.write(Warned(message=text))
                    self._jobs.clear()  # each would wait for that store, and somebody may be waiting for us
            outcome = Outcome(job=kind, name=str(name), problem=str(error)[:LONGEST])
            self._tell_failure(kind, name, error)
        else:
            self._make_up()
            self._push_standings()
            retry, self._later = self._later, []
            self._jobs.extend(retry)
        self._say(outcome)

    def _push(self, name: CheckpointName) -> Outcome:
        directory = self._root.committed(name)
        if not directory.is_dir():
            return Outcome(job="push", name=str(name), note="it was deleted here before it was copied")
        record = self._record(name)
        try:
            copied = self._remote.push(
                directory,
                expected=record.manifest if record else "",
                stop=self._stop,
                deadline=self._ends,
            )
        except LocalCopyError:
            if not directory.is_dir():
                return Outcome(job="push", name=str(name), note="it was deleted here while it was copied")
            raise
        if copied.already:
            return Outcome(job="push", name=str(name), note="the same copy is there already")
        waiting = sum(isinstance(job, Push) for job in (*self._jobs, *self._later))
        self._journal.write(
            CopyDrained(
                checkpoint=str(name),
                step=name.step,
                remote=self._remote.url,
                bytes=copied.bytes,
                seconds=copied.seconds,
                repeated=copied.repeated,
                read_back=copied.read_back,
                waiting=waiting,
            )
        )
        return Outcome(job="push", name=str(name), bytes=copied.bytes, seconds=copied.seconds)

    def _push_standings(self) -> None:
        """Copy the standings of checkpoints to where their copies are."""
        book = RootBook(self._root.path)
        try:
            here = {entry: set(book.files(entry)) for entry in book.names()}
            new = [entry for entry, files in here.items() if files - self._judged.get(entry, set())]
            there = {str(name) for name in self._remote.names()} if new else set()
            for name in map(parse_name, sorted(there.intersection(new))):
                assert name is not None
                self._remote.push_standing(name, book, stop=self._stop)
                self._judged[str(name)] = here[str(name)]
        except (LeaseLostError, _OutOfTimeError):
            raise
        except (HoldfastError, OSError) as error:
            text = f"standings of checkpoints are not in {self._remote.url} yet; this is tried again: {error}"
            if text != self._told:
                self._told = text
                self._journal.write(Warned(message=text))

    def _delete(self, name: CheckpointName) -> Outcome:
        started = time.monotonic()
        objects = self._remote.delete(name, stop=self._stop)
        if not objects:
            return Outcome(job="delete", name=str(name), note="there was no copy")
        self._journal.write(CopyDeleted(checkpoint=str(name), remote=self._remote.url, objects=objects))
        return Outcome(job="delete", name=str(name), seconds=time.monotonic() - started)

    def _tell_failure(self, kind: str, name: CheckpointName, error: Exception) -> None:
        if kind == "push":
            event = DrainFailed(
                checkpoint=str(name), step=name.step, remote=self._remote.url, error=str(error)
            )
            self._journal.write(event)
        else:
            text = f"the remote copy of {name} was not deleted; the next start tries again: {error}"
            self._journal.write(Warned(message=text))

    def _record(self, name: CheckpointName) -> CommitRecord | None:
        return find_commit(self._control, self._order.attempt, name.step, name.id) or self._known().get(name)

    def _known(self) -> dict[CheckpointName, CommitRecord]:
        """Every checkpoint that this run committed."""
        timeline = read_timeline(self._control)
        every = [*timeline.on_line, *timeline.abandoned]
        return {CheckpointName(record.step, record.id): record for record in every}

    # --- what earlier attempts left -------------------------------------------------------------------------

    def _make_up(self) -> None:
        """Once, as soon as the store works: abort, copy and delete what earlier attempts left undone."""
        if self._made_up:
            return
        try:
            self._stop()
            timeline = read_timeline(self._control)
            known = self._known()
            aborted = self._remote.abort_uploads(sorted(known), self._began)
            if aborted:
                found = (
                    f"aborted {len(aborted)} unfinished uploads of earlier attempts: {', '.join(aborted[:5])}"
                )
                self._journal.write(Warned(message=found))
            there = set(self._remote.names())
            deleted = deleted_names(self._control)
            waiting = {job.name for job in self._jobs}
            for record in reversed(timeline.on_line):
                name = CheckpointName(record.step, record.id)
                here = self._root.committed(name).is_dir()
                if here and name not in there and str(name) not in waiting:
                    self._jobs.append(Push(str(name)))
            # A deletion that was cut may have left only the records of the standing.
            for name in sorted({*self._remote.folders(), *self._remote.judged()}, reverse=True):
                gone = name in known and name in deleted and not self._root.committed(name).is_dir()
                if gone and str(name) not in waiting:
                    self._jobs.append(Delete(str(name)))
            self._made_up = True
        except (LeaseLostError, _OutOfTimeError):
            raise
        except (HoldfastError, OSError) as error:
            self._journal.write(
                Warned(message=f"what is missing in {self._remote.url} is not known yet: {error}")
            )


class _OutOfTimeError(Exception):
    """The time to linger is over."""


def main() -> int:
    """`python -m holdfast.checkpoint.remote.drain <order> <socket> <parent>`: started by Drain
    only."""
    leave_stopping_to_the_trainer()
    step_aside(BEHIND)
    order = msgspec.json.decode(sys.argv[1].encode(), type=DrainOrder)
    with contextlib.closing(Packets[Message].at(int(sys.argv[2]), Message)) as line:
        DrainProcess(order, line, int(sys.argv[3])).run()
    return 0


if __name__ == "__main__":
    sys.exit(main())
