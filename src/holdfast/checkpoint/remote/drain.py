"""The drain as rank 0's trainer has it: committed checkpoints go to the remote without being waited for.

Guarantee: `push`, `delete` and `poll` never block, whatever the remote or the drain process does. The work is
done by a process of its own (drain_process.py), in a session of its own, so that it outlives its trainer and
cannot slow the loop. If it dies it is replaced, a few times, and told again what it had not answered for.
What is lost all the same, the next start makes up for.
"""

from __future__ import annotations

import collections
import contextlib
import logging
import os
import subprocess
import time
from collections.abc import Iterable

import msgspec

from holdfast.base import LiveLine, Waiting
from holdfast.checkpoint.format import CheckpointRoot, parse_name
from holdfast.journal import JournalWriter
from holdfast.journal.events import Warned
from holdfast.process import Companion, Gone, Packets, start_child
from holdfast.record import ControlDirectory

# What a trainer and its drain process say to each other.


class DrainOrder(msgspec.Struct, frozen=True, kw_only=True):
    """Everything a drain process needs to know, given at its start."""

    control: str
    root: str
    url: str
    epoch: int
    attempt: int
    retry_seconds: float
    """Budget for trying one request again."""
    linger: float
    """Seconds for which it goes on with what it was told after its trainer has died or has left."""


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


log = logging.getLogger("holdfast.checkpoint")

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
            "holdfast.checkpoint.remote.drain_process",
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
        """Say that nothing more will come, and wait for the rest; what is not done by then goes on alone."""
        deadline = time.monotonic() + timeout
        outcomes = self.poll()
        told, line = False, LiveLine()
        while self._child is not None and self._child.code is None:
            self._send()
            if not told and not self._unsent and self._line is not None:
                with contextlib.suppress(Gone):
                    told = self._line.send(Finish())
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
                f"{self.waiting} jobs for {self._order.url} are not done after {timeout:g} s; the drain "
                f"process goes on, at most {self._order.linger:g} s, and the next start makes up for the rest"
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
        """What came of a job that failed, and what that means."""
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
        if code == 0:  # it ended on purpose, because a newer attempt holds the run; the journal has its word
            self._given_up = True
        if self._given_up:
            return
        if self._replaced >= REPLACEMENTS:
            self._given_up = True
            self._warn(
                f"the drain process ended {self._replaced + 1} times (code {code}, see {self._log}); "
                f"nothing more is copied to {self._order.url} before the next start"
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
