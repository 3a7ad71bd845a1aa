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


FromRank = Hello | State | Seen | Answer | Bye


class Ask(msgspec.Struct, frozen=True, array_like=True, tag="ask"):
    """The agent wants to know what the rank is doing; also while its main thread hangs."""

    ask: int
    timeout: float
