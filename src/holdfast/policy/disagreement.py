"""Which ranks two computations of the same micro-batches accuse. Pure.

Every rank computes its own micro-batch and that of the rank before it. `differs[i]` says that the micro-batch
of rank i gave one loss there and another on rank i + 1 (the ranks form a ring).

Guarantee: where nothing differs nobody is accused. A device that computes wrongly spoils two comparisons, its
own and its neighbour's, and is among the accused, unless so much differs that it cannot be devices. Then it
is the method that does not suit (the model is split over ranks, results cannot be repeated to the tolerance,
or a step takes its data from elsewhere than its arguments), and nobody is accused.
With two ranks, one bad device and a method that does not suit look alike; only what held before in the same
attempt tells them apart.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec


class Disagreement(msgspec.Struct, frozen=True, kw_only=True):
    accused: list[int] = []
    suits: bool = True
    """Whether comparing between neighbours makes sense in this run."""


def judge(differs: Sequence[bool], *, held_before: bool) -> Disagreement:
    """`held_before`: there was a comparison in this attempt in which nothing differed."""
    world = len(differs)
    spoiled = [rank for rank in range(world) if differs[rank]]
    if not spoiled:
        return Disagreement()
    if len(spoiled) > max(2, world // 2) or (len(spoiled) == world and not held_before):
        return Disagreement(suits=False)
    # A rank that both its comparisons accuse explains both of them.
    common = {rank for rank in spoiled if world > 2 and differs[rank - 1]}
    accused = set(common)
    for rank in spoiled:
        pair = {rank, (rank + 1) % world}
        if not pair & common:
            accused |= pair
    return Disagreement(accused=sorted(accused))
