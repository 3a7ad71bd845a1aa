"""A rank's signs of life to its agent, and what the two say to each other.

Guarantee: nothing here ever holds a step up or ends a run. Sends do not wait; what an agent that is not
reading cannot take is dropped and counted, and the newest state is sent as soon as it reads again. Every
message says completely where the rank is, so any later message makes up for a lost one; a message about
stopping is kept until it is taken. If the agent is gone, that is reported once, and training goes on.

A separate thread answers the agent's questions, even while the main thread hangs in a call that has released
the interpreter's lock.
"""

from __future__ import annotations

import contextlib
import logging
import os
import select
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Protocol

import msgspec

from holdfast.policy import BEFORE_TRAINING, CHECKPOINTING, SETUP, STEP, Limits, Observed, OpenSection
from holdfast.process import Garbage, Gone, Packets

# What a rank and its agent say to each other.
#
# A `State` is complete: whichever one arrives says everything, so any earlier one may be lost.


SOCKET = "monitor.sock"
CHUNK = 32 * 1024
"""Bytes of one part of an answer: well within a packet."""
ANSWER_LIMIT = 16 * 1024 * 1024
"""Bytes of a whole answer."""
LONGEST_NAME = 100
"""Characters of a section's name."""


class Hello(msgspec.Struct, frozen=True, array_like=True, tag="hello"):
    """The first message of a rank."""

    pid: int
    at: float
    limits: Limits | None = None
    """The limits by which it is watched; None for the agent's own."""
    learn: bool = False
    """Whether its limits are to be tightened by what was learned."""
    defers_sigterm: bool = False
    """SIGTERM does not end this process, which takes it as a request to save and stop. To end it without
    that, as after a failure, it has to be killed."""


class State(msgspec.Struct, array_like=True, tag="state"):
    """Where a rank is: sent after every change, and as a mere sign of life."""

    at: float
    step: int
    trained: bool
    sectioned: bool
    left: float
    sections: list[OpenSection]
    dropped: int
    """How many messages could not be sent so far, because the agent was not reading."""
    exiting: bool = False
    """The loop has ended; what the script does now is watched by separate limits."""


class Seen(msgspec.Struct, frozen=True, array_like=True, tag="seen"):
    """What the rank measured in this attempt, from its first step on."""

    sections: dict[str, Observed]
    out_of_section: Observed


class AnswerPart(msgspec.Struct, frozen=True, array_like=True, tag="answer"):
    """A part of the answer to `Ask` number `ask`."""

    ask: int
    index: int
    parts: int
    """0 means that there is no answer, and `data` says why."""
    data: bytes


class Bye(msgspec.Struct, frozen=True, array_like=True, tag="bye"):
    """Training has ended: what comes now is not watched."""

    at: float


class StopWish(msgspec.Struct, frozen=True, array_like=True, tag="wish"):
    """This rank was asked to stop (a signal reached it), so the whole run is to stop."""

    why: str
    now: bool = False
    """Whether it was asked a second time, which means without a save."""
    signal: str = ""
    """`SIGTERM` and such."""
    source: str = "signal"
    """One of policy.Source. Anything but a signal concerns the whole job, never one node."""
    sender: str = ""
    """Who sent the signal, in words; empty if not known."""


class Promise(msgspec.Struct, frozen=True, array_like=True, tag="promise"):
    """The answer to `Prepare`: this rank does not go past `step` until it knows where all stop.

    0 comes from a rank that has not yet begun its first step: it will stop before it, if the others let it.
    """

    step: int


class Halted(msgspec.Struct, frozen=True, array_like=True, tag="halted"):
    """This rank has stopped as agreed, and its part of the state is safe; its process is about to end."""

    step: int


FromRank = Hello | State | Seen | AnswerPart | Bye | StopWish | Promise | Halted


class Ask(msgspec.Struct, frozen=True, array_like=True, tag="ask"):
    """The agent wants to know what the rank is doing, even while its main thread hangs."""

    ask: int
    timeout: float


class Prepare(msgspec.Struct, frozen=True, array_like=True, tag="prepare"):
    """The run is to stop: promise a step (see `Promise`), and from now on mind the deadline."""

    why: str
    seconds: float | None = None
    """Seconds until this rank must have ended; None for no limit."""
    ago: float = 0.0
    """Seconds since the stop was asked for."""


