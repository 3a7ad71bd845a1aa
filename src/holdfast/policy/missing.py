"""Which ranks are missing from the collective that others wait in.

Guarantee: pure, and the same answer in whatever order the ranks are given. A rank is called missing only if
it testified that it has not come so far; one that could not testify is named as such, never accused.

Every rank enters the collectives of a process group in one order and counts them, each backend of the group
for itself. So who waits in number 412
waits for those members that have entered fewer. They may be waiting themselves, in another group: the ranks
to look at first are those that others wait for and that wait for nobody.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import msgspec


class Position(msgspec.Struct, frozen=True, kw_only=True):
    """Where one rank stands in one process group."""

    group: str
    backend: str = ""
    """Which of the group's backends counts here; empty if only the group's own count is known."""
    entered: int
    """Number of the last collective that it entered; 0 if none."""
    name: str = ""
    """Of the collective that it waits in, or else of the last one; empty if only the number is known."""
    waits_in: int = 0
    """Number of the first collective that it entered and that is not done; 0 if none is known."""
    members: tuple[int, ...] = ()
    """Global ranks of the group; empty if they are not known."""
    shapes: str = ""


class Missing(msgspec.Struct, frozen=True, kw_only=True):
    """A collective that some ranks wait in."""

    group: str
    backend: str = ""
    number: int
    name: str
    waiting: tuple[int, ...]
    missing: tuple[int, ...]
    """Members that testified and have not entered it."""
    silent: tuple[int, ...] = ()
    """Members that could not testify: they may be missing too."""
    differ: tuple[str, ...] = ()
    """More than one: what the waiting ranks call it. They do not all do the same thing."""
    certain: bool = True
    """False: nobody could say that it waits, only how many collectives it entered."""


Positions = Mapping[int, Sequence[Position] | None]
"""Per rank; None for one that could not testify."""


def find_missing(positions: Positions) -> list[Missing]:
    """For every group that somebody waits in: the first collective waited in, and who is not there.

    If nobody is known to wait anywhere (no flight recorder), groups that ranks have come differently far in.
    """
    return _find(positions, waits=True) or [one for one in _find(positions, waits=False) if one.missing]


def _find(positions: Positions, *, waits: bool) -> list[Missing]:
    spoken = {
        rank: {(p.group, p.backend): p for p in said} for rank, said in positions.items() if said is not None
    }
    unheard = {rank for rank, said in positions.items() if said is None}
    found = []
    for key in sorted({key for said in spoken.values() for key in said}):
        group, backend = key
        here = {rank: said[key] for rank, said in spoken.items() if key in said}
        numbers = {rank: position.waits_in if waits else position.entered for rank, position in here.items()}
        known = [number for number in numbers.values() if number > 0]
        if not known:
            continue
        number = min(known) if waits else max(known)
        # Where members are not known, only those that have used the group count, and whoever is silent.
        named = {rank for position in here.values() for rank in position.members}
        members = (named & (set(spoken) | unheard)) if named else set(here) | unheard
        waiting = sorted(rank for rank in here if numbers[rank] == number)
        absent = sorted(rank for rank in members & set(spoken) if _entered(spoken[rank], key) < number)
        names = sorted({here[rank].name for rank in waiting if here[rank].name})
        found.append(
            Missing(
                group=group,
                backend=backend,
                number=number,
                name=names[0] if names else "",
                waiting=tuple(waiting),
                missing=tuple(absent),
                silent=tuple(sorted(members & unheard)),
                differ=tuple(names) if len(names) > 1 else (),
                certain=waits,
            )
        )
    return found


def _entered(said: Mapping[tuple[str, str], Position], key: tuple[str, str]) -> int:
    """How far a rank has come. Entries are recorded for a while only; then the group's own count remains."""
    group, backend = key
    if key in said:
        fits = [said[key]]
    else:
        fits = [p for p in said.values() if p.group == group and "" in (backend, p.backend)]
    return max((max(position.entered, position.waits_in) for position in fits), default=0)


def suspects(positions: Positions, found: Sequence[Missing] | None = None) -> tuple[int, ...]:
    """Ranks that others wait for and that wait for nobody; else the silent ones that may be waited for."""
    found = find_missing(positions) if found is None else found
    waiting = {rank for one in found for rank in one.waiting}
    absent = {rank for one in found for rank in one.missing}
    silent = {rank for one in found for rank in one.silent}
    return tuple(sorted(absent - waiting or silent))


def describe(one: Missing) -> str:
    """`ranks 3, 5 did not reach the all_reduce that ranks 0-2, 4 wait in`."""
    what = f"the {one.name or 'collective'}"
    those = ranks(one.waiting)
    wait = "wait" if len(one.waiting) > 1 else "waits"
    if not one.certain:
        text = f"{ranks(one.missing)} did not reach {what} that {those} did"
    elif one.missing:
        text = f"{ranks(one.missing)} did not reach {what} that {those} {wait} in"
    elif one.silent:
        text = f"{those} {wait} in {what}"
    else:
        text = f"all ranks that are known reached {what}, and {those} still {wait} in it"
    if one.silent:
        text += f"; {ranks(one.silent)} could not say where {'they are' if len(one.silent) > 1 else 'it is'}"
    if one.differ:
        text += f"; they do not do the same there: {', '.join(one.differ)}"
    return text


def ranks(numbers: Iterable[int]) -> str:
    """`rank 3`, `ranks 0-2, 4`, `no rank`."""
    spans: list[list[int]] = []
    for number in sorted(set(numbers)):
        if spans and number == spans[-1][1] + 1:
            spans[-1][1] = number
        else:
            spans.append([number, number])
    if not spans:
        return "no rank"
    words = [str(low) if low == high else f"{low}-{high}" for low, high in spans]
    many = len(spans) > 1 or spans[0][0] != spans[0][1]
    return f"{'ranks' if many else 'rank'} {', '.join(words)}"
