"""Where the ranks of an attempt ran and where in the run it was, as far as records tell. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping

from holdfast.policy.budgets import PastAttempt
from holdfast.policy.rejection import Place

_PLACED = re.compile(r"(.*)\[(.*)\]")


def bad_places(attempt: PastAttempt) -> dict[int, Place]:
    """Where the ranks ran whose own results were bad."""
    places = places_of(attempt)
    found = attempt.rejection.bad if attempt.rejection is not None else []
    return {one.rank: places.get(one.rank, Place(one.node, one.device)) for one in found}


def places_of(attempt: PastAttempt) -> Mapping[int, Place]:
    """Where each rank ran: as the launcher placed it, or as the rank itself tells."""
    found: dict[int, Place] = {}
    placed = attempt.placement.split()
    for text in placed:
        match = _PLACED.fullmatch(text)
        each = max(1, attempt.world_size // len(placed))
        devices = match[2].split(",") if match else [""] * each
        found.update(enumerate((Place(match[1] if match else text, one) for one in devices), len(found)))
    told = attempt.rejection.ranks if attempt.rejection is not None else []
    found.update({one.rank: Place(one.node, one.device) for one in told if one.node})
    return found


def guilty_places(
    then: Mapping[int, Place], bad: Mapping[int, Place], now: Mapping[int, Place]
) -> tuple[set[int], set[Place]]:
    """The ranks that were bad there and are well elsewhere, and the places which the fault therefore follows.

    `then` and `bad`: where ranks ran whose results were bad, before and now; `now`: where each rank runs.
    """
    well = {rank for rank, place in then.items() if rank not in bad and now.get(rank, place) != place}
    guilty = {place for place in bad.values() if place in {then[one] for one in well}}
    if well and set(bad.values()) == set(then.values()):
        guilty = set(bad.values())  # several at once, and one rank went from one to the other
    return well, guilty


def describe_place(place: Place) -> str:
    return f"device {place.device} of {place.node}" if place.device else place.node


def list_ranks(ranks: Iterable[int]) -> str:
    numbers = sorted(ranks)
    return f"rank{'s' if len(numbers) != 1 else ''} {', '.join(map(str, numbers))}"


def step_of(checkpoint: str) -> int:
    """The step that a checkpoint's name tells; 0 if it tells none."""
    found = re.search(r"\d+", checkpoint)
    return int(found[0]) if found else 0
