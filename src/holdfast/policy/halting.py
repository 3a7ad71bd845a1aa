"""What comes of the ranks' promises: after which step all stop, or that nobody is left who could be asked;
and whether it is the run that stops, or a node that leaves it.

Guarantee: pure. A step is named only when every rank that can be asked has promised, so nobody is past it. A
rank that cannot be asked (its script does not use Run, or it has not come so far) never holds a stop up for
longer than `HELLO`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from collections.abc import Set as AbstractSet

import msgspec

from holdfast.exit_codes import ExitCode
from holdfast.policy.stopping import stop_step

HELLO = 5.0
"""Seconds for which a rank that has not said hello is waited for while others are in training already."""


class NodeWord(msgspec.Struct, frozen=True, kw_only=True):
    """What one node's ranks have promised together."""

    promised: int | None = None
    """The highest promise; None if no rank could be asked."""
    mute: int = 0
    """Ranks that run and cannot be asked."""


class Agreed(msgspec.Struct, frozen=True, kw_only=True):
    """What all nodes do."""

    step: int | None = None
    """After which the ranks stop; None if there is none to be told."""
    end: bool = False
    """Whether the workers are ended as they are."""
    code: int = int(ExitCode.STOPPED)
    """What the launcher ends with then."""


def leaves(*, leads: bool, elastic: bool) -> bool:
    """Whether a signal to a node's agent means that node alone: one that the group can do without."""
    return elastic and not leads


def goes_on(nodes: int, leaving: int, *, without_leader: bool, min_nodes: int) -> bool:
    """Whether a group of so many nodes goes on when some leave."""
    return not without_leader and nodes - leaving >= min_nodes


def node_word(
    running: AbstractSet[int],
    there: AbstractSet[int],
    done: AbstractSet[int],
    promises: Mapping[int, int],
    waited: float,
) -> NodeWord | None:
    """The word of a node whose ranks `running` have not ended; None while it must wait for one of them.

    `there` can be asked, `done` have finished their training; `waited` seconds have passed.
    """
    if any(rank not in promises for rank in running & there):
        return None
    mute = {rank for rank in running if rank not in there and rank not in done and rank not in promises}
    highest = max(promises.values(), default=None)
    if mute and highest and waited < HELLO:
        return None
    return NodeWord(promised=highest, mute=len(mute))


def agree(words: Iterable[NodeWord]) -> Agreed:
    """What follows from the words of all nodes."""
    given = list(words)
    promises = [word.promised for word in given if word.promised is not None]
    mute = sum(word.mute for word in given)
    if not promises:
        return Agreed(end=mute > 0, code=int(ExitCode.STOPPED_UNSAVED if mute else ExitCode.STOPPED))
    step = stop_step(promises)
    if mute and step == 0:
        return Agreed(end=True)  # nothing was trained yet: there is nothing that could be lost
    return Agreed(step=step)
