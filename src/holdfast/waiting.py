"""When a long wait is told, and in which words. Pure.

On a terminal one line is rewritten in place; elsewhere a line is written when the wait has turned out to be
one, and then at growing intervals, so that a night of waiting is a page of log.
"""

from __future__ import annotations

from typing import NamedTuple

SHORT = 3.0
"""Seconds: what is over by then is not worth a line."""
TOLD_AGAIN = (30.0, 60.0, 120.0, 300.0, 600.0, 1800.0, 3600.0)
"""Seconds into the wait at which it is told again; after the last one, as often as that."""
REWRITTEN = 1.0
"""Seconds after which the line on a terminal is rewritten."""


class Waiting(NamedTuple):
    """A wait that goes on."""

    what: str
    """What for, as it follows "waiting for"."""
    waited: float
    longest: float | None
    """Seconds in all; None if it has no limit."""


def in_words(waiting: Waiting) -> str:
    limit = "no limit" if waiting.longest is None else f"at most {span(waiting.longest)}"
    return f"waiting for {waiting.what}: {span(waiting.waited)} so far, {limit}"


def is_due(waited: float, told: float | None) -> bool:
    """Whether a line is due now. `told`: how long the wait had gone on when it was last told; None: never."""
    if told is None:
        return waited >= SHORT
    for at in TOLD_AGAIN:
        if told < at:
            return waited >= at
    return waited - told >= TOLD_AGAIN[-1]


def is_rewritten(waited: float, told: float | None) -> bool:
    """The same for a line that is rewritten in place."""
    return waited >= SHORT if told is None else waited - told >= REWRITTEN


def span(seconds: float) -> str:
    """In whole seconds, minutes or hours: what is rewritten every second has no decimals."""
    whole = round(max(seconds, 0.0))
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02d} s" if whole % 60 else f"{whole // 60} min"
    return f"{whole // 3600} h {whole % 3600 // 60:02d} min"
