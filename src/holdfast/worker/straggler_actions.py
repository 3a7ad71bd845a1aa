"""What is done about ranks that are named: all are told, and about one of them more is done."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

import msgspec

from holdfast.journal.base import Event
from holdfast.policy.straggler_times import Named
from holdfast.speaking import is_taken, say_as_rank

log = logging.getLogger("holdfast")

TOLD, STOP, EXCLUDE = "told", "stop", "exclude"


def to_the_log(line: str) -> None:
    log.info("holdfast: %s", line)


def to_the_terminal(line: str) -> None:
    """Where nobody has set up logging, a line of level INFO would reach nobody."""
    if log.isEnabledFor(logging.INFO) and is_taken(log):
        to_the_log(line)
    else:
        say_as_rank(line)


class Fate(msgspec.Struct, frozen=True):
    """What comes of one that is named."""

    named: Named
    then: str
    """told, stop or exclude."""
    why: str


class Actions(msgspec.Struct, frozen=True, kw_only=True):
    """What a run does about a rank that is named. `exclude` is called on all ranks, the others on rank 0."""

    tell: Callable[[Event], None]
    say: Callable[[str], None] = to_the_log
    """A line for people, without a warning in it."""
    stop: Callable[[str], None] | None = None
    exclude: Callable[[Named, int], None] | None = None
    why_not: Callable[[Named], str] | None = None
    """Why this one is not to be excluded; empty if it is."""

    def fates(self, fresh: Sequence[Named]) -> list[Fate]:
        """In the order given. With the next attempt everything is measured anew, so one is enough."""
        then = EXCLUDE if self.exclude is not None else STOP if self.stop is not None else TOLD
        refused = [self.why_not(one) if then == EXCLUDE and self.why_not else "" for one in fresh]
        free = [one for one, why in zip(fresh, refused, strict=True) if not why]
        worst = max(free, key=lambda one: one.share, default=None)
        found = []
        for one, why in zip(fresh, refused, strict=True):
            if then == EXCLUDE and worst is not None and one is not worst:
                why = why or f"one at a time is excluded, now {worst.key}"
            told = f"{one.describe()}; {why}" if why else one.describe()
            found.append(Fate(one, then if one is worst else TOLD, told))
        return found
