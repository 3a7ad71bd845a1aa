"""What one place keeps of its local copies, and what it gives up for a new one.

Guarantee: pure, and careful. Never given up are the newest complete checkpoint on the line (it may be the
only good one in memory) and anything that is being drained, sent or read. What is on the line goes oldest
first: nothing newer goes while something older stays that could go. Nothing within `keep` goes for a save
that would not fit even so: a save that cannot be made costs no older one.

What is not complete does not count as kept, so that it never pushes out one that a resume could use.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import msgspec

from holdfast.journal.render import size


class Held(msgspec.Struct, frozen=True):
    """All that a place holds of one checkpoint, own copies and replicas together."""

    checkpoint: str
    step: int
    nbytes: int
    on_line: bool
    complete: bool
    """As far as this place knows the whole checkpoint was committed."""
    busy: bool
    """Being drained, sent or read."""


class Room(msgspec.Struct, frozen=True):
    """What to give up before a save, and whether the save then fits."""

    fits: bool
    drop: list[str]
    reasons: list[str]
    """One for each."""
    why: str
    """Why it does not fit, and what to set; empty if it does."""


def make_room(held: Sequence[Held], *, needed: int, free: int, limit: int, keep: int) -> Room:
    """Room for `needed` bytes more, where `free` are free now and all together may take `limit` (0: any).

    What is not on the line and what is older than the last `keep` goes in any case.
    """
    oldest_first = sorted(held, key=lambda one: (one.step, one.checkpoint))
    line = [one for one in oldest_first if one.on_line]
    good = [one for one in line if one.complete]
    stays = good[-1] if good else None

    given_up = {one.checkpoint: "not on the line" for one in oldest_first if not one.on_line and not one.busy}
    keep = max(keep, 1)
    if len(good) >= keep:
        beyond = line[: line.index(good[-keep])]
        given_up |= {one.checkpoint: f"older than the last {keep}" for one in beyond if not one.busy}

    used = _sum(held)
    freed = _sum(one for one in held if one.checkpoint in given_up)
    for_want_of_room: dict[str, str] = {}
    left = [one for one in line if one.checkpoint not in given_up and not one.busy and one is not stays]
    for one in left:
        if _short(needed, free + freed, used - freed, limit) <= 0:
            break
        for_want_of_room[one.checkpoint] = f"its memory is needed: {size(needed)} for a newer one"
        freed += one.nbytes
    fits = _short(needed, free + freed, used - freed, limit) <= 0
    if fits:
        given_up |= for_want_of_room
    why = "" if fits else _why(held, stays, needed=needed, free=free, limit=limit, could=freed)
    drop = [one.checkpoint for one in oldest_first if one.checkpoint in given_up]
    return Room(fits, drop, [given_up[checkpoint] for checkpoint in drop], why)


def memory(*, image: int, keep: int, factor: int) -> int:
    """Bytes that the local tier takes on a node for each of its ranks, when a rank's image has so many.

    Own images: the `keep` committed ones, the one that is being staged, and an older one that may still be
    drained. Replicas, for each copy beyond the own one: `keep`, and the one that is coming in; a place holds
    those of as many ranks as it has itself (policy/replication.py).
    """
    return (keep + 2) * image + (factor - 1) * (keep + 1) * image


def _short(needed: int, free: int, used: int, limit: int) -> int:
    """How many bytes are missing; 0 or less if none are."""
    return max(needed - free, used + needed - limit if limit else 0)


def _sum(held: Iterable[Held]) -> int:
    return sum(one.nbytes for one in held)


def _why(held: Sequence[Held], stays: Held | None, *, needed: int, free: int, limit: int, could: int) -> str:
    used = _sum(held)
    told = [f"{size(needed)} are needed on this node and {size(max(free, 0))} are free"]
    if limit:
        told.append(f"local copies take {size(used)} of the {size(limit)} that they may")
    told.append(f"giving up all that may go would free {size(could)}")
    if stays is not None:
        told.append(f"{stays.checkpoint} ({size(stays.nbytes)}) stays, as the newest complete one")
    if busy := _sum(one for one in held if one.busy and one is not stays):
        told.append(f"{size(busy)} are being drained, sent or read")
    # No word of keep_last: what it keeps was counted among what may go.
    remedies = []
    if (missing := needed - free - could) > 0:
        remedies.append(
            f"give the node {size(missing)} more (a larger /dev/shm, a higher memory limit of the job)"
        )
    if limit and (enough := used - could + needed) > limit:
        remedies.append(f"set checkpoint.non_persistent_max_bytes to {enough} or more")
    remedy = " and ".join(remedies)
    return f"{'; '.join(told)}. To make it fit, {remedy}, or lower checkpoint.replication_factor"
