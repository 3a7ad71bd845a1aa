"""Who holds whose replicas, where each file comes from, and which copies are given up. Pure.

Guarantee: pure, the same on every rank. With `factor` as served, each rank's shards lie on exactly that many
places, its own included, never twice on one; so any loss of `factor - 1` places leaves a copy of everything.
Each place holds the replicas of exactly `factor - 1` other places, and so of at most `factor - 1` times as
many ranks as the largest place has.

Places are ordered by their first rank, and the jump is counted in places: jump / (ranks of a place). If
they have unequal numbers of ranks, the number of the largest one counts for all. Places that are a jump apart
form a class, and a class is divided into groups of `factor` that hold each other's shards. What is left over
makes the last group of a class larger, and that one is a ring.

Groups in which every place holds every other's shards survive more than one ring of all n places would. The
loss of `factor` places at once costs shards only if they are one whole group, of which there are n / factor;
a ring has n neighbourhoods of that size, and losing any one of them costs shards.

After a resume (`duties`) every rank's shards are to lie where the next save would put them: on the place of
that rank and on those that hold its replicas. So the loss that replicas cover is covered again, what is made
again takes no more room than the next save would, and each copy has exactly one rank that sees to it. If a
checkpoint was saved by more ranks than there are now, the surplus ranks are counted from the first one again.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence

import msgspec

from holdfast.base import plural, size


class Replication(msgspec.Struct, frozen=True):
    targets: list[list[str]]
    """By rank: the places, besides its own, that hold its replica."""
    factor: int
    """On how many places each rank's shards lie, its own included: as asked, or as many as there are."""
    notes: list[str]
    """What was asked for and cannot be served, in words for the user."""


