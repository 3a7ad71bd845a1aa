"""From what places really hold of a checkpoint to where each of its files comes from.

Guarantee: pure, and the same on every rank, in whatever order places answered. A place is a source of a file
only if it says that it holds it; what a place says of files that the checkpoint does not have counts for
nothing. Where a source has not been verified, every file has exactly one rank that sees to it that all of it
is (`share`). Each claim is looked at once, so that ten thousand ranks take as much longer as they are more.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence

import msgspec

from holdfast.journal.render import plural

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
    """Whether the places have read what they hold, all of it, and found it right; if not, who loads does."""

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
    """The files of which this rank verifies what loading them did not. `places`: of each rank.

    Who saved a file reads most of it anyway, wherever it lies by now, if there are as many ranks as there
    were; else somebody does at a place that holds it.
    """
    world = len(places)
    at: dict[str, list[int]] = {}
    for one, place in enumerate(places):
        at.setdefault(place, []).append(one)
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

    Each rank gives its number as `spread` and begins with another peer, so that not all ask the same one.
    """
    places = assembly.sources[path]
    peers = [place for place in places if place != here]
    turn = spread % len(peers) if peers else 0
    own = [here] if len(peers) < len(places) else []
    return [*own, *peers[turn:], *peers[:turn], *([GLOBAL] if assembly.in_global else [])]


def describe(assembly: Assembly, nodes: Mapping[str, str], saved_at: Mapping[str, str]) -> list[str]:
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
        told = [
            f"{nodes.get(place, place)} ({plural(count, 'file')})" for place, count in sorted(lost.items())
        ]
        lines.append(f"no longer held where they were saved: {_some(told)}")
    if assembly.missing:
        lines.append(f"no copy anywhere: {_some(assembly.missing)}")
    return lines


def _some(names: Sequence[str]) -> str:
    rest = f" and {len(names) - NAMED} more" if len(names) > NAMED else ""
    return ", ".join(names[:NAMED]) + rest
