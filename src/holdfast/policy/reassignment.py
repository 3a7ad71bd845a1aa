"""Which process trains under which rank in the next iteration of an in-process restart. Pure.

Guarantees: no process is given two ranks, none that is not usable is given any, and who stays keeps its rank
unless the world shrinks. A lost rank's place is taken by a reserve of its own node if there is one. The
answer has `wanted` ranks; fewer, but never fewer than `least`, only where that is allowed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet

import msgspec


class Assignment(msgspec.Struct, frozen=True, kw_only=True):
    """Who is who next."""

    order: list[int]
    """Members by rank."""
    reserves: list[int]
    promoted: list[int] = []
    """Those who were no part of it before."""
    shrinks: bool = False


class Shortage(msgspec.Struct, frozen=True, kw_only=True):
    """Too few members are left."""

    usable: int
    needed: int

    @property
    def reason(self) -> str:
        return f"{self.usable} ranks are left that can train, and {self.needed} are needed"


def reassign(
    nodes: Mapping[int, str],
    present: AbstractSet[int],
    before: Sequence[int],
    *,
    wanted: int,
    least: int | None,
    whole_nodes: bool,
) -> Assignment | Shortage:
    """The next order of members.

    `nodes`: each member that there ever was, and its node; `before`: the order of the iteration before, empty
    for the first one; `whole_nodes`: a node of which a member is missing is not used.
    """
    broken = {nodes[member] for member in nodes if member not in present} if whole_nodes else set()
    usable = [member for member in sorted(present) if nodes[member] not in broken]
    if not before:
        if len(usable) < wanted:
            return _fewer(usable, [], wanted, least)
        return Assignment(order=usable[:wanted], reserves=usable[wanted:])
    taken = set(before)
    spare = [member for member in usable if member not in taken]
    stays = set(usable) & taken
    order: list[int | None] = [member if member in stays else None for member in before]
    order += [None] * (wanted - len(order))  # it had shrunk before
    promoted: list[int] = []
    for near in (True, False):  # first those on the lost one's own node, so that the rest stays as it is
        for rank, member in enumerate(order):
            lost_from = nodes[before[rank]] if rank < len(before) else None
            found = next((one for one in spare if not near or nodes[one] == lost_from), None)
            if member is None and found is not None:
                order[rank] = found
                spare.remove(found)
                promoted.append(found)
    filled = [member for member in order if member is not None]
    if len(filled) < wanted:
        return _fewer(filled, promoted, wanted, least)
    return Assignment(order=filled, reserves=spare, promoted=promoted)


def _fewer(usable: list[int], promoted: list[int], wanted: int, least: int | None) -> Assignment | Shortage:
    if least is None or len(usable) < max(1, least):
        return Shortage(usable=len(usable), needed=wanted if least is None else least)
    return Assignment(order=usable, reserves=[], promoted=promoted, shrinks=True)