class StopAt(msgspec.Struct, frozen=True, array_like=True, tag="stop_at"):
    """Every rank has promised: all stop after this step, or at once if they have completed it."""

    step: int


FromAgent = Ask | Prepare | StopAt


log = logging.getLogger("holdfast")

CATCH_UP = 0.25
"""Seconds between two attempts to send the newest state after one was dropped."""
CONNECT = 10.0
"""Seconds to reach the agent."""
PARTING = 2.0
"""Seconds for the last messages to be taken."""
SEEN_EVERY = 5.0
"""Seconds after which the measurements are sent again."""
RARE = (SETUP, CHECKPOINTING)
"""Sections after which they are sent at once."""
URGENT = 5.0
"""Seconds to wait for a message about stopping to be taken; after that the thread sends it."""
MOST_INSIDE = 32
"""Names of sections inside a section that are reported; time in any others counts as the outer section's."""


class Heeds(Protocol):
    """The receiver of an agent's messages about stopping. Called on the thread that listens."""

    def prepare(self, asked: Prepare, /) -> int:
        """Return the step that this rank promises not to go past."""
        ...

    def agree(self, step: int, /) -> None: ...


class Beats:
    """Tells the agent where this rank is. Without an agent every call does nothing.

    `enter` and `leave` are for one thread, the training loop's.
    """

    def __init__(
        self,
        line: Packets[FromAgent] | None = None,
        testify: Callable[[], bytes] | None = None,
        heeds: Heeds | None = None,
    ) -> None:
        now = time.monotonic()
        self._state = State(at=now, step=0, trained=False, sectioned=False, left=now, sections=[], dropped=0)
        self._seen: dict[str, list[float]] = {}
        self._gaps = [0.0, 0.0]
        self._told_seen = now
        self._testify = testify
        self._heeds = heeds
        self._line = line
        self._behind = False
        self._owed: deque[FromRank] = deque()
        """Messages about stopping that were not taken yet, in order."""
        self._closing = False
        self._resting = False
        if line is not None:
            self._wake = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
            self._thread = threading.Thread(target=self._serve, name="holdfast-beats", daemon=True)
            self._thread.start()

    @classmethod
    def connect(
        cls,
        path: str,
        limits: Limits | None,
        *,
        learn: bool,
        testify: Callable[[], bytes] | None = None,
        heeds: Heeds | None = None,
        defers_sigterm: bool = False,
    ) -> Beats:
        """Say hello to the agent at `path`; if that fails, a warning says so and nothing is watched."""
        hello = Hello(
            pid=os.getpid(),
            at=time.monotonic(),
            limits=limits,
            learn=learn,
            defers_sigterm=defers_sigterm,
        )
        line: Packets[FromAgent] | None = None
        try:
            line = Packets.connect(Path(path), FromAgent, CONNECT)
            if not line.send(hello, CONNECT):
                raise TimeoutError("it does not read")
        except OSError as error:
            if line is not None:
                line.close()
            log.warning(
                "holdfast: cannot reach the agent's monitor at %s: %s; hangs of this rank will go unnoticed",
                path,
                error,
            )
            return cls()
        return cls(line, testify, heeds)

    @property
    def watched(self) -> bool:
        return self._line is not None

    @property
    def dropped(self) -> int:
        """Messages that the agent did not take."""
        return self._state.dropped

    # --- the loop's calls -----------------------------------------------------------------------------------

    def enter(self, section: str, *, at_least: float = 0.0) -> None:
        """A section begins, inside those that are open. For this once its limit is not below `at_least`."""
        if self._line is None:
            return
        now = time.monotonic()
        state = self._state
        sections = state.sections
        if sections:
            outer = sections[-1]
            outer.spent += now - outer.since
        elif state.trained and state.sectioned and not state.exiting:
            _count(self._gaps, now - state.left)
        sections.append(OpenSection(section[:LONGEST_NAME], now, 0.0, at_least, now))
        state.sectioned = True
        self._tell(now)

    def leave(self, section: str, *, learn: bool = True) -> None:
        """The section ends, with whatever is still open inside it. If it is not open, nothing changes."""
        if self._line is None:
            return
        now = time.monotonic()
        self._close_section(section[:LONGEST_NAME], now, learn=learn)
        if section in RARE or now - self._told_seen >= SEEN_EVERY:
            self._tell_seen(now)
        self._tell(now)

    @contextlib.contextmanager
    def section(self, name: str, *, at_least: float = 0.0, learn: bool = True) -> Iterator[None]:
        self.enter(name, at_least=at_least)
        try:
            yield
        finally:
            self.leave(name, learn=learn and not at_least)

    def step_done(self, step: int) -> None:
        """A step is complete, and with it the section `step`."""
        if self._line is None:
            return
        now = time.monotonic()
        self._close_section(STEP, now, learn=True)
        state = self._state
        state.step = step
        state.trained = True
        if now - self._told_seen >= SEEN_EVERY:
            self._tell_seen(now)
        self._tell(now)

    def beat(self) -> None:
        """A sign of life, where nothing else gives one."""
        if self._line is None:
            return
        if not self._state.sectioned:
            self._state.trained = True
        self._tell(time.monotonic())

    def rest(self) -> None:
        """Training is over, as far as can be seen from here: what comes now is not watched."""
        if self._line is None or self._resting:
            return
        self._resting = True
        self._tell_seen(time.monotonic())
        self._send(Bye(time.monotonic()), PARTING)

    def wish(
        self, why: str, number: str, *, now: bool = False, source: str = "signal", sender: str = ""
    ) -> None:
        """This rank was asked to stop. From any thread."""
        self._insist(StopWish(why, now, number, source, sender))

    def halted(self, step: int) -> None:
        """This rank has stopped as agreed."""
        self._insist(Halted(step))

    def exiting(self) -> None:
        """The loop has ended: until this process ends, separate limits apply to what the script does."""
        if self._line is None or self._resting:
            return
        now = time.monotonic()
        self._state.sections.clear()
        self._state.left = now
        self._state.exiting = True
        self._tell_seen(now)
        self._tell(now)

    def failing(self) -> None:
        """An error is ending this rank: the time this takes is watched like time between sections."""
        if self._line is None:
            return
        self._resting = False
        now = time.monotonic()
        self._state.sections.clear()
        self._state.left = now
        self._state.sectioned = self._state.trained = True
        self._state.exiting = False
        self._tell(now)

    def open_sections(self) -> list[str]:
        """The sections that are open now, the outermost first."""
        return [entry.name for entry in list(self._state.sections)]

    def close(self) -> None:
        """Say good-bye and hang up."""
        if self._line is None:
            return
        self.rest()
        self._closing = True
        self._nudge()
        self._thread.join(PARTING)
        line, self._line = self._line, None
        if line is not None and not self._thread.is_alive():  # otherwise it still uses them
            self._pay(line)
            line.close()
            os.close(self._wake)

    # --- what is measured -----------------------------------------------------------------------------------

    def _close_section(self, section: str, now: float, *, learn: bool) -> bool:
        state = self._state
        sections = state.sections
        if not any(entry.name == section for entry in sections):
            return False
        entry = sections.pop()
        own = entry.spent + now - entry.since
        self._count_inside(entry, own)
        while entry.name != section:
            entry = sections.pop()
            own = entry.spent  # its clock stood still while the section inside it was open
            self._count_inside(entry, own)
        if learn and not state.exiting and (state.trained or section in BEFORE_TRAINING):
            _count(self._seen.setdefault(section, [0.0, 0.0]), own)
        if sections:
            sections[-1].since = now
        else:
            state.left = now
        return True

    def _count_inside(self, entry: OpenSection, own: float) -> None:
        """A section has ended inside those that are still open."""
        if entry.at_least:
            return  # it had its own deadline
        for outer in self._state.sections:
            if entry.name in outer.inside or len(outer.inside) < MOST_INSIDE:
                outer.inside[entry.name] = outer.inside.get(entry.name, 0.0) + own
            else:
                outer.spent += own

    def _tell_seen(self, now: float) -> None:
        self._told_seen = now
        seen = {name: Observed(int(count), longest) for name, (count, longest) in self._seen.items()}
        self._send(Seen(seen, Observed(int(self._gaps[0]), self._gaps[1])))

    # --- sending --------------------------------------------------------------------------------------------

    def _tell(self, now: float) -> None:
        if self._resting:
            return
        line = self._line
        if line is None:  # the thread has just found the agent gone
            return
        self._state.at = now
        try:
            if not line.send(self._state):
                self._state.dropped += 1
                self._behind = True
        except Gone as error:
            self._lost(error)

    def _send(self, message: FromRank, wait: float = 0.0) -> bool:
        """Send one message, waiting at most `wait` seconds for room; returns whether it was sent."""
        line = self._line
        if line is None:
            return False
        try:
            sent = line.send(message, wait)
        except Gone as error:
            self._lost(error)
            return False
        self._state.dropped += not sent
        return sent

    def _insist(self, message: FromRank) -> None:
        """Send what no later message makes up for: now, or as soon as it is taken."""
        if self._line is not None and (self._owed or not self._send(message, URGENT)):
            self._owed.append(message)

    def _pay(self, line: Packets[FromAgent]) -> None:
        """Send as much of what is owed as is taken."""
        try:
            while self._owed and line.send(self._owed[0]):
                self._owed.popleft()
        except Gone as error:
            self._lost(error)

    def _lost(self, error: Gone) -> None:
        """The agent is gone, or hung up. Others deal with its end; this rank is no longer watched."""
        if self._line is not None and not self._closing:
            log.warning("holdfast: the agent's monitor is gone (%s); this rank is no longer watched", error)
        self._closing = True
        self._line = None
        self._nudge()

    def _nudge(self) -> None:
        with contextlib.suppress(OSError):
            os.eventfd_write(self._wake, 1)

    # --- the thread -----------------------------------------------------------------------------------------

    def _serve(self) -> None:
        """Answer the agent, and send the newest state if the agent could not take it before."""
        line = self._line
        assert line is not None
        poll = select.poll()
        poll.register(line, select.POLLIN)
        poll.register(self._wake, select.POLLIN)
        while not self._closing:
            ready = dict(poll.poll(CATCH_UP * 1000))
            if self._owed:
                self._pay(line)
            if self._behind and not self._resting:
                self._behind = False  # before the state is read: any later change sets it again
                try:
                    if not line.send(self._state):
                        self._behind = True
                except Gone as error:
                    self._lost(error)
            if line.fileno() in ready and not self._listen(line):
                return

    def _listen(self, line: Packets[FromAgent]) -> bool:
        """Take one message and do what it asks. False if the agent has hung up."""
        try:
            said = line.receive()
        except Garbage:
            return True  # a newer agent may ask for more than this release knows
        except Gone as error:
            self._lost(error)
            return False
        if said is None:
            return True
        if isinstance(said, Ask):
            self._answer(said)
        elif self._heeds is not None:
            self._heed(self._heeds, said)
        return True

    def _heed(self, heeds: Heeds, said: Prepare | StopAt) -> None:
        try:
            if isinstance(said, StopAt):
                heeds.agree(said.step)
            else:
                self._insist(Promise(heeds.prepare(said)))
        except Exception:
            log.exception("holdfast: the agent's message about stopping could not be acted on")

    def _answer(self, ask: Ask) -> None:
        deadline = time.monotonic() + ask.timeout
        try:
            testimony = self._testify() if self._testify is not None else None
            problem = "nothing in this rank can testify" if testimony is None else ""
        except Exception as error:  # noqa: BLE001 - whatever it is, the agent must get an answer
            testimony, problem = None, f"{type(error).__name__}: {error}"
        if testimony is not None and len(testimony) > ANSWER_LIMIT:
            problem = f"the testimony has {len(testimony)} bytes, more than the {ANSWER_LIMIT} allowed"
            testimony = None
        if testimony is None:
            self._send(AnswerPart(ask.ask, 0, 0, problem[:CHUNK].encode(errors="replace")), 1.0)
            return
        parts = max(1, -(-len(testimony) // CHUNK))
        for index in range(parts):
            part = testimony[index * CHUNK : (index + 1) * CHUNK]
            if not self._send(AnswerPart(ask.ask, index, parts, part), max(0.0, deadline - time.monotonic())):
                return


def _count(into: list[float], seconds: float) -> None:
    into[0] += 1
    into[1] = max(into[1], seconds)
