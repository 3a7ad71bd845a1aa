"""Who holds whose replicas, and who makes lost copies again after a resume.

Guarantee: pure, the same on every rank. With `factor` as served, each rank's shards lie on exactly that many
places, its own included, never twice on one; so any loss of `factor - 1` places leaves a copy of everything.
Each place holds the replicas of exactly `factor - 1` other places, and so of no more ranks than `factor - 1`
times those of the place that has most.

Places are ordered by their first rank, and the jump is counted in places: jump / (ranks of a place). Where
they have unequal numbers of ranks, the one with most says how many a place has. Places that are a jump apart
form a class, and a class is divided into groups of `factor` that hold each other's shards. What is left over
makes the last group of a class larger, and that one is a ring.

Groups in which all hold all survive more than one ring of all n places would. `factor` places lost at once
cost something only if they are one whole group, of which there are n / factor; a ring has n neighbourhoods of
that size, each of which is the end of something.

After a resume (`duties`) every rank's shards are to lie where the next save would put them: on the place of
that rank and on those that hold its replicas. So the loss that replicas cover is covered again, what is made
again takes no more room than the next save would, and each copy has exactly one rank that sees to it. Where a
checkpoint was saved by more ranks than there are now, the ones too many count on from the first again.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence

import msgspec

from holdfast.journal.render import plural


class Replication(msgspec.Struct, frozen=True):
    targets: list[list[str]]
    """By rank: the places, besides its own, that hold its replica."""
    factor: int
    """On how many places each rank's shards lie, its own included: as asked, or as many as there are."""
    notes: list[str]
    """What was asked and cannot be served, in words for the user."""


def replicate(places: Sequence[str], *, factor: int, jump: int, strict: bool = True) -> Replication:
    """The places that hold each rank's replica, where `places` says on which place each rank is.

    ValueError: the jump cannot be served. Not `strict`, for a world that has shrunk and must go on: such a
    jump is noted, and the next places are taken.
    """
    if factor < 1 or jump < 0:
        raise ValueError(
            "checkpoint.replication_factor must be 1 or more and checkpoint.replication_jump 0 or more; "
            f"they are {factor} and {jump}"
        )
    nodes = list(dict.fromkeys(places))
    served = max(1, min(factor, len(nodes)))
    notes = _too_few(len(nodes), factor)
    if served == 1:
        return Replication([[] for _ in places], served, notes)

    of_a_node = max(Counter(places).values())
    try:
        step = _step(jump, of_a_node, len(nodes))
    except ValueError as error:
        if strict:
            raise
        step = 1
        notes.append(f"{error}. Until then replicas go to the next nodes")
    if step > len(nodes) // served:
        notes.append(
            f"checkpoint.replication_jump is {jump} ranks, but on {len(nodes)} nodes of {of_a_node} not "
            f"every node has {plural(served - 1, 'other')} that far away: some replicas are nearer. A jump "
            f"of at most {len(nodes) // served * of_a_node} avoids this"
        )
    targets: dict[str, list[str]] = {}
    for members in _classes(nodes, step, served):
        for group in _groups(members, served):
            for at, node in enumerate(group):
                targets[node] = [group[(at + turn) % len(group)] for turn in range(1, served)]
    return Replication([list(targets[place]) for place in places], served, notes)


def survives(replication: Replication, places: Sequence[str], lost: Collection[str]) -> bool:
    """Whether every rank's shards are still somewhere when these places are gone."""
    return all(
        any(place not in lost for place in (own, *targets))
        for own, targets in zip(places, replication.targets, strict=True)
    )


def _too_few(nodes: int, factor: int) -> list[str]:
    if factor == 1 or nodes >= factor or not nodes:
        return []
    asked = f"checkpoint.replication_factor is {factor}, but the ranks are on {plural(nodes, 'node')}"
    if nodes == 1:
        return [f"{asked}: there are no replicas, and local copies do not survive the loss of their node"]
    return [f"{asked}: each local copy lies on {nodes}, and not all of them may be lost at once"]


def _step(jump: int, of_a_node: int, nodes: int) -> int:
    """The jump in places, `of_a_node` ranks each."""
    if jump == 0:
        return 1
    if jump % of_a_node:
        raise ValueError(
            f"checkpoint.replication_jump is {jump} ranks, but a node has {of_a_node}, so that it leads to "
            f"no whole node further on; set it to a multiple of {of_a_node}, or to 0 for the next node"
        )
    if jump // of_a_node >= nodes:
        raise ValueError(
            f"checkpoint.replication_jump is {jump} ranks, but there are only {nodes} nodes of {of_a_node}, "
            f"so that it leads back to the same node; set it to at most {of_a_node * (nodes - 1)}, or to 0 "
            "for the next node"
        )
    return jump // of_a_node


def _classes(nodes: Sequence[str], step: int, factor: int) -> list[list[str]]:
    """Nodes that are `step` apart, at least `factor` in each class: too small ones are put together."""
    classes: list[list[str]] = []
    for first in range(step):
        members = nodes[first::step]
        if classes and len(classes[-1]) < factor:
            classes[-1] += members
        else:
            classes.append(list(members))
    if len(classes) > 1 and len(classes[-1]) < factor:
        classes[-2:] = [classes[-2] + classes[-1]]
    return classes


def _groups(members: Sequence[str], factor: int) -> list[Sequence[str]]:
    """`factor` in each, and up to 2 * `factor` - 1 in the last."""
    last = (len(members) // factor - 1) * factor
    return [members[cut : cut + factor] for cut in range(0, last, factor)] + [members[last:]]


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
