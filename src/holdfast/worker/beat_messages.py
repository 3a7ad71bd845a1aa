"""What a rank and its agent say to each other: one msgpack message a packet.

A `State` is complete: whichever of them arrives says everything, so any before it may be lost.
"""

from __future__ import annotations

import msgspec

from holdfast.policy.timeouts import Limits, Observed, OpenSection

SOCKET = "monitor.sock"
PACKET_LIMIT = 64 * 1024
"""Bytes of one packet; a longer one is refused by its reader."""
CHUNK = 32 * 1024
ANSWER_LIMIT = 16 * 1024 * 1024
"""Bytes of a whole answer."""
LONGEST_NAME = 100
"""Characters of a section's name."""


class Hello(msgspec.Struct, frozen=True, array_like=True, tag="hello"):
    """The first message of a rank."""

    pid: int
    at: float
    limits: Limits | None = None
    """By which it is watched; None for the agent's own."""
    learn: bool = False
    """Whether its limits are to be tightened by what was learned."""
    defers_sigterm: bool = False
    """SIGTERM does not end this process: it takes that for a request to save and stop. Who wants it to end
    without that, as after a failure, has to kill it."""


class State(msgspec.Struct, array_like=True, tag="state"):
    """Where a rank is: after every change, and as a mere sign of life."""

    at: float
    step: int
    trained: bool
    sectioned: bool
    left: float
    sections: list[OpenSection]
    dropped: int
    """Messages that could not be sent so far, because the agent did not read."""
    exiting: bool = False
    """The loop has ended; what the script does now is watched by limits of its own."""


class Seen(msgspec.Struct, frozen=True, array_like=True, tag="seen"):
    """What the rank measured in this attempt, from its first step on."""

    sections: dict[str, Observed]
    out_of_section: Observed


class Answer(msgspec.Struct, frozen=True, array_like=True, tag="answer"):
    """A part of the answer to `Ask` number `ask`."""

    ask: int
    index: int
    parts: int
    """0: there is no answer, and `data` says why."""
    data: bytes


class Bye(msgspec.Struct, frozen=True, array_like=True, tag="bye"):
    """Training has ended: what comes now is not watched."""

    at: float


class Wish(msgspec.Struct, frozen=True, array_like=True, tag="wish"):
    """This rank was asked to stop (a signal reached it): the whole run is to."""

    why: str
    now: bool = False
    """Whether it was asked a second time: without a save."""
    signal: str = ""
    """`SIGTERM` and such."""
    source: str = "signal"
    """One of policy.stopping.Source. What is no signal concerns the whole job, never one node."""
    sender: str = ""
    """Of the signal, in words; empty if that is not known."""


class Promise(msgspec.Struct, frozen=True, array_like=True, tag="promise"):
    """The answer to `Prepare`: this rank does not go on after `step` before it knows where all stop.

    0 from a rank that has not begun its first step yet: it will stop before it, if the others let it.
    """

    step: int


class Halted(msgspec.Struct, frozen=True, array_like=True, tag="halted"):
    """This rank has stopped as agreed, and its part of the state is safe; its process is about to end."""

    step: int


FromRank = Hello | State | Seen | Answer | Bye | Wish | Promise | Halted


class Ask(msgspec.Struct, frozen=True, array_like=True, tag="ask"):
    """The agent wants to know what the rank is doing; also while its main thread hangs."""

    ask: int
    timeout: float


class Prepare(msgspec.Struct, frozen=True, array_like=True, tag="prepare"):
    """The run is to stop: promise a step (see `Promise`), and from now on mind the deadline."""

    why: str
    seconds: float | None = None
    """Until this rank must have ended; None for no limit."""
    ago: float = 0.0
    """Seconds since it was asked for."""


class StopAt(msgspec.Struct, frozen=True, array_like=True, tag="stop_at"):
    """Every rank has promised: all stop after this step, or at once if they have done it."""

    step: int


FromAgent = Ask | Prepare | StopAt
