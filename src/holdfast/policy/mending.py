"""Which copies of the checkpoint that a run came from have to lie where, after a resume.

Guarantee: pure, and the same on every rank. Every rank's shards are to lie where the next save would put
them: on the place of that rank and on those that hold its replicas. So the loss that replicas cover is
covered again, what is made again takes no more room than the next save would, and each copy has exactly one
rank that sees to it. Where a checkpoint was saved by more ranks than there are now, the ones too many count
on from the first again.
"""

from __future__ import annotations

from collections.abc import Sequence


def duties(
    places: Sequence[str], targets: Sequence[Sequence[str]], *, saved_world: int, rank: int
) -> list[int]:
    """The ranks, as they were when it was saved, whose shards this rank sees to at its place; its own first.

    `places`: of each rank now, empty for one that has none; `targets`: the places of each rank's replicas.
    """
    here = places[rank]
    if not here:
        return []
    beside = [one for one, place in enumerate(places) if place == here]
    own, others = [], []
    for saved in range(saved_world):
        now = saved % len(places)
        if here == places[now]:
            own += [saved] if now == rank else []
        elif here in targets[now]:
            others.append(saved)
    return own + others[beside.index(rank) :: len(beside)]