def replicate(places: Sequence[str], *, factor: int, jump: int, strict: bool = True) -> Replication:
    """The places that hold each rank's replica, where `places` says on which place each rank is.

    ValueError: the jump cannot be served. If not `strict`, for a world that has shrunk and must go on, such a
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
    return [f"{asked}: each local copy lies on {nodes}, and they must not all be lost at once"]


def _step(jump: int, of_a_node: int, nodes: int) -> int:
    """The jump in places, `of_a_node` ranks each."""
    if jump == 0:
        return 1
    if jump % of_a_node:
        raise ValueError(
            f"checkpoint.replication_jump is {jump} ranks, but a node has {of_a_node}, so it does not "
            f"lead to a whole node; set it to a multiple of {of_a_node}, or to 0 for the next node"
        )
    if jump // of_a_node >= nodes:
        raise ValueError(
            f"checkpoint.replication_jump is {jump} ranks, but there are only {nodes} nodes of {of_a_node}, "
            f"so it leads back to the same node; set it to at most {of_a_node * (nodes - 1)}, or to 0 "
            "for the next node"
        )
    return jump // of_a_node


def _classes(nodes: Sequence[str], step: int, factor: int) -> list[list[str]]:
    """Nodes that are `step` apart, at least `factor` in each class: classes that are too small are merged."""
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
    """The ranks, numbered as at the save, whose shards this rank sees to at its place; its own first.

    `places`: of each rank now, empty for one that has none; `targets`: the places of each rank's replicas.
    """
    here = places[rank]
    if not here:
        return []
    beside = [other for other, place in enumerate(places) if place == here]
    own, others = [], []
    for saved in range(saved_world):
        now = saved % len(places)
        if here == places[now]:
            own += [saved] if now == rank else []
        elif here in targets[now]:
            others.append(saved)
    return own + others[beside.index(rank) :: len(beside)]


# From what places really hold of a checkpoint to where each of its files comes from.
#
# Guarantee: pure, and the same on every rank, in whatever order places answered. A place is a source of a
# file only if it says that it holds it; what a place says of files that the checkpoint does not have counts
# for nothing. Where a source has not been verified, every file has exactly one rank that sees to it that all
# of it is verified (`share`). Each claim is looked at once, so the cost grows linearly with the ranks.


GLOBAL = "global"
"""The global tier as a source; no place has this name."""
NAMED = 4
"""How many are named before the rest is only counted."""


class Assembly(msgspec.Struct, frozen=True):
    sources: dict[str, list[str]]
    """By file of the checkpoint: the places that hold it."""
    in_global: bool
    """Whether the global tier has the checkpoint as well."""
    missing: list[str]
    """Files that have no source at all."""
    verified: bool = True
    """Whether the places have read all that they hold and found it right; if not, ranks that load it do."""

    @property
    def complete(self) -> bool:
        return not self.missing


def assemble(
    files: Sequence[str], held: Mapping[str, Collection[str]], *, in_global: bool, verified: bool = True
) -> Assembly:
    """Where a checkpoint of these files can come from; `held` is what each place has of them."""
    sources: dict[str, list[str]] = {path: [] for path in files}
    for place in sorted(held):
        for path in held[place]:
            found = sources.get(path)
            if found is not None and (not found or found[-1] != place):  # it may name a file twice
                found.append(place)
    missing = [] if in_global else [path for path, places in sources.items() if not places]
    return Assembly(sources, in_global, missing, verified)


def share(
    assembly: Assembly,
    places: Sequence[str],
    rank: int,
    *,
    saver: Callable[[str], int | None],
    saved_world: int,
) -> list[str]:
    """The files in which this rank verifies what loading them did not. `places`: the place of each rank.

    A file falls to the rank that saved it, if there are as many ranks as there were: it reads most of the
    file anyway, wherever that lies by now. Else it falls to a rank at a place that holds it.
    """
    world = len(places)
    at: dict[str, list[int]] = {}
    for other, place in enumerate(places):
        at.setdefault(place, []).append(other)
    mine = []
    for number, (path, held) in enumerate(assembly.sources.items()):
        if assembly.verified and held:
            continue
        who = saver(path)
        if who is None or who >= world or not (world == saved_world or places[who] in held):
            holders = [place for place in held if place in at]
            ranks = at[holders[number % len(holders)]] if holders else range(world)
            who = ranks[number % len(ranks)]
        if who == rank:
            mine.append(path)
    return mine


def order(assembly: Assembly, path: str, here: str, spread: int) -> list[str]:
    """The sources of one file in the order in which to try them: this place, its peers, the global tier.

    Each rank gives its number as `spread` and begins with a different peer, so that not all ask the same one.
    """
    places = assembly.sources[path]
    peers = [place for place in places if place != here]
    turn = spread % len(peers) if peers else 0
    own = [here] if len(peers) < len(places) else []
    return [*own, *peers[turn:], *peers[:turn], *([GLOBAL] if assembly.in_global else [])]


def describe_assembly(assembly: Assembly, nodes: Mapping[str, str], saved_at: Mapping[str, str]) -> list[str]:
    """Evidence for a decision, in a few lines. `nodes` names places; `saved_at`: which place saved a file."""
    own = peers = elsewhere = 0
    lost: dict[str, int] = {}
    for path, places in assembly.sources.items():
        saver = saved_at.get(path)
        if saver in places:
            own += 1
            continue
        if saver is not None:
            lost[saver] = lost.get(saver, 0) + 1
        if places:
            peers += 1
        elif assembly.in_global:
            elsewhere += 1
    counts = [
        (peers, "on peers only"),
        (elsewhere, "in the global tier only"),
        (len(assembly.missing), "nowhere"),
    ]
    first = f"{own} of {plural(len(assembly.sources), 'file')} on the node that saved them"
    lines = [", ".join([first, *(f"{count} {where}" for count, where in counts if count)])]
    if lost:
        losers = [
            f"{nodes.get(place, place)} ({plural(count, 'file')})" for place, count in sorted(lost.items())
        ]
        lines.append(f"no longer held where they were saved: {_some(losers)}")
    if assembly.missing:
        lines.append(f"no copy anywhere: {_some(assembly.missing)}")
    return lines


def _some(names: Sequence[str]) -> str:
    rest = f" and {len(names) - NAMED} more" if len(names) > NAMED else ""
    return ", ".join(names[:NAMED]) + rest


# What one place keeps of its local copies, and what it gives up for a new one.
#
# Guarantee: pure, and careful. The newest complete checkpoint on the line (it may be the only good one in
# memory) is never given up, nor is anything that is being drained, sent or read. What is on the line goes
# oldest first: nothing newer goes while something older that could go stays. Nothing within `keep` goes for a
# save that would still not fit: a save that cannot be made costs no older one.
#
# An incomplete checkpoint does not count as kept, so that it never pushes out one that a resume could use.


class HeldCheckpoint(msgspec.Struct, frozen=True):
    """All that a place holds of one checkpoint, own copies and replicas together."""

    checkpoint: str
    step: int
    nbytes: int
    on_line: bool
    complete: bool
    """As far as this place knows, the whole checkpoint was committed."""
    busy: bool
    """Being drained, sent or read."""


class Room(msgspec.Struct, frozen=True):
    """What to give up before a save, and whether the save then fits."""

    fits: bool
    drop: list[str]
    reasons: list[str]
    """One for each of `drop`."""
    why: str
    """Why it does not fit, and what to set; empty if it does."""


def make_room(held: Sequence[HeldCheckpoint], *, needed: int, free: int, limit: int, keep: int) -> Room:
    """Room for `needed` more bytes, if `free` are free now and all together may take `limit` (0: any).

    What is not on the line and what is older than the last `keep` go in any case.
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
    """Bytes that the local tier takes on a node for each of its ranks, if a rank's image has `image` bytes.

    Own images: the `keep` committed ones, the one that is being staged, and an older one that may still be
    drained. Replicas, for each copy beyond the rank's own: `keep`, and the one that is coming in; a place
    holds those of as many ranks as it has itself (see `replicate`).
    """
    return (keep + 2) * image + (factor - 1) * (keep + 1) * image


def _short(needed: int, free: int, used: int, limit: int) -> int:
    """How many bytes are missing; 0 or less if none are."""
    return max(needed - free, used + needed - limit if limit else 0)


def _sum(held: Iterable[HeldCheckpoint]) -> int:
    return sum(one.nbytes for one in held)


def _why(
    held: Sequence[HeldCheckpoint],
    stays: HeldCheckpoint | None,
    *,
    needed: int,
    free: int,
    limit: int,
    could: int,
) -> str:
    used = _sum(held)
    lines = [f"{size(needed)} are needed on this node and {size(max(free, 0))} are free"]
    if limit:
        lines.append(f"local copies take {size(used)} of the {size(limit)} that they may take")
    lines.append(f"giving up all that may go would free {size(could)}")
    if stays is not None:
        lines.append(f"{stays.checkpoint} ({size(stays.nbytes)}) stays, as the newest complete one")
    if busy := _sum(one for one in held if one.busy and one is not stays):
        lines.append(f"{size(busy)} are being drained, sent or read")
    # keep_last is not mentioned: what it keeps was counted among what may go.
    remedies = []
    if (missing := needed - free - could) > 0:
        remedies.append(
            f"give the node {size(missing)} more (a larger /dev/shm, a higher memory limit of the job)"
        )
    if limit and (enough := used - could + needed) > limit:
        remedies.append(f"set checkpoint.non_persistent_max_bytes to {enough} or more")
    remedy = " and ".join(remedies)
    return f"{'; '.join(lines)}. To make it fit, {remedy}, or lower checkpoint.replication_factor"
